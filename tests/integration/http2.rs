//! HTTP/2 from clients: the same behaviour as HTTP/1.1, with the necessary translations.

use std::collections::VecDeque;
use std::pin::Pin;
use std::process::Command;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};

use crate::support::client::{Client, HOST};
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    ACK, CANCEL, CONTINUATION, DATA, GOAWAY, HEADERS, Http2Client, PING, RST_STREAM, RawHttp2, SETTINGS, STATUS_200,
    STATUS_400,
};
use crate::support::http2_client::{END_HEADERS, END_STREAM, NO_ERROR, frame, header_block, request_block};
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, forward_all, one_rule};

#[test]
fn a_request_is_forwarded_as_http1() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = Http2Client::connect(gateway.http);
    let fields = [("cookie", "a=1"), ("x-forwarded-host", "evil"), ("cookie", "b=2"), ("te", "trailers"), ("x-a", "1")];
    let response = client.request_path("POST", "/a?b=c", &fields, b"hello").expect(200);
    assert_eq!((response.version.as_str(), response.text().as_str()), ("HTTP/2.0", "fine\n"));
    let received = upstream.only_request();
    assert_eq!((received.method.as_str(), received.target.as_str()), ("POST", "/a?b=c"));
    assert_eq!(received.values("host"), [HOST]);
    assert_eq!(received.values("cookie"), ["a=1; b=2"]);
    assert_eq!(received.values("x-forwarded-host"), [HOST]);
    assert_eq!(received.values("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(received.values("x-forwarded-proto"), ["http"]);
    assert_eq!(received.values("te"), ["trailers"]);
    assert_eq!((received.values("content-length"), received.body.as_slice()), (vec!["5"], &b"hello"[..]));
    assert!(received.field("transfer-encoding").is_none());
}

#[test]
fn an_ambiguous_request_is_refused() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = Http2Client::connect(gateway.http);
    for (method, uri, fields, status) in [
        ("GET", "http://u@gateway.test/a", &[][..], 400),
        ("GET", "http://gateway.test/a", &[("host", "other.test")], 400),
        ("GET", "http://gateway.test/a", &[("host", HOST), ("host", HOST)], 400),
        ("GET", "http://gateway.test:81/a", &[("host", HOST)], 400),
        ("GET", "ftp://gateway.test/a", &[], 400),
        ("GET", "http://gateway.test/a", &[("x-user", " alice")], 400),
        ("GET", "http://gateway.test/a", &[("x-user", "alice\t")], 400),
        ("GET", "http://gateway.test/../a", &[], 400),
        ("TRACE", "http://gateway.test/a", &[], 405),
        ("post", "http://gateway.test/a", &[], 400),
        ("GET", "http://gateway.test/a", &[("expect", "x")], 417),
    ] {
        client.request_uri(method, uri, fields, b"").expect(status).problem();
    }
    assert_eq!(upstream.received().len(), 0);
    // The connection is fine, and so are these.
    client.request_uri("GET", "https://gateway.test:443/a", &[("host", HOST)], b"").expect(200);
    client.request_uri("GET", "http://Gateway.test:80/a", &[("host", HOST)], b"").expect(200);
}

