//! The rule book: which counters a request is charged in, and what the counters' answers mean.
//!
//! Rules go in as the operator wrote them and come out as plans, one per route: the layers of all
//! its rules in the order in which they are charged. A decision fills a desk that is reused from
//! request to request, so it allocates nothing. This file knows neither HTTP nor the clock.

use super::key::{KeyHash, OnMissing, Part, Seed};
use super::limit::Limit;
use super::window::{Period, Window};
use crate::count::charge::{Charge, Verdict, decide};
use crate::count::region::Key;
use crate::count::table::{Counter, Table};
use crate::count::word::Ask;

/// A rule as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub name: String,
    pub key: Vec<Part>,
    pub on_missing: OnMissing,
    pub layers: Vec<Limit>,
    /// Tokens that one request consumes.
    pub cost: u32,
    pub on_limit: OnLimit,
}

/// What happens to a request that finds a layer full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnLimit {
    Refuse,
    /// Decide and report, but never enforce.
    Shadow,
}

impl Rule {
    /// The name of a layer in answers and metrics: the rule's own where it has only one.
    pub fn layer_name(&self, layer: usize) -> String {
        match self.layers.as_slice() {
            [_] => self.name.clone(),
            layers => format!("{}-{}", self.name, layers[layer].period_text),
        }
    }

    /// What the rule's counters are known by: its name and its key. A layer adds its period. The
    /// limit is not part of it, so a changed limit applies to what was already counted.
    fn identity(&self, seed: Seed) -> u64 {
        seed.bits(&["rule", &self.name, &format!("{:?}", self.key)])
    }
}

/// A rule made ready: what its layers' counters are known by.
#[derive(Debug)]
pub struct Entry {
    pub rule: Rule,
    /// Hash prefix of every key of this rule.
    pub identity: u64,
    layers: Vec<u64>,
    names: Vec<String>,
}

impl Entry {
    pub fn new(rule: Rule, seed: Seed) -> Entry {
        let identity = rule.identity(seed);
        let layers = rule
            .layers
            .iter()
            .map(|limit| seed.bits(&["layer", &rule.name, &format!("{:?}", limit.period)]) ^ identity);
        let names = (0..rule.layers.len()).map(|layer| rule.layer_name(layer)).collect();
        Entry { identity, layers: layers.collect(), names, rule }
    }

    pub fn layer_name(&self, layer: usize) -> &str {
        &self.names[layer]
    }

    pub fn layer_names(&self) -> &[String] {
        &self.names
    }

    fn charge(&self, layer: usize, key: KeyHash, end_ms: u64) -> Charge {
        let limit = &self.rule.layers[layer];
        let place = key.place.wrapping_add(neighbourhood(limit.period).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let counter = Counter { key: Key::new(place, key.tag ^ self.layers[layer]), layer: self.layers[layer] };
        Charge::new(counter, Ask { end_ms, limit: limit.tokens, cost: self.rule.cost })
    }
}

/// Layers of similar periods share a bucket, and so a cache line; all of a rule's would crowd it. It
/// depends on the period alone: where a layer stands among others must not move its counters.
fn neighbourhood(period: Period) -> u64 {
    match period.shortest_ms() {
        0..=10_000 => 0,
        10_001..=3_600_000 => 1,
        3_600_001..=604_800_000 => 2,
        _ => 3,
    }
}

/// A layer of a plan: the rule's position in the route's list, and the layer's in the rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    pub rule: usize,
    pub layer: usize,
}

/// The rules of one route, in the order of the configuration, and the order in which they charge.
#[derive(Debug, Default)]
pub struct Plan {
    /// Positions in the book.
    pub rules: Vec<usize>,
    /// Layers of the enforced rules, from the narrowest to the widest.
    enforced: Vec<Line>,
    /// Layers of each shadow rule.
    shadows: Vec<Vec<Line>>,
}

/// All rules, made ready.
#[derive(Debug, Default)]
pub struct Book {
    pub entries: Vec<Entry>,
}

impl Book {
    pub fn new(rules: &[Rule], seed: Seed) -> Book {
        Book { entries: rules.iter().map(|rule| Entry::new(rule.clone(), seed)).collect() }
    }

