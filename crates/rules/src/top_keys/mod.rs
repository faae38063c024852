//! The busiest keys of each rule: which keys it refused and admitted most often in the last 30 to 60 minutes.
//!
//! Every worker counts in sketches of its own, by the hash of the key. The text of a key is made only when the key stands
//! out, so that a flood of invented keys costs few texts. `/v1/top` merges copies of the sketches.

mod sketch;

use std::cell::{RefCell, RefMut};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::rate_limit_key::KeyDescription;
use sketch::{Entry, Sketch};
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::key::{KeyHash, KeyHasher, Seed};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::verdict::{Outcome, Verdicts};

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
    config_number: u64,
    /// By rule of the rule set; empty if keys are not counted.
    rules: IdVec<RuleId, Rc<RefCell<RuleKeys>>>,
}

/// The rules whose keys are counted.
pub struct CountedRules<'a> {
    pub rule_set: &'a RuleSet,
    pub seed: Seed,
    /// Distinguishes the configurations of the process.
    pub config_number: u64,
    /// `[admin] top_keys`; 0: keys are not counted.
    pub capacity: usize,
}

/// The counts of one rule in one worker.
struct RuleKeys {
    /// Tells whether a rule of another configuration has the same name and key.
    hash_prefix: u64,
    /// Computes the ids of keys.
    id_hasher: KeyHasher,
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
    /// The configuration with which the key was named.
    config_number: u64,
    key: Arc<ListedKey>,
}

/// A key, with what finds its counters.
#[derive(PartialEq, Eq, Debug)]
pub struct ListedKey {
    pub description: KeyDescription,
    /// A request with the key; `None` if it was decided by other windows than those of the rule.
    pub keyed_request: Option<KeyedRequest>,
    /// The key in the shared store; `None` if the rule is not shared.
    pub store_key: Option<Box<str>>,
}

/// What names a key: see [`TopKeys::name_keys`].
#[derive(Clone)]
pub struct KeyName {
    pub description: KeyDescription,
    pub store_key: Option<Rc<str>>,
    /// Whether the windows of the rule decided the request.
    pub has_own_windows: bool,
}

/// A copy of the counts of one rule in one worker.
pub struct Snapshot {
    id_hasher: KeyHasher,
    started_ms: u64,
    counts: PeriodCounts,
}

impl TopKeys {
    /// Rules that `previous` has with the same name and key keep their counts.
    pub fn new(counted: &CountedRules<'_>, now_ms: u64, previous: Option<&TopKeys>) -> TopKeys {
        let CountedRules { rule_set, seed, config_number, capacity } = *counted;
        let keys_of = |hash_prefix: u64| {
            let is_same = |keys: &&Rc<RefCell<RuleKeys>>| {
                let keys = keys.borrow();
                keys.hash_prefix == hash_prefix && keys.capacity == capacity
            };
            let kept = previous.and_then(|previous| previous.rules.iter().find(is_same)).cloned();
            kept.unwrap_or_else(|| Rc::new(RefCell::new(RuleKeys::new(hash_prefix, seed, capacity, now_ms))))
        };
        let rules = rule_set.rules.iter().filter(|_| capacity > 0);
        TopKeys { config_number, rules: rules.map(|rule| keys_of(rule.hash_prefix)).collect() }
    }

    /// Counts the decision on a request by these rules. The rules that decided, at the same positions, may have had other windows.
    /// Returns whether a key needs a name.
    #[inline]
    pub fn count_decision(&self, rules: &IdVec<PlanPosition, RuleId>, verdicts: Verdicts<'_>) -> bool {
        let mut needs_name = false;
        for verdict in verdicts.rules() {
            if let Some(keyed_request) = verdict.keyed_request()
                && let Some(rule) = self.rules.get(rules[verdict.position])
                && let Some(outcome) = outcome_of(verdict.outcome(), verdicts.is_refused())
            {
                needs_name |= rule.borrow_mut().count(keyed_request.key, outcome, self.config_number);
            }
        }
        needs_name
    }

    /// Names the keys of a request that need a name.
    pub fn name_keys(
        &self,
        rules: &IdVec<PlanPosition, RuleId>,
        keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>,
        name: impl Fn(PlanPosition) -> KeyName,
    ) {
        for (position, keyed_request) in keyed_requests.enumerate() {
            if let Some(keyed_request) = keyed_request
                && let Some(rule) = self.rules.get(rules[position])
            {
                rule.borrow_mut().name(*keyed_request, self.config_number, || name(position));
            }
        }
    }

    /// Begins a new period, if it is time.
    pub fn begin_period(&self, now_ms: u64) {
        self.rules.iter().for_each(|rule| rule.borrow_mut().begin_period(now_ms));
    }

