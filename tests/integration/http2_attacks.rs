//! HTTP/2 attacks end soon, while other clients are served.
//!
//! Every attack runs on its own connection, beside a well-behaved one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    ACK, CANCEL, END_HEADERS, END_STREAM, ENHANCE_YOUR_CALM, FRAME_SIZE_ERROR, NO_ERROR, PROTOCOL_ERROR, STATUS_200,
};
use crate::support::http2_client::{
    CONTINUATION, DATA, GOAWAY, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE,
};
use crate::support::http2_client::{Frame, Http2Client, RawHttp2, frame, header_block, request_block};
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, forward_all, one_rule};

/// Short timeouts for clients that wait until the gateway closes a connection.
const SHORT_TIMEOUTS: &str = "[timeouts]\nrequest_head = \"300ms\"\nbody = \"300ms\"\n[http2]\nidle = \"300ms\"\n";
/// Timeouts for clients that have to send something before the timeout, also on a busy machine.
const LONGER_TIMEOUTS: &str = "[timeouts]\nrequest_head = \"3s\"\nbody = \"3s\"\n[http2]\nidle = \"6s\"\n";

fn gateway() -> Gateway {
    Gateway::start(&format!("workers = 1\n{}", one_rule("key = \"ip\"\nwindows = [\"1000000/hour\"]")))
}

/// The number of connections closed for this kind of abuse.
fn abuse_count(gateway: &Gateway, kind: &str) -> u64 {
    gateway.metrics().sum("transom_http2_abuse_total", &[("kind", kind)])
}

/// Runs an attack while another client sends requests to the same worker, all of which must succeed.
fn while_others_are_served<T>(gateway: &Gateway, attack: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut client = Http2Client::connect(gateway.http);
            loop {
                // One more request after the attack.
                let last = is_over.load(Ordering::SeqCst);
                client.get("/calm").expect(200);
                if last {
                    return;
                }
            }
        });
        let end = EndOnDrop(&is_over);
        let result = attack();
        drop(end);
        client.join().unwrap();
        result
    })
}

/// Marks the end of an attack when dropped, also if the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Sends bytes until the gateway closes the connection, at most `times` times. Returns the frames that the gateway sent before
/// the end of the connection.
fn flood(mut raw: RawHttp2, times: usize, bytes: impl Fn(usize) -> Vec<u8>) -> Vec<Frame> {
    for n in 0..times {
        if !raw.send_if_open(bytes(n)) {
            break;
        }
    }
    raw.read_to_end()
}

fn open_connection(gateway: &Gateway) -> RawHttp2 {
    let mut raw = RawHttp2::connect(gateway.http);
    raw.get(1, "/a");
    assert_eq!(raw.read_status(1), STATUS_200);
    raw
}

#[test]
fn frames_that_cost_only_the_gateway_end_the_connection() {
    let gateway = gateway();
    let unknown = 0xfa;
    for (kind, name, stream, payload) in [
        (PING, "ping", 0, &[0; 8][..]),
        (SETTINGS, "settings", 0, &[]),
        (PRIORITY, "priority", 3, &[0, 0, 0, 0, 1]),
        (WINDOW_UPDATE, "window_update", 0, &[0, 0, 0, 1]),
        (unknown, "unknown", 0, &[]),
    ] {
        let frames = while_others_are_served(&gateway, || {
            flood(open_connection(&gateway), 20_000, |_| frame(kind, 0, stream, payload))
        });
        assert!(frames.iter().filter(|frame| frame.kind == kind).count() <= 1100, "{name}: too many responses");
        eventually_eq(|| abuse_count(&gateway, name), 1);
    }
}

#[test]
fn exceeding_the_budget_ends_with_enhance_your_calm() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"9/hour\"]");
    let gateway = Gateway::start(&format!("[http2]\nmax_control_frames = 10\n{rule}"));
    let mut raw = open_connection(&gateway);
    // All in one packet, so that unread bytes cause no reset that discards the GOAWAY.
    raw.send(frame(PING, 0, 0, &[0; 8]).repeat(40));
    let last = raw.read_to_end().pop().unwrap();
    assert_eq!((last.kind, last.code()), (GOAWAY, ENHANCE_YOUR_CALM));
    eventually_eq(|| abuse_count(&gateway, "ping"), 1);
}

