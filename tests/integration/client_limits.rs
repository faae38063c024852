//! Limits of single clients: in the clients file or in the store, set by the admin API, ended by a time.

use std::thread;
use std::time::SystemTime;

use serde_json::{Value, json};

use crate::support::client::{Client, HOST, HttpResponse};
use crate::support::gateway::{Gateway, START_S};
use crate::support::process::{Process, run};
use crate::support::redis::RedisServer;
use crate::support::{TempDir, eventually_eq};

const CLIENTS: &str = "\
[clients.acme]
plan = \"gold\"
networks = [\"127.0.0.0/8\"]

[clients.acme.limits.r]   # until they pay
windows = [\"4/366d\"]
";

/// Two rules by client, each with the plan `gold`.
fn config(head: &str, clients: &str) -> String {
    let rule = |name: &str, limit: u32, gold: &str| {
        format!(
            "[rules.{name}]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"{limit}/366d\"]\n\
             [rules.{name}.plans.gold]\nwindows = {gold}\n"
        )
    };
    format!(
        "workers = 4\n{head}[upstreams.u]\nbuiltin = \"echo\"\n{clients}{}{}\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"s\"]\n",
        rule("r", 2, "[\"3/366d\", \"9000/300d\"]"),
        rule("s", 1, "[\"5000/366d\"]"),
    )
}

fn call(gateway: &Process, method: &str, target: &str, body: Value) -> HttpResponse {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    Client::connect(gateway.admin).request(method, target, &[("Host", &gateway.admin.to_string())], body.as_bytes())
}

fn put(gateway: &Process, body: Value) -> HttpResponse {
    call(gateway, "PUT", "/v1/clients/acme/limits/r", body)
}

/// The limits of all windows of acme in both rules, and the usage of the first.
fn limits(gateway: &Process) -> (Vec<u64>, u64) {
    let shown = gateway.admin_get("/v1/clients/acme").expect(200).json();
    let rules = shown["rules"].as_array().unwrap().iter();
    let windows: Vec<&Value> = rules.flat_map(|rule| rule["windows"].as_array().unwrap()).collect();
    let limits = windows.iter().map(|window| window["limit"].as_u64().unwrap()).collect();
    (limits, windows[0]["count"].as_u64().unwrap())
}

/// Sends requests at once until each connection is refused, and calls `meanwhile` when some are on their way.
pub fn count_admitted(gateways: &[&Process], meanwhile: impl FnOnce()) -> usize {
    let send = |gateway: &Process| {
        let mut client = gateway.client();
        let mut refused = 0;
        (0..400)
            .filter(|_| {
                refused < 40 && client.get("/a").status == 200 || {
                    refused += 1;
                    false
                }
            })
            .count()
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            gateways.iter().cycle().take(6).map(|gateway| scope.spawn(move || send(gateway))).collect();
        meanwhile();
        let admitted: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        // What is left, if all were refused before the limit was raised.
        admitted + send(gateways[0])
    })
}

fn in_seconds(seconds: u64) -> String {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    jiff::Timestamp::from_second((now + seconds).cast_signed()).unwrap().to_string()
}

#[test]
fn limits_of_a_client_in_the_file_replace_those_of_its_plan() {
    let clients = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n";
    let scratch = TempDir::new();
    let audit = scratch.path().join("audit.log");
    let head = format!("[admin]\naudit_log = \"{}\"\n", audit.display());
    let gateway = Process::spawn_with(&config(&head, clients), CLIENTS);
    assert_eq!(limits(&gateway), (vec![4, 5000], 0), "the other rule has the windows of the plan");
    let admitted = count_admitted(&[&gateway], || _ = put(&gateway, json!({ "windows": ["300/366d"] })).expect(200));
    assert_eq!((admitted, limits(&gateway)), (300, (vec![300, 5000], 300)));
    let file = || std::fs::read_to_string(gateway.scratch.path().join("clients.toml")).unwrap();
    assert!(file().contains("[\"127.0.0.0/8\"]\n\n[clients.acme.limits.r]"), "{}", file());
    let question = json!({ "url": "http://a/b", "as_client": "acme" });
    let explained = call(&gateway, "POST", "/v1/explain", question).expect(200).json();
    let of = |rule: usize| explained["rules"][rule]["windows_of"].clone();
    assert_eq!((of(0), of(1)), (json!("client"), json!("plan")));

    for (body, status) in [
        (json!({ "windows": "300/day" }), 400),
        (json!({ "windows": [] }), 400),
        (json!({ "windows": ["0/day"] }), 400),
        (json!({ "windows": ["9/day"], "until": "tomorrow" }), 400),
        (json!({ "windows": [null] }), 400),
        (json!({ "windows": ["9/day"], "plan": "gold" }), 400),
        (json!({ "windows": [{ "limit": 9, "period": "day", "capacity": 20 }] }), 422),
        (json!({ "windows": [{ "limit": 9, "period": "day", "sliding": true }] }), 422),
        (json!({ "windows": [{ "limit": 9, "period": "day", "shards": 2 }] }), 422),
    ] {
        let before = file();
        assert_eq!(put(&gateway, body.clone()).status, status, "{body}");
        assert_eq!(file(), before);
    }
    let windows = json!({ "windows": ["9/day"] });
    call(&gateway, "PUT", "/v1/clients/acme/limits/other", windows.clone()).expect(404).problem();
    call(&gateway, "PUT", "/v1/clients/nobody/limits/r", windows).expect(404).problem();

    // A time ends them without a reload.
    let reloads = |gateway: &Process| gateway.metrics().sum("transom_config_reloads_total", &[]);
    put(&gateway, json!({ "windows": ["600/366d", "20/day"], "until": in_seconds(3) })).expect(200);
    assert_eq!(limits(&gateway).0, [600, 20, 5000]);
    let before = reloads(&gateway);
    let path = gateway.config_path();
    let (_, shown, _) = run(&["clients", "show", "acme", "--config", path.to_str().unwrap()]);
    assert!(shown.contains("limits:   600/366d, 20/day in rule `r`, until 2"), "{shown}");
    eventually_eq(|| limits(&gateway), (vec![3, 9000, 5000], 300));
    assert_eq!(reloads(&gateway), before);
    // They stay in the file, and have no effect after a restart either.
    gateway.write_config(&config(&head, clients));
    gateway.signal("HUP");
    gateway.wait_for_applied_reloads(before + 1);
    assert_eq!(limits(&gateway).0, [3, 9000, 5000]);
    call(&gateway, "DELETE", "/v1/clients/acme/limits/r", Value::Null).expect(204);
    call(&gateway, "DELETE", "/v1/clients/acme/limits/r", Value::Null).expect(404).problem();
    assert!(!file().contains("limits"), "{}", file());
    let (audit, bad) = (std::fs::read_to_string(audit).unwrap(), CLIENTS.replace("limits.r]", "limits.q]"));
    assert!(audit.contains("\"operation\":\"set limits\",\"rule\":\"r\"}"), "{audit}");
    std::fs::write(gateway.scratch.path().join("clients.toml"), bad).unwrap();
    let (code, _, stderr) = run(&["check", path.to_str().unwrap()]);
    assert!(code == Some(2) && stderr.contains("clients.toml:5:22: rule `q` does not exist"), "{stderr}");
}

/// The time of windows may be another, such as that of the store.
#[test]
fn limits_end_by_the_wall_clock() {
    let toml = config("", "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n");
    let clients =
        format!("{CLIENTS}until = {}\n", jiff::Timestamp::from_second((START_S + 3600).cast_signed()).unwrap());
    let mut gateway = Gateway::start_with(&toml, &clients);
    let limit = |gateway: &Gateway| {
        gateway.decision("value", &json!({ "rule": "r", "client": "acme" })).expect(200).json()["limit"].clone()
    };
    gateway.advance_s(86_400);
    gateway.clock.set_wall_clock(START_S * 1000);
    gateway.end_limits();
    assert_eq!(limit(&gateway), 4);
    gateway.reload_with(&toml, &clients);
    assert_eq!(limit(&gateway), 4, "a configuration that is compiled now");
    gateway.clock.set_wall_clock((START_S + 3600) * 1000);
    gateway.end_limits();
    assert_eq!(limit(&gateway), 3);
    gateway.reload_with(&toml, &clients);
    assert_eq!(limit(&gateway), 3);
}

/// A reload changes how the rule counts windows that a client has.
#[test]
fn windows_of_a_client_do_not_prevent_a_reload() {
    let toml = config("", "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n");
    let clients = CLIENTS.replace("4/366d", "4/day");
    let mut gateway = Gateway::start_with(&toml, &clients);
    let limits = |gateway: &Gateway| {
        let shown = Client::connect(gateway.admin).get("/v1/clients/acme").expect(200).json();
        let windows = shown["rules"][0]["windows"].as_array().unwrap().iter();
        let windows: Vec<u64> = windows.map(|window| window["limit"].as_u64().unwrap()).collect();
        (windows, shown["limits"]["r"]["without_effect"].as_str().map(str::to_owned))
    };
    assert_eq!(limits(&gateway), (vec![4], None));
    let rolling = toml.replace("\"9000/300d\"", "{ limit = 9000, period = \"day\", capacity = 9500 }");
    gateway.reload_with(&rolling, &clients);
    let (windows, reason) = limits(&gateway);
    assert_eq!(windows, [3, 9000], "those of the plan");
    assert!(reason.as_ref().is_some_and(|reason| reason.ends_with("in effect after a restart")), "{reason:?}");
    gateway.reload_with(&toml, &clients);
    assert_eq!(limits(&gateway), (vec![3, 9000], reason));
    assert_eq!(limits(&Gateway::start_with(&rolling, &clients)), (vec![4], None));
}

/// A gateway says so while it does not use the limits that it has stored.
#[test]
fn stored_limits_are_not_in_effect_before_they_are_compiled() {
    let (redis, scratch) = (RedisServer::start(), TempDir::new());
    let head = format!("[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n", redis.url());
    let copy = scratch.path().join("a.copy");
    let mut gateway =
        Gateway::start(&config(&head, &format!("[clients]\nsource = \"shared\"\nfile = \"{}\"\n", copy.display())));
    let put = |gateway: &Gateway, target: &str, body: Value| {
        Client::connect(gateway.admin).request("PUT", target, &[("Host", HOST)], body.to_string().as_bytes())
    };
    let limit = |gateway: &Gateway| {
        gateway.decision("value", &json!({ "rule": "r", "client": "acme" })).expect(200).json()["limit"].clone()
    };
    put(&gateway, "/v1/clients/acme", json!({ "plan": "gold", "networks": ["127.0.0.0/8"] })).expect(201);
    let set = |gateway: &Gateway| put(gateway, "/v1/clients/acme/limits/r", json!({ "windows": ["300/366d"] }));
    let stored = set(&gateway).expect(202).json();
    assert_eq!(stored["limits"]["r"]["without_effect"], "this gateway does not use them yet");
    assert_eq!(limit(&gateway), 3);
    assert!(gateway.compile_limits());
    assert_eq!(limit(&gateway), 300);
    let stored = set(&gateway).expect(200).json();
    assert_eq!(stored["limits"]["r"].get("without_effect"), None);
    assert!(!gateway.compile_limits(), "nothing has changed");
}

#[test]
fn limits_of_a_client_in_the_store_apply_on_every_gateway() {
    let (redis, scratch) = (RedisServer::start(), TempDir::new());
    let start = |copy: &str| {
        let audit = scratch.path().join(format!("{copy}.d"));
        std::fs::create_dir_all(&audit).unwrap();
        let head = format!(
            "[admin]\naudit_log = \"{}/audit.log\"\n[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\nmode = \"exact\"\n",
            audit.display(),
            redis.url()
        );
        let copy = scratch.path().join(copy);
        let clients = format!("[clients]\nsource = \"shared\"\nfile = \"{}\"\n", copy.display());
        Process::spawn(&config(&head, &clients))
    };
    let (a, b) = (start("a.copy"), start("b.copy"));
    let both = [&a, &b];
    // What only a reload of the file needs.
    std::fs::remove_dir_all(scratch.path().join("b.copy.d")).unwrap();
    call(&a, "PUT", "/v1/clients/acme", json!({ "plan": "gold", "networks": ["127.0.0.0/8"] })).expect(201);
    eventually_eq(|| b.client().get("/a").status, 200);
    let used = limits(&a).1;
    let raise = || {
        put(&a, json!({ "windows": ["300/366d"] })).expect(200);
        assert_eq!(limits(&a).0, [300, 5000], "in effect here when the response is sent");
        eventually_eq(|| limits(&b).0, vec![300, 5000]);
    };
    let admitted = count_admitted(&both, raise) as u64;
    assert_eq!((admitted + used, limits(&b).1), (300, 300));
    std::fs::create_dir(scratch.path().join("b.copy.d")).unwrap();
    // The plan changes, and the client keeps its limits; those that have ended do not come back.
    let until = in_seconds(3);
    put(&b, json!({ "windows": ["400/366d"], "until": until })).expect(200);
    let listed = a.admin_get("/v1/clients/acme").expect(200).json();
    both.iter().for_each(|gateway| eventually_eq(|| limits(gateway), (vec![400, 5000], 300)));
    both.iter().for_each(|gateway| eventually_eq(|| limits(gateway), (vec![3, 9000, 5000], 300)));
    assert!(listed["limits"]["r"]["windows"].is_array(), "{listed}");
    call(&a, "DELETE", "/v1/clients/acme/limits/r", Value::Null).expect(204);
    let again = start("b.copy");
    eventually_eq(|| again.admin_get("/v1/clients/acme").status, 200);
    assert!(again.admin_get("/v1/clients/acme").json().get("limits").is_none());
}
