//! The layers of a rule: a limit and its windows, as a string such as `33/minute` or as a table.
//!
//! A layer with longer windows may be unreachable because of one with shorter windows: 2000 an hour is never reached
//! beside 33 a minute, but takes effect once the other limit is raised. That is a note of `lint`, not a problem. The
//! reverse is a problem: 2000 a minute beside 33 an hour is a mistake.

use toml::de::DeValue;

use super::byte_cost::{Tokens, tokens_of_size};
use super::calendar;
use super::diagnostics::{Report, Span, quoted, quoted_list};
use super::settings::{Boolean, Custom, DAY_MS, Integer, Kind, Optional, Required, Section, Shape, Text, size_bytes};
use super::toml_reader::{Item, SpannedString, Table, nearest};
use transom_limiter::burst_bound;
use transom_limiter::limit::{Limit, LimitError};
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::sharded_counter::SHARDS_MAX;
use transom_limiter::window::{END_MAX_MS, Period, PeriodError, Windows};

const EXAMPLE: &str = "[\"2000/hour\", \"33/minute\"]";
const TABLE_FIX: &str = "write `{ limit = 33, period = \"minute\" }`";
const STARTS: [(&str, WindowStart); 3] =
    [("epoch", WindowStart::Epoch), ("random", WindowStart::Random), ("first-request", WindowStart::FirstRequest)];
/// The least number that is taken for milliseconds since the epoch: in 1973.
const START_MIN_MS: i64 = 100_000_000_000;
const TOKENS_MAX: u64 = u32::MAX as u64;
/// The longest time in which later windows pay off a debt: ten years.
const DEBT_MAX_MS: u64 = 3653 * DAY_MS;

/// Names of a limit in other products.
const LIMIT_NAMES: [&str; 11] = [
    "limit",
    "rate",
    "requests",
    "requests_per_unit",
    "average",
    "events",
    "max",
    "max_requests",
    "tokens",
    "count",
    "quota",
];
/// Names of a period in other products.
const PERIOD_NAMES: [&str; 9] =
    ["period", "per", "interval", "window", "unit", "duration", "time_window", "timeframe", "seconds"];
/// Units of rates.
const RATES: [(&str, &str); 4] = [("rps", "second"), ("qps", "second"), ("rpm", "minute"), ("rph", "hour")];
const BURST_NAMES: [&str; 3] = ["burst", "burst_size", "bucket_size"];
const NO_DELAY_FIX: &str = "remove it: requests above the limit are refused at once, unless `on_limit` is `delay`";

const PERIODS: [&str; 6] = ["second", "minute", "hour", "day", "week", "month"];

