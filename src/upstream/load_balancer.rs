//! Chooses the server of an upstream that gets a request.
//!
//! Every worker chooses by itself, from the same shared health state. An ordinary choice reads one number, which says
//! that no server has changed; only while a server is ejected, failing or in slow start does a choice read the clock
//! and each server's state. A server whose ejection time is over gets one request as a trial. That request must be
//! repeatable, so that a failed trial costs the client nothing. Ejected servers also get requests where no other server
//! is known to work. Servers of a priority (back-up servers) get requests only while no server of a smaller one works.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::{Method, Request};
use smallvec::SmallVec;

use super::pool::ServerPool;
use super::request_body::RequestBody;
use super::server_health::{ChoiceReason, ServerStatus, UpstreamHealth};
use transom_config::ServerId;
use transom_config::upstream::LoadBalancing;
use transom_limiter::handles::{Handle as _, IdVec};
use transom_limiter::key::Seed;
use transom_runtime::clock::Clock;

/// Chooses servers of one upstream, for one worker.
pub struct LoadBalancer {
    servers: IdVec<ServerId, Rc<ServerPool>>,
    /// Hashes of the servers' URLs; equal on all gateways, so that they choose alike.
    name_hashes: Vec<u64>,
    /// The priorities of the servers, the smallest first.
    priorities: SmallVec<[u16; 2]>,
    view: RefCell<ServersView>,
    /// The number of changes when the view was refreshed.
    seen_changes: Cell<u64>,
    /// Whether the view is valid until that number changes.
    is_settled: Cell<bool>,
}

/// The servers at the last refresh.
struct ServersView {
    /// 0: not chosen.
    weights: IdVec<ServerId, u32>,
    statuses: IdVec<ServerId, ServerStatus>,
    turns: Vec<i64>,
    /// The priority of the servers that are chosen.
    priority: u16,
}

impl ServersView {
    fn choice(&self, server: ServerId) -> Choice {
        let is_ejected = matches!(self.statuses[server], ServerStatus::Ejected(_));
        Choice { server, reason: if is_ejected { ChoiceReason::Ejected } else { ChoiceReason::Available } }
    }
}

/// Whether a server is in use and not failing.
fn is_working(state: ServerStatus) -> bool {
    matches!(state, ServerStatus::InUse(_) | ServerStatus::SlowStart(_))
}

/// The chosen server.
#[derive(Clone, Copy)]
pub struct Choice {
    pub server: ServerId,
    pub reason: ChoiceReason,
}

/// The servers that a request was already sent to.
pub type TriedServers = SmallVec<[ServerId; 4]>;

/// The properties of a request that the choice of a server and a connection depends on.
#[derive(Clone, Copy)]
pub struct RequestTraits {
    /// The hash of the key for `hash` balancing; `None` where the request lacks the key.
    pub hash_key: Option<NonZeroU64>,
    /// Whether the request can be sent again.
    pub is_repeatable: bool,
    /// The request asks to switch protocols.
    pub is_upgrade: bool,
    /// The address of the client.
    pub client: Option<IpAddr>,
}

impl RequestTraits {
    pub fn of(request: &Request<RequestBody>, key: Option<NonZeroU64>, client: Option<IpAddr>) -> RequestTraits {
        let handshake = matches!(request.body(), RequestBody::Upgrade);
        let sends_nothing = handshake || matches!(request.body(), RequestBody::Empty);
        RequestTraits {
            hash_key: key,
            is_repeatable: sends_nothing && is_idempotent(request.method()),
            is_upgrade: handshake,
            client,
        }
    }
}

/// Idempotent methods (RFC 9110, section 9.2.2).
fn is_idempotent(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE].contains(method)
}

impl LoadBalancer {
    pub fn new(upstream_health: &UpstreamHealth, servers: IdVec<ServerId, Rc<ServerPool>>) -> LoadBalancer {
        let count = servers.len();
        let mut priorities: SmallVec<[u16; 2]> =
            upstream_health.servers.iter().map(|known| known.server.priority).collect();
        priorities.sort_unstable();
        priorities.dedup();
        LoadBalancer {
            servers,
            priorities,
            name_hashes: upstream_health.servers.iter().map(|known| Seed::SHARED.hash(&[&known.server.url])).collect(),
            view: RefCell::new(ServersView {
                weights: vec![0; count].into(),
                statuses: vec![ServerStatus::Unhealthy; count].into(),
                turns: vec![0; count],
                priority: 0,
            }),
            seen_changes: Cell::new(0),
            is_settled: Cell::new(false),
        }
    }

