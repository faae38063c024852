//! Models of windows that the first request of a key opens: one window at a time, in the key's own counter or in an
//! overflow counter.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{
    Outcome, acquire, acquire_one, acquire_then_refund, acquires, counter, explore, floating, race, usage_of,
};

fn counter_a() -> Counter {
    counter(1)
}

#[test]
fn concurrent_first_requests_open_one_window() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let results = race(
            &table,
            [|t| acquire(t, counter_a(), floating(50, 1), 50).0, |t| acquire(t, counter_a(), floating(60, 1), 60).0],
        );
        assert_eq!(results.iter().filter(|one| matches!(one, Outcome::Acquired(_))).count(), 1, "{results:?}");
        let end_ms = if results[0] == Outcome::Acquired(150) { 150 } else { 160 };
        assert!(!acquires(&table, counter_a(), floating(end_ms - 1, 1), end_ms - 1), "the window is open for 100 ms");
        assert_eq!(acquire(&table, counter_a(), floating(end_ms, 1), end_ms).0, Outcome::Acquired(end_ms + 100));
        results
    });
    assert_eq!(outcomes.len(), 2, "either request may open the window: {outcomes:?}");
}

#[test]
fn three_concurrent_first_requests_share_one_window() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> Outcome = |t| acquire(t, counter_a(), floating(50, 2), 50).0;
        let results = race(&table, [job; 3]);
        assert_eq!(results.iter().filter(|one| **one == Outcome::Acquired(150)).count(), 2, "{results:?}");
    });
}

/// The slot is reused for another key at the end of the window, while a slow thread still charges it. The slow thread
/// does not find the key unused.
#[test]
fn a_reused_slot_is_not_opened_for_its_ended_window() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert!(acquires(&table, counter_a(), floating(50, 1), 50));
        let [late, other] = race(
            &table,
            [|t| acquire(t, counter_a(), floating(149, 1), 149).0, |t| acquire(t, counter(2), floating(150, 1), 150).0],
        );
        assert!(!matches!(late, Outcome::Acquired(_)), "{late:?}");
        assert_eq!(other, Outcome::Acquired(250));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Outcome::Full, Outcome::Late]);
}

/// After all its tokens were refunded, a window is opened again by exactly one of the next requests.
#[test]
fn a_refunded_window_is_opened_again_once() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert!(acquires(&table, counter_a(), floating(10, 1), 10));
        let [_, one, other] = race(
            &table,
            [
                |t| {
                    acquire_then_refund(t, counter_a(), floating(150, 1), 150, 151);
                    false
                },
                |t| acquires(t, counter_a(), floating(160, 1), 160),
                |t| acquires(t, counter_a(), floating(160, 1), 160),
            ],
        );
        let last = acquires(&table, counter_a(), floating(160, 1), 160);
        assert_eq!(u8::from(one) + u8::from(other) + u8::from(last), 1, "{one} {other} {last}");
        assert_eq!(usage_of(&table, counter_a(), floating(160, 1), 160), 1);
    });
}

/// The table is full for the first thread, while the second one finds a slot that has just become free.
#[test]
fn an_overflowed_first_request_key_keeps_its_overflow_counter() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter(9), 1, 60, 50), Outcome::Acquired(60));
        let results = race(
            &table,
            [
                |t| match acquire(t, counter_a(), floating(55, 1), 55).0 {
                    Outcome::Late => acquires(t, counter_a(), floating(t.horizon_ms(), 1), t.horizon_ms()),
                    results => results != Outcome::Full,
                },
                |t| acquires(t, counter_a(), floating(65, 1), 65),
            ],
        );
        assert!(!(results[0] && results[1]), "two windows of one key would overlap");
        assert!(results[0] || results[1]);
        assert!(!acquires(&table, counter_a(), floating(154, 1), 154));
        assert!(
            acquires(&table, counter_a(), floating(165, 1), 165),
            "the next window is counted in the key's own counter"
        );
        (results, table.overflow_charges_total())
    });
    assert!(outcomes.contains(&([true, false], 1)), "{outcomes:?}");
    assert!(outcomes.contains(&([false, true], 0)), "{outcomes:?}");
}