settings! {
    /// A layer of a rule, as a table.
    pub struct WindowSettings {
        /// Tokens granted at the start of each window.
        limit: Option<u32> = Required(Optional(Tokens(33)), TABLE_FIX);
        /// Length of a window.
        period: Option<SpannedString> = Required(Custom::or_empty(|| Shape::Text("PERIOD"), read_period), TABLE_FIX);
        /// `"epoch"`: window number floor(Unix time / period). A time, such as `2024-01-01T09:00:00-08:00` (quotes
        /// optional): a window begins then, and every period before and after; also in milliseconds since the epoch, such as
        /// `1704128400000` (from 1973 on: a smaller number is taken for seconds and rejected; `0` is `"epoch"`). With
        /// `timezone`: a time of day, such as `"09:00"`. `"random"`: each key has an offset, derived from its hash and equal
        /// on every gateway, so that keys do not all start at once. `"first-request"`: a key's first request opens a window
        /// of one period; the next request after its end opens another.
        start: Option<WindowStart> = Custom {
            default: None,
            default_text: Some("\"epoch\""),
            shape: || Shape::AnyOf(vec![
                Shape::Words(STARTS.map(|(word, _)| word).to_vec()),
                Shape::Text("RFC 3339 time"),
                Shape::Text("`\"HH:MM\"`"),
                Shape::described(
                    "0, 100,000,000,000 to 4,398,046,511,103",
                    Shape::AnyOf(vec![Shape::Integer(0..=0), Shape::Integer(START_MIN_MS as u64..=END_MAX_MS)]),
                ),
            ]),
            read: |item, report| read_start(item, report).map(Some),
        };
        /// Time zone, for the periods `day`, `week` and `month`. Windows begin at midnight there, or at the time of day that
        /// `start` states. Without it: UTC, with weeks that start on Thursday.
        timezone: Option<SpannedString> = Text("IANA name", "\"Europe/Paris\"");
        /// Unused tokens roll over, up to this many; at least `limit`. With the `limit` itself none roll over, as without
        /// `capacity`. A key that is new or was idle for long has all of them.
        capacity: Option<u32> = Optional(Tokens(50));
        /// Tokens that may be taken from future windows: by callers of the decision API, and by requests that are delayed
        /// (`on_limit = "delay"`). See [Tokens of other windows](../explanation/windows.md#tokens-of-other-windows).
        reserve: u32 = Integer(0, 0..=TOKENS_MAX);
        /// Number of counters into which one busy counter, such as that of `"global"`, is split so that workers do not
        /// contend for it. Together they hold exactly the limit.
        shards: u32 = Integer(1, 1..=SHARDS_MAX as u64);
        /// The limit holds in every interval of one `period`, wherever it begins, and not only between the ends of windows.
        /// A token counts for up to an eighth of the period longer. Takes up to nine counters for each key. Not with `month`,
        /// with the four settings above or `start`, or with `on_limit = "delay"`. See
        /// [Sliding windows](../explanation/windows.md#sliding-windows).
        sliding: bool = Boolean(false);
    }
}

/// The setting `windows` of a rule, a plan or an override: layers in the order of the file.
pub fn windows() -> Custom<Vec<Limit>> {
    let shape = || Shape::list_of(vec![Shape::Text("`\"LIMIT/PERIOD\"`"), Shape::Table(WindowSettings::settings())]);
    Custom::or_empty(shape, read_layers)
}

/// The setting `concurrent` of a rule, a plan or an override.
pub fn concurrent() -> Optional<Integer<u32>> {
    Optional(Integer(10, 1..=TOKENS_MAX))
}

/// Makes `windows` required unless there is `concurrent`. Call after all settings of the table were read.
pub fn require_limits(table: &mut Table) {
    if table.lacks("concurrent") {
        table.require_known("windows", "write `windows = [\"33/minute\"]`");
    }
}

fn read_layers(item: &Item, report: &mut Report) -> Option<Vec<Limit>> {
    if let DeValue::String(text) = item.value {
        let layer = |part: &str| match Limit::parse(part.trim()) {
            Ok(_) => Some(format!("\"{}\"", part.trim())),
            Err(_) => guess_limit(part).map(|(tokens, period)| format!("\"{tokens}/{period}\"")),
        };
        let layers = layer(text).or_else(|| {
            let layers: Option<Vec<String>> = text.split([',', ';']).map(layer).collect();
            Some(layers?.join(", "))
        });
        let fix = match layers {
            _ if item.is_off() => {
                String::from("remove the rule, or write `on_limit = \"shadow\"` to count without refusals")
            }
            Some(layers) => item.fix_with(&format!("[{layers}]")),
            None => item.fix_with(EXAMPLE),
        };
        return item.wrong_type("a list", &fix, report);
    }
    if let DeValue::Integer(_) = item.value {
        let example = format!("[\"{}/minute\"]", report.source(item.span.clone()));
        return item.wrong_type("a list", &format!("{}, if minutes are meant", item.fix_with(&example)), report);
    }
    let items = item.list(EXAMPLE, report)?;
    if items.is_empty() {
        report.problem(item.span.clone(), "`windows` is an empty list", item.fix_with(EXAMPLE));
    }
    let mut found: Vec<Limit> = Vec::new();
    for item in items {
        let Some(limit) = read_layer(&item, report) else { continue };
        match found.iter().find_map(|other| find_conflict(&limit, other)) {
            Some((message, fix)) => report.problem(item.span, message, fix),
            None => found.push(limit),
        }
    }
    Some(found)
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
        DeValue::String(text) => {
            let explain = |error| (format!("{} is not a limit", quoted(text)), limit_fix(text, error));
            let of_size = |(size, period): (&str, &str)| Some((size_bytes(size.trim())?, period.to_owned()));
            let limit = match text.split_once('/').and_then(of_size) {
                Some((bytes, period)) => Limit::new(tokens_of_size(bytes, item, report)?, &period),
                None => Limit::parse(text),
            };
            report.accept(item.span.clone(), limit.map_err(explain))
        }
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
    let parts = text.split_once('/').map(|(amount, period)| (guess_tokens(amount.trim()), period.trim()));
    if let Some((Some(tokens), seconds)) = parts
        && seconds.bytes().all(|byte| byte.is_ascii_digit())
        && Limit::parse(&format!("{tokens}/{seconds}s")).is_ok()
    {
        return format!("write `\"{tokens}/{seconds}s\"`, if seconds are meant");
    }
    // Such as `1000/day/user`.
    if let Some((limit, counted_by)) = text.rsplit_once('/')
        && counted_by.contains(|c: char| c.is_ascii_alphabetic())
        && Limit::parse(limit.trim()).is_ok()
    {
        return format!("write `\"{}\"`; the `key` of the rule says whose requests it counts", limit.trim());
    }
    match (error, guess_limit(text)) {
        (LimitError::Syntax | LimitError::Period(PeriodError::Syntax), Some((tokens, period))) => {
            format!("write `\"{tokens}/{period}\"`")
        }
        (error, _) => error.to_string(),
    }
}

