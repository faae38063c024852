//! A request fetches the tokens that its counters lack: all at once, or it waits for what is on its way already. Rules whose
//! server does not answer do without; the others go on.
//!
//! What is brought lies in the table afterwards, where whoever comes first takes it. Where the table has no place, the
//! request is handed what it needs, and is told here if the store refuses: the table would not remember it.

use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::decision::{Next, ROUNDS_MAX, SharedDecision, within};
use super::lease_sizing::id;
use super::token_fetch::{InFlightFetch, Unkept};
use transom_limiter::rule_set::{ChargePlan, RuleSet};
use transom_limiter::table::Counter;

impl SharedDecision {
    /// Fetches tokens for the counters that lack some. `Some`: the decision goes on with that; nothing is charged of what lies
    /// behind `first`.
    pub(super) async fn fetch(
        &mut self,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        first: usize,
    ) -> Option<Next> {
        let lacking = std::mem::take(&mut self.context.sharing.missing_tokens);
        self.progress.rounds += 1;
        let rules = self.rules_of(&lacking);
        if self.go_beyond(&rules) {
            self.context.truncate(first);
            return None;
        }
        // The store answers: others have taken what there was.
        if self.progress.rounds > ROUNDS_MAX {
            return self.refuse(rule_set, charge_plan, first);
        }
        if self.is_late() {
            self.do_without(&rules);
            self.context.truncate(first);
            return None;
        }
        let (flights, are_own) = self.set_out(rule_set, charge_plan, &lacking);
        let began = Instant::from_std(self.shared.clock.instant());
        // It is not known yet which of them refuse.
        lacking.iter().for_each(|i| self.context.result.charges[*i].is_full = false);
        let mut is_refused = false;
        for flight in &flights {
            let is_brought =
                |i: &usize| self.counter(rule_set, charge_plan, *i).is_some_and(|counter| flight.is_about(id(counter)));
            let brought: Vec<usize> = lacking.iter().copied().filter(is_brought).collect();
            match within(self.deadline, flight.landing()).await {
                Some(true) => {
                    self.take_in_hand(rule_set, charge_plan, &brought, flight);
                    is_refused |= are_own && self.is_refused(rule_set, charge_plan, &brought, flight);
                }
                Some(false) => self.do_without(&self.rules_of(&brought)),
                None => self.lose_patience(&self.rules_of(&brought), began),
            }
        }
        if is_refused {
            return self.refuse(rule_set, charge_plan, first);
        }
        self.context.truncate(first);
        None
    }

    fn rules_of(&self, charges: &[usize]) -> Vec<usize> {
        let mut rules: Vec<usize> = charges.iter().map(|i| self.context.result.layers[*i].rule).collect();
        rules.dedup();
        rules
    }

    /// The ordinary counter beside which a charge on the desk is.
    fn counter(&self, rule_set: &RuleSet, charge_plan: &ChargePlan, charge: usize) -> Option<Counter> {
        let line = self.context.result.layers[charge];
        self.context.inputs.keyed_requests[line.rule]
            .map(|keyed_request| rule_set.layer_of(charge_plan, line).counter(keyed_request))
    }

    /// The calls that fetch what is lacking, and whether they are this request's own: if some of it is on its way already,
    /// that is waited for.
    fn set_out(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        lacking: &[usize],
    ) -> (Vec<Rc<InFlightFetch>>, bool) {
        let shared = &self.shared;
        let now = shared.clock.instant();
        let (mut errands, mut under_way) = (Vec::new(), Vec::<Rc<InFlightFetch>>::new());
        for i in lacking {
            let (charge, line) = (&self.context.result.charges[*i], self.context.result.layers[*i]);
            let (Some(keyed_request), Some(text)) =
                (self.context.inputs.keyed_requests[line.rule], self.text(line.rule))
            else {
                continue;
            };
            let cost = u64::from(charge.request.cost);
            let need = cost.saturating_sub(charge.request.ceiling.saturating_sub(charge.usage.used));
            let counter = rule_set.layer_of(charge_plan, line).counter(keyed_request);
            let slice = shared.leases.with(counter, shared.own_shard, now, |record| {
                record.text = Some(Rc::clone(&text));
                match &record.flight {
                    Some(flight) => {
                        record.waiting += need;
                        if !under_way.iter().any(|known| Rc::ptr_eq(known, flight)) {
                            under_way.push(Rc::clone(flight));
                        }
                        need
                    }
                    None => record.slice(need, now),
                }
            });
            errands.push(shared.errand(rule_set, charge_plan, line, keyed_request, text, need, slice.unwrap_or(need)));
        }
        if under_way.is_empty() { (shared.launch(errands), true) } else { (under_way, false) }
    }

    /// Takes tokens that found no place in the table, as many as this request needs.
    fn take_in_hand(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        brought: &[usize],
        flight: &InFlightFetch,
    ) {
        let mut unkept = flight.unkept.borrow_mut();
        for i in brought {
            let Some(counter) = self.counter(rule_set, charge_plan, *i) else { continue };
            let (line, cost) =
                (self.context.result.layers[*i], u64::from(self.context.result.charges[*i].request.cost));
            let found = unkept.iter_mut().find(|unkept| unkept.id == id(counter) && unkept.tokens >= cost);
            if let Some(Unkept { tokens, origin, .. }) = found
                && !self.context.sharing.prepaid.contains(&line)
            {
                *tokens -= cost;
                self.context.sharing.prepaid.push(line);
                self.progress.gifts.push((line.rule, origin.gift(cost)));
            }
        }
    }

    /// Whether the store has refused what was to be brought, and the table has no place to remember it. Then the desk says so.
    fn is_refused(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        brought: &[usize],
        flight: &InFlightFetch,
    ) -> bool {
        let (refused, now_ms) = (flight.refused.borrow(), self.shared.clock.now().unix_ms);
        let mut is_refused = false;
        for i in brought {
            let Some(counter) = self.counter(rule_set, charge_plan, *i) else { continue };
            let took = refused.iter().find(|(id_, _)| *id_ == id(counter)).map(|(_, took)| took);
            let charge = &mut self.context.result.charges[*i];
            charge.is_full = took.is_some();
            if let Some(took) = took.filter(|_| self.shared.table.known_usage(counter, now_ms).is_none()) {
                (charge.usage.used, charge.usage.end_ms) = (took.used, took.end_ms);
                is_refused = true;
            }
        }
        is_refused
    }
}
