//! Windows of days, weeks and months in a time zone: the times at which they end.
//!
//! A zone is looked up in the time-zone database of the system, and if it is missing there, in the bundled one. The
//! lists are computed last, for a configuration without problems: a list of days has fifty thousand entries, and rules
//! with the same calendar share it. This file does not read the clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::tz::{self, TimeZone, TimeZoneDatabase};
use jiff::{Timestamp, civil};

use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{SpannedStr, nearest};
use transom_limiter::rule::Rule;
use transom_limiter::window::{CALENDAR_END_MS, Calendar, Windows};

/// The periods that start at midnight in a time zone.
pub const PERIODS: [&str; 3] = ["day", "week", "month"];

const DAY_MS: i64 = 24 * 60 * 60 * 1000;
/// From the epoch, which is a Thursday, to the first Monday.
const MONDAY_MS: u64 = 4 * DAY_MS as u64;

/// The windows of a period, one of [`PERIODS`], in a zone. The list of a calendar is empty until
/// [`fill_calendars`] computes it.
pub fn windows_in_zone(period: &str, zone: &SpannedStr, report: &mut Report) -> Option<Windows> {
    let Some(zone) = canonical_zone(zone.text) else {
        report.problem(zone.span.clone(), format!("unknown time zone {}", quoted(zone.text)), zone_fix(zone.text));
        return None;
    };
    Some(match (period, zone.as_str()) {
        ("day", "UTC") => Windows::Even { period_ms: DAY_MS as u64, offset_ms: 0 },
        ("week", "UTC") => Windows::Even { period_ms: 7 * DAY_MS as u64, offset_ms: MONDAY_MS },
        ("month", "UTC") => Windows::Calendar(Calendar::utc_months()),
        _ => Windows::Calendar(Calendar { name: format!("{period} {zone}"), ends: Arc::default() }),
    })
}

/// Computes the lists of all calendars that rules use.
pub fn fill_calendars(rules: &mut [Rule]) {
    let mut computed: BTreeMap<String, Arc<[u64]>> = BTreeMap::new();
    for rule in rules {
        let plans = rule.plans.iter_mut().map(|plan| &mut plan.layers);
        let overrides = rule.overrides.iter_mut().map(|other| &mut other.layers);
        for limit in std::iter::once(&mut rule.layers).chain(plans).chain(overrides).flatten() {
            if let Windows::Calendar(calendar) = &mut limit.windows {
                let ends =
                    computed.entry(calendar.name.clone()).or_insert_with(|| match calendar.name.split_once(' ') {
                        Some((period, zone)) if calendar.ends.is_empty() => window_ends(period, zone),
                        _ => Arc::clone(&calendar.ends),
                    });
                calendar.ends = Arc::clone(ends);
            }
        }
    }
}

/// The name of a zone in the case of the database, and `UTC` for all names of UTC.
fn canonical_zone(name: &str) -> Option<String> {
    let zone = find_zone(name)?;
    match zone.iana_name()? {
        "UTC" | "Etc/UTC" | "Etc/UCT" | "UCT" | "Zulu" | "Etc/Zulu" | "Universal" | "Etc/Universal" => {
            Some("UTC".to_owned())
        }
        name => Some(name.to_owned()),
    }
}

fn find_zone(name: &str) -> Option<TimeZone> {
    let zone = tz::db().get(name).or_else(|_absent| TimeZoneDatabase::bundled().get(name)).ok();
    zone.filter(|zone| !zone.is_unknown())
}

/// The fix for an unknown zone.
fn zone_fix(text: &str) -> String {
    if let Some(offset) = utc_offset(text) {
        return offset_fix(offset);
    }
    let known: Vec<String> = TimeZoneDatabase::bundled().available().map(|name| name.as_str().to_owned()).collect();
    // `Paris` is the last part of a zone name.
    let has_city = |name: &&String| name.rsplit('/').next().is_some_and(|city| city.eq_ignore_ascii_case(text.trim()));
    // The database has six hundred names: only those with the same first two letters are compared.
    let begins =
        |name: &&str| text.get(..2).is_some_and(|two| name.get(..2).is_some_and(|n| n.eq_ignore_ascii_case(two)));
    let names = || known.iter().map(String::as_str).filter(begins);
    let guess = known.iter().find(has_city).map(String::as_str).or_else(|| nearest(text, names()));
    match guess {
        Some(guess) => format!("did you mean `\"{guess}\"`?"),
        None => String::from("write a zone of the IANA database, such as `\"Europe/Paris\"`, or `\"UTC\"`"),
    }
}

