//! The access log: one line for each request, successful or not; request ids.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::client::{Client, request};
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::process::{BINARY, Process};
use crate::support::redis::free_port;
use crate::support::test_ca::TestCa;
use crate::support::tls::listen;
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, eventually_eq, forward_all, one_rule};

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// Waits for `count` lines, and checks that there are no more.
pub fn wait_for_lines(file: &Path, count: usize) -> Vec<Value> {
    eventually("the lines are logged", || fs::read_to_string(file).unwrap_or_default().lines().count() >= count);
    let lines = lines(file);
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines
}

#[test]
fn every_request_is_one_line() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "{}[access_log]\nfile = \"{}\"\n",
        one_rule("key = \"ip\"\nwindows = [\"2/366d\"]").replace("/{*rest}", "/api/{*rest}"),
        file.display()
    );
    let process = Process::spawn(&toml);
    let mut client = process.client();
    let fields = [
        ("User-Agent", "a \"quoted\\agent\"\u{1F600}"),
        ("Authorization", "Bearer secret-token"),
        ("Referer", "https://a.test/b?c=secret"),
    ];
    let echo = client.request("PUT", "/api/a%20b?token=secret-query", &fields, b"body").expect(200);
    client.request("HEAD", "/api/b", &[], b"").expect(200);
    client.get("/api/c").expect(429);
    client.get("/nowhere").expect(404);
    client.get("/a/../../b").expect(400);
    let lines = wait_for_lines(&file, 5);
    let column = |name: &str| lines.iter().map(|line| line[name].clone()).collect::<Vec<_>>();
    assert_eq!(column("status"), [200, 200, 429, 404, 400]);
    assert_eq!(column("method"), ["PUT", "HEAD", "GET", "GET", "GET"]);
    assert_eq!(column("path"), ["/api/a%20b", "/api/b", "/api/c", "/nowhere", "/a/../../b"]);
    assert_eq!(column("route"), [Value::from("all"), "all".into(), "all".into(), Value::Null, Value::Null]);
    assert_eq!(lines[0]["upstream"], "u");
    assert_eq!((&lines[0]["bytes_received"], &lines[0]["bytes_sent"]), (&4.into(), &echo.body.len().into()));
    assert_eq!(lines[1]["bytes_sent"], 0);
    assert_eq!(lines[0]["user_agent"], "a \"quoted\\agent\"\u{1F600}");
    assert_eq!(lines[0]["referrer"], "https://a.test/b");
    assert_eq!((&lines[0]["rules"], &lines[2]["rules"]), (&json!({ "r": "admitted" }), &json!({ "r": "refused" })));
    assert_eq!(lines[2]["refused_by"], json!([{ "rule": "r", "window": "r", "key": "127.0.0.1" }]));
    assert_eq!(lines[0].get("refused_by"), None);
    assert!(lines[4]["error"].as_str().unwrap().contains("above the root"));
    for line in &lines {
        assert_eq!((&line["client"], &line["host"]), (&"127.0.0.1".into(), &"gateway.test".into()));
        assert!(line["duration_ms"].as_f64().is_some_and(|ms| (0.0..30_000.0).contains(&ms)), "{line}");
        assert!(line["request_id"].as_str().is_some_and(|id| id.len() == 16), "{line}");
        let time = line["time"].as_str().unwrap();
        assert!(time.len() == 24 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        // Queries and fields may contain secrets.
        assert!(!line.to_string().contains("secret"), "{line}");
    }
}

