//! Threads that are suspended between reading the clock and charging. Meanwhile other threads have opened windows that
//! start after the time they read.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use transom_limiter::charge_plan::LayerRef;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, Handle};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::window::Windows;
use transom_limiter::window_kind::Usage;

use crate::config;
use crate::oracle::Expected::{self, Admitted, DelayedUntil, Refused};
use crate::support::{Gateway, START_MS, delay, limit, outcome, plain, rule, windows};

/// Requests one token at the time `then_ms`, which is `now_ms` by now.
fn request_late(gateway: &mut Gateway<8>, then_ms: u64, now_ms: u64) -> Expected {
    outcome(&gateway.decide_at(0, &[Some(1)], DecisionTime::starting_at(then_ms, &|| now_ms)))
}

#[test]
fn a_window_opened_by_another_thread_is_not_owed() {
    let floating = Limit { capacity: Some(3), ..limit(3, Windows::FirstRequest { period_ms: 100 }) };
    let rolling = Limit { capacity: Some(4), ..plain(3, 100) };
    for (layer, on_limit, opened_ms) in [
        (floating.clone(), rule("", vec![]).on_limit, 1001),
        (floating, delay(1000), 1001),
        (rolling.clone(), rule("", vec![]).on_limit, 1100),
        (rolling, delay(1000), 1100),
    ] {
        let mut gateway = Gateway::with_large_table(&[Rule { on_limit, ..rule("only", vec![layer]) }]);
        assert_eq!([0; 2].map(|_| gateway.request(0, opened_ms)), [Admitted; 2]);
        let clock = || opened_ms;
        let now = DecisionTime::starting_at(opened_ms - 1, &clock);
        assert!(gateway.charge_plan.peek(&gateway.table, now, &mut gateway.context));
        assert_eq!(request_late(&mut gateway, opened_ms - 1, opened_ms), Admitted);
        assert_eq!(gateway.remaining().1, opened_ms + 100, "charged in the open window");
        assert_eq!(gateway.context.result.decided_ms, opened_ms, "the reported time is in that window");
    }
}

#[test]
fn a_late_thread_still_owes_debts() {
    let on_limit = delay(100);
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit, ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!([0; 2].map(|_| gateway.request(0, 1050)), [Admitted, DelayedUntil(1100)]);
    assert_eq!(request_late(&mut gateway, 1040, 1060), Refused);
    assert_eq!(request_late(&mut gateway, 1040, 1105), DelayedUntil(1200));
}

/// Another thread opens a window of a rule that has tokens left, while the request reserves a window of a full rule.
#[test]
fn a_window_opened_during_a_reservation_is_not_owed() {
    let slow = Rule { on_limit: delay(1000), ..rule("slow", vec![plain(1, 100)]) };
    let floats = rule("floats", vec![limit(3, Windows::FirstRequest { period_ms: 100 })]);
    let mut gateway = Gateway::with_large_table(&[slow, floats]);
    assert_eq!(outcome(&gateway.decide(0, &[Some(1), None], 1000)), Admitted);
    let (keyed_request, mut other) = (gateway.keyed_request(1, 0, 1), DecisionContext::default());
    other.inputs.keyed_requests = vec![None, Some(keyed_request)].into();
    let (reads, other) = (Cell::new(0), RefCell::new(other));
    let keyed_requests = vec![Some(gateway.keyed_request(0, 0, 1)), Some(keyed_request)];
    let Gateway { charge_plan, table, context } = &mut gateway;
    context.inputs.keyed_requests = keyed_requests.into();
    let clock = || {
        reads.set(reads.get() + 1);
        if reads.get() == 1 {
            let opens = charge_plan.decide(table, DecisionTime::read(&|| 1001), &mut other.borrow_mut());
            assert!(matches!(opens, Decision::Admitted));
        }
        if reads.get() < 2 { 1000 } else { 1001 }
    };
    let decision = charge_plan.decide(table, DecisionTime::starting_at(1000, &clock), context);
    assert_eq!(outcome(&decision), DelayedUntil(1100));
}

/// Local usage of a later window is not taken for debt, and the store is still reads.
#[test]
fn local_usage_is_not_owed() {
    let layer = limit(3, Windows::FirstRequest { period_ms: 100 });
    let shared = Rule { sharing: Sharing::Lease, ..rule("only", vec![layer]) };
    let mut gateway = Gateway::with_large_table(&[shared]);
    let (keyed_request, only) = (gateway.keyed_request(0, 0, 1), gateway.layer(0, 0).id);
    let Gateway { charge_plan, table, context } = &mut gateway;
    let rule_set = charge_plan.rule_set();
    let mut step = |is_away: bool, now: DecisionTime<'_>| {
        context.clear();
        context.inputs.keyed_requests = vec![Some(keyed_request)].into();
        charge_plan.set_counting_modes(|_rule| is_away, &mut context.sharing.counting_modes);
        charge_plan.decide_locally(charge_plan.enforced(), table, now, context, true)
    };
    assert!(matches!(step(true, DecisionTime::read(&|| 1001)), LocalDecision::Decided(Decision::Admitted)));
    table.set_known_usage(rule_set.layer(only).counter(keyed_request), 1101, 0, 1001);
    assert!(matches!(step(false, DecisionTime::starting_at(1000, &|| 1001)), LocalDecision::MissingTokens));
    // The usage reported to the store is not too high either.
    assert_eq!(
        rule_set.reset_local(only, keyed_request, table, DecisionTime::starting_at(1000, &|| 1001), |_tokens| ()),
        1
    );
}

