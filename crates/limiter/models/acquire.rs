//! Models of requests that charge several counters: all of them, or none.

use std::sync::Arc;

use transom_limiter::acquire::AcquireResult;
use transom_limiter::table::{Counter, Table};

use crate::support::{acquire_from_all, acquire_one, acquire_one_with_receipt, counter, explore, race, used};

fn narrow() -> Counter {
    counter(1)
}

fn wide() -> Counter {
    counter(2)
}

/// A table in which both counters have their slot, from an earlier window.
fn table_with_both_counters() -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    acquire_one_with_receipt(&table, narrow(), 1, 40, 30);
    acquire_one_with_receipt(&table, wide(), 1, 40, 30);
    table
}

fn admitted(results: &[AcquireResult]) -> u64 {
    results.iter().filter(|&&result| result == AcquireResult::Admitted).count() as u64
}

/// The first peek finds a full counter, so nothing is charged: a concurrent request still gets the last token of the
/// other counter.
#[test]
fn the_refused_leave_no_mark() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        acquire_one_with_receipt(&table, wide(), 1, 1000, 50);
        let results = race(
            &table,
            [
                |t| acquire_from_all(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50),
                |t| acquire_from_all(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50),
                |t| acquire_from_all(t, &[(narrow(), 1, 100)], 50),
            ],
        );
        assert_eq!(results, [AcquireResult::Refused, AcquireResult::Refused, AcquireResult::Admitted]);
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((1, 100), (1, 1000)));
    });
}

/// A key that is refused because of another counter does not take a slot.
#[test]
fn the_refused_leave_no_mark_in_the_slots() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        acquire_one_with_receipt(&table, wide(), 1, 1000, 50);
        let job: fn(&Table<1>) -> AcquireResult = |t| acquire_from_all(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50);
        assert_eq!(race(&table, [job; 2]), [AcquireResult::Refused; 2]);
        assert_eq!((table.stats(50).live, table.overflow_charges_total(), table.horizon_ms()), (1, 0, 0));
    });
}

/// Two requests compete for the wide counter's last token. The loser refunds what it took from the narrow counter.
#[test]
fn all_or_nothing_over_two_counters() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> AcquireResult = |t| acquire_from_all(t, &[(narrow(), 2, 100), (wide(), 1, 1000)], 50);
        let results = race(&table, [job; 2]);
        assert_eq!(admitted(&results), 1, "{results:?}");
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((1, 100), (1, 1000)));
        // A request that loses the race has inserted its key; a request that is refused by its first peek has changed
        // nothing.
        results.map(|result| result == AcquireResult::Admitted)
    });
    assert_eq!(outcomes.len(), 2, "either request may win");
}

/// As above with three requests, two of which fit.
#[test]
fn all_or_nothing_over_two_counters_and_three_threads() {
    explore(2, || {
        let table = table_with_both_counters();
        let job: fn(&Table<1>) -> AcquireResult = |t| acquire_from_all(t, &[(narrow(), 3, 100), (wide(), 2, 1000)], 50);
        let results = race(&table, [job; 3]);
        let n = admitted(&results);
        assert_eq!(n, 2, "{results:?}");
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((n, 100), (n, 1000)));
    });
}

/// The window of the narrow counter ends before the loser refunds its charge. The refund does not reduce the usage of
/// the next window.
#[test]
fn a_refund_never_crosses_a_window() {
    explore(2, || {
        let table = table_with_both_counters();
        let [first, second, next] = race(
            &table,
            [
                |t| acquire_from_all(t, &[(narrow(), 5, 100), (wide(), 1, 1000)], 50) == AcquireResult::Admitted,
                |t| acquire_from_all(t, &[(wide(), 1, 1000)], 50) == AcquireResult::Admitted,
                |t| acquire_one(t, narrow(), 5, 200, 100) == crate::support::Outcome::Acquired(200),
            ],
        );
        assert!(next && first != second, "one of the two gets the only token: {first} {second}");
        let (count, end_ms) = used(&table, narrow(), 200);
        assert!(
            end_ms == 200 && (count == 1 || first && count == 2),
            "{count} tokens used in the window ending at {end_ms}"
        );
    });
}
