//! Gateways, each with the code of this crate as it runs in production, their store, and a clock; and what a user may rely on.
//!
//! A step is an [`Event`]; then all gateways run until they wait for another event. Nothing else happens: time, calls and replies
//! move only by events. So a list of events always leads to the same state.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::future::poll_fn;
use std::hash::{BuildHasher, Hash, Hasher};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use foldhash::fast::FixedState;
use tokio::task::{AbortHandle, JoinHandle, LocalSet};

use super::delayed_request::{Decided, WaitingGateway};
use crate::counter_access::{CounterAccess, RequestKeys};
use crate::decision_queries::KeyQuery;
use crate::scripts::Refund;
use crate::settlement::RuleCharges;
use crate::shared_counters::{SharedByWorkers, SharedCounters};
use crate::shared_decision::{BeginResult, SharedOutcome};
use crate::simulated_store::network::{Network, hash_of};
use crate::test_worker::{START_MS, keyed_request};
use transom_config::redis::{Nodes, StoreConfig};
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{Handle, LayerId, PlanPosition, RuleId, VariantId};
use transom_limiter::key::Seed;
use transom_limiter::rule::{OnOutage, Rule, Sharing};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::store_key::StoreKeys;
use transom_limiter::table::Table;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::redis::StoreMetrics;
use transom_runtime::metrics::{Registry, WorkerId};

/// How long a request waits for the store.
pub const TIMEOUT_MS: u64 = 50;
/// Time in which gateways return what they do not use, and report what they counted alone: some sweeps, and the time after an outage.
const QUIET_MS: u64 = 12_000;
/// Steps of that time: the period of probes.
const SWEEP_PART_MS: u64 = 250;
const KEYS: [&str; 2] = ["a", "b"];

/// More rounds than gateways need after one event.
const ROUNDS_MAX: u32 = 1000;

const ENDS: &str = "a gateway comes to an end after each event";
const NEVER_OVER: &str = "no window admits more than its limit, and of several gateways what the store has lost";
const ALL_COUNT: &str = "an admitted request counts in all layers of its rules";
const NO_REQUEST_WAITS_LONGER: &str = "no request waits longer than the timeout";
const COUNTED: &str = "when all is quiet, the store counts what was admitted, and what was lost on the way";
const FITS: &str = "as long as nothing fails, a request is admitted if all requests so far fit in the limit";
const NOT_REFUSED_FOREVER: &str =
    "when all is quiet, a gateway whose connection never broke admits a request that fits";

/// What may happen, and how often.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub rules: Vec<Rule>,
    /// The requests of each worker, in their order.
    pub requests: Vec<Vec<RequestKind>>,
    /// Workers of each gateway.
    pub workers: usize,
    /// Whether calls have keys of one slot only, so that each rule has a call of its own.
    pub is_cluster: bool,
    /// Whether a call that charges is made and sent by two events, from a restart of the store on.
    pub holds_calls: bool,
    /// Milliseconds by which time advances, in this order.
    pub steps: Vec<u64>,
    pub cuts: u8,
    /// Times that the store is unreachable, until it is reachable again.
    pub outages: u8,
    /// Whether the store may still execute calls that were in flight when an outage began.
    pub keeps_calls: bool,
    /// Restarts without data.
    pub restarts: u8,
    pub failovers: u8,
    pub kills: u8,
    /// Requests whose client leaves.
    pub cancels: u8,
    /// Resets of the first key.
    pub resets: u8,
    /// By how much the clock of each gateway is ahead of the store's, or behind it until the first reply, milliseconds; without a
    /// number it is not.
    pub leads_ms: Vec<i64>,
}

impl Scenario {
    /// Without disturbances.
    pub fn new(rules: Vec<Rule>, requests: &[&[RequestKind]]) -> Scenario {
        Scenario {
            rules,
            requests: requests.iter().map(|requests| requests.to_vec()).collect(),
            workers: 1,
            is_cluster: false,
            holds_calls: false,
            steps: Vec::new(),
            cuts: 0,
            outages: 0,
            keeps_calls: false,
            restarts: 0,
            failovers: 0,
            kills: 0,
            cancels: 0,
            resets: 0,
            leads_ms: Vec::new(),
        }
    }
}

/// A request of one key, and what its response says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RequestKind {
    /// Position in `KEYS`.
    pub key: usize,
    pub cost: u32,
    /// If set, the response states this cost.
    pub stated: Option<u32>,
    /// The windows that apply: the default ones, or those of a plan.
    pub variant: VariantId,
}

/// A request of one token.
pub const fn request(key: usize) -> RequestKind {
    RequestKind { key, cost: 1, stated: None, variant: VariantId::DEFAULT }
}

