//! Models of requests on several counters: all of them, or none.

use std::sync::Arc;

use transom_limiter::acquire::AcquireResult;
use transom_limiter::table::{Counter, Table};

use crate::support::{counter, explore, hit, pay, race, request, used};

fn narrow() -> Counter {
    counter(1)
}

fn wide() -> Counter {
    counter(2)
}

/// A table in which both counters have their slot, from a window before.
fn seated() -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    pay(&table, narrow(), 1, 40, 30);
    pay(&table, wide(), 1, 40, 30);
    table
}

fn admitted(verdicts: &[AcquireResult]) -> u64 {
    verdicts.iter().filter(|&&verdict| verdict == AcquireResult::Admitted).count() as u64
}

/// A refusal that is seen at the first look touches nothing: whoever asks for the other counter's
/// last token at that moment gets it.
#[test]
fn the_refused_leave_no_mark() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        pay(&table, wide(), 1, 1000, 50);
        let verdicts = race(
            &table,
            [
                |t| request(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50),
                |t| request(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50),
                |t| request(t, &[(narrow(), 1, 100)], 50),
            ],
        );
        assert_eq!(verdicts, [AcquireResult::Refused, AcquireResult::Refused, AcquireResult::Admitted]);
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((1, 100), (1, 1000)));
    });
}

/// A key that is refused because of another counter does not even take a slot.
#[test]
fn the_refused_leave_no_mark_in_the_slots() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        pay(&table, wide(), 1, 1000, 50);
        let job: fn(&Table<1>) -> AcquireResult = |t| request(t, &[(narrow(), 1, 100), (wide(), 1, 1000)], 50);
        assert_eq!(race(&table, [job; 2]), [AcquireResult::Refused; 2]);
        assert_eq!((table.stats(50).live, table.overflow_charges_total(), table.horizon_ms()), (1, 0, 0));
    });
}

/// Two requests want the wide counter's last token; the loser gives back what it took of the other.
#[test]
fn all_or_nothing_over_two_counters() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> AcquireResult = |t| request(t, &[(narrow(), 2, 100), (wide(), 1, 1000)], 50);
        let verdicts = race(&table, [job; 2]);
        assert_eq!(admitted(&verdicts), 1, "{verdicts:?}");
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((1, 100), (1, 1000)));
        // A loser of the race has taken a slot for its key; the one who saw it coming has not charged at all.
        verdicts.map(|verdict| verdict == AcquireResult::Admitted)
    });
    assert_eq!(outcomes.len(), 2, "each of them wins once");
}

/// As above with three requests, and two of the three fit.
#[test]
fn all_or_nothing_over_two_counters_and_three_threads() {
    explore(2, || {
        let table = seated();
        let job: fn(&Table<1>) -> AcquireResult = |t| request(t, &[(narrow(), 3, 100), (wide(), 2, 1000)], 50);
        let verdicts = race(&table, [job; 3]);
        let n = admitted(&verdicts);
        assert_eq!(n, 2, "{verdicts:?}");
        assert_eq!((used(&table, narrow(), 100), used(&table, wide(), 1000)), ((n, 100), (n, 1000)));
    });
}

/// The loser's window of the narrow counter is over by the time that it gives back: the next
/// window has not been charged by it, and is not credited.
#[test]
fn a_refund_never_crosses_a_window() {
    explore(2, || {
        let table = seated();
        let [first, second, next] = race(
            &table,
            [
                |t| request(t, &[(narrow(), 5, 100), (wide(), 1, 1000)], 50) == AcquireResult::Admitted,
                |t| request(t, &[(wide(), 1, 1000)], 50) == AcquireResult::Admitted,
                |t| hit(t, narrow(), 5, 200, 100) == crate::support::Got::Paid(200),
            ],
        );
        assert!(next && first != second, "one token, one winner: {first} {second}");
        let (count, end_ms) = used(&table, narrow(), 200);
        assert!(end_ms == 200 && (count == 1 || first && count == 2), "{count} in {end_ms}");
    });
}
