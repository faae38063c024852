//! Models of leases: each leased token is spent once or withdrawn once, in its own window only.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::table::{Counter, Receipt, Table};
use transom_limiter::window_kind::AcquireRequest;

use crate::support::{Outcome, acquire, acquire_one, acquired_in, counter, explore, race, time, used};

fn counter_a() -> Counter {
    counter(1)
}

fn counter_b() -> Counter {
    counter(2)
}

/// A request for one leased token.
fn leased(end_ms: u64) -> AcquireRequest {
    AcquireRequest::plain(end_ms, 9, 1).leased()
}

/// Spends one token of the lease of `counter`, in the current window of 100 ms.
fn spend<const W: usize>(table: &Table<W>, counter: Counter, now_ms: u64) -> (Outcome, Option<Receipt>) {
    acquire(table, counter.lease(), leased((now_ms / 100 + 1) * 100), now_ms)
}

fn refund_lease<const W: usize>(table: &Table<W>, receipt: Option<Receipt>, now_ms: u64) {
    if let Some(receipt) = receipt {
        table.refund(receipt, leased(100), time(now_ms));
    }
}

/// One request that charges the leases of both keys and one ordinary counter.
fn acquire_two_leases<const W: usize>(table: &Table<W>) -> AcquireResult {
    let plain = Charge::new(counter(3), AcquireRequest::plain(100, 9, 1));
    let mut charges =
        [Charge::new(counter_a().lease(), leased(100)), Charge::new(counter_b().lease(), leased(100)), plain];
    acquire_all(table, &mut charges, &mut Vec::new(), time(50))
}

/// A table in which the lease of `counter_a` holds tokens of the window that ends at 100.
fn table_with_lease<const W: usize>(buckets: usize, tokens: u32) -> Arc<Table<W>> {
    let table = Table::with_buckets(buckets, 1).expect("there is memory");
    assert_eq!(table.deposit(counter_a(), 100, tokens, 50), DepositResult::Stored);
    Arc::new(table)
}

#[test]
fn no_more_is_spent_than_was_deposited() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(2, 1);
        let results = race(
            &table,
            [
                |t| spend(t, counter_a(), 60).0,
                |t| {
                    assert_eq!(t.deposit(counter_a(), 100, 1, 60), DepositResult::Stored);
                    Outcome::Full
                },
                |t| spend(t, counter_a(), 60).0,
            ],
        );
        assert_eq!(acquired_in(&results, 100) as u32 + table.leased_tokens(counter_a(), 60), 2, "{results:?}");
        acquired_in(&results, 100)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1, 2]);
}

/// Several workers deposit tokens for a key without a lease: afterwards one lease holds all of them.
#[test]
fn no_deposit_is_lost() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> DepositResult = |t| t.deposit(counter_a(), 100, 2, 50);
        assert_eq!(race(&table, [job; 3]), [DepositResult::Stored; 3]);
        assert_eq!((table.leased_tokens(counter_a(), 50), table.stats(50).live), (6, 1));
    });
}

/// A request that loses a race for one of two leases changes neither the other lease nor the ordinary counter.
#[test]
fn no_more_is_spent_than_was_deposited_in_two_leases() {
    let outcomes = explore(1, || {
        let table = table_with_lease::<2>(2, 2);
        assert_eq!(table.deposit(counter_b(), 100, 2, 50), DepositResult::Stored);
        let results = race(
            &table,
            [
                |t| u32::from(acquire_two_leases(t) == AcquireResult::Admitted),
                |t| u32::from(acquire_two_leases(t) == AcquireResult::Admitted),
                |t| t.withdraw(counter_b(), 100, 1),
            ],
        );
        let [first, second, withdrawn] = results;
        let admitted = first + second;
        assert_eq!(
            (table.leased_tokens(counter_a(), 50), table.leased_tokens(counter_b(), 50)),
            (2 - admitted, 2 - admitted - withdrawn)
        );
        assert_eq!(used(&table, counter(3), 100), (admitted.into(), 100));
        results
    });
    assert!(outcomes.contains(&[1, 1, 0]) && outcomes.contains(&[1, 0, 1]) && outcomes.contains(&[0, 1, 1]));
}

