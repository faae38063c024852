//! Turns a traced request into spans: one of the server, with the decision, and one of the client for each attempt.
//!
//! Names follow the semantic conventions of OpenTelemetry for HTTP; those of this gateway begin with `transom.`.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use http::uri::Authority;
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::{TracedRequest, UpstreamAttempt};
use crate::access_log::entry::{FullLimit, LogEntry, LoggedRequest, RuleDecision};

/// Methods that have a name in the semantic conventions. Others could be of any number.
const KNOWN_METHODS: [&str; 10] =
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"];
const ATTRIBUTES_MAX: usize = 24;

/// The library in whose name spans are exported: this gateway.
pub struct Scope(InstrumentationScope);

impl Scope {
    pub fn new() -> Scope {
        Scope(InstrumentationScope::builder("transom").with_version(env!("CARGO_PKG_VERSION")).build())
    }
}

/// Appends the spans of a request: that of the request, then those of its attempts.
pub fn push_spans(request: TracedRequest, scope: &Scope, spans: &mut Vec<SpanData>) {
    let TracedRequest { span, started, entry, http_route, scheme, attempts } = request;
    let method = entry.request.as_ref().map_or("", |request| request.method.as_str());
    let state = span.tracestate.as_deref().and_then(|list| list.parse().ok()).unwrap_or(TraceState::NONE);
    let trace = Trace { id: span.trace_id, state, scope };
    let ends = |from: SystemTime, took: Duration| (from, from + took);
    let name = match &http_route {
        Some(route) => format!("{} {route}", span_method(method)),
        None => span_method(method).to_owned(),
    };
    let mut server = trace.span(span.span_id, SpanKind::Server, name, ends(started, entry.duration));
    if let Some(parent) = span.parent_id {
        server.parent_span_id = SpanId::from(parent);
        server.parent_span_is_remote = true;
    }
    server.attributes = server_attributes(&entry, http_route, scheme);
    server.events.events = limit_events(&entry, server.end_time);
    if entry.status >= 500 {
        server.status = Status::error(entry.error.clone().unwrap_or_default());
    }
    spans.push(server);
    let upstream = entry.upstream.as_ref().map_or("", |used| used.upstream.as_str());
    for (resends, attempt) in attempts.into_iter().enumerate() {
        let times = ends(started + attempt.began, attempt.took);
        let mut client = trace.span(attempt.span_id, SpanKind::Client, span_method(method).to_owned(), times);
        client.parent_span_id = SpanId::from(span.span_id);
        if attempt.status.is_none_or(|status| status >= 400) {
            client.status = Status::error("");
        }
        client.attributes = client_attributes(attempt, method, upstream, resends);
        spans.push(client);
    }
}

struct Trace<'a> {
    id: u128,
    state: TraceState,
    scope: &'a Scope,
}

impl Trace<'_> {
    fn span(&self, id: u64, kind: SpanKind, name: String, (start, end): (SystemTime, SystemTime)) -> SpanData {
        let (trace_id, span_id) = (TraceId::from(self.id), SpanId::from(id));
        SpanData {
            span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, self.state.clone()),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: kind,
            name: Cow::Owned(name),
            start_time: start,
            end_time: end,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.0.clone(),
        }
    }
}

/// The method in the name of a span.
fn span_method(method: &str) -> &str {
    if KNOWN_METHODS.contains(&method) { method } else { "HTTP" }
}

/// A list of attributes, without those that have no value.
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn new() -> Attributes {
        Attributes(Vec::with_capacity(ATTRIBUTES_MAX))
    }

    fn add(&mut self, key: &'static str, value: impl Into<Value>) {
        self.0.push(KeyValue::new(key, value));
    }

    fn add_some(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.add(key, value);
        }
    }

    fn add_method(&mut self, method: &str) {
        if KNOWN_METHODS.contains(&method) {
            self.add("http.request.method", method.to_owned());
        } else {
            self.add("http.request.method", "_OTHER");
            self.add("http.request.method_original", method.to_owned());
        }
    }
}

