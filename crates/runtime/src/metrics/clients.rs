//! Requests and usage by client, for a bounded number of clients that were seen lately.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use super::exposition::Reading;
use super::storage::MetricCell;
use super::{Metric, Registry, WorkerId, counter};

pub static CLIENT_REQUESTS: Metric =
    counter("transom_client_requests_total", "Requests of clients, by plan and outcome.");
pub static CLIENT_USAGE: Metric = counter(
    "transom_client_usage_total",
    "Usage that responses to clients have stated, by plan and kind, rounded up a response.",
);

/// Kinds of usage.
pub const KINDS: usize = 5;
/// Clients that have series of their own.
const CLIENTS_MAX: usize = 10_000;
/// What stands for the other clients. No client can have this name.
const OTHERS: &str = "(other)";
/// How long clients without requests keep their series when other clients have none.
const IDLE_MS: u64 = 5 * 60 * 1000;

/// The admitted and the refused requests of one client in one worker, and the usage of their responses by kind.
#[derive(Clone, Debug, Default)]
pub struct ClientCells(Arc<([MetricCell; 2], [MetricCell; KINDS])>);

impl ClientCells {
    pub fn decided(&self, is_refused: bool) {
        self.0.0[usize::from(is_refused)].add(1);
    }

    pub fn used(&self, tokens: [u64; KINDS]) {
        self.0.1.iter().zip(tokens).for_each(|(cell, tokens)| cell.add(tokens));
    }
}

/// The clients with series, in all workers.
#[derive(Debug, Default)]
pub struct CountedClients {
    /// Changes when a client loses its series.
    generation: MetricCell,
    counted: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    /// By name and plan.
    clients: BTreeMap<(String, String), CountedClient>,
    /// When idle clients were looked for, Unix milliseconds.
    checked_ms: u64,
}

#[derive(Debug, Default)]
struct CountedClient {
    by_worker: BTreeMap<WorkerId, ClientCells>,
    /// Requests when idle clients were looked for.
    checked_total: u64,
}

impl CountedClient {
    fn requests(&self) -> [u64; 2] {
        [0, 1].map(|outcome| self.by_worker.values().map(|cells| cells.0.0[outcome].get()).sum())
    }

    fn usage(&self) -> [u64; KINDS] {
        std::array::from_fn(|kind| self.by_worker.values().map(|cells| cells.0.1[kind].get()).sum())
    }
}

impl CountedClients {
    /// The cells of a client; `None` if too many clients have series.
    fn cells(&self, worker: WorkerId, client: &str, plan: &str) -> Option<ClientCells> {
        let clients = &mut self.counted.lock().unwrap_or_else(PoisonError::into_inner).clients;
        let key = (client.to_owned(), plan.to_owned());
        if clients.len() >= CLIENTS_MAX && client != OTHERS && !clients.contains_key(&key) {
            return None;
        }
        Some(clients.entry(key).or_default().by_worker.entry(worker).or_default().clone())
    }

    /// The series, without those of clients that do not exist with this name and plan; and, if there are too many, of those
    /// that had no requests for some minutes. `kinds`: the names of the kinds of usage.
    pub fn readings(&self, now_ms: u64, kinds: [&str; KINDS], exists: impl Fn(&str, &str) -> bool) -> Vec<Reading> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let Counted { clients, checked_ms } = &mut *counted;
        let before = clients.len();
        let is_due = before >= CLIENTS_MAX && now_ms.saturating_sub(*checked_ms) >= IDLE_MS;
        if is_due {
            *checked_ms = now_ms;
        }
        clients.retain(|(client, plan), counted| {
            let total = counted.requests().iter().sum();
            let is_idle = is_due && std::mem::replace(&mut counted.checked_total, total) == total;
            client == OTHERS || (exists(client, plan) && !is_idle)
        });
        if clients.len() != before {
            self.generation.add(1);
        }
        let mut readings = Vec::new();
        for ((client, plan), counted) in clients.iter() {
            let mut add = |metric, label, value, total| {
                let labels = [("client", client.as_str()), ("plan", plan), (label, value)];
                readings.push(Reading::new(metric, &labels, total as f64));
            };
            for (outcome, total) in ["admitted", "refused"].into_iter().zip(counted.requests()) {
                add(&CLIENT_REQUESTS, "outcome", outcome, total);
            }
            for (kind, total) in kinds.into_iter().zip(counted.usage()).filter(|(_, total)| *total > 0) {
                add(&CLIENT_USAGE, "kind", kind, total);
            }
        }
        readings
    }
}

