//! Which tokens were fetched for which counter, and how many to fetch the next time.
//!
//! The tokens themselves lie in the table. What is kept here is what it takes to fetch more and to return what is left: it
//! may be forgotten at any time, and then no more is lost than tokens that nobody returns.
//!
//! A key that is seen for the first time fetches what it needs. One that comes again soon fetches twice as much as the last time, or four
//! times, so that a busy key asks about once a second; one that comes rarely fetches less again. How near the limit is, is the
//! store's to say: it hands out a part of what is left.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;

use super::scripts::RefundTarget;
use super::token_fetch::InFlightFetch;
use transom_limiter::table::Counter;

/// No more counters than this are known at a time; the others fetch what they need and no more.
const RECORDS_MAX: usize = 65_536;
/// A slice that was spent in less time than this is followed by one four times as large,
pub const BRISK: Duration = Duration::from_millis(100);
/// or twice as large,
pub const BUSY: Duration = Duration::from_secs(1);
/// and one that lasted longer than this by one half as large.
pub const SLOW: Duration = Duration::from_secs(4);
/// What nobody has spent of for so long is returned.
pub const IDLE: Duration = Duration::from_secs(1);
/// How long a counter is remembered for which there is nothing to return.
pub const MEMORY: Duration = Duration::from_secs(10);
/// How soon it is asked again whether a window that was used up has room, at least and at most.
pub const RECHECK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// A counter is known by its key.
pub type Id = (u64, u64);

/// The id of a layer's ordinary counter.
pub fn id(counter: Counter) -> Id {
    (counter.key.bucket_hash, counter.key.tag)
}

/// The counters that this loop has fetched tokens for lately.
#[derive(Default)]
pub struct Leases {
    records: RefCell<HashMap<Id, Record, RandomState>>,
}

/// What is known of one counter.
pub struct Record {
    pub counter: Counter,
    /// What the key is in the store.
    pub text: Option<Rc<str>>,
    /// Where the latest tokens came from.
    pub origin: Option<RefundTarget>,
    /// How many tokens were asked for the last time.
    slice: u64,
    asked: Instant,
    /// The latest time at which it was asked for tokens, whether there are some or not.
    recheck: Instant,
    pub flight: Option<Rc<InFlightFetch>>,
    /// Tokens that those want who wait for a flight.
    pub waiting: u64,
    /// The window in which nothing was handed out any more that nobody waited for; asking on would be in vain.
    dry_end_ms: u64,
    /// What was left at the last look.
    left: u32,
    /// The shard that had tokens the last time.
    pub shard: u32,
    pub generation: u64,
}

impl Record {
    fn new(counter: Counter, shard: u32, now: Instant) -> Record {
        Record {
            counter,
            text: None,
            origin: None,
            slice: 0,
            asked: now,
            recheck: now,
            flight: None,
            waiting: 0,
            dry_end_ms: 0,
            left: 0,
            shard,
            generation: 0,
        }
    }

    /// How many tokens to ask for, if `need` is what it takes.
    pub fn slice(&mut self, need: u64, now: Instant) -> u64 {
        let lasted = now.saturating_duration_since(self.asked);
        let next = match self.slice {
            0 => 0,
            last if lasted < BRISK => last.saturating_mul(4),
            last if lasted < BUSY => last.saturating_mul(2),
            last if lasted > SLOW => last / 2,
            last => last,
        };
        self.asked = now;
        self.slice = next.max(need + std::mem::take(&mut self.waiting)).min(u64::from(u32::MAX));
        self.slice
    }

    /// What was handed out may be less than what was asked for.
    pub fn landed(&mut self, granted: u64, end_ms: u64, is_needed: bool) {
        match (granted, is_needed) {
            (0, false) => self.dry_end_ms = end_ms,
            (0, true) => {}
            (granted, _) => {
                self.dry_end_ms = if is_needed { 0 } else { self.dry_end_ms };
                self.slice = granted;
            }
        }
    }

    /// Whether more should be fetched before it runs dry.
    pub fn is_low(&self, left: u64, now_ms: u64) -> bool {
        self.flight.is_none() && self.dry_end_ms <= now_ms && self.slice > 1 && left <= self.slice / 2
    }

    /// Whether a counter that was used up should be asked for again; the next time is some time from now.
    pub fn is_recheck_due(&mut self, now: Instant, period_ms: u64) -> bool {
        if self.flight.is_some() || now < self.recheck {
            return false;
        }
        let (least, most) = RECHECK;
        self.recheck = now + Duration::from_millis(period_ms / 16).clamp(least, most);
        true
    }
}

impl Leases {
    /// Lets `change` see the record of a counter, made if there was none; `None` if there are too many.
    pub fn with<R>(
        &self,
        counter: Counter,
        shard: u32,
        now: Instant,
        change: impl FnOnce(&mut Record) -> R,
    ) -> Option<R> {
        let mut records = self.records.borrow_mut();
        let is_full = records.len() >= RECORDS_MAX;
        match records.entry(id(counter)) {
            std::collections::hash_map::Entry::Occupied(known) => Some(change(known.into_mut())),
            std::collections::hash_map::Entry::Vacant(_) if is_full => None,
            std::collections::hash_map::Entry::Vacant(place) => {
                Some(change(place.insert(Record::new(counter, shard, now))))
            }
        }
    }

    /// As [`Leases::with`], if there is a record.
    pub fn known<R>(&self, id: Id, change: impl FnOnce(&mut Record) -> R) -> Option<R> {
        self.records.borrow_mut().get_mut(&id).map(change)
    }

    /// Takes out what is to be returned: of counters that nobody has asked for since the last time, or of all. `withdraw` takes
    /// what is left of a counter's window out of the table, or `None` if it can not be returned now; `left` only looks. Forgets whom there is nothing more to
    /// say about.
    pub fn idle(
        &self,
        all: bool,
        now: Instant,
        left: impl Fn(Counter) -> u32,
        withdraw: impl Fn(Counter, &RefundTarget) -> Option<u32>,
    ) -> Vec<(RefundTarget, u32)> {
        let mut returned = Vec::new();
        self.records.borrow_mut().retain(|_, record| {
            let is_flying = record.flight.is_some();
            let Some(origin) = &record.origin else {
                return is_flying || now < record.recheck.max(record.asked + MEMORY);
            };
            let left = left(record.counter);
            let rests = left == record.left && now > record.asked + IDLE;
            record.left = left;
            if all || (rests && !is_flying) {
                let Some(tokens) = withdraw(record.counter, origin) else { return true };
                if tokens > 0 {
                    returned.push((origin.clone(), tokens));
                }
                record.slice /= 2;
                record.origin = None;
            }
            true
        });
        returned
    }

    /// Tokens that lie in the table, as far as this loop has fetched for their counters.
    pub fn outstanding(&self, left: impl Fn(Counter) -> u32) -> u64 {
        self.records
            .borrow()
            .values()
            .filter(|record| record.origin.is_some())
            .map(|record| u64::from(left(record.counter)))
            .sum()
    }
}
