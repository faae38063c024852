//! Deny entries and allow lists: who gets 403, what is counted, logged and explained, and when entries end.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::{Gateway, START_S, with_listen};
use crate::support::http2_client::Http2Client;
use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_client::{RatelimitClient, descriptor, is_ok};
use crate::support::ratelimit_parser::remaining;
use crate::support::{TempDir, eventually, one_rule};

const SECTIONS: &str = "[access]\nfile = \"access.toml\"\n\
                        [clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n";

/// A rule by address on the routes `login` and `all`. `more`: settings of `all`.
fn config(more: &str) -> String {
    format!(
        "{SECTIONS}[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.r]\nkey = \"ip\"\nwindows = [\"100/366d\"]\nplans.gold.windows = [\"1000/366d\"]\n\
         [[routes]]\nname = \"login\"\npath = \"/login\"\nupstream = \"u\"\nrules = [\"r\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n{more}\n"
    )
}

fn clients() -> String {
    let digest = Digest::of(b"key-of-acme");
    format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{digest}\"]\nnetworks = [\"127.0.7.0/24\"]\n")
}

fn start(toml: &str, access: &str) -> Gateway {
    Gateway::start_with_files(toml, &[("access.toml", access), ("clients.toml", &clients())])
}

fn deny(settings: &str) -> String {
    format!("[[deny]]\n{settings}\n")
}

fn seconds_later(seconds: u64) -> String {
    jiff::Timestamp::from_second((START_S + seconds).cast_signed()).unwrap().to_string()
}

#[track_caller]
fn assert_denied(response: &HttpResponse) {
    assert_eq!(response.status, 403, "{}", response.text());
    assert_eq!(response.field("content-type"), Some("application/problem+json"));
    let problem = response.problem();
    assert_eq!(
        problem,
        json!({ "type": "about:blank", "title": "Forbidden", "status": 403, "detail": "access is denied" })
    );
    assert_eq!(response.field("ratelimit"), None, "no rule counts the request");
}

#[test]
fn networks_clients_and_values_are_denied_before_rules_count() {
    let secret = Digest::of(b"key-of-beta");
    let access = deny("network = \"127.0.3.0/24\"\nreason = \"scraper\"")
        + &deny("client = \"acme\"")
        + &deny("key = { part = \"header:x-device\", value = \"a1b2\" }")
        + &deny(&format!("key = {{ part = \"header:x-api-key\", value = \"{secret}\" }}"));
    let gateway = start(&config(""), &access);
    let get = |address: &str, fields: &[(&str, &str)]| gateway.get_from(address, fields);
    assert_denied(&get("127.0.3.9", &[]));
    assert_denied(&get("127.0.7.9", &[]));
    // Whatever the key, an address of a denied client is denied.
    assert_denied(&get("127.0.7.9", &[("X-API-Key", "unknown")]));
    assert_denied(&get("127.0.0.1", &[("X-API-Key", "key-of-acme")]));
    assert_denied(&get("127.0.0.1", &[("X-Device", "a1b2")]));
    assert_denied(&get("127.0.0.1", &[("X-API-Key", "key-of-beta")]));
    // A server may read the other value.
    get("127.0.0.1", &[("X-Device", "other"), ("X-Device", "a1b2")]).expect(400);
    assert_eq!(remaining(&get("127.0.0.1", &[("X-Device", "A1B2"), ("X-API-Key", "other")]).expect(200), "r"), 99);
    let metrics = gateway.metrics();
    let counts = |name: &str, label: (&str, &str)| metrics.sum(name, &[label]);
    assert_eq!(metrics.sum("transom_denied_total", &[]), 6);
    // The first digits of `printf 127.0.3.0/24 | sha256sum`, and of `printf client:acme | sha256sum`.
    let id = |text: &str| Digest::of(text.as_bytes()).to_string()[Digest::PREFIX.len()..][..12].to_owned();
    assert_eq!(counts("transom_denied_total", ("entry", &id("127.0.3.0/24"))), 1);
    assert_eq!(counts("transom_denied_total", ("entry", &id("client:acme"))), 3);
    assert_eq!(counts("transom_request_errors_total", ("error", "denied")), 6);
    assert_eq!(metrics.sum("transom_requests_total", &[("route", "all"), ("code", "403")]), 6);
    assert_eq!(metrics.sum("transom_decisions_total", &[("rule", "r")]), 1);
}

