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
use crate::clock::Moment;
use crate::http::error::RequestError;
use crate::http::responses::{self, CLIENT_GONE};
use crate::metrics::events::RouteMeter;
use crate::upstream::response_body::Broken;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;

/// Of a host and of a path, in the access log.
const LOGGED_MAX_BYTES: usize = 2048;

pub struct Record {
    worker: Rc<WorkerState>,
    view: Rc<WorkerConfig>,
    lane: Option<usize>,
    status: u16,
    started: Moment,
    bytes: u64,
    /// What only the access log wants to know; `None` where there is none.
    line: Option<Box<Map<String, Value>>>,
}

impl Record {
    pub fn new(
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: IpAddr,
        parts: &Parts,
        started: Moment,
    ) -> Record {
        let line = view.access.as_ref().map(|_| Box::new(first_half(peer, parts, started)));
        let (worker, view) = (Rc::clone(worker), Rc::clone(view));
        Record { worker, view, lane: None, status: CLIENT_GONE, started, bytes: 0, line }
    }

    pub fn route(&mut self, lane: usize) {
        self.lane = Some(lane);
    }

    /// Tells the meters what the rules decided, on the request's own route.
    pub fn decision(&mut self, slate: usize, context: &DecisionContext, judgement: &Decision) {
        let meter = self.meter();
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
            Decision::Refused => refused(&self.view, self.lane, slate, context),
        }
        if self.line.is_some() {
            let rules = &self.view.snapshot.slates[slate].charge_plan.rules;
            let name = |position: &usize| json!(self.view.snapshot.rule_set.rules[rules[*position]].rule.name);
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
                    self.note(name, Value::Array(rules));
                }
            }
        }
    }

    pub fn upstream(&mut self, name: &str) {
        if self.line.is_some() {
            self.note("upstream", json!(name));
        }
    }

    /// What went wrong: to the log, if it is more than a client's mistake.
    pub fn fault(&mut self, fault: &RequestError) {
        self.worker.meter.fault(fault.kind());
        if fault.is_worth_a_warning() {
            self.complain(&fault.for_operator());
        }
        if self.line.is_some() {
            self.note("error", json!(fault.to_string()));
        }
    }

    /// Tells the operator, once a second at most for every cause.
    fn complain(&self, what: &str) {
        let route = self.lane.map_or("", |lane| self.view.snapshot.name_of(lane));
        if let Some(before) = self.worker.complaints.may_say(what, self.worker.clock.instant()) {
            tracing::warn!(route, suppressed = before, "{what}");
        }
    }

    /// The status that the client is told.
    pub fn answer(&mut self, status: u16) {
        self.status = status;
    }

    pub fn sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The upstream's answer ended before its end.
    pub fn broke_off(&mut self, error: &Broken) {
        self.complain(&format!("the upstream server's answer broke off: {error}"));
        self.cut_off();
    }

    /// The client did not get the whole answer.
    pub fn cut_off(&mut self) {
        if self.line.as_ref().is_some_and(|line| !line.contains_key("error")) {
            self.note("error", json!("the answer was cut off"));
        }
    }

    /// The answer has opened a tunnel.
    pub fn tunnel_opened(&self) {
        self.worker.meter.tunnel_opened();
    }

    /// How many bytes have passed through it by its end.
    pub fn tunneled(&mut self, to_client: u64, to_upstream: u64) {
        self.worker.meter.tunnel_ended();
        self.bytes += to_client;
        if self.line.is_some() {
            self.note("bytes_received", json!(to_upstream));
        }
    }

    /// It ended, and neither side had ended it.
    pub fn tunnel_broke(&mut self, what: &str) {
        if self.line.is_some() {
            self.note("error", json!(what));
        }
    }

    fn note(&mut self, name: &str, value: Value) {
        if let Some(line) = &mut self.line {
            line.insert(name.to_owned(), value);
        }
    }

    fn meter(&self) -> &RouteMeter {
        meter(&self.view, self.lane)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let took = self.worker.end().duration_since(self.started.instant);
        self.meter().answered(self.status, took);
        if let (Some(mut line), Some(access)) = (self.line.take(), &self.view.access) {
            let route = self.lane.map(|lane| self.view.snapshot.name_of(lane));
            line.insert("route".to_owned(), json!(route));
            line.insert("status".to_owned(), json!(self.status));
            line.insert("bytes".to_owned(), json!(self.bytes));
            line.insert("duration_ms".to_owned(), json!(took.as_micros() as f64 / 1e3));
            if !access.write(&Value::Object(*line)) {
                self.worker.meter.access_log_lost(1);
            }
        }
    }
}

fn meter(view: &WorkerConfig, lane: Option<usize>) -> &RouteMeter {
    lane.map_or(&view.unrouted, |lane| &view.meters[lane])
}

/// Tells the meters which windows of a slate have refused a request.
pub fn refused(view: &WorkerConfig, lane: Option<usize>, slate: usize, context: &DecisionContext) {
    let mut told = None;
    for (_, line) in context.result.charges.iter().zip(&context.result.layers).filter(|(charge, _)| charge.is_full) {
        view.windows[slate].refused_by(line.rule, line.layer);
        if told != Some(line.rule) {
            meter(view, lane).refused(line.rule);
            told = Some(line.rule);
        }
    }
}

/// An answer to what never became a request: a head that is malformed, too large or late, or a connection for which there is no
/// room.
pub fn refused_head(worker: &WorkerState, peer: IpAddr, fault: &RequestError) {
    worker.meter.fault(fault.kind());
    let view = worker.view();
    let status = responses::fault_status(fault).as_u16();
    view.unrouted.answered(status, Duration::ZERO);
    if let Some(access) = &view.access {
        let time = worker.clock.now();
        let mut line = Map::new();
        line.insert("time".to_owned(), json!(time_text(time)));
        line.insert("client".to_owned(), json!(peer.to_canonical().to_string()));
        line.insert("status".to_owned(), json!(status));
        line.insert("error".to_owned(), json!(fault.to_string()));
        if !access.write(&Value::Object(line)) {
            worker.meter.access_log_lost(1);
        }
    }
}

fn time_text(moment: Moment) -> Option<String> {
    jiff::Timestamp::from_millisecond(moment.unix_ms as i64).map(|time| format!("{time:.3}")).ok()
}

/// What a line of the log has of a text that the client chose the length of.
fn shortened(text: &str) -> &str {
    let end = (0..=LOGGED_MAX_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// What is known of a request before it is decided. The query is left out: secrets travel there.
fn first_half(peer: IpAddr, parts: &Parts, started: Moment) -> Map<String, Value> {
    let host = parts.headers.get(http::header::HOST).map(|host| String::from_utf8_lossy(host.as_bytes()));
    let host = host.or_else(|| parts.uri.authority().map(|authority| authority.as_str().into()));
    let mut line = Map::new();
    line.insert("time".to_owned(), json!(time_text(started)));
    line.insert("client".to_owned(), json!(peer.to_canonical().to_string()));
    line.insert("method".to_owned(), json!(parts.method.as_str()));
    line.insert("protocol".to_owned(), json!(format!("{:?}", parts.version)));
    line.insert("host".to_owned(), json!(host.as_deref().map(shortened)));
    line.insert("path".to_owned(), json!(shortened(parts.uri.path())));
    line
}
