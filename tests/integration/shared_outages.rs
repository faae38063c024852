//! Redis hangs, is killed, is unreachable, loses its data, or refuses: rules act as configured, requests are answered soon, and
//! shared counting resumes by itself.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis::{RedisServer, free_port};
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{eventually, forward_all, within};

/// How long a request waits for the store, unless the configuration says otherwise.
const STORE_TIMEOUT: Duration = Duration::from_millis(50);
const LIMIT: usize = 5;
const WINDOWS: &str = "[\"5/30d\"]";

/// The three policies on one gateway, each a rule of a route; and the same in the other mode.
fn policies(redis: &str, mode: &str) -> String {
    let rules: String = ["local", "allow", "refuse"]
        .map(|policy| {
            format!(
                "[rules.{policy}]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = {WINDOWS}\n\
                 on_outage = \"{policy}\"\n[[routes]]\npath = \"/{policy}\"\nupstream = \"u\"\nrules = [\"{policy}\"]\n"
            )
        })
        .concat();
    format!("[counters.shared]\nredis = \"{redis}\"\nmode = \"{mode}\"\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}")
}

/// One request; it is answered soon, whatever becomes of Redis.
#[track_caller]
fn ask(gateway: &Process, path: &str, key: &str) -> u16 {
    within(STORE_TIMEOUT, || gateway.client().get_with(path, &[("X-Key", key)]).status)
}

/// Sends more requests than the limit; returns the responses.
fn asked(gateway: &Process, path: &str, key: &str) -> Vec<u16> {
    (0..LIMIT + 2).map(|_| ask(gateway, path, key)).collect()
}

/// The rules do what `on_outage` says, for a key that was not seen before.
#[track_caller]
fn does_without(gateway: &Process, key: &str) {
    let admitted = |responses: &[u16]| responses.iter().filter(|status| **status == 200).count();
    let local = asked(gateway, "/local", key);
    assert_eq!((admitted(&local), local.last()), (LIMIT, Some(&429)), "{local:?}");
    assert_eq!(asked(gateway, "/allow", key), [200; LIMIT + 2]);
    assert_eq!(asked(gateway, "/refuse", key), [503; LIMIT + 2]);
}

/// Redis counts again, for a key that was not seen before.
fn recovers(gateway: &Process, redis: &RedisServer, key: &str) {
    eventually("it counts together again", || ask(gateway, "/refuse", key) == 200);
    eventually("Redis has it", || redis.keys().iter().any(|name| name.contains(key)));
}

fn is_calm(gateway: &Process) {
    assert!(!gateway.stderr().contains("panicked"), "{}", gateway.stderr());
}

#[test]
fn a_hanging_redis_is_an_outage() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let gateway = Process::spawn(&policies(&redis.url(), mode));
        assert_eq!(ask(&gateway, "/refuse", "before"), 200);
        redis.suspend();
        does_without(&gateway, "during");
        redis.resume();
        recovers(&gateway, &redis, "after");
        is_calm(&gateway);
        // The log names the server.
        let (log, address) = (gateway.stderr(), format!("127.0.0.1:{}", redis.port));
        for told in ["counters are shared through", "cannot be reached", "are reachable again"] {
            let mut lines = log.lines().filter(|line| line.contains(told)).peekable();
            assert!(lines.peek().is_some() && lines.all(|line| line.contains(&address)), "{told}: {log}");
        }
    }
}

#[test]
fn a_paused_redis_is_an_outage() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_eq!(ask(&gateway, "/refuse", "before"), 200);
    redis.cli(&["CLIENT", "PAUSE", "600000", "WRITE"]);
    does_without(&gateway, "during");
    redis.cli(&["CLIENT", "UNPAUSE"]);
    recovers(&gateway, &redis, "after");
}

#[test]
fn a_killed_redis_is_an_outage_until_restarted() {
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let gateway = Process::spawn(&policies(&redis.url(), mode));
        assert_eq!(ask(&gateway, "/refuse", "before"), 200);
        redis.kill();
        does_without(&gateway, "during");
        redis.restart();
        recovers(&gateway, &redis, "after");
        // Local usage of the outage is known there.
        eventually("the outage is reported", || {
            let keys = redis.keys();
            let local = keys.iter().find(|name| name.starts_with("transom:{local|during}"));
            local.is_some_and(|name| redis.integer(&["GET", name]) >= LIMIT as i64)
        });
        assert_eq!(ask(&gateway, "/local", "during"), 429);
        is_calm(&gateway);
    }
}

/// A gateway reports to a store that lost its data the last usage that it knows of a counter, when it next takes tokens of it.
/// Usage that only other gateways know may be admitted once more until they report; see
/// `docs/guides/shared-counters.md`.
#[test]
fn known_usage_is_reported_to_an_empty_store() {
    const LIMIT: usize = 100;
    let rest = |asks_first: usize| {
        let mut redis = RedisServer::start();
        let settings = format!("mode = \"exact\"\n{LONG_TIMEOUT}");
        let toml = shared_config(&format!("\"{}\"", redis.url()), &settings, &rule_by_key("[\"100/30d\"]", ""));
        let gateways = GatewayGroup::start(2, &format!("workers = 1\n{toml}")).0;
        assert_eq!(
            (count_admitted_by(&gateways[0], "alice", 10), count_admitted_by(&gateways[1], "alice", 60)),
            (10, 60)
        );
        redis.restart();
        let of = |gateway: usize| count_admitted_by(&gateways[gateway], "alice", LIMIT);
        (of(asks_first), of(1 - asks_first))
    };
    // The second gateway knows of all 70, the first of its own 10: 60 beyond the limit, and no more.
    assert_eq!(rest(1), (30, 0));
    assert_eq!(rest(0), (90, 0));
}

