//! Rare and wrong behaviour of upstreams and clients that must not harm others.

use std::fs;
use std::process::Command;
use std::sync::{Arc, Barrier};

use crate::support::client::{Client, HOST, request};
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{self, END_HEADERS, END_STREAM, HEADERS, RawHttp2, STATUS_200, frame};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually_eq, forward_all, one_rule};

fn gateway(upstream: &Upstream) -> Gateway {
    Gateway::start(&format!("workers = 1\n{}", forward_all(upstream)))
}

#[test]
fn bytes_after_a_response_are_never_taken_for_the_next() {
    // Otherwise one client would receive the response to another.
    for body in [&b"fine"[..], b""] {
        let upstream = Upstream::with_script(move |connection| {
            while let Some(received) = connection.read_request() {
                let mut bytes = reply(200, &[], if received.target == "/first" { body } else { b"right" });
                if received.target == "/first" {
                    bytes.extend(reply(200, &[], b"wrong"));
                }
                connection.send(bytes);
            }
        });
        let gateway = gateway(&upstream);
        for _ in 0..5 {
            assert_eq!(gateway.get("/first").expect(200).body, body);
            assert_eq!(gateway.get("/second").expect(200).text(), "right");
        }
    }
}

#[test]
fn unsolicited_bytes_on_an_idle_connection_are_not_a_response() {
    // Some servers send 408 before they close an idle connection.
    let stderr = Arc::new(Barrier::new(2));
    let upstream = Upstream::with_script({
        let stderr = Arc::clone(&stderr);
        move |connection| {
            if let Some(received) = connection.read_request() {
                connection.reply(200, &[], received.target.as_bytes());
                connection.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                connection.close();
                stderr.wait();
            }
        }
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    for target in ["/a", "/b", "/c"] {
        assert_eq!(client.get(target).expect(200).text(), target);
        stderr.wait();
    }
    assert_eq!(upstream.received().len(), 3);
}

#[test]
fn a_response_to_head_may_announce_chunks() {
    let upstream = Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec());
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    for _ in 0..3 {
        client.request("HEAD", "/a", &[], b"").expect(200);
    }
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn servers_may_be_named_by_host_name() {
    let upstream = Upstream::always(200);
    let toml = forward_all(&upstream).replace("127.0.0.1", "localhost");
    Gateway::start(&toml).get("/a").expect(200);
    let toml = forward_all(&upstream).replace("127.0.0.1", "no-such-host.invalid");
    Gateway::start(&toml).get("/a").expect(502).problem();
}

#[test]
fn a_rejected_upload_still_receives_the_response() {
    let body = vec![b'x'; 200_000];
    // Refused by a rule, without a route, and by a server that closes the connection.
    let refusing = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]").replace("/{*rest}", "/a"));
    refusing.get("/a").expect(200);
    let upstream = Upstream::with_script(|connection| drop(connection.read_head()));
    let failing = gateway(&upstream);
    for (address, target, status) in [(refusing.http, "/a", 429), (refusing.http, "/b", 404), (failing.http, "/c", 502)]
    {
        for _ in 0..10 {
            let mut client = Client::connect(address);
            client.send_if_open(request("POST", target, &[], &body));
            client.read_response().expect(status).problem();
        }
    }
}

#[test]
fn curl_receives_a_refusal_during_a_large_upload() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    gateway.get("/a").expect(200);
    let scratch = TempDir::new();
    let file = scratch.write("large", vec![b'x'; 20_000_000]);
    for expect in ["Expect: 100-continue", "Expect:"] {
        let output = Command::new(program("curl"))
            .args(["--silent", "--show-error", "--max-time", "30", "--header", expect, "--output"])
            .arg(scratch.path().join("response"))
            .args(["--write-out", "%{http_code}", "--data-binary"])
            .arg(format!("@{}", file.display()))
            .arg(format!("http://{}/a", gateway.http))
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "429", "{expect}: {stderr}");
        assert!(
            fs::read_to_string(scratch.path().join("response")).unwrap().contains("quota-exceeded"),
            "{expect}: {stderr}"
        );
    }
}

#[test]
fn a_hundred_fields_are_accepted() {
    let upstream = Upstream::responding(|received| {
        let fields: Vec<(String, String)> =
            received.fields.iter().filter(|(name, _)| name.starts_with("x-n-")).cloned().collect();
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        reply(200, &fields, b"")
    });
    let gateway = gateway(&upstream);
    let fields: Vec<(String, String)> = (0..90).map(|n| (format!("X-N-{n}"), n.to_string())).collect();
    let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let response = gateway.get_with("/a", &fields).expect(200);
    assert_eq!(response.fields.iter().filter(|(name, _)| name.starts_with("x-n-")).count(), 90);
}

#[test]
fn options_asterisk_is_answered_by_the_gateway() {
    let upstream = Upstream::always(200);
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    // `OPTIONS *` is about the server as a whole (RFC 9110, section 9.3.7).
    let response = client.request("OPTIONS", "*", &[], b"").expect(200);
    assert_eq!(
        (response.field("allow"), response.body.len()),
        (Some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"), 0)
    );
    // The same in absolute form (RFC 9112, section 3.2.4).
    client.request("OPTIONS", &format!("http://{HOST}"), &[], b"").expect(200);
    client.request("GET", "*", &[], b"").expect(400).problem();
    let mut streams = RawHttp2::connect(gateway.http);
    streams.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, &http2_client::request_block("OPTIONS", "*")));
    assert_eq!(streams.read_status(1), STATUS_200);
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", "200")]), 3);
    assert_eq!(upstream.connections(), 0);
}

#[test]
fn a_body_of_many_small_chunks_arrives_whole() {
    let upstream = Upstream::responding(|received| reply(200, &[], &received.body));
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"));
    for n in 0..2000_u32 {
        client.send(format!("1\r\n{}\r\n", n % 10));
    }
    client.send("0\r\n\r\n");
    let expected: Vec<u8> = (0..2000_u32).map(|n| b'0' + (n % 10) as u8).collect();
    assert!(client.read_response().expect(200).body == expected);
}
