//! Graceful shutdown: the gateway finishes requests in flight within the drain timeout.

use std::net::TcpStream;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::client::{Client, HOST, request};
use crate::support::process::{Process, signal};
use crate::support::test_ca::TestCa;
use crate::support::tls::listen;
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, forward_all, one_rule, within};

/// An upstream that reports each request for `/slow`, and responds to it on a signal of the test.
fn held_upstream() -> (Upstream, mpsc::Receiver<()>, Sender<()>) {
    let (report, reported) = mpsc::channel();
    let (proceed, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::with_script(move |connection| {
        while let Some(received) = connection.read_request() {
            if received.target == "/slow" {
                report.send(()).unwrap();
                if released.lock().unwrap().recv().is_err() {
                    return;
                }
            }
            connection.reply(200, &[], b"at last");
        }
    });
    (upstream, reported, proceed)
}

#[test]
fn a_drain_finishes_requests_in_flight_and_accepts_no_new_ones() {
    for name in ["TERM", "INT"] {
        let (upstream, reported, proceed) = held_upstream();
        let mut process = Process::spawn(&forward_all(&upstream));
        let mut idle = process.client();
        idle.get("/a").expect(200);
        let mut slow = process.client();
        slow.send(request("GET", "/slow", &[], b""));
        reported.recv().unwrap();
        assert_eq!(process.admin_get("/readyz").status, 200);

        process.signal(name);
        eventually("the gateway is not ready", || process.admin_get("/readyz").status == 503);
        process.admin_get("/healthz").expect(200);
        eventually("no connection is accepted", || TcpStream::connect(process.http).is_err());
        // Idle connections are closed.
        idle.expect_closed();

        proceed.send(()).unwrap();
        let response = slow.read_response().expect(200);
        assert_eq!((response.text().as_str(), response.field("connection")), ("at last", Some("close")));
        slow.expect_closed();
        assert_eq!(process.wait().code(), Some(0), "{name}");
    }
}

#[test]
fn a_drain_finishes_bodies_in_flight() {
    let (report, reported) = mpsc::channel();
    let (proceed, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst");
            report.send(()).unwrap();
            released.lock().unwrap().recv().unwrap();
            connection.send("secnd");
        }
    });
    let mut process = Process::spawn(&forward_all(&upstream));
    let mut client = process.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_exactly(5), b"first");
    reported.recv().unwrap();
    let mut upload = process.client();
    upload.send(format!("POST /b HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 4\r\n\r\nbo"));
    eventually("the upload is forwarded", || upstream.received().len() == 2);
    process.signal("TERM");
    eventually("no connection is accepted", || TcpStream::connect(process.http).is_err());
    proceed.send(()).unwrap();
    assert_eq!(client.read_exactly(5), b"secnd");
    client.expect_closed();
    upload.send("dy");
    assert_eq!(upload.read_head().unwrap().status, 200);
    assert_eq!(upload.read_exactly(5), b"first");
    proceed.send(()).unwrap();
    assert_eq!(upload.read_exactly(5), b"secnd");
    assert_eq!(process.wait().code(), Some(0));
}

#[test]
fn a_drain_aborts_requests_after_its_deadline() {
    let (upstream, reported, _go) = held_upstream();
    let mut process = Process::spawn(&format!("{}[timeouts]\ndrain = \"100ms\"\n", forward_all(&upstream)));
    let mut slow = process.client();
    slow.send(request("GET", "/slow", &[], b""));
    reported.recv().unwrap();
    // An unfinished request does not delay the exit either.
    let mut unfinished = process.client();
    unfinished.send("GET /a HTTP/1.1\r\nHo");
    process.signal("TERM");
    assert_eq!(within(Duration::from_millis(100), || process.wait()).code(), Some(0));
    assert!(slow.read_to_end().is_empty());
    unfinished.read_to_end();
    assert!(process.stderr().contains("aborted"), "{}", process.stderr());
}

