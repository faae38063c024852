//! Properties of a table with room: it answers as the plain limiter does, verdict by verdict.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::acquire::AcquireResult;
use transom_limiter::counter::{AcquireRequest, Acquired, CounterWord, acquired, refunded, usage};
use transom_limiter::table::Table;
use transom_limiter::window::Time;

use crate::oracle::{Oracle, Stand, Wish};
use crate::support::{Answer, Clocks, actions, ask, costs, counter, limits, play, wishes};

fn table() -> Table {
    Table::with_capacity(4096).expect("there is memory")
}

/// What the table says is used of a counter.
fn stand(table: &Table, wish: &Wish, now_ms: u64) -> Stand {
    let (used, _) = table.peek(counter(wish.id), ask(wish, now_ms), Time::plain(now_ms));
    Stand { end_ms: used.end_ms, used: used.used }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_large_table_equals_the_reference_limiter(actions in actions(6, costs()), limits in limits()) {
        let (table, mut oracle, mut clocks) = (table(), Oracle::default(), Clocks::new());
        for action in &actions {
            let wishes = wishes(action, &limits);
            let Answer { verdict, now_ms, charges } = play(&table, &wishes, clocks.moved(action));
            // What was used before is what a refusal reports; of an admission, it includes the request.
            let before: Vec<Stand> = wishes.iter().map(|wish| oracle.stand(wish, now_ms)).collect();
            let admitted = oracle.decide(&wishes, now_ms);
            for (i, (wish, charge)) in wishes.iter().zip(&charges).enumerate() {
                // A window before the horizon may have been forgotten; a refusal by another counter does not notice.
                if before[i].end_ms <= table.horizon_ms() {
                    continue;
                }
                let after = oracle.stand(wish, now_ms);
                prop_assert_eq!(Stand { end_ms: charge.usage.end_ms, used: charge.usage.used }, after);
                prop_assert_eq!(stand(&table, wish, now_ms), after);
                let full = before[i].used + u64::from(wish.cost) > u64::from(wish.limit);
                prop_assert_eq!(charge.is_full, full, "{:?}", charge);
            }
            let expected = if admitted { AcquireResult::Admitted } else { AcquireResult::Refused };
            let forgotten = before.iter().any(|stand| stand.end_ms <= table.horizon_ms());
            prop_assert!(verdict == expected || forgotten && verdict == AcquireResult::Refused, "{:?}", action);
        }
        prop_assert_eq!(table.overflow_charges_total(), 0);
    }

    #[test]
    fn never_admits_past_the_limit(actions in actions(3, costs()), limits in limits()) {
        let (table, mut clocks) = (table(), Clocks::new());
        let mut admitted: HashMap<(u64, u64), u64> = HashMap::new();
        for action in &actions {
            let wishes = wishes(action, &limits);
            let answer = play(&table, &wishes, clocks.moved(action));
            if answer.verdict == AcquireResult::Admitted && action.cost > 0 {
                for (wish, charge) in wishes.iter().zip(&answer.charges) {
                    let sum = admitted.entry((wish.id, charge.usage.end_ms)).or_default();
                    *sum += u64::from(wish.cost);
                    prop_assert!(*sum <= u64::from(wish.limit));
                }
            }
        }
    }

    /// All that is admitted in a window is there at its end, whatever the window before stood at.
    #[test]
    fn no_hit_is_lost_at_rollover(before in 0..50u32, after in 0..50u32, late in 0..50u32) {
        let (table, mut last) = (table(), 0);
        let wish = Wish { id: 1, window_ms: 100, limit: 1000, cost: 1 };
        for (times, now_ms) in [(before, 99), (after, 100), (late, 99)] {
            for _ in 0..times {
                let answer = play(&table, &[wish], now_ms);
                prop_assert_eq!(answer.verdict, AcquireResult::Admitted);
                last = answer.charges[0].usage.end_ms;
            }
        }
        let expected = if after > 0 { after + late } else { before + late };
        let stand = stand(&table, &wish, if after > 0 { 100 } else { 99 });
        prop_assert_eq!(stand.used, u64::from(expected));
        prop_assert!(expected == 0 || stand.end_ms == last);
    }

    #[test]
    fn a_late_thread_never_rewinds(actions in actions(1, Just(1u32)), limit in 1..9u32) {
        let (table, mut clocks) = (table(), Clocks::new());
        let mut latest = 0;
        for action in &actions {
            let wish = Wish { id: 1, window_ms: 10, limit, cost: 1 };
            let answer = play(&table, &[wish], clocks.moved(action));
            let end_ms = answer.charges[0].usage.end_ms;
            prop_assert!(end_ms >= latest, "from {} back to {}", latest, end_ms);
            latest = end_ms;
        }
    }

    #[test]
    fn the_refused_leave_no_mark(actions in actions(4, costs()), limits in limits()) {
        let (table, mut clocks) = (table(), Clocks::new());
        for action in &actions {
            let wishes = wishes(action, &limits);
            let now_ms = clocks.moved(action);
            let look = |now_ms| {
                let all = wishes.iter().map(|wish| stand(&table, wish, now_ms)).collect::<Vec<_>>();
                (all, table.stats(0), table.horizon_ms())
            };
            let before = look(now_ms);
            let answer = play(&table, &wishes, now_ms);
            if answer.verdict == AcquireResult::Refused && answer.now_ms == now_ms {
                prop_assert_eq!(look(now_ms), before);
                prop_assert!(answer.charges.iter().any(|charge| charge.is_full));
            }
        }
    }

    #[test]
    fn a_refund_never_crosses_a_window(
        tag in 1..4u64, end_ms in 1..4u64, count in 0..9u32, paid_tag in 1..4u64, paid_end_ms in 1..4u64, cost in 0..9u32,
    ) {
        let word = CounterWord::new(tag, end_ms, count);
        let (ask, time) = (AcquireRequest::plain(paid_end_ms, 20, cost), Time::plain(0));
        let taken = |tag, end_ms| Acquired { tag, end_ms, used: 20, tokens: cost.into() };
        match refunded(word, taken(paid_tag, paid_end_ms), ask, time) {
            Some(less) => {
                prop_assert_eq!((paid_tag, paid_end_ms), (tag, end_ms));
                prop_assert_eq!(less, CounterWord::new(tag, end_ms, count.saturating_sub(cost)));
            }
            None => prop_assert_ne!((paid_tag, paid_end_ms), (tag, end_ms)),
        }
        // Paying and giving back in one window changes nothing; a payment in a later one moves the word on.
        let (paid, _) = acquired(tag, usage(word, ask, time), ask, time).expect("fits");
        let back = refunded(paid, taken(tag, paid.end_ms()), ask, time).expect("is still in that window");
        prop_assert_eq!(back, if paid_end_ms > end_ms { CounterWord::new(tag, paid_end_ms, 0) } else { word });
    }

    /// Every client gets its own limit, however many others are at it.
    #[test]
    fn two_keys_never_share_a_count(demands in prop::collection::vec(0..12u64, 2..40), limit in 0..8u32) {
        let table = table();
        for (id, &demand) in demands.iter().enumerate() {
            let wish = Wish { id: id as u64, window_ms: 1000, limit, cost: 1 };
            let admit = |_: &u64| play(&table, &[wish], 5).verdict == AcquireResult::Admitted;
            prop_assert_eq!((0..demand).filter(admit).count() as u64, demand.min(limit.into()));
        }
    }
}
