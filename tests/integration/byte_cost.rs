//! `cost = { bytes = … }`: bodies and tunnels are charged while they pass.

use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::access_log::wait_for_lines;
use crate::count_when::documented;
use crate::support::client::{Client, HOST, request};
use crate::support::gateway::Gateway;
use crate::support::gateway_group::query_decision;
use crate::support::http2_client::{DATA, RST_STREAM, RawHttp2, STATUS_200, frame};
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::RedisServer;
use crate::support::upstream::{ReceivedRequest, Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq};
use crate::websocket_streams::switching_upstream;

const HANDSHAKE: [(&str, &str); 4] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];
const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const LAST_CHUNK: &str = "0\r\n\r\n";
/// Of a transfer that is expected to be cut off long before, ten milliseconds apart.
const PIECES: usize = 2000;

fn config(upstream: &Upstream, rule: &str) -> String {
    format!(
        "{}[rules.r]\nkey = \"ip\"\n{rule}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

/// A rule with tokens of 1000 bytes.
fn rule(window: &str, counted: &str, more: &str) -> String {
    format!("windows = [\"{window}/day\"]\ncost = {{ bytes = \"{counted}\", unit = 1000{more} }}")
}

fn start(upstream: &Upstream, window: &str, counted: &str, more: &str) -> Gateway {
    Gateway::start(&config(upstream, &rule(window, counted, more)))
}

fn response_to(received: &ReceivedRequest) -> Vec<u8> {
    match (received.method.as_str(), received.target.as_str()) {
        ("HEAD", _) => b"HTTP/1.1 200 OK\r\nContent-Length: 4100\r\n\r\n".to_vec(),
        (_, "/empty") => b"HTTP/1.1 204 No Content\r\n\r\n".to_vec(),
        (_, "/error") => reply(500, &[], &[b'x'; 4100]),
        _ => reply(200, &[], &[b'x'; 4100]),
    }
}

/// An upstream whose responses have 4100 bytes, or what the path says.
fn upstream() -> Upstream {
    Upstream::responding(response_to)
}

fn used(gateway: &Gateway, rule: &str) -> u64 {
    let query = json!({"rule": rule, "key": "127.0.0.1"});
    gateway.decision("value", &query).expect(200).json()["count"].as_u64().unwrap()
}

/// Waits until a gateway has charged so many tokens.
fn eventually_used(gateway: &Gateway, tokens: u64) {
    eventually_eq(|| used(gateway, "r"), tokens);
}

fn cut_transfers(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_request_errors_total", &[("error", "limit_exceeded")])
}

#[test]
fn the_bytes_of_bodies_are_counted_in_whole_units_of_a_request() {
    let upstream = upstream();
    for (counted, of_post, of_get) in [("request", 3, 0), ("response", 5, 5), ("both", 7, 5)] {
        let gateway = start(&upstream, "100kB", counted, "");
        let mut client = gateway.client();
        let first = client.post("/", [b'x'; 2500]).expect(200);
        let policy = first.field("ratelimit-policy").unwrap();
        assert_eq!(policy, "\"r\";q=100000;w=86400;qu=\"content-bytes\"");
        eventually_used(&gateway, of_post);
        client.get("/").expect(200);
        eventually_used(&gateway, of_post + of_get);
        client.request("HEAD", "/", &[], b"").expect(200);
        assert_eq!(remaining(&client.get("/empty").expect(204), "r"), 100_000 - (of_post + of_get) * 1000);
        eventually_used(&gateway, of_post + of_get);
    }
}

#[test]
fn a_key_without_tokens_is_refused_and_charged_nothing() {
    let upstream = upstream();
    let gateway = start(&upstream, "9kB", "both", "");
    for (status, used) in [(200, 5), (200, 10), (429, 10), (429, 10)] {
        gateway.client().post("/", b"").expect(status);
        eventually_used(&gateway, used);
    }
    // The tenth token is owed.
    gateway.advance_s(86_400);
    eventually_used(&gateway, 1);
}

#[test]
fn only_counted_responses_are_charged() {
    let upstream = upstream();
    let refunding = rule("100kB", "both", ", refund_on = [\"5xx\"], reserve = 50");
    let counting = format!("{}\ncount_when = {{ status = [500] }}", rule("100kB", "both", ""));
    for (rule, of_error, of_other) in [(refunding, 0, 7), (counting, 7, 0)] {
        let gateway = Gateway::start(&config(&upstream, &rule));
        gateway.client().post("/error", [b'x'; 2500]).expect(500);
        eventually_used(&gateway, of_error);
        gateway.client().post("/", [b'x'; 2500]).expect(200);
        eventually_used(&gateway, of_error + of_other);
    }
}

#[test]
fn nothing_is_charged_before_the_response_decides() {
    for condition in ["refund_on = [\"5xx\"]", "count_when = { status = [200] }"] {
        let (proceed, released) = channel();
        let released = Mutex::new(released);
        let upstream = Upstream::with_script(move |connection| {
            connection.read_request();
            let _ = released.lock().unwrap().recv();
            connection.send(reply(500, &[], b""));
        });
        let (in_cost, in_rule) = match condition.starts_with("refund_on") {
            true => (format!(", {condition}"), String::new()),
            false => (String::new(), format!("\n{condition}")),
        };
        let conditional = format!("{}{in_rule}", rule("100kB", "both", &in_cost));
        let charging = format!("[rules.charging]\nkey = \"ip\"\n{}\n[[routes]]", rule("100kB", "both", ""));
        let toml = config(&upstream, &conditional).replace("[[routes]]", &charging);
        let gateway = Gateway::start(&toml.replace("[\"r\"]", "[\"r\", \"charging\"]"));
        // Dropped before the upstream, which waits for it.
        let proceed = proceed;
        let mut client = gateway.client();
        client.send(request("POST", "/", &[], &[b'x'; 2500]));
        // The same call charges both rules, or does not.
        eventually_eq(|| used(&gateway, "charging"), 3);
        assert_eq!(used(&gateway, "r"), 0, "{condition}");
        proceed.send(()).unwrap();
        client.read_response().expect(500);
        assert_eq!(used(&gateway, "r"), 0, "{condition}");
    }
}

#[test]
fn a_reserve_is_charged_before_and_settled_at_the_end() {
    let upstream = upstream();
    for reserve in [2, 10] {
        let gateway = start(&upstream, "100kB", "response", &format!(", reserve = {reserve}"));
        assert_eq!(remaining(&gateway.get("/").expect(200), "r"), 100_000 - reserve * 1000);
        eventually_used(&gateway, 5);
    }
}

/// An upstream that sends a chunk of 5000 bytes for each message, and ends the response with the sender.
fn chunk_by_chunk() -> (Upstream, Sender<()>) {
    let (proceed, released) = channel();
    let released = Mutex::new(released);
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_head().is_none() {
            return;
        }
        connection.send(CHUNKED);
        let pieces = released.lock().unwrap();
        pieces.iter().for_each(|()| _ = connection.send(format!("1388\r\n{}\r\n", "x".repeat(5000))));
        connection.send(LAST_CHUNK);
    });
    (upstream, proceed)
}

