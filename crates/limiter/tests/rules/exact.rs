//! One gateway, one monotonic clock, a large table: decisions equal those of the reference limiter.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use transom_limiter::acquire::Charge;
use transom_limiter::counter::AcquireRequest;
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::rule_set::LayerRef;
use transom_limiter::sharded_counter::ShardReceipt;

use crate::oracle::{Account, Expected, Oracle, Wish};
use crate::support::{Event, Gateway, START_MS, What, decision, events, rules};

/// What one request took.
struct Kept {
    shares: Vec<ShardReceipt>,
    /// Per account, what was left before, all that was known of it after, and what charged it.
    taken: Vec<(Wish, i128, Account, Charge)>,
}

struct Game {
    gateway: Gateway<8>,
    oracle: Oracle,
    now_ms: u64,
    kept: Vec<Kept>,
    /// Accounts to which something was given back behind others' backs.
    blurred: HashSet<String>,
}

impl Game {
    fn new(rules: &[Rule]) -> Game {
        let (gateway, oracle) = (Gateway::roomy(rules), Oracle::default());
        Game { gateway, oracle, now_ms: START_MS, kept: Vec::new(), blurred: HashSet::new() }
    }

    fn rules(&self) -> usize {
        self.gateway.rule_set.rules.len()
    }

    /// What the desk says of the layers equals what the oracle knows of them.
    fn equal_answers(&self, wishes: &[(LayerRef, Wish)]) -> Result<(), TestCaseError> {
        for (line, wish) in wishes {
            let charge = self.gateway.context.charge_of(*line).expect("the layer was asked");
            let account = self.oracle.account(wish, self.now_ms);
            let left = i128::from(wish.limit.capacity) - i128::from(charge.usage.used);
            prop_assert_eq!((left, charge.usage.end_ms), (account.left, account.end_ms), "{}", wish.key);
        }
        Ok(())
    }

    fn request(&mut self, client: u64, costs: &[Option<u32>]) -> Result<(), TestCaseError> {
        let judgement = self.gateway.judge(client, costs, self.now_ms);
        let all = self.gateway.wishes(client, costs, None);
        let wishes: Vec<Wish> = all.iter().map(|(_, wish)| wish.clone()).collect();
        let before: Vec<Account> = wishes.iter().map(|wish| self.oracle.account(wish, self.now_ms)).collect();
        let expected = self.oracle.decide(&wishes, self.gateway.context.inputs.reserve, true, self.now_ms);
        prop_assert_eq!(decision(&judgement), expected, "{:?} with {:?}", wishes, before);
        self.equal_answers(&all)?;
        if expected == Expected::Refused {
            for ((line, wish), before) in all.iter().zip(&before) {
                let full = self.gateway.context.charge_of(*line).expect("the layer was asked").is_full;
                prop_assert_eq!(full, before.left < i128::from(wish.cost));
            }
            return self.comes_again(&wishes);
        }
        let mut taken: Vec<_> = all.into_iter().zip(before.iter().map(|account| account.left)).collect();
        for position in 0..costs.len() {
            if self.gateway.rule_set.is_shadow(&self.gateway.charge_plan, position) && costs[position].is_some() {
                let all = self.gateway.wishes(client, costs, Some(position));
                let wishes: Vec<Wish> = all.iter().map(|(_, wish)| wish.clone()).collect();
                taken.extend(all.iter().map(|one| (one.clone(), self.oracle.account(&one.1, self.now_ms).left)));
                let refused = self.oracle.decide(&wishes, false, false, self.now_ms) == Expected::Refused;
                prop_assert_eq!(self.gateway.context.result.shadowed.contains(&position), refused);
                self.equal_answers(&all)?;
                if refused {
                    // What counts as refused is not given back with the request.
                    taken.truncate(taken.len() - wishes.len());
                }
            }
        }
        let after = |((line, wish), left): ((LayerRef, Wish), i128)| {
            let account = *self.oracle.accounts.get(&wish.key)?;
            (wish.cost > 0).then_some((wish, left, account, *self.gateway.context.charge_of(line)?))
        };
        let taken = taken.into_iter().filter_map(after).collect();
        self.kept.push(Kept { shares: self.gateway.context.all_receipts().collect(), taken });
        Ok(())
    }

