//! What the gateway counts: names, one function per event, and the page that Prometheus reads.
//!
//! `cell` holds the numbers, `meter` names the events, `page` adds up and renders. Labels come from
//! the configuration, never from a request, so their number is bounded. This room is told, never
//! asked: nothing in the gateway decides by a metric.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::Label;

pub mod events;
pub mod exposition;
pub mod redis;
pub mod storage;
pub mod upstream;

use storage::{Histogram, MetricCell, RouteCells};

/// A metric's name, what it means, and whether it counts or measures.
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

/// Which loop a cell belongs to.
pub type WorkerId = usize;

type Series<T> = BTreeMap<(&'static str, Vec<Label>), BTreeMap<WorkerId, Arc<T>>>;

/// A route and the names of its rules, in order.
type RouteKey = (String, Vec<String>);

/// All cells of all loops.
#[derive(Debug, Default)]
pub struct Registry {
    cells: Mutex<Series<MetricCell>>,
    histograms: Mutex<Series<Histogram>>,
    routes: Mutex<BTreeMap<RouteKey, BTreeMap<WorkerId, Arc<RouteCells>>>>,
}

impl Registry {
    /// The loop's own cell of a series, made when it is first asked for. Not for the request path:
    /// it takes a lock and compares labels.
    pub fn cell(&self, name: &Metric, owner: WorkerId, labels: &[(&'static str, &str)]) -> Arc<MetricCell> {
        series_entry(&self.cells, name, owner, labels)
    }

    /// Forgets all series of a metric, where what they were about may be gone.
    fn remove(&self, name: &Metric) {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner).retain(|(known, _), _| *known != name.name);
    }

    /// Removes the series that nothing counts in any more, because a reload took away what they were about and the last
    /// request of the former configuration has ended. A series stays as a whole while one loop holds its cell: a
    /// counter must not go down.
    pub fn remove_unused(&self) {
        retain_used(&self.cells);
        retain_used(&self.histograms);
        retain_used(&self.routes);
    }

    pub fn histogram(&self, name: &Metric, owner: WorkerId, labels: &[(&'static str, &str)]) -> Arc<Histogram> {
        series_entry(&self.histograms, name, owner, labels)
    }

    pub fn route(&self, owner: WorkerId, route: &str, rules: &[&str]) -> Arc<RouteCells> {
        let key = (route.to_owned(), rules.iter().map(|rule| (*rule).to_owned()).collect());
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let cells = routes.entry(key).or_default().entry(owner);
        Arc::clone(cells.or_insert_with(|| Arc::new(RouteCells::new(rules.len()))))
    }
}

fn retain_used<K: Ord, T>(series: &Mutex<BTreeMap<K, BTreeMap<WorkerId, Arc<T>>>>) {
    let mut series = series.lock().unwrap_or_else(PoisonError::into_inner);
    // Those who count hold a reference beside the registry's, and get it under this lock.
    series.retain(|_, owners| owners.values().any(|cell| Arc::strong_count(cell) > 1));
}

fn series_entry<T: Default>(
    series: &Mutex<Series<T>>,
    name: &Metric,
    owner: WorkerId,
    labels: &[(&'static str, &str)],
) -> Arc<T> {
    let labels = labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
    let mut series = series.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(series.entry((name.name, labels)).or_default().entry(owner).or_default())
}