/// RFC 9113, sections 4.2 and 6.10: the frames of a header block are of one stream, and within the frame size.
#[test]
fn a_header_block_with_a_wrong_frame_ends_the_connection() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_all(&upstream)));
    let head = request_block("POST", "/a");
    let field = |name| header_block(&[(name, "1")]);
    let too_long = header_block(&[("x-long", &"x".repeat(17_000))]);
    for (code, is_trailer, frames) in [
        (PROTOCOL_ERROR, false, [frame(HEADERS, 0, 1, &head), frame(CONTINUATION, END_HEADERS, 3, &field("x-other"))]),
        (FRAME_SIZE_ERROR, false, [frame(HEADERS, 0, 1, &head), frame(CONTINUATION, END_HEADERS, 1, &too_long)]),
        (FRAME_SIZE_ERROR, false, [frame(HEADERS, END_HEADERS, 1, &[head.clone(), too_long.clone()].concat()), vec![]]),
        (
            PROTOCOL_ERROR,
            true,
            [
                frame(HEADERS, END_STREAM, 1, &field("x-a")),
                frame(CONTINUATION, END_HEADERS, 3, &header_block(&[("x-other", "1")])),
            ],
        ),
    ] {
        let mut raw = RawHttp2::connect(gateway.http);
        if is_trailer {
            raw.send(frame(HEADERS, END_HEADERS, 1, &head));
        }
        raw.send(frames.concat());
        assert_eq!(raw.read_until(GOAWAY).code(), code);
    }
    assert!(upstream.received().iter().all(|request| request.field("x-other").is_none()));
}

#[test]
fn an_invalid_preface_is_answered_with_goaway() {
    let gateway = gateway();
    let mut raw = RawHttp2::connect_without_preface(gateway.http);
    // The bytes behind the preface are not read.
    raw.send([b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".as_slice(), &[0; 100]].concat());
    assert_eq!(raw.read_until(GOAWAY).code(), PROTOCOL_ERROR);
    raw.read_to_end();
    eventually_eq(|| abuse_count(&gateway, "protocol_error"), 1);
}

#[test]
fn empty_data_floods_end_the_connection() {
    let gateway = gateway();
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
    while_others_are_served(&gateway, || flood(raw, 50_000, |_| frame(DATA, 0, 1, &[])));
    eventually_eq(|| abuse_count(&gateway, "empty_data") + abuse_count(&gateway, "protocol_error"), 1);
}

#[test]
fn rapid_reset_ends_the_connection_and_every_request_is_counted() {
    // At once, and slowly enough to stay below the limit of h2.
    for pause in [Duration::ZERO, Duration::from_millis(2)] {
        let gateway = gateway();
        let sent = while_others_are_served(&gateway, || {
            let mut raw = RawHttp2::connect(gateway.http);
            let mut sent = 0;
            for n in 0..2000 {
                let mut both = frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, &request_block("GET", "/attack"));
                both.extend(frame(RST_STREAM, 0, 2 * n + 1, &CANCEL.to_be_bytes()));
                if !raw.send_if_open(both) {
                    break;
                }
                sent += 1;
                // The rate is the attack.
                thread::sleep(pause);
            }
            raw.read_to_end();
            sent
        });
        assert!(pause.is_zero() || sent < 2000, "the attack was not stopped");
        eventually_eq(|| abuse_count(&gateway, "reset") + abuse_count(&gateway, "protocol_error"), 1);
    }
    // The configured number is allowed, and one more is not.
    for (max_resets, is_ended) in [(3, true), (4, false)] {
        let rule = one_rule("key = \"ip\"\nwindows = [\"1000000/hour\"]");
        let gateway = Gateway::start(&format!("workers = 1\n[http2]\nmax_resets = {max_resets}\n{rule}"));
        let mut raw = open_connection(&gateway);
        let reset = |n: u32| {
            let head = frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, &request_block("GET", "/attack"));
            [head, frame(RST_STREAM, 0, 2 * n + 1, &CANCEL.to_be_bytes())].concat()
        };
        // In one piece: all of them count in the same second.
        raw.send((1..=4).flat_map(reset).collect::<Vec<u8>>());
        if is_ended {
            raw.read_to_end();
            eventually_eq(|| abuse_count(&gateway, "reset"), 1);
        } else {
            raw.send(frame(PING, 0, 0, &[0; 8])).read_until(PING);
        }
    }
    // At an allowed rate, every request is counted.
    let gateway = gateway();
    let mut raw = open_connection(&gateway);
    for n in 1..=50 {
        raw.get(2 * n + 1, "/a").send(frame(RST_STREAM, 0, 2 * n + 1, &CANCEL.to_be_bytes()));
        raw.send(frame(PING, 0, 0, &[0; 8])).read_until(PING);
    }
    let left = remaining(&gateway.get("/a").expect(200), "r");
    assert_eq!(left, 1_000_000 - 52);
}

