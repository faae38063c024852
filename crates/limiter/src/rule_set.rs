//! The rule book: which counters a request is charged in, and what the counters' answers mean.
//!
//! Rules go in as the operator wrote them and come out as rosters, one per route: the layers of all
//! its rules in the order in which they are charged. A decision fills a desk that is reused from
//! request to request, so it allocates nothing. This file knows neither HTTP nor the clock.

use std::ops::Range;
use std::sync::Arc;

use crate::acquire::Charge;
use crate::bucket::Key;
use crate::counter::{AcquireRequest, WindowKind};
use crate::format_registry::{CounterFormat, CounterFormats};
use crate::key::{KeyHash, KeyPart, Seed};
use crate::limit::Limit;
use crate::rule::{Cost, OnLimit, Rule, Sharing};
use crate::sharded_counter::Sharding;
use crate::store_key::WindowSegments;
use crate::table::Counter;
use crate::waiter_limit::WaiterLimit;
use crate::window::{Time, WindowSequence, Windows};

/// Who asks, under one rule, and for how much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyedRequest {
    pub key: KeyHash,
    /// Where the key's windows start if they start at random, as a share of the period in units of 2^-64.
    pub offset: u64,
    /// Which of the rule's variants applies; 0: the windows of everyone.
    pub variant: usize,
    pub cost: u32,
}

/// How the rules of a roster are counted in one decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountingMode {
    /// In ordinary counters.
    Local,
    /// With tokens that were fetched beforehand.
    Leased,
    /// In ordinary counters, beside what is known to be used elsewhere.
    LocalFallback,
    /// Not here.
    Remote,
}

/// One layer made ready: what its counters are known by, and what is asked of them.
#[derive(Debug)]
pub struct CompiledLayer {
    pub(super) id: u64,
    /// Moves the counters of the layer away from those of the rule's other layers.
    bucket_offset: u64,
    /// Position in [`Book::timelines`].
    pub windows_index: usize,
    pub kind: WindowKind,
    pub limit: u32,
    /// What may accumulate.
    pub capacity: u32,
    /// What may be taken from windows to come.
    pub reserve: u32,
    pub shards: u32,
    /// The most that can be owed beside what may accumulate or be reserved: places that were promised.
    pub(super) max_ahead: u64,
    /// Whether the counters may have been written under another limit.
    pub(super) limit_differs: bool,
    /// Whether others count here who would not know what it writes: then its windows stand for themselves.
    pub(super) is_constrained: bool,
    /// How the store has its counters, and in how many shards, where gateways share them.
    pub store_format: StoreFormat,
    pub store_shards: u32,
    /// The narrow are charged before the wide.
    rank: (bool, u32, u64),
}

/// How a store has the counters of a layer. It follows from the rules alone: gateways that share counters agree on it
/// whatever they have in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreFormat {
    /// A number for each window.
    Plain,
    /// What is used or owed, and as of which window.
    Account,
    /// What is used or owed, and when the first window was opened.
    Floating,
}

/// A rule made ready.
#[derive(Debug)]
pub struct CompiledRule {
    pub rule: Rule,
    /// Hash prefix of every key of this rule.
    pub hash_prefix: u64,
    /// The layers of everyone, then those of each plan and of each override.
    pub(super) layers: Vec<CompiledLayer>,
    names: Vec<String>,
    /// What the names of its counters end in, where gateways share them; one for each layer.
    suffixes: Vec<String>,
    variants: Vec<Range<usize>>,
    /// Who waits because of this rule.
    pub waiters: Arc<WaiterLimit>,
}

/// A layer of a roster: the rule's position in the route's list, and the layer's in the entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRef {
    pub rule: usize,
    pub layer: usize,
}

/// The rules of one route, in the order of the configuration, and the order in which they charge.
#[derive(Debug, Default)]
pub struct ChargePlan {
    /// Positions in the book.
    pub rules: Vec<usize>,
    /// Layers that everyone has of the enforced rules, from the narrowest to the widest.
    enforced: Vec<LayerRef>,
    /// Positions of the shadow rules.
    shadow_rules: Vec<usize>,
    /// Whether several gateways share counters of any of its rules.
    pub is_shared: bool,
    /// How each rule is counted as long as the store can be asked.
    pub(super) counting_modes: Vec<CountingMode>,
    pub(super) may_delay: bool,
    counts_refused: bool,
    /// Whether every layer that any client may have is plain and whole, and nothing is left to do
    /// for a refused request: all that such a decision needs is known when the code is compiled.
    is_plain: bool,
}

