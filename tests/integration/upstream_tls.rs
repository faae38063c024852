//! TLS to upstream servers: verification, client certificates, and protocols.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustls::{ServerConnection, StreamOwned};

use crate::support::external_servers;
use crate::support::gateway::Gateway;
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::Process;
use crate::support::test_ca::{Issued, TestCa};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, within};

const ROUTE: &str = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

/// An HTTP/2 server over TLS.
fn server(identity: &Issued, client_ca: Option<&TestCa>) -> Http2Upstream {
    let tls = Some(identity.server_config(&["h2"], client_ca));
    Http2Upstream::always_ok(Options { tls, ..Options::default() })
}

fn toml(upstream: &Http2Upstream, settings: &str) -> String {
    format!(
        "workers = 1\n[upstreams.u]\nservers = [\"https://localhost:{}\"]\n{settings}\n{ROUTE}",
        upstream.address.port()
    )
}

/// An authority with its certificate in a file.
struct Authority {
    ca: TestCa,
    scratch: TempDir,
}

impl Authority {
    fn new() -> Authority {
        Authority { ca: TestCa::new(), scratch: TempDir::new() }
    }

    /// The setting of an upstream that trusts this authority.
    fn trusted(&self, more: &str) -> String {
        format!("tls = {{ ca = \"{}\"{more} }}", self.scratch.write("ca.pem", &self.ca.pem).display())
    }
}

#[test]
fn a_server_with_a_trusted_certificate_is_accepted() {
    let ca = Authority::new();
    let upstream = server(&ca.ca.issue(&["localhost"]), None);
    let gateway = Gateway::start(&toml(&upstream, &ca.trusted("")));
    for _ in 0..3 {
        assert_eq!(gateway.get("/a").expect(200).text(), "fine\n");
    }
    assert_eq!(upstream.connections(), 1);
    assert_eq!(upstream.request_heads()[0].uri, "https://gateway.test/a");
}

#[test]
fn an_untrusted_certificate_is_502_and_logged() {
    let (ca, other) = (Authority::new(), Authority::new());
    let expired = ca.ca.issue_with(&["localhost"], rcgen::KeyPair::generate().unwrap(), |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 1)
    });
    for (identity, why) in [
        (other.ca.issue(&["localhost"]), "UnknownIssuer"),
        (ca.ca.issue(&["api.internal"]), "not valid for name \"localhost\""),
        (expired, "expired"),
    ] {
        let upstream = server(&identity, None);
        let process = Process::spawn(&toml(&upstream, &ca.trusted("")));
        let response = process.get("/a").expect(502);
        response.problem();
        assert!(!response.text().to_lowercase().contains("certificate"), "{}", response.text());
        eventually(why, || process.stderr().contains("TLS: ") && process.stderr().contains(why));
    }
}

