//! What a compiled rule set says about its rules and plans.

use std::sync::Arc;

use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::handles::{Handle, PlanPosition, RuleId, VariantId};
use transom_limiter::key::Seed;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{ClientWindows, Cost, KeyValue, OnLimit, Override, Plan, Rule};
use transom_limiter::rule_set::RuleSet;
use transom_limiter::window::Windows;

use crate::support::{limit, plain, rule};

fn parsed(texts: &[&str]) -> Vec<Limit> {
    texts.iter().map(|text| Limit::parse(text).expect("valid")).collect()
}

#[test]
fn limits_and_variants_have_names_and_positions() {
    let plan = |name: &str, concurrent| Plan { name: name.to_owned(), layers: parsed(&["50/hour"]), concurrent };
    let own = Override { key: vec![KeyValue::Clear("alice".to_owned())], layers: parsed(&["7/day"]), concurrent: None };
    let several = Rule {
        plans: vec![plan("gold", Some(9)), plan("silver", None)],
        overrides: vec![own.clone(), own],
        penalty_ms: Some(1000),
        ..rule("several", parsed(&["5/minute", "9/hour"]))
    };
    let slots_only = Rule { concurrent: Some(3), ..rule("slots", vec![]) };
    let rule_set = RuleSet::new(&[several, slots_only, rule("one", parsed(&["5/minute"]))], Seed(3, 4), None);
    let names = |rule: usize| rule_set.rules[RuleId::at(rule)].limit_names().collect::<Vec<_>>();
    let expected = [
        "several-minute",
        "several-hour",
        "several",
        "several",
        "several",
        "several",
        "several-penalty",
        "several-concurrent",
    ];
    assert_eq!((names(0), names(1), names(2)), (expected.to_vec(), vec!["slots"], vec!["one"]));
    let several = &rule_set.rules[RuleId::at(0)];
    let hour = several.variant(VariantId::DEFAULT).nth(1).expect("there are two layers");
    assert_eq!(
        (
            several.layer_name(hour),
            several.suffix(hour),
            several.limit_names().position(|name| Some(name) == several.concurrent_name())
        ),
        ("several-hour", ":hour", Some(7))
    );
    assert_eq!(
        (several.concurrent_name(), rule_set.rules[RuleId::at(2)].concurrent_name()),
        (Some("several-concurrent"), None)
    );
    assert_eq!(
        ["silver", "gold", "other"].map(|name| several.rule.variant_of_plan(name)),
        [2, 1, 0].map(VariantId::at)
    );
    let overrides: Vec<VariantId> = several.rule.override_variants().map(|(variant, _)| variant).collect();
    assert_eq!(overrides, [3, 4].map(VariantId::at));
    let first = |variant| several.variant(VariantId::at(variant)).next().map(|layer| layer.position.index());
    assert_eq!([0, 1, 2, 3, 4].map(first), [0, 2, 3, 4, 5].map(Some));
    let rule = &several.rule;
    assert_eq!(
        [0, 1, 2, 3].map(|variant| rule.plan_of(VariantId::at(variant)).map(|plan| plan.name.as_str())),
        [None, Some("gold"), Some("silver"), None]
    );
    assert_eq!(
        [2, 3, 4, 5].map(|variant| rule.override_of(VariantId::at(variant)).map(|(number, _)| number)),
        [None, Some(1), Some(2), None]
    );
}

/// The names by which refusals are counted do not depend on how many clients have limits of their own.
#[test]
fn windows_of_single_clients_are_counted_by_few_names() {
    let plan = |text: &str| Plan { name: text.to_owned(), layers: parsed(&[text, "9/hour"]), concurrent: None };
    let client_limits =
        ["5/minute", "7/minute", "3/2h", "4/3h"].map(|text| ClientWindows { plan: plan(text), during_ms: None });
    let client_limits = client_limits.to_vec();
    let rule = Rule { client_limits, penalty_ms: Some(1000), ..rule("r", parsed(&["5/minute", "9/day"])) };
    let rule_set = RuleSet::new(&[rule], Seed(3, 4), None);
    let compiled = &rule_set.rules[RuleId::at(0)];
    let names: Vec<&str> = compiled.limit_names().collect();
    assert_eq!(names, ["r-minute", "r-day", "r-client-limits", "r-penalty"]);
    let counted: Vec<Vec<&str>> = compiled
        .variants()
        .map(|(_, layers)| layers.map(|(layer, _)| names[compiled.counted_name(layer).index()]).collect())
        .collect();
    let (minute, other) = (["r-minute", "r-client-limits"], ["r-client-limits"; 2]);
    assert_eq!(counted, [["r-minute", "r-day"], minute, minute, other, other]);
    assert_eq!(compiled.penalty.map(|penalty| names[compiled.counted_name(penalty).index()]), Some("r-penalty"));
}

#[test]
fn rules_and_plans_say_what_they_do() {
    let costs = [Cost::Fixed(3), Cost::Response { source: None, reserve: 5, max: 9 }];
    assert_eq!(costs.map(|cost| cost.default_cost()), [3, 5]);
    let sliding = rule("sliding", vec![limit(5, Windows::Sliding { period_ms: 800 })]);
    let rules = [
        rule("plain", vec![plain(5, 100)]),
        Rule { count_refused: true, ..rule("counts", vec![plain(5, 100)]) },
        Rule { penalty_ms: Some(500), ..rule("penalty", vec![plain(5, 100)]) },
        Rule { concurrent: Some(1), ..rule("slots", vec![plain(5, 100)]) },
        rule("sharded", vec![Limit { shards: 2, ..plain(5, 100) }]),
        Rule { on_limit: OnLimit::Shadow, ..rule("shadow", vec![plain(5, 100)]) },
        sliding,
    ];
    assert_eq!(rules.each_ref().map(Rule::has_sliding_windows), [false, false, false, false, false, false, true]);
    let rule_set = Arc::new(RuleSet::new(&rules, Seed(3, 4), None));
    let describe = |charge_plan: &ChargePlan| {
        [
            charge_plan.is_plain(),
            charge_plan.counts_refused(),
            charge_plan.has_penalties(),
            charge_plan.limits_concurrency(),
        ]
    };
    let plans = [0, 1, 2, 3, 4, 5, 6].map(|rule| rule_set.charge_plan([RuleId::at(rule)]));
    let (plain, other) = ([true, false, false, false], [false; 4]);
    assert_eq!(
        plans.each_ref().map(describe),
        [
            plain,
            [false, true, false, false],
            [false, false, true, false],
            [true, false, false, true],
            other,
            plain,
            other
        ]
    );
    let consuming = |consumes| describe(&rule_set.immediate_plan([RuleId::at(1), RuleId::at(2)], consumes));
    assert_eq!([true, false].map(consuming), [[false, true, true, false], other]);
    assert_eq!(describe(&rule_set.immediate_plan([RuleId::at(0)], true)), plain);
    // A query enforces shadow rules.
    assert_eq!(
        [&plans[0], &plans[5]].map(|plan| (plan.is_shadow(PlanPosition::at(0)), plan.enforced().len())),
        [(false, 1), (true, 0)]
    );
    let query = rule_set.query_plan([RuleId::at(5), RuleId::at(0)], true);
    assert_eq!(
        (query.enforced().len(), query.shadow_rules().len(), query.rules().as_slice()),
        (2, 0, &[5, 0].map(RuleId::at)[..])
    );
}
