//! The API of the admin address: its table of endpoints, tokens with roles, and the audit log.

use std::process::Command;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HOST, HttpResponse, request};
use crate::support::external_scripts::run_checks_of;
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process, run};
use crate::support::{TempDir, one_rule};

const RULE: &str = "key = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"5/366d\"]";

/// Requests to an admin address with a token, or without one.
fn send(gateway: &Gateway, method: &str, target: &str, token: &str, body: &str) -> HttpResponse {
    let authorization = format!("Bearer {token}");
    let fields = [("Authorization", authorization.as_str())];
    let fields = if token.is_empty() { &[][..] } else { &fields[..] };
    Client::connect(gateway.admin).request(method, target, fields, body.as_bytes())
}

fn with_tokens(folder: &TempDir, more: &str) -> String {
    let tokens = ["read", "operate", "clients"].map(|role| {
        let file = folder.write(role, format!("{role}-0123456789abcdef\n"));
        format!("{{ name = \"of-{role}\", file = {file:?}, role = \"{role}\" }}")
    });
    format!("[admin]\nhosts = [\"{HOST}\"]\ntokens = [{}]\n{more}{}", tokens.join(", "), one_rule(RULE))
}

fn token(role: &str) -> String {
    format!("{role}-0123456789abcdef")
}

const QUERY: &str = r#"{"rule": "r", "key": "secret-key"}"#;

#[test]
fn a_role_includes_the_ones_before() {
    let folder = TempDir::new();
    let gateway = Gateway::start(&with_tokens(&folder, ""));
    let question = r#"{"url": "http://a/a"}"#;
    let calls = [
        ("GET", "/v1/top", "", "read"),
        ("GET", "/v1/clients", "", "read"),
        ("HEAD", "/v1/events", "", "read"),
        ("GET", "/v1/openapi.json", "", "read"),
        ("POST", "/v1/check", QUERY, "read"),
        ("POST", "/v1/value", QUERY, "read"),
        ("POST", "/v1/explain", question, "read"),
        ("POST", "/v1/limit", QUERY, "operate"),
        ("POST", "/v1/reset", QUERY, "operate"),
    ];
    let roles = ["read", "operate", "clients"];
    let rank = |role: &str| roles.iter().position(|other| *other == role);
    for (method, target, body, needed) in calls {
        for role in roles {
            let response = send(&gateway, method, target, &token(role), body);
            match rank(role) >= rank(needed) {
                true => drop(response.expect(200)),
                false => {
                    let detail = response.expect(403).problem()["detail"].as_str().unwrap().to_owned();
                    assert!(detail.contains(&format!("`of-{role}`")) && detail.contains(needed), "{detail}");
                }
            }
        }
        for wrong in ["", "read-0123456789abcde", "support"] {
            let response = send(&gateway, method, target, wrong, body).expect(401);
            assert_eq!(response.field("www-authenticate"), Some("Bearer"), "{target}");
        }
    }
    // Changes, of what is not configured here.
    for (method, target, body, needed) in [
        ("POST", "/v1/clients/acme/grants", "{}", "operate"),
        ("POST", "/v1/deny", "{}", "operate"),
        ("DELETE", "/v1/deny/0123456789ab", "", "operate"),
        ("PUT", "/v1/clients/acme", "{}", "clients"),
        ("PATCH", "/v1/clients/acme", "{}", "clients"),
        ("DELETE", "/v1/clients/acme", "", "clients"),
        ("POST", "/v1/clients/acme/keys", "", "clients"),
        ("DELETE", "/v1/clients/acme/keys/sha256:00", "", "clients"),
        ("PUT", "/v1/clients/acme/limits/r", "{}", "clients"),
        ("DELETE", "/v1/clients/acme/limits/r", "", "clients"),
    ] {
        for role in roles {
            let response = send(&gateway, method, target, &token(role), body);
            let is_forbidden = response.status == 403;
            assert_eq!(is_forbidden, rank(role) < rank(needed), "{method} {target} by {role}: {}", response.text());
        }
        send(&gateway, method, target, "", body).expect(401);
    }
    // The pages stay open.
    for target in ["/", "/metrics", "/healthz", "/readyz", "/upstreams"] {
        send(&gateway, "GET", target, "", "").expect(200);
    }
    send(&gateway, "GET", "/v1/nowhere", "", "").expect(401);
    send(&gateway, "GET", "/v1/nowhere", &token("read"), "").expect(404).problem();
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        send(&gateway, method, "/nowhere", "", "").expect(401);
    }
}

