//! The servers of one upstream, as all event loops know them: who is healthy, who is ejected, how much
//! is under way.
//!
//! Loops choose by themselves, from what they all read here: relaxed atomics, of which an ordinary
//! request reads one and writes none. What changes them is rare, and made under a lock, so that every change is told
//! once, whichever loop saw it first. State belongs to a server of an upstream, and outlives reloads that leave
//! both in place. Ejection follows Envoy's outlier detection: failures in a row, twice as long each
//! time, and never more than a share of the servers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::request_limit::RequestLimit;
use super::server_state::ServerState;
use crate::config::upstream_policy::{Ejection, Policy};
use crate::config::{Config, Server, Target, TransportSettings, Upstream};
use crate::metrics::Registry;
use crate::metrics::upstream::ServerMetrics;

/// A server of full weight that is just back begins with a tenth of it.
const RAMP_FROM: f64 = 0.1;
/// An answer ends the ejections of a server no more often than once in this part of the ejection time.
const BACK_AGAIN_PART: u64 = 10;
/// Effective weights are multiples of this for each configured one, so that they can grow smoothly.
const WEIGHT_UNIT: u32 = 1024;

/// One upstream's servers, under one configuration.
#[derive(Debug)]
pub struct UpstreamHealth {
    pub name: String,
    /// How its servers are spoken to.
    pub way: TransportSettings,
    pub policy: Policy,
    /// Between which limits of the whole process are divided.
    pub loops: usize,
    pub servers: Vec<Server>,
    standings: Vec<Arc<ServerState>>,
    /// What the fleets of this upstream have in common over reloads.
    tally: Arc<Tally>,
    pub circuit: Arc<RequestLimit>,
}

/// What the servers of an upstream share.
#[derive(Debug)]
struct Tally {
    origin: Instant,
    /// Goes up with every change of a server's standing.
    changes: AtomicU64,
    /// Held by whoever changes a standing. All that are in use, by their servers' URLs: a server that
    /// is taken out and put back while old requests still run is the same one.
    known: Mutex<Known>,
}

type Known = HashMap<String, Weak<ServerState>>;

/// How a server can be used at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// With this weight.
    In(u32),
    /// As `In`, but growing.
    Growing(u32),
    /// As `In`, but with so many failures in a row that only `max_ejected` protects it from ejection.
    Failing(u32),
    /// For so many milliseconds more; 0: somebody should try it.
    Out(u64),
    /// Unhealthy by the active checks.
    Down,
}

/// Why a server was chosen for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// It was in use.
    InUse,
    /// It was ejected, but no better server was left.
    Ejected,
    /// Its ejection time was over: this request decides whether it is ejected again.
    Trial,
}

/// What a request met with at a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttemptResult {
    Good,
    Bad,
    /// Nothing is to be learnt from it.
    None,
}

/// The fleets of a configuration, one for each of its upstreams; those that are built in have no
/// servers. What is known from the fleets before is kept.
pub fn upstream_health(
    config: &Config,
    former: &[Arc<UpstreamHealth>],
    registry: &Registry,
    loops: usize,
    now: Instant,
) -> Vec<Arc<UpstreamHealth>> {
    let upstream_health = |upstream: &crate::config::Upstream| {
        let servers = match &upstream.target {
            Target::Servers(servers) => servers.clone(),
            Target::Echo => Vec::new(),
        };
        let before = former.iter().find(|upstream_health| upstream_health.name == upstream.name);
        Arc::new(UpstreamHealth::new(upstream, servers, before, registry, loops, now))
    };
    config.upstreams.iter().map(upstream_health).collect()
}

