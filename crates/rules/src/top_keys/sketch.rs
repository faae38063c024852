//! The busiest keys of a stream in bounded memory, within a stated error.
//!
//! Counts are those of a Misra-Gries summary ("Finding repeated elements", 1982) that makes room for many new keys at once
//! (Anderson et al., "A high-performance algorithm for identifying frequent items in data streams", 2017). Each key also
//! knows how many hits it may have had before it was followed, so the counts of keys that were never dropped are exact.

use foldhash::{HashMap, HashMapExt as _};

/// Counts the hits of keys, which are hashes.
#[derive(Clone, Debug)]
pub struct Sketch<T> {
    entries: HashMap<u64, Entry<T>>,
    capacity: usize,
    missed_max: u64,
    total: u64,
}

/// A key that is followed.
#[derive(Clone, Debug)]
pub struct Entry<T> {
    /// The hits since the key is followed.
    pub hits: u64,
    /// How many hits the key may have had before that.
    pub missed: u64,
    pub value: T,
}

impl<T: Default> Sketch<T> {
    /// `capacity` is at least 1. Up to twice as many keys are followed.
    pub fn new(capacity: usize) -> Sketch<T> {
        Sketch { entries: HashMap::new(), capacity: capacity.max(1), missed_max: 0, total: 0 }
    }

    /// Counts a hit. `update` is given the key, and whether it stands out, see [`Sketch::find`].
    #[inline]
    pub fn hit<R>(&mut self, key: u64, update: impl FnOnce(&mut Entry<T>, bool) -> R) -> R {
        self.total += 1;
        match self.entries.get_mut(&key) {
            Some(entry) => {
                entry.hits += 1;
                update(entry, entry.hits > self.missed_max)
            }
            None => {
                let entry = self.follow(key);
                let stands_out = entry.hits > entry.missed;
                update(entry, stands_out)
            }
        }
    }

    /// Follows a key from its first hit on.
    #[inline(never)]
    fn follow(&mut self, key: u64) -> &mut Entry<T> {
        if self.entries.len() >= 2 * self.capacity {
            self.make_room();
        }
        let missed = self.missed_max;
        self.entries.entry(key).or_insert_with(|| Entry { hits: 1, missed, value: T::default() })
    }

    /// Drops the half of the keys with the fewest hits, and raises `missed_max` by the median of what the keys exceed it by.
    ///
    /// Let S be the sum of these excesses. A hit adds one to S. When `missed_max` rises by m, at least `capacity` keys have an
    /// excess of m or more, and each of them loses m; so S falls by at least m times `capacity`. S is never negative. So
    /// `missed_max` is at most the number of hits divided by `capacity`.
    #[cold]
    fn make_room(&mut self) {
        let excess = |entry: &Entry<T>| entry.hits + entry.missed - self.missed_max;
        let mut all: Vec<u64> = self.entries.values().map(excess).collect();
        let half = all.len() / 2;
        let (_, &mut median, _) = all.select_nth_unstable(half);
        self.missed_max += median;
        let missed_max = self.missed_max;
        self.entries.retain(|_, entry| entry.hits + entry.missed > missed_max);
    }
}

impl<T> Sketch<T> {
    /// The key, if it is followed, and whether it stands out: it has more hits than a key may have that is not followed.
    /// In a stream of N hits this happens at most 4 `capacity` (2 + log2(N / `capacity`)) times, so that naming those keys is
    /// cheap for any stream.
    pub fn find(&mut self, key: u64) -> Option<(&mut Entry<T>, bool)> {
        let missed_max = self.missed_max;
        self.entries.get_mut(&key).map(|entry| {
            let stands_out = entry.hits > missed_max;
            (entry, stands_out)
        })
    }

    /// The keys that are followed.
    pub fn entries(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        self.entries.iter().map(|(key, entry)| (*key, entry))
    }

