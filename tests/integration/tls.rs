//! TLS: versions, names, sessions, closing. The clients are rustls and curl.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use rcgen::{KeyPair, PKCS_RSA_SHA256};
use rustls::version;

use crate::cancellation::silent_upstream;
use crate::support::client::{Client, request};
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::test_ca::{Issued, TestCa};
use crate::support::tls::{TlsClient, TlsStream, listen};
use crate::support::upstream::Upstream;
use crate::support::{DEADLINE, TempDir, eventually, eventually_eq, forward_all, within};

const ECHO: &str = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

/// The certificate that a client received.
fn server_certificate(client: &Client<TlsStream>) -> &[u8] {
    &client.stream.conn.peer_certificates().unwrap()[0]
}

/// An authority, a certificate for `a.test`, and a gateway that uses the certificate.
fn setup(more: &str) -> (TempDir, TestCa, Issued, Gateway) {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let issued = authority.issue(&["a.test"]);
    let gateway = Gateway::start(&(listen(&scratch, &issued, more) + ECHO));
    (scratch, authority, issued, gateway)
}

fn refused_count(gateway: &Gateway, reason: &str) -> u64 {
    gateway.metrics().sum("transom_connections_refused_total", &[("reason", reason)])
}

#[test]
fn requests_are_served_and_the_upstream_sees_the_scheme() {
    let (_scratch, authority, _, gateway) = setup("");
    let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
    assert_eq!(client.stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
    for _ in 0..3 {
        assert_eq!(client.get("/a").expect(200).json()["fields"]["x-forwarded-proto"], "https");
    }
    assert_eq!(gateway.get("/a").expect(200).json()["fields"]["x-forwarded-proto"], "http");
    // Both listeners have this label. The gateway may notice later that the plain connection was closed.
    let listener = gateway.https_addresses()[0].ip().to_string() + ":0";
    eventually("one connection is open", || {
        gateway.metrics().sum("transom_connections", &[("listener", &listener)]) == 1
    });
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_tls_handshakes_total", &[("outcome", "full")]), 1);
    assert!(metrics.sum("transom_certificate_expiry_timestamp_seconds", &[]) > 1_800_000_000);
}

/// RFC 9112, section 3.2.2.
#[test]
fn the_absolute_form_names_the_scheme_of_the_connection() {
    let (_scratch, authority, _, gateway) = setup("");
    let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
    client.send("GET https://a.test/a HTTP/1.1\r\nHost: a.test:443\r\n\r\n");
    assert_eq!(client.read_response().expect(200).json()["path"], "/a");
    client.send("GET http://a.test/a HTTP/1.1\r\nHost: a.test\r\n\r\n").read_response().expect(400).problem();
}

#[test]
fn large_bodies_are_forwarded_over_tls() {
    let upstream = Upstream::responding(|received| crate::support::upstream::reply(200, &[], &received.body));
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let gateway = Gateway::start(&(listen(&scratch, &authority.issue(&["a.test"]), "") + &forward_all(&upstream)));
    let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    for _ in 0..2 {
        assert!(client.post("/a", &body).expect(200).body == body);
    }
}

/// The end of the connection ends such a body: with `close_notify`, a truncated one would look complete.
#[test]
fn a_truncated_response_to_an_http_1_0_client_ends_without_close_notify() {
    for end in ["0\r\n\r\n", ""] {
        let upstream = Upstream::with_script(move |connection| {
            if connection.read_request().is_some() {
                connection.send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n{end}"));
            }
        });
        let (scratch, authority) = (TempDir::new(), TestCa::new());
        let gateway = Gateway::start(&(listen(&scratch, &authority.issue(&["a.test"]), "") + &forward_all(&upstream)));
        let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
        client.send("GET /a HTTP/1.0\r\nHost: a.test\r\n\r\n");
        let mut received = Vec::new();
        let is_complete = client.stream.read_to_end(&mut received).is_ok();
        assert!(received.ends_with(b"\r\n\r\nabc"), "{}", String::from_utf8_lossy(&received));
        assert_eq!(is_complete, !end.is_empty());
    }
}

/// The result of curl: its exit code, and the status with the HTTP version.
fn curl(authority: &TestCa, address: SocketAddr, arguments: &[&str]) -> (Option<i32>, String) {
    let scratch = TempDir::new();
    let ca = scratch.write("ca.pem", &authority.pem);
    let output = Command::new(program("curl"))
        .args(["--silent", "--max-time", "30", "--output", "/dev/null", "--write-out", "%{http_version} %{http_code}"])
        .args(["--resolve", &format!("a.test:{}:127.0.0.1", address.port()), "--cacert"])
        .arg(ca)
        .args(arguments)
        .arg(format!("https://a.test:{}/a", address.port()))
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn curl_uses_both_tls_versions_and_min_version_applies() {
    const SSL_CONNECT_ERROR: Option<i32> = Some(35);
    let fine = (Some(0), "1.1 200".to_owned());
    let old = ["--http1.1", "--tls-max", "1.2"];
    let new = ["--http1.1", "--tlsv1.3"];
    let (_scratch, authority, _, gateway) = setup("");
    assert_eq!(curl(&authority, gateway.https_addresses()[0], &old), fine);
    assert_eq!(curl(&authority, gateway.https_addresses()[0], &new), fine);
    assert_eq!(curl(&authority, gateway.https_addresses()[0], &["--http1.1", "--tls-max", "1.1"]).0, SSL_CONNECT_ERROR);
    let (_scratch, authority, _, gateway) = setup("min_version = \"1.3\"");
    assert_eq!(curl(&authority, gateway.https_addresses()[0], &old).0, SSL_CONNECT_ERROR);
    assert_eq!(curl(&authority, gateway.https_addresses()[0], &new), fine);
    eventually("the refusal is counted", || refused_count(&gateway, "tls_handshake") == 1);
}

#[test]
fn certificates_are_selected_by_server_name() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let main = authority.issue(&["a.test", "127.0.0.1"]);
    let others = [
        authority.issue(&["b.test", "also-b.test"]),
        authority.issue(&["*.c.test"]),
        authority.issue(&["exact.c.test"]),
    ];
    let mut more = String::new();
    for (n, issued) in others.iter().enumerate() {
        more += &format!("[[listen.https.certificates]]\n{}", issued.toml(&scratch, &format!("more{n}")));
    }
    let gateway = Gateway::start(&(listen(&scratch, &main, &more) + ECHO));
    let tls = TlsClient::trusting(&authority);
    for (name, issued) in [
        ("a.test", &main),
        ("b.test", &others[0]),
        ("ALSO-B.test", &others[0]),
        ("any.c.test", &others[1]),
        ("exact.c.test", &others[2]),
        // Clients do not send an address as server name.
        ("127.0.0.1", &main),
    ] {
        let mut client = tls.connect(gateway.https_addresses()[0], name);
        assert!(server_certificate(&client) == &issued.der[..], "{name}");
        client.get("/a").expect(200);
    }
    // The default certificate is shown, and the client rejects its name.
    for name in ["unknown.test", "c.test", "a.b.c.test"] {
        let error = tls.try_connect(gateway.https_addresses()[0], name).err().unwrap().to_string();
        assert!(error.contains("NotValidForName") || error.contains("not valid for name"), "{error}");
    }
}

#[test]
fn a_name_can_have_an_rsa_and_an_ecdsa_certificate() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let ecdsa = authority.issue(&["a.test"]);
    let rsa = authority.issue_with(&["a.test"], KeyPair::generate_for(&PKCS_RSA_SHA256).unwrap(), |_| {});
    let more = format!("[[listen.https.certificates]]\n{}", rsa.toml(&scratch, "rsa"));
    let gateway = Gateway::start(&(listen(&scratch, &ecdsa, &more) + ECHO));
    for cipher in ["ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"] {
        let arguments = ["--http1.1", "--tls-max", "1.2", "--ciphers", cipher];
        assert_eq!(
            curl(&authority, gateway.https_addresses()[0], &arguments),
            (Some(0), "1.1 200".to_owned()),
            "{cipher}"
        );
    }
}

