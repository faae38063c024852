//! The metrics of requests, connections and the process: their names and help texts, and one function per event.
//!
//! A worker makes its metric objects when it takes over a configuration; counting then needs no look-up.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use transom_limiter::handles::{Handle, IdVec, LimitNameId, PlanPosition, RuleId};

use super::clients::{CLIENT_REQUESTS, CLIENT_USAGE};
use super::storage::{GaugeGuard, Histogram, MetricCell, RouteCells};
use super::{Metric, Registry, WorkerId, counter, gauge, histogram, process, redis, upstream};

pub static REQUESTS: Metric = counter(
    "transom_requests_total",
    "Requests by route and status code of the response; 499: the client closed the connection.",
);
pub static REQUEST_DURATION: Metric =
    histogram("transom_request_duration_seconds", "Time from the head of a request to the end of its response.");
pub static REQUESTS_ACTIVE: Metric =
    gauge("transom_requests_active", "Requests in flight, until the end of the response.");
static TRUNCATED: Metric = counter(
    "transom_responses_truncated_total",
    "Responses that ended before their last byte, because the client, the upstream or a timeout cut them off.",
);
pub static DECISIONS: Metric = counter("transom_decisions_total", "Decisions by route, rule and outcome.");
pub static REFUSED: Metric = counter("transom_refused_total", "Refused requests by rule and exhausted window.");
static REFUNDED: Metric = counter(
    "transom_refunded_total",
    "Requests whose tokens were refunded because their response does not match count_when, by rule.",
);
pub static USAGE: Metric =
    counter("transom_usage_total", "Usage that responses have stated, by route, rule and kind, rounded up a response.");
static USAGE_MISSING: Metric = counter(
    "transom_usage_missing_total",
    "Responses of routes with a cost by usage that state none, by route and reason.",
);
static DENIED: Metric = counter(
    "transom_denied_total",
    "Denied requests by deny entry; allow: by the allow list of the route; other: by entries beyond the first hundred.",
);
static DECISION_DURATION: Metric =
    histogram("transom_decision_duration_seconds", "Time to decide a request, without waiting for the shared store.");
static SERVICE_CALLS: Metric =
    counter("transom_ratelimit_service_calls_total", "Calls of the rate limit service, by result.");
static SERVICE_DESCRIPTORS: Metric = counter(
    "transom_ratelimit_service_descriptors_total",
    "Descriptors that no rule answers to, and descriptors with negative hits or a limit that cannot be applied.",
);
pub static UPSTREAM_REQUESTS: Metric =
    counter("transom_upstream_requests_total", "Requests sent to upstream servers, by outcome.");
static UPSTREAM_DURATION: Metric =
    histogram("transom_upstream_duration_seconds", "Time from sending a request to the head of the upstream response.");
pub static CONNECTIONS: Metric = gauge("transom_connections", "Open client connections.");
static ACCEPTED: Metric = counter("transom_connections_accepted_total", "Accepted client connections.");
static RECEIVED: Metric = counter("transom_received_bytes_total", "Bytes received from clients, without those of TLS.");
static SENT: Metric = counter("transom_sent_bytes_total", "Bytes sent to clients, without those of TLS.");
static CONNECTIONS_REFUSED: Metric =
    counter("transom_connections_refused_total", "Client connections closed before their first request, by reason.");
static TLS_HANDSHAKES: Metric = counter("transom_tls_handshakes_total", "Completed TLS handshakes with clients.");
static CERTIFICATE_EXPIRY: Metric =
    gauge("transom_certificate_expiry_timestamp_seconds", "Expiry of listener certificates, Unix time in seconds.");
static REVOCATION_EXPIRY: Metric = gauge(
    "transom_revocation_list_expiry_timestamp_seconds",
    "Expiry of certificate revocation lists, Unix time in seconds.",
);
static HTTP2_ABUSE: Metric =
    counter("transom_http2_abuse_total", "HTTP/2 connections closed because of client misbehaviour, by kind.");
static TUNNELS: Metric =
    gauge("transom_tunnels", "Open WebSocket tunnels, over HTTP/1.1 connections and HTTP/2 streams.");
static RELOADS: Metric = counter("transom_config_reloads_total", "Configuration reloads, by outcome.");
static RELOAD_SUCCESSFUL: Metric =
    gauge("transom_config_last_reload_successful", "Whether the last reload was applied; 1 before the first.");
static RELOAD_TIME: Metric = gauge(
    "transom_config_last_reload_success_timestamp_seconds",
    "When the running configuration was applied, Unix time in seconds.",
);
pub static RULE_LIMIT: Metric = gauge(
    "transom_rule_limit",
    "Configured limit of a rule by window and plan: tokens of a window, or concurrent requests.",
);
pub static RULE_WINDOW: Metric =
    gauge("transom_rule_window_seconds", "Length of a typical window by rule, window and plan.");
pub static DRAINING: Metric =
    gauge("transom_draining", "Whether the gateway is stopping, or another process has taken over.");
