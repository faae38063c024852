//! How much a request may be, and how little of it may move.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::{DAY_MS, read_duration_ms, section_table};
use crate::config::diagnostics::{Report, quoted};
use crate::config::limits::Limits;
use crate::config::toml_reader::Item;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
const UNITS: [(&str, u64); 8] = [
    ("KiB", KIB),
    ("MiB", MIB),
    ("GiB", GIB),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

pub fn read_limits(item: Option<Item>, report: &mut Report) -> Limits {
    let mut limits = Limits {
        request_head: 64 * KIB as usize,
        request_fields: 100,
        max_body: None,
        min_request_rate: 240,
        rate_grace: Duration::from_secs(10),
        min_response_rate: 240,
    };
    let Some(mut table) = section_table(item, report) else { return limits };
    // hyper's buffer is not smaller.
    let head = table.get("request_head").and_then(|item| read_size(&item, 8 * KIB..=MIB, "\"64KiB\"", report));
    limits.request_head = head.map_or(limits.request_head, |bytes| bytes as usize);
    let fields = table.get("request_fields").and_then(|item| item.integer(1..=1000, report));
    limits.request_fields = fields.map_or(limits.request_fields, |fields| fields as usize);
    limits.max_body = table.get("max_body").and_then(|item| read_max_body(&item, report)).flatten();
    for (key, rate) in
        [("min_request_rate", &mut limits.min_request_rate), ("min_response_rate", &mut limits.min_response_rate)]
    {
        *rate = table.get(key).and_then(|item| self::read_rate(&item, report)).unwrap_or(*rate);
    }
    let grace = table.get("rate_grace").and_then(|item| read_duration_ms(&item, 1..=DAY_MS, limits.rate_grace, report));
    limits.rate_grace = grace.map_or(limits.rate_grace, Duration::from_millis);
    table.finish(report);
    limits
}

/// The most that a body may have; `Some(None)`: any number of bytes.
pub fn read_max_body(item: &Item, report: &mut Report) -> Option<Option<u64>> {
    match item.value {
        DeValue::String(text) if text == "unlimited" => Some(None),
        _ => read_size(item, 0..=u64::MAX / 2, "\"10MiB\"", report).map(Some),
    }
}

/// Bytes a second; 0: any number.
pub fn read_rate(item: &Item, report: &mut Report) -> Option<u64> {
    read_size(item, 0..=GIB, "240", report)
}

/// A number of bytes: a whole number, or one with a unit.
fn read_size(item: &Item, range: RangeInclusive<u64>, example: &str, report: &mut Report) -> Option<u64> {
    let DeValue::String(text) = item.value else {
        return match item.value {
            DeValue::Integer(_) => item.integer(range, report),
            _ => item.wrong_type("a size", &item.fix_with(example), report),
        };
    };
    let bytes = UNITS.iter().find_map(|(unit, bytes)| {
        let digits = text.strip_suffix(unit)?.trim_end();
        let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u64>().ok()?.checked_mul(*bytes)
    });
    let (message, fix) = match bytes {
        Some(bytes) if range.contains(&bytes) => return Some(bytes),
        Some(_) => (
            format!("`{}` cannot be {}", item.key, quoted(text)),
            format!("write a size from `{}` to `{}` bytes", range.start(), range.end()),
        ),
        None => {
            let fix = "write a whole number of bytes, or one with `KiB`, `MiB` or `GiB`, such as";
            (format!("{} is no size", quoted(text)), format!("{fix} `{example}`"))
        }
    };
    report.problem(item.span.clone(), message, fix);
    None
}
