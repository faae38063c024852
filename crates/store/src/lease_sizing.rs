//! The leases of one worker: how many tokens to fetch next for each counter, which fetches are in flight, and which leases
//! are idle.
//!
//! The table holds the leased tokens. A record holds what is needed to lease more and to return the rest. Records may
//! be dropped at any time; then unused tokens are not returned.
//!
//! A new key leases what it needs. A key that comes back soon leases two or four times as much as before, so that a
//! busy key fetches about once a second; a key that is used rarely leases less again. Near the limit the store grants
//! only a part of what remains.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::{AddAssign, SubAssign};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::scripts::{CounterReply, RefundTarget};
use foldhash::fast::FixedState;
use smallvec::SmallVec;
use tokio::sync::Notify;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::Usage;

/// Most records. Other counters lease only what they need.
const RECORDS_MAX: usize = 65_536;
/// A lease that lasted less than this is followed by a lease four times as large.
pub const FOURFOLD_BELOW: Duration = Duration::from_millis(100);
/// A lease that lasted less than this is followed by a lease twice as large.
pub const TWOFOLD_BELOW: Duration = Duration::from_secs(1);
/// A lease that lasted longer than this is followed by a lease half as large.
pub const HALF_ABOVE: Duration = Duration::from_secs(4);
/// Unused leases are returned after this time.
pub const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How long a record without a lease is kept.
pub const RECORD_LIFETIME: Duration = Duration::from_secs(10);
/// Shortest and longest time until an exhausted window is checked again.
pub const RECHECK_PERIOD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// Identifies a counter by its key.
pub type CounterId = (u64, u64);

/// The id of a layer's ordinary counter.
pub fn counter_id(counter: Counter) -> CounterId {
    (counter.key.bucket_hash, counter.key.tag)
}

/// The recent leases of this worker.
#[derive(Default)]
pub struct Leases {
    records: RefCell<HashMap<CounterId, LeaseRecord, FixedState>>,
}

/// The lease of one counter.
pub struct LeaseRecord {
    pub counter: Counter,
    /// The key in the store.
    pub store_key: Option<Rc<str>>,
    /// Where the latest tokens came from.
    pub refund_target: Option<RefundTarget>,
    /// Tokens requested by the last fetch.
    fetch_size: u64,
    last_fetch: Instant,
    /// The earliest time of the next check of an exhausted window.
    next_recheck: Instant,
    pub in_flight: Option<Rc<InFlightFetch>>,
    /// Tokens needed by requests that wait for the fetch in flight.
    pub waiting_tokens: u64,
    /// Charges in the background whose replies have not come. They are part of the known usage.
    pub unanswered: SmallVec<[UnansweredCharge; 1]>,
    /// Whether a call in flight finds out if a sliding window is full, for a request that another rule has refused.
    pub is_being_checked: bool,
    /// The latest call whose reply was noted.
    pub latest_call: u64,
    /// Tokens needed by requests that waited for the last fetch, which has ended, and have not continued yet.
    pub resuming_tokens: u64,
    /// The last refusal by the store, if the window slides.
    pub refusal: Option<Refusal>,
    /// End of the window in which the store no longer grants tokens in advance.
    exhausted_end_ms: u64,
    /// Leased tokens at the last idle check.
    last_balance: u32,
    /// The shard that had tokens the last time.
    pub shard: u32,
    pub generation: u64,
}

/// A charge in the background.
#[derive(Clone, Copy)]
pub struct UnansweredCharge {
    pub id: ChargeId,
    /// None once a reply has them.
    pub tokens: UnansweredTokens,
    /// No call of this worker up to this number has these tokens. `u64::MAX`: the charge was not sent yet.
    pub sent_after: u64,
}

/// Tokens that were used already when a call in the background began to charge them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnansweredTokens {
    /// Of reports of usage that was counted locally.
    pub reports: u64,
    /// Beyond what a request was charged, or of a refused request.
    pub charges: u64,
}

