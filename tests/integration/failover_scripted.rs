//! Servers that fail and return while another server works: no request is lost.
//!
//! `make failover` runs these tests with 2,000 requests a second for ten minutes, with the default settings.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::redis::free_port;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, forward_to};

/// A free address, on which a server can be started repeatedly.
fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

fn always(status: u16) -> impl Fn(&mut Connection) + Send + Sync + 'static {
    move |connection| while connection.read_request().is_some() && connection.reply(status, &[], b"fine\n") {}
}

fn start_server(address: SocketAddr) -> Upstream {
    Upstream::at_address(address, always(200))
}

fn is_ejected(gateway: &Gateway, server: SocketAddr) -> bool {
    let url = format!("http://{server}");
    gateway.metrics().sum("transom_upstream_server_ejected", &[("upstream", "u"), ("server", &url)]) == 1
}

fn retries(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_upstream_retries_total", &[("upstream", "u"), ("outcome", outcome)])
}

/// Sends GET requests, each of which must succeed.
fn send_requests(gateway: &Gateway, times: usize) {
    let mut client = gateway.client();
    (0..times).for_each(|_| drop(client.get("/a").expect(200)));
}

/// With one worker, so that there is one connection pool and one retry budget.
fn gateway(servers: &[SocketAddr], settings: &str) -> Gateway {
    Gateway::start(&format!("workers = 1\n{}", forward_to(servers, settings)))
}

#[test]
fn two_servers_failing_in_turn_lose_no_request() {
    let [a, b] = [free_address(), free_address()];
    let (first, second) = (start_server(a), start_server(b));
    // No ejection ends by itself, and the budget is one try.
    let settings = "ejection = { time = \"1h\", max_time = \"1h\" }\nretries = { budget = 0, budget_min = 1 }";
    let gateway = gateway(&[a, b], settings);
    send_requests(&gateway, 50);
    drop(first);
    send_requests(&gateway, 100);
    assert!(is_ejected(&gateway, a));
    let first = start_server(a);
    send_requests(&gateway, 100);
    assert!(is_ejected(&gateway, a), "no request was sent to the server");
    drop(second);
    // Only one server may be ejected. The first server responds to a retry, so the second is ejected.
    send_requests(&gateway, 500);
    assert_eq!((is_ejected(&gateway, a), is_ejected(&gateway, b)), (false, true));
    assert!(first.received().len() >= 500);
    assert_eq!(retries(&gateway, "over_budget"), 0);
}

#[test]
fn connect_failures_with_another_server_available_do_not_use_the_retry_budget() {
    let servers = [Upstream::refusing_connections(), Upstream::always(200)];
    let addresses = servers.each_ref().map(|server| server.address);
    let settings = "balance = \"round-robin\"\nejection = false\nretries = { budget = 0, budget_min = 0 }";
    let gateway = gateway(&addresses, settings);
    send_requests(&gateway, 100);
    assert_eq!((retries(&gateway, "retried"), retries(&gateway, "over_budget")), (50, 0));
    // A POST as well: nothing of it was sent.
    let mut client = gateway.client();
    (0..10).for_each(|_| drop(client.post("/a", "body").expect(200)));
}

#[test]
fn connect_failures_use_the_retry_budget_if_no_server_works() {
    let servers =
        [Upstream::refusing_connections(), Upstream::refusing_connections(), Upstream::refusing_connections()];
    let addresses = servers.each_ref().map(|server| server.address);
    let settings = "ejection = false\nretries = { attempts = 2, budget = 0, budget_min = 0 }";
    let gateway = gateway(&addresses, settings);
    let mut client = gateway.client();
    (0..20).for_each(|_| drop(client.get("/a").expect(502)));
    // The first request is tried at both servers that have not failed yet; then none is known to work.
    assert_eq!((retries(&gateway, "retried"), retries(&gateway, "over_budget")), (2, 19));
}

#[test]
fn a_passed_health_check_ends_an_ejection() {
    let bad = Upstream::responding(|request| {
        crate::support::upstream::reply(if request.target == "/healthz" { 200 } else { 503 }, &[], b"")
    });
    let good = Upstream::always(200);
    let settings = "balance = \"round-robin\"\nejection = { failures = 2, statuses = [503], time = \"1h\" }\n\
                    health = { path = \"/healthz\", interval = \"500ms\" }\n";
    let gateway = gateway(&[bad.address, good.address], settings);
    let ejections = || gateway.metrics().sum("transom_upstream_ejections_total", &[]);
    let mut client = gateway.client();
    eventually("the server is ejected", || {
        client.get("/a");
        ejections() == 1
    });
    eventually("the ejection has ended", || !is_ejected(&gateway, bad.address));
}

