//! Health of the servers of one upstream, shared by all workers: active checks, ejection, weights.
//!
//! Workers choose by themselves, from the relaxed atomics here; an ordinary request reads one and writes none. Changes
//! are rare and made under a lock, so that each is logged once, whichever worker saw it first. The state of a server
//! outlives reloads that keep both the server and its upstream. Ejection follows Envoy's outlier detection: after
//! failures in a row, twice as long each time, and never of more than a share of the servers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::request_limit::RequestLimit;
use transom_config::upstream::{Ejection, Server, ServiceSource, Target, TransportSettings, Upstream, UpstreamPolicy};
use transom_config::{Config, ServerId};
use transom_limiter::handles::IdVec;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::upstream::ServerMetrics;

/// Slow start begins with this fraction of the full weight.
const SLOW_START_FROM: f64 = 0.1;
/// A success ends the ejections of a server at most once in this fraction of the ejection time.
const RETURN_PAUSE_DIVISOR: u64 = 10;
/// Effective weights are multiples of this for each configured one, so that slow start can be gradual.
const WEIGHT_UNIT: u32 = 1024;

/// The servers of one upstream, under one configuration.
#[derive(Debug)]
pub struct UpstreamHealth {
    pub name: String,
    /// How connections to its servers are made.
    pub transport: TransportSettings,
    pub policy: UpstreamPolicy,
    /// Workers that limits of the whole process are divided among.
    pub workers: usize,
    pub servers: IdVec<ServerId, MonitoredServer>,
    /// Shared by all configurations of this upstream.
    shared: Arc<SharedState>,
    pub request_limit: Arc<RequestLimit>,
    /// Requests a look-up of the service record that lists the servers.
    look_up: Option<Arc<Notify>>,
}

/// The servers of an upstream at a moment.
#[derive(Default)]
pub struct ListedServers {
    pub servers: IdVec<ServerId, Server>,
    /// Requests a look-up of the service record that lists them, if one does.
    pub look_up: Option<Arc<Notify>>,
}

impl From<IdVec<ServerId, Server>> for ListedServers {
    fn from(servers: IdVec<ServerId, Server>) -> ListedServers {
        ListedServers { servers, look_up: None }
    }
}

/// A server and its health.
#[derive(Debug)]
pub struct MonitoredServer {
    pub server: Server,
    state: Arc<ServerState>,
}

/// State that an upstream keeps over reloads.
#[derive(Debug)]
struct SharedState {
    origin: Instant,
    /// Incremented with every change of a server's state.
    changes: AtomicU64,
    /// The states in use, by server URL: a server that is removed and added again while old requests still run is the
    /// same server. The lock is held during every change of a state.
    states_by_url: Mutex<StatesByUrl>,
}

type StatesByUrl = HashMap<String, Weak<ServerState>>;

/// How a server can be used at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServerStatus {
    /// With this weight.
    InUse(u32),
    /// In use with this weight, which is growing.
    SlowStart(u32),
    /// In use with this weight, with enough failures in a row for an ejection: only `max_ejected` prevents it.
    Failing(u32),
    /// For this many more milliseconds; 0: a trial request is due.
    Ejected(u64),
    /// Unhealthy by the active checks.
    Unhealthy,
}

/// Why a server was chosen for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChoiceReason {
    /// It was in use.
    Available,
    /// It was ejected, but no better server was left.
    Ejected,
    /// Its ejection time was over: this request decides whether it is ejected again.
    Trial,
}

/// The result of a request to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttemptResult {
    Success,
    Failure,
    /// The request says nothing about the server.
    Unknown,
}

