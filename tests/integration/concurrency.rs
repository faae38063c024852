//! Rules with `concurrent`: requests of a key under way at a time. `concurrency_ends` covers the ways in which requests end.

use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, HOST, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::RedisServer;
use crate::support::upgrade_chain::UpgradeChain;
use crate::support::{TempDir, eventually, eventually_eq, one_rule};

const USER: &str = "key = \"header:x-user\"\non_missing_key = \"skip\"\n";

/// One rule `r` that counts by the field X-User.
fn by_user(settings: &str) -> Gateway {
    Gateway::start(&toml(settings))
}

fn toml(settings: &str) -> String {
    format!("workers = 2\n{}", one_rule(&format!("{USER}{settings}")))
}

fn under_way(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_concurrent_requests", &[("rule", "r")])
}

fn decisions(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", outcome)])
}

/// Begins an upload, which is under way until [`finish`].
fn begin(gateway: &Gateway, user: &str) -> Client {
    let mut client = gateway.client();
    client.send(format!("POST /upload HTTP/1.1\r\nHost: {HOST}\r\nX-User: {user}\r\nContent-Length: 3\r\n\r\na"));
    client
}

/// Begins an upload, and returns once it is under way.
fn hold(gateway: &Gateway, user: &str) -> Client {
    let before = under_way(gateway);
    let client = begin(gateway, user);
    eventually("the upload is under way", || under_way(gateway) == before + 1);
    client
}

/// Begins an upload, and returns once it waits.
fn queue(gateway: &Gateway, user: &str) -> Client {
    let before = decisions(gateway, "delayed");
    let client = begin(gateway, user);
    eventually("the upload waits", || decisions(gateway, "delayed") == before + 1);
    client
}

fn finish(mut client: Client) -> HttpResponse {
    client.send("bc");
    client.read_response_to("POST").expect(200)
}

fn get(gateway: &Gateway, user: &str) -> HttpResponse {
    gateway.get_with("/a", &[("X-User", user)])
}

#[test]
fn each_key_has_its_own_slots() {
    let gateway = by_user("concurrent = 2");
    let held = [hold(&gateway, "a"), hold(&gateway, "a")];
    get(&gateway, "a").expect(429);
    get(&gateway, "b").expect(200);
    gateway.get("/without-key").expect(200);
    held.into_iter().for_each(|client| drop(finish(client)));
    eventually_eq(|| under_way(&gateway), 0);
    get(&gateway, "a").expect(200);
    assert_eq!((decisions(&gateway, "admitted"), decisions(&gateway, "refused")), (4, 1));
}

#[test]
fn responses_state_the_limit() {
    let gateway = by_user("concurrent = 2");
    let response = get(&gateway, "a").expect(200);
    assert_eq!(response.field("ratelimit-policy"), Some("\"r\";q=2;qu=\"concurrent-requests\""));
    assert_eq!(response.field("ratelimit"), Some("\"r\";r=1"));
    eventually_eq(|| under_way(&gateway), 0);
    let _held = [hold(&gateway, "a"), hold(&gateway, "a")];
    let refused = get(&gateway, "a").expect(429);
    assert_eq!(refused.field("ratelimit"), Some("\"r\";r=0"));
    assert_eq!(refused.field("retry-after"), Some("1"));
    let problem = refused.problem();
    assert_eq!((&problem["violated-policies"], &problem["retry-after"]), (&json!(["r"]), &json!(1)));
    assert_eq!(gateway.metrics().sum("transom_refused_total", &[("rule", "r"), ("window", "r")]), 1);
}

