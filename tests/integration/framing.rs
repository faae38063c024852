//! Message framing: where messages begin and end, on both sides of the gateway.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::support::client::{HOST, request};
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    self, ACK, DATA, END_HEADERS, HEADERS, NO_ERROR, RST_STREAM, RawHttp2, SETTINGS, frame, request_block,
};
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::upstream::{Upstream, reply};
use crate::support::{forward_all, forward_to, one_rule};

#[test]
fn connections_are_kept_alive_on_both_sides() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_all(&upstream)));
    let mut client = gateway.client();
    for _ in 0..20 {
        let response = client.get("/a").expect(200);
        assert_eq!(response.version, "HTTP/1.1");
        assert_eq!(response.field("connection"), None);
    }
    assert_eq!(upstream.connections(), 1);
    let response = client.get_with("/a", &[("Connection", "close")]).expect(200);
    assert_eq!(response.field("connection"), Some("close"));
    client.expect_closed();
}

#[test]
fn ten_requests_in_one_write_are_answered_in_order() {
    let upstream = Upstream::responding(|received| reply(200, &[], received.target.as_bytes()));
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    let requests: Vec<u8> = (0..10).flat_map(|n| request("GET", &format!("/{n}"), &[], b"")).collect();
    client.send(requests);
    for n in 0..10 {
        assert_eq!(client.read_response().expect(200).text(), format!("/{n}"));
    }
    // Requests with bodies, and a HEAD request among them.
    let mut requests = request("POST", "/a", &[], b"first body");
    requests.extend(request("GET", "/b", &[], b""));
    requests.extend(b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
    requests.extend(request("HEAD", "/d", &[], b""));
    requests.extend(request("GET", "/e", &[], b""));
    client.send(requests);
    for (method, target) in [("POST", "/a"), ("GET", "/b"), ("POST", "/c"), ("HEAD", "/d"), ("GET", "/e")] {
        let response = client.read_response_to(method).expect(200);
        assert_eq!(response.text(), if method == "HEAD" { "" } else { target });
    }
}

#[test]
fn the_body_of_a_refused_request_does_not_desynchronize_the_connection() {
    let gateway = Gateway::start(&one_rule("key = \"method\"\nwindows = [\"1/minute\"]"));
    let mut client = gateway.client();
    client.post("/a", "x").expect(200);
    // The body looks like a request, and must never be parsed as one.
    let smuggled = request("GET", "/smuggled", &[], b"");
    assert_eq!(client.post("/a", smuggled).expect(429).field("connection"), None);
    assert_eq!(client.get("/next").expect(200).json()["path"], "/next");
    // Nor does a client wait for 100 (Continue) that has sent the body; then the next request needs none.
    client.request("POST", "/a", &[("Expect", "100-continue")], b"body").expect(429);
    client.get("/next").expect(429);
    // A long body is not read to its end.
    let length = 200_000;
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {length}\r\n\r\n"));
    let refused = client.send_if_open(vec![b'x'; length]).read_response().expect(429);
    assert_eq!(refused.field("connection"), Some("close"));
    client.shutdown_write().expect_closed();
}

#[test]
fn chunked_bodies_and_trailers_are_forwarded_both_ways() {
    let upstream = Upstream::with_script(|connection| {
        while let Some(received) = connection.read_request() {
            assert_eq!(received.body, b"hello, world");
            connection.send(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                 4\r\nabcd\r\n1;x=y\r\ne\r\n0\r\nX-Sum: 5\r\n\r\n",
            );
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    let head = format!(
        "POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\nTrailer: X-Digest\r\nTE: trailers\r\n\
         Connection: TE\r\n\r\n"
    );
    client.send(head).send("5\r\nhello\r\n").send("7;a=b\r\n, world\r\n0\r\nX-Digest: abc\r\n\r\n");
    let response = client.read_response().expect(200);
    assert!(response.chunked);
    assert_eq!(response.body, b"abcde");
    assert_eq!(response.trailers, [("x-sum".to_owned(), "5".to_owned())]);
    let received = upstream.only_request();
    assert_eq!(received.values("transfer-encoding"), ["chunked"]);
    assert_eq!(received.trailers, [("x-digest".to_owned(), "abc".to_owned())]);
    // Trailers are not sent to clients without `TE: trailers` (RFC 9110, section 6.5.1).
    let response = client.post("/a", "hello, world").expect(200);
    assert_eq!((response.body.as_slice(), response.trailers.len()), (b"abcde".as_slice(), 0));
}

#[test]
fn fields_of_the_head_are_not_forwarded_as_trailers() {
    let names =
        "X-Sum, Content-Length, Transfer-Encoding, Host, Set-Cookie, Cache-Control, Content-Type, Authorization";
    let trailers: String = names.split(", ").map(|name| format!("{name}: 5\r\n")).collect();
    let body = format!("Transfer-Encoding: chunked\r\nTrailer: {names}\r\n\r\n1\r\na\r\n0\r\n{trailers}\r\n");
    let response = format!("HTTP/1.1 200 OK\r\n{body}");
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            connection.send(&response);
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nTE: trailers\r\n{body}"));
    let only = [("x-sum".to_owned(), "5".to_owned())];
    assert_eq!(client.read_response().expect(200).trailers, only);
    assert_eq!(upstream.only_request().trailers, only);
}

/// Requests whose method usually has no body, with a body of unknown length.
const CHUNKED_BODY: &str = "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";

#[test]
fn a_body_of_unknown_length_is_forwarded_for_every_method() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    for method in ["GET", "HEAD", "OPTIONS", "DELETE"] {
        client.send(format!("{method} /a HTTP/1.1\r\nHost: {HOST}\r\n{CHUNKED_BODY}"));
        client.read_response_to(method).expect(200);
    }
    for received in upstream.received() {
        assert_eq!(received.values("transfer-encoding"), ["chunked"], "{}", received.method);
        assert_eq!(received.body, b"hello", "{}", received.method);
    }
    assert_eq!(upstream.received().len(), 4);
}

#[test]
fn a_body_of_unknown_length_is_forwarded_from_http2_for_every_method() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = RawHttp2::connect(gateway.http);
    for (stream, method) in [(1, "GET"), (3, "HEAD")] {
        client.send(http2_client::frame(
            http2_client::HEADERS,
            http2_client::END_HEADERS,
            stream,
            &http2_client::request_block(method, "/a"),
        ));
        client.send(http2_client::frame(http2_client::DATA, 0, stream, b"hel")).send(http2_client::frame(
            http2_client::DATA,
            http2_client::END_STREAM,
            stream,
            b"lo",
        ));
        assert_eq!(client.read_status(stream), http2_client::STATUS_200, "{method}");
    }
    for received in upstream.received() {
        assert_eq!(received.body, b"hello", "{}", received.method);
    }
    assert_eq!(upstream.received().len(), 2);
}

#[test]
fn a_body_of_unknown_length_is_forwarded_over_http2_for_every_method() {
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let length = stream.read_body().await;
        stream.reply(&format!("{length}"));
    });
    let gateway =
        Gateway::start(&format!("{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u")));
    let mut client = gateway.client();
    for method in ["GET", "OPTIONS"] {
        client.send(format!("{method} /a HTTP/1.1\r\nHost: {HOST}\r\n{CHUNKED_BODY}"));
        assert_eq!(client.read_response_to(method).expect(200).text(), "5", "{method}");
    }
    assert!(upstream.request_heads().iter().all(|head| !head.fields.contains_key("transfer-encoding")));
}

