//! Random rules, a gateway that applies them, and random events, for the properties. It makes no assertions.

use std::sync::Arc;

use proptest::prelude::*;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition, VariantId};
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, PartArgument, PartKind, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, KeyValue, OnLimit, Override, Plan, Rule};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_limiter::window::{Calendar, Windows};

use crate::oracle::{Expected, LayerRequest};

/// The start of every clock, Unix milliseconds.
pub const START_MS: u64 = 1_700_000_000_000;

const SEED: Seed = Seed(3, 4);
const CLIENT: KeyPart =
    KeyPart { kind: &PartKind { name: "client", identity: "Client", number: 1 }, argument: PartArgument::None };
const PATH: KeyPart =
    KeyPart { kind: &PartKind { name: "path", identity: "Path", number: 2 }, argument: PartArgument::None };

/// A limit with default settings.
pub fn plain(tokens: u32, period_ms: u64) -> Limit {
    limit(tokens, Windows::Even { period_ms, offset_ms: 0 })
}

pub fn limit(tokens: u32, windows: Windows) -> Limit {
    Limit { tokens, windows, period_text: String::new(), capacity: None, reserve: 0, shards: 1 }
}

/// A rule that counts each client and refuses at the limit.
pub fn rule(name: &str, layers: Vec<Limit>) -> Rule {
    Rule::new(name, vec![CLIENT], OnMissing::Refuse, layers)
}

pub fn delay(max_delay_ms: u64) -> OnLimit {
    OnLimit::Delay { max_delay_ms, max_waiting: 10_000 }
}

/// The charge plan of a route that has all rules.
pub fn charge_plan(rules: &[Rule], former: Option<&RuleSet>) -> ChargePlan {
    let rule_set = Arc::new(RuleSet::new(rules, SEED, former));
    rule_set.charge_plan(rule_set.rules.ids())
}

/// A gateway with one route that has all rules.
pub struct Gateway<const W: usize> {
    pub charge_plan: ChargePlan,
    pub table: Table<W>,
    pub context: DecisionContext,
}

impl Gateway<8> {
    pub fn with_large_table(rules: &[Rule]) -> Gateway<8> {
        Gateway::new(rules, Table::with_capacity(4096).expect("there is memory"))
    }
}

impl<const W: usize> Gateway<W> {
    pub fn new(rules: &[Rule], table: Table<W>) -> Gateway<W> {
        Gateway { charge_plan: charge_plan(rules, None), table, context: DecisionContext::default() }
    }

    /// Replaces the rules, as a reload does. Counters stay.
    pub fn reload(&mut self, rules: &[Rule]) {
        self.charge_plan = charge_plan(rules, Some(self.rule_set()));
        self.context = DecisionContext::default();
    }

    pub fn rule_set(&self) -> &Arc<RuleSet> {
        self.charge_plan.rule_set()
    }

    /// A default layer of a rule.
    pub fn layer(&self, rule: usize, layer: usize) -> LayerRef {
        let mut layers = self.charge_plan.layers_of_rule(PlanPosition::at(rule), VariantId::DEFAULT);
        layers.nth(layer).expect("the rule has such a layer")
    }

    /// A client's request under one rule.
    pub fn keyed_request(&self, rule: usize, client: u64, cost: u32) -> KeyedRequest {
        let entry = self.charge_plan.rule(PlanPosition::at(rule));
        let mut hasher = KeyHasher::new(SEED, entry.hash_prefix);
        hasher.add_part(1, key_of(&entry.rule, client).as_bytes());
        KeyedRequest {
            key: hasher.finish(),
            offset: offset_of(&entry.rule, client),
            variant: variant_of(&entry.rule, client),
            cost,
        }
    }

    /// Decides a client's request with this cost under each rule.
    pub fn decide(&mut self, client: u64, costs: &[Option<u32>], now_ms: u64) -> Decision {
        self.decide_at(client, costs, DecisionTime::read(&|| now_ms))
    }

    /// As [`Gateway::decide`], for a thread that may have been suspended after it read the clock.
    pub fn decide_at(&mut self, client: u64, costs: &[Option<u32>], now: DecisionTime<'_>) -> Decision {
        let keyed_request =
            |(rule, cost): (usize, &Option<u32>)| cost.map(|cost| self.keyed_request(rule, client, cost));
        let keyed_requests = costs.iter().enumerate().map(keyed_request).collect();
        self.context.inputs.keyed_requests = keyed_requests;
        self.charge_plan.decide(&self.table, now, &mut self.context)
    }

    /// Requests one token under every rule.
    pub fn request(&mut self, client: u64, now_ms: u64) -> Expected {
        self.request_tokens(client, 1, now_ms)
    }

