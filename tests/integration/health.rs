//! Active health checks: unhealthy servers get no requests.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::Value;

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_to};

/// A server whose health the test sets.
struct CheckedServer {
    upstream: Upstream,
    health: Arc<AtomicU16>,
}

impl CheckedServer {
    fn new() -> CheckedServer {
        let health = Arc::new(AtomicU16::new(200));
        let upstream = Upstream::with_script({
            let health = Arc::clone(&health);
            move |connection| {
                while let Some(request) = connection.read_request() {
                    let check = request.target.starts_with("/healthz");
                    connection.reply(if check { health.load(Ordering::SeqCst) } else { 200 }, &[], b"");
                }
            }
        });
        CheckedServer { upstream, health }
    }

    fn set_health_status(&self, status: u16) {
        self.health.store(status, Ordering::SeqCst);
    }

    /// The number of requests other than checks.
    fn served(&self) -> usize {
        self.upstream.received().iter().filter(|request| !request.target.starts_with("/healthz")).count()
    }

    fn is_up(&self, gateway: &Gateway) -> bool {
        let url = format!("http://{}", self.upstream.address);
        gateway.metrics().sum("transom_upstream_server_up", &[("upstream", "u"), ("server", &url)]) == 1
    }
}

const FREQUENT_CHECKS: &str =
    "health = { path = \"/healthz\", interval = \"20ms\", healthy_after = 2, unhealthy_after = 2 }\n";

fn two_servers(settings: &str) -> (CheckedServer, CheckedServer, String) {
    let (a, b) = (CheckedServer::new(), CheckedServer::new());
    let toml = forward_to(&[a.upstream.address, b.upstream.address], &format!("balance = \"round-robin\"\n{settings}"));
    (a, b, toml)
}

fn send_requests(gateway: &Gateway, times: usize) {
    let mut client = gateway.client();
    (0..times).for_each(|_| drop(client.get("/a").expect(200)));
}

fn state(gateway: &Gateway) -> Value {
    Client::connect(gateway.admin).get("/upstreams").expect(200).json()["upstreams"][0].clone()
}

#[test]
fn an_unhealthy_server_gets_no_requests() {
    let (a, b, toml) = two_servers(FREQUENT_CHECKS);
    let gateway = Gateway::start(&format!("workers = 1\n{toml}"));
    assert!(a.is_up(&gateway) && b.is_up(&gateway), "healthy until checked");
    a.set_health_status(503);
    eventually("a is down", || !a.is_up(&gateway));
    let before = (a.served(), b.served());
    send_requests(&gateway, 20);
    assert_eq!((a.served(), b.served()), (before.0, before.1 + 20));
    assert_eq!(state(&gateway)["servers"][0]["state"], "unhealthy");
    a.set_health_status(204);
    eventually("a is up", || a.is_up(&gateway));
    send_requests(&gateway, 20);
    assert_eq!((a.served(), b.served()), (before.0 + 10, before.1 + 30));
    let checks = |outcome| gateway.metrics().sum("transom_upstream_health_checks_total", &[("outcome", outcome)]);
    assert!(checks("passed") >= 2 && checks("failed") >= 1);
}

/// The state of a server is read at each check: then the checks before it are counted, and no other.
#[test]
fn a_server_changes_its_state_after_exactly_so_many_checks_in_a_row() {
    const RESULTS: [u16; 12] = [200, 503, 503, 200, 503, 503, 503, 200, 503, 200, 200, 503];
    let (admin, states) = (Arc::new(OnceLock::<SocketAddr>::new()), Arc::new(Mutex::new(Vec::new())));
    let upstream = Upstream::with_script({
        let (admin, states) = (Arc::clone(&admin), Arc::clone(&states));
        move |connection| {
            while connection.read_request().is_some() {
                let checks = states.lock().unwrap().len();
                // Later checks may come while the gateway stops.
                if let Some(status) = RESULTS.get(checks) {
                    let page = Client::connect(*admin.wait()).get("/upstreams").expect(200).json();
                    states.lock().unwrap().push(page["upstreams"][0]["servers"][0]["state"] != "unhealthy");
                    connection.reply(*status, &[], b"");
                }
            }
        }
    });
    let settings =
        "health = { path = \"/\", interval = \"20ms\", timeout = \"30s\", healthy_after = 2, unhealthy_after = 3 }\n";
    let gateway = Gateway::start(&forward_to(&[upstream.address], settings));
    admin.set(gateway.admin).unwrap();
    eventually("all checks were made", || states.lock().unwrap().len() >= RESULTS.len());
    let is_healthy = states.lock().unwrap().clone();
    let until_third_failure = [true; 7];
    let until_second_success = [false; 4];
    assert_eq!(is_healthy, [&until_third_failure[..], &until_second_success, &[true]].concat());
}

#[test]
fn if_no_server_is_healthy_all_are_used() {
    let (a, b, toml) = two_servers(FREQUENT_CHECKS);
    let gateway = Gateway::start(&format!("workers = 1\n{toml}"));
    a.set_health_status(500);
    b.set_health_status(500);
    eventually("both are down", || !a.is_up(&gateway) && !b.is_up(&gateway));
    send_requests(&gateway, 10);
    assert_eq!((a.served(), b.served()), (5, 5));
}

