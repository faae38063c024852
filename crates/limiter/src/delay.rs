//! Decisions beyond the current window: delays, refusals that count, costs known only after the response, and the time
//! to retry.
//!
//! A delayed request is charged at once. In the layers of a full rule, it takes tokens of the window in which the rule
//! admits it, and no later request of the same key overtakes it: the remaining tokens of earlier windows are forfeited
//! in these layers. Layers that are not full are charged now, because other keys share them and must not be blocked by
//! a waiting request. If their window ends before the request proceeds, they are charged again then, and may still
//! refuse.

use crate::acquire::{AcquireResult, Charge, acquire_peeked, peek_all};
use crate::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use crate::concurrency::SlotState;
use crate::decision::{Decision, Waiter};
use crate::decision_context::{DecisionContext, DecisionResult};
use crate::decision_time::DecisionTime;
use crate::handles::{ChargePosition, IdVec, LayerId, PlanPosition, RuleId};
use crate::rule::OnLimit;
use crate::rule_set::{CountingMode, KeyedRequest, RuleSet};
use crate::sharded_counter::ShardReceipt;
use crate::shared_counting::{remote_usage, subtract_remote_usage};
use crate::sliding_counter::SlidingCounter;
use crate::table::{CounterResult, Table};
use crate::window::Time;
use crate::window_kind::{AcquireRequest, CEILING_MAX, Usage, WindowKind, tokens_granted};

/// How often a delayed request tries again after another request took its tokens.
const TRIES: u32 = 16;

impl ChargePlan {
    /// Charges a request that does not fit now in later windows, if its rules allow a delay.
    #[cold]
    pub(super) fn delay<const W: usize>(
        &self,
        table: &Table<W>,
        time: Time<'_>,
        context: &mut DecisionContext,
    ) -> Option<Decision> {
        let requests: Vec<AcquireRequest> = context.result.charges.iter().map(|charge| charge.request).collect();
        let mut waiter = None;
        for _ in 0..TRIES {
            let Some(admission_times) = self.admission_times(time, context) else { break };
            if waiter.is_none() {
                match self.reserve_waiter(context) {
                    Some(reserved) => waiter = reserved,
                    None => break,
                }
            }
            let until_ms = admission_times.iter().copied().max().unwrap_or(time.now_ms);
            let mut recharge = Vec::new();
            for charge in &mut context.result.charges {
                let end_ms = match admission_times[charge.layer.position] {
                    admit_at_ms if admit_at_ms > time.now_ms => self.request_window_at(charge, admit_at_ms, time),
                    // A token of a sliding window counts in the segment in which the request proceeds.
                    _ if charge.request.kind == WindowKind::Sliding => charge.request.end_ms,
                    _ => charge.usage.end_ms,
                };
                if end_ms <= until_ms {
                    recharge.push(charge.layer);
                }
            }
            let ends: Vec<u64> = context.result.charges.iter().map(|charge| charge.usage.end_ms).collect();
            let DecisionResult { charges, shard_receipts, .. } = &mut context.result;
            if acquire_peeked(table, charges.as_mut_slice(), shard_receipts, time) == AcquireResult::Admitted {
                let is_later = |(charge, end_ms): (&LayerCharge, &u64)| {
                    admission_times[charge.layer.position] > time.now_ms && charge.reserves_later_than(*end_ms)
                };
                if !context.result.charges.iter().zip(&ends).any(is_later) {
                    context.result.charges.iter_mut().for_each(|charge| charge.is_full = false);
                    return Some(Decision::Delayed { until_ms, waiter, recharge });
                }
                let receipts = context.take_receipts(ChargePosition::FIRST);
                self.rule_set().refund(&receipts, u32::MAX, table, time.now_ms);
            }
            // Another request took the tokens: peek again.
            context.result.charges.iter_mut().zip(&requests).for_each(|(charge, request)| charge.request = *request);
            if peek_all(table, context.result.charges.as_mut_slice(), time) {
                context.result.charges.iter_mut().for_each(|charge| charge.is_full = false);
            }
        }
        // The result reports the current windows.
        context.result.charges.iter_mut().zip(requests).for_each(|(charge, request)| charge.request = request);
        None
    }

    /// Reserves a slot in the waiter limit of the first full rule that delays. `Some(None)`: no full rule delays. `None`:
    /// too many requests wait already.
    pub fn reserve_waiter(&self, context: &DecisionContext) -> Option<Option<Waiter>> {
        let mut full = context.result.charges.iter().filter(|charge| charge.is_full);
        let Some(delaying) = full.find(|charge| self.rule_of(charge.layer).rule.delays()) else { return Some(None) };
        let slot = self.rule_of(delaying.layer).waiters.try_enter()?;
        Some(Some(Waiter { position: delaying.layer.position, slot }))
    }

