//! What a gateway knows of the usage in the store: what replies have reported, with the tokens of charges, reports and refunds on
//! their way. All workers of a process share it, in the table; it changes under the lock of its counter in [`usage_order`].
//!
//! [`usage_order`]: super::usage_order

use super::lease_sizing::{ChargeId, LeaseRecord, Refusal, UnansweredCharge, UnansweredTokens, counter_id};
use super::scripts::{CounterReply, CounterRequest, RefundTarget};
use super::shared_counters::SharedCounters;
use super::usage_order::{CounterOrder, LockedOrder};
use transom_limiter::rule_set::{CompiledLayer, KeyedRequest, RuleSet};
use transom_limiter::store_key::StoreWindow;
use transom_limiter::table::Counter;
use transom_limiter::window::Segments;
use transom_limiter::window_kind::{AcquireRequest, Usage, WindowKind};

impl SharedCounters {
    /// Records the usage `used` that a reply of the store reports, and returns what is known now.
    ///
    /// The known usage is what replies have reported, and the tokens of unanswered charges of all workers. Workers get replies in
    /// another order than that in which the store executed their calls. A reply lowers what replies have reported only if its call
    /// was sent after the last change: then the store executed the call after everything that is known. An earlier call raises
    /// only. So the known usage is never less than what this process was granted, and yet follows a refund or a reset within one
    /// round trip: the next call is sent after the last change. A grant that leaves the usage as it was, because something
    /// was refunded, is a change as well: the replies to other calls in flight may lack it.
    ///
    /// Whether a reply has the unanswered tokens of another worker is not known. The known usage is then at least the reported one,
    /// and at least what it was before, with these tokens: they do not count twice if the reply has them. Of a report, they do until
    /// it is answered: they are tokens of admitted requests, of which a late grant may not know.
    ///
    /// Around an outage the known usage is not less than before with the `leased` tokens of the reply, because of sharded counters,
    /// whose reports are no unanswered charges.
    pub(super) fn note_store_usage(
        &self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        reply: CounterReply,
        used: u64,
        leased: u64,
    ) -> u64 {
        let mut order = self.usage_order.lock(counter_id(counter));
        let (kind, now_ms) = (layer.request.kind, self.clock.now().unix_ms);
        let note = |record: &mut LeaseRecord| record.note_call(reply.call);
        let noted = self.leases.with_existing(counter_id(counter), note).unwrap_or_default();
        let former = order.get();
        order.remove_unanswered(noted.answered);
        let unanswered = order.get().unanswered;
        let known = self.table.known_usage(counter, now_ms);
        let known_end_ms = known.map(|(end_ms, _)| end_ms);
        if noted.is_outdated
            && let Some((_, known)) = known
        {
            return known.into();
        }
        let is_settled = self.breaker.is_settled(self.clock.instant());
        let is_same_window = |(end_ms, _): &(u64, u32)| match kind {
            WindowKind::Sliding => true,
            // A later end was assumed by this gateway.
            kind if kind.is_opened_by_requests() => *end_ms >= reply.end_ms,
            _ => *end_ms == reply.end_ms,
        };
        let before = known.filter(is_same_window).map(|(end_ms, known)| (end_ms, u64::from(known)));
        let least = before.filter(|(end_ms, _)| *end_ms == reply.end_ms && !is_settled);
        let least = least.map_or(0, |(_, known)| known.saturating_add(leased));
        let known_before = before.map_or(0, |(_, known)| known.saturating_sub(former.unanswered.reports));
        let has_charges = |unanswered: UnansweredTokens| before.is_some() && unanswered.charges > 0;
        let reported_before = if has_charges(former.unanswered) { former.reported } else { known_before };
        let is_newest = reply.call > former.changed;
        let reported = if is_newest { used } else { used.max(reported_before) };
        let reported = reported.max(least.saturating_sub(unanswered.reports));
        let least = if has_charges(unanswered) { known_before } else { 0 };
        let with_charges = reported.saturating_add(noted.unanswered.charges).max(least);
        let used = with_charges.saturating_add(unanswered.reports);
        order.change_reported(|_| reported);
        if before.is_none() || reported != reported_before || reply.granted > 0 {
            order.note_change();
        }
        let known = u32::try_from(used).unwrap_or(u32::MAX);
        match kind {
            WindowKind::Sliding => {
                let end_ms = before.map_or(reply.end_ms, |(end_ms, _)| end_ms.max(reply.end_ms));
                self.table.set_known_usage(counter, end_ms, known, now_ms);
            }
            kind if kind.is_opened_by_requests() => {
                // A window that the store has lost keeps its end: the reply states that of a window which would open now.
                let end_ms = match known_end_ms {
                    Some(end_ms) if reply.used == 0 && used > 0 => end_ms.min(reply.end_ms),
                    _ => reply.end_ms,
                };
                self.table.correct_known_usage(counter, end_ms, known, now_ms);
                let known = Usage { used, end_ms };
                self.table.note_debt(counter, known, layer.request, rule_set.time(now_ms));
            }
            _ => {
                self.table.set_known_usage(counter, reply.end_ms, known, now_ms);
                let known = Usage { used, end_ms: reply.end_ms };
                self.table.note_debt(counter, known, layer.request, rule_set.time(now_ms));
            }
        }
        used
    }

