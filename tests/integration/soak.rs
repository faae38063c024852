//! A gateway under a steady load of many kinds, with reloads, servers that are killed, and slow clients: responses are right,
//! no limit is exceeded, the metrics agree with the clients, and memory and descriptors do not grow.
//!
//! `make soak` runs this for an hour at half load. CI runs three minutes with pauses between requests, so that the test uses
//! a fraction of a core beside other tests.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use socket2::{Domain, Socket, Type};

use crate::support::client::{Client, HOST, HttpResponse, request};
use crate::support::external_servers::{RestartableServer, nginx, nginx_config, program};
use crate::support::http2_client::Http2Client;
use crate::support::load_checker::{Layer, MARGIN_MS, now_ms};
use crate::support::process::Process;
use crate::support::test_ca::TestCa;
use crate::support::tls::{self, TlsClient};
use crate::support::{TempDir, eventually_eq, seeded_rng};

/// Clients that send a request, wait for its response, and pause.
const CLIENTS: u32 = 8;
/// Requests of a client on one connection.
const REQUESTS_PER_CONNECTION: u64 = 50;
/// Slow clients of each kind.
const SLOW_CLIENTS: usize = 6;
const SLOW_STEP: Duration = Duration::from_millis(500);
/// Longer than a client of the load pauses, also on a busy machine, because its connection is idle meanwhile.
const SLOW_TIMEOUT_S: u64 = 10;
const PAUSE_MAX: Duration = Duration::from_secs(1);

const LAYERS: [Layer; 2] = [Layer { limit: 3, period_ms: 2000 }, Layer { limit: 6, period_ms: 7000 }];
/// The keys of each client whose limits bind.
const KEYS: u64 = 10;
/// Routes that change with each reload. They make the configuration large: one that is not freed is noticed.
const CHANGING_ROUTES: u64 = 100;
const DOWNLOAD_BYTES: usize = 64 * 1024;
const LARGE_BYTES: usize = 16 * 1024 * 1024;

const SAMPLE_PERIOD: Duration = Duration::from_secs(1);
/// By how much the median of the memory may grow. Without a leak it changes by up to 1 MiB in either direction: mimalloc takes
/// memory in pages of 64 KiB for each size and thread, and slow requests keep a replaced configuration for a while.
const MEMORY_MARGIN_KB: u64 = 3 * 1024;
/// Each client may leave a connection to either server in either worker.
const DESCRIPTORS_MARGIN: u64 = 4 * CLIENTS as u64;

const ECHO: &str = "[upstreams.echo]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"echo\"\n";

/// The clients of the load, and their observations.
struct Soak {
    gateway: SocketAddr,
    /// The pause after each request, or `None` for half load.
    pause: Option<Duration>,
    is_over: AtomicBool,
    connections: AtomicU64,
    /// By route and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

/// Ends the soak when dropped: when its time is over, or when a client fails.
struct EndOnDrop<'a>(&'a Soak);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
    }
}

