//! Limits of single clients that apply to one window, such as those raised by a grant: windows before and after it have other limits,
//! see [`ClientWindows::during_ms`](crate::rule::ClientWindows).
//!
//! A decision finds by its time which limits apply. Its time may be behind that of another thread, or differ from that of a store, and
//! be that of another window. So each charge is checked afterwards: one in a window to which its limits do not apply is undone, and
//! made again under those that do. A plan without such limits skips these steps.

use crate::charge_plan::{ChargePlan, LayerRef};
use crate::decision::Decision;
use crate::decision_context::{ChargesStart, DecisionContext};
use crate::handles::{ChargePosition, LayerId, VariantId};
use crate::rule_set::{CountingMode, RuleSet};
use crate::table::Table;
use crate::window_kind::WindowKind;

impl RuleSet {
    /// Whether the limits of a variant do not apply to a window of a layer, given by its end. A sliding window has no end, so no limit
    /// of it is raised for one window.
    pub fn is_beyond_limits(&self, layer: LayerId, variant: VariantId, end_ms: u64) -> bool {
        let Some((during_ms, _)) = self.rules[layer.rule].rule.time_of(variant) else { return false };
        let layer = self.layer(layer);
        let begins_ms = || end_ms.saturating_sub(self.windows_of(layer).length_ms(end_ms));
        layer.request.kind != WindowKind::Sliding && (end_ms <= during_ms.start || begins_ms() >= during_ms.end)
    }
}

impl ChargePlan {
    /// Gives the request the limits that apply at a time.
    pub(super) fn set_limits_at(&self, context: &mut DecisionContext, now_ms: u64) {
        if !self.has_ending_limits {
            return;
        }
        for (position, keyed_request) in context.inputs.keyed_requests.enumerate_mut() {
            let Some(keyed_request) = keyed_request else { continue };
            let rule = &self.rule(position).rule;
            while let Some((during_ms, next)) = rule.time_of(keyed_request.variant)
                && !during_ms.contains(&now_ms)
            {
                keyed_request.variant = next;
            }
        }
    }

    /// These layers of a request, as of a time.
    pub fn layers_at(&self, layers: &[LayerRef], context: &mut DecisionContext, now_ms: u64) -> Vec<LayerRef> {
        self.set_limits_at(context, now_ms);
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

    /// Whether charges from `first` on are in windows to which their limits do not apply. The request then has the limits that
    /// follow. Leased tokens are of the window for which they were leased.
    pub fn has_other_limits(&self, context: &mut DecisionContext, first: ChargePosition) -> bool {
        let DecisionContext { inputs, result, .. } = context;
        let mut has_others = false;
        for charge in result.charges[first..].iter().filter(|charge| charge.mode != CountingMode::Leased) {
            let LayerRef { position, id } = charge.layer;
            let Some(keyed_request) = inputs.keyed_requests[position].as_mut() else { continue };
            if charge.request.cost > 0
                && self.rule_set().is_beyond_limits(id, keyed_request.variant, charge.usage.end_ms)
                && let Some((_, next)) = self.rule(position).rule.time_of(keyed_request.variant)
            {
                keyed_request.variant = next;
                has_others = true;
            }
        }
        has_others
    }

    /// Undoes a decision with charges as [`ChargePlan::has_other_limits`] finds them; `true` if there are some. `first`: where the
    /// charges of the decision begin.
    pub(super) fn undo_under_other_limits<const W: usize>(
        &self,
        decision: &Decision,
        table: &Table<W>,
        context: &mut DecisionContext,
        first: ChargesStart,
    ) -> bool {
        if !self.has_ending_limits
            || matches!(decision, Decision::Refused)
            || !self.has_other_limits(context, first.charge)
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