    /// Copies the counts of a rule.
    pub fn snapshot(&self, hash_prefix: u64, outcome: KeyOutcome, now_ms: u64) -> Option<Snapshot> {
        let rule = self.rule(hash_prefix, now_ms)?;
        let counts = rule.counts[outcome as usize].clone();
        Some(Snapshot { id_hasher: rule.id_hasher.clone(), started_ms: rule.started_ms, counts })
    }

    /// The key of a rule with this id, if it can be looked up with a configuration.
    pub fn find(&self, hash_prefix: u64, id: u64, config_number: u64, now_ms: u64) -> Option<Arc<ListedKey>> {
        let rule = self.rule(hash_prefix, now_ms)?;
        let entries = rule.counts.iter().flat_map(|counts| counts.current.entries().chain(counts.previous.entries()));
        let mut named = entries.filter_map(|(key, entry)| Some((key, entry.value.as_ref()?)));
        let (_, found) = named.find(|(key, named)| {
            named.config_number == config_number
                && named.key.keyed_request.is_some()
                && id_of(&rule.id_hasher, *key) == id
        })?;
        Some(Arc::clone(&found.key))
    }

    fn rule(&self, hash_prefix: u64, now_ms: u64) -> Option<RefMut<'_, RuleKeys>> {
        let rule = self.rules.iter().find(|rule| rule.borrow().hash_prefix == hash_prefix)?;
        let mut rule = rule.borrow_mut();
        rule.begin_period(now_ms);
        Some(rule)
    }
}

/// What is counted of an outcome; `None`: another rule refused the request.
#[inline]
fn outcome_of(outcome: Outcome, is_refused: bool) -> Option<KeyOutcome> {
    match outcome {
        Outcome::Refused => Some(KeyOutcome::Refused),
        Outcome::Shadowed if !is_refused => Some(KeyOutcome::Refused),
        Outcome::Admitted | Outcome::Delayed | Outcome::Waited => Some(KeyOutcome::Admitted),
        Outcome::Shadowed | Outcome::NotCounted(_) | Outcome::RefusedElsewhere => None,
    }
}

impl RuleKeys {
    fn new(hash_prefix: u64, seed: Seed, capacity: usize, now_ms: u64) -> RuleKeys {
        let counts = KeyOutcome::ALL.map(|_| PeriodCounts {
            period: now_ms / PERIOD_MS,
            current: Sketch::new(capacity),
            previous: Arc::new(Sketch::new(capacity)),
        });
        let id_hasher = KeyHasher::new(seed, hash_prefix);
        RuleKeys { hash_prefix, id_hasher, capacity, started_ms: now_ms, counts }
    }

    #[inline]
    fn count(&mut self, key: KeyHash, outcome: KeyOutcome, config_number: u64) -> bool {
        let hit = |entry: &mut Entry<Option<_>>, stands_out| stands_out && needs_name(entry, config_number);
        self.counts[outcome as usize].current.hit(key.bucket_hash, hit)
    }

    fn name(&mut self, keyed_request: KeyedRequest, config_number: u64, name: impl Fn() -> KeyName) {
        for counts in &mut self.counts {
            if let Some((entry, true)) = counts.current.find(keyed_request.key.bucket_hash)
                && needs_name(entry, config_number)
            {
                let KeyName { description, store_key, has_own_windows } = name();
                let (keyed_request, store_key) =
                    (has_own_windows.then_some(keyed_request), store_key.as_deref().map(Box::from));
                let key = Arc::new(ListedKey { description, keyed_request, store_key });
                entry.value = Some(NamedKey { config_number, key });
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
fn needs_name(entry: &Entry<Option<NamedKey>>, config_number: u64) -> bool {
    entry.value.as_ref().is_none_or(|named| named.config_number != config_number)
}

/// The id of a key. Its hash itself would tell which keys share a bucket of the table.
fn id_of(hasher: &KeyHasher, key: u64) -> u64 {
    let mut hasher = hasher.clone();
    hasher.add("id");
    hasher.add(&key);
    hasher.finish().bucket_hash
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
    id: u64,
    key: Arc<ListedKey>,
    /// Never too low.
    pub count: u64,
    /// How much the count may be too high.
    pub error: u64,
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
        let sketches = || snapshots.iter().flat_map(|snapshot| [&snapshot.counts.current, &snapshot.counts.previous]);
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
        let top_key = |(key, sum): (u64, Sum)| {
            let error = missed_max - sum.known;
            let id = snapshots.first().map(|snapshot| id_of(&snapshot.id_hasher, key))?;
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
    /// The name of the client that the key names.
    pub fn client(&self) -> Option<&str> {
        self.key.description.client.as_deref()
    }

    pub fn to_json(&self) -> Value {
        let key = &self.key.description;
        json!({
            "id": format!("{:016x}", self.id), "key": key.parts_json(), "fallback": key.is_fallback,
            "client": key.client, "label": key.label(), "count": self.count, "error": self.error,
        })
    }
}
