//! Large bodies in both directions arrive whole and are never buffered in memory.
//!
//! The gateway runs in its own process, so that its memory can be measured.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::client::{HOST, request};
use crate::support::forward_all;
use crate::support::process::Process;
use crate::support::upstream::Upstream;

const LARGE_BYTES: usize = 50_000_000;
/// The memory that the gateway may need beyond its memory when idle.
const MEMORY_KB: u64 = 6_000;
/// Kernel buffers of two connections hold less than this.
const IN_FLIGHT_BYTES: usize = 30_000_000;

fn spawn(upstream: &Upstream) -> (Process, u64) {
    let process = Process::spawn(&format!("workers = 1\n{}\n[counters]\ncapacity = 1000\n", forward_all(upstream)));
    process.get("/warm-up").expect(200);
    let idle_kb = process.memory_kb("VmHWM");
    (process, idle_kb)
}

/// The byte at a position, different enough to detect lost or repeated bytes.
fn byte_at(position: usize) -> u8 {
    (position ^ position >> 8 ^ position >> 16) as u8
}

fn pattern(start: usize, length: usize) -> Vec<u8> {
    (start..start + length).map(byte_at).collect()
}

const PIECE_BYTES: usize = 50_000;

/// Sends the large body until no byte can be written for half a second; returns the number of bytes written.
fn send_until_stalled(stream: &mut TcpStream, from: usize) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut sent = from;
    while sent < LARGE_BYTES {
        let bytes = pattern(sent, PIECE_BYTES - sent % PIECE_BYTES);
        match stream.write(&bytes) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    stream.set_write_timeout(None).unwrap();
    sent
}

fn send_rest(stream: &mut TcpStream, from: usize) {
    for start in (from..LARGE_BYTES).step_by(PIECE_BYTES) {
        stream.write_all(&pattern(start, PIECE_BYTES.min(LARGE_BYTES - start))).unwrap();
    }
}

#[test]
fn a_slow_client_applies_backpressure_to_the_upstream() {
    let (report, reported) = mpsc::channel();
    let upstream = Upstream::with_script(move |connection| {
        while let Some(received) = connection.read_request() {
            if received.target == "/warm-up" {
                connection.reply(200, &[], b"");
                continue;
            }
            connection.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE_BYTES}\r\n\r\n"));
            let sent = send_until_stalled(connection.stream(), 0);
            report.send(sent).unwrap();
            send_rest(connection.stream(), sent);
        }
    });
    let (process, idle_kb) = spawn(&upstream);
    let mut client = process.client();
    client.send(request("GET", "/large", &[], b""));
    client.read_head().unwrap().expect(200);
    let sent = reported.recv().unwrap();
    assert!(sent < IN_FLIGHT_BYTES, "{sent} bytes were accepted while the receiver does not read");
    for start in (0..LARGE_BYTES).step_by(PIECE_BYTES) {
        assert!(client.read_exactly(PIECE_BYTES) == pattern(start, PIECE_BYTES), "after {start} bytes");
    }
    assert_eq!(client.get("/warm-up").expect(200).body.len(), 0);
    let grown_kb = process.memory_kb("VmHWM") - idle_kb;
    assert!(grown_kb < MEMORY_KB, "{grown_kb} kB more than idle");
}

#[test]
fn a_slow_upstream_applies_backpressure_to_the_client() {
    for chunked in [false, true] {
        let (go, proceed) = mpsc::channel::<()>();
        let proceed = Arc::new(Mutex::new(proceed));
        let upstream = Upstream::with_script(move |connection| {
            while let Some(received) = connection.read_head() {
                if received.target == "/large" {
                    // The upload waits for the signal of the test.
                    proceed.lock().unwrap().recv().unwrap();
                    let body = connection.read_body(&received).unwrap();
                    assert_eq!(body.len(), LARGE_BYTES);
                    assert!(body.iter().enumerate().all(|(position, sent)| *sent == byte_at(position)));
                }
                connection.reply(200, &[], b"");
            }
        });
        let (process, idle_kb) = spawn(&upstream);
        let mut client = process.client();
        if chunked {
            client.send(format!("POST /large HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"));
            // One chunk, which the gateway splits.
            client.send(format!("{LARGE_BYTES:x}\r\n"));
        } else {
            client.send(format!("POST /large HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {LARGE_BYTES}\r\n\r\n"));
        }
        let sent = send_until_stalled(&mut client.stream, 0);
        assert!(sent < IN_FLIGHT_BYTES, "{sent} bytes were accepted while the receiver does not read");
        go.send(()).unwrap();
        send_rest(&mut client.stream, sent);
        if chunked {
            client.send("\r\n0\r\n\r\n");
        }
        client.read_response().expect(200);
        let grown_kb = process.memory_kb("VmHWM") - idle_kb;
        assert!(grown_kb < MEMORY_KB, "{grown_kb} kB more than idle");
    }
}

#[test]
fn idle_connections_take_little_memory() {
    let upstream = Upstream::always(200);
    let (process, idle_kb) = spawn(&upstream);
    let mut clients: Vec<_> = (0..500).map(|_| process.client()).collect();
    for client in &mut clients {
        client.get("/a").expect(200);
    }
    let each_kb = (process.memory_kb("VmHWM") - idle_kb) as f64 / 500.0;
    assert!(each_kb < 40.0, "{each_kb} kB per connection");
    for client in &mut clients {
        client.stream.set_nonblocking(true).unwrap();
        assert_eq!(client.stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}