/// A change of a file of a token applies like every change of the configuration.
#[test]
fn tokens_are_read_again_when_their_files_change() {
    let folder = TempDir::new();
    let toml = with_tokens(&folder, "");
    let mut gateway = Gateway::start(&toml);
    send(&gateway, "GET", "/v1/top", &token("read"), "").expect(200);
    let [mut of_reader, mut of_operator] = ["read", "operate"].map(|role| {
        let mut client = Client::connect(gateway.admin);
        let authorization = format!("Bearer {}", token(role));
        client.send(request("GET", "/v1/events", &[("Authorization", &authorization)], b""));
        assert_eq!(client.read_head().unwrap().status, 200);
        client
    });
    folder.write("read", "another-0123456789abcdef");
    gateway.reload(&toml);
    // Streams of events end with the token of their request, others go on.
    while of_reader.read_chunk().is_some() {}
    for _ in 0..5 {
        assert!(of_operator.read_chunk().is_some());
    }
    send(&gateway, "GET", "/v1/top", &token("read"), "").expect(401);
    send(&gateway, "GET", "/v1/top", "another-0123456789abcdef", "").expect(200);
}

#[test]
fn changes_from_another_origin_are_refused_with_every_method() {
    let gateway = Gateway::start(&format!("[admin]\nhosts = [\"{HOST}\"]\n{}", one_rule(RULE)));
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        for fields in [&[("Origin", "http://evil.example")][..], &[("Sec-Fetch-Site", "cross-site")]] {
            let target = "/v1/clients/acme";
            Client::connect(gateway.admin).request(method, target, fields, b"{}").expect(403).problem();
        }
    }
}

#[test]
fn other_methods_get_405_with_those_that_a_path_has() {
    let gateway = Gateway::start(&format!("[admin]\nhosts = [\"{HOST}\"]\n{}", one_rule(RULE)));
    let document = send(&gateway, "GET", "/v1/openapi.json", "", "").expect(200).json();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "acme").replace("{id}", "0").replace("{rule}", "r");
        let methods: Vec<String> = operations.as_object().unwrap().keys().map(|verb| verb.to_uppercase()).collect();
        let response = send(&gateway, "BREW", &path, "", "").expect(405);
        response.problem();
        let mut allowed: Vec<&str> = response.field("allow").unwrap().split(", ").collect();
        allowed.retain(|method| *method != "HEAD");
        allowed.sort_unstable();
        assert_eq!(allowed, methods, "{path}");
    }
    for path in ["/v1/clients/", "/v1/clients/a/b/c/d", "//", "/v1", "/v1/limit/"] {
        send(&gateway, "GET", path, "", "").expect(404).problem();
    }
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_reset_is_recorded_with_its_token_and_the_counts_before_and_after() {
    let folder = TempDir::new();
    let log = folder.path().join("audit");
    let gateway = Gateway::start(&with_tokens(&folder, &format!("audit_log = {log:?}\n")));
    for _ in 0..3 {
        send(&gateway, "POST", "/v1/limit", &token("clients"), QUERY).expect(200);
    }
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "", "a decision of `/v1/limit` is counted, and not recorded");
    send(&gateway, "POST", "/v1/reset", &token("read"), QUERY).expect(403);
    send(&gateway, "POST", "/v1/reset", &token("operate"), QUERY).expect(200);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("secret-key"), "{text}");
    let [line] = &lines(&text)[..] else { panic!("{text}") };
    let what = &line["what"];
    assert_eq!((&line["who"], &what["operation"]), (&json!("of-operate"), &json!("reset")));
    assert_eq!(what["keys"][0]["rule"], "r");
    assert_eq!(line["before"], json!([{ "rule": "r", "name": "r", "count": 3 }]));
    assert_eq!(line["after"], json!([{ "rule": "r", "name": "r", "count": 0 }]));
    assert!(line["time"].as_str().unwrap().ends_with('Z'));
    // The file may be rotated between two changes.
    std::fs::remove_file(&log).unwrap();
    send(&gateway, "POST", "/v1/reset", &token("operate"), QUERY).expect(200);
    assert_eq!(lines(&std::fs::read_to_string(&log).unwrap()).len(), 1);
}

