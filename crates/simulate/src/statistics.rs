//! Counts of a simulation in bounded memory: a histogram, the busiest keys, a sample of all keys, and a timeline.

use foldhash::{HashMap, HashMapExt as _};
use smallvec::SmallVec;

use transom_limiter::handles::{Handle, VariantId};
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::window::{SEGMENTS_PER_PERIOD, Segments, Window, Windows};

/// Values below are counted exactly; larger ones within 1/64.
const EXACT_MAX: u64 = 128;
const STEPS: u64 = EXACT_MAX / 2;
/// A key seen more often has a label.
const LABELED_COUNT: u64 = 16;
/// Buckets of a timeline.
const TIMELINE_BUCKETS: usize = 240;
const MINUTE_MS: u64 = 60_000;
const PARTS: usize = SEGMENTS_PER_PERIOD as usize + 1;

/// A histogram of whole numbers, within 1/64 of their value.
#[derive(Clone, Default, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    pub max: u64,
}

impl Histogram {
    pub fn add(&mut self, value: u64, weight: u64) {
        let index = Histogram::index(value);
        if self.counts.len() <= index {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += weight;
        self.total += weight;
        self.max = self.max.max(value);
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// The value that this share of the numbers does not exceed.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let reached = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        reached.map_or(0, |index| Histogram::value(index).min(self.max))
    }

    /// The share of numbers above a value.
    pub fn share_above(&self, value: u64) -> f64 {
        let above: u64 = self.counts.iter().skip(Histogram::index(value) + 1).sum();
        if self.total == 0 { 0.0 } else { above as f64 / self.total as f64 }
    }

    fn index(value: u64) -> usize {
        if value < EXACT_MAX {
            return value as usize;
        }
        let shift = u64::from(value.ilog2() - EXACT_MAX.ilog2() + 1);
        (EXACT_MAX + (shift - 1) * STEPS + (value >> shift) - STEPS) as usize
    }

    /// The largest value of a bucket.
    fn value(index: usize) -> u64 {
        let index = index as u64;
        if index < EXACT_MAX {
            return index;
        }
        let (shift, step) = ((index - EXACT_MAX) / STEPS + 1, (index - EXACT_MAX) % STEPS);
        ((STEPS + step + 1) << shift) - 1
    }
}

/// The keys with the most requests: a Misra-Gries summary ("Finding repeated elements", 1982) that makes room for many new
/// keys at once. No count is too high, and none is too low by more than [`TopKeys::error`].
#[derive(Debug)]
pub struct TopKeys {
    entries: HashMap<u64, TopKey>,
    capacity: usize,
    error: u64,
}

/// A busy key.
#[derive(Clone, Default, Debug)]
pub struct TopKey {
    pub count: u64,
    /// Of the requests counted, those that the rule refused.
    pub refused: u64,
    /// Empty until the key was seen several times.
    pub label: String,
}

impl TopKeys {
    /// After N requests the error is at most N / `capacity`.
    pub fn new(capacity: usize) -> TopKeys {
        TopKeys { entries: HashMap::new(), capacity, error: 0 }
    }

    pub fn add(&mut self, key: u64, is_refused: bool, label: impl FnOnce() -> String) {
        if self.entries.len() >= 2 * self.capacity && !self.entries.contains_key(&key) {
            self.make_room();
        }
        let entry = self.entries.entry(key).or_default();
        entry.count += 1;
        entry.refused += u64::from(is_refused);
        // Keys that are soon forgotten need no label.
        if entry.label.is_empty() && entry.count > (1 + self.error).min(LABELED_COUNT) {
            entry.label = label();
        }
    }

    /// Subtracts from all counts what half of them reach at most, and forgets that half.
    fn make_room(&mut self) {
        let mut counts: Vec<u64> = self.entries.values().map(|entry| entry.count).collect();
        let half = counts.len() / 2;
        let (_, &mut median, _) = counts.select_nth_unstable(half);
        self.entries.retain(|_, entry| {
            entry.count = entry.count.saturating_sub(median);
            entry.count > 0
        });
        self.error += median;
    }

    /// How much a count may be too low.
    pub fn error(&self) -> u64 {
        self.error
    }

    /// The first `count` keys.
    pub fn top(&self, count: usize) -> Vec<TopKey> {
        let mut top: Vec<&TopKey> = self.entries.values().filter(|entry| !entry.label.is_empty()).collect();
        top.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.label.cmp(&b.label)));
        top.into_iter().take(count).cloned().collect()
    }
}

/// Requests over time: buckets that grow so that their number is bounded; and the minute with the most refusals.
#[derive(Clone, Default, Debug)]
pub struct Timeline {
    pub start_ms: u64,
    pub bucket_ms: u64,
    /// Requests, and those refused.
    pub buckets: Vec<(u64, u64)>,
    minute: Minute,
    worst: Minute,
}

