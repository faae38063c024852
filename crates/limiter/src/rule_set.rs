//! Compiled rules: the layers of each rule, the identity of their counters, and what requests take from them.
//!
//! A [`RuleSet`] is compiled from rules as configured. [`crate::charge_plan`] selects the rules of a route.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::acquire::Charge;
use crate::bucket::Key;
use crate::concurrency::ConcurrencyTable;
use crate::handles::{Handle, IdVec, LayerId, LayerPosition, LimitNameId, RuleId, VariantId, WindowsId};
use crate::identity;
use crate::key::{KeyHash, KeyPart, Seed};
use crate::limit::Limit;
use crate::rule::{OnLimit, Rule};
use crate::sharded_counter::Sharding;
use crate::store_key::WindowSegments;
use crate::table::Counter;
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
    /// The variant of the rule that applies.
    pub variant: VariantId,
    /// Tokens that the request takes.
    pub cost: u32,
}

/// Why a rule does not count a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotCounted {
    /// The request is exempt.
    Exempt,
    /// The request lacks the key, and the rule skips it; or the rule counts other requests only, or was not asked.
    Skipped,
    /// The rule refuses the key, because it is none of those known.
    UnknownKey,
    /// The key or the cost of the request cannot be found.
    Failed,
}

impl NotCounted {
    /// Whether the rule, unless it is a shadow rule, refuses the request.
    pub fn refuses(self) -> bool {
        match self {
            NotCounted::Exempt | NotCounted::Skipped => false,
            NotCounted::UnknownKey | NotCounted::Failed => true,
        }
    }
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

impl CountingMode {
    /// Whether the counter is one of this process, which the store does not know.
    pub fn is_local(self) -> bool {
        matches!(self, CountingMode::Local | CountingMode::LocalFallback)
    }
}

/// A compiled layer: the identity of its counters, and what requests take from them.
#[derive(Clone, Debug)]
pub struct CompiledLayer {
    pub(super) id: u64,
    /// Moves the counters of the layer away from those of the rule's other layers.
    pub(super) bucket_offset: u64,
    /// A request for no tokens of this layer, in no window.
    pub request: AcquireRequest,
    /// Tokens that may accumulate; at least the limit.
    pub capacity: u32,
    /// Tokens that may be taken from later windows.
    pub reserve: u32,
    /// Shards of each counter; 1: not sharded.
    pub shards: u32,
    /// Whether the cost is known after the response only, so that a request of cost 0 may still take tokens.
    is_settled_later: bool,
    /// The order of charging: layers with the smallest value first.
    pub(super) rank: (bool, u32, u64),
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

/// The differences between two sets of rules, by the names of the rules.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RuleChanges {
    /// Rules that the former set does not have.
    pub added: Vec<String>,
    /// Rules of the former set only.
    pub removed: Vec<String>,
    /// Rules of both sets with a key or a window that the former set does not have.
    pub recounted: Vec<String>,
}

/// A layer with its names.
#[derive(Debug)]
struct NamedLayer {
    layer: CompiledLayer,
    /// In responses and metrics.
    name: String,
    /// The suffix of the names of its counters in the store.
    suffix: String,
    /// The name by which its refusals are counted.
    counted_name: LimitNameId,
}

/// A compiled rule.
#[derive(Debug)]
pub struct CompiledRule {
    /// The rule as configured.
    pub rule: Rule,
    id: RuleId,
    /// The prefix of the hash of every key of this rule.
    pub hash_prefix: u64,
    /// Those of [`Rule::variants`], then that of penalties.
    layers: IdVec<LayerPosition, NamedLayer>,
    variants: IdVec<VariantId, Range<LayerPosition>>,
    /// The layer that counts penalties; it belongs to no variant.
    pub penalty: Option<LayerId>,
    /// The most requests of a key in flight.
    pub(super) concurrent: IdVec<VariantId, Option<u32>>,
    concurrent_name: Option<String>,
    /// See [`CompiledRule::limit_names`].
    limit_names: IdVec<LimitNameId, String>,
    /// The requests that this rule delays.
    pub waiters: Arc<WaiterLimit>,
}

/// All rules, compiled.
#[derive(Debug, Default)]
pub struct RuleSet {
    /// The compiled rules, in the order of the configuration.
    pub rules: IdVec<RuleId, CompiledRule>,
    /// The windows of all layers, each kind once.
    pub windows: IdVec<WindowsId, Windows>,
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
    fn named_layer(&self, layer: LayerId) -> &NamedLayer {
        debug_assert_eq!(layer.rule, self.id, "a layer of another rule");
        &self.layers[layer.position]
    }

