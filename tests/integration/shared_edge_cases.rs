//! Edge cases of shared counters: a full table, rules of several kinds in one request, a Redis that lost its data, and outages
//! longer than a window.

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::client::Client;
use crate::support::gateway_group::{
    GatewayGroup, LONG_TIMEOUT, count_admitted_by, query_decision, rule_by_key, shared_config,
};
use crate::support::load_checker::now_ms;
use crate::support::process::Process;
use crate::support::redis::RedisServer;
use crate::support::{eventually, within};

const LOCAL: &str = "timeout = \"10s\"\non_outage = \"local\"\n";

fn config(redis: &RedisServer, settings: &str, rules: &str) -> String {
    shared_config(&format!("\"{}\"", redis.url()), settings, rules)
}

/// A rule of this name by the header `x-key`.
fn named(name: &str, windows: &str, more: &str) -> String {
    rule_by_key(windows, more).replace("[rules.r]", &format!("[rules.{name}]"))
}

fn status(gateway: &Process, key: &str) -> u16 {
    gateway.client().get_with("/a", &[("X-Key", key)]).status
}

/// Sends concurrent requests with a key; returns the number of admitted ones.
fn admitted_concurrently(gateway: &Process, key: &str, times: usize) -> usize {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..times).map(|_| scope.spawn(|| count_admitted_by(gateway, key, 1))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    })
}

#[test]
fn a_full_table_admits_no_more_than_the_limit() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let settings = format!("mode = \"{mode}\"\n{LOCAL}\n[counters]\ncapacity = 64\n");
        let gateway = Process::spawn(&config(&redis, &settings, &rule_by_key("[\"2/30d\"]", "")));
        for key in 0..300 {
            let key = format!("key-{key}");
            assert_eq!(count_admitted_by(&gateway, &key, 4), 2, "{mode} {key}");
        }
    }
}

#[test]
fn a_request_delayed_by_one_rule_is_charged_by_the_others() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let rules = named("exact", "[\"6/30d\"]", "shared = \"exact\"")
            + &named("slow", "[\"2/1s\"]", "on_limit = \"delay\"\nmax_delay = \"20s\"");
        let gateway = Process::spawn(&config(&redis, &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), &rules));
        assert_eq!(admitted_concurrently(&gateway, "alice", 12), 6, "{mode}");
        let key = redis.keys().into_iter().find(|key| key.starts_with("transom:{exact|alice}")).unwrap();
        assert_eq!(redis.integer(&["GET", &key]), 6, "{mode}");
    }
}

#[test]
fn a_delaying_rule_blocks_no_request_in_an_outage() {
    let mut redis = RedisServer::start();
    let both = named("wide", "[\"100000/30d\"]", "")
        + &named("slow", "[\"2/10s\"]", "on_limit = \"delay\"\nmax_delay = \"60s\"");
    let alone = "[[routes]]\npath = \"/alone\"\nupstream = \"u\"\nrules = [\"wide\"]\n";
    let toml = format!("workers = 1\n{}{alone}", config(&redis, LOCAL, &both));
    let gateway = Process::spawn(&toml);
    // Many tokens of the wide rule are fetched.
    let mut client = gateway.client();
    (0..300).for_each(|_| drop(client.get_with("/alone", &[("X-Key", "alice")]).expect(200)));
    redis.kill();
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..5).map(|_| scope.spawn(|| status(&gateway, "alice"))).collect();
        let until = Instant::now() + Duration::from_secs(3);
        while Instant::now() < until {
            // A request that needs no store gets its response at once.
            within(Duration::ZERO, || gateway.client().get_with("/alone", &[("X-Key", "alice")]).expect(200));
            thread::sleep(Duration::from_millis(20));
        }
        waiting.into_iter().for_each(|waiting| assert_eq!(waiting.join().unwrap(), 200));
    });
}

#[test]
fn a_store_that_lost_its_data_grants_no_window_twice() {
    for mode in ["lease", "exact"] {
        for used in [10, 6] {
            let mut redis = RedisServer::start();
            let settings = format!("mode = \"{mode}\"\ntimeout = \"10s\"\non_outage = \"refuse\"\n");
            let gateway = Process::spawn(&format!(
                "workers = 1\n{}",
                config(&redis, &settings, &rule_by_key("[\"10/30d\"]", ""))
            ));
            assert_eq!(count_admitted_by(&gateway, "alice", used), used);
            redis.restart();
            eventually("Redis counts again", || status(&gateway, "bob") == 200);
            let start = Instant::now();
            let mut more = 0;
            // Also after the periodic query for returned tokens.
            while start.elapsed() < Duration::from_millis(if used == 10 { 12_000 } else { 500 }) {
                more += count_admitted_by(&gateway, "alice", 5);
                thread::sleep(Duration::from_millis(50));
            }
            assert!(more <= 10 - used, "{mode}: {more} more than {used}");
        }
    }
}

