//! What the store decides itself, request by request: rules that are counted exactly, and places in windows to come.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Shared;
use super::circuit_breaker::UNLIMITED;
use super::decision::{Next, SharedDecision, within};
use super::lease_sizing::Record;
use super::scripts::{Answer, CounterReply, CounterRequest, Refund, gifts};
use transom_limiter::decision::{Decision, Waiter};
use transom_limiter::decision_context::{DecisionContext, DecisionResult};
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule::OnOutage;
use transom_limiter::rule_set::{ChargePlan, CountingMode, KeyedRequest, LayerRef, RuleSet};
use transom_limiter::shared_counting::LocalDecision;

/// How often a request tries to take a place that another one took in between.
const TRIES: u32 = 16;

/// What the store said to what was sent.
pub(super) enum Sent {
    /// With what gives it back.
    Granted(Vec<(usize, Refund)>),
    Refused,
    /// The windows that were asked for are not those that are open there.
    OtherWindow,
    /// There was no answer, or the store was not asked. The rules whose server did not answer do without.
    Failed,
}

/// What came of all calls of one request.
enum Outcome {
    Granted(Vec<CounterReply>),
    /// Nothing is charged. The first so many were looked at.
    Refused(Vec<CounterReply>),
    OtherWindow,
    Failed,
}

/// All calls of one request, one after the other.
struct Charging {
    told: oneshot::Receiver<Outcome>,
    /// How many of what is wanted were granted so far: what comes next is under way, or has failed.
    granted: Rc<Cell<usize>>,
}

/// The lines of a request that waits.
struct Parts {
    /// Those of full rules; and behind the first so many, which are counted here, what the store decides.
    placed: Vec<LayerRef>,
    here: usize,
    /// The others.
    kept: Vec<LayerRef>,
}

impl Shared {
    /// Charges all of this, or nothing. Where counters lie on different servers, those that fewer share come first, and
    /// are given back if another refuses. A request that goes away has it undone.
    fn charge(self: &Rc<Self>, wants: Vec<CounterRequest>) -> Charging {
        let (tell, told) = oneshot::channel();
        let (shared, granted) = (Rc::clone(self), Rc::new(Cell::new(0)));
        let progress = Rc::clone(&granted);
        tokio::task::spawn_local(async move {
            let outcome = shared.charge_calls(&wants, &progress).await;
            if let Err(Outcome::Granted(took)) = tell.send(outcome) {
                shared.give(gifts(&wants, &took)).await;
            }
        });
        Charging { told, granted }
    }

    /// `granted` is told how many were, call by call.
    async fn charge_calls(self: &Rc<Self>, wants: &[CounterRequest], granted: &Cell<usize>) -> Outcome {
        let (mut took, mut rest) = (Vec::new(), wants);
        let outcome = loop {
            let (call, others) = rest.split_at(self.first_call(rest));
            if call.is_empty() {
                return Outcome::Granted(took);
            }
            match self.take(call).await {
                Ok(Answer::Granted { took: more, .. }) => {
                    took.extend(more);
                    granted.set(took.len());
                }
                Ok(Answer::Refused { took: seen, .. }) => {
                    let mut all = took.clone();
                    all.extend(seen);
                    break Outcome::Refused(all);
                }
                Ok(Answer::OtherWindow { time_ms }) if self.follows(time_ms) => break Outcome::OtherWindow,
                Ok(Answer::OtherWindow { .. }) | Err(_) => break Outcome::Failed,
            }
            rest = others;
        };
        self.give(gifts(&wants[..took.len()], &took)).await;
        outcome
    }

    /// How many of these, from the first on, are asked for in one call.
    fn first_call(&self, wants: &[CounterRequest]) -> usize {
        let Some(first) = wants.first() else { return 0 };
        wants.iter().take_while(|want| self.store.is_one_call(&first.base, &want.base)).count()
    }

    /// Gives back all that was charged for a request, here and in the store. Places that others stand behind are given back
    /// when those have gone.
    pub(super) fn undo(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        context: &mut DecisionContext,
        first: usize,
        gifts: Vec<Refund>,
    ) {
        let now_ms = self.clock.now().unix_ms;
        for share in context.take_receipts(first).into_iter().rev() {
            self.abandoned.refund([share], share.receipt.end_ms(), rule_set, &self.table, now_ms);
        }
        self.give_later(gifts);
    }

    /// Gives back in the background.
    pub fn give_later(self: &Rc<Self>, gifts: Vec<Refund>) {
        if !gifts.is_empty() {
            let shared = Rc::clone(self);
            tokio::task::spawn_local(async move { shared.give(gifts).await });
        }
    }

