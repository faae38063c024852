//! Rules count with a store as without one: costs that responses state, refusals that count, penalties, and outages inside a window.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway_group::is_admitted;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::RedisServer;
use crate::support::upstream::{Upstream, reply};
use crate::support::{eventually, eventually_eq, seeded_rng};

const MODES: [&str; 3] = ["off", "lease", "exact"];
/// A window that does not end during a test.
const WINDOW: &str = "30d";

/// A gateway with a store, that sends all requests to an upstream.
fn start(redis: &RedisServer, upstream: &Upstream, settings: &str, rules: &[(&str, &str)]) -> Process {
    Process::spawn(&config(redis, upstream, settings, rules))
}

fn config(redis: &RedisServer, upstream: &Upstream, settings: &str, rules: &[(&str, &str)]) -> String {
    let mut toml = format!("[counters.shared]\nredis = \"{}\"\n{settings}\n{}", redis.url(), upstream.toml("u"));
    for (name, text) in rules {
        toml += &format!("[rules.{name}]\n{text}\n");
    }
    let names: Vec<&str> = rules.iter().map(|(name, _)| *name).collect();
    format!("{toml}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = {names:?}\n")
}

/// An upstream whose responses state the number in the path of the request as the cost.
fn upstream_with_cost() -> Upstream {
    Upstream::responding(|received| reply(200, &[("X-Cost", received.target.trim_start_matches('/'))], b""))
}

/// Of as many requests of one client, those that are admitted.
fn admitted(client: &mut Client, target: &str, times: usize) -> usize {
    (0..times).filter(|_| is_admitted(&client.get(target))).count()
}

#[test]
fn a_response_cost_holds_its_limit_in_each_mode() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    // The limit, the reserve, the cost of each request, and how many are admitted while anything is left.
    for (limit, reserve, cost, expected) in [(10, 0, 4, 3), (10, 1, 4, 3), (1000, 1, 50, 20), (10, 0, 5, 2)] {
        for start_of_window in ["", "start = \"first-request\", "] {
            let of_modes = MODES.map(|mode| {
                let rule = format!(
                    "key = \"ip\"\nshared = \"{mode}\"\n\
                     cost = {{ response-header = \"x-cost\", reserve = {reserve}, max = 1000 }}\n\
                     windows = [{{ {start_of_window}limit = {limit}, period = \"{WINDOW}\" }}]"
                );
                // Each rule has counters of its own.
                let name = format!("r{limit}-{reserve}-{cost}-{}-{mode}", start_of_window.len());
                let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(&name, &rule)]);
                let mut client = gateway.client();
                let responses: Vec<HttpResponse> = (0..40).map(|_| client.get(&format!("/{cost}"))).collect();
                responses.iter().map(|response| (response.status, remaining(response, &name))).collect::<Vec<_>>()
            });
            let [alone, leased, exact] = &of_modes;
            assert_eq!(alone.iter().filter(|(status, _)| *status == 200).count(), expected, "{alone:?}");
            assert_eq!(leased, alone, "leased, {start_of_window}{limit}, reserve {reserve}, cost {cost}");
            assert_eq!(exact, alone, "exact, {start_of_window}{limit}, reserve {reserve}, cost {cost}");
        }
    }
}

/// The cost is known at the end of the body, after the head was sent.
#[test]
fn usage_in_a_body_holds_its_limit_in_each_mode() {
    let redis = RedisServer::start();
    let upstream = Upstream::responding(|_| reply(200, &[], b"{\"usage\":{\"total_tokens\":4}}"));
    for mode in MODES {
        let rule = format!(
            "key = \"ip\"\nshared = \"{mode}\"\ncost = {{ usage = \"auto\", reserve = 1 }}\nwindows = [\"10/{WINDOW}\"]"
        );
        let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(&format!("usage-{mode}"), &rule)]);
        assert_eq!(admitted(&mut gateway.client(), "/", 20), 3, "{mode}");
    }
}

