//! Decisions of the decision API (`POST /v1/limit`, `/v1/check`, `/v1/value`, `/v1/reset`). They are few and need the
//! usage of all gateways, so that every query is a call of the store and nothing is leased.

use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::lease_sizing::counter_id;
use super::scripts::{AcquireReply, CounterRequest, Refund, TOKENS_MAX};
use super::shared_counters::{SharedCounters, counter_of_receipt, keyed_layers};
use super::shared_decision::{DecisionProgress, SendResult, SharedDecision, SharedOutcome, Unavailable};
use transom_limiter::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::{DecisionContext, DecisionInputs};
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::delay::remaining_cost;
use transom_limiter::handles::{ChargePosition, PlanPosition};
use transom_limiter::rule_set::CountingMode;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::window_kind::{AcquireRequest, Usage, WindowKind};

/// A query about keys, one for each rule of its charge plan.
pub struct KeyQuery<'a> {
    pub charge_plan: &'a ChargePlan,
    pub inputs: DecisionInputs,
    /// The keys in the store; `None` for rules that are not shared.
    pub store_keys: StoreKeys,
}

impl KeyQuery<'_> {
    /// The context of a decision without the store.
    pub(super) fn local_context(&self) -> DecisionContext {
        let mut context = DecisionContext::default();
        context.inputs = self.inputs.clone();
        context
    }
}

/// Where the usage of keys is from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsageSource {
    /// The table of this gateway, which has all counters of the keys.
    Table,
    /// The store.
    Store,
    /// The counters are in the store, which cannot be reached: what this gateway knows.
    StoreAway,
}

/// The usage of a key.
pub struct KeyState {
    pub context: DecisionContext,
    /// Whether a request of the query's cost would be admitted.
    pub admits: bool,
    pub source: UsageSource,
    /// Whether a refusal needs no reply of the store: it cannot be reached, or has no part in the decision.
    pub refuses_without_store: bool,
}

impl SharedCounters {
    fn new_decision(self: &Rc<Self>, query: &KeyQuery<'_>) -> Box<SharedDecision> {
        let mut context = query.local_context();
        context.inputs.own_shard = self.own_shard;
        let mut progress = DecisionProgress::new(query.charge_plan);
        progress.ignores_leases = true;
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let store_keys = query.store_keys.clone();
        let (shared, rule_set) = (Rc::clone(self), Arc::clone(query.charge_plan.rule_set()));
        Box::new(SharedDecision { shared, rule_set, context, store_keys, progress, next: None, deadline })
    }

    /// Decides and charges.
    pub async fn limit(self: &Rc<Self>, query: &KeyQuery<'_>) -> Result<(Decision, DecisionContext), Unavailable> {
        let SharedOutcome { decision, context, .. } = self.new_decision(query).decide(query.charge_plan).await?;
        Ok((decision, context))
    }

    /// Decides without charging: whether a request is admitted now or in a later window, and when.
    pub async fn check(self: &Rc<Self>, query: &KeyQuery<'_>) -> Result<(Decision, DecisionContext), Unavailable> {
        let outcome = self.new_decision(query).decide(query.charge_plan).await?;
        let SharedOutcome { decision, context, refunds, .. } = outcome;
        if !matches!(decision, Decision::Refused) {
            let receipts: Vec<_> = context.all_receipts().collect();
            let (rule_set, now_ms) = (query.charge_plan.rule_set(), self.clock.now().unix_ms);
            let layers = || keyed_layers(query.charge_plan, &query.inputs.keyed_requests);
            self.refund_receipts(
                receipts.into_iter().rev(),
                u32::MAX,
                |charged| counter_of_receipt(rule_set, layers(), charged),
                |charged| rule_set.refund(&[charged], u32::MAX, &self.table, now_ms),
            );
            self.refund(refunds.into_iter().map(|(_, refund)| refund).collect()).await;
        }
        Ok((decision, context))
    }

