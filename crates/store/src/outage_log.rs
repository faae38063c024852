//! Logs the beginning and the end of an outage, and counts it, once for all workers of a gateway, each of which notices it by itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::connection::log_excerpt;
use super::diagnose::settings_fix;
use super::reconnecting::ServerId;

/// The servers that some worker cannot reach.
#[derive(Default)]
pub struct OutageLog(Mutex<HashMap<ServerId, Outage>>);

#[derive(Default)]
struct Outage {
    /// Workers whose circuit breaker is open.
    workers: usize,
    /// Decisions without the store, of workers that reach the server again.
    decisions: u64,
}

/// The outage of a server as one worker sees it. A worker that ends leaves it without a message.
pub struct WorkerOutage {
    log: Arc<OutageLog>,
    server: ServerId,
    /// Decisions without the store that the worker had made before.
    decisions_before: u64,
    has_ended: bool,
    /// No other worker has noticed the outage before.
    pub is_first: bool,
}

impl OutageLog {
    /// A worker cannot reach a server. `decisions`: how many decisions it has made without the store so far.
    pub fn begin(self: &Arc<OutageLog>, server: ServerId, why: &str, decisions: u64) -> WorkerOutage {
        let mut outages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let outage = outages.entry(server).or_default();
        outage.workers += 1;
        let is_first = outage.workers == 1;
        if is_first {
            let (why, fix) = (log_excerpt(why), settings_fix(why));
            let separator = if fix.is_empty() { "" } else { "; " };
            tracing::warn!(
                "shared counters cannot be reached, each rule follows its `on_outage`: {why}{separator}{fix}"
            );
        }
        WorkerOutage { log: Arc::clone(self), server, decisions_before: decisions, has_ended: false, is_first }
    }

    /// A worker no longer sees an outage; returns the decisions of all workers if it was the last one.
    fn leave(&self, server: ServerId, decisions: u64) -> Option<u64> {
        let mut outages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let outage = outages.get_mut(&server)?;
        outage.workers -= 1;
        outage.decisions += decisions;
        let is_last = outage.workers == 0;
        if is_last { outages.remove(&server).map(|outage| outage.decisions) } else { None }
    }
}

impl WorkerOutage {
    /// The worker reaches the server, `name`, again.
    pub fn end(mut self, name: &str, decisions: u64) {
        self.has_ended = true;
        if let Some(decisions) = self.log.leave(self.server, decisions.saturating_sub(self.decisions_before)) {
            tracing::info!("shared counters are reachable again: {name}; {decisions} decisions followed `on_outage`");
        }
    }
}

impl Drop for WorkerOutage {
    fn drop(&mut self) {
        if !self.has_ended {
            self.log.leave(self.server, 0);
        }
    }
}