    pub fn servers(&self) -> &IdVec<ServerId, Rc<ServerPool>> {
        &self.servers
    }

    /// The server for the first attempt. There must be one.
    pub fn choose_first(&self, upstream_health: &Arc<UpstreamHealth>, traits: RequestTraits, clock: &Clock) -> Choice {
        if self.servers.len() == 1 {
            return Choice { server: ServerId::FIRST, reason: ChoiceReason::Available };
        }
        let mut view = self.view.borrow_mut();
        if !(self.is_settled.get() && self.seen_changes.get() == upstream_health.changes()) {
            let now_ms = upstream_health.elapsed_ms(clock.instant());
            self.refresh(upstream_health, &mut view, now_ms);
            if let Some(server) = self.claim_trial(upstream_health, &mut view, traits, now_ms) {
                return Choice { server, reason: ChoiceReason::Trial };
            }
        }
        let server = self.pick(upstream_health, &mut view, traits.hash_key).unwrap_or(ServerId::FIRST);
        view.choice(server)
    }

    /// The server for a retry. In this order: one that was not tried and works, first those whose last request did not
    /// fail; one that was not tried and is ejected, which may work again; one that was not tried and is failing; one
    /// that was tried and is in use; any. Among these, those of the smallest priority.
    pub fn choose_next(
        &self,
        upstream_health: &Arc<UpstreamHealth>,
        traits: RequestTraits,
        tried: &TriedServers,
        now: Instant,
    ) -> Choice {
        let mut view = self.view.borrow_mut();
        self.refresh(upstream_health, &mut view, upstream_health.elapsed_ms(now));
        let is_untried = |server| !tried.contains(&server);
        let mut pick_of = |priority: u16, may: &dyn Fn(ServerId, ServerStatus) -> bool| {
            let may = |server, state| upstream_health.priority(server) == priority && may(server, state);
            self.pick_where(upstream_health, &mut view, traits.hash_key, may)
        };
        let works = |server, state| is_untried(server) && is_working(state);
        let working = self.priorities.iter().find_map(|priority| {
            pick_of(*priority, &|server, state| works(server, state) && !upstream_health.failed_last(server))
                .or_else(|| pick_of(*priority, &works))
        });
        let mut pick = |may: &dyn Fn(ServerId, ServerStatus) -> bool| {
            self.priorities.iter().find_map(|priority| pick_of(*priority, may))
        };
        let server = working
            .or_else(|| pick(&|server, state| is_untried(server) && matches!(state, ServerStatus::Ejected(_))))
            .or_else(|| pick(&|server, state| is_untried(server) && matches!(state, ServerStatus::Failing(_))))
            .or_else(|| pick(&|_, state| is_working(state) || matches!(state, ServerStatus::Failing(_))))
            .or_else(|| pick(&|server, _| is_untried(server)))
            .or_else(|| pick(&|_, _| true));
        view.choice(server.unwrap_or(ServerId::FIRST))
    }

    /// The choice of this server, as of the last choice.
    pub fn choice(&self, server: ServerId) -> Choice {
        self.view.borrow().choice(server)
    }

    /// Whether there is a server that works, whose last request did not fail, and that is neither `server` nor one of
    /// `tried`.
    pub fn has_other(
        &self,
        upstream_health: &UpstreamHealth,
        server: ServerId,
        tried: &TriedServers,
        now: Instant,
    ) -> bool {
        let now_ms = upstream_health.elapsed_ms(now);
        let is_other = |other: &ServerId| *other != server && !tried.contains(other);
        let mut others = self.servers.ids().filter(is_other);
        others.any(|other| is_working(upstream_health.status(other, now_ms)) && !upstream_health.failed_last(other))
    }

