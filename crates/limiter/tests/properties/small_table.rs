//! Properties of a table with too few slots: never too lax, and too strict only as documented.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use transom_limiter::acquire::AcquireResult;
use transom_limiter::table::{CounterResult, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

use crate::oracle::{LayerRequest, Oracle};
use crate::support::{
    Action, Clocks, START_MS, acquire_request, actions, costs, counter, decide, layer_requests, limits,
};

/// Checks that the tokens admitted of each key and window never exceed the limit.
fn never_past_the_limit<const W: usize>(
    table: &Table<W>,
    actions: &[Action],
    limits: &[u32; 6],
) -> Result<(), TestCaseError> {
    let mut admitted: HashMap<(u64, u64), u64> = HashMap::new();
    let mut clocks = Clocks::new();
    for action in actions {
        let layer_requests = layer_requests(action, limits);
        let outcome = decide(table, &layer_requests, clocks.advance(action));
        if outcome.result == AcquireResult::Admitted && action.cost > 0 {
            for (layer_request, charge) in layer_requests.iter().zip(&outcome.charges) {
                let sum = admitted.entry((layer_request.id, charge.usage.end_ms)).or_default();
                *sum += u64::from(layer_request.cost);
                prop_assert!(*sum <= u64::from(layer_request.limit), "{} tokens of {:?}", sum, layer_request);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn never_admits_past_the_limit_in_one_slot(actions in actions(9, costs()), limits in limits()) {
        never_past_the_limit(&Table::<1>::with_buckets(1, 1).expect("there is memory"), &actions, &limits)?;
    }

    #[test]
    fn never_admits_past_the_limit_in_three_buckets(actions in actions(9, costs()), limits in limits()) {
        never_past_the_limit(&Table::<1>::with_buckets(3, 1).expect("there is memory"), &actions, &limits)?;
    }

    #[test]
    fn never_admits_past_the_limit_in_eight_slots(actions in actions(9, costs()), limits in limits()) {
        never_past_the_limit(&Table::<2>::with_buckets(4, 3).expect("there is memory"), &actions, &limits)?;
    }

    /// One clock that does not go back, one rule, one token per request: the table admits no more than the reference
    /// limiter.
    #[test]
    fn a_small_table_admits_no_more_than_the_reference_limiter(demand in prop::collection::vec((0..20u64, 0..4u64), 1..200)) {
        let (table, mut oracle, mut now_ms) = (Table::<2>::with_buckets(2, 1).expect("there is memory"), Oracle::default(), START_MS);
        let (mut admitted, mut expected) = (HashMap::<(u64, u64), u64>::new(), HashMap::<(u64, u64), u64>::new());
        for (id, passes_ms) in demand {
            now_ms += passes_ms;
            let layer_request = LayerRequest { id, window_ms: 50, limit: 3, cost: 1 };
            let at = (id, layer_request.end_ms(now_ms));
            *expected.entry(at).or_default() += u64::from(oracle.decide(&[layer_request], now_ms));
            let sum = admitted.entry(at).or_default();
            *sum += u64::from(decide(&table, &[layer_request], now_ms).result == AcquireResult::Admitted);
            prop_assert!(*sum <= expected[&at]);
        }
    }

    /// A key with a slot keeps exactly its own limit. Keys without one are counted together, per group of their layer,
    /// up to the same limit. If no overflow counter is free either, they are refused. A key that was counted in a group
    /// gets no counter of its own before that window has ended.
    #[test]
    fn a_full_table_answers_as_documented(
        demand in prop::collection::vec(0..40u64, 1..200), limit in 1..6u32, own in 1..4usize, overflow_buckets in 1..3usize,
    ) {
        let table = Table::<2>::with_buckets(own, overflow_buckets).expect("there is memory");
        let (mut counted, mut groups) = (HashMap::<u64, u32>::new(), HashMap::<u64, u32>::new());
        let (mut overflowed, mut groups_without_counter) = (HashSet::new(), HashSet::new());
        for id in demand {
            let (counter, request) = (counter(id), AcquireRequest::plain(100, limit, 1));
            let group = counter.key.tag % 64;
            let overflowed_before = table.overflow_charges_total();
            let outcome = table.acquire(counter, request, Time::plain(50), None);
            let own = table.peek(counter, request, Time::plain(50)).1.is_some();
            match outcome {
                CounterResult::Acquired(_, used) if own => {
                    prop_assert!(!overflowed.contains(&id) && table.overflow_charges_total() == overflowed_before);
                    let count = counted.entry(id).or_default();
                    *count += 1;
                    prop_assert_eq!((used.used, used.end_ms), (u64::from(*count), 100));
                    prop_assert!(*count <= limit);
                }
                CounterResult::Acquired(_, used) => {
                    prop_assert!(!counted.contains_key(&id) && table.overflow_charges_total() == overflowed_before + 1);
                    prop_assert!(!groups_without_counter.contains(&group), "an overflow counter became free before the end of the window");
                    overflowed.insert(id);
                    let count = groups.entry(group).or_default();
                    *count += 1;
                    prop_assert_eq!((used.used, used.end_ms), (u64::from(*count), 100));
                    prop_assert_eq!(table.peek(counter, request, Time::plain(50)).0.used, u64::from(*count));
                    prop_assert!(*count <= limit);
                }
                CounterResult::Full(_) if own => prop_assert_eq!(counted.get(&id), Some(&limit)),
                CounterResult::Full(used) => {
                    prop_assert_eq!((used.used, table.overflow_charges_total()), (limit.into(), overflowed_before));
                    match groups.get(&group) {
                        Some(&count) => prop_assert_eq!(count, limit),
                        None => prop_assert!(!groups_without_counter.insert(group) || groups.len() >= 2),
                    }
                }
                CounterResult::Late => prop_assert!(false, "no window ended"),
            }
            let live = table.stats(50).live;
            prop_assert_eq!(live, counted.len());
            prop_assert!(groups.len() <= 2 * overflow_buckets);
        }
    }

    /// Usage in an overflow counter is not forgotten when a slot becomes free before the end of the window.
    #[test]
    fn an_overflowed_key_gets_no_counter(first in 1..5u32, again in 1..9u32, limit in 1..6u32, next in 100..300u64) {
        let table = Table::<1>::with_buckets(1, 1).expect("there is memory");
        let (occupant, key) = (counter(1), counter(2));
        let counted = table.acquire(occupant, AcquireRequest::plain(60, 1, 1), Time::plain(50), None);
        prop_assert!(matches!(counted, CounterResult::Acquired(..)), "the table is empty");
        let admits = |now_ms, end_ms| {
            let outcome = table.acquire(key, AcquireRequest::plain(end_ms, limit, 1), Time::plain(now_ms), None);
            u32::from(matches!(outcome, CounterResult::Acquired(..)))
        };
        let admitted: u32 = (0..first).map(|_| admits(50, 100)).chain((0..again).map(|_| admits(70, 100))).sum();
        prop_assert_eq!(admitted, (first + again).min(limit));
        prop_assert_eq!((table.overflow_charges_total(), table.stats(70).live), (u64::from(admitted), 0));
        // In the next window the key has its own counter.
        prop_assert_eq!((admits(next, next + 50), table.overflow_charges_total()), (1, u64::from(admitted)));
    }

    /// After the slot was reused, a clock that is behind finds its window closed, and the request is counted later.
    #[test]
    fn a_reused_slot_is_not_opened_for_its_ended_window(actions in actions(12, Just(1u32)), buckets in 1..4usize) {
        let (table, mut clocks) = (Table::<1>::with_buckets(buckets, 1).expect("there is memory"), Clocks::new());
        let mut counts: HashMap<(u64, u64), u64> = HashMap::new();
        for action in &actions {
            let now_ms = clocks.advance(action);
            let layer_request = LayerRequest { id: action.client, window_ms: 10, limit: 1000, cost: 1 };
            let before = table.overflow_charges_total();
            let outcome = decide(&table, &[layer_request], now_ms);
            if outcome.result == AcquireResult::Admitted && table.overflow_charges_total() == before {
                let used = outcome.charges[0].usage;
                let count = counts.entry((layer_request.id, used.end_ms)).or_default();
                *count += 1;
                prop_assert_eq!(used.used, *count, "the count of a window starts once: {:?}", acquire_request(&layer_request, now_ms));
            }
        }
    }
}
