//! The layers of a rule: a limit and its windows, as a string such as `33/minute` or as a table.
//!
//! A layer with longer windows may be unreachable because of one with shorter windows: 2000 an hour is never reached
//! beside 33 a minute, but takes effect once the other limit is raised. That is a note of `lint`, not a problem. The
//! reverse is a problem: 2000 a minute beside 33 an hour is a mistake.

use toml::de::DeValue;

use super::calendar_windows;
use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::toml_reader::{Item, SpannedStr, nearest};
use transom_limiter::burst_bound;
use transom_limiter::limit::{Limit, LimitError};
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::sharded_counter::SHARDS_MAX;
use transom_limiter::window::{Period, PeriodError, Windows};

const EXAMPLE: &str = "[\"2000/hour\", \"33/minute\"]";
const STARTS: &str = "write `\"epoch\"`, `\"random\"`, `\"first-request\"`, or a time such as `2024-01-01T09:00:00Z`";
/// The longest time in which later windows pay off a debt: ten years.
const DEBT_MAX_MS: u64 = 3653 * 24 * 60 * 60 * 1000;

const PERIODS: [&str; 6] = ["second", "minute", "hour", "day", "week", "month"];

/// Reads the list `windows`, in the order of the file.
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

/// The message and the fix for two layers that have the same windows, or the same name in responses.
fn find_conflict(limit: &Limit, other: &Limit) -> Option<(String, String)> {
    let (text, other_text) = (&limit.period_text, &other.period_text);
    if limit.windows == other.windows {
        let message = match text == other_text {
            true => format!("`{text}` already has a limit with the same windows"),
            false => format!("`{text}` is the same period as `{other_text}`, which already has a limit"),
        };
        return Some((message, String::from("keep the smaller limit of the two")));
    }
    (text == other_text).then(|| {
        let message = format!("two layers of the rule have the same name in responses, because of the period `{text}`");
        let fix = "move one to a rule of its own, or write its period differently, such as `24h` for `day`";
        (message, fix.to_owned())
    })
}

fn read_layer(item: &Item, report: &mut Report) -> Option<Limit> {
    match item.value {
        DeValue::String(text) => match Limit::parse(text) {
            Ok(limit) => Some(limit),
            Err(error) => {
                report.problem(item.span.clone(), format!("{} is not a limit", quoted(text)), limit_fix(text, error));
                None
            }
        },
        DeValue::Table(_) => read_window_table(item, report),
        DeValue::Integer(_) => {
            let fix = format!("write `\"{}/minute\"`, if minutes are meant", report.source(item.span.clone()));
            item.wrong_type("a limit", &fix, report)
        }
        _ => item.wrong_type("a limit", &format!("write, for example, `windows = {EXAMPLE}`"), report),
    }
}

/// Whether the usage of one layer bounds the usage of the others. It does not if refused requests are counted, if the
/// cost of a response can exceed a limit, or if requests are delayed, because a delayed request is charged to a later
/// window.
pub fn layers_are_comparable(rule: &Rule) -> bool {
    !rule.count_refused && !rule.delays() && !matches!(rule.cost, Cost::Response { .. })
}

/// Reports layers that never refuse a request, because a layer with longer windows has a smaller limit.
pub fn report_unreachable_layers(item: &Item, layers: &[Limit], report: &mut Report) {
    // Invalid items are not among the layers, so the two lists may differ in length.
    let items = if layers.len() < 2 { None } else { item.list(EXAMPLE, report) };
    let Some(items) = items.filter(|items| items.len() == layers.len()) else { return };
    for (item, limit) in items.iter().zip(layers) {
        let is_longer = |other: &&Limit| match (limit.windows.lengths_ms(), other.windows.lengths_ms()) {
            (Some((_, longest_ms)), Some((shortest_ms, _))) => longest_ms < shortest_ms,
            _ => false,
        };
        let is_smaller =
            |other: &&Limit| burst_bound::max_in_window(other, limit).is_some_and(|max| max < u64::from(limit.tokens));
        if let Some(other) = layers.iter().filter(is_longer).find(is_smaller) {
            let max = burst_bound::max_in_window(other, limit).unwrap_or(0);
            let message = format!(
                "`{}` per `{}` can never be reached: `{}` per `{}` admits at most `{max}` in that time",
                limit.tokens, limit.period_text, other.tokens, other.period_text
            );
            let fix = format!("remove it, or write less than `{max}`; check that the two periods are not swapped");
            report.problem(item.span.clone(), message, fix);
        }
    }
}

