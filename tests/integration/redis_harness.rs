//! The Redis servers of the harness behave as the tests of shared counters assume.

use std::net::TcpStream;

use crate::support::eventually;
use crate::support::load_checker::now_ms;
use crate::support::redis::RedisServer;
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::Sentinels;
use crate::support::test_ca::TestCa;
use crate::support::tls::TlsClient;

#[test]
fn a_server_that_hangs_is_killed_and_restarted_is_used_again() {
    let mut redis = RedisServer::with_config("requirepass sesame\nmaxmemory 50mb");
    assert_eq!(redis.cli(&["SET", "a", "7"]), "OK");
    assert_eq!((redis.integer(&["GET", "a"]), redis.integer(&["GET", "b"])), (7, 0));
    assert_eq!((redis.keys(), redis.call_count("get")), (vec!["a".to_owned()], 2));
    redis.suspend();
    let state = || std::fs::read_to_string(format!("/proc/{}/status", redis.pid())).unwrap();
    eventually("the server is stopped", || state().contains("T (stopped)"));
    redis.resume();
    assert_eq!(redis.cli(&["PING"]), "PONG");
    let port = redis.port;
    redis.kill();
    assert!(!redis.is_running() && TcpStream::connect(("127.0.0.1", port)).is_err());
    redis.restart();
    assert_eq!((redis.port, redis.keys()), (port, Vec::new()));
    assert_eq!(redis.cli(&["ACL", "WHOAMI"]), "default");
}

#[test]
fn a_tls_server_with_another_clock_works() {
    let authority = TestCa::new();
    let redis = RedisServer::with_tls(&authority, "");
    let mut client = TlsClient::trusting(&authority).connect(([127, 0, 0, 1], redis.port).into(), "127.0.0.1");
    assert_eq!(client.send("PING\r\n").read_exactly(7), b"+PONG\r\n");
    assert!(redis.url().starts_with("rediss://") && redis.directory().join("server.pem").is_file());

    let redis = RedisServer::with_clock_offset(-3600, "");
    let time_s: u64 = redis.cli(&["TIME"]).lines().next().unwrap().parse().unwrap();
    assert!((now_ms() / 1000).abs_diff(time_s + 3600) < 60, "{time_s}");
}

#[test]
fn a_cluster_can_move_a_slot_and_lose_a_node() {
    let mut cluster = RedisCluster::start();
    let key = "transom:{r|alice}:7";
    let slot = cluster.slot(key);
    assert_eq!(cluster.cli(key, &["SET", key, "5"]), "OK");
    let from = cluster.owner(slot);
    let to = (from + 1) % 3;
    cluster.move_slot(slot, to);
    assert_eq!((cluster.owner(slot), cluster.cli(key, &["GET", key])), (to, "5".to_owned()));
    assert_eq!(cluster.keys(), [key]);
    assert_eq!(cluster.urls().matches("redis://").count(), 3);
    cluster.nodes[from].kill();
    eventually("the other nodes still serve", || cluster.cli(key, &["INCR", key]).parse::<u32>().is_ok());
}

#[test]
fn sentinels_promote_the_replica() {
    let mut master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    assert_eq!((sentinels.master(), sentinels.urls().matches("redis://").count()), (Some(master.port), 3));
    assert_eq!(master.cli(&["SET", "a", "1"]), "OK");
    eventually("the replica has the key", || replica.cli(&["GET", "a"]) == "1");
    master.kill();
    sentinels.wait_for_failover(&replica);
    assert_eq!(replica.cli(&["INCR", "a"]), "2");
}
