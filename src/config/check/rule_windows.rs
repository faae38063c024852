//! The layers of a rule: so much per window, each in a period of its own.
//!
//! A layer that a shorter one keeps from ever being met is not a problem: 2000 an hour beside 33 a
//! minute means what it says, and starts to matter on the day the other limit is raised; `outlook`
//! tells of it. The other way round it is a mistake: beside 33 an hour, nobody means 2000 a minute.

use toml::de::DeValue;

use super::window_table;
use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{Item, nearest};
use transom_limiter::burst_bound;
use transom_limiter::limit::{Limit, LimitError};
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::window::{Period, PeriodError};

const EXAMPLE: &str = "[\"2000/hour\", \"33/minute\"]";

const PERIODS: [&str; 6] = ["second", "minute", "hour", "day", "week", "month"];

/// The layers in the order of the file.
pub fn read_layers(item: &Item, report: &mut Report) -> Vec<Limit> {
    if let DeValue::String(text) = item.value {
        let fix = item.fix_with(&format!("[\"{}\"]", text.trim()));
        return item.wrong_type("a list", &fix, report).unwrap_or_default();
    }
    let items = item.list(EXAMPLE, report).unwrap_or_default();
    if items.is_empty() && matches!(item.value, DeValue::Array(_)) {
        report.problem(item.span.clone(), "`windows` is an empty list", item.fix_with(EXAMPLE));
    }
    let mut found: Vec<Limit> = Vec::new();
    for item in items {
        let Some(limit) = read_layer(&item, report) else { continue };
        if let Some((message, fix)) = found.iter().find_map(|other| find_conflict(&limit, other)) {
            report.problem(item.span, message, fix);
            continue;
        }
        found.push(limit);
    }
    found
}

/// What is wrong with two layers that have the same windows, or would have the same name.
fn find_conflict(limit: &Limit, other: &Limit) -> Option<(String, String)> {
    let (text, other_text) = (&limit.period_text, &other.period_text);
    if limit.windows == other.windows {
        let message = match text == other_text {
            true => format!("`{text}` has a limit already, with the same windows"),
            false => format!("`{text}` is the same period as `{other_text}`, which has a limit already"),
        };
        return Some((message, String::from("keep the smaller limit of the two")));
    }
    (text == other_text).then(|| {
        let message = format!("answers would call two layers of the rule by the same period, `{text}`");
        let fix = "make it a rule of its own, or write the period in other words, as `24h` for `day`";
        (message, fix.to_owned())
    })
}

fn read_layer(item: &Item, report: &mut Report) -> Option<Limit> {
    match item.value {
        DeValue::String(text) => match Limit::parse(text) {
            Ok(limit) => Some(limit),
            Err(error) => {
                report.problem(item.span.clone(), format!("{} is no limit", quoted(text)), limit_fix(text, error));
                None
            }
        },
        DeValue::Table(_) => window_table::read_window_table(item, report),
        DeValue::Integer(_) => {
            let fix = format!("write `\"{}/minute\"`, if minutes are meant", report.source(item.span.clone()));
            item.wrong_type("a limit", &fix, report)
        }
        _ => item.wrong_type("a limit", &format!("write such as `windows = {EXAMPLE}`"), report),
    }
}

/// Whether what a layer lets through is all that the others of a rule ever count. Refusals that count
/// use up the others, answers may cost more than a window has, and who waits gives up what is left.
pub fn layers_are_comparable(rule: &Rule) -> bool {
    !rule.count_refused && !rule.delays() && !matches!(rule.cost, Cost::Response { .. })
}

