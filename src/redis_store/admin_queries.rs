//! Decisions for those who ask without a request. They are few, and want to know what all gateways together have counted: so
//! the store is asked each time, and nothing is fetched for later.

use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::Shared;
use super::decision::{DecisionProgress, SharedDecision, SharedOutcome, Unavailable};
use super::exact_mode::Sent;
use super::scripts::{Answer, CounterRequest, Refund, TOKENS_MAX};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::{ChargePlan, CountingMode, KeyedRequest, LayerRef, RuleSet};

/// A question about one key under one rule, which is the only one of its roster.
pub struct Subject<'a> {
    pub rule_set: &'a Arc<RuleSet>,
    pub charge_plan: &'a ChargePlan,
    pub keyed_request: KeyedRequest,
    /// Whether tokens may be taken from windows to come.
    pub reserve: bool,
    /// What the key is in the store.
    pub text: Rc<str>,
}

/// What is used.
pub struct KeyState {
    pub context: DecisionContext,
    /// Whether what the question costs would be admitted.
    pub room: bool,
}

impl Shared {
    fn inquire(self: &Rc<Self>, subject: &Subject<'_>) -> Box<SharedDecision> {
        let mut context = DecisionContext::for_worker(self.own_shard);
        context.inputs.reserve = subject.reserve;
        context.inputs.keyed_requests.push(Some(subject.keyed_request));
        let mut progress = DecisionProgress::new(1);
        progress.asks = true;
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let texts = vec![Some(Rc::clone(&subject.text))];
        let (shared, rule_set) = (Rc::clone(self), Arc::clone(subject.rule_set));
        Box::new(SharedDecision { shared, rule_set, context, texts, progress, next: None, deadline })
    }

    /// Decides and consumes.
    pub async fn limit(self: &Rc<Self>, subject: &Subject<'_>) -> Result<SharedOutcome, Unavailable> {
        self.inquire(subject).decide(subject.charge_plan).await
    }

    /// Decides whether there is room, also in windows to come, and when; nothing is consumed by it.
    pub async fn check(self: &Rc<Self>, subject: &Subject<'_>) -> Result<(Decision, KeyState), Unavailable> {
        let SharedOutcome { judgement, context, gifts, .. } = self.limit(subject).await?;
        if let Decision::Refused = judgement {
            return Ok((judgement, KeyState { context, room: false }));
        }
        let shares: Vec<_> = context.all_receipts().collect();
        subject.rule_set.refund(&shares, u32::MAX, &self.table, self.clock.now().unix_ms);
        self.give(gifts.into_iter().map(|(_, gift)| gift).collect()).await;
        let standing = self.value(subject).await?;
        Ok((judgement, standing))
    }

    /// Reads only.
    pub async fn value(self: &Rc<Self>, subject: &Subject<'_>) -> Result<KeyState, Unavailable> {
        let (mut inquiry, _) = self.read(subject).await;
        if inquiry.progress.beyond.contains(&true) {
            let Subject { rule_set, charge_plan, .. } = subject;
            let context = &mut inquiry.context;
            let clock = || self.clock.now().unix_ms;
            rule_set.peek(charge_plan, &self.table, DecisionTime::read(&clock), context);
            // What is known of the others, and beside it what was counted here.
            let lines = context.result.layers.clone();
            rule_set.set_counting_modes(charge_plan, |_beyond| true, &mut context.sharing.counting_modes);
            if context.sharing.counting_modes.contains(&CountingMode::Remote) {
                return Err(Unavailable);
            }
            let room =
                rule_set.peek_local_fallback(charge_plan, &lines, &self.table, DecisionTime::read(&clock), context);
            return Ok(KeyState { context: take(&mut inquiry.context), room });
        }
        let room = inquiry.context.result.charges.iter().all(|charge| charge.usage.admits(charge.request));
        Ok(KeyState { context: take(&mut inquiry.context), room })
    }

