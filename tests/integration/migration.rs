//! The guides for users of other products: their configurations are valid as quoted, and ours limit as the guides say.

use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::support::client::Client;
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

/// A burst of 21, then one each 100 ms; exempt networks are not limited.
#[test]
fn the_limits_of_nginx_hold() {
    let (gateway, _upstream) = gateway("from-nginx", "");
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 21);
    gateway.advance(Duration::from_millis(100));
    assert_eq!(admitted(&gateway, "/api/a", &[], 5), 1);
    gateway.advance(Duration::from_secs(1));
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 10);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(admitted(&gateway, "/api/a", &[], 40), 21);
}

#[test]
fn the_limits_of_kong_hold() {
    let clients = |name: &str, plan: &str, key: &str| {
        let digest = transom_limiter::secret_digest::Digest::of(key.as_bytes());
        format!("[clients.{name}]\nplan = \"{plan}\"\napi_keys = [\"{digest}\"]\n")
    };
    let clients = clients("acme", "gold", "acme-secret") + &clients("initech", "standard", "initech-secret");
    let (gateway, _upstream) = gateway("from-kong", &clients);
    let by_key = |key, requests| admitted(&gateway, "/api/a", &[("x-api-key", key)], requests);
    assert_eq!((by_key("initech-secret", 40), by_key("acme-secret", 40)), (33, 40));
    gateway.get_with("/api/a", &[("x-api-key", "invented")]).expect(401);
    gateway.get("/api/a").expect(400);
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