    /// Charges what a request turned out to cost beside what it was charged before, whatever is left, in the background; on
    /// this machine, if nobody else can be told.
    pub fn overdraw(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        rule: usize,
        keyed_request: KeyedRequest,
        text: &Rc<str>,
    ) {
        if self.is_beyond(&self.base(text, "", 0)) {
            return self.overdraw_alone(rule_set, rule, keyed_request, text);
        }
        let (shared, rule_set, text) = (Rc::clone(self), Arc::clone(rule_set), Rc::clone(text));
        tokio::task::spawn_local(async move {
            for _ in 0..TRIES {
                let wants = shared.wants_beyond(&rule_set, rule, keyed_request, &text);
                match shared.charge_calls(&wants, &Cell::new(0)).await {
                    Outcome::Granted(_) | Outcome::Refused(_) => return,
                    Outcome::OtherWindow => {}
                    Outcome::Failed => break,
                }
            }
            shared.overdraw_alone(&rule_set, rule, keyed_request, &text);
        });
    }

    /// What is asked of the store for tokens that were used already.
    fn wants_beyond(
        &self,
        rule_set: &RuleSet,
        rule: usize,
        keyed_request: KeyedRequest,
        text: &str,
    ) -> Vec<CounterRequest> {
        let (cost, now_ms) = (u64::from(keyed_request.cost), self.clock.now().unix_ms);
        let want = |layer| {
            let blank = self.want_of(rule_set, rule, layer, keyed_request, text, now_ms);
            CounterRequest { need: cost, want: cost, ceiling: UNLIMITED, ..blank }
        };
        rule_set.rules[rule].variant(keyed_request.variant).map(want).collect()
    }

    fn overdraw_alone(&self, rule_set: &Arc<RuleSet>, rule: usize, keyed_request: KeyedRequest, text: &Rc<str>) {
        let entry = &rule_set.rules[rule];
        if entry.rule.on_outage == OnOutage::Local {
            rule_set.charge_excess(rule, keyed_request, &self.table, self.clock.now().unix_ms);
            entry
                .variant(keyed_request.variant)
                .for_each(|layer| self.owe_by(rule_set, rule, layer, keyed_request, text));
        }
    }
}

impl SharedDecision {
    /// Sends what lies on the desk behind `first`, and puts down there what the store says.
    pub(super) async fn send(&mut self, rule_set: &Arc<RuleSet>, charge_plan: &ChargePlan, first: usize) -> Sent {
        let shared = Rc::clone(&self.shared);
        let rules: Vec<usize> = self.context.result.layers[first..].iter().map(|line| line.rule).collect();
        if self.gives_up_on(&rules) {
            return Sent::Failed;
        }
        let now_ms = shared.clock.now().unix_ms;
        let (mut wants, mut known, mut here) = (Vec::new(), Vec::new(), Vec::new());
        let SharedDecision { context, texts, .. } = self;
        for (charge, line) in context.result.charges.iter_mut().zip(&context.result.layers).skip(first) {
            let (Some(keyed_request), Some(Some(text))) =
                (context.inputs.keyed_requests[line.rule], texts.get(line.rule))
            else {
                continue;
            };
            if charge.usage.end_ms == 0 {
                // Nothing is known of it, unless the store answers: a window of which nothing is used.
                charge.usage.end_ms = charge.request.end_ms;
            }
            let blank = shared.want(rule_set, charge_plan, *line, keyed_request, text, now_ms);
            known.push(blank.least);
            let alone = u64::from(rule_set.layer_of(charge_plan, *line).capacity).saturating_sub(blank.ceiling);
            here.push(alone);
            let (cost, ceiling) = (u64::from(charge.request.cost), charge.request.ceiling.saturating_sub(alone));
            wants.push(CounterRequest {
                need: cost,
                want: cost,
                ceiling,
                least: blank.least.max(charge.request.floor),
                ..blank
            });
        }
        if !self.progress.asks && self.is_used_up(rule_set, charge_plan, first, now_ms) {
            return Sent::Refused;
        }
        let (began, generation) = (Instant::from_std(shared.clock.instant()), shared.generation.get());
        let Charging { told, granted } = shared.charge(wants.clone());
        let answer = within(self.deadline, told).await;
        // Only those do without whose server has not answered.
        let failing = || {
            let granted = granted.get();
            &rules[granted..granted + shared.first_call(&wants[granted..])]
        };
        let (refused, took) = match answer {
            Some(Ok(Outcome::Granted(took))) => (false, took),
            Some(Ok(Outcome::Refused(took))) => (true, took),
            Some(Ok(Outcome::OtherWindow)) => return Sent::OtherWindow,
            Some(Ok(Outcome::Failed) | Err(_)) => {
                self.do_without(failing());
                return Sent::Failed;
            }
            None => {
                self.lose_patience(failing(), began);
                return Sent::Failed;
            }
        };
        let gifts = rules.iter().copied().zip(gifts(&wants, &took)).collect();
        for (i, took) in took.iter().enumerate() {
            let Some(charge) = self.context.result.charges.get_mut(first + i) else { break };
            let used = if refused { took.used.saturating_sub(took.granted) } else { took.used };
            let line = self.context.result.layers[first + i];
            let counter = self.context.inputs.keyed_requests[line.rule]
                .map(|keyed_request| rule_set.layer_of(charge_plan, line).counter(keyed_request));
            // Where nothing was taken, the store says what it knows.
            let least = known.get(i).copied().unwrap_or(0);
            let known = counter.map_or(least, |counter| shared.known(counter, took.end_ms, least, generation));
            let used = used.max(known);
            charge.usage.used = used.saturating_add(here.get(i).copied().unwrap_or(0));
            charge.usage.end_ms = took.end_ms;
            charge.is_full = refused
                && charge.usage.used.max(charge.request.floor) + u64::from(charge.request.cost)
                    > charge.request.ceiling;
            if let Some(counter) = counter {
                shared.hear(counter, took.end_ms, used, now_ms);
            }
        }
        if refused { Sent::Refused } else { Sent::Granted(gifts) }
    }

