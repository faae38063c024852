//! Decisions on rules whose counters several gateways share: with leased tokens, by the store, or in local counters
//! while the store is unreachable.
//!
//! This module neither waits nor talks to a store. If leased tokens are missing, it reports so and charges nothing. The
//! caller fetches tokens and decides again.

use std::ops::Range;

use crate::acquire::{AcquireResult, Charge, acquire_peeked, peek_all};
use crate::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use crate::counter::CounterWord;
use crate::decision::Decision;
use crate::decision_context::{DecisionContext, DecisionResult};
use crate::decision_time::DecisionTime;
use crate::handles::{ChargePosition, IdVec, LayerId, PlanPosition};
use crate::rule::{OnLimit, OnOutage, Sharing};
use crate::rule_set::{CompiledLayer, CompiledRule, CountingMode, KeyedRequest, RuleSet};
use crate::sharded_counter::{ShardReceipt, Sharding};
use crate::sliding_counter::SlidingCounter;
use crate::table::{Counter, Table};
use crate::window::Time;
use crate::window_kind::{AcquireRequest, CEILING_MAX, Usage, WindowKind, usage};

/// The result of deciding some layers.
#[derive(Debug)]
pub enum LocalDecision {
    /// Decided without the store.
    Decided(Decision),
    /// Nothing was charged: the leases at `sharing.missing_tokens` of the context hold too few tokens.
    MissingTokens,
}

impl CompiledLayer {
    /// The counter of one key. Leases and known usage are found by it.
    pub fn counter(&self, keyed_request: KeyedRequest) -> Counter {
        self.new_charge(keyed_request, 0, 0).counter
    }

    /// Charges the lease of the counter instead of the counter.
    fn use_lease(&self, charge: &mut Charge) {
        charge.counter = charge.counter.lease();
        charge.request = charge.request.leased();
        charge.sharding = Sharding::NONE;
    }
}

impl ChargePlan {
    /// Sets the counting mode of each rule of a charge plan. `in_outage` returns whether the outage policy of the rule
    /// at a position applies.
    pub fn set_counting_modes(
        &self,
        in_outage: impl Fn(PlanPosition) -> bool,
        counting_modes: &mut IdVec<PlanPosition, CountingMode>,
    ) {
        counting_modes.clear();
        counting_modes.extend_from(&self.counting_modes);
        for (position, counting_mode) in counting_modes.enumerate_mut() {
            if *counting_mode != CountingMode::Local && in_outage(position) {
                *counting_mode = match self.rule(position).rule.on_outage {
                    OnOutage::Local => CountingMode::LocalFallback,
                    OnOutage::Allow | OnOutage::Refuse => CountingMode::Remote,
                };
            }
        }
    }

    /// The enforced layers of a request, in the order of charging. They are in the context's buffer, to be returned by
    /// [`DecisionContext::return_layer_buffer`].
    pub fn enforced_layers_of(&self, context: &mut DecisionContext, now_ms: u64) -> Vec<LayerRef> {
        if !context.use_default_windows() {
            return self.layers_of_request(context, now_ms);
        }
        let mut layers = std::mem::take(&mut context.scratch.layer_buffer);
        layers.clear();
        layers.extend_from_slice(self.enforced());
        layers
    }

    /// Charges layers by the counting modes in the context, all or none, and appends them to the charges there. A refusal counts in no
    /// rule yet.
    pub fn decide_locally<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        may_wait: bool,
    ) -> LocalDecision {
        let first = context.result.charges.next_id();
        context.sharing.missing_tokens.clear();
        context.result.decided_ms = 0;
        // Requests that wait for later windows get their position from the store, not from leases.
        let leases = |layer_ref: &LayerRef| {
            context.sharing.counting_mode(*layer_ref) == Some(CountingMode::Leased)
                && context.inputs.keyed_requests[layer_ref.position].is_some()
        };
        let may_wait = may_wait && !layers.iter().any(leases);
        let decision = self.acquire_layers(layers, table, now, context, may_wait);
        let now_ms = context.result.decided_ms;
        match decision {
            Decision::Refused if self.lacks_only_tokens(table, now, context, first) => {
                return LocalDecision::MissingTokens;
            }
            Decision::Refused => {}
            Decision::Admitted | Decision::Delayed { .. } => context.find_low_leases(first),
        }
        self.report_total_usage(table, now_ms, context, first);
        if let Decision::Refused = decision {
            self.add_local_usage(table, context, first);
        }
        LocalDecision::Decided(decision)
    }
}