#[test]
fn malformed_chunks_are_refused_for_every_method() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    for method in ["GET", "HEAD", "OPTIONS", "POST"] {
        let mut client = gateway.client();
        client.send(format!("{method} /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"));
        let response = client.read_response_to(method).expect(400);
        assert_eq!(response.field("connection"), Some("close"), "{method}");
        client.shutdown_write().expect_closed();
    }
}

#[test]
fn response_chunks_are_forwarded_at_once() {
    let (proceed, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n");
            // Not before the client has received the first chunk.
            if released.lock().unwrap().recv().is_ok() {
                connection.send("6\r\nsecond\r\n0\r\n\r\n");
            }
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_chunk().unwrap(), b"first");
    proceed.send(()).unwrap();
    assert_eq!(client.read_chunk().unwrap(), b"second");
    assert_eq!(client.read_chunk(), None);
}

#[test]
fn request_chunks_are_forwarded_at_once() {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        if connection.read_head().is_some() {
            for _ in 0..3 {
                report.send(connection.read_exactly(5).unwrap()).unwrap();
            }
            connection.reply(200, &[], b"");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 15\r\n\r\n"));
    for piece in ["first", "secnd", "third"] {
        client.send(piece);
        assert_eq!(reported.recv().unwrap(), piece.as_bytes());
    }
    client.read_response().expect(200);
}

#[test]
fn responses_without_bodies_keep_the_connection_synchronized() {
    let upstream = Upstream::responding(|received| match received.target.as_str() {
        "/head" => b"HTTP/1.1 200 OK\r\nContent-Length: 1234567\r\n\r\n".to_vec(),
        "/204" => b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n".to_vec(),
        "/304" => b"HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 99\r\n\r\n".to_vec(),
        "/0" => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec(),
        _ => reply(200, &[], b"body"),
    });
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_all(&upstream)));
    let mut client = gateway.client();
    for _ in 0..2 {
        let head = client.request("HEAD", "/head", &[], b"").expect(200);
        assert_eq!(head.field("content-length"), Some("1234567"));
        let none = client.get("/204").expect(204);
        assert_eq!((none.field("content-length"), none.field("x-a")), (None, Some("b")));
        assert_eq!(client.get("/304").expect(304).field("etag"), Some("\"x\""));
        assert_eq!(client.get("/0").expect(200).text(), "");
        assert_eq!(client.get("/body").expect(200).text(), "body");
    }
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_response_delimited_by_close_is_complete() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    for _ in 0..2 {
        let response = client.get("/a").expect(200);
        // The gateway sends chunks, so the client's connection stays open.
        assert_eq!((response.text().as_str(), response.chunked), ("until the end", true));
    }
    // The response of an old server.
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.0 200 OK\r\n\r\nold");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let response = gateway.get("/a").expect(200);
    assert_eq!((response.version.as_str(), response.text().as_str()), ("HTTP/1.1", "old"));
}

