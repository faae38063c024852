//! Decisions for proxies that forward requests themselves: the fields that name a request, and real proxies with the
//! configurations of docs/guides/nginx.md, caddy.md and traefik.md.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread;

use crate::support::client::{Client, HttpResponse};
use crate::support::external_servers::{ExternalServer, on_free_port, part, program};
use crate::support::gateway::Gateway;
use crate::support::gateway_group::is_admitted;
use crate::support::process::run;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, guide_blocks, try_guide};

/// A gateway with the configuration of a guide, and 60 requests an hour instead of 2000, so that a test uses up both layers.
fn guide_gateway(page: &str) -> (Gateway, SocketAddr) {
    let mut toml = guide_blocks(page, "toml").remove(0);
    for (old, new) in [("127.0.0.1:8082", "127.0.0.1:0"), ("127.0.0.1:9900", "127.0.0.1:0"), ("2000/hour", "60/hour")] {
        assert!(toml.contains(old), "{page}: {old}");
        toml = toml.replace(old, new);
    }
    let gateway = Gateway::start(&toml);
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
        "warning: `forward_auth` listens on `192.0.2.1:8082`: anyone who can connect can use up the limits of any client; let only \
         your proxies connect",
        "note: the gateway does not see the responses to requests about which proxies ask on `forward_auth`: they always count by \
         `logins`, with the cost that is reserved, and hold no slot of `concurrent`",
    ] {
        assert!(text.contains(note), "{text}");
    }
}

/// Each field of an admission that a proxy copies to the response.
const COPIED: [&str; 2] = ["ratelimit", "ratelimit-policy"];

/// Eight clients in parallel get exactly 33 requests of each minute and 60 of the hour, and the server gets no more. `copied` are
/// the fields of admissions that the proxy passes on. Then tries the guide.
fn assert_two_layers_hold(page: &str, gateway: &Gateway, proxy: SocketAddr, upstream: &Upstream, copied: &[&str]) {
    let policy = "\"per-client-hour\";q=60;w=3600, \"per-client-minute\";q=33;w=60";
    // The test starts at the beginning of a minute, 45 minutes before the end of an hour.
    for (advance_s, limit, full, retry_after_s) in [
        (0, 33, "per-client-minute", 60),
        (60, 60 - 33, "per-client-hour", 44 * 60),
        (60, 0, "per-client-hour", 43 * 60),
        (3600, 33, "per-client-minute", 60),
    ] {
        gateway.advance_s(advance_s);
        for address in ["127.0.0.2", "127.0.0.3"] {
            let before = upstream.received().len();
            let responses: Vec<HttpResponse> = thread::scope(|scope| {
                let clients: Vec<_> = (0..8)
                    .map(|n| {
                        scope.spawn(move || {
                            let claimed = format!("192.0.2.{n}");
                            let fields = [("X-Forwarded-For", &*claimed), ("X-Real-IP", &*claimed)];
                            let mut client = Client::connect_from(address, proxy);
                            (0..10).map(|_| client.get_with("/a?b=c", &fields)).collect::<Vec<_>>()
                        })
                    })
                    .collect();
                clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
            });
            let (admitted, refused): (Vec<_>, Vec<_>) = responses.iter().partition(|response| is_admitted(response));
            assert_eq!((admitted.len(), refused.len()), (limit, 80 - limit));
            assert_eq!(upstream.received().len() - before, limit);
            for response in refused {
                assert_eq!(response.field("ratelimit-policy"), Some(policy));
                assert_eq!(remaining(response, full), 0);
                assert_eq!(response.field("retry-after"), Some(&*retry_after_s.to_string()));
                assert_eq!(response.field("content-type"), Some("application/problem+json"));
            }
        }
    }
    let admitted = Client::connect_from("127.0.0.4", proxy).get_with("/a", &[]).expect(200);
    for name in COPIED {
        assert_eq!(admitted.field(name).is_some(), copied.contains(&name), "{admitted:?}");
    }
    if copied == COPIED {
        assert_eq!(admitted.field("ratelimit-policy"), Some(policy));
        assert_eq!(remaining(&admitted, "per-client-minute"), 32);
    }
    try_guide(page, "127.0.0.1:8000", proxy);
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
    let (gateway, address) = guide_gateway("nginx");
    assert_two_layers_hold("nginx", &gateway, nginx(address, &upstream).address, &upstream, &COPIED);
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
    let (gateway, address) = guide_gateway("caddy");
    let text = guide_blocks("caddy", "caddyfile").remove(0).replace("127.0.0.1:8082", &address.to_string());
    let text = text.replace("127.0.0.1:9001", &upstream.address.to_string());
    let proxy = on_free_port("caddy", TempDir::new(), |scratch, address| {
        let text = text.replace(":8000", &format!(":{}", address.port()));
        let config = scratch.write("Caddyfile", format!("{{\n\tadmin off\n}}\n{text}"));
        let mut command = Command::new(program("caddy"));
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(config);
        command.env("HOME", scratch.path()).env("XDG_DATA_HOME", scratch.path()).env("XDG_CONFIG_HOME", scratch.path());
        command
    });
    assert_two_layers_hold("caddy", &gateway, proxy.address, &upstream, &COPIED);
}

#[test]
fn traefik_asks_about_its_requests() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let (gateway, address) = guide_gateway("traefik");
    let [dynamic, start] = <[String; 2]>::try_from(guide_blocks("traefik", "yaml")).unwrap();
    let dynamic = dynamic.replace("127.0.0.1:8082", &address.to_string());
    let dynamic = dynamic.replace("127.0.0.1:9001", &upstream.address.to_string());
    let traefik = part("traefik", "traefik");
    let proxy = on_free_port("traefik", TempDir::new(), |scratch, address| {
        scratch.write("dynamic.yaml", &dynamic);
        let start = start.replace("127.0.0.1:8000", &address.to_string());
        let config = scratch.write("traefik.yaml", &start);
        let mut command = Command::new(&traefik);
        command.arg("--configfile").arg(config).current_dir(scratch.path()).env("HOME", scratch.path());
        command.stdout(Stdio::null());
        command
    });
    // Traefik listens before it has read its routers.
    eventually("Traefik has its routers", || Client::connect_from("127.0.0.9", proxy.address).get("/").status == 200);
    assert_two_layers_hold("traefik", &gateway, proxy.address, &upstream, &[]);
}
