//! Models of one table: charges and refunds of single counters.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

use crate::support::{
    Outcome, acquire_one, acquire_one_with_receipt, acquired_in, counter, counter_at, explore, race, refund_one, used,
};

fn counter_a() -> Counter {
    counter(1)
}

fn counter_b() -> Counter {
    counter(2)
}

#[test]
fn never_admits_past_the_limit() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> Outcome = |t| acquire_one(t, counter_a(), 2, 100, 50);
        let results = race(&table, [job; 3]);
        assert_eq!(acquired_in(&results, 100), 2, "{results:?}");
        assert_eq!(used(&table, counter_a(), 100), (2, 100));
    });
}

/// At the end of the window the only slot is reused for another key, while slow threads still charge that window. The
/// limit holds all the same.
#[test]
fn never_admits_past_the_limit_when_the_table_is_full() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter_a(), 1, 100, 50), Outcome::Acquired(100));
        let [late, other] =
            race(&table, [|t| acquire_one(t, counter_a(), 1, 100, 60), |t| acquire_one(t, counter_b(), 1, 200, 150)]);
        assert_ne!(late, Outcome::Acquired(100));
        assert_eq!(other, Outcome::Acquired(200));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Outcome::Full, Outcome::Late]);
}

#[test]
fn no_hit_is_lost_at_rollover() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter_a(), 2, 100, 50), Outcome::Acquired(100));
        let results = race(
            &table,
            [
                |t| acquire_one(t, counter_a(), 2, 200, 100),
                |t| acquire_one(t, counter_a(), 2, 200, 101),
                |t| acquire_one(t, counter_a(), 2, 100, 99),
            ],
        );
        let last = acquired_in(&results, 200);
        assert_eq!(last, 2, "two requests for the new window: {results:?}");
        assert_eq!(used(&table, counter_a(), 200), (2, 200), "{results:?}");
        assert!(acquired_in(&results, 100) <= 1, "{results:?}");
        results
    });
    assert!(
        outcomes.iter().any(|results| acquired_in(results, 100) == 1),
        "the late request may be counted in the old window"
    );
    assert!(
        outcomes.iter().any(|results| results[2] == Outcome::Acquired(200)),
        "the late request may be counted in the new window"
    );
}

#[test]
fn a_late_thread_never_rewinds() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter_a(), 1, 50, 49), Outcome::Acquired(50));
        let results = race(
            &table,
            [
                |t| vec![acquire_one(t, counter_a(), 1, 100, 99), acquire_one(t, counter_a(), 1, 100, 99)],
                |t| vec![acquire_one(t, counter_a(), 1, 200, 100), acquire_one(t, counter_a(), 1, 200, 100)],
                |t| {
                    let first = used(t, counter_a(), 1);
                    let second = used(t, counter_a(), 1);
                    assert!(first.1 <= second.1, "{first:?} was followed by {second:?}");
                    Vec::new()
                },
            ],
        )
        .concat();
        assert_eq!((used(&table, counter_a(), 100), acquired_in(&results, 200)), ((1, 200), 1), "{results:?}");
        assert!(acquired_in(&results, 100) <= 1, "{results:?}");
        results
    });
    assert!(
        outcomes.iter().any(|results| acquired_in(results, 100) == 0)
            && outcomes.iter().any(|results| acquired_in(results, 100) == 1)
    );
}

#[test]
fn a_refund_never_crosses_a_window() {
    let outcomes = explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let results = race(
            &table,
            [
                |t| {
                    let (results, receipt) = acquire_one_with_receipt(t, counter_a(), 3, 100, 99);
                    // If the window ended before the thread inserted its counter, there is no receipt and nothing is
                    // refunded.
                    refund_one(t, receipt);
                    results
                },
                |t| acquire_one(t, counter_a(), 3, 200, 100),
                |t| acquire_one(t, counter_a(), 3, 200, 100),
            ],
        );
        assert_eq!(used(&table, counter_a(), 100), (2, 200), "{results:?}");
        results[0]
    });
    assert_eq!(
        outcomes.into_iter().collect::<Vec<_>>(),
        [Outcome::Acquired(100), Outcome::Acquired(200), Outcome::Late]
    );
}

/// Between the charge and its refund, the slot is reused for another key.
#[test]
fn a_refund_never_crosses_into_another_key() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        let [_, other] = race(
            &table,
            [
                |t| {
                    let (results, receipt) = acquire_one_with_receipt(t, counter_a(), 1, 100, 99);
                    refund_one(t, receipt);
                    results
                },
                |t| acquire_one(t, counter_b(), 1, 200, 100),
            ],
        );
        assert_eq!((other, used(&table, counter_b(), 200)), (Outcome::Acquired(200), (1, 200)));
    });
}

#[test]
fn two_keys_never_share_a_count() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let far: fn() -> Counter = || counter_at(3, u64::MAX);
        let results = race(
            &table,
            [|t| acquire_one(t, counter_a(), 1, 100, 50), |t| acquire_one(t, counter_at(3, u64::MAX), 1, 100, 50)],
        );
        assert_eq!(results, [Outcome::Acquired(100); 2]);
        assert_eq!((used(&table, counter_a(), 100), used(&table, far(), 100)), ((1, 100), (1, 100)));
    });
}

/// A thread with a hint from an earlier peek finds another key in the slot, and does not change it.
#[test]
fn two_keys_never_share_a_count_when_one_reuses_the_slot_of_the_other() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter_a(), 2, 100, 50), Outcome::Acquired(100));
        let [late, other] = race(
            &table,
            [
                |t| {
                    let (request, time) = (AcquireRequest::plain(100, 2, 1), Time::plain(60));
                    let (_, hint) = t.peek(counter_a(), request, time);
                    format!("{:?}", t.acquire(counter_a(), request, time, hint))
                        .split('(')
                        .next()
                        .expect("a variant name")
                        .to_owned()
                },
                |t| format!("{:?}", acquire_one(t, counter_b(), 1, 200, 150)),
            ],
        );
        assert_eq!((other.as_str(), used(&table, counter_b(), 200)), ("Acquired(200)", (1, 200)));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), ["Acquired", "Late"]);
}
