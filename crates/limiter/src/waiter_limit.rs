//! Counts the requests that a rule delays, and limits their number.

use std::sync::Arc;

use crate::atomics::{AtomicU64, Ordering};

/// The delayed requests of one rule.
#[derive(Debug)]
pub struct WaiterLimit {
    waiting: AtomicU64,
    max_waiting: u64,
}

/// One delayed request. Dropped when the wait is over, however it ended.
#[derive(Debug)]
pub struct WaiterSlot(Arc<WaiterLimit>);

impl WaiterLimit {
    /// Allows at most `max_waiting` requests to wait at a time.
    pub fn new(max_waiting: u64) -> Arc<WaiterLimit> {
        Arc::new(WaiterLimit { waiting: AtomicU64::new(0), max_waiting })
    }

    /// Counts another request, unless the limit is reached.
    pub fn try_enter(self: &Arc<WaiterLimit>) -> Option<WaiterSlot> {
        // Ordering: relaxed; the number protects no other data.
        if self.waiting.fetch_add(1, Ordering::Relaxed) < self.max_waiting {
            return Some(WaiterSlot(Arc::clone(self)));
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// Whether no other request may wait.
    pub fn is_full(&self) -> bool {
        self.waiting() >= self.max_waiting
    }

    /// The number of delayed requests.
    pub fn waiting(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.waiting.load(Ordering::Relaxed)
    }
}

impl Drop for WaiterSlot {
    fn drop(&mut self) {
        // Ordering: relaxed; as in `try_enter`.
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_requests_wait_than_allowed() {
        let limit = WaiterLimit::new(2);
        let first = limit.try_enter();
        assert!(!limit.is_full());
        let slots = (first, limit.try_enter());
        assert!(slots.0.is_some() && slots.1.is_some() && limit.try_enter().is_none() && limit.is_full());
        drop(slots);
        assert_eq!(limit.waiting(), 0);
        assert!(limit.try_enter().is_some());
    }
}