static UPGRADES: Metric = counter("transom_upgrades_total", "Hot upgrades, by outcome.");
static ACCESS_LOG_LOST: Metric = counter(
    "transom_access_log_lost_total",
    "Access log lines that were lost, because the queue was full or the file could not be written.",
);
static SPANS: Metric = counter(
    "transom_spans_total",
    "Spans of traced requests: exported, dropped because the queue was full, or failed to be exported.",
);
static NOTIFY: Metric = counter(
    "transom_notify_total",
    "Keys that reached a mark of a limit, by what became of the notification: logged only, delivered, failed, dropped because \
     a queue was full, or sent by another gateway (duplicate).",
);
pub static COUNTERS: Metric = gauge("transom_counters", "Counters in the table: live ones, and free capacity.");
pub static OVERFLOW: Metric = counter(
    "transom_counters_overflow_total",
    "Decisions made by overflow counters because the counter table was full.",
);
static CONCURRENT_REQUESTS: Metric = gauge(
    "transom_concurrent_requests",
    "Requests in flight that hold a slot of a rule with a limit of concurrent requests.",
);
pub static DELAYED_REQUESTS: Metric =
    gauge("transom_delayed_requests", "Requests that wait for a later window or a slot, by the rule they wait for.");
pub static CLOCK_OFFSET: Metric = gauge("transom_clock_offset_seconds", "Gateway time minus the machine's wall clock.");
static SNAPSHOTS: Metric = counter("transom_counters_snapshots_total", "Snapshots of the counters, by outcome.");
static SNAPSHOT_TIME: Metric =
    gauge("transom_counters_snapshot_timestamp_seconds", "Time of the latest counter snapshot, Unix time in seconds.");
static ADMIN_REQUESTS: Metric =
    counter("transom_admin_requests_total", "Responses of the admin address and the metrics addresses, by page.");
static ACME_ORDERS: Metric =
    counter("transom_acme_orders_total", "Orders of certificates from an ACME authority, by outcome.");
static KEY_SET_FETCHES: Metric = counter("transom_jwks_fetches_total", "Fetches of the key set, by outcome.");
static KEY_SET_TIME: Metric = gauge(
    "transom_jwks_last_fetch_timestamp_seconds",
    "When the key set was last fetched successfully, Unix time in seconds.",
);
pub static REQUEST_ERRORS: Metric =
    counter("transom_request_errors_total", "Failed requests by error, including malformed ones.");
pub static BUILD_INFO: Metric = gauge("transom_build_info", "The running version; the value is 1.");

/// All metrics, in exposition order.
pub static NAMES: &[&Metric] = &[
    &REQUESTS,
    &REQUEST_DURATION,
    &REQUESTS_ACTIVE,
    &TRUNCATED,
    &DECISIONS,
    &REFUSED,
    &REFUNDED,
    &USAGE,
    &USAGE_MISSING,
    &DENIED,
    &CLIENT_REQUESTS,
    &CLIENT_USAGE,
    &DECISION_DURATION,
    &SERVICE_CALLS,
    &SERVICE_DESCRIPTORS,
    &RULE_LIMIT,
    &RULE_WINDOW,
    &CONCURRENT_REQUESTS,
    &DELAYED_REQUESTS,
    &UPSTREAM_REQUESTS,
    &UPSTREAM_DURATION,
    &upstream::REQUESTS_ACTIVE,
    &upstream::CONNECTIONS,
    &upstream::WAITING,
    &upstream::HELD,
    &upstream::UP,
    &upstream::EJECTED,
    &upstream::EJECTIONS,
    &upstream::CHECKS,
    &upstream::RETRIES,
    &upstream::SERVICE_LOOKUPS,
    &upstream::REFUSED,
    &CONNECTIONS,
    &ACCEPTED,
    &CONNECTIONS_REFUSED,
    &RECEIVED,
    &SENT,
    &TLS_HANDSHAKES,
    &CERTIFICATE_EXPIRY,
    &REVOCATION_EXPIRY,
    &HTTP2_ABUSE,
    &TUNNELS,
    &COUNTERS,
    &OVERFLOW,
    &CLOCK_OFFSET,
    &redis::REQUESTS,
    &redis::DURATION,
    &redis::OUTSTANDING,
    &redis::TOKENS,
    &redis::UNREACHABLE,
    &redis::EVICTING,
    &redis::OUTAGES,
    &redis::OUTAGE_DECISIONS,
    &redis::DATA_ENTRIES,
    &redis::DATA_CHANGED,
    &redis::DATA_SYNCHRONIZED,
    &redis::DATA_COPIED,
    &redis::DATA_COPY_ERRORS,
    &SNAPSHOTS,
    &SNAPSHOT_TIME,
    &ACME_ORDERS,
    &KEY_SET_FETCHES,
    &KEY_SET_TIME,
    &RELOADS,
    &RELOAD_SUCCESSFUL,
    &RELOAD_TIME,
    &UPGRADES,
    &DRAINING,
    &ACCESS_LOG_LOST,
    &SPANS,
    &NOTIFY,
    &REQUEST_ERRORS,
    &ADMIN_REQUESTS,
    &BUILD_INFO,
    &process::CPU,
    &process::RESIDENT_MEMORY,
    &process::VIRTUAL_MEMORY,
    &process::MAX_VIRTUAL_MEMORY,
    &process::START_TIME,
    &process::OPEN_FDS,
    &process::MAX_FDS,
    &process::THREADS,
];

