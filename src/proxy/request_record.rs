//! The record of one request: metrics, a line of the access log if there is one, and the spans of a traced request.
//!
//! Dropping the record ends it, so a request is counted and logged exactly once, also when the client goes away. The slots
//! that the request holds are released then.

use std::borrow::Cow;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Version, header};

use super::charged_request::CostLog;
use super::held_slots::HeldSlots;
use super::worker_config::WorkerConfig;
use super::worker_state::WorkerState;
use crate::access_log::entry::{
    FullLimit, KnownClient, LogEntry, LoggedDenial, LoggedRequest, RuleDecision, UpstreamUse,
};
use crate::spans::{TracedRequest, UpstreamAttempt};
use crate::upstream::attempt_log::{AttemptLog, TracedAttempt};
use crate::upstream::request_body::UploadProgress;
use crate::upstream::response_body::UpstreamBodyError;
use crate::upstream::server_health::UpstreamHealth;
use transom_config::upstream::Server;
use transom_config::{RouteId, ServerId, UpstreamId};
use transom_http::client_address::ClientAddress;
use transom_http::error::{RequestError, Side};
use transom_http::forwarded::ClientInfo;
use transom_http::http1_head::FirstLine;
use transom_http::request_id::{RequestId, X_REQUEST_ID};
use transom_http::trace_context::{SpanContext, TraceParent};
use transom_limiter::concurrency::{Slot, SlotState};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::rule_set::NotCounted;
use transom_limiter::verdict::{Outcome, Verdict, Verdicts};
use transom_rules::RouteRulesId;
use transom_rules::access::Denial;
use transom_rules::client_plans;
use transom_rules::resolved_request::ResolvedRequest;
use transom_rules::responses::CLIENT_CLOSED_REQUEST;
use transom_runtime::clock::Timestamp;
use transom_runtime::metrics::clients::ClientCells;
use transom_runtime::metrics::events::{RouteMetrics, UpstreamOutcome};
use transom_runtime::metrics::storage::GaugeGuard;

/// Limit for each text of the client's in the access log.
const LOGGED_MAX_BYTES: usize = 2048;

pub struct RequestRecord {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    route: Option<RouteId>,
    /// The client by the clients file.
    client: Option<ClientCells>,
    status: u16,
    started: Timestamp,
    bytes: u64,
    request_id: RequestId,
    /// The client did not receive the complete response.
    is_truncated: bool,
    /// `None` for a request that is neither logged nor traced.
    log: Option<Box<PendingEntry>>,
    slots: HeldSlots,
}

/// An entry of the access log whose request has not ended.
struct PendingEntry {
    entry: LogEntry,
    /// Present if the request is traced.
    span: Option<SpanContext>,
    /// Of the client's request.
    scheme: &'static str,
    /// The key of each rule, where one may be logged.
    keys: IdVec<PlanPosition, String>,
    /// Since when the rules make the request wait.
    delayed_since: Option<Instant>,
    forwarded: Option<Forwarded>,
    upload: Option<Rc<UploadProgress>>,
    costs: Option<CostLog>,
}

/// A request that was forwarded.
struct Forwarded {
    upstream: UpstreamId,
    since: Instant,
    /// `None` until the head of a response has arrived.
    time: Option<Duration>,
    attempts: Rc<AttemptLog>,
}

impl RequestRecord {
    pub fn new(
        worker: &Rc<WorkerState>,
        config: &Rc<WorkerConfig>,
        client: &ClientInfo,
        parts: &Parts,
        started: Timestamp,
    ) -> RequestRecord {
        let request_id = RequestId::of(&parts.headers, client.trusted_header.is_some());
        let tracer = config.tracer.as_ref();
        let span = tracer.and_then(|tracer| tracer.begin_span(&parts.headers, client.trusted_header.is_some()));
        let log = (config.notes_requests || span.is_some()).then(|| {
            let mut entry = LogEntry::new(started.unix_ms, client.address);
            entry.request = Some(logged_request(parts, &request_id, span.as_ref()));
            Box::new(PendingEntry {
                entry,
                span,
                scheme: if client.is_secure { "https" } else { "http" },
                keys: IdVec::new(),
                delayed_since: None,
                forwarded: None,
                upload: None,
                costs: None,
            })
        });
        worker.metrics.request_began();
        RequestRecord {
            worker: Rc::clone(worker),
            config: Rc::clone(config),
            route: None,
            client: None,
            status: CLIENT_CLOSED_REQUEST,
            started,
            bytes: 0,
            request_id,
            is_truncated: false,
            log,
            slots: HeldSlots::default(),
        }
    }

    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// Sets the request id of a message.
    pub fn identify(&self, headers: &mut HeaderMap) {
        headers.insert(X_REQUEST_ID, self.request_id.to_value());
    }

