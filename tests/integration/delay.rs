//! Requests that are delayed until a later window.
//!
//! A waiter reads the gateway's clock when its window should begin, and every second. With a manual clock, no request passes
//! before the test advances the clock, and waiters pass soon after that.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Upstream, reply};
use crate::support::{DEADLINE, eventually, one_rule};

/// A configuration with one delaying rule.
fn toml(upstream: &Upstream, windows: &str, more: &str) -> String {
    format!(
        "workers = 1\n{}[rules.r]\nkey = \"ip\"\nwindows = {windows}\non_limit = \"delay\"\n{more}\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

const ONE_PER_300_MS: &str = "[\"1/300ms\"]";

fn delayed(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "delayed")])
}

/// Sends a request that has to wait, and returns once it waits.
fn send_and_wait(gateway: &Gateway, path: &str) -> Client {
    let before = delayed(gateway);
    let mut client = gateway.client();
    client.send(request("GET", path, &[], b""));
    eventually("the request waits", || delayed(gateway) == before + 1);
    client
}

fn targets(upstream: &Upstream) -> Vec<String> {
    upstream.received().into_iter().map(|received| received.target).collect()
}

/// Fails if a response comes within half a second.
fn assert_still_waits(client: &mut Client) {
    client.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let error = client.stream.peek(&mut [0]).expect_err("a response came too early");
    assert!([ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()), "{error}");
    client.stream.set_read_timeout(Some(DEADLINE)).unwrap();
}

fn advance_window(gateway: &Gateway) {
    gateway.advance(Duration::from_millis(300));
}

#[test]
fn delayed_requests_pass_in_order_of_arrival() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE_PER_300_MS, "max_delay = \"2s\""));
    gateway.get("/1").expect(200);
    let mut clients: Vec<Client> = (2..=4).map(|n| send_and_wait(&gateway, &format!("/{n}"))).collect();
    assert_eq!(targets(&upstream), ["/1"]);
    for (client, passed) in clients.iter_mut().zip(2..) {
        advance_window(&gateway);
        client.read_response().expect(200);
        let expected: Vec<String> = (1..=passed).map(|n| format!("/{n}")).collect();
        assert_eq!(targets(&upstream), expected);
    }
    // The last request used up its window; the next window is unused.
    advance_window(&gateway);
    gateway.get("/5").expect(200);
    assert_eq!(delayed(&gateway), 3);
}

#[test]
fn a_request_that_would_exceed_max_delay_is_refused_at_once() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE_PER_300_MS, "max_delay = \"600ms\""));
    gateway.get("/1").expect(200);
    let _waiters = [send_and_wait(&gateway, "/2"), send_and_wait(&gateway, "/3")];
    let refused = gateway.get("/4").expect(429);
    assert_eq!(refused.problem()["violated-policies"], serde_json::json!(["r"]));
    assert_eq!(refused.field("retry-after"), Some("1"));
    assert_eq!(remaining(&refused, "r"), 0);
    // The refusal has not used the tokens of another request.
    advance_window(&gateway);
    send_and_wait(&gateway, "/5");
}

#[test]
fn the_number_of_waiters_is_limited() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE_PER_300_MS, "max_delay = \"1d\"\nmax_waiting = 2"));
    gateway.get("/1").expect(200);
    let mut second = send_and_wait(&gateway, "/2");
    let _third = send_and_wait(&gateway, "/3");
    gateway.get("/4").expect(429);
    advance_window(&gateway);
    second.read_response().expect(200);
    send_and_wait(&gateway, "/5");
}

#[test]
fn a_waiter_that_disconnects_is_refunded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE_PER_300_MS, "max_delay = \"300ms\"\nmax_waiting = 1"));
    gateway.get("/1").expect(200);
    let leaving = send_and_wait(&gateway, "/leaving");
    gateway.get("/refused").expect(429);
    drop(leaving);
    eventually("the request is counted as cancelled", || {
        gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == 1
    });
    let mut next = send_and_wait(&gateway, "/2");
    advance_window(&gateway);
    next.read_response().expect(200);
    assert_eq!(targets(&upstream), ["/1", "/2"]);
}