/// The tokens and the period that are most likely intended by a text; minutes if it states no period.
fn guess_limit(text: &str) -> Option<(u64, String)> {
    let plain: String = text.split_whitespace().collect();
    // Only ASCII letters change, so byte positions are the same in both.
    let lower = plain.to_ascii_lowercase();
    let separator = lower.find('/').map(|at| at..at + 1).or(lower.find("per").map(|at| at..at + 3));
    // Such as `5rps`.
    let rate = RATES.iter().find_map(|(unit, period)| Some((lower.strip_suffix(unit)?, *period)));
    let (amount, period) = match (&separator, rate) {
        (Some(separator), _) => (&plain[..separator.start], guess_period(&plain[separator.end..])),
        (None, Some((amount, period))) => (amount, Some(period.to_owned())),
        (None, None) => (plain.as_str(), Some("minute".to_owned())),
    };
    guess_tokens(amount).zip(period).filter(|(tokens, period)| Limit::parse(&format!("{tokens}/{period}")).is_ok())
}

/// A limit in the words of other products.
struct ForeignLimit {
    tokens: u64,
    /// `None`: the table states no period.
    period: Option<String>,
    burst: Option<u64>,
}

impl ForeignLimit {
    /// Reads the limit that the keys of a table state, those of this product included.
    fn find(table: &Table) -> Option<ForeignLimit> {
        let first = |names: &[&str]| names.iter().find_map(|name| table.given(name));
        let whole = |item: &Item| text_of(item)?.replace('_', "").parse::<u64>().ok();
        let period = first(&PERIOD_NAMES).and_then(|item| period_of(&item));
        let amount = match first(&LIMIT_NAMES) {
            Some(item) => text_of(&item)?,
            // The limit is in `windows`, which `burst` changes.
            None => table.given("windows")?.words().first()?.text.to_owned(),
        };
        let has_period = amount.contains('/') || amount.contains("per");
        let (tokens, stated) = guess_limit(&amount)?;
        let period = if has_period { Some(stated) } else { period };
        Some(ForeignLimit { tokens, period, burst: first(&BURST_NAMES).and_then(|item| whole(&item)) })
    }

    /// The limit as an item of `windows`, and a remark.
    fn layer(&self) -> (String, &'static str) {
        let (tokens, period) = (self.tokens, self.period.as_deref().unwrap_or("minute"));
        let remark = if self.period.is_none() { ", if minutes are meant" } else { "" };
        match self.burst {
            Some(burst) => {
                let layer = format!("{{ limit = {tokens}, period = \"{period}\", capacity = {} }}", burst.max(tokens));
                (layer, ": unused tokens roll over, up to `capacity`")
            }
            None => (format!("\"{tokens}/{period}\""), remark),
        }
    }
}

