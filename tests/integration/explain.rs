//! `transom explain` and `POST /v1/explain`: questions are answered as a person would check them by hand, and as the request is
//! then answered; nothing is consumed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HOST, HttpResponse, request};
use crate::support::gateway::{Gateway, START_S};
use crate::support::gateway_group::{LONG_TIMEOUT, shared_config};
use crate::support::jwt_issuer::Issuer;
use crate::support::process::{BINARY, Process, run};
use crate::support::ratelimit_parser::items;
use crate::support::redis::{RedisServer, free_port};
use crate::support::{TempDir, eventually, eventually_eq, one_rule, seeded_rng, without_digests};

/// Requests from 127.0.0.1 name their client in `X-Forwarded-For`.
fn listen() -> String {
    format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n\
         admin = {{ hosts = [\"{HOST}\"] }}\n"
    )
}

const RULES: &str = r#"
[clients]
file = "clients.toml"
api_key = "header:x-api-key"
[upstreams.u]
builtin = "echo"

[rules.per-client]
key = "ip"
windows = ["8/hour", "5/minute"]
exemptions = ["198.51.100.0/24"]
[rules.per-key]
key = "header:x-api-key"
on_missing_key = "ip"
on_unknown_key = "refuse"
windows = ["2/minute"]
[rules.per-key.plans.gold]
windows = ["100/minute"]
[rules.per-user]
key = ["header:x-user", "method"]
on_missing_key = "skip"
windows = ["3/minute"]
[[rules.per-user.overrides]]
key = ["root", "GET"]
windows = ["50/minute"]
[rules.login]
key = "ip"
windows = ["1/minute"]
penalty = "10m"
status = 503
[rules.slow]
key = "ip"
windows = ["1/minute"]
on_limit = "delay"
max_delay = "90s"
[rules.sized]
key = "ip"
windows = ["10/minute"]
cost = { request-header = "x-cost", default = 1, max = 100 }
[rules.trial]
key = "global"
windows = ["1/hour"]
on_limit = "shadow"
[rules.in-flight]
key = "ip"
concurrent = 3

[[routes]]
name = "search"
path = "/v1/search"
methods = ["GET"]
upstream = "u"
rules = ["per-client", "per-key"]
[[routes]]
name = "item"
path = "/v1/{id}"
upstream = "u"
rules = ["per-user", "in-flight"]
[[routes]]
name = "v1"
path = "/v1/{*rest}"
upstream = "u"
rules = ["per-client"]
[[routes]]
name = "partner"
host = "partner.test"
path = "/v1/{*rest}"
upstream = "u"
[[routes]]
name = "login"
path = "/login"
methods = ["POST"]
upstream = "u"
rules = ["login"]
[[routes]]
name = "slow"
path = "/slow"
upstream = "u"
rules = ["slow"]
[[routes]]
name = "sized"
path = "/sized"
upstream = "u"
rules = ["sized"]
[[routes]]
name = "trial"
path = "/trial"
upstream = "u"
rules = ["trial"]
[[routes]]
name = "tea"
path = "/tea"
respond = { status = 418 }
[[routes]]
name = "beta"
path = "/beta"
headers = { x-beta = "1" }
upstream = "u"
"#;

fn gateway() -> Gateway {
    let clients =
        format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(b"a secret key of acme"));
    Gateway::start_with(&format!("{}{RULES}", listen()), &clients)
}

/// A request from a client: method, target, fields, address.
#[derive(Clone, Copy)]
struct Asked<'a>(&'a str, &'a str, &'a [(&'a str, &'a str)], &'a str);

/// The request, the decision, the status of a response by the gateway itself, the route, a part of the reason.
type Recorded<'a> = (Asked<'a>, &'a str, Option<u64>, Option<&'a str>, &'a str);

impl Asked<'_> {
    fn question(self) -> Value {
        let Asked(method, target, fields, client) = self;
        let host = fields.iter().find(|(name, _)| *name == "Host").map_or(HOST, |(_, host)| host);
        let mut headers = json!({});
        for (name, value) in fields.iter().filter(|(name, _)| *name != "Host") {
            let known = headers[*name].as_array().cloned().unwrap_or_default();
            headers[*name] = json!([known, vec![json!(value)]].concat());
        }
        json!({"method": method, "url": format!("http://{host}{target}"), "headers": headers, "client": client})
    }

    /// What the gateway explains, twice with the same result.
    fn explain(self, gateway: &Gateway) -> Value {
        let explanation = explain(gateway, &self.question());
        assert_eq!(explain(gateway, &self.question()), explanation, "the first question consumed something");
        explanation
    }

    fn fields(self) -> Vec<(&'static str, String)> {
        vec![("X-Forwarded-For", self.3.to_owned())]
    }

    fn send(self, gateway: &Gateway) -> HttpResponse {
        self.send_to(gateway.client())
    }

    fn send_to(self, mut client: Client) -> HttpResponse {
        client.send(self.request()).read_response_to(self.0)
    }

    /// Sends the request, and does not wait for the response.
    fn start(self, gateway: &Gateway) -> Client {
        let mut client = gateway.client();
        client.send(self.request());
        client
    }

    fn request(self) -> Vec<u8> {
        let Asked(method, target, fields, _) = self;
        let client = self.fields();
        let client = client.iter().map(|(name, value)| (*name, value.as_str()));
        let fields: Vec<(&str, &str)> = fields.iter().copied().chain(client).collect();
        request(method, target, &fields, b"")
    }
}

#[track_caller]
fn explain(gateway: &Gateway, question: &Value) -> Value {
    Client::connect(gateway.admin).post("/v1/explain", question.to_string()).expect(200).json()
}

/// Likewise of a gateway in a process of its own, whose admin address checks the Host field.
fn explain_of_process(gateway: &Process, path: &str, fields: &[(&str, &str)]) -> Value {
    let headers: serde_json::Map<_, _> =
        fields.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let body = json!({"url": format!("http://a{path}"), "headers": headers}).to_string();
    let host = gateway.admin.to_string();
    let mut client = Client::connect(gateway.admin);
    client.request("POST", "/v1/explain", &[("Host", &host)], body.as_bytes()).expect(200).json()
}

