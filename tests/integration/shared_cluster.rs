//! Gateways that share counters through a Redis Cluster of three masters: across slots, while a slot moves, and while a node is
//! dead.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis_cluster::RedisCluster;
use crate::support::test_ca::TestCa;
use crate::support::{TempDir, eventually};

fn config(cluster: &RedisCluster, mode: &str, rules: &str) -> String {
    shared_config(&cluster.urls(), &format!("mode = \"{mode}\"\n{LONG_TIMEOUT}"), rules)
}

fn counter(cluster: &RedisCluster, part: &str) -> String {
    cluster.keys().into_iter().find(|key| key.contains(part)).unwrap_or_else(|| panic!("no {part}"))
}

/// A rule by client and a global one, whose counters are in different slots.
const RULES: &str = "[rules.r]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = [\"20/30d\"]\n\
                     [rules.all]\nkey = \"global\"\nwindows = [\"50/30d\"]\n";

#[test]
fn counters_of_one_request_may_be_in_different_slots() {
    let cluster = RedisCluster::start();
    for (mode, prefix) in [("exact", "a"), ("lease", "b")] {
        let gateways = GatewayGroup::start(
            2,
            &config(&cluster, mode, RULES).replace("[upstreams", &format!("prefix = \"{prefix}\"\n[upstreams")),
        );
        let admitted_in_all: usize =
            (0..4).map(|client| gateways.count_admitted(&format!("client-{client}"), 15)).sum();
        let least = if mode == "exact" { 50 } else { 45 };
        assert!((least..=50).contains(&admitted_in_all), "{mode}: {admitted_in_all}");
        let key = counter(&cluster, &format!("{prefix}:{{all|}}"));
        assert_eq!(cluster.cli(&key, &["GET", &key]), "50", "{mode}");
    }
}

/// The certificates are for a name, and the nodes announce addresses.
#[test]
fn a_cluster_with_tls_that_announces_addresses_is_used_by_its_server_name() {
    let (authority, scratch) = (TestCa::new(), TempDir::new());
    let cluster = RedisCluster::with_tls_for(&["redis.internal"], &authority);
    let ca = scratch.write("ca.pem", &authority.pem);
    for mode in ["exact", "lease"] {
        let toml = |server_name: &str| {
            let tls = format!("prefix = \"{mode}\"\nca = \"{}\"\nserver_name = \"{server_name}\"", ca.display());
            config(&cluster, mode, RULES).replacen("\n[upstreams", &format!("\n{tls}\n[upstreams"), 1)
        };
        let gateways = GatewayGroup::start(2, &toml("redis.internal"));
        let admitted: usize = (0..4).map(|client| gateways.count_admitted(&format!("client-{client}"), 15)).sum();
        let least = if mode == "exact" { 50 } else { 45 };
        assert!((least..=50).contains(&admitted), "{mode}: {admitted}");
        let key = counter(&cluster, &format!("{mode}:{{all|}}"));
        assert_eq!(cluster.cli(&key, &["GET", &key]), "50", "{mode}");
        let gateway = Process::spawn(&toml("other.internal"));
        assert_eq!(gateway.client().get_with("/a", &[("X-Key", "a")]).status, 503, "{mode}");
        let log = gateway.wait_for_stderr("shared counters cannot be reached");
        assert!(log.contains("not valid for name") && log.contains("; write `server_name = "), "{mode}: {log}");
    }
}

