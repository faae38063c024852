//! HTTP/2 upstream servers: streams, trailers, cancellation, and servers that close their connections.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};

use crate::support::client::{HOST, request};
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, Http2Client, INTERNAL_ERROR, NO_ERROR, RST_STREAM, RawHttp2,
    STATUS_200, frame,
};
use crate::support::http2_upstream::{AfterRequest, Http2Upstream, Options};
use crate::support::upstream::Upstream;
use crate::support::{eventually, eventually_eq, forward_all, within};

fn toml(upstream: &Http2Upstream) -> String {
    format!("workers = 1\n{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"))
}

fn gateway(upstream: &Http2Upstream) -> Gateway {
    Gateway::start(&toml(upstream))
}

#[test]
fn a_request_becomes_a_well_formed_stream() {
    let upstream = Http2Upstream::always_ok(Options::default());
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    let fields = [("Connection", "x-hop"), ("X-Hop", "1"), ("TE", "trailers"), ("X-A", "b"), ("Keep-Alive", "5")];
    let response = client.request("GET", "/a/b?c=d", &fields, b"").expect(200);
    assert_eq!(response.text(), "fine\n");
    let head = upstream.request_heads().remove(0);
    assert_eq!((head.method.as_str(), head.uri), ("GET", format!("http://{HOST}/a/b?c=d")));
    let mut names: Vec<&str> = head.fields.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["te", "x-a", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"]);
    assert!(head.fields["te"] == "trailers" && head.fields["x-a"] == "b");
}

/// The stream ends although the client has not sent the whole body. The wake-up of the task that waits for it is tested in
/// `client_stream.rs`.
#[test]
fn an_early_response_resets_the_stream_of_an_upload_that_pauses() {
    let (report, reported) = mpsc::channel();
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let report = report.clone();
        async move {
            assert_eq!(stream.read_data().await.unwrap().unwrap(), "begin");
            let mut body = stream.send_head(Response::new(()));
            body.send_data(Bytes::from_static(b"enough"), true).unwrap();
            while stream.read_data().await.is_some_and(|data| data.is_ok()) {}
            report.send(()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!("{}[limits]\nmin_request_rate = 0\n", toml(&upstream)));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 9\r\n\r\nbegin"));
    assert_eq!(client.read_response().expect(200).text(), "enough");
    reported.recv_timeout(Duration::from_secs(10)).unwrap();
}

/// The body is polled by the task of the stream, and 100 (Continue) is sent by that of the connection.
#[test]
fn a_body_is_asked_for_when_the_server_takes_it() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let length = stream.read_body().await;
        stream.reply(&length.to_string());
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    for _ in 0..2 {
        client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"));
        assert_eq!(client.read_head().unwrap().status, 100);
        assert_eq!(client.send("body").read_response().expect(200).text(), "4");
    }
}

#[test]
fn requests_share_one_connection() {
    let together = Arc::new(tokio::sync::Barrier::new(20));
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let together = Arc::clone(&together);
        async move {
            // No response before all requests have arrived.
            together.wait().await;
            stream.reply("fine\n");
        }
    });
    let gateway = gateway(&upstream);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| gateway.get("/a").expect(200));
        }
    });
    assert_eq!((upstream.request_heads().len(), upstream.connections()), (20, 1));
}

#[test]
fn a_server_with_few_streams_gets_more_connections() {
    let together = Arc::new(tokio::sync::Barrier::new(12));
    let upstream = Http2Upstream::with_script(Options { max_streams: 3, ..Options::default() }, move |mut stream| {
        let together = Arc::clone(&together);
        async move {
            if stream.head.uri.ends_with("/a") {
                together.wait().await;
            }
            stream.reply("fine\n");
        }
    });
    let gateway = gateway(&upstream);
    gateway.get("/first").expect(200);
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| gateway.get("/a").expect(200));
        }
    });
    assert_eq!(upstream.connections(), 4);
}

#[test]
fn requests_share_connections_if_those_are_limited() {
    let together = Arc::new(tokio::sync::Barrier::new(3));
    let upstream = Http2Upstream::with_script(Options { max_streams: 3, ..Options::default() }, move |mut stream| {
        let together = Arc::clone(&together);
        async move {
            together.wait().await;
            stream.reply("fine\n");
        }
    });
    let limited = upstream.toml("u") + "max_connections = 1\n";
    let gateway =
        Gateway::start(&format!("workers = 1\n{limited}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n"));
    // Most requests arrive while the connection is being established.
    let responses = Http2Client::connect(gateway.http).get_many("/a", 30);
    assert!(responses.iter().all(|response| response.status == 200));
    assert_eq!((upstream.request_heads().len(), upstream.connections()), (30, 1));
}