#[test]
fn an_entry_applies_to_its_routes_until_it_ends() {
    let access = deny(&format!("network = \"127.0.3.0/24\"\nuntil = \"{}\"", seconds_later(60)))
        + &deny("network = \"127.0.0.0/16\"\nroutes = [\"login\"]")
        + &deny("network = \"127.0.3.7\"\nroutes = [\"login\"]");
    let gateway = start(&config(""), &access);
    let login = || gateway.get("/login");
    let all = |address: &str| gateway.get_from(address, &[]);
    assert_denied(&login());
    all("127.0.0.1").expect(200);
    // The entry of the narrower network is for another route.
    assert_denied(&all("127.0.3.7"));
    gateway.advance_s(59);
    assert_denied(&all("127.0.3.7"));
    gateway.advance_s(1);
    all("127.0.3.7").expect(200);
    assert_denied(&login());
}

#[test]
fn an_allow_list_lets_only_its_networks_and_clients_in() {
    let more = "allow = [\"127.0.5.0/24\", \"192.0.2.0/24\", \"client:acme\"]";
    // Behind a proxy, the address of the client counts, and not that of the proxy.
    let toml = config(more).replace("127.0.5.0/24", "127.0.5.0/25");
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = \"127.0.5.77\"\n\
                  [admin]\nhosts = [\"127.0.0.1\", \"localhost\", \"gateway.test\"]\n";
    let gateway = start(&format!("{listen}{toml}"), &deny("network = \"127.0.5.13\""));
    let get = |address: &str, fields: &[(&str, &str)]| gateway.get_from(address, fields);
    get("127.0.5.1", &[]).expect(200);
    assert_denied(&get("127.0.0.1", &[]));
    assert_denied(&get("127.0.5.13", &[]));
    get("127.0.7.1", &[]).expect(200);
    get("127.0.0.1", &[("X-API-Key", "key-of-acme")]).expect(200);
    // A revoked key is not rescued by a network.
    assert_denied(&get("127.0.7.1", &[("X-API-Key", "revoked")]));
    get("127.0.5.77", &[("X-Forwarded-For", "192.0.2.9")]).expect(200);
    assert_denied(&get("127.0.5.77", &[("X-Forwarded-For", "198.51.100.9")]));
    assert_denied(&get("127.0.0.1", &[("X-Forwarded-For", "192.0.2.9")]));
    gateway.get("/login").expect(200);
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_denied_total", &[("entry", "allow")]), 4);
    assert_eq!(metrics.sum("transom_denied_total", &[]), 5);
}

#[test]
fn an_allow_list_needs_no_access_file() {
    let toml = format!("{}allow = \"127.0.5.0/24\"\n", one_rule("key = \"ip\"\nwindows = [\"100/366d\"]"));
    let gateway = Gateway::start(&toml);
    gateway.get_from("127.0.5.1", &[]).expect(200);
    assert_denied(&gateway.get_from("127.0.0.1", &[]));
}

#[test]
fn grpc_clients_get_permission_denied() {
    let gateway = start(&config(""), &deny("key = { part = \"header:x-device\", value = \"a1b2\" }"));
    let mut http2 = Http2Client::connect(gateway.http);
    let fields = [("content-type", "application/grpc"), ("te", "trailers"), ("x-device", "a1b2")];
    let response = http2.request_path("POST", "/a", &fields, b"").expect(200);
    assert_eq!(response.field("grpc-status"), Some("7"));
}

#[test]
fn queries_about_denied_callers_are_not_allowed() {
    let more = "[rules.c]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"9/366d\"]\n";
    let toml = config("").replace("[rules.r]", &format!("{more}[rules.r]"));
    let access = deny(&format!("network = \"203.0.113.0/24\"\nuntil = \"{}\"", seconds_later(600)))
        + &deny("client = \"acme\"")
        + &deny("network = \"0.0.0.0/0\"\nroutes = [\"login\"]");
    let gateway = start(&toml, &access);
    let ask = |operation: &str, query: Value| -> Value {
        serde_json::from_str(&gateway.decision(operation, &query).expect(200).text()).unwrap()
    };
    let address = json!({ "rule": "r", "key": "203.0.113.7" });
    for operation in ["limit", "check"] {
        let answer = ask(operation, address.clone());
        assert_eq!(
            (&answer["allowed"], &answer["count"], &answer["retry_after"]),
            (&json!(false), &json!(0), &json!(600))
        );
        assert!(answer["denied_by"].as_str().is_some_and(|id| id.len() == 12), "{answer}");
    }
    let client = ask("limit", json!({ "rule": "c", "client": "acme" }));
    assert_eq!((&client["allowed"], &client["retry_after"]), (&json!(false), &Value::Null));
    assert_eq!(ask("value", address.clone())["allowed"], true, "a value is read");
    // An entry for some routes says nothing of a query, which has no route.
    assert_eq!(ask("limit", json!({ "rule": "r", "key": "192.0.2.1" }))["allowed"], true);
    gateway.advance_s(600);
    assert_eq!(ask("limit", address)["count"], 1);
}