#[test]
fn malformed_pseudo_header_fields_are_refused() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let head = |fields: &[(&str, &str)]| {
        let mut all = vec![(":method", "GET"), (":scheme", "http")];
        all.extend(fields);
        header_block(&all)
    };
    let mut raw = RawHttp2::connect(gateway.http);
    let mut stream = 1;
    let mut send_head = |raw: &mut RawHttp2, block: &[u8]| {
        raw.send(frame(HEADERS, END_HEADERS | 1, stream, block));
        stream += 2;
        stream - 2
    };
    for (fields, status) in [
        // Neither `:authority` nor Host; Host alone; `*` with GET; repeated and empty lengths.
        (&[(":path", "/a")][..], STATUS_400),
        (&[(":path", "/a"), ("host", "a")], STATUS_200),
        (&[(":path", "*"), (":authority", "a")], STATUS_400),
        (&[(":path", "/a"), (":authority", "a"), ("content-length", "0"), ("content-length", "0")], STATUS_400),
        (&[(":path", "/a"), (":authority", "a"), ("content-length", "")], STATUS_400),
    ] {
        let stream = send_head(&mut raw, &head(fields));
        assert_eq!(raw.read_status(stream), status, "{fields:?}");
    }
    for field in [("te", "gzip"), ("connection", "x"), ("transfer-encoding", "chunked"), ("upgrade", "websocket")] {
        let stream = send_head(&mut raw, &head(&[(":path", "/a"), (":authority", "a"), field]));
        assert_eq!(raw.read_until(RST_STREAM).stream, stream, "{field:?}");
    }
    let stream = send_head(&mut raw, &header_block(&[(":method", "CONNECT"), (":authority", "a:80")]));
    assert_ne!(raw.read_status(stream), STATUS_200);
    // A CONNECT cannot have a body; other streams of the connection are not affected.
    let stream =
        send_head(&mut raw, &header_block(&[(":method", "CONNECT"), (":authority", "a:80"), ("content-length", "0")]));
    assert_ne!(raw.read_status(stream), STATUS_200);
    let connect = header_block(&[(":method", "CONNECT"), (":authority", "a:80"), ("content-length", "5")]);
    raw.send(frame(HEADERS, END_HEADERS, stream + 2, &connect));
    assert_eq!(raw.read_until(RST_STREAM).stream, stream + 2);
    raw.send(frame(HEADERS, END_HEADERS | 1, stream + 4, &head(&[(":path", "/a"), (":authority", "a")])));
    assert_eq!(raw.read_status(stream + 4), STATUS_200);
    assert_eq!(upstream.received().len(), 2);
}

#[test]
fn trailers_are_forwarded_both_ways() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        let received = connection.read_request().unwrap();
        assert_eq!(received.trailers, [("x-sum".to_owned(), "7".to_owned())]);
        connection.send(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-end\r\n\r\n3\r\nabc\r\n0\r\nx-end: 9\r\n\r\n",
        );
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let trailers = http::HeaderMap::from_iter([(http::HeaderName::from_static("x-sum"), "7".parse().unwrap())]);
    let body = Frames(VecDeque::from([Frame::data(Bytes::from("body")), Frame::trailers(trailers)])).boxed();
    let request = http::Request::post(format!("http://{HOST}/a")).header("trailer", "x-sum").header("te", "trailers");
    let response = Http2Client::connect(gateway.http).send(request.body(body).unwrap()).expect(200);
    assert_eq!(response.text(), "abc");
    assert_eq!(response.trailers, [("x-end".to_owned(), "9".to_owned())]);
}

/// A body of prepared frames.
struct Frames(VecDeque<Frame<Bytes>>);

impl Body for Frames {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

#[test]
fn a_response_to_head_has_a_length_and_no_body() {
    let upstream = Upstream::with_script(|connection| {
        while connection.read_request().is_some() && connection.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        {
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream).replace("/{*rest}", "/a"));
    let mut client = Http2Client::connect(gateway.http);
    let response = client.request_path("HEAD", "/a", &[], b"").expect(200);
    assert_eq!((response.field("content-length"), response.body.len()), (Some("1000"), 0));
    let length = client.get("/b").expect(404).body.len().to_string();
    let response = client.request_path("HEAD", "/b", &[], b"").expect(404);
    assert_eq!((response.field("content-length"), response.body.len()), (Some(length.as_str()), 0));
}

#[test]
fn every_response_has_one_date() {
    let upstream = Upstream::responding(|received| {
        let date = [("Date", "Sun, 06 Nov 1994 08:49:37 GMT")];
        reply(200, &date[..usize::from(received.target == "/dated")], b"")
    });
    let rule = "[rules.few]\nkey = \"ip\"\nwindows = [\"2/day\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]\nrules = [\"few\"]"));
    let gateway = Gateway::start(&format!("workers = 1\n{toml}"));
    let mut client = Http2Client::connect(gateway.http);
    assert_eq!(client.get("/dated").expect(200).values("date"), ["Sun, 06 Nov 1994 08:49:37 GMT"]);
    let mut responses = vec![client.get("/a").expect(200)];
    // Some of these responses are copies of a refusal to a client of the other protocol.
    for _ in 0..20 {
        responses.extend(client.get_many("/a", 5));
        responses.push(Client::connect(gateway.http).get("/a"));
    }
    responses.push(client.request_path("TRACE", "/a", &[], b"").expect(405));
    for response in responses {
        let dates = response.values("date");
        assert!(dates.len() == 1 && dates[0].len() == 29 && dates[0].ends_with(" GMT"), "{response:?}");
    }
}

