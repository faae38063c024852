//! Bounds the memory that bodies of all connections hold. All workers count together, in relaxed atomics.
//!
//! A client may hold as much as is still free (dynamic thresholds: Choudhury and Hahne, 1998): one client at most half of the
//! budget, and each of n clients that take all they can a part of n + 1. So a client leaves memory for the others.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Number of counts of what clients hold. Clients whose hashes have the same count are limited as one.
const CLIENT_COUNTS: usize = 1024;

/// How much memory may be held.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes_left: AtomicUsize,
    /// By the hash of the client.
    held: [AtomicUsize; CLIENT_COUNTS],
}

/// What one body holds. Its drop gives the memory back.
#[derive(Debug)]
pub struct MemoryShare {
    budget: &'static MemoryBudget,
    /// What the client holds, with this share.
    held: Option<&'static AtomicUsize>,
    bytes: usize,
}

impl MemoryBudget {
    pub const fn new(bytes: usize) -> MemoryBudget {
        MemoryBudget { bytes_left: AtomicUsize::new(bytes), held: [const { AtomicUsize::new(0) }; CLIENT_COUNTS] }
    }

    /// A share of 0 bytes that counts for no client.
    pub fn share(&'static self) -> MemoryShare {
        MemoryShare { budget: self, held: None, bytes: 0 }
    }

    /// A share of 0 bytes that counts for the client with this hash.
    pub fn share_of(&'static self, client: u64) -> MemoryShare {
        MemoryShare { budget: self, held: Some(&self.held[client as usize % CLIENT_COUNTS]), bytes: 0 }
    }
}

impl MemoryShare {
    /// Grows to `bytes`, if the share is smaller. `false`: the budget is used up, or the client has its part.
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let Some(more @ 1..) = bytes.checked_sub(self.bytes) else { return true };
        // Ordering: counts that guard no other memory. Shares that grow at the same time may each miss the other's `more` in `held`,
        // never in `bytes_left`.
        let held = self.held.map_or(0, |held| held.load(Relaxed) + more);
        let left_after = |left: usize| left.checked_sub(more).filter(|after| self.held.is_none() || held <= *after);
        let is_taken = self.budget.bytes_left.fetch_update(Relaxed, Relaxed, left_after).is_ok();
        if is_taken {
            self.bytes = bytes;
            self.held.inspect(|held| _ = held.fetch_add(more, Relaxed));
        }
        is_taken
    }

    /// Gives everything back.
    pub fn clear(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        // Ordering: as in `grow_to`.
        self.held.inspect(|held| _ = held.fetch_sub(bytes, Relaxed));
        self.budget.bytes_left.fetch_add(bytes, Relaxed);
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

    #[test]
    fn a_client_holds_as_much_as_is_free() {
        static BUDGET: MemoryBudget = MemoryBudget::new(100);
        let (mut first, mut of_first, mut other) = (BUDGET.share_of(1), BUDGET.share_of(1), BUDGET.share_of(2));
        assert!(first.grow_to(30) && of_first.grow_to(20) && !of_first.grow_to(21));
        assert!(other.grow_to(25) && !other.grow_to(26) && !first.grow_to(31));
        drop(first);
        // 20 are held, and 55 free.
        assert!(of_first.grow_to(37) && !of_first.grow_to(38));
        drop((of_first, other));
        assert!(BUDGET.share().grow_to(100));
    }
}
