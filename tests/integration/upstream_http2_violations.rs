//! Violations of RFC 9113 by an HTTP/2 upstream: the error that the gateway sends to the upstream, and the response of the
//! client.
//!
//! The h2 library detects these errors. Two of its reactions differ from the RFC, and it does not detect one error; each is
//! marked, and none of them forwards malformed data to a client.

use std::io::Read as _;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use socket2::SockRef;

use crate::support::client::{HOST, request};
use crate::support::forward_all;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, Http2Client, RST_STREAM, RawHttp2, STATUS_200, WINDOW_UPDATE,
    frame, header_block, settings,
};
use crate::support::upstream::Upstream;

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;

const INITIAL_WINDOW_SIZE: u16 = 4;
const WINDOW_MAX: u32 = 0x7fff_ffff;

/// A request whose body never ends.
const UPLOAD: &str = "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc";

/// An upstream that sends these bytes after the first request, and reports the first error that the gateway sends.
fn responding_with(bytes: Vec<u8>) -> (Upstream, mpsc::Receiver<(u8, u32)>) {
    let (report, reported) = mpsc::channel();
    let report = Mutex::new(report);
    let upstream = Upstream::with_script(move |connection| {
        let mut raw = RawHttp2::accept(connection.stream().try_clone().unwrap());
        raw.read_until(HEADERS);
        raw.send(&bytes);
        // The first error that the gateway sends.
        let error = std::iter::from_fn(|| raw.next_frame()).find(|frame| [RST_STREAM, GOAWAY].contains(&frame.kind));
        if let Some(frame) = error {
            // At its end, a test does not wait for it.
            let _ = report.lock().unwrap().send((frame.kind, frame.code()));
        }
    });
    (upstream, reported)
}

fn gateway(upstream: &Upstream) -> Gateway {
    let toml = forward_all(upstream).replace("[[routes]]", "protocol = \"http2\"\n[[routes]]");
    Gateway::start(&format!("workers = 1\n{toml}"))
}

fn head() -> Vec<u8> {
    frame(HEADERS, END_HEADERS, 1, &[STATUS_200])
}

fn whole() -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, 1, &[STATUS_200])
}

fn data() -> Vec<u8> {
    frame(DATA, END_STREAM, 1, b"abc")
}

