//! The guides for users of other products: their configurations can be read, and ours limit as the guides say.
//!
//! nginx, HAProxy and Envoy check theirs themselves, except for the descriptors of Envoy's rate limit service. Those, and the
//! configurations of Kong, LiteLLM, Traefik and Cloudflare, are parsed as YAML or JSON, and state the limits that ours have. The code for
//! Convex is not checked.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::external_scripts::python;
use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::free_port;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually_eq, guide_blocks};

/// The gateway of a guide, with another address, in front of a server that responds 200.
fn gateway(page: &str, clients: &str) -> (Gateway, Upstream) {
    gateway_before(page, clients, Upstream::responding(|_| reply(200, &[], b"")))
}

fn gateway_before(page: &str, clients: &str, upstream: Upstream) -> (Gateway, Upstream) {
    let mut toml = guide_blocks(page, "toml").remove(0);
    let server = upstream.address.to_string();
    for (address, other) in [("8080", "127.0.0.1:0"), ("9900", "127.0.0.1:0"), ("9001", server.as_str())] {
        let address = format!("127.0.0.1:{address}");
        assert!(toml.contains(&address), "{page}: {address}");
        toml = toml.replace(&address, other);
    }
    (Gateway::start_with(&toml, clients), upstream)
}

/// How many of `requests` requests at one time are admitted.
fn admitted(gateway: &Gateway, target: &str, fields: &[(&str, &str)], requests: usize) -> usize {
    let mut client = gateway.client();
    (0..requests).filter(|_| client.get_with(target, fields).status == 200).count()
}

#[test]
fn nginx_reads_its_configuration() {
    let scratch = TempDir::new();
    let text = guide_blocks("from-nginx", "nginx")[0].replace("127.0.0.1:8080", &format!("127.0.0.1:{}", free_port()));
    let folder = scratch.path().display();
    let paths =
        ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|name| format!("{name}_temp_path {folder}/{name};"));
    let file = scratch.write(
        "nginx.conf",
        format!(
            "pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {}\n{text} }}",
            paths.concat()
        ),
    );
    let output =
        Command::new("nginx").env("PATH", "/usr/sbin:/usr/bin:/bin").arg("-t").arg("-c").arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn haproxy_reads_its_configuration() {
    let scratch = TempDir::new();
    let file = scratch.write("haproxy.cfg", guide_blocks("from-haproxy", "haproxy").remove(0));
    let mut command = Command::new("haproxy");
    let output = command.env("PATH", "/usr/sbin:/usr/bin:/bin").arg("-c").arg("-f").arg(file).output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !messages.contains("[WARNING]"), "{messages}");
}

#[test]
fn the_limits_of_haproxy_hold() {
    let (gateway, _upstream) = gateway("from-haproxy", "");
    assert_eq!(admitted(&gateway, "/api/a", &[], 30), 20);
    gateway.advance_s(12);
    // The users are counted beside the addresses.
    let by_user = |gateway: &Gateway| admitted(gateway, "/api/a", &[("x-user", "alice")], 30);
    let mut admitted_in_a_minute = 0;
    for _ in 0..6 {
        admitted_in_a_minute += by_user(&gateway);
        gateway.advance(Duration::from_millis(11_300));
    }
    assert_eq!(admitted_in_a_minute, 100);
}

