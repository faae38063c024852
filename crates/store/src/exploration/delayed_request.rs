//! Requests that wait until a later window opens.

use std::cell::Cell;
use std::mem::replace;
use std::rc::Rc;
use std::time::Duration;

use super::world::TIMEOUT_MS;
use crate::counter_access::CounterAccess;
use crate::delayed_charges::{DecidingRules, DelayedCharges, NextStep, StoreCharges};
use crate::shared_decision::{SharedOutcome, Unavailable};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::LayerId;
use transom_limiter::rule_set::RuleSet;
use transom_limiter::store_key::StoreKeys;

/// A request whose decision has ended.
pub struct Decided {
    pub is_admitted: bool,
    /// What was charged at first, and again whenever the request had waited; each with the time until which it waited then, by the
    /// gateway's clock.
    pub outcomes: Vec<(SharedOutcome, u64)>,
}

/// A gateway that lets requests wait.
pub struct WaitingGateway {
    pub counters: Rc<CounterAccess>,
    pub charge_plan: Rc<ChargePlan>,
    /// Until when the decision may take, by the gateway's wall clock, which is not set.
    pub deadline_ms: Rc<Cell<u64>>,
}

impl DecidingRules for WaitingGateway {
    fn counters(&self) -> &CounterAccess {
        &self.counters
    }

    fn charge_plan(&self) -> &ChargePlan {
        &self.charge_plan
    }
}

impl Decided {
    /// The layers in which the request counts when it passes, with the ends of the windows.
    pub fn windows(&self, rule_set: &RuleSet) -> Vec<(LayerId, u64)> {
        let mut windows: Vec<(LayerId, u64)> = Vec::new();
        // What was charged last counts.
        for (SharedOutcome { context, .. }, until_ms) in self.outcomes.iter().rev() {
            for charge in &context.result.charges {
                let (layer, end_ms) = (charge.layer.id, charge.usage.end_ms);
                let period_ms = rule_set.windows_of(rule_set.layer(layer)).typical_ms();
                let later = until_ms.checked_sub(end_ms).map_or(0, |ms| ms / period_ms + 1);
                if !rule_set.layer(layer).is_penalty() && windows.iter().all(|(other, _)| *other != layer) {
                    windows.push((layer, end_ms + later * period_ms));
                }
            }
            // Tokens that did not fit in the table.
            for LayerRef { id, .. } in &context.sharing.prepaid {
                if windows.iter().all(|(other, _)| other != id) {
                    let layer_windows = rule_set.windows_of(rule_set.layer(*id));
                    windows.push((*id, layer_windows.window_at(context.result.decided_ms, 0).end_ms));
                }
            }
        }
        windows
    }
}

impl WaitingGateway {
    /// Waits until the request passes or is refused.
    pub async fn pass(self, mut outcome: SharedOutcome, keys: StoreKeys) -> Result<Decided, Unavailable> {
        // The request waits as long as the waiter is there.
        let (until_ms, _waiter, recharge) = match replace(&mut outcome.decision, Decision::Admitted) {
            Decision::Admitted => return Ok(Decided { is_admitted: true, outcomes: vec![(outcome, 0)] }),
            Decision::Refused => return Ok(Decided { is_admitted: false, outcomes: Vec::new() }),
            Decision::Delayed { until_ms, waiter, recharge } => (until_ms, waiter, recharge),
        };
        let of_store = StoreCharges { refunds: outcome.refunds.clone(), keys };
        let mut charges = DelayedCharges::new(self, &outcome.context, of_store, until_ms, recharge);
        let mut outcomes = vec![(outcome, until_ms)];
        loop {
            charges.rules().wait_until(charges.until_ms()).await;
            match charges.proceed(DecisionContext::default()).await? {
                NextStep::Pass => return Ok(Decided { is_admitted: true, outcomes }),
                NextStep::Wait(outcome) => outcomes.push((*outcome, charges.until_ms())),
                NextStep::Refuse(_context) => return Ok(Decided { is_admitted: false, outcomes }),
            }
        }
    }

    async fn wait_until(&self, until_ms: u64) {
        let now_ms = || self.counters.clock.now().unix_ms;
        let set_deadline = |ms: u64| self.deadline_ms.set(self.counters.clock.wall_ms() + ms + TIMEOUT_MS);
        set_deadline(until_ms.saturating_sub(now_ms()));
        while now_ms() < until_ms {
            tokio::time::sleep(Duration::from_millis(until_ms - now_ms())).await;
        }
        set_deadline(0);
    }
}