    /// Whether the log says the keys of a decided request. That of a mere admission is in messages for debugging only.
    pub fn needs_keys(&self, verdicts: Verdicts<'_>) -> bool {
        self.is_logged() && (self.config.logs_requests || !verdicts.is_mere_admission())
    }

    /// The configuration that the request began with.
    pub fn config(&self) -> &Rc<WorkerConfig> {
        &self.config
    }

    /// Whether the request is logged or traced.
    pub fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    pub fn set_route(&mut self, route: RouteId) {
        self.route = Some(route);
    }

    /// Names the client for the access log and the metrics.
    pub fn set_client(&mut self, client: &client_plans::KnownClient) {
        let metrics = self.config.client_metrics.as_ref();
        self.client = metrics.map(|metrics| metrics.cells(client.number, &client.name, &client.plan));
        if let Some(log) = &mut self.log {
            log.entry.known_client = Some(KnownClient { name: client.name.clone(), plan: client.plan.clone() });
        }
    }

    /// Where the usage of the client is counted.
    pub fn client_cells(&self) -> Option<ClientCells> {
        self.client.clone()
    }

    /// Counts a denied request, and notes why it is denied for the access log.
    pub fn record_denial(&mut self, denial: Denial<'_>) {
        let id = denial.id();
        self.config.denials.denied(&id);
        if let Some(log) = &mut self.log {
            let (entry, reason) = match denial {
                Denial::Entry(entry) => (Some(entry.target.to_string()), entry.reason.clone()),
                Denial::NotAllowed => (None, None),
            };
            log.entry.denied_by = Some(LoggedDenial { id, entry, reason });
        }
    }

    /// Notes the keys of all rules, for a decision that may not be a mere admission.
    pub fn set_keys(&mut self, resolved: &ResolvedRequest<'_>) {
        let digester = &self.config.served.readable_digester;
        if let Some(log) = &mut self.log {
            let label = |position| resolved.describe_key(position, digester).label();
            log.keys = resolved.rules.rule_keys.ids().map(label).collect();
        }
    }

    /// Counts the bytes of the request body for the access log.
    pub fn set_upload(&mut self, upload: Option<Rc<UploadProgress>>) {
        if let Some(log) = &mut self.log {
            log.upload = upload;
        }
    }

    /// Where the costs of the request are noted. `None` without an access log.
    pub fn cost_log(&mut self) -> Option<CostLog> {
        self.config.access_log.as_ref()?;
        Some(Rc::clone(self.log.as_mut()?.costs.get_or_insert_default()))
    }

    /// The rules make the request wait.
    pub fn delay_began(&mut self) {
        if let Some(log) = &mut self.log {
            log.delayed_since = Some(self.worker.clock.instant());
        }
    }

    pub fn delay_ended(&mut self) {
        if let Some(log) = &mut self.log {
            log.end_delay(self.worker.clock.instant());
        }
    }

