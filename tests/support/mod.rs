//! The harness of the integration tests.
//!
//! - Gateways: `gateway` runs one in this process with a manual clock, `process` the real binary, `upgrade_chain` a
//!   process that is upgraded, `gateway_group` several on one store, `tls_gateway` one with TLS for external clients.
//! - Clients: `client` (HTTP/1.1, byte by byte), `http2_client`, `tls`, `external_scripts`.
//! - Servers: `upstream` follows a script and records requests, `http2_upstream` the same over HTTP/2,
//!   `external_servers` from Debian and PyPI, `redis`, `redis_cluster`, `sentinel`; `redis_client` calls the store.
//! - Credentials: `test_ca`, `jwt_issuer`.
//! - Logs: `access_logs` generates them.
//! - Parsers: `ratelimit_parser`, `metrics_parser`.
//! - Checkers: `load_checker`, `compare_direct` (responses with and without the gateway), `panic_watch`.
//!
//! A panic in any thread of a gateway or an upstream fails the test: see `panic_watch`.

pub mod access_logs;
pub mod client;
pub mod compare_direct;
pub mod counting_model;
pub mod dns_server;
pub mod envoy;
pub mod external_scripts;
pub mod external_servers;
pub mod gateway;
pub mod gateway_group;
pub mod http2_client;
pub mod http2_upstream;
pub mod jwt_issuer;
pub mod load_checker;
pub mod metrics_parser;
pub mod moving_load;
pub mod panic_watch;
pub mod process;
pub mod ratelimit_client;
pub mod ratelimit_parser;
pub mod redis;
pub mod redis_client;
pub mod redis_cluster;
pub mod sentinel;
pub mod test_ca;
pub mod tls;
pub mod tls_gateway;
pub mod upgrade_chain;
pub mod upstream;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for an event before it fails. Generous, because machines are busy.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Factor and extra time on the deadlines that the product promises: on a busy machine the threads of the test and of the
/// gateway may wait for a core.
const BUSY_FACTOR: u32 = 4;
const BUSY_PAUSE: Duration = Duration::from_secs(4);

/// The result of an action that must end within the time that the product promises, widened for a busy machine.
#[track_caller]
pub fn within<T>(promised: Duration, action: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = action();
    let took = start.elapsed();
    assert!(took <= promised * BUSY_FACTOR + BUSY_PAUSE, "promised within {promised:?}, took {took:?}");
    result
}

/// A random generator whose seed is printed, so that a failed test shows it. `TRANSOM_SEED` sets the seed.
pub fn seeded_rng() -> fastrand::Rng {
    let text = std::env::var("TRANSOM_SEED");
    let seed = text.map_or_else(|_unset| fastrand::u64(..), |text| text.parse().expect("`TRANSOM_SEED` is a number"));
    println!("TRANSOM_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Pauses between checks of a condition, which grow from 1 to 40 ms: a check may be expensive, such as a scrape or a redis-cli.
pub fn pauses() -> impl Iterator<Item = Duration> {
    (1..).map(|check| Duration::from_millis(check.min(40)))
}

/// Waits until a condition holds, and fails if the condition does not hold within [`DEADLINE`].
#[track_caller]
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    eventually_within(DEADLINE, what, holds);
}

/// Likewise with another deadline.
#[track_caller]
pub fn eventually_within(deadline: Duration, what: &str, holds: impl FnMut() -> bool) {
    assert!(holds_within(deadline, holds), "not within {deadline:?}: {what}");
}

/// Waits until something holds; false if it does not within the deadline.
pub fn holds_within(deadline: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let (start, mut pauses) = (Instant::now(), pauses());
    while !holds() {
        if start.elapsed() >= deadline {
            return false;
        }
        thread::sleep(pauses.next().unwrap());
    }
    true
}

/// Waits until a value, such as a metric that is updated after the response, equals the expected one. Fails with the last
/// value if that does not happen within [`DEADLINE`].
#[track_caller]
pub fn eventually_eq<T: PartialEq + std::fmt::Debug>(mut value: impl FnMut() -> T, expected: T) {
    let (start, mut pauses) = (Instant::now(), pauses());
    loop {
        let last = value();
        if last == expected {
            return;
        }
        assert!(start.elapsed() < DEADLINE, "still {last:?} after {DEADLINE:?}, expected {expected:?}");
        thread::sleep(pauses.next().unwrap());
    }
}

/// A configuration with one route for everything, without rules.
pub fn forward_all(upstream: &upstream::Upstream) -> String {
    format!("{}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"))
}

/// A configuration with one route for everything, to an upstream `u` with these servers and settings.
pub fn forward_to(servers: &[std::net::SocketAddr], settings: &str) -> String {
    let servers: Vec<String> = servers.iter().map(|address| format!("\"http://{address}\"")).collect();
    format!(
        "[upstreams.u]\nservers = [{}]\n{settings}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        servers.join(", ")
    )
}

/// The blocks of a guide in a language.
pub fn guide_blocks(page: &str, language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(format!("{}/docs/guides/{page}.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

/// Runs the requests with which a reader tries a guide: 34 within a minute, of which the last is refused, and one that shows its
/// response. `documented`: the address in the guide, `address` the one to use.
pub fn try_guide(page: &str, documented: &str, address: SocketAddr) {
    let is_request = |line: &&str| line.trim_start().starts_with("for ") || line.trim_start().starts_with("curl ");
    let blocks = guide_blocks(page, "sh");
    let requests: Vec<&str> = blocks.iter().flat_map(|block| block.lines()).filter(is_request).collect();
    assert!(requests.len() == 2 && requests.iter().all(|line| line.contains(documented)), "{page}: {requests:?}");
    let script = requests.join("\n").replace(documented, &address.to_string());
    let output = Command::new("bash").args(["-ec", &script]).env("no_proxy", "*").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() > 34, "{page}: {text}");
    assert!(lines[..33].iter().all(|line| *line == "200") && lines[33] == "429", "{page}: {text}");
    let response = lines[34..].join("\n").to_ascii_lowercase();
    for part in ["http/1.1 429", "\nratelimit:", "\nretry-after:"] {
        assert!(response.contains(part), "{page}: {response}");
    }
}

/// A configuration with one route for everything, to the built-in upstream, and one rule `r` on it.
pub fn one_rule(rule: &str) -> String {
    format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\n{rule}\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
    )
}

/// A text with its digests replaced, which differ between gateways.
pub fn without_digests(text: &str) -> String {
    let mut parts = text.split("hmac-");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + "hmac-…" + part.trim_start_matches(|sign: char| sign.is_ascii_hexdigit()))
}

/// A temporary directory, removed when dropped.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        TempDir::under(std::env::temp_dir())
    }

    /// On tmpfs, where counters files should be.
    pub fn in_memory() -> TempDir {
        TempDir::under(PathBuf::from("/dev/shm"))
    }

    fn under(folder: PathBuf) -> TempDir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("transom-it-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = folder.join(name);
        fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // A directory that cannot be removed does not fail the test.
        let _ = fs::remove_dir_all(&self.0);
    }
}