#[test]
fn a_delayed_request_waits_for_its_slowest_layer() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, "[\"1/300ms\", \"2/1s\"]", "max_delay = \"2s\""));
    gateway.get("/1").expect(200);
    let mut second = send_and_wait(&gateway, "/2");
    advance_window(&gateway);
    second.read_response().expect(200);
    // The next window of 300 ms opens at 600; the next second at 1000.
    let mut third = send_and_wait(&gateway, "/3");
    gateway.advance(Duration::from_millis(699));
    assert_still_waits(&mut third);
    assert_eq!(targets(&upstream), ["/1", "/2"]);
    gateway.advance(Duration::from_millis(1));
    third.read_response().expect(200);
}

#[test]
fn a_refusing_rule_precedes_a_delaying_rule() {
    let toml = "workers = 1\n[upstreams.u]\nbuiltin = \"echo\"\n\
        [rules.r]\nkey = \"ip\"\nwindows = [\"1/300ms\"]\non_limit = \"delay\"\nmax_delay = \"2s\"\n\
        [rules.hard]\nkey = \"global\"\nwindows = [\"2/hour\"]\n\
        [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\", \"hard\"]\n";
    let gateway = Gateway::start(toml);
    gateway.get("/1").expect(200);
    let mut second = send_and_wait(&gateway, "/2");
    gateway.get("/3").expect(429);
    advance_window(&gateway);
    second.read_response().expect(200);
    gateway.get("/4").expect(429);
}

#[test]
fn the_binary_forwards_no_delayed_request_before_its_window() {
    let rule = "key = \"ip\"\nwindows = [\"1/250ms\"]\non_limit = \"delay\"\nmax_delay = \"20s\"";
    let process = Process::spawn(&one_rule(rule));
    let start = Instant::now();
    let mut clients: Vec<Client> = (0..5).map(|_| process.client()).collect();
    for client in &mut clients {
        client.send(request("GET", "/a", &[], b""));
    }
    for client in &mut clients {
        client.read_response().expect(200);
    }
    // Five windows, of which the first may be nearly over: at least three whole windows.
    assert!(start.elapsed() >= Duration::from_millis(745), "{:?}", start.elapsed());
}

/// A per-client rule that delays, and a global rule that refuses.
fn per_client_and_global(upstream: &Upstream, all: &str) -> String {
    format!(
        "workers = 1\n{}[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/minute\"]\n\
         on_limit = \"delay\"\nmax_delay = \"60s\"\n[rules.all]\nkey = \"global\"\nwindows = [\"{all}\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"all\"]\n",
        upstream.toml("u")
    )
}

fn send_and_wait_as(gateway: &Gateway, user: &str, path: &str) -> Client {
    let before = delayed(gateway);
    let mut client = gateway.client();
    client.send(request("GET", path, &[("X-User", user)], b""));
    eventually("the request waits", || delayed(gateway) == before + 1);
    client
}

#[test]
fn a_waiter_does_not_block_other_keys() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&per_client_and_global(&upstream, "5/second"));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = send_and_wait_as(&gateway, "a", "/a2");
    // The waiter is charged to the second in which it arrived, and to no other.
    let response = gateway.get_with("/b", &[("X-User", "b")]).expect(200);
    assert_eq!(remaining(&response, "all"), 2);
    gateway.advance_s(1);
    let response = gateway.get_with("/c", &[("X-User", "c")]).expect(200);
    assert_eq!(remaining(&response, "all"), 4);
    gateway.advance_s(59);
    let response = waits.read_response().expect(200);
    assert_eq!(
        (remaining(&response, "all"), remaining(&response, "r")),
        (4, 0),
        "charged to the window in which it passes"
    );
}

#[test]
fn a_waiter_that_another_rule_refuses_is_refunded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&per_client_and_global(&upstream, "2/50s"));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = send_and_wait_as(&gateway, "a", "/a2");
    // The request may pass after 60 seconds, in the second window of the other rule, which is used up before.
    gateway.advance_s(55);
    gateway.get_with("/b", &[("X-User", "b")]).expect(200);
    gateway.get_with("/c", &[("X-User", "c")]).expect(200);
    gateway.advance_s(5);
    let late = waits.read_response().expect(429);
    assert_eq!(late.problem()["violated-policies"], serde_json::json!(["all"]));
    assert_eq!(late.field("retry-after"), Some("40"));
    assert_eq!(targets(&upstream), ["/a1", "/b", "/c"]);
    // The refunded minute is available to the next request of the client.
    gateway.advance_s(45);
    gateway.get_with("/a3", &[("X-User", "a")]).expect(200);
    assert_eq!(delayed(&gateway), 1);
}

