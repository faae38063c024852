//! Redis hangs, is killed, is unreachable, loses its data, or refuses: rules act as configured, responses come soon, and shared
//! counting resumes.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::redis::{RedisServer, free_port};
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{eventually, forward_all, within};

/// The default time for which a request waits for the store.
const STORE_TIMEOUT: Duration = Duration::from_millis(50);
const LIMIT: usize = 5;
const WINDOWS: &str = "[\"5/30d\"]";

/// A configuration with a rule and a route for each of the three policies.
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

/// The status of one request, whose response has to come soon whether Redis is reachable or not.
#[track_caller]
fn status_of(gateway: &Process, path: &str, key: &str) -> u16 {
    within(STORE_TIMEOUT, || gateway.client().get_with(path, &[("X-Key", key)]).status)
}

/// Sends more requests than the limit; returns the responses.
fn statuses_of(gateway: &Process, path: &str, key: &str) -> Vec<u16> {
    (0..LIMIT + 2).map(|_| status_of(gateway, path, key)).collect()
}

/// Checks that the rules follow `on_outage` during an outage, with a new key.
#[track_caller]
fn assert_outage_policies(gateway: &Process, key: &str) {
    let admitted = |responses: &[u16]| responses.iter().filter(|status| **status == 200).count();
    let local = statuses_of(gateway, "/local", key);
    assert_eq!((admitted(&local), local.last()), (LIMIT, Some(&429)), "{local:?}");
    assert_eq!(statuses_of(gateway, "/allow", key), [200; LIMIT + 2]);
    assert_eq!(statuses_of(gateway, "/refuse", key), [503; LIMIT + 2]);
}

/// Waits until Redis counts again, with a new key.
fn assert_recovers(gateway: &Process, redis: &RedisServer, key: &str) {
    eventually("shared counting resumes", || status_of(gateway, "/refuse", key) == 200);
    eventually("Redis has the key", || redis.keys().iter().any(|name| name.contains(key)));
}

fn assert_no_panic(gateway: &Process) {
    assert!(!gateway.stderr().contains("panicked"), "{}", gateway.stderr());
}

#[test]
fn a_hanging_redis_is_an_outage() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let gateway = Process::spawn(&policies(&redis.url(), mode));
        assert_eq!(status_of(&gateway, "/refuse", "before"), 200);
        redis.suspend();
        assert_outage_policies(&gateway, "during");
        redis.resume();
        assert_recovers(&gateway, &redis, "after");
        assert_no_panic(&gateway);
        // The log names the server.
        let (log, address) = (gateway.wait_for_stderr("are reachable again"), format!("127.0.0.1:{}", redis.port));
        for released in ["counters are shared through", "cannot be reached", "are reachable again"] {
            let mut lines = log.lines().filter(|line| line.contains(released)).peekable();
            assert!(lines.peek().is_some() && lines.all(|line| line.contains(&address)), "{released}: {log}");
        }
    }
}

#[test]
fn a_paused_redis_is_an_outage() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_eq!(status_of(&gateway, "/refuse", "before"), 200);
    redis.cli(&["CLIENT", "PAUSE", "600000", "WRITE"]);
    assert_outage_policies(&gateway, "during");
    redis.cli(&["CLIENT", "UNPAUSE"]);
    assert_recovers(&gateway, &redis, "after");
}

#[test]
fn a_killed_redis_is_an_outage_until_restarted() {
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let gateway = Process::spawn(&policies(&redis.url(), mode));
        assert_eq!(status_of(&gateway, "/refuse", "before"), 200);
        redis.kill();
        assert_outage_policies(&gateway, "during");
        redis.restart();
        assert_recovers(&gateway, &redis, "after");
        // Local usage during the outage is reported.
        eventually("the outage is reported", || {
            let keys = redis.keys();
            let local = keys.iter().find(|name| name.starts_with("transom:{local|during}"));
            local.is_some_and(|name| redis.integer(&["GET", name]) >= LIMIT as i64)
        });
        assert_eq!(status_of(&gateway, "/local", "during"), 429);
        assert_no_panic(&gateway);
    }
}

/// A gateway reports the last known usage of a counter to a store that lost its data, with its next call for the counter. Until
/// the other gateways report, usage that only they know may be admitted again; see `docs/guides/shared-counters.md`.
#[test]
fn known_usage_is_reported_to_an_empty_store() {
    const LIMIT: usize = 100;
    let admitted_after = |first: usize| {
        let mut redis = RedisServer::start();
        let settings = format!("mode = \"exact\"\n{LONG_TIMEOUT}");
        let toml = shared_config(&format!("\"{}\"", redis.url()), &settings, &rule_by_key("[\"100/30d\"]", ""));
        let gateways = GatewayGroup::start(2, &format!("workers = 1\n{toml}")).0;
        assert_eq!(
            (count_admitted_by(&gateways[0], "alice", 10), count_admitted_by(&gateways[1], "alice", 60)),
            (10, 60)
        );
        redis.restart();
        let admitted_by = |gateway: usize| count_admitted_by(&gateways[gateway], "alice", LIMIT);
        (admitted_by(first), admitted_by(1 - first))
    };
    // The second gateway knows all 70 tokens, the first only its own 10: at most 60 beyond the limit.
    assert_eq!(admitted_after(1), (30, 0));
    assert_eq!(admitted_after(0), (90, 0));
}