/// One minute.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Minute {
    /// Unix milliseconds.
    pub start_ms: u64,
    pub requests: u64,
    pub refused: u64,
}

impl Timeline {
    pub fn add(&mut self, now_ms: u64, is_refused: bool) {
        if self.bucket_ms == 0 {
            (self.start_ms, self.bucket_ms) = (now_ms / 1000 * 1000, 1000);
        }
        while (now_ms.saturating_sub(self.start_ms) / self.bucket_ms) as usize >= TIMELINE_BUCKETS {
            self.bucket_ms *= 2;
            let merge = |pair: &[(u64, u64)]| pair.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            self.buckets = self.buckets.chunks(2).map(merge).collect();
        }
        let index = (now_ms.saturating_sub(self.start_ms) / self.bucket_ms) as usize;
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, (0, 0));
        }
        let refused = u64::from(is_refused);
        self.buckets[index].0 += 1;
        self.buckets[index].1 += refused;
        if now_ms / MINUTE_MS * MINUTE_MS != self.minute.start_ms {
            self.worst = self.worst_minute();
            self.minute = Minute { start_ms: now_ms / MINUTE_MS * MINUTE_MS, requests: 0, refused: 0 };
        }
        self.minute.requests += 1;
        self.minute.refused += refused;
    }

    /// The minute with the most refusals; without refusals, that with the most requests.
    pub fn worst_minute(&self) -> Minute {
        let rank = |minute: &Minute| (minute.refused, minute.requests);
        if rank(&self.minute) > rank(&self.worst) { self.minute } else { self.worst }
    }
}

/// The keys of a rule with what they ask for. When there are too many, a sample is kept: keys whose hash ends in `level` zero
/// bits. Whether a key is kept does not depend on its requests, so shares of the sample are shares of all keys.
#[derive(Debug)]
pub struct KeySample {
    /// By [`KeyHash::bucket_hash`](transom_limiter::key::KeyHash::bucket_hash).
    keys: HashMap<u64, KeyUse>,
    capacity: usize,
    /// One of 2^level keys is kept.
    level: u32,
}

transom_limiter::handles! {
    /// A layer of a variant; after the layers, the requests in flight.
    UsePosition,
}

/// One key.
#[derive(Clone, Default, Debug)]
pub struct KeyUse {
    variant: VariantId,
    refused: u32,
    /// By layer of the variant, then for the requests in flight if the rule limits them.
    pub layers: SmallVec<[LayerUse; 2]>,
}

/// What a key asks for in the windows of one layer, whether it gets it or not.
#[derive(Clone, Default, Debug)]
pub struct LayerUse {
    /// The end of the current window.
    end_ms: u64,
    /// Tokens asked for in the current window, and the most in any.
    demand: u32,
    max: u32,
    sliding: Option<Box<SlidingUse>>,
}

/// What a key asked for in a window.
pub struct EndedWindow {
    pub variant: VariantId,
    pub position: UsePosition,
    pub tokens: u64,
    /// The key stands for so many.
    pub weight: u64,
}

/// The tokens of the last segments of a sliding window.
#[derive(Clone, Default, Debug)]
struct SlidingUse {
    segment: u64,
    tokens: [u32; PARTS],
}

impl KeySample {
    pub fn new(capacity: usize) -> KeySample {
        KeySample { keys: HashMap::new(), capacity: capacity.max(1), level: 0 }
    }

    /// Counts a request of a key with this many layers. Returns the key if it is in the sample. `end`: called for the windows of
    /// another variant that the key had before.
    pub fn add(
        &mut self,
        keyed_request: KeyedRequest,
        is_refused: bool,
        layers: usize,
        end: impl FnMut(EndedWindow),
    ) -> Option<&mut KeyUse> {
        let id = keyed_request.key.bucket_hash;
        if self.keys.len() >= self.capacity && !self.keys.contains_key(&id) {
            self.thin_out();
        }
        if id.trailing_zeros() < self.level {
            return None;
        }
        let weight = self.one_of();
        let key = self.keys.entry(id).or_default();
        key.refused += u32::from(is_refused);
        if key.variant != keyed_request.variant || key.layers.len() != layers {
            key.ended_windows(weight).for_each(end);
            key.variant = keyed_request.variant;
            key.layers.clear();
            key.layers.resize(layers, LayerUse::default());
        }
        Some(key)
    }

    /// A number that depends on the entry of a key, so that the entry is read.
    pub fn peek(&self, id: u64) -> u32 {
        self.keys.get(&id).and_then(|key| key.layers.last()).map_or(0, |layer| layer.max)
    }