    /// Sets the known usage to more than replies have reported.
    pub(super) fn raise_known_usage(&self, counter: Counter, end_ms: u64, used: u32, now_ms: u64) {
        let mut order = self.usage_order.lock(counter_id(counter));
        self.table.set_known_usage(counter, end_ms, used, now_ms);
        order.change_reported(|_| used.into());
        order.note_change();
    }

    /// Subtracts tokens that are refunded from the known usage, if its window ends at `end_ms`. The refund is sent afterwards, so a
    /// reply that lacks it raises the known usage again, and none lowers it twice.
    pub(super) fn lower_known_usage(&self, counter: Counter, end_ms: Option<u64>, tokens: u32) {
        let mut order = self.usage_order.lock(counter_id(counter));
        self.table.subtract_known_usage(counter, end_ms, tokens, self.clock.now().unix_ms);
        order.change_reported(|reported| reported.saturating_sub(tokens.into()));
    }

    /// Subtracts leased tokens that go back to the store from the known usage. Otherwise they would count as used during an outage,
    /// and the report afterwards would make the store count them.
    pub(super) fn forget_returned_tokens(&self, counter: Counter, target: &RefundTarget, tokens: u32) {
        // The known usage of a sliding window ends later than a lease.
        let end_ms = (target.kind != WindowKind::Sliding).then_some(target.end_ms);
        self.lower_known_usage(counter, end_ms, tokens);
    }

    /// Subtracts tokens that are refunded to the store from the known usage.
    pub(super) fn forget_refunded_tokens(&self, counter: Counter, tokens: u64) {
        if tokens > 0 {
            self.lower_known_usage(counter, None, u32::try_from(tokens).unwrap_or(u32::MAX));
        }
    }

    /// Adds tokens to the known usage that are used and not reported by the store yet. `end_ms`: the end of their window, as far
    /// as this gateway knows; a window that a request has opened in the store ends as the store has reported.
    pub(super) fn add_known_usage(
        &self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        end_ms: u64,
        tokens: u64,
    ) {
        let (kind, now_ms) = (layer.request.kind, self.clock.now().unix_ms);
        if kind == WindowKind::Sliding {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            // Until a token that is used now has come back.
            let segments = Segments { period_ms: rule_set.windows_of(layer).typical_ms() };
            let expires_ms = segments.expires_ms(segments.number_at(now_ms));
            return self.table.add_sliding_usage(counter, expires_ms, tokens, now_ms);
        }
        let (request, time) = (AcquireRequest { end_ms, ..layer.request }, rule_set.time(now_ms));
        let known = self.table.lasting_usage(counter, request, time);
        let end_ms = known.filter(|_| kind.is_opened_by_requests()).map_or(end_ms, |known| known.end_ms);
        // With what is known from an earlier window.
        let before = self.table.known_usage(counter, now_ms).map_or(0, |(_, used)| used.into());
        let used = known.map_or(0, |known| known.used).saturating_add(tokens);
        let more = u32::try_from(used.saturating_sub(before)).unwrap_or(u32::MAX);
        self.table.add_known_usage(counter, end_ms, more, now_ms);
        self.table.note_debt(counter, Usage { used, end_ms }, layer.request, time);
    }

