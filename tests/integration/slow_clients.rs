//! slowhttptest: clients that send a head or a body slowly or read slowly do not affect another client.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::external_servers::{self, program};
use crate::support::process::Process;
use crate::support::{TempDir, eventually};

const CLIENTS: u64 = 200;
/// The slow clients would stay for a minute.
const MAX_TIME: Duration = Duration::from_secs(55);

/// The limits on slow clients.
const TIMEOUTS: &str = "[timeouts]\nrequest_head = \"5s\"\nbody = \"5s\"\n";

struct SlowClients {
    child: Child,
    scratch: TempDir,
}

impl SlowClients {
    /// Starts all slow clients at once. They stay for a minute unless the gateway closes their connections.
    fn start(gateway: &Process, mode: &[&str], target: &str) -> SlowClients {
        let scratch = TempDir::new();
        let log = std::fs::File::create(scratch.path().join("log")).unwrap();
        let count = CLIENTS.to_string();
        let child = Command::new(program("slowhttptest"))
            .args(mode)
            .args(["-c", &count, "-r", &count, "-l", "60", "-p", "30"])
            .args(["-u", &format!("http://{}{target}", gateway.http)])
            .stdin(Stdio::null())
            .stdout(log)
            .spawn()
            .unwrap();
        SlowClients { child, scratch }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The exit status in the report, without colours.
    fn exit_status(&self) -> String {
        let log = std::fs::read(self.scratch.path().join("log")).unwrap();
        let log = String::from_utf8_lossy(&log).into_owned();
        let exit_status =
            log.lines().rev().find_map(|line| line.split_once("Exit status:")).unwrap_or_else(|| panic!("{log}"));
        exit_status.1.split('m').skip(1).collect::<Vec<_>>().join("m").split('\u{1b}').next().unwrap().trim().to_owned()
    }
}

impl Drop for SlowClients {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `target` is the request target of the slow clients.
fn assert_slow_clients_are_closed_and_others_served(mode: &[&str], target: &str) {
    let nginx = external_servers::nginx(|root| {
        std::fs::write(root.join("a.txt"), "small\n").unwrap();
        std::fs::write(root.join("large.bin"), vec![0; 16 * 1024 * 1024]).unwrap();
    });
    let gateway = Process::spawn(&format!(
        "{TIMEOUTS}{}[upstreams.echo]\nbuiltin = \"echo\"\n\
         [[routes]]\npath = \"/upload\"\nupstream = \"echo\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        nginx.toml("u")
    ));
    let mut slow = SlowClients::start(&gateway, mode, target);
    let (mut most, start) = (0, Instant::now());
    while slow.is_running() {
        assert!(start.elapsed() < MAX_TIME, "{mode:?}: slow clients are still connected");
        assert_eq!(gateway.get("/a.txt").expect(200).text(), "small\n");
        most = most.max(connections(&gateway));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(slow.exit_status(), "No open connections left", "{mode:?}");
    // Otherwise the clients were not slow.
    assert!(most >= CLIENTS / 2, "{mode:?}: {most} at once");
    eventually("no connection is open", || connections(&gateway) == 0);
}

fn connections(gateway: &Process) -> u64 {
    gateway.metrics().sum("transom_connections", &[])
}

#[test]
fn slow_heads_do_not_slow_other_clients() {
    assert_slow_clients_are_closed_and_others_served(&["-H", "-i", "1", "-x", "24"], "/a.txt");
}

#[test]
fn slow_bodies_do_not_slow_other_clients() {
    assert_slow_clients_are_closed_and_others_served(&["-B", "-i", "1", "-x", "4", "-s", "100000"], "/upload");
}

#[test]
fn slow_readers_do_not_slow_other_clients() {
    // A small window that is read more slowly than the minimum rate. The reader notices the close only after the buffered
    // bytes, so it has to read them within its minute.
    assert_slow_clients_are_closed_and_others_served(
        &["-X", "-n", "1", "-z", "100", "-w", "64", "-y", "128"],
        "/large.bin",
    );
}
