//! The middleware in an axum service, asked through real sockets.
#![cfg(not(feature = "loom"))]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use transom_limiter::Limiter;
use transom_limiter::tower::LimitLayer;

#[path = "../examples/axum.rs"]
#[allow(dead_code, reason = "the example listens on a fixed port; the test does not")]
mod axum_example;

/// The status of each of `count` requests on one connection.
fn request(address: SocketAddr, count: usize) -> Vec<String> {
    let mut connection = TcpStream::connect(address).unwrap();
    let last = "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    let others = "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n".repeat(count - 1);
    connection.write_all((others + last).as_bytes()).unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    text.split("HTTP/1.1 ").skip(1).map(|response| response[..3].to_owned()).collect()
}

/// Serves requests on a thread of its own.
fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    thread::spawn(move || {
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
        })
    });
    address
}

#[test]
fn clients_in_parallel_get_exactly_the_limit() {
    let limiter = Limiter::builder()
        .layer(100, Duration::from_secs(60))
        .layer(60, Duration::from_secs(3600))
        .capacity(1000)
        .build()
        .unwrap();
    let layer = LimitLayer::new("per-client", limiter, |request| {
        request.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| address.ip())
    });
    let app = Router::new().route("/", get(|| async { "hello" })).layer(layer.clock(|| 3_600_000));
    let addresses: Vec<_> = (0..4).map(|_| serve(app.clone())).collect();
    let statuses: Vec<String> = thread::scope(|scope| {
        let clients: Vec<_> = addresses.repeat(2).into_iter().map(|to| scope.spawn(move || request(to, 20))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let count = |status| statuses.iter().filter(|found| *found == status).count();
    assert_eq!((count("200"), count("429")), (60, 100));
}

/// Five requests in ten seconds, and three failed logins a minute.
#[test]
fn the_axum_example_limits_requests_and_failed_logins() {
    // Eleven requests meet at most two windows, each of which admits five.
    let statuses = request(serve(axum_example::app().unwrap()), 11);
    assert_eq!(statuses[..5], ["200"; 5]);
    assert!(statuses.iter().any(|status| status == "429"), "{statuses:?}");
    let address = serve(axum_example::app().unwrap());
    for (password, status) in [("open sesame", "200 OK"), ("wrong", "401 Unauthorized")] {
        let mut connection = TcpStream::connect(address).unwrap();
        let length = password.len();
        let head = format!("POST /login HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        connection.write_all((head + password).as_bytes()).unwrap();
        let mut text = String::new();
        connection.read_to_string(&mut text).unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
        assert!(text.contains("\"failed-logins\";q=3;w=60"), "{text}");
    }
}