#[test]
fn a_reset_reaches_all_gateways() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let settings = format!("mode = \"{mode}\"\n{LONG_TIMEOUT}");
        let gateways = GatewayGroup::start(2, &config(&redis, &settings, &rule_by_key("[\"5/30d\"]", "")));
        assert_eq!(gateways.count_admitted("alice", 5), 5);
        assert_eq!(count_admitted_by(&gateways.0[1], "alice", 2), 0);
        query_decision(&gateways.0[0], "reset", &json!({ "rule": "r", "key": "alice" }));
        eventually("the other gateway admits again", || count_admitted_by(&gateways.0[1], "alice", 1) == 1);
    }
}

#[test]
fn returned_tokens_can_be_fetched_again() {
    let redis = RedisServer::start();
    let settings = format!("mode = \"lease\"\n{LONG_TIMEOUT}");
    let toml = format!("workers = 1\n{}", config(&redis, &settings, &rule_by_key("[\"1000/30d\"]", "")));
    let gateway = Process::spawn(&toml);
    assert_eq!(count_admitted_by(&gateway, "alice", 100), 100);
    let key = redis.keys().into_iter().find(|key| key.contains("alice")).unwrap();
    eventually("unspent tokens are returned", || redis.integer(&["GET", &key]) == 100);
    // Longer than the gateway keeps an unused counter.
    thread::sleep(Duration::from_secs(14));
    assert_eq!(count_admitted_by(&gateway, "alice", 1), 1);
    assert_eq!(redis.integer(&["GET", &key]), 101);
}

#[test]
fn usage_during_an_outage_is_reported_for_the_open_window() {
    // Long enough that the report arrives in the open window, also on a busy machine.
    const PERIOD_MS: u64 = 12_000;
    let mut redis = RedisServer::start();
    let toml = config(&redis, "on_outage = \"local\"\n", &rule_by_key("[\"100/12s\"]", ""));
    let gateway = Process::spawn(&format!("workers = 1\n{toml}"));
    redis.kill();
    assert_eq!(count_admitted_by(&gateway, "alice", 1), 1);
    let first = now_ms() / PERIOD_MS;
    eventually("another window has just begun", || now_ms() / PERIOD_MS > first && now_ms() % PERIOD_MS < 300);
    let window = now_ms() / PERIOD_MS;
    assert_eq!(count_admitted_by(&gateway, "alice", 40), 40);
    redis.restart();
    let key = format!("transom:{{r|alice}}:{window}");
    let mut counted = 0;
    while counted < 40 && now_ms() / PERIOD_MS == window {
        counted = redis.integer(&["GET", &key]);
    }
    assert_eq!(counted, 40, "in the window in which they were admitted");
}

#[test]
fn each_worker_resumes_without_a_fresh_limit() {
    let mut redis = RedisServer::start();
    let toml = config(&redis, "on_outage = \"local\"\n", &rule_by_key("[\"50/30d\"]", ""));
    let gateway = Process::spawn(&format!("workers = 4\n{toml}"));
    redis.kill();
    let mut admitted: usize = (0..80).map(|_| count_admitted_by(&gateway, "alice", 1)).sum();
    assert_eq!(admitted, 50);
    redis.restart();
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        admitted += count_admitted_by(&gateway, "alice", 1);
    }
    assert_eq!(admitted, 50);
}

#[test]
fn a_lowered_limit_applies_to_leased_tokens() {
    let redis = RedisServer::start();
    let toml = |limit: u32| {
        config(&redis, &format!("mode = \"lease\"\n{LONG_TIMEOUT}"), &rule_by_key(&format!("[\"{limit}/30d\"]"), ""))
    };
    let gateways = GatewayGroup::start(1, &toml(100_000));
    assert_eq!(count_admitted_by(&gateways.0[0], "alice", 300), 300);
    gateways.reload(&toml(200));
    eventually("the lower limit applies", || count_admitted_by(&gateways.0[0], "alice", 1) == 0);
    assert_eq!(count_admitted_by(&gateways.0[0], "alice", 20), 0);
    gateways.reload(&toml(100_000));
    eventually("the higher limit applies", || count_admitted_by(&gateways.0[0], "alice", 1) == 1);
    assert_eq!(count_admitted_by(&gateways.0[0], "alice", 20), 20);
}

