//! Properties of a table that is too small: never too lax, and strict only as documented.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use transom_limiter::acquire::AcquireResult;
use transom_limiter::counter::AcquireRequest;
use transom_limiter::table::{CounterResult, Table};
use transom_limiter::window::Time;

use crate::oracle::{Oracle, Wish};
use crate::support::{Action, Clocks, START_MS, actions, ask, costs, counter, limits, play, wishes};

/// Sums what is admitted per key and window, and holds it against the limit.
fn never_past_the_limit<const W: usize>(
    table: &Table<W>,
    actions: &[Action],
    limits: &[u32; 6],
) -> Result<(), TestCaseError> {
    let mut admitted: HashMap<(u64, u64), u64> = HashMap::new();
    let mut clocks = Clocks::new();
    for action in actions {
        let wishes = wishes(action, limits);
        let answer = play(table, &wishes, clocks.moved(action));
        if answer.verdict == AcquireResult::Admitted && action.cost > 0 {
            for (wish, charge) in wishes.iter().zip(&answer.charges) {
                let sum = admitted.entry((wish.id, charge.usage.end_ms)).or_default();
                *sum += u64::from(wish.cost);
                prop_assert!(*sum <= u64::from(wish.limit), "{} tokens of {:?}", sum, wish);
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

    /// One clock that does not go back, one rule, one token each: the plain limiter, or stricter.
    #[test]
    fn a_small_table_admits_no_more_than_the_reference_limiter(demand in prop::collection::vec((0..20u64, 0..4u64), 1..200)) {
        let (table, mut oracle, mut now_ms) = (Table::<2>::with_buckets(2, 1).expect("there is memory"), Oracle::default(), START_MS);
        let (mut mine, mut plain) = (HashMap::<(u64, u64), u64>::new(), HashMap::<(u64, u64), u64>::new());
        for (id, passes_ms) in demand {
            now_ms += passes_ms;
            let wish = Wish { id, window_ms: 50, limit: 3, cost: 1 };
            let at = (id, wish.end_ms(now_ms));
            *plain.entry(at).or_default() += u64::from(oracle.decide(&[wish], now_ms));
            let sum = mine.entry(at).or_default();
            *sum += u64::from(play(&table, &[wish], now_ms).verdict == AcquireResult::Admitted);
            prop_assert!(*sum <= plain[&at]);
        }
    }

    /// Keys that found a slot keep exactly their own limit; those that did not are counted together
    /// per group of their layer, to the same limit; where not even that has a slot, they are refused.
    /// Nobody who was counted in a group gets a counter of his own before that window is over.
    #[test]
    fn a_full_table_answers_as_documented(
        demand in prop::collection::vec(0..40u64, 1..200), limit in 1..6u32, own in 1..4usize, spill in 1..3usize,
    ) {
        let table = Table::<2>::with_buckets(own, spill).expect("there is memory");
        let (mut seated, mut groups) = (HashMap::<u64, u32>::new(), HashMap::<u64, u32>::new());
        let (mut spilled, mut refused_outright) = (HashSet::new(), HashSet::new());
        for id in demand {
            let (counter, ask) = (counter(id), AcquireRequest::plain(100, limit, 1));
            let group = counter.key.tag % 64;
            let spilled_before = table.overflow_charges_total();
            let answer = table.acquire(counter, ask, Time::plain(50), None);
            let own = table.peek(counter, ask, Time::plain(50)).1.is_some();
            match answer {
                CounterResult::Acquired(_, used) if own => {
                    prop_assert!(!spilled.contains(&id) && table.overflow_charges_total() == spilled_before);
                    let count = seated.entry(id).or_default();
                    *count += 1;
                    prop_assert_eq!((used.used, used.end_ms), (u64::from(*count), 100));
                    prop_assert!(*count <= limit);
                }
                CounterResult::Acquired(_, used) => {
                    prop_assert!(!seated.contains_key(&id) && table.overflow_charges_total() == spilled_before + 1);
                    prop_assert!(!refused_outright.contains(&group), "a slot appeared from nowhere");
                    spilled.insert(id);
                    let count = groups.entry(group).or_default();
                    *count += 1;
                    prop_assert_eq!((used.used, used.end_ms), (u64::from(*count), 100));
                    prop_assert_eq!(table.peek(counter, ask, Time::plain(50)).0.used, u64::from(*count));
                    prop_assert!(*count <= limit);
                }
                CounterResult::Full(_) if own => prop_assert_eq!(seated.get(&id), Some(&limit)),
                CounterResult::Full(used) => {
                    prop_assert_eq!((used.used, table.overflow_charges_total()), (limit.into(), spilled_before));
                    match groups.get(&group) {
                        Some(&count) => prop_assert_eq!(count, limit),
                        None => prop_assert!(!refused_outright.insert(group) || groups.len() >= 2),
                    }
                }
                CounterResult::Late => prop_assert!(false, "no window ended"),
            }
            let live = table.stats(50).live;
            prop_assert_eq!(live, seated.len());
            prop_assert!(groups.len() <= 2 * spill);
        }
    }

    /// What was spilled in a window is not given out again in a slot that becomes free before its end.
    #[test]
    fn an_overflowed_key_gets_no_counter(first in 1..5u32, again in 1..9u32, limit in 1..6u32, next in 100..300u64) {
        let table = Table::<1>::with_buckets(1, 1).expect("there is memory");
        let (sitter, key) = (counter(1), counter(2));
        let seated = table.acquire(sitter, AcquireRequest::plain(60, 1, 1), Time::plain(50), None);
        prop_assert!(matches!(seated, CounterResult::Acquired(..)), "the table is empty");
        let hit = |now_ms, end_ms| {
            let answer = table.acquire(key, AcquireRequest::plain(end_ms, limit, 1), Time::plain(now_ms), None);
            u32::from(matches!(answer, CounterResult::Acquired(..)))
        };
        let admitted: u32 = (0..first).map(|_| hit(50, 100)).chain((0..again).map(|_| hit(70, 100))).sum();
        prop_assert_eq!(admitted, (first + again).min(limit));
        prop_assert_eq!((table.overflow_charges_total(), table.stats(70).live), (u64::from(admitted), 0));
        // Its next window is its own again.
        prop_assert_eq!((hit(next, next + 50), table.overflow_charges_total()), (1, u64::from(admitted)));
    }

    /// A clock that is behind finds its window closed once the slot was given away, and counts later.
    #[test]
    fn a_reused_slot_is_not_opened_for_its_ended_window(actions in actions(12, Just(1u32)), buckets in 1..4usize) {
        let (table, mut clocks) = (Table::<1>::with_buckets(buckets, 1).expect("there is memory"), Clocks::new());
        let mut counts: HashMap<(u64, u64), u64> = HashMap::new();
        for action in &actions {
            let now_ms = clocks.moved(action);
            let wish = Wish { id: action.client, window_ms: 10, limit: 1000, cost: 1 };
            let before = table.overflow_charges_total();
            let answer = play(&table, &[wish], now_ms);
            if answer.verdict == AcquireResult::Admitted && table.overflow_charges_total() == before {
                let used = answer.charges[0].usage;
                let count = counts.entry((wish.id, used.end_ms)).or_default();
                *count += 1;
                prop_assert_eq!(used.used, *count, "the count of a window starts once: {:?}", ask(&wish, now_ms));
            }
        }
    }
}