/// The fix for a text that is not a limit.
fn limit_fix(text: &str, error: LimitError) -> String {
    let plain: String = text.split_whitespace().collect();
    // Only ASCII letters change, so byte positions are the same in both.
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

/// The number of tokens that is most likely intended: `2k` is 2000, `1.5M` is 1500000, `33r` (as in nginx) is 33.
/// `None` where a unit is unknown, because dropping the unit would change the limit. A small `m` is ambiguous: nginx
/// writes `30r/m` for minutes.
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

/// The valid period that is most likely intended by an invalid one.
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

/// Where the windows of a layer start.
#[derive(Clone, Copy, PartialEq)]
enum WindowStart {
    Epoch,
    /// At this time in Unix milliseconds, and at every whole period before and after it.
    At(i64),
    Random,
    FirstRequest,
}

/// The settings of a window table that are checked against the limit and the windows.
struct OptionalSettings<'d> {
    capacity: Option<Item<'d>>,
    reserve: Option<Item<'d>>,
    shards: Option<Item<'d>>,
}

pub fn read_window_table(item: &Item, report: &mut Report) -> Option<Limit> {
    let mut table = item.table("the window", "", report)?;
    let limit = table.require("limit", "write `{ limit = 33, period = \"minute\" }`");
    let period = table.require("period", "write `{ limit = 33, period = \"minute\" }`");
    let (start, zone) = (table.get("start"), table.get("timezone"));
    let extras = OptionalSettings {
        capacity: table.get("capacity"),
        reserve: table.get("reserve"),
        shards: table.get("shards"),
    };
    table.finish(report);

    let start_span = start.as_ref().map(|item| item.span.clone());
    let start = start.map_or(Some(WindowStart::Epoch), |item| self::read_start(&item, report));
    let zone = zone.map(|item| (item.key_span.clone(), item.string("\"Europe/Paris\"", report)));
    let tokens = limit.and_then(|item| item.integer(1..=u64::from(u32::MAX), report));
    let period = period.and_then(|item| item.string("\"minute\"", report));
    let (tokens, period) = (u32::try_from(tokens?).ok()?, period?);
    let mut limit = match Limit::new(tokens, period.text) {
        Ok(limit) => limit,
        Err(error) => {
            let fix = match guess_period(period.text) {
                Some(meant) => format!("write `period = \"{meant}\"`"),
                None => error.to_string(),
            };
            report.problem(period.span, format!("{} is not a period", quoted(period.text)), fix);
            return None;
        }
    };
    limit.windows = match (start?, zone) {
        (WindowStart::Epoch, None) => limit.windows,
        (WindowStart::Epoch, Some((_, zone))) => windows_in_zone(&period, &zone?, report)?,
        (start, None) => windows_from_start(start, &period, start_span.unwrap_or(period.span.clone()), report)?,
        (_, Some((zone_key, _))) => {
            let message =
                "`timezone` and `start` are both given: with `timezone`, windows start at midnight in that zone";
            report.problem(zone_key, message, "keep one of the two");
            return None;
        }
    };
    let is_first_request = limit.windows.are_opened_by_requests();
    extras.read(&mut limit, is_first_request, report);
    Some(limit)
}

fn read_start(item: &Item, report: &mut Report) -> Option<WindowStart> {
    match item.value {
        DeValue::String(text) => match text.as_ref() {
            "epoch" => Some(WindowStart::Epoch),
            "random" => Some(WindowStart::Random),
            "first-request" => Some(WindowStart::FirstRequest),
            text if text.starts_with(|c: char| c.is_ascii_digit()) => read_start_time(item, text, report),
            _ => item.choice(
                &[
                    ("epoch", WindowStart::Epoch),
                    ("random", WindowStart::Random),
                    ("first-request", WindowStart::FirstRequest),
                ],
                report,
            ),
        },
        DeValue::Datetime(time) => self::read_start_time(item, &time.to_string(), report),
        _ => item.wrong_type("a string or a time", STARTS, report),
    }
}

/// Reads a time in RFC 3339 format.
fn read_start_time(item: &Item, text: &str, report: &mut Report) -> Option<WindowStart> {
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        return Some(WindowStart::At(time.as_millisecond()));
    }
    let (message, fix) = if [text, text.trim()].iter().any(|text| format!("{text}Z").parse::<jiff::Timestamp>().is_ok())
    {
        let message = format!("`start = {}` has no offset from UTC", report.source(item.span.clone()));
        (message, format!("write `{}Z`, or the offset, such as `{}+01:00`", text.trim(), text.trim()))
    } else if text.parse::<jiff::civil::Date>().is_ok() {
        let message = format!("`start = {}` has no time of day", report.source(item.span.clone()));
        (message, format!("write `{text}T00:00:00Z`"))
    } else {
        (format!("{} is not a time", quoted(text)), String::from("write, for example, `2024-01-01T09:00:00Z`"))
    };
    report.problem(item.span.clone(), message, fix);
    None
}

