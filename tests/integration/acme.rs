//! Certificates that an authority issues: against Pebble, with a DNS server that resolves all names to this machine.

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::process::ProcessGroup;
use crate::support::redis::{RedisServer, free_port};
use crate::support::test_ca::TestCa;
use crate::support::tls::{self, TlsClient};
use crate::support::upstream::{self, ReceivedRequest, Upstream};
use crate::support::{TempDir, eventually, eventually_within, guide_blocks};

/// An authority for tests, with its DNS server.
struct Pebble {
    directory: String,
    management: u16,
    /// The authority of its own certificate, not of those that it issues.
    own_ca: TestCa,
    scratch: TempDir,
    _processes: [ProcessGroup; 2],
}

impl Pebble {
    /// Starts an authority that validates at these ports, and whose certificates are valid for some seconds. `rejected_nonces`: how
    /// many percent of the good ones it rejects. `external_accounts`: key identifiers and keys, one of which it demands; or null.
    fn start(
        http_port: u16,
        tls_port: u16,
        validity_s: u32,
        rejected_nonces: &str,
        external_accounts: &Value,
    ) -> Pebble {
        let scratch = TempDir::new();
        let (acme, management, dns, dns_management) = (free_port(), free_port(), free_dns_port(), free_port());
        let authority = TestCa::new();
        let own = authority.issue(&["127.0.0.1"]);
        scratch.write("ca.pem", &authority.pem);
        scratch.write("own.pem", &own.pem);
        scratch.write("own.key", &own.key_pem);
        let settings = json!({"pebble": {
            "listenAddress": format!("127.0.0.1:{acme}"), "managementListenAddress": format!("127.0.0.1:{management}"),
            "certificate": scratch.path().join("own.pem"), "privateKey": scratch.path().join("own.key"),
            "httpPort": http_port, "tlsPort": tls_port, "ocspResponderURL": "", "externalAccountBindingRequired": !external_accounts.is_null(), "externalAccountMACKeys": external_accounts,
            "certificateValidityPeriod": validity_s,
        }});
        let settings = scratch.write("pebble.json", settings.to_string());
        let mut resolver = Command::new(program("pebble-challtestsrv"));
        resolver.args([
            "-defaultIPv4",
            "127.0.0.1",
            "-defaultIPv6",
            "",
            "-http01",
            "",
            "-https01",
            "",
            "-tlsalpn01",
            "",
        ]);
        resolver.args(["-dns01", &format!("127.0.0.1:{dns}"), "-management", &format!("127.0.0.1:{dns_management}")]);
        let mut pebble = Command::new(program("pebble"));
        pebble.args(["-strict", "-dnsserver", &format!("127.0.0.1:{dns}"), "-config"]).arg(&settings);
        pebble.env("PEBBLE_VA_NOSLEEP", "1").env("PEBBLE_WFE_NONCEREJECT", rejected_nonces);
        let processes = [&mut resolver, &mut pebble].map(|command| {
            let log = fs::File::options().append(true).create(true).open(scratch.path().join("log")).unwrap();
            let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
            ProcessGroup::spawn(command)
        });
        for port in [acme, management, dns_management] {
            eventually("the authority listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        }
        let directory = format!("https://127.0.0.1:{acme}/dir");
        Pebble { directory, management, own_ca: authority, scratch, _processes: processes }
    }

    /// The setting `acme` for these names.
    fn toml(&self, domains: &[&str], storage: &str) -> String {
        let ca = self.scratch.path().join("ca.pem");
        format!(
            "acme = {{ domains = {domains:?}, email = \"admin@gateway.test\", directory = \"{}\", ca = \"{}\", storage = \"{storage}\" }}\n",
            self.directory,
            ca.display()
        )
    }

    /// The file with the root certificate of what it issues.
    fn root(&self) -> String {
        let url = format!("https://127.0.0.1:{}/roots/0", self.management);
        let ca = self.scratch.path().join("ca.pem");
        let output = Command::new("curl").args(["-sSf", "--cacert"]).arg(&ca).arg(&url).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.scratch.write("root.pem", output.stdout).display().to_string()
    }

    /// Sends a request to a gateway by a name, whose certificate must be issued by this authority. Its status code.
    fn get(&self, address: SocketAddr, name: &str) -> Option<String> {
        let (url, port) = (format!("https://{name}:{}/a", address.port()), address.port());
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", &self.root()]);
        curl.args(["--resolve", &format!("{name}:{port}:127.0.0.1"), &url]);
        let output = curl.output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }
}

/// A free port of UDP and TCP.
fn free_dns_port() -> u16 {
    (0..100).map(|_| free_port()).find(|port| UdpSocket::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

/// The serial number of the certificate that a gateway has for a name.
fn serial(address: SocketAddr, name: &str) -> String {
    let connect = format!("openssl s_client -connect {address} -servername {name} </dev/null 2>/dev/null");
    let output = Command::new("sh").args(["-c", &format!("{connect} | openssl x509 -noout -serial")]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn orders(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_acme_orders_total", &[("outcome", outcome)])
}

/// When the certificate of this name expires, as the gateway states it.
fn expiry_s(gateway: &Gateway, name: &str) -> u64 {
    let certificate = format!("acme:{name}");
    gateway.metrics().sum("transom_certificate_expiry_timestamp_seconds", &[("certificate", certificate.as_str())])
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A server before Pebble that adds renewal information (RFC 9773), which Debian's version lacks: it suggests the renewal of the first
/// certificates at once, and accepts, rejects or ignores `replaces`, in this order.
struct RenewalInfo {
    directory: String,
    _tls: Gateway,
    upstream: Upstream,
}

/// The value of `replaces` in an order: the payload of its JWS.
fn replaced(order: &ReceivedRequest) -> Option<String> {
    let jws: Value = serde_json::from_slice(&order.body).unwrap();
    let payload = URL_SAFE_NO_PAD.decode(jws["payload"].as_str().unwrap()).unwrap();
    serde_json::from_slice::<Value>(&payload).unwrap()["replaces"].as_str().map(str::to_owned)
}

impl RenewalInfo {
    fn before(pebble: &Pebble) -> RenewalInfo {
        let client = TlsClient::trusting(&pebble.own_ca);
        let authority: SocketAddr = pebble.directory[8..].trim_end_matches("/dir").parse().unwrap();
        let (renewals, asked) = (AtomicUsize::new(0), Mutex::new(BTreeSet::new()));
        let upstream = Upstream::responding(move |request| {
            let json = [("content-type", "application/json"), ("retry-after", "21600")];
            if let Some(id) = request.target.strip_prefix("/renewal-info/") {
                let mut asked = asked.lock().unwrap();
                asked.insert(id.to_owned());
                let year = if asked.len() <= 3 { 2020 } else { 2090 };
                let window =
                    json!({"start": format!("{year}-01-01T00:00:00Z"), "end": format!("{year}-01-02T00:00:00Z")});
                let body = json!({ "suggestedWindow": window }).to_string();
                return upstream::reply(200, &json, body.as_bytes());
            }
            let renewed = (request.target == "/order-plz").then(|| replaced(request)).flatten();
            let renewal = renewed.as_ref().map(|_| renewals.fetch_add(1, Ordering::SeqCst));
            if renewal == Some(1) {
                let problem = json!({"type": "urn:ietf:params:acme:error:alreadyReplaced", "detail": "renewed already", "status": 409});
                return upstream::reply(
                    409,
                    &[("content-type", "application/problem+json")],
                    problem.to_string().as_bytes(),
                );
            }
            let host = request.field("host").unwrap();
            let kind = request.field("content-type").map(|kind| ("content-type", kind));
            let fields: Vec<(&str, &str)> = [("host", host), ("user-agent", "test")].into_iter().chain(kind).collect();
            let mut connection = client.connect(authority, "127.0.0.1");
            let mut response = connection.request(&request.method, &request.target, &fields, &request.body);
            let change = |body: &mut Vec<u8>, name: &str, value: &str| {
                let mut text: Value = serde_json::from_slice(body).unwrap();
                text[name] = value.into();
                *body = text.to_string().into_bytes();
            };
            match renewed {
                Some(id) if renewal == Some(0) => change(&mut response.body, "replaces", &id),
                _ if request.target == "/dir" => {
                    change(&mut response.body, "renewalInfo", &format!("https://{host}/renewal-info"));
                }
                _ => {}
            }
            let hop = ["content-length", "transfer-encoding", "connection"];
            let fields = response.fields.iter().filter(|(name, _)| !hop.contains(&name.as_str()));
            let fields: Vec<(&str, &str)> = fields.map(|(name, value)| (name.as_str(), value.as_str())).collect();
            upstream::reply(response.status, &fields, &response.body)
        });
        let scratch = TempDir::new();
        let listen = tls::listen(&scratch, &pebble.own_ca.issue(&["127.0.0.1"]), "");
        let route = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
        let tls = Gateway::start(&format!("{listen}{}{route}", upstream.toml("u")));
        let directory = format!("https://{}/dir", tls.https_addresses()[0]);
        RenewalInfo { directory, _tls: tls, upstream }
    }

    /// The values of `replaces` of the orders so far.
    fn replaced(&self) -> Vec<Option<String>> {
        self.upstream.received().iter().filter(|request| request.target == "/order-plz").map(replaced).collect()
    }

    /// The certificates about which it was asked, in order.
    fn asked(&self) -> Vec<String> {
        let received = self.upstream.received();
        let ids = received.iter().filter_map(|request| request.target.strip_prefix("/renewal-info/"));
        let mut ids: Vec<String> = ids.map(str::to_owned).collect();
        ids.dedup();
        ids
    }
}

const ROUTE: &str = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

/// Over HTTP-01: the certificate is ordered, stored, renewed after two thirds of its lifetime, and used again after a restart. A
/// route for all requests and a redirect of the host do not hide challenges.
#[test]
fn a_certificate_is_ordered_and_renewed() {
    let (http, https) = (free_port(), free_port());
    let pebble = Pebble::start(http, 1, 9, "0", &Value::Null);
    let storage = pebble.scratch.path().join("acme");
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:{http}\"\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:{https}\"\n{}{ROUTE}\
         [[routes]]\nhost = \"a.gateway.test\"\npath = \"/{{*rest}}\"\nscheme = \"http\"\nredirect = {{ to = \"https://{{host}}{{uri}}\" }}\n",
        pebble.toml(&["a.gateway.test", "b.gateway.test"], &storage.display().to_string())
    );
    let gateway = Gateway::start_at(&toml, now_s());
    let address = gateway.https_addresses()[0];
    eventually_within(Duration::from_secs(60), "the certificate is issued", || orders(&gateway, "issued") == 1);
    for name in ["a.gateway.test", "b.gateway.test"] {
        assert_eq!(pebble.get(address, name).as_deref(), Some("200"), "{name}");
    }
    let first = serial(address, "a.gateway.test");
    eventually("the expiry is stated", || expiry_s(&gateway, "a.gateway.test") > now_s() - 60);
    assert_eq!(gateway.get("/.well-known/acme-challenge/unknown").status, 200, "of the catch-all route: another host");
    let unknown = gateway.get_with("/.well-known/acme-challenge/unknown", &[("host", "a.gateway.test")]);
    assert_eq!(unknown.status, 404);
    let files: Vec<_> = fs::read_dir(&storage).unwrap().map(|file| file.unwrap()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    for file in &files {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
    assert_eq!(fs::metadata(&storage).unwrap().permissions().mode() & 0o777, 0o700);
    gateway.advance_s(6);
    eventually_within(Duration::from_secs(60), "the certificate is renewed", || orders(&gateway, "issued") == 2);
    let renewed = serial(address, "a.gateway.test");
    assert_ne!(renewed, first);
    gateway.stop();
    let gateway = Gateway::start_at(&toml, now_s());
    assert_eq!(serial(gateway.https_addresses()[0], "a.gateway.test"), renewed, "used from the first connection on");
}

/// Over TLS-ALPN-01 in a shared store: one gateway orders, another answers the authority, both use the certificate.
#[test]
fn gateways_share_a_certificate() {
    let redis = RedisServer::start();
    let (one, other) = (free_port(), free_port());
    let pebble = Pebble::start(1, other, 3600, "10", &Value::Null);
    let toml = |https: u16| {
        let acme = pebble.toml(&["shared.gateway.test"], "shared");
        let store = format!("[counters.shared]\nredis = \"{}\"\n", redis.url());
        format!(
            "[listen]\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:{https}\"\n{acme}{store}{ROUTE}"
        )
    };
    let gateways = [one, other].map(|https| Gateway::start_at(&toml(https), now_s()));
    let addresses = gateways.each_ref().map(|gateway| gateway.https_addresses()[0]);
    let issued = || gateways.iter().map(|gateway| orders(gateway, "issued")).sum::<u64>();
    // An order fails if a gateway was not ready to answer in time, or if too many nonces were rejected: then there is another one.
    eventually_within(Duration::from_secs(120), "the certificate is issued", || {
        gateways.iter().filter(|gateway| orders(gateway, "failed") > 0).for_each(|gateway| gateway.advance_s(10));
        issued() == 1
    });
    for address in addresses {
        eventually("the gateway has the certificate", || pebble.get(address, "shared.gateway.test").is_some());
    }
    let shared = serial(addresses[0], "shared.gateway.test");
    assert_eq!(serial(addresses[1], "shared.gateway.test"), shared);
    assert_eq!(issued(), 1);
    // Without the store, a gateway starts with the copy of the certificate.
    let copy = TempDir::new();
    let with_copy = toml(free_port()).replace("storage =", &format!("copy = \"{}\", storage =", copy.path().display()));
    let gateway = Gateway::start_at(&with_copy, now_s());
    eventually("the certificate is copied", || copy.path().join("shared.gateway.test.pem").exists());
    gateway.stop();
    drop(redis);
    let gateway = Gateway::start_at(&with_copy, now_s());
    assert_eq!(serial(gateway.https_addresses()[0], "shared.gateway.test"), shared);
}

/// The authority cannot reach the gateway: the certificate of the file stays in use, and the failure is counted.
#[test]
fn a_failed_order_leaves_the_certificate_in_use() {
    let pebble = Pebble::start(1, 1, 3600, "0", &Value::Null);
    let files = TestCa::new().issue(&["file.gateway.test"]);
    let write = |name: &str, text: &str| pebble.scratch.write(name, text).display().to_string();
    let (certificate, key) = (write("file.pem", &files.pem), write("file.key", &files.key_pem));
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:0\"\n\
         certificate = \"{certificate}\"\nprivate_key = \"{key}\"\n{}{ROUTE}",
        pebble.toml(&["new.gateway.test"], &pebble.scratch.path().join("acme").display().to_string())
    );
    let gateway = Gateway::start_at(&toml, now_s());
    eventually_within(Duration::from_secs(60), "the order fails", || orders(&gateway, "failed") == 1);
    let address = gateway.https_addresses()[0];
    for name in ["file.gateway.test", "new.gateway.test"] {
        assert!(serial(address, name).starts_with("serial="), "{name}");
        assert_eq!(serial(address, name), serial(address, "file.gateway.test"));
    }
}

/// The authority demands accounts that are bound to one of its customers. The account of an order whose storage fails is used by the
/// next order, instead of another one.
#[test]
fn an_account_that_cannot_be_stored_is_not_registered_twice() {
    let https = free_port();
    let key = "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W";
    let pebble = Pebble::start(1, https, 3600, "0", &json!({ "kid-1": key }));
    let storage = pebble.scratch.path().join("acme");
    let port = pebble.directory.rsplit_once(':').unwrap().1.trim_end_matches("/dir");
    // The draft of the account cannot be written.
    let draft = storage.join(format!("account-127.0.0.1_{port}_dir.json.new"));
    fs::create_dir_all(&draft).unwrap();
    let key_file = pebble.scratch.write("eab.key", format!("{key}\n"));
    let bound = format!("eab_kid = \"kid-1\", eab_hmac_key_file = \"{}\", storage", key_file.display());
    let toml = format!(
        "[listen]\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:{https}\"\n{}{ROUTE}",
        pebble.toml(&["stored.gateway.test"], &storage.display().to_string()).replace("storage", &bound)
    );
    let gateway = Gateway::start_at(&toml, now_s());
    eventually_within(Duration::from_secs(60), "the order fails", || orders(&gateway, "failed") == 1);
    fs::remove_dir(&draft).unwrap();
    gateway.advance_s(60);
    eventually_within(Duration::from_secs(90), "the certificate is issued", || orders(&gateway, "issued") == 1);
    assert_eq!(pebble.get(gateway.https_addresses()[0], "stored.gateway.test").as_deref(), Some("200"));
    assert_eq!(fs::read_dir(&storage).unwrap().count(), 2, "account and certificate");
    let log = fs::read_to_string(pebble.scratch.path().join("log")).unwrap();
    assert!(log.contains("There are now 1 accounts in memory") && !log.contains("There are now 2 accounts"), "{log}");
}

/// A certificate that is expired by the clock of the gateway counts as a failed order. One of another authority is replaced at once.
#[test]
fn expired_certificates_and_those_of_other_authorities_are_not_kept() {
    let https = free_port();
    let pebble = Pebble::start(1, https, 3600, "0", &Value::Null);
    let storage = pebble.scratch.path().join("acme");
    let toml = format!(
        "[listen]\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:{https}\"\n{}{ROUTE}",
        pebble.toml(&["moved.gateway.test"], &storage.display().to_string())
    );
    let gateway = Gateway::start_at(&toml, now_s() + 2 * 3600);
    eventually_within(Duration::from_secs(60), "the order fails", || orders(&gateway, "failed") == 1);
    assert_eq!(orders(&gateway, "issued"), 0);
    gateway.stop();
    let issue = || {
        let gateway = Gateway::start_at(&toml, now_s());
        eventually_within(Duration::from_secs(60), "the certificate is issued", || orders(&gateway, "issued") == 1);
        let serial = serial(gateway.https_addresses()[0], "moved.gateway.test");
        gateway.stop();
        serial
    };
    let first = issue();
    let file = storage.join("moved.gateway.test.pem");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(&pebble.directory), "{text}");
    fs::write(&file, text.replace(&pebble.directory, "https://other.test/dir")).unwrap();
    assert_ne!(issue(), first);
}

/// The certificate is renewed when the authority suggests it, and the order names the certificate that it renews. An authority that
/// rejects or ignores that name gets an order without it.
#[test]
fn the_authority_suggests_renewals_and_learns_what_they_replace() {
    let https = free_port();
    let mut pebble = Pebble::start(1, https, 200, "0", &Value::Null);
    let authority = RenewalInfo::before(&pebble);
    pebble.directory.clone_from(&authority.directory);
    let toml = format!(
        "[listen]\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:{https}\"\n{}{ROUTE}",
        pebble.toml(&["renewed.gateway.test"], &pebble.scratch.path().join("acme").display().to_string())
    );
    let gateway = Gateway::start_at(&toml, now_s());
    let mut serials = BTreeSet::new();
    for renewals in 0..=3 {
        eventually_within(Duration::from_secs(60), "the certificate is renewed", || {
            orders(&gateway, "issued") == renewals + 1
        });
        serials.insert(serial(gateway.https_addresses()[0], "renewed.gateway.test"));
        // Longer than the pause between two orders, shorter than the time to the renewal without a suggestion.
        gateway.advance_s(5);
    }
    assert_eq!(serials.len(), 4);
    eventually("the authority was asked about the last certificate", || authority.asked().len() == 4);
    let [first, second, third] = [0, 1, 2].map(|number| Some(authority.asked()[number].clone()));
    assert_eq!(authority.replaced(), [None, first, second, None, third, None]);
    assert_eq!(orders(&gateway, "failed"), 0);
}

/// With the configuration of the guide: only addresses, the authority and the folder are those of the test.
#[test]
fn the_guide_to_issued_certificates_is_right() {
    let (http, https) = (free_port(), free_port());
    let pebble = Pebble::start(http, 1, 3600, "0", &Value::Null);
    let (ca, storage) = (pebble.scratch.path().join("ca.pem"), pebble.scratch.path().join("acme"));
    let toml = guide_blocks("tls", "toml").remove(1);
    assert!(toml.contains("acme"), "{toml}");
    let toml = toml
        .replace("\"0.0.0.0:80\"", &format!("\"127.0.0.1:{http}\"\nadmin = \"127.0.0.1:0\""))
        .replace("0.0.0.0:443", &format!("127.0.0.1:{https}"))
        .replace("\"/var/lib/transom/acme\"", &format!("{storage:?}, directory = {:?}, ca = {ca:?}", pebble.directory));
    let gateway = Gateway::start_at(&format!("{toml}{ROUTE}"), now_s());
    eventually_within(Duration::from_secs(60), "the certificate is issued", || orders(&gateway, "issued") == 1);
    assert_eq!(pebble.get(gateway.https_addresses()[0], "api.example.com").as_deref(), Some("200"));
    assert_eq!(orders(&gateway, "failed"), 0);
    eventually("the expiry is stated", || expiry_s(&gateway, "api.example.com") > now_s());
}
