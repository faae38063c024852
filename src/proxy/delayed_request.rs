//! A request that was charged in a later window and waits for that window to open.
//!
//! Rules with tokens left were charged when the request arrived. If their window has ended when the request passes, they are
//! charged again in the current one, and may refuse the request after all.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;

use super::request_record::RequestRecord;
use super::response::Rejection;
use super::response_cost::PendingCost;
use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use transom_http::error::RequestError;
use transom_limiter::charge_plan::LayerRef;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::{DecisionContext, DecisionInputs};
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::waiter_limit::WaiterSlot;
use transom_rules::RouteRulesId;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::responses::{self, RefusedRequest};
use transom_runtime::metrics::storage::GaugeGuard;
use transom_store::counter_access::RequestKeys;
use transom_store::scripts::Refund;
use transom_store::settlement::RuleCharges;
use transom_store::shared_decision::{SharedOutcome, Unavailable};

/// The wall clock may be set while a request waits, so the time is read again at this interval.
pub const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// What the shared store has charged for a request.
#[derive(Default)]
pub struct StoreCharges {
    /// Refunds that undo the charges, with the rule.
    pub refunds: Vec<(PlanPosition, Refund)>,
    pub keys: StoreKeys,
}

/// A delayed request. Dropping it before its window opens, as when the client goes away, refunds what was charged.
pub struct DelayedRequest {
    until_ms: u64,
    rules_id: RouteRulesId,
    inputs: DecisionInputs,
    /// Layers to charge again when the window opens.
    to_recharge: Vec<LayerRef>,
    /// What was charged locally; empty once the request passes.
    receipts: Vec<ShardReceipt>,
    /// What each rule has charged.
    charges: IdVec<PlanPosition, RuleCharges>,
    store_charges: StoreCharges,
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    /// Occupies one of the waiter slots of the rule, and counts as waiting.
    _waiter: Option<(WaiterSlot, Option<GaugeGuard>)>,
    /// Unix time in milliseconds after which the request is refused.
    latest_ms: u64,
}

impl DelayedRequest {
    /// `None` unless the decision is a delay. `context` has the result of the decision.
    pub fn new(
        decision: Decision,
        by: DecidedBy<'_>,
        context: &DecisionContext,
        store_charges: StoreCharges,
    ) -> Option<Box<DelayedRequest>> {
        let Decision::Delayed { until_ms, waiter, recharge: to_recharge } = decision else { return None };
        let DecidedBy { worker, config, rules_id, .. } = by;
        let (charge_plan, now_ms) = (&by.rules().charge_plan, worker.clock.now().unix_ms);
        Some(Box::new(DelayedRequest {
            until_ms,
            rules_id,
            inputs: context.inputs.clone(),
            to_recharge,
            receipts: context.all_receipts().collect(),
            charges: charge_plan.rules().ids().map(|position| RuleCharges::of(context, position)).collect(),
            store_charges,
            worker: Rc::clone(worker),
            config: Rc::clone(config),
            _waiter: waiter.map(|waiter| (waiter.slot, config.count_delayed(charge_plan.rules()[waiter.position]))),
            latest_ms: now_ms + charge_plan.max_delay_ms(),
        }))
    }

    /// Waits until the windows are open. Returns the RateLimit fields as of then, or the refusal of a rule that has no tokens
    /// left and allows no longer delay.
    pub async fn wait(
        mut self,
        record: &mut RequestRecord,
        pending_cost: &mut Option<Box<PendingCost>>,
    ) -> Result<RateLimitFields, Rejection> {
        loop {
            self.wait_until_open().await;
            if self.to_recharge.is_empty() {
                self.receipts.clear();
                self.store_charges.refunds.clear();
                let counters = &self.worker.counters;
                return Ok(self.config.rate_limit_fields(self.rules_id, &self.inputs.keyed_requests, counters));
            }
            self.recharge(record, pending_cost).await?;
        }
    }

