//! The responses of the gateway when the upstream fails.

use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use crate::support::client::{Client, HOST, request};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, forward_all, within};

fn outcomes(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_upstream_requests_total", &[("upstream", "u"), ("outcome", outcome)])
}

/// The response to a GET, when the upstream follows `script` after each request.
fn response_to_script(script: &'static [u8]) -> crate::support::client::HttpResponse {
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            connection.send(script);
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let response = gateway.get("/a");
    assert_eq!(upstream.received().len(), 1, "more than one request");
    response
}

#[test]
fn an_unreachable_server_is_502() {
    let upstream = Upstream::refusing_connections();
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    for _ in 0..3 {
        let problem = client.get("/a").expect(502).problem();
        // Internal addresses are not disclosed.
        assert!(!problem.to_string().contains(&upstream.address.port().to_string()), "{problem}");
    }
    eventually_eq(|| outcomes(&gateway, "connect_failed"), 3);
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", "502")]), 3);
}

/// The messages for the client are the same, and name no server.
#[test]
fn every_upstream_that_fails_is_logged_once() {
    let silent = Upstream::with_script(|connection| {
        connection.read_request();
        connection.wait_for_close();
    });
    let broken = Upstream::always(99);
    let routes = [("a", &silent), ("b", &silent), ("c", &broken), ("d", &broken)].map(|(name, upstream)| {
        let upstream = upstream.toml(name);
        format!("{upstream}[[routes]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n")
    });
    let settings = "workers = 2\n[timeouts]\nresponse_head = \"300ms\"\n";
    let mut command = Command::new(BINARY);
    command.env("TRANSOM_LOG_FORMAT", "json");
    let mut process = Process::spawn_command(command, &format!("{settings}{}", routes.concat()), TempDir::new());
    // On connections to both workers.
    for (path, status, count) in [("/a", 504, 2), ("/b", 504, 2), ("/c", 502, 20), ("/d", 502, 20)] {
        (0..count).for_each(|_| drop(process.get(path).expect(status)));
    }
    process.signal("TERM");
    assert!(process.wait().success());
    let log = process.stderr();
    let messages = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let warnings: Vec<Value> = messages.filter(|message| message["level"] == "WARN").collect();
    let of = |field: &str| warnings.iter().map(|warning| warning[field].clone()).collect::<Vec<_>>();
    assert_eq!((of("upstream"), of("route")), (["a", "b", "c", "d"].map(Value::from).into(), of("upstream")), "{log}");
}

#[test]
fn a_malformed_response_is_502() {
    for script in [
        &b""[..],
        b"garbage\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 xyz OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nno field\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775808\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: \0\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ] {
        let response = response_to_script(script);
        assert_eq!(response.status, 502, "{:?}: {}", String::from_utf8_lossy(script), response.text());
        response.problem();
    }
}

/// There is no body, so its length does not matter.
#[test]
fn a_malformed_length_of_a_response_without_a_body_is_dropped() {
    for (script, status) in [
        (&b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5, 5\r\n\r\n"[..], 304),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 304),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nContent-Length: 1\r\n\r\n", 204),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: x\r\n\r\n", 204),
    ] {
        let response = response_to_script(script).expect(status);
        assert_eq!((response.field("content-length"), response.field("transfer-encoding")), (None, None));
    }
}

/// A response to HEAD has no body, but its length is forwarded, and caches use it.
#[test]
fn a_response_to_head_has_one_valid_content_length() {
    for length in ["5, 5", "5\r\nContent-Length: 5", "5\r\nTransfer-Encoding: chunked", "+5", "", "five"] {
        let upstream = Upstream::with_script(move |connection| {
            if connection.read_request().is_some() {
                connection.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"));
            }
        });
        let gateway = Gateway::start(&forward_all(&upstream));
        let response = gateway.client().request("HEAD", "/a", &[], b"");
        assert_eq!(response.status, 502, "{length:?}: {:?}", response.fields);
    }
}

#[test]
fn an_endless_response_head_is_502() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\n");
            while connection.send("X-More: and more, and more, and more, and more\r\n") {}
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    gateway.get("/a").expect(502).problem();
}

