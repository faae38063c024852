//! `transom check --connect`: the report on the servers that hold shared counters.

use crate::support::TempDir;
use crate::support::process::run;
use crate::support::redis::{RedisServer, free_port};
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::{MASTER, Sentinels};
use crate::support::test_ca::TestCa;

const OTHER_SECTIONS: &str = "\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n[listen]\nhttp = \"127.0.0.1:0\"\n";

/// The exit code and the output of the check for these settings of `[counters.shared]`.
fn check_in(scratch: &TempDir, settings: &str) -> (Option<i32>, String) {
    let file = scratch.write("gateway.toml", format!("[counters.shared]\n{settings}\n{OTHER_SECTIONS}"));
    let (code, out, err) = run(&["check", "--connect", "--config", &file.display().to_string()]);
    (code, out + &err)
}

fn check(settings: &str) -> (Option<i32>, String) {
    check_in(&TempDir::new(), settings)
}

fn expect_usable(settings: &str) -> String {
    let (code, output) = check(settings);
    assert!(code == Some(0) && output.contains("counters can be shared there"), "{output}");
    output
}

/// Expects the report of an unusable server, with each of these texts.
#[track_caller]
fn expect_unusable((code, output): (Option<i32>, String), words: &[&str]) {
    assert_eq!(code, Some(1), "{output}");
    for word in words {
        assert!(output.contains(word), "{word}: {output}");
    }
    assert!(!output.contains("counters can be shared there") && !output.contains("sesame"), "{output}");
}

fn url_of(server: &RedisServer) -> String {
    format!("redis = \"{}\"", server.url())
}

/// The settings with a database.
fn in_database(settings: &str, database: u32) -> String {
    format!("{settings}\ndatabase = {database}")
}

/// A server's URL with a login.
fn as_user(server: &RedisServer, login: &str) -> String {
    url_of(server).replace("://", &format!("://{login}@"))
}

#[test]
fn a_usable_server_is_reported_and_left_unchanged() {
    let server = RedisServer::start();
    let output = expect_usable(&url_of(&server));
    let title = format!("server 127.0.0.1:{}: master, replicas: 0, Redis version: ", server.port);
    assert!(output.contains(&title), "{output}");
    assert!(!output.contains("problem"), "{output}");
    assert!(server.keys().iter().all(|key| key.starts_with("transom:{transom-check|0}:")));
    for key in server.keys() {
        assert!(server.integer(&["PTTL", &key]) <= 20_000);
    }
    expect_usable(&format!("redis = \"redis+unix://{}\"\nprefix = \"edge\"", server.socket().display()));
    let (code, out, _) =
        run(&["check", "--connect", "--config", &TempDir::new().write("g.toml", OTHER_SECTIONS).display().to_string()]);
    assert!(code == Some(0) && out.contains("neither `[counters.shared]` nor `jwks_url`"), "{out}");
}

#[test]
fn a_bad_configuration_is_reported_before_any_connection() {
    let (code, output) = check("redis = \"127.0.0.1\"");
    assert!(code == Some(2) && output.contains("is not a server URL"), "{output}");
}

#[test]
fn unreachable_and_refusing_servers_are_reported_with_the_fix() {
    expect_unusable(
        check(&format!("redis = \"redis://127.0.0.1:{}\"", free_port())),
        &["refused", "check that it runs"],
    );
    let server = RedisServer::with_config("requirepass sesame");
    expect_unusable(check(&url_of(&server)), &["NOAUTH", "password_file"]);
    expect_unusable(check(&as_user(&server, "eve:sesame")), &["does not accept the user and password"]);
    expect_unusable(
        check(&in_database(&as_user(&server, ":sesame"), 99)),
        &["DB index is out of range", "its setting `databases`"],
    );
    expect_usable(&as_user(&server, ":sesame"));
    let scratch = TempDir::new();
    scratch.write("redis.password", "sesame\n");
    let (code, output) = check_in(&scratch, &format!("{}\npassword_file = \"redis.password\"", url_of(&server)));
    assert_eq!(code, Some(0), "{output}");
    expect_unusable(check("redis = \"redis+unix:///nowhere/redis.sock\""), &["No such file", "`unixsocket`"]);
    server.suspend();
    expect_unusable(check(&as_user(&server, ":sesame")), &["no reply", "check the address"]);
    server.resume();
}