    pub fn request_tokens(&mut self, client: u64, cost: u32, now_ms: u64) -> Expected {
        let costs = vec![Some(cost); self.charge_plan.rules().len()];
        let decision = self.decide(client, &costs, now_ms);
        outcome(&decision)
    }

    /// The time at which a request that was just refused may be retried.
    pub fn retry_at_ms(&self, now_ms: u64) -> Option<u64> {
        self.charge_plan.retry_at_ms(&self.context, now_ms)
    }

    /// The tokens left in the first layer of the only rule, and the end of its window.
    pub fn remaining(&self) -> (i64, u64) {
        let usage = self.context.result.charges.as_slice()[0].usage;
        let capacity = self.charge_plan.layer(self.layer(0, 0)).capacity;
        (i64::from(capacity) - i64::try_from(usage.used).expect("small numbers"), usage.end_ms)
    }

    /// The layers of a client's request, as the reference limiter needs them.
    pub fn layer_requests(
        &self,
        client: u64,
        costs: &[Option<u32>],
        shadow: Option<usize>,
    ) -> Vec<(LayerRef, LayerRequest)> {
        let mut all = Vec::new();
        for (position, cost) in costs.iter().enumerate() {
            let entry = self.charge_plan.rule(PlanPosition::at(position));
            let applies = if entry.rule.is_shadow() { shadow == Some(position) } else { shadow.is_none() };
            let (Some(cost), true) = (*cost, applies) else { continue };
            let variant = variant_of(&entry.rule, client);
            let layers = entry.rule.variants().nth(variant.index()).expect("there is such a variant");
            for (id, limit) in entry.variant(variant).zip(layers) {
                let key = format!("{} {} {:?}", entry.rule.name, key_of(&entry.rule, client), limit.windows);
                let max_delay_ms = match entry.rule.on_limit {
                    OnLimit::Delay { max_delay_ms, .. } => Some(max_delay_ms),
                    OnLimit::Refuse | OnLimit::Shadow => None,
                };
                let (limit, offset, count_refused) =
                    (limit.clone(), offset_of(&entry.rule, client), entry.rule.count_refused);
                let is_settled_later = entry.rule.has_response_cost();
                let layer_request = LayerRequest {
                    key,
                    rule: position,
                    limit,
                    offset,
                    cost,
                    is_settled_later,
                    max_delay_ms,
                    count_refused,
                };
                all.push((LayerRef { position: PlanPosition::at(position), id }, layer_request));
            }
        }
        all
    }
}

pub fn outcome(decision: &Decision) -> Expected {
    match decision {
        Decision::Admitted => Expected::Admitted,
        Decision::Delayed { until_ms, .. } => Expected::DelayedUntil(*until_ms),
        Decision::Refused => Expected::Refused,
    }
}

/// Two clients share each path; all clients share the global key.
fn key_of(rule: &Rule, client: u64) -> String {
    match &rule.key[0] {
        key if *key == KeyPart::GLOBAL => String::new(),
        key if *key == PATH => format!("{}", client / 2),
        _ => format!("{client}"),
    }
}

fn offset_of(rule: &Rule, client: u64) -> u64 {
    SEED.hash(&["offset", &key_of(rule, client)])
}

/// Odd clients have the plan, if the rule has one. Client 3 has the override, if there is one. A shared key has the
/// default windows only.
fn variant_of(rule: &Rule, client: u64) -> VariantId {
    VariantId::at(match () {
        () if rule.key[0] != CLIENT => 0,
        () if client == 3 && !rule.overrides.is_empty() => 1 + rule.plans.len(),
        () if rule.plans.is_empty() => 0,
        () => (client % 2) as usize,
    })
}

pub fn windows() -> impl Strategy<Value = Windows> {
    let period = prop_oneof![Just(10u64), Just(25), Just(100)];
    let ends: Vec<u64> =
        (0..300).map(|i| START_MS - 500 + 40 * i + [0, 7, 19][i as usize % 3]).chain([1 << 43]).collect();
    let calendar = Calendar { name: "listed".to_owned(), ends: ends.into() };
    prop_oneof![
        (period.clone(), prop_oneof![Just(0u64), 0..40u64, Just(START_MS + 3)])
            .prop_map(|(period_ms, offset_ms)| Windows::Even { period_ms, offset_ms }),
        period.clone().prop_map(|period_ms| Windows::Random { period_ms }),
        period.prop_map(|period_ms| Windows::FirstRequest { period_ms }),
        Just(Windows::Calendar(calendar)),
    ]
}