    /// A new charge in the background.
    pub(super) fn new_charge(&self) -> ChargeId {
        self.charges.set(self.charges.get() + 1);
        ChargeId(self.charges.get())
    }

    /// Adds tokens to the known usage that a call in the background charges: the next request may come before the reply.
    pub(super) fn begin_charge(
        &self,
        id: ChargeId,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        request: &CounterRequest,
    ) {
        let mut order = self.usage_order.lock(counter_id(counter));
        self.add_unanswered(&mut order, id, counter, UnansweredTokens { reports: 0, charges: request.need });
        let (time, end_ms) = (rule_set.time(self.clock.now().unix_ms), request.window.end_ms);
        let known = self.table.lasting_usage(counter, AcquireRequest { end_ms, ..layer.request }, time);
        // Only the store knows when a window ends that a request has opened.
        let end_ms = known.map(|known| known.end_ms);
        let end_ms = end_ms.or_else(|| (!request.window.kind.is_opened_by_requests()).then_some(request.window.end_ms));
        if let Some(end_ms) = end_ms {
            self.add_known_usage(rule_set, layer, counter, end_ms, request.need);
        }
    }

    /// Notes a charge in the background whose tokens become part of the known usage under the same lock. `order`: of the counter.
    pub(super) fn add_unanswered(
        &self,
        order: &mut LockedOrder<'_>,
        id: ChargeId,
        counter: Counter,
        tokens: UnansweredTokens,
    ) {
        let charge = UnansweredCharge { id, tokens, sent_after: u64::MAX };
        let now = self.clock.now();
        let known = self.table.known_usage(counter, now.unix_ms).map_or(0, |(_, known)| known.into());
        let push = |record: &mut LeaseRecord| record.unanswered.push(charge);
        match self.leases.with_or_insert(counter, self.own_shard, self.clock.instant(), push) {
            Some(()) => order.add_unanswered(tokens, known),
            None => order.note_change(),
        }
    }

    /// Sets the number of the last call that does not have these charges; `u64::MAX`: no call has them.
    pub(super) fn set_sent_after(&self, charges: &[(ChargeId, Counter)], sent_after: u64) {
        for (id, counter) in charges {
            self.leases.with_existing(counter_id(*counter), |record| {
                let charges = record.unanswered.iter_mut().filter(|charge| charge.id == *id);
                charges.for_each(|charge| charge.sent_after = sent_after);
            });
        }
    }

    /// Ends what [`SharedCounters::begin_charge`] has begun, after its reply was noted. `stays_known`: tokens that no reply has stay
    /// part of the known usage.
    pub(super) fn end_charge(&self, id: ChargeId, counter: Counter, stays_known: bool) {
        let mut order = self.usage_order.lock(counter_id(counter));
        let ended = self.leases.with_existing(counter_id(counter), |record| {
            let position = record.unanswered.iter().position(|charge| charge.id == id)?;
            Some(record.unanswered.remove(position).tokens)
        });
        let Some(tokens) = ended.flatten().filter(|tokens| tokens.sum() > 0) else { return };
        if stays_known {
            order.change_reported(|reported| reported.saturating_add(tokens.sum()));
            order.remove_unanswered(tokens);
            return order.note_change();
        }
        // The known usage has more than the reported one, if no reply had the tokens. It does not become less.
        let CounterOrder { unanswered, reported, .. } = order.get();
        order.remove_unanswered(tokens);
        let now_ms = self.clock.now().unix_ms;
        let known: u64 = self.table.known_usage(counter, now_ms).map_or(0, |(_, known)| known.into());
        let more = known.saturating_sub(unanswered.reports).saturating_sub(reported);
        let tokens = u32::try_from(tokens.sum().min(more)).unwrap_or(u32::MAX);
        self.table.subtract_known_usage(counter, None, tokens, now_ms);
    }

