//! Sums of the cells of all workers, and what was counted between two readings: for the dashboard.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use metrics::Label;

use super::events::{DECISIONS, OUTCOMES, REFUSED, REQUEST_ERRORS, USAGE};
use super::storage::HistogramSum;
use super::{Metric, Registry};

/// What was counted since the start of the process, or between two readings.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// By route. The empty name stands for requests without a route.
    pub routes: BTreeMap<String, RouteTotals>,
    /// By route and rule, in the order of [`OUTCOMES`].
    pub decisions: BTreeMap<(String, String), [u64; OUTCOMES.len()]>,
    /// Refused requests by rule and window.
    pub windows: BTreeMap<(String, String), u64>,
    /// Usage that responses have stated, by rule and kind.
    pub usage: BTreeMap<(String, String), u64>,
    /// Failed requests by error.
    pub errors: BTreeMap<String, u64>,
}

/// The requests of one route.
#[derive(Clone, Debug, Default)]
pub struct RouteTotals {
    pub requests: u64,
    /// Refused by a rule.
    pub refused: u64,
    /// With a response of class 5xx.
    pub failed: u64,
    pub duration: HistogramSum,
}

impl Totals {
    pub fn read(registry: &Registry) -> Totals {
        let mut totals = Totals::default();
        let routes = registry.routes.lock().unwrap_or_else(PoisonError::into_inner);
        for ((route, rules), owners) in routes.iter() {
            let sum = totals.routes.entry(route.clone()).or_default();
            for cells in owners.values() {
                let (requests, failed) = cells.codes.requests_and_failures();
                sum.requests += requests;
                sum.failed += failed;
                sum.refused += cells.refused.get();
                cells.duration.add_to(&mut sum.duration);
            }
            for (position, rule) in rules.iter().enumerate() {
                let outcomes = totals.decisions.entry((route.clone(), rule.clone())).or_default();
                for cells in owners.values() {
                    let counted = outcomes.iter_mut().zip(&cells.outcomes[position]);
                    counted.for_each(|(sum, cell)| *sum += cell.get());
                }
            }
        }
        drop(routes);
        registry.sum_cells(&DECISIONS, |labels, sum| {
            let outcomes = totals.decisions.entry((value(labels, "route"), value(labels, "rule"))).or_default();
            let outcome = OUTCOMES.iter().position(|outcome| *outcome == value(labels, "outcome"));
            outcome.into_iter().for_each(|outcome| outcomes[outcome] += sum);
        });
        registry.sum_cells(&REFUSED, |labels, sum| {
            *totals.windows.entry((value(labels, "rule"), value(labels, "window"))).or_default() += sum;
        });
        registry.sum_cells(&USAGE, |labels, sum| {
            *totals.usage.entry((value(labels, "rule"), value(labels, "kind"))).or_default() += sum;
        });
        registry.sum_cells(&REQUEST_ERRORS, |labels, sum| {
            *totals.errors.entry(value(labels, "error")).or_default() += sum;
        });
        totals
    }

    /// What was counted since an earlier reading, without what stayed the same. A reload removes series.
    pub fn since(&self, earlier: &Totals) -> Totals {
        let count = |now: u64, before: u64| now.saturating_sub(before);
        let mut totals = Totals::default();
        for (route, sum) in &self.routes {
            let before = earlier.routes.get(route).cloned().unwrap_or_default();
            let counted = RouteTotals {
                requests: count(sum.requests, before.requests),
                refused: count(sum.refused, before.refused),
                failed: count(sum.failed, before.failed),
                duration: sum.duration.since(&before.duration),
            };
            if counted.requests + counted.refused > 0 {
                totals.routes.insert(route.clone(), counted);
            }
        }
        for (names, sum) in &self.decisions {
            let before = earlier.decisions.get(names).copied().unwrap_or_default();
            let counted = std::array::from_fn(|outcome| count(sum[outcome], before[outcome]));
            if counted != [0; OUTCOMES.len()] {
                totals.decisions.insert(names.clone(), counted);
            }
        }
        totals.windows = changes(&self.windows, &earlier.windows);
        totals.usage = changes(&self.usage, &earlier.usage);
        totals.errors = changes(&self.errors, &earlier.errors);
        totals
    }
}

