//! The record of one request: metrics, and a line of the access log if there is one.
//!
//! Dropping the record ends it, so a request is counted and logged exactly once, also when the client goes away. The slots
//! that the request holds are released then.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use http::request::Parts;
use serde_json::{Map, Value, json};

use super::held_slots::HeldSlots;
use super::worker_config::WorkerConfig;
use super::worker_state::WorkerState;
use crate::clock::Timestamp;
use crate::http::error::RequestError;
use crate::http::responses::{self, CLIENT_CLOSED_REQUEST};
use crate::metrics::events::RouteMetrics;
use crate::upstream::response_body::UpstreamBodyError;
use transom_limiter::concurrency::{Slot, SlotState};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;

/// Limit for the host and for the path in the access log.
const LOGGED_MAX_BYTES: usize = 2048;

pub struct RequestRecord {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    route: Option<usize>,
    status: u16,
    started: Timestamp,
    bytes: u64,
    /// The line of the access log; `None` without an access log.
    log_entry: Option<Box<Map<String, Value>>>,
    slots: HeldSlots,
}

impl RequestRecord {
    pub fn new(
        worker: &Rc<WorkerState>,
        config: &Rc<WorkerConfig>,
        peer: IpAddr,
        parts: &Parts,
        started: Timestamp,
    ) -> RequestRecord {
        let line = config.access_log.as_ref().map(|_| Box::new(head_fields(peer, parts, started)));
        let (worker, config) = (Rc::clone(worker), Rc::clone(config));
        RequestRecord {
            worker,
            config,
            route: None,
            status: CLIENT_CLOSED_REQUEST,
            started,
            bytes: 0,
            log_entry: line,
            slots: HeldSlots::default(),
        }
    }

    pub fn set_route(&mut self, route: usize) {
        self.route = Some(route);
    }

    /// Holds a slot of the rule at a position of the charge plan until the request ends.
    pub fn hold_slot(&mut self, rules_index: usize, position: usize, slot: Slot) {
        let rule = self.config.compiled.route_rules[rules_index].charge_plan.rules[position];
        // Every rule that has slots has a gauge.
        if let Some(gauge) = &self.config.concurrency_gauges[rule] {
            self.slots.add(position, slot, gauge.clone());
        }
    }

    /// Releases the slots of a request that is not forwarded. `context` has the result of its decision.
    pub fn release_slots(&mut self, context: &mut DecisionContext) {
        if !self.slots.is_empty() {
            self.slots.release_all();
            context.slots_released();
        }
    }

    /// Releases the slots of a request that failed.
    pub fn release_all_slots(&mut self) {
        self.slots.release_all();
    }

    /// Counts a request that waits for a slot of the rule at this position.
    pub fn record_slot_wait(&self, position: usize) {
        self.route_metrics().delayed(position);
    }

    /// Counts the decision on the request's route, and notes refusing and shadow rules for the access log.
    pub fn record_decision(&mut self, rules_index: usize, context: &DecisionContext, decision: &Decision) {
        let concurrency = |state: SlotState| {
            let usages = context.result.concurrency.iter();
            usages.filter(move |usage| usage.state == state).map(|usage| usage.rule)
        };
        let metrics = self.route_metrics();
        match decision {
            Decision::Admitted | Decision::Delayed { .. } => {
                for (position, _) in context
                    .inputs
                    .keyed_requests
                    .iter()
                    .enumerate()
                    .filter(|(_, keyed_request)| keyed_request.is_some())
                {
                    match decision {
                        _ if context.result.shadowed.contains(&position) => metrics.shadowed(position),
                        // Counted when it began to wait.
                        _ if concurrency(SlotState::Waited).any(|rule| rule == position) => {}
                        Decision::Delayed { waiter: Some(wait), .. } if wait.rule == position => {
                            metrics.delayed(position)
                        }
                        _ => metrics.admitted(position),
                    }
                }
                concurrency(SlotState::Shadowed).for_each(|position| metrics.shadowed(position));
            }
            Decision::Refused => record_refusal(&self.config, self.route, rules_index, context),
        }
        if self.log_entry.is_some() {
            let rules = &self.config.compiled.route_rules[rules_index].charge_plan.rules;
            let name = |position: usize| json!(self.config.compiled.rule_set.rules[rules[position]].rule.name);
            let is_refused = matches!(decision, Decision::Refused);
            let full = context.result.charges.iter().zip(&context.result.layers);
            let full = full.filter(|(charge, _)| charge.is_full).map(|(_, layer)| layer.rule);
            let refused: Vec<Value> =
                full.chain(concurrency(SlotState::Full)).filter(|_| is_refused).map(name).collect();
            let shadowed = context.result.shadowed.iter().copied();
            let shadowed: Vec<Value> =
                shadowed.chain(concurrency(SlotState::Shadowed).filter(|_| !is_refused)).map(name).collect();
            for (name, rules) in [("refused_by", refused), ("shadowed_by", shadowed)] {
                if !rules.is_empty() {
                    self.set_log_field(name, Value::Array(rules));
                }
            }
        }
        // The windows of these rules have not admitted the request.
        self.slots.release(&context.result.shadowed);
    }

