//! The dashboard and its events: format, bounds, access, and the page in a browser.
//!
//! tests/external/dashboard.cjs drives Chromium, and tests/external/firefox.cjs Firefox.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::Digest;
use transom_limiter::secret_digest::Digest as SecretDigest;

use crate::support::client::{Client, HOST, request};
use crate::support::external_servers::{CHROMIUM, node, program};
use crate::support::gateway::Gateway;
use crate::support::gateway_group::shared_config;
use crate::support::process::{BINARY, Process};
use crate::support::redis::{RedisServer, free_port};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, one_rule, seeded_rng};

const STREAMS_MAX: usize = 16;

/// A stream of `/v1/events`.
struct Events {
    client: Client,
    text: String,
}

impl Events {
    fn open(admin: SocketAddr) -> Events {
        Events::open_at(admin, "/v1/events")
    }

    fn open_at(admin: SocketAddr, target: &str) -> Events {
        let mut client = Client::connect(admin);
        client.send(request("GET", target, &[], b""));
        let head = client.read_head().unwrap();
        assert_eq!((head.status, head.field("content-type")), (200, Some("text/event-stream")), "{head:?}");
        assert_eq!(head.field("cache-control"), Some("no-store"));
        Events { client, text: String::new() }
    }

    /// The next event with its name; `None` at the end of the stream.
    fn next(&mut self) -> Option<(String, Value)> {
        while !self.text.contains("\n\n") {
            self.text.push_str(&String::from_utf8(self.client.read_chunk()?).unwrap());
        }
        let (event, rest) = self.text.split_once("\n\n").unwrap();
        let (mut name, mut data) = (String::from("message"), None);
        for line in event.lines() {
            match line.split_once(": ").unwrap() {
                ("retry", "1000") => {}
                ("event", text) => name = text.to_owned(),
                ("data", text) => data = Some(serde_json::from_str(text).unwrap()),
                _ => panic!("{line:?}"),
            }
        }
        self.text = rest.to_owned();
        match data {
            Some(data) => Some((name, data)),
            None => self.next(),
        }
    }

    /// The next event of this name that fulfils a condition.
    fn find(&mut self, wanted: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut found = Value::Null;
        eventually(&format!("an event `{wanted}`"), || {
            let (name, data) = self.next().expect("the stream ended");
            let is_found = name == wanted && holds(&data);
            if is_found {
                found = data;
            }
            is_found
        });
        found
    }
}

#[test]
fn events_have_what_was_counted() {
    let upstream = Upstream::always(200);
    let rules = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"2/minute\"]\n\
                 [rules.r.plans.gold]\nwindows = [\"9/minute\", \"20/hour\"]\nconcurrent = 4\n\
                 [[routes]]\nname = \"api\"\npath = \"/a\"\nupstream = \"u\"\nrules = [\"r\"]\n\
                 [[routes]]\nname = \"broken\"\npath = \"/b\"\nrespond = { status = 503 }\n";
    let gateway = Gateway::start(&format!("{}{rules}", upstream.toml("u")));
    let mut events = Events::open(gateway.admin);
    let (name, config) = events.next().unwrap();
    assert_eq!((&*name, &config["token_required"], &config["reloads"]), ("config", &json!(false), &json!([])));
    let rule = json!({
        "name": "r", "key": ["header:x-user"], "limits": ["2/minute"], "on_limit": "refuse",
        "shared": false, "plan_count": 1,
        "plans": [{ "name": "gold", "limits": ["9/minute", "20/hour", "4 at a time"] }],
    });
    assert_eq!(config["rules"], json!([rule]));
    assert_eq!(config["routes"][0], json!({ "name": "api", "path": "/a", "rules": ["r"], "upstream": "u" }));
    assert_eq!(
        (&config["route_count"], &config["rule_count"], &config["clients"]),
        (&json!(2), &json!(1), &json!(false))
    );
    assert!(config["text"].as_str().unwrap().contains("[rules.r]") && config["loaded"].is_u64());
    let first = events.find("message", |_| true);
    assert_eq!((&first["draining"], &first["shared"]), (&json!(false), &Value::Null));
    for status in [200, 200, 429, 429, 429] {
        gateway.get_with("/a", &[("X-User", "ann")]).expect(status);
    }
    gateway.get("/b").expect(503);
    gateway.get("/nowhere").expect(404);
    let refused = |sample: &Value| sample["all"][1] == 3;
    // The table and the busiest keys are not read for each event.
    let is_read = |event: &Value| event["top"]["refused"][0]["total"] == 3 && event["counters"]["live"] == 1;
    let live = events.find("message", is_read);
    assert_eq!(live["top"]["refused"][0]["keys"][0]["label"], "ann");
    assert_eq!(live["counters"]["overflow"], 0);
    let server = &live["upstreams"][0]["servers"][0];
    assert_eq!((&server["state"], &server["requests"], &server["active"]), (&json!("in"), &json!(2), &json!(0)));
    // A sample of the history ends every ten seconds.
    gateway.advance_s(10);
    let history = events.find("history", |_| true);
    let sample = history.as_array().unwrap().iter().find(|sample| refused(sample)).unwrap();
    assert_eq!((sample["ms"].as_u64(), &sample["all"][0], &sample["all"][2]), (Some(10_000), &json!(7), &json!(1)));
    let routes: Vec<_> = sample["routes"].as_array().unwrap().iter().map(|route| (&route[0], &route[1][0])).collect();
    assert_eq!(routes, [(&json!(""), &json!(1)), (&json!("api"), &json!(5)), (&json!("broken"), &json!(1))]);
    assert!(sample["all"][4].as_u64() >= sample["all"][3].as_u64(), "{sample}");
    assert_eq!(sample["rules"], json!([["api", "r", [2, 3, 0, 0, 0]]]));
    assert_eq!((&sample["windows"], &sample["usage"]), (&json!([["r", "r", 3]]), &json!([])));
    assert_eq!(sample["errors"], json!([["no_route", 1]]));
    // A later stream begins with the history.
    let mut later = Events::open(gateway.admin);
    assert_eq!(later.find("history", |_| true), history);
    later.find("message", |event| event["live"]["all"] == json!([0, 0, 0, null, null]));
    // Longer histories have the same requests, also those of samples that have not ended.
    let sum = |samples: &Value| {
        samples.as_array().unwrap().iter().map(|sample| sample["all"][0].as_u64().unwrap()).sum::<u64>()
    };
    let mut day = Events::open_at(gateway.admin, "/v1/events?hours=24");
    assert_eq!(sum(&day.find("history", |_| true)), 7);
    gateway.advance_s(600);
    let ended = day.find("history", |samples| samples[0]["ms"].as_u64() > Some(100_000));
    assert_eq!(sum(&ended), 7);
}

