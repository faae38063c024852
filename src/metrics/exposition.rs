//! Renders all series, summed over the workers, in the Prometheus text format.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use indexmap::IndexMap;
use metrics::{Key, Label};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};

use super::events::{DECISIONS, OUTCOMES, REQUEST_DURATION, REQUESTS};
use super::storage::{BOUNDS_US, HistogramSum};
use super::{Metric, MetricKind, Registry, Series};

/// A value that is read when the metrics are rendered.
pub struct Reading {
    pub name: &'static Metric,
    labels: Vec<Label>,
    pub value: f64,
}

impl Reading {
    pub fn new(name: &'static Metric, labels: &[(&'static str, &str)], value: f64) -> Reading {
        let labels = labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
        Reading { name, labels, value }
    }
}

type Sums<T> = BTreeMap<&'static str, BTreeMap<Vec<Label>, T>>;

/// Renders those of `names` that have a series, in their order.
pub fn render(registry: &Registry, names: &[&'static Metric], readings: &[Reading]) -> String {
    let mut counts = sum(&registry.cells, |total: &mut u64, cell| *total = total.wrapping_add(cell.get()));
    let mut histograms = sum(&registry.histograms, |total: &mut HistogramSum, histogram| histogram.add_to(total));
    add_routes(registry, &mut counts, &mut histograms);
    let mut text = String::new();
    for name in names {
        let kind = match name.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => {
                write_histograms(&mut text, name, histograms.remove(name.name));
                continue;
            }
        };
        let counts = counts.remove(name.name).unwrap_or_default().into_iter().map(|(labels, value)| match name.kind {
            MetricKind::Gauge => (labels, value as i64 as f64),
            _ => (labels, value as f64),
        });
        let read = readings.iter().filter(|reading| reading.name.name == name.name);
        let read = read.map(|reading| (reading.labels.clone(), reading.value));
        write_values(&mut text, name, kind, counts.chain(read));
    }
    text
}

fn sum<T, S: Default>(series: &Mutex<Series<T>>, add: impl Fn(&mut S, &T)) -> Sums<S> {
    let series = series.lock().unwrap_or_else(PoisonError::into_inner);
    let mut sums: Sums<S> = BTreeMap::new();
    for ((name, labels), owners) in series.iter() {
        let total = sums.entry(*name).or_default().entry(labels.clone()).or_default();
        owners.values().for_each(|cell| add(total, cell));
    }
    sums
}

/// Adds the series of `RouteCells`.
fn add_routes(registry: &Registry, counts: &mut Sums<u64>, histograms: &mut Sums<HistogramSum>) {
    let routes = registry.routes.lock().unwrap_or_else(PoisonError::into_inner);
    for ((route, rules), owners) in routes.iter() {
        let label = |more: &[(&'static str, &str)]| -> Vec<Label> {
            let more = more.iter().map(|(key, value)| Label::new(*key, (*value).to_owned()));
            std::iter::once(Label::new("route", route.clone())).chain(more).collect()
        };
        let mut count =
            |name: &Metric, labels, n| *counts.entry(name.name).or_default().entry(labels).or_default() += n;
        for cells in owners.values() {
            for (code, n) in cells.codes.counts() {
                count(&REQUESTS, label(&[("code", &code)]), n);
            }
            for (rule, outcomes) in rules.iter().zip(&cells.outcomes) {
                for (outcome, cell) in OUTCOMES.iter().zip(outcomes) {
                    count(&DECISIONS, label(&[("rule", rule), ("outcome", outcome)]), cell.get());
                }
            }
            let durations = histograms.entry(REQUEST_DURATION.name).or_default();
            cells.duration.add_to(durations.entry(label(&[])).or_default());
        }
    }
}

fn label_set(labels: Vec<Label>) -> LabelSet {
    LabelSet::from_key_and_global(&Key::from_parts("", labels), &IndexMap::new())
}

fn write_head(text: &mut String, name: &Metric, kind: &str) {
    write_help_line(text, name.name, None, None, name.help);
    write_type_line(text, name.name, None, None, kind);
}

fn write_values(text: &mut String, name: &Metric, kind: &str, series: impl Iterator<Item = (Vec<Label>, f64)>) {
    let mut series = series.peekable();
    if series.peek().is_some() {
        write_head(text, name, kind);
    }
    for (labels, value) in series {
        write_metric_line::<&str, f64>(text, name.name, None, &label_set(labels), None, value, None);
    }
}

fn write_histograms(text: &mut String, name: &Metric, series: Option<BTreeMap<Vec<Label>, HistogramSum>>) {
    let Some(series) = series else { return };
    write_head(text, name, "histogram");
    for (labels, sum) in series {
        let labels = label_set(labels);
        let mut count = 0;
        for (bound_us, n) in BOUNDS_US.iter().zip(&sum.buckets) {
            count += n;
            let le = *bound_us as f64 / 1e6;
            write_metric_line(text, name.name, Some("bucket"), &labels, Some(("le", le)), count, None);
        }
        count += sum.buckets[BOUNDS_US.len()];
        write_metric_line(text, name.name, Some("bucket"), &labels, Some(("le", "+Inf")), count, None);
        let seconds = sum.sum_ns as f64 / 1e9;
        write_metric_line::<&str, f64>(text, name.name, Some("sum"), &labels, None, seconds, None);
        write_metric_line::<&str, u64>(text, name.name, Some("count"), &labels, None, count, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    static HITS: Metric = Metric { name: "hits_total", help: "Hits.", kind: MetricKind::Counter };
    static TOOK: Metric = Metric { name: "took_seconds", help: "Time taken.", kind: MetricKind::Histogram };
    static LIVE: Metric = Metric { name: "live", help: "Alive.", kind: MetricKind::Gauge };

    #[test]
    fn workers_are_summed_and_labels_escaped() {
        let registry = Registry::default();
        registry.cell(&HITS, 0, &[("route", "a\"b\\{c}")]).add(2);
        registry.cell(&HITS, 1, &[("route", "a\"b\\{c}")]).add(3);
        registry.cell(&HITS, 1, &[("route", "a\"b\\{c}")]).add(1);
        registry.histogram(&TOOK, 0, &[]).record(Duration::from_micros(3));
        let live = |state, value| Reading::new(&LIVE, &[("state", state)], value);
        let readings = [live("below", -7.0), live("up", 7.5)];
        let text = render(&registry, &[&HITS, &TOOK, &LIVE], &readings);
        assert!(text.starts_with("# HELP hits_total Hits.\n# TYPE hits_total counter\n"), "{text}");
        assert!(text.contains("hits_total{route=\"a\\\"b\\\\{c}\"} 6\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"0.000002\"} 0\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"0.000005\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"+Inf\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_sum 0.000003\ntook_seconds_count 1\n"), "{text}");
        assert!(text.ends_with("live{state=\"below\"} -7\nlive{state=\"up\"} 7.5\n"), "{text}");
    }
}
