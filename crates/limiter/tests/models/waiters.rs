//! Models of requests that wait: each takes a place in a window to come, and may give it up.

use std::sync::Arc;

use transom_limiter::atomics::{AtomicU64, Ordering};
use transom_limiter::table::{Counter, Table};
use transom_limiter::waiter_limit::WaiterLimit;

use crate::support::{counter, explore, owed, place, race, rolling, take_and_return, took};

fn k() -> Counter {
    counter(1)
}

/// A table in which the key's one token of its first window is used.
fn full() -> Arc<Table<1>> {
    let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
    assert!(took(&table, k(), rolling(50, 1, 1), 50));
    table
}

/// One waits for the next window and gives up, one waits for it as well, and one comes when it opens.
#[test]
fn a_refunded_reservation_is_acquired_once() {
    let outcomes = explore(3, || {
        let table = full();
        let [_, waits, comes] = race(
            &table,
            [
                |t| {
                    take_and_return(t, k(), place(60, 1, 1), 60, 60);
                    false
                },
                |t| took(t, k(), place(60, 1, 1), 60),
                |t| took(t, k(), rolling(100, 1, 1), 100),
            ],
        );
        assert!(!(waits && comes), "the next window lets one pass");
        let last = took(&table, k(), rolling(100, 1, 1), 100);
        assert_eq!(u8::from(waits) + u8::from(comes) + u8::from(last), 1, "and whoever is alone does pass");
        (waits, comes, last)
    });
    assert_eq!(outcomes.len(), 3, "each of them wins: {outcomes:?}");
}

/// As above, and a second one waits for the window after: it stays there, whoever gives up before it.
#[test]
fn a_refunded_reservation_moves_no_other_waiter() {
    let outcomes = explore(3, || {
        let table = full();
        let [_, waits, comes] = race(
            &table,
            [
                |t| {
                    take_and_return(t, k(), place(60, 1, 1), 60, 60);
                    false
                },
                |t| took(t, k(), place(60, 1, 2), 60),
                |t| took(t, k(), rolling(100, 1, 1), 100),
            ],
        );
        assert!(waits, "nobody else asks for that window");
        let second = took(&table, k(), rolling(100, 1, 1), 100);
        assert!(!(comes && second), "the second window lets one pass");
        assert!(!took(&table, k(), rolling(200, 1, 1), 200), "and the third only who waits for it");
        comes || second
    });
    assert_eq!(outcomes.len(), 2, "a place that had to be left empty, or was taken again: {outcomes:?}");
}

/// Who waited gives up when the windows before his have passed.
#[test]
fn a_late_refund_of_a_reservation_never_crosses_a_window() {
    explore(3, || {
        let table = full();
        let [_, one, other] = race(
            &table,
            [
                |t| {
                    take_and_return(t, k(), place(60, 1, 2), 60, 199);
                    false
                },
                |t| took(t, k(), rolling(200, 1, 1), 200),
                |t| took(t, k(), rolling(200, 1, 1), 200),
            ],
        );
        let last = took(&table, k(), rolling(200, 1, 1), 200);
        assert_eq!(u8::from(one) + u8::from(other) + u8::from(last), 1, "{one} {other} {last}");
        assert_eq!(owed(&table, k(), rolling(200, 1, 1), 200), 1);
    });
}

/// A queue, and who is in it.
struct Hall {
    queue: Arc<WaiterLimit>,
    inside: AtomicU64,
}

/// Three want to wait where two may, and one of them leaves.
#[test]
fn waiters_never_exceed_their_limit() {
    let outcomes = explore(3, || {
        let worker = Arc::new(Hall { queue: WaiterLimit::new(2), inside: AtomicU64::new(0) });
        let job: fn(&Hall) -> bool = |worker| {
            let Some(place) = worker.queue.try_enter() else { return false };
            let before = worker.inside.fetch_add(1, Ordering::SeqCst);
            assert!(before < 2, "{before} were waiting already");
            worker.inside.fetch_sub(1, Ordering::SeqCst);
            drop(place);
            true
        };
        let entered = race(&worker, [job; 3]);
        assert_eq!(worker.queue.waiting(), 0);
        entered.iter().filter(|entered| **entered).count()
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [2, 3]);
}
