//! Compiled rules: which counters a request is charged in, and in which order.
//!
//! A [`RuleSet`] is compiled from rules as configured, and gives each route a [`ChargePlan`]: the layers of all its
//! rules, in the order in which they are charged. This module knows neither HTTP nor the clock.

use std::ops::Range;
use std::sync::Arc;

use crate::acquire::Charge;
use crate::bucket::Key;
use crate::concurrency::ConcurrencyTable;
use crate::identity;
use crate::key::{KeyHash, KeyPart, Seed};
use crate::limit::Limit;
use crate::rule::{OnLimit, Rule, Sharing};
use crate::sharded_counter::Sharding;
use crate::store_key::WindowSegments;
use crate::table::{Counter, Table};
use crate::waiter_limit::WaiterLimit;
use crate::window::{Time, Windows};
use crate::window_kind::{AcquireRequest, CEILING_MAX, WindowKind};

/// A request under one rule: its key and its cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyedRequest {
    /// The hash of the key.
    pub key: KeyHash,
    /// The offset of the key's windows, for windows with random offsets: a fraction of the period in units of 2^-64.
    pub offset: u64,
    /// The variant of the rule that applies; 0: the default windows.
    pub variant: usize,
    /// Tokens that the request takes.
    pub cost: u32,
}

/// How a rule is counted in one decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountingMode {
    /// In local counters.
    Local,
    /// With leased tokens.
    Leased,
    /// In local counters during an outage of the store, on top of the known usage of other gateways.
    LocalFallback,
    /// Not here: by the store.
    Remote,
}

/// A compiled layer: the identity of its counters, and what requests take from them.
#[derive(Clone, Debug)]
pub struct CompiledLayer {
    pub(super) id: u64,
    /// Moves the counters of the layer away from those of the rule's other layers.
    bucket_offset: u64,
    /// A request for no tokens of this layer, in no window.
    pub request: AcquireRequest,
    /// The position in [`RuleSet::windows`].
    pub windows_index: usize,
    /// Tokens that may accumulate; at least the limit.
    pub capacity: u32,
    /// Tokens that may be taken from later windows.
    pub reserve: u32,
    /// Shards of each counter; 1: not sharded.
    pub shards: u32,
    /// Whether the cost is known after the response only, so that a request of cost 0 may still take tokens.
    is_settled_later: bool,
    /// The order of charging: layers with the smallest value first.
    rank: (bool, u32, u64),
}

/// A layer that a running gateway cannot change, because the change gives it other counters: those in use would be
/// forgotten.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangedCounters {
    /// The name of the rule.
    pub rule: String,
    /// The layer, as `LIMIT/PERIOD`.
    pub layer: String,
    /// The setting that changed.
    pub setting: &'static str,
}

/// A compiled rule.
#[derive(Debug)]
pub struct CompiledRule {
    /// The rule as configured.
    pub rule: Rule,
    /// The prefix of the hash of every key of this rule.
    pub hash_prefix: u64,
    /// The default layers, then those of each plan, then those of each override.
    pub(super) layers: Vec<CompiledLayer>,
    names: Vec<String>,
    /// The suffixes of the counters' names in the store, one for each layer.
    suffixes: Vec<String>,
    variants: Vec<Range<usize>>,
    /// The position of the layer that counts penalties: the last one, in no variant.
    pub penalty: Option<usize>,
    /// By variant: the most requests of a key in flight.
    pub(super) concurrent: Vec<Option<u32>>,
    concurrent_name: Option<String>,
    /// The requests that this rule delays.
    pub waiters: Arc<WaiterLimit>,
}

/// A layer of a charge plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRef {
    /// The position of the rule in [`ChargePlan::rules`].
    pub rule: usize,
    /// The position of the layer in the compiled rule.
    pub layer: usize,
}

