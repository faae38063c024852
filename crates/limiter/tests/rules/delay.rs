//! Delayed requests, counted refusals, and the time to retry.

use std::sync::Arc;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::handles::{Handle, PlanPosition, RuleId};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Rule};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

use crate::oracle::Expected::{self, Admitted, DelayedUntil, Refused};
use crate::support::{Gateway, delay, limit, plain, rule};

/// Each delayed request gets the next free token. None overtakes another.
#[test]
fn waiters_pass_in_order() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(2, 100)]) }]);
    let results: Vec<Expected> = (0..9).map(|_| gateway.request(0, 50)).collect();
    let at = DelayedUntil;
    assert_eq!(results, [Admitted, Admitted, at(100), at(100), at(200), at(200), at(300), at(300), Refused]);
    assert_eq!(gateway.request(0, 120), DelayedUntil(400), "a new request waits behind the others");
    assert_eq!(gateway.charge_plan.max_delay_ms(), 300);
    assert_eq!(gateway.retry_at_ms(120), Some(120));
}

/// A request is refused if the next free window opens after `max_delay_ms`.
#[test]
fn no_request_waits_longer_than_max_delay() {
    for (max_delay_ms, last) in [(49, Refused), (50, DelayedUntil(100)), (149, Refused), (150, DelayedUntil(200))] {
        let mut gateway =
            Gateway::with_large_table(&[Rule { on_limit: delay(max_delay_ms), ..rule("only", vec![plain(1, 100)]) }]);
        let count = if max_delay_ms < 100 { 2 } else { 3 };
        let results: Vec<Expected> = (0..count).map(|_| gateway.request(0, 50)).collect();
        assert_eq!(results.last(), Some(&last), "at most {max_delay_ms} ms");
    }
}

#[test]
fn the_number_of_waiters_is_limited() {
    let on_limit = OnLimit::Delay { max_delay_ms: 10_000, max_waiting: 2 };
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit, ..rule("only", vec![plain(1, 100)]) }]);
    let mut waiting: Vec<Decision> = (0..3).map(|_| gateway.decide(0, &[Some(1)], 50)).collect();
    assert!(matches!(waiting[1..], [Decision::Delayed { .. }, Decision::Delayed { .. }]));
    assert_eq!(gateway.request(0, 50), Refused);
    assert_eq!(gateway.remaining().0, -2, "the refused request reserved nothing");
    // After one waiter is done, another may wait.
    waiting.remove(1);
    assert_eq!(gateway.request(0, 50), DelayedUntil(300));
}

/// The next request gets the refunded token. Earlier windows do not change.
#[test]
fn a_refunded_reservation_goes_to_the_next_request() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(10, 100)]) }]);
    assert_eq!(gateway.request_tokens(0, 7, 50), Admitted);
    assert_eq!(gateway.request_tokens(0, 5, 50), DelayedUntil(100), "three are left");
    let receipts: Vec<_> = gateway.context.all_receipts().collect();
    gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, 60);
    assert_eq!((gateway.request_tokens(0, 3, 60), gateway.remaining().0), (Admitted, 0));
}

/// The second request cancels its wait. The third, which waits behind it, keeps its window.
#[test]
fn an_abandoned_wait_moves_no_other_waiter() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(1, 100)]) }]);
    assert_eq!([gateway.request(0, 50), gateway.request(0, 50)], [Admitted, DelayedUntil(100)]);
    let receipts: Vec<_> = gateway.context.all_receipts().collect();
    assert_eq!(gateway.request(0, 50), DelayedUntil(200));
    gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, 60);
    assert_eq!(gateway.request(0, 200), DelayedUntil(300), "another request has the window at 200");
}