/// The health of every upstream of a configuration; built-in upstreams have no servers. The state in `former` continues,
/// and an unchanged upstream is the former one. `service`: the servers that a service record lists.
pub fn build_upstream_health(
    config: &Config,
    service: impl Fn(&ServiceSource) -> ListedServers,
    former: &[Arc<UpstreamHealth>],
    registry: &Registry,
    workers: usize,
    now: Instant,
) -> Vec<Arc<UpstreamHealth>> {
    let health_of = |upstream: &Upstream| {
        let previous = former.iter().find(|upstream_health| upstream_health.name == upstream.name);
        let listed = match &upstream.target {
            Target::Service(source) => service(source),
            Target::Servers(servers) => servers.clone().into(),
            Target::Echo => ListedServers::default(),
        };
        if let Some(unchanged) = previous.filter(|previous| previous.is_same(upstream, &listed, workers)) {
            return Arc::clone(unchanged);
        }
        Arc::new(UpstreamHealth::new(upstream, listed, previous, registry, workers, now))
    };
    config.upstreams.iter().map(health_of).collect()
}

impl UpstreamHealth {
    pub fn new(
        upstream: &Upstream,
        listed: ListedServers,
        previous: Option<&Arc<UpstreamHealth>>,
        registry: &Registry,
        workers: usize,
        now: Instant,
    ) -> UpstreamHealth {
        let shared = previous.map_or_else(|| Arc::new(SharedState::new(now)), |previous| Arc::clone(&previous.shared));
        let request_limit = previous.map_or_else(Arc::default, |previous| Arc::clone(&previous.request_limit));
        let mut states_by_url = shared.lock();
        states_by_url.retain(|_, state| state.strong_count() > 0);
        // A server that is added to others starts slowly.
        let is_added = previous.is_some_and(|previous| !previous.servers.is_empty());
        let mut state = |server: &Server| {
            states_by_url.get(&server.url).and_then(Weak::upgrade).unwrap_or_else(|| {
                let state = Arc::new(ServerState::new(ServerMetrics::new(registry, &upstream.name, &server.url)));
                if is_added {
                    state.returned_ms.store(shared.elapsed_ms(now), Relaxed);
                }
                states_by_url.insert(server.url.clone(), Arc::downgrade(&state));
                state
            })
        };
        let monitored = |server: Server| MonitoredServer { state: state(&server), server };
        let servers = listed.servers.into_iter().map(monitored).collect();
        drop(states_by_url);
        let upstream_health = UpstreamHealth {
            name: upstream.name.clone(),
            transport: upstream.transport.clone(),
            policy: upstream.policy.clone(),
            workers,
            servers,
            shared,
            request_limit,
            look_up: listed.look_up,
        };
        upstream_health.clear_disabled_checks();
        upstream_health.shared.changes.fetch_add(1, Relaxed);
        upstream_health
    }

    fn is_same(&self, upstream: &Upstream, listed: &ListedServers, workers: usize) -> bool {
        self.transport == upstream.transport
            && self.policy == upstream.policy
            && self.workers == workers
            && self.look_up.as_ref().map(Arc::as_ptr) == listed.look_up.as_ref().map(Arc::as_ptr)
            && self.servers.iter().map(|known| &known.server).eq(&listed.servers)
    }

    /// A connection has failed: the servers may have changed.
    pub fn suspect_servers(&self) {
        self.look_up.iter().for_each(|look_up| look_up.notify_one());
    }

    /// Clears the results of health checks and ejection that the new configuration disables.
    fn clear_disabled_checks(&self) {
        let _held = self.shared.lock();
        for MonitoredServer { state, .. } in &self.servers {
            if self.policy.health.is_none() && !state.is_healthy.swap(true, Relaxed) {
                state.metrics.set_up(true);
            }
            if self.ejection().is_none() && state.ejected_until_ms.swap(0, Relaxed) != 0 {
                state.metrics.set_ejected(false);
            }
        }
    }

    /// A single server is never ejected: there is no other to use.
    fn ejection(&self) -> Option<&Ejection> {
        self.policy.ejection.as_ref().filter(|ejection| self.servers.len() > 1 && ejection.max_ejected > 0)
    }