/// The rules, checked by hand: `per-client` admits 5 requests a minute and 8 an hour, `per-key` 2 a minute and 100 for
/// gold, `per-user` 3 and 50 for root, `login` 1 and then locks out for ten minutes, `slow` 1 and delays the next.
#[test]
fn recorded_questions_are_answered_as_checked_by_hand() {
    let gateway = gateway();
    for _ in 0..5 {
        Asked("GET", "/v1/a/b", &[], "192.0.2.7").send(&gateway).expect(200);
    }
    Asked("POST", "/login", &[], "192.0.2.8").send(&gateway).expect(200);
    Asked("POST", "/login", &[], "192.0.2.8").send(&gateway).expect(503);
    Asked("GET", "/slow", &[], "192.0.2.9").send(&gateway).expect(200);
    Asked("GET", "/trial", &[], "192.0.2.9").send(&gateway).expect(200);
    gateway.advance_s(10);
    const KNOWN: (&str, &str) = ("X-API-Key", "a secret key of acme");
    const GUESS: (&str, &str) = ("X-API-Key", "a guess");
    const PARTNER: (&str, &str) = ("Host", "partner.test");
    let minute = "window `per-client-minute` is full: 5 of 5 tokens used; it ends in 50 s";
    let recorded: [Recorded<'_>; 24] = [
        (Asked("GET", "/v1/search", &[], "203.0.113.1"), "admitted", None, Some("search"), "has room"),
        (Asked("HEAD", "/v1/search", &[], "203.0.113.2"), "admitted", None, Some("search"), "has room"),
        (Asked("POST", "/v1/search", &[], "203.0.113.3"), "admitted", None, Some("item"), "has room"),
        (Asked("GET", "/v1/search", &[], "192.0.2.7"), "refused", Some(429), Some("search"), minute),
        (Asked("GET", "//v1/x/../search", &[], "192.0.2.7"), "refused", Some(429), Some("search"), minute),
        (Asked("GET", "/v1/%73earch?q=1", &[], "::ffff:192.0.2.7"), "refused", Some(429), Some("search"), minute),
        (Asked("GET", "/v1/search", &[KNOWN], "203.0.113.4"), "admitted", None, Some("search"), "has room"),
        (Asked("GET", "/v1/search", &[GUESS], "203.0.113.4"), "error", Some(401), Some("search"), "`header:x-api-key`"),
        // The other rules of the route refuse first, so that the answer does not tell whether the key is known.
        (Asked("GET", "/v1/search", &[GUESS], "192.0.2.7"), "refused", Some(429), Some("search"), minute),
        (Asked("GET", "/v1/a/b", &[PARTNER], "192.0.2.7"), "admitted", None, Some("partner"), "has no rules"),
        (Asked("GET", "/v1/42", &[("X-User", "root")], "203.0.113.5"), "admitted", None, Some("item"), "has room"),
        (
            Asked("GET", "/v1/42", &[("X-User", "root"), ("X-User", "bob")], "203.0.113.5"),
            "error",
            Some(400),
            Some("item"),
            "the field `x-user` more than once, or in a form that servers read differently (rule `per-user`)",
        ),
        (
            Asked("GET", "/nowhere", &[], "203.0.113.6"),
            "error",
            Some(404),
            None,
            "no route matches the path `/nowhere`",
        ),
        (Asked("GET", "/v1/%2F", &[], "203.0.113.6"), "error", Some(400), None, "the path"),
        (
            Asked("GET", "/v1/a", &[("Host", "a..b")], "203.0.113.6"),
            "error",
            Some(400),
            None,
            "Host field is malformed",
        ),
        (
            Asked("POST", "/login", &[], "192.0.2.8"),
            "refused",
            Some(503),
            Some("login"),
            "the penalty after an earlier refusal lasts for 590 s",
        ),
        (Asked("PUT", "/login", &[], "192.0.2.8"), "error", Some(404), None, "the routes of this path do not take"),
        (Asked("GET", "/slow", &[], "192.0.2.9"), "delayed", None, Some("slow"), "window `slow` is full: 1 of 1"),
        (Asked("GET", "/slow", &[], "203.0.113.7"), "admitted", None, Some("slow"), "has room"),
        (
            Asked("GET", "/sized", &[("X-Cost", "11")], "203.0.113.8"),
            "refused",
            Some(429),
            Some("sized"),
            "never holds the 11",
        ),
        (
            Asked("GET", "/sized", &[("X-Cost", "x")], "203.0.113.8"),
            "error",
            Some(400),
            Some("sized"),
            "`x-cost` is not one",
        ),
        (Asked("GET", "/trial", &[], "203.0.113.9"), "admitted", None, Some("trial"), "shadow rules only"),
        (Asked("GET", "/tea", &[], "203.0.113.9"), "admitted", Some(418), Some("tea"), "has no rules"),
        (Asked("GET", "/v1/a/b", &[], "198.51.100.9"), "admitted", None, Some("v1"), "no rule counts"),
    ];
    let live = || gateway.metrics().sum("transom_counters", &[("state", "live")]);
    let live_before = live();
    let explained: Vec<Value> = recorded.iter().map(|(asked, ..)| asked.explain(&gateway)).collect();
    assert_eq!(live(), live_before, "questions open no counters");
    for ((asked, decision, status, route, reason), found) in recorded.iter().zip(&explained) {
        let what = format!("{} {}: {found:#}", asked.0, asked.1);
        assert_eq!((&found["decision"], &found["status"]), (&json!(decision), &json!(status)), "{what}");
        assert_eq!(found["route"]["name"], json!(route), "{what}");
        assert!(found["reason"].as_str().unwrap().contains(reason), "{what}");
        assert_eq!(found["live"], true);
        assert!(!found.to_string().contains("secret key"), "{what}");
        if *decision != "delayed" {
            assert_eq!(u64::from(asked.send(&gateway).status), status.unwrap_or(200), "{what}");
        }
    }
    details_are_as_checked_by_hand(&explained);
    let delayed = || gateway.metrics().sum("transom_decisions_total", &[("rule", "slow"), ("outcome", "delayed")]);
    let mut client = gateway.client();
    client.send("GET /slow HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.9\r\n\r\n");
    eventually_eq(delayed, 1);
    gateway.advance_s(60);
    client.read_response().expect(200);
}

fn details_are_as_checked_by_hand(explained: &[Value]) {
    let window = |name: &str, count: u64, limit: u64, ttl: u64| {
        json!({
            "name": name, "count": count, "limit": limit, "remaining": limit - count, "ttl": ttl, "full": count == limit,
        })
    };
    let other = |name: &str, path: &str, reason: &str| json!({"name": name, "path": path, "reason": reason});
    // A fallback key, and the routes that are less specific.
    let search = &explained[0];
    assert_eq!(
        search["request"],
        json!({"method": "GET", "scheme": "http", "host": HOST, "path": "/v1/search", "client": "203.0.113.1"})
    );
    assert_eq!(
        search["route"],
        json!({
            "name": "search", "path": "/v1/search", "upstream": "u",
            "reason": "it is the most specific route that matches",
        })
    );
    let precedes =
        |theirs: &str| format!("in segment 2 of the path, the literal `search` of `search` precedes its {theirs}");
    assert_eq!(
        search["other_routes"],
        json!([
            other("item", "/v1/{id}", &precedes("parameter `{id}`")),
            other("v1", "/v1/{*rest}", &precedes("catch-all `{*rest}`")),
        ])
    );
    assert_eq!(
        search["rules"],
        json!([
            {
                "rule": "per-client", "result": "admits", "reason": "there is room",
                "key": [{"part": "ip", "value": "203.0.113.1"}], "fallback": false, "windows_of": "rule",
                "plan": null, "override": null, "cost": 1, "reserved_by": null, "shadow": false, "shared": false,
                "store": null, "may_include_leased": false,
                "windows": [window("per-client-hour", 0, 8, 2690), window("per-client-minute", 0, 5, 50)],
                "concurrent": null,
            },
            {
                "rule": "per-key", "result": "admits", "reason": "there is room",
                "key": [{"part": "ip", "value": "203.0.113.1"}], "fallback": true, "windows_of": "rule",
                "plan": null, "override": null, "cost": 1, "reserved_by": null, "shadow": false, "shared": false,
                "store": null, "may_include_leased": false,
                "windows": [window("per-key", 0, 2, 50)], "concurrent": null,
            },
        ])
    );
    // POST: the first candidate takes GET only.
    assert_eq!(explained[2]["other_routes"][0], other("search", "/v1/search", "it takes GET only"));
    assert_eq!(explained[2]["rules"][0]["result"], "not counted");
    let skipped = "the request lacks `header:x-user`, and `on_missing_key` is \"skip\"";
    assert_eq!(explained[2]["rules"][0]["reason"], skipped);
    let slots = json!({"name": "in-flight", "count": 0, "limit": 3, "remaining": 3});
    assert_eq!(explained[2]["rules"][1]["concurrent"], slots);
    // Full windows.
    assert_eq!(explained[3]["retry_after"], 50);
    let full = json!([window("per-client-hour", 5, 8, 2690), window("per-client-minute", 5, 5, 50)]);
    assert_eq!(explained[3]["rules"][0]["windows"], full);
    assert_eq!(explained[5]["request"]["client"], "192.0.2.7");
    // A known API key, and an unknown one.
    assert_eq!(explained[6]["client"], json!({"name": "acme", "plan": "gold"}));
    let by_key = &explained[6]["rules"][1];
    assert_eq!((&by_key["windows_of"], &by_key["plan"]), (&json!("plan"), &json!("gold")));
    assert_eq!(by_key["windows"], json!([window("per-key", 0, 100, 50)]));
    let digest = by_key["key"][0]["value"].as_str().unwrap();
    assert!(digest.starts_with("hmac-") && digest.len() == 37, "{digest}");
    assert_eq!((&explained[7]["client"], &explained[7]["rules"][1]["result"]), (&Value::Null, &json!("error")));
    assert_ne!(explained[7]["rules"][1]["key"][0]["value"], digest);
    // The host precedes the path.
    assert_eq!(explained[9]["other_routes"][0], other("v1", "/v1/{*rest}", "`partner` names the host"));
    // An override, by a key of two parts.
    let overridden = &explained[10]["rules"][0];
    assert_eq!((&overridden["windows_of"], &overridden["windows"][0]["limit"]), (&json!("override"), &json!(50)));
    assert_eq!(overridden["override"], json!({"number": 1, "key": ["root", "GET"]}));
    let root = json!([{"part": "header:x-user", "value": "root"}, {"part": "method", "value": "GET"}]);
    assert_eq!(overridden["key"], root);
    assert_eq!((&explained[15]["retry_after"], &explained[17]["retry_after"]), (&json!(590), &json!(50)));
    assert_eq!(explained[19]["retry_after"], Value::Null, "the cost exceeds the window");
    let trial = &explained[21]["rules"][0];
    assert_eq!((&trial["result"], &trial["shadow"]), (&json!("would refuse"), &json!(true)));
    assert_eq!(explained[23]["rules"][0]["reason"], "the address of the client is in an exempt network");
}

