//! What the gateway counted in the last hour, in samples of ten seconds, for the dashboard. Memory is bounded: a sample names
//! at most so many routes and rules, and a name is stored once. An upgrade hands the samples over to the new process.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use transom_runtime::metrics::storage::HistogramSum;
use transom_runtime::metrics::totals::Totals;

/// Length of a sample.
pub const SAMPLE_MS: u64 = 10_000;
/// Version of the samples that an upgrade hands over.
pub const FORMAT: u32 = 1;
/// Samples of one hour.
const SAMPLES: usize = 360;
/// Samples of one event, which bounds the memory of a stream whose reader is slow.
const PART: usize = 30;
/// Routes, and rules of routes, that a sample names: those with the most requests.
const ROUTES_MAX: usize = 100;
const RULES_MAX: usize = 200;

/// The samples of the last hour.
#[derive(Debug, Default)]
pub struct History {
    /// The oldest first.
    samples: VecDeque<Kept>,
    /// The number of the oldest sample since the start of the process.
    first: u64,
    /// The reading at the end of the latest sample.
    totals: Totals,
    ended_ms: u64,
    names: HashSet<Arc<str>>,
}

/// A sample of the history.
#[derive(Debug)]
enum Kept {
    Counted(Sample),
    /// A sample of the process that this one replaced, as JSON.
    Former(Box<str>),
}

impl Kept {
    fn to_json(&self) -> Value {
        match self {
            Kept::Counted(sample) => sample.to_json(),
            Kept::Former(text) => serde_json::from_str(text).unwrap_or_default(),
        }
    }
}

/// What was counted in an interval.
#[derive(Debug)]
pub struct Sample {
    /// Unix milliseconds.
    end_ms: u64,
    span_ms: u64,
    all: Requests,
    routes: Vec<(Arc<str>, Requests)>,
    /// Route, rule, and the counts by outcome.
    rules: Vec<(Arc<str>, Arc<str>, [u64; 5])>,
    /// Rule, window, and the refused requests.
    windows: Vec<(Arc<str>, Arc<str>, u64)>,
    errors: Vec<(Arc<str>, u64)>,
    /// Whether the shared store could not be reached at the end.
    is_store_down: bool,
    /// URLs of upstream servers that could not be used at the end.
    servers_down: Vec<Arc<str>>,
}

/// Requests of a route, or of all.
#[derive(Debug)]
struct Requests {
    requests: u64,
    refused: u64,
    failed: u64,
    /// The median and the 99th percentile of the duration, microseconds.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
}

/// What of the gateway is down at the end of a sample.
#[derive(Debug, Default)]
pub struct Down {
    pub is_store_down: bool,
    pub servers: Vec<String>,
}

impl History {
    /// Begins with the first sample.
    pub fn begin(&mut self, now_ms: u64) {
        self.ended_ms = now_ms;
    }

    /// Whether a sample ends.
    pub fn is_due(&self, now_ms: u64) -> bool {
        now_ms / SAMPLE_MS != self.ended_ms / SAMPLE_MS
    }

    /// Adds the sample that ends now.
    pub fn add(&mut self, now_ms: u64, totals: Totals, down: Down) {
        let counted = totals.since(&self.totals);
        let span_ms = now_ms.saturating_sub(self.ended_ms);
        self.drop_oldest();
        self.names.retain(|name| Arc::strong_count(name) > 1);
        let names = &mut self.names;
        let sample = Sample::new(now_ms, span_ms, &counted, down, |name| match names.get(name) {
            Some(known) => Arc::clone(known),
            None => {
                let name: Arc<str> = Arc::from(name);
                names.insert(Arc::clone(&name));
                name
            }
        });
        self.samples.push_back(Kept::Counted(sample));
        (self.totals, self.ended_ms) = (totals, now_ms);
    }

