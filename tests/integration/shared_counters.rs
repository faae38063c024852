//! Several gateways on one Redis share counters: real processes, a real redis-server.
//!
//! Windows are so long that none ends during a test, unless its end is the subject.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::support::eventually;
use crate::support::gateway_group::{
    GatewayGroup, LONG_TIMEOUT, count_admitted_by, is_admitted, query_decision, rule_by_key, shared_config,
};
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;

fn config(redis: &RedisServer, mode: &str, rules: &str) -> String {
    shared_config(&format!("\"{}\"", redis.url()), &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), rules)
}

/// The keys of counters, sorted.
fn counters(redis: &RedisServer) -> Vec<String> {
    // Without the keys of the gateways' probes, which have no rule.
    redis.keys().into_iter().filter(|key| !key.contains("{#")).collect()
}

/// The only counter of Redis.
#[track_caller]
fn only_key(redis: &RedisServer) -> String {
    let keys = counters(redis);
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys[0].clone()
}

/// The sum of all plain counters.
fn sum(redis: &RedisServer) -> i64 {
    counters(redis).iter().map(|key| redis.integer(&["GET", key])).sum()
}

#[test]
fn exact_mode_admits_exactly_the_limit() {
    let redis = RedisServer::start();
    let gateways = GatewayGroup::start(3, &config(&redis, "exact", &rule_by_key("[\"100/30d\"]", "")));
    assert_eq!(gateways.count_admitted("alice", 40), 100);
    // Refused requests are not counted.
    assert_eq!(redis.cli(&["GET", &only_key(&redis)]), "100");
    assert_eq!(gateways.count_admitted("bob", 10), 60);
}

#[test]
fn leases_use_exactly_the_limit() {
    let redis = RedisServer::start();
    let gateways = GatewayGroup::start(4, &config(&redis, "lease", &rule_by_key("[\"1000/30d\"]", "")));
    let admitted = gateways.count_admitted("alice", 400);
    assert!((990..=1000).contains(&admitted), "{admitted}");
    let counted = redis.integer(&["GET", &only_key(&redis)]);
    assert!((990..=1000).contains(&counted), "{counted}");
    // Far fewer calls than requests.
    assert!(redis.call_count("evalsha") < 1000, "{}", redis.call_count("evalsha"));
}

#[test]
fn leased_and_exact_mode_share_a_counter() {
    let redis = RedisServer::start();
    let gateways =
        ["exact", "lease"].map(|mode| Process::spawn(&config(&redis, mode, &rule_by_key("[\"50/30d\"]", ""))));
    assert_eq!(count_admitted_by(&gateways[0], "alice", 20), 20);
    let leased = count_admitted_by(&gateways[1], "alice", 60);
    assert_eq!((leased, count_admitted_by(&gateways[0], "alice", 5)), (30, 0));
}

#[test]
fn a_counter_is_an_integer_key_that_expires_with_its_window() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&config(&redis, "exact", &rule_by_key("[\"10/30d\"]", "")));
    assert_eq!(count_admitted_by(&gateway, "alice", 3), 3);
    let key = only_key(&redis);
    let number: u64 = key.strip_prefix("transom:{r|alice}:").unwrap_or_else(|| panic!("{key}")).parse().unwrap();
    assert_eq!((redis.cli(&["TYPE", &key]), redis.cli(&["GET", &key])), ("string".into(), "3".into()));
    let end_ms = ((number + 1) * 30 * 86_400_000).to_string();
    assert_eq!(redis.cli(&["PEXPIRETIME", &key]), end_ms);
    // The expiry is set once, and not by later calls.
    assert_eq!(count_admitted_by(&gateway, "alice", 1), 1);
    assert_eq!(redis.cli(&["PEXPIRETIME", &key]), end_ms);
    // Any bytes of a client's key are safe.
    assert_eq!(count_admitted_by(&gateway, "a}:{b|c %*", 1), 1);
    let keys = counters(&redis);
    assert!(keys.contains(&format!("transom:{{r|a%7D%3A%7Bb%7Cc%20%25%2A}}:{number}")), "{keys:?}");
}

