//! Three Redis Sentinels that watch a master and its replica: when two of them miss it, the replica takes over.

use std::fs;
use std::process::{Child, Command, Stdio};

use super::redis::{RedisServer, free_port};
use super::{Scratch, eventually, external_servers};

/// The name of the master for the sentinels and in the gateway's configuration.
pub const MASTER: &str = "counts";

pub struct Sentinels {
    sentinels: Vec<Sentinel>,
}

struct Sentinel {
    port: u16,
    child: Child,
    scratch: Scratch,
}

impl Sentinels {
    /// Starts them, and waits until they know the replica and one another.
    pub fn start(master: &RedisServer) -> Sentinels {
        let sentinels = Sentinels { sentinels: (0..3).map(|_| Sentinel::start(master)).collect() };
        eventually("the sentinels know all", || sentinels.sentinels.iter().all(|watcher| watcher.knows_all()));
        sentinels
    }

    /// Their addresses as a list of the gateway's configuration.
    pub fn urls(&self) -> String {
        let urls: Vec<String> =
            self.sentinels.iter().map(|watcher| format!("\"redis://127.0.0.1:{}\"", watcher.port)).collect();
        format!("[{}]", urls.join(", "))
    }

    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|watcher| watcher.port).collect()
    }

    /// The port of the master, as a majority of them has it.
    pub fn master(&self) -> Option<u16> {
        let ports: Vec<Option<u16>> = self.sentinels.iter().map(Sentinel::master).collect();
        let mut of_two = ports.iter().filter(|port| ports.iter().filter(|other| other == port).count() >= 2);
        of_two.next().copied().flatten()
    }

    /// Orders a failover although the master is well.
    pub fn fail_over(&self) {
        assert_eq!(self.sentinels[0].cli(&["SENTINEL", "FAILOVER", MASTER]), "OK");
    }

    /// Waits until the replica has taken over.
    pub fn wait_for_failover(&self, replica: &RedisServer) {
        eventually("the replica takes over", || {
            self.master() == Some(replica.port) && replica.cli(&["ROLE"]).starts_with("master")
        });
    }
}

impl Sentinel {
    fn start(master: &RedisServer) -> Sentinel {
        // A port that was free may be taken by the time it starts: then another.
        (0..10).find_map(|_| Sentinel::try_start(master)).expect("a sentinel that starts")
    }

    fn try_start(master: &RedisServer) -> Option<Sentinel> {
        let (scratch, port) = (Scratch::new(), free_port());
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {MASTER} 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 6000\n",
            scratch.path().display(),
            master.port,
        );
        let config = scratch.write("sentinel.conf", text);
        let log = fs::File::create(scratch.path().join("log")).unwrap();
        let child = Command::new(external_servers::program("redis-server"))
            .arg(config)
            .arg("--sentinel")
            .stdin(Stdio::null())
            .stderr(log.try_clone().unwrap())
            .stdout(log)
            .spawn()
            .unwrap();
        let (mut watcher, mut gone) = (Sentinel { port, child, scratch }, false);
        eventually("the sentinel answers", || {
            gone = watcher.child.try_wait().unwrap().is_some();
            gone || watcher.cli(&["PING"]) == "PONG"
        });
        (!gone).then_some(watcher)
    }

    fn cli(&self, command: &[&str]) -> String {
        let mut cli = Command::new("timeout");
        cli.arg("30").arg(external_servers::program("redis-cli")).args(["-p", &self.port.to_string()]);
        let output = cli.args(command).stdin(Stdio::null()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    fn knows_all(&self) -> bool {
        let said = self.cli(&["INFO", "sentinel"]);
        said.contains("status=ok") && said.contains("slaves=1,sentinels=3")
    }

    fn master(&self) -> Option<u16> {
        self.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).lines().nth(1)?.parse().ok()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("a sentinel said:\n{}", fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default());
        }
    }
}
