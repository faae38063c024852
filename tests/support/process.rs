//! The real binary as a process: signals, exit codes, and output.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::{fs, thread};

use rustix::process::{Pid, Signal, kill_process_group};

use super::client::{Client, HttpResponse};
use super::gateway::with_listen;
use super::metrics_parser::Exposition;
use super::{TempDir, eventually};

pub const BINARY: &str = env!("CARGO_BIN_EXE_transom");

/// A process in its own process group. Dropping it kills the whole group, including processes that this process has started,
/// such as those of an upgrade.
pub struct ProcessGroup(Child);

impl ProcessGroup {
    pub fn spawn(command: &mut Command) -> ProcessGroup {
        ProcessGroup(command.process_group(0).spawn().unwrap())
    }
}

impl Deref for ProcessGroup {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for ProcessGroup {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        // An error means that all processes of the group have ended.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.0.wait();
    }
}

pub struct Process {
    child: ProcessGroup,
    printed: Arc<Mutex<Vec<String>>>,
    pub http: SocketAddr,
    pub https: Option<SocketAddr>,
    pub admin: SocketAddr,
    pub scratch: TempDir,
}

impl Process {
    pub fn spawn(toml: &str) -> Process {
        Process::spawn_command(Command::new(BINARY), toml, TempDir::new())
    }

    /// Like `spawn`, with a clients file beside the configuration.
    pub fn spawn_with(toml: &str, clients: &str) -> Process {
        let scratch = TempDir::new();
        scratch.write("clients.toml", clients);
        Process::spawn_command(Command::new(BINARY), toml, scratch)
    }

    /// Like `spawn`, through a command that runs the binary, such as one that fakes the time.
    pub fn spawn_command(mut command: Command, toml: &str, scratch: TempDir) -> Process {
        let file = scratch.write("gateway.toml", with_listen(toml));
        let log = fs::File::create(scratch.path().join("stderr")).unwrap();
        command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = ProcessGroup::spawn(&mut command);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let messages = || fs::read_to_string(scratch.path().join("stderr")).unwrap();
        let address_in_log = |prefix: &str| {
            let find = || messages().split("; ").find_map(|fact| Some(fact.strip_prefix(prefix)?.parse().unwrap()));
            eventually("the address is logged", || find().is_some());
            find().unwrap()
        };
        let mut address = |prefix: &str| {
            // Standard output is the access log.
            if toml.contains("= \"stdout\"") {
                return address_in_log(prefix);
            }
            // The test knows the path of a Unix socket.
            let line = lines.by_ref().map_while(Result::ok).find(|line| !line.contains("http://unix:"));
            let line = line.unwrap_or_else(|| panic!("the gateway did not start: {}", messages()));
            line.strip_prefix(prefix).unwrap_or_else(|| panic!("{line}")).parse().unwrap()
        };
        let http = address("listening on http://");
        let https = toml.contains("listen.https").then(|| address("listening on https://"));
        let admin = address("admin on http://");
        let printed = Arc::new(Mutex::new(Vec::new()));
        thread::spawn({
            let printed = Arc::clone(&printed);
            move || lines.map_while(Result::ok).for_each(|line| printed.lock().unwrap().push(line))
        });
        Process { child, printed, http, https, admin, scratch }
    }

    pub fn config_path(&self) -> PathBuf {
        self.scratch.path().join("gateway.toml")
    }

    pub fn write_config(&self, toml: &str) {
        self.replace_file("gateway.toml", &with_listen(toml));
    }

    /// Replaces a file beside the configuration, or the configuration itself.
    pub fn replace_file(&self, name: &str, text: &str) {
        // Atomically, as editors and configuration managers do.
        let new = self.scratch.write(&format!("{name}.written"), text);
        fs::rename(new, self.scratch.path().join(name)).unwrap();
    }

    pub fn client(&self) -> Client {
        Client::connect(self.http)
    }

    pub fn get(&self, target: &str) -> HttpResponse {
        self.client().get(target)
    }

    pub fn admin_get(&self, target: &str) -> HttpResponse {
        Client::connect(self.admin).get_with(target, &[("Host", &self.admin.to_string())])
    }

    pub fn metrics(&self) -> Exposition {
        Exposition::parse(&self.admin_get("/metrics").expect(200).text())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `TERM`, `INT`, `HUP` or `USR2`.
    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Waits until exactly this number of reloads with this outcome is counted. A test that changes a file and sends a signal
    /// cannot use it: the gateway may notice the change before the signal, and then reloads twice.
    pub fn wait_for_reloads(&self, outcome: &str, times: u64) {
        eventually("the reload is counted", || {
            self.metrics().sum("transom_config_reloads_total", &[("outcome", outcome)]) == times
        });
    }

    /// Waits for at least this number of applied reloads. For a changed file and a signal, each of which may cause a reload.
    pub fn wait_for_applied_reloads(&self, times: u64) {
        eventually("the reload is counted", || {
            self.metrics().sum("transom_config_reloads_total", &[("outcome", "applied")]) >= times
        });
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the process ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// The lines on standard output after those that print the addresses.
    pub fn stdout_lines(&self) -> Vec<String> {
        self.printed.lock().unwrap().clone()
    }

    pub fn stderr(&self) -> String {
        fs::read_to_string(self.scratch.path().join("stderr")).unwrap()
    }

    /// Waits until standard error contains a text, and returns all of standard error so far.
    pub fn wait_for_stderr(&self, text: &str) -> String {
        eventually(&format!("`{text}` on standard error"), || self.stderr().contains(text));
        self.stderr()
    }

    /// A number of `/proc/PID/status` in kB, such as `VmHWM`.
    pub fn memory_kb(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = self.stderr();
        if thread::panicking() {
            eprintln!("standard error of the gateway:\n{log}");
        } else {
            assert!(!log.contains("panicked at"), "the gateway panicked:\n{log}");
        }
    }
}

/// Sends a signal to a process.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).status().unwrap();
    assert!(sent.success());
}

/// Runs the binary to its end: exit code, standard output, standard error.
pub fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(BINARY).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}
