//! Charges what the response says that its request cost.
//!
//! A rule may read the cost of a request from a response field. A reserve is charged before forwarding; the rest is charged,
//! or the excess refunded, when the head of the response arrives. What exceeds the current windows is taken from later ones.

use std::rc::Rc;

use http::HeaderMap;

use super::compiled_config::RouteRules;
use super::worker_config::WorkerConfig;
use super::worker_state::WorkerState;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::redis_store::scripts::Refund;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::sharded_counter::ShardReceipt;

/// An admitted request whose cost is not known yet.
pub struct PendingCost {
    /// Position in `CompiledConfig::route_rules`.
    rules_index: usize,
    keyed_requests: Vec<Option<KeyedRequest>>,
    /// The reserve charged locally, for each of `RouteRules::response_costs`.
    reserved: Vec<Vec<ShardReceipt>>,
    /// Refunds of the reserve charged in the shared store, with the position of the rule.
    refunds: Vec<(usize, Refund)>,
    /// Store keys by rule; `None` for rules that are not shared.
    store_keys: Vec<Option<Rc<str>>>,
}

impl PendingCost {
    /// `None` if no rule reads its cost from the response. `context` has the result of the decision.
    pub fn new(
        rules: &RouteRules,
        rules_index: usize,
        context: &DecisionContext,
        refunds: &[(usize, Refund)],
        store_keys: impl FnOnce() -> Vec<Option<Rc<str>>>,
    ) -> Option<Box<PendingCost>> {
        if rules.response_costs.is_empty() {
            return None;
        }
        let reserved = rules.response_costs.iter().map(|cost| context.receipts_of_rule(cost.position).collect());
        Some(Box::new(PendingCost {
            rules_index,
            keyed_requests: context.inputs.keyed_requests.clone(),
            reserved: reserved.collect(),
            refunds: refunds.to_vec(),
            store_keys: store_keys(),
        }))
    }

    /// Notes what a delayed request was charged again in the window in which it passes.
    pub fn add_recharge(
        &mut self,
        rules: &RouteRules,
        context: &DecisionContext,
        refunds: &[(usize, Refund)],
        now_ms: u64,
    ) {
        self.refunds.extend_from_slice(refunds);
        for (cost, reserved) in rules.response_costs.iter().zip(&mut self.reserved) {
            reserved.retain(|charged| charged.receipt.end_ms() > now_ms);
            reserved.extend(context.receipts_of_rule(cost.position));
        }
    }

    /// Charges or refunds the difference to the reserve. Returns the RateLimit fields as of then, or `None` if the response
    /// states no cost.
    pub fn settle(
        self,
        worker: &Rc<WorkerState>,
        config: &WorkerConfig,
        headers: &HeaderMap,
    ) -> Option<RateLimitFields> {
        let compiled = &*config.compiled;
        let (rule_set, rules) = (&compiled.rule_set, &compiled.route_rules[self.rules_index]);
        let clock = || worker.clock.now().unix_ms;
        let now_ms = clock();
        let mut is_settled = false;
        for (rule, reserved) in rules.response_costs.iter().zip(&self.reserved) {
            let (Some(keyed_request), Some(cost)) = (self.keyed_requests[rule.position], rule.cost_in(headers)) else {
                continue;
            };
            is_settled = true;
            if cost > rule.reserve {
                let keyed_request = KeyedRequest { cost: cost - rule.reserve, ..keyed_request };
                let (index, store_key) = (rules.charge_plan.rules[rule.position], self.store_keys.get(rule.position));
                match (&worker.shared, store_key.and_then(Option::as_ref)) {
                    (Some(shared), Some(store_key)) => shared.overdraw(rule_set, index, keyed_request, store_key),
                    _ => rule_set.charge_excess(index, keyed_request, &worker.table, now_ms),
                }
            } else {
                let excess = rule.reserve - cost;
                rule_set.refund(reserved, excess, &worker.table, now_ms);
                let of_rule = self.refunds.iter().filter(|(position, _)| *position == rule.position);
                let limited = |(_, refund): &(usize, Refund)| Refund {
                    tokens: refund.tokens.min(u64::from(excess)),
                    ..refund.clone()
                };
                worker.shared.iter().for_each(|shared| shared.refund_later(of_rule.clone().map(limited).collect()));
            }
        }
        is_settled.then(|| {
            let now = DecisionTime::starting_at(now_ms, &clock);
            config.rate_limit_fields(self.rules_index, &self.keyed_requests, &worker.table, now)
        })
    }
}