/// Outcomes of a rule, in the order of `RouteCells::outcomes`.
pub const OUTCOMES: [&str; 5] = ["admitted", "refused", "delayed", "shadowed", "exempt"];

/// Metrics of one route in one worker.
#[derive(Clone, Debug)]
pub struct RouteMetrics(Arc<RouteCells>);

impl RouteMetrics {
    pub fn new(registry: &Registry, worker: WorkerId, route: &str, rules: &[&str]) -> RouteMetrics {
        RouteMetrics(registry.route(worker, route, rules))
    }

    pub fn request_ended(&self, code: u16, took: Duration) {
        self.0.request_ended(code, took);
    }

    /// Counts a request that one or more rules refuse.
    pub fn request_refused(&self) {
        self.0.refused.add(1);
    }

    pub fn admitted(&self, position: PlanPosition) {
        self.0.outcomes[position.index()][0].add(1);
    }

    pub fn refused(&self, position: PlanPosition) {
        self.0.outcomes[position.index()][1].add(1);
    }

    pub fn delayed(&self, position: PlanPosition) {
        self.0.outcomes[position.index()][2].add(1);
    }

    pub fn shadowed(&self, position: PlanPosition) {
        self.0.outcomes[position.index()][3].add(1);
    }

    pub fn exempt(&self, position: PlanPosition) {
        self.0.outcomes[position.index()][4].add(1);
    }
}

/// Refusals by the limits of a list of rules, in one worker.
#[derive(Clone, Debug)]
pub struct WindowMetrics<I>(IdVec<I, IdVec<LimitNameId, Arc<MetricCell>>>);

impl<I: Handle> WindowMetrics<I> {
    /// `rules` are rule names, each with the names of its limits, and last that of its limit of requests in flight, if it has one.
    pub fn new(registry: &Registry, worker: WorkerId, rules: &[(&str, Vec<&str>)]) -> WindowMetrics<I> {
        let rule = |(rule, limits): &(&str, Vec<&str>)| {
            limits.iter().map(|limit| registry.cell(&REFUSED, worker, &[("rule", rule), ("window", limit)])).collect()
        };
        WindowMetrics(rules.iter().map(rule).collect())
    }

    pub fn refused_by(&self, rule: I, limit: LimitNameId) {
        self.0[rule][limit].add(1);
    }

    /// By a rule that limits the requests in flight.
    pub fn refused_by_slots(&self, rule: I) {
        self.0[rule].iter().last().iter().for_each(|cell| cell.add(1));
    }
}

/// Decisions asked for from outside, by rule of the rule set.
#[derive(Debug)]
pub struct DecisionMetrics {
    /// By rule, in the order of [`OUTCOMES`].
    outcomes: IdVec<RuleId, [Arc<MetricCell>; OUTCOMES.len()]>,
    windows: WindowMetrics<RuleId>,
}

impl DecisionMetrics {
    /// `route`: the name that stands for the source of the queries; `rules` as for [`WindowMetrics::new`].
    pub fn new(registry: &Registry, worker: WorkerId, route: &str, rules: &[(&str, Vec<&str>)]) -> DecisionMetrics {
        let cells = |(rule, _): &(&str, Vec<&str>)| {
            OUTCOMES.map(|outcome| {
                registry.cell(&DECISIONS, worker, &[("route", route), ("rule", rule), ("outcome", outcome)])
            })
        };
        let outcomes = rules.iter().map(cells).collect();
        DecisionMetrics { outcomes, windows: WindowMetrics::new(registry, worker, rules) }
    }

    pub fn admitted(&self, rule: RuleId) {
        self.outcomes[rule][0].add(1);
    }

    pub fn refused(&self, rule: RuleId) {
        self.outcomes[rule][1].add(1);
    }

    pub fn delayed(&self, rule: RuleId) {
        self.outcomes[rule][2].add(1);
    }

    pub fn shadowed(&self, rule: RuleId) {
        self.outcomes[rule][3].add(1);
    }

    pub fn exempt(&self, rule: RuleId) {
        self.outcomes[rule][4].add(1);
    }

    /// As [`WindowMetrics::refused_by`].
    pub fn refused_by(&self, rule: RuleId, limit: LimitNameId) {
        self.windows.refused_by(rule, limit);
    }
}

/// Calls of the rate limit service, in one worker.
#[derive(Debug)]
pub struct RatelimitServiceMetrics {
    ok: Arc<MetricCell>,
    over_limit: Arc<MetricCell>,
    health: Arc<MetricCell>,
    reflection: Arc<MetricCell>,
    /// Requests that are no gRPC calls.
    not_grpc: Arc<MetricCell>,
    /// By gRPC status.
    failed: Vec<(u8, Arc<MetricCell>)>,
    /// Descriptors that no rule answers to.
    unmatched: Arc<MetricCell>,
    /// Descriptors with negative hits, or with a limit that cannot be applied.
    ignored: Arc<MetricCell>,
}

