//! Servers given by host name: all addresses of a name are used, and removed addresses are not.
//!
//! Debian's libnss-wrapper replaces the system's `hosts` by a file of the test, so the gateway resolves names as usual.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use socket2::{Domain, Socket, Type};

use crate::support::gateway_group::{rule_by_key, shared_config};
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::{BINARY, Process};
use crate::support::redis::{RedisServer, free_port};
use crate::support::test_ca::TestCa;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{TempDir, eventually};

/// A server at an address until the end of the test; every response names the address.
fn serve(listener: TcpListener) {
    let name = listener.local_addr().unwrap().ip().to_string();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let name = name.clone();
            thread::spawn(move || respond(stream, &name));
        }
    });
}

fn respond(mut stream: std::net::TcpStream, name: &str) {
    let mut head = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).is_ok_and(|n| n > 0) {
        head.push(byte[0]);
        if head.ends_with(b"\r\n\r\n") {
            // A request for `/once` closes the connection after its response.
            let close = if head.starts_with(b"GET /once") { "Connection: close\r\n" } else { "" };
            let response = format!("HTTP/1.1 200 OK\r\n{close}Content-Length: {}\r\n\r\n{name}", name.len());
            if stream.write_all(response.as_bytes()).is_err() || !close.is_empty() {
                return;
            }
            head.clear();
        }
    }
}

/// Two servers on one port, at different addresses.
fn two_servers() -> u16 {
    for _ in 0..10 {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        if let Ok(second) = TcpListener::bind(SocketAddr::from(([127, 0, 0, 2], port))) {
            serve(first);
            serve(second);
            return port;
        }
    }
    panic!("no port is free at both addresses");
}

/// A gateway that resolves `api.test` by the file `hosts`, every second.
fn gateway(port: u16, addresses: &[&str]) -> Process {
    gateway_with(port, addresses, "resolve = \"1s\"\n")
}

fn gateway_with(port: u16, addresses: &[&str], settings: &str) -> Process {
    gateway_of(&format!("http://api.test:{port}"), addresses, settings)
}

fn gateway_of(url: &str, addresses: &[&str], settings: &str) -> Process {
    let toml = format!(
        "workers = 1\n[upstreams.u]\nservers = [\"{url}\"]\n{settings}\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n"
    );
    spawn(&toml, addresses)
}

/// A gateway for which `api.test` has these addresses.
fn spawn(toml: &str, addresses: &[&str]) -> Process {
    let scratch = TempDir::new();
    let hosts = scratch.path().join("hosts");
    write_hosts(&hosts, addresses, 1000);
    let mut command = Command::new(BINARY);
    command.env("LD_PRELOAD", nss_wrapper()).env("NSS_WRAPPER_HOSTS", &hosts);
    Process::spawn_command(command, toml, scratch)
}

/// `second`: the modification time, by which the library notices the change.
fn write_hosts(hosts: &Path, addresses: &[&str], second: u64) {
    let lines: String = addresses.iter().map(|address| format!("{address} api.test\n")).collect();
    let mut file = File::create(hosts).unwrap();
    file.write_all(lines.as_bytes()).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)).unwrap();
}

fn nss_wrapper() -> String {
    let folders = std::fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let mut files = folders.map(|folder| folder.join("libnss_wrapper.so"));
    let found = files.find(|file| file.is_file()).expect("libnss-wrapper is missing; `make parts` installs it");
    found.display().to_string()
}

#[test]
fn all_addresses_of_a_name_are_used_in_turn() {
    let gateway = gateway(two_servers(), &["127.0.0.1", "127.0.0.2"]);
    let responses: Vec<String> = (0..6).map(|_| gateway.get("/once").expect(200).text()).collect();
    let first = responses.iter().filter(|response| *response == "127.0.0.1").count();
    assert_eq!(first, 3, "{responses:?}");
}

#[test]
fn an_unreachable_address_costs_no_request() {
    let gateway = gateway(two_servers(), &["127.0.0.3", "127.0.0.1", "127.0.0.4"]);
    for _ in 0..6 {
        assert_eq!(gateway.get("/once").expect(200).text(), "127.0.0.1");
    }
}

#[test]
fn connections_to_a_removed_address_are_not_reused() {
    let gateway = gateway(two_servers(), &["127.0.0.1"]);
    let mut client = gateway.client();
    assert_eq!(client.get("/a").expect(200).text(), "127.0.0.1");
    let hosts = gateway.scratch.path().join("hosts");
    write_hosts(&hosts, &["127.0.0.2"], 2000);
    // The connection of the client stays open.
    eventually("the other address responds", || client.get("/a").expect(200).text() == "127.0.0.2");
    // If the resolver finds no address, the known addresses stay in use.
    write_hosts(&hosts, &[], 3000);
    // Addresses are looked up every second.
    let end = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < end {
        assert_eq!(gateway.get("/once").expect(200).text(), "127.0.0.2");
    }
}

