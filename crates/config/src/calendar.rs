//! Windows of days, weeks and months in a time zone: the times at which they end. They follow daylight saving time.
//!
//! A zone is looked up in the time-zone database of the system, and if it is missing there, in the bundled one. The
//! lists are computed last, for a configuration without problems: a list of days has fifty thousand entries, and rules
//! with the same calendar share it. This file does not read the clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::tz::{self, TimeZone, TimeZoneDatabase};
use jiff::{ToSpan, civil};

use super::diagnostics::{Report, quoted};
use super::settings::DAY_MS;
use super::toml_reader::{SpannedString, nearest};
use transom_limiter::rule::Rule;
use transom_limiter::window::{CALENDAR_END_MS, Calendar, Windows};

/// The periods that start at midnight in a time zone.
pub const PERIODS: [&str; 3] = ["day", "week", "month"];

/// The windows of a period, one of [`PERIODS`], in a zone; they begin at this time of day. The list of a calendar is empty until
/// [`fill_calendars`] computes it.
pub fn windows_in_zone(
    period: &str,
    zone: &SpannedString,
    begins_at: civil::Time,
    report: &mut Report,
) -> Option<Windows> {
    let Some(name) = canonical_zone(&zone.text) else {
        return report.reject(
            zone.span.clone(),
            format!("unknown time zone {}", quoted(&zone.text)),
            zone_fix(&zone.text),
        );
    };
    let is_midnight = begins_at == civil::Time::midnight();
    let offset_ms = begins_at.duration_since(civil::Time::midnight()).as_millis() as u64;
    Some(match (period, name.as_str()) {
        ("day", "UTC") => Windows::Even { period_ms: DAY_MS, offset_ms },
        // The epoch is a Thursday, four days before a Monday.
        ("week", "UTC") => Windows::Even { period_ms: 7 * DAY_MS, offset_ms: 4 * DAY_MS + offset_ms },
        ("month", "UTC") if is_midnight => Windows::Calendar(Calendar::utc_months()),
        _ => {
            let time = if is_midnight { String::new() } else { format!(" {begins_at}") };
            Windows::Calendar(Calendar { name: format!("{period} {name}{time}"), ends: Arc::default() })
        }
    })
}