    /// Reads the state of all servers.
    fn refresh(&self, upstream_health: &UpstreamHealth, view: &mut ServersView, now_ms: u64) {
        // Read before the states, so that a change between the two reads refreshes the view again.
        self.seen_changes.set(upstream_health.changes());
        let mut is_settled = true;
        for server in self.servers.ids() {
            let state = upstream_health.status(server, now_ms);
            view.statuses[server] = state;
            is_settled &= matches!(state, ServerStatus::InUse(_) | ServerStatus::Unhealthy);
        }
        let smallest = |may: fn(ServerStatus) -> bool| {
            let servers = self.servers.ids().filter(|server| may(view.statuses[*server]));
            servers.map(|server| upstream_health.priority(server)).min()
        };
        let working = smallest(is_working);
        // If no server is known to work, ejected servers may; if all are unhealthy, any may.
        let usable = working.or_else(|| smallest(|state| state != ServerStatus::Unhealthy));
        view.priority = usable.or_else(|| smallest(|_| true)).unwrap_or(0);
        for server in self.servers.ids() {
            view.weights[server] = match view.statuses[server] {
                _ if upstream_health.priority(server) != view.priority => 0,
                ServerStatus::InUse(weight) | ServerStatus::SlowStart(weight) | ServerStatus::Failing(weight) => weight,
                ServerStatus::Ejected(_) if working.is_none() => upstream_health.full_weight(server),
                ServerStatus::Unhealthy if usable.is_none() => upstream_health.full_weight(server),
                ServerStatus::Ejected(_) | ServerStatus::Unhealthy => 0,
            };
        }
        self.is_settled.set(is_settled);
    }

    /// A server whose ejection time is over, if this request is its trial.
    fn claim_trial(
        &self,
        upstream_health: &Arc<UpstreamHealth>,
        view: &mut ServersView,
        traits: RequestTraits,
        now_ms: u64,
    ) -> Option<ServerId> {
        let ejection_ms =
            upstream_health.policy.ejection.as_ref().map_or(0, |ejection| ejection.time.as_millis() as u64);
        let priority = |server| upstream_health.priority(server);
        // A back-up server has no trial while others work.
        let is_due = |server: &ServerId| {
            view.statuses[*server] == ServerStatus::Ejected(0) && priority(*server) <= view.priority
        };
        let due = self.servers.ids().find(is_due)?;
        if !traits.is_repeatable && upstream_health.trial_overdue_ms(due, now_ms) < ejection_ms {
            return None;
        }
        if let (LoadBalancing::Hash(_), Some(_)) = (&upstream_health.policy.balance, traits.hash_key) {
            // A key of another server stays with that server.
            let is_in_use = |state| !matches!(state, ServerStatus::Ejected(_) | ServerStatus::Unhealthy);
            let may = |server, state| server == due || priority(server) == priority(due) && is_in_use(state);
            if self.pick_where(upstream_health, view, traits.hash_key, may) != Some(due) {
                return None;
            }
        }
        upstream_health.claim_trial(due, now_ms).then_some(due)
    }

    fn pick(
        &self,
        upstream_health: &UpstreamHealth,
        view: &mut ServersView,
        key: Option<NonZeroU64>,
    ) -> Option<ServerId> {
        let ServersView { weights, turns, .. } = view;
        self.pick_by_policy(&upstream_health.policy.balance, weights.as_slice(), turns, key)
    }

    /// Picks among the servers that `may` accepts; those out of use count with their full weight.
    fn pick_where(
        &self,
        upstream_health: &UpstreamHealth,
        view: &mut ServersView,
        key: Option<NonZeroU64>,
        may: impl Fn(ServerId, ServerStatus) -> bool,
    ) -> Option<ServerId> {
        let weight = |server| match view.statuses[server] {
            state if !may(server, state) => 0,
            ServerStatus::InUse(weight) | ServerStatus::SlowStart(weight) | ServerStatus::Failing(weight) => weight,
            ServerStatus::Ejected(_) | ServerStatus::Unhealthy => upstream_health.full_weight(server),
        };
        let weights: SmallVec<[u32; 16]> = self.servers.ids().map(weight).collect();
        self.pick_by_policy(&upstream_health.policy.balance, &weights, &mut view.turns, key)
    }

    fn pick_by_policy(
        &self,
        balance: &LoadBalancing,
        weights: &[u32],
        turns: &mut [i64],
        key: Option<NonZeroU64>,
    ) -> Option<ServerId> {
        let position = match (balance, key) {
            (LoadBalancing::RoundRobin, _) => round_robin(weights, turns),
            (LoadBalancing::Hash(_), Some(key)) => rendezvous(weights, &self.name_hashes, key.get()),
            (LoadBalancing::LeastRequests | LoadBalancing::Hash(_), _) => {
                let active_requests = |position| self.servers[ServerId::at(position)].active_requests();
                least_requests(weights, active_requests, |below| fastrand::u64(..below))
            }
        };
        position.map(ServerId::at)
    }
}

