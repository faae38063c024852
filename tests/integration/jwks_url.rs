//! Key sets that the gateway fetches from the URL of an issuer: rotation, outages, bad responses, and no wait for any of it.

use std::fs;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::external_servers::nginx_with;
use crate::support::gateway::Gateway;
use crate::support::jwt_issuer::{Issuer, encode, hmac_sha256};
use crate::support::process::{Process, run};
use crate::support::test_ca::ServerFiles;
use crate::support::upgrade_chain::UpgradeChain;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, one_rule};

const UNKNOWN_KEY: &str = "the token is not signed with a key and an algorithm that are trusted here";
const UNAVAILABLE: &str = "the keys that verify tokens are not available at the moment";

/// A configuration with one rule by subject, and these settings of `[jwt]`.
fn by_subject(url: &str, settings: &str) -> String {
    let rule = one_rule("key = \"jwt:sub\"\non_missing_key = \"refuse\"\nwindows = [\"1000000/366d\"]");
    format!("{rule}[jwt]\njwks_url = \"{url}\"\n{settings}\n")
}

/// The public keys of an issuer, each with a `kid` that begins with `id`.
fn public_keys(issuer: &Issuer, id: &str) -> Vec<Value> {
    let Value::Array(mut keys) = issuer.jwks()["keys"].take() else { panic!() };
    keys.retain(|key| key["kty"] != "oct");
    for key in &mut keys {
        key["kid"] = json!(format!("{id}-{}", key["kid"].as_str().unwrap()));
    }
    keys
}

fn key_set(keys: &[Vec<Value>]) -> String {
    json!({ "keys": keys.concat() }).to_string()
}

/// A token that names its key as [`public_keys`] does.
fn token(issuer: &Issuer, id: &str, algorithm: &str) -> String {
    issuer.sign(algorithm, &json!({ "alg": algorithm, "kid": format!("{id}-{algorithm}") }), &json!({ "sub": "a" }))
}

fn send(client: &mut Client, token: &str) -> HttpResponse {
    client.get_with("/a", &[("Authorization", &format!("Bearer {token}"))])
}

/// A server with a key set. What it responds can be changed.
struct KeyServer {
    upstream: Upstream,
    response: Arc<Mutex<Vec<u8>>>,
}

impl KeyServer {
    fn start(response: Vec<u8>) -> KeyServer {
        let response = Arc::new(Mutex::new(response));
        let current = Arc::clone(&response);
        let upstream = Upstream::responding(move |_| current.lock().unwrap().clone());
        KeyServer { upstream, response }
    }

    fn with_keys(keys: &[Vec<Value>]) -> KeyServer {
        KeyServer::start(reply(200, &[], key_set(keys).as_bytes()))
    }

    fn respond(&self, response: Vec<u8>) {
        *self.response.lock().unwrap() = response;
    }

    fn url(&self) -> String {
        format!("http://{}/keys?set=1", self.upstream.address)
    }

    fn fetches(&self) -> usize {
        self.upstream.received().len()
    }
}

#[test]
fn keys_are_fetched_over_tls_and_rotated() {
    let (old, new, files, scratch) = (Issuer::new(), Issuer::new(), ServerFiles::new(), TempDir::new());
    let set = scratch.path().join("keys.json");
    let publish = |keys: &[Vec<Value>]| fs::rename(scratch.write("new.json", key_set(keys)), &set).unwrap();
    publish(&[public_keys(&old, "old")]);
    let certificate = format!(
        "ssl_certificate {}; ssl_certificate_key {}; location = /keys {{ alias {}; }}",
        files.certificate.display(),
        files.private_key.display(),
        set.display()
    );
    let server = nginx_with("ssl", &certificate, |_| {});
    let url = format!("https://localhost:{}/keys", server.address.port());
    let settings = "jwks_refresh = \"1s\"\njwks_cooldown = \"1s\"";
    let gateway = Gateway::start(&by_subject(&url, &format!("jwks_ca = \"{}\"\n{settings}", files.ca.display())));
    let status =
        |issuer: &Issuer, id: &str, algorithm: &str| send(&mut gateway.client(), &token(issuer, id, algorithm)).status;
    for algorithm in ["RS256", "ES256", "EdDSA"] {
        eventually("the key set is fetched", || status(&old, "old", algorithm) == 200);
        assert_eq!(status(&new, "new", algorithm), 401);
        assert_eq!(status(&new, "old", algorithm), 401);
    }
    publish(&[public_keys(&old, "old"), public_keys(&new, "new")]);
    eventually("the new key is added", || status(&new, "new", "ES256") == 200);
    assert_eq!(status(&old, "old", "ES256"), 200);
    publish(&[public_keys(&new, "new")]);
    eventually("the old key is removed", || status(&old, "old", "ES256") == 401);
    assert_eq!(status(&new, "new", "ES256"), 200);

    // A server whose certificate is from another authority is not believed.
    let other = ServerFiles::new();
    let file = scratch.write("gateway.toml", by_subject(&url, &format!("jwks_ca = \"{}\"", other.ca.display())));
    let (code, out, _) = run(&["check", "--connect", "--config", &file.display().to_string()]);
    assert!(
        code == Some(1) && out.contains("the key set cannot be fetched: ") && out.contains("UnknownIssuer"),
        "{out}"
    );
}

