//! The rule book: which counters a request is charged in, and what the counters' answers mean.
//!
//! Rules go in as the operator wrote them and come out as rosters, one per route: the layers of all
//! its rules in the order in which they are charged. A decision fills a desk that is reused from
//! request to request, so it allocates nothing. This file knows neither HTTP nor the clock.

use std::ops::Range;
use std::sync::Arc;

use crate::acquire::{AcquireResult, Charge, decide};
use crate::bucket::Key;
use crate::counter::{AcquireRequest, WindowKind};
use crate::decision_context::{DecisionContext, KeyedRequest};
use crate::decision_time::Now;
use crate::key::{Part, Seed};
use crate::limit::Limit;
use crate::rule::{Cost, OnLimit, Rule, Sharing};
use crate::sharded_counter::Split;
use crate::shared_counting::CountingMode;
use crate::store_key::Segments;
use crate::table::{Counter, Table};
use crate::waiter_limit::{WaiterLimit, WaiterSlot};
use crate::window::Windows;
use crate::window_sequence::{Time, WindowSequence};

/// One layer made ready: what its counters are known by, and what is asked of them.
#[derive(Debug)]
pub struct Layer {
    pub(super) bits: u64,
    /// Moves the counters of the layer away from those of the rule's other layers.
    nearby: u64,
    /// Position in [`Book::timelines`].
    pub timeline: usize,
    pub course: WindowKind,
    pub limit: u32,
    /// What may accumulate.
    pub capacity: u32,
    /// What may be taken from windows to come.
    pub reserve: u32,
    pub shards: u32,
    /// The most that can be owed beside what may accumulate or be reserved: places that were promised.
    pub(super) ahead_most: u64,
    /// Whether the counters may have been written under another limit.
    pub(super) differs: bool,
    /// Whether others count here who would not know what it writes: then its windows stand for themselves.
    pub(super) is_held: bool,
    /// How the store has its counters, and in how many shards, where gateways share them.
    pub form: StoreFormat,
    pub shards_elsewhere: u32,
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
    pub identity: u64,
    /// The layers of everyone, then those of each plan and of each override.
    pub(super) layers: Vec<Layer>,
    names: Vec<String>,
    /// What the names of its counters end in, where gateways share them; one for each layer.
    suffixes: Vec<String>,
    variants: Vec<Range<usize>>,
    /// Who waits because of this rule.
    pub queue: Arc<WaiterLimit>,
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
    shadows: Vec<usize>,
    /// Whether several gateways share counters of any of its rules.
    pub is_shared: bool,
    /// How each rule is counted as long as the store can be asked.
    pub(super) stands: Vec<CountingMode>,
    pub(super) delays: bool,
    counts_refused: bool,
    /// Whether every layer that any client may have is plain and whole, and nothing is left to do
    /// for a refused request: all that such a decision needs is known when the code is compiled.
    plain: bool,
}

/// What the rules say to a request.
#[derive(Debug)]
pub enum Decision {
    Admitted,
    /// It has been charged, and may pass from this moment on.
    Delayed {
        until_ms: u64,
        wait: Option<Wait>,
        /// The layers that it has to be charged in again then: see [`Book::charge_again`].
        again: Vec<LayerRef>,
    },
    Refused,
}

/// A place among those who wait because of a rule.
#[derive(Debug)]
pub struct Wait {
    /// The rule's position in the roster.
    pub rule: usize,
    pub place: WaiterSlot,
}

/// All rules, made ready.
#[derive(Debug, Default)]
pub struct RuleSet {
    pub entries: Vec<CompiledRule>,
    /// The ways in which the layers divide time, each once.
    pub timelines: Vec<Windows>,
    /// The pace of each timeline.
    paces: Vec<WindowSequence>,
}

