//! Changes of clients by requests to the admin address: in effect when the response is sent, and in the clients file, whose comments stay.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::process::{Process, run};
use crate::support::{TempDir, eventually, one_rule};

const CLIENTS: &str = "\
# Ask sales before you change it.

# since 2019
[clients.acme]
plan     = \"gold\"   # paid
networks = [\"127.0.0.9/32\"]
";

fn config(more: &str) -> String {
    let rule = "key = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"5/366d\"]\n\
                [rules.r.plans.gold]\nwindows = [\"100/366d\"]\n[rules.r.plans.silver]\nwindows = [\"50/366d\"]\n";
    let clients = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n";
    format!("workers = 4\n{more}{clients}{}", one_rule(rule))
}

fn send(process: &Process, method: &str, target: &str, fields: &[(&str, &str)], body: &Value) -> HttpResponse {
    let host = process.admin.to_string();
    let fields: Vec<(&str, &str)> = fields.iter().copied().chain([("Host", host.as_str())]).collect();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    Client::connect(process.admin).request(method, target, &fields, body.as_bytes())
}

fn call(process: &Process, method: &str, target: &str, body: Value) -> HttpResponse {
    send(process, method, target, &[], &body)
}

fn clients_file(process: &Process) -> String {
    fs::read_to_string(process.scratch.path().join("clients.toml")).unwrap()
}

fn status_with_key(process: &Process, key: &str) -> u16 {
    process.client().get_with("/a", &[("X-API-Key", key)]).status
}

#[test]
fn a_client_is_added_gets_keys_and_loses_them() {
    let process = Process::spawn_with(&config(""), CLIENTS);
    let put = |body| call(&process, "PUT", "/v1/clients/beta", body);
    let added = put(json!({ "plan": "silver" })).expect(201);
    assert!(added.field("etag").is_some());
    assert_eq!(added.json(), json!({ "name": "beta", "plan": "silver", "keys": [], "subjects": [], "networks": [] }));
    let issued = call(&process, "POST", "/v1/clients/beta/keys", Value::Null).expect(201);
    assert_eq!(issued.field("cache-control"), Some("no-store"));
    let issued = issued.json();
    let (id, key) = (issued["id"].as_str().unwrap(), issued["key"].as_str().unwrap());
    // All workers know the key when the response is there.
    for _ in 0..20 {
        assert_eq!(status_with_key(&process, key), 200);
    }
    let file = clients_file(&process);
    assert!(file.starts_with(CLIENTS) && file.contains(id) && !file.contains(key), "{file}");
    // PUT never changes keys.
    let replaced = put(json!({ "plan": "gold", "subjects": ["bob"], "networks": ["203.0.113.0/24"] })).expect(200);
    assert_eq!(replaced.json()["keys"].as_array().unwrap().len(), 1);
    assert_eq!(status_with_key(&process, key), 200);
    let shown = call(&process, "GET", "/v1/clients/beta", Value::Null).expect(200);
    assert_eq!(shown.field("etag"), replaced.field("etag"));
    assert_eq!(shown.json()["rules"][0]["windows"][0]["limit"], 100);
    call(&process, "DELETE", &format!("/v1/clients/beta/keys/{}", &id[..15]), Value::Null).expect(204);
    for _ in 0..20 {
        assert_eq!(status_with_key(&process, key), 401);
    }
    call(&process, "DELETE", &format!("/v1/clients/beta/keys/{id}"), Value::Null).expect(404).problem();
    call(&process, "DELETE", "/v1/clients/beta/keys/sha256:", Value::Null).expect(400).problem();
    call(&process, "DELETE", "/v1/clients/beta", Value::Null).expect(204);
    call(&process, "GET", "/v1/clients/beta", Value::Null).expect(404).problem();
    assert_eq!(clients_file(&process).trim_end(), CLIENTS.trim_end());
    // The gateway that made the changes does not take them for changes of someone else.
    let reloads = || process.metrics().sum("transom_config_reloads_total", &[]);
    assert_eq!(reloads(), 5, "{}", process.stderr());
}

#[test]
fn a_merge_patch_changes_what_it_names_and_keeps_comments_and_counts() {
    let process = Process::spawn_with(&config(""), CLIENTS);
    let request = || process.client().get_with("/a", &[("X-User", "user-7")]);
    let patch = |body| call(&process, "PATCH", "/v1/clients/acme", body);
    let changed = patch(json!({ "subjects": ["user-7"] })).expect(200).json();
    assert_eq!((&changed["plan"], &changed["networks"]), (&json!("gold"), &json!(["127.0.0.9/32"])));
    assert_eq!(clients_file(&process), format!("{CLIENTS}subjects = [\"user-7\"]\n"));
    for _ in 0..3 {
        request().expect(200);
    }
    patch(json!({ "plan": "silver", "networks": null })).expect(200);
    let file = clients_file(&process);
    assert!(file.contains("# since 2019\n[clients.acme]\nplan     = \"silver\"   # paid\n"), "{file}");
    assert!(!file.contains("networks"), "{file}");
    request().expect(200);
    let usage = call(&process, "GET", "/v1/clients/acme", Value::Null).expect(200).json();
    let window = &usage["rules"][0]["windows"][0];
    assert_eq!((&window["count"], &window["limit"]), (&json!(4), &json!(50)), "counts outlive the change");
    for (body, status) in [
        (json!({ "plan": null }), 400),
        (json!({ "keys": [] }), 400),
        (json!({ "subjects": "user-7" }), 400),
        (json!({ "networks": ["everywhere"] }), 400),
        (json!({ "plan": "platinum" }), 422),
        (json!({ "subjects": [""] }), 422),
    ] {
        patch(body.clone()).expect(status).problem();
        assert_eq!(clients_file(&process), file, "{body}");
    }
    call(&process, "PATCH", "/v1/clients/nobody", json!({ "plan": "gold" })).expect(404).problem();
    for name in ["no%20name", "%2E", "%2e%2E"] {
        call(&process, "PUT", &format!("/v1/clients/{name}"), json!({ "plan": "gold" })).expect(422).problem();
    }
    let twice = Client::connect(process.admin).request(
        "PATCH",
        "/v1/clients/acme",
        &[("Host", &process.admin.to_string())],
        b"{\"plan\": \"gold\", \"plan\": \"silver\"}",
    );
    assert!(twice.expect(400).text().contains("`plan` is given twice"));
    let with_body = call(&process, "POST", "/v1/clients/acme/keys", json!({ "name": "blue" }));
    assert!(with_body.expect(400).text().contains("`name` is not one of"));
    call(&process, "POST", "/v1/clients/nobody/keys", Value::Null).expect(404).problem();
    assert_eq!(clients_file(&process), file);
}

#[test]
fn preconditions_protect_the_changes_of_others() {
    let process = Process::spawn_with(&config(""), CLIENTS);
    let body = json!({ "plan": "silver", "subjects": ["bob"] });
    let put = |fields: &[(&str, &str)], body: &Value| send(&process, "PUT", "/v1/clients/acme", fields, body);
    let first = call(&process, "GET", "/v1/clients/acme", Value::Null).expect(200).field("etag").unwrap().to_owned();
    put(&[("If-None-Match", "*")], &body).expect(412).problem();
    put(&[("If-Match", "\"other\"")], &body).expect(412).problem();
    let second = put(&[("If-Match", &format!("\"other\", {first}"))], &body).expect(200);
    let second = second.field("etag").unwrap().to_owned();
    assert_ne!(first, second);
    put(&[("If-Match", &first)], &body).expect(412);
    let delete = |tag: &str| send(&process, "DELETE", "/v1/clients/acme", &[("If-Match", tag)], &Value::Null);
    delete(&first).expect(412);
    // A change in the file is a change of another.
    process.replace_file("clients.toml", &clients_file(&process).replace("bob", "eve"));
    process.wait_for_applied_reloads(2);
    delete(&second).expect(412);
    put(&[("If-Match", "*")], &body).expect(200);
    delete("*").expect(204);
    put(&[("If-Match", "*")], &body).expect(412);
    put(&[("If-None-Match", "*")], &body).expect(201);
}

/// Two gateways that read one clients file: the one that is asked has the change at once, the other when it sees the file.
#[test]
fn other_gateways_follow_the_file() {
    let process = Process::spawn_with(&config(""), CLIENTS);
    let file = process.scratch.path().join("clients.toml");
    let other = Process::spawn(&config("").replace("clients.toml", file.to_str().unwrap()));
    call(&process, "PUT", "/v1/clients/beta", json!({ "plan": "silver" })).expect(201);
    let key = call(&process, "POST", "/v1/clients/beta/keys", Value::Null).expect(201).json()["key"].clone();
    let key = key.as_str().unwrap();
    assert_eq!(status_with_key(&process, key), 200);
    eventually("the other gateway knows the key", || status_with_key(&other, key) == 200);
}

#[test]
fn nothing_changes_while_the_files_have_problems_or_another_edits_them() {
    let process = Process::spawn_with(&config(""), CLIENTS);
    let put = || call(&process, "PUT", "/v1/clients/beta", json!({ "plan": "silver" }));
    let draft = process.scratch.write("clients.toml.new", "");
    put().expect(503).problem();
    fs::remove_file(&draft).unwrap();
    process.write_config("what = 1\n");
    put().expect(409).problem();
    assert_eq!(clients_file(&process), CLIENTS);
    assert!(!draft.exists());
    process.write_config(&config(""));
    put().expect(201);
    // The command edits the same file.
    let path = process.config_path().display().to_string();
    let (code, listed, _) = run(&["clients", "list", "--config", &path]);
    assert!(code == Some(0) && listed.contains("beta"), "{listed}");
}

#[test]
fn without_clients_there_is_nothing_to_change() {
    let process = Process::spawn(&one_rule("key = \"ip\"\nwindows = [\"1/day\"]"));
    call(&process, "PUT", "/v1/clients/beta", json!({ "plan": "silver" })).expect(404).problem();
}

#[test]
fn changes_are_recorded_without_keys_in_clear() {
    let scratch = TempDir::new();
    let log = scratch.path().join("audit");
    let process = Process::spawn_with(&config(&format!("[admin]\naudit_log = {log:?}\n")), CLIENTS);
    call(&process, "PUT", "/v1/clients/beta", json!({ "plan": "silver" })).expect(201);
    let key = call(&process, "POST", "/v1/clients/beta/keys", Value::Null).expect(201).json();
    call(&process, "PATCH", "/v1/clients/beta", json!({ "plan": "platinum" })).expect(422);
    call(&process, "DELETE", "/v1/clients/beta", Value::Null).expect(204);
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains(key["key"].as_str().unwrap()));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let operations: Vec<_> = lines.iter().map(|line| line["what"]["operation"].as_str().unwrap()).collect();
    assert_eq!(operations, ["replace client", "add key", "remove client"]);
    assert_eq!((&lines[0]["before"], &lines[0]["after"]["plan"]), (&Value::Null, &json!("silver")));
    assert_eq!(lines[1]["what"]["key"], key["id"]);
    assert_eq!(lines[1]["after"]["keys"], json!([key["id"]]));
    assert_eq!((&lines[2]["before"]["name"], &lines[2]["after"]), (&json!("beta"), &Value::Null));
}

