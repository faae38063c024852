//! Sliding windows that gateways share through Redis: in no interval of one period do all gateways together admit more than
//! the limit.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::Commands;
use serde_json::json;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::window::Segments;
use transom_limiter::window_kind::WindowKind;
use transom_store::client::RedisClient;
use transom_store::scripts::{AcquireReply, CounterReply, CounterRequest, effective_ms};

use crate::support::eventually;
use crate::support::gateway_group::{
    GatewayGroup, LONG_TIMEOUT, count_admitted_by, query_decision, rule_by_key, shared_config,
};
use crate::support::load_checker::{Load, now_ms};
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::redis_client::{plain_request, run_on_worker, single_server};

const HOUR_MS: u64 = 3_600_000;

fn config(redis: &RedisServer, mode: &str, limit: u64, period: &str) -> String {
    let windows = format!("[{{ limit = {limit}, period = \"{period}\", sliding = true }}]");
    let settings = format!("mode = \"{mode}\"\n{LONG_TIMEOUT}");
    shared_config(&format!("\"{}\"", redis.url()), &settings, &rule_by_key(&windows, ""))
}

#[test]
fn gateways_admit_exactly_the_limit_together() {
    let redis = RedisServer::start();
    let gateways = GatewayGroup::start(3, &config(&redis, "exact", 100, "1h"));
    assert_eq!(gateways.count_admitted("alice", 40), 100);
    let key = "transom:{r|alice}:sliding";
    let segments = redis.cli(&["HVALS", key]);
    assert_eq!(segments.lines().map(|tokens| tokens.parse::<u64>().unwrap()).sum::<u64>(), 100, "{segments}");
    let numbers: Vec<u64> = redis.cli(&["HKEYS", key]).lines().map(|number| number.parse().unwrap()).collect();
    let expires_ms = Segments { period_ms: HOUR_MS }.expires_ms(*numbers.iter().max().unwrap());
    assert_eq!(redis.cli(&["PEXPIRETIME", key]), expires_ms.to_string());
}

#[test]
fn gateways_with_leases_admit_at_most_the_limit_together() {
    let redis = RedisServer::start();
    let gateways = GatewayGroup::start(3, &config(&redis, "lease", 1000, "1h"));
    let admitted = gateways.count_admitted("alice", 400);
    assert!((990..=1000).contains(&admitted), "{admitted}");
    assert!(redis.call_count("evalsha") < 2000, "{}", redis.call_count("evalsha"));
}

/// A client that waits for `Retry-After`, and is alone on its key, is admitted.
#[test]
fn a_client_is_admitted_after_its_retry_after() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, 5, "2s"));
        assert_eq!(count_admitted_by(&gateway, mode, 5), 5);
        let response = gateway.client().get_with("/a", &[("X-Key", mode)]).expect(429);
        let policy = items(&response, "ratelimit-policy")[0].clone();
        assert_eq!((policy.get("q"), policy.get("w"), remaining(&response, "r")), (5, 2, 0), "{mode}");
        thread::sleep(Duration::from_secs(response.field("retry-after").unwrap().parse().unwrap()));
        gateway.client().get_with("/a", &[("X-Key", mode)]).expect(200);
    }
}

