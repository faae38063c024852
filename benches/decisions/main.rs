//! Makes decisions, for a program that counts their instructions: `benches/instructions.py`.
//!
//! `decisions CASE COUNT`, where CASE is one of [`CASES`].

use std::process::exit;
use std::sync::Arc;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, PartArgument, PartKind, Prefixes, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

/// Name, limit of the two layers, keys, whether the windows slide.
const CASES: [(&str, u32, u32, bool); 5] = [
    ("fixed", u32::MAX - 1, 1, false),
    ("fixed-many", u32::MAX - 1, 10_000, false),
    ("fixed-refused", 1, 1, false),
    ("sliding", 1 << 24, 1, true),
    ("sliding-refused", 8, 1, true),
];
const SEED: Seed = Seed(1, 2);
const NOW_MS: u64 = 1_700_000_000_000;
/// As in the gateway.
const IP: KeyPart = KeyPart {
    kind: &PartKind { name: "ip", identity: "Ip", number: 1 },
    argument: PartArgument::Prefixes(Prefixes { v4: 32, v6: 64 }),
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match arguments.as_slice() {
        [name, count] => CASES.iter().find(|case| case.0 == name).zip(count.parse().ok()),
        _ => None,
    };
    let Some((case, count)) = parsed else {
        let names = CASES.map(|case| case.0).join(", ");
        eprintln!("usage: decisions CASE COUNT; cases: {names}");
        exit(2);
    };
    let admitted = decide(case, count);
    println!("{admitted} of {count} admitted");
}

fn decide((_, limit, keys, slides): &(&str, u32, u32, bool), count: u32) -> u32 {
    let layer = |tokens, period_text: &str| {
        let layer = Limit { tokens, ..Limit::parse(period_text).expect("a window") };
        match layer.windows.period_ms() {
            Some(period_ms) if *slides => Limit { windows: Windows::Sliding { period_ms }, ..layer },
            _ => layer,
        }
    };
    let layers = vec![layer(limit.saturating_add(1), "1/hour"), layer(*limit, "1/minute")];
    let rule_set = Arc::new(RuleSet::new(&[Rule::new("per-client", vec![IP], OnMissing::Never, layers)], SEED, None));
    let plan = rule_set.charge_plan([RuleId::at(0)]);
    let table = Table::with_capacity(100_000).expect("there is memory");
    let mut context = DecisionContext::default();
    let rule_hasher = KeyHasher::new(SEED, rule_set.rules[RuleId::at(0)].hash_prefix);
    let mut admitted = 0;
    for request in 0..count {
        let mut hasher = rule_hasher.clone();
        // Neighbours in a sequence of keys are not neighbours in memory: keys are hashed.
        hasher.add_part(1, &(request % keys).to_be_bytes());
        context.inputs.keyed_requests.clear();
        let keyed_request = KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost: 1 };
        context.inputs.keyed_requests.push(Some(keyed_request));
        plan.prefetch(&table, &context.inputs.keyed_requests);
        let decision = plan.decide(&table, DecisionTime::read(&|| NOW_MS), &mut context);
        admitted += u32::from(matches!(decision, Decision::Admitted));
    }
    admitted
}