/// Reads YAML.
fn yaml(text: &str) -> Value {
    let mut command = python("yaml_to_json.py", &[] as &[&str]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_configuration_of_kong_is_yaml() {
    let kong = yaml(&guide_blocks("from-kong", "yaml")[0]);
    assert_eq!(kong["_format_version"], "3.0");
    let plugins = &kong["services"][0]["plugins"];
    assert_eq!(plugins[0], json!({ "name": "key-auth", "config": { "key_names": ["x-api-key"] } }));
    let limits =
        |plugin: &Value| (plugin["name"].clone(), plugin["config"]["hour"].clone(), plugin["config"]["minute"].clone());
    assert_eq!(limits(&plugins[1]), (json!("rate-limiting"), json!(2000), json!(33)));
    let acme = &kong["consumers"][0];
    assert_eq!(acme["keyauth_credentials"][0]["key"], "acme-secret");
    assert_eq!(limits(&acme["plugins"][0]), (json!("rate-limiting"), json!(100_000), json!(2000)));
    assert_eq!(kong["consumers"][1]["keyauth_credentials"][0]["key"], "initech-secret");
}

#[test]
fn the_configuration_of_traefik_is_yaml() {
    let traefik = yaml(&guide_blocks("from-traefik", "yaml")[0]);
    let http = &traefik["http"];
    let rate_limit = &http["middlewares"]["per-address"]["rateLimit"];
    assert_eq!(
        [&rate_limit["average"], &rate_limit["period"], &rate_limit["burst"]],
        [&json!(100), &json!("1m"), &json!(50)]
    );
    assert_eq!(http["middlewares"]["per-user"]["inFlightReq"]["amount"], 10);
    let router = &http["routers"]["api"];
    assert_eq!(router["middlewares"], json!(["per-address", "per-user"]));
    assert_eq!(
        http["services"][router["service"].as_str().unwrap()]["loadBalancer"]["servers"][0]["url"],
        "http://127.0.0.1:9001"
    );
}

#[test]
fn the_rule_of_cloudflare_is_json() {
    let rule: Value = serde_json::from_str(&guide_blocks("from-cloudflare", "json")[0]).unwrap();
    let limit = &rule["ratelimit"];
    let number = |name: &str| limit[name].as_u64();
    assert_eq!(["requests_per_period", "period", "mitigation_timeout"].map(number), [Some(5), Some(60), Some(600)]);
    assert_eq!(limit["counting_expression"], "http.response.code eq 401");
}

#[test]
fn the_descriptors_of_envoy_are_yaml() {
    let service = yaml(&guide_blocks("from-envoy-ratelimit", "yaml")[0]);
    let limit = |descriptor: &Value| {
        let limit = &descriptor["rate_limit"];
        (descriptor["key"].clone(), limit["requests_per_unit"].clone(), limit["unit"].clone())
    };
    let all: Vec<_> = service["descriptors"].as_array().unwrap().iter().map(limit).collect();
    let expected = [
        ("remote_address", 33, "minute"),
        ("user", 2000, "hour"),
        ("user", 100_000, "hour"),
        ("generic_key", 500, "second"),
    ];
    assert_eq!(all, expected.map(|(key, tokens, unit)| (json!(key), json!(tokens), json!(unit))));
    assert_eq!(limit(&service["descriptors"][1]["descriptors"][0]), (json!("path"), json!(5), json!("second")));
}

/// In the configuration of the other guide, whose route has other actions.
#[test]
fn envoy_reads_its_actions() {
    let actions = &guide_blocks("from-envoy-ratelimit", "yaml")[1];
    let config = guide_blocks("envoy", "yaml").remove(0);
    let (before, rest) = config.split_once("rate_limits:\n").unwrap();
    let indent = before.len() - before.trim_end_matches(' ').len();
    let (_, after) = rest.split_once("                http_filters:").unwrap();
    let lines = actions.lines().map(|line| format!("{}{line}\n", " ".repeat(indent)));
    let scratch = TempDir::new();
    let text =
        format!("{}{}                http_filters:{after}", before.trim_end_matches(' '), lines.collect::<String>());
    assert_eq!(text.matches("descriptor_key: path").count(), 1, "{text}");
    let file = scratch.write("envoy.yaml", text);
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/.parts/envoy/bin/envoy");
    assert!(program.is_file(), "Envoy is missing; `make parts` installs it");
    let output = Command::new(program)
        .args(["--mode", "validate", "--log-level", "warning", "--config-path"])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A burst of 20, then one each 100 ms; exempt networks are not limited.
#[test]
fn the_limits_of_nginx_hold() {
    let (gateway, _upstream) = gateway("from-nginx", "");
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 20);
    gateway.advance(Duration::from_millis(100));
    assert_eq!(admitted(&gateway, "/api/a", &[], 5), 1);
    gateway.advance(Duration::from_secs(1));
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 10);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 20);
}

#[test]
fn the_limits_of_kong_hold() {
    let clients = |name: &str, plan: &str| {
        let keys = ["secret", "other"].map(|key| format!("{name}-{key}"));
        let digests = keys.map(|key| transom_limiter::secret_digest::Digest::of(key.as_bytes()).to_string());
        format!("[clients.{name}]\nplan = \"{plan}\"\napi_keys = {digests:?}\n")
    };
    let clients = clients("acme", "gold") + &clients("initech", "standard");
    let (gateway, _upstream) = gateway("from-kong", &clients);
    let by_key = |key, requests| admitted(&gateway, "/api/a", &[("x-api-key", key)], requests);
    assert_eq!((by_key("initech-secret", 20), by_key("initech-other", 40), by_key("acme-secret", 40)), (20, 13, 40));
    gateway.get_with("/api/a", &[("x-api-key", "invented")]).expect(401);
    gateway.get("/api/a").expect(401);
}

