//! The events that are counted: one function each, on meters that an event loop makes ready when it
//! takes over a configuration.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::storage::{Cell, Histogram, RouteCells};
use super::{Kind, LoopId, Name, Registry, redis, upstream};

pub const fn counter(name: &'static str, help: &'static str) -> Name {
    Name { name, help, kind: Kind::Counter }
}

pub const fn gauge(name: &'static str, help: &'static str) -> Name {
    Name { name, help, kind: Kind::Gauge }
}

pub const fn histogram(name: &'static str, help: &'static str) -> Name {
    Name { name, help, kind: Kind::Histogram }
}

pub static REQUESTS: Name =
    counter("transom_requests_total", "Requests answered, by route and status code; 499: the client went away.");
pub static REQUEST_DURATION: Name =
    histogram("transom_request_duration_seconds", "From the head of a request to the end of its answer.");
pub static DECISIONS: Name = counter("transom_decisions_total", "What the rules decided.");
static REFUSED: Name = counter("transom_refused_total", "Requests refused, by the window that was full.");
static DECISION_DURATION: Name =
    histogram("transom_decision_duration_seconds", "Finding the counters and charging them.");
static UPSTREAM_REQUESTS: Name = counter("transom_upstream_requests_total", "Requests sent to upstream servers.");
static UPSTREAM_DURATION: Name =
    histogram("transom_upstream_duration_seconds", "From sending a request to the head of the upstream's answer.");
static CONNECTIONS: Name = gauge("transom_connections", "Open client connections.");
static CONNECTIONS_REFUSED: Name =
    counter("transom_connections_refused_total", "Connections that were closed before their first request, and why.");
static TLS_HANDSHAKES: Name = counter("transom_tls_handshakes_total", "Complete TLS handshakes of clients.");
static CERTIFICATE_EXPIRY: Name =
    gauge("transom_certificate_expiry_timestamp_seconds", "When the certificates of listeners end, Unix time.");
static REVOCATION_EXPIRY: Name =
    gauge("transom_revocation_list_expiry_timestamp_seconds", "Until when revocation lists are valid, Unix time.");
static HTTP2_ABUSE: Name =
    counter("transom_http2_abuse_total", "HTTP/2 connections that were closed because of what the client did there.");
static TUNNELS: Name = gauge("transom_tunnels", "Client connections and streams of HTTP/2 that carry a WebSocket.");
static RELOADS: Name = counter("transom_config_reloads_total", "Configurations that were read again.");
static UPGRADES: Name = counter("transom_upgrades_total", "Processes that were to take the place of another.");
static ACCESS_LOG_LOST: Name =
    counter("transom_access_log_lost_total", "Lines that the access log could not keep up with.");
pub static COUNTERS: Name = gauge("transom_counters", "Windows that are open, and room for more.");
pub static OVERFLOW: Name =
    counter("transom_counters_overflow_total", "Decisions of overflow counters, because the table was full.");
pub static CLOCK_OFFSET: Name = gauge(
    "transom_clock_offset_seconds",
    "How far the time of windows is ahead of the machine's clock; negative: behind.",
);
static SNAPSHOTS: Name = counter("transom_counters_snapshots_total", "Snapshots of the counters, by what came of it.");
static SNAPSHOT_TIME: Name = gauge(
    "transom_counters_snapshot_timestamp_seconds",
    "When the latest snapshot of the counters was written, Unix time.",
);
static FAULTS: Name = counter("transom_request_errors_total", "What went wrong with requests, by kind.");
pub static BUILD_INFO: Name = gauge("transom_build_info", "The version that runs.");

/// Every metric, in the order of the page.
pub static NAMES: [&Name; 39] = [
    &REQUESTS,
    &REQUEST_DURATION,
    &DECISIONS,
    &REFUSED,
    &DECISION_DURATION,
    &UPSTREAM_REQUESTS,
    &UPSTREAM_DURATION,
    &upstream::UNDER_WAY,
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
    &redis::AWAY,
    &redis::EVICTING,
    &redis::OUTAGES,
    &redis::WITHOUT,
    &SNAPSHOTS,
    &SNAPSHOT_TIME,
    &RELOADS,
    &UPGRADES,
    &ACCESS_LOG_LOST,
    &FAULTS,
    &BUILD_INFO,
];

/// What a rule can decide, in the order in which it is counted.
pub const OUTCOMES: [&str; 4] = ["admitted", "refused", "delayed", "shadowed"];

/// Counts what happens on one route, in one loop.
#[derive(Debug)]
pub struct RouteMeter(Arc<RouteCells>);