#[test]
fn an_unresolvable_name_is_502_until_it_resolves() {
    let gateway = gateway(two_servers(), &[]);
    gateway.get("/a").expect(502).problem();
    eventually("the failure is logged", || gateway.stderr().contains("`api.test` cannot be resolved"));
    write_hosts(&gateway.scratch.path().join("hosts"), &["127.0.0.1"], 2000);
    // A lookup that began before the change may fail once more.
    eventually("the name is resolved", || gateway.get("/a").status == 200);
}

/// Nothing was sent to the old address, so the new one is tried at once.
#[test]
fn a_moved_server_costs_no_request() {
    let port = free_port();
    let first = Upstream::at_address(SocketAddr::from(([127, 0, 0, 1], port)), respond_once);
    let second = Upstream::at_address(SocketAddr::from(([127, 0, 0, 2], port)), respond_once);
    let gateway = gateway_with(port, &["127.0.0.1"], "resolve = \"1h\"\n");
    gateway.get("/a").expect(200);
    write_hosts(&gateway.scratch.path().join("hosts"), &["127.0.0.2"], 2000);
    drop(first);
    let mut client = gateway.client();
    for _ in 0..3 {
        client.post("/a", "body").expect(200);
    }
    assert_eq!(second.received().len(), 3);
    // Without another address, the failure is that of the known one.
    drop(second);
    gateway.get("/a").expect(502).problem();
}

fn respond_once(connection: &mut Connection) {
    if connection.read_request().is_some() {
        connection.reply(200, &[("Connection", "close")], b"");
    }
}

/// Packets to the old address are lost: after one timeout, the name is resolved again.
#[test]
fn a_connect_timeout_causes_a_look_up() {
    let silent = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    // The kernel drops connection requests beyond the backlog.
    silent.listen(0).unwrap();
    let address = silent.local_addr().unwrap();
    let queued = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address);
        socket
    };
    let _queue: Vec<Socket> = (0..4).map(|_| queued()).collect();
    let port = address.as_socket().unwrap().port();
    let _second = Upstream::at_address(SocketAddr::from(([127, 0, 0, 2], port)), respond_once);
    let gateway = gateway_with(port, &["127.0.0.1"], "resolve = \"1h\"\n[timeouts]\nconnect = \"300ms\"\n");
    gateway.get("/a").expect(504).problem();
    write_hosts(&gateway.scratch.path().join("hosts"), &["127.0.0.2"], 2000);
    gateway.get("/a").expect(200);
}

/// Another server has the known address: it has another certificate, or closes connections. The next request, of which nothing
/// was sent to that server, goes to the new address.
#[test]
fn an_address_of_another_server_causes_a_look_up() {
    let (ca, other_ca, scratch) = (TestCa::new(), TestCa::new(), TempDir::new());
    let trusted = format!("tls = {{ ca = \"{}\" }}\n", scratch.write("ca.pem", &ca.pem).display());
    let http2 = |address, ca: Option<&TestCa>| {
        let tls = ca.map(|ca| ca.issue(&["api.test"]).server_config(&["h2"], None));
        Http2Upstream::always_ok(Options { address, tls, ..Options::default() })
    };
    let moves_from = |address: SocketAddr, scheme: &str, settings: &str| {
        let settings = format!("resolve = \"1h\"\n{settings}");
        let gateway = gateway_of(&format!("{scheme}://api.test:{}", address.port()), &["127.0.0.1"], &settings);
        gateway.client().post("/a", "body").expect(502).problem();
        write_hosts(&gateway.scratch.path().join("hosts"), &["127.0.0.2"], 2000);
        gateway.client().post("/a", "body").expect(200);
    };
    let closing = Upstream::with_script(|_| {});
    let at_new = |old: SocketAddr| SocketAddr::from(([127, 0, 0, 2], old.port()));
    {
        let _new = http2(at_new(closing.address), Some(&ca));
        moves_from(closing.address, "https", &trusted);
        let other = http2(SocketAddr::from(([127, 0, 0, 1], 0)), Some(&other_ca));
        let _new = http2(at_new(other.address), Some(&ca));
        moves_from(other.address, "https", &trusted);
    }
    {
        let _new = http2(at_new(closing.address), None);
        moves_from(closing.address, "http", "protocol = \"http2\"\n");
    }
    let _new = Upstream::at_address(at_new(closing.address), respond_once);
    moves_from(closing.address, "http", "");
}

/// The store has two addresses, and at one of them another server listens.
#[test]
fn a_failed_handshake_with_redis_tries_the_next_address() {
    let authority = TestCa::new();
    let redis = RedisServer::with_tls(&authority, "");
    let other = Upstream::at_address(SocketAddr::from(([127, 0, 0, 2], redis.port)), |_| {});
    let scratch = TempDir::new();
    let ca = scratch.write("ca.pem", &authority.pem);
    let settings = format!("ca = \"{}\"", ca.display());
    let url = format!("\"rediss://api.test:{}\"", redis.port);
    let toml = shared_config(&url, &settings, &rule_by_key("[\"9/30d\"]", "on_outage = \"refuse\""));
    let gateway = spawn(&toml, &["127.0.0.2", "127.0.0.1"]);
    eventually("the counters are reached", || gateway.client().get_with("/a", &[("x-key", "a")]).status == 200);
    assert!(other.connections() > 0, "the other server was tried");
}