#[test]
fn a_response_cost_holds_a_sliding_limit_with_leases() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    let rule = format!(
        "key = \"ip\"\ncost = {{ response-header = \"x-cost\", reserve = 1, max = 1000 }}\n\
         windows = [{{ limit = 1000, period = \"{WINDOW}\", sliding = true }}]"
    );
    let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[("r", &rule)]);
    let mut client = gateway.client();
    let mut total = 0;
    // The store may still be charging the request before.
    while is_admitted(&client.get("/50")) {
        total += 1;
    }
    assert_eq!(total, 20);
}

#[test]
fn a_refused_request_counts_wherever_its_rules_are_counted() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    for c_mode in MODES {
        for b_mode in MODES {
            for kind in ["", ", start = \"first-request\"", ", sliding = true"] {
                let name = format!("c-{c_mode}-{b_mode}-{}", kind.len());
                let c = format!(
                    "key = \"ip\"\nshared = \"{c_mode}\"\ncount_refused = true\n\
                     windows = [{{ limit = 13, period = \"{WINDOW}\"{kind} }}]"
                );
                let b_name = format!("b-{c_mode}-{b_mode}-{}", kind.len());
                let b = format!("key = \"global\"\nshared = \"{b_mode}\"\nwindows = [\"2/{WINDOW}\"]");
                let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(&name, &c), (&b_name, &b)]);
                let mut client = gateway.client();
                for used in 1..=16 {
                    let response = client.get("/a").expect(if used <= 2 { 200 } else { 429 });
                    assert_eq!(remaining(&response, &name), 13u64.saturating_sub(used), "{name}: request {used}");
                }
            }
        }
    }
}

/// What a shadow rule would have refused, it has not charged.
#[test]
fn a_shadow_rule_settles_only_what_it_has_charged_in_each_mode() {
    let redis = RedisServer::start();
    let upstream = Upstream::responding(|received| {
        reply(
            if received.target == "/401" { 401 } else { 200 },
            &[("X-Cost", received.target.trim_start_matches('/'))],
            b"",
        )
    });
    // Targets, and what is used after each.
    let by_cost =
        ("cost = { response-header = \"x-cost\", reserve = 1, max = 1000 }", [("/82", 82), ("/210", 82), ("/210", 82)]);
    let by_status = ("count_when = { status = [401] }", [("/401", 1), ("/401", 2), ("/200", 2)]);
    for mode in MODES {
        for (setting, requests) in [by_cost, by_status] {
            let name = format!("{mode}-{}", requests[0].1);
            let rule = format!(
                "key = \"ip\"\nshared = \"{mode}\"\non_limit = \"shadow\"\nwindows = [\"2/{WINDOW}\"]\n{setting}"
            );
            let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(&name, &rule)]);
            let used = || {
                let query = json!({ "rule": name, "key": "127.0.0.1" }).to_string();
                Client::connect(gateway.admin).post("/v1/value", query).expect(200).json()["count"].as_u64()
            };
            // The last request twice: what settles it may still be on its way.
            for (target, expected) in requests.iter().chain(&requests[2..]) {
                gateway.get(target);
                eventually_eq(used, Some(*expected));
            }
        }
    }
}

/// A request that a rule delays, and one that would have to wait too long.
#[test]
fn a_request_counts_once_whichever_rule_delays_it() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    let check = |c_mode: &str, b_mode: &str| {
        for (windows, max_delay, status) in [("1/1s", "10s", 200), ("1/30d", "1ms", 429)] {
            let name = |rule: &str| format!("{rule}-{c_mode}-{b_mode}-{status}");
            let c = format!("key = \"ip\"\nshared = \"{c_mode}\"\ncount_refused = true\nwindows = [\"13/{WINDOW}\"]");
            let b = format!(
                "key = \"global\"\nshared = \"{b_mode}\"\nwindows = [\"{windows}\"]\n\
                 on_limit = \"delay\"\nmax_delay = \"{max_delay}\""
            );
            let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(&name("c"), &c), (&name("b"), &b)]);
            let mut client = gateway.client();
            for used in 1..=4 {
                let response = client.get("/a").expect(if used == 1 { 200 } else { status });
                assert_eq!(remaining(&response, &name("c")), 13 - used, "{}: request {used}", name("c"));
            }
        }
    };
    thread::scope(|scope| {
        for (c_mode, b_mode) in MODES.iter().flat_map(|c_mode| MODES.map(|b_mode| (*c_mode, b_mode))) {
            scope.spawn(move || check(c_mode, b_mode));
        }
    });
}

