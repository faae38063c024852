//! Informational (1xx) responses of upstreams, forwarded to HTTP/2 clients.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::mpsc;

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

use crate::support::client::HOST;
use crate::support::forward_all;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{DATA, HEADERS, RawHttp2};
use crate::support::upstream::Upstream;

#[test]
fn informational_responses_are_relayed_at_once() {
    let (report, reported) = mpsc::channel::<()>();
    let reported = Mutex::new(reported);
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            connection.send("HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: x\r\nKeep-Alive: 5\r\n\r\n");
            // The client receives it before the final response exists.
            reported.lock().unwrap().recv().unwrap();
            connection.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n");
            connection.reply(200, &[], b"final");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let (runtime, mut sender) = connect(gateway.http);
    for _ in 0..3 {
        runtime.block_on(async {
            let request = http::Request::get(format!("http://{HOST}/a")).body(()).unwrap();
            let (mut response, _) = sender.send_request(request, true).unwrap();
            let hint = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
            assert_eq!(hint.status(), 103);
            assert_eq!(
                hint.headers().iter().map(|(name, value)| (name.as_str(), value)).collect::<Vec<_>>(),
                [("link", &http::HeaderValue::from_static("</a.css>"))]
            );
            report.send(()).unwrap();
            let hint = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
            assert_eq!((hint.status().as_u16(), hint.headers().len()), (102, 0));
            assert_eq!(response.await.unwrap().status(), 200);
        });
    }
}

/// Informational responses are limited, because flow control does not apply to them.
#[test]
fn endless_informational_responses_are_bounded() {
    let upstream = Upstream::with_script(|connection| {
        while connection.read_request().is_some() {
            let hint = format!("HTTP/1.1 103 Early Hints\r\nlink: <{}>\r\n\r\n", "a".repeat(1000));
            (0..2000).all(|_| connection.send(&hint));
            connection.reply(200, &[], b"final");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut raw = RawHttp2::connect(gateway.http);
    raw.get(1, "/a");
    let heads = std::iter::from_fn(|| raw.next_frame()).take_while(|frame| frame.kind != DATA);
    let heads = heads.filter(|frame| (frame.kind, frame.stream) == (HEADERS, 1)).count();
    // The last head is the final response.
    assert!((1..=17).contains(&heads), "{heads}");
}

/// The h2 client, which reports informational responses.
fn connect(address: SocketAddr) -> (Runtime, SendRequest<Bytes>) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let sender = runtime.block_on(async {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        sender
    });
    (runtime, sender)
}
