//! Failover between three real servers, of which one is killed, stopped and restarted under load. No client sees an error that
//! a retry could have avoided.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use rustix::process::Signal;

use crate::support::client::{Client, HOST};
use crate::support::external_servers::{self, RestartableServer, program};
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::{eventually, external_scripts, forward_to};

const CLIENTS: usize = 4;
/// Between two requests of a client, so that requests are in flight half of the time.
const PAUSE: Duration = Duration::from_micros(500);

/// A kind of server, and its client.
struct ServerKind {
    command: fn(&Path, SocketAddr) -> Command,
    /// Sends requests to an address repeatedly; `false` if one fails.
    load: fn(SocketAddr) -> Box<dyn FnMut() -> bool>,
    settings: &'static str,
}

/// The observations of the clients.
#[derive(Default)]
struct Results {
    is_stopped: AtomicBool,
    responses: AtomicUsize,
    errors: AtomicUsize,
}

/// Ends the load when dropped, also if the test fails.
struct StopOnDrop<'a>(&'a Results);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_stopped.store(true, Ordering::SeqCst);
    }
}

/// Runs the outages of one server under load. Returns the errors that clients saw, and the attempts lost after they were sent.
fn run_outages(kind: &ServerKind) -> (usize, usize) {
    let mut servers = [(); 3].map(|()| RestartableServer::start(kind.command));
    for server in &servers {
        assert!((kind.load)(server.address)(), "the server works without a gateway");
    }
    let addresses: Vec<SocketAddr> = servers.iter().map(|server| server.address).collect();
    let settings = format!(
        "ejection = {{ failures = 3, time = \"100ms\", max_time = \"400ms\" }}\n\
         retries = {{ attempts = 2, try_timeout = \"2s\", budget_min = 100 }}\n{}",
        kind.settings
    );
    let gateway = Gateway::start(&format!(
        "workers = 2\n{}[timeouts]\nresponse_head = \"3s\"\n",
        forward_to(&addresses, &settings)
    ));
    let url = format!("http://{}", addresses[1]);
    let count = |name: &str, labels: &[(&str, &str)]| gateway.metrics().sum(name, labels);
    let ejected = |wanted: u64| {
        eventually("the ejection begins or ends", || {
            count("transom_upstream_server_ejected", &[("server", &url)]) == wanted
        });
    };
    let serves = || {
        let answered = || count("transom_upstream_requests_total", &[("server", &url), ("outcome", "responded")]);
        let before = answered();
        eventually("the server responds", || answered() > before + 10);
    };
    let results = Results::default();
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut send = (kind.load)(gateway.http);
                while !results.is_stopped.load(Ordering::SeqCst) {
                    let outcome = if send() { &results.responses } else { &results.errors };
                    outcome.fetch_add(1, Ordering::SeqCst);
                    thread::sleep(PAUSE);
                }
            });
        }
        let end = StopOnDrop(&results);
        serves();
        servers[1].signal(Signal::KILL);
        ejected(1);
        servers[1].restart();
        ejected(0);
        serves();
        servers[1].signal(Signal::STOP);
        ejected(1);
        // The other servers get all requests.
        let before = results.responses.load(Ordering::SeqCst);
        eventually("the other servers respond", || results.responses.load(Ordering::SeqCst) > before + 20);
        servers[1].signal(Signal::CONT);
        ejected(0);
        serves();
        drop(end);
    });
    assert_eq!(count("transom_upstream_retries_total", &[("outcome", "over_budget")]), 0);
    assert!(count("transom_upstream_ejections_total", &[("server", &url)]) >= 2);
    let lost = |outcome| count("transom_upstream_requests_total", &[("server", &url), ("outcome", outcome)]);
    (results.errors.load(Ordering::SeqCst), (lost("failed") + lost("timed_out")) as usize)
}

fn get_repeatedly(address: SocketAddr, target: &'static str) -> Box<dyn FnMut() -> bool> {
    let mut client = Client::connect(address);
    Box::new(move || client.get(target).status == 200)
}

#[test]
fn failover_between_nginx_servers_is_invisible() {
    let command = |home: &Path, address: SocketAddr| {
        let _ = fs::create_dir(home.join("files"));
        fs::write(home.join("files/a.txt"), "small\n").unwrap();
        let config = home.join("nginx.conf");
        fs::write(&config, external_servers::nginx_config(&home.display().to_string(), address, "", "")).unwrap();
        let mut command = Command::new(program("nginx"));
        command.args(["-e", "stderr", "-p"]).arg(home).arg("-c").arg(config);
        command
    };
    let (errors, lost) =
        run_outages(&ServerKind { command, load: |address| get_repeatedly(address, "/a.txt"), settings: "" });
    assert_eq!(errors, 0, "{lost} attempts were retried");
}

#[test]
fn failover_between_httpbin_servers_is_invisible() {
    let command = |home: &Path, address: SocketAddr| external_servers::gunicorn(home, &address.to_string());
    // A response of one piece: a response aborted after its head cannot be retried.
    let (errors, lost) =
        run_outages(&ServerKind { command, load: |address| get_repeatedly(address, "/status/200"), settings: "" });
    assert_eq!(errors, 0, "{lost} attempts were retried");
}

/// A script of tests/external at an address.
fn script(name: &str, address: SocketAddr) -> Command {
    external_scripts::python(name, &["--port".to_owned(), address.port().to_string()])
}

#[test]
fn failover_between_websocket_servers_is_invisible_to_new_connections() {
    const HANDSHAKE: [(&str, &str); 4] = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let load = |address: SocketAddr| -> Box<dyn FnMut() -> bool> {
        Box::new(move || {
            let mut client = Client::connect(address);
            client.send(crate::support::client::request("GET", "/echo", &HANDSHAKE, b""));
            client.read_head().is_some_and(|response| response.status == 101)
        })
    };
    let command = |_: &Path, address: SocketAddr| script("websocket_server.py", address);
    let (errors, lost) = run_outages(&ServerKind { command, load, settings: "" });
    assert_eq!(errors, 0, "{lost} attempts were retried");
}

/// A gRPC call is a POST, which is not retried once it was sent. Only such a call may fail.
#[test]
fn failover_between_grpc_servers_is_invisible() {
    /// Responses that were lost after their head.
    static BROKEN: AtomicUsize = AtomicUsize::new(0);
    let load = |address: SocketAddr| -> Box<dyn FnMut() -> bool> {
        let mut client = Http2Client::connect(address);
        Box::new(move || {
            let call = Request::post(format!("http://{HOST}/tests.Calls/Echo"));
            let call = call.header("content-type", "application/grpc").header("te", "trailers");
            let body = Full::new(Bytes::from_static(&[0; 5])).map_err(|never| match never {}).boxed();
            let Some(response) = client.try_send(call.body(body).unwrap()) else {
                BROKEN.fetch_add(1, Ordering::SeqCst);
                return false;
            };
            response.trailers.iter().any(|(name, value)| name == "grpc-status" && value == "0")
        })
    };
    let command = |_: &Path, address: SocketAddr| script("grpc_server.py", address);
    let (errors, lost) = run_outages(&ServerKind { command, load, settings: "protocol = \"http2\"\n" });
    let lost = lost + BROKEN.load(Ordering::SeqCst);
    assert!(errors <= lost, "{errors} errors, {lost} lost attempts");
}
