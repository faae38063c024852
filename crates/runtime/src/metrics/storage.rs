//! Counters, gauges and histograms that one worker writes and a scrape reads.
//!
//! Every worker has its own cells, so counting is an uncontended load and store. A scrape sums the cells of all workers.

use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

/// Upper bounds of the buckets of a [`Histogram`], in microseconds: from a local decision to a slow upstream, mostly in steps
/// of 2 to 2.5.
pub const BOUNDS_US: [u64; 20] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    5_000_000, 30_000_000,
];

/// Most bounds of `RouteCells::buckets`.
pub const REQUEST_BOUNDS_MAX: usize = BOUNDS_US.len();

/// A counter or gauge. Written by one thread.
#[derive(Debug, Default)]
pub struct MetricCell(AtomicU64);

impl MetricCell {
    pub fn add(&self, n: u64) {
        // Ordering: relaxed; there is one writer, and a scrape accepts any recent value.
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

/// Counts something in a gauge until it is dropped.
#[derive(Debug)]
pub struct GaugeGuard(Arc<MetricCell>);

impl GaugeGuard {
    pub fn new(gauge: &Arc<MetricCell>) -> GaugeGuard {
        gauge.add(1);
        GaugeGuard(Arc::clone(gauge))
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.sub(1);
    }
}

/// Durations counted by bucket. Written by one thread.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Histogram {
    sum_ns: MetricCell,
    buckets: [MetricCell; BOUNDS_US.len() + 1],
}

impl Histogram {
    pub fn record(&self, duration: Duration) {
        self.buckets[bucket_of(&BOUNDS_US, duration)].add(1);
        self.sum_ns.add(whole_ns(duration));
    }

    /// Adds this histogram to a sum over workers.
    pub fn add_to(&self, sum: &mut HistogramSum) {
        for (total, bucket) in sum.buckets.iter_mut().zip(&self.buckets) {
            *total += bucket.get();
        }
        sum.sum_ns += self.sum_ns.get();
    }
}

fn whole_ns(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000_000 + u64::from(duration.subsec_nanos())
}

/// The bucket of a duration: the first whose bound is not below it, because the label `le` means "less than or equal"; or the
/// one behind the last bound.
fn bucket_of(bounds_us: &[u64], duration: Duration) -> usize {
    let ns = whole_ns(duration);
    bounds_us.iter().position(|bound_us| ns <= bound_us * 1000).unwrap_or(bounds_us.len())
}

/// The sum of several workers' histograms. The counts of a histogram with fewer bounds are the first ones.
#[derive(Clone, Debug, Default)]
pub struct HistogramSum {
    pub buckets: [u64; BOUNDS_US.len() + 1],
    pub sum_ns: u64,
}

impl HistogramSum {
    /// What was recorded since an earlier sum.
    pub fn since(&self, earlier: &HistogramSum) -> HistogramSum {
        HistogramSum {
            buckets: std::array::from_fn(|bucket| self.buckets[bucket].saturating_sub(earlier.buckets[bucket])),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
        }
    }

    pub fn add(&mut self, other: &HistogramSum) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(sum, bucket)| *sum += bucket);
        self.sum_ns += other.sum_ns;
    }

    /// The duration below which this share of the recorded durations lies, microseconds, interpolated within its bucket;
    /// `None` if nothing was recorded. Durations above the last bound count as this bound.
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().sum();
        let rank = total as f64 * share;
        let mut below = 0.0;
        for (position, count) in self.buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if below + count >= rank {
                let start = position.checked_sub(1).map_or(0, |previous| BOUNDS_US[previous]);
                let end = BOUNDS_US.get(position).copied().unwrap_or(start);
                return Some(start + ((end - start) as f64 * (rank - below) / count) as u64);
            }
            below += count;
        }
        None
    }
}

/// Status codes that one route counts separately; further ones are counted as `other`.
const CODES: usize = 16;

/// Responses by status code. Written by one thread.
#[derive(Debug, Default)]
pub struct StatusCounts {
    /// A code and its count; code 0 marks a free slot.
    slots: [(MetricCell, MetricCell); CODES],
    /// Codes without a slot.
    others: MetricCell,
}

impl StatusCounts {
    pub fn count(&self, code: u16) {
        let code = u64::from(code);
        let slot = self.slots.iter().find(|(known, _)| known.get() == code || known.get() == 0);
        let Some((known, count)) = slot else { return self.others.add(1) };
        if known.get() == 0 {
            known.add(code);
        }
        count.add(1);
    }

    /// All responses, and those of class 5xx.
    pub fn requests_and_failures(&self) -> (u64, u64) {
        let counts = || self.slots.iter().map(|(code, count)| (code.get(), count.get()));
        let failed = counts().filter(|(code, _)| (500..600).contains(code)).map(|(_, count)| count).sum();
        (counts().map(|(_, count)| count).sum::<u64>() + self.others.get(), failed)
    }

    /// The codes as label values, with their counts.
    pub fn counts(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let slots = self.slots.iter().filter(|(code, _)| code.get() != 0);
        let others = (self.others.get() > 0).then(|| ("other".to_owned(), self.others.get()));
        slots.map(|(code, count)| (code.get().to_string(), count.get())).chain(others)
    }
}