impl UpstreamHealth {
    pub fn new(
        upstream: &Upstream,
        servers: Vec<Server>,
        before: Option<&Arc<UpstreamHealth>>,
        registry: &Registry,
        loops: usize,
        now: Instant,
    ) -> UpstreamHealth {
        let tally = before.map_or_else(|| Arc::new(Tally::new(now)), |before| Arc::clone(&before.tally));
        let circuit = before.map_or_else(Arc::default, |before| Arc::clone(&before.circuit));
        let mut known = tally.lock();
        known.retain(|_, standing| standing.strong_count() > 0);
        let standing = |server: &Server| {
            known.get(&server.url).and_then(Weak::upgrade).unwrap_or_else(|| {
                let standing = Arc::new(ServerState::new(ServerMetrics::new(registry, &upstream.name, &server.url)));
                known.insert(server.url.clone(), Arc::downgrade(&standing));
                standing
            })
        };
        let standings: Vec<_> = servers.iter().map(standing).collect();
        drop(known);
        let upstream_health = UpstreamHealth {
            name: upstream.name.clone(),
            way: upstream.way.clone(),
            policy: upstream.policy.clone(),
            loops,
            servers,
            standings,
            tally,
            circuit,
        };
        upstream_health.forgive();
        upstream_health.tally.changes.fetch_add(1, Relaxed);
        upstream_health
    }

    /// What a new configuration no longer asks for ends at once.
    fn forgive(&self) {
        let _held = self.tally.lock();
        for standing in &self.standings {
            if self.policy.health.is_none() && !standing.up.swap(true, Relaxed) {
                standing.meter.set_up(true);
            }
            if self.ejection().is_none() && standing.out_until_ms.swap(0, Relaxed) != 0 {
                standing.meter.set_ejected(false);
            }
        }
    }

    /// A lone server is never ejected: there is nobody else to ask.
    fn ejection(&self) -> Option<&Ejection> {
        self.policy.ejection.as_ref().filter(|ejection| self.servers.len() > 1 && ejection.max_ejected > 0)
    }

    /// A number that changes with every change of a server's standing.
    pub fn changes(&self) -> u64 {
        self.tally.changes.load(Relaxed)
    }

    pub fn ms(&self, now: Instant) -> u64 {
        // From 1, for 0 is no time.
        now.saturating_duration_since(self.tally.origin).as_millis() as u64 + 1
    }

    pub fn state(&self, server: usize, now_ms: u64) -> State {
        let standing = &self.standings[server];
        if !standing.up.load(Relaxed) {
            return State::Down;
        }
        match standing.out_until_ms.load(Relaxed) {
            0 => {}
            until_ms => return State::Out(until_ms.saturating_sub(now_ms)),
        }
        let full = self.full_weight(server);
        if self.ejection().is_some_and(|ejection| standing.failures.load(Relaxed) >= ejection.failures) {
            return State::Failing(full);
        }
        let (back_ms, ramp_ms) = (standing.back_ms.load(Relaxed), self.policy.slow_start.as_millis() as u64);
        let passed_ms = now_ms.saturating_sub(back_ms);
        if back_ms == 0 || passed_ms >= ramp_ms {
            return State::In(full);
        }
        let part = RAMP_FROM + (1.0 - RAMP_FROM) * passed_ms as f64 / ramp_ms as f64;
        State::Growing((f64::from(full) * part) as u32)
    }

    /// Whether the last answer of a server was a failure.
    pub fn failed_last(&self, server: usize) -> bool {
        self.standings[server].failures.load(Relaxed) != 0
    }

    pub fn full_weight(&self, server: usize) -> u32 {
        self.servers[server].weight * WEIGHT_UNIT
    }