impl RuleSet {
    /// The usage of a layer by a key, by local counters.
    pub fn local_usage<const W: usize>(
        &self,
        layer: LayerId,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
    ) -> Usage {
        loop {
            let mut charge = self.local_charge(layer, keyed_request, now.unix_ms);
            let time = self.time(now.unix_ms);
            peek_all(table, std::slice::from_mut(&mut charge), time);
            let known = table.known_in_counter(charge.counter, charge.request, time);
            let usage = Usage { used: charge.usage.used.saturating_sub(known), ..charge.usage };
            if usage.used == 0 || !charge.request.kind.carries_debt() || !now.advance() {
                return usage;
            }
        }
    }

    /// Resets the usage of a layer by a key in local counters, and returns it. Before a counter becomes empty,
    /// `announce` is called with its tokens. The announced tokens are never fewer than those reset; they are more if
    /// another thread resets the same counter.
    pub fn reset_local<const W: usize>(
        &self,
        layer: LayerId,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        mut now: DecisionTime<'_>,
        mut announce: impl FnMut(u64),
    ) -> u64 {
        let charge = self.local_charge(layer, keyed_request, now.unix_ms);
        let time = self.time(now.unix_ms);
        if charge.request.kind == WindowKind::Sliding {
            return SlidingCounter::new(charge.counter, charge.request, time).reset(table, time, announce);
        }
        let _lock = charge.request.kind.carries_debt().then(|| table.lock_known_in_counter(charge.counter));
        let base_word = || table.base_word(charge.counter, charge.request, time);
        let (mut words, mut base) = (Vec::new(), base_word());
        let used_in =
            |word: Option<CounterWord>, request, time: Time<'_>| word.map_or(0, |word| usage(word, request, time).used);
        let used_here = |word, base, request, time: Time<'_>| {
            used_in(Some(word), request, time).saturating_sub(used_in(base, request, time))
        };
        for counter in charge.sharding.counters(charge.counter) {
            let mut announced = 0;
            words.push(table.reset_announced(counter, charge.request, time, |word| {
                // Another process may have changed it.
                base = base_word();
                let used = used_here(word, base, charge.request, time);
                announce(used.saturating_sub(announced));
                announced = used.max(announced);
            }));
        }
        now.advance();
        let (request, time) = (self.local_charge(layer, keyed_request, now.unix_ms).request, self.time(now.unix_ms));
        let tokens = words.into_iter().map(|word| used_here(word, base, request, time)).sum();
        if let Some(base) = base {
            table.forget_known_in_counter(charge.counter, base, request.end_ms);
        }
        tokens
    }

    fn local_charge(&self, layer: LayerId, keyed_request: KeyedRequest, now_ms: u64) -> Charge {
        let layer = self.layer(layer);
        let end_ms = self.window_end_ms(layer, now_ms, keyed_request.offset);
        layer.new_charge(KeyedRequest { cost: 0, ..keyed_request }, end_ms, 0)
    }
}