#[test]
fn no_more_is_spent_than_was_deposited_at_rollover() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(2, 1);
        let results = race(
            &table,
            [
                |t| spend(t, counter_a(), 99).0,
                |t| match t.deposit(counter_a(), 200, 1, 100) {
                    DepositResult::Stored => spend(t, counter_a(), 101).0,
                    DepositResult::Full | DepositResult::Expired => unreachable!("a slot is free"),
                },
                |t| spend(t, counter_a(), 99).0,
            ],
        );
        assert!(acquired_in(&results, 100) <= 1 && acquired_in(&results, 200) <= 1, "{results:?}");
        assert_eq!(acquired_in(&results, 200) as u32 + table.leased_tokens(counter_a(), 101), 1, "{results:?}");
        // After the end of the window, the remaining tokens can no longer be spent.
        assert_eq!(table.deposit(counter_a(), 200, 1, 150), DepositResult::Stored);
        let (usage, _) = table.peek(counter_a().lease(), leased(300), time(200));
        assert_eq!(
            (usage.used, spend(&table, counter_a(), 200).0, table.leased_tokens(counter_a(), 200)),
            (9, Outcome::Full, 0)
        );
        results
    });
    assert!(outcomes.iter().any(|results| acquired_in(results, 100) == 1 && acquired_in(results, 200) == 1));
    assert!(
        outcomes.iter().any(|results| results[1] == Outcome::Full && acquired_in(results, 200) == 1),
        "a late request may spend the token of the new window first"
    );
}

/// A deposit for a window that has ended is ignored, in whichever window the lease is.
#[test]
fn a_late_deposit_is_ignored() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(1, 1);
        let [late, next] =
            race(&table, [|t| t.deposit(counter_a(), 100, 1, 99), |t| t.deposit(counter_a(), 200, 1, 100)]);
        assert_eq!((next, table.leased_tokens(counter_a(), 100)), (DepositResult::Stored, 1));
        assert_eq!(table.deposit(counter_a(), 100, 1, 99), DepositResult::Expired);
        assert_eq!(table.deposit(counter_a(), 200, 1, 200), DepositResult::Expired);
        late == DepositResult::Stored
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [false, true]);
}

#[test]
fn what_is_withdrawn_cannot_be_spent() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(2, 2);
        let results = race(
            &table,
            [
                |t| t.withdraw(counter_a(), 100, 2),
                |t| u32::from(spend(t, counter_a(), 60).1.is_some()),
                |t| u32::from(spend(t, counter_a(), 60).1.is_some()),
            ],
        );
        assert_eq!((results.iter().sum::<u32>(), table.leased_tokens(counter_a(), 60)), (2, 0), "{results:?}");
        results[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
}

/// A withdrawal for one window takes no tokens of the next.
#[test]
fn a_withdrawal_takes_tokens_of_its_window_only() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(2, 1);
        let results = race(
            &table,
            [
                |t| t.withdraw(counter_a(), 100, 5),
                |t| {
                    assert_eq!(t.deposit(counter_a(), 200, 3, 100), DepositResult::Stored);
                    0
                },
                |t| t.withdraw(counter_a(), 100, 5),
            ],
        );
        assert_eq!(table.leased_tokens(counter_a(), 100), 3, "{results:?}");
        results.iter().sum::<u32>()
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_refund_never_reaches_a_later_lease() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(2, 1);
        let results = race(
            &table,
            [
                |t| {
                    let (results, receipt) = spend(t, counter_a(), 99);
                    refund_lease(t, receipt, 101);
                    results
                },
                |t| {
                    assert_eq!(t.deposit(counter_a(), 200, 1, 100), DepositResult::Stored);
                    Outcome::Full
                },
            ],
        );
        assert_eq!((table.leased_tokens(counter_a(), 101), table.withdraw(counter_a(), 200, 9)), (1, 1));
        results[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Outcome::Acquired(100), Outcome::Acquired(200)]);
}

/// Between the charge and its refund, the slot is reused for another key and for a known usage.
#[test]
fn a_refund_never_reaches_another_counter() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(1, 1);
        let (_, receipt) = spend(&table, counter_a(), 99);
        assert!(receipt.is_some());
        let shared = Arc::new((table, receipt));
        let [_, other] = race(
            &shared,
            [
                |(t, receipt)| {
                    refund_lease(t, *receipt, 101);
                    Outcome::Full
                },
                |(t, _)| {
                    t.set_known_usage(counter_a(), 200, 7, 101);
                    acquire_one(t, counter_b(), 9, 300, 201)
                },
            ],
        );
        let (table, _) = &*shared;
        assert_eq!(
            (other, used(table, counter_b(), 300), table.leased_tokens(counter_a(), 101)),
            (Outcome::Acquired(300), (1, 300), 0)
        );
        other
    });
    assert_eq!(outcomes.len(), 1);
}

