//! Connections that begin with a PROXY header: trusted peers, and the effect of the address.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::test_ca::TestCa;
use crate::support::tls::{TlsClient, listen};
use crate::support::{TempDir, eventually, one_rule, within};

const LINE: &str = "PROXY TCP4 192.0.2.7 198.51.100.1 4711 443\r\n";

/// A configuration with one rule, and PROXY headers required from these networks.
fn toml(networks: &str, more: &str) -> String {
    format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nproxy_protocol = [{networks}]\n{more}\n{}",
        one_rule("key = \"ip\"\nwindows = [\"2/hour\"]")
    )
}

fn v2(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    [b"\r\n\r\n\0\r\nQUIT\n", &[command, family][..], &length, body].concat()
}

/// The `X-Forwarded-For` that the upstream receives.
fn forwarded_for(gateway: &Gateway, header: &[u8]) -> String {
    let mut client = gateway.client();
    client.send([header, &request("GET", "/a", &[], b"")].concat());
    let response = client.read_response().expect(200);
    response.json()["fields"]["x-forwarded-for"].as_str().unwrap().to_owned()
}

fn refused_count(gateway: &Gateway, reason: &str) -> u64 {
    gateway.metrics().sum("transom_connections_refused_total", &[("reason", reason)])
}

#[test]
fn a_trusted_header_sets_the_client_address() {
    let v4 = [192, 0, 2, 8, 198, 51, 100, 1, 1, 2, 3, 4];
    let v6 = [&[0x20, 1, 0x0d, 0xb8][..], &[0; 11], &[7], &[0; 20]].concat();
    let with_tlv = [&v6[..], &[4, 0, 200], &[b'x'; 200]].concat();
    let gateway = Gateway::start(&toml("\"127.0.0.0/8\"", ""));
    assert_eq!(forwarded_for(&gateway, LINE.as_bytes()), "192.0.2.7");
    assert_eq!(forwarded_for(&gateway, b"PROXY TCP6 2001:db8::5 2001:db8::1 1 2\r\n"), "2001:db8::5");
    assert_eq!(forwarded_for(&gateway, &v2(0x21, 0x11, &v4)), "192.0.2.8");
    assert_eq!(forwarded_for(&gateway, &v2(0x21, 0x21, &with_tlv)), "2001:db8::7");
}

#[test]
fn a_local_header_keeps_the_proxys_address() {
    for header in [&b"PROXY UNKNOWN\r\n"[..], &v2(0x20, 0, b""), &v2(0x21, 0x31, &[0; 216])] {
        let gateway = Gateway::start(&toml("\"127.0.0.1\"", ""));
        assert_eq!(forwarded_for(&gateway, header), "127.0.0.1");
    }
}

#[test]
fn limits_count_by_the_address_in_the_header() {
    let gateway = Gateway::start(&toml("\"127.0.0.1\"", ""));
    for client in ["192.0.2.1", "192.0.2.2"] {
        for status in [200, 200, 429] {
            let mut connection = gateway.client();
            connection.send(format!("PROXY TCP4 {client} 198.51.100.1 1 2\r\n"));
            connection.get("/a").expect(status);
        }
    }
}

#[test]
fn a_header_may_arrive_byte_by_byte() {
    let gateway = Gateway::start(&toml("\"127.0.0.1\"", ""));
    for header in [LINE.as_bytes(), &v2(0x21, 0x11, &[192, 0, 2, 7, 1, 2, 3, 4, 5, 6, 7, 8])] {
        let mut client = gateway.client();
        for byte in header {
            client.send([*byte]);
            std::thread::sleep(Duration::from_millis(1));
        }
        let response = client.get("/a").expect(200);
        assert_eq!(response.json()["fields"]["x-forwarded-for"], "192.0.2.7");
    }
}

#[test]
fn a_header_of_an_untrusted_peer_is_a_malformed_request() {
    let gateway = Gateway::start(&toml("\"10.0.0.0/8\"", ""));
    for header in [LINE.as_bytes(), &v2(0x21, 0x11, &[192, 0, 2, 7, 1, 2, 3, 4, 5, 6, 7, 8])] {
        let mut client = gateway.client();
        client.send([header, &request("GET", "/a", &[], b"")].concat());
        client.read_response().expect(400).problem();
        client.expect_closed();
    }
    assert_eq!(gateway.metrics().sum("transom_connections_refused_total", &[]), 0);
    gateway.get("/a").expect(200);
}