impl RatelimitServiceMetrics {
    /// `statuses`: the gRPC statuses of failed calls, with their names.
    pub fn new(registry: &Registry, worker: WorkerId, statuses: &[(u8, &str)]) -> RatelimitServiceMetrics {
        let call = |result| registry.cell(&SERVICE_CALLS, worker, &[("result", result)]);
        let descriptor = |outcome| registry.cell(&SERVICE_DESCRIPTORS, worker, &[("outcome", outcome)]);
        RatelimitServiceMetrics {
            ok: call("ok"),
            over_limit: call("over_limit"),
            health: call("health"),
            reflection: call("reflection"),
            not_grpc: call("not_grpc"),
            failed: statuses.iter().map(|(code, name)| (*code, call(name))).collect(),
            unmatched: descriptor("unmatched"),
            ignored: descriptor("ignored"),
        }
    }

    pub fn answered(&self, is_over_limit: bool) {
        if is_over_limit { self.over_limit.add(1) } else { self.ok.add(1) }
    }

    pub fn health_told(&self) {
        self.health.add(1);
    }

    pub fn reflected(&self) {
        self.reflection.add(1);
    }

    pub fn not_grpc(&self) {
        self.not_grpc.add(1);
    }

    pub fn failed(&self, code: u8) {
        self.failed.iter().filter(|(known, _)| *known == code).for_each(|(_, cell)| cell.add(1));
    }

    pub fn unmatched(&self) {
        self.unmatched.add(1);
    }

    pub fn ignored(&self) {
        self.ignored.add(1);
    }
}

/// Requests of one worker that hold a slot of one rule.
#[derive(Clone, Debug)]
pub struct ConcurrencyGauge(Arc<MetricCell>);

impl ConcurrencyGauge {
    pub fn new(registry: &Registry, worker: WorkerId, rule: &str) -> ConcurrencyGauge {
        ConcurrencyGauge(registry.cell(&CONCURRENT_REQUESTS, worker, &[("rule", rule)]))
    }

    pub fn acquired(&self) {
        self.0.add(1);
    }

    pub fn released(&self) {
        self.0.sub(1);
    }
}

/// Requests of one worker that wait because of one rule.
#[derive(Debug)]
pub struct DelayGauge(Arc<MetricCell>);

impl DelayGauge {
    pub fn new(registry: &Registry, worker: WorkerId, rule: &str) -> DelayGauge {
        DelayGauge(registry.cell(&DELAYED_REQUESTS, worker, &[("rule", rule)]))
    }

    /// Counts a request until the result is dropped.
    pub fn count(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0)
    }
}

/// Requests of one worker that one rule does not count because of their response.
#[derive(Debug)]
pub struct RefundCounter(Arc<MetricCell>);

impl RefundCounter {
    pub fn new(registry: &Registry, worker: WorkerId, rule: &str) -> RefundCounter {
        RefundCounter(registry.cell(&REFUNDED, worker, &[("rule", rule)]))
    }

    pub fn refunded(&self) {
        self.0.add(1);
    }
}

/// Counters of the usage of one route that differ in one label, in one worker: one for each of its values, in their order.
#[derive(Debug)]
pub struct UsageCounters(Vec<Arc<MetricCell>>);

impl UsageCounters {
    /// Usage that responses state, by kind.
    pub fn of_kinds(
        (registry, worker): (&Registry, WorkerId),
        route: &str,
        rule: &str,
        kinds: &[&str],
    ) -> UsageCounters {
        let cell = |kind: &&str| registry.cell(&USAGE, worker, &[("route", route), ("rule", rule), ("kind", kind)]);
        UsageCounters(kinds.iter().map(cell).collect())
    }

    /// Responses that state no usage, by reason.
    pub fn of_missing((registry, worker): (&Registry, WorkerId), route: &str, reasons: &[&str]) -> UsageCounters {
        let cell = |reason: &&str| registry.cell(&USAGE_MISSING, worker, &[("route", route), ("reason", reason)]);
        UsageCounters(reasons.iter().map(cell).collect())
    }

    /// Adds an amount for each value of the label.
    pub fn add(&self, amounts: impl IntoIterator<Item = u64>) {
        self.0.iter().zip(amounts).for_each(|(cell, amount)| cell.add(amount));
    }
}

/// Denied requests by deny entry, in one worker.
#[derive(Debug)]
pub struct DenialMetrics {
    registry: Arc<Registry>,
    worker: WorkerId,
    /// Of the entries that have denied a request.
    cells: RefCell<BTreeMap<String, Arc<MetricCell>>>,
}

/// Deny entries that are counted apart.
const DENIED_MAX: usize = 100;

impl DenialMetrics {
    /// Keeps the cells of `previous` for entries that there still are.
    pub fn new(
        registry: &Arc<Registry>,
        worker: WorkerId,
        previous: Option<&DenialMetrics>,
        is_entry: impl Fn(&str) -> bool,
    ) -> DenialMetrics {
        let kept = previous.map(|previous| previous.cells.borrow().clone()).unwrap_or_default();
        let kept = kept.into_iter().filter(|(entry, _)| is_entry(entry)).collect();
        DenialMetrics { registry: Arc::clone(registry), worker, cells: RefCell::new(kept) }
    }