#[test]
fn a_health_check_sends_the_configured_request() {
    let (a, b, toml) = two_servers(
        "[upstreams.u.health]\npath = \"/healthz?deep=1\"\nmethod = \"HEAD\"\nhost = \"api.test\"\n\
                            interval = \"20ms\"\ntimeout = \"5s\"\nstatus = [204, \"300-302\"]\n",
    );
    a.set_health_status(301);
    let gateway = Gateway::start(&toml);
    // The first check decides at once: 200 is not the expected status.
    eventually("b is down", || !b.is_up(&gateway));
    eventually("a was checked", || !a.upstream.received().is_empty());
    assert!(a.is_up(&gateway));
    let check = a.upstream.received()[0].clone();
    assert_eq!((check.method.as_str(), check.target.as_str()), ("HEAD", "/healthz?deep=1"));
    assert_eq!((check.field("host"), check.field("user-agent")), (Some("api.test"), Some("transom-health-check")));
}

#[test]
fn an_unreachable_or_silent_server_is_unhealthy() {
    let (dead, fine) = (Upstream::refusing_connections(), CheckedServer::new());
    let silent = Upstream::with_script(|connection| while connection.read_request().is_some() {});
    let settings = "health = { path = \"/healthz\", interval = \"20ms\", timeout = \"3s\" }\n";
    let gateway = Gateway::start(&forward_to(&[dead.address, silent.address, fine.upstream.address], settings));
    eventually("two servers are down", || gateway.metrics().sum("transom_upstream_server_up", &[]) == 1);
    send_requests(&gateway, 20);
    assert_eq!(fine.served(), 20);
    assert_eq!(gateway.metrics().sum("transom_upstream_requests_total", &[("outcome", "connect_failed")]), 0);
}

#[test]
fn a_reload_keeps_the_health_state() {
    // With 1000 passed checks required, no server becomes healthy during the test.
    let slow = "health = { path = \"/healthz\", interval = \"20ms\", healthy_after = 1000, unhealthy_after = 2 }\n";
    let (a, b, toml) = two_servers(slow);
    let mut gateway = Gateway::start(&toml);
    a.set_health_status(503);
    eventually("a is down", || !a.is_up(&gateway));
    a.set_health_status(200);
    let served = a.served();
    gateway.reload(&toml.replace("path = \"/{*rest}\"", "path = \"/{*rest}\"\nname = \"other\""));
    eventually("the new configuration applies", || {
        gateway.get("/a").expect(200);
        gateway.metrics().sum("transom_requests_total", &[("route", "other")]) > 0
    });
    send_requests(&gateway, 10);
    assert!(!a.is_up(&gateway) && b.is_up(&gateway));
    assert_eq!(a.served(), served);
    // Without checks, every server is healthy.
    gateway.reload(&toml.replace(slow, ""));
    eventually("all are up", || a.is_up(&gateway));
    eventually("a serves", || {
        send_requests(&gateway, 2);
        a.served() > served
    });
}

#[test]
fn a_server_with_changed_transport_is_checked_again() {
    let server = CheckedServer::new();
    let settings = "health = { path = \"/healthz\", interval = \"1h\" }\n";
    let toml = |host: &str| forward_to(&[server.upstream.address], &format!("{settings}{host}"));
    let mut gateway = Gateway::start(&toml(""));
    eventually("the first check", || server.upstream.received().len() == 1);
    gateway.reload(&toml("host = \"api.internal\""));
    eventually("the next check", || server.upstream.received().len() == 2);
    assert_eq!(server.upstream.received()[1].field("host"), Some("api.internal"));
}

#[test]
fn a_reload_starts_newly_configured_checks() {
    let (a, _b, toml) = two_servers("");
    let mut gateway = Gateway::start(&toml);
    a.set_health_status(503);
    gateway.reload(&toml.replace("balance", &format!("{FREQUENT_CHECKS}balance")));
    eventually("a is down", || !a.is_up(&gateway));
}

#[test]
fn a_recovered_server_starts_slowly() {
    let (a, b, toml) = two_servers(&format!("slow_start = \"1h\"\n{FREQUENT_CHECKS}"));
    let gateway = Gateway::start(&format!("workers = 1\n{toml}"));
    a.set_health_status(503);
    eventually("a is down", || !a.is_up(&gateway));
    a.set_health_status(200);
    eventually("a is up", || a.is_up(&gateway));
    let before = (a.served(), b.served());
    send_requests(&gateway, 110);
    let (a_share, b_share) = (a.served() - before.0, b.served() - before.1);
    assert!((9..=11).contains(&a_share), "{a_share} beside {b_share}");
    let server = state(&gateway)["servers"][0].clone();
    assert_eq!(server["state"], "slow-start");
    assert!((0.09..0.12).contains(&server["effective_weight"].as_f64().unwrap()), "{server}");
}
