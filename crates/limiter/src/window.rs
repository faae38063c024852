//! Windows: the interval that a time falls into, and the intervals that follow it.
//!
//! Pure arithmetic on Unix milliseconds. Windows are half open: the end of one window is the start of the next.

use std::fmt;
use std::sync::Arc;

use crate::handles::{Handle, WindowsId};

/// Bits that a counter has for the end of a window.
pub const END_BITS: u32 = 42;
/// The latest end of a window, Unix milliseconds: 2109-05-15T07:35:11.103Z.
pub const END_MAX_MS: u64 = (1 << END_BITS) - 1;
/// The shortest period of a limit.
pub const PERIOD_MIN_MS: u64 = 10;
/// The longest period of a limit: a leap year.
pub const PERIOD_MAX_MS: u64 = 366 * DAY_MS;

const SECOND_MS: u64 = 1000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;
const WEEK_MS: u64 = 7 * DAY_MS;
/// The time that calendars must reach: the year 2110.
pub const CALENDAR_END_MS: u64 = 4_417_977_600_000;
/// A time without a clock change in its day, week or month: 2025-04-15.
const TYPICAL_TIME_MS: u64 = 1_744_675_200_000;

/// The length of a window, as configured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Period {
    /// A fixed length.
    Fixed {
        /// Milliseconds.
        ms: u64,
    },
    /// A calendar month.
    Month,
}

/// How time is divided into windows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Windows {
    /// Windows of equal length on a grid: window number floor((unix time - offset) / period). Without an offset, a week
    /// starts on Thursday, 00:00 UTC.
    Even {
        /// The length of a window, milliseconds.
        period_ms: u64,
        /// The start of one of the windows, Unix milliseconds.
        offset_ms: u64,
    },
    /// As `Even`, with a different offset for each key.
    Random {
        /// The length of a window, milliseconds.
        period_ms: u64,
    },
    /// Windows that the first request of a key opens, and that last one period.
    FirstRequest {
        /// The length of a window, milliseconds.
        period_ms: u64,
    },
    /// Every interval of one period, wherever it begins. A window is one of the [`Segments`] into which time is divided.
    Sliding {
        /// The length of the interval, milliseconds.
        period_ms: u64,
    },
    /// Days, weeks or months of a time zone.
    Calendar(Calendar),
}

/// Segments into which the period of a sliding window is divided. Models have one, because they explore all
/// interleavings.
pub const SEGMENTS_PER_PERIOD: u64 = if cfg!(feature = "loom") { 1 } else { 8 };

/// Segments of sliding windows: equal parts of a period, numbered from the Unix epoch. If the parts are not a whole
/// number of milliseconds, their lengths differ by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segments {
    /// The period of the sliding window, milliseconds.
    pub period_ms: u64,
}

impl Segments {
    /// The number of the segment that contains `now_ms`.
    pub fn number_at(self, now_ms: u64) -> u64 {
        now_ms * SEGMENTS_PER_PERIOD / self.period_ms
    }

    /// The start of a segment, Unix milliseconds; at most [`END_MAX_MS`].
    pub fn start_ms(self, number: u64) -> u64 {
        number.saturating_mul(self.period_ms).div_ceil(SEGMENTS_PER_PERIOD).min(END_MAX_MS)
    }

    /// The end of a segment, Unix milliseconds; at most [`END_MAX_MS`].
    pub fn end_ms(self, number: u64) -> u64 {
        self.start_ms(number.saturating_add(1))
    }

    /// The time at which all tokens of a segment are one period old, Unix milliseconds.
    pub fn expires_ms(self, number: u64) -> u64 {
        self.end_ms(number.saturating_add(SEGMENTS_PER_PERIOD))
    }

    /// The segment whose tokens expire at `expires_ms`.
    pub fn expiring_at(self, expires_ms: u64) -> u64 {
        self.number_at(expires_ms.saturating_sub(1)).saturating_sub(SEGMENTS_PER_PERIOD)
    }

    fn at(self, now_ms: u64) -> Window {
        let number = self.number_at(now_ms);
        Window { start_ms: self.start_ms(number), end_ms: self.end_ms(number) }
    }
}