/// All rules, made ready.
#[derive(Debug, Default)]
pub struct RuleSet {
    pub rules: Vec<CompiledRule>,
    /// The ways in which the layers divide time, each once.
    pub windows: Vec<Windows>,
    /// The pace of each timeline.
    sequences: Vec<WindowSequence>,
}

impl CompiledLayer {
    /// What one request asks of this layer, in the window ending at `end_ms`.
    #[inline]
    pub(super) fn new_charge(&self, keyed_request: KeyedRequest, end_ms: u64, own_shard: u32) -> Charge {
        let bucket_hash = keyed_request.key.bucket_hash.wrapping_add(self.bucket_offset);
        let counter = Counter { key: Key::new(bucket_hash, keyed_request.key.tag ^ self.id), layer: self.id };
        let ceiling = u64::from(self.capacity);
        let request =
            AcquireRequest { end_ms, ceiling, floor: 0, limit: self.limit, cost: keyed_request.cost, kind: self.kind };
        let mut charge = Charge::new(counter, request);
        if self.shards > 1 {
            charge.sharding = Sharding { shards: self.shards, first_shard: own_shard % self.shards };
        }
        charge
    }

    /// The most that can be used or owed here.
    pub(super) fn max_usage(&self) -> u64 {
        self.max_ahead.saturating_add(u64::from(self.capacity) + u64::from(self.reserve))
    }
}

impl CompiledRule {
    pub fn layer(&self, layer: usize) -> &CompiledLayer {
        &self.layers[layer]
    }

    pub fn layer_name(&self, layer: usize) -> &str {
        &self.names[layer]
    }

    /// What the name of a layer's counters ends in, in a store.
    pub fn suffix(&self, layer: usize) -> &str {
        &self.suffixes[layer]
    }

    pub fn layer_names(&self) -> &[String] {
        &self.names
    }

    /// The layers that a variant has, and their limits.
    pub fn variant(&self, variant: usize) -> Range<usize> {
        self.variants[variant].clone()
    }

    /// The variant for the clients of a plan; that of everyone, if the rule has none for them.
    pub fn variant_of_plan(&self, plan: &str) -> usize {
        self.rule.plans.iter().position(|known| known.name == plan).map_or(0, |position| 1 + position)
    }

    /// The variant of one of the rule's overrides.
    pub fn variant_of_override(&self, position: usize) -> usize {
        1 + self.rule.plans.len() + position
    }
}

/// Layers of similar periods share a bucket, and so a cache line; all of a rule's would crowd it. It
/// depends on the period alone: where a layer stands among others must not move its counters.
fn bucket_group(usual_ms: u64) -> u64 {
    match usual_ms {
        0..=10_000 => 0,
        10_001..=3_600_000 => 1,
        3_600_001..=604_800_000 => 2,
        _ => 3,
    }
}

impl ChargePlan {
    /// The layers that everyone has of the enforced rules, from the narrowest to the widest.
    pub fn enforced(&self) -> &[LayerRef] {
        &self.enforced
    }

    /// Whether refusals count under any of its rules.
    pub fn counts_refused(&self) -> bool {
        self.counts_refused
    }

    /// Whether a refused request has asked plain counters, leaves no trace in any, and waits for nothing.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Positions of the shadow rules.
    pub fn shadow_rules(&self) -> &[usize] {
        &self.shadow_rules
    }
}

impl RuleSet {
    /// A book of these rules.
    ///
    /// Counters outlive books, and what is in them has to be read as it was written: `former` is the
    /// book before, if there was one.
    pub fn new(rules: &[Rule], seed: Seed, former: Option<&RuleSet>) -> RuleSet {
        // Whoever waits, or reserves, takes a place in a window to come; an answer may tell of any cost.
        let owes = |rule: &Rule| matches!(rule.cost, Cost::Response { .. }) || rule.delays() || rule.reserves();
        let mut rule_set = RuleSet::default();
        for rule in rules {
            let mut entry = rule_set.compile_rule(rule, owes(rule), seed);
            let known = former.and_then(|former| former.rules.iter().find(|known| known.rule.name == rule.name));
            if let Some(known) = known.filter(|known| known.rule.on_limit == rule.on_limit) {
                entry.waiters = Arc::clone(&known.waiters);
            }
            rule_set.rules.push(entry);
        }
        let formats = rule_set.counter_formats();
        rule_set.adopt_formats(&formats);
        rule_set.set_store_formats();
        if let Some(former) = former {
            rule_set.adopt_formats(&former.counter_formats());
        }
        rule_set
    }