impl UnansweredTokens {
    pub fn sum(self) -> u64 {
        self.reports.saturating_add(self.charges)
    }
}

impl AddAssign for UnansweredTokens {
    fn add_assign(&mut self, more: UnansweredTokens) {
        self.reports = self.reports.saturating_add(more.reports);
        self.charges = self.charges.saturating_add(more.charges);
    }
}

impl SubAssign for UnansweredTokens {
    fn sub_assign(&mut self, less: UnansweredTokens) {
        self.reports = self.reports.saturating_sub(less.reports);
        self.charges = self.charges.saturating_sub(less.charges);
    }
}

/// The identity of an [`UnansweredCharge`] among those of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChargeId(pub u64);

/// A refusal of tokens of a sliding window.
#[derive(Clone, Copy)]
pub struct Refusal {
    /// The tokens that were needed of the store, below zero if more were leased; those that the request takes, and the limit.
    pub need: i64,
    pub cost: u32,
    pub limit: u32,
    /// The usage then, and the time until which as many tokens are refused.
    pub usage: Usage,
}

/// What the reply to a call says about the charges of this worker.
#[derive(Default)]
pub struct NotedCall {
    /// A later one was noted before.
    pub is_outdated: bool,
    /// The tokens that the reply has: they are unanswered no longer.
    pub answered: UnansweredTokens,
    /// Those that it lacks.
    pub unanswered: UnansweredTokens,
}

impl LeaseRecord {
    /// Notes the reply to a call.
    pub fn note_call(&mut self, call: u64) -> NotedCall {
        let mut noted = NotedCall { is_outdated: call < self.latest_call, ..NotedCall::default() };
        self.latest_call = self.latest_call.max(call);
        for charge in &mut self.unanswered {
            match charge.sent_after < call {
                true => noted.answered += std::mem::take(&mut charge.tokens),
                false => noted.unanswered += charge.tokens,
            }
        }
        noted
    }

    fn new(counter: Counter, shard: u32, now: Instant) -> LeaseRecord {
        LeaseRecord {
            counter,
            store_key: None,
            refund_target: None,
            fetch_size: 0,
            last_fetch: now,
            next_recheck: now,
            in_flight: None,
            waiting_tokens: 0,
            unanswered: SmallVec::new(),
            is_being_checked: false,
            latest_call: 0,
            resuming_tokens: 0,
            refusal: None,
            exhausted_end_ms: 0,
            last_balance: 0,
            shard,
            generation: 0,
        }
    }

    /// The number of tokens to fetch, if `need` are needed now.
    pub fn next_fetch_size(&mut self, need: u64, now: Instant) -> u64 {
        let lasted = now.saturating_duration_since(self.last_fetch);
        let next = match self.fetch_size {
            0 => 0,
            last if lasted < FOURFOLD_BELOW => last.saturating_mul(4),
            last if lasted < TWOFOLD_BELOW => last.saturating_mul(2),
            last if lasted > HALF_ABOVE => last / 2,
            last => last,
        };
        self.last_fetch = now;
        self.fetch_size = next.max(need + std::mem::take(&mut self.resuming_tokens)).min(u64::from(u32::MAX));
        self.fetch_size
    }

    /// Records that the fetch in flight has ended: the requests that wait for it continue.
    pub fn end_fetch(&mut self) {
        self.in_flight = None;
        self.resuming_tokens = std::mem::take(&mut self.waiting_tokens);
    }

    /// Removes the tokens of a request that no longer waits: it fetches them itself, has got them, or gives up.
    pub fn stop_waiting(&mut self, tokens: u64, has_ended: bool) {
        let waiting = if has_ended { &mut self.resuming_tokens } else { &mut self.waiting_tokens };
        *waiting = waiting.saturating_sub(tokens);
    }

    /// Records a reply, which may have granted fewer tokens than requested.
    pub fn record_reply(&mut self, granted: u64, end_ms: u64, is_needed: bool) {
        match (granted, is_needed) {
            (0, false) => self.exhausted_end_ms = end_ms,
            (0, true) => {}
            (granted, _) => {
                self.exhausted_end_ms = if is_needed { 0 } else { self.exhausted_end_ms };
                self.fetch_size = granted;
            }
        }
    }