    /// The layer; it has to be of this rule.
    pub fn layer(&self, layer: LayerId) -> &CompiledLayer {
        &self.named_layer(layer).layer
    }

    /// The name of a layer in responses and metrics.
    pub fn layer_name(&self, layer: LayerId) -> &str {
        &self.named_layer(layer).name
    }

    /// The suffix of the names of a layer's counters in the store.
    pub fn suffix(&self, layer: LayerId) -> &str {
        &self.named_layer(layer).suffix
    }

    /// The compiled layers of all variants, and that of penalties.
    pub fn compiled_layers(&self) -> impl Iterator<Item = &CompiledLayer> {
        self.layers.iter().map(|named| &named.layer)
    }

    /// The name of the limit of requests in flight; `None` if there is none.
    pub fn concurrent_name(&self) -> Option<&str> {
        self.concurrent_name.as_deref()
    }

    /// The names by which refusals are counted: those of all layers, one for what only single clients have, and last that of the
    /// limit of requests in flight. Their number does not depend on the number of clients.
    pub fn limit_names(&self) -> impl Iterator<Item = &str> {
        self.limit_names.iter().map(String::as_str)
    }

    /// The name by which refusals of a layer are counted: see [`CompiledRule::limit_names`].
    pub fn counted_name(&self, layer: LayerId) -> LimitNameId {
        self.named_layer(layer).counted_name
    }

    /// The layers of the variants that do not come and go with single clients.
    fn fixed_layers(&self) -> impl Iterator<Item = (&Limit, &CompiledLayer)> {
        self.rule.fixed_variants().flatten().zip(self.compiled_layers())
    }

    /// The variants of the rule, each with its layers and their limits as configured.
    pub fn variants(&self) -> impl Iterator<Item = (VariantId, impl Iterator<Item = (LayerId, &Limit)>)> {
        let limits = self.rule.variants().zip(self.variants.ids());
        limits.map(|(limits, variant)| (variant, self.variant(variant).zip(limits)))
    }

    /// The layers of a variant.
    pub fn variant(&self, variant: VariantId) -> impl Iterator<Item = LayerId> + Clone + use<> {
        let rule = self.id;
        self.layers.ids_in(self.variants[variant].clone()).map(move |position| LayerId { rule, position })
    }

    /// The layers that a request under a variant is charged in: those of the variant, and that of penalties.
    pub(super) fn charged_layers(&self, variant: VariantId) -> impl Iterator<Item = LayerId> + use<> {
        self.variant(variant).chain(self.penalty)
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

/// A name, or else of `other`, which is appended if it is missing.
fn known_or_push(names: &mut IdVec<LimitNameId, String>, name: &str, other: impl Fn() -> String) -> LimitNameId {
    let position = |names: &IdVec<LimitNameId, String>, name: &str| names.position(|known| known == name);
    position(names, name).or_else(|| position(names, &other())).unwrap_or_else(|| names.push(other()))
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
fn layers_under<'a>(rule: &Rule, variant: VariantId, other: &'a Rule) -> &'a [Limit] {
    let plan = rule.plan_of(variant).and_then(|plan| other.plans.iter().find(|known| known.name == plan.name));
    let own = rule.override_of(variant).and_then(|(_, own)| other.overrides.iter().find(|known| known.key == own.key));
    plan.map(|plan| &plan.layers).or(own.map(|own| &own.layers)).unwrap_or(&other.layers)
}

/// The layer of a variant of `rule` in whose place `other` has a layer with the same period, of which one is sliding.
fn toggled_sliding<'a>(rule: &'a Rule, other: &Rule) -> Option<&'a Limit> {
    let has = |layers: &[Limit], limit: &Limit| layers.iter().any(|known| known.windows == limit.windows);
    let is_sliding = |limit: &Limit| matches!(limit.windows, Windows::Sliding { .. });
    rule.fixed_variants().enumerate().find_map(|(variant, layers)| {
        let others = layers_under(rule, VariantId::at(variant), other);
        let replaces = |limit: &Limit, known: &Limit| {
            is_sliding(limit) != is_sliding(known)
                && limit.windows.typical_ms() == known.windows.typical_ms()
                && !has(layers, known)
        };
        layers.iter().find(|limit| !has(others, limit) && others.iter().any(|known| replaces(limit, known)))
    })
}

