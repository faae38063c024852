//! Requests beyond the limits of an upstream are refused at once, or wait in a bounded queue.

use std::collections::HashSet;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, forward_to, within};

/// An upstream that holds each request until the test releases it.
struct HoldingUpstream {
    upstream: Upstream,
    /// `None` when requests are no longer held.
    waiting: Arc<Mutex<Option<Vec<Sender<()>>>>>,
    /// Connections that have ended.
    ended: Arc<AtomicUsize>,
}

impl HoldingUpstream {
    fn new() -> HoldingUpstream {
        let waiting = Arc::new(Mutex::new(Some(Vec::new())));
        let ended = Arc::new(AtomicUsize::new(0));
        let upstream = Upstream::with_script({
            let (waiting, ended) = (Arc::clone(&waiting), Arc::clone(&ended));
            move |connection| {
                while connection.read_request().is_some() {
                    let (release, released) = channel::<()>();
                    waiting.lock().unwrap().as_mut().map_or_else(Default::default, |waiting| waiting.push(release));
                    let _ = released.recv();
                    connection.reply(200, &[], b"held\n");
                }
                ended.fetch_add(1, Ordering::SeqCst);
            }
        });
        HoldingUpstream { upstream, waiting, ended }
    }

    fn wait_for_requests(&self, count: usize) {
        eventually("requests arrive", || {
            self.waiting.lock().unwrap().as_ref().is_some_and(|waiting| waiting.len() == count)
        });
    }

    /// Releases all held requests.
    fn release(&self) {
        self.waiting.lock().unwrap().iter_mut().for_each(Vec::clear);
    }
}

impl Drop for HoldingUpstream {
    fn drop(&mut self) {
        *self.waiting.lock().unwrap() = None;
    }
}

fn send_request(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    client.send(request("GET", "/a", &[], b""));
    client
}

fn refused_count(gateway: &Gateway, limit: &str) -> u64 {
    gateway.metrics().sum("transom_upstream_refused_total", &[("upstream", "u"), ("limit", limit)])
}

#[test]
fn a_request_beyond_max_requests_is_503_at_once() {
    let held = HoldingUpstream::new();
    let gateway = Gateway::start(&forward_to(&[held.upstream.address], "max_requests = 2"));
    let mut first = [send_request(&gateway), send_request(&gateway)];
    held.wait_for_requests(2);
    let problem = gateway.get("/a").expect(503).problem();
    assert_eq!(problem["detail"], "the upstream has too many requests at the moment");
    assert_eq!(refused_count(&gateway, "max_requests"), 1);
    held.release();
    first.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
    // A client that disconnects frees capacity as well.
    let leaving = [send_request(&gateway), send_request(&gateway)];
    held.wait_for_requests(2);
    gateway.get("/a").expect(503);
    drop(leaving);
    eventually("no request is in flight", || {
        gateway.metrics().sum("transom_upstream_requests_active", &[("upstream", "u")]) == 0
    });
    held.release();
    let mut client = send_request(&gateway);
    held.wait_for_requests(1);
    held.release();
    client.read_response().expect(200);
}

#[test]
fn a_request_without_a_connection_waits_in_order() {
    let held = HoldingUpstream::new();
    let settings = "max_connections = 1\nmax_pending = 2";
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[held.upstream.address], settings)));
    let mut first = send_request(&gateway);
    held.wait_for_requests(1);
    let mut waiting_clients = [send_request(&gateway), send_request(&gateway)];
    eventually("two requests wait", || {
        let state = Client::connect(gateway.admin).get("/upstreams").expect(200).json();
        state["upstreams"][0]["pending"] == 2
    });
    gateway.get("/a").expect(503).problem();
    assert_eq!(refused_count(&gateway, "max_pending"), 1);
    for client in std::iter::once(&mut first).chain(&mut waiting_clients) {
        held.wait_for_requests(1);
        held.release();
        client.read_response().expect(200);
    }
    assert_eq!((held.upstream.connections(), held.upstream.received().len()), (1, 3));
}

#[test]
fn a_closed_connection_frees_capacity_for_a_waiter() {
    let held = HoldingUpstream::new();
    let settings = "max_connections = 1";
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[held.upstream.address], settings)));
    let first = send_request(&gateway);
    held.wait_for_requests(1);
    let mut second = send_request(&gateway);
    eventually("the second request waits", || {
        let state = Client::connect(gateway.admin).get("/upstreams").expect(200).json();
        state["upstreams"][0]["pending"] == 1
    });
    // A cancelled request closes its connection.
    drop(first);
    held.wait_for_requests(2);
    held.release();
    second.read_response().expect(200);
    assert_eq!(held.upstream.connections(), 2);
}

