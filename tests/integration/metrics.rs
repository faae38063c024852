//! What the metrics say of connections, requests in flight, limits, reloads and the process. `admin` tests the names, `deploy`
//! the format by promtool.

use std::io::Read as _;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};

use flate2::read::GzDecoder;

use crate::support::client::{Client, request};
use crate::support::gateway::{Gateway, START_S};
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::metrics_parser::Exposition;
use crate::support::process::Process;
use crate::support::upstream::Upstream;
use crate::support::{eventually_eq, forward_all, one_rule};

/// An upstream that responds to each request on a signal of the test.
fn held_upstream() -> (Upstream, Sender<()>) {
    let (proceed, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            if released.lock().unwrap().recv().is_err() {
                return;
            }
            connection.reply(200, &[], b"at last");
        }
    });
    (upstream, proceed)
}

#[test]
fn connections_and_bytes_are_counted() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]"));
    let sum = |name: &str| gateway.metrics().sum(name, &[("listener", "127.0.0.1:0")]);
    let (mut sent, mut received) = (0, 0);
    for body in [&b""[..], &[b'x'; 50_000]] {
        let bytes = request("POST", "/a", &[("Connection", "close")], body);
        let mut client = gateway.client();
        client.send(&bytes);
        sent += bytes.len() as u64;
        received += client.read_to_end().len() as u64;
    }
    eventually_eq(|| sum("transom_connections_accepted_total"), 2);
    eventually_eq(|| sum("transom_received_bytes_total"), sent);
    eventually_eq(|| sum("transom_sent_bytes_total"), received);
}

#[test]
fn requests_in_flight_and_upstream_connections_are_counted() {
    let (upstream, proceed) = held_upstream();
    let toml = forward_all(&upstream).replace("[[routes]]", "max_connections = 1\n[[routes]]");
    let gateway = Gateway::start(&format!("workers = 1\n{toml}"));
    let sum = |name: &str, labels: &[(&str, &str)]| gateway.metrics().sum(name, labels);
    let state = || {
        let connections = |state| sum("transom_upstream_connections", &[("upstream", "u"), ("state", state)]);
        let waiting = sum("transom_upstream_waiting", &[("upstream", "u")]);
        (sum("transom_requests_active", &[]), connections("active"), connections("idle"), waiting)
    };
    let mut clients: Vec<Client> = (0..2).map(|_| gateway.client()).collect();
    for (client, expected) in clients.iter_mut().zip([(1, 1, 0, 0), (2, 1, 0, 1)]) {
        client.send(request("GET", "/a", &[], b""));
        eventually_eq(state, expected);
    }
    proceed.send(()).unwrap();
    eventually_eq(state, (1, 1, 0, 0));
    proceed.send(()).unwrap();
    eventually_eq(state, (0, 0, 1, 0));
    clients.into_iter().for_each(|mut client| drop(client.read_response().expect(200)));
    // A request whose client leaves takes its connection with it.
    let mut leaving = gateway.client();
    leaving.send(request("GET", "/a", &[], b""));
    eventually_eq(state, (1, 1, 0, 0));
    drop(leaving);
    eventually_eq(state, (0, 0, 0, 0));
}

#[test]
fn connections_over_http2_are_counted() {
    let upstream = Http2Upstream::always_ok(Options::default());
    let gateway = Gateway::start(&format!(
        "workers = 1\n{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        upstream.toml("u")
    ));
    (0..3).for_each(|_| drop(gateway.get("/a").expect(200)));
    let connections = |state| gateway.metrics().sum("transom_upstream_connections", &[("state", state)]);
    eventually_eq(|| (connections("active"), connections("idle")), (0, 1));
}

