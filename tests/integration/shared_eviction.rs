//! A Redis that evicts keys when its memory is full: the gateway warns while it runs, also without the right to read the
//! configuration of the server.

use transom_store::diagnose::COMMANDS;

use crate::support::eventually;
use crate::support::gateway_group::{LONG_TIMEOUT, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis::RedisServer;

fn evicting_servers(gateway: &Process) -> u64 {
    gateway.metrics().sum("transom_shared_servers_evicting", &[])
}

#[test]
fn an_evicting_server_is_warned_of_on_each_new_connection() {
    let redis = RedisServer::with_config(&format!(
        "maxmemory 100mb\nmaxmemory-policy allkeys-lru\nuser gateway on >sesame ~transom:* {COMMANDS}"
    ));
    let url = redis.url().replace("://", "://gateway:sesame@");
    let toml = shared_config(&format!("\"{url}\""), LONG_TIMEOUT, &rule_by_key("[\"1000/30d\"]", ""));
    let gateway = Process::spawn(&format!("workers = 1\n{toml}"));
    gateway.wait_for_stderr("`maxmemory-policy` is `allkeys-lru`");
    eventually("the gauge is above 0", || evicting_servers(&gateway) > 0);

    // The next request reopens the connections of the worker.
    let reconnected = |policy: &str| {
        redis.cli(&["CONFIG", "SET", "maxmemory-policy", policy]);
        redis.cli(&["CLIENT", "KILL", "USER", "gateway"]);
        assert_eq!(gateway.client().get_with("/a", &[("X-Key", policy)]).status, 200);
    };
    reconnected("volatile-ttl");
    gateway.wait_for_stderr("`maxmemory-policy` is `volatile-ttl`");
    reconnected("noeviction");
    eventually("the gauge is back at 0", || evicting_servers(&gateway) == 0);
    assert!(!gateway.stderr().contains("is `noeviction`"));
}

#[test]
fn a_server_without_a_memory_limit_evicts_nothing() {
    let redis = RedisServer::with_config("maxmemory-policy allkeys-lru");
    let gateway = Process::spawn(&shared_config(
        &format!("\"{}\"", redis.url()),
        LONG_TIMEOUT,
        &rule_by_key("[\"1000/30d\"]", ""),
    ));
    eventually("the gateway reads the memory settings", || redis.call_count("info") > 0);
    assert_eq!(gateway.client().get_with("/a", &[("X-Key", "alice")]).status, 200);
    assert!(!gateway.stderr().contains("maxmemory-policy"), "{}", gateway.stderr());
    assert_eq!(evicting_servers(&gateway), 0);
}