    /// How long a server has been due to be tried again.
    pub fn overdue_ms(&self, server: usize, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.standings[server].out_until_ms.load(Relaxed))
    }

    /// Takes it on to try a server whose ejection is over; nobody else does, until that is done or as
    /// much time has passed again.
    pub fn claim(&self, server: usize, now_ms: u64) -> bool {
        let (Some(ejection), standing) = (self.ejection(), &self.standings[server]) else { return false };
        let until_ms = standing.out_until_ms.load(Relaxed);
        // Ordering: relaxed; one number, and whoever changes it first has it.
        until_ms != 0
            && until_ms <= now_ms
            && standing
                .out_until_ms
                .compare_exchange(until_ms, now_ms + whole_ms(ejection.time), Relaxed, Relaxed)
                .is_ok()
    }

    /// What became of a request at a server. A good answer ends an ejection, unless the request was sent before it.
    pub fn report(&self, server: usize, sign: AttemptResult, chosen: Chosen, now: impl FnOnce() -> Instant) {
        let standing = &self.standings[server];
        let is_trial = chosen == Chosen::Trial;
        match sign {
            AttemptResult::Good => {
                if standing.failures.load(Relaxed) != 0 {
                    standing.failures.store(0, Relaxed);
                }
                if chosen != Chosen::InUse {
                    let now = now();
                    if is_trial || !self.was_just_back(standing, self.ms(now)) {
                        self.end_ejection(server, now, "a request succeeded");
                    }
                }
            }
            AttemptResult::Bad => {
                let failures = standing.failures.fetch_add(1, Relaxed) + 1;
                if let Some(ejection) = self.ejection()
                    && (is_trial || failures >= ejection.failures)
                {
                    self.eject(server, ejection, self.ms(now()), failures, is_trial);
                }
            }
            // It is for somebody else to try.
            AttemptResult::None if is_trial => {
                let now_ms = self.ms(now());
                // Unless the ejection has ended meanwhile.
                let again = |until_ms| (until_ms != 0).then_some(now_ms);
                let _ = standing.out_until_ms.fetch_update(Relaxed, Relaxed, again);
            }
            AttemptResult::None => {}
        }
    }

    fn eject(&self, server: usize, ejection: &Ejection, now_ms: u64, failures: u32, is_trial: bool) {
        let _held = self.tally.lock();
        let standing = &self.standings[server];
        let was_out = standing.out_until_ms.load(Relaxed) != 0;
        let others = self.standings.iter().filter(|other| other.out_until_ms.load(Relaxed) != 0).count();
        let most = (self.standings.len() * usize::from(ejection.max_ejected) / 100).max(1);
        // While a server is ejected, only its trial says something new. A trial says nothing special once the ejection has
        // ended otherwise.
        let is_ejected = if was_out { is_trial } else { failures >= ejection.failures && others < most };
        if !is_ejected {
            return;
        }
        // Whoever stayed for as long as the longest ejection begins anew.
        let stayed_ms = now_ms.saturating_sub(standing.back_ms.load(Relaxed));
        if !was_out && stayed_ms > whole_ms(ejection.max_time) {
            standing.ejections.store(0, Relaxed);
        }
        let before = standing.ejections.fetch_add(1, Relaxed);
        let time = ejection.time.saturating_mul(1 << before.min(20)).min(ejection.max_time.max(ejection.time));
        standing.out_until_ms.store(now_ms + whole_ms(time), Relaxed);
        standing.failures.store(0, Relaxed);
        standing.meter.set_ejected(true);
        self.tally.changes.fetch_add(1, Relaxed);
        let (upstream, url, for_ms) = (&self.name, &self.servers[server].url, whole_ms(time));
        if was_out {
            tracing::debug!(upstream, server = url, for_ms, "the server is still failing");
        } else {
            tracing::warn!(upstream, server = url, failures, for_ms, "the server is ejected: it failed in a row");
        }
    }

    /// Whether the last ejection of a server has ended only just now. An answer does not end the next one so soon:
    /// servers that fail most requests, but not all, would be ejected and back with every few of them.
    fn was_just_back(&self, standing: &ServerState, now_ms: u64) -> bool {
        let back_ms = standing.back_ms.load(Relaxed);
        let pause_ms = self.ejection().map_or(0, |ejection| whole_ms(ejection.time) / BACK_AGAIN_PART);
        back_ms != 0 && now_ms.saturating_sub(back_ms) < pause_ms
    }

    /// Ends the ejection of a server, if it is ejected.
    pub fn end_ejection(&self, server: usize, now: Instant, why: &str) {
        let _held = self.tally.lock();
        let standing = &self.standings[server];
        if standing.out_until_ms.swap(0, Relaxed) != 0 {
            standing.back_ms.store(self.ms(now), Relaxed);
            standing.failures.store(0, Relaxed);
            standing.meter.set_ejected(false);
            self.tally.changes.fetch_add(1, Relaxed);
            tracing::info!(upstream = self.name, server = self.servers[server].url, "the server is back: {why}");
        }
    }

    /// What the active checks say of a server, when that changes.
    pub fn set_up(&self, server: usize, up: bool, now: Instant, why: &str) {
        let _held = self.tally.lock();
        let standing = &self.standings[server];
        if standing.up.swap(up, Relaxed) == up {
            return;
        }
        standing.meter.set_up(up);
        let (upstream, url) = (&self.name, &self.servers[server].url);
        if up {
            standing.back_ms.store(self.ms(now), Relaxed);
            tracing::info!(upstream, server = url, "the server is healthy");
        } else {
            tracing::warn!(upstream, server = url, "the server is unhealthy: {why}");
        }
        self.tally.changes.fetch_add(1, Relaxed);
    }

    pub fn is_up(&self, server: usize) -> bool {
        self.standings[server].up.load(Relaxed)
    }

    /// Counts an active check. Returns whether it was the first one of the server.
    pub fn checked(&self, server: usize, passed: bool) -> bool {
        self.standings[server].meter.checked(passed);
        !self.standings[server].checked.swap(true, Relaxed)
    }

    /// What the operator is told on the admin address.
    pub fn describe(&self, now: Instant) -> Value {
        let now_ms = self.ms(now);
        let server = |(position, server): (usize, &Server)| {
            let (state, weight) = match self.state(position, now_ms) {
                State::In(weight) => ("in", weight),
                State::Growing(weight) => ("slow-start", weight),
                State::Failing(weight) => ("failing", weight),
                State::Out(_) => ("ejected", 0),
                State::Down => ("unhealthy", 0),
            };
            let standing = &self.standings[position];
            json!({
                "url": server.url,
                "weight": server.weight,
                "effective_weight": f64::from(weight) / f64::from(WEIGHT_UNIT),
                "state": state,
                "failures_in_a_row": standing.failures.load(Relaxed),
            })
        };
        json!({
            "name": self.name,
            "pending": self.circuit.waiting(),
            "servers": self.servers.iter().enumerate().map(server).collect::<Vec<_>>(),
        })
    }
}

