//! Numbers that one event loop counts and the scrape reads.
//!
//! Every loop has cells of its own, so counting is a load and a store without contention; nothing
//! is shared until a scrape adds them up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

/// Upper bounds of the buckets of every histogram, in microseconds: from a decision in the table to
/// a slow upstream, each about twice to two and a half times the one before.
pub const BOUNDS_US: [u64; 20] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    5_000_000, 30_000_000,
];

/// A number that goes up, or, as a gauge, down again. Written by one thread.
#[derive(Debug, Default)]
pub struct MetricCell(AtomicU64);

impl MetricCell {
    pub fn add(&self, n: u64) {
        // Ordering: relaxed; one writer, and a reader for whom any recent value will do.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    pub fn sub(&self, n: u64) {
        self.add(n.wrapping_neg());
    }

    /// Sets a gauge.
    pub fn set(&self, n: u64) {
        // Ordering: relaxed, as in `add`.
        self.0.store(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often durations fell under each bound. Written by one thread.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Histogram {
    sum_ns: MetricCell,
    buckets: [MetricCell; BOUNDS_US.len() + 1],
}

impl Histogram {
    pub fn record(&self, duration: Duration) {
        let us = duration.as_secs() * 1_000_000 + u64::from(duration.subsec_micros());
        let bucket = BOUNDS_US.iter().position(|bound| us < *bound).unwrap_or(BOUNDS_US.len());
        self.buckets[bucket].add(1);
        self.sum_ns.add(duration.as_secs() * 1_000_000_000 + u64::from(duration.subsec_nanos()));
    }

    /// Adds this histogram to a sum over loops.
    pub fn add_to(&self, sum: &mut HistogramSum) {
        for (total, bucket) in sum.buckets.iter_mut().zip(&self.buckets) {
            *total += bucket.get();
        }
        sum.sum_ns += self.sum_ns.get();
    }
}

/// Histograms of several loops, added up.
#[derive(Clone, Debug, Default)]
pub struct HistogramSum {
    pub buckets: [u64; BOUNDS_US.len() + 1],
    pub sum_ns: u64,
}

/// Status codes that one route counts apart, in one loop; more than are in use anywhere.
const CODES: usize = 16;

/// How often each status code was answered. Written by one thread.
#[derive(Debug, Default)]
pub struct StatusCounts {
    /// A code and its count; code 0 is a place not taken yet.
    slots: [(MetricCell, MetricCell); CODES],
    /// What found no place.
    others: MetricCell,
}

impl StatusCounts {
    pub fn count(&self, code: u16) {
        let code = u64::from(code);
        let place = self.slots.iter().find(|(known, _)| known.get() == code || known.get() == 0);
        let Some((known, count)) = place else { return self.others.add(1) };
        if known.get() == 0 {
            known.add(code);
        }
        count.add(1);
    }

    /// The codes counted, as labels, with their counts.
    pub fn counts(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let places = self.slots.iter().filter(|(code, _)| code.get() != 0);
        let others = (self.others.get() > 0).then(|| ("other".to_owned(), self.others.get()));
        places.map(|(code, count)| (code.get().to_string(), count.get())).chain(others)
    }
}

/// What is counted of one route in one loop, side by side: a route that was not asked for lately is
/// not in the cache, and every line that has to be fetched costs as much as a decision.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RouteCells {
    pub duration: Histogram,
    /// For each rule of the route: admitted, refused, shadowed.
    pub outcomes: SmallVec<[[MetricCell; 4]; 2]>,
    pub codes: StatusCounts,
}

impl RouteCells {
    pub fn new(rules: usize) -> RouteCells {
        RouteCells {
            codes: StatusCounts::default(),
            duration: Histogram::default(),
            outcomes: (0..rules).map(|_| Default::default()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_above_them() {
        let histogram = Histogram::default();
        for us in [0, 3, 999, 1000, 60_000_000] {
            histogram.record(Duration::from_micros(us));
        }
        let mut sum = HistogramSum::default();
        histogram.add_to(&mut sum);
        histogram.add_to(&mut sum);
        assert_eq!(sum.buckets.iter().sum::<u64>(), 10);
        assert_eq!((sum.buckets[0], sum.buckets[2], sum.buckets[9], sum.buckets[10]), (2, 2, 2, 2));
        assert_eq!(sum.buckets[BOUNDS_US.len()], 2);
        assert_eq!(sum.sum_ns, 2 * 60_002_002_000);
    }

    #[test]
    fn a_gauge_goes_down_again() {
        let cell = MetricCell::default();
        cell.add(3);
        cell.sub(2);
        assert_eq!(cell.get(), 1);
    }

    #[test]
    fn codes_are_counted_apart_and_the_seventeenth_is_another() {
        let codes = StatusCounts::default();
        (400..416).for_each(|code| codes.count(code));
        codes.count(400);
        codes.count(599);
        let counts: Vec<_> = codes.counts().collect();
        assert_eq!((counts.len(), &counts[0], &counts[16]), (17, &("400".to_owned(), 2), &("other".to_owned(), 1)));
    }
}
