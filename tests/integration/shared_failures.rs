//! Rare failures: outages under load and over many windows, late replies, malformed replies, and an exit while Redis hangs.

use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::task::spawn_local;
use transom_store::client::RedisClient;
use transom_store::scripts::CounterRequest;

use crate::support::gateway_group::{rule_by_key, shared_config};
use crate::support::load_checker::now_ms;
use crate::support::process::Process;
use crate::support::redis::RedisServer;
use crate::support::redis_client::{expect_granted, plain_request, run_on_worker, single_server};
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, within};

/// The default time for which a request waits for the store.
const STORE_TIMEOUT: Duration = Duration::from_millis(50);
/// The maximum time that a drain waits for reports to a hanging store.
const FINAL_REPORTS: Duration = Duration::from_secs(1);
const REACHABLE_AGAIN: &str = "shared counters are reachable again";

fn gateway(redis: &str, settings: &str, windows: &str) -> Process {
    Process::spawn(&shared_config(&format!("\"{redis}\""), settings, &rule_by_key(windows, "")))
}

#[track_caller]
fn status_of(gateway: &Process, key: &str) -> u16 {
    within(STORE_TIMEOUT, || gateway.client().get_with("/a", &[("X-Key", key)]).status)
}

fn reported(gateway: &Process) -> u64 {
    gateway.metrics().sum("transom_shared_tokens_total", &[("outcome", "reported")])
}

/// Runs an action while clients send requests without pause. The key of each request is made from its number.
fn under_load(gateway: &Process, key: impl Fn(u64) -> String + Sync, during: impl FnOnce(&AtomicU64)) {
    let (stop, number) = (AtomicBool::new(false), AtomicU64::new(0));
    let send_requests = || {
        let mut client = gateway.client();
        while !stop.load(Ordering::SeqCst) {
            let key = key(number.fetch_add(1, Ordering::SeqCst));
            assert_eq!(client.get_with("/a", &[("X-Key", &key)]).status, 200);
        }
    };
    thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(send_requests)));
        during(&number);
        stop.store(true, Ordering::SeqCst);
    });
}

#[test]
fn an_outage_ends_under_load() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let gateway = gateway(&redis.url(), &format!("mode = \"{mode}\""), "[\"1000000/30d\"]");
        under_load(
            &gateway,
            |number| number.to_string(),
            |number| {
                eventually("requests are counted by the store", || number.load(Ordering::SeqCst) > 50);
                redis.suspend();
                gateway.wait_for_stderr("shared counters cannot be reached");
                let before = number.load(Ordering::SeqCst);
                // More counters than all workers report at once.
                eventually("requests are counted locally", || number.load(Ordering::SeqCst) > before + 1000);
                redis.resume();
                gateway.wait_for_stderr(REACHABLE_AGAIN);
            },
        );
        // All local usage is reported, also of requests that noticed the outage first.
        let local = gateway.metrics().sum("transom_shared_outage_decisions_total", &[("policy", "local")]);
        eventually_eq(|| reported(&gateway), local);
    }
}

#[test]
fn usage_of_an_outage_is_reported_for_the_open_window() {
    const PERIOD_MS: u64 = 10_000;
    let redis = RedisServer::start();
    let gateway = gateway(&redis.url(), "", "[\"1000000/10s\"]");
    assert_eq!(status_of(&gateway, "alice"), 200);
    under_load(
        &gateway,
        |_| "alice".to_owned(),
        |_| {
            redis.suspend();
            let began = now_ms() / PERIOD_MS;
            // Early in another window, which has local usage when Redis returns.
            eventually("another window is open", || {
                now_ms() / PERIOD_MS > began && (500..1500).contains(&(now_ms() % PERIOD_MS))
            });
            redis.resume();
            gateway.wait_for_stderr(REACHABLE_AGAIN);
            eventually("usage is reported", || reported(&gateway) > 0);
        },
    );
}

#[test]
fn a_locally_counted_request_is_reported_without_an_outage() {
    let redis = RedisServer::start();
    let gateway = gateway(&redis.url(), "", "[\"100/30d\"]");
    assert_eq!(status_of(&gateway, "alice"), 200);
    redis.suspend();
    assert_eq!(status_of(&gateway, "bob"), 200);
    redis.resume();
    eventually("the request is reported", || reported(&gateway) == 1);
}

#[test]
fn usage_is_reported_to_a_restarted_store() {
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let settings = format!("mode = \"{mode}\"\non_outage = \"refuse\"\ntimeout = \"10s\"");
        let gateway = gateway(&redis.url(), &settings, "[\"160/30d\"]");
        let mut client = gateway.client();
        let mut admitted = |times: usize| -> usize {
            let responses = (0..times).map(|_| client.get_with("/a", &[("X-Key", "alice")]).status);
            responses.filter(|status| *status == 200).count()
        };
        assert_eq!(admitted(100), 100);
        redis.restart();
        // The only gateway knows the whole usage.
        let after = admitted(200);
        assert!(after <= 60, "{mode}: {after}");
    }
}