/// A cancelled wait refunds charges of its own counter and touches no other, so its cost does not depend on the number
/// of keys. The sweep touches all.
#[test]
fn an_abandoned_wait_retries_refunds_of_its_counter_only() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(1, 100)]) }]);
    let (abandoned, mut charges) = (DeferredRefunds::default(), Vec::new());
    for client in [0, 1] {
        assert_eq!(gateway.request(client, 50), Admitted);
        for until_ms in [100, 200] {
            assert_eq!(gateway.request(client, 50), DelayedUntil(until_ms));
            charges.push(gateway.context.all_receipts().collect::<Vec<_>>());
        }
    }
    let keyed_requests = [gateway.keyed_request(0, 0, 1), gateway.keyed_request(0, 1, 1)];
    let rule_set = Arc::clone(gateway.rule_set());
    let leave =
        |charges: &Vec<ShardReceipt>| abandoned.refund(charges.iter().copied(), 300, &rule_set, &gateway.table, 60);
    let used = || {
        keyed_requests.map(|keyed_request| {
            let mut context = DecisionContext::default();
            context.inputs.keyed_requests.push(Some(keyed_request));
            gateway.charge_plan.peek(&gateway.table, DecisionTime::read(&|| 60), &mut context);
            context.result.charges.as_slice()[0].usage.used
        })
    };
    // Of each client, the first request to be cancelled has another charge behind it.
    leave(&charges[0]);
    leave(&charges[2]);
    assert_eq!(used(), [3, 3]);
    // The charge behind the first client's is refunded directly, without `DeferredRefunds`.
    rule_set.refund(&charges[1], u32::MAX, &gateway.table, 60);
    leave(&charges[3]);
    assert_eq!(used(), [2, 1]);
    abandoned.sweep(&gateway.table, 60);
    assert_eq!(used(), [1, 1]);
}

/// Four requests wait in two windows, and the first forfeits tokens. Cancelled in any order, they leave the counter as it was.
#[test]
fn all_waits_abandoned_in_any_order_refund_everything() {
    for order in 0..256_usize {
        let order = [order & 3, order >> 2 & 3, order >> 4 & 3, order >> 6];
        if (0..4).any(|nth| !order.contains(&nth)) {
            continue;
        }
        let mut gateway =
            Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(100, 100)]) }]);
        assert_eq!(gateway.request_tokens(0, 60, 50), Admitted);
        let charges = [100, 100, 200, 200].map(|until_ms| {
            assert_eq!(gateway.request_tokens(0, 50, 50), DelayedUntil(until_ms));
            gateway.context.all_receipts().collect::<Vec<_>>()
        });
        let (abandoned, rule_set) = (DeferredRefunds::default(), Arc::clone(gateway.rule_set()));
        for nth in order {
            abandoned.refund(charges[nth].iter().copied(), 300, &rule_set, &gateway.table, 60);
        }
        gateway.charge_plan.peek(&gateway.table, DecisionTime::read(&|| 60), &mut gateway.context);
        assert_eq!(gateway.context.result.charges.as_slice()[0].usage.used, 60, "{order:?}");
    }
}

/// A token that was refunded is reserved again, up to the same usage as another reservation, and both are cancelled while a third one
/// waits behind them.
#[test]
fn two_abandoned_waits_in_one_place_are_both_refunded() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(300), ..rule("only", vec![plain(2, 100)]) }]);
    let (abandoned, rule_set) = (DeferredRefunds::default(), Arc::clone(gateway.rule_set()));
    assert_eq!(gateway.request_tokens(0, 2, 50), Admitted);
    let reserve = |gateway: &mut Gateway<8>, until_ms| {
        assert_eq!(gateway.request(0, 50), DelayedUntil(until_ms));
        gateway.context.all_receipts().collect::<Vec<_>>()
    };
    let leave = |gateway: &Gateway<8>, charges: Vec<ShardReceipt>| {
        abandoned.refund(charges, 300, &rule_set, &gateway.table, 60);
    };
    let [first, second] = [100, 100].map(|until_ms| reserve(&mut gateway, until_ms));
    leave(&gateway, first);
    let [third, last] = [100, 200].map(|until_ms| reserve(&mut gateway, until_ms));
    assert_eq!(third[0].receipt, second[0].receipt);
    [second, third, last].into_iter().for_each(|charges| leave(&gateway, charges));
    gateway.charge_plan.peek(&gateway.table, DecisionTime::read(&|| 60), &mut gateway.context);
    assert_eq!(gateway.context.result.charges.as_slice()[0].usage.used, 2);
}

