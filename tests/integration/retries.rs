//! Retries: servers that are killed, hang and return under load, and the conditions and limits of retries.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::client::{Client, HOST, request};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_to, within};

fn retries(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_upstream_retries_total", &[("upstream", "u"), ("outcome", outcome)])
}

/// A server process at an address; port 0 means a free port.
fn echo(address: &str) -> Process {
    Process::spawn(&format!(
        "listen = {{ http = \"{address}\", admin = \"127.0.0.1:0\" }}\nworkers = 1\n[upstreams.e]\nbuiltin = \"echo\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"e\"\n"
    ))
}

#[test]
fn killed_and_hung_servers_are_invisible_to_clients() {
    let mut servers = [echo("127.0.0.1:0"), echo("127.0.0.1:0"), echo("127.0.0.1:0")];
    let addresses: Vec<_> = servers.iter().map(|server| server.http).collect();
    let settings = "ejection = { failures = 3, time = \"100ms\", max_time = \"400ms\" }\n\
                    retries = { attempts = 2, try_timeout = \"1s\" }\nslow_start = \"200ms\"\n";
    let gateway = Gateway::start(&format!("workers = 2\n{}", forward_to(&addresses, settings)));
    let url = format!("http://{}", addresses[1]);
    let labels: [(&str, &str); 2] = [("upstream", "u"), ("server", &url)];
    let ejected = |wanted: u64| {
        eventually("the ejection begins or ends", || {
            gateway.metrics().sum("transom_upstream_server_ejected", &labels) == wanted
        });
    };
    let serves = || {
        let answered = || {
            let labels = [labels[0], labels[1], ("outcome", "responded")];
            gateway.metrics().sum("transom_upstream_requests_total", &labels)
        };
        let before = answered();
        eventually("the server responds", || answered() > before + 10);
    };
    let (stop, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = gateway.client();
                while !stop.load(Ordering::SeqCst) {
                    let response = client.get("/a");
                    assert_eq!(
                        response.status,
                        200,
                        "after {} requests: {}",
                        sent.load(Ordering::SeqCst),
                        response.text()
                    );
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // Ends the load also if an assertion fails.
        let end = StopOnDrop(&stop);
        serves();
        servers[1].signal("KILL");
        ejected(1);
        // The port is free again once the process is gone.
        servers[1].wait();
        servers[1] = echo(&addresses[1].to_string());
        ejected(0);
        serves();
        servers[1].signal("STOP");
        ejected(1);
        servers[1].signal("CONT");
        ejected(0);
        serves();
        drop(end);
    });
    assert!(gateway.metrics().sum("transom_upstream_ejections_total", &labels) >= 2);
    assert!(retries(&gateway, "retried") >= 6);
    assert_eq!(retries(&gateway, "over_budget"), 0);
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn configured_statuses_are_retried_if_safe() {
    let (bad, good) = (Upstream::always(503), Upstream::always(200));
    let settings = "balance = \"round-robin\"\nretries = { on = [503, \"connect-failure\"], budget = 100 }\n";
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[bad.address, good.address], settings)));
    let mut client = gateway.client();
    for _ in 0..10 {
        client.get("/a").expect(200);
    }
    assert!(!bad.received().is_empty());
    // A POST may have had an effect: its response goes to the client.
    let statuses: Vec<u16> = (0..4).map(|_| client.post("/a", "body").status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 503).count(), 2, "{statuses:?}");
    // 500 is not on the list.
    let others = [Upstream::always(500), Upstream::always(500)];
    let gateway = Gateway::start(&forward_to(&[others[0].address, others[1].address], settings));
    gateway.get("/a").expect(500);
    assert_eq!(retries(&gateway, "retried"), 0);
}

#[test]
fn configured_statuses_eject_a_server() {
    let (bad, good) = (Upstream::always(503), Upstream::always(200));
    let settings = "balance = \"round-robin\"\nejection = { failures = 2, statuses = [503], time = \"1h\" }\n";
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[bad.address, good.address], settings)));
    let mut client = gateway.client();
    let failed = (0..20).filter(|_| client.get("/a").status == 503).count();
    assert_eq!((failed, bad.received().len(), good.received().len()), (2, 2, 18));
}

#[test]
fn retries_end_with_the_budget() {
    // The servers close the connection after every request.
    let servers: Vec<Upstream> =
        (0..3).map(|_| Upstream::with_script(|connection| drop(connection.read_request()))).collect();
    let addresses: Vec<_> = servers.iter().map(|server| server.address).collect();
    let settings = "ejection = false\nretries = { budget = 20, budget_min = 5, attempts = 2 }\n";
    let gateway = Gateway::start(&forward_to(&addresses, settings));
    let start = Instant::now();
    let mut client = gateway.client();
    (0..200).for_each(|_| drop(client.get("/a").expect(502).problem()));
    let most = 200.0 * 1.2 + 5.0 * (start.elapsed().as_secs_f64() + 1.0) + 2.0;
    let tries: usize = servers.iter().map(|server| server.received().len()).sum();
    assert!(tries > 230 && tries as f64 <= most, "{tries} of {most}");
    assert_eq!(retries(&gateway, "retried"), tries as u64 - 200);
    assert!(retries(&gateway, "over_budget") >= 100);
}