    async fn wait_until_open(&self) {
        loop {
            let now_ms = self.worker.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(RECHECK_INTERVAL)).await;
        }
    }

    /// Charges the layers whose window has ended meanwhile. If one of them delays the request again, the request waits on, but
    /// not beyond `latest_ms`.
    async fn recharge(
        &mut self,
        record: &mut RequestRecord,
        pending_cost: &mut Option<Box<PendingCost>>,
    ) -> Result<(), Rejection> {
        let served = Arc::clone(&self.config.served);
        let rules = &served.route_rules[self.rules_id];
        let charge_plan = &rules.charge_plan;
        let mut context = self.config.scratch().context.clone();
        context.inputs.clone_from(&self.inputs);
        let to_recharge = std::mem::take(&mut self.to_recharge);
        let worker = Rc::clone(&self.worker);
        let outcome = worker.counters.recharge(charge_plan, to_recharge, context, &self.store_charges.keys).await;
        let outcome = outcome.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))?;
        let SharedOutcome { decision, mut context, refunds, .. } = outcome;
        match decision {
            Decision::Admitted => {}
            Decision::Delayed { until_ms, recharge, .. } if until_ms <= self.latest_ms => {
                (self.until_ms, self.to_recharge) = (until_ms, recharge);
            }
            Decision::Delayed { .. } | Decision::Refused => {
                if !matches!(decision, Decision::Refused) {
                    self.add_charges(&context);
                }
                self.store_charges.refunds.extend(refunds);
                self.refund();
                // The response states all layers as they are now.
                let store_keys = &self.store_charges.keys;
                worker
                    .counters
                    .refuse_delayed(charge_plan, &mut context, |position| store_keys.get(position).cloned().flatten());
                charge_plan.peek_slots(&mut context);
                record.release_slots(&mut context);
                let verdicts = charge_plan.verdicts(&context, &Decision::Refused);
                record.record_decision(self.rules_id, verdicts);
                self.config.top_keys.count_decision(charge_plan.rules(), verdicts);
                let mut text = Vec::new();
                let fields = rules.rate_limit_template.render(verdicts, None, verdicts.decided_ms(), &mut text);
                let headers = HeaderMap::new();
                let (now_ms, id) = (context.result.decided_ms, Some(record.request_id()));
                let refused = RefusedRequest { now_ms, id, headers, text: &mut text };
                let refused = responses::refusal_response(verdicts, &served.refusal_templates, fields, refused);
                return Err(Rejection::Refused(refused.response));
            }
        }
        let now_ms = self.worker.clock.now().unix_ms;
        self.receipts.retain(|charged| charged.receipt.end_ms() > now_ms);
        self.add_charges(&context);
        if let Some(pending_cost) = pending_cost {
            pending_cost.add_recharge(rules, &context, &refunds);
        }
        self.store_charges.refunds.extend(refunds);
        Ok(())
    }

    fn add_charges(&mut self, context: &DecisionContext) {
        self.receipts.extend(context.all_receipts());
        for (position, charges) in self.charges.enumerate_mut() {
            charges.add(context, position);
        }
    }

    /// Refunds what all rules have charged.
    fn refund(&mut self) {
        self.receipts.clear();
        let refunds = std::mem::take(&mut self.store_charges.refunds);
        for (position, charges) in self.charges.enumerate() {
            self.worker.counters.settle(self.keys(), position, charges, &refunds, 0);
        }
    }

    fn keys(&self) -> RequestKeys<'_> {
        RequestKeys {
            charge_plan: &self.config.served.route_rules[self.rules_id].charge_plan,
            keyed_requests: &self.inputs.keyed_requests,
            store_keys: &self.store_charges.keys,
        }
    }
}

impl Drop for DelayedRequest {
    fn drop(&mut self) {
        if !self.receipts.is_empty() {
            let receipts = std::mem::take(&mut self.receipts);
            self.worker.counters.refund_in_order(self.keys(), receipts, Some(self.until_ms));
        }
        let refunds = self.store_charges.refunds.drain(..).map(|(_, refund)| refund).collect();
        self.worker.counters.refund_in_store(refunds);
    }
}
