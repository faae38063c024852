//! Decides a request by its rules: at once from the local table, or after waiting for a slot or the shared store.
//!
//! Slots of the rules that limit the requests in flight are taken first, so that no window is charged without them.

use std::rc::Rc;
use std::time::Duration;

use http::HeaderMap;

use super::delayed_request::{DelayedRequest, RECHECK_INTERVAL};
use super::request_record::RequestRecord;
use super::response::Rejection;
use super::response_cost::PendingCost;
use super::worker_config::WorkerConfig;
use super::worker_state::{DecidedBy, WorkerState};
use transom_http::error::RequestError;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::{QueuedSlot, Slot, SlotState};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::rule::OnLimit;
use transom_limiter::slot_decision::SlotsResult;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::waiter_limit::WaiterSlot;
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::resolved_request::ResolvedRequest;
use transom_rules::responses::RefusedRequest;
use transom_rules::top_keys::KeyName;
use transom_runtime::metrics::storage::GaugeGuard;
use transom_store::delayed_charges::StoreCharges;
use transom_store::shared_decision::{BeginResult, SharedDecision, SharedOutcome, Unavailable};

/// A decision that waits.
pub struct PendingAdmission {
    step: PendingStep,
    rules_id: RouteRulesId,
    /// See [`DecidedBy::may_hold`].
    may_hold: bool,
    /// See [`WorkerConfig::names_for_marks`].
    pub key_names: IdVec<PlanPosition, KeyName>,
}

/// What a decision waits for.
enum PendingStep {
    Slot(Box<QueuedRequest>),
    Store(Box<SharedDecision>),
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
    pub fn new(
        decision: Decision,
        fields: RateLimitFields,
        by: DecidedBy<'_>,
        context: &DecisionContext,
        store_keys: impl FnOnce() -> StoreKeys,
    ) -> Admission {
        Admission {
            fields: fields.without_indexing(),
            delay: DelayedRequest::new(decision, by, context, StoreCharges::default()),
            pending_cost: PendingCost::new(by, context, &[], store_keys),
        }
    }
}

/// The decision, or what it waits for.
pub enum Evaluation {
    Decided(Decision),
    Pending(Box<PendingAdmission>),
}

/// Decides a request, with its keys in `context`.
#[inline(always)]
pub fn evaluate(
    worker: &WorkerState,
    resolved: &ResolvedRequest<'_>,
    context: &mut DecisionContext,
    record: &mut RequestRecord,
    now_ms: u64,
) -> Result<Evaluation, RequestError> {
    let (rules, rules_id, may_hold) = (resolved.rules, resolved.route.rules, resolved.route.may_hold);
    context.result.concurrency.clear();
    if rules.charge_plan.limits_concurrency()
        && let Some(evaluation) = acquire_slots(worker, resolved, context, record)
    {
        return Ok(evaluation);
    }
    match worker.counters.decide(&rules.charge_plan, now_ms, context, |position| resolved.store_key(position)) {
        BeginResult::Decided(decision) => Ok(Evaluation::Decided(decision)),
        BeginResult::Pending(decision) => {
            let step = PendingStep::Store(decision);
            Ok(Evaluation::Pending(Box::new(PendingAdmission { step, rules_id, may_hold, key_names: IdVec::new() })))
        }
        BeginResult::Unavailable => Err(RequestError::StoreUnavailable),
    }
}

/// Takes the slots of the rules that limit the requests in flight. `None`: the request has all slots, and its windows decide.
#[inline(never)]
fn acquire_slots(
    worker: &WorkerState,
    resolved: &ResolvedRequest<'_>,
    context: &mut DecisionContext,
    record: &mut RequestRecord,
) -> Option<Evaluation> {
    let (rules, rules_id) = (resolved.rules, resolved.route.rules);
    let hold = |position, slot| record.hold_slot(rules_id, position, slot);
    match rules.charge_plan.acquire_slots(context, None, hold) {
        SlotsResult::Acquired => return None,
        SlotsResult::Full(position) => {
            if let Some((place, waiter)) = QueuePlace::join(&rules.charge_plan, context, record, position) {
                let store_keys = resolved.store_keys();
                let queued = QueuedRequest { place, waiter, context: context.clone(), store_keys };
                let step = PendingStep::Slot(Box::new(queued));
                let may_hold = resolved.route.may_hold;
                let pending = PendingAdmission { step, rules_id, may_hold, key_names: IdVec::new() };
                return Some(Evaluation::Pending(Box::new(pending)));
            }
        }
        SlotsResult::Refused => {}
    }
    refuse(worker, rules, context, record, |position| resolved.store_key(position));
    Some(Evaluation::Decided(Decision::Refused))
}

/// Releases the slots of a request that found one rule without a free slot, and completes the result of its decision.
fn refuse(
    worker: &WorkerState,
    rules: &RouteRules,
    context: &mut DecisionContext,
    record: &mut RequestRecord,
    store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
) {
    record.release_slots(context);
    worker.counters.refuse(&rules.charge_plan, context, store_key);
}

/// A request that waits for a slot. Dropped, as when the client goes away, it leaves the queue.
struct QueuedRequest {
    place: QueuePlace,
    waiter: WaiterSlot,
    context: DecisionContext,
    store_keys: StoreKeys,
}

/// A place in the queue of a rule.
struct QueuePlace {
    position: PlanPosition,
    slot: QueuedSlot,
    max_delay_ms: u64,
    _counted: Option<GaugeGuard>,
}