/// A request as `transom explain` reads it.
#[derive(Clone, Debug)]
struct Command {
    arguments: Vec<String>,
    method: String,
    headers: Vec<(String, String)>,
    client: String,
    url: String,
}

impl Command {
    fn parse(line: &str) -> Command {
        let arguments = shell_words(line);
        let (method, client) = ("GET".to_owned(), "127.0.0.1".to_owned());
        let mut command =
            Command { arguments: arguments.clone(), method, headers: Vec::new(), client, url: String::new() };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "-X" => command.method = arguments.next().unwrap(),
                "--client" => command.client = arguments.next().unwrap(),
                "-H" => {
                    let header = arguments.next().unwrap();
                    let (name, value) = header.split_once(": ").unwrap();
                    command.headers.push((name.to_owned(), value.to_owned()));
                }
                _ => command.url = argument,
            }
        }
        command
    }

    /// The request as bytes, through a proxy that names the client.
    fn request(&self, body: &[u8]) -> Vec<u8> {
        let (scheme, rest) = self.url.split_once("://").unwrap();
        let (host, _) = rest.split_once('/').unwrap();
        let mut fields =
            vec![("Host".to_owned(), host.to_owned()), ("X-Forwarded-Proto".to_owned(), scheme.to_owned())];
        fields.extend(self.headers.iter().cloned());
        if self.client != "127.0.0.1" {
            match fields.iter_mut().find(|(name, _)| name == "X-Forwarded-For") {
                Some((_, value)) => value.push_str(&format!(", {}", self.client)),
                None => fields.push(("X-Forwarded-For".to_owned(), self.client.clone())),
            }
        }
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        request(&self.method, &rest[host.len()..], &fields, body)
    }

    fn send(&self, gateway: &Gateway) -> HttpResponse {
        gateway.client().send(self.request(b"")).read_response_to(&self.method)
    }
}

/// The words of a command line, which single quotes may enclose.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for sign in line.chars() {
        match sign {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            sign => words.last_mut().unwrap().push(sign),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Each file of `tests/explain` has requests, times that pass, a question in the form of the command line, and the answer.
/// The answers were worked out by hand from the reference; after a change of their form, `UPDATE_EXPECTED=1` writes them anew.
#[test]
fn questions_in_files_are_answered_as_worked_out_by_hand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/explain");
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    let (toml, clients) = (read("gateway.toml"), read("clients.toml"));
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "txt"));
    files.sort();
    assert!(files.len() >= 30);
    let mut failures = String::new();
    for file in files {
        let name = file.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let (history, asked) = text.split_once("$ transom explain ").unwrap();
        let (question, expected) = asked.split_once('\n').unwrap();
        let gateway = Gateway::start_with(&toml, &clients);
        let mut open = Vec::new();
        for line in history.lines().filter(|line| !line.starts_with('#')) {
            let (count, what) = line.split_once(' ').unwrap();
            let (count, (what, rest)) = (count.parse().unwrap(), what.split_once(' ').unwrap_or((what, "")));
            match what {
                "second" | "seconds" => gateway.advance_s(count),
                "request" | "requests" => {
                    let (command, status) = rest.split_once(" => ").unwrap();
                    let status: u16 = status.parse().unwrap();
                    for _ in 0..count {
                        assert_eq!(Command::parse(command).send(&gateway).status, status, "{name}: {line}");
                    }
                }
                // Their bodies are incomplete.
                "open" => {
                    let (_, command) = rest.split_once(' ').unwrap();
                    for _ in 0..count {
                        let request = Command::parse(command).request(b"abc");
                        open.push(gateway.client());
                        open.last_mut().unwrap().send(&request[..request.len() - 1]);
                    }
                    eventually_eq(|| gateway.metrics().sum("transom_concurrent_requests", &[]), count);
                }
                _ => panic!("{name}: {line}"),
            }
        }
        let scratch = TempDir::new();
        scratch.write("clients.toml", &clients);
        let admin = format!("admin           = \"{}\"", gateway.admin);
        let config = scratch.write("gateway.toml", toml.replace("admin           = \"127.0.0.1:0\"", &admin));
        let question = Command::parse(question);
        let arguments: Vec<&str> = question.arguments.iter().map(String::as_str).collect();
        let (code, out, err) = command(config.to_str().unwrap(), &arguments);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{name}");
        let found = without_digests(&out);
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            fs::write(&file, text.replace(expected, &found)).unwrap();
        } else if found != expected {
            failures += &format!("{name}: expected:\n{expected}\nfound:\n{found}\n");
        }
        // The request gets what was explained. A delayed one would wait for the clock.
        let decision = found.lines().find_map(|line| line.strip_prefix("decision: ")).unwrap();
        let status = decision.split_once(" with ").map_or("200", |(_, status)| &status[..3]);
        if !decision.starts_with("delayed") {
            assert_eq!(question.send(&gateway).status.to_string(), status, "{name}");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn an_unknown_host_and_a_missing_header_are_named() {
    let toml = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\nname = \"a\"\nhost = [\"a.test\", \"*.b.test\"]\npath = \"/{*rest}\"\n\
                headers = { x-beta = \"1\" }\nupstream = \"u\"\n";
    let gateway = Gateway::start(toml);
    let reason = |url: &str| explain(&gateway, &json!({"url": url}));
    let unknown = reason("http://c.test/");
    assert_eq!(unknown["status"], 404);
    assert_eq!(unknown["reason"], "no route serves the host `c.test`; routes name `a.test`, `*.b.test`");
    let missing = reason("http://x.b.test/");
    let other = "the request does not have the required header: `x-beta`";
    assert_eq!((&missing["status"], &missing["other_routes"][0]["reason"]), (&json!(404), &json!(other)));
    assert_eq!(
        explain(&gateway, &json!({"url": "http://a.test/", "headers": {"X-Beta": "1"}}))["decision"],
        "admitted"
    );
}

#[test]
fn the_reason_is_what_makes_a_route_more_specific() {
    let routes = [
        ("plain", "/a", ""),
        ("get", "/a", "methods = [\"GET\"]"),
        ("head", "/a", "methods = [\"HEAD\"]"),
        ("present", "/a", "headers = { x-a = true }"),
        ("value", "/a", "headers = { x-a = \"1\" }"),
        ("both", "/a", "headers = { x-a = \"1\", x-b = true }"),
        ("wide", "/w", "host = \"*.test\""),
        ("narrow", "/w", "host = \"*.b.test\""),
        ("exact", "/w", "host = \"a.b.test\""),
        ("rest", "/{*rest}", ""),
        ("http", "/{*rest}", "scheme = \"http\""),
    ];
    let routes = routes.map(|(name, path, more)| {
        format!("[[routes]]\nname = \"{name}\"\npath = \"{path}\"\n{more}\nupstream = \"u\"\n")
    });
    let gateway = Gateway::start(&format!("{}[upstreams.u]\nbuiltin = \"echo\"\n{}", listen(), routes.concat()));
    // https, because the route for http would precede all others.
    for (method, url, headers, chosen, other, reason) in [
        ("GET", "https://c/a", json!({}), "get", "plain", "`get` names the method"),
        ("HEAD", "https://c/a", json!({}), "head", "get", "`head` names HEAD"),
        ("PUT", "https://c/a", json!({"x-a": "2"}), "present", "plain", "`present` requires more headers"),
        ("PUT", "https://c/a", json!({"x-a": "1"}), "value", "present", "`value` requires more values of headers"),
        ("PUT", "https://c/a", json!({"x-a": "1", "x-b": ""}), "both", "value", "`both` requires more headers"),
        ("PUT", "https://c/a", json!({}), "plain", "rest", "literal `a` of `plain` precedes its catch-all `{*rest}`"),
        ("GET", "https://a.b.test/w", json!({}), "exact", "narrow", "`exact` names the host"),
        ("GET", "https://x.b.test/w", json!({}), "narrow", "wide", "`narrow` names the host more exactly"),
        ("GET", "https://x.b.test/w", json!({}), "narrow", "rest", "`narrow` names the host more exactly"),
        ("GET", "http://c/w", json!({}), "http", "rest", "`http` names the scheme"),
        ("GET", "http://c/a", json!({}), "http", "get", "`http` names the scheme"),
    ] {
        let found = explain(&gateway, &json!({"method": method, "url": url, "headers": headers}));
        let others = found["other_routes"].as_array().unwrap();
        let of_other =
            others.iter().find(|route| route["name"] == other).map(|route| route["reason"].as_str().unwrap());
        assert_eq!(found["route"]["name"], chosen, "{method} {url}");
        assert!(of_other.is_some_and(|found| found.ends_with(reason)), "{method} {url}: {of_other:?}");
    }
}

#[test]
fn a_claim_is_read_from_a_verified_token() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let file = scratch.write("hs.key", &issuer.secret).display().to_string();
    let gateway = Gateway::start(&format!(
        "{}[jwt]\nkeys = [{{ algorithm = \"HS256\", secret_file = \"{file}\" }}]\n",
        one_rule("key = \"jwt:sub\"\non_missing_key = \"ip\"\nwindows = [\"2/minute\"]")
    ));
    let ask = |token: &str| {
        explain(
            &gateway,
            &json!({"url": "http://a/x", "headers": {"Authorization": format!("Bearer {token}")}, "client": "192.0.2.7"}),
        )
    };
    let valid = ask(&issuer.token("HS256", &json!({"sub": "alice", "exp": START_S + 60})));
    assert_eq!(valid["decision"], "admitted");
    assert_eq!(valid["rules"][0]["key"], json!([{"part": "jwt:sub", "value": "alice"}]));
    let expired = ask(&issuer.token("HS256", &json!({"sub": "alice", "exp": START_S - 3600})));
    assert_eq!((&expired["decision"], &expired["status"]), (&json!("error"), &json!(401)));
    assert!(expired["reason"].as_str().unwrap().contains("expired"), "{expired}");
}

