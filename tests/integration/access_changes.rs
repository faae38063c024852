//! Changes of deny entries: `transom deny` and `/v1/deny` edit the access file, and the gateway follows.

use std::collections::HashSet;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HOST, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process};
use crate::support::redis::RedisServer;
use crate::support::{TempDir, eventually, within};

const CONFIG: &str = "[access]\nfile = \"access.toml\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                      [[routes]]\nname = \"login\"\npath = \"/login\"\nupstream = \"u\"\n\
                      [[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"u\"\n";

fn spawn(toml: &str) -> Process {
    let scratch = TempDir::new();
    scratch.write("access.toml", "# Who is denied.\n");
    Process::spawn_command(Command::new(BINARY), toml, scratch)
}

/// Runs `transom deny …`; returns its exit code and what it printed.
fn deny(process: &Process, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(BINARY);
    command.arg("deny").args(arguments).arg("--config").arg(process.config_path()).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[track_caller]
fn deny_ok(process: &Process, arguments: &[&str]) -> String {
    let (code, out, err) = deny(process, arguments);
    assert_eq!(code, Some(0), "{err}");
    out.trim_end().to_owned()
}

fn access_file(process: &Process) -> String {
    fs::read_to_string(process.scratch.path().join("access.toml")).unwrap()
}

#[test]
fn commands_deny_and_admit_callers_of_a_running_gateway() {
    let process = spawn(CONFIG);
    process.get("/a").expect(200);
    let id = deny_ok(&process, &["add", "127.0.0.0/8", "--for", "1h", "--reason", "scraper"]);
    assert_eq!(id, Digest::of(b"127.0.0.0/8").to_string()[Digest::PREFIX.len()..][..12]);
    eventually("the address is denied", || process.get("/a").status == 403);
    assert!(access_file(&process).starts_with("# Who is denied.\n\n[[deny]]\nnetwork = \"127.0.0.0/8\"\n"));
    // An entry for the same gets the new end and reason.
    assert_eq!(deny_ok(&process, &["add", "127.0.0.0/8", "--reason", "again"]), id);
    let device = deny_ok(&process, &["add", "header:x-device=a1", "--route", "login"]);
    let secret = deny_ok(&process, &["add", "cookie:session=hunter2"]);
    let list: Value = serde_json::from_str(&deny_ok(&process, &["list", "--json"])).unwrap();
    let expected = json!([
        { "id": id, "network": "127.0.0.0/8", "routes": [], "until": null, "reason": "again", "ended": false },
        { "id": device, "key": { "part": "header:x-device", "value": "a1" }, "routes": ["login"], "until": null,
          "reason": null, "ended": false },
        { "id": secret, "key": { "part": "cookie:session", "value": Digest::of(b"hunter2").to_string() }, "routes": [],
          "until": null, "reason": null, "ended": false },
    ]);
    assert_eq!(list["deny"], expected);
    let table = deny_ok(&process, &["list"]);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.contains("header:x-device=a1") && !access_file(&process).contains("hunter2"), "{table}");
    deny_ok(&process, &["remove", &id, &device, &secret]);
    assert_eq!(access_file(&process).trim_end(), "# Who is denied.");
    eventually("no request is denied", || process.get("/a").status == 200);
}