#[test]
fn exempt_rules_are_logged_and_skipping_ones_are_not() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let gateway = Gateway::start(&format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.per-user]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/366d\"]\n\
         exemptions = [\"key:monitor\"]\n\
         [rules.dry]\nkey = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"9/366d\"]\non_limit = \"shadow\"\n\
         [rules.all]\nkey = \"global\"\nwindows = [\"4/366d\"]\nexemptions = [\"127.0.0.2/32\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"per-user\", \"dry\", \"all\"]\n\
         [access_log]\nfile = {file:?}\n"
    ));
    for (user, status) in
        [(Some("monitor"), 200), (Some("monitor"), 200), (None, 200), (Some("bob"), 200), (Some("monitor"), 429)]
    {
        let user = user.map(|user| ("X-User", user));
        gateway.get_with("/a", user.as_slice()).expect(status);
    }
    let exempt = |decision: &str| json!({ "per-user": "exempt", "dry": "admitted", "all": decision });
    let rules = [
        exempt("admitted"),
        exempt("admitted"),
        // A shadow rule without its key would have refused the request.
        json!({ "dry": "shadowed", "all": "admitted" }),
        json!({ "per-user": "admitted", "dry": "admitted", "all": "admitted" }),
        exempt("refused"),
    ];
    let lines = wait_for_lines(&file, 5);
    assert_eq!(lines.iter().map(|line| line["rules"].clone()).collect::<Vec<_>>(), rules);
}

/// Sends each of these requests and checks that its response has this status, is counted with this error, and has one line in
/// the log.
fn assert_counted_and_logged(settings: &str, cases: &[(Vec<u8>, u16, &str)]) {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "{}{settings}[access_log]\nfile = \"{}\"\n",
        one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]"),
        file.display()
    );
    let process = Process::spawn(&toml);
    let mut statuses = Vec::new();
    for (bytes, status, error) in cases {
        let before = process.metrics();
        let start = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
        let mut client = process.client();
        client.send_if_open(bytes);
        let mut response = client.read_response();
        if response.status == 200 {
            statuses.push(200);
            response = client.read_response();
        }
        assert_eq!(response.status, *status, "{start:?}");
        statuses.push(*status);
        let code = status.to_string();
        let since =
            |name: &str, labels: &[(&str, &str)]| process.metrics().sum(name, labels) - before.sum(name, labels);
        eventually(&format!("{start:?} is counted"), || since("transom_requests_total", &[("code", &code)]) == 1);
        assert_eq!(since("transom_request_errors_total", &[("error", error)]), 1, "{start:?}");
    }
    let lines = wait_for_lines(&file, statuses.len());
    assert_eq!(lines.iter().map(|line| &line["status"]).collect::<Vec<_>>(), statuses);
}

#[test]
fn every_response_of_the_gateway_is_counted_and_logged() {
    let get = |fields: &str| format!("GET / HTTP/1.1\r\n{fields}\r\n").into_bytes();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let cases = [
        (b"nonsense\r\n\r\n".to_vec(), 400, "malformed"),
        (get(""), 400, "host"),
        (get("Host: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n"), 400, "framing"),
        // The HTTP/2 preface after an HTTP/1.1 request.
        ([request("GET", "/a", &[], b""), preface.to_vec()].concat(), 400, "malformed"),
        (format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(70_000)).into_bytes(), 414, "target_too_long"),
        (get(&"X: y\r\n".repeat(200)), 431, "head_too_large"),
        (get(&format!("Host: a\r\nX: {}\r\n", "a".repeat(200_000))), 431, "head_too_large"),
        (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), 405, "method"),
    ];
    assert_counted_and_logged("", &cases);
    let late = (b"GET / HTTP/1.1\r\nHost: a\r\nX-".to_vec(), 408, "head_timeout");
    assert_counted_and_logged("[timeouts]\nrequest_head = \"500ms\"\n", &[late]);
}