#[test]
fn continue_is_sent_only_when_the_body_is_needed() {
    let upstream = Upstream::always(200);
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"1/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let head = format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
    let mut client = gateway.client();
    client.send(&head);
    assert_eq!(client.read_head().unwrap().status, 100);
    client.send("body");
    client.read_response().expect(200);
    assert_eq!(upstream.only_request().body, b"body");
    assert_eq!(upstream.only_request().field("expect"), None);
    // Over the limit, nothing is uploaded.
    client.send(&head);
    let refused = client.read_response().expect(429);
    assert!(refused.informational.is_empty(), "{:?}", refused.informational);
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn informational_responses_are_forwarded_at_once() {
    let (report, reported) = std::sync::mpsc::channel::<()>();
    let reported = std::sync::Mutex::new(reported);
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            connection.send("HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nConnection: x\r\n\r\n");
            // The client receives it before the final response exists.
            reported.lock().unwrap().recv().unwrap();
            connection.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n");
            connection.reply(200, &[], b"final");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    for body in ["", "body"] {
        client.send(request("POST", "/a", &[], body.as_bytes()));
        let hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n";
        assert_eq!(client.read_exactly(hints.len()), hints);
        report.send(()).unwrap();
        let response = client.read_response_to("POST").expect(200);
        assert_eq!(response.text(), "final");
        assert_eq!(response.informational, [102]);
    }
    // HTTP/1.0 has no informational responses.
    report.send(()).unwrap();
    let mut old = gateway.client();
    old.send("GET /a HTTP/1.0\r\nHost: a\r\n\r\n");
    assert!(old.read_to_end().starts_with(b"HTTP/1.0 200"));
}

/// A client that does not read receives at most what the queue and the buffers of the kernel hold.
#[test]
fn informational_responses_to_a_client_that_does_not_read_are_bounded() {
    let (report, reported) = mpsc::channel::<()>();
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            let hint = format!("HTTP/1.1 103 Early Hints\r\nLink: <{}>\r\n\r\n", "a".repeat(10_000));
            for _ in 0..3000 {
                assert!(connection.send(&hint));
                // One by one, so that the queue of the gateway is taken often.
                thread::sleep(Duration::from_micros(100));
            }
            connection.reply(200, &[], b"final");
            report.send(()).unwrap();
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    reported.recv().unwrap();
    let response = client.read_response().expect(200);
    assert!((1..150).contains(&response.informational.len()), "{}", response.informational.len());
    assert_eq!(response.text(), "final");
}

#[test]
fn the_absolute_form_is_forwarded_as_a_path() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    gateway.get(&format!("http://{HOST}/a/b?c=d")).expect(200);
    let received = upstream.only_request();
    assert_eq!((received.target.as_str(), received.values("host").as_slice()), ("/a/b?c=d", [HOST].as_slice()));
    gateway.get(&format!("http://{HOST}")).expect(200);
    assert_eq!(upstream.received()[1].target, "/");
    gateway.get(&format!("http://{HOST}?x=y")).expect(200);
    assert_eq!(upstream.received()[2].target, "/?x=y");
}

