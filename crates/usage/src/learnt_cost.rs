//! What requests have cost lately, by model: the 95th percentile is a good reserve.
//!
//! Costs are counted in buckets whose width is at most an eighth of the cost. Counts are halved from time to time, so that old costs
//! fade. All clients share what is learnt, and choose the names in their requests: costs belong to the model that has answered, and a
//! name that no answer has explained reserves at least the default. State is bounded: `MODELS_MAX` models of one rule, and as many
//! names in requests.

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
pub struct LearntCosts(Mutex<Learnt>);

#[derive(Debug, Default)]
struct Learnt {
    /// By the model that has answered; `""`: of requests that name none.
    models: Frequent<Histogram>,
    /// The model that has answered the last request with a name.
    answered: Frequent<Box<str>>,
    /// Of all requests.
    all: Histogram,
}

#[derive(Debug)]
struct Histogram {
    counts: Box<[u16; BUCKETS]>,
    total: u32,
}

/// The values of the `MODELS_MAX` most frequent names (the algorithm Space-Saving): a new name takes the place of the rarest one, and
/// its count, so that a name stays which makes up more than its share of all uses, however many others are invented.
#[derive(Debug)]
struct Frequent<T>(HashMap<Box<str>, (u64, T)>);

impl<T> Default for Frequent<T> {
    fn default() -> Frequent<T> {
        Frequent(HashMap::new())
    }
}

impl<T> Frequent<T> {
    fn get(&self, name: &str) -> Option<&T> {
        self.0.get(name).map(|(_, value)| value)
    }

    /// Counts a use of a name.
    fn used(&mut self, name: &str, new: impl FnOnce() -> T) -> &mut T {
        let mut uses = 0;
        if self.0.len() == MODELS_MAX
            && !self.0.contains_key(name)
            && let Some((rarest, (least, _))) = self.0.iter().min_by_key(|(_, (uses, _))| *uses)
        {
            uses = *least;
            let rarest = rarest.clone();
            self.0.remove(&rarest);
        }
        let (uses, value) = self.0.entry(name.into()).or_insert_with(|| (uses, new()));
        *uses += 1;
        value
    }
}

impl LearntCosts {
    /// The 95th percentile for the model that requests name, or for those without a name. While it is not known, that of all requests,
    /// if it exceeds `default`; otherwise `None`.
    pub fn reserve(&self, model: Option<&str>, default: u32) -> Option<u32> {
        let learnt = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = model.map_or(Some(""), |model| learnt.answered.get(model).map(|answered| &**answered));
        let known = answered.and_then(|model| learnt.models.get(model)).and_then(Histogram::percentile_95);
        known.or_else(|| learnt.all.percentile_95().filter(|all| *all > default))
    }

    /// A request has cost so much that names one model, and whose answer names another.
    pub fn record(&self, requested: Option<&str>, answered: Option<&str>, cost: u32) {
        let mut learnt = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let model = requested.map_or("", |requested| answered.unwrap_or(requested));
        if let Some(requested) = requested {
            let known = learnt.answered.used(requested, || model.into());
            if **known != *model {
                *known = model.into();
            }
        }
        learnt.models.used(model, Histogram::default).record(cost);
        learnt.all.record(cost);
    }
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: Box::new([0; BUCKETS]), total: 0 }
    }
}

impl Histogram {
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
        let record = |model, range: std::ops::Range<u32>| range.for_each(|cost| costs.record(model, None, cost));
        record(Some("a"), 1..20);
        assert_eq!(costs.reserve(Some("a"), 0), None);
        record(Some("a"), 20..1001);
        let near = |expected: u32| {
            let found = costs.reserve(Some("a"), u32::MAX).unwrap();
            assert!(found.abs_diff(expected) <= expected / 8, "{found} instead of {expected}");
        };
        near(950);
        record(Some("a"), 100_000..103_000);
        near(103_000);
        (0..5000).for_each(|_| costs.record(Some("a"), None, 7));
        assert_eq!(costs.reserve(Some("a"), 100), Some(7));
        // One that is not known has what all have cost, and at least the default.
        assert_eq!([None, Some("b")].map(|model| costs.reserve(model, 6)), [Some(7); 2]);
        assert_eq!([None, Some("b")].map(|model| costs.reserve(model, 7)), [None; 2]);
        record(None, u32::MAX - 30..u32::MAX);
        assert!(costs.reserve(None, 7).unwrap() > u32::MAX / 8 * 7);
        assert_eq!(costs.reserve(Some("b"), 7), None);
    }

    #[test]
    fn names_of_one_model_share_its_costs() {
        let costs = LearntCosts::default();
        (0..30).for_each(|_| costs.record(Some("alias"), Some("big-2026"), 5000));
        (0..30).for_each(|_| costs.record(Some("invented"), Some("big-2026"), 1));
        let reserves = ["alias", "invented"].map(|model| costs.reserve(Some(model), 10).unwrap());
        assert!(reserves[0] == reserves[1] && reserves[0] >= 5000, "{reserves:?}");
        // Neither does the answer decide what requests without a name reserve.
        assert_eq!(costs.reserve(Some("big-2026"), 10_000), None);
        (0..30).for_each(|_| costs.record(None, Some("big-2026"), 9));
        assert_eq!(costs.reserve(None, 10), Some(9));
    }

    /// A client invents names, and sends cheap requests.
    #[test]
    fn invented_names_lower_no_reserve() {
        let costs = LearntCosts::default();
        let big = || costs.reserve(Some("big"), 1000);
        (0..64).for_each(|n| costs.record(Some(&format!("m{n}")), None, 1));
        (0..30).for_each(|_| costs.record(Some("big"), None, 5000));
        (0..600).for_each(|_| costs.record(Some("zz"), None, 1));
        assert!(big() >= Some(5000), "{:?}", big());
        assert_eq!(costs.reserve(Some("unknown"), 1000), None);
        // As long as one of 40 requests is for it, the model stays.
        for n in 0..10_000 {
            costs.record(Some(&n.to_string()), None, 1);
            if n % 40 == 0 {
                costs.record(Some("big"), None, 5000);
            }
        }
        assert!(big() >= Some(5000), "{:?}", big());
        // Otherwise it is forgotten: the default is reserved.
        (0..100_000).for_each(|n| costs.record(Some(&n.to_string()), None, 1));
        assert_eq!(big(), None);
        let learnt = costs.0.lock().unwrap();
        assert_eq!((learnt.models.0.len(), learnt.answered.0.len()), (MODELS_MAX, MODELS_MAX));
    }
}
