//! Rules by client: all keys, subjects and networks of a client share one counter.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::{Gateway, with_listen};
use crate::support::http2_client::Http2Client;
use crate::support::jwt_issuer::Issuer;
use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, one_rule};

const SECTION: &str = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n";

/// Rules by client and by address, on one route. `more`: settings of the rule by client.
fn config(more: &str) -> String {
    format!(
        "{SECTION}[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.c]\nkey = \"client\"\nwindows = [\"10/366d\"]\n{more}\n\
         plans.gold.windows = [\"100/366d\"]\nplans.silver.windows = [\"50/366d\", \"5/30d\"]\n\
         [rules.address]\nkey = \"ip\"\nwindows = [\"1000/366d\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"c\", \"address\"]\n"
    )
}

const REFUSE: &str = "on_missing_key = \"refuse\"";

/// A client with these keys, and further settings.
fn client_toml(name: &str, plan: &str, keys: &[&str], more: &str) -> String {
    let digests: Vec<String> = keys.iter().map(|key| format!("\"{}\"", Digest::of(key.as_bytes()))).collect();
    format!("[clients.{name}]\nplan = \"{plan}\"\napi_keys = [{}]\n{more}\n", digests.join(", "))
}

/// `acme` has three keys and a network, `beta` one key.
fn clients() -> String {
    client_toml("acme", "gold", &["a1", "a2", "a3"], "networks = [\"127.0.7.0/24\"]")
        + &client_toml("beta", "silver", &["b1"], "")
}

fn get(gateway: &Gateway, key: &str) -> HttpResponse {
    gateway.get_with("/a", &[("X-API-Key", key)])
}

fn live_counters(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_counters", &[("state", "live")])
}

#[test]
fn all_keys_and_networks_of_a_client_share_one_counter() {
    let gateway = Gateway::start_with(&config(REFUSE), &clients());
    for (left, key) in [(99, "a1"), (98, "a2"), (97, "a3"), (96, "a1")] {
        assert_eq!(remaining(&get(&gateway, key).expect(200), "c"), left, "{key}");
    }
    let by_network = gateway.get_from("127.0.7.9", &[]).expect(200);
    assert_eq!(remaining(&by_network, "c"), 95);
    assert_eq!(remaining(&get(&gateway, "b1").expect(200), "c-30d"), 4);
    // Of `acme` in one window, of `beta` in two, and of two addresses.
    assert_eq!(live_counters(&gateway), 5);
}

#[test]
fn a_key_of_no_client_is_refused_whatever_the_address() {
    let gateway = Gateway::start_with(&config(REFUSE), &clients());
    for address in ["127.0.0.1", "127.0.7.9"] {
        let unknown = gateway.get_from(address, &[("X-API-Key", "revoked")]).expect(401);
        assert_eq!(unknown.field("www-authenticate"), Some("Key"), "{address}");
        assert_eq!(items(&unknown, "ratelimit").len(), 1, "the rule by address counts");
    }
    assert_eq!(gateway.metrics().sum("transom_request_errors_total", &[("error", "key_unknown")]), 2);
    let mut http2 = Http2Client::connect(gateway.http);
    let fields = [("content-type", "application/grpc"), ("te", "trailers"), ("x-api-key", "revoked")];
    let grpc = http2.request_path("POST", "/a", &fields, b"").expect(200);
    assert_eq!((grpc.field("grpc-status"), grpc.field("www-authenticate")), (Some("16"), Some("Key")));
}

#[test]
fn a_key_of_no_client_can_count_as_missing() {
    let more = "on_missing_key = \"ip\"\non_unknown_key = \"missing\"";
    let gateway = Gateway::start_with(&config(more), &clients());
    // The network has a client, but the key has none: neither its counter nor its plan.
    for left in [9, 8] {
        let unknown = gateway.get_from("127.0.7.9", &[("X-API-Key", "revoked")]).expect(200);
        assert_eq!(remaining(&unknown, "c"), left);
    }
    assert_eq!(remaining(&get(&gateway, "a1").expect(200), "c"), 99);
    let gateway = Gateway::start_with(&config(&more.replace("\"ip\"", "\"skip\"")), &clients());
    assert_eq!(items(&get(&gateway, "revoked").expect(200), "ratelimit").len(), 1);
}

