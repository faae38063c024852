//! The page that Prometheus reads: every series, added up over the loops, as exposition text.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use indexmap::IndexMap;
use metrics::{Key, Label};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};

use super::cell::{BOUNDS_US, HistogramSum};
use super::{Kind, Name, Registry, Series};

/// A number that is not counted but looked up when the page is rendered.
pub struct Reading {
    pub name: &'static Name,
    pub labels: Vec<(&'static str, &'static str)>,
    pub value: u64,
}

type Sums<T> = BTreeMap<&'static str, Vec<(Vec<Label>, T)>>;

/// Renders all of `names` that have a series, in their order.
pub fn render(registry: &Registry, names: &[&'static Name], readings: &[Reading]) -> String {
    let mut cells = sum(&registry.cells, |total: &mut u64, cell| *total = total.wrapping_add(cell.get()));
    let mut histograms = sum(&registry.histograms, |total: &mut HistogramSum, histogram| histogram.add_to(total));
    for reading in readings {
        let labels = reading.labels.iter().map(|(key, value)| Label::new(*key, *value)).collect();
        cells.entry(reading.name.name).or_default().push((labels, reading.value));
    }
    let mut text = String::new();
    for name in names {
        match name.kind {
            Kind::Counter => write_cells(&mut text, name, "counter", cells.remove(name.name)),
            Kind::Gauge => write_cells(&mut text, name, "gauge", cells.remove(name.name)),
            Kind::Histogram => write_histograms(&mut text, name, histograms.remove(name.name)),
        }
    }
    text
}

fn sum<T, S: Default>(series: &Mutex<Series<T>>, add: impl Fn(&mut S, &T)) -> Sums<S> {
    let series = series.lock().unwrap_or_else(PoisonError::into_inner);
    let mut sums: Sums<S> = BTreeMap::new();
    for ((name, labels), owners) in series.iter() {
        let mut total = S::default();
        owners.values().for_each(|cell| add(&mut total, cell));
        sums.entry(*name).or_default().push((labels.clone(), total));
    }
    sums
}

fn label_set(labels: Vec<Label>) -> LabelSet {
    LabelSet::from_key_and_global(&Key::from_parts("", labels), &IndexMap::new())
}

fn write_head(text: &mut String, name: &Name, kind: &str) {
    write_help_line(text, name.name, None, None, name.help);
    write_type_line(text, name.name, None, None, kind);
}

fn write_cells(text: &mut String, name: &Name, kind: &str, series: Option<Vec<(Vec<Label>, u64)>>) {
    let Some(series) = series else { return };
    write_head(text, name, kind);
    for (labels, value) in series {
        write_metric_line::<&str, u64>(text, name.name, None, &label_set(labels), None, value, None);
    }
}

fn write_histograms(text: &mut String, name: &Name, series: Option<Vec<(Vec<Label>, HistogramSum)>>) {
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

    static HITS: Name = Name { name: "hits_total", help: "Hits.", kind: Kind::Counter };
    static TOOK: Name = Name { name: "took_seconds", help: "Time taken.", kind: Kind::Histogram };
    static LIVE: Name = Name { name: "live", help: "Alive.", kind: Kind::Gauge };

    #[test]
    fn loops_are_added_up_and_labels_escaped() {
        let registry = Registry::default();
        registry.cell(&HITS, 0, &[("route", "a\"b\\{c}")]).add(2);
        registry.cell(&HITS, 1, &[("route", "a\"b\\{c}")]).add(3);
        registry.cell(&HITS, 1, &[("route", "a\"b\\{c}")]).add(1);
        registry.histogram(&TOOK, 0, &[]).record(Duration::from_micros(3));
        let readings = [Reading { name: &LIVE, labels: vec![("state", "up")], value: 7 }];
        let text = render(&registry, &[&HITS, &TOOK, &LIVE], &readings);
        assert!(text.starts_with("# HELP hits_total Hits.\n# TYPE hits_total counter\n"), "{text}");
        assert!(text.contains("hits_total{route=\"a\\\"b\\\\{c}\"} 6\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"0.000002\"} 0\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"0.000005\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"+Inf\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_sum 0.000003\ntook_seconds_count 1\n"), "{text}");
        assert!(text.ends_with("live{state=\"up\"} 7\n"), "{text}");
    }
}
