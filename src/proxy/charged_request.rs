//! An admitted request whose charges are settled later: by its response, or by the bytes that pass.

use std::cell::{OnceCell, RefCell, RefMut};
use std::rc::Rc;

use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use crate::access_log::entry::LoggedCosts;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::store_key::StoreKeys;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_store::counter_access::RequestKeys;
use transom_store::scripts::Refund;
use transom_store::settlement::RuleCharges;

/// The costs of a request, for the access log: its record and what settles them share it.
pub type CostLog = Rc<RefCell<LoggedCosts>>;

pub struct ChargedRequest {
    pub worker: Rc<WorkerState>,
    pub config: Rc<WorkerConfig>,
    pub rules_id: RouteRulesId,
    pub keyed_requests: IdVec<PlanPosition, Option<KeyedRequest>>,
    store_keys: StoreKeys,
    /// Refunds of what the shared store has charged, with the rule.
    refunds: RefCell<Vec<(PlanPosition, Refund)>>,
    /// Set if the request is logged.
    log: OnceCell<CostLog>,
}

impl ChargedRequest {
    /// `context` has the result of the decision.
    pub fn new(
        by: DecidedBy<'_>,
        context: &DecisionContext,
        refunds: &[(PlanPosition, Refund)],
        store_keys: StoreKeys,
    ) -> Rc<ChargedRequest> {
        Rc::new(ChargedRequest {
            worker: Rc::clone(by.worker),
            config: Rc::clone(by.config),
            rules_id: by.rules_id,
            keyed_requests: context.inputs.keyed_requests.clone(),
            store_keys,
            refunds: RefCell::new(refunds.to_vec()),
            log: OnceCell::new(),
        })
    }

    pub fn rules(&self) -> &RouteRules {
        &self.config.served.route_rules[self.rules_id]
    }

    pub fn keys(&self) -> RequestKeys<'_> {
        RequestKeys {
            charge_plan: &self.rules().charge_plan,
            keyed_requests: &self.keyed_requests,
            store_keys: &self.store_keys,
        }
    }

    /// What a rule has charged in advance.
    pub fn reserved(&self, position: PlanPosition) -> u32 {
        self.keyed_requests[position].map_or(0, |keyed_request| keyed_request.cost)
    }

    pub fn rule_name(&self, position: PlanPosition) -> &str {
        &self.rules().charge_plan.rule(position).rule.name
    }

    pub fn add_refunds(&self, refunds: &[(PlanPosition, Refund)]) {
        self.refunds.borrow_mut().extend_from_slice(refunds);
    }

    /// Charges or refunds the difference of `cost` to what a rule has charged.
    pub fn settle(&self, position: PlanPosition, charges: &RuleCharges, cost: u32) {
        self.worker.counters.settle(self.keys(), position, charges, &self.refunds.borrow(), cost);
    }

    /// Starts the log of costs. The cost of a rule is what it has charged in advance, until more is known.
    pub fn log_costs(&self, log: CostLog, rules: impl Iterator<Item = PlanPosition>) {
        for position in rules {
            let (name, reserved) = (self.rule_name(position), self.reserved(position).into());
            log.borrow_mut().reserved.insert(name.to_owned(), reserved);
            log.borrow_mut().cost.insert(name.to_owned(), reserved);
        }
        self.log.get_or_init(|| log);
    }

    pub fn log_cost(&self, position: PlanPosition, tokens: u64) {
        if let Some(mut log) = self.log()
            && let Some(cost) = log.cost.get_mut(self.rule_name(position))
        {
            *cost = tokens;
        }
    }

    pub fn log_cut(&self, position: PlanPosition) {
        if let Some(mut log) = self.log() {
            log.cut_by.get_or_insert_with(|| self.rule_name(position).to_owned());
        }
    }

    /// The log of costs, if the request is logged.
    pub fn log(&self) -> Option<RefMut<'_, LoggedCosts>> {
        self.log.get().map(|log| log.borrow_mut())
    }
}
