//! Permits for what is limited at an upstream: requests in flight, requests that wait for a connection or for a reachable
//! server, and connections to a server.
//!
//! All workers count requests together, in relaxed atomics; only where the configuration sets a limit, and then with
//! one addition when a request begins and one when it ends. Reloads keep the counts. Connections are counted by each
//! worker.

use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The log says at most so often that requests wait: servers that come and go would flood it, and so would clients.
const WAIT_LOG_INTERVAL_MS: u64 = 60_000;

/// The counts of one upstream.
#[derive(Debug, Default)]
pub struct RequestLimit {
    requests: AtomicU32,
    pending: AtomicU32,
    held: AtomicU32,
    /// When the log said that requests wait for a reachable server; 0: never.
    wait_logged_ms: AtomicU64,
    /// The log has not yet said that a server is reachable again.
    is_wait_logged: AtomicBool,
}

/// Permits one request; its drop returns the permit.
#[derive(Debug)]
pub struct RequestPermit {
    limit: Arc<RequestLimit>,
    counter: fn(&RequestLimit) -> &AtomicU32,
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        (self.counter)(&self.limit).fetch_sub(1, Relaxed);
    }
}

impl RequestLimit {
    /// A permit for one more request in flight; `None` at the limit.
    pub fn acquire_request(self: &Arc<RequestLimit>, max: u32) -> Option<RequestPermit> {
        self.acquire(|limit| &limit.requests, max)
    }

    /// A permit for one more request that waits for a connection; `None` at the limit.
    pub fn acquire_pending(self: &Arc<RequestLimit>, max: u32) -> Option<RequestPermit> {
        self.acquire(|limit| &limit.pending, max)
    }

    /// A permit for one more request that waits for a reachable server; `None` at the limit.
    pub fn acquire_held(self: &Arc<RequestLimit>, max: u32) -> Option<RequestPermit> {
        self.acquire(|limit| &limit.held, max)
    }

    fn acquire(self: &Arc<RequestLimit>, counter: fn(&RequestLimit) -> &AtomicU32, max: u32) -> Option<RequestPermit> {
        let taken = counter(self).fetch_add(1, Relaxed);
        let permit = RequestPermit { limit: Arc::clone(self), counter };
        // Above the limit, the drop of the permit takes the addition back.
        (taken < max).then_some(permit)
    }

    /// Requests that wait for a connection.
    pub fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }

    /// Requests that wait for a reachable server.
    pub fn held(&self) -> u32 {
        self.held.load(Relaxed)
    }
}

impl RequestLimit {
    /// Whether it is logged now that requests wait for a reachable server.
    pub fn may_log_wait(&self, now_ms: u64) -> bool {
        let logged_ms = self.wait_logged_ms.load(Relaxed);
        if logged_ms != 0 && now_ms < logged_ms + WAIT_LOG_INTERVAL_MS {
            return false;
        }
        // Ordering: relaxed; of several workers, the first to change the number logs.
        let is_first = self.wait_logged_ms.compare_exchange(logged_ms, now_ms, Relaxed, Relaxed).is_ok();
        self.is_wait_logged.fetch_or(is_first, Relaxed);
        is_first
    }

    /// Whether it was logged that requests wait, and not that they no longer do, which the caller logs.
    pub fn end_logged_wait(&self) -> bool {
        self.is_wait_logged.swap(false, Relaxed)
    }
}

/// What issues permits for connections: the pool of one server.
pub trait PermitIssuer {
    /// Takes a permit back, whose connection has closed.
    fn take_back(self: Rc<Self>);
}

/// Permits one connection to a server; its drop returns the permit. Weak, because the issuer holds the connections.
pub struct ConnectionPermit(Weak<dyn PermitIssuer>);

impl ConnectionPermit {
    pub fn new(issuer: Weak<dyn PermitIssuer>) -> ConnectionPermit {
        ConnectionPermit(issuer)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some(issuer) = self.0.upgrade() {
            issuer.take_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_permits_are_returned() {
        let limit = Arc::<RequestLimit>::default();
        let held = (limit.acquire_request(2), limit.acquire_request(2));
        assert!(held.0.is_some() && held.1.is_some() && limit.acquire_request(2).is_none());
        assert!(limit.acquire_pending(1).is_some() && limit.acquire_pending(0).is_none());
        drop(held);
        assert!(limit.acquire_request(1).is_some());
    }

    #[test]
    fn waits_are_logged_once_a_minute() {
        let limit = RequestLimit::default();
        let logged: Vec<u64> = (1..=120_002).step_by(500).filter(|now_ms| limit.may_log_wait(*now_ms)).collect();
        assert_eq!(logged, [1, 60_001, 120_001]);
        assert!(limit.end_logged_wait() && !limit.end_logged_wait());
    }
}