#[test]
fn another_service_can_share_the_limit() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, &rule_by_key("[\"10/30d\"]", "")));
        assert_eq!(count_admitted_by(&gateway, mode, 1), 1);
        let key = redis.keys().into_iter().find(|key| key.contains(mode)).unwrap();
        (0..7).for_each(|_| drop(redis.cli(&["INCR", &key])));
        assert_eq!((count_admitted_by(&gateway, mode, 9), redis.integer(&["GET", &key])), (2, 10), "{mode}");
    }
}

#[test]
fn a_refusal_by_one_shared_layer_charges_no_other() {
    let redis = RedisServer::start();
    let rules = rule_by_key("[\"20/week\", \"5/day\"]", "");
    let gateways = GatewayGroup::start(2, &config(&redis, "exact", &rules));
    assert_eq!(gateways.count_admitted("alice", 5), 5);
    let keys = counters(&redis);
    assert_eq!(keys.len(), 2, "{keys:?}");
    for (key, layer) in keys.iter().zip(["day", "week"]) {
        assert!(key.starts_with(&format!("transom:{{r|alice}}:{layer}:")), "{key}");
        assert_eq!(redis.cli(&["GET", key]), "5", "{key}");
    }
    let response = gateways.0[0].client().get_with("/a", &[("X-Key", "alice")]).expect(429);
    assert_eq!((remaining(&response, "r-week"), remaining(&response, "r-day")), (15, 0));
}

/// While a global rule is known to be used up, requests with new keys are refused without a call. Of their own counters, only
/// the end of the window is known.
#[test]
fn a_layer_without_a_lookup_reports_the_end_of_its_window() {
    let redis = RedisServer::start();
    let rules = "[rules.user]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"33/30d\"]\n\
                 [rules.all]\nkey = \"global\"\nwindows = [\"1/30d\"]\n";
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let gateway = Process::spawn(&format!("workers = 1\n{}", config(&redis, mode, rules)));
        let get_as = |user: &str| gateway.client().get_with("/a", &[("X-User", user)]);
        assert_eq!(get_as("first").status, 200);
        for user in ["a", "b", "c"] {
            let response = get_as(user).expect(429);
            let state = items(&response, "ratelimit");
            let [of_user, of_all] = ["user", "all"].map(|name| state.iter().find(|item| item.name == name).unwrap());
            assert_eq!((of_user.get("r"), of_all.get("r")), (33, 0), "{mode}: {response:?}");
            assert!(of_user.get("t").abs_diff(of_all.get("t")) <= 1, "{mode}: {response:?}");
        }
    }
}

#[test]
fn rules_with_different_keys_are_charged_together_or_not_at_all() {
    let redis = RedisServer::start();
    let rules = "[rules.user]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"3/30d\"]\n\
                 [rules.all]\nkey = \"global\"\nwindows = [\"10/30d\"]\n";
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let gateway = Process::spawn(&config(&redis, mode, rules));
        let get_as = |user: &str| is_admitted(&gateway.client().get_with("/a", &[("X-User", user)]));
        let admitted = |user: &str| (0..6).filter(|_| get_as(user)).count();
        assert_eq!([admitted("a"), admitted("b"), admitted("c")], [3, 3, 3], "{mode}");
        // One token of the global rule was left; refusals by the user rule did not use it.
        assert_eq!([admitted("d"), admitted("e")], [1, 0], "{mode}");
        let key = redis.keys().into_iter().find(|key| key.starts_with("transom:{all|}")).unwrap();
        assert_eq!(redis.integer(&["GET", &key]), 10, "{mode}");
    }
}

