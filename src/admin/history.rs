//! What the gateway counted in the last hour, in samples of ten seconds, and in the last 6 and 24 hours, in longer ones, for the
//! dashboard; and what was down meanwhile. Memory is bounded: a sample names at most so many routes and rules, and a name is stored
//! once. An upgrade hands the history over to the new process.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use transom_runtime::metrics::storage::HistogramSum;
use transom_runtime::metrics::totals::Totals;

/// The ranges of time that are kept: the length of a sample, and the number of samples. The first has the shortest samples, and
/// the ends of samples of each are those of samples of the ranges before.
const RANGES: [(u64, usize); 3] = [(10_000, 360), (120_000, 180), (600_000, 144)];
/// Version of the history that an upgrade hands over.
pub const FORMAT: u32 = 2;
/// Samples of one event, which bounds the memory of a stream whose reader is slow.
const PART: usize = 30;
/// Routes, and rules of routes, that a sample names: those with the most requests.
const ROUTES_MAX: usize = 100;
const RULES_MAX: usize = 200;
/// Downtimes that are kept.
const DOWNTIMES: usize = 500;
/// What is down again within so many milliseconds was down meanwhile: two samples.
const SAME_DOWNTIME_MS: u64 = 25_000;

/// A range of the history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range(usize);

impl Range {
    /// The shortest range that has so many hours.
    pub fn of_hours(hours: u64) -> Range {
        let reaches =
            |(length_ms, samples): &(u64, usize)| length_ms * *samples as u64 >= hours.saturating_mul(3_600_000);
        Range(RANGES.iter().position(reaches).unwrap_or(RANGES.len() - 1))
    }
}

/// What was counted in the last 24 hours.
#[derive(Debug, Default)]
pub struct History {
    ranges: [Samples; RANGES.len()],
    /// The latest last.
    downtimes: VecDeque<Downtime>,
    names: HashSet<Arc<str>>,
}

/// The samples of one range.
#[derive(Debug, Default)]
struct Samples {
    /// The oldest first.
    samples: VecDeque<Kept>,
    /// The number of the oldest sample since the start of the process.
    first: u64,
    /// The reading at the end of the latest sample.
    totals: Totals,
    ended_ms: u64,
}

/// An interval in which something was down.
#[derive(PartialEq, Eq, Debug)]
struct Downtime {
    /// The URL of an upstream server; empty for the shared store.
    what: Arc<str>,
    /// Unix milliseconds.
    start_ms: u64,
    end_ms: u64,
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