/// A request of one token that is refunded after the response.
pub const fn refunded(key: usize) -> RequestKind {
    RequestKind { stated: Some(0), ..request(key) }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Event {
    /// A worker receives its next request.
    Begin {
        gateway: usize,
    },
    /// The client of a request that waits leaves.
    Cancel {
        gateway: usize,
        request: usize,
    },
    /// A worker is asked to reset the first key.
    Reset {
        gateway: usize,
    },
    /// The response to an admitted request states its cost.
    Respond {
        gateway: usize,
        request: usize,
    },
    /// A worker sends a call that charges, which it has made.
    Send {
        gateway: usize,
        call: usize,
    },
    /// The store executes the next call of a connection.
    Execute {
        connection: usize,
    },
    /// The next reply on a connection arrives.
    Deliver {
        connection: usize,
    },
    Cut {
        connection: usize,
    },
    BeginOutage,
    EndOutage,
    RestartEmpty,
    FailOver,
    Kill {
        gateway: usize,
    },
    Advance {
        ms: u64,
    },
}

/// A worker of a gateway.
struct Gateway {
    tasks: LocalSet,
    is_woken: Arc<IsWoken>,
    counters: Rc<CounterAccess>,
    shared: Rc<SharedCounters>,
    requests: Vec<Rc<Request>>,
    is_alive: bool,
}

struct Request {
    kind: RequestKind,
    /// Until when its decision may take, by the gateway's wall clock, which is not set.
    deadline_ms: Rc<Cell<u64>>,
    stage: RefCell<Stage>,
    task: RefCell<Option<AbortHandle>>,
}

enum Stage {
    Waits,
    Decided(Decided),
    Unavailable,
    /// Counted in the observations.
    Admitted(Decided),
    Ended,
}

/// Whether a task of a gateway can run.
struct IsWoken(Mutex<bool>);

impl IsWoken {
    /// Sets it; returns what it was.
    fn replace(&self, is_woken: bool) -> bool {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), is_woken)
    }
}

impl Wake for IsWoken {
    fn wake(self: Arc<Self>) {
        self.replace(true);
    }
}

/// A counter: a key in a layer.
type CounterOfKey = (LayerId, usize);

/// What a user sees, and what the store has lost.
#[derive(Clone, Default, Hash)]
struct Observations {
    /// Tokens of admitted requests, by counter and end of the window.
    admitted: BTreeMap<(usize, String, u64), u64>,
    forgotten: BTreeMap<(usize, String), u64>,
    /// Tokens that responses stated beyond what was charged, by counter.
    overdrawn: BTreeMap<(usize, String), u64>,
    /// Tokens of refused requests that count.
    refused: [u64; KEYS.len()],
    /// When the resets of each key took effect, at the latest.
    resets: [Vec<u64>; KEYS.len()],
    /// Whether calls, replies or a gateway were lost.
    has_lost_calls: bool,
    has_lost_data: bool,
    /// Whether a gateway may have counted without the store.
    has_counted_alone: bool,
}

pub struct World {
    scenario: Scenario,
    network: Network,
    /// The store's clock.
    clock: Clock,
    /// The workers of all gateways, gateway by gateway.
    gateways: Vec<Gateway>,
    /// A hash of all that has happened to each gateway.
    histories: Vec<u64>,
    rule_set: Arc<RuleSet>,
    charge_plan: Rc<ChargePlan>,
    observed: Observations,
    /// The resets of the first key.
    resets: Vec<JoinHandle<()>>,
    broken: Option<String>,
    /// What has happened, if that is written down.
    pub log: Option<String>,
}

impl World {
    /// Must run on a runtime whose time is paused.
    pub async fn new(scenario: &Scenario) -> World {
        fastrand::seed(1);
        let network = Network::default();
        network.install();
        network.set_time(START_MS);
        let now = tokio::time::sleep(Duration::ZERO).deadline();
        let clock = Clock::stepped(START_MS, now.into_std());
        let rule_set = Arc::new(RuleSet::new(&scenario.rules, Seed(1, 2), None));
        let charge_plan = Rc::new(rule_set.charge_plan(rule_set.rules.ids()));
        let mut gateways = Vec::new();
        for number in 0..scenario.requests.len() / scenario.workers {
            let workers = (0..scenario.workers).map(|nth| number * scenario.workers + nth);
            let lead_ms = scenario.leads_ms.get(number).copied().unwrap_or(0);
            let clock = Clock::stepped(START_MS.saturating_add_signed(lead_ms), now.into_std());
            let of_workers = SharedByWorkers::new(Arc::new(Table::with_capacity(256).expect("memory")), clock);
            gateways.extend(workers.map(|worker| Gateway::new(worker, scenario.is_cluster, &of_workers)));
        }
        let mut world = World {
            scenario: scenario.clone(),
            network,
            clock,
            histories: vec![0; gateways.len() / scenario.workers],
            gateways,
            rule_set,
            charge_plan,
            observed: Observations::default(),
            resets: Vec::new(),
            broken: None,
            log: None,
        };
        for gateway in &world.gateways {
            gateway.tasks.spawn_local(Rc::clone(&gateway.shared).run());
        }
        world.run_gateways().await;
        // The gateways probe the store before their first request. The reply to a gateway whose clock is behind says the time.
        if !world.is_any_behind() {
            world.answer_all().await;
        }
        world
    }