/// Many servers end their streams in this way. An empty frame needs no window.
#[test]
fn a_body_that_ends_with_an_empty_frame_ends_at_once() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let is_empty = stream.head.uri.ends_with("/empty");
        let mut response = stream.send_head(http::Response::new(()));
        if !is_empty {
            response.send_data(Bytes::from("some"), false).unwrap();
        }
        response.send_data(Bytes::new(), true).unwrap();
    });
    // A stalled stream would be reset.
    let timeouts = "[timeouts]\nbody = \"10s\"\n";
    let route = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    let gateway = Gateway::start(&format!("{timeouts}{}{route}", upstream.toml("u")));
    let mut client = Http2Client::connect(gateway.http);
    assert_eq!(client.get("/some").expect(200).text(), "some");
    assert_eq!(client.get("/empty").expect(200).text(), "");
}

/// The response may end before the upstream stops reading the body, which is then no longer needed.
#[test]
fn a_body_cancelled_after_the_response_ends_its_stream() {
    let stop = Arc::new(tokio::sync::Notify::new());
    let stopped = Arc::clone(&stop);
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let stopped = Arc::clone(&stopped);
        async move {
            stream.reply("enough");
            stopped.notified().await;
        }
    });
    let gateway =
        Gateway::start(&format!("{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u")));
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
    assert_eq!(raw.read_status(1), STATUS_200);
    while raw.read_until(DATA).flags & END_STREAM == 0 {}
    stop.notify_one();
    assert_eq!(raw.read_until(RST_STREAM).stream, 1);
}

#[test]
fn large_bodies_are_forwarded_both_ways_at_once() {
    let upstream = Upstream::responding(|received| reply(200, &[], &received.body));
    let gateway = Gateway::start(&forward_all(&upstream));
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let mut client = Http2Client::connect(gateway.http);
    for _ in 0..3 {
        assert!(client.request_path("POST", "/a", &[], &body).expect(200).body == body);
    }
    assert!(client.get_many("/a", 100).iter().all(|response| response.status == 200));
}

#[test]
fn exactly_the_limit_is_admitted_over_any_number_of_streams() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"500/hour\"]");
    let gateway = Gateway::start(&format!("workers = 4\n{rule}"));
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Http2Client::connect(gateway.http);
                    let responses = (0..2).flat_map(|_| client.get_many("/a", 40)).collect::<Vec<_>>();
                    assert!(responses.iter().all(|response| [200, 429].contains(&response.status)));
                    responses.iter().filter(|response| response.status == 200).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 500);
    let refused = Http2Client::connect(gateway.http).get("/a").expect(429);
    refused.problem();
    assert_eq!(remaining(&refused, "r"), 0);
    assert!(refused.field("retry-after").is_some());
}

#[test]
fn a_reset_request_is_cancelled_and_counted() {
    let (report, reported) = mpsc::channel();
    let report = Mutex::new(report);
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            report.lock().unwrap().send(true).unwrap();
            report.lock().unwrap().send(connection.wait_for_close()).unwrap();
        }
    });
    let rule = "rules = [\"r\"]\n[rules.r]\nkey = \"ip\"\nwindows = [\"3/hour\"]\n";
    let gateway = Gateway::start(&format!("{}{rule}", forward_all(&upstream)));
    let mut raw = RawHttp2::connect(gateway.http);
    for stream in [1, 3, 5] {
        raw.get(stream, "/a");
        assert!(reported.recv().unwrap());
        raw.send(frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes()));
        assert!(reported.recv().unwrap(), "the upstream connection is closed");
    }
    assert_eq!(remaining(&gateway.get("/a").expect(429), "r"), 0);
    eventually("they are counted", || gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == 3);
}

