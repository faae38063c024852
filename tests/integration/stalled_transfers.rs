//! Transfers that stall after a response has begun, in either direction, are aborted.

use std::io::Read;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::support::gateway::Gateway;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, forward_all, one_rule, within};

const LIMITS: &str = "[timeouts]\nbody = \"300ms\"\nresponse_head = \"300ms\"\n";
const LIMIT: Duration = Duration::from_millis(300);

#[test]
fn a_stalled_response_is_aborted_on_both_sides() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc");
        assert!(connection.wait_for_close(), "the gateway closes the upstream connection");
    });
    let gateway = Gateway::start(&format!("{}{LIMITS}", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.read_head().unwrap().status, 200);
    assert_eq!(within(LIMIT, || client.read_to_end()), b"abc");
    eventually_eq(|| gateway.metrics().sum("transom_request_errors_total", &[("error", "response_timeout")]), 1);
}

#[test]
fn a_response_in_progress_may_exceed_the_idle_timeout() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n");
        for _ in 0..8 {
            // The elapsed time is the subject of the test.
            std::thread::sleep(std::time::Duration::from_millis(400));
            connection.send("x");
        }
    });
    let limits = LIMITS.replace("300ms", "3s");
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    assert_eq!(gateway.get("/a").expect(200).text(), "xxxxxxxx");
}

#[test]
fn a_missing_body_is_408() {
    let echo = Gateway::start(&format!("{}{LIMITS}", one_rule("key = \"ip\"\nwindows = [\"100/day\"]")));
    let upstream = Upstream::always(200);
    let forwarding = Gateway::start(&format!("{}{LIMITS}", forward_all(&upstream)));
    for gateway in [&echo, &forwarding] {
        let mut client = gateway.client();
        client.send("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nab");
        within(LIMIT, || client.read_response_to("POST").expect(408).problem());
        client.expect_closed();
    }
}

#[test]
fn unsent_bytes_in_the_kernel_are_bounded() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
        while connection.send([b'x'; 65536]) {}
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    client.set_recv_buffer_size(4096).unwrap();
    client.connect(&gateway.http.into()).unwrap();
    client.send(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let port = client.local_addr().unwrap().as_socket_ipv4().unwrap().port();
    let mut before = 0;
    let mut same = 0;
    eventually("the gateway writes no more bytes", || {
        let now = unsent_bytes(gateway.http.port(), port);
        same = if now == before && now > 0 { same + 1 } else { 0 };
        before = now;
        same == 20
    });
    // The bytes that may wait, and the maximum size of a packet on loopback.
    assert!(before <= 256 * 1024, "{before}");
}

/// Bytes in the send queue of a connection, according to /proc/net/tcp.
fn unsent_bytes(from: u16, to: u16) -> u64 {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let of = table
        .lines()
        .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
        .find(|fields| fields[1].ends_with(&format!(":{from:04X}")) && fields[2].ends_with(&format!(":{to:04X}")));
    of.map_or(0, |fields| u64::from_str_radix(fields[4].split(':').next().unwrap(), 16).unwrap())
}

#[test]
fn a_client_that_does_not_read_is_closed() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
        while connection.send([b'x'; 65536]) {}
    });
    let gateway = Gateway::start(&format!("{}{LIMITS}", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    within(LIMIT, || {
        eventually("the connection is closed", || {
            gateway.metrics().sum("transom_requests_total", &[("code", "200")]) == 1
                && gateway.metrics().sum("transom_connections", &[]) == 0
        });
    });
    eventually_eq(|| gateway.metrics().sum("transom_request_errors_total", &[("error", "stalled")]), 1);
    // The bytes in the send queue of the kernel are discarded as well.
    let end = client.stream.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_refused_upload_is_drained_while_it_arrives() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/day\"]"));
    gateway.get("/a").expect(200);
    let mut client = gateway.client();
    client.send("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1500000\r\n\r\n");
    // The client sends everything before it reads. The elapsed time is the subject of the test.
    for _ in 0..15 {
        client.send([b'x'; 100_000]);
        std::thread::sleep(std::time::Duration::from_millis(150));
    }
    client.read_response_to("POST").expect(429).problem();
    client.expect_closed();
}
