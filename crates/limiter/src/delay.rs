//! What this window alone does not decide: waiting for one to come, refusals that count, costs that
//! are known only afterwards, and when a refused request may come back.
//!
//! A request that waits takes its place at once: in the layers of a rule that is full, in the window in
//! which that rule lets it pass. Nobody of the same key overtakes it: what is left of the windows before
//! is given up in these layers. Rules that have room are charged now, as for any request; what they hold
//! is others' as well, and must not be blocked by one who waits. Where their window is over by the time
//! that the request passes, they are charged again then, and may still refuse.

use crate::acquire::{AcquireResult, Charge, look, take};
use crate::counter::{AcquireRequest, WindowKind, granted};
use crate::decision_context::{DecisionContext, KeyedRequest};
use crate::decision_time::Now;
use crate::rule::OnLimit;
use crate::rule_set::{ChargePlan, CompiledRule, Decision, LayerRef, RuleSet, StoreFormat, Wait};
use crate::sharded_counter::ShardReceipt;
use crate::shared_counting::CountingMode;
use crate::table::{Charged, Table};
use crate::window_sequence::Time;

/// How often a request tries to take a place that another one took in between.
const TRIES: u32 = 16;

impl RuleSet {
    /// Charges a request that does not fit now in windows to come, if its rules let it wait.
    #[cold]
    pub(super) fn postpone<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        time: Time<'_>,
        context: &mut DecisionContext,
    ) -> Option<Decision> {
        let asked: Vec<AcquireRequest> = context.charges.iter().map(|charge| charge.ask).collect();
        let mut wait = None;
        for _ in 0..TRIES {
            let Some(turns) = self.turns(charge_plan, time, context) else { break };
            if wait.is_none() {
                match self.enter(charge_plan, context) {
                    Some(entered) => wait = entered,
                    None => break,
                }
            }
            let until_ms = turns.iter().copied().max().unwrap_or(time.now_ms);
            let mut again = Vec::new();
            for (charge, line) in context.charges.iter_mut().zip(&context.lines) {
                let end_ms = match turns[line.rule] {
                    turn_ms if turn_ms > time.now_ms => {
                        self.ask_for_then(charge, self.entry(charge_plan, *line), *line, turn_ms, time)
                    }
                    _ => charge.usage.end_ms,
                };
                if end_ms <= until_ms {
                    again.push(*line);
                }
            }
            if take(table, &mut context.charges, &mut context.shares, time) == AcquireResult::Admitted {
                context.charges.iter_mut().for_each(|charge| charge.full = false);
                return Some(Decision::Delayed { until_ms, wait, again });
            }
            // Another request took a place: what is left now?
            context.charges.iter_mut().zip(&asked).for_each(|(charge, ask)| charge.ask = *ask);
            if look(table, &mut context.charges, time) {
                context.charges.iter_mut().for_each(|charge| charge.full = false);
            }
        }
        // The answer tells of the windows as they are.
        context.charges.iter_mut().zip(asked).for_each(|(charge, ask)| charge.ask = ask);
        None
    }

    /// A place among those who wait because of a rule that is full, if one of them is kept; `None` if there are too many.
    pub fn enter(&self, charge_plan: &ChargePlan, context: &DecisionContext) -> Option<Option<Wait>> {
        // Of several rules that let it wait, the first holds the place.
        let full = context.charges.iter().zip(&context.lines).filter(|(charge, _)| charge.full);
        let delays = full.map(|(_, line)| *line).find(|line| self.entry(charge_plan, *line).rule.delays());
        let Some(line) = delays else { return Some(None) };
        let place = self.entry(charge_plan, line).queue.enter()?;
        Some(Some(Wait { rule: line.rule, place }))
    }

    /// When each rule of the roster has room for a request, if it may wait for that.
    pub fn turns(&self, charge_plan: &ChargePlan, time: Time<'_>, context: &DecisionContext) -> Option<Vec<u64>> {
        let mut turns = vec![time.now_ms; charge_plan.rules.len()];
        for (charge, line) in context.charges.iter().zip(&context.lines).filter(|(charge, _)| charge.full) {
            let entry = self.entry(charge_plan, *line);
            let layer = entry.layer(line.layer);
            let opens_ms = self.opens_ms(charge, entry, line.layer, time.now_ms)?;
            // What lies on the desk may say of a window that it ends when it has ended.
            let waits_ms = opens_ms.saturating_sub(time.now_ms);
            let may_wait = charge_plan.delays || layer.reserve > 0;
            match entry.rule.on_limit {
                _ if layer.is_held => return None,
                OnLimit::Delay { max_delay_ms, .. } if may_wait && waits_ms <= max_delay_ms => {}
                OnLimit::Refuse if context.reserve && layer.reserve > 0 => {}
                OnLimit::Delay { .. } | OnLimit::Refuse | OnLimit::Shadow => return None,
            }
            turns[line.rule] = turns[line.rule].max(opens_ms);
        }
        Some(turns)
    }

    /// Asks a counter for tokens of the window that is open at `until_ms`; returns the end of that.
    pub(super) fn ask_for_then(
        &self,
        charge: &mut Charge,
        entry: &CompiledRule,
        line: LayerRef,
        until_ms: u64,
        time: Time<'_>,
    ) -> u64 {
        let layer = entry.layer(line.layer);
        let pace = &time.paces[layer.timeline];
        let end_ms = pace.open(charge.usage.end_ms, until_ms);
        let windows = pace.between(charge.usage.end_ms, end_ms);
        let granted = granted(windows, charge.ask.limit);
        charge.ask.ceiling = charge.ask.ceiling.saturating_add(granted);
        if charge.full && layer.reserve > 0 {
            // Tokens of this window and of those to come are one account, up to the reserve.
            charge.ask.ceiling = charge.ask.ceiling.min(u64::from(layer.capacity) + u64::from(layer.reserve));
        } else {
            charge.ask.floor = granted;
        }
        end_ms
    }

    /// Charges a request whose turn has come in the layers whose windows are over since it was charged
    /// there: all of them, or none. Where one is full, it may have to wait again.
    #[cold]
    pub fn charge_again<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        context.clear();
        self.decide(charge_plan, lines, table, now, context, true)
    }

    /// The longest that any rule of a roster lets a request wait.
    pub fn most_delay_ms(&self, charge_plan: &ChargePlan) -> u64 {
        let delay = |rule: &usize| match self.entries[*rule].rule.on_limit {
            OnLimit::Delay { max_delay_ms, .. } => max_delay_ms,
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        charge_plan.rules.iter().map(delay).max().unwrap_or(0)
    }

    /// When a counter that had no room will have some, if nobody else asks; `None` if it never will.
    pub fn opens_ms(&self, charge: &Charge, entry: &CompiledRule, layer: usize, now_ms: u64) -> Option<u64> {
        let missing = (charge.usage.used + u64::from(charge.ask.cost)).saturating_sub(charge.ask.ceiling);
        if u64::from(charge.ask.cost) > charge.ask.ceiling {
            return None;
        }
        // What a window that stands for itself has too much is not owed by the next: it may have been used under a greater limit.
        let hangs_together = match charge.ask.course {
            WindowKind::Plain => false,
            WindowKind::Leased => entry.layer(layer).form != StoreFormat::Plain,
            WindowKind::Grid(_) | WindowKind::Floating(_) => true,
        };
        let windows = missing.div_ceil(u64::from(charge.ask.limit));
        match if hangs_together { windows } else { windows.min(1) } {
            0 => Some(now_ms),
            windows => {
                Some(self.time(now_ms).paces[entry.layer(layer).timeline].after(charge.usage.end_ms, windows - 1))
            }
        }
    }

    /// When a request that was just refused would be admitted if nobody else asked, Unix milliseconds; `None`
    /// if it never would. Not only the counters that refused it have a say: where refusals consume, they may
    /// have taken the last of another.
    pub fn again_ms(&self, charge_plan: &ChargePlan, context: &DecisionContext, now_ms: u64) -> Option<u64> {
        let lines = context.charges.iter().zip(&context.lines);
        let mut opens =
            lines.map(|(charge, line)| self.opens_ms(charge, self.entry(charge_plan, *line), line.layer, now_ms));
        opens.try_fold(now_ms, |latest_ms, opens_ms| Some(latest_ms.max(opens_ms?)))
    }

    /// Corrects counters that say more than can be owed, which was written under another limit, so that
    /// nobody waits for windows that were never used; `true` if there were some. Plainly full is what they
    /// are then.
    #[cold]
    pub(super) fn amend<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        time: Time<'_>,
        context: &DecisionContext,
        first: usize,
    ) -> bool {
        let mut amended = false;
        for (charge, line) in context.charges.iter().zip(&context.lines).skip(first) {
            let layer = self.layer_of(charge_plan, *line);
            if layer.differs && charge.usage.used > layer.most() {
                amended |= table.amend(charge.counter, charge.ask, layer.most(), time);
            }
        }
        amended
    }

    /// Forgets what was used and owed in the counters that are on the desk. What was counted together
    /// with other keys, because the table was full, stays.
    #[cold]
    pub fn forget<const W: usize>(&self, table: &Table<W>, now_ms: u64, context: &DecisionContext) {
        for charge in &context.charges {
            charge
                .split
                .counters(charge.counter)
                .for_each(|counter| _ = table.forget(counter, charge.ask, self.time(now_ms)));
        }
    }

    fn entry(&self, charge_plan: &ChargePlan, line: LayerRef) -> &CompiledRule {
        &self.entries[charge_plan.rules[line.rule]]
    }

    /// Lets a refused request consume what is left, in the layers of the rules that say so.
    #[cold]
    pub(super) fn count_refusal<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        time: Time<'_>,
        context: &mut DecisionContext,
        first: usize,
    ) {
        for (charge, line) in context.charges.iter_mut().zip(&context.lines).skip(first) {
            // What is counted elsewhere is consumed there.
            let is_here = !matches!(context.stands.get(line.rule), Some(CountingMode::Leased | CountingMode::Aside));
            if is_here && self.entry(charge_plan, *line).rule.count_refused {
                consume(charge, table, time);
            }
        }
    }

    /// Charges what a request turned out to cost beside what it was charged before, whatever is left:
    /// what is too much is owed, and the windows to come grant that much less.
    #[cold]
    pub fn overdraw<const W: usize>(
        &self,
        position: usize,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now_ms: u64,
    ) {
        let entry = &self.entries[position];
        for layer in entry.variant(keyed_request.variant) {
            loop {
                let ready = entry.layer(layer);
                let end_ms = self.timelines[ready.timeline].window_at(now_ms, keyed_request.offset).end_ms;
                let mut charge = ready.charge(keyed_request, end_ms, 0);
                if ready.is_held {
                    charge.usage = table.look(charge.counter, charge.ask, self.time(now_ms)).0;
                    consume(&mut charge, table, self.time(now_ms));
                    break;
                }
                charge.ask.ceiling = u64::MAX;
                match table.charge(charge.counter, charge.ask, self.time(now_ms), None) {
                    Charged::Paid(..) | Charged::Full(_) => break,
                    Charged::Late if now_ms < table.horizon_ms() => now_ms = table.horizon_ms(),
                    // There is no later time than the last.
                    Charged::Late => break,
                }
            }
        }
    }

    /// Gives back what was charged, or the last `tokens` of it.
    #[cold]
    pub fn give_back<const W: usize>(&self, shares: &[ShardReceipt], tokens: u32, table: &Table<W>, now_ms: u64) {
        for share in shares.iter().rev() {
            table.refund(share.paid.last(tokens), share.ask, self.time(now_ms));
        }
    }
}

/// Takes what is left of a counter, up to the cost. A window that is not open is not opened.
fn consume<const W: usize>(charge: &mut Charge, table: &Table<W>, time: Time<'_>) {
    for _ in 0..TRIES {
        let left = charge.ask.ceiling.saturating_sub(charge.usage.used);
        let cost = charge.ask.cost.min(u32::try_from(left).unwrap_or(u32::MAX));
        if cost == 0 || (charge.usage.used == 0 && charge.is_floating()) {
            return;
        }
        let ask = AcquireRequest { cost, ..charge.ask };
        if charge.split.shards > 1 {
            charge.split.charge(table, charge.counter, ask, time, &mut Vec::new());
            charge.usage.used += u64::from(cost);
            return;
        }
        match table.charge(charge.counter, ask, time, None) {
            Charged::Paid(_, usage) => {
                charge.usage = usage;
                return;
            }
            Charged::Full(usage) => charge.usage = usage,
            Charged::Late => return,
        }
    }
}