    /// The plan for a route that names these rules (positions in the book).
    pub fn plan(&self, rules: &[usize]) -> Plan {
        let lines = |position: usize| {
            let layers = 0..self.entries[rules[position]].rule.layers.len();
            layers.map(move |layer| Line { rule: position, layer })
        };
        let shadow = |position: &usize| self.entries[rules[*position]].rule.on_limit == OnLimit::Shadow;
        let mut enforced: Vec<Line> = (0..rules.len()).filter(|p| !shadow(p)).flat_map(lines).collect();
        // Narrow before wide: a counter of one client before the counter of all, a small limit
        // before a large one. The narrow is likelier to be full, and a charge that must be given
        // back is then one that few share.
        enforced.sort_by_key(|line| {
            let rule = &self.entries[rules[line.rule]].rule;
            let limit = &rule.layers[line.layer];
            (rule.key.contains(&Part::Global), limit.tokens, limit.period.shortest_ms())
        });
        let shadows = (0..rules.len()).filter(shadow).map(|position| lines(position).collect()).collect();
        Plan { rules: rules.to_vec(), enforced, shadows }
    }

    /// Whether the rule at a position of the plan is only tried out.
    pub fn is_shadow(&self, plan: &Plan, position: usize) -> bool {
        self.entries[plan.rules[position]].rule.on_limit == OnLimit::Shadow
    }

    /// Decides a request. `desk.keys` holds, for every rule of the plan, the key that the request
    /// has under it, or `None` where the rule does not apply.
    pub fn judge<const W: usize>(&self, plan: &Plan, table: &Table<W>, now_ms: u64, desk: &mut Desk) -> Verdict {
        desk.shadowed.clear();
        desk.charges.clear();
        desk.lines.clear();
        if self.settle(plan, &plan.enforced, table, now_ms, desk, 0) == Verdict::Refused {
            return Verdict::Refused;
        }
        for lines in &plan.shadows {
            let first = desk.lines.len();
            if self.settle(plan, lines, table, now_ms, desk, first) == Verdict::Refused {
                desk.shadowed.push(lines[0].rule);
            }
        }
        Verdict::Admitted
    }

    /// Charges the given lines, all or none, on the desk from `first` on.
    fn settle<const W: usize>(
        &self,
        plan: &Plan,
        lines: &[Line],
        table: &Table<W>,
        mut now_ms: u64,
        desk: &mut Desk,
        first: usize,
    ) -> Verdict {
        loop {
            desk.charges.truncate(first);
            desk.lines.truncate(first);
            for line in lines {
                if let Some(key) = desk.keys[line.rule] {
                    let entry = &self.entries[plan.rules[line.rule]];
                    let end_ms = desk.window_end_ms(entry.rule.layers[line.layer].period, now_ms);
                    desk.charges.push(entry.charge(line.layer, key, end_ms));
                    desk.lines.push(*line);
                }
            }
            match decide(table, &mut desk.charges[first..], now_ms) {
                // This thread's time is behind one that another thread already acted upon.
                Verdict::Late => now_ms = now_ms.max(table.horizon_ms()),
                verdict => return verdict,
            }
        }
    }
}

/// What one decision reads and writes; kept and used again by the next.
#[derive(Debug, Default)]
pub struct Desk {
    /// Per rule of the plan, the request's key; filled by the caller.
    pub keys: Vec<Option<KeyHash>>,
    /// The counters asked, and their answers, in the order in which they were charged: first those
    /// of enforced rules, then those of shadow rules.
    pub charges: Vec<Charge>,
    /// Which layer each of `charges` belongs to.
    pub lines: Vec<Line>,
    /// Positions of the shadow rules that would have refused the request.
    pub shadowed: Vec<usize>,
    /// The window last found at each place of `charges`: most requests fall into the same.
    windows: Vec<(Period, Window)>,
}

impl Desk {
    /// The end of the window that a charge about to be added falls into.
    fn window_end_ms(&mut self, period: Period, now_ms: u64) -> u64 {
        let at = self.charges.len();
        match self.windows.get(at) {
            Some((known, window)) if *known == period && window.contains(now_ms) => window.end_ms,
            _ => {
                let window = period.window_at(now_ms);
                self.windows.truncate(at);
                self.windows.push((period, window));
                window.end_ms
            }
        }
    }

    /// The answer of one layer, or `None` if its rule does not apply to the request.
    pub fn answer(&self, line: Line) -> Option<&Charge> {
        self.lines.iter().position(|other| *other == line).map(|i| &self.charges[i])
    }
}