    /// Drops the cells of entries that there no longer are.
    pub fn keep(&self, is_entry: impl Fn(&str) -> bool) {
        self.cells.borrow_mut().retain(|entry, _| is_entry(entry));
    }

    pub fn denied(&self, entry: &str) {
        let mut cells = self.cells.borrow_mut();
        if !cells.contains_key(entry) {
            let cell = self.registry.bounded_cell(&DENIED, self.worker, ("entry", entry), DENIED_MAX);
            cells.insert(entry.to_owned(), cell);
        }
        cells[entry].add(1);
    }
}

/// How a request to an upstream server ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamOutcome {
    Responded,
    ConnectFailed,
    Failed,
    TimedOut,
    /// The client canceled the request, or its body broke off.
    Canceled,
}

impl UpstreamOutcome {
    const NAMES: [&str; 5] = ["responded", "connect_failed", "failed", "timed_out", "canceled"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Metrics of one upstream in one worker.
#[derive(Debug)]
pub struct UpstreamMetrics<I> {
    pub retries: upstream::RetryMetrics,
    duration: Arc<Histogram>,
    /// By server, then by outcome.
    servers: IdVec<I, [Arc<MetricCell>; 5]>,
}

impl<I: Handle> UpstreamMetrics<I> {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str, servers: &[&str]) -> UpstreamMetrics<I> {
        let cells = |server: &&str| {
            UpstreamOutcome::NAMES.map(|outcome| {
                registry.cell(
                    &UPSTREAM_REQUESTS,
                    worker,
                    &[("upstream", upstream), ("server", server), ("outcome", outcome)],
                )
            })
        };
        UpstreamMetrics {
            retries: upstream::RetryMetrics::new(registry, worker, upstream),
            duration: registry.histogram(&UPSTREAM_DURATION, worker, &[("upstream", upstream)]),
            servers: servers.iter().map(cells).collect(),
        }
    }

    pub fn request_ended(&self, server: I, outcome: UpstreamOutcome) {
        let index = match outcome {
            UpstreamOutcome::Responded => 0,
            UpstreamOutcome::ConnectFailed => 1,
            UpstreamOutcome::Failed => 2,
            UpstreamOutcome::TimedOut => 3,
            UpstreamOutcome::Canceled => 4,
        };
        self.servers[server][index].add(1);
    }

    pub fn responded_in(&self, took: Duration) {
        self.duration.record(took);
    }
}

/// Kinds of misbehaviour on an HTTP/2 connection; values of the label `kind`.
const HTTP2_ABUSES: [&str; 10] = [
    "reset",
    "ping",
    "settings",
    "priority",
    "window_update",
    "empty_data",
    "continuation",
    "bad_request",
    "unknown",
    "protocol_error",
];

/// Metrics of one worker that belong to no route.
#[derive(Debug)]
pub struct WorkerMetrics<E> {
    http2_abuse: [Arc<MetricCell>; HTTP2_ABUSES.len()],
    tunnels: Arc<MetricCell>,
    requests_active: Arc<MetricCell>,
    truncated: Arc<MetricCell>,
    decision: Arc<Histogram>,
    access_log_lost: Arc<MetricCell>,
    /// By kind of error.
    request_errors: IdVec<E, Arc<MetricCell>>,
}

impl<E: Handle> WorkerMetrics<E> {
    /// `errors` are the values of the label `error`.
    pub fn new(registry: &Registry, worker: WorkerId, errors: impl Iterator<Item = &'static str>) -> WorkerMetrics<E> {
        WorkerMetrics {
            http2_abuse: HTTP2_ABUSES.map(|kind| registry.cell(&HTTP2_ABUSE, worker, &[("kind", kind)])),
            tunnels: registry.cell(&TUNNELS, worker, &[]),
            requests_active: registry.cell(&REQUESTS_ACTIVE, worker, &[]),
            truncated: registry.cell(&TRUNCATED, worker, &[]),
            decision: registry.histogram(&DECISION_DURATION, worker, &[]),
            access_log_lost: registry.cell(&ACCESS_LOG_LOST, worker, &[]),
            request_errors: errors.map(|kind| registry.cell(&REQUEST_ERRORS, worker, &[("error", kind)])).collect(),
        }
    }

    /// Unknown kinds are ignored.
    pub fn http2_abuse(&self, kind: &str) {
        let known = HTTP2_ABUSES.iter().position(|known| *known == kind);
        known.into_iter().for_each(|kind| self.http2_abuse[kind].add(1));
    }

    pub fn tunnel_opened(&self) {
        self.tunnels.add(1);
    }

    pub fn tunnel_ended(&self) {
        self.tunnels.sub(1);
    }

    pub fn request_began(&self) {
        self.requests_active.add(1);
    }

    pub fn request_ended(&self) {
        self.requests_active.sub(1);
    }

    pub fn response_truncated(&self) {
        self.truncated.add(1);
    }

    pub fn decision_took(&self, took: Duration) {
        self.decision.record(took);
    }

    pub fn access_log_lost(&self, lines: u64) {
        self.access_log_lost.add(lines);
    }