/// As far as it was read, and without what may be secret.
#[test]
fn the_first_line_of_a_head_that_cannot_be_parsed_is_logged() {
    let logging = LoggingGateway::start(&one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]"));
    let long = format!("POST /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(70_000));
    let cases = [
        ("PUT /a?secret=1 HTTP/1.0\r\nno field\r\n\r\n", 400, "PUT", "/a", "HTTP/1.0"),
        ("GET http://u:secret@a/b\u{1} HTTP/1.1\r\n\r\n", 400, "GET", "/b\u{1}", "HTTP/1.1"),
        ("CONNECT u:secret@a:443 HTTP/1.1\r\nno field\r\n\r\n", 400, "CONNECT", "", "HTTP/1.1"),
        (&long, 414, "POST", &format!("/{}", "x".repeat(2047)), ""),
        ("\u{16}\u{3}\u{1} /a", 400, "", "", ""),
    ];
    for (bytes, status, ..) in cases {
        let mut client = logging.gateway.client();
        client.send_if_open(bytes);
        client.send_if_open("\r\n\r\n").read_response().expect(status);
    }
    for (line, (_, status, method, path, protocol)) in logging.lines(cases.len()).iter().zip(cases) {
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        assert_eq!(line["status"], status);
        assert_eq!((text("method"), text("path")), (method.to_owned(), path.to_owned()));
        assert!(protocol.is_empty() || text("protocol") == protocol, "{line}");
        assert!(!line.to_string().contains("secret"), "{line}");
    }
}

/// User names and passwords that stand before the host.
#[test]
fn user_information_is_not_logged() {
    let logging = LoggingGateway::start(&one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]"));
    // Longer than what is logged of a text.
    let long = format!("u:secret{}", "x".repeat(3000));
    let (host, referrer) = (format!("Host: {long}@a\r\n"), format!("Host: a\r\nReferer: https://{long}@a/b\r\n"));
    let cases = [
        ("CONNECT u:secret@a:443 HTTP/1.1", "Host: a\r\n", 405),
        ("GET http://u:secret@a/b HTTP/1.0", "", 400),
        ("GET /b HTTP/1.1", &host, 400),
        ("GET /b HTTP/1.1", &referrer, 200),
    ];
    for (line, fields, status) in cases {
        logging.gateway.client().send(format!("{line}\r\n{fields}\r\n")).read_response().expect(status);
    }
    let lines = logging.lines(cases.len());
    for (line, (_, _, status)) in lines.iter().zip(cases) {
        assert_eq!((&line["status"], line["host"].as_str()), (&status.into(), Some("a")), "{line}");
        assert!(!line.to_string().contains("secret"), "{line}");
    }
    assert_eq!(lines[3]["referrer"], "https://a/b");
}

#[test]
fn a_connection_refused_with_a_response_is_counted_and_logged() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmax_connections_per_client = 1\n{}[access_log]\nfile = \"{}\"\n",
        one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]"),
        file.display()
    );
    let process = Process::spawn(&toml);
    let mut first = process.client();
    first.get("/a").expect(200);
    process.client().read_response().expect(503);
    let count = |name: &str, labels: &[(&str, &str)]| process.metrics().sum(name, labels);
    eventually_eq(|| count("transom_request_errors_total", &[("error", "too_many_connections")]), 1);
    eventually_eq(|| count("transom_requests_total", &[("code", "503")]), 1);
    assert_eq!(wait_for_lines(&file, 2)[1]["status"], 503);
}

#[test]
fn a_response_to_head_is_not_logged_as_cut_off() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "{}[access_log]\nfile = \"{}\"\n",
        one_rule("key = \"ip\"\nwindows = [\"1/366d\"]").replace("/{*rest}", "/api/{*rest}"),
        file.display()
    );
    let process = Process::spawn(&toml);
    let mut client = process.client();
    for (target, status) in [("/api/a", 200), ("/api/a", 429), ("/nowhere", 404)] {
        let response = client.request("HEAD", target, &[], b"").expect(status);
        assert!(response.field("content-length").is_some_and(|length| length != "0"), "{response:?}");
    }
    let lines = wait_for_lines(&file, 3);
    assert_eq!(lines.iter().map(|line| &line["bytes_sent"]).collect::<Vec<_>>(), [0, 0, 0]);
    assert!(lines[..2].iter().all(|line| line.get("error").is_none()), "{lines:#?}");
    assert_eq!(lines[2]["error"], "no route matches this request");
}