#[test]
fn a_request_is_charged_with_a_slot_and_in_its_windows_or_in_neither() {
    let gateway = by_user("concurrent = 1\nwindows = [\"3/minute\"]");
    let response = get(&gateway, "a").expect(200);
    let policy = "\"r\";q=3;w=60, \"r-concurrent\";q=1;qu=\"concurrent-requests\"";
    assert_eq!(response.field("ratelimit-policy"), Some(policy));
    assert_eq!(response.field("ratelimit"), Some("\"r\";r=2;t=60, \"r-concurrent\";r=0"));
    eventually_eq(|| under_way(&gateway), 0);
    let held = hold(&gateway, "a");
    for _ in 0..5 {
        let refused = get(&gateway, "a").expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["r-concurrent"]));
        assert_eq!(refused.field("ratelimit"), Some("\"r\";r=1;t=60, \"r-concurrent\";r=0"));
    }
    finish(held);
    eventually_eq(|| under_way(&gateway), 0);
    let held = hold(&gateway, "a");
    // Both limits are reached; the window blocks longer.
    let refused = get(&gateway, "a").expect(429);
    assert_eq!(refused.problem()["violated-policies"], json!(["r", "r-concurrent"]));
    assert_eq!(refused.field("retry-after"), Some("60"));
    finish(held);
    eventually_eq(|| under_way(&gateway), 0);
    // Refused by the window alone: the response states the free slot, and no slot is held.
    let mut client = gateway.client();
    for _ in 0..3 {
        let refused = client.get_with("/a", &[("X-User", "a")]).expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["r"]));
        assert_eq!(refused.field("ratelimit"), Some("\"r\";r=0;t=60, \"r-concurrent\";r=1"));
    }
    assert_eq!(under_way(&gateway), 0);
    gateway.advance_s(60);
    get(&gateway, "a").expect(200);
}

#[test]
fn slots_of_several_rules_are_taken_together() {
    let gateway = Gateway::start(&format!(
        "workers = 2\n[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\n{USER}concurrent = 1\n\
         [rules.all]\nkey = \"global\"\nconcurrent = 2\nwindows = [\"100/hour\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"all\", \"r\"]\n"
    ));
    let held = [hold(&gateway, "a"), hold(&gateway, "b")];
    for (user, violated) in [("a", json!(["r"])), ("c", json!(["all-concurrent"]))] {
        let refused = get(&gateway, user).expect(429);
        assert_eq!(refused.problem()["violated-policies"], violated);
        assert_eq!(remaining_text(&refused, "all"), "98", "no window is charged");
    }
    assert_eq!(under_way(&gateway), 2, "a slot of the refused request is released");
    held.into_iter().for_each(|client| drop(finish(client)));
    eventually_eq(|| under_way(&gateway), 0);
    get(&gateway, "c").expect(200);
}

/// `r` of an item of RateLimit.
fn remaining_text(response: &HttpResponse, name: &str) -> String {
    let text = response.field("ratelimit").unwrap_or_default();
    let item = text.split(", ").find_map(|item| item.strip_prefix(&format!("\"{name}\";r=")));
    item.unwrap_or_else(|| panic!("{text}")).split(';').next().unwrap_or_default().to_owned()
}

#[test]
fn refused_requests_count_where_that_is_configured() {
    let gateway = by_user("concurrent = 1\nwindows = [\"3/minute\"]\ncount_refused = true");
    let held = hold(&gateway, "a");
    assert_eq!(remaining_text(&get(&gateway, "a").expect(429), "r"), "1");
    assert_eq!(remaining_text(&get(&gateway, "a").expect(429), "r"), "0");
    finish(held);
    get(&gateway, "a").expect(429);
}

#[test]
fn a_shadow_rule_reports_and_never_refuses() {
    let gateway = by_user("concurrent = 1\nwindows = [\"2/minute\"]\non_limit = \"shadow\"");
    let held = hold(&gateway, "a");
    let passed = get(&gateway, "a").expect(200);
    assert_eq!(passed.field("ratelimit"), None);
    assert_eq!((decisions(&gateway, "admitted"), decisions(&gateway, "shadowed")), (1, 1));
    assert_eq!(under_way(&gateway), 1);
    finish(held);
    eventually_eq(|| under_way(&gateway), 0);
    // The shadowed request was charged in no window: one more fits, and then the window is full.
    finish(hold(&gateway, "a"));
    eventually_eq(|| under_way(&gateway), 0);
    finish(begin(&gateway, "a"));
    assert_eq!((decisions(&gateway, "admitted"), decisions(&gateway, "shadowed")), (2, 2));
    assert_eq!(under_way(&gateway), 0);
}