#[test]
fn a_subject_of_no_client_is_unknown_and_no_subject_is_missing() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let section = format!("{}{SECTION}subject = \"jwt:sub\"\n", issuer.keys(&scratch));
    let toml = config("on_missing_key = \"ip\"").replace(SECTION, &section);
    let clients = client_toml("acme", "gold", &["a1"], "subjects = [\"alice\", \"bob\"]\nnetworks = [\"127.0.0.0/8\"]");
    let gateway = Gateway::start_with(&toml, &clients);
    let request = |claims: Value| {
        let token = format!("Bearer {}", issuer.token("HS256", &claims));
        gateway.get_with("/a", &[("Authorization", &token)])
    };
    assert_eq!(remaining(&get(&gateway, "a1").expect(200), "c"), 99);
    assert_eq!(remaining(&request(json!({"sub": "alice"})).expect(200), "c"), 98);
    assert_eq!(remaining(&request(json!({"sub": "bob"})).expect(200), "c"), 97);
    // An unknown subject does not fall back to the client of the network.
    for claims in [json!({"sub": "eve"}), json!({"role": "admin"})] {
        let unknown = request(claims).expect(401);
        assert_eq!(unknown.field("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    }
    assert_eq!(remaining(&gateway.get("/a").expect(200), "c"), 96, "by the network");
}

#[test]
fn a_composite_key_counts_a_client_once_for_each_value() {
    let toml = config(REFUSE).replace("key = \"client\"", "key = [\"client\", \"path\"]");
    let gateway = Gateway::start_with(&toml, &clients());
    for (left, path, key) in [(99, "/x", "a1"), (98, "/x", "a2"), (99, "/y", "a2")] {
        assert_eq!(remaining(&gateway.get_with(path, &[("X-API-Key", key)]).expect(200), "c"), left, "{path}");
    }
}

#[test]
fn overrides_and_exemptions_name_clients() {
    let more =
        format!("{REFUSE}\nexemptions = [\"key:beta\"]\noverrides = [{{ key = \"acme\", windows = [\"3/366d\"] }}]");
    let gateway = Gateway::start_with(&config(&more), &clients());
    assert_eq!(remaining(&get(&gateway, "a1").expect(200), "c"), 2);
    assert_eq!(items(&get(&gateway, "b1").expect(200), "ratelimit").len(), 1);
}

#[test]
fn the_decision_api_counts_clients_by_name() {
    let gateway = Gateway::start_with(&config(REFUSE), &clients());
    let query =
        |operation: &str, key: &str| gateway.decision(operation, &json!({"rule": "c", "key": key})).expect(200).json();
    get(&gateway, "a1").expect(200);
    assert_eq!((&query("limit", "acme")["count"], &query("value", "acme")["limit"]), (&json!(2), &json!(100)));
    assert_eq!(query("limit", "nobody")["unknown_key"], true);
    query("reset", "acme");
    assert_eq!(remaining(&get(&gateway, "a2").expect(200), "c"), 99);
}

/// Sends requests from the network of `acme` with these keys, and replays the log. Returns the statuses and the report.
fn replay(toml: &str, format: &str, keys: &[Option<&str>]) -> (Vec<u16>, Value) {
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let toml = format!("{toml}[access_log]\nfile = \"{}\"\nformat = \"{format}\"\n", log.display());
    let gateway = Gateway::start_with(&toml, &clients());
    let send = |key: &Option<&str>| match key {
        Some(key) => gateway.get_from("127.0.7.9", &[("X-API-Key", key)]).status,
        None => gateway.get_from("127.0.7.9", &[]).status,
    };
    let statuses: Vec<u16> = keys.iter().map(send).collect();
    let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    eventually("all requests are logged", || lines() == statuses.len());
    scratch.write("gateway.toml", with_listen(&toml));
    scratch.write("clients.toml", clients());
    let replay = Command::new(BINARY).args(["simulate", "--json", "access.log"]).current_dir(scratch.path()).output();
    (statuses, serde_json::from_slice(&replay.unwrap().stdout).unwrap())
}

#[test]
fn a_replay_of_the_log_decides_as_the_gateway_did() {
    let toml = config(REFUSE).replace("100/366d", "7/366d");
    let keys: Vec<Option<&str>> = (0..30).map(|n| Some(["a1", "a2", "a3", "b1", "revoked"][n % 5])).collect();
    let keys = [&keys[..], &[None; 3]].concat();
    let (statuses, report) = replay(&toml, "json", &keys);
    let count = |status: u16| statuses.iter().filter(|found| **found == status).count();
    // Of `acme`, 18 requests with keys and 3 by network; of `beta`, 6.
    assert_eq!((count(200), count(429), count(401)), (7 + 5, 14 + 1, 6));
    let found = &report["scenarios"][0]["rules"][0];
    assert_eq!(report["as_logged"]["different"], 0, "{report:#}");
    assert_eq!((&found["admitted"], &found["refused"]), (&json!(12), &json!(15)), "{report:#}");
    assert_eq!((&found["keys"]["total"], &found["keys"]["refused"]), (&json!(2), &json!(2)), "{report:#}");

    // Revoked keys, which the rule by client refuses or skips, and in the end the rule by address. The network is that of `acme`.
    let keys = [Some("a1"), None, Some("revoked"), Some("revoked"), None, Some("revoked"), Some("revoked")];
    let skip = "on_missing_key = \"skip\"\non_unknown_key = \"missing\"";
    for (more, format, unknown) in [(REFUSE, "json", 401), (skip, "json", 200), (REFUSE, "combined", 401)] {
        let toml = config(more).replace("1000/366d", "6/366d");
        let (statuses, report) = replay(&toml, format, &keys);
        assert_eq!(statuses, [200, 200, unknown, unknown, 200, unknown, 429], "{more} {format}");
        let rules = &report["scenarios"][0]["rules"];
        let found = |rule: usize| ["requests", "admitted", "refused"].map(|name| rules[rule][name].clone());
        let expected = ([json!(3), json!(3), json!(0)], [json!(7), json!(6), json!(1)]);
        assert_eq!((found(0), found(1)), expected, "{more} {format} {report:#}");
    }
}

#[test]
fn check_notes_what_counts_or_stores_keys_badly() {
    let scratch = TempDir::new();
    let by_key = config(REFUSE).replace("key = \"client\"", "key = \"header:x-api-key\"");
    scratch.write("clients.toml", clients());
    let notes = |toml: &str| {
        scratch.write("gateway.toml", with_listen(toml));
        let checked =
            Command::new(BINARY).args(["check", "gateway.toml"]).current_dir(scratch.path()).output().unwrap();
        let out = String::from_utf8(checked.stdout).unwrap();
        assert!(checked.status.success(), "{out}");
        let notes = ["note: counts each API key", "write `api_key = \"bearer\"`", "tokens in clear text"];
        notes.map(|note| out.lines().filter(|line| line.contains(note)).count())
    };
    assert_eq!((notes(&by_key), notes(&config(REFUSE))), ([1, 0, 0], [0, 0, 0]));
    let with_scheme = config(REFUSE).replace("header:x-api-key", "header:authorization");
    let in_clear = config(REFUSE).replace(SECTION, &format!("{SECTION}subject = \"bearer\"\n"));
    assert_eq!((notes(&with_scheme), notes(&in_clear)), ([0, 1, 0], [0, 0, 1]));
}

#[test]
fn a_bearer_token_is_an_api_key() {
    let toml = config(REFUSE).replace("\"header:x-api-key\"", "\"bearer\"");
    let gateway = Gateway::start_with(&toml, &clients());
    let request = |text: &str| gateway.get_with("/a", &[("Authorization", text)]);
    for (left, text) in [(99, "Bearer a1"), (98, "bearer a2"), (97, "BEARER  a3"), (96, "Bearer a1 ")] {
        assert_eq!(remaining(&request(text).expect(200), "c"), left, "{text}");
    }
    let unknown = request("Bearer guess").expect(401);
    assert_eq!(unknown.field("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    // `[jwt]` is not configured: what looks like a token is a key of no client.
    request("Bearer eyJhbGciOiJIUzI1NiJ9.e30.c2ln").expect(401);
    gateway.get_with("/a", &[("Authorization", "Bearer a1"), ("Authorization", "Bearer a2")]).expect(400);
    request("Bearer caf\u{e9}").expect(400);
    let text = gateway.get_with("/a", &[("Authorization", "Bearer a1"), ("Connection", "authorization")]).expect(200);
    assert!(text.text().to_lowercase().contains("authorization"), "the upstream gets it");
}

#[test]
fn a_bearer_token_is_a_key_part() {
    let rule = "key = \"bearer\"\non_missing_key = \"skip\"\nwindows = [\"10/366d\"]";
    let gateway = Gateway::start(&one_rule(rule));
    for (left, text) in [(9, "Bearer one"), (8, "bearer one"), (9, "Bearer two")] {
        let response = gateway.get_with("/a", &[("Authorization", text)]).expect(200);
        assert_eq!(remaining(&response, "r"), left, "{text}");
    }
    for text in ["Basic one", "Bearer", "Bearer "] {
        let response = gateway.get_with("/a", &[("Authorization", text)]).expect(200);
        assert_eq!(response.field("ratelimit"), None, "{text}");
    }
    assert_eq!(gateway.decision("value", &json!({"rule": "r", "key": "one"})).expect(200).json()["count"], 2);
}

#[test]
fn the_first_part_that_a_request_has_is_its_api_key() {
    let toml = config(REFUSE).replace("\"header:x-api-key\"", "[\"header:x-api-key\", \"bearer\", \"query:key\"]");
    let gateway = Gateway::start_with(&toml, &clients());
    let request = |target: &str, fields: &[(&str, &str)]| gateway.get_with(target, fields);
    let (acme, beta) = (("X-API-Key", "a1"), ("Authorization", "Bearer b1"));
    assert_eq!(remaining(&request("/a", &[acme, beta]).expect(200), "c"), 99);
    assert_eq!(remaining(&request("/a?key=a1", &[beta]).expect(200), "c-30d"), 4);
    assert_eq!(remaining(&request("/a?key=a2", &[]).expect(200), "c"), 98);
    // The first one decides, also if it is unknown.
    let unknown = request("/a", &[("X-API-Key", "guess"), beta]).expect(401);
    assert_eq!(unknown.field("www-authenticate"), Some("Key"));
}

#[test]
fn tokens_and_opaque_keys_come_in_one_field() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let section = format!("{}{SECTION}subject = \"jwt:sub\"\n", issuer.keys(&scratch));
    let toml = config(REFUSE).replace(SECTION, &section).replace("\"header:x-api-key\"", "\"bearer\"");
    let toml = toml
        + "[rules.t]\nkey = \"jwt:sub\"\non_missing_key = \"skip\"\nwindows = [\"7/366d\"]\n\
           [[routes]]\npath = \"/by-token\"\nupstream = \"u\"\nrules = [\"c\", \"t\"]\n\
           [rules.n]\nkey = \"ip\"\nwindows = [\"500/366d\"]\nplans.gold.windows = [\"600/366d\"]\n\
           [[routes]]\npath = \"/by-address\"\nupstream = \"u\"\nrules = [\"n\"]\n";
    let token = issuer.token("HS256", &json!({"sub": "carol"}));
    // An opaque key may look like a token, and a token may be registered as a key.
    let clients = client_toml("acme", "gold", &["a1", "eyJh.b.c", &token], "subjects = [\"alice\"]")
        + &client_toml("beta", "silver", &["b1"], "subjects = [\"carol\"]");
    let gateway = Gateway::start_with(&toml, &clients);
    let request = |token: &str| gateway.get_with("/a", &[("Authorization", &format!("Bearer {token}"))]);
    let of = |claims: Value| issuer.token("HS256", &claims);
    for (left, token) in [(99, "a1"), (98, "eyJh.b.c"), (97, &token), (96, &of(json!({"sub": "alice"})))] {
        assert_eq!(remaining(&request(token).expect(200), "c"), left, "{token}");
    }
    assert_eq!(remaining(&request(&of(json!({"sub": "carol", "n": 1}))).expect(200), "c-30d"), 4);
    let detail = |token: &str| request(token).expect(401).problem()["detail"].as_str().unwrap().to_owned();
    for unknown in ["guess", "eyJh.b.d", "x.y.z", &of(json!({"sub": "eve"})), &of(json!({}))] {
        assert!(detail(unknown).contains("not known here"), "{unknown}");
    }
    // To a rule by address, an opaque key that no client has is no malformed token.
    let by_address = |key: &str| gateway.get_with("/by-address", &[("Authorization", &format!("Bearer {key}"))]);
    assert_eq!(["a1", "guess", "x.y.z"].map(|key| remaining(&by_address(key).expect(200), "n")), [599, 498, 497]);
    // To a rule by a claim, an API key is no token.
    let by_token = |token: &str| gateway.get_with("/by-token", &[("Authorization", &format!("Bearer {token}"))]);
    assert_eq!(remaining(&by_token("a1").expect(200), "c"), 95);
    assert_eq!(remaining(&by_token(&of(json!({"sub": "alice"}))).expect(200), "t"), 6);
    let expired = of(json!({"sub": "alice", "exp": 1}));
    assert_eq!(detail(&expired), "the token has expired");
    let forged = Issuer::new().token("HS256", &json!({"sub": "alice"}));
    assert_eq!(detail(&forged), "the token's signature is not valid");
    assert_eq!(gateway.metrics().sum("transom_request_errors_total", &[("error", "token")]), 2);
}

#[test]
fn a_401_without_credentials_states_what_the_api_needs() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let section = format!("{}{SECTION}subject = \"jwt:sub\"\n", issuer.keys(&scratch));
    let both = config(REFUSE).replace(SECTION, &section);
    let token = "a token in the field authorization, after `Bearer`";
    let basic = SECTION.replace("api_key = \"header:x-api-key\"", "subject = \"basic-user\"");
    for (toml, keys, needs, challenge) in [
        (config(REFUSE), "api_keys", "an API key in the field x-api-key", "Key"),
        (
            config(REFUSE).replace("\"header:x-api-key\"", "[\"cookie:k\", \"bearer\", \"query:k\"]"),
            "api_keys",
            "an API key in the cookie k or an API key in the field authorization, after `Bearer` or an API key in the \
             parameter k of the query",
            "Key, Bearer realm=\"gateway\"",
        ),
        (both, "api_keys", &format!("an API key in the field x-api-key or {token}"), "Key, Bearer realm=\"gateway\""),
        (
            config(REFUSE).replace(SECTION, &basic),
            "subjects",
            "a user name in the field authorization, after `Basic`",
            "Basic realm=\"gateway\"",
        ),
    ] {
        let clients = format!("[clients.acme]\nplan = \"gold\"\n{keys} = [\"{}\"]\n", Digest::of(b"a1"));
        let gateway = Gateway::start_with(&toml, &clients);
        let missing = gateway.get("/a").expect(401);
        assert_eq!(missing.problem()["detail"], format!("this API needs {needs}"));
        assert_eq!(missing.field("www-authenticate"), Some(challenge));
    }
    // Nothing that a request could add.
    let networks = config(REFUSE).replace("api_key = \"header:x-api-key\"\n", "");
    let gateway = Gateway::start_with(&networks, "[clients.acme]\nplan = \"gold\"\nnetworks = [\"10.0.0.0/8\"]\n");
    let missing = gateway.get("/a").expect(400);
    assert_eq!(missing.problem()["detail"], "neither the address nor a certificate belongs to a client of this API");
    assert_eq!(missing.field("www-authenticate"), None);
}

#[test]
fn a_token_names_the_plan_of_a_subject_without_client() {
    let issuer = Issuer::new();
    let scratch = TempDir::new();
    let section = format!("{}{SECTION}subject = \"jwt:sub\"\nplan = \"jwt:plan\"\n", issuer.keys(&scratch));
    let toml = config(REFUSE).replace(SECTION, &section).replace("rules = [\"c\"", "rules = [\"c\", \"s\"")
        + "[rules.s]\nkey = \"jwt:sub\"\non_missing_key = \"skip\"\non_unknown_key = \"refuse\"\nwindows = [\"10/366d\"]\n\
           plans.gold.windows = [\"200/366d\"]\n";
    let clients = client_toml("acme", "silver", &["a1"], "subjects = [\"alice\"]\nnetworks = [\"127.0.0.0/8\"]")
        + &client_toml("dave", "silver", &["d1"], "");
    let process = Process::spawn_with(&toml, &clients);
    let request = |claims: Value| {
        let token = issuer.token("HS256", &claims);
        process.client().get_with("/a", &[("Authorization", &format!("Bearer {token}"))])
    };
    for left in [99, 98] {
        let found = request(json!({"sub": "dave", "plan": "gold"})).expect(200);
        assert_eq!((remaining(&found, "c"), remaining(&found, "s")), (left, left + 100), "the plan of the token");
    }
    // A client of the name of a subject has another counter, and a subject of a client has the plan of the client.
    let by_key = process.client().get_with("/a", &[("X-API-Key", "d1")]).expect(200);
    assert_eq!(remaining(&by_key, "c-30d"), 4);
    assert_eq!(remaining(&request(json!({"sub": "alice", "plan": "gold"})).expect(200), "c-30d"), 4);
    for claims in [json!({"sub": "eve"}), json!({"sub": "eve", "plan": "platinum"}), json!({"plan": "gold"})] {
        for _ in 0..2 {
            let unknown = request(claims.clone()).expect(401);
            assert_eq!(unknown.field("www-authenticate"), Some("Bearer error=\"invalid_token\""), "{claims}");
        }
    }
    let log = process.wait_for_stderr("a token names a plan that no rule defines");
    assert_eq!(log.matches("platinum").count(), 1, "{log}");
    let query = json!({"rule": "c", "key": "subject:dave"}).to_string();
    let ask = |operation: &str| {
        let target = format!("/v1/{operation}");
        Client::connect(process.admin).request("POST", &target, &[("Host", "127.0.0.1")], query.as_bytes())
    };
    assert_eq!(ask("value").expect(200).json()["count"], 2);
    // Only a token tells the plan: without one, no windows apply.
    let decided = ask("limit").expect(200).json();
    assert_eq!((&decided["allowed"], &decided["unknown_key"]), (&json!(false), &json!(true)), "{decided}");
    assert_eq!(ask("value").expect(200).json()["count"], 2);
}

/// A session cookie names the subject: whoever has it is that client.
#[test]
fn subjects_that_are_secrets_are_listed_as_digests() {
    let section = format!("{SECTION}subject = \"cookie:sid\"\n");
    let clients = client_toml("acme", "gold", &["a1"], "subjects = [\"s3cret\"]");
    let gateway = Gateway::start_with(&config(REFUSE).replace(SECTION, &section), &clients);
    gateway.get_with("/a", &[("Cookie", "sid=s3cret")]).expect(200);
    for path in ["/v1/clients", "/v1/clients/acme"] {
        let answer =
            Client::connect(gateway.admin).get_with(path, &[("Host", "127.0.0.1")]).expect(200).json().to_string();
        assert!(answer.contains("sha256:") && !answer.contains("s3cret"), "{answer}");
    }
}

#[test]
fn the_upstream_learns_the_client_and_its_plan() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let section = format!("{}{SECTION}subject = \"jwt:sub\"\nplan = \"jwt:plan\"\n", issuer.keys(&scratch));
    let changes =
        "request_headers = { set = { x-client = \"<{client}>\" }, add = { x-plan = \"<{plan}>\", x-more = \"1\" } }\n";
    let toml = config(REFUSE).replace(SECTION, &section).replace("rules = [\"c\", \"address\"]", changes);
    let upstream = Upstream::always(200);
    let toml = toml.replace("[upstreams.u]\nbuiltin = \"echo\"\n", &upstream.toml("u"));
    let gateway = Gateway::start_with(&toml, &clients());
    let seen = |fields: &[(&str, &str)]| {
        let outside = [("x-client", "evil"), ("X-Plan", "evil"), ("x-plan", "worse"), ("x-more", "0")];
        gateway.get_with("/a", &[&outside, fields].concat()).expect(200);
        let received = upstream.received();
        let values = |name: &str| received.last().unwrap().values(name);
        assert_eq!(values("x-more"), ["0", "1"]);
        (values("x-client").join(","), values("x-plan").join(","))
    };
    let pair = |client: &str, plan: &str| (format!("<{client}>"), format!("<{plan}>"));
    assert_eq!(seen(&[("X-API-Key", "a2")]), pair("acme", "gold"));
    assert_eq!(seen(&[("X-API-Key", "guess")]), pair("", ""));
    assert_eq!(seen(&[]), pair("", ""));
    let token = |claims: Value| format!("Bearer {}", issuer.token("HS256", &claims));
    let of_token = token(json!({"sub": "eve", "plan": "silver"}));
    assert_eq!(seen(&[("Authorization", &of_token)]), pair("", "silver"));
    assert_eq!(seen(&[("Authorization", "Bearer forged")]), pair("", ""));
}

#[test]
fn the_admin_api_asks_about_clients_by_name() {
    let toml = config(REFUSE).replace("rules = [\"c\"", "rules = [\"c\", \"p\"")
        + "[rules.p]\nkey = [\"client\", \"path\"]\non_missing_key = \"skip\"\nwindows = [\"20/366d\"]\n";
    let gateway = Gateway::start_with(&toml, &clients());
    let count = |operation: &str, query: Value| gateway.decision(operation, &query).expect(200).json()["count"].clone();
    get(&gateway, "a1").expect(200);
    assert_eq!(count("limit", json!({"rule": "c", "client": "acme", "cost": 2})), 3);
    assert_eq!(count("value", json!({"rule": "c", "client": "acme"})), 3);
    assert_eq!(count("check", json!({"rule": "p", "client": "acme", "key": ["/a"]})), 1);
    assert_eq!(count("reset", json!({"rule": "p", "client": "acme", "key": "/a"})), 0);
    let both = json!({"rules": [{"rule": "c", "client": "acme"}, {"rule": "p", "client": "acme", "key": "/b"}]});
    assert_eq!(gateway.decision("limit", &both).expect(200).json()["allowed"], true);
    for (status, query, detail) in [
        (404, json!({"rule": "c", "client": "acne"}), "unknown client `acne`"),
        (404, json!({"rule": "d", "client": "acme"}), "unknown rule `d`"),
        (400, json!({"rule": "address", "client": "acme"}), "has no part `client`"),
        (400, json!({"rule": "c", "client": "acme", "key": "/a"}), "is the client alone"),
        (400, json!({"rule": "p", "client": "acme"}), "beside the client, the key of this rule consists of `path`"),
        (400, json!({"rule": "c", "client": 1}), "is not the name of a client"),
        (400, json!({"rule": "c", "client": "acme", "id": "0123456789abcdef"}), "both given"),
    ] {
        let refused = gateway.decision("value", &query).expect(status).problem();
        assert!(refused["detail"].as_str().unwrap().contains(detail), "{query}: {refused}");
    }
    let question = |name: &str| json!({"url": "http://a/a", "client": "192.0.2.1", "as_client": name});
    let explained = gateway.decision("explain", &question("acme")).expect(200).json();
    assert_eq!((&explained["client"]["name"], &explained["request"]["client"]), (&json!("acme"), &json!("192.0.2.1")));
    assert_eq!(explained["rules"][0]["windows"][0]["count"], 4);
    gateway.decision("explain", &question("nobody")).expect(404);

    for _ in 0..6 {
        get(&gateway, "b1");
    }
    let admin = |target: &str| Client::connect(gateway.admin).get_with(target, &[("Host", "127.0.0.1")]);
    let listed = admin("/v1/clients").expect(200).json();
    let names: Vec<&Value> = listed["clients"].as_array().unwrap().iter().map(|client| &client["name"]).collect();
    assert_eq!(names, ["acme", "beta"]);
    let names = |query: &str| {
        let page = admin(&format!("/v1/clients?{query}")).expect(200).json();
        let names = page["clients"].as_array().unwrap().iter().map(|client| client["name"].clone());
        (names.collect::<Vec<Value>>(), page["next"].clone(), page["total"].clone())
    };
    assert_eq!(names("limit=1"), (vec![json!("acme")], json!("acme"), json!(2)));
    let last = (vec![json!("beta")], Value::Null, json!(2));
    for query in ["limit=1&after=acme", "after=acne", "plan=silver", "search=BE+silver"] {
        assert_eq!(names(query), last, "{query}");
    }
    assert_eq!(names("plan=silver&search=acme"), (vec![], Value::Null, json!(2)));
    for query in ["limit=1001", "limit=0", "limit=x", "after=a&after=b"] {
        admin(&format!("/v1/clients?{query}")).expect(400).problem();
    }
    let beta = admin("/v1/clients/beta").expect(200).json();
    assert_eq!((&beta["plan"], beta["keys"].as_array().unwrap().len()), (&json!("silver"), 1));
    assert!(!beta.to_string().contains(&Digest::of(b"b1").to_string()), "{beta}");
    let rule = &beta["rules"][0];
    assert_eq!((&rule["rule"], &rule["windows"][1]["name"]), (&json!("c"), &json!("c-30d")));
    assert_eq!((&rule["windows"][1]["count"], &rule["windows"][1]["limit"]), (&json!(5), &json!(5)));
    assert_eq!((&beta["rules"][1]["rule"], &beta["rules"][1]["windows"]), (&json!("p"), &Value::Null));
    assert_eq!((&beta["refused"][0]["rule"], &beta["refused"][0]["count"]), (&json!("c"), &json!(1)));
    admin("/v1/clients/nobody").expect(404);
    assert_eq!(Client::connect(gateway.admin).post("/v1/clients/beta", String::new()).status, 405);

    // The commands ask the gateway.
    let scratch = TempDir::new();
    let admin_address = format!("http = \"127.0.0.1:0\"\nadmin = \"{}\"\n", gateway.admin);
    scratch.write("gateway.toml", format!("[listen]\n{admin_address}{toml}"));
    scratch.write("clients.toml", clients());
    let run = |arguments: &[&str]| {
        let output = Command::new(BINARY).args(arguments).current_dir(scratch.path()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, out) = run(&["clients", "show", "beta"]);
    assert!(code == Some(0) && out.contains("c-30d   5 of 5 used, 0 left"), "{out}");
    assert!(out.contains("refused by rule `c` since ") && out.trim_end().ends_with(": 1"), "{out}");
    let (_, out) = run(&["clients", "show", "beta", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["rules"][0]["windows"][1]["count"], 5);
    assert_eq!(run(&["clients", "show", "nobody"]).0, Some(2));
    let (code, out) = run(&["explain", "--as-client", "beta", "http://127.0.0.1/a"]);
    assert!(
        code == Some(0) && out.contains("client `beta` of plan `silver`") && out.contains("refused with 429"),
        "{out}"
    );
    gateway.stop();
    let (code, out) = run(&["clients", "show", "acme"]);
    assert!(code == Some(0) && out.contains("plan:     gold") && !out.contains("rule"), "{out}");
    let (code, out) = run(&["explain", "--as-client", "acme", "http://127.0.0.1/a"]);
    assert!(code == Some(0) && out.contains("client `acme` of plan `gold`"), "{out}");
}
