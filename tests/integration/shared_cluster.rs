//! Gateways that count together through a Redis Cluster of three masters: one limit wherever its counters lie, while a slot
//! moves, and for the other slots while a node is dead.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::eventually;
use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::redis_cluster::RedisCluster;

fn by(cluster: &RedisCluster, mode: &str, rules: &str) -> String {
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
            &by(&cluster, mode, RULES).replace("[upstreams", &format!("prefix = \"{prefix}\"\n[upstreams")),
        );
        let all: usize = (0..4).map(|client| gateways.count_admitted(&format!("client-{client}"), 15)).sum();
        let least = if mode == "exact" { 50 } else { 45 };
        assert!((least..=50).contains(&all), "{mode}: {all}");
        let key = counter(&cluster, &format!("{prefix}:{{all|}}"));
        assert_eq!(cluster.cli(&key, &["GET", &key]), "50", "{mode}");
    }
}

#[test]
fn a_slot_migration_under_load_grants_no_extra_tokens() {
    let cluster = RedisCluster::start();
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(2, &by(&cluster, mode, &rule_by_key("[\"4000/30d\"]", "")));
        let mut all = count_admitted_by(&gateways.0[0], mode, 1);
        let slot = cluster.slot(&counter(&cluster, &format!("{{r|{mode}}}")));
        let moved = AtomicBool::new(false);
        all += thread::scope(|scope| {
            let clients: Vec<_> = gateways
                .0
                .iter()
                .map(|gateway| {
                    scope.spawn(|| {
                        let mut passed = 0;
                        while !moved.load(Ordering::Relaxed) {
                            passed += count_admitted_by(gateway, mode, 20);
                        }
                        passed
                    })
                })
                .collect();
            let from = cluster.owner(slot);
            for step in 1..4 {
                cluster.move_slot(slot, (from + step) % 3);
            }
            moved.store(true, Ordering::Relaxed);
            clients.into_iter().map(|client| client.join().unwrap()).sum::<usize>()
        });
        all += gateways.count_admitted(mode, 1100);
        let key = counter(&cluster, &format!("{{r|{mode}}}"));
        let counted: usize = cluster.cli(&key, &["GET", &key]).parse().unwrap();
        assert!(all <= counted && counted <= 4000 && all >= 3960, "{mode}: {all} admitted, {counted} counted");
    }
}

#[test]
fn a_dead_node_affects_only_its_rules() {
    for mode in ["exact", "lease"] {
        let mut cluster = RedisCluster::start();
        let toml = shared_config(&cluster.urls(), &format!("mode = \"{mode}\"\non_outage = \"local\"\n"), RULES);
        let gateways = GatewayGroup::start(2, &format!("workers = 1\n{toml}"));
        let mut passed = gateways.count_admitted("someone", 1);
        let dead = cluster.owner(cluster.slot(&counter(&cluster, "{all|}"))) + 1;
        let on_dead = |key: &String| cluster.owner(cluster.slot(&format!("transom:{{r|{key}}}:1"))) == dead % 3;
        let keys: Vec<String> = (0..100).map(|key| format!("client-{key}")).filter(on_dead).take(4).collect();
        cluster.nodes[dead % 3].kill();
        for (gateway, key) in gateways.0.iter().zip(&keys) {
            eventually("the node is known to be away", || {
                passed += count_admitted_by(gateway, key, 1);
                let admin = gateway.admin_get("/metrics").text();
                !admin.contains("transom_shared_servers_unreachable 0\n")
            });
        }
        let key = counter(&cluster, "{all|}");
        let counted = || cluster.cli(&key, &["GET", &key]).parse::<usize>().unwrap();
        // Unspent tokens are returned, and local usage until then is reported.
        eventually("the rule for all has counted those who passed", || counted() == passed);
        passed += keys[2..].iter().map(|key| gateways.count_admitted(key, 15)).sum::<usize>();
        assert!((45..=50).contains(&passed) && counted() <= 50, "{mode}: {passed} passed, {} counted", counted());
    }
}

#[test]
fn a_dead_node_leaves_other_slots_working() {
    let mut cluster = RedisCluster::start();
    let toml =
        by(&cluster, "lease", &rule_by_key("[\"5/30d\"]", "")).replace("timeout = \"10s\"", "timeout = \"500ms\"");
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
        // Until the dead node is known, other requests may have to wait as well.
        eventually("others are counted", || client.get_with("/a", &[("X-Key", key)]).status == 200);
        let rest = (0..10).filter(|_| client.get_with("/a", &[("X-Key", key)]).status == 200).count();
        assert_eq!(rest, 4, "{key}");
    }
    let unknown = keys.iter().zip(&owners).skip(1).find(|(_, owner)| **owner == dead).map(|(key, _)| key);
    let unknown = unknown.expect("twelve keys lie on all three nodes");
    assert_eq!(gateway.client().get_with("/a", &[("X-Key", unknown)]).status, 503);
    cluster.nodes[dead].restart();
    cluster.wait_until_complete();
    eventually("it is counted again", || gateway.client().get_with("/a", &[("X-Key", unknown)]).status == 200);
}

/// Its shards are on several nodes: reachable shards take over the part of an unreachable one.
#[test]
fn usage_of_a_sharded_counter_during_an_outage_is_reported() {
    let mut cluster = RedisCluster::start();
    let rules = rule_by_key("[{ limit = 3000, period = \"30d\", shards = 3 }]", "");
    let toml = format!("workers = 1\n{}", shared_config(&cluster.urls(), "on_outage = \"local\"\n", &rules));
    // A gateway starts at a random shard; here the lost shard is not to be the first.
    let (gateways, own) = (0..)
        .find_map(|attempt| {
            let gateways = GatewayGroup::start(1, &toml);
            assert_eq!(gateways.count_admitted(&format!("someone-{attempt}"), 1), 2);
            let own = ["|#1", "|#2"]
                .into_iter()
                .find(|own| cluster.keys().iter().any(|name| name.contains(&format!("someone-{attempt}{own}}}"))))?;
            Some((gateways, own))
        })
        .unwrap();
    // And no other is to be where that is.
    let lonely = |key: String| {
        let owner = |shard: &str| cluster.owner(cluster.slot(&format!("transom:{{r|{key}{shard}}}")));
        let node = owner(own);
        let is_lonely = ["", "|#1", "|#2"].into_iter().filter(|shard| owner(shard) == node).count() == 1;
        is_lonely.then_some((node, key))
    };
    let (dead, key) = (0..100).find_map(|key| lonely(format!("client-{key}"))).unwrap();
    cluster.nodes[dead].kill();
    assert_eq!(gateways.count_admitted(&key, 10), 20, "two clients");
    let counted = || -> i64 {
        let keys = cluster.keys().into_iter().filter(|name| name.contains(&key));
        keys.map(|name| cluster.cli(&name, &["GET", &name]).parse::<i64>().unwrap()).sum()
    };
    // Unspent tokens are returned.
    eventually("all are counted where somebody is", || counted() == 20);
    let reported = [("outcome", "reported")];
    assert!(gateways.0[0].metrics().sum("transom_shared_tokens_total", &reported) > 0, "none was counted alone");
}
