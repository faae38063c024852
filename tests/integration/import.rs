//! `transom import`: the same requests through the product and through the gateway with the imported file, which never admits more.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::support::TempDir;
use crate::support::client::Client;
use crate::support::external_servers::{ExternalServer, on_free_port, program};
use crate::support::gateway::Gateway;
use crate::support::process::run;
use crate::support::upstream::{Upstream, reply};

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
const NGINX: [(&str, &[Requests]); 10] = [
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
            get("/v1/a?x=1", 30).at("api.example.com"),
            get("/old/a", 1).at("api.example.com"),
            get("/none", 1).at("api.example.com"),
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
    // A mistake in the file has its line.
    let broken = scratch.write("broken.conf", "http {\n server {\n");
    let (code, _, message) = run(&["import", "nginx", broken.to_str().unwrap()]);
    assert!(code == Some(2) && message.contains("broken.conf:2: this block is not closed"), "{message}");
    assert_eq!(run(&["import", "apache", "httpd.conf"]).0, Some(2));
    assert_eq!(run(&["import", "nginx", &path("none.conf")]).0, Some(2));
}