    /// Removes the oldest sample if the history is full.
    fn drop_oldest(&mut self) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
            self.first += 1;
        }
    }

    /// The samples for a process that replaces this one: one of JSON in each line, the oldest first. A change of their form changes
    /// [`FORMAT`].
    pub fn to_text(&self) -> String {
        self.samples.iter().map(|sample| format!("{}\n", sample.to_json())).collect()
    }

    /// Takes over the samples of the process that this one replaces. Lines that are no sample are left out.
    pub fn restore(&mut self, text: &str) {
        for line in text.lines() {
            if serde_json::from_str(line).is_ok_and(|sample: Value| sample["end"].is_u64()) {
                self.drop_oldest();
                self.samples.push_back(Kept::Former(line.into()));
            }
        }
    }

    /// The number of the next sample.
    pub fn next(&self) -> u64 {
        self.first + self.samples.len() as u64
    }

    /// At most `PART` samples from this number on, and the number after them.
    pub fn since(&self, number: u64) -> (Value, u64) {
        let first = number.max(self.first);
        let part = self.samples.iter().skip((first - self.first) as usize).take(PART).map(Kept::to_json);
        (part.collect(), self.next().min(first + PART as u64))
    }
}

impl Sample {
    /// `name` returns a copy of a name to keep.
    pub fn new(
        end_ms: u64,
        span_ms: u64,
        counted: &Totals,
        down: Down,
        mut name: impl FnMut(&str) -> Arc<str>,
    ) -> Sample {
        let mut duration = HistogramSum::default();
        let mut all = Requests { requests: 0, refused: 0, failed: 0, p50_us: None, p99_us: None };
        for route in counted.routes.values() {
            duration.add(&route.duration);
            all.requests += route.requests;
            all.refused += route.refused;
            all.failed += route.failed;
        }
        (all.p50_us, all.p99_us) = quantiles(&duration);
        let mut routes: Vec<_> = counted.routes.iter().collect();
        keep_largest(&mut routes, ROUTES_MAX, |(_, route)| route.requests);
        let routes = routes.into_iter().map(|(route, sum)| {
            let (p50_us, p99_us) = quantiles(&sum.duration);
            let requests =
                Requests { requests: sum.requests, refused: sum.refused, failed: sum.failed, p50_us, p99_us };
            (name(route), requests)
        });
        let routes = routes.collect();
        let mut rules: Vec<_> = counted.decisions.iter().collect();
        keep_largest(&mut rules, RULES_MAX, |(_, outcomes)| outcomes.iter().sum());
        let rules = rules.into_iter().map(|((route, rule), outcomes)| (name(route), name(rule), *outcomes)).collect();
        let mut windows: Vec<_> = counted.windows.iter().collect();
        keep_largest(&mut windows, RULES_MAX, |(_, refused)| **refused);
        let windows = windows.into_iter().map(|((rule, window), refused)| (name(rule), name(window), *refused));
        let windows = windows.collect();
        let errors = counted.errors.iter().map(|(error, count)| (name(error), *count)).collect();
        let servers_down = down.servers.iter().take(ROUTES_MAX).map(|server| name(server)).collect();
        Sample { end_ms, span_ms, all, routes, rules, windows, errors, is_store_down: down.is_store_down, servers_down }
    }

    pub fn to_json(&self) -> Value {
        let numbers = |of: &Requests| json!([of.requests, of.refused, of.failed, of.p50_us, of.p99_us]);
        let routes = self.routes.iter().map(|(route, requests)| json!([&**route, numbers(requests)]));
        json!({
            "end": self.end_ms, "ms": self.span_ms, "all": numbers(&self.all), "routes": routes.collect::<Vec<_>>(),
            "rules": self.rules.iter().map(|(route, rule, counts)| json!([&**route, &**rule, counts])).collect::<Vec<_>>(),
            "windows": self.windows.iter().map(|(rule, window, n)| json!([&**rule, &**window, n])).collect::<Vec<_>>(),
            "errors": self.errors.iter().map(|(error, n)| json!([&**error, n])).collect::<Vec<_>>(),
            "store_down": self.is_store_down,
            "servers_down": self.servers_down.iter().map(|server| &**server).collect::<Vec<_>>(),
        })
    }
}

/// The median and the 99th percentile.
fn quantiles(duration: &HistogramSum) -> (Option<u64>, Option<u64>) {
    (duration.quantile_us(0.5), duration.quantile_us(0.99))
}

