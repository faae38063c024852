//! The first steps of a user: the shipped configuration, 33 responses, and a refusal.

use std::fs;
use std::time::Duration;

use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};

/// The shipped file, with ports chosen by the system.
fn shipped() -> String {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/gateway.toml")).unwrap();
    let text = text.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0");
    assert!(!text.contains(":8080") && !text.contains(":9900"));
    text
}

/// Unix seconds at which both an hour and a minute start.
const HOUR_S: u64 = 472_223 * 3600;

#[test]
fn the_34th_request_within_a_minute_is_refused() {
    let gateway = Gateway::start_at(&shipped(), HOUR_S + 29);
    let mut client = gateway.client();
    for n in 1..=33 {
        let response = client.get("/api/hello").expect(200);
        assert_eq!(
            response.values("ratelimit-policy"),
            ["\"per-client-hour\";q=2000;w=3600, \"per-client-minute\";q=33;w=60"]
        );
        let state = format!("\"per-client-hour\";r={};t=3571, \"per-client-minute\";r={};t=31", 2000 - n, 33 - n);
        assert_eq!(response.values("ratelimit"), [state]);
        assert_eq!(response.field("retry-after"), None);
    }
    let refused = client.get("/api/hello").expect(429);
    assert_eq!(refused.values("retry-after"), ["31"]);
    assert_eq!(
        refused.values("ratelimit-policy"),
        ["\"per-client-hour\";q=2000;w=3600, \"per-client-minute\";q=33;w=60"]
    );
    assert_eq!(refused.values("ratelimit"), ["\"per-client-hour\";r=1967;t=3571, \"per-client-minute\";r=0;t=31"]);
    let problem = refused.problem();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["violated-policies"], serde_json::json!(["per-client-minute"]));
    assert_eq!(problem["retry-after"], 31);
}

#[test]
fn the_binary_serves_the_shipped_file() {
    // With the real clock: if a minute ends during the test, the next one has its own 33 requests.
    let process = Process::spawn(&shipped());
    let mut client = process.client();
    let mut admitted_of_this_minute = 0;
    let mut last_t = u64::MAX;
    loop {
        let response = client.get("/api/hello");
        let minute = items(&response, "ratelimit").into_iter().find(|item| item.name == "per-client-minute").unwrap();
        if minute.get("t") > last_t {
            admitted_of_this_minute = 0;
        }
        last_t = minute.get("t");
        if response.status == 429 {
            break;
        }
        admitted_of_this_minute += 1;
        let echo = response.expect(200).json();
        assert_eq!((echo["method"].as_str(), echo["path"].as_str()), (Some("GET"), Some("/api/hello")));
    }
    assert_eq!(admitted_of_this_minute, 33);
    process.admin_get("/healthz").expect(200);
    process.get("/elsewhere").expect(404).problem();
}

#[test]
fn retry_after_is_exact() {
    let gateway = Gateway::start_at(&shipped(), HOUR_S);
    gateway.advance(Duration::from_millis(12_345));
    let mut client = gateway.client();
    for _ in 0..33 {
        client.get("/api/a").expect(200);
    }
    let refused = client.get("/api/a").expect(429);
    // 47.655 s remain of the minute.
    assert_eq!(refused.field("retry-after"), Some("48"));
    gateway.advance(Duration::from_millis(47_654));
    client.get("/api/a").expect(429);
    gateway.advance(Duration::from_millis(48_000 - 47_654));
    assert_eq!(remaining(&client.get("/api/a").expect(200), "per-client-minute"), 32);
}

#[test]
fn refusals_by_the_minute_do_not_use_the_hour() {
    // 60 minutes with 50 requests each: 33 · 60 are admitted and counted.
    let gateway = Gateway::start_at(&shipped(), HOUR_S);
    let mut client = gateway.client();
    let mut admitted = 0;
    for minute in 0..60 {
        for attempt in 0..50 {
            let response = client.get("/api/a");
            admitted += u64::from(response.status == 200);
            assert_eq!(response.status, if attempt < 33 { 200 } else { 429 }, "minute {minute}, attempt {attempt}");
        }
        if minute < 59 {
            gateway.advance_s(60);
        }
    }
    assert_eq!(admitted, 1980);
    assert_eq!(remaining(&client.get("/api/a").expect(429), "per-client-hour"), 2000 - 1980);
}

#[test]
fn a_used_up_hour_refuses_although_the_minute_has_tokens() {
    let toml = shipped().replace("33/minute", "1_000/minute");
    let gateway = Gateway::start_at(&toml, HOUR_S);
    let mut client = gateway.client();
    for _ in 0..2 {
        for _ in 0..1000 {
            client.get("/api/a").expect(200);
        }
        gateway.advance_s(60);
    }
    let refused = client.get("/api/a").expect(429);
    assert_eq!(refused.field("retry-after"), Some("3480"));
    assert_eq!(refused.problem()["violated-policies"], serde_json::json!(["per-client-hour"]));
    assert_eq!(remaining(&refused, "per-client-minute"), 1000);
    gateway.advance_s(3480);
    client.get("/api/a").expect(200);
}

#[test]
fn requests_around_a_window_boundary_are_admitted_by_both_windows() {
    let toml = shipped().replace("\"2000/hour\", \"33/minute\"", "\"5/minute\"");
    // Window 28333335; second 59 of it.
    let gateway = Gateway::start_at(&toml, 1_700_000_159);
    let mut client = gateway.client();
    for start_remaining in [4, 4] {
        for n in 0..5 {
            assert_eq!(remaining(&client.get("/api/a").expect(200), "per-client"), start_remaining - n);
        }
        client.get("/api/a").expect(429);
        gateway.advance_s(2);
    }
}

#[test]
fn retry_after_covers_the_layer_that_blocks_longest() {
    let toml = shipped().replace("\"2000/hour\", \"33/minute\"", "\"3/hour\", \"3/minute\"");
    let gateway = Gateway::start_at(&toml, HOUR_S + 100);
    let mut client = gateway.client();
    for _ in 0..3 {
        client.get("/api/a").expect(200);
    }
    let refused = client.get("/api/a").expect(429);
    assert_eq!(refused.field("retry-after"), Some("3500"));
    let problem = refused.problem();
    let mut violated: Vec<&str> =
        problem["violated-policies"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
    violated.sort_unstable();
    assert_eq!(violated, ["per-client-hour", "per-client-minute"]);
}
