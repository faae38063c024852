//! Rules whose counters several gateways share: what is decided here with tokens that were fetched beforehand, what is left for
//! the store to decide, and what is counted on this machine alone as long as the store can not be reached.
//!
//! Nothing is waited for here, and no store is known. Whoever asks is told that tokens lack, fetches some, and asks
//! again; everything else of the request is charged with them, or nothing is.

use crate::acquire::{AcquireResult, Charge, look, take};
use crate::counter::{Usage, usage};
use crate::decision_context::{DecisionContext, KeyedRequest};
use crate::decision_time::Now;
use crate::rule::{OnLimit, OnOutage, Sharing};
use crate::rule_set::{ChargePlan, CompiledRule, Decision, Layer, LayerRef, RuleSet};
use crate::sharded_counter::{ShardReceipt, Split};
use crate::table::{Counter, Table};
use crate::window_sequence::Time;

/// How the rules of a roster are counted in one decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountingMode {
    /// In ordinary counters.
    Own,
    /// With tokens that were fetched beforehand.
    Leased,
    /// In ordinary counters, beside what is known to be used elsewhere.
    Alone,
    /// Not here.
    Aside,
}

/// What came of deciding some lines.
#[derive(Debug)]
pub enum Step {
    Decided(Decision),
    /// Nothing was charged: the counters at `desk.lacking` need more tokens than were fetched for them.
    Lacking,
}

impl Layer {
    /// The counter of one key, as it is where it is not shared.
    pub fn counter(&self, keyed_request: KeyedRequest) -> Counter {
        self.charge(keyed_request, 0, 0).counter
    }

    /// Makes a charge one of tokens that were fetched.
    fn lease(&self, charge: &mut Charge) {
        charge.counter = charge.counter.purse();
        charge.ask = charge.ask.leased();
        charge.split = Split::WHOLE;
    }
}

impl RuleSet {
    /// The stand of each rule of a roster.
    /// `beyond`: whether a rule does what it does in an outage.
    pub fn stands(&self, charge_plan: &ChargePlan, beyond: impl Fn(usize) -> bool, stands: &mut Vec<CountingMode>) {
        stands.clear();
        stands.extend_from_slice(&charge_plan.stands);
        for (position, stand) in stands.iter_mut().enumerate() {
            if *stand != CountingMode::Own && beyond(position) {
                *stand = match self.entries[charge_plan.rules[position]].rule.on_outage {
                    OnOutage::Local => CountingMode::Alone,
                    OnOutage::Allow | OnOutage::Refuse => CountingMode::Aside,
                };
            }
        }
    }

    /// The enforced lines of a request in the order in which they are charged.
    /// They are in the desk's own list: see [`Desk::put_back`].
    pub fn enforced(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) -> Vec<LayerRef> {
        if context.keyed_requests.iter().flatten().any(|keyed_request| keyed_request.variant != 0) {
            return self.lines_of(charge_plan, context);
        }
        let mut lines = std::mem::take(&mut context.own_lines);
        lines.clear();
        lines.extend_from_slice(charge_plan.enforced());
        lines
    }

    /// The lines of a shadow rule, by its position.
    pub fn of_shadow(&self, charge_plan: &ChargePlan, position: usize, keyed_request: KeyedRequest) -> Vec<LayerRef> {
        self.lines(charge_plan, position, keyed_request.variant).collect()
    }