#[test]
fn every_window_kind_is_shared_exactly() {
    let redis = RedisServer::start();
    let kinds = [
        ("[{ limit = 20, period = \"30d\", capacity = 30 }]", 30),
        ("[{ limit = 20, period = \"30d\", reserve = 5 }]", 20),
        ("[{ limit = 20, period = \"30d\", start = \"first-request\" }]", 20),
        ("[{ limit = 20, period = \"30d\", start = \"random\" }]", 20),
        ("[{ limit = 20, period = \"30d\", start = \"2024-01-01T00:00:00Z\" }]", 20),
        ("[{ limit = 20, period = \"month\", timezone = \"Europe/Berlin\" }]", 20),
        ("[{ limit = 20, period = \"30d\", shards = 4 }]", 20),
    ];
    for mode in ["exact", "lease"] {
        for (windows, limit) in kinds {
            redis.cli(&["FLUSHALL"]);
            let gateways = GatewayGroup::start(2, &config(&redis, mode, &rule_by_key(windows, "")));
            let admitted = gateways.count_admitted("alice", 25);
            // With leases, one gateway may refuse while the other has a few tokens left.
            let least = if mode == "exact" { limit } else { limit - 2 };
            assert!((least..=limit).contains(&admitted), "{mode}, {windows}: {admitted} of {limit}");
            let keys = counters(&redis);
            assert!(keys.iter().all(|key| redis.integer(&["PTTL", key]) > 0), "{windows}: {keys:?}");
            if windows.contains("shards") {
                assert_eq!((keys.len(), sum(&redis)), (4, limit as i64), "{keys:?}");
            }
        }
    }
}

#[test]
fn plans_are_shared() {
    let redis = RedisServer::start();
    let rules = rule_by_key("[\"3/30d\"]", "[[rules.r.overrides]]\nkey = \"alice\"\nwindows = [\"7/30d\"]");
    let gateways = GatewayGroup::start(2, &config(&redis, "exact", &rules));
    assert_eq!((gateways.count_admitted("alice", 4), gateways.count_admitted("bob", 4)), (7, 3));
}

#[test]
fn a_new_window_grants_again() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(2, &config(&redis, mode, &rule_by_key("[\"3/1s\"]", "")));
        let admitted = || gateways.0.iter().map(|gateway| count_admitted_by(gateway, "alice", 4)).sum::<usize>();
        let mut windows = 0;
        eventually("four windows grant", || {
            windows += usize::from(admitted() > 0);
            thread::sleep(Duration::from_millis(50));
            windows >= 4
        });
        eventually("counters end with their windows", || counters(&redis).is_empty());
    }
}

#[test]
fn the_decision_api_uses_shared_counters() {
    let redis = RedisServer::start();
    let rules =
        "[rules.per-client]\nkey = [\"header:x-user\", \"path\"]\non_missing_key = \"skip\"\nwindows = [\"5/30d\"]\n";
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let gateways = GatewayGroup::start(2, &config(&redis, mode, rules));
        let limit = |gateway: usize, path: &str| {
            query_decision(&gateways.0[gateway], "limit", &json!({"rule": "per-client", "key": ["abc", path]}))
        };
        let admitted_in_all: usize = thread::scope(|scope| {
            let send = |gateway| (0..10).filter(|_| limit(gateway, "/search")["allowed"] == true).count();
            let clients = [0, 1, 0, 1].map(|gateway| scope.spawn(move || send(gateway)));
            clients.map(|client| client.join().unwrap()).iter().sum()
        });
        assert_eq!(admitted_in_all, 5, "{mode}: no lost update");
        let refused = limit(1, "/search");
        assert_eq!((&refused["allowed"], &refused["count"], &refused["limit"]), (&json!(false), &json!(5), &json!(5)));
        assert!(refused["ttl"].as_u64() > Some(0) && refused["retry_after"] == refused["ttl"], "{refused}");
        assert_eq!(limit(0, "/feed")["allowed"], true, "another endpoint has its own counter");
        let count = |verb| {
            query_decision(&gateways.0[1], verb, &json!({"rule": "per-client", "key": ["abc", "/feed"]}))["count"]
                .clone()
        };
        assert_eq!((count("value"), count("check")), (json!(1), json!(1)), "{mode}");
    }
}

