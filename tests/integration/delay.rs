//! Requests that are delayed until a later window.
//!
//! A waiter reads the gateway's clock when its window should begin, and every second. With a manual clock, no request passes
//! before the test moves the clock, and every one passes soon after.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::Upstream;
use crate::support::{DEADLINE, eventually, one_rule};

/// One request in each window of 300 ms, or other settings.
fn toml(upstream: &Upstream, windows: &str, more: &str) -> String {
    format!(
        "workers = 1\n{}[rules.r]\nkey = \"ip\"\nwindows = {windows}\non_limit = \"delay\"\n{more}\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

const ONE: &str = "[\"1/300ms\"]";

fn delayed(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "delayed")])
}

/// Sends a request that will wait, and returns once it does.
fn waiting(gateway: &Gateway, path: &str) -> Client {
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
fn still_waits(client: &mut Client) {
    client.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let error = client.stream.peek(&mut [0]).expect_err("an answer came too early");
    assert!([ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()), "{error}");
    client.stream.set_read_timeout(Some(DEADLINE)).unwrap();
}

fn window(gateway: &Gateway) {
    gateway.advance(Duration::from_millis(300));
}

#[test]
fn delayed_requests_pass_in_order_of_arrival() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE, "max_delay = \"2s\""));
    gateway.get("/1").expect(200);
    let mut clients: Vec<Client> = (2..=4).map(|n| waiting(&gateway, &format!("/{n}"))).collect();
    assert_eq!(targets(&upstream), ["/1"]);
    for (client, passed) in clients.iter_mut().zip(2..) {
        window(&gateway);
        client.read_response().expect(200);
        let expected: Vec<String> = (1..=passed).map(|n| format!("/{n}")).collect();
        assert_eq!(targets(&upstream), expected);
    }
    // The last of them used up its window; the next is free again.
    window(&gateway);
    gateway.get("/5").expect(200);
    assert_eq!(delayed(&gateway), 3);
}

#[test]
fn a_request_that_would_exceed_max_delay_is_refused_at_once() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE, "max_delay = \"600ms\""));
    gateway.get("/1").expect(200);
    let _waiting = [waiting(&gateway, "/2"), waiting(&gateway, "/3")];
    let refused = gateway.get("/4").expect(429);
    assert_eq!(refused.problem()["violated-policies"], serde_json::json!(["r"]));
    assert_eq!(refused.field("retry-after"), Some("1"));
    assert_eq!(remaining(&refused, "r"), 0);
    // And has not used the tokens of another request.
    window(&gateway);
    waiting(&gateway, "/5");
}

#[test]
fn the_number_of_waiters_is_limited() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE, "max_delay = \"1d\"\nmax_waiting = 2"));
    gateway.get("/1").expect(200);
    let mut second = waiting(&gateway, "/2");
    let _third = waiting(&gateway, "/3");
    gateway.get("/4").expect(429);
    window(&gateway);
    second.read_response().expect(200);
    waiting(&gateway, "/5");
}

#[test]
fn a_waiter_that_disconnects_is_refunded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, ONE, "max_delay = \"300ms\"\nmax_waiting = 1"));
    gateway.get("/1").expect(200);
    let gone = waiting(&gateway, "/gone");
    gateway.get("/refused").expect(429);
    drop(gone);
    eventually("the request is recorded as given up", || {
        gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == 1
    });
    let mut next = waiting(&gateway, "/2");
    window(&gateway);
    next.read_response().expect(200);
    assert_eq!(targets(&upstream), ["/1", "/2"]);
}

#[test]
fn a_delayed_request_waits_for_its_slowest_layer() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream, "[\"1/300ms\", \"2/1s\"]", "max_delay = \"2s\""));
    gateway.get("/1").expect(200);
    let mut second = waiting(&gateway, "/2");
    window(&gateway);
    second.read_response().expect(200);
    // The next window of 300 ms opens at 600; the next second at 1000.
    let mut third = waiting(&gateway, "/3");
    gateway.advance(Duration::from_millis(699));
    still_waits(&mut third);
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
    let mut second = waiting(&gateway, "/2");
    gateway.get("/3").expect(429);
    window(&gateway);
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
    // Five windows, of which the first may be nearly over: three whole ones lie between.
    assert!(start.elapsed() >= Duration::from_millis(745), "{:?}", start.elapsed());
}

/// A per-client rule lets requests wait, beside one for all that refuses.
fn beside_all(upstream: &Upstream, all: &str) -> String {
    format!(
        "workers = 1\n{}[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/minute\"]\n\
         on_limit = \"delay\"\nmax_delay = \"60s\"\n[rules.all]\nkey = \"global\"\nwindows = [\"{all}\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"all\"]\n",
        upstream.toml("u")
    )
}

