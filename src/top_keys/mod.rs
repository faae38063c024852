//! The busiest keys of each rule: which keys it refused and admitted most often in the last 30 to 60 minutes.
//!
//! Every worker counts in sketches of its own, by the hash of the key. The text of a key is made only when the key stands
//! out, so that a flood of invented keys costs no text. `/v1/top` merges copies of the sketches.

mod sketch;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use serde_json::{Value, json};

use crate::http::rate_limit_key::KeyDescription;
use sketch::{Entry, Sketch};
use transom_limiter::concurrency::SlotState;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::key::KeyHash;
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, RuleSet};

/// The sketches of the last full period are kept, so that a list is of the last one to two periods.
const PERIOD_MS: u64 = 30 * 60_000;

/// What is counted of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyOutcome {
    /// The rule refused the request, or a shadow rule would have.
    Refused,
    Admitted,
}

impl KeyOutcome {
    pub const ALL: [KeyOutcome; 2] = [KeyOutcome::Refused, KeyOutcome::Admitted];

    pub fn name(self) -> &'static str {
        match self {
            KeyOutcome::Refused => "refused",
            KeyOutcome::Admitted => "admitted",
        }
    }
}

/// The counts of one worker.
#[derive(Default)]
pub struct TopKeys {
    rule_set: Weak<RuleSet>,
    /// By rule of the rule set; empty if keys are not counted.
    rules: Vec<Rc<RefCell<RuleKeys>>>,
}

/// The counts of one rule in one worker.
struct RuleKeys {
    /// Tells whether a rule of another configuration has the same name and key.
    hash_prefix: u64,
    capacity: usize,
    /// Unix milliseconds.
    started_ms: u64,
    /// By outcome.
    counts: [PeriodCounts; 2],
}

/// The counts of the current and of the previous period.
#[derive(Clone)]
struct PeriodCounts {
    /// The number of the current period since 1970.
    period: u64,
    current: KeySketch,
    previous: Arc<KeySketch>,
}

/// Keys with their names.
type KeySketch = Sketch<Option<NamedKey>>;

/// A key that has stood out.
#[derive(Clone, Debug)]
struct NamedKey {
    /// The rules of the configuration with which the key was named.
    rule_set: Weak<RuleSet>,
    key: Arc<ListedKey>,
}

/// A key, with what finds its counters.
#[derive(PartialEq, Eq, Debug)]
pub struct ListedKey {
    pub description: KeyDescription,
    /// A request with the key.
    pub keyed_request: KeyedRequest,
    /// The key in the shared store; `None` if the rule is not shared.
    pub store_key: Option<Box<str>>,
}

/// A copy of the counts of one rule in one worker.
pub struct Snapshot {
    started_ms: u64,
    counts: PeriodCounts,
}

impl TopKeys {
    /// Rules that `previous` has with the same name and key keep their counts. `capacity` 0: keys are not counted.
    pub fn new(rule_set: &Arc<RuleSet>, capacity: usize, now_ms: u64, previous: Option<&TopKeys>) -> TopKeys {
        let keys_of = |hash_prefix: u64| {
            let is_same = |keys: &&Rc<RefCell<RuleKeys>>| {
                let keys = keys.borrow();
                keys.hash_prefix == hash_prefix && keys.capacity == capacity
            };
            let kept = previous.and_then(|previous| previous.rules.iter().find(is_same)).cloned();
            kept.unwrap_or_else(|| Rc::new(RefCell::new(RuleKeys::new(hash_prefix, capacity, now_ms))))
        };
        let rules = rule_set.rules.iter().filter(|_| capacity > 0);
        TopKeys { rule_set: Arc::downgrade(rule_set), rules: rules.map(|rule| keys_of(rule.hash_prefix)).collect() }
    }

    /// Counts the decision on a request, with its result in `context`. Returns whether one of its keys needs a name.
    #[inline]
    pub fn count_decision(&self, charge_plan: &ChargePlan, context: &DecisionContext, decision: &Decision) -> bool {
        let mut needs_name = false;
        for (position, keyed_request) in context.inputs.keyed_requests.iter().enumerate() {
            if let Some(keyed_request) = keyed_request
                && let Some(rule) = self.rules.get(charge_plan.rules[position])
                && let Some(outcome) = outcome_of(position, context, decision)
            {
                needs_name |= rule.borrow_mut().count(keyed_request.key, outcome, &self.rule_set);
            }
        }
        needs_name
    }

