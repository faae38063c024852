//! The admin address: health, readiness, and metrics that Prometheus can read.

use std::collections::HashSet;
use std::io::{Read, Write};

use crate::support::client::{Client, HOST};
use crate::support::gateway::Gateway;
use crate::support::metrics_parser::Exposition;
use crate::support::process::Process;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, one_rule};

fn toml(upstream: &Upstream) -> String {
    format!(
        "{}[rules.r]\nkey = \"ip\"\nwindows = [\"1000/hour\", \"3/minute\"]\n\
         [rules.shadow]\nkey = \"global\"\non_limit = \"shadow\"\nwindows = [\"1/hour\"]\n\
         [[routes]]\nname = \"api\"\npath = \"/api/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"shadow\"]\n\
         [[routes]]\nname = \"a \\\"quoted\\\\name\\\"\"\npath = \"/q\"\nupstream = \"u\"\n",
        upstream.toml("u")
    )
}

#[test]
fn health_and_readiness_are_reported() {
    let gateway = Gateway::start(&toml(&Upstream::always(200)));
    let mut client = Client::connect(gateway.admin);
    for target in ["/healthz", "/readyz"] {
        assert!(client.get(target).expect(200).field("content-type").unwrap().starts_with("text/plain"));
        client.request("HEAD", target, &[], b"").expect(200);
    }
    client.get("/nowhere").expect(404).problem();
    client.post("/metrics", "").expect(405).problem();
    // The public address serves none of these paths.
    for target in ["/metrics", "/healthz", "/readyz"] {
        gateway.get(target).expect(404);
    }
}