/// Counting needs no `INFO`, which administrators rename or deny.
#[test]
fn a_server_without_info_is_usable() {
    for lines in ["rename-command INFO \"\"", "user default on nopass ~* &* +@all -info"] {
        let output = expect_usable(&url_of(&RedisServer::with_config(lines)));
        assert!(output.contains("warning: its version, role and eviction policy are not checked: "), "{output}");
        assert!(output.contains("fix: allow `INFO`"), "{output}");
    }
}

#[test]
fn a_warning_about_a_server_is_an_error_only_with_strict() {
    let server = RedisServer::with_config("rename-command INFO \"\"");
    let file = TempDir::new();
    let file = file.write("gateway.toml", format!("[counters.shared]\n{}\n{OTHER_SECTIONS}", url_of(&server)));
    let file = file.display().to_string();
    let (code, _, err) = run(&["check", "--connect", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let (code, out, err) = run(&["check", "--connect", "--strict", &file]);
    assert!(!out.contains("fine: "), "{out}");
    assert_eq!((code, err), (Some(2), format!("{file}: 1 warning with `--strict`\n")));
    let (code, out, _) = run(&["check", "--connect", "--strict", "--json", &file]);
    assert!(code == Some(2) && out.contains("\"severity\": \"warning\""), "{out}");
}

#[test]
fn the_documented_acl_rights_suffice() {
    let server = RedisServer::start();
    assert_eq!(
        server.cli(&["ACL", "SETUSER", "edge", "on", ">sesame", "~else:*", "+ping", "+eval", "+evalsha", "+time"]),
        "OK"
    );
    let (code, output) = check(&as_user(&server, "edge:sesame"));
    let rights = output.split("ACL SETUSER NAME on >PASSWORD ").nth(1).and_then(|rest| rest.split('`').next());
    let rights = rights.unwrap_or_else(|| panic!("{output}")).to_owned();
    expect_unusable((code, output), &["NOPERM", "+info"]);
    let line: Vec<&str> =
        ["ACL", "SETUSER", "edge", "reset", "on", ">sesame"].into_iter().chain(rights.split(' ')).collect();
    assert_eq!(server.cli(&line), "OK");
    let output = expect_usable(&in_database(&as_user(&server, "edge:sesame"), 3));
    assert!(output.contains(": master, "), "{output}");
    // Each command that a script runs is required.
    let commands =
        ["-get", "-mget", "-exists", "-set", "-del", "-hset", "-hmget", "-pexpireat", "-time", "-decrby", "-evalsha"];
    for command in commands {
        server.cli(&line);
        assert_eq!(server.cli(&["ACL", "SETUSER", "edge", command]), "OK");
        expect_unusable(check(&as_user(&server, "edge:sesame")), &["ACL SETUSER"]);
    }
}

#[test]
fn weak_secrets_are_reported() {
    let server = RedisServer::start();
    let scratch = TempDir::new();
    scratch.write("digest.key", "0123456789abcdef0123456789abcdef");
    let rules = |shared: &str| {
        let rule = |name: &str, key: &str| {
            format!("[rules.{name}]\nkey = \"{key}\"\non_missing_key = \"skip\"\nwindows = [\"9/hour\"]\n{shared}\n")
        };
        rule("who", "cookie:who") + &rule("user", "header:x-user")
    };
    for (settings, rules, warned) in [
        ("", rules(""), true),
        ("digest_key_file = \"digest.key\"", rules(""), false),
        ("", rules("shared = \"off\""), false),
    ] {
        let (code, output) = check_in(&scratch, &format!("{}\n{settings}\n{rules}", url_of(&server)));
        assert!(code == Some(0) && output.contains("`digest_key_file`") == warned, "{output}");
        assert!(!warned || output.contains("warning: keys of `who` are secrets"), "{output}");
    }
}

#[test]
fn an_evicting_server_is_unfit() {
    for (policy, usable) in
        [("noeviction", true), ("volatile-ttl", false), ("allkeys-lru", false), ("volatile-lru", false)]
    {
        let server = RedisServer::with_config(&format!("maxmemory 100mb\nmaxmemory-policy {policy}"));
        match usable {
            true => drop(expect_usable(&url_of(&server))),
            false => expect_unusable(check(&url_of(&server)), &[policy, "CONFIG SET maxmemory-policy noeviction"]),
        }
    }
    let full = RedisServer::with_config("maxmemory 1mb");
    expect_unusable(check(&url_of(&full)), &["OOM", "'maxmemory'"]);
}

#[test]
fn a_replica_is_reported_with_its_master() {
    let master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    expect_unusable(check(&url_of(&replica)), &["it is a replica", &format!("name `127.0.0.1:{}`", master.port)]);
    assert!(expect_usable(&url_of(&master)).contains(": master, replicas: 1"));
}

#[test]
fn a_wrong_clock_is_reported() {
    let output = expect_usable(&url_of(&RedisServer::with_clock_offset(-3600, "")));
    assert!(output.contains("warning: its clock is 3") && output.contains(" s behind this machine's"), "{output}");
    assert!(!expect_usable(&url_of(&RedisServer::start())).contains("clock"));
}

#[test]
fn tls_failures_are_reported_with_their_cause() {
    let (authority, other) = (TestCa::new(), TestCa::new());
    let server = RedisServer::with_tls(&authority, "");
    let scratch = TempDir::new();
    scratch.write("ca.pem", &authority.pem);
    scratch.write("other.pem", &other.pem);
    let own = authority.issue(&["gateway"]);
    scratch.write("own.pem", &own.pem);
    scratch.write("own.key", &own.key_pem);
    let at = |settings: &str| check_in(&scratch, &format!("{}\n{settings}", url_of(&server)));
    let (code, output) = at("ca = \"ca.pem\"");
    assert_eq!(code, Some(0), "{output}");
    expect_unusable(at("ca = \"other.pem\""), &["invalid peer certificate", "ca = \"FILE\""]);
    expect_unusable(check(&url_of(&server).replace("rediss", "redis")), &["write `rediss://`"]);
    let plain = RedisServer::start();
    let settings = format!("{}\nca = \"ca.pem\"", url_of(&plain).replace("redis://", "rediss://"));
    expect_unusable(check_in(&scratch, &settings), &["write `redis://`"]);

    let strict = RedisServer::with_tls(&authority, "tls-auth-clients yes");
    let at = |settings: &str| check_in(&scratch, &format!("{}\nca = \"ca.pem\"\n{settings}", url_of(&strict)));
    expect_unusable(at(""), &["`certificate` and `private_key`"]);
    let (code, output) = at("certificate = \"own.pem\"\nprivate_key = \"own.key\"");
    assert_eq!(code, Some(0), "{output}");
}

/// The certificate is for a name, and the cluster announces addresses.
#[test]
fn a_cluster_with_tls_that_announces_addresses_needs_a_server_name() {
    let authority = TestCa::new();
    let lines = "cluster-enabled yes\ntls-cluster yes\ncluster-announce-ip 127.0.0.1";
    let node = RedisServer::with_tls_for(&["redis.internal"], &authority, lines);
    assert_eq!(node.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]), "OK");
    crate::support::eventually("the cluster serves", || node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok"));
    let scratch = TempDir::new();
    scratch.write("ca.pem", &authority.pem);
    let settings = format!("redis = [\"rediss://127.0.0.1:{}\"]\nca = \"ca.pem\"\n", node.port);
    expect_unusable(check_in(&scratch, &settings), &["not valid for name", "write `server_name = "]);
    let (code, output) = check_in(&scratch, &format!("{settings}server_name = \"redis.internal\""));
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains(&format!("server 127.0.0.1:{}: master", node.port)), "{output}");
}