#[test]
fn a_wrong_command_changes_nothing() {
    let process = spawn(CONFIG);
    let before = access_file(&process);
    for (arguments, message) in [
        (&["add", "203.0.113.7/24"][..], "write `\"203.0.113.0/24\"`"),
        (&["add", "client:acme"], "there is no `[clients]`"),
        (&["add", "192.0.2.1", "--route", "logn"], "did you mean `login`?"),
        (&["add", "192.0.2.1", "--for", "soon"], "write a duration"),
        (&["add", "json:/a=1"], "a deny entry cannot have the part"),
        (&["remove", "0123456789ab"], "see `transom deny list`"),
        (&["remove", "nothing"], "no deny entry has the id"),
    ] {
        let (code, out, err) = deny(&process, arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        assert!(err.contains(message), "{arguments:?}: {err}");
    }
    assert_eq!(access_file(&process), before);
    process.replace_file("access.toml", "[[deny]]\nnetwork = \"192.0.2.1\"\nuntil = 2020-01-01T00:00:00Z\n");
    let (_, _, err) = deny(&process, &["remove", "--ended"]);
    assert!(err.contains("no longer denied: 192.0.2.1/32"), "{err}");
    assert_eq!(access_file(&process), "");
}

fn send(process: &Process, method: &str, target: &str, token: &str, body: &Value) -> HttpResponse {
    let authorization = format!("Bearer {token}");
    let fields = [("Authorization", authorization.as_str())];
    Client::connect(process.admin).request(method, target, &fields, body.to_string().as_bytes())
}

#[test]
fn the_admin_api_denies_and_records_who_did() {
    let folder = TempDir::new();
    let tokens = ["read", "operate"].map(|role| {
        let file = folder.write(role, format!("{role}-0123456789abcdef\n"));
        format!("{{ name = \"of-{role}\", file = {file:?}, role = \"{role}\" }}")
    });
    let log = folder.path().join("audit");
    let admin = format!("[admin]\nhosts = [\"{HOST}\"]\ntokens = [{}]\naudit_log = {log:?}\n", tokens.join(", "));
    let process = spawn(&format!("{admin}{CONFIG}"));
    let (reader, operator) = ("read-0123456789abcdef", "operate-0123456789abcdef");
    let new = json!({ "network": "127.0.0.0/8", "for": "1h", "reason": "scraper" });
    send(&process, "POST", "/v1/deny", reader, &new).expect(403);
    let entry = send(&process, "POST", "/v1/deny", operator, &new).expect(200).json();
    assert_eq!(
        (&entry["network"], &entry["reason"], &entry["ended"]),
        (&json!("127.0.0.0/8"), &json!("scraper"), &json!(false))
    );
    assert!(entry["until"].as_str().is_some_and(|until| until.ends_with('Z')), "{entry}");
    // In effect in all workers when the response is there, as is its end.
    let statuses = || [(); 12].map(|()| process.get("/a").status);
    assert_eq!(statuses(), [403; 12]);
    let list = send(&process, "GET", "/v1/deny", reader, &Value::Null).expect(200).json();
    assert_eq!(list, json!({ "deny": [entry], "next": null, "total": 1 }));
    let device = json!({ "key": { "part": "header:x-device", "value": "a1" }, "routes": "login", "until": "2030-01-31T18:00:00Z" });
    let device = send(&process, "POST", "/v1/deny", operator, &device).expect(200).json();
    assert_eq!((&device["until"], &device["routes"]), (&json!("2030-01-31T18:00:00Z"), &json!(["login"])));
    let target = format!("/v1/deny/{}", entry["id"].as_str().unwrap());
    send(&process, "DELETE", &target, reader, &Value::Null).expect(403);
    assert_eq!(send(&process, "DELETE", &target, operator, &Value::Null).expect(200).json()["id"], entry["id"]);
    assert_eq!(statuses(), [200; 12]);
    send(&process, "DELETE", &target, operator, &Value::Null).expect(404).problem();

    for wrong in [
        json!({}),
        json!({ "network": "127.0.0.1/8" }),
        json!({ "network": "127.0.0.1", "client": "acme" }),
        json!({ "client": "acme" }),
        json!({ "network": "127.0.0.1", "routes": ["nowhere"] }),
        json!({ "network": "127.0.0.1", "until": "tomorrow" }),
        json!({ "network": "127.0.0.1", "until": "2030-01-31T18:00:00Z", "for": "1h" }),
        json!({ "network": "127.0.0.1", "for": format!("{}ms", u64::MAX) }),
        json!({ "network": "127.0.0.1", "for": "99999999w" }),
        json!({ "network": "127.0.0.1", "until": "+012000-01-31T18:00:00Z" }),
        json!({ "network": "127.0.0.1", "untill": null }),
        json!({ "key": { "part": "header:x-device" } }),
        json!({ "network": "127.0.0.1", "reason": "two\nlines" }),
        json!("127.0.0.1"),
    ] {
        send(&process, "POST", "/v1/deny", operator, &wrong).expect(400).problem();
    }
    let twice = "{\"network\": \"192.0.2.1\", \"key\": {\"part\": \"ip\", \"part\": \"ip\"}}";
    for body in [twice, "{\"network\": \"192.0.2.1\", \"network\": \"192.0.2.2\"}"] {
        let authorization = format!("Bearer {operator}");
        let fields = [("Authorization", authorization.as_str())];
        let response = Client::connect(process.admin).request("POST", "/v1/deny", &fields, body.as_bytes());
        assert!(response.expect(400).text().contains("twice"), "{body}");
    }
    for (field, value) in [("for", "8000y"), ("for", "500000w"), ("until", "9999-12-31T23:59:59Z")] {
        let late = send(&process, "POST", "/v1/deny", operator, &json!({ "network": "192.0.2.1", field: value }));
        let is_clear = value.ends_with('y') || late.text().contains("9999-12-30T22:00:00Z");
        assert!(late.status == 400 && is_clear, "{value}: {}", late.text());
    }
    let text = fs::read_to_string(&log).unwrap();
    process.write_config(&format!("no = \"setting\"\n{admin}{CONFIG}"));
    let refused = send(&process, "POST", "/v1/deny", operator, &new).expect(503).problem();
    assert!(refused["detail"].as_str().unwrap().contains("once the configuration files have no problems"), "{refused}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let changes: Vec<(&Value, &Value)> = lines.iter().map(|line| (&line["who"], &line["what"]["operation"])).collect();
    let by = json!("of-operate");
    assert_eq!(changes, [(&by, &json!("deny")), (&by, &json!("deny")), (&by, &json!("end deny"))], "{text}");
    assert_eq!((&lines[0]["before"], &lines[0]["after"]), (&Value::Null, &entry));
    assert_eq!((&lines[2]["before"]["id"], &lines[2]["after"]), (&entry["id"], &Value::Null));
}

#[test]
fn concurrent_changes_are_all_kept() {
    let process = spawn(CONFIG);
    std::thread::scope(|scope| {
        for n in 0..8 {
            let process = &process;
            scope.spawn(move || {
                for m in 0..4 {
                    let new = json!({ "network": format!("203.0.{n}.{m}") });
                    send(process, "POST", "/v1/deny", "", &new).expect(200);
                }
            });
        }
    });
    assert_eq!(access_file(&process).matches("[[deny]]").count(), 32);
    // The list comes in pages, of which none lacks an entry.
    let (mut ids, mut after) = (Vec::new(), String::new());
    eventually("the gateway has read the file", || {
        send(&process, "GET", "/v1/deny?limit=1", "", &Value::Null).expect(200).json()["total"] == 32
    });
    loop {
        let page = send(&process, "GET", &format!("/v1/deny?limit=10{after}"), "", &Value::Null).expect(200).json();
        ids.extend(page["deny"].as_array().unwrap().iter().map(|entry| entry["id"].clone().to_string()));
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    assert!(ids.len() == 32 && ids.is_sorted() && ids.iter().collect::<HashSet<_>>().len() == 32, "{ids:?}");
    send(&process, "GET", "/v1/deny?limit=0", "", &Value::Null).expect(400).problem();
    send(&process, "GET", "/v1/deny?after=nothing", "", &Value::Null).expect(400).problem();
}

#[test]
fn without_an_access_file_nothing_can_be_denied() {
    let toml = CONFIG.replace("[access]\nfile = \"access.toml\"\n", "");
    let gateway = Gateway::start(&format!("[admin]\nhosts = [\"{HOST}\"]\n{toml}"));
    let send = |method: &str, target: &str, body: &str| {
        Client::connect(gateway.admin).request(method, target, &[], body.as_bytes())
    };
    assert_eq!(send("GET", "/v1/deny", "").expect(200).json(), json!({ "deny": [], "next": null, "total": 0 }));
    send("POST", "/v1/deny", "{\"network\": \"192.0.2.1\"}").expect(404).problem();
    send("DELETE", "/v1/deny/0123456789ab", "").expect(404).problem();
}

/// A gateway whose deny entries are in a store.
fn spawn_shared(redis: &RedisServer, scratch: TempDir) -> Process {
    let access = "[access]\nsource = \"shared\"\nfile = \"deny.copy\"\n";
    let toml = CONFIG.replace("[access]\nfile = \"access.toml\"\n", access);
    let toml = format!("{toml}[counters.shared]\nredis = \"{}\"\n", redis.url());
    Process::spawn_command(Command::new(BINARY), &toml, scratch)
}

#[test]
fn an_entry_of_the_store_holds_on_all_gateways_within_a_second() {
    let redis = RedisServer::start();
    let gateways = [0, 1, 2].map(|_| spawn_shared(&redis, TempDir::new()));
    gateways.iter().for_each(|gateway| drop(gateway.get("/a").expect(200)));
    let device = |gateway: &Process, value: &str| gateway.client().get_with("/a", &[("X-Device", value)]).status;
    for round in 0..5 {
        let value = format!("d{round}");
        let new = json!({ "key": { "part": "header:x-device", "value": value }, "reason": "stolen" });
        let entry = send(&gateways[round % 3], "POST", "/v1/deny", "", &new).expect(200).json();
        assert_eq!(device(&gateways[round % 3], &value), 403, "where it was made, an entry is in effect at once");
        within(Duration::from_secs(1), || {
            eventually("the other gateways know the entry", || {
                gateways.iter().all(|other| device(other, &value) == 403)
            });
        });
        let target = format!("/v1/deny/{}", entry["id"].as_str().unwrap());
        send(&gateways[(round + 1) % 3], "DELETE", &target, "", &Value::Null).expect(200);
        within(Duration::from_secs(1), || {
            eventually("the other gateways know the end", || gateways.iter().all(|other| device(other, &value) == 200));
        });
        send(&gateways[round % 3], "DELETE", &target, "", &Value::Null).expect(404).problem();
    }
    // It ends by itself, on all gateways.
    let new = json!({ "key": { "part": "header:x-device", "value": "short" }, "for": "2s" });
    send(&gateways[0], "POST", "/v1/deny", "", &new).expect(200);
    eventually("it holds", || gateways.iter().any(|other| device(other, "short") == 403));
    eventually("it has ended", || gateways.iter().all(|other| device(other, "short") == 200));
    assert_eq!(send(&gateways[2], "GET", "/v1/deny", "", &Value::Null).json()["deny"][0]["ended"], true);

    // The command asks a gateway.
    let admin = gateways[1].admin.to_string();
    let run = |arguments: &[&str]| {
        let output = Command::new(BINARY).arg("deny").args(arguments).args(["--admin", &admin]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let id = run(&["add", "header:x-device=d9", "--for", "1h"]);
    eventually("the entry holds", || gateways.iter().all(|gateway| device(gateway, "d9") == 403));
    assert!(run(&["list"]).contains("header:x-device=d9"));
    run(&["remove", id.trim()]);
    run(&["remove", "--ended"]);
    eventually("the entry is gone", || gateways.iter().all(|gateway| device(gateway, "d9") == 200));
    assert_eq!(run(&["list"]).lines().count(), 1);
}

#[test]
fn entries_hold_while_the_store_is_away_and_after_a_start_from_the_copy() {
    let mut redis = RedisServer::start();
    let mut gateway = spawn_shared(&redis, TempDir::new());
    let new = json!({ "network": "127.0.0.0/8", "reason": "scraper" });
    let entry = send(&gateway, "POST", "/v1/deny", "", &new).expect(200).json();
    assert_eq!(gateway.get("/a").status, 403);
    redis.kill();
    eventually("the store is known to be away", || {
        send(&gateway, "POST", "/v1/deny", "", &json!({ "network": "192.0.2.1" })).status == 503
    });
    assert_eq!(gateway.get("/a").status, 403);
    // A gateway that starts now has the entries of the copy, which the former one wrote at its end at the latest.
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    let copy = fs::read_to_string(gateway.scratch.path().join("deny.copy")).unwrap();
    assert!(copy.contains("127.0.0.0/8"), "{copy}");
    let scratch = TempDir::new();
    scratch.write("deny.copy", copy);
    let gateway = spawn_shared(&redis, scratch);
    assert_eq!(gateway.get("/a").status, 403);
    // A store that comes back empty gets the entries back.
    redis.restart();
    let list = || send(&gateway, "GET", "/v1/deny", "", &Value::Null).json()["deny"].clone();
    assert_eq!(list(), json!([entry]));
    let target = format!("/v1/deny/{}", entry["id"].as_str().unwrap());
    eventually("the store can be changed", || send(&gateway, "DELETE", &target, "", &Value::Null).status == 200);
    assert_eq!(gateway.get("/a").status, 200);
}