/// The store is not asked once a rule refuses that is counted in the gateway.
#[test]
fn a_refusal_states_exact_windows_that_were_not_asked() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    let c = format!("key = \"ip\"\nshared = \"off\"\nwindows = [\"1/{WINDOW}\"]");
    let d = "key = \"ip\"\nshared = \"exact\"\nwindows = [\"1/360d\"]";
    let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[("c", &c), ("d", d)]);
    assert_eq!(remaining(&gateway.get("/a").expect(200), "d"), 0);
    let refused = gateway.get("/a").expect(429);
    assert_eq!((remaining(&refused, "c"), remaining(&refused, "d")), (0, 0));
    assert_eq!(refused.problem()["violated-policies"], json!(["c", "d"]));
}

#[test]
fn a_refused_request_opens_no_window_in_the_store() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    for mode in ["lease", "exact"] {
        let counting = format!(
            "key = \"header:x-key\"\non_missing_key = \"skip\"\nshared = \"{mode}\"\ncount_refused = true\n\
             windows = [{{ limit = 5, period = \"{WINDOW}\", start = \"first-request\" }}]"
        );
        let full = format!("key = \"ip\"\nshared = \"off\"\nwindows = [\"1/{WINDOW}\"]");
        let gateway = start(&redis, &upstream, "timeout = \"10s\"", &[(mode, &counting), ("full", &full)]);
        let mut client = gateway.client();
        client.get_with("/a", &[("X-Key", "first")]).expect(200);
        for _ in 0..2 {
            client.get_with("/a", &[("X-Key", "second")]).expect(429);
        }
        // Requests of the key that has a window are charged meanwhile.
        client.get_with("/a", &[("X-Key", "first")]).expect(429);
        let used = |key: &str| {
            let text = redis.cli(&["HGET", &format!("transom:{{{mode}|{key}}}:first-request"), "used"]);
            text.parse::<u64>().unwrap_or(0)
        };
        eventually(&format!("the refused request counts: {:?}", redis.keys()), || used("first") >= 2);
        assert_eq!(used("second"), 0, "{:?}", redis.keys());
    }
}

/// A worker decides requests to routes with shared rules, and to a route without, one after the other.
#[test]
fn rules_of_one_gateway_count_refusals_and_start_penalties_after_requests_to_shared_rules() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    for mode in ["lease", "exact"] {
        let toml = format!(
            "workers = 1\n[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n{}\
             [rules.shared]\nkey = \"ip\"\nshared = \"{mode}\"\nwindows = [\"1000/{WINDOW}\"]\n\
             [rules.counting]\nkey = \"ip\"\nshared = \"off\"\ncount_refused = true\nwindows = [\"1/20d\", \"5/{WINDOW}\"]\n\
             [rules.locking]\nkey = \"ip\"\nshared = \"off\"\npenalty = \"8000h\"\nwindows = [\"1/{WINDOW}\"]\n\
             [[routes]]\npath = \"/shared\"\nupstream = \"u\"\nrules = [\"shared\"]\n\
             [[routes]]\npath = \"/counting\"\nupstream = \"u\"\nrules = [\"counting\"]\n\
             [[routes]]\npath = \"/locking\"\nupstream = \"u\"\nrules = [\"locking\"]\n",
            redis.url(),
            upstream.toml("u"),
        );
        let gateway = Process::spawn(&toml);
        let mut client = gateway.client();
        client.get("/counting").expect(200);
        client.get("/locking").expect(200);
        client.get("/shared").expect(200);
        assert_eq!(remaining(&client.get("/counting").expect(429), "counting-30d"), 3, "{mode}");
        let locked = client.get("/locking").expect(429);
        assert_eq!(locked.field("retry-after"), Some("28800000"), "{mode}");
    }
}