/// The window of its arrival has ended when it passes.
#[test]
fn what_a_delayed_request_was_charged_again_is_settled_by_its_response() {
    let upstream =
        Upstream::responding(|received| reply(200, &[("X-Cost", received.target.trim_start_matches('/'))], b""));
    let by_cost = "cost = { response-header = \"x-cost\", reserve = 3, max = 20 }";
    let by_status = "count_when = { status = [401] }";
    for (setting, target, used) in [(by_cost, "/0", 0), (by_cost, "/3", 3), (by_cost, "/7", 7), (by_status, "/0", 0)] {
        let settled = format!("[rules.c]\nkey = \"global\"\nwindows = [\"10/minute\"]\n{setting}\n[[routes]]");
        let toml = toml(&upstream, "[\"1/minute\"]", "max_delay = \"2m\"").replace("[[routes]]", &settled);
        let gateway = Gateway::start(&toml.replace("[\"r\"]", "[\"r\", \"c\"]"));
        gateway.get("/1").expect(200);
        let mut waits = send_and_wait(&gateway, target);
        gateway.advance_s(60);
        assert_eq!(remaining(&waits.read_response().expect(200), "c"), 10 - used, "{setting}, {target}");
    }
}

/// In a sliding window, the charge of its arrival counts beside that of its window.
#[test]
fn a_waiter_that_is_refused_for_its_own_charge_names_the_window() {
    let upstream = Upstream::always(200);
    let toml =
        per_client_and_global(&upstream, "2/2m").replace("\"2/2m\"", "{ limit = 2, period = \"2m\", sliding = true }");
    let gateway = Gateway::start(&toml);
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = send_and_wait_as(&gateway, "a", "/a2");
    gateway.advance_s(60);
    let late = waits.read_response().expect(429);
    assert_eq!(late.problem()["violated-policies"], serde_json::json!(["all"]));
    // The charge has come back.
    assert_eq!((late.field("retry-after"), remaining(&late, "all")), (Some("1"), 1));
    let refused = gateway.metrics().sum("transom_decisions_total", &[("rule", "all"), ("outcome", "refused")]);
    assert_eq!(refused, 1);
    gateway.get_with("/b", &[("X-User", "b")]).expect(200);
}

/// The window that refuses it after all starts a penalty, although the refund gives back its token.
#[test]
fn a_waiter_that_another_rule_refuses_starts_its_penalty() {
    let upstream = Upstream::always(200);
    let toml =
        per_client_and_global(&upstream, "2/2m").replace("\"2/2m\"", "{ limit = 2, period = \"2m\", sliding = true }");
    let gateway = Gateway::start(&toml.replace("key = \"global\"", "key = \"global\"\npenalty = \"1h\""));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = send_and_wait_as(&gateway, "a", "/a2");
    gateway.advance_s(60);
    assert_eq!(waits.read_response().expect(429).field("retry-after"), Some("3600"));
    assert_eq!(gateway.get_with("/b", &[("X-User", "b")]).expect(429).field("retry-after"), Some("3600"));
}

/// It counts in the windows that are open when it is refused.
#[test]
fn a_waiter_that_another_rule_refuses_counts_once_where_refusals_count() {
    let upstream = Upstream::always(200);
    let counting = "[rules.c]\nkey = \"global\"\nwindows = [\"9/hour\"]\ncount_refused = true\n[[routes]]";
    let toml = per_client_and_global(&upstream, "2/50s").replace("\"all\"]", "\"all\", \"c\"]");
    let gateway = Gateway::start(&toml.replace("[[routes]]", counting));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = send_and_wait_as(&gateway, "a", "/a2");
    gateway.advance_s(55);
    for (user, left) in [("b", 6), ("c", 5)] {
        assert_eq!(remaining(&gateway.get_with("/", &[("X-User", user)]).expect(200), "c"), left);
    }
    gateway.advance_s(5);
    assert_eq!(remaining(&waits.read_response().expect(429), "c"), 5);
    assert_eq!(remaining(&gateway.get_with("/", &[("X-User", "d")]).expect(429), "c"), 4);
}

