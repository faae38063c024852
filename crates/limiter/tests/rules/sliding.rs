//! Sliding windows beside an exact log of all admitted requests: what the log forbids is never admitted, and what it
//! allows is refused for at most an eighth of the period.
//!
//! `make sliding` compares more schedules, and prints the largest early refusal.

use std::cell::Cell;
use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::bucket::Key;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{KeyValue, OnLimit, Override, Plan, Rule};
use transom_limiter::sliding_counter::SlidingCounter;
use transom_limiter::table::{Counter, CounterResult, Table};
use transom_limiter::window::{PERIOD_MIN_MS, SEGMENTS_PER_PERIOD, Time, Windows};
use transom_limiter::window_kind::{AcquireRequest, WindowKind};

use crate::oracle::Expected::{Admitted, Refused};
use crate::oracle::LayerRequest;
use crate::support::{Gateway, START_MS, limit, outcome, plain, rule};

const MINUTE_MS: u64 = 60_000;
/// The longest time that a token counts beyond the period.
const EXTRA_MS: u64 = MINUTE_MS / SEGMENTS_PER_PERIOD;

fn sliding(tokens: u32, period_ms: u64) -> Limit {
    limit(tokens, Windows::Sliding { period_ms })
}

fn only(layer: Limit) -> Gateway<8> {
    Gateway::with_large_table(&[rule("only", vec![layer])])
}

/// All admitted requests of one key: time and cost.
#[derive(Default)]
struct Log(Vec<(u64, u64)>);

impl Log {
    /// Tokens of requests that are less than `period_ms` older than `now_ms`.
    fn used(&self, now_ms: u64, period_ms: u64) -> u64 {
        self.0.iter().filter(|(then_ms, _)| now_ms - then_ms < period_ms).map(|(_, cost)| cost).sum()
    }

    /// The first time at which these requests leave room for `cost` of `tokens`; 0 if they always do.
    fn fits_from_ms(&self, cost: u64, tokens: u64, period_ms: u64) -> u64 {
        let mut used = cost;
        let exceeds = |(_, cost): &&(u64, u64)| {
            used += cost;
            used > tokens
        };
        self.0.iter().rev().find(exceeds).map_or(0, |(then_ms, _)| then_ms + period_ms)
    }
}

/// Five requests at the end of a minute count in the next one. `t` and Retry-After name the time of the next token.
#[test]
fn a_burst_around_a_minute_is_one_burst() {
    let mut gateway = only(sliding(5, MINUTE_MS));
    let start_ms = START_MS - START_MS % MINUTE_MS;
    let burst_ms = start_ms + 59_000;
    for left in (0..5).rev() {
        assert_eq!(gateway.request(0, burst_ms), Admitted);
        assert_eq!(gateway.remaining(), (left, start_ms + MINUTE_MS + MINUTE_MS));
    }
    let retry_ms = start_ms + 2 * MINUTE_MS;
    for now_ms in [burst_ms, burst_ms + 2000, retry_ms - 1] {
        assert_eq!(gateway.request(0, now_ms), Refused);
        assert_eq!(gateway.retry_at_ms(now_ms), Some(retry_ms));
    }
    assert!((burst_ms + MINUTE_MS..=burst_ms + MINUTE_MS + EXTRA_MS).contains(&retry_ms));
    assert_eq!((0..9).filter(|_| gateway.request(0, retry_ms) == Admitted).count(), 5);
}

/// A request for several tokens waits for as many.
#[test]
fn the_time_to_retry_depends_on_the_cost() {
    let mut gateway = only(sliding(5, 800));
    for (now_ms, cost) in [(0, 2), (250, 2), (500, 1)] {
        assert_eq!(gateway.request_tokens(0, cost, START_MS + now_ms), Admitted);
    }
    for (cost, retry_ms) in [(1, 900), (2, 900), (3, 1100), (5, 1400)] {
        assert_eq!(gateway.request_tokens(0, cost, START_MS + 600), Refused);
        assert_eq!(gateway.retry_at_ms(START_MS + 600), Some(START_MS + retry_ms), "{cost}");
    }
    assert_eq!(gateway.request_tokens(0, 6, START_MS + 600), Refused);
    assert_eq!(gateway.remaining(), (0, START_MS + 1500), "all tokens have expired then");
    assert_eq!(gateway.retry_at_ms(START_MS + 600), None, "it never fits");
}

