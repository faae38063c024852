//! Models of windows with rollover: tokens are granted once, whichever clock is ahead.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{Got, counter, explore, owed, race, rolling, take, take_and_return, took};

fn k() -> Counter {
    counter(1)
}

/// A table in which so much of the key's first window is used, out of so much in each, and so much at most.
fn used(tokens: u32, limit: u32, capacity: u64) -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    (0..tokens).for_each(|_| assert!(took(&table, k(), rolling(50, limit, capacity), 50)));
    table
}

/// One in each window, and two at most: both were used, and the next window grants one.
#[test]
fn never_admits_past_the_capacity_at_a_window_change() {
    explore(3, || {
        let table = used(2, 1, 2);
        let [one, other, late] = race(
            &table,
            [
                |t| took(t, k(), rolling(100, 1, 2), 100),
                |t| took(t, k(), rolling(101, 1, 2), 101),
                |t| took(t, k(), rolling(99, 1, 2), 99),
            ],
        );
        assert!(one != other && !late, "one token for three: {one} {other} {late}");
        assert_eq!(owed(&table, k(), rolling(100, 1, 2), 101), 2);
    });
}

/// A request of the window before comes while others open the next: it counts in the one or in both.
#[test]
fn no_debt_is_lost_at_rollover() {
    let outcomes = explore(3, || {
        let table = used(1, 2, 5);
        let [one, other, late] = race(
            &table,
            [
                |t| took(t, k(), rolling(100, 2, 5), 100),
                |t| took(t, k(), rolling(101, 2, 5), 101),
                |t| took(t, k(), rolling(99, 2, 5), 99),
            ],
        );
        assert!(one && other && late, "there is room for all of them");
        owed(&table, k(), rolling(101, 2, 5), 101)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3], "in its own window, or too late for it");
}

/// Two windows are owed when threads of three windows meet: each sees the debt less what its own
/// window and those before have paid.
#[test]
fn a_late_thread_never_rewinds_a_debt() {
    explore(3, || {
        let table = used(3, 1, 3);
        let [first, second, third] = race(
            &table,
            [
                |t| took(t, k(), rolling(99, 1, 3), 99),
                |t| took(t, k(), rolling(199, 1, 3), 199),
                |t| took(t, k(), rolling(200, 1, 3), 200),
            ],
        );
        assert!(!first && third, "{first} {second} {third}");
        // 3 used, 2 windows passed: the third window grants a token that is left or not, but never one too many.
        assert_eq!(owed(&table, k(), rolling(200, 1, 3), 200), 2 + u64::from(second));
    });
}

/// A charge is given back when others have opened the next window: what they took there stays taken.
/// Between places of others it may be too late to give back at all.
#[test]
fn a_refund_never_crosses_a_window_that_rolled_over() {
    let outcomes = explore(3, || {
        let table = used(1, 2, 5);
        race(
            &table,
            [
                |t| take_and_return(t, k(), rolling(99, 2, 5), 99, 99),
                |t| assert!(took(t, k(), rolling(100, 2, 5), 100)),
                |t| assert!(took(t, k(), rolling(100, 2, 5), 100)),
            ],
        );
        owed(&table, k(), rolling(100, 2, 5), 100)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3]);
}

/// The slot of a key goes to another when all windows that were owed are paid, and not before.
#[test]
fn a_debt_keeps_its_slot_until_paid() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        (0..2).for_each(|_| assert!(took(&table, k(), rolling(50, 1, 2), 50)));
        let [late, _] = race(
            &table,
            [
                |t| take(t, k(), rolling(60, 1, 2), 60).0,
                |t| {
                    let first = take(t, counter(2), rolling(150, 1, 2), 150).0;
                    assert_eq!((first, t.overflow_charges_total()), (Got::Paid(200), 1), "the debt has the slot");
                    let second = take(t, counter(2), rolling(200, 1, 2), 200).0;
                    assert_eq!((second, t.overflow_charges_total()), (Got::Paid(300), 1), "the debt is paid");
                    second
                },
            ],
        );
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Got::Full, Got::Late]);
}