#[test]
fn the_decision_api_decides_shared_and_local_rules_together() {
    let redis = RedisServer::start();
    let rules = "[rules.shared]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"5/30d\"]\n\
                 [rules.local]\nkey = \"ip\"\nshared = \"off\"\nwindows = [\"3/30d\"]\n";
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let gateways = GatewayGroup::start(2, &config(&redis, mode, rules));
        let query = |gateway: usize, operation: &str| {
            let rules = json!([{"rule": "shared", "key": "alice"}, {"rule": "local", "key": "192.0.2.7"}]);
            query_decision(&gateways.0[gateway], operation, &json!({ "rules": rules }))
        };
        let counts = |gateway| {
            let value = query(gateway, "value");
            let windows = value["windows"].as_array().unwrap().clone();
            windows.iter().map(|window| window["count"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        let admitted = |gateway| (0..4).filter(|_| query(gateway, "limit")["allowed"] == true).count();
        assert_eq!((admitted(0), counts(0), counts(1)), (3, vec![3, 3], vec![3, 0]), "{mode}: the local rule refuses");
        assert_eq!((admitted(1), counts(0), counts(1)), (2, vec![5, 3], vec![5, 2]), "{mode}: the shared rule refuses");
        query(0, "reset");
        assert_eq!((counts(0), counts(1)), (vec![0, 0], vec![0, 2]), "{mode}");
    }
}

#[test]
fn a_known_full_counter_rarely_queries_redis() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&redis, mode, &rule_by_key("[\"10/30d\"]", "")));
        assert_eq!(count_admitted_by(&gateway, mode, 30), 10);
        let before = redis.call_count("evalsha");
        assert_eq!(count_admitted_by(&gateway, mode, 1000), 0);
        let calls = redis.call_count("evalsha") - before;
        assert!(calls < 20, "{mode}: {calls} for a thousand refusals");
    }
}

#[test]
fn a_raised_limit_and_a_reset_apply() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let gateways = GatewayGroup::start(2, &config(&redis, mode, &rule_by_key("[\"5/30d\"]", "")));
        assert_eq!(gateways.count_admitted("alice", 5), 5, "{mode}");
        gateways.reload(&config(&redis, mode, &rule_by_key("[\"8/30d\"]", "")));
        let mut more = 0;
        eventually("the new limit applies", || {
            more += gateways.0.iter().map(|gateway| count_admitted_by(gateway, "alice", 2)).sum::<usize>();
            more >= 3
        });
        assert_eq!((more, gateways.count_admitted("alice", 5)), (3, 0), "{mode}");
        query_decision(&gateways.0[0], "reset", &json!({"rule": "r", "key": "alice"}));
        let mut after = 0;
        eventually("the reset reaches the other gateway", || {
            after += count_admitted_by(&gateways.0[1], "alice", 2);
            after > 0
        });
        after += gateways.count_admitted("alice", 10);
        assert!(after <= 8, "{mode}: {after}");
    }
}

#[test]
fn an_unused_lease_is_returned() {
    let redis = RedisServer::start();
    let gateways = GatewayGroup::start(2, &config(&redis, "lease", &rule_by_key("[\"2000/30d\"]", "")));
    let mut admitted_in_all = count_admitted_by(&gateways.0[0], "alice", 500);
    assert_eq!(admitted_in_all, 500);
    eventually("the other gateway can use the rest", || {
        admitted_in_all += count_admitted_by(&gateways.0[1], "alice", 100);
        admitted_in_all >= 1980
    });
    eventually("the whole limit is used", || {
        admitted_in_all +=
            count_admitted_by(&gateways.0[1], "alice", 5) + count_admitted_by(&gateways.0[0], "alice", 5);
        admitted_in_all == 2000
    });
    assert_eq!((gateways.count_admitted("alice", 20), redis.integer(&["GET", &only_key(&redis)])), (0, 2000));
}

#[test]
fn a_draining_gateway_returns_its_leases() {
    let redis = RedisServer::start();
    let mut gateway = Process::spawn(&config(&redis, "lease", &rule_by_key("[\"100000/30d\"]", "")));
    let admitted_in_all = count_admitted_by(&gateway, "alice", 700);
    assert_eq!(admitted_in_all, 700);
    assert!(redis.integer(&["GET", &only_key(&redis)]) >= 700);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    assert_eq!(redis.integer(&["GET", &only_key(&redis)]), 700);
}
