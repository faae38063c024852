//! Limits that change while requests arrive: the usage of an open window stays.
//!
//! This holds for separate windows, sharded or not, and for windows opened by requests. Debts of windows with rollover are
//! read by the new limit, as ARCHITECTURE.md describes.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;

use crate::oracle::{Expected, Wish};
use crate::support::{Gateway, START_MS, decision, limit, rule, windows};

/// Tokens used of the window that ends then.
#[derive(Clone, Copy, Default)]
struct Used {
    tokens: u64,
    end_ms: u64,
}

/// A limiter that knows what was used, and nothing of what a limit was before.
#[derive(Default)]
struct Plain(HashMap<String, Used>);

impl Plain {
    fn used(&self, wish: &Wish, now_ms: u64) -> Used {
        let known = self.0.get(&wish.key).copied().unwrap_or_default();
        let is_open = known.end_ms > now_ms && known.tokens > 0;
        if is_open { known } else { Used { tokens: 0, end_ms: wish.end_ms(now_ms) } }
    }

    fn decide(&mut self, wishes: &[Wish], now_ms: u64) -> Expected {
        let fits = |wish: &Wish| self.used(wish, now_ms).tokens + u64::from(wish.cost) <= u64::from(wish.limit.tokens);
        if !wishes.iter().all(fits) {
            return Expected::Refused;
        }
        for wish in wishes {
            let used = self.used(wish, now_ms);
            self.0.insert(wish.key.clone(), Used { tokens: used.tokens + u64::from(wish.cost), ..used });
        }
        Expected::Admitted
    }
}

#[derive(Clone, Debug)]
enum Event {
    AcquireRequest {
        client: u64,
        costs: Vec<u32>,
        own_shard: u32,
    },
    /// The limits of all layers, one after the other; used again from the start where there are more layers.
    Limits(Vec<u32>),
    /// What the last request that was admitted took is given back.
    GiveBack,
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let layers = prop::collection::vec((1..8u32, windows(), 1..4u32), 1..4).prop_map(|layers| {
        let mut known = HashMap::new();
        let layer = |(tokens, windows, shards)| Limit { shards, ..limit(tokens, windows) };
        let is_new = |layer: &Limit| known.insert(layer.windows.to_string(), ()).is_none();
        layers.into_iter().map(layer).filter(is_new).collect::<Vec<_>>()
    });
    prop::collection::vec(layers, 1..3)
        .prop_map(|all| all.into_iter().enumerate().map(|(i, layers)| rule(&format!("r{i}"), layers)).collect())
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let ask = (0..3u64, prop::collection::vec(0..4u32, 3), 0..4u32)
        .prop_map(|(client, costs, own_shard)| Event::AcquireRequest { client, costs, own_shard });
    let what = prop_oneof![
        12 => ask,
        2 => prop::collection::vec(1..9u32, 1..6).prop_map(Event::Limits),
        1 => Just(Event::GiveBack),
    ];
    let moves = prop_oneof![5 => Just(0u64), 4 => 1..9u64, 1 => 9..60u64];
    prop::collection::vec((moves, what), 1..100)
}

fn with_limits(rules: &[Rule], limits: &[u32]) -> Vec<Rule> {
    let mut limits = limits.iter().cycle().copied();
    let mut next = |layer: &Limit| {
        let tokens = limits.next().expect("there is one at least");
        Limit { tokens, capacity: tokens, ..layer.clone() }
    };
    rules.iter().map(|rule| Rule { layers: rule.layers.iter().map(&mut next).collect(), ..rule.clone() }).collect()
}

fn play(mut rules: Vec<Rule>, events: Vec<(u64, Event)>) -> Result<u32, TestCaseError> {
    let (mut gateway, mut plain, mut now_ms) = (Gateway::roomy(&rules), Plain::default(), START_MS);
    let (mut last, mut over) = (None, 0);
    for (moves_ms, event) in events {
        now_ms += moves_ms;
        match event {
            Event::AcquireRequest { client, costs, own_shard } => {
                let costs: Vec<_> = costs[..rules.len()].iter().map(|cost| Some(*cost)).collect();
                gateway.context.inputs.own_shard = own_shard;
                let judgement = gateway.judge(client, &costs, now_ms);
                let wishes: Vec<Wish> =
                    gateway.wishes(client, &costs, None).into_iter().map(|(_, wish)| wish).collect();
                let exceeds = |wish: &Wish| plain.used(wish, now_ms).tokens > u64::from(wish.limit.tokens);
                over += u32::from(wishes.iter().any(exceeds));
                let expected = plain.decide(&wishes, now_ms);
                prop_assert_eq!(decision(&judgement), expected, "{:?}", wishes);
                if expected == Expected::Admitted {
                    last = Some((gateway.context.all_receipts().collect::<Vec<_>>(), wishes, now_ms));
                }
            }
            Event::Limits(limits) => {
                rules = with_limits(&rules, &limits);
                gateway.adopt(&rules);
                // Shares know the limit that they were charged under.
                last = None;
            }
            Event::GiveBack => {
                let Some((shares, wishes, _)) = last.take().filter(|(.., then_ms)| *then_ms == now_ms) else {
                    continue;
                };
                gateway.rule_set.refund(&shares, u32::MAX, &gateway.table, now_ms);
                for wish in wishes {
                    plain.0.entry(wish.key).and_modify(|used| used.tokens -= u64::from(wish.cost));
                }
            }
        }
    }
    Ok(over)
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_changed_limit_applies_to_existing_usage(rules in rules(), events in events()) {
        play(rules, events)?;
    }
}

/// That more was used than a limit allows now does happen in the property above.
#[test]
fn random_changes_reach_usage_above_the_limit() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let over = (0..200).map(|_| {
        let rules = rules().new_tree(&mut runner).expect("there are rules").current();
        let events = events().new_tree(&mut runner).expect("there are events").current();
        play(rules, events).expect("the property holds")
    });
    assert!(over.sum::<u32>() > 100);
}