#[test]
fn the_wait_for_a_connection_is_bounded() {
    let held = HoldingUpstream::new();
    let toml = forward_to(&[held.upstream.address], "max_connections = 1");
    let gateway = Gateway::start(&format!("workers = 1\n{toml}\n[timeouts]\nconnect = \"500ms\"\n"));
    let mut first = send_request(&gateway);
    held.wait_for_requests(1);
    within(Duration::from_millis(500), || gateway.get("/a").expect(503).problem());
    assert_eq!(refused_count(&gateway, "connect"), 1);
    held.release();
    first.read_response().expect(200);
}

/// Sends one concurrent request of each client, and lets the server respond.
fn run_round(held: &HoldingUpstream, clients: &mut [Client]) {
    run_round_to("/a", held, clients);
}

fn run_round_to(path: &str, held: &HoldingUpstream, clients: &mut [Client]) {
    for client in clients.iter_mut() {
        client.send(request("GET", path, &[], b""));
    }
    held.wait_for_requests(clients.len());
    held.release();
    clients.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
}

#[test]
fn idle_connections_are_kept_for_the_next_requests() {
    let held = HoldingUpstream::new();
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[held.upstream.address], "")));
    let mut clients: Vec<Client> = (0..300).map(|_| gateway.client()).collect();
    (0..3).for_each(|_| run_round(&held, &mut clients));
    assert_eq!(held.upstream.connections(), 300);
}

#[test]
fn idle_connections_are_limited_as_configured() {
    for (idle_limit, opened) in [(10, 30 + 20 + 20), (0, 90)] {
        let held = HoldingUpstream::new();
        let settings = format!("max_idle_connections = {idle_limit}");
        let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[held.upstream.address], &settings)));
        let mut clients: Vec<Client> = (0..30).map(|_| gateway.client()).collect();
        (0..3).for_each(|_| run_round(&held, &mut clients));
        assert_eq!(held.upstream.connections(), opened, "{idle_limit} kept");
    }
}

#[test]
fn surplus_idle_connections_are_closed_by_age() {
    let toml = |held: &HoldingUpstream, timeouts| {
        format!("workers = 1\n{}{timeouts}", forward_to(&[held.upstream.address], ""))
    };
    let held = HoldingUpstream::new();
    let gateway = Gateway::start(&toml(&held, ""));
    let mut clients: Vec<Client> = (0..10).map(|_| gateway.client()).collect();
    run_round(&held, &mut clients);
    (0..20).for_each(|_| run_round(&held, &mut clients[..1]));
    let used: HashSet<usize> = held.upstream.received()[10..].iter().map(|request| request.connection).collect();
    assert_eq!(used.len(), 1);
    let held = HoldingUpstream::new();
    let gateway = Gateway::start(&toml(&held, "[timeouts]\nupstream_idle = \"100ms\"\n"));
    let mut clients: Vec<Client> = (0..10).map(|_| gateway.client()).collect();
    run_round(&held, &mut clients);
    // The gateway checks idle connections every five seconds.
    eventually("all connections are closed", || held.ended.load(Ordering::SeqCst) == 10);
}

#[test]
fn idle_connections_leave_descriptors_for_other_upstreams() {
    let upstreams: Vec<HoldingUpstream> = (0..4).map(|_| HoldingUpstream::new()).collect();
    let routes = upstreams.iter().enumerate().map(|(n, held)| {
        let address = held.upstream.address;
        format!(
            "[upstreams.u{n}]\nservers = [\"http://{address}\"]\n[[routes]]\npath = \"/{n}\"\nupstream = \"u{n}\"\n"
        )
    });
    let toml = format!("workers = 1\n{}", routes.collect::<String>());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 240; exec \"$0\" \"$@\"", BINARY]);
    let process = Process::spawn_command(command, &toml, TempDir::new());
    let mut clients: Vec<Client> = (0..50).map(|_| process.client()).collect();
    // If all connections were kept, the fourth upstream would find no descriptor.
    for (n, held) in upstreams.iter().enumerate() {
        run_round_to(&format!("/{n}"), held, &mut clients);
    }
}
