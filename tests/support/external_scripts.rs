//! Runs the servers and clients of tests/external: short programs around third-party libraries.
//!
//! The programs run in the virtual environment that `make parts` creates. A server prints its address; a client runs its
//! checks, and a failed check fails the test.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;

use super::DEADLINE;
use super::external_servers::program;

/// Timeout of a client for all of its checks. Each check has its own timeout.
const ALL_CHECKS_S: &str = "300";

/// A server that runs until the test ends.
pub struct ScriptServer {
    pub address: SocketAddr,
    child: Child,
}

impl ScriptServer {
    pub fn start(name: &str, arguments: &[impl AsRef<str>]) -> ScriptServer {
        ScriptServer::run(name, python(name, arguments))
    }

    /// A server with the libraries of another environment.
    pub fn start_of(part: &str, name: &str) -> ScriptServer {
        ScriptServer::run(name, python_of(part, name, &[] as &[&str]))
    }

    fn run(name: &str, mut script: Command) -> ScriptServer {
        let mut child = script.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, lines_read) = channel();
        // Later output is not used, but has to be read, or the process would block.
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        let first = lines_read.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("{name} does not start"));
        let address = first.strip_prefix("listening on ").and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("{name} printed {first:?}"));
        ScriptServer { address, child }
    }
}

impl Drop for ScriptServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a client; fails if one of its checks fails.
#[track_caller]
pub fn run_checks(name: &str, arguments: &[impl AsRef<str>]) {
    run_to_end(&python(name, arguments), Path::new("."));
}

/// Runs a client with the libraries of another environment, in a folder that it may write to.
#[track_caller]
pub fn run_checks_of(part: &str, folder: &Path, name: &str, arguments: &[impl AsRef<str>]) {
    run_to_end(&python_of(part, name, arguments), folder);
}

#[track_caller]
fn run_to_end(script: &Command, folder: &Path) {
    let name = script.get_args().next().unwrap_or_default().display();
    let output = Command::new(program("timeout"))
        .current_dir(folder)
        .arg(ALL_CHECKS_S)
        .arg(script.get_program())
        .args(script.get_args())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stdout.contains("FAILED"), "{name}: {}\n{stdout}{stderr}", output.status);
}

/// A program of tests/external.
pub fn python(name: &str, arguments: &[impl AsRef<str>]) -> Command {
    python_of("clients", name, arguments)
}

/// A program of tests/external with the libraries of `tests/external/PART.txt`.
fn python_of(part: &str, name: &str, arguments: &[impl AsRef<str>]) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let python: PathBuf = root.join(".parts").join(part).join("bin/python");
    assert!(python.is_file(), "the Python clients are missing; `make parts` installs them");
    let mut command = Command::new(python);
    command.arg(root.join("external").join(name)).args(arguments.iter().map(AsRef::as_ref));
    command
}