/// Two rules delay on different keys. A request that waited for one rule and finds the other full keeps waiting; it is not
/// refused.
#[test]
fn a_request_can_be_delayed_by_two_rules_in_turn() {
    let upstream = Upstream::always(200);
    let toml = format!(
        "workers = 1\n{}[rules.r]\nkey = \"ip\"\nwindows = [\"1/1s\"]\non_limit = \"delay\"\nmax_delay = \"60s\"\n\
         [rules.b]\nkey = \"global\"\nwindows = [\"1/4s\"]\non_limit = \"delay\"\nmax_delay = \"60s\"\n\
         [[routes]]\npath = \"/ab/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"b\"]\n\
         [[routes]]\npath = \"/a/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let waits = |path: &str| {
        let all = || gateway.metrics().sum("transom_decisions_total", &[("outcome", "delayed")]);
        let before = all();
        let mut client = gateway.client();
        client.send(request("GET", path, &[], b""));
        eventually("the request waits", || all() == before + 1);
        client
    };
    gateway.get("/ab/1").expect(200);
    let mut first = waits("/ab/2");
    let mut others: Vec<Client> = (0..5).map(|n| waits(&format!("/a/{n}"))).collect();
    // When the second rule would admit the request, this second of the first rule is reserved for others. The request retries
    // within a second, and waits for the first second that is free.
    gateway.advance_s(4);
    others.drain(..3).for_each(|mut other| drop(other.read_response().expect(200)));
    (0..3).for_each(|_| assert_still_waits(&mut first));
    gateway.advance_s(4);
    let response = first.read_response().expect(200);
    assert!(response.field("ratelimit").unwrap().contains("\"b\""), "the fields have all rules");
    others.iter_mut().for_each(|other| drop(other.read_response().expect(200)));
}

/// The gateway notices the end of a connection although unread bytes precede it.
#[test]
fn a_waiter_that_disconnects_after_its_body_is_refunded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, "[\"1/1h\"]", "max_delay = \"2h\"\nmax_waiting = 2"));
    gateway.get("/1").expect(200);
    for round in 0..3 {
        let before = delayed(&gateway);
        let mut post = gateway.client();
        post.send(request("POST", "/2", &[], &[b'a'; 20_000]));
        eventually("the request waits", || delayed(&gateway) == before + 1);
        drop(post);
        let open = || gateway.metrics().sum("transom_connections", &[]);
        eventually("the connection is closed", || open() == 0);
        assert_eq!(delayed(&gateway), before + 1, "{round}");
    }
}

/// Starts 42 requests that wait for windows of two requests, and disconnects them in an order in which most have others
/// behind them. The next client of the key passes in the next window.
fn disconnect_waiters(workers: u32, order: impl Fn(usize) -> usize) {
    let upstream = Upstream::always(200);
    let toml =
        toml(&upstream, "[\"2/1s\"]", "max_delay = \"10m\"").replace("workers = 1", &format!("workers = {workers}"));
    let gateway = Gateway::start(&toml);
    gateway.get("/1").expect(200);
    gateway.get("/2").expect(200);
    let mut clients: Vec<Option<Client>> = (0..42).map(|n| Some(send_and_wait(&gateway, &format!("/{n}")))).collect();
    for index in 0..clients.len() {
        let client = order(index);
        drop(clients[client].take().expect("each disconnects once"));
        let left = clients.iter().flatten().count() as u64;
        eventually("the connection is closed", || gateway.metrics().sum("transom_connections", &[]) == left);
    }
    gateway.advance_s(1);
    gateway.get("/3").expect(200);
    assert_eq!(delayed(&gateway), 42);
    assert_eq!(targets(&upstream), ["/1", "/2", "/3"]);
}

#[test]
fn waiters_that_disconnect_first_to_last_are_refunded() {
    disconnect_waiters(1, |index| index);
}

#[test]
fn waiters_that_disconnect_last_to_first_are_refunded() {
    disconnect_waiters(1, |index| 41 - index);
}

#[test]
fn waiters_that_disconnect_in_any_order_are_refunded() {
    // 5 and 42 have no common factor, so each disconnects once.
    disconnect_waiters(1, |index| index * 5 % 42);
}

#[test]
fn waiters_of_several_workers_that_disconnect_are_refunded() {
    disconnect_waiters(2, |index| index * 11 % 42);
}