    /// Holds a slot of the rule at a position of the charge plan until the request ends.
    pub fn hold_slot(&mut self, rules_id: RouteRulesId, position: PlanPosition, slot: Slot) {
        let rule = self.config.served.route_rules[rules_id].charge_plan.rules()[position];
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

    /// Counts a request that waits for a slot of the rule at this position of the charge plan. It waits until the result is
    /// dropped.
    pub fn record_slot_wait(&self, position: PlanPosition, rule: RuleId) -> Option<GaugeGuard> {
        self.route_metrics().delayed(position);
        self.config.count_delayed(rule)
    }

    /// Counts the decision on the request's route, and notes refusing and shadow rules for the access log.
    pub fn record_decision(&mut self, rules_id: RouteRulesId, verdicts: Verdicts<'_>) {
        if let Some(client) = &self.client {
            client.decided(verdicts.is_refused());
        }
        let metrics = self.route_metrics();
        if verdicts.is_refused() {
            metrics.request_refused();
            let windows = &self.config.window_metrics[rules_id];
            let full = verdicts.full_windows();
            full.for_each(|window| windows.refused_by(window.layer().position, window.counted_name()));
            let slots = verdicts.slots().iter().filter(|usage| usage.state == SlotState::Full);
            slots.for_each(|usage| windows.refused_by_slots(usage.position));
        }
        for verdict in verdicts.rules() {
            match verdict.outcome() {
                Outcome::Admitted => metrics.admitted(verdict.position),
                Outcome::Delayed => metrics.delayed(verdict.position),
                Outcome::Refused => metrics.refused(verdict.position),
                Outcome::Shadowed if !verdicts.is_refused() => metrics.shadowed(verdict.position),
                // Waiting requests are counted when they begin to wait, those that are not counted where keys are found.
                Outcome::Shadowed | Outcome::Waited | Outcome::NotCounted(_) | Outcome::RefusedElsewhere => {}
            }
        }
        self.log_decision(verdicts);
        // The windows of these rules have not admitted the request.
        self.slots.release(verdicts.shadowed_by_windows());
    }

    /// Notes the decision of each rule, and the limits without room, for the access log.
    fn log_decision(&mut self, verdicts: Verdicts<'_>) {
        let Some(log) = &mut self.log else { return };
        let full_limit = |verdict: Verdict<'_>, window: &str| {
            let rule = &verdict.rule().rule;
            let plan = verdict.keyed_request().and_then(|keyed_request| rule.plan_of(keyed_request.variant));
            let limit = FullLimit {
                rule: rule.name.clone(),
                window: window.to_owned(),
                key: log.keys.get(verdict.position).cloned(),
                plan: plan.map(|plan| plan.name.clone()),
            };
            (rule.is_shadow(), limit)
        };
        let windows = verdicts.full_windows();
        let windows = windows.map(|window| full_limit(verdicts.of_rule(window.layer().position), window.name()));
        let slots = verdicts.slots().iter();
        let slots = slots.filter(|usage| matches!(usage.state, SlotState::Full | SlotState::Shadowed)).map(|usage| {
            let verdict = verdicts.of_rule(usage.position);
            full_limit(verdict, verdict.rule().concurrent_name().unwrap_or_default())
        });
        let (shadowed, full): (Vec<_>, Vec<_>) = windows.chain(slots).partition(|(is_shadow, _)| *is_shadow);
        let decided = verdicts.rules().filter_map(|verdict| {
            let decision = match verdict.outcome() {
                Outcome::Admitted | Outcome::RefusedElsewhere => RuleDecision::Admitted,
                Outcome::Delayed | Outcome::Waited => RuleDecision::Delayed,
                Outcome::Shadowed => RuleDecision::Shadowed,
                Outcome::Refused => RuleDecision::Refused,
                Outcome::NotCounted(NotCounted::Exempt) => RuleDecision::Exempt,
                Outcome::NotCounted(reason) if reason.refuses() && verdict.rule().rule.is_shadow() => {
                    RuleDecision::Shadowed
                }
                Outcome::NotCounted(_) => return None,
            };
            Some((verdict.rule().rule.name.clone(), decision))
        });
        log.entry.rules = decided.collect();
        let limits = |limits: Vec<(bool, FullLimit)>| limits.into_iter().map(|(_, limit)| limit).collect();
        log.entry.shadowed_by = limits(shadowed);
        log.entry.refused_by = if verdicts.is_refused() { limits(full) } else { Vec::new() };
    }

    /// The request is forwarded to an upstream. Returns where its attempts are noted.
    pub fn forwarding_began(&mut self, upstream: UpstreamId) -> Option<Rc<AttemptLog>> {
        let log = self.log.as_mut()?;
        let attempts = Rc::new(AttemptLog::new(log.span.as_ref()));
        let since = self.worker.clock.instant();
        log.forwarded = Some(Forwarded { upstream, since, time: None, attempts: Rc::clone(&attempts) });
        Some(attempts)
    }

    /// The head of the response has arrived, or the last attempt has failed.
    pub fn forwarding_ended(&mut self) {
        if let Some(forwarded) = self.log.as_mut().and_then(|log| log.forwarded.as_mut()) {
            forwarded.time = Some(self.worker.clock.instant().duration_since(forwarded.since));
        }
    }

