//! Ten upgrades under load: no request fails, and no connection is reset.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime::Builder;

use crate::support::client::{HOST, request};
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::{DEADLINE, TempDir, eventually};

/// More requests than the test needs.
const LIMIT: usize = 1_000_000;
/// After such a pause, the gateway treats a connection as idle.
const IDLE_PAUSE: Duration = Duration::from_secs(2);

/// The observations of the clients.
#[derive(Default)]
struct LoadState {
    is_stopped: AtomicBool,
    answered: AtomicUsize,
    /// Of them, those on connections that had been idle.
    after_idle: AtomicUsize,
    connections: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl LoadState {
    fn is_running(&self) -> bool {
        !self.is_stopped.load(Ordering::Relaxed)
    }

    fn record_failure(&self, how: String) {
        self.failures.lock().unwrap().push(how);
    }
}

/// Sends requests with a pause before each, on one connection until the gateway announces its end, and then on the next.
fn send_until_stopped(address: SocketAddr, pause: Duration, state: &LoadState) {
    while state.is_running() {
        if let Err(how) = send_on_one_connection(address, pause, state) {
            state.record_failure(how);
        }
    }
}

fn send_on_one_connection(address: SocketAddr, pause: Duration, state: &LoadState) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("connecting: {error}"))?;
    state.connections.fetch_add(1, Ordering::Relaxed);
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    for turn in 0.. {
        if !state.is_running() {
            return Ok(());
        }
        thread::sleep(pause);
        let context = |what: &str, error: &dyn std::fmt::Display| format!("{what}, request {turn}: {error}");
        stream.write_all(&request("GET", "/a", &[], b"")).map_err(|error| context("sending", &error))?;
        let head = read_response(&mut stream).map_err(|error| context("receiving", &error))?;
        if !head.starts_with("HTTP/1.1 200 ") {
            return Err(context("response", &head));
        }
        state.answered.fetch_add(1, Ordering::Relaxed);
        state.after_idle.fetch_add(usize::from(pause >= IDLE_PAUSE), Ordering::Relaxed);
        if head.to_ascii_lowercase().contains("\r\nconnection: close\r\n") {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).map_err(|error| context("end of the connection", &error))?;
            return if rest.is_empty() { Ok(()) } else { Err(context("after the response", &format!("{rest:?}"))) };
        }
    }
    Ok(())
}

/// Reads one whole response; returns its head.
fn read_response(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut received = Vec::new();
    let mut piece = [0; 4096];
    loop {
        if let Some(end) = received.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&received[..end + 4]).into_owned();
            let field = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok();
            let length = head.lines().find_map(field).expect("a length");
            if received.len() >= end + 4 + length {
                assert_eq!(received.len(), end + 4 + length, "bytes after the response");
                return Ok(head);
            }
        }
        match stream.read(&mut piece)? {
            0 => return Err(std::io::Error::other(format!("closed after {} bytes", received.len()))),
            count => received.extend_from_slice(&piece[..count]),
        }
    }
}

/// As `send_until_stopped`, over HTTP/2, with four concurrent requests.
async fn send_until_stopped_over_http2(address: SocketAddr, state: Arc<LoadState>) {
    while state.is_running() {
        let stream = match tokio::net::TcpStream::connect(address).await {
            Ok(stream) => stream,
            Err(error) => return state.record_failure(format!("HTTP/2, connecting: {error}")),
        };
        state.connections.fetch_add(1, Ordering::Relaxed);
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let streams = (0..4).map(|_| tokio::spawn(send_over_http2(sender.clone(), Arc::clone(&state))));
        let streams: Vec<_> = streams.collect();
        drop(sender);
        for stream in streams {
            stream.await.unwrap();
        }
        // The connection ends with a GOAWAY without an error.
        if let Err(error) = connection.await.unwrap() {
            state.record_failure(format!("HTTP/2, the connection: {error:?}"));
        }
    }
}

