//! Notifications about keys near their limits: `[notify]`.
//!
//! [`MarkReader`] reads the verdicts of each decision. It compares the usage of each window with thresholds that are computed when a
//! configuration is applied. A key that reaches a mark is looked up in [`SentMarks`], which all workers share, so that each
//! key, window and mark causes one event. The thread of [`sender`] logs events and sends them: no request waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::Sender;

use transom_config::notify::Notify;
use transom_limiter::handles::{IdVec, LayerPosition, PlanPosition, RuleId};
use transom_limiter::rule_set::{CompiledRule, RuleSet};
use transom_limiter::table::Counter;
use transom_limiter::verdict::{Verdicts, WindowVerdict};
use transom_limiter::window_kind::WindowKind;
use transom_rules::top_keys::KeyName;
use transom_runtime::metrics::events::DroppedMarks;

pub mod sender;

/// Most keys, windows and marks whose events are remembered at a time.
const SENT_MAX: usize = 100_000;
/// Ended events are removed from a full memory at most this often.
const SWEEP_INTERVAL_MS: u64 = 1000;
/// Entries of the cache of each reader.
const RECENT: usize = 256;
/// Bits of the hash of a key that select the entry.
const RECENT_MASK: u64 = RECENT as u64 - 1;

/// The usage of a key has reached a mark of its limit.
#[derive(Debug)]
pub struct MarkEvent {
    pub rule: String,
    /// The name of the window.
    pub window: String,
    /// The key as in the access log: the name of the client, or the values of its parts.
    pub key: String,
    /// The client that the key names.
    pub client: Option<String>,
    /// The plan whose windows apply.
    pub plan: Option<String>,
    /// Percent of the limit.
    pub mark: u8,
    pub used: u64,
    /// Tokens that a key can use in the window.
    pub limit: u64,
    /// The time of the decision, Unix milliseconds.
    pub time_ms: u64,
    /// The end of the window, Unix milliseconds.
    pub end_ms: u64,
    is_sliding: bool,
    /// The key in the shared store; `None` if the rule is not shared.
    store_key: Option<String>,
}

/// Events that have been caused.
#[derive(Default)]
pub struct SentMarks(Mutex<SentEvents>);

#[derive(Default)]
struct SentEvents {
    /// Until when an event is not caused again, Unix milliseconds.
    until_ms: HashMap<(Counter, u8), u64>,
    /// When those that have ended are next removed, Unix milliseconds.
    next_sweep_ms: u64,
}

/// Whether an event was caused before.
#[derive(PartialEq, Eq)]
enum Known {
    No,
    Yes,
    /// Too many events are remembered.
    Full,
}

/// What marks of which windows cause events, under one configuration.
pub struct Marks {
    layers: IdVec<RuleId, IdVec<LayerPosition, LayerMarks>>,
    sent: Arc<SentMarks>,
    events: Sender<MarkEvent>,
    /// When this process started, Unix milliseconds.
    started_ms: u64,
}

/// The marks of one layer.
#[derive(Clone, Default)]
struct LayerMarks {
    /// The usage that reaches each mark, in ascending order, with the mark.
    thresholds: Vec<(u64, u8)>,
}

/// The marks as one worker, or the decision API, reads them.
pub struct MarkReader {
    marks: Arc<Marks>,
    /// Marks that were looked up, by the hash of the key: usage beyond a mark is frequent, and the mutex is shared. Never contended
    /// itself.
    recent: Mutex<Vec<Option<(Counter, u8, u64)>>>,
    dropped: DroppedMarks,
}

impl Marks {
    /// `events`: the queue of the [`sender`].
    pub fn new(
        settings: &Notify,
        rule_set: &RuleSet,
        sent: &Arc<SentMarks>,
        events: Sender<MarkEvent>,
        started_ms: u64,
    ) -> Marks {
        let layers = |(id, rule): (RuleId, &CompiledRule)| {
            let is_watched = settings.rules.as_ref().is_none_or(|rules| rules.contains(&id));
            let of_layer = |capacity: u32| LayerMarks {
                thresholds: settings.at.iter().map(|mark| (threshold(capacity, *mark), *mark)).collect(),
            };
            let layers = rule.compiled_layers().map(|layer| match is_watched && !layer.is_penalty() {
                true => of_layer(layer.capacity),
                false => LayerMarks::default(),
            });
            layers.collect()
        };
        let layers = rule_set.rules.enumerate().map(layers).collect();
        Marks { layers, sent: Arc::clone(sent), events, started_ms }
    }
}

/// The least usage that is at least `mark` percent of the limit.
fn threshold(limit: u32, mark: u8) -> u64 {
    (u64::from(limit) * u64::from(mark)).div_ceil(100)
}

impl MarkReader {
    pub fn new(marks: &Arc<Marks>, dropped: DroppedMarks) -> MarkReader {
        MarkReader { marks: Arc::clone(marks), recent: Mutex::new(vec![None; RECENT]), dropped }
    }

    /// Causes the events of a decision. `rules`: those of the configuration, at the positions of the rules that decided. `name`
    /// names the key of the rule at a position.
    pub fn read(
        &self,
        rules: &IdVec<PlanPosition, RuleId>,
        verdicts: Verdicts<'_>,
        name: impl Fn(PlanPosition) -> Option<KeyName>,
    ) {
        for window in verdicts.windows() {
            let layer = window.layer();
            let layers = &self.marks.layers[rules[layer.position]];
            let Some(LayerMarks { thresholds }) = layers.get(layer.id.position) else { continue };
            let used = window.usage().used;
            if thresholds.first().is_some_and(|(lowest, _)| used >= *lowest) {
                self.reached(thresholds, window, verdicts, || name(layer.position));
            }
        }
    }