    /// The events that can happen now.
    pub fn enabled(&self) -> Vec<Event> {
        let Scenario { requests, steps, cuts, outages, restarts, failovers, kills, cancels, resets, .. } =
            &self.scenario;
        let mut events = Vec::new();
        let connections =
            |event: fn(usize) -> Event, connections: Vec<usize>| connections.into_iter().map(event).collect::<Vec<_>>();
        events.extend(connections(|connection| Event::Deliver { connection }, self.network.deliverable()));
        events.extend(connections(|connection| Event::Execute { connection }, self.network.executable()));
        let held = self.network.held();
        for (number, gateway) in self.gateways.iter().enumerate().filter(|(_, gateway)| gateway.is_alive) {
            let of_gateway = held.iter().filter(|gateway| **gateway == number).count();
            events.extend((0..of_gateway).map(|call| Event::Send { gateway: number, call }));
            if !requests[number].is_empty() {
                events.push(Event::Begin { gateway: number });
            }
            if *resets > 0 {
                events.push(Event::Reset { gateway: number });
            }
            for (nth, request) in gateway.requests.iter().enumerate() {
                match &*request.stage.borrow() {
                    Stage::Waits if *cancels > 0 => events.push(Event::Cancel { gateway: number, request: nth }),
                    Stage::Admitted(_) if request.kind.stated.is_some() => {
                        events.push(Event::Respond { gateway: number, request: nth });
                    }
                    _ => {}
                }
            }
            if *kills > 0 && number.is_multiple_of(self.scenario.workers) {
                events.push(Event::Kill { gateway: number });
            }
        }
        if *cuts > 0 {
            events.extend(connections(|connection| Event::Cut { connection }, self.network.busy()));
        }
        if self.network.is_down() {
            events.push(Event::EndOutage);
        } else {
            let kinds = [(Event::BeginOutage, outages), (Event::RestartEmpty, restarts), (Event::FailOver, failovers)];
            events.extend(kinds.into_iter().filter(|(_, left)| **left > 0).map(|(event, _)| event));
        }
        events.extend(steps.first().map(|ms| Event::Advance { ms: *ms }));
        events
    }

    pub async fn apply(&mut self, event: Event) {
        let affected = self.gateways_affected_by(event);
        match event {
            Event::Begin { gateway } => self.begin(gateway),
            Event::Cancel { gateway, request } => {
                self.scenario.cancels -= 1;
                self.gateways[gateway].requests[request].cancel();
            }
            Event::Reset { gateway } => {
                self.scenario.resets -= 1;
                self.reset(gateway);
            }
            Event::Respond { gateway, request } => self.respond(gateway, request),
            Event::Send { gateway, call } => self.network.send(gateway, call),
            Event::Execute { connection } => {
                self.observed.has_lost_calls |= self.network.is_cut(connection);
                self.network.execute(connection);
            }
            Event::Deliver { connection } => self.network.deliver(connection),
            Event::Cut { connection } => {
                self.scenario.cuts -= 1;
                self.observed.has_lost_calls = true;
                self.network.cut(connection);
            }
            Event::BeginOutage => {
                self.scenario.outages -= 1;
                self.observed.has_lost_calls = true;
                self.network.begin_outage(!self.scenario.keeps_calls);
            }
            Event::EndOutage => self.network.end_outage(),
            Event::RestartEmpty => {
                self.scenario.restarts -= 1;
                self.network.set_holding(self.scenario.holds_calls);
                self.lose_data(Network::restart_empty);
            }
            Event::FailOver => {
                self.scenario.failovers -= 1;
                self.lose_data(Network::fail_over);
            }
            Event::Kill { gateway } => {
                self.scenario.kills -= 1;
                (gateway..gateway + self.scenario.workers).for_each(|worker| self.kill(worker));
            }
            Event::Advance { ms } => {
                self.scenario.steps.remove(0);
                let has_late = self.gateways.iter().any(|gateway| {
                    let now_ms = gateway.wall_ms() + ms;
                    let times_out = |request: &Rc<Request>| request.waits() && now_ms >= request.deadline_ms.get();
                    gateway.requests.iter().any(times_out)
                });
                // Nor does a gateway ask a store that has not answered its first probe in time.
                let is_unanswered = |number| self.is_behind(number) && !self.network.has_answered(number);
                self.observed.has_counted_alone |= has_late || (0..self.gateways.len()).any(is_unanswered);
                self.advance(ms).await;
            }
        }
        self.note_resets();
        self.run_gateways().await;
        self.log(&event);
        // Workers of a gateway share counters, so what happens to one depends on what has happened to another before.
        for worker in affected {
            let history = &mut self.histories[worker / self.scenario.workers];
            *history = hash_of((*history, worker, event, self.network.history_of(worker)));
        }
    }