#[test]
fn listeners_have_separate_certificates() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let both = [authority.issue(&["a.test"]), authority.issue(&["a.test"])];
    let mut toml = String::from("[listen]\nadmin = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n");
    for (n, issued) in both.iter().enumerate() {
        let pair = issued.toml(&scratch, &n.to_string());
        toml += &format!("[[listen.https]]\naddress = [\"127.0.0.1:0\", \"[::1]:0\"]\n{pair}");
    }
    let gateway = Gateway::start(&(toml + ECHO));
    assert_eq!(gateway.https_addresses().len(), 4);
    for (n, address) in gateway.https_addresses().iter().enumerate() {
        let mut client = TlsClient::trusting(&authority).connect(*address, "a.test");
        assert!(server_certificate(&client) == &both[n / 2].der[..]);
        client.get("/a").expect(200);
    }
}

#[test]
fn sessions_are_resumed_until_the_certificates_change() {
    for versions in [[&version::TLS13], [&version::TLS12]] {
        let (scratch, authority, issued, mut gateway) = setup("");
        let tls = TlsClient::new(&authority, None, &versions);
        let request_once =
            |gateway: &Gateway| tls.connect(gateway.https_addresses()[0], "a.test").get("/a").expect(200);
        let counted = |gateway: &Gateway| {
            let of = |outcome| gateway.metrics().sum("transom_tls_handshakes_total", &[("outcome", outcome)]);
            (of("full"), of("resumed"))
        };
        request_once(&gateway);
        // With any worker.
        (0..8).for_each(|_| drop(request_once(&gateway)));
        assert_eq!(counted(&gateway), (1, 8));
        gateway.reload(&(listen(&scratch, &issued, "") + ECHO + "name = \"other\"\n"));
        request_once(&gateway);
        assert_eq!(counted(&gateway), (1, 9), "the TLS settings have not changed");
        gateway.reload(&(listen(&scratch, &authority.issue(&["a.test"]), "") + ECHO));
        // Workers apply a reload one after the other.
        eventually("a session is not resumed", || {
            request_once(&gateway);
            counted(&gateway).0 > 1
        });
    }
}

