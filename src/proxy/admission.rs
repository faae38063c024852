//! A request whose rules have to ask the store of shared counters before they decide.

use std::rc::Rc;

use http::HeaderMap;

use super::compiled_config::{CompiledConfig, RouteRules};
use super::delayed_request::{DelayedRequest, Placed};
use super::request_record::Record;
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
    inquiry: Box<SharedDecision>,
    /// Position of the slate.
    slate: usize,
}

/// What lets a request pass.
#[derive(Default)]
pub struct Admission {
    pub stamp: RateLimitFields,
    pub turn: Option<Box<DelayedRequest>>,
    pub settlement: Option<Box<PendingCost>>,
}

/// Why a request does not pass.
pub enum Rejection {
    Refused(Reply),
    Fault(RequestError),
}

impl Admission {
    /// That of a request that was let through without a question; the desk is what was decided on.
    #[allow(clippy::too_many_arguments, reason = "all of them are what the request takes along")]
    pub fn of(
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
            stamp: stamp.only_once(),
            turn: DelayedRequest::of(judgement, worker, view, peer, slate, context, Placed::default()),
            settlement: PendingCost::of(&view.snapshot.slates[slate], slate, context, &[], texts),
        }
    }
}

/// What the rules say, if they can say it now.
pub enum Judged {
    Now(Decision),
    Later(Box<PendingAdmission>),
}

/// Lets the rules of a slate decide a request whose askers lie on the desk.
#[inline(always)]
pub fn judge(
    worker: &WorkerState,
    snapshot: &CompiledConfig,
    slate: usize,
    caller: &Caller<'_>,
    context: &mut DecisionContext,
    now_ms: u64,
) -> Result<Judged, RequestError> {
    let RouteRules { charge_plan, .. } = &snapshot.slates[slate];
    let Some(shared) = worker.shared.as_ref().filter(|_| charge_plan.is_shared) else {
        let clock = || worker.clock.now().unix_ms;
        let now = DecisionTime::starting_at(now_ms, &clock);
        return Ok(Judged::Now(snapshot.rule_set.decide(charge_plan, &worker.table, now, context)));
    };
    let text = |position| snapshot.text_of(&snapshot.slates[slate], position, caller);
    match shared.begin(&snapshot.rule_set, charge_plan, context, text) {
        Begun::Decided(judgement) => Ok(Judged::Now(judgement)),
        Begun::Waits(inquiry) => Ok(Judged::Later(Box::new(PendingAdmission { inquiry, slate }))),
        Begun::Unavailable => Err(RequestError::Uncounted),
    }
}

impl PendingAdmission {
    /// Waits for the store, and decides.
    pub async fn answer(
        self: Box<Self>,
        worker: &Rc<WorkerState>,
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        record: &mut Record,
    ) -> Result<Admission, Rejection> {
        let snapshot = &*view.snapshot;
        let slate = &snapshot.slates[self.slate];
        let ruling = self.inquiry.decide(&slate.charge_plan).await;
        let ruling = ruling.map_err(|Unavailable| Rejection::Fault(RequestError::Uncounted))?;
        let now_ms = worker.clock.now().unix_ms;
        record.decision(self.slate, &ruling.context, &ruling.judgement);
        let mut text = Vec::new();
        if let Decision::Refused = ruling.judgement {
            let refused = view.refusal(self.slate, &ruling.context, now_ms, worker.date(), &mut text, HeaderMap::new());
            return Err(Rejection::Refused(refused.reply));
        }
        let stamp = slate.sheet.render(&ruling.context, view.policies[self.slate].as_ref(), now_ms, &mut text);
        let SharedOutcome { judgement, context, gifts, texts } = ruling;
        let settlement = PendingCost::of(slate, self.slate, &context, &gifts, || texts.clone());
        let turn = DelayedRequest::of(judgement, worker, view, peer, self.slate, &context, Placed { gifts, texts });
        Ok(Admission { stamp: stamp.only_once(), turn, settlement })
    }
}
