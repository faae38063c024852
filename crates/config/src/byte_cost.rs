//! `cost = { bytes = … }`: a cost by the size of bodies, and sizes in the windows of such rules.

use toml::de::DeValue;

use super::diagnostics::{Report, quoted};
use super::settings::{Integer, KIB, Kind, Shape, size_bytes};
use super::toml_reader::{Item, Table};

/// Without `unit`.
pub const DEFAULT_UNIT: u64 = KIB;
/// Greatest `unit`.
pub const UNIT_MAX: u64 = 1 << 40;
const TOKENS_MAX: u64 = u32::MAX as u64;

/// The bytes that a request costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteCost {
    pub counted: CountedBytes,
    /// Bytes of one token, at least 1.
    pub unit: u64,
    pub on_exceeded: OnExceeded,
}

/// The bodies that count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountedBytes {
    Request,
    Response,
    Both,
}

/// What happens to a transfer that has exceeded the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnExceeded {
    Finish,
    /// It is broken off.
    Cut,
}

pub const COUNTED: [(&str, CountedBytes); 3] =
    [("request", CountedBytes::Request), ("response", CountedBytes::Response), ("both", CountedBytes::Both)];
pub const ON_EXCEEDED: [(&str, OnExceeded); 2] = [("finish", OnExceeded::Finish), ("cut", OnExceeded::Cut)];

impl CountedBytes {
    pub fn has_request(self) -> bool {
        self != CountedBytes::Response
    }

    pub fn has_response(self) -> bool {
        self != CountedBytes::Request
    }
}

impl ByteCost {
    /// The tokens of a request with bodies of so many bytes.
    pub fn tokens(&self, request: u64, response: u64) -> u64 {
        let bytes = match self.counted {
            CountedBytes::Request => request,
            CountedBytes::Response => response,
            CountedBytes::Both => request.saturating_add(response),
        };
        bytes.div_ceil(self.unit)
    }
}

/// A number of tokens of a window, or a size. The field is the example in messages.
pub struct Tokens(pub u32);

impl Kind for Tokens {
    type Value = u32;

    fn read(&self, item: &Item, report: &mut Report) -> Option<u32> {
        match item.value.as_str().and_then(size_bytes) {
            Some(bytes) => tokens_of_size(bytes, item, report),
            None => Integer(self.0, 1..=TOKENS_MAX).read(item, report),
        }
    }

    fn default(&self) -> u32 {
        self.0
    }

    fn shape(&self) -> Shape {
        Shape::AnyOf(vec![Shape::Integer(1..=TOKENS_MAX), Shape::Size(1..=u64::MAX)])
    }
}

/// The unit of sizes in a rule that is not read yet; `None` if the rule does not count bytes.
pub fn size_unit(rule: &Table) -> Option<u64> {
    let cost = rule.given("cost")?;
    let tables = cost.tables();
    let cost = tables.first()?;
    cost.given("bytes")?;
    let unit = match cost.given("unit").map(|unit| unit.value) {
        Some(DeValue::String(text)) => size_bytes(text),
        Some(DeValue::Integer(number)) => number.as_str().parse().ok(),
        _ => None,
    };
    Some(unit.filter(|unit| (1..=UNIT_MAX).contains(unit)).unwrap_or(DEFAULT_UNIT))
}

/// The tokens of a size in a window, in whole units.
pub fn tokens_of_size(bytes: u64, item: &Item, report: &mut Report) -> Option<u32> {
    let written = quoted(report.source(item.span.clone()).trim_matches(['"', '\'']));
    let Some(unit) = report.size_unit else {
        let message = format!("{written} is a size, but the cost is not counted in bytes");
        let fix = "write a number of tokens, or a rule with `cost = { bytes = \"both\" }`";
        return report.reject(item.span.clone(), message, fix);
    };
    let (message, fix) = match u32::try_from(bytes / unit) {
        Ok(0) => (
            format!("{written} is less than one `unit`, which is `{unit}` bytes"),
            format!("write at least `{unit}B`, or a smaller `unit`"),
        ),
        Ok(tokens) => return Some(tokens),
        Err(_) => (
            format!("{written} is more than `{TOKENS_MAX}` times `unit`, which is `{unit}` bytes"),
            format!("write `unit = \"{}KiB\"` or more in `cost`", bytes.div_ceil(TOKENS_MAX).div_ceil(KIB)),
        ),
    };
    report.reject(item.span.clone(), message, fix)
}

/// Reports settings that concern only a cost by bytes.
pub fn report_without_bytes(table: &Table, report: &mut Report) {
    for item in ["unit", "on_exceeded"].into_iter().filter_map(|key| table.given(key)) {
        let message = format!("`{}` has no effect without `bytes`", item.key);
        report.problem(item.key_span, message, "add `bytes = \"both\"`, or remove it");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A request that is charged piece by piece costs as much as one that is charged at its end: whole units, rounded up once.
        #[test]
        fn pieces_cost_what_their_sum_does(
            pieces in prop::collection::vec((any::<bool>(), 0_u64..5000), 0..40),
            unit in 1_u64..3000,
        ) {
            for counted in [CountedBytes::Request, CountedBytes::Response, CountedBytes::Both] {
                let cost = ByteCost { counted, unit, on_exceeded: OnExceeded::Finish };
                let (mut request, mut response, mut charged) = (0, 0, 0);
                for (is_request, bytes) in &pieces {
                    if *is_request { request += bytes } else { response += bytes }
                    let tokens = cost.tokens(request, response);
                    prop_assert!(tokens >= charged);
                    charged += tokens - charged;
                }
                let bytes = [counted.has_request().then_some(request), counted.has_response().then_some(response)];
                let bytes: u64 = bytes.into_iter().flatten().sum();
                prop_assert!(charged * unit >= bytes && charged * unit < bytes + unit, "{charged} units of {bytes} bytes");
            }
        }

        /// The limit that a size gives is never above the size, and less than a unit below.
        #[test]
        fn sizes_are_rounded_down_to_units(bytes in 1_u64..1 << 45, unit in 1_u64..1 << 20) {
            let text = format!(
                "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"{bytes}B/day\"]\n\
                 cost = {{ bytes = \"both\", unit = {unit} }}\n[[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\"]\n"
            );
            let limit = crate::read(&text).map(|config| u64::from(config.rules.iter().next().unwrap().layers[0].tokens));
            match limit {
                Ok(tokens) => prop_assert!(tokens * unit <= bytes && bytes - tokens * unit < unit),
                Err(_) => prop_assert!(bytes < unit || bytes / unit > TOKENS_MAX),
            }
        }
    }
}
