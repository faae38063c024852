//! Measures exact decisions through Redis per second: many concurrent requests of one worker, compared with a client that
//! sends one call per request and waits.
//!
//! `cargo bench --bench exact_decisions` starts a redis-server of its own (Debian's `redis-server`) and prints both,
//! measured in turns, and their ratio. Both sides run the same script on one connection each; every decision is about
//! three plain windows of one key, of 1,000 keys in turn, and none is refused. The waiting client is measured twice: as a
//! task of a worker, as in a gateway, and as a thread without a runtime.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};
use transom_config::redis::{Node, Nodes, StoreConfig};
use transom_limiter::store_key::StoreWindow;
use transom_limiter::window_kind::WindowKind;
use transom_runtime::clock::Clock;
use transom_store::client::RedisClient;
use transom_store::scripts::{self, AcquireCall, AcquireReply, AcquireResult, CounterRequest, ScriptRef, Scripts};

/// The gateway's allocator, for both sides.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ROUNDS: usize = 5;
const ROUND_DURATION: Duration = Duration::from_secs(2);
const CONCURRENT_REQUESTS: usize = 200;
const KEYS: usize = 1000;
const TARGET_RATIO: f64 = 5.0;

fn main() {
    // `cargo test` runs benchmark targets as well, without `--bench`; then there is nothing to do.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let redis = Redis::start();
    let keys: Vec<[CounterRequest; 3]> = (0..KEYS).map(requests).collect();
    let (mut blocking, mut sequential, mut concurrent) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        blocking.push(blocking_client(redis.port, &keys));
        sequential.push(sequential_client(redis.port, &keys));
        concurrent.push(concurrent_requests(redis.port, &keys));
    }
    let (blocking, sequential, concurrent) = (median(blocking), median(sequential), median(concurrent));
    println!("decisions about three layers, per second, median of {ROUNDS} rounds of {ROUND_DURATION:?}");
    println!("  one at a time, a thread that waits     {blocking:>8.0}");
    println!("  one at a time, on a worker             {sequential:>8.0}");
    println!("  {CONCURRENT_REQUESTS} at once, on a worker               {concurrent:>8.0}");
    println!(
        "  ratio {:.1} to the thread, {:.1} on a worker (target: {TARGET_RATIO})",
        concurrent / blocking,
        concurrent / sequential
    );
}

/// One thread that calls and waits.
fn blocking_client(port: u16, keys: &[[CounterRequest; 3]]) -> f64 {
    let client = redis::Client::open(("127.0.0.1", port)).expect("an address");
    let mut connection = client.get_connection().expect("redis-server listens");
    let scripts = Scripts::default();
    scripts::acquire_command(&scripts.acquire, ScriptRef::Text, acquire_calls(keys).iter().take(1))
        .exec(&mut connection)
        .expect("is executed");
    let calls = acquire_calls(keys);
    let (start, mut decided) = (Clock::system().instant(), 0);
    while start.elapsed() < ROUND_DURATION {
        let call = [&calls[decided % KEYS]];
        let reply = scripts::acquire_command(&scripts.acquire, ScriptRef::Sha, call.into_iter()).query(&mut connection);
        check(scripts::parse_acquire_reply(&reply.expect("is executed"), call.into_iter()));
        decided += 1;
    }
    decided as f64 / start.elapsed().as_secs_f64()
}

/// A task that calls and waits, with redis-rs alone.
fn sequential_client(port: u16, keys: &[[CounterRequest; 3]]) -> f64 {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async {
        let client = redis::Client::open(("127.0.0.1", port)).expect("an address");
        let mut connection = client.get_multiplexed_async_connection().await.expect("redis-server listens");
        let scripts = Scripts::default();
        let calls = acquire_calls(keys);
        let (start, mut decided) = (Clock::system().instant(), 0);
        while start.elapsed() < ROUND_DURATION {
            let call = [&calls[decided % KEYS]];
            let command = scripts::acquire_command(&scripts.acquire, ScriptRef::Sha, call.into_iter());
            let reply = command.query_async(&mut connection).await.expect("is executed");
            check(scripts::parse_acquire_reply(&reply, call.into_iter()));
            decided += 1;
        }
        decided as f64 / start.elapsed().as_secs_f64()
    })
}

/// Many requests through the Redis client of one worker.
fn concurrent_requests(port: u16, keys: &[[CounterRequest; 3]]) -> f64 {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime");
    let keys: Rc<[[CounterRequest; 3]]> = keys.into();
    runtime.block_on(async {
        let store = RedisClient::new(&settings(port));
        store.probe().await.expect("redis-server replies");
        let now_ms = now_ms();
        let start = Clock::system().instant();
        let tasks: Vec<_> = (0..CONCURRENT_REQUESTS)
            .map(|first| {
                let (store, keys) = (store.clone(), Rc::clone(&keys));
                tokio::task::spawn_local(async move {
                    let mut decided = 0;
                    while start.elapsed() < ROUND_DURATION {
                        let reply = store.acquire(&keys[(first + decided * CONCURRENT_REQUESTS) % KEYS], now_ms).await;
                        assert!(matches!(reply, Ok(AcquireReply::Granted { .. })), "{reply:?}");
                        decided += 1;
                    }
                    decided
                })
            })
            .collect();
        let mut decided = 0;
        for task in tasks {
            decided += task.await.expect("no panic");
        }
        decided as f64 / start.elapsed().as_secs_f64()
    })
}

fn acquire_calls(keys: &[[CounterRequest; 3]]) -> Vec<AcquireCall> {
    let now_ms = now_ms();
    keys.iter()
        .map(|requests| AcquireCall { requests: requests.to_vec(), gateway_ms: now_ms, window_ms: now_ms })
        .collect()
}

fn check(decisions: Option<Vec<AcquireResult>>) {
    assert!(matches!(decisions.as_deref(), Some([Ok(AcquireReply::Granted { .. })])));
}

fn requests(key: usize) -> [CounterRequest; 3] {
    let now_ms = now_ms();
    let window = |period_ms: u64, name: &str| {
        let number = now_ms / period_ms;
        let (end_ms, next_end_ms) = ((number + 1) * period_ms, (number + 2) * period_ms);
        let at = StoreWindow { kind: WindowKind::Plain, number, end_ms, next_end_ms };
        let base = format!("transom:{{bench|{key}}}:{name}").into();
        CounterRequest {
            key_base: base,
            window: at,
            limit: u32::MAX,
            ceiling: u64::from(u32::MAX),
            need: 1,
            want: 1,
            used_min: 0,
            need_once_refused: 0,
            reserved_after_ms: 0,
            refund_used_max: None,
            counter: None,
            computed_ms: 0,
            generation: 0,
        }
    };
    // Long periods, which rarely end during the benchmark.
    [window(86_400_000, "day"), window(7 * 86_400_000, "week"), window(30 * 86_400_000, "month")]
}

fn settings(port: u16) -> StoreConfig {
    StoreConfig::with_defaults(Nodes::Single(Node::Tcp { host: "127.0.0.1".to_owned(), port }))
}

fn now_ms() -> u64 {
    Clock::system().now().unix_ms
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// A redis-server that ends with the benchmark.
struct Redis {
    port: u16,
    child: Child,
}

impl Redis {
    fn start() -> Redis {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let port_text = port.to_string();
        let options = ["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"];
        let child = Command::new("redis-server").args(options).stdout(Stdio::null()).spawn().expect("redis-server");
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            sleep(Duration::from_millis(10));
        }
        Redis { port, child }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