/// The offset in a text such as `GMT+2`, `UTC-05:30` or `+02:00`, from its sign on; `None` if the text is not an
/// offset.
fn utc_offset(text: &str) -> Option<&str> {
    let text = text.trim();
    let named = text.get(..3).filter(|name| ["GMT", "UTC"].iter().any(|known| name.eq_ignore_ascii_case(known)));
    let offset = text[named.map_or(0, str::len)..].trim_start();
    offset.starts_with(['+', '-']).then_some(offset)
}

/// The fix for an offset from UTC. Zones in `Etc` count hours westwards, so they have the opposite sign: two hours
/// ahead of UTC is `Etc/GMT-2`.
fn offset_fix(offset: &str) -> String {
    let named_zone = "a zone with daylight saving time, such as `\"Europe/Paris\"`";
    let digits = offset[1..].trim_start().trim_end_matches(":00");
    let digits = if digits.len() == 4 { digits.strip_suffix("00").unwrap_or(digits) } else { digits };
    let sign = if offset.starts_with('+') { '-' } else { '+' };
    match digits.parse::<u8>().map(|hours| format!("Etc/GMT{sign}{hours}")) {
        Ok(name) if find_zone(&name).is_some() => {
            format!("write {named_zone}, or `\"{name}\"`: zones in `Etc` have the opposite sign")
        }
        _ => format!("write {named_zone}"),
    }
}

/// The times at which windows end, in Unix milliseconds, from 1970 to beyond the year 2110.
fn window_ends(period: &str, zone: &str) -> Arc<[u64]> {
    let Some(zone) = find_zone(zone) else { return Arc::default() };
    let mut ends = Vec::new();
    let mut open = None;
    for (start_ms, day) in day_starts(&zone) {
        let number = match period {
            "day" => day,
            // The epoch is a Thursday; weeks start on Monday.
            "week" => (day + 3).div_euclid(7),
            _ => month_number(day),
        };
        if open.replace(number).is_some_and(|open| open != number)
            && let Ok(end_ms @ 1..) = u64::try_from(start_ms)
        {
            ends.push(end_ms);
        }
    }
    ends.into()
}

/// The start of each day in a zone, in Unix milliseconds, with the number of the day since the epoch.
///
/// Between two changes of the offset, midnights are a day apart. If a change skips midnight, the day starts with the
/// change; if a change repeats midnight, the day does not start again.
fn day_starts(zone: &TimeZone) -> Vec<(i64, i64)> {
    let first = Timestamp::UNIX_EPOCH - jiff::SignedDuration::from_hours(24 * 70);
    let changes = zone.following(first).map(|change| (change.timestamp(), change.offset()));
    let changes: Vec<_> = std::iter::once((first, zone.to_offset(first)))
        .chain(changes.take_while(|(at, _)| at.as_millisecond() <= CALENDAR_END_MS as i64 + 40 * DAY_MS))
        .map(|(at, offset)| (at.as_millisecond(), i64::from(offset.seconds()) * 1000))
        .collect();
    let mut days = Vec::new();
    let mut today = i64::MIN;
    for (i, (start_ms, offset_ms)) in changes.iter().enumerate() {
        let end_ms = changes.get(i + 1).map_or(CALENDAR_END_MS as i64 + 40 * DAY_MS, |(next_ms, _)| *next_ms);
        let day = (start_ms + offset_ms).div_euclid(DAY_MS);
        if day > today {
            days.push((*start_ms, day));
            today = day;
        }
        loop {
            let midnight_ms = (today + 1) * DAY_MS - offset_ms;
            if midnight_ms >= end_ms {
                break;
            }
            today += 1;
            days.push((midnight_ms, today));
        }
    }
    days
}

/// The number of the month that contains a day since the epoch.
fn month_number(day: i64) -> i64 {
    let date = civil::date(1970, 1, 1).saturating_add(jiff::Span::new().days(day.clamp(-DAYS_MAX, DAYS_MAX)));
    i64::from(date.year()) * 12 + i64::from(date.month())
}