/// Counts the requests of clients in one worker.
#[derive(Debug)]
pub struct ClientMetrics {
    registry: Arc<Registry>,
    worker: WorkerId,
    known: RefCell<KnownCells>,
}

/// The cells that a worker has got, as of a generation.
#[derive(Debug, Default)]
struct KnownCells {
    generation: u64,
    /// By the number of the client.
    by_client: HashMap<usize, ClientCells>,
    /// By plan, of clients without series. If there are any, further ones have none either.
    others: HashMap<Rc<str>, ClientCells>,
}

impl ClientMetrics {
    pub fn new(registry: &Arc<Registry>, worker: WorkerId) -> ClientMetrics {
        ClientMetrics { registry: Arc::clone(registry), worker, known: RefCell::default() }
    }

    /// The cells of a client. `number` is that of no other client.
    pub fn cells(&self, number: usize, client: &str, plan: &str) -> ClientCells {
        let clients = &self.registry.counted_clients;
        let (mut known, generation) = (self.known.borrow_mut(), clients.generation.get());
        if known.generation != generation || known.by_client.len() > CLIENTS_MAX {
            *known = KnownCells { generation, ..KnownCells::default() };
        }
        if let Some(cells) = known.by_client.get(&number) {
            return cells.clone();
        }
        if known.others.is_empty()
            && let Some(cells) = clients.cells(self.worker, client, plan)
        {
            known.by_client.insert(number, cells.clone());
            return cells;
        }
        if let Some(cells) = known.others.get(plan) {
            return cells.clone();
        }
        let cells = clients.cells(self.worker, OTHERS, plan).unwrap_or_default();
        known.others.insert(plan.into(), cells.clone());
        cells
    }
}

#[cfg(test)]
mod tests {
    use transom_limiter::handles::Handle;

    use super::*;

    #[test]
    fn the_clients_with_series_are_bounded_and_seen_lately() {
        let registry = Arc::new(Registry::default());
        let workers = [0, 1].map(|worker| ClientMetrics::new(&registry, WorkerId::at(worker)));
        let seen = |range: std::ops::Range<usize>| {
            for (number, metrics) in range.flat_map(|number| workers.iter().map(move |metrics| (number, metrics))) {
                metrics.cells(number, &format!("c{number}"), "gold").decided(false);
            }
        };
        let series = |now_ms, exists: &dyn Fn(&str) -> bool| {
            let exists = |client: &str, plan: &str| plan == "gold" && exists(client);
            let readings = registry.counted_clients.readings(now_ms, [""; KINDS], exists);
            let admitted = readings.iter().step_by(2).map(|reading| reading.value);
            (readings.len() / 2, admitted.sum::<f64>())
        };
        seen(0..CLIENTS_MAX + 5);
        // One series more for the others.
        assert_eq!(series(IDLE_MS, &|_| true), (CLIENTS_MAX + 1, 2.0 * (CLIENTS_MAX + 5) as f64));
        seen(3..CLIENTS_MAX);
        assert_eq!(series(IDLE_MS + 1, &|_| true).0, CLIENTS_MAX + 1, "others may be seen soon");
        assert_eq!(series(2 * IDLE_MS, &|_| true).0, CLIENTS_MAX - 3 + 1, "three were idle");
        seen(CLIENTS_MAX..CLIENTS_MAX + 2);
        assert_eq!(series(2 * IDLE_MS, &|_| true).0, CLIENTS_MAX - 1 + 1);
        // Clients that are removed lose their series at once, and begin anew when they are there again.
        assert_eq!(series(2 * IDLE_MS, &|client| client == "c7"), (2, 4.0 + 10.0));
        seen(7..9);
        assert_eq!(series(2 * IDLE_MS, &|_| true), (3, 6.0 + 2.0 + 10.0));
    }
}
