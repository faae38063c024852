//! Export of spans to a receiver built with OpenTelemetry's protobuf definitions (tests/external/otlp_receiver.py).

use std::collections::HashMap;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::request;
use crate::support::external_scripts::ScriptServer;
use crate::support::gateway::{Gateway, START_S};
use crate::support::process::{BINARY, Process};
use crate::support::test_ca::{ServerFiles, TestCa};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, forward_all, forward_to, one_rule, within};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

/// The bound of the last export when a gateway stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections are kept for this long when a gateway stops.
const IDLE_DRAIN: Duration = Duration::from_secs(1);

struct Receiver {
    address: SocketAddr,
    file: PathBuf,
    _server: ScriptServer,
    _scratch: TempDir,
}

impl Receiver {
    fn start(arguments: &[String]) -> Receiver {
        let scratch = TempDir::new();
        let file = scratch.path().join("spans");
        let arguments = [&[file.display().to_string()], arguments].concat();
        let server = ScriptServer::start("otlp_receiver.py", &arguments);
        Receiver { address: server.address, file, _server: server, _scratch: scratch }
    }

    /// `[tracing]` with this receiver.
    fn toml(&self, settings: &str) -> String {
        format!("[tracing]\nendpoint = \"http://{}\"\n{settings}\n", self.address)
    }

    fn spans(&self) -> Vec<Span> {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        text.lines().map(|line| Span(serde_json::from_str(line).unwrap())).collect()
    }

    /// Waits for `count` spans, and checks that there are no more.
    fn wait_for(&self, count: usize) -> Vec<Span> {
        eventually("the spans arrive", || self.spans().len() >= count);
        let spans = self.spans();
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

#[derive(Debug)]
struct Span(Value);

impl Span {
    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }

    fn attribute(&self, name: &str) -> &Value {
        &self.0["attributes"][name]
    }

    fn is_server(&self) -> bool {
        self.0["kind"] == "SPAN_KIND_SERVER"
    }

    /// The `traceparent` of a request that this span sends.
    fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.text("trace_id"), self.text("span_id"))
    }
}

/// Addresses of a gateway that trusts the `traceparent` of its clients.
fn trusting() -> &'static str {
    "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = [\"127.0.0.0/8\"]\n"
}