/// The text of a number or a string.
fn text_of(item: &Item) -> Option<String> {
    match item.value {
        DeValue::Integer(number) => Some(number.as_str().to_owned()),
        DeValue::String(text) => Some(text.to_string()),
        _ => None,
    }
}

/// The period that the value of a key of another product states; a number is in seconds.
fn period_of(item: &Item) -> Option<String> {
    let text = text_of(item)?.replace('_', "");
    guess_period(&text).or_else(|| guess_period(&format!("{}s", text.parse::<u64>().ok()?)))
}

/// The fixes for limits in the words of other products, in the table of a rule, a plan or an override. Call after all settings
/// were read.
pub fn suggest_windows(table: &mut Table) {
    let limit = ForeignLimit::find(table);
    let (layer, remark) = limit.map_or_else(|| (String::from("\"33/minute\""), ""), |limit| limit.layer());
    let fix = format!("write `windows = [{layer}]`{remark}");
    let names = LIMIT_NAMES.iter().chain(&PERIOD_NAMES).chain(&BURST_NAMES);
    for key in names {
        // A list was meant to be `windows` itself.
        if table.given(key).is_none_or(|item| !matches!(item.value, DeValue::Array(_))) {
            table.suggest_for(key, "windows", fix.clone());
        }
    }
    table.suggest_for("nodelay", "windows", NO_DELAY_FIX);
    // As in Kong: `minute = 10`.
    let units: Vec<&'static str> = PERIODS.into_iter().filter(|unit| table.given(unit).is_some()).collect();
    let layer = |unit: &&str| Some(format!("\"{}/{unit}\"", text_of(&table.given(unit)?)?.parse::<u64>().ok()?));
    let layers: Vec<String> = units.iter().filter_map(layer).collect();
    if !layers.is_empty() {
        let fix = format!("write `windows = [{}]`", layers.join(", "));
        units.into_iter().for_each(|unit| table.suggest_for(unit, "windows", fix.clone()));
    }
}

