//! Rules whose counters several gateways share: decisions with leased tokens, on top of known usage, and during an outage.

use transom_limiter::bucket::Key;
use transom_limiter::charge_plan::LayerRef;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, Handle, PlanPosition, RuleId, VariantId};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{OnLimit, OnOutage, Plan, Rule, Sharing};
use transom_limiter::rule_set::CountingMode;
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Windows;
use transom_limiter::window_kind::Usage;

use crate::oracle::Expected::{self, Admitted, Refused};
use crate::support::{Gateway, delay, limit, outcome, plain, rule};

const NOW_MS: u64 = 50;
const END_MS: u64 = 100;

fn leased(tokens: u32) -> Rule {
    Rule { sharing: Sharing::Lease, ..rule("leased", vec![plain(tokens, END_MS)]) }
}

/// The counter of client 0 in the first layer of a rule.
fn counter(gateway: &Gateway<8>, rule: usize) -> Counter {
    gateway.charge_plan.layer(gateway.layer(rule, 0)).counter(gateway.keyed_request(rule, 0, 1))
}

fn deposit(gateway: &Gateway<8>, tokens: u32) {
    assert_eq!(gateway.table.deposit(counter(gateway, 0), END_MS, tokens, NOW_MS), DepositResult::Stored);
}

fn know(gateway: &Gateway<8>, used: u32) {
    gateway.table.set_known_usage(counter(gateway, 0), END_MS, used, NOW_MS);
}

fn set_inputs(gateway: &mut Gateway<8>, cost: u32, is_outage: bool) {
    let requests =
        (0..gateway.charge_plan.rules().len()).map(|rule| Some(gateway.keyed_request(rule, 0, cost))).collect();
    gateway.context.clear();
    gateway.context.inputs.keyed_requests = requests;
    let modes = &mut gateway.context.sharing.counting_modes;
    gateway.charge_plan.set_counting_modes(|_rule| is_outage, modes);
}

/// Decides a request of client 0; `None` if leased tokens are missing.
fn decide(gateway: &mut Gateway<8>, cost: u32, is_outage: bool) -> Option<Expected> {
    set_inputs(gateway, cost, is_outage);
    let Gateway { charge_plan, table, context } = gateway;
    let (layers, clock) = (charge_plan.enforced_layers_of(context, NOW_MS), || NOW_MS);
    match charge_plan.decide_locally(&layers, table, DecisionTime::read(&clock), context, true) {
        LocalDecision::Decided(decision) => Some(outcome(&decision)),
        LocalDecision::MissingTokens => None,
    }
}

/// Refunds the last decision.
fn refund(gateway: &Gateway<8>) {
    let receipts: Vec<_> = gateway.context.all_receipts().collect();
    gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, NOW_MS);
}

/// Usage and ceiling of each charge, as reported.
fn reported(context: &DecisionContext) -> Vec<(u64, u64)> {
    context.result.charges.iter().map(|charge| (charge.usage.used, charge.request.ceiling)).collect()
}

/// The rule of each layer, and its position among those of all variants of the rule.
fn positions(layers: impl IntoIterator<Item = LayerRef>) -> Vec<(usize, usize)> {
    layers.into_iter().map(|layer| (layer.position.index(), layer.id.position.index())).collect()
}

#[test]
fn a_request_has_the_layers_of_its_plan() {
    let plan = Plan { name: "gold".to_owned(), layers: vec![plain(20, END_MS)], concurrent: None };
    let shadow = Rule { on_limit: OnLimit::Shadow, ..leased(1) };
    let mut gateway = Gateway::with_large_table(&[Rule { plans: vec![plan], ..leased(10) }, shadow]);
    for client in [0, 1] {
        let keyed_request = gateway.keyed_request(0, client, 1);
        gateway.context.inputs.keyed_requests = vec![Some(keyed_request), None].into();
        let Gateway { charge_plan, context, .. } = &mut gateway;
        assert_eq!(positions(charge_plan.enforced_layers_of(context, NOW_MS)), [(0, client as usize)]);
        assert_eq!(positions(charge_plan.layers_of_rule(PlanPosition::at(1), VariantId::DEFAULT)), [(1, 0)]);
    }
}

