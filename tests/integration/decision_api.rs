//! The decision API: it uses the same counters as forwarded requests.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::gateway_group::{LONG_TIMEOUT, query_decision, shared_config};
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::seeded_rng;

fn config_with(rules: &str, named: &str) -> String {
    format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n{rules}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [{named}]\n"
    )
}

fn post(gateway: &Gateway, operation: &str, body: &Value) -> HttpResponse {
    Client::connect(gateway.admin).post(&format!("/v1/{operation}"), body.to_string())
}

fn query(gateway: &Gateway, operation: &str, body: Value) -> Value {
    post(gateway, operation, &body).expect(200).json()
}

const PER_USER: &str =
    "[rules.per-client]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"5/minute\"]\n";

#[test]
fn a_key_is_checked_charged_read_and_reset() {
    let gateway = Gateway::start(&config_with(PER_USER, "\"per-client\""));
    gateway.advance_s(23);
    let window =
        |count: u64| json!({"name": "per-client", "count": count, "limit": 5, "remaining": 5 - count, "ttl": 37});
    let expected = |allowed: bool, count: u64, retry_after: u64| {
        json!({
            "allowed": allowed, "count": count, "limit": 5, "remaining": 5 - count, "ttl": 37,
            "retry_after": retry_after, "retry_after_ms": 1000 * retry_after, "windows": [window(count)],
        })
    };
    let alice = || json!({"rule": "per-client", "key": "alice"});
    assert_eq!(
        query(&gateway, "limit", json!({"rule": "per-client", "key": "alice", "cost": 1, "reserve": false})),
        expected(true, 1, 0)
    );
    assert_eq!(query(&gateway, "check", alice()), expected(true, 1, 0));
    assert_eq!(query(&gateway, "value", alice()), expected(true, 1, 0));
    assert_eq!(
        query(&gateway, "limit", json!({"rule": "per-client", "key": ["alice"], "cost": 4})),
        expected(true, 5, 0)
    );
    assert_eq!(query(&gateway, "limit", alice()), expected(false, 5, 37));
    assert_eq!(query(&gateway, "check", alice()), expected(false, 5, 37));
    // Requests use the same counter.
    let refused = gateway.get_with("/a", &[("X-User", "alice")]).expect(429);
    assert_eq!(remaining(&refused, "per-client"), 0);
    gateway.get_with("/a", &[("X-User", "bob")]).expect(200);
    assert_eq!(query(&gateway, "value", json!({"rule": "per-client", "key": "bob"})), expected(true, 1, 0));
    assert_eq!(query(&gateway, "reset", alice()), expected(true, 0, 0));
    gateway.get_with("/a", &[("X-User", "alice")]).expect(200);
    gateway.advance_s(37);
    assert_eq!(query(&gateway, "value", alice())["count"], 0);
}

