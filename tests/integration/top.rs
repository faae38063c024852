//! `/v1/top` and `transom top`: which keys each rule refuses and admits most often.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HOST};
use crate::support::gateway::{Gateway, START_S};
use crate::support::gateway_group::{LONG_TIMEOUT, count_admitted_by, query_decision, rule_by_key, shared_config};
use crate::support::http2_client::Http2Client;
use crate::support::process::{BINARY, Process, run};
use crate::support::redis::RedisServer;
use crate::support::{eventually, eventually_eq, one_rule, seeded_rng};

#[track_caller]
fn top(gateway: &Gateway, query: &str) -> Value {
    Client::connect(gateway.admin).get(&format!("/v1/top?{query}")).expect(200).json()
}

/// The keys of one rule by their labels: count and error.
fn counts(rule: &Value) -> Vec<(String, u64, u64)> {
    let count = |key: &Value| {
        (key["label"].as_str().unwrap().to_owned(), key["count"].as_u64().unwrap(), key["error"].as_u64().unwrap())
    };
    rule["keys"].as_array().unwrap().iter().map(count).collect()
}

#[track_caller]
fn counts_of(gateway: &Gateway, by: &str, rule: &str) -> Vec<(String, u64, u64)> {
    counts(&top(gateway, &format!("by={by}&rule={rule}"))["rules"][0])
}

fn exactly<const N: usize>(expected: [(&str, u64); N]) -> Vec<(String, u64, u64)> {
    expected.map(|(label, count)| (label.to_owned(), count, 0)).to_vec()
}

const SECRET: &str = "tr_a-secret-of-acme";
const TOKEN: &str = "a-token-that-stays-secret";

const RULES: &str = r#"
workers = 4
[clients]
file = "clients.toml"
api_key = "header:x-api-key"
[upstreams.u]
builtin = "echo"
[rules.per-key]
key = "header:x-api-key"
on_missing_key = "ip"
windows = ["3/minute"]
[rules.per-key.plans.gold]
windows = ["3/minute"]
[rules.per-token]
key = ["header:x-token", "method"]
on_missing_key = "skip"
windows = ["2/minute"]
[rules.trial]
key = "header:x-user"
on_missing_key = "skip"
windows = ["1/minute"]
on_limit = "shadow"
[rules.all]
key = "global"
windows = ["1000/minute"]
[[routes]]
path = "/{*rest}"
upstream = "u"
rules = ["per-key", "per-token", "trial", "all"]
"#;