    /// Whether to fetch more before the lease is spent.
    pub fn is_low(&self, left: u64, now_ms: u64) -> bool {
        self.in_flight.is_none()
            && self.exhausted_end_ms <= now_ms
            && self.fetch_size > 1
            && left <= self.fetch_size / 2
    }

    /// Whether to check an exhausted counter again; sets the time of the next check.
    pub fn is_recheck_due(&mut self, now: Instant, period_ms: u64) -> bool {
        if self.in_flight.is_some() || now < self.next_recheck {
            return false;
        }
        let (min, max) = RECHECK_PERIOD;
        self.next_recheck = now + Duration::from_millis(period_ms / 16).clamp(min, max);
        true
    }
}

impl Leases {
    /// Runs `change` on the record of a counter, which is created if needed; `None` if there are too many records.
    pub fn with_or_insert<R>(
        &self,
        counter: Counter,
        shard: u32,
        now: Instant,
        change: impl FnOnce(&mut LeaseRecord) -> R,
    ) -> Option<R> {
        let mut records = self.records.borrow_mut();
        let is_full = records.len() >= RECORDS_MAX;
        match records.entry(counter_id(counter)) {
            std::collections::hash_map::Entry::Occupied(entry) => Some(change(entry.into_mut())),
            std::collections::hash_map::Entry::Vacant(_) if is_full => None,
            std::collections::hash_map::Entry::Vacant(entry) => {
                Some(change(entry.insert(LeaseRecord::new(counter, shard, now))))
            }
        }
    }

    /// As [`Leases::with_or_insert`], for an existing record only.
    pub fn with_existing<R>(&self, id: CounterId, change: impl FnOnce(&mut LeaseRecord) -> R) -> Option<R> {
        self.records.borrow_mut().get_mut(&id).map(change)
    }

    /// Removes the leases to return: of counters unused since the last call, or all. `withdraw` takes the remaining
    /// tokens out of the table, or returns `None` if they cannot be returned now; `left` only reads. Drops outdated
    /// records.
    pub fn take_idle(
        &self,
        all: bool,
        now: Instant,
        left: impl Fn(Counter) -> u32,
        withdraw: impl Fn(Counter, &RefundTarget) -> Option<u32>,
    ) -> Vec<(RefundTarget, u32)> {
        let mut returned = Vec::new();
        self.records.borrow_mut().retain(|_, record| {
            let is_in_flight = record.in_flight.is_some() || !record.unanswered.is_empty();
            let Some(target) = &record.refund_target else {
                return is_in_flight || now < record.next_recheck.max(record.last_fetch + RECORD_LIFETIME);
            };
            let left = left(record.counter);
            let is_idle = left == record.last_balance && now > record.last_fetch + IDLE_AFTER;
            record.last_balance = left;
            if all || (is_idle && !is_in_flight) {
                let Some(tokens) = withdraw(record.counter, target) else { return true };
                if tokens > 0 {
                    returned.push((target.clone(), tokens));
                }
                record.fetch_size /= 2;
                record.refund_target = None;
            }
            true
        });
        returned
    }

    /// Leased tokens in the table, of counters that this worker leases for.
    pub fn outstanding(&self, left: impl Fn(Counter) -> u32) -> u64 {
        self.records
            .borrow()
            .values()
            .filter(|record| record.refund_target.is_some())
            .map(|record| u64::from(left(record.counter)))
            .sum()
    }
}

/// A fetch in flight. Afterwards, waiting requests look into the table.
pub struct InFlightFetch {
    /// The counters it fetches for.
    pub ids: Vec<CounterId>,
    /// Whether the store replied; `None` while the fetch is in flight.
    has_reply: Cell<Option<bool>>,
    notify: Notify,
    /// Tokens that did not fit in the table, for the requests that wait.
    pub undeposited: RefCell<Vec<UndepositedTokens>>,
    /// The counters that the store refused, with their usage.
    pub refused: RefCell<Vec<(CounterId, CounterReply)>>,
}