    fn end_ms(&self) -> u64 {
        match self {
            Kept::Counted(sample) => sample.end_ms,
            Kept::Former(_) => self.to_json()["end"].as_u64().unwrap_or(0),
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
    /// Rule, kind of usage, and the sum of the responses.
    usage: Vec<(Arc<str>, Arc<str>, u64)>,
    errors: Vec<(Arc<str>, u64)>,
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

impl History {
    /// Begins with the first sample.
    pub fn begin(&mut self, now_ms: u64) {
        self.ranges.iter_mut().for_each(|range| range.ended_ms = now_ms);
    }

    /// Whether a sample ends.
    pub fn is_due(&self, now_ms: u64) -> bool {
        is_due(now_ms, self.ranges[0].ended_ms, RANGES[0].0)
    }

    /// Adds the samples that end now. `down`: names of what is down.
    pub fn add<'d>(&mut self, now_ms: u64, totals: &Totals, down: impl Iterator<Item = &'d str>) {
        let since_ms = self.ranges[0].ended_ms.max(now_ms.saturating_sub(RANGES[0].0));
        self.names.retain(|name| Arc::strong_count(name) > 1);
        for (range, (length_ms, samples)) in self.ranges.iter_mut().zip(RANGES) {
            if is_due(now_ms, range.ended_ms, length_ms) {
                let span_ms = now_ms.saturating_sub(range.ended_ms);
                let counted = totals.since(&range.totals);
                range.push(
                    Kept::Counted(Sample::new(now_ms, span_ms, &counted, |name| kept_name(&mut self.names, name))),
                    samples,
                );
                (range.totals, range.ended_ms) = (totals.clone(), now_ms);
            }
        }
        for what in down {
            self.add_downtime(what, since_ms, now_ms);
        }
    }

    /// Adds a sample of ten seconds at whose end something was down.
    fn add_downtime(&mut self, what: &str, start_ms: u64, end_ms: u64) {
        let is_same = |known: &&mut Downtime| *known.what == *what && start_ms <= known.end_ms + SAME_DOWNTIME_MS;
        if let Some(known) = self.downtimes.iter_mut().rev().find(is_same) {
            known.end_ms = end_ms;
            return;
        }
        if self.downtimes.len() == DOWNTIMES {
            self.downtimes.pop_front();
        }
        let what = kept_name(&mut self.names, what);
        self.downtimes.push_back(Downtime { what, start_ms, end_ms });
    }

    /// The history for a process that replaces this one: a line of JSON for each sample and each downtime, the oldest first. A change
    /// of their form changes [`FORMAT`].
    pub fn to_text(&self) -> String {
        let samples = self.ranges.iter().enumerate().flat_map(|(number, range)| {
            range
                .samples
                .iter()
                .map(move |sample| format!("{}\n", json!({ "range": number, "sample": sample.to_json() })))
        });
        let downtimes = self.downtimes.iter().map(|downtime| format!("{}\n", downtime.to_json()));
        samples.chain(downtimes).collect()
    }

    /// Takes over the history of the process that this one replaces. Lines of another form are left out.
    pub fn restore(&mut self, text: &str) {
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap_or_default();
            let number = line["range"].as_u64().map_or(RANGES.len(), |number| number as usize);
            if let (Some(range), true) = (self.ranges.get_mut(number), line["sample"]["end"].is_u64()) {
                range.push(Kept::Former(line["sample"].to_string().into()), RANGES[number].1);
            } else if let (Some(what), Some(start_ms), Some(end_ms)) =
                (line["down"].as_str(), line["start"].as_u64(), line["end"].as_u64())
            {
                self.add_downtime(what, start_ms, end_ms);
            }
        }
    }

    /// The number of the next sample of a range.
    pub fn next(&self, range: Range) -> u64 {
        let Samples { samples, first, .. } = &self.ranges[range.0];
        first + samples.len() as u64
    }

    /// At most `PART` samples from this number on, and the number after them.
    pub fn since(&self, range: Range, number: u64) -> (Value, u64) {
        let of_range = &self.ranges[range.0];
        let first = number.max(of_range.first);
        let part = of_range.samples.iter().skip((first - of_range.first) as usize).take(PART).map(Kept::to_json);
        (part.collect(), self.next(range).min(first + PART as u64))
    }

    /// The number of the first of the shortest samples that no sample of `range` has yet.
    pub fn first_beyond(&self, range: Range) -> u64 {
        let Samples { samples, first, .. } = &self.ranges[0];
        let ended_ms = self.ranges[range.0].ended_ms;
        first + samples.partition_point(|sample| sample.end_ms() <= ended_ms) as u64
    }

    /// What was down from a time on, the latest last.
    pub fn downtimes(&self) -> Value {
        self.downtimes.iter().map(Downtime::to_json).collect()
    }
}

/// Whether a sample of this length ends; the one before has ended at `ended_ms`.
fn is_due(now_ms: u64, ended_ms: u64, length_ms: u64) -> bool {
    now_ms / length_ms != ended_ms / length_ms
}

/// The copy of a name that is kept.
fn kept_name(names: &mut HashSet<Arc<str>>, name: &str) -> Arc<str> {
    if let Some(known) = names.get(name) {
        return Arc::clone(known);
    }
    let name: Arc<str> = Arc::from(name);
    names.insert(Arc::clone(&name));
    name
}

impl Samples {
    /// Adds a sample, and removes the oldest if there are `most`.
    fn push(&mut self, sample: Kept, most: usize) {
        if self.samples.len() == most {
            self.samples.pop_front();
            self.first += 1;
        }
        self.samples.push_back(sample);
    }
}

impl Downtime {
    fn to_json(&self) -> Value {
        json!({ "down": &*self.what, "start": self.start_ms, "end": self.end_ms })
    }
}

impl Sample {
    /// `name` returns a copy of a name to keep.
    pub fn new(end_ms: u64, span_ms: u64, counted: &Totals, mut name: impl FnMut(&str) -> Arc<str>) -> Sample {
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
        let mut largest = |counts: &BTreeMap<(String, String), u64>| -> Vec<_> {
            let mut counts: Vec<_> = counts.iter().collect();
            keep_largest(&mut counts, RULES_MAX, |(_, count)| **count);
            counts.into_iter().map(|((rule, part), count)| (name(rule), name(part), *count)).collect()
        };
        let (windows, usage) = (largest(&counted.windows), largest(&counted.usage));
        let errors = counted.errors.iter().map(|(error, count)| (name(error), *count)).collect();
        Sample { end_ms, span_ms, all, routes, rules, windows, usage, errors }
    }

