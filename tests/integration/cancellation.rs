//! Clients that disconnect in every phase of a request.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::sync::mpsc::{self, Receiver};

use crate::support::client::{HOST, request};
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_all};

/// Reads requests and never responds; reports each request and the end of its connection.
pub fn silent_upstream() -> (Upstream, Receiver<&'static str>) {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_head().is_some() {
            report.send("requested").unwrap();
            while !connection.wait_for_close() {}
            report.send("closed").unwrap();
        }
    });
    (upstream, reported)
}

#[test]
fn a_disconnect_before_the_response_cancels_the_request() {
    let (upstream, reported) = silent_upstream();
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    assert_eq!(reported.recv(), Ok("requested"));
    drop(client);
    assert_eq!(reported.recv(), Ok("closed"));
    eventually("the request is counted as cancelled", || {
        let metrics = gateway.metrics();
        metrics.sum("transom_requests_total", &[("code", "499")]) == 1
            && metrics.sum("transom_upstream_requests_total", &[("outcome", "canceled")]) == 1
            && metrics.sum("transom_connections", &[]) == 0
    });
}

/// The end of the stream cannot be read behind unread bytes, here those of another request.
#[test]
fn a_disconnect_behind_unread_bytes_cancels_the_request() {
    let (upstream, reported) = silent_upstream();
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    assert_eq!(reported.recv(), Ok("requested"));
    client.send("G");
    drop(client);
    assert_eq!(reported.recv(), Ok("closed"));
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn a_disconnect_during_the_upload_cancels_the_request() {
    for framing in ["Content-Length: 100000", "Transfer-Encoding: chunked"] {
        let (upstream, reported) = silent_upstream();
        let gateway = Gateway::start(&forward_all(&upstream));
        let mut client = gateway.client();
        client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\n{framing}\r\n\r\n3\r\nabc\r\n"));
        assert_eq!(reported.recv(), Ok("requested"));
        drop(client);
        assert_eq!(reported.recv(), Ok("closed"), "{framing}");
    }
}

#[test]
fn a_disconnect_during_the_response_cancels_the_request() {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            while connection.send("10\r\n0123456789abcdef\r\n") {}
            report.send("closed").unwrap();
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    let mut received = Vec::new();
    while received.len() < 160 {
        received.extend(client.read_chunk().unwrap());
    }
    assert!(b"0123456789abcdef".repeat(received.len() / 16 + 1).starts_with(&received));
    drop(client);
    assert_eq!(reported.recv(), Ok("closed"));
}

#[test]
fn a_disconnect_while_the_response_pauses_cancels_the_request() {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc");
            report.send(connection.wait_for_close()).unwrap();
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_exactly(3), b"abc");
    drop(client);
    assert_eq!(reported.recv(), Ok(true));
}

#[test]
fn a_cancelled_request_is_counted() {
    // Otherwise a client could send requests without a charge.
    let (upstream, reported) = silent_upstream();
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"3/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    for _ in 0..3 {
        let mut client = gateway.client();
        client.send(request("GET", "/a", &[], b""));
        assert_eq!(reported.recv(), Ok("requested"));
        drop(client);
        assert_eq!(reported.recv(), Ok("closed"));
    }
    gateway.get("/a").expect(429);
}

#[test]
fn a_disconnect_after_any_byte_of_a_request_is_harmless() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let whole = request("POST", "/a", &[("X-A", "b")], b"a body");
    for length in 0..=whole.len() {
        for reset in [false, true] {
            let mut client = gateway.client();
            client.send(&whole[..length]);
            if reset {
                // Unread bytes in the socket make the end a reset.
                socket2::SockRef::from(&client.stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
            }
        }
    }
    gateway.get("/a").expect(200);
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

#[test]
fn a_client_that_sends_without_reading_is_harmless() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.stream.set_write_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
    let many: Vec<u8> = (0..1000).flat_map(|_| request("GET", "/a", &[("X-Pad", &"x".repeat(500))], b"")).collect();
    // Pipelines requests until the gateway stops reading, because the client does not read the responses.
    let stalled = loop {
        if let Err(error) = client.stream.write_all(&many) {
            break error.kind();
        }
    };
    assert_eq!(stalled, ErrorKind::WouldBlock);
    gateway.get("/a").expect(200);
    client.stream.shutdown(Shutdown::Both).unwrap();
    drop(client);
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

/// A client that closes only its sending direction cannot be told from one that closes the connection (as in nginx).
#[test]
fn a_half_closed_client_gets_the_responses_that_are_ready_at_once() {
    // The request may be cancelled before it is sent, or at any time after.
    let upstream = Upstream::with_script(|connection| {
        connection.read_head();
        connection.wait_for_close();
    });
    let fixed = "[[routes]]\npath = \"/fixed\"\nrespond = { body = \"fine\" }\n";
    let gateway = Gateway::start(&(forward_all(&upstream) + fixed));
    let mut client = gateway.client();
    client.send(request("GET", "/../refused", &[], b"")).shutdown_write().read_response().expect(400).problem();
    let mut client = gateway.client();
    client.send(request("GET", "/fixed", &[], b"")).shutdown_write().read_response().expect(200);
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b"")).shutdown_write().expect_closed();
    eventually("the request is counted as cancelled", || {
        gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == 1
    });
}
