//! Renders all series, summed over the workers, in the Prometheus text format 0.0.4 or in OpenMetrics 1.0.
//!
//! The formats differ in the names of counters, in units and in the last line. Bounds of buckets are written alike, so that a
//! series does not depend on the format of the scrape.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

use metrics::{Key, Label};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};

use super::events::{DECISIONS, OUTCOMES, REQUEST_DURATION, REQUESTS};
use super::storage::{BOUNDS_US, HistogramSum};
use super::{Metric, MetricKind, Registry, Series};

/// A text format of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Prometheus text format, version 0.0.4.
    Prometheus,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Format {
    pub fn media_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

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

/// Units of metrics, at the end of their names.
const UNITS: [&str; 2] = ["seconds", "bytes"];

type Sums<T> = BTreeMap<&'static str, BTreeMap<Vec<Label>, T>>;

/// Renders those of `names` that have a series, in their order.
pub fn render(registry: &Registry, names: &[&'static Metric], readings: &[Reading], format: Format) -> String {
    let mut counts = sum(&registry.cells, |total: &mut u64, cell| *total = total.wrapping_add(cell.get()));
    let mut histograms = sum(&registry.histograms, |total: &mut HistogramSum, histogram| histogram.add_to(total));
    add_routes(registry, &mut counts, &mut histograms);
    let mut page = Page { text: String::new(), format };
    for name in names {
        if name.kind == MetricKind::Histogram {
            let is_configured = name.name == REQUEST_DURATION.name;
            let bounds_us = if is_configured { &*registry.request_bounds_us } else { &BOUNDS_US };
            page.write_histograms(name, bounds_us, histograms.remove(name.name).unwrap_or_default());
            continue;
        }
        let counts = counts.remove(name.name).unwrap_or_default().into_iter().map(|(labels, value)| match name.kind {
            MetricKind::Gauge => (labels, value as i64 as f64),
            _ => (labels, value as f64),
        });
        let read = readings.iter().filter(|reading| reading.name.name == name.name);
        let read = read.map(|reading| (reading.labels.clone(), reading.value));
        page.write_values(name, counts.chain(read));
    }
    if format == Format::OpenMetrics {
        page.text.push_str("# EOF\n");
    }
    page.text
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
            cells.add_buckets_to(durations.entry(label(&[])).or_default());
        }
    }
}

/// A page that is being written.
struct Page {
    text: String,
    format: Format,
}

impl Page {
    /// The lines before the first sample of a metric.
    fn write_head(&mut self, name: &Metric) {
        let kind = match name.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        // In OpenMetrics `_total` belongs to the sample.
        let family = match self.format {
            Format::Prometheus => name.name,
            Format::OpenMetrics => name.name.strip_suffix("_total").unwrap_or(name.name),
        };
        write_help_line(&mut self.text, family, None, None, name.help);
        write_type_line(&mut self.text, family, None, None, kind);
        let unit = UNITS.iter().find(|unit| family.strip_suffix(**unit).is_some_and(|rest| rest.ends_with('_')));
        if let (Some(unit), Format::OpenMetrics) = (unit, self.format) {
            self.text.push_str(&format!("# UNIT {family} {unit}\n"));
        }
    }

    fn write_values(&mut self, name: &Metric, series: impl Iterator<Item = (Vec<Label>, f64)>) {
        let mut series = series.peekable();
        if series.peek().is_some() {
            self.write_head(name);
        }
        for (labels, value) in series {
            self.write_sample(name.name, None, &label_set(labels), None, value);
        }
    }

    fn write_histograms(&mut self, name: &Metric, bounds_us: &[u64], series: BTreeMap<Vec<Label>, HistogramSum>) {
        if !series.is_empty() {
            self.write_head(name);
        }
        for (labels, sum) in series {
            let labels = label_set(labels);
            let mut count = 0;
            for (bound_us, n) in bounds_us.iter().zip(&sum.buckets) {
                count += n;
                self.write_sample(name.name, Some("bucket"), &labels, Some(&bound_text(*bound_us)), count);
            }
            count += sum.buckets[bounds_us.len()];
            self.write_sample(name.name, Some("bucket"), &labels, Some("+Inf"), count);
            self.write_sample(name.name, Some("sum"), &labels, None, sum.sum_ns as f64 / 1e9);
            self.write_sample(name.name, Some("count"), &labels, None, count);
        }
    }

    /// `le` is the bound of a bucket.
    fn write_sample(
        &mut self,
        name: &str,
        suffix: Option<&'static str>,
        labels: &LabelSet,
        le: Option<&str>,
        value: impl Display,
    ) {
        write_metric_line(&mut self.text, name, suffix, labels, le.map(|bound| ("le", bound)), value, None);
    }
}

/// `LabelSet` takes a backslash for the beginning of an escape, and would drop it before a quotation mark or write `\\` for two.
/// Of doubled backslashes it writes each pair as it is: the escape of one backslash.
fn label_set(labels: Vec<Label>) -> LabelSet {
    let doubled = labels.into_iter().map(|label| {
        let (key, value) = label.into_parts();
        Label::new(key, value.replace('\\', r"\\"))
    });
    LabelSet::from_key_and_global(&Key::from_parts("", doubled.collect::<Vec<_>>()), &Default::default())
}