    /// The time at which each rule of the charge plan admits the request, Unix milliseconds; `None` if a full rule does
    /// not allow the delay, or has a sliding window: tokens of later segments cannot be taken.
    pub fn admission_times(&self, time: Time<'_>, context: &DecisionContext) -> Option<IdVec<PlanPosition, u64>> {
        let mut admission_times = self.rules().map(|_rule| time.now_ms);
        for charge in context.result.charges.iter().filter(|charge| charge.is_full) {
            let layer = self.layer(charge.layer);
            let opens_ms = self.rule_set().available_at_ms(charge, charge.layer.id, time.now_ms)?;
            // The window of a charge may have ended since.
            let waits_ms = opens_ms.saturating_sub(time.now_ms);
            if charge.request.kind == WindowKind::Sliding {
                return None;
            }
            let may_wait = self.may_delay || layer.reserve > 0;
            match self.rule_of(charge.layer).rule.on_limit {
                OnLimit::Delay { max_delay_ms, .. } if may_wait && waits_ms <= max_delay_ms => {}
                OnLimit::Refuse if context.inputs.reserve && layer.reserve > 0 => {}
                OnLimit::Delay { .. } | OnLimit::Refuse | OnLimit::Shadow => return None,
            }
            let admit_at_ms = &mut admission_times[charge.layer.position];
            *admit_at_ms = opens_ms.max(*admit_at_ms);
        }
        Some(admission_times)
    }

    /// Requests tokens of the window that is open at `until_ms`, and returns the end of that window.
    pub(super) fn request_window_at(&self, charge: &mut LayerCharge, until_ms: u64, time: Time<'_>) -> u64 {
        let layer = self.layer(charge.layer);
        let all = time.windows(layer.request.windows);
        let end_ms = all.end_at(charge.usage.end_ms, until_ms);
        let windows = all.windows_between(charge.usage.end_ms, end_ms);
        let granted = tokens_granted(windows, charge.request.limit);
        charge.request.ceiling = charge.request.ceiling.saturating_add(granted);
        if charge.is_full && layer.reserve > 0 {
            // Tokens of this window and of later ones are one account, up to the reserve.
            charge.request.ceiling = charge.request.ceiling.min(u64::from(layer.capacity) + u64::from(layer.reserve));
        } else {
            charge.request.floor = granted;
        }
        end_ms
    }