#[test]
fn an_ejected_server_is_preferred_to_an_unhealthy_one() {
    let status = |healthz: u16, others: fn(usize) -> u16| {
        let received = AtomicU64::new(0);
        Upstream::responding(move |request| {
            let status = match request.target.as_str() {
                "/healthz" => healthz,
                _ => others(received.fetch_add(1, Ordering::SeqCst) as usize),
            };
            crate::support::upstream::reply(status, &[], b"")
        })
    };
    // The first passes its check and fails its first two requests; the second fails its only check.
    let (ejected, down) = (status(200, |received| if received < 2 { 503 } else { 200 }), status(500, |_| 200));
    let settings = "balance = \"round-robin\"\nejection = { failures = 2, statuses = [503], time = \"1h\" }\n\
                    health = { path = \"/healthz\", interval = \"1h\" }\n";
    let gateway = gateway(&[ejected.address, down.address], settings);
    let checks = |outcome| gateway.metrics().sum("transom_upstream_health_checks_total", &[("outcome", outcome)]);
    eventually("both servers are checked", || (checks("passed"), checks("failed")) == (1, 1));
    let mut client = gateway.client();
    (0..2).for_each(|_| drop(client.get("/a").expect(503)));
    assert!(is_ejected(&gateway, ejected.address));
    (0..10).for_each(|_| drop(client.get("/a").expect(200)));
    assert_eq!(down.received().iter().filter(|request| request.target == "/a").count(), 0);
}

#[test]
fn a_failing_server_that_cannot_be_ejected_does_not_hide_an_ejected_one() {
    // Failure responses are not retried here, so only the choice of a server can show that the first works again.
    let servers = [AtomicU64::new(503), AtomicU64::new(200)].map(|status| {
        let status = std::sync::Arc::new(status);
        let server = Upstream::responding({
            let status = std::sync::Arc::clone(&status);
            move |_| crate::support::upstream::reply(status.load(Ordering::SeqCst) as u16, &[], b"")
        });
        (server, status)
    });
    let [(a, a_status), (b, b_status)] = &servers;
    let settings = "balance = \"round-robin\"\nejection = { failures = 2, statuses = [503], time = \"1h\" }\n";
    let gateway = gateway(&[a.address, b.address], settings);
    let mut client = gateway.client();
    let mut failed = |times: usize| (0..times).filter(|_| client.get("/a").status == 503).count();
    assert_eq!(failed(10), 2);
    assert!(is_ejected(&gateway, a.address));
    a_status.store(200, Ordering::SeqCst);
    b_status.store(503, Ordering::SeqCst);
    // Two failures of the second, one more while both are used in turn, and one that ejects it when the first is back.
    assert!(failed(20) <= 4);
    assert_eq!((is_ejected(&gateway, a.address), is_ejected(&gateway, b.address)), (false, true));
    assert_eq!(failed(10), 0);
}

#[test]
fn servers_that_fail_most_requests_are_not_ejected_repeatedly() {
    let failing = || {
        let received = AtomicU64::new(0);
        Upstream::responding(move |_| {
            let is_fine = received.fetch_add(1, Ordering::SeqCst) % 4 == 3;
            crate::support::upstream::reply(if is_fine { 200 } else { 503 }, &[], b"")
        })
    };
    let servers = [failing(), failing()];
    let settings = "balance = \"round-robin\"\nejection = { failures = 3, statuses = [503], time = \"1h\" }\n";
    let gateway = gateway(&servers.each_ref().map(|server| server.address), settings);
    let mut client = gateway.client();
    (0..400).for_each(|_| drop(client.get("/a")));
    // A response ends the first ejection of each server, and no later one.
    let ejections = gateway.metrics().sum("transom_upstream_ejections_total", &[]);
    assert!((1..=3).contains(&ejections), "{ejections}");
}