#[test]
fn plans_overrides_and_exemptions_apply() {
    let rule = "key = \"header:x-user\"\non_missing_key = \"skip\"\nconcurrent = 1\nexemptions = [\"key:root\"]\n\
        [rules.r.plans.gold]\nconcurrent = 2\n[rules.r.plans.slow]\nwindows = [\"1/minute\"]\n\
        [[rules.r.overrides]]\nkey = \"bob\"\nconcurrent = 3\n";
    let clients =
        "[clients.g]\nplan = \"gold\"\nsubjects = [\"g\"]\n[clients.s]\nplan = \"slow\"\nsubjects = [\"s\"]\n";
    let toml = format!("{}\n[clients]\nfile = \"clients.toml\"\nsubject = \"header:x-user\"\n", one_rule(rule));
    let gateway = Gateway::start_with(&toml, clients);
    for (user, slots) in [("a", 1), ("g", 2), ("bob", 3), ("s", 1)] {
        let held: Vec<Client> = (0..slots).map(|_| hold(&gateway, user)).collect();
        get(&gateway, user).expect(429);
        held.into_iter().for_each(|client| drop(finish(client)));
        eventually_eq(|| under_way(&gateway), 0);
    }
    // The plan `slow` has the slots of the rule, and a window of its own.
    let refused = get(&gateway, "s").expect(429);
    assert_eq!(refused.problem()["violated-policies"], json!(["r"]));
    let exempt = begin(&gateway, "root");
    get(&gateway, "root").expect(200);
    finish(exempt);
    assert_eq!(under_way(&gateway), 0);
}

#[test]
fn a_reload_changes_the_limit_for_requests_under_way() {
    let (of_3, of_1) = (toml("concurrent = 3"), toml("concurrent = 1"));
    let mut gateway = Gateway::start(&of_3);
    let held: Vec<Client> = (0..2).map(|_| hold(&gateway, "a")).collect();
    gateway.reload_and_wait(&of_1);
    get(&gateway, "a").expect(429);
    gateway.reload_and_wait(&of_3);
    let third = hold(&gateway, "a");
    get(&gateway, "a").expect(429);
    // Requests of a rule that is gone end as others, and count again when the rule is back.
    gateway.reload_and_wait(
        "workers = 2\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n",
    );
    get(&gateway, "a").expect(200);
    finish(third);
    eventually_eq(|| under_way(&gateway), 2);
    gateway.reload_and_wait(&of_3);
    let third = hold(&gateway, "a");
    get(&gateway, "a").expect(429);
    held.into_iter().chain([third]).for_each(|client| drop(finish(client)));
    eventually_eq(|| under_way(&gateway), 0);
}

const DELAY: &str = "concurrent = 1\non_limit = \"delay\"\n";

#[test]
fn delayed_requests_get_slots_in_order_of_arrival() {
    let gateway = by_user(&format!("{DELAY}max_delay = \"1h\""));
    let first = hold(&gateway, "a");
    let mut waiting: Vec<Client> = (0..4).map(|_| queue(&gateway, "a")).collect();
    get(&gateway, "b").expect(200);
    // One that goes away leaves the queue.
    drop(waiting.remove(1));
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", "499")]), 1);
    assert_eq!(under_way(&gateway), 1);
    // Each next one has its slot when the one before has ended, and only then sends the rest of its upload.
    let mut last = finish(first);
    for client in waiting {
        eventually_eq(|| under_way(&gateway), 1);
        last = finish(client);
    }
    assert_eq!(remaining(&last, "r"), 0);
    eventually_eq(|| under_way(&gateway), 0);
    assert_eq!((decisions(&gateway, "admitted"), decisions(&gateway, "delayed")), (2, 4));
}

