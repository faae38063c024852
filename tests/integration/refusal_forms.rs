//! Refusal responses as configured by a rule.

use std::collections::BTreeSet;

use crate::support::client::HttpResponse;
use crate::support::gateway::Gateway;
use crate::support::{eventually_eq, one_rule};

const HOUR_S: u64 = 3600;

fn refused(settings: &str) -> (Gateway, HttpResponse) {
    let gateway = Gateway::start(&one_rule(&format!("key = \"ip\"\nwindows = [\"1/minute\"]\n{settings}")));
    gateway.get("/a").expect(200);
    let response = gateway.get("/a");
    (gateway, response)
}

#[test]
fn a_configured_status_appears_in_the_problem_body() {
    for status in [400, 420, 499, 503, 599] {
        let (_gateway, response) = refused(&format!("status = {status}"));
        let response = response.expect(status);
        let problem = response.problem();
        assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert_eq!(problem["violated-policies"], serde_json::json!(["r"]));
        assert_eq!(response.field("retry-after"), Some(problem["retry-after"].to_string().as_str()));
        assert_eq!(response.values("ratelimit").len(), 1);
    }
}

#[test]
fn a_configured_body_replaces_the_problem() {
    for (settings, status, kind, body) in [
        ("body = \"slow down\\n\"", 429, "text/plain; charset=utf-8", "slow down\n"),
        ("body = \"\"\nstatus = 503", 503, "text/plain; charset=utf-8", ""),
        (
            "body = '{\"error\": \"é\"}'\ncontent_type = \"application/json\"",
            429,
            "application/json",
            "{\"error\": \"é\"}",
        ),
    ] {
        let (gateway, response) = refused(settings);
        let response = response.expect(status);
        assert_eq!((response.values("content-type"), response.text().as_str()), (vec![kind], body));
        assert_eq!(response.field("content-length"), Some(body.len().to_string().as_str()));
        assert!(response.field("retry-after").is_some() && response.field("ratelimit").is_some());
        let head = gateway.client().request("HEAD", "/a", &[], b"").expect(status);
        assert_eq!(head.field("content-length"), Some(body.len().to_string().as_str()));
        eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", &status.to_string())]), 2);
    }
}

#[test]
fn a_body_has_variables() {
    let body = "body = '{\"wait\": {retry_after}, \"of\": {limit}, \"by\": \"{window} {rule}\", \"id\": \"{request_id}\", \"other\": {}, \
                \"{limits}\": 1}'\ncontent_type = \"application/problem+json; v=1\"";
    let (gateway, response) = refused(body);
    let response = response.expect(429);
    let id = response.field("x-request-id").unwrap().to_owned();
    let seconds: u64 = response.field("retry-after").unwrap().parse().unwrap();
    let expected =
        serde_json::json!({"wait": seconds, "of": 1, "by": "r r", "id": id, "other": {}, "{limits}": 1}).to_string();
    assert_eq!(response.json().to_string(), expected);
    assert_eq!(response.field("content-length"), Some(response.text().len().to_string().as_str()));
    // A repeated refusal has an id of its own.
    let other = gateway.get("/a").expect(429);
    assert_eq!(other.json()["id"], other.field("x-request-id").unwrap());
    assert_ne!(other.json()["id"], id);
}

#[test]
fn a_variable_is_escaped_as_the_media_type_needs() {
    for (content_type, shown) in [
        ("text/plain", "a\"\\<b>"),
        ("application/json", "a\\\"\\\\<b>"),
        ("application/vnd.x+json;v=1", "a\\\"\\\\<b>"),
        ("text/html; charset=utf-8", "a&#34;\\&#60;b&#62;"),
    ] {
        let rule = format!(
            "key = \"ip\"\nwindows = [\"1/minute\"]\nbody = 'id {{request_id}}'\ncontent_type = '{content_type}'"
        );
        let gateway = Gateway::start(&format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = [\"127.0.0.1\"]\n{}",
            one_rule(&rule)
        ));
        let get = || gateway.client().get_with("/a", &[("x-request-id", "a\"\\<b>")]);
        get().expect(200);
        assert_eq!(get().expect(429).text(), format!("id {shown}"), "{content_type}");
    }
}

#[test]
fn variables_name_the_limit_that_blocks_longest() {
    let settings = "body = \"{window} of {rule}: {limit}, wait {retry_after}.\"";
    for (rule, cost, body) in [
        ("windows = [\"1/minute\", \"5/hour\"]", "1", "r-minute of r: 1, wait 60."),
        ("windows = [\"1/hour\"]\n[rules.r.plans.gold]\nwindows = [\"5/minute\"]", "1", "r of r: 1, wait 2700."),
        ("windows = [\"1/minute\"]\npenalty = \"2m\"", "1", "r-penalty of r: 0, wait 120."),
        ("windows = [\"2/minute\"]\ncost = { request-header = \"x-cost\", max = 9 }", "3", "r of r: 2, wait ."),
    ] {
        let (settings, more) = match rule.split_once("\n[") {
            Some((first, more)) => (format!("{first}\n{settings}"), format!("\n[{more}")),
            None => (format!("{rule}\n{settings}"), String::new()),
        };
        let gateway = Gateway::start(&one_rule(&format!("key = \"ip\"\n{settings}{more}")));
        gateway.client().get("/a").expect(200);
        let refused = gateway.client().get_with("/a", &[("x-cost", cost)]).expect(429);
        assert_eq!(refused.text(), body, "{rule}");
    }
}