    /// Forgets what was counted: in the store, and here. What other gateways have fetched before is theirs to spend.
    pub async fn reset(self: &Rc<Self>, subject: &Subject<'_>) -> Result<KeyState, Unavailable> {
        let Subject { rule_set, charge_plan, keyed_request, .. } = subject;
        let (inquiry, found) = self.read(subject).await;
        // What is forgotten here alone comes back with the store.
        if inquiry.progress.beyond.contains(&true) {
            return Err(Unavailable);
        }
        let mut gifts = found;
        gifts.iter_mut().for_each(|gift| gift.forgets = true);
        self.give(gifts).await;
        let now_ms = self.clock.now().unix_ms;
        rule_set.reset(&self.table, now_ms, &inquiry.context);
        for line in &inquiry.context.result.layers {
            let counter = rule_set.layer_of(charge_plan, *line).counter(*keyed_request);
            if let Some((end_ms, _)) = self.table.known_usage(counter, now_ms) {
                self.table.withdraw(counter, end_ms, u32::MAX);
                self.table.set_known_usage(counter, end_ms, 0, now_ms);
            }
        }
        self.value(subject).await
    }

    /// Adds what is used of all shards but the first to what is known of split counters, and leaves out what is fetched here and not
    /// spent.
    async fn add_shards(self: &Rc<Self>, subject: &Subject<'_>, inquiry: &mut SharedDecision, gifts: &mut Vec<Refund>) {
        let Subject { rule_set, charge_plan, keyed_request, text, .. } = subject;
        let now_ms = self.clock.now().unix_ms;
        for (charge, line) in inquiry.context.result.charges.iter_mut().zip(&inquiry.context.result.layers) {
            let layer = rule_set.layer_of(charge_plan, *line);
            let suffix = rule_set.rules[charge_plan.rules[line.rule]].suffix(line.layer);
            if layer.store_shards == 1 || inquiry.progress.beyond.contains(&true) {
                continue;
            }
            for shard in 1..layer.store_shards {
                let blank = self.want(rule_set, charge_plan, *line, *keyed_request, text, now_ms);
                let want = CounterRequest { base: self.base(text, suffix, shard), least: 0, ..blank };
                match self.take(std::slice::from_ref(&want)).await {
                    Ok(Answer::Granted { took, .. }) => {
                        let used = took.iter().fold(0, |sum: u64, took| sum.saturating_add(took.used));
                        charge.usage.used = charge.usage.used.saturating_add(used);
                        gifts.extend(took.iter().map(|took| want.origin(*took).gift(TOKENS_MAX)));
                    }
                    Ok(Answer::Refused { .. } | Answer::OtherWindow { .. }) | Err(_) => {
                        inquiry.progress.beyond.fill(true)
                    }
                }
            }
            let fetched = u64::from(self.table.leased_tokens(layer.counter(*keyed_request), now_ms));
            charge.usage.used = charge.usage.used.saturating_sub(fetched);
        }
    }

    /// Asks what is used of each layer, and what would give all of it back.
    async fn read(self: &Rc<Self>, subject: &Subject<'_>) -> (Box<SharedDecision>, Vec<Refund>) {
        let Subject { rule_set, charge_plan, keyed_request, .. } = subject;
        let mut inquiry = self.inquire(subject);
        let lines: Vec<LayerRef> = rule_set.enforced_layers(charge_plan, &mut inquiry.context);
        rule_set.add_prepared_charges(charge_plan, &lines, &self.table, self.clock.now().unix_ms, &mut inquiry.context);
        let cost = keyed_request.cost;
        inquiry.context.result.charges.iter_mut().for_each(|charge| charge.request.cost = 0);
        let mut gifts: Vec<Refund> = match inquiry.send(rule_set, charge_plan, 0).await {
            Sent::Granted(gifts) => gifts.into_iter().map(|(_, gift)| Refund { tokens: TOKENS_MAX, ..gift }).collect(),
            Sent::Refused | Sent::OtherWindow | Sent::Failed => {
                inquiry.progress.beyond.fill(true);
                Vec::new()
            }
        };
        inquiry.context.result.charges.iter_mut().for_each(|charge| charge.request.cost = cost);
        self.add_shards(subject, &mut inquiry, &mut gifts).await;
        (inquiry, gifts)
    }
}