    /// A number that changes with every change of a server's state.
    pub fn changes(&self) -> u64 {
        self.shared.changes.load(Relaxed)
    }

    pub fn elapsed_ms(&self, now: Instant) -> u64 {
        self.shared.elapsed_ms(now)
    }

    pub fn status(&self, server: ServerId, now_ms: u64) -> ServerStatus {
        let state = &self.servers[server].state;
        if !state.is_healthy.load(Relaxed) {
            return ServerStatus::Unhealthy;
        }
        match state.ejected_until_ms.load(Relaxed) {
            0 => {}
            until_ms => return ServerStatus::Ejected(until_ms.saturating_sub(now_ms)),
        }
        let full = self.full_weight(server);
        if self.ejection().is_some_and(|ejection| state.failures_in_a_row.load(Relaxed) >= ejection.failures) {
            return ServerStatus::Failing(full);
        }
        let (returned_ms, slow_start_ms) = (state.returned_ms.load(Relaxed), self.policy.slow_start.as_millis() as u64);
        let passed_ms = now_ms.saturating_sub(returned_ms);
        if returned_ms == 0 || passed_ms >= slow_start_ms {
            return ServerStatus::InUse(full);
        }
        let fraction = SLOW_START_FROM + (1.0 - SLOW_START_FROM) * passed_ms as f64 / slow_start_ms as f64;
        ServerStatus::SlowStart((f64::from(full) * fraction) as u32)
    }

    /// Whether the last request to a server failed.
    pub fn failed_last(&self, server: ServerId) -> bool {
        self.servers[server].state.failures_in_a_row.load(Relaxed) != 0
    }

    /// The server is used only while no server with a smaller number works.
    pub fn priority(&self, server: ServerId) -> u16 {
        self.servers[server].server.priority
    }

    pub fn full_weight(&self, server: ServerId) -> u32 {
        self.servers[server].server.weight * WEIGHT_UNIT
    }

