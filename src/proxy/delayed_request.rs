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
use super::request_record::Record;
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
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What the store of shared counters has charged for a request, and what finds it there.
#[derive(Default)]
pub struct Placed {
    pub gifts: Vec<(usize, Refund)>,
    pub texts: Vec<Option<Rc<str>>>,
}

/// The turn of a request. Dropped before it has come, as when the client goes away, it gives back
/// what was charged.
pub struct DelayedRequest {
    until_ms: u64,
    /// Position of the slate that was decided by.
    slate: usize,
    keyed_requests: Vec<Option<KeyedRequest>>,
    /// The layers to be charged again when the turn has come.
    again: Vec<LayerRef>,
    /// What was charged; empty once the turn has come.
    shares: Vec<ShardReceipt>,
    placed: Placed,
    worker: Rc<WorkerState>,
    view: Rc<WorkerConfig>,
    /// A place in the queue of those who wait.
    _place: Option<WaiterSlot>,
    /// The latest time at which the request may pass.
    latest_ms: u64,
    /// Tells the guard of the client's socket that this request waits.
    waits: Rc<Cell<bool>>,
}

impl DelayedRequest {
    /// The turn of a request that was delayed; `desk` is what was decided on.
    pub fn of(
        judgement: Decision,
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        slate: usize,
        context: &DecisionContext,
        placed: Placed,
    ) -> Option<Box<DelayedRequest>> {
        let Decision::Delayed { until_ms, waiter: wait, recharge: again } = judgement else { return None };
        let (snapshot, now_ms) = (&view.snapshot, worker.clock.now().unix_ms);
        Some(Box::new(DelayedRequest {
            until_ms,
            slate,
            keyed_requests: context.inputs.keyed_requests.clone(),
            again,
            shares: context.all_receipts().collect(),
            placed,
            worker: Rc::clone(worker),
            view: Rc::clone(view),
            _place: wait.map(|wait| wait.slot),
            latest_ms: now_ms + snapshot.rule_set.max_delay_ms(&snapshot.slates[slate].charge_plan),
            waits: Rc::clone(&peer.waits),
        }))
    }

    /// Waits until the windows are open. Returns what is to be said of the limits then, or the refusal of
    /// a rule that has no room any more and does not let the request wait for longer.
    pub async fn come(
        mut self,
        record: &mut Record,
        settlement: &mut Option<Box<PendingCost>>,
    ) -> Result<RateLimitFields, Rejection> {
        loop {
            self.until_open().await;
            if self.again.is_empty() {
                self.shares.clear();
                self.placed.gifts.clear();
                let clock = || self.worker.clock.now().unix_ms;
                return Ok(self.view.stamp(
                    self.slate,
                    &self.keyed_requests,
                    &self.worker.table,
                    DecisionTime::read(&clock),
                ));
            }
            self.charge_again(record, settlement).await?;
        }
    }

    async fn until_open(&self) {
        self.waits.set(true);
        loop {
            let now_ms = self.worker.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                self.waits.set(false);
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(LOOK_AGAIN)).await;
        }
    }

    /// Charges the layers that are in another window now. Whoever finds one full that lets it wait waits
    /// again, but not beyond the time at which it would have been refused when it came.
    async fn charge_again(
        &mut self,
        record: &mut Record,
        settlement: &mut Option<Box<PendingCost>>,
    ) -> Result<(), Rejection> {
        let snapshot = Arc::clone(&self.view.snapshot);
        let (rule_set, slate) = (&snapshot.rule_set, &snapshot.slates[self.slate]);
        let mut context = self.view.scratch().context.clone();
        context.inputs.keyed_requests.clone_from(&self.keyed_requests);
        let again = std::mem::take(&mut self.again);
        let clock = || self.worker.clock.now().unix_ms;
        let (judgement, gifts) = match self.worker.shared.as_ref().filter(|_| slate.charge_plan.is_shared) {
            None => {
                let now = DecisionTime::read(&clock);
                (rule_set.recharge(&slate.charge_plan, &again, &self.worker.table, now, &mut context), Vec::new())
            }
            Some(shared) => {
                let inquiry =
                    shared.charge_again(rule_set, &slate.charge_plan, again, context, self.placed.texts.clone());
                let ruling = inquiry.decide(&slate.charge_plan).await;
                let ruling = ruling.map_err(|Unavailable| Rejection::Fault(RequestError::Uncounted))?;
                context = ruling.context;
                (ruling.judgement, ruling.gifts)
            }
        };
        let now = DecisionTime::read(&clock);
        let now_ms = now.unix_ms;
        match judgement {
            Decision::Admitted => {}
            Decision::Delayed { until_ms, recharge: again, .. } if until_ms <= self.latest_ms => {
                (self.until_ms, self.again) = (until_ms, again);
            }
            Decision::Delayed { .. } | Decision::Refused => {
                self.shares.extend(context.all_receipts());
                rule_set.refund(&self.shares, u32::MAX, &self.worker.table, now_ms);
                self.shares.clear();
                self.placed.gifts.extend(gifts);
                // The answer tells of all layers, as they are now.
                rule_set.peek(&slate.charge_plan, &self.worker.table, now, &mut context);
                record.decision(self.slate, &context, &Decision::Refused);
                let mut text = Vec::new();
                let stamp = slate.sheet.render(&context, None, context.result.decided_ms, &mut text);
                let (charge_plan, forms) = (&slate.charge_plan, &snapshot.forms);
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
        self.shares.retain(|share| share.receipt.end_ms() > now_ms);
        self.shares.extend(context.all_receipts());
        if let Some(settlement) = settlement {
            settlement.charged_again(slate, &context, &gifts, now_ms);
        }
        self.placed.gifts.extend(gifts);
        Ok(())
    }
}

impl Drop for DelayedRequest {
    fn drop(&mut self) {
        self.waits.set(false);
        if !self.shares.is_empty() {
            let (worker, rule_set) = (&self.worker, &self.view.snapshot.rule_set);
            let now_ms = worker.clock.now().unix_ms;
            worker.abandoned.refund(self.shares.drain(..), self.until_ms, rule_set, &worker.table, now_ms);
        }
        if let Some(shared) = self.worker.shared.as_ref().filter(|_| !self.placed.gifts.is_empty()) {
            shared.give_later(self.placed.gifts.drain(..).map(|(_, gift)| gift).collect());
        }
    }
}