    fn compile_rule(&mut self, rule: &Rule, ahead: bool, seed: Seed) -> CompiledRule {
        // A rule's counters are known by its name and its key; a layer adds its windows. The limit
        // is not part of it, so a changed limit applies to what was already counted.
        let identity = seed.hash(&["rule", &rule.name, &format!("{:?}", rule.key)]);
        let (mut layers, mut names, mut variants) = (Vec::new(), Vec::new(), Vec::new());
        for variant in rule.variants() {
            let first = layers.len();
            for (i, limit) in variant.iter().enumerate() {
                names.push(rule.layer_name(variant, i));
                layers.push(self.compile_layer(rule, limit, identity, ahead, seed));
            }
            variants.push(first..layers.len());
        }
        let most = match rule.on_limit {
            OnLimit::Delay { max_waiting, .. } => u64::from(max_waiting),
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        let segments = WindowSegments::of(rule);
        let suffixes = rule.variants().flatten().map(|limit| segments.segment(&limit.windows).to_owned()).collect();
        CompiledRule {
            hash_prefix: identity,
            layers,
            names,
            suffixes,
            variants,
            waiters: WaiterLimit::new(most),
            rule: rule.clone(),
        }
    }

    fn compile_layer(&mut self, rule: &Rule, limit: &Limit, identity: u64, ahead: bool, seed: Seed) -> CompiledLayer {
        let timeline = self.windows.iter().position(|known| *known == limit.windows).unwrap_or_else(|| {
            self.windows.push(limit.windows.clone());
            self.sequences.push(limit.windows.sequence());
            self.windows.len() - 1
        });
        let floating = matches!(limit.windows, Windows::FirstRequest { .. });
        let sequence = timeline as u32;
        let ahead_most = match rule.on_limit {
            // What the answer tells may be any number.
            _ if matches!(rule.cost, Cost::Response { .. }) => u64::MAX,
            OnLimit::Delay { max_delay_ms, .. } => {
                (max_delay_ms / limit.windows.typical_ms().max(1) + 2).saturating_mul(u64::from(limit.tokens))
            }
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        let course = match floating {
            true => WindowKind::Floating(sequence),
            false if ahead || limit.capacity > limit.tokens || limit.reserve > 0 => WindowKind::Grid(sequence),
            false => WindowKind::Plain,
        };
        let usual_ms = limit.windows.typical_ms();
        CompiledLayer {
            id: seed.hash(&["layer", &rule.name, &limit.windows.to_string()]) ^ identity,
            bucket_offset: bucket_group(usual_ms).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            windows_index: timeline,
            kind: course,
            max_ahead: ahead_most,
            limit_differs: false,
            is_constrained: false,
            store_format: StoreFormat::Plain,
            store_shards: 1,
            limit: limit.tokens,
            capacity: limit.capacity.max(limit.tokens),
            reserve: limit.reserve,
            shards: if course == WindowKind::Plain { limit.shards.clamp(1, limit.tokens) } else { 1 },
            rank: (rule.key.contains(&KeyPart::Global), limit.tokens, usual_ms),
        }
    }

    /// The time of a decision by this book.
    pub fn time(&self, now_ms: u64) -> Time<'_> {
        Time { now_ms, sequences: &self.sequences }
    }

    /// The roster for a route that names these rules (positions in the book).
    pub fn charge_plan(&self, rules: &[usize]) -> ChargePlan {
        let rule = |position: usize| &self.rules[rules[position]].rule;
        let mut charge_plan = ChargePlan {
            rules: rules.to_vec(),
            enforced: Vec::new(),
            shadow_rules: (0..rules.len()).filter(|position| rule(*position).is_shadow()).collect(),
            may_delay: (0..rules.len()).any(|position| rule(position).delays()),
            counts_refused: (0..rules.len()).any(|position| rule(position).count_refused),
            counting_modes: rules.iter().map(|rule| self.rules[*rule].counting_mode()).collect(),
            is_shared: (0..rules.len()).any(|position| rule(position).sharing != Sharing::Local),
            is_plain: false,
        };
        let enforced = (0..rules.len()).filter(|position| !rule(*position).is_shadow());
        let mut layers: Vec<LayerRef> =
            enforced.flat_map(|position| self.layers_of_rule(&charge_plan, position, 0)).collect();
        self.sort_layers(&charge_plan, &mut layers);
        charge_plan.enforced = layers;
        let layers = || rules.iter().flat_map(|rule| &self.rules[*rule].layers);
        charge_plan.is_plain = !charge_plan.counts_refused
            && !charge_plan.is_shared
            && layers().all(|layer| layer.kind == WindowKind::Plain && layer.shards == 1);
        charge_plan
    }

    /// A roster of one rule, for those who ask it without a request: it decides also if it is a shadow
    /// rule, and nobody waits.
    pub fn single_rule_plan(&self, rule: usize) -> ChargePlan {
        let mut charge_plan = self.charge_plan(&[rule]);
        charge_plan.shadow_rules.clear();
        charge_plan.may_delay = false;
        let mut layers: Vec<LayerRef> = self.layers_of_rule(&charge_plan, 0, 0).collect();
        self.sort_layers(&charge_plan, &mut layers);
        charge_plan.enforced = layers;
        charge_plan
    }

    /// The layers of one rule, as one of its variants has them.
    pub(super) fn layers_of_rule(
        &self,
        charge_plan: &ChargePlan,
        position: usize,
        variant: usize,
    ) -> impl Iterator<Item = LayerRef> + use<> {
        self.rules[charge_plan.rules[position]].variant(variant).map(move |layer| LayerRef { rule: position, layer })
    }

    /// Narrow before wide: a counter of one client before the counter of all, a small limit before a
    /// large one. The narrow is likelier to be full, and a charge that must be given back is then
    /// one that few share.
    pub(super) fn sort_layers(&self, charge_plan: &ChargePlan, layers: &mut [LayerRef]) {
        layers.sort_by_key(|layer_ref| self.layer_of(charge_plan, *layer_ref).rank);
    }

    pub fn layer_of(&self, charge_plan: &ChargePlan, layer_ref: LayerRef) -> &CompiledLayer {
        self.rules[charge_plan.rules[layer_ref.rule]].layer(layer_ref.layer)
    }

    /// Whether the rule at a position of the roster is only tried out.
    pub fn is_shadow(&self, charge_plan: &ChargePlan, position: usize) -> bool {
        self.rules[charge_plan.rules[position]].rule.is_shadow()
    }
}

impl CompiledLayer {
    fn counter_format(&self) -> CounterFormat {
        CounterFormat {
            accumulates: self.kind != WindowKind::Plain,
            shards: self.shards,
            max_ahead: self.max_ahead,
            grants: (self.limit, self.capacity),
            limits_differ: self.limit_differs,
        }
    }
}

impl RuleSet {
    fn set_store_formats(&mut self) {
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            layer.store_shards = layer.shards;
            layer.store_format = match layer.kind {
                WindowKind::Plain | WindowKind::Leased => StoreFormat::Plain,
                WindowKind::Grid(_) => StoreFormat::Account,
                WindowKind::Floating(_) => StoreFormat::Floating,
            };
        }
    }