impl ChargePlan {
    /// Whether missing leased tokens are the only reason of a refusal.
    fn lacks_only_tokens<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &mut DecisionContext,
        first: ChargePosition,
    ) -> bool {
        let now_ms = context.result.decided_ms;
        let keyed_requests = &context.inputs.keyed_requests;
        let charges = &mut context.result.charges;
        let missing_tokens = &mut context.sharing.missing_tokens;
        let mut is_full = false;
        for position in charges.ids_from(first) {
            let charge = &charges[position];
            let keyed_request = keyed_requests[charge.layer.position].filter(|_| charge.is_full);
            let Some(keyed_request) = keyed_request else { continue };
            if charge.mode != CountingMode::Leased || self.is_exhausted(charge, keyed_request, table, now, now_ms) {
                is_full = true;
            } else {
                missing_tokens.push(position);
            }
        }
        if is_full {
            // The missing tokens are not the reason of the refusal.
            for position in missing_tokens.drain(..) {
                let charge = &mut charges[position];
                charge.is_full = false;
                // A missing lease says nothing about the remaining tokens unless the usage is known.
                let layer_ref = charge.layer;
                let known = keyed_requests[layer_ref.position]
                    .and_then(|keyed_request| table.known_usage(self.layer(layer_ref).counter(keyed_request), now_ms));
                if known.is_none() {
                    charge.usage.used = 0;
                }
            }
        }
        !is_full && !missing_tokens.is_empty()
    }

    /// Whether a full leased layer refuses a request whatever the store counts.
    fn is_exhausted<const W: usize>(
        &self,
        charge: &LayerCharge,
        keyed_request: KeyedRequest,
        table: &Table<W>,
        now: DecisionTime<'_>,
        now_ms: u64,
    ) -> bool {
        let layer = self.layer(charge.layer);
        let (cost, capacity) = (u64::from(charge.request.cost), u64::from(layer.capacity));
        let used_locally = || self.rule_set().local_usage(charge.layer.id, keyed_request, table, now).used;
        let is_known_full = |spent| spent + used_locally() + cost > capacity;
        // Tokens of a sliding window come back before the known usage ends: the store has to be asked.
        let is_known = layer.request.kind != WindowKind::Sliding;
        cost > capacity || is_known && layer.spent_tokens(table, keyed_request, now_ms).is_some_and(is_known_full)
    }

    /// Whether a request that was peeked at is refused without a call of the store, by the counting modes in the context. Only the
    /// store can say when a request that may wait is admitted.
    pub fn refuses_without_store<const W: usize>(
        &self,
        table: &Table<W>,
        now: DecisionTime<'_>,
        context: &DecisionContext,
    ) -> bool {
        let is_exhausted = |charge: &LayerCharge| {
            let position = charge.layer.position;
            let keyed_request = context.inputs.keyed_requests[position].filter(|_| charge.is_full);
            context.sharing.counting_modes[position] == CountingMode::Leased
                && keyed_request.is_some_and(|request| self.is_exhausted(charge, request, table, now, now.unix_ms))
        };
        context.result.charges.iter().any(is_exhausted)
            && self.admission_times(self.time(now.unix_ms), context).is_none()
    }

    /// Whether a charge made without the store exceeds what the known usage leaves. After the charge was prepared,
    /// another worker may have raised the known usage and reset the counter before it was charged. Of a lease, another worker may
    /// have spent tokens, or deposited tokens of a greater limit.
    // Ordering: that worker raises the known usage and then resets the counter, or deposits tokens, each by an acquiring and
    // releasing swap. A charge of the changed counter has acquired the raised known usage, so it is read here. Of two charges of
    // one lease, the later one finds fewer tokens left.
    pub(super) fn exceeds_known_usage<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &DecisionContext,
        first: ChargePosition,
    ) -> bool {
        context.result.charges[first..].iter().any(|charge| {
            let capacity = u64::from(self.layer(charge.layer).capacity);
            match charge.mode {
                CountingMode::Local | CountingMode::Remote => false,
                _ if charge.request.cost == 0 => false,
                CountingMode::LocalFallback => {
                    let RemoteUsage { known, counted } = remote_usage(charge, table, self.time(now_ms));
                    let used = charge.usage.used;
                    used.saturating_add(known) > capacity + counted || used < counted + u64::from(charge.request.cost)
                }
                CountingMode::Leased => {
                    let keyed_request = context.inputs.keyed_requests[charge.layer.position];
                    let counter = keyed_request.map(|keyed_request| self.layer(charge.layer).counter(keyed_request));
                    let left = charge.request.ceiling.saturating_sub(charge.usage.used);
                    let known = counter.and_then(|counter| table.known_usage(counter, now_ms));
                    known.is_some_and(|(_, known)| u64::from(known) > capacity.saturating_add(left))
                }
            }
        })
    }

    /// Whether a charge that a local counter refused may take more now: the counter began at the known usage meanwhile, or its own usage
    /// became known. For a moment the counter contains usage that is also subtracted from the ceiling.
    pub(super) fn may_take_more<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &DecisionContext,
        first: ChargePosition,
    ) -> bool {
        let time = self.time(now_ms);
        let is_local = |charge: &&LayerCharge| {
            charge.is_full && charge.mode == CountingMode::LocalFallback && charge.request.kind.carries_debt()
        };
        context.result.charges[first..].iter().filter(is_local).any(|charge| {
            let Some(keyed_request) = context.inputs.keyed_requests[charge.layer.position] else { return false };
            let RemoteUsage { known, counted } = remote_usage(charge, table, time);
            let takes_more = || {
                let mut again = self.layer(charge.layer).new_charge(keyed_request, charge.request.end_ms, 0);
                subtract_remote_usage(&mut again, table, time);
                again.request.ceiling > charge.request.ceiling
            };
            if takes_more() {
                return true;
            }
            let may_begin = || table.base_word(charge.counter, charge.request, time).is_some();
            if counted >= known || charge.usage.used < known || !may_begin() {
                return false;
            }
            drop(table.lock_known_in_counter(charge.counter));
            takes_more()
        })
    }

    /// Makes charges state the usage of all gateways together, as far as it is known. The receipts of charges whose usage changes are
    /// made before, and are with those of shards then.
    pub fn report_total_usage<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        first: ChargePosition,
    ) {
        let keyed_requests = &context.inputs.keyed_requests;
        let DecisionResult { charges, shard_receipts, .. } = &mut context.result;
        for charge in &mut charges[first..] {
            let Some(keyed_request) = keyed_requests[charge.layer.position] else { continue };
            let layer = self.layer(charge.layer);
            match charge.mode {
                CountingMode::Local | CountingMode::Remote => {}
                CountingMode::Leased => {
                    let left = charge.request.ceiling.saturating_sub(charge.usage.used);
                    let known = table.known_usage(layer.counter(keyed_request), now_ms);
                    charge.request.ceiling = layer.capacity.into();
                    charge.usage.used = match known {
                        Some((_, used)) => u64::from(used).saturating_sub(left),
                        // Nothing was asked of the store.
                        None if charge.request.cost == 0 => 0,
                        None => charge.request.ceiling.saturating_sub(left),
                    };
                    // A lease on tokens of a sliding window ends before they come back.
                    let states_lease = match layer.request.kind {
                        WindowKind::Sliding => charge.receipt().is_some(),
                        _ => left > 0,
                    };
                    if let Some((end_ms, _)) = known.filter(|_| !states_lease) {
                        shard_receipts.extend(charge.take_receipt());
                        charge.usage.end_ms = end_ms;
                    }
                }
                CountingMode::LocalFallback if layer.is_penalty() => {
                    if let Some((end_ms, used)) = table.known_usage(layer.counter(keyed_request), now_ms) {
                        charge.usage = charge.usage.joined_penalty(Usage { used: u64::from(used), end_ms });
                    }
                }
                CountingMode::LocalFallback => {
                    shard_receipts.extend(charge.take_receipt());
                    let whole = layer.new_charge(keyed_request, 0, 0).request.ceiling.min(layer.capacity.into());
                    charge.usage.used = remote_usage(charge, table, self.time(now_ms)).added_to(charge.usage.used);
                    charge.request.ceiling = match charge.request.cost {
                        0 => whole,
                        // More than the capacity where the request reserves.
                        _ => whole.max(charge.request.ceiling),
                    };
                }
            }
        }
    }

    /// Makes the charges of an admitted request in leases on sliding windows state when the first tokens come back: the lease ends
    /// before. As in [`ChargePlan::report_total_usage`], their receipts are with those of shards then.
    pub fn state_first_returns<const W: usize>(&self, table: &Table<W>, context: &mut DecisionContext) {
        if !self.leases_sliding() {
            return;
        }
        let (keyed_requests, now_ms) = (&context.inputs.keyed_requests, context.result.decided_ms);
        let DecisionResult { charges, shard_receipts, .. } = &mut context.result;
        for charge in charges.iter_mut().filter(|charge| charge.mode == CountingMode::Leased) {
            let layer = self.layer(charge.layer);
            if layer.request.kind == WindowKind::Sliding
                && let Some(keyed_request) = keyed_requests[charge.layer.position]
                && let Some(returns_ms) = table.first_return_ms(layer.counter(keyed_request), now_ms)
            {
                shard_receipts.extend(charge.take_receipt());
                charge.usage.end_ms = returns_ms;
            }
        }
    }

    /// Makes charges of leases, except those in `stated`, state the usage of their counter as far as it is known, as
    /// that of the lease says nothing about it.
    pub fn state_known_usage_of_leases<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        first: ChargePosition,
        stated: &[ChargePosition],
    ) {
        let keyed_requests = &context.inputs.keyed_requests;
        for position in context.result.charges.ids_from(first) {
            let charge = &mut context.result.charges[position];
            let (Some(keyed_request), CountingMode::Leased) = (keyed_requests[charge.layer.position], charge.mode)
            else {
                continue;
            };
            if stated.contains(&position) {
                continue;
            }
            let layer = self.layer(charge.layer);
            let left = charge.request.ceiling.saturating_sub(charge.usage.used);
            charge.request.ceiling = layer.capacity.into();
            charge.usage.used = 0;
            if let Some((end_ms, used)) = table.known_usage(layer.counter(keyed_request), now_ms) {
                charge.usage = Usage { used: u64::from(used).saturating_sub(left), end_ms };
            }
        }
    }

    /// Finds the charges of leases that are full by the usage that they state: tokens that are not leased may be left.
    pub(super) fn find_full_by_usage(&self, context: &mut DecisionContext) {
        for charge in context.result.charges.iter_mut().filter(|charge| charge.mode == CountingMode::Leased) {
            if let Some(keyed_request) = context.inputs.keyed_requests[charge.layer.position] {
                let request = self.layer(charge.layer).new_charge(keyed_request, 0, 0).request;
                charge.is_full = !charge.usage.admits(request);
            }
        }
    }

    /// Makes charges of leases that lacked tokens state the capacity of the layer, and as little usage as they know of, unless they
    /// state the usage of the counter already.
    pub fn state_capacity_of_leases(&self, context: &mut DecisionContext, first: ChargePosition) {
        let charges = &mut context.result.charges[first..];
        for charge in charges.iter_mut().filter(|charge| charge.mode == CountingMode::Leased) {
            let capacity = u64::from(self.layer(charge.layer).capacity);
            let left = charge.request.ceiling.saturating_sub(charge.usage.used);
            if charge.request.ceiling > capacity && left <= u64::from(u32::MAX) {
                charge.usage.used = capacity.saturating_sub(left);
            }
            charge.request.ceiling = capacity;
        }
    }

    /// Adds to the usage of shared layers what was counted locally while the store could not be reached, and is not reported yet.
    pub fn add_local_usage<const W: usize>(
        &self,
        table: &Table<W>,
        context: &mut DecisionContext,
        first: ChargePosition,
    ) {
        let now_ms = context.result.decided_ms;
        let keyed_requests = &context.inputs.keyed_requests;
        let DecisionResult { charges, shard_receipts, .. } = &mut context.result;
        for charge in &mut charges[first..] {
            let layer = self.layer(charge.layer);
            let (Some(keyed_request), CountingMode::Leased, false) =
                (keyed_requests[charge.layer.position], charge.mode, layer.is_penalty())
            else {
                continue;
            };
            let clock = || now_ms;
            let now = DecisionTime::read(&clock);
            let local = self.rule_set().local_usage(charge.layer.id, keyed_request, table, now);
            if local.used == 0 {
                continue;
            }
            if table.known_usage(layer.counter(keyed_request), now_ms).is_none() {
                // The charge states the usage of its lease, which says nothing about the counter but what this request takes.
                let receipt = charge.take_receipt();
                let own = receipt.map_or(0, |_| charge.request.cost);
                shard_receipts.extend(receipt);
                charge.usage = Usage { used: own.into(), end_ms: local.end_ms };
            }
            charge.usage.used += local.used;
        }
    }

    /// Adds charges for layers that the store decides, or that are charged later. Returns the first one.
    pub fn add_prepared_charges<const W: usize>(
        &self,
        layers: &[LayerRef],
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
    ) -> ChargePosition {
        let start = context.result.charges.next_id();
        for layer_ref in layers {
            if let Some(keyed_request) = context.inputs.keyed_requests[layer_ref.position] {
                let layer = self.layer(*layer_ref);
                let mode = context.sharing.counting_mode(*layer_ref).unwrap_or(CountingMode::Remote);
                let mut charge = context.new_charge(self.rule_set(), layer, keyed_request, now_ms);
                if mode == CountingMode::LocalFallback {
                    subtract_remote_usage(&mut charge, table, self.time(now_ms));
                }
                context.result.charges.push(LayerCharge { layer: *layer_ref, mode, charge });
            }
        }
        start
    }

    /// Charges the prepared reservations from `start` to `until`, without a peek. `false`: another request took the tokens, or has
    /// opened a later window; what was charged is then to be refunded.
    pub fn acquire_prepared<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        start: ChargePosition,
        until: ChargePosition,
    ) -> bool {
        let DecisionResult { charges, shard_receipts, .. } = &mut context.result;
        let charges = &mut charges[start..until];
        let ends: Vec<u64> = charges.iter().map(|charge| charge.usage.end_ms).collect();
        let result = acquire_peeked(table, charges, shard_receipts, self.time(now_ms));
        let is_later = |(charge, end_ms): (&LayerCharge, &u64)| charge.reserves_later_than(*end_ms);
        result == AcquireResult::Admitted && !charges.iter().zip(&ends).any(is_later)
    }

    /// Reads the usage of the charges from `start` on again: from local counters, and from the known usage for layers
    /// that the store decides.
    pub fn refresh_usage<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        context: &mut DecisionContext,
        start: ChargePosition,
    ) {
        let former = context.result.charges[start..].to_vec();
        context.truncate(start);
        let layers: Vec<LayerRef> = former.iter().map(|charge| charge.layer).collect();
        self.add_prepared_charges(&layers, table, now_ms, context);
        for (charge, former) in context.result.charges[start..].iter_mut().zip(former) {
            charge.usage = match charge.mode.is_local() {
                true => table.peek(charge.counter, charge.request, self.time(now_ms)).0,
                false => former.usage,
            };
            charge.is_full = !charge.usage.admits(charge.request);
        }
    }

    /// Makes the charges from `first` on state the known usage of each layer.
    pub fn state_usage(&self, known: &[(LayerRef, Usage)], context: &mut DecisionContext, first: ChargePosition) {
        for charge in &mut context.result.charges[first..] {
            if let Some((_, usage)) = known.iter().find(|(known, _)| *known == charge.layer) {
                charge.usage = *usage;
            }
            charge.is_full = !charge.usage.admits(charge.request);
        }
    }

    /// Requests tokens of the windows in which rules admit a delayed request; `known` is the usage of each layer, and `earlier` the
    /// charges that are made already, before those of full rules. Returns the layers whose windows will have ended by the time that
    /// the last rule admits it.
    pub fn request_future_windows(
        &self,
        admission_times: &IdVec<PlanPosition, u64>,
        known: &[(LayerRef, Usage)],
        time: Time<'_>,
        context: &mut DecisionContext,
        earlier: Range<ChargePosition>,
    ) -> Vec<LayerRef> {
        let until_ms = admission_times.iter().copied().max().unwrap_or(time.now_ms);
        let mut recharge = Vec::new();
        self.state_usage(known, context, earlier.end);
        for charge in &mut context.result.charges[earlier.end..] {
            let admit_at_ms = admission_times[charge.layer.position];
            if admit_at_ms > time.now_ms {
                let end_ms = self.request_window_at(charge, admit_at_ms, time);
                recharge.extend((end_ms <= until_ms).then_some(charge.layer));
            }
        }
        let earlier = context.result.charges[earlier].iter().filter(|charge| charge.usage.end_ms <= until_ms);
        recharge.extend(earlier.map(|charge| charge.layer));
        recharge
    }

    /// Whether all full rules could admit a refused request in a later window.
    pub fn may_be_delayed(&self, context: &DecisionContext) -> bool {
        let full = context.result.charges.iter().filter(|charge| charge.is_full);
        let mut may_delay = full.map(|charge| {
            let may_reserve = context.inputs.reserve && self.layer(charge.layer).reserve > 0;
            match self.rule_of(charge.layer).rule.on_limit {
                OnLimit::Delay { .. } => self.may_delay || may_reserve,
                OnLimit::Refuse => may_reserve,
                OnLimit::Shadow => false,
            }
        });
        let first = may_delay.next();
        first.is_some_and(|first| first && may_delay.all(|may_delay| may_delay))
    }

    /// Adds the charges of the request in `layers`, by the counting modes.
    pub(super) fn add_shared_charges<const W: usize>(
        &self,
        table: &Table<W>,
        layers: &[LayerRef],
        now_ms: u64,
        context: &mut DecisionContext,
    ) {
        for layer_ref in layers {
            let (Some(mode), Some(keyed_request)) =
                (context.sharing.counting_mode(*layer_ref), context.inputs.keyed_requests[layer_ref.position])
            else {
                continue;
            };
            if mode == CountingMode::Remote {
                continue;
            }
            if context.sharing.prepaid.contains(layer_ref) {
                continue;
            }
            let layer = self.layer(*layer_ref);
            let mut charge = context.new_charge(self.rule_set(), layer, keyed_request, now_ms);
            match mode {
                CountingMode::Leased => {
                    let known = table.known_usage(layer.counter(keyed_request), now_ms);
                    if known.is_some() {
                        // A lease may hold more than the limit of this request, because other requests have a greater limit, or
                        // had one: it keeps these tokens.
                        charge.request.ceiling = CEILING_MAX;
                    }
                    layer.use_lease(&mut charge);
                    let is_full = |spent: u64| spent + u64::from(charge.request.cost) > u64::from(layer.capacity);
                    if known.is_some_and(|(_, granted)| granted > layer.capacity)
                        && layer.spent_tokens(table, keyed_request, now_ms).is_some_and(is_full)
                    {
                        charge.request.floor = charge.request.ceiling;
                    }
                }
                CountingMode::LocalFallback => subtract_remote_usage(&mut charge, table, self.time(now_ms)),
                CountingMode::Local | CountingMode::Remote => {}
            }
            context.result.charges.push(LayerCharge { layer: *layer_ref, mode, charge });
        }
    }
}