/// Tokens that were leased in a window which has ended pay for no refused request of the next one.
#[test]
fn the_first_request_of_a_window_counts_if_it_is_refused() {
    const PERIOD: Duration = Duration::from_secs(30 * 24 * 3600);
    let (redis, upstream) = (RedisServer::with_stepped_clock(""), upstream_with_cost());
    for kind in ["", ", sliding = true"] {
        let (c, b) = (format!("c{}", kind.len()), format!("b{}", kind.len()));
        let toml = format!(
            "workers = 1\n[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n{}\
             [rules.{c}]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nshared = \"lease\"\ncount_refused = true\n\
             windows = [{{ limit = 1000, period = \"{WINDOW}\"{kind} }}]\n\
             [rules.{b}]\nkey = \"ip\"\nshared = \"off\"\nwindows = [{{ limit = 1, period = \"366d\", start = \"first-request\" }}]\n\
             [[routes]]\npath = \"/both\"\nupstream = \"u\"\nrules = [\"{b}\", \"{c}\"]\n\
             [[routes]]\npath = \"/c\"\nupstream = \"u\"\nrules = [\"{c}\"]\n",
            redis.url(),
            upstream.toml("u"),
        );
        let gateway = Process::spawn(&toml);
        let mut client = gateway.client();
        client.get_with("/both", &[("X-Key", "alice")]).expect(200);
        for _ in 0..20 {
            client.get_with("/c", &[("X-Key", "alice")]).expect(200);
        }
        // All of a sliding window has ended after two periods. The next request tells the gateway the time of the store.
        redis.set_clock_offset(if kind.is_empty() { PERIOD } else { 3 * PERIOD });
        client.get_with("/c", &[("X-Key", "bob")]).expect(200);
        client.get_with("/both", &[("X-Key", "alice")]).expect(429);
        assert_eq!(remaining(&client.get_with("/c", &[("X-Key", "alice")]).expect(200), &c), 998, "{kind}");
    }
}

#[test]
fn a_full_window_starts_its_penalty_whichever_rule_refuses_first() {
    let (redis, upstream) = (RedisServer::start(), upstream_with_cost());
    for kind in ["", ", start = \"first-request\"", ", sliding = true"] {
        let p = format!("p{}", kind.len());
        let toml = format!(
            "[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n{}\
             [rules.{p}]\nkey = \"ip\"\npenalty = \"1h\"\nwindows = [{{ limit = 3, period = \"{WINDOW}\"{kind} }}]\n\
             [rules.b]\nkey = \"ip\"\nshared = \"off\"\nwindows = [\"1/{WINDOW}\"]\n\
             [[routes]]\npath = \"/both\"\nupstream = \"u\"\nrules = [\"b\", \"{p}\"]\n\
             [[routes]]\npath = \"/p\"\nupstream = \"u\"\nrules = [\"{p}\"]\n",
            redis.url(),
            upstream.toml("u"),
        );
        let gateway = Process::spawn(&toml);
        gateway.get("/both").expect(200);
        assert_eq!(admitted(&mut gateway.client(), "/p", 2), 2);
        let penalties = || redis.keys().into_iter().filter(|key| key.contains("penalty")).count();
        assert_eq!(penalties(), 0);
        // The window of `p` is full, and `b` refuses.
        gateway.get("/both").expect(429);
        eventually_eq(penalties, 1);
        redis.cli(&["FLUSHALL"]);
    }
}

#[test]
fn a_window_admits_its_limit_over_outages() {
    let upstream = upstream_with_cost();
    for mode in ["lease", "exact"] {
        for kind in ["", ", start = \"first-request\"", ", sliding = true", ", capacity = 100"] {
            let redis = RedisServer::start();
            let rule = format!(
                "key = \"ip\"\nshared = \"{mode}\"\nwindows = [{{ limit = 100, period = \"{WINDOW}\"{kind} }}]"
            );
            let gateway = Process::spawn(&format!("workers = 1\n{}", config(&redis, &upstream, "", &[("r", &rule)])));
            let mut client = gateway.client();
            let logged = |text: &str| gateway.stderr().matches(text).count();
            let mut outages = 0;
            let mut resume = || {
                outages += 1;
                // Leased tokens may have sufficed for the requests so far, so requests of another client notice the outage.
                eventually("the outage is noticed", || {
                    Client::connect_from("127.0.0.2", gateway.http).get("/a");
                    logged("cannot be reached") == outages
                });
                redis.resume();
                eventually_eq(|| logged("are reachable again"), outages);
            };
            assert_eq!(admitted(&mut client, "/a", 80), 80, "{mode}{kind}");
            redis.suspend();
            assert_eq!(admitted(&mut client, "/a", 5), 5, "{mode}{kind}");
            resume();
            assert_eq!(admitted(&mut client, "/a", 5), 5, "{mode}{kind}");
            redis.suspend();
            assert_eq!(admitted(&mut client, "/a", 20), 10, "{mode}{kind}");
            resume();
            assert_eq!(admitted(&mut client, "/a", 5), 0, "{mode}{kind}");
        }
    }
}

