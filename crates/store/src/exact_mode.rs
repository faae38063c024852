//! Charges that the store decides itself, request by request: exact rules, and reservations in later windows.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::client::StoreError;
use super::lease_sizing::{ChargeId, LeaseRecord, Refusal, counter_id};
use super::scripts::{AcquireReply, CounterReply, CounterRequest, Refund, TOKENS_MAX, refunds_of};
use super::shared_counters::{SharedCounters, counter_of_receipt};
use super::shared_decision::{NextStep, SendResult, SharedDecision, before_deadline};
use super::token_fetch::{WindowCheck, need_once_refused};
use transom_limiter::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use transom_limiter::decision::{Decision, Waiter};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, IdVec, PlanPosition, RuleId};
use transom_limiter::rule::OnOutage;
use transom_limiter::rule_set::{CompiledLayer, CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::{AcquireRequest, Usage, WindowKind};

/// Attempts to reserve when other requests interfere.
const ATTEMPTS_MAX: u32 = 16;

/// The result of all calls of one request.
enum ChargeOutcome {
    Granted(Vec<CounterReply>),
    /// Nothing is charged. Replies for the counters examined so far.
    Refused(Vec<CounterReply>),
    OtherWindow,
    Failed,
}

/// The calls of one request, made in turn.
struct PendingCharge {
    outcome: oneshot::Receiver<ChargeOutcome>,
    /// Number of requests granted so far: the next is in flight, or has failed.
    granted: Rc<Cell<usize>>,
}

/// The layers of a request that reserves.
struct SplitLayers {
    /// Layers of full rules that are counted here.
    local: Vec<LayerRef>,
    /// Layers that the store decides: those of full rules, and of exact rules.
    remote: Vec<LayerRef>,
    /// All other layers.
    others: Vec<LayerRef>,
}

/// A layer that the store is asked to decide.
struct SentLayer {
    charge: ChargePosition,
    layer: LayerRef,
    keyed_request: KeyedRequest,
    counter: Counter,
    request: CounterRequest,
    /// A lower bound of its usage, if the store may have lost counts; otherwise 0.
    least: u64,
    /// Usage that the store does not know yet; of a layer of penalties, a penalty that it may not know.
    local: Usage,
    /// The known usage when it was sent, without reports in flight: the store may execute them after the call, if other workers have sent
    /// them.
    known: u64,
}

impl SharedCounters {
    /// Charges all or nothing. Counters on different servers are charged in turn, server by server, and refunded if one
    /// refuses. If the caller is dropped, the charges are refunded.
    fn start_charge(self: &Rc<Self>, requests: Vec<CounterRequest>) -> PendingCharge {
        let (sender, receiver) = oneshot::channel();
        let (shared, granted) = (Rc::clone(self), Rc::new(Cell::new(0)));
        let progress = Rc::clone(&granted);
        tokio::task::spawn_local(async move {
            let outcome = shared.charge_calls(&requests, &[], &progress).await;
            if let Err(ChargeOutcome::Granted(replies)) = sender.send(outcome) {
                shared.refund(refunds_of(&requests, &replies)).await;
            }
        });
        PendingCharge { outcome: receiver, granted }
    }

    /// `charges`: the charges in the background of the requests, if they are. `granted` follows the number of granted requests.
    async fn charge_calls(
        self: &Rc<Self>,
        requests: &[CounterRequest],
        charges: &[(ChargeId, Counter)],
        granted: &Cell<usize>,
    ) -> ChargeOutcome {
        let (mut replies, mut rest) = (Vec::new(), requests);
        let outcome = loop {
            let (call, others) = rest.split_at(self.first_call_len(rest));
            if call.is_empty() {
                return ChargeOutcome::Granted(replies);
            }
            let of_call = charges.get(replies.len()..replies.len() + call.len()).unwrap_or_default();
            match self.acquire_charges(call, of_call).await {
                Ok(AcquireReply::Granted { counters: more, .. }) => {
                    replies.extend(more);
                    granted.set(replies.len());
                }
                Ok(AcquireReply::Refused { counters: seen, .. }) => {
                    let mut all = replies.clone();
                    all.extend(seen);
                    break ChargeOutcome::Refused(all);
                }
                Ok(AcquireReply::OtherWindow { time_ms }) if self.agrees_on_time(time_ms) => {
                    break ChargeOutcome::OtherWindow;
                }
                // The keys of the call are now sent apart, because the server rejects one of them.
                Err(StoreError::Key(_)) if self.first_call_len(rest) < call.len() => continue,
                Ok(AcquireReply::OtherWindow { .. }) | Err(_) => break ChargeOutcome::Failed,
            }
            rest = others;
        };
        self.refund(refunds_of(&requests[..replies.len()], &replies)).await;
        outcome
    }

    /// How many of these, from the first on, fit in one call.
    pub(super) fn first_call_len(&self, requests: &[CounterRequest]) -> usize {
        let Some(first) = requests.first() else { return 0 };
        requests.iter().take_while(|request| self.store.can_share_a_call(&first.key_base, &request.key_base)).count()
    }

    /// Undoes all charges of a request, here and in the store. Reservations that later ones depend on are refunded when
    /// those have ended.
    pub(super) fn undo(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        context: &mut DecisionContext,
        first: ChargePosition,
        refunds: Vec<Refund>,
    ) {
        let now_ms = self.clock.now().unix_ms;
        let receipts = context.take_receipts(first).into_iter().rev();
        let DecisionContext { result, inputs, .. } = context;
        let counter_of = |charged: &ShardReceipt| {
            let layers = result.charges.iter().filter_map(|charge| {
                let LayerRef { position, id } = charge.layer;
                inputs.keyed_requests[position].map(|keyed_request| (id, keyed_request))
            });
            counter_of_receipt(rule_set, layers, charged)
        };
        self.refund_receipts(receipts, u32::MAX, counter_of, |charged| {
            self.deferred_refunds.refund([charged], charged.receipt.end_ms(), rule_set, &self.table, now_ms);
        });
        self.refund_later(refunds);
    }

    /// Refunds in the background.
    pub fn refund_later(self: &Rc<Self>, refunds: Vec<Refund>) {
        self.begin_refunds(&refunds);
        self.send_later(refunds);
    }

    /// As [`SharedCounters::refund_later`], of noted refunds.
    pub(super) fn send_later(self: &Rc<Self>, refunds: Vec<Refund>) {
        if !refunds.is_empty() {
            let shared = Rc::clone(self);
            tokio::task::spawn_local(async move { shared.send_refunds(refunds).await });
        }
    }

    /// Charges what a request cost beyond its first charge, whatever remains, in the background; locally, if the store
    /// is unreachable. The known usage has the charge at once.
    pub fn overdraw(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        rule: RuleId,
        keyed_request: KeyedRequest,
        store_key: &Rc<str>,
    ) {
        if self.is_key_unreachable(store_key) {
            return self.overdraw_locally(rule_set, rule, keyed_request, store_key);
        }
        let requests = self.overdraw_requests(rule_set, rule, keyed_request, store_key);
        let charge = self.new_charge();
        for (layer, request) in layers_of_key(rule_set, rule, keyed_request).zip(&requests) {
            self.begin_charge(charge, rule_set, layer, layer.counter(keyed_request), request);
        }
        let (shared, rule_set, store_key) = (Rc::clone(self), Arc::clone(rule_set), Rc::clone(store_key));
        tokio::task::spawn_local(async move {
            let mut requests = requests;
            let mut charged = None;
            let layers = layers_of_key(&rule_set, rule, keyed_request);
            let charges: Vec<_> = layers.map(|layer| (charge, layer.counter(keyed_request))).collect();
            for _ in 0..ATTEMPTS_MAX {
                match shared.charge_calls(&requests, &charges, &Cell::new(0)).await {
                    ChargeOutcome::Granted(replies) => charged = Some(replies),
                    // The script refuses no request without a ceiling.
                    ChargeOutcome::Refused(_) => charged = Some(Vec::new()),
                    ChargeOutcome::OtherWindow => {
                        requests = shared.overdraw_requests(&rule_set, rule, keyed_request, &store_key);
                        continue;
                    }
                    ChargeOutcome::Failed => {}
                }
                break;
            }
            let is_charged = charged.is_some();
            match charged {
                Some(replies) => shared.note_overdraft(&rule_set, rule, keyed_request, &requests, &replies),
                // Before the known usage loses the tokens.
                None => shared.overdraw_locally(&rule_set, rule, keyed_request, &store_key),
            }
            let layers = layers_of_key(&rule_set, rule, keyed_request);
            layers.for_each(|layer| shared.end_charge(charge, layer.counter(keyed_request), is_charged));
        });
    }

    /// Records the usage after an overdraft.
    fn note_overdraft(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        rule: RuleId,
        keyed_request: KeyedRequest,
        requests: &[CounterRequest],
        replies: &[CounterReply],
    ) {
        for (layer, (request, reply)) in
            layers_of_key(rule_set, rule, keyed_request).zip(requests.iter().zip(replies.iter().copied()))
        {
            self.note_used_tokens(rule_set, layer, layer.counter(keyed_request), request, reply);
        }
    }

    /// Records the usage after tokens were charged that are already used, whatever was left. Leased tokens of a counter whose
    /// limit is then exceeded pay a part of the debt: the store gets them back, and decides about the next request.
    pub(super) fn note_used_tokens(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        request: &CounterRequest,
        reply: CounterReply,
    ) {
        let target = request.refund_target(reply);
        let is_exceeded = reply.used > u64::from(layer.capacity);
        let withdrawn = if is_exceeded { self.table.withdraw(counter, target.end_ms, u32::MAX) } else { 0 };
        let used = reply.used.saturating_sub(u64::from(withdrawn));
        if withdrawn > 0 {
            // Noted before the known usage loses these tokens.
            self.refund_later(vec![target.refund(withdrawn.into())]);
        }
        self.note_store_usage(rule_set, layer, counter, reply, used, 0);
    }

    /// The store requests for tokens that are already used.
    fn overdraw_requests(
        &self,
        rule_set: &RuleSet,
        rule: RuleId,
        keyed_request: KeyedRequest,
        store_key: &str,
    ) -> Vec<CounterRequest> {
        let (cost, now_ms) = (u64::from(keyed_request.cost), self.clock.now().unix_ms);
        let request = |layer| {
            let base_request = self.counter_request(rule_set, layer, keyed_request, store_key, now_ms);
            CounterRequest { need: cost, ceiling: TOKENS_MAX, ..base_request }
        };
        rule_set.rules[rule].variant(keyed_request.variant).map(request).collect()
    }

    /// Starts the penalties of a refused request that are counted by the store, in the background; locally, if the store is
    /// unreachable. Another gateway may have started them: the results have their usage.
    pub(super) fn start_penalties(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) -> Vec<(ChargePosition, WindowCheck)> {
        let mut started = Vec::new();
        if !charge_plan.has_penalties() {
            return started;
        }
        let (now_ms, refused_ms) = (self.clock.now().unix_ms, context.result.decided_ms);
        for position in charge_plan.new_penalties(context, ChargePosition::FIRST) {
            let charge = &mut context.result.charges[position];
            let of = charge.layer;
            let (Some(keyed_request), Some(store_key)) =
                (context.inputs.keyed_requests[of.position], store_key(of.position))
            else {
                continue;
            };
            let rule_set = charge_plan.rule_set();
            let windows = rule_set.windows_of(charge_plan.layer(of));
            charge.usage = Usage { used: 1, end_ms: refused_ms + windows.typical_ms() };
            charge.is_full = true;
            let counter = charge_plan.layer(of).counter(keyed_request);
            self.raise_known_usage(counter, charge.usage.end_ms, 1, now_ms);
            let (shared, rule_set) = (Rc::clone(self), Arc::clone(rule_set));
            let start = tokio::task::spawn_local(async move {
                shared.start_store_penalty(&rule_set, of.id.rule, keyed_request, &store_key).await
            });
            started.push((position, start));
        }
        started
    }

    /// Starts the penalty of a key by a rule in the store, unless it lasts already; locally, if the store is unreachable. Returns its
    /// usage.
    pub(super) async fn start_store_penalty(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        rule: RuleId,
        keyed_request: KeyedRequest,
        store_key: &str,
    ) -> Option<Usage> {
        let layer = rule_set.rules[rule].penalty?;
        let now_ms = self.clock.now().unix_ms;
        let base_request = self.counter_request(rule_set, layer, keyed_request, store_key, now_ms);
        // The known usage has the penalty already.
        let request = CounterRequest { need: 1, ceiling: 1, used_min: 0, ..base_request };
        match self.acquire(&[request]).await {
            Ok(AcquireReply::Granted { counters, .. } | AcquireReply::Refused { counters, .. }) => {
                let (reply, layer) = (*counters.first()?, rule_set.layer(layer));
                self.note_store_usage(rule_set, layer, layer.counter(keyed_request), reply, reply.used, 0);
                Some(Usage { used: 1, end_ms: reply.end_ms })
            }
            Ok(AcquireReply::OtherWindow { .. }) | Err(_) => {
                let clock = || self.clock.now().unix_ms;
                rule_set.start_penalty(rule, keyed_request, &self.table, DecisionTime::read(&clock))
            }
        }
    }

    /// A penalty that the store may not know: one that was started while the store was unreachable, or, if `least` is
    /// positive, one that the store may have lost.
    fn known_penalty(
        &self,
        charge_plan: &ChargePlan,
        layer_ref: LayerRef,
        keyed_request: KeyedRequest,
        least: u64,
    ) -> Usage {
        let counter = charge_plan.layer(layer_ref).counter(keyed_request);
        let known = self.table.known_usage(counter, self.clock.now().unix_ms).filter(|_| least > 0);
        let known = known.map_or_else(Usage::default, |(end_ms, used)| Usage { used: u64::from(used), end_ms });
        self.used_locally(charge_plan.rule_set(), layer_ref.id, keyed_request).joined_penalty(known)
    }

    /// Fills in a charge that the store decides: its `usage` is the usage that the store last reported, and `is_full` says
    /// whether the store would refuse by this usage.
    pub(super) fn set_known_usage_of(
        &self,
        charge_plan: &ChargePlan,
        charge: &mut LayerCharge,
        keyed_request: KeyedRequest,
        now_ms: u64,
    ) {
        let layer = charge_plan.layer(charge.layer);
        let counter = layer.counter(keyed_request);
        let known_usage = self.table.known_usage(counter, now_ms);
        // Without a reply, a window without usage is assumed.
        let (end_ms, used) = known_usage.unwrap_or((charge.usage.end_ms.max(charge.request.end_ms), 0));
        charge.usage = Usage { used: u64::from(used), end_ms };
        let local_usage = self.used_locally(charge_plan.rule_set(), charge.layer.id, keyed_request);
        if layer.request.kind == WindowKind::Sliding {
            // Tokens come back before the known usage ends.
            let refusal = self.known_refusal(counter, charge.request.cost.into(), charge.request, now_ms);
            charge.is_full = refusal.is_some();
            charge.usage.used = charge.usage.used.saturating_add(local_usage.used);
            charge.usage = refusal.unwrap_or(charge.usage);
            return;
        }
        match layer.is_penalty() {
            true => charge.usage = charge.usage.joined_penalty(local_usage),
            false => charge.usage.used = charge.usage.used.saturating_add(local_usage.used),
        }
        let used = charge.usage.used.max(charge.request.floor);
        charge.is_full = used + u64::from(charge.request.cost) > charge.request.ceiling;
    }

    fn overdraw_locally(
        &self,
        rule_set: &Arc<RuleSet>,
        rule: RuleId,
        keyed_request: KeyedRequest,
        store_key: &Rc<str>,
    ) {
        let compiled_rule = &rule_set.rules[rule];
        if compiled_rule.rule.on_outage == OnOutage::Local {
            rule_set.charge_excess(rule, keyed_request, &self.table, self.clock.now().unix_ms);
            compiled_rule
                .variant(keyed_request.variant)
                .for_each(|layer| self.record_unreported_layer(rule_set, layer, keyed_request, store_key));
        }
    }
}

/// The layers of a rule in which a request counts.
fn layers_of_key(
    rule_set: &RuleSet,
    rule: RuleId,
    keyed_request: KeyedRequest,
) -> impl Iterator<Item = &CompiledLayer> {
    let compiled_rule = &rule_set.rules[rule];
    compiled_rule.variant(keyed_request.variant).map(|layer| compiled_rule.layer(layer))
}

impl SharedDecision {
    /// Sends the charges from `first` on to the store and records its reply.
    pub(super) async fn send_layers(&mut self, charge_plan: &ChargePlan, first: ChargePosition) -> SendResult {
        let shared = Rc::clone(&self.shared);
        let charges = self.context.result.charges[first..].iter();
        if self.gives_up(&charges.map(|charge| charge.layer.position).collect::<Vec<_>>()) {
            return SendResult::Failed;
        }
        let now_ms = shared.clock.now().unix_ms;
        let sent = self.layers_to_send_from(charge_plan, first, now_ms);
        if !self.progress.ignores_leases && self.is_known_exhausted(charge_plan, first, now_ms) {
            return SendResult::Refused;
        }
        let began = Instant::from_std(shared.clock.instant());
        let requests: Vec<CounterRequest> = sent.iter().map(|sent| sent.request.clone()).collect();
        let PendingCharge { outcome: receiver, granted } = shared.start_charge(requests.clone());
        let outcome = before_deadline(self.deadline, receiver).await;
        // Only rules whose server has not replied continue without the store.
        let failed_rules = || {
            let granted = granted.get();
            let failed = &sent[granted..granted + shared.first_call_len(&requests[granted..])];
            failed.iter().map(|sent| sent.layer.position).collect::<Vec<_>>()
        };
        let (refused, replies) = match outcome {
            Some(Ok(ChargeOutcome::Granted(replies))) => (false, replies),
            Some(Ok(ChargeOutcome::Refused(replies))) => (true, replies),
            Some(Ok(ChargeOutcome::OtherWindow)) => return SendResult::OtherWindow,
            Some(Ok(ChargeOutcome::Failed) | Err(_)) => {
                self.skip_store(&failed_rules());
                return SendResult::Failed;
            }
            None => {
                self.time_out(&failed_rules(), began);
                return SendResult::Failed;
            }
        };
        let mut is_late = false;
        for (sent, reply) in sent.iter().zip(&replies) {
            is_late |= self.note_reply(charge_plan, sent, *reply, refused);
        }
        let refunds = refunds_of(&requests, &replies).into_iter().zip(&sent);
        let refunds: Vec<_> = refunds.map(|(refund, sent)| (sent.layer.position, refund)).collect();
        if is_late {
            self.return_grants(&sent, &replies, refunds);
            return SendResult::Refused;
        }
        // The store has charged windows in which other limits apply.
        if !refused && charge_plan.has_other_limits(&mut self.context, first) {
            self.return_grants(&sent, &replies, refunds);
            return SendResult::OtherWindow;
        }
        if refused {
            let unasked = sent.get(replies.len()).map_or(self.context.result.charges.next_id(), |sent| sent.charge);
            self.set_usage_of_unasked(charge_plan, unasked);
            return SendResult::Refused;
        }
        SendResult::Granted(refunds)
    }

    /// What the store is asked about the charges from `first` on.
    fn layers_to_send_from(&mut self, charge_plan: &ChargePlan, first: ChargePosition, now_ms: u64) -> Vec<SentLayer> {
        let SharedDecision { shared, context, store_keys, .. } = self;
        let rule_set = charge_plan.rule_set();
        let mut sent = Vec::new();
        for position in context.result.charges.ids_from(first) {
            let charge = &mut context.result.charges[position];
            let layer_ref = charge.layer;
            let (Some(keyed_request), Some(Some(store_key))) =
                (context.inputs.keyed_requests[layer_ref.position], store_keys.get(layer_ref.position))
            else {
                continue;
            };
            if charge.usage.end_ms == 0 {
                // Until the store replies, a window without usage is assumed.
                charge.usage.end_ms = charge.request.end_ms;
            }
            let base_request = shared.counter_request(rule_set, layer_ref.id, keyed_request, store_key, now_ms);
            shared.record_local_usage(rule_set, layer_ref.id, keyed_request, store_key, base_request.ceiling);
            let (layer, least) = (charge_plan.layer(layer_ref), base_request.used_min);
            let local = match layer.is_penalty() {
                true => shared.known_penalty(charge_plan, layer_ref, keyed_request, least),
                false => Usage { used: u64::from(layer.capacity).saturating_sub(base_request.ceiling), end_ms: 0 },
            };
            if layer.is_penalty() {
                charge.request.floor = local.used;
            }
            let request = CounterRequest {
                need: u64::from(charge.request.cost),
                ceiling: charge.request.ceiling.saturating_sub(local.used),
                used_min: least.max(charge.request.floor),
                need_once_refused: need_once_refused(charge_plan, layer_ref, charge.request.cost),
                reserved_after_ms: if charge.request.ceiling > layer.capacity.into() { charge.usage.end_ms } else { 0 },
                ..base_request
            };
            let counter = layer.counter(keyed_request);
            let known: u64 = shared.table.known_usage(counter, now_ms).map_or(0, |(_, known)| known.into());
            let reports = shared.usage_order.lock(counter_id(counter)).get().unanswered.reports;
            let known = known.saturating_sub(reports);
            sent.push(SentLayer {
                charge: position,
                layer: layer_ref,
                keyed_request,
                counter,
                request,
                least,
                local,
                known,
            });
        }
        sent
    }

    /// Records the reply of the store to one layer. `true`: the reply is late, and grants what was counted here since.
    fn note_reply(&mut self, charge_plan: &ChargePlan, sent: &SentLayer, reply: CounterReply, refused: bool) -> bool {
        let (shared, charge) = (&self.shared, &mut self.context.result.charges[sent.charge]);
        let SentLayer { counter, least, local, known, .. } = *sent;
        let used = if refused { reply.used.saturating_sub(reply.granted) } else { reply.used };
        let (layer, now_ms) = (charge_plan.layer(sent.layer), shared.clock.now().unix_ms);
        let kind = layer.request.kind;
        if layer.is_penalty() {
            charge.usage = Usage { used: used.min(1), end_ms: reply.available_ms }.joined_penalty(local);
            charge.is_full = refused && charge.usage.used > 0;
            // A penalty that the store does not know keeps its end.
            if used > 0 || local.used == 0 {
                shared.note_store_usage(charge_plan.rule_set(), layer, counter, reply, used, 0);
            }
            return false;
        }
        // If nothing was acquired, the reply is only what the store knows.
        let least = shared.known_usage(counter, reply.end_ms, least, sent.request.generation);
        if used >= least {
            shared.confirm_usage(charge_plan.rule_set(), layer, counter, reply.end_ms);
        }
        let is_lost = reply.used == 0 && least > 0;
        let used = used.max(least);
        let known_now: u64 = shared.table.known_usage(counter, now_ms).map_or(0, |(_, known)| known.into());
        let used = shared.note_store_usage(charge_plan.rule_set(), layer, counter, reply, used, 0);
        let is_counted_here = !refused && charge_plan.rule_of(sent.layer).rule.on_outage == OnOutage::Local;
        let local_now = match is_counted_here {
            true => shared.used_locally(charge_plan.rule_set(), sent.layer.id, sent.keyed_request).used,
            false => local.used,
        };
        let used = used.saturating_add(local_now);
        charge.usage = Usage { used, end_ms: reply.available_ms };
        // A window that the store has lost keeps its end: the reply states that of a window which would open now.
        let kept = shared.table.known_usage(counter, now_ms).filter(|_| is_lost && kind.is_opened_by_requests());
        charge.usage.end_ms = kept.map_or(charge.usage.end_ms, |(end_ms, _)| end_ms);
        // A late reply grants what the store had left when it executed the call; this gateway may have counted requests
        // locally since, and may have reported them: then they are part of the known usage.
        let is_more_known = known_now.saturating_add(local_now) > known.saturating_add(local.used);
        let is_late = is_counted_here && is_more_known && used > charge.request.ceiling;
        let needed = used.max(charge.request.floor).saturating_add(charge.request.cost.into());
        charge.is_full = is_late || refused && needed > charge.request.ceiling;
        if kind == WindowKind::Sliding {
            let (AcquireRequest { cost, limit, .. }, usage) = (charge.request, charge.usage);
            let refusal = Refusal { need: cost.into(), cost, limit, usage };
            shared.note_refusal(counter, charge.is_full.then_some(refusal));
        }
        is_late
    }

    /// Refunds what the store has granted for layers, and takes it out of their usage.
    fn return_grants(&mut self, sent: &[SentLayer], replies: &[CounterReply], refunds: Vec<(PlanPosition, Refund)>) {
        let (shared, result) = (&self.shared, &mut self.context.result);
        shared.refund_later(refunds.into_iter().map(|(_, refund)| refund).collect());
        for (sent, reply) in sent.iter().zip(replies) {
            let charge = &mut result.charges[sent.charge];
            charge.usage.used = charge.usage.used.saturating_sub(reply.granted);
            let end_ms = (sent.request.window.kind != WindowKind::Sliding).then_some(reply.end_ms);
            let tokens = u32::try_from(reply.granted).unwrap_or(u32::MAX);
            shared.lower_known_usage(sent.counter, end_ms, tokens);
        }
    }

    /// Sets the usage of the charges from `first` on to the known one: their servers were not asked, because one before has refused.
    fn set_usage_of_unasked(&mut self, charge_plan: &ChargePlan, first: ChargePosition) {
        let now_ms = self.shared.clock.now().unix_ms;
        for charge in &mut self.context.result.charges[first..] {
            if let Some(keyed_request) = self.context.inputs.keyed_requests[charge.layer.position] {
                self.shared.set_known_usage_of(charge_plan, charge, keyed_request, now_ms);
            }
        }
    }

    /// Whether the store is known to refuse the charges from `first` on; records the refusal then. Periodically returns
    /// `false` nevertheless, because a counter may have been reset, or tokens refunded.
    fn is_known_exhausted(&mut self, charge_plan: &ChargePlan, first: ChargePosition, now_ms: u64) -> bool {
        let shared = Rc::clone(&self.shared);
        let now = shared.clock.instant();
        let mut is_full = false;
        let keyed_requests = &self.context.inputs.keyed_requests;
        for charge in &mut self.context.result.charges[first..] {
            let Some(keyed_request) = keyed_requests[charge.layer.position] else { continue };
            shared.set_known_usage_of(charge_plan, charge, keyed_request, now_ms);
            let layer = charge_plan.layer(charge.layer);
            let counter = layer.counter(keyed_request);
            if charge.is_full {
                let period_ms = charge_plan.rule_set().windows_of(layer).typical_ms();
                let due = |record: &mut LeaseRecord| record.is_recheck_due(now, period_ms);
                if shared.leases.with_or_insert(counter, shared.own_shard, now, due) != Some(false) {
                    return false;
                }
                is_full = true;
            }
        }
        is_full
    }

    /// Reserves in later windows for the full rules that delay requests, and charges all other layers now.
    pub(super) async fn reserve(
        &mut self,
        charge_plan: &ChargePlan,
        first: ChargePosition,
        layers: &[LayerRef],
    ) -> NextStep {
        let shared = Rc::clone(&self.shared);
        let mut waiter: Option<Waiter> = None;
        let SplitLayers { local, remote, others } = self.split_layers(charge_plan, first, layers);
        let clock = || shared.clock.now().unix_ms;
        // Reservations count from the windows that were open when the rules were found full.
        let mut now = DecisionTime::starting_at(self.context.result.decided_ms, &clock);
        for _ in 0..ATTEMPTS_MAX {
            let now_ms = now.unix_ms;
            let time = charge_plan.time(now_ms);
            let Some(times) = charge_plan.admission_times(time, &self.context) else { break };
            if waiter.is_none() {
                match charge_plan.reserve_waiter(&self.context) {
                    Some(entered) => waiter = entered,
                    None => break,
                }
            }
            let usages: Vec<_> =
                self.context.result.charges.iter().map(|charge| (charge.layer, charge.usage)).collect();
            self.context.truncate(first);
            match charge_plan.decide_locally(&others, &shared.table, now, &mut self.context, false) {
                LocalDecision::Decided(Decision::Admitted) => {}
                LocalDecision::Decided(Decision::Refused | Decision::Delayed { .. }) => {
                    // Exact layers are added with their known usage, as after any refusal.
                    let mode = |layer_ref: &&LayerRef| self.context.sharing.counting_mode(**layer_ref);
                    let leased = remote.iter().filter(|layer_ref| mode(layer_ref) == Some(CountingMode::Leased));
                    let reserved: Vec<LayerRef> = local.iter().chain(leased).copied().collect();
                    let table = &shared.table;
                    let first_reserved = charge_plan.add_prepared_charges(&reserved, table, now_ms, &mut self.context);
                    charge_plan.state_usage(&usages, &mut self.context, first_reserved);
                    return self.refuse_here(charge_plan, first);
                }
                LocalDecision::MissingTokens => return NextStep::Fetch { first },
            }
            let first_local = charge_plan.add_prepared_charges(&local, &shared.table, now_ms, &mut self.context);
            let first_remote = charge_plan.add_prepared_charges(&remote, &shared.table, now_ms, &mut self.context);
            let until_ms = times.iter().copied().max().unwrap_or(now_ms);
            let again =
                charge_plan.request_future_windows(&times, &usages, time, &mut self.context, first..first_local);
            let sent =
                match charge_plan.acquire_prepared(&shared.table, now_ms, &mut self.context, first_local, first_remote)
                {
                    false => SendResult::Refused,
                    true if remote.is_empty() => SendResult::Granted(Vec::new()),
                    true => self.send_layers(charge_plan, first_remote).await,
                };
            if !matches!(sent, SendResult::Granted(_)) {
                shared.undo(charge_plan.rule_set(), &mut self.context, first, Vec::new());
            }
            match sent {
                SendResult::Granted(refunds) => {
                    shared.record_unreported(charge_plan, &self.context, first, &self.store_keys);
                    self.keep_reservations(refunds, &times, now_ms, first_remote);
                    self.progress.decision = Some(Decision::Delayed { until_ms, waiter, recharge: again });
                    self.recharge_ended_windows(first_remote, |layer_ref| times[layer_ref.position] <= now_ms);
                    self.progress.group = 1;
                    return self.resume(charge_plan);
                }
                SendResult::Refused => {
                    self.context.subtract_costs(first, first_local);
                    now = DecisionTime::read(&clock);
                    charge_plan.refresh_usage(&shared.table, now.unix_ms, &mut self.context, first_local);
                }
                SendResult::OtherWindow | SendResult::Failed => {
                    self.context.truncate(first);
                    return self.resume(charge_plan);
                }
            }
        }
        self.refuse_here(charge_plan, first)
    }

    /// Divides the layers of a request that reserves by what decides them.
    fn split_layers(&mut self, charge_plan: &ChargePlan, first: ChargePosition, layers: &[LayerRef]) -> SplitLayers {
        let full = self.full_rules(first);
        let SharedDecision { context, progress, .. } = self;
        charge_plan
            .set_counting_modes(|position| progress.without_store[position], &mut context.sharing.counting_modes);
        let layers = layers.iter().filter(|layer_ref| {
            context.inputs.keyed_requests[layer_ref.position].is_some() && !context.sharing.prepaid.contains(layer_ref)
        });
        let (mut local, mut remote, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for layer_ref in layers {
            let (mode, is_full) = (context.sharing.counting_mode(*layer_ref), full.contains(&layer_ref.position));
            match mode {
                Some(CountingMode::Local | CountingMode::LocalFallback) if is_full => local.push(*layer_ref),
                Some(CountingMode::Leased) if is_full => remote.push(*layer_ref),
                // The same call covers the exact rules.
                Some(CountingMode::Remote) if !progress.without_store[layer_ref.position] => remote.push(*layer_ref),
                _ => others.push(*layer_ref),
            }
        }
        SplitLayers { local, remote, others }
    }

    /// Keeps the refunds of what the store has charged from `first_remote` on.
    fn keep_reservations(
        &mut self,
        refunds: Vec<(PlanPosition, Refund)>,
        times: &IdVec<PlanPosition, u64>,
        now_ms: u64,
        first_remote: ChargePosition,
    ) {
        self.context.result.charges.iter_mut().for_each(|charge| charge.is_full = false);
        let used = self.context.result.charges[first_remote..].iter().map(|charge| charge.usage.used);
        let with_usage = refunds.into_iter().zip(used);
        // A refund of a reservation must not move later reservations.
        let guarded = |((rule, refund), used): ((PlanPosition, Refund), u64)| {
            let used_max = refund.used_max.or((times[rule] > now_ms).then_some(used));
            (rule, Refund { used_max, ..refund })
        };
        self.progress.refunds.extend(with_usage.map(guarded));
    }

    /// Records which open windows, of those that the store charged from `first_remote` on, end before the request is admitted.
    pub(super) fn recharge_ended_windows(
        &mut self,
        first_remote: ChargePosition,
        is_charged_now: impl Fn(&LayerRef) -> bool,
    ) {
        let Some(Decision::Delayed { until_ms, recharge: again, .. }) = &mut self.progress.decision else { return };
        let charged = self.context.result.charges[first_remote..].iter();
        let ends = charged.filter(|charge| is_charged_now(&charge.layer) && charge.usage.end_ms <= *until_ms);
        again.extend(ends.map(|charge| charge.layer));
    }

    fn resume(&mut self, charge_plan: &ChargePlan) -> NextStep {
        let SharedDecision { shared, context, store_keys, progress, .. } = self;
        Rc::clone(shared).advance(charge_plan, context, store_keys, progress)
    }

    fn full_rules(&self, first: ChargePosition) -> Vec<PlanPosition> {
        let full = self.context.result.charges[first..].iter().filter(|charge| charge.is_full);
        let mut rules: Vec<PlanPosition> = full.map(|charge| charge.layer.position).collect();
        rules.sort_unstable();
        rules.dedup();
        rules
    }
}