    /// A lower bound of the usage, if the store may have lost counts; otherwise 0. It lacks what other calls charge: they may come
    /// later. It has the tokens of refunds on their way: otherwise these would lower the usage of other requests in a store that has
    /// lost these tokens.
    pub(super) fn used_at_least(
        &self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        keyed_request: KeyedRequest,
        window: StoreWindow,
    ) -> u64 {
        self.note_reconnect(self.clock.instant());
        let (counter, now_ms) = (layer.counter(keyed_request), self.clock.now().unix_ms);
        let request = AcquireRequest { end_ms: window.end_ms, ..layer.request };
        let (lasting, order) = {
            // The known usage changes under this lock, together with what is unanswered.
            let order = self.usage_order.lock(counter_id(counter));
            (self.table.lasting_usage(counter, request, rule_set.time(now_ms)), order.get())
        };
        let Usage { used, end_ms } = lasting.unwrap_or(Usage { used: 0, end_ms: window.end_ms });
        let used = used.saturating_add(order.refunding_in(window, now_ms)).saturating_sub(order.unanswered.sum());
        let is_confirmed =
            self.leases.with_existing(counter_id(counter), |record| record.generation == self.generation.get());
        match self.may_be_lost(rule_set, layer, end_ms) && is_confirmed != Some(true) {
            true => used,
            false => 0,
        }
    }

    /// Whether a server behind a new connection may have lost what was counted in the window that ends at `end_ms`.
    fn may_be_lost(&self, rule_set: &RuleSet, layer: &CompiledLayer, end_ms: u64) -> bool {
        self.reconnected_ms.get() >= end_ms.saturating_sub(rule_set.windows_of(layer).counted_ms())
    }

    /// Notes that the server has what is known of a counter: later requests no longer tell it. Otherwise it would count again what
    /// is refunded meanwhile.
    pub(super) fn confirm_usage(&self, rule_set: &RuleSet, layer: &CompiledLayer, counter: Counter, end_ms: u64) {
        if self.may_be_lost(rule_set, layer, end_ms) {
            let confirm = |record: &mut LeaseRecord| record.generation = self.generation.get();
            self.leases.with_or_insert(counter, self.own_shard, self.clock.instant(), confirm);
        }
    }

    /// A lower bound of the usage after a reply: the request included `used_min`, or the connection was reopened
    /// since; then the store may have lost counts, and the known usage applies.
    pub(super) fn known_usage(&self, counter: Counter, end_ms: u64, used_min: u64, generation: u64) -> u64 {
        if generation == self.generation.get() {
            return used_min;
        }
        let known_usage = self.table.known_usage(counter, self.clock.now().unix_ms).filter(|(end, _)| *end == end_ms);
        used_min.max(known_usage.map_or(0, |(_, used)| u64::from(used)))
    }

    /// Records whether the store refused tokens of a sliding window.
    pub(super) fn note_refusal(&self, counter: Counter, refusal: Option<Refusal>) {
        let now = self.clock.instant();
        match refusal {
            Some(_) => _ = self.leases.with_or_insert(counter, self.own_shard, now, |record| record.refusal = refusal),
            None => _ = self.leases.with_existing(counter_id(counter), |record| record.refusal = None),
        }
    }