/// One or two failures are not an outage. Local usage is still reported, also if an outage follows.
#[test]
fn local_usage_is_reported_before_the_next_request() {
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let gateway = Process::spawn(&format!("workers = 1\n{}", policies(&redis.url(), mode)));
        assert_eq!(status_of(&gateway, "/refuse", "before"), 200);
        redis.kill();
        assert_eq!(status_of(&gateway, "/local", "during"), 200);
        // The usage is not lost if Redis is still unreachable at the first report.
        let unreachable = [("outcome", "unreachable")];
        eventually("a report is attempted", || {
            gateway.metrics().sum("transom_shared_requests_total", &unreachable) >= 2
        });
        redis.restart();
        eventually("the usage is reported", || {
            redis.keys().iter().any(|name| name.starts_with("transom:{local|during}"))
        });
        assert_no_panic(&gateway);
    }
}

/// The cost that a response states is counted locally, and reported when Redis is reachable again.
#[test]
fn a_response_cost_during_an_outage_is_not_lost() {
    for mode in ["lease", "exact"] {
        let (response, released) = channel::<()>();
        let released = Mutex::new(released);
        let upstream = Upstream::responding(move |_request| {
            released.lock().unwrap().recv().unwrap();
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
            eventually("the request is forwarded", || upstream.received().len() == 1);
            redis.kill();
            response.send(()).unwrap();
            client.join().unwrap();
        });
        redis.restart();
        // Unspent tokens are returned.
        let used = |name: &String| redis.cli(&["HGET", name, "used"]);
        eventually("the whole cost is counted", || redis.keys().iter().map(used).collect::<Vec<_>>() == ["5"]);
        assert_no_panic(&gateway);
    }
}

#[test]
fn a_gateway_starts_without_redis() {
    let mut redis = RedisServer::start();
    redis.kill();
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_outage_policies(&gateway, "during");
    redis.restart();
    assert_recovers(&gateway, &redis, "after");
}

#[test]
fn an_unreachable_or_closing_address_is_an_outage() {
    // A server that never responds, and one that closes each connection.
    let silent = Upstream::with_script(|connection: &mut Connection| while connection.read_exactly(1).is_some() {});
    let closing = Upstream::with_script(Connection::close);
    for upstream in [silent, closing] {
        let gateway = Process::spawn(&policies(&format!("redis://{}", upstream.address), "lease"));
        assert_outage_policies(&gateway, "during");
        assert_no_panic(&gateway);
    }
    let unreachable_address = Process::spawn(&policies(&format!("redis://127.0.0.1:{}", free_port()), "exact"));
    assert_outage_policies(&unreachable_address, "during");
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
        assert_eq!(status_of(&gateway, "/a", "alice"), 200);
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
        assert_recovers(&gateway, &redis, &key);
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    assert_no_panic(&gateway);
}

#[test]
fn a_missing_password_is_an_outage() {
    let redis = RedisServer::with_config("requirepass sesame");
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_outage_policies(&gateway, "during");
    assert_eq!(redis.cli(&["CONFIG", "SET", "requirepass", ""]), "OK");
    assert_recovers(&gateway, &redis, "after");
    assert_no_panic(&gateway);
}

#[test]
fn a_redis_out_of_memory_is_an_outage() {
    let redis = RedisServer::with_config("maxmemory-policy noeviction");
    let gateway = Process::spawn(&policies(&redis.url(), "lease"));
    assert_eq!(status_of(&gateway, "/refuse", "before"), 200);
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    assert_outage_policies(&gateway, "during");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    assert_recovers(&gateway, &redis, "after");
    assert_no_panic(&gateway);
}

#[test]
fn a_key_of_another_type_is_an_outage_of_its_counter() {
    let redis = RedisServer::start();
    let gateway = Process::spawn(&policies(&redis.url(), "exact"));
    assert_eq!(status_of(&gateway, "/refuse", "alice"), 200);
    let key = redis.keys().into_iter().find(|name| name.contains("alice")).unwrap();
    for command in [["SET", key.as_str(), "many"].as_slice(), &["LPUSH", key.as_str(), "1"]] {
        redis.cli(&["DEL", &key]);
        redis.cli(command);
        assert_eq!(status_of(&gateway, "/refuse", "alice"), 503);
        // Other counters are not affected.
        assert_eq!(status_of(&gateway, "/refuse", "bob"), 200);
    }
    redis.cli(&["DEL", &key]);
    assert_recovers(&gateway, &redis, "alice");
    assert_no_panic(&gateway);
}
