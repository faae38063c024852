//! What each rule decided about a request, derived from the result of a decision for metrics, logs, reports and responses.

use crate::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use crate::concurrency::SlotState;
use crate::decision::Decision;
use crate::decision_context::DecisionContext;
use crate::handles::PlanPosition;
use crate::window_kind::Usage;

/// What one rule decided about a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The rule does not count the request: it is exempt, or its key was not found.
    NotCounted,
    /// The windows of the rule had enough tokens.
    Admitted,
    /// A window of the rule lets the request wait: of several such rules, the first.
    Delayed,
    /// The request has waited for a slot of the rule.
    Waited,
    /// A shadow rule would have refused the request.
    Shadowed,
    /// The rule refused the request: a window is full, or no slot is free.
    Refused,
    /// Other rules refused the request. The windows of this rule had enough tokens.
    RefusedElsewhere,
}

impl ChargePlan {
    /// What the rule at a position decided about the request, with the result of the decision in `context`.
    #[inline]
    pub fn verdict(&self, position: PlanPosition, context: &DecisionContext, decision: &Decision) -> Verdict {
        let has_slot_state = |state: SlotState| {
            let mut usages = context.result.concurrency.iter();
            usages.any(|usage| usage.rule == position && usage.state == state)
        };
        if context.result.shadowed.contains(&position) || has_slot_state(SlotState::Shadowed) {
            return Verdict::Shadowed;
        }
        if context.inputs.keyed_requests[position].is_none() {
            return Verdict::NotCounted;
        }
        let mut charges = context.charges_of_rule(position);
        match decision {
            Decision::Refused if charges.any(|charge| charge.is_full) || has_slot_state(SlotState::Full) => {
                Verdict::Refused
            }
            Decision::Refused => Verdict::RefusedElsewhere,
            _ if has_slot_state(SlotState::Waited) => Verdict::Waited,
            Decision::Delayed { waiter: Some(waiter), .. } if waiter.rule == position => Verdict::Delayed,
            Decision::Delayed { waiter: None, .. } if charges.any(|charge| self.takes_later_tokens(charge)) => {
                Verdict::Delayed
            }
            Decision::Delayed { .. } | Decision::Admitted => Verdict::Admitted,
        }
    }

    /// Whether a charge takes tokens of later windows.
    fn takes_later_tokens(&self, charge: &LayerCharge) -> bool {
        charge.usage.used > u64::from(self.layer(charge.layer).capacity)
    }
}

impl DecisionContext {
    /// The usage of a layer that clients are told. `penalty` is the layer that counts penalties of the same rule: while one lasts,
    /// all tokens are used, until it ends. `capacity`: of the layer.
    #[inline]
    pub fn stated_usage(&self, charge: &LayerCharge, penalty: Option<LayerRef>, capacity: u64) -> Usage {
        let Some(penalty) = penalty.and_then(|penalty| self.charge_of(penalty)) else { return charge.usage };
        if !penalty.is_full && penalty.usage.used == 0 {
            return charge.usage;
        }
        let window_end_ms = if charge.usage.used >= capacity { charge.usage.end_ms } else { 0 };
        Usage { used: capacity.max(charge.usage.used), end_ms: window_end_ms.max(penalty.usage.end_ms) }
    }
}
