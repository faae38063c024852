//! What requests have cost lately, by model: the 95th percentile is a good reserve.
//!
//! Costs are counted in buckets whose width is at most an eighth of the cost. Counts are halved from time to time, so that old costs
//! fade. State is bounded: `MODELS_MAX` models of one rule, and one histogram for all further ones.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

const MODELS_MAX: usize = 64;
/// The fewest costs with a meaningful 95th percentile.
const COSTS_MIN: u32 = 20;
/// At so many costs the counts are halved.
const COSTS_MAX: u32 = 1024;
/// Buckets for each power of two, as a power of two.
const PART_BITS: u32 = 3;
/// Costs below it have a bucket each.
const EXACT: u32 = 2 << PART_BITS;
const BUCKETS: usize = EXACT as usize + (31 - PART_BITS as usize) * (1 << PART_BITS);

/// The costs of one rule. All workers share it.
#[derive(Debug, Default)]
pub struct LearntCosts {
    models: Mutex<HashMap<Box<str>, Histogram>>,
}

#[derive(Debug)]
struct Histogram {
    counts: Box<[u16; BUCKETS]>,
    total: u32,
}

impl LearntCosts {
    /// The 95th percentile for the model that requests name, or else for those without a name; `None` while it is not known.
    pub fn reserve(&self, model: Option<&str>) -> Option<u32> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let percentile = |model| models.get(model).and_then(Histogram::percentile_95);
        percentile(model.unwrap_or_default()).or_else(|| percentile(""))
    }

    /// A request that names this model has cost so much.
    pub fn record(&self, model: Option<&str>, cost: u32) {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |model: &&str| models.contains_key(*model) || models.len() < MODELS_MAX;
        let model = model.filter(is_known).unwrap_or_default();
        match models.get_mut(model) {
            Some(histogram) => histogram.record(cost),
            None => models.entry(model.into()).or_insert_with(Histogram::new).record(cost),
        }
    }
}

impl Histogram {
    fn new() -> Histogram {
        Histogram { counts: Box::new([0; BUCKETS]), total: 0 }
    }

    fn record(&mut self, cost: u32) {
        self.counts[bucket(cost)] += 1;
        self.total += 1;
        if self.total == COSTS_MAX {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().map(|count| u32::from(*count)).sum();
        }
    }

    /// Interpolated in its bucket.
    fn percentile_95(&self) -> Option<u32> {
        let mut rank = Some(self.total).filter(|total| *total >= COSTS_MIN)?.saturating_mul(95).div_ceil(100);
        for (bucket, count) in self.counts.iter().enumerate() {
            let count = u32::from(*count);
            if rank <= count {
                let (first, last) = bounds(bucket);
                return Some(first + (u64::from(last - first) * u64::from(rank)).div_ceil(count.into()) as u32);
            }
            rank -= count;
        }
        None
    }
}

fn bucket(cost: u32) -> usize {
    if cost < EXACT {
        return cost as usize;
    }
    let power = cost.ilog2() - PART_BITS;
    // The first bit is always 1.
    let part = (cost >> power) - (1 << PART_BITS);
    (EXACT + ((power - 1) << PART_BITS) + part) as usize
}

/// The least and the greatest cost of a bucket.
fn bounds(bucket: usize) -> (u32, u32) {
    let Some(above) = (bucket as u32).checked_sub(EXACT) else { return (bucket as u32, bucket as u32) };
    let (power, part) = ((above >> PART_BITS) + 1, above & ((1 << PART_BITS) - 1));
    let first = ((1 << PART_BITS) + part) << power;
    (first, first + ((1 << power) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_narrow_and_have_no_gaps() {
        let mut next = 0;
        for bucket in 0..BUCKETS {
            let (first, last) = bounds(bucket);
            assert_eq!((first, super::bucket(first), super::bucket(last)), (next, bucket, bucket));
            assert!(last - first <= first / 8);
            next = last.wrapping_add(1);
        }
        assert_eq!(next, 0);
    }

    #[test]
    fn the_95th_percentile_is_that_of_recent_costs() {
        let costs = LearntCosts::default();
        let record = |model, range: std::ops::Range<u32>| range.for_each(|cost| costs.record(model, cost));
        record(Some("a"), 1..20);
        assert_eq!(costs.reserve(Some("a")), None);
        record(Some("a"), 20..1001);
        let near = |expected: u32| {
            let found = costs.reserve(Some("a")).unwrap();
            assert!(found.abs_diff(expected) <= expected / 8, "{found} instead of {expected}");
        };
        near(950);
        record(Some("a"), 100_000..103_000);
        near(103_000);
        (0..5000).for_each(|_| costs.record(Some("a"), 7));
        assert_eq!(costs.reserve(Some("a")), Some(7));
        // A model that is not known has what those without a name have.
        assert_eq!((costs.reserve(Some("b")), costs.reserve(None)), (None, None));
        record(None, u32::MAX - 30..u32::MAX);
        assert!(costs.reserve(Some("b")).unwrap() > u32::MAX / 8 * 7);
    }

    #[test]
    fn the_number_of_models_is_bounded() {
        let costs = LearntCosts::default();
        (0..10_000).for_each(|n| costs.record(Some(&n.to_string()), n));
        assert_eq!(costs.models.lock().unwrap().len(), MODELS_MAX + 1);
        assert_eq!(costs.reserve(Some("5")), costs.reserve(None));
    }
}