#[test]
fn leased_tokens_are_spent_and_then_missing() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    assert_eq!(
        (decide(&mut gateway, 1, false), gateway.context.sharing.missing_tokens.as_slice()),
        (None, &[ChargePosition::FIRST][..])
    );
    know(&gateway, 7);
    deposit(&gateway, 4);
    assert_eq!(decide(&mut gateway, 3, false), Some(Admitted));
    assert_eq!(reported(&gateway.context), [(6, 10)], "seven are granted, and one of them is not spent");
    assert_eq!(decide(&mut gateway, 2, false), None, "four are left: one here, three in the store");
    assert_eq!(decide(&mut gateway, 5, false), Some(Refused), "more than are left");
    assert_eq!(reported(&gateway.context), [(6, 10)]);
    assert_eq!(decide(&mut gateway, 4, false), None, "as many as are left");
    assert_eq!(gateway.table.leased_tokens(counter(&gateway, 0), NOW_MS), 1, "a refused request takes none");
    assert_eq!(decide(&mut gateway, 11, false), Some(Refused), "more than the limit");
}

/// Of a sliding window, tokens come back before the end of the known usage.
#[test]
fn the_store_is_asked_about_a_sliding_window() {
    let sliding = Rule { sharing: Sharing::Lease, ..rule("r", vec![limit(10, Windows::Sliding { period_ms: 80 })]) };
    let mut gateway = Gateway::with_large_table(&[sliding]);
    know(&gateway, 10);
    assert_eq!((decide(&mut gateway, 1, false), decide(&mut gateway, 11, false)), (None, Some(Refused)));
    // Tokens that were leased under a greater limit.
    deposit(&gateway, 2);
    know(&gateway, 12);
    assert_eq!(decide(&mut gateway, 1, false), None, "ten of ten are used, as far as is known");
    know(&gateway, 11);
    assert_eq!(decide(&mut gateway, 1, false), Some(Admitted), "nine are used");
}

/// A refusal ends when the store said, and usage of a lease that is not spent when the lease ends.
#[test]
fn an_exhausted_lease_reports_the_end_that_the_store_reported() {
    let layer = limit(10, Windows::FirstRequest { period_ms: 100 });
    let mut gateway = Gateway::with_large_table(&[Rule { layers: vec![layer], ..leased(10) }]);
    gateway.table.set_known_usage(counter(&gateway, 0), 120, 10, NOW_MS);
    assert_eq!(decide(&mut gateway, 1, false), Some(Refused));
    assert_eq!(gateway.remaining(), (0, 120));
    assert_eq!(gateway.table.deposit(counter(&gateway, 0), 110, 2, NOW_MS), DepositResult::Stored);
    for (left, end_ms) in [(1, 110), (0, 120)] {
        assert_eq!(decide(&mut gateway, 1, false), Some(Admitted));
        assert_eq!(gateway.remaining(), (left, end_ms));
    }
    // The last token goes back to its lease.
    refund(&gateway);
    assert_eq!(gateway.table.leased_tokens(counter(&gateway, 0), NOW_MS), 1);
}

/// The store is asked for more tokens when their number has halved.
#[test]
fn a_lease_runs_low_when_it_has_halved() {
    let mut gateway = Gateway::with_large_table(&[leased(100), rule("local", vec![plain(8, END_MS)])]);
    deposit(&gateway, 9);
    for low in [false, true, false, false, false, true, false, true] {
        assert_eq!(decide(&mut gateway, 1, false), Some(Admitted));
        let leases = gateway.context.sharing.low_leases.clone();
        let layers: Vec<usize> =
            leases.iter().map(|position| gateway.context.result.charges[*position].layer.position.index()).collect();
        assert_eq!(layers, if low { vec![0] } else { vec![] });
    }
}

/// Tokens that were leased under a greater limit are not spent.
#[test]
fn tokens_of_a_former_limit_are_not_spent() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    know(&gateway, 30);
    deposit(&gateway, 4);
    assert_eq!(decide(&mut gateway, 1, false), Some(Refused));
    know(&gateway, 13);
    assert_eq!(decide(&mut gateway, 1, false), Some(Admitted), "nine were used");
    assert_eq!(decide(&mut gateway, 1, false), Some(Refused));
}

/// The rest of the tokens stays leased for requests that have the greater limit.
#[test]
fn a_lease_keeps_the_tokens_of_a_greater_limit() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    know(&gateway, 40);
    deposit(&gateway, 40);
    assert_eq!(decide(&mut gateway, 3, false), Some(Admitted));
    assert_eq!(reported(&gateway.context), [(3, 10)]);
    assert_eq!(gateway.table.leased_tokens(counter(&gateway, 0), NOW_MS), 37);
    assert_eq!((decide(&mut gateway, 8, false), decide(&mut gateway, 7, false)), (Some(Refused), Some(Admitted)));
}

