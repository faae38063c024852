//! Malformed input is answered with a problem document on a connection that is then closed, and no byte of it reaches the
//! upstream.

use std::io::Write;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_all, within};

/// Sends each case to a gateway with additional settings. Expects the status, a problem document, the end of the connection,
/// and no connection to the upstream.
fn assert_refused_with(extra: &str, cases: &[(&str, Vec<u8>, u16)]) {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}{extra}", forward_all(&upstream)));
    let (mut wrong, mut known) = (Vec::new(), 0);
    for (name, bytes, status) in cases {
        let mut client = gateway.client();
        // The gateway may refuse the request before all of it is sent.
        client.send_if_open(bytes);
        let mut response = match client.read_head() {
            Some(response) => response,
            None => {
                wrong.push(format!("{name}: closed without a response"));
                continue;
            }
        };
        client.read_body(&mut response, if bytes.starts_with(b"HEAD") { "HEAD" } else { "GET" });
        if response.status != *status {
            wrong.push(format!("{name}: {} {}", response.status, response.text()));
        } else if response.field("content-type") != Some("application/problem+json") {
            wrong.push(format!("{name}: {:?}", response.fields));
        } else if response.field("connection") != Some("close") {
            wrong.push(format!("{name}: no `Connection: close`"));
        }
        client.shutdown_write();
        let rest = client.read_to_end();
        if !rest.is_empty() {
            wrong.push(format!("{name}: another response: {:?}", String::from_utf8_lossy(&rest)));
        }
        if upstream.bytes_received() > known {
            wrong.push(format!("{name}: {} bytes reached the upstream", upstream.bytes_received() - known));
            known = upstream.bytes_received();
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(upstream.connections(), 0);
    gateway.get("/a").expect(200);
}

fn assert_refused(cases: &[(&str, &str, u16)]) {
    let cases: Vec<_> = cases.iter().map(|(name, text, status)| (*name, text.as_bytes().to_vec(), *status)).collect();
    assert_refused_with("", &cases);
}

#[test]
fn malformed_request_lines_are_refused() {
    assert_refused(&[
        ("no words", "\r\n\r\nnonsense\r\n\r\n", 400),
        ("one word", "GET\r\nHost: a\r\n\r\n", 400),
        ("HTTP/0.9", "GET /\r\nHost: a\r\n\r\n", 400),
        ("no version", "GET / \r\nHost: a\r\n\r\n", 400),
        ("HTTP/1.2", "GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
        ("HTTP/2.0", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 400),
        ("HTTP/11", "GET / HTTP/11\r\nHost: a\r\n\r\n", 400),
        ("lower-case version", "GET / http/1.1\r\nHost: a\r\n\r\n", 400),
        ("four words", "GET / a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("two spaces", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a tab", "GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a space first", " GET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a method of signs", "G(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("TLS", "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\r\n\r\n", 400),
        ("SSH", "SSH-2.0-OpenSSH_9.2\r\n\r\n", 400),
        ("a wrong first line of HTTP/2", "PRI * HTTP/2.1\r\n\r\nSM\r\n\r\n", 400),
        ("HEAD with a bad version", "HEAD / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
        ("HEAD with a bad field", "HEAD / HTTP/1.1\r\nno field\r\n\r\n", 400),
        ("a bare CR in the line", "GET /\r HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("NUL in the line", "GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("the PROXY protocol", "PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ]);
}

#[test]
fn ambiguous_targets_are_refused() {
    assert_refused(&[
        ("no slash", "GET admin HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("authority form", "GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("*", "GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("CONNECT", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405),
        ("CONNECT to a path", "CONNECT /a HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        ("TRACE", "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        ("another host", "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("another port", "GET http://a:81/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a user", "GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("another scheme", "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("https in the clear", "GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("OPTIONS for another host", "OPTIONS http://b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("angle brackets in a path", "GET /<a> HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a scheme alone", "GET http:// HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("above the root", "GET /a/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("above the root, encoded", "GET /%2e%2E/etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("an encoded slash", "GET /a%2fb HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("an encoded backslash", "GET /a%5Cb HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("a backslash", "GET /a\\b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("an encoded NUL", "GET /a%00 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("% and one digit", "GET /a%4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("% and no digits", "GET /a%zz HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ]);
}

#[test]
fn missing_or_ambiguous_hosts_are_refused() {
    assert_refused(&[
        ("none", "GET / HTTP/1.1\r\n\r\n", 400),
        ("two", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("two alike", "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", 400),
        ("empty", "GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
        ("a list", "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
        ("a space", "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        ("a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        ("a user", "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
        ("a port of letters", "GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", 400),
        ("a port alone", "GET / HTTP/1.1\r\nHost: :80\r\n\r\n", 400),
        ("half a bracket", "GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
        ("a port above 65535", "GET / HTTP/1.1\r\nHost: a:65536\r\n\r\n", 400),
        ("a dot alone", "GET / HTTP/1.1\r\nHost: .\r\n\r\n", 400),
        ("a dot first", "GET / HTTP/1.1\r\nHost: .a\r\n\r\n", 400),
        ("an empty label", "GET / HTTP/1.1\r\nHost: a..b\r\n\r\n", 400),
        ("an empty label at the end", "GET / HTTP/1.1\r\nHost: a..\r\n\r\n", 400),
        ("absolute form without it", "GET http://a/ HTTP/1.1\r\n\r\n", 400),
    ]);
}

#[test]
fn malformed_fields_are_refused() {
    assert_refused(&[
        ("no colon", "GET / HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400),
        ("no name", "GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n", 400),
        ("a space in the name", "GET / HTTP/1.1\r\nHost: a\r\nX A: b\r\n\r\n", 400),
        ("a space before the colon", "GET / HTTP/1.1\r\nHost: a\r\nX-A : b\r\n\r\n", 400),
        ("a sign in the name", "GET / HTTP/1.1\r\nHost: a\r\nX(A): b\r\n\r\n", 400),
        ("beyond ASCII in the name", "GET / HTTP/1.1\r\nHost: a\r\nX-\u{e9}: b\r\n\r\n", 400),
        ("NUL in the value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\0c\r\n\r\n", 400),
        ("a bare CR in the value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\rc\r\n\r\n", 400),
        ("a folded line", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\r\n c\r\n\r\n", 400),
        ("a folded first line", "GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
        ("DEL in the value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\u{7f}c\r\n\r\n", 400),
        ("an escape in the value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: \u{1b}[31m\r\n\r\n", 400),
        ("an expectation of another kind", "GET / HTTP/1.1\r\nHost: a\r\nExpect: miracles\r\n\r\n", 417),
    ]);
}

#[test]
fn ambiguous_body_framing_is_refused() {
    // The bytes after each case must never be parsed as a request.
    let next = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
    let post =
        |fields: &str, body: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n{body}{next}").into_bytes();
    let chunked = "Transfer-Encoding: chunked";
    assert_refused_with(
        "",
        &[
            ("length and chunks", post("Content-Length: 5\r\nTransfer-Encoding: chunked", "0\r\n\r\n"), 400),
            ("chunks and length", post("Transfer-Encoding: chunked\r\nContent-Length: 5", "0\r\n\r\n"), 400),
            ("two lengths", post("Content-Length: 3\r\nContent-Length: 4", "abcd"), 400),
            ("two equal lengths", post("Content-Length: 3\r\nContent-Length: 3", "abc"), 400),
            ("two equal lengths of nothing", post("Content-Length: 0\r\nX: y\r\ncontent-length: 0", ""), 400),
            ("a length with a leading zero", post("Content-Length: 03", "abc"), 400),
            ("zero twice", post("Content-Length: 00", ""), 400),
            ("a length of 2^63", post("Content-Length: 9223372036854775808", "abc"), 400),
            ("a list of lengths", post("Content-Length: 3, 4", "abcd"), 400),
            ("a length with a plus", post("Content-Length: +3", "abc"), 400),
            ("a negative length", post("Content-Length: -1", ""), 400),
            ("a hexadecimal length", post("Content-Length: 0x3", "abc"), 400),
            ("an empty length", post("Content-Length:", ""), 400),
            ("a length in words", post("Content-Length: three", "abc"), 400),
            ("a length beyond counting", post("Content-Length: 99999999999999999999", "abc"), 400),
            ("gzip, chunked", post("Transfer-Encoding: gzip, chunked", "0\r\n\r\n"), 400),
            ("chunked, gzip", post("Transfer-Encoding: chunked, gzip", "0\r\n\r\n"), 400),
            ("chunked twice", post("Transfer-Encoding: chunked, chunked", "0\r\n\r\n"), 400),
            ("chunked on two lines", post(&format!("{chunked}\r\n{chunked}"), "0\r\n\r\n"), 400),
            ("identity and chunked", post(&format!("Transfer-Encoding: identity\r\n{chunked}"), "0\r\n\r\n"), 400),
            ("identity", post("Transfer-Encoding: identity", ""), 400),
            ("a comma first", post("Transfer-Encoding: ,chunked", "0\r\n\r\n"), 400),
            ("a coding in quotes", post("Transfer-Encoding: \"chunked\"", "0\r\n\r\n"), 400),
            ("xchunked", post("Transfer-Encoding: xchunked", "0\r\n\r\n"), 400),
            ("a vertical tab", post("Transfer-Encoding: \u{b}chunked", "0\r\n\r\n"), 400),
            (
                "HTTP/1.0 with chunks",
                b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_vec(),
                400,
            ),
        ],
    );
}

#[test]
fn malformed_chunks_end_the_connection_without_smuggling() {
    let upstream = Upstream::always(200);
    let echo = "[upstreams.e]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/echo\"\nupstream = \"e\"\n";
    let gateway = Gateway::start(&format!("{}{echo}", forward_all(&upstream)));
    for chunks in [
        "zz\r\n",
        "-1\r\n",
        "+1\r\na\r\n",
        " 1\r\na\r\n",
        "0x1\r\na\r\n",
        "\r\n",
        "1\r\nab\r\n",
        "1\nb\n",
        "1\r\na\n0\n\n",
        "FFFFFFFFFFFFFFFFF\r\na",
        "1;\0\r\na\r\n",
        "0\r\nX A: b\r\n\r\n",
        "0\r\nX: y\n\r\n\r\n",
        "0\r\n\n\r\n\r\n",
        "0\r\nX: y\r\nZ: w\n\r\nA: b\r\n\r\n",
    ] {
        for path in ["/chunks", "/echo"] {
            let mut client = gateway.client();
            client.send_if_open(format!("POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"));
            client.send_if_open(chunks).send_if_open(request("GET", "/smuggled", &[], b""));
            let response = client.read_response();
            assert_eq!(response.status, 400, "{path}, {chunks:?}: {}", response.text());
            response.problem();
            client.shutdown_write();
            client.expect_closed();
        }
    }
    assert!(upstream.received().iter().all(|received| received.target == "/chunks"), "{:?}", upstream.received());
}

/// For some parsers, a bare line feed is part of a trailer line; for others, it ends the line. They would disagree where the
/// next request begins.
#[test]
fn a_trailer_line_that_ends_in_a_line_feed_alone_ends_the_connection() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let head = "POST /first HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    // For some, the body ends after `A: b`. The second request must not pass.
    let trailers = "X: y\n\r\nA: b\r\n\r\n";
    let second = "POST /second HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    for known in [false, true] {
        let mut client = gateway.client();
        if known {
            client.send(format!("{head}3\r\nabc\r\n"));
            eventually("the head is forwarded", || upstream.received().len() == 1);
            client.send_if_open(format!("0\r\n{trailers}{second}"));
        } else {
            client.send(format!("{head}3\r\nabc\r\n0\r\n{trailers}{second}"));
        }
        client.read_response().expect(400).problem();
        client.shutdown_write().expect_closed();
    }
    assert!(upstream.received().iter().all(|received| received.target == "/first"), "{:?}", upstream.received());
}

#[test]
fn oversized_heads_are_refused() {
    let field = |bytes: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX-A: {}\r\n\r\n", "a".repeat(bytes)).into_bytes();
    let around = field(0).len();
    let target = |bytes: usize| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(bytes)).into_bytes();
    let many = |fields: usize| {
        let fields: String = (0..fields).map(|n| format!("X-{n}: a\r\n")).collect();
        format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n").into_bytes()
    };
    assert_refused_with(
        "",
        &[
            ("one large field", field(200_000), 431),
            ("many fields", many(1000), 431),
            ("many fields, large together", many(20_000), 431),
            ("a long target", target(70_000), 414),
            ("a target that fills the buffer", target(200_000), 414),
            ("a head of 100 KB in one write", field(100_000), 431),
            ("a head of one byte too many", field(64 * 1024 + 1 - around), 431),
            ("a long method", format!("{} / HTTP/1.1\r\nHost: a\r\n\r\n", "A".repeat(200_000)).into_bytes(), 431),
        ],
    );
}

#[test]
fn a_head_of_the_maximum_size_is_accepted() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let head = |field: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX-A: {}\r\n\r\n", "a".repeat(field));
    let most = head(64 * 1024 - head(0).len());
    let mut client = gateway.client();
    // Two heads in one write are together larger than the limit of one.
    client.send(most.repeat(2));
    client.read_response().expect(200);
    client.read_response().expect(200);
    // Also after another request, a long target is distinguished from long fields.
    client.send(format!("{}GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", head(1), "a".repeat(66_000)));
    client.read_response().expect(200);
    client.read_response().expect(414).problem();
}

#[test]
fn an_unfinished_head_times_out() {
    assert_refused_with(
        "[timeouts]\nrequest_head = \"1s\"\n",
        &[
            ("half a line", b"GET / HT".to_vec(), 408),
            ("half a head", b"GET / HTTP/1.1\r\nHost: a\r\nX-A".to_vec(), 408),
            ("all but the last byte", b"GET / HTTP/1.1\r\nHost: a\r\n\r".to_vec(), 408),
        ],
    );
}

#[test]
fn a_silent_connection_is_closed_without_a_response() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}[timeouts]\nrequest_head = \"1s\"\n", forward_all(&upstream)));
    let head = Duration::from_secs(1);
    within(head, || gateway.client().expect_closed());
    let mut client = gateway.client();
    client.get("/a").expect(200);
    within(head, || client.expect_closed());
}

#[test]
fn a_key_given_twice_is_refused() {
    let upstream = Upstream::always(200);
    let rule = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    client.get_with("/a", &[("X-User", "bob"), ("x-user", "eve")]).expect(400).problem();
    client.expect_closed();
    assert_eq!(upstream.connections(), 0);
}

#[test]
fn bytes_after_a_valid_request_do_not_affect_its_response() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    let mut bytes = request("GET", "/good", &[], b"");
    bytes.extend(b"garbage\r\n\r\n");
    client.send(bytes);
    client.read_response().expect(200);
    client.read_response().expect(400).problem();
    client.shutdown_write();
    client.expect_closed();
    assert_eq!(upstream.only_request().target, "/good");
}

/// Parts of requests in any order, with random bytes between them.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    let words = proptest::sample::select(vec![
        "GET",
        "POST",
        " ",
        "/",
        "/a",
        "*",
        "http://a/",
        "HTTP/1.1",
        "HTTP/1.0",
        "\r\n",
        "\n",
        "\r",
        "Host: a",
        "Host:",
        "Content-Length: 3",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
        ":",
        "\0",
        "0\r\n\r\n",
        "%",
        "\t",
    ]);
    let piece = prop_oneof![
        3 => words.prop_map(|word| word.as_bytes().to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..20),
    ];
    proptest::collection::vec(piece, 1..30).prop_map(|pieces| pieces.concat())
}

#[test]
fn random_bytes_are_harmless() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let address = gateway.http;
    let mut runner = TestRunner::new(Config { cases: 1500, failure_persistence: None, ..Config::default() });
    let ran = runner.run(&noise(), |bytes| {
        // The first byte cannot begin a method, so the bytes are no valid request.
        let mut bytes = bytes;
        bytes.insert(0, b'(');
        let mut client = Client::connect(address);
        client.send_if_open(&bytes);
        let _ = client.stream.flush();
        let _ = client.stream.shutdown(std::net::Shutdown::Write);
        let response = client.read_to_end();
        prop_assert!(
            response.is_empty() || response.starts_with(b"HTTP/1.1 4"),
            "{:?}",
            String::from_utf8_lossy(&response)
        );
        Ok(())
    });
    ran.unwrap();
    assert_eq!((upstream.connections(), upstream.bytes_received()), (0, 0));
    gateway.get("/a").expect(200);
}

#[test]
fn near_valid_requests_are_harmless() {
    // Some of these are valid requests, which are forwarded in their unambiguous form.
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let address = gateway.http;
    let mut runner = TestRunner::new(Config { cases: 1500, failure_persistence: None, ..Config::default() });
    let ran = runner.run(&noise(), |bytes| {
        let mut client = Client::connect(address);
        client.send_if_open("GET /a HTTP/1.1\r\nHost: a\r\n").send_if_open(&bytes).send_if_open("\r\n\r\n");
        let _ = client.stream.shutdown(std::net::Shutdown::Write);
        let response = client.read_to_end();
        prop_assert!(
            response.is_empty() || response.starts_with(b"HTTP/1.1 "),
            "{:?}",
            String::from_utf8_lossy(&response)
        );
        Ok(())
    });
    ran.unwrap();
    // The scripted server asserts that every forwarded head is well-formed.
    gateway.get("/a").expect(200);
}