    /// Reads the usage of keys that are all shared.
    pub async fn value(self: &Rc<Self>, query: &KeyQuery<'_>) -> Result<KeyState, Unavailable> {
        let (mut pending, _) = self.read_usage(query).await;
        self.find_return_times(query, &mut pending.context, false).await;
        if pending.progress.without_store.any() {
            let (charge_plan, source) = (query.charge_plan, UsageSource::StoreAway);
            let context = &mut pending.context;
            let clock = || self.clock.now().unix_ms;
            charge_plan.peek(&self.table, DecisionTime::read(&clock), context);
            charge_plan.set_counting_modes(|_position| false, &mut context.sharing.counting_modes);
            let refuses_without_store =
                charge_plan.refuses_without_store(&self.table, DecisionTime::read(&clock), context);
            // What is known of other gateways, plus what was counted here. A request spends leased tokens first.
            let layers: Vec<LayerRef> = context.result.charges.iter().map(|charge| charge.layer).collect();
            let now_ms = self.clock.now().unix_ms;
            let lacks_lease = |position: PlanPosition| {
                let mut charges = context.result.charges.iter().filter(|charge| charge.layer.position == position);
                charges.any(|charge| {
                    let unspent = self.unspent_tokens(query, charge.layer, now_ms);
                    unspent == 0 || unspent < u64::from(charge.request.cost)
                })
            };
            charge_plan.set_counting_modes(lacks_lease, &mut context.sharing.counting_modes);
            if context.sharing.counting_modes.as_slice().contains(&CountingMode::Remote) {
                let state = KeyState { context: take(context), admits: false, source, refuses_without_store };
                return refuses_without_store.then_some(state).ok_or(Unavailable);
            }
            let admits = charge_plan.peek_local_fallback(&layers, &self.table, DecisionTime::read(&clock), context);
            let context = take(&mut pending.context);
            return Ok(KeyState { context, admits, source, refuses_without_store });
        }
        let admits = pending.context.result.charges.iter().all(|charge| charge.usage.admits(charge.request));
        let context = take(&mut pending.context);
        Ok(KeyState { context, admits, source: UsageSource::Store, refuses_without_store: false })
    }

    /// Asks when a full sliding counter has as many tokens as the request needs. A read only tells when the next one returns.
    /// `is_refused`: after a refusal, which takes what is left where refusals count.
    pub(super) async fn find_return_times(
        self: &Rc<Self>,
        query: &KeyQuery<'_>,
        context: &mut DecisionContext,
        is_refused: bool,
    ) {
        let KeyQuery { charge_plan, inputs, store_keys, .. } = query;
        let now_ms = self.clock.now().unix_ms;
        for charge in context.result.charges.iter_mut() {
            let layer_ref = charge.layer;
            let (Some(keyed_request), Some(store_key)) =
                (inputs.keyed_requests[layer_ref.position], &store_keys[layer_ref.position])
            else {
                continue;
            };
            let is_counted = is_refused && charge_plan.rule_of(layer_ref).rule.count_refused;
            if !charge.is_full && !is_counted || charge.request.kind != WindowKind::Sliding {
                continue;
            }
            let base_request =
                self.counter_request(charge_plan.rule_set(), layer_ref.id, keyed_request, store_key, now_ms);
            let taken = if is_counted { remaining_cost(charge) } else { 0 };
            let needed = u64::from(charge.request.cost) + u64::from(taken);
            // Leased tokens are spent first.
            let needed = needed.saturating_sub(self.unspent_tokens(query, layer_ref, now_ms));
            // Nothing is taken under a limit that is lower by the tokens needed, and the reply is the same.
            let ceiling = base_request.ceiling.saturating_sub(needed);
            let need = needed.saturating_sub(base_request.ceiling);
            let request = CounterRequest { need, ceiling, ..base_request };
            if let Ok(AcquireReply::Refused { counters, .. }) = self.acquire(std::slice::from_ref(&request)).await
                && let Some(reply) = counters.first()
            {
                charge.usage.end_ms = reply.available_ms;
            }
        }
    }

    /// Resets keys that are all shared, in the store and here. Tokens that other gateways have leased can still be spent.
    pub async fn reset(self: &Rc<Self>, query: &KeyQuery<'_>) -> Result<KeyState, Unavailable> {
        let KeyQuery { charge_plan, .. } = query;
        let (pending, mut refunds) = self.read_usage(query).await;
        // A reset made only here would be undone when the store returns.
        if pending.progress.without_store.any() {
            return Err(Unavailable);
        }
        refunds.iter_mut().for_each(|refund| refund.deletes = true);
        self.refund(refunds).await;
        let now_ms = self.clock.now().unix_ms;
        let rule_set = charge_plan.rule_set();
        rule_set.reset(&self.table, now_ms, &pending.context);
        for (charge, layer_ref) in pending.context.result.charges.iter().map(|charge| (charge, charge.layer)) {
            let Some(keyed_request) = query.inputs.keyed_requests[layer_ref.position] else { continue };
            let counter = charge_plan.layer(layer_ref).counter(keyed_request);
            self.table.reset(counter.lease(), charge.request.leased(), rule_set.time(now_ms));
            let mut order = self.usage_order.lock(counter_id(counter));
            order.change_reported(|_| 0);
            if let Some((end_ms, _)) = self.table.known_usage(counter, now_ms) {
                self.table.set_known_usage(counter, end_ms, 0, now_ms);
            }
            let (known, layer) = (Usage { used: 0, ..charge.usage }, charge_plan.layer(layer_ref));
            self.table.note_debt(counter, known, layer.request, rule_set.time(now_ms));
        }
        self.value(query).await
    }

