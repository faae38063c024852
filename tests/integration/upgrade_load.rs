//! Ten processes after one another, and clients that must not notice: no request fails, no connection is reset.

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
use crate::support::{DEADLINE, Scratch, eventually};

/// More requests than the test needs.
const LIMIT: usize = 1_000_000;
/// After such a pause the gateway has put a connection to rest.
const LONG: Duration = Duration::from_secs(2);

/// The observations of the clients.
#[derive(Default)]
struct Tally {
    over: AtomicBool,
    answered: AtomicUsize,
    /// Of them, those on connections that had been put to rest.
    woken: AtomicUsize,
    connections: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Tally {
    fn goes_on(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn failed(&self, how: String) {
        self.failures.lock().unwrap().push(how);
    }
}

/// Sends requests on one connection until its end is announced, then on the next; with a pause before each request.
fn keep_asking(address: SocketAddr, pause: Duration, tally: &Tally) {
    while tally.goes_on() {
        if let Err(how) = ask_on_one(address, pause, tally) {
            tally.failed(how);
        }
    }
}

fn ask_on_one(address: SocketAddr, pause: Duration, tally: &Tally) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("connecting: {error}"))?;
    tally.connections.fetch_add(1, Ordering::Relaxed);
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    for turn in 0.. {
        if !tally.goes_on() {
            return Ok(());
        }
        thread::sleep(pause);
        let place = |what: &str, error: &dyn std::fmt::Display| format!("{what}, request {turn}: {error}");
        stream.write_all(&request("GET", "/a", &[], b"")).map_err(|error| place("sending", &error))?;
        let head = response(&mut stream).map_err(|error| place("receiving", &error))?;
        if !head.starts_with("HTTP/1.1 200 ") {
            return Err(place("answer", &head));
        }
        tally.answered.fetch_add(1, Ordering::Relaxed);
        tally.woken.fetch_add(usize::from(pause >= LONG), Ordering::Relaxed);
        if head.to_ascii_lowercase().contains("\r\nconnection: close\r\n") {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).map_err(|error| place("end of the connection", &error))?;
            return if rest.is_empty() { Ok(()) } else { Err(place("behind the answer", &format!("{rest:?}"))) };
        }
    }
    Ok(())
}

/// Reads one whole response; returns its head.
fn response(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut received = Vec::new();
    let mut piece = [0; 4096];
    loop {
        if let Some(end) = received.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&received[..end + 4]).into_owned();
            let field = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok();
            let length = head.lines().find_map(field).expect("a length");
            if received.len() >= end + 4 + length {
                assert_eq!(received.len(), end + 4 + length, "more than was asked for");
                return Ok(head);
            }
        }
        match stream.read(&mut piece)? {
            0 => return Err(std::io::Error::other(format!("closed after {} bytes", received.len()))),
            count => received.extend_from_slice(&piece[..count]),
        }
    }
}

/// As `keep_asking`, by HTTP/2, with four requests at a time.
async fn keep_asking_by_http2(address: SocketAddr, tally: Arc<Tally>) {
    while tally.goes_on() {
        let stream = match tokio::net::TcpStream::connect(address).await {
            Ok(stream) => stream,
            Err(error) => return tally.failed(format!("HTTP/2, connecting: {error}")),
        };
        tally.connections.fetch_add(1, Ordering::Relaxed);
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let streams = (0..4).map(|_| tokio::spawn(ask_by_http2(sender.clone(), Arc::clone(&tally))));
        let streams: Vec<_> = streams.collect();
        drop(sender);
        for stream in streams {
            stream.await.unwrap();
        }
        // A GOAWAY without an error, and a connection that is closed as it should be.
        if let Err(error) = connection.await.unwrap() {
            tally.failed(format!("HTTP/2, the connection: {error:?}"));
        }
    }
}

