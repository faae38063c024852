//! Load from several clients while a server moves. Each server responds with its number.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::eventually;
use super::process::Process;
use super::upstream::Upstream;

const CLIENTS: usize = 4;
/// Between two requests of a client.
const PAUSE: Duration = Duration::from_millis(2);

/// How often a server moves: so often, or as `make moves` says.
pub fn changes(default: usize) -> usize {
    std::env::var("TRANSOM_MOVES").map_or(default, |changes| changes.parse().unwrap())
}

/// A server that responds with its number.
pub fn numbered(address: SocketAddr, number: usize) -> Upstream {
    Upstream::at_address(address, move |connection| {
        while connection.read_request().is_some() && connection.reply(200, &[], number.to_string().as_bytes()) {}
    })
}

pub struct Load {
    stop: Arc<AtomicBool>,
    /// The server of the last response to each client.
    last: Vec<Arc<AtomicUsize>>,
    clients: Vec<JoinHandle<(usize, usize)>>,
}

impl Load {
    /// `posts`: half of the clients send requests that cannot be repeated.
    pub fn start(gateway: &Process, posts: bool) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let last: Vec<Arc<AtomicUsize>> = (0..CLIENTS).map(|_| Arc::default()).collect();
        let client = |(number, last): (usize, Arc<AtomicUsize>)| {
            let (mut client, stop) = (gateway.client(), Arc::clone(&stop));
            thread::spawn(move || {
                let (mut sent, mut lost) = (0, 0);
                while !stop.load(Ordering::SeqCst) {
                    let is_post = posts && number % 2 == 0;
                    let response = if is_post { client.post("/a", "body") } else { client.get("/a") };
                    sent += 1;
                    match response.status {
                        200 => last.store(response.text().parse().unwrap(), Ordering::SeqCst),
                        _ => lost += 1,
                    }
                    thread::sleep(PAUSE);
                }
                (sent, lost)
            })
        };
        let clients = last.iter().cloned().enumerate().map(client).collect();
        Load { stop, last, clients }
    }

    /// Waits until each client has got a response of this server, so that no request is in flight at others.
    pub fn wait_for(&self, server: usize) {
        eventually("all clients get responses of the next server", || {
            self.last.iter().all(|last| last.load(Ordering::SeqCst) == server)
        });
    }

    /// Ends the load, and asserts that no request was lost.
    pub fn finish(self, changes: usize, way: &str) {
        self.stop.store(true, Ordering::SeqCst);
        let results: Vec<(usize, usize)> = self.clients.into_iter().map(|client| client.join().unwrap()).collect();
        let (sent, lost) = results.iter().fold((0, 0), |sums, result| (sums.0 + result.0, sums.1 + result.1));
        println!("{changes} changes of the address by {way}: {sent} requests, {lost} lost");
        assert_eq!(lost, 0, "of {sent} requests, by {way}");
    }
}