    pub fn request_error(&self, kind: E) {
        self.request_errors[kind].add(1);
    }
}

/// Why a connection was closed before its first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectionRefusal {
    MaxConnections,
    MaxConnectionsPerClient,
    /// The PROXY header is missing or malformed.
    ProxyHeader,
    ProxyHeaderTimeout,
    /// Cleartext HTTP on a TLS listener.
    Cleartext,
    Handshake,
    HandshakeTimeout,
}

const REFUSAL_REASONS: [&str; 7] = [
    "max_connections",
    "max_connections_per_client",
    "proxy_protocol",
    "proxy_protocol_timeout",
    "cleartext",
    "tls_handshake",
    "tls_handshake_timeout",
];

/// Bytes of the clients of one listener in one worker.
#[derive(Debug)]
pub struct ByteCounters {
    received: Arc<MetricCell>,
    sent: Arc<MetricCell>,
}

impl ByteCounters {
    pub fn received(&self, bytes: usize) {
        self.received.add(bytes as u64);
    }

    pub fn sent(&self, bytes: usize) {
        self.sent.add(bytes as u64);
    }
}

/// Metrics of one listener in one worker.
#[derive(Debug)]
pub struct ListenerMetrics {
    open: Arc<MetricCell>,
    accepted: Arc<MetricCell>,
    pub bytes: Rc<ByteCounters>,
    /// By reason.
    refusals: [Arc<MetricCell>; REFUSAL_REASONS.len()],
    /// Full handshakes and resumed sessions.
    handshakes: Option<[Arc<MetricCell>; 2]>,
}

impl ListenerMetrics {
    /// `listener` is the address as configured.
    pub fn new(registry: &Registry, worker: WorkerId, listener: &str, is_secure: bool) -> ListenerMetrics {
        let handshakes =
            |outcome| registry.cell(&TLS_HANDSHAKES, worker, &[("listener", listener), ("outcome", outcome)]);
        ListenerMetrics {
            open: registry.cell(&CONNECTIONS, worker, &[("listener", listener)]),
            accepted: registry.cell(&ACCEPTED, worker, &[("listener", listener)]),
            bytes: Rc::new(ByteCounters {
                received: registry.cell(&RECEIVED, worker, &[("listener", listener)]),
                sent: registry.cell(&SENT, worker, &[("listener", listener)]),
            }),
            refusals: REFUSAL_REASONS.map(|reason| registry.cell(&CONNECTIONS_REFUSED, worker, &[("reason", reason)])),
            handshakes: is_secure.then(|| ["full", "resumed"].map(handshakes)),
        }
    }

    pub fn accepted(&self) {
        self.accepted.add(1);
    }

    pub fn connected(&self) {
        self.open.add(1);
    }

    pub fn disconnected(&self) {
        self.open.sub(1);
    }

    pub fn refused(&self, why: ConnectionRefusal) {
        let index = match why {
            ConnectionRefusal::MaxConnections => 0,
            ConnectionRefusal::MaxConnectionsPerClient => 1,
            ConnectionRefusal::ProxyHeader => 2,
            ConnectionRefusal::ProxyHeaderTimeout => 3,
            ConnectionRefusal::Cleartext => 4,
            ConnectionRefusal::Handshake => 5,
            ConnectionRefusal::HandshakeTimeout => 6,
        };
        self.refusals[index].add(1);
    }

    pub fn handshake(&self, resumed: bool) {
        if let Some(handshakes) = &self.handshakes {
            handshakes[usize::from(resumed)].add(1);
        }
    }
}

/// Expiry gauges of certificates and revocation lists; they disappear when this is dropped.
#[derive(Debug, Default)]
pub struct ExpiryGauges {
    _cells: Vec<Arc<MetricCell>>,
}

impl ExpiryGauges {
    /// Files as configured with their expiry in Unix seconds. Replaces all earlier values.
    pub fn new<'c>(
        registry: &Registry,
        certificates: impl IntoIterator<Item = (&'c str, i64)>,
        lists: impl IntoIterator<Item = (&'c str, i64)>,
    ) -> ExpiryGauges {
        let mut cells = expiry_cells(registry, &CERTIFICATE_EXPIRY, "certificate", certificates);
        cells.extend(expiry_cells(registry, &REVOCATION_EXPIRY, "list", lists));
        ExpiryGauges { _cells: cells }
    }
}

fn expiry_cells<'c>(
    registry: &Registry,
    name: &Metric,
    label: &'static str,
    all: impl IntoIterator<Item = (&'c str, i64)>,
) -> Vec<Arc<MetricCell>> {
    registry.remove(name);
    let mut cells = Vec::new();
    for (file, end_s) in all {
        let cell = registry.cell(name, WorkerId::PROCESS, &[(label, file)]);
        let end_s = u64::try_from(end_s).unwrap_or(0);
        let known_s = cell.get();
        // A file that is named twice, or that holds several certificates, has one series: the earliest expiry.
        if known_s == 0 || end_s < known_s {
            cell.sub(known_s);
            cell.add(end_s);
        }
        cells.push(cell);
    }
    cells
}

/// Lost lines of one access log writer.
#[derive(Debug)]
pub struct AccessLogMetrics(Arc<MetricCell>);

impl AccessLogMetrics {
    /// `nth`: number of earlier writers, so that each has its own cell.
    pub fn new(registry: &Registry, nth: usize) -> AccessLogMetrics {
        AccessLogMetrics(registry.cell(&ACCESS_LOG_LOST, WorkerId::of_thread(nth), &[]))
    }