#[test]
fn delayed_requests_are_counted_while_they_wait() {
    let (upstream, _held) = held_upstream();
    let rules = "[rules.windows]\nkey = \"ip\"\nwindows = [\"1/hour\"]\non_limit = \"delay\"\nmax_delay = \"2h\"\n\
         [rules.slots]\nkey = \"ip\"\nconcurrent = 1\non_limit = \"delay\"\nmax_delay = \"2h\"\n\
         [rules.other]\nkey = \"ip\"\nwindows = [\"1000/hour\"]\n";
    let routes = "[[routes]]\npath = \"/w\"\nupstream = \"u\"\nrules = [\"windows\", \"other\"]\n\
         [[routes]]\npath = \"/s\"\nupstream = \"u\"\nrules = [\"slots\"]\n";
    let gateway = Gateway::start(&format!("{}{rules}{routes}", upstream.toml("u")));
    let waiting = |rule| gateway.metrics().sum("transom_delayed_requests", &[("rule", rule)]);
    let both = || (waiting("windows"), waiting("slots"), waiting("other"));
    let mut clients = Vec::new();
    for (target, expected) in [("/w", (0, 0, 0)), ("/w", (1, 0, 0)), ("/s", (1, 0, 0)), ("/s", (1, 1, 0))] {
        let mut client = gateway.client();
        client.send(request("GET", target, &[], b""));
        clients.push(client);
        eventually_eq(|| gateway.metrics().sum("transom_requests_active", &[]), clients.len() as u64);
        eventually_eq(both, expected);
    }
    // Requests that wait no longer, whether they pass or their clients leave.
    gateway.advance_s(3600);
    eventually_eq(both, (0, 1, 0));
    drop(clients);
    eventually_eq(both, (0, 0, 0));
}

#[test]
fn exempt_requests_are_counted() {
    let rule = "key = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"5/hour\"]\n\
         exemptions = [\"127.0.0.2/32\", \"key:monitor\"]";
    let gateway = Gateway::start(&one_rule(rule));
    let outcomes = || {
        let metrics = gateway.metrics();
        let outcome =
            |route, outcome| metrics.sum("transom_decisions_total", &[("route", route), ("outcome", outcome)]);
        (outcome("all", "admitted"), outcome("all", "exempt"), outcome("api", "exempt"))
    };
    gateway.get_with("/a", &[("X-User", "monitor")]).expect(200);
    eventually_eq(outcomes, (0, 1, 0));
    gateway.get_with("/a", &[("X-User", "bob")]).expect(200);
    // Without the key the rule does not apply.
    gateway.get("/a").expect(200);
    eventually_eq(outcomes, (1, 1, 0));
    let query = br#"{"rule": "r", "key": "monitor"}"#;
    Client::connect(gateway.admin).request("POST", "/v1/limit", &[], query).expect(200);
    eventually_eq(outcomes, (1, 1, 1));
}

#[test]
fn configured_limits_are_shown() {
    let rule = |limit: u32| {
        one_rule(&format!(
            "key = \"ip\"\nwindows = [\"{limit}/hour\", \"7/500ms\"]\nconcurrent = 3\n\
             [rules.r.plans.gold]\nwindows = [\"9000/month\"]"
        ))
    };
    let mut gateway = Gateway::start(&rule(100));
    let limit = |gateway: &Gateway, window: &str, plan: &str| {
        gateway.metrics().sum("transom_rule_limit", &[("rule", "r"), ("window", window), ("plan", plan)])
    };
    assert_eq!(
        [limit(&gateway, "r-hour", ""), limit(&gateway, "r-500ms", ""), limit(&gateway, "r-concurrent", "")],
        [100, 7, 3]
    );
    assert_eq!(limit(&gateway, "r", "gold"), 9000);
    let text = Client::connect(gateway.admin).get("/metrics").expect(200).text();
    assert!(text.contains("transom_rule_window_seconds{rule=\"r\",window=\"r-500ms\",plan=\"\"} 0.5\n"), "{text}");
    gateway.reload(&rule(200));
    eventually_eq(|| limit(&gateway, "r-hour", ""), 200);
}