fn keep_largest<T>(items: &mut Vec<T>, max: usize, size: impl Fn(&T) -> u64) {
    if items.len() > max {
        items.sort_by_key(|item| std::cmp::Reverse(size(item)));
        items.truncate(max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_runtime::metrics::totals::RouteTotals;

    fn totals(routes: usize, requests: u64) -> Totals {
        let mut totals = Totals::default();
        for route in 0..routes {
            let name = format!("route-{route}");
            let requests = requests * (route as u64 + 1);
            totals.routes.insert(name.clone(), RouteTotals { requests, ..RouteTotals::default() });
            totals.decisions.insert((name, String::from("r")), [requests, 0, 0, 0, 0]);
        }
        totals
    }

    #[test]
    fn the_samples_of_one_hour_are_kept() {
        let mut history = History::default();
        history.begin(1_000_500);
        assert!(!history.is_due(1_009_999));
        for n in 1..=400 {
            let now_ms = 1_000_000 + n * SAMPLE_MS;
            assert!(history.is_due(now_ms));
            history.add(now_ms, totals(2, n), Down::default());
            assert!(!history.is_due(now_ms + SAMPLE_MS - 1));
        }
        assert_eq!((history.samples.len(), history.next()), (SAMPLES, 400));
        // Two routes and a rule.
        assert_eq!(history.names.len(), 3);
        let (mut all, mut next) = (Vec::new(), 0);
        while next < history.next() {
            let (part, after) = history.since(next);
            assert!(part.as_array().is_some_and(|part| part.len() <= PART));
            all.extend(part.as_array().cloned().unwrap_or_default());
            next = after;
        }
        assert_eq!(all.len(), SAMPLES);
        assert_eq!((&all[0]["end"], &all[0]["ms"]), (&json!(1_410_000), &json!(10_000)));
        assert_eq!(all[0]["all"], json!([3, 0, 0, null, null]));
        assert_eq!(all[0]["routes"][1], json!(["route-1", [2, 0, 0, null, null]]));
        assert_eq!(history.since(399), (json!([all[359]]), 400));
        assert_eq!(history.since(400), (json!([]), 400));
        // A reading of another registry: nothing is negative.
        history.add(9_000_000, totals(1, 0), Down { is_store_down: true, servers: vec![String::from("http://a")] });
        let last = &history.since(400).0[0];
        assert_eq!(
            (&last["all"][0], &last["store_down"], &last["servers_down"]),
            (&json!(0), &json!(true), &json!(["http://a"]))
        );
    }

    #[test]
    fn samples_are_handed_over() {
        let (mut old, mut new) = (History::default(), History::default());
        (1..=400).for_each(|n| old.add(n * SAMPLE_MS, totals(2, n), Down::default()));
        new.restore(&(old.to_text() + "{}\nno sample\n"));
        assert_eq!((new.samples.len(), new.to_text()), (SAMPLES, old.to_text()));
        assert_eq!(new.since(0).0, old.since(0).0);
        new.begin(401 * SAMPLE_MS);
        new.add(402 * SAMPLE_MS, totals(2, 1), Down::default());
        assert_eq!((new.samples.len(), new.next()), (SAMPLES, 361));
        // And again to the next process.
        let mut next = History::default();
        next.restore(&new.to_text());
        assert_eq!(next.to_text(), new.to_text());
        assert_eq!(next.since(359).0[0]["all"][0], json!(3));
    }

    #[test]
    fn a_sample_names_a_bounded_number_of_routes_and_rules() {
        let mut history = History::default();
        history.add(SAMPLE_MS, totals(1000, 1), Down::default());
        let sample = &history.since(0).0[0];
        assert_eq!(sample["routes"].as_array().map(Vec::len), Some(ROUTES_MAX));
        assert_eq!(sample["rules"].as_array().map(Vec::len), Some(RULES_MAX));
        // The busiest are named, and all are counted.
        assert_eq!(sample["routes"][0][0], json!("route-999"));
        assert_eq!(sample["all"][0], json!(1000 * 1001 / 2));
        // Names that no sample uses are dropped.
        for n in 0..=SAMPLES as u64 {
            history.add((n + 2) * SAMPLE_MS, Totals::default(), Down::default());
        }
        assert_eq!(history.names.len(), 0);
    }
}