#[test]
fn endless_and_inflating_header_blocks_end_the_connection() {
    let gateway = gateway();
    let start = frame(HEADERS, END_STREAM, 1, &request_block("GET", "/a"));
    let field = header_block(&[("x-a", "1")]);
    // A field of 4 kB in the HPACK table, referenced thousands of times.
    let mut bomb = request_block("GET", "/a");
    bomb.push(0x40);
    bomb.extend(&header_block(&[("x-bomb", &"x".repeat(4000))])[1..]);
    bomb.extend([0xbe; 4000]);
    let floods: [(&str, Vec<u8>, Vec<u8>); 3] = [
        ("empty continuations", start.clone(), frame(CONTINUATION, 0, 1, &[])),
        ("continuations", start, frame(CONTINUATION, 0, 1, &field)),
        ("bomb", frame(HEADERS, END_STREAM | END_HEADERS, 1, &bomb), frame(PING, 0, 0, &[0; 8])),
    ];
    for (what, start, more) in floods {
        let mut raw = RawHttp2::connect(gateway.http);
        raw.send(start);
        let frames = while_others_are_served(&gateway, || flood(raw, 50_000, |_| more.clone()));
        assert!(!frames.iter().any(|frame| frame.kind == HEADERS && frame.payload[0] == STATUS_200), "{what}");
    }
    let all = || ["continuation", "protocol_error", "ping"].iter().map(|kind| abuse_count(&gateway, kind)).sum::<u64>();
    eventually_eq(all, 3);
}

#[test]
fn repeated_bad_heads_end_the_connection() {
    let gateway = gateway();
    let empty_fields = [request_block("GET", "/a"), header_block(&[("x-a", "")]).repeat(2000)].concat();
    let cookies = [request_block("GET", "/a"), header_block(&[("cookie", "a")]).repeat(1500)].concat();
    let malformed = [request_block("GET", "/a"), header_block(&[("X-A", "")])].concat();
    for (n, head) in [empty_fields, cookies, malformed].into_iter().enumerate() {
        let frames = while_others_are_served(&gateway, || {
            flood(RawHttp2::connect(gateway.http), 20_000, |n| {
                let stream = 2 * n as u32 + 1;
                frame(HEADERS, END_STREAM | END_HEADERS, stream, &head)
            })
        });
        let responses = frames.iter().filter(|frame| frame.kind == HEADERS).map(|frame| frame.payload[0]);
        assert!(responses.filter(|status| *status == STATUS_200).count() == 0);
        eventually_eq(|| abuse_count(&gateway, "bad_request"), n as u64 + 1);
    }
}

#[test]
fn provoked_stream_resets_end_the_connection() {
    let gateway = gateway();
    let frames = while_others_are_served(&gateway, || {
        flood(RawHttp2::connect(gateway.http), 20_000, |n| {
            let stream = 2 * n as u32 + 1;
            let mut both = frame(HEADERS, END_HEADERS, stream, &request_block("POST", "/a"));
            both.extend(frame(WINDOW_UPDATE, 0, stream, &[0; 4]));
            both
        })
    });
    assert!(frames.iter().filter(|frame| frame.kind == RST_STREAM).count() < 1000);
}

#[test]
fn excess_streams_are_refused_without_harm_to_others() {
    let upstream = Upstream::with_script(|connection: &mut Connection| while !connection.wait_for_close() {});
    let gateway = Gateway::start(&format!("[http2]\nmax_concurrent_streams = 10\n{}", forward_all(&upstream)));
    let mut raw = RawHttp2::connect(gateway.http);
    for n in 0..30 {
        raw.get(2 * n + 1, "/a");
    }
    let mut refused: Vec<u32> = (0..20).map(|_| raw.read_until(RST_STREAM).stream).collect();
    refused.sort_unstable();
    assert_eq!(refused, (10..30).map(|n| 2 * n + 1).collect::<Vec<_>>());
}

#[test]
fn a_silent_connection_is_closed() {
    let gateway = Gateway::start(&format!("{}{SHORT_TIMEOUTS}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]")));
    // Before, within and after the preface, and within the first frame.
    for start in ["", "PRI * ", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0"] {
        let mut raw = RawHttp2::connect_without_preface(gateway.http);
        raw.send(start).read_to_end();
    }
    // After SETTINGS, the connection is idle.
    for mut raw in [RawHttp2::connect(gateway.http), open_connection(&gateway)] {
        let rest = raw.read_to_end();
        assert!(rest.iter().any(|frame| frame.kind == GOAWAY && frame.code() == NO_ERROR), "{rest:?}");
    }
    // A connection that acknowledges every PING and sends its own is still idle.
    let mut raw = RawHttp2::connect(gateway.http);
    while raw.send_if_open(frame(PING, 0, 0, &[1; 8])) {
        match raw.next_frame() {
            Some(Frame { kind: PING, flags: 0, payload, .. }) => drop(raw.send_if_open(frame(PING, ACK, 0, &payload))),
            Some(_) => thread::sleep(Duration::from_millis(2)),
            None => break,
        }
    }
}

