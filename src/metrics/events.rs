//! The events that are counted: one function each, on meters that an event loop makes ready when it
//! takes over a configuration.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::storage::{Histogram, MetricCell, RouteCells};
use super::{Metric, MetricKind, Registry, WorkerId, redis, upstream};

pub const fn counter(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Counter }
}

pub const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Gauge }
}

pub const fn histogram(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Histogram }
}

pub static REQUESTS: Metric =
    counter("transom_requests_total", "Requests answered, by route and status code; 499: the client went away.");
pub static REQUEST_DURATION: Metric =
    histogram("transom_request_duration_seconds", "From the head of a request to the end of its answer.");
pub static DECISIONS: Metric = counter("transom_decisions_total", "What the rules decided.");
static REFUSED: Metric = counter("transom_refused_total", "Requests refused, by the window that was full.");
static DECISION_DURATION: Metric =
    histogram("transom_decision_duration_seconds", "Finding the counters and charging them.");
static UPSTREAM_REQUESTS: Metric = counter("transom_upstream_requests_total", "Requests sent to upstream servers.");
static UPSTREAM_DURATION: Metric =
    histogram("transom_upstream_duration_seconds", "From sending a request to the head of the upstream's answer.");
static CONNECTIONS: Metric = gauge("transom_connections", "Open client connections.");
static CONNECTIONS_REFUSED: Metric =
    counter("transom_connections_refused_total", "Connections that were closed before their first request, and why.");
static TLS_HANDSHAKES: Metric = counter("transom_tls_handshakes_total", "Complete TLS handshakes of clients.");
static CERTIFICATE_EXPIRY: Metric =
    gauge("transom_certificate_expiry_timestamp_seconds", "When the certificates of listeners end, Unix time.");
static REVOCATION_EXPIRY: Metric =
    gauge("transom_revocation_list_expiry_timestamp_seconds", "Until when revocation lists are valid, Unix time.");
static HTTP2_ABUSE: Metric =
    counter("transom_http2_abuse_total", "HTTP/2 connections that were closed because of what the client did there.");
static TUNNELS: Metric = gauge("transom_tunnels", "Client connections and streams of HTTP/2 that carry a WebSocket.");
static RELOADS: Metric = counter("transom_config_reloads_total", "Configurations that were read again.");
static UPGRADES: Metric = counter("transom_upgrades_total", "Processes that were to take the place of another.");
static ACCESS_LOG_LOST: Metric =
    counter("transom_access_log_lost_total", "Lines that the access log could not keep up with.");
pub static COUNTERS: Metric = gauge("transom_counters", "Windows that are open, and room for more.");
pub static OVERFLOW: Metric =
    counter("transom_counters_overflow_total", "Decisions of overflow counters, because the table was full.");
pub static CLOCK_OFFSET: Metric = gauge(
    "transom_clock_offset_seconds",
    "How far the time of windows is ahead of the machine's clock; negative: behind.",
);
static SNAPSHOTS: Metric =
    counter("transom_counters_snapshots_total", "Snapshots of the counters, by what came of it.");
static SNAPSHOT_TIME: Metric = gauge(
    "transom_counters_snapshot_timestamp_seconds",
    "When the latest snapshot of the counters was written, Unix time.",
);
static REQUEST_ERRORS: Metric = counter("transom_request_errors_total", "What went wrong with requests, by kind.");
pub static BUILD_INFO: Metric = gauge("transom_build_info", "The version that runs.");