#[test]
fn no_request_waits_for_the_key_set() {
    let issuer = Issuer::new();
    let response = reply(200, &[], key_set(&[public_keys(&issuer, "1")]).as_bytes());
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let server = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            // Ends when the sender is dropped.
            let _ = released.lock().unwrap().recv();
            connection.send(&response);
        }
    });
    // Dropped before the server, also if the test fails.
    let release = release;
    let url = format!("http://{}/keys", server.address);
    let secret = "jwks_timeout = \"60s\"\n\
         keys = [{ algorithm = \"HS256\", kid = \"own\", secret = \"a secret of the configuration, long enough\" }]";
    let gateway = Gateway::start(&by_subject(&url, secret));
    eventually("the fetch is under way", || server.received().len() == 1);
    let mut client = gateway.client();
    for _ in 0..3 {
        let response = send(&mut client, &token(&issuer, "1", "ES256")).expect(503);
        assert_eq!((response.field("retry-after"), &response.problem()["detail"]), (Some("1"), &json!(UNAVAILABLE)));
    }
    // Keys of the configuration need no key set.
    let header = json!({ "alg": "HS256", "kid": "own" });
    let signed = format!("{}.{}", encode(header.to_string()), encode(json!({ "sub": "a" }).to_string()));
    let signature = encode(hmac_sha256(b"a secret of the configuration, long enough", signed.as_bytes()));
    send(&mut client, &format!("{signed}.{signature}")).expect(200);
    send(&mut client, "nonsense").expect(401);
    let ready = || Client::connect(gateway.admin).get("/readyz");
    assert_eq!(ready().expect(503).text(), "the key set of `[jwt]` is being fetched\n");
    let page = gateway.metrics();
    assert_eq!(page.sum("transom_request_errors_total", &[("error", "key_set_unavailable")]), 3);

    drop(release);
    eventually("the key set is fetched", || send(&mut client, &token(&issuer, "1", "ES256")).status == 200);
    eventually("the gateway is ready", || ready().status == 200);
    let page = gateway.metrics();
    assert_eq!(page.sum("transom_jwks_fetches_total", &[("outcome", "fetched")]), 1);
    assert!(page.sum("transom_jwks_last_fetch_timestamp_seconds", &[]) > 0);
    let request = server.received().remove(0);
    assert_eq!((request.method.as_str(), request.target.as_str()), ("GET", "/keys"));
    assert_eq!(request.field("host"), Some(server.address.to_string().as_str()));
}

