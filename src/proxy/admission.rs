//! Decides a request by its rules: at once from the local table, or after a reply of the shared store.

use std::rc::Rc;

use http::HeaderMap;

use super::compiled_config::{CompiledConfig, RouteRules};
use super::delayed_request::{DelayedRequest, StoreCharges};
use super::peer::Peer;
use super::request_record::RequestRecord;
use super::response::Rejection;
use super::response_cost::PendingCost;
use super::worker_config::WorkerConfig;
use super::worker_state::WorkerState;
use crate::http::error::RequestError;
use crate::http::key_source::RequestAttributes;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::redis_store::shared_decision::{BeginResult, SharedDecision, SharedOutcome, Unavailable};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;

/// A decision that waits for the shared store.
pub struct PendingAdmission {
    decision: Box<SharedDecision>,
    /// Position in `CompiledConfig::route_rules`.
    rules_index: usize,
}

/// What later steps of an admitted request need.
#[derive(Default)]
pub struct Admission {
    pub fields: RateLimitFields,
    /// Set if the request has to wait for a later window.
    pub delay: Option<Box<DelayedRequest>>,
    /// Set if the response says what the request costs.
    pub pending_cost: Option<Box<PendingCost>>,
}

impl Admission {
    /// The admission of a request that was decided locally, with the result in `context`.
    #[allow(clippy::too_many_arguments, reason = "the parts of an admission")]
    pub fn new(
        decision: Decision,
        fields: RateLimitFields,
        worker: &Rc<WorkerState>,
        config: &Rc<WorkerConfig>,
        peer: &Peer,
        rules_index: usize,
        context: &DecisionContext,
        store_keys: impl FnOnce() -> Vec<Option<Rc<str>>>,
    ) -> Admission {
        let rules = &config.compiled.route_rules[rules_index];
        let charges = StoreCharges::default();
        Admission {
            fields: fields.without_indexing(),
            delay: DelayedRequest::new(decision, worker, config, peer, rules_index, context, charges),
            pending_cost: PendingCost::new(rules, rules_index, context, &[], store_keys),
        }
    }
}

/// The decision, or what it waits for.
pub enum Evaluation {
    Decided(Decision),
    Pending(Box<PendingAdmission>),
}

/// Decides a request, with its keys in `context`, by the rules at `rules_index`.
#[inline(always)]
pub fn evaluate(
    worker: &WorkerState,
    compiled: &CompiledConfig,
    rules_index: usize,
    attributes: &RequestAttributes<'_>,
    context: &mut DecisionContext,
    now_ms: u64,
) -> Result<Evaluation, RequestError> {
    let rules @ RouteRules { charge_plan, .. } = &compiled.route_rules[rules_index];
    let Some(shared) = worker.shared.as_ref().filter(|_| charge_plan.is_shared) else {
        let clock = || worker.clock.now().unix_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        return Ok(Evaluation::Decided(compiled.rule_set.decide(charge_plan, &worker.table, now, context)));
    };
    let store_key = |position| compiled.store_key(rules, position, attributes);
    match shared.begin(&compiled.rule_set, charge_plan, context, store_key) {
        BeginResult::Decided(decision) => Ok(Evaluation::Decided(decision)),
        BeginResult::Pending(decision) => Ok(Evaluation::Pending(Box::new(PendingAdmission { decision, rules_index }))),
        BeginResult::Unavailable => Err(RequestError::StoreUnavailable),
    }
}

impl PendingAdmission {
    /// Waits for the store, and decides.
    pub async fn resolve(
        self: Box<Self>,
        worker: &Rc<WorkerState>,
        config: &Rc<WorkerConfig>,
        peer: &Peer,
        record: &mut RequestRecord,
    ) -> Result<Admission, Rejection> {
        let PendingAdmission { decision, rules_index } = *self;
        let rules = &config.compiled.route_rules[rules_index];
        let outcome = decision.decide(&rules.charge_plan).await;
        let outcome = outcome.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))?;
        let now_ms = worker.clock.now().unix_ms;
        record.record_decision(rules_index, &outcome.context, &outcome.decision);
        let mut text = Vec::new();
        if let Decision::Refused = outcome.decision {
            let headers = HeaderMap::new();
            let refused = config.refusal(rules_index, &outcome.context, now_ms, worker.date(), &mut text, headers);
            return Err(Rejection::Refused(refused.response));
        }
        let policy = config.policy_fields[rules_index].as_ref();
        let fields = rules.rate_limit_template.render(&outcome.context, policy, now_ms, &mut text);
        let SharedOutcome { decision, context, refunds, key_texts } = outcome;
        let pending_cost = PendingCost::new(rules, rules_index, &context, &refunds, || key_texts.clone());
        let charges = StoreCharges { refunds, keys: key_texts };
        let delay = DelayedRequest::new(decision, worker, config, peer, rules_index, &context, charges);
        Ok(Admission { fields: fields.without_indexing(), delay, pending_cost })
    }
}
