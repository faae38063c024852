//! The metrics of requests, connections and the process: their names and help texts, and one function per event.
//!
//! A worker makes its metric objects when it takes over a configuration; counting then needs no look-up.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::storage::{Histogram, MetricCell, RouteCells};
use super::{Metric, Registry, WorkerId, counter, gauge, histogram, redis, upstream};

pub static REQUESTS: Metric = counter(
    "transom_requests_total",
    "Requests by route and status code of the response; 499: the client closed the connection.",
);
pub static REQUEST_DURATION: Metric =
    histogram("transom_request_duration_seconds", "Time from the head of a request to the end of its response.");
pub static DECISIONS: Metric = counter("transom_decisions_total", "Decisions by route, rule and outcome.");
static REFUSED: Metric = counter("transom_refused_total", "Refused requests by rule and exhausted window.");
static REFUNDED: Metric = counter(
    "transom_refunded_total",
    "Requests whose tokens were refunded because their response does not match count_when, by rule.",
);
static DECISION_DURATION: Metric =
    histogram("transom_decision_duration_seconds", "Time to decide a request, without waiting for the shared store.");
static UPSTREAM_REQUESTS: Metric =
    counter("transom_upstream_requests_total", "Requests sent to upstream servers, by outcome.");
static UPSTREAM_DURATION: Metric =
    histogram("transom_upstream_duration_seconds", "Time from sending a request to the head of the upstream response.");
