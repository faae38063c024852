//! Client certificates: acceptance, revocation, and limits by certificate.

use serde_json::json;

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::test_ca::{Issued, TestCa};
use crate::support::tls::{TlsClient, listen};
use crate::support::{TempDir, eventually_eq, one_rule};

const PER_CERT: &str = "key = \"client-cert\"\nwindows = [\"2/hour\"]\n";

/// An authority for servers and one for clients, which the gateway trusts, and the certificate of the gateway.
struct Certificates {
    scratch: TempDir,
    servers: TestCa,
    clients: TestCa,
    server: Issued,
}

impl Certificates {
    fn new() -> Certificates {
        let (servers, clients) = (TestCa::new(), TestCa::new());
        Certificates { scratch: TempDir::new(), server: servers.issue(&["a.test"]), servers, clients }
    }

    fn toml(&self, auth: &str, rule: &str) -> String {
        let ca = self.scratch.write("clients.pem", &self.clients.pem);
        let more = format!("client_ca = \"{}\"\n{auth}", ca.display());
        listen(&self.scratch, &self.server, &more) + &one_rule(rule)
    }

    /// The status of a request with or without a certificate; `None` if the gateway refuses the connection.
    fn status(&self, gateway: &Gateway, own: Option<&Issued>) -> Option<u16> {
        let tls = own.map_or(TlsClient::trusting(&self.servers), |own| TlsClient::with_certificate(&self.servers, own));
        let mut client = tls.try_connect(gateway.https_addresses()[0], "a.test").ok()?;
        // With TLS 1.3, the client learns of the refusal after its handshake.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.get("/a").status)).ok()
    }
}

#[test]
fn clients_without_a_certificate_are_refused() {
    let certificates = Certificates::new();
    let gateway = Gateway::start(&certificates.toml("", "key = \"ip\"\nwindows = [\"100/hour\"]"));
    let (good, other) = (certificates.clients.issue(&["client"]), certificates.servers.issue(&["client"]));
    assert_eq!(certificates.status(&gateway, Some(&good)), Some(200));
    assert_eq!(certificates.status(&gateway, None), None);
    assert_eq!(certificates.status(&gateway, Some(&other)), None);
    let expired = certificates.clients.issue_with(&["client"], rcgen::KeyPair::generate().unwrap(), |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    });
    assert_eq!(certificates.status(&gateway, Some(&expired)), None);
    // Counted after the client has seen the end of the handshake.
    let refused = || gateway.metrics().sum("transom_connections_refused_total", &[("reason", "tls_handshake")]);
    eventually_eq(refused, 3);
}

#[test]
fn a_revoked_certificate_is_refused() {
    let certificates = Certificates::new();
    let (good, bad) = (certificates.clients.issue(&["client"]), certificates.clients.issue(&["client"]));
    let file = certificates.scratch.write("lists.pem", certificates.clients.revoke(&[&bad], 4000));
    for auth in ["", "client_auth = \"optional\"\n"] {
        let more = format!("{auth}client_crl = \"{}\"", file.display());
        let gateway = Gateway::start(&certificates.toml(&more, "key = \"ip\"\nwindows = [\"100/hour\"]"));
        assert_eq!(certificates.status(&gateway, Some(&good)), Some(200));
        assert_eq!(certificates.status(&gateway, Some(&bad)), None);
        let without = (!auth.is_empty()).then_some(200);
        assert_eq!(certificates.status(&gateway, None), without);
        let old = TlsClient::new(&certificates.servers, Some(&bad), &[&rustls::version::TLS12]);
        assert!(old.try_connect(gateway.https_addresses()[0], "a.test").is_err());
    }
}