#[test]
fn keys_are_counted_over_all_workers_and_protocols() {
    let clients = format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(SECRET.as_bytes()));
    let gateway = Gateway::start_with(RULES, &clients);
    let listed = top(&gateway, "");
    assert_eq!(listed["by"], "refused");
    let names: Vec<&Value> = listed["rules"].as_array().unwrap().iter().map(|rule| &rule["rule"]).collect();
    assert_eq!(names, ["per-key", "per-token", "trial", "all"]);
    for rule in listed["rules"].as_array().unwrap() {
        assert_eq!((&rule["total"], &rule["keys"]), (&json!(0), &json!([])));
        // The gateway has started within this period.
        assert_eq!(rule["since"], jiff::Timestamp::from_second(START_S as i64).unwrap().to_string());
    }
    // New connections, so that all workers take part.
    for request in 0..40 {
        let status = if request < 3 { 200 } else { 429 };
        gateway.get_with("/a", &[("X-API-Key", SECRET)]).expect(status);
    }
    let mut client = Http2Client::connect(gateway.http);
    for request in 0..10 {
        let status = if request < 3 { 200 } else { 429 };
        assert_eq!(client.request_path("GET", "/a", &[], b"").status, status);
    }
    for request in 0..6 {
        let status = if request < 2 { 200 } else { 429 };
        let fields = [("X-Token", TOKEN), ("X-API-Key", &format!("unknown-{request}"))];
        gateway.get_with("/a", &fields).expect(status);
    }
    for request in 0..5 {
        gateway.get_with("/a", &[("X-API-Key", &format!("other-{request}")), ("X-User", "bob")]).expect(200);
    }
    let by_key = &top(&gateway, "by=refused&rule=per-key")["rules"];
    assert_eq!(by_key.as_array().unwrap().len(), 1);
    assert_eq!((&by_key[0]["total"], &by_key[0]["shadow"]), (&json!(44), &json!(false)));
    assert_eq!(counts(&by_key[0]), exactly([("acme", 37), ("127.0.0.1", 7)]));
    let (acme, address) = (&by_key[0]["keys"][0], &by_key[0]["keys"][1]);
    assert_eq!((&acme["client"], &acme["fallback"]), (&json!("acme"), &json!(false)));
    let digest = acme["key"][0]["value"].as_str().unwrap();
    assert!(digest.starts_with("hmac-") && digest.len() == 37, "{digest}");
    assert_eq!((&address["client"], &address["fallback"]), (&Value::Null, &json!(true)));
    assert_eq!(address["key"], json!([{"part": "ip", "value": "127.0.0.1"}]));
    // A secret without a client is a short digest. Of a refused request, only the rules that refuse count.
    let by_token = counts_of(&gateway, "refused", "per-token");
    assert!(by_token[0].0.starts_with("hmac-") && by_token[0].0.ends_with(" GET"), "{by_token:?}");
    assert_eq!((by_token.len(), by_token[0].0.len(), by_token[0].1), (1, "hmac-12345678 GET".len(), 4));
    assert_eq!(counts_of(&gateway, "refused", "trial"), exactly([("bob", 4)]));
    assert_eq!(counts_of(&gateway, "admitted", "trial"), exactly([("bob", 1)]));
    assert_eq!(counts_of(&gateway, "admitted", "all"), exactly([("all requests", 13)]));
    assert_eq!(counts_of(&gateway, "refused", "all"), []);
    // As the metrics count.
    let metrics = gateway.metrics();
    for rule in ["per-key", "per-token", "trial", "all"] {
        for (by, outcomes) in [("refused", ["refused", "shadowed"]), ("admitted", ["admitted", "delayed"])] {
            let counted =
                outcomes.map(|outcome| metrics.sum("transom_decisions_total", &[("rule", rule), ("outcome", outcome)]));
            let total = &top(&gateway, &format!("by={by}&rule={rule}"))["rules"][0]["total"];
            assert_eq!(total.as_u64().unwrap(), counted.iter().sum::<u64>(), "{rule} {by}");
        }
    }
    for by in ["refused", "admitted"] {
        let all = top(&gateway, &format!("by={by}")).to_string();
        assert!(!all.contains("secret") && !all.contains("unknown-"), "{all}");
    }
}

#[test]
fn the_decision_api_counts_too() {
    let gateway = Gateway::start_with(RULES, "");
    let api = |verb: &str, query: Value| {
        Client::connect(gateway.admin).post(&format!("/v1/{verb}"), query.to_string()).expect(200).json()
    };
    for request in 0..5 {
        let rules = json!([{"rule": "per-token", "key": [TOKEN, "PUT"]}, {"rule": "all"}]);
        assert_eq!(api("limit", json!({ "rules": rules }))["allowed"], request < 2);
        api("check", json!({"rule": "all"}));
    }
    gateway.get("/a").expect(200);
    let by_token = counts_of(&gateway, "refused", "per-token");
    assert!(by_token[0].0.starts_with("hmac-") && by_token[0].0.ends_with(" PUT"), "{by_token:?}");
    assert_eq!(by_token[0].1, 3);
    assert_eq!(counts_of(&gateway, "admitted", "all"), exactly([("all requests", 3)]));
    assert!(!top(&gateway, "by=refused").to_string().contains("secret"));
}