impl RouteMeter {
    pub fn new(registry: &Registry, owner: LoopId, route: &str, rules: &[&str]) -> RouteMeter {
        RouteMeter(registry.route(owner, route, rules))
    }

    pub fn answered(&self, code: u16, took: Duration) {
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
pub struct WindowMeter(Vec<Vec<Arc<Cell>>>);

impl WindowMeter {
    /// `rules` are names, each with those of its layers.
    pub fn new(registry: &Registry, owner: LoopId, rules: &[(&str, &[String])]) -> WindowMeter {
        let rule = |(rule, layers): &(&str, &[String])| {
            layers.iter().map(|layer| registry.cell(&REFUSED, owner, &[("rule", rule), ("window", layer)])).collect()
        };
        WindowMeter(rules.iter().map(rule).collect())
    }

    pub fn refused_by(&self, rule: usize, layer: usize) {
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
pub struct UpstreamMeter {
    duration: Arc<Histogram>,
    /// By server, then by outcome.
    servers: Vec<[Arc<Cell>; 5]>,
}

impl UpstreamMeter {
    pub fn new(registry: &Registry, owner: LoopId, upstream: &str, servers: &[&str]) -> UpstreamMeter {
        let cells = |server: &&str| {
            ["answered", "connect_failed", "failed", "timed_out", "canceled"].map(|outcome| {
                registry.cell(
                    &UPSTREAM_REQUESTS,
                    owner,
                    &[("upstream", upstream), ("server", server), ("outcome", outcome)],
                )
            })
        };
        UpstreamMeter {
            duration: registry.histogram(&UPSTREAM_DURATION, owner, &[("upstream", upstream)]),
            servers: servers.iter().map(cells).collect(),
        }
    }

    pub fn ended(&self, server: usize, outcome: UpstreamOutcome) {
        let index = match outcome {
            UpstreamOutcome::Answered => 0,
            UpstreamOutcome::ConnectFailed => 1,
            UpstreamOutcome::Failed => 2,
            UpstreamOutcome::TimedOut => 3,
            UpstreamOutcome::Canceled => 4,
        };
        self.servers[server][index].add(1);
    }

    pub fn answered_in(&self, took: Duration) {
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
pub struct LoopMeter {
    http2_abuse: [Arc<Cell>; HTTP2_ABUSES.len()],
    tunnels: Arc<Cell>,
    decision: Arc<Histogram>,
    access_log_lost: Arc<Cell>,
    /// By the kind of the fault.
    faults: Vec<Arc<Cell>>,
}

impl LoopMeter {
    /// `faults` are the names of the kinds that there are.
    pub fn new(registry: &Registry, owner: LoopId, faults: &[&str]) -> LoopMeter {
        LoopMeter {
            http2_abuse: HTTP2_ABUSES.map(|kind| registry.cell(&HTTP2_ABUSE, owner, &[("kind", kind)])),
            tunnels: registry.cell(&TUNNELS, owner, &[]),
            decision: registry.histogram(&DECISION_DURATION, owner, &[]),
            access_log_lost: registry.cell(&ACCESS_LOG_LOST, owner, &[]),
            faults: faults.iter().map(|kind| registry.cell(&FAULTS, owner, &[("error", kind)])).collect(),
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

    pub fn decided(&self, took: Duration) {
        self.decision.record(took);
    }

    pub fn access_log_lost(&self, lines: u64) {
        self.access_log_lost.add(lines);
    }

    /// `kind` is the position of its name.
    pub fn fault(&self, kind: usize) {
        self.faults[kind].add(1);
    }
}

/// Why a connection was closed before its first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnedAway {
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

const TURNED_AWAY: [&str; 7] = [
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
pub struct ListenerMeter {
    open: Arc<Cell>,
    /// By reason.
    turned_away: [Arc<Cell>; TURNED_AWAY.len()],
    /// Full handshakes, and sessions that were resumed.
    handshakes: Option<[Arc<Cell>; 2]>,
}

impl ListenerMeter {
    /// `listener` is the address as configured.
    pub fn new(registry: &Registry, owner: LoopId, listener: &str, is_secure: bool) -> ListenerMeter {
        let handshakes =
            |outcome| registry.cell(&TLS_HANDSHAKES, owner, &[("listener", listener), ("outcome", outcome)]);
        ListenerMeter {
            open: registry.cell(&CONNECTIONS, owner, &[("listener", listener)]),
            turned_away: TURNED_AWAY.map(|reason| registry.cell(&CONNECTIONS_REFUSED, owner, &[("reason", reason)])),
            handshakes: is_secure.then(|| ["full", "resumed"].map(handshakes)),
        }
    }

    pub fn connected(&self) {
        self.open.add(1);
    }

    pub fn disconnected(&self) {
        self.open.sub(1);
    }

    pub fn turned_away(&self, why: TurnedAway) {
        let index = match why {
            TurnedAway::MaxConnections => 0,
            TurnedAway::MaxConnectionsPerClient => 1,
            TurnedAway::ProxyHeader => 2,
            TurnedAway::ProxyHeaderTimeout => 3,
            TurnedAway::Cleartext => 4,
            TurnedAway::Handshake => 5,
            TurnedAway::HandshakeTimeout => 6,
        };
        self.turned_away[index].add(1);
    }

    pub fn handshake(&self, resumed: bool) {
        if let Some(handshakes) = &self.handshakes {
            handshakes[usize::from(resumed)].add(1);
        }
    }
}

/// Keeps the ends of certificates and revocation lists among the metrics, until it is dropped.
#[derive(Debug, Default)]
pub struct Expiries {
    _cells: Vec<Arc<Cell>>,
}

impl Expiries {
    /// Both are named by their files as configured, with Unix seconds. Replaces what was told before.
    pub fn new<'c>(
        registry: &Registry,
        certificates: impl IntoIterator<Item = (&'c str, i64)>,
        lists: impl IntoIterator<Item = (&'c str, i64)>,
    ) -> Expiries {
        let mut cells = ends(registry, &CERTIFICATE_EXPIRY, "certificate", certificates);
        cells.extend(ends(registry, &REVOCATION_EXPIRY, "list", lists));
        Expiries { _cells: cells }
    }
}

fn ends<'c>(
    registry: &Registry,
    name: &Name,
    label: &'static str,
    all: impl IntoIterator<Item = (&'c str, i64)>,
) -> Vec<Arc<Cell>> {
    registry.forget(name);
    let mut cells = Vec::new();
    for (file, end_s) in all {
        let cell = registry.cell(name, LoopId::MAX, &[(label, file)]);
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
pub struct AccessLogMeter(Arc<Cell>);

impl AccessLogMeter {
    /// `nth`: how many writers there were before.
    pub fn new(registry: &Registry, nth: usize) -> AccessLogMeter {
        AccessLogMeter(registry.cell(&ACCESS_LOG_LOST, LoopId::MAX - 1 - nth, &[]))
    }

    pub fn lost(&self, lines: u64) {
        self.0.add(lines);
    }
}

/// Counts the reloads; there is one, beside the loops.
#[derive(Debug)]
pub struct ReloadMeter {
    applied: Arc<Cell>,
    refused: Arc<Cell>,
}

impl ReloadMeter {
    pub fn new(registry: &Registry) -> ReloadMeter {
        let cell = |outcome| registry.cell(&RELOADS, LoopId::MAX, &[("outcome", outcome)]);
        ReloadMeter { applied: cell("applied"), refused: cell("refused") }
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
pub struct SnapshotMeter {
    registry: Arc<Registry>,
    written: Arc<Cell>,
    failed: Arc<Cell>,
    latest_s: OnceLock<Arc<Cell>>,
}

impl SnapshotMeter {
    pub fn new(registry: &Arc<Registry>) -> SnapshotMeter {
        let cell = |outcome| registry.cell(&SNAPSHOTS, LoopId::MAX, &[("outcome", outcome)]);
        SnapshotMeter {
            written: cell("written"),
            failed: cell("failed"),
            latest_s: OnceLock::new(),
            registry: Arc::clone(registry),
        }
    }

    pub fn written(&self, now_ms: u64) {
        self.written.add(1);
        // Before the first one there is no time to tell.
        let latest_s = self.latest_s.get_or_init(|| self.registry.cell(&SNAPSHOT_TIME, LoopId::MAX, &[]));
        latest_s.sub(latest_s.get());
        latest_s.add(now_ms / 1000);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}

/// Counts upgrades. Those that succeed are counted by the process that they brought.
#[derive(Debug)]
pub struct UpgradeMeter {
    taken_over: Arc<Cell>,
    failed: Arc<Cell>,
}

impl UpgradeMeter {
    pub fn new(registry: &Registry) -> UpgradeMeter {
        let cell = |outcome| registry.cell(&UPGRADES, LoopId::MAX, &[("outcome", outcome)]);
        UpgradeMeter { taken_over: cell("taken_over"), failed: cell("failed") }
    }

    pub fn taken_over(&self) {
        self.taken_over.add(1);
    }

    pub fn failed(&self) {
        self.failed.add(1);
    }
}
