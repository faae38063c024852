//! Settles the charges of a rule once the cost of its request is known.
//!
//! Tokens are charged before forwarding, so that concurrent requests cannot exceed a limit. Afterwards the rest is charged, or what
//! was charged too much is refunded. What exceeds the current windows is taken from later ones.

use std::cmp::Ordering;
use std::mem::take;

use super::counter_access::{CounterAccess, RequestKeys};
use super::scripts::Refund;
use transom_limiter::charge_plan::LayerCharge;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::PlanPosition;
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::WindowKind;

/// What one rule has charged for a request.
#[derive(Default)]
pub struct RuleCharges {
    /// Locally.
    receipts: Vec<ShardReceipt>,
    /// The counters charged by the store, with the ends of their windows; `None` for sliding windows.
    remote: Vec<(Counter, Option<u64>)>,
}

impl RuleCharges {
    pub fn of(context: &DecisionContext, position: PlanPosition) -> RuleCharges {
        let mut charges = RuleCharges::default();
        charges.add(context, position);
        charges
    }

    /// Adds what was charged again.
    pub fn add(&mut self, context: &DecisionContext, position: PlanPosition) {
        self.receipts.extend(context.receipts_of_rule(position));
        let remote = context.charges_of_rule(position).filter(|charge| context.receipts_of(charge).next().is_none());
        let end_ms = |charge: &LayerCharge| (charge.request.kind != WindowKind::Sliding).then_some(charge.usage.end_ms);
        self.remote.extend(remote.map(|charge| (charge.counter, end_ms(charge))));
    }

    /// Takes the receipts of what was charged locally.
    pub(super) fn take_receipts(&mut self) -> Vec<ShardReceipt> {
        take(&mut self.receipts)
    }
}

impl CounterAccess {
    /// Charges or refunds the difference between the cost and what the rule at `position` has charged. `refunds`: of what the store
    /// has charged, for all rules.
    pub fn settle(
        &self,
        keys: RequestKeys<'_>,
        position: PlanPosition,
        charged: &RuleCharges,
        refunds: &[(PlanPosition, Refund)],
        cost: u32,
    ) {
        let Some(keyed_request) = keys.keyed_requests[position] else { return };
        match cost.cmp(&keyed_request.cost) {
            Ordering::Less => {}
            Ordering::Equal => return,
            Ordering::Greater => {
                let excess = KeyedRequest { cost: cost - keyed_request.cost, ..keyed_request };
                return self.charge_excess(keys, position, excess);
            }
        }
        let (tokens, is_all) = (keyed_request.cost - cost, cost == 0);
        // A whole charge in front of later ones may be refunded when these are.
        let (whole, parts): (Vec<ShardReceipt>, Vec<ShardReceipt>) =
            charged.receipts.iter().partition(|charged| is_all && charged.request.kind.carries_debt());
        self.refund_in_order(keys, whole, None);
        self.refund(keys, parts, tokens);
        let of_rule = refunds.iter().filter(|(of, _)| *of == position);
        let refunds: Vec<Refund> = of_rule.map(|(_, refund)| refund.at_most(tokens.into())).collect();
        if !refunds.is_empty() {
            self.refund_in_store(refunds);
            // Before the store refunds: usage that is reported afterwards is not lowered again.
            self.forget_refunded(&charged.remote, tokens);
        }
    }
}