/// A slot becomes free for one thread while the table is still full for another.
#[test]
fn a_full_table_keeps_no_lease() {
    let outcomes = explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter(9), 1, 60, 50), Outcome::Acquired(60));
        let results = race(
            &table,
            [
                |t| {
                    let result = t.deposit(counter_a(), 100, 1, 55);
                    assert!(result != DepositResult::Expired);
                    (u32::from(result == DepositResult::Stored), 0)
                },
                |t| {
                    let result = t.deposit(counter_a(), 100, 1, 65);
                    assert_eq!(result, DepositResult::Stored);
                    (1, 0)
                },
                |t| (0, u32::from(spend(t, counter_a(), 66).1.is_some())),
            ],
        );
        let (deposited, spent) = results.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(deposited, spent + table.leased_tokens(counter_a(), 66));
        assert_eq!(
            (table.overflow_charges_total(), table.overflow_refused_total(), table.watermarks().overflow_end_ms),
            (0, 0, 0)
        );
        (deposited, spent)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [(1, 0), (1, 1), (2, 0), (2, 1)]);
}

/// Without a lease nothing is spent, and none is created: not in a free slot, not in the overflow counter of the key's
/// group, not in the key's ordinary counter.
#[test]
fn a_missing_lease_is_not_spent() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(acquire_one(&table, counter(9), 1, 1000, 50), Outcome::Acquired(1000));
        let results = race(
            &table,
            [
                |t| {
                    let (results, receipt) =
                        (acquire_one(t, counter_a(), 5, 100, 50), acquire_one(t, counter(65), 5, 100, 50));
                    assert_eq!((results, receipt), (Outcome::Acquired(100), Outcome::Acquired(100)));
                    results
                },
                |t| spend(t, counter_a(), 60).0,
                |t| spend(t, counter_a(), 60).0,
            ],
        );
        assert_eq!(results, [Outcome::Acquired(100), Outcome::Full, Outcome::Full]);
        let (usage, seen) = table.peek(counter_a().lease(), leased(100), time(60));
        assert_eq!((usage.used, usage.end_ms, seen.is_none()), (9, 100, true));
        assert_eq!((table.stats(60).live, table.overflow_charges_total(), table.overflow_refused_total()), (2, 1, 0));
    });
}

#[test]
fn known_usage_is_of_the_latest_window() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        race(
            &table,
            [
                |t| t.set_known_usage(counter_a(), 100, 4, 60),
                |t| t.set_known_usage(counter_a(), 200, 1, 100),
                |t| {
                    // `None` while the slot is being reused at the end of the window.
                    let known = [t.known_usage(counter_a(), 70), t.known_usage(counter_a(), 70)];
                    assert!(known.iter().flatten().is_sorted_by_key(|known| known.0), "{known:?}");
                    assert!(
                        known.iter().flatten().all(|known| [(100, 0), (100, 4), (200, 0), (200, 1)].contains(known))
                    );
                },
            ],
        );
        assert_eq!((table.known_usage(counter_a(), 100), table.known_usage(counter_a(), 200)), (Some((200, 1)), None));
    });
}

/// The window of a lease has ended. Its slot is reused for another key while tokens of the next window are deposited.
#[test]
fn a_deposit_never_reaches_another_counter() {
    let outcomes = explore(3, || {
        let table = table_with_lease::<1>(1, 1);
        let [stored, other] = race(
            &table,
            [
                |t| t.deposit(counter_a(), 200, 3, 150) == DepositResult::Stored,
                |t| acquire_one(t, counter_b(), 9, 200, 150) == Outcome::Acquired(200),
            ],
        );
        assert!(other, "a key without a slot uses the overflow counter");
        assert_eq!(used(&table, counter_b(), 200), (1, 200));
        assert_eq!(table.leased_tokens(counter_a(), 150), if stored { 3 } else { 0 });
        stored
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [false, true]);
}

/// The usage of a sliding window counts on when another thread moves its end meanwhile.
#[test]
fn known_usage_of_a_sliding_window_counts_on() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        table.add_sliding_usage(counter_a(), 100, 1, 50);
        race(
            &table,
            [|t| t.add_sliding_usage(counter_a(), 100, 2, 60), |t| t.add_sliding_usage(counter_a(), 150, 4, 60)],
        );
        assert_eq!(table.known_usage(counter_a(), 60), Some((150, 7)));
    });
}