#[test]
fn bodies_stream_both_ways_concurrently() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let mut response = stream.send_head(Response::new(()));
        while let Some(Ok(piece)) = stream.read_data().await {
            response.send_data(piece, false).unwrap();
        }
        response.send_data(Bytes::new(), true).unwrap();
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"));
    client.read_head().unwrap().expect(200);
    // Each chunk comes back before the next one is sent.
    for n in 0..20 {
        client.send(format!("4\r\n{n:04}\r\n"));
        assert_eq!(client.read_chunk().unwrap(), format!("{n:04}").as_bytes());
    }
    client.send("0\r\n\r\n");
    assert_eq!(client.read_chunk(), None);
}

#[test]
fn a_response_to_head_has_a_length_and_no_body() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let head = Response::builder().header("content-length", "100").body(()).unwrap();
        stream.respond.send_response(head, true).unwrap();
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    for _ in 0..2 {
        let response = client.request("HEAD", "/a", &[], b"").expect(200);
        assert_eq!((response.field("content-length"), response.body.len()), (Some("100"), 0));
    }
}

#[test]
fn an_empty_content_length_is_malformed() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let head = Response::builder().header("content-length", "").body(()).unwrap();
        stream.respond.send_response(head, true).unwrap();
    });
    gateway(&upstream).get("/a").expect(502);
}

#[test]
fn a_response_with_an_ambiguous_length_is_502() {
    for lengths in [&["5", "5"][..], &["9223372036854775808"]] {
        let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| async move {
            let mut head = Response::new(());
            for length in lengths {
                head.headers_mut().append("content-length", HeaderValue::from_static(length));
            }
            stream.send_head(head).send_data(Bytes::from_static(b"hello"), lengths.len() > 1).unwrap();
        });
        gateway(&upstream).get("/a").expect(502).problem();
    }
}

#[test]
fn large_bodies_arrive_whole() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let length = stream.read_body().await;
        let mut response = stream.send_head(Response::new(()));
        let mut left = 20_000_000;
        while left > 0 {
            response.reserve_capacity(left.min(100_000));
            let Some(Ok(available)) = std::future::poll_fn(|cx| response.poll_capacity(cx)).await else { return };
            let piece = available.min(left);
            left -= piece;
            response.send_data(Bytes::from(vec![b'x'; piece]), left == 0).unwrap();
        }
        assert_eq!(length, 20_000_000);
    });
    let gateway = gateway(&upstream);
    let response = gateway.client().request("PUT", "/a", &[], &vec![b'y'; 20_000_000]).expect(200);
    assert_eq!(response.body.len(), 20_000_000);
}

#[test]
fn trailers_are_forwarded_without_protected_fields() {
    let (report, reported) = mpsc::channel();
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let report = report.clone();
        async move {
            stream.read_body().await;
            report.send(stream.body.trailers().await.unwrap()).unwrap();
            let mut head = Response::new(());
            head.headers_mut().insert("trailer", HeaderValue::from_static("grpc-status"));
            let mut response = stream.send_head(head);
            response.send_data(Bytes::from_static(b"hello"), false).unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            response.send_trailers(trailers).unwrap();
        }
    });
    let of_gateway = "request_headers = { set = { x-client = \"acme\" }, remove = [\"x-plan\"] }\n";
    let gateway = Gateway::start(&format!("{}{of_gateway}", toml(&upstream)));
    let mut client = gateway.client();
    client.send(format!(
        "POST /a HTTP/1.1\r\nHost: {HOST}\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\nTrailer: x-digest\r\n\r\n\
         3\r\nabc\r\n0\r\nX-Digest: d\r\nX-Forwarded-For: 6.6.6.6\r\nX-Client: evil\r\nX-Plan: evil\r\nx_y: 1\r\n\r\n"
    ));
    let response = client.read_response().expect(200);
    assert_eq!((response.text(), response.trailers), ("hello".into(), vec![("grpc-status".into(), "0".into())]));
    let trailers = reported.recv().unwrap().unwrap();
    assert_eq!(trailers.keys().map(http::HeaderName::as_str).collect::<Vec<_>>(), ["x-digest"]);
}

