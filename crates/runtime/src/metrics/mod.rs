//! Prometheus metrics.
//!
//! `storage` holds the numbers, `events`, `redis` and `upstream` define metrics with one function per event, `process` reads
//! those of the process, `clients` counts by client, `exposition` sums and renders, `totals` and `reload_log` are for the dashboard. Labels come from the
//! configuration, never from a request, so their number is bounded. No decision of the gateway depends on a metric.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::Label;

use transom_limiter::handles;

pub mod clients;
pub mod events;
pub mod exposition;
pub mod process;
pub mod redis;
pub mod reload_log;
pub mod storage;
pub mod totals;
pub mod upstream;

use clients::CountedClients;
use reload_log::ReloadLog;
use storage::{Histogram, MetricCell, REQUEST_BOUNDS_MAX, RouteCells};

/// Definition of a metric.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub help: &'static str,
    pub kind: MetricKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

handles! {
    /// Owner of a cell: a worker, or what is counted once per process.
    WorkerId,
}

impl WorkerId {
    /// The process.
    pub const PROCESS: WorkerId = WorkerId(u32::MAX);

    /// A thread beside the workers. `nth`: the number of earlier ones of its kind, so that each has cells of its own.
    pub fn of_thread(nth: usize) -> WorkerId {
        WorkerId(u32::MAX - 1 - nth as u32)
    }
}

type Series<T> = BTreeMap<(&'static str, Vec<Label>), BTreeMap<WorkerId, Arc<T>>>;

/// A route and the names of its rules, in order.
type RouteKey = (String, Vec<String>);

pub const fn counter(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Counter }
}

pub const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Gauge }
}

pub const fn histogram(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricKind::Histogram }
}

/// All metric cells of all workers, and the latest reloads.
#[derive(Debug, Default)]
pub struct Registry {
    /// Upper bounds of the buckets of request durations, in microseconds.
    request_bounds_us: Arc<[u64]>,
    cells: Mutex<Series<MetricCell>>,
    histograms: Mutex<Series<Histogram>>,
    routes: Mutex<BTreeMap<RouteKey, BTreeMap<WorkerId, Arc<RouteCells>>>>,
    pub reload_log: ReloadLog,
    pub counted_clients: CountedClients,
}

impl Registry {
    /// `request_buckets`: upper bounds of the buckets of request durations, ascending. Only the first
    /// [`REQUEST_BOUNDS_MAX`] are used.
    pub fn new(request_buckets: &[Duration]) -> Registry {
        let bounds_us = request_buckets.iter().map(|bound| bound.as_micros() as u64);
        Registry { request_bounds_us: bounds_us.take(REQUEST_BOUNDS_MAX).collect(), ..Registry::default() }
    }

    /// The worker's cell of a series, created on first use. Not for the request path: it takes a lock and compares labels.
    pub fn cell(&self, name: &Metric, worker: WorkerId, labels: &[(&'static str, &str)]) -> Arc<MetricCell> {
        series_entry(&self.cells, name, worker, labels)
    }

    /// As [`Registry::cell`], with one label whose values are not bounded by the configuration: once the metric has `max`
    /// values, further ones are counted as `other`.
    pub fn bounded_cell(
        &self,
        name: &Metric,
        worker: WorkerId,
        label: (&'static str, &str),
        max: usize,
    ) -> Arc<MetricCell> {
        let labels = |value: &str| vec![Label::new(label.0, value.to_owned())];
        let mut series = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full =
            |series: &Series<MetricCell>| series.keys().filter(|(known, _)| *known == name.name).count() >= max;
        let is_known = series.contains_key(&(name.name, labels(label.1)));
        if !is_known && is_full(&series) {
            series.retain(|(known, _), owners| *known != name.name || is_used(owners));
        }
        let value = if is_known || !is_full(&series) { label.1 } else { "other" };
        Arc::clone(series.entry((name.name, labels(value))).or_default().entry(worker).or_default())
    }

    /// Removes all series of a metric.
    fn remove(&self, name: &Metric) {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner).retain(|(known, _), _| *known != name.name);
    }

    /// Removes series without users, which a reload left behind once the last request of the old configuration has ended. A
    /// series stays as a whole while one worker holds its cell, because a counter must not decrease.
    pub fn remove_unused(&self) {
        retain_used(&self.cells);
        retain_used(&self.histograms);
        retain_used(&self.routes);
    }

    pub fn histogram(&self, name: &Metric, worker: WorkerId, labels: &[(&'static str, &str)]) -> Arc<Histogram> {
        series_entry(&self.histograms, name, worker, labels)
    }

    pub fn route(&self, worker: WorkerId, route: &str, rules: &[&str]) -> Arc<RouteCells> {
        let key = (route.to_owned(), rules.iter().map(|rule| (*rule).to_owned()).collect());
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let cells = routes.entry(key).or_default().entry(worker);
        Arc::clone(cells.or_insert_with(|| Arc::new(RouteCells::new(rules.len(), &self.request_bounds_us))))
    }
}

fn retain_used<K: Ord, T>(series: &Mutex<BTreeMap<K, BTreeMap<WorkerId, Arc<T>>>>) {
    let mut series = series.lock().unwrap_or_else(PoisonError::into_inner);
    series.retain(|_, owners| is_used(owners));
}

/// Every user holds a reference besides the registry's, and gets it under the lock of the registry.
fn is_used<T>(owners: &BTreeMap<WorkerId, Arc<T>>) -> bool {
    owners.values().any(|cell| Arc::strong_count(cell) > 1)
}

fn series_entry<T: Default>(
    series: &Mutex<Series<T>>,
    name: &Metric,
    worker: WorkerId,
    labels: &[(&'static str, &str)],
) -> Arc<T> {
    let labels = labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
    let mut series = series.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(series.entry((name.name, labels)).or_default().entry(worker).or_default())
}
