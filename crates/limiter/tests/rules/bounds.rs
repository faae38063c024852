//! Bounds that hold with small tables, differing clocks, and abandoned waits: of consecutive windows, the first grants at most
//! the capacity, and each later one its limit.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use transom_limiter::decision::Decision;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::WindowsId;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

use crate::oracle::{Expected, LayerRequest, Oracle};
use crate::support::{Action, Event, Gateway, START_MS, events, limit, plain, rule, rules};

/// Tokens admitted or to be admitted, by account and end of the window.
#[derive(Default)]
struct PassedTokens {
    accounts: HashMap<String, (LayerRequest, BTreeMap<u64, i64>)>,
}

/// A request to refund: its receipts, and its tokens in `PassedTokens`.
struct PastRequest {
    receipts: Vec<ShardReceipt>,
    passes: Vec<(LayerRequest, u64)>,
}

impl PassedTokens {
    fn add(&mut self, layer_request: &LayerRequest, end_ms: u64, tokens: i64) {
        let (_, account) =
            self.accounts.entry(layer_request.key.clone()).or_insert_with(|| (layer_request.clone(), BTreeMap::new()));
        *account.entry(end_ms).or_default() += tokens;
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (layer_request, account) in self.accounts.values() {
            let (all, limit) = (&layer_request.limit.windows, i64::from(layer_request.limit.tokens));
            for first_ms in account.keys() {
                let mut sum = 0;
                for (last_ms, tokens) in account.range(first_ms..) {
                    sum += tokens;
                    let windows = match all.period_ms() {
                        Some(period_ms) => (last_ms - first_ms) / period_ms,
                        None => all.windows_between(*first_ms, *last_ms),
                    };
                    let most = i64::from(layer_request.limit.capacity()) + windows as i64 * limit;
                    prop_assert!(
                        sum <= most,
                        "{} of {} from {} to {} in {}",
                        sum,
                        most,
                        first_ms,
                        last_ms,
                        layer_request.key
                    );
                }
            }
        }
        Ok(())
    }
}

/// The same rules without settings that may exceed the bound: reserves, response costs, and shards, whose receipts do
/// not show all windows.
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

/// Runs all events on two clocks that may differ, and checks the admitted tokens against the bound.
fn never_over<const W: usize>(table: Table<W>, rules: &[Rule], events: &[Event]) -> Result<u64, TestCaseError> {
    let mut gateway = Gateway::new(rules, table);
    let (mut passed, mut past, mut clocks) = (PassedTokens::default(), Vec::<PastRequest>::new(), [START_MS; 2]);
    for event in events {
        clocks[event.thread] += event.advance_ms;
        let now_ms = clocks[event.thread];
        match &event.action {
            Action::Request { costs, .. } => {
                let costs = &costs[..rules.len()];
                // A second read of the clock returns the later clock, or the same time again.
                let second_read_ms = if event.advance_ms % 2 == 0 { clocks[0].max(clocks[1]) } else { now_ms };
                let decision =
                    gateway.decide_at(event.client, costs, DecisionTime::starting_at(now_ms, &|| second_read_ms));
                if let Decision::Refused = decision {
                    continue;
                }
                let mut passes = Vec::new();
                for (layer_ref, layer_request) in gateway.layer_requests(event.client, costs, None) {
                    let charge = gateway.context.charge_of(layer_ref).expect("the layer was charged");
                    let all = &layer_request.limit.windows;
                    let (own_ms, end_ms) = (charge.request.end_ms, charge.usage.end_ms);
                    let end_ms = match &layer_request.limit.windows {
                        // Keys with different windows that share a counter share its windows as well. A late thread may
                        // then be counted in any of its key's windows since.
                        Windows::Random { .. } if clocks.iter().any(|clock_ms| *clock_ms >= own_ms) => continue,
                        Windows::Random { .. } => own_ms,
                        _ => end_ms,
                    };
                    // A delayed request counts in the window that it waits for; otherwise `floor` is 0.
                    let passes_in = all.end_after(end_ms, charge.request.floor / u64::from(layer_request.limit.tokens));
                    passed.add(&layer_request, passes_in, layer_request.cost.into());
                    passes.push((layer_request, passes_in));
                }
                past.push(PastRequest { receipts: gateway.context.all_receipts().collect(), passes });
            }
            Action::Refund { back, .. } => {
                let Some(nth) = past.len().checked_sub(1 + back) else { continue };
                let PastRequest { receipts, passes } = past.remove(nth);
                gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, now_ms);
                passes.iter().for_each(|(layer_request, end_ms)| {
                    passed.add(layer_request, *end_ms, -i64::from(layer_request.cost))
                });
            }
            Action::ChargeExcess { .. } => {}
        }
        passed.check()?;
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

    /// Requests for one token of one layer: a small table never admits more of them in a window than the reference
    /// limiter. First-request windows are excluded, because keys that share a counter share windows.
    #[test]
    fn a_small_table_never_admits_more_than_the_reference_limiter(
        rules in rules(), demand in prop::collection::vec((0..4u64, 0..30u64), 1..150), buckets in 1..4usize,
    ) {
        let rules = strict(rules);
        let layers = rules[0].layers.iter().take(1).map(|layer| Limit { capacity: None, ..layer.clone() });
        let simple = rule("simple", layers.collect());
        let mut gateway = Gateway::new(&[simple], Table::<1>::with_buckets(buckets, 1).expect("there is memory"));
        let (mut oracle, mut now_ms) = (Oracle::default(), START_MS);
        let (mut mine, mut plain) = (HashMap::<(String, u64), u32>::new(), HashMap::<(String, u64), u32>::new());
        let floats = matches!(gateway.rule_set().windows[WindowsId::FIRST], Windows::FirstRequest { .. });
        for (client, advance_ms) in demand {
            now_ms += advance_ms;
            let (_, layer_request) = gateway.layer_requests(client, &[Some(1)], None).remove(0);
            let at = (layer_request.key.clone(), oracle.account(&layer_request, now_ms).end_ms);
            let expected = oracle.decide(&[layer_request], false, false, now_ms);
            *plain.entry(at.clone()).or_default() += u32::from(expected == Expected::Admitted);
            let admitted = gateway.request(client, now_ms) == Expected::Admitted;
            let sum = mine.entry(at.clone()).or_default();
            *sum += u32::from(admitted);
            prop_assert!(floats || *sum <= plain[&at]);
        }
    }
}

