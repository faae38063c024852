//! A request that was charged in a later window and waits for that window to open.

use std::rc::Rc;
use std::time::Duration;

use http::HeaderMap;

use super::request_record::RequestRecord;
use super::response::Rejection;
use super::response_cost::PendingCost;
use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use transom_http::error::RequestError;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::PlanPosition;
use transom_limiter::waiter_limit::WaiterSlot;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::responses::{self, RefusedRequest};
use transom_runtime::metrics::storage::GaugeGuard;
use transom_store::counter_access::CounterAccess;
use transom_store::delayed_charges::{DecidingRules, DelayedCharges, NextStep, StoreCharges};
use transom_store::shared_decision::Unavailable;

/// The wall clock may be set while a request waits, so the time is read again at this interval.
pub const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A delayed request.
pub struct DelayedRequest {
    charges: DelayedCharges<WorkerRules>,
    /// Occupies one of the waiter slots of the rule, and counts as waiting.
    _waiter: Option<(WaiterSlot, Option<GaugeGuard>)>,
}

/// Rules of a configuration, on the counters of a worker.
struct WorkerRules {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    id: RouteRulesId,
}

impl WorkerRules {
    fn rules(&self) -> &RouteRules {
        &self.config.served.route_rules[self.id]
    }
}

impl DecidingRules for WorkerRules {
    fn counters(&self) -> &CounterAccess {
        &self.worker.counters
    }

    fn charge_plan(&self) -> &ChargePlan {
        &self.rules().charge_plan
    }
}

impl DelayedRequest {
    /// `None` unless the decision is a delay. `context` has the result of the decision.
    pub fn new(
        decision: Decision,
        by: DecidedBy<'_>,
        context: &DecisionContext,
        of_store: StoreCharges,
    ) -> Option<Box<DelayedRequest>> {
        let Decision::Delayed { until_ms, waiter, recharge } = decision else { return None };
        let (worker, config, id) = (Rc::clone(by.worker), Rc::clone(by.config), by.rules_id);
        let rule = |waits_for: PlanPosition| by.rules().charge_plan.rules()[waits_for];
        Some(Box::new(DelayedRequest {
            _waiter: waiter.map(|waiter| (waiter.slot, config.count_delayed(rule(waiter.position)))),
            charges: DelayedCharges::new(WorkerRules { worker, config, id }, context, of_store, until_ms, recharge),
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
            let context = self.charges.rules().config.scratch().context.clone();
            let next = self.charges.proceed(context).await;
            let rules = self.charges.rules();
            match next.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))? {
                NextStep::Pass => {
                    let keyed_requests = &self.charges.inputs().keyed_requests;
                    return Ok(rules.config.rate_limit_fields(rules.id, keyed_requests, rules.counters()));
                }
                NextStep::Wait(charged) => {
                    if let Some(pending_cost) = pending_cost {
                        pending_cost.add_recharge(rules.rules(), &charged.context, &charged.refunds);
                    }
                }
                NextStep::Refuse(context) => return Err(rules.refuse(*context, record)),
            }
        }
    }

    async fn wait_until_open(&self) {
        loop {
            let now_ms = self.charges.rules().worker.clock.now().unix_ms;
            let left_ms = self.charges.until_ms().saturating_sub(now_ms);
            if left_ms == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(RECHECK_INTERVAL)).await;
        }
    }
}

impl WorkerRules {
    /// The refusal of a request that has waited. `context` states all layers as they are now.
    fn refuse(&self, mut context: DecisionContext, record: &mut RequestRecord) -> Rejection {
        let RouteRules { charge_plan, rate_limit_template, .. } = self.rules();
        charge_plan.peek_slots(&mut context);
        record.release_slots(&mut context);
        let verdicts = charge_plan.verdicts(&context, &Decision::Refused);
        record.record_decision(self.id, verdicts);
        self.config.top_keys.count_decision(charge_plan.rules(), verdicts);
        let (now_ms, mut text) = (context.result.decided_ms, Vec::new());
        let fields = rate_limit_template.render(verdicts, None, now_ms, &mut text);
        let refused =
            RefusedRequest { now_ms, id: Some(record.request_id()), headers: HeaderMap::new(), text: &mut text };
        let templates = &self.config.served.refusal_templates;
        Rejection::Refused(responses::refusal_response(verdicts, templates, fields, refused).response)
    }
}
