//! What a request costs under a rule: always the same, or what a header field says.

use toml::de::DeValue;

use super::route_match::{FIELD_NAME_FIX, parse_field_name};
use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{Item, Table};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Rule};

const MOST: u64 = u32::MAX as u64;
const FORMS: &str = "write a whole number, or such as `cost = { request-header = \"x-cost\" }`";

/// Reads the cost of a rule whose layers are known: they are what it is paid from.
pub fn read_cost(item: &Item, rule: &Rule, report: &mut Report) -> Option<Cost> {
    let smallest = rule.variants().filter_map(smallest_capacity).min();
    match item.value {
        DeValue::Table(_) => read_header_cost(item.table("the cost", FORMS, report)?, rule, smallest, report),
        DeValue::String(text) if text.contains(':') || text.starts_with(|c: char| c.is_ascii_alphabetic()) => {
            let name = text.trim_start_matches("header:");
            let fix = format!(
                "write `cost = {{ request-header = \"{}\" }}`",
                parse_field_name(name).as_deref().unwrap_or("x-cost")
            );
            item.wrong_type("a whole number or a table", &fix, report)
        }
        _ => {
            let cost = u32::try_from(item.integer(0..=MOST, report)?).ok()?;
            report_unaffordable(item, cost, smallest, report);
            Some(Cost::Fixed(cost))
        }
    }
}

/// The most that any request can pay in all layers.
pub fn smallest_capacity(layers: &[Limit]) -> Option<u32> {
    layers.iter().map(|limit| limit.capacity).min()
}

/// Reports a cost that no request can ever pay.
pub fn report_unaffordable(item: &Item, cost: u32, smallest: Option<u32>, report: &mut Report) {
    if let Some(smallest) = smallest.filter(|smallest| *smallest < cost) {
        let message =
            format!("a request that costs `{cost}` can never be admitted: the smallest limit is `{smallest}`");
        let fix = format!("write a cost of at most `{smallest}`, or raise the limit");
        report.problem(item.span.clone(), message, fix);
    }
}

fn read_header_cost(mut table: Table, rule: &Rule, smallest: Option<u32>, report: &mut Report) -> Option<Cost> {
    let span = table.span.clone();
    let (request, response) = (table.get("request-header"), table.get("response-header"));
    let (default, reserve, max) = (table.get("default"), table.get("reserve"), table.get("max"));
    let misspelt = table.finish(report);

    let number = |item: &Option<Item>, least: u64, report: &mut Report| {
        item.as_ref().and_then(|item| item.integer(least..=MOST, report)).and_then(|number| u32::try_from(number).ok())
    };
    // The fields' own name is all that is needed to know which of the two forms was meant.
    let (header, before, key, in_vain) = match (request, response) {
        (Some(header), None) => (header, &default, "default", &reserve),
        (None, Some(header)) => (header, &reserve, "reserve", &default),
        (Some(_), Some(second)) => {
            let message = "a cost is told by the request or by the answer, not by both";
            report.problem(second.key_span, message, "remove `request-header` or `response-header`");
            return None;
        }
        (None, None) => {
            if misspelt.is_empty() {
                let fix = "write `request-header = \"x-cost\"`, or `response-header`, if the upstream tells";
                report.problem(span, "the cost names no header field", fix);
            }
            return None;
        }
    };
    if let Some(item) = in_vain {
        let message = format!("`{}` has no effect beside `{}`", item.key, header.key);
        report.problem(item.key_span.clone(), message, format!("write `{key}`, or remove it"));
    }
    // A key that has less than the others must not take from what these may spend at once.
    let largest = rule.variants().filter_map(self::smallest_capacity).max();
    let most = number(&max, 1, report).or(largest).unwrap_or(u32::MAX);
    let usual = number(before, 0, report).unwrap_or(1);
    if let Some(item) = before {
        if usual > most && max.is_some() {
            let message = format!("`{key}` is `{usual}`, and `max` is `{most}`");
            report.problem(item.span.clone(), message, format!("write at most `{most}`, or raise `max`"));
        } else {
            report_unaffordable(item, usual, smallest, report);
        }
    }
    let word = header.string("\"x-cost\"", report)?;
    let Some(name) = parse_field_name(word.text) else {
        report.problem(word.span, format!("{} is no name of a header field", quoted(word.text)), FIELD_NAME_FIX);
        return None;
    };
    Some(match header.key {
        "request-header" => Cost::Request { header: name, default: usual, max: most },
        _ => Cost::Response { header: name, reserve: usual, max: most },
    })
}