#[test]
fn invented_key_ids_cause_a_bounded_number_of_fetches() {
    let (old, new) = (Issuer::new(), Issuer::new());
    let flood = |gateway: &Gateway, count: usize| {
        let mut client = gateway.client();
        for n in 0..count {
            let response = send(&mut client, &token(&new, &format!("invented-{n}"), "ES256")).expect(401);
            assert_eq!(response.problem()["detail"], UNKNOWN_KEY);
        }
    };
    // The next fetch is allowed in a day.
    let server = KeyServer::with_keys(&[public_keys(&old, "old")]);
    let gateway = Gateway::start(&by_subject(&server.url(), "jwks_refresh = \"1d\"\njwks_cooldown = \"1d\""));
    eventually("the key set is fetched", || send(&mut gateway.client(), &token(&old, "old", "ES256")).status == 200);
    flood(&gateway, 1000);
    assert_eq!(server.fetches(), 1);

    // In a second.
    let server = KeyServer::with_keys(&[public_keys(&old, "old")]);
    let start = Instant::now();
    let gateway = Gateway::start(&by_subject(&server.url(), "jwks_refresh = \"1d\"\njwks_cooldown = \"1s\""));
    eventually("the key set is fetched", || send(&mut gateway.client(), &token(&old, "old", "ES256")).status == 200);
    flood(&gateway, 1000);
    eventually("the unknown keys cause a fetch", || server.fetches() >= 2);
    let keys = [public_keys(&old, "old"), public_keys(&new, "new")];
    server.respond(reply(200, &[], key_set(&keys).as_bytes()));
    eventually("a new key causes its fetch", || {
        send(&mut gateway.client(), &token(&new, "new", "ES256")).status == 200
    });
    let fetches = server.fetches() as u64;
    assert!(fetches <= 1 + start.elapsed().as_secs(), "{fetches} fetches in {:?}", start.elapsed());
}

