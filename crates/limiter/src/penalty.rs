//! Penalties: after a refusal by a window of a rule, the key stays refused for some time.
//!
//! A penalty is a window that a refusal opens: a counter of the table with one token, in a layer of its own. Requests take
//! nothing from the layer, and are refused while the token is used. So penalties are kept wherever counters are.

use crate::charge_plan::{ChargePlan, LayerCharge};
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::handles::{ChargePosition, RuleId};
use crate::rule_set::{KeyedRequest, RuleSet};
use crate::table::{CounterResult, Table};
use crate::window_kind::{AcquireRequest, Usage};

impl Usage {
    /// The usage of a penalty that is known from two places: it lasts until the later end.
    pub fn joined_penalty(self, other: Usage) -> Usage {
        match (self.used, other.used) {
            (_, 0) => self,
            (0, _) => other,
            (_, _) => Usage { used: 1, end_ms: self.end_ms.max(other.end_ms) },
        }
    }
}

impl ChargePlan {
    /// The charges from `first` on that begin a penalty: those of rules of which a window refused the request, while the key
    /// served no penalty.
    pub fn new_penalties(&self, context: &DecisionContext, first: ChargePosition) -> Vec<ChargePosition> {
        let charges = &context.result.charges;
        let refuses =
            |rule: RuleId| charges[first..].iter().any(|charge| charge.layer.id.rule == rule && charge.is_full);
        let is_new = |charge: &LayerCharge| {
            !charge.is_full && self.layer(charge.layer).is_penalty() && refuses(charge.layer.id.rule)
        };
        charges.ids_from(first).filter(|position| is_new(&charges[*position])).collect()
    }

    /// Starts the penalties of a refused request that are counted here.
    #[cold]
    pub(super) fn start_penalties<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        first: ChargePosition,
    ) {
        for position in self.new_penalties(context, first) {
            let charge = &mut context.result.charges[position];
            let keyed_request = context.inputs.keyed_requests[charge.layer.position];
            let Some(keyed_request) = keyed_request.filter(|_| charge.mode.is_local()) else { continue };
            if let Some(usage) = self.rule_set().start_penalty(charge.layer.id.rule, keyed_request, table, now) {
                (charge.usage, charge.is_full) = (usage, true);
            }
        }
    }
}

impl RuleSet {
    /// Starts the penalty of a key by a rule, unless it serves one; returns the state
    /// of the penalty's counter, `None` if the table is full.
    #[cold]
    pub fn start_penalty<const W: usize>(
        &self,
        rule: RuleId,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
    ) -> Option<Usage> {
        let compiled = &self.rules[rule];
        let layer = compiled.layer(compiled.penalty?);
        loop {
            let end_ms = self.window_end_ms(layer, now.unix_ms, keyed_request.offset);
            let charge = layer.new_charge(keyed_request, end_ms, 0);
            let request = AcquireRequest { cost: 1, ceiling: 1, ..charge.request };
            // Not in an overflow counter, where the penalty would refuse other keys too, as long as it lasts.
            let Some(result) = table.acquire_own(charge.counter, request, self.time(now.unix_ms), None) else {
                table.count_overflow_refusal();
                return None;
            };
            match result {
                CounterResult::Acquired(_, usage) => return Some(usage),
                // A counter that another thread has just inserted, at a later time, looks full although it is empty: that
                // thread may start the penalty only after this refusal has returned.
                CounterResult::Full(_) if now.advance() => {}
                CounterResult::Full(usage) => return Some(usage),
                CounterResult::Late if now.advance_to(table.horizon_ms()) => {}
                // Counters cannot hold a later time.
                CounterResult::Late => return None,
            }
        }
    }
}