impl Soak {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Sleeps until the time is over, or the soak.
    fn sleep(&self, time: Duration) {
        let end = Instant::now() + time;
        while !self.is_over() && Instant::now() < end {
            thread::sleep(end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100)));
        }
    }

    /// Runs `turn` with pauses until the soak is over, each time a number of times on one connection.
    fn repeat<C>(&self, connect: impl Fn() -> C, mut turn: impl FnMut(&mut C, u64)) {
        let _end = EndOnDrop(self);
        let connect = || {
            self.connections.fetch_add(1, Ordering::SeqCst);
            connect()
        };
        let (mut client, cores) = (connect(), thread::available_parallelism().unwrap().get() as u32);
        for n in 0.. {
            if self.is_over() {
                return;
            }
            if n % REQUESTS_PER_CONNECTION == REQUESTS_PER_CONNECTION - 1 {
                client = connect();
            }
            let start = Instant::now();
            turn(&mut client, n);
            // While a client waits for a response, about one core works for it.
            let pause = self.pause.unwrap_or_else(|| start.elapsed() * (2 * CLIENTS).div_ceil(cores));
            thread::sleep(pause.min(PAUSE_MAX));
        }
    }

    fn record(&self, route: &'static str, status: u16) {
        *self.responses.lock().unwrap().entry((route, status)).or_default() += 1;
    }

    /// Sends requests to the servers that are killed.
    fn steady_client<C>(&self, name: &str, connect: impl Fn() -> C, get: impl Fn(&mut C, &str) -> HttpResponse) {
        self.repeat(connect, |client, n| {
            let target = format!("/steady/{name}/{n}");
            assert_eq!(get(client, &target).expect(200).text(), format!("{target}\n"));
            self.record("steady", 200);
        });
    }

    /// Sends requests of keys that no other client uses, and compares each decision with its own counts.
    fn limited_client(&self, name: &str) {
        let mut usages = [[Usage::default(); LAYERS.len()]; KEYS as usize];
        let connect = || Client::connect(self.gateway);
        self.repeat(connect, |client, n| {
            let (key, target) = (n % KEYS, format!("/limited/{name}/{n}"));
            let sent_ms = now_ms();
            let response = client.get_with(&target, &[("X-Key", &format!("{name}-{key}"))]);
            let (status, received_ms) = (response.status, now_ms());
            check_decision(&mut usages[key as usize], sent_ms, received_ms, status == 200);
            if status == 200 {
                assert_eq!(response.text(), format!("{target}\n"));
            } else {
                response.expect(429).problem();
            }
            self.record("limited", status);
        });
    }

    /// Sends a new key with each request. The response is the number of reloads, which each connection sees in order.
    fn flood_client(&self) {
        let connect = || (Client::connect(self.gateway), 0);
        self.repeat(connect, |(client, reloads), n| {
            let response = client.get_with("/flood", &[("X-Key", &n.to_string())]).expect(200);
            let last = std::mem::replace(reloads, response.text().parse().unwrap());
            assert!(*reloads >= last, "configuration {reloads} after {last}");
            self.record("flood", 200);
        });
    }

    /// Uploads and downloads bodies over TLS.
    fn transfer_client(&self, client: &TlsClient, https: SocketAddr) {
        let download = download();
        let connect = || client.connect(https, HOST);
        self.repeat(connect, |client, n| {
            if n % 2 == 0 {
                let length = 1 + 7919 * (n as usize % 17);
                let response = client.post("/upload", vec![b'u'; length]).expect(200);
                assert_eq!(response.json()["body_bytes"], length);
                self.record("upload", 200);
            } else {
                let response = client.get("/download").expect(200);
                assert!(response.body == download, "{} bytes, not those of the file", response.body.len());
                self.record("download", 200);
            }
        });
    }

    /// Keeps slow clients connected; the gateway ends each of them after a while.
    fn slow_clients(&self) {
        let _end = EndOnDrop(self);
        let kinds = ["slow-head", "slow-upload", "slow-reader"];
        let mut clients: Vec<_> =
            kinds.iter().flat_map(|kind| (0..SLOW_CLIENTS).map(|_| (*kind, self.start_slow(kind)))).collect();
        while !self.is_over() {
            self.sleep(SLOW_STEP);
            for (kind, stream) in &mut clients {
                if has_ended(kind, stream) {
                    self.record(kind, 408);
                    *stream = self.start_slow(kind);
                }
            }
        }
        // The others are open until now.
        clients.iter().for_each(|(kind, _)| self.record(kind, 499));
    }

    fn start_slow(&self, kind: &str) -> TcpStream {
        self.connections.fetch_add(1, Ordering::SeqCst);
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(&self.gateway.into()).unwrap();
        let mut stream = TcpStream::from(socket);
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        let start = match kind {
            "slow-head" => format!("GET /steady/slow HTTP/1.1\r\nHost: {HOST}\r\nX-Slow: ").into_bytes(),
            "slow-upload" => request("POST", "/slow-upload", &[("Content-Length", "100000")], b""),
            _ => request("GET", "/slow-reader", &[], b""),
        };
        stream.write_all(&start).unwrap();
        stream
    }
}

/// Sends or reads one byte of a slow client, and returns whether the gateway has ended the connection.
fn has_ended(kind: &str, stream: &mut TcpStream) -> bool {
    let is_reader = kind == "slow-reader";
    // A reset is an error of the socket, also while received bytes are unread.
    if is_reader && stream.take_error().unwrap().is_some() {
        return true;
    }
    let mut received = [0; 12];
    match stream.read(&mut received[..if is_reader { 1 } else { 12 }]) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            // If the gateway closes the connection now, the next step reads its response.
            let _ = stream.write_all(if is_reader { b"" } else { b"x" });
            false
        }
        outcome if is_reader => outcome.unwrap_or(0) == 0,
        outcome => {
            assert_eq!((outcome.unwrap(), &received), (12, b"HTTP/1.1 408"), "{kind}");
            true
        }
    }
}

