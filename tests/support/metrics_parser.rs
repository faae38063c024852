//! A strict parser of the Prometheus text format, version 0.0.4.
//!
//! Text that Prometheus would reject or misread fails the test: a sample without a type, a duplicate name, a duplicate
//! series, a family in several places, buckets that do not add up.

use std::collections::{BTreeMap, HashMap, HashSet};

type Labels = BTreeMap<String, String>;

#[derive(Debug, Default)]
pub struct Exposition {
    kinds: HashMap<String, String>,
    samples: Vec<(String, Labels, f64)>,
}

impl Exposition {
    pub fn parse(text: &str) -> Exposition {
        assert!(text.ends_with('\n'), "the last line is not ended");
        let mut exposition = Exposition::default();
        let (mut helped, mut family, mut seen) = (HashSet::new(), String::new(), HashSet::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(helped.insert(name.to_owned()) && !help.is_empty(), "{line}");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(exposition.kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "typed twice: {line}");
                family = name.to_owned();
            } else if !line.is_empty() {
                let (name, labels, value) = parse_sample(line);
                let suffixes: &[&str] =
                    if exposition.kinds[&family] == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
                let belongs = suffixes.iter().any(|suffix| name.strip_suffix(suffix) == Some(family.as_str()));
                assert!(belongs, "{line} follows the TYPE line of {family}");
                assert!(seen.insert((name.clone(), labels.clone())), "twice: {line}");
                exposition.samples.push((name, labels, value));
            }
        }
        exposition.assert_buckets_cumulative();
        exposition
    }

    /// Buckets are cumulative, end with +Inf, and the count is the last of them.
    fn assert_buckets_cumulative(&self) {
        let mut last: HashMap<(String, Labels), (f64, f64)> = HashMap::new();
        for (name, labels, value) in self.samples.iter().filter(|(name, ..)| name.ends_with("_bucket")) {
            let mut labels = labels.clone();
            let le = labels.remove("le").unwrap_or_else(|| panic!("{name} without `le`"));
            let le = if le == "+Inf" { f64::INFINITY } else { le.parse().unwrap() };
            let of = (name.replace("_bucket", "_count"), labels);
            let (le_before, before) = last.insert(of, (le, *value)).unwrap_or((f64::NEG_INFINITY, 0.0));
            assert!(le > le_before && *value >= before, "{name}: buckets out of order");
        }
        for (of, (le, value)) in last {
            let count = self.samples.iter().find(|(name, labels, _)| (name, labels) == (&of.0, &of.1));
            assert!(le.is_infinite() && count.map(|(.., count)| *count) == Some(value), "{of:?}");
        }
    }

    pub fn kind(&self, name: &str) -> Option<&str> {
        self.kinds.get(name).map(String::as_str)
    }

    /// The sum of all samples of a name that have these labels; 0 if there are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let has = |of: &Labels| labels.iter().all(|(key, value)| of.get(*key).map(String::as_str) == Some(*value));
        let samples = self.samples.iter().filter(|(known, of, _)| known == name && has(of));
        samples.map(|(.., value)| *value as u64).sum()
    }

    /// The label names of a metric, sorted.
    pub fn label_names(&self, name: &str) -> Vec<&str> {
        let of = self.samples.iter().find(|(known, ..)| known.strip_suffix("_count").unwrap_or(known) == name);
        of.map(|(_, labels, _)| labels.keys().map(String::as_str).collect()).unwrap_or_default()
    }

    pub fn families(&self) -> HashSet<&str> {
        self.kinds.keys().map(String::as_str).collect()
    }

    pub fn series(&self) -> usize {
        self.samples.len()
    }
}

/// `name{key="value",…} number`
fn parse_sample(line: &str) -> (String, Labels, f64) {
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("no sample: {line}"));
    let (name, mut rest) = line.split_at(end);
    let name_is_fine = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    assert!(name_is_fine(name), "{line}");
    let mut labels = Labels::new();
    if let Some(labels_text) = rest.strip_prefix('{') {
        rest = labels_text;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
            assert!(name_is_fine(key), "{line}");
            let (value, after) = parse_label_value(after);
            assert!(labels.insert(key.to_owned(), value).is_none(), "label twice: {line}");
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("no value: {line}"));
    (name.to_owned(), labels, value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
}

/// A label's value without its escapes, and the text after the closing quote.
fn parse_label_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, c @ ('"' | '\\'))) => value.push(c),
                other => panic!("bad escape {other:?} in {text}"),
            },
            c => value.push(c),
        }
    }
    panic!("a label's value is not ended: {text}")
}