#[test]
fn an_unusable_response_is_refused_with_its_reason() {
    let target = Upstream::always(200);
    let location = format!("http://{}/keys", target.address);
    let issuers: Vec<Issuer> = (0..12).map(|_| Issuer::new()).collect();
    let many: Vec<Vec<Value>> =
        issuers.iter().enumerate().map(|(n, issuer)| public_keys(issuer, &n.to_string())).collect();
    let alike: Vec<Vec<Value>> = issuers.iter().take(5).map(|issuer| public_keys(issuer, "same")).collect();
    let truncated = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n{\"keys\": [".to_vec();
    let endless =
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n50000\r\n".as_slice(), &[b' '; 0x50000]].concat();
    for (response, outcome, reason) in [
        (
            reply(302, &[("Location", &location)], b""),
            "failed",
            "the server responded with 302, and redirects are not followed",
        ),
        (reply(500, &[], b"{\"keys\": []}"), "failed", "the server responded with 500"),
        (reply(204, &[], b""), "failed", "the server responded with 204"),
        (b"nonsense\r\n\r\n".to_vec(), "failed", "no response: "),
        (Vec::new(), "failed", "the server did not respond in time"),
        (truncated, "failed", "the server did not respond in time"),
        (endless, "invalid", "it has more than 256 KiB"),
        (reply(200, &[], &vec![b' '; 256 * 1024 + 1]), "invalid", "it has more than 256 KiB"),
        (reply(200, &[], b"<html>"), "invalid", "it is not JSON: line 1, column 1"),
        (reply(200, &[], "[".repeat(200_000).as_bytes()), "invalid", "it is not JSON: line 1, column 128"),
        (reply(200, &[], b"{\"error\": \"x\"}"), "invalid", "it has no list `keys`"),
        (reply(200, &[], b"{\"keys\": []}"), "invalid", "it has no public key for RS256, ES256 or EdDSA"),
        (
            reply(200, &[], issuers[0].jwks().to_string().replace("\"kty\"", "\"k\"").as_bytes()),
            "invalid",
            "it has no public key",
        ),
        (reply(200, &[], key_set(&many).as_bytes()), "invalid", "it has more than 32 keys"),
        (
            reply(200, &[], key_set(&alike).as_bytes()),
            "invalid",
            "more than 4 of its keys for RS256 may match one token",
        ),
    ] {
        let server = KeyServer::start(response);
        let toml = by_subject(&server.url(), "jwks_timeout = \"500ms\"");
        let gateway = Gateway::start(&toml);
        eventually("the fetch is counted", || {
            gateway.metrics().sum("transom_jwks_fetches_total", &[("outcome", outcome)]) > 0
        });
        send(&mut gateway.client(), &token(&issuers[0], "0", "ES256")).expect(503);
        // A gateway that cannot fetch it serves nevertheless: other routes need no tokens.
        eventually("the gateway is ready", || Client::connect(gateway.admin).get("/readyz").status == 200);
        let scratch = TempDir::new();
        let file = scratch.write("gateway.toml", toml).display().to_string();
        let (code, out, _) = run(&["check", "--connect", "--config", &file]);
        assert!(
            code == Some(1) && out.contains(&format!("the key set cannot be fetched: {reason}")),
            "{reason}: {out}"
        );
    }
    assert_eq!(target.connections(), 0, "a redirect was followed");
}

/// How often a text is in the log.
fn logged(process: &Process, text: &str) -> usize {
    process.stderr().matches(text).count()
}

fn failed_fetches(process: &Process) -> u64 {
    process.metrics().sum("transom_jwks_fetches_total", &[("outcome", "failed")])
}

#[test]
fn the_last_keys_stay_in_use_during_an_outage() {
    let issuer = Issuer::new();
    let keys = [public_keys(&issuer, "1")];
    let server = KeyServer::with_keys(&keys);
    let url = format!("{}&token=marked", server.url());
    let process = Process::spawn(&by_subject(&url, "jwks_refresh = \"1s\"\njwks_cooldown = \"1s\""));
    let mut client = process.client();
    let mut status = || send(&mut client, &token(&issuer, "1", "ES256")).status;
    eventually("the key set is fetched", || status() == 200);
    for outage in 1..=2 {
        server.respond(reply(503, &[], b""));
        let before = failed_fetches(&process);
        eventually("two fetches fail", || failed_fetches(&process) >= before + 2);
        assert_eq!(status(), 200);
        server.respond(reply(200, &[], key_set(&keys).as_bytes()));
        eventually("the outage ends", || logged(&process, "the key set is fetched again") == outage);
        assert_eq!(logged(&process, "the key set cannot be fetched"), outage);
    }
    // The keys were always the same; the query may have a secret.
    assert_eq!(logged(&process, "the keys of the key set have changed"), 1);
    assert!(logged(&process, "marked") == 0 && logged(&process, "/keys") > 0);
}

#[test]
fn keys_that_are_too_old_are_no_longer_used() {
    let issuer = Issuer::new();
    let keys = reply(200, &[], key_set(&[public_keys(&issuer, "1")]).as_bytes());
    let server = KeyServer::start(keys.clone());
    let settings = "jwks_refresh = \"1s\"\njwks_cooldown = \"1s\"\njwks_keep = \"1s\"";
    let process = Process::spawn(&by_subject(&server.url(), settings));
    let mut client = process.client();
    let mut status = || send(&mut client, &token(&issuer, "1", "ES256")).status;
    eventually("the key set is fetched", || status() == 200);
    server.respond(reply(500, &[], b""));
    eventually("the keys are too old", || status() == 503);
    process.wait_for_stderr("the last key set is too old");
    let before = failed_fetches(&process);
    eventually("another fetch fails", || failed_fetches(&process) > before);
    assert_eq!((logged(&process, "the last key set is too old"), status()), (1, 503));
    process.admin_get("/readyz").expect(200);
    server.respond(keys);
    eventually("the key set is fetched again", || status() == 200);
}

#[test]
fn reload_and_upgrade_keep_the_keys() {
    let issuer = Issuer::new();
    let server = KeyServer::with_keys(&[public_keys(&issuer, "1")]);
    let toml =
        |more: &str| by_subject(&server.url(), &format!("jwks_refresh = \"1d\"\njwks_cooldown = \"1d\"\n{more}"));
    let chain = UpgradeChain::start(&toml(""));
    let status = || send(&mut chain.first.client(), &token(&issuer, "1", "ES256")).status;
    eventually("the key set is fetched", || status() == 200);
    server.respond(reply(500, &[], b""));
    // Each worker applies a reload for itself.
    let all_admitted = || (0..32).all(|_| status() == 200);
    // With the same settings of the key set, nothing is fetched; with other settings, the keys stay.
    chain.write_config(&toml("leeway = \"1s\""));
    chain.first.wait_for_applied_reloads(1);
    assert!(all_admitted());
    assert_eq!(server.fetches(), 1);
    chain.write_config(&toml("jwks_timeout = \"4s\""));
    chain.first.wait_for_applied_reloads(2);
    eventually("the key set is fetched with the new settings", || server.fetches() > 1);
    assert!(all_admitted());
    let before = server.fetches();
    for _ in 0..2 {
        chain.upgrade();
        assert!(all_admitted());
    }
    eventually("the new processes fetch too", || server.fetches() >= before + 2);
    assert_eq!(status(), 200);
    // The key set of another URL is not used.
    chain.write_config(&toml("").replace("set=1", "set=2"));
    eventually("the keys are gone", || status() == 503);
}

#[test]
fn a_published_key_is_no_secret() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    // The issuer publishes its secret, and a public key as a secret.
    let mut keys = public_keys(&issuer, "1");
    keys.push(issuer.jwks()["keys"][0].clone());
    keys.push(json!({ "kty": "oct", "kid": "pem", "alg": "HS256", "k": encode(issuer.pem("RS256")) }));
    let modulus = keys[0]["n"].as_str().unwrap().to_owned();
    let server = KeyServer::with_keys(&[keys]);
    let gateway = Gateway::start(&by_subject(&server.url(), ""));
    let mut client = gateway.client();
    eventually("the key set is fetched", || send(&mut client, &token(&issuer, "1", "RS256")).status == 200);
    let payload = encode(json!({ "sub": "a" }).to_string());
    let secrets = [issuer.pem("RS256"), issuer.pem("ES256"), issuer.secret.clone(), modulus, String::new()];
    for secret in &secrets {
        for kid in [json!("1-RS256"), json!("HS256"), json!("pem"), Value::Null] {
            let mut header = json!({ "alg": "HS256", "kid": kid });
            if kid.is_null() {
                header.as_object_mut().unwrap().remove("kid");
            }
            let signed = format!("{}.{payload}", encode(header.to_string()));
            let signature = encode(hmac_sha256(secret.as_bytes(), signed.as_bytes()));
            let response = send(&mut client, &format!("{signed}.{signature}")).expect(401);
            assert_eq!(response.problem()["detail"], UNKNOWN_KEY);
        }
    }
    let header = encode(json!({ "alg": "none", "kid": "1-RS256" }).to_string());
    send(&mut client, &format!("{header}.{payload}.")).expect(401);
    // `check` counts the keys that can be used.
    let file = scratch.write("gateway.toml", by_subject(&server.url(), "")).display().to_string();
    let (code, out, _) = run(&["check", "--connect", "--config", &file]);
    assert!(code == Some(0) && out.contains("note: the key set has 3 keys"), "{out}");
}

