//! Requests that end before they are complete or fully answered: each is counted and logged once.

use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::support::client::{Client, request};
use crate::support::http2_client::{
    END_HEADERS, END_STREAM, HEADERS, RST_STREAM, RawHttp2, STATUS_200, frame, header_block, request_block,
};
use crate::support::process::Process;
use crate::support::upstream::Upstream;
use crate::support::{eventually, eventually_eq, forward_all, one_rule, within};

const REFUSED_STREAM: u32 = 7;

fn echo(settings: &str) -> String {
    one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]") + settings
}

/// A gateway with an access log, and what it has counted.
struct Observed(Process);

impl Observed {
    fn start(toml: &str) -> Observed {
        let scratch = crate::support::TempDir::new();
        let log = format!("[access_log]\nfile = \"{}\"\n", scratch.path().join("access.log").display());
        let command = std::process::Command::new(crate::support::process::BINARY);
        Observed(Process::spawn_command(command, &format!("{toml}{log}"), scratch))
    }

    /// Fails unless these are all requests that were counted and logged, in any order, and these all errors.
    #[track_caller]
    fn assert_requests(&self, statuses: &[u16], errors: &[&str]) {
        let metrics = || self.0.metrics();
        eventually_eq(|| metrics().sum("transom_requests_total", &[]), statuses.len() as u64);
        for status in statuses {
            let same = statuses.iter().filter(|other| *other == status).count();
            assert_eq!(
                metrics().sum("transom_requests_total", &[("code", &status.to_string())]),
                same as u64,
                "{status}"
            );
        }
        eventually_eq(|| metrics().sum("transom_request_errors_total", &[]), errors.len() as u64);
        for error in errors {
            assert_eq!(metrics().sum("transom_request_errors_total", &[("error", error)]), 1, "{error}");
        }
        let logged = || {
            let text = fs::read_to_string(self.0.scratch.path().join("access.log")).unwrap_or_default();
            let status = |line: &str| serde_json::from_str::<Value>(line).unwrap()["status"].as_u64().unwrap() as u16;
            let mut logged: Vec<u16> = text.lines().map(status).collect();
            logged.sort_unstable();
            logged
        };
        let mut expected = statuses.to_vec();
        expected.sort_unstable();
        eventually_eq(logged, expected);
        eventually("no request is in flight", || metrics().sum("transom_requests_active", &[]) == 0);
    }
}

#[test]
fn a_head_that_its_client_leaves_incomplete() {
    let gateway = Observed::start(&echo(""));
    // The end of the stream, also behind the beginning of what could be HTTP/2, and behind another request.
    gateway.0.client().send("GET / HTTP/1.1\r\nHo").shutdown_write().expect_closed();
    gateway.0.client().send("P").shutdown_write().expect_closed();
    let mut pipelining = gateway.0.client();
    pipelining.send([request("GET", "/a", &[], b""), b"GET /b HT".to_vec()].concat());
    pipelining.read_response().expect(200);
    drop(pipelining);
    gateway.0.client().send("\r\n").shutdown_write().expect_closed();
    eventually_eq(|| gateway.0.metrics().sum("transom_request_errors_total", &[("error", "head_incomplete")]), 3);
    eventually_eq(|| gateway.0.metrics().sum("transom_requests_total", &[("code", "499")]), 3);
    eventually_eq(|| gateway.0.metrics().sum("transom_requests_total", &[]), 4);
}

#[test]
fn a_connection_without_a_request_is_no_request() {
    let gateway = Observed::start(&echo(""));
    drop(gateway.0.client());
    gateway.0.client().send("\r\n").shutdown_write().expect_closed();
    gateway.0.client().get("/a").expect(200);
    gateway.assert_requests(&[200], &[]);
}

#[test]
fn a_slow_head_that_could_begin_http2() {
    let gateway = Observed::start(&echo("[timeouts]\nrequest_head = \"300ms\"\n"));
    let mut slow = gateway.0.client();
    slow.send("P").read_response().expect(408).problem();
    slow.expect_closed();
    gateway.assert_requests(&[408], &["head_timeout"]);
}

#[test]
fn a_slow_head_behind_another_request() {
    let gateway = Observed::start(&echo("[timeouts]\nrequest_head = \"300ms\"\n"));
    let mut slow = gateway.0.client();
    slow.send([request("GET", "/a", &[], b""), b"GET /b HT".to_vec()].concat());
    slow.read_response().expect(200);
    slow.read_response().expect(408).problem();
    gateway.assert_requests(&[200, 408], &["head_timeout"]);
}

