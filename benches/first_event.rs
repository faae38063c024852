//! Measures the time to the first event of streams that models send, through the gateway and beside it, while a thousand streams are
//! open, and the memory of the gateway for an open stream.
//!
//! `cargo bench --bench first_event` needs 3,000 open files. The server sends the first event of a stream at once and the others at
//! intervals; each client begins a stream when its last one has ended. Server and clients are a thread each, and share the cores with
//! the gateway.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, LocalOptions, LocalRuntime};
use tokio::task::spawn_local;
use tokio::time::sleep;
use transom_runtime::clock::Clock;

/// The gateway's allocator, for clients and server.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const STREAMS: usize = 1000;
const ROUNDS: usize = 3;
const TURN: Duration = Duration::from_secs(8);
/// Of each turn, before the measurement.
const WARM_UP: Duration = Duration::from_secs(3);
const EVENTS: usize = 20;
const INTERVAL: Duration = Duration::from_millis(100);

const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
const EVENT: &str = "data: {\"id\":\"chatcmpl-9\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\
    \"choices\":[{\"index\":0,\"delta\":{\"content\":\" fox\"},\"finish_reason\":null}],\"usage\":null}\n\n";
const USAGE: &str =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":20,\"total_tokens\":29}}\n\n";
const END: &[u8] = b"0\r\n\r\n";
const BODY: &str =
    "{\"model\":\"m\",\"stream\":true,\"max_tokens\":20,\"messages\":[{\"role\":\"user\",\"content\":\"Which fox?\"}]}";

fn main() {
    // `cargo test` runs benchmark targets as well, without `--bench`; then there is nothing to do.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let server = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        runtime().block_on(async {
            let listener = TcpListener::from_std(listener).expect("a listener");
            while let Ok((stream, _)) = listener.accept().await {
                spawn_local(serve(stream));
            }
        });
    });
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"4000000000/day\"]\ncost = ";
    let usage = "{ usage = \"auto\", reserve = { json = \"/max_tokens\", input = \"bytes/4\", default = 99 } }\n";
    let gateways = [
        Gateway::start(server, "", ""),
        Gateway::start(server, &format!("{rule}1\n"), "rules = [\"r\"]\n"),
        Gateway::start(server, &format!("{rule}{usage}"), "rules = [\"r\"]\n"),
    ];
    let names = ["direct", "gateway, no rule", "gateway, rule by requests", "gateway, rule by usage"];
    let addresses = [server, gateways[0].address, gateways[1].address, gateways[2].address];
    let mut turns: [Vec<(f64, f64, f64)>; 4] = Default::default();
    let mut kib = [0.0; 4];
    for _ in 0..ROUNDS {
        for (at, address) in addresses.into_iter().enumerate() {
            let gateway = at.checked_sub(1).map(|at| &gateways[at]);
            let (times_ms, open_kib) = turn(address, gateway);
            let percentile = |share: f64| times_ms[((times_ms.len() - 1) as f64 * share) as usize];
            turns[at].push((percentile(0.5), percentile(0.99), times_ms.len() as f64));
            kib[at] = f64::max(kib[at], open_kib);
        }
    }
    println!(
        "{STREAMS} streams at a time, each of {EVENTS} events at intervals of {INTERVAL:?}; medians of {ROUNDS} rounds"
    );
    println!("{:27}  p50 ms  p99 ms  streams a turn  KiB a stream, at most", "first event");
    for ((name, turns), kib) in names.iter().zip(&turns).zip(kib) {
        let median_of = |part: fn(&(f64, f64, f64)) -> f64| median(turns.iter().map(part));
        let (p50, p99, streams) = (median_of(|turn| turn.0), median_of(|turn| turn.1), median_of(|turn| turn.2));
        println!("{name:27}  {p50:6.2}  {p99:6.2}  {streams:14.0}  {kib:21.1}");
    }
}