/// The windows of a period with a `start` other than the epoch.
fn windows_from_start(
    start: WindowStart,
    period: &SpannedStr,
    span: std::ops::Range<usize>,
    report: &mut Report,
) -> Option<Windows> {
    let Ok(Period::Fixed { ms: period_ms }) = Period::parse(period.text) else {
        let message = "`start` cannot be combined with `month`, which starts on the first day of the month";
        report.problem(span, message, "remove `start`, or write a period of days, such as `period = \"30d\"`");
        return None;
    };
    Some(match start {
        WindowStart::Random => Windows::Random { period_ms },
        WindowStart::FirstRequest => Windows::FirstRequest { period_ms },
        WindowStart::Epoch => Windows::Even { period_ms, offset_ms: 0 },
        // The offset in the period is enough: start times that are whole periods apart give the same windows.
        WindowStart::At(ms) => Windows::Even { period_ms, offset_ms: ms.rem_euclid(period_ms as i64) as u64 },
    })
}

fn windows_in_zone(period: &SpannedStr, zone: &SpannedStr, report: &mut Report) -> Option<Windows> {
    if calendar_windows::PERIODS.contains(&period.text) {
        return calendar_windows::windows_in_zone(period.text, zone, report);
    }
    let message =
        format!("`timezone` needs the period `day`, `week` or `month`, and the period is {}", quoted(period.text));
    let is_same = |text: &str| Period::parse(period.text) == Period::parse(text);
    let fix = match calendar_windows::PERIODS.into_iter().find(|text| is_same(text)) {
        Some(calendar) => format!("write `period = \"{calendar}\"`"),
        None => format!("remove `timezone`, or write {}", quoted_list(calendar_windows::PERIODS, "or")),
    };
    report.problem(period.span.clone(), message, fix);
    None
}

impl OptionalSettings<'_> {
    fn read(self, limit: &mut Limit, is_first_request: bool, report: &mut Report) {
        let number = |item: &Option<Item>, range: std::ops::RangeInclusive<u64>, report: &mut Report| {
            let number = item.as_ref().and_then(|item| item.integer(range, report));
            number.and_then(|number| u32::try_from(number).ok())
        };
        let max = u64::from(u32::MAX);
        let capacity = number(&self.capacity, 1..=max, report);
        limit.reserve = number(&self.reserve, 0..=max, report).unwrap_or(0);
        limit.shards = number(&self.shards, 1..=u64::from(SHARDS_MAX), report).unwrap_or(1);
        if let (Some(capacity), Some(item)) = (capacity, &self.capacity) {
            if capacity < limit.tokens {
                let message = format!("`capacity` is `{capacity}`, which is less than the limit, `{}`", limit.tokens);
                let fix = format!("write a capacity of at least `{}`, or remove it", limit.tokens);
                report.problem(item.span.clone(), message, fix);
            }
            limit.capacity = capacity.max(limit.tokens);
        }
        self.check_shards(limit, is_first_request, report);
        self.check_debt(limit, report);
    }

    /// A shard counts its part of one window without knowledge of earlier windows, so shards exclude settings that
    /// carry tokens over.
    fn check_shards(&self, limit: &Limit, is_first_request: bool, report: &mut Report) {
        let Some(item) = self.shards.as_ref().filter(|_| limit.shards > 1) else { return };
        if limit.shards > limit.tokens {
            let message =
                format!("there are more shards, `{}`, than the limit has tokens, `{}`", limit.shards, limit.tokens);
            report.problem(item.span.clone(), message, format!("write at most `{}`", limit.tokens));
        }
        let other = match () {
            () if limit.capacity > limit.tokens => "`capacity`",
            () if limit.reserve > 0 => "`reserve`",
            () if is_first_request => "`start = \"first-request\"`",
            () => return,
        };
        let message = format!("`shards` cannot be combined with {other}");
        report.problem(item.key_span.clone(), message, format!("remove `shards`, or remove {other}"));
    }

    /// A counter stores the number of the window that pays off its debt, which bounds `capacity` and `reserve`.
    fn check_debt(&self, limit: &Limit, report: &mut Report) {
        let Some(item) = self.reserve.as_ref().filter(|_| limit.reserve > 0).or(self.capacity.as_ref()) else { return };
        let debt = u64::from(limit.capacity) + u64::from(limit.reserve);
        // The calendars of days, weeks and months in a time zone are still empty here: see `fill_calendars`.
        let period_ms = match &limit.windows {
            Windows::Calendar(_) if limit.period_text == "day" => 24 * 60 * 60 * 1000,
            Windows::Calendar(_) if limit.period_text == "week" => 7 * 24 * 60 * 60 * 1000,
            Windows::Calendar(_) => 31 * 24 * 60 * 60 * 1000,
            windows => windows.typical_ms(),
        };
        let windows = debt.div_ceil(u64::from(limit.tokens));
        if windows.saturating_mul(period_ms) > DEBT_MAX_MS {
            let max = (DEBT_MAX_MS / period_ms).saturating_mul(u64::from(limit.tokens));
            let message = format!(
                "a limit of `{}` pays off `{debt}` tokens in `{windows}` windows, which is more than ten years",
                limit.tokens
            );
            let fix = format!("write less: `capacity` and `reserve` together at most `{max}`, or a higher limit");
            report.problem(item.span.clone(), message, fix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_intended_limit_is_suggested() {
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