#[test]
fn tokens_are_never_granted_twice_in_one_period() {
    const LIMIT: u64 = 8;
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(3, &config(&redis, mode, LIMIT, "800ms"));
        let results = Load::for_keys(3).run_during(&[], |load| {
            load.send_to(&gateways.0.iter().map(|gateway| gateway.http).collect::<Vec<_>>());
            let end = Instant::now() + Duration::from_secs(4);
            while Instant::now() < end {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let at_limit = results.assert_sliding_limit(LIMIT, 800);
        println!(
            "{mode}: {} requests, {} admitted, {at_limit} intervals at the limit",
            results.requests, results.admitted
        );
        assert!(at_limit > 0, "{mode}: the limit was never reached");
    }
}

/// A token that was leased in one segment and spent in a later one would come back too early.
#[test]
fn leased_tokens_are_spent_in_the_segment_that_counts_them() {
    const SEGMENT_MS: u64 = 600;
    const REQUESTS: usize = 3;
    let redis = RedisServer::start();
    let gateway = Process::spawn(&config(&redis, "lease", 100_000, "4800ms"));
    let segment = || now_ms() / SEGMENT_MS;
    let counted_in = |segment: u64| {
        thread::sleep(Duration::from_millis((segment * SEGMENT_MS).saturating_sub(now_ms()) + 20));
        assert_eq!(count_admitted_by(&gateway, "alice", REQUESTS), REQUESTS);
        let counted = redis.cli(&["HGET", "transom:{r|alice}:sliding", &segment.to_string()]);
        counted.parse::<usize>().unwrap_or(0)
    };
    // Requests may take longer than a segment on a busy machine.
    let is_seen = (0..50).any(|_| {
        let first = segment();
        // The lease is then larger than the requests need.
        assert_eq!(count_admitted_by(&gateway, "alice", 60), 60);
        if segment() != first {
            return false;
        }
        let counted = counted_in(first + 1);
        let is_conclusive = segment() == first + 1;
        assert!(!is_conclusive || counted >= REQUESTS, "{REQUESTS} requests in a segment, {counted} tokens");
        is_conclusive
    });
    assert!(is_seen, "requests never ended in the segment in which they began");
}

/// A worker that connects for the first time after the loss knows of none, so there is one worker.
fn with_one_worker(toml: &str) -> Process {
    Process::spawn(&format!("workers = 1\n{toml}"))
}

/// What a gateway knows of the usage is not granted again by an empty server.
#[test]
fn a_restart_of_redis_without_its_data_grants_nothing_again() {
    for mode in ["exact", "lease"] {
        let mut redis = RedisServer::start();
        let gateway = with_one_worker(&config(&redis, mode, 20, "1h"));
        assert_eq!(count_admitted_by(&gateway, "alice", 30), 20, "{mode}");
        redis.restart();
        let admitted = || match gateway.client().get_with("/a", &[("X-Key", "alice")]).status {
            503 => None,
            status => Some(status == 200),
        };
        eventually("shared counting resumes", || admitted().is_some());
        assert_eq!((0..5).filter_map(|_| admitted()).filter(|admitted| *admitted).count(), 0, "{mode}");
    }
}

#[test]
fn usage_of_an_outage_is_reported() {
    let mut redis = RedisServer::start();
    let toml = config(&redis, "lease", 10, "1h").replace(LONG_TIMEOUT, "on_outage = \"local\"\n");
    let gateway = with_one_worker(&toml);
    assert_eq!(count_admitted_by(&gateway, "alice", 4), 4);
    redis.kill();
    // What is known of the usage in Redis counts during the outage.
    assert_eq!(count_admitted_by(&gateway, "alice", 20), 6);
    redis.restart();
    let other = Process::spawn(&toml);
    eventually("all usage is reported", || {
        query_decision(&other, "value", &json!({ "rule": "r", "key": "alice" }))["remaining"] == 0
    });
}

#[test]
fn the_decision_api_reads_and_resets_sliding_windows() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, 10, "1h"));
        let query =
            |verb: &str, cost: u64| query_decision(&gateway, verb, &json!({ "rule": "r", "key": mode, "cost": cost }));
        assert_eq!(query("limit", 7)["remaining"], 3, "{mode}");
        let checked = query("check", 4);
        assert_eq!((&checked["allowed"], &checked["remaining"]), (&json!(false), &json!(3)), "{mode}");
        assert_eq!(count_admitted_by(&gateway, mode, 9), 3, "{mode}");
        assert_eq!(query("value", 1)["count"], 10, "{mode}");
        assert_eq!(query("reset", 1)["count"], 0, "{mode}");
        assert_eq!(count_admitted_by(&gateway, mode, 11), 10, "{mode}");
    }
}

