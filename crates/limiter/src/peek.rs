//! Looking at counters: what is used of them, and whether a request would have room. Nothing is charged.

use crate::acquire::peek_all;
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::rule_set::{ChargePlan, LayerRef, RuleSet};
use crate::shared_counting::CountingMode;
use crate::table::Table;
use crate::window_sequence::Time;

impl RuleSet {
    /// Looks at the counters of the enforced rules; `true` if all have room.
    pub fn peek<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        context.clear();
        if charge_plan.is_plain() && context.use_default_windows() {
            context.result.decided_ms = now.unix_ms;
            context.add_charges(self, charge_plan, charge_plan.enforced(), now.unix_ms, 0);
            return peek_all(table, &mut context.result.charges, Time::all_plain(now.unix_ms));
        }
        self.peek_all_layers(charge_plan, table, now, context)
    }

    /// As [`Book::look`], whatever the counters are.
    // Apart from it, for the plain way is that of clients who are refused again and again.
    #[inline(never)]
    fn peek_all_layers<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let layers = self.layers_of_request(charge_plan, context);
        let all_fit = self.peek_until_current(table, now, context, |context, now_ms| match charge_plan.is_shared {
            true => self.add_charges_for_peek(charge_plan, &layers, table, now_ms, context),
            false => context.add_charges(self, charge_plan, &layers, now_ms, 0),
        });
        if charge_plan.is_shared {
            self.report_total_usage(charge_plan, table, context.result.decided_ms, context, 0);
        }
        context.scratch.layer_buffer = layers;
        all_fit
    }

    /// Looks at what is put down, and again where the time may have been too old.
    fn peek_until_current<const W: usize>(
        &self,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
        context: &mut DecisionContext,
        put_down: impl Fn(&mut DecisionContext, u64),
    ) -> bool {
        loop {
            context.result.decided_ms = now.unix_ms;
            put_down(context, now.unix_ms);
            let all_fit = peek_all(table, &mut context.result.charges, self.time(now.unix_ms));
            if all_fit || !context.is_full_by_debt(0) || !now.advance() {
                return all_fit;
            }
        }
    }

    /// Puts down lines to be looked at: of those that are shared, what is known of all gateways together.
    fn add_charges_for_peek<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        layers: &[LayerRef],
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
    ) {
        self.set_counting_modes(charge_plan, |_within| false, &mut context.sharing.counting_modes);
        context
            .sharing
            .counting_modes
            .iter_mut()
            .filter(|counting_mode| **counting_mode == CountingMode::Remote)
            .for_each(|counting_mode| *counting_mode = CountingMode::Leased);
        context.add_shared_charges(self, charge_plan, table, layers, now_ms, 0);
    }

    /// Looks at ordinary counters, beside what is known to be used elsewhere; `true` if all have room.
    pub fn peek_local_fallback<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        layers: &[LayerRef],
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let put_down = |context: &mut DecisionContext, now_ms| {
            context.add_shared_charges(self, charge_plan, table, layers, now_ms, 0)
        };
        let all_fit = self.peek_until_current(table, now, context, put_down);
        self.report_total_usage(charge_plan, table, context.result.decided_ms, context, 0);
        all_fit
    }
}
