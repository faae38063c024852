//! Requests that wait while no server of their upstream is reachable (`hold`), and restarts of a single server.
//!
//! `make restarts` restarts the server more often, and prints the result.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use super::access_log::wait_for_lines;
use crate::support::client::{Client, request};
use crate::support::external_servers::{self, RestartableServer, program};
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, forward_to};

const RESTARTS: usize = 3;
const CLIENTS: usize = 8;
/// Between two requests of a client: 500 requests a second together.
const PAUSE: Duration = Duration::from_millis(16);

/// One worker, and a rule that admits four requests.
fn toml(server: &Upstream, settings: &str) -> String {
    let limits = "[rules.r]\nkey = \"ip\"\nwindows = [\"4/366d\"]\n";
    let rules = "rules = [\"r\"]\n";
    format!("workers = 1\n{limits}{}{rules}", forward_to(&[server.address], settings))
}

fn held(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_held_requests", &[("upstream", "u")])
}

fn send(gateway: &Gateway, method: &str, target: &str, body: &[u8]) -> Client {
    let mut client = gateway.client();
    client.send(request(method, target, &[], body));
    client
}

#[test]
fn requests_wait_in_order_until_a_server_is_back() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let down = Upstream::refusing_connections();
    let log = format!("[access_log]\nfile = \"{}\"\n", file.display());
    let gateway = Gateway::start(&format!("{}{log}", toml(&down, "hold = \"30s\"\nmax_held = 3")));
    let mut clients = Vec::new();
    for (count, (method, target)) in [("GET", "/0"), ("POST", "/1"), ("GET", "/left"), ("GET", "/2")].iter().enumerate()
    {
        clients.push(send(&gateway, method, target, if *method == "POST" { b"body" } else { b"" }));
        eventually("the request waits", || held(&gateway) == count.min(2) as u64 + 1);
        if *target == "/left" {
            // The queue is full. A client that leaves frees its place.
            let full = gateway.get("/3").expect(503);
            assert_eq!(full.field("retry-after"), Some("30"));
            drop(clients.pop());
            eventually("the client has left", || held(&gateway) == 2);
        }
    }
    let state = Client::connect(gateway.admin).get("/upstreams").expect(200).json();
    assert_eq!(state["upstreams"][0]["held"], 3);
    let question = br#"{"url": "http://gateway.test/a", "client": "192.0.2.1"}"#;
    let explained = Client::connect(gateway.admin).post("/v1/explain", question).expect(200).json();
    assert_eq!(explained["route"]["hold"], serde_json::json!({ "limit_ms": 30_000, "max_held": 3, "held": 3 }));
    let server =
        down.listen(|connection| while connection.read_request().is_some() && connection.reply(200, &[], b"fine\n") {});
    clients.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
    let received = server.received();
    // Threads read from the connections in any order.
    let first = received.iter().find(|request| request.connection == 0);
    assert_eq!(first.unwrap().target, "/0", "the first has the first connection");
    let mut sent: Vec<(&str, &[u8])> = received.iter().map(|request| (&*request.target, &*request.body)).collect();
    sent.sort_unstable();
    assert_eq!(sent, [("/0", &b""[..]), ("/1", b"body"), ("/2", b"")]);
    assert_eq!(held(&gateway), 0);
    drop(clients);
    let lines = wait_for_lines(&file, 5);
    let waited = |path: &str| lines.iter().find(|line| line["path"] == path).unwrap()["held_ms"].as_f64();
    assert!(waited("/0") > waited("/2") && waited("/2") > Some(0.0), "{lines:#?}");
    // The refused request was not charged, and the one whose client left was.
    assert_eq!(gateway.get("/3").expect(429).status, 429);
}