    /// Whether it is known that the store would refuse what lies on the desk behind `first`; then it lies there as if it had.
    /// Now and then it is asked all the same: a counter may have been reset, or tokens given back.
    fn is_used_up(&mut self, rule_set: &RuleSet, charge_plan: &ChargePlan, first: usize, now_ms: u64) -> bool {
        let shared = Rc::clone(&self.shared);
        let now = shared.clock.instant();
        let mut is_full = false;
        let keyed_requests = &self.context.inputs.keyed_requests;
        let DecisionResult { charges, layers: lines, .. } = &mut self.context.result;
        for (charge, line) in charges.iter_mut().zip(lines.iter()).skip(first) {
            let Some(keyed_request) = keyed_requests[line.rule] else { continue };
            let layer = rule_set.layer_of(charge_plan, *line);
            let tally = shared.table.known_usage(layer.counter(keyed_request), now_ms);
            let here = shared.used_here(rule_set, charge_plan.rules[line.rule], line.layer, keyed_request).used;
            charge.usage.used = tally.map_or(0, |(_, used)| u64::from(used)).saturating_add(here);
            charge.usage.end_ms = tally.map_or(charge.usage.end_ms, |(end_ms, _)| end_ms);
            charge.is_full =
                charge.usage.used.max(charge.request.floor) + u64::from(charge.request.cost) > charge.request.ceiling;
            if charge.is_full {
                let period_ms = rule_set.windows[layer.windows_index].typical_ms();
                let due = |record: &mut Record| record.is_recheck_due(now, period_ms);
                if shared.leases.with(layer.counter(keyed_request), shared.own_shard, now, due) != Some(false) {
                    return false;
                }
                is_full = true;
            }
        }
        is_full
    }

    /// Takes places in windows to come, for the rules that are full and let a request wait; what else it asks for is charged
    /// now.
    pub(super) async fn place(
        &mut self,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        first: usize,
        lines: &[LayerRef],
    ) -> Next {
        let shared = Rc::clone(&self.shared);
        let mut wait: Option<Waiter> = None;
        let Parts { placed, here, kept } = self.parts(rule_set, charge_plan, first, lines);
        let clock = || shared.clock.now().unix_ms;
        // Places are counted from the windows that were open when it was found that there is no room.
        let mut now = DecisionTime::starting_at(self.context.result.decided_ms, &clock);
        for _ in 0..TRIES {
            let now_ms = now.unix_ms;
            let time = rule_set.time(now_ms);
            let Some(turns) = rule_set.admission_times(charge_plan, time, &self.context) else { break };
            if wait.is_none() {
                match rule_set.reserve_waiter(charge_plan, &self.context) {
                    Some(entered) => wait = entered,
                    None => break,
                }
            }
            let told: Vec<_> = self
                .context
                .result
                .charges
                .iter()
                .zip(&self.context.result.layers)
                .map(|(charge, line)| (*line, charge.usage))
                .collect();
            self.context.truncate(first);
            match rule_set.decide_locally(charge_plan, &kept, &shared.table, now, &mut self.context, false) {
                LocalDecision::Decided(Decision::Admitted) => {}
                LocalDecision::Decided(Decision::Refused | Decision::Delayed { .. }) => {
                    return Next::Done(Decision::Refused);
                }
                LocalDecision::MissingTokens => return Next::Fetch { first },
            }
            let behind = rule_set.add_prepared_charges(charge_plan, &placed, &shared.table, now_ms, &mut self.context);
            let until_ms = turns.iter().copied().max().unwrap_or(now_ms);
            let again =
                rule_set.request_future_windows(charge_plan, &turns, &told, time, &mut self.context, first, behind);
            let mid = behind + here;
            let sent = match rule_set.acquire_prepared(&shared.table, now_ms, &mut self.context, behind, mid) {
                false => Sent::Refused,
                true if placed[here..].is_empty() => Sent::Granted(Vec::new()),
                true => self.send(rule_set, charge_plan, mid).await,
            };
            if !matches!(sent, Sent::Granted(_)) {
                shared.undo(rule_set, &mut self.context, first, Vec::new());
            }
            match sent {
                Sent::Granted(gifts) => {
                    shared.owe(rule_set, charge_plan, &self.context, first, &self.texts);
                    self.keep_places(gifts, &turns, now_ms, mid);
                    self.progress.judgement = Some(Decision::Delayed { until_ms, waiter: wait, recharge: again });
                    self.charge_again_what_ends(mid, |line| turns[line.rule] <= now_ms);
                    self.progress.group = 1;
                    return self.go_on(rule_set, charge_plan);
                }
                Sent::Refused => {
                    now = DecisionTime::read(&clock);
                    rule_set.refresh_usage(charge_plan, &shared.table, now.unix_ms, &mut self.context, behind);
                }
                Sent::OtherWindow | Sent::Failed => {
                    self.context.truncate(first);
                    return self.go_on(rule_set, charge_plan);
                }
            }
        }
        Next::Done(Decision::Refused)
    }

