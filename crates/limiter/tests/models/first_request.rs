//! Models of windows that a key's first request opens: there is one at a time, wherever it is counted.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{Got, counter, explore, floating, hit, owed, race, take, take_and_return, took};

fn k() -> Counter {
    counter(1)
}

#[test]
fn concurrent_first_requests_open_one_window() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let got = race(&table, [|t| take(t, k(), floating(50, 1), 50).0, |t| take(t, k(), floating(60, 1), 60).0]);
        assert_eq!(got.iter().filter(|one| matches!(one, Got::Paid(_))).count(), 1, "{got:?}");
        let end_ms = if got[0] == Got::Paid(150) { 150 } else { 160 };
        assert!(!took(&table, k(), floating(end_ms - 1, 1), end_ms - 1), "it is open for 100 ms");
        assert_eq!(take(&table, k(), floating(end_ms, 1), end_ms).0, Got::Paid(end_ms + 100));
        got
    });
    assert_eq!(outcomes.len(), 2, "either of them opens it: {outcomes:?}");
}

#[test]
fn three_concurrent_first_requests_share_one_window() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> Got = |t| take(t, k(), floating(50, 2), 50).0;
        let got = race(&table, [job; 3]);
        assert_eq!(got.iter().filter(|one| **one == Got::Paid(150)).count(), 2, "{got:?}");
    });
}

/// The slot goes to another key at the window's end while a slow thread still asks: it does not find
/// the key unused.
#[test]
fn a_reused_slot_is_not_opened_for_its_ended_window() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert!(took(&table, k(), floating(50, 1), 50));
        let [late, other] =
            race(&table, [|t| take(t, k(), floating(149, 1), 149).0, |t| take(t, counter(2), floating(150, 1), 150).0]);
        assert!(!matches!(late, Got::Paid(_)), "{late:?}");
        assert_eq!(other, Got::Paid(250));
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Got::Full, Got::Late]);
}

/// A window that was given back entirely is opened anew by whoever comes next, and by one only.
#[test]
fn a_refunded_window_is_opened_again_once() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert!(took(&table, k(), floating(10, 1), 10));
        let [_, one, other] = race(
            &table,
            [
                |t| {
                    take_and_return(t, k(), floating(150, 1), 150, 151);
                    false
                },
                |t| took(t, k(), floating(160, 1), 160),
                |t| took(t, k(), floating(160, 1), 160),
            ],
        );
        let last = took(&table, k(), floating(160, 1), 160);
        assert_eq!(u8::from(one) + u8::from(other) + u8::from(last), 1, "{one} {other} {last}");
        assert_eq!(owed(&table, k(), floating(160, 1), 160), 1);
    });
}

/// The table is full for the first, while the second sees a slot that has just become free.
#[test]
fn an_overflowed_first_request_key_keeps_its_overflow_counter() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, counter(9), 1, 60, 50), Got::Paid(60));
        let got = race(
            &table,
            [
                |t| match take(t, k(), floating(55, 1), 55).0 {
                    Got::Late => took(t, k(), floating(t.horizon_ms(), 1), t.horizon_ms()),
                    got => got != Got::Full,
                },
                |t| took(t, k(), floating(65, 1), 65),
            ],
        );
        assert!(!(got[0] && got[1]), "its windows overlap");
        assert!(got[0] || got[1]);
        assert!(!took(&table, k(), floating(154, 1), 154));
        assert!(took(&table, k(), floating(165, 1), 165), "its next window is its own again");
        (got, table.overflow_charges_total())
    });
    assert!(outcomes.contains(&([true, false], 1)), "{outcomes:?}");
    assert!(outcomes.contains(&([false, true], 0)), "{outcomes:?}");
}