/// The value of a secret is not known to those who read the lists.
#[test]
fn a_listed_key_is_read_and_reset_by_its_id() {
    let clients = format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(SECRET.as_bytes()));
    let rules = RULES.replace(
        "[rules.per-key.plans.gold]\nwindows = [\"3/minute\"]",
        "[rules.per-key.plans.gold]\nwindows = [\"5/minute\"]",
    );
    let mut gateway = Gateway::start_with(&rules, &clients);
    let ask = |gateway: &Gateway, fields: &[(&str, &str)], times: usize| {
        (0..times).filter(|_| gateway.get_with("/a", fields).status == 200).count()
    };
    let api = |gateway: &Gateway, verb: &str, query: &Value, status: u16| {
        Client::connect(gateway.admin).post(&format!("/v1/{verb}"), query.to_string()).expect(status).json()
    };
    let id = |gateway: &Gateway, rule: &str| top(gateway, &format!("rule={rule}"))["rules"][0]["keys"][0]["id"].clone();
    // A client with a plan, a secret without a client, and a key by `on_missing_key`.
    assert_eq!(ask(&gateway, &[("X-API-Key", SECRET)], 9), 5);
    assert_eq!(ask(&gateway, &[("X-API-Key", "unknown"), ("X-Token", TOKEN)], 6), 2);
    let by_key = json!({"rule": "per-key", "id": id(&gateway, "per-key")});
    let by_token = json!({"rule": "per-token", "id": id(&gateway, "per-token")});
    for (query, used) in [(&by_key, 5), (&by_token, 2)] {
        let value = api(&gateway, "value", query, 200);
        assert_eq!(
            (&value["count"], &value["limit"], &value["allowed"]),
            (&json!(used), &json!(used), &json!(false)),
            "{value}"
        );
        assert_eq!(api(&gateway, "check", query, 200)["allowed"], false);
    }
    assert_eq!(api(&gateway, "reset", &by_key, 200)["count"], 0);
    assert_eq!(ask(&gateway, &[("X-API-Key", SECRET)], 6), 5);
    assert_eq!(ask(&gateway, &[("X-API-Key", "unknown"), ("X-Token", TOKEN)], 1), 0, "no other key is reset");
    assert_eq!(ask(&gateway, &[], 4), 3);
    let listed = top(&gateway, "rule=per-key")["rules"][0]["keys"].clone();
    let address = listed.as_array().unwrap().iter().find(|key| key["label"] == "127.0.0.1").unwrap();
    let value = api(&gateway, "value", &json!({"rule": "per-key", "id": address["id"]}), 200);
    assert_eq!((&value["count"], &value["limit"]), (&json!(3), &json!(3)), "{value}");
    let unlisted = |rule: &str, id: &Value| {
        let id = id.as_str().unwrap();
        format!("rule `{rule}` lists no key with the id `{id}`; after a reload, keys that are counted again have ids")
    };
    let (id, other) = (&by_key["id"], json!("0123456789abcdef"));
    for (verb, query, status, detail) in [
        ("value", json!({"rule": "per-key", "id": other}), 404, unlisted("per-key", &other)),
        ("value", json!({"rule": "all", "id": id}), 404, unlisted("all", id)),
        ("value", json!({"rule": "nothing", "id": id}), 404, String::from("unknown rule `nothing`")),
        (
            "value",
            json!({"rule": "per-key", "id": "+123456789abcdef"}),
            400,
            String::from("`id` is not one of `/v1/top`"),
        ),
        ("value", json!({"rule": "per-key", "id": 7}), 400, String::from("`id` is not one of `/v1/top`")),
        (
            "value",
            json!({"rule": "per-key", "id": id, "key": "a"}),
            400,
            String::from("`key` and `id` are both given: keep one of the two"),
        ),
        (
            "value",
            json!({"rules": [{"rule": "per-key", "id": id}]}),
            400,
            String::from("`id` is not one of `rule`, `key`, `client`, `cost`"),
        ),
        ("limit", by_key.clone(), 400, String::from("`/v1/limit` takes a `key`, not an `id`")),
    ] {
        assert_eq!(api(&gateway, verb, &query, status)["detail"], detail);
    }
    // A plan of the former configuration does not apply: the key is known again with its next request.
    gateway.reload_with(
        &rules.replace(
            "[rules.per-key.plans.gold]",
            "[rules.per-key.plans.free]\nwindows = [\"4/minute\"]\n[rules.per-key.plans.gold]",
        ),
        &clients,
    );
    eventually("the admin thread has the configuration", || {
        Client::connect(gateway.admin).post("/v1/value", by_key.to_string()).status == 404
    });
    eventually("a worker has named the key again", || {
        ask(&gateway, &[("X-API-Key", SECRET)], 1);
        Client::connect(gateway.admin).post("/v1/value", by_key.to_string()).status == 200
    });
    assert_eq!(api(&gateway, "value", &by_key, 200)["limit"], 5);
}