#[test]
fn a_configured_self_signed_certificate_is_accepted() {
    let ca = Authority::new();
    let named = TestCa::self_signed(&["localhost"], |_| {});
    let other = TestCa::self_signed(&["localhost"], |_| {});
    let misnamed = TestCa::self_signed(&["api.internal"], |_| {});
    let expired = TestCa::self_signed(&["localhost"], |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let all = [&named.pem, &misnamed.pem, &expired.pem].map(String::as_str).concat();
    let ca_file = ca.scratch.write("named.pem", all);
    for (identity, status) in [(&named, 200), (&other, 502), (&misnamed, 502), (&expired, 502)] {
        let upstream = server(identity, None);
        let gateway = Gateway::start(&toml(&upstream, &format!("tls = {{ ca = \"{}\" }}", ca_file.display())));
        gateway.get("/a").expect(status);
    }
}

/// The digest of a public key, as `openssl` computes it.
fn key_digest(identity: &Issued) -> String {
    let scratch = TempDir::new();
    let file = scratch.write("server.pem", &identity.pem);
    let command = format!(
        "openssl x509 -in {} -noout -pubkey | openssl pkey -pubin -outform der | openssl dgst -sha256 -binary | base64",
        file.display()
    );
    let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn a_pinned_public_key_is_all_that_is_verified() {
    let ca = Authority::new();
    let expired = TestCa::self_signed(&["other"], |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let issued = ca.ca.issue(&["api.internal"]);
    let other = key_digest(&ca.ca.issue(&["localhost"]));
    for identity in [&expired, &issued] {
        let upstream = server(identity, None);
        let pinned =
            |digests: &[&str]| toml(&upstream, &format!("tls = {{ verify = {{ spki_sha256 = {digests:?} }} }}"));
        let process = Process::spawn(&pinned(&[&other]));
        process.get("/a").expect(502).problem();
        // The log shows the digest to be listed.
        let digest = key_digest(identity);
        eventually("the digest is logged", || process.stderr().contains(&format!("whose digest is \"{digest}\"")));
        Gateway::start(&pinned(&[&other, &digest])).get("/a").expect(200);
    }
}

#[test]
fn the_verified_name_is_configurable() {
    let ca = Authority::new();
    let upstream = server(&ca.ca.issue(&["api.internal"]), None);
    let gateway = Gateway::start(&toml(&upstream, &ca.trusted(", server_name = \"api.internal\"")));
    gateway.get("/a").expect(200);
}

#[test]
fn an_ip_address_is_verified_as_an_address() {
    let ca = Authority::new();
    let upstream = server(&ca.ca.issue(&["127.0.0.1"]), None);
    let toml = toml(&upstream, &ca.trusted("")).replace("localhost", "127.0.0.1");
    Gateway::start(&toml).get("/a").expect(200);
}

#[test]
fn a_client_certificate_is_sent_on_request() {
    let ca = Authority::new();
    let upstream = server(&ca.ca.issue(&["localhost"]), Some(&ca.ca));
    let client = ca.ca.issue(&["gateway"]);
    let (certificate, private_key) = client.write(&ca.scratch, "client");
    let shown = format!(", certificate = \"{}\", private_key = \"{}\"", certificate.display(), private_key.display());
    Gateway::start(&toml(&upstream, &ca.trusted(&shown))).get("/a").expect(200);
    // The server reports the reason after the handshake; a reset may arrive first.
    Gateway::start(&toml(&upstream, &ca.trusted(""))).get("/a").expect(502).problem();
}

#[test]
fn sessions_are_resumed() {
    let ca = Authority::new();
    let tls = Some(ca.ca.issue(&["localhost"]).server_config(&["h2"], None));
    let upstream = Http2Upstream::always_ok(Options {
        tls,
        after: |_, _| crate::support::http2_upstream::AfterRequest::GoAway,
        ..Options::default()
    });
    let gateway = Gateway::start(&toml(&upstream, &ca.trusted("")));
    for _ in 0..5 {
        gateway.get("/a").expect(200);
    }
    assert!(upstream.connections() >= 2);
    assert!(upstream.state.sessions_resumed.load(Ordering::SeqCst) >= 1);
}

#[test]
fn a_server_without_tls_is_502() {
    let upstream = Upstream::with_script(|connection| {
        connection.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        while !connection.wait_for_close() {}
    });
    let toml = format!("[upstreams.u]\nservers = [\"https://{}\"]\n{ROUTE}", upstream.address);
    Gateway::start(&toml).get("/a").expect(502).problem();
}

#[test]
fn a_stalled_handshake_is_504() {
    // The kernel accepts connections, and no process reads from them.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let toml = format!(
        "[upstreams.u]\nservers = [\"https://{}\"]\n[timeouts]\nconnect = \"200ms\"\n{ROUTE}",
        silent.local_addr().unwrap()
    );
    let gateway = Gateway::start(&toml);
    within(Duration::from_millis(200), || gateway.get("/a").expect(504).problem());
}

#[test]
fn missing_http2_support_is_502() {
    let ca = Authority::new();
    let tls = Some(ca.ca.issue(&["localhost"]).server_config(&[], None));
    let upstream = Http2Upstream::always_ok(Options { tls, ..Options::default() });
    let toml = toml(&upstream, &format!("protocol = \"http2\"\n{}", ca.trusted("")));
    let process = Process::spawn(&toml);
    process.get("/a").expect(502).problem();
    eventually("the failure is logged", || process.stderr().contains("did not select `h2`"));
}

#[test]
fn a_reload_applies_a_new_authority_to_new_connections() {
    let (ca, other) = (Authority::new(), Authority::new());
    let upstream = server(&ca.ca.issue(&["localhost"]), None);
    let mut gateway = Gateway::start(&toml(&upstream, &other.trusted("")));
    gateway.get("/a").expect(502);
    gateway.reload_and_wait(&toml(&upstream, &ca.trusted("")));
    gateway.get("/a").expect(200);
    gateway.reload_and_wait(&toml(&upstream, &ca.trusted("")));
    gateway.get("/a").expect(200);
    assert_eq!(upstream.request_heads()[1].connection, upstream.request_heads()[0].connection);
}

#[test]
fn nginx_reads_the_client_from_proxy_headers() {
    let ca = Authority::new();
    let (certificate, private_key) = ca.ca.issue(&["localhost"]).write(&ca.scratch, "nginx");
    let tls = format!("ssl_certificate {}; ssl_certificate_key {};", certificate.display(), private_key.display());
    let settings = "location / { return 200 \"$proxy_protocol_addr $connection_requests\"; }";
    for (listen, scheme, version) in
        [("proxy_protocol", "http", "v1"), ("proxy_protocol", "http", "v2"), ("ssl proxy_protocol", "https", "v2")]
    {
        let (tls, trusted) = if scheme == "https" { (&*tls, ca.trusted("")) } else { ("", String::new()) };
        let nginx = external_servers::nginx_with(listen, &format!("{tls} {settings}"), |_| {});
        let toml = format!(
            "workers = 1\nlisten = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n\
             admin = {{ hosts = [\"gateway.test\"] }}\n[upstreams.u]\nservers = [\"{scheme}://localhost:{}\"]\n\
             proxy_protocol = \"{version}\"\nmax_connections = 2\n{trusted}\n\
             health = {{ path = \"/\", interval = \"20ms\" }}\n{ROUTE}",
            nginx.address.port()
        );
        let gateway = Gateway::start(&toml);
        let mut client = gateway.client();
        for address in ["192.0.2.7", "192.0.2.8", "192.0.2.7", "2001:db8::7"] {
            let response = client.get_with("/", &[("x-forwarded-for", address)]).expect(200);
            assert_eq!(response.text(), format!("{address} 1"), "{scheme} {version}");
        }
        // Requests that wait for a connection get one of their own, too.
        let mut clients: Vec<_> = (1..=6).map(|_| gateway.client()).collect();
        for (number, client) in clients.iter_mut().enumerate() {
            let address = format!("198.51.100.{number}");
            client.send(crate::support::client::request("GET", "/", &[("x-forwarded-for", &address)], b""));
        }
        for (number, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.read_response().expect(200).text(), format!("198.51.100.{number} 1"));
        }
        eventually("a health check passes", || {
            gateway.metrics().sum("transom_upstream_health_checks_total", &[("outcome", "passed")]) > 0
        });
    }
}

#[test]
fn nginx_is_reached_with_every_protocol_it_offers() {
    let ca = Authority::new();
    let identity = ca.ca.issue(&["localhost"]);
    let (certificate, private_key) = identity.write(&ca.scratch, "server");
    let tls = format!("ssl_certificate {}; ssl_certificate_key {};", certificate.display(), private_key.display());
    for (listen, protocol, version) in [
        ("ssl http2", "auto", "HTTP/2.0"),
        ("ssl http2", "http1", "HTTP/1.1"),
        ("ssl http2", "http2", "HTTP/2.0"),
        ("ssl", "auto", "HTTP/1.1"),
    ] {
        let nginx = external_servers::nginx_with(listen, &tls, |root| {
            std::fs::write(root.join("large.bin"), vec![b'x'; 3_000_000]).unwrap();
        });
        let toml = format!(
            "[upstreams.u]\nservers = [\"https://localhost:{}\"]\nprotocol = \"{protocol}\"\n{}\n{ROUTE}",
            nginx.address.port(),
            ca.trusted("")
        );
        let gateway = Gateway::start(&toml);
        assert_eq!(gateway.get("/protocol").expect(200).text(), version, "{listen}, {protocol}");
        assert_eq!(gateway.get("/large.bin").expect(200).body.len(), 3_000_000);
        let response = gateway.client().request("POST", "/protocol", &[], &vec![b'x'; 500_000]);
        assert_eq!(response.expect(200).text(), version);
    }
}

/// Without `close_notify`, the end of a response without a length may be forged, or the server has crashed.
#[test]
fn a_response_without_a_length_is_complete_with_close_notify() {
    let ca = Authority::new();
    let config = ca.ca.issue(&["localhost"]).server_config(&["http/1.1"], None);
    for is_complete in [true, false] {
        let config = Arc::clone(&config);
        let upstream = Upstream::with_script(move |connection| {
            let tcp = connection.stream().try_clone().unwrap();
            let mut tls = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), tcp);
            assert!(tls.read(&mut [0; 1000]).unwrap() > 0);
            tls.write_all(b"HTTP/1.1 200 OK\r\n\r\npart").unwrap();
            if is_complete {
                tls.conn.send_close_notify();
            }
            tls.flush().unwrap();
        });
        let server = format!("[upstreams.u]\nservers = [\"https://localhost:{}\"]\n", upstream.address.port());
        let gateway = Gateway::start(&format!("{server}{}\n{ROUTE}", ca.trusted("")));
        let mut client = gateway.client();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let mut received = Vec::new();
        let _reset = client.stream.read_to_end(&mut received);
        let received = String::from_utf8_lossy(&received);
        assert!(received.contains("part"), "{received}");
        assert_eq!(received.ends_with("\r\n0\r\n\r\n"), is_complete, "{received}");
    }
}