/// Power of two choices (Mitzenmacher 2001): draws two servers at random, by weight, and takes the one with fewer
/// requests in flight for its weight. The second differs from the first, so that a server that hangs is avoided
/// wherever there is another. `random` returns a number below its argument.
fn least_requests(
    weights: &[u32],
    active_requests: impl Fn(usize) -> u32,
    mut random: impl FnMut(u64) -> u64,
) -> Option<usize> {
    let total = total(weights);
    if total == 0 {
        return None;
    }
    let first = server_at(weights, random(total), None)?;
    let rest = total - u64::from(weights[first]);
    if rest == 0 {
        return Some(first);
    }
    let second = server_at(weights, random(rest), Some(first))?;
    // Compares the ratios without a division. The request itself is not counted: idle servers are equal, and then the
    // weights by which the first was drawn decide.
    let load = |of: usize, other: usize| u64::from(active_requests(of)) * u64::from(weights[other]);
    Some(if load(second, first) < load(first, second) { second } else { first })
}

/// Smooth weighted round robin, as in nginx: every server gains its weight; the one with the highest value is chosen
/// and loses the total. The turns of a heavy server are spread among those of the others.
fn round_robin(weights: &[u32], turns: &mut [i64]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (server, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
        turns[server] += i64::from(*weight);
        if best.is_none_or(|best| turns[server] > turns[best]) {
            best = Some(server);
        }
    }
    let best = best?;
    turns[best] -= i64::try_from(total(weights)).unwrap_or(i64::MAX);
    Some(best)
}

/// Weighted rendezvous hashing (Thaler and Ravishankar 1998; weights after Schindelhauer and Schomaker 2005): every
/// server draws a number from the key and its own name, and the best draw wins. When a server leaves, only its keys
/// move, each to its second choice; when weights change, as few keys as possible move. No table has to be rebuilt.
fn rendezvous(weights: &[u32], names: &[u64], key: u64) -> Option<usize> {
    let draw = |server: usize| {
        // In the open interval from 0 to 1, so that the logarithm is negative.
        let chance = ((mix(key ^ names[server]) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        -chance.ln() / f64::from(weights[server])
    };
    let candidates = (0..weights.len()).filter(|server| weights[*server] > 0);
    candidates.map(|server| (draw(server), server)).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, server)| server)
}

fn total(weights: &[u32]) -> u64 {
    weights.iter().map(|weight| u64::from(*weight)).sum()
}

/// The server at a point on the line of all weights, leaving out `without`.
fn server_at(weights: &[u32], mut point: u64, without: Option<usize>) -> Option<usize> {
    for (server, weight) in weights.iter().enumerate().filter(|(server, _)| Some(*server) != without) {
        match point.checked_sub(u64::from(*weight)) {
            Some(rest) => point = rest,
            None => return Some(server),
        }
    }
    None
}

