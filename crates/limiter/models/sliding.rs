//! Models of a sliding counter, with one segment per period: no interval of a period has more than the limit.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::{Time, Windows};
use transom_limiter::window_kind::{AcquireRequest, WindowKind};

use crate::support::{counter, counter_at, explore, race};

const PERIOD_MS: u64 = 100;
static WINDOWS: [Windows; 1] = [Windows::Sliding { period_ms: PERIOD_MS }];

fn acquires_key<const W: usize>(table: &Table<W>, counter: Counter, now_ms: u64, limit: u32) -> bool {
    receipts(table, counter, now_ms, limit).is_some()
}

/// The receipts of an admitted request.
fn receipts<const W: usize>(table: &Table<W>, counter: Counter, now_ms: u64, limit: u32) -> Option<Vec<ShardReceipt>> {
    let end_ms = (now_ms / PERIOD_MS + 1) * PERIOD_MS;
    let request = AcquireRequest { kind: WindowKind::Sliding, ..AcquireRequest::plain(end_ms, limit, 1) };
    let mut receipts = Vec::new();
    let result = acquire_all(table, &mut [Charge::new(counter, request)], &mut receipts, at(now_ms));
    (result == AcquireResult::Admitted).then_some(receipts)
}

fn at(now_ms: u64) -> Time<'static> {
    Time::new(now_ms, &WINDOWS)
}

fn acquires(table: &Table<2>, now_ms: u64, limit: u32) -> bool {
    acquires_key(table, counter(1), now_ms, limit)
}

/// A table in which one token was used at 1050.
fn table_with_usage() -> Arc<Table<2>> {
    let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
    assert!(acquires(&table, 1050, 1));
    table
}

#[test]
fn the_last_token_is_granted_once() {
    let outcomes = explore(2, || {
        let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
        let results = race(&table, [|t| acquires(t, 1050, 1), |t| acquires(t, 1050, 1)]);
        assert!(results[0] != results[1], "one token: {results:?}");
        results
    });
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}

/// Two threads charge different segments: both words change, and the sum decides.
#[test]
fn threads_in_adjacent_segments_share_the_limit() {
    let outcomes = explore(2, || {
        let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
        let results = race(&table, [|t| acquires(t, 1090, 1), |t| acquires(t, 1110, 1)]);
        assert!(results[0] != results[1], "20 ms are between the requests: {results:?}");
        results
    });
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}

/// The token of 1050 counts for the thread of 1149. The thread of 1250 uses its counter again.
#[test]
fn a_late_thread_counts_in_the_latest_segment() {
    let outcomes = explore(2, || {
        let table = table_with_usage();
        race(&table, [|t| acquires(t, 1149, 1), |t| acquires(t, 1250, 1)])
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [[false, true]]);
}

/// The end of the counter that a request of 1149 is charged in.
fn end_of_late_charge(table: &Table<2>) -> Option<u64> {
    receipts(table, counter(1), 1149, 2).map(|receipts| receipts[0].receipt.end_ms())
}

/// The counter of the token of 1050 is used again for 1250, and that token is refunded. One of two tokens is left for
/// the segment of 1149.
#[test]
fn a_late_thread_does_not_forget_a_reused_segment() {
    let outcomes = explore(2, || {
        let table = table_with_usage();
        let use_again = |table: &Table<2>| {
            let end_ms = end_of_late_charge(table);
            for charge in receipts(table, counter(1), 1250, 2).into_iter().flatten() {
                table.refund(charge.receipt, charge.request, at(1250));
            }
            end_ms
        };
        race(&table, [use_again, end_of_late_charge])
    });
    assert!(!outcomes.contains(&[Some(1300), Some(1300)]), "{outcomes:?}");
    assert!(outcomes.contains(&[Some(1300), None]) && outcomes.contains(&[None, Some(1300)]), "{outcomes:?}");
}

/// Each thread has a token left. The late one is charged in the segment of the other, or before it.
#[test]
fn a_late_thread_shares_the_limit_of_the_latest_segment() {
    explore(2, || {
        let table = table_with_usage();
        let results = race(&table, [|t| acquires(t, 1190, 2), |t| acquires(t, 1210, 2)]);
        assert_eq!(results, [true, true]);
        assert!(!acquires(&table, 1211, 2), "two tokens are younger than a period");
    });
}

/// Keys without a slot share the overflow counters of the segments.
#[test]
fn keys_without_a_slot_share_the_limit() {
    explore(2, || {
        let table = Arc::new(Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert!(acquires_key(&table, counter_at(9, 0), 1050, 1), "this key takes the slot");
        let results = race(
            &table,
            [|t| acquires_key(t, counter_at(1, 0), 1050, 1), |t| acquires_key(t, counter_at(1, 0), 1090, 1)],
        );
        assert!(!(results[0] && results[1]), "{results:?}");
    });
}
