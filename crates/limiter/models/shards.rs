//! Models of a sharded counter: shards use each other's tokens, and together admit exactly the limit.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::sharded_counter::Sharding;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window_kind::AcquireRequest;

use crate::support::{acquires, counter, explore, race, rolling, time};

/// A request for `cost` of `limit` tokens by the worker of one shard.
fn acquire_sharded(table: &Table<2>, own_shard: u32, limit: u32, cost: u32) -> bool {
    let mut charge = Charge::new(counter(1), AcquireRequest::plain(100, limit, cost));
    charge.sharding = Sharding { shards: 2, first_shard: own_shard };
    acquire_all(table, &mut [charge], &mut Vec::new(), time(50)) == AcquireResult::Admitted
}

/// The usage of both shards.
fn sharded_usage(table: &Table<2>, limit: u32) -> u64 {
    Sharding { shards: 2, first_shard: 0 }
        .peek(table, counter(1), AcquireRequest::plain(100, limit, 0), time(50))
        .usage
        .used
}

/// A table in which `tokens` of the limit are used.
fn sharded_table(tokens: u32, limit: u32) -> Arc<Table<2>> {
    let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
    (0..tokens).for_each(|i| assert!(acquire_sharded(&table, i % 2, limit, 1)));
    table
}

#[test]
fn shards_grant_exactly_the_limit() {
    let outcomes = explore(3, || {
        let table = sharded_table(2, 3);
        let results = race(&table, [|t| acquire_sharded(t, 0, 3, 1), |t| acquire_sharded(t, 1, 3, 1)]);
        assert!(results[0] != results[1], "one token is left: {results:?}");
        assert_eq!(sharded_usage(&table, 3), 3);
        results
    });
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}

#[test]
fn three_threads_find_the_last_two_tokens_in_two_shards() {
    explore(2, || {
        let table = sharded_table(2, 4);
        let results = race(
            &table,
            [|t| acquire_sharded(t, 0, 4, 1), |t| acquire_sharded(t, 1, 4, 1), |t| acquire_sharded(t, 0, 4, 1)],
        );
        assert_eq!(results.iter().filter(|admitted| **admitted).count(), 2, "{results:?}");
        assert_eq!(sharded_usage(&table, 4), 4);
    });
}

/// Each request needs tokens of both shards: one of them gets all, or neither does and all tokens are refunded.
#[test]
fn shards_grant_all_of_a_cost_or_nothing() {
    let outcomes = explore(3, || {
        let table = sharded_table(2, 4);
        let results = race(&table, [|t| acquire_sharded(t, 0, 4, 2), |t| acquire_sharded(t, 1, 4, 2)]);
        let admitted = results.iter().filter(|admitted| **admitted).count() as u64;
        assert!(admitted <= 1, "{results:?}");
        assert_eq!(sharded_usage(&table, 4), 2 + 2 * admitted);
        admitted
    });
    assert!(outcomes.contains(&1), "{outcomes:?}");
}

/// A later request can take tokens that a refused request refunded.
#[test]
fn tokens_refunded_to_a_shard_can_be_acquired_again() {
    explore(3, || {
        let table = sharded_table(3, 4);
        let results = race(&table, [|t| acquire_sharded(t, 0, 4, 2), |t| acquire_sharded(t, 1, 4, 1)]);
        assert!(!results[0], "a request for two tokens does not fit in one");
        assert_eq!(sharded_usage(&table, 4), 3 + u64::from(results[1]));
        assert_eq!(acquire_sharded(&table, 0, 4, 1), !results[1]);
    });
}

/// Two tokens are left in one shard and one in the other. A request for two is admitted, although another request takes
/// one of the first shard's tokens meanwhile.
#[test]
fn a_lost_race_for_a_shard_acquires_the_rest() {
    explore(3, || {
        let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
        assert!(acquire_sharded(&table, 1, 4, 1));
        let results = race(&table, [|t| acquire_sharded(t, 0, 4, 2), |t| acquire_sharded(t, 0, 4, 1)]);
        assert_eq!((results, sharded_usage(&table, 4)), ([true; 2], 4));
    });
}

/// A request for `cost` tokens of two shards with two tokens a window and a capacity of three.
fn acquire_rolling(table: &Table<2>, own_shard: u32, cost: u32, now_ms: u64) -> bool {
    let mut charge = Charge::new(counter(1), AcquireRequest { cost, ..rolling(now_ms, 2, 3) });
    charge.sharding = Sharding { shards: 2, first_shard: own_shard };
    acquire_all(table, &mut [charge], &mut Vec::new(), time(now_ms)) == AcquireResult::Admitted
}

fn rolling_usage(table: &Table<2>, now_ms: u64) -> u64 {
    let request = AcquireRequest { cost: 0, ..rolling(now_ms, 2, 3) };
    Sharding { shards: 2, first_shard: 0 }.peek(table, counter(1), request, time(now_ms)).usage.used
}

/// A table in which all tokens of the window that ends at 100 ms are used.
fn used_up() -> Arc<Table<2>> {
    let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
    (0..3).for_each(|i| assert!(acquire_rolling(&table, i % 2, 1, 50)));
    assert!(!acquire_rolling(&table, 0, 1, 50));
    table
}

/// The tokens that shards gain in a window are granted once.
#[test]
fn shards_grant_the_tokens_of_a_new_window_once() {
    explore(3, || {
        let table = used_up();
        let results = race(&table, [|t| acquire_rolling(t, 0, 2, 150), |t| acquire_rolling(t, 1, 1, 150)]);
        assert!(!(results[0] && results[1]), "two tokens were gained: {results:?}");
        let acquired = 2 * u64::from(results[0]) + u64::from(results[1]);
        assert_eq!(rolling_usage(&table, 150), 1 + acquired);
    });
}

/// A thread whose clock is one window behind takes no tokens of the new window twice.
#[test]
fn shards_grant_nothing_twice_to_a_late_thread() {
    explore(3, || {
        let table = used_up();
        let results = race(&table, [|t| acquire_rolling(t, 0, 1, 50), |t| acquire_rolling(t, 0, 2, 150)]);
        let acquired = u64::from(results[0]) + 2 * u64::from(results[1]);
        assert!(acquired <= 2, "{results:?}");
    });
}

/// Neither a slot nor an overflow counter is free for the shards: a request is refused at once.
#[test]
fn shards_without_a_slot_are_full() {
    explore(1, || {
        let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
        for tag in [64, 128, 192, 256] {
            assert!(acquires(&table, Counter { layer: tag, ..counter(tag) }, AcquireRequest::plain(1000, 1, 1), 50));
        }
        let results = race(&table, [|t| acquire_sharded(t, 0, 4, 2), |t| acquire_sharded(t, 1, 4, 2)]);
        assert_eq!(results, [false, false]);
    });
}
