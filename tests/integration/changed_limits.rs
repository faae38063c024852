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
fn debt_lasts_as_many_windows_under_changed_limits() {
    for (before, after, debt_windows, capacity) in [
        ("{ limit = 1, period = \"1h\", capacity = 10 }", "{ limit = 5, period = \"1h\", capacity = 10 }", 10, 10),
        ("{ limit = 1, period = \"1h\", capacity = 10 }", "{ limit = 10, period = \"1h\", capacity = 11 }", 10, 11),
        // No tokens roll over any more.
        ("{ limit = 1, period = \"1h\", capacity = 10 }", "{ limit = 10, period = \"1h\", capacity = 10 }", 10, 10),
        ("{ limit = 10, period = \"1h\", capacity = 10 }", "{ limit = 5, period = \"1h\", capacity = 10 }", 1, 10),
        // Fewer tokens roll over.
        ("{ limit = 2, period = \"1h\", capacity = 20 }", "{ limit = 2, period = \"1h\", capacity = 3 }", 10, 3),
    ] {
        let mut gateway = Gateway::start(&rule(&format!("windows = [{before}]")));
        let all = admitted(&gateway, 40);
        assert!(all == 10 || all == 20, "{before}: {all}");
        gateway.reload_and_wait(&rule(&format!("windows = [{after}]")));
        assert!(retry_after_s(&gateway) <= debt_windows * HOUR_S, "{before}, then {after}");
        gateway.advance_s(debt_windows * HOUR_S);
        assert_eq!(admitted(&gateway, 40), capacity, "{before}, then {after}");
    }
}

#[test]
fn a_lowered_capacity_grants_no_tokens() {
    let mut gateway = Gateway::start(&rule("windows = [{ limit = 50, period = \"day\", capacity = 80 }]"));
    assert_eq!(admitted(&gateway, 100), 80);
    gateway.reload_and_wait(&rule("windows = [{ limit = 50, period = \"day\", capacity = 51 }]"));
    assert_eq!(admitted(&gateway, 30), 0);
    assert!(retry_after_s(&gateway) <= 24 * HOUR_S);
    gateway.advance_s(24 * HOUR_S);
    assert!(admitted(&gateway, 100) <= 51);
}

#[test]
fn a_reload_that_changes_how_a_layer_counts_is_refused() {
    let delay = "on_limit = \"delay\"\nmax_delay = \"1s\"\nwindows = [\"50/day\"]";
    let cost = "cost = { response-header = \"x-cost\", reserve = 1, max = 9 }\nwindows = [\"50/day\"]";
    let windows = |settings: &str| format!("windows = [{{ limit = 50, period = \"day\"{settings} }}]");
    for (settings, setting) in [
        (windows(", capacity = 80"), "capacity"),
        (windows(", reserve = 8"), "reserve"),
        (windows(", shards = 3"), "shards"),
        (windows(", sliding = true"), "sliding"),
        (delay.to_owned(), "on_limit"),
        (cost.to_owned(), "cost"),
    ] {
        for (before, after) in [(windows(""), settings.clone()), (settings, windows(""))] {
            let mut gateway = Gateway::start(&rule(&before));
            let used = admitted(&gateway, 5);
            let reason = gateway.refused_reload(&rule(&after));
            assert!(reason.starts_with(&format!("rule `r`, `50/day`: a change of `{setting}` ")), "{reason}");
            assert_eq!(used, 5, "{before}");
            // The running configuration continues.
            gateway.reload_and_wait(&rule(&before));
            assert!(admitted(&gateway, 100) < 80, "{before}");
        }
    }
}

#[test]
fn a_layer_with_another_period_or_key_has_other_counters_at_once() {
    let mut gateway = Gateway::start(&rule("windows = [\"50/day\"]"));
    assert_eq!(admitted(&gateway, 60), 50);
    gateway.reload_and_wait(&rule("windows = [{ limit = 5, period = \"2d\", capacity = 8 }]"));
    assert_eq!(admitted(&gateway, 60), 8);
}
