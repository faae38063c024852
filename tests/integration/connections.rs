//! Limits on connections, in total and per client, and idle connections.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use crate::support::client::Client;
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, forward_all, one_rule, within};

fn toml(limits: &str) -> String {
    format!(
        "[listen]\nhttp = [\"127.0.0.1:0\", \"[::1]:0\"]\nadmin = \"127.0.0.1:0\"\n{limits}\n{}",
        one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]")
    )
}

fn refused_count(gateway: &Gateway, reason: &str) -> u64 {
    gateway.metrics().sum("transom_connections_refused_total", &[("reason", reason)])
}

/// Opens a connection and sends a request; `None` if the connection was refused.
fn open(address: std::net::SocketAddr, header: &str) -> Option<Client> {
    let mut client = Client::from_tcp(TcpStream::connect(address).unwrap());
    client.send_if_open(header);
    client.send_if_open("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    match client.read_response_or_end() {
        Some(response) if response.status == 503 => None,
        // The connection was closed before the response could be read.
        None => None,
        Some(response) => {
            response.expect(200);
            Some(client)
        }
    }
}

#[test]
fn the_backlog_is_configurable_and_reloaded() {
    // The kernel reduces larger values to `net.core.somaxconn`.
    let mut gateway = Gateway::start(&toml("backlog = 7"));
    let port = gateway.http.port().to_string();
    let backlog = || {
        let output = Command::new(program("ss")).args(["-Hltn", "sport", "=", &port]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        // The third column of a listening socket is its backlog.
        text.lines().map(|line| line.split_whitespace().nth(2).unwrap().to_owned()).collect::<Vec<_>>()
    };
    let all_are = |expected: &str| backlog().iter().all(|found| found == expected) && !backlog().is_empty();
    assert!(all_are("7"), "{:?}", backlog());
    gateway.reload(&toml("backlog = 9"));
    eventually("the backlog is changed", || all_are("9"));
}

#[test]
fn connections_are_limited_in_total() {
    let mut gateway = Gateway::start(&toml("max_connections = 4"));
    let mut clients: Vec<Client> = (0..4).map(|_| open(gateway.http, "").unwrap()).collect();
    for n in 1..=3 {
        assert!(open(gateway.http_addresses()[n % 2], "").is_none());
        assert_eq!(refused_count(&gateway, "max_connections"), n as u64);
    }
    assert_eq!(gateway.metrics().sum("transom_connections", &[("listener", "127.0.0.1:0")]), 4);
    // Open connections are still served.
    clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
    clients.truncate(2);
    for _ in 0..2 {
        eventually("another connection is accepted", || {
            open(gateway.http, "").map(|client| clients.push(client)).is_some()
        });
    }
    assert!(open(gateway.http, "").is_none());
    gateway.reload(&toml("max_connections = 5"));
    clients.push(open(gateway.http, "").unwrap());
    assert!(open(gateway.http, "").is_none());
}

#[test]
fn connections_are_limited_per_client() {
    let gateway = Gateway::start(&toml("max_connections_per_client = 3\nproxy_protocol = [\"::1\"]"));
    let (plain, behind_proxy) = (gateway.http_addresses()[0], gateway.http_addresses()[1]);
    let mut clients: Vec<Client> = (0..3).map(|_| open(plain, "").unwrap()).collect();
    assert!(open(plain, "").is_none());
    assert_eq!(refused_count(&gateway, "max_connections_per_client"), 1);
    // Connections are counted by the client that the proxy names: an address, or an IPv6 network of 64 bits.
    let header = |client: &str| {
        let family = if client.contains(':') { "TCP6" } else { "TCP4" };
        format!("PROXY {family} {client} {client} 1 2\r\n")
    };
    for n in 0..3 {
        clients.push(open(behind_proxy, &header("192.0.2.1")).unwrap());
        clients.push(open(behind_proxy, &header(&format!("2001:db8::{n}"))).unwrap());
    }
    assert!(open(behind_proxy, &header("192.0.2.1")).is_none());
    assert!(open(behind_proxy, &header("2001:db8::ffff:1")).is_none());
    assert!(open(behind_proxy, &header("127.0.0.1")).is_none());
    // The response has a body if the method has arrived with the PROXY header, and is not HEAD.
    let refused = |beginning: &str| {
        let mut refused = Client::from_tcp(TcpStream::connect(behind_proxy).unwrap());
        refused.send(format!("{}{beginning}", header("192.0.2.1")));
        (refused.read_head().unwrap().expect(503), refused.read_to_end())
    };
    let (head, body) = refused("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(head.field("content-length").unwrap(), body.len().to_string());
    assert_eq!((&head.field("content-type"), body.is_empty()), (&Some("application/problem+json"), false));
    let (of_head, body) = refused("HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!((of_head.field("content-length"), body.len()), (head.field("content-length"), 0));
    for unknown in ["", "H", "HEAD"] {
        let (head, body) = refused(unknown);
        assert_eq!((head.field("content-length"), head.field("content-type"), body.len()), (Some("0"), None, 0));
    }
    clients.push(open(behind_proxy, &header("192.0.2.2")).unwrap());
    clients.push(open(behind_proxy, &header("2001:db8:0:1::1")).unwrap());
    drop(clients);
    eventually("another connection is accepted", || open(plain, "").is_some());
}

#[test]
fn refused_connections_do_not_count() {
    let gateway = Gateway::start(&toml("max_connections = 2\nmax_connections_per_client = 1"));
    let first = open(gateway.http, "").unwrap();
    for _ in 0..20 {
        assert!(open(gateway.http, "").is_none());
    }
    drop(first);
    eventually("another connection is accepted", || open(gateway.http, "").is_some());
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

#[test]
fn the_descriptor_limit_is_raised_and_respected() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 40; exec \"$0\" \"$@\"", BINARY]);
    let rule = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    let process = Process::spawn_command(command, &rule, TempDir::new());
    let mut clients: Vec<Client> = (0..100).map(|_| process.client()).collect();
    clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
    // With few descriptors, clients are refused before the gateway runs out.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 168; exec \"$0\" \"$@\"", BINARY]);
    let process = Process::spawn_command(command, &rule, TempDir::new());
    let mut clients: Vec<Client> = (0..20).map(|_| open(process.http, "").unwrap()).collect();
    assert!(open(process.http, "").is_none());
    clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
}

#[test]
fn a_lack_of_descriptors_is_logged_once_while_it_lasts() {
    const LIMIT: usize = 100;
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n $0; exec \"$@\"", &LIMIT.to_string(), BINARY]);
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmax_connections = 90\n";
    let rule = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    command.env("TRANSOM_LOG", "debug");
    let process = Process::spawn_command(command, &format!("{listen}{rule}"), TempDir::new());
    let descriptors = format!("/proc/{}/fd", process.pid());
    let messages = ["accepting connections failed", "accepting connections of an admin or metrics address failed"];
    let count = |level: &str, message: &str| {
        process.stderr().lines().filter(|line| line.contains(level) && line.contains(message)).count()
    };
    for _ in 0..3 {
        let before = messages.map(|message| count("", message));
        let clients: Vec<Client> = (0..LIMIT).map(|_| process.client()).collect();
        eventually("no descriptor is free", || std::fs::read_dir(&descriptors).unwrap().count() >= LIMIT);
        let (mut client, mut admin) = (process.client(), Client::connect(process.admin));
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        admin.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
        for (message, before) in messages.into_iter().zip(before) {
            eventually("the failures of this round are logged", || count("", message) > before + 1);
        }
        drop(clients);
        client.read_response().expect(200);
        admin.read_response().expect(200);
    }
    // The others are messages for debugging.
    assert_eq!(messages.map(|message| count("WARN", message)), [1, 1], "{}", process.stderr());
}

