//! Limits on the size and the rate of request bodies, and on the rate at which responses are read.

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use crate::support::client::{HOST, request};
use crate::support::gateway::Gateway;
use crate::support::http2_client::{DATA, END_HEADERS, END_STREAM, HEADERS, RawHttp2, frame, header_block};
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, forward_all, one_rule, within};

const CHUNKED: &str = "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";

fn error_count(gateway: &Gateway, kind: &str) -> u64 {
    gateway.metrics().sum("transom_request_errors_total", &[("error", kind)])
}

#[test]
fn a_declared_body_above_the_limit_is_refused_early() {
    let upstream = Upstream::always(200);
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"2/day\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&format!("{toml}[limits]\nmax_body = 10\n"));
    gateway.client().post("/a", "0123456789").expect(200);
    for expect in ["", "Expect: 100-continue\r\n"] {
        let mut client = gateway.client();
        client.send(format!("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n{expect}\r\n"));
        let response = client.read_response_to("POST").expect(413);
        assert_eq!(response.problem()["detail"], "the body of the request has more than 10 bytes");
        assert!(response.informational.is_empty());
        client.expect_closed();
    }
    assert_eq!((upstream.received().len(), error_count(&gateway, "body_too_large")), (1, 2));
    // A request refused in this way is not counted.
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(429);
}

#[test]
fn chunked_bodies_are_limited_as_they_arrive() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        let Some(head) = connection.read_head() else { return };
        // The upload is aborted, so the upstream does not accept a partial body.
        assert!(connection.read_body(&head).is_none(), "the body ended normally");
    });
    let echo = one_rule("key = \"ip\"\nwindows = [\"100/day\"]");
    for toml in [forward_all(&upstream), echo] {
        let gateway = Gateway::start(&format!("{toml}[limits]\nmax_body = \"1kB\"\n"));
        let mut client = gateway.client();
        client.send(CHUNKED).send(format!("3e8\r\n{}\r\n", "x".repeat(1000)));
        client.send_if_open("1\r\nx\r\n");
        client.read_response_to("POST").expect(413).problem();
        client.shutdown_write();
        client.expect_closed();
        eventually_eq(|| error_count(&gateway, "body_too_large"), 1);
    }
}

#[test]
fn a_route_can_set_the_body_limit() {
    let routes = "[[routes]]\npath = \"/large\"\nupstream = \"u\"\nmax_body = \"unlimited\"\n\
                  [[routes]]\npath = \"/none\"\nupstream = \"u\"\nmax_body = 0\n";
    let toml = one_rule("key = \"ip\"\nwindows = [\"100/day\"]");
    let gateway = Gateway::start(&format!("{toml}{routes}[limits]\nmax_body = 10\n"));
    let status_of = |target: &str, bytes: usize| {
        let mut client = gateway.client();
        client.send_if_open(request("POST", target, &[], &vec![b'x'; bytes]));
        client.read_response_to("POST").status
    };
    assert_eq!([status_of("/a", 10), status_of("/a", 11), status_of("/large", 100_000)], [200, 413, 200]);
    assert_eq!([status_of("/none", 0), status_of("/none", 1)], [200, 413]);
}