/// Every metric, in the order of the page.
pub static NAMES: [&Metric; 39] = [
    &REQUESTS,
    &REQUEST_DURATION,
    &DECISIONS,
    &REFUSED,
    &DECISION_DURATION,
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

/// What a rule can decide, in the order in which it is counted.
pub const OUTCOMES: [&str; 4] = ["admitted", "refused", "delayed", "shadowed"];

/// Counts what happens on one route, in one loop.
#[derive(Debug)]
pub struct RouteMetrics(Arc<RouteCells>);

impl RouteMetrics {
    pub fn new(registry: &Registry, owner: WorkerId, route: &str, rules: &[&str]) -> RouteMetrics {
        RouteMetrics(registry.route(owner, route, rules))
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

/// Counts what the windows of a list of rules refused, in one loop.
#[derive(Debug)]
pub struct WindowMetrics(Vec<Vec<Arc<MetricCell>>>);

impl WindowMetrics {
    /// `rules` are names, each with those of its layers.
    pub fn new(registry: &Registry, owner: WorkerId, rules: &[(&str, &[String])]) -> WindowMetrics {
        let rule = |(rule, layers): &(&str, &[String])| {
            layers.iter().map(|layer| registry.cell(&REFUSED, owner, &[("rule", rule), ("window", layer)])).collect()
        };
        WindowMetrics(rules.iter().map(rule).collect())
    }

    pub fn refused(&self, rule: usize, layer: usize) {
        self.0[rule][layer].add(1);
    }
}

/// How a request to an upstream server ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamOutcome {
    Answered,
    ConnectFailed,
    Failed,
    TimedOut,
    /// The client broke off, or its body did.
    Canceled,
}

/// Counts what happens with one upstream, in one loop.
#[derive(Debug)]
pub struct UpstreamMetrics {
    duration: Arc<Histogram>,
    /// By server, then by outcome.
    servers: Vec<[Arc<MetricCell>; 5]>,
}

impl UpstreamMetrics {
    pub fn new(registry: &Registry, owner: WorkerId, upstream: &str, servers: &[&str]) -> UpstreamMetrics {
        let cells = |server: &&str| {
            ["answered", "connect_failed", "failed", "timed_out", "canceled"].map(|outcome| {
                registry.cell(
                    &UPSTREAM_REQUESTS,
                    owner,
                    &[("upstream", upstream), ("server", server), ("outcome", outcome)],
                )
            })
        };
        UpstreamMetrics {
            duration: registry.histogram(&UPSTREAM_DURATION, owner, &[("upstream", upstream)]),
            servers: servers.iter().map(cells).collect(),
        }
    }

    pub fn request_ended(&self, server: usize, outcome: UpstreamOutcome) {
        let index = match outcome {
            UpstreamOutcome::Answered => 0,
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

/// What a client can do too often, or wrong, on an HTTP/2 connection.
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

/// Counts what belongs to no route, in one loop.
#[derive(Debug)]
pub struct WorkerMetrics {
    http2_abuse: [Arc<MetricCell>; HTTP2_ABUSES.len()],
    tunnels: Arc<MetricCell>,
    decision: Arc<Histogram>,
    access_log_lost: Arc<MetricCell>,
    /// By the kind of the fault.
    request_errors: Vec<Arc<MetricCell>>,
}

impl WorkerMetrics {
    /// `faults` are the names of the kinds that there are.
    pub fn new(registry: &Registry, owner: WorkerId, faults: &[&str]) -> WorkerMetrics {
        WorkerMetrics {
            http2_abuse: HTTP2_ABUSES.map(|kind| registry.cell(&HTTP2_ABUSE, owner, &[("kind", kind)])),
            tunnels: registry.cell(&TUNNELS, owner, &[]),
            decision: registry.histogram(&DECISION_DURATION, owner, &[]),
            access_log_lost: registry.cell(&ACCESS_LOG_LOST, owner, &[]),
            request_errors: faults
                .iter()
                .map(|kind| registry.cell(&REQUEST_ERRORS, owner, &[("error", kind)]))
                .collect(),
        }
    }

    /// `kind` is one of those that are known.
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

    /// `kind` is the position of its name.
    pub fn request_error(&self, kind: usize) {
        self.request_errors[kind].add(1);
    }
}

/// Why a connection was closed before its first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectionRefusal {
    MaxConnections,
    MaxConnectionsPerClient,
    /// No PROXY header, where one is due.
    ProxyHeader,
    ProxyHeaderTimeout,
    /// HTTP in the clear, where TLS is spoken.
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

/// Counts the connections of one listener, in one loop.
#[derive(Debug)]
pub struct ListenerMetrics {
    open: Arc<MetricCell>,
    /// By reason.
    refusals: [Arc<MetricCell>; REFUSAL_REASONS.len()],
    /// Full handshakes, and sessions that were resumed.
    handshakes: Option<[Arc<MetricCell>; 2]>,
}

impl ListenerMetrics {
    /// `listener` is the address as configured.
    pub fn new(registry: &Registry, owner: WorkerId, listener: &str, is_secure: bool) -> ListenerMetrics {
        let handshakes =
            |outcome| registry.cell(&TLS_HANDSHAKES, owner, &[("listener", listener), ("outcome", outcome)]);
        ListenerMetrics {
            open: registry.cell(&CONNECTIONS, owner, &[("listener", listener)]),
            refusals: REFUSAL_REASONS.map(|reason| registry.cell(&CONNECTIONS_REFUSED, owner, &[("reason", reason)])),
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

/// Keeps the ends of certificates and revocation lists among the metrics, until it is dropped.
#[derive(Debug, Default)]
pub struct ExpiryGauges {
    _cells: Vec<Arc<MetricCell>>,
}

impl ExpiryGauges {
    /// Both are named by their files as configured, with Unix seconds. Replaces what was told before.
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
        let told_s = cell.get();
        // Of one file that two listeners name, or that holds several, there is one: the first to end.
        if told_s == 0 || end_s < told_s {
            cell.sub(told_s);
            cell.add(end_s);
        }
        cells.push(cell);
    }
    cells
}

/// Counts what the access log's writer could not write; each has its own, beside the loops.
#[derive(Debug)]
pub struct AccessLogMetrics(Arc<MetricCell>);

impl AccessLogMetrics {
    /// `nth`: how many writers there were before.
    pub fn new(registry: &Registry, nth: usize) -> AccessLogMetrics {
        AccessLogMetrics(registry.cell(&ACCESS_LOG_LOST, WorkerId::MAX - 1 - nth, &[]))
    }

    pub fn lost(&self, lines: u64) {
        self.0.add(lines);
    }
}

/// Counts the reloads; there is one, beside the loops.
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

/// Counts snapshots; there is one, beside the loops.
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
        // Before the first one there is no time to tell.
        let latest_s = self.latest_s.get_or_init(|| self.registry.cell(&SNAPSHOT_TIME, WorkerId::MAX, &[]));
        latest_s.sub(latest_s.get());
        latest_s.add(now_ms / 1000);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}

/// Counts upgrades. Those that succeed are counted by the process that they brought.
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
