//! What a delayed request has charged, until a later window opens and it passes.
//!
//! Rules with tokens left were charged when the request arrived. If their window has ended when the request passes, they are
//! charged again in the current one, and may refuse the request after all.

use std::mem::{replace, take};

use super::counter_access::{CounterAccess, RequestKeys};
use super::scripts::Refund;
use super::settlement::RuleCharges;
use super::shared_decision::{SharedOutcome, Unavailable};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::{DecisionContext, DecisionInputs};
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::store_key::StoreKeys;

/// What the shared store has charged for a request.
#[derive(Default)]
pub struct StoreCharges {
    /// Refunds that undo the charges, with the rule.
    pub refunds: Vec<(PlanPosition, Refund)>,
    pub keys: StoreKeys,
}

/// What decides a request.
pub trait DecidingRules {
    fn counters(&self) -> &CounterAccess;
    fn charge_plan(&self) -> &ChargePlan;
}

/// The charges of a delayed request. Dropped before the request passes, as when the client goes away, they are refunded.
pub struct DelayedCharges<R: DecidingRules> {
    rules: R,
    inputs: DecisionInputs,
    /// What each rule has charged; nothing once the request passes.
    charges: IdVec<PlanPosition, RuleCharges>,
    of_store: StoreCharges,
    /// Layers to charge again when the window opens.
    to_recharge: Vec<LayerRef>,
    /// When the window opens, Unix milliseconds.
    until_ms: u64,
    /// The request is refused if it would wait for longer.
    latest_ms: u64,
}

/// What a delayed request does when its window has opened.
pub enum NextStep {
    /// The request passes.
    Pass,
    /// Rules were charged again, with this result. The request may have to wait for another window.
    Wait(Box<SharedOutcome>),
    /// The request is refused, and all its charges are refunded. The context states all layers as they are now.
    Refuse(Box<DecisionContext>),
}

impl<R: DecidingRules> DelayedCharges<R> {
    /// `context` has the result of a decision to delay the request until `until_ms`, and to charge the layers of `to_recharge` again
    /// then.
    pub fn new(
        rules: R,
        context: &DecisionContext,
        of_store: StoreCharges,
        until_ms: u64,
        to_recharge: Vec<LayerRef>,
    ) -> DelayedCharges<R> {
        let charge_plan = rules.charge_plan();
        DelayedCharges {
            charges: charge_plan.rules().ids().map(|position| RuleCharges::of(context, position)).collect(),
            latest_ms: rules.counters().clock.now().unix_ms + charge_plan.max_delay_ms(),
            inputs: context.inputs.clone(),
            rules,
            of_store,
            to_recharge,
            until_ms,
        }
    }

    /// When the window opens for which the request waits, Unix milliseconds.
    pub fn until_ms(&self) -> u64 {
        self.until_ms
    }

    pub fn rules(&self) -> &R {
        &self.rules
    }

    /// The request as it was decided.
    pub fn inputs(&self) -> &DecisionInputs {
        &self.inputs
    }

    /// To be called once the window is open. Charges the layers whose window has ended meanwhile. `context`: memory for the
    /// decision of the worker.
    pub async fn proceed(&mut self, mut context: DecisionContext) -> Result<NextStep, Unavailable> {
        if self.to_recharge.is_empty() {
            self.forget();
            return Ok(NextStep::Pass);
        }
        context.inputs.clone_from(&self.inputs);
        let (layers, charge_plan) = (take(&mut self.to_recharge), self.rules.charge_plan());
        let mut outcome = self.rules.counters().recharge(charge_plan, layers, context, &self.of_store.keys).await?;
        if !matches!(outcome.decision, Decision::Refused) {
            self.charges.enumerate_mut().for_each(|(position, charges)| charges.add(&outcome.context, position));
        }
        self.of_store.refunds.extend(outcome.refunds.iter().cloned());
        match replace(&mut outcome.decision, Decision::Admitted) {
            Decision::Admitted => Ok(NextStep::Wait(Box::new(outcome))),
            Decision::Delayed { until_ms, recharge, .. } if until_ms <= self.latest_ms => {
                (self.until_ms, self.to_recharge) = (until_ms, recharge);
                Ok(NextStep::Wait(Box::new(outcome)))
            }
            Decision::Delayed { .. } | Decision::Refused => {
                Ok(NextStep::Refuse(Box::new(self.refuse(outcome.context))))
            }
        }
    }

    /// Refunds what all rules have charged, and counts the refusal.
    fn refuse(&mut self, mut context: DecisionContext) -> DecisionContext {
        let counters = self.rules.counters();
        for (position, charges) in self.charges.enumerate() {
            counters.settle(self.keys(), position, charges, &self.of_store.refunds, 0);
        }
        let store_key = |position| self.of_store.keys.get(position).cloned().flatten();
        counters.refuse_delayed(self.rules.charge_plan(), &mut context, store_key);
        self.forget();
        context
    }

    /// Nothing is refunded any longer.
    fn forget(&mut self) {
        self.charges.clear();
        self.of_store.refunds.clear();
    }

    fn keys(&self) -> RequestKeys<'_> {
        RequestKeys {
            charge_plan: self.rules.charge_plan(),
            keyed_requests: &self.inputs.keyed_requests,
            store_keys: &self.of_store.keys,
        }
    }
}

impl<R: DecidingRules> Drop for DelayedCharges<R> {
    fn drop(&mut self) {
        let receipts: Vec<_> = self.charges.iter_mut().flat_map(RuleCharges::take_receipts).collect();
        if !receipts.is_empty() {
            self.rules.counters().refund_in_order(self.keys(), receipts, Some(self.until_ms));
        }
        let refunds = self.of_store.refunds.drain(..).map(|(_, refund)| refund).collect();
        self.rules.counters().refund_in_store(refunds);
    }
}