/// Windows of a calendar.
#[derive(Clone, Debug)]
pub struct Calendar {
    /// The name that identifies the calendar, such as `day Europe/Paris`.
    pub name: String,
    /// The ends of the windows, Unix milliseconds, ascending. The first is before any time that a clock shows, the
    /// last after [`END_MAX_MS`].
    pub ends: Arc<[u64]>,
}

/// Calendars of one name are equal.
impl PartialEq for Calendar {
    fn eq(&self, other: &Calendar) -> bool {
        self.name == other.name && (Arc::ptr_eq(&self.ends, &other.ends) || self.ends == other.ends)
    }
}

impl Eq for Calendar {}

impl Calendar {
    /// Calendar months, UTC.
    pub fn utc_months() -> Calendar {
        // From the end of January 1970 to the first end after `CALENDAR_END_MS`, that of January 2110.
        let end_ms = |month: u64| month_start_day(1970 + month / 12, month % 12 + 1) * DAY_MS;
        let ends: Vec<u64> = (1..=140 * 12 + 1).map(end_ms).collect();
        Calendar { name: "month".to_owned(), ends: ends.into() }
    }

    fn window_at(&self, now_ms: u64) -> Window {
        let next = self.ends.partition_point(|end| *end <= now_ms);
        let end = |i: usize| self.ends.get(i).copied();
        Window {
            start_ms: next.checked_sub(1).and_then(end).unwrap_or(0),
            end_ms: end(next).unwrap_or(END_MAX_MS).min(END_MAX_MS),
        }
    }
}

/// One window. The end is the start of the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Window {
    /// Unix milliseconds.
    pub start_ms: u64,
    /// Unix milliseconds, exclusive.
    pub end_ms: u64,
}

impl Window {
    /// Whether the time falls into the window.
    pub fn contains(self, now_ms: u64) -> bool {
        (self.start_ms..self.end_ms).contains(&now_ms)
    }
}

impl Windows {
    /// The text that identifies the windows, in identities of counters and in names in a store. It must not change.
    pub(super) fn text(&self) -> String {
        match self {
            Windows::Even { period_ms, offset_ms: 0 } => format!("{period_ms}ms"),
            Windows::Even { period_ms, offset_ms } => format!("{period_ms}ms from {offset_ms}ms"),
            Windows::Random { period_ms } => format!("{period_ms}ms at random"),
            Windows::FirstRequest { period_ms } => format!("{period_ms}ms from the first request"),
            Windows::Sliding { period_ms } => format!("{period_ms}ms sliding"),
            Windows::Calendar(calendar) => calendar.name.clone(),
        }
    }

    /// The window that contains `now_ms`. `offset` is the offset of the key as a fraction of the period, in units of
    /// 2^-64. Where requests open windows, the window starts now. The last window ends at [`END_MAX_MS`].
    pub fn window_at(&self, now_ms: u64, offset: u64) -> Window {
        match self {
            Windows::Even { period_ms, offset_ms } => even(now_ms, *period_ms, *offset_ms),
            Windows::Random { period_ms } => even(now_ms, *period_ms, offset_of_key(offset, *period_ms)),
            Windows::FirstRequest { period_ms } => {
                Window { start_ms: now_ms, end_ms: (now_ms + period_ms).min(END_MAX_MS) }
            }
            Windows::Sliding { period_ms } => Segments { period_ms: *period_ms }.at(now_ms),
            Windows::Calendar(calendar) => calendar.window_at(now_ms),
        }
    }

    /// Whether all keys have the same window at the same time.
    pub fn are_shared(&self) -> bool {
        match self {
            Windows::Even { .. } | Windows::Sliding { .. } | Windows::Calendar(_) => true,
            Windows::Random { .. } | Windows::FirstRequest { .. } => false,
        }
    }

    /// The time in which the limit holds, if it is the same for all windows.
    pub fn period_ms(&self) -> Option<u64> {
        match self {
            Windows::Even { period_ms, .. }
            | Windows::Random { period_ms }
            | Windows::FirstRequest { period_ms }
            | Windows::Sliding { period_ms } => Some(*period_ms),
            Windows::Calendar(_) => None,
        }
    }

