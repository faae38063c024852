//! Fetches tokens for leases: what to request, the calls, and waiting for them.
//!
//! A request fetches the tokens that its counters lack, in as few calls as the servers allow, or waits for fetches in
//! flight; each counter has at most one. Calls go out together and do not wait for each other, so that one slow server
//! does not delay the others. Rules whose server does not reply continue without it.
//!
//! A call continues when no request waits for it any more: its tokens are deposited in the table for the next request.
//! A call whose result is unknown is never repeated. Where the table is full, the waiting request gets its tokens, or
//! the refusal, directly.

use std::rc::Rc;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::client::StoreError;
use super::lease_sizing::{ChargeId, InFlightFetch, LeaseRecord, Refusal, UndepositedTokens, counter_id};
use super::scripts::{AcquireReply, CounterReply, CounterRequest, RefundTarget};
use super::shared_counters::{SharedCounters, refund_used_max};
use super::shared_decision::{DecisionProgress, NextStep, ROUNDS_MAX, SharedDecision, before_deadline};
use super::unreported_usage::UnreportedCharge;
use transom_limiter::acquire::Charge;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision_context::{DecisionContext, DecisionResult};
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, LayerId, PlanPosition};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::rule::{OnOutage, Sharing};
use transom_limiter::rule_set::{CompiledLayer, CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::table::Counter;
use transom_limiter::window::Segments;
use transom_limiter::window_kind::{AcquireRequest, Usage, WindowKind};

/// Attempts to charge a refused request when other requests interfere.
const ATTEMPTS_MAX: u32 = 3;

/// A call that finds out the usage of a window; `None` without a reply.
pub(super) type WindowCheck = JoinHandle<Option<Usage>>;

/// A fetch of tokens for one counter.
pub struct TokenFetch {
    pub rule_set: Arc<RuleSet>,
    pub layer: LayerId,
    pub keyed_request: KeyedRequest,
    /// The layer's ordinary counter.
    pub counter: Counter,
    /// The key in the store.
    pub store_key: Rc<str>,
    pub shards: u32,
    pub request: CounterRequest,
}

impl SharedCounters {
    /// Starts the fetches, one call per server. The records refer to the calls until these end.
    pub(super) fn start_fetches(self: &Rc<Self>, fetches: Vec<TokenFetch>) -> Vec<Rc<InFlightFetch>> {
        let mut calls: Vec<Vec<TokenFetch>> = Vec::new();
        for fetch in fetches {
            // A sharded counter is fetched by itself, shard by shard.
            let fits = |call: &&mut Vec<TokenFetch>| {
                let is_same_call =
                    |first: &TokenFetch| self.store.can_share_a_call(&first.request.key_base, &fetch.request.key_base);
                fetch.shards == 1 && call.first().is_some_and(|first| first.shards == 1 && is_same_call(first))
            };
            match calls.iter_mut().find(fits) {
                Some(call) => call.push(fetch),
                None => calls.push(vec![fetch]),
            }
        }
        calls.into_iter().map(|call| self.start_fetch(call)).collect()
    }

    fn start_fetch(self: &Rc<Self>, call: Vec<TokenFetch>) -> Rc<InFlightFetch> {
        let in_flight = Rc::new(InFlightFetch::new(call.iter().map(|fetch| counter_id(fetch.counter)).collect()));
        for id in &in_flight.ids {
            self.leases.with_existing(*id, |record| record.in_flight = Some(Rc::clone(&in_flight)));
        }
        let (shared, started) = (Rc::clone(self), Rc::clone(&in_flight));
        tokio::task::spawn_local(async move {
            let has_reply = shared.fetch_tokens(&call, &started).await;
            started.ids.iter().for_each(|id| _ = shared.leases.with_existing(*id, LeaseRecord::end_fetch));
            started.finish(has_reply);
            // Waiting requests run now and take what they need; the rest is refunded.
            tokio::task::yield_now().await;
            let rest = started.undeposited.take();
            let rest = rest.iter().filter(|undeposited| undeposited.tokens > 0);
            shared.refund(rest.map(|undeposited| undeposited.refund_target.refund(undeposited.tokens)).collect()).await;
        });
        in_flight
    }

    async fn fetch_tokens(self: &Rc<Self>, call: &[TokenFetch], in_flight: &InFlightFetch) -> bool {
        if let [fetch] = call
            && fetch.shards > 1
        {
            return self.fetch_from_shards(fetch, in_flight).await;
        }
        let requests: Vec<CounterRequest> = call.iter().map(|fetch| fetch.request.clone()).collect();
        match self.acquire(&requests).await {
            Ok(AcquireReply::Granted { counters, .. } | AcquireReply::Refused { counters, .. }) => {
                call.iter()
                    .zip(counters)
                    .for_each(|(fetch, reply)| self.deposit_tokens(fetch, &fetch.request, reply, in_flight));
                true
            }
            Ok(AcquireReply::OtherWindow { time_ms }) => self.agrees_on_time(time_ms),
            // The keys of the call are now sent apart, because the server rejects one of them.
            Err(StoreError::Key(_)) if self.first_call_len(&requests) < requests.len() => {
                let mut has_reply = false;
                for fetch in call {
                    has_reply |= Box::pin(self.fetch_tokens(std::slice::from_ref(fetch), in_flight)).await;
                }
                has_reply
            }
            Err(_reported) => false,
        }
    }

    /// Fetches from the shards in turn until there are enough tokens, beginning with the shard that had tokens the last time.
    async fn fetch_from_shards(self: &Rc<Self>, fetch: &TokenFetch, in_flight: &InFlightFetch) -> bool {
        let (shards, whole) = (fetch.shards, u64::from(fetch.request.limit));
        let first =
            self.leases.with_existing(counter_id(fetch.counter), |record| record.shard).unwrap_or(self.own_shard)
                % shards;
        let (mut missing, mut used_max) = (fetch.request.need.max(1), 0);
        for i in 0..shards {
            let shard = (first + i) % shards;
            let part = part_of_shard(whole, shards, shard);
            let suffix = fetch.rule_set.rules[fetch.layer.rule].suffix(fetch.layer);
            let base = self.key_base(&fetch.store_key, suffix, shard);
            // The next shard may have what one shard lacks.
            let mut need = missing.min(part);
            let (request, replies) = loop {
                // Sharded counters have plain windows, whose limit the scripts do not read.
                let request = CounterRequest {
                    key_base: Rc::clone(&base),
                    ceiling: part,
                    need,
                    used_min: 0,
                    ..fetch.request.clone()
                };
                match self.acquire(std::slice::from_ref(&request)).await {
                    Ok(AcquireReply::Granted { counters, .. }) => break (request, counters),
                    // The shard has fewer tokens left.
                    Ok(AcquireReply::Refused { counters, .. }) => match counters.first() {
                        Some(seen) if seen.used < part && part - seen.used < need => need = part - seen.used,
                        _ => break (request, counters),
                    },
                    Ok(AcquireReply::OtherWindow { time_ms }) => return self.agrees_on_time(time_ms),
                    Err(_reported) => return false,
                }
            };
            // The known usage is that of all shards together.
            let request = CounterRequest { used_min: fetch.request.used_min, ..request };
            let Some(reply) = replies.first().copied() else { return false };
            // The total usage is only known when all shards have replied; until then the counter is not reported as
            // exhausted.
            used_max =
                reply.used.saturating_mul(u64::from(shards)).clamp(used_max, whole.saturating_sub(1).max(used_max));
            self.leases.with_existing(counter_id(fetch.counter), |record| record.shard = shard);
            self.deposit_tokens(fetch, &request, CounterReply { used: used_max, ..reply }, in_flight);
            missing = missing.saturating_sub(reply.granted);
            if missing == 0 {
                return true;
            }
            if i + 1 == shards {
                self.raise_known_usage(fetch.counter, reply.end_ms, fetch.request.limit, self.clock.now().unix_ms);
                let all = CounterReply { used: whole, ..reply };
                in_flight.refused.borrow_mut().push((counter_id(fetch.counter), all));
            }
        }
        true
    }

    /// Deposits granted tokens in the table.
    fn deposit_tokens(
        self: &Rc<Self>,
        fetch: &TokenFetch,
        request: &CounterRequest,
        reply: CounterReply,
        in_flight: &InFlightFetch,
    ) {
        let (now_ms, id) = (self.clock.now().unix_ms, counter_id(fetch.counter));
        // If nothing was acquired, the reply is only what the store knows.
        let known = self.known_usage(fetch.counter, reply.end_ms, request.used_min, request.generation);
        let has_lost_counts = reply.used < known;
        let used = reply.used.max(known);
        let layer = fetch.rule_set.layer(fetch.layer);
        let usage = self.note_store_usage(&fetch.rule_set, layer, fetch.counter, reply, used, reply.granted);
        let is_full = used.saturating_add(request.need) > request.ceiling;
        let is_question = request.need > 0 || request.want == 0;
        if is_question && reply.granted == 0 && is_full && fetch.shards == 1 {
            // With what is known beyond the reply: a refusal is remembered as long as the known usage stays the same.
            in_flight.refused.borrow_mut().push((id, CounterReply { used: used.max(usage), ..reply }));
        }
        let refund_target = request.refund_target(reply);
        let lease_end_ms = refund_target.end_ms;
        let former = self.leases.with_existing(id, |record| {
            if !has_lost_counts {
                record.generation = self.generation.get();
            }
            record.record_reply(reply.granted, lease_end_ms, is_question);
            record.refusal = record.refusal.filter(|_| reply.granted == 0);
            record.refund_target.replace(refund_target.clone())
        });
        if let Some(former) = former.flatten().filter(|former| former.end_ms < lease_end_ms) {
            self.discard_ended_lease(fetch.counter, &former, request.window);
        }
        let Ok(granted) = u32::try_from(reply.granted) else { return };
        if granted == 0 {
            return;
        }
        self.metrics.fetched(reply.granted);
        if request.window.kind == WindowKind::Sliding {
            self.table.note_first_return(fetch.counter, reply.available_ms, now_ms);
        }
        // Tokens of a window that has other limits were fetched under the limits of the one before.
        let excess = match fetch.rule_set.is_beyond_limits(fetch.layer, fetch.keyed_request.variant, reply.end_ms) {
            true => granted,
            false => self.excess_tokens(fetch, usage).min(granted),
        };
        if excess > 0 {
            self.refund_later(vec![refund_target.refund(excess.into())]);
            self.forget_returned_tokens(fetch.counter, &refund_target, excess);
        }
        let tokens = granted - excess;
        if tokens == 0 {
            return;
        }
        match self.table.deposit(fetch.counter, lease_end_ms, tokens, now_ms) {
            DepositResult::Stored => {}
            DepositResult::Full | DepositResult::Expired => {
                let capacity = fetch.rule_set.layer(fetch.layer).capacity;
                let rest = UndepositedTokens { id, tokens: tokens.into(), capacity, refund_target };
                in_flight.undeposited.borrow_mut().push(rest);
            }
        }
    }

    /// How many of the granted tokens exceed the limit. A late reply grants what the store had left when it executed the call; this
    /// gateway may have counted requests locally since. `usage`: the known usage, which includes the granted tokens.
    fn excess_tokens(&self, fetch: &TokenFetch, usage: u64) -> u32 {
        // The usage of a sharded counter is known only if all its shards are full.
        if fetch.shards > 1 {
            return 0;
        }
        let local = self.used_locally(&fetch.rule_set, fetch.layer, fetch.keyed_request).used;
        let capacity = fetch.rule_set.layer(fetch.layer).capacity;
        let excess = usage.saturating_add(local).saturating_sub(capacity.into());
        u32::try_from(excess).unwrap_or(u32::MAX)
    }

    /// Withdraws the tokens that are left of an ended window: those of plain windows have expired, the others are refunded.
    fn discard_ended_lease(self: &Rc<Self>, counter: Counter, former: &RefundTarget, window: StoreWindow) {
        let left = self.table.withdraw(counter, former.end_ms, u32::MAX);
        if !former.kind.outlasts_window() {
            self.metrics.expired(u64::from(left));
        } else if left > 0 {
            let is_counted = former.kind != WindowKind::Sliding
                || window.segments().expires_ms(former.number) > self.clock.now().unix_ms;
            self.refund_later(vec![former.refund(u64::from(left))]);
            if is_counted {
                self.forget_returned_tokens(counter, former, left);
            }
        }
    }

    /// Fetches more tokens in the background where few are left, before a request has to wait.
    pub(super) fn prefetch(self: &Rc<Self>, charge_plan: &ChargePlan, context: &mut DecisionContext) {
        if context.sharing.low_leases.is_empty() {
            return;
        }
        let now = self.clock.instant();
        let mut fetches = Vec::new();
        for position in std::mem::take(&mut context.sharing.low_leases) {
            let charge = &context.result.charges[position];
            let layer_ref = charge.layer;
            // A reply that arrives after the response has stated a cost would hide that cost.
            let is_settled_later = charge_plan.rule_of(layer_ref).rule.has_response_cost();
            let Some(keyed_request) = context.inputs.keyed_requests[layer_ref.position].filter(|_| !is_settled_later)
            else {
                continue;
            };
            let counter = charge_plan.layer(layer_ref).counter(keyed_request);
            let now_ms = self.clock.now().unix_ms;
            let left = u64::from(self.table.leased_tokens(counter, now_ms));
            let cost = u64::from(charge.request.cost);
            let low = self.leases.with_existing(counter_id(counter), |record| {
                let store_key = record.store_key.clone().filter(|_| record.is_low(left, now_ms))?;
                Some((store_key, record.next_fetch_size(cost, now)))
            });
            if let Some((store_key, want)) = low.flatten() {
                fetches.push(self.token_fetch(charge_plan, layer_ref, keyed_request, store_key).with_tokens(0, want));
            }
        }
        if !fetches.is_empty() {
            self.start_fetches(fetches);
        }
    }

    /// Checks in the background whether exhausted windows have tokens again: other gateways may have returned tokens,
    /// or the key may have been reset.
    pub(super) fn recheck(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        let now = self.clock.instant();
        let mut fetches = Vec::new();
        let full = context.result.charges.iter().filter(|charge| charge.is_full);
        for charge in full.filter(|charge| charge.mode == CountingMode::Leased) {
            let layer_ref = charge.layer;
            let Some(keyed_request) = context.inputs.keyed_requests[layer_ref.position] else { continue };
            let layer = charge_plan.layer(layer_ref);
            if u64::from(charge.request.cost) > u64::from(layer.capacity) {
                continue;
            }
            let period_ms = charge_plan.rule_set().windows_of(layer).typical_ms();
            let due = self.leases.with_or_insert(layer.counter(keyed_request), self.own_shard, now, |record| {
                record.is_recheck_due(now, period_ms)
            });
            // A refused request opens no window.
            let want = if layer.request.kind.is_opened_by_requests() { 0 } else { u64::from(charge.request.cost) };
            if due == Some(true)
                && let Some(store_key) = store_key(layer_ref.position)
                && !self.is_key_unreachable(&store_key)
            {
                fetches.push(self.token_fetch(charge_plan, layer_ref, keyed_request, store_key).with_tokens(0, want));
            }
        }
        if !fetches.is_empty() {
            self.start_fetches(fetches);
        }
    }

    /// Charges a refused request what is left of shared counters, for rules with `count_refused`: leased tokens first, the rest in
    /// the store, in the background; in local counters, if the store is unreachable and `on_outage` says so. Of an admitted request,
    /// only shadow rules have refused, and only they charge.
    pub(super) fn charge_refused_request(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        progress: &DecisionProgress,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        if !charge_plan.counts_refused() {
            return;
        }
        let (rule_set, now_ms) = (charge_plan.rule_set(), self.clock.now().unix_ms);
        let DecisionResult { charges, shadowed, .. } = &mut context.result;
        for charge in charges {
            let layer_ref = charge.layer;
            let rule = &charge_plan.rule_of(layer_ref).rule;
            let has_refused = shadowed.is_empty() || shadowed.contains(&layer_ref.position);
            let is_local = charge.mode == CountingMode::LocalFallback;
            let is_shared = has_refused
                && rule.count_refused
                && rule.sharing != Sharing::Local
                && (is_local || !progress.without_store[layer_ref.position]);
            let layer = charge_plan.layer(layer_ref);
            let left = u64::from(layer.capacity).saturating_sub(charge.usage.used);
            let tokens = u64::from(charge.request.cost).min(left);
            let (true, Some(keyed_request), Some(store_key)) = (
                is_shared && tokens > 0,
                context.inputs.keyed_requests[layer_ref.position],
                store_key(layer_ref.position),
            ) else {
                continue;
            };
            let mut rest =
                UnreportedCharge { rule_set: Arc::clone(rule_set), layer: layer_ref.id, keyed_request, store_key };
            if is_local {
                if let Some((_, usage)) = self.charge_remaining_locally(&rest) {
                    charge.request.ceiling = charge.request.ceiling.max(layer.capacity.into());
                    charge.usage = usage;
                }
                continue;
            }
            let counter = rest.counter();
            let lease_end_ms = self.leases.with_existing(counter_id(counter), |record| {
                record.refund_target.as_ref().map_or(0, |target| target.end_ms)
            });
            let most = u32::try_from(tokens).unwrap_or(u32::MAX);
            // Tokens of a lease that has ended are not of this window.
            let leased = match lease_end_ms {
                Some(end_ms) if end_ms > now_ms => self.table.withdraw(counter, end_ms, most),
                _ => 0,
            };
            rest.keyed_request.cost = most - leased;
            let known = self.table.known_usage(counter, now_ms);
            let opens_window = charge.usage.used == 0 && layer.request.kind.is_opened_by_requests();
            let taken = match rest.keyed_request.cost {
                0 => 0,
                _ if self.is_key_unreachable(&rest.store_key) => {
                    self.charge_remaining_locally(&rest).map_or(0, |(tokens, _)| tokens)
                }
                // Separate calls: each counter is charged, whatever the others have left.
                tokens => {
                    self.start_charge_remaining(rest, !opens_window);
                    if opens_window { 0 } else { tokens }
                }
            };
            charge.usage.used += u64::from(leased + taken);
            if layer.request.kind == WindowKind::Sliding
                && known.is_none_or(|(end_ms, _)| charge.usage.end_ms >= end_ms)
            {
                // The store has not said when the request fits: at the latest when the taken tokens come back.
                let period_ms = rule_set.windows_of(layer).typical_ms();
                let segments = Segments { period_ms };
                charge.usage.end_ms = segments.expires_ms(segments.number_at(now_ms));
            }
        }
    }

    /// Takes what is left of a counter, up to a cost, in the local counter, if `on_outage` says so. Returns the tokens, and the usage
    /// that is known with them.
    fn charge_remaining_locally(&self, rest: &UnreportedCharge) -> Option<(u32, Usage)> {
        let UnreportedCharge { rule_set, layer, keyed_request, .. } = rest;
        if rule_set.rules[layer.rule].rule.on_outage != OnOutage::Local {
            return None;
        }
        let charged = rule_set.charge_remaining(*layer, *keyed_request, &self.table, self.clock.now().unix_ms);
        if charged.0 > 0 {
            self.unreported.add(rest.clone());
        }
        Some(charged)
    }

    /// The window of a counter at this moment.
    fn store_window(&self, rest: &UnreportedCharge) -> StoreWindow {
        let UnreportedCharge { rule_set, layer, keyed_request, .. } = rest;
        let layer = rule_set.layer(*layer);
        let (kind, windows) = (layer.request.kind, rule_set.windows_of(layer));
        StoreWindow::at(kind, windows, self.clock.now().unix_ms, keyed_request.offset)
    }

    /// Takes what is left of a counter of the store, up to a cost, in the background. `is_open`: the window is open, and the known usage
    /// has the tokens at once.
    fn start_charge_remaining(self: &Rc<Self>, rest: UnreportedCharge, is_open: bool) {
        let UnreportedCharge { rule_set, layer, keyed_request, store_key } = &rest;
        let now_ms = self.clock.now().unix_ms;
        let request = self.counter_request(rule_set, *layer, *keyed_request, store_key, now_ms);
        let (charge, window) = (is_open.then(|| self.new_charge()), request.window);
        if let Some(id) = charge {
            let request = CounterRequest { need: keyed_request.cost.into(), ..request.clone() };
            self.begin_charge(id, rule_set, rule_set.layer(*layer), rest.counter(), &request);
        }
        let shared = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let is_charged = shared.charge_remaining(&rest, request, charge).await;
            if let Some(id) = charge {
                shared.end_charge(id, rest.counter(), is_charged == Some(true));
            }
            // Not in a later window. A charge whose reply alone was lost counts twice.
            if is_charged.is_none() && shared.store_window(&rest) == window {
                shared.charge_remaining_locally(&rest);
            }
        });
    }

    /// As [`SharedCounters::start_charge_remaining`]. Does not open a window. Returns whether tokens were charged; `None`: the store
    /// cannot be asked. `charge`: what [`SharedCounters::begin_charge`] has noted.
    async fn charge_remaining(
        self: &Rc<Self>,
        rest: &UnreportedCharge,
        mut request: CounterRequest,
        charge: Option<ChargeId>,
    ) -> Option<bool> {
        let UnreportedCharge { rule_set, layer, keyed_request, store_key } = rest;
        let (counter, tokens, window) = (rest.counter(), u64::from(keyed_request.cost), request.window);
        // A read, where a charge could open a window.
        let mut need = if window.kind.is_opened_by_requests() { 0 } else { tokens.min(request.ceiling) };
        for _ in 0..ATTEMPTS_MAX {
            let call = CounterRequest { need, ..request.clone() };
            let charges = charge.filter(|_| need > 0).map(|id| (id, counter));
            let (is_charged, replies) =
                match self.acquire_charges(std::slice::from_ref(&call), charges.as_slice()).await {
                    Ok(AcquireReply::Granted { counters, .. }) => (need > 0, counters),
                    Ok(AcquireReply::Refused { counters, .. }) => (false, counters),
                    // The window has ended, or the connection is new.
                    Ok(AcquireReply::OtherWindow { .. }) if self.store_window(rest) == window => {
                        let now_ms = self.clock.now().unix_ms;
                        request = self.counter_request(rule_set, *layer, *keyed_request, store_key, now_ms);
                        continue;
                    }
                    Ok(AcquireReply::OtherWindow { .. }) => break,
                    Err(_) => return None,
                };
            let Some(reply) = replies.first().copied() else { break };
            let used = reply.used.max(request.used_min);
            let is_closed = used == 0 && window.kind.is_opened_by_requests();
            need = tokens.min(request.ceiling.saturating_sub(used));
            if is_charged || is_closed || need == 0 {
                self.note_store_usage(rule_set, rule_set.layer(*layer), counter, reply, used, 0);
                return Some(is_charged);
            }
        }
        Some(false)
    }

    /// Adds the layers to a refused decision that the store would have decided, and that were not sent because other layers had
    /// refused before. Their usage is what is known of it; where their server cannot be reached, with what was counted here.
    pub(super) fn add_layers_not_sent(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        progress: &DecisionProgress,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        let now_ms = self.clock.now().unix_ms;
        let layers = charge_plan.enforced_layers_of(context, now_ms);
        let is_not_sent = |layer_ref: &&LayerRef| {
            context.sharing.counting_mode(**layer_ref) == Some(CountingMode::Remote)
                && !progress.without_store[layer_ref.position]
                && context.charge_of(**layer_ref).is_none()
        };
        let not_sent: Vec<LayerRef> = layers.iter().filter(is_not_sent).copied().collect();
        context.return_layer_buffer(layers);
        for LayerRef { position, .. } in not_sent.iter().filter(|_| self.breaker.is_any_open()) {
            let is_unreachable = |key: Rc<str>| self.is_key_unreachable(&key);
            let is_local = charge_plan.rule(*position).rule.on_outage == OnOutage::Local;
            if is_local && store_key(*position).is_some_and(is_unreachable) {
                context.sharing.counting_modes[*position] = CountingMode::LocalFallback;
            }
        }
        let first = charge_plan.add_prepared_charges(&not_sent, &self.table, now_ms, context);
        for charge in &mut context.result.charges[first..] {
            let Some(keyed_request) = context.inputs.keyed_requests[charge.layer.position] else { continue };
            if charge.mode == CountingMode::LocalFallback {
                charge.usage = self.used_locally(charge_plan.rule_set(), charge.layer.id, keyed_request);
                charge.is_full = !charge.usage.admits(charge.request);
                continue;
            }
            self.set_known_usage_of(charge_plan, charge, keyed_request, now_ms);
        }
        charge_plan.report_total_usage(&self.table, now_ms, context, first);
    }

    /// The charges of a refused request in sliding windows that may be full, and would start a penalty then.
    pub(super) fn unclear_windows(
        charge_plan: &ChargePlan,
        context: &DecisionContext,
    ) -> impl Iterator<Item = ChargePosition> {
        let charges = &context.result.charges;
        charges.ids_from(ChargePosition::FIRST).filter(|position| {
            let charge = &charges[*position];
            let penalty = || charge_plan.penalty(charge.layer.position).and_then(|penalty| context.charge_of(penalty));
            charge.request.kind == WindowKind::Sliding
                && charge.mode == CountingMode::Remote
                && !charge.is_full
                && charge.usage.used + u64::from(charge.request.cost) > charge.request.ceiling
                && penalty().is_some_and(|penalty| !penalty.is_full)
        })
    }

    /// Starts checks of the sliding windows of a refused request which may be full: tokens may have come back since the store has
    /// reported their usage. A full one starts its penalty. A flood of refused requests causes one check at a time.
    pub(super) fn start_checks(
        self: &Rc<Self>,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) -> Vec<(ChargePosition, WindowCheck)> {
        let start = |position: ChargePosition| {
            let charge = &context.result.charges[position];
            let (layer_ref, counter, AcquireRequest { cost, limit, .. }) =
                (charge.layer, charge.counter, charge.request);
            let keyed_request = context.inputs.keyed_requests[layer_ref.position]?;
            let store_key = store_key(layer_ref.position)?;
            let begin = |record: &mut LeaseRecord| !std::mem::replace(&mut record.is_being_checked, true);
            let now = self.clock.instant();
            if self.is_key_unreachable(&store_key)
                || self.leases.with_or_insert(counter, self.own_shard, now, begin) != Some(true)
            {
                return None;
            }
            let (rule_set, now_ms) = (Arc::clone(charge_plan.rule_set()), self.clock.now().unix_ms);
            let request = self.counter_request(&rule_set, layer_ref.id, keyed_request, &store_key, now_ms);
            let local = u64::from(charge_plan.layer(layer_ref).capacity).saturating_sub(request.ceiling);
            // Nothing is taken under a limit that is lower by the cost, and the reply is the same.
            let (need, ceiling) =
                (u64::from(cost).saturating_sub(request.ceiling), request.ceiling.saturating_sub(cost.into()));
            let request = CounterRequest { need, ceiling, ..request };
            let shared = Rc::clone(self);
            let check = tokio::task::spawn_local(async move {
                let reply = shared.acquire(std::slice::from_ref(&request)).await;
                shared.leases.with_existing(counter_id(counter), |record| record.is_being_checked = false);
                let (is_full, replies) = match reply {
                    Ok(AcquireReply::Granted { counters, .. }) => (false, counters),
                    Ok(AcquireReply::Refused { counters, .. }) => (true, counters),
                    Ok(AcquireReply::OtherWindow { .. }) | Err(_) => return None,
                };
                let reply = *replies.first()?;
                let used = reply.used.max(request.used_min);
                let layer = rule_set.layer(layer_ref.id);
                let known = shared.note_store_usage(&rule_set, layer, counter, reply, used, 0);
                let usage = Usage { used: known, end_ms: reply.available_ms };
                shared.note_refusal(counter, is_full.then_some(Refusal { need: cost.into(), cost, limit, usage }));
                if is_full {
                    let shared = Rc::clone(&shared);
                    tokio::task::spawn_local(async move {
                        shared.start_store_penalty(&rule_set, layer_ref.id.rule, keyed_request, &store_key).await;
                    });
                }
                Some(Usage { used: used + local, ..usage })
            });
            Some((position, check))
        };
        SharedCounters::unclear_windows(charge_plan, context).filter_map(start).collect()
    }

    /// Whether fetched tokens open the window of a layer: no tokens are known to be used in it.
    pub(super) fn is_opened_by_fetch(
        &self,
        layer: &CompiledLayer,
        keyed_request: Option<KeyedRequest>,
        now_ms: u64,
    ) -> bool {
        let Some(counter) = keyed_request.map(|keyed_request| layer.counter(keyed_request)) else { return false };
        layer.request.kind.is_opened_by_requests()
            && self.table.known_usage(counter, now_ms).is_none_or(|(_, used)| used == 0)
            && self.table.leased_tokens(counter, now_ms) == 0
    }

    /// A request to the store for one layer, for 0 tokens.
    pub(super) fn counter_request(
        &self,
        rule_set: &RuleSet,
        layer: LayerId,
        keyed_request: KeyedRequest,
        store_key: &str,
        now_ms: u64,
    ) -> CounterRequest {
        let compiled_rule = &rule_set.rules[layer.rule];
        // Usage that was counted locally and is not reported yet is not granted again.
        let local_usage = self.used_locally(rule_set, layer, keyed_request).used;
        let (suffix, layer) = (compiled_rule.suffix(layer), compiled_rule.layer(layer));
        let windows = rule_set.windows_of(layer);
        let at = StoreWindow::at(layer.request.kind, windows, now_ms, keyed_request.offset);
        let base = self.key_base(store_key, suffix, 0);
        let ceiling = u64::from(layer.capacity).saturating_sub(local_usage);
        let used_min = self.used_at_least(rule_set, layer, keyed_request, at);
        CounterRequest {
            key_base: base,
            window: at,
            limit: layer.request.limit,
            ceiling,
            need: 0,
            want: 0,
            used_min,
            need_once_refused: 0,
            reserved_after_ms: 0,
            refund_used_max: refund_used_max(compiled_rule, layer),
            counter: Some(layer.counter(keyed_request)),
            computed_ms: now_ms,
            generation: self.generation.get(),
        }
    }

    /// The usage of a layer by the local counters.
    pub(super) fn used_locally(&self, rule_set: &RuleSet, layer: LayerId, keyed_request: KeyedRequest) -> Usage {
        rule_set.local_usage(layer, keyed_request, &self.table, DecisionTime::read(&|| self.clock.now().unix_ms))
    }

    /// A fetch of no tokens for one layer.
    pub(super) fn token_fetch(
        &self,
        charge_plan: &ChargePlan,
        layer_ref: LayerRef,
        keyed_request: KeyedRequest,
        store_key: Rc<str>,
    ) -> TokenFetch {
        let (rule_set, layer) = (charge_plan.rule_set(), charge_plan.layer(layer_ref));
        let now_ms = self.clock.now().unix_ms;
        let request = self.counter_request(rule_set, layer_ref.id, keyed_request, &store_key, now_ms);
        self.record_local_usage(rule_set, layer_ref.id, keyed_request, &store_key, request.ceiling);
        let need_once_refused = need_once_refused(charge_plan, layer_ref, keyed_request.cost);
        TokenFetch {
            rule_set: Arc::clone(rule_set),
            layer: layer_ref.id,
            keyed_request,
            counter: layer.counter(keyed_request),
            store_key,
            shards: layer.shards,
            request: CounterRequest { need_once_refused, ..request },
        }
    }
}