impl Tally {
    fn new(now: Instant) -> Tally {
        Tally { origin: now, changes: AtomicU64::new(0), known: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::config::{HostField, Protocol, Scheme};

    const MS: Duration = Duration::from_millis(1);

    fn upstream_health(
        count: u16,
        ejection: Ejection,
        before: Option<&Arc<UpstreamHealth>>,
        now: Instant,
    ) -> Arc<UpstreamHealth> {
        let server = |port| Server {
            url: format!("http://a:{port}"),
            scheme: Scheme::Http,
            host: "a".to_owned(),
            port,
            weight: 2,
        };
        let policy = Policy { ejection: Some(ejection), slow_start: 100 * MS, ..Policy::default() };
        let servers: Vec<Server> = (1..=count).map(server).collect();
        let way = TransportSettings { protocol: Protocol::Http1, host: HostField::Keep, tls: None, resolve: MS };
        let upstream = Upstream { name: "u".to_owned(), target: Target::Servers(servers.clone()), way, policy };
        Arc::new(UpstreamHealth::new(&upstream, servers, before, &Registry::default(), 1, now))
    }

    fn ejection(max_ejected: u8) -> Ejection {
        Ejection { failures: 3, time: 100 * MS, max_time: 350 * MS, max_ejected, ..Ejection::default() }
    }

    fn fail(upstream_health: &UpstreamHealth, server: usize, times: u32, now: Instant) {
        (0..times).for_each(|_| upstream_health.report(server, AttemptResult::Bad, Chosen::InUse, || now));
    }

    fn is_out(upstream_health: &UpstreamHealth, server: usize, now: Instant) -> bool {
        matches!(upstream_health.state(server, upstream_health.ms(now)), State::Out(_))
    }

    #[test]
    fn failures_in_a_row_eject_and_others_do_not() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        for _ in 0..5 {
            fail(&upstream_health, 0, 2, now);
            upstream_health.report(0, AttemptResult::Good, Chosen::InUse, || now);
        }
        assert!(!is_out(&upstream_health, 0, now));
        let changes = upstream_health.changes();
        fail(&upstream_health, 0, 3, now);
        assert!(is_out(&upstream_health, 0, now) && upstream_health.changes() > changes);
        // What was under way then says nothing new.
        fail(&upstream_health, 0, 9, now);
        assert_eq!(upstream_health.state(0, upstream_health.ms(now)), State::Out(100));
    }

    #[test]
    fn never_more_than_the_share_and_never_a_lone_server() {
        let now = Clock::manual(0).instant();
        for (count, share, wanted) in [(1, 100, 0), (2, 10, 1), (3, 50, 1), (4, 50, 2), (5, 100, 5), (5, 0, 0)] {
            let upstream_health = upstream_health(count, ejection(share), None, now);
            (0..usize::from(count)).for_each(|server| fail(&upstream_health, server, 3, now));
            let out = (0..usize::from(count)).filter(|server| is_out(&upstream_health, *server, now)).count();
            assert_eq!(out, wanted, "{count} servers, {share} %");
        }
    }

    #[test]
    fn one_tries_and_every_failure_takes_twice_as_long() {
        let start = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, start);
        fail(&upstream_health, 1, 3, start);
        let mut now = start;
        for (lasts, next) in [(100, 200), (200, 350), (350, 350)] {
            assert_eq!(upstream_health.state(1, upstream_health.ms(now)), State::Out(lasts));
            assert!(!upstream_health.claim(1, upstream_health.ms(now + (lasts as u32 - 1) * MS)));
            now += lasts as u32 * MS;
            assert!(
                upstream_health.claim(1, upstream_health.ms(now)) && !upstream_health.claim(1, upstream_health.ms(now)),
                "one only"
            );
            upstream_health.report(1, AttemptResult::Bad, Chosen::Trial, || now);
            assert_eq!(upstream_health.state(1, upstream_health.ms(now)), State::Out(next));
        }
        // A trial that was given up is for the next.
        now += 350 * MS;
        assert!(upstream_health.claim(1, upstream_health.ms(now)));
        upstream_health.report(1, AttemptResult::None, Chosen::Trial, || now);
        assert!(upstream_health.claim(1, upstream_health.ms(now)));
        upstream_health.report(1, AttemptResult::Good, Chosen::Trial, || now);
        // Who gives up a trial of it now says nothing.
        upstream_health.report(1, AttemptResult::None, Chosen::Trial, || now);
        // It is back, and grows from a tenth of its weight.
        let weight = |after: u32| upstream_health.state(1, upstream_health.ms(now + after * MS));
        assert_eq!((weight(0), weight(50)), (State::Growing(204), State::Growing(1126)));
        assert_eq!(weight(100), State::In(2048));
        // Soon after, it is the same trouble; long after, another.
        fail(&upstream_health, 1, 3, now + 10 * MS);
        assert_eq!(upstream_health.state(1, upstream_health.ms(now + 10 * MS)), State::Out(350));
        now += 360 * MS;
        assert!(upstream_health.claim(1, upstream_health.ms(now)));
        upstream_health.report(1, AttemptResult::Good, Chosen::Trial, || now);
        now += 351 * MS;
        fail(&upstream_health, 1, 3, now);
        assert_eq!(upstream_health.state(1, upstream_health.ms(now)), State::Out(100));
    }