    /// How long a trial of a server has been due.
    pub fn trial_overdue_ms(&self, server: ServerId, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.servers[server].state.ejected_until_ms.load(Relaxed))
    }

    /// Claims the trial of a server whose ejection time is over. No other request gets it until the trial ends, or the
    /// ejection time has passed once more.
    pub fn claim_trial(&self, server: ServerId, now_ms: u64) -> bool {
        let (Some(ejection), state) = (self.ejection(), &self.servers[server].state) else { return false };
        let until_ms = state.ejected_until_ms.load(Relaxed);
        // Ordering: relaxed; a single number, and the first to change it has the trial.
        until_ms != 0
            && until_ms <= now_ms
            && state
                .ejected_until_ms
                .compare_exchange(until_ms, now_ms + saturating_ms(ejection.time), Relaxed, Relaxed)
                .is_ok()
    }

    /// Reports the result of a request. A success ends an ejection, unless the request was sent before the ejection.
    pub fn report(&self, server: ServerId, result: AttemptResult, chosen: ChoiceReason, now: impl FnOnce() -> Instant) {
        let state = &self.servers[server].state;
        let is_trial = chosen == ChoiceReason::Trial;
        match result {
            AttemptResult::Success => {
                if state.failures_in_a_row.load(Relaxed) != 0 {
                    state.failures_in_a_row.store(0, Relaxed);
                }
                if chosen != ChoiceReason::Available {
                    let now = now();
                    if is_trial || !self.returned_recently(state, self.elapsed_ms(now)) {
                        self.end_ejection(server, now, "a request succeeded");
                    }
                }
            }
            AttemptResult::Failure => {
                let failures = state.failures_in_a_row.fetch_add(1, Relaxed) + 1;
                if let Some(ejection) = self.ejection()
                    && (is_trial || failures >= ejection.failures)
                {
                    self.eject(server, ejection, self.elapsed_ms(now()), failures, is_trial);
                }
            }
            // Another request should try the server.
            AttemptResult::Unknown if is_trial => {
                let now_ms = self.elapsed_ms(now());
                // Unless the ejection has ended meanwhile.
                let again = |until_ms| (until_ms != 0).then_some(now_ms);
                let _ = state.ejected_until_ms.fetch_update(Relaxed, Relaxed, again);
            }
            AttemptResult::Unknown => {}
        }
    }

    fn eject(&self, server: ServerId, ejection: &Ejection, now_ms: u64, failures: u32, is_trial: bool) {
        let _held = self.shared.lock();
        let state = &self.servers[server].state;
        let was_ejected = state.ejected_until_ms.load(Relaxed) != 0;
        let ejected = self.servers.iter().filter(|other| other.state.ejected_until_ms.load(Relaxed) != 0).count();
        let ejected_max = (self.servers.len() * usize::from(ejection.max_ejected) / 100).max(1);
        // While a server is ejected, only the result of its trial counts. After the ejection has ended otherwise, a
        // trial counts as any other request.
        let is_ejected = if was_ejected { is_trial } else { failures >= ejection.failures && ejected < ejected_max };
        if !is_ejected {
            return;
        }
        // After a time in use that exceeds the longest ejection, ejection times start from the shortest again.
        let in_use_ms = now_ms.saturating_sub(state.returned_ms.load(Relaxed));
        if !was_ejected && in_use_ms > saturating_ms(ejection.max_time) {
            state.ejections_in_a_row.store(0, Relaxed);
        }
        let previous = state.ejections_in_a_row.fetch_add(1, Relaxed);
        let time = ejection.time.saturating_mul(1 << previous.min(20)).min(ejection.max_time.max(ejection.time));
        state.ejected_until_ms.store(now_ms + saturating_ms(time), Relaxed);
        state.failures_in_a_row.store(0, Relaxed);
        state.metrics.set_ejected(true);
        self.shared.changes.fetch_add(1, Relaxed);
        let (upstream, url, for_ms) = (&self.name, &self.servers[server].server.url, saturating_ms(time));
        if was_ejected {
            tracing::debug!(upstream, server = url, for_ms, "the server is still failing");
        } else {
            tracing::warn!(upstream, server = url, failures, for_ms, "the server is ejected after failures in a row");
        }
    }

    /// Whether the last ejection ended only recently. A success does not end the next one so soon: servers that fail
    /// most requests, but not all, would be ejected and returned again and again.
    fn returned_recently(&self, state: &ServerState, now_ms: u64) -> bool {
        let returned_ms = state.returned_ms.load(Relaxed);
        let pause_ms = self.ejection().map_or(0, |ejection| saturating_ms(ejection.time) / RETURN_PAUSE_DIVISOR);
        returned_ms != 0 && now_ms.saturating_sub(returned_ms) < pause_ms
    }

    /// Ends the ejection of a server, if it is ejected.
    pub fn end_ejection(&self, server: ServerId, now: Instant, why: &str) {
        let _held = self.shared.lock();
        let state = &self.servers[server].state;
        if state.ejected_until_ms.swap(0, Relaxed) != 0 {
            state.returned_ms.store(self.elapsed_ms(now), Relaxed);
            state.failures_in_a_row.store(0, Relaxed);
            state.metrics.set_ejected(false);
            self.shared.changes.fetch_add(1, Relaxed);
            tracing::info!(upstream = self.name, server = self.servers[server].server.url, "the server is back: {why}");
        }
    }

    /// Sets the result of the active checks; logs it if it changes.
    pub fn set_healthy(&self, server: ServerId, up: bool, now: Instant, why: &str) {
        let _held = self.shared.lock();
        let state = &self.servers[server].state;
        if state.is_healthy.swap(up, Relaxed) == up {
            return;
        }
        state.metrics.set_up(up);
        let (upstream, url) = (&self.name, &self.servers[server].server.url);
        if up {
            state.returned_ms.store(self.elapsed_ms(now), Relaxed);
            tracing::info!(upstream, server = url, "the server is healthy");
        } else {
            tracing::warn!(upstream, server = url, "the server is unhealthy: {why}");
        }
        self.shared.changes.fetch_add(1, Relaxed);
    }

    pub fn is_healthy(&self, server: ServerId) -> bool {
        self.servers[server].state.is_healthy.load(Relaxed)
    }

    /// Counts an active check. Returns whether it was the server's first.
    pub fn record_check(&self, server: ServerId, passed: bool) -> bool {
        self.servers[server].state.metrics.checked(passed);
        !self.servers[server].state.was_checked.swap(true, Relaxed)
    }

    /// The servers that cannot be used, or whose last request failed.
    pub fn troubled_servers(&self, now: Instant) -> impl Iterator<Item = &str> {
        let now_ms = self.elapsed_ms(now);
        let servers = self.servers.enumerate();
        let is_in_use =
            move |server| matches!(self.status(server, now_ms), ServerStatus::InUse(_) | ServerStatus::SlowStart(_));
        let troubled = servers.filter(move |(server, _)| !is_in_use(*server) || self.failed_last(*server));
        troubled.map(|(_, monitored)| monitored.server.url.as_str())
    }

    /// The upstream's state as the admin API shows it.
    pub fn to_json(&self, now: Instant) -> Value {
        let now_ms = self.elapsed_ms(now);
        let server = |(id, MonitoredServer { server, state }): (ServerId, &MonitoredServer)| {
            let (status, weight) = match self.status(id, now_ms) {
                ServerStatus::InUse(weight) => ("in", weight),
                ServerStatus::SlowStart(weight) => ("slow-start", weight),
                ServerStatus::Failing(weight) => ("failing", weight),
                ServerStatus::Ejected(_) => ("ejected", 0),
                ServerStatus::Unhealthy => ("unhealthy", 0),
            };
            json!({
                "url": server.url,
                "weight": server.weight,
                "backup": server.is_backup(),
                "effective_weight": f64::from(weight) / f64::from(WEIGHT_UNIT),
                "state": status,
                "failures_in_a_row": state.failures_in_a_row.load(Relaxed),
            })
        };
        json!({
            "name": self.name,
            "pending": self.request_limit.pending(),
            "held": self.request_limit.held(),
            "servers": self.servers.enumerate().map(server).collect::<Vec<_>>(),
        })
    }
}

