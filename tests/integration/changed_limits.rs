//! Limits that change while counters are in use: usage stays, and no request waits for windows that were never used.

use crate::support::gateway::Gateway;
use crate::support::one_rule;

const HOUR_S: u64 = 3600;

fn rule(settings: &str) -> String {
    one_rule(&format!("key = \"global\"\n{settings}"))
}

/// Sends requests; returns the number of admitted ones.
fn admitted(gateway: &Gateway, requests: usize) -> usize {
    let mut client = gateway.client();
    (0..requests).filter(|_| client.get("/a").status == 200).count()
}

fn retry_after_s(gateway: &Gateway) -> u64 {
    gateway.get("/a").expect(429).field("retry-after").unwrap().parse().unwrap()
}

#[test]
fn debt_of_a_smaller_limit_does_not_lock_out_a_key() {
    for (before, after) in [
        // A raised limit also raises the apparent debt of a window.
        ("{ limit = 1, period = \"1h\", capacity = 10 }", "{ limit = 5, period = \"1h\", capacity = 10 }"),
        ("{ limit = 1, period = \"1h\", capacity = 10 }", "{ limit = 10, period = \"1h\" }"),
        // Unused tokens no longer roll over.
        ("{ limit = 2, period = \"1h\", capacity = 20 }", "\"2/1h\""),
    ] {
        let mut gateway = Gateway::start(&rule(&format!("windows = [{before}]")));
        let all = admitted(&gateway, 40);
        assert!(all == 10 || all == 20, "{before}: {all}");
        gateway.reload_and_wait(&rule(&format!("windows = [{after}]")));
        assert!(retry_after_s(&gateway) <= HOUR_S, "{before}, then {after}");
        gateway.advance_s(HOUR_S);
        assert!(admitted(&gateway, 1) == 1, "{before}, then {after}");
    }
}

#[test]
fn removing_a_capacity_grants_no_tokens() {
    let mut gateway = Gateway::start(&rule("windows = [{ limit = 50, period = \"day\", capacity = 80 }]"));
    assert_eq!(admitted(&gateway, 100), 80);
    gateway.reload_and_wait(&rule("windows = [\"50/day\"]"));
    assert_eq!(admitted(&gateway, 30), 0);
    assert!(retry_after_s(&gateway) <= 24 * HOUR_S);
    gateway.advance_s(24 * HOUR_S);
    assert!(admitted(&gateway, 100) <= 50);
}

#[test]
fn the_shards_of_a_counter_add_up_to_the_limit() {
    let with = |shards: u64| rule(&format!("windows = [{{ limit = 50, period = \"day\", shards = {shards} }}]"));
    let mut gateway = Gateway::start(&with(1));
    let mut total = admitted(&gateway, 10);
    for shards in [7, 3, 10, 1, 7, 3] {
        gateway.reload_and_wait(&with(shards));
        total += admitted(&gateway, 10);
    }
    assert_eq!(total, 50);
}