    /// Charges lines as `desk.stands` says, all or none, behind what is on the desk already.
    pub fn step<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
        may_wait: bool,
    ) -> Step {
        let first = context.charges.len();
        context.lacking.clear();
        context.decided_ms = 0;
        // Who waits for windows to come asks the store for his place; here he can not have it.
        let leases = |line: &LayerRef| {
            context.stands[line.rule] == CountingMode::Leased && context.keyed_requests[line.rule].is_some()
        };
        let may_wait = may_wait && !lines.iter().any(leases);
        let judgement = self.decide(charge_plan, lines, table, now, context, may_wait);
        let now_ms = context.decided_ms;
        match judgement {
            Decision::Refused => {
                if self.only_lacks(charge_plan, table, now, context, first) {
                    return Step::Lacking;
                }
                if charge_plan.counts_refused() {
                    self.count_refusal(charge_plan, table, self.time(now_ms), context, first);
                }
            }
            Decision::Admitted | Decision::Delayed { .. } => context.find_low(first),
        }
        self.tell(charge_plan, table, now_ms, context, first);
        Step::Decided(judgement)
    }

    /// What a key has used of a layer by the counters of this machine; `rule` is a position in the book.
    pub fn used_here<const W: usize>(
        &self,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: Now<'_>,
    ) -> Usage {
        loop {
            let mut charge = self.charge_here(rule, layer, keyed_request, now.unix_ms);
            look(table, std::slice::from_mut(&mut charge), self.time(now.unix_ms));
            if charge.usage.used == 0 || !charge.may_owe() || !now.goes_on() {
                return charge.usage;
            }
        }
    }

    /// Forgets what a key has used of a layer by the counters of this machine; returns how much it was. Before a counter
    /// becomes empty, `announce` is told the tokens in it. What is announced is never less than what is forgotten; it is more
    /// if another thread empties the same counter.
    pub fn forget_here<const W: usize>(
        &self,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: Now<'_>,
        mut announce: impl FnMut(u64),
    ) -> u64 {
        let charge = self.charge_here(rule, layer, keyed_request, now.unix_ms);
        let time = self.time(now.unix_ms);
        let mut forgotten = Vec::new();
        for counter in charge.split.counters(charge.counter) {
            let mut announced = 0;
            forgotten.push(table.forget_after(counter, charge.ask, time, |word| {
                let used = usage(word, charge.ask, time).used;
                announce(used.saturating_sub(announced));
                announced = used.max(announced);
            }));
        }
        now.goes_on();
        let ask = self.charge_here(rule, layer, keyed_request, now.unix_ms).ask;
        forgotten.into_iter().map(|word| usage(word, ask, self.time(now.unix_ms)).used).sum()
    }

    fn charge_here(&self, rule: usize, layer: usize, keyed_request: KeyedRequest, now_ms: u64) -> Charge {
        let layer = self.entries[rule].layer(layer);
        let end_ms = self.timelines[layer.timeline].window_at(now_ms, keyed_request.offset).end_ms;
        layer.charge(KeyedRequest { cost: 0, ..keyed_request }, end_ms, 0)
    }

    /// Whether nothing stands against a request that was refused but that too few tokens were fetched.
    fn only_lacks<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
        first: usize,
    ) -> bool {
        let now_ms = context.decided_ms;
        let DecisionContext { charges, lines, stands, keyed_requests, lacking, .. } = context;
        let mut is_full = false;
        for (i, (charge, line)) in charges.iter_mut().zip(lines.iter()).enumerate().skip(first) {
            let Some(keyed_request) = keyed_requests[line.rule].filter(|_| charge.full) else { continue };
            let layer = self.layer_of(charge_plan, *line);
            let here = || self.used_here(charge_plan.rules[line.rule], line.layer, keyed_request, table, now).used;
            if stands[line.rule] != CountingMode::Leased
                || layer.is_used_up(table, keyed_request, charge, here(), now_ms)
            {
                is_full = true;
            } else {
                lacking.push(i);
            }
        }
        if is_full {
            // What might have been fetched is not what refused it.
            for i in lacking.drain(..) {
                charges[i].full = false;
                // That no tokens were fetched says nothing about what is left, if nothing else is known of the counter.
                let known = keyed_requests[lines[i].rule].and_then(|keyed_request| {
                    table.tally(self.layer_of(charge_plan, lines[i]).counter(keyed_request), now_ms)
                });
                if known.is_none() {
                    charges[i].usage.used = 0;
                }
            }
        }
        !is_full && !lacking.is_empty()
    }

    /// Whether a charge that was made without the store is more than is left by what is known now: since it was put down,
    /// another event loop has made what is used elsewhere more, and may have emptied its counter before it was charged.
    // Ordering: that loop raises the tally and then empties the counter, each by an acquiring and releasing swap. A charge
    // of the emptied counter has acquired the raised tally, so it is read here.
    pub(super) fn was_overtaken<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now_ms: u64,
        context: &DecisionContext,
        first: usize,
    ) -> bool {
        context.charges.iter().zip(&context.lines).skip(first).any(|(charge, line)| {
            let is_alone = context.stands.get(line.rule) == Some(&CountingMode::Alone);
            let elsewhere = || used_elsewhere(charge.counter, table, now_ms);
            let capacity = u64::from(self.layer_of(charge_plan, *line).capacity);
            is_alone && charge.usage.used > capacity.saturating_sub(elsewhere())
        })
    }

    /// Makes charges say what is used by all gateways together, as far as it is known.
    pub fn tell<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        first: usize,
    ) {
        let DecisionContext { charges, lines, stands, keyed_requests, .. } = context;
        for (charge, line) in charges.iter_mut().zip(lines.iter()).skip(first) {
            let (Some(keyed_request), Some(stand)) = (keyed_requests[line.rule], stands.get(line.rule)) else {
                continue;
            };
            let layer = self.layer_of(charge_plan, *line);
            match stand {
                CountingMode::Own | CountingMode::Aside => {}
                CountingMode::Leased => {
                    let left = charge.ask.ceiling.saturating_sub(charge.usage.used);
                    if let Some((end_ms, used)) = table.tally(layer.counter(keyed_request), now_ms) {
                        charge.usage.used = u64::from(used).saturating_sub(left);
                        if left == 0 {
                            charge.usage.end_ms = end_ms;
                        }
                    }
                }
                CountingMode::Alone => {
                    let whole = charge.ask.ceiling.max(u64::from(layer.capacity));
                    charge.usage.used += whole - charge.ask.ceiling;
                    charge.ask.ceiling = whole;
                }
            }
        }
    }

    /// Puts down lines for the store to decide, or for later, as ordinary charges that nobody has made; returns from where on.
    pub fn lay_aside<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
    ) -> usize {
        let behind = context.charges.len();
        for line in lines {
            if let Some(keyed_request) = context.keyed_requests[line.rule] {
                let mut charge = context.charge(self, charge_plan, *line, keyed_request, now_ms);
                if context.stands.get(line.rule) == Some(&CountingMode::Alone) {
                    beside_others(&mut charge, table, now_ms);
                }
                context.charges.push(charge);
                context.lines.push(*line);
            }
        }
        behind
    }

    /// Charges what lies on the desk from `behind` up to `until`, all or none, without looking at it first; `false` if
    /// somebody else has taken it.
    pub fn take<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        behind: usize,
        until: usize,
    ) -> bool {
        let DecisionContext { charges, shares, .. } = context;
        take(table, &mut charges[behind..until], shares, self.time(now_ms)) == AcquireResult::Admitted
    }

    /// Looks anew at what lies on the desk behind `behind`: at what is counted here, and by the use that is known of it at
    /// what the store decides.
    pub fn measure<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        behind: usize,
    ) {
        let uses: Vec<Usage> = context.charges[behind..].iter().map(|charge| charge.usage).collect();
        let lines = context.lines[behind..].to_vec();
        context.rewind(behind);
        self.lay_aside(charge_plan, &lines, table, now_ms, context);
        let DecisionContext { charges, stands, .. } = context;
        for ((charge, line), usage) in charges[behind..].iter_mut().zip(&lines).zip(uses) {
            charge.usage = match stands[line.rule] {
                CountingMode::Own | CountingMode::Alone => table.look(charge.counter, charge.ask, self.time(now_ms)).0,
                CountingMode::Leased | CountingMode::Aside => usage,
            };
            charge.full = !charge.usage.admits(charge.ask);
        }
    }

    /// Asks for places in the windows in which rules let a request pass; `told` is what is used of each layer. Returns
    /// the lines, charged before `behind` or placed, whose windows are over by the time that the last of them lets it pass.
    #[allow(clippy::too_many_arguments, reason = "what is asked, of whom, and when")]
    pub fn ask_for_turns(
        &self,
        charge_plan: &ChargePlan,
        turns: &[u64],
        told: &[(LayerRef, Usage)],
        time: Time<'_>,
        context: &mut DecisionContext,
        first: usize,
        behind: usize,
    ) -> Vec<LayerRef> {
        let until_ms = turns.iter().copied().max().unwrap_or(time.now_ms);
        let mut again = Vec::new();
        for (charge, line) in context.charges.iter_mut().zip(&context.lines).skip(behind) {
            if let Some((_, usage)) = told.iter().find(|(known, _)| known == line) {
                charge.usage = *usage;
            }
            charge.full = !charge.usage.admits(charge.ask);
            let turn_ms = turns[line.rule];
            if turn_ms > time.now_ms {
                let end_ms =
                    self.ask_for_then(charge, &self.entries[charge_plan.rules[line.rule]], *line, turn_ms, time);
                again.extend((end_ms <= until_ms).then_some(*line));
            }
        }
        let kept = context.charges[..behind].iter().zip(&context.lines).skip(first);
        again.extend(kept.filter(|(charge, _)| charge.usage.end_ms <= until_ms).map(|(_, line)| *line));
        again
    }

    /// Whether a refused request could be let through in a window to come, by rules that are full.
    pub fn may_wait(&self, charge_plan: &ChargePlan, context: &DecisionContext) -> bool {
        let full = context.charges.iter().zip(&context.lines).filter(|(charge, _)| charge.full);
        let mut waits = full.map(|(_, line)| {
            let entry = &self.entries[charge_plan.rules[line.rule]];
            match entry.rule.on_limit {
                OnLimit::Delay { .. } => {
                    charge_plan.delays || (context.reserve && self.layer_of(charge_plan, *line).reserve > 0)
                }
                OnLimit::Refuse => context.reserve && self.layer_of(charge_plan, *line).reserve > 0,
                OnLimit::Shadow => false,
            }
        });
        let first = waits.next();
        first.is_some_and(|first| first && waits.all(|waits| waits))
    }
}