#[test]
fn concurrent_requests_are_logged_as_whole_lines() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "workers = 4\n{}[access_log]\nfile = \"{}\"\n",
        one_rule("key = \"ip\"\nwindows = [\"100/366d\"]"),
        file.display()
    );
    let mut process = Process::spawn(&toml);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let mut client = process.client();
            scope.spawn(move || (0..250).for_each(|n| drop(client.get(&format!("/{thread}/{n}")))));
        }
    });
    // All queued lines are written before the process ends.
    process.signal("TERM");
    assert!(process.wait().success());
    let lines = lines(&file);
    assert_eq!(lines.len(), 2000);
    assert_eq!(lines.iter().filter(|line| line["status"] == 200).count(), 100);
    let paths: std::collections::HashSet<String> = lines.iter().map(|line| line["path"].to_string()).collect();
    assert_eq!(paths.len(), 2000);
}

#[test]
fn a_signal_reopens_a_moved_log_file() {
    let scratch = TempDir::new();
    let (file, moved) = (scratch.path().join("access.log"), scratch.path().join("access.log.1"));
    let upstream = Upstream::refusing_connections();
    let toml = format!("{}[access_log]\nfile = \"{}\"\n", forward_all(&upstream), file.display());
    let process = Process::spawn(&toml);
    process.get("/before").expect(502);
    wait_for_lines(&file, 1);
    fs::rename(&file, &moved).unwrap();
    process.get("/meanwhile").expect(502);
    wait_for_lines(&moved, 2);
    process.signal("HUP");
    process.wait_for_reloads("applied", 1);
    eventually("a new file exists", || file.exists());
    process.get("/after").expect(502);
    assert_eq!(wait_for_lines(&file, 1)[0]["path"], "/after");
    wait_for_lines(&moved, 2);
}

#[test]
fn a_reload_turns_the_log_on_and_off() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let off = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    let on = format!("{off}[access_log]\nfile = \"{}\"\n", file.display());
    let process = Process::spawn(&off);
    process.get("/before").expect(200);
    for (n, toml) in [(1, &on), (2, &off)] {
        process.write_config(toml);
        process.wait_for_reloads("applied", n);
        if n == 1 {
            eventually("requests are logged", || {
                process.get("/during").expect(200);
                !lines(&file).is_empty()
            });
        }
    }
    // Workers apply a reload one after the other; after that, no request is logged.
    let mut before = usize::MAX;
    eventually("no request is logged", || {
        let known = std::mem::replace(&mut before, lines(&file).len());
        (0..20).for_each(|_| drop(process.get("/after")));
        known == before && lines(&file).len() == before
    });
    assert!(lines(&file).iter().all(|line| line["path"] != "/before"));
}

#[test]
fn the_log_may_be_standard_output_or_off() {
    let toml = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    for toml in [format!("{toml}[access_log]\nfile = \"stdout\"\n"), format!("access_log = \"stdout\"\n{toml}")] {
        let mut process = Process::spawn(&toml);
        process.get("/a").expect(200);
        process.signal("TERM");
        process.wait();
        // Nothing else is written there.
        eventually("the line is on standard output", || process.stdout_lines().len() == 1);
        let line: Value = serde_json::from_str(&process.stdout_lines()[0]).unwrap();
        assert_eq!(line["path"], "/a");
    }

    let mut process = Process::spawn(&toml);
    process.get("/a").expect(200);
    process.signal("TERM");
    assert!(process.wait().success());
    assert!(process.stdout_lines().is_empty(), "{:?}", process.stdout_lines());
}

#[test]
fn a_client_that_disconnects_is_logged() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() {
            connection.wait_for_close();
        }
    });
    let toml = format!("{}[access_log]\nfile = \"{}\"\n", forward_all(&upstream), file.display());
    let process = Process::spawn(&toml);
    let mut client = process.client();
    client.send(request("GET", "/a", &[], b""));
    eventually("the upstream has the request", || upstream.received().len() == 1);
    drop(client);
    assert_eq!(wait_for_lines(&file, 1)[0]["status"], 499);
}