/// The responses to the load.
#[derive(Default)]
struct LoadResults {
    fine: AtomicU64,
    lost: AtomicU64,
}

const CLIENTS: u32 = 16;
/// Requests per second of all clients together, at most.
const RATE: u32 = 2000;

/// Sends requests at a steady rate during an action, and returns the number of 200 and of other responses.
fn under_load(gateway: &Process, act: impl FnOnce()) -> (u64, u64) {
    let (responses, is_over) = (LoadResults::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut client = Client::connect(gateway.http);
                let mut next = Instant::now();
                while !is_over.load(Ordering::SeqCst) {
                    let is_fine = client.get("/a").status == 200;
                    (if is_fine { &responses.fine } else { &responses.lost }).fetch_add(1, Ordering::SeqCst);
                    // A client that is behind does not catch up.
                    next = (next + Duration::from_secs(1) * CLIENTS / RATE).max(Instant::now());
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            });
        }
        // Ends the load also if `act` panics.
        struct StopOnDrop<'a>(&'a AtomicBool);
        impl Drop for StopOnDrop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let _stop = StopOnDrop(&is_over);
        act();
    });
    (responses.fine.into_inner(), responses.lost.into_inner())
}

/// A server in its own process.
fn server(address: SocketAddr) -> Process {
    Process::spawn(&format!(
        "listen = {{ http = \"{address}\", admin = \"127.0.0.1:0\" }}\nworkers = 1\n[upstreams.e]\nbuiltin = \"echo\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"e\"\n"
    ))
}

/// Kills a server, and starts it again after a while.
fn restart_after(process: &mut Process, address: SocketAddr, down: Duration) {
    process.signal("KILL");
    process.wait();
    thread::sleep(down);
    *process = server(address);
}

/// The duration of the test with repeated kills, and the factor by which all times are shorter than in the long run.
fn duration_and_factor() -> (Duration, u32) {
    match std::env::var("TRANSOM_FAILOVER_S") {
        Ok(text) => (Duration::from_secs(text.parse().expect("`TRANSOM_FAILOVER_S` is a number")), 1),
        Err(_) => (Duration::from_secs(5), 30),
    }
}

/// The gateway in front of two servers, with the default settings, but for shorter times.
fn gateway_process(addresses: &[SocketAddr], factor: u32) -> Process {
    let ms = |seconds: u32| seconds * 1000 / factor;
    let ejection = format!("ejection = {{ time = \"{}ms\", max_time = \"{}ms\" }}", ms(10), ms(300));
    Process::spawn(&format!("workers = 2\n{}", forward_to(addresses, &ejection)))
}

#[test]
fn short_outages_of_two_servers_lose_no_request_under_load() {
    let (_, factor) = duration_and_factor();
    let addresses = [free_address(), free_address()];
    let mut servers = addresses.map(server);
    let gateway = gateway_process(&addresses, factor);
    let (fine, lost) = under_load(&gateway, || {
        thread::sleep(Duration::from_secs(4) / factor);
        restart_after(&mut servers[0], addresses[0], Duration::from_millis(500) / factor);
        thread::sleep(Duration::from_secs(4) / factor);
        restart_after(&mut servers[1], addresses[1], Duration::from_secs(2) / factor);
        thread::sleep(Duration::from_secs(4) / factor);
    });
    println!("each of two servers down once: {} requests, {lost} lost", fine + lost);
    assert_eq!(lost, 0, "of {}", fine + lost);
}

#[test]
fn repeatedly_killed_servers_lose_no_request_under_load() {
    let (length, factor) = duration_and_factor();
    let addresses = [free_address(), free_address()];
    let mut servers = addresses.map(server);
    let gateway = gateway_process(&addresses, factor);
    let mut rng = Rng::with_seed(24);
    let mut kills = 0;
    let (fine, lost) = under_load(&gateway, || {
        let start = Instant::now();
        while start.elapsed() < length {
            let next = start + Duration::from_secs(30) * (kills + 1) / factor;
            let victim = rng.usize(..2);
            restart_after(&mut servers[victim], addresses[victim], Duration::from_secs(4).mul_f64(rng.f64()) / factor);
            kills += 1;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    });
    println!("one of two servers killed {kills} times: {} requests, {lost} lost", fine + lost);
    assert_eq!(lost, 0, "of {}, with {kills} kills", fine + lost);
}