#[test]
fn check_and_explain_say_what_they_did_not_fetch() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let server = KeyServer::with_keys(&[public_keys(&issuer, "1")]);
    let file = scratch.write("gateway.toml", by_subject(&server.url(), "")).display().to_string();
    let (code, out, _) = run(&["check", "--strict", "--config", &file]);
    let shown = server.url().replace("?set=1", "");
    let line = format!("  not checked: the key set at {shown}; `--connect` fetches it\n");
    assert!(code == Some(0) && out.contains(&line), "{out}");
    let field = format!("Authorization: Bearer {}", token(&issuer, "1", "ES256"));
    let (code, out, _) = run(&["explain", "--config", &file, "-H", &field, "http://gateway.test/a"]);
    assert!(code == Some(0) && out.contains("503") && out.contains(UNAVAILABLE), "{out}");
    assert_eq!(server.fetches(), 0);

    let (code, out, _) = run(&["check", "--connect", "--json", "--config", &file]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["servers"][0]["server"]), (Some(0), &json!(format!("key set {shown}"))));
    assert_eq!(report["servers"][0]["findings"][0]["text"], "the key set has 3 keys");

    // A running gateway answers with its keys.
    let process = Process::spawn(&by_subject(&server.url(), ""));
    eventually("the key set is fetched", || send(&mut process.client(), &token(&issuer, "1", "ES256")).status == 200);
    let admin = process.admin.to_string();
    let question =
        json!({ "url": "http://gateway.test/a", "headers": { "Authorization": field["Authorization: ".len()..] } });
    let fields = [("Host", admin.as_str())];
    let answer =
        Client::connect(process.admin).request("POST", "/v1/explain", &fields, question.to_string().as_bytes());
    assert_eq!(answer.expect(200).json()["rules"][0]["result"], "admits");
}