#[test]
fn streams_are_limited() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"9/minute\"]"));
    // Most of them do not read.
    let mut streams: Vec<_> = (0..STREAMS_MAX).map(|_| Events::open(gateway.admin)).collect();
    let refused = Client::connect(gateway.admin).get("/v1/events").expect(503);
    assert_eq!(refused.json()["detail"], "too many streams of events are open: close other dashboards");
    (0..3).for_each(|_| drop(streams[0].find("message", |_| true)));
    streams.truncate(5);
    eventually("the other streams have ended", || {
        let mut client = Client::connect(gateway.admin);
        client.send(request("GET", "/v1/events", &[], b""));
        client.read_head().unwrap().status == 200
    });
    // The other pages do not depend on them.
    Client::connect(gateway.admin).get("/metrics").expect(200);
}

#[test]
fn events_are_for_pages_of_this_origin() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"9/minute\"]"));
    let mut client = Client::connect(gateway.admin);
    for fields in [&[("Origin", "http://evil.example")][..], &[("Sec-Fetch-Site", "cross-site")]] {
        client.get_with("/v1/events", fields).expect(403).problem();
    }
    client.get_with("/v1/events", &[("Host", "evil.example")]).expect(421);
    client.get_with("/", &[("Host", "evil.example")]).expect(421);
    for page in ["/", "/v1/events"] {
        let reply = Client::connect(gateway.admin).post(page, "").expect(405);
        assert_eq!(reply.field("allow"), Some("GET, HEAD"), "{page}");
    }
    client.request("HEAD", "/v1/events", &[], b"").expect(200);
    client.request("HEAD", "/", &[], b"").expect(200);
    client.get("/v1/events/more").expect(404);
    gateway.get("/v1/events").expect(200).json();
}

#[test]
fn the_page_runs_its_own_script_only() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"9/minute\"]"));
    let page = Client::connect(gateway.admin).get("/").expect(200);
    assert_eq!(page.field("content-type"), Some("text/html; charset=utf-8"));
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(page.field(name), Some(value), "{name}");
    }
    assert_eq!(page.field("access-control-allow-origin"), None);
    let text = page.text();
    let digest = |element: &str| {
        assert_eq!(text.matches(&format!("<{element}")).count(), 1);
        let content =
            text.split(&format!("<{element}>")).nth(1).unwrap().split(&format!("</{element}>")).next().unwrap();
        STANDARD.encode(sha2::Sha256::digest(content))
    };
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'",
        digest("script"),
        digest("style")
    );
    assert_eq!(page.field("content-security-policy"), Some(&*policy));
    for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick="] {
        assert!(!text.contains(word), "{word}");
    }
    // The only addresses are names of XML, and an example.
    let is_known = |rest: &str| rest.starts_with("www.w3.org/2000/svg") || rest.starts_with("api.example/");
    assert!(text.split("://").skip(1).all(is_known), "an outside resource");
}

#[test]
fn reloads_are_listed_with_their_problems() {
    let toml = one_rule("key = \"ip\"\nwindows = [\"9/minute\"]");
    let process = Process::spawn(&toml);
    let mut events = Events::open(process.admin);
    process.write_config(&toml.replace("9/minute", "9/minit"));
    let rejected = events.find("config", |config| config["reloads"].as_array().unwrap().len() == 1);
    let problem = rejected["reloads"][0]["problem"].as_str().unwrap();
    assert!(problem.contains("minit"), "{problem}");
    assert_eq!(rejected["rules"][0]["limits"], json!(["9/minute"]));
    process.write_config(&toml.replace("9/minute", "8/minute"));
    let applied = events.find("config", |config| config["reloads"].as_array().unwrap().len() == 2);
    assert_eq!((&applied["reloads"][0]["problem"], &applied["reloads"][1]), (&Value::Null, &rejected["reloads"][0]));
    assert_eq!(applied["rules"][0]["limits"], json!(["8/minute"]));
}