/// The full window has ended since the peek.
#[test]
fn a_reservation_that_is_due_passes_now() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(50), ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!([0; 2].map(|_| gateway.request(0, 1010)), [Admitted, Refused]);
    let Gateway { charge_plan, context, .. } = &gateway;
    assert_eq!(charge_plan.admission_times(charge_plan.time(1060), context), Some(vec![1100].into()));
    assert_eq!(charge_plan.admission_times(charge_plan.time(1200), context), Some(vec![1200].into()));
}

/// The store admits the request last, after the window of its local charge has ended.
#[test]
fn a_request_that_waits_for_the_store_is_charged_when_it_passes() {
    let own = Rule { on_limit: delay(1000), ..rule("own", vec![plain(1, 100)]) };
    let shared = Rule { on_limit: delay(1000), sharing: Sharing::Exact, ..rule("shared", vec![plain(1, 300)]) };
    let mut gateway = Gateway::with_large_table(&[own, shared]);
    let keyed_requests = [0, 1].map(|rule| Some(gateway.keyed_request(rule, 0, 1)));
    let Gateway { charge_plan, table, context } = &mut gateway;
    context.inputs.keyed_requests = keyed_requests.to_vec().into();
    charge_plan.set_counting_modes(|_rule| false, &mut context.sharing.counting_modes);
    let layers: Vec<LayerRef> = charge_plan.enforced().to_vec();
    let known: Vec<_> = layers
        .iter()
        .map(|layer_ref| (*layer_ref, Usage { used: 1, end_ms: [1000, 1200][layer_ref.position.index()] }))
        .collect();
    charge_plan.add_prepared_charges(&layers, table, 950, context);
    let time = charge_plan.time(950);
    let first = ChargePosition::FIRST;
    let recharge = charge_plan.request_future_windows(&vec![1000, 1200].into(), &known, time, context, first..first);
    assert_eq!(recharge, [layers[0]]);
    let charges = |context: &DecisionContext| -> Vec<_> {
        let charges = context.result.charges.iter();
        charges
            .map(|charge| (charge.is_full, charge.usage.end_ms, charge.request.floor, charge.request.ceiling))
            .collect()
    };
    assert_eq!(charges(context), [(true, 1000, 1, 2), (true, 1200, 1, 2)]);
    // The first is charged already, until its window ends. The other is admitted at once.
    for (end_ms, recharged) in [(950, true), (951, false)] {
        context.clear();
        charge_plan.add_prepared_charges(&layers, table, 950, context);
        context.result.charges.as_mut_slice()[0].usage.end_ms = end_ms;
        let recharge = charge_plan.request_future_windows(
            &vec![950, 950].into(),
            &[],
            time,
            context,
            first..ChargePosition::at(1),
        );
        assert_eq!(recharge, if recharged { vec![layers[0]] } else { vec![] });
        assert_eq!(charges(context)[1].2, 0);
    }
}

/// Debt may belong to a window that has begun meanwhile. Other refusals are final, and so is one at a clock that stands.
#[test]
fn the_clock_is_read_again_only_because_of_debt() {
    let debt = rule("debt", vec![Limit { capacity: Some(2), ..plain(1, 1000) }]);
    let mut gateway = Gateway::with_large_table(&[debt, rule("plain", vec![plain(1, 1000)])]);
    let reads = Cell::new(0);
    let clock = || {
        reads.set(reads.get() + 1);
        1000
    };
    for (costs, expected, expected_reads) in [([1, 1], Admitted, 0), ([1, 1], Refused, 0), ([2, 0], Refused, 1)] {
        let now = DecisionTime::starting_at(1000, &clock);
        assert_eq!(outcome(&gateway.decide_at(0, &costs.map(Some), now)), expected);
        assert_eq!(reads.take(), expected_reads);
        gateway.charge_plan.peek(&gateway.table, now, &mut gateway.context);
        assert_eq!(reads.take(), expected_reads);
    }
}

/// The clock may advance at each read.
#[test]
fn the_clock_is_read_a_bounded_number_of_times() {
    let mut gateway =
        Gateway::with_large_table(&[rule("only", vec![Limit { capacity: Some(2), ..plain(1, 1_000_000) }])]);
    assert_eq!([0; 2].map(|_| gateway.request(0, 1000)), [Admitted; 2]);
    let clock = Cell::new(1000);
    let read = || clock.replace(clock.get() + 1);
    assert_eq!(outcome(&gateway.decide_at(0, &[Some(1)], DecisionTime::read(&read))), Refused);
    assert!(clock.get() < 1100);
}

proptest! {
    #![proptest_config(config())]

    /// A late thread refuses a request only if it would also be refused at the current time, in windows that depend on
    /// each other.
    #[test]
    fn no_request_is_refused_for_being_late(
        (tokens, more, windows) in (1..5u32, 1..5u32, windows()),
        events in prop::collection::vec((0..40u64, 0..40u64, 0..4u32), 1..60),
    ) {
        let layer = Limit { capacity: Some(tokens + more), ..limit(tokens, windows) };
        let mut gateway = Gateway::with_large_table(&[rule("only", vec![layer])]);
        let mut now_ms = START_MS;
        for (advance_ms, behind_ms, cost) in events {
            now_ms += advance_ms;
            let clock = || now_ms;
            let late = DecisionTime::starting_at(now_ms - behind_ms, &clock);
            if outcome(&gateway.decide_at(0, &[Some(cost)], late)) == Refused {
                prop_assert_eq!(gateway.request_tokens(0, cost, now_ms), Refused);
            }
        }
    }
}