/// A counter with a name that does not depend on the period has numbers of shorter windows, which are greater.
#[test]
fn a_longer_period_begins_unused() {
    let redis = RedisServer::start();
    for (mode, more, suffix, limit) in [
        ("exact", "sliding = true", "sliding", 3),
        ("lease", "sliding = true", "sliding", 3),
        ("exact", "capacity = 4", "account", 4),
        ("lease", "capacity = 4", "account", 4),
    ] {
        redis.cli(&["FLUSHALL"]);
        let toml = |period: &str| {
            let rule = rule_by_key(&format!("[{{ limit = 3, period = \"{period}\", {more} }}]"), "");
            config(&redis, &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), &rule)
        };
        let (shorter, longer) = (Process::spawn(&toml("30d")), Process::spawn(&toml("60d")));
        assert_eq!(count_admitted_by(&shorter, "alice", 2), 2);
        assert_eq!(count_admitted_by(&longer, "alice", 6), limit, "{mode} {suffix}");
        let left_ms = redis.integer(&["PTTL", &format!("transom:{{r|alice}}:{suffix}")]);
        assert!((1..200 * 24 * 3_600_000).contains(&left_ms), "{mode} {suffix}: {left_ms}");
    }
}

#[test]
fn a_refusal_in_one_store_charges_no_other() {
    let redis = RedisServer::start();
    // Rules that are counted locally in shards, with leased tokens, and by Redis.
    let rules = named("local", "[{ limit = 1000, period = \"30d\", shards = 4 }]", "shared = \"off\"")
        + &named("leased", "[\"1000/30d\"]", "shared = \"lease\"")
        + &named("exact", "[\"7/30d\"]", "shared = \"exact\"")
        + &named("shadow", "[\"3/30d\"]", "shared = \"exact\"\non_limit = \"shadow\"");
    let gateway = Process::spawn(&config(&redis, LONG_TIMEOUT, &rules));
    assert_eq!(admitted_concurrently(&gateway, "alice", 30), 7);
    assert_eq!(count_admitted_by(&gateway, "alice", 10), 0);
    for (rule, used) in [("local", 7), ("exact", 7), ("shadow", 3)] {
        let reply = query_decision(&gateway, "value", &json!({ "rule": rule, "key": "alice" }));
        assert_eq!(reply["count"], json!(used), "{rule}");
    }
    eventually("unspent tokens are returned", || {
        let reply = query_decision(&gateway, "value", &json!({ "rule": "leased", "key": "alice" }));
        reply["count"] == json!(7)
    });
}

#[test]
fn a_shared_shadow_rule_charges_refusals_and_begins_penalties() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let rules = named("enforced", "[\"9/30d\"]", "cost = 2\ncount_refused = true")
            + &named("shadow", "[\"3/30d\"]", "cost = 2\ncount_refused = true\non_limit = \"shadow\"")
            + &named("locking", "[\"1/30d\"]", "penalty = \"8000h\"\non_limit = \"shadow\"");
        let gateway = Process::spawn(&config(&redis, &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), &rules));
        assert_eq!(count_admitted_by(&gateway, "alice", 2), 2);
        for (rule, used) in [("shadow", 3), ("enforced", 4)] {
            eventually(&format!("{mode}: `{rule}` has used {used}"), || {
                let reply = query_decision(&gateway, "value", &json!({ "rule": rule, "key": "alice" }));
                reply["count"] == json!(used)
            });
        }
        eventually("the store has the penalty", || {
            redis.keys().iter().any(|key| key.starts_with("transom:{locking|alice}:penalty"))
        });
    }
}

#[test]
fn a_waiter_that_disconnects_consumes_nothing() {
    let redis = RedisServer::start();
    let rules =
        named("local", "[\"10/30d\"]", "shared = \"off\"") + &named("exact", "[\"10/30d\"]", "shared = \"exact\"");
    let gateway = Process::spawn(&config(&redis, LONG_TIMEOUT, &rules));
    assert_eq!(count_admitted_by(&gateway, "alice", 1), 1);
    redis.suspend();
    for cancelled in 1..=5 {
        let mut client = TcpStream::connect(gateway.http).unwrap();
        client.write_all(b"GET /a HTTP/1.1\r\nHost: a\r\nX-Key: alice\r\n\r\n").unwrap();
        drop(client);
        eventually("the request is cancelled", || {
            gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == cancelled
        });
    }
    redis.resume();
    for rule in ["local", "exact"] {
        eventually("only the first request counts", || {
            let reply = query_decision(&gateway, "value", &json!({ "rule": rule, "key": "alice" }));
            reply["count"] == json!(1)
        });
    }
}