    /// Notes the status of a gRPC response, from its head or its trailers.
    pub fn set_grpc_status(&mut self, fields: &HeaderMap) {
        if let Some(log) = &mut self.log
            && let Some(status) = fields.get("grpc-status")
        {
            log.entry.grpc_status = Some(readable(status));
        }
    }

    /// Counts an error, and logs a warning unless the client caused it.
    pub fn record_error(&mut self, error: &RequestError) {
        self.worker.metrics.request_error(error.kind_id());
        if error.is_logged_as_warning() {
            self.warn(error.side(), &error.operator_message());
        }
        self.set_log_error(&error.to_string());
    }

    /// Logs a warning when its cause begins. Messages seldom name a server, so each upstream has causes of its own.
    fn warn(&self, side: Side, message: &str) {
        let served = &self.config.served;
        let route = self.route.map_or("", |route| served.route_name(route));
        let upstream = self
            .route
            .filter(|_| side == Side::Upstream)
            .and_then(|route| Some(&served.config.upstreams[served.routes[route].upstream?]));
        let upstream = upstream.map_or("", |upstream| &upstream.name);
        let cause = format!("{upstream}: {message}");
        if let Some(suppressed) = self.worker.log_throttle.allow(&cause, self.worker.clock.instant()) {
            tracing::warn!(route, upstream, suppressed, "{message}");
        }
    }

    /// Status of the response; 499 if it never gets one.
    pub fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    pub fn add_bytes_sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        if bytes > 0
            && let Some(costs) = self.log.as_ref().and_then(|log| log.costs.as_ref())
        {
            let took = || self.worker.clock.instant().duration_since(self.started.instant);
            costs.borrow_mut().first_byte.get_or_insert_with(took);
        }
    }

    /// The upstream's response was cut off.
    pub fn record_upstream_abort(&mut self, error: &UpstreamBodyError) {
        let kind = match error {
            UpstreamBodyError::Upstream(error) if error.is_of_request_body() => RequestError::Body,
            UpstreamBodyError::LimitExceeded => {
                self.set_log_error(&RequestError::LimitExceeded.to_string());
                RequestError::LimitExceeded
            }
            _ => {
                self.warn(Side::Upstream, &format!("the upstream server's response was cut off: {error}"));
                RequestError::Upstream(String::new())
            }
        };
        self.worker.metrics.request_error(kind.kind_id());
        self.record_truncation();
    }

    /// The client did not receive the complete response.
    pub fn record_truncation(&mut self) {
        if !std::mem::replace(&mut self.is_truncated, true) {
            self.worker.metrics.response_truncated();
        }
        if let Some(log) = &mut self.log {
            log.entry.error.get_or_insert_with(|| "the response was cut off".to_owned());
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
        if let Some(log) = &mut self.log {
            log.entry.bytes_received = to_upstream;
        }
    }

    /// The tunnel ended without being closed by either side.
    pub fn record_tunnel_error(&mut self, message: &str) {
        self.set_log_error(message);
    }

    fn set_log_error(&mut self, message: &str) {
        if let Some(log) = &mut self.log {
            log.entry.error = Some(message.to_owned());
        }
    }

    /// The request ends because of a panic: its response is 500, unless one was begun.
    #[cold]
    fn record_panic(&mut self) {
        self.record_error(&RequestError::Panic);
        if self.status == CLIENT_CLOSED_REQUEST {
            self.status = RequestError::Panic.status();
        }
    }

    /// Writes a debug message with the route, keys and decisions of the request. Texts of clients are escaped.
    fn log_request(&self, entry: &LogEntry, keys: &[String]) {
        let rules = self.route.map(|route| {
            let served = &self.config.served;
            let rules = served.rules_of(&served.routes[route]).charge_plan.compiled_rules();
            rules.map(|(_, rule)| rule.rule.name.as_str()).collect::<Vec<_>>()
        });
        let keys: Vec<String> = rules.iter().flatten().zip(keys).map(|(rule, key)| format!("{rule}={key}")).collect();
        let decisions: Vec<String> =
            entry.rules.iter().map(|(rule, decision)| format!("{rule}={}", decision.name())).collect();
        let request = entry.request.as_ref();
        tracing::debug!(
            client = %entry.client,
            method = ?request.map_or("", |request| &request.method),
            host = ?request.and_then(|request| request.host.as_deref()).unwrap_or_default(),
            path = ?request.map_or("", |request| &request.path),
            route = entry.route.as_deref().unwrap_or_default(),
            status = entry.status,
            keys = ?keys,
            rules = ?decisions,
            denied_by = entry.denied_by.as_ref().map_or("", |denial| denial.id.as_str()),
            error = ?entry.error.as_deref().unwrap_or_default(),
            "request"
        );
    }

    fn route_metrics(&self) -> &RouteMetrics {
        route_metrics(&self.config, self.route)
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if thread::panicking() {
            self.record_panic();
        }
        self.worker.metrics.request_ended();
        let took = self.worker.end_time().duration_since(self.started.instant);
        self.route_metrics().request_ended(self.status, took);
        if let Some(mut log) = self.log.take() {
            let (span, scheme) = (log.span.take(), log.scheme);
            let keys = std::mem::take(&mut log.keys);
            let (mut entry, attempts) = log.finish(&self.config, self.started.instant, self.worker.end_time());
            entry.route = self.route.map(|route| self.config.served.route_name(route).to_owned());
            (entry.status, entry.bytes_sent, entry.duration) = (self.status, self.bytes, took);
            if self.config.logs_requests {
                self.log_request(&entry, keys.as_slice());
            }
            write_entry(&self.worker, &self.config, &entry);
            if let (Some(tracer), Some(span)) = (&self.config.tracer, span) {
                let route = self.route.map(|route| self.config.served.config.routes[route].path.text.clone());
                let started = self.worker.clock.wall_time() - took;
                tracer.send(TracedRequest { span, started, entry, http_route: route, scheme, attempts });
            }
        }
    }
}