/// The end of the connection would end the body.
#[test]
fn a_response_that_the_drain_aborts_resets_the_connection_of_an_http_1_0_client() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
            connection.wait_for_close();
        }
    });
    let mut process = Process::spawn(&format!("{}[timeouts]\ndrain = \"100ms\"\n", forward_all(&upstream)));
    let mut client = process.client();
    client.send("GET /a HTTP/1.0\r\nHost: a\r\n\r\n");
    assert_eq!(client.read_head().unwrap().status, 200);
    process.signal("TERM");
    assert_eq!(within(Duration::from_millis(100), || process.wait()).code(), Some(0));
    let error = std::io::Read::read_to_end(&mut client.stream, &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn an_unfinished_head_does_not_delay_the_exit() {
    let (upstream, _seen, _go) = held_upstream();
    let toml = format!("{}[timeouts]\nrequest_head = \"200ms\"\ndrain = \"1d\"\n", forward_all(&upstream));
    let mut process = Process::spawn(&toml);
    let mut unfinished = process.client();
    unfinished.send("GET /a HTTP/1.1\r\nHo");
    let silent = process.client();
    process.signal("TERM");
    // A connection without a request is closed a second after the signal.
    assert_eq!(within(Duration::from_secs(1), || process.wait()).code(), Some(0));
    drop(silent);
}

#[test]
fn an_idle_connection_does_not_delay_the_exit() {
    let upstream = Upstream::always(200);
    for h2c in [true, false] {
        let toml = format!("{}[timeouts]\ndrain = \"1d\"\n[http2]\nh2c = {h2c}\n", forward_all(&upstream));
        let mut process = Process::spawn(&toml);
        let (mut silent, mut idle) = (process.client(), process.client());
        idle.get("/a").expect(200);
        eventually("both connections are open", || process.metrics().sum("transom_connections", &[]) == 2);
        process.signal("TERM");
        within(Duration::from_secs(1), || {
            silent.expect_closed();
            idle.expect_closed();
            assert_eq!(process.wait().code(), Some(0));
        });
    }
}

#[test]
fn requests_at_the_end_are_answered_or_not_accepted() {
    // An accepted connection is served, or closed before a byte of a request was sent upstream.
    let upstream = Upstream::always(200);
    let mut process = Process::spawn(&forward_all(&upstream));
    let address = process.http;
    let clients: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let mut answered = 0;
                while let Ok(stream) = TcpStream::connect(address) {
                    let mut client = Client::from_tcp(stream);
                    client.send_if_open(request("GET", "/a", &[], b""));
                    let response = client.read_response_or_end();
                    if let Some(response) = response {
                        assert_eq!(response.status, 200);
                        answered += 1;
                    }
                }
                answered
            })
        })
        .collect();
    eventually("requests arrive", || upstream.received().len() > 50);
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0));
    let answered: usize = clients.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(answered, upstream.received().len());
}

#[test]
fn a_connection_without_a_detected_protocol_does_not_delay_the_exit() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    // The drain may take long, except for connections without a request.
    let timeouts = "[timeouts]\ntls_handshake = \"1h\"\nproxy_protocol = \"1h\"\ndrain = \"1h\"\n";
    let toml = listen(&scratch, &authority.issue(&["a.test"]), timeouts)
        .replace("[listen.https]", "proxy_protocol = [\"127.0.0.2\"]\n[listen.https]");
    let mut process = Process::spawn(&(toml + &one_rule("key = \"ip\"\nwindows = [\"10/hour\"]")));
    let mut stalled = Client::connect(process.https.unwrap());
    stalled.send(b"\x16\x03\x01\x02");
    eventually("the connection is open", || process.metrics().sum("transom_connections", &[]) == 1);
    process.signal("TERM");
    stalled.expect_closed();
    assert_eq!(process.wait().code(), Some(0));
}

/// A delay that no test waits for.
fn delayed_drain() -> String {
    let upstream = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    format!("{upstream}[drain]\ndelay = \"1h\"\n")
}

#[test]
fn connections_are_accepted_during_the_delay_of_a_drain() {
    let mut process = Process::spawn(&delayed_drain());
    let mut idle = process.client();
    idle.get("/a").expect(200);
    let draining = || process.metrics().sum("transom_draining", &[]);
    assert_eq!((process.admin_get("/readyz").status, draining()), (200, 0));
    process.signal("TERM");
    eventually("the gateway is not ready", || process.admin_get("/readyz").status == 503);
    assert_eq!(draining(), 1);
    // New and open connections are served as before.
    let response = process.get("/a").expect(200);
    assert_eq!(response.field("connection"), None);
    idle.get("/b").expect(200);
    process.admin_get("/healthz").expect(200);
    // The second signal ends the delay, not the process.
    process.signal("TERM");
    eventually("no connection is accepted", || TcpStream::connect(process.http).is_err());
    idle.expect_closed();
    assert_eq!(process.wait().code(), Some(0));
    let log = process.stderr();
    let lines: Vec<&str> = log.lines().filter_map(|line| line.split_once("cli::run: ")).map(|(_, text)| text).collect();
    assert_eq!(lines, ["not ready; draining begins in 3600s", "draining", "stopped"], "{log}");
}

#[test]
fn a_drain_begins_after_its_delay() {
    let mut process = Process::spawn(&delayed_drain().replace("1h", "300ms"));
    process.signal("TERM");
    assert_eq!(within(Duration::from_secs(2), || process.wait()).code(), Some(0));
}

#[test]
fn an_upgrade_has_no_delay_before_the_drain() {
    let chain = UpgradeChain::start(&delayed_drain());
    let old = chain.first.pid();
    let new = chain.upgrade();
    eventually("the old process ends", || !is_alive(old));
    // The new process delays its own drain.
    signal(new, "TERM");
    eventually("the new process is not ready", || chain.first.admin_get("/readyz").status == 503);
    chain.first.get("/a").expect(200);
    signal(new, "TERM");
    eventually("the new process ends", || !is_alive(new));
}
