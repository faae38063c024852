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

use tokio::time::Instant;

use super::decision::{DecisionProgress, NextStep, ROUNDS_MAX, SharedDecision, before_deadline};
use super::lease_sizing::{InFlightFetch, UndepositedTokens, counter_id};
use super::scripts::{AcquireReply, CounterReply, CounterRequest, KeyFormat, RefundTarget, WindowRef};
use super::shared_counters::SharedCounters;
use transom_limiter::counter::Usage;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::rule::Sharing;
use transom_limiter::rule_set::{ChargePlan, CountingMode, KeyedRequest, LayerRef, RuleSet, StoreFormat};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::store_key::{NumberedWindow, numbered_window};
use transom_limiter::table::Counter;

/// A fetch of tokens for one counter.
pub struct TokenFetch {
    /// The layer's ordinary counter.
    pub counter: Counter,
    /// The key in the store, and the suffix of the layer.
    pub key_text: Rc<str>,
    pub suffix: Rc<str>,
    pub shards: u32,
    /// The generation of connections when `request` was made.
    pub generation: u64,
    pub request: CounterRequest,
}

impl SharedCounters {
    /// Starts the fetches, one call per server. The records refer to the calls until these end.
    pub(super) fn start_fetches(self: &Rc<Self>, fetches: Vec<TokenFetch>) -> Vec<Rc<InFlightFetch>> {
        let mut calls: Vec<Vec<TokenFetch>> = Vec::new();
        for fetch in fetches {
            // A split counter is fetched by itself, shard by shard.
            let joins = |call: &&mut Vec<TokenFetch>| {
                let is_near = |first: &TokenFetch| self.store.is_one_call(&first.request.base, &fetch.request.base);
                fetch.shards == 1 && call.first().is_some_and(|first| first.shards == 1 && is_near(first))
            };
            match calls.iter_mut().find(joins) {
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
        let (shared, under_way) = (Rc::clone(self), Rc::clone(&in_flight));
        tokio::task::spawn_local(async move {
            let answered = shared.fetch_tokens(&call, &under_way).await;
            under_way.ids.iter().for_each(|id| _ = shared.leases.with_existing(*id, |record| record.in_flight = None));
            under_way.finish(answered);
            // Waiting requests run now and take what they need; the rest is refunded.
            tokio::task::yield_now().await;
            let rest = under_way.undeposited.take();
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
            Ok(AcquireReply::Granted { counters: took, .. } | AcquireReply::Refused { counters: took, .. }) => {
                call.iter()
                    .zip(took)
                    .for_each(|(fetch, took)| self.deposit_tokens(fetch, &fetch.request, took, in_flight));
                true
            }
            Ok(AcquireReply::OtherWindow { time_ms }) => self.agrees_on_time(time_ms),
            Err(_reported) => false,
        }
    }

    /// Asks the shards in turn until there are enough tokens, beginning with the shard that had tokens the last time.
    async fn fetch_from_shards(self: &Rc<Self>, fetch: &TokenFetch, in_flight: &InFlightFetch) -> bool {
        let (shards, whole) = (fetch.shards, u64::from(fetch.request.limit));
        let first =
            self.leases.with_existing(counter_id(fetch.counter), |record| record.shard).unwrap_or(self.own_shard)
                % shards;
        let (mut missing, mut used_most) = (fetch.request.need.max(1), 0);
        for i in 0..shards {
            let shard = (first + i) % shards;
            let part = part_of_shard(whole, shards, shard);
            let base = self.base(&fetch.key_text, &fetch.suffix, shard);
            // The next shard may have what one shard lacks.
            let (limit, mut need) = (part as u32, missing.min(part));
            let took = loop {
                let want = CounterRequest {
                    base: Rc::clone(&base),
                    limit,
                    ceiling: part,
                    need,
                    used_min: 0,
                    ..fetch.request.clone()
                };
                match self.acquire(std::slice::from_ref(&want)).await {
                    Ok(AcquireReply::Granted { counters: took, .. }) => break took,
                    // The shard has fewer tokens left.
                    Ok(AcquireReply::Refused { counters: took, .. }) => match took.first() {
                        Some(seen) if seen.used < part && part - seen.used < need => need = part - seen.used,
                        _ => break took,
                    },
                    Ok(AcquireReply::OtherWindow { time_ms }) => return self.agrees_on_time(time_ms),
                    Err(_reported) => return false,
                }
            };
            let want = CounterRequest { base, limit, ceiling: part, need, ..fetch.request.clone() };
            let Some(took) = took.first().copied() else { return false };
            // The total usage is only known when all shards were asked; until then the counter is not reported as
            // exhausted.
            used_most =
                took.used.saturating_mul(u64::from(shards)).clamp(used_most, whole.saturating_sub(1).max(used_most));
            self.leases.with_existing(counter_id(fetch.counter), |record| record.shard = shard);
            self.deposit_tokens(fetch, &want, CounterReply { used: used_most, ..took }, in_flight);
            missing = missing.saturating_sub(took.granted);
            if missing == 0 {
                return true;
            }
            if i + 1 == shards {
                self.table.set_known_usage(fetch.counter, took.end_ms, fetch.request.limit, self.clock.now().unix_ms);
                let all = CounterReply { used: whole, ..took };
                in_flight.refused.borrow_mut().push((counter_id(fetch.counter), all));
            }
        }
        true
    }

    /// Deposits granted tokens in the table.
    fn deposit_tokens(
        self: &Rc<Self>,
        fetch: &TokenFetch,
        want: &CounterRequest,
        took: CounterReply,
        in_flight: &InFlightFetch,
    ) {
        let (now_ms, id) = (self.clock.now().unix_ms, counter_id(fetch.counter));
        // If nothing was acquired, the reply is only what the store knows.
        let known = self.known_usage(fetch.counter, took.end_ms, want.used_min, fetch.generation);
        let has_forgotten = took.used < known;
        let used = took.used.max(known);
        self.note_store_usage(fetch.counter, took.end_ms, used, now_ms);
        if want.need > 0 && took.granted == 0 && fetch.shards == 1 {
            in_flight.refused.borrow_mut().push((id, CounterReply { used, ..took }));
        }
        let refund_target = want.refund_target(took);
        let former = self.leases.with_existing(id, |record| {
            if !has_forgotten {
                record.generation = self.generation.get();
            }
            record.record_reply(took.granted, took.end_ms, want.need > 0);
            record.refund_target.replace(refund_target.clone())
        });
        if let Some(former) = former.flatten().filter(|former| former.end_ms < took.end_ms) {
            self.discard_ended_lease(fetch.counter, &former);
        }
        let Ok(tokens) = u32::try_from(took.granted) else { return };
        if tokens == 0 {
            return;
        }
        self.meter.fetched(took.granted);
        match self.table.deposit(fetch.counter, took.end_ms, tokens, now_ms) {
            DepositResult::Stored => {}
            DepositResult::Full | DepositResult::Expired => {
                in_flight.undeposited.borrow_mut().push(UndepositedTokens { id, tokens: took.granted, refund_target });
            }
        }
    }

    /// Withdraws what remains of an ended window: of plain windows it has expired, of connected ones it belongs to the
    /// next window.
    fn discard_ended_lease(self: &Rc<Self>, counter: Counter, former: &RefundTarget) {
        let left = self.table.withdraw(counter, former.end_ms, u32::MAX);
        match former.kind {
            KeyFormat::Plain => self.meter.expired(u64::from(left)),
            KeyFormat::Grid | KeyFormat::Floating if left > 0 => {
                self.refund_later(vec![former.refund(u64::from(left))])
            }
            KeyFormat::Grid | KeyFormat::Floating => {}
        }
    }

    /// Fetches more tokens in the background where few are left, before a request has to wait.
    pub(super) fn prefetch(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
    ) {
        if context.sharing.low_leases.is_empty() {
            return;
        }
        let now = self.clock.instant();
        let mut fetches = Vec::new();
        for i in std::mem::take(&mut context.sharing.low_leases) {
            let (charge, line) = (&context.result.charges[i], context.result.layers[i]);
            let Some(keyed_request) = context.inputs.keyed_requests[line.rule] else { continue };
            let counter = rule_set.layer_of(charge_plan, line).counter(keyed_request);
            let now_ms = self.clock.now().unix_ms;
            let left = u64::from(self.table.leased_tokens(counter, now_ms));
            let cost = u64::from(charge.request.cost);
            let low = self.leases.with_existing(counter_id(counter), |record| {
                let text = record.key_text.clone().filter(|_| record.is_low(left, now_ms))?;
                Some((text, record.next_fetch_size(cost, now)))
            });
            if let Some((text, slice)) = low.flatten() {
                fetches.push(self.token_fetch(rule_set, charge_plan, line, keyed_request, text, 0, slice));
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
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        text: impl Fn(usize) -> Option<Rc<str>>,
    ) {
        let now = self.clock.instant();
        let mut fetches = Vec::new();
        for (charge, line) in
            context.result.charges.iter().zip(&context.result.layers).filter(|(charge, _)| charge.is_full)
        {
            let Some(keyed_request) = context.inputs.keyed_requests[line.rule]
                .filter(|_| context.sharing.counting_modes.get(line.rule) == Some(&CountingMode::Leased))
            else {
                continue;
            };
            let layer = rule_set.layer_of(charge_plan, *line);
            if u64::from(charge.request.cost) > u64::from(layer.capacity) {
                continue;
            }
            let period_ms = rule_set.windows[layer.windows_index].typical_ms();
            let due = self.leases.with_or_insert(layer.counter(keyed_request), self.own_shard, now, |record| {
                record.is_recheck_due(now, period_ms)
            });
            if due == Some(true)
                && let Some(text) = text(line.rule)
                && !self.is_unreachable(&self.base(&text, "", 0))
            {
                fetches.push(self.token_fetch(
                    rule_set,
                    charge_plan,
                    *line,
                    keyed_request,
                    text,
                    0,
                    u64::from(charge.request.cost),
                ));
            }
        }
        if !fetches.is_empty() {
            self.start_fetches(fetches);
        }
    }

    /// Charges a refused request what is left in the store, for rules with `count_refused`; in the background.
    pub(super) fn charge_refused_request(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        progress: &DecisionProgress,
        text: impl Fn(usize) -> Option<Rc<str>>,
    ) {
        if !charge_plan.counts_refused() {
            return;
        }
        let now_ms = self.clock.now().unix_ms;
        let mut requests = Vec::new();
        for (charge, line) in context.result.charges.iter().zip(&context.result.layers) {
            let rule = &rule_set.rules[charge_plan.rules[line.rule]].rule;
            let is_elsewhere =
                rule.count_refused && rule.sharing != Sharing::Local && !progress.without_store[line.rule];
            let capacity = u64::from(rule_set.layer_of(charge_plan, *line).capacity);
            let tokens = u64::from(charge.request.cost).min(capacity.saturating_sub(charge.usage.used));
            let (true, Some(keyed_request), Some(text)) =
                (is_elsewhere && tokens > 0, context.inputs.keyed_requests[line.rule], text(line.rule))
            else {
                continue;
            };
            let blank = self.counter_request(rule_set, charge_plan, *line, keyed_request, &text, now_ms);
            requests.push(CounterRequest { need: tokens, want: tokens, ..blank });
        }
        // Separate calls: each counter is charged, whatever the others have left.
        for want in requests {
            let shared = Rc::clone(self);
            tokio::task::spawn_local(async move { shared.acquire(&[want]).await });
        }
    }

    /// A request to the store for one layer, for 0 tokens.
    pub(super) fn counter_request(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        line: LayerRef,
        keyed_request: KeyedRequest,
        text: &str,
        now_ms: u64,
    ) -> CounterRequest {
        self.counter_request_of(rule_set, charge_plan.rules[line.rule], line.layer, keyed_request, text, now_ms)
    }

    /// As [`SharedCounters::counter_request`], for a layer of the rule at a position in the rule set.
    pub(super) fn counter_request_of(
        &self,
        rule_set: &RuleSet,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
        text: &str,
        now_ms: u64,
    ) -> CounterRequest {
        let entry = &rule_set.rules[rule];
        // Usage that was counted locally and is not reported yet is not handed out again.
        let here = self.used_locally(rule_set, rule, layer, keyed_request).used;
        let (suffix, layer) = (entry.suffix(layer), entry.layer(layer));
        let windows = &rule_set.windows[layer.windows_index];
        let at = match (layer.store_format, numbered_window(windows, now_ms, keyed_request.offset)) {
            (StoreFormat::Plain, Some(NumberedWindow { number, end_ms, next_end_ms })) => {
                WindowRef::Plain { number, end_ms, next_end_ms }
            }
            (StoreFormat::Account, Some(NumberedWindow { number, end_ms, next_end_ms })) => {
                WindowRef::Grid { number, end_ms, next_end_ms }
            }
            (StoreFormat::Floating, _) | (_, None) => WindowRef::Floating { period_ms: windows.typical_ms() },
        };
        let base = self.base(text, suffix, 0);
        let ceiling = u64::from(layer.capacity).saturating_sub(here);
        let least = self.used_at_least(layer.counter(keyed_request), windows.typical_ms(), now_ms);
        CounterRequest {
            base,
            window: at,
            limit: layer.limit,
            ceiling,
            need: 0,
            want: 0,
            used_min: least,
            computed_ms: now_ms,
        }
    }

    /// The usage of a layer by the local counters.
    pub(super) fn used_locally(
        &self,
        rule_set: &RuleSet,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
    ) -> Usage {
        rule_set.local_usage(rule, layer, keyed_request, &self.table, DecisionTime::read(&|| self.clock.now().unix_ms))
    }

    /// A lower bound of the usage, if the store may have lost counts; otherwise 0.
    fn used_at_least(&self, counter: Counter, period_ms: u64, now_ms: u64) -> u64 {
        self.note_reconnect(self.clock.instant());
        let Some((end_ms, used)) = self.table.known_usage(counter, now_ms) else { return 0 };
        let is_confirmed =
            self.leases.with_existing(counter_id(counter), |record| record.generation == self.generation.get());
        let is_doubtful = self.reconnected_ms.get() > end_ms.saturating_sub(period_ms);
        if is_doubtful && is_confirmed != Some(true) { u64::from(used) } else { 0 }
    }

    /// A lower bound of the usage after a reply: the request included `least`, or the connection was opened anew since,
    /// in which case a store that lost counts is not believed.
    pub(super) fn known_usage(&self, counter: Counter, end_ms: u64, least: u64, generation: u64) -> u64 {
        if generation == self.generation.get() {
            return least;
        }
        let known_usage = self.table.known_usage(counter, self.clock.now().unix_ms).filter(|(end, _)| *end == end_ms);
        least.max(known_usage.map_or(0, |(_, used)| u64::from(used)))
    }

    #[allow(clippy::too_many_arguments, reason = "all of them are what is fetched, for whom")]
    pub(super) fn token_fetch(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        line: LayerRef,
        keyed_request: KeyedRequest,
        text: Rc<str>,
        need: u64,
        want: u64,
    ) -> TokenFetch {
        let entry = &rule_set.rules[charge_plan.rules[line.rule]];
        let layer = entry.layer(line.layer);
        let blank = self.counter_request(rule_set, charge_plan, line, keyed_request, &text, self.clock.now().unix_ms);
        TokenFetch {
            counter: layer.counter(keyed_request),
            suffix: entry.suffix(line.layer).into(),
            key_text: text,
            shards: layer.store_shards,
            generation: self.generation.get(),
            request: CounterRequest { need, want, ..blank },
        }
    }
}

impl SharedDecision {
    /// Fetches tokens for the counters that lack some. `Some`: the decision continues with that step; nothing from
    /// `first` on is charged.
    pub(super) async fn fetch_lacking(
        &mut self,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        first: usize,
    ) -> Option<NextStep> {
        let lacking = std::mem::take(&mut self.context.sharing.missing_tokens);
        self.progress.rounds += 1;
        let rules = self.rules_of(&lacking);
        if self.skip_unreachable(&rules) {
            self.context.truncate(first);
            return None;
        }
        // The store replies, but other requests have taken the tokens.
        if self.progress.rounds > ROUNDS_MAX {
            return self.refuse(rule_set, charge_plan, first);
        }
        if self.is_past_deadline() {
            self.skip_store(&rules);
            self.context.truncate(first);
            return None;
        }
        let (calls_in_flight, are_own) = self.start_or_join_fetches(rule_set, charge_plan, &lacking);
        let began = Instant::from_std(self.shared.clock.instant());
        // Which of them the store refuses is not known yet.
        lacking.iter().for_each(|i| self.context.result.charges[*i].is_full = false);
        let mut is_refused = false;
        for in_flight in &calls_in_flight {
            let is_brought = |i: &usize| {
                self.counter_of(rule_set, charge_plan, *i)
                    .is_some_and(|counter| in_flight.includes(counter_id(counter)))
            };
            let brought: Vec<usize> = lacking.iter().copied().filter(is_brought).collect();
            match before_deadline(self.deadline, in_flight.finished()).await {
                Some(true) => {
                    self.take_undeposited(rule_set, charge_plan, &brought, in_flight);
                    is_refused |= are_own && self.is_refused(rule_set, charge_plan, &brought, in_flight);
                }
                Some(false) => self.skip_store(&self.rules_of(&brought)),
                None => self.time_out(&self.rules_of(&brought), began),
            }
        }
        if is_refused {
            return self.refuse(rule_set, charge_plan, first);
        }
        self.context.truncate(first);
        None
    }

    fn rules_of(&self, charges: &[usize]) -> Vec<usize> {
        let mut rules: Vec<usize> = charges.iter().map(|i| self.context.result.layers[*i].rule).collect();
        rules.dedup();
        rules
    }

    /// The ordinary counter of a charge.
    fn counter_of(&self, rule_set: &RuleSet, charge_plan: &ChargePlan, charge: usize) -> Option<Counter> {
        let line = self.context.result.layers[charge];
        self.context.inputs.keyed_requests[line.rule]
            .map(|keyed_request| rule_set.layer_of(charge_plan, line).counter(keyed_request))
    }

    /// The calls that fetch what is lacking, and whether this request has started them: fetches in flight are joined
    /// first.
    fn start_or_join_fetches(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        lacking: &[usize],
    ) -> (Vec<Rc<InFlightFetch>>, bool) {
        let shared = &self.shared;
        let now = shared.clock.instant();
        let (mut fetches, mut under_way) = (Vec::new(), Vec::<Rc<InFlightFetch>>::new());
        for i in lacking {
            let (charge, line) = (&self.context.result.charges[*i], self.context.result.layers[*i]);
            let (Some(keyed_request), Some(text)) =
                (self.context.inputs.keyed_requests[line.rule], self.key_text(line.rule))
            else {
                continue;
            };
            let cost = u64::from(charge.request.cost);
            let need = cost.saturating_sub(charge.request.ceiling.saturating_sub(charge.usage.used));
            let counter = rule_set.layer_of(charge_plan, line).counter(keyed_request);
            let slice = shared.leases.with_or_insert(counter, shared.own_shard, now, |record| {
                record.key_text = Some(Rc::clone(&text));
                match &record.in_flight {
                    Some(in_flight) => {
                        record.waiting_tokens += need;
                        if !under_way.iter().any(|known| Rc::ptr_eq(known, in_flight)) {
                            under_way.push(Rc::clone(in_flight));
                        }
                        need
                    }
                    None => record.next_fetch_size(need, now),
                }
            });
            fetches.push(shared.token_fetch(
                rule_set,
                charge_plan,
                line,
                keyed_request,
                text,
                need,
                slice.unwrap_or(need),
            ));
        }
        if under_way.is_empty() { (shared.start_fetches(fetches), true) } else { (under_way, false) }
    }

    /// Takes tokens that the table had no place for, as many as this request needs.
    fn take_undeposited(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        brought: &[usize],
        in_flight: &InFlightFetch,
    ) {
        let mut undeposited = in_flight.undeposited.borrow_mut();
        for i in brought {
            let Some(counter) = self.counter_of(rule_set, charge_plan, *i) else { continue };
            let (line, cost) =
                (self.context.result.layers[*i], u64::from(self.context.result.charges[*i].request.cost));
            let found = undeposited
                .iter_mut()
                .find(|undeposited| undeposited.id == counter_id(counter) && undeposited.tokens >= cost);
            if let Some(UndepositedTokens { tokens, refund_target, .. }) = found
                && !self.context.sharing.prepaid.contains(&line)
            {
                *tokens -= cost;
                self.context.sharing.prepaid.push(line);
                self.progress.refunds.push((line.rule, refund_target.refund(cost)));
            }
        }
    }

    /// Whether the store has refused and the table has no place to record it; records the refusal in the context then.
    fn is_refused(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        brought: &[usize],
        in_flight: &InFlightFetch,
    ) -> bool {
        let (refused, now_ms) = (in_flight.refused.borrow(), self.shared.clock.now().unix_ms);
        let mut is_refused = false;
        for i in brought {
            let Some(counter) = self.counter_of(rule_set, charge_plan, *i) else { continue };
            let took = refused.iter().find(|(id_, _)| *id_ == counter_id(counter)).map(|(_, took)| took);
            let charge = &mut self.context.result.charges[*i];
            charge.is_full = took.is_some();
            if let Some(took) = took.filter(|_| self.shared.table.known_usage(counter, now_ms).is_none()) {
                (charge.usage.used, charge.usage.end_ms) = (took.used, took.end_ms);
                is_refused = true;
            }
        }
        is_refused
    }
}