#[test]
fn retry_after_is_spread_by_jitter() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]\nretry_jitter = \"30s\""));
    gateway.advance_s(20);
    let mut client = gateway.client();
    client.get("/a").expect(200);
    let seconds_seen: BTreeSet<u64> = (0..50)
        .map(|_| {
            let refused = client.get("/a").expect(429);
            let seconds = refused.field("retry-after").unwrap().parse().unwrap();
            assert_eq!(refused.problem()["retry-after"], seconds);
            seconds
        })
        .collect();
    assert!(seconds_seen.iter().all(|seconds| (40..=70).contains(seconds)), "{seconds_seen:?}");
    assert!(seconds_seen.len() > 5, "{seconds_seen:?}");
}

#[test]
fn simultaneous_refusals_describe_each_clients_windows() {
    let rule = "key = \"header:x-key\"\non_missing_key = \"refuse\"\nwindows = [\"2/minute\", \"3/hour\"]";
    let gateway = Gateway::start(&one_rule(rule));
    let mut client = gateway.client();
    let mut get_as = |key: &str| client.get_with("/a", &[("x-key", key)]);
    (0..2).for_each(|_| drop(get_as("early").expect(200)));
    gateway.advance_s(60);
    get_as("early").expect(200);
    (0..2).for_each(|_| drop(get_as("late").expect(200)));
    // With a manual clock: the fields of the last refusal must not be sent to another client.
    for _ in 0..3 {
        for (key, full, state, again) in
            [("early", "r-hour", "1;t=60, 0;t=2640", "2640"), ("late", "r-minute", "0;t=60, 1;t=2640", "60")]
        {
            let refused = get_as(key).expect(429);
            let fields = refused.field("ratelimit").unwrap();
            assert_eq!(fields.replace("\"r-minute\";r=", "").replace("\"r-hour\";r=", ""), state, "{fields}");
            assert_eq!(refused.problem()["violated-policies"], serde_json::json!([full]));
            assert_eq!(refused.field("retry-after"), Some(again));
        }
    }
    // A later time in the same second.
    gateway.advance(std::time::Duration::from_millis(1500));
    assert_eq!(get_as("late").expect(429).field("retry-after"), Some("59"));
}

#[test]
fn the_rule_that_blocks_longest_shapes_the_refusal() {
    let toml = "[upstreams.u]\nbuiltin = \"echo\"\n\
        [rules.short]\nkey = \"ip\"\nwindows = [\"1/minute\"]\nstatus = 503\n\
        [rules.long]\nkey = \"ip\"\nwindows = [\"2/hour\"]\nbody = \"try again later\"\n\
        [rules.plain]\nkey = \"ip\"\nwindows = [\"1/second\"]\n\
        [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"short\", \"long\", \"plain\"]\n";
    let gateway = Gateway::start(toml);
    let mut client = gateway.client();
    client.get("/a").expect(200);
    assert_eq!(
        client.get("/a").expect(503).problem()["violated-policies"],
        serde_json::json!(["plain", "short"]),
        "all refusing rules are named"
    );
    gateway.advance_s(60);
    client.get("/a").expect(200);
    let refused = client.get("/a").expect(429);
    assert_eq!((refused.text().as_str(), refused.field("retry-after")), ("try again later", Some("2640")));
    gateway.advance_s(HOUR_S);
    client.get("/a").expect(200);
    client.get("/a").expect(503);
}

#[test]
fn a_cost_above_the_limit_has_no_retry_after() {
    let rule = "key = \"ip\"\nwindows = [\"10/minute\", { limit = 20, period = \"hour\", capacity = 30 }]\n\
                cost = { request-header = \"x-cost\", max = 50 }";
    let gateway = Gateway::start(&one_rule(rule));
    let mut client = gateway.client();
    for cost in ["11", "31"] {
        let refused = client.get_with("/a", &[("X-Cost", cost)]).expect(429);
        assert_eq!(refused.field("retry-after"), None);
        let problem = refused.problem();
        assert!(problem.get("retry-after").is_none(), "{problem}");
        assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert!(problem["title"].as_str().unwrap().contains("never") && problem["detail"].is_string(), "{problem}");
        assert_eq!(refused.field("ratelimit").unwrap(), "\"r-minute\";r=10;t=60, \"r-hour\";r=30;t=2700");
    }
    client.get_with("/a", &[("X-Cost", "10")]).expect(200);
    // Used up now, but not for ever.
    assert_eq!(client.get_with("/a", &[("X-Cost", "10")]).expect(429).field("retry-after"), Some("60"));
}
