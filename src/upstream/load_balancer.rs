//! Which of an upstream's servers gets a request, of those that can take one.
//!
//! Every loop chooses by itself, from the same standings. An ordinary choice looks at one number, which
//! says that no server has changed; only where one is away or growing, each is looked at, and the
//! clock read. A server whose ejection is over gets one request, if it can be made again: nobody
//! should pay for the trial. Ejected servers are also asked where no other is known to work.

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::{Method, Request};
use smallvec::SmallVec;

use super::lb_algorithms;
use super::request_upload::Upload;
use super::server_health::{Chosen, State, UpstreamHealth};
use super::server_pool::ServerPool;
use crate::clock::Clock;
use crate::config::upstream_policy::Balance;
use transom_limiter::key::Seed;

/// Chooses servers, for one upstream in one loop.
pub struct Balancer {
    places: Vec<Rc<ServerPool>>,
    /// Of the servers' names; equal on all gateways, so that they choose alike.
    names: Vec<u64>,
    view: RefCell<Sight>,
    /// The standings' number of changes when they were looked at.
    seen: Cell<u64>,
    /// Whether they stay as they were seen until that number changes.
    is_settled: Cell<bool>,
}

/// The servers as they were last seen.
struct Sight {
    /// 0: not to be chosen.
    weights: Vec<u32>,
    states: Vec<State>,
    turns: Vec<i64>,
}

impl Sight {
    fn choice(&self, server: usize) -> Choice {
        let is_ejected = matches!(self.states[server], State::Out(_));
        Choice { server, chosen: if is_ejected { Chosen::Ejected } else { Chosen::InUse } }
    }
}

/// Whether a server is in use and not failing.
fn works(state: State) -> bool {
    matches!(state, State::In(_) | State::Growing(_))
}

/// What is chosen.
#[derive(Clone, Copy)]
pub struct Choice {
    pub server: usize,
    pub chosen: Chosen,
}

/// The servers that a request has been to.
pub type Tried = SmallVec<[u32; 4]>;

/// What a choice, of a server and of a connection to it, depends on beside these.
#[derive(Clone, Copy)]
pub struct Asked {
    /// What a hash is of; `None` where the request lacks it.
    pub key: Option<NonZeroU64>,
    /// Whether it can be sent again.
    pub repeatable: bool,
    /// It asks for another protocol.
    pub handshake: bool,
}

impl Asked {
    pub fn of(request: &Request<Upload>, key: Option<NonZeroU64>) -> Asked {
        let handshake = matches!(request.body(), Upload::Upgrade);
        let sends_nothing = handshake || matches!(request.body(), Upload::Empty);
        Asked { key, repeatable: sends_nothing && is_idempotent(request.method()), handshake }
    }
}

/// Methods whose effect is the same when the request is made twice (RFC 9110, section 9.2.2).
fn is_idempotent(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE].contains(method)
}

impl Balancer {
    pub fn new(upstream_health: &UpstreamHealth, places: Vec<Rc<ServerPool>>) -> Balancer {
        let count = places.len();
        Balancer {
            places,
            names: upstream_health.servers.iter().map(|server| Seed::SHARED.hash(&[&server.url])).collect(),
            view: RefCell::new(Sight {
                weights: vec![0; count],
                states: vec![State::Down; count],
                turns: vec![0; count],
            }),
            seen: Cell::new(0),
            is_settled: Cell::new(false),
        }
    }

    pub fn places(&self) -> &[Rc<ServerPool>] {
        &self.places
    }

    /// The server for a request that has been nowhere yet.
    pub fn first(&self, upstream_health: &Arc<UpstreamHealth>, asked: Asked, clock: &Clock) -> Choice {
        if self.places.len() == 1 {
            return Choice { server: 0, chosen: Chosen::InUse };
        }
        let mut sight = self.view.borrow_mut();
        if !(self.is_settled.get() && self.seen.get() == upstream_health.changes()) {
            let now_ms = upstream_health.ms(clock.instant());
            self.look(upstream_health, &mut sight, now_ms);
            if let Some(server) = self.trial(upstream_health, &mut sight, asked, now_ms) {
                return Choice { server, chosen: Chosen::Trial };
            }
        }
        let server = self.pick(upstream_health, &mut sight, asked.key).unwrap_or(0);
        sight.choice(server)
    }

