//! What is asked of the store, worked out from rules and what lies on a desk: for those who wait, and in the background.

use std::rc::Rc;

use super::Shared;
use super::decision::DecisionProgress;
use super::lease_sizing::id;
use super::scripts::{At, CounterRequest};
use super::token_fetch::TokenFetch;
use transom_limiter::counter::Usage;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule::Sharing;
use transom_limiter::rule_set::{ChargePlan, CountingMode, KeyedRequest, LayerRef, RuleSet, StoreFormat};
use transom_limiter::store_key::{NumberedWindow, numbered_window};
use transom_limiter::table::Counter;

impl Shared {
    /// Asks for more tokens where few are left, before somebody has to wait for them.
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
        let mut errands = Vec::new();
        for i in std::mem::take(&mut context.sharing.low_leases) {
            let (charge, line) = (&context.result.charges[i], context.result.layers[i]);
            let Some(keyed_request) = context.inputs.keyed_requests[line.rule] else { continue };
            let counter = rule_set.layer_of(charge_plan, line).counter(keyed_request);
            let now_ms = self.clock.now().unix_ms;
            let left = u64::from(self.table.leased_tokens(counter, now_ms));
            let cost = u64::from(charge.request.cost);
            let low = self.leases.known(id(counter), |record| {
                let text = record.text.clone().filter(|_| record.is_low(left, now_ms))?;
                Some((text, record.slice(cost, now)))
            });
            if let Some((text, slice)) = low.flatten() {
                errands.push(self.errand(rule_set, charge_plan, line, keyed_request, text, 0, slice));
            }
        }
        if !errands.is_empty() {
            self.launch(errands);
        }
    }

    /// Asks in the background whether windows that are used up have room again: others may have returned what they had
    /// fetched, or the key may have been reset.
    pub(super) fn recheck(
        self: &Rc<Self>,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        text: impl Fn(usize) -> Option<Rc<str>>,
    ) {
        let now = self.clock.instant();
        let mut errands = Vec::new();
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
            let due = self.leases.with(layer.counter(keyed_request), self.own_shard, now, |record| {
                record.is_recheck_due(now, period_ms)
            });
            if due == Some(true)
                && let Some(text) = text(line.rule)
                && !self.is_beyond(&self.base(&text, "", 0))
            {
                errands.push(self.errand(
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
        if !errands.is_empty() {
            self.launch(errands);
        }
    }

    /// Lets a refused request consume what is left in the store, of rules for which refusals count; in the background.
    pub(super) fn count_refusal(
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
        let mut wants = Vec::new();
        for (charge, line) in context.result.charges.iter().zip(&context.result.layers) {
            let rule = &rule_set.rules[charge_plan.rules[line.rule]].rule;
            let is_elsewhere = rule.count_refused && rule.sharing != Sharing::Local && !progress.beyond[line.rule];
            let capacity = u64::from(rule_set.layer_of(charge_plan, *line).capacity);
            let tokens = u64::from(charge.request.cost).min(capacity.saturating_sub(charge.usage.used));
            let (true, Some(keyed_request), Some(text)) =
                (is_elsewhere && tokens > 0, context.inputs.keyed_requests[line.rule], text(line.rule))
            else {
                continue;
            };
            let blank = self.want(rule_set, charge_plan, *line, keyed_request, &text, now_ms);
            wants.push(CounterRequest { need: tokens, want: tokens, ..blank });
        }
        // Each for itself: that one has too little left is no reason not to consume another.
        for want in wants {
            let shared = Rc::clone(self);
            tokio::task::spawn_local(async move { shared.take(&[want]).await });
        }
    }

    /// What is asked of the store for one layer: nothing yet.
    pub(super) fn want(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        line: LayerRef,
        keyed_request: KeyedRequest,
        text: &str,
        now_ms: u64,
    ) -> CounterRequest {
        self.want_of(rule_set, charge_plan.rules[line.rule], line.layer, keyed_request, text, now_ms)
    }

    /// As [`Shared::want`], for a layer of the rule at a position in the book.
    pub(super) fn want_of(
        &self,
        rule_set: &RuleSet,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
        text: &str,
        now_ms: u64,
    ) -> CounterRequest {
        let entry = &rule_set.rules[rule];
        // What was counted here alone and is not told yet is not to be handed out.
        let here = self.used_here(rule_set, rule, layer, keyed_request).used;
        let (suffix, layer) = (entry.suffix(layer), entry.layer(layer));
        let windows = &rule_set.windows[layer.windows_index];
        let at = match (layer.store_format, numbered_window(windows, now_ms, keyed_request.offset)) {
            (StoreFormat::Plain, Some(NumberedWindow { number, end_ms, next_end_ms })) => {
                At::Plain { number, end_ms, next_end_ms }
            }
            (StoreFormat::Account, Some(NumberedWindow { number, end_ms, next_end_ms })) => {
                At::Grid { number, end_ms, next_end_ms }
            }
            (StoreFormat::Floating, _) | (_, None) => At::Floating { period_ms: windows.typical_ms() },
        };
        let base = self.base(text, suffix, 0);
        let ceiling = u64::from(layer.capacity).saturating_sub(here);
        let least = self.least(layer.counter(keyed_request), windows.typical_ms(), now_ms);
        CounterRequest { base, at, limit: layer.limit, ceiling, need: 0, want: 0, least, asked_ms: now_ms }
    }

    /// What a key has used of a layer by the counters of this machine.
    pub(super) fn used_here(
        &self,
        rule_set: &RuleSet,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
    ) -> Usage {
        rule_set.local_usage(rule, layer, keyed_request, &self.table, DecisionTime::read(&|| self.clock.now().unix_ms))
    }

    /// What is certainly used of a counter, if the store may not know it any more.
    fn least(&self, counter: Counter, period_ms: u64, now_ms: u64) -> u64 {
        self.met(self.clock.instant());
        let Some((end_ms, used)) = self.table.known_usage(counter, now_ms) else { return 0 };
        let is_confirmed = self.leases.known(id(counter), |record| record.generation == self.generation.get());
        let is_doubtful = self.doubtful_ms.get() > end_ms.saturating_sub(period_ms);
        if is_doubtful && is_confirmed != Some(true) { u64::from(used) } else { 0 }
    }

    /// What is certainly used, after an answer: the store was told so, or it is another one than when `least` was worked
    /// out, in `generation`. The call that finds a new connection is the first that would believe a store that has forgotten.
    pub(super) fn known(&self, counter: Counter, end_ms: u64, least: u64, generation: u64) -> u64 {
        if generation == self.generation.get() {
            return least;
        }
        let tally = self.table.known_usage(counter, self.clock.now().unix_ms).filter(|(end, _)| *end == end_ms);
        least.max(tally.map_or(0, |(_, used)| u64::from(used)))
    }

    #[allow(clippy::too_many_arguments, reason = "all of them are what is fetched, for whom")]
    pub(super) fn errand(
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
        let blank = self.want(rule_set, charge_plan, line, keyed_request, &text, self.clock.now().unix_ms);
        TokenFetch {
            counter: layer.counter(keyed_request),
            suffix: entry.suffix(line.layer).into(),
            text,
            shards: layer.store_shards,
            generation: self.generation.get(),
            want: CounterRequest { need, want, ..blank },
        }
    }
}
