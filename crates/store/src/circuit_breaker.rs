//! Circuit breakers: which servers are known to be unreachable. Pure state; `outage` probes and reports.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use foldhash::fast::FixedState;

use super::reconnecting::ServerId;

/// Failures in a row that open a circuit breaker. Failures closer together than the store's timeout count as one.
pub const FAILURES_MAX: u32 = 3;
/// Time after an outage during which other workers may still treat the server as unreachable.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// The circuit breakers of all servers. A server is listed while it fails. A breaker opens after a few failures in a
/// row; its server is then probed a few times a second, and gets a report of the usage counted meanwhile before the
/// breaker closes.
#[derive(Default)]
pub struct CircuitBreakers {
    servers: RefCell<HashMap<ServerId, ServerFailures, FixedState>>,
    /// Number of open breakers.
    open: Cell<usize>,
    /// When a breaker last closed.
    last_closed: Cell<Option<Instant>>,
}

/// The recent failures of one server.
struct ServerFailures {
    /// Failures in a row. Simultaneous failures have one cause and count once.
    failures: u32,
    last: Instant,
}

impl CircuitBreakers {
    /// Whether any breaker is open.
    pub fn is_any_open(&self) -> bool {
        self.open.get() > 0
    }

    pub fn is_open(&self, server: ServerId) -> bool {
        self.is_any_open()
            && self
                .servers
                .borrow()
                .get(&server)
                .is_some_and(|server_failures| server_failures.failures >= FAILURES_MAX)
    }

    pub fn record_success(&self, server: ServerId) {
        // An open breaker closes only after the report.
        if !self.is_open(server) {
            self.servers.borrow_mut().remove(&server);
        }
    }

    /// Counts `times` failures; returns whether the breaker opens now. A single failure less than `merge_within` after
    /// the last counted one is ignored.
    pub fn record_failure(&self, server: ServerId, times: u32, now: Instant, merge_within: Duration) -> bool {
        let mut servers = self.servers.borrow_mut();
        let server_failures = match servers.entry(server) {
            Entry::Vacant(entry) => entry.insert(ServerFailures { failures: 0, last: now }),
            Entry::Occupied(known) => match known.into_mut() {
                server_failures if times == 1 && now.saturating_duration_since(server_failures.last) < merge_within => {
                    return false;
                }
                server_failures => server_failures,
            },
        };
        let was_open = server_failures.failures >= FAILURES_MAX;
        server_failures.failures = server_failures.failures.saturating_add(times);
        server_failures.last = now;
        let opens = !was_open && server_failures.failures >= FAILURES_MAX;
        self.open.set(self.open.get() + usize::from(opens));
        opens
    }

    /// Whether the last outage has ended for all workers of this gateway.
    pub fn is_settled(&self, now: Instant) -> bool {
        let is_long_ago = |closed: Instant| now.saturating_duration_since(closed) >= SETTLE_TIME;
        self.open.get() == 0 && self.last_closed.get().is_none_or(is_long_ago)
    }

    pub fn close(&self, server: ServerId, now: Instant) {
        self.last_closed.set(Some(now));
        self.servers.borrow_mut().remove(&server);
        self.open.set(self.open.get().saturating_sub(1));
    }
}
