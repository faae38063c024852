//! Request validation, case by case: bytes that other parsers may read differently are answered with 400 on a connection that
//! is then closed, and reach no upstream and no counter; valid requests arrive as meant.

use crate::support::client::request;
use crate::support::forward_all;
use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::Upstream;

fn toml(upstream: &Upstream) -> String {
    format!(
        "{}[rules.r]\nkey = \"ip\"\nwindows = [\"1000/day\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

const GET: &str = "GET /a HTTP/1.1\r\nHost: a\r\n";
const POST: &str = "POST /a HTTP/1.1\r\nHost: a\r\n";

/// The bytes after every case: they must never be parsed as a request.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";

/// Ambiguous requests, and their responses.
fn ambiguous() -> Vec<(&'static str, String, u16)> {
    vec![
        // Line ends.
        ("a bare LF behind the request line", "GET /a HTTP/1.1\nHost: a\r\n\r\n".into(), 400),
        ("a bare LF behind a field", "GET /a HTTP/1.1\r\nHost: a\nX: b\r\n\r\n".into(), 400),
        ("a bare LF at the end", "GET /a HTTP/1.1\r\nHost: a\r\n\n".into(), 400),
        ("bare LFs throughout", "GET /a HTTP/1.1\nHost: a\n\n".into(), 400),
        ("a bare LF in a value", format!("{GET}X: a\n\n{SMUGGLED}"), 400),
        ("chunks behind a bare LF", format!("{POST}X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400),
        ("a bare CR", format!("{GET}X: a\rY: b\r\n\r\n"), 400),
        // Where a body ends.
        ("a length and chunks", format!("{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400),
        ("chunks and a length", format!("{POST}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"), 400),
        ("two lengths", format!("{POST}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"), 400),
        ("a list of lengths", format!("{POST}Content-Length: 1, 1\r\n\r\na"), 400),
        ("+1", format!("{POST}Content-Length: +1\r\n\r\na"), 400),
        ("1e1", format!("{POST}Content-Length: 1e1\r\n\r\na"), 400),
        ("another coding", format!("{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), 400),
        ("chunked twice", format!("{POST}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"), 400),
        ("an empty coding first", format!("{POST}Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n"), 400),
        ("two codings", format!("{POST}Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400),
        ("a tab in the coding", format!("{POST}Transfer-Encoding: chunked\t, identity\r\n\r\n0\r\n\r\n"), 400),
        (
            "chunks for HTTP/1.0",
            "POST /a HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(),
            400,
        ),
        // Host.
        ("no Host", "GET /a HTTP/1.1\r\n\r\n".into(), 400),
        ("two Hosts", format!("{GET}Host: b\r\n\r\n"), 400),
        ("a Host with a user", "GET /a HTTP/1.1\r\nHost: u@a\r\n\r\n".into(), 400),
        ("a Host with a path", "GET /a HTTP/1.1\r\nHost: a/b\r\n\r\n".into(), 400),
        ("another host in the target", "GET http://b/a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("a user in the target", "GET http://a@b/a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("two Hosts of HTTP/1.0", "GET /a HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n".into(), 400),
        // Target and method.
        ("a target without a slash", "GET a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("a fragment", "GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("an authority", "GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("* for GET", "GET * HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("CONNECT", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n".into(), 405),
        ("CONNECT with a body", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nContent-Length: 1\r\n\r\nx".into(), 405),
        ("TRACE", "TRACE /a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 405),
        ("a method in small letters", "get /a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("an expectation", format!("{GET}Expect: 100-continue, x\r\n\r\n"), 417),
        ("two expectations", format!("{GET}Expect: 100-continue\r\nExpect: x\r\n\r\n"), 417),
        ("a semicolon behind dots", "GET /x/..;/admin HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("an encoded line end", "GET /login%0a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ("an overlong slash", "GET /a%c0%af HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        // Fields.
        ("no name", format!("{GET}: a\r\n\r\n"), 400),
        ("a blank before the colon", format!("{GET}X : a\r\n\r\n"), 400),
        ("a folded line", format!("{GET}X: a\r\n b\r\n\r\n"), 400),
        ("NUL", format!("{GET}X: a\0b\r\n\r\n"), 400),
    ]
}

#[test]
fn ambiguous_requests_are_refused_and_not_counted() {
    let cases = ambiguous();
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    let mut wrong = Vec::new();
    for (name, bytes, status) in &cases {
        let mut client = gateway.client();
        client.send_if_open(bytes).send_if_open(SMUGGLED);
        let Some(mut response) = client.read_head() else {
            wrong.push(format!("{name}: closed without a response"));
            continue;
        };
        client.read_body(&mut response, "GET");
        if response.status != *status || response.field("connection") != Some("close") {
            wrong.push(format!("{name}: {} {:?}", response.status, response.fields));
        }
        client.shutdown_write();
        if !client.read_to_end().is_empty() {
            wrong.push(format!("{name}: another response"));
        }
        if upstream.connections() > 0 {
            wrong.push(format!("{name}: the upstream received {:?}", upstream.received()));
            break;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(remaining(&gateway.get("/a").expect(200), "r"), 999, "none of these was counted");
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_request_errors_total", &[]), cases.len() as u64);
    assert_eq!(metrics.sum("transom_request_errors_total", &[("error", "method")]), 3);
    assert_eq!(metrics.sum("transom_request_errors_total", &[("error", "expectation")]), 2);
}

#[test]
fn ambiguous_requests_are_refused_after_any_other_request() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    let first = [
        format!("{GET}\r\n"),
        format!("{POST}Content-Length: 4\r\n\r\na\n\nb"),
        format!("{POST}Transfer-Encoding: chunked\r\n\r\n3;x=y\r\n\na\n\r\n0\r\n\r\n"),
    ];
    let second = [
        format!("GET /a HTTP/1.1\nHost: a\n\n{SMUGGLED}"),
        format!("{GET}X: a\n\r\n{SMUGGLED}"),
        format!("{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ];
    for (first, second, at_once) in first
        .iter()
        .flat_map(|first| second.iter().flat_map(move |second| [(first, second, true), (first, second, false)]))
    {
        let mut client = gateway.client();
        if at_once {
            client.send(format!("{first}{second}"));
            client.read_response().expect(200);
        } else {
            client.send(first);
            client.read_response().expect(200);
            client.send(second);
        }
        let refused = client.read_response();
        assert_eq!(
            (refused.status, refused.field("connection")),
            (400, Some("close")),
            "{first:?} {second:?} {at_once}"
        );
        client.shutdown_write();
        assert!(client.read_to_end().is_empty(), "{first:?} {second:?} {at_once}");
    }
    assert_eq!(upstream.received().len(), 18);
}

#[test]
fn unambiguous_requests_are_forwarded_as_meant() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    let with_body = |fields: &str, body: &str| format!("{POST}{fields}\r\n\r\n{body}");
    for (name, bytes, body) in [
        ("line feeds in a body", with_body("Content-Length: 4", "a\n\nb"), "a\n\nb"),
        ("line feeds in a chunk", with_body("Transfer-Encoding: chunked", "3\r\n\na\n\r\n0\r\n\r\n"), "\na\n"),
        ("chunked in capitals", with_body("Transfer-Encoding: CHUNKED", "1\r\na\r\n0\r\n\r\n"), "a"),
        ("an empty line first", format!("\r\n{GET}\r\n"), ""),
        ("beyond ASCII in a value", format!("{GET}X-Name: J\u{e4}\r\n\r\n"), ""),
        ("an absolute form", "GET http://a:80/a HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), ""),
        ("HTTP/1.0 without Host", "GET /a HTTP/1.0\r\n\r\n".to_owned(), ""),
    ] {
        let before = upstream.received().len();
        let mut client = gateway.client();
        client.send(bytes);
        client.read_response().expect(200);
        let received = upstream.received();
        assert_eq!(received.len(), before + 1, "{name}");
        assert_eq!(received[before].body, body.as_bytes(), "{name}");
        assert_eq!(received[before].target, "/a", "{name}");
    }
}

#[test]
fn the_rest_of_a_refused_body_is_not_parsed_as_a_head() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream).replace("1000/day", "1/day"));
    gateway.get("/a").expect(200);
    let body = "line\nline\nTransfer-Encoding: chunked\nContent-Length: 3\n\n".repeat(10);
    let head = format!("{POST}Content-Length: {}\r\n\r\n", body.len());
    // The body arrives with the head, in part, or after it; a fast client keeps the connection.
    for with_head in [body.len(), 100, 0] {
        let mut client = gateway.client();
        client.send(format!("{head}{}", &body[..with_head])).send_if_open(&body[with_head..]);
        client.read_response().expect(429);
        client.send_if_open(format!("{GET}\r\n"));
        if let Some(response) = client.read_response_or_end() {
            response.expect(429);
            client.send_if_open(format!("{GET}X: a\n\r\n"));
            client.read_response().expect(400);
        }
    }
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn connection_specific_fields_are_not_forwarded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    let fields = [
        ("Connection", "X-Hop, keep-alive, X-Forwarded-For, Host, Cookie"),
        ("Connection", "Upgrade"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABk"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Proxy-Authorization", "Basic x"),
        ("TE", "gzip"),
        ("X_Forwarded_For", "6.6.6.6"),
        ("Cookie", "a=b"),
        ("X-Kept", "1"),
    ];
    // An upgrade with a body is a request with a body.
    let mut client = gateway.client();
    client.send(request("POST", "/a", &fields, b"body"));
    client.read_response().expect(200);
    client.get("/b").expect(200);
    let received = &upstream.received()[0];
    assert_eq!(received.body, b"body");
    let mut names: Vec<&str> = received.fields.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let expected = [
        "content-length",
        "cookie",
        "host",
        "http2-settings",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-kept",
        "x-request-id",
    ];
    assert_eq!(names, expected);
    assert_eq!(received.values("x-forwarded-for"), ["127.0.0.1"]);
}

#[test]
fn head_limits_can_be_lowered() {
    let upstream = Upstream::always(200);
    let limits = "[limits]\nrequest_head = \"8KiB\"\nrequest_fields = 10\n";
    let gateway = Gateway::start(&format!("{}{limits}", toml(&upstream)));
    let fields = |count: usize| (0..count).map(|n| format!("X-{n}: a\r\n")).collect::<String>();
    let status_of = |bytes: String| {
        let mut client = gateway.client();
        client.send_if_open(bytes);
        client.read_response().status
    };
    assert_eq!(status_of(format!("{GET}{}\r\n", fields(9))), 200);
    assert_eq!(status_of(format!("{GET}{}\r\n", fields(10))), 431);
    assert_eq!(status_of(format!("{GET}X: {}\r\n\r\n", "a".repeat(7000))), 200);
    assert_eq!(status_of(format!("{GET}X: {}\r\n\r\n", "a".repeat(9000))), 431);
    let wide = Gateway::start(&format!("{}[limits]\nrequest_fields = 300\n", toml(&upstream)));
    let mut client = wide.client();
    client.send(format!("{GET}{}\r\n", fields(250)));
    client.read_response().expect(200);
}

#[test]
fn floods_of_empty_lines_end_the_connection() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    let chunked = format!("{POST}Transfer-Encoding: chunked\r\n\r\n");
    for (name, flood) in [
        ("extensions of chunks", format!("1;{}\r\na\r\n", "x".repeat(1000)).repeat(1000)),
        ("one long extension", format!("1;{}\r\na\r\n", "x".repeat(100_000))),
        ("trailers", format!("0\r\n{}", "X-T: a\r\n".repeat(100_000))),
        ("one long trailer", format!("0\r\nX-T: {}", "x".repeat(1_000_000))),
    ] {
        let mut client = gateway.client();
        client.send_if_open(&chunked).send_if_open(flood);
        assert_eq!(client.read_response().status, 400, "{name}");
        client.shutdown_write();
        client.expect_closed();
    }
}

/// Browsers encode these characters, and old clients send them as they are.
#[test]
fn quotes_and_angle_brackets_in_a_query_are_encoded() {
    let upstream = Upstream::always(200);
    let rule = "[rules.r]\nkey = \"query:q\"\non_missing_key = \"refuse\"\nwindows = [\"2/day\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let encoded = "/a?q=%22%3Cx%3E%22";
    gateway.get("/a?q=\"<x>\"").expect(200);
    gateway.get(encoded).expect(200);
    gateway.get("/a?q=%22<x>\"").expect(429);
    assert!(upstream.received().iter().all(|request| request.target == encoded), "{:?}", upstream.received());
}
