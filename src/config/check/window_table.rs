//! One window table: how much, in which windows, and what becomes of tokens at their ends.
//!
//! Every combination that the core cannot count is a problem here, with what to write instead.

use toml::de::DeValue;

use super::{calendar_windows, rule_windows};
use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::toml_reader::{Item, SpannedStr};
use transom_limiter::limit::{Limit, SHARDS_MAX};
use transom_limiter::window::{Period, Windows};

/// How far into the future a counter may owe: ten years.
const AHEAD_MAX_MS: u64 = 3653 * 24 * 60 * 60 * 1000;

const STARTS: &str = "write `\"epoch\"`, `\"random\"`, `\"first-request\"`, or a time such as `2024-01-01T09:00:00Z`";

/// Where the windows of a layer start.
#[derive(Clone, Copy, PartialEq)]
enum WindowStart {
    Epoch,
    /// At this time, Unix milliseconds, and every period before and after it.
    At(i64),
    Random,
    FirstRequest,
}

/// What of a table is still to be weighed once the limit is known.
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
            let fix = match rule_windows::guess_period(period.text) {
                Some(meant) => format!("write `period = \"{meant}\"`"),
                None => error.to_string(),
            };
            report.problem(period.span, format!("{} is no period", quoted(period.text)), fix);
            return None;
        }
    };
    limit.windows = match (start?, zone) {
        (WindowStart::Epoch, None) => limit.windows,
        (WindowStart::Epoch, Some((_, zone))) => windows_in_zone(&period, &zone?, report)?,
        (start, None) => windows_from_start(start, &period, start_span.unwrap_or(period.span.clone()), report)?,
        (_, Some((zone_key, _))) => {
            let message = "with `timezone`, windows start at midnight there, and `start` says otherwise";
            report.problem(zone_key, message, "remove `timezone`, or remove `start`");
            return None;
        }
    };
    let floats = matches!(limit.windows, Windows::FirstRequest { .. });
    extras.read(&mut limit, floats, report);
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

/// A time of RFC 3339.
fn read_start_time(item: &Item, text: &str, report: &mut Report) -> Option<WindowStart> {
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        return Some(WindowStart::At(time.as_millisecond()));
    }
    let (message, fix) = if [text, text.trim()].iter().any(|text| format!("{text}Z").parse::<jiff::Timestamp>().is_ok())
    {
        let message = format!("`start = {}` does not say in which offset from UTC", report.source(item.span.clone()));
        (message, format!("write `{}Z`, or the offset, such as `{}+01:00`", text.trim(), text.trim()))
    } else if text.parse::<jiff::civil::Date>().is_ok() {
        let message = format!("`start = {}` says no time of the day", report.source(item.span.clone()));
        (message, format!("write `{text}T00:00:00Z`"))
    } else {
        (format!("{} is no time", quoted(text)), String::from("write such as `2024-01-01T09:00:00Z`"))
    };
    report.problem(item.span.clone(), message, fix);
    None
}

/// Windows of a period that start elsewhere than at the epoch.
fn windows_from_start(
    start: WindowStart,
    period: &SpannedStr,
    span: std::ops::Range<usize>,
    report: &mut Report,
) -> Option<Windows> {
    let Ok(Period::Fixed { ms: period_ms }) = Period::parse(period.text) else {
        let message = "a `month` starts with the first of the month, and `start` says otherwise";
        report.problem(span, message, "remove `start`, or write a period of days, such as `period = \"30d\"`");
        return None;
    };
    Some(match start {
        WindowStart::Random => Windows::Random { period_ms },
        WindowStart::FirstRequest => Windows::FirstRequest { period_ms },
        WindowStart::Epoch => Windows::Even { period_ms, offset_ms: 0 },
        // Only where in its period it lies matters: equal grids are the same windows.
        WindowStart::At(ms) => Windows::Even { period_ms, offset_ms: ms.rem_euclid(period_ms as i64) as u64 },
    })
}

