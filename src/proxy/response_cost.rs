//! Settles charges that depend on the response: a cost that the response states, and `count_when`.

use std::rc::Rc;

use http::{HeaderMap, Response, StatusCode};
use http_body::Body as _;

use super::response::ResponseBody;
use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::store_key::StoreKeys;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::response_cost::{FinalCost, GRPC_UNKNOWN, ResponseCostRule, grpc_status};
use transom_store::counter_access::RequestKeys;
use transom_store::scripts::Refund;
use transom_store::settlement::RuleCharges;

/// An admitted request whose cost is not known yet. Dropped without a response, as when the client goes away, it keeps its
/// charges.
pub struct PendingCost {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    rules_id: RouteRulesId,
    keyed_requests: IdVec<PlanPosition, Option<KeyedRequest>>,
    /// What was charged, for each of `RouteRules::response_costs`.
    charged: Vec<PendingCharges>,
    /// Refunds of what the shared store has charged, with the rule.
    refunds: Vec<(PlanPosition, Refund)>,
    store_keys: StoreKeys,
}

/// What one rule has charged, and whether the difference to its cost was charged or refunded.
struct PendingCharges {
    charges: RuleCharges,
    is_settled: bool,
}

impl PendingCost {
    /// `None` if the charge of no rule depends on the response. `context` has the result of the decision.
    pub fn new(
        by: DecidedBy<'_>,
        context: &DecisionContext,
        refunds: &[(PlanPosition, Refund)],
        store_keys: impl FnOnce() -> StoreKeys,
    ) -> Option<Box<PendingCost>> {
        let response_costs = &by.rules().response_costs;
        if response_costs.is_empty() {
            return None;
        }
        let charged = response_costs.iter().map(|rule| {
            // Nothing to settle: a shadow rule that would have refused, and a rule that an outage policy left out.
            let is_settled = !context.has_charged(rule.position);
            let charges = if is_settled { RuleCharges::default() } else { RuleCharges::of(context, rule.position) };
            PendingCharges { charges, is_settled }
        });
        Some(Box::new(PendingCost {
            worker: Rc::clone(by.worker),
            config: Rc::clone(by.config),
            rules_id: by.rules_id,
            keyed_requests: context.inputs.keyed_requests.clone(),
            charged: charged.collect(),
            refunds: refunds.to_vec(),
            store_keys: store_keys(),
        }))
    }

    /// Notes what a delayed request was charged again in the window in which it passes. Refunds in windows that have ended
    /// have no effect.
    pub fn add_recharge(&mut self, rules: &RouteRules, context: &DecisionContext, refunds: &[(PlanPosition, Refund)]) {
        self.refunds.extend_from_slice(refunds);
        for (rule, charged) in
            rules.response_costs.iter().zip(&mut self.charged).filter(|(_, charged)| !charged.is_settled)
        {
            charged.charges.add(context, rule.position);
        }
    }

    /// Charges or refunds the difference to what was charged. Returns the RateLimit fields as of then, or `None` if nothing
    /// has changed. Rules that count by the trailers are settled at the end of the body.
    pub fn settle(mut self: Box<Self>, response: &mut Response<ResponseBody>) -> Option<RateLimitFields> {
        let code_at_end = || response.body().is_end_stream().then_some(GRPC_UNKNOWN);
        let code = grpc_status(response.headers()).or_else(code_at_end);
        let is_changed = self.settle_rules(response.status(), response.headers(), code);
        let fields = is_changed
            .then(|| self.config.rate_limit_fields(self.rules_id, &self.keyed_requests, &self.worker.counters));
        if self.charged.iter().any(|charged| !charged.is_settled) {
            let (status, headers) = (response.status(), response.headers().clone());
            response.body_mut().at_end(Box::new(move |trailers| {
                let code = trailers.and_then(grpc_status).unwrap_or(GRPC_UNKNOWN);
                self.settle_rules(status, &headers, Some(code));
            }));
        }
        fields
    }

    /// Settles the rules whose cost is known; `true` if a counter may have changed.
    fn settle_rules(&mut self, status: StatusCode, headers: &HeaderMap, grpc_status: Option<u8>) -> bool {
        let config = Rc::clone(&self.config);
        let mut is_changed = false;
        for (nth, rule) in config.served.route_rules[self.rules_id].response_costs.iter().enumerate() {
            if self.charged[nth].is_settled {
                continue;
            }
            let cost = match rule.final_cost(status, headers, grpc_status) {
                FinalCost::KnownAtEnd => continue,
                FinalCost::AsCharged => None,
                FinalCost::Stated(cost) => Some(cost),
                FinalCost::NotCounted => {
                    self.record_refund(rule);
                    Some(0)
                }
            };
            self.charged[nth].is_settled = true;
            is_changed |= cost.is_some();
            if let Some(cost) = cost {
                let charges = &self.charged[nth].charges;
                self.worker.counters.settle(self.keys(), rule.position, charges, &self.refunds, cost);
            }
        }
        is_changed
    }

    /// Counts a request that a rule does not count.
    fn record_refund(&self, rule: &ResponseCostRule) {
        let rule = self.config.served.route_rules[self.rules_id].charge_plan.rules()[rule.position];
        if let Some(counter) = &self.config.refund_counters[rule] {
            counter.refunded();
        }
    }

    fn keys(&self) -> RequestKeys<'_> {
        RequestKeys {
            charge_plan: &self.config.served.route_rules[self.rules_id].charge_plan,
            keyed_requests: &self.keyed_requests,
            store_keys: &self.store_keys,
        }
    }
}