    /// Causes the events of a window whose usage has reached a mark.
    #[cold]
    fn reached(
        &self,
        thresholds: &[(u64, u8)],
        window: WindowVerdict<'_>,
        verdicts: Verdicts<'_>,
        name: impl Fn() -> Option<KeyName>,
    ) {
        let (usage, now_ms) = (window.usage(), verdicts.decided_ms());
        let is_sliding = window.kind() == WindowKind::Sliding;
        let period_ms = window.windows().length_ms(usage.end_ms);
        let until_ms = if is_sliding { now_ms + period_ms } else { usage.end_ms };
        for (threshold, mark) in thresholds.iter().filter(|(threshold, _)| usage.used >= *threshold) {
            let id = (window.counter(), *mark);
            if self.is_recent(id, now_ms, until_ms) {
                continue;
            }
            match self.marks.sent.insert(id, now_ms, until_ms) {
                Known::No => {}
                Known::Yes => continue,
                Known::Full => {
                    self.dropped.add();
                    continue;
                }
            }
            let Some(KeyName { description, store_key, has_own_windows: true }) = name() else { continue };
            // A former process has sent the event, unless this request has reached the mark. The store knows what it sent of
            // shared rules.
            let has_begun_before = until_ms.saturating_sub(period_ms) < self.marks.started_ms;
            let has_reached = usage.used.saturating_sub(window.taken()) < *threshold;
            if has_begun_before && !has_reached && store_key.is_none() {
                continue;
            }
            let keyed_request = verdicts.keyed_requests()[window.layer().position];
            let rule = &window.rule().rule;
            let plan = keyed_request.and_then(|keyed_request| rule.plan_of(keyed_request.variant));
            let event = MarkEvent {
                rule: rule.name.clone(),
                window: window.name().to_owned(),
                key: description.label(),
                client: description.client,
                plan: plan.map(|plan| plan.name.clone()),
                mark: *mark,
                used: usage.used,
                limit: window.capacity().into(),
                time_ms: now_ms,
                end_ms: until_ms,
                is_sliding,
                store_key: store_key.map(|key| key.to_string()),
            };
            if self.marks.events.try_send(event).is_err() {
                self.dropped.add();
            }
        }
    }

    /// Whether the event was looked up before; remembers it otherwise.
    fn is_recent(&self, (counter, mark): (Counter, u8), now_ms: u64, until_ms: u64) -> bool {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = counter.key.bucket_hash.wrapping_add(mark.into()) & RECENT_MASK;
        let Some(known) = recent.get_mut(entry as usize) else { return false };
        let is_known = known.is_some_and(|(of, at, until_ms)| of == counter && at == mark && now_ms < until_ms);
        *known = Some((counter, mark, until_ms));
        is_known
    }
}

impl SentMarks {
    /// Remembers an event.
    fn insert(&self, id: (Counter, u8), now_ms: u64, until_ms: u64) -> Known {
        let mut sent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = &mut *sent;
        if sent.until_ms.len() >= SENT_MAX && now_ms >= sent.next_sweep_ms {
            sent.until_ms.retain(|_, until_ms| *until_ms > now_ms);
            sent.next_sweep_ms = now_ms + SWEEP_INTERVAL_MS;
        }
        let has_room = sent.until_ms.len() < SENT_MAX;
        match sent.until_ms.get_mut(&id) {
            Some(known) if *known > now_ms => Known::Yes,
            Some(known) => {
                *known = until_ms;
                Known::No
            }
            None if has_room => {
                sent.until_ms.insert(id, until_ms);
                Known::No
            }
            None => Known::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::bucket::Key;

    fn counter(number: u64) -> Counter {
        Counter { key: Key::new(number, u64::MAX - number), layer: 1 }
    }

    #[test]
    fn a_mark_is_reached_by_the_first_whole_token() {
        let thresholds = [(10, 80, 8), (10, 100, 10), (33, 80, 27), (1, 1, 1), (u32::MAX, 100, u64::from(u32::MAX))];
        for (limit, mark, expected) in thresholds {
            assert_eq!(threshold(limit, mark), expected, "{mark}% of {limit}");
        }
    }

    #[test]
    fn an_event_is_new_once_a_window() {
        let sent = SentMarks::default();
        let is_new =
            |number, mark, now_ms, until_ms| sent.insert((counter(number), mark), now_ms, until_ms) == Known::No;
        assert!(is_new(1, 80, 5, 10));
        assert!(!is_new(1, 80, 9, 10));
        assert!(is_new(1, 100, 9, 10) && is_new(2, 80, 9, 10));
        assert!(is_new(1, 80, 10, 20) && !is_new(1, 80, 19, 20));
    }

    #[test]
    fn a_full_memory_has_no_new_events_until_windows_end() {
        let sent = SentMarks::default();
        let insert = |number: usize, now_ms, until_ms| sent.insert((counter(number as u64), 80), now_ms, until_ms);
        assert!((0..SENT_MAX).all(|number| insert(number, 0, 10) == Known::No));
        assert!(insert(SENT_MAX, 9, 10) == Known::Full && insert(0, 9, 10) == Known::Yes);
        // The memory was swept at 9.
        assert!(insert(SENT_MAX, 10, 20) == Known::Full);
        assert!(insert(SENT_MAX, 9 + SWEEP_INTERVAL_MS, u64::MAX) == Known::No);
    }
}