    /// The server for a further try. In this order: one that was not tried and works, those before that did not fail
    /// last; one that was not tried and is ejected, which may be back; one that was not tried and is failing; one that
    /// was tried and is in use; any.
    pub fn next(&self, upstream_health: &Arc<UpstreamHealth>, asked: Asked, tried: &Tried, now: Instant) -> Choice {
        let mut sight = self.view.borrow_mut();
        self.look(upstream_health, &mut sight, upstream_health.ms(now));
        let fresh = |server: usize| !tried.contains(&(server as u32));
        let mut pick =
            |may: &dyn Fn(usize, State) -> bool| self.pick_where(upstream_health, &mut sight, asked.key, may);
        let server = pick(&|server, state| fresh(server) && works(state) && !upstream_health.failed_last(server))
            .or_else(|| pick(&|server, state| fresh(server) && works(state)))
            .or_else(|| pick(&|server, state| fresh(server) && matches!(state, State::Out(_))))
            .or_else(|| pick(&|server, state| fresh(server) && matches!(state, State::Failing(_))))
            .or_else(|| pick(&|_, state| works(state) || matches!(state, State::Failing(_))))
            .or_else(|| pick(&|server, _| fresh(server)))
            .or_else(|| pick(&|_, _| true));
        sight.choice(server.unwrap_or(0))
    }

    /// Whether there is a server that works, did not fail last, and is neither `server` nor one of those that were
    /// tried.
    pub fn has_other(&self, upstream_health: &UpstreamHealth, server: usize, tried: &Tried, now: Instant) -> bool {
        let now_ms = upstream_health.ms(now);
        let is_other = |other: &usize| *other != server && !tried.contains(&(*other as u32));
        let mut others = (0..self.places.len()).filter(is_other);
        others.any(|other| works(upstream_health.state(other, now_ms)) && !upstream_health.failed_last(other))
    }

    /// Looks at all servers anew.
    fn look(&self, upstream_health: &UpstreamHealth, sight: &mut Sight, now_ms: u64) {
        // Before the standings, so that a change between the two is looked at again.
        self.seen.set(upstream_health.changes());
        let mut settled = true;
        for server in 0..self.places.len() {
            let state = upstream_health.state(server, now_ms);
            sight.states[server] = state;
            settled &= matches!(state, State::In(_) | State::Down);
            sight.weights[server] = match state {
                State::In(weight) | State::Growing(weight) | State::Failing(weight) => weight,
                State::Out(_) | State::Down => 0,
            };
        }
        if !sight.states.iter().any(|state| works(*state)) {
            // None is known to work. Ejected servers may; where all are unhealthy, any of them may.
            let all_down = sight.states.iter().all(|state| *state == State::Down);
            for (server, state) in sight.states.iter().enumerate() {
                if matches!(state, State::Out(_)) || all_down {
                    sight.weights[server] = upstream_health.full_weight(server);
                }
            }
        }
        self.is_settled.set(settled);
    }

    /// A server whose ejection is over, if this request is the one to try it.
    fn trial(
        &self,
        upstream_health: &Arc<UpstreamHealth>,
        sight: &mut Sight,
        asked: Asked,
        now_ms: u64,
    ) -> Option<usize> {
        let patience_ms =
            upstream_health.policy.ejection.as_ref().map_or(0, |ejection| ejection.time.as_millis() as u64);
        let due = (0..self.places.len()).find(|server| sight.states[*server] == State::Out(0))?;
        if !asked.repeatable && upstream_health.overdue_ms(due, now_ms) < patience_ms {
            return None;
        }
        if let (Balance::Hash(_), Some(_)) = (&upstream_health.policy.balance, asked.key) {
            // A key that belongs elsewhere stays there.
            let may = |server, state| server == due || !matches!(state, State::Out(_) | State::Down);
            if self.pick_where(upstream_health, sight, asked.key, may) != Some(due) {
                return None;
            }
        }
        upstream_health.claim(due, now_ms).then_some(due)
    }

    fn pick(&self, upstream_health: &UpstreamHealth, sight: &mut Sight, key: Option<NonZeroU64>) -> Option<usize> {
        let Sight { weights, turns, .. } = sight;
        self.by(&upstream_health.policy.balance, weights, turns, key)
    }

    /// Picks among the servers that may be chosen; those that are away with the weight they had.
    fn pick_where(
        &self,
        upstream_health: &UpstreamHealth,
        sight: &mut Sight,
        key: Option<NonZeroU64>,
        may: impl Fn(usize, State) -> bool,
    ) -> Option<usize> {
        let weight = |server: usize| match sight.states[server] {
            state if !may(server, state) => 0,
            State::In(weight) | State::Growing(weight) | State::Failing(weight) => weight,
            State::Out(_) | State::Down => upstream_health.full_weight(server),
        };
        let weights: SmallVec<[u32; 16]> = (0..self.places.len()).map(weight).collect();
        self.by(&upstream_health.policy.balance, &weights, &mut sight.turns, key)
    }

    fn by(&self, balance: &Balance, weights: &[u32], turns: &mut [i64], key: Option<NonZeroU64>) -> Option<usize> {
        match (balance, key) {
            (Balance::RoundRobin, _) => lb_algorithms::round_robin(weights, turns),
            (Balance::Hash(_), Some(key)) => lb_algorithms::rendezvous(weights, &self.names, key.get()),
            (Balance::LeastRequests | Balance::Hash(_), _) => lb_algorithms::least_requests(
                weights,
                |server| self.places[server].under_way(),
                |below| fastrand::u64(..below),
            ),
        }
    }
}