/// A gateway with this configuration and an access log.
struct LoggingGateway {
    gateway: Gateway,
    scratch: TempDir,
}

impl LoggingGateway {
    fn start(toml: &str) -> LoggingGateway {
        let scratch = TempDir::new();
        let log = scratch.path().join("access.log");
        let gateway = Gateway::start(&format!("{toml}[access_log]\nfile = \"{}\"\n", log.display()));
        LoggingGateway { gateway, scratch }
    }

    fn lines(&self, count: usize) -> Vec<Value> {
        wait_for_lines(&self.scratch.path().join("access.log"), count)
    }
}

#[test]
fn each_rule_of_a_request_has_its_decision() {
    let toml = r#"
        [upstreams.u]
        builtin = "echo"
        [rules.wide]
        key     = "header:x-api-key"
        windows = ["100/366d", "4/365d"]
        on_missing_key = "skip"
        [rules.narrow]
        key     = ["ip", "header:x-user"]
        windows = ["1/366d"]
        on_missing_key = "skip"
        [rules.watched]
        key     = "ip"
        windows = ["2/366d"]
        on_limit = "shadow"
        [[routes]]
        path     = "/{*rest}"
        upstream = "u"
        rules    = ["wide", "narrow", "watched"]
    "#;
    let logging = LoggingGateway::start(toml);
    let mut client = logging.gateway.client();
    for (fields, status) in [
        (&[("X-User", "alice")][..], 200),
        (&[("X-User", "alice"), ("X-Api-Key", "secret-key")], 429),
        (&[("X-Api-Key", "secret-key")], 200),
        (&[("X-Api-Key", "secret-key")], 200),
    ] {
        client.get_with("/a", fields).expect(status);
    }
    let lines = logging.lines(4);
    assert_eq!(lines[0]["rules"], json!({ "narrow": "admitted", "watched": "admitted" }));
    assert_eq!(lines[1]["rules"], json!({ "wide": "admitted", "narrow": "refused", "watched": "admitted" }));
    assert_eq!(lines[1]["refused_by"], json!([{ "rule": "narrow", "window": "narrow", "key": "127.0.0.1 alice" }]));
    assert_eq!(lines[2]["rules"], json!({ "wide": "admitted", "watched": "admitted" }));
    assert_eq!(lines[3]["rules"], json!({ "wide": "admitted", "watched": "shadowed" }));
    assert_eq!(lines[3]["shadowed_by"], json!([{ "rule": "watched", "window": "watched", "key": "127.0.0.1" }]));
    // Secrets are shown as digests.
    (0..2).for_each(|_| drop(client.get_with("/a", &[("X-Api-Key", "secret-key")])));
    client.get_with("/a", &[("X-Api-Key", "secret-key")]).expect(429);
    let full = &logging.lines(7)[6]["refused_by"][0];
    assert_eq!((&full["rule"], &full["window"]), (&"wide".into(), &"wide-365d".into()));
    let key = full["key"].as_str().unwrap();
    assert!(key.starts_with("hmac-") && key.len() == 13, "{key}");
}

#[test]
fn the_upstream_and_its_time_are_logged() {
    let dead = Upstream::refusing_connections();
    let upstream = Upstream::with_script(|connection| {
        while let Some(request) = connection.read_request() {
            assert_eq!(request.body, b"1234567");
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\ngrpc-status: 5\r\n\r\nok");
        }
    });
    let url = format!("http://{}", upstream.address);
    let toml = format!(
        "[upstreams.u]\nservers = [\"{}\", \"{}\"]\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        format_args!("http://{}", dead.address),
        url
    );
    let logging = LoggingGateway::start(&toml);
    let mut client = logging.gateway.client();
    // The balancer chooses at random: with so many requests, some meet the dead server first, and some do not.
    const REQUESTS: usize = 16;
    for _ in 0..REQUESTS {
        client.request("POST", "/a", &[], b"1234567").expect(200);
    }
    for line in logging.lines(REQUESTS) {
        assert_eq!((&line["upstream"], &line["server"]), (&"u".into(), &url.as_str().into()), "{line}");
        assert!(line["upstream_ms"].as_f64() <= line["duration_ms"].as_f64(), "{line}");
        assert_eq!((&line["bytes_received"], &line["bytes_sent"]), (&7.into(), &2.into()));
        assert_eq!(line["grpc_status"], "5");
        assert_eq!(line.get("delay_ms"), None);
    }
    let attempts: Vec<Value> = logging.lines(REQUESTS).iter().map(|line| line["upstream_attempts"].clone()).collect();
    assert!(attempts.contains(&2.into()) && attempts.iter().all(|attempts| attempts.is_null() || *attempts == 2));
}

