//! Bounds the memory that bodies of all connections hold. All workers count together, in relaxed atomics.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How much memory may be held.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes_left: AtomicUsize,
}

/// What one body holds. Its drop gives the memory back.
#[derive(Debug)]
pub struct MemoryShare {
    budget: &'static MemoryBudget,
    bytes: usize,
}

impl MemoryBudget {
    pub const fn new(bytes: usize) -> MemoryBudget {
        MemoryBudget { bytes_left: AtomicUsize::new(bytes) }
    }

    /// A share of 0 bytes.
    pub fn share(&'static self) -> MemoryShare {
        MemoryShare { budget: self, bytes: 0 }
    }
}

impl MemoryShare {
    /// Grows to `bytes`, if the share is smaller. `false`: the budget is used up.
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let Some(more @ 1..) = bytes.checked_sub(self.bytes) else { return true };
        // Ordering: a count that guards no other memory.
        let taken = self.budget.bytes_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(more)).is_ok();
        if taken {
            self.bytes = bytes;
        }
        taken
    }

    /// Gives everything back.
    pub fn clear(&mut self) {
        // Ordering: as in `grow_to`.
        self.budget.bytes_left.fetch_add(std::mem::take(&mut self.bytes), Relaxed);
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_never_exceed_the_budget() {
        static BUDGET: MemoryBudget = MemoryBudget::new(100);
        let (mut first, mut second) = (BUDGET.share(), BUDGET.share());
        assert!(first.grow_to(60) && first.grow_to(50) && second.grow_to(40));
        assert!(!second.grow_to(41) && !first.grow_to(61));
        drop(first);
        assert!(second.grow_to(100) && !BUDGET.share().grow_to(1));
        second.clear();
        assert!(BUDGET.share().grow_to(100));
    }
}
