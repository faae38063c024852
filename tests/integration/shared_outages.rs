//! Redis hangs, is killed, is unreachable, loses its data, or refuses: rules act as configured, responses come soon, and shared
//! counting resumes.

use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::client::HttpResponse;
use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, count_admitted_by, rule_by_key, shared_config};
use crate::support::process::Process;
use crate::support::ratelimit_parser::items;
use crate::support::redis::{RedisServer, free_port};
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, forward_all, within};

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

/// An upstream that responds to requests to `/held` when it is told to, and a configuration in which only responses with status 404
/// count.
fn upstream_with_held_responses(redis: &RedisServer, mode: &str) -> (Upstream, Sender<()>, String) {
    let (response, released) = channel::<()>();
    let released = Mutex::new(released);
    let upstream = Upstream::responding(move |request| match request.target.as_str() {
        "/held" => {
            let _ = released.lock().unwrap().recv();
            reply(200, &[], b"")
        }
        _ => reply(404, &[], b""),
    });
    let rule = "[rules.r]\nkey = \"global\"\nwindows = [\"1000/30d\"]\ncount_when = { status = [404] }\n";
    let toml = format!(
        "workers = 1\n[counters.shared]\nredis = \"{}\"\nmode = \"{mode}\"\n{}rules = [\"r\"]\n{rule}",
        redis.url(),
        forward_all(&upstream)
    );
    (upstream, response, toml)
}

/// What the store has counted under the only rule.
fn counted(redis: &RedisServer) -> i64 {
    let keys = redis.keys();
    keys.iter().filter(|name| name.starts_with("transom:{r|")).map(|name| redis.integer(&["GET", name])).sum()
}

/// Requests are counted locally, the usage is reported, and then the responses say that the requests do not count.
#[test]
fn what_was_reported_is_refunded_in_the_store() {
    const HELD: usize = 3;
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let (upstream, response, toml) = upstream_with_held_responses(&redis, mode);
        let gateway = Process::spawn(&toml);
        thread::scope(|scope| {
            redis.suspend();
            let clients: Vec<_> = (0..HELD).map(|_| scope.spawn(|| gateway.get("/held").expect(200))).collect();
            eventually("the requests are forwarded", || upstream.received().len() == HELD);
            redis.resume();
            let reported = || gateway.metrics().sum("transom_shared_tokens_total", &[("outcome", "reported")]);
            eventually_eq(reported, HELD as u64);
            (0..HELD).for_each(|_| response.send(()).unwrap());
            clients.into_iter().for_each(|client| drop(client.join().unwrap()));
        });
        gateway.get("/counts").expect(404);
        eventually("the refunds are in the store", || counted(&redis) == 1);
        assert_no_panic(&gateway);
    }
}

/// Refunds wait until the server is back, which has lost its data meanwhile: it gets the usage without them.
#[test]
fn kept_refunds_do_not_lower_restored_usage() {
    const HELD: usize = 3;
    let mut redis = RedisServer::start();
    // Leased tokens are refunded to the lease.
    let (upstream, response, toml) = upstream_with_held_responses(&redis, "exact");
    let gateway = Process::spawn(&toml);
    (0..5).for_each(|_| drop(gateway.get("/counts").expect(404)));
    thread::scope(|scope| {
        let clients: Vec<_> = (0..HELD).map(|_| scope.spawn(|| gateway.get("/held").expect(200))).collect();
        eventually("the requests are forwarded", || upstream.received().len() == 5 + HELD);
        eventually("the store has all charges", || counted(&redis) == (5 + HELD) as i64);
        redis.kill();
        let mut admitted = 5;
        eventually("the outage is noticed", || {
            gateway.get("/counts").expect(404);
            admitted += 1;
            gateway.stderr().contains("cannot be reached")
        });
        (0..HELD).for_each(|_| response.send(()).unwrap());
        clients.into_iter().for_each(|client| drop(client.join().unwrap()));
        redis.restart();
        gateway.wait_for_stderr("are reachable again");
        let refunded = || gateway.metrics().sum("transom_shared_requests_total", &[("outcome", "refunded")]);
        eventually("the refunds are sent", || refunded() > 0);
        eventually_eq(|| counted(&redis), admitted);
    });
    assert_no_panic(&gateway);
}