impl SharedState {
    fn new(now: Instant) -> SharedState {
        SharedState { origin: now, changes: AtomicU64::new(0), states_by_url: Mutex::default() }
    }

    fn elapsed_ms(&self, now: Instant) -> u64 {
        // From 1, because 0 means no time.
        now.saturating_duration_since(self.origin).as_millis() as u64 + 1
    }

    fn lock(&self) -> MutexGuard<'_, StatesByUrl> {
        self.states_by_url.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn saturating_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The state of one server, shared by all workers.
#[derive(Debug)]
struct ServerState {
    /// By the active checks; true until they fail.
    is_healthy: AtomicBool,
    /// Whether there was an active check.
    was_checked: AtomicBool,
    /// Failed requests in a row.
    failures_in_a_row: AtomicU32,
    /// The end of the ejection, in milliseconds since the origin, when one request tries the server. 0: not ejected.
    ejected_until_ms: AtomicU64,
    /// When the last ejection or outage ended, or the server was added to others, in milliseconds since the origin; 0: there
    /// was none.
    returned_ms: AtomicU64,
    /// Ejections in a row, which lengthen the next one.
    ejections_in_a_row: AtomicU32,
    metrics: ServerMetrics,
}

impl ServerState {
    /// The state of a server without any results.
    fn new(meter: ServerMetrics) -> ServerState {
        meter.set_up(true);
        ServerState {
            is_healthy: AtomicBool::new(true),
            was_checked: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            ejected_until_ms: AtomicU64::new(0),
            returned_ms: AtomicU64::new(0),
            ejections_in_a_row: AtomicU32::new(0),
            metrics: meter,
        }
    }
}

impl Drop for ServerState {
    /// The gauges of a server that is no longer configured show neither healthy nor ejected.
    fn drop(&mut self) {
        self.metrics.set_up(false);
        self.metrics.set_ejected(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::upstream::{HostField, Scheme, UpstreamProtocol};
    use transom_limiter::handles::Handle as _;
    use transom_runtime::clock::Clock;

    const MS: Duration = Duration::from_millis(1);
    const FIRST: ServerId = ServerId::FIRST;

    fn other() -> ServerId {
        ServerId::at(1)
    }

    fn upstream_health(
        count: u16,
        ejection: Ejection,
        previous: Option<&Arc<UpstreamHealth>>,
        now: Instant,
    ) -> Arc<UpstreamHealth> {
        let server = |port| Server {
            url: format!("http://a:{port}"),
            scheme: Scheme::Http,
            host: "a".to_owned(),
            port,
            weight: 2,
            priority: 0,
        };
        let policy = UpstreamPolicy { ejection: Some(ejection), slow_start: 100 * MS, ..UpstreamPolicy::default() };
        let servers: IdVec<ServerId, Server> = (1..=count).map(server).collect();
        let listed = servers.clone().into();
        let transport = TransportSettings {
            protocol: UpstreamProtocol::Http1,
            host: HostField::Keep,
            tls: None,
            resolve: MS,
            dns_servers: Vec::new(),
            proxy_protocol: None,
        };
        let upstream = Upstream { name: "u".to_owned(), target: Target::Servers(servers), transport, policy };
        Arc::new(UpstreamHealth::new(&upstream, listed, previous, &Registry::default(), 1, now))
    }

    fn ejection(max_ejected: u8) -> Ejection {
        Ejection { failures: 3, time: 100 * MS, max_time: 350 * MS, max_ejected, ..Ejection::default() }
    }

    fn fail(upstream_health: &UpstreamHealth, server: ServerId, times: u32, now: Instant) {
        (0..times)
            .for_each(|_| upstream_health.report(server, AttemptResult::Failure, ChoiceReason::Available, || now));
    }

    fn is_out(upstream_health: &UpstreamHealth, server: ServerId, now: Instant) -> bool {
        matches!(upstream_health.status(server, upstream_health.elapsed_ms(now)), ServerStatus::Ejected(_))
    }

    #[test]
    fn failures_in_a_row_eject_and_others_do_not() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        for _ in 0..5 {
            fail(&upstream_health, FIRST, 2, now);
            upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Available, || now);
        }
        assert!(!is_out(&upstream_health, FIRST, now));
        let changes = upstream_health.changes();
        fail(&upstream_health, FIRST, 3, now);
        assert!(is_out(&upstream_health, FIRST, now) && upstream_health.changes() > changes);
        // Results of requests that were in flight then are ignored.
        fail(&upstream_health, FIRST, 9, now);
        assert_eq!(upstream_health.status(FIRST, upstream_health.elapsed_ms(now)), ServerStatus::Ejected(100));
    }

