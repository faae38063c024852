//! Penalties: a key stays refused for some time after a refusal by a window.

use proptest::prelude::*;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition, RuleId};
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::table::Table;
use transom_limiter::window_kind::Usage;

use crate::oracle::Expected::{Admitted, Refused};
use crate::support::{Gateway, START_MS, plain, rule};

/// Limit and period of each layer, and the length of a penalty, milliseconds.
fn settings() -> impl Strategy<Value = (Vec<(u32, u64)>, u64)> {
    // Layers with equal windows would share a counter.
    let layers = ((1..4_u32, 50..100_u64), prop::option::of((2..6_u32, 100..400_u64)));
    (layers.prop_map(|(first, second)| std::iter::once(first).chain(second).collect()), 1..400_u64)
}

/// A log of the admitted requests of one key, and the end of its penalty.
struct Model {
    layers: Vec<(u32, u64)>,
    penalty_ms: u64,
    admitted: Vec<u64>,
    locked_until_ms: u64,
}

impl Model {
    /// The end of the last window that is full.
    fn full_until_ms(&self, now_ms: u64) -> Option<u64> {
        let full = self.layers.iter().filter(|(limit, period_ms)| {
            let used = self.admitted.iter().filter(|at_ms| *at_ms / period_ms == now_ms / period_ms).count();
            used >= *limit as usize
        });
        full.map(|(_, period_ms)| (now_ms / period_ms + 1) * period_ms).max()
    }

    fn admits(&mut self, now_ms: u64) -> bool {
        if now_ms < self.locked_until_ms {
            return false;
        }
        let is_full = self.full_until_ms(now_ms).is_some();
        match is_full {
            true => self.locked_until_ms = now_ms + self.penalty_ms,
            false => self.admitted.push(now_ms),
        }
        !is_full
    }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_key_is_refused_from_a_refusal_until_the_penalty_ends(
        (layers, penalty_ms) in settings(),
        steps in prop::collection::vec((0..120_u64, 0..3_usize), 1..80),
    ) {
        let limits = layers.iter().map(|(limit, period_ms)| plain(*limit, *period_ms)).collect();
        let mut gateway =
            Gateway::with_large_table(&[Rule { penalty_ms: Some(penalty_ms), ..rule("only", limits) }]);
        let model = || Model { layers: layers.clone(), penalty_ms, admitted: Vec::new(), locked_until_ms: 0 };
        let mut models = [model(), model(), model()];
        let mut now_ms = START_MS;
        for (pause_ms, client) in steps {
            // Many requests follow at once.
            now_ms += pause_ms.saturating_sub(60);
            let expected = if models[client].admits(now_ms) { Admitted } else { Refused };
            prop_assert_eq!(gateway.request(client as u64, now_ms), expected);
            if expected == Refused {
                let model = &models[client];
                let opens_ms = model.full_until_ms(now_ms).unwrap_or(0).max(model.locked_until_ms);
                prop_assert_eq!(gateway.retry_at_ms(now_ms), Some(opens_ms));
            }
        }
    }
}

#[test]
fn only_the_rule_that_refused_starts_its_penalty() {
    let strict = Rule { penalty_ms: Some(500), ..rule("strict", vec![plain(1, 100)]) };
    let other = Rule { penalty_ms: Some(5000), ..rule("other", vec![plain(100, 100)]) };
    let shadow = Rule { on_limit: OnLimit::Shadow, penalty_ms: Some(700), ..rule("shadow", vec![plain(1, 1000)]) };
    let mut gateway = Gateway::with_large_table(&[strict, other, shadow]);
    assert_eq!((gateway.request(0, START_MS), gateway.request(0, START_MS)), (Admitted, Refused));
    assert_eq!(gateway.retry_at_ms(START_MS), Some(START_MS + 500));
    assert_eq!((gateway.request(0, START_MS + 499), gateway.request(0, START_MS + 500)), (Refused, Admitted));
    // The shadow rule reports its own penalty, from this request on.
    assert_eq!(gateway.context.result.shadowed, [PlanPosition::at(2)]);
    for (at_ms, is_shadowed) in [(1199, true), (1200, false)] {
        assert_eq!(gateway.request(0, START_MS + at_ms), Admitted);
        assert_eq!(!gateway.context.result.shadowed.is_empty(), is_shadowed);
    }
}

