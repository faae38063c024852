//! The decision API: it uses the same counters as forwarded requests.

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::remaining;

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