    /// A request of the key is no longer in flight.
    pub fn end_request(&mut self, id: u64) {
        if let Some(layer) = self.keys.get_mut(&id).and_then(|key| key.layers.last_mut()) {
            layer.demand = layer.demand.saturating_sub(1);
        }
    }

    /// Forgets half of the keys.
    fn thin_out(&mut self) {
        while self.keys.len() >= self.capacity && self.level < u64::BITS {
            self.level += 1;
            self.keys.retain(|id, _| id.trailing_zeros() >= self.level);
        }
    }

    /// One of this many keys is in the sample.
    pub fn one_of(&self) -> u64 {
        1 << self.level
    }

    /// The number of keys; an estimate unless all are in the sample.
    pub fn key_count(&self) -> u64 {
        self.keys.len() as u64 * self.one_of()
    }

    /// The number of keys that were ever refused; an estimate unless all are in the sample.
    pub fn refused_count(&self) -> u64 {
        self.keys.values().filter(|key| key.refused > 0).count() as u64 * self.one_of()
    }

    /// The most that each key of a variant asked for in a window of one of its layers, descending.
    pub fn maxima(&self, variant: VariantId, layer: UsePosition) -> Vec<u32> {
        let keys = self.keys.values().filter(|key| key.variant == variant);
        let mut maxima: Vec<u32> = keys.filter_map(|key| Some(key.layers.get(layer.index())?.max)).collect();
        maxima.sort_unstable_by(|a, b| b.cmp(a));
        maxima
    }

    /// Ends all windows.
    pub fn finish(&self, end: impl FnMut(EndedWindow)) {
        let weight = self.one_of();
        self.keys.values().flat_map(|key| key.ended_windows(weight)).for_each(end);
    }
}

impl KeyUse {
    /// Its windows as they are, for a key of this weight.
    fn ended_windows(&self, weight: u64) -> impl Iterator<Item = EndedWindow> {
        let ended = move |(position, layer): (usize, &LayerUse)| EndedWindow {
            variant: self.variant,
            position: UsePosition::at(position),
            tokens: layer.demand.into(),
            weight,
        };
        self.layers.iter().enumerate().map(ended)
    }

    /// Counts a request in flight; returns how many are.
    pub fn begin_request(&mut self) -> u32 {
        let Some(layer) = self.layers.last_mut() else { return 0 };
        layer.demand += 1;
        layer.max = layer.max.max(layer.demand);
        layer.demand
    }
}

impl LayerUse {
    /// Counts a request; returns the tokens asked for in the previous window if that has ended.
    pub fn add(&mut self, windows: &Windows, window: Window, keyed_request: KeyedRequest, now_ms: u64) -> Option<u32> {
        if let Windows::Sliding { period_ms } = windows {
            return self.add_sliding(Segments { period_ms: *period_ms }, keyed_request.cost, now_ms);
        }
        let end_ms = match () {
            () if windows.are_opened_by_requests() && now_ms < self.end_ms => self.end_ms,
            () if windows.are_shared() => window.end_ms,
            () => windows.window_at(now_ms, keyed_request.offset).end_ms,
        };
        let ended = (end_ms != self.end_ms && self.end_ms > 0).then_some(self.demand);
        if end_ms != self.end_ms {
            (self.end_ms, self.demand) = (end_ms, 0);
        }
        self.demand = self.demand.saturating_add(keyed_request.cost);
        self.max = self.max.max(self.demand);
        ended
    }

    /// The demand of a sliding window is that of the segments that count. Its peak is reported once a period.
    fn add_sliding(&mut self, segments: Segments, cost: u32, now_ms: u64) -> Option<u32> {
        let now = segments.number_at(now_ms);
        let is_first = self.sliding.is_none();
        let sliding = self.sliding.get_or_insert_default();
        for passed in 1..=now.saturating_sub(sliding.segment).min(PARTS as u64) {
            sliding.tokens[((sliding.segment + passed) % PARTS as u64) as usize] = 0;
        }
        if now.saturating_sub(sliding.segment) > PARTS as u64 {
            sliding.tokens = [0; PARTS];
        }
        sliding.segment = sliding.segment.max(now);
        let current = &mut sliding.tokens[(sliding.segment % PARTS as u64) as usize];
        *current = current.saturating_add(cost);
        let sum = sliding.tokens.iter().fold(0_u32, |sum, tokens| sum.saturating_add(*tokens));
        let end_ms = segments.end_ms(now / SEGMENTS_PER_PERIOD * SEGMENTS_PER_PERIOD + SEGMENTS_PER_PERIOD - 1);
        let ended = (end_ms != self.end_ms && !is_first).then_some(self.demand);
        self.demand = if end_ms == self.end_ms { self.demand.max(sum) } else { sum };
        (self.end_ms, self.max) = (end_ms, self.max.max(sum));
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;
    use transom_limiter::key::KeyHash;

    fn keyed(key: u64) -> KeyedRequest {
        let hash = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let key = KeyHash { bucket_hash: hash ^ (hash >> 31), tag: 1 };
        KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 }
    }

