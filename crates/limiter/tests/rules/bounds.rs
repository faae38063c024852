//! Bounds that hold with small tables, differing clocks, and abandoned waits: of consecutive windows, the first grants at most
//! the capacity, and each later one its limit.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use transom_limiter::decision::Decision;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;
use transom_limiter::window::{WindowSequence, Windows};

use crate::oracle::{Expected, Oracle, Wish};
use crate::support::{Event, Gateway, START_MS, What, events, limit, plain, rule, rules};

/// Tokens that passed or will pass, by the end of the window in which they do.
#[derive(Default)]
struct FormatRegistry {
    accounts: HashMap<String, (Wish, BTreeMap<u64, i64>)>,
}

/// What one request took: shares to give back, and what to strike from the ledger.
struct Kept {
    shares: Vec<ShardReceipt>,
    passes: Vec<(Wish, u64)>,
}

impl FormatRegistry {
    fn add(&mut self, wish: &Wish, end_ms: u64, tokens: i64) {
        let (_, account) = self.accounts.entry(wish.key.clone()).or_insert_with(|| (wish.clone(), BTreeMap::new()));
        *account.entry(end_ms).or_default() += tokens;
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (wish, account) in self.accounts.values() {
            let (pace, limit) = (wish.limit.windows.sequence(), i64::from(wish.limit.tokens));
            for first_ms in account.keys() {
                let mut sum = 0;
                for (last_ms, tokens) in account.range(first_ms..) {
                    sum += tokens;
                    let windows = match &pace {
                        WindowSequence::Even { period_ms } => (last_ms - first_ms) / period_ms,
                        WindowSequence::Listed(_) => pace.windows_between(*first_ms, *last_ms),
                    };
                    let most = i64::from(wish.limit.capacity) + windows as i64 * limit;
                    prop_assert!(sum <= most, "{} of {} from {} to {} in {}", sum, most, first_ms, last_ms, wish.key);
                }
            }
        }
        Ok(())
    }
}

/// Rules without what may be exceeded on purpose: reserves are one account with the windows to come, and an
/// overdraft is what it says. A split counter tells only its last window, which is not enough here.
fn strict(rules: Vec<Rule>) -> Vec<Rule> {
    let strict = |limit: Limit| Limit { reserve: 0, shards: 1, ..limit };
    let all = |layers: Vec<Limit>| layers.into_iter().map(strict).collect();
    rules
        .into_iter()
        .map(|mut rule| {
            rule.layers = all(rule.layers);
            rule.plans.iter_mut().for_each(|plan| plan.layers = all(std::mem::take(&mut plan.layers)));
            rule.overrides.iter_mut().for_each(|own| own.layers = all(std::mem::take(&mut own.layers)));
            Rule { cost: Cost::Fixed(1), ..rule }
        })
        .collect()
}