    /// The length of the window that ends at `end_ms`.
    pub fn length_ms(&self, end_ms: u64) -> u64 {
        self.period_ms().unwrap_or_else(|| {
            let window = self.window_at(end_ms.saturating_sub(1), 0);
            window.end_ms - window.start_ms
        })
    }

    /// The least number of windows that are a whole number of seconds together: 10 of 100 ms, 2 of 1500 ms. Months are whole
    /// seconds.
    pub fn in_whole_seconds(&self) -> u64 {
        let (mut divisor, mut rest) = (1000, self.period_ms().unwrap_or(1000));
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        1000 / divisor
    }

    /// The length of a typical window.
    pub fn typical_ms(&self) -> u64 {
        self.period_ms().unwrap_or_else(|| self.length_ms(self.window_at(TYPICAL_TIME_MS, 0).end_ms))
    }

    /// The longest time for which a token of a typical window counts.
    pub fn counted_ms(&self) -> u64 {
        match self {
            Windows::Sliding { period_ms } => period_ms + period_ms.div_ceil(SEGMENTS_PER_PERIOD) + 1,
            _ => self.typical_ms(),
        }
    }

    /// Whether a request of the key opens the window.
    pub fn are_opened_by_requests(&self) -> bool {
        matches!(self, Windows::FirstRequest { .. })
    }

    /// Whether each key has windows of its own, by an offset.
    pub fn have_offsets(&self) -> bool {
        matches!(self, Windows::Random { .. })
    }

    /// The lengths of the shortest and of the longest window; `None` for a calendar without windows.
    pub fn lengths_ms(&self) -> Option<(u64, u64)> {
        let Windows::Calendar(calendar) = self else { return self.period_ms().map(|ms| (ms, ms)) };
        // The first window starts before the list, so its length is unknown.
        let lengths = || calendar.ends.windows(2).map(|two| two[1] - two[0]);
        Some((lengths().min()?, lengths().max()?))
    }

    /// The number of the window that contains `now_ms`, equal on all gateways; `None` where requests open windows.
    ///
    /// The number is floor((time - start) / period), where the start is the first one in 1970. Days, weeks and months of
    /// a calendar are counted from the one that contains the Unix time 0, so the number of a month is the number of
    /// months since January 1970. Times before the first start in 1970 are in window 0 as well.
    pub fn number_at(&self, now_ms: u64, offset: u64) -> Option<u64> {
        let number = |period_ms: u64, offset_ms: u64| now_ms.saturating_sub(offset_ms % period_ms) / period_ms;
        match self {
            Windows::FirstRequest { .. } => None,
            Windows::Even { period_ms, offset_ms } => Some(number(*period_ms, *offset_ms)),
            Windows::Random { period_ms } => Some(number(*period_ms, offset_of_key(offset, *period_ms))),
            Windows::Sliding { period_ms } => Some(Segments { period_ms: *period_ms }.number_at(now_ms)),
            Windows::Calendar(calendar) => Some(calendar.ends.partition_point(|end_ms| *end_ms <= now_ms) as u64),
        }
    }

    /// The number of windows between the end of one window and the end of a later one; 0 if the second is not later.
    pub fn windows_between(&self, end_ms: u64, later_ms: u64) -> u64 {
        match self {
            Windows::Even { period_ms, .. } | Windows::Random { period_ms } | Windows::FirstRequest { period_ms } => {
                later_ms.saturating_sub(end_ms).div_ceil(*period_ms)
            }
            Windows::Sliding { period_ms } => {
                let ending_at = |ms: u64| Segments { period_ms: *period_ms }.number_at(ms.saturating_sub(1));
                ending_at(later_ms).saturating_sub(ending_at(end_ms))
            }
            Windows::Calendar(Calendar { ends, .. }) => {
                let position = |ms: u64| ends.partition_point(|end| *end < ms) as u64;
                position(later_ms).saturating_sub(position(end_ms))
            }
        }
    }