/// Tokens that did not fit in the table.
pub struct UndepositedTokens {
    pub id: CounterId,
    pub tokens: u64,
    /// Of the layer that they were granted for: they may exceed a smaller one.
    pub capacity: u32,
    pub refund_target: RefundTarget,
}

impl InFlightFetch {
    pub fn new(ids: Vec<CounterId>) -> InFlightFetch {
        let (undeposited, refused) = (RefCell::default(), RefCell::default());
        InFlightFetch { ids, has_reply: Cell::new(None), notify: Notify::new(), undeposited, refused }
    }

    pub fn includes(&self, id: CounterId) -> bool {
        self.ids.contains(&id)
    }

    /// Waits for the reply; `false` if there was none.
    pub async fn finished(&self) -> bool {
        loop {
            let notified = self.notify.notified();
            if let Some(has_reply) = self.has_reply.get() {
                return has_reply;
            }
            notified.await;
        }
    }

    pub fn finish(&self, has_reply: bool) {
        self.has_reply.set(Some(has_reply));
        self.notify.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::bucket::Key;
    use transom_limiter::window_kind::WindowKind;
    use transom_runtime::clock::Clock;

    const MS: Duration = Duration::from_millis(1);
    const NONE: [u32; 0] = [];

    fn counter(number: u64) -> Counter {
        Counter { key: Key { bucket_hash: number, tag: number + 1 }, layer: 0 }
    }

    fn target() -> RefundTarget {
        RefundTarget {
            key_base: "k".into(),
            kind: WindowKind::Plain,
            number: 0,
            limit: 9,
            used_max: None,
            counter: None,
            end_ms: 100,
        }
    }

    #[test]
    fn a_busy_key_fetches_more_and_an_idle_one_less() {
        let start = Clock::manual(0).instant();
        for (lasted, size) in [
            (FOURFOLD_BELOW - MS, 32),
            (FOURFOLD_BELOW, 16),
            (TWOFOLD_BELOW - MS, 16),
            (TWOFOLD_BELOW, 8),
            (HALF_ABOVE, 8),
            (HALF_ABOVE + MS, 4),
        ] {
            let mut record = LeaseRecord::new(counter(1), 0, start);
            assert_eq!(record.next_fetch_size(8, start), 8, "a new key fetches what it needs");
            assert_eq!(record.next_fetch_size(1, start + lasted), size, "{lasted:?}");
            record.resuming_tokens = 30;
            assert_eq!(record.next_fetch_size(20, start + lasted), 50.max(4 * size), "requests wait");
            assert_eq!(record.next_fetch_size(u64::MAX, start + lasted), u64::from(u32::MAX));
        }
    }

    #[test]
    fn a_lease_is_low_at_half_of_what_was_fetched() {
        let mut record = LeaseRecord::new(counter(1), 0, Clock::manual(0).instant());
        record.record_reply(9, 100, true);
        assert_eq!([4, 5].map(|left| record.is_low(left, 50)), [true, false]);
        // The store grants nothing in advance in this window, but what a request needs.
        record.record_reply(0, 100, false);
        assert_eq!([99, 100].map(|now_ms| record.is_low(4, now_ms)), [false, true]);
        record.record_reply(0, 200, true);
        record.record_reply(7, 200, false);
        assert_eq!(
            [(3, 99), (3, 100), (4, 100)].map(|(left, now_ms)| record.is_low(left, now_ms)),
            [false, true, false]
        );
        record.record_reply(7, 200, true);
        assert!(record.is_low(3, 50));
        record.in_flight = Some(Rc::new(InFlightFetch::new(vec![])));
        assert!(!record.is_low(3, 50));
        record.in_flight = None;
        record.record_reply(1, 200, true);
        assert!(!record.is_low(0, 50), "single tokens are fetched when they are needed");
    }

    #[test]
    fn an_exhausted_window_is_checked_again_after_a_sixteenth() {
        let start = Clock::manual(0).instant();
        for (period_ms, pause) in [(16_000, RECHECK_PERIOD.0), (32_000, 2000 * MS), (960_000, RECHECK_PERIOD.1)] {
            let mut record = LeaseRecord::new(counter(1), 0, start);
            let mut is_due = |now| record.is_recheck_due(now, period_ms);
            assert_eq!([start, start, start + pause - MS, start + pause].map(&mut is_due), [true, false, false, true]);
            record.in_flight = Some(Rc::new(InFlightFetch::new(vec![])));
            assert!(!record.is_recheck_due(start + 2 * pause, period_ms));
        }
    }

    #[test]
    fn idle_leases_are_returned() {
        let (leases, start) = (Leases::default(), Clock::manual(0).instant());
        let with = |number, change: fn(&mut LeaseRecord)| leases.with_or_insert(counter(number), 0, start, change);
        with(1, |record| record.refund_target = Some(target()));
        with(2, |_record| ());
        let is_known = |number| leases.with_existing(counter_id(counter(number)), |_record| ()).is_some();
        let take = |all, now, left: u32, withdrawn: Option<u32>| -> Vec<u32> {
            let returned = leases.take_idle(all, now, |_counter| left, |_counter, _target| withdrawn);
            returned.into_iter().map(|(_, tokens)| tokens).collect()
        };
        assert_eq!(leases.outstanding(|_counter| 5), 5, "of the counter with a lease");
        let idle = start + IDLE_AFTER + MS;
        assert_eq!(take(false, idle, 5, Some(5)), NONE, "it was used since the last check");
        assert_eq!(take(false, start + IDLE_AFTER, 5, Some(5)), NONE, "it was fetched just now");
        with(1, |record| record.in_flight = Some(Rc::new(InFlightFetch::new(vec![]))));
        assert_eq!(take(false, idle, 5, Some(5)), NONE, "a fetch is in flight");
        assert_eq!(take(true, start, 4, None), NONE, "the tokens cannot be returned now");
        with(1, |record| record.in_flight = None);
        with(1, |record| record.fetch_size = 9);
        assert_eq!(take(false, idle, 4, Some(3)), [3]);
        assert_eq!(with(1, |record| assert_eq!(record.fetch_size, 4)), Some(()));
        assert_eq!((take(true, idle, 4, Some(3)), leases.outstanding(|_counter| 5)), (vec![], 0));
        with(1, |record| record.refund_target = Some(target()));
        assert_eq!(take(true, start, 0, Some(0)), NONE, "there is nothing to return");
        // Records without a lease are dropped after their time.
        with(2, |record| record.in_flight = Some(Rc::new(InFlightFetch::new(vec![]))));
        take(false, start + RECORD_LIFETIME - MS, 0, None);
        assert!(is_known(1) && is_known(2));
        take(false, start + RECORD_LIFETIME, 0, None);
        assert!(!is_known(1) && is_known(2), "the fetch needs its record");
    }

    #[test]
    fn a_bounded_number_of_counters_has_records() {
        let (leases, now) = (Leases::default(), Clock::manual(0).instant());
        let add = |number: usize| leases.with_or_insert(counter(number as u64), 0, now, |_record| ()).is_some();
        assert!((0..RECORDS_MAX).all(add));
        assert!(!add(RECORDS_MAX) && add(0), "those with a record keep it");
    }

    #[test]
    fn requests_wait_for_a_fetch_until_it_has_a_reply() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for has_reply in [true, false] {
                let fetch = Rc::new(InFlightFetch::new(vec![(1, 2)]));
                assert!(fetch.includes((1, 2)) && !fetch.includes((2, 1)));
                let finish = async {
                    tokio::task::yield_now().await;
                    fetch.finish(has_reply);
                };
                assert_eq!(tokio::join!(fetch.finished(), finish).0, has_reply);
                assert_eq!(fetch.finished().await, has_reply);
            }
        });
    }
}