fn windows_in_zone(period: &SpannedStr, zone: &SpannedStr, report: &mut Report) -> Option<Windows> {
    if calendar_windows::PERIODS.contains(&period.text) {
        return calendar_windows::windows_in_zone(period.text, zone, report);
    }
    let message = format!(
        "`timezone` says when a `day`, a `week` or a `month` begins, and the period is {}",
        quoted(period.text)
    );
    let word = |text: &str| Period::parse(period.text) == Period::parse(text);
    let fix = match calendar_windows::PERIODS.into_iter().find(|text| word(text)) {
        Some(calendar) => format!("write `period = \"{calendar}\"`"),
        None => format!("remove `timezone`, or write {}", quoted_list(calendar_windows::PERIODS, "or")),
    };
    report.problem(period.span.clone(), message, fix);
    None
}

impl OptionalSettings<'_> {
    fn read(self, limit: &mut Limit, floats: bool, report: &mut Report) {
        let number = |item: &Option<Item>, range: std::ops::RangeInclusive<u64>, report: &mut Report| {
            let number = item.as_ref().and_then(|item| item.integer(range, report));
            number.and_then(|number| u32::try_from(number).ok())
        };
        let most = u64::from(u32::MAX);
        let capacity = number(&self.capacity, 1..=most, report);
        limit.reserve = number(&self.reserve, 0..=most, report).unwrap_or(0);
        limit.shards = number(&self.shards, 1..=u64::from(SHARDS_MAX), report).unwrap_or(1);
        if let (Some(capacity), Some(item)) = (capacity, &self.capacity) {
            if capacity < limit.tokens {
                let message =
                    format!("a window grants `{}`, and `capacity` has room for `{capacity}` only", limit.tokens);
                let fix = format!("write a capacity of at least `{}`, or leave it out", limit.tokens);
                report.problem(item.span.clone(), message, fix);
            }
            limit.capacity = capacity.max(limit.tokens);
        }
        self.check_shards(limit, floats, report);
        self.check_debt(limit, report);
    }

    /// Shards have their part of a plain window, and know nothing of the windows beside it.
    fn check_shards(&self, limit: &Limit, floats: bool, report: &mut Report) {
        let Some(item) = self.shards.as_ref().filter(|_| limit.shards > 1) else { return };
        if limit.shards > limit.tokens {
            let message = format!("`{}` shards share a limit of `{}`", limit.shards, limit.tokens);
            report.problem(item.span.clone(), message, format!("write at most `{}`", limit.tokens));
        }
        let other = match () {
            () if limit.capacity > limit.tokens => "`capacity`",
            () if limit.reserve > 0 => "`reserve`",
            () if floats => "`start = \"first-request\"`",
            () => return,
        };
        let message = format!("`shards` are for windows that stand for themselves, and {other} ties them together");
        report.problem(item.key_span.clone(), message, format!("remove `shards`, or remove {other}"));
    }

    /// A counter names the window that will have paid what it owes.
    fn check_debt(&self, limit: &Limit, report: &mut Report) {
        let Some(item) = self.reserve.as_ref().filter(|_| limit.reserve > 0).or(self.capacity.as_ref()) else { return };
        let owed = u64::from(limit.capacity) + u64::from(limit.reserve);
        // An empty calendar is one of days, weeks or months that is still to be made.
        let usual_ms = match &limit.windows {
            Windows::Calendar(_) if limit.period_text == "day" => 24 * 60 * 60 * 1000,
            Windows::Calendar(_) if limit.period_text == "week" => 7 * 24 * 60 * 60 * 1000,
            Windows::Calendar(_) => 31 * 24 * 60 * 60 * 1000,
            windows => windows.typical_ms(),
        };
        let windows = owed.div_ceil(u64::from(limit.tokens));
        if windows.saturating_mul(usual_ms) > AHEAD_MAX_MS {
            let most = (AHEAD_MAX_MS / usual_ms).saturating_mul(u64::from(limit.tokens));
            let message = format!(
                "a limit of `{}` would pay `{owed}` tokens only after `{windows}` windows, more than ten years ahead",
                limit.tokens
            );
            let fix = format!("write less: `capacity` and `reserve` together at most `{most}`, or a higher limit");
            report.problem(item.span.clone(), message, fix);
        }
    }
}