#[test]
fn a_delay_is_logged_apart_from_the_upstream() {
    let rule = "key = \"ip\"\nwindows = [\"1/minute\"]\non_limit = \"delay\"\nmax_delay = \"1m\"";
    let logging = LoggingGateway::start(&one_rule(rule));
    logging.gateway.get("/a").expect(200);
    let mut client = logging.gateway.client();
    client.send(request("GET", "/b", &[], b""));
    let delayed = || logging.gateway.metrics().sum("transom_decisions_total", &[("outcome", "delayed")]);
    eventually_eq(delayed, 1);
    logging.gateway.advance(std::time::Duration::from_secs(60));
    client.read_response().expect(200);
    let lines = logging.lines(2);
    assert_eq!((lines[0].get("delay_ms"), &lines[0]["rules"]["r"]), (None, &"admitted".into()));
    assert_eq!(lines[1]["rules"]["r"], "delayed");
    let microseconds = |name: &str| (lines[1][name].as_f64().unwrap() * 1e3).round() as u64;
    let [delay, upstream, duration] = ["delay_ms", "upstream_ms", "duration_ms"].map(microseconds);
    assert!(delay > 0 && delay + upstream <= duration, "{}", lines[1]);
}

#[test]
fn a_request_has_one_id_in_the_log_and_on_both_sides() {
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n";
    let rule = one_rule("key = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/366d\"]");
    for (trusted, is_taken) in [("", false), ("trusted_proxies = [\"127.0.0.1\"]\n", true)] {
        let logging = LoggingGateway::start(&format!("{listen}{trusted}{rule}"));
        let mut client = logging.gateway.client();
        let sent = [
            ("X-Request-Id", "from-client"),
            ("X-User", "a"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ];
        let admitted = client.get_with("/a", &sent).expect(200);
        let id = admitted.field("x-request-id").unwrap().to_owned();
        assert_eq!(id == "from-client", is_taken, "{id}");
        let received: Value = serde_json::from_slice(&admitted.body).unwrap();
        assert_eq!(received["fields"]["x-request-id"], id.as_str());
        assert_eq!(received["fields"]["traceparent"], sent[2].1);
        let refused = client.get_with("/a", &sent).expect(429);
        let other = client.get_with("/a", &sent[..1]).expect(200);
        let missing = client.get_with("/../a", &[]).expect(400);
        let lines = logging.lines(4);
        for (line, response) in lines.iter().zip([admitted, refused, other, missing]) {
            assert_eq!(line["request_id"], response.field("x-request-id").unwrap());
        }
        assert_eq!(lines[0]["trace_id"], "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(lines[2].get("trace_id"), None);
        assert_ne!(lines[2]["request_id"] == lines[0]["request_id"], !is_taken);
    }
}

#[test]
fn the_combined_format_is_that_of_nginx() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let rule = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    let gateway =
        Gateway::start(&format!("{rule}[access_log]\nfile = \"{}\"\nformat = \"combined\"\n", file.display()));
    let mut client = gateway.client();
    client.get_with("/a?q=secret", &[("User-Agent", "a\"b"), ("Referer", "http://c/?secret")]).expect(200);
    eventually("a line is logged", || fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n')));
    let line = fs::read_to_string(&file).unwrap();
    assert!(line.starts_with("127.0.0.1 - - ["), "{line}");
    assert!(line.contains(" +0000] \"GET /a HTTP/1.1\" 200 "), "{line}");
    assert!(line.ends_with(" \"http://c/\" \"a\\x22b\"\n"), "{line}");
}

#[test]
fn messages_for_the_operator_can_be_json() {
    let mut command = std::process::Command::new(crate::support::process::BINARY);
    command.env("TRANSOM_LOG_FORMAT", "json");
    let toml = one_rule("key = \"ip\"\nwindows = [\"1000/366d\"]");
    let mut process = Process::spawn_command(command, &toml, TempDir::new());
    process.signal("TERM");
    assert!(process.wait().success());
    let messages = process.stderr();
    let line = messages.lines().find(|line| line.contains("draining")).unwrap();
    let message: Value = serde_json::from_str(line).unwrap();
    assert_eq!((&message["level"], &message["message"]), (&"INFO".into(), &"draining".into()));
}

#[test]
fn a_level_of_debugging_adds_a_message_for_each_request() {
    let rule = "key = [\"ip\", \"header:x-api-key\"]\non_missing_key = \"skip\"\nwindows = [\"1/366d\"]";
    for (variables, logs) in [
        (&[("TRANSOM_LOG", "debug")][..], true),
        (&[("RUST_LOG", "debug")], true),
        (&[("RUST_LOG", "debug"), ("TRANSOM_LOG", "info")], false),
        (&[("RUST_LOG", "transom=debug,hyper=warn")], false),
    ] {
        let mut command = Command::new(BINARY);
        command.env_remove("RUST_LOG").envs(variables.iter().copied()).env("TRANSOM_LOG_FORMAT", "json");
        let mut process = Process::spawn_command(command, &one_rule(rule), TempDir::new());
        for status in [200, 429] {
            process.client().get_with("/a?q=secret", &[("X-Api-Key", "secret-key")]).expect(status);
        }
        process.client().get("/b").expect(200);
        process.client().send("PUT /c?q=secret HTTP/1.1\r\nno field\r\n\r\n").read_response().expect(400);
        process.signal("TERM");
        assert!(process.wait().success());
        let log = process.stderr();
        assert!(!log.contains("secret"), "{log}");
        let messages = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let (requests, others): (Vec<Value>, Vec<Value>) =
            messages.partition(|message| message["message"] == "request");
        let malformed = others.iter().find(|message| message["message"] == "request without a valid head");
        let line = malformed.map(|message| (message["method"].as_str(), message["path"].as_str()));
        assert_eq!(line, logs.then_some((Some("\"PUT\""), Some("\"/c\""))), "{variables:?}: {log}");
        assert_eq!(requests.len(), if logs { 3 } else { 0 }, "{variables:?}: {log}");
        let [admitted, refused, without_key] = requests.as_slice() else { continue };
        let text = |message: &Value, field: &str| message[field].as_str().unwrap().to_owned();
        assert!(text(admitted, "keys").starts_with("[\"r=127.0.0.1"), "{admitted}");
        assert_eq!((text(admitted, "route"), text(admitted, "path")), ("all".to_owned(), "\"/a\"".to_owned()));
        let rules = [admitted, refused, without_key].map(|message| text(message, "rules"));
        assert_eq!(rules, ["[\"r=admitted\"]", "[\"r=refused\"]", "[]"]);
        assert_eq!((&admitted["status"], &refused["status"]), (&json!(200), &json!(429)));
    }
}

/// What the gateway answers without an upstream, on its routes and besides them, over every protocol.
#[test]
fn responses_without_an_upstream_are_counted_and_logged() {
    let (scratch, authority) = (TempDir::new(), TestCa::new());
    let log = scratch.path().join("access.log");
    let listen = listen(&scratch, &authority.issue(&["a.test"]), "");
    let closed = free_port();
    let routes = format!(
        "[access_log]\nfile = {log:?}\n[rules.keyed]\nkey = \"header:x-key\"\non_missing_key = \"refuse\"\nwindows = [\"1/366d\"]\n\
         [upstreams.gone]\nservers = [\"http://127.0.0.1:{closed}\"]\n\
         [[routes]]\nname = \"moved\"\npath = \"/moved\"\nredirect = {{ status = 308, to = \"https://a.test/\" }}\n\
         [[routes]]\nname = \"direct\"\npath = \"/direct\"\nrespond = {{ status = 204 }}\n\
         [[routes]]\nname = \"keyed\"\npath = \"/keyed\"\nrespond = {{ status = 200 }}\nrules = [\"keyed\"]\n\
         [[routes]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n\
         [[routes]]\nname = \"large\"\npath = \"/large\"\nupstream = \"gone\"\nmax_body = 10\n"
    );
    let process = Process::spawn_command(Command::new(BINARY), &format!("{listen}{routes}"), scratch);
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")];
    let cases = [
        ("GET", "/moved", &[][..], 308, "moved", ""),
        ("GET", "/direct", &[], 204, "direct", ""),
        ("GET", "/keyed", &[("x-key", "a")], 200, "keyed", ""),
        ("GET", "/keyed", &[("x-key", "a")], 429, "keyed", ""),
        ("GET", "/keyed", &[], 400, "keyed", "key_missing"),
        ("GET", "/gone", &[], 502, "gone", "connect"),
        ("POST", "/large", &[], 413, "large", "body_too_large"),
        ("GET", "/nowhere", &[], 404, "", "no_route"),
        ("GET", "/%2e%2e/..", &[], 400, "", "path"),
        ("OPTIONS", "*", &[], 200, "", ""),
        ("TRACE", "/direct", &[], 405, "", "method"),
        ("GET", "/direct", &[("expect", "something")], 417, "", "expectation"),
        ("GET", "/gone", &upgrade, 502, "gone", "connect"),
    ];
    let mut expected = Vec::new();
    for (method, target, fields, status, route, error) in cases {
        let body: &[u8] = if method == "POST" { b"more than ten bytes" } else { b"" };
        // The preceding case used up the limit.
        let is_limited = route == "keyed" && error.is_empty();
        for protocol in ["HTTP/1.1", "HTTP/2.0"] {
            let is_http2 = protocol == "HTTP/2.0";
            if is_http2 && (target == "*" || is_limited || !fields.is_empty()) {
                continue;
            }
            let before = process.metrics();
            let response = match is_http2 {
                true => Http2Client::connect(process.http).request_path(method, target, fields, body),
                false => process.client().request(method, target, fields, body),
            };
            assert_eq!(response.status, status, "{protocol} {method} {target}");
            let since =
                |name: &str, labels: &[(&str, &str)]| process.metrics().sum(name, labels) - before.sum(name, labels);
            let code = status.to_string();
            eventually_eq(|| since("transom_requests_total", &[("route", route), ("code", &code)]), 1);
            assert_eq!(since("transom_requests_total", &[]), 1, "{protocol} {method} {target}");
            assert_eq!(since("transom_request_errors_total", &[]), u64::from(!error.is_empty()), "{target}");
            assert_eq!(since("transom_request_errors_total", &[("error", error)]), u64::from(!error.is_empty()));
            let logged_route = if route.is_empty() { Value::Null } else { route.into() };
            expected.push((status, logged_route, target));
        }
    }
    // HTTP without TLS on an address with TLS.
    let mut cleartext = Client::connect(process.https.unwrap());
    cleartext.get("/direct").expect(400);
    eventually_eq(|| process.metrics().sum("transom_request_errors_total", &[("error", "cleartext")]), 1);
    eventually_eq(|| process.metrics().sum("transom_requests_total", &[]), expected.len() as u64 + 1);
    expected.push((400, Value::Null, "cleartext"));
    let lines = wait_for_lines(&log, expected.len());
    for (line, (status, route, target)) in lines.iter().zip(&expected) {
        assert_eq!((&line["status"], &line["route"]), (&(*status).into(), route), "{target}: {line}");
    }
}