#[test]
fn tokens_of_several_disconnected_waiters_are_refunded() {
    let redis = RedisServer::start();
    let delay = "shared = \"off\"\non_limit = \"delay\"\nmax_delay = \"1d\"";
    let rules = named("local", "[\"1/8h\"]", delay) + &named("exact", "[\"10/30d\"]", "shared = \"exact\"");
    let gateway = Process::spawn(&format!("workers = 1\n{}", config(&redis, LONG_TIMEOUT, &rules)));
    let used = || query_decision(&gateway, "value", &json!({ "rule": "local", "key": "alice" }))["count"].clone();
    assert_eq!(count_admitted_by(&gateway, "alice", 1), 1);
    redis.suspend();
    let wait = |count: u64| {
        let mut waiting = TcpStream::connect(gateway.http).unwrap();
        waiting.write_all(b"GET /a HTTP/1.1\r\nHost: a\r\nX-Key: alice\r\n\r\n").unwrap();
        eventually("the request is charged", || used() == json!(count));
        waiting
    };
    let (first, second) = (wait(2), wait(3));
    drop(first);
    eventually("the first request has ended", || {
        let page = gateway.admin_get("/metrics").text();
        page.contains("code=\"499\"") || page.contains("code=\"503\"")
    });
    drop(second);
    eventually("both requests are refunded", || used() == json!(1));
}

#[test]
fn a_gateway_whose_clock_is_ahead_counts_in_the_window_that_is_open() {
    let redis = RedisServer::with_clock_offset(-7200, "");
    let gateway =
        Process::spawn(&config(&redis, &format!("mode = \"lease\"\n{LONG_TIMEOUT}"), &rule_by_key("[\"20/1h\"]", "")));
    assert_eq!(count_admitted_by(&gateway, "alice", 5), 5);
    let hour = now_ms() / 3_600_000 - 2;
    let keys: Vec<String> = redis.keys().into_iter().filter(|key| key.contains("alice")).collect();
    assert!(keys.iter().all(|key| *key == format!("transom:{{r|alice}}:{hour}")), "{keys:?} in hour {hour}");
}

#[test]
fn every_rule_counts_exactly_the_admitted_requests() {
    let redis = RedisServer::start();
    let rules = named("local", "[{ limit = 100000, period = \"30d\", shards = 4 }]", "shared = \"off\"")
        + &named("leased", "[\"300/30d\", \"290/1w\"]", "shared = \"lease\"")
        + &named("exact", "[\"100000/30d\"]", "shared = \"exact\"")
        + &named("account", "[{ limit = 400, period = \"30d\", capacity = 500 }]", "shared = \"lease\"");
    let settings = "timeout = \"20ms\"\non_outage = \"refuse\"\n";
    let gateway = Process::spawn(&format!("workers = 2\n{}", config(&redis, settings, &rules)));
    let send_as = |key: &str| {
        let mut client = gateway.client();
        (0..400).filter(|_| client.get_with("/a", &[("X-Key", key)]).status == 200).count()
    };
    let keys = ["alice", "bob"];
    let admitted: Vec<usize> = thread::scope(|scope| {
        let clients = keys.map(|key| [0; 4].map(|_| scope.spawn(move || send_as(key))));
        for _ in 0..8 {
            thread::sleep(Duration::from_millis(60));
            redis.suspend();
            // Too short for the gateway to close the connection with its calls in flight.
            thread::sleep(Duration::from_millis(70));
            redis.resume();
        }
        clients.map(|clients| clients.into_iter().map(|client| client.join().unwrap()).sum()).to_vec()
    });
    for (key, admitted) in keys.into_iter().zip(admitted) {
        assert!(admitted <= 300, "{key}: {admitted}");
        for rule in ["local", "leased", "exact", "account"] {
            let counted = || {
                let reply = gateway_value(&gateway, rule, key);
                reply.as_u64().unwrap_or_default() as usize
            };
            eventually(&format!("{rule} has counted the {admitted} of {key}"), || counted() == admitted);
        }
    }
}

/// The usage of the layer nearest its limit; null while it is unknown.
fn gateway_value(gateway: &Process, rule: &str, key: &str) -> serde_json::Value {
    let query = json!({ "rule": rule, "key": key }).to_string();
    let response = Client::connect(gateway.admin).post("/v1/value", query);
    if response.status == 200 { response.json()["count"].clone() } else { json!(null) }
}

#[test]
fn usage_is_reported_to_a_server_that_returns_empty() {
    for mode in ["lease", "exact"] {
        for during_outage in [0, 1, 5] {
            let mut redis = RedisServer::start();
            let settings = format!("mode = \"{mode}\"\non_outage = \"local\"\n");
            let gateway = Process::spawn(&config(&redis, &settings, &rule_by_key("[\"100/30d\"]", "")));
            let mut admitted = count_admitted_by(&gateway, "alice", 90);
            redis.kill();
            admitted += count_admitted_by(&gateway, "alice", during_outage);
            redis.restart();
            let key = || redis.keys().into_iter().find(|key| key.starts_with("transom:{r|alice}"));
            eventually("the server has the whole usage", || {
                admitted += count_admitted_by(&gateway, "alice", 5);
                key().is_some_and(|key| redis.integer(&["GET", &key]) >= 100)
            });
            assert_eq!(
                admitted + count_admitted_by(&gateway, "alice", 50),
                100,
                "{mode}, {during_outage} in the outage"
            );
        }
    }
}