/// A thread with an old time starts the penalty that another thread has ended, or in a slot that was reused meanwhile.
#[test]
fn a_late_thread_starts_a_penalty() {
    let rules = [Rule { penalty_ms: Some(500), ..rule("only", vec![plain(1, 10)]) }];
    let mut gateway = Gateway::with_large_table(&rules);
    let start = |gateway: &Gateway<8>, then_ms, now_ms| {
        let (keyed_request, clock) = (gateway.keyed_request(0, 0, 1), || now_ms);
        gateway.rule_set().start_penalty(
            RuleId::at(0),
            keyed_request,
            &gateway.table,
            DecisionTime::starting_at(then_ms, &clock),
        )
    };
    for now_ms in [1000, 1100] {
        assert_eq!(start(&gateway, now_ms, now_ms), Some(Usage { used: 1, end_ms: 1500 }), "it has begun");
    }
    assert_eq!(gateway.request(0, 1000), Refused);
    gateway.rule_set().reset(&gateway.table, 1000, &gateway.context);
    assert_eq!(start(&gateway, 900, 1000), Some(Usage { used: 1, end_ms: 1500 }));
    let mut gateway = Gateway::new(&rules, Table::with_buckets(1, 1).expect("there is memory"));
    (0..8).for_each(|client| _ = gateway.request(client, client / 7 * 100));
    assert_eq!(gateway.table.horizon_ms(), 10, "the last request has reused one of seven slots");
    assert_eq!(start(&gateway, 5, 5), Some(Usage { used: 1, end_ms: 510 }));
}

#[test]
fn a_reload_keeps_penalties() {
    let rule_with = |penalty_ms| [Rule { penalty_ms: Some(penalty_ms), ..rule("only", vec![plain(1, 100)]) }];
    let mut gateway = Gateway::with_large_table(&rule_with(1000));
    assert_eq!((gateway.request(0, START_MS), gateway.request(0, START_MS)), (Admitted, Refused));
    for penalty_ms in [300, 9000, 1000] {
        gateway.reload(&rule_with(penalty_ms));
        assert_eq!(gateway.request(0, START_MS + 999), Refused);
        assert_eq!(gateway.retry_at_ms(START_MS + 999), Some(START_MS + 1000), "{penalty_ms}");
    }
    assert_eq!(gateway.request(0, START_MS + 1000), Admitted);
}

#[test]
fn a_peek_starts_no_penalty() {
    let mut gateway = Gateway::with_large_table(&[Rule { penalty_ms: Some(500), ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!(gateway.request(0, START_MS), Admitted);
    assert!(!gateway.charge_plan.peek(&gateway.table, DecisionTime::read(&|| START_MS), &mut gateway.context));
    assert_eq!(gateway.request(0, START_MS + 100), Admitted);
}

/// In a full table a key has no counter of its own. A penalty in an overflow counter would refuse other keys for as long as it
/// lasts.
#[test]
fn a_full_table_starts_no_penalty() {
    let rules = [Rule { penalty_ms: Some(3_600_000), ..rule("r", vec![plain(1, 100)]) }];
    let mut gateway = Gateway::new(&rules, Table::<1>::with_buckets(2, 64).expect("there is memory"));
    for client in 0..2000 {
        gateway.request(client, START_MS);
        assert_eq!(gateway.request(client, START_MS), Refused);
    }
    // The two slots may have penalties; no other client is refused after the window.
    let refused = (0..4000).filter(|client| gateway.request(*client, START_MS + 100 * (1 + client)) == Refused).count();
    assert!(refused <= 2, "{refused}");
}