#[test]
fn sentinels_may_have_a_login_of_their_own() {
    let master = RedisServer::with_config("requirepass of-servers");
    let sentinels = Sentinels::start_one(&master, "of-sentinels");
    let scratch = TempDir::new();
    scratch.write("servers", "of-servers\n");
    scratch.write("sentinels", "of-sentinels\n");
    let settings =
        format!("redis = {}\nsentinel_master = \"{MASTER}\"\npassword_file = \"servers\"\n", sentinels.urls());
    expect_unusable(check_in(&scratch, &settings), &["`sentinel_password_file`"]);
    for username in ["", "sentinel_username = \"default\""] {
        let own = format!("{settings}sentinel_password_file = \"sentinels\"\n{username}");
        let (code, output) = check_in(&scratch, &own);
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains(&format!("server 127.0.0.1:{}: master", master.port)), "{output}");
    }
    let wrong = format!("{settings}sentinel_password_file = \"servers\"");
    let (code, output) = check_in(&scratch, &wrong);
    // One problem, with its fix.
    assert_eq!(output.matches("problem: ").count(), 1, "{output}");
    expect_unusable((code, output), &["`sentinel_password_file`"]);
}

#[test]
fn sentinels_name_the_master() {
    let master = RedisServer::start();
    let named =
        |sentinels: &Sentinels, name: &str| format!("redis = {}\nsentinel_master = \"{name}\"", sentinels.urls());
    expect_unusable(check(&format!("{}\nsentinel_master = \"main\"", url_of(&master))), &["it is not a sentinel"]);
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let output = expect_usable(&named(&sentinels, MASTER));
    assert!(output.contains(&format!("server 127.0.0.1:{}: master", master.port)), "{output}");
    assert_eq!(output.matches("sentinel 127.0.0.1:").count(), 3, "{output}");
    assert!(output.contains("min-replicas-to-write"), "{output}");
    expect_unusable(check(&named(&sentinels, "other")), &["No such master", "set `sentinel_master`"]);
    drop(replica);
}