#[test]
fn descriptors_of_denied_callers_are_over_the_limit() {
    let toml = "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", ratelimit_service = \"127.0.0.1:0\" }\n\
                [access]\nfile = \"access.toml\"\n\
                [rules.per-address]\ndescriptor = { domain = \"api\", entries = [\"remote_address\"] }\nwindows = [\"3/minute\"]\n";
    let gateway = Gateway::start_with_files(toml, &[("access.toml", &deny("network = \"203.0.113.0/24\""))]);
    let mut client = RatelimitClient::connect(gateway.ratelimit_service_addresses()[0]);
    let mut ask = |address: &str| is_ok(&client.ask(&[descriptor(&[("remote_address", address)])]));
    assert!(!ask("203.0.113.7") && ask("203.0.114.7"));
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_denied_total", &[]), 1);
    assert_eq!(metrics.sum("transom_decisions_total", &[("rule", "per-address")]), 1);
}

#[test]
fn an_explanation_names_the_entry() {
    let access = deny(&format!("network = \"127.0.3.0/24\"\nuntil = \"{}\"\nreason = \"scraper\"", seconds_later(60)))
        + &deny("client = \"acme\"");
    let gateway = start(&config("allow = [\"127.0.0.0/8\"]"), &access);
    let explain = |question: Value| -> Value {
        serde_json::from_str(&gateway.decision("explain", &question).expect(200).text()).unwrap()
    };
    let denied = explain(json!({ "url": "http://a.test/x", "client": "127.0.3.9" }));
    assert_eq!((&denied["decision"], &denied["status"]), (&json!("denied"), &json!(403)));
    let id = denied["denied_by"].as_str().unwrap();
    let reason = format!("deny entry {id} denies `127.0.3.0/24` until {}: scraper", seconds_later(60));
    assert_eq!(denied["reason"], json!(reason));
    assert_eq!((&denied["route"]["name"], &denied["rules"]), (&json!("all"), &json!([])));
    let client = explain(json!({ "url": "http://a.test/x", "as_client": "acme" }));
    assert!(client["reason"].as_str().unwrap().ends_with(" denies `client:acme`"), "{client}");
    let not_allowed = explain(json!({ "url": "http://a.test/x", "client": "192.0.2.1" }));
    assert_eq!((&not_allowed["decision"], &not_allowed["denied_by"]), (&json!("denied"), &json!("allow")));
    let admitted = explain(json!({ "url": "http://a.test/x", "client": "127.0.0.1" }));
    assert_eq!((&admitted["decision"], &admitted["denied_by"]), (&json!("admitted"), &Value::Null));
}

#[test]
fn the_log_names_the_entry_and_a_replay_counts_denied_requests() {
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let toml = format!("{}[access_log]\nfile = \"{}\"\n", config("allow = [\"127.0.0.0/20\"]"), log.display());
    let secret = Digest::of(b"hunter2hunter2");
    let access = deny("network = \"127.0.3.0/24\"\nreason = \"scraper\"")
        + &deny(&format!("key = {{ part = \"header:x-api-key\", value = \"{secret}\" }}"));
    let gateway = start(&toml, &access);
    assert_denied(&gateway.get_from("127.0.3.9", &[]));
    assert_denied(&gateway.get_from("127.0.0.9", &[("X-API-Key", "hunter2hunter2")]));
    assert_denied(&gateway.get_from("127.0.99.9", &[]));
    (0..4).for_each(|_| drop(gateway.get_from("127.0.0.9", &[]).expect(200)));
    let lines = || fs::read_to_string(&log).unwrap_or_default();
    eventually("all requests are logged", || lines().lines().count() == 7);
    let text = lines();
    let logged: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let denied_by = |at: usize| &logged[at]["denied_by"];
    assert_eq!((&denied_by(0)["entry"], &denied_by(0)["reason"]), (&json!("127.0.3.0/24"), &json!("scraper")));
    assert!(denied_by(0)["id"].as_str().is_some_and(|id| id.len() == 12));
    assert_eq!(denied_by(1)["entry"], json!(format!("header:x-api-key={}", secret.brief())));
    assert_eq!((denied_by(2), denied_by(3)), (&json!({ "id": "allow" }), &Value::Null));
    assert!(!text.contains("hunter2"), "{text}");

    for (name, contents) in
        [("gateway.toml", &*with_listen(&toml)), ("clients.toml", &clients()), ("access.toml", &access)]
    {
        scratch.write(name, contents);
    }
    let simulate = || -> Value {
        let replay =
            Command::new(BINARY).args(["simulate", "--json", "access.log"]).current_dir(scratch.path()).output();
        serde_json::from_slice(&replay.unwrap().stdout).unwrap()
    };
    let report = simulate();
    // The log does not have the API key.
    assert_eq!((&report["lines"]["denied"], &report["lines"]["decided"]), (&json!(2), &json!(5)), "{report:#}");
    assert_eq!(report["as_logged"], json!({ "same": 4, "different": 0 }));
    scratch.write("access.toml", "");
    assert_eq!(simulate()["lines"]["denied"], 1);
}