#[test]
fn a_body_below_the_minimum_rate_is_aborted() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        let Some(head) = connection.read_head() else { return };
        assert!(connection.read_body(&head).is_none());
    });
    let limits = "[limits]\nmin_request_rate = 1000\nrate_grace = \"300ms\"\n";
    let echo = one_rule("key = \"ip\"\nwindows = [\"100/day\"]");
    for toml in [forward_all(&upstream), echo] {
        let gateway = Gateway::start(&format!("{toml}{limits}"));
        let mut client = gateway.client();
        client.send("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n");
        // The upload never stalls, so no other timeout applies.
        let mut writer = client.stream.try_clone().unwrap();
        let trickle = thread::spawn(move || {
            while writer.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        within(Duration::from_millis(300), || client.read_response_to("POST").expect(408).problem());
        client.expect_closed();
        eventually_eq(|| error_count(&gateway, "body_too_slow"), 1);
        drop(client);
        trickle.join().unwrap();
    }
}

#[test]
fn a_route_can_disable_the_minimum_rate_and_no_field_can() {
    let toml = one_rule("key = \"ip\"\nwindows = [\"100/day\"]");
    let slow = "[[routes]]\npath = \"/slow\"\nupstream = \"u\"\nmin_request_rate = 0\n";
    let limits = "[limits]\nmin_request_rate = 1000\nrate_grace = \"300ms\"\n";
    let gateway = Gateway::start(&format!("{toml}{slow}{limits}"));
    let mut raw = RawHttp2::connect(gateway.http);
    for (stream, path, content_type) in [
        (1, "/slow", "application/grpc"),
        (3, "/slow", "text/plain"),
        (5, "/a", "application/grpc"),
        (7, "/a", "text/plain"),
    ] {
        let fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", HOST),
            (":path", path),
            ("content-type", content_type),
        ];
        raw.send(frame(HEADERS, END_HEADERS, stream, &header_block(&fields)));
    }
    // Only these two are aborted.
    let mut refused = [raw.read_until(HEADERS).stream, raw.read_until(HEADERS).stream];
    refused.sort_unstable();
    assert_eq!(refused, [5, 7]);
    eventually_eq(|| error_count(&gateway, "body_too_slow"), 2);
    raw.send(frame(DATA, END_STREAM, 1, b"")).send(frame(DATA, END_STREAM, 3, b""));
    let mut answered = [raw.read_until(HEADERS).stream, raw.read_until(HEADERS).stream];
    answered.sort_unstable();
    assert_eq!(answered, [1, 3]);
}

#[test]
fn a_body_above_the_minimum_rate_may_take_long() {
    let limits = "[limits]\nmin_request_rate = 1000\nrate_grace = \"200ms\"\n";
    let gateway = Gateway::start(&format!("{}{limits}", one_rule("key = \"ip\"\nwindows = [\"100/day\"]")));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 40000\r\n\r\n"));
    for _ in 0..10 {
        client.send([b'x'; 4000]);
        // The elapsed time is the subject of the test.
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(client.read_response_to("POST").expect(200).json()["body_bytes"], 40_000);
}

#[test]
fn backpressure_of_the_upstream_is_not_a_slow_client() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        let Some(head) = connection.read_head() else { return };
        // The server reads late, and the client waits.
        thread::sleep(Duration::from_millis(1200));
        assert_eq!(connection.read_body(&head).map(|body| body.len()), Some(20_000_000));
        connection.reply(200, &[], b"late");
    });
    let limits = "[limits]\nmin_request_rate = 1000000\nrate_grace = \"300ms\"\n";
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    assert_eq!(gateway.client().post("/a", vec![b'x'; 20_000_000]).expect(200).text(), "late");
}

#[test]
fn a_response_read_too_slowly_is_aborted() {
    let endless = || {
        Upstream::with_script(|connection: &mut Connection| {
            connection.read_head();
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n");
            while connection.send([b'x'; 65536]) {}
        })
    };
    let upstream = endless();
    let limits = "[timeouts]\nbody = \"500ms\"\n[limits]\nmin_response_rate = \"1GiB\"\n";
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    // The client always reads some bytes, so the transfer never stalls.
    let mut reader = client.stream.try_clone().unwrap();
    let trickle = thread::spawn(move || {
        let mut piece = [0; 65536];
        while reader.read(&mut piece).is_ok_and(|bytes| bytes > 0) {
            thread::sleep(Duration::from_millis(10));
        }
    });
    // An interval of `timeouts.body` in which the kernel frees a large piece of its buffers passes, so several may be needed.
    eventually("the connection is closed", || error_count(&gateway, "stalled") == 1);
    trickle.join().unwrap();
}

#[test]
fn a_slow_upstream_response_is_not_a_slow_client() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for _ in 0..12 {
            thread::sleep(Duration::from_millis(300));
            connection.send("1\r\nx\r\n");
        }
        connection.send("0\r\n\r\n");
    });
    let limits = "[timeouts]\nbody = \"3s\"\n[limits]\nmin_response_rate = \"1GiB\"\n";
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    assert_eq!(gateway.get("/a").expect(200).text(), "x".repeat(12));
    assert_eq!(error_count(&gateway, "stalled"), 0);
}