    /// The end of the window that comes `windows` windows after the one that ends at `end_ms`; at most [`END_MAX_MS`].
    pub fn end_after(&self, end_ms: u64, windows: u64) -> u64 {
        match self {
            Windows::Even { period_ms, .. } | Windows::Random { period_ms } | Windows::FirstRequest { period_ms } => {
                end_ms.saturating_add(windows.saturating_mul(*period_ms)).min(END_MAX_MS)
            }
            Windows::Sliding { period_ms } => {
                let segments = Segments { period_ms: *period_ms };
                segments.end_ms(segments.number_at(end_ms.saturating_sub(1)).saturating_add(windows))
            }
            Windows::Calendar(Calendar { ends, .. }) => {
                let position = ends.partition_point(|end| *end < end_ms) as u64 + windows;
                usize::try_from(position).ok().and_then(|i| ends.get(i)).map_or(END_MAX_MS, |end| *end)
            }
        }
    }

    /// The end of the window that is open at `now_ms`, given that one window ends at `end_ms`. If `now_ms` is before
    /// `end_ms`, `end_ms` itself.
    pub fn end_at(&self, end_ms: u64, now_ms: u64) -> u64 {
        if now_ms < end_ms {
            return end_ms;
        }
        match self {
            Windows::Even { period_ms, .. } | Windows::Random { period_ms } | Windows::FirstRequest { period_ms } => {
                end_ms + ((now_ms - end_ms) / period_ms + 1) * period_ms
            }
            Windows::Sliding { period_ms } => Segments { period_ms: *period_ms }.at(now_ms).end_ms,
            Windows::Calendar(Calendar { ends, .. }) => {
                let next = ends.partition_point(|end| *end <= now_ms);
                ends.get(next).map_or(END_MAX_MS, |end| *end)
            }
        }
    }
}

/// The offset of a key's windows in milliseconds.
fn offset_of_key(offset: u64, period_ms: u64) -> u64 {
    ((u128::from(offset) * u128::from(period_ms)) >> 64) as u64
}

fn even(now_ms: u64, period_ms: u64, offset_ms: u64) -> Window {
    // The grid extends before the offset: earlier times are in one of its windows as well.
    let into = (now_ms + period_ms - offset_ms % period_ms) % period_ms;
    Window { start_ms: now_ms.saturating_sub(into), end_ms: (now_ms + period_ms - into).min(END_MAX_MS) }
}

impl Period {
    /// Windows of this period, aligned to the Unix epoch, UTC.
    pub fn windows(self) -> Windows {
        match self {
            Period::Fixed { ms } => Windows::Even { period_ms: ms, offset_ms: 0 },
            Period::Month => Windows::Calendar(Calendar::utc_months()),
        }
    }

    /// Reads `second`, `minute`, `hour`, `day`, `week`, `month`, or a whole number with one of the units `ms`, `s`,
    /// `m`, `h`, `d`, `w`.
    ///
    /// # Errors
    ///
    /// A text of another form, or a period out of [`PERIOD_MIN_MS`] to [`PERIOD_MAX_MS`].
    pub fn parse(text: &str) -> Result<Period, PeriodError> {
        let ms = match text {
            "second" => SECOND_MS,
            "minute" => MINUTE_MS,
            "hour" => HOUR_MS,
            "day" => DAY_MS,
            "week" => WEEK_MS,
            "month" => return Ok(Period::Month),
            _ => duration_ms(text).ok_or(PeriodError::Syntax)?,
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

/// Why a text is not a period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeriodError {
    /// It has another form.
    Syntax,
    /// It is shorter than [`PERIOD_MIN_MS`].
    TooShort,
    /// It is longer than [`PERIOD_MAX_MS`].
    TooLong,
}

impl fmt::Display for PeriodError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PeriodError::Syntax => {
                "write `second`, `minute`, `hour`, `day`, `week`, `month`, or a number with `ms`, `s`, `m`, `h`, `d` or `w`"
            }
            PeriodError::TooShort => "the shortest period is `10ms`",
            PeriodError::TooLong => "the longest period is `366d`",
        })
    }
}

/// The day since the epoch on which a month (1 to 12) starts; Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
/// `days_from_civil`.
fn month_start_day(year: u64, month: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let from_march = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * from_march + 2) / 5;
    let year_of_era = year % 400;
    let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
    year / 400 * 146_097 + of_era - 719_468
}

