//! Decides which slots a request gets by the rules of its route, before its windows are decided.

use crate::charge_plan::{ChargePlan, LayerRef};
use crate::concurrency::{ConcurrencyUsage, QueuedSlot, Slot, SlotState};
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::handles::{ChargePosition, PlanPosition};
use crate::key::KeyHash;
use crate::table::Table;

/// The result of taking the slots of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotsResult {
    /// The request has all of them.
    Acquired,
    /// A rule refuses the request. The slots taken before have to be released.
    Refused,
    /// The request may wait for a slot of this rule: see [`ChargePlan::queue_slot`]. The slots taken before are held.
    Full(PlanPosition),
}

impl ChargePlan {
    /// Takes a slot of every rule that limits the requests in flight, and passes the slots to `hold` with the position of their
    /// rule. `after`: the rule whose slot was taken last, for a request that has waited for it. A shadow rule without a free
    /// slot does not apply to the request any more.
    pub fn acquire_slots(
        &self,
        context: &mut DecisionContext,
        after: Option<PlanPosition>,
        mut hold: impl FnMut(PlanPosition, Slot),
    ) -> SlotsResult {
        if after.is_none() {
            context.result.concurrency.clear();
        }
        let is_taken = |position: &PlanPosition| after.is_some_and(|after| *position != after);
        let rules = self.concurrent.iter().copied().skip_while(is_taken).skip(usize::from(after.is_some()));
        for position in rules {
            let Some((key, limit)) = self.concurrent_limit(position, context) else { continue };
            let rule = &self.rule(position).rule;
            let (slot, in_use) = self.rule_set().concurrency.try_acquire(key, limit);
            let state = match slot {
                Some(_) => SlotState::Free,
                None if rule.is_shadow() => SlotState::Shadowed,
                None => SlotState::Full,
            };
            let in_use = in_use + u64::from(slot.is_some());
            context.result.concurrency.push(ConcurrencyUsage { position, limit, in_use, state });
            if let Some(slot) = slot {
                hold(position, slot);
            }
            match state {
                SlotState::Shadowed => context.inputs.keyed_requests[position] = None,
                SlotState::Full if rule.delays() => return SlotsResult::Full(position),
                SlotState::Full => return SlotsResult::Refused,
                SlotState::Free | SlotState::Waited => {}
            }
        }
        SlotsResult::Acquired
    }

    /// A place in the queue for a slot of the rule at this position; `None` if the rule does not apply to the request.
    pub fn queue_slot(&self, context: &DecisionContext, position: PlanPosition) -> Option<QueuedSlot> {
        let (key, limit) = self.concurrent_limit(position, context)?;
        Some(self.rule_set().concurrency.queue(key, limit))
    }

    /// Reads the requests in flight of all enforced rules that limit them.
    pub fn peek_slots(&self, context: &mut DecisionContext) {
        context.result.concurrency.clear();
        for position in self.concurrent.iter().copied() {
            if let Some((key, limit)) = self.concurrent_limit(position, context)
                && !self.shadow_rules().contains(&position)
            {
                let (in_use, state) = (self.rule_set().concurrency.in_use(key), SlotState::Free);
                context.result.concurrency.push(ConcurrencyUsage { position, limit, in_use, state });
            }
        }
    }

    /// Completes the result of a request that found no free slot, or that was delayed and is refused after all by the layers `refusing`:
    /// peeks at its counters, starts penalties of full windows, and charges the counters where refusals count.
    #[cold]
    pub fn refuse<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        refusing: &[LayerRef],
    ) {
        self.peek(table, now, context);
        context.set_full(refusing);
        self.start_penalties(table, now, context, ChargePosition::FIRST);
        self.charge_refusal(table, context, ChargePosition::FIRST);
    }

    /// The key of a request under a rule, and its limit; `None` if the rule has none for this request.
    fn concurrent_limit(&self, position: PlanPosition, context: &DecisionContext) -> Option<(KeyHash, u32)> {
        let keyed_request = context.inputs.keyed_requests[position]?;
        let limit = self.rule(position).concurrent[keyed_request.variant]?;
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