fn changes<K: Ord + Clone>(now: &BTreeMap<K, u64>, before: &BTreeMap<K, u64>) -> BTreeMap<K, u64> {
    let change = |key: &K, sum: u64| sum.saturating_sub(before.get(key).copied().unwrap_or_default());
    let changes = now.iter().map(|(key, sum)| (key.clone(), change(key, *sum)));
    changes.filter(|(_, change)| *change > 0).collect()
}

/// The value of a label; empty without it.
pub fn value(labels: &[Label], name: &str) -> String {
    labels.iter().find(|label| label.key() == name).map(|label| label.value().to_owned()).unwrap_or_default()
}

impl Registry {
    /// Passes the labels of each series of a counter or gauge with the sum over all workers.
    pub fn sum_cells(&self, metric: &Metric, mut add: impl FnMut(&[Label], u64)) {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let first = (metric.name, Vec::new());
        for ((_, labels), owners) in cells.range(first..).take_while(|((name, _), _)| *name == metric.name) {
            add(labels, owners.values().fold(0, |sum: u64, cell| sum.wrapping_add(cell.get())));
        }
    }

    /// The sum over all series of a gauge or counter.
    pub fn total(&self, metric: &Metric) -> u64 {
        let mut total: u64 = 0;
        self.sum_cells(metric, |_, sum| total = total.wrapping_add(sum));
        total
    }

    /// The sum over all series of a histogram.
    pub fn total_duration(&self, metric: &Metric) -> HistogramSum {
        let histograms = self.histograms.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = HistogramSum::default();
        let first = (metric.name, Vec::new());
        for (_, owners) in histograms.range(first..).take_while(|((name, _), _)| *name == metric.name) {
            owners.values().for_each(|histogram: &Arc<_>| histogram.add_to(&mut total));
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::super::WorkerId;
    use super::super::events::{DecisionMetrics, RouteMetrics};
    use super::*;
    use std::time::Duration;
    use transom_limiter::handles::{Handle, LimitNameId, PlanPosition, RuleId};

    #[test]
    fn a_difference_has_what_all_workers_counted_since_the_earlier_reading() {
        let registry = Registry::default();
        let workers = [0, 1].map(|worker| RouteMetrics::new(&registry, WorkerId::at(worker), "a", &["r", "s"]));
        let idle = RouteMetrics::new(&registry, WorkerId::at(0), "idle", &["r"]);
        idle.request_ended(200, Duration::from_millis(3));
        let api = DecisionMetrics::new(&registry, WorkerId::at(2), "api", &[("r", vec!["r-minute"])]);
        workers[0].admitted(PlanPosition::at(0));
        let before = Totals::read(&registry);
        for worker in &workers {
            worker.request_ended(200, Duration::from_millis(3));
            worker.admitted(PlanPosition::at(0));
            worker.shadowed(PlanPosition::at(1));
        }
        workers[1].request_ended(503, Duration::from_millis(30));
        workers[1].request_ended(429, Duration::ZERO);
        workers[1].refused(PlanPosition::at(0));
        workers[1].request_refused();
        api.refused(RuleId::at(0));
        api.refused_by(RuleId::at(0), LimitNameId::at(0));
        let since = Totals::read(&registry).since(&before);
        assert_eq!(since.routes.keys().collect::<Vec<_>>(), ["a"]);
        let route = &since.routes["a"];
        assert_eq!((route.requests, route.refused, route.failed), (4, 1, 1));
        assert_eq!(route.duration.buckets.iter().sum::<u64>(), 4);
        let names = |route: &str, rule: &str| (route.to_owned(), rule.to_owned());
        assert_eq!(since.decisions[&names("a", "r")], [2, 1, 0, 0, 0]);
        assert_eq!(since.decisions[&names("a", "s")], [0, 0, 0, 2, 0]);
        assert_eq!(since.decisions[&names("api", "r")], [0, 1, 0, 0, 0]);
        assert_eq!(since.decisions.len(), 3);
        assert_eq!(since.windows, BTreeMap::from([(names("r", "r-minute"), 1)]));
        // Series that were removed count nothing.
        assert!(Totals::default().since(&before).routes.is_empty());
    }
}
