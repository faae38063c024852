//! Models of one table: what charges and refunds of single counters promise.

use std::sync::Arc;

use transom_limiter::counter::AcquireRequest;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;

use crate::support::{Got, counter, counter_at, explore, hit, paid_in, pay, race, unpay, used};

fn k() -> Counter {
    counter(1)
}

fn l() -> Counter {
    counter(2)
}

#[test]
fn never_admits_past_the_limit() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> Got = |t| hit(t, k(), 2, 100, 50);
        let got = race(&table, [job; 3]);
        assert_eq!(paid_in(&got, 100), 2, "{got:?}");
        assert_eq!(used(&table, k(), 100), (2, 100));
    });
}

/// The slot of the key changes hands at the window's end while slow threads still ask for that
/// window: with a neighbour in its place, with nowhere else to go, the limit holds all the same.
#[test]
fn never_admits_past_the_limit_when_the_table_is_full() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, k(), 1, 100, 50), Got::Paid(100));
        let [late, other] = race(&table, [|t| hit(t, k(), 1, 100, 60), |t| hit(t, l(), 1, 200, 150)]);
        assert_ne!(late, Got::Paid(100));
        assert_eq!(other, Got::Paid(200));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Got::Full, Got::Late]);
}

#[test]
fn no_hit_is_lost_at_rollover() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(hit(&table, k(), 2, 100, 50), Got::Paid(100));
        let got =
            race(&table, [|t| hit(t, k(), 2, 200, 100), |t| hit(t, k(), 2, 200, 101), |t| hit(t, k(), 2, 100, 99)]);
        let last = paid_in(&got, 200);
        assert_eq!(last, 2, "demand for the new window was there: {got:?}");
        assert_eq!(used(&table, k(), 200), (2, 200), "{got:?}");
        assert!(paid_in(&got, 100) <= 1, "{got:?}");
        got
    });
    assert!(outcomes.iter().any(|got| paid_in(got, 100) == 1), "one counted in the old window");
    assert!(outcomes.iter().any(|got| got[2] == Got::Paid(200)), "one came late");
}

#[test]
fn a_late_thread_never_rewinds() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(hit(&table, k(), 1, 50, 49), Got::Paid(50));
        let got = race(
            &table,
            [
                |t| vec![hit(t, k(), 1, 100, 99), hit(t, k(), 1, 100, 99)],
                |t| vec![hit(t, k(), 1, 200, 100), hit(t, k(), 1, 200, 100)],
                |t| {
                    let first = used(t, k(), 1);
                    let second = used(t, k(), 1);
                    assert!(first.1 <= second.1, "{first:?} was followed by {second:?}");
                    Vec::new()
                },
            ],
        )
        .concat();
        assert_eq!((used(&table, k(), 100), paid_in(&got, 200)), ((1, 200), 1), "{got:?}");
        assert!(paid_in(&got, 100) <= 1, "{got:?}");
        got
    });
    assert!(outcomes.iter().any(|got| paid_in(got, 100) == 0) && outcomes.iter().any(|got| paid_in(got, 100) == 1));
}

#[test]
fn a_refund_never_crosses_a_window() {
    let outcomes = explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let got = race(
            &table,
            [
                |t| {
                    let (got, paid) = pay(t, k(), 3, 100, 99);
                    // A thread whose window is over when it comes to make the counter has nothing to give back.
                    unpay(t, paid);
                    got
                },
                |t| hit(t, k(), 3, 200, 100),
                |t| hit(t, k(), 3, 200, 100),
            ],
        );
        assert_eq!(used(&table, k(), 100), (2, 200), "{got:?}");
        got[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Got::Paid(100), Got::Paid(200), Got::Late]);
}

/// The slot itself goes to another key between a charge and its refund.
#[test]
fn a_refund_never_crosses_into_another_key() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        let [_, other] = race(
            &table,
            [
                |t| {
                    let (got, paid) = pay(t, k(), 1, 100, 99);
                    unpay(t, paid);
                    got
                },
                |t| hit(t, l(), 1, 200, 100),
            ],
        );
        assert_eq!((other, used(&table, l(), 200)), (Got::Paid(200), (1, 200)));
    });
}

#[test]
fn two_keys_never_share_a_count() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let far: fn() -> Counter = || counter_at(3, u64::MAX);
        let got = race(&table, [|t| hit(t, k(), 1, 100, 50), |t| hit(t, counter_at(3, u64::MAX), 1, 100, 50)]);
        assert_eq!(got, [Got::Paid(100); 2]);
        assert_eq!((used(&table, k(), 100), used(&table, far(), 100)), ((1, 100), (1, 100)));
    });
}

/// A thread that remembers where its key lay finds another key there, and leaves it alone.
#[test]
fn two_keys_never_share_a_count_when_one_reuses_the_slot_of_the_other() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, k(), 2, 100, 50), Got::Paid(100));
        let [late, other] = race(
            &table,
            [
                |t| {
                    let (ask, time) = (AcquireRequest::plain(100, 2, 1), Time::plain(60));
                    let (_, hint) = t.peek(k(), ask, time);
                    format!("{:?}", t.acquire(k(), ask, time, hint)).split('(').next().expect("a name").to_owned()
                },
                |t| format!("{:?}", hit(t, l(), 1, 200, 150)),
            ],
        );
        assert_eq!((other.as_str(), used(&table, l(), 200)), ("Paid(200)", (1, 200)));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), ["Acquired", "Late"]);
}