#[test]
fn a_slow_head_times_out() {
    let gateway = Gateway::start(&format!("{}{SHORT_TIMEOUTS}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]")));
    let field = header_block(&[("x-a", "1")]);
    let head = request_block("GET", "/a");
    // Frames without END_HEADERS.
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_STREAM, 1, &head)).send(frame(CONTINUATION, 0, 1, &field)).read_to_end();
    // Byte by byte.
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(&frame(HEADERS, END_HEADERS, 1, &[&head[..], &[0; 9000]].concat())[..50]);
    while raw.send_if_open([0]) {
        thread::sleep(Duration::from_millis(20));
    }
    raw.read_to_end();
    let late = || gateway.metrics().sum("transom_requests_total", &[("code", "408")]);
    eventually("both are counted", || late() == 2);
}

#[test]
fn a_stalled_body_ends_its_stream_only() {
    let gateway = Gateway::start(&format!("{}{LONGER_TIMEOUTS}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]")));
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a"))).send(frame(DATA, 0, 1, b"abc"));
    assert_ne!(raw.read_status(1), STATUS_200);
    raw.get(3, "/a");
    assert_eq!(raw.read_status(3), STATUS_200);
}

/// An upstream with an endless response, which reports when the gateway has closed the connection.
fn endless_upstream() -> (Upstream, std::sync::mpsc::Receiver<()>) {
    let (report, reported) = std::sync::mpsc::channel();
    let upstream = Upstream::with_script(move |connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n");
        while connection.send([b'x'; 65_536]) {}
        report.send(()).unwrap();
    });
    (upstream, reported)
}

#[test]
fn a_stream_whose_window_stays_closed_is_reset() {
    let (upstream, closed) = endless_upstream();
    let gateway = Gateway::start(&format!("{}{SHORT_TIMEOUTS}", forward_all(&upstream)));
    let mut raw = RawHttp2::connect_with(gateway.http, &[(4, 0)]);
    raw.get(1, "/a");
    assert_eq!(raw.read_status(1), STATUS_200);
    assert_eq!(raw.read_until(RST_STREAM).stream, 1);
    closed.recv().unwrap();
    // A stream with a partly written frame cannot be reset; the connection is closed instead.
    let mut raw = RawHttp2::connect_with(gateway.http, &[(4, 1)]);
    raw.get(1, "/a");
    assert_eq!(raw.read_status(1), STATUS_200);
    closed.recv().unwrap();
    raw.read_to_end();
}

#[test]
fn a_refusal_waits_for_the_window_for_a_limited_time() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"1/day\"]");
    let gateway = Gateway::start(&format!("{rule}{LONGER_TIMEOUTS}"));
    Http2Client::connect(gateway.http).get("/a").expect(200);
    let mut raw = RawHttp2::connect_with(gateway.http, &[(4, 0)]);
    raw.get(1, "/a");
    assert_ne!(raw.read_status(1), STATUS_200);
    raw.send(frame(WINDOW_UPDATE, 0, 1, &[0, 0, 64, 0]));
    let body = raw.read_until(DATA);
    assert_eq!((body.stream, body.flags & END_STREAM), (1, END_STREAM));
    assert!(body.payload.ends_with(b"}\n"));
    raw.get(3, "/a");
    assert_ne!(raw.read_status(3), STATUS_200);
    assert_eq!(raw.read_until(RST_STREAM).stream, 3);
}

#[test]
fn pings_do_not_prolong_a_stalled_response() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"100/day\"]");
    let gateway = Gateway::start(&format!("{rule}{SHORT_TIMEOUTS}"));
    // With the first byte, the gateway passes the whole response to h2, and the window is too small for the rest.
    let mut raw = RawHttp2::connect_with(gateway.http, &[(4, 1)]);
    raw.get(1, "/a");
    assert_eq!(raw.read_status(1), STATUS_200);
    eventually("the connection is closed", || {
        // The gateway acknowledges every PING, so the connection is not idle.
        !raw.send_if_open(frame(PING, 0, 0, &[0; 8]))
    });
}

#[test]
fn a_connection_that_is_not_read_is_closed() {
    let (upstream, closed) = endless_upstream();
    let gateway = Gateway::start(&format!("{}{SHORT_TIMEOUTS}", forward_all(&upstream)));
    // A huge window, and no byte is read from the socket.
    let mut raw = RawHttp2::connect_with(gateway.http, &[(4, 0x7fff_ffff)]);
    raw.send(frame(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes())).get(1, "/a");
    closed.recv().unwrap();
    let open = || gateway.metrics().sum("transom_connections", &[]);
    eventually("the connection is closed", || open() == 0);
}