#[test]
fn a_charge_states_what_it_takes_and_what_was_counted_locally() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    assert_eq!(decide(&mut gateway, 4, true), Some(Admitted));
    deposit(&gateway, 5);
    for own in [2, 0] {
        assert_eq!(decide(&mut gateway, own, false), Some(Admitted));
        let Gateway { charge_plan, table, context } = &mut gateway;
        charge_plan.add_local_usage(table, context, ChargePosition::FIRST);
        assert_eq!(context.result.charges.as_slice()[0].usage, Usage { used: 4 + u64::from(own), end_ms: END_MS });
    }
}

/// If another rule refuses, tokens need not be fetched.
#[test]
fn a_refusal_by_another_rule_reports_what_is_known() {
    for (known, reported_used) in [(None, 0), (Some(7), 7)] {
        let mut gateway = Gateway::with_large_table(&[leased(10), rule("local", vec![plain(3, END_MS)])]);
        if let Some(used) = known {
            know(&gateway, used);
        }
        assert_eq!(decide(&mut gateway, 3, false), None);
        gateway.decide(0, &[None, Some(3)], NOW_MS);
        assert_eq!(decide(&mut gateway, 1, false), Some(Refused));
        assert!(gateway.context.sharing.missing_tokens.is_empty());
        let charges = gateway.context.result.charges.iter();
        let found: Vec<_> =
            charges.map(|charge| (charge.layer.position.index(), charge.is_full, charge.usage.used)).collect();
        assert_eq!(found, [(1, true, 3), (0, false, reported_used)]);
    }
}

#[test]
fn an_outage_counts_on_top_of_known_usage() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    know(&gateway, 7);
    for (cost, expected, used) in [(4, Refused, 7), (2, Admitted, 9), (1, Admitted, 10), (1, Refused, 10)] {
        assert_eq!(decide(&mut gateway, cost, true), Some(expected));
        assert_eq!(reported(&gateway.context), [(used, 10)]);
    }
}

/// The charge behind it was made in the next window, which the usage of other gateways does not change.
#[test]
fn a_refund_in_an_outage_takes_nothing_from_a_later_charge() {
    let layer = Limit { capacity: Some(4), ..plain(1, END_MS) };
    let mut gateway = Gateway::with_large_table(&[Rule { layers: vec![layer], ..leased(1) }]);
    know(&gateway, 1);
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    let first = gateway.context.clone();
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    assert_eq!(reported(&gateway.context), [(3, 4)]);
    let last = std::mem::replace(&mut gateway.context, first);
    for (context, left) in [(None, 2), (Some(last), 1)] {
        gateway.context = context.unwrap_or(gateway.context);
        refund(&gateway);
        let (keyed_request, clock) = (gateway.keyed_request(0, 0, 1), || NOW_MS);
        let layer = gateway.layer(0, 0).id;
        let used = gateway.rule_set().local_usage(layer, keyed_request, &gateway.table, DecisionTime::read(&clock));
        assert_eq!(used.used, left);
    }
}

#[test]
fn usage_of_an_outage_is_reported_and_reset() {
    let mut gateway = Gateway::with_large_table(&[leased(10)]);
    assert_eq!(decide(&mut gateway, 2, true), Some(Admitted));
    let (rule_set, table, only) = (gateway.rule_set(), &gateway.table, gateway.layer(0, 0).id);
    let (keyed_request, clock) = (gateway.keyed_request(0, 0, 1), || panic!("the windows are independent"));
    let used = |now| rule_set.local_usage(only, keyed_request, table, now);
    assert_eq!(used(DecisionTime::starting_at(NOW_MS, &clock)), Usage { used: 2, end_ms: END_MS });
    let (now_ms, mut announced) = (|| NOW_MS, Vec::new());
    let now = DecisionTime::read(&now_ms);
    assert_eq!(
        [0; 2].map(|_| rule_set.reset_local(only, keyed_request, table, now, |tokens| announced.push(tokens))),
        [2, 0]
    );
    assert_eq!((announced, used(now).used), (vec![2], 0));
}