#[test]
fn a_slot_migration_under_load_grants_no_extra_tokens() {
    let cluster = RedisCluster::start();
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(2, &config(&cluster, mode, &rule_by_key("[\"4000/30d\"]", "")));
        let mut admitted_in_all = count_admitted_by(&gateways.0[0], mode, 1);
        let slot = cluster.slot(&counter(&cluster, &format!("{{r|{mode}}}")));
        let (moved, admitted_by_clients) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let clients: Vec<_> = gateways
                .0
                .iter()
                .map(|gateway| {
                    scope.spawn(|| {
                        while !moved.load(Ordering::Relaxed) {
                            let admitted = count_admitted_by(gateway, mode, 20);
                            admitted_by_clients.fetch_add(admitted, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let from = cluster.owner(slot);
            for step in 1..4 {
                cluster.move_slot(slot, (from + step) % 3);
                let before = admitted_by_clients.load(Ordering::Relaxed);
                eventually("requests are admitted after the move", || {
                    admitted_by_clients.load(Ordering::Relaxed) >= before + 200
                });
            }
            moved.store(true, Ordering::Relaxed);
            clients.into_iter().for_each(|client| client.join().unwrap());
        });
        admitted_in_all += admitted_by_clients.into_inner();
        admitted_in_all += gateways.count_admitted(mode, 1100);
        let key = counter(&cluster, &format!("{{r|{mode}}}"));
        let counted: usize = cluster.cli(&key, &["GET", &key]).parse().unwrap();
        assert!(
            admitted_in_all <= counted && counted <= 4000 && admitted_in_all >= 3960,
            "{mode}: {admitted_in_all} admitted, {counted} counted"
        );
    }
}

/// The global rule refuses with 503 what its own node does not count in time. So the test fails if the rule notices the other
/// node. With `local`, a late reply of its own node would count as an outage, in which each gateway admits what the last usage
/// that it knows leaves: up to `(n - 1) * (L - C)` beyond the limit, see `docs/explanation/shared-counters.md`.
#[test]
fn a_dead_node_affects_only_its_rules() {
    for mode in ["exact", "lease"] {
        let mut cluster = RedisCluster::start();
        // Longer than a connection may be silent; a busy machine does not delay replies as long.
        let settings = format!("mode = \"{mode}\"\non_outage = \"local\"\ntimeout = \"2s\"\n");
        let rules = format!("{RULES}on_outage = \"refuse\"\n");
        let gateways =
            GatewayGroup::start(2, &format!("workers = 1\n{}", shared_config(&cluster.urls(), &settings, &rules)));
        let mut admitted = gateways.count_admitted("anyone", 1);
        let dead = cluster.owner(cluster.slot(&counter(&cluster, "{all|}"))) + 1;
        let on_dead = |key: &String| cluster.owner(cluster.slot(&format!("transom:{{r|{key}}}:1"))) == dead % 3;
        let keys: Vec<String> = (0..100).map(|key| format!("client-{key}")).filter(on_dead).take(4).collect();
        cluster.nodes[dead % 3].kill();
        for (gateway, key) in gateways.0.iter().zip(&keys) {
            admitted += count_admitted_by(gateway, key, 1);
            // The request is counted locally. Each attempt to report it is a failure.
            eventually("the node is known to be unreachable", || {
                gateway.metrics().sum("transom_shared_servers_unreachable", &[]) > 0
            });
        }
        let key = counter(&cluster, "{all|}");
        let counted = || cluster.cli(&key, &["GET", &key]).parse::<usize>().unwrap();
        // Unspent tokens are returned.
        eventually("the global rule has counted the admitted requests", || counted() == admitted);
        admitted += keys[2..].iter().map(|key| gateways.count_admitted(key, 15)).sum::<usize>();
        assert!((45..=50).contains(&admitted) && counted() <= 50, "{mode}: {admitted} admitted, {} counted", counted());
    }
}

#[test]
fn a_dead_node_leaves_other_slots_working() {
    let mut cluster = RedisCluster::start();
    let toml =
        config(&cluster, "lease", &rule_by_key("[\"5/30d\"]", "")).replace("timeout = \"10s\"", "timeout = \"500ms\"");
    let gateways = GatewayGroup::start(1, &toml);
    let gateway = &gateways.0[0];
    let keys: Vec<String> = (0..12).map(|key| format!("client-{key}")).collect();
    let owners: Vec<usize> =
        keys.iter().map(|key| cluster.owner(cluster.slot(&format!("transom:{{r|{key}}}:1")))).collect();
    assert_eq!(gateways.count_admitted(&keys[0], 5), 5);
    let dead = owners[0];
    cluster.nodes[dead].kill();
    for (key, _) in keys.iter().zip(&owners).filter(|(_, owner)| **owner != dead) {
        let mut client = gateway.client();
        // Until the node is known to be dead, other requests may have to wait as well.
        eventually("other keys are counted", || client.get_with("/a", &[("X-Key", key)]).status == 200);
        let rest = (0..10).filter(|_| client.get_with("/a", &[("X-Key", key)]).status == 200).count();
        assert_eq!(rest, 4, "{key}");
    }
    let unknown = keys.iter().zip(&owners).skip(1).find(|(_, owner)| **owner == dead).map(|(key, _)| key);
    let unknown = unknown.expect("twelve keys lie on all three nodes");
    assert_eq!(gateway.client().get_with("/a", &[("X-Key", unknown)]).status, 503);
    cluster.nodes[dead].restart();
    cluster.wait_until_complete();
    eventually("the key is counted again", || gateway.client().get_with("/a", &[("X-Key", unknown)]).status == 200);
}

/// The shards are on several nodes. Reachable shards take over the tokens of an unreachable one.
#[test]
fn usage_of_a_sharded_counter_during_an_outage_is_reported() {
    let mut cluster = RedisCluster::start();
    let rules = rule_by_key("[{ limit = 3000, period = \"30d\", shards = 3 }]", "");
    let toml = format!("workers = 1\n{}", shared_config(&cluster.urls(), "on_outage = \"local\"\n", &rules));
    // A gateway starts at a random shard; this test needs one whose first shard is not the base counter.
    let (gateways, shard_name) = (0..)
        .find_map(|attempt| {
            let gateways = GatewayGroup::start(1, &toml);
            assert_eq!(gateways.count_admitted(&format!("user-{attempt}"), 1), 2);
            let shard_name = ["|#1", "|#2"].into_iter().find(|shard_name| {
                cluster.keys().iter().any(|name| name.contains(&format!("user-{attempt}{shard_name}}}")))
            })?;
            Some((gateways, shard_name))
        })
        .unwrap();
    // No other shard may be on the node of this shard.
    let single_shard = |key: String| {
        let owner = |shard: &str| cluster.owner(cluster.slot(&format!("transom:{{r|{key}{shard}}}")));
        let node = owner(shard_name);
        let is_single = ["", "|#1", "|#2"].into_iter().filter(|shard| owner(shard) == node).count() == 1;
        is_single.then_some((node, key))
    };
    let (dead, key) = (0..100).find_map(|key| single_shard(format!("client-{key}"))).unwrap();
    cluster.nodes[dead].kill();
    assert_eq!(gateways.count_admitted(&key, 10), 20, "two clients");
    let counted = || -> i64 {
        let keys = cluster.keys().into_iter().filter(|name| name.contains(&key));
        keys.map(|name| cluster.cli(&name, &["GET", &name]).parse::<i64>().unwrap()).sum()
    };
    // Unspent tokens are returned.
    eventually("all are counted on the reachable nodes", || counted() == 20);
    let reported = [("outcome", "reported")];
    assert!(gateways.0[0].metrics().sum("transom_shared_tokens_total", &reported) > 0, "no local usage was reported");
}
