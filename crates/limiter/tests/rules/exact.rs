//! One gateway, one monotonic clock, a large table: decisions equal those of the reference limiter.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use transom_limiter::acquire::Charge;
use transom_limiter::charge_plan::LayerRef;
use transom_limiter::handles::{Handle, PlanPosition, RuleId};
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::window_kind::AcquireRequest;

use crate::oracle::{Account, Expected, LayerRequest, Oracle};
use crate::support::{Action, Event, Gateway, START_MS, events, outcome, rules};

/// A request that can be refunded.
struct PastRequest {
    receipts: Vec<ShardReceipt>,
    /// For each account: the tokens left before, the account afterwards, and the charge.
    taken: Vec<(LayerRequest, i128, Account, Charge)>,
}

struct Comparison {
    gateway: Gateway<8>,
    oracle: Oracle,
    now_ms: u64,
    past: Vec<PastRequest>,
    /// Accounts with a refund that the reference limiter cannot compute.
    inexact: HashSet<String>,
}

impl Comparison {
    fn new(rules: &[Rule]) -> Comparison {
        let (gateway, oracle) = (Gateway::with_large_table(rules), Oracle::default());
        Comparison { gateway, oracle, now_ms: START_MS, past: Vec::new(), inexact: HashSet::new() }
    }

    fn rules(&self) -> usize {
        self.gateway.charge_plan.rules().len()
    }

    /// Checks that the reported usage of all layers equals that of the reference limiter.
    fn check_usage(&self, layer_requests: &[(LayerRef, LayerRequest)]) -> Result<(), TestCaseError> {
        for (layer_ref, layer_request) in layer_requests {
            let charge = self.gateway.context.charge_of(*layer_ref).expect("the layer was charged");
            let account = self.oracle.account(layer_request, self.now_ms);
            let left = i128::from(layer_request.limit.capacity()) - i128::from(charge.usage.used);
            prop_assert_eq!((left, charge.usage.end_ms), (account.left, account.end_ms), "{}", layer_request.key);
        }
        Ok(())
    }

    fn request(&mut self, client: u64, costs: &[Option<u32>]) -> Result<(), TestCaseError> {
        let decision = self.gateway.decide(client, costs, self.now_ms);
        let all = self.gateway.layer_requests(client, costs, None);
        let layer_requests: Vec<LayerRequest> = all.iter().map(|(_, layer_request)| layer_request.clone()).collect();
        let before: Vec<Account> =
            layer_requests.iter().map(|layer_request| self.oracle.account(layer_request, self.now_ms)).collect();
        let expected = self.oracle.decide(&layer_requests, self.gateway.context.inputs.reserve, true, self.now_ms);
        prop_assert_eq!(outcome(&decision), expected, "{:?} with {:?}", layer_requests, before);
        self.check_usage(&all)?;
        if expected == Expected::Refused {
            for ((layer_ref, layer_request), before) in all.iter().zip(&before) {
                let full = self.gateway.context.charge_of(*layer_ref).expect("the layer was charged").is_full;
                prop_assert_eq!(full, before.left < layer_request.least_left());
            }
            return self.check_retry(&layer_requests);
        }
        let mut taken: Vec<_> = all.into_iter().zip(before.iter().map(|account| account.left)).collect();
        for position in 0..costs.len() {
            if self.gateway.charge_plan.is_shadow(PlanPosition::at(position)) && costs[position].is_some() {
                let all = self.gateway.layer_requests(client, costs, Some(position));
                let layer_requests: Vec<LayerRequest> =
                    all.iter().map(|(_, layer_request)| layer_request.clone()).collect();
                taken.extend(all.iter().map(|one| (one.clone(), self.oracle.account(&one.1, self.now_ms).left)));
                let refused = self.oracle.decide(&layer_requests, false, false, self.now_ms) == Expected::Refused;
                prop_assert_eq!(self.gateway.context.result.shadowed.contains(&PlanPosition::at(position)), refused);
                self.check_usage(&all)?;
                if refused {
                    // Tokens taken by a counted refusal are not refunded with the request.
                    taken.truncate(taken.len() - layer_requests.len());
                }
            }
        }
        let after = |((layer_ref, layer_request), left): ((LayerRef, LayerRequest), i128)| {
            let account = *self.oracle.accounts.get(&layer_request.key)?;
            (layer_request.cost > 0).then_some((
                layer_request,
                left,
                account,
                self.gateway.context.charge_of(layer_ref)?.charge,
            ))
        };
        let taken = taken.into_iter().filter_map(after).collect();
        self.past.push(PastRequest { receipts: self.gateway.context.all_receipts().collect(), taken });
        Ok(())
    }

