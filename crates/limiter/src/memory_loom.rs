//! Memory as the models see it: every atomic is one of loom's, and lies by itself.

use std::ops::Deref;
use std::sync::Arc;

use crate::atomics::{AtomicU64, AtomicU128};

pub const LINE_BYTES: usize = 128;

pub struct Memory;

pub struct Cells<T>(Box<[T]>);

impl Memory {
    pub fn heap(_bytes: usize) -> Option<Arc<Memory>> {
        Some(Arc::new(Memory))
    }

    pub fn words(self: &Arc<Self>, _at: usize, count: usize) -> Option<Cells<AtomicU128>> {
        Some(Cells((0..count).map(|_| AtomicU128::new(0)).collect()))
    }

    pub fn numbers(self: &Arc<Self>, _at: usize, count: usize) -> Option<Cells<AtomicU64>> {
        Some(Cells((0..count).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl<T> Deref for Cells<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}