/// Reduces the ceiling of a local charge by the known usage of other gateways. A window that a request has opened in the store keeps
/// its end.
pub(super) fn subtract_remote_usage<const W: usize>(charge: &mut Charge, table: &Table<W>, time: Time<'_>) {
    let known = table.lasting_usage(charge.counter, charge.request, time);
    if let Some(known) = known.filter(|known| known.used > 0 && charge.request.kind.is_opened_by_requests()) {
        charge.request.end_ms = known.end_ms;
    }
    let AcquireRequest { kind, cost, .. } = charge.request;
    let known = known.unwrap_or(Usage { used: 0, end_ms: charge.request.end_ms });
    if kind.carries_debt() && cost > 0 {
        table.count_from(charge.counter, known, charge.request, time);
    }
    let RemoteUsage { known, counted } = remote_usage(charge, table, time);
    let AcquireRequest { ceiling, floor, cost, .. } = &mut charge.request;
    match cost {
        // A reduced ceiling of 0 would admit a request that takes nothing: one in a penalty, or whose cost is known later.
        0 if known > *ceiling + counted => *floor = known - counted,
        _ => *ceiling = (*ceiling + counted).saturating_sub(known),
    }
}

/// What other gateways have used of a counter, or this one has reported to the store.
pub(super) struct RemoteUsage {
    /// As far as it is known.
    known: u64,
    /// What of it the local counter contains.
    counted: u64,
}