#[test]
fn a_request_that_gets_no_server_is_503_and_costs_nothing() {
    let down = Upstream::refusing_connections();
    let gateway = Gateway::start(&toml(&down, "hold = \"100ms\""));
    for _ in 0..6 {
        let response = gateway.get("/a").expect(503);
        assert_eq!(response.field("retry-after"), Some("1"));
        assert!(response.field("ratelimit").is_some_and(|field| field.contains("r=4")), "{response:?}");
        assert_eq!(response.problem()["detail"], "no upstream server can be reached at the moment");
    }
    let count = |name: &str, labels: &[(&str, &str)]| gateway.metrics().sum(name, labels);
    assert_eq!(count("transom_request_errors_total", &[("error", "unreachable")]), 6);
    assert_eq!(count("transom_upstream_refused_total", &[("limit", "hold")]), 6);
    // Attempts while a request waits are not attempts of the request.
    assert_eq!(count("transom_upstream_requests_total", &[]), 6);
}

/// The list is empty at first, and later has a server that is not reachable. `max_requests` counts requests at servers only.
#[test]
fn requests_that_wait_go_on_with_other_servers() {
    let (dead, live) = (Upstream::refusing_connections(), Upstream::always(200));
    let scratch = TempDir::new();
    let (list, log) = (scratch.path().join("servers.toml"), scratch.path().join("access.log"));
    let toml = format!(
        "workers = 1\n[access_log]\nfile = \"{}\"\n[upstreams.u]\nservers_file = \"{}\"\nhold = \"30s\"\nmax_requests = 1\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        log.display(),
        list.display(),
    );
    let set = |servers: &[&Upstream]| {
        let urls: Vec<String> = servers.iter().map(|server| format!("\"http://{}\"", server.address)).collect();
        fs::write(&list, format!("servers = [{}]\n", urls.join(", "))).unwrap();
    };
    set(&[]);
    let mut gateway = Gateway::start(&toml);
    let mut clients = vec![send(&gateway, "GET", "/0", b"")];
    eventually("the request waits", || held(&gateway) == 1);
    set(&[&dead]);
    gateway.reload(&toml);
    clients.push(send(&gateway, "POST", "/1", b"body"));
    eventually("the requests wait", || held(&gateway) == 2);
    set(&[&dead, &live]);
    gateway.reload(&toml);
    clients.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
    assert_eq!((held(&gateway), live.received()[0].target.as_str()), (0, "/0"));
    let url = format!("http://{}", live.address);
    let lines = wait_for_lines(&log, 2);
    assert!(lines.iter().all(|line| line["server"] == url), "{lines:#?}");
}

/// A server that drops the packets of clients, as a machine that is off: its queue of connections is full.
#[test]
fn a_server_that_is_silent_does_not_delay_the_next_one() {
    let silent = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    silent.listen(0).unwrap();
    let silent_address = silent.local_addr().unwrap().as_socket().unwrap();
    let _queued = TcpStream::connect(silent_address).unwrap();
    let live = Upstream::always(200);
    let scratch = TempDir::new();
    let list = scratch.path().join("servers.toml");
    fs::write(&list, "servers = []\n").unwrap();
    // Shorter than `timeouts.connect`.
    let toml = format!(
        "workers = 1\n[upstreams.u]\nservers_file = \"{}\"\nhold = \"4s\"\nmax_requests = 3\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        list.display(),
    );
    let mut gateway = Gateway::start(&toml);
    let mut clients: Vec<Client> = (0..3).map(|_| send(&gateway, "GET", "/a", b"")).collect();
    eventually("the requests wait", || held(&gateway) == 3);
    // The back-up server is tried after the other.
    let backup = format!("{{ url = \"http://{}\", backup = true }}", live.address);
    fs::write(&list, format!("servers = [\"http://{silent_address}\", {backup}]\n")).unwrap();
    gateway.reload(&toml);
    clients.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
}

