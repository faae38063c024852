//! Decisions for proxies that forward requests themselves: the fields that name a request, and real proxies with the
//! configurations of docs/guides/nginx.md, caddy.md and traefik.md.

use std::net::SocketAddr;
use std::process::Command;
use std::thread;

use crate::support::client::Client;
use crate::support::external_servers::{ExternalServer, on_free_port, program};
use crate::support::gateway::Gateway;
use crate::support::process::run;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, guide_blocks};

/// A gateway with the configuration of a guide.
fn guide_gateway(page: &str) -> (Gateway, SocketAddr) {
    let toml = guide_blocks(page, "toml").remove(0);
    let gateway =
        Gateway::start(&toml.replace("127.0.0.1:8082", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0"));
    let address = gateway.forward_auth_addresses()[0];
    (gateway, address)
}

const CONFIG: &str = r#"
[listen]
forward_auth = "127.0.0.1:0"
admin = "127.0.0.1:0"
max_connections_per_client = 1
[upstreams.gone]
servers = ["http://127.0.0.1:1"]
[rules.per-client]
key = "ip"
windows = ["3/hour"]
[rules.per-key]
key = "header:x-api-key"
on_missing_key = "refuse"
windows = ["1/hour"]
[rules.logins]
key = "header:x-user"
on_missing_key = "skip"
windows = ["2/hour"]
count_when = { status = [401] }
[[routes]]
name = "keyed"
path = "/keyed/{*rest}"
methods = ["POST"]
host = "a.test"
upstream = "gone"
rules = ["per-key"]
[[routes]]
name = "login"
path = "/login"
respond = { status = 204 }
rules = ["logins"]
[[routes]]
name = "moved"
path = "/moved"
redirect = { status = 308, to = "https://a.test/" }
[[routes]]
name = "secure"
path = "/secure"
scheme = "https"
respond = { status = 500 }
[[routes]]
name = "all"
path = "/all/{*rest}"
upstream = "gone"
rules = ["per-client"]
"#;

fn ask(client: &mut Client, target: &str, fields: &[(&str, &str)]) -> u16 {
    let given = |name: &str| fields.iter().any(|(given, _)| *given == name);
    let mut all = vec![("X-Forwarded-Uri", target)];
    if !given("X-Forwarded-Method") && !given("X-Original-Method") {
        all.push(("X-Forwarded-Method", "GET"));
    }
    all.extend(fields);
    client.get_with("/ignored", &all).status
}

#[test]
fn the_original_request_is_decided() {
    let gateway = Gateway::start(CONFIG);
    let address = gateway.forward_auth_addresses()[0];
    // Two connections: proxies are not limited as clients are.
    let (mut client, mut other) = (Client::connect(address), Client::connect(address));
    let post = [("X-Forwarded-Method", "POST"), ("X-Forwarded-Host", "a.test"), ("X-Api-Key", "k")];
    assert_eq!(ask(&mut client, "/keyed/1", &post), 200);
    assert_eq!(ask(&mut other, "/keyed/2?a=b", &post), 429);
    assert_eq!(ask(&mut Client::connect(address), "/keyed/2", &post[..2]), 400);
    assert_eq!(ask(&mut Client::connect(address), "/keyed/1", &[("X-Api-Key", "k")]), 404);
    assert_eq!(ask(&mut Client::connect(address), "/all/%2e%2e/keyed/1", &[]), 404);
    // The proxy passes on refusals and redirects of routes.
    assert_eq!(ask(&mut client, "/moved", &[]), 308);
    assert_eq!(ask(&mut client, "/secure", &[("X-Forwarded-Proto", "https")]), 500);
    assert_eq!(ask(&mut Client::connect(address), "/secure", &[("X-Forwarded-Proto", "http")]), 404);
    // Each request counts, because its response is not known.
    let user = [("X-User", "ann")];
    assert_eq!([(); 3].map(|()| ask(&mut client, "/login", &user)), [200, 200, 429]);
    // The client is the one that the proxy names.
    let clients = ["192.0.2.1", "192.0.2.2"].map(|client| [("X-Forwarded-For", client)]);
    for fields in &clients {
        assert_eq!([(); 4].map(|()| ask(&mut client, "/all/a", fields)), [200, 200, 200, 429]);
    }
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_requests_total", &[("route", "all"), ("code", "200")]), 6);
    assert_eq!(metrics.sum("transom_refused_total", &[("rule", "per-client")]), 2);
    assert_eq!(metrics.sum("transom_upstream_requests_total", &[]), 0);
}

#[test]
fn responses_carry_the_fields_and_no_body() {
    let gateway = Gateway::start(CONFIG);
    let mut client = Client::connect(gateway.forward_auth_addresses()[0]);
    let fields = [("X-Original-URI", "/all/a"), ("X-Original-Method", "HEAD"), ("X-Forwarded-For", "192.0.2.1")];
    let admitted = client.get_with("/", &fields).expect(200);
    assert_eq!((admitted.field("content-length"), admitted.body.len()), (Some("0"), 0));
    assert_eq!(admitted.field("ratelimit-policy"), Some("\"per-client\";q=3;w=3600"));
    assert!(admitted.field("ratelimit").unwrap().starts_with("\"per-client\";r=2;t="));
    (0..2).for_each(|_| drop(client.get_with("/", &fields).expect(200)));
    let refused = client.get_with("/", &fields).expect(429);
    assert!(refused.field("retry-after").is_some());
    assert_eq!(refused.json()["violated-policies"][0], "per-client");
}

#[test]
fn the_length_of_a_body_that_is_not_sent_is_ignored() {
    let gateway = Gateway::start(&CONFIG.replacen("[upstreams", "[limits]\nmax_body = \"1KiB\"\n[upstreams", 1));
    let address = gateway.forward_auth_addresses()[0];
    for length in ["1", "1000000"] {
        let fields = [("X-Forwarded-Uri", "/all/a"), ("X-Forwarded-Method", "POST"), ("Content-Length", length)];
        Client::connect(address).get_with("/", &fields).expect(200);
    }
}

#[test]
fn unclear_questions_are_refused() {
    let gateway = Gateway::start(CONFIG);
    let address = gateway.forward_auth_addresses()[0];
    let (method, target) = (("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/all/a"));
    for fields in [
        &[][..],
        &[method],
        &[target],
        &[method, target, target],
        &[method, target, ("X-Original-URI", "/all/a")],
        &[method, target, ("X-Original-Method", "GET")],
        &[method, target, ("X-Forwarded-Host", "a"), ("X-Forwarded-Host", "b")],
        &[method, ("X-Forwarded-Uri", "http://a.test/all/a")],
        &[("X-Forwarded-Method", "OPTIONS"), ("X-Forwarded-Uri", "*")],
    ] {
        let refused = Client::connect(address).get_with("/all/a", fields).expect(400);
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.starts_with("the request that the proxy asks about is not clear: "), "{fields:?}: {detail}");
    }
    for (fields, status) in [
        (&[method, ("X-Forwarded-Uri", "/all/a/../b")][..], 200),
        (&[method, ("X-Forwarded-Uri", "/all/%zz")], 400),
        (&[method, target, ("X-Forwarded-Host", "a b")], 400),
        (&[("X-Forwarded-Method", "CONNECT"), target], 405),
    ] {
        assert_eq!(Client::connect(address).get_with("/", fields).status, status, "{fields:?}");
    }
    assert_eq!(gateway.metrics().sum("transom_request_errors_total", &[("error", "original_request")]), 9);
}

#[test]
fn check_notes_what_proxies_cannot_be_told() {
    let scratch = TempDir::new();
    let file = scratch.write("gateway.toml", CONFIG.replacen("127.0.0.1:0", "192.0.2.1:8082", 1));
    let (_, out, err) = run(&["check", "--config", file.to_str().unwrap()]);
    let text = out + &err;
    for note in [
        "note: `forward_auth` listens on `192.0.2.1:8082`: anyone who can connect can use up the limits of any client; let only \
         your proxies connect",
        "note: the gateway does not see the responses to requests about which proxies ask on `forward_auth`: they always count by \
         `logins`, with the cost that is reserved, and hold no slot of `concurrent`",
    ] {
        assert!(text.contains(note), "{text}");
    }
}

/// Eight clients in parallel get exactly the 33 requests of a minute, and the server no more.
fn assert_two_layers_hold(proxy: SocketAddr, upstream: &Upstream) {
    for address in ["127.0.0.2", "127.0.0.3"] {
        let before = upstream.received().len();
        let statuses: Vec<u16> = thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|n| {
                    scope.spawn(move || {
                        let claimed = format!("192.0.2.{n}");
                        let fields = [("X-Forwarded-For", &*claimed), ("X-Real-IP", &*claimed)];
                        let mut client = Client::connect_from(address, proxy);
                        (0..10).map(|_| client.get_with("/a?b=c", &fields).status).collect::<Vec<_>>()
                    })
                })
                .collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        let count = |status| statuses.iter().filter(|found| **found == status).count();
        assert_eq!((count(200), count(429)), (33, 47), "{statuses:?}");
        assert_eq!(upstream.received().len() - before, 33);
    }
    let refused = Client::connect_from("127.0.0.2", proxy).get_with("/a", &[]).expect(429);
    let policy = "\"per-client-hour\";q=2000;w=3600, \"per-client-minute\";q=33;w=60";
    assert_eq!(refused.field("ratelimit-policy"), Some(policy));
    assert!(refused.field("ratelimit").unwrap().contains("\"per-client-minute\";r=0;t="), "{refused:?}");
    let seconds: u64 = refused.field("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    assert_eq!(refused.field("content-type"), Some("application/problem+json"));
    let admitted = Client::connect_from("127.0.0.4", proxy).get_with("/a", &[]).expect(200);
    assert_eq!(admitted.field("ratelimit-policy"), Some(policy));
    assert!(admitted.field("ratelimit").unwrap().contains("\"per-client-minute\";r=32;t="), "{admitted:?}");
    // A client cannot name another request.
    for (name, value) in [("X-Forwarded-Uri", "/other"), ("X-Forwarded-Method", "OPTIONS"), ("X-Forwarded-Host", "b")] {
        Client::connect_from("127.0.0.2", proxy).get_with("/a", &[(name, value)]).expect(429);
    }
    // Bodies and other methods pass the proxy.
    let mut client = Client::connect_from("127.0.0.5", proxy);
    client.post("/upload", "a body that the gateway does not get").expect(200);
    client.request("HEAD", "/", &[], b"").expect(200);
}

fn nginx(gateway: SocketAddr, upstream: &Upstream) -> ExternalServer {
    let text = guide_blocks("nginx", "nginx").remove(0).replace("127.0.0.1:8082", &gateway.to_string());
    let text = text.replace("127.0.0.1:9001", &upstream.address.to_string());
    on_free_port("nginx", TempDir::new(), |scratch, address| {
        let folder = scratch.path().display();
        let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {folder}/{name};"))
            .concat();
        let text = text.replace("127.0.0.1:8000", &address.to_string());
        let config = scratch.write(
            "nginx.conf",
            format!(
                "daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}
                 http {{ access_log off; {paths} {text} }}"
            ),
        );
        let mut command = Command::new(program("nginx"));
        command.args(["-e", "stderr", "-p"]).arg(scratch.path()).arg("-c").arg(config);
        command
    })
}

#[test]
fn nginx_asks_about_its_requests() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let (_gateway, address) = guide_gateway("nginx");
    assert_two_layers_hold(nginx(address, &upstream).address, &upstream);
}

#[test]
fn refusals_of_the_server_behind_nginx_pass() {
    let upstream = Upstream::responding(|_| reply(403, &[], b"not for you"));
    let (_gateway, address) = guide_gateway("nginx");
    let refused = Client::connect(nginx(address, &upstream).address).get("/").expect(403);
    assert_eq!(refused.text(), "not for you");
    assert!(refused.field("ratelimit").is_some());
}

#[test]
fn caddy_asks_about_its_requests() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let (_gateway, gateway) = guide_gateway("caddy");
    let text = guide_blocks("caddy", "caddyfile").remove(0).replace("127.0.0.1:8082", &gateway.to_string());
    let text = text.replace("127.0.0.1:9001", &upstream.address.to_string());
    let proxy = on_free_port("caddy", TempDir::new(), |scratch, address| {
        let text = text.replace(":8000", &format!(":{}", address.port()));
        let config = scratch.write("Caddyfile", format!("{{\n\tadmin off\n}}\n{text}"));
        let mut command = Command::new(program("caddy"));
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(config);
        command.env("HOME", scratch.path()).env("XDG_DATA_HOME", scratch.path()).env("XDG_CONFIG_HOME", scratch.path());
        command
    });
    assert_two_layers_hold(proxy.address, &upstream);
}
