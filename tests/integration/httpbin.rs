//! Responses of httpbin are identical with and without the gateway.
//!
//! Not compared, because the response is random: `/uuid`, `/bytes` and `/stream-bytes` without a seed, `/digest-auth` (a
//! nonce) and `/cache` (an ETag and the time).

use crate::support::client::HOST;
use crate::support::compare_direct::DirectComparison;
use crate::support::external_servers::{self, ExternalServer};
use crate::support::gateway::Gateway;

fn comparison() -> (ExternalServer, Gateway, DirectComparison) {
    let server = external_servers::httpbin();
    let toml = format!(
        "{}[rules.r]\nkey = \"ip\"\nwindows = [\"1000000/hour\", \"100000/minute\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        server.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let comparison = DirectComparison { direct: server.address, gateway: gateway.http };
    (server, gateway, comparison)
}

#[test]
fn pages_encodings_and_streams_are_identical() {
    let (_server, _gateway, comparison) = comparison();
    for target in [
        "/html",
        "/robots.txt",
        "/deny",
        "/xml",
        "/json",
        "/encoding/utf8",
        "/forms/post",
        "/links/10/3",
        "/links/10",
        "/image/png",
        "/image/jpeg",
        "/image/webp",
        "/image/svg",
        "/base64/SFRUUEJJTiBpcyBhd2Vzb21l",
        "/bytes/0?seed=1",
        "/bytes/1?seed=1",
        "/bytes/102400?seed=42",
        "/stream-bytes/100000?seed=7&chunk_size=1000",
        "/stream-bytes/5?seed=7&chunk_size=1",
        "/drip?duration=0.3&numbytes=6&delay=0",
        "/drip?duration=0&numbytes=0&code=202",
        "/range/1024",
        "/range/100000?duration=0&chunk_size=777",
        "/no-such-page",
        "/ip",
        "/user-agent",
        "/",
    ] {
        comparison.assert_same_response("GET", target, &[("User-Agent", "integration/1.0")], b"");
        comparison.assert_same_response("HEAD", target, &[("User-Agent", "integration/1.0")], b"");
    }
    for accept in ["image/webp", "image/svg+xml", "image/jpeg", "image/*", "text/plain"] {
        comparison.assert_same_response("GET", "/image", &[("Accept", accept)], b"");
    }
    comparison.assert_same_echo("GET", "/delay/1", &[("X-A", "b")], b"");
}

#[test]
fn every_status_is_identical() {
    let (_server, _gateway, comparison) = comparison();
    for status in (200..=208).chain(300..=308).chain(400..=431).chain([451, 499]).chain(500..=511).chain([599, 700]) {
        let target = format!("/status/{status}");
        let response = comparison.assert_same_response("GET", &target, &[], b"");
        if status < 600 {
            assert_eq!(response.status, status);
        }
        for method in ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            comparison.assert_same_response(method, &target, &[], b"");
        }
    }
}

#[test]
fn redirects_cookies_conditions_and_credentials_are_identical() {
    let (_server, _gateway, comparison) = comparison();
    let get = |target: &str, fields: &[(&str, &str)]| comparison.assert_same_response("GET", target, fields, b"");
    for target in ["/redirect/3", "/relative-redirect/2", "/redirect-to?url=%2Fget%3Fa%3Db&status_code=307"] {
        assert!(get(target, &[]).field("location").is_some());
    }
    // The location contains the requested host.
    let location = get("/absolute-redirect/2", &[]);
    assert_eq!(location.field("location"), Some(format!("http://{HOST}/absolute-redirect/1").as_str()));

    let set = get("/cookies/set?a=1&b=two&c=%22x%22", &[]);
    assert_eq!(set.values("set-cookie").len(), 3);
    get("/cookies/set/name/value", &[]);
    assert_eq!(get("/cookies/delete?a&b", &[("Cookie", "a=1; b=2; c=3")]).values("set-cookie").len(), 2);
    get("/cookies", &[("Cookie", "a=1; b=\"quoted, and more\"")]);
    get("/cookies", &[("Cookie", "a=1"), ("Cookie", "b=2")]);

    for range in ["bytes=0-99", "bytes=1000-", "bytes=-24", "bytes=2000-3000", "bytes=5-1", "nonsense"] {
        get("/range/1024", &[("Range", range)]);
    }
    get("/etag/abc", &[("If-None-Match", "\"abc\"")]).expect(304);
    get("/etag/abc", &[("If-Match", "\"other\"")]).expect(412);
    get("/cache", &[("If-Modified-Since", "Sat, 01 Jan 2022 00:00:00 GMT")]).expect(304);

    get("/basic-auth/user/passwd", &[]).expect(401);
    get("/basic-auth/user/passwd", &[("Authorization", "Basic dXNlcjpwYXNzd2Q=")]).expect(200);
    get("/hidden-basic-auth/user/passwd", &[]).expect(404);
    get("/bearer", &[]).expect(401);
    get("/bearer", &[("Authorization", "Bearer token")]).expect(200);
    comparison.assert_same_echo("GET", "/etag/abc", &[], b"");
    comparison.assert_same_echo("GET", "/cache/60", &[], b"");
}

