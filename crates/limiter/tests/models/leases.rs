//! Models of leases: leased tokens are spent once, or withdrawn once, in their window and in no other.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::AcquireRequest;
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::table::{Counter, Receipt, Table};

use crate::support::{Got, counter, explore, hit, paid_in, race, take, time, used};

fn k() -> Counter {
    counter(1)
}

fn l() -> Counter {
    counter(2)
}

/// One token out of the purse.
fn leased(end_ms: u64) -> AcquireRequest {
    AcquireRequest::plain(end_ms, 9, 1).leased()
}

/// Spends one token of the purse of `counter`, in the window of 100 ms that is open.
fn spend<const W: usize>(table: &Table<W>, counter: Counter, now_ms: u64) -> (Got, Option<Receipt>) {
    take(table, counter.lease(), leased((now_ms / 100 + 1) * 100), now_ms)
}

fn unspend<const W: usize>(table: &Table<W>, paid: Option<Receipt>, now_ms: u64) {
    if let Some(paid) = paid {
        table.refund(paid, leased(100), time(now_ms));
    }
}

/// One request on the purses of both keys, and on an ordinary counter.
fn request<const W: usize>(table: &Table<W>) -> AcquireResult {
    let plain = Charge::new(counter(3), AcquireRequest::plain(100, 9, 1));
    let mut charges = [Charge::new(k().lease(), leased(100)), Charge::new(l().lease(), leased(100)), plain];
    acquire_all(table, &mut charges, &mut Vec::new(), time(50))
}

/// A table with tokens in the purse of `k`, of the window that ends at 100.
fn with_purse<const W: usize>(buckets: usize, tokens: u32) -> Arc<Table<W>> {
    let table = Table::with_buckets(buckets, 1).expect("there is memory");
    assert_eq!(table.deposit(k(), 100, tokens, 50), DepositResult::Stored);
    Arc::new(table)
}

#[test]
fn no_more_is_spent_than_was_deposited() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(2, 1);
        let got = race(
            &table,
            [
                |t| spend(t, k(), 60).0,
                |t| {
                    assert_eq!(t.deposit(k(), 100, 1, 60), DepositResult::Stored);
                    Got::Full
                },
                |t| spend(t, k(), 60).0,
            ],
        );
        assert_eq!(paid_in(&got, 100) as u32 + table.leased_tokens(k(), 60), 2, "{got:?}");
        paid_in(&got, 100)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1, 2]);
}

/// Several loops fetch for a key that has no purse yet: it has one afterwards, with all of it in it.
#[test]
fn no_deposit_is_lost() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        let job: fn(&Table<1>) -> DepositResult = |t| t.deposit(k(), 100, 2, 50);
        assert_eq!(race(&table, [job; 3]), [DepositResult::Stored; 3]);
        assert_eq!((table.leased_tokens(k(), 50), table.stats(50).live), (6, 1));
    });
}

/// Who loses a race for one of two purses leaves the other as it was, and the ordinary counter, too.
#[test]
fn no_more_is_spent_than_was_deposited_in_two_leases() {
    let outcomes = explore(1, || {
        let table = with_purse::<2>(2, 2);
        assert_eq!(table.deposit(l(), 100, 2, 50), DepositResult::Stored);
        let got = race(
            &table,
            [
                |t| u32::from(request(t) == AcquireResult::Admitted),
                |t| u32::from(request(t) == AcquireResult::Admitted),
                |t| t.withdraw(l(), 100, 1),
            ],
        );
        let [first, second, withdrawn] = got;
        let admitted = first + second;
        assert_eq!(
            (table.leased_tokens(k(), 50), table.leased_tokens(l(), 50)),
            (2 - admitted, 2 - admitted - withdrawn)
        );
        assert_eq!(used(&table, counter(3), 100), (admitted.into(), 100));
        got
    });
    assert!(outcomes.contains(&[1, 1, 0]) && outcomes.contains(&[1, 0, 1]) && outcomes.contains(&[0, 1, 1]));
}

#[test]
fn no_more_is_spent_than_was_deposited_at_rollover() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(2, 1);
        let got = race(
            &table,
            [
                |t| spend(t, k(), 99).0,
                |t| match t.deposit(k(), 200, 1, 100) {
                    DepositResult::Stored => spend(t, k(), 101).0,
                    DepositResult::Full | DepositResult::Expired => unreachable!("there is room for it"),
                },
                |t| spend(t, k(), 99).0,
            ],
        );
        assert!(paid_in(&got, 100) <= 1 && paid_in(&got, 200) <= 1, "{got:?}");
        assert_eq!(paid_in(&got, 200) as u32 + table.leased_tokens(k(), 101), 1, "{got:?}");
        // What is left is worth nothing afterwards, however it is looked at.
        assert_eq!(table.deposit(k(), 200, 1, 150), DepositResult::Stored);
        let (look, _) = table.peek(k().lease(), leased(300), time(200));
        assert_eq!((look.used, spend(&table, k(), 200).0, table.leased_tokens(k(), 200)), (9, Got::Full, 0));
        got
    });
    assert!(outcomes.iter().any(|got| paid_in(got, 100) == 1 && paid_in(got, 200) == 1));
    assert!(outcomes.iter().any(|got| got[1] == Got::Full && paid_in(got, 200) == 1), "a late one was faster");
}

/// What comes too late for its window is not kept, wherever the purse stands by then.
#[test]
fn a_late_deposit_is_ignored() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(1, 1);
        let [late, next] = race(&table, [|t| t.deposit(k(), 100, 1, 99), |t| t.deposit(k(), 200, 1, 100)]);
        assert_eq!((next, table.leased_tokens(k(), 100)), (DepositResult::Stored, 1));
        assert_eq!(table.deposit(k(), 100, 1, 99), DepositResult::Expired);
        assert_eq!(table.deposit(k(), 200, 1, 200), DepositResult::Expired);
        late == DepositResult::Stored
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [false, true]);
}