/// The rules of one route, and the order in which their layers are charged.
#[derive(Debug, Default)]
pub struct ChargePlan {
    /// Positions in [`RuleSet::rules`], in the order of the configuration.
    pub rules: Vec<usize>,
    /// The default layers of the enforced rules, in the order of charging.
    enforced: Vec<LayerRef>,
    /// Copies of these layers: a decision finds them here without their rules.
    enforced_layers: Vec<CompiledLayer>,
    /// Positions of the shadow rules.
    shadow_rules: Vec<usize>,
    /// Positions of the rules that limit the requests in flight, in the order in which their slots are taken.
    pub(super) concurrent: Vec<usize>,
    /// Whether several gateways share counters of any of the rules.
    pub is_shared: bool,
    /// How each rule is counted while the store is reachable.
    pub(super) counting_modes: Vec<CountingMode>,
    pub(super) may_delay: bool,
    counts_refused: bool,
    has_penalties: bool,
    /// Whether every layer of every variant is plain and not sharded, and a refusal has no side effects. The compiler
    /// specializes such decisions.
    is_plain: bool,
    /// Where the counters of a request are searched first: each bucket once, for all rules.
    buckets: Vec<KeyBucket>,
}

/// A bucket of a key under one rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct KeyBucket {
    /// The position of the rule in [`ChargePlan::rules`].
    rule: usize,
    /// Added to [`KeyHash::bucket_hash`].
    offset: u64,
}

/// All rules, compiled.
#[derive(Debug, Default)]
pub struct RuleSet {
    /// The compiled rules, in the order of the configuration.
    pub rules: Vec<CompiledRule>,
    /// The windows of all layers, each kind once.
    pub windows: Vec<Windows>,
    /// The requests in flight. A rule set takes it over from the former one.
    pub concurrency: Arc<ConcurrencyTable>,
}

impl CompiledLayer {
    /// Whether the layer counts penalties. Requests take nothing from it; it is full while a penalty lasts.
    pub fn is_penalty(&self) -> bool {
        self.capacity == 0
    }

    /// The charge of one request in this layer, in the window ending at `end_ms`.
    #[inline]
    pub(super) fn new_charge(&self, keyed_request: KeyedRequest, end_ms: u64, own_shard: u32) -> Charge {
        let bucket_hash = keyed_request.key.bucket_hash.wrapping_add(self.bucket_offset);
        let counter = Counter { key: Key::new(bucket_hash, keyed_request.key.tag ^ self.id), layer: self.id };
        let mut request = AcquireRequest { end_ms, cost: keyed_request.cost, ..self.request };
        if self.is_penalty() || keyed_request.cost == 0 {
            self.set_zero_cost(&mut request);
        }
        let mut charge = Charge::new(counter, request);
        charge.sharding = Sharding { shards: self.shards, first_shard: own_shard };
        charge
    }

    /// Makes a request take nothing. It is admitted whatever the usage, unless a penalty lasts, or its cost is known after the
    /// response only: then one token has to be left.
    #[cold]
    fn set_zero_cost(&self, request: &mut AcquireRequest) {
        request.cost = 0;
        request.ceiling = match self {
            _ if self.is_penalty() => 0,
            CompiledLayer { is_settled_later: true, .. } => request.ceiling - 1,
            CompiledLayer { is_settled_later: false, .. } => CEILING_MAX,
        };
    }
}

impl CompiledRule {
    /// The layer at this position.
    pub fn layer(&self, layer: usize) -> &CompiledLayer {
        &self.layers[layer]
    }

    /// The name of a layer in responses and metrics.
    pub fn layer_name(&self, layer: usize) -> &str {
        &self.names[layer]
    }

    /// The suffix of the names of a layer's counters in the store.
    pub fn suffix(&self, layer: usize) -> &str {
        &self.suffixes[layer]
    }

    /// The name of the limit of requests in flight; `None` if there is none.
    pub fn concurrent_name(&self) -> Option<&str> {
        self.concurrent_name.as_deref()
    }

    /// The names of all layers, then that of the limit of requests in flight.
    pub fn limit_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str).chain(self.concurrent_name())
    }

    /// The position of the limit of requests in flight in [`CompiledRule::limit_names`].
    pub fn concurrent_index(&self) -> usize {
        self.names.len()
    }

    /// The positions of the layers of a variant.
    pub fn variant(&self, variant: usize) -> Range<usize> {
        self.variants[variant].clone()
    }

    /// The variant for the clients of a plan; 0, the default, if the rule has none.
    pub fn variant_of_plan(&self, plan: &str) -> usize {
        self.rule.plans.iter().position(|known| known.name == plan).map_or(0, |position| 1 + position)
    }

    /// The variant of one of the rule's overrides.
    pub fn variant_of_override(&self, position: usize) -> usize {
        1 + self.rule.plans.len() + position
    }
}