    /// A client that retries at the reported time is admitted if there are no other requests.
    fn check_retry(&self, layer_requests: &[LayerRequest]) -> Result<(), TestCaseError> {
        let opens: Vec<Option<u64>> =
            layer_requests.iter().map(|layer_request| self.oracle.opens_ms(layer_request, self.now_ms)).collect();
        let retry_at_ms = self.gateway.retry_at_ms(self.now_ms);
        prop_assert_eq!(
            retry_at_ms,
            opens.into_iter().collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max())
        );
        if let Some(retry_at_ms) = retry_at_ms {
            let mut alone = Oracle { accounts: self.oracle.accounts.clone() };
            prop_assert_eq!(alone.decide(layer_requests, false, false, retry_at_ms), Expected::Admitted);
        }
        Ok(())
    }

    fn refund(&mut self, back: usize, tokens: u32) -> Result<(), TestCaseError> {
        let Some(nth) = self.past.len().checked_sub(1 + back) else { return Ok(()) };
        let PastRequest { receipts, taken } = self.past.remove(nth);
        // Only rules with response costs refund parts of a charge, and their counters are not sharded.
        let is_sharded = taken.iter().any(|(.., charge)| charge.sharding.shards > 1);
        let tokens = if is_sharded { u32::MAX } else { tokens };
        let left = |comparison: &Comparison, layer_request: &LayerRequest| {
            comparison.oracle.account(layer_request, comparison.now_ms).left
        };
        let before: Vec<i128> = taken.iter().map(|(layer_request, ..)| left(self, layer_request)).collect();
        self.gateway.rule_set().refund(&receipts, tokens, &self.gateway.table, self.now_ms);
        for ((layer_request, left_before, after, charge), left_now) in taken.into_iter().zip(before) {
            let returned = i128::from(tokens).min(left_before - after.left);
            let returned = Account { left: after.left + returned, ..after };
            if self.oracle.accounts.get(&layer_request.key) == Some(&after)
                && !self.inexact.contains(&layer_request.key)
            {
                // No other request followed: the account is as before the request.
                self.oracle.accounts.insert(layer_request.key.clone(), returned);
                continue;
            }
            let account = self.table_account(&layer_request, &charge);
            prop_assert!((left_now..=left_now + returned.left - after.left).contains(&account.left), "{:?}", account);
            self.oracle.accounts.insert(layer_request.key.clone(), account);
            self.inexact.insert(layer_request.key);
        }
        Ok(())
    }

    /// The account as the table reports it; `charge` is a charge of that account.
    fn table_account(&self, layer_request: &LayerRequest, charge: &Charge) -> Account {
        let ceiling = u64::from(layer_request.limit.capacity());
        let request = AcquireRequest { end_ms: layer_request.end_ms(self.now_ms), ceiling, floor: 0, ..charge.request };
        let (table, time) = (&self.gateway.table, self.gateway.rule_set().time(self.now_ms));
        let usage = match charge.sharding.shards {
            1 => table.peek(charge.counter, request, time).0,
            _ => charge.sharding.peek(table, charge.counter, request, time).usage,
        };
        Account { left: i128::from(layer_request.limit.capacity()) - i128::from(usage.used), end_ms: usage.end_ms }
    }

    fn charge_excess(&mut self, client: u64, rule: usize, cost: u32) {
        if rule >= self.rules()
            || !matches!(self.gateway.charge_plan.rule(PlanPosition::at(rule)).rule.cost, Cost::Response { .. })
        {
            return;
        }
        let keyed_request = self.gateway.keyed_request(rule, client, cost);
        self.gateway.rule_set().charge_excess(RuleId::at(rule), keyed_request, &self.gateway.table, self.now_ms);
        let costs: Vec<_> = (0..self.rules()).map(|other| (other == rule).then_some(cost)).collect();
        for shadow in [None, Some(rule)] {
            for (_, layer_request) in self.gateway.layer_requests(client, &costs, shadow) {
                let account = self.oracle.account(&layer_request, self.now_ms);
                self.oracle
                    .accounts
                    .insert(layer_request.key, Account { left: account.left - i128::from(cost), ..account });
            }
        }
    }

    fn apply(&mut self, event: &Event) -> Result<(), TestCaseError> {
        self.now_ms += event.advance_ms;
        match &event.action {
            Action::Request { costs, reserve, own_shard } => {
                (self.gateway.context.inputs.reserve, self.gateway.context.inputs.own_shard) = (*reserve, *own_shard);
                self.request(event.client, &costs[..self.rules()])?;
            }
            Action::Refund { back, tokens } => {
                self.refund(*back, *tokens)?;
            }
            Action::ChargeExcess { rule, cost } => self.charge_excess(event.client, *rule, *cost),
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_gateway_with_a_large_table_equals_the_reference_limiter(rules in rules(), events in events()) {
        let mut comparison = Comparison::new(&rules);
        for event in &events {
            comparison.apply(event)?;
        }
        prop_assert_eq!(comparison.gateway.table.overflow_charges_total(), 0);
    }
}

/// Counts the cases that occurred, so that the property above cannot pass without testing them.
#[test]
fn random_rules_and_events_cover_every_case() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut seen: HashMap<&str, u32> = HashMap::new();
    for _ in 0..300 {
        let rules = rules().new_tree(&mut runner).expect("there are rules").current();
        let events = events().new_tree(&mut runner).expect("there are events").current();
        let mut comparison = Comparison::new(&rules);
        for event in events {
            comparison.apply(&event).expect("the property holds");
            if let Action::Request { costs, .. } = &event.action {
                let full = comparison.gateway.context.result.charges.iter().any(|charge| charge.is_full);
                let sharded = !comparison.gateway.context.result.shard_receipts.is_empty();
                let free = costs.iter().flatten().any(|cost| *cost == 0);
                let shadowed = !comparison.gateway.context.result.shadowed.is_empty();
                let seen_now = [("full", full), ("sharded", sharded), ("free", free), ("shadowed", shadowed)];
                seen_now.iter().filter(|(_, seen)| *seen).for_each(|(name, _)| *seen.entry(name).or_default() += 1);
            }
        }
    }
    assert!(seen.len() == 4 && seen.values().all(|times| *times > 100), "{seen:?}");
}
