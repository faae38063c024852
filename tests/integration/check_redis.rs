//! `transom check --connect`: the report on the servers that hold shared counters.

use crate::support::Scratch;
use crate::support::process::run;
use crate::support::redis::{RedisServer, free_port};
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::{MASTER, Sentinels};
use crate::support::tls::RevokingCa;

const REST: &str = "\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n[listen]\nhttp = \"127.0.0.1:0\"\n";

/// The output for these settings of `[counters.shared]`, and the exit code.
fn checked_in(scratch: &Scratch, settings: &str) -> (Option<i32>, String) {
    let file = scratch.write("gateway.toml", format!("[counters.shared]\n{settings}\n{REST}"));
    let (code, out, err) = run(&["check", "--connect", "--config", &file.display().to_string()]);
    (code, out + &err)
}

fn checked(settings: &str) -> (Option<i32>, String) {
    checked_in(&Scratch::new(), settings)
}

fn fine(settings: &str) -> String {
    let (code, said) = checked(settings);
    assert!(code == Some(0) && said.contains("counters can be shared there"), "{said}");
    said
}

/// Not fit: each of these is said.
#[track_caller]
fn unfit((code, said): (Option<i32>, String), words: &[&str]) {
    assert_eq!(code, Some(1), "{said}");
    for word in words {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(!said.contains("counters can be shared there") && !said.contains("sesame"), "{said}");
}

fn redis(server: &RedisServer) -> String {
    format!("redis = \"{}\"", server.url())
}

/// The same in a database.
fn in_database(settings: &str, database: u32) -> String {
    format!("{settings}\ndatabase = {database}")
}

/// A server's URL with a login.
fn as_user(server: &RedisServer, login: &str) -> String {
    redis(server).replace("://", &format!("://{login}@"))
}

#[test]
fn a_usable_server_is_reported_and_left_unchanged() {
    let server = RedisServer::start();
    let said = fine(&redis(&server));
    assert!(said.contains(&format!("127.0.0.1:{}: Redis ", server.port)) && said.contains(", master without replicas"));
    assert!(!said.contains("problem"), "{said}");
    assert!(server.keys().iter().all(|key| key.starts_with("transom:{transom-check|}:")));
    for key in server.keys() {
        assert!(server.integer(&["PTTL", &key]) <= 20_000);
    }
    fine(&format!("redis = \"redis+unix://{}\"\nprefix = \"edge\"", server.socket().display()));
    let (code, out, _) =
        run(&["check", "--connect", "--config", &Scratch::new().write("g.toml", REST).display().to_string()]);
    assert!(code == Some(0) && out.contains("there is no `[counters.shared]`"), "{out}");
}

#[test]
fn a_bad_configuration_is_reported_before_any_connection() {
    let (code, said) = checked("redis = \"127.0.0.1\"");
    assert!(code == Some(2) && said.contains("is not a server URL"), "{said}");
}

#[test]
fn unreachable_and_refusing_servers_are_reported_with_the_fix() {
    unfit(checked(&format!("redis = \"redis://127.0.0.1:{}\"", free_port())), &["refused", "check that it runs"]);
    let server = RedisServer::with_config("requirepass sesame");
    unfit(checked(&redis(&server)), &["NOAUTH", "password_file"]);
    unfit(checked(&as_user(&server, "eve:sesame")), &["does not accept the user and password"]);
    unfit(checked(&in_database(&as_user(&server, ":sesame"), 99)), &["`databases`"]);
    fine(&as_user(&server, ":sesame"));
    let scratch = Scratch::new();
    scratch.write("redis.password", "sesame\n");
    let (code, said) = checked_in(&scratch, &format!("{}\npassword_file = \"redis.password\"", redis(&server)));
    assert_eq!(code, Some(0), "{said}");
    unfit(checked("redis = \"redis+unix:///nowhere/redis.sock\""), &["No such file", "`unixsocket`"]);
    server.suspend();
    unfit(checked(&as_user(&server, ":sesame")), &["no reply", "check the address"]);
    server.resume();
}

#[test]
fn the_documented_acl_rights_suffice() {
    let server = RedisServer::start();
    assert_eq!(
        server.cli(&["ACL", "SETUSER", "edge", "on", ">sesame", "~else:*", "+ping", "+eval", "+evalsha", "+time"]),
        "OK"
    );
    let (code, said) = checked(&as_user(&server, "edge:sesame"));
    let rights = said.split("ACL SETUSER NAME on >PASSWORD ").nth(1).and_then(|rest| rest.split('`').next());
    let rights = rights.unwrap_or_else(|| panic!("{said}")).to_owned();
    unfit((code, said), &["NOPERM", "+info"]);
    let line: Vec<&str> =
        ["ACL", "SETUSER", "edge", "reset", "on", ">sesame"].into_iter().chain(rights.split(' ')).collect();
    assert_eq!(server.cli(&line), "OK");
    let said = fine(&in_database(&as_user(&server, "edge:sesame"), 3));
    assert!(said.contains(", master"), "{said}");
    // Each of the commands that a script runs is needed.
    let commands =
        ["-get", "-mget", "-exists", "-set", "-del", "-hset", "-hmget", "-pexpireat", "-time", "-decrby", "-evalsha"];
    for command in commands {
        server.cli(&line);
        assert_eq!(server.cli(&["ACL", "SETUSER", "edge", command]), "OK");
        unfit(checked(&as_user(&server, "edge:sesame")), &["ACL SETUSER"]);
    }
}

#[test]
fn weak_secrets_are_reported() {
    let server = RedisServer::start();
    let scratch = Scratch::new();
    scratch.write("digest.key", "0123456789abcdef0123456789abcdef");
    let rules = |shared: &str| {
        let rule = |name: &str, key: &str| {
            format!("[rules.{name}]\nkey = \"{key}\"\non_missing_key = \"skip\"\nwindows = [\"9/hour\"]\n{shared}\n")
        };
        rule("who", "cookie:who") + &rule("user", "header:x-user")
    };
    for (settings, rules, told) in [
        ("", rules(""), true),
        ("digest_key_file = \"digest.key\"", rules(""), false),
        ("", rules("shared = \"off\""), false),
    ] {
        let (code, said) = checked_in(&scratch, &format!("{}\n{settings}\n{rules}", redis(&server)));
        assert!(code == Some(0) && said.contains("`digest_key_file`") == told, "{said}");
        assert!(!told || said.contains("note: keys of `who` are secrets"), "{said}");
    }
}

#[test]
fn an_evicting_server_is_unfit() {
    for (policy, fit) in
        [("noeviction", true), ("volatile-ttl", false), ("allkeys-lru", false), ("volatile-lru", false)]
    {
        let server = RedisServer::with_config(&format!("maxmemory 100mb\nmaxmemory-policy {policy}"));
        match fit {
            true => drop(fine(&redis(&server))),
            false => unfit(checked(&redis(&server)), &[policy, "CONFIG SET maxmemory-policy noeviction"]),
        }
    }
    let full = RedisServer::with_config("maxmemory 1mb");
    unfit(checked(&redis(&full)), &["OOM", "raise `maxmemory`"]);
}

#[test]
fn a_replica_is_reported_with_its_master() {
    let master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    unfit(checked(&redis(&replica)), &["it is a replica", &format!("name `127.0.0.1:{}`", master.port)]);
    assert!(fine(&redis(&master)).contains("master with 1 replica"));
}

#[test]
fn a_wrong_clock_is_reported() {
    let said = fine(&redis(&RedisServer::with_clock_offset(-3600, "")));
    assert!(said.contains("warning: its clock is 3") && said.contains(" s behind this machine's"), "{said}");
    assert!(!fine(&redis(&RedisServer::start())).contains("clock"));
}

#[test]
fn tls_failures_are_reported_with_their_cause() {
    let (authority, other) = (RevokingCa::new(), RevokingCa::new());
    let server = RedisServer::with_tls(&authority, "");
    let scratch = Scratch::new();
    scratch.write("ca.pem", &authority.pem);
    scratch.write("other.pem", &other.pem);
    let own = authority.issue(&["gateway"]);
    scratch.write("own.pem", &own.pem);
    scratch.write("own.key", &own.key_pem);
    let at = |settings: &str| checked_in(&scratch, &format!("{}\n{settings}", redis(&server)));
    let (code, said) = at("ca = \"ca.pem\"");
    assert_eq!(code, Some(0), "{said}");
    unfit(at("ca = \"other.pem\""), &["invalid peer certificate", "ca = \"FILE\""]);
    unfit(checked(&redis(&server).replace("rediss", "redis")), &["write `rediss://`"]);
    let plain = RedisServer::start();
    let settings = format!("{}\nca = \"ca.pem\"", redis(&plain).replace("redis://", "rediss://"));
    unfit(checked_in(&scratch, &settings), &["write `redis://`"]);

    let strict = RedisServer::with_tls(&authority, "tls-auth-clients yes");
    let at = |settings: &str| checked_in(&scratch, &format!("{}\nca = \"ca.pem\"\n{settings}", redis(&strict)));
    unfit(at(""), &["`certificate` and `private_key`"]);
    let (code, said) = at("certificate = \"own.pem\"\nprivate_key = \"own.key\"");
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn sentinels_name_the_master() {
    let master = RedisServer::start();
    let named =
        |sentinels: &Sentinels, name: &str| format!("redis = {}\nsentinel_master = \"{name}\"", sentinels.urls());
    unfit(checked(&format!("{}\nsentinel_master = \"main\"", redis(&master))), &["it is not a sentinel"]);
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let said = fine(&named(&sentinels, MASTER));
    assert!(said.contains(&format!("master 127.0.0.1:{}: Redis", master.port)), "{said}");
    assert_eq!(said.matches("sentinel 127.0.0.1:").count(), 3, "{said}");
    assert!(said.contains("min-replicas-to-write"), "{said}");
    unfit(checked(&named(&sentinels, "other")), &["it does not know a master called `other`", "sentinel_master"]);
    drop(replica);
}

#[test]
fn every_master_and_slot_of_a_cluster_is_checked() {
    let mut cluster = RedisCluster::start();
    let said = fine(&format!("redis = {}", cluster.urls()));
    assert_eq!(said.lines().filter(|line| line.starts_with("127.0.0.1:")).count(), 3, "{said}");
    unfit(checked(&redis(&cluster.nodes[0])), &["it is a node of a cluster", "in brackets"]);
    let single = RedisServer::start();
    unfit(checked(&format!("redis = [\"{}\"]", single.url())), &["it is not a node of a cluster", "without brackets"]);
    cluster.nodes[1].kill();
    let settings = format!("redis = {}", cluster.urls());
    crate::support::eventually("the others notice", || {
        let (code, said) = checked(&settings);
        code == Some(1) && said.contains("of 16384 slots are served")
    });
}
