//! The layers of a rule: so much per window, each in a period of its own.
//!
//! A layer that a shorter one keeps from ever being met is not a problem: 2000 an hour beside 33 a
//! minute means what it says, and starts to matter on the day the other limit is raised.

use toml::de::DeValue;

use crate::config::document::{Item, Later, nearest};
use crate::config::problem::{Report, shown};
use crate::rule::limit::{Limit, LimitError};
use crate::rule::window::{Period, PeriodError};

const LATER: [Later; 4] = [
    ("timezone", "remove it; windows follow UTC"),
    ("capacity", "remove it; unused tokens end with their window"),
    ("reserve", "remove it; a window's tokens are all there is"),
    ("shards", "remove it; one counter holds the limit"),
];

const EXAMPLE: &str = "[\"2000/hour\", \"33/minute\"]";

const PERIODS: [&str; 6] = ["second", "minute", "hour", "day", "week", "month"];

/// The layers in the order of the file.
pub fn layers(item: &Item, report: &mut Report) -> Vec<Limit> {
    if let DeValue::String(text) = item.value {
        let fix = item.write(&format!("[\"{}\"]", text.trim()));
        return item.wrong_type("a list", &fix, report).unwrap_or_default();
    }
    let items = item.list(EXAMPLE, report).unwrap_or_default();
    if items.is_empty() && matches!(item.value, DeValue::Array(_)) {
        report.problem(item.span.clone(), "`windows` is an empty list", item.write(EXAMPLE));
    }
    let mut found: Vec<Limit> = Vec::new();
    for item in items {
        let Some(limit) = layer(&item, report) else { continue };
        if let Some(other) = found.iter().find(|other| other.windows == limit.windows) {
            let message = format!(
                "`{}` is the same period as `{}`, which has a limit already",
                limit.period_text, other.period_text
            );
            report.problem(item.span, message, "keep the smaller limit of the two");
            continue;
        }
        found.push(limit);
    }
    found
}

fn layer(item: &Item, report: &mut Report) -> Option<Limit> {
    match item.value {
        DeValue::String(text) => match Limit::parse(text) {
            Ok(limit) => Some(limit),
            Err(error) => {
                report.problem(item.span.clone(), format!("{} is no limit", shown(text)), fix(text, error));
                None
            }
        },
        DeValue::Table(_) => table(item, report),
        DeValue::Integer(_) => {
            let fix = format!("write `\"{}/minute\"`, if minutes are meant", report.written(item.span.clone()));
            item.wrong_type("a limit", &fix, report)
        }
        _ => item.wrong_type("a limit", &format!("write such as `windows = {EXAMPLE}`"), report),
    }
}

fn table(item: &Item, report: &mut Report) -> Option<Limit> {
    let mut table = item.table("the window", "", report)?;
    let limit = table.require("limit", "write `{ limit = 33, period = \"minute\" }`");
    let period = table.require("period", "write `{ limit = 33, period = \"minute\" }`");
    let start = table.get("start");
    table.finish(&LATER, report);
    if let Some(item) = start {
        start_is_epoch(&item, report);
    }
    let tokens = limit.and_then(|item| item.integer(1..=u64::from(u32::MAX), report));
    let period = period.and_then(|item| item.text("\"minute\"", report));
    let (tokens, period) = (u32::try_from(tokens?).ok()?, period?);
    match Limit::of(tokens, period.text) {
        Ok(limit) => Some(limit),
        Err(error) => {
            let fix = match period_meant(period.text) {
                Some(meant) => format!("write `period = \"{meant}\"`"),
                None => error.to_string(),
            };
            report.problem(period.span, format!("{} is no period", shown(period.text)), fix);
            None
        }
    }
}

fn start_is_epoch(item: &Item, report: &mut Report) {
    let later = match item.value {
        DeValue::String(text) if text == "epoch" => return,
        DeValue::String(text) => {
            text == "random" || text == "first-request" || text.starts_with(|c: char| c.is_ascii_digit())
        }
        DeValue::Datetime(_) => true,
        _ => false,
    };
    if later {
        let message = format!("`start = {}` is not in this version of transom yet", report.written(item.span.clone()));
        report.problem(item.span.clone(), message, "write `start = \"epoch\"`, or leave it out");
    } else {
        item.choice(&[("epoch", ())], report);
    }
}

/// What to write instead of a text that is no limit.
fn fix(text: &str, error: LimitError) -> String {
    let plain: String = text.to_lowercase().replace("per", "/").split_whitespace().collect();
    let meant = match plain.split_once('/') {
        Some((tokens, period)) => {
            let tokens = tokens.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            period_meant(period).map_or(plain.clone(), |period| format!("{tokens}/{period}"))
        }
        None => format!("{plain}/minute"),
    };
    match error {
        LimitError::Form | LimitError::Period(PeriodError::Form) if Limit::parse(&meant).is_ok() => {
            format!("write `\"{meant}\"`")
        }
        error => error.to_string(),
    }
}

/// The period that was likely meant by something that is none.
fn period_meant(text: &str) -> Option<String> {
    let plain: String = text.to_lowercase().split_whitespace().collect();
    let unit = plain.trim_start_matches(|c: char| c.is_ascii_digit());
    let number = &plain[..plain.len() - unit.len()];
    let word = match unit {
        "" => return None,
        "ms" | "s" | "m" | "h" | "d" | "w" => unit,
        "sec" | "secs" => "second",
        "min" | "mins" => "minute",
        "hr" | "hrs" => "hour",
        "mo" => "month",
        _ => nearest(unit, PERIODS)?,
    };
    let meant = match (number, word) {
        ("", "ms" | "s" | "m" | "h" | "d" | "w") => format!("1{word}"),
        (_, "month") if !number.is_empty() && number != "1" => return None,
        ("" | "1", _) => word.to_owned(),
        (_, "ms") => plain.clone(),
        _ => format!("{number}{}", &word[..1]),
    };
    Period::parse(&meant).is_ok().then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_meant_is_guessed() {
        for (text, meant) in [
            ("33 / minute", "write `\"33/minute\"`"),
            ("33 per minute", "write `\"33/minute\"`"),
            ("33/min", "write `\"33/minute\"`"),
            ("33/minutes", "write `\"33/minute\"`"),
            ("33r/m", "write `\"33/1m\"`"),
            ("100/5min", "write `\"100/5m\"`"),
            ("100/5 hours", "write `\"100/5h\"`"),
            ("33", "write `\"33/minute\"`"),
            ("0/minute", "a limit is at least `1`"),
            ("5/1ms", "the shortest period is `10ms`"),
        ] {
            assert_eq!(fix(text, Limit::parse(text).unwrap_err()), meant, "{text}");
        }
    }
}