/// The finalizer of SplitMix64: every bit of the result depends on every bit of the input.
fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::upstream::pool::ConnectionPool;
    use crate::upstream::server_health::AttemptResult;
    use transom_config::upstream::{
        Ejection, HostField, Server, Target, TransportSettings, Upstream, UpstreamPolicy, UpstreamProtocol, parse_url,
    };
    use transom_runtime::metrics::upstream::ActiveGauge;
    use transom_runtime::metrics::{Registry, WorkerId};

    /// Random numbers with a fixed seed.
    fn chance() -> impl FnMut(u64) -> u64 {
        let mut random = fastrand::Rng::with_seed(7);
        move |below| random.u64(..below)
    }

    fn shares(servers: usize, picks: usize, mut pick: impl FnMut() -> usize) -> Vec<f64> {
        let mut counts = vec![0; servers];
        (0..picks).for_each(|_| counts[pick()] += 1);
        counts.into_iter().map(|count: usize| count as f64 / picks as f64).collect()
    }

    fn names(servers: u64) -> Vec<u64> {
        (1..=servers).map(|n| mix(n << 32)).collect()
    }

    /// Servers of these priorities, which are ejected after three failures.
    fn with_priorities(priorities: &[u16], clock: &Clock) -> (Arc<UpstreamHealth>, LoadBalancer) {
        let server = |(at, priority): (usize, &u16)| {
            let (server, _) = parse_url(&format!("http://127.0.0.1:{}", 1000 + at), "a server", "").unwrap();
            Server { priority: *priority, ..server }
        };
        let transport = TransportSettings {
            protocol: UpstreamProtocol::Auto,
            host: HostField::Keep,
            tls: None,
            resolve: Duration::from_secs(1),
            dns_servers: Vec::new(),
            proxy_protocol: None,
        };
        let ejection = Ejection { failures: 3, time: Duration::from_secs(1), ..Ejection::default() };
        let policy = UpstreamPolicy {
            balance: LoadBalancing::RoundRobin,
            ejection: Some(ejection),
            slow_start: Duration::ZERO,
            ..UpstreamPolicy::default()
        };
        let servers: IdVec<ServerId, Server> = priorities.iter().enumerate().map(server).collect();
        let (name, target) = ("u".to_owned(), Target::Servers(servers.clone()));
        let upstream = Upstream { name, target, policy, transport };
        let registry = Registry::default();
        let upstream_health =
            Arc::new(UpstreamHealth::new(&upstream, servers.clone().into(), None, &registry, 1, clock.instant()));
        let pool = |server: &Server| {
            let pool = ConnectionPool::new(server.clone(), &upstream.transport, None, clock.clone());
            ServerPool::new(pool, ActiveGauge::new(&registry, WorkerId::PROCESS, "u", &server.url))
        };
        let load_balancer = LoadBalancer::new(&upstream_health, servers.iter().map(pool).collect());
        (upstream_health, load_balancer)
    }

    const TRAITS: RequestTraits =
        RequestTraits { hash_key: None, is_repeatable: true, is_upgrade: false, client: None };
    const FAILURE: AttemptResult = AttemptResult::Failure;

    /// The servers that get requests, one after the other.
    fn chosen(load_balancer: &LoadBalancer, upstream_health: &Arc<UpstreamHealth>, clock: &Clock) -> Vec<usize> {
        let choose = || load_balancer.choose_first(upstream_health, TRAITS, clock).server.index();
        let mut chosen: Vec<usize> = (0..8).map(|_| choose()).collect();
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    #[test]
    fn a_backup_server_gets_requests_only_while_no_other_works() {
        let clock = Clock::manual(0);
        let (upstream_health, load_balancer) = with_priorities(&[0, 0, 1, 1], &clock);
        let set = |server: usize, up: bool| upstream_health.set_healthy(ServerId::at(server), up, clock.instant(), "");
        let fail = |server: usize| {
            let fail =
                || upstream_health.report(ServerId::at(server), FAILURE, ChoiceReason::Available, || clock.instant());
            (0..3).for_each(|_| fail());
        };
        let chosen = || chosen(&load_balancer, &upstream_health, &clock);
        assert_eq!(chosen(), [0, 1]);
        set(0, false);
        assert_eq!(chosen(), [1]);
        // A retry takes the other server first, whose last request has failed, and then a back-up server.
        let next = |tried: &[usize]| {
            let tried = tried.iter().map(|server| ServerId::at(*server)).collect();
            load_balancer.choose_next(&upstream_health, TRAITS, &tried, clock.instant()).server.index()
        };
        set(0, true);
        upstream_health.report(ServerId::FIRST, FAILURE, ChoiceReason::Available, || clock.instant());
        assert_eq!(next(&[1]), 0);
        assert!(next(&[0, 1]) >= 2);
        // One is ejected, and the other unhealthy.
        fail(0);
        set(1, false);
        assert_eq!(chosen(), [2, 3]);
        set(2, false);
        assert_eq!(chosen(), [3]);
        // Nothing works: first the server that may work again.
        set(3, false);
        assert_eq!(chosen(), [0]);
        set(0, false);
        assert_eq!(chosen(), [0, 1]);
        set(3, true);
        assert_eq!(chosen(), [3]);
        set(1, true);
        assert_eq!(chosen(), [1]);
    }

    #[test]
    fn an_ejected_backup_server_has_no_trial_while_others_work() {
        let clock = Clock::stepped(0, Clock::manual(0).instant());
        let (upstream_health, load_balancer) = with_priorities(&[0, 1], &clock);
        let backup = ServerId::at(1);
        let report = |result| upstream_health.report(backup, result, ChoiceReason::Available, || clock.instant());
        (0..3).for_each(|_| report(FAILURE));
        clock.advance(Duration::from_secs(1));
        assert_eq!(
            upstream_health.status(backup, upstream_health.elapsed_ms(clock.instant())),
            ServerStatus::Ejected(0)
        );
        assert_eq!(chosen(&load_balancer, &upstream_health, &clock), [0]);
        upstream_health.set_healthy(ServerId::FIRST, false, clock.instant(), "");
        let choice = load_balancer.choose_first(&upstream_health, TRAITS, &clock);
        assert_eq!((choice.server, choice.reason), (backup, ChoiceReason::Trial));
    }

    #[test]
    fn idle_servers_are_chosen_by_weight() {
        let mut random = chance();
        let weights = [1, 3, 0, 6];
        let shares = shares(4, 100_000, || least_requests(&weights, |_| 0, &mut random).unwrap());
        for (share, wanted) in shares.iter().zip([0.1, 0.3, 0.0, 0.6]) {
            assert!((share - wanted).abs() < 0.01, "{shares:?}");
        }
    }

    #[test]
    fn requests_in_flight_follow_the_weights() {
        // Requests never end: the number in flight closely follows the weights.
        let (mut random, mut active) = (chance(), [0_u32; 3]);
        for _ in 0..6000 {
            let server = least_requests(&[1, 2, 3], |server| active[server], &mut random).unwrap();
            active[server] += 1;
        }
        for (active, wanted) in active.into_iter().zip([1000, 2000, 3000]) {
            assert!(active.abs_diff(wanted) <= 5, "{active} of {wanted}");
        }
    }

    #[test]
    fn a_server_that_hangs_gets_no_requests() {
        let mut random = chance();
        let mut choose_ = |weights: &[u32]| least_requests(weights, |server| u32::from(server == 1) * 100, &mut random);
        assert!((0..1000).all(|_| choose_(&[1, 1]) == Some(0)));
        assert!((0..1000).all(|_| choose_(&[1, 5, 1]) != Some(1)));
        assert_eq!(choose_(&[0, 1]), Some(1));
        assert_eq!(choose_(&[0, 0]), None);
    }

    #[test]
    fn round_robin_is_exact_and_smooth() {
        let (weights, mut turns) = ([5, 1, 1], [0; 3]);
        let order: Vec<usize> = (0..7).map(|_| round_robin(&weights, &mut turns).unwrap()).collect();
        assert_eq!(order, [0, 0, 1, 0, 2, 0, 0]);
        assert_eq!(turns, [0; 3]);
        // A server with weight 0 gains nothing meanwhile.
        let order: Vec<usize> = (0..4).map(|_| round_robin(&[1, 0, 1], &mut turns).unwrap()).collect();
        assert_eq!(order, [0, 2, 0, 2]);
        assert_eq!(round_robin(&[0, 0], &mut turns), None);
    }

    #[test]
    fn keys_are_spread_by_weight() {
        let names = names(4);
        let mut key = 0;
        let shares = shares(4, 100_000, || {
            key += 1;
            rendezvous(&[1, 2, 3, 4], &names, mix(key)).unwrap()
        });
        for (share, wanted) in shares.iter().zip([0.1, 0.2, 0.3, 0.4]) {
            assert!((share - wanted).abs() < 0.01, "{shares:?}");
        }
    }

    #[test]
    fn only_the_keys_of_a_removed_server_move() {
        let names = names(5);
        let (all, without) = ([1, 1, 2, 1, 1], [1, 1, 0, 1, 1]);
        let mut moved = [0; 5];
        for key in (0..50_000).map(mix) {
            let (before, after) = (rendezvous(&all, &names, key).unwrap(), rendezvous(&without, &names, key).unwrap());
            if before == 2 {
                moved[after] += 1;
            } else {
                assert_eq!(before, after);
            }
        }
        // The keys spread over all remaining servers.
        assert!(moved.iter().enumerate().all(|(server, moved)| (server == 2) == (*moved == 0)), "{moved:?}");
        let (min, max) = (moved.iter().filter(|n| **n > 0).min().unwrap(), moved.iter().max().unwrap());
        assert!(max * 10 < min * 12, "{moved:?}");
    }

    #[test]
    fn a_growing_weight_gains_keys_and_loses_none() {
        let names = names(3);
        for key in (0..10_000).map(mix) {
            let (before, after) =
                (rendezvous(&[10, 10, 1], &names, key).unwrap(), rendezvous(&[10, 10, 10], &names, key).unwrap());
            assert!(after == before || after == 2);
        }
        assert_eq!(rendezvous(&[0, 0, 0], &names, 1), None);
    }
}