    fn gateways_affected_by(&self, event: Event) -> Vec<usize> {
        match event {
            Event::Begin { gateway }
            | Event::Cancel { gateway, .. }
            | Event::Reset { gateway }
            | Event::Respond { gateway, .. }
            | Event::Send { gateway, .. }
            | Event::Kill { gateway } => vec![gateway],
            Event::Deliver { connection } | Event::Cut { connection } => vec![self.network.gateway_of(connection)],
            Event::Execute { .. } => Vec::new(),
            Event::BeginOutage | Event::EndOutage | Event::RestartEmpty | Event::FailOver | Event::Advance { .. } => {
                (0..self.gateways.len()).collect()
            }
        }
    }

    fn begin(&mut self, number: usize) {
        let kind = self.scenario.requests[number].remove(0);
        let KeyQuery { inputs, store_keys, .. } = self.query(kind);
        let gateway = &mut self.gateways[number];
        let request = Rc::new(Request {
            kind,
            deadline_ms: Rc::new(Cell::new(gateway.wall_ms() + TIMEOUT_MS)),
            stage: RefCell::new(Stage::Waits),
            task: RefCell::new(None),
        });
        gateway.requests.push(Rc::clone(&request));
        let (counters, charge_plan) = (Rc::clone(&gateway.counters), Rc::clone(&self.charge_plan));
        let decide = {
            let request = Rc::clone(&request);
            async move {
                let mut context = DecisionContext::default();
                context.inputs = inputs;
                let now_ms = counters.clock.now().unix_ms;
                let begun =
                    counters.decide(&charge_plan, now_ms, &mut context, |position| store_keys[position].clone());
                let decided = match begun {
                    BeginResult::Decided(decision) => {
                        Ok(SharedOutcome { decision, context, refunds: Vec::new(), store_keys: StoreKeys::new() })
                    }
                    BeginResult::Pending(pending) => pending.decide(&charge_plan).await,
                    BeginResult::Unavailable => return request.set(Stage::Unavailable),
                };
                let waiting = WaitingGateway { counters, charge_plan, deadline_ms: Rc::clone(&request.deadline_ms) };
                let passed = match decided {
                    Ok(outcome) => waiting.pass(outcome, store_keys).await,
                    Err(unavailable) => Err(unavailable),
                };
                request.set(passed.map_or(Stage::Unavailable, Stage::Decided));
            }
        };
        let task = gateway.tasks.spawn_local(decide);
        request.task.replace(Some(task.abort_handle()));
    }