/// More days than a calendar has, and fewer than a `jiff::Span` can hold.
const DAYS_MAX: i64 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fix_for_an_offset_is_the_zone_with_it() {
        for (text, name) in [
            ("GMT+2", "Etc/GMT-2"),
            ("UTC+02:00", "Etc/GMT-2"),
            ("+0200", "Etc/GMT-2"),
            ("utc -5", "Etc/GMT+5"),
            ("GMT+14", "Etc/GMT-14"),
        ] {
            assert!(zone_fix(text).contains(&format!("or `\"{name}\"`: ")), "{text}: {}", zone_fix(text));
            let hours =
                TimeZoneDatabase::bundled().get(name).unwrap().to_offset(Timestamp::UNIX_EPOCH).seconds() / 3600;
            assert_eq!(hours < 0, text.contains('-'), "{text} is {hours} hours from UTC");
        }
        // The zones in `Etc` have whole hours and at most 14 of them.
        for text in ["UTC+5:30", "GMT+20", "GMT+", "+x", "-é"] {
            assert!(!zone_fix(text).contains("Etc"), "{text}: {}", zone_fix(text));
        }
    }

    fn ms(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_millisecond() as u64
    }

    fn has(ends: &[u64], text: &str) -> bool {
        ends.binary_search(&ms(text)).is_ok()
    }

    /// The ends of days, computed by jiff for each day.
    fn by_jiff(zone: &str) -> Vec<u64> {
        let zone = find_zone(zone).unwrap();
        let mut ends: Vec<u64> = Vec::new();
        for day in civil::date(1970, 1, 2).series(jiff::Span::new().days(1)) {
            let at = day.to_zoned(zone.clone()).unwrap().start_of_day().unwrap().timestamp().as_millisecond() as u64;
            if ends.last().is_none_or(|last| at > *last) {
                ends.push(at);
            }
            if at > CALENDAR_END_MS {
                return ends;
            }
        }
        unreachable!("days go on beyond the year 2110")
    }

    #[test]
    fn days_start_at_the_times_that_jiff_computes() {
        for zone in [
            "Europe/Paris",
            "America/New_York",
            "America/Sao_Paulo",
            "Africa/Cairo",
            "Asia/Beirut",
            "America/Havana",
            "Asia/Kolkata",
            "Australia/Lord_Howe",
            "Pacific/Apia",
            "Pacific/Kwajalein",
            "Africa/Monrovia",
            "America/St_Johns",
        ] {
            let (ends, expected) = (window_ends("day", zone), by_jiff(zone));
            // The first day of the two lists may differ.
            let expected = expected.iter().filter(|end| **end > 2 * DAY_MS as u64 && **end <= CALENDAR_END_MS);
            let found = ends.iter().filter(|end| **end > 2 * DAY_MS as u64 && **end <= CALENDAR_END_MS);
            assert!(expected.eq(found), "{zone}");
            assert!(ends.is_sorted_by(|a, b| a < b) && *ends.last().unwrap() > CALENDAR_END_MS, "{zone}");
        }
    }

    #[test]
    fn days_have_23_and_25_hours_when_clocks_change() {
        let ends = window_ends("day", "Europe/Paris");
        for (start, end) in
            [("2025-03-29T23:00:00Z", "2025-03-30T22:00:00Z"), ("2025-10-25T22:00:00Z", "2025-10-26T23:00:00Z")]
        {
            assert!(has(&ends, start) && has(&ends, end));
            let between = ends.iter().filter(|at| (ms(start)..ms(end)).contains(at)).count();
            assert_eq!(between, 1, "{start}");
        }
    }

    #[test]
    fn a_day_without_midnight_starts_at_its_first_moment() {
        // In Beirut, clocks change from 24:00 to 01:00.
        let ends = window_ends("day", "Asia/Beirut");
        assert!(has(&ends, "2024-03-30T22:00:00Z"));
        assert_eq!(
            "2024-03-31T01:00:00+03:00".parse::<Timestamp>().unwrap().as_millisecond() as u64,
            ms("2024-03-30T22:00:00Z")
        );
    }

    #[test]
    fn weeks_start_on_monday_and_months_on_the_first() {
        let weeks = window_ends("week", "America/New_York");
        assert!(has(&weeks, "2025-03-03T05:00:00Z") && has(&weeks, "2025-03-10T04:00:00Z"));
        assert!(weeks.windows(2).skip(1).all(|two| [167, 168, 169].contains(&((two[1] - two[0]) / 3_600_000))));
        let months = window_ends("month", "America/New_York");
        assert!(has(&months, "2025-03-01T05:00:00Z") && has(&months, "2025-04-01T04:00:00Z"));
        assert!(months.len() > 12 * 139 && *months.last().unwrap() > CALENDAR_END_MS);
    }

    #[test]
    fn zones_have_the_case_of_the_database() {
        assert_eq!(canonical_zone("europe/paris").as_deref(), Some("Europe/Paris"));
        for utc in ["UTC", "utc", "Etc/UTC", "Zulu"] {
            assert_eq!(canonical_zone(utc).as_deref(), Some("UTC"), "{utc}");
        }
        for none in ["Mars/Olympus", "", "Etc/Unknown", "../UTC", "/etc/passwd", "+02:00"] {
            assert_eq!(canonical_zone(none), None, "{none}");
        }
        assert_eq!(zone_fix("Europe/Pariss"), "did you mean `\"Europe/Paris\"`?");
        assert_eq!(zone_fix("new_york"), "did you mean `\"America/New_York\"`?");
    }
}