#[test]
fn a_changed_access_file_is_reloaded_and_a_bad_one_changes_nothing() {
    let scratch = TempDir::new();
    scratch.write("access.toml", "");
    scratch.write("clients.toml", clients());
    let mut command = Command::new(BINARY);
    command.env("RUST_LOG", "debug");
    let process = Process::spawn_command(command, &config(""), scratch);
    process.get("/a").expect(200);
    process.replace_file("access.toml", &deny("network = \"127.0.0.1\"\nreason = \"a test\""));
    process.wait_for_reloads("applied", 1);
    eventually("the address is denied", || process.get("/a").status == 403);
    let id = &Digest::of(b"127.0.0.1/32").to_string()[Digest::PREFIX.len()..][..12];
    process.wait_for_stderr(&format!("denied_by=\"{id}\""));
    let secret = "[[deny]]\nkey = { part = \"cookie:session\", value = \"hunter2hunter2\" }\n";
    process.replace_file("access.toml", secret);
    process.wait_for_reloads("refused", 1);
    assert_denied(&process.get("/a"));
    let position =
        format!("{}:2:42: this is a secret in plain text", process.scratch.path().join("access.toml").display());
    let log = process.wait_for_stderr(&position);
    assert!(!log.contains("hunter2"), "{log}");
    process.replace_file("access.toml", "");
    process.wait_for_reloads("applied", 2);
    eventually("no request is denied", || process.get("/a").status == 200);
}

#[test]
fn check_warns_of_entries_that_deny_everyone_or_are_repeated() {
    let scratch = TempDir::new();
    scratch.write("gateway.toml", with_listen(&config("")));
    scratch.write("clients.toml", clients());
    let checked = |access: &str| {
        scratch.write("access.toml", access);
        let check =
            Command::new(BINARY).args(["check", "--strict", "gateway.toml"]).current_dir(scratch.path()).output();
        let output = check.unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = checked(&deny("network = \"203.0.113.0/24\"\nuntil = \"2020-01-31T00:00:00Z\""));
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("note: the deny entry 94c6699ed4d8 for `203.0.113.0/24` ended at 2020-01-31T00:00:00Z"),
        "{text}"
    );
    let everyone = deny("network = \"0.0.0.0/0\"\nroutes = [\"login\"]") + &deny("network = \"::/0\"");
    let (code, text) = checked(&everyone);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("denies every IPv4 address on the route `login`"), "{text}");
    assert!(text.contains("denies every IPv6 address\n"), "{text}");
    let (code, text) = checked(&deny("client = \"acme\"").repeat(3));
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("for `client:acme` is listed more than once (likewise 1 other entry)"), "{text}");
}

#[test]
fn a_hundred_thousand_networks_are_denied_one_by_one() {
    let mut access = String::new();
    for n in 0..100_000_u32 {
        let [_, high, middle, low] = (n * 2).to_be_bytes();
        writeln!(access, "[[deny]]\nnetwork = \"10.{high}.{middle}.{low}\"").unwrap();
    }
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = \"127.0.0.1\"\n\
                  [admin]\nhosts = [\"127.0.0.1\", \"localhost\", \"gateway.test\"]\n";
    let gateway = start(&format!("{listen}{}", config("")), &access);
    let mut connection: Client = gateway.client();
    let mut status = |address: &str| connection.get_with("/a", &[("X-Forwarded-For", address)]).status;
    let addresses = ["10.0.0.0", "10.0.0.1", "10.3.13.62", "10.3.13.63", "10.3.13.64", "9.255.255.255"];
    assert_eq!(addresses.map(&mut status), [403, 200, 403, 200, 200, 200]);
    // Of so many entries, only the first that deny have a series of their own.
    for n in 0..300_u32 {
        let [.., middle, low] = (n * 2).to_be_bytes();
        assert_eq!(status(&format!("10.0.{middle}.{low}")), 403);
    }
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_denied_total", &[]), 302);
    assert!(metrics.sum("transom_denied_total", &[("entry", "other")]) >= 200);
}
