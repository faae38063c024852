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

use explore::{Found, explore};
use scenario::{Mistake, Scene};

/// As long as the store forgets nothing: never over the limit. After a failover, a restart without data or a reset: over by
/// no more than the store has forgotten and was not told again.
pub const NEVER_OVER: &str = "admitted requests never exceed the limit plus the usage that the store lost";
pub const HANDED_OUT_ONCE: &str = "every token is granted once";
pub const ALL_ACCOUNTED_FOR: &str = "tokens counted by the store were admitted, are outstanding, or were lost";
pub const EXECUTED_ONCE: &str = "a call with an unknown result is not resent";
pub const REMEMBERED: &str = "usage known to a gateway is not granted to it again by the next server";
pub const NEEDLESS: &str = "early refusals are bounded by outstanding tokens";
pub const NOT_FOR_EVER: &str = "after all refunds, no request with remaining tokens is refused";

/// All orders of a scene, and no property is broken.
fn holds(scene: Scene) {
    let Found { states, broken, trace } = explore(scene, None);
    assert_eq!(broken, None, "{scene:?}, after {states} states\n{trace}");
}

/// A mistake breaks one property.
fn breaks(scene: Scene, mistake: Mistake, property: &str) {
    let Found { states, broken, trace } = explore(scene.by_mistake(mistake), Some(property));
    assert_eq!(broken, Some(property), "{mistake:?}, after {states} states\n{trace}");
}

fn all() -> [Scene; 6] {
    let scenes = [Scene::leased(), Scene::exact(), Scene::mixed()];
    [scenes[0], scenes[1], scenes[2], scenes[0].apart(), scenes[1].apart(), scenes[2].apart()]
}

#[test]
fn properties_hold_without_failures() {
    all().into_iter().for_each(|scene| holds(scene.with(|budget| budget.requests = 3)));
}

#[test]
fn properties_hold_when_tokens_are_prefetched_and_returned() {
    all()
        .into_iter()
        .for_each(|scene| holds(scene.plainer().with(|budget| (budget.background, budget.refunds) = (1, 1))));
}

#[test]
fn properties_hold_when_a_window_ends() {
    all().into_iter().for_each(|scene| holds(scene.plainer().tight().with(|budget| budget.windows = 1)));
}

#[test]
fn properties_hold_when_calls_and_replies_are_lost_or_late() {
    all().into_iter().for_each(|scene| holds(scene.with(|budget| (budget.losses, budget.impatient) = (1, 1))));
}

#[test]
fn properties_hold_when_a_gateway_is_killed() {
    all().into_iter().for_each(|scene| holds(scene.with(|budget| (budget.kills, budget.background) = (1, 0))));
}

#[test]
fn properties_hold_when_a_replica_is_promoted() {
    all().into_iter().for_each(|scene| holds(scene.with(|budget| budget.failovers = 1)));
}

#[test]
fn properties_hold_when_a_server_restarts_empty() {
    all().into_iter().for_each(|scene| holds(scene.with(|budget| budget.restarts = 1)));
}

#[test]
fn properties_hold_when_a_key_is_reset() {
    all().into_iter().for_each(|scene| holds(scene.plainer().with(|budget| budget.resets = 1)));
}

#[test]
fn every_deliberate_mistake_is_found() {
    let (leased, exact) = (Scene::leased(), Scene::exact());
    let three = leased.with(|budget| budget.requests = 3);
    let losses = |scene: Scene| scene.with(|budget| budget.losses = 1);
    breaks(leased, Mistake::DepositsTwice, HANDED_OUT_ONCE);
    breaks(three, Mistake::DepositsTwice, NEVER_OVER);
    breaks(leased, Mistake::GivesWhatItKeeps, HANDED_OUT_ONCE);
    breaks(losses(leased), Mistake::FetchesAgain, EXECUTED_ONCE);
    breaks(losses(exact), Mistake::FetchesAgain, EXECUTED_ONCE);
    breaks(losses(three), Mistake::GivesAgain, HANDED_OUT_ONCE);
    breaks(losses(exact.apart()), Mistake::GivesAgain, HANDED_OUT_ONCE);
    breaks(losses(leased), Mistake::TakesSilenceForYes, HANDED_OUT_ONCE);
    breaks(losses(exact), Mistake::TakesSilenceForYes, HANDED_OUT_ONCE);
    breaks(leased.with(|budget| budget.windows = 1), Mistake::CarriesOver, HANDED_OUT_ONCE);
    breaks(leased.with(|budget| budget.windows = 1), Mistake::GivesToTheNextWindow, HANDED_OUT_ONCE);
    breaks(exact.apart(), Mistake::LeavesDoomedCharges, ALL_ACCOUNTED_FOR);
    breaks(exact.apart(), Mistake::LeavesDoomedCharges, NEEDLESS);
    breaks(exact.with(|budget| budget.impatient = 1), Mistake::LeavesCharges, ALL_ACCOUNTED_FOR);
    let failover = |scene: Scene| scene.with(|budget| budget.failovers = 1);
    breaks(failover(leased), Mistake::ForgetsWithTheStore, REMEMBERED);
    breaks(exact.with(|budget| budget.restarts = 1), Mistake::ForgetsWithTheStore, REMEMBERED);
    breaks(leased, Mistake::NeverAsksAgain, NOT_FOR_EVER);
}