fn server_attributes(entry: &LogEntry, http_route: Option<String>, scheme: &'static str) -> Vec<KeyValue> {
    let mut attributes = Attributes::new();
    if let Some(request) = &entry.request {
        add_request(&mut attributes, request, scheme);
    }
    attributes.add("client.address", entry.client.to_string());
    attributes.add_some("http.route", http_route);
    attributes.add("http.response.status_code", i64::from(entry.status));
    attributes.add("http.request.body.size", entry.bytes_received as i64);
    attributes.add("http.response.body.size", entry.bytes_sent as i64);
    let grpc_status = entry.grpc_status.as_deref().and_then(|status| status.parse::<i64>().ok());
    attributes.add_some("rpc.grpc.status_code", grpc_status);
    if entry.status >= 500 {
        attributes.add("error.type", entry.status.to_string());
    }
    attributes.add_some("transom.route", entry.route.clone());
    attributes.add_some("transom.client", entry.known_client.as_ref().map(|client| client.name.clone()));
    attributes.add_some("transom.plan", entry.known_client.as_ref().map(|client| client.plan.clone()));
    attributes.add_some("transom.decision", request_decision(entry).map(RuleDecision::name));
    for (rule, decision) in &entry.rules {
        attributes.0.push(KeyValue::new(format!("transom.rule.{rule}"), decision.name()));
    }
    let windows = |limits: &[FullLimit]| {
        let windows: Vec<StringValue> = limits.iter().map(|limit| limit.window.clone().into()).collect();
        (!windows.is_empty()).then_some(Value::Array(Array::String(windows)))
    };
    attributes.add_some("transom.refused_by", windows(&entry.refused_by));
    attributes.add_some("transom.shadowed_by", windows(&entry.shadowed_by));
    if !entry.delay.is_zero() {
        attributes.add("transom.delay_ms", entry.delay.as_micros() as f64 / 1e3);
    }
    attributes.add_some("transom.error", entry.error.clone());
    attributes.0
}

fn add_request(attributes: &mut Attributes, request: &LoggedRequest, scheme: &'static str) {
    attributes.add_method(&request.method);
    attributes.add("url.scheme", scheme);
    attributes.add("url.path", request.path.clone());
    let host = request.host.as_deref().and_then(|host| host.parse::<Authority>().ok());
    if let Some(host) = host {
        attributes.add("server.address", host.host().trim_matches(['[', ']']).to_owned());
        attributes.add_some("server.port", host.port_u16().map(i64::from));
    }
    let version = request.protocol.trim_start_matches("HTTP/");
    attributes.add("network.protocol.version", if version == "2.0" { "2" } else { version });
    attributes.add_some("user_agent.original", request.user_agent.clone());
    request.request_id.iter().for_each(|id| attributes.add("transom.request_id", id.clone()));
}

fn client_attributes(attempt: UpstreamAttempt, method: &str, upstream: &str, resends: usize) -> Vec<KeyValue> {
    let mut attributes = Attributes::new();
    attributes.add_method(method);
    attributes.add("server.address", attempt.address);
    attributes.add_some("server.port", attempt.port.map(i64::from));
    attributes.add_some("http.response.status_code", attempt.status.map(i64::from));
    if resends > 0 {
        attributes.add("http.request.resend_count", resends as i64);
    }
    let failed_status = attempt.status.filter(|status| *status >= 400).map(|status| status.to_string());
    attributes.add_some("error.type", attempt.error.map(str::to_owned).or(failed_status));
    attributes.add("transom.upstream", upstream.to_owned());
    attributes.add("transom.server", attempt.server);
    attributes.0
}

/// The decision of all rules together; `None` if no rule has decided.
fn request_decision(entry: &LogEntry) -> Option<RuleDecision> {
    use RuleDecision::{Admitted, Delayed, Exempt, Refused, Shadowed};
    [Refused, Shadowed, Delayed, Admitted, Exempt]
        .into_iter()
        .find(|decision| entry.rules.iter().any(|(_, of_rule)| of_rule == decision))
}