#[test]
fn a_trusted_peer_without_a_header_is_refused() {
    let gateway = Gateway::start(&toml("\"127.0.0.1\"", ""));
    let bad: [&[u8]; 4] = [
        b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PROXY TCP4 192.0.2.7\r\n",
        b"PROXY UNKNOWN xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        &v2(0x21, 0x11, b"short"),
    ];
    for (n, bytes) in bad.iter().enumerate() {
        let mut client = gateway.client();
        client.send(bytes);
        client.expect_closed();
        eventually("the refusal is counted", || refused_count(&gateway, "proxy_protocol") == n as u64 + 1);
    }
    // Load balancers connect to check whether a port is open.
    drop(TcpStream::connect(gateway.http).unwrap());
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
    assert_eq!(refused_count(&gateway, "proxy_protocol"), bad.len() as u64);
}

#[test]
fn a_stalled_header_is_refused() {
    let gateway = Gateway::start(&toml("\"127.0.0.1\"", "[timeouts]\nproxy_protocol = \"200ms\""));
    for start in [&LINE.as_bytes()[..20], b"", b"\r\n\r\n\0"] {
        let before = refused_count(&gateway, "proxy_protocol_timeout");
        let mut client = gateway.client();
        client.send(start);
        within(Duration::from_millis(200), || client.expect_closed());
        eventually("the refusal is counted", || refused_count(&gateway, "proxy_protocol_timeout") == before + 1);
    }
}

#[test]
fn the_header_comes_before_tls() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let toml = listen(&scratch, &authority.issue(&["a.test"]), "")
        .replace("[listen.https]", "proxy_protocol = [\"127.0.0.1\", \"::1\"]\n[listen.https]");
    let gateway = Gateway::start(&(toml + &one_rule("key = \"ip\"\nwindows = [\"2/hour\"]")));
    let connect = |header: &str| {
        let mut stream = TcpStream::connect(gateway.https_addresses()[0]).unwrap();
        stream.write_all(header.as_bytes()).unwrap();
        TlsClient::trusting(&authority).try_connect_over(stream, "a.test")
    };
    let response = connect(LINE).unwrap().get("/a").expect(200);
    assert_eq!(response.json()["fields"]["x-forwarded-for"], "192.0.2.7");
    assert_eq!(response.json()["fields"]["x-forwarded-proto"], "https");
    assert!(connect("").is_err());
    // Cleartext HTTP after the header is refused as such.
    let mut client = Client::connect(gateway.https_addresses()[0]);
    client.send(LINE).get("/a").expect(400);
}

/// The first of several failures is logged, with its peer.
#[test]
fn connections_that_fail_before_a_request_are_logged() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let rule = one_rule("key = \"ip\"\nwindows = [\"2/hour\"]");
    let process =
        Process::spawn(&format!("workers = 1\n{}{rule}", listen(&scratch, &authority.issue(&["a.test"]), "")));
    for _ in 0..3 {
        let mut stream = TcpStream::connect(process.https.unwrap()).unwrap();
        stream.write_all(b"\x16\x03\x01\0\x05nonsense").unwrap();
        // The connection is closed after the failure was logged.
        let _ = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    }
    let process_of_balancer = Process::spawn(&format!("workers = 1\n{}", toml("\"127.0.0.1\"", "")));
    for _ in 0..3 {
        let mut stream = TcpStream::connect(process_of_balancer.http).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let _ = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    }
    for (process, message) in [
        (&process, "a TLS handshake failed: "),
        (&process_of_balancer, "the connection of a peer in `proxy_protocol` does not begin with a PROXY header"),
    ] {
        let log = process.wait_for_stderr(message);
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(message)).collect();
        assert!(lines.len() == 1 && lines[0].contains("INFO") && lines[0].contains("peer=127.0.0.1"), "{log}");
    }
}

#[test]
fn a_reload_changes_the_trusted_peers() {
    let mut gateway = Gateway::start(&toml("\"10.0.0.0/8\"", ""));
    gateway.get("/a").expect(200);
    gateway.reload(&toml("\"127.0.0.1\"", ""));
    eventually("the header is accepted", || {
        let mut client = gateway.client();
        client.send(LINE);
        client.get("/a").status != 400
    });
}