/// [`CounterRequest::need_once_refused`] of a request that takes `cost`.
pub(super) fn need_once_refused(charge_plan: &ChargePlan, layer_ref: LayerRef, cost: u32) -> u64 {
    let takes_rest = charge_plan.counts_refused() && charge_plan.rule_of(layer_ref).rule.count_refused;
    let is_sliding = charge_plan.layer(layer_ref).request.kind == WindowKind::Sliding;
    if takes_rest && is_sliding { cost.into() } else { 0 }
}

impl TokenFetch {
    fn with_tokens(self, need: u64, want: u64) -> TokenFetch {
        TokenFetch { request: CounterRequest { need, want, ..self.request }, ..self }
    }
}

impl SharedDecision {
    /// Fetches tokens for the counters that lack some. `Some`: the decision continues with that step; nothing from
    /// `first` on is charged.
    pub(super) async fn fetch_lacking(&mut self, charge_plan: &ChargePlan, first: ChargePosition) -> Option<NextStep> {
        let missing = std::mem::take(&mut self.context.sharing.missing_tokens);
        self.progress.rounds += 1;
        let rules = self.rules_of(&missing);
        if self.skip_unreachable(&rules) {
            self.context.truncate(first);
            return None;
        }
        // The store replies, but other requests have taken the tokens.
        if self.progress.rounds > ROUNDS_MAX {
            return self.refuse(charge_plan, first);
        }
        if self.is_past_deadline() {
            self.skip_store(&rules);
            self.context.truncate(first);
            return None;
        }
        let refused = self.known_refusals(charge_plan, &missing);
        if !refused.is_empty() {
            return self.refuse_lease(charge_plan, first, &refused);
        }
        if self.opens_windows(charge_plan, &missing) {
            self.context.truncate(first);
            return None;
        }
        let (calls_in_flight, are_own) = self.start_or_join_fetches(charge_plan, &missing);
        let began = Instant::from_std(self.shared.clock.instant());
        // Which of them the store refuses is not known yet.
        missing.iter().for_each(|position| self.context.result.charges[*position].is_full = false);
        let mut refused = Vec::new();
        for in_flight in &calls_in_flight {
            let is_fetched = |position: &ChargePosition| {
                self.counter_of(charge_plan, *position).is_some_and(|counter| in_flight.includes(counter_id(counter)))
            };
            let fetched: Vec<ChargePosition> = missing.iter().copied().filter(is_fetched).collect();
            let reply = before_deadline(self.deadline, in_flight.finished()).await;
            if !are_own {
                self.stop_waiting(charge_plan, &fetched, reply.is_some());
            }
            match reply {
                Some(true) => {
                    self.take_undeposited(charge_plan, &fetched, in_flight);
                    if are_own {
                        refused.extend(self.refused_fetches(charge_plan, &fetched, in_flight));
                    }
                }
                Some(false) => self.skip_store(&self.rules_of(&fetched)),
                None => self.time_out(&self.rules_of(&fetched), began),
            }
        }
        if !refused.is_empty() {
            return self.refuse_lease(charge_plan, first, &refused);
        }
        self.context.truncate(first);
        None
    }

