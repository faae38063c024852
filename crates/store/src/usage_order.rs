//! The order of calls to the store among all workers of a process, and of the changes of known usage: which replies may lower the
//! known usage, which all workers share.
//!
//! Each worker has a connection of its own, so replies to different workers arrive in any order. Calls and changes have numbers of
//! one sequence. A reply lowers the known usage only if its call was sent after the last change; otherwise the store may have
//! answered before it counted what the change was learned from.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::fast::FixedState;
use smallvec::SmallVec;

use super::lease_sizing::{CounterId, UnansweredTokens};
use super::scripts::Refund;
use transom_limiter::store_key::StoreWindow;

/// Number of locks; workers that note replies about different counters seldom wait for each other.
const PARTS: usize = 64;
/// Counters of one part that are remembered; more, up to twice as many as cannot be forgotten.
const COUNTERS_MAX: usize = 1024;

/// The order of calls and changes. All workers of a process share it.
pub struct UsageOrder {
    /// Number of the last call or change.
    last: AtomicU64,
    parts: [Mutex<Part>; PARTS],
}

struct Part {
    counters: HashMap<CounterId, CounterOrder, FixedState>,
    /// As many are remembered before some are forgotten.
    most: usize,
    /// No forgotten counter was changed after this number.
    forgotten: u64,
}

impl Default for Part {
    fn default() -> Part {
        Part { counters: HashMap::default(), most: COUNTERS_MAX, forgotten: 0 }
    }
}

/// What is remembered of a counter.
#[derive(Clone)]
pub struct CounterOrder {
    /// Number of the last change of the usage that replies have reported.
    pub changed: u64,
    /// Tokens of all workers that are part of the known usage and of no reply to their own call yet.
    pub unanswered: UnansweredTokens,
    /// While there are unanswered charges: the usage that replies have reported.
    pub reported: u64,
    /// Tokens of refunds that wait or have no reply, by window. They are not part of the known usage, and a server may still count them.
    refunding: SmallVec<[RefundingTokens; 1]>,
}

/// Tokens that were counted in one window and are refunded.
#[derive(Clone)]
struct RefundingTokens {
    /// [`Refund::number`].
    number: u64,
    limit: u32,
    tokens: u64,
}

impl CounterOrder {
    /// Whether the order has to be remembered.
    fn is_open(&self) -> bool {
        self.unanswered.sum() > 0 || !self.refunding.is_empty()
    }

    /// Tokens by which refunds that wait or have no reply may lower the usage of a window.
    pub fn refunding_in(&self, window: StoreWindow, now_ms: u64) -> u64 {
        let tokens = |of: &RefundingTokens| window.refundable(of.number, of.limit, of.tokens, now_ms);
        self.refunding.iter().map(tokens).fold(0, u64::saturating_add)
    }
}

/// A counter whose known usage no other worker changes at the same time: all changes hold this lock.
pub struct LockedOrder<'a> {
    order: &'a UsageOrder,
    part: MutexGuard<'a, Part>,
    id: CounterId,
}

impl Default for UsageOrder {
    fn default() -> UsageOrder {
        UsageOrder { last: AtomicU64::new(0), parts: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl UsageOrder {
    /// The number of a call that is sent next, or of a change.
    // Ordering: a call with a greater number than a change was sent after what the change was learned from. The calls and changes
    // of one worker are in its own order; those of two workers are ordered by this acquiring and releasing increment.
    pub fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::AcqRel) + 1
    }

    pub fn lock(&self, id: CounterId) -> LockedOrder<'_> {
        let part = self.parts[id.0 as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner);
        LockedOrder { order: self, part, id }
    }
}