/// An address behind which requests with different plans come: the windows are those of one plan, whichever worker is asked first.
#[test]
fn the_windows_of_a_listed_key_with_several_plans_are_those_of_one() {
    let clients = format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(SECRET.as_bytes()));
    let rules = "workers = 2\n[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                 [rules.r]\nkey = \"ip\"\nwindows = [\"3/minute\"]\n[rules.r.plans.gold]\nwindows = [\"100/hour\"]\n\
                 [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\"]\n";
    let gateway = Gateway::start_with(rules, &clients);
    for _ in 0..20 {
        gateway.get_with("/a", &[("X-API-Key", SECRET)]).expect(200);
        gateway.get("/a");
    }
    let id = &top(&gateway, "by=admitted")["rules"][0]["keys"][0]["id"];
    let value =
        || Client::connect(gateway.admin).post("/v1/value", json!({"rule": "r", "id": id}).to_string()).expect(200);
    let first = value().json()["limit"].clone();
    for _ in 0..10 {
        assert_eq!(value().json()["limit"], first);
    }
}

#[test]
fn a_listed_key_is_read_and_reset_in_the_shared_store() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        redis.cli(&["FLUSHALL"]);
        let rules = rule_by_key("[\"3/hour\"]", "");
        let settings = format!("mode = \"{mode}\"\n{LONG_TIMEOUT}");
        let process = Process::spawn(&shared_config(&format!("\"{}\"", redis.url()), &settings, &rules));
        assert_eq!(count_admitted_by(&process, "ann", 5), 3);
        let listed = process.admin_get("/v1/top").expect(200).json();
        let query = json!({"rule": "r", "id": listed["rules"][0]["keys"][0]["id"]});
        assert_eq!(query_decision(&process, "value", &query)["count"], 3, "{mode}");
        assert_eq!(query_decision(&process, "reset", &query)["count"], 0, "{mode}");
        let of_key = query_decision(&process, "value", &json!({"rule": "r", "key": "ann"}));
        assert_eq!(of_key["count"], 0, "{mode}");
        eventually("the key is admitted again", || count_admitted_by(&process, "ann", 1) == 1);
    }
}

/// A route for each of the rules.
fn by_user(rules: &str, more: &str) -> String {
    format!(
        "workers = 2\n[admin]\nhosts = [\"{HOST}\"]\n{more}\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
    )
}

const BY_USER: &str = "[rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/hour\"]\n";

#[test]
fn a_reload_keeps_the_counts_of_rules_with_the_same_key() {
    let mut gateway = Gateway::start(&by_user(BY_USER, ""));
    let ask = |gateway: &Gateway, times: usize| {
        for _ in 0..times {
            gateway.get_with("/a", &[("X-User", "ann"), ("X-Other", "other")]);
        }
    };
    ask(&gateway, 6);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("ann", 5)]));
    gateway.reload_and_wait(&by_user(&BY_USER.replace("1/hour", "2/hour"), ""));
    ask(&gateway, 3);
    // Of the former refusals and these, one was admitted by the higher limit.
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("ann", 7)]));
    assert_eq!(counts_of(&gateway, "admitted", "r"), exactly([("ann", 2)]));
    gateway.reload_and_wait(&by_user(&BY_USER.replace("x-user", "x-other"), ""));
    assert_eq!(counts_of(&gateway, "refused", "r"), []);
    ask(&gateway, 2);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("other", 1)]));
    gateway.reload_and_wait(&by_user(BY_USER, "top_keys = 0"));
    let off = Client::connect(gateway.admin).get("/v1/top").expect(404).json();
    assert_eq!(off["detail"], "keys are not counted: `[admin] top_keys` is 0");
    ask(&gateway, 2);
    gateway.reload_and_wait(&by_user(BY_USER, "top_keys = 5"));
    assert_eq!(counts_of(&gateway, "refused", "r"), []);
    ask(&gateway, 2);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("ann", 2)]));
}