/// A thread that was suspended after it read the clock counts the tokens that others have taken since.
#[test]
fn a_late_request_counts_later_tokens() {
    let mut gateway = only(sliding(3, 800));
    assert_eq!([0; 2].map(|_| gateway.request(0, START_MS + 1000)), [Admitted; 2]);
    for expected in [Admitted, Refused] {
        let decision = gateway.decide_at(0, &[Some(1)], DecisionTime::read(&|| START_MS + 500));
        assert_eq!(
            (outcome(&decision), gateway.remaining()),
            (expected, (0, START_MS + 1900)),
            "charged with the others"
        );
    }
}

/// A lowered limit applies to the usage so far; tokens that are refunded are available at once.
#[test]
fn a_changed_limit_and_a_refund_apply_to_the_usage() {
    let mut gateway = only(sliding(5, 800));
    assert_eq!((0..9).filter(|_| gateway.request(0, START_MS) == Admitted).count(), 5);
    gateway.reload(&[rule("only", vec![sliding(3, 800)])]);
    assert_eq!((gateway.request(0, START_MS + 899), gateway.request(0, START_MS + 900)), (Refused, Admitted));
    gateway.reload(&[rule("only", vec![sliding(7, 800)])]);
    assert_eq!((0..9).filter(|_| gateway.request(0, START_MS + 1000) == Admitted).count(), 6);
    let receipts: Vec<_> = gateway.context.all_receipts().collect();
    assert!(receipts.is_empty(), "the last request was refused");
    gateway.rule_set().reset(&gateway.table, START_MS + 1000, &gateway.context);
    assert_eq!(gateway.request_tokens(0, 7, START_MS + 1000), Admitted);
    let receipts: Vec<_> = gateway.context.receipts_of_rule(PlanPosition::at(0)).collect();
    assert_eq!(receipts.len(), 1);
    gateway.rule_set().refund(&receipts, 4, &gateway.table, START_MS + 1300);
    assert_eq!(
        (gateway.request_tokens(0, 5, START_MS + 1300), gateway.request_tokens(0, 4, START_MS + 1300)),
        (Refused, Admitted)
    );
}

#[derive(Clone, Debug)]
struct Event {
    advance_ms: u64,
    client: u64,
    cost: u32,
    /// Whether the request is refunded if it was admitted.
    is_refunded: bool,
}

fn events(period_ms: u64) -> impl Strategy<Value = Vec<Event>> {
    let advance_ms = prop_oneof![
        4 => Just(0u64),
        8 => 0..period_ms / 4,
        2 => 0..2 * period_ms,
        1 => Just(period_ms),
        1 => 0..20 * period_ms,
    ];
    let event = (advance_ms, 0..3u64, 0..4u32, prop::bool::weighted(0.1))
        .prop_map(|(advance_ms, client, cost, is_refunded)| Event { advance_ms, client, cost, is_refunded });
    prop::collection::vec(event, 1..200)
}

fn schedule() -> impl Strategy<Value = (u32, u64, Vec<Event>)> {
    (1..12u32, prop_oneof![Just(PERIOD_MIN_MS), Just(800), Just(1001), PERIOD_MIN_MS..5000])
        .prop_flat_map(|(tokens, period_ms)| events(period_ms).prop_map(move |events| (tokens, period_ms, events)))
}

/// Plays a schedule and compares each decision with the log. `is_exact`: every key has its own counters. Returns for how long
/// a request was refused after the log allowed it, at most, in milliseconds.
fn play<const W: usize>(
    table: Table<W>,
    tokens: u32,
    period_ms: u64,
    events: &[Event],
    is_exact: bool,
) -> Result<u64, TestCaseError> {
    let rules: Vec<Rule> = vec![rule("r", vec![sliding(tokens, period_ms)])];
    let mut gateway = Gateway::new(&rules, table);
    let mut logs = [const { Log(Vec::new()) }; 3];
    let (mut now_ms, mut longest_early_ms) = (START_MS, 0);
    for event in events {
        now_ms += event.advance_ms;
        let log = &mut logs[event.client as usize];
        let decision = gateway.request_tokens(event.client, event.cost, now_ms);
        let fits = |used: u64| used + u64::from(event.cost) <= u64::from(tokens);
        if decision == Admitted {
            prop_assert!(fits(log.used(now_ms, period_ms)), "{:?} at {}: {:?}", event, now_ms, log.0);
            let receipts: Vec<_> = gateway.context.all_receipts().collect();
            match event.is_refunded {
                true => gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, now_ms),
                false => log.0.push((now_ms, event.cost.into())),
            }
        } else if is_exact {
            let longest_ms = period_ms + period_ms.div_ceil(SEGMENTS_PER_PERIOD);
            prop_assert!(!fits(log.used(now_ms, longest_ms)), "{:?} at {}: {:?}", event, now_ms, log.0);
            match gateway.retry_at_ms(now_ms) {
                Some(retry_ms) => {
                    // The time to retry is the first at which the request is admitted.
                    prop_assert_eq!(peek(&mut gateway, event, retry_ms - 1), false);
                    prop_assert_eq!(peek(&mut gateway, event, retry_ms), true);
                    let fits_ms = log.fits_from_ms(event.cost.into(), tokens.into(), period_ms);
                    prop_assert!(fits_ms <= retry_ms, "{:?} at {}: {:?}", event, now_ms, log.0);
                    prop_assert!(retry_ms - fits_ms <= period_ms.div_ceil(SEGMENTS_PER_PERIOD));
                    longest_early_ms = longest_early_ms.max(retry_ms - fits_ms);
                }
                None => prop_assert!(event.cost > tokens),
            }
        }
    }
    Ok(longest_early_ms)
}