    pub fn lost(&self, lines: u64) {
        self.0.add(lines);
    }
}

/// The spans that an exporter has taken from its queue.
#[derive(Debug)]
pub struct SpanMetrics {
    exported: Arc<MetricCell>,
    failed: Arc<MetricCell>,
}

impl SpanMetrics {
    /// `nth`: number of earlier exporters, so that each has its own cells.
    pub fn new(registry: &Registry, nth: usize) -> SpanMetrics {
        let cell = |outcome| registry.cell(&SPANS, WorkerId::of_thread(nth), &[("outcome", outcome)]);
        SpanMetrics { exported: cell("exported"), failed: cell("failed") }
    }

    pub fn exported(&self, spans: usize) {
        self.exported.add(spans as u64);
    }

    pub fn failed(&self, spans: usize) {
        self.failed.add(spans as u64);
    }
}

/// The spans of one worker that did not fit into the queue.
#[derive(Debug)]
pub struct DroppedSpans(Arc<MetricCell>);

impl DroppedSpans {
    pub fn new(registry: &Registry, worker: WorkerId) -> DroppedSpans {
        DroppedSpans(registry.cell(&SPANS, worker, &[("outcome", "dropped")]))
    }

    pub fn add(&self, spans: usize) {
        self.0.add(spans as u64);
    }
}

/// Notifications about keys near their limits. The function of each outcome counts one.
#[derive(Debug)]
pub struct NotifyMetrics {
    logged: Arc<MetricCell>,
    delivered: Arc<MetricCell>,
    failed: Arc<MetricCell>,
    duplicate: Arc<MetricCell>,
    dropped: DroppedMarks,
}

impl NotifyMetrics {
    /// `nth`: number of earlier senders, so that each has its own cells.
    pub fn new(registry: &Registry, nth: usize) -> NotifyMetrics {
        let owner = WorkerId::of_thread(nth);
        let cell = |outcome| registry.cell(&NOTIFY, owner, &[("outcome", outcome)]);
        NotifyMetrics {
            logged: cell("logged"),
            delivered: cell("delivered"),
            failed: cell("failed"),
            duplicate: cell("duplicate"),
            dropped: DroppedMarks::new(registry, owner),
        }
    }

    pub fn logged(&self) {
        self.logged.add(1);
    }

    pub fn delivered(&self) {
        self.delivered.add(1);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }

    pub fn duplicate(&self) {
        self.duplicate.add(1);
    }

    pub fn dropped(&self) {
        self.dropped.add();
    }
}

/// Notifications that did not fit into a queue, counted by one thread.
#[derive(Debug)]
pub struct DroppedMarks(Arc<MetricCell>);

impl DroppedMarks {
    pub fn new(registry: &Registry, owner: WorkerId) -> DroppedMarks {
        DroppedMarks(registry.cell(&NOTIFY, owner, &[("outcome", "dropped")]))
    }

    pub fn add(&self) {
        self.0.add(1);
    }
}

/// Responses of the admin address and the metrics addresses.
#[derive(Debug)]
pub struct AdminMetrics {
    registry: Arc<Registry>,
    owner: WorkerId,
    responses: RefCell<BTreeMap<(&'static str, u16), Arc<MetricCell>>>,
    refused: Arc<MetricCell>,
}

impl AdminMetrics {
    pub fn new(registry: &Arc<Registry>, owner: WorkerId) -> AdminMetrics {
        AdminMetrics {
            registry: Arc::clone(registry),
            owner,
            responses: RefCell::default(),
            refused: registry.cell(&CONNECTIONS_REFUSED, owner, &[("reason", "max_admin_connections")]),
        }
    }

    /// `endpoint` must not come from the request.
    pub fn responded(&self, endpoint: &'static str, code: u16) {
        let mut responses = self.responses.borrow_mut();
        let cell = responses.entry((endpoint, code)).or_insert_with(|| {
            let labels = [("endpoint", endpoint), ("code", &*code.to_string())];
            self.registry.cell(&ADMIN_REQUESTS, self.owner, &labels)
        });
        cell.add(1);
    }

    pub fn connection_refused(&self) {
        self.refused.add(1);
    }
}

/// Reloads of the process.
#[derive(Debug)]
pub struct ReloadMetrics {
    registry: Arc<Registry>,
    applied: Arc<MetricCell>,
    refused: Arc<MetricCell>,
    is_last_successful: Arc<MetricCell>,
    latest_s: Arc<MetricCell>,
}

impl ReloadMetrics {
    /// The process has begun to use its first configuration at `now_ms`, Unix milliseconds.
    pub fn new(registry: &Arc<Registry>, now_ms: u64) -> ReloadMetrics {
        let cell = |outcome| registry.cell(&RELOADS, WorkerId::PROCESS, &[("outcome", outcome)]);
        let reloads = ReloadMetrics {
            registry: Arc::clone(registry),
            applied: cell("applied"),
            refused: cell("refused"),
            is_last_successful: registry.cell(&RELOAD_SUCCESSFUL, WorkerId::PROCESS, &[]),
            latest_s: registry.cell(&RELOAD_TIME, WorkerId::PROCESS, &[]),
        };
        reloads.is_last_successful.set(1);
        reloads.latest_s.set(now_ms / 1000);
        reloads
    }