/// A token for alice, signed with the secret of [`random_config`], and one with another signature.
const TOKENS: [&str; 2] = [
    "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.BYnKlJGIvlNgtUxBCrf5tICp69Rg8nKH_4neqkbmNCk",
    "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.BYnKlJGIvlNgtUxBCrf5tICp69Rg8nKH_4neqkbmNCl",
];
/// The clients of random configurations: one by API key, one by network.
fn random_clients() -> String {
    let digest = Digest::of(b"key-of-acme");
    format!(
        "[clients.acme]\nplan = \"gold\"\napi_keys = [\"{digest}\"]\n\
         [clients.initech]\nplan = \"silver\"\nnetworks = [\"192.0.2.2\"]\n"
    )
}

/// Random windows of a rule, in `periods`: two short ones and two long ones. With `delays`, of kinds that requests can wait for.
fn random_windows(rng: &mut fastrand::Rng, periods: [&str; 4], delays: bool) -> String {
    let mut window = |limits: std::ops::Range<u32>, periods: &[&str]| {
        let (limit, period) = (rng.u32(limits), periods[rng.usize(..2)]);
        let more = match rng.u8(..7) {
            0 if !delays => String::from(", sliding = true"),
            1 => String::from(", start = \"first-request\""),
            2 => String::from(", start = \"random\""),
            3 => format!(", capacity = {}", limit + rng.u32(0..2)),
            4 if !delays => String::from(", shards = 2"),
            5 if period == "day" => String::from(", timezone = \"Asia/Kolkata\""),
            _ => String::new(),
        };
        format!("{{ limit = {limit}, period = \"{period}\"{more} }}")
    };
    let (short, long) = (window(2..4, &periods[..2]), window(5..9, &periods[2..]));
    let windows = [short.clone(), long.clone(), format!("{long}, {short}")][rng.usize(..3)].clone();
    format!("windows = [{windows}]\n")
}

/// A random rule, as TOML.
fn random_rule(rng: &mut fastrand::Rng, name: &str, periods: [&str; 4]) -> String {
    let mut rule = format!("[rules.{name}]\n{}", random_windows(rng, periods, false));
    let unknown = ["count", "missing", "refuse"][rng.usize(..3)];
    let by_user = "key = \"header:x-user\"\n";
    let key = match rng.u8(..9) {
        0 => format!("{by_user}on_missing_key = \"skip\"\nexemptions = [\"key:root\"]\n"),
        1 => format!("{by_user}on_missing_key = \"refuse\"\n"),
        2 => format!("{by_user}on_missing_key = \"ip\"\n"),
        3 => "key = [\"ip\", \"method\"]\nexemptions = [\"192.0.2.3\"]\n".to_owned(),
        4 => "key = [\"query:id\", \"path\"]\non_missing_key = \"global\"\n".to_owned(),
        5 | 6 => format!(
            "key = \"header:x-api-key\"\non_missing_key = {}\non_unknown_key = \"{unknown}\"\n",
            ["\"ip\"", "\"skip\"", "[\"method\", \"ip\"]"][rng.usize(..3)]
        ),
        7 => "key = [\"cookie:session\", \"host\"]\non_missing_key = \"route\"\n".to_owned(),
        _ => "key = \"ip\"\n".to_owned(),
    };
    rule.push_str(&key);
    rule.push_str(match rng.u8(..9) {
        0 | 1 => "on_limit = \"shadow\"\n",
        2 => "count_refused = true\n",
        3 | 4 => "penalty = \"45s\"\n",
        5 => "cost = { request-header = \"x-cost\", default = 1, max = 9 }\n",
        6 => "cost = 2\n",
        7 => "count_when = { status = [401] }\npenalty = \"30s\"\n",
        _ => "",
    });
    for plan in ["gold", "silver"] {
        if rng.bool() {
            rule.push_str(&format!("[rules.{name}.plans.{plan}]\n{}", random_windows(rng, periods, false)));
        }
    }
    if key.starts_with(by_user) {
        rule.push_str(&format!("[[rules.{name}.overrides]]\nkey = \"alice\"\n{}", random_windows(rng, periods, false)));
    }
    // An account whose refusals count is not sharded.
    let is_account = rule.contains("count_refused") && rule.contains("capacity");
    if is_account { rule.replace(", shards = 2", "") } else { rule }
}

/// A rule by a claim, and one that has every plan, as clients need.
fn fixed_rules(rng: &mut fastrand::Rng, periods: [&str; 4]) -> String {
    format!(
        "[rules.claims]\nkey = \"jwt:sub\"\non_missing_key = \"skip\"\n{}\
         [rules.plans]\nkey = \"ip\"\n{}[rules.plans.plans.gold]\n{}[rules.plans.plans.silver]\n{}",
        random_windows(rng, periods, false),
        random_windows(rng, periods, false),
        random_windows(rng, periods, false),
        random_windows(rng, periods, false),
    )
}

