//! Server-sent events: the client receives each event before the upstream sends the next, over both protocols.

use std::sync::Mutex;
use std::sync::mpsc;

use bytes::Bytes;
use http::Response;

use crate::support::client::request;
use crate::support::forward_all;
use crate::support::gateway::Gateway;
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::upstream::Upstream;

const EVENTS: usize = 200;

fn event(n: usize) -> String {
    format!("event: tick\ndata: {n}\n\n")
}

/// Reads the events one by one, and reports each of them.
fn read_events(gateway: &Gateway, mut received: impl FnMut()) {
    let mut client = gateway.client();
    client.send(request("GET", "/events", &[("Accept", "text/event-stream")], b""));
    assert_eq!(client.read_head().unwrap().expect(200).field("content-type"), Some("text/event-stream"));
    for n in 0..EVENTS {
        assert_eq!(String::from_utf8(client.read_chunk().unwrap()).unwrap(), event(n));
        received();
    }
    assert_eq!(client.read_chunk(), None);
}

#[test]
fn events_are_forwarded_over_http1() {
    let (report, reported) = mpsc::channel::<()>();
    let reported = Mutex::new(reported);
    let upstream = Upstream::with_script(move |connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
        for n in 0..EVENTS {
            let event = event(n);
            connection.send(format!("{:x}\r\n{event}\r\n", event.len()));
            reported.lock().unwrap().recv().unwrap();
        }
        connection.send("0\r\n\r\n");
    });
    read_events(&Gateway::start(&forward_all(&upstream)), || report.send(()).unwrap());
}

#[test]
fn events_are_forwarded_over_http2() {
    let (report, reported) = tokio::sync::mpsc::unbounded_channel::<()>();
    let reported = std::sync::Arc::new(tokio::sync::Mutex::new(reported));
    let upstream = Http2Upstream::with_script(Options::default(), move |mut stream| {
        let reported = std::sync::Arc::clone(&reported);
        async move {
            let head = Response::builder().header("content-type", "text/event-stream").body(()).unwrap();
            let mut response = stream.send_head(head);
            for n in 0..EVENTS {
                response.send_data(Bytes::from(event(n)), false).unwrap();
                reported.lock().await.recv().await.unwrap();
            }
            response.send_data(Bytes::new(), true).unwrap();
        }
    });
    let toml = format!("{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"));
    read_events(&Gateway::start(&toml), || report.send(()).unwrap());
}
