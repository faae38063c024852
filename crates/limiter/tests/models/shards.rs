//! Models of a counter that is split: the shards lend to one another, and together keep to the limit.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::AcquireRequest;
use transom_limiter::sharded_counter::Sharding;
use transom_limiter::table::Table;

use crate::support::{counter, explore, race, time};

/// A request of so many tokens by the loop of one shard, out of `limit`.
fn request(table: &Table<2>, own: u32, limit: u32, cost: u32) -> bool {
    let mut charge = Charge::new(counter(1), AcquireRequest::plain(100, limit, cost));
    charge.sharding = Sharding { shards: 2, first_shard: own };
    acquire_all(table, &mut [charge], &mut Vec::new(), time(50)) == AcquireResult::Admitted
}

/// What is used of both shards together.
fn used(table: &Table<2>, limit: u32) -> u64 {
    Sharding { shards: 2, first_shard: 0 }
        .peek(table, counter(1), AcquireRequest::plain(100, limit, 0), time(50))
        .0
        .used
}

/// A table in which so many tokens of the limit are used.
fn split(tokens: u32, limit: u32) -> Arc<Table<2>> {
    let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
    (0..tokens).for_each(|i| assert!(request(&table, i % 2, limit, 1)));
    table
}

#[test]
fn shards_grant_exactly_the_limit() {
    let outcomes = explore(3, || {
        let table = split(2, 3);
        let got = race(&table, [|t| request(t, 0, 3, 1), |t| request(t, 1, 3, 1)]);
        assert!(got[0] != got[1], "one token is left: {got:?}");
        assert_eq!(used(&table, 3), 3);
        got
    });
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}

#[test]
fn three_threads_find_the_last_two_tokens_in_two_shards() {
    explore(2, || {
        let table = split(2, 4);
        let got = race(&table, [|t| request(t, 0, 4, 1), |t| request(t, 1, 4, 1), |t| request(t, 0, 4, 1)]);
        assert_eq!(got.iter().filter(|admitted| **admitted).count(), 2, "{got:?}");
        assert_eq!(used(&table, 4), 4);
    });
}

/// Each needs both shards' tokens: one has them, or neither, and then all of them come back.
#[test]
fn shards_grant_all_of_a_cost_or_nothing() {
    let outcomes = explore(3, || {
        let table = split(2, 4);
        let got = race(&table, [|t| request(t, 0, 4, 2), |t| request(t, 1, 4, 2)]);
        let admitted = got.iter().filter(|admitted| **admitted).count() as u64;
        assert!(admitted <= 1, "{got:?}");
        assert_eq!(used(&table, 4), 2 + 2 * admitted);
        admitted
    });
    assert!(outcomes.contains(&1), "{outcomes:?}");
}

/// A token that one gives back is not lost to who asks next.
#[test]
fn tokens_refunded_to_a_shard_can_be_acquired_again() {
    explore(3, || {
        let table = split(3, 4);
        let got = race(&table, [|t| request(t, 0, 4, 2), |t| request(t, 1, 4, 1)]);
        assert!(!got[0], "one token is no two");
        assert_eq!(used(&table, 4), 3 + u64::from(got[1]));
        assert_eq!(request(&table, 0, 4, 1), !got[1]);
    });
}

/// Two are left in one shard and one in the other: who asks for two is not refused because the third takes one
/// of them from under him.
#[test]
fn a_lost_race_for_a_shard_acquires_the_rest() {
    explore(3, || {
        let table = Arc::new(Table::<2>::with_buckets(1, 1).expect("there is memory"));
        assert!(request(&table, 1, 4, 1));
        let got = race(&table, [|t| request(t, 0, 4, 2), |t| request(t, 0, 4, 1)]);
        assert_eq!((got, used(&table, 4)), ([true; 2], 4));
    });
}
