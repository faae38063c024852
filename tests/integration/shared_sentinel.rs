//! Gateways that find Redis through Sentinels: when the master dies and the replica is promoted, counting continues.

use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis::RedisServer;
use crate::support::sentinel::{MASTER, Sentinels};
use crate::support::{TempDir, eventually};

#[test]
fn counting_continues_on_the_promoted_replica() {
    let mut master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let settings =
        format!("sentinel_master = \"{MASTER}\"\nmode = \"exact\"\non_outage = \"refuse\"\ntimeout = \"500ms\"");
    let gateways =
        GatewayGroup::start(2, &shared_config(&sentinels.urls(), &settings, &rule_by_key("[\"10/30d\"]", "")));
    assert_eq!(gateways.0.iter().map(|gateway| count_admitted_by(gateway, "alice", 3)).sum::<usize>(), 6);
    let counted =
        || replica.keys().iter().find(|key| key.contains("alice")).map_or(0, |key| replica.integer(&["GET", key]));
    eventually("the replica has the count", || counted() == 6);
    master.kill();
    let status = |gateway: usize| gateways.0[gateway].client().get_with("/a", &[("X-Key", "alice")]).status;
    assert_eq!(status(0), 503);
    sentinels.wait_for_failover(&replica);
    let mut more = 0;
    for gateway in [0, 1] {
        eventually("counting continues", || {
            let response = status(gateway);
            more += i64::from(response == 200);
            response == 200
        });
    }
    // Still one limit, with the earlier usage.
    let rest = gateways.0.iter().map(|gateway| count_admitted_by(gateway, "alice", 5) as i64).sum::<i64>();
    assert_eq!((more + rest, counted()), (4, 10));
}

/// `SENTINEL FAILOVER` promotes a replica while the master is healthy, and the master accepts writes for some seconds more.
/// Usage counted there after the promotion would be lost; with `min-replicas-to-write` it refuses writes as soon as its
/// replica has left.
#[test]
fn a_demoted_master_with_min_replicas_stops_counting() {
    const LIMIT: usize = 60;
    let master = RedisServer::with_config("min-replicas-to-write 1");
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let settings = format!("sentinel_master = \"{MASTER}\"\nmode = \"exact\"\non_outage = \"refuse\"");
    let toml =
        shared_config(&sentinels.urls(), &format!("{settings}\ntimeout = \"500ms\""), &rule_by_key("[\"60/30d\"]", ""));
    let gateways = GatewayGroup::start(2, &toml);
    assert_eq!(gateways.0.iter().map(|gateway| count_admitted_by(gateway, "alice", 10)).sum::<usize>(), 20);
    let counted = || {
        let key = replica.keys().into_iter().find(|key| key.contains("alice"));
        key.map_or(0, |key| replica.integer(&["GET", &key]) as usize)
    };
    eventually("the replica has all counts", || counted() == 20);
    sentinels.fail_over();
    eventually("the replica is promoted", || replica.cli(&["ROLE"]).starts_with("master"));
    eventually("the replica has left the master", || {
        master.cli(&["INFO", "replication"]).contains("connected_slaves:0")
    });
    // The gateways take turns, so each counts usage that the other does not know.
    let (mut admitted, mut attempt) = (20, 0);
    eventually("the limit is used up", || {
        let status = gateways.0[attempt % 2].client().get_with("/a", &[("X-Key", "alice")]).status;
        assert!([200, 429, 503].contains(&status), "{status}");
        admitted += usize::from(status == 200);
        attempt += 1;
        assert!(admitted <= LIMIT && counted() >= admitted, "{admitted}");
        status == 429
    });
    assert_eq!((admitted, counted()), (LIMIT, LIMIT));
}

/// The servers and the sentinel each have a login of their own.
#[test]
fn sentinels_with_a_login_of_their_own_name_the_master() {
    let master = RedisServer::with_config("requirepass of-servers");
    let (sentinels, scratch) = (Sentinels::start_one(&master, "of-sentinels"), TempDir::new());
    let servers = scratch.write("servers", "of-servers\n").display().to_string();
    let own = scratch.write("sentinels", "of-sentinels\n").display().to_string();
    let toml = |mode: &str, login: &str| {
        let settings = format!(
            "sentinel_master = \"{MASTER}\"\nprefix = \"{mode}\"\npassword_file = \"{servers}\"\nmode = \"{mode}\"\n{LONG_TIMEOUT}{login}"
        );
        shared_config(&sentinels.urls(), &settings, &rule_by_key("[\"30/30d\"]", ""))
    };
    let login = format!("sentinel_username = \"default\"\nsentinel_password_file = \"{own}\"");
    for mode in ["exact", "lease"] {
        let gateways = GatewayGroup::start(2, &toml(mode, &login));
        let admitted = gateways.count_admitted("alice", 10);
        let least = if mode == "exact" { 30 } else { 27 };
        assert!((least..=30).contains(&admitted), "{mode}: {admitted}");
        let key = master.keys().into_iter().find(|key| key.starts_with(&format!("{mode}:")) && key.contains("alice"));
        assert_eq!(master.integer(&["GET", &key.unwrap()]), 30, "{mode}");
    }
    for login in [String::new(), format!("sentinel_password_file = \"{servers}\"")] {
        let gateway = Process::spawn(&toml("exact", &login));
        assert_eq!(gateway.client().get_with("/a", &[("X-Key", "bob")]).status, 503, "{login}");
        let log = gateway.wait_for_stderr("shared counters cannot be reached");
        assert!(log.contains("; write the login of the sentinels: `sentinel_password_file`"), "{login}: {log}");
    }
}