const RANDOM_COMMON: &str = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n\
    [jwt]\nkeys = [{ algorithm = \"HS256\", secret = \"a secret for the questions of this folder\" }]\n\
    [upstreams.u]\nbuiltin = \"echo\"\n";

/// Random rules on random routes, so that conditions of every kind decide, and a header that names the route.
fn random_config(rng: &mut fastrand::Rng) -> String {
    let periods = ["10s", "minute", "90s", "day"];
    let mut toml = format!(
        "{}{RANDOM_COMMON}{}[rules.delays]\nkey = \"global\"\non_limit = \"delay\"\nmax_delay = \"15s\"\n{}",
        listen(),
        fixed_rules(rng, periods),
        random_windows(rng, periods, true)
    );
    (0..4).for_each(|n| toml.push_str(&random_rule(rng, &format!("r{n}"), periods)));
    let paths = ["/{*rest}", "/late", "/a/b", "/a/{x}", "/{x}/b", "/a/{*rest}"];
    let conditions = ["", "methods = [\"GET\"]\n", "methods = [\"POST\", \"PUT\"]\n", "headers = { x-user = true }\n"];
    let hosts = ["", "host = \"a.test\"\n", "host = \"*.test\"\n"];
    let mut known = BTreeSet::new();
    for n in 0..10 {
        // Of the first two routes, one takes what no other takes, and one delays.
        let (path, condition, host) = match n {
            0 | 1 => (n, 0, 0),
            _ => (rng.usize(..6), rng.usize(..4), rng.usize(..3)),
        };
        if !known.insert((path, condition, host)) {
            continue;
        }
        let mut named: Vec<String> = (0..4).filter(|_| rng.bool()).map(|rule| format!("\"r{rule}\"")).collect();
        match if n == 1 { 0 } else { rng.u8(..6) } {
            // Alone: another rule may have no room any more when the wait is over.
            0 => named = vec!["\"delays\"".to_owned()],
            1 => named.push("\"plans\"".to_owned()),
            2 => named.push("\"claims\"".to_owned()),
            _ => {}
        }
        let target = if rng.u8(..4) == 0 { "respond = { status = 401 }" } else { "upstream = \"u\"" };
        toml.push_str(&format!(
            "[[routes]]\nname = \"n{n}\"\npath = \"{}\"\n{}{}{target}\nrules = [{}]\n\
             response_headers = {{ set = {{ x-route = \"n{n}\" }}, on = \"all\" }}\n",
            paths[path],
            conditions[condition],
            hosts[host],
            named.join(", "),
        ));
    }
    toml
}

/// Fields of a random request, and the address of its client.
fn random_fields(rng: &mut fastrand::Rng) -> (Vec<(&'static str, &'static str)>, String) {
    let mut fields = vec![("Host", ["a.test", "b.test", "other"][rng.usize(..3)])];
    let users = ["alice", "root", ""];
    (0..[0, 1, 1, 1, 2][rng.usize(..5)]).for_each(|_| fields.push(("X-User", users[rng.usize(..3)])));
    if rng.bool() {
        fields.push(("X-API-Key", ["key-of-acme", "key-of-acme", "a guess"][rng.usize(..3)]));
    }
    match rng.u8(..8) {
        0..3 => fields.push(("Authorization", TOKENS[0])),
        3 => fields.push(("Authorization", TOKENS[1])),
        4 => fields.push(("Cookie", "session=1")),
        5 => fields.push(("X-Cost", ["0", "3", "9", "10"][rng.usize(..4)])),
        _ => {}
    }
    (fields, format!("192.0.2.{}", rng.u8(1..4)))
}

/// Compares an explanation with the response that the request then got: the status, which windows refused, when to retry, and
/// the tokens that are left. `are_shared`: a gateway that knows a shared window to be full refuses without a look at the other
/// windows, so the explanation tells of more of them.
#[track_caller]
fn assert_agrees(found: &Value, got: &HttpResponse, method: &str, toml: &str, are_shared: bool, what: &str) {
    assert_eq!(u64::from(got.status), found["status"].as_u64().unwrap_or(200), "{what}");
    let rules = found["rules"].as_array().unwrap().iter().filter(|rule| rule["shadow"] == false);
    let windows: Vec<&Value> = rules.clone().flat_map(|rule| rule["windows"].as_array().unwrap()).collect();
    if found["decision"] == "refused" {
        let retry_after: Option<u64> = got.field("retry-after").map(|seconds| seconds.parse().unwrap());
        let explained = found["retry_after"].as_u64();
        let agree = match (explained, retry_after) {
            (Some(explained), Some(got)) if are_shared => got <= explained,
            (None, Some(_)) if are_shared => true,
            (explained, got) => explained == got,
        };
        assert!(agree, "retry after {explained:?}, and not {retry_after:?}: {what}");
        if method != "HEAD" {
            let full = windows.iter().filter(|window| window["full"] == true).map(|window| &window["name"]);
            let mut full: Vec<&str> = full.map(|name| name.as_str().unwrap()).collect();
            let violated = got.problem()["violated-policies"].as_array().unwrap().clone();
            let mut violated: Vec<&str> = violated.iter().map(|name| name.as_str().unwrap()).collect();
            // A refusal may have begun a penalty.
            violated.retain(|name| !name.ends_with("-penalty") || full.contains(name));
            full.sort_unstable();
            violated.sort_unstable();
            match are_shared {
                true => assert!(violated.iter().all(|name| full.contains(name)), "{full:?} {violated:?} {what}"),
                false => assert_eq!(full, violated, "{what}"),
            }
        }
    } else if found["decision"] == "admitted" {
        for rule in rules {
            let name = rule["rule"].as_str().unwrap();
            let own = toml.split(&format!("[rules.{name}]\n")).nth(1).unwrap().split("[[").next().unwrap();
            let own = own.split("[rules.").next().unwrap();
            // A token that the response does not keep is refunded before its fields are made.
            let is_kept = !own.contains("count_when") || got.status == 401;
            let taken = if is_kept { rule["cost"].as_u64().unwrap_or(0) } else { 0 };
            for window in rule["windows"].as_array().unwrap() {
                let left = window["remaining"].as_u64().unwrap() - taken;
                let item = items(got, "ratelimit").into_iter().find(|item| window["name"] == item.name);
                assert_eq!(item.map(|item| item.get("r")), Some(left), "{}: {what}", window["name"]);
            }
        }
    }
}

/// Delayed requests that are sent: each takes up to a second.
const DELAYED_MAX: u32 = 12;

#[test]
fn explanations_agree_with_what_the_request_then_gets() {
    let mut rng = seeded_rng();
    let mut seen = BTreeMap::<String, u32>::new();
    for _ in 0..40 {
        let toml = random_config(&mut rng);
        let gateway = Gateway::start_with(&toml, &random_clients());
        for _ in 0..60 {
            gateway.advance_s(rng.u64(..3) * rng.u64(..6));
            let (fields, client) = random_fields(&mut rng);
            let target =
                ["/a/b", "/a/c?id=1", "/a//b", "/x/b?id=2", "/a/b/c", "/a/%2e", "/%zz", "/x?id=1&id=2", "/late"];
            let method = ["GET", "POST", "HEAD"][rng.usize(..3)];
            let asked = Asked(method, target[rng.usize(..9)], &fields, &client);
            let found = asked.explain(&gateway);
            let decision = found["decision"].as_str().unwrap();
            let times = seen.entry(decision.to_owned()).or_default();
            *times += 1;
            let got = match decision {
                "delayed" if *times > DELAYED_MAX => continue,
                "delayed" => {
                    let waiting = || gateway.metrics().sum("transom_delayed_requests", &[("rule", "delays")]);
                    let mut client = asked.start(&gateway);
                    eventually_eq(waiting, 1);
                    gateway.advance_s(found["retry_after"].as_u64().unwrap());
                    client.read_response_to(method)
                }
                _ => asked.send(&gateway),
            };
            let what = format!("{method} {} {fields:?} of {client}\n{toml}\n{found:#}\n{got:?}", asked.1);
            assert_eq!(got.field("x-route"), found["route"]["name"].as_str(), "{what}");
            assert_agrees(&found, &got, method, &toml, false, &what);
            for rule in found["rules"].as_array().unwrap() {
                *seen.entry(format!("windows of {}", rule["windows_of"])).or_default() += 1;
                *seen.entry(rule["result"].as_str().unwrap().to_owned()).or_default() += 1;
                let windows = rule["windows"].as_array().unwrap().iter();
                let penalties = windows.filter(|window| window["name"].as_str().unwrap().ends_with("-penalty"));
                *seen.entry("penalty".to_owned()).or_default() += penalties.count() as u32;
            }
        }
    }
    println!("{seen:?}");
    // Each kind of answer was tried often.
    for (kind, least) in [
        ("admitted", 100),
        ("refused", 100),
        ("error", 100),
        ("delayed", 5),
        ("windows of \"plan\"", 100),
        ("windows of \"override\"", 20),
        ("not counted", 50),
        ("would refuse", 10),
        ("penalty", 10),
    ] {
        assert!(seen.get(kind).is_some_and(|times| *times >= least), "{kind}: {seen:?}");
    }
}

/// Two gateways with one store: the second explains what the first one then does.
#[test]
fn explanations_of_shared_rules_agree_with_what_the_request_then_gets() {
    let mut rng = seeded_rng();
    let redis = RedisServer::start();
    let periods = ["20d", "25d", "30d", "35d"];
    let mut refused = 0;
    for round in 0..4 {
        let rules: String = (0..4).map(|n| random_rule(&mut rng, &format!("r{n}"), periods)).collect();
        let toml = format!(
            "workers = 1\n{}{RANDOM_COMMON}[counters.shared]\nredis = \"{}\"\nmode = \"exact\"\nprefix = \"p{round}\"\n{LONG_TIMEOUT}\
             {}{rules}",
            listen(),
            redis.url(),
            fixed_rules(&mut rng, periods),
        );
        // Shards are counters of one process.
        let mut toml = toml.replace(", shards = 2", "");
        toml.push_str("[rules.awaited]\nkey = \"global\"\nwindows = [\"1000/30d\"]\n");
        for (path, rules) in [
            ("/a", r#""r0", "r1", "plans", "claims""#),
            ("/b", r#""r1", "r2""#),
            ("/c", r#""r3""#),
            ("/awaited", r#""awaited""#),
        ] {
            toml.push_str(&format!("[[routes]]\npath = \"{path}\"\nupstream = \"u\"\nrules = [{rules}]\n"));
        }
        let start = || {
            let scratch = TempDir::new();
            scratch.write("clients.toml", random_clients());
            Process::spawn_command(std::process::Command::new(BINARY), &toml, scratch)
        };
        let gateways = [start(), start()];
        for _ in 0..60 {
            let (fields, client) = random_fields(&mut rng);
            let asked = Asked("GET", ["/a", "/b?id=1", "/c?id=2"][rng.usize(..3)], &fields, &client);
            let found = Client::connect(gateways[1].admin).post("/v1/explain", asked.question().to_string());
            let found = found.expect(200).json();
            let got = asked.send_to(gateways[0].client());
            // What follows the response, such as a refund, has reached the store before this request does.
            gateways[0].get("/awaited").expect(200);
            let what = format!("{} {fields:?} of {client}\n{toml}\n{found:#}\n{got:?}", asked.1);
            assert_agrees(&found, &got, "GET", &toml, true, &what);
            refused += u32::from(found["decision"] == "refused");
        }
    }
    assert!(refused >= 20, "only {refused} refusals");
}

#[test]
fn shared_rules_are_read_from_the_store_with_the_digests_of_its_keys() {
    let redis = RedisServer::start();
    let rules = "[rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"5/30d\"]\n";
    let toml = shared_config(&format!("\"{}\"", redis.url()), &format!("mode = \"exact\"\n{LONG_TIMEOUT}"), rules);
    let gateways = [Process::spawn(&toml), Process::spawn(&toml)];
    let fields = [("X-API-Key", "a secret of alice")];
    (0..5).for_each(|_| drop(gateways[0].client().get_with("/a", &fields).expect(200)));
    let question = json!({"url": "http://a/a", "headers": {"x-api-key": "a secret of alice"}});
    for _ in 0..2 {
        let found = Client::connect(gateways[1].admin)
            .request(
                "POST",
                "/v1/explain",
                &[("Host", &gateways[1].admin.to_string())],
                question.to_string().as_bytes(),
            )
            .expect(200)
            .json();
        assert_eq!((&found["decision"], &found["status"]), (&json!("refused"), &json!(429)), "{found}");
        let rule = &found["rules"][0];
        assert_eq!((&rule["shared"], &rule["windows"][0]["count"]), (&json!(true), &json!(5)));
        let digest = rule["key"][0]["value"].as_str().unwrap();
        assert!(redis.keys().iter().any(|key| key.contains(&format!("{{r|{digest}}}"))), "{digest} {:?}", redis.keys());
    }
    gateways[1].client().get_with("/a", &fields).expect(429);
}

#[test]
fn every_form_of_a_request_has_the_same_explanation() {
    let gateway = gateway();
    let question = json!({"url": format!("http://{HOST}/v1/a/b"), "client": "192.0.2.50"});
    let forms = [
        format!("GET /v1/a/b HTTP/1.1\r\nHost: {HOST}\r\n"),
        format!("GET http://{HOST}/v1/a/b HTTP/1.1\r\nHost: {HOST}\r\n"),
        format!("GET /v1/a/b HTTP/1.0\r\nHost: {HOST}\r\n"),
        format!("GET http://{HOST}/v1/a/b HTTP/1.0\r\n"),
        format!("GET //v1/./a/%62 HTTP/1.1\r\nhost: {}.:80\r\n", HOST.to_uppercase()),
        format!("GET /v1/a/b HTTP/1.1\r\nHost: {HOST}\r\n"),
    ];
    for (used, form) in forms.iter().enumerate() {
        let found = explain(&gateway, &question);
        assert_eq!(found["rules"][0]["windows"][1]["count"], used, "{form}");
        let mut client = gateway.client();
        client.send(format!("{form}X-Forwarded-For: 192.0.2.50\r\n\r\n"));
        let status = client.read_response().status;
        assert_eq!(u64::from(status), found["status"].as_u64().unwrap_or(200), "{form}");
        assert_eq!(status, if used < 5 { 200 } else { 429 }, "{form}");
    }
}

#[test]
fn requests_in_flight_are_explained() {
    let rule = |more: &str| format!("workers = 1\n{}", one_rule(&format!("key = \"ip\"\nconcurrent = 1\n{more}")));
    let in_flight = |gateway: &Gateway| gateway.metrics().sum("transom_concurrent_requests", &[("rule", "r")]);
    for (more, decision, status) in [
        ("", "refused", Some(429)),
        ("on_limit = \"shadow\"", "admitted", None),
        ("on_limit = \"delay\"\nmax_delay = \"1m\"\nmax_waiting = 1", "delayed", None),
    ] {
        let gateway = Gateway::start(&rule(more));
        let asked = Asked("GET", "/a", &[], "127.0.0.1");
        assert_eq!(asked.explain(&gateway)["decision"], "admitted");
        let mut upload = gateway.client();
        upload.send(format!("POST /upload HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\n\r\na"));
        eventually_eq(|| in_flight(&gateway), 1);
        let found = asked.explain(&gateway);
        assert_eq!((&found["decision"], &found["status"]), (&json!(decision), &json!(status)), "{found:#}");
        assert_eq!(found["rules"][0]["concurrent"], json!({"name": "r", "count": 1, "limit": 1, "remaining": 0}));
        assert_eq!(in_flight(&gateway), 1, "a question takes no slot");
        if decision == "delayed" {
            let delayed = || gateway.metrics().sum("transom_decisions_total", &[("outcome", "delayed")]);
            let mut waiting = gateway.client();
            waiting.send(format!("GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
            eventually_eq(delayed, 1);
            let found = asked.explain(&gateway);
            assert_eq!((&found["decision"], &found["status"]), (&json!("refused"), &json!(429)), "{found:#}");
            assert!(found["reason"].as_str().unwrap().contains("`max_waiting`"), "{found:#}");
            gateway.get("/a").expect(429);
            upload.send("bc");
            waiting.read_response().expect(200);
        } else {
            assert_eq!(u64::from(gateway.get("/a").status), found["status"].as_u64().unwrap_or(200));
            upload.send("bc");
        }
        upload.read_response_to("POST").expect(200);
    }
}

#[test]
fn rules_are_explained_by_their_policy_during_an_outage() {
    let mut redis = RedisServer::start();
    let rules: String = ["local", "allow", "refuse"]
        .map(|policy| {
            format!(
                "[rules.{policy}]\nkey = \"ip\"\nwindows = [\"2/30d\"]\non_outage = \"{policy}\"\n\
                 [[routes]]\npath = \"/{policy}\"\nupstream = \"u\"\nrules = [\"{policy}\"]\n"
            )
        })
        .concat();
    let gateway = Process::spawn(&format!(
        "[counters.shared]\nredis = \"{}\"\nmode = \"exact\"\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}\
         [rules.alone]\nkey = \"ip\"\nwindows = [\"1/30d\"]\nshared = \"off\"\n\
         [[routes]]\npath = \"/alone\"\nupstream = \"u\"\nrules = [\"refuse\", \"alone\"]\n",
        redis.url()
    ));
    gateway.get("/local").expect(200);
    gateway.get("/alone").expect(200);
    redis.kill();
    let ask = |path: &str| explain_of_process(&gateway, path, &[]);
    for (path, status) in [("/allow", None), ("/refuse", Some(503)), ("/local", None), ("/alone", Some(429))] {
        let found = ask(path);
        assert_eq!(found["status"], json!(status), "{found:#}");
        assert_eq!(u64::from(gateway.get(path).status), status.unwrap_or(200), "{path}");
    }
    let refuse = ask("/refuse");
    assert_eq!((&refuse["rules"][0]["result"], &refuse["rules"][0]["store"]), (&json!("error"), &json!("unreachable")));
    assert_eq!(
        (&ask("/allow")["rules"][0]["store"], &ask("/local")["rules"][0]["store"]),
        (&json!("unreachable"), &json!("unreachable"))
    );
    while gateway.get("/local").status == 200 {}
    assert_eq!((&ask("/local")["decision"], &ask("/local")["status"]), (&json!("refused"), &json!(429)));
}

/// A window that is known to be full refuses before the store is asked, whatever `on_outage` says.
#[test]
fn a_window_that_is_known_to_be_full_is_explained_as_full_during_an_outage() {
    let mut redis = RedisServer::start();
    let delay = "on_limit = \"delay\"\nmax_delay = \"1d\"";
    let cost = "cost = { request-header = \"x-cost\", max = 9 }";
    let (mut rules, mut paths) = (String::new(), Vec::new());
    for (name, policy, window, more, status) in [
        ("allow", "allow", "\"2/30d\"", "", 429),
        ("refuse", "refuse", "\"2/30d\"", "", 429),
        ("local", "local", "\"2/30d\"", "", 429),
        // Only the store could say when the request is admitted.
        ("delay-allow", "allow", "\"2/1d\"", delay, 200),
        ("delay-refuse", "refuse", "\"2/1d\"", delay, 503),
        ("costly", "refuse", "{ limit = 2, period = \"30d\", sliding = true }", cost, 429),
    ] {
        rules += &format!("[rules.{name}]\nkey = \"ip\"\nwindows = [{window}]\non_outage = \"{policy}\"\n{more}\n");
        rules += &format!("[[routes]]\npath = \"/{name}\"\nupstream = \"u\"\nrules = [\"{name}\"]\n");
        paths.push((format!("/{name}"), status));
    }
    for name in ["refuse", "local"] {
        rules += &format!("[[routes]]\npath = \"/other-{name}\"\nupstream = \"u\"\nrules = [\"other\", \"{name}\"]\n");
        paths.push((format!("/other-{name}"), 429));
    }
    let gateway = Process::spawn(&format!(
        "[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}\
         [rules.other]\nkey = \"ip\"\nwindows = [\"9/30d\"]\nshared = \"exact\"\non_outage = \"refuse\"\n",
        redis.url()
    ));
    for (path, _) in &paths[..6] {
        assert_eq!([0; 2].map(|_| gateway.get(path).status), [200; 2], "{path}");
    }
    redis.kill();
    for (path, status) in paths {
        let fields: &[_] = if path == "/costly" { &[("x-cost", "3")] } else { &[] };
        let found = explain_of_process(&gateway, &path, fields);
        assert_eq!(gateway.client().get_with(&path, fields).status, status, "{path}");
        assert_eq!(found["status"].as_u64().unwrap_or(200), u64::from(status), "{path}: {found:#}");
    }
}

/// Once the outage is noticed, `on_outage` decides about full windows of which only the store knows whether tokens have come back:
/// sliding ones, and those of exact rules.
#[test]
fn full_windows_that_only_the_store_knows_are_explained_by_their_policy() {
    let mut redis = RedisServer::start();
    let (mut rules, mut expected) = (String::new(), Vec::new());
    for (policy, status) in [("allow", 200), ("refuse", 503), ("local", 429)] {
        for (mode, sliding) in [("lease", true), ("exact", true), ("exact", false)] {
            let name = format!("{policy}-{mode}-{sliding}");
            rules += &format!(
                "[rules.{name}]\nkey = \"ip\"\nwindows = [{{ limit = 2, period = \"30d\", sliding = {sliding} }}]\n\
                 shared = \"{mode}\"\non_outage = \"{policy}\"\n\
                 [[routes]]\npath = \"/{name}\"\nupstream = \"u\"\nrules = [\"{name}\"]\n"
            );
            expected.push((format!("/{name}"), status));
        }
    }
    let gateway = Process::spawn(&format!(
        "workers = 1\n[counters.shared]\nredis = \"{}\"\ntimeout = \"1s\"\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}\
         [rules.other]\nkey = \"ip\"\nwindows = [\"1000000/30d\"]\nshared = \"exact\"\n\
         [[routes]]\npath = \"/other\"\nupstream = \"u\"\nrules = [\"other\"]\n",
        redis.url()
    ));
    for (path, _) in &expected {
        assert_eq!([0; 3].map(|_| gateway.get(path).status), [200, 200, 429], "{path}");
    }
    redis.kill();
    eventually("the outage is noticed", || {
        gateway.get("/other").expect(200);
        gateway.metrics().sum("transom_shared_servers_unreachable", &[]) > 0
    });
    for (path, status) in expected {
        assert_eq!(u64::from(gateway.get(&path).status), status, "{path}");
        let found = explain_of_process(&gateway, &path, &[]);
        assert_eq!(found["status"].as_u64().unwrap_or(200), status, "{path}: {found:#}");
    }
}

#[test]
fn the_state_of_the_store_and_leased_tokens_are_stated() {
    let mut redis = RedisServer::start();
    let rules = "[rules.leased]\nkey = \"ip\"\nwindows = [\"1000/30d\"]\n\
                 [rules.exact]\nkey = \"ip\"\nwindows = [\"1000/30d\"]\nshared = \"exact\"\n\
                 [rules.own]\nkey = \"ip\"\nwindows = [\"1000/30d\"]\nshared = \"off\"\n\
                 [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"leased\", \"exact\", \"own\"]\n";
    let gateway = Process::spawn(&format!(
        "[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}",
        redis.url()
    ));
    let ask = |accept: &str| {
        let (body, host) = (json!({"url": "http://a/"}).to_string(), gateway.admin.to_string());
        let fields = [("Host", host.as_str()), ("Accept", accept)];
        Client::connect(gateway.admin).request("POST", "/v1/explain", &fields, body.as_bytes()).expect(200)
    };
    let stores = || {
        let rules = ask("application/json").json()["rules"].take();
        let of = |rule: &Value| (rule["store"].clone(), rule["may_include_leased"].clone());
        rules.as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    let text = || String::from_utf8(ask("text/plain").body).unwrap();
    let (leased, unreachable) =
        ("they may include tokens that other gateways have leased", "the shared store cannot be reached");
    gateway.get("/").expect(200);
    let reachable = json!("reachable");
    let expected = [(&reachable, true), (&reachable, false), (&Value::Null, false)];
    assert_eq!(stores(), expected.map(|(store, is_leased)| (store.clone(), json!(is_leased))));
    assert_eq!((text().matches(leased).count(), text().matches(unreachable).count()), (1, 0), "{}", text());
    redis.kill();
    let expected = [json!("unreachable"), json!("unreachable"), Value::Null];
    assert_eq!(stores(), expected.map(|store| (store, json!(false))));
    assert_eq!((text().matches(leased).count(), text().matches(unreachable).count()), (0, 2), "{}", text());
}

#[test]
fn malformed_questions_get_400() {
    let gateway = gateway();
    let post = |body: &str| Client::connect(gateway.admin).post("/v1/explain", body);
    for (body, detail) in [
        ("{}", "`url` is missing"),
        (r#"{"url": "ftp://a/"}"#, "not a URL of http or https"),
        (r#"{"url": "http://a/", "client": "me"}"#, "`client` is neither an IP address nor `unix:`"),
        (r#"{"url": "http://a/", "headers": {"a b": "c"}}"#, "`a b` is not the name of a header"),
    ] {
        let problem = post(body).expect(400).problem();
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{problem}");
    }
    let get = Client::connect(gateway.admin).get("/v1/explain").expect(405);
    assert_eq!(get.field("allow"), Some("POST"));
}

/// `run` with a configuration whose admin address is this port.
fn command(file: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
    run(&[&["explain", "--config", file], arguments].concat())
}

fn config_on(port: u16) -> String {
    format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:{port}\" }}\n{}",
        one_rule("key = \"ip\"\nwindows = [\"3/366d\"]")
    )
}

#[test]
fn the_command_asks_the_running_gateway() {
    let process = Process::spawn(&config_on(free_port()));
    let file = process.config_path().display().to_string();
    process.get("/a");
    let (code, out, err) = command(&file, &["-H", "X-A: 1", "-H", "x-a;", "--client", "127.0.0.1", "http://a:8080/b"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(
        lines[..6],
        [
            "request:  GET http://a:8080/b from 127.0.0.1",
            "decision: admitted",
            "reason:   every rule that applies has room",
            "route:    `all` (/{*rest}), forwards to upstream `u`: it is the only route that matches host and path",
            "",
            "rule `r`: admits the request: there is room",
        ]
    );
    assert_eq!(lines[6], "  key: ip = 127.0.0.1; cost 1");
    assert!(lines[7].contains("1 of 3 used, 2 left, resets in ") && lines.len() == 8, "{out}");
    (0..2).for_each(|_| drop(process.get("/a").expect(200)));
    let (code, out, _) = command(&file, &["-X", "POST", "--json", "http://a/b"]);
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &found["decision"], &found["live"]), (Some(0), &json!("refused"), &json!(true)));
    process.get("/a").expect(429);
}

/// The key and the reserve are read from the body, by the running gateway and by the file.
#[test]
fn the_command_explains_a_request_with_a_body() {
    let rule = "key = \"json:/model\"\non_missing_key = \"skip\"\nwindows = [\"900/366d\"]\n\
                cost = { usage = \"auto\", reserve = { json = \"/max_tokens\", default = 5 } }";
    let toml =
        |port: u16| format!("listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:{port}\" }}\n{}", one_rule(rule));
    let process = Process::spawn(&toml(free_port()));
    let file = process.config_path().display().to_string();
    let (folder, body) = (TempDir::new(), r#"{"model":"a","max_tokens":70}"#);
    let data = format!("@{}", folder.write("body.json", body).display());
    let stopped = folder.write("gateway.toml", toml(free_port())).display().to_string();
    for (file, data) in [(&file, body), (&file, data.as_str()), (&stopped, body)] {
        let (code, out, err) = command(file, &["-d", data, "http://a/b"]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
        assert!(out.starts_with("request:  POST http://a/b"), "{out}");
        assert!(out.contains("  key: json:/model = a; cost 70, reserved by `json`\n"), "{out}");
    }
    let (_, out, _) = command(&file, &["-d", r#"{"model":1,"Model":2}"#, "http://a/b"]);
    assert!(out.contains("decision: error with 400"), "{out}");
}

/// Rules that depend on the body are left out where the gateway does not read it: it is refused before, or cannot be read.
#[test]
fn a_body_is_explained_as_the_gateway_treats_it() {
    let rules = "[rules.calls]\nkey = \"ip\"\nwindows = [\"2/minute\"]\n\
                 [rules.models]\nkey = \"json:/model\"\non_missing_key = \"refuse\"\nwindows = [\"1/day\"]\n";
    let gateway = Gateway::start(&format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n{rules}\
         [[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"calls\", \"models\"]\n"
    ));
    let (body, repeated) = (r#"{"model":"a"}"#, r#"{"model":1,"Model":2}"#);
    for (body, fields, results) in [
        (body, None, ["admits", "admits"]),
        (body, None, ["admits", "refuses"]),
        (repeated, None, ["admits", "not counted"]),
        (repeated, None, ["refuses", "not counted"]),
        (body, None, ["refuses", "not counted"]),
        ("", Some(("Content-Length", "9999999")), ["refuses", "not counted"]),
    ] {
        let headers: BTreeMap<_, _> = fields.into_iter().collect();
        let question = json!({"method": "POST", "url": "http://a/a", "body": body, "headers": headers});
        let found = explain(&gateway, &question);
        let of_rules: Vec<_> = found["rules"].as_array().unwrap().iter().map(|rule| &rule["result"]).collect();
        assert_eq!(of_rules, results, "{found:#}");
        let fields: Vec<_> = headers.into_iter().collect();
        let got = gateway.client().request("POST", "/a", &fields, body.as_bytes());
        assert_agrees(&found, &got, "POST", rules, false, &format!("{body} {found:#} {got:?}"));
    }
    gateway.advance_s(60);
    let too_long = json!({"method": "POST", "url": "http://a/a", "headers": {"Content-Length": "9999999"}});
    let found = explain(&gateway, &too_long);
    assert_eq!((&found["status"], &found["rules"][1]["result"]), (&json!(413), &json!("not counted")), "{found:#}");
    gateway.client().request("POST", "/a", &[("Content-Length", "9999999")], b"").expect(413);
}

#[test]
fn a_condition_on_the_body_is_explained() {
    let rule =
        "[rules.large]\nkey = \"global\"\nwindows = [\"9/day\"]\nwhen = { json = \"/model\", in = [\"large\"] }\n";
    let gateway = Gateway::start(&format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n{rule}[[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"large\"]\n"
    ));
    for (model, reason) in [("large", "there is room"), ("small", "the body of the request does not meet `when`")] {
        let body = json!({ "model": model }).to_string();
        let found = explain(&gateway, &json!({"method": "POST", "url": "http://a/a", "body": body}));
        assert_eq!(found["rules"][0]["reason"], reason);
    }
}

/// The gateway reads the file with the token again when it changes, and so does the command.
#[test]
fn the_command_sends_the_token() {
    let scratch = TempDir::new();
    let token = scratch.write("token", "0123456789abcdef");
    let toml = format!("admin = {{ token_file = {token:?} }}\n{}", config_on(free_port()));
    let process = Process::spawn_command(std::process::Command::new(BINARY), &toml, TempDir::new());
    let file = process.config_path().display().to_string();
    let post = || Client::connect(process.admin).request("POST", "/v1/explain", &[("Host", "localhost")], b"{}");
    post().expect(401);
    let (code, out, err) = command(&file, &["--json", "http://a/b"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["live"], true);
    scratch.write("token", "fedcba9876543210");
    process.wait_for_applied_reloads(1);
    let (code, _, err) = command(&file, &["http://a/b"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    post().expect(401);
}

#[test]
fn without_a_gateway_the_command_shows_empty_windows() {
    let scratch = TempDir::new();
    let file = scratch.write("gateway.toml", config_on(free_port())).display().to_string();
    let (code, out, err) = command(&file, &["http://a/b"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("0 of 3 used, 3 left") && out.ends_with(": all windows are shown empty\n"), "{out}");
    let (_, out, _) = command(&file, &["--json", "a/b"]);
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&found["live"], &found["rules"][0]["windows"][0]["count"]), (&json!(false), &json!(0)));
    // Nothing listens at a port that the system chooses, and without an admin address there is nothing to ask.
    for listen in ["http = \"127.0.0.1:0\"", "http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\""] {
        let text = config_on(1).replace("http = \"127.0.0.1:0\", admin = \"127.0.0.1:1\"", listen);
        fs::write(&file, text).unwrap();
        let (code, out, _) = command(&file, &["http://a/b"]);
        assert!(code == Some(0) && out.contains("has no admin address to ask"), "{out}");
    }
}

#[test]
fn wrong_usage_exits_with_2_and_a_failure_with_1() {
    let scratch = TempDir::new();
    let other_server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other_server.local_addr().unwrap().port();
    let file = scratch.write("gateway.toml", config_on(port)).display().to_string();
    for (arguments, message) in [
        (&["ftp://a/"][..], "`ftp://a/` is not a URL of http or https"),
        (&["http://a b/"], "`http://a b/` is not a URL"),
        (&["-X", "G T", "http://a/"], "`G T` is not a method"),
        (&["-H", "nonsense", "http://a/"], "write `Name: value`"),
        (&["-H", "a b: c", "http://a/"], "`a b` is not the name of a header"),
        (&["--client", "acme", "http://a/"], "invalid value 'acme'"),
        (&[], "<URL>"),
    ] {
        let (code, out, err) = command(&file, arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        assert!(err.contains(message), "{arguments:?}: {err}");
    }
    let bad = scratch.write("bad.toml", "listn = 1\n").display().to_string();
    let (code, _, err) = command(&bad, &["http://a/"]);
    assert!(code == Some(2) && err.contains("bad.toml:1:1"), "{err}");
    // Another server answers at the admin address.
    let answering = thread::spawn(move || {
        let (mut stream, _) = other_server.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"}") {
            let mut bytes = [0; 1024];
            let length = stream.read(&mut bytes).unwrap();
            request.extend_from_slice(&bytes[..length]);
        }
        stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    let (code, out, err) = command(&file, &["http://a/"]);
    answering.join().unwrap();
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains(&format!("the gateway at http://127.0.0.1:{port} cannot explain the request: 404")), "{err}");
}