#[test]
fn the_process_and_its_reloads_are_shown() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"5/hour\"]");
    let process = Process::spawn(&rule);
    let state = || {
        let metrics = process.metrics();
        let applied = metrics.sum("transom_config_last_reload_success_timestamp_seconds", &[]);
        assert!(applied > START_S, "{applied}");
        (metrics.sum("transom_config_last_reload_successful", &[]), metrics.sum("transom_draining", &[]), applied)
    };
    let (successful, draining, started) = state();
    assert_eq!((successful, draining), (1, 0));
    process.write_config("nonsense");
    process.signal("HUP");
    eventually_eq(state, (0, 0, started));
    process.write_config(&rule);
    process.signal("HUP");
    eventually_eq(|| state().0, 1);
    let metrics = process.metrics();
    for (name, kind) in [
        ("process_cpu_seconds_total", "counter"),
        ("process_open_fds", "gauge"),
        ("process_max_fds", "gauge"),
        ("process_virtual_memory_bytes", "gauge"),
        ("process_virtual_memory_max_bytes", "gauge"),
        ("process_resident_memory_bytes", "gauge"),
        ("process_start_time_seconds", "gauge"),
        ("process_threads", "gauge"),
    ] {
        assert_eq!((metrics.kind(name), metrics.label_names(name)), (Some(kind), Vec::new()), "{name}");
    }
    let resident_kb = metrics.sum("process_resident_memory_bytes", &[]) / 1024;
    let status_kb = process.memory_kb("VmRSS");
    assert!((status_kb / 2..status_kb * 2).contains(&resident_kb), "{resident_kb} kB, {status_kb} kB");
}

/// `deploy` reads both formats with the parsers of the official client library.
#[test]
fn the_format_and_the_coding_follow_what_the_client_accepts() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"5/hour\"]"));
    let open = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = "text/plain; version=0.0.4; charset=utf-8";
    let gzip = ("Accept-Encoding", "gzip");
    for (fields, media_type, is_compressed) in [
        (&[][..], text, false),
        (&[("Accept", "application/openmetrics-text")], open, false),
        (&[("Accept", "application/openmetrics-text;q=0.5,text/plain;version=0.0.4;q=0.6"), gzip], text, true),
        (
            &[("Accept", "text/plain;q=0.5"), ("Accept", "application/openmetrics-text; version=1.0.0"), gzip],
            open,
            true,
        ),
        (&[("Accept-Encoding", "gzip;q=0, identity")], text, false),
    ] {
        for method in ["GET", "HEAD"] {
            let response = Client::connect(gateway.admin).request(method, "/metrics", fields, b"").expect(200);
            assert_eq!(response.field("content-type"), Some(media_type), "{fields:?}");
            assert_eq!(response.field("content-encoding"), is_compressed.then_some("gzip"), "{fields:?}");
            assert_eq!(response.field("vary"), Some("Accept, Accept-Encoding"), "{fields:?}");
            if method == "HEAD" {
                continue;
            }
            let mut page = String::new();
            match is_compressed {
                true => GzDecoder::new(&*response.body).read_to_string(&mut page).unwrap(),
                false => (&*response.body).read_to_string(&mut page).unwrap(),
            };
            assert_eq!(page.ends_with("# EOF\n"), media_type == open, "{page}");
            assert!(
                page.contains("\ntransom_requests_total{route=") || page.contains("\ntransom_build_info{"),
                "{page}"
            );
            if media_type == text {
                drop(Exposition::parse(&page));
            }
        }
    }
}

