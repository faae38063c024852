//! The largest and the smallest numbers: nothing overflows or panics, and no full counter admits.

use proptest::prelude::*;
use transom_limiter::handles::{Handle, RuleId};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Rule};
use transom_limiter::table::Table;
use transom_limiter::window::{END_MAX_MS, PERIOD_MAX_MS, PERIOD_MIN_MS, Windows};

use crate::oracle::Expected::{Admitted, Refused};
use crate::support::{Gateway, charge_plan, delay, limit, plain, rule};

const MOST: u32 = u32::MAX;

fn numbers() -> impl Strategy<Value = u32> {
    prop_oneof![Just(1u32), 2..5u32, (MOST - 2)..=MOST]
}

fn any_windows() -> impl Strategy<Value = Windows> {
    let period = prop_oneof![Just(PERIOD_MIN_MS), Just(PERIOD_MAX_MS), Just(1000)];
    (period, 0..3u8, prop_oneof![Just(0u64), Just(END_MAX_MS), Just(u64::MAX)]).prop_map(
        |(period_ms, kind, offset_ms)| match kind {
            0 => Windows::Even { period_ms, offset_ms },
            1 => Windows::Random { period_ms },
            _ => Windows::FirstRequest { period_ms },
        },
    )
}

fn layer() -> impl Strategy<Value = Limit> {
    let shards = prop_oneof![3 => Just(1u32), 1 => Just(1024u32)];
    (numbers(), any_windows(), 0..2u8, prop_oneof![Just(0u32), numbers()], shards).prop_map(
        |(tokens, windows, more, reserve, shards)| Limit {
            capacity: (more > 0).then_some(MOST),
            reserve,
            shards,
            ..limit(tokens, windows)
        },
    )
}

fn any_rule(name: &'static str) -> impl Strategy<Value = Rule> {
    let on_limit = prop_oneof![Just(OnLimit::Refuse), Just(delay(u64::MAX)), Just(delay(0))];
    let cost = prop_oneof![Just(Cost::Fixed(1)), Just(Cost::Response { source: None, reserve: 1, max: MOST })];
    (prop::collection::vec(layer(), 1..3), on_limit, cost, any::<bool>()).prop_map(
        move |(mut layers, on_limit, cost, count_refused)| {
            // No two layers of a rule have the same windows.
            layers.dedup_by_key(|layer| layer.windows.clone());
            Rule { on_limit, cost, count_refused, ..rule(name, layers) }
        },
    )
}

/// Time steps: none, short, and years.
fn advance() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(0u64), 2 => 1..2000u64, 1 => Just(PERIOD_MAX_MS), 1 => Just(END_MAX_MS / 3)]
}

proptest! {
    #![proptest_config(crate::config())]

    /// Two configurations with different numbers use one table in turn.
    #[test]
    fn nothing_overflows(
        one in (any_rule("a"), any_rule("b")),
        numbers in prop::collection::vec(numbers(), 4),
        start in prop_oneof![Just(0u64), Just(1_700_000_000_000), (END_MAX_MS - 3000)..END_MAX_MS],
        events in prop::collection::vec((advance(), 0..6u8, prop_oneof![Just(0u32), numbers()], any::<bool>()), 1..40),
    ) {
        let rules = vec![one.0, one.1];
        let mut changed = rules.clone();
        for (layer, tokens) in changed.iter_mut().flat_map(|rule| &mut rule.layers).zip(numbers) {
            layer.tokens = tokens;
        }
        let mut gateway = Gateway::with_large_table(&rules);
        let mut other = charge_plan(&changed, None);
        let (mut now_ms, mut receipts) = (start, Vec::new());
        for (advance_ms, action, cost, reserve) in events {
            now_ms = (now_ms + advance_ms).min(END_MAX_MS - 1);
            gateway.context.inputs.reserve = reserve;
            match action {
                0 => {
                    std::mem::swap(&mut gateway.charge_plan, &mut other);
                    // A context belongs to one rule set.
                    gateway.context = Default::default();
                }
                1 => {
                    let keyed_request = gateway.keyed_request(0, 0, cost.max(1));
                    gateway.rule_set().charge_excess(RuleId::at(0), keyed_request, &gateway.table, now_ms);
                }
                2 => gateway.rule_set().refund(&std::mem::take(&mut receipts), cost, &gateway.table, now_ms),
                _ => {
                    let decision = gateway.request_tokens(0, cost, now_ms);
                    gateway.retry_at_ms(now_ms);
                    match decision {
                        Refused => prop_assert!(gateway.context.result.charges.iter().any(|charge| charge.is_full)),
                        _ => receipts = gateway.context.all_receipts().collect(),
                    }
                }
            }
        }
    }
}