/// Layers of similar periods share a bucket, and so a cache line. All layers of a rule together would overfill one bucket.
/// The group depends on the period alone, so that the order of layers does not move their counters.
fn bucket_group(typical_ms: u64) -> u64 {
    match typical_ms {
        0..=10_000 => 0,
        10_001..=3_600_000 => 1,
        3_600_001..=604_800_000 => 2,
        _ => 3,
    }
}

/// The setting whose change gave a layer of a rule other counters.
fn changed_setting(rule: &Rule, former: &Rule, layer: &CompiledLayer, other: &CompiledLayer) -> &'static str {
    let is_same_kind = layer.request.kind == other.request.kind;
    match () {
        // Where refusals count, windows that depend on each other are not sharded.
        () if is_same_kind && layer.request.kind.carries_debt() && rule.count_refused != former.count_refused => {
            "count_refused"
        }
        () if is_same_kind => "shards",
        () if rule.delays() != former.delays() => "on_limit",
        () if rule.has_response_cost() != former.has_response_cost() => "cost",
        () if rule.reserves() != former.reserves() => "reserve",
        () => "capacity",
    }
}

/// The layers by which the keys of a variant of `rule` are counted under `other`, an earlier or later state of the rule:
/// those of the same plan or override, or the default ones.
fn layers_under<'a>(rule: &Rule, variant: usize, other: &'a Rule) -> &'a [Limit] {
    let plan = rule.plan_of(variant).and_then(|plan| other.plans.iter().find(|known| known.name == plan.name));
    let own = rule.override_of(variant).and_then(|(_, own)| other.overrides.iter().find(|known| known.key == own.key));
    plan.map(|plan| &plan.layers).or(own.map(|own| &own.layers)).unwrap_or(&other.layers)
}

/// The layer of a variant of `rule` in whose place `other` has a layer with the same period, of which one is sliding.
fn toggled_sliding<'a>(rule: &'a Rule, other: &Rule) -> Option<&'a Limit> {
    let has = |layers: &[Limit], limit: &Limit| layers.iter().any(|known| known.windows == limit.windows);
    let is_sliding = |limit: &Limit| matches!(limit.windows, Windows::Sliding { .. });
    rule.variants().enumerate().find_map(|(variant, layers)| {
        let others = layers_under(rule, variant, other);
        let replaces = |limit: &Limit, known: &Limit| {
            is_sliding(limit) != is_sliding(known)
                && limit.windows.typical_ms() == known.windows.typical_ms()
                && !has(layers, known)
        };
        layers.iter().find(|limit| !has(others, limit) && others.iter().any(|known| replaces(limit, known)))
    })
}

impl ChargePlan {
    /// The default layers of the enforced rules, in the order of charging.
    pub fn enforced(&self) -> &[LayerRef] {
        &self.enforced
    }

    /// Whether a layer is counted in the table of this process, and not by the store. Without shared rules, no decision sets the
    /// counting modes, so the context may have those of an earlier request to another route.
    pub(super) fn is_counted_here(&self, counting_modes: &[CountingMode], layer_ref: LayerRef) -> bool {
        let mode = counting_modes.get(layer_ref.rule);
        !self.is_shared || !matches!(mode, Some(CountingMode::Leased | CountingMode::Remote))
    }

    /// As [`ChargePlan::enforced`], with the compiled layers.
    pub(super) fn enforced_layers(&self) -> impl Iterator<Item = (LayerRef, &CompiledLayer)> + Clone {
        self.enforced.iter().copied().zip(&self.enforced_layers)
    }

    /// Prefetches the buckets in which a request's counters are searched first: see [`Table::prefetch`]. To be called as soon as
    /// the keys are known; for several requests, before the first of them is decided. Expects that the windows of a plan or an
    /// override are about as long as the default ones: the counters of others may be elsewhere.
    #[inline]
    pub fn prefetch<const W: usize>(&self, table: &Table<W>, keyed_requests: &[Option<KeyedRequest>]) {
        for bucket in &self.buckets {
            if let Some(Some(keyed_request)) = keyed_requests.get(bucket.rule) {
                table.prefetch(keyed_request.key.bucket_hash.wrapping_add(bucket.offset));
            }
        }
    }

    /// Whether any of the rules counts refused requests.
    pub fn counts_refused(&self) -> bool {
        self.counts_refused
    }

    /// Whether a refusal by any of the rules starts a penalty.
    pub fn has_penalties(&self) -> bool {
        self.has_penalties
    }

