//! A real redis-server in its own process, on a free loopback port, with its files in a temporary directory.
//!
//! By default the server saves nothing to disk, so a restarted server is empty, as after a crash without a backup. The test
//! inspects the server through a Unix socket in the directory, so the port may use TLS.

use std::collections::HashSet;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use fastrand::Rng;
use redis::{Cmd, ConnectionAddr, ConnectionLike, IntoConnectionInfo, RedisConnectionInfo, Value};

use super::process::signal;
use super::test_ca::TestCa;
use super::{TempDir, eventually, external_servers};

pub struct RedisServer {
    pub port: u16,
    child: Option<Child>,
    scratch: TempDir,
    /// The environment of the process: another clock, for instance.
    environment: Vec<(&'static str, String)>,
    password: Option<String>,
    scheme: &'static str,
}

impl RedisServer {
    pub fn start() -> RedisServer {
        RedisServer::with_config("")
    }

    /// With lines of redis.conf, such as `requirepass`, `user` or `maxmemory`.
    pub fn with_config(lines: &str) -> RedisServer {
        RedisServer::start_with(TempDir::new(), lines, "redis", Vec::new())
    }

    /// A replica of another server, which has the data of its master when this returns.
    pub fn replica_of(master: &RedisServer, lines: &str) -> RedisServer {
        let replica = RedisServer::with_config(&format!("{lines}\nreplicaof 127.0.0.1 {}", master.port));
        eventually("the replica has its master's data", || {
            replica.cli(&["INFO", "replication"]).contains("master_link_status:up")
        });
        replica
    }

    /// With TLS on its port, a certificate of this authority for `localhost`, `api.test` and 127.0.0.1, and trust in client certificates of
    /// this authority.
    pub fn with_tls(authority: &TestCa, lines: &str) -> RedisServer {
        RedisServer::with_tls_for(&["localhost", "api.test", "127.0.0.1"], authority, lines)
    }

    /// As [`RedisServer::with_tls`], with a certificate for these names.
    pub fn with_tls_for(names: &[&str], authority: &TestCa, lines: &str) -> RedisServer {
        let scratch = TempDir::new();
        let issued = authority.issue(names);
        scratch.write("server.pem", &issued.pem);
        scratch.write("server.key", &issued.key_pem);
        scratch.write("authority.pem", &authority.pem);
        let tls = "tls-cert-file server.pem\ntls-key-file server.key\ntls-ca-cert-file authority.pem\n";
        let clients = if lines.contains("tls-auth-clients") { "" } else { "tls-auth-clients no\n" };
        RedisServer::start_with(scratch, &format!("{tls}{clients}{lines}"), "rediss", Vec::new())
    }

    /// With a clock that is `ahead_s` seconds ahead of the machine's, or behind if negative.
    pub fn with_clock_offset(ahead_s: i64, lines: &str) -> RedisServer {
        let environment = vec![
            // The allocator of the C library before jemalloc, which reads the clock before libfaketime is ready.
            ("LD_PRELOAD", format!("{}:libc.so.6", external_servers::faketime().display())),
            ("FAKETIME", format!("{ahead_s:+}")),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ];
        RedisServer::start_with(TempDir::new(), lines, "redis", environment)
    }

    /// With a clock that the test steps, see [`RedisServer::set_clock_offset`].
    pub fn with_stepped_clock(lines: &str) -> RedisServer {
        let scratch = TempDir::new();
        let file = scratch.write("clock", "+0\n");
        let environment = vec![
            ("LD_PRELOAD", format!("{}:libc.so.6", external_servers::faketime().display())),
            ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ];
        RedisServer::start_with(scratch, lines, "redis", environment)
    }

    /// Sets the lead of the server's clock over the machine's. The server reads it with each reading of its clock.
    pub fn set_clock_offset(&self, lead: Duration) {
        let new = self.scratch.write("clock.new", format!("+{}.{:03}\n", lead.as_secs(), lead.subsec_millis()));
        fs::rename(new, self.scratch.path().join("clock")).unwrap();
    }

