//! Counters under the names of another service (`key_format`): both count in the same Redis keys.

use serde_json::json;

use crate::support::eventually_eq;
use crate::support::gateway_group::{LONG_TIMEOUT, count_admitted_by, query_decision, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis::RedisServer;
use crate::support::redis_cluster::RedisCluster;

const PERIOD_MS: i64 = 30 * 86_400_000;

fn config(redis: &str, mode: &str, format: &str) -> String {
    let rules = rule_by_key("[\"10/30d\"]", &format!("key_format = \"{format}\""));
    shared_config(redis, &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), &rules)
}

/// The number of the open window of 30 days, by the clock of Redis.
fn window(redis: &RedisServer) -> i64 {
    redis.integer(&["EVAL", "return redis.call('TIME')[1] * 1000", "0"]) / PERIOD_MS
}

#[test]
fn another_service_counts_under_its_own_names() {
    let redis = RedisServer::start();
    let window = window(&redis);
    for (mode, format) in [
        ("exact", "rlaas:rate_limit:{key}:{window}"),
        ("lease", "rlaas:rate_limit:{key}:{window}"),
        ("exact", "{window}/of/{key}/x"),
        ("lease", "w{window}-{{{key}}}"),
    ] {
        redis.cli(&["FLUSHALL"]);
        let gateway = Process::spawn(&config(&format!("\"{}\"", redis.url()), mode, format));
        let name = |key: &str| {
            let name = format.replace("{key}", key).replace("{window}", &window.to_string());
            name.replace("{{", "{").replace("}}", "}")
        };
        // The other service has counted first.
        let alice = name("alice");
        (0..7).for_each(|_| drop(redis.cli(&["INCR", &alice])));
        assert_eq!((count_admitted_by(&gateway, "alice", 9), redis.integer(&["GET", &alice])), (3, 10), "{mode}");
        // The other service has set no expiry.
        assert_eq!(redis.integer(&["PEXPIRETIME", &alice]), (window + 1) * PERIOD_MS);
        // The gateway has counted first, with a key that the default names would encode.
        let bob = name("auth0|bob_1@example.com:x");
        assert_eq!(count_admitted_by(&gateway, "auth0|bob_1@example.com:x", 1), 1);
        assert!(redis.integer(&["GET", &bob]) >= 1);
        // Unused tokens come back to the same name.
        eventually_eq(|| redis.integer(&["GET", &bob]), 1);
        (0..9).for_each(|_| drop(redis.cli(&["INCR", &bob])));
        let query = json!({ "rule": "r", "key": "auth0|bob_1@example.com:x" });
        assert_eq!(query_decision(&gateway, "value", &query)["count"], 10);
        assert_eq!(count_admitted_by(&gateway, "auth0|bob_1@example.com:x", 1), 0);
        query_decision(&gateway, "reset", &query);
        // The gateway may lease a token after the reset, to see whether an exhausted window has tokens again, and returns it.
        let tokens = "return tonumber(redis.call('GET', KEYS[1]) or '0')";
        eventually_eq(|| redis.integer(&["EVAL", tokens, "1", &bob]), 0);
        assert_eq!(count_admitted_by(&gateway, "50% {a}", 1), 1);
        let odd = name("50%25%20%7Ba%7D");
        let names = redis.keys();
        assert!(names.contains(&odd), "{names:?}");
        assert!(names.iter().all(|name| !name.starts_with("transom:") || name.contains("{#")), "{names:?}");
    }
}

#[test]
fn names_with_a_hash_tag_are_counted_in_a_cluster() {
    let cluster = RedisCluster::start();
    for mode in ["exact", "lease"] {
        let gateway = Process::spawn(&config(&cluster.urls(), mode, &format!("{mode}:{{{{{{key}}}}}}:{{window}}")));
        let clients: Vec<String> = (0..8).map(|client| format!("client-{client}")).collect();
        for client in &clients {
            assert_eq!(count_admitted_by(&gateway, client, 2), 2);
        }
        for client in &clients {
            let start = format!("{mode}:{{{client}}}:");
            let name = cluster.keys().into_iter().find(|name| name.starts_with(&start)).unwrap();
            (0..7).for_each(|_| drop(cluster.cli(&name, &["INCR", &name])));
            assert_eq!(count_admitted_by(&gateway, client, 9), 1, "{mode}");
            assert_eq!(cluster.cli(&name, &["GET", &name]), "10", "{mode}");
        }
    }
}