    pub fn to_json(&self) -> Value {
        let numbers = |of: &Requests| json!([of.requests, of.refused, of.failed, of.p50_us, of.p99_us]);
        let routes = self.routes.iter().map(|(route, requests)| json!([&**route, numbers(requests)]));
        let by_rule = |counts: &[(Arc<str>, Arc<str>, u64)]| {
            counts.iter().map(|(rule, part, n)| json!([&**rule, &**part, n])).collect::<Vec<_>>()
        };
        json!({
            "end": self.end_ms, "ms": self.span_ms, "all": numbers(&self.all), "routes": routes.collect::<Vec<_>>(),
            "rules": self.rules.iter().map(|(route, rule, counts)| json!([&**route, &**rule, counts])).collect::<Vec<_>>(),
            "windows": by_rule(&self.windows),
            "usage": by_rule(&self.usage),
            "errors": self.errors.iter().map(|(error, n)| json!([&**error, n])).collect::<Vec<_>>(),
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

    /// All samples of a range.
    fn samples(history: &History, range: Range) -> Vec<Value> {
        let (mut all, mut next) = (Vec::new(), 0);
        while next < history.next(range) {
            let (part, after) = history.since(range, next);
            assert!(part.as_array().is_some_and(|part| part.len() <= PART));
            all.extend(part.as_array().cloned().unwrap_or_default());
            next = after;
        }
        all
    }

    const HOUR: Range = Range(0);
    /// The length of the shortest samples.
    const SAMPLE_MS: u64 = RANGES[0].0;
    const SAMPLES: usize = RANGES[0].1;

    fn add(history: &mut History, now_ms: u64, totals: &Totals, down: &[&str]) {
        history.add(now_ms, totals, down.iter().copied());
    }

    #[test]
    fn the_samples_of_one_hour_are_kept() {
        let mut history = History::default();
        history.begin(1_000_500);
        assert!(!history.is_due(1_009_999));
        for n in 1..=400 {
            let now_ms = 1_000_000 + n * SAMPLE_MS;
            assert!(history.is_due(now_ms));
            add(&mut history, now_ms, &totals(2, n), &[]);
            assert!(!history.is_due(now_ms + SAMPLE_MS - 1));
        }
        assert_eq!((history.ranges[0].samples.len(), history.next(HOUR)), (SAMPLES, 400));
        // Two routes and a rule.
        assert_eq!(history.names.len(), 3);
        let all = samples(&history, HOUR);
        assert_eq!(all.len(), SAMPLES);
        assert_eq!((&all[0]["end"], &all[0]["ms"]), (&json!(1_410_000), &json!(10_000)));
        assert_eq!(all[0]["all"], json!([3, 0, 0, null, null]));
        assert_eq!(all[0]["routes"][1], json!(["route-1", [2, 0, 0, null, null]]));
        assert_eq!(history.since(HOUR, 399), (json!([all[359]]), 400));
        assert_eq!(history.since(HOUR, 400), (json!([]), 400));
        // A reading of another registry: nothing is negative.
        add(&mut history, 9_000_000, &totals(1, 0), &[]);
        assert_eq!(history.since(HOUR, 400).0[0]["all"][0], json!(0));
    }

    #[test]
    fn longer_ranges_have_longer_samples_of_the_same_requests() {
        let mut history = History::default();
        history.begin(0);
        let hours = 25;
        for n in 1..=hours * 360 {
            add(&mut history, n * SAMPLE_MS, &totals(1, n), &[]);
        }
        for (range, hours_kept) in [(1, 1), (6, 6), (24, 24), (100, 24)] {
            let all = samples(&history, Range::of_hours(range));
            let sum = |field: fn(&Value) -> Option<u64>| all.iter().filter_map(field).sum::<u64>();
            assert_eq!(sum(|sample| sample["ms"].as_u64()), hours_kept * 3_600_000, "{range} h");
            assert_eq!(sum(|sample| sample["all"][0].as_u64()), hours_kept * 360, "{range} h");
            let end_ms = all.last().and_then(|sample| sample["end"].as_u64());
            assert_eq!(end_ms, Some(hours * 3_600_000), "{range} h");
        }
        // What the longer samples do not have yet.
        let now_ms = hours * 3_600_000 + 3 * SAMPLE_MS;
        for n in 1..=3 {
            add(&mut history, now_ms - (3 - n) * SAMPLE_MS, &totals(1, hours * 360 + n), &[]);
        }
        let day = Range::of_hours(24);
        assert_eq!(history.next(HOUR) - history.first_beyond(day), 3);
        assert_eq!(history.first_beyond(HOUR), history.next(HOUR));
    }

    #[test]
    fn what_is_down_in_neighbouring_samples_is_down_once() {
        let mut history = History::default();
        history.begin(0);
        let down = [&["", "http://a"][..], &[""], &[], &[""], &[], &[], &[""], &["http://a"]];
        for (n, down) in (1..).zip(down) {
            add(&mut history, n * SAMPLE_MS, &Totals::default(), down);
        }
        let downtime =
            |what, start: u64, end: u64| json!({ "down": what, "start": start * SAMPLE_MS, "end": end * SAMPLE_MS });
        let expected = json!([downtime("", 0, 7), downtime("http://a", 0, 1), downtime("http://a", 7, 8)]);
        assert_eq!(history.downtimes(), expected);
        // They are bounded, and their names are kept with them.
        for n in 0..2 * DOWNTIMES as u64 {
            add(&mut history, (100 + 10 * n) * SAMPLE_MS, &Totals::default(), &["http://b"]);
        }
        assert_eq!(history.downtimes.len(), DOWNTIMES);
        add(&mut history, 1_000_000 * SAMPLE_MS, &Totals::default(), &[]);
        assert_eq!(history.names.len(), 1);
    }

    #[test]
    fn the_history_is_handed_over() {
        let (mut old, mut new) = (History::default(), History::default());
        (1..=400).for_each(|n| add(&mut old, n * SAMPLE_MS, &totals(2, n), &["http://a"]));
        new.restore(&(old.to_text() + "{}\nno sample\n"));
        assert_eq!((new.ranges[0].samples.len(), new.to_text()), (SAMPLES, old.to_text()));
        assert_eq!((new.since(HOUR, 0).0, new.downtimes()), (old.since(HOUR, 0).0, old.downtimes()));
        new.begin(401 * SAMPLE_MS);
        add(&mut new, 402 * SAMPLE_MS, &totals(2, 1), &["http://a"]);
        assert_eq!((new.ranges[0].samples.len(), new.next(HOUR)), (SAMPLES, 361));
        // What was down before the upgrade and after it was down once.
        assert_eq!(new.downtimes(), json!([{ "down": "http://a", "start": 0, "end": 402 * SAMPLE_MS }]));
        // And again to the next process.
        let mut next = History::default();
        next.restore(&new.to_text());
        assert_eq!(next.to_text(), new.to_text());
        assert_eq!(next.since(HOUR, 359).0[0]["all"][0], json!(3));
    }

    #[test]
    fn a_sample_names_a_bounded_number_of_routes_and_rules() {
        let mut history = History::default();
        add(&mut history, SAMPLE_MS, &totals(1000, 1), &[]);
        let sample = &history.since(HOUR, 0).0[0];
        assert_eq!(sample["routes"].as_array().map(Vec::len), Some(ROUTES_MAX));
        assert_eq!(sample["rules"].as_array().map(Vec::len), Some(RULES_MAX));
        // The busiest are named, and all are counted.
        assert_eq!(sample["routes"][0][0], json!("route-999"));
        assert_eq!(sample["all"][0], json!(1000 * 1001 / 2));
        // Names that no sample uses are dropped.
        for n in 0..25 * 360 {
            add(&mut history, (n + 2) * SAMPLE_MS, &Totals::default(), &[]);
        }
        assert_eq!(history.names.len(), 0);
    }
}
