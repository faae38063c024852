//! TLS to upstream servers: verification, client certificates, and protocols.

use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::client_certificates::{ClientCa, Identity};
use crate::support::external_servers;
use crate::support::gateway::Gateway;
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::Process;
use crate::support::upstream::Upstream;
use crate::support::{eventually, within};

const ROUTE: &str = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

/// An HTTP/2 server over TLS.
fn server(ca: &ClientCa, identity: &Identity, requires_client_certificate: bool) -> Http2Upstream {
    let tls = Some(ca.server(identity, &["h2"], requires_client_certificate));
    Http2Upstream::always_ok(Options { tls, ..Options::default() })
}

fn toml(upstream: &Http2Upstream, settings: &str) -> String {
    format!(
        "workers = 1\n[upstreams.u]\nservers = [\"https://localhost:{}\"]\n{settings}\n{ROUTE}",
        upstream.address.port()
    )
}

fn trusting(ca: &ClientCa, more: &str) -> String {
    format!("tls = {{ ca = \"{}\"{more} }}", ca.ca().display())
}

#[test]
fn a_server_with_a_trusted_certificate_is_accepted() {
    let ca = ClientCa::new();
    let upstream = server(&ca, &ca.sign(&["localhost"]), false);
    let gateway = Gateway::start(&toml(&upstream, &trusting(&ca, "")));
    for _ in 0..3 {
        assert_eq!(gateway.get("/a").expect(200).text(), "fine\n");
    }
    assert_eq!(upstream.connections(), 1);
    assert_eq!(upstream.request_heads()[0].uri, "https://gateway.test/a");
}

#[test]
fn an_untrusted_certificate_is_502_and_logged() {
    let (ca, other) = (ClientCa::new(), ClientCa::new());
    let expired = ca.sign_with(&["localhost"], |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    for (identity, why) in [
        (other.sign(&["localhost"]), "UnknownIssuer"),
        (ca.sign(&["api.internal"]), "not valid for name \"localhost\""),
        (expired, "expired"),
    ] {
        let upstream = server(&ca, &identity, false);
        let process = Process::spawn(&toml(&upstream, &trusting(&ca, "")));
        let response = process.get("/a").expect(502);
        response.problem();
        assert!(!response.text().to_lowercase().contains("certificate"), "{}", response.text());
        eventually(why, || process.stderr().contains("TLS: ") && process.stderr().contains(why));
    }
}

#[test]
fn a_configured_self_signed_certificate_is_accepted() {
    let ca = ClientCa::new();
    let named = ClientCa::self_signed(&["localhost"], |_| {});
    let other = ClientCa::self_signed(&["localhost"], |_| {});
    let misnamed = ClientCa::self_signed(&["api.internal"], |_| {});
    let expired = ClientCa::self_signed(&["localhost"], |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let all = [&named.certificate, &misnamed.certificate, &expired.certificate].map(String::as_str).concat();
    let ca_file = ca.scratch.write("named.pem", all);
    for (identity, status) in [(&named, 200), (&other, 502), (&misnamed, 502), (&expired, 502)] {
        let upstream = server(&ca, identity, false);
        let gateway = Gateway::start(&toml(&upstream, &format!("tls = {{ ca = \"{}\" }}", ca_file.display())));
        gateway.get("/a").expect(status);
    }
}

#[test]
fn the_verified_name_is_configurable() {
    let ca = ClientCa::new();
    let upstream = server(&ca, &ca.sign(&["api.internal"]), false);
    let gateway = Gateway::start(&toml(&upstream, &trusting(&ca, ", server_name = \"api.internal\"")));
    gateway.get("/a").expect(200);
}

#[test]
fn an_ip_address_is_verified_as_an_address() {
    let ca = ClientCa::new();
    let upstream = server(&ca, &ca.sign(&["127.0.0.1"]), false);
    let toml = toml(&upstream, &trusting(&ca, "")).replace("localhost", "127.0.0.1");
    Gateway::start(&toml).get("/a").expect(200);
}

#[test]
fn a_client_certificate_is_sent_on_request() {
    let ca = ClientCa::new();
    let upstream = server(&ca, &ca.sign(&["localhost"]), true);
    let client = ca.sign(&["gateway"]);
    let certificate = ca.scratch.write("client.pem", &client.certificate);
    let private_key = ca.scratch.write("client.key", &client.private_key);
    let shown = format!(", certificate = \"{}\", private_key = \"{}\"", certificate.display(), private_key.display());
    Gateway::start(&toml(&upstream, &trusting(&ca, &shown))).get("/a").expect(200);
    // The server reports the reason after the handshake; a reset may arrive first.
    Gateway::start(&toml(&upstream, &trusting(&ca, ""))).get("/a").expect(502).problem();
}

#[test]
fn sessions_are_resumed() {
    let ca = ClientCa::new();
    let tls = Some(ca.server(&ca.sign(&["localhost"]), &["h2"], false));
    let upstream = Http2Upstream::always_ok(Options {
        tls,
        after: |_, _| crate::support::http2_upstream::AfterRequest::GoAway,
        ..Options::default()
    });
    let gateway = Gateway::start(&toml(&upstream, &trusting(&ca, "")));
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
    let ca = ClientCa::new();
    let tls = Some(ca.server(&ca.sign(&["localhost"]), &[], false));
    let upstream = Http2Upstream::always_ok(Options { tls, ..Options::default() });
    let toml = toml(&upstream, &format!("protocol = \"http2\"\n{}", trusting(&ca, "")));
    let process = Process::spawn(&toml);
    process.get("/a").expect(502).problem();
    eventually("the failure is logged", || process.stderr().contains("did not select `h2`"));
}

#[test]
fn a_reload_applies_a_new_authority_to_new_connections() {
    let (ca, other) = (ClientCa::new(), ClientCa::new());
    let upstream = server(&ca, &ca.sign(&["localhost"]), false);
    let mut gateway = Gateway::start(&toml(&upstream, &trusting(&other, "")));
    gateway.get("/a").expect(502);
    gateway.reload_and_wait(&toml(&upstream, &trusting(&ca, "")));
    gateway.get("/a").expect(200);
    gateway.reload_and_wait(&toml(&upstream, &trusting(&ca, "")));
    gateway.get("/a").expect(200);
    assert_eq!(upstream.request_heads()[1].connection, upstream.request_heads()[0].connection);
}

#[test]
fn nginx_is_reached_with_every_protocol_it_offers() {
    let ca = ClientCa::new();
    let identity = ca.sign(&["localhost"]);
    let certificate = ca.scratch.write("server.pem", &identity.certificate);
    let private_key = ca.scratch.write("server.key", &identity.private_key);
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
            trusting(&ca, "")
        );
        let gateway = Gateway::start(&toml);
        assert_eq!(gateway.get("/protocol").expect(200).text(), version, "{listen}, {protocol}");
        assert_eq!(gateway.get("/large.bin").expect(200).body.len(), 3_000_000);
        let response = gateway.client().request("POST", "/protocol", &[], &vec![b'x'; 500_000]);
        assert_eq!(response.expect(200).text(), version);
    }
}