    /// Who decides on which lines of a request that waits.
    fn parts(&mut self, rule_set: &RuleSet, charge_plan: &ChargePlan, first: usize, lines: &[LayerRef]) -> Parts {
        let full = self.full_rules(first);
        let SharedDecision { context, progress, .. } = self;
        rule_set.set_counting_modes(
            charge_plan,
            |position| progress.beyond[position],
            &mut context.sharing.counting_modes,
        );
        let lines = lines.iter().filter(|line| {
            context.inputs.keyed_requests[line.rule].is_some() && !context.sharing.prepaid.contains(line)
        });
        let (mut placed, mut asked, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for line in lines {
            match (context.sharing.counting_modes[line.rule], full.contains(&line.rule)) {
                (CountingMode::Local | CountingMode::LocalFallback, true) => placed.push(*line),
                (CountingMode::Leased, true) => asked.push(*line),
                // What the store decides itself it decides in the same call.
                (CountingMode::Remote, _) if !progress.beyond[line.rule] => asked.push(*line),
                (
                    CountingMode::Local | CountingMode::LocalFallback | CountingMode::Leased | CountingMode::Remote,
                    _,
                ) => kept.push(*line),
            }
        }
        let here = placed.len();
        placed.append(&mut asked);
        Parts { placed, here, kept }
    }

    /// Remembers what gives back what the store has charged from `mid` on.
    fn keep_places(&mut self, gifts: Vec<(usize, Refund)>, turns: &[u64], now_ms: u64, mid: usize) {
        self.context.result.charges.iter_mut().for_each(|charge| charge.is_full = false);
        let used = self.context.result.charges[mid..].iter().map(|charge| charge.usage.used);
        let places = gifts.into_iter().zip(used);
        // Nobody who has a place may be moved by whoever gives up his.
        let last = |((rule, gift), used): ((usize, Refund), u64)| {
            let only_if_used = (turns[rule] > now_ms).then_some(used);
            (rule, Refund { only_if_used, ..gift })
        };
        self.progress.gifts.extend(places.map(last));
    }

    /// Of what the store has charged from `mid` on, for the windows that are open, remembers which windows are over by the
    /// time that the request passes.
    pub(super) fn charge_again_what_ends(&mut self, mid: usize, is_charged_now: impl Fn(&LayerRef) -> bool) {
        let Some(Decision::Delayed { until_ms, recharge: again, .. }) = &mut self.progress.judgement else { return };
        let charged = self.context.result.charges[mid..].iter().zip(&self.context.result.layers[mid..]);
        let ends = charged.filter(|(charge, line)| is_charged_now(line) && charge.usage.end_ms <= *until_ms);
        again.extend(ends.map(|(_, line)| *line));
    }

    fn go_on(&mut self, rule_set: &Arc<RuleSet>, charge_plan: &ChargePlan) -> Next {
        let SharedDecision { shared, context, texts, progress, .. } = self;
        Rc::clone(shared).advance(rule_set, charge_plan, context, texts, progress)
    }

    fn full_rules(&self, first: usize) -> Vec<usize> {
        let full = self
            .context
            .result
            .charges
            .iter()
            .zip(&self.context.result.layers)
            .skip(first)
            .filter(|(charge, _)| charge.is_full);
        let mut rules: Vec<usize> = full.map(|(_, line)| line.rule).collect();
        rules.sort_unstable();
        rules.dedup();
        rules
    }
}