#[test]
fn an_idle_connection_is_served_as_before() {
    let upstream = Upstream::always(200);
    let mut process = Process::spawn(&forward_all(&upstream));
    let get = "GET /a HTTP/1.1\r\nHost: a\r\n\r\n";
    let (mut idle, mut empty_line, mut chunked) = (process.client(), process.client(), process.client());
    // After its request, this client has sent the beginning of another.
    let mut early = process.client();
    early.send(format!("{get}POST /b HTTP/1.1\r\nHost: a\r\nContent-Le")).read_response().expect(200);
    for pauses in 0..3 {
        idle.get("/a").expect(200);
        // An empty line does not count as a request or as its beginning.
        empty_line.send(get).read_response().expect(200);
        empty_line.send("\r\n");
        chunked.send("POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
        chunked.read_response().expect(200);
        assert_eq!(upstream.received().len(), 3 * (pauses + 1) + 1);
        // The elapsed time is the subject of the test.
        std::thread::sleep(std::time::Duration::from_millis(1400));
    }
    idle.send(get.repeat(2));
    idle.read_response().expect(200);
    idle.read_response().expect(200);
    empty_line.send(&get[..9]).send(&get[9..]).read_response().expect(200);
    early.send("ngth: 3\r\n\r\nabc").read_response().expect(200);
    std::thread::sleep(std::time::Duration::from_millis(1400));
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0));
    for client in [&mut idle, &mut empty_line, &mut chunked, &mut early] {
        assert!(client.read_to_end().is_empty());
    }
}

#[test]
fn an_idle_connection_is_kept_for_the_head_timeout() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}[timeouts]\nrequest_head = \"1600ms\"\n", forward_all(&upstream)));
    let mut client = gateway.client();
    let start = std::time::Instant::now();
    client.get("/a").expect(200);
    assert!(within(Duration::from_millis(1600), || client.read_to_end()).is_empty());
    assert!(start.elapsed().as_millis() >= 1600, "closed after {:?}", start.elapsed());
}