/// A refund that comes after the report of its charge takes known usage out of the local counter.
#[test]
fn a_local_counter_below_the_known_usage_begins_again() {
    let layer = Limit { capacity: Some(30), ..plain(20, END_MS) };
    let mut gateway = Gateway::with_large_table(&[Rule { layers: vec![layer], ..leased(20) }]);
    assert_eq!(decide(&mut gateway, 3, true), Some(Admitted));
    let late: Vec<_> = gateway.context.all_receipts().collect();
    let (only, keyed_request, clock) = (gateway.layer(0, 0).id, gateway.keyed_request(0, 0, 1), || NOW_MS);
    let now = DecisionTime::read(&clock);
    assert_eq!(gateway.rule_set().reset_local(only, keyed_request, &gateway.table, now, |_| ()), 3);
    know(&gateway, 5);
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    refund(&gateway);
    gateway.rule_set().refund(&late, u32::MAX, &gateway.table, NOW_MS);
    for (known, admitted) in [(30, Refused), (29, Admitted), (29, Refused)] {
        know(&gateway, known);
        assert_eq!(decide(&mut gateway, 1, true), Some(admitted), "{known} are known to be used");
    }
}

/// The table has no slot for the word that says how much of the counter is known usage.
#[test]
fn known_usage_counts_once_in_a_full_table() {
    let layer = Limit { capacity: Some(30), ..plain(20, END_MS) };
    let rules = [Rule { layers: vec![layer], ..leased(20) }];
    let mut gateway = Gateway::new(&rules, Table::with_buckets(1, 1).expect("there is memory"));
    assert_eq!(decide(&mut gateway, 3, true), Some(Admitted));
    refund(&gateway);
    know(&gateway, 5);
    let counter = counter(&gateway, 0);
    let fills = |tag| {
        let other = Counter { key: Key { tag, ..counter.key }, ..counter };
        gateway.table.deposit(other, END_MS, 1, NOW_MS) == DepositResult::Stored
    };
    assert_eq!((1..).take_while(|tag| fills(*tag)).count(), 6, "two of eight are in use");
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    let (only, keyed_request, clock) = (gateway.layer(0, 0).id, gateway.keyed_request(0, 0, 1), || NOW_MS);
    let now = DecisionTime::read(&clock);
    assert_eq!(gateway.rule_set().reset_local(only, keyed_request, &gateway.table, now, |_| ()), 1);
}

#[test]
fn receipts_are_taken_once() {
    let layer = Limit { shards: 2, ..plain(4, END_MS) };
    let mut gateway = Gateway::with_large_table(&[rule("plain", vec![plain(9, END_MS)]), rule("sharded", vec![layer])]);
    let mut take = |first, first_shard_receipt| {
        gateway.table = Table::with_capacity(64).expect("there is memory");
        assert_eq!(gateway.request_tokens(0, 4, NOW_MS), Admitted);
        gateway.context.sharing.first_shard_receipt = first_shard_receipt;
        let taken = gateway.context.take_receipts(ChargePosition::at(first));
        (taken.len(), gateway.context.all_receipts().count())
    };
    assert_eq!([take(0, 1), take(1, 1), take(2, 0)], [(3, 0), (2, 1), (2, 1)]);
}

#[test]
fn the_outage_policy_selects_how_a_rule_is_counted() {
    for (on_outage, mode) in [
        (OnOutage::Local, CountingMode::LocalFallback),
        (OnOutage::Allow, CountingMode::Remote),
        (OnOutage::Refuse, CountingMode::Remote),
    ] {
        let rules = [rule("local", vec![plain(1, END_MS)]), Rule { on_outage, ..leased(1) }];
        let mut gateway = Gateway::with_large_table(&rules);
        set_inputs(&mut gateway, 1, true);
        assert_eq!(gateway.context.sharing.counting_modes.as_slice(), [CountingMode::Local, mode]);
        set_inputs(&mut gateway, 1, false);
        assert_eq!(gateway.context.sharing.counting_modes.as_slice(), [CountingMode::Local, CountingMode::Leased]);
    }
    let sharded = |sharing| {
        let layer = Limit { shards: 2, ..plain(4, END_MS) };
        Rule { sharing, ..rule("sharded", vec![layer]) }
    };
    let exact = Rule { sharing: Sharing::Exact, ..leased(1) };
    let penalty = Rule { penalty_ms: Some(500), ..leased(1) };
    for (rule, mode) in [
        (exact, CountingMode::Remote),
        (sharded(Sharing::Exact), CountingMode::Leased),
        (sharded(Sharing::Local), CountingMode::Local),
        (penalty, CountingMode::Remote),
    ] {
        let mut gateway = Gateway::with_large_table(&[rule]);
        set_inputs(&mut gateway, 1, false);
        assert_eq!(gateway.context.sharing.counting_modes.as_slice(), [mode]);
    }
}

