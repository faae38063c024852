//! Settles charges that depend on the response: a cost that the response states, and `count_when`.
//!
//! Tokens are charged before forwarding, so that concurrent requests cannot exceed a limit. When the response arrives, the
//! rest is charged, or what was charged too much is refunded. What exceeds the current windows is taken from later ones.

use std::rc::Rc;

use http::{HeaderMap, Response, StatusCode};
use http_body::Body as _;

use super::response::ResponseBody;
use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use transom_limiter::charge_plan::LayerCharge;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::WindowKind;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::response_cost::{FinalCost, GRPC_UNKNOWN, ResponseCostRule, grpc_status};
use transom_store::counter_access::RequestKeys;
use transom_store::scripts::Refund;

/// An admitted request whose cost is not known yet. Dropped without a response, as when the client goes away, it keeps its
/// charges.
pub struct PendingCost {
    worker: Rc<WorkerState>,
    config: Rc<WorkerConfig>,
    rules_id: RouteRulesId,
    keyed_requests: IdVec<PlanPosition, Option<KeyedRequest>>,
    /// What was charged, for each of `RouteRules::response_costs`.
    charged: Vec<RuleCharges>,
    /// Refunds of what the shared store has charged, with the rule.
    refunds: Vec<(PlanPosition, Refund)>,
    store_keys: StoreKeys,
}

/// What one rule has charged.
struct RuleCharges {
    /// Locally.
    receipts: Vec<ShardReceipt>,
    /// The counters charged by the store, with the ends of their windows; `None` for sliding windows.
    remote: Vec<(Counter, Option<u64>)>,
    is_settled: bool,
}

impl RuleCharges {
    fn add(&mut self, context: &DecisionContext, position: PlanPosition) {
        self.receipts.extend(context.receipts_of_rule(position));
        let remote = context.charges_of_rule(position).filter(|charge| charge.receipt().is_none());
        let end_ms = |charge: &LayerCharge| (charge.request.kind != WindowKind::Sliding).then_some(charge.usage.end_ms);
        self.remote.extend(remote.map(|charge| (charge.counter, end_ms(charge))));
    }
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
            let mut charges = RuleCharges { receipts: Vec::new(), remote: Vec::new(), is_settled };
            if !is_settled {
                charges.add(context, rule.position);
            }
            charges
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
        for (rule, charges) in
            rules.response_costs.iter().zip(&mut self.charged).filter(|(_, charges)| !charges.is_settled)
        {
            charges.add(context, rule.position);
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
        if self.charged.iter().any(|charges| !charges.is_settled) {
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
            let Some(keyed_request) = self.keyed_requests[rule.position].filter(|_| !self.charged[nth].is_settled)
            else {
                self.charged[nth].is_settled = true;
                continue;
            };
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
            match cost {
                Some(cost) if cost > keyed_request.cost => {
                    let excess = KeyedRequest { cost: cost - keyed_request.cost, ..keyed_request };
                    self.worker.counters.charge_excess(self.keys(), rule.position, excess);
                }
                Some(cost) => self.refund(rule, nth, keyed_request.cost - cost, cost == 0),
                None => {}
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

    /// Refunds the last `tokens` of each charge. `is_all`: nothing stays charged.
    fn refund(&self, rule: &ResponseCostRule, nth: usize, tokens: u32, is_all: bool) {
        let (counters, keys) = (&self.worker.counters, self.keys());
        let RuleCharges { receipts, remote, .. } = &self.charged[nth];
        // A whole charge in front of later ones may be refunded when these are.
        let (whole, parts): (Vec<ShardReceipt>, Vec<ShardReceipt>) =
            receipts.iter().partition(|charged| is_all && charged.request.kind.carries_debt());
        counters.refund_in_order(keys, whole, None);
        counters.refund(keys, parts, tokens);
        let of_rule = self.refunds.iter().filter(|(position, _)| *position == rule.position);
        let refunds: Vec<Refund> = of_rule.map(|(_, refund)| refund.at_most(tokens.into())).collect();
        if !refunds.is_empty() {
            // Before the store refunds: usage that is reported afterwards is not lowered again.
            counters.forget_refunded(remote, tokens);
            counters.refund_in_store(refunds);
        }
    }
}