#[test]
fn durations_of_requests_have_the_configured_buckets() {
    let rule = one_rule("key = \"ip\"\nwindows = [\"5/hour\"]");
    let bounds = |gateway: &Gateway, name: &str| {
        let text = Client::connect(gateway.admin).get("/metrics").expect(200).text();
        let lines = text.lines().filter(|line| line.starts_with(&format!("{name}_bucket")));
        let bound = |line: &str| line.split("le=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
        let mut bounds: Vec<String> = lines.map(bound).collect();
        bounds.dedup();
        bounds
    };
    let gateway = Gateway::start(&rule);
    gateway.get("/a").expect(200);
    eventually_eq(|| gateway.metrics().sum("transom_request_duration_seconds_count", &[("route", "all")]), 1);
    let fits_slos = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 +Inf";
    // The requests with and without a route.
    let expected = format!("{fits_slos} {fits_slos}");
    assert_eq!(bounds(&gateway, "transom_request_duration_seconds").join(" "), expected);
    let fine = bounds(&gateway, "transom_decision_duration_seconds");
    assert_eq!((fine.len(), &*fine[0], &*fine[4]), (21, "1e-06", "2.5e-05"));

    let mut gateway = Gateway::start(&format!("[metrics]\nrequest_buckets = [\"300ms\", \"1h\"]\n{rule}"));
    (0..3).for_each(|_| drop(gateway.get("/a").expect(200)));
    let within =
        |le: &str| gateway.metrics().sum("transom_request_duration_seconds_bucket", &[("route", "all"), ("le", le)]);
    eventually_eq(|| (within("3600.0"), within("+Inf")), (3, 3));
    assert_eq!(bounds(&gateway, "transom_request_duration_seconds")[..3], ["0.3", "3600.0", "+Inf"]);
    let reason = gateway.refused_reload(&format!("[metrics]\nrequest_buckets = \"1s\"\n{rule}"));
    assert!(reason.contains("`metrics.request_buckets` needs a restart"), "{reason}");
}

#[test]
fn responses_of_the_admin_address_are_counted() {
    let listen = "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", metrics = \"127.0.0.1:0\" }\n";
    let gateway = Gateway::start(&format!("{listen}{}", one_rule("key = \"ip\"\nwindows = [\"5/hour\"]")));
    let (admin, metrics) = (gateway.admin, gateway.metrics_addresses()[0]);
    let query: &[u8] = br#"{"rule": "r", "key": "192.0.2.7"}"#;
    let host = [("Host", "127.0.0.1")];
    let exchanges = [
        (admin, "GET", "/healthz", "/healthz", 200),
        (metrics, "GET", "/readyz", "/readyz", 200),
        (admin, "HEAD", "/upstreams", "/upstreams", 200),
        (admin, "GET", "/v1/top", "/v1/top", 200),
        (admin, "GET", "/v1/top?by=nothing", "/v1/top", 400),
        (admin, "POST", "/v1/limit", "/v1/limit", 200),
        (admin, "POST", "/v1/check", "/v1/check", 200),
        (admin, "POST", "/v1/value", "/v1/value", 200),
        (admin, "POST", "/v1/explain", "/v1/explain", 400),
        (admin, "POST", "/v1/reset", "/v1/reset", 200),
        (metrics, "POST", "/v1/reset", "/v1/reset", 404),
        (admin, "GET", "/v1/limit", "/v1/limit", 405),
        (admin, "POST", "/metrics", "/metrics", 405),
        (admin, "GET", "/secret/1?token=2", "other", 404),
        (metrics, "GET", "/secret/3", "other", 404),
    ];
    let count = |endpoint: &str, code: u16| {
        let labels = [("endpoint", endpoint), ("code", &*code.to_string())];
        Exposition::parse(&Client::connect(admin).get_with("/metrics", &host).expect(200).text())
            .sum("transom_admin_requests_total", &labels)
    };
    for (address, method, target, endpoint, code) in exchanges {
        let before = count(endpoint, code);
        Client::connect(address).request(method, target, &host, query).expect(code);
        assert_eq!(count(endpoint, code) - before, 1, "{method} {target}");
    }
    Client::connect(admin).get_with("/healthz", &[("Host", "evil.example")]).expect(421);
    assert_eq!(count("/healthz", 421), 1);
    // Of hyper's parser.
    let long = |length: usize| "a".repeat(length);
    for (head, code) in [
        ("nonsense\r\n\r\n".to_owned(), 400),
        (format!("GET /{} HTTP/1.1\r\n\r\n", long(70_000)), 414),
        (format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(200)), 431),
    ] {
        let before = count("other", code);
        let mut client = Client::connect(admin);
        client.send_if_open(head);
        assert_eq!(client.read_response().status, code);
        eventually_eq(|| count("other", code) - before, 1);
    }
    let text = Client::connect(admin).get_with("/metrics", &host).expect(200).text();
    assert!(!text.contains("secret") && !text.contains("evil"), "{text}");
}
