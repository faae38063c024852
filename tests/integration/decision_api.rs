//! The decision API: decisions without a request, on the counters of the requests.

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::remaining;

fn with(rules: &str, named: &str) -> String {
    format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n{rules}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [{named}]\n"
    )
}

fn post(gateway: &Gateway, verb: &str, question: &Value) -> HttpResponse {
    Client::connect(gateway.admin).post(&format!("/v1/{verb}"), question.to_string())
}

fn ask(gateway: &Gateway, verb: &str, question: Value) -> Value {
    post(gateway, verb, &question).expect(200).json()
}

const PER_USER: &str =
    "[rules.per-client]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"5/minute\"]\n";

#[test]
fn a_key_is_checked_charged_read_and_reset() {
    let gateway = Gateway::start(&with(PER_USER, "\"per-client\""));
    gateway.advance_s(23);
    let window =
        |count: u64| json!({"name": "per-client", "count": count, "limit": 5, "remaining": 5 - count, "ttl": 37});
    let told = |allowed: bool, count: u64, retry_after: u64| {
        json!({
            "allowed": allowed, "count": count, "limit": 5, "remaining": 5 - count, "ttl": 37,
            "retry_after": retry_after, "windows": [window(count)],
        })
    };
    let alice = || json!({"rule": "per-client", "key": "alice"});
    assert_eq!(
        ask(&gateway, "limit", json!({"rule": "per-client", "key": "alice", "cost": 1, "reserve": false})),
        told(true, 1, 0)
    );
    assert_eq!(ask(&gateway, "check", alice()), told(true, 1, 0));
    assert_eq!(ask(&gateway, "value", alice()), told(true, 1, 0));
    assert_eq!(ask(&gateway, "limit", json!({"rule": "per-client", "key": ["alice"], "cost": 4})), told(true, 5, 0));
    assert_eq!(ask(&gateway, "limit", alice()), told(false, 5, 37));
    assert_eq!(ask(&gateway, "check", alice()), told(false, 5, 37));
    // It is the counter of the requests.
    let refused = gateway.get_with("/a", &[("X-User", "alice")]).expect(429);
    assert_eq!(remaining(&refused, "per-client"), 0);
    gateway.get_with("/a", &[("X-User", "bob")]).expect(200);
    assert_eq!(ask(&gateway, "value", json!({"rule": "per-client", "key": "bob"})), told(true, 1, 0));
    assert_eq!(ask(&gateway, "reset", alice()), told(true, 0, 0));
    gateway.get_with("/a", &[("X-User", "alice")]).expect(200);
    gateway.advance_s(37);
    assert_eq!(ask(&gateway, "value", alice())["count"], 0);
}