#[test]
fn no_request_overtakes_those_that_wait() {
    let gateway = by_user(&format!("{DELAY}max_delay = \"1h\"\nmax_waiting = 2"));
    let first = hold(&gateway, "a");
    let mut second = queue(&gateway, "a");
    let third = queue(&gateway, "a");
    // Too many wait already.
    get(&gateway, "a").expect(429);
    second.send("bc");
    third.stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(third.stream.peek(&mut [0]).is_err(), "a response came too early");
    third.stream.set_read_timeout(Some(crate::support::DEADLINE)).unwrap();
    finish(first);
    second.read_response_to("POST").expect(200);
    finish(third);
    eventually_eq(|| under_way(&gateway), 0);
    let held = hold(&gateway, "a");
    drop(queue(&gateway, "a"));
    finish(held);
    eventually_eq(|| under_way(&gateway), 0);
}

#[test]
fn a_request_waits_no_longer_than_max_delay() {
    let gateway = by_user(&format!("{DELAY}max_delay = \"5s\"\nwindows = [\"9/hour\"]"));
    let held = hold(&gateway, "a");
    let mut waiting = queue(&gateway, "a");
    gateway.advance_s(5);
    let refused = waiting.read_response_to("POST").expect(429);
    assert_eq!(refused.problem()["violated-policies"], json!(["r-concurrent"]));
    assert_eq!(remaining_text(&refused, "r"), "8", "no window is charged");
    finish(held);
    eventually_eq(|| under_way(&gateway), 0);
    get(&gateway, "a").expect(200);
}

#[test]
fn a_request_that_waited_for_a_slot_may_wait_for_a_window() {
    let gateway = by_user(&format!("{DELAY}max_delay = \"1h\"\nwindows = [\"1/minute\"]"));
    let held = hold(&gateway, "a");
    let mut waiting = queue(&gateway, "a");
    waiting.send("bc");
    finish(held);
    eventually_eq(|| under_way(&gateway), 1);
    gateway.advance_s(60);
    let response = waiting.read_response_to("POST").expect(200);
    assert_eq!((remaining_text(&response, "r"), remaining_text(&response, "r-concurrent")), ("0".into(), "0".into()));
    eventually_eq(|| under_way(&gateway), 0);
    assert_eq!((decisions(&gateway, "admitted"), decisions(&gateway, "delayed")), (1, 1));
}

/// Otherwise one client could use up a limit for all clients with requests that only wait.
#[test]
fn a_waiting_request_holds_no_slot_of_a_limit_for_all_clients() {
    let gateway = Gateway::start(&format!(
        "workers = 2\n[upstreams.u]\nbuiltin = \"echo\"\n[rules.all]\nkey = \"global\"\nconcurrent = 2\n\
         [rules.r]\n{USER}concurrent = 1\non_limit = \"delay\"\nmax_delay = \"1h\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"all\", \"r\"]\n"
    ));
    let first = hold(&gateway, "a");
    let waiting = [queue(&gateway, "a"), queue(&gateway, "a")];
    assert_eq!(gateway.metrics().sum("transom_concurrent_requests", &[("rule", "all")]), 1);
    finish(hold(&gateway, "b"));
    finish(first);
    waiting.into_iter().for_each(|client| drop(finish(client)));
}

/// A request waits for slots of two rules in turn. A rule that refuses is asked first.
#[test]
fn a_request_waits_for_several_slots_in_turn() {
    let rule = |name: &str, key: &str, limit: u32| {
        format!("[rules.{name}]\n{key}concurrent = {limit}\non_limit = \"delay\"\nmax_delay = \"1h\"\n")
    };
    let gateway = Gateway::start(&format!(
        "workers = 2\n[upstreams.u]\nbuiltin = \"echo\"\n{}{}[rules.hard]\nkey = \"path\"\nconcurrent = 3\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"all\", \"r\", \"hard\"]\n",
        rule("r", USER, 1),
        rule("all", "key = \"global\"\n", 2)
    ));
    let in_rule = |rule: &str| gateway.metrics().sum("transom_concurrent_requests", &[("rule", rule)]);
    let (a, b) = (hold(&gateway, "a"), hold(&gateway, "b"));
    let second_a = queue(&gateway, "a");
    assert_eq!((in_rule("r"), in_rule("all"), in_rule("hard")), (2, 2, 3));
    begin(&gateway, "c").read_response_to("POST").expect(429);
    // The end of the first request frees a slot of both rules, and the one that waits takes both.
    finish(a);
    finish(b);
    finish(second_a);
    eventually("all slots are free", || ["r", "all", "hard"].into_iter().all(|rule| in_rule(rule) == 0));
}