#[test]
fn streams_show_the_drain_and_do_not_delay_it() {
    let mut process = Process::spawn("[drain]\ndelay = \"3s\"\n[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    let mut events = Events::open(process.admin);
    events.find("message", |event| event["draining"] == false);
    process.signal("TERM");
    events.find("message", |event| event["draining"] == true);
    assert!(process.wait().success());
}

#[test]
fn streams_end_when_another_process_takes_over() {
    let process = Process::spawn("[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    let mut events = Events::open(process.admin);
    let started = events.find("message", |_| true)["started"].clone();
    process.signal("USR2");
    eventually("the stream ends", || events.next().is_none());
    let mut events = Events::open(process.admin);
    assert_ne!(events.find("message", |_| true)["started"], started);
}

#[test]
fn streams_end_when_the_gateway_stops() {
    let process = Process::spawn("[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    let mut events = Events::open(process.admin);
    events.find("message", |_| true);
    process.signal("TERM");
    eventually("the stream ends", || events.next().is_none());
}

/// A browser with the dashboard.
struct Browser {
    child: Child,
    /// `None` once the browser is to end.
    commands: Option<ChildStdin>,
    results: BufReader<ChildStdout>,
}

impl Browser {
    fn start() -> Browser {
        Browser::driven_by("dashboard.cjs", CHROMIUM)
    }

    fn driven_by(driver: &str, browser: &str) -> Browser {
        let mut command = node(driver);
        command.arg(program(browser)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (commands, results) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Browser { child, commands, results }
    }

    #[track_caller]
    fn run(&mut self, command: Value) -> Value {
        writeln!(self.commands.as_ref().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        self.results.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("the browser failed at {command}"))
    }

    #[track_caller]
    fn open(&mut self, admin: SocketAddr, view: &str, bypass: bool) {
        self.run(json!({ "do": "open", "url": format!("http://{admin}/"), "view": view, "bypass": bypass }));
        self.wait("#connection", "live");
    }

    /// Uses a token in the form that asks for one.
    #[track_caller]
    fn sign_in(&mut self, token: &str) {
        self.run(json!({ "do": "fill", "of": "#token", "value": token }));
        self.click("#token-use");
        self.wait("#token-button", "Token set");
    }

    /// Waits until an element contains a text.
    #[track_caller]
    fn wait(&mut self, of: &str, text: &str) {
        self.run(json!({ "do": "wait", "of": of, "text": text }));
    }

    #[track_caller]
    fn click(&mut self, of: &str) {
        self.run(json!({ "do": "click", "of": of }));
    }

    #[track_caller]
    fn assert_accessible(&mut self, name: &str, view: &str) {
        let checked = self.run(json!({ "do": "check" }));
        assert_eq!(checked, json!({ "findings": [], "overflow": 0 }), "{name} {view}");
    }

    /// What the browser complained about, without these.
    #[track_caller]
    fn problems_but(&mut self, expected: &[&str]) -> Vec<String> {
        let problems: Vec<String> = serde_json::from_value(self.run(json!({ "do": "problems" }))).unwrap();
        problems.into_iter().filter(|problem| !expected.iter().any(|text| problem.contains(text))).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // At the end of its input, the driver ends the browser.
        drop(self.commands.take());
        let _ = self.child.wait();
    }
}

const HOSTILE: &str = "<img src=x onerror=alert(1)>";
const RULES: &str = r#"
[upstreams.u]
builtin = "echo"
[rules.per-user]
key = "header:x-user"
on_missing_key = "ip"
windows = [{ limit = 3, period = "hour", start = "first-request" }]
[[routes]]
name = "<b>api</b>"
path = "/{*rest}"
upstream = "u"
rules = ["per-user"]
"#;

#[test]
fn the_page_is_live_and_resets_keys_with_the_token() {
    // The gateway returns to its ports.
    let (http, admin) = (free_port(), free_port());
    let toml = format!(
        "listen = {{ http = \"127.0.0.1:{http}\", admin = \"127.0.0.1:{admin}\" }}\n\
         [admin]\ntoken_file = \"admin.token\"\nhosts = [\"{HOST}\"]\n{RULES}"
    );
    let start = |toml: &str| {
        let scratch = TempDir::new();
        scratch.write("admin.token", "the-right-token\n");
        Process::spawn_command(Command::new(BINARY), toml, scratch)
    };
    let process = start(&toml);
    let mut browser = Browser::start();
    browser.open(process.admin, "light", false);
    browser.wait("#keys", "No key was refused");
    let ask = |process: &Process, status: u16| process.client().get_with("/a", &[("X-User", HOSTILE)]).expect(status);
    (0..3).for_each(|_| drop(ask(&process, 200)));
    (0..5).for_each(|_| drop(ask(&process, 429)));
    // Names are text.
    browser.wait("#keys tbody th", HOSTILE);
    browser.wait("#routes tbody th", "<b>api</b>");
    browser.wait("#tiles", "8 in the last hour");
    browser.wait("#rules tbody", "5");
    assert_eq!(browser.run(json!({ "do": "count", "of": "img, main b" })), 0);
    // The charts show one route, and values at the pointer and by key.
    browser.click("#routes tbody button");
    browser.wait("#traffic-title", "Route <b>api</b>");
    browser.run(json!({ "do": "press", "of": "#traffic", "key": "ArrowLeft" }));
    browser.wait("#traffic .tip", "refused");
    browser.click("#values summary");
    browser.wait("#values tbody", "8");
    // Without the token, with a wrong one, with the right one.
    browser.click("#keys tbody button");
    browser.wait("#lookup-error", "A token is required.");
    browser.sign_in("a-wrong-token");
    browser.click("#lookup-button");
    browser.wait("#lookup-error", "The token is wrong.");
    browser.sign_in("the-right-token");
    browser.click("#lookup-button");
    browser.wait("#lookup-result", "3 of 3");
    browser.wait("#lookup-result", "The next request is refused, for");
    browser.click("#reset-button");
    browser.wait("#reset-button", "confirm");
    browser.click("#reset-button");
    browser.wait("#lookup-result", "0 of 3");
    ask(&process, 200);
    browser.wait("#lookup-result", "1 of 3");
    // The gateway may end while it is asked. The values are read again when it is back.
    let no_response = "(sent => { window.fetch = (path, ...rest) => path === '/v1/value' \
                       ? (window.fetch = sent, document.title = 'failed', Promise.reject(new TypeError('no response'))) \
                       : sent(path, ...rest); })(window.fetch)";
    browser.run(json!({ "do": "run", "script": no_response }));
    browser.wait("title", "failed");
    let storage = json!({ "do": "run", "script": "JSON.stringify([sessionStorage, localStorage])" });
    assert_eq!(browser.run(storage), json!("[{\"transom-admin-token\":\"the-right-token\"},{}]"));
    // A restart of the gateway.
    drop(process);
    browser.wait("#connection", "disconnected");
    browser.wait("#offline", "connects again by itself");
    let process = start(&toml.replace("limit = 3", "limit = 2"));
    browser.wait("#connection", "live");
    browser.wait("#rules tbody", "2/hour");
    ask(&process, 200);
    browser.wait("#lookup-result", "1 of 2");
    // The rate of the only route is that of all requests.
    let script = "document.querySelector('#tiles dd').firstChild.data + ' ' + \
                  document.querySelector('#routes tbody tr').children[2].textContent";
    eventually("the rate of the route is shown", || {
        process.client().get_with("/a", &[("X-User", HOSTILE)]);
        let rates = browser.run(json!({ "do": "run", "script": script }));
        let (all, of_route) = rates.as_str().unwrap().split_once(' ').unwrap();
        all == of_route && all != "0"
    });
    assert_eq!(browser.problems_but(&["net::ERR_", "status of 401"]), Vec::<String>::new());
}

#[test]
fn the_page_is_accessible_in_light_and_dark_and_on_a_phone() {
    let gateway = Gateway::start(RULES);
    let empty = Gateway::start("[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    for n in 0..40 {
        gateway.get_with("/a", &[("X-User", &format!("{}{}", "a-long-name-of-a-user-".repeat(4), n % 9))]);
    }
    gateway.advance_s(10);
    let mut browser = Browser::start();
    for (name, admin) in [("busy", gateway.admin), ("empty", empty.admin)] {
        for view in ["light", "phone"] {
            for bypass in [false, true] {
                browser.open(admin, view, bypass);
                browser.wait("#status", "Configuration");
                browser.wait(
                    if name == "busy" { "#keys tbody" } else { "#rules" },
                    if name == "busy" { "a-long-name" } else { "No rule" },
                );
                assert_eq!(browser.problems_but(&[]), Vec::<String>::new(), "{name} {view}");
                if bypass {
                    browser.assert_accessible(name, view);
                }
            }
        }
    }
}

#[test]
fn the_page_is_accessible_in_an_outage_and_with_a_looked_up_key() {
    let outage = Outage::new();
    let gateway = Gateway::start(RULES);
    for status in [200, 200, 200, 429] {
        gateway.get_with("/a", &[("X-User", "ann")]).expect(status);
    }
    let mut browser = Browser::start();
    for view in ["light", "phone"] {
        browser.open(outage.process.admin, view, true);
        browser.wait("#status", "unreachable");
        browser.assert_accessible("outage", view);
        browser.click("#views a[href='#clients']");
        browser.wait("#clients .clients", "the store cannot be reached");
        browser.assert_accessible("clients in an outage", view);
        browser.open(gateway.admin, view, true);
        browser.click("#keys tbody button");
        browser.wait("#lookup-result", "3 of 3");
        browser.assert_accessible("lookup", view);
        browser.click("#reset-button");
        browser.wait("#reset-button", "confirm");
        browser.assert_accessible("reset", view);
        browser.run(json!({ "do": "fill", "of": "#lookup-parts input", "value": "a\u{e9}" }));
        browser.click("#lookup-button");
        browser.wait("#lookup-error", "printable ASCII");
        browser.assert_accessible("lookup that fails", view);
    }
}

#[test]
fn the_page_distinguishes_a_server_that_is_down_from_an_outage() {
    let (dead, alive, failing) = (Upstream::refusing_connections(), Upstream::always(200), Upstream::always(503));
    let gateway = Gateway::start(&format!(
        "[upstreams.an-upstream-with-a-long-name]\nservers = [\"http://{}\", \"http://{}\"]\n\
         health = {{ path = \"/\", interval = \"20ms\", timeout = \"30s\" }}\n\
         [upstreams.failing]\nservers = [\"http://{}\"]\nejection = {{ failures = 1000, statuses = [503] }}\n\
         [[routes]]\npath = \"/a\"\nupstream = \"an-upstream-with-a-long-name\"\n\
         [[routes]]\npath = \"/b\"\nupstream = \"failing\"\n",
        dead.address, alive.address, failing.address
    ));
    let servers = || Client::connect(gateway.admin).get("/upstreams").expect(200).json().to_string();
    eventually("a server is unhealthy", || servers().contains("\"unhealthy\""));
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    let count = |browser: &mut Browser, of: &str| browser.run(json!({ "do": "count", "of": of }));
    // What is down stands beside the server, and does not tint the chart of all requests.
    gateway.advance_s(10);
    let strips =
        "[...document.querySelectorAll('#upstreams .downtime path')].map(strip => strip.getAttribute('d').length > 0)";
    let strips = |browser: &mut Browser| browser.run(json!({ "do": "run", "script": strips }));
    eventually_eq(|| strips(&mut browser), json!([true, false, false]));
    // The only server of the other upstream fails.
    (0..40).for_each(|_| drop(gateway.get("/b").expect(503)));
    gateway.advance_s(10);
    eventually_eq(|| strips(&mut browser), json!([true, false, true]));
    assert_eq!(count(&mut browser, "#traffic .outage"), json!(0));
    browser.wait("#upstreams tbody", "40 failures in a row");
    let failed = "document.querySelector('#routes tbody .spark .failed').getAttribute('d').length > 0";
    eventually("the route is drawn as failing", || {
        browser.run(json!({ "do": "run", "script": failed })) == json!(true)
    });
    // All columns of the upstreams are visible, at every width.
    for width in [390, 700, 1000, 1100, 1199, 1200, 1280, 1440, 1920] {
        browser.run(json!({ "do": "resize", "width": width }));
        let script = "(table => table.scrollWidth - table.clientWidth)(document.querySelector('#upstreams .scroll'))";
        assert_eq!(browser.run(json!({ "do": "run", "script": script })), json!(0), "{width}");
    }
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

/// A gateway with many routes and clients.
fn large_gateway() -> Gateway {
    let mut toml = String::from(
        "[admin]\nhosts = [\"gateway.test\"]\n[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n\
         [upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.per-client]\nkey = \"client\"\non_missing_key = \"ip\"\nwindows = [\"20/hour\", \"10/minute\"]\n\
         [rules.per-client.plans.gold]\nwindows = [\"200/hour\", \"100/minute\"]\n\
         [rules.per-client.plans.free]\nwindows = [\"20/hour\", \"10/minute\"]\n\
         [rules.trial]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"9/hour\"]\n\
         overrides = [{ key = \"hidden-key\", windows = [\"5/hour\"] }]\n",
    );
    for n in 0..150 {
        toml += &format!(
            "[[routes]]\nname = \"route-{n:03}\"\npath = \"/r{n}/{{*rest}}\"\nupstream = \"u\"\nrules = [\"per-client\"]\n"
        );
    }
    let client = |n: usize| {
        let (plan, digest) = (["gold", "free"][n % 2], SecretDigest::of(format!("key-{n}").as_bytes()));
        format!("[clients.client-{n:02}]\nplan = \"{plan}\"\napi_keys = [\"{digest}\"]\n")
    };
    let gateway = Gateway::start_with(&toml, &(0..60).map(client).collect::<String>());
    for (key, times) in [("key-1", 12), ("key-2", 30)] {
        (0..times).for_each(|_| drop(gateway.get_with("/r7/a", &[("X-Api-Key", key)])));
    }
    gateway.advance_s(10);
    gateway
}

#[test]
fn many_routes_and_clients_can_be_searched() {
    let gateway = large_gateway();
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    let count = |browser: &mut Browser, of: &str| browser.run(json!({ "do": "count", "of": of }));
    browser.wait("#routes .more", "Show 140 more");
    assert_eq!(count(&mut browser, "#routes tbody tr"), json!(10));
    browser.run(json!({ "do": "fill", "of": "#routes [type=search]", "value": "/r14 rest" }));
    browser.wait("#routes .more", "Show 1 more");
    browser.wait("#routes tbody", "route-145");
    browser.run(json!({ "do": "fill", "of": "#routes [type=search]", "value": "nothing like this" }));
    browser.wait("#routes .none", "Nothing matches the search.");
    browser.run(json!({ "do": "fill", "of": "#routes [type=search]", "value": "" }));
    browser.click("#routes .more");
    eventually_eq(|| count(&mut browser, "#routes tbody tr"), json!(150));
    browser.click("#routes .fold");
    let is_hidden = "document.querySelector('#routes .body').hidden";
    assert_eq!(browser.run(json!({ "do": "run", "script": is_hidden })), json!(true));

    // The clients, by use, by search and by plan.
    browser.click("#views a[href='#clients']");
    browser.wait("#clients .clients", "client-00");
    browser.wait("#clients .more", "Show 36 more");
    browser.run(json!({ "do": "select", "of": "#clients-sort", "value": "usage" }));
    browser.wait("#clients .clients li", "client-01");
    browser.wait("#clients .clients li", "10 of 10");
    browser.wait("#clients .clients li", "2 refused lately");
    browser.wait("#clients .clients li:nth-child(2)", "30 of 100");
    browser.run(json!({ "do": "fill", "of": "#clients-search", "value": "client-5" }));
    eventually_eq(|| count(&mut browser, "#clients .clients > li"), json!(10));
    browser.run(json!({ "do": "select", "of": "#clients-plan", "value": "gold" }));
    eventually_eq(|| count(&mut browser, "#clients .clients > li"), json!(5));
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

#[test]
fn usage_is_shown_beside_requests() {
    let usage = br#"{"usage":{"prompt_tokens":1000,"completion_tokens":20}}"#;
    let upstream = Upstream::responding(move |_| reply(200, &[("Content-Type", "application/json")], usage));
    let rule = "key = \"global\"\nwindows = [\"9000/day\"]\ncost = { usage = \"auto\", reserve = 10 }";
    let route = "[[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"tokens\"]\n";
    let gateway = Gateway::start(&format!("{}[rules.tokens]\n{rule}\n{route}", upstream.toml("u")));
    let mut events = Events::open(gateway.admin);
    (0..3).for_each(|_| drop(gateway.get("/a").expect(200)));
    gateway.advance_s(10);
    let history =
        events.find("history", |samples| samples[0]["usage"].as_array().is_some_and(|usage| !usage.is_empty()));
    assert_eq!(history[0]["usage"], json!([["tokens", "input", 3000], ["tokens", "output", 60]]));
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    let admitted = "#rules tbody tr:first-child td:nth-child(4)";
    browser.wait(admitted, "3");
    browser.wait(&format!("{admitted} small"), "input");
    browser.wait(&format!("{admitted} small"), "60 output");
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

#[test]
fn the_range_of_time_can_be_chosen() {
    let gateway = Gateway::start(RULES);
    let send = |times: usize| (0..times).for_each(|_| drop(gateway.get_with("/a", &[("X-User", "ann")])));
    let mut events = Events::open(gateway.admin);
    let mut advance_s = |seconds: u64| {
        gateway.advance_s(seconds);
        events.find("history", |_| true);
    };
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    for (requests, in_hour, pauses) in [(4, 4, 14), (2, 2, 1), (1, 3, 0)] {
        send(requests);
        // In a sample of its own.
        advance_s(10);
        browser.wait("#tiles", &format!("{in_hour} in the last hour"));
        (0..pauses).for_each(|_| advance_s(1800));
    }
    for (button, text) in [
        (1, "1 in the last 5 minutes"),
        (2, "3 in the last hour"),
        (3, "3 in the last 6 hours"),
        (4, "7 in the last 24 hours"),
    ] {
        browser.click(&format!("#ranges button:nth-child({button})"));
        browser.wait("#tiles", text);
        browser.wait("#traffic-title", &text[text.find("in the").unwrap()..]);
    }
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

#[test]
fn requests_are_explained_and_the_configuration_is_shown_without_secrets() {
    let gateway = large_gateway();
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    browser.click("#views a[href='#explain']");
    let fill =
        |browser: &mut Browser, of: &str, value: &str| browser.run(json!({ "do": "fill", "of": of, "value": value }));
    fill(&mut browser, "#explain-url", "http://a.example/r7/x");
    fill(&mut browser, "#explain-fields", "X-Api-Key: key-1\nx-other: a:b");
    browser.click("#explain-form button");
    browser.wait("#explanation", "route-007");
    browser.wait("#explanation", "10 of 10 used");
    fill(&mut browser, "#explain-fields", "");
    fill(&mut browser, "#explain-client", "client-03");
    browser.click("#explain-form button");
    browser.wait("#explanation", "0 of 10 used");
    fill(&mut browser, "#explain-client", "nobody");
    browser.click("#explain-form button");
    browser.wait("#explain-error", "nobody");
    browser.click("#views a[href='#configuration']");
    browser.wait("#running", "150 routes, 2 rules, 1 upstream");
    browser.wait("#config-text", "key = \"***\", windows = [\"5/hour\"]");
    let text = browser.run(json!({ "do": "text", "of": "main" }));
    assert!(!text.as_str().unwrap().contains("hidden-key"), "{text}");
    assert_eq!(browser.problems_but(&["status of 404"]), Vec::<String>::new());
}

/// Answers of the test, of which the first is a failure.
const OFFERED: &str = r#"(() => {
  window.sent = [];
  const own = window.fetch;
  window.fetch = async (path, options) => {
    if (!/deny|grants/.test(path)) return own(path, options);
    sent.push([path, JSON.parse(options.body), Boolean(options.headers["idempotency-key"])]);
    return new Response(JSON.stringify(sent.length > 1 ? {} : { detail: "not now" }), { status: sent.length > 1 ? 201 : 503, headers: { "content-type": "application/json" } });
  };
  state.config.access = true;
  state.offers = { "/v1/deny": { post: {} }, "/v1/clients/{name}/grants": { post: {} } };
  return true;
})()"#;

#[test]
fn clients_are_blocked_and_granted_more() {
    let gateway = large_gateway();
    let mut browser = Browser::start();
    browser.open(gateway.admin, "light", false);
    browser.click("#views a[href='#clients']");
    browser.wait("#clients .clients", "0 of 20");
    browser.run(json!({ "do": "run", "script": OFFERED }));
    let (grant, block) = ("[aria-label='Grant client-01']", "[aria-label='Block for client-01']");
    browser.click(grant);
    browser.run(json!({ "do": "fill", "of": "#action-fields input", "value": "500" }));
    browser.run(json!({ "do": "select", "of": "#action-fields select", "value": "0" }));
    browser.click("#action-do");
    browser.wait("#action-error", "not now");
    browser.click("#action-do");
    browser.wait("#action-error", "Granted 500 in per-client-hour.");
    browser.click("#action-close");
    browser.click(block);
    browser.run(json!({ "do": "fill", "of": "#action-fields input", "value": "scraper" }));
    browser.click("#action-do");
    browser.wait("#action-error", "Blocked until");
    browser.run(json!({ "do": "press", "of": "#action", "key": "Escape" }));
    // An address that is looked up.
    browser.click("#views a[href='#overview']");
    browser.run(json!({ "do": "select", "of": "#lookup-rule", "value": "trial" }));
    browser.run(json!({ "do": "fill", "of": "#lookup-parts input", "value": "a-device" }));
    browser.click("#lookup-button");
    browser.wait("#lookup-result", "0 of 9");
    browser.click("#block-button");
    browser.click("#action-do");
    browser.wait("#action-error", "Blocked until");
    let sent = browser.run(json!({ "do": "run", "script": "sent" }));
    let grant = json!(["/v1/clients/client-01/grants", { "rule": "per-client", "window": "per-client-hour", "tokens": 500 }, true]);
    assert_eq!((&sent[0], &sent[1]), (&grant, &grant));
    let entry = |n: usize| {
        let mut entry = sent[n][1].clone();
        (entry["until"].take().as_str().unwrap().to_owned(), entry)
    };
    let (until, of_client) = entry(2);
    // The manual clock is ten seconds after its start.
    assert_eq!(
        (until.as_str(), of_client),
        ("2023-11-14T23:15:10Z", json!({ "client": "client-01", "reason": "scraper", "until": null }))
    );
    let key = json!({ "part": "header:x-api-key", "value": "a-device" });
    assert_eq!(entry(3).1, json!({ "key": key, "until": null }));
    assert_eq!(browser.problems_but(&["status of 404"]), Vec::<String>::new());
}

#[test]
fn a_key_that_is_blocked_in_the_page_is_denied() {
    let scratch = TempDir::new();
    scratch.write("access.toml", "");
    let toml = format!("[access]\nfile = \"access.toml\"\n{RULES}");
    let process = Process::spawn_command(Command::new(BINARY), &toml, scratch);
    process.client().get_with("/a", &[("X-User", "ann")]).expect(200);
    let mut browser = Browser::start();
    browser.open(process.admin, "light", false);
    browser.run(json!({ "do": "fill", "of": "#lookup-parts input", "value": "ann" }));
    browser.click("#lookup-button");
    browser.wait("#lookup-result", "1 of 3");
    // The gateway may end while it is asked. The values are read again when it is back.
    let no_response = "window.sent = window.fetch; window.fetch = () => { document.title = 'failed'; \
                       window.fetch = window.sent; return Promise.reject(new TypeError('no response')); }; 0";
    browser.run(json!({ "do": "run", "script": no_response }));
    browser.wait("title", "failed");
    browser.click("#block-button");
    browser.click("#action-do");
    browser.wait("#action-error", "Blocked until");
    eventually("the key is denied", || process.client().get_with("/a", &[("X-User", "ann")]).status == 403);
    process.client().get_with("/a", &[("X-User", "bob")]).expect(200);
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

#[test]
fn tokens_that_are_granted_in_the_page_can_be_used() {
    let toml = "[clients]\nfile = \"clients.toml\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                [rules.per-client]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"1/366d\"]\n\
                plans.gold.windows = [\"2/366d\"]\n\
                [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"per-client\"]\n";
    let process = Process::spawn_with(toml, "[clients.acme]\nplan = \"gold\"\nnetworks = [\"127.0.0.0/8\"]\n");
    let statuses = |count: usize| (0..count).map(|_| process.get("/a").status).collect::<Vec<u16>>();
    assert_eq!(statuses(3), [200, 200, 429]);
    let mut browser = Browser::start();
    browser.open(process.admin, "light", false);
    browser.click("#views a[href='#clients']");
    browser.wait("#clients .clients", "2 of 2");
    browser.click("[aria-label='Grant acme']");
    browser.run(json!({ "do": "fill", "of": "#action-fields input", "value": "3" }));
    browser.click("#action-do");
    browser.wait("#action-error", "Granted 3 in per-client.");
    browser.click("#action-close");
    browser.wait("#clients .clients", "2 of 5");
    assert_eq!(statuses(4), [200, 200, 200, 429]);
    // Also beside the key that names the client.
    browser.click("#views a[href='#overview']");
    browser.run(json!({ "do": "fill", "of": "#lookup-parts input", "value": "acme" }));
    browser.click("#lookup-button");
    browser.wait("#lookup-result", "5 of 5");
    browser.click("#grant-button");
    browser.run(json!({ "do": "fill", "of": "#action-fields input", "value": "2" }));
    browser.click("#action-do");
    browser.wait("#action-error", "Granted 2 in per-client.");
    assert_eq!(statuses(3), [200, 200, 429]);
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

#[test]
fn the_page_asks_for_a_token() {
    let folder = TempDir::new();
    let file = folder.write("token", "a-token-of-support\n");
    let tokens = format!("tokens = [{{ name = \"support\", file = {file:?}, role = \"read\" }}]");
    let gateway = Gateway::start(&format!("[admin]\nhosts = [\"{HOST}\"]\n{tokens}\n{RULES}"));
    let mut browser = Browser::start();
    let url = format!("http://{}/", gateway.admin);
    for view in ["light", "phone"] {
        browser.run(json!({ "do": "open", "url": url, "view": view, "bypass": true }));
        browser.wait("#token-text", "A token is required.");
        browser.assert_accessible("sign in", view);
        browser.sign_in("a-wrong-token");
        browser.wait("#token-text", "The token is wrong.");
        browser.sign_in("a-token-of-support");
        browser.wait("#connection", "live");
        // The role may not reset.
        browser.run(json!({ "do": "fill", "of": "#lookup-parts input", "value": "ann" }));
        browser.click("#lookup-button");
        browser.wait("#lookup-result", "0 of 3");
        browser.click("#reset-button");
        browser.click("#reset-button");
        browser.wait("#lookup-error", "support");
        browser.click("#token-button");
        browser.click("#token-forget");
        browser.wait("#token-text", "A token is required.");
    }
}

#[test]
fn every_page_is_accessible() {
    let gateway = large_gateway();
    let mut browser = Browser::start();
    for view in ["light", "phone"] {
        browser.open(gateway.admin, view, true);
        for (page, of, text) in
            [("clients", "#clients", "of 20"), ("explain", "#explain", "URL"), ("configuration", "#running", "loaded")]
        {
            browser.click(&format!("#views a[href='#{page}']"));
            browser.wait(of, text);
            browser.assert_accessible(page, view);
        }
        browser.click("#views a[href='#clients']");
        browser.run(json!({ "do": "run", "script": OFFERED }));
        browser.click("[aria-label='Block for client-01']");
        browser.assert_accessible("dialog", view);
    }
}

#[test]
fn the_page_works_in_firefox() {
    let gateway = large_gateway();
    let mut browser = Browser::driven_by("firefox.cjs", "firefox-esr");
    browser.open(gateway.admin, "light", false);
    browser.wait("#tiles", "42 in the last hour");
    browser.click("#ranges button:nth-child(4)");
    browser.wait("#tiles", "42 in the last 24 hours");
    browser.wait("#keys tbody", "client-01");
    browser.click("#keys tbody button");
    browser.wait("#lookup-result", "10 of 10");
    browser.click("#views a[href='#clients']");
    browser.wait("#clients .clients", "30 of 100");
    browser.click("#views a[href='#configuration']");
    browser.wait("#running", "150 routes");
    browser.click("#theme");
    browser.wait("#theme", "light");
    assert_eq!(browser.problems_but(&[]), Vec::<String>::new());
}

/// An upgrade replaces the process; the page shows the next one, with the samples it has.
#[test]
fn the_page_continues_over_an_upgrade() {
    let process = Process::spawn(RULES);
    let mut browser = Browser::start();
    browser.open(process.admin, "light", false);
    for status in [200, 200, 200, 429] {
        process.client().get_with("/a", &[("X-User", "ann")]).expect(status);
    }
    // In a sample, which ends within ten seconds.
    browser.wait("#tiles", "4 in the last hour");
    let started = |browser: &mut Browser| browser.run(json!({ "do": "run", "script": "state.snapshot.started" }));
    let before = started(&mut browser);
    process.signal("USR2");
    eventually("the page shows the new process", || started(&mut browser) != before);
    browser.wait("#connection", "live");
    browser.wait("#tiles", "4 in the last hour");
    // A page that is opened now.
    browser.open(process.admin, "light", false);
    browser.wait("#tiles", "4 in the last hour");
}

/// A gateway whose shared store, which has the clients, cannot be reached.
struct Outage {
    process: Process,
    _redis: RedisServer,
    _copy: TempDir,
}

impl Outage {
    fn new() -> Outage {
        let (mut redis, copy) = (RedisServer::start(), TempDir::new());
        let rules = format!(
            "[clients]\nsource = \"shared\"\nfile = {:?}\n\
             [rules.per-address]\nkey = \"ip\"\nwindows = [\"900/hour\", \"90/minute\"]\n\
             [rules.per-client]\nkey = \"client\"\non_missing_key = \"skip\"\nwindows = [\"1/hour\"]\n\
             [rules.per-client.plans.gold]\nwindows = [\"4000/hour\"]\n\
             [rules.reports]\nkey = \"client\"\non_missing_key = \"skip\"\nwindows = [\"2000/hour\"]\non_outage = \"refuse\"\n",
            copy.path().join("clients.copy")
        );
        let process = Process::spawn(&shared_config(&format!("\"{}\"", redis.url()), "", &rules));
        let host = [("Host", &*process.admin.to_string())];
        for (name, network) in [("acme", "198.51.100.0/24"), ("initech", "192.0.2.0/24")] {
            let client = json!({ "plan": "gold", "networks": [network] }).to_string();
            let target = format!("/v1/clients/{name}");
            Client::connect(process.admin).request("PUT", &target, &host, client.as_bytes()).expect(201);
        }
        (0..60).for_each(|_| drop(process.get("/a").expect(200)));
        redis.kill();
        eventually("the gateway notices the outage", || {
            process.get("/a");
            process.metrics().sum("transom_shared_servers_unreachable", &[]) > 0
        });
        Outage { process, _redis: redis, _copy: copy }
    }
}

/// The gateway of the screenshots: a shop with an API.
const SHOP: &str = r#"
[listen]
http = "127.0.0.1:0"
admin = "127.0.0.1:0"
trusted_proxies = ["127.0.0.1"]
[admin]
hosts = ["gateway.test"]
[counters]
capacity = 20_000
[clients]
file = "clients.toml"
api_key = "header:x-api-key"
[rules.per-key]
key = "client"
on_missing_key = "ip"
windows = ["9000/hour", "300/minute"]
[rules.per-key.plans.free]
windows = ["1200/hour", "150/minute"]
[rules.per-key.plans.gold]
windows = ["40000/hour", "4000/minute"]
[rules.per-address]
key = "ip"
windows = ["9000/hour", { limit = 400, period = "minute", sliding = true }]
[rules.login]
key = ["ip", "header:x-user"]
on_missing_key = "skip"
windows = ["5/15m"]
penalty = "10m"
[rules.reports-trial]
key = "header:x-api-key"
on_missing_key = "ip"
windows = ["60/minute"]
on_limit = "shadow"
[[routes]]
path = "/v1/catalog/{*rest}"
upstream = "catalog"
rules = ["per-key", "per-address"]
[[routes]]
path = "/v1/search"
upstream = "search"
rules = ["per-key", "per-address"]
[[routes]]
path = "/v1/reports/{id}"
upstream = "catalog"
rules = ["per-key", "reports-trial"]
[[routes]]
path = "/login"
upstream = "catalog"
rules = ["login"]
[[routes]]
path = "/status"
respond = { status = 204 }
"#;

/// An upstream that takes some milliseconds for a response, and breaks connections off while it is broken.
fn slow_upstream(is_broken: &Arc<AtomicBool>) -> Upstream {
    let is_broken = Arc::clone(is_broken);
    Upstream::with_script(move |connection| {
        while connection.read_request().is_some() && !is_broken.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_micros((2000.0 / fastrand::f64().max(0.05)) as u64));
            connection.reply(200, &[], b"fine\n");
        }
    })
}

/// Sends the requests of ten seconds; `part` is the part of the hour that has passed.
fn send_requests(client: &mut Client, part: f64, rng: &mut fastrand::Rng) {
    let rush = (0.55..0.72).contains(&part);
    let requests = (60.0 + 50.0 * (part * 5.0).sin() + rng.f64() * 20.0) as usize;
    for number in 0..requests + if rush { 180 } else { 0 } {
        let (address, key) = match number {
            _ if number >= requests => ("198.51.100.23".to_owned(), "key of globex"),
            _ if rng.u8(..8) == 0 => ("203.0.113.80".to_owned(), "key of hooli"),
            _ => (format!("192.0.2.{}", rng.u8(1..90)), ["key of acme", "key of initech"][rng.usize(..2)]),
        };
        let path = match rng.u8(..20) {
            0..10 => "/v1/catalog/shoes",
            10..15 => "/v1/search",
            15..18 => "/v1/reports/7",
            18 => "/status",
            _ => "/nothing-here",
        };
        client.get_with(path, &[("X-Forwarded-For", &address), ("X-Api-Key", key)]);
    }
    if (0.3..0.8).contains(&part) {
        for _ in 0..4 {
            client.get_with("/login", &[("X-Forwarded-For", "192.0.2.66"), ("X-User", "admin")]);
        }
    }
}

/// Makes the screenshots of docs/guides/dashboard.md. With `TRANSOM_SCREENSHOTS`, the folder to write them to, they show an hour,
/// which takes minutes; otherwise they show half a minute, and are removed.
#[test]
fn screenshots_can_be_made() {
    let scratch = TempDir::new();
    let folder = std::env::var_os("TRANSOM_SCREENSHOTS").map(PathBuf::from);
    let samples = if folder.is_some() { 358 } else { 3 };
    let folder = folder.unwrap_or_else(|| scratch.path().to_owned());
    let (mut rng, is_broken) = (seeded_rng(), Arc::new(AtomicBool::new(false)));
    let (catalog, search) = (slow_upstream(&Arc::default()), slow_upstream(&is_broken));
    let clients: String = [("acme", "gold"), ("initech", "gold"), ("globex", "free"), ("hooli", "free")]
        .iter()
        .map(|(name, plan)| {
            let digest = SecretDigest::of(format!("key of {name}").as_bytes());
            format!("[clients.{name}]\nplan = \"{plan}\"\napi_keys = [\"{digest}\"]\n")
        })
        .collect();
    let shop = format!("{SHOP}{}{}", catalog.toml("catalog"), search.toml("search"));
    let gateway = Gateway::start_with(&shop, &clients);
    let mut events = Events::open(gateway.admin);
    let mut client = gateway.client();
    for number in 0..samples {
        let part = f64::from(number) / f64::from(samples);
        is_broken.store((0.8..0.88).contains(&part), Ordering::SeqCst);
        send_requests(&mut client, part, &mut rng);
        gateway.advance_s(10);
        events.find("history", |history| !history.as_array().unwrap().is_empty());
    }
    let mut browser = Browser::start();
    let mut made = Vec::new();
    let mut shoot = |browser: &mut Browser, name: &str, height: Option<u32>| {
        let file = folder.join(format!("dashboard-{name}.png"));
        browser.run(json!({ "do": "screenshot", "file": file, "height": height }));
        made.push(file);
    };
    for (view, height) in [("light", None), ("dark", None), ("phone", Some(1400))] {
        browser.open(gateway.admin, view, false);
        // The numbers of now are of the last five seconds of the gateway's clock.
        for _ in 0..6 {
            (0..7).for_each(|_| drop(client.get_with("/v1/search", &[("X-Api-Key", "key of acme")]).expect(200)));
            gateway.advance_s(1);
            events.find("message", |_| true);
        }
        browser.wait("#keys tbody", "globex");
        // The name of a client stands for its API key, which is a secret.
        browser.click("#keys tbody tr:has-text('globex') button");
        browser.wait("#lookup-result", "globex: ");
        browser.wait("#lookup-result", "of 150");
        browser.run(json!({ "do": "run", "script": "scrollTo(0, 0)" }));
        shoot(&mut browser, view, height);
        browser.click("#views a[href='#clients']");
        browser.wait("#clients .clients", "of 4,000");
        browser.run(json!({ "do": "run", "script": "document.activeElement.blur()" }));
        shoot(&mut browser, &format!("clients-{view}"), Some(900));
    }
    let empty = Gateway::start("[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    browser.open(empty.admin, "light", false);
    browser.wait("#rules", "No rule");
    shoot(&mut browser, "empty", Some(780));
    let outage = Outage::new();
    browser.open(outage.process.admin, "light", false);
    browser.wait("#status", "unreachable");
    shoot(&mut browser, "outage", Some(780));
    browser.click("#views a[href='#clients']");
    browser.wait("#clients .clients", "the store cannot be reached");
    browser.run(json!({ "do": "run", "script": "document.activeElement.blur()" }));
    shoot(&mut browser, "clients-outage", Some(780));
    for file in made {
        assert!(fs::read(&file).unwrap().starts_with(b"\x89PNG"), "{}", file.display());
    }
}