/// Two keys share a counter, and their windows end at different times. A request of the later key does not reset the
/// usage of the earlier one.
#[test]
fn an_overflowed_key_keeps_its_usage_when_another_key_opens_its_window() {
    for capacity in [2, 3] {
        let random = limit(2, Windows::Random { period_ms: 100 });
        let occupant = rule("occupant", vec![plain(1, 1_000_000)]);
        let rules = [rule("random", vec![Limit { capacity: Some(capacity), ..random }]), occupant];
        let mut gateway = Gateway::new(&rules, Table::<1>::with_buckets(1, 1).expect("there is memory"));
        assert!(matches!(gateway.decide(0, &[None, Some(1)], 0), Decision::Admitted), "the occupant has the only slot");
        let group = |gateway: &Gateway<1>, client| gateway.keyed_request(0, client, 1).key.tag;
        let end_ms =
            |gateway: &Gateway<1>, client| gateway.layer_requests(client, &[Some(1), None], None)[0].1.end_ms(1000);
        let alike = |one: u64, other: u64| (one ^ other) >> 10 & 63 == 0;
        let pairs = (0..200).flat_map(|one| (0..200).map(move |other| (one, other)));
        let mut pairs = pairs.filter(|(one, other)| {
            let same = alike(group(&gateway, *one), group(&gateway, *other));
            same && end_ms(&gateway, *one) < end_ms(&gateway, *other)
        });
        let (early, late) = pairs.next().expect("some keys share a counter");
        let last_ms = end_ms(&gateway, early) - 1;
        let mut passes = |client| !matches!(gateway.decide(client, &[Some(1), None], last_ms), Decision::Refused);
        assert!((0..capacity).all(|_| passes(early)), "tokens are left");
        assert!(!passes(late) && !passes(early), "the usage is kept");
    }
}

/// A thread with a later clock reuses the slot of the client's window. The client's request is decided at the horizon
/// of the table, and not refused.
#[test]
fn a_late_request_is_decided_at_a_later_time() {
    let mut gateway =
        Gateway::new(&[rule("only", vec![plain(1, 10)])], Table::<1>::with_buckets(1, 1).expect("there is memory"));
    assert_eq!([gateway.request(0, 0), gateway.request(2, 100)], [Expected::Admitted; 2]);
    assert_eq!((gateway.request(0, 5), gateway.remaining()), (Expected::Admitted, (0, 20)));
    assert_eq!(gateway.request(0, 6), Expected::Refused, "the token of that window is used");
}