fn waiting_as(gateway: &Gateway, user: &str, path: &str) -> Client {
    let before = delayed(gateway);
    let mut client = gateway.client();
    client.send(request("GET", path, &[("X-User", user)], b""));
    eventually("the request waits", || delayed(gateway) == before + 1);
    client
}

#[test]
fn a_waiter_does_not_block_other_keys() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&beside_all(&upstream, "5/second"));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = waiting_as(&gateway, "a", "/a2");
    // It has consumed its part of the second in which it came, and of no other.
    let response = gateway.get_with("/b", &[("X-User", "b")]).expect(200);
    assert_eq!(remaining(&response, "all"), 2);
    gateway.advance_s(1);
    let response = gateway.get_with("/c", &[("X-User", "c")]).expect(200);
    assert_eq!(remaining(&response, "all"), 4);
    gateway.advance_s(59);
    let response = waits.read_response().expect(200);
    assert_eq!((remaining(&response, "all"), remaining(&response, "r")), (4, 0), "charged where it passes");
}

#[test]
fn a_waiter_that_another_rule_refuses_is_refunded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&beside_all(&upstream, "2/50s"));
    gateway.get_with("/a1", &[("X-User", "a")]).expect(200);
    let mut waits = waiting_as(&gateway, "a", "/a2");
    // The turn comes after 60 seconds, in the second window of the other rule, which is used up before.
    gateway.advance_s(55);
    gateway.get_with("/b", &[("X-User", "b")]).expect(200);
    gateway.get_with("/c", &[("X-User", "c")]).expect(200);
    gateway.advance_s(5);
    let late = waits.read_response().expect(429);
    assert_eq!(late.problem()["violated-policies"], serde_json::json!(["all"]));
    assert_eq!(late.field("retry-after"), Some("40"));
    assert_eq!(targets(&upstream), ["/a1", "/b", "/c"]);
    // The minute of its turn is free for the client's next request.
    gateway.advance_s(45);
    gateway.get_with("/a3", &[("X-User", "a")]).expect(200);
    assert_eq!(delayed(&gateway), 1);
}

/// Two rules delay on different keys: a request that waits for one and finds the other full keeps waiting, and is not refused.
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
    // Its turn in the second rule comes when this second of the first is promised to others. It looks within
    // a second, and waits on for the first one that is free.
    gateway.advance_s(4);
    others.drain(..3).for_each(|mut other| drop(other.read_response().expect(200)));
    (0..3).for_each(|_| still_waits(&mut first));
    gateway.advance_s(4);
    let response = first.read_response().expect(200);
    assert!(response.field("ratelimit").unwrap().contains("\"b\""), "all rules are told of");
    others.iter_mut().for_each(|other| drop(other.read_response().expect(200)));
}

/// The end of a connection is noticed although unread bytes precede it.
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
        eventually("the client is missed", || open() == 0);
        assert_eq!(delayed(&gateway), before + 1, "{round}");
    }
}

/// Starts 42 requests that wait for windows of two, and hangs them up in an order in which most of them have
/// others behind them; the next client of that key passes in the next window.
fn hang_up_together(workers: u32, order: impl Fn(usize) -> usize) {
    let upstream = Upstream::always(200);
    let toml =
        toml(&upstream, "[\"2/1s\"]", "max_delay = \"10m\"").replace("workers = 1", &format!("workers = {workers}"));
    let gateway = Gateway::start(&toml);
    gateway.get("/1").expect(200);
    gateway.get("/2").expect(200);
    let mut clients: Vec<Option<Client>> = (0..42).map(|n| Some(waiting(&gateway, &format!("/{n}")))).collect();
    for nth in 0..clients.len() {
        let client = order(nth);
        drop(clients[client].take().expect("each hangs up once"));
        let left = clients.iter().flatten().count() as u64;
        eventually("it is missed", || gateway.metrics().sum("transom_connections", &[]) == left);
    }
    gateway.advance_s(1);
    gateway.get("/3").expect(200);
    assert_eq!(delayed(&gateway), 42);
    assert_eq!(targets(&upstream), ["/1", "/2", "/3"]);
}

#[test]
fn waiters_that_hang_up_first_to_last_leave_nothing_behind() {
    hang_up_together(1, |nth| nth);
}

#[test]
fn waiters_that_hang_up_last_to_first_leave_nothing_behind() {
    hang_up_together(1, |nth| 41 - nth);
}

#[test]
fn waiters_that_hang_up_in_any_order_leave_nothing_behind() {
    // 5 and 42 have no common factor, so each hangs up once.
    hang_up_together(1, |nth| nth * 5 % 42);
}

#[test]
fn waiters_of_several_workers_that_hang_up_leave_nothing_behind() {
    hang_up_together(2, |nth| nth * 11 % 42);
}