static CONNECTIONS: Metric = gauge("transom_connections", "Open client connections.");
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
static UPGRADES: Metric = counter("transom_upgrades_total", "Hot upgrades, by outcome.");
static ACCESS_LOG_LOST: Metric = counter(
    "transom_access_log_lost_total",
    "Access log lines that were lost, because the queue was full or the file could not be written.",
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
pub static CLOCK_OFFSET: Metric = gauge("transom_clock_offset_seconds", "Gateway time minus the machine's wall clock.");
static SNAPSHOTS: Metric = counter("transom_counters_snapshots_total", "Snapshots of the counters, by outcome.");
static SNAPSHOT_TIME: Metric =
    gauge("transom_counters_snapshot_timestamp_seconds", "Time of the latest counter snapshot, Unix time in seconds.");
static REQUEST_ERRORS: Metric =
    counter("transom_request_errors_total", "Failed requests by error, including malformed ones.");
pub static BUILD_INFO: Metric = gauge("transom_build_info", "The running version; the value is 1.");

/// All metrics, in exposition order.
pub static NAMES: [&Metric; 41] = [
    &REQUESTS,
    &REQUEST_DURATION,
    &DECISIONS,
    &REFUSED,
    &REFUNDED,
    &DECISION_DURATION,
    &CONCURRENT_REQUESTS,
    &UPSTREAM_REQUESTS,
    &UPSTREAM_DURATION,
    &upstream::REQUESTS_ACTIVE,
    &upstream::UP,
    &upstream::EJECTED,
    &upstream::EJECTIONS,
    &upstream::CHECKS,
    &upstream::RETRIES,
    &upstream::REFUSED,
    &CONNECTIONS,
    &CONNECTIONS_REFUSED,
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
    &SNAPSHOTS,
    &SNAPSHOT_TIME,
    &RELOADS,
    &UPGRADES,
    &ACCESS_LOG_LOST,
    &REQUEST_ERRORS,
    &BUILD_INFO,
];

/// Outcomes of a rule, in the order of `RouteCells::outcomes`.
pub const OUTCOMES: [&str; 4] = ["admitted", "refused", "delayed", "shadowed"];

/// Metrics of one route in one worker.
#[derive(Debug)]
pub struct RouteMetrics(Arc<RouteCells>);

impl RouteMetrics {
    pub fn new(registry: &Registry, worker: WorkerId, route: &str, rules: &[&str]) -> RouteMetrics {
        RouteMetrics(registry.route(worker, route, rules))
    }

    pub fn request_ended(&self, code: u16, took: Duration) {
        self.0.codes.count(code);
        self.0.duration.record(took);
    }

    /// `rule` is the position in the route's list.
    pub fn admitted(&self, rule: usize) {
        self.0.outcomes[rule][0].add(1);
    }

    pub fn refused(&self, rule: usize) {
        self.0.outcomes[rule][1].add(1);
    }

    pub fn delayed(&self, rule: usize) {
        self.0.outcomes[rule][2].add(1);
    }

    pub fn shadowed(&self, rule: usize) {
        self.0.outcomes[rule][3].add(1);
    }
}

/// Refusals by the limits of a list of rules, in one worker.
#[derive(Debug)]
pub struct WindowMetrics(Vec<Vec<Arc<MetricCell>>>);

impl WindowMetrics {
    /// `rules` are rule names, each with the names of its limits.
    pub fn new(registry: &Registry, worker: WorkerId, rules: &[(&str, Vec<&str>)]) -> WindowMetrics {
        let rule = |(rule, limits): &(&str, Vec<&str>)| {
            limits.iter().map(|limit| registry.cell(&REFUSED, worker, &[("rule", rule), ("window", limit)])).collect()
        };
        WindowMetrics(rules.iter().map(rule).collect())
    }

    pub fn refused(&self, rule: usize, limit: usize) {
        self.0[rule][limit].add(1);
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

/// Metrics of one upstream in one worker.
#[derive(Debug)]
pub struct UpstreamMetrics {
    duration: Arc<Histogram>,
    /// By server, then by outcome.
    servers: Vec<[Arc<MetricCell>; 5]>,
}

impl UpstreamMetrics {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str, servers: &[&str]) -> UpstreamMetrics {
        let cells = |server: &&str| {
            ["responded", "connect_failed", "failed", "timed_out", "canceled"].map(|outcome| {
                registry.cell(
                    &UPSTREAM_REQUESTS,
                    worker,
                    &[("upstream", upstream), ("server", server), ("outcome", outcome)],
                )
            })
        };
        UpstreamMetrics {
            duration: registry.histogram(&UPSTREAM_DURATION, worker, &[("upstream", upstream)]),
            servers: servers.iter().map(cells).collect(),
        }
    }

    pub fn request_ended(&self, server: usize, outcome: UpstreamOutcome) {
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
pub struct WorkerMetrics {
    http2_abuse: [Arc<MetricCell>; HTTP2_ABUSES.len()],
    tunnels: Arc<MetricCell>,
    decision: Arc<Histogram>,
    access_log_lost: Arc<MetricCell>,
    /// By `RequestError::kind`.
    request_errors: Vec<Arc<MetricCell>>,
}

impl WorkerMetrics {
    /// `errors` are the values of the label `error`.
    pub fn new(registry: &Registry, worker: WorkerId, errors: &[&str]) -> WorkerMetrics {
        WorkerMetrics {
            http2_abuse: HTTP2_ABUSES.map(|kind| registry.cell(&HTTP2_ABUSE, worker, &[("kind", kind)])),
            tunnels: registry.cell(&TUNNELS, worker, &[]),
            decision: registry.histogram(&DECISION_DURATION, worker, &[]),
            access_log_lost: registry.cell(&ACCESS_LOG_LOST, worker, &[]),
            request_errors: errors
                .iter()
                .map(|kind| registry.cell(&REQUEST_ERRORS, worker, &[("error", kind)]))
                .collect(),
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

    pub fn decision_took(&self, took: Duration) {
        self.decision.record(took);
    }

    pub fn access_log_lost(&self, lines: u64) {
        self.access_log_lost.add(lines);
    }

    /// `kind` is the position of the error's name.
    pub fn request_error(&self, kind: usize) {
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

/// Metrics of one listener in one worker.
#[derive(Debug)]
pub struct ListenerMetrics {
    open: Arc<MetricCell>,
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
            refusals: REFUSAL_REASONS.map(|reason| registry.cell(&CONNECTIONS_REFUSED, worker, &[("reason", reason)])),
            handshakes: is_secure.then(|| ["full", "resumed"].map(handshakes)),
        }
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
        let cell = registry.cell(name, WorkerId::MAX, &[(label, file)]);
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
        AccessLogMetrics(registry.cell(&ACCESS_LOG_LOST, WorkerId::MAX - 1 - nth, &[]))
    }

    pub fn lost(&self, lines: u64) {
        self.0.add(lines);
    }
}

/// Reloads of the process.
#[derive(Debug)]
pub struct ReloadMetrics {
    applied: Arc<MetricCell>,
    refused: Arc<MetricCell>,
}

impl ReloadMetrics {
    pub fn new(registry: &Registry) -> ReloadMetrics {
        let cell = |outcome| registry.cell(&RELOADS, WorkerId::MAX, &[("outcome", outcome)]);
        ReloadMetrics { applied: cell("applied"), refused: cell("refused") }
    }

    pub fn applied(&self) {
        self.applied.add(1);
    }

    pub fn refused(&self) {
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
        let cell = |outcome| registry.cell(&SNAPSHOTS, WorkerId::MAX, &[("outcome", outcome)]);
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
        let latest_s = self.latest_s.get_or_init(|| self.registry.cell(&SNAPSHOT_TIME, WorkerId::MAX, &[]));
        latest_s.sub(latest_s.get());
        latest_s.add(now_ms / 1000);
    }

    pub fn failed(&self) {
        self.failed.add(1);
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
        let cell = |outcome| registry.cell(&UPGRADES, WorkerId::MAX, &[("outcome", outcome)]);
        UpgradeMetrics { taken_over: cell("taken_over"), failed: cell("failed") }
    }

    pub fn taken_over(&self) {
        self.taken_over.add(1);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}