/// The layer with the longer window delays the request. The other layer charges it in the window in which it is
/// admitted.
#[test]
fn a_delayed_request_is_charged_in_all_layers_when_it_passes() {
    let layers = vec![plain(2, 100), plain(3, 1000)];
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(2000), ..rule("only", layers) }]);
    for now_ms in [0, 0, 100] {
        assert_eq!(gateway.request(0, now_ms), Admitted);
    }
    assert_eq!(gateway.request(0, 110), DelayedUntil(1000));
    assert_eq!(gateway.request(0, 1000), Admitted, "the second of two tokens");
    assert_eq!(gateway.request(0, 1000), DelayedUntil(1100), "both tokens are used");
}

/// While a request waits for one rule, the windows of others end: it is charged there again.
#[test]
fn a_delayed_request_is_charged_again_where_windows_have_ended() {
    let floating = Windows::FirstRequest { period_ms: 100 };
    let rules = [
        Rule { on_limit: delay(1000), ..rule("delays", vec![plain(1, 150)]) },
        rule("sliding", vec![limit(9, Windows::Sliding { period_ms: 800 })]),
        rule("floating", vec![limit(9, floating)]),
        rule("hour", vec![plain(9, 3_600_000)]),
    ];
    let mut gateway = Gateway::with_large_table(&rules);
    assert_eq!(gateway.request(0, 10), Admitted);
    let decision = gateway.decide(0, &[Some(1); 4], 60);
    let Decision::Delayed { until_ms: 150, recharge, .. } = decision else { panic!("{decision:?}") };
    let rules: Vec<usize> = recharge.iter().map(|layer_ref| layer_ref.position.index()).collect();
    assert_eq!(rules, [2, 1], "their windows end at 110 and 100");
}

/// A decision that cannot wait can still take a reserve.
#[test]
fn a_rule_that_delays_may_have_a_reserve() {
    for (reserve, expected) in [(0, Refused), (1, DelayedUntil(100))] {
        let layers = vec![Limit { reserve, ..plain(1, 100) }];
        let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(1000), ..rule("only", layers) }]);
        gateway.charge_plan = gateway.rule_set().immediate_plan([RuleId::at(0)], true);
        gateway.context.inputs.reserve = true;
        assert_eq!([gateway.request(0, 50), gateway.request(0, 50)], [Admitted, expected]);
    }
}

/// A full rule that does not delay refuses the request, although another full rule would delay it.
#[test]
fn a_request_waits_only_if_every_full_rule_delays() {
    let rules =
        [Rule { on_limit: delay(1000), ..rule("delays", vec![plain(2, 100)]) }, rule("refuses", vec![plain(3, 1000)])];
    let mut gateway = Gateway::with_large_table(&rules);
    let results: Vec<Expected> = (0..4).map(|_| gateway.request(0, 50)).collect();
    assert_eq!(results, [Admitted, Admitted, DelayedUntil(100), Refused]);
}

/// Three tokens are left. A refused request for five takes them, and five of the layer that has enough.
#[test]
fn count_refused_charges_refused_requests() {
    for (count_refused, left) in [(false, [3, 93]), (true, [0, 88])] {
        let layers = vec![plain(10, 100), plain(100, 1000)];
        let mut gateway = Gateway::with_large_table(&[Rule { count_refused, ..rule("only", layers) }]);
        assert_eq!([gateway.request_tokens(0, 7, 50), gateway.request_tokens(0, 5, 50)], [Admitted, Refused]);
        let charges = &gateway.context.result.charges;
        let now: Vec<u64> = charges.iter().map(|charge| charge.request.ceiling - charge.usage.used).collect();
        assert_eq!(now, left);
    }
}

/// A refused request takes the last tokens of another layer: the refusal states when that layer has tokens again.
#[test]
fn a_counted_refusal_reports_the_layer_it_emptied() {
    let layers = vec![plain(1, 100), plain(3, 1000)];
    let mut gateway = Gateway::with_large_table(&[Rule { count_refused: true, ..rule("only", layers) }]);
    assert_eq!([gateway.request(0, 50), gateway.request(0, 50)], [Admitted, Refused]);
    assert_eq!(gateway.retry_at_ms(50), Some(100), "the wider layer has one token left");
    assert_eq!((gateway.request(0, 50), gateway.retry_at_ms(50)), (Refused, Some(1000)));
    assert_eq!([gateway.request(0, 999), gateway.request(0, 1000)], [Refused, Admitted]);
}

