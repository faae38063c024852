//! What is written down of a request: metrics always, a line in the access log where there is one.
//!
//! A record is closed by being dropped, so that a client that goes away in the middle is recorded
//! like everything else.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use http::request::Parts;
use serde_json::{Map, Value, json};

use super::worker_state::{WorkerConfig, WorkerState};
use crate::clock::Timestamp;
use crate::http::error::RequestError;
use crate::http::responses::{self, CLIENT_GONE};
use crate::metrics::events::RouteMetrics;
use crate::upstream::response_body::Broken;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;

/// Of a host and of a path, in the access log.
const LOGGED_MAX_BYTES: usize = 2048;

pub struct RequestRecord {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    route: Option<usize>,
    status: u16,
    started: Timestamp,
    bytes: u64,
    /// What only the access log wants to know; `None` where there is none.
    log_entry: Option<Box<Map<String, Value>>>,
}

impl RequestRecord {
    pub fn new(
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: IpAddr,
        parts: &Parts,
        started: Timestamp,
    ) -> RequestRecord {
        let line = view.access_log.as_ref().map(|_| Box::new(head_fields(peer, parts, started)));
        let (worker, view) = (Rc::clone(worker), Rc::clone(view));
        RequestRecord { worker, config: view, route: None, status: CLIENT_GONE, started, bytes: 0, log_entry: line }
    }

    pub fn set_route(&mut self, lane: usize) {
        self.route = Some(lane);
    }

    /// Tells the meters what the rules decided, on the request's own route.
    pub fn record_decision(&mut self, slate: usize, context: &DecisionContext, judgement: &Decision) {
        let meter = self.route_metrics();
        match judgement {
            Decision::Admitted | Decision::Delayed { .. } => {
                for (position, _) in context
                    .inputs
                    .keyed_requests
                    .iter()
                    .enumerate()
                    .filter(|(_, keyed_request)| keyed_request.is_some())
                {
                    match judgement {
                        _ if context.result.shadowed.contains(&position) => meter.shadowed(position),
                        Decision::Delayed { waiter: Some(wait), .. } if wait.rule == position => {
                            meter.delayed(position)
                        }
                        _ => meter.admitted(position),
                    }
                }
            }
            Decision::Refused => record_refusal(&self.config, self.route, slate, context),
        }
        if self.log_entry.is_some() {
            let rules = &self.config.compiled.route_rules[slate].charge_plan.rules;
            let name = |position: &usize| json!(self.config.compiled.rule_set.rules[rules[*position]].rule.name);
            let full = context
                .result
                .charges
                .iter()
                .zip(&context.result.layers)
                .filter(|(charge, _)| charge.is_full && matches!(judgement, Decision::Refused));
            let refused: Vec<Value> = full.map(|(_, line)| name(&line.rule)).collect();
            let shadowed: Vec<Value> = context.result.shadowed.iter().map(name).collect();
            for (name, rules) in [("refused_by", refused), ("shadowed_by", shadowed)] {
                if !rules.is_empty() {
                    self.set_log_field(name, Value::Array(rules));
                }
            }
        }
    }

    pub fn set_upstream(&mut self, name: &str) {
        if self.log_entry.is_some() {
            self.set_log_field("upstream", json!(name));
        }
    }

    /// What went wrong: to the log, if it is more than a client's mistake.
    pub fn record_error(&mut self, fault: &RequestError) {
        self.worker.metrics.request_error(fault.kind());
        if fault.is_worth_a_warning() {
            self.warn(&fault.for_operator());
        }
        if self.log_entry.is_some() {
            self.set_log_field("error", json!(fault.to_string()));
        }
    }

    /// Tells the operator, once a second at most for every cause.
    fn warn(&self, what: &str) {
        let route = self.route.map_or("", |lane| self.config.compiled.route_name(lane));
        if let Some(before) = self.worker.log_throttle.allow(what, self.worker.clock.instant()) {
            tracing::warn!(route, suppressed = before, "{what}");
        }
    }

    /// The status that the client is told.
    pub fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    pub fn add_bytes_sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The upstream's answer ended before its end.
    pub fn record_upstream_abort(&mut self, error: &Broken) {
        self.warn(&format!("the upstream server's answer broke off: {error}"));
        self.record_truncation();
    }

    /// The client did not get the whole answer.
    pub fn record_truncation(&mut self) {
        if self.log_entry.as_ref().is_some_and(|line| !line.contains_key("error")) {
            self.set_log_field("error", json!("the answer was cut off"));
        }
    }

