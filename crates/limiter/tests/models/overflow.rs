//! Models of a full table: keys that found no slot are counted together, and keep to that.

use std::sync::Arc;

use transom_limiter::table::{Counter, Table};

use crate::support::{Got, counter, counter_at, explore, hit, paid_in, pay, race, unpay, used};

/// The keys of these models. `k` and `m` share a spill counter; `l` has another one.
fn k() -> Counter {
    counter(1)
}

fn m() -> Counter {
    counter(65)
}

fn l() -> Counter {
    counter(2)
}

/// A place whose two buckets of three are the last two.
const FAR: u64 = u64::MAX - 1;

/// A key that sits in the table and is not asked about.
fn sitter(tag: u64) -> Counter {
    counter(tag)
}

#[test]
fn a_full_table_answers_as_documented() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, sitter(9), 1, 100, 50), Got::Paid(100));
        let got = race(&table, [|t| hit(t, k(), 2, 100, 50), |t| hit(t, m(), 2, 100, 50), |t| hit(t, k(), 2, 100, 50)]);
        // Both keys are counted together, to the limit of one of them and not a token further.
        assert_eq!(paid_in(&got, 100), 2, "{got:?}");
        assert_eq!((used(&table, k(), 100), used(&table, m(), 100)), ((2, 100), (2, 100)));
        assert_eq!((table.overflow_charges_total(), table.stats(50).live), (2, 1));
        // Where there is no spill counter to be had either, a key is refused.
        assert_eq!(hit(&table, l(), 2, 100, 50), Got::Full);
        assert_eq!(used(&table, sitter(9), 100), (1, 100));
    });
}

/// The table is full for one thread; for the other, whose clock is ahead, a slot has just become
/// free. Whichever way the key is counted, it is counted once.
#[test]
fn an_overflowed_key_gets_no_counter() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, sitter(9), 1, 60, 50), Got::Paid(60));
        let got = race(&table, [|t| hit(t, k(), 1, 100, 55), |t| hit(t, k(), 1, 100, 65)]);
        assert!(paid_in(&got, 100) <= 1, "{got:?}");
        (got, table.overflow_charges_total())
    });
    assert!(outcomes.iter().any(|(got, spilled)| paid_in(got, 100) == 1 && *spilled == 1), "{outcomes:?}");
    assert!(outcomes.iter().any(|(got, spilled)| paid_in(got, 100) == 1 && *spilled == 0), "{outcomes:?}");
}

/// As above, and the thread that spilled asks once more when it sees the free slot too: its second
/// claim looks just like the one that it removed, and must not be confirmed in its stead.
#[test]
fn a_removed_claim_is_not_confirmed() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, sitter(9), 1, 60, 50), Got::Paid(60));
        let got = race(
            &table,
            [|t| vec![hit(t, k(), 1, 100, 55), hit(t, k(), 1, 100, 65)], |t| vec![hit(t, k(), 1, 100, 65)]],
        )
        .concat();
        assert!(paid_in(&got, 100) <= 1, "{got:?}");
    });
}

/// The third thread finds its clock beyond the window in which the key is being spilled.
#[test]
fn an_overflowed_key_is_counted_once_in_every_window() {
    explore(1, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, sitter(9), 1, 60, 50), Got::Paid(60));
        let got =
            race(&table, [|t| hit(t, k(), 1, 100, 55), |t| hit(t, k(), 1, 100, 65), |t| hit(t, k(), 1, 200, 110)]);
        assert!(paid_in(&got, 100) <= 1 && paid_in(&got, 200) <= 1, "{got:?}");
        assert!(paid_in(&got, 200) == 1, "the demand for the second window was there: {got:?}");
    });
}

/// The spill counter's own slot goes to another group at the window's end, and with it what the
/// key had used in that window. A slow thread, which sees a free slot, must not open it again.
#[test]
fn a_reused_overflow_counter_is_not_forgotten() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(3, 1).expect("there is memory"));
        // Three buckets of one slot: the keys placed at 0 look into the first two, those at `FAR` into the
        // last two. So the slot that becomes free is one that only `k` can have.
        for (sitter, end_ms) in [(sitter(9), 60), (sitter(10), 1000), (counter_at(11, FAR), 1000)] {
            assert_eq!(hit(&table, sitter, 1, end_ms, 10), Got::Paid(end_ms));
        }
        assert_eq!((hit(&table, k(), 1, 100, 40), table.overflow_charges_total()), (Got::Paid(100), 1));
        let [late, other] = race(&table, [|t| hit(t, k(), 1, 100, 70), |t| hit(t, counter_at(2, FAR), 1, 200, 150)]);
        assert_ne!(late, Got::Paid(100), "the key had its one token");
        (late, other)
    });
    assert!(outcomes.iter().any(|(late, _)| *late == Got::Late), "{outcomes:?}");
}

/// The spill counter rolls on to the next window, and what was charged there is given back: it
/// stands at nothing used, and still says nothing about the window before.
#[test]
fn an_overflow_counter_that_rolled_over_is_not_taken_for_unused() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(3, 1).expect("there is memory"));
        // As above: the slot that becomes free is one that only `k` can have.
        for (sitter, end_ms) in [(sitter(9), 60), (sitter(10), 1000), (counter_at(11, FAR), 1000)] {
            assert_eq!(hit(&table, sitter, 1, end_ms, 10), Got::Paid(end_ms));
        }
        assert_eq!(hit(&table, k(), 1, 100, 40), Got::Paid(100));
        let [late, _] = race(
            &table,
            [
                |t| hit(t, k(), 1, 100, 70),
                |t| {
                    let (got, paid) = pay(t, counter_at(65, FAR), 1, 200, 100);
                    unpay(t, paid);
                    got
                },
            ],
        );
        assert_ne!(late, Got::Paid(100), "the key had its one token");
        late
    });
    assert!(outcomes.len() > 1, "{outcomes:?}");
}