#[test]
fn a_change_that_cannot_be_recorded_is_refused() {
    let folder = TempDir::new();
    let log = folder.path().join("audit");
    let toml = with_tokens(&folder, &format!("audit_log = {log:?}\n"));
    std::fs::create_dir(&log).unwrap();
    let file = folder.write("gateway.toml", format!("[listen]\nhttp = \"127.0.0.1:0\"\n{toml}"));
    let (code, _, stderr) = run(&["run", "--config", file.to_str().unwrap()]);
    assert!(code == Some(1) && stderr.contains("cannot open the audit log"), "{stderr}");
    std::fs::remove_dir(&log).unwrap();
    let gateway = Gateway::start(&toml);
    std::fs::remove_file(&log).unwrap();
    std::fs::create_dir(&log).unwrap();
    send(&gateway, "POST", "/v1/limit", &token("operate"), QUERY).expect(200);
    send(&gateway, "POST", "/v1/reset", &token("operate"), QUERY).expect(503).problem();
    assert_eq!(send(&gateway, "POST", "/v1/value", &token("read"), QUERY).expect(200).json()["count"], 1);
}

/// `transom top` asks for lists, which need a token.
#[test]
fn top_sends_the_token_of_a_file() {
    let folder = TempDir::new();
    let process = Process::spawn(&with_tokens(&folder, ""));
    let admin = process.admin.to_string();
    let top = |more: &[&str]| run(&[&["top", "--once", "--admin", &admin], more].concat());
    let (code, _, message) = top(&[]);
    assert_eq!((code, message.contains("a token of `[admin]` is required")), (Some(1), true), "{message}");
    let file = folder.path().join("read").display().to_string();
    let (code, lists, message) = top(&["--token-file", &file]);
    assert_eq!((code, lists.contains('r')), (Some(0), true), "{message}");
    let (code, _, message) = top(&["--token-file", "nowhere"]);
    assert_eq!((code, message.contains("cannot read `nowhere`")), (Some(2), true), "{message}");
}

/// Generated requests of all endpoints get responses that the OpenAPI document describes, and each endpoint does what it is for at least
/// once.
#[test]
fn generated_requests_get_documented_responses() {
    let toml = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n\
                [access]\nfile = \"access.toml\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                [rules.r]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"1000/hour\", \"100/minute\"]\n\
                [rules.r.plans.gold]\nwindows = [\"2000/hour\"]\n\
                [rules.ip]\nkey = \"ip\"\nwindows = [\"100/hour\"]\n\
                [[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\", \"ip\"]\n";
    let key = Digest::of(b"key-0123456789abcdef");
    let scratch = TempDir::new();
    scratch.write("access.toml", "");
    scratch.write("clients.toml", format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{key}\"]\n"));
    let process = Process::spawn_command(Command::new(BINARY), toml, scratch);
    let names = json!({
        "name": ["acme", "beta", "gamma"], "client": ["acme", null], "as_client": ["acme", null], "plan": ["gold", "platinum"],
        "rule": ["r", "ip"], "key": ["192.0.2.7", "acme"], "id": [key.to_string()], "cost": [0, 1, 5, null],
        "url": ["http://localhost/a"], "network": ["203.0.113.0/24"], "networks": [["203.0.113.0/24"], []],
        "subjects": [["user-7"], []], "routes": [["all"], null], "for": ["1h", null], "until": [null],
        "window": ["hour"], "tokens": [5, 0], "Idempotency-Key": ["a", "\"b\""], "windows": [["50/day"], ["9/week", { "limit": 5, "period": "minute" }]],
    });
    let folder = TempDir::new();
    let url = format!("http://{}", process.admin);
    run_checks_of("openapi", folder.path(), "call_admin_api.py", &[url, names.to_string()]);
    let document = process.admin_get("/v1/openapi.json").expect(200).json();
    let metrics = process.metrics();
    let count =
        |path: &str, code: &str| metrics.sum("transom_admin_requests_total", &[("endpoint", path), ("code", code)]);
    // A stream does not end, and ids are chosen by the gateway: other tests call these.
    let is_called = |path: &&String| *path != "/v1/events" && !path.ends_with("/{id}");
    for path in document["paths"].as_object().unwrap().keys().filter(is_called) {
        let succeeded: u64 = ["200", "201", "204"].iter().map(|code| count(path, code)).sum();
        assert!(succeeded > 0, "no generated request to {path} succeeded");
        assert_eq!(count(path, "500"), 0, "{path}");
    }
}
