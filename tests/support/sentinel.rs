//! Three Redis Sentinels that monitor a master and its replica: when two of them cannot reach the master, they promote the
//! replica.

use std::fs;
use std::process::{Child, Command, Stdio};

use redis::ConnectionAddr;

use super::redis::{RedisServer, free_port, reply_text};
use super::{DEADLINE, TempDir, eventually, eventually_within, external_servers};

/// The name of the master for the sentinels and in the gateway's configuration.
pub const MASTER: &str = "counts";

pub struct Sentinels {
    sentinels: Vec<Sentinel>,
}

struct Sentinel {
    port: u16,
    child: Child,
    scratch: TempDir,
    password: Option<String>,
}

impl Sentinels {
    /// Starts the sentinels, and waits until they know the replica and each other.
    pub fn start(master: &RedisServer) -> Sentinels {
        let sentinels = Sentinels { sentinels: (0..3).map(|_| Sentinel::start(master)).collect() };
        eventually("the sentinels know the replica and each other", || {
            sentinels.sentinels.iter().all(|sentinel| sentinel.knows_all())
        });
        sentinels
    }

    /// One sentinel that requires a password.
    pub fn start_one(master: &RedisServer, password: &str) -> Sentinels {
        let sentinel = (0..10).find_map(|_| Sentinel::try_start(master, Some(password)));
        Sentinels { sentinels: vec![sentinel.expect("a sentinel that starts")] }
    }

    /// Their addresses as a list of the gateway's configuration.
    pub fn urls(&self) -> String {
        let urls: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("\"redis://127.0.0.1:{}\"", sentinel.port)).collect();
        format!("[{}]", urls.join(", "))
    }

    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|sentinel| sentinel.port).collect()
    }

    /// The port of the master according to a majority of the sentinels.
    pub fn master(&self) -> Option<u16> {
        let ports: Vec<Option<u16>> = self.sentinels.iter().map(Sentinel::master).collect();
        let mut of_majority = ports.iter().filter(|port| ports.iter().filter(|other| other == port).count() >= 2);
        of_majority.next().copied().flatten()
    }

    /// Starts a failover although the master is reachable.
    pub fn fail_over(&self) {
        assert_eq!(self.sentinels[0].cli(&["SENTINEL", "FAILOVER", MASTER]), "OK");
    }

    /// Waits until the replica is the master.
    pub fn wait_for_failover(&self, replica: &RedisServer) {
        // After a pause of two seconds, as on a busy machine, sentinels do nothing for 30 seconds ("tilt").
        eventually_within(4 * DEADLINE, "the replica is promoted", || {
            self.master() == Some(replica.port) && replica.cli(&["ROLE"]).starts_with("master")
        });
    }
}

impl Sentinel {
    fn start(master: &RedisServer) -> Sentinel {
        // Another process may take the port before the sentinel starts: then another port.
        (0..10).find_map(|_| Sentinel::try_start(master, None)).expect("a sentinel that starts")
    }

    fn try_start(master: &RedisServer, password: Option<&str>) -> Option<Sentinel> {
        let login = password.map_or(String::new(), |password| format!("requirepass {password}\n"));
        let (scratch, port) = (TempDir::new(), free_port());
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {MASTER} 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 6000\n{login}",
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
        let (mut sentinel, mut ended) =
            (Sentinel { port, child, scratch, password: password.map(str::to_owned) }, false);
        eventually("the sentinel responds", || {
            ended = sentinel.child.try_wait().unwrap().is_some();
            ended || sentinel.cli(&["PING"]) == "PONG"
        });
        (!ended).then_some(sentinel)
    }

    fn cli(&self, command: &[&str]) -> String {
        let address = ConnectionAddr::Tcp("127.0.0.1".to_owned(), self.port);
        reply_text(address, self.password.as_deref(), command)
    }

    fn knows_all(&self) -> bool {
        let output = self.cli(&["INFO", "sentinel"]);
        output.contains("status=ok") && output.contains("slaves=1,sentinels=3")
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
            eprintln!(
                "log of a sentinel:\n{}",
                fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default()
            );
        }
    }
}
