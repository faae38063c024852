//! The decision about one request by shared counters, as far as it has to wait for the store.
//!
//! First all layers are charged that the table can decide, leased tokens included: all or nothing, and without waiting
//! where enough tokens are leased. Layers that the store decides are charged last, in one call, so that a refusal by
//! the store leaves nothing to undo there. After the timeout, the rules continue as in an outage.

use std::mem::take;
use std::ops::{Index, IndexMut};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::scripts::Refund;
use super::shared_counters::SharedCounters;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, Handle, PlanPosition};
use transom_limiter::rule::OnOutage;
use transom_limiter::rule_set::{CountingMode, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::window_kind::Usage;
use transom_runtime::metrics::redis::OutageDecision;

/// Most attempts of one request, for example when other requests take the tokens that it fetches.
pub(super) const ROUNDS_MAX: u32 = 64;
/// The first rounds ignore the deadline: a reply may have arrived in time and been read late by a busy worker.
const ROUNDS_WITHOUT_DEADLINE: u32 = 4;

/// The result of a decision, if it does not have to wait.
pub enum BeginResult {
    Decided(Decision),
    Pending(Box<SharedDecision>),
    /// A rule with `on_outage = "refuse"` cannot be counted.
    Unavailable,
}

/// A request that waits for the store.
pub struct SharedDecision {
    pub(super) shared: Rc<SharedCounters>,
    pub(super) rule_set: Arc<RuleSet>,
    pub(super) context: DecisionContext,
    /// The store keys of the charge plan's rules; `None` for rules that are not shared or do not apply.
    pub(super) store_keys: StoreKeys,
    pub(super) progress: DecisionProgress,
    pub(super) next: Option<NextStep>,
    pub(super) deadline: Instant,
}

/// The result of a [`SharedDecision`].
pub struct SharedOutcome {
    pub decision: Decision,
    /// The context of the decision, as after any decision.
    pub context: DecisionContext,
    /// Refunds of what the store has charged, each with the position of its rule.
    pub refunds: Vec<(PlanPosition, Refund)>,
    /// The store keys of the shared rules.
    pub store_keys: StoreKeys,
}

/// A rule with `on_outage = "refuse"` cannot be counted.
#[derive(Debug)]
pub struct Unavailable;

/// A flag for each rule of a charge plan; seldom more than a few.
pub(super) struct RuleFlags(SmallVec<[bool; 8]>);

/// The progress of a decision.
pub(super) struct DecisionProgress {
    /// 0: the enforced rules; then one group for each shadow rule.
    pub(super) group: usize,
    pub(super) decision: Option<Decision>,
    /// For each rule, whether it is counted without the store. In decisions, only shared rules that apply to the request are;
    /// queries that read usage set all if the store fails.
    pub(super) without_store: RuleFlags,
    pub(super) refunds: Vec<(PlanPosition, Refund)>,
    pub(super) rounds: u32,
    /// If set, only these layers of a delayed request are charged, again.
    recharged: Option<Vec<LayerRef>>,
    /// Whether the refusal has been charged already.
    has_charged_refusal: bool,
    /// Whether the store also decides layers for which tokens could be leased.
    pub(super) ignores_leases: bool,
}

/// What a decision needs next.
pub(super) enum NextStep {
    Done(Decision),
    Unavailable,
    /// Tokens for the counters that lack some; charges from `first` on are undone.
    Fetch {
        first: ChargePosition,
    },
    /// The store decides these layers.
    Send {
        first: ChargePosition,
        layers: Vec<LayerRef>,
    },
    /// Reservations in later windows, for full rules.
    Reserve {
        first: ChargePosition,
        layers: Vec<LayerRef>,
    },
}

/// The store's reply to the layers sent.
pub(super) enum SendResult {
    /// With the refunds.
    Granted(Vec<(PlanPosition, Refund)>),
    Refused,
    /// The named windows are not open at the server.
    OtherWindow,
    /// No reply, or no call was made. The rules of that server continue without the store.
    Failed,
}

impl RuleFlags {
    pub fn any(&self) -> bool {
        self.0.contains(&true)
    }

    pub fn set_all(&mut self) {
        self.0.fill(true);
    }
}

impl Index<PlanPosition> for RuleFlags {
    type Output = bool;

    fn index(&self, position: PlanPosition) -> &bool {
        &self.0[position.index()]
    }
}

impl IndexMut<PlanPosition> for RuleFlags {
    fn index_mut(&mut self, position: PlanPosition) -> &mut bool {
        &mut self.0[position.index()]
    }
}

impl DecisionProgress {
    pub(super) fn new(charge_plan: &ChargePlan) -> DecisionProgress {
        DecisionProgress {
            group: 0,
            decision: None,
            without_store: RuleFlags(SmallVec::from_elem(false, charge_plan.rules().len())),
            refunds: Vec::new(),
            rounds: 0,
            recharged: None,
            has_charged_refusal: false,
            ignores_leases: false,
        }
    }

    /// The enforced layers of the request at a time, or those that are charged again.
    fn layers(&self, charge_plan: &ChargePlan, context: &mut DecisionContext, now_ms: u64) -> Vec<LayerRef> {
        match &self.recharged {
            Some(layers) => charge_plan.layers_at(layers, context, now_ms),
            None => charge_plan.enforced_layers_of(context, now_ms),
        }
    }

    /// Whether a refusal counts in this decision. A delayed request that is refused after all counts after its refund.
    fn counts_refusal(&self) -> bool {
        self.recharged.is_none()
    }

    /// Sets how each rule is counted in the next step.
    fn set_counting_modes(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) {
        charge_plan.set_counting_modes(|position| self.without_store[position], &mut context.sharing.counting_modes);
        for (position, mode) in context.sharing.counting_modes.enumerate_mut().filter(|_| self.ignores_leases) {
            if *mode == CountingMode::Leased && !charge_plan.rule(position).is_sharded() {
                *mode = CountingMode::Remote;
            }
        }
    }

    /// Whether a rule with `on_outage = "refuse"` cannot be counted.
    fn is_unavailable(&self, charge_plan: &ChargePlan, layers: &[LayerRef]) -> bool {
        layers
            .iter()
            .filter(|layer_ref| self.without_store[layer_ref.position])
            .any(|layer_ref| charge_plan.rule_of(*layer_ref).rule.on_outage == OnOutage::Refuse)
    }
}

impl SharedCounters {
    /// Decides a request by the keys in `context`. `store_key` returns the store key of a rule.
    pub fn begin(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) -> BeginResult {
        context.clear();
        let mut progress = DecisionProgress::new(charge_plan);
        let next = self.advance(charge_plan, context, &StoreKeys::new(), &mut progress);
        let mut is_unclear = false;
        if let NextStep::Done(Decision::Refused) = next {
            self.add_layers_not_sent(charge_plan, context, &progress, &store_key);
            is_unclear = SharedCounters::unclear_windows(charge_plan, context).next().is_some()
                || self.starts_store_penalty(charge_plan, context);
        }
        match next {
            NextStep::Done(decision) if !is_unclear => {
                self.follow_decision(charge_plan, context, &progress, &decision, store_key);
                BeginResult::Decided(decision)
            }
            NextStep::Unavailable => BeginResult::Unavailable,
            next => {
                let is_shared = |position| {
                    charge_plan.rule(position).rule.is_shared() && context.inputs.keyed_requests[position].is_some()
                };
                let store_key = |position| if is_shared(position) { store_key(position) } else { None };
                BeginResult::Pending(Box::new(SharedDecision {
                    store_keys: charge_plan.rules().ids().map(store_key).collect(),
                    shared: Rc::clone(self),
                    rule_set: Arc::clone(charge_plan.rule_set()),
                    context: context.clone(),
                    progress,
                    next: Some(next),
                    deadline: Instant::from_std(self.clock.instant()) + self.timeout,
                }))
            }
        }
    }

    /// Whether a refusal starts a penalty in the store: another gateway may have started it before, so that it ends earlier.
    fn starts_store_penalty(&self, charge_plan: &ChargePlan, context: &DecisionContext) -> bool {
        let is_in_store = |position: &ChargePosition| context.result.charges[*position].mode == CountingMode::Remote;
        charge_plan.has_penalties()
            && !self.breaker.is_any_open()
            && charge_plan.new_penalties(context, ChargePosition::FIRST).iter().any(is_in_store)
    }

    /// States when leased tokens of an admitted request come back; after a refusal, of the enforced rules or of shadow rules, does
    /// what the rules want.
    fn follow_decision(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        progress: &DecisionProgress,
        decision: &Decision,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        if !matches!(decision, Decision::Refused) {
            charge_plan.state_first_returns(&self.table, context);
        }
        if matches!(decision, Decision::Refused) || !context.result.shadowed.is_empty() {
            drop(self.start_penalties(charge_plan, context, &store_key));
            if progress.counts_refusal() && !progress.has_charged_refusal {
                self.charge_refused_request(charge_plan, context, progress, &store_key);
            }
            self.recheck(charge_plan, context, store_key);
        }
    }

    /// Charges a request that was refused for a lack of slots, or after its delay by the layers `refusing`, in rules that count refusals, and
    /// starts penalties of full windows. `context` has the usage of its counters.
    pub fn charge_refusal(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        refusing: &[LayerRef],
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        let progress = DecisionProgress { ignores_leases: true, ..DecisionProgress::new(charge_plan) };
        progress.set_counting_modes(charge_plan, context);
        // A peek knows nothing of what the store has refused.
        let modes = &context.sharing.counting_modes;
        context.result.charges.retain(|charge| modes[charge.layer.position] != CountingMode::Remote);
        self.add_layers_not_sent(charge_plan, context, &progress, &store_key);
        context.set_full(refusing);
        // A refusal that cannot wait states the penalties that are known to start. The calls go on.
        drop(self.start_checks(charge_plan, context, &store_key));
        drop(self.start_penalties(charge_plan, context, &store_key));
        self.charge_refused_request(charge_plan, context, &progress, store_key);
    }

    /// Charges layers of a delayed request again whose windows have ended since.
    pub fn recharge(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        layers: Vec<LayerRef>,
        mut context: DecisionContext,
        store_keys: StoreKeys,
    ) -> Box<SharedDecision> {
        context.clear();
        let progress = DecisionProgress { recharged: Some(layers), ..DecisionProgress::new(charge_plan) };
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let (shared, rule_set) = (Rc::clone(self), Arc::clone(charge_plan.rule_set()));
        Box::new(SharedDecision { shared, rule_set, context, store_keys, progress, next: None, deadline })
    }

    /// Continues until the request is decided or has to wait.
    pub(super) fn advance(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        store_keys: &StoreKeys,
        progress: &mut DecisionProgress,
    ) -> NextStep {
        loop {
            let shadow = progress.group.checked_sub(1).map(|nth| charge_plan.shadow_rules().get(nth).copied());
            let clock = || self.clock.now().unix_ms;
            let now = DecisionTime::read(&clock);
            let layers = match shadow {
                None => progress.layers(charge_plan, context, now.unix_ms),
                Some(_) if progress.recharged.is_some() => {
                    return NextStep::Done(progress.decision.take().unwrap_or(Decision::Refused));
                }
                Some(None) => return NextStep::Done(progress.decision.take().unwrap_or(Decision::Refused)),
                Some(Some(position)) => match context.inputs.keyed_requests[position] {
                    Some(keyed_request) => charge_plan.layers_of_rule(position, keyed_request.variant).collect(),
                    None => Vec::new(),
                },
            };
            progress.set_counting_modes(charge_plan, context);
            // Another request may have opened the window meanwhile.
            let keyed_requests = &context.inputs.keyed_requests;
            let is_closed = |layer_ref: &LayerRef| {
                let keyed_request = keyed_requests[layer_ref.position];
                self.is_opened_by_fetch(charge_plan.layer(*layer_ref), keyed_request, now.unix_ms)
            };
            context.sharing.without_lease.retain(is_closed);
            if shadow.is_none() && progress.is_unavailable(charge_plan, &layers) {
                self.metrics.decided_in_outage(OutageDecision::Refused);
                return NextStep::Unavailable;
            }
            let first = context.result.charges.next_id();
            context.sharing.first_shard_receipt = context.result.shard_receipts.len();
            let step = charge_plan.decide_locally(&layers, &self.table, now, context, shadow.is_none());
            let decision = match step {
                LocalDecision::MissingTokens => {
                    context.return_layer_buffer(layers);
                    return NextStep::Fetch { first };
                }
                LocalDecision::Decided(decision) => decision,
            };
            if shadow.is_none() {
                self.count_outage_decisions(charge_plan, progress);
            }
            match (decision, shadow.flatten()) {
                (Decision::Refused, Some(position)) => {
                    charge_plan.charge_refusal(&self.table, context, first);
                    context.result.shadowed.push(position);
                }
                (Decision::Refused, None)
                    if charge_plan.may_be_delayed(context)
                        && context.sharing.counting_modes.as_slice().contains(&CountingMode::Leased) =>
                {
                    return NextStep::Reserve { first, layers };
                }
                (Decision::Refused, None) => {
                    context.return_layer_buffer(layers);
                    if progress.counts_refusal() {
                        charge_plan.charge_refusal(&self.table, context, first);
                    }
                    return NextStep::Done(Decision::Refused);
                }
                (admitted, shadow) => {
                    self.prefetch(charge_plan, context);
                    if self.unreported.has_any_worker_some() {
                        charge_plan.add_local_usage(&self.table, context, first);
                    }
                    self.record_unreported(charge_plan, context, first, store_keys);
                    if shadow.is_none() {
                        progress.decision = Some(admitted);
                    }
                    let remote_layers = self.layers_to_send(&layers, context, progress);
                    if !remote_layers.is_empty() {
                        return NextStep::Send { first, layers: remote_layers };
                    }
                }
            }
            context.return_layer_buffer(layers);
            progress.group += 1;
        }
    }

    /// Counts decisions made without the store in the metrics.
    fn count_outage_decisions(&self, charge_plan: &ChargePlan, progress: &DecisionProgress) {
        for (_, rule) in charge_plan.compiled_rules().filter(|(position, _)| progress.without_store[*position]) {
            match rule.rule.on_outage {
                OnOutage::Local => self.metrics.decided_in_outage(OutageDecision::Local),
                OnOutage::Allow => self.metrics.decided_in_outage(OutageDecision::Allowed),
                OnOutage::Refuse => {}
            }
        }
    }

    /// The layers that the store decides in this step.
    fn layers_to_send(
        &self,
        layers: &[LayerRef],
        context: &DecisionContext,
        progress: &DecisionProgress,
    ) -> Vec<LayerRef> {
        let is_sent = |layer_ref: &&LayerRef| {
            context.sharing.counting_mode(**layer_ref) == Some(CountingMode::Remote)
                && !progress.without_store[layer_ref.position]
                && context.inputs.keyed_requests[layer_ref.position].is_some()
        };
        layers.iter().filter(is_sent).copied().collect()
    }
}

impl SharedDecision {
    /// Waits as needed, and decides.
    pub async fn decide(mut self: Box<Self>, charge_plan: &ChargePlan) -> Result<SharedOutcome, Unavailable> {
        let shared = Rc::clone(&self.shared);
        loop {
            let next = match self.next.take() {
                Some(next) => next,
                None => {
                    let SharedDecision { context, store_keys, progress, .. } = &mut *self;
                    shared.advance(charge_plan, context, store_keys, progress)
                }
            };
            match next {
                NextStep::Done(decision) => {
                    if matches!(decision, Decision::Refused) && self.progress.counts_refusal() {
                        self.complete_refusal(charge_plan).await;
                    }
                    let SharedDecision { context, store_keys, progress, .. } = &mut *self;
                    let store_key = |rule| store_keys.get(rule).cloned().flatten();
                    shared.follow_decision(charge_plan, context, progress, &decision, store_key);
                    if let Decision::Refused = decision {
                        shared.refund_later(progress.refunds.drain(..).map(|(_, refund)| refund).collect());
                    }
                    let (context, store_keys, refunds) = (take(context), take(store_keys), take(&mut progress.refunds));
                    return Ok(SharedOutcome { decision, context, refunds, store_keys });
                }
                // Dropping the decision refunds what was charged.
                NextStep::Unavailable => return Err(Unavailable),
                NextStep::Fetch { first } => self.next = self.fetch_lacking(charge_plan, first).await,
                NextStep::Send { first, layers } => {
                    if let Some(refused) = self.charge_in_store(charge_plan, first, &layers).await {
                        self.next = refused;
                    }
                }
                NextStep::Reserve { first, layers } => {
                    self.next = Some(self.reserve(charge_plan, first, &layers).await)
                }
            }
        }
    }

    /// Adds the layers that were not sent to the store, and finds out which sliding windows are full, where that starts a penalty, and
    /// when the penalties end. The refusal counts also if the client leaves meanwhile.
    async fn complete_refusal(&mut self, charge_plan: &ChargePlan) {
        let SharedDecision { shared, context, store_keys, progress, .. } = self;
        let store_key = |rule| store_keys.get(rule).cloned().flatten();
        shared.add_layers_not_sent(charge_plan, context, progress, store_key);
        let mut calls = shared.start_checks(charge_plan, context, store_key);
        calls.extend(shared.start_penalties(charge_plan, context, store_key));
        if calls.is_empty() {
            return;
        }
        shared.charge_refused_request(charge_plan, context, progress, store_key);
        progress.has_charged_refusal = true;
        let began = Instant::from_std(shared.clock.instant());
        while !calls.is_empty() {
            for (position, call) in calls {
                let usage = before_deadline(self.deadline, call).await;
                if usage.is_none() {
                    self.record_silence(self.context.result.charges[position].layer.position, began);
                }
                let Some(Ok(Some(usage))) = usage else { continue };
                let charge = &mut self.context.result.charges[position];
                charge.is_full = !usage.admits(charge.request);
                let is_penalty = charge_plan.layer(charge.layer).is_penalty();
                charge.usage = match charge_plan.rule_of(charge.layer).rule.count_refused && !is_penalty {
                    // Until what the refusal takes comes back too.
                    true => Usage { used: usage.used.max(charge.usage.used), end_ms: charge.usage.end_ms },
                    false => usage,
                };
            }
            // Those of windows that were found full.
            let SharedDecision { shared, context, store_keys, .. } = self;
            let store_key = |rule| store_keys.get(rule).cloned().flatten();
            calls = shared.start_penalties(charge_plan, context, store_key);
        }
    }

    /// Refuses the charges from `first` on, which are undone already. `None`: a shadow rule, which only records the
    /// refusal.
    pub(super) fn refuse(&mut self, charge_plan: &ChargePlan, first: ChargePosition) -> Option<NextStep> {
        charge_plan.state_capacity_of_leases(&mut self.context, first);
        let shadow = self.progress.group.checked_sub(1).and_then(|nth| charge_plan.shadow_rules().get(nth).copied());
        if let Some(position) = shadow {
            self.context.result.shadowed.push(position);
            self.progress.group += 1;
            charge_plan.charge_refusal(&self.shared.table, &mut self.context, first);
            return None;
        }
        let now_ms = self.shared.clock.now().unix_ms;
        self.context.result.decided_ms = now_ms;
        if !charge_plan.may_be_delayed(&self.context) {
            return Some(self.refuse_here(charge_plan, first));
        }
        let layers = self.progress.layers(charge_plan, &mut self.context, now_ms);
        Some(NextStep::Reserve { first, layers })
    }

    /// Refuses the request in its enforced rules, whose charges begin at `first`: it is charged in layers that are counted here, of
    /// rules with `count_refused`.
    pub(super) fn refuse_here(&mut self, charge_plan: &ChargePlan, first: ChargePosition) -> NextStep {
        if self.progress.counts_refusal() {
            charge_plan.charge_refusal(&self.shared.table, &mut self.context, first);
        }
        NextStep::Done(Decision::Refused)
    }

    /// The store key of a rule; `None` if the rule is not shared or does not apply.
    pub(super) fn store_key(&self, rule: PlanPosition) -> Option<Rc<str>> {
        self.store_keys.get(rule).cloned().flatten()
    }

    /// Starts another round for these rules. `true`: the rules continue without the store, because there were too many
    /// rounds, or a server is unreachable.
    pub(super) fn gives_up(&mut self, rules: &[PlanPosition]) -> bool {
        self.progress.rounds += 1;
        if self.progress.rounds > ROUNDS_MAX || self.is_past_deadline() {
            self.skip_store(rules);
            return true;
        }
        self.skip_unreachable(rules)
    }

    /// Whether the deadline has passed.
    pub(super) fn is_past_deadline(&self) -> bool {
        self.progress.rounds > ROUNDS_WITHOUT_DEADLINE
            && Instant::from_std(self.shared.clock.instant()) >= self.deadline
    }

    /// Lets rules whose server is unreachable continue without the store; `true` if there are some.
    pub(super) fn skip_unreachable(&mut self, rules: &[PlanPosition]) -> bool {
        if !self.shared.breaker.is_any_open() {
            return false;
        }
        let mut is_skipped = false;
        for rule in rules {
            let Some(store_key) = self.store_key(*rule) else { continue };
            if self.shared.is_key_unreachable(&store_key) {
                self.progress.without_store[*rule] = true;
                is_skipped = true;
            }
        }
        is_skipped
    }

    pub(super) fn skip_store(&mut self, rules: &[PlanPosition]) {
        rules.iter().for_each(|rule| self.progress.without_store[*rule] = true);
    }

    /// Lets rules continue without the server that they have waited for since `began`.
    pub(super) fn time_out(&mut self, rules: &[PlanPosition], began: Instant) {
        self.skip_store(rules);
        if let Some(rule) = rules.first() {
            self.record_silence(*rule, began);
        }
    }

    /// Records that the server of a rule has not replied since `began`.
    fn record_silence(&self, rule: PlanPosition, began: Instant) {
        // A server that replied a moment ago is reachable.
        if Instant::from_std(self.shared.clock.instant()) < began + self.shared.timeout / 2 {
            return;
        }
        if let Some(store_key) = self.store_key(rule) {
            self.shared.record_timeout(self.shared.server_of_key(&store_key));
        }
    }

    /// Lets the store decide these layers, after all others were charged. `Some`: the charges are undone, and the
    /// decision continues with that step, or from the beginning.
    async fn charge_in_store(
        &mut self,
        charge_plan: &ChargePlan,
        first: ChargePosition,
        layers: &[LayerRef],
    ) -> Option<Option<NextStep>> {
        let now_ms = self.shared.clock.now().unix_ms;
        let first_remote = charge_plan.add_prepared_charges(layers, &self.shared.table, now_ms, &mut self.context);
        let is_refused = match self.send_layers(charge_plan, first_remote).await {
            SendResult::Granted(refunds) => {
                self.progress.refunds.extend(refunds);
                if self.progress.group == 0 {
                    self.recharge_ended_windows(first_remote, |_layer_ref| true);
                }
                self.progress.group += 1;
                return None;
            }
            SendResult::Refused => true,
            SendResult::OtherWindow | SendResult::Failed => false,
        };
        let shared = Rc::clone(&self.shared);
        shared.undo(charge_plan.rule_set(), &mut self.context, first, Vec::new());
        if !is_refused {
            self.context.truncate(first);
            return Some(None);
        }
        self.context.subtract_costs(first, first_remote);
        Some(self.refuse(charge_plan, first))
    }
}

impl Drop for SharedDecision {
    /// A decision that is dropped before its end refunds all its charges.
    fn drop(&mut self) {
        let refunds = self.progress.refunds.drain(..).map(|(_, refund)| refund).collect();
        self.shared.undo(&self.rule_set, &mut self.context, ChargePosition::FIRST, refunds);
    }
}

/// Awaits `future` until `deadline`, and reads what has arrived by then.
pub(super) async fn before_deadline<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    tokio::select! {
        biased;
        done = &mut future => return Some(done),
        () = tokio::time::sleep_until(deadline) => {}
    }
    // The worker itself may have been late: data that is already in the socket is read before the timeout is declared.
    for _ in 0..4 {
        tokio::time::sleep(Duration::ZERO).await;
        let arrived = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(done) = arrived {
            return Some(done);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::circuit_breaker::FAILURES_MAX;
    use super::super::decision_queries::KeyQuery;
    use super::super::reconnecting::ServerId;
    use super::super::test_worker::{
        ACCOUNT_KEY, HOUR_KEY, HOUR_MS, KEY, START_MS, TestWorker, acquire, leased, local, named, run, sharded,
    };
    use super::*;
    use transom_limiter::handles::{Handle, RuleId};
    use transom_limiter::rule::{OnLimit, Rule, Sharing};
    use transom_limiter::window::Windows;

    const DELAY: OnLimit = OnLimit::Delay { max_delay_ms: 2 * HOUR_MS, max_waiting: 9 };

    #[test]
    fn only_shared_rules_that_apply_have_a_key_in_the_store() {
        run(async {
            let rules = [local("9/hour"), leased(&["9/hour"]), named("exempt", leased(&["9/hour"]))];
            let worker = TestWorker::new(&rules).await;
            let mut context = worker.context("a", 1);
            context.inputs.keyed_requests[PlanPosition::at(2)] = None;
            let texts = worker.store_keys("a");
            let begun = worker.shared.begin(&worker.charge_plan, &mut context, |i| texts[i].clone());
            let BeginResult::Pending(pending) = begun else { panic!("the store is asked") };
            assert_eq!(pending.store_keys, [None, Some("r|a".into()), None]);
        });
    }

    #[test]
    fn an_outage_concerns_only_shared_rules() {
        run(async {
            for (on_outage, is_admitted, decided) in [
                (OnOutage::Local, Some(true), [1, 0, 0]),
                (OnOutage::Allow, Some(true), [0, 1, 0]),
                (OnOutage::Refuse, None, [0, 0, 1]),
            ] {
                let local = Rule { on_outage: OnOutage::Refuse, ..local("9/hour") };
                let worker = TestWorker::new(&[local, Rule { on_outage, ..leased(&["9/hour"]) }]).await;
                let now = worker.clock.instant();
                worker.shared.breaker.record_failure(ServerId::ONLY, FAILURES_MAX, now, Duration::ZERO);
                assert_eq!(worker.decide("a", 1).await, is_admitted);
                assert_eq!(["local", "allowed", "refused"].map(|policy| worker.decided_in_outage(policy)), decided);
            }
        });
    }

    #[test]
    fn the_decision_api_leases_only_for_sharded_counters() {
        run(async {
            for (rule, leases) in [(leased(&["4000/hour"]), false), (sharded("4000/hour"), true)] {
                let worker = TestWorker::new(&[rule]).await;
                let query = KeyQuery {
                    charge_plan: &worker.charge_plan,
                    inputs: worker.context("a", 1).inputs,
                    store_keys: worker.store_keys("a"),
                };
                for _ in 0..2 {
                    let Ok((Decision::Admitted, _)) = worker.shared.limit(&query).await else { panic!("admitted") };
                }
                assert_eq!(worker.tokens("fetched") > 0, leases);
            }
        });
    }

    #[test]
    fn a_request_that_was_refused_before_is_charged() {
        run(async {
            let worker = TestWorker::new(&[Rule { count_refused: true, ..leased(&["5/hour"]) }]).await;
            let (_, mut context) = worker.outcome("a", 2).await.unwrap();
            worker.settled_calls().await;
            let texts = worker.store_keys("a");
            worker.shared.charge_refusal(&worker.charge_plan, &mut context, &[], |rule| texts[rule].clone());
            assert_eq!(worker.settled_calls().await, [acquire(KEY, [2, 2, 0])]);
        });
    }

    #[test]
    fn only_the_layers_of_an_ended_window_are_charged_again() {
        run(async {
            let shadow = named("shadow", Rule { on_limit: OnLimit::Shadow, ..leased(&["9/hour"]) });
            let exact = Rule { sharing: Sharing::Exact, ..leased(&["9/minute", "90/hour"]) };
            let worker = TestWorker::new(&[exact, Rule { sharing: Sharing::Exact, ..shadow }]).await;
            let layers = vec![worker.layer_ref(0, 1)];
            let (context, texts) = (worker.context("a", 2), worker.store_keys("a"));
            let pending = worker.shared.recharge(&worker.charge_plan, layers, context, texts);
            assert!(pending.deadline > Instant::from_std(worker.clock.instant()));
            let outcome = pending.decide(&worker.charge_plan).await.unwrap();
            assert!(matches!(outcome.decision, Decision::Admitted));
            assert_eq!(worker.settled_calls().await, [acquire(HOUR_KEY, [2, 2, 0])]);
        });
    }

    #[test]
    fn a_delayed_request_opens_a_window() {
        run(async {
            let mut opened = leased(&["9/hour"]);
            opened.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let exact = |rule| Rule { sharing: Sharing::Exact, ..rule };
            let slow = Rule { on_limit: DELAY, ..leased(&["5/hour"]) };
            let rules = [opened, exact(named("wide", leased(&["5/hour"]))), exact(named("slow", slow))];
            let worker = TestWorker::new(&rules).await;
            worker.store.set_used("transom:{slow|a}:account", 5);
            let (decision, context) = worker.outcome("a", 1).await.unwrap();
            assert!(matches!(decision, Decision::Delayed { .. }), "{decision:?} {:?}", context.result.charges);
            assert_eq!(worker.store.used("transom:{r|a}:first-request"), 1);
        });
    }

    #[test]
    fn a_full_rule_that_delays_reserves_in_a_later_window() {
        run(async {
            for (on_limit, is_delayed) in [(DELAY, true), (OnLimit::Refuse, false)] {
                let worker = TestWorker::new(&[Rule { on_limit, ..leased(&["5/hour"]) }]).await;
                for _ in 0..5 {
                    assert_eq!(worker.decide("a", 1).await, Some(true));
                    worker.settled_calls().await;
                }
                let (decision, _) = worker.outcome("a", 1).await.unwrap();
                assert_eq!(matches!(decision, Decision::Delayed { .. }), is_delayed);
                // Not known to be full before the store replies.
                for sharing in [Sharing::Lease, Sharing::Exact] {
                    let worker = TestWorker::new(&[Rule { on_limit, sharing, ..leased(&["5/hour"]) }]).await;
                    worker.store.set_used(ACCOUNT_KEY, 5);
                    worker.store.set_used(KEY, 5);
                    let (decision, _) = worker.outcome("a", 1).await.unwrap();
                    assert_eq!(matches!(decision, Decision::Delayed { .. }), is_delayed);
                    assert_eq!(matches!(decision, Decision::Refused), !is_delayed);
                }
            }
        });
    }

    #[test]
    fn a_query_that_cannot_wait_reserves_nothing() {
        run(async {
            for sharing in [Sharing::Lease, Sharing::Exact] {
                let mut rule = Rule { on_limit: DELAY, sharing, ..leased(&["5/hour"]) };
                rule.layers[0].reserve = 5;
                let mut worker = TestWorker::new(&[rule]).await;
                worker.charge_plan = worker.rule_set.immediate_plan([RuleId::at(0)], true);
                worker.store.set_used(ACCOUNT_KEY, 5);
                // The second request knows the usage.
                assert_eq!([worker.decide("a", 1).await, worker.decide("a", 1).await], [Some(false); 2]);
                assert_eq!(worker.store.used(ACCOUNT_KEY), 5);
            }
        });
    }

    #[test]
    fn windows_that_end_before_a_delayed_request_is_admitted_are_charged_again() {
        run(async {
            let exact = Rule { sharing: Sharing::Exact, ..leased(&["90/minute"]) };
            let worker = TestWorker::new(&[exact, Rule { on_limit: DELAY, ..local("1/hour") }]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            let (decision, _) = worker.outcome("a", 1).await.unwrap();
            let Decision::Delayed { until_ms, recharge, .. } = decision else { panic!("{decision:?}") };
            assert_eq!((until_ms, recharge), (START_MS + HOUR_MS, vec![worker.layer_ref(0, 0)]));
        });
    }

    #[test]
    fn a_decision_gives_up_after_its_deadline_or_too_many_rounds() {
        run(async {
            let (worker, rule) = (TestWorker::new(&[leased(&["9/hour"])]).await, PlanPosition::at(0));
            let now = Instant::from_std(worker.clock.instant());
            let later = now + Duration::from_secs(60);
            for (rounds, deadline, gives_up) in [
                (0, now, false),
                (ROUNDS_WITHOUT_DEADLINE - 1, now, false),
                (ROUNDS_WITHOUT_DEADLINE, now, true),
                (ROUNDS_WITHOUT_DEADLINE, later, false),
                (ROUNDS_MAX - 1, later, false),
                (ROUNDS_MAX, later, true),
            ] {
                let mut pending = worker.pending("a", 1);
                (pending.progress.rounds, pending.deadline) = (rounds, deadline);
                assert_eq!(pending.gives_up(&[rule]), gives_up, "{rounds}");
                assert_eq!((pending.progress.without_store[rule], pending.progress.rounds), (gives_up, rounds + 1));
            }
        });
    }

    #[test]
    fn a_rule_of_an_unreachable_server_continues_without_it() {
        run(async {
            let (worker, rule) = (TestWorker::new(&[leased(&["9/hour"])]).await, PlanPosition::at(0));
            let mut pending = worker.pending("a", 1);
            assert!(!pending.skip_unreachable(&[rule]) && !pending.gives_up(&[rule]));
            let now = worker.clock.instant();
            worker.shared.breaker.record_failure(ServerId::ONLY, FAILURES_MAX, now, Duration::ZERO);
            assert!(!pending.skip_unreachable(&[]) && !pending.progress.without_store[rule]);
            assert!(pending.skip_unreachable(&[rule]) && pending.progress.without_store[rule]);
            pending.progress.without_store[rule] = false;
            assert!(pending.gives_up(&[rule]) && pending.progress.without_store[rule]);
        });
    }

    #[test]
    fn only_a_server_that_was_silent_for_half_of_the_timeout_has_failed() {
        run(async {
            let (worker, rule) = (TestWorker::new(&[leased(&["9/hour"])]).await, PlanPosition::at(0));
            let timeout = worker.shared.timeout;
            let now = Instant::from_std(worker.clock.instant());
            for (waited, failures) in [(Duration::ZERO, 0), (timeout * 4 / 10, 0), (timeout * 6 / 10, 1)] {
                let mut pending = worker.pending("a", 1);
                pending.time_out(&[rule], now - waited);
                assert!(pending.progress.without_store[rule]);
                assert_eq!(worker.calls("timeout"), failures, "{waited:?}");
            }
        });
    }
}
