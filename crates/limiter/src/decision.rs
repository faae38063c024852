//! Decides requests: charges all layers of a charge plan or none, and peeks at them without charging.
//!
//! A decision writes into a [`DecisionContext`] that is reused from request to request, so that it does not allocate.

use crate::acquire::{AcquireResult, acquire_all, acquire_peeked, peek_all, peek_charge};
use crate::charge_plan::{ChargePlan, LayerRef};
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::handles::{ChargePosition, PlanPosition};
use crate::rule_set::{CompiledLayer, CountingMode};
use crate::table::Table;
use crate::waiter_limit::WaiterSlot;
use crate::window::Time;

/// The decision on a request.
#[derive(Debug)]
pub enum Decision {
    /// The request was charged in all layers.
    Admitted,
    /// The request was charged, and may proceed at `until_ms`.
    Delayed {
        /// When the request may proceed, Unix milliseconds.
        until_ms: u64,
        /// The slot in the waiter limit of the rule that delays the request.
        waiter: Option<Waiter>,
        /// The layers to charge again then: see [`ChargePlan::recharge`].
        recharge: Vec<LayerRef>,
    },
    /// The request was refused. No layer was charged, except where refusals count.
    Refused,
}

/// A delayed request in the waiter limit of a rule.
#[derive(Debug)]
pub struct Waiter {
    /// The position of the rule in the charge plan.
    pub position: PlanPosition,
    /// The slot; dropped when the wait is over.
    pub slot: WaiterSlot,
}

impl ChargePlan {
    /// Decides the request in `context.inputs`, which has an entry for every rule of the charge plan.
    pub fn decide<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        context.clear();
        let has_default_windows = context.use_default_windows();
        let decision = match has_default_windows && self.is_plain() {
            true => self.acquire_plain_layers(self.enforced_layers(), table, now, context),
            false => self.decide_layers_of_any_kind(has_default_windows, table, now, context),
        };
        if !matches!(decision, Decision::Refused) {
            self.decide_shadow_rules(table, now, context);
        }
        decision
    }

    /// As [`ChargePlan::decide`] for the enforced rules. Their counters may be of any kind, and their windows not the default ones.
    fn decide_layers_of_any_kind<const W: usize>(
        &self,
        has_default_windows: bool,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        let decision = match has_default_windows {
            true => self.acquire_layers_of_any_kind(self.enforced(), table, now, context, true),
            false => {
                let layers = self.layers_of_request(context, now.unix_ms);
                let decision = self.acquire_layers(&layers, table, now, context, true);
                context.scratch.layer_buffer = layers;
                decision
            }
        };
        if let Decision::Refused = decision {
            self.charge_refusal(table, context, ChargePosition::FIRST);
        }
        decision
    }

    /// The layers of a request that has other windows than the default, in the context's buffer.
    pub(super) fn layers_of_request(&self, context: &mut DecisionContext, now_ms: u64) -> Vec<LayerRef> {
        self.set_limits_at(context, now_ms);
        let mut layers = std::mem::take(&mut context.scratch.layer_buffer);
        layers.clear();
        for (position, keyed_request) in context.inputs.keyed_requests.enumerate() {
            if let Some(keyed_request) = keyed_request.filter(|_| !self.shadow_rules().contains(&position)) {
                layers.extend(self.layers_of_rule(position, keyed_request.variant));
            }
        }
        self.sort_layers(&mut layers);
        layers
    }

    /// Decides the shadow rules as well.
    fn decide_shadow_rules<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) {
        for position in self.shadow_rules() {
            let Some(keyed_request) = context.inputs.keyed_requests[*position] else { continue };
            let mut layers = std::mem::take(&mut context.scratch.layer_buffer);
            layers.clear();
            layers.extend(self.layers_of_rule(*position, keyed_request.variant));
            let first = context.result.charges.next_id();
            if let Decision::Refused = self.acquire_layers(&layers, table, now, context, false) {
                self.charge_refusal(table, context, first);
                context.result.shadowed.push(*position);
            }
            context.scratch.layer_buffer = layers;
        }
    }

    /// Charges the given layers, all or none, and appends them to the charges in the context.
    pub(super) fn acquire_layers<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        may_wait: bool,
    ) -> Decision {
        let first = context.next_charges();
        let decision = match self.is_plain() {
            true => self.acquire_plain_layers(self.compiled_layers(layers), table, now, context),
            false => self.acquire_layers_of_any_kind(layers, table, now, context, may_wait),
        };
        match self.undo_under_other_limits(&decision, table, context, first) {
            true => {
                let layers = self.current_layers(layers, context);
                self.acquire_layers(&layers, table, now, context, may_wait)
            }
            false => decision,
        }
    }

    /// As [`ChargePlan::acquire_layers`], for plain counters.
    // Separate, so that the most common decision keeps its state in registers.
    #[inline(never)]
    fn acquire_plain_layers<'a, const W: usize>(
        &self,
        layers: impl Iterator<Item = (LayerRef, &'a CompiledLayer)> + Clone,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        let first = context.result.charges.next_id();
        loop {
            let time = Time::all_plain(now.unix_ms);
            context.result.decided_ms = context.result.decided_ms.max(now.unix_ms);
            let mut all_fit = true;
            context.add_charges(self.rule_set(), layers.clone(), now.unix_ms, |charge| {
                all_fit &= peek_charge(table, charge, time);
            });
            if !all_fit {
                return Decision::Refused;
            }
            let charges = &mut context.result.charges[first..];
            match acquire_peeked(table, charges, &mut context.result.shard_receipts, time) {
                AcquireResult::Admitted => return Decision::Admitted,
                // The time of this thread is behind the time at which another thread reused a slot.
                AcquireResult::Late if now.advance_to(table.horizon_ms()) => context.truncate(first),
                // Counters cannot hold a later time.
                AcquireResult::Late | AcquireResult::Refused => return Decision::Refused,
            }
        }
    }

    /// As [`ChargePlan::acquire_layers`], for counters of any kind.
    #[inline(never)]
    fn acquire_layers_of_any_kind<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        mut now: DecisionTime<'_>,
        context: &mut DecisionContext,
        may_wait: bool,
    ) -> Decision {
        let first = context.result.charges.next_id();
        let may_delay = may_wait && (self.may_delay || context.inputs.reserve);
        loop {
            let now_ms = now.unix_ms;
            context.result.decided_ms = context.result.decided_ms.max(now_ms);
            context.truncate(first);
            match self.is_shared {
                true => self.add_shared_charges(table, layers, now_ms, context),
                false => context.add_charges(self.rule_set(), self.compiled_layers(layers), now_ms, |_charge| ()),
            }
            let charges = &mut context.result.charges[first..];
            match acquire_all(table, charges, &mut context.result.shard_receipts, self.time(now_ms)) {
                AcquireResult::Admitted
                    if self.is_shared && self.exceeds_known_usage(table, now_ms, context, first) =>
                {
                    for receipt in context.take_receipts(first) {
                        table.refund(receipt.receipt, receipt.request, self.time(now_ms));
                    }
                }
                AcquireResult::Admitted => return Decision::Admitted,
                // The time of this thread is behind the time at which another thread reused a slot.
                AcquireResult::Late if now.advance_to(table.horizon_ms()) => {}
                // Counters cannot hold a later time.
                AcquireResult::Late => return Decision::Refused,
                AcquireResult::Refused if context.is_full_by_debt(first) && now.advance() => {}
                AcquireResult::Refused if self.is_shared && self.may_take_more(table, now_ms, context, first) => {}
                AcquireResult::Refused => {
                    if may_delay && let Some(delayed) = self.delay(table, self.time(now_ms), context) {
                        return delayed;
                    }
                    // The delay peeked at the counters again, and may have found another one full.
                    if may_delay && context.is_full_by_debt(first) && now.advance() {
                        continue;
                    }
                    if self.has_penalties() {
                        self.start_penalties(table, now, context, first);
                    }
                    return Decision::Refused;
                }
            }
        }
    }
}