    pub fn applied(&self, now_ms: u64) {
        self.registry.reload_log.add(now_ms, None);
        self.latest_s.set(now_ms / 1000);
        self.is_last_successful.set(1);
        self.applied.add(1);
    }

    /// `problem` is the reason for the operator.
    pub fn refused(&self, now_ms: u64, problem: &str) {
        self.registry.reload_log.add(now_ms, Some(problem));
        self.is_last_successful.set(0);
        self.refused.add(1);
    }
}

/// Counter snapshots of the process.
#[derive(Debug)]
pub struct SnapshotMetrics {
    registry: Arc<Registry>,
    written: Arc<MetricCell>,
    failed: Arc<MetricCell>,
    latest_s: OnceLock<Arc<MetricCell>>,
}

impl SnapshotMetrics {
    pub fn new(registry: &Arc<Registry>) -> SnapshotMetrics {
        let cell = |outcome| registry.cell(&SNAPSHOTS, WorkerId::PROCESS, &[("outcome", outcome)]);
        SnapshotMetrics {
            written: cell("written"),
            failed: cell("failed"),
            latest_s: OnceLock::new(),
            registry: Arc::clone(registry),
        }
    }

    pub fn written(&self, now_ms: u64) {
        self.written.add(1);
        // The series appears with the first snapshot.
        let latest_s = self.latest_s.get_or_init(|| self.registry.cell(&SNAPSHOT_TIME, WorkerId::PROCESS, &[]));
        latest_s.sub(latest_s.get());
        latest_s.add(now_ms / 1000);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}

/// Fetches of a key set.
pub struct KeySetMetrics {
    registry: Arc<Registry>,
    fetched: Arc<MetricCell>,
    failed: Arc<MetricCell>,
    invalid: Arc<MetricCell>,
    latest_s: OnceLock<Arc<MetricCell>>,
}

impl KeySetMetrics {
    /// `fetcher` is the number of the thread that fetches.
    pub fn new(registry: &Arc<Registry>, fetcher: WorkerId) -> KeySetMetrics {
        let cell = |outcome| registry.cell(&KEY_SET_FETCHES, fetcher, &[("outcome", outcome)]);
        KeySetMetrics {
            fetched: cell("fetched"),
            failed: cell("failed"),
            invalid: cell("invalid"),
            latest_s: OnceLock::new(),
            registry: Arc::clone(registry),
        }
    }

    pub fn fetched(&self, now_ms: u64) {
        self.fetched.add(1);
        // The series appears with the first success.
        self.latest_s.get_or_init(|| self.registry.cell(&KEY_SET_TIME, WorkerId::PROCESS, &[])).set(now_ms / 1000);
    }

    /// There was no response, or a wrong one.
    pub fn failed(&self) {
        self.failed.add(1);
    }

    /// The response was no usable key set.
    pub fn invalid(&self) {
        self.invalid.add(1);
    }
}

/// The orders of one certificate from an ACME authority.
pub struct AcmeMetrics {
    registry: Arc<Registry>,
    /// The first name of the certificate.
    name: String,
    issued: Arc<MetricCell>,
    failed: Arc<MetricCell>,
    /// Kept so that the series is not removed as unused.
    expiry: RefCell<Option<Arc<MetricCell>>>,
}

impl AcmeMetrics {
    pub fn new(registry: &Arc<Registry>, name: &str) -> AcmeMetrics {
        let cell =
            |outcome| registry.cell(&ACME_ORDERS, WorkerId::PROCESS, &[("certificate", name), ("outcome", outcome)]);
        let (issued, failed) = (cell("issued"), cell("failed"));
        AcmeMetrics {
            registry: Arc::clone(registry),
            name: name.to_owned(),
            issued,
            failed,
            expiry: RefCell::default(),
        }
    }

    pub fn issued(&self) {
        self.issued.add(1);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }

    /// The certificate in use expires at this time, Unix seconds. Repeated, because a reload removes the series.
    pub fn in_use(&self, not_after_s: i64) {
        let certificate = format!("acme:{}", self.name);
        let cell = self.registry.cell(&CERTIFICATE_EXPIRY, WorkerId::PROCESS, &[("certificate", &certificate)]);
        cell.set(u64::try_from(not_after_s).unwrap_or(0));
        self.expiry.replace(Some(cell));
    }
}

/// Hot upgrades. The new process counts successes, the old one failures.
#[derive(Debug)]
pub struct UpgradeMetrics {
    taken_over: Arc<MetricCell>,
    failed: Arc<MetricCell>,
}

impl UpgradeMetrics {
    pub fn new(registry: &Registry) -> UpgradeMetrics {
        let cell = |outcome| registry.cell(&UPGRADES, WorkerId::PROCESS, &[("outcome", outcome)]);
        UpgradeMetrics { taken_over: cell("taken_over"), failed: cell("failed") }
    }

    pub fn taken_over(&self) {
        self.taken_over.add(1);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}
