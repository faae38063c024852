//! A scenario: the rules with some windows, and counters of their own. Decides requests with the code that decides live, and
//! counts the decisions.
//!
//! Requests end, and waiting requests proceed, at the times of the log: events of the past are handled before a request
//! is decided.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::log_files::BATCH;
use super::log_files::LineId;
use super::log_line::LoggedDecision;
use super::statistics::{EndedWindow, Histogram, KeySample, Timeline, TopKeys};
use std::sync::Arc;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::concurrency::{QueuedSlot, Slot, SlotState};
use transom_limiter::decision::{Decision, Waiter};
use transom_limiter::decision_context::{DecisionContext, DecisionInputs};
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, IdVec, LayerPosition, PlanPosition, RuleId, VariantId};
use transom_limiter::key::Seed;
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::rule_set::{CompiledRule, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::slot_decision::SlotsResult;
use transom_limiter::table::Table;
use transom_limiter::verdict::{Outcome, WindowVerdict};
use transom_limiter::waiter_limit::WaiterSlot;
use transom_limiter::window::Window;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::{CompiledConfig, RouteRules};
use transom_rules::response_cost::FinalCost;

/// The counts of the busiest keys are too low by at most one in this many requests.
const BUSY_KEYS: usize = 1024;

/// The rules with some windows, and what they decided.
pub struct Scenario {
    pub name: String,
    pub rule_set: Arc<RuleSet>,
    /// By rule.
    pub rules: IdVec<RuleId, RuleCounts>,
    /// Requests that were refused, and all that were decided.
    pub refused: u64,
    pub decided: u64,
    /// Requests of a log of this gateway with the same decision as in the log, and with another one.
    pub same: u64,
    pub different: u64,
    charge_plans: IdVec<RouteRulesId, ChargePlan>,
    pub table: Table,
    context: DecisionContext,
    /// By time, and by number of the request.
    events: BTreeMap<(u64, u64), Event>,
    /// Requests that wait for a slot, by number.
    queue: BTreeMap<u64, QueuedRequest>,
    next_number: u64,
}

/// What one limit decided.
#[derive(Clone, Default, Debug)]
pub struct LimitCounts {
    /// Requests for which it was full.
    pub full: u64,
    /// Tokens that a key asks for in a window; requests of a key in flight.
    pub asked: Histogram,
}

/// What one rule decided.
#[derive(Debug)]
pub struct RuleCounts {
    /// Requests that the rule applied to.
    pub requests: u64,
    pub admitted: u64,
    pub refused: u64,
    /// Refused by other rules only.
    pub refused_elsewhere: u64,
    pub shadowed: u64,
    pub delayed: u64,
    /// Requests that the rule did not apply to: exempt, or without a key.
    pub not_counted: u64,
    /// Requests.
    pub by_variant: IdVec<VariantId, u64>,
    /// By position of the layer in the rule.
    pub layers: IdVec<LayerPosition, LimitCounts>,
    /// The limits of requests in flight.
    pub slots: IdVec<VariantId, LimitCounts>,
    pub keys: KeySample,
    pub busiest: TopKeys,
    pub most_refused: TopKeys,
    pub timeline: Timeline,
    /// By layer: the current window.
    open_windows: IdVec<LayerPosition, Window>,
    /// Requests that are not in `keys` yet.
    unsampled: Vec<SampledRequest>,
    /// The ends of requests in flight as the log has them, and their keys in `keys`.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
}

#[derive(Debug)]
struct SampledRequest {
    keyed_request: KeyedRequest,
    is_full: bool,
    now_ms: u64,
    end_ms: u64,
}

/// A request, as far as its decision depends on it.
#[derive(Clone)]
pub struct Request {
    /// Its position in the batch.
    pub line: LineId,
    /// Unix milliseconds.
    pub now_ms: u64,
    pub rules_id: RouteRulesId,
    pub inputs: DecisionInputs,
    /// What the response says about the cost, with the rule.
    pub costs: SmallVec<[(PlanPosition, FinalCost); 2]>,
    /// The time from now to the end of the request, if it does not wait.
    pub left_ms: u64,
    /// The decision in the log, if the log is one of this gateway.
    pub logged: Option<LoggedDecision>,
}

/// Slots of an admitted request, with their rule.
type Slots = Vec<(PlanPosition, Slot)>;

/// What happens without a new request.
enum Event {
    /// A request ends.
    End(Slots),
    /// The window opens that a request waits for.
    WindowOpens(Box<DelayedRequest>),
    /// A request has waited for a slot as long as it may.
    GiveUp,
}

/// A request that waits for a later window.
struct DelayedRequest {
    request: Request,
    /// Layers to charge again then.
    recharge: Vec<LayerRef>,
    receipts: Vec<ShardReceipt>,
    /// By position in [`Request::costs`], see [`receipts_of_cost`].
    cost_receipts: Vec<Option<Vec<ShardReceipt>>>,
    /// The latest time at which the request may proceed, Unix milliseconds.
    latest_ms: u64,
    slots: Slots,
    /// The rule that lets the request wait.
    waiter: Option<Waiter>,
}

/// A request that waits for a slot.
struct QueuedRequest {
    request: Request,
    labels: IdVec<PlanPosition, String>,
    context: DecisionContext,
    slots: Slots,
    place: QueuePlace,
}

/// A place in the queue of a rule.
struct QueuePlace {
    position: PlanPosition,
    slot: QueuedSlot,
    latest_ms: u64,
    _waiter: WaiterSlot,
}

impl Request {
    pub fn new(rules_id: RouteRulesId) -> Request {
        Request {
            line: LineId::at(0),
            now_ms: 0,
            rules_id,
            inputs: DecisionInputs::default(),
            costs: SmallVec::new(),
            left_ms: 0,
            logged: None,
        }
    }

    /// The cost by the response for the rule at a position; `None` if the response has no effect on it.
    pub fn final_cost(&self, position: PlanPosition) -> Option<FinalCost> {
        self.costs.iter().find(|(rule, _)| *rule == position).map(|(_, cost)| *cost)
    }

    /// Under the rule at a position, with the final cost.
    fn settled(&self, position: PlanPosition) -> Option<KeyedRequest> {
        let keyed_request = self.inputs.keyed_requests[position]?;
        let cost = match self.final_cost(position) {
            Some(FinalCost::Stated(cost)) => cost,
            Some(FinalCost::NotCounted) => 0,
            Some(FinalCost::AsCharged | FinalCost::KnownAtEnd) | None => keyed_request.cost,
        };
        Some(KeyedRequest { cost, ..keyed_request })
    }
}

/// Notes what a key asked for in a window; nothing for the requests in flight, which come after the layers.
fn add_asked(counts: &mut IdVec<LayerPosition, LimitCounts>, rule: &CompiledRule, ended: &EndedWindow) {
    if let Some(layer) = rule.variant(ended.variant).nth(ended.position.index()) {
        counts[layer.position].asked.add(ended.tokens, ended.weight);
    }
}

/// The receipts of a rule whose cost is settled later; `None`: the rule has charged nothing, and nothing is settled.
fn receipts_of_cost(context: &DecisionContext, position: PlanPosition) -> Option<Vec<ShardReceipt>> {
    context.has_charged(position).then(|| context.receipts_of_rule(position).collect())
}

impl Scenario {
    /// `sampled_keys`: keys in the sample of one rule.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub fn new(
        name: &str,
        rules: &[Rule],
        compiled: &CompiledConfig,
        seed: Seed,
        sampled_keys: usize,
    ) -> Result<Scenario, String> {
        let rule_set = Arc::new(RuleSet::new(rules, seed, None));
        let charge_plan = |rules: &RouteRules| rule_set.charge_plan(rules.charge_plan.rules().iter().copied());
        Ok(Scenario {
            name: name.to_owned(),
            rules: rule_set.rules.map(|rule| RuleCounts::new(rule, sampled_keys)),
            charge_plans: compiled.route_rules.map(charge_plan),
            table: Table::with_capacity(compiled.config.counters.capacity)
                .ok_or("there is too little memory for `counters.capacity` counters")?,
            context: DecisionContext::default(),
            events: BTreeMap::new(),
            queue: BTreeMap::new(),
            next_number: 0,
            refused: 0,
            decided: 0,
            same: 0,
            different: 0,
            rule_set,
        })
    }

    /// Whether a rule limits requests in flight.
    pub fn limits_concurrency(&self) -> bool {
        self.rule_set.rules.iter().any(|rule| rule.concurrent_name().is_some())
    }

    /// Prefetches the counters of requests that will be decided, so that the processor waits for the memory of all at once.
    pub fn prefetch(&self, requests: &[Request]) {
        for request in requests {
            self.charge_plans[request.rules_id].prefetch(&self.table, &request.inputs.keyed_requests);
        }
    }

    /// Decides a request and counts the decision. `label` returns the text of the key of the rule at a position.
    pub fn decide(&mut self, request: &Request, label: &dyn Fn(PlanPosition) -> String) {
        if !self.events.is_empty() {
            self.advance_to(request.now_ms);
        }
        self.context.inputs.repeat(&request.inputs.keyed_requests);
        self.context.result.concurrency.clear();
        self.admit(request.now_ms, request, Vec::new(), None, label);
    }

    /// Ends all requests and windows.
    pub fn finish(&mut self) {
        self.advance_to(u64::MAX);
        for (counts, rule) in self.rules.iter_mut().zip(&self.rule_set.rules) {
            counts.sample(rule, &self.rule_set);
            let RuleCounts { keys, layers, .. } = counts;
            keys.finish(|ended| add_asked(layers, rule, &ended));
        }
    }

    /// Takes the slots, after that of a rule if it is given, then decides the windows. `context` has the keys, and what the slots
    /// before have decided.
    fn admit(
        &mut self,
        now_ms: u64,
        request: &Request,
        mut slots: Slots,
        after: Option<PlanPosition>,
        label: &dyn Fn(PlanPosition) -> String,
    ) {
        let Scenario { charge_plans, table, context, .. } = self;
        let charge_plan = &charge_plans[request.rules_id];
        let slots_result = match charge_plan.limits_concurrency() {
            true => charge_plan.acquire_slots(context, after, |position, slot| slots.push((position, slot))),
            false => SlotsResult::Acquired,
        };
        let clock = || now_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        let decision = match slots_result {
            SlotsResult::Acquired => charge_plan.decide(table, now, context),
            SlotsResult::Full(position)
                if let Some(place) = QueuePlace::join(charge_plan, context, position, now_ms) =>
            {
                let labels = request.inputs.keyed_requests.ids().map(label).collect();
                let context = context.clone();
                let number = self.number();
                self.events.insert((place.latest_ms, number), Event::GiveUp);
                self.queue.insert(number, QueuedRequest { request: request.clone(), labels, context, slots, place });
                return;
            }
            SlotsResult::Full(_) | SlotsResult::Refused => {
                slots.clear();
                charge_plan.refuse(table, now, context, &[]);
                Decision::Refused
            }
        };
        self.conclude(now_ms, request, slots, decision, label);
    }

    /// Counts a decision, and holds the slots of the request until its end.
    fn conclude(
        &mut self,
        now_ms: u64,
        request: &Request,
        mut slots: Slots,
        decision: Decision,
        label: &dyn Fn(PlanPosition) -> String,
    ) {
        let is_refused = matches!(decision, Decision::Refused);
        self.decided += 1;
        self.refused += u64::from(is_refused);
        self.count(now_ms, request, &decision, label);
        // The windows of these rules have not admitted the request.
        slots.retain(|(position, _)| !self.context.result.shadowed.contains(position));
        match decision {
            Decision::Refused => self.compare(request, LoggedDecision::Refused),
            Decision::Admitted => {
                let has_waited = self.context.result.concurrency.iter().any(|usage| usage.state == SlotState::Waited);
                self.compare(request, if has_waited { LoggedDecision::Delayed } else { LoggedDecision::Admitted });
                let positions = request.costs.iter().map(|(position, _)| *position);
                self.settle(request, positions.map(|position| receipts_of_cost(&self.context, position)), now_ms);
                self.hold(slots, now_ms + request.left_ms);
            }
            Decision::Delayed { until_ms, waiter, recharge } => {
                let max_delay_ms = self.charge_plans[request.rules_id].max_delay_ms();
                let receipts_of =
                    |(position, _): &(PlanPosition, FinalCost)| receipts_of_cost(&self.context, *position);
                let delayed = Box::new(DelayedRequest {
                    recharge,
                    receipts: self.context.all_receipts().collect(),
                    cost_receipts: request.costs.iter().map(receipts_of).collect(),
                    latest_ms: now_ms + max_delay_ms,
                    slots,
                    request: request.clone(),
                    waiter,
                });
                let number = self.number();
                self.events.insert((until_ms, number), Event::WindowOpens(delayed));
            }
        }
    }

    /// Compares the final decision with that of the log.
    fn compare(&mut self, request: &Request, decision: LoggedDecision) {
        if let Some(logged) = request.logged {
            let counter = if decision == logged { &mut self.same } else { &mut self.different };
            *counter += 1;
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn hold(&mut self, slots: Slots, until_ms: u64) {
        if !slots.is_empty() {
            let number = self.number();
            self.events.insert((until_ms, number), Event::End(slots));
        }
    }

    /// Counts a decision for each rule.
    fn count(&mut self, now_ms: u64, request: &Request, decision: &Decision, label: &dyn Fn(PlanPosition) -> String) {
        let Scenario { rule_set, rules, context, charge_plans, .. } = self;
        let verdicts = charge_plans[request.rules_id].verdicts(context, decision);
        for verdict in verdicts.rules() {
            let (position, rule) = (verdict.position, verdict.rule());
            let counts = &mut rules[verdict.rule_id()];
            let Some(mut keyed_request) = request.settled(position) else {
                counts.not_counted += 1;
                continue;
            };
            // The limits that applied at this time.
            if let Some(decided) = verdicts.keyed_requests()[position] {
                keyed_request.variant = decided.variant;
            }
            let full = verdict.windows().filter(|window| window.is_full()).map(WindowVerdict::layer);
            full.for_each(|layer| counts.layers[layer.id.position].full += 1);
            if verdict.slots().is_some_and(|usage| matches!(usage.state, SlotState::Full | SlotState::Shadowed)) {
                counts.slots[keyed_request.variant].full += 1;
            }
            let (is_full, counter) = match verdict.outcome() {
                Outcome::Shadowed if !verdicts.is_refused() => (true, &mut counts.shadowed),
                Outcome::Refused => (true, &mut counts.refused),
                Outcome::Shadowed | Outcome::RefusedElsewhere => (false, &mut counts.refused_elsewhere),
                Outcome::Delayed | Outcome::Waited => (false, &mut counts.delayed),
                Outcome::Admitted | Outcome::NotCounted(_) => (false, &mut counts.admitted),
            };
            *counter += 1;
            counts.requests += 1;
            counts.by_variant[keyed_request.variant] += 1;
            let id = keyed_request.key.bucket_hash;
            counts.busiest.add(id, is_full, || label(position));
            if is_full {
                counts.most_refused.add(id, true, || label(position));
            }
            counts.timeline.add(now_ms, is_full);
            let end_ms = now_ms + request.left_ms;
            counts.unsampled.push(SampledRequest { keyed_request, is_full, now_ms, end_ms });
            if counts.unsampled.len() == BATCH {
                counts.sample(rule, rule_set);
            }
        }
    }

    /// Charges or refunds the difference to the cost that the response states, as `proxy::response_cost` does. `receipts`: for each
    /// of [`Request::costs`], see [`receipts_of_cost`].
    fn settle(&self, request: &Request, receipts: impl IntoIterator<Item = Option<Vec<ShardReceipt>>>, now_ms: u64) {
        for ((position, _), receipts) in request.costs.iter().zip(receipts) {
            let (Some(charged), Some(settled), Some(receipts)) =
                (request.inputs.keyed_requests[*position], request.settled(*position), receipts)
            else {
                continue;
            };
            match settled.cost.checked_sub(charged.cost) {
                Some(0) => {}
                Some(excess) => {
                    let rule = self.charge_plans[request.rules_id].rules()[*position];
                    let keyed_request = KeyedRequest { cost: excess, ..charged };
                    self.rule_set.charge_excess(rule, keyed_request, &self.table, now_ms);
                }
                None => {
                    self.rule_set.refund(&receipts, charged.cost - settled.cost, &self.table, now_ms);
                }
            }
        }
    }

    /// Lets happen what happens until `now_ms`.
    fn advance_to(&mut self, now_ms: u64) {
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= now_ms) {
            let ((time_ms, number), event) = entry.remove_entry();
            match event {
                Event::End(slots) => drop(slots),
                Event::WindowOpens(delayed) => self.proceed(time_ms, delayed),
                Event::GiveUp => self.give_up(time_ms, number),
            }
            while self.serve_queue(time_ms) {}
        }
    }

    /// Lets the first queued request proceed for which a slot has become free; `false` if there is none.
    fn serve_queue(&mut self, now_ms: u64) -> bool {
        let mut task = Context::from_waker(Waker::noop());
        let ready =
            self.queue.iter_mut().find_map(|(number, queued)| match Pin::new(&mut queued.place.slot).poll(&mut task) {
                Poll::Ready(slot) => Some((*number, slot)),
                Poll::Pending => None,
            });
        let Some((number, slot)) = ready else { return false };
        let Some(queued) = self.queue.remove(&number) else { return false };
        let QueuedRequest { request, labels, context, mut slots, place } = queued;
        self.events.remove(&(place.latest_ms, number));
        slots.push((place.position, slot));
        self.context = context;
        if let Some(usage) = self.context.result.concurrency.last_mut() {
            usage.state = SlotState::Waited;
        }
        self.admit(now_ms, &request, slots, Some(place.position), &|position| labels[position].clone());
        true
    }

    fn give_up(&mut self, now_ms: u64, number: u64) {
        let Some(queued) = self.queue.remove(&number) else { return };
        let QueuedRequest { request, labels, context, slots, place } = queued;
        drop((slots, place));
        self.context = context;
        let clock = || now_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        self.charge_plans[request.rules_id].refuse(&self.table, now, &mut self.context, &[]);
        let label = |position: PlanPosition| labels[position].clone();
        self.conclude(now_ms, &request, Vec::new(), Decision::Refused, &label);
    }

    /// Lets a delayed request proceed whose window has opened. Layers whose window has ended since are charged again, and may
    /// refuse, as `proxy::delayed_request` does.
    fn proceed(&mut self, now_ms: u64, mut delayed: Box<DelayedRequest>) {
        if delayed.recharge.is_empty() {
            let DelayedRequest { request, cost_receipts, slots, .. } = *delayed;
            self.settle(&request, cost_receipts, now_ms);
            self.compare(&request, LoggedDecision::Delayed);
            self.hold(slots, now_ms + request.left_ms);
            return;
        }
        self.context.inputs.repeat(&delayed.request.inputs.keyed_requests);
        let charge_plan = &self.charge_plans[delayed.request.rules_id];
        let clock = || now_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        let recharge = std::mem::take(&mut delayed.recharge);
        let decision = charge_plan.recharge(&recharge, &self.table, now, &mut self.context);
        delayed.receipts.retain(|charged| charged.receipt.end_ms() > now_ms);
        delayed.receipts.extend(self.context.all_receipts());
        let until_ms = match decision {
            Decision::Admitted => now_ms,
            Decision::Delayed { until_ms, recharge, .. } if until_ms <= delayed.latest_ms => {
                delayed.recharge = recharge;
                until_ms
            }
            Decision::Delayed { .. } | Decision::Refused => {
                let refusing = charge_plan.refusing_layers(&self.context);
                for layer in &refusing {
                    self.rules[layer.id.rule].layers[layer.id.position].full += 1;
                }
                for (position, rule) in charge_plan.rules().enumerate() {
                    if refusing.iter().any(|layer| layer.position == position) {
                        let counts = &mut self.rules[*rule];
                        counts.refused += 1;
                        let waits = delayed.waiter.as_ref().is_some_and(|waiter| waiter.position == position);
                        *(if waits { &mut counts.delayed } else { &mut counts.admitted }) -= 1;
                    }
                }
                self.refused += 1;
                self.rule_set.refund(&delayed.receipts, u32::MAX, &self.table, now_ms);
                charge_plan.refuse(&self.table, now, &mut self.context, &refusing);
                self.compare(&delayed.request, LoggedDecision::Refused);
                return;
            }
        };
        for ((position, _), receipts) in delayed.request.costs.iter().zip(&mut delayed.cost_receipts) {
            if let Some(receipts) = receipts {
                receipts.extend(self.context.receipts_of_rule(*position));
            }
        }
        let number = self.number();
        self.events.insert((until_ms, number), Event::WindowOpens(delayed));
    }
}

impl QueuePlace {
    /// `None` if too many requests wait for the rule already.
    fn join(
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        position: PlanPosition,
        now_ms: u64,
    ) -> Option<QueuePlace> {
        let slot = charge_plan.queue_slot(context, position)?;
        let rule = charge_plan.rule(position);
        let OnLimit::Delay { max_delay_ms, .. } = rule.rule.on_limit else { return None };
        let waiter = rule.waiters.try_enter()?;
        Some(QueuePlace { position, slot, latest_ms: now_ms + max_delay_ms, _waiter: waiter })
    }
}

impl RuleCounts {
    fn new(rule: &CompiledRule, sampled_keys: usize) -> RuleCounts {
        RuleCounts {
            requests: 0,
            admitted: 0,
            refused: 0,
            refused_elsewhere: 0,
            shadowed: 0,
            delayed: 0,
            not_counted: 0,
            by_variant: rule.rule.variants().map(|_| 0).collect(),
            layers: rule.compiled_layers().map(|_| LimitCounts::default()).collect(),
            slots: rule.rule.variants().map(|_| LimitCounts::default()).collect(),
            keys: KeySample::new(sampled_keys),
            busiest: TopKeys::new(BUSY_KEYS),
            most_refused: TopKeys::new(BUSY_KEYS),
            timeline: Timeline::default(),
            open_windows: rule.compiled_layers().map(|_| Window::default()).collect(),
            unsampled: Vec::with_capacity(BATCH),
            ends: BinaryHeap::new(),
        }
    }

    /// Counts the batch of requests in the sample of keys.
    fn sample(&mut self, rule: &CompiledRule, rule_set: &RuleSet) {
        let RuleCounts { keys, layers: counted, slots, open_windows, unsampled, ends, .. } = self;
        // Reads the entries of all keys before the first is changed.
        let ids = unsampled.iter().map(|request| request.keyed_request.key.bucket_hash);
        std::hint::black_box(ids.map(|id| keys.peek(id)).fold(0, u32::wrapping_add));
        let is_concurrent = rule.concurrent_name().is_some();
        for SampledRequest { keyed_request, is_full, now_ms, end_ms } in unsampled.drain(..) {
            while let Some(Reverse((_, id))) = ends.peek().filter(|end| end.0.0 <= now_ms).copied() {
                ends.pop();
                keys.end_request(id);
            }
            let layers = rule.variant(keyed_request.variant);
            let weight = keys.one_of();
            let count = layers.clone().count() + usize::from(is_concurrent);
            let end = |ended: EndedWindow| add_asked(counted, rule, &ended);
            let Some(key) = keys.add(keyed_request, is_full, count, end) else { continue };
            for (usage, layer) in key.layers.iter_mut().zip(layers) {
                let windows = rule_set.windows_of(rule.layer(layer));
                let window = &mut open_windows[layer.position];
                if !window.contains(now_ms) && windows.are_shared() {
                    *window = windows.window_at(now_ms, 0);
                }
                if let Some(ended) = usage.add(windows, *window, keyed_request, now_ms) {
                    counted[layer.position].asked.add(ended.into(), weight);
                }
            }
            if is_concurrent && end_ms > now_ms {
                let in_flight = key.begin_request();
                slots[keyed_request.variant].asked.add(in_flight.into(), weight);
                ends.push(Reverse((end_ms, keyed_request.key.bucket_hash)));
            }
        }
    }
}