#[test]
fn the_gateway_exits_soon_while_redis_hangs() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let mut gateway = gateway(&redis.url(), &format!("mode = \"{mode}\""), "[\"1000/30d\"]");
        let mut client = gateway.client();
        for key in 0..2000 {
            assert_eq!(client.get_with("/a", &[("X-Key", &key.to_string())]).status, 200);
        }
        redis.suspend();
        gateway.signal("TERM");
        assert!(within(FINAL_REPORTS, || gateway.wait()).success());
    }
}

/// A server that responds to scripts as the test specifies, and to other commands like Redis.
fn scripted_redis(response: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
    Upstream::with_script(move |connection| {
        let mut commands = BufReader::new(connection.stream().try_clone().unwrap());
        while let Some(name) = read_command_name(&mut commands) {
            match name.as_str() {
                "EVALSHA" | "EVAL" => response(connection),
                "PING" => _ = connection.send("+PONG\r\n"),
                _ => _ = connection.send("+OK\r\n"),
            }
        }
    })
}

/// The name of the next command.
fn read_command_name(stream: &mut impl BufRead) -> Option<String> {
    let words = read_number(stream)?;
    let mut name = None;
    for _ in 0..words {
        let mut word = vec![0; read_number(stream)? + 2];
        stream.read_exact(&mut word).ok()?;
        name.get_or_insert_with(|| String::from_utf8_lossy(&word[..word.len() - 2]).to_uppercase());
    }
    name
}

fn read_number(stream: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    line.trim_end().get(1..)?.parse().ok()
}

#[test]
fn an_endless_reply_is_not_buffered() {
    for beginning in ["$1000000000000\r\n", "+", "*1000000000\r\n", "-ERR "] {
        let piece = if beginning.starts_with('*') { ":1\r\n".repeat(16_384) } else { "x".repeat(65_536) };
        let redis = scripted_redis(move |connection| {
            let _ = connection.send(beginning);
            while connection.send(&piece) {}
        });
        let gateway = gateway(&format!("redis://{}", redis.address), "", "[\"100/30d\"]");
        assert_eq!(status_of(&gateway, "alice"), 200);
        gateway.wait_for_stderr("shared counters cannot be reached");
        // One request was admitted before; the limit is 100.
        let responses: Vec<u16> = (0..110).map(|_| status_of(&gateway, "alice")).collect();
        assert_eq!(responses, [[200; 99].as_slice(), &[429; 11]].concat());
        assert!(gateway.memory_kb("VmHWM") < 400_000, "{} kB", gateway.memory_kb("VmHWM"));
        assert!(gateway.stderr().lines().all(|line| line.len() < 1000));
    }
}

#[test]
fn a_server_with_a_wrong_clock_is_not_retried_endlessly() {
    for mode in ["lease", "exact"] {
        let redis = scripted_redis(|connection| _ = connection.send("*5\r\n:0\r\n:-1\r\n:0\r\n:0\r\n:0\r\n"));
        let gateway = gateway(&format!("redis://{}", redis.address), &format!("mode = \"{mode}\""), "[\"5/30d\"]");
        let responses: Vec<u16> = (0..7).map(|_| status_of(&gateway, "alice")).collect();
        assert_eq!(responses, [200, 200, 200, 200, 200, 429, 429], "{mode}");
    }
}

#[test]
fn an_oversized_counter_value_affects_no_other_counter() {
    let redis = RedisServer::start();
    let gateway = gateway(&redis.url(), "", "[\"1000/30d\"]");
    for _ in 0..200 {
        assert_eq!(status_of(&gateway, "alice"), 200);
        assert_eq!(status_of(&gateway, "bob"), 200);
    }
    let key = redis.keys().into_iter().find(|name| name.contains("alice")).unwrap();
    redis.cli(&["SET", &key, "99999999999999999999"]);
    let returned = || gateway.metrics().sum("transom_shared_tokens_total", &[("outcome", "returned")]);
    let mut last_burst = Instant::now();
    eventually("unspent tokens of bob are returned", || {
        // On a busy machine, requests may come too slowly for leases of more than one token.
        if last_burst.elapsed() > Duration::from_secs(3) {
            (0..20).for_each(|_| assert_eq!(status_of(&gateway, "bob"), 200));
            last_burst = Instant::now();
        }
        returned() > 0
    });
    assert_eq!(redis.cli(&["GET", &key]), "99999999999999999999");
    assert_eq!(gateway.metrics().sum("transom_shared_requests_total", &[("outcome", "unreachable")]), 0);
}

#[test]
fn calls_beyond_the_script_limit_are_split() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let commands: Vec<_> = (0..64)
            .map(|call| {
                let store = store.clone();
                let requests: Vec<CounterRequest> =
                    (0..200).map(|layer| plain_request(&format!("t:{{{call}}}:{layer}"), 1, 9)).collect();
                spawn_local(async move { expect_granted(store.acquire(&requests, 0).await.unwrap()).len() })
            })
            .collect();
        for call in commands {
            assert_eq!(call.await.unwrap(), 200);
        }
    });
    assert_eq!(redis.integer(&["DBSIZE"]), 64 * 200);
}