/// Reports layers that are larger than one with longer windows, so that they never refuse anything.
pub fn report_unreachable_layers(item: &Item, layers: &[Limit], report: &mut Report) {
    // What could not be read is not among the layers.
    let items = if layers.len() < 2 { None } else { item.list(EXAMPLE, report) };
    let Some(items) = items.filter(|items| items.len() == layers.len()) else { return };
    for (item, limit) in items.iter().zip(layers) {
        let longer =
            |other: &&Limit| match (burst_bound::lengths_ms(&limit.windows), burst_bound::lengths_ms(&other.windows)) {
                (Some((_, longest_ms)), Some((shortest_ms, _))) => longest_ms < shortest_ms,
                _ => false,
            };
        let smaller = |other: &&Limit| {
            burst_bound::max_in_window(other, limit).is_some_and(|most| most < u64::from(limit.tokens))
        };
        if let Some(other) = layers.iter().filter(longer).find(smaller) {
            let most = burst_bound::max_in_window(other, limit).unwrap_or(0);
            let message = format!(
                "`{}` per `{}` can never be reached: `{}` per `{}` lets at most `{most}` through in that time",
                limit.tokens, limit.period_text, other.tokens, other.period_text
            );
            let fix = format!("remove it, or write less than `{most}`; or are the two periods mixed up?");
            report.problem(item.span.clone(), message, fix);
        }
    }
}

/// What to write instead of a text that is no limit.
fn limit_fix(text: &str, error: LimitError) -> String {
    let plain: String = text.split_whitespace().collect();
    // ASCII letters alone change, so places are the same in both.
    let lower = plain.to_ascii_lowercase();
    let separator = lower.find('/').map(|at| at..at + 1).or(lower.find("per").map(|at| at..at + 3));
    let (amount, period) = match &separator {
        Some(separator) => (&plain[..separator.start], guess_period(&plain[separator.end..])),
        None => (plain.as_str(), Some("minute".to_owned())),
    };
    let meant = guess_tokens(amount).zip(period).map(|(tokens, period)| format!("{tokens}/{period}"));
    match (error, meant) {
        (LimitError::Syntax | LimitError::Period(PeriodError::Syntax), Some(meant)) if Limit::parse(&meant).is_ok() => {
            format!("write `\"{meant}\"`")
        }
        (error, _) => error.to_string(),
    }
}

/// The number of tokens that was likely meant: `2k` is 2000, `1.5M` is 1500000, `33r` (as in nginx) is 33. `None` where a unit
/// is unknown, because dropping the unit would change the limit. A small `m` is ambiguous: nginx writes `30r/m` for minutes.
fn guess_tokens(text: &str) -> Option<u64> {
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let (factor, decimals): (u64, u32) = match unit {
        "k" | "K" => (1000, 3),
        "M" => (1_000_000, 6),
        "" | "r" | "req" | "reqs" | "request" | "requests" | "token" | "tokens" => (1, 0),
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_grouped = whole.split(',').skip(1).all(|group| group.len() == 3);
    let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
    let whole = whole.replace([',', '_'], "");
    if !is_grouped || !is_number(&whole) || !is_number(fraction) || fraction.len() > decimals as usize {
        return None;
    }
    let padded = format!("{fraction:0<width$}", width = decimals as usize);
    let fraction = if padded.is_empty() { 0 } else { padded.parse().ok()? };
    whole.parse::<u64>().ok()?.checked_mul(factor)?.checked_add(fraction)
}

/// The period that was likely meant by something that is none.
pub fn guess_period(text: &str) -> Option<String> {
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
            ("2k/hour", "write `\"2000/hour\"`"),
            ("2K per hour", "write `\"2000/hour\"`"),
            ("1.5k/hour", "write `\"1500/hour\"`"),
            ("2M/day", "write `\"2000000/day\"`"),
            ("2k", "write `\"2000/minute\"`"),
            ("2,000/day", "write `\"2000/day\"`"),
            ("3 requests per minute", "write `\"3/minute\"`"),
            ("2x/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("2m/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("1,5k/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("1.5/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("9999999k/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("0/minute", "a limit is at least `1`"),
            ("5/1ms", "the shortest period is `10ms`"),
        ] {
            assert_eq!(limit_fix(text, Limit::parse(text).unwrap_err()), meant, "{text}");
        }
    }
}