#[test]
fn every_retry_uses_another_server() {
    let servers: Vec<Upstream> =
        (0..4).map(|_| Upstream::with_script(|connection| drop(connection.read_request()))).collect();
    let addresses: Vec<_> = servers.iter().map(|server| server.address).collect();
    let gateway = Gateway::start(&forward_to(&addresses, "retries = { attempts = 3 }"));
    gateway.get("/a").expect(502);
    assert!(servers.iter().all(|server| server.received().len() == 1));
    // A single server is tried again if so configured.
    let gateway = Gateway::start(&forward_to(&addresses[..1], "retries = { attempts = 3 }"));
    gateway.get("/b").expect(502);
    assert_eq!(servers[0].received().iter().filter(|request| request.target == "/b").count(), 4);
    let gateway = Gateway::start(&forward_to(&addresses, "retries = false"));
    gateway.get("/c").expect(502);
    let sent = |server: &Upstream| server.received().iter().filter(|request| request.target == "/c").count();
    assert_eq!(servers.iter().map(sent).sum::<usize>(), 1);
}

#[test]
fn a_retry_sends_the_same_head() {
    let settings = "retries = { on = [503, \"reset\", \"timeout\"], try_timeout = \"300ms\" }\nejection = false\n";
    let fields = "X: a\r\nY:\r\nx: \"b\"; c=\u{e9}\r\nContent-Length: 0\r\n";
    for status in [502, 503, 504] {
        let servers = [(); 2].map(|()| {
            Upstream::with_script(move |connection| {
                while connection.read_request().is_some() {
                    match status {
                        502 => return,
                        503 => drop(connection.reply(503, &[], b"")),
                        _ => {}
                    }
                }
            })
        });
        let gateway = Gateway::start(&forward_to(&[servers[0].address, servers[1].address], settings));
        let mut client = gateway.client();
        client.send(format!("PUT /a/%20?b=c HTTP/1.1\r\nHost: {HOST}\r\n{fields}\r\n"));
        client.read_response().expect(status);
        let [first, second] = servers.each_ref().map(|server| server.received().pop().unwrap());
        assert_eq!((&first.method, &first.target, &first.fields), (&second.method, &second.target, &second.fields));
        assert_eq!((first.values("content-length"), first.values("x").len()), (vec!["0"], 2));
    }
}

#[test]
fn nothing_is_retried_after_response_bytes_were_forwarded() {
    let server = || {
        Upstream::with_script(|connection| {
            if connection.read_request().is_some() {
                connection.send("HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n");
            }
        })
    };
    let servers = [server(), server()];
    let gateway = Gateway::start(&forward_to(&[servers[0].address, servers[1].address], ""));
    let response = gateway.get("/a").expect(502);
    assert_eq!(response.informational, [103]);
    assert_eq!(servers[0].received().len() + servers[1].received().len(), 1);
}

#[test]
fn a_slow_attempt_is_retried_on_another_server() {
    let silent = Upstream::with_script(|connection| while connection.read_request().is_some() {});
    let good = Upstream::always(200);
    let settings = "balance = \"round-robin\"\nretries = { try_timeout = \"1s\" }\nejection = false\n";
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&[silent.address, good.address], settings)));
    let mut client = gateway.client();
    for _ in 0..4 {
        within(Duration::from_secs(1), || client.get("/a").expect(200));
    }
    assert_eq!(silent.received().len(), retries(&gateway, "retried") as usize);
    assert!(!silent.received().is_empty());
    let timed_out = gateway.metrics().sum("transom_upstream_requests_total", &[("outcome", "timed_out")]);
    assert_eq!(timed_out as usize, silent.received().len());
}

#[test]
fn the_request_deadline_covers_all_attempts() {
    let upstream = Upstream::with_script(|connection| {
        while let Some(request) = connection.read_request() {
            match request.target.as_str() {
                // Sends bytes without end.
                "/endless" if connection.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n") => {
                    while connection.send("x") {
                        thread::yield_now();
                    }
                }
                "/quick" => drop(connection.reply(200, &[], b"fine")),
                _ => assert!(connection.wait_for_close()),
            }
        }
    });
    let toml = forward_to(&[upstream.address], "retries = { attempts = 5, try_timeout = \"250ms\" }");
    let gateway = Gateway::start(&format!("{toml}\n[timeouts]\nrequest = \"2s\"\n"));
    let whole = Duration::from_secs(2);
    within(whole, || gateway.get("/silent").expect(504).problem());
    // The deadline also limits the number of attempts.
    assert!((2..=6).contains(&upstream.received().len()), "{}", upstream.received().len());
    within(whole, || gateway.client().post("/silent", "body").expect(504).problem());
    let mut client = Client::connect(gateway.http);
    client.send(request("GET", "/endless", &[], b""));
    client.read_head().unwrap().expect(200);
    assert!(within(whole, || client.read_to_end()).len() < 1_000_000);
    gateway.get("/quick").expect(200);
}