    /// How the layers write their counters. Those of one counter, such as those of a rule's plans, do it in one way:
    /// as tokens that roll over if they do in one of them, and in as many shards as the most of them have.
    pub fn counter_formats(&self) -> CounterFormats {
        let mut formats = CounterFormats::default();
        for layer in self.rules.iter().flat_map(|entry| &entry.layers) {
            formats.join(layer.id, layer.counter_format());
        }
        formats
    }

    /// Reads counters as they were written, in one of these ways or another.
    pub fn adopt_formats(&mut self, formats: &CounterFormats) {
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            let Some(format) = formats.get(layer.id).map(|known| layer.counter_format().join(known)) else { continue };
            if format.accumulates && layer.kind == WindowKind::Plain {
                layer.kind = WindowKind::Grid(layer.windows_index as u32);
            }
            layer.shards = if format.accumulates { 1 } else { format.shards };
            layer.limit_differs = format.limits_differ;
            layer.max_ahead = format.max_ahead;
        }
    }

    /// Writes counters in no other way than these: others count in the same memory, and know of no other. A layer that
    /// would roll over, wait or reserve has windows that stand for themselves then, and what would be owed is not.
    /// `true` if there is one that would do otherwise.
    pub fn restrict_to_formats(&mut self, formats: &CounterFormats) -> bool {
        let mut holds = false;
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            let (own, known) = (layer.counter_format(), formats.get(layer.id).unwrap_or(CounterFormat::PLAIN));
            holds |= layer.shards > known.shards;
            layer.shards = layer.shards.min(known.shards);
            // Windows that requests open are never read otherwise.
            let rolls = own.accumulates && !known.accumulates && !matches!(layer.kind, WindowKind::Floating(_));
            if rolls || own.max_ahead > known.max_ahead {
                holds = true;
                layer.is_constrained = true;
                layer.capacity = layer.limit;
                layer.reserve = 0;
                layer.max_ahead = known.max_ahead;
            }
            if rolls {
                layer.kind = WindowKind::Plain;
            }
        }
        holds
    }
}