/// The store loses its data while requests are under way that will not count. Two workers send their refunds, and ask for more
/// tokens: no refund lowers what the store was told without its tokens.
#[test]
fn refunds_after_a_restart_admit_nothing_beyond_the_limit() {
    // Whether a refund overtakes a request, and a request the noticed loss of a connection, is left to chance.
    const ROUNDS: usize = 6;
    const HELD: usize = 40;
    const COUNTED: usize = 10;
    const RULE_LIMIT: usize = 60;
    for _ in 0..ROUNDS {
        let mut redis = RedisServer::start();
        let (upstream, response, toml) = upstream_with_held_responses(&redis, "exact");
        let toml = toml.replace("workers = 1", "workers = 2").replace("1000/30d", &format!("{RULE_LIMIT}/30d"));
        let toml = toml.replace("[counters.shared]", "[counters.shared]\ntimeout = \"10s\"");
        let gateway = Process::spawn(&toml);
        let admitted = |requests: usize| {
            let mut client = gateway.client();
            (0..requests).filter(|_| client.get("/counts").status == 404).count()
        };
        assert_eq!(admitted(COUNTED), COUNTED);
        thread::scope(|scope| {
            let clients: Vec<_> = (0..HELD).map(|_| scope.spawn(|| gateway.get("/held").expect(200))).collect();
            eventually("the requests are forwarded", || upstream.received().len() == COUNTED + HELD);
            redis.restart();
            let counted: Vec<_> = (0..4).map(|_| scope.spawn(|| admitted(RULE_LIMIT))).collect();
            (0..HELD).for_each(|_| response.send(()).unwrap());
            clients.into_iter().for_each(|client| drop(client.join().unwrap()));
            let more: usize = counted.into_iter().map(|client| client.join().unwrap()).sum();
            let all = COUNTED + more + admitted(RULE_LIMIT);
            assert!(all <= RULE_LIMIT, "{all} admitted");
        });
        assert_no_panic(&gateway);
    }
}

/// A gateway is killed in an outage. Its successor finds what was counted locally in the counters file.
#[test]
fn usage_of_a_killed_gateway_is_reported_by_its_successor() {
    const COUNTED: usize = 9;
    for mode in ["lease", "exact"] {
        let (redis, scratch) = (RedisServer::start(), TempDir::new());
        let (_upstream, _response, toml) = upstream_with_held_responses(&redis, mode);
        let toml = toml.replacen(
            "[counters",
            &format!("[counters]\nfile = \"{}/counters\"\n[counters", scratch.path().display()),
            1,
        );
        let gateway = Process::spawn(&toml);
        redis.suspend();
        (0..COUNTED).for_each(|_| drop(gateway.get("/counts").expect(404)));
        // The store may execute the first calls, before the outage was noticed, when it continues.
        drop(gateway);
        let successor = Process::spawn(&toml);
        redis.resume();
        eventually("the successor reaches the store", || {
            !successor.stderr().contains("cannot be reached") || successor.stderr().contains("are reachable again")
        });
        successor.get("/counts").expect(404);
        eventually("the usage is reported with a request of the key", || counted(&redis) > COUNTED as i64);
    }
}

/// A gateway is replaced in an outage. The old process reports what it has counted, although no request has the key any more.
#[test]
fn usage_of_a_replaced_gateway_is_reported_before_its_end() {
    const COUNTED: usize = 9;
    for mode in ["lease", "exact"] {
        let redis = RedisServer::start();
        let (_upstream, _response, toml) = upstream_with_held_responses(&redis, mode);
        let chain = UpgradeChain::start(&toml);
        redis.suspend();
        (0..COUNTED).for_each(|_| drop(chain.first.get("/counts").expect(404)));
        let replaced = chain.serving_pid().expect("it serves");
        chain.upgrade();
        chain.wait_for_log("to report what was counted without them");
        assert!(is_alive(replaced));
        redis.resume();
        eventually("the process ends", || !is_alive(replaced));
        // The store may execute the first calls, before the outage was noticed, when it continues.
        assert!(counted(&redis) >= COUNTED as i64, "{}", counted(&redis));
        chain.signal("TERM");
    }
}