#[test]
fn a_truncated_response_is_not_taken_for_complete() {
    for (script, chunked) in [
        (&b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"[..], false),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", true),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n", true),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", true),
    ] {
        let upstream = Upstream::with_script(move |connection| {
            if connection.read_request().is_some() {
                connection.send(script);
            }
        });
        let gateway = Gateway::start(&forward_all(&upstream));
        let mut client = gateway.client();
        client.send(request("GET", "/a", &[], b""));
        client.read_head().unwrap().expect(200);
        let rest = client.read_to_end();
        let whole: &[u8] = if chunked { b"0\r\n\r\n" } else { b"abcdefghij" };
        assert!(!rest.ends_with(whole), "{:?}", String::from_utf8_lossy(&rest));
    }
}

#[test]
fn a_server_that_does_not_respond_is_504() {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            report.send(connection.wait_for_close()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!("{}\n[timeouts]\nresponse_head = \"50ms\"\n", forward_all(&upstream)));
    let mut client = gateway.client();
    within(Duration::from_millis(50), || client.get("/a").expect(504).problem());
    // The server notices the cancelled request by the closed connection.
    assert!(reported.recv().unwrap());
    client.post("/a", "body").expect(504).problem();
    eventually_eq(|| outcomes(&gateway, "timed_out"), 2);
    assert_eq!(upstream.received().len(), 2);
}

#[test]
fn a_stalled_upload_is_408() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}\n[timeouts]\nresponse_head = \"50ms\"\n", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 10\r\n\r\nabc"));
    within(Duration::from_millis(50), || client.read_response().expect(408).problem());
    client.expect_closed();
    // Malformed chunks are an error of the client.
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"));
    client.read_response().expect(400).problem();
    client.expect_closed();
}

#[test]
fn an_upload_in_progress_may_exceed_the_response_timeout() {
    let (step, steps) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_head().is_some() {
            for _ in 0..5 {
                step.send(connection.read_exactly(1)).unwrap();
            }
            connection.reply(200, &[], b"");
        }
    });
    let gateway = Gateway::start(&format!("{}\n[timeouts]\nresponse_head = \"4s\"\n", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5\r\n\r\n"));
    let start = std::time::Instant::now();
    for _ in 0..5 {
        // The pause is the slowness of the client, which is the subject of the test.
        std::thread::sleep(std::time::Duration::from_millis(900));
        client.send("x");
        steps.recv().unwrap();
    }
    assert!(start.elapsed().as_millis() > 4000);
    client.read_response().expect(200);
}

#[test]
fn requests_skip_a_dead_server() {
    let (a, b) = (Upstream::always(200), Upstream::always(200));
    let toml = |servers: &[&Upstream]| {
        let servers: Vec<String> = servers.iter().map(|server| format!("\"http://{}\"", server.address)).collect();
        format!(
            "workers = 1\n[upstreams.u]\nservers = [{}]\nbalance = \"round-robin\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
            servers.join(", ")
        )
    };
    let gateway = Gateway::start(&toml(&[&a, &b]));
    let mut client = gateway.client();
    for _ in 0..10 {
        client.get("/a").expect(200);
    }
    assert_eq!((a.received().len(), b.received().len()), (5, 5));

    let dead = Upstream::refusing_connections();
    let gateway = Gateway::start(&toml(&[&dead, &a]));
    let mut client = gateway.client();
    for _ in 0..10 {
        client.get("/a").expect(200);
        client.post("/a", "body").expect(200);
    }
    assert_eq!(a.received().len(), 25);
    eventually_eq(|| outcomes(&gateway, "responded"), 20);
    assert!(outcomes(&gateway, "connect_failed") >= 1);
}

#[test]
fn the_gateway_keeps_serving_after_every_failure() {
    let upstream = Upstream::with_script(|connection| {
        while let Some(received) = connection.read_request() {
            match received.target.as_str() {
                "/close" => return,
                "/garbage" => {
                    connection.send("garbage\r\n\r\n");
                    return;
                }
                "/truncate" => {
                    connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
                    return;
                }
                _ => connection.send(reply(200, &[], b"fine")),
            };
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    for _ in 0..5 {
        gateway.get("/close").expect(502);
        gateway.get("/garbage").expect(502);
        let mut client = Client::connect(gateway.http);
        client.send(request("GET", "/truncate", &[], b""));
        client.read_head().unwrap().expect(200);
        assert_eq!(client.read_to_end(), b"abc");
        gateway.get("/fine").expect(200);
    }
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}
