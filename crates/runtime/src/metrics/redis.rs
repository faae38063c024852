//! Metrics of the shared store.

use std::sync::Arc;
use std::time::Duration;

use super::storage::{Histogram, MetricCell};
use super::{Metric, Registry, WorkerId, counter, gauge, histogram};

pub static REQUESTS: Metric = counter("transom_shared_requests_total", "Calls of the shared store, by outcome.");
pub static DURATION: Metric =
    histogram("transom_shared_duration_seconds", "Time from a call of the shared store to its reply.");
pub static OUTSTANDING: Metric = gauge(
    "transom_shared_outstanding_tokens",
    "Leased tokens not spent yet; an upper bound, because the leases of one counter count in every worker that fetched them.",
);
pub static TOKENS: Metric = counter(
    "transom_shared_tokens_total",
    "Leased tokens by outcome: fetched, returned, expired with their window, or reported after an outage.",
);
pub static UNREACHABLE: Metric = gauge(
    "transom_shared_servers_unreachable",
    "Servers of the shared store that cannot be reached; every worker counts them.",
);
pub static EVICTING: Metric = gauge(
    "transom_shared_servers_evicting",
    "Connected servers of the shared store whose maxmemory-policy evicts counters; every worker counts them.",
);
pub static OUTAGES: Metric = counter("transom_shared_outages_total", "Outages of servers of the shared store.");
pub static OUTAGE_DECISIONS: Metric =
    counter("transom_shared_outage_decisions_total", "Decisions made during an outage of the shared store, by policy.");

pub static DATA_ENTRIES: Metric =
    gauge("transom_shared_data_entries", "Entries of data in the shared store, as this gateway knows them.");
pub static DATA_CHANGED: Metric = gauge(
    "transom_shared_data_changed_timestamp_seconds",
    "Time of the last known change of data in the shared store, Unix time in seconds.",
);
pub static DATA_SYNCHRONIZED: Metric = gauge(
    "transom_shared_data_synchronized_timestamp_seconds",
    "When this gateway last knew data in the shared store to be up to date, Unix time in seconds.",
);
pub static DATA_COPIED: Metric = gauge(
    "transom_shared_data_copy_timestamp_seconds",
    "Time of the copy on disk of data in the shared store, Unix time in seconds.",
);
pub static DATA_COPY_ERRORS: Metric =
    counter("transom_shared_data_copy_errors_total", "Failures to write the copy on disk of data in the shared store.");

/// Values of the label `outcome`, in the order of `StoreOutcome`.
const OUTCOMES: [&str; 7] = ["granted", "refused", "other_window", "refunded", "error", "unreachable", "timeout"];

/// Metrics of one worker's store client.
#[derive(Debug)]
pub struct StoreMetrics {
    outcomes: [Arc<MetricCell>; 7],
    duration: Arc<Histogram>,
    outstanding: Arc<MetricCell>,
    fetched: Arc<MetricCell>,
    returned: Arc<MetricCell>,
    expired: Arc<MetricCell>,
    reported: Arc<MetricCell>,
    unreachable: Arc<MetricCell>,
    evicting: Arc<MetricCell>,
    outages: Arc<MetricCell>,
    outage_decisions: [Arc<MetricCell>; 3],
}

/// Metrics of data in the shared store that this gateway follows.
pub struct SharedDataMetrics {
    entries: Arc<MetricCell>,
    changed_s: Arc<MetricCell>,
    synchronized_s: Arc<MetricCell>,
    copied_s: Arc<MetricCell>,
    copy_errors: Arc<MetricCell>,
}

impl SharedDataMetrics {
    pub fn new(registry: &Registry, data: &str) -> SharedDataMetrics {
        let cell = |metric| registry.cell(metric, WorkerId::PROCESS, &[("data", data)]);
        SharedDataMetrics {
            entries: cell(&DATA_ENTRIES),
            changed_s: cell(&DATA_CHANGED),
            synchronized_s: cell(&DATA_SYNCHRONIZED),
            copied_s: cell(&DATA_COPIED),
            copy_errors: cell(&DATA_COPY_ERRORS),
        }
    }

    /// There are so many entries, and the last change was made at this time, Unix seconds.
    pub fn changed(&self, entries: usize, at_s: u64) {
        self.entries.set(entries as u64);
        self.changed_s.set(at_s);
    }

    pub fn synchronized(&self, now_s: u64) {
        self.synchronized_s.set(now_s);
    }

    pub fn copied(&self, at_s: u64) {
        self.copied_s.set(at_s);
    }

    pub fn copy_failed(&self) {
        self.copy_errors.add(1);
    }
}

/// How a call of the store ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreOutcome {
    Granted,
    Refused,
    OtherWindow,
    Refunded,
    Error,
    Unreachable,
    Timeout,
}

/// What a rule decides by during an outage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutageDecision {
    Local,
    Allowed,
    Refused,
}

impl StoreMetrics {
    pub fn new(registry: &Registry, worker: WorkerId) -> StoreMetrics {
        let cell = |name| registry.cell(name, worker, &[]);
        let tokens = |outcome| registry.cell(&TOKENS, worker, &[("outcome", outcome)]);
        StoreMetrics {
            outcomes: OUTCOMES.map(|outcome| registry.cell(&REQUESTS, worker, &[("outcome", outcome)])),
            duration: registry.histogram(&DURATION, worker, &[]),
            outstanding: cell(&OUTSTANDING),
            fetched: tokens("fetched"),
            returned: tokens("returned"),
            expired: tokens("expired"),
            reported: tokens("reported"),
            unreachable: cell(&UNREACHABLE),
            evicting: cell(&EVICTING),
            outages: cell(&OUTAGES),
            outage_decisions: ["local", "allowed", "refused"]
                .map(|policy| registry.cell(&OUTAGE_DECISIONS, worker, &[("policy", policy)])),
        }
    }

    pub fn call_completed(&self, outcome: StoreOutcome, took: Duration) {
        self.outcomes[outcome as usize].add(1);
        self.duration.record(took);
    }

    pub fn call_failed(&self, outcome: StoreOutcome) {
        self.outcomes[outcome as usize].add(1);
    }

    pub fn fetched(&self, tokens: u64) {
        self.fetched.add(tokens);
    }

    pub fn returned(&self, tokens: u64) {
        self.returned.add(tokens);
    }

    pub fn expired(&self, tokens: u64) {
        self.expired.add(tokens);
    }

    pub fn reported(&self, tokens: u64) {
        self.reported.add(tokens);
    }

    pub fn outstanding(&self, tokens: u64) {
        self.outstanding.set(tokens);
    }

    pub fn evicting(&self, servers: u64) {
        self.evicting.set(servers);
    }

    /// A server has become unreachable. `is_first`: no other worker has noticed it before.
    pub fn server_lost(&self, is_first: bool) {
        self.unreachable.add(1);
        self.outages.add(u64::from(is_first));
    }

    /// A server can be reached again.
    pub fn server_recovered(&self) {
        self.unreachable.sub(1);
    }

    /// The decisions that were made during outages so far.
    pub fn outage_decisions(&self) -> u64 {
        self.outage_decisions.iter().map(|cell| cell.get()).sum()
    }

    pub fn decided_in_outage(&self, what: OutageDecision) {
        self.outage_decisions[what as usize].add(1);
    }
}
