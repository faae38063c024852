//! What each rule makes of a request, as metrics, logs and reports state it.

use transom_limiter::concurrency::{ConcurrencyUsage, SlotState};
use transom_limiter::decision::Decision;
use transom_limiter::handles::{Handle, PlanPosition};
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::rule_set;
use transom_limiter::verdict::Outcome::{self, *};

use crate::support::{Gateway, delay, plain, rule};

fn outcomes(gateway: &Gateway<8>, decision: &Decision) -> Vec<Outcome> {
    gateway.charge_plan.verdicts(&gateway.context, decision).rules().map(|verdict| verdict.outcome()).collect()
}

/// Each rule admits one request of a client in a window.
#[test]
fn windows_give_each_rule_an_outcome() {
    let shadow = Rule { on_limit: OnLimit::Shadow, ..rule("shadow", vec![plain(1, 100)]) };
    for (on_limit, second) in
        [(OnLimit::Refuse, [Refused, RefusedElsewhere, RefusedElsewhere]), (delay(100), [Delayed, Admitted, Shadowed])]
    {
        let first = Rule { on_limit, ..rule("first", vec![plain(1, 100)]) };
        let mut gateway = Gateway::with_large_table(&[first, rule("wide", vec![plain(9, 100)]), shadow.clone()]);
        for expected in [[Admitted, Admitted, Admitted], second] {
            let decision = gateway.decide(0, &[Some(1); 3], 0);
            assert_eq!(outcomes(&gateway, &decision), expected);
        }
        let decision = gateway.decide(1, &[None, Some(1), None], 0);
        gateway.context.inputs.uncounted.push((PlanPosition::at(2), rule_set::NotCounted::Exempt));
        let reasons = [rule_set::NotCounted::Skipped, rule_set::NotCounted::Exempt].map(NotCounted);
        assert_eq!(outcomes(&gateway, &decision), [reasons[0], Admitted, reasons[1]]);
    }
}

#[test]
fn slots_give_each_rule_an_outcome() {
    let mut gateway = Gateway::with_large_table(&[rule("r", vec![plain(9, 100)])]);
    for (state, decision, expected) in [
        (SlotState::Free, Decision::Admitted, Admitted),
        (SlotState::Waited, Decision::Admitted, Waited),
        (SlotState::Shadowed, Decision::Admitted, Shadowed),
        (SlotState::Full, Decision::Refused, Refused),
        (SlotState::Free, Decision::Refused, RefusedElsewhere),
    ] {
        gateway.decide(0, &[Some(1)], 0);
        let usage = ConcurrencyUsage { position: PlanPosition::at(0), limit: 1, in_use: 1, state };
        gateway.context.result.concurrency = vec![usage];
        assert_eq!(outcomes(&gateway, &decision), [expected], "{state:?}");
    }
}
