//! Looking at counters: what is used of them, and whether a request would have room. Nothing is charged.

use crate::acquire::look;
use crate::decision_context::DecisionContext;
use crate::decision_time::Now;
use crate::rule_set::{ChargePlan, LayerRef, RuleSet};
use crate::shared_counting::CountingMode;
use crate::table::Table;
use crate::window_sequence::Time;

impl RuleSet {
    /// Looks at the counters of the enforced rules; `true` if all have room.
    pub fn look<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        context.clear();
        if charge_plan.is_plain() && context.are_usual() {
            context.decided_ms = now.unix_ms;
            context.put_down(self, charge_plan, charge_plan.enforced(), now.unix_ms, 0);
            return look(table, &mut context.charges, Time::all_plain(now.unix_ms));
        }
        self.look_at_all(charge_plan, table, now, context)
    }

    /// As [`Book::look`], whatever the counters are.
    // Apart from it, for the plain way is that of clients who are refused again and again.
    #[inline(never)]
    fn look_at_all<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let lines = self.lines_of(charge_plan, context);
        let room = self.look_until_sure(table, now, context, |context, now_ms| match charge_plan.is_shared {
            true => self.put_down_for_all(charge_plan, &lines, table, now_ms, context),
            false => context.put_down(self, charge_plan, &lines, now_ms, 0),
        });
        if charge_plan.is_shared {
            self.tell(charge_plan, table, context.decided_ms, context, 0);
        }
        context.own_lines = lines;
        room
    }

    /// Looks at what is put down, and again where the time may have been too old.
    fn look_until_sure<const W: usize>(
        &self,
        table: &Table<W>,
        mut now: Now<'_>,
        context: &mut DecisionContext,
        put_down: impl Fn(&mut DecisionContext, u64),
    ) -> bool {
        loop {
            context.decided_ms = now.unix_ms;
            put_down(context, now.unix_ms);
            let room = look(table, &mut context.charges, self.time(now.unix_ms));
            if room || !context.meets_debts(0) || !now.goes_on() {
                return room;
            }
        }
    }

    /// Puts down lines to be looked at: of those that are shared, what is known of all gateways together.
    fn put_down_for_all<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
    ) {
        self.stands(charge_plan, |_within| false, &mut context.stands);
        context
            .stands
            .iter_mut()
            .filter(|stand| **stand == CountingMode::Aside)
            .for_each(|stand| *stand = CountingMode::Leased);
        context.put_down_shared(self, charge_plan, table, lines, now_ms, 0);
    }

    /// Looks at ordinary counters, beside what is known to be used elsewhere; `true` if all have room.
    pub fn look_alone<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) -> bool {
        let put_down =
            |context: &mut DecisionContext, now_ms| context.put_down_shared(self, charge_plan, table, lines, now_ms, 0);
        let room = self.look_until_sure(table, now, context, put_down);
        self.tell(charge_plan, table, context.decided_ms, context, 0);
        room
    }
}