    /// Refuses the charges from `first` on, of which those in `refused` state the usage of their counters.
    fn refuse_lease(
        &mut self,
        charge_plan: &ChargePlan,
        first: ChargePosition,
        refused: &[ChargePosition],
    ) -> Option<NextStep> {
        let (table, now_ms) = (&self.shared.table, self.shared.clock.now().unix_ms);
        charge_plan.state_known_usage_of_leases(table, now_ms, &mut self.context, first, refused);
        self.refuse(charge_plan, first)
    }

    fn rules_of(&self, charges: &[ChargePosition]) -> Vec<PlanPosition> {
        let mut rules: Vec<PlanPosition> =
            charges.iter().map(|position| self.context.result.charges[*position].layer.position).collect();
        rules.dedup();
        rules
    }

    /// The ordinary counter of a charge.
    fn counter_of(&self, charge_plan: &ChargePlan, charge: ChargePosition) -> Option<Counter> {
        let layer_ref = self.context.result.charges[charge].layer;
        self.context.inputs.keyed_requests[layer_ref.position]
            .map(|keyed_request| charge_plan.layer(layer_ref).counter(keyed_request))
    }

    /// Charges of sliding windows whose missing tokens the store is known to refuse; they then state its usage.
    fn known_refusals(&mut self, charge_plan: &ChargePlan, missing: &[ChargePosition]) -> Vec<ChargePosition> {
        let now_ms = self.shared.clock.now().unix_ms;
        let known = |position: &ChargePosition| {
            let counter = self.counter_of(charge_plan, *position)?;
            let charge = &self.context.result.charges[*position];
            self.shared.known_refusal(counter, lacking_tokens(charge), charge.request, now_ms)
        };
        let refused: Vec<(ChargePosition, Usage)> =
            missing.iter().filter_map(|position| Some((*position, known(position)?))).collect();
        if refused.is_empty() {
            return Vec::new();
        }
        for position in missing {
            self.context.result.charges[*position].is_full = false;
        }
        for (position, usage) in &refused {
            let charge = &mut self.context.result.charges[*position];
            charge.is_full = true;
            charge.usage = Usage { used: usage.used.saturating_sub(leased_tokens(charge)), ..*usage };
        }
        refused.into_iter().map(|(position, _)| position).collect()
    }