#[test]
fn a_stalled_handshake_is_closed() {
    let (_scratch, authority, _, gateway) = setup("[timeouts]\ntls_handshake = \"2s\"");
    // The beginning of a ClientHello, and no byte.
    for sent in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], b""] {
        let before = refused_count(&gateway, "tls_handshake_timeout");
        let mut client = Client::connect(gateway.https_addresses()[0]);
        client.send(sent);
        TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test").get("/a").expect(200);
        within(Duration::from_secs(2), || client.expect_closed());
        eventually("the refusal is counted", || refused_count(&gateway, "tls_handshake_timeout") == before + 1);
    }
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

#[test]
fn a_malformed_handshake_gets_an_alert() {
    let (_scratch, _, _, gateway) = setup("");
    let mut client = Client::connect(gateway.https_addresses()[0]);
    client.send(b"\x16\x03\x01\x00\x04\x01\x00\x00\x00");
    let alert = client.read_to_end();
    assert_eq!(alert.first(), Some(&21), "{alert:?}");
    eventually("the refusal is counted", || refused_count(&gateway, "tls_handshake") == 1);
    // A connection that only tests whether the port is open is not an error.
    drop(Client::connect(gateway.https_addresses()[0]));
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
    assert_eq!(gateway.metrics().sum("transom_connections_refused_total", &[]), 1);
}

#[test]
fn plain_http_on_a_tls_port_is_400() {
    let (_scratch, _, _, gateway) = setup("");
    let mut client = Client::connect(gateway.https_addresses()[0]);
    let response = client.request("POST", "/a", &[], &[b'x'; 50_000]).expect(400);
    assert!(response.problem()["detail"].as_str().unwrap().contains("https"), "{}", response.text());
    assert_eq!(response.field("connection"), Some("close"));
    client.expect_closed();
    let mut client = Client::connect(gateway.https_addresses()[0]);
    client.request("HEAD", "/a", &[], b"").expect(400);
    client.expect_closed();
    // Before the method has arrived.
    let mut client = Client::connect(gateway.https_addresses()[0]);
    assert_eq!(client.send("H").read_response().expect(400).field("content-length"), Some("0"));
    client.expect_closed();
    eventually("the refusals are counted", || refused_count(&gateway, "cleartext") == 3);
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("route", ""), ("code", "400")]), 3);
}

#[test]
fn a_tls_disconnect_cancels_the_request() {
    let disconnect: [fn(Client<TlsStream>); 3] = [
        |mut client| {
            client.stream.conn.send_close_notify();
            client.stream.flush().unwrap();
        },
        |mut client| {
            client.stream.conn.send_close_notify();
            client.stream.flush().unwrap();
            // Most likely, the end of the connection arrives after `close_notify`.
            std::thread::sleep(Duration::from_millis(50));
        },
        // Without `close_notify`.
        drop,
    ];
    for disconnect in disconnect {
        let (upstream, reported) = silent_upstream();
        let (scratch, authority) = (TempDir::new(), TestCa::new());
        let gateway = Gateway::start(&(listen(&scratch, &authority.issue(&["a.test"]), "") + &forward_all(&upstream)));
        let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
        client.send(request("GET", "/a", &[], b""));
        assert_eq!(reported.recv_timeout(DEADLINE), Ok("requested"));
        disconnect(client);
        assert_eq!(reported.recv_timeout(DEADLINE), Ok("closed"));
        eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
    }
}

#[test]
fn pipelined_requests_over_tls_are_answered() {
    let (_scratch, authority, _, gateway) = setup("");
    let mut client = TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test");
    for _ in 0..20 {
        client.send(request("GET", "/a", &[], b"").repeat(10));
        (0..10).for_each(|_| drop(client.read_response().expect(200)));
    }
}

#[test]
fn a_disconnect_at_any_step_of_the_handshake_is_harmless() {
    let (_scratch, authority, _, gateway) = setup("");
    for bytes in [1, 5, 6, 100, 200] {
        let mut socket = TcpStream::connect(gateway.https_addresses()[0]).unwrap();
        let name = rustls::pki_types::ServerName::try_from("a.test").unwrap();
        let mut session = rustls::ClientConnection::new(TlsClient::trusting(&authority).config, name).unwrap();
        let mut hello = Vec::new();
        session.write_tls(&mut hello).unwrap();
        socket.write_all(&hello[..bytes.min(hello.len())]).unwrap();
    }
    let mut half = TcpStream::connect(gateway.https_addresses()[0]).unwrap();
    half.write_all(&[22]).unwrap();
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = half.read_to_end(&mut Vec::new());
    TlsClient::trusting(&authority).connect(gateway.https_addresses()[0], "a.test").get("/a").expect(200);
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

#[test]
fn no_plain_listener_is_opened_without_an_address() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let toml = listen(&scratch, &authority.issue(&["a.test"]), "").replace("http = \"127.0.0.1:0\"\n", "");
    let config = transom_config::read_with_files(&(toml + ECHO), &|path| std::fs::read(path)).unwrap();
    assert!(config.listen.http.is_empty());
}
