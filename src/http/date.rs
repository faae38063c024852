//! The Date field of answers (RFC 9110, section 6.6.1), written once a second. It does not know what time it is.

use http::HeaderValue;
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;

/// The value that was written last.
#[derive(Debug)]
pub struct Date {
    second: u64,
    value: HeaderValue,
}

impl Default for Date {
    fn default() -> Date {
        Date { second: 0, value: HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 GMT") }
    }
}

impl Date {
    /// Says what time it is, in Unix milliseconds.
    pub fn update(&mut self, unix_ms: u64) {
        let second = unix_ms / 1000;
        if second == self.second {
            return;
        }
        let text = i64::try_from(second).ok().and_then(|second| {
            let moment = Timestamp::from_second(second).ok()?;
            DateTimePrinter::new().timestamp_to_rfc9110_string(&moment).ok()
        });
        // A second that no date names is none that a clock shows; the value stays what it was.
        if let Some(value) = text.and_then(|text| HeaderValue::try_from(text).ok()) {
            *self = Date { second, value };
        }
    }

    pub fn value(&self) -> HeaderValue {
        self.value.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_written_as_http_has_it() {
        let mut date = Date::default();
        for (unix_ms, text) in [
            (999, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777_999, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (784_111_778_000, "Sun, 06 Nov 1994 08:49:38 GMT"),
            (784_111_777_000, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (u64::MAX, "Sun, 06 Nov 1994 08:49:37 GMT"),
        ] {
            date.update(unix_ms);
            assert_eq!(date.value(), text);
        }
    }
}