#[test]
fn a_reset_upload_never_looks_complete() {
    let (sender, http1_reported) = mpsc::channel();
    let sender = Mutex::new(sender);
    let http1 = Upstream::with_script(move |connection| {
        if connection.read_head().is_some() {
            let send = |what| sender.lock().unwrap().send(what).unwrap();
            assert_eq!(connection.read_exactly(8).unwrap(), b"3\r\nabc\r\n");
            send("started");
            send(if connection.read_exactly(5).is_some_and(|last| last == b"0\r\n\r\n") {
                "complete"
            } else {
                "cut off"
            });
        }
    });
    let (sender, http2_reported) = mpsc::channel();
    let http2 = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let sender = sender.clone();
        async move {
            assert_eq!(stream.read_data().await.unwrap().unwrap(), "abc");
            sender.send("started").unwrap();
            while let Some(Ok(_)) = stream.read_data().await {}
            sender.send(if stream.body.is_end_stream() { "complete" } else { "cut off" }).unwrap();
        }
    });
    let route = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    for (toml, reported) in [(http1.toml("u"), &http1_reported), (http2.toml("u"), &http2_reported)] {
        let gateway = Gateway::start(&format!("{toml}{route}"));
        let mut raw = RawHttp2::connect(gateway.http);
        let end = |stream, code: u32| frame(RST_STREAM, 0, stream, &code.to_be_bytes());
        for (stream, end, expected) in [
            (1, end(1, NO_ERROR), "cut off"),
            (3, end(3, CANCEL), "cut off"),
            (5, frame(DATA, END_STREAM, 5, b""), "complete"),
        ] {
            raw.send(frame(HEADERS, END_HEADERS, stream, &request_block("POST", "/a")))
                .send(frame(DATA, 0, stream, b"abc"));
            assert_eq!(reported.recv(), Ok("started"));
            raw.send(end);
            assert_eq!(reported.recv(), Ok(expected), "{toml}");
        }
    }
}

#[test]
fn a_malformed_request_is_an_error_of_its_stream_alone() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]"));
    let mut raw = RawHttp2::connect(gateway.http);
    // An upload on another stream, which has to survive.
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/whole"))).send(frame(DATA, 0, 1, b"be"));
    let start = request_block("GET", "/a");
    let plus = |field: &[u8]| [&start[..], field].concat();
    let field = |name: &str, value: &str| plus(&header_block(&[(name, value)]));
    let pseudo = |pairs: &[(&str, &str)]| header_block(pairs);
    let indexed = |name: &str, value: &str| {
        let mut literal = header_block(&[(name, value)]);
        literal[0] = 0x40;
        plus(&literal)
    };
    let all = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost"), (":path", "/a")];
    let with = |name: &str, value: &str| pseudo(&all.map(|(n, v)| if n == name { (n, value) } else { (n, v) }));
    let mut malformed = vec![
        ("LF in a value", field("x-a", "a\nb")),
        ("CR in a value", field("x-a", "a\rb")),
        ("CRLF in a value", field("x-a", "a\r\nx-b: c")),
        ("NUL in a value", field("x-a", "\0")),
        ("DEL in a value", field("x-a", "a\x7f")),
        ("a control character in a cookie", field("cookie", "a=\x01")),
        ("LF in an indexed value", indexed("x-a", "a\nb")),
        ("the same, by its index", plus(b"\xbe")),
        ("its name by its index, with another bad value", plus(b"\x7e\x01\n")),
        ("a capital letter", field("X-a", "b")),
        ("a capital letter in Huffman code", plus(b"\x00\x83\xfc\x78\xff\x01b")),
        ("a space in a name", field("x a", "b")),
        ("a colon in a name", field("x:a", "b")),
        ("LF in a name", field("x\n", "b")),
        ("no name", field("", "b")),
        ("a name that is not ASCII", field("x-\u{e4}", "b")),
        ("an unknown pseudo-header field", field(":other", "b")),
        ("a pseudo-header field without a name", field(":", "b")),
        ("a capital letter in a pseudo-header field", field(":Path", "/")),
        ("a status that is none", field(":status", "ok")),
        ("a status", field(":status", "200")),
        ("a method of two words", with(":method", "GE T")),
        ("an empty method", with(":method", "")),
        ("a target with a space", with(":path", "/a b")),
        ("a target with a line feed", with(":path", "/a\n")),
        ("a fragment in a target", with(":path", "/a#b")),
        ("a second method", plus(&header_block(&[(":method", "GET")]))),
        ("no method", pseudo(&all[1..])),
        ("connection", field("connection", "close")),
        ("transfer-encoding", field("transfer-encoding", "chunked")),
        ("te", field("te", "gzip")),
    ];
    malformed.push(("a target that is not UTF-8", {
        let mut target = pseudo(&all[..3]);
        target.extend(b"\x04\x03/\xff\xff");
        target
    }));
    malformed.push(("LF in Huffman code", plus(b"\x00\x01x\x84\xff\xff\xff\xf3")));
    for (n, (what, block)) in malformed.iter().enumerate() {
        let stream = 2 * n as u32 + 3;
        // Whole, and in pieces.
        let bytes = match n % 3 {
            0 => frame(HEADERS, END_STREAM | END_HEADERS, stream, block),
            1 => [&frame(HEADERS, END_STREAM, stream, &block[..9]), &frame(9, END_HEADERS, stream, &block[9..])[..]]
                .concat(),
            _ => frame(
                HEADERS,
                END_STREAM | END_HEADERS | 0x28,
                stream,
                &[&[3, 0, 0, 0, 0, 1][..], block, &[0; 3]].concat(),
            ),
        };
        let (first, second) = bytes.split_at(bytes.len() / 2);
        raw.send(first).send(second);
        let end =
            std::iter::from_fn(|| raw.next_frame()).find(|frame| [RST_STREAM, HEADERS, GOAWAY].contains(&frame.kind));
        let end = end.unwrap_or_else(|| panic!("{what}: closed"));
        assert_eq!((end.kind, end.stream), (RST_STREAM, stream), "{what}: {end:?}");
        assert_eq!(end.code(), 1, "{what}");
    }
    // Other streams of the connection are served as before.
    let last = 2 * malformed.len() as u32 + 3;
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, last, &field("x-a", "fine")));
    assert_eq!(raw.read_status(last), STATUS_200);
    raw.send(frame(DATA, END_STREAM, 1, b"fore"));
    assert_eq!(raw.read_status(1), STATUS_200);
}

