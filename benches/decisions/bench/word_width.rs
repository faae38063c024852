//! Compares the same operations on words of 128 and of 64 bits.
//!
//! The table keeps a counter in one word of 128 bits (tag, end of the window, count), so that one compare-and-swap changes
//! all of it. The costs are a wider instruction and half as many counters in a cache line.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use portable_atomic::AtomicU128;

use crate::timing::{Runner, on_threads};

/// Slots per bucket, as in the table.
const SLOTS: usize = 8;
/// Enough buckets that most of them are in no cache: 64 MiB of wide words, 32 MiB of narrow ones.
const MANY: usize = 1 << 19;
const OPERATIONS: usize = 1_000_000;

/// A word of either width.
trait Slot: Default + Sync {
    /// The low half, so that both widths return the same type.
    fn read(&self) -> u64;
    /// Adds one by compare-and-swap.
    fn increment(&self);
}

impl Slot for AtomicU128 {
    fn read(&self) -> u64 {
        self.load(Ordering::Acquire) as u64
    }

    fn increment(&self) {
        let mut seen = self.load(Ordering::Acquire);
        while let Err(now) = self.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire) {
            seen = now;
        }
    }
}

impl Slot for AtomicU64 {
    fn read(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn increment(&self) {
        let mut seen = self.load(Ordering::Acquire);
        while let Err(now) = self.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire) {
            seen = now;
        }
    }
}

/// Aligned as in the table, so that a bucket never starts in the middle of a cache line.
#[derive(Default)]
#[repr(align(64))]
struct Bucket<S>([S; SLOTS]);

/// Pairs of runners, the wide word first, named by the operation.
pub fn runners<'a>() -> Vec<Runner<'a>> {
    let mut runners = Vec::new();
    for threads in [1, 2] {
        let name = format!("compare-and-swap, one word, {threads} thread{}", if threads > 1 { "s" } else { "" });
        runners.push(Runner::new(name.clone(), move || increments::<AtomicU128>(threads)));
        runners.push(Runner::new(name, move || increments::<AtomicU64>(threads)));
    }
    for (name, buckets) in [("load 8 slots, in cache", 1), ("load 8 slots, at random in memory", MANY)] {
        runners.push(loads::<AtomicU128>(name, buckets));
        runners.push(loads::<AtomicU64>(name, buckets));
    }
    runners
}

fn increments<S: Slot>(threads: usize) -> f64 {
    let bucket = Bucket::<S>::default();
    on_threads(threads, OPERATIONS, |_| {
        for _ in 0..OPERATIONS {
            black_box(&bucket.0[0]).increment();
        }
    })
}

fn loads<'a, S: Slot + 'a>(name: &str, buckets: usize) -> Runner<'a> {
    let buckets: Vec<Bucket<S>> = (0..buckets).map(|_| Bucket::default()).collect();
    let mut at = 0;
    Runner::new(name, move || {
        let start = at;
        at += 1;
        on_threads(1, OPERATIONS, |_| {
            // The next bucket depends on the previous load, so that loads of two buckets do not overlap: a decision waits
            // for its bucket as well.
            let mut state: u64 = start;
            for _ in 0..OPERATIONS {
                state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
                let index = ((u128::from(state) * buckets.len() as u128) >> 64) as usize;
                let sum = black_box(&buckets[index]).0.iter().map(Slot::read).fold(0, u64::wrapping_add);
                state = state.wrapping_add(sum);
            }
            black_box(state);
        })
    })
}