fn runtime() -> LocalRuntime {
    Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime")
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Answers the requests of a connection.
async fn serve(mut stream: TcpStream) {
    let chunk = |data: &str| format!("{:x}\r\n{data}\r\n", data.len()).into_bytes();
    let (event, usage) = (chunk(EVENT), [&chunk(USAGE)[..], END].concat());
    drop(stream.set_nodelay(true));
    let mut received = Vec::new();
    loop {
        while !received.ends_with(BODY.as_bytes()) {
            if !matches!(stream.read_buf(&mut received).await, Ok(1..)) {
                return;
            }
        }
        received.clear();
        if stream.write_all(&[HEAD, &event].concat()).await.is_err() {
            return;
        }
        for _ in 1..EVENTS {
            sleep(INTERVAL).await;
            if stream.write_all(&event).await.is_err() {
                return;
            }
        }
        if stream.write_all(&usage).await.is_err() {
            return;
        }
    }
}

/// The times to the first events of a turn in milliseconds, in order, and the memory of the gateway for a stream.
fn turn(address: SocketAddr, gateway: Option<&Gateway>) -> (Vec<f64>, f64) {
    let before = gateway.map_or(0.0, Gateway::resident_kib);
    let runtime = runtime();
    let mut times_ms = runtime.block_on(async {
        let clock = Rc::new(Clock::system());
        let began = clock.instant();
        let clients: Vec<_> = (0..STREAMS)
            .map(|number| {
                let clock = Rc::clone(&clock);
                spawn_local(async move {
                    // The streams begin one after the other.
                    sleep(EVENTS as u32 * INTERVAL * number as u32 / STREAMS as u32).await;
                    let mut stream = TcpStream::connect(address).await.expect("a connection");
                    drop(stream.set_nodelay(true));
                    let mut times_ms = Vec::new();
                    while began.elapsed() < TURN {
                        let sent = clock.instant();
                        let first_ms = read_stream(&mut stream, &clock).await;
                        if sent.duration_since(began) > WARM_UP {
                            times_ms.push(first_ms);
                        }
                    }
                    times_ms
                })
            })
            .collect();
        sleep(TURN - Duration::from_millis(500)).await;
        let open_kib = gateway.map_or(0.0, Gateway::resident_kib) - before;
        let mut times_ms = Vec::new();
        for client in clients {
            times_ms.extend(client.await.expect("no panic"));
        }
        (times_ms, open_kib / STREAMS as f64)
    });
    times_ms.0.sort_by(f64::total_cmp);
    times_ms
}

/// Asks for a stream, and reads all of it. Returns the time to its first event in milliseconds.
async fn read_stream(stream: &mut TcpStream, clock: &Clock) -> f64 {
    let fields = format!("Host: a\r\nContent-Type: application/json\r\nContent-Length: {}", BODY.len());
    let request = format!("POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n{BODY}");
    let sent = clock.instant();
    stream.write_all(request.as_bytes()).await.expect("the request is sent");
    let mut received = Vec::with_capacity(16 << 10);
    let mut first_ms = None;
    while !received.ends_with(END) {
        let read = stream.read_buf(&mut received).await.expect("the stream goes on");
        assert!(read > 0, "the stream has broken off: {}", String::from_utf8_lossy(&received));
        if first_ms.is_none() && received.windows(5).any(|part| part == b"data:") {
            first_ms = Some(sent.elapsed().as_secs_f64() * 1000.0);
        }
    }
    assert!(received.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&received));
    first_ms.expect("an event")
}

/// A gateway that ends with the benchmark.
struct Gateway {
    address: SocketAddr,
    child: Child,
    folder: std::path::PathBuf,
}

impl Gateway {
    fn start(server: SocketAddr, rule: &str, rules: &str) -> Gateway {
        let free = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
        let address = free.expect("a free port");
        let folder = std::env::temp_dir().join(format!("transom-first-event-{}", address.port()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("gateway.toml");
        let toml = format!(
            "[listen]\nhttp = \"{address}\"\n[upstreams.u]\nservers = [\"http://{server}\"]\n{rule}\
             [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n{rules}"
        );
        std::fs::write(&file, toml).expect("a file");
        let command = Path::new(env!("CARGO_BIN_EXE_transom"));
        let mut child =
            Command::new(command).arg("--config").arg(&file).stdout(Stdio::null()).spawn().expect("a gateway");
        while std::net::TcpStream::connect(address).is_err() {
            assert!(matches!(child.try_wait(), Ok(None)), "the gateway has ended");
            std::thread::sleep(Duration::from_millis(20));
        }
        Gateway { address, child, folder }
    }

    fn resident_kib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        drop(std::fs::remove_dir_all(&self.folder));
    }
}
