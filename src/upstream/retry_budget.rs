//! How often may be tried again: a share of the requests, and a few in any case.
//!
//! Without it, tries would multiply just when servers fail under their load. Every request adds its
//! share, which is worth something for some seconds; a request costs no more than one count, and time
//! is looked at only when something is to be tried again.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What one further try costs.
const TRY: u64 = 1000;
/// How long a request's share is worth something.
const LASTS: Duration = Duration::from_secs(10);

/// Time that is less than this is left for the next look, lest it be rounded away.
const STEP: Duration = Duration::from_millis(100);

/// Of one upstream, in one event loop.
pub struct Budget {
    /// What a request adds, in thousandths of a try.
    share: u64,
    /// What a second adds.
    per_second: u64,
    /// Requests that are not yet in `credit`.
    requests: Cell<u64>,
    credit: Cell<u64>,
    /// What is left of `per_second`; a second's worth at most, but always room for one try.
    floor: Cell<u64>,
    looked: Cell<Option<Instant>>,
}

impl Budget {
    /// `percent` of the requests, and `minimum` tries a second beside it, which are divided between
    /// so many event loops.
    pub fn new(percent: u32, minimum: u32, loops: usize) -> Budget {
        let per_second = u64::from(minimum) * TRY / loops.max(1) as u64;
        Budget {
            share: u64::from(percent) * TRY / 100,
            per_second,
            requests: Cell::new(0),
            credit: Cell::new(0),
            floor: Cell::new(Budget::room(per_second)),
            looked: Cell::new(None),
        }
    }

    fn room(per_second: u64) -> u64 {
        if per_second == 0 { 0 } else { per_second.max(TRY) }
    }

    /// A request came.
    pub fn earn(&self) {
        self.requests.set(self.requests.get() + 1);
    }

    /// Whether something may be tried again now; if so, that is paid for.
    pub fn spend(&self, now: Instant) -> bool {
        let passed = self.looked.get().map_or(STEP, |looked| now.duration_since(looked));
        let mut lived_ms = LASTS.as_millis() as u64;
        if passed >= STEP {
            self.looked.set(Some(now));
            let (lasts_ms, passed_ms) = (lived_ms, passed.as_millis() as u64);
            let floor = self.floor.get() + self.per_second.saturating_mul(passed_ms) / 1000;
            self.floor.set(floor.min(Budget::room(self.per_second)));
            // Old credit fades; of requests that came during a longer time, the last ones count.
            self.credit.set(self.credit.get() * lasts_ms.saturating_sub(passed_ms) / lasts_ms);
            lived_ms = passed_ms.max(lasts_ms);
        }
        let earned = self.requests.take().saturating_mul(self.share);
        self.credit.set(self.credit.get() + earned * (LASTS.as_millis() as u64) / lived_ms);
        for purse in [&self.credit, &self.floor] {
            if purse.get() >= TRY {
                purse.set(purse.get() - TRY);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    fn start() -> Instant {
        Clock::manual(0).instant()
    }

    /// Tries again as often as it may after each of so many requests.
    fn tries(budget: &Budget, requests: usize, now: Instant) -> usize {
        let tries = |_| {
            budget.earn();
            (0..3).filter(|_| budget.spend(now)).count()
        };
        (0..requests).map(tries).sum()
    }

    #[test]
    fn tries_are_a_share_of_the_requests() {
        assert_eq!(tries(&Budget::new(20, 0, 1), 1000, start()), 200);
        assert_eq!(tries(&Budget::new(0, 0, 1), 1000, start()), 0);
        assert_eq!(tries(&Budget::new(100, 0, 1), 1000, start()), 1000);
    }

    #[test]
    fn a_few_are_allowed_every_second() {
        let (budget, start) = (Budget::new(0, 10, 1), start());
        assert_eq!(tries(&budget, 100, start), 10);
        assert_eq!(tries(&budget, 100, start + Duration::from_millis(500)), 5);
        assert_eq!(tries(&budget, 100, start + Duration::from_secs(60)), 10);
        // Divided between loops; where that is less than one a second, one is allowed now and then.
        assert_eq!(tries(&Budget::new(0, 10, 4), 100, start), 2);
        let rare = Budget::new(0, 1, 4);
        assert_eq!(tries(&rare, 100, start), 1);
        assert_eq!(tries(&rare, 100, start + Duration::from_secs(3)), 0);
        assert_eq!(tries(&rare, 100, start + Duration::from_secs(5)), 1);
    }

    #[test]
    fn shares_of_long_ago_are_worth_nothing() {
        let (budget, start) = (Budget::new(20, 0, 1), start());
        assert!(!budget.spend(start));
        (0..1000).for_each(|_| budget.earn());
        // In a hundred seconds, so a hundred of them came in the last ten.
        let later = start + Duration::from_secs(100);
        assert_eq!((0..1000).filter(|_| budget.spend(later)).count(), 20);
        (0..1000).for_each(|_| budget.earn());
        assert!(budget.spend(later));
        assert!(!budget.spend(later + Duration::from_secs(20)));
    }
}
