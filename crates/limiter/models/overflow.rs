//! Models of a full table: keys without a slot share an overflow counter until its window ends.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{
    Outcome, acquire_one, acquire_one_with_receipt, acquired_in, counter, counter_at, explore, race, refund_one, used,
};

/// `counter_a` and `same_group` share an overflow counter; `other_group` has another one.
fn counter_a() -> Counter {
    counter(1)
}

fn same_group() -> Counter {
    counter(65)
}

fn other_group() -> Counter {
    counter(2)
}

/// A bucket hash whose two buckets are the last two of three.
const FAR: u64 = u64::MAX - 1;

/// A key that only occupies a slot.
fn occupant(tag: u64) -> Counter {
    counter(tag)
}

#[test]
fn a_full_table_answers_as_documented() {
    explore(1, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, occupant(9), 1, 100, 50), Outcome::Acquired(100));
        let results = race(
            &table,
            [
                |t| acquire_one(t, counter_a(), 2, 100, 50),
                |t| acquire_one(t, same_group(), 2, 100, 50),
                |t| acquire_one(t, counter_a(), 2, 100, 50),
            ],
        );
        // Both keys are counted together, up to the limit of one of them.
        assert_eq!(acquired_in(&results, 100), 2, "{results:?}");
        assert_eq!((used(&table, counter_a(), 100), used(&table, same_group(), 100)), ((2, 100), (2, 100)));
        assert_eq!((table.overflow_charges_total(), table.stats(50).live), (2, 1));
        // Where no overflow counter is free either, a key is refused.
        assert_eq!(acquire_one(&table, other_group(), 2, 100, 50), Outcome::Full);
        assert_eq!(used(&table, occupant(9), 100), (1, 100));
    });
}

/// The table is full for one thread. For the other, whose clock is ahead, a slot has just become free. The key is
/// charged once, in its own counter or in the overflow counter.
#[test]
fn an_overflowed_key_gets_no_counter() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, occupant(9), 1, 60, 50), Outcome::Acquired(60));
        let results =
            race(&table, [|t| acquire_one(t, counter_a(), 1, 100, 55), |t| acquire_one(t, counter_a(), 1, 100, 65)]);
        assert!(acquired_in(&results, 100) <= 1, "{results:?}");
        (results, table.overflow_charges_total())
    });
    assert!(
        outcomes.iter().any(|(results, overflow_charges)| acquired_in(results, 100) == 1 && *overflow_charges == 1),
        "{outcomes:?}"
    );
    assert!(
        outcomes.iter().any(|(results, overflow_charges)| acquired_in(results, 100) == 1 && *overflow_charges == 0),
        "{outcomes:?}"
    );
}

/// As above. The thread that charged the overflow counter then requests again at a time at which the slot is free: its
/// second claim of the slot must not be confirmed in place of the one that it removed.
#[test]
fn a_removed_claim_is_not_confirmed() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, occupant(9), 1, 60, 50), Outcome::Acquired(60));
        let results = race(
            &table,
            [
                |t| vec![acquire_one(t, counter_a(), 1, 100, 55), acquire_one(t, counter_a(), 1, 100, 65)],
                |t| vec![acquire_one(t, counter_a(), 1, 100, 65)],
            ],
        )
        .concat();
        assert!(acquired_in(&results, 100) <= 1, "{results:?}");
    });
}

/// The clock of the third thread is past the window in which the key is charged to the overflow counter.
#[test]
fn an_overflowed_key_is_counted_once_in_every_window() {
    explore(1, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, occupant(9), 1, 60, 50), Outcome::Acquired(60));
        let results = race(
            &table,
            [
                |t| acquire_one(t, counter_a(), 1, 100, 55),
                |t| acquire_one(t, counter_a(), 1, 100, 65),
                |t| acquire_one(t, counter_a(), 1, 200, 110),
            ],
        );
        assert!(acquired_in(&results, 100) <= 1 && acquired_in(&results, 200) <= 1, "{results:?}");
        assert!(acquired_in(&results, 200) == 1, "one request for the second window: {results:?}");
    });
}

/// The slot of the overflow counter is reused for another group at the end of the window, so the key's usage in that
/// window is lost. A slow thread that sees a free slot must not open the window again.
#[test]
fn a_reused_overflow_counter_is_not_forgotten() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(3, 1).expect("there is memory"));
        // Three buckets of one slot: keys with bucket hash 0 use the first two, those with `FAR` the last two. So only
        // `counter_a` can use the slot that becomes free.
        for (occupant, end_ms) in [(occupant(9), 60), (occupant(10), 1000), (counter_at(11, FAR), 1000)] {
            assert_eq!(acquire_one(&table, occupant, 1, end_ms, 10), Outcome::Acquired(end_ms));
        }
        assert_eq!(
            (acquire_one(&table, counter_a(), 1, 100, 40), table.overflow_charges_total()),
            (Outcome::Acquired(100), 1)
        );
        let [late, other] = race(
            &table,
            [|t| acquire_one(t, counter_a(), 1, 100, 70), |t| acquire_one(t, counter_at(2, FAR), 1, 200, 150)],
        );
        assert_ne!(late, Outcome::Acquired(100), "the key has used its only token");
        (late, other)
    });
    assert!(outcomes.iter().any(|(late, _)| *late == Outcome::Late), "{outcomes:?}");
}

/// The overflow counter moves to the next window, and the charge there is refunded. It then shows no usage, but that
/// does not mean that the previous window was unused.
#[test]
fn an_overflow_counter_that_rolled_over_is_not_taken_for_unused() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(3, 1).expect("there is memory"));
        // As above: only `counter_a` can use the slot that becomes free.
        for (occupant, end_ms) in [(occupant(9), 60), (occupant(10), 1000), (counter_at(11, FAR), 1000)] {
            assert_eq!(acquire_one(&table, occupant, 1, end_ms, 10), Outcome::Acquired(end_ms));
        }
        assert_eq!(acquire_one(&table, counter_a(), 1, 100, 40), Outcome::Acquired(100));
        let [late, _] = race(
            &table,
            [
                |t| acquire_one(t, counter_a(), 1, 100, 70),
                |t| {
                    let (results, receipt) = acquire_one_with_receipt(t, counter_at(65, FAR), 1, 200, 100);
                    refund_one(t, receipt);
                    results
                },
            ],
        );
        assert_ne!(late, Outcome::Acquired(100), "the key has used its only token");
        late
    });
    assert!(outcomes.len() > 1, "{outcomes:?}");
}