#[test]
fn the_layer_nearest_its_limit_comes_first() {
    let rule = "[rules.r]\nkey = [\"header:x-user\", \"path\"]\non_missing_key = \"skip\"\nwindows = [\"10/hour\", \"3/minute\"]\n";
    let gateway = Gateway::start(&with(rule, "\"r\""));
    let question = || json!({"rule": "r", "key": ["abc", "/search"], "cost": 2});
    let response = ask(&gateway, "limit", question());
    assert_eq!((&response["limit"], &response["remaining"]), (&json!(3), &json!(1)));
    let names: Vec<&str> =
        response["windows"].as_array().unwrap().iter().map(|w| w["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["r-hour", "r-minute"]);
    assert_eq!(ask(&gateway, "limit", question())["allowed"], false);
    let request = gateway.get_with("/search", &[("X-User", "abc")]).expect(200);
    assert_eq!(remaining(&request, "r-minute"), 0);
    assert_eq!(ask(&gateway, "value", json!({"rule": "r", "key": ["abc", "/feed"]}))["count"], 0);
}

#[test]
fn a_global_counter_reports_the_retry_time() {
    let rule = "[rules.sign-ups]\nkey = \"global\"\nwindows = [\"100/hour\"]\n";
    let gateway = Gateway::start_at(&with(rule, "\"sign-ups\""), 1_699_999_200);
    gateway.advance_s(600);
    for _ in 0..100 {
        assert_eq!(ask(&gateway, "limit", json!({"rule": "sign-ups"}))["allowed"], true);
    }
    let response = ask(&gateway, "limit", json!({"rule": "sign-ups"}));
    assert_eq!((&response["allowed"], &response["retry_after"]), (&json!(false), &json!(3000)));
    // Whatever key is given, it is the one counter.
    assert_eq!(ask(&gateway, "value", json!({"rule": "sign-ups", "key": "any"}))["count"], 100);
}

#[test]
fn a_reservation_reports_its_window_and_is_charged_to_it() {
    let rule = "[rules.r]\nkey = \"global\"\nwindows = [{ limit = 1000, period = \"minute\", reserve = 200 }]\n";
    let gateway = Gateway::start(&with(rule, "\"r\""));
    gateway.advance_s(20);
    let take =
        |cost: u64, reserve: bool| ask(&gateway, "limit", json!({"rule": "r", "cost": cost, "reserve": reserve}));
    assert_eq!(take(1000, false)["allowed"], true);
    assert_eq!((take(1, false)["allowed"].clone(), take(1, false)["retry_after"].clone()), (json!(false), json!(40)));
    let reserved = take(150, true);
    assert_eq!((&reserved["allowed"], &reserved["retry_after"]), (&json!(true), &json!(40)));
    assert_eq!(take(50, true)["allowed"], true);
    assert_eq!(take(1, true)["allowed"], false, "200 is as far as it goes");
    gateway.advance_s(40);
    assert_eq!(take(1, false)["remaining"], 799, "the window grants that much less");
}

/// A key whose tokens roll over, hour by hour.
#[test]
fn decisions_at_window_boundaries_follow_the_timeline() {
    let rule = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\n\
        windows = [{ limit = 100, period = \"1h\", capacity = 150, start = \"2024-01-01T00:00:00Z\" }]\n";
    // Used up an hour before midnight, so that it holds 100 at midnight.
    let gateway = Gateway::start_at(&with(rule, "\"r\""), 1_704_067_200 - 3600);
    let take = |cost: u64| ask(&gateway, "limit", json!({"rule": "r", "key": "a", "cost": cost}))["remaining"].clone();
    let value = || ask(&gateway, "value", json!({"rule": "r", "key": "a"}))["remaining"].clone();
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
    assert_eq!(value(), 150, "however long it was idle");
}

#[test]
fn a_malformed_query_is_400_and_an_unknown_rule_404() {
    let gateway = Gateway::start(&with(PER_USER, "\"per-client\""));
    for (question, status) in [
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
        let response = Client::connect(gateway.admin).post("/v1/limit", question).expect(status);
        assert_eq!(response.problem()["status"], status, "{question}");
    }
    let long = format!("{{\"rule\": \"per-client\", \"key\": \"{}\"}}", "a".repeat(70_000));
    Client::connect(gateway.admin).post("/v1/limit", long).expect(413);
    let get = Client::connect(gateway.admin).get("/v1/limit").expect(405);
    assert_eq!(get.field("allow"), Some("POST"));
    Client::connect(gateway.admin).post("/v1/other", "{}").expect(405);
    let question = br#"{"rule": "per-client", "key": "a"}"#;
    for fields in [&[("Origin", "http://evil.example")][..], &[("Origin", "null")], &[("Sec-Fetch-Site", "cross-site")]]
    {
        Client::connect(gateway.admin).request("POST", "/v1/limit", fields, question).expect(403);
    }
    let own = format!("http://{}", gateway.admin);
    let own = [("Host", own.trim_start_matches("http://")), ("Origin", &own), ("Sec-Fetch-Site", "same-origin")];
    Client::connect(gateway.admin).request("POST", "/v1/value", &own, question).expect(200);
    assert_eq!(ask(&gateway, "value", json!({"rule": "per-client", "key": "a"}))["count"], 0);
}

#[test]
fn a_cost_above_the_limit_has_no_retry_time() {
    let gateway = Gateway::start(&with(PER_USER, "\"per-client\""));
    let response = ask(&gateway, "limit", json!({"rule": "per-client", "key": "a", "cost": 6}));
    assert_eq!((&response["allowed"], &response["retry_after"]), (&json!(false), &Value::Null));
}

#[test]
fn a_reload_changes_the_rules_and_keeps_usage() {
    let mut gateway = Gateway::start(&with(PER_USER, "\"per-client\""));
    let question = || json!({"rule": "per-client", "key": "a", "cost": 2});
    assert_eq!(ask(&gateway, "limit", question())["remaining"], 3);
    gateway.reload(&with(&PER_USER.replace("5/minute", "10/minute"), "\"per-client\""));
    assert_eq!(ask(&gateway, "limit", question())["remaining"], 6);
}