    /// Whether a decision reads plain counters only, and a refusal neither changes a counter nor waits.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Whether any of the rules limits the requests in flight.
    pub fn limits_concurrency(&self) -> bool {
        !self.concurrent.is_empty()
    }

    /// Positions of the shadow rules.
    pub fn shadow_rules(&self) -> &[usize] {
        &self.shadow_rules
    }
}

impl RuleSet {
    /// Compiles these rules. `former` is the previous rule set, if there is one: its requests may still wait.
    pub fn new(rules: &[Rule], seed: Seed, former: Option<&RuleSet>) -> RuleSet {
        let concurrency = former.map_or_else(Arc::default, |former| Arc::clone(&former.concurrency));
        let mut rule_set = RuleSet { rules: Vec::new(), windows: Vec::new(), concurrency };
        for rule in rules {
            let mut compiled = rule_set.compile_rule(rule, seed);
            let known = former.and_then(|former| former.rules.iter().find(|known| known.rule.name == rule.name));
            if let Some(known) = known.filter(|known| known.rule.on_limit == rule.on_limit) {
                compiled.waiters = Arc::clone(&known.waiters);
            }
            rule_set.rules.push(compiled);
        }
        rule_set
    }

    /// The first layer of `former` that has other counters in this rule set, although its key and windows are the same, or
    /// differ only in whether they slide.
    pub fn changed_counters(&self, former: &RuleSet) -> Option<ChangedCounters> {
        for compiled in &self.rules {
            let known = former.rules.iter().find(|known| known.hash_prefix == compiled.hash_prefix);
            let change = |limit: &Limit, setting| ChangedCounters {
                rule: compiled.rule.name.clone(),
                layer: format!("{}/{}", limit.tokens, limit.period_text),
                setting,
            };
            // Also from `former`: the keys of a removed plan or override have the default layers now.
            let toggled = |known: &CompiledRule| {
                toggled_sliding(&compiled.rule, &known.rule)
                    .or(toggled_sliding(&known.rule, &compiled.rule))
                    .map(|limit| change(limit, "sliding"))
            };
            if let Some(changed) = known.and_then(toggled) {
                return Some(changed);
            }
            for (limit, layer) in compiled.rule.variants().flatten().zip(&compiled.layers) {
                let same_windows = |other: &&CompiledLayer| {
                    former.windows[other.windows_index] == limit.windows && !other.is_penalty()
                };
                let known = known.and_then(|known| Some((known, known.layers.iter().find(same_windows)?)));
                if let Some((known, other)) = known.filter(|(_, other)| other.id != layer.id) {
                    return Some(change(limit, changed_setting(&compiled.rule, &known.rule, layer, other)));
                }
            }
        }
        None
    }