    /// Whether fetched tokens would open windows although the store may refuse the request in another call. It then decides these
    /// layers in its last calls instead.
    fn opens_windows(&mut self, charge_plan: &ChargePlan, missing: &[ChargePosition]) -> bool {
        let now_ms = self.shared.clock.now().unix_ms;
        let layers = missing.iter().map(|position| self.context.result.charges[*position].layer);
        let is_opened = |layer_ref: &LayerRef| {
            let keyed_request = self.context.inputs.keyed_requests[layer_ref.position];
            self.shared.is_opened_by_fetch(charge_plan.layer(*layer_ref), keyed_request, now_ms)
        };
        let opened: Vec<LayerRef> = layers.filter(is_opened).collect();
        if opened.is_empty() || self.is_one_call(charge_plan, missing) {
            return false;
        }
        self.context.sharing.without_lease.extend(opened);
        true
    }

    /// Whether one call fetches everything, and the store decides no layers afterwards that could refuse as well. Shadow rules refuse
    /// nothing, and each is decided by itself.
    fn is_one_call(&self, charge_plan: &ChargePlan, missing: &[ChargePosition]) -> bool {
        let (sharing, keyed_requests) = (&self.context.sharing, &self.context.inputs.keyed_requests);
        let is_sent = |position| {
            sharing.counting_modes[position] == CountingMode::Remote
                && self.progress.group == 0
                && !charge_plan.shadow_rules().contains(&position)
                && !self.progress.without_store[position]
                && keyed_requests[position].is_some()
        };
        let bases =
            missing.iter().filter_map(|position| self.store_key(self.context.result.charges[*position].layer.position));
        let bases: Vec<Rc<str>> = bases.map(|text| self.shared.key_base(&text, "", 0)).collect();
        let is_sharded =
            |position: &ChargePosition| charge_plan.layer(self.context.result.charges[*position].layer).shards > 1;
        !charge_plan.rules().ids().any(is_sent)
            && (self.progress.group > 0 || sharing.without_lease.is_empty())
            && !missing.iter().any(is_sharded)
            && bases.iter().all(|base| self.shared.store.can_share_a_call(&bases[0], base))
    }

    /// The calls that fetch what is lacking, and whether this request has started them: fetches in flight are joined
    /// first.
    fn start_or_join_fetches(
        &self,
        charge_plan: &ChargePlan,
        missing: &[ChargePosition],
    ) -> (Vec<Rc<InFlightFetch>>, bool) {
        let shared = &self.shared;
        let now = shared.clock.instant();
        let mut joined = Vec::<Rc<InFlightFetch>>::new();
        for position in missing {
            let store_key = self.store_key(self.context.result.charges[*position].layer.position);
            let Some(counter) = self.counter_of(charge_plan, *position).filter(|_| store_key.is_some()) else {
                continue;
            };
            let need = missing_tokens(&self.context.result.charges[*position]);
            let in_flight = shared.leases.with_existing(counter_id(counter), |record| {
                let in_flight = record.in_flight.clone()?;
                record.store_key = store_key;
                record.waiting_tokens += need;
                Some(in_flight)
            });
            if let Some(in_flight) = in_flight.flatten()
                && !joined.iter().any(|known| Rc::ptr_eq(known, &in_flight))
            {
                joined.push(in_flight);
            }
        }
        if !joined.is_empty() {
            return (joined, false);
        }
        let mut fetches = Vec::new();
        for position in missing {
            let charge = &self.context.result.charges[*position];
            let layer_ref = charge.layer;
            let (Some(keyed_request), Some(store_key)) =
                (self.context.inputs.keyed_requests[layer_ref.position], self.store_key(layer_ref.position))
            else {
                continue;
            };
            let (need, lacking) = (missing_tokens(charge), lacking_tokens(charge));
            let counter = charge_plan.layer(layer_ref).counter(keyed_request);
            let want = shared.leases.with_or_insert(counter, shared.own_shard, now, |record| {
                record.store_key = Some(Rc::clone(&store_key));
                if need > 0 { record.next_fetch_size(need, now) } else { 0 }
            });
            let want = want.unwrap_or(need);
            let fetch = shared.token_fetch(charge_plan, layer_ref, keyed_request, store_key);
            let mut fetch = fetch.with_tokens(need, want);
            // Enough is leased, of which this request may perhaps not spend any more. Tokens that stay leased are not used.
            let unspent = need.cast_signed() - lacking;
            fetch.request.ceiling += unspent.cast_unsigned();
            fetches.push(fetch);
        }
        (shared.start_fetches(fetches), true)
    }

    /// Records that this request no longer waits for a joined fetch.
    fn stop_waiting(&self, charge_plan: &ChargePlan, fetched: &[ChargePosition], has_ended: bool) {
        for position in fetched {
            let Some(counter) = self.counter_of(charge_plan, *position) else { continue };
            let need = missing_tokens(&self.context.result.charges[*position]);
            self.shared.leases.with_existing(counter_id(counter), |record| record.stop_waiting(need, has_ended));
        }
    }

    /// Takes tokens that did not fit in the table, as many as this request needs, unless their window had ended when the request was
    /// decided: it would count in none that is open.
    fn take_undeposited(&mut self, charge_plan: &ChargePlan, fetched: &[ChargePosition], in_flight: &InFlightFetch) {
        let mut undeposited = in_flight.undeposited.borrow_mut();
        for position in fetched {
            let Some(counter) = self.counter_of(charge_plan, *position) else { continue };
            let charge = &self.context.result.charges[*position];
            let (layer_ref, cost) = (charge.layer, u64::from(charge.request.cost));
            let capacity = charge_plan.layer(layer_ref).capacity;
            let decided_ms = self.context.result.decided_ms;
            let found = undeposited.iter_mut().find(|undeposited| {
                undeposited.id == counter_id(counter)
                    && undeposited.tokens >= cost
                    && undeposited.capacity <= capacity
                    && undeposited.refund_target.end_ms > decided_ms
            });
            if let Some(UndepositedTokens { tokens, refund_target, .. }) = found
                && !self.context.sharing.prepaid.contains(&layer_ref)
            {
                *tokens -= cost;
                self.context.sharing.prepaid.push(layer_ref);
                self.progress.refunds.push((layer_ref.position, refund_target.refund(cost)));
            }
        }
    }

    /// Charges whose tokens the store has refused, and of which the table does not say so: it is too full, or the windows slide. They
    /// then state the usage of the store.
    fn refused_fetches(
        &mut self,
        charge_plan: &ChargePlan,
        fetched: &[ChargePosition],
        in_flight: &InFlightFetch,
    ) -> Vec<ChargePosition> {
        let (refused, now_ms) = (in_flight.refused.borrow(), self.shared.clock.now().unix_ms);
        let mut refused_charges = Vec::new();
        for position in fetched {
            let Some(counter) = self.counter_of(charge_plan, *position) else { continue };
            let reply = refused.iter().find(|(id_, _)| *id_ == counter_id(counter)).map(|(_, reply)| reply);
            let layer = charge_plan.layer(self.context.result.charges[*position].layer);
            let is_sliding = layer.request.kind == WindowKind::Sliding;
            let charge = &mut self.context.result.charges[*position];
            charge.is_full = reply.is_some();
            let is_unknown = |_: &&CounterReply| is_sliding || self.shared.table.known_usage(counter, now_ms).is_none();
            if let Some(reply) = reply.filter(is_unknown) {
                let usage = Usage { used: reply.used, end_ms: reply.available_ms };
                if is_sliding {
                    let AcquireRequest { cost, limit, .. } = charge.request;
                    let refusal = Refusal { need: lacking_tokens(charge), cost, limit, usage };
                    self.shared.note_refusal(counter, Some(refusal));
                }
                charge.usage = Usage { used: usage.used.saturating_sub(leased_tokens(charge)), ..usage };
                refused_charges.push(*position);
            }
        }
        refused_charges
    }
}

/// The tokens that a charge of a lease lacks.
fn missing_tokens(charge: &Charge) -> u64 {
    u64::try_from(lacking_tokens(charge)).unwrap_or(0)
}

/// As [`missing_tokens`]; below zero, if more are leased. The request lacks none of these, but others with a greater limit have used
/// up its own.
fn lacking_tokens(charge: &Charge) -> i64 {
    i64::from(charge.request.cost).saturating_sub_unsigned(leased_tokens(charge))
}

