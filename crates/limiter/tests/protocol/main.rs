//! A model of the protocol by which gateways share counters, in every order of its steps: two gateways, two counters, a few
//! tokens, the end of a window, lost calls, kills, failovers and servers that restart without their data.
//!
//! A gateway's own decisions use the limiter (`gateway_counters`); the store follows the Lua scripts (`state`); the code
//! between them (`gateway`, `steps`) is written here again, without waiting. `explore` visits every reachable state. Each
//! property is a sentence; each deliberate mistake violates its property.

mod explore;
mod gateway;
mod gateway_counters;
mod scenario;
mod state;
mod steps;

use explore::{Exploration, explore};
use scenario::{Mistake, Scenario};
use state::Budget;

/// While the store loses no data, the limit is never exceeded. After a failover, an empty restart or a reset, it is
/// exceeded by at most the usage that the store lost and that no gateway reported again.
pub const NEVER_OVER: &str = "admitted requests never exceed the limit plus the usage that the store lost";
pub const GRANTED_ONCE: &str = "every token is granted once";
pub const ALL_ACCOUNTED_FOR: &str = "tokens counted by the store were admitted, are outstanding, or were lost";
pub const NOT_RESENT: &str = "a call with an unknown result is not resent";
pub const REMEMBERED: &str = "usage known to a gateway is not granted to it again by the next server";
pub const REFUSALS_BOUNDED: &str = "early refusals are bounded by outstanding tokens";
pub const NOT_REFUSED_FOREVER: &str = "after all refunds, no request with remaining tokens is refused";

/// Asserts that all states of a scenario satisfy all properties.
fn holds(scenario: Scenario) {
    let Exploration { states, broken, trace } = explore(scenario, None);
    assert_eq!(broken, None, "{scenario:?}, after {states} states\n{trace}");
}

/// Asserts that a mistake violates a property.
fn breaks(scenario: Scenario, mistake: Mistake, property: &str) {
    let Exploration { states, broken, trace } = explore(scenario.with_mistake(mistake), Some(property));
    assert_eq!(broken, Some(property), "{mistake:?}, after {states} states\n{trace}");
}

fn all() -> [Scenario; 6] {
    let scenarios = [Scenario::leased(), Scenario::exact(), Scenario::mixed()];
    [
        scenarios[0],
        scenarios[1],
        scenarios[2],
        scenarios[0].in_separate_slots(),
        scenarios[1].in_separate_slots(),
        scenarios[2].in_separate_slots(),
    ]
}

#[test]
fn properties_hold_without_failures() {
    all().into_iter().for_each(|scenario| holds(scenario.with_budget(|budget| budget.requests = 3)));
}

#[test]
fn properties_hold_when_tokens_are_prefetched_and_returned() {
    all().into_iter().for_each(|scenario| {
        holds(scenario.one_request_kind().with_budget(|budget| (budget.background, budget.refunds) = (1, 1)))
    });
}

#[test]
fn properties_hold_when_a_window_ends() {
    all().into_iter().for_each(|scenario| {
        holds(scenario.one_request_kind().one_token_each().with_budget(|budget| budget.windows = 1))
    });
}

#[test]
fn properties_hold_when_calls_and_replies_are_lost_or_late() {
    all()
        .into_iter()
        .for_each(|scenario| holds(scenario.with_budget(|budget| (budget.losses, budget.impatient) = (1, 1))));
}

#[test]
fn properties_hold_when_a_gateway_is_killed() {
    all()
        .into_iter()
        .for_each(|scenario| holds(scenario.with_budget(|budget| (budget.kills, budget.background) = (1, 0))));
}

#[test]
fn properties_hold_when_a_replica_is_promoted() {
    all().into_iter().for_each(|scenario| holds(scenario.with_budget(|budget| budget.failovers = 1)));
}

#[test]
fn properties_hold_when_a_server_restarts_empty() {
    all().into_iter().for_each(|scenario| holds(scenario.with_budget(|budget| budget.restarts = 1)));
}

#[test]
fn properties_hold_when_a_key_is_reset() {
    all().into_iter().for_each(|scenario| holds(scenario.one_request_kind().with_budget(|budget| budget.resets = 1)));
}

/// In sliding windows, tokens of both segments count together, and leases end with their segment.
#[test]
fn properties_hold_for_sliding_windows() {
    let windows = |budget: &mut Budget| budget.windows = 1;
    for scenario in all().map(|scenario| scenario.sliding().one_request_kind()) {
        holds(scenario.with_budget(windows));
        let scenario = scenario.one_token_each();
        holds(scenario.with_budget(windows).with_budget(|budget| (budget.background, budget.refunds) = (1, 1)));
        holds(scenario.with_budget(windows).with_budget(|budget| (budget.losses, budget.impatient) = (1, 1)));
        holds(scenario.with_budget(windows).with_budget(|budget| budget.kills = 1));
    }
}

#[test]
fn every_deliberate_mistake_is_found() {
    let (leased, exact) = (Scenario::leased(), Scenario::exact());
    let three = leased.with_budget(|budget| budget.requests = 3);
    let losses = |scenario: Scenario| scenario.with_budget(|budget| budget.losses = 1);
    breaks(leased, Mistake::DepositTwice, GRANTED_ONCE);
    breaks(three, Mistake::DepositTwice, NEVER_OVER);
    breaks(leased, Mistake::ReturnWithoutWithdrawing, GRANTED_ONCE);
    breaks(losses(leased), Mistake::ResendCall, NOT_RESENT);
    breaks(losses(exact), Mistake::ResendCall, NOT_RESENT);
    breaks(losses(three), Mistake::ResendRefund, GRANTED_ONCE);
    breaks(losses(exact.in_separate_slots()), Mistake::ResendRefund, GRANTED_ONCE);
    breaks(losses(leased), Mistake::AdmitWithoutReply, GRANTED_ONCE);
    breaks(losses(exact), Mistake::AdmitWithoutReply, GRANTED_ONCE);
    breaks(leased.with_budget(|budget| budget.windows = 1), Mistake::CarryTokensOver, GRANTED_ONCE);
    breaks(leased.with_budget(|budget| budget.windows = 1), Mistake::RefundToNextWindow, GRANTED_ONCE);
    breaks(exact.in_separate_slots(), Mistake::KeepChargesOfRefused, ALL_ACCOUNTED_FOR);
    breaks(exact.in_separate_slots(), Mistake::KeepChargesOfRefused, REFUSALS_BOUNDED);
    breaks(exact.with_budget(|budget| budget.impatient = 1), Mistake::KeepChargesOfCancelled, ALL_ACCOUNTED_FOR);
    breaks(leased.sliding().with_budget(|budget| budget.windows = 1), Mistake::CarryTokensOver, GRANTED_ONCE);
    breaks(leased.sliding().with_budget(|budget| budget.windows = 1), Mistake::RefundToNextWindow, GRANTED_ONCE);
    breaks(
        exact.sliding().with_budget(|budget| budget.impatient = 1),
        Mistake::KeepChargesOfCancelled,
        ALL_ACCOUNTED_FOR,
    );
    let failover = |scenario: Scenario| scenario.with_budget(|budget| budget.failovers = 1);
    breaks(failover(leased), Mistake::ForgetKnownUsage, REMEMBERED);
    breaks(exact.with_budget(|budget| budget.restarts = 1), Mistake::ForgetKnownUsage, REMEMBERED);
    breaks(leased, Mistake::NeverRecheck, NOT_REFUSED_FOREVER);
}
