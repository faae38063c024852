//! What a window is: which stretch of time a moment falls into.
//!
//! Pure arithmetic on Unix milliseconds; this file never reads the clock. Windows are half open: a
//! moment that ends one window belongs to the next.

use std::fmt;

/// The shortest period that a limit may have.
pub const PERIOD_MIN_MS: u64 = 10;
/// The longest: a leap year.
pub const PERIOD_MAX_MS: u64 = 366 * DAY_MS;

const SECOND_MS: u64 = 1000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;
const WEEK_MS: u64 = 7 * DAY_MS;

/// How time is divided.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Period {
    /// Windows of equal length, counted from the Unix epoch: floor(unix time / period). A week
    /// therefore starts on a Thursday, 00:00 UTC.
    Fixed { ms: u64 },
    /// Calendar months, UTC.
    Month,
}

/// One window of a period, Unix milliseconds; the end is the start of the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub start_ms: u64,
    pub end_ms: u64,
}

impl Window {
    pub fn contains(self, now_ms: u64) -> bool {
        (self.start_ms..self.end_ms).contains(&now_ms)
    }
}

impl Period {
    /// The window that the moment `now_ms` falls into.
    pub fn window_at(self, now_ms: u64) -> Window {
        match self {
            Period::Fixed { ms } => {
                let start_ms = now_ms - now_ms % ms;
                Window { start_ms, end_ms: start_ms + ms }
            }
            Period::Month => month_at(now_ms),
        }
    }

    /// The length of the shortest window of this period.
    pub fn shortest_ms(self) -> u64 {
        match self {
            Period::Fixed { ms } => ms,
            Period::Month => 28 * DAY_MS,
        }
    }

    /// Reads `second`, `minute`, `hour`, `day`, `week`, `month`, or a whole number with one of the
    /// units `ms`, `s`, `m`, `h`, `d`, `w`.
    pub fn parse(text: &str) -> Result<Period, PeriodError> {
        let ms = match text {
            "second" => SECOND_MS,
            "minute" => MINUTE_MS,
            "hour" => HOUR_MS,
            "day" => DAY_MS,
            "week" => WEEK_MS,
            "month" => return Ok(Period::Month),
            _ => duration_ms(text).ok_or(PeriodError::Form)?,
        };
        match ms {
            ..PERIOD_MIN_MS => Err(PeriodError::TooShort),
            PERIOD_MIN_MS..=PERIOD_MAX_MS => Ok(Period::Fixed { ms }),
            _ => Err(PeriodError::TooLong),
        }
    }
}

/// Reads a duration such as `250ms`, `30s`, `5m`, `2h`, `1d`, `1w` as milliseconds.
pub fn duration_ms(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let unit_ms = match &text[digits..] {
        "ms" => 1,
        "s" => SECOND_MS,
        "m" => MINUTE_MS,
        "h" => HOUR_MS,
        "d" => DAY_MS,
        "w" => WEEK_MS,
        _ => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(unit_ms)
}

/// Why a text is no period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeriodError {
    Form,
    TooShort,
    TooLong,
}

impl fmt::Display for PeriodError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PeriodError::Form => {
                "write `second`, `minute`, `hour`, `day`, `week`, `month`, or a number with `ms`, `s`, `m`, `h`, `d` or `w`"
            }
            PeriodError::TooShort => "the shortest period is `10ms`",
            PeriodError::TooLong => "the longest period is `366d`",
        })
    }
}

// Kept out of line, or its arithmetic is done ahead for every decision, month or not.
#[cold]
#[inline(never)]
fn month_at(now_ms: u64) -> Window {
    let (year, month) = civil_month(now_ms / DAY_MS);
    let (next_year, next_month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    Window { start_ms: month_start_day(year, month) * DAY_MS, end_ms: month_start_day(next_year, next_month) * DAY_MS }
}

/// Year and month (1 to 12) of a day since the epoch; Howard Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms", `civil_from_days`, for days from 1970 on.
fn civil_month(day: u64) -> (u64, u64) {
    let shifted = day + 719_468;
    let of_era = shifted % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + shifted / 146_097 * 400 + u64::from(month <= 2);
    (year, month)
}

/// The day since the epoch on which a month starts; the inverse, `days_from_civil`.
fn month_start_day(year: u64, month: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let from_march = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * from_march + 2) / 5;
    let year_of_era = year % 400;
    let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
    year / 400 * 146_097 + of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_the_floor_of_the_time_over_the_period() {
        let minute = Period::parse("minute").unwrap();
        let window = minute.window_at(1_700_000_100_000);
        assert_eq!(window, Window { start_ms: 28_333_335 * 60_000, end_ms: 28_333_336 * 60_000 });
        assert_eq!(minute.window_at(window.end_ms - 1), window);
        assert_eq!(minute.window_at(window.end_ms).start_ms, window.end_ms);
    }

    #[test]
    fn periods_are_read_as_written() {
        assert_eq!(Period::parse("5m"), Ok(Period::Fixed { ms: 300_000 }));
        assert_eq!(Period::parse("10ms"), Ok(Period::Fixed { ms: 10 }));
        assert_eq!(Period::parse("week"), Ok(Period::Fixed { ms: WEEK_MS }));
        assert_eq!(Period::parse("366d"), Ok(Period::Fixed { ms: PERIOD_MAX_MS }));
        assert_eq!(Period::parse("9ms"), Err(PeriodError::TooShort));
        assert_eq!(Period::parse("0s"), Err(PeriodError::TooShort));
        assert_eq!(Period::parse("367d"), Err(PeriodError::TooLong));
        for bad in ["", "minutes", "5", "m", "-5m", "5 m", "1.5s", "99999999999999999999s", "18446744073709551615w"] {
            assert_eq!(Period::parse(bad), Err(PeriodError::Form), "{bad}");
        }
    }

    #[test]
    fn months_follow_the_calendar() {
        let day = |d: u64| d * DAY_MS;
        // 2024-02-01, a leap year: day 19754; March 1: 19783.
        let window = Period::Month.window_at(day(19_770));
        assert_eq!(window, Window { start_ms: day(19_754), end_ms: day(19_783) });
        // December 2023: 19692 to 19723.
        assert_eq!(Period::Month.window_at(day(19_723) - 1), Window { start_ms: day(19_692), end_ms: day(19_723) });
        let mut start = 0;
        for month in 0..12 * 139 {
            let window = Period::Month.window_at(start);
            let days = (window.end_ms - window.start_ms) / DAY_MS;
            assert!(window.start_ms == start && (28..=31).contains(&days), "month {month}");
            start = window.end_ms;
        }
    }
}
