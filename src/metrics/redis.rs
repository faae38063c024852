//! What is counted of the store in which gateways share counters.

use std::sync::Arc;
use std::time::Duration;

use super::events::{counter, gauge, histogram};
use super::storage::{Histogram, MetricCell};
use super::{Metric, Registry, WorkerId};

pub static REQUESTS: Metric =
    counter("transom_shared_requests_total", "Calls of the store of shared counters, by what came of them.");
pub static DURATION: Metric = histogram("transom_shared_duration_seconds", "From a call of the store to its answer.");
pub static OUTSTANDING: Metric = gauge(
    "transom_shared_outstanding_tokens",
    "Tokens fetched and not spent yet, at most: what several loops fetched for one counter counts for each.",
);
pub static TOKENS: Metric = counter(
    "transom_shared_tokens_total",
    "Tokens by what became of them: fetched, returned, expired with their window, or reported after an outage.",
);
pub static UNREACHABLE: Metric = gauge(
    "transom_shared_servers_unreachable",
    "Servers of shared counters that can not be reached; each loop counts them.",
);
pub static EVICTING: Metric = gauge(
    "transom_shared_servers_evicting",
    "Connected servers of shared counters whose maxmemory-policy evicts counters; each loop counts them.",
);
pub static OUTAGES: Metric = counter("transom_shared_outages_total", "How often a server of shared counters was lost.");
pub static OUTAGE_DECISIONS: Metric = counter(
    "transom_shared_outage_decisions_total",
    "Decisions of rules that could not ask the store, by what they did.",
);

/// What calls of the store come to.
const OUTCOMES: [&str; 7] = ["granted", "refused", "other_window", "given_back", "error", "unreachable", "timeout"];

/// What one event loop tells of its store.
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

/// What came of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreOutcome {
    Granted,
    Refused,
    OtherWindow,
    GivenBack,
    Error,
    Unreachable,
    Timeout,
}

/// What a rule does that can not ask the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutageDecision {
    Local,
    Allowed,
    Refused,
}

impl StoreMetrics {
    pub fn new(registry: &Registry, owner: WorkerId) -> StoreMetrics {
        let cell = |name| registry.cell(name, owner, &[]);
        let tokens = |fate| registry.cell(&TOKENS, owner, &[("outcome", fate)]);
        StoreMetrics {
            outcomes: OUTCOMES.map(|outcome| registry.cell(&REQUESTS, owner, &[("outcome", outcome)])),
            duration: registry.histogram(&DURATION, owner, &[]),
            outstanding: cell(&OUTSTANDING),
            fetched: tokens("fetched"),
            returned: tokens("returned"),
            expired: tokens("expired"),
            reported: tokens("reported"),
            unreachable: cell(&UNREACHABLE),
            evicting: cell(&EVICTING),
            outages: cell(&OUTAGES),
            outage_decisions: ["local", "allowed", "refused"]
                .map(|policy| registry.cell(&OUTAGE_DECISIONS, owner, &[("policy", policy)])),
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

    /// A server can not be reached any more.
    pub fn server_lost(&self) {
        self.unreachable.add(1);
        self.outages.add(1);
    }

    /// It can again.
    pub fn server_recovered(&self) {
        self.unreachable.sub(1);
    }

    pub fn decided_in_outage(&self, what: OutageDecision) {
        self.outage_decisions[what as usize].add(1);
    }
}