#[test]
fn a_list_is_of_the_last_30_to_60_minutes() {
    let gateway = Gateway::start(&by_user(BY_USER, ""));
    let ask = |user: &str| gateway.get_with("/a", &[("X-User", user)]);
    let since = || top(&gateway, "")["rules"][0]["since"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    for user in ["ann", "ann", "ann", "bob", "bob"] {
        ask(user);
    }
    // A period ends 15 minutes after the start of these tests.
    assert_eq!(START_S % 1800, 900);
    gateway.advance_s(1000);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("ann", 2), ("bob", 1)]));
    for _ in 0..3 {
        ask("bob").expect(429);
    }
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("bob", 4), ("ann", 2)]));
    assert_eq!(since().as_second(), START_S as i64);
    gateway.advance_s(1700);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("bob", 3)]));
    assert_eq!(since().as_second(), START_S as i64 + 900);
    gateway.advance_s(7200);
    assert_eq!(counts_of(&gateway, "refused", "r"), []);
}

/// Each key of the flood comes once, or several times in a row, so that the sketch would follow nothing else.
#[test]
fn a_flood_of_invented_keys_does_not_hide_the_busy_ones() {
    let rules = BY_USER.replace("1/hour", "1000000/hour");
    let gateway = Gateway::start(&by_user(&rules, "top_keys = 10"));
    let mut rng = seeded_rng();
    let mut clients: Vec<Client> = (0..8).map(|_| gateway.client()).collect();
    let mut exact = BTreeMap::<String, u64>::new();
    for request in 0..4000 {
        let user = match rng.usize(..10) {
            0 | 1 => String::from("ann"),
            2 => String::from("bob"),
            _ => format!("invented-{}", request / 4),
        };
        let client = rng.choice(&mut clients).unwrap();
        client.get_with("/a", &[("X-User", &user)]).expect(200);
        *exact.entry(user).or_default() += 1;
    }
    let listed = &top(&gateway, "by=admitted&limit=2")["rules"][0];
    assert_eq!(listed["total"], 4000);
    let busiest = counts(listed);
    assert_eq!(busiest.iter().map(|(label, ..)| label.as_str()).collect::<Vec<_>>(), ["ann", "bob"]);
    for (label, count, error) in counts_of(&gateway, "admitted", "r") {
        let exact = exact[&label];
        assert!(exact <= count && count - error <= exact, "{label}: {exact}, and not {count} - {error}");
        assert!(error <= 4000 / 10, "{label}: {error}");
    }
}

#[test]
fn decisions_that_wait_count_too() {
    let redis = RedisServer::start();
    let rules = rule_by_key("[\"2/hour\"]", "shared = \"exact\"");
    let process = Process::spawn(&shared_config(&format!("\"{}\"", redis.url()), LONG_TIMEOUT, &rules));
    let mut client = process.client();
    for request in 0..6 {
        client.get_with("/a", &[("X-Key", "ann")]).expect(if request < 2 { 200 } else { 429 });
    }
    let counts_by = |by: &str| counts(&process.admin_get(&format!("/v1/top?by={by}")).expect(200).json()["rules"][0]);
    assert_eq!(counts_by("refused"), exactly([("ann", 4)]));
    assert_eq!(counts_by("admitted"), exactly([("ann", 2)]));

    let queue = "key = \"header:x-key\"\non_missing_key = \"skip\"\nconcurrent = 1\nwindows = [\"3/minute\"]\non_limit = \"delay\"\n\
                 max_delay = \"90s\"\nmax_waiting = 1";
    let gateway = Gateway::start(&one_rule(queue));
    for _ in 0..3 {
        gateway.get_with("/a", &[("X-Key", "ann")]).expect(200);
    }
    let mut waiting = gateway.client();
    waiting.send("GET /a HTTP/1.1\r\nHost: a\r\nX-Key: ann\r\n\r\n");
    eventually_eq(|| counts_of(&gateway, "admitted", "r"), exactly([("ann", 4)]));
    gateway.get_with("/a", &[("X-Key", "ann")]).expect(429);
    assert_eq!(counts_of(&gateway, "refused", "r"), exactly([("ann", 1)]));
    gateway.advance_s(60);
    waiting.read_response().expect(200);
}