impl Layer {
    /// What one request asks of this layer, in the window ending at `end_ms`.
    #[inline]
    pub(super) fn charge(&self, keyed_request: KeyedRequest, end_ms: u64, own_shard: u32) -> Charge {
        let place = keyed_request.key.place.wrapping_add(self.nearby);
        let counter = Counter { key: Key::new(place, keyed_request.key.tag ^ self.bits), layer: self.bits };
        let ceiling = u64::from(self.capacity);
        let ask = AcquireRequest {
            end_ms,
            ceiling,
            floor: 0,
            limit: self.limit,
            cost: keyed_request.cost,
            course: self.course,
        };
        let mut charge = Charge::new(counter, ask);
        if self.shards > 1 {
            charge.split = Split { shards: self.shards, own: own_shard % self.shards };
        }
        charge
    }

    /// The most that can be used or owed here.
    pub(super) fn most(&self) -> u64 {
        self.ahead_most.saturating_add(u64::from(self.capacity) + u64::from(self.reserve))
    }
}

impl CompiledRule {
    pub fn layer(&self, layer: usize) -> &Layer {
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
fn neighbourhood(usual_ms: u64) -> u64 {
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
        self.plain
    }

    /// Positions of the shadow rules.
    pub fn shadows(&self) -> &[usize] {
        &self.shadows
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
            let mut entry = rule_set.make_ready(rule, owes(rule), seed);
            let known = former.and_then(|former| former.entries.iter().find(|known| known.rule.name == rule.name));
            if let Some(known) = known.filter(|known| known.rule.on_limit == rule.on_limit) {
                entry.queue = Arc::clone(&known.queue);
            }
            rule_set.entries.push(entry);
        }
        let ways = rule_set.ways();
        rule_set.agree(&ways);
        rule_set.settle_forms();
        if let Some(former) = former {
            rule_set.agree(&former.ways());
        }
        rule_set
    }

    fn make_ready(&mut self, rule: &Rule, ahead: bool, seed: Seed) -> CompiledRule {
        // A rule's counters are known by its name and its key; a layer adds its windows. The limit
        // is not part of it, so a changed limit applies to what was already counted.
        let identity = seed.bits(&["rule", &rule.name, &format!("{:?}", rule.key)]);
        let (mut layers, mut names, mut variants) = (Vec::new(), Vec::new(), Vec::new());
        for variant in rule.variants() {
            let first = layers.len();
            for (i, limit) in variant.iter().enumerate() {
                names.push(rule.layer_name(variant, i));
                layers.push(self.layer(rule, limit, identity, ahead, seed));
            }
            variants.push(first..layers.len());
        }
        let most = match rule.on_limit {
            OnLimit::Delay { max_waiting, .. } => u64::from(max_waiting),
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        let segments = Segments::of(rule);
        let suffixes = rule.variants().flatten().map(|limit| segments.segment(&limit.windows).to_owned()).collect();
        CompiledRule { identity, layers, names, suffixes, variants, queue: WaiterLimit::new(most), rule: rule.clone() }
    }

    fn layer(&mut self, rule: &Rule, limit: &Limit, identity: u64, ahead: bool, seed: Seed) -> Layer {
        let timeline = self.timelines.iter().position(|known| *known == limit.windows).unwrap_or_else(|| {
            self.timelines.push(limit.windows.clone());
            self.paces.push(limit.windows.pace());
            self.timelines.len() - 1
        });
        let floating = matches!(limit.windows, Windows::FirstRequest { .. });
        let pace = timeline as u32;
        let ahead_most = match rule.on_limit {
            // What the answer tells may be any number.
            _ if matches!(rule.cost, Cost::Response { .. }) => u64::MAX,
            OnLimit::Delay { max_delay_ms, .. } => {
                (max_delay_ms / limit.windows.usual_ms().max(1) + 2).saturating_mul(u64::from(limit.tokens))
            }
            OnLimit::Refuse | OnLimit::Shadow => 0,
        };
        let course = match floating {
            true => WindowKind::Floating(pace),
            false if ahead || limit.capacity > limit.tokens || limit.reserve > 0 => WindowKind::Grid(pace),
            false => WindowKind::Plain,
        };
        let usual_ms = limit.windows.usual_ms();
        Layer {
            bits: seed.bits(&["layer", &rule.name, &limit.windows.to_string()]) ^ identity,
            nearby: neighbourhood(usual_ms).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            timeline,
            course,
            ahead_most,
            differs: false,
            is_held: false,
            form: StoreFormat::Plain,
            shards_elsewhere: 1,
            limit: limit.tokens,
            capacity: limit.capacity.max(limit.tokens),
            reserve: limit.reserve,
            shards: if course == WindowKind::Plain { limit.shards.clamp(1, limit.tokens) } else { 1 },
            rank: (rule.key.contains(&Part::Global), limit.tokens, usual_ms),
        }
    }

    /// The time of a decision by this book.
    pub fn time(&self, now_ms: u64) -> Time<'_> {
        Time { now_ms, paces: &self.paces }
    }