    /// A client which waits as long as it is told, and is alone, is admitted.
    fn comes_again(&self, wishes: &[Wish]) -> Result<(), TestCaseError> {
        let opens: Vec<Option<u64>> = wishes.iter().map(|wish| self.oracle.opens_ms(wish, self.now_ms)).collect();
        let again_ms = self.gateway.again_ms(self.now_ms);
        prop_assert_eq!(
            again_ms,
            opens.into_iter().collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max())
        );
        if let Some(again_ms) = again_ms {
            let mut alone = Oracle { accounts: self.oracle.accounts.clone() };
            prop_assert_eq!(alone.decide(wishes, false, false, again_ms), Expected::Admitted);
        }
        Ok(())
    }

    fn give_back(&mut self, back: usize, tokens: u32) -> Result<(), TestCaseError> {
        let Some(nth) = self.kept.len().checked_sub(1 + back) else { return Ok(()) };
        let Kept { shares, taken } = self.kept.remove(nth);
        // Parts are given back where an answer tells the cost, and such counters are not split.
        let is_split = taken.iter().any(|(.., charge)| charge.sharding.shards > 1);
        let tokens = if is_split { u32::MAX } else { tokens };
        let left = |game: &Game, wish: &Wish| game.oracle.account(wish, game.now_ms).left;
        let before: Vec<i128> = taken.iter().map(|(wish, ..)| left(self, wish)).collect();
        self.gateway.rule_set.refund(&shares, tokens, &self.gateway.table, self.now_ms);
        for ((wish, left_before, after, charge), left_now) in taken.into_iter().zip(before) {
            let returned = i128::from(tokens).min(left_before - after.left);
            let returned = Account { left: after.left + returned, ..after };
            if self.oracle.accounts.get(&wish.key) == Some(&after) && !self.blurred.contains(&wish.key) {
                // Nobody came after it: as if it had never been.
                self.oracle.accounts.insert(wish.key.clone(), returned);
                continue;
            }
            let look = self.look(&wish, &charge);
            prop_assert!((left_now..=left_now + returned.left - after.left).contains(&look.left), "{:?}", look);
            self.oracle.accounts.insert(wish.key.clone(), look);
            self.blurred.insert(wish.key);
        }
        Ok(())
    }

    /// What the table says of an account; `charge` is one that was made there.
    fn look(&self, wish: &Wish, charge: &Charge) -> Account {
        let ceiling = u64::from(wish.limit.capacity);
        let ask = AcquireRequest { end_ms: wish.end_ms(self.now_ms), ceiling, floor: 0, ..charge.request };
        let (table, time) = (&self.gateway.table, self.gateway.rule_set.time(self.now_ms));
        let usage = match charge.sharding.shards {
            1 => table.peek(charge.counter, ask, time).0,
            _ => charge.sharding.peek(table, charge.counter, ask, time).0,
        };
        Account { left: i128::from(wish.limit.capacity) - i128::from(usage.used), end_ms: usage.end_ms }
    }

    fn overdraw(&mut self, client: u64, rule: usize, cost: u32) {
        if rule >= self.rules() || !matches!(self.gateway.rule_set.rules[rule].rule.cost, Cost::Response { .. }) {
            return;
        }
        let keyed_request = self.gateway.keyed_request(rule, client, cost);
        self.gateway.rule_set.charge_excess(rule, keyed_request, &self.gateway.table, self.now_ms);
        let costs: Vec<_> = (0..self.rules()).map(|other| (other == rule).then_some(cost)).collect();
        for shadow in [None, Some(rule)] {
            for (_, wish) in self.gateway.wishes(client, &costs, shadow) {
                let account = self.oracle.account(&wish, self.now_ms);
                self.oracle.accounts.insert(wish.key, Account { left: account.left - i128::from(cost), ..account });
            }
        }
    }

    fn play(&mut self, event: &Event) -> Result<(), TestCaseError> {
        self.now_ms += event.moves_ms;
        match &event.what {
            What::AcquireRequest { costs, reserve, own_shard } => {
                (self.gateway.context.inputs.reserve, self.gateway.context.inputs.own_shard) = (*reserve, *own_shard);
                self.request(event.client, &costs[..self.rules()])?;
            }
            What::GiveBack { back, tokens } => {
                self.give_back(*back, *tokens)?;
            }
            What::Overdraw { rule, cost } => self.overdraw(event.client, *rule, *cost),
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_gateway_with_a_large_table_equals_the_reference_limiter(rules in rules(), events in events()) {
        let mut game = Game::new(&rules);
        for event in &events {
            game.play(event)?;
        }
        prop_assert_eq!(game.gateway.table.overflow_charges_total(), 0);
    }
}

/// A map of what is admitted, so that the property above is known to have tried everything.
#[test]
fn random_rules_and_events_cover_every_case() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut seen: HashMap<&str, u32> = HashMap::new();
    for _ in 0..300 {
        let rules = rules().new_tree(&mut runner).expect("there are rules").current();
        let events = events().new_tree(&mut runner).expect("there are events").current();
        let mut game = Game::new(&rules);
        for event in events {
            game.play(&event).expect("the property holds");
            if let What::AcquireRequest { costs, .. } = &event.what {
                let full = game.gateway.context.result.charges.iter().any(|charge| charge.is_full);
                let split = !game.gateway.context.result.shard_receipts.is_empty();
                let partly = costs.iter().flatten().any(|cost| *cost == 0);
                let shadowed = !game.gateway.context.result.shadowed.is_empty();
                let seen_now = [("full", full), ("split", split), ("free", partly), ("shadowed", shadowed)];
                seen_now.iter().filter(|(_, seen)| *seen).for_each(|(name, _)| *seen.entry(name).or_default() += 1);
            }
        }
    }
    assert!(seen.len() == 4 && seen.values().all(|times| *times > 100), "{seen:?}");
}