/// Tokens were taken in two segments, and the query needs more than the older one returns.
#[test]
fn a_check_of_a_high_cost_waits_for_all_its_tokens() {
    const SEGMENT_MS: u64 = 1000;
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, 10, "8s"));
        let query =
            |verb: &str, cost: u64| query_decision(&gateway, verb, &json!({ "rule": "r", "key": mode, "cost": cost }));
        assert_eq!(query("limit", 2)["allowed"], true, "{mode}");
        let key = format!("transom:{{r|{mode}}}:sliding");
        let older: u64 = redis.cli(&["HKEYS", &key]).parse().unwrap();
        thread::sleep(Duration::from_millis(((older + 3) * SEGMENT_MS).saturating_sub(now_ms())));
        assert_eq!(query("limit", 8)["allowed"], true, "{mode}");
        let numbers = redis.cli(&["HKEYS", &key]);
        let newer: u64 = numbers.lines().map(|number| number.parse().unwrap()).max().unwrap();
        for (cost, segment) in [(2, older), (3, newer)] {
            let before_ms = now_ms();
            let checked = query("check", cost);
            let waited_ms = now_ms() - before_ms;
            let expires_ms = Segments { period_ms: 8 * SEGMENT_MS }.expires_ms(segment);
            let retry_at_ms = before_ms + checked["retry_after_ms"].as_u64().unwrap();
            // The clock of the gateway is that of Redis, as far as the gateway can tell.
            let tolerated_ms = waited_ms + SEGMENT_MS / 4;
            assert!(
                retry_at_ms.abs_diff(expires_ms) <= tolerated_ms,
                "{mode}, {cost} tokens: {checked}, at {retry_at_ms} instead of {expires_ms}, {waited_ms} ms"
            );
            // A limiting query tells the same.
            let refused = query("limit", cost)["retry_after"].as_u64().unwrap();
            assert!(checked["retry_after"].as_u64().unwrap() - refused <= 1, "{mode}");
        }
        assert_eq!(query("check", 11)["retry_after"], json!(null), "{mode}");
    }
}

/// A refused client that repeats its request does not make the gateway ask for each one.
#[test]
fn refusals_are_repeated_without_redis() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, 5, "1h"));
        assert_eq!(count_admitted_by(&gateway, mode, 10), 5);
        let before = redis.call_count("evalsha");
        assert_eq!(count_admitted_by(&gateway, mode, 300), 0);
        let calls = redis.call_count("evalsha") - before;
        assert!(calls < 100, "{mode}: {calls} calls for 300 requests");
    }
}

/// A remembered refusal is one under the former limit.
#[test]
fn a_raised_limit_applies_at_once() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(1, &config(&redis, mode, 5, "1h"));
        assert_eq!(count_admitted_by(&gateways.0[0], mode, 10), 5);
        gateways.reload(&config(&redis, mode, 8, "1h"));
        assert_eq!(count_admitted_by(&gateways.0[0], mode, 10), 3, "{mode}");
    }
}

const PERIOD_MS: u64 = 80;
const LIMIT: u64 = 10;