#[test]
fn every_master_and_slot_of_a_cluster_is_checked() {
    let mut cluster = RedisCluster::start();
    let output = expect_usable(&format!("redis = {}", cluster.urls()));
    assert_eq!(output.lines().filter(|line| line.starts_with("server 127.0.0.1:")).count(), 3, "{output}");
    expect_unusable(check(&url_of(&cluster.nodes[0])), &["it is a node of a cluster", "in brackets"]);
    let single = RedisServer::start();
    expect_unusable(
        check(&format!("redis = [\"{}\"]", single.url())),
        &["it is not a node of a cluster", "without brackets"],
    );
    cluster.nodes[1].kill();
    let settings = format!("redis = {}", cluster.urls());
    crate::support::eventually("the other nodes notice", || {
        let (code, output) = check(&settings);
        code == Some(1) && output.contains("of 16384 slots are served")
    });
}

#[test]
fn the_names_of_another_service_need_a_right_too() {
    let server = RedisServer::start();
    let rights = "reset on >sesame ~transom:* +@all";
    let set_rights = |more: &str| {
        let line: Vec<&str> =
            ["ACL", "SETUSER", "edge"].into_iter().chain(rights.split(' ')).chain(more.split_terminator(' ')).collect();
        assert_eq!(server.cli(&line), "OK");
    };
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"9/minute\"]\nkey_format = \"rlaas:{key}:{window}\"";
    let settings = format!("{}\n{rule}", as_user(&server, "edge:sesame"));
    set_rights("");
    expect_unusable(check(&settings), &["names of the rule `r`", "NOPERM", "~transom:* ~rlaas:* +ping"]);
    set_rights("~rlaas:*");
    assert!(expect_usable(&settings).contains("names of the rule `r`: fine"));
    assert_eq!(server.cli(&["KEYS", "rlaas:*"]), "");
}
