//! Models of delayed requests: each reserves tokens of a later window, and may cancel the reservation.

use std::sync::Arc;

use transom_limiter::atomics::{AtomicU64, Ordering};
use transom_limiter::table::{Counter, Table};
use transom_limiter::waiter_limit::WaiterLimit;

use crate::support::{acquire_then_refund, acquires, counter, explore, race, reservation, rolling, usage_of};

fn counter_a() -> Counter {
    counter(1)
}

/// A table in which the only token of the key's first window is used.
fn table_with_full_window() -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    assert!(acquires(&table, counter_a(), rolling(50, 1, 1), 50));
    table
}

/// Two requests reserve the next window, one of them cancels, and a third one arrives when that window opens.
#[test]
fn a_refunded_reservation_is_acquired_once() {
    let outcomes = explore(3, || {
        let table = table_with_full_window();
        let [_, reserved, arriving] = race(
            &table,
            [
                |t| {
                    acquire_then_refund(t, counter_a(), reservation(60, 1, 1), 60, 60);
                    false
                },
                |t| acquires(t, counter_a(), reservation(60, 1, 1), 60),
                |t| acquires(t, counter_a(), rolling(100, 1, 1), 100),
            ],
        );
        assert!(!(reserved && arriving), "the next window admits one request");
        let last = acquires(&table, counter_a(), rolling(100, 1, 1), 100);
        assert_eq!(u8::from(reserved) + u8::from(arriving) + u8::from(last), 1, "a single request is admitted");
        (reserved, arriving, last)
    });
    assert_eq!(outcomes.len(), 3, "each of them may be the one admitted: {outcomes:?}");
}

/// As above, and another request has reserved the window after: its reservation stays there, whichever one before it is
/// cancelled.
#[test]
fn a_refunded_reservation_moves_no_other_waiter() {
    let outcomes = explore(3, || {
        let table = table_with_full_window();
        let [_, reserved, arriving] = race(
            &table,
            [
                |t| {
                    acquire_then_refund(t, counter_a(), reservation(60, 1, 1), 60, 60);
                    false
                },
                |t| acquires(t, counter_a(), reservation(60, 1, 2), 60),
                |t| acquires(t, counter_a(), rolling(100, 1, 1), 100),
            ],
        );
        assert!(reserved, "no other request reserves that window");
        let second = acquires(&table, counter_a(), rolling(100, 1, 1), 100);
        assert!(!(arriving && second), "the second window admits one request");
        assert!(!acquires(&table, counter_a(), rolling(200, 1, 1), 200), "the third window is reserved");
        arriving || second
    });
    assert_eq!(outcomes.len(), 2, "the cancelled token is forfeited, or acquired again: {outcomes:?}");
}

/// A reservation is cancelled after the windows before it have passed.
#[test]
fn a_late_refund_of_a_reservation_never_crosses_a_window() {
    explore(3, || {
        let table = table_with_full_window();
        let [_, one, other] = race(
            &table,
            [
                |t| {
                    acquire_then_refund(t, counter_a(), reservation(60, 1, 2), 60, 199);
                    false
                },
                |t| acquires(t, counter_a(), rolling(200, 1, 1), 200),
                |t| acquires(t, counter_a(), rolling(200, 1, 1), 200),
            ],
        );
        let last = acquires(&table, counter_a(), rolling(200, 1, 1), 200);
        assert_eq!(u8::from(one) + u8::from(other) + u8::from(last), 1, "{one} {other} {last}");
        assert_eq!(usage_of(&table, counter_a(), rolling(200, 1, 1), 200), 1);
    });
}

/// A waiter limit, and the number of requests that hold a slot of it.
struct Waiters {
    limit: Arc<WaiterLimit>,
    inside: AtomicU64,
}

/// Three requests want to wait where two may, and one of them leaves.
#[test]
fn waiters_never_exceed_their_limit() {
    let outcomes = explore(3, || {
        let waiters = Arc::new(Waiters { limit: WaiterLimit::new(2), inside: AtomicU64::new(0) });
        let job: fn(&Waiters) -> bool = |waiters| {
            let Some(slot) = waiters.limit.try_enter() else { return false };
            let before = waiters.inside.fetch_add(1, Ordering::SeqCst);
            assert!(before < 2, "{before} were waiting already");
            waiters.inside.fetch_sub(1, Ordering::SeqCst);
            drop(slot);
            true
        };
        let entered = race(&waiters, [job; 3]);
        assert_eq!(waiters.limit.waiting(), 0);
        entered.iter().filter(|entered| **entered).count()
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3]);
}