#[test]
fn the_limits_of_litellm_hold() {
    let theirs: Value = serde_json::from_str(&guide_blocks("from-litellm", "json")[0]).unwrap();
    let stated = |request: &str, limit: &str| theirs[request][limit].as_u64().unwrap();
    let digests = ["sk-first", "sk-second"].map(|key| transom_limiter::secret_digest::Digest::of(key.as_bytes()));
    let clients = format!("[clients.search]\nplan = \"team\"\napi_keys = [\"{}\", \"{}\"]\n", digests[0], digests[1]);
    let usage = br#"{"usage":{"prompt_tokens":800,"completion_tokens":200}}"#;
    let upstream = Upstream::responding(move |_| reply(200, &[("Content-Type", "application/json")], usage));
    let (gateway, _upstream) = gateway_before("from-litellm", &clients, upstream);
    let ask = |key: &str, model: &str| {
        let body = json!({ "model": model, "max_tokens": 200 }).to_string();
        let fields = [("Authorization", format!("Bearer {key}"))];
        let fields = fields.each_ref().map(|(name, value)| (*name, value.as_str()));
        gateway.client().request("POST", "/v1/chat/completions", &fields, body.as_bytes())
    };
    let state = |response: &HttpResponse| {
        let field = |name: &str| response.field(name).unwrap().parse::<u64>().unwrap();
        ["limit", "remaining"]
            .map(|what| ["requests", "tokens"].map(|unit| field(&format!("x-ratelimit-{what}-{unit}"))))
    };
    // The key is nearer its limits than its team.
    let limits = ["rpm_limit", "tpm_limit"].map(|limit| stated("/key/generate", limit));
    let reserved = 200 + json!({ "model": "gpt-5", "max_tokens": 200 }).to_string().len().div_ceil(4) as u64;
    assert_eq!(state(&ask("sk-first", "gpt-5").expect(200)), [limits, [limits[0] - 1, limits[1] - reserved]]);
    let of_model = theirs["/key/generate"]["model_rpm_limit"]["gpt-5"].as_u64().unwrap();
    assert_eq!((1..10).filter(|_| ask("sk-first", "gpt-5").status == 200).count() as u64, of_model - 1);
    assert_eq!(ask("sk-first", "gpt-5").expect(429).json()["error"]["code"], "rate_limit_exceeded");
    // Each request costs 1000 tokens.
    let tokens = |key: &str| (0..50).filter(|_| ask(key, "other").status == 200).count() as u64;
    assert_eq!((tokens("sk-first"), tokens("sk-second")), (limits[1] / 1000 - of_model, limits[1] / 1000));
    let used = |rule: &str| {
        let (query, host) = (json!({ "rule": rule, "client": "search" }).to_string(), gateway.admin.to_string());
        let fields = [("Host", host.as_str())];
        let state = Client::connect(gateway.admin).request("POST", "/v1/value", &fields, query.as_bytes());
        state.expect(200).json()["count"].clone()
    };
    assert_eq!((used("team"), used("team-tokens")), (json!(2 * limits[1] / 1000), json!(2 * limits[1])));
    assert_eq!(ask("sk-invented", "other").status, 401);
}

#[test]
fn the_limits_of_envoy_hold() {
    let (gateway, _upstream) = gateway("from-envoy-ratelimit", "");
    let alice = [("x-user", "alice")];
    assert_eq!(admitted(&gateway, "/search", &alice, 9), 5);
    // Nothing is charged for a request that one rule refuses.
    let response = gateway.get_with("/a", &alice).expect(200);
    assert_eq!((remaining(&response, "per-address"), remaining(&response, "per-user")), (33 - 6, 2000 - 6));
    let acme = gateway.get_with("/a", &[("x-user", "acme")]).expect(200);
    assert_eq!(remaining(&acme, "per-user"), 100_000 - 1);
    assert_eq!(admitted(&gateway, "/a", &[], 40), 33 - 7);
}

#[test]
fn the_limits_of_traefik_hold() {
    let (gateway, _upstream) = gateway("from-traefik", "");
    assert_eq!(admitted(&gateway, "/api/a", &[], 80), 50);
    gateway.advance(Duration::from_secs(3));
    assert_eq!(admitted(&gateway, "/api/a", &[], 80), 5);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(admitted(&gateway, "/api/a", &[], 80), 50);
}

#[test]
fn the_limits_of_cloudflare_hold() {
    let is_right = |target: &str| target.ends_with("right");
    let upstream =
        Upstream::responding(move |received| reply(if is_right(&received.target) { 200 } else { 401 }, &[], b""));
    let (gateway, upstream) = gateway_before("from-cloudflare", "", upstream);
    let log_in = |password: &str| gateway.client().post(&format!("/login?{password}"), "").status;
    assert_eq!((0..20).map(|_| log_in("right")).collect::<Vec<_>>(), [200; 20]);
    assert_eq!((0..8).map(|_| log_in("wrong")).filter(|status| *status == 401).count(), 5);
    eventually_eq(|| upstream.received().len(), 25);
    gateway.get("/login").expect(401);
    gateway.advance(Duration::from_secs(599));
    assert_eq!(log_in("right"), 429);
    gateway.advance(Duration::from_secs(1));
    assert_eq!(log_in("right"), 200);
}

#[test]
fn the_limits_of_convex_hold() {
    let (gateway, _upstream) = gateway("from-convex", "");
    let limit = |reserve: bool| {
        let query = json!({ "rule": "messages", "key": "alice", "cost": 1, "reserve": reserve });
        let host = gateway.admin.to_string();
        let mut client = Client::connect(gateway.admin);
        client.request("POST", "/v1/limit", &[("Host", host.as_str())], query.to_string().as_bytes()).expect(200).json()
    };
    assert_eq!((0..4).filter(|_| limit(false)["allowed"] == true).count(), 3);
    let reserved = limit(true);
    assert_eq!((&reserved["allowed"], &reserved["retry_after_ms"]), (&json!(true), &json!(6000)));
    // A route with the rule uses the same counter.
    gateway.get_with("/messages", &[("x-user", "alice")]).expect(429);
    assert_eq!((admitted(&gateway, "/sign-up", &[], 120), admitted(&gateway, "/llm", &[], 1100)), (100, 1000));
}