    fn compile_rule(&mut self, rule: &Rule, seed: Seed) -> CompiledRule {
        let mut hashes = identity::layers(rule).into_iter().map(|identity| identity.hash(seed));
        let (mut layers, mut names, mut variants) = (Vec::new(), Vec::new(), Vec::new());
        for variant in rule.variants() {
            let first = layers.len();
            for (i, limit) in variant.iter().enumerate() {
                names.push(rule.layer_name(variant, i));
                layers.extend(hashes.next().map(|id| self.compile_layer(rule, limit, id)));
            }
            variants.push(first..layers.len());
        }
        let max_waiting = match rule.on_limit {
            OnLimit::Delay { max_waiting, .. } => u64::from(max_waiting),
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        let segments = WindowSegments::of(rule);
        let mut suffixes: Vec<String> =
            rule.variants().flatten().map(|limit| segments.segment(&limit.windows).to_owned()).collect();
        let penalty = rule.penalty_ms.map(|period_ms| {
            layers.extend(hashes.next().map(|id| self.compile_penalty(rule, period_ms, id)));
            names.extend(rule.penalty_name());
            suffixes.push(":penalty".to_owned());
            layers.len() - 1
        });
        CompiledRule {
            hash_prefix: identity::key_prefix(rule, seed),
            layers,
            names,
            suffixes,
            variants,
            penalty,
            concurrent: rule.concurrent_variants().collect(),
            concurrent_name: rule.concurrent_name(),
            waiters: WaiterLimit::new(max_waiting),
            rule: rule.clone(),
        }
    }

    /// The layer that counts penalties: a penalty is a window of its length, opened by a refusal.
    fn compile_penalty(&mut self, rule: &Rule, period_ms: u64, id: u64) -> CompiledLayer {
        let windows_index = self.windows_index(&Windows::FirstRequest { period_ms });
        CompiledLayer {
            id,
            bucket_offset: bucket_group(period_ms).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            request: AcquireRequest {
                end_ms: 0,
                ceiling: 0,
                floor: 0,
                limit: 1,
                cost: 0,
                kind: WindowKind::Floating,
                windows: windows_index as u32,
            },
            windows_index,
            shards: 1,
            capacity: 0,
            reserve: 0,
            is_settled_later: false,
            rank: (rule.key.contains(&KeyPart::Global), 0, period_ms),
        }
    }

    /// The position of these windows in [`RuleSet::windows`].
    fn windows_index(&mut self, windows: &Windows) -> usize {
        self.windows.iter().position(|known| known == windows).unwrap_or_else(|| {
            self.windows.push(windows.clone());
            self.windows.len() - 1
        })
    }

    fn compile_layer(&mut self, rule: &Rule, limit: &Limit, id: u64) -> CompiledLayer {
        let windows_index = self.windows_index(&limit.windows);
        let (kind, shards) = rule.counter_kind(limit);
        let typical_ms = limit.windows.typical_ms();
        let (capacity, windows) = (limit.capacity(), windows_index as u32);
        CompiledLayer {
            id,
            bucket_offset: bucket_group(typical_ms).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            request: AcquireRequest {
                end_ms: 0,
                ceiling: capacity.into(),
                floor: 0,
                limit: limit.tokens,
                cost: 0,
                kind,
                windows,
            },
            windows_index,
            shards,
            capacity,
            reserve: limit.reserve,
            is_settled_later: rule.has_response_cost(),
            rank: (rule.key.contains(&KeyPart::Global), limit.tokens, typical_ms),
        }
    }

    /// The time of a decision by this rule set.
    pub fn time(&self, now_ms: u64) -> Time<'_> {
        Time { now_ms, windows: &self.windows }
    }

    /// The charge plan of a route with these rules (positions in [`RuleSet::rules`]).
    pub fn charge_plan(&self, rules: &[usize]) -> ChargePlan {
        let rule = |position: usize| &self.rules[rules[position]].rule;
        let mut charge_plan = ChargePlan {
            rules: rules.to_vec(),
            enforced: Vec::new(),
            enforced_layers: Vec::new(),
            shadow_rules: (0..rules.len()).filter(|position| rule(*position).is_shadow()).collect(),
            concurrent: self.concurrent_order(rules),
            may_delay: (0..rules.len()).any(|position| rule(position).delays()),
            counts_refused: (0..rules.len()).any(|position| rule(position).count_refused),
            has_penalties: (0..rules.len()).any(|position| rule(position).penalty_ms.is_some()),
            counting_modes: rules.iter().map(|rule| self.rules[*rule].counting_mode()).collect(),
            is_shared: (0..rules.len()).any(|position| rule(position).sharing != Sharing::Local),
            is_plain: false,
            buckets: Vec::new(),
        };
        let enforced = (0..rules.len()).filter(|position| !rule(*position).is_shadow());
        let layers = enforced.flat_map(|position| self.layers_of_rule(&charge_plan, position, 0)).collect();
        self.set_enforced(&mut charge_plan, layers);
        let layers = || rules.iter().flat_map(|rule| &self.rules[*rule].layers);
        charge_plan.is_plain = !charge_plan.counts_refused
            && !charge_plan.is_shared
            && layers().all(|layer| layer.request.kind == WindowKind::Plain && layer.shards == 1);
        for rule in 0..rules.len() {
            for layer_ref in self.layers_of_rule(&charge_plan, rule, 0) {
                let bucket = KeyBucket { rule, offset: self.layer_of(&charge_plan, layer_ref).bucket_offset };
                if !charge_plan.buckets.contains(&bucket) {
                    charge_plan.buckets.push(bucket);
                }
            }
        }
        charge_plan
    }

    /// The charge plan for decisions that cannot wait, by these rules (positions in [`RuleSet::rules`]). `consumes`: refused
    /// requests consume tokens where the rules say so.
    pub fn immediate_plan(&self, rules: &[usize], consumes: bool) -> ChargePlan {
        let mut charge_plan = self.charge_plan(rules);
        charge_plan.counts_refused &= consumes;
        charge_plan.has_penalties &= consumes;
        charge_plan.may_delay = false;
        charge_plan
    }

