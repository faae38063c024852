//! Limits that change while requests arrive: the usage of an open window stays.
//!
//! This holds for separate windows, sharded or not, and for windows opened by requests. Debts of windows with rollover are
//! read by the new limit. Some changes give a layer other counters, and are not made while running.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::handles::VariantId;
use transom_limiter::key::Seed;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{ClientWindows, Cost, KeyValue, Override, Plan, Rule};
use transom_limiter::rule_set::{RuleChanges, RuleSet};
use transom_limiter::window::Windows;

use crate::oracle::Expected::{Admitted, Refused};
use crate::oracle::{Expected, LayerRequest};
use crate::support::{Gateway, START_MS, charge_plan, delay, limit, outcome, plain, rule, windows};

/// Tokens used, and the end of their window.
#[derive(Clone, Copy, Default)]
struct Used {
    tokens: u64,
    end_ms: u64,
}

/// A reference limiter that stores usage and no limits.
#[derive(Default)]
struct Plain(HashMap<String, Used>);

impl Plain {
    fn used(&self, layer_request: &LayerRequest, now_ms: u64) -> Used {
        let known = self.0.get(&layer_request.key).copied().unwrap_or_default();
        let is_open = known.end_ms > now_ms && known.tokens > 0;
        if is_open { known } else { Used { tokens: 0, end_ms: layer_request.end_ms(now_ms) } }
    }

    fn decide(&mut self, layer_requests: &[LayerRequest], now_ms: u64) -> Expected {
        let fits = |layer_request: &LayerRequest| {
            layer_request.cost == 0
                || self.used(layer_request, now_ms).tokens + u64::from(layer_request.cost)
                    <= u64::from(layer_request.limit.tokens)
        };
        if !layer_requests.iter().all(fits) {
            return Expected::Refused;
        }
        for layer_request in layer_requests {
            let used = self.used(layer_request, now_ms);
            self.0.insert(
                layer_request.key.clone(),
                Used { tokens: used.tokens + u64::from(layer_request.cost), ..used },
            );
        }
        Expected::Admitted
    }
}

#[derive(Clone, Debug)]
enum Event {
    Request {
        client: u64,
        costs: Vec<u32>,
        own_shard: u32,
    },
    /// New limits for all layers in order, repeated if there are more layers.
    Limits(Vec<u32>),
    /// Refunds the last admitted request.
    Refund,
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let layers = prop::collection::vec((1..8u32, windows(), 1..4u32), 1..4).prop_map(|layers| {
        let mut known = Vec::new();
        let layer = |(tokens, windows, shards)| Limit { shards, ..limit(tokens, windows) };
        let is_new = |layer: &Limit| {
            let is_new = !known.contains(&layer.windows);
            known.push(layer.windows.clone());
            is_new
        };
        layers.into_iter().map(layer).filter(is_new).collect::<Vec<_>>()
    });
    prop::collection::vec(layers, 1..3)
        .prop_map(|all| all.into_iter().enumerate().map(|(i, layers)| rule(&format!("r{i}"), layers)).collect())
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let request = (0..3u64, prop::collection::vec(0..4u32, 3), 0..4u32)
        .prop_map(|(client, costs, own_shard)| Event::Request { client, costs, own_shard });
    let action = prop_oneof![
        12 => request,
        2 => prop::collection::vec(1..9u32, 1..6).prop_map(Event::Limits),
        1 => Just(Event::Refund),
    ];
    let advance = prop_oneof![5 => Just(0u64), 4 => 1..9u64, 1 => 9..60u64];
    prop::collection::vec((advance, action), 1..100)
}

fn with_limits(rules: &[Rule], limits: &[u32]) -> Vec<Rule> {
    let mut limits = limits.iter().cycle().copied();
    let mut next = |layer: &Limit| {
        let tokens = limits.next().expect("at least one limit");
        Limit { tokens, ..layer.clone() }
    };
    rules.iter().map(|rule| Rule { layers: rule.layers.iter().map(&mut next).collect(), ..rule.clone() }).collect()
}