#[test]
fn malformed_trailers_abort_their_upload_alone() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]"));
    let mut raw = RawHttp2::connect(gateway.http);
    let many = header_block(&[("x-a", "b")]).repeat(101);
    // More than the limit of bytes, including those that HPACK has to store.
    let mut indexed = header_block(&[("x-a", &"x".repeat(500))]);
    indexed[0] = 0x40;
    let large = indexed.repeat(124);
    let malformed = [header_block(&[("x-a", "a\nb")]), header_block(&[("X-a", "b")]), many, large];
    for (stream, trailers) in [1, 3, 5, 7].into_iter().zip(malformed) {
        raw.send(frame(HEADERS, END_HEADERS, stream, &request_block("POST", "/a")))
            .send(frame(DATA, 0, stream, b"abc"));
        let mut pieces = trailers.chunks(16 * 1024);
        raw.send(frame(HEADERS, END_STREAM, stream, pieces.next().unwrap()));
        for piece in pieces {
            raw.send(frame(CONTINUATION, 0, stream, piece));
        }
        raw.send(frame(CONTINUATION, END_HEADERS, stream, b""));
        assert_eq!(raw.read_until(RST_STREAM).stream, stream);
    }
    raw.get(9, "/a");
    assert_eq!(raw.read_status(9), STATUS_200);
    // Malformed trailers get no response.
    assert_eq!(gateway.metrics().sum("transom_requests_total", &[("code", "431")]), 0);
}

#[test]
fn head_limits_apply() {
    let upstream = Upstream::always(200);
    let limits = "[limits]\nrequest_head = \"8KiB\"\nrequest_fields = 10\n";
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    let mut client = Http2Client::connect(gateway.http);
    let mut request = |count: usize, name: &str, length: usize| {
        let value = "v".repeat(length);
        client.request_path("GET", "/a", &vec![(name, value.as_str()); count], b"")
    };
    // `:authority` is Host.
    request(9, "x-a", 1).expect(200);
    request(10, "x-a", 1).expect(431).problem();
    request(1000, "x-a", 0).expect(431).problem();
    // Cookie fields count as one field, but their number is limited as well.
    request(20, "cookie", 1).expect(200);
    request(21, "cookie", 1).expect(431).problem();
    request(1, "x-a", 7500).expect(200);
    request(1, "x-a", 8200).expect(431).problem();
    request(2, "x-a", 4500).expect(431).problem();
    assert_eq!(upstream.received().len(), 3);
    let refused = || gateway.metrics().sum("transom_requests_total", &[("code", "431")]);
    eventually_eq(refused, 5);
    // The HPACK table has to stay in sync, so these heads reach h2, which refuses them.
    let mut raw = RawHttp2::connect(gateway.http);
    let mut indexed = header_block(&[("x-a", &"x".repeat(1000))]);
    indexed[0] = 0x40;
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, &[request_block("GET", "/a"), indexed.repeat(12)].concat()));
    assert_ne!(raw.read_status(1), STATUS_200);
    eventually_eq(refused, 6);
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 3, &[&request_block("GET", "/a"), &b"\xbe"[..]].concat()));
    assert_eq!(raw.read_status(3), STATUS_200);
    assert_eq!(upstream.received()[3].field("x-a"), Some("x".repeat(1000).as_str()));
}