#[test]
fn the_largest_numbers_are_used_to_the_last_token() {
    for (windows, now_ms) in [
        (Windows::Even { period_ms: PERIOD_MIN_MS, offset_ms: 3 }, END_MAX_MS - 20),
        (Windows::Even { period_ms: PERIOD_MAX_MS, offset_ms: 0 }, 1_700_000_000_000),
        (Windows::Even { period_ms: PERIOD_MAX_MS, offset_ms: 0 }, END_MAX_MS - 20),
        (Windows::Random { period_ms: PERIOD_MAX_MS }, END_MAX_MS - 20),
        (Windows::FirstRequest { period_ms: PERIOD_MAX_MS }, END_MAX_MS - 20),
    ] {
        for shards in [1, 1000] {
            let mut gateway =
                Gateway::with_large_table(&[rule("only", vec![Limit { shards, ..limit(MOST, windows.clone()) }])]);
            let got = [MOST - 1, 2, 1, 1, 0].map(|cost| gateway.request_tokens(0, cost, now_ms));
            assert_eq!(got, [Admitted, Refused, Admitted, Refused, Admitted], "{windows:?} at {now_ms}");
        }
    }
}

#[test]
fn a_capacity_far_above_the_limit_is_refilled_token_by_token() {
    let mut gateway =
        Gateway::with_large_table(&[rule("only", vec![Limit { capacity: Some(MOST), ..plain(1, PERIOD_MIN_MS) }])]);
    assert_eq!(gateway.request_tokens(0, MOST, 0), Admitted);
    assert_eq!(gateway.request(0, 9), Refused);
    for windows in 1..50 {
        let now_ms = windows * PERIOD_MIN_MS;
        assert_eq!([gateway.request(0, now_ms), gateway.request(0, now_ms)], [Admitted, Refused]);
        assert_eq!(gateway.retry_at_ms(now_ms), Some(now_ms + PERIOD_MIN_MS));
    }
    let later_ms = (u64::from(MOST) + 49) * PERIOD_MIN_MS;
    assert_eq!(gateway.request_tokens(0, MOST, later_ms - 1), Refused);
    assert_eq!(gateway.request_tokens(0, MOST, later_ms), Admitted);
}

/// Debt recorded under a limit of one token is read under the largest limit.
#[test]
fn a_long_debt_under_another_limit_does_not_overflow() {
    let cost = Cost::Response { source: None, reserve: 1, max: MOST };
    let with = |tokens: u32| Rule { cost: cost.clone(), ..rule("only", vec![plain(tokens, PERIOD_MIN_MS)]) };
    let mut gateway = Gateway::with_large_table(&[with(1)]);
    for _ in 0..20 {
        let keyed_request = gateway.keyed_request(0, 0, MOST);
        gateway.rule_set().charge_excess(RuleId::at(0), keyed_request, &gateway.table, 0);
    }
    gateway.charge_plan = charge_plan(&[with(MOST)], None);
    assert_eq!(gateway.request_tokens(0, MOST, 0), Refused);
    assert_eq!(gateway.request(0, 0), Refused);
}

/// A clock past the last window: every request is decided, and nothing panics.
#[test]
fn requests_after_the_last_window_are_decided() {
    for now_ms in [END_MAX_MS, END_MAX_MS + 1, 2 * END_MAX_MS] {
        let mut gateway = Gateway::new(
            &[rule("only", vec![plain(1, 1000)])],
            Table::<1>::with_buckets(1, 1).expect("there is memory"),
        );
        let admitted = (0..20).map(|i| gateway.request(i % 3, now_ms)).filter(|result| *result == Admitted).count();
        assert!(admitted <= 20);
    }
}