    /// Charges a delayed request again in the layers whose windows have ended since: in all, or in none. If one is
    /// full, the request may be delayed again.
    #[cold]
    pub fn recharge<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        context.clear();
        let layers = self.layers_at(layers, context, now.unix_ms);
        self.acquire_layers(&layers, table, now, context, true)
    }

    /// The longest delay of any rule of the plan.
    pub fn max_delay_ms(&self) -> u64 {
        let delays = self.compiled_rules().map(|(_, compiled)| match compiled.rule.on_limit {
            OnLimit::Delay { max_delay_ms, .. } => max_delay_ms,
            OnLimit::Refuse | OnLimit::Shadow => 0,
        });
        delays.max().unwrap_or(0)
    }

    /// The time at which a refused request would be admitted if the key made no other requests, Unix milliseconds;
    /// `None` if never. All counters matter, not only the full ones: where refusals count, they may have taken the last
    /// tokens of another.
    pub fn retry_at_ms(&self, context: &DecisionContext, now_ms: u64) -> Option<u64> {
        let charges = context.result.charges.iter();
        let mut opens = charges.map(|charge| self.rule_set().available_at_ms(charge, charge.layer.id, now_ms));
        opens.try_fold(now_ms, |latest_ms, opens_ms| Some(latest_ms.max(opens_ms?)))
    }

    /// As [`ChargePlan::retry_at_ms`], for a request that was peeked at only: with the tokens that a refusal would take, and the
    /// penalties that it would begin. The charges in the context then state this usage; no counter changes. `table`: where sliding
    /// windows were peeked at; `None`: in a store.
    #[cold]
    pub fn retry_at_ms_once_refused<const W: usize>(
        &self,
        table: Option<&Table<W>>,
        context: &mut DecisionContext,
        now_ms: u64,
    ) -> Option<u64> {
        for position in self.new_penalties(context, ChargePosition::FIRST) {
            let charge = &mut context.result.charges[position];
            let end_ms = self.rule_set().window_end_ms(self.layer(charge.layer), now_ms, 0);
            charge.usage = Usage { used: 1, end_ms };
        }
        for charge in &mut context.result.charges {
            if self.rule_of(charge.layer).rule.count_refused {
                let taken = remaining_cost(charge);
                charge.usage.used += u64::from(taken);
                if let (WindowKind::Sliding, Some(table)) = (charge.request.kind, table) {
                    let time = self.time(now_ms);
                    let peek = |request| SlidingCounter::new(charge.counter, request, time).peek(table, time).0;
                    // In an outage, the usage includes that of other gateways.
                    let excess = charge.usage.used.saturating_sub(peek(charge.request).used);
                    let cost = charge.request.cost.saturating_add(u32::try_from(excess).unwrap_or(u32::MAX));
                    charge.usage.end_ms = peek(AcquireRequest { cost, ..charge.request }).end_ms;
                }
            }
        }
        self.retry_at_ms(context, now_ms)
    }

    /// The decision about a request whose counters were read without a charge. `admits`: all windows have enough tokens. Reads the
    /// slots too, and sets the state of those that are all in use: the request would wait, or be refused.
    #[cold]
    pub fn decide_peeked(&self, admits: bool, now_ms: u64, context: &mut DecisionContext) -> Decision {
        let may_wait = |position: PlanPosition| {
            let compiled = self.rule(position);
            compiled.rule.delays() && !compiled.waiters.is_full()
        };
        self.peek_slots(context);
        let result = &mut context.result;
        for usage in result.concurrency.iter_mut().filter(|usage| usage.remaining() == 0) {
            usage.state = if may_wait(usage.position) { SlotState::Waited } else { SlotState::Full };
        }
        if result.concurrency.iter().any(|usage| usage.state == SlotState::Full) {
            return Decision::Refused;
        }
        if admits {
            return Decision::Admitted;
        }
        let mut full = context.result.charges.iter().filter(|charge| charge.is_full);
        match self.admission_times(self.time(now_ms), context) {
            Some(admission_times) if full.all(|charge| may_wait(charge.layer.position)) => {
                let until_ms = admission_times.iter().copied().max().unwrap_or(now_ms);
                Decision::Delayed { until_ms, waiter: None, recharge: Vec::new() }
            }
            Some(_) | None => Decision::Refused,
        }
    }

    /// Lets a refused request consume the remaining tokens, in layers of rules that count refusals. Counters that other gateways
    /// share are not charged here: see [`RuleSet::charge_remaining`].
    #[cold]
    pub fn charge_refusal<const W: usize>(
        &self,
        table: &Table<W>,
        context: &mut DecisionContext,
        first: ChargePosition,
    ) {
        if !self.counts_refused() {
            return;
        }
        let time = self.time(context.result.decided_ms);
        for charge in &mut context.result.charges[first..] {
            if charge.mode == CountingMode::Local && self.rule_of(charge.layer).rule.count_refused {
                acquire_remaining(charge, 0, table, time);
            }
        }
    }
}

impl RuleSet {
    /// The time at which a full counter has tokens again, if the key makes no other requests; `None` if never.
    pub fn available_at_ms(&self, charge: &Charge, layer: LayerId, now_ms: u64) -> Option<u64> {
        let missing = (charge.usage.used + u64::from(charge.request.cost)).saturating_sub(charge.request.ceiling);
        if u64::from(charge.request.cost) > charge.request.ceiling {
            return None;
        }
        let layer = self.layer(layer);
        // Excess usage of an independent window is not owed by the next: it may have been used under a greater limit.
        let windows = match missing.div_ceil(u64::from(charge.request.limit)) {
            _ if layer.shards > 1 && layer.request.kind.carries_debt() => charge.windows_until_fit.into(),
            windows if layer.request.kind.carries_debt() => windows,
            windows => windows.min(1),
        };
        match windows {
            0 => Some(now_ms),
            windows => Some(self.windows_of(layer).end_after(charge.usage.end_ms, windows - 1)),
        }
    }

    /// Resets the counters of the charges in the context. Overflow counters are not reset.
    #[cold]
    pub fn reset<const W: usize>(&self, table: &Table<W>, now_ms: u64, context: &DecisionContext) {
        let time = self.time(now_ms);
        for charge in &context.result.charges {
            match charge.request.kind {
                WindowKind::Sliding => {
                    SlidingCounter::new(charge.counter, charge.request, time).reset(table, time, |_tokens| ());
                }
                _ => charge
                    .sharding
                    .counters(charge.counter)
                    .for_each(|counter| _ = table.reset(counter, charge.request, time)),
            }
        }
    }