    fn start_with(
        scratch: TempDir,
        lines: &str,
        scheme: &'static str,
        environment: Vec<(&'static str, String)>,
    ) -> RedisServer {
        let password = lines.lines().find_map(|line| line.trim().strip_prefix("requirepass ")).map(str::to_owned);
        let mut server = RedisServer { port: 0, child: None, scratch, environment, password, scheme };
        // Another process may take the port before the server starts: then another port.
        for _ in 0..10 {
            server.port = free_port();
            server.write_config(lines);
            if server.try_start() {
                return server;
            }
        }
        panic!("redis-server does not start:\n{}", server.log());
    }

    fn write_config(&self, lines: &str) {
        let port = if self.scheme == "rediss" { "port 0\ntls-port" } else { "port" };
        let text = format!(
            "{port} {}\nbind 127.0.0.1\ndir {}\nunixsocket redis.sock\nsave \"\"\nappendonly no\n{lines}\n",
            self.port,
            self.scratch.path().display(),
        );
        self.scratch.write("redis.conf", text);
    }

    /// Starts the process and waits until it responds; `false` if it ends instead.
    fn try_start(&mut self) -> bool {
        let log = fs::File::options().create(true).append(true).open(self.scratch.path().join("log")).unwrap();
        // A killed server leaves its socket file behind.
        let _ = fs::remove_file(self.socket());
        let mut child = Command::new(external_servers::program("redis-server"))
            .arg("redis.conf")
            .current_dir(self.scratch.path())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stderr(log.try_clone().unwrap())
            .stdout(log)
            .spawn()
            .unwrap();
        let mut ended = false;
        eventually("redis-server responds", || {
            ended = child.try_wait().unwrap().is_some();
            ended || (self.socket().exists() && self.cli(&["PING"]) == "PONG")
        });
        self.child = Some(child);
        !ended
    }

    /// The URL for the configuration of the gateway, without a user or password.
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    /// The path of its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.scratch.path().join("redis.sock")
    }

    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// The reply to a command, an array as lines. Errors are returned as text; empty without a reply.
    pub fn cli(&self, command: &[&str]) -> String {
        reply_text(ConnectionAddr::Unix(self.socket()), self.password.as_deref(), command)
    }

    /// The number that a command returns; 0 for nil.
    pub fn integer(&self, command: &[&str]) -> i64 {
        let output = self.cli(command);
        if output.is_empty() { 0 } else { output.parse().unwrap_or_else(|_| panic!("{command:?}: {output}")) }
    }

    /// All keys, sorted.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.cli(&["KEYS", "*"]).lines().map(str::to_owned).collect();
        keys.sort();
        keys
    }

    /// How often a command, such as `evalsha`, was called since the server started, including calls from scripts.
    pub fn call_count(&self, command: &str) -> u64 {
        let output = self.cli(&["INFO", "commandstats"]);
        let line = output.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// Suspends the process: connections stay open without replies.
    pub fn suspend(&self) {
        signal(self.pid(), "STOP");
    }

    /// Continues after `suspend`.
    pub fn resume(&self) {
        signal(self.pid(), "CONT");
    }

    /// Kills the process. Later connections are refused.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts the server again at the same port.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.try_start(), "redis-server does not start again:\n{}", self.log());
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("redis-server runs").id()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("log of redis-server at port {}:\n{}", self.port, self.log());
        }
    }
}

/// The reply to a command on a connection of its own, as redis-cli prints it.
pub fn reply_text(address: ConnectionAddr, password: Option<&str>, command: &[&str]) -> String {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let login = RedisConnectionInfo::default().set_skip_set_lib_name();
    let info = address.into_connection_info().unwrap().set_redis_settings(login);
    let reply = || {
        let mut connection = redis::Client::open(info)?.get_connection_with_timeout(TIMEOUT)?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        if let Some(password) = password {
            // A test may have removed the password from the server.
            let _ = connection.req_command(redis::cmd("AUTH").arg(password));
        }
        connection.req_command(Cmd::new().arg(command))
    };
    match reply() {
        Ok(value) => text_of(&value),
        Err(error) => match (error.code(), error.detail()) {
            (Some(code), detail) => format!("{code} {}", detail.unwrap_or_default()),
            (None, _) => String::new(),
        },
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Nil => String::new(),
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).trim_end().to_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::Okay => "OK".to_owned(),
        Value::Array(items) => items.iter().map(text_of).collect::<Vec<_>>().join("\n"),
        other => panic!("no text of RESP 2: {other:?}"),
    }
}

/// A port without a listener, whose cluster bus port (10,000 higher) has no listener either. The system assigns neither to
/// outgoing connections, so that a killed server can return to its port.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut given = GIVEN.lock().unwrap();
    let given = given.get_or_insert_default();
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut rng = Rng::new();
    let found = (0..1000).map(|_| rng.u16(10_000..22_000)).find(|port| {
        let fresh = !given.contains(port) && !given.contains(&(port + 10_000));
        fresh && is_free(*port) && is_free(port + 10_000)
    });
    let port = found.expect("a free port");
    given.insert(port);
    port
}