/// Leaves to a charge on this machine alone what is not known to be used elsewhere.
fn beside_others<const W: usize>(charge: &mut Charge, table: &Table<W>, now_ms: u64) {
    charge.ask.ceiling = charge.ask.ceiling.saturating_sub(used_elsewhere(charge.counter, table, now_ms));
}

/// What is known to be used of a counter by other gateways, or was reported to the store by this one.
fn used_elsewhere<const W: usize>(counter: Counter, table: &Table<W>, now_ms: u64) -> u64 {
    table.tally(counter, now_ms).map_or(0, |(_, used)| u64::from(used))
}

impl CompiledRule {
    /// Whether any of its counters is split, where gateways share them.
    pub fn is_split(&self) -> bool {
        self.layers.iter().any(|layer| layer.shards_elsewhere > 1)
    }

    /// How it is counted as long as the store can be asked.
    pub(super) fn stand(&self) -> CountingMode {
        match self.rule.sharing {
            Sharing::Own => CountingMode::Own,
            // No one call decides on all shards: tokens of a split counter are always fetched.
            Sharing::Exact if !self.is_split() => CountingMode::Aside,
            Sharing::Exact | Sharing::Lease => CountingMode::Leased,
        }
    }
}

impl Layer {
    /// Whether it is known that all gateways together have used too much of a window for this charge, with what was
    /// counted `here` alone.
    fn is_used_up<const W: usize>(
        &self,
        table: &Table<W>,
        keyed_request: KeyedRequest,
        charge: &Charge,
        here: u64,
        now_ms: u64,
    ) -> bool {
        let (cost, capacity) = (u64::from(charge.ask.cost), u64::from(self.capacity));
        let counter = self.counter(keyed_request);
        // What was fetched here and is not spent is not used.
        let spent = |(_, used): (u64, u32)| u64::from(used.saturating_sub(table.purse(counter, now_ms)));
        cost > capacity || table.tally(counter, now_ms).is_some_and(|told| spent(told) + here + cost > capacity)
    }
}