impl RemoteUsage {
    /// The usage of all gateways, if that of the local counter is `used`.
    pub fn added_to(&self, used: u64) -> u64 {
        used.saturating_add(self.known).saturating_sub(self.counted)
    }
}

pub(super) fn remote_usage<const W: usize>(charge: &Charge, table: &Table<W>, time: Time<'_>) -> RemoteUsage {
    RemoteUsage {
        known: table.lasting_usage(charge.counter, charge.request, time).map_or(0, |usage| usage.used),
        counted: table.known_in_counter(charge.counter, charge.request, time),
    }
}

impl CompiledRule {
    /// Whether any of its counters is sharded in the store.
    pub fn is_sharded(&self) -> bool {
        self.compiled_layers().any(|layer| layer.shards > 1)
    }

    /// How the rule is counted while the store is reachable.
    pub(super) fn counting_mode(&self) -> CountingMode {
        match self.rule.sharing {
            Sharing::Local => CountingMode::Local,
            // No single call can decide on all shards, so sharded counters are always leased.
            // Leased tokens could be spent during a penalty that another gateway has started.
            Sharing::Exact | Sharing::Lease if self.penalty.is_some() => CountingMode::Remote,
            // A request that reserves nothing spends no lease, which would always admit it. Such a rule is never sharded.
            Sharing::Exact | Sharing::Lease if self.rule.reserves_nothing() => CountingMode::Remote,
            Sharing::Exact if !self.is_sharded() => CountingMode::Remote,
            Sharing::Exact | Sharing::Lease => CountingMode::Leased,
        }
    }
}