/// Sends requests until the connection accepts no more.
async fn ask_by_http2(mut sender: SendRequest<Empty<Bytes>>, tally: Arc<Tally>) {
    while tally.goes_on() {
        tokio::time::sleep(Duration::from_millis(5)).await;
        if sender.ready().await.is_err() {
            return;
        }
        let request = Request::get(format!("http://{HOST}/a")).body(Empty::new()).unwrap();
        let response = match tokio::time::timeout(DEADLINE, sender.try_send_request(request)).await.expect("in time") {
            Ok(response) => response,
            Err(mut error) => {
                // The end had been announced, and the request was never accepted: a client sends it on another connection.
                if error.take_message().is_none() && !is_untaken(error.error()) {
                    tally.failed(format!("HTTP/2, sending: {:?}", error.error()));
                }
                return;
            }
        };
        let status = response.status();
        match response.into_body().collect().await {
            Ok(_) if status == 200 => drop(tally.answered.fetch_add(1, Ordering::Relaxed)),
            Ok(_) => tally.failed(format!("HTTP/2: {status}")),
            Err(error) => tally.failed(format!("HTTP/2, the body: {error:?}")),
        }
    }
}

/// Whether a request came after the last stream in GOAWAY (RFC 9113, section 6.8), or was not sent because of it.
fn is_untaken(error: &hyper::Error) -> bool {
    let error = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    error.is_some_and(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
}

#[test]
fn ten_upgrades_under_load_fail_no_request() {
    let scratch = Scratch::new();
    let log = scratch.path().join("access.log");
    let toml = format!(
        "workers = 2\naccess_log = {{ file = \"{}\" }}\n[upstreams.u]\nbuiltin = \"echo\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"all\"]\n\
         [rules.all]\nkey = \"global\"\nwindows = [{{ limit = {LIMIT}, period = \"1d\", start = \"first-request\" }}]\n",
        log.display()
    );
    let mut chain = UpgradeChain::start(&toml);
    let address = chain.first.http;
    let tally = Arc::new(Tally::default());
    let mut clients: Vec<_> = (0..64)
        .map(|n| {
            let tally = Arc::clone(&tally);
            // Some clients send all the time; between the requests of others the connection becomes idle.
            let pause = [3, 40, 300, 2000][n % 4] + 3 * n as u64;
            thread::spawn(move || keep_asking(address, Duration::from_millis(pause), &tally))
        })
        .collect();
    clients.push(thread::spawn({
        let tally = Arc::clone(&tally);
        move || {
            Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
                let clients: Vec<_> =
                    (0..16).map(|_| tokio::spawn(keep_asking_by_http2(address, Arc::clone(&tally)))).collect();
                for client in clients {
                    client.await.unwrap();
                }
            });
        }
    }));
    let mut pids = vec![chain.first.pid()];
    for turn in 0..10 {
        // Every other time so soon that several drain at once.
        let (kind, least) = if turn % 2 == 0 { (&tally.woken, 16) } else { (&tally.answered, 500) };
        let before = kind.load(Ordering::Relaxed);
        eventually("there is traffic", || kind.load(Ordering::Relaxed) >= before + least);
        pids.push(chain.upgrade());
    }
    // All connections that one of them let in have come to the next, so all but the last are gone.
    assert!(chain.first.wait().success(), "{}", chain.first.stderr());
    for pid in &pids[1..10] {
        eventually("one that was succeeded ends", || !is_alive(*pid));
    }
    tally.over.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let failures = tally.failures.lock().unwrap();
    assert!(failures.is_empty(), "{} failures, such as {:?}", failures.len(), &failures[..failures.len().min(10)]);
    let connections = tally.connections.load(Ordering::Relaxed);
    assert!(connections > 80, "nobody was ever sent on: {connections} connections");
    // Every accepted request was answered, and no unanswered one reached a process.
    let answered = tally.answered.load(Ordering::Relaxed);
    let lines = || std::fs::read_to_string(&log).unwrap().lines().count();
    eventually("all answers are in the log", || lines() >= answered);
    assert_eq!(lines(), answered);
    // And it was counted once, by either process.
    let quota = chain.first.get("/a").expect(200).field("ratelimit").unwrap().to_owned();
    let left = LIMIT - answered - 1;
    assert!(quota.starts_with(&format!("\"all\";r={left};")), "{answered} answers leave {quota}");
}