/// The unspent tokens of a lease, before its charge states the usage of the counter.
fn leased_tokens(charge: &Charge) -> u64 {
    charge.request.ceiling.saturating_sub(charge.usage.used)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;
    use std::time::Duration;

    use super::super::circuit_breaker::FAILURES_MAX;
    use super::super::reconnecting::ServerId;
    use super::super::shared_decision::BeginResult;
    use super::super::test_worker::{
        Call, HOUR_KEY, HOUR_MS, KEY, MINUTE_KEY, SLIDING_KEY, START_MS, TestWorker, acquire, leased, local, named,
        refund, run, shard_key, sharded,
    };
    use super::*;
    use transom_limiter::decision::Decision;
    use transom_limiter::handles::{Handle, VariantId};
    use transom_limiter::rule::{OnLimit, Plan, Rule};
    use transom_limiter::window::Windows;

    /// A rule `r` with a sliding window.
    fn sliding(limit: &str) -> Rule {
        let mut rule = leased(&[limit]);
        rule.layers[0].windows = Windows::Sliding { period_ms: rule.layers[0].windows.typical_ms() };
        rule
    }

    impl TestWorker {
        /// A fetch for a layer of the rule at this position.
        fn fetch(&self, rule: usize, layer: usize, key: &str, need: u64, want: u64) -> TokenFetch {
            let (layer_ref, request) = (self.layer_ref(rule, layer), self.request(rule, key, 1));
            let text = self.store_keys(key)[layer_ref.position].clone().unwrap();
            self.shared.token_fetch(&self.charge_plan, layer_ref, request, text).with_tokens(need, want)
        }

        /// Deposits what a store replies to a fetch for the first layer. Returns the usage if that is a refusal.
        fn deposit(&self, fetch: &TokenFetch, granted: u64, used: u64, end_ms: u64) -> Option<u64> {
            let in_flight = InFlightFetch::new(Vec::new());
            let reply =
                CounterReply { granted, used, end_ms, available_ms: end_ms, number: end_ms / HOUR_MS - 1, call: 0 };
            self.shared.deposit_tokens(fetch, &fetch.request, reply, &in_flight);
            let refused = in_flight.refused.borrow();
            refused.first().map(|(_, reply)| reply.used)
        }

        /// Changes the record of a counter, which is created if needed.
        fn record<R>(&self, key: &str, change: impl FnOnce(&mut LeaseRecord) -> R) -> R {
            let now = self.clock.instant();
            self.shared.leases.with_or_insert(self.counter(key, 0), 0, now, change).unwrap()
        }
    }

    #[test]
    fn leased_tokens_are_spent_without_the_store_and_fetched_in_the_background() {
        run(async {
            let worker = TestWorker::new(&[leased(&["1000/hour"])]).await;
            assert_eq!(worker.decide("a", 3).await, Some(true));
            assert_eq!(worker.store.take_calls(), [acquire(KEY, [3, 3, 0])]);
            // All is spent. How much is leased for the next request depends on the time since the first fetch.
            let calls = worker.settled_calls().await;
            let [Call::Acquire(keys)] = &calls[..] else { panic!("{calls:?}") };
            let [0, leased, 0] = keys[0].1 else { panic!("{calls:?}") };
            assert!(leased >= 3);
            assert_eq!(worker.leased_tokens("a", 0), leased as u32);
            let BeginResult::Decided(_) = worker.begin("a", 2).0 else { panic!("enough tokens are leased") };
            assert_eq!((worker.store.used(KEY), worker.tokens("fetched")), (3 + leased, 3 + leased));
        });
    }

    #[test]
    fn a_late_reply_grants_nothing_beyond_the_limit() {
        run(async {
            let worker = TestWorker::new(&[leased(&["3/hour"])]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.store.hold();
            let mut pending = worker.pending("a", 2);
            pending.deadline = Instant::from_std(worker.clock.instant());
            let outcome = pending.decide(&worker.charge_plan).await.unwrap();
            assert!(matches!(outcome.decision, Decision::Admitted), "it is counted locally");
            // The store has granted the tokens as well.
            assert_eq!(worker.store.used(KEY), 3);
            worker.store.release();
            worker.settled_calls().await;
            assert_eq!(worker.decide("a", 1).await, Some(false));
            worker.shared.report_to_reachable().await;
            worker.settled_calls().await;
            assert_eq!(worker.store.used(KEY), 3, "what was granted beyond the limit is returned");
        });
    }

    #[test]
    fn an_admitted_request_states_what_was_counted_locally() {
        run(async {
            let worker = TestWorker::new(&[leased(&["9/hour"])]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.store.hold();
            let mut pending = worker.pending("a", 2);
            pending.deadline = Instant::from_std(worker.clock.instant());
            assert!(matches!(pending.decide(&worker.charge_plan).await.unwrap().decision, Decision::Admitted));
            worker.store.release();
            worker.settled_calls().await;
            for (used, is_reported) in [(4, false), (5, true)] {
                if is_reported {
                    worker.shared.report_to_reachable().await;
                }
                let (decision, context) = worker.outcome("a", 1).await.unwrap();
                assert!(matches!(decision, Decision::Admitted));
                assert_eq!(context.result.charges.as_slice()[0].usage.used, used);
            }
        });
    }

    #[test]
    fn all_workers_state_what_one_of_them_has_counted_locally() {
        run(async {
            let worker = TestWorker::new(&[leased(&["9/hour"])]).await;
            let other = worker.beside();
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.store.hold();
            let mut pending = worker.pending("a", 2);
            pending.deadline = Instant::from_std(worker.clock.instant());
            assert!(matches!(pending.decide(&worker.charge_plan).await.unwrap().decision, Decision::Admitted));
            worker.store.release();
            worker.settled_calls().await;
            // The late reply has left two leased tokens.
            let (_, context) = other.outcome("a", 1).await.unwrap();
            assert_eq!((other.settled_calls().await, context.result.charges.as_slice()[0].usage.used), (vec![], 4));
            worker.shared.report_to_reachable().await;
            let (_, context) = other.outcome("a", 1).await.unwrap();
            assert_eq!(context.result.charges.as_slice()[0].usage.used, 5);
        });
    }

    #[test]
    fn one_call_fetches_for_all_counters_that_are_not_sharded() {
        run(async {
            let wide = named("wide", sharded("80/hour"));
            let worker = TestWorker::new(&[leased(&["10/minute", "100/hour"]), wide]).await;
            let (minute, hour, wide) =
                (|| worker.fetch(0, 0, "a", 1, 1), || worker.fetch(0, 1, "a", 2, 2), || worker.fetch(1, 0, "a", 3, 3));
            let plain = |keys: &[(&str, u64)]| {
                Call::Acquire(keys.iter().map(|(key, tokens)| ((*key).to_owned(), [*tokens, *tokens, 0])).collect())
            };
            for fetches in
                [vec![minute(), hour(), wide()], vec![minute(), wide(), hour()], vec![wide(), minute(), hour()]]
            {
                let started = worker.shared.start_fetches(fetches);
                assert_eq!(started.len(), 2);
                for in_flight in &started {
                    assert!(in_flight.finished().await);
                }
                let calls = worker.store.take_calls();
                assert_eq!(calls.len(), 2);
                assert!(calls.contains(&plain(&[(MINUTE_KEY, 1), (HOUR_KEY, 2)])), "{calls:?}");
            }
            let started = worker.shared.start_fetches(vec![wide(), wide()]);
            assert_eq!(started.len(), 2, "each sharded counter has a call of its own");
        });
    }

    #[test]
    fn a_request_that_another_rule_refuses_opens_no_window() {
        run(async {
            let mut rule = leased(&["9/hour"]);
            rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let exact = Rule { sharing: Sharing::Exact, ..named("wide", leased(&["5/hour"])) };
            let worker = TestWorker::new(&[rule, exact]).await;
            let (opened, wide) = (|key| format!("transom:{{r|{key}}}:first-request"), "transom:{wide|a}:500000");
            worker.store.set_used(wide, 5);
            for _ in 0..2 {
                assert_eq!(worker.decide("a", 1).await, Some(false));
                worker.settled_calls().await;
                assert_eq!(worker.store.used(&opened("a")), 0);
                worker.clock.advance(Duration::from_secs(20));
            }
            assert_eq!(worker.decide("b", 1).await, Some(true));
            assert_eq!((worker.store.take_calls().len(), worker.store.used(&opened("b"))), (1, 1));
            // Tokens of an open window are leased.
            assert_eq!(worker.decide("b", 2).await, Some(true));
            assert!(worker.record("b", |record| record.refund_target.is_some()));
        });
    }

    /// The other windows of its rule are counted by lease all the same.
    #[test]
    fn a_request_that_another_rule_refuses_opens_no_window_beside_leased_tokens() {
        run(async {
            let mut rule = leased(&["100/minute", "9/hour"]);
            rule.layers[1].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let exact = Rule { sharing: Sharing::Exact, ..named("wide", leased(&["5/hour"])) };
            let worker = TestWorker::new(&[rule, exact]).await;
            let (opened, wide) = (|key| format!("transom:{{r|{key}}}:hour:first-request"), "transom:{wide|a}:500000");
            worker.store.set_used(wide, 5);
            for key in ["a", "b"] {
                let started = worker.shared.start_fetches(vec![worker.fetch(0, 0, key, 3, 3)]);
                assert!(started[0].finished().await);
            }
            for _ in 0..2 {
                assert_eq!(worker.decide("a", 1).await, Some(false));
                worker.settled_calls().await;
                assert_eq!((worker.store.used(&opened("a")), worker.leased_tokens("a", 0)), (0, 3));
            }
            assert_eq!(worker.decide("b", 1).await, Some(true));
            assert_eq!(worker.store.used(&opened("b")), 1);
            assert_eq!((worker.leased_tokens("b", 0), worker.leased_tokens("b", 1)), (2, 0));
            // Tokens of the open window are leased.
            worker.settled_calls().await;
            assert_eq!(worker.decide("b", 2).await, Some(true));
            let has_lease = |record: &mut LeaseRecord| record.refund_target.is_some();
            let id = counter_id(worker.counter("b", 1));
            assert_eq!(worker.shared.leases.with_existing(id, has_lease), Some(true));
        });
    }

    #[test]
    fn tokens_that_another_request_has_leased_meanwhile_are_spent() {
        run(async {
            let mut rule = leased(&["100/minute", "1/hour"]);
            rule.layers[1].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let exact = Rule { sharing: Sharing::Exact, ..named("wide", leased(&["5/hour"])) };
            let worker = TestWorker::new(&[rule, exact]).await;
            let opened = "transom:{r|a}:hour:first-request";
            worker.store.hold();
            // The tokens of the first window are fetched; the store is to decide about the second.
            let pending = worker.pending("a", 1);
            let mut decided = Box::pin(pending.decide(&worker.charge_plan));
            assert!(poll_fn(|cx| Poll::Ready(decided.as_mut().poll(cx).is_pending())).await);
            let started = worker.shared.start_fetches(vec![worker.fetch(0, 1, "a", 1, 1)]);
            while worker.store.used(opened) == 0 {
                worker.store.next_calls().await;
            }
            worker.store.release();
            assert!(started[0].finished().await);
            assert!(matches!(decided.await.unwrap().decision, Decision::Admitted));
            assert_eq!((worker.store.used(opened), worker.leased_tokens("a", 1)), (1, 0));
        });
    }

    #[test]
    fn a_shadow_rule_does_not_prevent_leases_of_windows_that_requests_open() {
        run(async {
            let mut rule = leased(&["9/hour"]);
            rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let shadow = Rule { on_limit: OnLimit::Shadow, ..leased(&["5/hour"]) };
            let worker = TestWorker::new(&[rule, Rule { sharing: Sharing::Exact, ..named("shadow", shadow) }]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            assert!(worker.record("a", |record| record.refund_target.is_some()), "a token is leased");
        });
    }

    #[test]
    fn a_request_that_is_known_to_be_refused_opens_no_window() {
        run(async {
            let mut rule = leased(&["5/hour"]);
            rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
            let worker = TestWorker::new(&[rule]).await;
            let key = "transom:{r|a}:first-request";
            assert_eq!(worker.decide("a", 5).await, Some(true));
            worker.settled_calls().await;
            // The key is reset by another gateway.
            worker.store.set_used(key, 0);
            assert_eq!(worker.decide("a", 1).await, Some(false));
            let calls = worker.settled_calls().await;
            assert_eq!((calls, worker.store.used(key)), (vec![acquire(key, [0, 0, 0])], 0));
            assert_eq!(worker.decide("a", 1).await, Some(true), "the reset is known");
        });
    }

    #[test]
    fn a_request_joins_the_fetches_in_flight() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/minute", "100/hour"])]).await;
            let now = worker.clock.instant();
            for layer in [0, 1] {
                let _ = worker.shared.leases.with_or_insert(worker.counter("a", layer), 0, now, |_record| ());
            }
            let both = |tokens: [u64; 3]| {
                let keys = [MINUTE_KEY, HOUR_KEY];
                [Call::Acquire(keys.map(|key| (key.to_owned(), tokens)).to_vec())]
            };
            worker.store.hold();
            worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1), worker.fetch(0, 1, "a", 1, 1)]);
            assert_eq!(worker.store.next_calls().await, both([1, 1, 0]));
            let mut decided = Box::pin(worker.pending("a", 5).decide(&worker.charge_plan));
            assert!(poll_fn(|cx| Poll::Ready(decided.as_mut().poll(cx).is_pending())).await);
            worker.store.release();
            assert!(decided.await.is_ok());
            // The request lacks 4 tokens, and no other request waits.
            assert_eq!(worker.store.take_calls()[..1], both([4, 4, 0]));
        });
    }

    #[test]
    fn what_waiting_requests_need_is_fetched_once() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.record("a", |_record| ());
            worker.store.hold();
            worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1)]);
            assert_eq!(worker.store.next_calls().await, [acquire(KEY, [1, 1, 0])]);
            let mut requests: Vec<_> =
                [5, 3, 2].map(|cost| Box::pin(worker.pending("a", cost).decide(&worker.charge_plan))).into();
            for request in &mut requests {
                assert!(poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending())).await);
            }
            worker.store.release();
            for request in requests {
                assert!(matches!(request.await.unwrap().decision, Decision::Admitted));
            }
            // The first request lacks 4 tokens and fetches what the others need, too.
            let calls = worker.store.take_calls();
            let needed = |call: &&Call| matches!(call, Call::Acquire(keys) if keys[0].1[0] > 0);
            assert_eq!(calls.iter().filter(needed).collect::<Vec<_>>(), [&acquire(KEY, [4, 9, 0])]);
            let (waiting, resuming) = worker.record("a", |record| (record.waiting_tokens, record.resuming_tokens));
            assert_eq!((waiting, resuming), (0, 0));
        });
    }

    /// The client of a request that waits for the fetch of another leaves.
    #[test]
    fn a_request_that_leaves_a_joined_fetch_hinders_no_other() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.record("a", |_record| ());
            worker.store.hold();
            worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1)]);
            assert_eq!(worker.store.next_calls().await, [acquire(KEY, [1, 1, 0])]);
            let mut requests: Vec<_> =
                [3, 5].map(|cost| Box::pin(worker.pending("a", cost).decide(&worker.charge_plan))).into();
            for request in &mut requests {
                assert!(poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending())).await);
            }
            drop(requests.remove(0));
            worker.store.release();
            let [request] = requests.try_into().ok().unwrap();
            assert!(matches!(request.await.unwrap().decision, Decision::Admitted));
            let calls = worker.store.take_calls();
            let [Call::Acquire(keys), ..] = &calls[..] else { panic!("{calls:?}") };
            // One token was leased, and what the other has asked for is fetched at most once.
            let [needed, wanted, _] = keys[0].1;
            assert!(needed == 4 && (4..=7).contains(&wanted), "{calls:?}");
            let (waiting, resuming) = worker.record("a", |record| (record.waiting_tokens, record.resuming_tokens));
            assert_eq!((waiting, resuming), (0, 0));
        });
    }

    #[test]
    fn a_request_that_joins_one_fetch_sizes_the_others_when_they_start() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/minute", "100/hour"])]).await;
            worker.record("a", |_record| ());
            worker.store.hold();
            worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1)]);
            assert_eq!(worker.store.next_calls().await, [acquire(MINUTE_KEY, [1, 1, 0])]);
            let mut decided = Box::pin(worker.pending("a", 5).decide(&worker.charge_plan));
            assert!(poll_fn(|cx| Poll::Ready(decided.as_mut().poll(cx).is_pending())).await);
            worker.store.release();
            assert!(decided.await.is_ok());
            let keys = vec![(MINUTE_KEY.to_owned(), [4, 4, 0]), (HOUR_KEY.to_owned(), [5, 5, 0])];
            assert_eq!(worker.store.take_calls()[..1], [Call::Acquire(keys)]);
        });
    }

    #[test]
    fn shards_are_asked_in_turn_for_what_is_missing() {
        run(async {
            // 10 tokens in each shard.
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.record("a", |record| record.shard = 2);
            worker.store.set_used(&shard_key(2), 7);
            worker.store.set_used(&shard_key(3), 10);
            worker.store.set_used(&shard_key(0), 4);
            // The shards have 3, none and 6 tokens: 5 of the last one are needed.
            assert_eq!(worker.decide("a", 8).await, Some(true));
            assert_eq!(
                worker.store.take_calls(),
                [
                    acquire(&shard_key(2), [8, 8, 0]),
                    acquire(&shard_key(2), [3, 8, 0]),
                    acquire(&shard_key(3), [5, 8, 0]),
                    acquire(&shard_key(0), [5, 8, 0]),
                ]
            );
            assert_eq!([0, 1, 2, 3].map(|shard| worker.store.used(&shard_key(shard))), [9, 0, 10, 10]);
            // The next fetch begins where there were tokens. The lowest usage that is possible is known.
            assert_eq!(worker.record("a", |record| record.shard), 0);
            assert_eq!(
                worker.shared.table.known_usage(worker.counter("a", 0), START_MS),
                Some((START_MS + HOUR_MS, 39))
            );
        });
    }

    #[test]
    fn a_shard_is_asked_again_for_all_that_it_has() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.record("a", |record| record.shard = 0);
            worker.store.set_used(&shard_key(0), 1);
            let key = |shard, need| acquire(&shard_key(shard), [need, 12, 0]);
            let started = worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 12, 12)]);
            assert!(started[0].finished().await);
            assert_eq!(worker.store.take_calls(), [key(0, 10), key(0, 9), key(1, 3)]);
        });
    }

    #[test]
    fn shards_have_a_part_of_the_limit_and_no_known_usage() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.record("a", |record| record.shard = 3);
            let fetch = worker.fetch(0, 0, "a", 2, 3);
            let doubted = CounterRequest { used_min: 30, ..fetch.request.clone() };
            let started = worker.shared.start_fetches(vec![TokenFetch { request: doubted, ..fetch }]);
            assert!(started[0].finished().await);
            assert_eq!(worker.store.take_calls(), [acquire(&shard_key(3), [2, 3, 0])]);
            assert_eq!(worker.store.last_ceiling(), 10);
            // All shards together have used what was known before.
            let known = worker.shared.table.known_usage(worker.counter("a", 0), START_MS);
            assert_eq!(known, Some((START_MS + HOUR_MS, 30)));
            // Tokens go back to their shard.
            worker.shared.return_idle(true).await;
            assert_eq!(worker.store.take_calls(), [refund(&shard_key(3), 3)]);
        });
    }

    #[test]
    fn a_shard_without_tokens_does_not_end_prefetching() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.record("a", |record| record.shard = 0);
            worker.store.set_used(&shard_key(0), 10);
            let finished =
                async || worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 0, 8)])[0].finished().await;
            assert!(finished().await);
            assert_eq!(
                worker.leased_tokens("a", 0),
                2,
                "an eighth of what the second shard has, and one that is needed"
            );
            worker.record("a", |record| {
                assert_eq!(record.shard, 1);
                assert!(record.is_low(1, START_MS));
            });
        });
    }

    #[test]
    fn the_usage_of_shards_is_estimated_from_those_that_replied() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.record("a", |record| record.shard = 1);
            worker.store.set_used(&shard_key(1), 3);
            assert_eq!(worker.decide("a", 2).await, Some(true));
            assert_eq!(worker.store.take_calls(), [acquire(&shard_key(1), [2, 2, 0])]);
            let known = worker.shared.table.known_usage(worker.counter("a", 0), START_MS);
            assert_eq!(known, Some((START_MS + HOUR_MS, 4 * 5)));
        });
    }

    #[test]
    fn a_sharded_counter_is_refused_when_no_shard_has_tokens() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            (0..4).for_each(|shard| worker.store.set_used(&shard_key(shard), 10));
            worker.store.set_used(&shard_key(1), 9);
            let started = worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 2, 2)]);
            assert!(started[0].finished().await);
            let refused: Vec<u64> = started[0].refused.borrow().iter().map(|(_, reply)| reply.used).collect();
            assert_eq!(refused, [40]);
            assert_eq!(worker.decide("a", 2).await, Some(false));
            // The last token is leased, and not returned: another request may need one.
            assert_eq!((worker.store.used(&shard_key(1)), worker.leased_tokens("a", 0)), (10, 1));
            let known = worker.shared.table.known_usage(worker.counter("a", 0), START_MS);
            assert_eq!(known, Some((START_MS + HOUR_MS, 40)));
        });
    }

    #[test]
    fn a_new_counter_is_fetched_from_the_shard_of_the_worker() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            let started = worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1)]);
            assert!(started[0].finished().await);
            assert_eq!(worker.shared.own_shard % 4, 1);
            assert_eq!(worker.store.take_calls(), [acquire(&shard_key(1), [1, 1, 0])]);
        });
    }

    #[test]
    fn shards_without_a_reply_are_reported_as_a_failed_call() {
        run(async {
            let worker = TestWorker::new(&[sharded("40/hour")]).await;
            worker.store.set_lead_ms(-5000);
            let finished =
                async || worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 1, 1)])[0].finished().await;
            assert!(!finished().await, "the clocks differ too much");
            worker.store.set_lead_ms(0);
            assert!(finished().await);
            worker.store.set_down(true);
            assert!(!finished().await);
        });
    }

    #[test]
    fn a_reply_refuses_only_the_counters_that_are_full() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let end_ms = START_MS + HOUR_MS;
            let fetch = worker.fetch(0, 0, "a", 10, 10);
            assert_eq!(worker.deposit(&fetch, 0, 90, end_ms), None, "another counter of the call is full");
            assert_eq!(worker.deposit(&fetch, 0, 91, end_ms), Some(91));
            assert_eq!(worker.deposit(&fetch, 10, 101, end_ms), None);
            let read = worker.fetch(0, 0, "a", 0, 10);
            assert_eq!(worker.deposit(&read, 0, 200, end_ms), None, "nothing was needed");
            // The known usage does not decrease.
            let doubted = TokenFetch { request: CounterRequest { used_min: 205, ..fetch.request.clone() }, ..fetch };
            assert_eq!(worker.deposit(&doubted, 0, 50, end_ms), Some(205));
            let sharded = TokenFetch { shards: 4, ..worker.fetch(0, 0, "a", 10, 10) };
            assert_eq!(worker.deposit(&sharded, 0, 100, end_ms), None, "another shard may have tokens");
        });
    }

    #[test]
    fn a_counter_is_confirmed_by_a_reply_that_knows_its_usage() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            let base = worker.fetch(0, 0, "a", 1, 1);
            let fetch = TokenFetch { request: CounterRequest { used_min: 50, ..base.request.clone() }, ..base };
            for (used, generation) in [(49, 0), (50, 1), (51, 1)] {
                worker.record("a", |record| record.generation = 0);
                worker.deposit(&fetch, 1, used, START_MS + HOUR_MS);
                assert_eq!(worker.record("a", |record| record.generation), generation, "{used}");
            }
        });
    }

    #[test]
    fn a_store_that_grants_nothing_in_advance_is_not_asked_again() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let (end_ms, now_ms) = (START_MS + HOUR_MS, START_MS);
            let is_low = || worker.record("a", |record| record.is_low(1, now_ms));
            let (needed, advance) = (worker.fetch(0, 0, "a", 8, 8), worker.fetch(0, 0, "a", 0, 8));
            worker.record("a", |_record| ());
            worker.deposit(&needed, 8, 8, end_ms);
            assert!(is_low());
            worker.deposit(&needed, 0, 100, end_ms);
            assert!(is_low(), "a refusal of what is needed says nothing of less");
            worker.deposit(&advance, 0, 100, end_ms);
            assert!(!is_low());
            worker.deposit(&advance, 1, 100, end_ms);
            worker.deposit(&advance, 8, 100, end_ms);
            assert!(!is_low());
            worker.deposit(&needed, 8, 100, end_ms);
            assert!(is_low());
        });
    }

    #[test]
    fn granted_tokens_end_a_known_refusal() {
        run(async {
            let worker = TestWorker::new(&[sliding("100/hour")]).await;
            let usage = Usage { used: 100, end_ms: START_MS + 50 };
            let request = AcquireRequest::plain(START_MS + HOUR_MS, 100, 1);
            let counter = worker.counter("a", 0);
            let fetch = worker.fetch(0, 0, "a", 1, 1);
            let end_ms = START_MS + HOUR_MS;
            worker.shared.note_refusal(counter, Some(Refusal { need: 1, cost: 1, limit: 100, usage }));
            worker.deposit(&fetch, 0, 100, end_ms);
            let is_known =
                |need, request, now_ms| worker.shared.known_refusal(counter, need, request, now_ms).is_some();
            let known = |now_ms| is_known(1, request, now_ms);
            assert!(known(START_MS) && !is_known(2, request, START_MS));
            assert!(!is_known(1, AcquireRequest { limit: 99, ..request }, START_MS));
            assert!(!is_known(1, AcquireRequest { cost: 2, ..request }, START_MS));
            assert!(known(START_MS + 49) && !known(START_MS + 50), "tokens come back");
            worker.shared.table.set_known_usage(counter, end_ms, 99, START_MS);
            assert!(!known(START_MS), "tokens were refunded");
            worker.shared.table.set_known_usage(counter, end_ms, 101, START_MS);
            assert!(!known(START_MS), "it fits later");
            worker.shared.table.set_known_usage(counter, end_ms, 100, START_MS);
            assert!(known(START_MS));
            worker.deposit(&fetch, 1, 100, end_ms);
            assert!(!known(START_MS));
        });
    }

    /// Tokens that a client on a plan has leased and not used are spent by others as far as their own limit allows.
    #[test]
    fn a_lease_of_a_greater_limit_is_spent_up_to_the_own_one() {
        run(async {
            let mut rule = sliding("4/hour");
            let layers = sliding("7/hour").layers;
            rule.plans = vec![Plan { name: "gold".to_owned(), layers, concurrent: None }];
            let worker = TestWorker::new(&[rule]).await;
            let gold = VariantId::at(1);
            let decide = async |variant, cost| {
                let (decision, context) = worker.outcome_of(variant, "a", cost).await.unwrap();
                (matches!(decision, Decision::Admitted), context)
            };
            assert!(decide(gold, 4).await.0);
            let (is_admitted, context) = decide(gold, 2).await;
            let receipts: Vec<_> = context.all_receipts().collect();
            worker.rule_set.refund(&receipts, u32::MAX, &worker.shared.table, START_MS);
            assert_eq!((is_admitted, worker.leased_tokens("a", 0), worker.store.used(SLIDING_KEY)), (true, 2, 6));
            worker.settled_calls().await;
            let default = VariantId::DEFAULT;
            let (is_admitted, context) = decide(default, 1).await;
            let full: Vec<_> = context.result.charges.iter().map(|charge| charge.is_full).collect();
            assert_eq!((is_admitted, full), (false, vec![true]), "four of four are used");
            assert_eq!(worker.settled_calls().await[0], acquire(SLIDING_KEY, [0, 0, 0]), "tokens may have come back");
            assert!(!decide(default, 1).await.0);
            assert_eq!(worker.settled_calls().await, [], "none has come back since");
            assert!(decide(gold, 1).await.0);
            assert_eq!((worker.leased_tokens("a", 0), worker.settled_calls().await), (1, vec![]));
            assert!(!decide(default, 1).await.0);
            worker.settled_calls().await;
            // Tokens have come back, and the gateway does not know.
            worker.store.set_used(SLIDING_KEY, 3);
            worker.record("a", |record| record.refusal = None);
            assert!(decide(default, 1).await.0, "two of four are used");
            assert_eq!((worker.leased_tokens("a", 0), worker.store.used(SLIDING_KEY)), (0, 3));
        });
    }

    #[test]
    fn a_refusal_of_a_sliding_window_states_the_limit() {
        run(async {
            let worker = TestWorker::new(&[sliding("5/hour")]).await;
            assert_eq!(worker.decide("a", 5).await, Some(true));
            worker.settled_calls().await;
            for _ in 0..2 {
                let (decision, context) = worker.outcome("a", 1).await.unwrap();
                let charge = &context.result.charges.as_slice()[0];
                assert!(matches!(decision, Decision::Refused) && charge.is_full);
                assert_eq!((charge.usage.used, charge.request.ceiling), (5, 5));
            }
        });
    }

    #[test]
    fn a_flood_of_refused_requests_asks_the_store_once_if_more_is_known_than_it_reports() {
        run(async {
            let worker = TestWorker::new(&[sliding("5/hour")]).await;
            assert_eq!(worker.decide("a", 5).await, Some(true));
            worker.settled_calls().await;
            // Soon after an outage the known usage does not become less.
            let shared = &worker.shared;
            shared.breaker.close(ServerId::ONLY, worker.clock.instant());
            let (counter, now_ms) = (worker.counter("a", 0), worker.clock.now().unix_ms);
            let (end_ms, _) = shared.table.known_usage(counter, now_ms).unwrap();
            shared.raise_known_usage(counter, end_ms, 7, now_ms);
            for _ in 0..9 {
                assert_eq!(worker.decide("a", 1).await, Some(false));
            }
            // The second is the check in the background.
            assert_eq!(worker.settled_calls().await.len(), 2);
        });
    }

    #[test]
    fn a_refusal_of_a_sliding_window_states_the_usage_of_other_windows() {
        run(async {
            let worker = TestWorker::new(&[sliding("5/hour"), leased(&["1000/hour"])]).await;
            for _ in 0..5 {
                assert_eq!(worker.decide("a", 1).await, Some(true));
            }
            worker.settled_calls().await;
            // The first refusal is that of the store, the others repeat it.
            for _ in 0..3 {
                let (decision, context) = worker.outcome("a", 1).await.unwrap();
                let [sliding, quota] = context.result.charges.as_slice() else { panic!("a charge for each rule") };
                assert!(matches!(decision, Decision::Refused) && sliding.is_full && !quota.is_full);
                assert_eq!((sliding.usage.used, quota.usage.used, quota.request.ceiling), (5, 5, 1000));
                worker.settled_calls().await;
            }
        });
    }

    #[test]
    fn unspent_tokens_of_an_ended_window_expire() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let end_ms = START_MS + HOUR_MS;
            worker.record("a", |_record| ());
            worker.deposit(&worker.fetch(0, 0, "a", 8, 8), 8, 8, end_ms);
            worker.deposit(&worker.fetch(0, 0, "a", 8, 8), 8, 16, end_ms);
            assert_eq!((worker.tokens("expired"), worker.leased_tokens("a", 0)), (0, 16));
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            worker.deposit(&worker.fetch(0, 0, "a", 8, 8), 8, 8, end_ms + HOUR_MS);
            assert_eq!((worker.tokens("expired"), worker.leased_tokens("a", 0)), (16, 8));
        });
    }

    #[test]
    fn unspent_tokens_of_an_ended_segment_are_refunded() {
        run(async {
            let worker = TestWorker::new(&[sliding("8000/hour")]).await;
            let segment_ms = HOUR_MS / 8;
            let deposit = |granted, segment| {
                let in_flight = InFlightFetch::new(Vec::new());
                let fetch = worker.fetch(0, 0, "a", granted, granted);
                let number = START_MS / segment_ms + segment;
                let end_ms = START_MS + HOUR_MS + segment * segment_ms;
                let reply = CounterReply { granted, used: granted, end_ms, available_ms: end_ms, number, call: 0 };
                worker.shared.deposit_tokens(&fetch, &fetch.request, reply, &in_flight);
            };
            worker.record("a", |_record| ());
            deposit(8, 0);
            worker.clock.advance(Duration::from_millis(segment_ms));
            worker.store.set_used(SLIDING_KEY, 8);
            deposit(3, 1);
            assert_eq!(worker.store.next_calls().await, [refund(SLIDING_KEY, 8)]);
            let BeginResult::Decided(_) = worker.begin("a", 3).0 else { panic!("enough tokens are leased") };
            worker.clock.advance(Duration::from_millis(segment_ms));
            deposit(2, 2);
            assert_eq!(worker.settled_calls().await, [], "all tokens of the second segment were spent");
            assert_eq!((worker.tokens("expired"), worker.leased_tokens("a", 0)), (0, 2));
        });
    }

    #[test]
    fn tokens_that_do_not_fit_are_given_to_the_request_that_waits() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.store.hold();
            let release = async {
                worker.store.next_calls().await;
                // The window ends: the tokens do not fit in the table.
                worker.clock.advance(Duration::from_millis(HOUR_MS));
                worker.store.release();
            };
            let (outcome, ()) = tokio::join!(worker.pending("a", 3).decide(&worker.charge_plan), release);
            assert!(matches!(outcome.unwrap().decision, Decision::Admitted));
            // All were taken: there is nothing to refund, and no second fetch.
            assert_eq!(worker.settled_calls().await, []);
            assert_eq!(worker.store.used(KEY), 3);
        });
    }

    #[test]
    fn tokens_that_do_not_fit_are_refunded_if_no_request_takes_them() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.store.hold();
            let started =
                worker.shared.start_fetches(vec![worker.fetch(0, 0, "a", 3, 3), worker.fetch(0, 0, "b", 2, 2)]);
            worker.store.next_calls().await;
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            worker.store.release();
            assert!(started[0].finished().await);
            let refunds = vec![(KEY.to_owned(), 3), (KEY.replace("|a", "|b"), 2)];
            assert_eq!(worker.store.next_calls().await, [Call::Refund(refunds)]);
        });
    }

    #[test]
    fn undeposited_tokens_of_another_counter_are_not_taken() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let target = worker.fetch(0, 0, "a", 1, 1).request.refund_target(CounterReply {
                granted: 5,
                used: 5,
                end_ms: START_MS + HOUR_MS,
                available_ms: START_MS + HOUR_MS,
                number: 500_000,
                call: 0,
            });
            let in_flight = |key, tokens, capacity| {
                let id = counter_id(worker.counter(key, 0));
                let in_flight = InFlightFetch::new(vec![id]);
                in_flight.undeposited.borrow_mut().push(UndepositedTokens {
                    id,
                    tokens,
                    capacity,
                    refund_target: target.clone(),
                });
                in_flight
            };
            let taken = |key, tokens, capacity| {
                let mut pending = worker.pending("a", 3);
                let in_flight = in_flight(key, tokens, capacity);
                pending.take_undeposited(&worker.charge_plan, &[ChargePosition::FIRST], &in_flight);
                // Once for each layer.
                pending.take_undeposited(&worker.charge_plan, &[ChargePosition::FIRST], &in_flight);
                let refunds = pending.progress.refunds.drain(..).map(|(_, refund)| refund.tokens).collect::<Vec<_>>();
                (
                    in_flight.undeposited.borrow()[0].tokens,
                    refunds,
                    std::mem::take(&mut pending.context.sharing.prepaid),
                )
            };
            let layer = worker.layer_ref(0, 0);
            assert_eq!(taken("a", 7, 99), (4, vec![3], vec![layer]));
            assert_eq!(taken("a", 3, 100), (0, vec![3], vec![layer]));
            assert_eq!(taken("a", 2, 100), (2, vec![], vec![]));
            assert_eq!(taken("a", 7, 101), (7, vec![], vec![]), "they were granted up to a greater limit");
            assert_eq!(taken("b", 7, 100), (7, vec![], vec![]));
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            assert_eq!(taken("a", 7, 99), (7, vec![], vec![]), "their window has ended");
        });
    }

    #[test]
    fn an_exhausted_window_is_checked_in_the_background() {
        run(async {
            let worker = TestWorker::new(&[leased(&["5/hour"])]).await;
            worker.store.set_used(KEY, 5);
            assert_eq!(worker.decide("a", 5).await, Some(false));
            assert_eq!(worker.store.take_calls(), [acquire(KEY, [5, 5, 0])]);
            // The first check is due at once.
            assert_eq!(worker.store.next_calls().await, [acquire(KEY, [0, 5, 0])]);
            assert_eq!(worker.decide("a", 5).await, Some(false));
            assert_eq!(worker.settled_calls().await, []);
        });
    }

    #[test]
    fn a_window_is_not_checked_for_more_than_it_can_have_or_at_an_unreachable_server() {
        run(async {
            let worker = TestWorker::new(&[leased(&["5/hour"])]).await;
            let recheck = |key, cost| {
                let mut context = worker.context(key, cost);
                worker.shared.begin(&worker.charge_plan, &mut context, |_| None);
                context.result.charges.iter_mut().for_each(|charge| charge.is_full = true);
                worker.record(key, |record| record.in_flight = None);
                let text = worker.store_keys(key);
                worker.shared.recheck(&worker.charge_plan, &context, |rule| text[rule].clone());
                worker.record(key, |record| record.in_flight.is_some())
            };
            assert!(!recheck("a", 6) && recheck("b", 5));
            let now = worker.clock.instant();
            worker.shared.breaker.record_failure(ServerId::ONLY, FAILURES_MAX, now, Duration::ZERO);
            assert!(!recheck("c", 5));
        });
    }

    #[test]
    fn a_refused_request_is_charged_what_is_left() {
        run(async {
            let rule = Rule { count_refused: true, ..leased(&["5/hour"]) };
            let worker = TestWorker::new(&[rule]).await;
            worker.store.set_used(KEY, 3);
            assert_eq!(worker.decide("a", 4).await, Some(false));
            assert_eq!(worker.settled_calls().await[0], acquire(KEY, [4, 4, 0]));
            assert_eq!(worker.store.used(KEY), 5);
            // Nothing is left.
            assert_eq!(worker.decide("a", 4).await, Some(false));
            assert_eq!(worker.settled_calls().await, []);
        });
    }

    #[test]
    fn refused_requests_before_the_first_reply_are_charged_what_is_left() {
        run(async {
            let rule = Rule { count_refused: true, ..leased(&["5/hour"]) };
            let worker = TestWorker::new(&[rule, local("2/hour")]).await;
            worker.store.hold();
            for (cost, known) in [(3, 3), (4, 5), (3, 5)] {
                assert_eq!(worker.decide("a", cost).await, Some(false));
                assert_eq!(worker.known_usage("a"), Some(known));
            }
            worker.store.release();
            assert_eq!(worker.settled_calls().await[..2], [acquire(KEY, [3, 3, 0]), acquire(KEY, [2, 2, 0])]);
            assert_eq!((worker.store.used(KEY), worker.known_usage("a")), (5, Some(5)));
        });
    }

    /// It relied on usage that the server behind the new connection may not have.
    #[test]
    fn a_request_that_was_made_before_a_reconnect_is_not_sent() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            let request = |key| [worker.fetch(0, 0, key, 1, 1).request];
            let before = request("a");
            worker.store.set_refusing(true);
            worker.shared.acquire(&request("b")).await.unwrap_err();
            worker.store.set_refusing(false);
            worker.shared.store.ensure_connected(&before[0].key_base).await.unwrap();
            // Another task notices the new connection.
            let since = request("b");
            assert!(before[0].generation < since[0].generation);
            worker.store.take_calls();
            assert!(matches!(worker.shared.acquire(&before).await, Ok(AcquireReply::OtherWindow { .. })));
            assert_eq!(worker.settled_calls().await, []);
            assert!(matches!(worker.shared.acquire(&request("a")).await, Ok(AcquireReply::Granted { .. })));
        });
    }

    #[test]
    fn known_usage_is_sent_to_a_server_that_may_have_lost_it() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let (counter, end_ms) = (worker.counter("a", 0), START_MS + HOUR_MS);
            let used_min = || worker.fetch(0, 0, "a", 1, 1).request.used_min;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.shared.table.set_known_usage(counter, end_ms, 50, START_MS);
            assert_eq!(used_min(), 0);
            worker.record("a", |record| record.generation = 0);
            for (reconnected_ms, sent) in [(START_MS - 1, 0), (START_MS, 50), (START_MS + 1, 50)] {
                worker.shared.reconnected_ms.set(reconnected_ms);
                assert_eq!(used_min(), sent, "{reconnected_ms}");
            }
            let generation = worker.shared.generation.get();
            worker.record("a", |record| record.generation = generation);
            assert_eq!(used_min(), 0, "the server has confirmed it since");
            let known = |end_ms, generation| worker.shared.known_usage(counter, end_ms, 7, generation);
            assert_eq!(known(end_ms, generation), 7);
            assert_eq!(known(end_ms, generation + 1), 50);
            assert_eq!(known(end_ms + HOUR_MS, generation + 1), 7, "in another window");
        });
    }

    /// Only of a window in which they may lower the usage.
    #[test]
    fn refunds_on_their_way_are_part_of_what_a_server_is_told() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let counter = worker.counter("a", 0);
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.record("a", |record| record.generation = 0);
            worker.shared.reconnected_ms.set(u64::MAX);
            let used_min = || worker.fetch(0, 0, "a", 1, 1).request.used_min;
            let target = worker.record("a", |record| record.refund_target.clone().expect("a lease"));
            let refunds = [3, 4].map(|tokens| target.refund(tokens));
            worker.shared.begin_refunds(&refunds);
            worker.shared.table.set_known_usage(counter, START_MS + HOUR_MS, 50, START_MS);
            assert_eq!(used_min(), 57);
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            assert_eq!(used_min(), 0, "the window has ended");
        });
    }

    #[test]
    fn a_request_is_refused_after_too_many_rounds() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            for (rounds, is_admitted, calls) in [(ROUNDS_MAX - 1, true, 1), (ROUNDS_MAX, false, 0)] {
                let mut pending = worker.pending("a", 1);
                pending.progress.rounds = rounds;
                let outcome = pending.decide(&worker.charge_plan).await.unwrap();
                assert_eq!(matches!(outcome.decision, Decision::Admitted), is_admitted);
                let needed = |call: &Call| matches!(call, Call::Acquire(keys) if keys[0].1[0] > 0);
                assert_eq!(worker.store.take_calls().into_iter().filter(needed).count(), calls);
            }
        });
    }

    #[test]
    fn one_refused_call_refuses_the_request() {
        run(async {
            // The sliding rule is refused; the sharded one has a call of its own.
            for sharded_first in [false, true] {
                let wide = named("wide", sharded("4000/hour"));
                let mut rules = vec![sliding("5/hour"), wide];
                if sharded_first {
                    rules.reverse();
                }
                let worker = TestWorker::new(&rules).await;
                worker.store.set_used(SLIDING_KEY, 5);
                assert_eq!(worker.decide("a", 1).await, Some(false));
                let slides = |call: &Call| *call == acquire(SLIDING_KEY, [1, 1, 0]);
                assert_eq!(worker.store.take_calls().into_iter().filter(slides).count(), 1, "{sharded_first}");
            }
        });
    }

    #[test]
    fn a_refusal_is_known_without_space_in_the_table() {
        run(async {
            let worker = TestWorker::new(&[leased(&["5/hour"])]).await;
            for number in 0..100_000 {
                let key = format!("other-{number}");
                worker.shared.table.set_known_usage(worker.counter(&key, 0), START_MS + HOUR_MS, 1, START_MS);
            }
            worker.store.set_used(KEY, 5);
            assert_eq!(worker.decide("a", 1).await, Some(false));
            assert_eq!(worker.shared.table.known_usage(worker.counter("a", 0), START_MS), None);
            // One call for the request, and one that checks in the background whether tokens were returned.
            assert_eq!(worker.settled_calls().await, [acquire(KEY, [1, 1, 0]), acquire(KEY, [0, 1, 0])]);
        });
    }

    #[test]
    fn only_rules_without_a_reply_continue_without_the_store() {
        run(async {
            let wide = named("wide", leased(&["1000/hour"]));
            let worker = TestWorker::new(&[wide, leased(&["100/hour"])]).await;
            let end_ms = START_MS + HOUR_MS;
            let _ = worker.shared.table.deposit(worker.counter("a", 0), end_ms, 9, START_MS);
            worker.store.hold();
            let mut pending = worker.pending("a", 1);
            pending.deadline = Instant::from_std(worker.clock.instant());
            let outcome = pending.decide(&worker.charge_plan).await.unwrap();
            assert!(matches!(outcome.decision, Decision::Admitted));
            assert_eq!((worker.decided_in_outage("local"), worker.leased_tokens("a", 0)), (1, 8));
        });
    }
}