/// One step of a test of the script.
#[derive(Clone, Debug)]
enum Action {
    Acquire { need: u64, want: u64, used_min: u64, excess: u64, ahead_ms: u64 },
    Refund { taken: usize, tokens: u64 },
    Wait(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let rare = |most: u64| prop_oneof![5 => Just(0), 1 => 0..most];
    let acquire =
        (0..5u64, 0..12u64, rare(15), rare(20), rare(1500)).prop_map(|(need, want, used_min, excess, ahead_ms)| {
            Action::Acquire { need, want, used_min, excess, ahead_ms }
        });
    let refund = (0..6usize, 0..8u64).prop_map(|(taken, tokens)| Action::Refund { taken, tokens });
    let action = prop_oneof![6 => acquire, 2 => refund, 3 => (0..25u64).prop_map(Action::Wait)];
    proptest::collection::vec(action, 1..30)
}

/// Tokens by segment.
#[derive(Default)]
struct Model(BTreeMap<u64, u64>);

impl Model {
    fn acquire(&mut self, request: &CounterRequest, now_ms: u64) -> (bool, CounterReply) {
        let segments = Segments { period_ms: PERIOD_MS };
        let last = self.0.keys().next_back().copied().unwrap_or(0);
        let latest = segments.number_at(now_ms).max(last);
        let used: u64 = self.0.range(latest - 8..).map(|(_, tokens)| tokens).sum();
        let needed = used.max(request.used_min) + request.need;
        let is_granted = needed <= request.ceiling;
        let spare = request.ceiling.saturating_sub(needed);
        let granted = request.need + (request.want.max(request.need) - request.need).min(spare / 8);
        let mut missing = needed.saturating_sub(request.ceiling).max(1);
        let returned = self.0.range(latest - 8..latest).find(|(_, tokens)| {
            missing = missing.saturating_sub(**tokens);
            missing == 0
        });
        let available_ms = segments.expires_ms(returned.map_or(latest, |(number, _)| *number));
        let granted = if is_granted { granted } else { 0 };
        let mut used_after = used;
        if granted > 0 {
            used_after = used.max(request.used_min) + granted;
            *self.0.entry(latest).or_default() += used_after - used;
            self.0.retain(|number, _| *number >= latest - 8);
        }
        let end_ms = segments.expires_ms(latest);
        (is_granted, CounterReply { granted, used: used_after, end_ms, available_ms, number: latest, call: 0 })
    }
}

async fn run_actions(store: &RedisClient, server: &mut redis::Connection, actions: Vec<Action>) {
    let () = redis::cmd("FLUSHALL").query(server).unwrap();
    let (mut model, mut taken) = (Model::default(), Vec::new());
    let window = StoreWindow { kind: WindowKind::Sliding, number: 0, end_ms: PERIOD_MS, next_end_ms: 2 * PERIOD_MS };
    for action in actions {
        match action {
            Action::Acquire { need, want, used_min, excess, ahead_ms } => {
                let base = plain_request("t:{a}", 0, LIMIT as u32);
                let request = CounterRequest { window, ceiling: LIMIT + excess, need, want, used_min, ..base };
                let gateway_ms = if ahead_ms == 0 { 0 } else { now_ms() + ahead_ms };
                let (is_granted, time_ms, replies) =
                    match store.acquire(std::slice::from_ref(&request), gateway_ms).await.unwrap() {
                        AcquireReply::Granted { time_ms, counters } => (true, time_ms, counters),
                        AcquireReply::Refused { time_ms, counters } => (false, time_ms, counters),
                        AcquireReply::OtherWindow { .. } => panic!("a sliding window is always open"),
                    };
                let expected = model.acquire(&request, effective_ms(time_ms, gateway_ms));
                assert_eq!((is_granted, replies[0]), expected, "{:?}", model.0);
                taken.push(request.refund_target(replies[0]));
            }
            Action::Refund { taken: which, tokens } => {
                let Some(target) = taken.iter().rev().nth(which) else { continue };
                let refunded = store.refund(&[target.refund(tokens)]).await.unwrap();
                let before = model.0.get(&target.number).copied().unwrap_or(0);
                // The key may have expired since.
                if refunded > 0 || server.exists::<_, bool>("t:{a}:sliding").unwrap() {
                    assert_eq!(refunded, before.min(tokens));
                    model.0.entry(target.number).and_modify(|tokens| *tokens -= refunded);
                }
            }
            Action::Wait(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
        }
    }
    let left_ms: i64 = server.pttl("t:{a}:sliding").unwrap();
    assert!(left_ms != -1, "the key has no expiry");
}

/// The server's own time decides, as it reports it.
#[test]
fn the_script_agrees_with_counters_in_memory() {
    let server = RedisServer::start();
    let client = redis::Client::open(("127.0.0.1", server.port)).unwrap();
    let connection = std::cell::RefCell::new(client.get_connection().unwrap());
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let result = runner.run(&actions(), |actions| {
        let store = RedisClient::new(&single_server(&server));
        run_on_worker(run_actions(&store, &mut connection.borrow_mut(), actions));
        Ok(())
    });
    result.unwrap_or_else(|failed| panic!("{failed}"));
}
