//! Memory for the models: every atomic is one of loom's. Slices at the same place are the same, so that two tables can share them.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::atomics::{AtomicU64, AtomicU128};

/// As in `memory.rs`.
pub const LINE_BYTES: usize = 128;

/// As in `memory.rs`.
#[derive(Default)]
pub struct Memory {
    words: Slices<AtomicU128>,
    numbers: Slices<AtomicU64>,
}

type Slices<T> = Mutex<BTreeMap<usize, Arc<[T]>>>;

/// As in `memory.rs`.
pub struct AtomicSlice<T>(Arc<[T]>);

impl Memory {
    /// As in `memory.rs`.
    pub fn zeroed(_bytes: usize) -> Option<Arc<Memory>> {
        Some(Arc::default())
    }

    /// As in `memory.rs`.
    pub fn words(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU128>> {
        Some(slice(&self.words, at, count, || AtomicU128::new(0)))
    }

    /// As in `memory.rs`.
    pub fn numbers(self: &Arc<Self>, at: usize, count: usize) -> Option<AtomicSlice<AtomicU64>> {
        Some(slice(&self.numbers, at, count, || AtomicU64::new(0)))
    }
}

fn slice<T>(slices: &Slices<T>, at: usize, count: usize, zero: impl Fn() -> T) -> AtomicSlice<T> {
    let mut slices = slices.lock().unwrap_or_else(PoisonError::into_inner);
    AtomicSlice(slices.entry(at).or_insert_with(|| (0..count).map(|_| zero()).collect()).clone())
}

impl<T> AtomicSlice<T> {
    /// As in `memory.rs`; nothing, because the models have no cache.
    pub fn prefetch(&self, _index: usize) {}
}

impl<T> Deref for AtomicSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}