fn window(stream: u32, bytes: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

#[test]
fn frames_on_closed_streams_and_beyond_the_window_are_errors() {
    let get = request("GET", "/a", &[], b"");
    let upload = UPLOAD.as_bytes().to_vec();
    let more_than_a_window = frame(DATA, 0, 1, &[b'x'; 16_384]).repeat(32);
    let cases = [
        ("DATA on a closed stream", &get, [whole(), data()].concat(), (RST_STREAM, STREAM_CLOSED), 200),
        // RFC 9113, section 5.1: a stream error STREAM_CLOSED. h2 ends the connection.
        ("DATA behind END_STREAM", &upload, [whole(), data()].concat(), (GOAWAY, PROTOCOL_ERROR), 200),
        ("a stream's window overflows", &upload, window(1, WINDOW_MAX), (RST_STREAM, FLOW_CONTROL_ERROR), 502),
        ("the connection's window overflows", &get, window(0, WINDOW_MAX), (GOAWAY, FLOW_CONTROL_ERROR), 502),
        (
            "a setting makes a stream's window overflow",
            &upload,
            [window(1, WINDOW_MAX - 65_535), settings(&[(INITIAL_WINDOW_SIZE, WINDOW_MAX)])].concat(),
            (GOAWAY, FLOW_CONTROL_ERROR),
            502,
        ),
        // RFC 9113, section 6.5.2: FLOW_CONTROL_ERROR.
        ("a window too large", &get, settings(&[(INITIAL_WINDOW_SIZE, WINDOW_MAX + 1)]), (GOAWAY, PROTOCOL_ERROR), 502),
        (
            "DATA beyond the stream's window",
            &get,
            [head(), more_than_a_window].concat(),
            (RST_STREAM, FLOW_CONTROL_ERROR),
            200,
        ),
    ];
    for (name, request, bytes, error, status) in cases {
        let (upstream, reported) = responding_with(bytes);
        let gateway = gateway(&upstream);
        let mut client = gateway.client();
        client.send(request);
        assert_eq!(client.read_head().unwrap().status, status, "{name}");
        assert_eq!(reported.recv(), Ok(error), "{name}");
        if name.contains("beyond") {
            assert!(!client.read_to_end().ends_with(b"0\r\n\r\n"), "{name}: the response looks complete");
        }
    }
}

/// RFC 9113, sections 8.1 and 8.3: malformed. h2 drops such fields and accepts the rest, so they are not forwarded.
#[test]
fn misplaced_pseudo_header_fields_of_a_response_are_not_forwarded() {
    let trailers = header_block(&[(":status", "500"), ("x-end", "9")]);
    let cases = [
        [head(), frame(HEADERS, END_STREAM | END_HEADERS, 1, &trailers)].concat(),
        frame(HEADERS, END_STREAM | END_HEADERS, 1, &[&[STATUS_200][..], &header_block(&[(":path", "/")])].concat()),
    ];
    for (bytes, trailers) in cases.into_iter().zip([&["x-end"][..], &[]]) {
        let (upstream, _reported) = responding_with(bytes);
        let gateway = gateway(&upstream);
        let response =
            Http2Client::connect(gateway.http).request_path("GET", "/a", &[("te", "trailers")], b"").expect(200);
        let names = |fields: &[(String, String)]| fields.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert!(
            response.fields.iter().all(|(name, _)| ["date", "content-length", "x-request-id"].contains(&name.as_str())),
            "{response:?}"
        );
        assert_eq!(names(&response.trailers), trailers);
    }
}

/// A length says nothing about a 204 or a 304, which have no body. h2 resets a stream whose length is no number, or whose lengths
/// differ, for every status (RFC 9113, section 8.1.1: a malformed response).
#[test]
fn a_length_of_a_response_without_a_body_is_no_error() {
    let ends_at_once = |block: &[u8]| frame(HEADERS, END_STREAM | END_HEADERS, 1, block);
    let ends_later = |block: &[u8]| [frame(HEADERS, END_HEADERS, 1, block), frame(DATA, END_STREAM, 1, b"")].concat();
    for (status, lengths, expected, kept) in [
        ("204", &["5"][..], 204, None),
        ("304", &["5"], 304, Some("5")),
        ("304", &["5", "5"], 304, None),
        ("304", &["9223372036854775808"], 304, None),
        ("304", &["x"], 502, None),
        ("304", &["5", "6"], 502, None),
    ] {
        let lengths = lengths.iter().map(|length| ("content-length", *length));
        let block = header_block(&[(":status", status)].into_iter().chain(lengths).collect::<Vec<_>>());
        for bytes in [ends_at_once(&block), ends_later(&block)] {
            for is_http2 in [false, true] {
                let (upstream, _reported) = responding_with(bytes.clone());
                let gateway = gateway(&upstream);
                let response = match is_http2 {
                    false => gateway.get("/a"),
                    true => Http2Client::connect(gateway.http).request_path("GET", "/a", &[], b""),
                };
                let response = response.expect(expected);
                assert!(expected == 502 || response.field("content-length") == kept, "{response:?}");
            }
        }
    }
}

/// The trailers of a request with such fields are malformed, and so is the request.
#[test]
fn a_request_with_pseudo_header_fields_in_its_trailers_is_reset() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut raw = RawHttp2::connect(gateway.http);
    let fields =
        [(":method", "POST"), (":scheme", "http"), (":authority", HOST), (":path", "/a"), ("trailer", "x-end")];
    raw.send(frame(HEADERS, END_HEADERS, 1, &header_block(&fields))).send(frame(DATA, 0, 1, b"abc"));
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, &header_block(&[(":path", "/admin"), ("x-end", "9")])));
    assert_eq!(raw.read_until(RST_STREAM).code(), PROTOCOL_ERROR);
    assert!(upstream.received().is_empty(), "the request is incomplete");
}

/// Whatever `connect` is. The reset is read by the connection, which then takes no more requests.
#[test]
fn a_connection_reset_before_its_settings_is_an_error_at_once() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            // The last frame before the gateway waits for SETTINGS.
            let mut kind = 0;
            while kind != WINDOW_UPDATE {
                let mut head = [0; 9];
                stream.read_exact(&mut head).unwrap();
                kind = head[3];
                stream.read_exact(&mut vec![0; usize::from(head[2])]).unwrap();
            }
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    });
    let toml = format!(
        "workers = 1\n[timeouts]\nconnect = \"1h\"\n[upstreams.u]\nservers = [\"http://{address}\"]\nprotocol = \"http2\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n"
    );
    let gateway = Gateway::start(&toml);
    gateway.client().get("/a").expect(502);
    gateway.client().get("/b").expect(502);
}

/// A request is tried on two connections at most.
#[test]
fn a_server_that_ends_connections_after_its_settings_is_not_redialled_for_ever() {
    const REQUESTS: usize = 10;
    let goaway = frame(GOAWAY, 0, 0, &[0; 8]);
    for (bytes, stays_open) in [
        (settings(&[]), false),
        ([settings(&[]), goaway.clone()].concat(), false),
        ([settings(&[]), goaway].concat(), true),
    ] {
        let upstream = Upstream::with_script(move |connection| {
            connection.read_exactly(24).unwrap();
            connection.send(&bytes);
            while stays_open && connection.read_exactly(1).is_some() {}
        });
        let gateway = gateway(&upstream);
        for _ in 0..REQUESTS {
            gateway.client().get("/a").expect(502);
        }
        assert!(upstream.connections() <= 2 * REQUESTS, "{} connections", upstream.connections());
    }
}