#[test]
fn field_limits_apply_however_frames_are_split() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}[limits]\nrequest_fields = 10\n", forward_all(&upstream)));
    let start = request_block("GET", "/a");
    let indexed = |name: &str, value: &str| {
        let mut field = header_block(&[(name, value)]);
        field[0] = 0x40;
        field
    };
    let plus = |field: &[u8]| [&start[..], field].concat();
    let on_itself = |stream: u32, block: &[u8]| [&stream.to_be_bytes()[..], &[0], block].concat();
    let connection = header_block(&[("connection", "x")]);
    let ping = frame(PING, 0, 0, &[0; 8]);
    let promised = [&[0, 0, 0, 2][..], &indexed("x-a", "1"), &connection].concat();
    // Connection errors, most of which h2 treats as stream errors.
    for (what, bytes) in [
        ("a PUSH_PROMISE", frame(5, END_HEADERS, 1, &promised)),
        (
            "a stream that depends on itself, and PING in its head",
            [frame(HEADERS, 0x20, 3, &on_itself(3, &start)), ping.clone()].concat(),
        ),
        ("a malformed field, and PING in its head", [frame(HEADERS, 0, 3, &plus(&connection)), ping.clone()].concat()),
        (
            "more padding than there is",
            frame(HEADERS, END_HEADERS | 0x28, 3, &[&[99][..], &on_itself(3, &[])].concat()),
        ),
    ] {
        let mut raw = RawHttp2::connect(gateway.http);
        raw.send(frame(HEADERS, END_HEADERS, 1, &start));
        raw.send(bytes);
        raw.send_if_open(frame(HEADERS, END_STREAM | END_HEADERS, 5, &plus(&header_block(&[("x-a", "1")]).repeat(11))));
        let end = raw.read_until(GOAWAY);
        assert_eq!(end.code(), 1, "{what}");
    }
    // Stream errors, after which both HPACK tables have all fields.
    let mut raw = RawHttp2::connect(gateway.http);
    let itself = on_itself(1, &plus(&indexed("x-a", "1")));
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS | 0x20, 1, &itself));
    let reset = raw.read_until(RST_STREAM);
    assert_eq!((reset.stream, reset.code()), (1, 1));
    raw.send(frame(HEADERS, END_STREAM, 3, &plus(&connection)));
    raw.send(frame(9, END_HEADERS, 3, &indexed("x-b", "2")));
    let reset = raw.read_until(RST_STREAM);
    assert_eq!((reset.stream, reset.code()), (3, 1));
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 5, &plus(b"\xbe\xbf")));
    assert_eq!(raw.read_status(5), STATUS_200);
    let received = upstream.received().pop().unwrap();
    assert_eq!((received.field("x-a"), received.field("x-b")), (Some("1"), Some("2")));
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 7, &plus(&b"\xbe".repeat(10))));
    assert_ne!(raw.read_status(7), STATUS_200);
}

#[test]
fn the_heads_of_a_connection_are_bounded_together() {
    let (report, reported) = mpsc::channel();
    let report = Mutex::new(report);
    let upstream = Upstream::with_script(move |connection: &mut Connection| {
        while connection.read_head().is_some() {
            report.lock().unwrap().send(()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!("{}[limits]\nrequest_head = \"8KiB\"\n", forward_all(&upstream)));
    let mut raw = RawHttp2::connect(gateway.http);
    let head = [request_block("GET", "/a"), header_block(&[("x-a", &"v".repeat(7800))])].concat();
    // The limit allows 16 heads of 8 KiB.
    for n in 0..16 {
        raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, &head));
        reported.recv().unwrap();
    }
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 33, &head));
    let refused = raw.read_until(RST_STREAM);
    assert_eq!((refused.stream, refused.code()), (33, 7), "REFUSED_STREAM");
    // A small head is accepted, and another large one after a stream has ended.
    raw.get(35, "/a");
    reported.recv().unwrap();
    raw.send(frame(RST_STREAM, 0, 1, &CANCEL.to_be_bytes()));
    raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 37, &head));
    reported.recv().unwrap();
}

