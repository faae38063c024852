//! Penalties: after a refusal by a window of a rule, the key stays refused for some time.
//!
//! A penalty is a window that a refusal opens: a counter of the table with one token, in a layer of its own. Requests take
//! nothing from the layer, and are refused while the token is used. So penalties are kept wherever counters are.

use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::rule_set::{ChargePlan, KeyedRequest, RuleSet};
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

impl RuleSet {
    /// The positions of charges from `first` on that begin a penalty: those of rules of which a window refused the request,
    /// while the key served no penalty.
    pub fn new_penalties(&self, charge_plan: &ChargePlan, context: &DecisionContext, first: usize) -> Vec<usize> {
        let charges = || context.result.charges.iter().zip(&context.result.layers).enumerate().skip(first);
        let is_new = |position: &usize| {
            let (charge, layer_ref) = (&context.result.charges[*position], context.result.layers[*position]);
            let refuses = || charges().any(|(_, (other, of))| of.rule == layer_ref.rule && other.is_full);
            !charge.is_full && self.layer_of(charge_plan, layer_ref).is_penalty() && refuses()
        };
        charges().map(|(position, _)| position).filter(is_new).collect()
    }

    /// Starts the penalties of a refused request that are counted here.
    #[cold]
    pub(super) fn start_penalties<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        first: usize,
    ) {
        for position in self.new_penalties(charge_plan, context, first) {
            let layer_ref = context.result.layers[position];
            let is_counted_here = charge_plan.is_counted_here(&context.sharing.counting_modes, layer_ref);
            let Some(keyed_request) = context.inputs.keyed_requests[layer_ref.rule].filter(|_| is_counted_here) else {
                continue;
            };
            let rule = charge_plan.rules[layer_ref.rule];
            if let Some(usage) = self.start_penalty(rule, keyed_request, table, now) {
                let charge = &mut context.result.charges[position];
                (charge.usage, charge.is_full) = (usage, true);
            }
        }
    }

    /// Starts the penalty of a key by the rule at a position in [`RuleSet::rules`], unless it serves one; returns the state
    /// of the penalty's counter, `None` if the table is full.
    #[cold]
    pub fn start_penalty<const W: usize>(
        &self,
        rule: usize,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
    ) -> Option<Usage> {
        let compiled = &self.rules[rule];
        let layer = compiled.layer(compiled.penalty?);
        loop {
            let end_ms = self.windows[layer.windows_index].window_at(now.unix_ms, keyed_request.offset).end_ms;
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