    /// The tokens of a layer that are leased here and not spent. The store counts them as used.
    fn unspent_tokens(&self, query: &KeyQuery<'_>, layer_ref: LayerRef, now_ms: u64) -> u64 {
        let KeyQuery { charge_plan, inputs, .. } = query;
        let counter =
            inputs.keyed_requests[layer_ref.position].map(|request| charge_plan.layer(layer_ref).counter(request));
        counter.map_or(0, |counter| self.table.leased_tokens(counter, now_ms).into())
    }

    /// Adds the usage of all shards but the first of a sharded counter.
    async fn add_shards(
        self: &Rc<Self>,
        query: &KeyQuery<'_>,
        pending: &mut SharedDecision,
        refunds: &mut Vec<Refund>,
    ) {
        let KeyQuery { charge_plan, inputs, store_keys, .. } = query;
        let now_ms = self.clock.now().unix_ms;
        for charge in pending.context.result.charges.iter_mut() {
            let layer_ref = charge.layer;
            let layer = charge_plan.layer(layer_ref);
            let suffix = charge_plan.rule_of(layer_ref).suffix(layer_ref.id);
            if layer.shards == 1 || pending.progress.without_store.any() {
                continue;
            }
            let (Some(keyed_request), Some(store_key)) =
                (inputs.keyed_requests[layer_ref.position], &store_keys[layer_ref.position])
            else {
                continue;
            };
            for shard in 1..layer.shards {
                let base_request =
                    self.counter_request(charge_plan.rule_set(), layer_ref.id, keyed_request, store_key, now_ms);
                let request =
                    CounterRequest { key_base: self.key_base(store_key, suffix, shard), used_min: 0, ..base_request };
                match self.acquire(std::slice::from_ref(&request)).await {
                    Ok(AcquireReply::Granted { counters: replies, .. }) => {
                        let used = replies.iter().fold(0, |sum: u64, reply| sum.saturating_add(reply.used));
                        charge.usage.used = charge.usage.used.saturating_add(used);
                        refunds.extend(replies.iter().map(|reply| request.refund_target(*reply).refund(TOKENS_MAX)));
                    }
                    Ok(AcquireReply::Refused { .. } | AcquireReply::OtherWindow { .. }) | Err(_) => {
                        pending.progress.without_store.set_all()
                    }
                }
            }
        }
    }

    /// Reads the usage of each layer; also returns the refunds that would give back all of it.
    async fn read_usage(self: &Rc<Self>, query: &KeyQuery<'_>) -> (Box<SharedDecision>, Vec<Refund>) {
        let KeyQuery { charge_plan, .. } = query;
        let mut pending = self.new_decision(query);
        let now_ms = self.clock.now().unix_ms;
        let layers: Vec<LayerRef> = charge_plan.enforced_layers_of(&mut pending.context, now_ms);
        charge_plan.add_prepared_charges(&layers, &self.table, now_ms, &mut pending.context);
        let charges = pending.context.result.charges.iter_mut();
        // Nothing is requested, so nothing is refused: neither during a penalty, nor where a limit was lowered.
        let read_only = |charge: &mut LayerCharge| {
            let unchanged = charge.request;
            (charge.request.cost, charge.request.ceiling) = (0, TOKENS_MAX);
            unchanged
        };
        let unchanged: Vec<AcquireRequest> = charges.map(read_only).collect();
        let mut refunds: Vec<Refund> = match pending.send_layers(charge_plan, ChargePosition::FIRST).await {
            SendResult::Granted(refunds) => {
                refunds.into_iter().map(|(_, refund)| Refund { tokens: TOKENS_MAX, ..refund }).collect()
            }
            SendResult::Refused | SendResult::OtherWindow | SendResult::Failed => {
                pending.progress.without_store.set_all();
                Vec::new()
            }
        };
        self.add_shards(query, &mut pending, &mut refunds).await;
        let now_ms = self.clock.now().unix_ms;
        for (charge, request) in pending.context.result.charges.iter_mut().zip(unchanged) {
            (charge.request.cost, charge.request.ceiling) = (request.cost, request.ceiling);
            let unspent = self.unspent_tokens(query, charge.layer, now_ms);
            charge.usage.used = charge.usage.used.saturating_sub(unspent);
            charge.is_full = !charge.usage.admits(charge.request);
        }
        (pending, refunds)
    }
}