#[test]
fn a_query_that_is_not_understood_is_refused() {
    let gateway = Gateway::start(&by_user(BY_USER, ""));
    let admin = || Client::connect(gateway.admin);
    for (query, status, detail) in [
        ("by=delayed", 400, "`by` is \"refused\" or \"admitted\""),
        ("by=refused&by=admitted", 400, "`by` is given more than once"),
        ("limit=many", 400, "`limit` is the number of keys of each rule"),
        ("rule=%", 400, "the query contains a `%` without two hex digits"),
        ("rule=q", 404, "unknown rule `q`"),
    ] {
        let problem = admin().get(&format!("/v1/top?{query}")).expect(status).json();
        assert_eq!(problem["detail"], detail, "{query}");
    }
    assert_eq!(admin().post("/v1/top", "").expect(405).field("allow"), Some("GET, HEAD"));
    let foreign = [("Host", "attacker.test")];
    admin().get_with("/v1/top", &foreign).expect(421);
}

/// A terminal of ten rows and 80 columns.
struct Terminal {
    screen: File,
    name: String,
}

impl Terminal {
    fn open() -> Terminal {
        let screen = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
        rustix::pty::grantpt(&screen).unwrap();
        rustix::pty::unlockpt(&screen).unwrap();
        let size = rustix::termios::Winsize { ws_row: 10, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&screen, size).unwrap();
        let name = rustix::pty::ptsname(&screen, Vec::new()).unwrap().into_string().unwrap();
        Terminal { screen: File::from(screen), name }
    }

    /// The side of programs.
    fn side(&self) -> File {
        File::options().read(true).write(true).open(&self.name).unwrap()
    }

    /// Starts `transom top`.
    fn top(&self, process: &Process, stdin: Stdio) -> Child {
        let mut command = Command::new(BINARY);
        command.args(["top", "--admin", &process.admin.to_string(), "--interval", "100ms"]);
        command.stdin(stdin).stdout(self.side()).stderr(self.side()).spawn().unwrap()
    }