#[test]
fn a_disconnect_resets_its_stream_and_no_other() {
    let (report, reported) = mpsc::channel();
    let proceed = Arc::new(tokio::sync::Notify::new());
    let upstream = Http2Upstream::with_script(Options::default(), {
        let proceed = Arc::clone(&proceed);
        move |mut stream| {
            let (report, proceed) = (report.clone(), Arc::clone(&proceed));
            async move {
                report.send("requested").unwrap();
                match stream.head.uri.rsplit('/').next().unwrap() {
                    "before" => {
                        let reset = std::future::poll_fn(|cx| stream.respond.poll_reset(cx)).await;
                        assert_eq!(reset.unwrap(), h2::Reason::CANCEL);
                        report.send("reset").unwrap();
                    }
                    "within" => {
                        let mut response = stream.send_head(Response::new(()));
                        response.send_data(Bytes::from_static(b"abc"), false).unwrap();
                        let reset = std::future::poll_fn(|cx| response.poll_reset(cx)).await;
                        assert_eq!(reset.unwrap(), h2::Reason::CANCEL);
                        report.send("reset").unwrap();
                    }
                    "upload" => {
                        while let Some(Ok(_)) = stream.read_data().await {}
                        report.send("reset").unwrap();
                    }
                    _ => {
                        proceed.notified().await;
                        stream.reply("fine\n");
                    }
                }
            }
        }
    });
    let gateway = gateway(&upstream);
    let mut other = gateway.client();
    other.send(request("GET", "/other", &[], b""));
    assert_eq!(reported.recv(), Ok("requested"));
    for target in ["/before", "/within", "/upload"] {
        let mut client = gateway.client();
        match target {
            "/upload" => {
                client.send(format!("POST {target} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 100\r\n\r\nabc"))
            }
            _ => client.send(request("GET", target, &[], b"")),
        };
        assert_eq!(reported.recv(), Ok("requested"));
        if target == "/within" {
            client.read_head().unwrap().expect(200);
            assert_eq!(client.read_chunk().unwrap(), b"abc");
        }
        drop(client);
        assert_eq!(reported.recv(), Ok("reset"), "{target}");
    }
    proceed.notify_one();
    other.read_response().expect(200);
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_graceful_goaway_costs_no_request() {
    // Every connection serves five requests, and sends GOAWAY with the fifth.
    let options = Options {
        after: |_, nth| if nth == 4 { AfterRequest::GoAway } else { AfterRequest::Continue },
        ..Options::default()
    };
    let upstream = Http2Upstream::always_ok(options);
    let gateway = gateway(&upstream);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = gateway.client();
                for _ in 0..50 {
                    client.post("/a", "").expect(200);
                }
            });
        }
    });
    assert!(upstream.connections() >= 20, "{}", upstream.connections());
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", "200")]), 200);
}

#[test]
fn a_refused_stream_is_resent_once_for_every_method() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        if stream.nth % 2 == 0 || stream.head.uri.ends_with("/never") {
            stream.refuse_stream();
        } else {
            stream.reply("fine\n");
        }
    });
    let gateway = gateway(&upstream);
    gateway.client().post("/a", "").expect(200);
    let sent = |target: &str| upstream.request_heads().iter().filter(|head| head.uri.ends_with(target)).count();
    assert_eq!(sent("/a"), 2);
    gateway.client().post("/never", "").expect(502).problem();
    assert_eq!(sent("/never"), 2);
}

#[test]
fn a_stream_reset_for_other_reasons_is_502_and_not_resent() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        if stream.head.uri.ends_with("/whole") {
            stream.reply("fine\n");
        } else {
            stream.respond.send_reset(h2::Reason::INTERNAL_ERROR);
        }
    });
    let gateway = gateway(&upstream);
    gateway.get("/whole").expect(200);
    gateway.get("/a").expect(502).problem();
    assert_eq!(upstream.request_heads().len(), 2);
}