    #[test]
    fn at_most_max_ejected_and_never_a_single_server_is_ejected() {
        let now = Clock::manual(0).instant();
        for (count, share, wanted) in [(1, 100, 0), (2, 10, 1), (3, 50, 1), (4, 50, 2), (5, 100, 5), (5, 0, 0)] {
            let upstream_health = upstream_health(count, ejection(share), None, now);
            upstream_health.servers.ids().for_each(|server| fail(&upstream_health, server, 3, now));
            let out = upstream_health.servers.ids().filter(|server| is_out(&upstream_health, *server, now)).count();
            assert_eq!(out, wanted, "{count} servers, {share} %");
        }
    }

    #[test]
    fn one_request_is_the_trial_and_each_failure_doubles_the_ejection() {
        let start = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, start);
        fail(&upstream_health, other(), 3, start);
        let mut now = start;
        for (lasts, next) in [(100, 200), (200, 350), (350, 350)] {
            assert_eq!(upstream_health.status(other(), upstream_health.elapsed_ms(now)), ServerStatus::Ejected(lasts));
            assert!(!upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now + (lasts as u32 - 1) * MS)));
            now += lasts as u32 * MS;
            assert!(
                upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now))
                    && !upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now)),
                "one only"
            );
            upstream_health.report(other(), AttemptResult::Failure, ChoiceReason::Trial, || now);
            assert_eq!(upstream_health.status(other(), upstream_health.elapsed_ms(now)), ServerStatus::Ejected(next));
        }
        // A canceled trial leaves the trial to the next request.
        now += 350 * MS;
        assert!(upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now)));
        upstream_health.report(other(), AttemptResult::Unknown, ChoiceReason::Trial, || now);
        assert!(upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now)));
        upstream_health.report(other(), AttemptResult::Success, ChoiceReason::Trial, || now);
        // The cancellation of a trial has no effect now.
        upstream_health.report(other(), AttemptResult::Unknown, ChoiceReason::Trial, || now);
        // The server is back, and starts with a tenth of its weight.
        let weight = |after: u32| upstream_health.status(other(), upstream_health.elapsed_ms(now + after * MS));
        assert_eq!((weight(0), weight(50)), (ServerStatus::SlowStart(204), ServerStatus::SlowStart(1126)));
        assert_eq!(weight(100), ServerStatus::InUse(2048));
        // A failure soon after lengthens the ejection; one much later does not.
        fail(&upstream_health, other(), 3, now + 10 * MS);
        assert_eq!(
            upstream_health.status(other(), upstream_health.elapsed_ms(now + 10 * MS)),
            ServerStatus::Ejected(350)
        );
        now += 360 * MS;
        assert!(upstream_health.claim_trial(other(), upstream_health.elapsed_ms(now)));
        upstream_health.report(other(), AttemptResult::Success, ChoiceReason::Trial, || now);
        now += 351 * MS;
        fail(&upstream_health, other(), 3, now);
        assert_eq!(upstream_health.status(other(), upstream_health.elapsed_ms(now)), ServerStatus::Ejected(100));
    }

    #[test]
    fn a_success_or_a_passed_check_ends_an_ejection() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, FIRST, 3, now);
        // A success of a request sent before the ejection has no effect; a failure of a later request does not prolong
        // it.
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Available, || now);
        upstream_health.report(FIRST, AttemptResult::Failure, ChoiceReason::Ejected, || now + 50 * MS);
        assert_eq!(upstream_health.status(FIRST, upstream_health.elapsed_ms(now)), ServerStatus::Ejected(100));
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Ejected, || now);
        assert!(!is_out(&upstream_health, FIRST, now) && !upstream_health.failed_last(FIRST));
        fail(&upstream_health, FIRST, 3, now);
        assert!(is_out(&upstream_health, FIRST, now));
        upstream_health.end_ejection(FIRST, now, "");
        assert!(!is_out(&upstream_health, FIRST, now));
    }

    #[test]
    fn a_success_does_not_end_one_ejection_right_after_another() {
        let mut now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, FIRST, 3, now);
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Ejected, || now);
        fail(&upstream_health, FIRST, 3, now);
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Ejected, || now + 9 * MS);
        assert!(is_out(&upstream_health, FIRST, now));
        // A tenth of the ejection time later.
        now += 10 * MS;
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Ejected, || now);
        assert!(!is_out(&upstream_health, FIRST, now));
    }

    #[test]
    fn a_trial_decides_nothing_once_the_ejection_has_ended() {
        let mut now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, FIRST, 3, now);
        now += 100 * MS;
        assert!(upstream_health.claim_trial(FIRST, upstream_health.elapsed_ms(now)));
        upstream_health.end_ejection(FIRST, now, "");
        upstream_health.report(FIRST, AttemptResult::Failure, ChoiceReason::Trial, || now);
        assert!(!is_out(&upstream_health, FIRST, now), "one failure");
        fail(&upstream_health, FIRST, 2, now);
        assert!(is_out(&upstream_health, FIRST, now));
    }

    #[test]
    fn a_server_that_max_ejected_protects_is_failing_until_it_succeeds() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, FIRST, 3, now);
        fail(&upstream_health, other(), 3, now);
        assert_eq!(upstream_health.status(other(), upstream_health.elapsed_ms(now)), ServerStatus::Failing(2048));
        upstream_health.report(other(), AttemptResult::Success, ChoiceReason::Available, || now);
        assert_eq!(upstream_health.status(other(), upstream_health.elapsed_ms(now)), ServerStatus::InUse(2048));
        // It is ejected at its next failure once the other is back.
        fail(&upstream_health, other(), 3, now);
        upstream_health.report(FIRST, AttemptResult::Success, ChoiceReason::Ejected, || now);
        assert!(!is_out(&upstream_health, other(), now));
        fail(&upstream_health, other(), 1, now);
        assert!(is_out(&upstream_health, other(), now));
    }

    #[test]
    fn an_added_server_starts_slowly() {
        let now = Clock::manual(0).instant();
        let first = upstream_health(1, ejection(50), None, now);
        assert_eq!(first.status(FIRST, first.elapsed_ms(now)), ServerStatus::InUse(2048));
        let second = upstream_health(2, ejection(50), Some(&first), now);
        let weight = |server, after: u32| second.status(server, second.elapsed_ms(now + after * MS));
        assert_eq!((weight(FIRST, 0), weight(other(), 0)), (ServerStatus::InUse(2048), ServerStatus::SlowStart(204)));
        assert_eq!(weight(other(), 100), ServerStatus::InUse(2048));
        // There was no other server.
        let empty = upstream_health(0, ejection(50), Some(&second), now);
        drop((first, second));
        let filled = upstream_health(2, ejection(50), Some(&empty), now);
        assert_eq!(filled.status(other(), filled.elapsed_ms(now)), ServerStatus::InUse(2048));
    }

    #[test]
    fn an_unchanged_upstream_is_the_former_one() {
        let (now, registry) = (Clock::manual(0).instant(), Registry::default());
        let build = |settings: &str, former: &[Arc<UpstreamHealth>]| {
            let text = format!(
                "[upstreams.u]\nservers = \"http://a\"\n{settings}[[routes]]\npath = \"/\"\nupstream = \"u\"\n"
            );
            let config = transom_config::read(&text).unwrap();
            build_upstream_health(&config, |_| ListedServers::default(), former, &registry, 1, now)
        };
        let former = build("", &[]);
        assert!(Arc::ptr_eq(&former[0], &build("", &former)[0]));
        assert!(!Arc::ptr_eq(&former[0], &build("max_requests = 1\n", &former)[0]));
    }

    #[test]
    fn server_states_survive_reloads_and_disabled_checks_are_cleared() {
        let now = Clock::manual(0).instant();
        let first = upstream_health(3, ejection(50), None, now);
        fail(&first, other(), 3, now);
        let second = upstream_health(2, ejection(50), Some(&first), now);
        assert!(is_out(&second, other(), now));
        // Removed and added again while an old configuration still holds the state.
        let third = upstream_health(1, ejection(50), Some(&second), now);
        let fourth = upstream_health(3, ejection(50), Some(&third), now);
        assert!(is_out(&fourth, other(), now));
        let off = upstream_health(3, ejection(0), Some(&fourth), now);
        assert!(!is_out(&off, other(), now));
    }
}
