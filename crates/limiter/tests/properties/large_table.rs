//! Properties of a table with free slots: every result equals that of the reference limiter.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::acquire::AcquireResult;
use transom_limiter::counter::CounterWord;
use transom_limiter::table::{Table, TableLayout, TableStats, Watermarks};
use transom_limiter::window::Time;
use transom_limiter::window_kind::{AcquireRequest, Acquired, acquired, refunded, usage};

use crate::oracle::{LayerRequest, Oracle, WindowUsage};
use crate::support::{Clocks, Outcome, acquire_request, actions, costs, counter, decide, layer_requests, limits};

fn table() -> Table {
    Table::with_capacity(4096).expect("there is memory")
}

/// The usage of a counter, as the table reports it.
fn usage_in(table: &Table, layer_request: &LayerRequest, now_ms: u64) -> WindowUsage {
    let (used, _) = table.peek(counter(layer_request.id), acquire_request(layer_request, now_ms), Time::plain(now_ms));
    WindowUsage { end_ms: used.end_ms, used: used.used }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_large_table_equals_the_reference_limiter(actions in actions(6, costs()), limits in limits()) {
        let (table, mut oracle, mut clocks) = (table(), Oracle::default(), Clocks::new());
        for action in &actions {
            let layer_requests = layer_requests(action, &limits);
            let Outcome { result, now_ms, charges } = decide(&table, &layer_requests, clocks.advance(action));
            // A refusal reports the usage before the request; an admission includes the request.
            let before: Vec<WindowUsage> = layer_requests.iter().map(|layer_request| oracle.usage(layer_request, now_ms)).collect();
            let admitted = oracle.decide(&layer_requests, now_ms);
            for (i, (layer_request, charge)) in layer_requests.iter().zip(&charges).enumerate() {
                // Usage of a window before the horizon may have been lost. A request that another counter refuses does
                // not notice this.
                if before[i].end_ms <= table.horizon_ms() {
                    continue;
                }
                let after = oracle.usage(layer_request, now_ms);
                prop_assert_eq!(WindowUsage { end_ms: charge.usage.end_ms, used: charge.usage.used }, after);
                prop_assert_eq!(usage_in(&table, layer_request, now_ms), after);
                let full = before[i].used + u64::from(layer_request.cost) > u64::from(layer_request.limit);
                prop_assert_eq!(charge.is_full, full, "{:?}", charge);
            }
            let expected = if admitted { AcquireResult::Admitted } else { AcquireResult::Refused };
            let forgotten = before.iter().any(|usage| usage.end_ms <= table.horizon_ms());
            prop_assert!(result == expected || forgotten && result == AcquireResult::Refused, "{:?}", action);
        }
        prop_assert_eq!(table.overflow_charges_total(), 0);
    }

    #[test]
    fn never_admits_past_the_limit(actions in actions(3, costs()), limits in limits()) {
        let (table, mut clocks) = (table(), Clocks::new());
        let mut admitted: HashMap<(u64, u64), u64> = HashMap::new();
        for action in &actions {
            let layer_requests = layer_requests(action, &limits);
            let outcome = decide(&table, &layer_requests, clocks.advance(action));
            if outcome.result == AcquireResult::Admitted && action.cost > 0 {
                for (layer_request, charge) in layer_requests.iter().zip(&outcome.charges) {
                    let sum = admitted.entry((layer_request.id, charge.usage.end_ms)).or_default();
                    *sum += u64::from(layer_request.cost);
                    prop_assert!(*sum <= u64::from(layer_request.limit));
                }
            }
        }
    }

    /// All tokens admitted in a window are counted at its end, whatever the usage of the previous window was.
    #[test]
    fn no_hit_is_lost_at_rollover(before in 0..50u32, after in 0..50u32, late in 0..50u32) {
        let (table, mut last) = (table(), 0);
        let layer_request = LayerRequest { id: 1, window_ms: 100, limit: 1000, cost: 1 };
        for (times, now_ms) in [(before, 99), (after, 100), (late, 99)] {
            for _ in 0..times {
                let outcome = decide(&table, &[layer_request], now_ms);
                prop_assert_eq!(outcome.result, AcquireResult::Admitted);
                last = outcome.charges[0].usage.end_ms;
            }
        }
        let expected = if after > 0 { after + late } else { before + late };
        let usage = usage_in(&table, &layer_request, if after > 0 { 100 } else { 99 });
        prop_assert_eq!(usage.used, u64::from(expected));
        prop_assert!(expected == 0 || usage.end_ms == last);
    }

    #[test]
    fn a_late_thread_never_rewinds(actions in actions(1, Just(1u32)), limit in 1..9u32) {
        let (table, mut clocks) = (table(), Clocks::new());
        let mut latest = 0;
        for action in &actions {
            let layer_request = LayerRequest { id: 1, window_ms: 10, limit, cost: 1 };
            let outcome = decide(&table, &[layer_request], clocks.advance(action));
            let end_ms = outcome.charges[0].usage.end_ms;
            prop_assert!(end_ms >= latest, "from {} back to {}", latest, end_ms);
            latest = end_ms;
        }
    }

    #[test]
    fn the_refused_leave_no_mark(actions in actions(4, costs()), limits in limits()) {
        let (table, mut clocks) = (table(), Clocks::new());
        for action in &actions {
            let layer_requests = layer_requests(action, &limits);
            let now_ms = clocks.advance(action);
            let usage = |now_ms| {
                let all = layer_requests.iter().map(|layer_request| usage_in(&table, layer_request, now_ms)).collect::<Vec<_>>();
                (all, table.stats(0), table.horizon_ms())
            };
            let before = usage(now_ms);
            let outcome = decide(&table, &layer_requests, now_ms);
            if outcome.result == AcquireResult::Refused && outcome.now_ms == now_ms {
                prop_assert_eq!(usage(now_ms), before);
                prop_assert!(outcome.charges.iter().any(|charge| charge.is_full));
            }
        }
    }

    #[test]
    fn a_refund_never_crosses_a_window(
        tag in 1..4u64, end_ms in 1..4u64, count in 0..9u32, taken_tag in 1..4u64, taken_end_ms in 1..4u64, cost in 0..9u32,
    ) {
        let word = CounterWord::new(tag, end_ms, count);
        let (request, time) = (AcquireRequest::plain(taken_end_ms, 20, cost), Time::plain(0));
        let taken = |tag, end_ms| Acquired { tag, end_ms, used: 20, tokens: cost.into() };
        match refunded(word, taken(taken_tag, taken_end_ms), request, time) {
            Some(less) => {
                prop_assert_eq!((taken_tag, taken_end_ms), (tag, end_ms));
                prop_assert_eq!(less, CounterWord::new(tag, end_ms, count.saturating_sub(cost)));
            }
            None => prop_assert_ne!((taken_tag, taken_end_ms), (tag, end_ms)),
        }
        // A charge and its refund in one window change nothing. A charge in a later window moves the word to that
        // window.
        let (after, _) = acquired(tag, usage(word, request, time), request, time).expect("fits");
        let after_refund = refunded(after, taken(tag, after.end_ms()), request, time).expect("the window is open");
        prop_assert_eq!(after_refund, if taken_end_ms > end_ms { CounterWord::new(tag, taken_end_ms, 0) } else { word });
    }

    /// Every client gets its own limit, however many other clients send requests.
    #[test]
    fn two_keys_never_share_a_count(demands in prop::collection::vec(0..12u64, 2..40), limit in 0..8u32) {
        let table = table();
        for (id, &demand) in demands.iter().enumerate() {
            let layer_request = LayerRequest { id: id as u64, window_ms: 1000, limit, cost: 1 };
            let admit = |_: &u64| decide(&table, &[layer_request], 5).result == AcquireResult::Admitted;
            prop_assert_eq!((0..demand).filter(admit).count() as u64, demand.min(limit.into()));
        }
    }
}