    /// The roster for a route that names these rules (positions in the book).
    pub fn charge_plan(&self, rules: &[usize]) -> ChargePlan {
        let rule = |position: usize| &self.entries[rules[position]].rule;
        let mut charge_plan = ChargePlan {
            rules: rules.to_vec(),
            enforced: Vec::new(),
            shadows: (0..rules.len()).filter(|position| rule(*position).is_shadow()).collect(),
            delays: (0..rules.len()).any(|position| rule(position).delays()),
            counts_refused: (0..rules.len()).any(|position| rule(position).count_refused),
            stands: rules.iter().map(|rule| self.entries[*rule].stand()).collect(),
            is_shared: (0..rules.len()).any(|position| rule(position).sharing != Sharing::Own),
            plain: false,
        };
        let enforced = (0..rules.len()).filter(|position| !rule(*position).is_shadow());
        let mut lines: Vec<LayerRef> = enforced.flat_map(|position| self.lines(&charge_plan, position, 0)).collect();
        self.sort(&charge_plan, &mut lines);
        charge_plan.enforced = lines;
        let layers = || rules.iter().flat_map(|rule| &self.entries[*rule].layers);
        charge_plan.plain = !charge_plan.counts_refused
            && !charge_plan.is_shared
            && layers().all(|layer| layer.course == WindowKind::Plain && layer.shards == 1);
        charge_plan
    }

    /// A roster of one rule, for those who ask it without a request: it decides also if it is a shadow
    /// rule, and nobody waits.
    pub fn roster_alone(&self, rule: usize) -> ChargePlan {
        let mut charge_plan = self.charge_plan(&[rule]);
        charge_plan.shadows.clear();
        charge_plan.delays = false;
        let mut lines: Vec<LayerRef> = self.lines(&charge_plan, 0, 0).collect();
        self.sort(&charge_plan, &mut lines);
        charge_plan.enforced = lines;
        charge_plan
    }

    /// The layers of one rule, as one of its variants has them.
    pub(super) fn lines(
        &self,
        charge_plan: &ChargePlan,
        position: usize,
        variant: usize,
    ) -> impl Iterator<Item = LayerRef> + use<> {
        self.entries[charge_plan.rules[position]].variant(variant).map(move |layer| LayerRef { rule: position, layer })
    }

    /// Narrow before wide: a counter of one client before the counter of all, a small limit before a
    /// large one. The narrow is likelier to be full, and a charge that must be given back is then
    /// one that few share.
    fn sort(&self, charge_plan: &ChargePlan, lines: &mut [LayerRef]) {
        lines.sort_by_key(|line| self.layer_of(charge_plan, *line).rank);
    }

    pub fn layer_of(&self, charge_plan: &ChargePlan, line: LayerRef) -> &Layer {
        self.entries[charge_plan.rules[line.rule]].layer(line.layer)
    }

    /// Whether the rule at a position of the roster is only tried out.
    pub fn is_shadow(&self, charge_plan: &ChargePlan, position: usize) -> bool {
        self.entries[charge_plan.rules[position]].rule.is_shadow()
    }