    fn press(&mut self, keys: &str) {
        self.screen.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads until the text is shown.
    fn wait_for(&mut self, text: &str) {
        let (mut bytes, mut shown) = ([0; 4096], String::new());
        while !shown.contains(text) {
            let read = self.screen.read(&mut bytes).unwrap();
            shown += &String::from_utf8_lossy(&bytes[..read]);
        }
    }
}

/// Beside the rule `r`, 40 rules that no request uses.
fn with_many_rules() -> Process {
    let rules: String = (0..40).map(|n| format!("[rules.r{n}]\nkey = \"ip\"\nwindows = [\"9/hour\"]\n")).collect();
    Process::spawn(
        &by_user(&format!("{BY_USER}{rules}"), "")
            .replace("workers = 2\n", "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }\nworkers = 2\n"),
    )
}

#[test]
fn the_live_list_scrolls_and_ends_by_a_key() {
    let (process, mut terminal) = (with_many_rules(), Terminal::open());
    let keeps_open = terminal.side();
    let settings = || rustix::termios::tcgetattr(&keeps_open).unwrap().local_modes;
    let settings_before = settings();
    let mut child = terminal.top(&process, terminal.side().into());
    terminal.wait_for("q ends, arrow keys scroll: lines 1 to 9 of ");
    terminal.press("\x1b[B");
    terminal.wait_for("lines 2 to 10 of ");
    // As Ctrl-Z does.
    kill_process(Pid::from_child(&child), Signal::TSTP).unwrap();
    terminal.press("G");
    terminal.wait_for("rule `r39`");
    terminal.press("q");
    terminal.wait_for("\x1b[?1049l");
    assert!(child.wait().unwrap().success());
    assert_eq!(settings(), settings_before);
}

#[test]
fn the_live_list_continues_over_an_upgrade() {
    let process = Process::spawn(
        &by_user(BY_USER, "")
            .replace("workers = 2\n", "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }\nworkers = 2\n"),
    );
    let mut terminal = Terminal::open();
    let mut child = terminal.top(&process, terminal.side().into());
    let send = |user: &str| (0..3).for_each(|_| drop(process.client().get_with("/a", &[("X-User", user)])));
    send("ann");
    terminal.wait_for("ann");
    process.signal("USR2");
    process.wait_for_stderr("stopped");
    send("bob");
    terminal.wait_for("bob");
    terminal.press("q");
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_live_list_without_a_keyboard_ends_by_a_signal() {
    let (process, mut terminal) = (with_many_rules(), Terminal::open());
    let _keeps_open = terminal.side();
    for signal in [Signal::INT, Signal::QUIT, Signal::TERM] {
        let mut child = terminal.top(&process, Stdio::null());
        terminal.wait_for("Ctrl-C ends: lines 1 to 9 of ");
        kill_process(Pid::from_child(&child), signal).unwrap();
        terminal.wait_for("\x1b[?1049l");
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn the_command_prints_the_lists() {
    let rules = format!("{BY_USER}[rules.idle]\nkey = \"ip\"\nwindows = [\"9/hour\"]\n");
    let process = Process::spawn(
        &by_user(&rules, "")
            .replace("workers = 2\n", "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }\nworkers = 2\n"),
    );
    for user in ["ann", "ann", "ann", "ann", "b\u{1b}[31m", "bob", "bob"] {
        process.client().get_with("/a", &[("X-User", user)]);
    }
    let admin = process.admin.to_string();
    let (code, printed, _) = run(&["top", "--admin", &admin, "--once"]);
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].starts_with("rule `r`: 4 requests refused since 2"), "{printed}");
    assert_eq!(lines[1], "       refused      error    share      per s  key");
    assert_eq!(lines[2], "             3          0     75 %          -  ann");
    assert_eq!(lines[3], "             1          0     25 %          -  bob");
    assert!(lines[5].starts_with("rule `idle`: no request refused since 2"), "{printed}");
    // The address of the dashboard is copied from a browser.
    assert_eq!(run(&["top", "--admin", &format!("http://{admin}/"), "--once"]).1, printed);
    for wrong in ["https://127.0.0.1:9900", "127.0.0.1", "http://127.0.0.1:9900/v1/top", ":9900"] {
        let (code, _, message) = run(&["top", "--admin", wrong, "--once"]);
        assert!(code == Some(2) && message.contains("write `HOST:PORT`"), "{wrong}: {message}");
    }
    // Standard output is no terminal.
    assert_eq!(run(&["top", "--admin", &admin]).1, printed);
    let (_, json, _) = run(&["top", "--admin", &admin, "--by", "admitted", "--rule", "r", "--limit", "1", "--json"]);
    let lists: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&lists["by"], lists["rules"].as_array().unwrap().len()), (&json!("admitted"), 1));
    assert_eq!(lists["rules"][0]["keys"].as_array().unwrap().len(), 1);
    let failed = |arguments: &[&str]| {
        let (code, _, message) = run(arguments);
        (code.unwrap(), message)
    };
    let (code, message) = failed(&["top", "--admin", &admin, "--rule", "q"]);
    let expected = format!("transom: the gateway at http://{admin} cannot list its keys: unknown rule `q`\n");
    assert_eq!((code, message), (1, expected));
    let config = process.config_path().display().to_string();
    let (code, message) = failed(&["top", "--config", &config]);
    assert_eq!(code, 2);
    assert!(
        message.ends_with("sets no admin address with a port\n  fix: name it with `--admin HOST:PORT`\n"),
        "{message}"
    );
    assert_eq!(failed(&["top", "--interval", "2"]).0, 2);
    drop(process);
    eventually("nothing listens", || failed(&["top", "--admin", &admin]).0 == 1);
    assert_eq!(failed(&["top", "--admin", &admin]).1, format!("transom: no gateway listens at http://{admin}\n"));
}