#[test]
fn response_fields_are_identical() {
    let (_server, _gateway, comparison) = comparison();
    for target in [
        "/response-headers?X-One=1&X-One=2&X-Two=",
        "/response-headers?Content-Type=text%2Fplain%3B%20charset%3DUTF-8&Server=httpbin",
        "/response-headers?Link=%3C%2Fa%3E%3B%20rel%3Dnext&Link=%3C%2Fb%3E&Vary=Accept&Vary=Cookie",
        "/response-headers?WWW-Authenticate=Negotiate&Cache-Control=no-store&Retry-After=120",
        "/response-headers?X-Forwarded-For=upstream&X-RateLimit-Limit=5&X-RateLimit-Remaining=4",
        "/response-headers?X-Latin=caf%C3%A9",
    ] {
        comparison.assert_same_response("GET", target, &[], b"");
        comparison.assert_same_response("POST", target, &[], b"");
    }
}

#[test]
fn the_server_receives_identical_requests() {
    let (_server, _gateway, comparison) = comparison();
    let long = "x".repeat(6000);
    for fields in [
        &[][..],
        &[("Accept", "*/*"), ("User-Agent", "integration/1.0"), ("Accept-Language", "de, en;q=0.5")],
        &[("X-Repeated", "one"), ("X-Repeated", "two"), ("X-Empty", "")],
        &[("x-lower", "a"), ("X-UPPER", "b"), ("Cookie", "a=1; b=2"), ("Authorization", "Bearer secret")],
        &[("X-Long", &long)],
        &[("Referer", "http://elsewhere.test/?a=b#c"), ("Origin", "null"), ("Cache-Control", "no-cache")],
    ] {
        comparison.assert_same_echo("GET", "/headers", fields, b"");
        comparison.assert_same_echo("GET", "/get?a=1&a=2&b=%C3%BC&c=%2F%20+&d", fields, b"");
    }
    for target in [
        "/anything/%C3%BCber/w%20w",
        "/anything/a;b=c,d@e:f!$&'()*+=",
        "/anything/%7Euser/~user",
        "/anything?",
        "/anything/a//b/./c/../d",
    ] {
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE"] {
            comparison.assert_same_echo(method, target, &[], b"");
        }
    }
}

#[test]
fn request_bodies_arrive_identically() {
    let (_server, _gateway, comparison) = comparison();
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    let multipart = ("Content-Type", "multipart/form-data; boundary=XX");
    let parts = b"--XX\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n\
        --XX\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f.bin\"\r\n\
        Content-Type: application/octet-stream\r\n\r\n\x00\x01\xff\r\n--XX--\r\n";
    let large = "0123456789abcdef".repeat(16 * 1024);
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        let target = &format!("/{}", method.to_ascii_lowercase());
        comparison.assert_same_echo(method, target, &[form], b"a=1&a=2&b=%C3%BC&c=");
        comparison.assert_same_echo(method, target, &[multipart], parts);
        comparison.assert_same_echo(
            method,
            target,
            &[("Content-Type", "application/json")],
            b"{\"a\": [1, null, \"\xc3\xbc\"]}",
        );
        comparison.assert_same_echo(
            method,
            target,
            &[("Content-Type", "application/octet-stream")],
            b"\x00\x01\xfe\xff",
        );
        comparison.assert_same_echo(method, target, &[], large.as_bytes());
        comparison.assert_same_echo(method, target, &[("Content-Length", "0")], b"");
        let chunked = format!(
            "{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n\
             3\r\nabc\r\n1;extension=1\r\nd\r\n1A\r\nefghijklmnopqrstuvwxyz0123\r\n0\r\n\r\n"
        );
        comparison.assert_same_echo_for_bytes(method, target, chunked.as_bytes());
    }
    comparison.assert_same_response(
        "OPTIONS",
        "/get",
        &[("Origin", "http://a.test"), ("Access-Control-Request-Method", "PUT")],
        b"",
    );
    comparison.assert_same_response("POST", "/get", &[], b"not allowed here").expect(405);
}

#[test]
fn content_codings_are_forwarded_unchanged() {
    let (_server, _gateway, comparison) = comparison();
    // The content depends on the received fields, so the length differs by the fields that the gateway adds; the coding does
    // not.
    for (target, coding) in [("/gzip", "gzip"), ("/deflate", "deflate"), ("/brotli", "br")] {
        let (direct, through) =
            comparison.send_to_both("GET", &crate::support::client::request("GET", target, &[], b""));
        assert_eq!(through.field("content-encoding"), Some(coding));
        assert_eq!(through.field("content-encoding"), direct.field("content-encoding"));
        let difference = through.body.len().abs_diff(direct.body.len());
        assert!(difference < 60, "{target}: {difference} bytes");
    }
}
