//! Memory for the models: every atomic is one of loom's, allocated separately.

use std::ops::Deref;
use std::sync::Arc;

use crate::atomics::{AtomicU64, AtomicU128};

/// As in `memory.rs`.
pub const LINE_BYTES: usize = 128;

/// As in `memory.rs`.
pub struct Memory;

/// As in `memory.rs`.
pub struct AtomicSlice<T>(Box<[T]>);

impl Memory {
    /// As in `memory.rs`.
    pub fn zeroed(_bytes: usize) -> Option<Arc<Memory>> {
        Some(Arc::new(Memory))
    }

    /// As in `memory.rs`.
    pub fn words(self: &Arc<Self>, _at: usize, count: usize) -> Option<AtomicSlice<AtomicU128>> {
        Some(AtomicSlice((0..count).map(|_| AtomicU128::new(0)).collect()))
    }

    /// As in `memory.rs`.
    pub fn numbers(self: &Arc<Self>, _at: usize, count: usize) -> Option<AtomicSlice<AtomicU64>> {
        Some(AtomicSlice((0..count).map(|_| AtomicU64::new(0)).collect()))
    }
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