    /// The answer has opened a tunnel.
    pub fn tunnel_opened(&self) {
        self.worker.metrics.tunnel_opened();
    }

    /// How many bytes have passed through it by its end.
    pub fn record_tunnel_end(&mut self, to_client: u64, to_upstream: u64) {
        self.worker.metrics.tunnel_ended();
        self.bytes += to_client;
        if self.log_entry.is_some() {
            self.set_log_field("bytes_received", json!(to_upstream));
        }
    }

    /// It ended, and neither side had ended it.
    pub fn record_tunnel_error(&mut self, what: &str) {
        if self.log_entry.is_some() {
            self.set_log_field("error", json!(what));
        }
    }

    fn set_log_field(&mut self, name: &str, value: Value) {
        if let Some(line) = &mut self.log_entry {
            line.insert(name.to_owned(), value);
        }
    }

    fn route_metrics(&self) -> &RouteMetrics {
        route_metrics(&self.config, self.route)
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let took = self.worker.end_time().duration_since(self.started.instant);
        self.route_metrics().request_ended(self.status, took);
        if let (Some(mut line), Some(access)) = (self.log_entry.take(), &self.config.access_log) {
            let route = self.route.map(|lane| self.config.compiled.route_name(lane));
            line.insert("route".to_owned(), json!(route));
            line.insert("status".to_owned(), json!(self.status));
            line.insert("bytes".to_owned(), json!(self.bytes));
            line.insert("duration_ms".to_owned(), json!(took.as_micros() as f64 / 1e3));
            if !access.write(&Value::Object(*line)) {
                self.worker.metrics.access_log_lost(1);
            }
        }
    }
}

fn route_metrics(view: &WorkerConfig, lane: Option<usize>) -> &RouteMetrics {
    lane.map_or(&view.unrouted_metrics, |lane| &view.route_metrics[lane])
}

/// Tells the meters which windows of a slate have refused a request.
pub fn record_refusal(view: &WorkerConfig, lane: Option<usize>, slate: usize, context: &DecisionContext) {
    let mut told = None;
    for (_, line) in context.result.charges.iter().zip(&context.result.layers).filter(|(charge, _)| charge.is_full) {
        view.window_metrics[slate].refused(line.rule, line.layer);
        if told != Some(line.rule) {
            route_metrics(view, lane).refused(line.rule);
            told = Some(line.rule);
        }
    }
}

/// An answer to what never became a request: a head that is malformed, too large or late, or a connection for which there is no
/// room.
pub fn record_rejected_head(worker: &WorkerState, peer: IpAddr, fault: &RequestError) {
    worker.metrics.request_error(fault.kind());
    let view = worker.config();
    let status = responses::fault_status(fault).as_u16();
    view.unrouted_metrics.request_ended(status, Duration::ZERO);
    if let Some(access) = &view.access_log {
        let time = worker.clock.now();
        let mut line = Map::new();
        line.insert("time".to_owned(), json!(rfc3339(time)));
        line.insert("client".to_owned(), json!(peer.to_canonical().to_string()));
        line.insert("status".to_owned(), json!(status));
        line.insert("error".to_owned(), json!(fault.to_string()));
        if !access.write(&Value::Object(line)) {
            worker.metrics.access_log_lost(1);
        }
    }
}

fn rfc3339(moment: Timestamp) -> Option<String> {
    jiff::Timestamp::from_millisecond(moment.unix_ms as i64).map(|time| format!("{time:.3}")).ok()
}

/// What a line of the log has of a text that the client chose the length of.
fn truncate(text: &str) -> &str {
    let end = (0..=LOGGED_MAX_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// What is known of a request before it is decided. The query is left out: secrets travel there.
fn head_fields(peer: IpAddr, parts: &Parts, started: Timestamp) -> Map<String, Value> {
    let host = parts.headers.get(http::header::HOST).map(|host| String::from_utf8_lossy(host.as_bytes()));
    let host = host.or_else(|| parts.uri.authority().map(|authority| authority.as_str().into()));
    let mut line = Map::new();
    line.insert("time".to_owned(), json!(rfc3339(started)));
    line.insert("client".to_owned(), json!(peer.to_canonical().to_string()));
    line.insert("method".to_owned(), json!(parts.method.as_str()));
    line.insert("protocol".to_owned(), json!(format!("{:?}", parts.version)));
    line.insert("host".to_owned(), json!(host.as_deref().map(truncate)));
    line.insert("path".to_owned(), json!(truncate(parts.uri.path())));
    line
}
