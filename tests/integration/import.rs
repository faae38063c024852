//! `transom import`: the same requests through the product and through the gateway with the imported file, which never admits more.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::RateLimitRequest;

use crate::support::client::Client;
use crate::support::external_servers::{ExternalServer, on_free_port, part, program};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, run};
use crate::support::ratelimit_client::{RatelimitClient, descriptor, is_ok, request};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually};

fn sample(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import").join(name)).unwrap()
}

/// Requests of one kind, and what is expected where the gateway differs.
struct Requests {
    method: &'static str,
    host: &'static str,
    target: &'static str,
    fields: &'static [(&'static str, &'static str)],
    count: usize,
    /// The status of the gateway, which differs from that of the product.
    differs: Option<u16>,
}

const fn get(target: &'static str, count: usize) -> Requests {
    Requests { method: "GET", host: "localhost", target, fields: &[], count, differs: None }
}

impl Requests {
    const fn at(self, host: &'static str) -> Requests {
        Requests { host, ..self }
    }

    const fn with(self, fields: &'static [(&'static str, &'static str)]) -> Requests {
        Requests { fields, ..self }
    }

    const fn by(self, method: &'static str) -> Requests {
        Requests { method, ..self }
    }

    const fn differs(self, status: u16) -> Requests {
        Requests { differs: Some(status), ..self }
    }

    /// The status, and what reached which server, of each request.
    fn send(&self, address: SocketAddr) -> Vec<(u16, String)> {
        let send = |_| {
            let mut client = Client::connect(address);
            let fields: Vec<_> = [("Host", self.host)].into_iter().chain(self.fields.iter().copied()).collect();
            let response = client.request(self.method, self.target, &fields, b"");
            let shown = match (response.status, response.field("location")) {
                // Ports differ.
                (300..400, Some(location)) => location.replace(&format!(":{}", address.port()), ""),
                (200, _) => String::from_utf8_lossy(&response.body).into_owned(),
                _ => String::new(),
            };
            (response.status, shown)
        };
        (0..self.count).map(send).collect()
    }
}

/// Two servers, whose responses say what they received.
struct Servers([Upstream; 2]);

impl Servers {
    fn start(names: [&'static str; 2]) -> Servers {
        let server = |name: &'static str| {
            Upstream::responding(move |request| {
                let field = |name: &str| request.field(name).unwrap_or("-").to_owned();
                let shown = format!("{name} {} {}", request.target, field("x-area"));
                reply(200, &[("X-Powered-By", "test")], shown.as_bytes())
            })
        };
        Servers(names.map(server))
    }

    /// A configuration with their addresses.
    fn placed_in(&self, text: &str) -> String {
        let [first, second] = self.0.each_ref().map(|server| server.address.to_string());
        text.replace("127.0.0.1:9001", &first).replace("127.0.0.1:9002", &second)
    }
}