/// Before an outage, during it, and after Redis has returned without its data.
#[test]
fn penalties_follow_the_outage_policy() {
    const HOURS: &str = "8000h";
    for mode in ["lease", "exact"] {
        let mut redis = RedisServer::start();
        let penalty = format!("windows = {WINDOWS}\npenalty = \"{HOURS}\"");
        let toml = policies(&redis.url(), mode).replace(&format!("windows = {WINDOWS}"), &penalty);
        let [gateway, other] = [0, 1].map(|_| Process::spawn(&format!("workers = 1\n{toml}")));
        let get = |gateway: &Process, path: &str, key: &str| {
            within(STORE_TIMEOUT, || gateway.client().get_with(path, &[("X-Key", key)]))
        };
        // Longer than the window.
        #[track_caller]
        fn assert_locked(response: HttpResponse) {
            let refused = response.expect(429);
            let retry_after_s = refused.field("retry-after").unwrap().parse::<u64>().unwrap();
            assert!((28_700_000..=28_800_000).contains(&retry_after_s), "{retry_after_s}");
            assert_eq!(items(&refused, "ratelimit")[0].get("t"), retry_after_s);
            assert_eq!(refused.problem()["retry-after"], retry_after_s);
        }
        let lock_out = |path: &str, key: &str| {
            (0..LIMIT).for_each(|_| drop(get(&gateway, path, key).expect(200)));
            assert_locked(get(&gateway, path, key));
        };
        let in_store = |policy: &str, key: &str| {
            let name = format!("transom:{{{policy}|{key}}}:penalty");
            redis.keys().iter().any(|known| known.starts_with(&name))
        };
        for policy in ["local", "allow", "refuse"] {
            lock_out(&format!("/{policy}"), "before");
            eventually("Redis has the penalty", || in_store(policy, "before"));
            assert_locked(get(&other, &format!("/{policy}"), "before"));
        }

        redis.kill();
        eventually("the outage is noticed", || get(&gateway, "/refuse", "noticed").status == 503);
        for gateway in [&gateway, &other] {
            assert_locked(get(gateway, "/local", "before"));
        }
        get(&gateway, "/allow", "before").expect(200);
        get(&gateway, "/refuse", "before").expect(503);
        lock_out("/local", "during");

        redis.restart();
        assert_recovers(&gateway, &redis, "after");
        for policy in ["local", "allow", "refuse"] {
            assert_locked(get(&gateway, &format!("/{policy}"), "before"));
        }
        assert_locked(get(&gateway, "/local", "during"));
        [&gateway, &other].iter().for_each(|gateway| assert_no_panic(gateway));
    }
}