    #[test]
    fn the_timeline_keeps_all_requests_and_the_worst_minute() {
        let mut timeline = Timeline::default();
        for second in 0..10_000_u64 {
            timeline.add(1_700_000_100_000 + second * 1000, (3600..3650).contains(&second));
        }
        let sum = timeline.buckets.iter().fold((0, 0), |sum, bucket| (sum.0 + bucket.0, sum.1 + bucket.1));
        assert_eq!(sum, (10_000, 50));
        assert!(timeline.buckets.len() <= TIMELINE_BUCKETS);
        let worst = Minute { start_ms: 1_700_003_700_000, requests: 60, refused: 50 };
        assert_eq!(timeline.worst_minute(), worst);
    }

    #[test]
    fn a_thinned_sample_estimates_the_keys() {
        let mut sample = KeySample::new(1000);
        let windows = Windows::Even { period_ms: 60_000, offset_ms: 0 };
        let window = windows.window_at(30_000, 0);
        for key in 0..50_000_u64 {
            for _ in 0..1 + u64::from(key % 100 == 0) * 9 {
                if let Some(key) = sample.add(keyed(key), key % 10 == 0, 1, drop) {
                    key.layers[0].add(&windows, window, keyed(0), 30_000);
                }
            }
        }
        assert!(sample.keys.len() <= 1000 && sample.one_of() >= 32);
        assert!((40_000..60_000).contains(&sample.key_count()), "{}", sample.key_count());
        assert!((3000..7000).contains(&sample.refused_count()), "{}", sample.refused_count());
        assert_eq!(sample.maxima(VariantId::DEFAULT, UsePosition::at(0)).first(), Some(&10));
    }

    #[test]
    fn what_keys_ask_for_is_counted_by_window() {
        let mut sample = KeySample::new(10);
        let windows = [
            Windows::Even { period_ms: 1000, offset_ms: 0 },
            Windows::FirstRequest { period_ms: 1000 },
            Windows::Sliding { period_ms: 1000 },
        ];
        let mut histograms = [Histogram::default(), Histogram::default(), Histogram::default()];
        for now_ms in [800_u64, 900, 1100, 1700, 1900, 5000] {
            let key = sample.add(keyed(1), false, windows.len(), drop).unwrap();
            for ((layer, windows), histogram) in key.layers.iter_mut().zip(&windows).zip(&mut histograms) {
                if let Some(ended) = layer.add(windows, windows.window_at(now_ms, 0), keyed(1), now_ms) {
                    histogram.add(ended.into(), 1);
                }
            }
        }
        sample.finish(|ended| histograms[ended.position.index()].add(ended.tokens, ended.weight));
        let maxima: Vec<u32> =
            (0..3).map(|layer| sample.maxima(VariantId::DEFAULT, UsePosition::at(layer))[0]).collect();
        // 1000 to 2000; 800 to 1800; 875 to 2000.
        assert_eq!(maxima, [3, 4, 4]);
        assert_eq!(histograms.each_ref().map(Histogram::total), [3, 3, 3]);
    }

    proptest! {
        #[test]
        fn quantiles_are_within_a_64th(mut values in proptest::collection::vec(0_u64..1_000_000, 1..200), share in 0.0_f64..1.0) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|value| histogram.add(*value, 1));
            values.sort_unstable();
            let exact = values[((values.len() as f64 * share).ceil() as usize).max(1) - 1];
            let found = histogram.quantile(share);
            prop_assert!(found >= exact && found - exact <= exact / 64, "{} {}", found, exact);
        }

        #[test]
        fn counts_of_the_busiest_keys_are_within_the_error(keys in proptest::collection::vec(0_u64..60, 1..2000)) {
            let mut top = TopKeys::new(8);
            let mut exact = BTreeMap::new();
            for key in &keys {
                // The first keys are much busier.
                let key = key * key / 60;
                *exact.entry(key).or_insert(0) += 1;
                top.add(key, false, || key.to_string());
            }
            prop_assert!(top.error() <= keys.len() as u64 / 8);
            for (key, count) in exact {
                let found = top.entries.get(&key).map_or(0, |entry| entry.count);
                prop_assert!(found <= count && count - found <= top.error(), "{}: {} of {}", key, found, count);
            }
        }
    }
}
