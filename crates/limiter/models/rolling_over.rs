//! Models of windows with rollover: each token is granted once, whichever clock is ahead.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{Outcome, acquire, acquire_then_refund, acquires, counter, explore, race, rolling, usage_of};

fn counter_a() -> Counter {
    counter(1)
}

/// A table in which `tokens` of the key's first window are used, with this limit per window and this capacity.
fn table_with_usage(tokens: u32, limit: u32, capacity: u64) -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    (0..tokens).for_each(|_| assert!(acquires(&table, counter_a(), rolling(50, limit, capacity), 50)));
    table
}

/// Limit 1, capacity 2, both used: the next window grants one token.
#[test]
fn never_admits_past_the_capacity_at_a_window_change() {
    explore(3, || {
        let table = table_with_usage(2, 1, 2);
        let [one, other, late] = race(
            &table,
            [
                |t| acquires(t, counter_a(), rolling(100, 1, 2), 100),
                |t| acquires(t, counter_a(), rolling(101, 1, 2), 101),
                |t| acquires(t, counter_a(), rolling(99, 1, 2), 99),
            ],
        );
        assert!(one != other && !late, "one of three requests gets the only token: {one} {other} {late}");
        assert_eq!(usage_of(&table, counter_a(), rolling(100, 1, 2), 101), 2);
    });
}

/// A request of the previous window arrives while others open the next: it is counted in its own window, or in both.
#[test]
fn no_debt_is_lost_at_rollover() {
    let outcomes = explore(3, || {
        let table = table_with_usage(1, 2, 5);
        let [one, other, late] = race(
            &table,
            [
                |t| acquires(t, counter_a(), rolling(100, 2, 5), 100),
                |t| acquires(t, counter_a(), rolling(101, 2, 5), 101),
                |t| acquires(t, counter_a(), rolling(99, 2, 5), 99),
            ],
        );
        assert!(one && other && late, "tokens are left for all of them");
        usage_of(&table, counter_a(), rolling(101, 2, 5), 101)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3], "counted in its own window, or in the next");
}

/// Tokens of two windows are owed when threads of three windows meet: each thread sees the debt less the grants of the
/// windows before its own.
#[test]
fn a_late_thread_never_rewinds_a_debt() {
    explore(3, || {
        let table = table_with_usage(3, 1, 3);
        let [first, second, third] = race(
            &table,
            [
                |t| acquires(t, counter_a(), rolling(99, 1, 3), 99),
                |t| acquires(t, counter_a(), rolling(199, 1, 3), 199),
                |t| acquires(t, counter_a(), rolling(200, 1, 3), 200),
            ],
        );
        assert!(!first && third, "{first} {second} {third}");
        // 3 tokens used, 2 windows passed: the third window grants at most one token.
        assert_eq!(usage_of(&table, counter_a(), rolling(200, 1, 3), 200), 2 + u64::from(second));
    });
}

/// A charge is refunded after other requests opened the next window: their charges stay. If other charges follow it,
/// nothing may be refunded.
#[test]
fn a_refund_never_crosses_a_window_that_rolled_over() {
    let outcomes = explore(3, || {
        let table = table_with_usage(1, 2, 5);
        race(
            &table,
            [
                |t| acquire_then_refund(t, counter_a(), rolling(99, 2, 5), 99, 99),
                |t| assert!(acquires(t, counter_a(), rolling(100, 2, 5), 100)),
                |t| assert!(acquires(t, counter_a(), rolling(100, 2, 5), 100)),
            ],
        );
        usage_of(&table, counter_a(), rolling(100, 2, 5), 100)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3]);
}

/// The slot is reused once the windows have granted all owed tokens, and not before.
#[test]
fn a_debt_keeps_its_slot_until_paid() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        (0..2).for_each(|_| assert!(acquires(&table, counter_a(), rolling(50, 1, 2), 50)));
        let [late, _] = race(
            &table,
            [
                |t| acquire(t, counter_a(), rolling(60, 1, 2), 60).0,
                |t| {
                    let first = acquire(t, counter(2), rolling(150, 1, 2), 150).0;
                    assert_eq!(
                        (first, t.overflow_charges_total()),
                        (Outcome::Acquired(200), 1),
                        "the indebted counter keeps its slot"
                    );
                    let second = acquire(t, counter(2), rolling(200, 1, 2), 200).0;
                    assert_eq!((second, t.overflow_charges_total()), (Outcome::Acquired(300), 1), "the debt is paid");
                    second
                },
            ],
        );
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Outcome::Full, Outcome::Late]);
}