impl CompiledLayer {
    /// The tokens of a key that the store is known to have granted, without the leased ones that are not spent here.
    fn spent_tokens<const W: usize>(&self, table: &Table<W>, keyed_request: KeyedRequest, now_ms: u64) -> Option<u64> {
        let counter = self.counter(keyed_request);
        let (_, granted) = table.known_usage(counter, now_ms)?;
        Some(granted.saturating_sub(table.leased_tokens(counter, now_ms)).into())
    }
}

impl DecisionContext {
    /// Returns the buffer of [`ChargePlan::enforced_layers_of`], so that the next request need not allocate one.
    pub fn return_layer_buffer(&mut self, layers: Vec<LayerRef>) {
        self.scratch.layer_buffer = layers;
    }

    /// Takes the receipts of all charges from `first` on, for a refund. They cannot be taken again.
    pub fn take_receipts(&mut self, first: ChargePosition) -> Vec<ShardReceipt> {
        let split = if first == ChargePosition::FIRST {
            0
        } else {
            self.sharing.first_shard_receipt.min(self.result.shard_receipts.len())
        };
        let whole = self.result.charges[first..].iter_mut().filter_map(|charge| charge.take_receipt());
        whole.chain(self.result.shard_receipts.drain(split..)).collect()
    }

    /// Reduces the usage in refunded charges by their cost.
    pub fn subtract_costs(&mut self, first: ChargePosition, start: ChargePosition) {
        for charge in &mut self.result.charges[first..start] {
            charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.request.cost));
        }
    }

    /// Finds the leases that run low: those whose tokens have halved. Most requests find none.
    fn find_low_leases(&mut self, first: ChargePosition) {
        self.sharing.low_leases.clear();
        for position in self.result.charges.ids_from(first) {
            let charge = &self.result.charges[position];
            if charge.mode == CountingMode::Leased {
                let left = charge.request.ceiling.saturating_sub(charge.usage.used);
                if left.leading_zeros() != (left + u64::from(charge.request.cost)).leading_zeros() {
                    self.sharing.low_leases.push(position);
                }
            }
        }
    }

    /// Removes the charges from `first` on.
    pub fn truncate(&mut self, first: ChargePosition) {
        self.result.charges.truncate(first);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::bucket::Key;
    use crate::handles::{Handle, RuleId, VariantId};
    use crate::key::{KeyHash, KeyPart, OnMissing, Seed};
    use crate::limit::Limit;
    use crate::rule::Rule;
    use std::sync::Arc;

    const NOW_MS: u64 = 50;
    const KEYED_REQUEST: KeyedRequest =
        KeyedRequest { key: KeyHash { bucket_hash: 0, tag: 1 }, offset: 0, variant: VariantId::DEFAULT, cost: 1 };

    /// Four requests in 100 ms, and as many that roll over.
    fn plan() -> ChargePlan {
        let limit = Limit { capacity: Some(8), ..Limit::parse("4/100ms").expect("it is a limit") };
        let mut rule = Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, vec![limit]);
        rule.sharing = Sharing::Lease;
        Arc::new(RuleSet::new(&[rule], Seed(1, 2), None)).charge_plan([RuleId::at(0)])
    }

    /// Whether a request is admitted while the store is unreachable.
    fn admits<const W: usize>(plan: &ChargePlan, table: &Table<W>) -> bool {
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests.push(Some(KEYED_REQUEST));
        plan.set_counting_modes(|_rule| true, &mut context.sharing.counting_modes);
        let clock = || NOW_MS;
        let decision = plan.decide_locally(plan.enforced(), table, DecisionTime::read(&clock), &mut context, true);
        matches!(decision, LocalDecision::Decided(Decision::Admitted))
    }

    /// With the lock, such a request would not end here.
    #[test]
    fn requests_of_a_counter_that_cannot_begin_take_no_lock() {
        let plan = plan();
        let counter = plan.layer(plan.enforced()[0]).counter(KEYED_REQUEST);
        // It has counted before usage became known.
        let table = Table::with_capacity(64).unwrap();
        assert_eq!([(); 5].map(|()| admits(&plan, &table)), [true; 5]);
        table.set_known_usage(counter, 100, 5, NOW_MS);
        let lock = table.lock_known_in_counter(counter);
        assert!(!admits(&plan, &table));
        drop(lock);
        // There is a slot for the known usage, and for the counter or for none.
        for others in [0, 1] {
            let table = Table::<2>::with_buckets(1, 1).unwrap();
            table.set_known_usage(counter, 100, 5, NOW_MS);
            for tag in 3..3 + others {
                table.set_known_usage(Counter { key: Key { tag, ..counter.key }, ..counter }, 100, 5, NOW_MS);
            }
            let _lock = table.lock_known_in_counter(counter);
            assert!(admits(&plan, &table));
        }
    }
}
