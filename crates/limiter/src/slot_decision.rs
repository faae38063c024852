//! Decides which slots a request gets by the rules of its route, before its windows are decided.

use crate::concurrency::{ConcurrencyUsage, QueuedSlot, Slot, SlotState};
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::key::{KeyHash, KeyPart};
use crate::rule_set::{ChargePlan, RuleSet};
use crate::table::Table;

/// The result of taking the slots of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotsResult {
    /// The request has all of them.
    Acquired,
    /// A rule refuses the request. The slots taken before have to be released.
    Refused,
    /// The request may wait for a slot of this rule: an index for [`RuleSet::queue_slot`]. The slots taken before are held.
    Full(usize),
}

impl RuleSet {
    /// The positions of the rules that limit the requests in flight. Rules for all clients together come last, so that the
    /// waiting requests of one client hold no slots that others need. Of the rest, rules that refuse come first, so that
    /// no request waits and is then refused. All requests wait in this order, so that no two wait for each other.
    pub(super) fn concurrent_order(&self, rules: &[usize]) -> Vec<usize> {
        let mut positions: Vec<usize> = (0..rules.len()).collect();
        positions.retain(|position| self.rules[rules[*position]].concurrent_name().is_some());
        positions.sort_by_key(|position| {
            let rule = &self.rules[rules[*position]].rule;
            (rule.is_shadow(), rule.key.contains(&KeyPart::Global), rule.delays(), rules[*position])
        });
        positions
    }

    /// Takes a slot of every rule from index `first` on that limits the requests in flight, and passes the slots to `hold`
    /// with the position of their rule. A shadow rule without a free slot does not apply to the request any more.
    pub fn acquire_slots(
        &self,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        first: usize,
        mut hold: impl FnMut(usize, Slot),
    ) -> SlotsResult {
        if first == 0 {
            context.result.concurrency.clear();
        }
        for (index, position) in charge_plan.concurrent.iter().copied().enumerate().skip(first) {
            let Some((key, limit)) = self.concurrent_limit(charge_plan, position, context) else { continue };
            let rule = &self.rules[charge_plan.rules[position]].rule;
            let (slot, in_use) = self.concurrency.try_acquire(key, limit);
            let state = match slot {
                Some(_) => SlotState::Free,
                None if rule.is_shadow() => SlotState::Shadowed,
                None => SlotState::Full,
            };
            let in_use = in_use + u64::from(slot.is_some());
            context.result.concurrency.push(ConcurrencyUsage { rule: position, limit, in_use, state });
            if let Some(slot) = slot {
                hold(position, slot);
            }
            match state {
                SlotState::Shadowed => context.inputs.keyed_requests[position] = None,
                SlotState::Full if rule.delays() => return SlotsResult::Full(index),
                SlotState::Full => return SlotsResult::Refused,
                SlotState::Free | SlotState::Waited => {}
            }
        }
        SlotsResult::Acquired
    }

    /// The position of the rule at an index of the order in which slots are taken, and a place in its queue; `None` if the
    /// rule does not apply to the request.
    pub fn queue_slot(
        &self,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        index: usize,
    ) -> Option<(usize, QueuedSlot)> {
        let position = *charge_plan.concurrent.get(index)?;
        let (key, limit) = self.concurrent_limit(charge_plan, position, context)?;
        Some((position, self.concurrency.queue(key, limit)))
    }

    /// Reads the requests in flight of all enforced rules that limit them.
    pub fn peek_slots(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) {
        context.result.concurrency.clear();
        for position in &charge_plan.concurrent {
            if let Some((key, limit)) = self.concurrent_limit(charge_plan, *position, context)
                && !charge_plan.shadow_rules().contains(position)
            {
                let (rule, in_use, state) = (*position, self.concurrency.in_use(key), SlotState::Free);
                context.result.concurrency.push(ConcurrencyUsage { rule, limit, in_use, state });
            }
        }
    }

    /// Completes the result of a request that found no free slot: peeks at its counters, and charges them where refusals
    /// count.
    #[cold]
    pub fn refuse<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) {
        self.peek(charge_plan, table, now, context);
        if charge_plan.counts_refused() {
            let time = self.time(context.result.decided_ms);
            self.charge_refusal(charge_plan, table, time, context, 0);
        }
    }

    /// The key of a request under a rule, and its limit; `None` if the rule has none for this request.
    fn concurrent_limit(
        &self,
        charge_plan: &ChargePlan,
        position: usize,
        context: &DecisionContext,
    ) -> Option<(KeyHash, u32)> {
        let keyed_request = context.inputs.keyed_requests[position]?;
        let limit = self.rules[charge_plan.rules[position]].concurrent[keyed_request.variant]?;
        Some((keyed_request.key, limit))
    }
}

impl DecisionContext {
    /// Adapts the result after the slots of the request were released.
    pub fn slots_released(&mut self) {
        for usage in &mut self.result.concurrency {
            if let SlotState::Free | SlotState::Waited = usage.state {
                usage.in_use = usage.in_use.saturating_sub(1);
                usage.state = SlotState::Free;
            }
        }
    }
}