/// Requests that wait take their position from the store, not from leases.
#[test]
fn missing_tokens_are_fetched_before_a_request_waits() {
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(1000), ..leased(1) }]);
    assert_eq!(decide(&mut gateway, 1, false), None);
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    assert_eq!(decide(&mut gateway, 1, true), Some(Expected::DelayedUntil(END_MS)));
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(1000), ..leased(10) }]);
    deposit(&gateway, 1);
    assert_eq!(decide(&mut gateway, 2, false), None);
}

/// A refused request takes what remains once: here during an outage, otherwise in the store.
#[test]
fn a_counted_refusal_is_charged_once() {
    let layers = vec![plain(10, END_MS), plain(100, 1000)];
    let mut gateway = Gateway::with_large_table(&[Rule { layers, count_refused: true, ..leased(1) }]);
    let refuse = |gateway: &mut Gateway<8>, cost: u32, in_outage: bool| {
        assert_eq!(decide(gateway, cost, in_outage), Some(Refused));
        let Gateway { charge_plan, table, context } = gateway;
        charge_plan.charge_refusal(table, context, ChargePosition::FIRST);
        let (keyed_requests, now_ms) = (&context.inputs.keyed_requests, context.result.decided_ms);
        for charge in context.result.charges.iter_mut().filter(|charge| charge.mode == CountingMode::LocalFallback) {
            let keyed_request = keyed_requests[charge.layer.position].unwrap();
            charge.usage = charge_plan.rule_set().charge_remaining(charge.layer.id, keyed_request, table, now_ms).1;
        }
    };
    assert_eq!(decide(&mut gateway, 7, true), Some(Admitted));
    refuse(&mut gateway, 5, true);
    assert_eq!(reported(&gateway.context), [(10, 10), (12, 100)]);
    refuse(&mut gateway, 101, false);
    assert_eq!(decide(&mut gateway, 0, true), Some(Admitted));
    assert_eq!(reported(&gateway.context), [(10, 10), (12, 100)]);
    // Others have used three tokens.
    let mut gateway = Gateway::with_large_table(&[Rule { count_refused: true, ..leased(10) }]);
    know(&gateway, 3);
    assert_eq!(decide(&mut gateway, 5, true), Some(Admitted));
    refuse(&mut gateway, 4, true);
    assert_eq!(reported(&gateway.context), [(10, 10)]);
    assert_eq!(decide(&mut gateway, 0, true), Some(Admitted));
    assert_eq!(reported(&gateway.context), [(10, 10)]);
}

#[test]
fn a_peek_states_the_usage_of_all_gateways() {
    for sharing in [Sharing::Lease, Sharing::Exact] {
        let mut gateway = Gateway::with_large_table(&[Rule { sharing, ..leased(10) }]);
        know(&gateway, 7);
        deposit(&gateway, 2);
        set_inputs(&mut gateway, 2, false);
        let Gateway { charge_plan, table, context } = &mut gateway;
        let now = DecisionTime::read(&|| NOW_MS);
        // The lease holds two tokens, and the store has more.
        for (cost, fits) in [(2, true), (5, true), (6, false)] {
            context.inputs.keyed_requests[PlanPosition::at(0)].as_mut().expect("the rule applies").cost = cost;
            assert_eq!(charge_plan.peek(table, now, context), fits);
            assert_eq!(
                (context.result.charges[ChargePosition::FIRST].is_full, reported(context)),
                (!fits, vec![(5, 10)])
            );
        }
        charge_plan.set_counting_modes(|_rule| true, &mut context.sharing.counting_modes);
        for (cost, fits) in [(3, true), (4, false)] {
            context.inputs.keyed_requests[PlanPosition::at(0)].as_mut().expect("the rule applies").cost = cost;
            assert_eq!(charge_plan.peek_local_fallback(charge_plan.enforced(), table, now, context), fits);
            assert_eq!(reported(context), [(7, 10)]);
        }
    }
}