/// Sends requests until the connection accepts no more.
async fn send_over_http2(mut sender: SendRequest<Empty<Bytes>>, state: Arc<LoadState>) {
    while state.is_running() {
        tokio::time::sleep(Duration::from_millis(5)).await;
        if sender.ready().await.is_err() {
            return;
        }
        let request = Request::get(format!("http://{HOST}/a")).body(Empty::new()).unwrap();
        let response = match tokio::time::timeout(DEADLINE, sender.try_send_request(request)).await.expect("in time") {
            Ok(response) => response,
            Err(mut error) => {
                // After GOAWAY, an unprocessed request can be sent on another connection.
                if error.take_message().is_none() && !is_unprocessed(error.error()) {
                    state.record_failure(format!("HTTP/2, sending: {:?}", error.error()));
                }
                return;
            }
        };
        let status = response.status();
        match response.into_body().collect().await {
            Ok(_) if status == 200 => drop(state.answered.fetch_add(1, Ordering::Relaxed)),
            Ok(_) => state.record_failure(format!("HTTP/2: {status}")),
            Err(error) => state.record_failure(format!("HTTP/2, the body: {error:?}")),
        }
    }
}

/// Whether a request was after the last stream in GOAWAY (RFC 9113, section 6.8), or was not sent because of GOAWAY.
fn is_unprocessed(error: &hyper::Error) -> bool {
    let error = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    error.is_some_and(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
}

#[test]
fn ten_upgrades_under_load_fail_no_request() {
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let toml = format!(
        "workers = 2\naccess_log = {{ file = \"{}\" }}\n[upstreams.u]\nbuiltin = \"echo\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"all\"]\n\
         [rules.all]\nkey = \"global\"\nwindows = [{{ limit = {LIMIT}, period = \"1d\", start = \"first-request\" }}]\n",
        log.display()
    );
    let mut chain = UpgradeChain::start(&toml);
    let address = chain.first.http;
    let state = Arc::new(LoadState::default());
    let mut clients: Vec<_> = (0..64)
        .map(|n| {
            let state = Arc::clone(&state);
            // Some clients send without a pause; the connections of others become idle between requests.
            let pause = [3, 40, 300, 2000][n % 4] + 3 * n as u64;
            thread::spawn(move || send_until_stopped(address, Duration::from_millis(pause), &state))
        })
        .collect();
    clients.push(thread::spawn({
        let state = Arc::clone(&state);
        move || {
            Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
                let clients: Vec<_> =
                    (0..16).map(|_| tokio::spawn(send_until_stopped_over_http2(address, Arc::clone(&state)))).collect();
                for client in clients {
                    client.await.unwrap();
                }
            });
        }
    }));
    let mut pids = vec![chain.first.pid()];
    for turn in 0..10 {
        // Every second upgrade follows so soon that several processes drain at once.
        let (kind, least) = if turn % 2 == 0 { (&state.after_idle, 16) } else { (&state.answered, 500) };
        let before = kind.load(Ordering::Relaxed);
        eventually("requests are answered", || kind.load(Ordering::Relaxed) >= before + least);
        pids.push(chain.upgrade());
    }
    // All clients have reconnected to the last process, so the others have ended.
    assert!(chain.first.wait().success(), "{}", chain.first.stderr());
    for pid in &pids[1..10] {
        eventually("a replaced process ends", || !is_alive(*pid));
    }
    state.is_stopped.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let failures = state.failures.lock().unwrap();
    assert!(failures.is_empty(), "{} failures, such as {:?}", failures.len(), &failures[..failures.len().min(10)]);
    let connections = state.connections.load(Ordering::Relaxed);
    assert!(connections > 80, "no client had to reconnect: {connections} connections");
    // Every accepted request got a response, and no other request reached a process.
    let answered = state.answered.load(Ordering::Relaxed);
    let lines = || std::fs::read_to_string(&log).unwrap().lines().count();
    eventually("all responses are logged", || lines() >= answered);
    assert_eq!(lines(), answered);
    // Every request was counted once.
    let quota = chain.first.get("/a").expect(200).field("ratelimit").unwrap().to_owned();
    let left = LIMIT - answered - 1;
    assert!(quota.starts_with(&format!("\"all\";r={left};")), "{answered} requests leave {quota}");
}