/// A penalty ends when it was due at its start, although refusals go on, with Redis away or back without its data.
#[test]
fn refusals_during_an_outage_do_not_extend_a_penalty() {
    const PENALTY: Duration = Duration::from_secs(5);
    for returns in [false, true] {
        let mut redis = RedisServer::start();
        let rule = "[rules.r]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = [\"1/100ms\"]\npenalty = \"5s\"\n\
                    on_outage = \"local\"\n";
        let gateway = Process::spawn(&format!(
            "workers = 1\n{}",
            shared_config(&format!("\"{}\"", redis.url()), "mode = \"exact\"", rule)
        ));
        let get = || gateway.client().get_with("/a", &[("X-Key", "a")]);
        let mut began = Instant::now();
        while get().status == 200 {
            began = Instant::now();
        }
        redis.kill();
        get().expect(429);
        if returns {
            redis.restart();
        }
        let has_ended = || {
            let left = PENALTY.saturating_sub(began.elapsed());
            let response = get();
            // The penalty began a little later; and the field is rounded up.
            let retry_after_s = response.field("retry-after").map_or(0, |text| text.parse().unwrap());
            assert!(Duration::from_secs(retry_after_s) <= left + Duration::from_secs(2), "{retry_after_s} {left:?}");
            response.status == 200
        };
        within(PENALTY, || eventually("the penalty ends", has_ended));
        assert!(began.elapsed() >= PENALTY, "{:?}", began.elapsed());
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

/// Every worker notices the outage, and so does the admin address.
#[test]
fn an_outage_is_logged_once() {
    let mut redis = RedisServer::start();
    redis.kill();
    let gateway = Process::spawn(&format!("workers = 3\n{}", policies(&redis.url(), "lease")));
    let unreachable = || gateway.metrics().sum("transom_shared_servers_unreachable", &[]);
    eventually("all workers notice", || unreachable() == 4);
    for (path, status) in [("/local", 200), ("/allow", 200), ("/refuse", 503)] {
        assert_eq!(status_of(&gateway, path, "during"), status);
    }
    redis.restart();
    eventually("all workers reach Redis", || unreachable() == 0);
    let log = gateway.wait_for_stderr("are reachable again");
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).collect::<Vec<_>>();
    assert_eq!(lines("cannot be reached").len(), 1, "{log}");
    let [end] = lines("are reachable again")[..] else { panic!("{log}") };
    assert!(end.contains(&format!("127.0.0.1:{}; 3 decisions followed `on_outage`", redis.port)), "{end}");
    // The next outage is logged again.
    redis.kill();
    eventually("the outage is noticed", || status_of(&gateway, "/refuse", "again") == 503 && unreachable() > 0);
    eventually_eq(|| gateway.stderr().matches("cannot be reached").count(), 2);
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
fn an_outage_counts_once_for_all_workers() {
    let mut redis = RedisServer::start();
    let gateway = Process::spawn(&format!("workers = 4\n{}", policies(&redis.url(), "exact")));
    assert_eq!(status_of(&gateway, "/allow", "alice"), 200);
    redis.kill();
    eventually("several workers notice the outage", || {
        status_of(&gateway, "/allow", "alice");
        gateway.metrics().sum("transom_shared_servers_unreachable", &[]) >= 3
    });
    assert_eq!(gateway.metrics().sum("transom_shared_outages_total", &[]), 1);
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

/// The user has no right to the names of one rule.
#[test]
fn a_missing_right_is_an_outage_of_one_rule() {
    for mode in ["lease", "exact"] {
        let redis = RedisServer::with_config(
            "user edge on >sesame ~transom:{#* ~transom:{refuse|* ~transom:{allow|* +@all\nuser default on nopass ~* +@all",
        );
        let both = "[[routes]]\npath = \"/both\"\nupstream = \"u\"\nrules = [\"local\", \"refuse\"]\n";
        let toml = policies(&redis.url().replace("redis://", "redis://edge:sesame@"), mode)
            .replace("mode =", "timeout = \"10s\"\nmode =");
        let gateway = Process::spawn(&format!("workers = 1\n{toml}{both}"));
        assert_eq!(status_of(&gateway, "/refuse", "alice"), 200);
        // The other rule of the route counts in Redis.
        assert_eq!(statuses_of(&gateway, "/both", "bob"), [200, 200, 200, 200, 200, 429, 429], "{mode}");
        assert!(redis.keys().iter().any(|name| name.starts_with("transom:{refuse|bob}")), "{:?}", redis.keys());
        assert_eq!(status_of(&gateway, "/local", "bob"), 429);
        assert_eq!(status_of(&gateway, "/refuse", "alice"), 200);
        let metrics = gateway.metrics();
        assert_eq!(metrics.sum("transom_shared_outages_total", &[]), 0);
        assert!(metrics.sum("transom_shared_requests_total", &[("outcome", "error")]) > 0);
        let log = gateway.wait_for_stderr("a shared counter cannot be used");
        assert!(log.contains("NOPERM") && log.contains("transom:{local|bob}"), "{log}");
        assert_eq!(log.matches("a shared counter cannot be used").count(), 1, "{log}");
    }
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