impl ChargePlan {
    /// Peeks at the counters of the enforced rules; `true` if the request fits. Nothing is charged.
    pub fn peek<const W: usize>(&self, table: &Table<W>, now: DecisionTime<'_>, context: &mut DecisionContext) -> bool {
        context.clear();
        if self.is_plain() && context.use_default_windows() {
            context.result.decided_ms = now.unix_ms;
            let mut all_fit = true;
            context.add_charges(self.rule_set(), self.enforced_layers(), now.unix_ms, |charge| {
                all_fit &= peek_charge(table, charge, Time::all_plain(now.unix_ms));
            });
            return all_fit;
        }
        self.peek_all_layers(table, now, context)
    }

    /// As [`ChargePlan::peek`], for counters of any kind.
    // Separate, because the plain case is that of clients that are refused again and again.
    #[inline(never)]
    fn peek_all_layers<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let layers = self.layers_of_request(context, now.unix_ms);
        let mut all_fit = self.peek_until_current(table, now, context, |context, now_ms| match self.is_shared {
            true => self.add_charges_for_peek(&layers, table, now_ms, context),
            false => context.add_charges(self.rule_set(), self.compiled_layers(&layers), now_ms, |_charge| ()),
        });
        if self.is_shared {
            self.state_known_usage_of_leases(table, context.result.decided_ms, context, ChargePosition::FIRST, &[]);
            self.add_local_usage(table, context, ChargePosition::FIRST);
            self.find_full_by_usage(context);
            all_fit = context.result.charges.iter().all(|charge| !charge.is_full);
        }
        context.scratch.layer_buffer = layers;
        all_fit
    }

    /// Peeks at the charges, and again if the time may have been too old.
    fn peek_until_current<const W: usize>(
        &self,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
        context: &mut DecisionContext,
        add_charges: impl Fn(&mut DecisionContext, u64),
    ) -> bool {
        loop {
            context.result.decided_ms = now.unix_ms;
            context.result.charges.clear();
            add_charges(context, now.unix_ms);
            let all_fit = peek_all(table, context.result.charges.as_mut_slice(), self.time(now.unix_ms));
            if all_fit || !context.is_full_by_debt(ChargePosition::FIRST) || !now.advance() {
                return all_fit;
            }
        }
    }

    /// Adds the charges to peek at. For shared rules, they state the known usage of all gateways.
    fn add_charges_for_peek<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
    ) {
        self.set_counting_modes(|_within| false, &mut context.sharing.counting_modes);
        context
            .sharing
            .counting_modes
            .iter_mut()
            .filter(|counting_mode| **counting_mode == CountingMode::Remote)
            .for_each(|counting_mode| *counting_mode = CountingMode::Leased);
        self.add_shared_charges(table, layers, now_ms, context);
    }

    /// Peeks at local counters, on top of the known usage of other gateways; `true` if the request fits.
    pub fn peek_local_fallback<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let add_charges =
            |context: &mut DecisionContext, now_ms| self.add_shared_charges(table, layers, now_ms, context);
        let all_fit = self.peek_until_current(table, now, context, add_charges);
        self.report_total_usage(table, context.result.decided_ms, context, ChargePosition::FIRST);
        all_fit
    }
}