/// What a refusal would take, and the penalty that it would begin, count before the request is refused.
#[test]
fn a_peek_tells_when_a_refused_request_may_be_retried() {
    let layers = vec![plain(1, 100), plain(2, 1000)];
    for (penalty_ms, count_refused, retry_ms, used) in
        [(None, false, 100, 1), (None, true, 1000, 2), (Some(500), false, 550, 1), (Some(5000), true, 5050, 2)]
    {
        let mut gateway =
            Gateway::with_large_table(&[Rule { penalty_ms, count_refused, ..rule("only", layers.clone()) }]);
        assert_eq!(gateway.request(0, 50), Admitted);
        let wide = gateway.layer(0, 1);
        let Gateway { charge_plan, table, context } = &mut gateway;
        assert!(!charge_plan.peek(table, DecisionTime::read(&|| 50), context));
        assert_eq!(charge_plan.retry_at_ms(context, 50), Some(100));
        assert_eq!(charge_plan.retry_at_ms_once_refused(Some(table), context, 50), Some(retry_ms));
        assert_eq!(context.charge_of(wide).map(|charge| charge.usage.used), Some(used));
    }
}

/// In a sliding window, the tokens that a refusal takes come back one period after it.
#[test]
fn a_peek_tells_when_a_refused_request_may_be_retried_in_a_sliding_window() {
    for (cost, now_ms) in [(2, 300), (3, 300), (2, 900), (4, 1000)] {
        let layers = vec![Limit { windows: Windows::Sliding { period_ms: 800 }, ..plain(4, 800) }];
        let mut gateway = Gateway::with_large_table(&[Rule { count_refused: true, ..rule("only", layers) }]);
        assert_eq!([gateway.request_tokens(0, 2, 100), gateway.request_tokens(0, 1, 250)], [Admitted, Admitted]);
        let Gateway { charge_plan, table, context } = &mut gateway;
        context.inputs.keyed_requests[PlanPosition::at(0)].as_mut().unwrap().cost = cost;
        assert!(!charge_plan.peek(table, DecisionTime::read(&|| now_ms), context), "{cost} at {now_ms}");
        let told = charge_plan.retry_at_ms_once_refused(Some(table), context, now_ms);
        assert_eq!(gateway.request_tokens(0, cost, now_ms), Refused);
        assert_eq!(told, gateway.retry_at_ms(now_ms), "{cost} at {now_ms}");
    }
}

/// A cost is owed in the present window, also by a thread whose time is behind.
#[test]
fn a_late_response_cost_is_paid() {
    let mut gateway =
        Gateway::new(&[rule("only", vec![plain(1, 10)])], Table::<1>::with_buckets(1, 1).expect("there is memory"));
    assert_eq!([gateway.request(0, 0), gateway.request(2, 100)], [Admitted; 2]);
    gateway.rule_set().charge_excess(RuleId::at(0), gateway.keyed_request(0, 0, 1), &gateway.table, 5);
    assert_eq!(gateway.request(0, 6), Refused);
}

/// Later windows pay for a cost that exceeds the capacity.
#[test]
fn a_response_cost_is_paid_window_by_window() {
    let cost = Cost::Response { source: Some("cost".to_owned()), reserve: 1, max: 1000 };
    let mut gateway = Gateway::with_large_table(&[Rule {
        cost,
        ..rule("only", vec![Limit { capacity: Some(15), ..plain(10, 100) }])
    }]);
    assert_eq!(gateway.request(0, 50), Admitted);
    let keyed_request = gateway.keyed_request(0, 0, 44);
    gateway.rule_set().charge_excess(RuleId::at(0), keyed_request, &gateway.table, 60);
    for (now_ms, left) in [(60, -30), (100, -20), (299, -10), (300, 0), (400, 10), (500, 15)] {
        gateway.request_tokens(0, 0, now_ms);
        assert_eq!(gateway.remaining().0, left, "at {now_ms}");
    }
}

#[test]
fn a_shadow_rule_counts_and_admits() {
    let mut gateway =
        Gateway::with_large_table(&[Rule { on_limit: OnLimit::Shadow, ..rule("tried", vec![plain(2, 100)]) }]);
    for refused in [false, false, true, true] {
        assert_eq!(gateway.request(0, 50), Admitted);
        assert_eq!(gateway.context.result.shadowed, if refused { vec![PlanPosition::at(0)] } else { vec![] });
    }
}