    /// The usage of a sliding window of which the store is known to refuse `need` tokens to a request. A refusal says nothing under
    /// another limit, or once the usage has changed: after a refund the request may fit, after a charge it fits later.
    pub(super) fn known_refusal(
        &self,
        counter: Counter,
        need: i64,
        request: AcquireRequest,
        now_ms: u64,
    ) -> Option<Usage> {
        let refusal = self.leases.with_existing(counter_id(counter), |record| record.refusal)??;
        let (_, used) = self.table.known_usage(counter, now_ms)?;
        let is_same = (refusal.need, refusal.cost, refusal.limit) == (need, request.cost, request.limit);
        let is_known = is_same && now_ms < refusal.usage.end_ms && u64::from(used) == refusal.usage.used;
        is_known.then_some(refusal.usage)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tokio::sync::Notify;
    use tokio::task::{JoinHandle, spawn_local};
    use tokio::time::Instant;

    use super::super::test_worker::{KEY, START_MS, TestWorker, exact, leased, run};
    use super::*;
    use transom_limiter::decision::Decision;

    /// A request of another worker whose reply is held back until the result is notified.
    async fn held_request(worker: &TestWorker) -> (Rc<Notify>, JoinHandle<bool>) {
        worker.store.take_calls();
        worker.store.hold();
        let (pending, charge_plan) =
            (worker.pending("a", 1), worker.rule_set.charge_plan(worker.rule_set.rules.ids().take(1)));
        let decision =
            spawn_local(
                async move { matches!(pending.decide(&charge_plan).await.unwrap().decision, Decision::Admitted) },
            );
        worker.store.next_calls().await;
        (worker.store.stop_holding(), decision)
    }

    #[test]
    fn a_late_reply_to_another_worker_does_not_lower_the_known_usage() {
        run(async {
            for rule in [exact("99/hour"), leased(&["99/hour"])] {
                let worker = TestWorker::new(&[rule]).await;
                let other = worker.beside();
                assert_eq!(other.decide("b", 1).await, Some(true));
                other.settled_calls().await;
                let (held, decision) = held_request(&other).await;
                for _ in 0..30 {
                    assert_eq!(worker.decide("a", 1).await, Some(true));
                }
                worker.settled_calls().await;
                let known = worker.known_usage("a");
                assert!(known >= Some(31), "{known:?}");
                held.notify_waiters();
                assert!(decision.await.unwrap());
                assert_eq!(worker.known_usage("a"), known);
            }
        });
    }

    /// Two replies to workers beside the first one, whose calls were sent after the last change, arrive in reverse order.
    #[test]
    fn replies_in_reverse_order_leave_the_usage_that_the_last_call_found() {
        run(async {
            // After a reset, or a refund of one token by another gateway.
            for (used, refunded_to) in [(9, 0), (9, 8), (2, 1)] {
                let worker = TestWorker::new(&[exact("99/hour")]).await;
                let others = [worker.beside(), worker.beside()];
                for other in &others {
                    assert_eq!(other.decide("b", 1).await, Some(true));
                }
                worker.store.set_used(KEY, used - 1);
                assert_eq!(worker.decide("a", 1).await, Some(true));
                worker.store.set_used(KEY, refunded_to);
                let (first_held, first) = held_request(&others[0]).await;
                let (last_held, last) = held_request(&others[1]).await;
                last_held.notify_waiters();
                assert!(last.await.unwrap());
                first_held.notify_waiters();
                assert!(first.await.unwrap());
                assert_eq!(worker.known_usage("a"), Some(refunded_to as u32 + 2));
            }
        });
    }

    /// The store refunds a token, answers one worker's call that only reads, and then grants the token to another worker, whose
    /// reply arrives first.
    #[test]
    fn a_reply_that_lacks_a_late_grant_does_not_hide_it() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            let (end_ms, _) = worker.shared.table.known_usage(worker.counter("a", 0), START_MS).unwrap();
            let note = |call, granted, used| {
                let reply = CounterReply { granted, used, end_ms, available_ms: end_ms, number: 500_000, call };
                let layer = worker.rule_set.layer(worker.layer_ref(0, 0).id);
                worker.shared.note_store_usage(&worker.rule_set, layer, worker.counter("a", 0), reply, used, 0)
            };
            let next_number = || worker.shared.usage_order.next_number();
            let [granting, charging] = [next_number(), next_number()];
            note(charging, 1, 5);
            let reading = next_number();
            assert_eq!([note(granting, 1, 5), note(reading, 0, 4)], [5, 5]);
        });
    }

    #[test]
    fn a_reset_lowers_the_known_usage_with_the_next_call() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            let other = worker.beside();
            for _ in 0..5 {
                assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            }
            worker.store.set_used(KEY, 0);
            assert_eq!(other.decide("a", 1).await, Some(true));
            assert_eq!(worker.known_usage("a"), Some(1));
        });
    }

    #[test]
    fn the_known_usage_has_unanswered_charges_of_all_workers() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            let other = worker.beside();
            assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            worker.store.take_calls();
            worker.store.hold();
            worker.shared.overdraw(
                &worker.rule_set,
                worker.charge_plan.rules().as_slice()[0],
                worker.request(0, "a", 40),
                &"r|a".into(),
            );
            worker.store.next_calls().await;
            let held = worker.store.stop_holding();
            assert_eq!(worker.known_usage("a"), Some(42));
            assert_eq!(other.decide("a", 1).await, Some(true));
            assert_eq!(worker.known_usage("a"), Some(43), "the charge does not count twice");
            held.notify_waiters();
            worker.settled_calls().await;
            assert_eq!(worker.known_usage("a"), Some(43));
        });
    }

    #[test]
    fn charges_without_a_reply_refuse_nothing_that_the_store_admits() {
        run(async {
            let worker = TestWorker::new(&[exact("50/hour")]).await;
            let other = worker.beside();
            assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            worker.store.take_calls();
            worker.store.hold();
            let rule = worker.charge_plan.rules().as_slice()[0];
            worker.shared.overdraw(&worker.rule_set, rule, worker.request(0, "a", 40), &"r|a".into());
            worker.store.next_calls().await;
            let held = worker.store.stop_holding();
            for cost in [1, 1, 6] {
                assert_eq!(other.decide("a", cost).await, Some(true));
            }
            assert_eq!((worker.store.used(KEY), other.decide("a", 1).await), (50, Some(false)));
            held.notify_waiters();
            worker.settled_calls().await;
            assert_eq!(worker.known_usage("a"), Some(50));
        });
    }

    #[test]
    fn a_late_grant_in_exact_mode_admits_nothing_beyond_the_limit() {
        run(async {
            // The requests that are counted locally meanwhile may be reported before the late reply.
            for (limit, is_reported) in [(3, false), (3, true), (4, false), (4, true)] {
                let worker = TestWorker::new(&[exact(&format!("{limit}/hour"))]).await;
                let other = worker.beside();
                assert_eq!(worker.decide("a", 1).await, Some(true));
                let (held, decision) = held_request(&other).await;
                for _ in 0..2 {
                    worker.store.hold();
                    let mut pending = worker.pending("a", 1);
                    pending.deadline = Instant::from_std(worker.clock.instant());
                    let outcome = pending.decide(&worker.charge_plan).await.unwrap();
                    assert!(matches!(outcome.decision, Decision::Admitted), "it is counted locally");
                    worker.store.release();
                }
                worker.settled_calls().await;
                if is_reported {
                    worker.shared.report_to_reachable().await;
                }
                held.notify_waiters();
                let is_admitted = decision.await.unwrap();
                assert_eq!(is_admitted, limit == 4, "three requests are admitted already; {limit}, {is_reported}");
            }
        });
    }
}