/// Up to four layers with different windows; the configuration does not allow equal ones either.
fn layers() -> impl Strategy<Value = Vec<Limit>> {
    let layer = (
        1..7u32,
        windows(),
        prop_oneof![2 => Just(0u32), 1 => 0..12u32],
        prop_oneof![2 => Just(0u32), 1 => 0..6u32],
        1..4u32,
    )
        .prop_map(|(tokens, windows, more, reserve, shards)| Limit {
            capacity: (more > 0).then_some(tokens + more),
            reserve,
            shards,
            ..limit(tokens, windows)
        });
    prop::collection::vec(layer, 1..5).prop_map(|layers| {
        layers.into_iter().fold(Vec::new(), |mut different: Vec<Limit>, layer| {
            if different.iter().all(|known| known.windows != layer.windows) {
                different.push(layer);
            }
            different
        })
    })
}

/// One to three rules with random values in all fields.
pub fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let key = prop_oneof![3 => Just(CLIENT), 1 => Just(PATH), 1 => Just(KeyPart::GLOBAL)];
    let cost = prop_oneof![3 => Just(Cost::Fixed(1)), 1 => Just(Cost::Response { source: None, reserve: 1, max: 9 })];
    let on_limit = prop_oneof![
        3 => Just(OnLimit::Refuse),
        2 => (0..300u64).prop_map(delay),
        1 => Just(OnLimit::Shadow),
    ];
    let one = (key, layers(), prop::option::of(layers()), prop::option::of(layers()), cost, on_limit, any::<bool>());
    let one = one.prop_map(|(key, layers, plan, own, cost, on_limit, count_refused)| {
        let plans = plan.map(|layers| Plan { name: "gold".to_owned(), layers, concurrent: None }).into_iter().collect();
        let own = own.map(|layers| Override { key: vec![KeyValue::Clear("3".to_owned())], layers, concurrent: None });
        let overrides = own.into_iter().collect();
        without_sharded_accounts(Rule {
            key: vec![key],
            plans,
            overrides,
            cost,
            on_limit,
            count_refused,
            ..rule("", layers)
        })
    });
    prop::collection::vec(one, 1..4)
        .prop_map(|all| all.into_iter().enumerate().map(|(i, rule)| Rule { name: format!("r{i}"), ..rule }).collect())
}

/// Removes shards where tokens roll over or are reserved: such shards hold somewhat less than one counter, see
/// `sharded_accounts`.
fn without_sharded_accounts(mut rule: Rule) -> Rule {
    let reserves = rule.reserves();
    let rolling: Vec<Windows> =
        rule.variants().flatten().filter(|limit| limit.capacity.is_some()).map(|limit| limit.windows.clone()).collect();
    let plans = rule.plans.iter_mut().flat_map(|plan| &mut plan.layers);
    let overrides = rule.overrides.iter_mut().flat_map(|own| &mut own.layers);
    rule.layers
        .iter_mut()
        .chain(plans)
        .chain(overrides)
        .filter(|limit| reserves || rolling.contains(&limit.windows))
        .for_each(|limit| limit.shards = 1);
    rule
}

/// An event, and the time by which the clock of one of two threads advances before.
#[derive(Clone, Debug)]
pub struct Event {
    pub advance_ms: u64,
    pub thread: usize,
    pub client: u64,
    pub action: Action,
}

#[derive(Clone, Debug)]
pub enum Action {
    /// A request, with its cost under each rule that applies.
    Request { costs: Vec<Option<u32>>, reserve: bool, own_shard: u32 },
    /// Refunds a request, at most `tokens` of each charge. `back`: 0 for the last request, 1 for the one before.
    Refund { back: usize, tokens: u32 },
    /// A response states that its request costs more than was charged.
    ChargeExcess { rule: usize, cost: u32 },
}

pub fn events() -> impl Strategy<Value = Vec<Event>> {
    let cost = prop_oneof![1 => Just(None), 8 => Just(Some(1u32)), 4 => (0..6u32).prop_map(Some), 1 => (0..30u32).prop_map(Some)];
    let request = (prop::collection::vec(cost, 3), prop::bool::weighted(0.3), 0..4u32)
        .prop_map(|(costs, reserve, own_shard)| Action::Request { costs, reserve, own_shard });
    let action = prop_oneof![
        9 => request,
        2 => (prop_oneof![3 => Just(0usize), 1 => 0..5usize], prop_oneof![2 => Just(u32::MAX), 1 => 1..5u32])
            .prop_map(|(back, tokens)| Action::Refund { back, tokens }),
        1 => (0..3usize, 1..12u32).prop_map(|(rule, cost)| Action::ChargeExcess { rule, cost }),
    ];
    let advance = prop_oneof![4 => Just(0u64), 4 => 1..9u64, 2 => 9..60u64, 1 => 60..400u64];
    let event = (advance, 0..2usize, 0..4u64, action).prop_map(|(advance_ms, thread, client, action)| Event {
        advance_ms,
        thread,
        client,
        action,
    });
    prop::collection::vec(event, 1..100)
}