#[test]
fn a_certificate_whose_issuer_has_no_valid_crl_is_refused() {
    let certificates = Certificates::new();
    let own = certificates.clients.issue(&["client"]);
    // An expired list, and one signed by another authority of the same name.
    for (list, is_accepted) in [
        (certificates.clients.revoke(&[], 2021), false),
        (certificates.servers.revoke(&[], 4000), false),
        (certificates.clients.revoke(&[], 4000), true),
    ] {
        let file = certificates.scratch.write("lists.pem", &list);
        let more = format!("client_crl = [\"{}\"]", file.display());
        let gateway = Gateway::start(&certificates.toml(&more, "key = \"ip\"\nwindows = [\"100/hour\"]"));
        assert_eq!(certificates.status(&gateway, Some(&own)).is_some(), is_accepted, "{list}");
    }
}

#[test]
fn an_optional_certificate_is_verified_if_present() {
    let certificates = Certificates::new();
    let rule = format!("{PER_CERT}on_missing_key = \"skip\"");
    let gateway = Gateway::start(&certificates.toml("client_auth = \"optional\"", &rule));
    let (good, other) = (certificates.clients.issue(&["client"]), certificates.servers.issue(&["client"]));
    assert_eq!(certificates.status(&gateway, Some(&other)), None);
    for status in [200, 200, 429] {
        assert_eq!(certificates.status(&gateway, Some(&good)), Some(status));
        assert_eq!(certificates.status(&gateway, None), Some(200));
    }
}

#[test]
fn certificates_are_counted_separately() {
    let certificates = Certificates::new();
    let gateway = Gateway::start(&certificates.toml("", &format!("{PER_CERT}on_missing_key = \"refuse\"")));
    let (first, second) = (certificates.clients.issue(&["client"]), certificates.clients.issue(&["client"]));
    for own in [&first, &second] {
        // On separate connections, some of which resume a session.
        let tls = TlsClient::with_certificate(&certificates.servers, own);
        for status in [200, 200, 429, 429] {
            tls.connect(gateway.https_addresses()[0], "a.test").get("/a").expect(status);
        }
    }
    assert!(gateway.metrics().sum("transom_tls_handshakes_total", &[("outcome", "resumed")]) >= 6);
    // A cleartext connection has no certificate, and a header field cannot claim one.
    gateway.get_with("/a", &[("Client-Cert", &first.fingerprint())]).expect(400).problem();

    let count_of = |key: &str| {
        let query = json!({"rule": "r", "key": key}).to_string();
        Client::connect(gateway.admin).post("/v1/value", query).expect(200).json()["count"].clone()
    };
    assert_eq!((count_of(&first.fingerprint()), count_of("other")), (json!(2), json!(0)));
}

/// A renewed certificate has the names of the former one: the client does not get another quota.
#[test]
fn a_renewed_certificate_is_counted_by_its_names() {
    let certificates = Certificates::new();
    let rules = ["san", "cn"].map(|name| {
        format!("[rules.{name}]\nkey = \"client-cert:{name}\"\nwindows = [\"{name}-LIMIT/hour\"]\non_missing_key = \"refuse\"\n")
    });
    let rules = rules.concat().replace("san-LIMIT", "2").replace("cn-LIMIT", "5");
    let toml = certificates.toml("", PER_CERT);
    let (listen, _) = toml.split_once("[rules").unwrap();
    let upstream = "[upstreams.u]\nbuiltin = \"echo\"\n";
    let listen = listen.replace(upstream, "");
    let route = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"san\", \"cn\"]\n";
    let gateway = Gateway::start(&format!("{listen}{upstream}{rules}{route}"));
    // All have the same common name.
    for (name, status) in [("client", 200), ("client", 200), ("client", 429), ("other", 200), ("other", 200)] {
        let own = certificates.clients.issue(&[name]);
        assert_eq!(certificates.status(&gateway, Some(&own)), Some(status), "{name}");
    }
    let query = |rule: &str, key: &str| {
        let query = json!({"rule": rule, "key": key}).to_string();
        Client::connect(gateway.admin).post("/v1/value", query).expect(200).json()["count"].clone()
    };
    assert_eq!(
        [query("san", "client"), query("san", "other"), query("cn", "issued in a test")],
        [json!(2), json!(2), json!(4)]
    );
    let fifth = certificates.clients.issue(&["third"]);
    assert_eq!(certificates.status(&gateway, Some(&fifth)), Some(200));
    assert_eq!(certificates.status(&gateway, Some(&fifth)), Some(429), "by the common name");
}