/// An event for each limit without room.
fn limit_events(entry: &LogEntry, time: SystemTime) -> Vec<Event> {
    let event = |name: &'static str, limit: &FullLimit| {
        let mut attributes = Attributes::new();
        attributes.add("transom.rule", limit.rule.clone());
        attributes.add("transom.window", limit.window.clone());
        attributes.add_some("transom.key", limit.key.clone());
        attributes.add_some("transom.plan", limit.plan.clone());
        Event::new(name, time, attributes.0, 0)
    };
    let refused = entry.refused_by.iter().map(|limit| event(RuleDecision::Refused.name(), limit));
    let shadowed = entry.shadowed_by.iter().map(|limit| event(RuleDecision::Shadowed.name(), limit));
    refused.chain(shadowed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_http::trace_context;

    fn request(method: &str, host: &str, protocol: &'static str) -> LoggedRequest {
        LoggedRequest {
            request_id: Some("id".to_owned()),
            trace_id: None,
            method: method.to_owned(),
            host: Some(host.to_owned()),
            path: "/a".to_owned(),
            protocol,
            user_agent: None,
            referrer: None,
        }
    }

    /// The spans of a request on no route that gets no response.
    fn spans_of(request: LoggedRequest, rules: &[RuleDecision]) -> Vec<SpanData> {
        let mut entry = LogEntry::new(0, "192.0.2.7".parse().unwrap());
        entry.request = Some(request);
        entry.status = 503;
        entry.rules = rules.iter().enumerate().map(|(n, decision)| (format!("r{n}"), *decision)).collect();
        let span = trace_context::SpanContext { trace_id: 1, span_id: 2, parent_id: Some(3), tracestate: None };
        let started = SystemTime::UNIX_EPOCH;
        let request = TracedRequest { span, started, entry, http_route: None, scheme: "http", attempts: Vec::new() };
        let mut spans = Vec::new();
        push_spans(request, &Scope::new(), &mut spans);
        spans
    }

    fn attribute(span: &SpanData, key: &str) -> Option<String> {
        let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == key);
        found.map(|attribute| attribute.value.to_string())
    }

    #[test]
    fn a_method_that_a_client_invents_names_no_span() {
        let span = &spans_of(request("PURGE", "[2001:db8::1]:8443", "HTTP/2.0"), &[])[0];
        assert_eq!(span.name, "HTTP");
        for (key, value) in [
            ("http.request.method", Some("_OTHER")),
            ("http.request.method_original", Some("PURGE")),
            ("network.protocol.version", Some("2")),
            ("server.address", Some("2001:db8::1")),
            ("server.port", Some("8443")),
            ("error.type", Some("503")),
            ("http.route", None),
            ("transom.decision", None),
        ] {
            assert_eq!(attribute(span, key).as_deref(), value, "{key}");
        }
        assert_eq!((span.parent_span_id, span.parent_span_is_remote), (SpanId::from(3), true));
    }

    #[test]
    fn the_decision_of_a_request_is_the_strictest_of_its_rules() {
        use RuleDecision::{Admitted, Delayed, Exempt, Refused, Shadowed};
        for (rules, expected) in [
            (&[Admitted][..], "admitted"),
            (&[Exempt], "exempt"),
            (&[Exempt, Admitted], "admitted"),
            (&[Admitted, Delayed], "delayed"),
            (&[Shadowed, Delayed], "shadowed"),
            (&[Shadowed, Refused, Admitted], "refused"),
        ] {
            let span = &spans_of(request("GET", "a", "HTTP/1.1"), rules)[0];
            assert_eq!(attribute(span, "transom.decision").as_deref(), Some(expected));
            assert_eq!(attribute(span, "transom.rule.r0").as_deref(), Some(rules[0].name()));
            assert_eq!(attribute(span, "network.protocol.version").as_deref(), Some("1.1"));
        }
    }
}
