//! Requests that wait until a later window opens, as the proxy lets them wait: `src/proxy/delayed_request.rs`.

use std::cell::Cell;
use std::mem::{replace, take};
use std::rc::Rc;
use std::time::Duration;

use super::world::TIMEOUT_MS;
use crate::counter_access::{CounterAccess, RequestKeys};
use crate::scripts::Refund;
use crate::settlement::RuleCharges;
use crate::shared_decision::{SharedOutcome, Unavailable};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, LayerId, PlanPosition};
use transom_limiter::rule_set::RuleSet;
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::store_key::StoreKeys;

/// A request whose decision has ended.
pub struct Decided {
    pub is_admitted: bool,
    /// What was charged at first, and again whenever the request had waited; each with the time until which it waited then, by the
    /// gateway's clock.
    pub outcomes: Vec<(SharedOutcome, u64)>,
}

/// A request that was charged and waits. As in the proxy, dropping it refunds what was charged.
pub struct Waiting {
    pub counters: Rc<CounterAccess>,
    pub charge_plan: Rc<ChargePlan>,
    pub store_keys: StoreKeys,
    /// Until when the decision may take, by the gateway's wall clock, which is not set.
    pub deadline_ms: Rc<Cell<u64>>,
    outcomes: Vec<(SharedOutcome, u64)>,
    receipts: Vec<ShardReceipt>,
    charges: IdVec<PlanPosition, RuleCharges>,
    refunds: Vec<(PlanPosition, Refund)>,
}

impl Decided {
    /// The layers in which the request counts when it passes, with the ends of the windows.
    pub fn windows(&self, rule_set: &RuleSet) -> Vec<(LayerId, u64)> {
        let mut windows: Vec<(LayerId, u64)> = Vec::new();
        // What was charged last counts.
        for (SharedOutcome { context, .. }, until_ms) in self.outcomes.iter().rev() {
            for charge in &context.result.charges {
                let (layer, end_ms) = (charge.layer.id, charge.usage.end_ms);
                let period_ms = rule_set.windows_of(rule_set.layer(layer)).typical_ms();
                let later = until_ms.checked_sub(end_ms).map_or(0, |ms| ms / period_ms + 1);
                if !rule_set.layer(layer).is_penalty() && windows.iter().all(|(other, _)| *other != layer) {
                    windows.push((layer, end_ms + later * period_ms));
                }
            }
            // Tokens that did not fit in the table.
            for LayerRef { id, .. } in &context.sharing.prepaid {
                if windows.iter().all(|(other, _)| other != id) {
                    let layer_windows = rule_set.windows_of(rule_set.layer(*id));
                    windows.push((*id, layer_windows.window_at(context.result.decided_ms, 0).end_ms));
                }
            }
        }
        windows
    }
}

impl Waiting {
    pub fn new(
        counters: &Rc<CounterAccess>,
        charge_plan: &Rc<ChargePlan>,
        store_keys: StoreKeys,
        deadline_ms: Rc<Cell<u64>>,
    ) -> Waiting {
        let (counters, charge_plan) = (Rc::clone(counters), Rc::clone(charge_plan));
        let charges = charge_plan.rules().map(|_| RuleCharges::default());
        let (outcomes, receipts, refunds) = Default::default();
        Waiting { counters, charge_plan, store_keys, deadline_ms, outcomes, receipts, charges, refunds }
    }

    /// Waits until the request passes or is refused.
    pub async fn pass(mut self, mut outcome: SharedOutcome) -> Result<Decided, Unavailable> {
        let latest_ms = self.now_ms() + self.charge_plan.max_delay_ms();
        loop {
            let decision = replace(&mut outcome.decision, Decision::Admitted);
            let (until_ms, to_recharge) = match decision {
                Decision::Admitted => (0, Vec::new()),
                Decision::Delayed { until_ms, recharge, .. } => (until_ms, recharge),
                Decision::Refused if self.outcomes.is_empty() => return Ok(self.decided(false)),
                Decision::Refused => {
                    self.refunds.append(&mut outcome.refunds);
                    return Ok(self.refuse(outcome));
                }
            };
            let now_ms = self.now_ms();
            self.receipts.retain(|charged| charged.receipt.end_ms() > now_ms);
            self.receipts.extend(outcome.context.all_receipts());
            for (position, charges) in self.charges.enumerate_mut() {
                charges.add(&outcome.context, position);
            }
            self.refunds.extend(outcome.refunds.iter().cloned());
            if until_ms > latest_ms {
                return Ok(self.refuse(outcome));
            }
            let keyed_requests = outcome.context.inputs.keyed_requests.clone();
            self.outcomes.push((outcome, until_ms));
            self.deadline_ms.set(self.wall_ms() + until_ms.saturating_sub(self.now_ms()) + TIMEOUT_MS);
            while self.now_ms() < until_ms {
                tokio::time::sleep(Duration::from_millis(until_ms - self.now_ms())).await;
            }
            if to_recharge.is_empty() {
                self.receipts.clear();
                self.refunds.clear();
                return Ok(self.decided(true));
            }
            self.deadline_ms.set(self.wall_ms() + TIMEOUT_MS);
            let mut context = DecisionContext::default();
            context.inputs.keyed_requests = keyed_requests;
            outcome = self.counters.recharge(&self.charge_plan, to_recharge, context, &self.store_keys).await?;
        }
    }

    /// Refunds what all rules have charged, and counts the refusal.
    fn refuse(&mut self, outcome: SharedOutcome) -> Decided {
        self.receipts.clear();
        let (refunds, mut context) = (take(&mut self.refunds), outcome.context);
        for (position, charges) in self.charges.enumerate() {
            self.counters.settle(self.keys(), position, charges, &refunds, 0);
        }
        self.counters.refuse_delayed(&self.charge_plan, &mut context, |position| self.store_keys[position].clone());
        self.decided(false)
    }

    fn decided(&mut self, is_admitted: bool) -> Decided {
        Decided { is_admitted, outcomes: take(&mut self.outcomes) }
    }

    fn now_ms(&self) -> u64 {
        self.counters.clock.now().unix_ms
    }

    fn wall_ms(&self) -> u64 {
        self.counters.clock.wall_ms()
    }

    fn keys(&self) -> RequestKeys<'_> {
        let keyed_requests = &self.outcomes[0].0.context.inputs.keyed_requests;
        RequestKeys { charge_plan: &self.charge_plan, keyed_requests, store_keys: &self.store_keys }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let receipts = take(&mut self.receipts);
        if let (false, Some((_, until_ms))) = (receipts.is_empty(), self.outcomes.last()) {
            self.counters.refund_in_order(self.keys(), receipts, Some(*until_ms));
        }
        let refunds = self.refunds.drain(..).map(|(_, refund)| refund).collect();
        self.counters.refund_in_store(refunds);
    }
}