/// The requests of a key that were admitted in the last window of a layer.
#[derive(Clone, Copy, Default)]
struct Usage {
    window: u64,
    /// Certainly in this window.
    certain: u64,
    /// Together with those that may have been counted in the window before.
    possible: u64,
}

/// Compares a decision with the usage of the key, and counts an admitted request. A request that was sent in one window and
/// answered in the next can belong to either.
fn check_decision(usages: &mut [Usage; LAYERS.len()], sent_ms: u64, received_ms: u64, is_admitted: bool) {
    let mut is_at_limit = false;
    for (Layer { limit, period_ms }, usage) in LAYERS.iter().zip(&mut *usages) {
        let (first, window) = ((sent_ms - MARGIN_MS) / period_ms, (received_ms + MARGIN_MS) / period_ms);
        if usage.window != window {
            *usage = Usage { window, ..Usage::default() };
        }
        is_at_limit |= first != window || usage.possible >= *limit;
        usage.certain += u64::from(is_admitted && first == window);
        usage.possible += u64::from(is_admitted);
        assert!(usage.certain <= *limit, "admitted {} times in {period_ms} ms, sent at {sent_ms}", usage.certain);
    }
    assert!(is_admitted || is_at_limit, "refused below the limit, sent at {sent_ms}");
}

/// The file that is downloaded.
fn download() -> Vec<u8> {
    (0..DOWNLOAD_BYTES).map(|at| (at % 251) as u8).collect()
}

/// nginx, which responds with the target of the request.
fn echo_target(home: &Path, address: SocketAddr) -> Command {
    let config = home.join("nginx.conf");
    let settings = "location / { return 200 \"$request_uri\\n\"; }";
    std::fs::write(&config, nginx_config(&home.display().to_string(), address, "", settings)).unwrap();
    let mut command = Command::new(program("nginx"));
    command.args(["-e", "stderr", "-p"]).arg(home).arg("-c").arg(config);
    command
}

/// The configuration after a number of reloads.
fn toml(listen: &str, [a, b]: [SocketAddr; 2], files: SocketAddr, echo: SocketAddr, generation: u32) -> String {
    let mut toml = format!(
        r#"workers = 2
access_log = {{ file = "/dev/null" }}
[limits]
rate_grace = "{SLOW_TIMEOUT_S}s"
[timeouts]
request_head = "{SLOW_TIMEOUT_S}s"
body = "{SLOW_TIMEOUT_S}s"
[counters]
capacity = 20_000
[upstreams.flapping]
servers = ["http://{a}", "http://{b}"]
ejection = {{ time = "1s", max_time = "4s" }}
[upstreams.files]
servers = "http://{files}"
[upstreams.echo]
servers = "http://{echo}"
[rules.steady]
key = "ip"
windows = ["4000000000/366d"]
[rules.limited]
key = "header:x-key"
on_missing_key = "refuse"
windows = ["3/2s", "6/7s"]
[rules.flood]
key = "header:x-key"
on_missing_key = "refuse"
windows = ["1/2s"]
{listen}
[[routes]]
name = "steady"
path = "/steady/{{*rest}}"
upstream = "flapping"
rules = ["steady"]
[[routes]]
name = "limited"
path = "/limited/{{*rest}}"
upstream = "flapping"
rules = ["limited"]
[[routes]]
name = "flood"
path = "/flood"
rules = ["flood"]
respond = {{ status = 200, body = "{generation}" }}
"#
    );
    for (name, upstream) in
        [("upload", "echo"), ("slow-upload", "echo"), ("download", "files"), ("slow-reader", "files")]
    {
        toml += &format!("[[routes]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{upstream}\"\n");
    }
    for n in 0..CHANGING_ROUTES {
        toml += &format!(
            "[[routes]]\nname = \"changing-{generation}-{n}\"\npath = \"/changing/{generation}/{n}\"\n\
             rules = [\"steady\"]\nrespond = {{ status = 204 }}\n"
        );
    }
    toml
}

/// Memory of the gateway without files, such as its code, which becomes resident as it is used.
fn memory_kb(gateway: &Process) -> u64 {
    gateway.memory_kb("RssAnon") + gateway.memory_kb("VmSwap")
}

fn descriptors(gateway: &Process) -> u64 {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).unwrap().count() as u64
}