fn peek<const W: usize>(gateway: &mut Gateway<W>, event: &Event, now_ms: u64) -> bool {
    gateway.context.inputs.keyed_requests = vec![Some(gateway.keyed_request(0, event.client, event.cost))].into();
    let clock = || now_ms;
    let now = DecisionTime::read(&clock);
    gateway.charge_plan.peek(&gateway.table, now, &mut gateway.context)
}

/// In whole milliseconds, an eighth of a short period is rounded up: the largest fraction is that of periods of a second or
/// more.
#[test]
fn decisions_agree_with_a_log_of_all_requests() {
    let (config, largest, schedules) = (crate::config(), Cell::new((0.0, 0, 0)), Cell::new(0));
    let result = TestRunner::new(config).run(&schedule(), |(tokens, period_ms, events)| {
        let table = Table::<8>::with_capacity(4096).expect("there is memory");
        let early_ms = play(table, tokens, period_ms, &events, true)?;
        let fraction = early_ms as f64 / period_ms as f64;
        if period_ms >= 1000 && fraction > largest.get().0 {
            largest.set((fraction, early_ms, period_ms));
        }
        schedules.set(schedules.get() + 1);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let (fraction, early_ms, period_ms) = largest.get();
    println!(
        "{} schedules, the largest early refusal: {fraction:.4} of the period ({early_ms} of {period_ms} ms)",
        schedules.get()
    );
    assert!(fraction > 0.1, "the schedules reach early refusals");
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_full_table_admits_nothing_that_the_log_forbids((tokens, period_ms, events) in schedule()) {
        play(Table::<1>::with_buckets(7, 64).expect("there is memory"), tokens, period_ms, &events, false)?;
    }
}

/// A rule with a fixed and a sliding layer charges both or none.
#[test]
fn a_refusal_by_a_sliding_layer_charges_no_other() {
    let mut gateway = Gateway::with_large_table(&[rule("r", vec![plain(100, 3_600_000), sliding(2, 800)])]);
    let admitted = (0..20).filter(|nth| gateway.request(0, START_MS + nth * 90) == Admitted).count();
    assert_eq!(admitted, 4);
    let hour = gateway
        .context
        .result
        .charges
        .iter()
        .find(|charge| charge.request.limit == 100)
        .map(|charge| charge.usage.used);
    assert_eq!(hour, Some(4));
}

/// The tokens taken from each counter, with their times.
#[derive(Default)]
struct History(HashMap<String, Vec<(u64, u64)>>);

impl History {
    /// The tokens left. A sliding window counts the tokens of the present segment and of the eight before.
    fn left(&self, request: &LayerRequest, now_ms: u64) -> u64 {
        let counts = |then_ms: u64| match request.limit.windows {
            Windows::Sliding { period_ms } => now_ms * 8 / period_ms - then_ms * 8 / period_ms <= 8,
            _ => request.end_ms(then_ms) == request.end_ms(now_ms),
        };
        let taken = self.0.get(&request.key).into_iter().flatten().filter(|(then_ms, _)| counts(*then_ms));
        u64::from(request.limit.tokens).saturating_sub(taken.map(|(_, tokens)| tokens).sum())
    }

    /// Whether all layers admit a request. It is charged in all or, if one refuses it, in those that count refused requests.
    fn decide(&mut self, requests: &[LayerRequest], now_ms: u64) -> bool {
        let fits = requests.iter().all(|request| self.left(request, now_ms) >= request.cost.into());
        for request in requests.iter().filter(|request| fits || request.count_refused) {
            let tokens = self.left(request, now_ms).min(request.cost.into());
            self.0.entry(request.key.clone()).or_default().push((now_ms, tokens));
        }
        fits
    }
}

/// Rules with a sliding layer, and often a fixed one, whose limits depend on the plan or override.
fn rules_with_variants() -> impl Strategy<Value = Vec<Rule>> {
    let layers = || {
        (1..8u32, prop::option::of(1..8u32)).prop_map(|(tokens, fixed)| {
            [sliding(tokens, 800)].into_iter().chain(fixed.map(|tokens| plain(tokens, 1000))).collect::<Vec<_>>()
        })
    };
    let variants = (layers(), prop::option::of(layers()), prop::option::of(layers()));
    let one = (variants, any::<bool>(), prop::bool::weighted(0.3));
    let one = one.prop_map(|((layers, plan, own), count_refused, is_shadow)| Rule {
        plans: plan.map(|layers| Plan { name: "gold".to_owned(), layers, concurrent: None }).into_iter().collect(),
        overrides: own
            .map(|layers| Override { key: vec![KeyValue::Clear("3".to_owned())], layers, concurrent: None })
            .into_iter()
            .collect(),
        count_refused,
        on_limit: if is_shadow { OnLimit::Shadow } else { OnLimit::Refuse },
        ..rule("", layers)
    });
    prop::collection::vec(one, 1..4)
        .prop_map(|all| all.into_iter().enumerate().map(|(i, rule)| Rule { name: format!("r{i}"), ..rule }).collect())
}

proptest! {
    #![proptest_config(crate::config())]

    /// Plans, overrides, shadow rules and `count_refused` decide as in a history of all charges.
    #[test]
    fn variants_shadow_rules_and_counted_refusals_agree_with_a_history(
        rules in rules_with_variants(),
        events in prop::collection::vec((prop_oneof![3 => 0..20u64, 2 => 0..300u64, 1 => 0..3000u64], 0..4u64, 0..4u32), 1..150),
    ) {
        let mut gateway = Gateway::with_large_table(&rules);
        let (mut history, mut now_ms) = (History::default(), START_MS);
        for (advance_ms, client, cost) in events {
            now_ms += advance_ms;
            let costs = vec![Some(cost); rules.len()];
            let found = outcome(&gateway.decide(client, &costs, now_ms));
            let mut requests = |shadow| -> bool {
                let requests = gateway.layer_requests(client, &costs, shadow).into_iter().map(|(_, request)| request);
                history.decide(&requests.collect::<Vec<_>>(), now_ms)
            };
            let is_admitted = requests(None);
            prop_assert_eq!(found, if is_admitted { Admitted } else { Refused }, "at {}", now_ms);
            let shadow_rules = (0..rules.len()).filter(|rule| is_admitted && rules[*rule].is_shadow());
            let shadowed: Vec<PlanPosition> =
                shadow_rules.filter(|rule| !requests(Some(*rule))).map(PlanPosition::at).collect();
            prop_assert_eq!(&shadowed, &gateway.context.result.shadowed, "at {}", now_ms);
        }
    }
}

/// A request has peeked at the counter, and then another one is charged in the next segment: the first is charged there
/// too, if the limit allows both.
#[test]
fn a_request_that_is_overtaken_is_charged_in_the_later_segment() {
    let windows = [Windows::Sliding { period_ms: 100 * SEGMENTS_PER_PERIOD }];
    let counter = Counter { key: Key { bucket_hash: 0, tag: 1 }, layer: 0 };
    let [time, later]: [Time<'_>; 2] = [1150, 1250].map(|now_ms| Time::new(now_ms, &windows));
    let request = |end_ms, limit, cost| AcquireRequest {
        kind: WindowKind::Sliding,
        ..AcquireRequest::plain(end_ms, limit, cost)
    };
    for (limit, used, end_ms) in [(5, 2, None), (6, 6, Some(2100)), (7, 6, Some(2100))] {
        let (table, mut receipts) = (Table::<8>::with_buckets(4, 1).expect("there is memory"), Vec::new());
        let mut other = [Charge::new(counter, request(1300, limit, 2))];
        assert_eq!(acquire_all(&table, &mut other, &mut receipts, later), AcquireResult::Admitted);
        receipts.clear();
        let outcome = SlidingCounter::new(counter, request(1200, limit, 4), time).acquire(&table, time, &mut receipts);
        let (CounterResult::Acquired(_, usage) | CounterResult::Full(usage)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((usage.used, receipts.first().map(|charged| charged.receipt.end_ms())), (used, end_ms));
        let (left, _) = SlidingCounter::new(counter, request(1300, limit, 0), later).peek(&table, later);
        assert_eq!(left.used, used);
    }
}