    /// Decides a request. `desk.askers` holds, for every rule of the roster, who asks under it, or
    /// `None` where the rule does not apply.
    pub fn judge<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) -> Decision {
        context.clear();
        let judgement = if context.are_usual() {
            self.decide(charge_plan, &charge_plan.enforced, table, now, context, true)
        } else {
            let lines = self.lines_of(charge_plan, context);
            let judgement = self.decide(charge_plan, &lines, table, now, context, true);
            context.own_lines = lines;
            judgement
        };
        if !matches!(judgement, Decision::Refused) {
            self.try_out(charge_plan, table, now, context);
        }
        judgement
    }

    /// The lines of a request whose windows are not everyone's, in the desk's own list.
    pub(super) fn lines_of(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) -> Vec<LayerRef> {
        let mut lines = std::mem::take(&mut context.own_lines);
        lines.clear();
        for (position, keyed_request) in context.keyed_requests.iter().enumerate() {
            if let Some(keyed_request) = keyed_request.filter(|_| !charge_plan.shadows.contains(&position)) {
                lines.extend(self.lines(charge_plan, position, keyed_request.variant));
            }
        }
        self.sort(charge_plan, &mut lines);
        lines
    }

    /// Lets the shadow rules decide as well.
    fn try_out<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        table: &Table<W>,
        now: Now<'_>,
        context: &mut DecisionContext,
    ) {
        for position in &charge_plan.shadows {
            let Some(keyed_request) = context.keyed_requests[*position] else { continue };
            let mut lines = std::mem::take(&mut context.own_lines);
            lines.clear();
            lines.extend(self.lines(charge_plan, *position, keyed_request.variant));
            if let Decision::Refused = self.decide(charge_plan, &lines, table, now, context, false) {
                context.shadowed.push(*position);
            }
            context.own_lines = lines;
        }
    }

    /// Charges the given lines, all or none, behind what is on the desk already.
    pub(super) fn decide<const W: usize>(
        &self,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        table: &Table<W>,
        mut now: Now<'_>,
        context: &mut DecisionContext,
        may_wait: bool,
    ) -> Decision {
        let first = context.charges.len();
        let waits = may_wait && (charge_plan.delays || context.reserve);
        loop {
            let now_ms = now.unix_ms;
            context.decided_ms = context.decided_ms.max(now_ms);
            match charge_plan.is_shared {
                true => context.put_down_shared(self, charge_plan, table, lines, now_ms, first),
                false => context.put_down(self, charge_plan, lines, now_ms, first),
            }
            let charges = &mut context.charges[first..];
            let verdict = match charge_plan.plain {
                true => decide(table, charges, &mut context.shares, Time::all_plain(now_ms)),
                false => decide(table, charges, &mut context.shares, self.time(now_ms)),
            };
            match verdict {
                AcquireResult::Admitted
                    if charge_plan.is_shared && self.was_overtaken(charge_plan, table, now_ms, context, first) =>
                {
                    for share in context.take_back(first) {
                        table.refund(share.paid, share.ask, self.time(now_ms));
                    }
                }
                AcquireResult::Admitted => return Decision::Admitted,
                // This thread's time is behind one that another thread already acted upon.
                AcquireResult::Late if now.not_before(table.horizon_ms()) => {}
                // There is no later time than the last that a counter can name.
                AcquireResult::Late => return Decision::Refused,
                AcquireResult::Refused if charge_plan.plain => return Decision::Refused,
                AcquireResult::Refused if context.meets_debts(first) && now.goes_on() => {}
                AcquireResult::Refused if self.amend(charge_plan, table, self.time(now_ms), context, first) => {}
                AcquireResult::Refused => {
                    if waits && let Some(delayed) = self.postpone(charge_plan, table, self.time(now_ms), context) {
                        return delayed;
                    }
                    // Whoever looks for a place looks at the counters again, and may have found one full that was not.
                    if waits && context.meets_debts(first) && now.goes_on() {
                        continue;
                    }
                    if charge_plan.counts_refused && !charge_plan.is_shared {
                        self.count_refusal(charge_plan, table, self.time(now_ms), context, first);
                    }
                    return Decision::Refused;
                }
            }
        }
    }
}
