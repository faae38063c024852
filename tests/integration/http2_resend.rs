//! Requests that an HTTP/2 server did not process: resent with their bodies, unless a part of the body is no longer buffered.

use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Response;

use crate::support::gateway::Gateway;
use crate::support::http2_client::{END_HEADERS, END_STREAM, GOAWAY, HEADERS, NO_ERROR, RawHttp2, STATUS_200, frame};
use crate::support::http2_upstream::{Exchange, Http2Upstream, Options};
use crate::support::upstream::Upstream;

fn gateway(upstream: &str) -> Gateway {
    Gateway::start(&format!("workers = 1\n{upstream}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n"))
}

/// Bytes in which a moved part shows.
fn body(length: usize) -> Vec<u8> {
    (0..length).map(|at| ((at / 256) ^ at) as u8).collect()
}

/// Responds with the request that it received.
async fn echo(mut stream: Exchange) {
    let mut whole = Vec::new();
    while let Some(Ok(piece)) = stream.read_data().await {
        whole.extend_from_slice(&piece);
    }
    let mut body = stream.send_head(Response::new(()));
    let _ = body.send_data(whole.into(), true);
}

/// Reads this number of bytes of the first request body, and then refuses the stream. Later requests are echoed.
fn refusing_after(bytes: usize) -> Http2Upstream {
    Http2Upstream::with_script(Options::default(), move |mut stream| async move {
        if stream.nth > 0 || stream.head.connection > 0 {
            return echo(stream).await;
        }
        let mut taken = 0;
        while taken < bytes {
            taken += stream.read_data().await.unwrap().unwrap().len();
        }
        stream.refuse_stream();
    })
}

#[test]
fn a_refused_request_is_resent_with_its_body() {
    for (length, taken) in [(1, 0), (1, 1), (40_000, 1), (40_000, 40_000), (64 * 1024, 65_000)] {
        let upstream = refusing_after(taken);
        let gateway = gateway(&upstream.toml("u"));
        let sent = body(length);
        let response = gateway.client().post("/a", &sent).expect(200);
        assert!(response.body == sent, "{length} bytes, of which {taken} were taken");
        assert_eq!(upstream.request_heads().len(), 2);
    }
}

#[test]
fn a_request_whose_body_exceeds_the_buffer_is_not_resent() {
    let upstream = refusing_after(64 * 1024 + 1);
    let gateway = gateway(&upstream.toml("u"));
    gateway.client().post("/a", body(200_000)).expect(502).problem();
    assert_eq!(upstream.request_heads().len(), 1);
    // The next request is not affected.
    let sent = body(200_000);
    assert!(gateway.client().post("/a", &sent).expect(200).body == sent);
}

#[test]
fn the_rest_of_an_upload_follows_a_resend() {
    let upstream = refusing_after(5);
    let gateway = gateway(&upstream.toml("u"));
    let mut client = gateway.client();
    client.send(b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n");
    crate::support::eventually("the request is resent", || upstream.request_heads().len() == 2);
    client.send(b"8\r\n, second\r\n0\r\n\r\n");
    assert_eq!(client.read_response().expect(200).body, b"first, second");
}

/// Ends `left` connections with GOAWAY after their first request; later connections are served. `last` is the last processed
/// stream in GOAWAY.
fn goaway_upstream(left: usize, last: u32) -> Upstream {
    let left = AtomicUsize::new(left);
    Upstream::with_script(move |connection| {
        let mut raw = RawHttp2::accept(connection.stream().try_clone().unwrap());
        let request =
            std::iter::from_fn(|| raw.next_frame()).find(|frame| frame.stream == 1 && frame.flags & END_STREAM != 0);
        if request.is_none() {
            return;
        }
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            let goaway = [last.to_be_bytes(), NO_ERROR.to_be_bytes()].concat();
            raw.send(frame(GOAWAY, 0, 0, &goaway));
        } else {
            raw.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, &[STATUS_200]));
            // Until the gateway closes the connection.
            raw.read_to_end();
        }
        let _ = raw.stream.flush();
    })
}

#[test]
fn requests_unprocessed_at_goaway_are_resent() {
    let upstream = goaway_upstream(1, 0);
    let gateway = gateway(&format!("{}protocol = \"http2\"\n", upstream.toml("u")));
    gateway.client().post("/a", body(20_000)).expect(200);
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn requests_possibly_processed_are_not_resent() {
    let upstream = goaway_upstream(1, 1);
    let gateway = gateway(&format!("{}protocol = \"http2\"\n", upstream.toml("u")));
    gateway.client().post("/a", body(20_000)).expect(502).problem();
    assert_eq!(upstream.connections(), 1);
    gateway.client().post("/a", body(20_000)).expect(200);
}

#[test]
fn resends_are_bounded() {
    let upstream = goaway_upstream(100, 0);
    let gateway = gateway(&format!("{}protocol = \"http2\"\n", upstream.toml("u")));
    gateway.client().post("/a", "body").expect(502).problem();
    assert_eq!(upstream.connections(), 2);
}
