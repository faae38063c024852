//! The number of concurrent streams that an HTTP/2 upstream allows (SETTINGS_MAX_CONCURRENT_STREAMS), including none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::gateway::Gateway;
use crate::support::http2_client::{END_HEADERS, END_STREAM, HEADERS, RawHttp2, STATUS_200, frame, settings};
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_all};

const MAX_CONCURRENT_STREAMS: u16 = 3;

const CONNECT: Duration = Duration::from_secs(2);

fn gateway(upstream: &Upstream) -> Gateway {
    let toml = forward_all(upstream).replace("[[routes]]", "protocol = \"http2\"\n[[routes]]");
    Gateway::start(&format!("workers = 1\n{toml}[timeouts]\nconnect = \"2s\"\nresponse_head = \"10s\"\n"))
}

/// Reads up to the next request, and returns its stream; `None` when the gateway has closed the connection.
fn next_request(raw: &mut RawHttp2) -> Option<u32> {
    std::iter::from_fn(|| raw.next_frame()).find(|frame| frame.kind == HEADERS).map(|frame| frame.stream)
}

fn ok(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, stream, &[STATUS_200])
}

/// Responds to every request on a connection with 200.
fn serve(raw: &mut RawHttp2) {
    while let Some(stream) = next_request(raw) {
        raw.send(ok(stream));
    }
}

#[test]
fn a_full_connection_is_supplemented_by_one_other() {
    let upstream = Upstream::with_script(|connection| {
        let mut raw = RawHttp2::accept(connection.stream().try_clone().unwrap());
        if connection.number == 0 {
            let stream = next_request(&mut raw).unwrap();
            raw.send([settings(&[(MAX_CONCURRENT_STREAMS, 0)]), ok(stream)].concat());
        }
        serve(&mut raw);
    });
    let gateway = gateway(&upstream);
    for _ in 0..30 {
        gateway.get("/a").expect(200);
    }
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn a_server_that_allows_no_streams_is_504_on_a_bounded_number_of_connections() {
    let upstream = Upstream::with_script(|connection| {
        let mut raw = RawHttp2::accept_with(connection.stream().try_clone().unwrap(), &[(MAX_CONCURRENT_STREAMS, 0)]);
        assert_eq!(next_request(&mut raw), None, "a request arrived");
    });
    let gateway = gateway(&upstream);
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| (0..2).for_each(|_| drop(gateway.get("/a").expect(504).problem())));
        }
    });
    // The gateway waits for each connection for at least half the connect timeout.
    let most = 1 + (start.elapsed().as_micros() / (CONNECT / 2).as_micros()) as usize;
    assert!(upstream.connections() <= most, "{} connections, at most {most}", upstream.connections());
}

#[test]
fn a_server_that_allows_no_streams_at_first_is_used_when_it_does() {
    let upstream = Upstream::with_script(|connection| {
        let allows = u32::from(connection.number > 0);
        let mut raw =
            RawHttp2::accept_with(connection.stream().try_clone().unwrap(), &[(MAX_CONCURRENT_STREAMS, allows)]);
        serve(&mut raw);
    });
    let gateway = gateway(&upstream);
    gateway.get("/a").expect(504).problem();
    for _ in 0..5 {
        gateway.get("/a").expect(200);
    }
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn requests_wait_for_a_connection_to_allow_streams() {
    let allowed = Arc::new(AtomicBool::new(false));
    let upstream = Upstream::with_script({
        let allowed = Arc::clone(&allowed);
        move |connection| {
            let mut raw =
                RawHttp2::accept_with(connection.stream().try_clone().unwrap(), &[(MAX_CONCURRENT_STREAMS, 0)]);
            eventually("the test allows streams", || allowed.load(Ordering::SeqCst));
            raw.send(settings(&[(MAX_CONCURRENT_STREAMS, 100)]));
            serve(&mut raw);
        }
    });
    // A long connect timeout, because the test decides when streams are allowed.
    let toml = forward_all(&upstream).replace("[[routes]]", "protocol = \"http2\"\n[[routes]]");
    let gateway = Gateway::start(&format!("workers = 1\n{toml}[timeouts]\nconnect = \"30s\"\n"));
    thread::scope(|scope| {
        for _ in 0..5 {
            scope.spawn(|| gateway.get("/a").expect(200));
        }
        eventually("a connection is opened", || upstream.connections() == 1);
        allowed.store(true, Ordering::SeqCst);
    });
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_connection_with_free_streams_is_preferred_to_a_full_one() {
    let (report, reported): (Sender<usize>, _) = mpsc::channel();
    let report = Arc::new(Mutex::new(report));
    let upstream = Upstream::with_script(move |connection| {
        let limit = if connection.number == 0 { 1 } else { 100 };
        let mut raw =
            RawHttp2::accept_with(connection.stream().try_clone().unwrap(), &[(MAX_CONCURRENT_STREAMS, limit)]);
        // The first request gets no response.
        if next_request(&mut raw).is_some() {
            report.lock().unwrap().send(connection.number).unwrap();
        }
        serve(&mut raw);
    });
    let gateway = gateway(&upstream);
    let waiting: Vec<_> = (0..2)
        .map(|number| {
            let mut client = gateway.client();
            client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
            assert_eq!(reported.recv(), Ok(number));
            client
        })
        .collect();
    for _ in 0..5 {
        gateway.get("/a").expect(200);
    }
    assert_eq!(upstream.connections(), 2);
    drop(waiting);
}
