//! Exactly the limit is admitted, through real sockets and many threads at once.
//!
//! The clock is manual, so that no window ends during a test.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::{eventually, one_rule};

const THREADS: usize = 8;

/// Eight threads send `attempts` requests each, at once and on separate connections; returns the number of admitted requests.
fn admitted_by_threads(
    gateway: &Gateway,
    attempts: usize,
    fields: impl Fn(usize, usize) -> Vec<(String, String)> + Sync,
) -> u64 {
    let admitted = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (admitted, fields) = (&admitted, &fields);
            scope.spawn(move || {
                let mut client = gateway.client();
                for n in 0..attempts {
                    let fields = fields(thread, n);
                    let fields: Vec<(&str, &str)> = fields.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
                    let response = client.get_with("/a", &fields);
                    match response.status {
                        200 => admitted.fetch_add(1, Ordering::Relaxed),
                        429 => 0,
                        status => panic!("{status}: {}", response.text()),
                    };
                }
            });
        }
    });
    admitted.into_inner()
}

fn assert_exactly(limit: usize) {
    let rule = format!("key = \"ip\"\nwindows = [\"{limit}/hour\"]");
    let gateway = Gateway::start(&format!("workers = 4\n{}\n[counters]\ncapacity = 1000\n", one_rule(&rule)));
    // A quarter more than the limit, and at least two attempts of each thread.
    let attempts = (limit + limit / 4).div_ceil(THREADS).max(2);
    assert_eq!(admitted_by_threads(&gateway, attempts, |_, _| Vec::new()), limit as u64);
    let refused = gateway.get("/a").expect(429);
    assert_eq!(remaining(&refused, "r"), 0);
    let metrics = gateway.metrics();
    let decisions = |outcome| metrics.sum("transom_decisions_total", &[("rule", "r"), ("outcome", outcome)]);
    assert_eq!(decisions("admitted"), limit as u64);
    assert_eq!(decisions("refused"), (attempts * THREADS - limit + 1) as u64);
}

#[test]
fn eight_threads_are_granted_exactly_the_limit() {
    // Small limits are exposed to races at their limit, so these cases are repeated.
    for (limit, times) in [(1, 50), (2, 25), (3, 25), (7, 10), (33, 10), (100, 3), (1000, 1), (10_000, 1)] {
        for _ in 0..times {
            assert_exactly(limit);
        }
    }
}