/// A bound in seconds as OpenMetrics writes it: with a point, or with an exponent of two digits.
fn bound_text(bound_us: u64) -> String {
    let bound = bound_us as f64 / 1e6;
    match format!("{bound:e}").split_once("e-") {
        Some((digits, exponent)) if bound < 1e-4 => format!("{digits}e-{exponent:0>2}"),
        _ => format!("{bound:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::time::Duration;

    use transom_limiter::handles::Handle;

    use super::super::WorkerId;

    static HITS: Metric = Metric { name: "hits_total", help: "Hits.", kind: MetricKind::Counter };
    static TOOK: Metric = Metric { name: "took_seconds", help: "Time taken.", kind: MetricKind::Histogram };
    static LIVE: Metric = Metric { name: "live", help: "Alive.", kind: MetricKind::Gauge };

    #[test]
    fn workers_are_summed_and_labels_escaped() {
        let registry = Registry::default();
        registry.cell(&HITS, WorkerId::at(0), &[("route", "a\"b\\{c}")]).add(2);
        registry.cell(&HITS, WorkerId::at(1), &[("route", "a\"b\\{c}")]).add(3);
        registry.cell(&HITS, WorkerId::at(1), &[("route", "a\"b\\{c}")]).add(1);
        registry.histogram(&TOOK, WorkerId::at(0), &[]).record(Duration::from_micros(3));
        let live = |state, value| Reading::new(&LIVE, &[("state", state)], value);
        let readings = [live("below", -7.0), live("up", 7.5)];
        let text = render(&registry, &[&HITS, &TOOK, &LIVE], &readings, Format::Prometheus);
        assert!(text.starts_with("# HELP hits_total Hits.\n# TYPE hits_total counter\n"), "{text}");
        assert!(text.contains("hits_total{route=\"a\\\"b\\\\{c}\"} 6\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"2e-06\"} 0\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"5e-06\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_bucket{le=\"+Inf\"} 1\n"), "{text}");
        assert!(text.contains("took_seconds_sum 0.000003\ntook_seconds_count 1\n"), "{text}");
        assert!(text.ends_with("live{state=\"below\"} -7\nlive{state=\"up\"} 7.5\n"), "{text}");
    }

    #[test]
    fn openmetrics_names_units_and_ends() {
        let registry = Registry::new(&[Duration::from_millis(5), Duration::from_secs(1)]);
        registry.cell(&HITS, WorkerId::at(0), &[("route", "a\nb\\\\\"")]).add(2);
        registry.histogram(&TOOK, WorkerId::at(0), &[]).record(Duration::from_micros(3));
        registry.route(WorkerId::at(0), "r", &[]).request_ended(200, Duration::from_millis(7));
        let text = render(&registry, &[&HITS, &TOOK, &REQUEST_DURATION, &LIVE], &[], Format::OpenMetrics);
        let hits = "# HELP hits Hits.\n# TYPE hits counter\nhits_total{route=\"a\\nb\\\\\\\\\\\"\"} 2\n";
        assert!(text.starts_with(hits), "{text}");
        assert!(text.contains("# TYPE took_seconds histogram\n# UNIT took_seconds seconds\n"), "{text}");
        let buckets = "_bucket{route=\"r\",le=\"0.005\"} 0\n\
             transom_request_duration_seconds_bucket{route=\"r\",le=\"1.0\"} 1\n\
             transom_request_duration_seconds_bucket{route=\"r\",le=\"+Inf\"} 1\n\
             transom_request_duration_seconds_sum{route=\"r\"} 0.007\n";
        assert!(text.contains(buckets), "{text}");
        assert!(text.ends_with("\n# EOF\n") && !text.contains("live"), "{text}");
    }

    /// Label values of up to seven signs, among them those that need escapes.
    fn label_values() -> impl Iterator<Item = String> {
        let words = |length: u32| (0..4usize.pow(length)).map(move |number| (number, length));
        (0..=7).flat_map(words).map(|(number, length)| {
            (0..length).map(|place| ['\\', '"', '\n', 'n'][number / 4usize.pow(place) % 4]).collect()
        })
    }

    #[test]
    fn labels_are_escaped_as_the_formats_define() {
        let registry = Registry::default();
        label_values().for_each(|value| registry.cell(&HITS, WorkerId::at(0), &[("route", &value)]).add(1));
        let escaped = |value: String| value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
        let expected: BTreeSet<String> =
            label_values().map(|value| format!("hits_total{{route=\"{}\"}} 1", escaped(value))).collect();
        for format in [Format::Prometheus, Format::OpenMetrics] {
            let text = render(&registry, &[&HITS], &[], format);
            let samples: BTreeSet<String> =
                text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
            assert_eq!(samples.len(), 21_845);
            assert_eq!(samples.symmetric_difference(&expected).next(), None, "{format:?}");
        }
    }

    /// A suffix is left out after a name that ends with it.
    #[test]
    fn names_do_not_end_with_a_suffix_of_histograms() {
        for metric in crate::metrics::events::NAMES {
            let is_suffixed = ["bucket", "sum", "count"].iter().any(|suffix| metric.name.ends_with(suffix));
            assert!(!is_suffixed || metric.kind != MetricKind::Histogram, "{metric:?}");
        }
    }

    /// OpenMetrics also escapes quotation marks in help texts, the other format does not.
    #[test]
    fn help_texts_need_no_escapes() {
        for metric in crate::metrics::events::NAMES {
            assert!(!metric.help.contains(['\\', '"', '\n']), "{metric:?}");
            assert_eq!(metric.kind == MetricKind::Counter, metric.name.ends_with("_total"), "{metric:?}");
        }
    }

    #[test]
    fn bounds_are_canonical() {
        let texts: Vec<String> = [1, 25, 99, 100, 2_500, 1_000_000, 30_000_000, 3_600_000_000].map(bound_text).into();
        assert_eq!(texts, ["1e-06", "2.5e-05", "9.9e-05", "0.0001", "0.0025", "1.0", "30.0", "3600.0"]);
    }
}