#[test]
fn every_metric_has_its_documented_name_type_and_labels() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&toml(&upstream));
    for status in [200, 200, 200, 429, 429] {
        gateway.get("/api/a").expect(status);
    }
    gateway.get("/q").expect(200);
    gateway.get("/nowhere").expect(404);
    eventually("all requests are counted", || gateway.metrics().sum("transom_requests_total", &[]) == 7);
    let response = Client::connect(gateway.admin).get("/metrics").expect(200);
    assert_eq!(response.field("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let metrics = gateway.metrics();
    for (name, kind, labels) in [
        ("transom_requests_total", "counter", &["code", "route"][..]),
        ("transom_request_duration_seconds", "histogram", &["route"]),
        ("transom_decisions_total", "counter", &["outcome", "route", "rule"]),
        ("transom_refused_total", "counter", &["rule", "window"]),
        ("transom_decision_duration_seconds", "histogram", &[]),
        ("transom_upstream_requests_total", "counter", &["outcome", "server", "upstream"]),
        ("transom_upstream_duration_seconds", "histogram", &["upstream"]),
        ("transom_connections", "gauge", &["listener"]),
        ("transom_connections_refused_total", "counter", &["reason"]),
        ("transom_counters", "gauge", &["state"]),
        ("transom_counters_overflow_total", "counter", &[]),
        ("transom_config_reloads_total", "counter", &["outcome"]),
        ("transom_build_info", "gauge", &["version"]),
    ] {
        // Reloads need the binary; the module `reload` tests them.
        if name != "transom_config_reloads_total" {
            assert_eq!(metrics.kind(name), Some(kind), "{name}");
            assert_eq!(metrics.label_names(name), labels, "{name}");
        }
    }
    let sum = |name, labels: &[(&str, &str)]| metrics.sum(name, labels);
    assert_eq!(sum("transom_requests_total", &[("route", "api"), ("code", "200")]), 3);
    assert_eq!(sum("transom_requests_total", &[("route", "api"), ("code", "429")]), 2);
    assert_eq!(sum("transom_requests_total", &[("route", "a \"quoted\\name\""), ("code", "200")]), 1);
    assert_eq!(sum("transom_requests_total", &[("route", ""), ("code", "404")]), 1);
    assert_eq!(sum("transom_request_duration_seconds_count", &[]), 7);
    let decisions =
        |rule, outcome| sum("transom_decisions_total", &[("route", "api"), ("rule", rule), ("outcome", outcome)]);
    assert_eq!([decisions("r", "admitted"), decisions("r", "refused"), decisions("r", "shadowed")], [3, 2, 0]);
    assert_eq!(
        [decisions("shadow", "admitted"), decisions("shadow", "refused"), decisions("shadow", "shadowed")],
        [1, 0, 2]
    );
    assert_eq!(sum("transom_refused_total", &[("rule", "r"), ("window", "r-minute")]), 2);
    assert_eq!(sum("transom_refused_total", &[("rule", "r"), ("window", "r-hour")]), 0);
    assert_eq!(sum("transom_decision_duration_seconds_count", &[]), 6);
    let server = format!("http://{}", upstream.address);
    let answered = [("upstream", "u"), ("server", server.as_str()), ("outcome", "responded")];
    assert_eq!(sum("transom_upstream_requests_total", &answered), 4);
    assert_eq!(sum("transom_upstream_requests_total", &[]), 4);
    assert_eq!(sum("transom_upstream_duration_seconds_count", &[("upstream", "u")]), 4);
    // Two counters of the client, and one of the global rule.
    assert_eq!(sum("transom_counters", &[("state", "live")]), 3);
    assert_eq!(sum("transom_counters", &[("state", "free")]), 1_000_000 - 3);
    assert_eq!(sum("transom_counters_overflow_total", &[]), 0);
    assert_eq!(sum("transom_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1);
}

#[test]
fn connections_are_counted_while_they_are_open() {
    let gateway = Gateway::start(&toml(&Upstream::always(200)));
    let open = || gateway.metrics().sum("transom_connections", &[("listener", "127.0.0.1:0")]);
    let mut clients: Vec<_> = (0..10).map(|_| gateway.client()).collect();
    eventually("ten are open", || open() == 10);
    clients.truncate(3);
    eventually("three are open", || open() == 3);
    drop(clients);
    eventually("none is open", || open() == 0);
}

#[test]
fn client_input_never_becomes_a_label() {
    let upstream = Upstream::responding(|received| {
        let status = received.target.rsplit('/').next().and_then(|n| n.parse().ok()).unwrap_or(200);
        reply(status, &[], b"")
    });
    let gateway = Gateway::start(&toml(&upstream).replace("3/minute", "900/minute"));
    let mut client = gateway.client();
    let mut request = |n: usize| {
        let fields = [("X-User", &*format!("u{n}")), ("Host", &*format!("h{n}.test"))];
        client.get_with(&format!("/api/{n}x"), &fields).expect(200);
        client.request(&format!("METHOD{n}"), &format!("/none/{n}"), &[], b"").expect(404);
    };
    request(0);
    eventually("both requests are counted", || gateway.metrics().sum("transom_requests_total", &[]) == 2);
    let families: HashSet<String> = gateway.metrics().families().into_iter().map(str::to_owned).collect();
    let before = gateway.metrics().series();
    (1..200).for_each(&mut request);
    eventually("all requests are counted", || gateway.metrics().sum("transom_requests_total", &[]) == 400);
    let metrics = gateway.metrics();
    assert_eq!(metrics.series(), before);
    assert_eq!(metrics.families(), families.iter().map(String::as_str).collect());
}

#[test]
fn an_idle_scraper_does_not_block_others() {
    let gateway = Gateway::start(&toml(&Upstream::always(200)));
    let _silent: Vec<_> = (0..50)
        .map(|n| {
            let mut client = Client::connect(gateway.admin);
            client.send(&b"GET /metrics HTTP/1.1\r\nHost: a"[..n % 20]);
            client
        })
        .collect();
    Client::connect(gateway.admin).get("/metrics").expect(200);
}

/// Any web site can let its host name resolve to the admin address (DNS rebinding), so only configured hosts are served.
#[test]
fn the_admin_address_accepts_its_configured_hosts_only() {
    let own = "[admin]\nhosts = [\"transom.internal\", \"*.monitoring.svc\"]\n";
    let gateway = Gateway::start(&format!("{}{own}", toml(&Upstream::always(200))));
    let request = |host: &str, target: &str| Client::connect(gateway.admin).get_with(target, &[("Host", host)]);
    let port = gateway.admin.port();
    for host in ["127.0.0.1", "localhost", "LOCALHOST", "192.0.2.7", "transom.internal", "a.monitoring.svc"] {
        request(host, "/metrics").expect(200);
        request(&format!("{host}:{port}"), "/healthz").expect(200);
    }
    request(&format!("[::1]:{port}"), "/metrics").expect(200);
    for host in ["evil.example", "monitoring.svc", "127.0.0.1.evil.example", "xlocalhost", "2130706433", "a b"] {
        for target in ["/metrics", "/upstreams", "/healthz", "/v1/limit"] {
            request(host, target).expect(421).problem();
        }
    }
    let target = format!("http://evil.example:{port}/metrics");
    request("127.0.0.1", &target).expect(421);
    let query = br#"{"rule": "r", "key": "a"}"#;
    let fields = [("Host", "evil.example"), ("Origin", "http://evil.example")];
    Client::connect(gateway.admin).request("POST", "/v1/limit", &fields, query).expect(421);
}

#[test]
fn a_post_needs_the_configured_token() {
    let folder = TempDir::new();
    let file = folder.write("token", "first-0123456789\n");
    let toml = format!("[admin]\nhosts = [\"{HOST}\"]\ntoken_file = {file:?}\n{}", toml(&Upstream::always(200)));
    let mut gateway = Gateway::start(&toml);
    let limit = |gateway: &Gateway, authorization: &str| {
        let fields = [("Authorization", authorization)];
        let fields = if authorization.is_empty() { &[][..] } else { &fields[..] };
        Client::connect(gateway.admin).request("POST", "/v1/limit", fields, br#"{"rule": "r", "key": "192.0.2.7"}"#)
    };
    let wrong = ["", "first-0123456789", "Bearer", "Bearer ", "Bearer first-012345678", "Basic first-0123456789"];
    for authorization in wrong {
        let response = limit(&gateway, authorization).expect(401);
        response.problem();
        assert_eq!(response.field("www-authenticate"), Some("Bearer"), "{authorization:?}");
    }
    for path in ["/v1/check", "/v1/value", "/v1/reset", "/v1/explain", "/metrics", "/nowhere"] {
        Client::connect(gateway.admin).post(path, "{}").expect(401).problem();
    }
    Client::connect(gateway.admin).get("/metrics").expect(200);
    // The refused queries consumed nothing.
    assert_eq!(limit(&gateway, "Bearer first-0123456789").expect(200).json()["windows"][0]["count"], 1);
    assert_eq!(limit(&gateway, "bearer  first-0123456789").expect(200).json()["windows"][0]["count"], 2);
    folder.write("token", "second-0123456789");
    gateway.reload(&toml);
    limit(&gateway, "Bearer first-0123456789").expect(401);
    limit(&gateway, "Bearer second-0123456789").expect(200);
}

/// Who may scrape need not be able to use up and reset limits, or to see which keys are refused.
#[test]
fn a_metrics_address_serves_metrics_and_health_only() {
    let folder = TempDir::new();
    let file = folder.write("token", "0123456789abcdef");
    let listen = "http = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmetrics = [\"127.0.0.1:0\", \"[::1]:0\"]\n";
    let hosts = format!("[admin]\nhosts = [\"{HOST}\"]\n");
    for token in [String::new(), format!("token_file = {file:?}\n")] {
        let upstream = Upstream::always(200);
        let gateway = Gateway::start(&format!("[listen]\n{listen}{hosts}{token}{}", toml(&upstream)));
        gateway.get("/api/a").expect(200);
        assert_eq!(gateway.metrics_addresses().len(), 2);
        for address in gateway.metrics_addresses() {
            let request = |method: &str, target: &str, fields: &[(&str, &str)]| {
                Client::connect(*address).request(method, target, fields, b"{\"rule\": \"r\", \"key\": \"127.0.0.1\"}")
            };
            for target in ["/metrics", "/healthz", "/readyz"] {
                request("GET", target, &[]).expect(200);
                request("HEAD", target, &[]).expect(200);
                assert_eq!(request("POST", target, &[]).expect(405).field("allow"), Some("GET, HEAD"));
                request("GET", target, &[("Host", "evil.example")]).expect(421).problem();
            }
            let scraped = Exposition::parse(&request("GET", "/metrics", &[]).text());
            assert_eq!(scraped.families(), gateway.metrics().families());
            let all =
                ["/", "/upstreams", "/v1/top", "/v1/events", "/nowhere", "/metrics/", "//metrics", "/v1/../metrics"];
            let decisions = ["/v1/limit", "/v1/check", "/v1/value", "/v1/reset", "/v1/explain", "/%761/reset"];
            for target in all.iter().chain(&decisions) {
                for method in ["GET", "POST"] {
                    let fields = [("Authorization", "Bearer 0123456789abcdef")];
                    request(method, target, &fields).expect(404).problem();
                    request(method, target, &[]).expect(404);
                }
            }
        }
        // Nothing was reset or decided: the counters and the decisions of two rules are those of the client's request.
        let live = gateway.metrics().sum("transom_counters", &[("state", "live")]);
        assert_eq!((live, gateway.metrics().sum("transom_decisions_total", &[])), (3, 2));
    }
}

#[test]
fn admin_connections_are_limited() {
    let listen = "http = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\n";
    let hosts = format!("[admin]\nhosts = [\"{HOST}\"]\n");
    let gateway = Gateway::start(&format!("[listen]\n{listen}{hosts}{}", toml(&Upstream::always(200))));
    let connected = || {
        let mut client = Client::connect(gateway.admin);
        client.get("/healthz").expect(200);
        client
    };
    let mut clients: Vec<Client> = (0..256).map(|_| connected()).collect();
    Client::connect(gateway.admin).expect_closed();
    let metrics = Exposition::parse(&clients[0].get("/metrics").expect(200).text());
    assert_eq!(metrics.sum("transom_connections_refused_total", &[("reason", "max_admin_connections")]), 1);
    // Each address has its own limit.
    Client::connect(gateway.metrics_addresses()[0]).get("/healthz").expect(200);
    drop(clients.pop());
    eventually("another connection is accepted", || {
        let mut stream = Client::connect(gateway.admin).stream;
        let sent = stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n");
        let mut response = Vec::new();
        sent.and_then(|()| stream.read_to_end(&mut response)).is_ok_and(|_| response.starts_with(b"HTTP/1.0 200"))
    });
}

/// A table takes memory for the counters in use, also after a scrape that counts them.
#[test]
fn a_scrape_does_not_touch_unused_counter_pages() {
    let capacity = 4_000_000;
    let rule = "key = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"9/366d\"]";
    let process = Process::spawn(&format!("[counters]\ncapacity = {capacity}\n{}", one_rule(rule)));
    let mut client = process.client();
    for user in 0..100 {
        client.get_with("/a", &[("X-User", &user.to_string())]).expect(200);
    }
    let shared_bytes = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    };
    let before = shared_bytes();
    let metrics = process.metrics();
    assert_eq!(metrics.sum("transom_counters", &[("state", "live")]), 100);
    assert_eq!(metrics.sum("transom_counters", &[("state", "free")]), capacity - 100);
    let taken = shared_bytes() - before;
    assert!(taken < 32 * capacity / 64, "{taken} bytes for a table of {}", 32 * capacity);
}

/// Series of removed objects disappear once no request of the object is in flight.
#[test]
fn series_of_removed_routes_rules_and_upstreams_are_removed() {
    let upstream = Upstream::always(200);
    let named = |name: &str| {
        format!(
            "{}[rules.r-{name}]\nkey = \"ip\"\nwindows = [\"1/hour\"]\n\
             [[routes]]\nname = \"route-{name}\"\npath = \"/a\"\nupstream = \"u-{name}\"\nrules = [\"r-{name}\"]\n\
             [[routes]]\nname = \"kept\"\npath = \"/b\"\nupstream = \"u-{name}\"\n",
            upstream.toml(&format!("u-{name}"))
        )
    };
    let mut gateway = Gateway::start(&named("old"));
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(429);
    gateway.get("/b").expect(200);
    let text = |gateway: &Gateway| Client::connect(gateway.admin).get("/metrics").expect(200).text();
    for series in ["route=\"route-old\"", "rule=\"r-old\"", "upstream=\"u-old\""] {
        eventually("the series exists", || text(&gateway).contains(series));
    }
    gateway.reload(&named("new"));
    eventually("the old series are gone", || !text(&gateway).contains("-old\""));
    gateway.get("/b").expect(200);
    eventually("a series that stays keeps its count", || {
        gateway.metrics().sum("transom_requests_total", &[("route", "kept"), ("code", "200")]) == 2
    });
}