#[test]
fn empty_data_frames_within_the_rate_are_accepted() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
    for byte in b"body" {
        raw.send(frame(DATA, 0, 1, b"").repeat(200)).send(frame(DATA, 0, 1, &[*byte]));
    }
    raw.send(frame(DATA, END_STREAM, 1, b""));
    assert_eq!(raw.read_status(1), STATUS_200);
    assert_eq!(upstream.only_request().body, b"body");
}

#[test]
fn a_reset_refunds_a_delayed_request() {
    let rule = "key = \"ip\"\nwindows = [\"1/minute\"]\non_limit = \"delay\"\nmax_delay = \"5m\"\nmax_waiting = 1";
    let gateway = Gateway::start(&one_rule(rule));
    let mut raw = RawHttp2::connect(gateway.http);
    raw.get(1, "/a");
    assert_eq!(raw.read_status(1), STATUS_200);
    raw.get(3, "/a");
    // The queue has one waiter and is full.
    eventually("the request waits", || {
        gateway.metrics().sum("transom_decisions_total", &[("outcome", "delayed")]) == 1
    });
    gateway.get("/a").expect(429);
    raw.send(frame(RST_STREAM, 0, 3, &CANCEL.to_be_bytes()));
    eventually("the request is cancelled", || gateway.metrics().sum("transom_requests_total", &[("code", "499")]) == 1);
    raw.get(5, "/a");
    eventually("another request waits", || {
        gateway.metrics().sum("transom_decisions_total", &[("outcome", "delayed")]) == 2
    });
    gateway.advance_s(60);
    assert_eq!(raw.read_status(5), STATUS_200);
}

#[test]
fn a_refused_upload_is_not_reset_before_the_client_can_read_the_response() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    gateway.get("/a").expect(200);
    let mut raw = RawHttp2::connect(gateway.http);
    raw.send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a"))).send(frame(DATA, 0, 1, &[b'x'; 1000]));
    raw.read_until(HEADERS);
    // The pause is the subject of the test: without it, a reset would arrive together with the response.
    std::thread::sleep(std::time::Duration::from_secs(3));
    raw.send(frame(DATA, END_STREAM, 1, b"")).send(frame(PING, 0, 0, b"together"));
    let kinds: Vec<u8> =
        std::iter::from_fn(|| raw.next_frame()).map(|frame| frame.kind).take_while(|kind| *kind != PING).collect();
    assert!(!kinds.contains(&RST_STREAM), "{kinds:?}");
}

/// The gateway reads a limited part of an upload after its response, and then opens the window no more.
#[test]
fn a_long_refused_upload_is_ended_without_an_error() {
    let refuse_all = one_rule("key = \"ip\"\nwindows = [\"1/hour\"]");
    // The PING of a silent connection is the clock of this test: it follows the promised second by four.
    let gateway = Gateway::start(&format!("{refuse_all}[http2]\nping = \"5s\"\n"));
    gateway.get("/a").expect(200);
    let mut raw = RawHttp2::connect(gateway.http);
    raw.read_until(SETTINGS);
    raw.send(frame(SETTINGS, ACK, 0, b"")).send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
    // As many bytes as the window of the stream allows, and are read after the response.
    raw.send_if_open(frame(DATA, 0, 1, &[b'x'; 16 * 1024]).repeat(16));
    let frames: Vec<_> = std::iter::from_fn(|| raw.next_frame()).take_while(|frame| frame.kind != PING).collect();
    let reset = frames.iter().position(|frame| frame.kind == RST_STREAM).expect("a reset before the first PING");
    assert_eq!((frames[reset].stream, frames[reset].code()), (1, NO_ERROR));
    let mut before = frames[..reset].iter();
    assert!(before.any(|frame| frame.kind == DATA && frame.flags & END_STREAM != 0), "no whole response: {frames:?}");
}

#[test]
fn curl_receives_a_refusal_during_an_upload() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    gateway.get("/a").expect(200);
    let scratch = TempDir::new();
    for (size, protocol) in [
        (200_000, "--http2-prior-knowledge"),
        (20_000_000, "--http2-prior-knowledge"),
        (200_000, "--http1.1"),
        (20_000_000, "--http1.1"),
    ] {
        let file = scratch.write("large", vec![b'x'; size]);
        for _ in 0..20 {
            let output = Command::new(program("curl"))
                .args([protocol, "--silent", "--show-error", "--max-time", "30", "--output"])
                .arg(scratch.path().join("response"))
                .args(["--write-out", "%{http_code}", "--data-binary"])
                .arg(format!("@{}", file.display()))
                .arg(format!("http://{}/a", gateway.http))
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(String::from_utf8_lossy(&output.stdout), "429", "{protocol} {size}: {stderr}");
            let response = std::fs::read_to_string(scratch.path().join("response")).unwrap();
            assert!(response.contains("quota-exceeded"), "{protocol} {size}: {response}");
        }
    }
}