impl RuleSet {
    /// Compiles these rules. `former` is the previous rule set, if there is one: its requests may still wait.
    pub fn new<'r>(rules: impl IntoIterator<Item = &'r Rule>, seed: Seed, former: Option<&RuleSet>) -> RuleSet {
        let concurrency = former.map_or_else(Arc::default, |former| Arc::clone(&former.concurrency));
        let mut rule_set = RuleSet { rules: IdVec::new(), windows: IdVec::new(), concurrency };
        for (position, rule) in rules.into_iter().enumerate() {
            let mut compiled = rule_set.compile_rule(RuleId::at(position), rule, seed);
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
            for (limit, layer) in compiled.fixed_layers() {
                let same_windows = |(other, _): &(&Limit, &CompiledLayer)| other.windows == limit.windows;
                let known = known.and_then(|known| Some((known, known.fixed_layers().find(same_windows)?.1)));
                if let Some((known, other)) = known.filter(|(_, other)| other.id != layer.id) {
                    return Some(change(limit, changed_setting(&compiled.rule, &known.rule, layer, other)));
                }
            }
        }
        None
    }

    /// How the rules differ from those of `former`. Another name, key or window has counters of its own.
    pub fn changes_since(&self, former: &RuleSet) -> RuleChanges {
        let mut changes = RuleChanges::default();
        for compiled in &self.rules {
            let name = &compiled.rule.name;
            let Some(known) = former.rules.iter().find(|known| known.rule.name == *name) else {
                changes.added.push(name.clone());
                continue;
            };
            let is_known = |id: u64| known.fixed_layers().any(|(_, other)| other.id == id);
            if !compiled.fixed_layers().all(|(_, layer)| is_known(layer.id)) {
                changes.recounted.push(name.clone());
            }
        }
        let removed =
            former.rules.iter().filter(|known| !self.rules.iter().any(|rule| rule.rule.name == known.rule.name));
        changes.removed.extend(removed.map(|known| known.rule.name.clone()));
        changes
    }

    /// The rules and windows of single clients that have other counters in this rule set than in `former`. Unlike those that
    /// [`RuleSet::changed_counters`] finds, the operator has not written them into the rule: they must not prevent a change of it.
    pub fn changed_client_windows(&self, former: &RuleSet) -> Vec<(String, Windows)> {
        let mut changed = Vec::new();
        for compiled in &self.rules {
            let Some(known) = former.rules.iter().find(|known| known.hash_prefix == compiled.hash_prefix) else {
                continue;
            };
            let fixed = compiled.rule.fixed_variants().flatten().count();
            let layers = compiled.compiled_layers().skip(fixed).filter(|layer| !layer.is_penalty());
            // Many clients have the same windows.
            let ids: BTreeMap<WindowsId, u64> = layers.map(|layer| (layer.request.windows, layer.id)).collect();
            for (windows, id) in ids {
                let windows = &self.windows[windows];
                let same_windows = |other: &&CompiledLayer| former.windows_of(other) == windows && !other.is_penalty();
                if known.compiled_layers().find(same_windows).is_some_and(|other| other.id != id) {
                    changed.push((compiled.rule.name.clone(), windows.clone()));
                }
            }
        }
        changed
    }

    fn compile_rule(&mut self, id: RuleId, rule: &Rule, seed: Seed) -> CompiledRule {
        let mut hashes = identity::layers(rule).into_iter().map(|identity| identity.hash(seed));
        let segments = WindowSegments::of(rule);
        let (mut layers, mut variants) = (IdVec::new(), IdVec::new());
        let mut limit_names = IdVec::new();
        let fixed = rule.fixed_variants().count();
        for (position, limits) in rule.variants().enumerate() {
            let first = layers.next_id();
            for limit in limits {
                let name = rule.layer_name(limits, limit);
                let counted_name = match position < fixed {
                    true => limit_names.push(name.clone()),
                    false => known_or_push(&mut limit_names, &name, || rule.client_limits_name()),
                };
                layers.extend(hashes.next().map(|hash| NamedLayer {
                    layer: self.compile_layer(rule, limit, hash),
                    name,
                    suffix: segments.segment(&limit.windows).to_owned(),
                    counted_name,
                }));
            }
            variants.push(first..layers.next_id());
        }
        let penalty = rule.penalty_ms.zip(rule.penalty_name()).zip(hashes.next()).map(|((period_ms, name), hash)| {
            let layer = self.compile_penalty(rule, period_ms, hash);
            let counted_name = limit_names.push(name.clone());
            let position = layers.push(NamedLayer { layer, name, suffix: ":penalty".to_owned(), counted_name });
            LayerId { rule: id, position }
        });
        let concurrent_name = rule.concurrent_name();
        limit_names.extend(concurrent_name.clone());
        let max_waiting = match rule.on_limit {
            OnLimit::Delay { max_waiting, .. } => u64::from(max_waiting),
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        CompiledRule {
            id,
            hash_prefix: identity::key_prefix(rule, seed),
            layers,
            variants,
            penalty,
            concurrent: rule.concurrent_variants().collect(),
            concurrent_name,
            limit_names,
            waiters: WaiterLimit::new(max_waiting),
            rule: rule.clone(),
        }
    }

    /// The layer that counts penalties: a penalty is a window of its length, opened by a refusal.
    fn compile_penalty(&mut self, rule: &Rule, period_ms: u64, id: u64) -> CompiledLayer {
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
                windows: self.windows_id(&Windows::FirstRequest { period_ms }),
            },
            shards: 1,
            capacity: 0,
            reserve: 0,
            is_settled_later: false,
            rank: (rule.key.contains(&KeyPart::GLOBAL), 0, period_ms),
        }
    }

    /// The handle of these windows, which are added if no layer has them yet.
    fn windows_id(&mut self, windows: &Windows) -> WindowsId {
        self.windows.position(|known| known == windows).unwrap_or_else(|| self.windows.push(windows.clone()))
    }

    fn compile_layer(&mut self, rule: &Rule, limit: &Limit, id: u64) -> CompiledLayer {
        let (kind, shards) = rule.counter_kind(limit);
        let typical_ms = limit.windows.typical_ms();
        let capacity = limit.capacity();
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
                windows: self.windows_id(&limit.windows),
            },
            shards,
            capacity,
            reserve: limit.reserve,
            is_settled_later: rule.has_response_cost(),
            rank: (rule.key.contains(&KeyPart::GLOBAL), limit.tokens, typical_ms),
        }
    }

    /// Whether the limits of all rules are counted by the same names as in `former`.
    pub fn has_limit_names_of(&self, former: &RuleSet) -> bool {
        self.rules.iter().map(|rule| &rule.limit_names).eq(former.rules.iter().map(|rule| &rule.limit_names))
    }

    /// The time of a decision by this rule set.
    pub fn time(&self, now_ms: u64) -> Time<'_> {
        Time::new(now_ms, self.windows.as_slice())
    }

    /// The layer.
    pub fn layer(&self, layer: LayerId) -> &CompiledLayer {
        self.rules[layer.rule].layer(layer)
    }

    /// The windows of this layer.
    #[inline]
    pub fn windows_of(&self, layer: &CompiledLayer) -> &Windows {
        &self.windows[layer.request.windows]
    }

    /// The end of the window of this layer that is open at a time, for a key with such an offset, Unix milliseconds.
    pub(super) fn window_end_ms(&self, layer: &CompiledLayer, now_ms: u64, offset: u64) -> u64 {
        self.windows_of(layer).window_at(now_ms, offset).end_ms
    }
}