    /// As [`RuleSet::immediate_plan`], with shadow rules enforced.
    pub fn query_plan(&self, rules: &[usize], consumes: bool) -> ChargePlan {
        let mut charge_plan = self.immediate_plan(rules, consumes);
        charge_plan.shadow_rules.clear();
        let layers = |position| self.layers_of_rule(&charge_plan, position, 0);
        let layers = (0..rules.len()).flat_map(layers).collect();
        self.set_enforced(&mut charge_plan, layers);
        charge_plan
    }

    /// Sets the layers that are charged by default.
    fn set_enforced(&self, charge_plan: &mut ChargePlan, mut layers: Vec<LayerRef>) {
        self.sort_layers(charge_plan, &mut layers);
        charge_plan.enforced_layers =
            self.compiled_layers(charge_plan, &layers).map(|(_, layer)| layer.clone()).collect();
        charge_plan.enforced = layers;
    }

    /// These layers, with the compiled ones.
    pub(super) fn compiled_layers<'a>(
        &'a self,
        charge_plan: &'a ChargePlan,
        layers: &'a [LayerRef],
    ) -> impl Iterator<Item = (LayerRef, &'a CompiledLayer)> + Clone {
        layers.iter().map(|layer_ref| (*layer_ref, self.layer_of(charge_plan, *layer_ref)))
    }

    /// The layers of one variant of a rule, and that of its penalties.
    pub(super) fn layers_of_rule(
        &self,
        charge_plan: &ChargePlan,
        position: usize,
        variant: usize,
    ) -> impl Iterator<Item = LayerRef> + use<> {
        let compiled = &self.rules[charge_plan.rules[position]];
        compiled.variant(variant).chain(compiled.penalty).map(move |layer| LayerRef { rule: position, layer })
    }

    /// Sorts layers in the order of charging. Counters that are likelier to be full come first: those of one client
    /// before those of all clients, and small limits before large ones. So a charge that must be refunded is in a
    /// counter that few requests share.
    pub(super) fn sort_layers(&self, charge_plan: &ChargePlan, layers: &mut [LayerRef]) {
        layers.sort_by_key(|layer_ref| self.layer_of(charge_plan, *layer_ref).rank);
    }

    /// The compiled layer.
    pub fn layer_of(&self, charge_plan: &ChargePlan, layer_ref: LayerRef) -> &CompiledLayer {
        self.rules[charge_plan.rules[layer_ref.rule]].layer(layer_ref.layer)
    }

    /// Whether the rule at this position of the charge plan is a shadow rule.
    pub fn is_shadow(&self, charge_plan: &ChargePlan, position: usize) -> bool {
        self.rules[charge_plan.rules[position]].rule.is_shadow()
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::key::OnMissing;

    #[test]
    fn the_buckets_of_a_plan_are_those_of_its_charges_each_once() {
        let layers = ["9/second", "99/minute", "999/hour", "9999/day"].map(|text| Limit::parse(text).unwrap()).to_vec();
        let rule = |name: &str| Rule::new(name, vec![KeyPart::Global], OnMissing::Never, layers.clone());
        let rule_set = RuleSet::new(&[rule("a"), rule("b")], Seed(1, 2), None);
        let charge_plan = rule_set.charge_plan(&[1, 0]);
        let key = KeyHash { bucket_hash: u64::MAX - 5, tag: 7 };
        let keyed_request = KeyedRequest { key, offset: 0, variant: 0, cost: 1 };
        for rule in 0..2 {
            let layers = rule_set.layers_of_rule(&charge_plan, rule, 0);
            let mut charged: Vec<u64> = layers
                .map(|layer| rule_set.layer_of(&charge_plan, layer).new_charge(keyed_request, 0, 0))
                .map(|charge| charge.counter.key.bucket_hash)
                .collect();
            charged.dedup();
            let buckets = charge_plan.buckets.iter().filter(|bucket| bucket.rule == rule);
            let prefetched: Vec<u64> = buckets.map(|bucket| key.bucket_hash.wrapping_add(bucket.offset)).collect();
            assert_eq!((prefetched.len(), prefetched), (3, charged));
        }
        // Also with keys that are missing.
        charge_plan.prefetch(&Table::with_capacity(1).unwrap(), &[Some(keyed_request), None]);
        charge_plan.prefetch(&Table::with_capacity(1).unwrap(), &[]);
    }
}
