//! More keys than slots in the table: limits become stricter, and never looser.

use crate::support::gateway::Gateway;
use crate::support::one_rule;
use crate::support::ratelimit_parser::remaining;

const CAPACITY: usize = 64;

fn gateway(windows: &str) -> Gateway {
    let rule = format!("key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [{windows}]");
    Gateway::start(&format!("{}\n[counters]\ncapacity = {CAPACITY}\n", one_rule(&rule)))
}

#[test]
fn a_flood_of_keys_grants_no_key_more_than_the_limit() {
    let gateway = gateway("\"3/hour\"");
    let mut client = gateway.client();
    let mut request = |user: &str| client.get_with("/a", &[("X-User", user)]).status;
    // Some keys have counters before the flood.
    for early in 0..20 {
        assert_eq!(request(&format!("early-{early}")), 200);
    }
    for round in 0..5 {
        let mut admitted = 0;
        for key in 0..1000 {
            let status = request(&format!("flood-{key}"));
            assert!(status == 200 || status == 429);
            admitted += u32::from(status == 200);
        }
        assert!(round < 3 || admitted == 0, "round {round} admitted {admitted} over the limit");
    }
    // Keys with one token used still have two left, because they have their own counters.
    for early in 0..20 {
        let user = format!("early-{early}");
        assert_eq!([request(&user), request(&user), request(&user)], [200, 200, 429], "{user}");
    }
    let metrics = gateway.metrics();
    assert!(metrics.sum("transom_counters_overflow_total", &[]) > 0);
    let (live, free) =
        (metrics.sum("transom_counters", &[("state", "live")]), metrics.sum("transom_counters", &[("state", "free")]));
    assert!(live + free >= CAPACITY as u64 && live > free, "{live} live, {free} free");
}

#[test]
fn a_full_table_grants_no_key_more_than_the_limit() {
    let gateway = gateway("\"3/hour\"");
    let mut client = gateway.client();
    let mut admitted = vec![0; 400];
    for _ in 0..6 {
        for (key, admitted) in admitted.iter_mut().enumerate() {
            *admitted += u32::from(client.get_with("/a", &[("X-User", &format!("key-{key}"))]).status == 200);
        }
    }
    assert!(admitted.iter().all(|admitted| *admitted <= 3), "{admitted:?}");
}

#[test]
fn counters_become_free_when_their_windows_end() {
    let gateway = gateway("\"3/minute\"");
    let mut client = gateway.client();
    let mut request = |user: &str| client.get_with("/a", &[("X-User", user)]);
    for key in 0..1000 {
        request(&format!("flood-{key}"));
    }
    gateway.advance_s(60);
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_counters", &[("state", "live")]), 0);
    for key in 0..20 {
        for left in [2, 1, 0] {
            assert_eq!(remaining(&request(&format!("new-{key}")).expect(200), "r"), left);
        }
        request(&format!("new-{key}")).expect(429);
    }
}