#[test]
fn a_request_counts_once_in_every_layer_of_three_rules() {
    let toml = "workers = 4
        [upstreams.u]
        builtin = \"echo\"
        [rules.address]
        key = \"ip\"
        windows = [\"700/hour\", \"600/minute\"]
        [rules.user]
        key = \"header:x-user\"
        on_missing_key = \"refuse\"
        windows = [\"100/hour\", \"90/minute\"]
        [rules.all]
        key = \"global\"
        windows = [\"550/hour\", \"500/minute\"]
        [[routes]]
        path = \"/{*rest}\"
        upstream = \"u\"
        rules = [\"address\", \"user\", \"all\"]
        ";
    let gateway = Gateway::start(toml);
    // Each of the eight threads sends requests of all twelve users.
    let by_user: Vec<AtomicU64> = (0..12).map(|_| AtomicU64::new(0)).collect();
    let admitted = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (gateway, by_user, admitted) = (&gateway, &by_user, &admitted);
            scope.spawn(move || {
                let mut client = gateway.client();
                for n in 0..200 {
                    let user = (n * 5 + thread) % 12;
                    if client.get_with("/a", &[("X-User", &format!("user-{user}"))]).status == 200 {
                        by_user[user].fetch_add(1, Ordering::Relaxed);
                        admitted.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let admitted = admitted.into_inner();
    // The smallest limit is the minute of the global rule.
    assert_eq!(admitted, 500);
    for (user, count) in by_user.into_iter().map(AtomicU64::into_inner).enumerate() {
        let response = gateway.get_with("/a", &[("X-User", &format!("user-{user}"))]).expect(429);
        assert_eq!(remaining(&response, "user-hour"), 100 - count, "user {user}");
        assert_eq!(remaining(&response, "user-minute"), 90 - count, "user {user}");
        assert_eq!(remaining(&response, "address-hour"), 700 - admitted);
        assert_eq!(remaining(&response, "address-minute"), 600 - admitted);
        assert_eq!(remaining(&response, "all-hour"), 550 - admitted);
        assert_eq!(remaining(&response, "all-minute"), 0);
    }
}

#[test]
fn a_refusal_by_one_layer_charges_no_other() {
    let toml = "[upstreams.u]
        builtin = \"echo\"
        [rules.user]
        key = \"header:x-user\"
        on_missing_key = \"refuse\"
        windows = [\"1000/hour\", \"10/minute\"]
        [rules.all]
        key = \"global\"
        windows = [\"1000/hour\"]
        [[routes]]
        path = \"/{*rest}\"
        upstream = \"u\"
        rules = [\"all\", \"user\"]
        ";
    let gateway = Gateway::start(toml);
    assert_eq!(admitted_by_threads(&gateway, 100, |_, _| vec![("X-User".to_owned(), "eve".to_owned())]), 10);
    let response = gateway.get_with("/a", &[("X-User", "bob")]).expect(200);
    // Ten requests of eve and this one; the 790 refused requests are not counted.
    assert_eq!(remaining(&response, "all"), 1000 - 11);
    let response = gateway.get_with("/a", &[("X-User", "eve")]).expect(429);
    assert_eq!(remaining(&response, "user-hour"), 1000 - 10);
}

#[test]
fn a_changed_limit_applies_to_existing_usage() {
    // A second rule with cost 0 shows by its limit which configuration is applied.
    let toml = |limit: u64| {
        format!(
            "workers = 1\n{}\n[rules.probe]\nkey = \"global\"\ncost = 0\nwindows = [\"{limit}/hour\"]\n\
             [[routes]]\npath = \"/probe\"\nupstream = \"u\"\nrules = [\"probe\"]\n",
            one_rule(&format!("key = \"ip\"\nwindows = [\"{limit}/hour\"]"))
        )
    };
    let mut gateway = Gateway::start(&toml(100));
    let mut client = gateway.client();
    for _ in 0..40 {
        client.get("/a").expect(200);
    }
    for (limit, available) in [(30, 0), (40, 0), (42, 2), (100, 58)] {
        gateway.reload(&toml(limit));
        eventually("the new limit applies", || items(&client.get("/probe"), "ratelimit-policy")[0].get("q") == limit);
        for n in 0..available {
            assert_eq!(remaining(&client.get("/a").expect(200), "r"), available - n - 1);
        }
        assert_eq!(remaining(&client.get("/a").expect(429), "r"), 0);
    }
}

#[test]
fn reloads_under_load_neither_lose_nor_return_tokens() {
    let toml = |drain: u32| {
        let rule = one_rule("key = \"ip\"\nwindows = [\"2000/hour\"]");
        format!("workers = 4\n{rule}\n[timeouts]\ndrain = \"{drain}s\"\n")
    };
    let mut gateway = Gateway::start(&toml(1));
    let address = gateway.http;
    let admitted = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(move || {
                    let mut client = Client::connect(address);
                    (0..500).filter(|_| client.get("/a").status == 200).count()
                })
            })
            .collect();
        for n in 2..40 {
            gateway.reload(&toml(n));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
    });
    assert_eq!(admitted, 2000);
}

/// Reloads under load, at times whose segments are counted together: each interval of an hour admits exactly the limit.
#[test]
fn reloads_under_load_keep_the_usage_of_a_sliding_window() {
    let toml = |drain: u32| {
        let rule = one_rule("key = \"ip\"\nwindows = [{ limit = 2000, period = \"1h\", sliding = true }]");
        format!("workers = 4\n{rule}\n[timeouts]\ndrain = \"{drain}s\"\n")
    };
    let mut gateway = Gateway::start(&toml(1));
    let (mut drains, mut now) = (2.., 0);
    // After 68 minutes the first 1200 tokens are back: each counts for an hour, and at most an eighth longer.
    for (minute, admitted) in [(0, 1200), (20, 800), (40, 0), (68, 1200), (75, 0)] {
        gateway.advance_s(60 * (minute - now));
        now = minute;
        let address = gateway.http;
        let load = thread::scope(|scope| {
            let send = || {
                let mut client = Client::connect(address);
                (0..150).filter(|_| client.get("/a").status == 200).count()
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(send)).collect();
            for drain in drains.by_ref().take(10) {
                gateway.reload(&toml(drain));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!(load, admitted, "minute {minute}");
    }
}