#[test]
fn a_forwarded_request_is_a_span_with_a_span_for_its_attempt() {
    let (receiver, upstream) = (Receiver::start(&[]), Upstream::always(200));
    let tracing = receiver.toml("sample = 0\nservice_name = \"edge\"");
    let toml = format!(
        "{}{tracing}{}[rules.r]\nkey = \"ip\"\nwindows = [\"9/366d\"]\n\
         [[routes]]\nname = \"users\"\npath = \"/users/{{id}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        trusting(),
        upstream.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let get = |fields: &[(&str, &str)]| drop(gateway.get_with("/users/7?token=secret", fields).expect(200));
    get(&[("Traceparent", SAMPLED), ("Tracestate", "a=1"), ("User-Agent", "test"), ("X-Request-Id", "abc")]);
    get(&[("Traceparent", NOT_SAMPLED)]);
    get(&[]);
    gateway.stop();
    let spans = receiver.wait_for(2);
    let (server, client) = (&spans[0], &spans[1]);
    let ids = |span: &Span| (span.text("trace_id").to_owned(), span.text("parent_id").to_owned());
    assert_eq!(ids(server), (TRACE_ID.to_owned(), "b7ad6b7169203331".to_owned()));
    assert_eq!(ids(client), (TRACE_ID.to_owned(), server.text("span_id").to_owned()));
    let kinds = (server.text("kind"), client.text("kind"));
    assert_eq!(kinds, ("SPAN_KIND_SERVER", "SPAN_KIND_CLIENT"));
    assert_eq!((server.text("name"), client.text("name")), ("GET /users/{id}", "GET"));
    assert_eq!((server.text("status"), client.text("status")), ("STATUS_CODE_UNSET", "STATUS_CODE_UNSET"));
    assert_eq!((server.text("trace_state"), server.text("scope")), ("a=1", "transom"));
    assert_eq!(server.0["resource"]["service.name"], "edge");
    assert_eq!(
        server.0["attributes"],
        json!({
            "http.request.method": "GET", "url.scheme": "http", "url.path": "/users/7",
            "server.address": "gateway.test", "network.protocol.version": "1.1", "user_agent.original": "test",
            "transom.request_id": "abc", "client.address": "127.0.0.1", "http.route": "/users/{id}",
            "http.response.status_code": 200, "http.request.body.size": 0, "http.response.body.size": 5,
            "transom.route": "users", "transom.decision": "admitted", "transom.rule.r": "admitted",
        })
    );
    assert_eq!(
        client.0["attributes"],
        json!({
            "http.request.method": "GET", "server.address": "127.0.0.1", "server.port": upstream.address.port(),
            "http.response.status_code": 200, "transom.upstream": "u",
            "transom.server": format!("http://{}", upstream.address),
        })
    );
    assert!(!format!("{spans:?}").contains("secret"), "queries may contain secrets");
    // The attempt lies within the request, whose start is the time of the gateway.
    let times = |span: &Span| (span.0["start_ns"].as_u64().unwrap(), span.0["end_ns"].as_u64().unwrap());
    let ((start, end), (attempt_start, attempt_end)) = (times(server), times(client));
    assert!(start <= attempt_start && attempt_start <= attempt_end && attempt_end <= end, "{spans:?}");
    assert_eq!(end, START_S * 1_000_000_000);
    let received = upstream.received();
    let fields = |name: &str| received.iter().map(|request| request.values(name).concat()).collect::<Vec<_>>();
    assert_eq!(fields("traceparent"), [client.traceparent(), NOT_SAMPLED.to_owned(), String::new()]);
    assert_eq!(fields("tracestate"), ["a=1", "", ""]);
}

#[test]
fn without_a_trusted_proxy_the_share_decides() {
    let (receiver, upstream) = (Receiver::start(&[]), Upstream::always(200));
    let start = |sample| Gateway::start(&format!("{}{}", receiver.toml(sample), forward_all(&upstream)));
    // The flag of an untrusted client neither begins nor prevents a trace.
    let gateway = start("sample = 0");
    gateway.get_with("/a", &[("Traceparent", SAMPLED)]).expect(200);
    gateway.get("/a").expect(200);
    gateway.stop();
    let gateway = start("sample = 1");
    gateway.get_with("/b", &[("Traceparent", NOT_SAMPLED)]).expect(200);
    gateway.get_with("/c", &[("Tracestate", "other=1")]).expect(200);
    gateway.stop();
    let spans = receiver.wait_for(4);
    let server = |path: &str| spans.iter().find(|span| span.attribute("url.path") == path).unwrap();
    let (continued, begun) = (server("/b"), server("/c"));
    assert_eq!((continued.text("trace_id"), continued.text("parent_id")), (TRACE_ID, "b7ad6b7169203331"));
    assert!(begun.0["parent_id"].is_null() && begun.text("trace_id") != TRACE_ID, "{begun:?}");
    let attempt = |server: &Span| spans.iter().find(|span| span.0["parent_id"] == server.text("span_id")).unwrap();
    let received = upstream.received();
    let traceparents: Vec<_> = received.iter().map(|request| request.values("traceparent").concat()).collect();
    let expected = [SAMPLED.to_owned(), String::new(), attempt(continued).traceparent(), attempt(begun).traceparent()];
    assert_eq!(traceparents, expected);
    // Without a `traceparent`, `tracestate` belongs to no trace.
    assert_eq!(received[3].field("tracestate"), None);
}

#[test]
fn the_share_of_traced_requests_is_the_configured_one() {
    let receiver = Receiver::start(&[]);
    let gateway = Gateway::start(&format!(
        "{}{}",
        receiver.toml("sample = 0.25"),
        one_rule("key = \"ip\"\nwindows = [\"1/366d\"]")
    ));
    let mut client = gateway.client();
    (0..2000).for_each(|_| drop(client.get("/a")));
    gateway.stop();
    eventually("the spans arrive", || receiver.spans().len() >= 350);
    // 500 are expected; 150 are more than seven standard deviations.
    assert!((350..650).contains(&receiver.spans().len()), "{}", receiver.spans().len());
}

#[test]
fn a_refusal_names_window_and_key() {
    let receiver = Receiver::start(&[]);
    let toml = format!(
        "{}{}[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.seen]\nkey = \"ip\"\non_limit = \"shadow\"\nwindows = [\"1/366d\"]\n\
         [rules.key]\nkey = \"header:X-API-Key\"\non_missing_key = \"refuse\"\nwindows = [\"1/366d\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"seen\", \"key\"]\n",
        trusting(),
        receiver.toml("")
    );
    let gateway = Gateway::start(&toml);
    let get = |key: &str| gateway.get_with("/a", &[("X-API-Key", key), ("Traceparent", SAMPLED)]).status;
    assert_eq!([get("hunter2"), get("hunter2"), get("hunter3")], [200, 429, 200]);
    gateway.stop();
    let spans = receiver.wait_for(3);
    let decisions: Vec<_> = spans.iter().map(|span| span.attribute("transom.decision")).collect();
    assert_eq!(decisions, ["admitted", "refused", "shadowed"]);
    let refused = &spans[1];
    assert_eq!(refused.attribute("transom.rule.key"), "refused");
    assert_eq!(refused.attribute("transom.refused_by"), &json!(["key"]));
    assert_eq!(refused.text("status"), "STATUS_CODE_UNSET");
    assert_eq!(refused.attribute("http.response.status_code"), 429);
    let event = &refused.0["events"][0];
    assert_eq!((&event["name"], &event["attributes"]["transom.window"]), (&json!("refused"), &json!("key")));
    assert!(event["attributes"]["transom.key"].as_str().is_some_and(|key| key.len() >= 8), "{event}");
    assert_eq!(spans[2].attribute("transom.shadowed_by"), &json!(["seen"]));
    assert_eq!(spans[2].0["events"][0]["name"], "shadowed");
    assert!(!format!("{spans:?}").contains("hunter"), "keys are digests");
}

#[test]
fn every_attempt_is_a_span() {
    let receiver = Receiver::start(&[]);
    let (gone, upstream) = (Upstream::refusing_connections(), Upstream::always(200));
    let servers = forward_to(&[gone.address, upstream.address], "ejection = false\n");
    let gateway = Gateway::start(&format!("workers = 1\n{}{servers}", receiver.toml("sample = 1")));
    (0..20).for_each(|_| drop(gateway.get("/a").expect(200)));
    gateway.stop();
    eventually("the spans arrive", || receiver.spans().iter().filter(|span| span.is_server()).count() == 20);
    let spans = receiver.spans();
    let mut attempts: HashMap<&str, Vec<&Span>> = HashMap::new();
    for span in spans.iter().filter(|span| !span.is_server()) {
        attempts.entry(span.text("parent_id")).or_default().push(span);
    }
    let retried = attempts.values().find(|attempts| attempts.len() == 2).unwrap_or_else(|| panic!("{spans:#?}"));
    let (failed, repeated) = (retried[0], retried[1]);
    assert_eq!(failed.attribute("error.type"), "connect_failed");
    assert_eq!((failed.text("status"), repeated.text("status")), ("STATUS_CODE_ERROR", "STATUS_CODE_UNSET"));
    assert_eq!(failed.attribute("server.port"), gone.address.port());
    let resends = (failed.attribute("http.request.resend_count"), repeated.attribute("http.request.resend_count"));
    assert_eq!(resends, (&Value::Null, &json!(1)));
    let received: Vec<_> = upstream.received().iter().map(|request| request.values("traceparent").concat()).collect();
    assert!(received.contains(&repeated.traceparent()), "{received:?}");
}

#[test]
fn an_error_of_the_upstream_is_an_error_of_the_spans() {
    let (receiver, gone) = (Receiver::start(&[]), Upstream::refusing_connections());
    let gateway = Gateway::start(&format!("{}{}", receiver.toml("sample = 1"), forward_all(&gone)));
    gateway.get("/a").expect(502);
    gateway.get("/../a").expect(400);
    gateway.stop();
    let spans = receiver.wait_for(3);
    let (server, client, malformed) = (&spans[0], &spans[1], &spans[2]);
    assert_eq!((server.text("status"), client.text("status")), ("STATUS_CODE_ERROR", "STATUS_CODE_ERROR"));
    assert_eq!(server.attribute("error.type"), "502");
    assert!(server.attribute("transom.error").as_str().is_some_and(|error| !error.is_empty()));
    // A request without a route, which no rule has decided.
    assert_eq!((malformed.text("name"), malformed.text("status")), ("GET", "STATUS_CODE_UNSET"));
    assert_eq!(malformed.attribute("transom.decision"), &Value::Null);
}

#[test]
fn the_access_log_names_the_trace() {
    let (receiver, scratch) = (Receiver::start(&[]), TempDir::new());
    let file = scratch.path().join("access.log");
    let log = format!("[access_log]\nfile = {file:?}\n");
    let gateway = Gateway::start(&format!(
        "{}{log}{}",
        receiver.toml("sample = 1"),
        one_rule("key = \"ip\"\nwindows = [\"1/366d\"]")
    ));
    gateway.get("/a").expect(200);
    gateway.stop();
    let spans = receiver.wait_for(1);
    let line: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(line["trace_id"], spans[0].text("trace_id"));
}

#[test]
fn spans_are_exported_over_tls() {
    let files = ServerFiles::new();
    let receiver = Receiver::start(&files.tls_arguments());
    let endpoint = format!("[tracing]\nendpoint = \"https://{}\"\nsample = 1\n", receiver.address);
    let toml = format!("{endpoint}ca = {:?}\n{}", files.ca, one_rule("key = \"ip\"\nwindows = [\"1/366d\"]"));
    let gateway = Gateway::start(&toml);
    gateway.get("/a").expect(200);
    gateway.stop();
    receiver.wait_for(1);
    // Another authority.
    let scratch = TempDir::new();
    let ca = scratch.write("other.pem", TestCa::new().pem);
    let gateway =
        Gateway::start(&format!("{endpoint}ca = {ca:?}\n{}", one_rule("key = \"ip\"\nwindows = [\"1/366d\"]")));
    gateway.get("/a").expect(200);
    eventually("the export fails", || gateway.metrics().sum("transom_spans_total", &[("outcome", "failed")]) == 1);
    gateway.stop();
    receiver.wait_for(1);
}

#[test]
fn credentials_come_from_the_environment() {
    let receiver = Receiver::start(&[]);
    let mut command = Command::new(BINARY);
    command.env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer TOKEN");
    command.env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test");
    let toml = format!("{}{}", receiver.toml("sample = 1"), one_rule("key = \"ip\"\nwindows = [\"1/366d\"]"));
    let process = Process::spawn_command(command, &toml, TempDir::new());
    process.get("/a").expect(200);
    let span = &receiver.wait_for(1)[0];
    assert_eq!(span.text("authorization"), "Bearer TOKEN");
    assert_eq!(span.0["resource"]["deployment.environment.name"], "test");
}

#[test]
fn requests_do_not_notice_an_absent_receiver() {
    let gone = Upstream::refusing_connections();
    let toml = format!(
        "[tracing]\nendpoint = \"http://{}\"\nsample = 1\n{}",
        gone.address,
        one_rule("key = \"ip\"\nwindows = [\"9/366d\"]")
    );
    let process = Process::spawn(&toml);
    let failed = || process.metrics().sum("transom_spans_total", &[("outcome", "failed")]);
    process.get("/a").expect(200);
    eventually("the export fails", || failed() == 1);
    process.get("/a").expect(200);
    eventually("the export fails", || failed() == 2);
    let warnings = process.stderr().matches("spans cannot be exported").count();
    assert_eq!(warnings, 1, "{}", process.stderr());
    let port = gone.address.port().to_string();
    drop(gone);
    let receiver = Receiver::start(&["--port".to_owned(), port]);
    process.get("/a").expect(200);
    receiver.wait_for(1);
    process.wait_for_stderr("spans are exported again");
    assert_eq!(process.metrics().sum("transom_spans_total", &[("outcome", "exported")]), 1);
}

#[test]
fn spans_beyond_the_queue_are_dropped() {
    // Accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("[tracing]\nendpoint = \"http://{}\"\nsample = 1\n", silent.local_addr().unwrap());
    let gateway = Gateway::start(&format!("{endpoint}{}", one_rule("key = \"ip\"\nwindows = [\"1/366d\"]")));
    let dropped = || gateway.metrics().sum("transom_spans_total", &[("outcome", "dropped")]);
    let mut client = gateway.client();
    assert_eq!((client.get("/a").status, dropped()), (200, 0));
    eventually("spans are dropped", || {
        // All at once: on a busy machine, thousands of round trips take longer than the test waits.
        client.send(request("GET", "/a", &[], b"").repeat(500));
        (0..500).for_each(|_| drop(client.read_response().expect(429)));
        dropped() > 0
    });
    // The last spans are not waited for.
    within(IDLE_DRAIN + FLUSH_TIMEOUT, || gateway.stop());
}

#[test]
fn a_reload_changes_receiver_and_share() {
    let (first, second) = (Receiver::start(&[]), Receiver::start(&[]));
    let rule = one_rule("key = \"ip\"\nwindows = [\"100000/366d\"]");
    let mut gateway = Gateway::start(&format!("{}{rule}", first.toml("sample = 1")));
    gateway.get("/first").expect(200);
    gateway.reload_and_wait(&format!("{}{rule}", second.toml("sample = 0")));
    gateway.get("/untraced").expect(200);
    gateway.reload_and_wait(&format!("{}{rule}", second.toml("sample = 1")));
    gateway.get("/second").expect(200);
    gateway.reload_and_wait(&rule);
    gateway.get("/off").expect(200);
    gateway.stop();
    let has = |receiver: &Receiver, path: &str| receiver.spans().iter().any(|span| span.attribute("url.path") == path);
    eventually("the spans arrive", || has(&first, "/first") && has(&second, "/second"));
    for path in ["/untraced", "/off"] {
        assert!(!has(&first, path) && !has(&second, path), "{path}");
    }
    assert!(!has(&first, "/second") && !has(&second, "/first"));
}