/// The medians of the quarters of the soak.
fn quarters(samples: &[u64]) -> [u64; 4] {
    [0, 1, 2, 3].map(|quarter| {
        let mut quarter = samples[samples.len() * quarter / 4..samples.len() * (quarter + 1) / 4].to_vec();
        quarter.sort_unstable();
        quarter[quarter.len() / 2]
    })
}

/// Compares the last quarter with the second; the first is the warm-up. Medians, because a sample may be taken during a reload,
/// which has two configurations in memory.
fn assert_flat(what: &str, samples: &[u64], margin: u64) {
    let quarters = quarters(samples);
    assert!(quarters[3] <= quarters[1] + margin, "{what} grow: {quarters:?}");
}

/// Kills one of two servers and starts it again, until the soak is over. Returns how often.
fn flap(soak: &Soak, servers: &mut [RestartableServer; 2], period: Duration) -> u64 {
    let _end = EndOnDrop(soak);
    let mut rng = seeded_rng();
    for kills in 0.. {
        soak.sleep(period);
        if soak.is_over() {
            return kills;
        }
        let victim = &mut servers[rng.usize(..2)];
        victim.signal(Signal::KILL);
        thread::sleep((period / 4).mul_f64(rng.f64()));
        victim.restart();
    }
    unreachable!()
}

/// The counts of the clients, and those of the gateway, once it has noticed that all of them have disconnected.
fn assert_metrics(soak: &Soak, gateway: &Process, reloads: u32) {
    let responses = soak.responses.lock().unwrap();
    let seen = |route: &'static str, status: u16| responses.get(&(route, status)).copied().unwrap_or(0);
    let started = |kind: &'static str| seen(kind, 408) + seen(kind, 499);
    let forwarded = seen("steady", 200) + seen("limited", 200);
    let mut expected = vec![
        ("transom_connections_accepted_total", vec![], soak.connections.load(Ordering::SeqCst)),
        ("transom_connections", vec![], 0),
        ("transom_requests_active", vec![], 0),
        ("transom_requests_total", vec![], responses.values().sum()),
        ("transom_decisions_total", vec![("rule", "steady"), ("outcome", "admitted")], seen("steady", 200)),
        ("transom_decisions_total", vec![("rule", "limited"), ("outcome", "admitted")], seen("limited", 200)),
        ("transom_decisions_total", vec![("rule", "limited"), ("outcome", "refused")], seen("limited", 429)),
        ("transom_decisions_total", vec![("rule", "flood"), ("outcome", "admitted")], seen("flood", 200)),
        ("transom_counters_overflow_total", vec![], 0),
        ("transom_upstream_requests_active", vec![], 0),
        ("transom_upstream_connections", vec![("state", "active")], 0),
        ("transom_upstream_requests_total", vec![("upstream", "flapping"), ("outcome", "responded")], forwarded),
        ("transom_config_reloads_total", vec![("outcome", "applied")], reloads.into()),
        ("transom_config_reloads_total", vec![], reloads.into()),
        // The head of a request has no route before its end.
        ("transom_requests_total", vec![("route", "")], started("slow-head")),
        ("transom_requests_total", vec![("route", "slow-upload")], started("slow-upload")),
        ("transom_requests_total", vec![("route", "slow-reader")], started("slow-reader")),
    ];
    for ((route, status), count) in responses.iter().filter(|((route, _), _)| !route.starts_with("slow-")) {
        let code = match status {
            200 => "200",
            _ => "429",
        };
        expected.push(("transom_requests_total", vec![("route", route), ("code", code)], *count));
    }
    let differences = || -> Vec<String> {
        let metrics = gateway.metrics();
        let counted = expected.iter().map(|(name, labels, _)| metrics.sum(name, labels));
        let differing = expected.iter().zip(counted).filter(|((_, _, expected), counted)| counted != expected);
        differing.map(|((name, labels, seen), counted)| format!("{name} {labels:?}: {counted}, not {seen}")).collect()
    };
    eventually_eq(differences, vec![]);
    assert!(seen("limited", 429) > 0, "no limit was reached");
    let metrics = gateway.metrics();
    let errors = |names: &[&str]| -> u64 {
        names.iter().map(|name| metrics.sum("transom_request_errors_total", &[("error", name)])).sum()
    };
    let slow: [(_, &[_]); 3] = [
        ("slow-head", &["head_timeout"]),
        ("slow-upload", &["body_too_slow", "body_timeout"]),
        ("slow-reader", &["stalled"]),
    ];
    for (kind, names) in slow {
        // The gateway may end clients that are about to disconnect.
        let (count, possible) = (errors(names), seen(kind, 408).max(1)..=started(kind));
        assert!(possible.contains(&count), "{kind}: {count} times {names:?}, expected {possible:?}");
    }
    let others =
        ["connect", "upstream", "connect_timeout", "response_timeout", "request_timeout", "overloaded", "panic"];
    assert_eq!(errors(&others), 0, "one of {others:?}");
    println!("requests by route and status: {responses:?}");
}

