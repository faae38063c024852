//! Limits of single clients that end with a window, such as those raised by a grant: windows that begin later have the limits that
//! follow, see [`ClientWindows::until_ms`](crate::rule::ClientWindows).
//!
//! A decision finds by its time which limits apply. Its time may be behind that of another thread, or of a store, that has opened the
//! next window already. So each charge is checked afterwards: one in a window that begins after the end of its limits is undone, and
//! made again under the limits that follow. A plan without such limits skips these steps.

use crate::charge_plan::{ChargePlan, LayerRef};
use crate::decision::Decision;
use crate::decision_context::{ChargesStart, DecisionContext};
use crate::handles::{ChargePosition, LayerId, VariantId};
use crate::rule_set::{CountingMode, RuleSet};
use crate::table::Table;

impl RuleSet {
    /// Whether a window of a layer, given by its end, begins after the limits of a variant have ended.
    pub fn begins_after_limits(&self, layer: LayerId, variant: VariantId, end_ms: u64) -> bool {
        let until_ms = self.rules[layer.rule].rule.end_of(variant).map(|(until_ms, _)| until_ms);
        let begins_ms = || end_ms.saturating_sub(self.windows_of(self.layer(layer)).length_ms(end_ms));
        until_ms.is_some_and(|until_ms| begins_ms() >= until_ms)
    }
}

impl ChargePlan {
    /// Gives the request the limits that follow those that have ended.
    pub(super) fn end_limits(&self, context: &mut DecisionContext, now_ms: u64) {
        if !self.has_ending_limits {
            return;
        }
        for (position, keyed_request) in context.inputs.keyed_requests.enumerate_mut() {
            let Some(keyed_request) = keyed_request else { continue };
            let rule = &self.rule(position).rule;
            while let Some((until_ms, next)) = rule.end_of(keyed_request.variant)
                && until_ms <= now_ms
            {
                keyed_request.variant = next;
            }
        }
    }

    /// These layers of a request, as of a time.
    pub fn layers_at(&self, layers: &[LayerRef], context: &mut DecisionContext, now_ms: u64) -> Vec<LayerRef> {
        self.end_limits(context, now_ms);
        self.current_layers(layers, context)
    }

    /// The layers with the same counters under the limits that the request has now.
    pub(super) fn current_layers(&self, layers: &[LayerRef], context: &DecisionContext) -> Vec<LayerRef> {
        let current = |layer_ref: &LayerRef| {
            let keyed_request = context.inputs.keyed_requests[layer_ref.position];
            let mut others = keyed_request
                .into_iter()
                .flat_map(|keyed_request| self.layers_of_rule(layer_ref.position, keyed_request.variant));
            others.find(|other| self.layer(*other).id == self.layer(*layer_ref).id).unwrap_or(*layer_ref)
        };
        layers.iter().map(current).collect()
    }

    /// Whether charges from `first` on are in windows that begin after their limits have ended. The request then has the limits that
    /// follow. Leased tokens are of the window for which they were leased.
    pub fn ends_limits(&self, context: &mut DecisionContext, first: ChargePosition) -> bool {
        let DecisionContext { inputs, result, .. } = context;
        let mut ends = false;
        for charge in result.charges[first..].iter().filter(|charge| charge.mode != CountingMode::Leased) {
            let LayerRef { position, id } = charge.layer;
            let Some(keyed_request) = inputs.keyed_requests[position].as_mut() else { continue };
            if charge.request.cost > 0
                && self.rule_set().begins_after_limits(id, keyed_request.variant, charge.usage.end_ms)
                && let Some((_, next)) = self.rule(position).rule.end_of(keyed_request.variant)
            {
                keyed_request.variant = next;
                ends = true;
            }
        }
        ends
    }

    /// Undoes a decision with charges as [`ChargePlan::ends_limits`] finds them; `true` if there are some. `first`: where the charges
    /// of the decision begin.
    pub(super) fn undo_under_ended_limits<const W: usize>(
        &self,
        decision: &Decision,
        table: &Table<W>,
        context: &mut DecisionContext,
        first: ChargesStart,
    ) -> bool {
        if !self.has_ending_limits || matches!(decision, Decision::Refused) || !self.ends_limits(context, first.charge)
        {
            return false;
        }
        let time = self.time(context.result.decided_ms);
        let mut receipts = context.result.shard_receipts.split_off(first.shard_receipts);
        receipts.extend(context.result.charges[first.charge..].iter_mut().filter_map(|charge| charge.take_receipt()));
        for receipt in receipts.iter().rev() {
            table.refund(receipt.receipt, receipt.request, time);
        }
        context.truncate(first.charge);
        true
    }
}
