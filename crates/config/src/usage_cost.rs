//! `cost = { usage = … }`: a cost that the body of the response states.

use std::ops::RangeInclusive;

use toml::de::DeValue;

use super::body_condition::{read_pattern, read_pointer};
use super::diagnostics::{Report, quoted};
use super::settings::{Boolean, Custom, Inline, Integer, Kind, Optional, Required, Section, Shape, Word, Words};
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
    pub reserve: Reserve,
    /// Greatest reserve.
    pub reserve_max: u32,
}

/// What is charged in advance.
#[derive(Clone, PartialEq, Debug)]
pub enum Reserve {
    Fixed(u32),
    OfRequest {
        /// Numbers of tokens of output, of which the greatest counts.
        output: Vec<JsonPointer>,
        /// Numbers of answers, by all of which the output is multiplied.
        times: Vec<JsonPointer>,
        /// Bytes of the body that count as a token of input.
        bytes_per_input: Option<u32>,
        /// Tokens of output if the body states none.
        default: u32,
    },
    /// What requests have cost lately.
    Learnt {
        /// Until that is known.
        default: u32,
    },
}

impl Reserve {
    /// Without a request.
    pub fn default_cost(&self) -> u32 {
        match self {
            Reserve::Fixed(cost) => *cost,
            Reserve::OfRequest { default, .. } | Reserve::Learnt { default } => *default,
        }
    }

    /// Whether it depends on the body.
    pub fn reads_bodies(&self) -> bool {
        !matches!(self, Reserve::Fixed(_))
    }
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

settings! {
    /// What is charged in advance.
    pub struct ReserveSettings checked by check_reserve {
        /// JSON Pointers to numbers in the request, also in texts: the tokens of output that it may use. The greatest counts.
        json: Vec<JsonPointer> =
            Words { shape: "JSON Pointer", example: "[\"/max_tokens\"]", or: "", read: read_pointer };
        /// JSON Pointers to numbers in the request by which the output is multiplied: how many answers it asks for. A list there
        /// stands for the number of its elements, and a list of numbers or a text at `prompt` for 1. `[]`: none.
        times: Vec<JsonPointer> = times();
        /// `"bytes/N"`: each N bytes of the request's body count as a token of input. Without it: 0.
        input: Option<u32> = Word { shape: "`\"bytes/N\"`", example: "\"bytes/4\"", read: read_bytes_per_input };
        /// Reserves the 95th percentile of what the requests of this rule that name the same model have cost lately, instead of
        /// `json`, `times` and `input`.
        learnt: bool = Boolean(false);
        /// Without such a number in the request: tokens of output. With `learnt`: the reserve until 20 costs of the model are known;
        /// the 95th percentile of all models, if that is greater.
        default: Option<u32> = Required(Optional(Integer(1000, 0..=u32::MAX as u64)), "add `default = 1000`");
    }
}

/// Where requests state how many answers they ask for, as TOML: OpenAI, also with a list of prompts, and Gemini, whose servers know two
/// spellings.
const TIMES: &str = r#"["/n", "/best_of", "/prompt", "/generationConfig/candidateCount", "/generationConfig/candidate_count", "/generation_config/candidateCount", "/generation_config/candidate_count"]"#;

/// The setting `times`.
fn times() -> Custom<Vec<JsonPointer>> {
    let pointers = TIMES.split('"').skip(1).step_by(2);
    let default = pointers.filter_map(|text| JsonPointer::parse(text).ok()).collect();
    let shape = || Shape::one_or_list("JSON Pointer");
    Custom { default, default_text: Some(TIMES), shape, read: read_times }
}

fn read_times(item: &Item, report: &mut Report) -> Option<Vec<JsonPointer>> {
    let pointers = item.strings("[\"/n\"]", report)?;
    Some(pointers.iter().filter_map(|text| read_pointer(text, report)).collect())
}

fn check_reserve(reserve: &mut ReserveSettings, table: &Table, report: &mut Report) {
    let sources = || ["json", "times", "input"].into_iter().filter_map(|key| table.given(key));
    if reserve.learnt {
        for item in sources() {
            report.problem(item.key_span, format!("`{}` has no effect with `learnt`", item.key), "keep one of the two");
        }
    } else if table.lacks("json") && table.lacks("input") && table.lacks("learnt") {
        let message = "`reserve` has neither `json` nor `input` nor `learnt`";
        report.problem(table.span.clone(), message, "write `json = \"/max_tokens\"`, or a number instead of the table");
    }
}

fn read_bytes_per_input(text: &SpannedStr, report: &mut Report) -> Option<u32> {
    let number = text.text.strip_prefix("bytes/").and_then(|number| number.parse().ok()).filter(|number| *number > 0);
    if number.is_none() {
        report.problem(text.span.clone(), format!("`input` cannot be {}", quoted(text.text)), "write `\"bytes/4\"`");
    }
    number
}

/// The setting `reserve`.
pub fn reserve() -> Custom<Reserve> {
    let shape = || Shape::AnyOf(vec![Shape::Integer(0..=u32::MAX.into()), Shape::Table(ReserveSettings::settings())]);
    Custom { default: Reserve::Fixed(1), default_text: Some("1"), shape, read: read_reserve }
}

fn read_reserve(item: &Item, report: &mut Report) -> Option<Reserve> {
    if !matches!(item.value, DeValue::Table(_)) {
        return Some(Reserve::Fixed(u32::try_from(item.integer(0..=u32::MAX.into(), report)?).ok()?));
    }
    let table =
        item.table("`reserve`", "write a number, or `reserve = { json = \"/max_tokens\", default = 1000 }`", report)?;
    let ReserveSettings { json, times, input, learnt, default } = ReserveSettings::read_all(table, report);
    let default = default.unwrap_or(1);
    Some(match learnt {
        true => Reserve::Learnt { default },
        false => Reserve::OfRequest { output: json, times, bytes_per_input: input, default },
    })
}

/// The setting `usage`.
pub fn usage() -> Custom<Option<UsageSource>> {
    let shape = || {
        let shape = Shape::AnyOf(vec![Shape::Words(vec!["auto"]), Shape::Table(UsagePointers::settings())]);
        Shape::described("`\"auto\"`, `{ json = [POINTER, …] }`", shape)
    };
    Custom::or_empty(shape, read_usage)
}

/// The setting `weights`.
pub fn weights() -> Custom<Option<ModelWeights>> {
    let shape = || {
        let factors = Shape::Table(WeightSettings::settings());
        Shape::described("table, or tables by model", Shape::AnyOf(vec![factors.clone(), Shape::map_of(factors)]))
    };
    Custom::or_empty(shape, read_weights)
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
