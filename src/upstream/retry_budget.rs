//! Retry budget of an upstream: retries may be a share of the requests, plus a minimum per second.
//!
//! Without a budget, retries would multiply the load just when servers fail under it. Every request adds credit, which
//! expires after some seconds. A request costs one addition; the clock is read only for a retry.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Credit that one retry costs.
const RETRY_COST: u64 = 1000;
/// How long the credit of a request lasts.
const CREDIT_LIFETIME: Duration = Duration::from_secs(10);

/// Shorter intervals are left to the next update, so that they are not rounded to zero.
const UPDATE_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// The budget of one upstream in one worker.
pub struct RetryBudget {
    /// Credit that a request adds, in thousandths of a retry.
    credit_per_request: u64,
    /// Credit that a second adds.
    min_per_second: u64,
    /// Requests that are not yet in `credit`.
    uncredited_requests: Cell<u64>,
    credit: Cell<u64>,
    /// What is left of `min_per_second`: at most the credit of one second, or of one retry if that is more.
    minimum: Cell<u64>,
    updated_at: Cell<Option<Instant>>,
}

impl RetryBudget {
    /// Allows `percent` of the requests, and `minimum` retries a second, which are divided among `workers`.
    pub fn new(percent: u32, minimum: u32, workers: usize) -> RetryBudget {
        let per_second = u64::from(minimum) * RETRY_COST / workers.max(1) as u64;
        RetryBudget {
            credit_per_request: u64::from(percent) * RETRY_COST / 100,
            min_per_second: per_second,
            uncredited_requests: Cell::new(0),
            credit: Cell::new(0),
            minimum: Cell::new(RetryBudget::minimum_cap(per_second)),
            updated_at: Cell::new(None),
        }
    }

    fn minimum_cap(per_second: u64) -> u64 {
        if per_second == 0 { 0 } else { per_second.max(RETRY_COST) }
    }

    /// Counts a request.
    pub fn add_request(&self) {
        self.uncredited_requests.set(self.uncredited_requests.get() + 1);
    }

    /// Takes the credit of one retry, if there is enough.
    pub fn try_spend(&self, now: Instant) -> bool {
        let passed = self.updated_at.get().map_or(UPDATE_INTERVAL_MIN, |updated_at| now.duration_since(updated_at));
        let mut earned_over_ms = CREDIT_LIFETIME.as_millis() as u64;
        if passed >= UPDATE_INTERVAL_MIN {
            self.updated_at.set(Some(now));
            let (lifetime_ms, passed_ms) = (earned_over_ms, passed.as_millis() as u64);
            let minimum_credit = self.minimum.get() + self.min_per_second.saturating_mul(passed_ms) / 1000;
            self.minimum.set(minimum_credit.min(RetryBudget::minimum_cap(self.min_per_second)));
            // Old credit fades. Of requests over a longer time, only the share of the last seconds counts.
            self.credit.set(self.credit.get() * lifetime_ms.saturating_sub(passed_ms) / lifetime_ms);
            earned_over_ms = passed_ms.max(lifetime_ms);
        }
        let earned = self.uncredited_requests.take().saturating_mul(self.credit_per_request);
        self.credit.set(self.credit.get() + earned * (CREDIT_LIFETIME.as_millis() as u64) / earned_over_ms);
        for account in [&self.credit, &self.minimum] {
            if account.get() >= RETRY_COST {
                account.set(account.get() - RETRY_COST);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_runtime::clock::Clock;

    fn start() -> Instant {
        Clock::manual(0).instant()
    }

    /// How many retries are allowed, at most three after each of `requests` requests.
    fn retries_allowed(budget: &RetryBudget, requests: usize, now: Instant) -> usize {
        let retries = |_| {
            budget.add_request();
            (0..3).filter(|_| budget.try_spend(now)).count()
        };
        (0..requests).map(retries).sum()
    }

    #[test]
    fn retries_are_a_share_of_the_requests() {
        assert_eq!(retries_allowed(&RetryBudget::new(20, 0, 1), 1000, start()), 200);
        assert_eq!(retries_allowed(&RetryBudget::new(0, 0, 1), 1000, start()), 0);
        assert_eq!(retries_allowed(&RetryBudget::new(100, 0, 1), 1000, start()), 1000);
    }

    #[test]
    fn a_minimum_of_retries_is_allowed_every_second() {
        let (budget, start) = (RetryBudget::new(0, 10, 1), start());
        assert_eq!(retries_allowed(&budget, 100, start), 10);
        assert_eq!(retries_allowed(&budget, 100, start + Duration::from_millis(500)), 5);
        assert_eq!(retries_allowed(&budget, 100, start + Duration::from_secs(60)), 10);
        // The minimum is divided among workers; a share below one a second still allows a retry now and then.
        assert_eq!(retries_allowed(&RetryBudget::new(0, 10, 4), 100, start), 2);
        let rare = RetryBudget::new(0, 1, 4);
        assert_eq!(retries_allowed(&rare, 100, start), 1);
        assert_eq!(retries_allowed(&rare, 100, start + Duration::from_secs(3)), 0);
        assert_eq!(retries_allowed(&rare, 100, start + Duration::from_secs(5)), 1);
    }

    #[test]
    fn credit_expires_after_its_lifetime() {
        let (budget, start) = (RetryBudget::new(20, 0, 1), start());
        assert!(!budget.try_spend(start));
        (0..1000).for_each(|_| budget.add_request());
        // 100 s for 1000 requests: 100 of them count as in the last 10 s.
        let later = start + Duration::from_secs(100);
        assert_eq!((0..1000).filter(|_| budget.try_spend(later)).count(), 20);
        (0..1000).for_each(|_| budget.add_request());
        assert!(budget.try_spend(later));
        assert!(!budget.try_spend(later + Duration::from_secs(20)));
    }
}
