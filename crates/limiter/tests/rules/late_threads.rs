//! Requests that were held up between the moment in which they learned the time and that in which they are counted.
//! Others have opened windows meanwhile that by their time are yet to begin.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use transom_limiter::counter::Usage;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::rule_set::LayerRef;
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::window::Windows;

use crate::config;
use crate::oracle::Expected::{self, Admitted, DelayedUntil, Refused};
use crate::support::{Gateway, START_MS, decision, delay, limit, plain, rule, windows};

/// Asks for one token at a time that was `then_ms` once and is `now_ms`.
fn ask_late(gateway: &mut Gateway<8>, then_ms: u64, now_ms: u64) -> Expected {
    decision(&gateway.judge_late(0, &[Some(1)], DecisionTime::starting_at(then_ms, &|| now_ms)))
}

#[test]
fn a_window_opened_by_another_thread_is_not_owed() {
    let floating = Limit { capacity: 3, ..limit(3, Windows::FirstRequest { period_ms: 100 }) };
    let rolling = Limit { capacity: 4, ..plain(3, 100) };
    for (layer, on_limit, opened_ms) in [
        (floating.clone(), rule("", vec![]).on_limit, 1001),
        (floating, delay(1000), 1001),
        (rolling.clone(), rule("", vec![]).on_limit, 1100),
        (rolling, delay(1000), 1100),
    ] {
        let mut gateway = Gateway::roomy(&[Rule { on_limit, ..rule("only", vec![layer]) }]);
        assert_eq!([0; 2].map(|_| gateway.ask(0, opened_ms)), [Admitted; 2]);
        assert_eq!(ask_late(&mut gateway, opened_ms - 1, opened_ms), Admitted);
        assert_eq!(gateway.left().1, opened_ms + 100, "in the window that is open");
        assert_eq!(gateway.context.result.decided_ms, opened_ms, "and told by the time in it");
    }
}