#[test]
fn the_decision_api_takes_no_slot_and_shows_those_in_use() {
    let gateway = by_user("concurrent = 1\nwindows = [\"5/minute\"]");
    let query = |operation: &str| {
        let body = json!({"rule": "r", "key": "a"}).to_string();
        Client::connect(gateway.admin).post(&format!("/v1/{operation}"), body).expect(200).json()
    };
    let held = hold(&gateway, "a");
    let decided = query("limit");
    assert_eq!((&decided["allowed"], &decided["count"]), (&json!(true), &json!(2)));
    assert!(decided.get("concurrent").is_none());
    let expected = json!([{"name": "r-concurrent", "count": 1, "limit": 1, "remaining": 0}]);
    assert_eq!(query("value")["concurrent"], expected);
    finish(held);
    eventually_eq(|| query("value")["concurrent"][0]["count"].clone(), json!(0));
    assert_eq!(under_way(&gateway), 0);
}

#[test]
fn other_styles_of_fields_do_not_mention_slots() {
    let gateway = by_user("concurrent = 1\nwindows = [\"5/minute\"]\nheaders = \"legacy\"");
    let _held = hold(&gateway, "a");
    let refused = get(&gateway, "a").expect(429);
    assert_eq!((refused.field("ratelimit"), refused.field("x-ratelimit-remaining")), (None, Some("4")));
    let gateway = by_user("concurrent = 1\nheaders = \"off\"");
    let _held = hold(&gateway, "a");
    assert_eq!(get(&gateway, "a").expect(429).field("ratelimit"), None);
}

fn shared(redis: &RedisServer, mode: &str, rule: &str) -> Process {
    Process::spawn(&format!(
        "{}\n[counters.shared]\nredis = \"{}\"\nmode = \"{mode}\"\nprefix = \"{mode}\"\ntimeout = \"10s\"\n",
        toml(rule),
        redis.url()
    ))
}

fn upload(process: &Process, body: &str) -> Client {
    let mut client = process.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nX-User: a\r\nContent-Length: 3\r\n\r\n{body}"));
    client
}

/// The store decides windows after the slot is taken. No slot is held when the store refuses.
#[test]
fn slots_and_shared_windows_are_taken_together() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let process = shared(&redis, mode, "concurrent = 1\nwindows = [\"3/366d\"]");
        let under_way = || process.metrics().sum("transom_concurrent_requests", &[("rule", "r")]);
        let admitted = || process.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "admitted")]);
        for charged in 1..=3 {
            let held = upload(&process, "a");
            // The store has replied.
            eventually_eq(admitted, charged);
            assert_eq!(under_way(), 1);
            let refused = upload(&process, "abc").read_response_to("POST").expect(429);
            let violated = if charged < 3 { json!(["r-concurrent"]) } else { json!(["r", "r-concurrent"]) };
            assert_eq!(refused.problem()["violated-policies"], violated, "{mode}");
            finish(held);
            eventually_eq(under_way, 0);
        }
        let refused = upload(&process, "abc").read_response_to("POST").expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["r"]), "{mode}");
        assert_eq!(under_way(), 0);
    }
}