/// All numbers of one route in one worker, in adjacent memory: a rarely used route is not in the CPU cache, and every cache
/// miss costs as much as a decision.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RouteCells {
    pub duration: Histogram,
    /// The same durations by the configured bounds.
    buckets: [MetricCell; REQUEST_BOUNDS_MAX + 1],
    bounds_us: Arc<[u64]>,
    /// Requests that a rule refused. `outcomes` counts a request once for each rule that refuses it.
    pub refused: MetricCell,
    /// By rule of the route: admitted, refused, delayed, shadowed, exempt.
    pub outcomes: SmallVec<[[MetricCell; 5]; 2]>,
    pub codes: StatusCounts,
}

impl RouteCells {
    /// `bounds_us`: at most [`REQUEST_BOUNDS_MAX`], ascending.
    pub fn new(rules: usize, bounds_us: &Arc<[u64]>) -> RouteCells {
        RouteCells {
            codes: StatusCounts::default(),
            duration: Histogram::default(),
            buckets: array::from_fn(|_| MetricCell::default()),
            bounds_us: Arc::clone(bounds_us),
            refused: MetricCell::default(),
            outcomes: (0..rules).map(|_| Default::default()).collect(),
        }
    }

    pub fn request_ended(&self, code: u16, took: Duration) {
        self.codes.count(code);
        self.duration.record(took);
        self.buckets[bucket_of(&self.bounds_us, took)].add(1);
    }

    /// Adds the durations by the configured bounds to a sum over workers.
    pub fn add_buckets_to(&self, sum: &mut HistogramSum) {
        for (total, bucket) in sum.buckets.iter_mut().zip(&self.buckets) {
            *total += bucket.get();
        }
        sum.sum_ns += self.duration.sum_ns.get();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_in_the_first_bucket_whose_bound_is_not_below_it() {
        let histogram = Histogram::default();
        for ns in [0, 1000, 1001, 2_001, 1_000_000, 1_000_001, 30_000_000_000, 30_000_000_001] {
            histogram.record(Duration::from_nanos(ns));
        }
        let mut sum = HistogramSum::default();
        histogram.add_to(&mut sum);
        histogram.add_to(&mut sum);
        assert_eq!(sum.buckets.iter().sum::<u64>(), 16);
        assert_eq!([0, 1, 2, 9, 10].map(|bucket| sum.buckets[bucket]), [4, 2, 2, 2, 2]);
        assert_eq!([BOUNDS_US.len() - 1, BOUNDS_US.len()].map(|bucket| sum.buckets[bucket]), [2, 2]);
        assert_eq!(sum.sum_ns, 2 * 60_002_004_004);
    }

    #[test]
    fn durations_of_requests_are_counted_by_the_configured_bounds() {
        let bounds_us: Arc<[u64]> = Arc::new([5_000, 10_000]);
        let cells = RouteCells::new(0, &bounds_us);
        for us in [0, 5_000, 5_001, 10_000, 10_001, 60_000_000] {
            cells.request_ended(200, Duration::from_micros(us));
        }
        let mut sum = HistogramSum::default();
        cells.add_buckets_to(&mut sum);
        assert_eq!((&sum.buckets[..4], sum.sum_ns), (&[2, 2, 2, 0][..], 60_030_002_000));
    }

    #[test]
    fn quantiles_are_interpolated_within_a_bucket() {
        assert_eq!(HistogramSum::default().quantile_us(0.5), None);
        let histogram = Histogram::default();
        (0..100).for_each(|_| histogram.record(Duration::from_micros(1_500)));
        let mut sum = HistogramSum::default();
        histogram.add_to(&mut sum);
        // Between the bounds 1000 and 2500.
        assert_eq!([0.0, 0.5, 1.0].map(|share| sum.quantile_us(share)), [Some(1_000), Some(1_750), Some(2_500)]);
        let before = sum.clone();
        histogram.record(Duration::from_secs(100));
        histogram.record(Duration::from_micros(1));
        let mut sum = HistogramSum::default();
        histogram.add_to(&mut sum);
        assert_eq!(sum.quantile_us(0.999), Some(30_000_000));
        let mut since = sum.since(&before);
        assert_eq!((since.quantile_us(0.5), since.quantile_us(1.0)), (Some(1), Some(30_000_000)));
        since.add(&before);
        assert_eq!((since.buckets, since.sum_ns), (sum.buckets, sum.sum_ns));
    }

    #[test]
    fn a_gauge_can_decrease() {
        let cell = MetricCell::default();
        cell.add(3);
        cell.sub(2);
        assert_eq!(cell.get(), 1);
    }

    #[test]
    fn sixteen_codes_are_counted_separately_and_the_next_as_other() {
        let codes = StatusCounts::default();
        (400..416).for_each(|code| codes.count(code));
        codes.count(400);
        codes.count(599);
        let counts: Vec<_> = codes.counts().collect();
        assert_eq!((counts.len(), &counts[0], &counts[16]), (17, &("400".to_owned(), 2), &("other".to_owned(), 1)));
    }
}