impl PendingEntry {
    fn end_delay(&mut self, now: Instant) {
        let waited = self.delayed_since.take().map(|since| now.duration_since(since));
        self.entry.delay += waited.unwrap_or_default();
    }

    /// The entry of a request that ends now, and the attempts of a traced one.
    fn finish(mut self, config: &WorkerConfig, started: Instant, now: Instant) -> (LogEntry, Vec<UpstreamAttempt>) {
        self.end_delay(now);
        let mut entry = self.entry;
        if let Some(upload) = self.upload {
            entry.bytes_received = upload.received_bytes.get();
        }
        entry.costs = self.costs.map(|costs| Box::new(costs.take()));
        let mut traced = Vec::new();
        entry.upstream = self.forwarded.map(|forwarded| {
            let upstream = &config.served.config.upstreams[forwarded.upstream];
            let log = &*forwarded.attempts;
            let first = &config.served.upstream_health[forwarded.upstream];
            let current = log.servers.borrow();
            let server = log.last_server.get().and_then(|id| server_of(current.as_ref().unwrap_or(first), id));
            let attempt = |attempt: &TracedAttempt| {
                let server = server_of(attempt.servers.as_ref().unwrap_or(first), attempt.server);
                upstream_attempt(attempt, server, started, now)
            };
            traced = log.traced().iter().map(attempt).collect();
            UpstreamUse {
                upstream: upstream.name.clone(),
                server: server.map(|server| server.url.clone()),
                time: forwarded.time.unwrap_or_else(|| now.duration_since(forwarded.since)),
                attempts: log.attempts.get(),
                held: log.held.get(),
            }
        });
        (entry, traced)
    }
}

fn server_of(upstream_health: &UpstreamHealth, id: ServerId) -> Option<&Server> {
    upstream_health.servers.get(id).map(|monitored| &monitored.server)
}

/// What the span of an attempt to use `server` says. The request runs from `started` to `now`.
fn upstream_attempt(
    attempt: &TracedAttempt,
    server: Option<&Server>,
    started: Instant,
    now: Instant,
) -> UpstreamAttempt {
    let outcome = attempt.outcome.map_or("closed", UpstreamOutcome::name);
    UpstreamAttempt {
        span_id: attempt.span_id,
        began: attempt.began.saturating_duration_since(started),
        took: attempt.ended.unwrap_or(now).saturating_duration_since(attempt.began),
        server: server.map_or_else(String::new, |server| server.url.clone()),
        address: server.map_or_else(String::new, |server| server.host.clone()),
        port: server.map(|server| server.port).filter(|port| *port > 0),
        status: attempt.status.map(|status| status.as_u16()),
        error: attempt.status.is_none().then_some(outcome),
    }
}

