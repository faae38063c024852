//! Reads the times of access logs as Unix milliseconds: RFC 3339, the common log format, and numbers.

use std::ops::Range;

/// From 1973 to 2286: seconds of nine or ten digits.
const PLAUSIBLE_MS: Range<u64> = 100_000_000_000..10_000_000_000_000;
const DAY_MS: i64 = 86_400_000;
/// Three letters of each month.
pub const MONTHS: &[u8] = b"JanFebMarAprMayJunJulAugSepOctNovDec";

/// A time, and whether it came with a time zone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Time {
    pub unix_ms: u64,
    /// A time without a zone is taken for UTC.
    pub has_zone: bool,
}

/// Reads a text in any of the forms.
pub fn parse(text: &[u8]) -> Option<Time> {
    match text {
        [b'0'..=b'9', b'0'..=b'9', b'/', ..] => common(text),
        [_, _, _, _, b'-' | b'/', ..] => rfc3339(text),
        _ => number(text).map(|unix_ms| Time { unix_ms, has_zone: true }),
    }
}

/// `10/Oct/2000:13:55:36 -0700`.
pub fn common_log(text: &[u8]) -> Option<u64> {
    common(text).filter(|time| time.has_zone).map(|time| time.unix_ms)
}

/// As [`common_log`]; also with a fraction of a second, and without a zone: `10/Oct/2000:13:55:36.123` of HAProxy.
fn common(text: &[u8]) -> Option<Time> {
    let name = text.get(3..6)?;
    let month = MONTHS.chunks_exact(3).position(|month| month == name)? as i64 + 1;
    let (day, year) = (digits(text, 0, 2)?, digits(text, 7, 4)?);
    let is_punctuated = (text[2], text[6], *text.get(11)?) == (b'/', b'/', b':');
    let date_ms = date_ms(year, month, day).filter(|_| is_punctuated)?;
    in_zone(date_ms + time_of_day_ms(text.get(12..20)?)?, &text[20..])
}

/// `2000-10-10T13:55:36.5-07:00`; also with slashes, a blank instead of `T`, and without a zone.
fn rfc3339(text: &[u8]) -> Option<Time> {
    let is_punctuated =
        matches!(*text.get(..11)?, [.., b'-' | b'/', _, _, b'-' | b'/', _, _, b'T' | b't' | b' ' | b'_' | b'\t']);
    let date = date_ms(digits(text, 0, 4)?, digits(text, 5, 2)?, digits(text, 8, 2)?).filter(|_| is_punctuated)?;
    in_zone(date + time_of_day_ms(text.get(11..19)?)?, &text[19..])
}

/// The time that is `local_ms` in the zone behind it. `rest` begins with the fraction of the second.
fn in_zone(mut local_ms: i64, mut rest: &[u8]) -> Option<Time> {
    if let [b'.' | b',', fraction @ ..] = rest {
        let length = fraction.iter().take_while(|byte| byte.is_ascii_digit()).count();
        local_ms += thousandths(fraction.get(..length)?);
        rest = &fraction[length..];
    }
    let rest = rest.strip_prefix(b" ").unwrap_or(rest);
    let zone_ms = if rest.is_empty() { 0 } else { zone_ms(rest)? };
    // A program without a clock writes 1970.
    let unix_ms = u64::try_from(local_ms - zone_ms).ok().filter(|unix_ms| PLAUSIBLE_MS.contains(unix_ms))?;
    Some(Time { unix_ms, has_zone: !rest.is_empty() })
}

/// Seconds, milliseconds, microseconds or nanoseconds since 1970, by their size. Another number, such as a year or
/// `20240101120000`, is no time.
pub fn number(text: &[u8]) -> Option<u64> {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let is_whole = matches!(text.get(length), None | Some(b'.'));
    let unix_ms = match length {
        0 => None,
        1..12 => in_thousandths(text),
        12..15 if is_whole => whole_number(&text[..length]),
        15..18 if is_whole => whole_number(&text[..length]).map(|value| value / 1000),
        18..20 if is_whole => whole_number(&text[..length]).map(|value| value / 1_000_000),
        _ => None,
    };
    unix_ms.filter(|unix_ms| PLAUSIBLE_MS.contains(unix_ms))
}

/// A decimal number in thousandths, such as seconds as milliseconds.
pub fn in_thousandths(text: &[u8]) -> Option<u64> {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (whole, rest) = text.split_at(length);
    match rest {
        [] => whole_number(whole)?.checked_mul(1000),
        [b'.', fraction @ ..] if fraction.iter().all(u8::is_ascii_digit) => {
            whole_number(whole)?.checked_mul(1000)?.checked_add(thousandths(fraction) as u64)
        }
        // Exponents are rare.
        _ => {
            let value: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
            (0.0..1e11).contains(&value).then_some((value * 1e3) as u64)
        }
    }
}

fn whole_number(digits: &[u8]) -> Option<u64> {
    let sum = |value: u64, digit: &u8| value.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0')));
    (1..20).contains(&digits.len()).then(|| digits.iter().fold(0, sum))
}