/// Of a key that this gateway has not seen, and of one whose usage it knows.
#[test]
fn a_refusal_for_a_slot_states_shared_windows_as_they_are() {
    let redis = RedisServer::start();
    let rule = |mode: &str| {
        format!(
            "[rules.{mode}]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nshared = \"{mode}\"\nwindows = [\"9/30d\"]\n"
        )
    };
    let process = Process::spawn(&format!(
        "[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.slots]\nkey = \"global\"\nconcurrent = 1\n{}{}\
         [[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"slots\", \"exact\", \"lease\"]\n",
        redis.url(),
        rule("exact"),
        rule("lease"),
    ));
    let get = |key: &str| process.client().get_with("/a", &[("X-Key", key)]);
    get("known").expect(200);
    let _held = upload(&process, "a");
    eventually_eq(|| process.metrics().sum("transom_concurrent_requests", &[("rule", "slots")]), 1);
    for (key, left) in [("unknown", 9), ("known", 8)] {
        let refused = get(key).expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["slots"]), "{key}");
        assert_eq!(refused.field("retry-after"), Some("1"), "{key}");
        for mode in ["exact", "lease"] {
            assert_eq!(remaining(&refused, mode), left, "{key}: {:?}", refused.field("ratelimit"));
        }
    }
}

#[test]
fn a_slot_refusal_starts_the_penalty_of_a_full_window() {
    let rule =
        "key = \"global\"\nconcurrent = 1\n[rules.pen]\nkey = \"ip\"\nwindows = [\"1/minute\"]\npenalty = \"1h\"";
    let gateway = Gateway::start(&one_rule(rule).replace("rules = [\"r\"]", "rules = [\"r\", \"pen\"]"));
    let held = hold(&gateway, "a");
    assert_eq!(get(&gateway, "a").expect(429).field("retry-after"), Some("3600"));
    finish(held);
    gateway.advance_s(60);
    eventually_eq(|| under_way(&gateway), 0);
    assert_eq!(get(&gateway, "a").expect(429).problem()["violated-policies"], json!(["pen-penalty"]));
}

#[test]
fn a_shared_window_is_charged_after_the_wait_for_a_slot() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let process = shared(&redis, mode, &format!("{DELAY}max_delay = \"1h\"\nwindows = [\"2/366d\"]"));
        let sum = |name: &str, labels: &[(&str, &str)]| process.metrics().sum(name, labels);
        let held = upload(&process, "a");
        eventually_eq(|| sum("transom_concurrent_requests", &[]), 1);
        let mut second = upload(&process, "abc");
        eventually_eq(|| sum("transom_decisions_total", &[("outcome", "delayed")]), 1);
        let mut third = upload(&process, "abc");
        eventually_eq(|| sum("transom_decisions_total", &[("outcome", "delayed")]), 2);
        finish(held);
        second.read_response_to("POST").expect(200);
        let refused = third.read_response_to("POST").expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["r"]), "{mode}");
        eventually_eq(|| sum("transom_concurrent_requests", &[]), 0);
    }
}

/// Slots are not in the counters file. The old process of an upgrade keeps those of its requests, waiting ones included.
#[test]
fn each_process_counts_its_own_requests() {
    let scratch = TempDir::new();
    let file = scratch.path().join("counters");
    let rule = toml(&format!("{DELAY}max_delay = \"1h\"\nmax_waiting = 1\nwindows = [\"9/366d\"]"));
    let chain = UpgradeChain::start(&format!("{rule}\n[counters]\ncapacity = 64\nfile = \"{}\"\n", file.display()));
    let old = &chain.first;
    let sum = |name: &str| old.metrics().sum(name, &[("rule", "r")]);
    let held = upload(old, "a");
    eventually_eq(|| sum("transom_concurrent_requests"), 1);
    let waiting = upload(old, "a");
    eventually("the upload waits", || {
        old.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "delayed")]) == 1
    });
    chain.upgrade();
    // The old process, which may accept a last connection, has no free slot and no place in its queue.
    let mut response = HttpResponse::default();
    eventually("the new process serves", || {
        response = upload(old, "abc").read_response_to("POST");
        response.status == 200
    });
    assert_eq!(remaining_text(&response, "r"), "7", "windows continue, and the waiting request is not charged yet");
    assert_eq!(remaining_text(&response, "r-concurrent"), "0");
    eventually_eq(|| sum("transom_concurrent_requests"), 0);
    finish(held);
    assert_eq!(remaining_text(&finish(waiting), "r"), "6");
}