impl LockedOrder<'_> {
    pub fn get(&self) -> CounterOrder {
        let (unanswered, reported, refunding) = Default::default();
        let forgotten = CounterOrder { changed: self.part.forgotten, unanswered, reported, refunding };
        self.part.counters.get(&self.id).cloned().unwrap_or(forgotten)
    }

    /// Notes a change: replies to calls that were sent before do not lower the known usage.
    pub fn note_change(&mut self) {
        let changed = self.order.next_number();
        self.change(|counter| counter.changed = changed);
    }

    /// `known`: the known usage without these tokens.
    pub fn add_unanswered(&mut self, tokens: UnansweredTokens, known: u64) {
        self.change(|counter| {
            if counter.unanswered.charges == 0 {
                counter.reported = known.saturating_sub(counter.unanswered.reports);
            }
            counter.unanswered += tokens;
        });
    }

    pub fn remove_unanswered(&mut self, tokens: UnansweredTokens) {
        if tokens.sum() > 0 {
            self.change(|counter| counter.unanswered -= tokens);
        }
    }

    pub fn begin_refund<K>(&mut self, &Refund { number, limit, tokens, .. }: &Refund<K>) {
        if tokens > 0 {
            self.change(|counter| {
                match counter.refunding.iter_mut().find(|of| (of.number, of.limit) == (number, limit)) {
                    Some(of) => of.tokens = of.tokens.saturating_add(tokens),
                    None => counter.refunding.push(RefundingTokens { number, limit, tokens }),
                }
            });
        }
    }

    pub fn end_refund<K>(&mut self, &Refund { number, limit, tokens, .. }: &Refund<K>) {
        let Some(counter) = self.part.counters.get_mut(&self.id) else { return };
        let begun = counter.refunding.iter().position(|of| (of.number, of.limit) == (number, limit));
        if let Some(position) = begun {
            let of = &mut counter.refunding[position];
            of.tokens = of.tokens.saturating_sub(tokens);
            if of.tokens == 0 {
                counter.refunding.swap_remove(position);
            }
        }
    }

    /// Changes the usage that replies have reported, if it is remembered.
    pub fn change_reported(&mut self, change: impl FnOnce(u64) -> u64) {
        if let Some(counter) = self.part.counters.get_mut(&self.id)
            && counter.unanswered.charges > 0
        {
            counter.reported = change(counter.reported);
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut CounterOrder)) {
        if let Some(counter) = self.part.counters.get_mut(&self.id) {
            return change(counter);
        }
        let mut counter = self.get();
        change(&mut counter);
        if self.part.counters.len() >= self.part.most {
            self.part.forgotten = self.order.next_number();
            self.part.counters.retain(|_, counter| counter.is_open());
            // So that a counter costs the same on average, however many cannot be forgotten.
            self.part.most = COUNTERS_MAX.max(2 * self.part.counters.len());
        }
        self.part.counters.insert(self.id, counter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::window_kind::WindowKind;

    #[test]
    fn calls_and_changes_are_numbered_together() {
        let order = UsageOrder::default();
        let before = order.next_number();
        order.lock((7, 1)).note_change();
        let changed = order.lock((7, 1)).get().changed;
        assert!(before < changed && changed < order.next_number());
        assert_eq!(order.lock((7, 2)).get().changed, 0);
    }

    #[test]
    fn reported_usage_is_remembered_while_charges_are_unanswered() {
        let order = UsageOrder::default();
        let mut order = order.lock((7, 1));
        order.change_reported(|_| 99);
        order.add_unanswered(UnansweredTokens { reports: 4, charges: 0 }, 3);
        order.add_unanswered(UnansweredTokens { reports: 0, charges: 5 }, 7);
        order.add_unanswered(UnansweredTokens { reports: 0, charges: 1 }, 12);
        assert_eq!(order.get().reported, 3);
        order.change_reported(|reported| reported + 1);
        order.remove_unanswered(UnansweredTokens { reports: 4, charges: 6 });
        order.change_reported(|_| 99);
        assert_eq!((order.get().reported, order.get().unanswered.sum()), (4, 0));
    }

    #[test]
    fn a_forgotten_counter_counts_as_changed() {
        let order = UsageOrder::default();
        order.lock((0, 0)).add_unanswered(UnansweredTokens { reports: 5, charges: 0 }, 0);
        for tag in 1..COUNTERS_MAX as u64 {
            order.lock((0, tag)).note_change();
        }
        let before = order.next_number();
        let changed = |tag| order.lock((0, tag)).get().changed;
        assert!(changed(1) < before && changed(9999) < before);
        order.lock((0, 9998)).note_change();
        assert!(changed(1) > before && changed(9999) > before);
        let unanswered = |tag| order.lock((0, tag)).get().unanswered.sum();
        assert_eq!((unanswered(0), unanswered(1)), (5, 0));
        assert!(changed(1) < order.next_number());
    }

    /// In an outage, refunds of many counters wait.
    #[test]
    fn counters_that_cannot_be_forgotten_are_seldom_looked_at() {
        let order = UsageOrder::default();
        let mut sweeps = Vec::new();
        for tag in 0..8 * COUNTERS_MAX as u64 {
            order.lock((0, tag)).add_unanswered(UnansweredTokens { reports: 1, charges: 0 }, 0);
            sweeps.push(order.lock((0, u64::MAX)).get().changed);
        }
        sweeps.dedup();
        assert_eq!(sweeps.len(), 1 + 3, "each looks at twice as many as the one before");
        assert_eq!(order.lock((0, 0)).part.counters.len(), 8 * COUNTERS_MAX);
    }

    #[test]
    fn refunds_end_as_they_began() {
        let refund = |number, tokens| Refund {
            key_base: (),
            kind: WindowKind::Plain,
            number,
            limit: 9,
            tokens,
            used_max: None,
            counter: None,
            deletes: false,
        };
        let order = UsageOrder::default();
        let mut counter = order.lock((7, 1));
        counter.begin_refund(&refund(1, 0));
        counter.end_refund(&refund(1, 0));
        assert!(counter.part.counters.is_empty(), "nothing was refunded");
        [refund(1, 2), refund(2, 3), refund(1, 4)].iter().for_each(|refund| counter.begin_refund(refund));
        let mut left = |number, tokens| {
            counter.end_refund(&refund(number, tokens));
            counter.get().refunding.iter().map(|of| (of.number, of.tokens)).collect::<Vec<_>>()
        };
        assert_eq!(left(1, 4), [(1, 2), (2, 3)]);
        assert_eq!(left(1, 2), [(2, 3)]);
        assert_eq!(left(2, 3), []);
        assert!(!counter.get().is_open());
    }
}