/// The first three digits of a fraction.
fn thousandths(fraction: &[u8]) -> i64 {
    (0..3).fold(0, |value, i| value * 10 + fraction.get(i).map_or(0, |digit| i64::from(digit.wrapping_sub(b'0') % 10)))
}

/// `hh:mm:ss`.
fn time_of_day_ms(text: &[u8]) -> Option<i64> {
    let (hours, minutes, seconds) = (digits(text, 0, 2)?, digits(text, 3, 2)?, digits(text, 6, 2)?);
    // 60: a leap second.
    let is_valid = text[2] == b':' && text[5] == b':' && hours < 24 && minutes < 60 && seconds <= 60;
    is_valid.then_some(((hours * 60 + minutes) * 60 + seconds) * 1000)
}

/// The offset of a zone: `Z`, `UTC`, `+0200`, `+02:00`.
fn zone_ms(text: &[u8]) -> Option<i64> {
    let sign = match text {
        b"Z" | b"z" | b"UTC" | b"GMT" => return Some(0),
        [b'+', ..] => 1,
        [b'-', ..] => -1,
        _ => return None,
    };
    let minutes_at = match text {
        [_, _, _, b':', _, _] => 4,
        [_, _, _, _, _] => 3,
        _ => return None,
    };
    Some(sign * (digits(text, 1, 2)? * 60 + digits(text, minutes_at, 2)?) * 60_000)
}

/// A number of `length` digits.
fn digits(text: &[u8], at: usize, length: usize) -> Option<i64> {
    text.get(at..at + length)?
        .iter()
        .try_fold(0, |value, byte| byte.is_ascii_digit().then(|| value * 10 + i64::from(byte - b'0')))
}

/// Midnight UTC of a date. Years are counted from March, so that a leap day is the last of its year.
fn date_ms(year: i64, month: i64, day: i64) -> Option<i64> {
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    // 719,468 days from 0000-03-01 to 1970-01-01.
    Some((days - 719_468) * DAY_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_are_read_in_all_forms() {
        for (text, expected) in [
            ("10/Oct/2000:13:55:36 -0700", Some(971_211_336_000)),
            ("10/Oct/2000:20:55:36 +0000", Some(971_211_336_000)),
            ("2000-10-10T20:55:36Z", Some(971_211_336_000)),
            ("2000-10-10T20:55:36.1239Z", Some(971_211_336_123)),
            ("2000-10-11T02:25:36.5+05:30", Some(971_211_336_500)),
            ("2000-10-10T13:55:36-0700", Some(971_211_336_000)),
            ("2000-10-10 20:55:36", Some(971_211_336_000)),
            ("2000/10/10 20:55:36", Some(971_211_336_000)),
            ("971211336", Some(971_211_336_000)),
            ("971211336.12", Some(971_211_336_120)),
            ("971211336123", Some(971_211_336_123)),
            ("1646861401.5241024", Some(1_646_861_401_524)),
            ("1646861401524102400", Some(1_646_861_401_524)),
            ("1.646861401524e9", Some(1_646_861_401_524)),
            ("10/Oct/2000:20:55:36", Some(971_211_336_000)),
            ("10/Oct/2000:20:55:36.123", Some(971_211_336_123)),
            ("10/Oct/2000:20:55:36.123456+0000", Some(971_211_336_123)),
            ("2000-10-10\t20:55:36", Some(971_211_336_000)),
            ("1970-01-01T00:00:00Z", None),
            ("01/Jan/1970:00:00:00 +0000", None),
            ("1601-01-01 00:00:00", None),
            ("32/Oct/2000:13:55:36 +0000", None),
            ("10/Foo/2000:13:55:36 +0000", None),
            ("2000-13-10T20:55:36Z", None),
            ("2000-10-10T25:55:36Z", None),
            ("2000-10-10", None),
            ("2000", None),
            ("20001010", None),
            ("20001010205536", None),
            ("0", None),
            ("-", None),
            ("", None),
        ] {
            assert_eq!(parse(text.as_bytes()).map(|time| time.unix_ms), expected, "{text}");
        }
        assert!(!parse(b"2000-10-10 20:55:36").unwrap().has_zone);
    }

    proptest! {
        #[test]
        fn times_are_read_as_jiff_writes_them(unix_ms in 100_000_000_000_i64..4_102_444_800_000) {
            let time = jiff::Timestamp::from_millisecond(unix_ms).unwrap();
            let expected = Some(Time { unix_ms: unix_ms as u64, has_zone: true });
            prop_assert_eq!(parse(format!("{time:.3}").as_bytes()), expected);
            let whole = time.to_zoned(jiff::tz::TimeZone::UTC).strftime("%d/%b/%Y:%H:%M:%S %z").to_string();
            prop_assert_eq!(common_log(whole.as_bytes()), Some(unix_ms as u64 / 1000 * 1000));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40), digits in "[0-9/:T .+-]{0,30}") {
            let _ = (parse(&bytes), parse(digits.as_bytes()), common_log(&bytes));
        }
    }
}