#[test]
fn a_header_block_that_its_client_leaves_incomplete() {
    let gateway = Observed::start(&echo(""));
    let mut client = RawHttp2::connect(gateway.0.http);
    client.get(1, "/a");
    assert_eq!(client.read_status(1), STATUS_200);
    client.send(frame(HEADERS, END_STREAM, 3, &request_block("GET", "/b")));
    drop(client);
    gateway.assert_requests(&[200, 499], &["head_incomplete"]);
}

#[test]
fn a_malformed_http2_head() {
    let gateway = Observed::start(&echo(""));
    let mut client = RawHttp2::connect(gateway.0.http);
    let head = [request_block("GET", "/a"), header_block(&[("Upper-Case", "1")])].concat();
    client.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, &head)).read_until(RST_STREAM);
    gateway.assert_requests(&[400], &["malformed"]);
}

#[test]
fn an_http2_connect_with_a_body() {
    let gateway = Observed::start(&echo(""));
    let mut client = RawHttp2::connect(gateway.0.http);
    let head = header_block(&[(":method", "CONNECT"), (":authority", "a:80"), ("content-length", "5")]);
    client.send(frame(HEADERS, END_HEADERS, 1, &head)).read_until(RST_STREAM);
    gateway.assert_requests(&[400], &["malformed"]);
}

#[test]
fn a_refused_http2_stream() {
    let gateway = Observed::start(&echo("[http2]\nmax_concurrent_streams = 1\n"));
    let mut client = RawHttp2::connect(gateway.0.http);
    // The first request waits for its body.
    client.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
    eventually_eq(|| gateway.0.metrics().sum("transom_requests_active", &[]), 1);
    let reset = client.get(3, "/b").read_until(RST_STREAM);
    assert_eq!((reset.stream, reset.code()), (3, REFUSED_STREAM));
    eventually_eq(|| gateway.0.metrics().sum("transom_requests_total", &[]), 1);
    drop(client);
    // Without the rest of its body, the first request is malformed.
    gateway.assert_requests(&[503, 400], &["stream_refused", "body"]);
}

/// The client opens no window for the response body.
#[test]
fn an_http2_response_that_its_client_does_not_read() {
    let gateway = Observed::start(&echo("[timeouts]\nbody = \"300ms\"\n"));
    let mut client = RawHttp2::connect_with(gateway.0.http, &[(4, 0)]);
    client.get(1, "/a").read_until(RST_STREAM);
    gateway.assert_requests(&[200], &["stalled"]);
    assert_eq!(gateway.0.metrics().sum("transom_responses_truncated_total", &[]), 1);
}

#[test]
fn a_response_that_the_upstream_cuts_off() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst");
        }
    });
    let gateway = Observed::start(&forward_all(&upstream));
    let mut client = gateway.0.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_to_end(), b"first");
    gateway.assert_requests(&[200], &["upstream"]);
    assert_eq!(gateway.0.metrics().sum("transom_responses_truncated_total", &[]), 1);
}

#[test]
fn a_client_that_leaves_within_the_response() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst");
            connection.wait_for_close();
        }
    });
    let gateway = Observed::start(&forward_all(&upstream));
    let mut client = gateway.0.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    drop(client);
    gateway.assert_requests(&[200], &[]);
    assert_eq!(gateway.0.metrics().sum("transom_responses_truncated_total", &[]), 1);
}

#[test]
fn requests_that_the_drain_aborts() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.wait_for_close();
        }
    });
    let mut gateway = Observed::start(&format!("{}[timeouts]\ndrain = \"100ms\"\n", forward_all(&upstream)));
    let mut unanswered = Client::connect(gateway.0.http);
    unanswered.send(request("GET", "/a", &[], b""));
    let mut unfinished = Client::connect(gateway.0.http);
    unfinished.send("GET /b HTTP/1.1\r\nHo");
    eventually_eq(|| gateway.0.metrics().sum("transom_upstream_requests_active", &[]), 1);
    gateway.0.signal("TERM");
    assert_eq!(within(Duration::from_millis(100), || gateway.0.wait()).code(), Some(0));
    let log = fs::read_to_string(gateway.0.scratch.path().join("access.log")).unwrap();
    assert_eq!(log.matches("\"status\":499").count(), 2, "{log}");
}