#[test]
fn a_late_thread_still_owes_debts() {
    let on_limit = delay(100);
    let mut gateway = Gateway::roomy(&[Rule { on_limit, ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!([0; 2].map(|_| gateway.ask(0, 1050)), [Admitted, DelayedUntil(1100)]);
    assert_eq!(ask_late(&mut gateway, 1040, 1060), Refused);
    assert_eq!(ask_late(&mut gateway, 1040, 1105), DelayedUntil(1200));
}

/// Another opens a window of a rule that had room while the request looks for a place in one that is full.
#[test]
fn a_window_opened_during_a_reservation_is_not_owed() {
    let slow = Rule { on_limit: delay(1000), ..rule("slow", vec![plain(1, 100)]) };
    let floats = rule("floats", vec![limit(3, Windows::FirstRequest { period_ms: 100 })]);
    let mut gateway = Gateway::roomy(&[slow, floats]);
    assert_eq!(decision(&gateway.judge(0, &[Some(1), None], 1000)), Admitted);
    let (keyed_request, mut other) = (gateway.keyed_request(1, 0, 1), DecisionContext::default());
    other.inputs.keyed_requests = vec![None, Some(keyed_request)];
    let (asked, other) = (Cell::new(0), RefCell::new(other));
    let keyed_requests = vec![Some(gateway.keyed_request(0, 0, 1)), Some(keyed_request)];
    let Gateway { rule_set, charge_plan, table, context } = &mut gateway;
    context.inputs.keyed_requests = keyed_requests;
    let clock = || {
        asked.set(asked.get() + 1);
        if asked.get() == 1 {
            let opens = rule_set.decide(charge_plan, table, DecisionTime::read(&|| 1001), &mut other.borrow_mut());
            assert!(matches!(opens, Decision::Admitted));
        }
        if asked.get() < 2 { 1000 } else { 1001 }
    };
    let judgement = rule_set.decide(charge_plan, table, DecisionTime::starting_at(1000, &clock), context);
    assert_eq!(decision(&judgement), DelayedUntil(1100));
}

/// What was counted here without the store is not taken for more than it is, and the store is asked.
#[test]
fn local_usage_is_not_owed() {
    let layer = limit(3, Windows::FirstRequest { period_ms: 100 });
    let shared = Rule { sharing: Sharing::Lease, ..rule("only", vec![layer]) };
    let mut gateway = Gateway::roomy(&[shared]);
    let keyed_request = gateway.keyed_request(0, 0, 1);
    let Gateway { rule_set, charge_plan, table, context } = &mut gateway;
    let mut step = |is_away: bool, now: DecisionTime<'_>| {
        context.clear();
        context.inputs.keyed_requests = vec![Some(keyed_request)];
        rule_set.set_counting_modes(charge_plan, |_rule| is_away, &mut context.sharing.counting_modes);
        rule_set.decide_locally(charge_plan, charge_plan.enforced(), table, now, context, true)
    };
    assert!(matches!(step(true, DecisionTime::read(&|| 1001)), LocalDecision::Decided(Decision::Admitted)));
    table.set_known_usage(rule_set.rules[0].layer(0).counter(keyed_request), 1101, 0, 1001);
    assert!(matches!(step(false, DecisionTime::starting_at(1000, &|| 1001)), LocalDecision::MissingTokens));
    // Nor is the store told of more.
    assert_eq!(
        rule_set.reset_local(0, 0, keyed_request, table, DecisionTime::starting_at(1000, &|| 1001), |_tokens| ()),
        1
    );
}

/// The window that was full has ended since it was looked at.
#[test]
fn a_reservation_that_is_due_passes_now() {
    let mut gateway = Gateway::roomy(&[Rule { on_limit: delay(50), ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!([0; 2].map(|_| gateway.ask(0, 1010)), [Admitted, Refused]);
    let Gateway { rule_set, charge_plan, context, .. } = &gateway;
    assert_eq!(rule_set.admission_times(charge_plan, rule_set.time(1060), context), Some(vec![1100]));
    assert_eq!(rule_set.admission_times(charge_plan, rule_set.time(1200), context), Some(vec![1200]));
}

/// The last to let it pass is the store, and the window in which it has a place here is over by then.
#[test]
fn a_request_that_waits_for_the_store_is_charged_when_it_passes() {
    let own = Rule { on_limit: delay(1000), ..rule("own", vec![plain(1, 100)]) };
    let shared = Rule { on_limit: delay(1000), sharing: Sharing::Exact, ..rule("shared", vec![plain(1, 300)]) };
    let mut gateway = Gateway::roomy(&[own, shared]);
    let keyed_requests = [0, 1].map(|rule| Some(gateway.keyed_request(rule, 0, 1)));
    let Gateway { rule_set, charge_plan, table, context } = &mut gateway;
    context.inputs.keyed_requests = keyed_requests.to_vec();
    rule_set.set_counting_modes(charge_plan, |_rule| false, &mut context.sharing.counting_modes);
    let lines: Vec<LayerRef> = charge_plan.enforced().to_vec();
    let told: Vec<_> = lines.iter().map(|line| (*line, Usage { used: 1, end_ms: [1000, 1200][line.rule] })).collect();
    rule_set.add_prepared_charges(charge_plan, &lines, table, 950, context);
    let again = rule_set.request_future_windows(charge_plan, &[1000, 1200], &told, rule_set.time(950), context, 0, 0);
    assert_eq!(again, [LayerRef { rule: 0, layer: 0 }]);
}

/// A clock may go on each time that it is asked.
#[test]
fn the_clock_is_read_a_bounded_number_of_times() {
    let mut gateway = Gateway::roomy(&[rule("only", vec![Limit { capacity: 2, ..plain(1, 1_000_000) }])]);
    assert_eq!([0; 2].map(|_| gateway.ask(0, 1000)), [Admitted; 2]);
    let clock = Cell::new(1000);
    let again = || clock.replace(clock.get() + 1);
    assert_eq!(decision(&gateway.judge_late(0, &[Some(1)], DecisionTime::read(&again))), Refused);
    assert!(clock.get() < 1100);
}

proptest! {
    #![proptest_config(config())]

    /// Where windows hang together, whoever is refused late by one counter would be refused as well if he came now.
    #[test]
    fn no_request_is_refused_for_being_late(
        (tokens, more, windows) in (1..5u32, 1..5u32, windows()),
        events in prop::collection::vec((0..40u64, 0..40u64, 0..4u32), 1..60),
    ) {
        let layer = Limit { capacity: tokens + more, ..limit(tokens, windows) };
        let mut gateway = Gateway::roomy(&[rule("only", vec![layer])]);
        let mut now_ms = START_MS;
        for (moves_ms, behind_ms, cost) in events {
            now_ms += moves_ms;
            let clock = || now_ms;
            let late = DecisionTime::starting_at(now_ms - behind_ms, &clock);
            if decision(&gateway.judge_late(0, &[Some(cost)], late)) == Refused {
                prop_assert_eq!(gateway.ask_for(0, cost, now_ms), Refused);
            }
        }
    }
}