fn write_entry(worker: &WorkerState, config: &WorkerConfig, entry: &LogEntry) {
    if config.access_log.as_ref().is_some_and(|log| !log.write(entry)) {
        worker.metrics.access_log_lost(1);
    }
}

fn route_metrics(config: &WorkerConfig, route: Option<RouteId>) -> &RouteMetrics {
    route.map_or(&config.unrouted_metrics, |route| &config.route_metrics[route])
}

/// Counts and logs a response without a request: for a malformed, oversized or late head, or for a connection over the limit.
/// `first_line`: what the head says, as far as it was received.
pub fn record_rejected_head(
    worker: &WorkerState,
    peer: ClientAddress,
    error: &RequestError,
    first_line: Option<FirstLine<'_>>,
) {
    worker.metrics.request_error(error.kind_id());
    let config = worker.config();
    let status = error.status();
    config.unrouted_metrics.request_ended(status, Duration::ZERO);
    if config.logs_requests {
        // Escaped: they are texts of the client.
        let method = first_line.map_or("", |line| line.method);
        let path = first_line.map_or(Cow::Borrowed(""), |line| String::from_utf8_lossy(line.path));
        let (method, path) = (truncate(method), truncate(&path));
        tracing::debug!(client = %peer, ?method, ?path, status, error = %error, "request without a valid head");
    }
    if config.access_log.is_some() {
        let mut entry = LogEntry::new(worker.clock.now().unix_ms, peer);
        (entry.status, entry.error) = (status, Some(error.to_string()));
        entry.request = first_line.map(logged_first_line);
        write_entry(worker, &config, &entry);
    }
}

/// Cuts a text of the client's to `LOGGED_MAX_BYTES`, at a character boundary.
fn truncate(text: &str) -> &str {
    let end = (0..=LOGGED_MAX_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

fn readable(value: &HeaderValue) -> String {
    truncate(&String::from_utf8_lossy(value.as_bytes())).to_owned()
}

/// What the access log says of a head that cannot be parsed.
fn logged_first_line(line: FirstLine<'_>) -> LoggedRequest {
    LoggedRequest {
        request_id: None,
        trace_id: None,
        method: truncate(line.method).to_owned(),
        host: None,
        path: truncate(&String::from_utf8_lossy(line.path)).to_owned(),
        protocol: line.protocol,
        user_agent: None,
        referrer: None,
    }
}

/// What the access log says of the head. Queries are left out, because they may hold secrets.
fn logged_request(parts: &Parts, request_id: &RequestId, span: Option<&SpanContext>) -> LoggedRequest {
    let field = |name| parts.headers.get(name).map(readable);
    let host = parts.headers.get(header::HOST).map(HeaderValue::as_bytes);
    let host = host.or_else(|| parts.uri.authority().map(|authority| authority.as_str().as_bytes()));
    let received_trace_id = || TraceParent::of(&parts.headers).map(|parent| parent.trace_id);
    let trace_id = span.map(|span| span.trace_id).or_else(received_trace_id);
    LoggedRequest {
        request_id: Some(readable(&request_id.to_value())),
        trace_id: trace_id.map(|id| format!("{id:032x}")),
        method: truncate(parts.method.as_str()).to_owned(),
        host: host.map(logged_host),
        path: truncate(parts.uri.path()).to_owned(),
        protocol: match parts.version {
            Version::HTTP_10 => "HTTP/1.0",
            Version::HTTP_2 => "HTTP/2.0",
            _ => "HTTP/1.1",
        },
        user_agent: field(header::USER_AGENT),
        referrer: parts.headers.get(header::REFERER).map(logged_referrer),
    }
}

/// An authority without the user name and the password that may stand in it.
fn without_user_information(authority: &str) -> &str {
    authority.rsplit_once('@').map_or(authority, |(_, host)| host)
}

/// Cut after the user information is removed: a part of it would not be recognized.
fn logged_host(authority: &[u8]) -> String {
    truncate(without_user_information(&String::from_utf8_lossy(authority))).to_owned()
}

/// A referrer without its query and without user information.
fn logged_referrer(url: &HeaderValue) -> String {
    let url = String::from_utf8_lossy(url.as_bytes());
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("//") else { return truncate(url).to_owned() };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    truncate(&format!("{scheme}//{}{path}", without_user_information(authority))).to_owned()
}