/// Imports a text as a file, and returns the configuration, with ports that are free, and the report.
fn imported(product: &str, name: &str, text: &str) -> (String, String) {
    let scratch = TempDir::new();
    let file = scratch.write(name, text);
    let (code, toml, report) = run(&["import", product, file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{report}");
    let toml = toml.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0");
    (toml, report)
}

/// Compares the responses to each kind of requests. Of limited ones, the gateway admits at most as many, and at least some.
fn compare(name: &str, theirs: SocketAddr, ours: &Gateway, all: &[Requests]) {
    for requests in all {
        let what = format!("{name}: {} {} {}", requests.method, requests.host, requests.target);
        let (theirs, ours) = (requests.send(theirs), requests.send(ours.http));
        if let Some(status) = requests.differs {
            assert_eq!(ours[0].0, status, "{what}");
            assert_ne!(theirs[0].0, status, "{what}: the difference is gone");
            continue;
        }
        assert_eq!(ours[0], theirs[0], "{what}");
        let admitted = |responses: &[(u16, String)]| responses.iter().filter(|(status, _)| *status < 400).count();
        let [theirs, ours] = [&theirs, &ours].map(|responses| admitted(responses));
        assert!(ours <= theirs, "{what}: {ours} were admitted, {theirs} by the product");
        assert!(ours > 0 || theirs == 0, "{what}: none was admitted, {theirs} by the product");
    }
}

/// nginx with a configuration for any machine.
fn nginx(text: &str) -> ExternalServer {
    on_free_port("nginx", TempDir::new(), |scratch, address| {
        let home = scratch.path().display().to_string();
        let is_of_machine = |line: &&str| {
            !["user ", "pid ", "worker_processes ", "include mime", "access_log ", "error_log "]
                .iter()
                .any(|word| line.trim_start().starts_with(word))
        };
        let lines: Vec<&str> = text.lines().filter(is_of_machine).collect();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {home}/{name};"))
            .concat();
        let text = lines.join("\n").replace("127.0.0.1:8080", &address.to_string()).replace(
            "\nhttp {",
            &format!(
                "\npid {home}/pid; error_log stderr;\nhttp {{ access_log off; proxy_http_version 1.1; {temporary}"
            ),
        );
        let config = scratch.write("nginx.conf", format!("daemon off; master_process off;\n{text}"));
        let mut command = Command::new(program("nginx"));
        command.args(["-e", "stderr", "-p", &home, "-c"]).arg(config);
        command
    })
}

const KEY: &[(&str, &str)] = &[("X-Api-Key", "k1")];

/// For each sample, requests to all of its locations.
const NGINX: [(&str, &[Requests]); 14] = [
    (
        "blocklist",
        &[
            get("/a", 2),
            get("/closed/a", 2),
            get("/one/a", 2),
            get("/read/a", 1),
            get("/read/a", 1).by("HEAD"),
            get("/read/a", 1).by("POST"),
        ],
    ),
    (
        "api-gateway",
        &[get("/api/a?x=1", 40), get("/api/search?q=1", 20), get("/api", 1), get("/health", 5), get("/elsewhere", 1)],
    ),
    ("allow-list", &[get("/", 30), get("/admin/a", 2), get("/internal/a", 1), get("/public/a", 1)]),
    (
        "wordpress",
        &[
            get("/wp-login.php", 12),
            get("/wp-json/a", 12).by("POST"),
            get("/wp-json/a", 12),
            get("/wp-json", 1),
            get("/xmlrpc.php", 1),
            get("/a?p=1", 3),
            get("/style.css", 1),
            // Not enforced, as the report says.
            get("/.htaccess", 1).differs(200),
        ],
    ),
    (
        "virtual-hosts",
        &[
            get("/", 1).at("unknown.example.com"),
            get("/assets/a.css", 1).at("www.shop.example.com"),
            get("/a", 30).at("shop.example.com"),
            get("/old/a", 1).at("api.example.com"),
            get("/none", 1).at("api.example.com"),
            get("/v1/a?x=1", 30).at("api.example.com"),
        ],
    ),
    (
        "api-keys",
        &[
            get("/v1/a", 60),
            get("/v1/a", 60).with(KEY),
            get("/v1/a", 60).with(&[("X-Api-Key", "k2")]),
            get("/reports/a", 9),
            get("/reports/b", 9),
            get("/account/", 9).with(&[("Cookie", "session=s1")]),
            get("/account/", 9),
        ],
    ),
    ("strict", &[get("/one/", 5), get("/both/", 1).differs(429), get("/free/", 1).differs(429)]),
    ("delayed", &[get("/smooth/", 1), get("/two-stage/", 8).with(&[("X-User", "a")]), get("/two-stage/", 20)]),
    (
        "rewrites",
        &[
            get("/service/a?b=c", 1),
            get("/service/", 1),
            get("/v1/a/b", 1),
            get("/exact", 1),
            get("/users/7", 1),
            get("/users/7/more", 1),
            get("/orders/7", 1),
            get("/upload/a", 1).by("POST"),
            get("/upload/a", 1).by("DELETE"),
            get("/docs", 1),
            get("/api/v1/hidden/a", 1),
            get("/docs/deep", 1),
        ],
    ),
    (
        "redirects",
        &[
            get("/old/a", 3),
            get("/old/a/b?c=d", 1),
            get("/old/", 1),
            get("/old/new/a", 1),
            get("/moved/a?b", 1),
            get("/moved/deep/a", 1),
            get("/page.html?a", 1),
            get("/old/kept/a", 1),
            get("/elsewhere/a?b", 1),
            get("/", 1),
            get("/fixed", 9),
        ],
    ),
    (
        "plans",
        &[
            get("/both/a", 9).with(KEY),
            get("/both/a", 9).with(&[("X-Api-Key", "gold-1")]),
            // Not enforced, as the report says.
            get("/both/7", 1).differs(200),
            get("/gold/a", 9).with(&[("X-Api-Key", "gold-1")]),
        ],
    ),
    (
        "sessions",
        &[
            get("/a", 3),
            get("/static/a.css", 1),
            // Credentials are not checked: closed.
            get("/private/", 1).differs(403),
            get("/bot", 1).with(&[("User-Agent", "crawler")]).differs(200),
        ],
    ),
    (
        "numbers",
        &[get("/users/7", 3), get("/users/7/more", 1), get("/v2/items/0b5e6c1a-7d4f-4f0e-9a51-3c2b1d0e9f87.json", 1)],
    ),
    (
        "behind-balancer",
        &[
            get("/a", 50).with(&[("X-Forwarded-For", "192.0.2.1")]),
            get("/a", 50).with(&[("X-Forwarded-For", "192.0.2.1, 192.0.2.2")]),
            get("/echo/", 30),
        ],
    ),
];

#[test]
fn nginx_admits_at_least_as_much() {
    for (name, requests) in NGINX {
        // Of several servers, each may respond.
        let is_balanced = ["api-gateway", "sessions"].contains(&name);
        let servers = Servers::start(if is_balanced { ["one"; 2] } else { ["first", "second"] });
        let text = servers.placed_in(&sample(&format!("nginx/{name}.conf")));
        let nginx = nginx(&text);
        let (toml, _report) = imported("nginx", &format!("{name}.conf"), &text);
        compare(name, nginx.address, &Gateway::start(&toml), requests);
    }
}

#[test]
fn the_command_writes_files_and_reports() {
    let scratch = TempDir::new();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    fs::create_dir(path("conf.d")).unwrap();
    scratch.write("conf.d/zones.conf", "limit_req_zone $binary_remote_addr zone=api:1m rate=5r/s;\n");
    let server = "server {\n listen 127.0.0.1:8080;\n location / {\n  limit_req zone=api;\n  proxy_pass http://a.example;\n }\n}\n";
    scratch.write("nginx.conf", format!("http {{\ninclude conf.d/*.conf;\ngzip on;\n{server}}}\n"));
    let output = path("gateway.toml");
    let arguments = ["import", "nginx", &path("nginx.conf"), "--output", &output];
    let (code, out, report) = run(&arguments);
    assert_eq!((code, out.as_str()), (Some(0), ""), "{report}");
    assert!(report.starts_with("transom: translated 8 of 9 directives\n"), "{report}");
    assert!(
        report.contains("nginx.conf:3: left out: `gzip on`: the gateway does not compress responses\n"),
        "{report}"
    );
    let (code, checked, _) = run(&["check", &output]);
    assert_eq!(code, Some(0), "{checked}");
    // An existing file is not replaced without `--force`.
    fs::write(&output, "mine").unwrap();
    let (code, _, message) = run(&arguments);
    assert!(code == Some(2) && message.contains("exists"), "{message}");
    assert_eq!(fs::read_to_string(&output).unwrap(), "mine");
    assert_eq!(run(&[&arguments[..], &["--force"]].concat()).0, Some(0));
    assert!(fs::read_to_string(&output).unwrap().starts_with("# Imported from "));
    // The standard output is no file to replace, whatever it is.
    let to_stdout = ["import", "nginx", &path("nginx.conf"), "--output", "/dev/stdout"];
    let (code, out, report) = run(&to_stdout);
    assert_eq!((code, out), (Some(0), fs::read_to_string(&output).unwrap()), "{report}");
    let redirected = scratch.path().join("redirected.toml");
    let stdout = fs::File::create(&redirected).unwrap();
    assert!(Command::new(BINARY).args(to_stdout).stdout(stdout).stderr(Stdio::null()).status().unwrap().success());
    assert_eq!(fs::read_to_string(&redirected).unwrap(), fs::read_to_string(&output).unwrap());
    // What is not enforced fails with `--strict`, and is written all the same.
    let closed = scratch.write("closed.conf", "server {\n listen 127.0.0.1:8080;\n location / {\n  limit_req zone=none;\n  proxy_pass http://a.example;\n }\n}\n");
    let strict = ["import", "nginx", "--strict", closed.to_str().unwrap()];
    let (code, out, report) = run(&strict);
    assert!(code == Some(2) && out.contains("[upstreams") && report.contains("is not enforced"), "{report}");
    assert_eq!(run(&[&strict[..2], &strict[3..]].concat()).0, Some(0));
    assert_eq!(run(&["import", "nginx", "--strict", &path("nginx.conf")]).0, Some(0));
    // A mistake in the file has its line.
    let broken = scratch.write("broken.conf", "http {\n server {\n");
    let (code, _, message) = run(&["import", "nginx", broken.to_str().unwrap()]);
    assert!(code == Some(2) && message.contains("broken.conf:2: this block is not closed"), "{message}");
    assert_eq!(run(&["import", "apache", "httpd.conf"]).0, Some(2));
    assert_eq!(run(&["import", "nginx", &path("none.conf")]).0, Some(2));
}

/// Imports a sample into a folder, and starts the gateway with the files there, and these addresses.
fn gateway_of(product: &str, name: &str, text: &str) -> Gateway {
    let scratch = TempDir::new();
    let output = scratch.path().join("gateway.toml");
    let file = scratch.write(name, text);
    let arguments = ["import", product, file.to_str().unwrap(), "--output", output.to_str().unwrap()];
    let (code, _, report) = run(&arguments);
    assert_eq!(code, Some(0), "{report}");
    let mut toml = fs::read_to_string(&output).unwrap();
    for address in ["127.0.0.1:8080", "127.0.0.1:9900", "0.0.0.0:8000", "0.0.0.0:80", "0.0.0.0:8081"] {
        toml = toml.replace(&format!("\"{address}\""), "\"127.0.0.1:0\"");
    }
    let read = |name: &'static str| Some((name, fs::read_to_string(scratch.path().join(name)).ok()?));
    let files: Vec<(&str, String)> = ["clients.toml", "access.toml"].into_iter().filter_map(read).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    Gateway::start_with_files(&toml, &files)
}

/// The status of the first of these requests, and how many are admitted, as the documentation of the product says.
type Recorded = (Requests, u16, usize);

const ACME: &[(&str, &str)] = &[("X-Api-Key", "acme-secret")];
const INITECH: &[(&str, &str)] = &[("X-Api-Key", "initech-secret")];
const INITECH_OTHER: &[(&str, &str)] = &[("X-Api-Key", "initech-other")];
const ROOT: &[(&str, &str)] = &[("apikey", "root-key")];
const GUEST: &[(&str, &str)] = &[("apikey", "guest-key")];
const VERSION: &[(&str, &str)] = &[("X-Version", "2"), ("X-Session", "a")];

/// Of Kong, for its default of stripping paths, plugins by scope, and keys.
const KONG: [(&str, &[Recorded]); 10] = [
    ("basic", &[(get("/api/a", 9), 200, 5), (get("/other", 1), 404, 0)]),
    (
        "consumers",
        &[
            (get("/api/a", 20).with(ACME), 200, 8),
            (get("/api/a", 4).with(INITECH), 200, 4),
            (get("/api/a", 9).with(INITECH_OTHER), 200, 1),
            (get("/api/a", 1), 401, 0),
            (get("/api/a", 1).with(KEY), 401, 0),
        ],
    ),
    (
        "strip",
        &[
            (get("/users/7", 1), 200, 1),
            (get("/accounts/7", 1), 200, 1),
            (get("/accounts/7/more", 1), 404, 0),
            (get("/users/7", 1).by("DELETE"), 404, 0),
            (get("/plain", 1), 200, 1),
        ],
    ),
    (
        "acl",
        &[(get("/admin", 3).with(ROOT), 200, 3), (get("/admin", 1).with(GUEST), 403, 0), (get("/admin", 1), 403, 0)],
    ),
    ("networks", &[(get("/internal/a", 1), 403, 0), (get("/public/a", 2), 200, 2)]),
    ("sliding", &[(get("/a", 9), 200, 4)]),
    (
        "hosts",
        &[
            (get("/a", 1).at("shop.example.com").with(VERSION), 200, 1),
            (get("/a", 1).at("www.shop.example.com").with(VERSION), 200, 1),
            (get("/a", 1).at("shop.example.com"), 404, 0),
        ],
    ),
    ("transform", &[(get("/api/a", 1), 200, 1), (get("/gone", 1), 410, 0)]),
    (
        "refusals",
        &[
            (get("/by-header", 9).with(&[("X-Tenant", "a")]), 200, 3),
            (get("/by-header", 2).with(&[("X-Tenant", "a")]), 503, 0),
            (get("/by-header", 9).with(&[("X-Tenant", "b")]), 200, 3),
            // Tokens are not checked: closed.
            (get("/tokens", 1), 403, 0),
        ],
    ),
    ("top-level", &[(get("/second", 9), 200, 2), (get("/first", 9), 200, 6)]),
];

#[test]
fn kong_is_imported() {
    let servers = Servers::start(["first", "second"]);
    let [first, second] = servers.0.each_ref().map(|server| server.address.port().to_string());
    for (name, recorded) in KONG {
        let text = servers.placed_in(&sample(&format!("kong/{name}.yml")));
        let text =
            text.replace("port: 9001", &format!("port: {first}")).replace("port: 9002", &format!("port: {second}"));
        let gateway = gateway_of("kong", &format!("{name}.yml"), &text);
        for (requests, status, admitted) in recorded {
            let responses = requests.send(gateway.http);
            let count = responses.iter().filter(|(status, _)| *status < 400).count();
            assert_eq!((responses[0].0, count), (*status, *admitted), "{name}: {}", requests.target);
        }
    }
    let text = servers.placed_in(&sample("kong/strip.yml")).replace("port: 9001", &format!("port: {first}"));
    let gateway = gateway_of("kong", "strip.yml", &text);
    // The path of the service precedes that of the request.
    assert_eq!(get("/users/7?a=b", 1).send(gateway.http)[0].1, "first /v2/7?a=b -");
    assert_eq!(get("/plain/x", 1).send(gateway.http)[0].1, "second /x -");
}

/// Traefik with a dynamic configuration and one entry point.
fn traefik(name: &str, text: &str) -> ExternalServer {
    on_free_port("traefik", TempDir::new(), |scratch, address| {
        let dynamic = scratch.write(name, text.replace("127.0.0.1:8080", &address.to_string()));
        let start = format!(
            "entryPoints: {{ web: {{ address: \"{address}\", forwardedHeaders: {{ trustedIPs: [127.0.0.0/8] }} }} }}\n\
             providers: {{ file: {{ filename: \"{}\" }} }}\nglobal: {{ sendAnonymousUsage: false, checkNewVersion: false }}\n",
            dynamic.display()
        );
        let config = scratch.write("static.yaml", start);
        let mut command = Command::new(part("traefik", "traefik"));
        command.arg("--configfile").arg(config).current_dir(scratch.path()).env("HOME", scratch.path());
        command.stdout(Stdio::null());
        command
    })
}

/// The first of the requests of each sample is one that a router matches.
const TRAEFIK: [(&str, &[Requests]); 10] = [
    ("basic.yml", &[get("/api/a", 40), get("/other", 1)]),
    (
        "hosts.yml",
        &[
            get("/a", 2).at("shop.example.com"),
            get("/a", 2).at("www.example.com"),
            get("/v1/a", 2).at("api.example.com"),
            get("/v1/a", 1).at("api.example.com").with(VERSION),
            get("/health", 1).at("api.example.com"),
            get("/v1/a", 1).at("api.example.com").by("DELETE"),
        ],
    ),
    ("prefixes.yml", &[get("/stripped/a?b=c", 1), get("/added/a", 1), get("/replaced", 1), get("/replaced/a", 1)]),
    ("in-flight.toml", &[get("/a", 20).with(&[("X-User", "a")]), get("/a", 20).with(&[("X-User", "b")])]),
    ("allow.yml", &[get("/local/", 1), get("/inside/", 1), get("/private/", 1).differs(403)]),
    ("chains.yml", &[get("/one/a", 20), get("/two/a", 1).differs(429)]),
    ("priorities.yml", &[get("/a", 1), get("/users/7", 1), get("/users/7/b", 1)]),
    ("health.yml", &[get("/a", 2)]),
    ("entry-points.yml", &[get("/a", 20).with(&[("X-Forwarded-For", "192.0.2.1")])]),
    ("redirects.yml", &[get("/large/", 1), get("/missing/", 1).differs(403), get("/plain/", 1).differs(200)]),
];

#[test]
fn traefik_admits_at_least_as_much() {
    for (name, requests) in TRAEFIK {
        let is_balanced = name == "health.yml";
        let servers = Servers::start(if is_balanced { ["one"; 2] } else { ["first", "second"] });
        let text = servers.placed_in(&sample(&format!("traefik/{name}")));
        let traefik = traefik(name, &text);
        eventually("Traefik has its routers", || traefik_has_routers(&requests[0], traefik.address));
        compare(name, traefik.address, &gateway_of("traefik", name, &text), requests);
    }
}

/// Another request than those that are counted.
fn traefik_has_routers(requests: &Requests, address: SocketAddr) -> bool {
    let mut client = Client::connect_from("127.0.0.9", address);
    let fields = [("Host", requests.host), ("X-Forwarded-For", "192.0.2.9"), ("X-User", "other")];
    client.request(requests.method, requests.target, &fields, b"").status != 404
}

/// Descriptors of a domain, how many requests of how many are within the limit.
type Descriptors = (&'static [(&'static str, &'static str)], usize, usize);

/// As the documentation of the service says.
const ENVOY: [(&str, &str, &[Descriptors]); 10] = [
    (
        "basic",
        "messaging",
        &[
            (&[("message_type", "marketing"), ("to_number", "1")], 9, 5),
            (&[("message_type", "other"), ("to_number", "1")], 9, 9),
            (&[("to_number", "1")], 120, 100),
        ],
    ),
    (
        "addresses",
        "edge",
        &[
            (&[("remote_address", "192.0.2.1")], 30, 10),
            (&[("remote_address", "192.0.2.10")], 30, 20),
            (&[("remote_address", "192.0.2.20")], 30, 30),
            (&[("remote_address", "192.0.2.30")], 3, 0),
        ],
    ),
    (
        "nested",
        "api",
        &[
            (&[("user", "a"), ("path", "/search")], 9, 5),
            (&[("user", "a"), ("path", "/b")], 9, 9),
            // Stricter, as the report says: the service finds no limit.
            (&[("user", "acme"), ("path", "/search")], 9, 5),
        ],
    ),
    ("shadow", "trial", &[(&[("generic_key", "all")], 9, 9), (&[("generic_key", "writes")], 9, 2)]),
    (
        "unlimited",
        "plans",
        &[
            (&[("plan", "free")], 9, 3),
            (&[("plan", "internal")], 9, 9),
            (&[("tenant", "a"), ("plan", "free")], 9, 3),
            (&[("tenant", "a"), ("plan", "gold")], 9, 9),
        ],
    ),
    ("names", "shop", &[(&[("session", "s")], 9, 4), (&[("customer", "c")], 9, 6)]),
    (
        "periods",
        "periods",
        &[(&[("a", "1")], 9, 1), (&[("b", "1")], 9, 2), (&[("c", "1")], 9, 3), (&[("d", "1")], 9, 4)],
    ),
    ("wildcards", "wild", &[(&[("path", "/a")], 9, 3), (&[("method", "POST")], 9, 1)]),
    (
        "three-levels",
        "deep",
        &[
            (&[("source_cluster", "web"), ("destination_cluster", "database")], 20, 8),
            (&[("source_cluster", "web"), ("destination_cluster", "database"), ("operation", "read")], 9, 2),
            (&[("destination_cluster", "database")], 20, 9),
            (&[("source_cluster", "other"), ("destination_cluster", "database")], 20, 20),
        ],
    ),
    (
        "anchors",
        "anchors",
        &[
            (&[("header_match", "quote-path")], 9, 2),
            (&[("header_match", "order-path")], 9, 2),
            (&[("header_match", "list-path")], 9, 4),
        ],
    ),
];

#[test]
fn the_rate_limit_service_is_imported() {
    for (name, domain, all) in ENVOY {
        let gateway = gateway_of("envoy-ratelimit", "config.yaml", &sample(&format!("envoy-ratelimit/{name}.yaml")));
        let mut client = RatelimitClient::connect(gateway.ratelimit_service_addresses()[0]);
        for (entries, times, expected) in all {
            let message = RateLimitRequest { domain: domain.to_owned(), ..request(&[descriptor(entries)]) };
            let count = (0..*times).filter(|_| is_ok(&client.send(&message))).count();
            assert_eq!(count, *expected, "{name}: {entries:?}");
        }
    }
}

/// The servers of an Ingress are Services; here they are one server.
#[test]
fn an_ingress_is_imported() {
    let upstream = Upstream::responding(|request| reply(200, &[], request.target.as_bytes()));
    let start = |name: &str| {
        let scratch = TempDir::new();
        let file = scratch.write("ingress.yaml", sample(&format!("ingress/{name}.yaml")));
        let (code, toml, report) = run(&["import", "ingress", file.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{report}");
        let toml: Vec<String> = toml
            .lines()
            .map(|line| match line.strip_prefix("servers") {
                Some(_) => format!("servers = [\"http://{}\"]", upstream.address),
                None => line.replace("\"0.0.0.0:80\"", "\"127.0.0.1:0\"").replace("127.0.0.1:9900", "127.0.0.1:0"),
            })
            .collect();
        Gateway::start(&toml.join("\n"))
    };
    let check = |name: &str, recorded: &[Recorded]| {
        let gateway = start(name);
        for (requests, status, admitted) in recorded {
            let responses = requests.send(gateway.http);
            let count = responses.iter().filter(|(status, _)| *status < 400).count();
            assert_eq!((responses[0].0, count), (*status, *admitted), "{name}: {}", requests.target);
        }
    };
    check(
        "basic",
        &[(get("/api/a", 40).at("api.example.com"), 200, 25), (get("/apis", 1).at("api.example.com"), 404, 0)],
    );
    // A burst of 20 in a second; the second rule has a burst of 200.
    check("three-limits", &[(get("/a", 40), 200, 20)]);
    check("addresses", &[(get("/a", 1), 403, 0)]);
    check("credentials", &[(get("/private/a", 1), 403, 0)]);
    // Not redirected, as the report says.
    check("https-in-front", &[(get("/a", 1).at("shop.example.com"), 200, 1)]);
    check("list", &[(get("/a", 2), 200, 2)]);
    check("old", &[(get("/a", 1).at("old.example.com"), 301, 1)]);
    check(
        "exact",
        &[
            (get("/exact", 1).at("a.example.com"), 200, 1),
            (get("/prefix", 1).at("a.example.com"), 200, 1),
            (get("/loosely/a", 1).at("a.example.com"), 200, 1),
            (get("/elsewhere", 1), 200, 1),
        ],
    );
    check("tls", &[(get("/", 1).at("secure.example.com"), 200, 1)]);
    let rewritten = get("/something/a/b?c", 1).at("rewrite.example.com").send(start("rewrite").http);
    assert_eq!(rewritten, [(200, "/a/b?c".to_owned())]);
}