#[test]
fn a_truncated_response_is_visible_to_the_client() {
    let arrived = Arc::new(tokio::sync::Notify::new());
    let upstream = Http2Upstream::with_script(Options::default(), {
        let arrived = Arc::clone(&arrived);
        move |mut stream| {
            let arrived = Arc::clone(&arrived);
            async move {
                let mut response =
                    stream.send_head(Response::builder().header("content-length", "10").body(()).unwrap());
                response.send_data(Bytes::from_static(b"abc"), false).unwrap();
                arrived.notified().await;
                response.send_reset(h2::Reason::INTERNAL_ERROR);
            }
        }
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_exactly(3), b"abc");
    arrived.notify_one();
    client.expect_closed();
}

/// A reset with NO_ERROR means that the request body is not needed. It does not complete the response (RFC 9113, section 8.1).
#[test]
fn a_response_reset_with_no_error_before_its_end_is_aborted() {
    let arrived = Arc::new(tokio::sync::Notify::new());
    let upstream = Http2Upstream::with_script(Options::default(), {
        let arrived = Arc::clone(&arrived);
        move |mut stream| {
            let arrived = Arc::clone(&arrived);
            async move {
                let mut response = stream.send_head(Response::new(()));
                if !stream.head.uri.ends_with("/empty") {
                    response.send_data(Bytes::from_static(b"abc"), false).unwrap();
                }
                arrived.notified().await;
                response.send_reset(h2::Reason::NO_ERROR);
            }
        }
    });
    let gateway = gateway(&upstream);
    for (target, upload) in [("/data", ""), ("/empty", ""), ("/data", "Content-Length: 100\r\n")] {
        let mut client = gateway.client();
        client.send(format!("POST {target} HTTP/1.1\r\nHost: {HOST}\r\n{upload}\r\n"));
        assert_eq!(client.read_head().unwrap().expect(200).field("transfer-encoding"), Some("chunked"));
        if target == "/data" {
            assert_eq!(client.read_chunk().unwrap(), b"abc");
        }
        arrived.notify_one();
        // Without the last chunk.
        client.expect_closed();
    }
    let mut raw = RawHttp2::connect(gateway.http);
    raw.get(1, "/data").read_until(DATA);
    arrived.notify_one();
    assert_eq!(raw.read_until(RST_STREAM).code(), INTERNAL_ERROR);
}

#[test]
fn a_response_unfinished_at_goaway_is_aborted() {
    let upstream = Upstream::with_script(|connection| {
        let mut raw = RawHttp2::accept(connection.stream().try_clone().unwrap());
        raw.read_until(HEADERS);
        raw.send(frame(HEADERS, END_HEADERS, 1, &[STATUS_200])).send(frame(DATA, 0, 1, b"abc"));
        let last_stream = 0_u32;
        raw.send(frame(GOAWAY, 0, 0, &[last_stream.to_be_bytes(), NO_ERROR.to_be_bytes()].concat()));
        raw.read_to_end();
    });
    let gateway = Gateway::start(&forward_all(&upstream).replace("[[routes]]", "protocol = \"http2\"\n[[routes]]"));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    let rest = client.read_to_end();
    assert!(!rest.ends_with(b"0\r\n\r\n"), "{:?}", String::from_utf8_lossy(&rest));
}

#[test]
fn a_reset_with_no_error_after_a_complete_response_is_harmless() {
    let upstream = Upstream::with_script(|connection| {
        let mut raw = RawHttp2::accept(connection.stream().try_clone().unwrap());
        while let Some(request) = std::iter::from_fn(|| raw.next_frame()).find(|frame| frame.kind == HEADERS) {
            let stream = request.stream;
            let end =
                [frame(DATA, END_STREAM, stream, b"enough"), frame(RST_STREAM, 0, stream, &NO_ERROR.to_be_bytes())];
            raw.send([frame(HEADERS, END_HEADERS, stream, &[STATUS_200]), end.concat()].concat());
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream).replace("[[routes]]", "protocol = \"http2\"\n[[routes]]"));
    for _ in 0..20 {
        let mut client = gateway.client();
        client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 100000\r\n\r\nabc"));
        assert_eq!(client.read_response().expect(200).text(), "enough");
    }
}

#[test]
fn a_silent_stream_is_504_and_reset() {
    let (report, reported) = mpsc::channel();
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let report = report.clone();
        async move {
            let reset = std::future::poll_fn(|cx| stream.respond.poll_reset(cx)).await;
            report.send(reset.unwrap()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!("{}[timeouts]\nresponse_head = \"200ms\"\n", toml(&upstream)));
    within(Duration::from_millis(200), || gateway.get("/a").expect(504).problem());
    assert_eq!(reported.recv().unwrap(), h2::Reason::CANCEL);
}

#[test]
fn a_server_without_http2_is_502_and_receives_no_request() {
    let upstream = crate::support::upstream::Upstream::with_script(|connection| {
        connection.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        while !connection.wait_for_close() {}
    });
    let toml =
        format!("{}protocol = \"http2\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"));
    let gateway = Gateway::start(&toml);
    gateway.client().post("/a", "body").expect(502).problem();
    eventually_eq(|| gateway.metrics().sum("transom_upstream_requests_total", &[("outcome", "connect_failed")]), 1);
}

#[test]
fn a_connection_without_ping_acknowledgement_is_closed() {
    // The server sends its initial frames, and then no more.
    let silent_upstream = crate::support::upstream::Upstream::with_script(|connection| {
        connection.send([0, 0, 0, 4, 0, 0, 0, 0, 0]);
        while !connection.wait_for_close() {}
    });
    let toml = format!(
        "workers = 1\n{}protocol = \"http2\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
         [timeouts]\nbody = \"2s\"\nresponse_head = \"10m\"\n",
        silent_upstream.toml("u")
    );
    let gateway = Gateway::start(&toml);
    // PING is sent after half the time for which a stream may be silent, and has the other half for its acknowledgement.
    within(Duration::from_secs(2), || gateway.get("/a").expect(502).problem());
}

#[test]
fn an_idle_connection_is_closed() {
    let upstream = Http2Upstream::always_ok(Options::default());
    let gateway = Gateway::start(&format!("{}[timeouts]\nupstream_idle = \"100ms\"\n", toml(&upstream)));
    gateway.get("/a").expect(200);
    // The gateway checks idle connections every five seconds.
    eventually("the connection ends", || upstream.state.connections_ended.load(Ordering::SeqCst) == 1);
    gateway.get("/a").expect(200);
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn the_forwarded_host_is_configurable() {
    for (host, authority) in [("server", None), ("api.internal:8443", Some("api.internal:8443"))] {
        let upstream = Http2Upstream::always_ok(Options::default());
        let toml = toml(&upstream).replace("protocol", &format!("host = \"{host}\"\nprotocol"));
        Gateway::start(&toml).get("/a").expect(200);
        let expected = authority.map_or_else(|| upstream.address.to_string(), str::to_owned);
        assert_eq!(upstream.request_heads()[0].uri, format!("http://{expected}/a"));
        assert_eq!(upstream.request_heads()[0].fields["x-forwarded-host"], HOST);
    }
}

#[test]
fn the_forwarded_host_is_configurable_over_http1() {
    for (host, expected_host) in [("keep", Some(HOST)), ("server", None), ("api.internal", Some("api.internal"))] {
        let upstream = crate::support::upstream::Upstream::always(200);
        let toml =
            format!("{}host = \"{host}\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"));
        Gateway::start(&toml).get("/a").expect(200);
        let expected = expected_host.map_or_else(|| upstream.address.to_string(), str::to_owned);
        assert_eq!(upstream.only_request().values("host"), [expected.as_str()]);
    }
}

#[test]
fn a_slow_reader_does_not_block_other_streams() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        if stream.head.uri.ends_with("/quick") {
            return stream.reply("fine\n");
        }
        let mut response = stream.send_head(Response::new(()));
        loop {
            response.reserve_capacity(16_000);
            let Some(Ok(available)) = std::future::poll_fn(|cx| response.poll_capacity(cx)).await else { return };
            if response.send_data(Bytes::from(vec![b'x'; available]), false).is_err() {
                return;
            }
        }
    });
    let gateway = gateway(&upstream);
    let slow: Vec<_> = (0..60)
        .map(|_| {
            let mut client = gateway.client();
            client.send(request("GET", "/endless", &[], b""));
            client.read_head().unwrap().expect(200);
            client
        })
        .collect();
    for _ in 0..100 {
        gateway.get("/quick").expect(200);
    }
    assert_eq!(upstream.connections(), 1);
    drop(slow);
}

#[test]
fn an_unreachable_server_is_502_for_all_waiting_requests() {
    let refusing_upstream = crate::support::upstream::Upstream::refusing_connections();
    let toml = format!(
        "workers = 1\n{}protocol = \"http2\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        refusing_upstream.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let together = Barrier::new(10);
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                together.wait();
                gateway.get("/a").expect(502).problem();
            });
        }
    });
}