/// The end of the connection does not arrive while the buffer of the socket is full.
#[test]
fn a_client_that_leaves_with_a_large_body_frees_its_place() {
    let down = Upstream::refusing_connections();
    let gateway = Gateway::start(&toml(&down, "hold = \"60s\""));
    let client = send(&gateway, "POST", "/a", &[b'x'; 200_000]);
    eventually("the request waits", || held(&gateway) == 1);
    drop(client);
    eventually("the client has left", || held(&gateway) == 0);
    // The body of a client that stays is whole.
    let body = vec![b'y'; 1_000_000];
    let mut client = send(&gateway, "POST", "/b", &body);
    eventually("the request waits", || held(&gateway) == 1);
    let server =
        down.listen(|connection| while connection.read_request().is_some() && connection.reply(200, &[], b"") {});
    client.read_response().expect(200);
    assert_eq!(server.received()[0].body.len(), body.len());
}

/// Requests that the retry budget does not pay for wait for their next attempt, and do not count in `max_requests` meanwhile.
#[test]
fn a_request_that_was_cut_off_waits_without_a_retry_budget() {
    let server = Upstream::with_script(|connection| {
        while let Some(request) = connection.read_request() {
            if connection.number < 2 {
                return;
            }
            connection.reply(200, &[], request.target.as_bytes());
        }
    });
    let gateway = Gateway::start(&toml(
        &server,
        "hold = \"5s\"\nmax_requests = 1\nretries = { budget = \"0%\", budget_min = 0 }",
    ));
    gateway.get("/a").expect(200);
    assert_eq!(gateway.metrics().sum("transom_upstream_retries_total", &[("outcome", "over_budget")]), 2);
}

#[test]
fn a_request_whose_time_ends_while_it_waits_costs_nothing() {
    let down = Upstream::refusing_connections();
    let timeouts = "[timeouts]\nrequest = \"50ms\"\n";
    let gateway = Gateway::start(&format!("{}{timeouts}", toml(&down, "hold = \"30s\"")));
    for _ in 0..6 {
        let response = gateway.get("/a").expect(504);
        assert!(response.field("ratelimit").is_some_and(|field| field.contains("r=4")), "{response:?}");
    }
}

/// An nginx that is killed or stopped.
fn nginx(home: &Path, address: SocketAddr) -> Command {
    let settings = "location / { return 200 fine; }";
    fs::create_dir_all(home.join("files")).unwrap();
    let config = external_servers::nginx_config(&home.display().to_string(), address, "", settings);
    let file = home.join("nginx.conf");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(program("nginx"));
    command.args(["-e", "stderr", "-p"]).arg(home).arg("-c").arg(file);
    command
}

#[test]
fn restarts_of_a_single_server_lose_no_request() {
    let restarts = std::env::var("TRANSOM_RESTARTS").map_or(RESTARTS, |restarts| restarts.parse().unwrap());
    let mut server = RestartableServer::start(nginx);
    let gateway = Gateway::start(&format!("workers = 2\n{}", forward_to(&[server.address], "hold = \"10s\"")));
    let (stop, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let sent = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (mut client, stop) = (gateway.client(), Arc::clone(&stop));
            let (sent, lost) = (Arc::clone(&sent), Arc::clone(&lost));
            thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let response = client.get("/a");
                    if response.status != 200 {
                        println!("{response:?}");
                        lost.fetch_add(1, Ordering::SeqCst);
                    }
                    sent.fetch_add(1, Ordering::SeqCst);
                    thread::sleep(PAUSE);
                }
            })
        })
        .collect();
    for restart in 0..restarts {
        let before = sent.load(Ordering::SeqCst);
        eventually("requests are answered", || sent.load(Ordering::SeqCst) > before + 20 * CLIENTS);
        server.signal(if restart % 2 == 0 { Signal::KILL } else { Signal::TERM });
        eventually("requests wait", || held(&gateway) > 0);
        server.restart();
    }
    eventually("no request waits", || held(&gateway) == 0);
    stop.store(true, Ordering::SeqCst);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let (sent, lost) = (sent.load(Ordering::SeqCst), lost.load(Ordering::SeqCst));
    println!("{restarts} restarts, {sent} requests, {lost} lost");
    assert_eq!(lost, 0, "of {sent} requests");
}