impl DecisionContext {
    /// Takes back the list that was used for lines, so that the next request need not allocate one.
    pub fn put_back(&mut self, lines: Vec<LayerRef>) {
        self.own_lines = lines;
    }

    /// Takes off the desk what was charged behind `first`, to be given back: nobody else can give it back as well.
    pub fn take_back(&mut self, first: usize) -> Vec<ShardReceipt> {
        let split = if first == 0 { 0 } else { self.first_share.min(self.shares.len()) };
        let whole = self.charges.iter_mut().skip(first).filter_map(Charge::take_share);
        whole.chain(self.shares.drain(split..)).collect()
    }

    /// Makes charges that were taken back say so.
    pub fn take_off_costs(&mut self, first: usize, behind: usize) {
        for charge in &mut self.charges[first..behind] {
            charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.ask.cost));
        }
    }

    /// Puts down what the request asks of each of `lines` where several gateways share counters.
    pub(super) fn put_down_shared<const W: usize>(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        lines: &[LayerRef],
        now_ms: u64,
        first: usize,
    ) {
        self.charges.truncate(first);
        self.lines.truncate(first);
        for line in lines {
            let stand = self.stands[line.rule];
            let Some(keyed_request) = self.keyed_requests[line.rule].filter(|_| stand != CountingMode::Aside) else {
                continue;
            };
            if self.in_hand.contains(line) {
                continue;
            }
            let mut charge = self.charge(rule_set, charge_plan, *line, keyed_request, now_ms);
            let layer = rule_set.layer_of(charge_plan, *line);
            match stand {
                CountingMode::Leased => {
                    layer.lease(&mut charge);
                    // More was handed out than this request's limit, which is another one than others have, or had.
                    let handed_out = table.tally(layer.counter(keyed_request), now_ms).map_or(0, |(_, used)| used);
                    if handed_out > layer.capacity && layer.is_used_up(table, keyed_request, &charge, 0, now_ms) {
                        charge.ask.floor = charge.ask.ceiling;
                    }
                }
                CountingMode::Alone => beside_others(&mut charge, table, now_ms),
                CountingMode::Own | CountingMode::Aside => {}
            }
            self.charges.push(charge);
            self.lines.push(*line);
        }
    }

    /// Finds the counters whose fetched tokens have become few: it is looked at each time they have halved, so that
    /// most requests need not.
    fn find_low(&mut self, first: usize) {
        self.low.clear();
        for (i, (charge, line)) in self.charges.iter().zip(&self.lines).enumerate().skip(first) {
            if self.stands[line.rule] == CountingMode::Leased {
                let left = charge.ask.ceiling.saturating_sub(charge.usage.used);
                if left.leading_zeros() != (left + u64::from(charge.ask.cost)).leading_zeros() {
                    self.low.push(i);
                }
            }
        }
    }

    /// Takes off the desk what was put down behind `first`.
    pub fn rewind(&mut self, first: usize) {
        self.charges.truncate(first);
        self.lines.truncate(first);
    }
}