    /// Names the keys of a request that need a name. `describe` is given the position of a rule in the charge plan, and returns
    /// the key and its text in the shared store.
    pub fn name_keys(
        &self,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        describe: impl Fn(usize) -> (KeyDescription, Option<Rc<str>>),
    ) {
        for (position, keyed_request) in context.inputs.keyed_requests.iter().enumerate() {
            if let Some(keyed_request) = keyed_request
                && let Some(rule) = self.rules.get(charge_plan.rules[position])
            {
                rule.borrow_mut().name(*keyed_request, &self.rule_set, || describe(position));
            }
        }
    }

    /// Begins a new period, if it is time.
    pub fn begin_period(&self, now_ms: u64) {
        self.rules.iter().for_each(|rule| rule.borrow_mut().begin_period(now_ms));
    }

    /// Copies the counts of a rule.
    pub fn snapshot(&self, hash_prefix: u64, outcome: KeyOutcome, now_ms: u64) -> Option<Snapshot> {
        let rule = self.rules.iter().find(|rule| rule.borrow().hash_prefix == hash_prefix)?;
        let mut rule = rule.borrow_mut();
        rule.begin_period(now_ms);
        Some(Snapshot { started_ms: rule.started_ms, counts: rule.counts[outcome as usize].clone() })
    }
}

/// What a rule did with a request; `None`: another rule refused the request.
#[inline]
fn outcome_of(position: usize, context: &DecisionContext, decision: &Decision) -> Option<KeyOutcome> {
    let result = &context.result;
    let has_slot_state =
        |state: SlotState| result.concurrency.iter().any(|usage| usage.rule == position && usage.state == state);
    match decision {
        Decision::Refused => {
            let is_refused =
                context.charges_of_rule(position).any(|charge| charge.is_full) || has_slot_state(SlotState::Full);
            is_refused.then_some(KeyOutcome::Refused)
        }
        _ if result.shadowed.contains(&position) || has_slot_state(SlotState::Shadowed) => Some(KeyOutcome::Refused),
        Decision::Admitted | Decision::Delayed { .. } => Some(KeyOutcome::Admitted),
    }
}

impl RuleKeys {
    fn new(hash_prefix: u64, capacity: usize, now_ms: u64) -> RuleKeys {
        let counts = KeyOutcome::ALL.map(|_| PeriodCounts {
            period: now_ms / PERIOD_MS,
            current: Sketch::new(capacity),
            previous: Arc::new(Sketch::new(capacity)),
        });
        RuleKeys { hash_prefix, capacity, started_ms: now_ms, counts }
    }

    #[inline]
    fn count(&mut self, key: KeyHash, outcome: KeyOutcome, rule_set: &Weak<RuleSet>) -> bool {
        let hit = |entry: &mut Entry<Option<_>>, stands_out| stands_out && needs_name(entry, rule_set);
        self.counts[outcome as usize].current.hit(key.bucket_hash, hit)
    }

    fn name(
        &mut self,
        keyed_request: KeyedRequest,
        rule_set: &Weak<RuleSet>,
        describe: impl Fn() -> (KeyDescription, Option<Rc<str>>),
    ) {
        for counts in &mut self.counts {
            if let Some((entry, true)) = counts.current.find(keyed_request.key.bucket_hash)
                && needs_name(entry, rule_set)
            {
                let (description, store_key) = describe();
                let store_key = store_key.as_deref().map(Box::from);
                let key = Arc::new(ListedKey { description, keyed_request, store_key });
                entry.value = Some(NamedKey { rule_set: Weak::clone(rule_set), key });
            }
        }
    }