/// The length of the soak, and the pause after each request.
fn length_and_pause() -> (Duration, Option<Duration>) {
    match std::env::var("TRANSOM_SOAK_S") {
        Ok(text) => (Duration::from_secs(text.parse().expect("`TRANSOM_SOAK_S` is a number")), None),
        Err(_) => (Duration::from_secs(180), Some(Duration::from_millis(40))),
    }
}

#[test]
fn a_soak_loses_no_request_and_no_memory() {
    let (length, pause) = length_and_pause();
    let reload_period = (length / 25).min(Duration::from_secs(60));
    let mut flapping = [(); 2].map(|()| RestartableServer::start(echo_target));
    let addresses = flapping.each_ref().map(|server| server.address);
    let files = nginx(|root| {
        std::fs::write(root.join("download"), download()).unwrap();
        std::fs::write(root.join("slow-reader"), vec![0; LARGE_BYTES]).unwrap();
    });
    // Does not end slow uploads: the gateway does.
    let echo = Process::spawn(&format!("[limits]\nmin_request_rate = 0\n{ECHO}"));
    let (authority, certificates) = (TestCa::new(), TempDir::new());
    let listen = tls::listen(&certificates, &authority.issue(&[HOST]), "");
    let toml = |generation| toml(&listen, addresses, files.address, echo.http, generation);
    let mut gateway = Process::spawn(&toml(0));
    let descriptors_at_start = descriptors(&gateway);
    let soak = Soak {
        gateway: gateway.http,
        pause,
        is_over: AtomicBool::new(false),
        connections: AtomicU64::new(0),
        responses: Mutex::default(),
    };
    let (tls, https) = (TlsClient::trusting(&authority), gateway.https.unwrap());
    let (mut memory, mut open, mut reloads) = (Vec::new(), Vec::new(), 0);
    let kills = thread::scope(|scope| {
        let soak = &soak;
        let end = EndOnDrop(soak);
        for name in ["a", "b", "c"] {
            let connect = || Client::connect(soak.gateway);
            scope.spawn(move || soak.steady_client(name, connect, |client, target| client.get(target)));
        }
        for name in ["a", "b"] {
            scope.spawn(move || soak.limited_client(name));
        }
        let connect = || Http2Client::connect(soak.gateway);
        scope.spawn(move || soak.steady_client("http2", connect, |client, target| client.get(target)));
        scope.spawn(|| soak.flood_client());
        scope.spawn(|| soak.transfer_client(&tls, https));
        scope.spawn(|| soak.slow_clients());
        let flapping = scope.spawn(|| flap(soak, &mut flapping, reload_period / 2));
        let start = Instant::now();
        while start.elapsed() < length && !soak.is_over() {
            soak.sleep(SAMPLE_PERIOD);
            memory.push(memory_kb(&gateway));
            open.push(descriptors(&gateway));
            if start.elapsed() > reload_period * (reloads + 1) {
                reloads += 1;
                gateway.write_config(&toml(reloads));
                gateway.wait_for_reloads("applied", reloads.into());
            }
        }
        drop(end);
        flapping.join().unwrap()
    });
    let seconds = gateway.metrics().sum("process_cpu_seconds_total", &[]);
    println!("{length:?}, {reloads} reloads, {kills} kills, {seconds} s of CPU time of the gateway");
    println!("memory in kB and descriptors, quarters: {:?}, {:?}", quarters(&memory), quarters(&open));
    assert!(reloads > 0 && kills > 0);
    assert_metrics(&soak, &gateway, reloads);
    let idle_connections = || gateway.metrics().sum("transom_upstream_connections", &[]);
    eventually_eq(|| descriptors(&gateway) - idle_connections(), descriptors_at_start);
    assert_flat("memory in kB", &memory, MEMORY_MARGIN_KB);
    assert_flat("descriptors", &open, DESCRIPTORS_MARGIN);
    gateway.signal("TERM");
    assert!(gateway.wait().success(), "{}", gateway.stderr());
}
