//! What a request cost, once its answer says so.
//!
//! A rule may learn the cost of a request from a field of the answer. Something is charged before;
//! the rest when the fields arrive, or what was too much is given back. What the windows can not
//! cover any more is owed, and those to come grant that much less.

use std::rc::Rc;

use http::{HeaderMap, HeaderName};

use super::compiled_config::RouteRules;
use super::worker_state::{WorkerConfig, WorkerState};
use crate::config::Config;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::redis_store::scripts::Refund;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule::Cost;
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::sharded_counter::ShardReceipt;

/// A rule of a route whose cost the answer tells.
#[derive(Debug)]
pub struct ResponseCostRule {
    /// Position of the rule in the roster.
    position: usize,
    field: HeaderName,
    /// What was charged before.
    reserve: u32,
    /// No answer costs more.
    max: u32,
}

impl ResponseCostRule {
    /// The rules among these whose cost the answer tells.
    pub fn of(config: &Config, rules: &[usize]) -> Vec<ResponseCostRule> {
        let term = |(position, rule): (usize, &usize)| match &config.rules[*rule].cost {
            Cost::Response { header, reserve, max } => {
                let field = HeaderName::from_bytes(header.as_bytes()).ok()?;
                Some(ResponseCostRule { position, field, reserve: *reserve, max: *max })
            }
            Cost::Fixed(_) | Cost::Request { .. } => None,
        };
        rules.iter().enumerate().filter_map(term).collect()
    }

    /// What an answer says that the request cost; `None` if it says nothing, or nothing clear.
    fn cost_in(&self, fields: &HeaderMap) -> Option<u32> {
        let mut values = fields.get_all(&self.field).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let text = value.to_str().ok()?.trim();
        let number = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
        // More digits than fit say more than the most.
        number.then(|| text.parse().unwrap_or(self.max).min(self.max))
    }
}

/// A request whose cost is not known yet.
pub struct PendingCost {
    rules_index: usize,
    keyed_requests: Vec<Option<KeyedRequest>>,
    /// What was charged before, for each term of the slate.
    reserved: Vec<Vec<ShardReceipt>>,
    /// What the store has charged before, for rules by their position.
    refunds: Vec<(usize, Refund)>,
    /// What the keys are in the store, of the rules that are shared.
    store_keys: Vec<Option<Rc<str>>>,
}

impl PendingCost {
    /// Remembers what was decided on `desk`, if the slate has terms.
    pub fn new(
        slate: &RouteRules,
        position: usize,
        context: &DecisionContext,
        gifts: &[(usize, Refund)],
        texts: impl FnOnce() -> Vec<Option<Rc<str>>>,
    ) -> Option<Box<PendingCost>> {
        if slate.response_costs.is_empty() {
            return None;
        }
        let reserved = slate.response_costs.iter().map(|term| context.receipts_of_rule(term.position).collect());
        Some(Box::new(PendingCost {
            rules_index: position,
            keyed_requests: context.inputs.keyed_requests.clone(),
            reserved: reserved.collect(),
            refunds: gifts.to_vec(),
            store_keys: texts(),
        }))
    }

    /// Takes note of what was charged again, on `desk`, because the request passes in another window.
    pub fn add_recharge(
        &mut self,
        slate: &RouteRules,
        context: &DecisionContext,
        gifts: &[(usize, Refund)],
        now_ms: u64,
    ) {
        self.refunds.extend_from_slice(gifts);
        for (term, reserved) in slate.response_costs.iter().zip(&mut self.reserved) {
            reserved.retain(|share| share.receipt.end_ms() > now_ms);
            reserved.extend(context.receipts_of_rule(term.position));
        }
    }

    /// Charges or gives back the difference; returns what is to be said of the limits afterwards.
    pub fn settle(self, worker: &Rc<WorkerState>, view: &WorkerConfig, fields: &HeaderMap) -> Option<RateLimitFields> {
        let snapshot = &*view.compiled;
        let (rule_set, slate) = (&snapshot.rule_set, &snapshot.route_rules[self.rules_index]);
        let clock = || worker.clock.now().unix_ms;
        let now_ms = clock();
        let mut settled = false;
        for (term, reserved) in slate.response_costs.iter().zip(&self.reserved) {
            let (Some(keyed_request), Some(cost)) = (self.keyed_requests[term.position], term.cost_in(fields)) else {
                continue;
            };
            settled = true;
            if cost > term.reserve {
                let keyed_request = KeyedRequest { cost: cost - term.reserve, ..keyed_request };
                let (rule, text) = (slate.charge_plan.rules[term.position], self.store_keys.get(term.position));
                match (&worker.shared, text.and_then(Option::as_ref)) {
                    (Some(shared), Some(text)) => shared.overdraw(rule_set, rule, keyed_request, text),
                    _ => rule_set.charge_excess(rule, keyed_request, &worker.table, now_ms),
                }
            } else {
                rule_set.refund(reserved, term.reserve - cost, &worker.table, now_ms);
                let of_rule = self.refunds.iter().filter(|(position, _)| *position == term.position);
                let less = |(_, gift): &(usize, Refund)| Refund {
                    tokens: gift.tokens.min(u64::from(term.reserve - cost)),
                    ..gift.clone()
                };
                worker.shared.iter().for_each(|shared| shared.give_later(of_rule.clone().map(less).collect()));
            }
        }
        settled.then(|| {
            view.rate_limit_fields(
                self.rules_index,
                &self.keyed_requests,
                &worker.table,
                DecisionTime::starting_at(now_ms, &clock),
            )
        })
    }
}