    /// The keys of a request.
    fn query(&self, kind: RequestKind) -> KeyQuery<'_> {
        KeyQuery {
            charge_plan: &self.charge_plan,
            inputs: self.rule_set.rules.ids().map(|rule| Ok(self.keyed_request(rule, kind))).collect(),
            store_keys: self.store_keys(kind.key),
        }
    }

    /// Resets the first key, as the decision API does.
    fn reset(&mut self, number: usize) {
        let kind = request(0);
        self.observed.resets[kind.key].push(self.clock.now().unix_ms);
        let KeyQuery { inputs, store_keys, .. } = self.query(kind);
        let gateway = &self.gateways[number];
        let (counters, charge_plan) = (Rc::clone(&gateway.counters), Rc::clone(&self.charge_plan));
        self.resets.push(gateway.tasks.spawn_local(async move {
            let query = KeyQuery { charge_plan: &charge_plan, inputs, store_keys };
            _ = counters.reset(&query).await;
        }));
    }

    /// Notes the time of resets that have not ended.
    fn note_resets(&mut self) {
        let now_ms = self.clock.now().unix_ms;
        for (reset_ms, task) in self.observed.resets[0].iter_mut().zip(&self.resets) {
            *reset_ms = if task.is_finished() { *reset_ms } else { now_ms };
        }
    }

    /// Settles an admitted request, as the proxy does.
    fn respond(&mut self, number: usize, nth: usize) {
        let gateway = &self.gateways[number];
        let request = &gateway.requests[nth];
        let Stage::Admitted(decided) = request.stage.replace(Stage::Ended) else { return };
        let stated = request.kind.stated.expect("a cost");
        let store_keys = self.store_keys(request.kind.key);
        let context = &decided.outcomes[0].0.context;
        let keyed_requests = &context.inputs.keyed_requests;
        let keys = RequestKeys { charge_plan: &self.charge_plan, keyed_requests, store_keys: &store_keys };
        let outcomes = || decided.outcomes.iter().map(|(outcome, _)| outcome);
        let refunds: Vec<(PlanPosition, Refund)> = outcomes().flat_map(|outcome| outcome.refunds.clone()).collect();
        let settle = || {
            for position in keyed_requests.ids().filter(|position| context.has_charged(*position)) {
                let mut charges = RuleCharges::default();
                outcomes().for_each(|outcome| charges.add(&outcome.context, position));
                gateway.counters.settle(keys, position, &charges, &refunds, stated);
            }
        };
        // Its tasks begin in the gateway.
        let _guard = gateway.tasks.enter();
        settle();
        let difference = i64::from(stated) - i64::from(request.kind.cost);
        self.note_admitted(request.kind, &decided, difference, true);
    }

    fn kill(&mut self, number: usize) {
        let gateway = &mut self.gateways[number];
        gateway.is_alive = false;
        for request in &gateway.requests {
            request.set(Stage::Ended);
        }
        // Its connections end with its tasks; nothing that they do at their end reaches the store.
        self.network.end_gateway(number);
        gateway.tasks = LocalSet::new();
    }

    fn lose_data(&mut self, lose: impl Fn(&Network)) {
        (self.observed.has_lost_calls, self.observed.has_lost_data) = (true, true);
        let before = self.network.store();
        lose(&self.network);
        let after = self.network.store();
        for key in before.keys() {
            if let Some(counter) = self.counter_named(key) {
                *self.observed.forgotten.entry(counter).or_default() += before.tokens_beyond(&after, key);
            }
        }
    }

    async fn advance(&mut self, ms: u64) {
        let step = Duration::from_millis(ms);
        self.clock.advance(step);
        // Workers of a gateway share its clock.
        self.gateways.iter().step_by(self.scenario.workers).for_each(|gateway| gateway.counters.clock.advance(step));
        self.network.set_time(self.clock.now().unix_ms);
        tokio::time::advance(step).await;
    }

    /// Lets all gateways run until each of them waits for an event.
    async fn run_gateways(&mut self) {
        let (mut rounds, mut quiet_rounds) = (0, 0);
        while quiet_rounds < 2 && rounds < ROUNDS_MAX {
            rounds += 1;
            let has_run = poll_fn(|_| {
                let mut has_run = false;
                for (number, gateway) in self.gateways.iter_mut().enumerate() {
                    self.network.set_running(number);
                    has_run |= gateway.run();
                }
                Poll::Ready(has_run)
            });
            quiet_rounds = if has_run.await { 0 } else { quiet_rounds + 1 };
            // The runtime wakes tasks whose time has come.
            tokio::task::yield_now().await;
        }
        if rounds == ROUNDS_MAX {
            self.broken.get_or_insert_with(|| ENDS.to_owned());
        }
        self.note_decisions();
    }

    fn note_decisions(&mut self) {
        for number in 0..self.gateways.len() {
            let now_ms = self.gateways[number].wall_ms();
            for nth in 0..self.gateways[number].requests.len() {
                let request = Rc::clone(&self.gateways[number].requests[nth]);
                let stage = request.stage.replace(Stage::Ended);
                let next = match stage {
                    Stage::Decided(decided) if decided.is_admitted => {
                        // Tokens that came too late for the table were given to the request itself.
                        let context = &decided.outcomes[0].0.context;
                        let counted = context.result.charges.len() + context.sharing.prepaid.len();
                        if counted < self.layers(request.kind).len() {
                            self.broken.get_or_insert_with(|| ALL_COUNT.to_owned());
                        }
                        self.note_admitted(request.kind, &decided, request.kind.cost.into(), false);
                        Stage::Admitted(decided)
                    }
                    Stage::Decided(_) => {
                        self.note_refused(request.kind);
                        Stage::Ended
                    }
                    Stage::Unavailable => Stage::Ended,
                    Stage::Waits if now_ms > request.deadline_ms.get() => {
                        self.broken.get_or_insert_with(|| format!("{NO_REQUEST_WAITS_LONGER}: {:?}", request.kind));
                        Stage::Waits
                    }
                    stage => stage,
                };
                request.stage.replace(next);
            }
        }
    }

    /// Notes a refusal. What all requests have asked for and their responses have stated so far has to exceed a limit, or something
    /// has failed.
    fn note_refused(&mut self, kind: RequestKind) {
        self.observed.refused[kind.key] += u64::from(kind.cost);
        let Observations { has_lost_calls, has_lost_data, has_counted_alone, .. } = self.observed;
        let has_failed = has_lost_calls || has_lost_data || has_counted_alone || self.is_any_dead();
        let requests = self.gateways.iter().flat_map(|gateway| &gateway.requests);
        let asked = requests.map(|request| request.kind).filter(|other| other.key == kind.key);
        let asked: u64 = asked.map(|kind| u64::from(kind.cost.max(kind.stated.unwrap_or(0)))).sum();
        let fits = |layer: LayerId| {
            let capacity = u64::from(self.rule_set.layer(layer).capacity);
            let may_be_leased =
                self.rule_set.rules[layer.rule].rule.sharing == Sharing::Lease && self.histories.len() > 1;
            // Other gateways may have leased tokens in advance, each time an eighth of what was left.
            let leased = if may_be_leased { 2 * (capacity.saturating_sub(1) / 8) } else { 0 };
            asked + leased <= capacity
        };
        if !has_failed && self.layers(kind).into_iter().all(fits) {
            self.broken.get_or_insert_with(|| format!("{FITS}: {kind:?}, of {asked} tokens in all"));
        }
    }

    /// Whether the gateway of this worker does not know the time at first.
    fn is_behind(&self, worker: usize) -> bool {
        self.scenario.leads_ms.get(worker / self.scenario.workers).is_some_and(|lead_ms| *lead_ms < 0)
    }

    fn is_any_behind(&self) -> bool {
        (0..self.gateways.len()).any(|worker| self.is_behind(worker))
    }

    /// Whether a gateway may have counted without the store, or in a window that has ended.
    fn may_count_alone(&self) -> bool {
        self.observed.has_counted_alone || self.is_any_behind()
    }

    fn is_any_dead(&self) -> bool {
        self.gateways.iter().any(|gateway| !gateway.is_alive)
    }

    /// Adds tokens to those that were admitted, and compares them with the limits. `is_settled`: the tokens are the difference to
    /// what a response states; more than was charged may exceed a limit.
    fn note_admitted(&mut self, kind: RequestKind, decided: &Decided, tokens: i64, is_settled: bool) {
        let may_count_alone = self.may_count_alone();
        for (layer, end_ms) in decided.windows(&self.rule_set) {
            let name = self.base((layer, kind.key));
            let overdrawn = self.observed.overdrawn.entry((kind.key, name.clone())).or_default();
            *overdrawn += if is_settled { u64::try_from(tokens).unwrap_or(0) } else { 0 };
            let overdrawn = *overdrawn;
            let admitted = self.observed.admitted.entry((kind.key, name.clone(), end_ms)).or_default();
            *admitted = admitted.saturating_add_signed(tokens);
            let is_sharded = self.rule_set.layer(layer).shards > 1;
            // A single gateway remembers what the store has lost, except of single shards.
            let may_forget = self.histories.len() > 1 || is_sharded;
            let forgotten = self.observed.forgotten.get(&(kind.key, name.clone())).filter(|_| may_forget);
            let forgotten = forgotten.copied().unwrap_or(0);
            // A gateway that cannot reach the store counts alone.
            let rule = &self.rule_set.rules[layer.rule].rule;
            let is_local = rule.on_outage == OnOutage::Local;
            let counts_alone = is_local && (self.observed.has_lost_calls || may_count_alone);
            // What is known of shards does not bound what late replies grant. Only the store knows which requests wait for a window.
            let others = u64::from(is_sharded) + u64::from(rule.delays());
            let parts = if counts_alone { self.histories.len() as u64 + others } else { 1 };
            let admitted = *admitted;
            let period_ms = self.rule_set.windows_of(self.rule_set.layer(layer)).typical_ms();
            // Requests that waited at a reset pass in a later window.
            let since_ms = end_ms.saturating_sub(2 * period_ms + self.charge_plan.max_delay_ms());
            // The store may execute a lost reset at any time, and it is not known which of them.
            let has_reset = self.observed.has_lost_calls && self.network.reset_ms() >= since_ms;
            let resets = self.observed.resets[kind.key].iter();
            let resets = resets.filter(|reset_ms| has_reset || **reset_ms >= since_ms).count() as u64;
            // Tokens that were counted alone between the reset in the store and the one here are forgotten too.
            let resets = resets * (1 + u64::from(counts_alone));
            let most = self.capacity(layer) * (parts + resets) + forgotten + overdrawn;
            if admitted > most && !is_settled {
                self.broken.get_or_insert_with(|| format!("{NEVER_OVER}: {name} admitted {admitted}, {most} allowed"));
            }
        }
    }

    /// The limit of a counter. Windows of several plans may share it: a request of one plan may spend a token that the store has granted
    /// before requests of a plan with a greater limit, unless there is only one worker.
    fn capacity(&self, layer: LayerId) -> u64 {
        let compiled = &self.rule_set.rules[layer.rule];
        let layers = compiled.variants().flat_map(|(_, layers)| layers.map(|(of_plan, _)| of_plan));
        let share_counter = layers.filter(|of_plan| compiled.suffix(*of_plan) == compiled.suffix(layer));
        let capacities = share_counter.map(|of_plan| self.rule_set.layer(of_plan).capacity.into());
        let own = self.rule_set.layer(layer).capacity.into();
        if self.gateways.len() == 1 { own } else { capacities.max().unwrap_or(own) }
    }

    /// Executes and delivers all calls in flight, in order.
    async fn answer_all(&mut self) {
        loop {
            let event = match (self.network.deliverable().first(), self.network.executable().first()) {
                (Some(connection), _) => Event::Deliver { connection: *connection },
                (None, Some(connection)) => Event::Execute { connection: *connection },
                (None, None) => return,
            };
            Box::pin(self.apply(event)).await;
        }
    }

    /// Ends all disturbances, waits until gateways have returned and reported everything, and checks what the store counts.
    pub async fn drain(&mut self) {
        self.network.end_outage();
        self.network.set_holding(false);
        self.run_gateways().await;
        self.answer_all().await;
        self.idle(QUIET_MS).await;
        self.check_counts();
        if self.broken.is_none() {
            self.check_last_request().await;
        }
    }

    /// Lets time pass, and answers all calls.
    async fn idle(&mut self, ms: u64) {
        for _ in 0..ms / SWEEP_PART_MS {
            self.scenario.steps.insert(0, SWEEP_PART_MS);
            self.apply(Event::Advance { ms: SWEEP_PART_MS }).await;
            self.answer_all().await;
        }
    }

    /// The open window of each counter holds at least what was admitted, and not more than that and what was lost on the way.
    fn check_counts(&mut self) {
        let now_ms = self.clock.now().unix_ms;
        let counters =
            (0..KEYS.len()).flat_map(|key| self.layers(request(key)).into_iter().map(move |layer| (layer, key)));
        for counter in counters.collect::<Vec<_>>() {
            let name = self.base(counter);
            let windows = self.observed.admitted.iter().filter(|((_, of, _), _)| *of == name);
            let (ends, admitted): (Vec<u64>, Vec<u64>) =
                windows.map(|((_, _, end_ms), tokens)| (end_ms, tokens)).unzip();
            // A reset ends leases that were granted after the store has executed it.
            let is_reset = !self.observed.resets[counter.1].is_empty();
            // Requests that have waited count in another window of the store than that in which they pass, and in other rules while they
            // wait.
            let delays = self.rule_set.rules.iter().any(|compiled| compiled.rule.delays());
            if delays || is_reset || ends.len() > 1 || ends.iter().any(|end_ms| *end_ms <= now_ms) {
                continue;
            }
            let (used, admitted) = (self.used(counter), admitted.iter().sum::<u64>());
            // A gateway that dies takes what it has counted alone.
            let Observations { has_lost_calls, has_lost_data, .. } = self.observed;
            let has_died_alone = self.is_any_dead() && (has_lost_calls || self.may_count_alone());
            let may_count_less = has_lost_data || self.network.has_lost_calls() || has_died_alone;
            // A gateway that dies takes what it has not spent or refunded; tokens of several shards go back to one of them, as far as it
            // counts as many.
            let may_count_more = self.is_any_dead() || self.rule_set.layer(counter.0).shards > 1;
            let counts_refused = self.rule_set.rules[counter.0.rule].rule.count_refused;
            let refused = if counts_refused { self.observed.refused[counter.1] } else { 0 };
            let surplus = refused + self.sum_of_keys(counter, |key| self.network.surplus(key));
            let is_wrong = used < admitted && !may_count_less || used > admitted + surplus && !may_count_more;
            if is_wrong {
                let what = || format!("{COUNTED}: {name} counts {used}, {admitted} admitted, {surplus} lost");
                self.broken.get_or_insert_with(what);
            }
        }
    }

    async fn check_last_request(&mut self) {
        // Until its windows end, a gateway keeps usage that a store behind a former connection has reported.
        let workers = self.scenario.workers;
        let has_one_store = |number: usize| {
            let mut of_gateway = number / workers * workers..(number / workers + 1) * workers;
            self.gateways[number].is_alive && !of_gateway.any(|worker| self.network.has_reconnected(worker))
        };
        let Some(number) = (0..self.gateways.len()).find(|number| has_one_store(*number)) else { return };
        let kind = request(0);
        let has_room = |layer: LayerId| self.used((layer, kind.key)) < self.rule_set.layer(layer).capacity.into();
        let fits = self.layers(kind).into_iter().all(has_room);
        // A request may be refused by what the gateway knows; then the gateway asks the store again.
        let mut is_admitted = false;
        for _ in 0..2 {
            if !is_admitted {
                self.scenario.requests[number] = vec![kind];
                self.apply(Event::Begin { gateway: number }).await;
                self.answer_all().await;
                let request = self.gateways[number].requests.last().expect("a request");
                is_admitted = matches!(&*request.stage.borrow(), Stage::Admitted(_));
            }
        }
        // A refusal that counts takes what remains. A request may wait because of usage that was reset.
        let may_be_late = |rule: &Rule| rule.count_refused || rule.delays();
        if fits && !is_admitted && !self.rule_set.rules.iter().any(|compiled| may_be_late(&compiled.rule)) {
            self.broken.get_or_insert_with(|| NOT_REFUSED_FOREVER.to_owned());
        }
    }

    /// The property that is violated, with details.
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// A hash of the state. A gateway's state is that of a machine which depends only on what has happened to it.
    pub fn hash(&self) -> u64 {
        let mut hasher = FixedState::default().build_hasher();
        self.network.hash(&mut hasher);
        (&self.observed, &self.histories).hash(&mut hasher);
        self.gateways.iter().for_each(|gateway| gateway.is_alive.hash(&mut hasher));
        let Scenario { requests, steps, cuts, outages, restarts, failovers, kills, cancels, resets, .. } =
            &self.scenario;
        (requests, steps.len(), cuts, outages, restarts, failovers, kills, cancels, resets).hash(&mut hasher);
        hasher.finish()
    }

    fn log(&mut self, event: &Event) {
        let Some(mut log) = self.log.take() else { return };
        let _ = writeln!(log, "{} {event:?}: {}", self.clock.now().unix_ms - START_MS, self.network.describe());
        for (number, gateway) in self.gateways.iter().enumerate() {
            let stages = gateway.requests.iter().map(|request| match &*request.stage.borrow() {
                Stage::Waits => "waits",
                Stage::Decided(_) => "decided",
                Stage::Unavailable => "unavailable",
                Stage::Admitted(_) => "admitted",
                Stage::Ended => "ended",
            });
            let _ = writeln!(log, "    worker {number}: {:?}", stages.collect::<Vec<_>>());
        }
        self.log = Some(log);
    }

    /// The layers in which a request counts.
    fn layers(&self, kind: RequestKind) -> Vec<LayerId> {
        let layers = self.rule_set.rules.enumerate();
        layers.flat_map(|(rule, compiled)| compiled.variant(self.keyed_request(rule, kind).variant)).collect()
    }

    /// The tokens that the store counts under the keys of a counter.
    fn used(&self, counter: CounterOfKey) -> u64 {
        self.sum_of_keys(counter, |key| self.network.used(key))
    }

    fn sum_of_keys(&self, counter: CounterOfKey, tokens: impl Fn(&str) -> u64) -> u64 {
        let keys = self.network.keys();
        let of_counter = keys.iter().filter(|key| self.is_key_of(key, counter) && !key.contains(":penalty:"));
        of_counter.map(|key| tokens(key)).sum()
    }

    fn keyed_request(&self, rule: RuleId, kind: RequestKind) -> KeyedRequest {
        let keyed_request = keyed_request(&self.rule_set, rule, KEYS[kind.key], kind.cost);
        KeyedRequest { variant: kind.variant, ..keyed_request }
    }

    fn store_keys(&self, key: usize) -> StoreKeys {
        self.charge_plan.rules().map(|rule| Some(self.text(*rule, key).into()))
    }

    fn text(&self, rule: RuleId, key: usize) -> String {
        format!("{}|{}", self.rule_set.rules[rule].rule.name, KEYS[key])
    }

    /// The name of a counter: the beginning of its keys in the store, of the first shard.
    fn base(&self, counter: CounterOfKey) -> String {
        self.shard_base(counter, 0)
    }

    fn shard_base(&self, (layer, key): CounterOfKey, shard: u32) -> String {
        let suffix = self.rule_set.rules[layer.rule].suffix(layer);
        self.gateways[0].shared.key_base(&self.text(layer.rule, key), suffix, shard).to_string()
    }

    /// Whether a key of the store is of this counter.
    fn is_key_of(&self, store_key: &str, counter: CounterOfKey) -> bool {
        (0..self.rule_set.layer(counter.0).shards).any(|shard| {
            let rest = store_key.strip_prefix(&self.shard_base(counter, shard));
            rest.is_some_and(|rest| rest.starts_with(':'))
        })
    }

    /// The counter that a key in the store belongs to.
    fn counter_named(&self, store_key: &str) -> Option<(usize, String)> {
        let mut counters =
            (0..KEYS.len()).flat_map(|key| self.layers(request(key)).into_iter().map(move |layer| (layer, key)));
        let counter = counters.find(|counter| self.is_key_of(store_key, *counter))?;
        Some((counter.1, self.base(counter)))
    }
}