    #[test]
    fn an_answer_or_a_passed_check_ends_an_ejection() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, 0, 3, now);
        // An answer to a request that was sent before says nothing, and a failure of one sent since does not prolong it.
        upstream_health.report(0, AttemptResult::Good, Chosen::InUse, || now);
        upstream_health.report(0, AttemptResult::Bad, Chosen::Ejected, || now + 50 * MS);
        assert_eq!(upstream_health.state(0, upstream_health.ms(now)), State::Out(100));
        upstream_health.report(0, AttemptResult::Good, Chosen::Ejected, || now);
        assert!(!is_out(&upstream_health, 0, now) && !upstream_health.failed_last(0));
        fail(&upstream_health, 0, 3, now);
        assert!(is_out(&upstream_health, 0, now));
        upstream_health.end_ejection(0, now, "");
        assert!(!is_out(&upstream_health, 0, now));
    }

    #[test]
    fn an_answer_does_not_end_one_ejection_right_after_another() {
        let mut now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, 0, 3, now);
        upstream_health.report(0, AttemptResult::Good, Chosen::Ejected, || now);
        fail(&upstream_health, 0, 3, now);
        upstream_health.report(0, AttemptResult::Good, Chosen::Ejected, || now + 9 * MS);
        assert!(is_out(&upstream_health, 0, now));
        // A tenth of the ejection time later.
        now += 10 * MS;
        upstream_health.report(0, AttemptResult::Good, Chosen::Ejected, || now);
        assert!(!is_out(&upstream_health, 0, now));
    }

    #[test]
    fn a_trial_decides_nothing_once_the_ejection_has_ended() {
        let mut now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, 0, 3, now);
        now += 100 * MS;
        assert!(upstream_health.claim(0, upstream_health.ms(now)));
        upstream_health.end_ejection(0, now, "");
        upstream_health.report(0, AttemptResult::Bad, Chosen::Trial, || now);
        assert!(!is_out(&upstream_health, 0, now), "one failure");
        fail(&upstream_health, 0, 2, now);
        assert!(is_out(&upstream_health, 0, now));
    }

    #[test]
    fn a_server_that_max_ejected_protects_is_failing_until_it_answers() {
        let now = Clock::manual(0).instant();
        let upstream_health = upstream_health(2, ejection(50), None, now);
        fail(&upstream_health, 0, 3, now);
        fail(&upstream_health, 1, 3, now);
        assert_eq!(upstream_health.state(1, upstream_health.ms(now)), State::Failing(2048));
        upstream_health.report(1, AttemptResult::Good, Chosen::InUse, || now);
        assert_eq!(upstream_health.state(1, upstream_health.ms(now)), State::In(2048));
        // It is ejected at its next failure once the other is back.
        fail(&upstream_health, 1, 3, now);
        upstream_health.report(0, AttemptResult::Good, Chosen::Ejected, || now);
        assert!(!is_out(&upstream_health, 1, now));
        fail(&upstream_health, 1, 1, now);
        assert!(is_out(&upstream_health, 1, now));
    }

    #[test]
    fn standings_outlive_reloads_and_what_is_switched_off_ends() {
        let now = Clock::manual(0).instant();
        let first = upstream_health(3, ejection(50), None, now);
        fail(&first, 1, 3, now);
        let second = upstream_health(2, ejection(50), Some(&first), now);
        assert!(is_out(&second, 1, now));
        // Out and in again while somebody still remembers it.
        let third = upstream_health(1, ejection(50), Some(&second), now);
        let fourth = upstream_health(3, ejection(50), Some(&third), now);
        assert!(is_out(&fourth, 1, now));
        let off = upstream_health(3, ejection(0), Some(&fourth), now);
        assert!(!is_out(&off, 1, now));
    }
}