/// Plays all events, by two clocks that may differ, and holds what passes against the bound.
fn never_over<const W: usize>(table: Table<W>, rules: &[Rule], events: &[Event]) -> Result<u64, TestCaseError> {
    let mut gateway = Gateway::new(rules, table);
    let (mut ledger, mut kept, mut clocks) = (FormatRegistry::default(), Vec::<Kept>::new(), [START_MS; 2]);
    for event in events {
        clocks[event.thread] += event.moves_ms;
        let now_ms = clocks[event.thread];
        match &event.what {
            What::AcquireRequest { costs, .. } => {
                let costs = &costs[..rules.len()];
                // Who asks for the time again hears of the later clock, or of a clock that stays behind.
                let again_ms = if event.moves_ms % 2 == 0 { clocks[0].max(clocks[1]) } else { now_ms };
                let judgement =
                    gateway.judge_late(event.client, costs, DecisionTime::starting_at(now_ms, &|| again_ms));
                if let Decision::Refused = judgement {
                    continue;
                }
                let mut passes = Vec::new();
                for (line, wish) in gateway.wishes(event.client, costs, None) {
                    let charge = gateway.context.charge_of(line).expect("the layer was asked");
                    let pace = wish.limit.windows.sequence();
                    let (own_ms, end_ms) = (charge.request.end_ms, charge.usage.end_ms);
                    let end_ms = match &wish.limit.windows {
                        // Where keys with windows of their own share a counter, they share its windows as well, and
                        // a thread that is late may be counted in any of its own windows since.
                        Windows::Random { .. } if clocks.iter().any(|clock_ms| *clock_ms >= own_ms) => continue,
                        Windows::Random { .. } => own_ms,
                        _ => end_ms,
                    };
                    // So many windows further on it has its place; what has room is charged where it is.
                    let passes_in = pace.end_after(end_ms, charge.request.floor / u64::from(wish.limit.tokens));
                    ledger.add(&wish, passes_in, wish.cost.into());
                    passes.push((wish, passes_in));
                }
                kept.push(Kept { shares: gateway.context.all_receipts().collect(), passes });
            }
            What::GiveBack { back, .. } => {
                let Some(nth) = kept.len().checked_sub(1 + back) else { continue };
                let Kept { shares, passes } = kept.remove(nth);
                gateway.rule_set.refund(&shares, u32::MAX, &gateway.table, now_ms);
                passes.iter().for_each(|(wish, end_ms)| ledger.add(wish, *end_ms, -i64::from(wish.cost)));
            }
            What::Overdraw { .. } => {}
        }
        ledger.check()?;
    }
    Ok(gateway.table.overflow_charges_total())
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn never_over_the_bound_with_differing_clocks(rules in rules(), events in events()) {
        never_over(Table::with_capacity(4096).expect("there is memory"), &strict(rules), &events)?;
    }

    #[test]
    fn never_over_the_bound_in_one_slot(rules in rules(), events in events()) {
        never_over(Table::<1>::with_buckets(1, 1).expect("there is memory"), &strict(rules), &events)?;
    }

    #[test]
    fn never_over_the_bound_in_a_few_slots(rules in rules(), events in events()) {
        never_over(Table::<2>::with_buckets(3, 2).expect("there is memory"), &strict(rules), &events)?;
    }

    /// Clients that ask for one token of one layer: a table that is too small has never admitted more of them
    /// in a window than the plain limiter. Windows that float are other windows where keys are counted together.
    #[test]
    fn a_small_table_never_admits_more_than_the_reference_limiter(
        rules in rules(), demand in prop::collection::vec((0..4u64, 0..30u64), 1..150), buckets in 1..4usize,
    ) {
        let rules = strict(rules);
        let layers = rules[0].layers.iter().take(1).map(|layer| Limit { capacity: layer.tokens, ..layer.clone() });
        let simple = rule("simple", layers.collect());
        let mut gateway = Gateway::new(&[simple], Table::<1>::with_buckets(buckets, 1).expect("there is memory"));
        let (mut oracle, mut now_ms) = (Oracle::default(), START_MS);
        let (mut mine, mut plain) = (HashMap::<(String, u64), u32>::new(), HashMap::<(String, u64), u32>::new());
        let floats = matches!(gateway.rule_set.windows[0], Windows::FirstRequest { .. });
        for (client, moves_ms) in demand {
            now_ms += moves_ms;
            let (_, wish) = gateway.wishes(client, &[Some(1)], None).remove(0);
            let at = (wish.key.clone(), oracle.account(&wish, now_ms).end_ms);
            let expected = oracle.decide(&[wish], false, false, now_ms);
            *plain.entry(at.clone()).or_default() += u32::from(expected == Expected::Admitted);
            let admitted = gateway.ask(client, now_ms) == Expected::Admitted;
            let sum = mine.entry(at.clone()).or_default();
            *sum += u32::from(admitted);
            prop_assert!(floats || *sum <= plain[&at]);
        }
    }
}

/// Two keys share a counter, and their windows end at different moments: the later one's does not wipe out
/// what the earlier one has used.
#[test]
fn an_overflowed_key_keeps_its_usage_when_another_key_opens_its_window() {
    for capacity in [2, 3] {
        let random = limit(2, Windows::Random { period_ms: 100 });
        let sitter = rule("sitter", vec![plain(1, 1_000_000)]);
        let rules = [rule("random", vec![Limit { capacity, ..random }]), sitter];
        let mut gateway = Gateway::new(&rules, Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert!(matches!(gateway.judge(0, &[None, Some(1)], 0), Decision::Admitted), "it has the only slot");
        let group = |gateway: &Gateway<1>, client| gateway.keyed_request(0, client, 1).key.tag;
        let end_ms = |gateway: &Gateway<1>, client| gateway.wishes(client, &[Some(1), None], None)[0].1.end_ms(1000);
        let alike = |one: u64, other: u64| (one ^ other) >> 10 & 63 == 0;
        let pairs = (0..200).flat_map(|one| (0..200).map(move |other| (one, other)));
        let mut pairs = pairs.filter(|(one, other)| {
            let same = alike(group(&gateway, *one), group(&gateway, *other));
            same && end_ms(&gateway, *one) < end_ms(&gateway, *other)
        });
        let (early, late) = pairs.next().expect("some of them share a counter");
        let last_ms = end_ms(&gateway, early) - 1;
        let mut passes = |client| !matches!(gateway.judge(client, &[Some(1), None], last_ms), Decision::Refused);
        assert!((0..capacity).all(|_| passes(early)), "they have room for that");
        assert!(!passes(late) && !passes(early), "what was used is used");
    }
}

/// The slot of the client's window was given to another by a clock that is ahead: the request counts at the
/// table's own time, and is not refused for it.
#[test]
fn a_late_request_is_decided_at_a_later_time() {
    let mut gateway =
        Gateway::new(&[rule("only", vec![plain(1, 10)])], Table::<1>::with_buckets(1, 1).expect("there is memory"));
    assert_eq!([gateway.ask(0, 0), gateway.ask(2, 100)], [Expected::Admitted; 2]);
    assert_eq!((gateway.ask(0, 5), gateway.left()), (Expected::Admitted, (0, 20)));
    assert_eq!(gateway.ask(0, 6), Expected::Refused, "it had its token of that window");
}
