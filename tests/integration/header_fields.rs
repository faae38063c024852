//! Header fields: forwarded, removed and added.

use crate::support::client::{HOST, request};
use crate::support::forward_all;
use crate::support::gateway::Gateway;
use crate::support::upstream::{ReceivedRequest, Upstream, reply};

/// The request that the upstream receives.
fn forwarded_request(fields: &[(&str, &str)]) -> ReceivedRequest {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    gateway.get_with("/a?b=c", fields).expect(200);
    upstream.only_request()
}

fn names(received: &ReceivedRequest) -> Vec<&str> {
    let mut names: Vec<&str> = received.fields.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names
}

#[test]
fn only_documented_fields_are_added() {
    let received = forwarded_request(&[("Accept", "*/*"), ("X-Repeated", "1"), ("X-Repeated", "2")]);
    assert_eq!((received.method.as_str(), received.target.as_str()), ("GET", "/a?b=c"));
    assert_eq!(received.values("host"), [HOST]);
    assert_eq!(received.values("x-repeated"), ["1", "2"]);
    assert_eq!(received.values("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(received.values("x-forwarded-proto"), ["http"]);
    assert_eq!(received.values("x-forwarded-host"), [HOST]);
    let forwarding = ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"];
    let expected = [&["accept", "host"], &forwarding[..], &["x-repeated", "x-repeated", "x-request-id"]].concat();
    assert_eq!(names(&received), expected);
}

#[test]
fn hop_by_hop_fields_are_removed() {
    let received = forwarded_request(&[
        ("Connection", "keep-alive, X-Private"),
        ("Connection", "x-other,,close-by"),
        ("X-Private", "1"),
        ("X-Other", "1"),
        ("Close-By", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Proxy-Authorization", "Basic eDp5"),
        ("Upgrade", "h2c"),
        ("TE", "gzip"),
        ("X-Kept", "1"),
    ]);
    assert_eq!(
        names(&received),
        ["host", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-kept", "x-request-id"]
    );
}

#[test]
fn connection_cannot_remove_protected_fields() {
    let received = forwarded_request(&[
        ("Connection", "Host, Authorization, Cookie, Content-Type, X-Forwarded-For, X-Forwarded-Host"),
        ("Authorization", "Bearer a"),
        ("Cookie", "a=b"),
        ("Content-Type", "text/plain"),
    ]);
    for name in ["host", "authorization", "cookie", "content-type", "x-forwarded-for", "x-forwarded-host"] {
        assert_eq!(received.values(name).len(), 1, "{name}");
    }
}

#[test]
fn connection_cannot_remove_a_key_field() {
    let upstream = Upstream::always(200);
    let rule = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"1/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let fields = [("Connection", "X-User"), ("X-User", "bob")];
    gateway.get_with("/a", &fields).expect(200);
    assert_eq!(upstream.only_request().values("x-user"), ["bob"]);
    gateway.get_with("/a", &fields).expect(429);
}

#[test]
fn forwarding_fields_of_a_client_are_replaced() {
    let received = forwarded_request(&[
        ("X-Forwarded-For", "10.0.0.1"),
        ("x-forwarded-for", "10.0.0.2, 10.0.0.3"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "bank.example"),
        ("Forwarded", "for=10.0.0.1;host=bank.example"),
    ]);
    assert_eq!(received.values("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(received.values("x-forwarded-proto"), ["http"]);
    assert_eq!(received.values("x-forwarded-host"), [HOST]);
    assert_eq!(received.field("forwarded"), None);
}

#[test]
fn the_original_path_is_forwarded_although_a_normalized_one_was_matched() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    for target in ["//a/./b", "/x/../a?q=%2F..", "/%61", "/caf%C3%A9", "/a;b?c", "/?"] {
        gateway.get(target).expect(200);
        assert_eq!(upstream.received().last().unwrap().target, target);
    }
    // A target has no fragment (RFC 9112, section 3.2), and servers differ in how they treat one.
    let before = upstream.received().len();
    gateway.get("/a#b").expect(400);
    assert_eq!(upstream.received().len(), before);
    let toml = format!("forward_path = \"normalized\"\n{}", forward_all(&upstream));
    let gateway = Gateway::start(&toml);
    for (target, normal) in [("//a/./b", "/a/b"), ("/x/../a?q=%2F..", "/a?q=%2F.."), ("/%61", "/a"), ("/b%2d", "/b-")] {
        gateway.get(target).expect(200);
        assert_eq!(upstream.received().last().unwrap().target, normal);
    }
}

#[test]
fn response_fields_arrive_without_hop_by_hop_fields() {
    let upstream = Upstream::responding(|_| {
        let fields = [
            ("Server", "scripted"),
            ("Set-Cookie", "a=1; Path=/"),
            ("Set-Cookie", "b=2; Expires=Thu, 01 Jan 1970 00:00:00 GMT"),
            ("Connection", "X-Private"),
            ("X-Private", "1"),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Connection", "keep-alive"),
            ("Proxy-Authenticate", "Basic"),
            ("Upgrade", "h2,h2c"),
            ("X-Odd", "caf\u{e9}"),
            ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ];
        reply(200, &fields, b"fine")
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let response = gateway.get("/a").expect(200);
    assert_eq!(response.values("set-cookie"), ["a=1; Path=/", "b=2; Expires=Thu, 01 Jan 1970 00:00:00 GMT"]);
    let mut names: Vec<&str> = response.fields.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-length", "date", "server", "set-cookie", "set-cookie", "x-odd", "x-request-id"]);
    assert_eq!(response.field("server"), Some("scripted"));
    assert_eq!(response.field("date"), Some("Thu, 01 Jan 1970 00:00:00 GMT"));
}

#[test]
fn non_ascii_bytes_are_forwarded_both_ways() {
    let upstream = Upstream::responding(|received| {
        let value = received.field("x-name").unwrap().chars().map(|c| c as u8);
        let mut bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Name: ".to_vec();
        bytes.extend(value);
        bytes.extend(b"\r\n\r\n");
        bytes
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut bytes = b"GET /a HTTP/1.1\r\nHost: a\r\nX-Name: ".to_vec();
    bytes.extend([0xFF, 0x80, b'a', 0xC3, 0xA9]);
    bytes.extend(b"\r\n\r\n");
    let mut client = gateway.client();
    let response = client.send(bytes).read_response().expect(200);
    // The client reads fields as Latin-1.
    assert_eq!(response.field("x-name"), Some("\u{FF}\u{80}a\u{C3}\u{A9}"));
}

#[test]
fn every_method_except_connect_and_trace_is_forwarded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    for method in
        ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "M-SEARCH", "VERSION-CONTROL"]
    {
        gateway.client().request(method, "/a", &[], b"").expect(200);
        assert_eq!(upstream.received().last().unwrap().method, method);
    }
    let before = upstream.received().len();
    // Some servers accept it as the method in capitals, which a route may limit.
    for method in ["get", "Post", "brew"] {
        gateway.client().request(method, "/a", &[], b"").expect(400);
    }
    for (method, target) in [("CONNECT", "gateway.test:80"), ("TRACE", "/a")] {
        let mut client = gateway.client();
        let refused = client.send(request(method, target, &[], b"")).read_response().expect(405);
        refused.problem();
        assert!(refused.field("allow").is_some());
        client.expect_closed();
    }
    assert_eq!(upstream.received().len(), before);
}
