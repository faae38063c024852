//! A client that repeats a refused request on its connection: each response is complete, current, counted and logged.

use std::fs;
use std::net::SocketAddr;

use crate::support::client::{Client, HOST, request};
use crate::support::gateway::{Gateway, START_S};
use crate::support::jwt_issuer::Issuer;
use crate::support::process::Process;
use crate::support::test_ca::TestCa;
use crate::support::tls::{TlsClient, listen};
use crate::support::{TempDir, eventually, eventually_eq, one_rule};

const TWO_PER_MINUTE: &str = "key = \"ip\"\nwindows = [\"2/minute\"]";

fn count(gateway: &Gateway, name: &str, labels: &[(&str, &str)]) -> u64 {
    gateway.metrics().sum(name, labels)
}

/// The bytes of a response, without its request id.
fn get_raw(client: &mut Client) -> String {
    client.send(request("GET", "/a", &[], b""));
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n") {
        text.push(char::from(client.read_exactly(1)[0]));
    }
    let length = text.split("content-length: ").nth(1).unwrap().split_once("\r\n").unwrap().0.parse().unwrap();
    let (before, id) = text.split_once("x-request-id: ").unwrap();
    let (_, after) = id.split_once("\r\n").unwrap();
    format!("{before}{after}{}", std::str::from_utf8(&client.read_exactly(length)).unwrap())
}

#[test]
fn a_repeated_refusal_is_identical_and_counted() {
    for (form, code) in [("", "429"), ("status = 499", "499"), ("status = 503\nbody = \"later\\n\"", "503")] {
        let rule = format!("key = \"ip\"\nwindows = [\"2/minute\", \"3/hour\"]\n{form}");
        let gateway = Gateway::start(&one_rule(&rule));
        let mut client = gateway.client();
        client.get("/a").expect(200);
        client.get("/a").expect(200);
        let first = get_raw(&mut gateway.client());
        assert!(
            first.starts_with("HTTP/1.1 ") && first.contains("\r\ndate: ") && first.contains(" GMT\r\n"),
            "{first}"
        );
        for _ in 0..9 {
            assert_eq!(get_raw(&mut client), first);
        }
        for (name, labels) in [
            ("transom_requests_total", [("route", "all"), ("code", code)]),
            ("transom_decisions_total", [("rule", "r"), ("outcome", "refused")]),
            ("transom_refused_total", [("rule", "r"), ("window", "r-minute")]),
        ] {
            eventually_eq(|| count(&gateway, name, &labels), 10);
        }
        assert_eq!(count(&gateway, "transom_refused_total", &[("window", "r-hour")]), 0);
        for name in ["transom_request_duration_seconds_count", "transom_decision_duration_seconds_count"] {
            eventually_eq(|| count(&gateway, name, &[]), 12);
        }
    }
}

#[test]
fn a_repeated_request_passes_after_its_window() {
    let gateway = Gateway::start(&one_rule(TWO_PER_MINUTE));
    let mut client = gateway.client();
    for _ in 0..4 {
        let statuses = [0; 6].map(|_| client.get("/a").status);
        assert_eq!(statuses, [200, 200, 429, 429, 429, 429]);
        gateway.advance_s(60);
    }
}

#[test]
fn a_repeated_request_sees_a_changed_configuration() {
    let mut gateway = Gateway::start(&one_rule(TWO_PER_MINUTE));
    let mut client = gateway.client();
    let mut next = |count: usize| (0..count).map(|_| client.get("/a").status).collect::<Vec<_>>();
    assert_eq!(next(6), [200, 200, 429, 429, 429, 429]);
    gateway.reload(&one_rule("key = \"ip\"\nwindows = [\"4/minute\"]"));
    eventually("the new limit applies", || next(1) == [200]);
    assert_eq!(next(5), [200, 429, 429, 429, 429]);
    gateway.reload(&one_rule(TWO_PER_MINUTE).replace("/{*rest}", "/b"));
    eventually("the route is removed", || next(1) == [404]);
}

