//! Slots of requests in flight, by the rules of a route.

use transom_limiter::concurrency::{ConcurrencyUsage, Slot, SlotState};
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition};
use transom_limiter::key::KeyPart;
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::slot_decision::SlotsResult;

use crate::support::{Gateway, delay, plain, rule};

fn concurrent(name: &str, slots: u32, on_limit: OnLimit) -> Rule {
    Rule { concurrent: Some(slots), on_limit, ..rule(name, vec![]) }
}

/// Takes slots for client 0, of all rules or of those after one; the rules whose slots the request then holds.
fn acquire(gateway: &mut Gateway<8>, after: Option<usize>) -> (SlotsResult, Vec<(usize, Slot)>) {
    let requests = (0..gateway.charge_plan.rules().len()).map(|rule| Some(gateway.keyed_request(rule, 0, 1))).collect();
    gateway.context.inputs.keyed_requests = requests;
    let (Gateway { charge_plan, context, .. }, mut held) = (gateway, Vec::new());
    let result =
        charge_plan.acquire_slots(context, after.map(PlanPosition::at), |rule, slot| held.push((rule.index(), slot)));
    (result, held)
}

/// Rule, limit, slots in use, and state, as reported.
fn reported(gateway: &Gateway<8>) -> Vec<(usize, u32, u64, SlotState)> {
    let usage = |usage: &ConcurrencyUsage| (usage.position.index(), usage.limit, usage.in_use, usage.state);
    gateway.context.result.concurrency.iter().map(usage).collect()
}

/// Rules of one client before those of all, those that refuse before those that wait, and shadow rules last.
#[test]
fn slots_are_taken_in_one_order() {
    let global = |name, on_limit| Rule { key: vec![KeyPart::GLOBAL], ..concurrent(name, 9, on_limit) };
    let rules = [
        concurrent("shadow", 9, OnLimit::Shadow),
        global("all wait", delay(9)),
        global("all", OnLimit::Refuse),
        rule("windows only", vec![plain(1, 100)]),
        concurrent("waits", 9, delay(9)),
        concurrent("refuses", 9, OnLimit::Refuse),
    ];
    let mut gateway = Gateway::with_large_table(&rules);
    assert!(gateway.charge_plan.limits_concurrency());
    let (result, held) = acquire(&mut gateway, None);
    assert_eq!(result, SlotsResult::Acquired);
    assert_eq!(held.iter().map(|(rule, _)| *rule).collect::<Vec<_>>(), [5, 4, 2, 1, 0]);
    let (_, held) = acquire(&mut gateway, Some(2));
    assert_eq!(held.iter().map(|(rule, _)| *rule).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(reported(&gateway).len(), 7, "those taken before are kept");
}

#[test]
fn a_request_without_a_free_slot_waits_or_is_refused_or_is_shadowed() {
    for (on_limit, expected, state) in [
        (OnLimit::Refuse, SlotsResult::Refused, SlotState::Full),
        (delay(9), SlotsResult::Full(PlanPosition::at(0)), SlotState::Full),
        (OnLimit::Shadow, SlotsResult::Acquired, SlotState::Shadowed),
    ] {
        let mut gateway = Gateway::with_large_table(&[concurrent("r", 2, on_limit)]);
        let held = [0; 2].map(|_| acquire(&mut gateway, None));
        assert_eq!(reported(&gateway), [(0, 2, 2, SlotState::Free)]);
        let is_shadow = on_limit == OnLimit::Shadow;
        gateway.charge_plan.peek_slots(&mut gateway.context);
        assert_eq!(reported(&gateway), if is_shadow { vec![] } else { vec![(0, 2, 2, SlotState::Free)] });
        assert_eq!(acquire(&mut gateway, None).0, expected);
        assert_eq!(
            (reported(&gateway), gateway.context.result.concurrency[0].remaining()),
            (vec![(0, 2, 2, state)], 0)
        );
        assert_eq!(gateway.context.inputs.keyed_requests[PlanPosition::at(0)].is_none(), is_shadow);
        gateway.context.slots_released();
        assert_eq!(reported(&gateway), [(0, 2, 2, state)], "it held none");
        drop(held);
        let (result, held) = acquire(&mut gateway, None);
        assert_eq!((result, gateway.context.result.concurrency[0].remaining()), (SlotsResult::Acquired, 1));
        drop(held);
        gateway.context.slots_released();
        assert_eq!(reported(&gateway), [(0, 2, 0, SlotState::Free)]);
        let queued = gateway.charge_plan.queue_slot(&gateway.context, PlanPosition::at(0)).expect("the rule applies");
        assert_eq!(gateway.rule_set().concurrency.in_use(queued_key(&gateway)), 1);
        drop(queued);
        gateway.context.inputs.keyed_requests[PlanPosition::at(0)] = None;
        assert!(gateway.charge_plan.queue_slot(&gateway.context, PlanPosition::at(0)).is_none());
    }
}

fn queued_key(gateway: &Gateway<8>) -> transom_limiter::key::KeyHash {
    gateway.keyed_request(0, 0, 1).key
}

/// A request without a slot takes tokens only where refusals count.
#[test]
fn a_refusal_for_lack_of_a_slot_is_counted_where_refusals_count() {
    for (count_refused, used) in [(false, 0), (true, 1)] {
        let layers = vec![plain(5, 100)];
        let mut gateway =
            Gateway::with_large_table(&[Rule { count_refused, layers, ..concurrent("r", 1, OnLimit::Refuse) }]);
        let _held = acquire(&mut gateway, None);
        assert_eq!(acquire(&mut gateway, None).0, SlotsResult::Refused);
        let Gateway { charge_plan, table, context } = &mut gateway;
        charge_plan.refuse(table, DecisionTime::read(&|| 50), context, &[]);
        assert_eq!(context.result.charges.as_slice()[0].usage.used, used);
    }
}