#[test]
fn what_is_withdrawn_cannot_be_spent() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(2, 2);
        let got = race(
            &table,
            [
                |t| t.withdraw(k(), 100, 2),
                |t| u32::from(spend(t, k(), 60).1.is_some()),
                |t| u32::from(spend(t, k(), 60).1.is_some()),
            ],
        );
        assert_eq!((got.iter().sum::<u32>(), table.leased_tokens(k(), 60)), (2, 0), "{got:?}");
        got[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
}

/// Who withdraws what is left of a window takes nothing of the next.
#[test]
fn a_withdrawal_takes_tokens_of_its_window_only() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(2, 1);
        let got = race(
            &table,
            [
                |t| t.withdraw(k(), 100, 5),
                |t| {
                    assert_eq!(t.deposit(k(), 200, 3, 100), DepositResult::Stored);
                    0
                },
                |t| t.withdraw(k(), 100, 5),
            ],
        );
        assert_eq!(table.leased_tokens(k(), 100), 3, "{got:?}");
        got.iter().sum::<u32>()
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_refund_never_reaches_a_later_lease() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(2, 1);
        let got = race(
            &table,
            [
                |t| {
                    let (got, paid) = spend(t, k(), 99);
                    unspend(t, paid, 101);
                    got
                },
                |t| {
                    assert_eq!(t.deposit(k(), 200, 1, 100), DepositResult::Stored);
                    Got::Full
                },
            ],
        );
        assert_eq!((table.leased_tokens(k(), 101), table.withdraw(k(), 200, 9)), (1, 1));
        got[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Got::Paid(100), Got::Paid(200)]);
}

/// The slot itself goes to another key between a charge and its refund, and to a tally.
#[test]
fn a_refund_never_reaches_another_counter() {
    let outcomes = explore(3, || {
        let table = with_purse::<1>(1, 1);
        let (_, paid) = spend(&table, k(), 99);
        assert!(paid.is_some());
        let shared = Arc::new((table, paid));
        let [_, other] = race(
            &shared,
            [
                |(t, paid)| {
                    unspend(t, *paid, 101);
                    Got::Full
                },
                |(t, _)| {
                    t.set_known_usage(k(), 200, 7, 101);
                    hit(t, l(), 9, 300, 201)
                },
            ],
        );
        let (table, _) = &*shared;
        assert_eq!((other, used(table, l(), 300), table.leased_tokens(k(), 101)), (Got::Paid(300), (1, 300), 0));
        other
    });
    assert_eq!(outcomes.len(), 1);
}

/// A slot becomes free for one thread while the table is still full for another.
#[test]
fn a_full_table_keeps_no_lease() {
    let outcomes = explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert_eq!(hit(&table, counter(9), 1, 60, 50), Got::Paid(60));
        let got = race(
            &table,
            [
                |t| {
                    let kept = t.deposit(k(), 100, 1, 55);
                    assert!(kept != DepositResult::Expired);
                    (u32::from(kept == DepositResult::Stored), 0)
                },
                |t| {
                    let kept = t.deposit(k(), 100, 1, 65);
                    assert_eq!(kept, DepositResult::Stored);
                    (1, 0)
                },
                |t| (0, u32::from(spend(t, k(), 66).1.is_some())),
            ],
        );
        let (kept, spent) = got.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(kept, spent + table.leased_tokens(k(), 66));
        assert_eq!(
            (table.overflow_charges_total(), table.overflow_refused_total(), table.watermarks().overflow_end_ms),
            (0, 0, 0)
        );
        (kept, spent)
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [(1, 0), (1, 1), (2, 0), (2, 1)]);
}

/// A charge finds no purse and makes none: not in a slot that is free, nor in a spill counter that others of its
/// group have opened, nor in the ordinary counter of its key.
#[test]
fn a_missing_lease_is_not_spent() {
    explore(3, || {
        let table = Arc::new(Table::<1>::with_buckets(2, 1).expect("there is memory"));
        assert_eq!(hit(&table, counter(9), 1, 1000, 50), Got::Paid(1000));
        let got = race(
            &table,
            [
                |t| {
                    let (got, paid) = (hit(t, k(), 5, 100, 50), hit(t, counter(65), 5, 100, 50));
                    assert_eq!((got, paid), (Got::Paid(100), Got::Paid(100)));
                    got
                },
                |t| spend(t, k(), 60).0,
                |t| spend(t, k(), 60).0,
            ],
        );
        assert_eq!(got, [Got::Paid(100), Got::Full, Got::Full]);
        let (look, seen) = table.peek(k().lease(), leased(100), time(60));
        assert_eq!((look.used, look.end_ms, seen.is_none()), (9, 100, true));
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
                |t| t.set_known_usage(k(), 100, 4, 60),
                |t| t.set_known_usage(k(), 200, 1, 100),
                |t| {
                    // None, while its slot changes hands at the window's end.
                    let told = [t.known_usage(k(), 70), t.known_usage(k(), 70)];
                    assert!(told.iter().flatten().is_sorted_by_key(|told| told.0), "{told:?}");
                    assert!(told.iter().flatten().all(|told| [(100, 0), (100, 4), (200, 0), (200, 1)].contains(told)));
                },
            ],
        );
        assert_eq!((table.known_usage(k(), 100), table.known_usage(k(), 200)), (Some((200, 1)), None));
    });
}