/// The time of a decision, and the windows to which [`crate::window_kind::AcquireRequest::windows`] refers.
///
/// `PLAIN`: all counters of the decision are plain, whatever their kind says. The compiler knows it, so the most common
/// decision does not branch on the kind.
#[derive(Clone, Copy, Debug)]
pub struct Time<'a, const PLAIN: bool = false> {
    /// Unix milliseconds.
    pub now_ms: u64,
    /// By [`WindowsId`].
    windows: &'a [Windows],
}

impl<'a> Time<'a> {
    /// `windows`: those of the rule set.
    #[inline]
    pub fn new(now_ms: u64, windows: &'a [Windows]) -> Time<'a> {
        Time { now_ms, windows }
    }
}

impl<'a, const PLAIN: bool> Time<'a, PLAIN> {
    /// The windows of a layer.
    #[inline]
    pub(super) fn windows(self, id: WindowsId) -> &'a Windows {
        &self.windows[id.index()]
    }
}

impl Time<'static> {
    /// For plain windows, which do not depend on each other.
    pub fn plain(now_ms: u64) -> Time<'static> {
        Time::new(now_ms, &[])
    }
}

impl Time<'static, true> {
    /// For a decision on plain counters only.
    pub fn all_plain(now_ms: u64) -> Time<'static, true> {
        Time { now_ms, windows: &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_seconds_together() {
        for (period_ms, number) in
            [(1, 1000), (7, 1000), (100, 10), (300, 10), (500, 2), (999, 1000), (1000, 1), (1500, 2), (60_000, 1)]
        {
            assert_eq!(Windows::Sliding { period_ms }.in_whole_seconds(), number, "{period_ms}");
            assert_eq!(period_ms * number % 1000, 0);
        }
    }

    #[test]
    fn a_window_is_the_floor_of_the_time_over_the_period() {
        let minute = Period::parse("minute").unwrap().windows();
        let window = minute.window_at(1_700_000_100_000, 0);
        assert_eq!(window, Window { start_ms: 28_333_335 * 60_000, end_ms: 28_333_336 * 60_000 });
        assert_eq!(minute.window_at(window.end_ms - 1, 0), window);
        assert_eq!(minute.window_at(window.end_ms, 0).start_ms, window.end_ms);
        let contained =
            [window.start_ms - 1, window.start_ms, window.end_ms - 1, window.end_ms].map(|ms| window.contains(ms));
        assert_eq!(contained, [false, true, true, false]);
    }

    #[test]
    fn periods_are_read_as_written() {
        assert_eq!(Period::parse("5m"), Ok(Period::Fixed { ms: 300_000 }));
        for (text, same, ms) in
            [("second", "1s", 1000), ("hour", "1h", HOUR_MS), ("day", "24h", DAY_MS), ("week", "1w", WEEK_MS)]
        {
            assert_eq!([Period::parse(text), Period::parse(same)], [Ok(Period::Fixed { ms }); 2]);
        }
        assert_eq!(Period::parse("10ms"), Ok(Period::Fixed { ms: 10 }));
        assert_eq!(Period::parse("week"), Ok(Period::Fixed { ms: WEEK_MS }));
        assert_eq!(Period::parse("366d"), Ok(Period::Fixed { ms: PERIOD_MAX_MS }));
        assert_eq!(Period::parse("9ms"), Err(PeriodError::TooShort));
        assert_eq!(Period::parse("0s"), Err(PeriodError::TooShort));
        assert_eq!(Period::parse("367d"), Err(PeriodError::TooLong));
        for bad in ["", "minutes", "5", "m", "-5m", "5 m", "1.5s", "99999999999999999999s", "18446744073709551615w"] {
            assert_eq!(Period::parse(bad), Err(PeriodError::Syntax), "{bad}");
        }
    }

    #[test]
    fn months_follow_the_calendar() {
        let day = |d: u64| d * DAY_MS;
        let months = Period::Month.windows();
        // 2024-02-01, a leap year: day 19754; March 1: 19783.
        let window = months.window_at(day(19_770), 0);
        assert_eq!(window, Window { start_ms: day(19_754), end_ms: day(19_783) });
        // December 2023: 19692 to 19723.
        assert_eq!(months.window_at(day(19_723) - 1, 0), Window { start_ms: day(19_692), end_ms: day(19_723) });
        let mut start = 0;
        for month in 0..12 * 139 {
            let window = months.window_at(start, 0);
            let days = (window.end_ms - window.start_ms) / DAY_MS;
            assert!(window.start_ms == start && (28..=31).contains(&days), "month {month}");
            start = window.end_ms;
        }
        let Windows::Calendar(Calendar { ends, .. }) = months else { panic!("months are a calendar") };
        let (last, others) = ends.split_last().unwrap();
        assert!(others.iter().all(|end| *end <= CALENDAR_END_MS) && *last > CALENDAR_END_MS);
    }

    #[test]
    fn an_offset_moves_all_windows() {
        // Nine in the morning, Pacific standard time.
        let day = Windows::Even { period_ms: DAY_MS, offset_ms: 1_704_128_400_000 };
        let nine = 1_704_128_400_000 + 40 * DAY_MS;
        assert_eq!(day.window_at(nine, 0), Window { start_ms: nine, end_ms: nine + DAY_MS });
        assert_eq!(day.window_at(nine - 1, 0).end_ms, nine);
        assert_eq!(day.window_at(1, 0).end_ms, 17 * HOUR_MS);
        let random = Windows::Random { period_ms: 1000 };
        assert_eq!(random.window_at(10_000, 0), Window { start_ms: 10_000, end_ms: 11_000 });
        assert_eq!(random.window_at(10_000, 1 << 63), Window { start_ms: 9_500, end_ms: 10_500 });
        assert_eq!(random.window_at(10_000, u64::MAX), Window { start_ms: 9_999, end_ms: 10_999 });
    }

    #[test]
    fn windows_know_their_length() {
        assert_eq!(Period::Month.windows().length_ms(19_783 * DAY_MS), 29 * DAY_MS);
        assert_eq!(Period::parse("hour").unwrap().windows().length_ms(7 * HOUR_MS), HOUR_MS);
        assert_eq!(Period::Month.windows().typical_ms(), 30 * DAY_MS);
        // A token of a sliding window counts for an eighth of the period longer, to a whole millisecond.
        let counted = |windows: Windows| windows.counted_ms();
        assert_eq!(counted(Windows::Sliding { period_ms: 1001 }), 1001 + 126 + 1);
        assert_eq!(counted(Windows::Even { period_ms: 1001, offset_ms: 0 }), 1001);
    }

    #[test]
    fn windows_of_all_keys_are_told_from_those_of_each() {
        let kinds = [
            Windows::Even { period_ms: 10, offset_ms: 0 },
            Windows::Sliding { period_ms: 10 },
            Period::Month.windows(),
            Windows::Random { period_ms: 10 },
            Windows::FirstRequest { period_ms: 10 },
        ];
        assert_eq!(kinds.each_ref().map(Windows::are_shared), [true, true, true, false, false]);
        assert_eq!(kinds.each_ref().map(Windows::have_offsets), [false, false, false, true, false]);
    }

    #[test]
    fn even_windows_are_counted_and_found() {
        let windows = Windows::Even { period_ms: 100, offset_ms: 0 };
        assert_eq!(
            (windows.windows_between(100, 100), windows.windows_between(100, 300), windows.windows_between(300, 100)),
            (0, 2, 0)
        );
        assert_eq!((windows.end_after(100, 0), windows.end_after(100, 3)), (100, 400));
        assert_eq!(windows.end_after(100, u64::MAX), END_MAX_MS);
    }

    #[test]
    fn listed_windows_are_counted_and_found() {
        let windows = Windows::Calendar(Calendar { name: String::new(), ends: [31, 59, 90, 120].into() });
        assert_eq!(
            (windows.windows_between(31, 90), windows.windows_between(59, 59), windows.windows_between(90, 31)),
            (2, 0, 0)
        );
        assert_eq!(windows.windows_between(90, END_MAX_MS), 2);
        assert_eq!([20, 58, 59, 500].map(|now_ms| windows.end_at(31, now_ms)), [31, 59, 90, END_MAX_MS]);
        assert_eq!(
            (windows.end_after(31, 2), windows.end_after(59, 0), windows.end_after(59, 9)),
            (90, 59, END_MAX_MS)
        );
    }
}