#[test]
fn heads_that_differ_in_one_byte_are_distinguished() {
    let gateway =
        Gateway::start(&one_rule("key = \"header:x-key\"\non_missing_key = \"refuse\"\nwindows = [\"2/minute\"]"));
    let mut client = gateway.client();
    let mut status_of = |key: &str| client.get_with("/a", &[("X-Key", key)]).status;
    assert_eq!([0; 5].map(|_| status_of("one")), [200, 200, 429, 429, 429]);
    assert_eq!([0; 5].map(|_| status_of("onf")), [200, 200, 429, 429, 429]);
    assert_eq!(["one", "ona", "one", "one", "one", "ona", "ona"].map(status_of), [429, 200, 429, 429, 429, 200, 429]);
}

/// A connection on which the same request has been refused three times.
fn connection_refused_three_times(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    while client.get("/a").status != 429 {}
    client.get("/a").expect(429);
    client.get("/a").expect(429);
    client
}

#[test]
fn split_and_pipelined_requests_are_all_answered() {
    let gateway = Gateway::start(&one_rule(TWO_PER_MINUTE));
    let head = request("GET", "/a", &[], b"");
    for pieces in [1, 2, 3, 7] {
        let mut client = connection_refused_three_times(&gateway);
        let many = head.repeat(10);
        for piece in many.chunks(many.len().div_ceil(pieces)) {
            client.send(piece);
        }
        for _ in 0..10 {
            client.read_response().expect(429);
        }
        let at = head.len() / 2;
        client.send(&head[..at]).send(&head[at..]).read_response().expect(429);
        client.get("/a").expect(429);
        client.get("/a").expect(429);
        // A repeated request, and the beginning of another one.
        client.send([&head[..], b"GET /b "].concat()).read_response().expect(429);
        client.send(format!("HTTP/1.1\r\nHost: {HOST}\r\n\r\n")).read_response().expect(429);
        client.get("/a").expect(429);
    }
}

#[test]
fn requests_with_bodies_are_answered_as_usual() {
    let gateway = Gateway::start(&one_rule(TWO_PER_MINUTE));
    for body in [&b""[..], b"GET /a HTTP/1.1\r\n\r\n"] {
        let mut client = connection_refused_three_times(&gateway);
        for _ in 0..4 {
            client.request("POST", "/a", &[("Expect", "100-continue")], body).expect(429);
        }
        for _ in 0..4 {
            client.request("POST", "/a", &[], body).expect(429);
        }
        for _ in 0..4 {
            let response = client.request("HEAD", "/a", &[], b"").expect(429);
            assert!(response.field("content-length").is_some_and(|length| length != "0"));
        }
        for _ in 0..4 {
            client.get_with("/a", &[("Connection", "keep-alive")]).expect(429);
        }
        for _ in 0..4 {
            client.get_with("/a", &[("Connection", "keep-alive"), ("Upgrade", "h2c")]).expect(429);
        }
        let last = client.get_with("/a", &[("Connection", "close")]).expect(429);
        assert_eq!(last.field("connection"), Some("close"));
        client.expect_closed();
    }
    // An HTTP/1.0 connection without keep-alive is closed.
    for _ in 0..3 {
        let mut client = gateway.client();
        client.send("GET /a HTTP/1.0\r\nHost: a\r\n\r\n").read_response().expect(429);
        client.expect_closed();
    }
}

/// Whether the bytes that a client has sent are in the receive queue of the gateway's socket, according to the kernel.
fn is_unread(client: &Client) -> bool {
    let port = |address: SocketAddr| format!(":{:04X}", address.port());
    let (own, other) = (port(client.stream.local_addr().unwrap()), port(client.stream.peer_addr().unwrap()));
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let candidates = table.lines().filter(|line| line.contains(&other) && line.contains(&own));
    let mut sockets = candidates.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let socket = sockets.find(|socket| socket[1].ends_with(&other) && socket[2].ends_with(&own)).unwrap();
    !socket[4].ends_with(":00000000")
}