#[test]
fn http_1_0_clients_are_served() {
    let upstream = Upstream::responding(|_| {
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_vec()
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    // Without keep-alive, the end of the connection ends the body, because HTTP/1.0 has no chunks.
    let mut client = gateway.client();
    let response = client.send("GET /a HTTP/1.0\r\n\r\n").read_response().expect(200);
    assert_eq!((response.text().as_str(), response.field("transfer-encoding")), ("hello", None));
    let received = upstream.only_request();
    assert_eq!(received.values("host"), [upstream.address.to_string()]);
    assert_eq!(received.field("x-forwarded-host"), None);
    // With keep-alive, if the length is known.
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]"));
    let mut client = gateway.client();
    let keep_alive_request = format!("GET /a HTTP/1.0\r\nHost: {HOST}\r\nConnection: keep-alive\r\n\r\n");
    let response = client.send(&keep_alive_request).read_response().expect(200);
    assert_eq!(response.field("connection"), Some("keep-alive"));
    client.send(&keep_alive_request).read_response().expect(429).problem();
}

/// HTTP/1.0 has no other sign of a truncated body.
#[test]
fn a_truncated_response_resets_the_connection_of_an_http_1_0_client() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("GET /a HTTP/1.0\r\nHost: {HOST}\r\n\r\n"));
    let error = std::io::Read::read_to_end(&mut client.stream, &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// An upstream responds without a length, and then resets the connection while the upload runs. The failed write of the gateway
/// consumes the error of the socket, so the response seems to end. If the upstream ends its stream before, it has ended.
#[test]
fn a_response_that_is_reset_during_the_upload_is_complete_only_if_it_has_ended() {
    for (version, ends) in [("1.0", false), ("1.1", false), ("2", false), ("1.0", true), ("1.1", true)] {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        // So small that the gateway soon waits until it can write more.
        socket.set_recv_buffer_size(4096).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(1).unwrap();
        let listener = TcpListener::from(socket);
        let gateway = Gateway::start(&forward_to(&[listener.local_addr().unwrap()], ""));
        let (reset, may_reset) = mpsc::channel::<()>();
        let upstream = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 100]).unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\npart").unwrap();
            may_reset.recv().unwrap();
            if ends {
                stream.shutdown(Shutdown::Write).unwrap();
            }
            // Unread bytes of the upload turn the close into a reset.
        });
        let upload = vec![b'x'; 16 * 1024];
        if version == "2" {
            let mut raw = RawHttp2::connect(gateway.http);
            raw.read_until(SETTINGS);
            raw.send(frame(SETTINGS, ACK, 0, b"")).send(frame(HEADERS, END_HEADERS, 1, &request_block("POST", "/a")));
            raw.send(frame(DATA, 0, 1, &upload).repeat(16));
            assert_eq!(raw.read_until(DATA).payload, b"part");
            reset.send(()).unwrap();
            let end =
                std::iter::from_fn(|| raw.next_frame()).find(|frame| frame.kind == RST_STREAM || frame.kind == DATA);
            assert!(end.is_some_and(|frame| frame.kind == RST_STREAM && frame.code() != NO_ERROR));
        } else {
            let mut client = gateway.client();
            client.send(format!("POST /a HTTP/{version}\r\nHost: {HOST}\r\nContent-Length: 1000000000\r\n\r\n"));
            // Until the sockets are full, so that the gateway waits for the upstream.
            client.stream.set_nonblocking(true).unwrap();
            while client.stream.write(&upload).is_ok() {}
            client.stream.set_nonblocking(false).unwrap();
            reset.send(()).unwrap();
            let mut received = Vec::new();
            let is_reset = client.stream.read_to_end(&mut received).is_err();
            let received = String::from_utf8_lossy(&received);
            assert!(received.contains("part"), "{received}");
            let is_complete = !is_reset && (version == "1.0" || received.ends_with("0\r\n\r\n"));
            assert_eq!(is_complete, ends, "{version}: {received}");
        }
        upstream.join().unwrap();
    }
}

/// The end of the stream arrives before the reset that a write then causes: the response is complete.
#[test]
fn a_response_that_ends_during_the_upload_is_complete() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_head().is_some() {
            connection.send("HTTP/1.1 413 Too Large\r\n\r\ntoo much");
            connection.stream().shutdown(Shutdown::Write).unwrap();
            connection.wait_for_close();
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1000000\r\n\r\n"));
    assert_eq!(client.read_response().expect(413).text(), "too much");
}

/// A response that pauses for too long is not whole either.
#[test]
fn a_timed_out_response_resets_the_connection_of_an_http_1_0_client() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
            connection.wait_for_close();
        }
    });
    let gateway = Gateway::start(&format!("{}[timeouts]\nbody = \"300ms\"\n", forward_all(&upstream)));
    let mut client = gateway.client();
    client.send(format!("GET /a HTTP/1.0\r\nHost: {HOST}\r\n\r\n"));
    let error = client.stream.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn an_early_response_is_forwarded_during_the_upload() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_head().is_some() {
            connection.reply(413, &[("Connection", "close")], b"too much");
            connection.wait_for_close();
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send(format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1000000\r\n\r\n"));
    client.send(vec![b'x'; 1000]);
    assert_eq!(client.read_response().expect(413).text(), "too much");
    // No other request continues on that connection.
    gateway.get("/b").expect(413);
    assert_eq!(upstream.connections(), 2);
}