    fn begin_period(&mut self, now_ms: u64) {
        let period = now_ms / PERIOD_MS;
        for counts in self.counts.iter_mut().filter(|counts| counts.period != period) {
            let ended = std::mem::replace(&mut counts.current, Sketch::new(self.capacity));
            let is_next = period == counts.period + 1;
            counts.previous = Arc::new(if is_next { ended } else { Sketch::new(self.capacity) });
            counts.period = period;
        }
    }
}

/// Whether the key has no name, or one of another configuration, in which its plan may be another.
#[inline]
fn needs_name(entry: &Entry<Option<NamedKey>>, rule_set: &Weak<RuleSet>) -> bool {
    entry.value.as_ref().is_none_or(|named| !Weak::ptr_eq(&named.rule_set, rule_set))
}

/// The key with this id, as [`TopList`] lists it, with the plan that it has under `rule_set`.
pub fn find_key(snapshots: &[Snapshot], id: u64, rule_set: &Arc<RuleSet>) -> Option<Arc<ListedKey>> {
    let rule_set = Arc::downgrade(rule_set);
    let named = snapshots.iter().flat_map(Snapshot::sketches).filter_map(|sketch| sketch.get(id)?.value.as_ref());
    let found = { named }.find(|named| Weak::ptr_eq(&named.rule_set, &rule_set));
    found.map(|named| Arc::clone(&named.key))
}

impl Snapshot {
    /// The counts of the current and of the previous period.
    fn sketches(&self) -> [&KeySketch; 2] {
        [&self.counts.current, &self.counts.previous]
    }
}

/// The busiest keys of one rule, merged from all workers.
#[derive(Debug)]
pub struct TopList {
    /// Since when requests are counted, Unix milliseconds.
    pub since_ms: u64,
    /// All requests that are counted.
    pub total: u64,
    /// With the most hits first.
    pub keys: Vec<TopKey>,
}

/// A busy key.
#[derive(Debug)]
pub struct TopKey {
    /// The hash of the key.
    id: u64,
    key: Arc<ListedKey>,
    /// Never too low.
    count: u64,
    /// How much the count may be too high.
    error: u64,
}

impl TopList {
    /// Merges the copies of several workers. Keys that stand out in none have no name and are left out.
    pub fn merge(snapshots: &[Snapshot], now_ms: u64, limit: usize) -> TopList {
        /// The sum of all workers.
        #[derive(Default)]
        struct Sum {
            hits: u64,
            /// Where the key is followed: what it may have missed less than a key that is not followed.
            known: u64,
            named: Option<Arc<ListedKey>>,
        }
        let sketches = || snapshots.iter().flat_map(Snapshot::sketches);
        let missed_max: u64 = sketches().map(Sketch::missed_max).sum();
        let mut sums = HashMap::<u64, Sum>::new();
        for sketch in sketches() {
            for (key, entry) in sketch.entries() {
                let sum = sums.entry(key).or_default();
                sum.hits += entry.hits;
                sum.known += sketch.missed_max() - entry.missed;
                sum.named = sum.named.take().or_else(|| entry.value.as_ref().map(|named| Arc::clone(&named.key)));
            }
        }
        let top_key = |(id, sum): (u64, Sum)| {
            let error = missed_max - sum.known;
            Some(TopKey { id, key: sum.named?, count: sum.hits + error, error })
        };
        let mut keys: Vec<TopKey> = sums.into_iter().filter_map(top_key).collect();
        keys.sort_by(|a, b| {
            (b.count - b.error)
                .cmp(&(a.count - a.error))
                .then_with(|| a.key.description.parts.cmp(&b.key.description.parts))
        });
        keys.truncate(limit);
        let started_ms = snapshots.iter().map(|snapshot| snapshot.started_ms).min().unwrap_or(now_ms);
        TopList {
            since_ms: started_ms.max((now_ms / PERIOD_MS).saturating_sub(1) * PERIOD_MS),
            total: sketches().map(Sketch::total).sum(),
            keys,
        }
    }
}

impl TopKey {
    pub fn to_json(&self) -> Value {
        let key = &self.key.description;
        json!({
            "id": format!("{:016x}", self.id), "key": key.parts_json(), "fallback": key.is_fallback,
            "client": key.client, "label": key.label(), "count": self.count, "error": self.error,
        })
    }
}
