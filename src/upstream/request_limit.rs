//! What is under way at one upstream as a whole, where that is limited.
//!
//! All event loops count together, in relaxed atomics: only where the configuration sets a limit, and
//! then one addition when a request begins and one when it ends. Reloads keep the counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The counts of one upstream.
#[derive(Debug, Default)]
pub struct RequestLimit {
    requests: AtomicU32,
    pending: AtomicU32,
}

/// One of a limited number; gives itself back.
#[derive(Debug)]
pub struct RequestPermit {
    circuit: Arc<RequestLimit>,
    of: fn(&RequestLimit) -> &AtomicU32,
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        (self.of)(&self.circuit).fetch_sub(1, Relaxed);
    }
}

impl RequestLimit {
    /// Room for one more request under way, if there is any.
    pub fn request(self: &Arc<RequestLimit>, max: u32) -> Option<RequestPermit> {
        self.ticket(|circuit| &circuit.requests, max)
    }

    /// Room for one more request that waits for a connection.
    pub fn pending(self: &Arc<RequestLimit>, max: u32) -> Option<RequestPermit> {
        self.ticket(|circuit| &circuit.pending, max)
    }

    fn ticket(self: &Arc<RequestLimit>, of: fn(&RequestLimit) -> &AtomicU32, max: u32) -> Option<RequestPermit> {
        let taken = of(self).fetch_add(1, Relaxed);
        let ticket = RequestPermit { circuit: Arc::clone(self), of };
        // One too many gives itself back.
        (taken < max).then_some(ticket)
    }

    /// Requests that wait for a connection.
    pub fn waiting(&self) -> u32 {
        self.pending.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_given_back() {
        let circuit = Arc::<RequestLimit>::default();
        let held = (circuit.request(2), circuit.request(2));
        assert!(held.0.is_some() && held.1.is_some() && circuit.request(2).is_none());
        assert!(circuit.pending(1).is_some() && circuit.pending(0).is_none());
        drop(held);
        assert!(circuit.request(1).is_some());
    }
}