    /// The most hits of a key that is not followed: at most the hits of all keys, divided by `capacity`.
    pub fn missed_max(&self) -> u64 {
        self.missed_max
    }

    /// The hits of all keys.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap as Exact;

    use proptest::prelude::*;

    use super::*;

    /// A stream: hits of busy keys with skewed frequencies, and of keys that appear once or in turn, in some order.
    fn streams() -> impl Strategy<Value = Vec<u64>> {
        let zipf = (1_u64..400, 1_usize..6_000, any::<u64>()).prop_map(|(keys, length, seed)| {
            let mut rng = fastrand::Rng::with_seed(seed);
            // Rank r with probability proportional to 1/r.
            (0..length).map(|_| (keys as f64).powf(rng.f64()) as u64).collect()
        });
        let rotating = (1_u64..200, 1_usize..6_000)
            .prop_map(|(keys, length)| (0..length as u64).map(|hit| 1_000 + hit % keys).collect::<Vec<u64>>());
        let unique = (1_usize..6_000).prop_map(|length| (0..length as u64).map(|hit| 10_000 + hit).collect());
        let bursts = (1_u64..50, 1_usize..200).prop_map(|(hits, keys)| {
            (0..keys as u64).flat_map(|key| (0..hits).map(move |_| 100_000 + key)).collect::<Vec<u64>>()
        });
        let part = prop_oneof![zipf, rotating, unique, bursts];
        (prop::collection::vec(part, 1..4), any::<u64>(), any::<bool>()).prop_map(|(parts, seed, is_mixed)| {
            let mut stream: Vec<u64> = parts.concat();
            if is_mixed {
                fastrand::Rng::with_seed(seed).shuffle(&mut stream);
            }
            stream
        })
    }

    fn exact(stream: &[u64]) -> Exact<u64, u64> {
        stream.iter().fold(Exact::new(), |mut counts, key| {
            *counts.entry(*key).or_default() += 1;
            counts
        })
    }

    proptest! {
        #[test]
        fn every_count_is_within_its_error(stream in streams(), capacity in 1_usize..40) {
            let mut sketch = Sketch::<bool>::new(capacity);
            let mut named: u32 = 0;
            for key in &stream {
                let is_new = |entry: &mut Entry<bool>, stands_out| stands_out && !std::mem::replace(&mut entry.value, true);
                named += u32::from(sketch.hit(*key, is_new));
            }
            let (exact, total) = (exact(&stream), stream.len() as u64);
            prop_assert_eq!(sketch.total(), total);
            prop_assert!(sketch.missed_max() <= total / capacity as u64, "the error is {}", sketch.missed_max());
            prop_assert!(sketch.entries().count() <= 2 * capacity);
            for (key, count) in &exact {
                match sketch.find(*key) {
                    Some((entry, _)) => {
                        prop_assert!(entry.hits <= *count && *count <= entry.hits + entry.missed);
                        prop_assert!(entry.missed <= total / capacity as u64);
                        prop_assert!(entry.value || *count <= 2 * total / capacity as u64, "{key} has no name");
                    }
                    None => prop_assert!(*count <= total / capacity as u64, "{key} was lost"),
                }
            }
            let bound = 4.0 * capacity as f64 * (2.0 + (total as f64 / capacity as f64).log2().max(0.0));
            prop_assert!(f64::from(named) <= bound, "{named} names");
        }
    }

    #[test]
    fn few_keys_are_counted_exactly() {
        let mut sketch = Sketch::<()>::new(10);
        let hits = (0..20_u64).flat_map(|key| (0..=key).map(move |_| key));
        hits.for_each(|key| sketch.hit(key, |_, _| ()));
        let mut counts: Vec<_> = sketch.entries().map(|(key, entry)| (key, entry.hits, entry.missed)).collect();
        counts.sort_unstable();
        assert_eq!(counts, (0..20).map(|key| (key, key + 1, 0)).collect::<Vec<_>>());
        assert_eq!(sketch.missed_max(), 0);
    }
}