    /// Takes what is left of a shared counter, up to the cost, in the local counter: what neither the local usage nor the known one has
    /// taken. Does not open a window. Returns the tokens, and the usage of both together.
    #[cold]
    pub fn charge_remaining<const W: usize>(
        &self,
        layer: LayerId,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        now_ms: u64,
    ) -> (u32, Usage) {
        let (layer, time) = (self.layer(layer), self.time(now_ms));
        let end_ms = self.window_end_ms(layer, now_ms, keyed_request.offset);
        let mut charge = layer.new_charge(keyed_request, end_ms, 0);
        subtract_remote_usage(&mut charge, table, time);
        peek_all(table, std::slice::from_mut(&mut charge), time);
        let remote = remote_usage(&charge, table, time);
        let tokens = acquire_remaining(&mut charge, remote.added_to(0), table, time);
        (tokens, Usage { used: remote.added_to(charge.usage.used), ..charge.usage })
    }

    /// Charges the cost by which a request exceeds its first charge, whatever remains. The excess is owed, and later
    /// windows grant that much less.
    #[cold]
    pub fn charge_excess<const W: usize>(
        &self,
        rule: RuleId,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now_ms: u64,
    ) {
        let compiled = &self.rules[rule];
        for layer in compiled.variant(keyed_request.variant).map(|layer| compiled.layer(layer)) {
            loop {
                let end_ms = self.window_end_ms(layer, now_ms, keyed_request.offset);
                let mut charge = layer.new_charge(keyed_request, end_ms, 0);
                charge.request.ceiling = CEILING_MAX;
                if compiled.rule.is_shared() {
                    subtract_remote_usage(&mut charge, table, self.time(now_ms));
                }
                let charges = std::slice::from_mut(&mut charge);
                match acquire_peeked(table, charges, &mut Vec::new(), self.time(now_ms)) {
                    AcquireResult::Admitted | AcquireResult::Refused => break,
                    AcquireResult::Late if now_ms < table.horizon_ms() => now_ms = table.horizon_ms(),
                    // Counters cannot hold a later time.
                    AcquireResult::Late => break,
                }
            }
        }
    }

    /// Refunds charges, or the last `tokens` of each.
    #[cold]
    pub fn refund<const W: usize>(&self, shard_receipts: &[ShardReceipt], tokens: u32, table: &Table<W>, now_ms: u64) {
        for receipt in shard_receipts.iter().rev() {
            table.refund(receipt.receipt.last_tokens(tokens), receipt.request, self.time(now_ms));
        }
    }
}

/// The remaining tokens of a counter, up to the cost; 0 where a charge would open a window.
pub fn remaining_cost(charge: &Charge) -> u32 {
    remaining_beside(charge, 0)
}

/// As [`remaining_cost`], of a charge whose ceiling lacks `remote` tokens that are used elsewhere.
fn remaining_beside(charge: &Charge, remote: u64) -> u32 {
    let left = charge.request.ceiling.saturating_sub(charge.usage.used);
    match charge.usage.used + remote == 0 && charge.request.kind.is_opened_by_requests() {
        true => 0,
        false => charge.request.cost.min(u32::try_from(left).unwrap_or(u32::MAX)),
    }
}

/// Takes the remaining tokens of a counter, up to the cost, and returns their number. Does not open a window. `remote`: as in
/// [`remaining_beside`].
fn acquire_remaining<const W: usize>(charge: &mut Charge, remote: u64, table: &Table<W>, time: Time<'_>) -> u32 {
    for _ in 0..TRIES {
        let cost = remaining_beside(charge, remote);
        if cost == 0 {
            return 0;
        }
        let request = AcquireRequest { cost, ..charge.request };
        if request.kind == WindowKind::Sliding {
            let counter = SlidingCounter::new(charge.counter, request, time);
            let CounterResult::Acquired(..) = counter.acquire(table, time, &mut Vec::new()) else { return 0 };
            charge.usage = SlidingCounter::new(charge.counter, charge.request, time).peek(table, time).0;
            return cost;
        }
        if charge.sharding.shards > 1 {
            charge.sharding.acquire(table, charge.counter, request, time, &mut Vec::new());
            charge.usage.used += u64::from(cost);
            return cost;
        }
        match table.acquire(charge.counter, request, time, None) {
            CounterResult::Acquired(_, usage) => {
                charge.usage = usage;
                return cost;
            }
            CounterResult::Full(usage) => charge.usage = usage,
            CounterResult::Late => return 0,
        }
    }
    0
}