#[test]
fn a_client_that_reads_late_receives_every_response() {
    // Large responses, so that a few of them fill the buffers.
    let body = "slow down\n".repeat(6500);
    // The gateway must not close the connection although the client reads late, also on a busy machine.
    let timeouts = "[timeouts]\nbody = \"1h\"\nrequest_head = \"1h\"\n[limits]\nmin_response_rate = 0\n";
    let gateway = Gateway::start(&format!("{}{timeouts}", one_rule(&format!("{TWO_PER_MINUTE}\nbody = {body:?}"))));
    let mut client = connection_refused_three_times(&gateway);
    let head = request("GET", "/a", &[], b"");
    let answered = || count(&gateway, "transom_requests_total", &[("code", "429")]);
    let (before, mut sent) = (answered(), 0);
    // One request at a time, until the gateway stops reading.
    loop {
        client.send(&head);
        sent += 1;
        if (0..200).all(|_| is_unread(&client)) {
            break;
        }
    }
    for _ in 0..sent {
        assert_eq!(client.read_response().expect(429).body.len(), body.len());
    }
    eventually_eq(answered, before + sent);
    client.get("/a").expect(429);
}

#[test]
fn the_last_response_before_the_close_announces_it() {
    let mut process =
        Process::spawn(&(one_rule("key = \"ip\"\nwindows = [\"1/366d\"]") + "[timeouts]\ndrain = \"1d\"\n"));
    let mut client = process.client();
    client.get("/a").expect(200);
    for _ in 0..4 {
        client.get("/a").expect(429);
    }
    process.signal("TERM");
    eventually("the gateway is not ready", || process.admin_get("/readyz").status == 503);
    // Readiness ends before the drain.
    eventually("a response announces the close", || client.get("/a").expect(429).field("connection") == Some("close"));
    client.expect_closed();
    assert_eq!(process.wait().code(), Some(0));
}

#[test]
fn a_repeated_request_over_tls_is_refused() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let gateway = Gateway::start(&(listen(&scratch, &authority.issue(&["a.test"]), "") + &one_rule(TWO_PER_MINUTE)));
    let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
    for _ in 0..3 {
        assert_eq!([0; 6].map(|_| client.get("/a").status), [200, 200, 429, 429, 429, 429]);
        gateway.advance_s(60);
    }
}

#[test]
fn each_repeated_refusal_is_logged() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let rule = "key = \"ip\"\nwindows = [\"1/366d\"]";
    let process = Process::spawn(&format!("{}[access_log]\nfile = \"{}\"\n", one_rule(rule), file.display()));
    let mut client = process.client();
    for _ in 0..8 {
        client.get("/a?b");
    }
    let lines = || fs::read_to_string(&file).unwrap_or_default();
    eventually("the lines are logged", || lines().lines().count() == 8);
    assert_eq!(lines().matches("\"path\":\"/a\"").count(), 8);
    assert_eq!(lines().matches("\"status\":429").count(), 7);
}

#[test]
fn a_token_expires_between_repeated_refusals() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let rule = "key = \"jwt:sub\"\non_missing_key = \"refuse\"\nwindows = [\"2/hour\"]";
    let gateway = Gateway::start(&format!("{}{}", one_rule(rule), issuer.keys(&scratch)));
    let token = issuer.token("HS256", &serde_json::json!({ "sub": "a", "exp": START_S + 60 }));
    let mut client = gateway.client();
    let mut status_of = || client.get_with("/a", &[("Authorization", &format!("Bearer {token}"))]).status;
    assert_eq!([0; 6].map(|_| status_of()), [200, 200, 429, 429, 429, 429]);
    gateway.advance_s(120);
    assert_eq!([0; 3].map(|_| status_of()), [401; 3]);
}