/// One or two failures are not an outage with an end; local usage is reported all the same, also if it becomes an outage.
#[test]
fn local_usage_is_reported_before_the_next_request() {
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let gateway = Process::spawn(&format!("workers = 1\n{}", policies(&redis.url(), mode)));
        assert_eq!(ask(&gateway, "/refuse", "before"), 200);
        redis.kill();
        assert_eq!(ask(&gateway, "/local", "during"), 200);
        // It is not lost either if Redis is still unreachable when it is to be reported.
        let unreachable = [("outcome", "unreachable")];
        eventually("it is tried", || gateway.metrics().sum("transom_shared_requests_total", &unreachable) >= 2);
        redis.restart();
        eventually("it is told", || redis.keys().iter().any(|name| name.starts_with("transom:{local|during}")));
        is_calm(&gateway);
    }
}

/// The cost that a response states is counted locally, and reported when Redis is reachable again.
#[test]
fn a_response_cost_during_an_outage_is_not_lost() {
    for mode in ["lease", "exact"] {
        let (response, told) = channel::<()>();
        let told = Mutex::new(told);
        let upstream = Upstream::responding(move |_request| {
            told.lock().unwrap().recv().unwrap();
            reply(200, &[("X-Cost", "5")], b"")
        });
        let mut redis = RedisServer::start();
        let rule = "[rules.r]\nkey = \"global\"\nwindows = [\"100/30d\"]\non_outage = \"local\"\n\
                    cost = { response-header = \"x-cost\", reserve = 1, max = 10 }\n";
        let toml = format!(
            "workers = 1\n[counters.shared]\nredis = \"{}\"\nmode = \"{mode}\"\n{}rules = [\"r\"]\n{rule}",
            redis.url(),
            forward_all(&upstream)
        );
        let gateway = Process::spawn(&toml);
        thread::scope(|scope| {
            let client = scope.spawn(|| gateway.get("/a").expect(200));
            eventually("it waits for the answer", || upstream.received().len() == 1);
            redis.kill();
            response.send(()).unwrap();
            client.join().unwrap();
        });
        redis.restart();
        // Unspent tokens are returned.
        let used = |name: &String| redis.cli(&["HGET", name, "used"]);
        eventually("all of it is counted", || redis.keys().iter().map(used).collect::<Vec<_>>() == ["5"]);
        is_calm(&gateway);
    }
}

#[test]
fn a_gateway_starts_without_redis() {
    let mut redis = RedisServer::start();
    redis.kill();
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    does_without(&gateway, "during");
    redis.restart();
    recovers(&gateway, &redis, "after");
}

#[test]
fn an_unreachable_or_closing_address_is_an_outage() {
    // Takes connections and says nothing; or ends them as they come.
    let silent = Upstream::with_script(|connection: &mut Connection| while connection.read_exactly(1).is_some() {});
    let rude = Upstream::with_script(Connection::close);
    for upstream in [silent, rude] {
        let gateway = Process::spawn(&policies(&format!("redis://{}", upstream.address), "lease"));
        does_without(&gateway, "during");
        is_calm(&gateway);
    }
    let nobody = Process::spawn(&policies(&format!("redis://127.0.0.1:{}", free_port()), "exact"));
    does_without(&nobody, "during");
}

#[test]
fn flushed_scripts_are_loaded_again() {
    let redis = RedisServer::start();
    let toml = shared_config(
        &format!("\"{}\"", redis.url()),
        "timeout = \"10s\"\nmode = \"exact\"",
        &rule_by_key("[\"9/30d\"]", "on_outage = \"refuse\""),
    );
    let gateway = Process::spawn(&toml);
    for _ in 0..3 {
        assert_eq!(ask(&gateway, "/a", "alice"), 200);
        assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]), "OK");
    }
    let key = redis.keys().into_iter().find(|name| name.contains("alice")).unwrap();
    assert_eq!(redis.integer(&["GET", &key]), 3);
}

#[test]
fn reset_connections_are_reopened() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    for round in 0..5 {
        let key = format!("round-{round}");
        recovers(&gateway, &redis, &key);
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    is_calm(&gateway);
}

#[test]
fn a_missing_password_is_an_outage() {
    let redis = RedisServer::with_config("requirepass sesame");
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    does_without(&gateway, "during");
    assert_eq!(redis.cli(&["CONFIG", "SET", "requirepass", ""]), "OK");
    recovers(&gateway, &redis, "after");
    is_calm(&gateway);
}

#[test]
fn a_redis_out_of_memory_is_an_outage() {
    let redis = RedisServer::with_config("maxmemory-policy noeviction");
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_eq!(ask(&gateway, "/refuse", "before"), 200);
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    does_without(&gateway, "during");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    recovers(&gateway, &redis, "after");
    is_calm(&gateway);
}

#[test]
fn a_key_of_another_type_is_an_outage_of_its_counter() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&policies(&redis.url(), "exact"));
    assert_eq!(ask(&gateway, "/refuse", "alice"), 200);
    let key = redis.keys().into_iter().find(|name| name.contains("alice")).unwrap();
    for wrong in [["SET", key.as_str(), "many"].as_slice(), &["LPUSH", key.as_str(), "1"]] {
        redis.cli(&["DEL", &key]);
        redis.cli(wrong);
        assert_eq!(ask(&gateway, "/refuse", "alice"), 503);
        // That is no outage: others are counted as before.
        assert_eq!(ask(&gateway, "/refuse", "bob"), 200);
    }
    redis.cli(&["DEL", &key]);
    recovers(&gateway, &redis, "alice");
    is_calm(&gateway);
}