fn begin_download(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    client.send(request("GET", "/", &[], b""));
    client.read_head().unwrap().expect(200);
    client
}

#[test]
fn a_download_is_charged_while_it_passes_and_finishes_beyond_the_limit() {
    let (upstream, proceed) = chunk_by_chunk();
    let gateway = start(&upstream, "8kB", "response", "");
    let mut client = begin_download(&gateway);
    for used in [5, 10, 15] {
        proceed.send(()).unwrap();
        client.read_chunk().unwrap();
        // The bytes are charged although no more follow.
        eventually_used(&gateway, used);
    }
    gateway.get("/").expect(429);
    drop(proceed);
    assert_eq!(client.read_chunk(), None, "the last chunk");
    assert_eq!(cut_transfers(&gateway), 0);
}

#[test]
fn what_has_passed_is_charged_when_the_client_disconnects() {
    let (upstream, proceed) = chunk_by_chunk();
    let gateway = start(&upstream, "100kB", "response", ", reserve = 1");
    let mut client = begin_download(&gateway);
    proceed.send(()).unwrap();
    client.read_chunk().unwrap();
    drop(client);
    eventually_used(&gateway, 5);
    drop(proceed);

    let upstream = Upstream::with_script(|connection| _ = connection.read_request());
    let gateway = start(&upstream, "100kB", "request", "");
    let mut client = gateway.client();
    client.send(format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 9000\r\n\r\n{}", "x".repeat(3500)));
    eventually("the upstream has the bytes", || upstream.bytes_received() >= 3500);
    drop(client);
    eventually_used(&gateway, 4);
}

/// Sends pieces of 1000 bytes. Returns whether all were sent.
fn send_pieces(piece: &str, mut send: impl FnMut(&str) -> bool) -> bool {
    (0..PIECES).all(|_| {
        thread::sleep(Duration::from_millis(10));
        send(piece)
    })
}

/// An upstream that sends a long download.
fn long_download() -> Upstream {
    Upstream::with_script(|connection| {
        connection.read_request();
        connection.send(CHUNKED);
        let chunk = format!("3e8\r\n{}\r\n", "x".repeat(1000));
        if send_pieces(&chunk, |piece| connection.send(piece)) {
            connection.send(LAST_CHUNK);
        }
    })
}

#[test]
fn a_download_that_exceeds_the_limit_is_cut() {
    let scratch = TempDir::new();
    let (upstream, log) = (long_download(), scratch.path().join("access.log"));
    let rule = rule("8kB", "both", ", on_exceeded = \"cut\"");
    let toml = format!("{}[access_log]\nfile = {log:?}\n", config(&upstream, &rule));
    let gateway = Gateway::start(&toml);
    let rest = begin_download(&gateway).read_to_end();
    assert!(rest.len() > 8000 && !rest.ends_with(LAST_CHUNK.as_bytes()), "{} bytes", rest.len());
    eventually_eq(|| cut_transfers(&gateway), 1);
    gateway.get("/").expect(429);
    let logged = || std::fs::read_to_string(&log).unwrap_or_default();
    eventually("the log has the reason", || logged().contains("the transfer was cut off: it exceeds a limit of bytes"));
    assert!(logged().contains("\"cut_by\":\"r\""), "{}", logged());
}

/// Of requests that it would refuse, a shadow rule counts nothing.
#[test]
fn a_shadow_rule_breaks_nothing_off_and_charges_what_it_would_admit() {
    let shadow = format!("{}\non_limit = \"shadow\"", rule("8kB", "response", ", on_exceeded = \"cut\""));
    let (upstream, proceed) = chunk_by_chunk();
    let gateway = Gateway::start(&config(&upstream, &shadow));
    let mut client = begin_download(&gateway);
    for used in [5, 10, 15] {
        proceed.send(()).unwrap();
        client.read_chunk().unwrap();
        eventually_used(&gateway, used);
    }
    drop(proceed);
    assert_eq!(client.read_chunk(), None, "the last chunk");
    assert_eq!(cut_transfers(&gateway), 0);

    let upstream = self::upstream();
    let gateway = Gateway::start(&config(&upstream, &shadow));
    for used in [5, 10, 10, 10] {
        gateway.get("/").expect(200);
        eventually_used(&gateway, used);
    }
}

#[test]
fn a_download_on_a_stream_is_reset_by_a_cut() {
    let upstream = long_download();
    let gateway = start(&upstream, "8kB", "response", ", on_exceeded = \"cut\"");
    let mut client = RawHttp2::connect(gateway.http);
    client.get(1, "/");
    let mut bytes = 0;
    loop {
        let frame = client.next_frame().expect("the connection stays open");
        match frame.kind {
            DATA => bytes += frame.payload.len(),
            RST_STREAM => break,
            _ => {}
        }
    }
    assert!(bytes > 8000, "{bytes}");
}

#[test]
fn an_upload_that_exceeds_the_limit_is_cut() {
    let upstream = Upstream::with_script(|connection| _ = connection.read_request());
    let gateway = start(&upstream, "8kB", "request", ", on_exceeded = \"cut\"");
    let mut client = gateway.client();
    client.send(format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"));
    let chunk = format!("3e8\r\n{}\r\n", "x".repeat(1000));
    let is_uncut = send_pieces(&chunk, |piece| {
        client.send_if_open(piece);
        cut_transfers(&gateway) == 0
    });
    assert!(!is_uncut);
    assert_eq!(client.read_response().expect(429).problem()["title"], "Too Many Requests");
    // Nothing is charged for the response.
    gateway.get("/").expect(429);
}

/// A tunnel whose upstream sends each byte back twice.
fn doubling_upstream() -> Upstream {
    Upstream::with_script(|connection| {
        if connection.read_head().is_some() {
            connection.send(SWITCH);
            while let Some(byte) = connection.read_exactly(1) {
                connection.send([byte[0]; 2]);
            }
        }
    })
}

fn open_tunnel(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    client.send(request("GET", "/chat", &HANDSHAKE, b""));
    client.read_head().unwrap().expect(101);
    client
}

#[test]
fn the_directions_of_a_tunnel_are_charged_while_it_is_open() {
    let upstream = doubling_upstream();
    for (counted, first, second) in [("request", 2, 3), ("response", 4, 6), ("both", 6, 9)] {
        let gateway = start(&upstream, "100kB", counted, "");
        let mut client = open_tunnel(&gateway);
        client.send([b'x'; 2000]);
        client.read_exactly(4000);
        eventually_used(&gateway, first);
        client.send([b'x'; 999]);
        client.read_exactly(1998);
        drop(client);
        eventually_used(&gateway, second);
    }
}

#[test]
fn a_tunnel_that_exceeds_the_limit_is_closed() {
    let upstream = doubling_upstream();
    let gateway = start(&upstream, "5kB", "response", ", on_exceeded = \"cut\"");
    let mut client = open_tunnel(&gateway);
    client.send([b'x'; 2500]);
    client.read_exactly(5000);
    // All of the limit is used, and no more.
    eventually_used(&gateway, 5);
    client.send(b"x");
    client.read_exactly(2);
    client.expect_closed();
    eventually_eq(|| cut_transfers(&gateway), 1);

    let gateway = start(&upstream, "5kB", "response", "");
    let mut client = open_tunnel(&gateway);
    client.send([b'x'; 3000]);
    client.read_exactly(6000);
    eventually_used(&gateway, 6);
    client.send(b"x");
    assert_eq!(client.read_exactly(2), b"xx");
}

/// The same for a WebSocket on a stream of HTTP/2.
#[test]
fn a_tunnel_on_a_stream_is_charged_and_cut() {
    let upstream = switching_upstream(|connection| {
        while let Some(byte) = connection.read_exactly(1) {
            connection.send([byte[0]; 2]);
        }
    });
    let read = |client: &mut RawHttp2, mut bytes: usize| {
        while bytes > 0 {
            bytes -= client.read_until(DATA).payload.len();
        }
    };
    for (more, used) in [("", 6), (", on_exceeded = \"cut\"", 5)] {
        let gateway = start(&upstream, "5kB", "response", more);
        let mut client = RawHttp2::connect(gateway.http);
        assert_eq!(client.open_websocket(1, "/chat").read_status(1), STATUS_200);
        let piece = vec![b'x'; used as usize * 500];
        client.send(frame(DATA, 0, 1, &piece));
        read(&mut client, 2 * piece.len());
        eventually_used(&gateway, used);
        client.send(frame(DATA, 0, 1, b"x"));
        read(&mut client, 2);
        if more.is_empty() {
            client.send(frame(DATA, 0, 1, b"x"));
            read(&mut client, 2);
        } else {
            client.read_until(RST_STREAM);
        }
        eventually_eq(|| cut_transfers(&gateway), u64::from(!more.is_empty()));
        gateway.get("/").expect(429);
    }
}

/// In an outage of the store, the gateway counts by itself.
#[test]
fn bytes_are_counted_and_cut_during_an_outage() {
    for mode in ["exact", "lease"] {
        let mut redis = RedisServer::start();
        let upstream = long_download();
        let rule = format!("{}\nshared = \"{mode}\"", rule("8kB", "response", ", on_exceeded = \"cut\""));
        let store = format!("[counters.shared]\nredis = \"{}\"\n", redis.url());
        let gateway = Process::spawn(&(store + &config(&upstream, &rule)));
        redis.kill();
        let mut client = gateway.client();
        client.send(request("GET", "/", &[], b""));
        client.read_head().unwrap().expect(200);
        let rest = client.read_to_end();
        assert!(rest.len() > 8000 && !rest.ends_with(LAST_CHUNK.as_bytes()), "{mode}: {} bytes", rest.len());
        gateway.get("/").expect(429);
    }
}

#[test]
fn gateways_count_bytes_together() {
    let redis = RedisServer::start();
    for (mode, reserve) in [("exact", 0), ("lease", 0), ("lease", 1)] {
        let (upstream, proceed) = chunk_by_chunk();
        let name = format!("r-{mode}-{reserve}");
        let rule = format!("{}\nshared = \"{mode}\"", rule("12kB", "both", &format!(", reserve = {reserve}")));
        let toml = config(&upstream, &rule).replace("rules.r]", &format!("rules.{name}]"));
        let toml = toml.replace("\"r\"]", &format!("\"{name}\"]"));
        let toml = format!("[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n{toml}", redis.url());
        let gateways = [Process::spawn(&toml), Process::spawn(&toml)];
        let mut client = gateways[0].client();
        client.send(request("GET", "/", &[], b""));
        client.read_head().unwrap().expect(200);
        for piece in 1..=3 {
            proceed.send(()).unwrap();
            client.read_chunk().unwrap();
            for gateway in &gateways {
                let query = json!({"rule": name, "key": "127.0.0.1"});
                eventually_eq(|| query_decision(gateway, "value", &query)["count"].as_u64(), Some(5 * piece));
            }
        }
        gateways[1].get("/").expect(429);
    }
}

#[test]
fn the_guide_counts_uploads_twice_and_downloads_once() {
    let upstream = upstream();
    let gateway = Gateway::start(&documented("bytes.md", upstream.address));
    gateway.client().post("/", [b'x'; 2500]).expect(200);
    let left = || {
        let response = gateway.get("/empty").expect(204);
        ["traffic", "uploads"].map(|rule| remaining(&response, rule))
    };
    eventually_eq(left, [(10 << 30) - 7 * 1024, (500 << 20) - 3 * 1024]);
}

/// Bytes of the last half second are charged when the request ends, before its line is written: if the client goes away during
/// the upload, and if it does while it waits for the response.
#[test]
fn the_access_log_states_the_bytes_of_a_request_that_breaks_off() {
    for length in [10_000, 4100] {
        let (arrived, has_arrived) = channel();
        let arrived = Mutex::new(arrived);
        let upstream = Upstream::with_script(move |connection| {
            connection.read_head().unwrap();
            connection.read_exactly(4100).unwrap();
            arrived.lock().unwrap().send(()).unwrap();
            connection.wait_for_close();
        });
        let directory = TempDir::new();
        let file = directory.path().join("access.log");
        let toml = format!("[access_log]\nfile = {file:?}\n{}", config(&upstream, &rule("100000", "both", "")));
        let gateway = Gateway::start(&toml);
        let mut client = gateway.client();
        client.send(format!("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n")).send([b'x'; 4100]);
        has_arrived.recv().unwrap();
        drop(client);
        let line = wait_for_lines(&file, 1).remove(0);
        assert_eq!((&line["reserved"], &line["cost"]), (&json!({ "r": 0 }), &json!({ "r": 5 })), "{length}: {line}");
    }
}
