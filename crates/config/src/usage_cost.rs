//! `cost = { usage = … }`: a cost that the body of the response states.

use std::ops::RangeInclusive;

use toml::de::DeValue;

use super::body_condition::{read_pattern, read_pointer};
use super::diagnostics::{Report, quoted};
use super::settings::{Custom, Inline, Kind, Section, Shape, Words};
use super::toml_reader::{Item, SpannedStr, Table};
use transom_usage::decimal::Decimal;
use transom_usage::json_pointer::JsonPointer;
use transom_usage::usage::{Kind as UsageKind, ModelWeights, NamePattern, Weights};
use transom_usage::usage_reader::UsageSource;

/// What the gateway reads of a response, and what follows from it.
#[derive(Clone, PartialEq, Debug)]
pub struct UsageCost {
    pub source: UsageSource,
    pub weights: ModelWeights,
    pub on_missing: OnMissingUsage,
}

/// What a response costs that states no usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnMissingUsage {
    /// What was charged in advance.
    Reserve,
    /// A quarter of its bytes, and at least what was charged in advance.
    Estimate,
}

pub const ON_MISSING_USAGE: [(&str, OnMissingUsage); 2] =
    [("reserve", OnMissingUsage::Reserve), ("estimate", OnMissingUsage::Estimate)];

/// The statuses of `refund_on` with `usage`, unless it is given.
pub const FAILED: [RangeInclusive<u16>; 2] = [400..=499, 500..=599];

const USAGE_FORMS: &str = "write `usage = \"auto\"`, or `usage = { json = [\"/usage/total_tokens\"] }`";
const WEIGHTS_FORMS: &str = "write, for example, `weights = { input = 1, output = 4 }`, or such a table for each model";

settings! {
    /// Pointers to numbers in a response.
    pub struct UsagePointers {
        /// [JSON Pointers](https://www.rfc-editor.org/rfc/rfc6901) to numbers, whose sum is the usage, of the kind `input`.
        json: Vec<JsonPointer> = Words {
            shape: "JSON Pointer",
            example: "[\"/usage/total_tokens\"]",
            or: "",
            read: read_pointer,
        };
    }
}

settings! {
    /// The factor of each kind of usage.
    pub struct WeightSettings {
        /// Input that was not in a cache.
        input: Option<Decimal> = Factor;
        /// Input that was read from a cache. Without it: the weight of `input`.
        cached_input: Option<Decimal> = Factor;
        /// Input that was written to a cache. Without it: the weight of `input`.
        cache_write: Option<Decimal> = Factor;
        /// Output that the client sees.
        output: Option<Decimal> = Factor;
        /// Output that the client does not see. Without it: the weight of `output`.
        reasoning: Option<Decimal> = Factor;
    }
}

impl WeightSettings {
    fn weights(&self) -> Weights {
        Weights::new(|kind| match kind {
            UsageKind::Input => self.input,
            UsageKind::CachedInput => self.cached_input,
            UsageKind::CacheWrite => self.cache_write,
            UsageKind::Output => self.output,
            UsageKind::Reasoning => self.reasoning,
        })
    }
}

/// A decimal number, exactly as it is written.
struct Factor;

impl Kind for Factor {
    type Value = Option<Decimal>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<Decimal>> {
        let fix = "write a number with at most 12 digits after the point, such as `0.25`";
        let written = match item.value {
            DeValue::Float(number) => number.as_str(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
            _ => return item.wrong_type("a number", fix, report),
        };
        let factor = Decimal::parse(written.strip_prefix('+').unwrap_or(written));
        if factor.is_none() {
            report.problem(item.span.clone(), format!("`{}` cannot be {}", item.key, quoted(written)), fix);
        }
        factor.map(Some)
    }

    fn default(&self) -> Option<Decimal> {
        None
    }

    fn shape(&self) -> Shape {
        Shape::Number
    }
}

/// The setting `usage`.
pub fn usage() -> Custom<Option<UsageSource>> {
    let shape = Shape::AnyOf(vec![Shape::Words(vec!["auto"]), Shape::Table(UsagePointers::settings())]);
    Custom::or_empty(Shape::described("`\"auto\"`, `{ json = [POINTER, …] }`", shape), read_usage)
}

/// The setting `weights`.
pub fn weights() -> Custom<Option<ModelWeights>> {
    let factors = || Shape::Table(WeightSettings::settings());
    let shape = Shape::AnyOf(vec![factors(), Shape::map_of(factors())]);
    Custom::or_empty(Shape::described("table, or tables by model", shape), read_weights)
}

fn read_usage(item: &Item, report: &mut Report) -> Option<Option<UsageSource>> {
    if let DeValue::String(_) = item.value {
        return item.choice(&[("auto", ())], report).map(|()| Some(UsageSource::Known));
    }
    let before = report.count();
    let pointers = Inline::<UsagePointers>::or(USAGE_FORMS).read(item, report)?.json;
    if pointers.is_empty() && report.count() == before {
        report.problem(item.span.clone(), "`usage` has no `json`", USAGE_FORMS);
    }
    let mut distinct: Vec<JsonPointer> = Vec::new();
    for pointer in pointers {
        if !distinct.contains(&pointer) {
            distinct.push(pointer);
        }
    }
    Some(Some(UsageSource::Pointers(distinct)))
}

fn read_weights(item: &Item, report: &mut Report) -> Option<Option<ModelWeights>> {
    let table = item.table("`weights`", WEIGHTS_FORMS, report)?;
    let items = table.items();
    if !items.iter().any(|item| matches!(item.value, DeValue::Table(_))) {
        return Some(Some(ModelWeights::of_all(WeightSettings::read_all(table, report).weights())));
    }
    let mut default = None;
    let mut patterns: Vec<(NamePattern, Weights)> = Vec::new();
    for item in items {
        let name = SpannedStr { text: item.key, span: item.key_span.clone() };
        let pattern = if item.key == "default" { None } else { read_pattern(&name, report) };
        let title = format!("the weights of {}", quoted(item.key));
        let Some(table) = item.table(title, "write, for example, `default = { input = 1, output = 4 }`", report) else {
            continue;
        };
        let weights = WeightSettings::read_all(table, report).weights();
        match pattern {
            Some(pattern) => patterns.push((pattern, weights)),
            None => default = Some(weights),
        }
    }
    Some(Some(ModelWeights::new(patterns, default)))
}

/// Reports settings that concern only a cost by usage.
pub fn report_without_usage(table: &Table, report: &mut Report) {
    for item in ["weights", "on_missing_usage"].into_iter().filter_map(|key| table.given(key)) {
        let message = format!("`{}` has no effect without `usage`", item.key);
        report.problem(item.key_span, message, "add `usage = \"auto\"`, or remove it");
    }
}