#[test]
fn a_client_that_other_files_name_is_not_removed() {
    let scratch = TempDir::new();
    let denied = scratch.write("access.toml", "[[deny]]\nclient = \"acme\"\n");
    let toml = config(&format!("[access]\nfile = {denied:?}\n"));
    let process = Process::spawn_with(
        &toml.replace("rules = [\"r\"]", "rules = [\"r\"]\nallow = [\"client:beta\"]"),
        &format!("{CLIENTS}[clients.beta]\nplan = \"gold\"\napi_keys = []\n"),
    );
    let problem = |name: &str| {
        let response = call(&process, "DELETE", &format!("/v1/clients/{name}"), Value::Null).expect(409);
        response.json()["detail"].as_str().unwrap().to_owned()
    };
    assert!(problem("acme").contains("deny entry "), "{}", problem("acme"));
    assert!(problem("beta").contains("`allow` of route `"), "{}", problem("beta"));
    call(&process, "DELETE", "/v1/clients/gamma", Value::Null).expect(404);
}

/// A request whose connection ends before it is read changes nothing.
#[test]
fn a_change_is_recorded_if_its_client_closes_the_connection() {
    const CHANGES: usize = 20;
    let scratch = TempDir::new();
    let log = scratch.path().join("audit");
    let process = Process::spawn_with(&config(&format!("[admin]\naudit_log = {log:?}\n")), CLIENTS);
    for number in 0..CHANGES {
        let mut connection = TcpStream::connect(process.admin).unwrap();
        let (host, body) = (process.admin, "{\"plan\": \"gold\"}");
        let head =
            format!("PUT /v1/clients/c{number} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {}\r\n\r\n", body.len());
        connection.write_all(format!("{head}{body}").as_bytes()).unwrap();
    }
    // Waits for those that have begun.
    call(&process, "PUT", "/v1/clients/last", json!({ "plan": "gold" })).expect(201);
    let is_complete = || {
        let (clients, log) = (clients_file(&process), fs::read_to_string(&log).unwrap());
        let changed = |number: &usize| clients.contains(&format!("[clients.c{number}]"));
        let recorded = |number: &usize| log.contains(&format!("\"c{number}\""));
        let numbers: Vec<usize> = (0..CHANGES).filter(changed).collect();
        !numbers.is_empty() && numbers == (0..CHANGES).filter(recorded).collect::<Vec<_>>()
    };
    eventually("the log has each change", is_complete);
}