/// A penalty that the store has begun lasts during an outage.
#[test]
fn a_known_penalty_refuses_during_an_outage() {
    let mut gateway = Gateway::with_large_table(&[Rule { penalty_ms: Some(500), ..leased(10) }]);
    assert_eq!(decide(&mut gateway, 1, true), Some(Admitted));
    let compiled = gateway.charge_plan.rule(PlanPosition::at(0));
    let penalty = compiled.penalty.expect("the rule has one");
    let counter = compiled.layer(penalty).counter(gateway.keyed_request(0, 0, 1));
    gateway.table.set_known_usage(counter, 300, 1, NOW_MS);
    assert_eq!(decide(&mut gateway, 1, true), Some(Refused));
    let of_penalty =
        gateway.context.charge_of(LayerRef { position: PlanPosition::at(0), id: penalty }).expect("it was charged");
    assert_eq!(of_penalty.usage, Usage { used: 1, end_ms: 300 });
}

/// Prepared charges are made together, and read again from where they are counted.
#[test]
fn prepared_charges_are_made_and_read_again() {
    let rules = [leased(10), rule("local", vec![plain(3, END_MS)])];
    let mut gateway = Gateway::with_large_table(&rules);
    know(&gateway, 7);
    set_inputs(&mut gateway, 2, true);
    let Gateway { charge_plan, table, context } = &mut gateway;
    let layers = charge_plan.enforced();
    let rules_of: Vec<usize> = layers.iter().map(|layer| layer.position.index()).collect();
    assert_eq!(rules_of, [1, 0]);
    let [first, second, end] = [0, 1, 2].map(ChargePosition::at);
    assert_eq!(charge_plan.add_prepared_charges(layers, table, NOW_MS, context), first);
    assert_eq!(reported(context), [(0, 3), (0, 3)], "seven of ten are used elsewhere");
    assert!(charge_plan.acquire_prepared(table, NOW_MS, context, first, end));
    charge_plan.refresh_usage(table, NOW_MS, context, first);
    assert_eq!(reported(context), [(2, 3), (2, 3)]);
    assert!(context.result.charges.iter().all(|charge| charge.is_full), "two do not fit again");
    assert!(!charge_plan.acquire_prepared(table, NOW_MS, context, first, end));
    context.subtract_costs(first, second);
    context.sharing.counting_modes[PlanPosition::at(0)] = CountingMode::Remote;
    context.result.charges.as_mut_slice()[1].usage = Usage { used: 9, end_ms: END_MS };
    charge_plan.refresh_usage(table, NOW_MS, context, second);
    assert_eq!(reported(context), [(0, 3), (9, 10)], "the store's usage stays");
}

#[test]
fn a_request_may_wait_if_every_full_rule_allows_it() {
    let (wait, refuse) = (delay(9), OnLimit::Refuse);
    // Whether each of two rules delays, the reserve of their layers, whether the request may reserve, and whether it may wait:
    // where a delay is possible, and where not.
    for (limits, layer_reserve, reserve, may_wait, in_immediate_plan) in [
        ([&wait, &wait], 0, false, true, false),
        ([&wait, &wait], 1, false, true, false),
        ([&wait, &wait], 0, true, true, false),
        ([&wait, &wait], 1, true, true, true),
        ([&wait, &refuse], 0, true, false, false),
        ([&refuse, &wait], 0, true, false, false),
        ([&refuse, &refuse], 1, true, true, true),
        ([&refuse, &refuse], 1, false, false, false),
        ([&refuse, &refuse], 0, true, false, false),
        ([&wait, &OnLimit::Shadow], 1, true, false, false),
    ] {
        let layers = vec![Limit { reserve: layer_reserve, ..plain(1, END_MS) }];
        let rule =
            |name: usize| Rule { on_limit: *limits[name], layers: layers.clone(), ..rule(["a", "b"][name], vec![]) };
        let mut gateway = Gateway::with_large_table(&[rule(0), rule(1)]);
        gateway.context.inputs.reserve = reserve;
        set_inputs(&mut gateway, 1, false);
        let layers = [gateway.layer(0, 0), gateway.layer(1, 0)];
        let Gateway { charge_plan, table, context } = &mut gateway;
        charge_plan.add_prepared_charges(&layers, table, NOW_MS, context);
        assert!(!charge_plan.may_be_delayed(context), "no rule is full");
        context.result.charges.iter_mut().for_each(|charge| charge.is_full = true);
        let found = [charge_plan, &charge_plan.rule_set().immediate_plan([RuleId::at(0), RuleId::at(1)], true)]
            .map(|plan| plan.may_be_delayed(context));
        assert_eq!(found, [may_wait, in_immediate_plan], "{limits:?}, reserve {layer_reserve}, {reserve}");
    }
}