#[test]
fn a_certificate_can_have_its_own_windows() {
    let certificates = Certificates::new();
    let (first, second) = (certificates.clients.issue(&["client"]), certificates.clients.issue(&["client"]));
    // In the format of openssl.
    let pairs: Vec<String> = first
        .fingerprint()
        .to_uppercase()
        .as_bytes()
        .chunks(2)
        .map(|two| String::from_utf8_lossy(two).into())
        .collect();
    let rule = format!(
        "{PER_CERT}on_missing_key = \"refuse\"\nexemptions = [\"key:{}\"]\n\
         [[rules.r.overrides]]\nkey = \"{}\"\nwindows = [\"1/hour\"]",
        pairs.join(":"),
        second.fingerprint(),
    );
    let gateway = Gateway::start(&certificates.toml("", &rule));
    for status in [200, 200, 200] {
        assert_eq!(certificates.status(&gateway, Some(&first)), Some(status));
    }
    for status in [200, 429] {
        assert_eq!(certificates.status(&gateway, Some(&second)), Some(status));
    }
}

#[test]
fn a_certificate_selects_the_plan_of_a_client() {
    let certificates = Certificates::new();
    let (first, second) = (certificates.clients.issue(&["client"]), certificates.clients.issue(&["client"]));
    let rule = "key = \"ip\"\nwindows = [\"1/hour\"]\n[rules.r.plans.large]\nwindows = [\"3/hour\"]";
    let toml = certificates.toml("", rule) + "[clients]\nfile = \"clients.toml\"\nsubject = \"client-cert\"\n";
    let fingerprint = first.fingerprint().to_uppercase();
    let gateway =
        Gateway::start_with(&toml, &format!("[clients.one]\nplan = \"large\"\nsubjects = [\"{fingerprint}\"]\n"));
    assert_eq!(certificates.status(&gateway, Some(&second)), Some(200));
    for status in [200, 200, 429] {
        assert_eq!(certificates.status(&gateway, Some(&first)), Some(status));
        assert_eq!(certificates.status(&gateway, Some(&second)), Some(429));
    }
}

#[test]
fn on_missing_key_is_optional_where_certificates_are_required() {
    let certificates = Certificates::new();
    let toml = certificates.toml("", PER_CERT);
    let problem = transom_config::read_with_files(&toml, &|path| std::fs::read(path)).unwrap_err();
    assert!(problem[0].message.contains("a request may lack `client-cert`"), "{problem:?}");
    let only_tls = toml.replace("http = \"127.0.0.1:0\"\n", "");
    transom_config::read_with_files(&only_tls, &|path| std::fs::read(path)).unwrap();
}

#[test]
fn a_tls_session_ends_with_the_authority_that_verified_it() {
    let certificates = Certificates::new();
    let rule = "key = \"ip\"\nwindows = [\"100/hour\"]";
    let mut gateway = Gateway::start(&certificates.toml("", rule));
    let own = certificates.clients.issue(&["client"]);
    let tls = TlsClient::with_certificate(&certificates.servers, &own);
    tls.connect(gateway.https_addresses()[0], "a.test").get("/a").expect(200);
    let other = Certificates { clients: TestCa::new(), ..Certificates::new() };
    let ca = other.scratch.write("others.pem", &other.clients.pem);
    let toml = certificates.toml("", rule).replace("clients.pem", "replaced.pem");
    std::fs::copy(ca, certificates.scratch.path().join("replaced.pem")).unwrap();
    gateway.reload(&toml);
    let open = || {
        let mut client = tls.try_connect(gateway.https_addresses()[0], "a.test").ok()?;
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.get("/a").status)).ok()
    };
    crate::support::eventually("certificates of the old authority are refused", || (0..8).all(|_| open().is_none()));
}