/// Computes the lists of all calendars that rules use.
pub fn fill_calendars<'r>(rules: impl Iterator<Item = &'r mut Rule>) {
    let mut computed: BTreeMap<String, Arc<[u64]>> = BTreeMap::new();
    for rule in rules {
        let plans = rule.plans.iter_mut().map(|plan| &mut plan.layers);
        let overrides = rule.overrides.iter_mut().map(|other| &mut other.layers);
        let of_clients = rule.client_limits.iter_mut().map(|limits| &mut limits.plan.layers);
        for limit in std::iter::once(&mut rule.layers).chain(plans).chain(overrides).chain(of_clients).flatten() {
            if let Windows::Calendar(calendar) = &mut limit.windows
                && calendar.ends.is_empty()
                && let Some((period, zone)) = calendar.name.split_once(' ')
            {
                let (zone, time) = zone.split_once(' ').unwrap_or((zone, "00:00:00"));
                let begins_at = time.parse().unwrap_or_default();
                let ends =
                    computed.entry(calendar.name.clone()).or_insert_with(|| window_ends(period, zone, begins_at));
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
fn window_ends(period: &str, zone: &str, begins_at: civil::Time) -> Arc<[u64]> {
    let Some(zone) = find_zone(zone) else { return Arc::default() };
    let (first, step) = match period {
        "day" => (civil::date(1970, 1, 1), 1.day()),
        "week" => (civil::date(1970, 1, 5), 1.week()),
        _ => (civil::date(1970, 1, 1), 1.month()),
    };
    let mut ends: Vec<u64> = Vec::new();
    for date in first.series(step) {
        // A day starts at its first moment, if a change of the offset skips or repeats midnight. Of another time, the first
        // occurrence counts, and if it is skipped, the time that is as much later.
        let start = match begins_at == civil::Time::midnight() {
            true => date.to_zoned(zone.clone()).and_then(|midnight| midnight.start_of_day()),
            false => date.to_datetime(begins_at).to_zoned(zone.clone()),
        };
        let Ok(start) = start else { continue };
        // In zones east of UTC, the first day starts before the epoch. A date that a change skips starts with the next.
        let Ok(end_ms @ 1..) = u64::try_from(start.timestamp().as_millisecond()) else { continue };
        if ends.last().is_none_or(|last| end_ms > *last) {
            ends.push(end_ms);
        }
        if end_ms > CALENDAR_END_MS {
            break;
        }
    }
    ends.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

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

    fn midnights(period: &str, zone: &str) -> Arc<[u64]> {
        window_ends(period, zone, civil::Time::midnight())
    }

    fn has(ends: &[u64], text: &str) -> bool {
        ends.binary_search(&ms(text)).is_ok()
    }

    /// The number of windows that begin in a time span.
    fn count(ends: &[u64], from: &str, to: &str) -> usize {
        ends.iter().filter(|at| (ms(from)..ms(to)).contains(at)).count()
    }

    #[test]
    fn days_have_23_and_25_hours_when_clocks_change() {
        let ends = midnights("day", "Europe/Paris");
        for (start, end) in
            [("2025-03-29T23:00:00Z", "2025-03-30T22:00:00Z"), ("2025-10-25T22:00:00Z", "2025-10-26T23:00:00Z")]
        {
            assert!(has(&ends, start) && has(&ends, end));
            assert_eq!(count(&ends, start, end), 1, "{start}");
        }
    }

    #[test]
    fn a_time_of_day_follows_the_clock_on_the_wall() {
        let at = |zone, hour, minute| window_ends("day", zone, civil::time(hour, minute, 0, 0));
        let nine = at("America/Los_Angeles", 9, 0);
        assert!(has(&nine, "2024-01-01T17:00:00Z") && has(&nine, "2024-07-01T16:00:00Z"));
        assert!(nine.windows(2).all(|two| [23, 24, 25].contains(&((two[1] - two[0]) / 3_600_000))));
        // In Paris, 02:30 is skipped in spring and occurs twice in autumn.
        let skipped = at("Europe/Paris", 2, 30);
        assert!(has(&skipped, "2025-03-30T03:30:00+02:00") && has(&skipped, "2025-10-26T02:30:00+02:00"));
        assert!(!has(&skipped, "2025-10-26T02:30:00+01:00"));
        let months = window_ends("month", "UTC", civil::time(6, 0, 0, 0));
        assert!(has(&months, "2025-02-01T06:00:00Z"));
    }

    #[test]
    fn a_day_without_midnight_starts_at_its_first_moment() {
        // In Beirut, clocks change from 24:00 to 01:00. In Havana, they change back from 01:00 to 00:00.
        assert!(has(&midnights("day", "Asia/Beirut"), "2024-03-31T01:00:00+03:00"));
        let havana = midnights("day", "America/Havana");
        assert!(has(&havana, "2024-11-03T00:00:00-04:00") && has(&havana, "2024-11-04T00:00:00-05:00"));
        assert_eq!(count(&havana, "2024-11-03T00:00:00-04:00", "2024-11-04T00:00:00-05:00"), 1);
    }

    #[test]
    fn a_date_that_a_zone_skips_has_no_window() {
        // Samoa moved across the date line: 2011-12-29 was followed by 2011-12-31.
        let ends = midnights("day", "Pacific/Apia");
        assert!(has(&ends, "2011-12-29T00:00:00-10:00") && has(&ends, "2011-12-31T00:00:00+14:00"));
        assert_eq!(count(&ends, "2011-12-29T00:00:00-10:00", "2011-12-31T00:00:00+14:00"), 1);
        assert!(ends.is_sorted_by(|a, b| a < b) && *ends.last().unwrap() > CALENDAR_END_MS);
    }

    #[test]
    fn weeks_start_on_monday_and_months_on_the_first() {
        let weeks = midnights("week", "America/New_York");
        assert!(has(&weeks, "2025-03-03T05:00:00Z") && has(&weeks, "2025-03-10T04:00:00Z"));
        assert!(weeks.windows(2).all(|two| [167, 168, 169].contains(&((two[1] - two[0]) / 3_600_000))));
        let months = midnights("month", "America/New_York");
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