#[test]
fn the_layer_nearest_its_limit_comes_first() {
    let rule = "[rules.r]\nkey = [\"header:x-user\", \"path\"]\non_missing_key = \"skip\"\nwindows = [\"10/hour\", \"3/minute\"]\n";
    let gateway = Gateway::start(&config_with(rule, "\"r\""));
    let body = || json!({"rule": "r", "key": ["abc", "/search"], "cost": 2});
    let response = query(&gateway, "limit", body());
    assert_eq!((&response["limit"], &response["remaining"]), (&json!(3), &json!(1)));
    let names: Vec<&str> =
        response["windows"].as_array().unwrap().iter().map(|w| w["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["r-hour", "r-minute"]);
    assert_eq!(query(&gateway, "limit", body())["allowed"], false);
    let request = gateway.get_with("/search", &[("X-User", "abc")]).expect(200);
    assert_eq!(remaining(&request, "r-minute"), 0);
    assert_eq!(query(&gateway, "value", json!({"rule": "r", "key": ["abc", "/feed"]}))["count"], 0);
}

#[test]
fn a_global_counter_reports_the_retry_time() {
    let rule = "[rules.sign-ups]\nkey = \"global\"\nwindows = [\"100/hour\"]\n";
    let gateway = Gateway::start_at(&config_with(rule, "\"sign-ups\""), 1_699_999_200);
    gateway.advance_s(600);
    for _ in 0..100 {
        assert_eq!(query(&gateway, "limit", json!({"rule": "sign-ups"}))["allowed"], true);
    }
    let response = query(&gateway, "limit", json!({"rule": "sign-ups"}));
    assert_eq!((&response["allowed"], &response["retry_after"]), (&json!(false), &json!(3000)));
    // A global rule has one counter, whatever key the query names.
    assert_eq!(query(&gateway, "value", json!({"rule": "sign-ups", "key": "any"}))["count"], 100);
}

#[test]
fn a_reservation_reports_its_window_and_is_charged_to_it() {
    let rule = "[rules.r]\nkey = \"global\"\nwindows = [{ limit = 1000, period = \"minute\", reserve = 200 }]\n";
    let gateway = Gateway::start(&config_with(rule, "\"r\""));
    gateway.advance_s(20);
    let take =
        |cost: u64, reserve: bool| query(&gateway, "limit", json!({"rule": "r", "cost": cost, "reserve": reserve}));
    assert_eq!(take(1000, false)["allowed"], true);
    assert_eq!((take(1, false)["allowed"].clone(), take(1, false)["retry_after"].clone()), (json!(false), json!(40)));
    let reserved = take(150, true);
    assert_eq!((&reserved["allowed"], &reserved["retry_after"]), (&json!(true), &json!(40)));
    assert_eq!(take(50, true)["allowed"], true);
    assert_eq!(take(1, true)["allowed"], false, "at most 200 can be reserved");
    gateway.advance_s(40);
    assert_eq!(take(1, false)["remaining"], 799, "the reserved tokens are missing from the next window");
}

/// Unused tokens roll over every hour.
#[test]
fn decisions_at_window_boundaries_follow_the_timeline() {
    let rule = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\n\
        windows = [{ limit = 100, period = \"1h\", capacity = 150, start = \"2024-01-01T00:00:00Z\" }]\n";
    // Used up an hour before midnight, so that 100 tokens are available at midnight.
    let gateway = Gateway::start_at(&config_with(rule, "\"r\""), 1_704_067_200 - 3600);
    let take =
        |cost: u64| query(&gateway, "limit", json!({"rule": "r", "key": "a", "cost": cost}))["remaining"].clone();
    let value = || query(&gateway, "value", json!({"rule": "r", "key": "a"}))["remaining"].clone();
    assert_eq!(take(150), 0);
    gateway.advance_s(3600);
    assert_eq!(value(), 100);
    gateway.advance_s(1800);
    assert_eq!(take(15), 85);
    gateway.advance_s(900);
    assert_eq!(take(15), 70);
    gateway.advance_s(900);
    assert_eq!(value(), 150);
    gateway.advance_s(1800);
    assert_eq!(take(30), 120);
    gateway.advance_s(1800);
    assert_eq!(value(), 150);
    gateway.advance_s(365 * 24 * 3600);
    assert_eq!(value(), 150, "also after a long idle time");
}

#[test]
fn a_malformed_query_is_400_and_an_unknown_rule_404() {
    let gateway = Gateway::start(&config_with(PER_USER, "\"per-client\""));
    for (body, status) in [
        ("", 400),
        ("[]", 400),
        ("{\"rule\": \"per-client\"", 400),
        ("{\"key\": \"alice\"}", 400),
        ("{\"rule\": 7, \"key\": \"alice\"}", 400),
        ("{\"rule\": \"per-client\"}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"\"}", 400),
        ("{\"rule\": \"per-client\", \"key\": [\"a\", \"b\"]}", 400),
        ("{\"rule\": \"per-client\", \"key\": {\"a\": 1}}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"a\", \"cost\": -1}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"a\", \"cost\": 4294967296}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"a\", \"cost\": 1.5}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"a\", \"reserve\": 1}", 400),
        ("{\"rule\": \"per-client\", \"key\": \"a\", \"costs\": 1}", 400),
        ("{\"rule\": \"per-user\", \"key\": \"a\"}", 404),
    ] {
        let response = Client::connect(gateway.admin).post("/v1/limit", body).expect(status);
        assert_eq!(response.problem()["status"], status, "{body}");
    }
    let long = format!("{{\"rule\": \"per-client\", \"key\": \"{}\"}}", "a".repeat(70_000));
    Client::connect(gateway.admin).post("/v1/limit", long).expect(413);
    let get = Client::connect(gateway.admin).get("/v1/limit").expect(405);
    assert_eq!(get.field("allow"), Some("POST"));
    Client::connect(gateway.admin).post("/v1/other", "{}").expect(404);
    let body = br#"{"rule": "per-client", "key": "a"}"#;
    for fields in [&[("Origin", "http://evil.example")][..], &[("Origin", "null")], &[("Sec-Fetch-Site", "cross-site")]]
    {
        Client::connect(gateway.admin).request("POST", "/v1/limit", fields, body).expect(403);
    }
    let own = format!("http://{}", gateway.admin);
    let own = [("Host", own.trim_start_matches("http://")), ("Origin", &own), ("Sec-Fetch-Site", "same-origin")];
    Client::connect(gateway.admin).request("POST", "/v1/value", &own, body).expect(200);
    assert_eq!(query(&gateway, "value", json!({"rule": "per-client", "key": "a"}))["count"], 0);
}

#[test]
fn several_rules_are_charged_together_or_not_at_all() {
    let per_address = "[rules.per-address]\nkey = \"ip\"\nwindows = [\"3/minute\"]\n";
    let gateway = Gateway::start(&config_with(&format!("{PER_USER}{per_address}"), "\"per-client\", \"per-address\""));
    let both = |cost: u64| {
        json!({"rules": [
            {"rule": "per-address", "key": "192.0.2.7"}, {"rule": "per-client", "key": "alice", "cost": cost},
        ]})
    };
    let counts = || {
        let value = query(&gateway, "value", both(1));
        let windows = value["windows"].as_array().unwrap().clone();
        windows.iter().map(|window| window["count"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let admitted = query(&gateway, "limit", both(3));
    assert_eq!((&admitted["allowed"], &admitted["remaining"]), (&json!(true), &json!(2)));
    let rules: Vec<&Value> = admitted["windows"].as_array().unwrap().iter().map(|window| &window["rule"]).collect();
    assert_eq!(rules, ["per-address", "per-client"]);
    assert_eq!(counts(), [1, 3]);
    for operation in ["limit", "check"] {
        let refused = query(&gateway, operation, both(3));
        assert_eq!((&refused["allowed"], &refused["retry_after"]), (&json!(false), &json!(60)), "{operation}");
        assert_eq!(counts(), [1, 3]);
    }
    assert_eq!(query(&gateway, "check", both(2))["allowed"], true);
    assert_eq!(query(&gateway, "limit", both(2))["allowed"], true);
    assert_eq!(counts(), [2, 5]);
    assert_eq!(query(&gateway, "reset", both(1))["allowed"], true);
    assert_eq!(counts(), [0, 0]);
    // Two keys of one rule are two counters; one key twice is a mistake of the caller.
    let twice = |one: &str, other: &str| json!({"rules": [{"rule": "per-client", "key": one}, {"rule": "per-client", "key": other, "cost": 2}]});
    assert_eq!(query(&gateway, "limit", twice("a", "b"))["remaining"], 3);
    for malformed in [
        twice("a", "a"),
        json!({"rules": []}),
        json!({"rules": [7]}),
        json!({"rules": [{"rule": "per-client", "key": "a", "reserve": true}]}),
        json!({"rules": [{"rule": "per-client", "key": "a"}], "cost": 1}),
    ] {
        post(&gateway, "limit", &malformed).expect(400);
    }
    assert_eq!(query(&gateway, "value", json!({"rule": "per-client", "key": "a"}))["count"], 1);
}

/// Rules with `count_refused` charge refused requests, but not refused checks.
#[test]
fn a_refused_check_consumes_nothing() {
    let rule = "[rules.strict]\nkey = \"global\"\ncount_refused = true\nwindows = [{ limit = 9, period = \"1h\", reserve = 1 }]\n";
    let gateway = Gateway::start(&config_with(rule, "\"strict\""));
    for (operation, count) in [("check", 0), ("limit", 9)] {
        let refused = query(&gateway, operation, json!({"rule": "strict", "cost": 11, "reserve": true}));
        assert_eq!(refused["allowed"], false);
        assert_eq!(query(&gateway, "value", json!({"rule": "strict"}))["count"], count, "{operation}");
    }
}

#[test]
fn an_exempt_key_is_reported() {
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"1/hour\"]\nexemptions = [\"10.0.0.0/8\"]\n";
    let gateway = Gateway::start(&config_with(rule, "\"r\""));
    for (key, exempt) in [("10.1.2.3", json!(true)), ("192.0.2.7", Value::Null)] {
        let response = query(&gateway, "limit", json!({"rule": "r", "key": key}));
        assert_eq!((&response["allowed"], &response["exempt"]), (&json!(true), &exempt), "{key}");
    }
}

/// Keys that name no client, and that the rule skips, are not.
#[test]
fn metrics_count_only_exempt_keys_as_exempt() {
    let rule = "[rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\non_unknown_key = \"missing\"\n\
                windows = [\"9/hour\"]\nexemptions = [\"key:monitor\"]\n\
                [rules.r.plans]\ngold = { windows = [\"9/hour\"] }\nsilver = { windows = [\"9/hour\"] }\n";
    let gateway = Gateway::start_with(&config_with(&format!("{CLIENTS}{rule}"), "\"r\""), &clients_file());
    for key in ["guess", "monitor"] {
        assert_eq!(query(&gateway, "limit", json!({"rule": "r", "key": key}))["exempt"], true, "{key}");
    }
    assert_eq!(gateway.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "exempt")]), 1);
}

#[test]
fn a_cost_above_the_limit_has_no_retry_time() {
    let gateway = Gateway::start(&config_with(PER_USER, "\"per-client\""));
    let response = query(&gateway, "limit", json!({"rule": "per-client", "key": "a", "cost": 6}));
    assert_eq!((&response["allowed"], &response["retry_after"]), (&json!(false), &Value::Null));
}

#[test]
fn a_reload_changes_the_rules_and_keeps_usage() {
    let mut gateway = Gateway::start(&config_with(PER_USER, "\"per-client\""));
    let body = || json!({"rule": "per-client", "key": "a", "cost": 2});
    assert_eq!(query(&gateway, "limit", body())["remaining"], 3);
    gateway.reload(&config_with(&PER_USER.replace("5/minute", "10/minute"), "\"per-client\""));
    assert_eq!(query(&gateway, "limit", body())["remaining"], 6);
}

const CLIENTS: &str =
    "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n";

fn client_toml(name: &str, plan: &str, what: &str) -> String {
    format!("[clients.{name}]\nplan = \"{plan}\"\n{what}\n")
}

/// Clients by API key, by subject and by network.
fn clients_file() -> String {
    let api_keys = |key: &str| format!("api_keys = [\"{}\"]", Digest::of(key.as_bytes()));
    client_toml("acme", "gold", &api_keys("key-of-acme"))
        + &client_toml("beta", "silver", &format!("{}\nsubjects = [\"user-of-beta\"]", api_keys("key-of-beta")))
        + &client_toml("office", "silver", "networks = [\"192.0.2.0/24\"]")
}

/// Two gateways with equal configurations: one gets requests, the other queries that name the keys of these requests.
#[test]
fn a_query_is_decided_as_a_request_with_the_same_keys() {
    let rule = |name: &str, key: &str, limits: [u32; 3], more: &str| {
        let [default, silver, gold] = limits;
        let on_missing_key = if key == "ip" { "" } else { "on_missing_key = \"skip\"\n" };
        format!(
            "[rules.{name}]\nkey = \"{key}\"\n{on_missing_key}windows = [\"{default}/30d\", \"4/day\"]\n{more}\n\
             [rules.{name}.plans.silver]\nwindows = [\"{silver}/30d\"]\n\
             [rules.{name}.plans.gold]\nwindows = [\"{gold}/30d\", \"9/day\"]\n"
        )
    };
    let toml = config_with(
        &[
            CLIENTS.to_owned(),
            rule("address", "ip", [20, 30, 40], "exemptions = [\"203.0.113.0/24\"]"),
            rule(
                "key",
                "header:x-api-key",
                [5, 10, 15],
                "on_unknown_key = \"refuse\"\nexemptions = [\"key:monitor\"]\n\
                 overrides = [{ key = \"special\", windows = [\"7/30d\"] }]",
            ),
            rule("user", "header:x-user", [5, 10, 15], "on_unknown_key = \"missing\""),
        ]
        .concat(),
        "\"address\", \"key\", \"user\"",
    );
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = \"127.0.0.1\"\n\
         [admin]\nhosts = [\"{}\"]\n{toml}",
        crate::support::client::HOST
    );
    let [requested, queried] = [0, 1].map(|_| Gateway::start_with(&toml, &clients_file()));
    let (mut rng, mut seen) = (seeded_rng(), BTreeSet::new());
    for step in 1..=600 {
        if step % 50 == 0 {
            [&requested, &queried].iter().for_each(|gateway| gateway.advance_s(24 * 3600));
        }
        let address = *rng.choice(&["192.0.2.7", "198.51.100.7", "203.0.113.7"]).unwrap();
        let key = *rng
            .choice(&[None, Some("key-of-acme"), Some("key-of-beta"), Some("monitor"), Some("special"), Some("guess")])
            .unwrap();
        let user = *rng.choice(&[None, Some("user-of-beta"), Some("guess")]).unwrap();
        let mut fields = vec![("X-Forwarded-For", address)];
        let mut rules = vec![json!({"rule": "address", "key": address})];
        for (rule, field, value) in [("key", "X-API-Key", key), ("user", "X-User", user)] {
            fields.extend(value.map(|value| (field, value)));
            rules.extend(value.map(|value| json!({"rule": rule, "key": value})));
        }
        let response = requested.get_with("/a", &fields);
        let decided = query(&queried, "limit", json!({"rules": rules}));
        let what = format!("{fields:?}: {decided}");
        assert_eq!(decided["allowed"], response.status == 200, "{what}");
        assert_eq!(decided.get("unknown_key").is_some(), key == Some("guess"), "{what}");
        assert_eq!(response.status == 401, key == Some("guess") && response.status != 429, "{what}");
        let policy = items(&response, "ratelimit-policy");
        let of_request: Vec<_> = items(&response, "ratelimit")
            .iter()
            .zip(&policy)
            .map(|(state, policy)| json!([state.name, policy.get("q"), state.get("r"), state.get("t")]))
            .collect();
        let windows = decided["windows"].as_array().unwrap().iter();
        let of_query: Vec<_> = windows
            .map(|window| json!([window["name"], window["limit"], window["remaining"], window["ttl"]]))
            .collect();
        assert_eq!(of_query, of_request, "{what}");
        seen.insert(response.status);
    }
    assert_eq!(seen, BTreeSet::from([200, 401, 429]));
    let decisions = |gateway: &Gateway, rule: &str, outcome: &str, route: &[(&str, &str)]| {
        gateway.metrics().sum("transom_decisions_total", &[&[("rule", rule), ("outcome", outcome)], route].concat())
    };
    for (rule, outcome) in [
        ("address", "admitted"),
        ("address", "refused"),
        ("user", "admitted"),
        ("user", "refused"),
        ("key", "admitted"),
    ] {
        let of_query = decisions(&queried, rule, outcome, &[("route", "api")]);
        assert_eq!(of_query, decisions(&requested, rule, outcome, &[]), "{rule} {outcome}");
        assert!(of_query > 0, "{rule} {outcome}");
    }
    let refused = |gateway: &Gateway| gateway.metrics().sum("transom_refused_total", &[]);
    assert_eq!(refused(&queried), refused(&requested));
}

#[test]
fn the_plan_of_a_key_applies_to_every_operation() {
    let rule = "key = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"2/30d\"]\n\
        [rules.r.plans.gold]\nwindows = [\"3/30d\"]\n[rules.r.plans.silver]\nwindows = [\"2/30d\"]\n";
    let local = Gateway::start_with(&config_with(&format!("{CLIENTS}[rules.r]\n{rule}"), "\"r\""), &clients_file());
    let redis = RedisServer::start();
    let shared = |mode: &str| {
        let settings = format!("mode = \"{mode}\"\n{LONG_TIMEOUT}");
        let toml = shared_config(&format!("\"{}\"", redis.url()), &settings, &format!("[rules.r]\n{rule}"));
        Process::spawn_with(&format!("{CLIENTS}{toml}"), &clients_file())
    };
    let (exact, lease) = (shared("exact"), shared("lease"));
    let body = |key: &str| json!({"rule": "r", "key": key});
    let of_process = |process: &Process, operation: &str, key: &str| query_decision(process, operation, &body(key));
    for decide in [
        &|operation: &str, key: &str| query(&local, operation, body(key)) as Value,
        &|operation: &str, key: &str| of_process(&exact, operation, key),
        &|operation: &str, key: &str| of_process(&lease, operation, key),
    ] as [&dyn Fn(&str, &str) -> Value; 3]
    {
        for (key, limit) in [("key-of-acme", 3), ("guess", 2)] {
            for operation in ["value", "check", "reset"] {
                assert_eq!(decide(operation, key)["limit"], limit, "{operation} {key}");
            }
            for nth in 1..=limit {
                assert_eq!(decide("limit", key)["count"], nth, "{key}");
            }
            for operation in ["check", "limit", "value"] {
                assert_eq!(decide(operation, key)["allowed"], false, "{operation} {key}");
            }
        }
        redis.cli(&["FLUSHALL"]);
    }
    let refused = local.get_with("/a", &[("X-API-Key", "key-of-acme")]).expect(429);
    assert_eq!(items(&refused, "ratelimit-policy")[0].get("q"), 3);
    assert_eq!(query(&local, "reset", body("key-of-acme"))["remaining"], 3);
}

#[test]
fn metrics_count_decisions_by_rule_and_outcome() {
    let rules = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\n\
        windows = [{ limit = 2, period = \"minute\", reserve = 2 }]\n\
        [rules.all]\nkey = \"global\"\nwindows = [\"9/minute\"]\nexemptions = [\"10.0.0.0/8\"]\n\
        [rules.dry]\nkey = \"global\"\nwindows = [\"1/hour\"]\non_limit = \"shadow\"\n";
    let mut gateway = Gateway::start(&config_with(rules, "\"r\", \"all\", \"dry\""));
    let counts = |gateway: &Gateway, rule: &str| {
        let metrics = gateway.metrics();
        ["admitted", "refused", "delayed"].map(|outcome| {
            metrics.sum("transom_decisions_total", &[("route", "api"), ("rule", rule), ("outcome", outcome)])
        })
    };
    let both = |reserve: bool| json!({"rules": [{"rule": "r", "key": "a"}, {"rule": "all"}], "reserve": reserve});
    assert_eq!(counts(&gateway, "r"), [0, 0, 0]);
    for reserve in [false, true, false, true, true, true] {
        query(&gateway, "limit", both(reserve));
    }
    // Two admitted, one refused, two reserved for the next window, and one refused because no more can be reserved.
    assert_eq!((counts(&gateway, "r"), counts(&gateway, "all")), ([2, 2, 2], [4, 0, 0]));
    // Nothing is consumed, so nothing is counted.
    for operation in ["check", "value", "reset"] {
        query(&gateway, operation, both(true));
    }
    post(&gateway, "limit", &json!({"rule": "r", "key": ["a", "b"]})).expect(400);
    assert_eq!((counts(&gateway, "r"), counts(&gateway, "all")), ([2, 2, 2], [4, 0, 0]));
    (0..3).for_each(|_| drop(query(&gateway, "limit", json!({"rule": "dry"}))));
    assert_eq!(counts(&gateway, "dry"), [1, 2, 0]);
    let refused = |window: &str| gateway.metrics().sum("transom_refused_total", &[("window", window)]);
    assert_eq!((refused("r"), refused("all"), refused("dry")), (2, 0, 2));
    assert_eq!(gateway.metrics().sum("transom_requests_total", &[]), 0);
    // A reload keeps the counts.
    gateway.reload(&config_with(&rules.replace("9/minute", "8/minute"), "\"r\", \"all\", \"dry\""));
    query(&gateway, "limit", json!({"rule": "all"}));
    assert_eq!((counts(&gateway, "r"), counts(&gateway, "all")), ([2, 2, 2], [5, 0, 0]));
}