    pub fn set_upstream(&mut self, name: &str) {
        if self.log_entry.is_some() {
            self.set_log_field("upstream", json!(name));
        }
    }

    /// Counts an error, and logs a warning unless the client caused it.
    pub fn record_error(&mut self, error: &RequestError) {
        self.worker.metrics.request_error(error.kind_index());
        if error.is_logged_as_warning() {
            self.warn(&error.operator_message());
        }
        if self.log_entry.is_some() {
            self.set_log_field("error", json!(error.to_string()));
        }
    }

    /// Logs a warning, at most once a second per cause.
    fn warn(&self, message: &str) {
        let route = self.route.map_or("", |route| self.config.compiled.route_name(route));
        if let Some(suppressed) = self.worker.log_throttle.allow(message, self.worker.clock.instant()) {
            tracing::warn!(route, suppressed, "{message}");
        }
    }

    /// Status of the response; 499 if it never gets one.
    pub fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    pub fn add_bytes_sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The upstream's response was cut off.
    pub fn record_upstream_abort(&mut self, error: &UpstreamBodyError) {
        self.warn(&format!("the upstream server's response was cut off: {error}"));
        self.record_truncation();
    }

    /// The client did not receive the complete response.
    pub fn record_truncation(&mut self) {
        if self.log_entry.as_ref().is_some_and(|line| !line.contains_key("error")) {
            self.set_log_field("error", json!("the response was cut off"));
        }
    }

    /// The response has opened a tunnel.
    pub fn tunnel_opened(&self) {
        self.worker.metrics.tunnel_opened();
    }

    /// The tunnel has ended, after this many bytes in each direction.
    pub fn record_tunnel_end(&mut self, to_client: u64, to_upstream: u64) {
        self.worker.metrics.tunnel_ended();
        self.bytes += to_client;
        if self.log_entry.is_some() {
            self.set_log_field("bytes_received", json!(to_upstream));
        }
    }

    /// The tunnel ended without being closed by either side.
    pub fn record_tunnel_error(&mut self, message: &str) {
        if self.log_entry.is_some() {
            self.set_log_field("error", json!(message));
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
            let route = self.route.map(|route| self.config.compiled.route_name(route));
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

fn route_metrics(config: &WorkerConfig, route: Option<usize>) -> &RouteMetrics {
    route.map_or(&config.unrouted_metrics, |route| &config.route_metrics[route])
}

/// Counts a refusal for each full window and each rule without a free slot, and once for each refusing rule.
pub fn record_refusal(config: &WorkerConfig, route: Option<usize>, rules_index: usize, context: &DecisionContext) {
    let mut counted = None;
    let full = || context.result.charges.iter().zip(&context.result.layers).filter(|(charge, _)| charge.is_full);
    for (_, line) in full() {
        config.window_metrics[rules_index].refused(line.rule, line.layer);
        if counted != Some(line.rule) {
            route_metrics(config, route).refused(line.rule);
            counted = Some(line.rule);
        }
    }
    let compiled = &config.compiled;
    for usage in context.result.concurrency.iter().filter(|usage| usage.state == SlotState::Full) {
        let rule = compiled.route_rules[rules_index].charge_plan.rules[usage.rule];
        config.window_metrics[rules_index].refused(usage.rule, compiled.rule_set.rules[rule].concurrent_index());
        if full().all(|(_, line)| line.rule != usage.rule) {
            route_metrics(config, route).refused(usage.rule);
        }
    }
}

/// Counts and logs a response without a request: for a malformed, oversized or late head, or for a connection over the limit.
pub fn record_rejected_head(worker: &WorkerState, peer: IpAddr, error: &RequestError) {
    worker.metrics.request_error(error.kind_index());
    let config = worker.config();
    let status = responses::error_status(error).as_u16();
    config.unrouted_metrics.request_ended(status, Duration::ZERO);
    if let Some(access) = &config.access_log {
        let time = worker.clock.now();
        let mut line = Map::new();
        line.insert("time".to_owned(), json!(rfc3339(time)));
        line.insert("client".to_owned(), json!(peer.to_canonical().to_string()));
        line.insert("status".to_owned(), json!(status));
        line.insert("error".to_owned(), json!(error.to_string()));
        if !access.write(&Value::Object(line)) {
            worker.metrics.access_log_lost(1);
        }
    }
}

fn rfc3339(moment: Timestamp) -> Option<String> {
    jiff::Timestamp::from_millisecond(moment.unix_ms as i64).map(|time| format!("{time:.3}")).ok()
}

/// Cuts a text of the client's to `LOGGED_MAX_BYTES`, at a character boundary.
fn truncate(text: &str) -> &str {
    let end = (0..=LOGGED_MAX_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// Log fields of the head. The query is left out, because it may hold secrets.
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