#[test]
fn h2load_reports_no_errors() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let output = Command::new(program("h2load"))
        .args(["-n", "4000", "-c", "8", "-m", "32"])
        .arg(format!("http://{}/a", gateway.http))
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&output.stdout);
    assert!(output.contains("4000 succeeded, 0 failed, 0 errored, 0 timeout"), "{output}");
    assert!(output.contains("4000 2xx"), "{output}");
}

#[test]
fn the_log_names_the_protocol() {
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let toml =
        format!("{}[access_log]\nfile = \"{}\"\n", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]"), log.display());
    let gateway = Gateway::start(&toml);
    Http2Client::connect(gateway.http).get("/a").expect(200);
    gateway.get("/a").expect(200);
    let lines = || std::fs::read_to_string(&log).unwrap_or_default();
    eventually("both requests are logged", || lines().lines().count() == 2);
    let lines: Vec<serde_json::Value> = lines().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["protocol"], &lines[0]["host"]), (&"HTTP/2.0".into(), &HOST.into()));
    assert_eq!(lines[1]["protocol"], "HTTP/1.1");
}

#[test]
fn streams_in_flight_finish_when_the_gateway_stops() {
    let (report, reported) = mpsc::channel();
    let (proceed, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            report.send(()).unwrap();
            released.lock().unwrap().recv().unwrap();
            connection.reply(200, &[], b"at last");
        }
    });
    let mut process = Process::spawn(&forward_all(&upstream));
    let (mut idle, mut busy) = (RawHttp2::connect(process.http), RawHttp2::connect(process.http));
    idle.read_until(SETTINGS);
    busy.get(1, "/a");
    reported.recv().unwrap();
    process.signal("TERM");
    assert_eq!(idle.read_until(GOAWAY).code(), 0);
    // The client does not acknowledge the last PING.
    idle.read_to_end();
    assert_eq!(busy.read_until(GOAWAY).code(), 0);
    proceed.send(()).unwrap();
    assert_eq!(busy.read_status(1), STATUS_200);
    assert_eq!(busy.read_until(DATA).payload, b"at last");
    busy.read_to_end();
    assert_eq!(process.wait().code(), Some(0));
}

#[test]
fn no_started_stream_fails_when_the_gateway_stops_under_load() {
    let upstream = Upstream::always(200);
    let mut process = Process::spawn(&forward_all(&upstream));
    let load = Command::new(program("h2load"))
        .args(["-n", "1000000", "-c", "4", "-m", "8"])
        .arg(format!("http://{}/a", process.http))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    eventually("requests arrive", || upstream.received().len() > 200);
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0));
    let output = String::from_utf8(load.wait_with_output().unwrap().stdout).unwrap();
    // Every request that reached the upstream got its whole response.
    let line = output.lines().find(|line| line.starts_with("requests:")).unwrap();
    let succeeded = line.split(", ").find_map(|part| part.strip_suffix(" succeeded")).unwrap();
    assert_eq!(succeeded.parse(), Ok(upstream.received().len()), "{output}");
}

#[test]
fn h2c_can_be_disabled() {
    let toml = format!("[http2]\nh2c = false\n{}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]"));
    let gateway = Gateway::start(&toml);
    let raw = RawHttp2::connect(gateway.http);
    let mut client = Client::from_tcp(raw.stream.try_clone().unwrap());
    client.read_response().expect(400);
    raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
    gateway.get("/a").expect(200);
}

#[test]
fn a_silent_client_is_sent_a_ping() {
    let toml = format!("[http2]\nping = \"2s\"\n{}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]"));
    let gateway = Gateway::start(&toml);
    let mut raw = RawHttp2::connect(gateway.http);
    raw.read_until(PING);
    raw.send(frame(HEADERS, END_HEADERS | 1, 1, &request_block("GET", "/a")));
    assert_eq!(raw.read_status(1), STATUS_200);
}