impl QueuePlace {
    /// `None` if too many requests wait for the rule already.
    fn join(
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        record: &RequestRecord,
        position: PlanPosition,
    ) -> Option<(QueuePlace, WaiterSlot)> {
        let slot = charge_plan.queue_slot(context, position)?;
        let rule = charge_plan.rule(position);
        let OnLimit::Delay { max_delay_ms, .. } = rule.rule.on_limit else { return None };
        let waiter = rule.waiters.try_enter()?;
        let counted = record.record_slot_wait(position, charge_plan.rules()[position]);
        Some((QueuePlace { position, slot, max_delay_ms, _counted: counted }, waiter))
    }

    /// Waits for the slot; `None` after the longest delay that the rule allows.
    async fn wait(&mut self, worker: &WorkerState) -> Option<Slot> {
        let latest_ms = worker.clock.now().unix_ms.saturating_add(self.max_delay_ms);
        loop {
            let left_ms = latest_ms.saturating_sub(worker.clock.now().unix_ms);
            let pause = Duration::from_millis(left_ms).min(RECHECK_INTERVAL);
            match tokio::time::timeout(pause, &mut self.slot).await {
                Ok(slot) => return Some(slot),
                Err(_elapsed) if left_ms == 0 => return None,
                Err(_elapsed) => {}
            }
        }
    }
}

impl QueuedRequest {
    /// Waits for the slots, then decides the windows.
    async fn decide(
        mut self: Box<Self>,
        worker: &WorkerState,
        config: &WorkerConfig,
        rules_id: RouteRulesId,
        record: &mut RequestRecord,
    ) -> Result<SharedOutcome, Unavailable> {
        let rules = &config.served.route_rules[rules_id];
        record.delay_began();
        let has_slots = self.wait_for_slots(worker, &rules.charge_plan, rules_id, record).await;
        record.delay_ended();
        let QueuedRequest { place, waiter, mut context, store_keys } = *self;
        // The request waits no longer, also while the store decides.
        drop((place, waiter));
        let store_key = |position| store_keys.get(position).cloned().flatten();
        let begun = if has_slots {
            let now_ms = worker.clock.now().unix_ms;
            worker.counters.decide(&rules.charge_plan, now_ms, &mut context, store_key)
        } else {
            refuse(worker, rules, &mut context, record, store_key);
            BeginResult::Decided(Decision::Refused)
        };
        match begun {
            BeginResult::Decided(decision) => Ok(SharedOutcome { decision, context, refunds: Vec::new(), store_keys }),
            BeginResult::Pending(decision) => decision.decide(&rules.charge_plan).await,
            BeginResult::Unavailable => Err(Unavailable),
        }
    }

    /// Waits for all slots; `false` if a rule refuses the request.
    async fn wait_for_slots(
        &mut self,
        worker: &WorkerState,
        charge_plan: &ChargePlan,
        rules_id: RouteRulesId,
        record: &mut RequestRecord,
    ) -> bool {
        loop {
            let Some(slot) = self.place.wait(worker).await else { return false };
            record.hold_slot(rules_id, self.place.position, slot);
            if let Some(usage) = self.context.result.concurrency.last_mut() {
                usage.state = SlotState::Waited;
            }
            let hold = |position, slot| record.hold_slot(rules_id, position, slot);
            match charge_plan.acquire_slots(&mut self.context, Some(self.place.position), hold) {
                SlotsResult::Acquired => return true,
                SlotsResult::Refused => return false,
                SlotsResult::Full(position) => {
                    let joined = QueuePlace::join(charge_plan, &self.context, record, position);
                    let Some((place, waiter)) = joined else { return false };
                    (self.place, self.waiter) = (place, waiter);
                }
            }
        }
    }
}

impl PendingAdmission {
    /// Waits for slots or the store, and decides.
    pub async fn resolve(
        self: Box<Self>,
        worker: &Rc<WorkerState>,
        config: &Rc<WorkerConfig>,
        record: &mut RequestRecord,
    ) -> Result<Admission, Rejection> {
        let PendingAdmission { step, rules_id, may_hold, key_names } = *self;
        let rules = &config.served.route_rules[rules_id];
        let outcome = match step {
            PendingStep::Store(decision) => decision.decide(&rules.charge_plan).await,
            PendingStep::Slot(queued) => queued.decide(worker, config, rules_id, record).await,
        };
        let mut outcome = outcome.map_err(|Unavailable| Rejection::Error(RequestError::StoreUnavailable))?;
        let now_ms = worker.clock.now().unix_ms;
        if let Decision::Refused = outcome.decision {
            record.release_slots(&mut outcome.context);
        }
        let verdicts = rules.charge_plan.verdicts(&outcome.context, &outcome.decision);
        record.record_decision(rules_id, verdicts);
        config.top_keys.count_decision(rules.charge_plan.rules(), verdicts);
        if let Some(marks) = &config.marks {
            marks.read(rules.charge_plan.rules(), verdicts, |position| key_names.get(position).cloned());
        }
        let mut text = Vec::new();
        if let Decision::Refused = outcome.decision {
            let headers = HeaderMap::new();
            let refused = RefusedRequest { now_ms, id: Some(record.request_id()), headers, text: &mut text };
            let refused = config.refusal(rules_id, verdicts, worker.date(), refused);
            return Err(Rejection::Refused(refused.response));
        }
        let policy = config.policy_fields[rules_id].as_ref();
        let fields = rules.rate_limit_template.render(verdicts, policy, now_ms, &mut text);
        let SharedOutcome { decision, context, refunds, store_keys } = outcome;
        let by = DecidedBy { worker, config, rules_id, may_hold };
        let pending_cost = PendingCost::new(by, &context, &refunds, || store_keys.clone());
        let charges = StoreCharges { refunds, keys: store_keys };
        let delay = DelayedRequest::new(decision, by, &context, charges);
        Ok(Admission { fields: fields.without_indexing(), delay, pending_cost })
    }
}