fn play(mut rules: Vec<Rule>, events: Vec<(u64, Event)>) -> Result<u32, TestCaseError> {
    let (mut gateway, mut plain, mut now_ms) = (Gateway::with_large_table(&rules), Plain::default(), START_MS);
    let (mut last, mut over) = (None, 0);
    for (advance_ms, event) in events {
        now_ms += advance_ms;
        match event {
            Event::Request { client, costs, own_shard } => {
                let costs: Vec<_> = costs[..rules.len()].iter().map(|cost| Some(*cost)).collect();
                gateway.context.inputs.own_shard = own_shard;
                let decision = gateway.decide(client, &costs, now_ms);
                let layer_requests: Vec<LayerRequest> = gateway
                    .layer_requests(client, &costs, None)
                    .into_iter()
                    .map(|(_, layer_request)| layer_request)
                    .collect();
                let exceeds = |layer_request: &LayerRequest| {
                    plain.used(layer_request, now_ms).tokens > u64::from(layer_request.limit.tokens)
                };
                over += u32::from(layer_requests.iter().any(exceeds));
                let expected = plain.decide(&layer_requests, now_ms);
                prop_assert_eq!(outcome(&decision), expected, "{:?}", layer_requests);
                if expected == Expected::Admitted {
                    last = Some((gateway.context.all_receipts().collect::<Vec<_>>(), layer_requests, now_ms));
                }
            }
            Event::Limits(limits) => {
                rules = with_limits(&rules, &limits);
                gateway.reload(&rules);
                // Receipts contain the limit of the charge.
                last = None;
            }
            Event::Refund => {
                let Some((receipts, layer_requests, _)) = last.take().filter(|(.., then_ms)| *then_ms == now_ms) else {
                    continue;
                };
                gateway.rule_set().refund(&receipts, u32::MAX, &gateway.table, now_ms);
                for layer_request in layer_requests {
                    plain.0.entry(layer_request.key).and_modify(|used| used.tokens -= u64::from(layer_request.cost));
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

/// The property above does reach usage above a lowered limit.
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

/// The layer and the setting for which a reload is refused.
fn change(before: &Rule, after: &Rule) -> Option<(String, &'static str)> {
    let former = RuleSet::new(std::slice::from_ref(before), Seed(3, 4), None);
    let rule_set = RuleSet::new(std::slice::from_ref(after), Seed(3, 4), Some(&former));
    rule_set.changed_counters(&former).map(|changed| (changed.layer, changed.setting))
}

/// Layers of a plan and the default that have the same windows share counters, so they count in one way.
#[test]
fn a_change_of_how_a_layer_counts_is_found() {
    let default = rule("r", vec![Limit::parse("5/minute").expect("valid"), Limit::parse("50/hour").expect("valid")]);
    let with_plan = |layer: Limit| {
        let windows = default.layers[1].windows.clone();
        let layer = Limit { windows, period_text: "60m".to_owned(), ..layer };
        Rule { plans: vec![Plan { name: "gold".to_owned(), layers: vec![layer], concurrent: None }], ..default.clone() }
    };
    let rolling = with_plan(Limit { capacity: Some(9), ..plain(7, 1) });
    let no_longer_rolling = with_plan(Limit { capacity: Some(9), ..plain(9, 1) });
    let sharded = with_plan(Limit { shards: 9, ..plain(9, 1) });
    let hour = |setting| Some(("50/hour".to_owned(), setting));
    assert_eq!(change(&default, &with_plan(plain(7, 1))), None);
    assert_eq!((change(&default, &rolling), change(&rolling, &default)), (hour("capacity"), hour("capacity")));
    assert_eq!((change(&default, &sharded), change(&sharded, &rolling)), (hour("shards"), hour("capacity")));
    assert_eq!((change(&rolling, &no_longer_rolling), change(&no_longer_rolling, &rolling)), (None, None));
    assert_eq!(change(&default, &no_longer_rolling), hour("capacity"));
    let rolling_shards = with_plan(Limit { capacity: Some(9), shards: 7, ..plain(7, 1) });
    let counting = Rule { count_refused: true, ..rolling_shards.clone() };
    assert_eq!(
        (change(&rolling, &rolling_shards), change(&sharded, &rolling_shards)),
        (hour("shards"), hour("capacity"))
    );
    assert_eq!(change(&rolling_shards, &counting), hour("count_refused"));
    assert_eq!(change(&default, &counting), hour("capacity"));
    let reserving = with_plan(Limit { reserve: 1, ..plain(7, 1) });
    assert_eq!(change(&default, &reserving), Some(("5/minute".to_owned(), "reserve")));
    let cost = Cost::Response { source: None, reserve: 1, max: 9 };
    assert_eq!(change(&default, &Rule { cost, ..default.clone() }), Some(("5/minute".to_owned(), "cost")));
    let delaying = Rule { on_limit: delay(5), ..default.clone() };
    assert_eq!(change(&rolling, &delaying), Some(("5/minute".to_owned(), "on_limit")));
    assert_eq!(change(&default, &Rule { name: "other".to_owned(), ..delaying }), None);
    assert_eq!(change(&default, &Rule { layers: vec![Limit::parse("9/2m").expect("valid")], ..default.clone() }), None);
}

#[test]
fn rules_that_begin_with_unused_counters_are_named() {
    let parsed = |text: &str| Limit::parse(text).expect("valid");
    let of = |name: &str, layers: &[&str]| rule(name, layers.iter().map(|layer| parsed(layer)).collect());
    let former = RuleSet::new(&[of("a", &["5/minute", "50/hour"]), of("b", &["5/minute"])], Seed(3, 4), None);
    let changes = |after: &[Rule]| RuleSet::new(after, Seed(3, 4), Some(&former)).changes_since(&former);
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let (a, b) = (of("a", &["50/hour", "5/minute"]), of("b", &["9/minute"]));
    assert_eq!(changes(&[b.clone(), a.clone()]), RuleChanges::default());
    assert_eq!(changes(&[of("a", &["50/hour"]), b.clone()]), RuleChanges::default());
    let renamed = RuleChanges { added: names(&["c"]), removed: names(&["b"]), recounted: vec![] };
    assert_eq!(changes(&[a.clone(), of("c", &["5/minute"])]), renamed);
    let recounted = RuleChanges { recounted: names(&["b"]), ..RuleChanges::default() };
    assert_eq!(changes(&[a.clone(), of("b", &["5/minute", "50/day"])]), recounted);
    assert_eq!(changes(&[a.clone(), Rule { key: vec![], ..b.clone() }]), recounted);
    let plan = Plan { name: "gold".to_owned(), layers: vec![parsed("9/day")], concurrent: None };
    assert_eq!(changes(&[a, Rule { plans: vec![plan], ..b }]), recounted);
}

/// Windows that only a client has do not prevent a change of the rule. They are found, so that they can be left out.
#[test]
fn windows_of_single_clients_that_would_count_in_another_way_are_found() {
    let parsed = |text: &str| Limit::parse(text).expect("valid");
    let with_client = |layers: &[Limit], rule: &Rule| {
        let own = Plan { name: "gold r=[]".to_owned(), layers: layers.to_vec(), concurrent: None };
        Rule { client_limits: vec![ClientWindows { plan: own, during_ms: None }], ..rule.clone() }
    };
    let found = |before: &Rule, after: &Rule| {
        let former = RuleSet::new(std::slice::from_ref(before), Seed(3, 4), None);
        let rule_set = RuleSet::new(std::slice::from_ref(after), Seed(3, 4), Some(&former));
        let windows = rule_set.changed_client_windows(&former);
        (rule_set.changed_counters(&former).map(|changed| changed.layer), windows)
    };
    let hour = rule("r", vec![parsed("50/hour")]);
    let day = |capacity| Limit { capacity, ..parsed("500/day") };
    let rolling = Rule { layers: vec![parsed("50/hour"), day(Some(900))], ..hour.clone() };
    let own = [parsed("70/day"), parsed("9/minute")];
    let days = || vec![("r".to_owned(), day(None).windows)];
    assert_eq!(found(&with_client(&own, &hour), &with_client(&own, &rolling)), (None, days()));
    assert_eq!(found(&with_client(&own, &rolling), &with_client(&own, &hour)), (None, days()));
    // Also if the client gets or loses the windows meanwhile.
    assert_eq!(found(&with_client(&own, &hour), &rolling), (None, vec![]));
    assert_eq!(found(&rolling, &with_client(&own, &hour)), (None, days()));
    assert_eq!(found(&with_client(&own, &hour), &with_client(&own[1..], &hour)), (None, vec![]));
    // What the operator has written counts as before.
    let sharded = Rule { layers: vec![Limit { shards: 4, ..parsed("50/hour") }], ..hour.clone() };
    assert_eq!(found(&with_client(&own, &hour), &with_client(&own, &sharded)), (Some("50/hour".to_owned()), vec![]));
}

/// A window that begins or ends to slide has other counters, in a plan and in an override too.
#[test]
fn a_change_of_sliding_is_found() {
    let default = rule("r", vec![Limit::parse("5/minute").expect("valid"), Limit::parse("50/hour").expect("valid")]);
    let slides = |layer: &Limit| {
        let period_ms = layer.windows.period_ms().expect("windows of one length");
        Limit { windows: Windows::Sliding { period_ms }, ..layer.clone() }
    };
    let layers = |minute: &Limit| vec![minute.clone(), default.layers[1].clone()];
    let (fixed, sliding) = (layers(&default.layers[0]), layers(&slides(&default.layers[0])));
    let with_default = |layers: &[Limit]| Rule { layers: layers.to_vec(), ..default.clone() };
    let with_plan = |layers: &[Limit]| {
        let plan = Plan { name: "gold".to_owned(), layers: layers.to_vec(), concurrent: None };
        Rule { plans: vec![plan], ..default.clone() }
    };
    let with_override = |layers: &[Limit]| {
        let key = vec![KeyValue::Clear("alice".to_owned())];
        Rule { overrides: vec![Override { key, layers: layers.to_vec(), concurrent: None }], ..default.clone() }
    };
    let minute = Some(("5/minute".to_owned(), "sliding"));
    for variant in [&with_default as &dyn Fn(&[Limit]) -> Rule, &with_plan, &with_override] {
        let (fixed, sliding) = (variant(&fixed), variant(&sliding));
        assert_eq!((change(&fixed, &sliding), change(&sliding, &fixed)), (minute.clone(), minute.clone()));
        assert_eq!((change(&fixed, &fixed), change(&sliding, &sliding)), (None, None));
    }
    // Clients of a new plan had the default windows; those of a removed plan or override get them.
    assert_eq!(change(&default, &with_plan(&sliding)), minute);
    for variant in [with_plan(&sliding), with_override(&sliding)] {
        assert_eq!(change(&variant, &default), minute);
        assert_eq!(change(&with_default(&sliding), &variant), minute);
    }
    assert_eq!(change(&with_plan(&fixed), &default), None);
    // Another period has other counters, and a layer beside the present ones is a further limit.
    let longer = slides(&Limit::parse("5/2m").expect("valid"));
    assert_eq!(change(&default, &with_default(&layers(&longer))), None);
    assert_eq!(change(&default, &with_default(&[fixed.clone(), vec![sliding[0].clone()]].concat())), None);
}

/// Tokens used beyond a lowered limit are not owed by the next window.
#[test]
fn a_lowered_limit_holds_until_the_window_ends() {
    let mut gateway = Gateway::with_large_table(&[rule("r", vec![plain(9, 100)])]);
    assert_eq!(gateway.request_tokens(0, 9, 50), Admitted);
    gateway.reload(&[rule("r", vec![plain(2, 100)])]);
    assert_eq!((gateway.request(0, 50), gateway.retry_at_ms(50)), (Refused, Some(100)));
    assert_eq!(gateway.request(0, 100), Admitted);
}

/// A request with a small capacity does not reduce the debt of a request with a large one.
#[test]
fn a_variant_with_a_smaller_capacity_grants_no_tokens_to_the_others() {
    let layer = |capacity: u32| Limit { capacity: Some(capacity), ..plain(10, 100) };
    let plans = vec![Plan { name: "gold".to_owned(), layers: vec![layer(500)], concurrent: None }];
    let mut gateway = Gateway::with_large_table(&[Rule { plans, ..rule("r", vec![layer(20)]) }]);
    // Odd clients have the plan.
    assert_eq!(gateway.request_tokens(1, 500, START_MS), Admitted);
    let mut keyed_request = gateway.keyed_request(0, 1, 1);
    keyed_request.variant = VariantId::DEFAULT;
    gateway.context.inputs.keyed_requests = vec![Some(keyed_request)].into();
    let now = transom_limiter::decision_time::DecisionTime::read(&|| START_MS);
    let decision = gateway.charge_plan.decide(&gateway.table, now, &mut gateway.context);
    assert_eq!(outcome(&decision), Refused);
    assert_eq!(gateway.request_tokens(1, 1, START_MS), Refused);
}

/// A caller reserves a token of the next hour, which is also charged in the first minute of that hour.
#[test]
fn a_refusal_does_not_reduce_what_is_reserved_far_ahead() {
    let layers = vec![plain(5, 60_000), Limit { reserve: 1, ..plain(1, 3_600_000) }];
    let mut gateway = Gateway::with_large_table(&[rule("r", layers)]);
    gateway.context.inputs.reserve = true;
    assert_eq!([gateway.request(0, 0), gateway.request(0, 0)], [Admitted, Expected::DelayedUntil(3_600_000)]);
    gateway.context.inputs.reserve = false;
    assert_eq!(gateway.request(0, 0), Refused);
    let minute = gateway.context.result.charges.iter().find(|charge| charge.request.limit == 5);
    assert_eq!(minute.map(|charge| charge.usage.used), Some(60 * 5 + 1));
}

/// Two rule sets count in one table while a process drains, or while processes share a file. A refusal by the one does
/// not reduce the debt that the other allowed.
#[test]
fn a_rule_set_with_a_smaller_capacity_does_not_reduce_debt() {
    let rules = |capacity| [rule("r", vec![Limit { capacity: Some(capacity), ..plain(1, 60_000) }])];
    let mut gateway = Gateway::with_large_table(&rules(5));
    let mut other = charge_plan(&rules(100), Some(gateway.rule_set()));
    let mut admitted = 0;
    for _ in 0..10 {
        std::mem::swap(&mut gateway.charge_plan, &mut other);
        admitted += u32::from(gateway.request_tokens(0, 95, START_MS) == Admitted) * 95;
        std::mem::swap(&mut gateway.charge_plan, &mut other);
        assert_eq!(gateway.request(0, START_MS), if admitted == 0 { Admitted } else { Refused });
    }
    assert_eq!(admitted, 95);
}

/// After a restart with a smaller `reserve`, the tokens that were reserved before are not granted again.
#[test]
fn a_smaller_reserve_grants_no_reserved_tokens_again() {
    const MINUTE_MS: u64 = 60_000;
    let rules = |reserve| [rule("r", vec![Limit { reserve, ..plain(1, MINUTE_MS) }])];
    let mut gateway = Gateway::with_large_table(&rules(30));
    gateway.context.inputs.reserve = true;
    let reserved = (0..40).filter(|_| gateway.request(0, START_MS) != Refused).count();
    assert_eq!(reserved, 31);
    gateway.charge_plan = charge_plan(&rules(1), None);
    gateway.context.inputs.reserve = false;
    let admitted = (0..31).filter(|minute| gateway.request(0, START_MS + minute * MINUTE_MS) == Admitted).count();
    assert_eq!(admitted, 0);
}