/// The store stops and continues at random moments, so that replies come when their requests were counted locally.
#[test]
fn a_window_admits_its_limit_while_the_store_hangs_repeatedly() {
    const LIMIT: usize = 200;
    let upstream = upstream_with_cost();
    let mut rng = seeded_rng();
    thread::scope(|scope| {
        for kind in ["", ", start = \"first-request\"", ", sliding = true", ", capacity = 200"] {
            let (mut rng, upstream) = (rng.fork(), &upstream);
            scope.spawn(move || {
                let redis = RedisServer::start();
                let rule = format!(
                    "key = \"ip\"\nshared = \"lease\"\nwindows = [{{ limit = {LIMIT}, period = \"{WINDOW}\"{kind} }}]"
                );
                let toml = config(&redis, upstream, "", &[("r", &rule)]);
                // One worker gets the late replies and counts the requests.
                let gateway = Process::spawn(&format!("workers = 1\n{toml}"));
                let (mut client, mut total) = (gateway.client(), 0);
                for _ in 0..20 {
                    total += admitted(&mut client, "/a", rng.usize(1..=25));
                    redis.suspend();
                    total += admitted(&mut client, "/a", rng.usize(1..=25));
                    redis.resume();
                    thread::sleep(Duration::from_millis([0, 0, 50, 200, 500][rng.usize(..5)]));
                    assert!(total <= LIMIT, "{total} admitted{kind}");
                }
                // Tokens that late replies granted beyond the limit were returned.
                eventually(&format!("all of the limit can be used{kind}"), || {
                    total += admitted(&mut client, "/a", 1);
                    total == LIMIT
                });
                assert_eq!(admitted(&mut client, "/a", 20), 0, "{kind}");
            });
        }
    });
}

#[test]
fn a_response_cost_holds_its_limit_in_an_outage() {
    let upstream = upstream_with_cost();
    for mode in ["lease", "exact"] {
        for kind in ["", ", start = \"first-request\"", ", sliding = true"] {
            for reserve in [0, 1] {
                let redis = RedisServer::start();
                let rule = format!(
                    "key = \"header:x-key\"\non_missing_key = \"refuse\"\nshared = \"{mode}\"\n\
                     cost = {{ response-header = \"x-cost\", reserve = {reserve}, max = 1000 }}\n\
                     windows = [{{ limit = 10, period = \"{WINDOW}\"{kind} }}]"
                );
                let gateway = start(&redis, &upstream, "", &[("r", &rule)]);
                let mut client = gateway.client();
                let mut get = |key: &str, cost: u32| client.get_with(&format!("/{cost}"), &[("X-Key", key)]);
                for (key, cost) in [("in-debt", 20), ("exhausted", 10), ("half", 5)] {
                    get(key, cost).expect(200);
                }
                let used = |key: &str| redis.keys().iter().any(|name| name.contains(key));
                eventually("the store has the costs", || ["in-debt", "exhausted", "half"].into_iter().all(used));
                redis.suspend();
                for _ in 0..4 {
                    get("other", 0);
                }
                let case = format!("{mode}{kind}, reserve {reserve}");
                for key in ["in-debt", "exhausted"] {
                    assert_eq!([get(key, 1), get(key, 1)].map(|response| response.status), [429, 429], "{case}, {key}");
                }
                for (key, left) in [("new", [9, 8, 7]), ("half", [4, 3, 2])] {
                    let responses = [get(key, 1), get(key, 1), get(key, 1)];
                    assert_eq!(responses.map(|response| remaining(&response, "r")), left, "{case}, {key}");
                }
            }
        }
    }
}