/// The fixes for limits in the words of other products, in the table of a window.
fn suggest_settings(table: &mut Table) {
    let ForeignLimit { tokens, period, burst } =
        ForeignLimit::find(table).unwrap_or(ForeignLimit { tokens: 33, period: None, burst: None });
    let rate = ["rate", "limit"].iter().find_map(|name| table.given(name));
    let has_period = rate.and_then(|item| text_of(&item)).is_some_and(|text| text.contains('/'));
    let period_fix = format!("write `period = \"{}\"`", period.as_deref().unwrap_or("minute"));
    let limit_fix = match (has_period, period) {
        (true, Some(period)) => format!("write `limit = {tokens}, period = \"{period}\"`"),
        _ => format!("write `limit = {tokens}`"),
    };
    let capacity = burst.map_or(50, |burst| burst.max(tokens));
    let capacity_fix = format!("write `capacity = {capacity}`: unused tokens roll over, up to `capacity`");
    for (names, meant, fix) in [
        (&LIMIT_NAMES[1..], "limit", limit_fix),
        (&PERIOD_NAMES[1..], "period", period_fix),
        (&BURST_NAMES[..], "capacity", capacity_fix),
    ] {
        names.iter().for_each(|key| table.suggest_for(key, meant, fix.clone()));
    }
    table.suggest_for("nodelay", "capacity", NO_DELAY_FIX);
    if has_period {
        table.not_missing("period");
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
fn guess_period(text: &str) -> Option<String> {
    let plain: String = text.to_lowercase().split_whitespace().collect();
    if Period::parse(&plain).is_ok() {
        return Some(plain);
    }
    // ISO 8601, such as `PT1M`.
    if let Some(iso) = plain.strip_prefix("pt") {
        return guess_period(iso);
    }
    let unit = plain.trim_start_matches(|c: char| c.is_ascii_digit());
    let number = &plain[..plain.len() - unit.len()];
    let word = match unit {
        "" => return None,
        "s" if number.is_empty() => "second",
        "m" if number.is_empty() => "minute",
        "h" if number.is_empty() => "hour",
        "d" if number.is_empty() => "day",
        "w" if number.is_empty() => "week",
        "ms" | "s" | "m" | "h" | "d" | "w" => unit,
        "sec" | "secs" => "second",
        "min" | "mins" => "minute",
        "hr" | "hrs" => "hour",
        "mo" => "month",
        _ => nearest(unit, PERIODS)?,
    };
    let meant = match (number, word) {
        ("", "ms") => return None,
        (_, "month") if !number.is_empty() && number != "1" => return None,
        ("" | "1", _) => word.to_owned(),
        (_, "ms") => plain.clone(),
        _ => format!("{number}{}", &word[..1]),
    };
    Period::parse(&meant).is_ok().then_some(meant)
}

/// Where the windows of a layer start.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum WindowStart {
    Epoch,
    /// At this time in Unix milliseconds, and at every whole period before and after it.
    At(i64),
    /// At this time of day in a time zone.
    TimeOfDay(jiff::civil::Time),
    Random,
    FirstRequest,
}

fn read_window_table(item: &Item, report: &mut Report) -> Option<Limit> {
    let mut table = item.table("the window", "", report)?;
    let settings = WindowSettings::read(&mut table, report);
    suggest_settings(&mut table);
    let limit = settings.resolve(&table, report);
    table.finish(report);
    limit
}

fn read_period(item: &Item, report: &mut Report) -> Option<Option<SpannedString>> {
    if let DeValue::Integer(_) = item.value {
        let fix = format!("write `period = \"{}s\"`, if seconds are meant", report.source(item.span.clone()));
        return item.wrong_type("a string", &fix, report);
    }
    Text("PERIOD", "\"minute\"").read(item, report)
}

fn read_start(item: &Item, report: &mut Report) -> Option<WindowStart> {
    match item.value {
        DeValue::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => read_time(item, text, report),
        DeValue::String(_) => item.choice(&STARTS, report),
        DeValue::Datetime(time) => read_time(item, &time.to_string(), report),
        DeValue::Integer(_) => {
            let written = report.source(item.span.clone());
            let ms: Option<i64> = written.replace('_', "").parse().ok();
            // A smaller number is in seconds, or an hour.
            let ms = ms.filter(|ms| *ms == 0 || (START_MIN_MS..=END_MAX_MS as i64).contains(ms));
            let seconds = written.replace('_', "").parse().ok().and_then(|seconds: i64| seconds.checked_mul(1000));
            let fix = match seconds.filter(|ms| (START_MIN_MS..=END_MAX_MS as i64).contains(ms)) {
                Some(ms) => format!("write `{ms}`, if these are seconds: a number is in milliseconds since the epoch"),
                None => String::from(
                    "write milliseconds since the epoch, such as `1704128400000`, or a time such as `2024-01-01T17:00:00Z`",
                ),
            };
            match ms {
                Some(ms) => Some(WindowStart::At(ms)),
                None => report.reject(item.span.clone(), format!("{} is not a time", quoted(written)), fix),
            }
        }
        _ => {
            let fix = "write `\"epoch\"`, `\"random\"`, `\"first-request\"`, or a time such as `2024-01-01T09:00:00Z`";
            item.wrong_type("a string or a time", fix, report)
        }
    }
}

/// Reads a time in RFC 3339 format, or a time of day.
fn read_time(item: &Item, text: &str, report: &mut Report) -> Option<WindowStart> {
    if text.len() <= "09:00:00".len()
        && let Ok(time) = text.parse::<jiff::civil::Time>()
    {
        return Some(WindowStart::TimeOfDay(time));
    }
    let is_time = |text: &str| text.parse::<jiff::Timestamp>();
    if let Ok(time) = is_time(text) {
        return Some(WindowStart::At(time.as_millisecond()));
    }
    let (given, plain) = (report.source(item.span.clone()), text.trim());
    let (message, fix) = if is_time(&format!("{plain}Z")).is_ok() {
        let fix = format!("write `{plain}Z`, or the offset, such as `{plain}+01:00`");
        (format!("`start = {given}` has no offset from UTC"), fix)
    } else if text.parse::<jiff::civil::Date>().is_ok() {
        (format!("`start = {given}` has no time of day"), format!("write `{text}T00:00:00Z`"))
    } else {
        (format!("{} is not a time", quoted(text)), String::from("write, for example, `2024-01-01T09:00:00Z`"))
    };
    report.reject(item.span.clone(), message, fix)
}

impl WindowSettings {
    /// The limit; `None` if a setting is invalid without which the windows are unknown.
    fn resolve(&self, table: &Table, report: &mut Report) -> Option<Limit> {
        let (tokens, period) = (self.limit?, self.period.as_ref()?);
        let explain = |error: LimitError| {
            let meant = guess_period(&period.text).map(|meant| format!("write `period = \"{meant}\"`"));
            (format!("{} is not a period", quoted(&period.text)), meant.unwrap_or_else(|| error.to_string()))
        };
        let limit = Limit::new(tokens, &period.text).map_err(explain);
        let mut limit = report.accept(period.span.clone(), limit)?;
        if self.sliding {
            limit.windows = sliding_windows(period, &limit.windows, table, report)?;
            return Some(limit);
        }
        let start = match table.given("start") {
            Some(item) => (self.start?, item.span),
            None => (WindowStart::Epoch, period.span.clone()),
        };
        limit.windows = match (start, table.given("timezone")) {
            ((WindowStart::Epoch, _), None) => limit.windows,
            ((WindowStart::Epoch, _), Some(_)) => {
                windows_in_zone(period, self.timezone.as_ref()?, jiff::civil::Time::midnight(), report)?
            }
            ((WindowStart::TimeOfDay(time), _), Some(_)) => {
                windows_in_zone(period, self.timezone.as_ref()?, time, report)?
            }
            ((WindowStart::TimeOfDay(_), span), None) => {
                let message = "a time of day needs `timezone`";
                return report.reject(span, message, "add `timezone = \"Europe/Paris\"`, or `timezone = \"UTC\"`");
            }
            ((start, span), None) => windows_from_start(start, &limit.windows, span, report)?,
            (_, Some(zone)) => {
                let message =
                    "`timezone` and `start` are both given: with `timezone`, windows start at midnight in that zone";
                return report.reject(zone.key_span, message, "keep one of the two");
            }
        };
        (limit.reserve, limit.shards) = (self.reserve, self.shards);
        if let (Some(capacity), Some(item)) = (self.capacity, table.given("capacity")) {
            if capacity < tokens {
                let message = format!("`capacity` is `{capacity}`, which is less than the limit, `{tokens}`");
                report.problem(item.span, message, format!("write a capacity of at least `{tokens}`, or remove it"));
            }
            limit.capacity = Some(capacity);
        }
        check_shards(&limit, table, report);
        check_debt(&limit, table, report);
        Some(limit)
    }
}

/// The windows of a period with a `start` other than the epoch.
fn windows_from_start(start: WindowStart, even: &Windows, span: Span, report: &mut Report) -> Option<Windows> {
    let Windows::Even { period_ms, .. } = *even else {
        let message = "`start` cannot be combined with `month`, which starts on the first day of the month";
        return report.reject(span, message, "remove `start`, or write a period of days, such as `period = \"30d\"`");
    };
    Some(match start {
        WindowStart::Random => Windows::Random { period_ms },
        WindowStart::FirstRequest => Windows::FirstRequest { period_ms },
        // `resolve` handles times of day.
        WindowStart::Epoch | WindowStart::TimeOfDay(_) => Windows::Even { period_ms, offset_ms: 0 },
        // The offset in the period is enough: start times that are whole periods apart give the same windows.
        WindowStart::At(ms) => Windows::Even { period_ms, offset_ms: ms.rem_euclid(period_ms as i64) as u64 },
    })
}

fn sliding_windows(period: &SpannedString, even: &Windows, table: &Table, report: &mut Report) -> Option<Windows> {
    for item in ["start", "timezone", "capacity", "reserve", "shards"].into_iter().filter_map(|key| table.given(key)) {
        let message = format!("`{}` cannot be combined with `sliding = true`", item.key);
        report.problem(item.key_span, message, format!("remove `{}`, or remove `sliding`", item.key));
    }
    let Windows::Even { period_ms, .. } = *even else {
        let message = "`sliding` cannot be combined with `month`: months differ in length";
        return report.reject(period.span.clone(), message, "write a period of days, such as `period = \"30d\"`");
    };
    Some(Windows::Sliding { period_ms })
}

fn windows_in_zone(
    period: &SpannedString,
    zone: &SpannedString,
    begins_at: jiff::civil::Time,
    report: &mut Report,
) -> Option<Windows> {
    let text = period.text.as_str();
    if calendar::PERIODS.contains(&text) {
        return calendar::windows_in_zone(text, zone, begins_at, report);
    }
    let message = format!("`timezone` needs the period `day`, `week` or `month`, and the period is {}", quoted(text));
    let fix = match calendar::PERIODS.into_iter().find(|calendar| Period::parse(calendar) == Period::parse(text)) {
        Some(calendar) => format!("write `period = \"{calendar}\"`"),
        None => format!("remove `timezone`, or write {}", quoted_list(calendar::PERIODS, "or")),
    };
    report.reject(period.span.clone(), message, fix)
}

/// Shards count in the same windows, which those opened by the first request of each shard would not be.
fn check_shards(limit: &Limit, table: &Table, report: &mut Report) {
    let Some(item) = table.given("shards").filter(|_| limit.shards > 1) else { return };
    if limit.shards > limit.tokens {
        let message =
            format!("there are more shards, `{}`, than the limit has tokens, `{}`", limit.shards, limit.tokens);
        report.problem(item.span, message, format!("write at most `{}`", limit.tokens));
    }
    if limit.windows.are_opened_by_requests() {
        let message = "`shards` cannot be combined with `start = \"first-request\"`";
        report.problem(item.key_span, message, "remove `shards`, or remove `start = \"first-request\"`");
    }
}

/// A counter stores the number of the window that pays off its debt, which bounds `capacity` and `reserve`.
fn check_debt(limit: &Limit, table: &Table, report: &mut Report) {
    let Some(item) = table.given("reserve").filter(|_| limit.reserve > 0).or(table.given("capacity")) else { return };
    let period_ms = match Period::parse(&limit.period_text) {
        Ok(Period::Fixed { ms }) => ms,
        Ok(Period::Month) | Err(_) => 31 * DAY_MS,
    };
    let debt = u64::from(limit.capacity()) + u64::from(limit.reserve);
    let windows = debt.div_ceil(u64::from(limit.tokens));
    if windows.saturating_mul(period_ms) > DEBT_MAX_MS {
        let max = (DEBT_MAX_MS / period_ms).saturating_mul(u64::from(limit.tokens));
        let message = format!(
            "a limit of `{}` pays off `{debt}` tokens in `{windows}` windows, which is more than ten years",
            limit.tokens
        );
        let fix = format!("write less: `capacity` and `reserve` together at most `{max}`, or a higher limit");
        report.problem(item.span, message, fix);
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
            ("33r/m", "write `\"33/minute\"`"),
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
            ("10/60", "write `\"10/60s\"`, if seconds are meant"),
            ("100 / 15m", "write `\"100/15m\"`"),
            ("100req/15m", "write `\"100/15m\"`"),
            ("1k/30m", "write `\"1000/30m\"`"),
            ("0/10", "a limit is at least `1`"),
            ("9999999k/hour", "write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            ("0/minute", "a limit is at least `1`"),
            ("5/1ms", "the shortest period is `10ms`"),
        ] {
            assert_eq!(limit_fix(text, Limit::parse(text).unwrap_err()), meant, "{text}");
        }
    }
}