/// A key has two buckets to choose from. Without that, some keys of a table at its capacity would find no slot.
#[test]
fn a_table_holds_the_keys_of_its_capacity() {
    let layout = TableLayout { counter_buckets: 1 << 18, overflow_buckets: 1 << 12, bucket_slots: 8 };
    assert_eq!(Table::layout(1 << 20), layout);
    let small = (0..9).map(|nth| (Table::<8>::with_buckets(2, 1), 8, 100 * nth..100 * nth + 16));
    for (table, free, ids) in small.chain([(Table::with_capacity(4096), 4096, 0..4096)]) {
        let (table, keys) = (table.expect("there is memory"), ids.clone().count());
        assert_eq!(table.stats(5), TableStats { live: 0, free });
        for id in ids {
            let layer_request = LayerRequest { id, window_ms: 1000, limit: 1, cost: 1 };
            assert_eq!(decide(&table, &[layer_request], 5).result, AcquireResult::Admitted);
        }
        assert_eq!(table.stats(5), TableStats { live: keys, free: 0 });
        assert_eq!((table.stats(1000), table.overflow_charges_total()), (TableStats { live: 0, free }, 0));
    }
}

/// Once slots are free, only the keys that were counted in an overflow counter stay there.
#[test]
fn a_key_that_did_not_overflow_gets_its_own_counter() {
    let table = Table::<8>::with_buckets(1, 8).expect("there is memory");
    let overflows = |id, window_ms, now_ms| {
        let before = table.overflow_charges_total();
        decide(&table, &[LayerRequest { id, window_ms, limit: 9, cost: 1 }], now_ms);
        table.overflow_charges_total() > before
    };
    assert!((0..8).all(|id| !overflows(id, 100, 5)));
    assert_eq!([overflows(8, 1000, 5), overflows(9, 1000, 105), overflows(8, 1000, 105)], [true, false, true]);
}

#[test]
fn a_restored_table_equals_the_saved_one() {
    let table = || Table::<1>::with_buckets(2, 1).expect("there is memory");
    let (saved, restored) = (table(), table());
    for (id, now_ms) in (0..18).map(|id| (id, if id < 9 { 5 } else { 1005 })) {
        decide(&saved, &[LayerRequest { id, window_ms: 1000, limit: 9, cost: 1 }], now_ms);
    }
    let counters = |table: &Table<1>| table.live_counters(1005).collect::<Vec<_>>();
    assert_eq!(counters(&saved).len(), 3);
    let marks = Watermarks { horizon_ms: 1000, overflow_horizon_ms: 1000, overflow_end_ms: 2000 };
    assert_eq!(saved.watermarks(), marks);
    counters(&saved).into_iter().for_each(|(index, word)| assert!(restored.restore(index, word)));
    restored.restore_watermarks(marks);
    assert_eq!((counters(&restored), restored.watermarks()), (counters(&saved), marks));
    assert!(!restored.restore(3, CounterWord::EMPTY), "there are three slots");
}
