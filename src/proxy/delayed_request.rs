//! A request that has been charged in a window to come, and waits for that window.
//!
//! Rules that had room were charged when it came. Where their window is over by the time that it
//! passes, they are charged again, and may refuse it after all.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;

use super::admission::Rejection;
use super::request_record::RequestRecord;
use super::response_cost::PendingCost;
use super::worker_state::{Peer, WorkerConfig, WorkerState};
use crate::http::error::RequestError;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::http::responses;
use crate::redis_store::decision::Unavailable;
use crate::redis_store::scripts::Refund;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::{KeyedRequest, LayerRef};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::waiter_limit::WaiterSlot;

/// The wall clock may be set while a request waits, so it looks again after so long.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// What the store of shared counters has charged for a request, and what finds it there.
#[derive(Default)]
pub struct StoreCharges {
    pub refunds: Vec<(usize, Refund)>,
    pub keys: Vec<Option<Rc<str>>>,
}

/// The turn of a request. Dropped before it has come, as when the client goes away, it gives back
/// what was charged.
pub struct DelayedRequest {
    until_ms: u64,
    /// Position of the slate that was decided by.
    rules_index: usize,
    keyed_requests: Vec<Option<KeyedRequest>>,
    /// The layers to be charged again when the turn has come.
    to_recharge: Vec<LayerRef>,
    /// What was charged; empty once the turn has come.
    receipts: Vec<ShardReceipt>,
    store_charges: StoreCharges,
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    /// A place in the queue of those who wait.
    _waiter: Option<WaiterSlot>,
    /// The latest time at which the request may pass.
    latest_ms: u64,
    /// Tells the guard of the client's socket that this request waits.
    is_delayed: Rc<Cell<bool>>,
}

impl DelayedRequest {
    /// The turn of a request that was delayed; `desk` is what was decided on.
    pub fn new(
        judgement: Decision,
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        slate: usize,
        context: &DecisionContext,
        placed: StoreCharges,
    ) -> Option<Box<DelayedRequest>> {
        let Decision::Delayed { until_ms, waiter: wait, recharge: again } = judgement else { return None };
        let (snapshot, now_ms) = (&view.compiled, worker.clock.now().unix_ms);
        Some(Box::new(DelayedRequest {
            until_ms,
            rules_index: slate,
            keyed_requests: context.inputs.keyed_requests.clone(),
            to_recharge: again,
            receipts: context.all_receipts().collect(),
            store_charges: placed,
            worker: Rc::clone(worker),
            config: Rc::clone(view),
            _waiter: wait.map(|wait| wait.slot),
            latest_ms: now_ms + snapshot.rule_set.max_delay_ms(&snapshot.route_rules[slate].charge_plan),
            is_delayed: Rc::clone(&peer.is_delayed),
        }))
    }

    /// Waits until the windows are open. Returns what is to be said of the limits then, or the refusal of
    /// a rule that has no room any more and does not let the request wait for longer.
    pub async fn wait(
        mut self,
        record: &mut RequestRecord,
        settlement: &mut Option<Box<PendingCost>>,
    ) -> Result<RateLimitFields, Rejection> {
        loop {
            self.wait_until_open().await;
            if self.to_recharge.is_empty() {
                self.receipts.clear();
                self.store_charges.refunds.clear();
                let clock = || self.worker.clock.now().unix_ms;
                return Ok(self.config.rate_limit_fields(
                    self.rules_index,
                    &self.keyed_requests,
                    &self.worker.table,
                    DecisionTime::read(&clock),
                ));
            }
            self.recharge(record, settlement).await?;
        }
    }

    async fn wait_until_open(&self) {
        self.is_delayed.set(true);
        loop {
            let now_ms = self.worker.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                self.is_delayed.set(false);
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(RECHECK_INTERVAL)).await;
        }
    }

    /// Charges the layers that are in another window now. Whoever finds one full that lets it wait waits
    /// again, but not beyond the time at which it would have been refused when it came.
    async fn recharge(
        &mut self,
        record: &mut RequestRecord,
        settlement: &mut Option<Box<PendingCost>>,
    ) -> Result<(), Rejection> {
        let snapshot = Arc::clone(&self.config.compiled);
        let (rule_set, slate) = (&snapshot.rule_set, &snapshot.route_rules[self.rules_index]);
        let mut context = self.config.scratch().context.clone();
        context.inputs.keyed_requests.clone_from(&self.keyed_requests);
        let again = std::mem::take(&mut self.to_recharge);
        let clock = || self.worker.clock.now().unix_ms;
        let (judgement, gifts) = match self.worker.shared.as_ref().filter(|_| slate.charge_plan.is_shared) {
            None => {
                let now = DecisionTime::read(&clock);
                (rule_set.recharge(&slate.charge_plan, &again, &self.worker.table, now, &mut context), Vec::new())
            }
            Some(shared) => {
                let inquiry =
                    shared.charge_again(rule_set, &slate.charge_plan, again, context, self.store_charges.keys.clone());
                let ruling = inquiry.decide(&slate.charge_plan).await;
                let ruling = ruling.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))?;
                context = ruling.context;
                (ruling.judgement, ruling.gifts)
            }
        };
        let now = DecisionTime::read(&clock);
        let now_ms = now.unix_ms;
        match judgement {
            Decision::Admitted => {}
            Decision::Delayed { until_ms, recharge: again, .. } if until_ms <= self.latest_ms => {
                (self.until_ms, self.to_recharge) = (until_ms, again);
            }
            Decision::Delayed { .. } | Decision::Refused => {
                self.receipts.extend(context.all_receipts());
                rule_set.refund(&self.receipts, u32::MAX, &self.worker.table, now_ms);
                self.receipts.clear();
                self.store_charges.refunds.extend(gifts);
                // The answer tells of all layers, as they are now.
                rule_set.peek(&slate.charge_plan, &self.worker.table, now, &mut context);
                record.record_decision(self.rules_index, &context, &Decision::Refused);
                let mut text = Vec::new();
                let stamp = slate.rate_limit_template.render(&context, None, context.result.decided_ms, &mut text);
                let (charge_plan, forms) = (&slate.charge_plan, &snapshot.refusal_templates);
                let headers = HeaderMap::new();
                let refused = responses::refusal(
                    rule_set,
                    charge_plan,
                    &context,
                    forms,
                    context.result.decided_ms,
                    stamp,
                    &mut text,
                    headers,
                );
                return Err(Rejection::Refused(refused.reply));
            }
        }
        self.receipts.retain(|share| share.receipt.end_ms() > now_ms);
        self.receipts.extend(context.all_receipts());
        if let Some(settlement) = settlement {
            settlement.add_recharge(slate, &context, &gifts, now_ms);
        }
        self.store_charges.refunds.extend(gifts);
        Ok(())
    }
}

impl Drop for DelayedRequest {
    fn drop(&mut self) {
        self.is_delayed.set(false);
        if !self.receipts.is_empty() {
            let (worker, rule_set) = (&self.worker, &self.config.compiled.rule_set);
            let now_ms = worker.clock.now().unix_ms;
            worker.deferred_refunds.refund(self.receipts.drain(..), self.until_ms, rule_set, &worker.table, now_ms);
        }
        if let Some(shared) = self.worker.shared.as_ref().filter(|_| !self.store_charges.refunds.is_empty()) {
            shared.give_later(self.store_charges.refunds.drain(..).map(|(_, gift)| gift).collect());
        }
    }
}