impl Gateway {
    fn new(number: usize, is_cluster: bool, of_workers: &SharedByWorkers) -> Gateway {
        let node = Network::node(number);
        let nodes = if is_cluster { Nodes::Cluster(vec![node]) } else { Nodes::Single(node) };
        let config = StoreConfig { timeout: Duration::from_millis(TIMEOUT_MS), ..StoreConfig::with_defaults(nodes) };
        let metrics = StoreMetrics::new(&Registry::default(), WorkerId::at(0));
        let shared = SharedCounters::new(&config, of_workers.clone(), metrics);
        Gateway {
            tasks: LocalSet::new(),
            is_woken: Arc::new(IsWoken(Mutex::new(true))),
            counters: Rc::new(CounterAccess::new(of_workers.clone(), Some(Rc::clone(&shared)))),
            shared,
            requests: Vec::new(),
            is_alive: true,
        }
    }

    fn wall_ms(&self) -> u64 {
        self.counters.clock.wall_ms()
    }

    /// Runs the tasks that can run; `false` if there are none.
    fn run(&mut self) -> bool {
        if !self.is_alive || !self.is_woken.replace(false) {
            return false;
        }
        let waker = Waker::from(Arc::clone(&self.is_woken));
        // Ready once it has no task, which is not the end.
        let _ = Pin::new(&mut self.tasks).poll(&mut Context::from_waker(&waker));
        true
    }
}

impl Request {
    fn waits(&self) -> bool {
        matches!(*self.stage.borrow(), Stage::Waits)
    }

    fn set(&self, stage: Stage) {
        self.stage.replace(stage);
    }

    /// The client leaves: the task of the request is dropped.
    fn cancel(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.set(Stage::Ended);
    }
}
