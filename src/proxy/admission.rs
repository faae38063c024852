//! A request whose rules have to ask the store of shared counters before they decide.

use std::rc::Rc;

use http::HeaderMap;

use super::compiled_config::{CompiledConfig, RouteRules};
use super::delayed_request::{DelayedRequest, StoreCharges};
use super::request_record::RequestRecord;
use super::response_cost::PendingCost;
use super::worker_state::{Peer, WorkerConfig, WorkerState};
use crate::http::error::RequestError;
use crate::http::rate_limit_key::Caller;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::http::responses::Reply;
use crate::redis_store::decision::{Begun, SharedDecision, SharedOutcome, Unavailable};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;

/// What is asked, and by whose rules.
pub struct PendingAdmission {
    decision: Box<SharedDecision>,
    /// Position of the slate.
    rules_index: usize,
}

/// What lets a request pass.
#[derive(Default)]
pub struct Admission {
    pub fields: RateLimitFields,
    pub delay: Option<Box<DelayedRequest>>,
    pub pending_cost: Option<Box<PendingCost>>,
}

/// Why a request does not pass.
pub enum Rejection {
    Refused(Reply),
    Error(RequestError),
}

impl Admission {
    /// That of a request that was let through without a question; the desk is what was decided on.
    #[allow(clippy::too_many_arguments, reason = "all of them are what the request takes along")]
    pub fn new(
        judgement: Decision,
        stamp: RateLimitFields,
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        slate: usize,
        context: &DecisionContext,
        texts: impl FnOnce() -> Vec<Option<Rc<str>>>,
    ) -> Admission {
        Admission {
            fields: stamp.only_once(),
            delay: DelayedRequest::new(judgement, worker, view, peer, slate, context, StoreCharges::default()),
            pending_cost: PendingCost::new(&view.compiled.route_rules[slate], slate, context, &[], texts),
        }
    }
}

/// What the rules say, if they can say it now.
pub enum Evaluation {
    Decided(Decision),
    Pending(Box<PendingAdmission>),
}

/// Lets the rules of a slate decide a request whose askers lie on the desk.
#[inline(always)]
pub fn evaluate(
    worker: &WorkerState,
    snapshot: &CompiledConfig,
    slate: usize,
    caller: &Caller<'_>,
    context: &mut DecisionContext,
    now_ms: u64,
) -> Result<Evaluation, RequestError> {
    let RouteRules { charge_plan, .. } = &snapshot.route_rules[slate];
    let Some(shared) = worker.shared.as_ref().filter(|_| charge_plan.is_shared) else {
        let clock = || worker.clock.now().unix_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        return Ok(Evaluation::Decided(snapshot.rule_set.decide(charge_plan, &worker.table, now, context)));
    };
    let text = |position| snapshot.store_key(&snapshot.route_rules[slate], position, caller);
    match shared.begin(&snapshot.rule_set, charge_plan, context, text) {
        Begun::Decided(judgement) => Ok(Evaluation::Decided(judgement)),
        Begun::Waits(inquiry) => {
            Ok(Evaluation::Pending(Box::new(PendingAdmission { decision: inquiry, rules_index: slate })))
        }
        Begun::Unavailable => Err(RequestError::StoreUnavailable),
    }
}

impl PendingAdmission {
    /// Waits for the store, and decides.
    pub async fn resolve(
        self: Box<Self>,
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        record: &mut RequestRecord,
    ) -> Result<Admission, Rejection> {
        let snapshot = &*view.compiled;
        let slate = &snapshot.route_rules[self.rules_index];
        let ruling = self.decision.decide(&slate.charge_plan).await;
        let ruling = ruling.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))?;
        let now_ms = worker.clock.now().unix_ms;
        record.record_decision(self.rules_index, &ruling.context, &ruling.judgement);
        let mut text = Vec::new();
        if let Decision::Refused = ruling.judgement {
            let refused =
                view.refusal(self.rules_index, &ruling.context, now_ms, worker.date(), &mut text, HeaderMap::new());
            return Err(Rejection::Refused(refused.reply));
        }
        let stamp = slate.rate_limit_template.render(
            &ruling.context,
            view.policy_fields[self.rules_index].as_ref(),
            now_ms,
            &mut text,
        );
        let SharedOutcome { judgement, context, gifts, texts } = ruling;
        let settlement = PendingCost::new(slate, self.rules_index, &context, &gifts, || texts.clone());
        let turn = DelayedRequest::new(
            judgement,
            worker,
            view,
            peer,
            self.rules_index,
            &context,
            StoreCharges { refunds: gifts, keys: texts },
        );
        Ok(Admission { fields: stamp.only_once(), delay: turn, pending_cost: settlement })
    }
}
