//! A limit: tokens per window.

use std::fmt;

use crate::window::{Period, PeriodError, Windows};

/// One layer of a rule, as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limit {
    /// Tokens granted at the start of each window.
    pub tokens: u32,
    /// The windows in which the limit holds.
    pub windows: Windows,
    /// The period as configured, such as `minute` or `5m`. It names the layer.
    pub period_text: String,
    /// Tokens that may accumulate over windows. A layer with a capacity accumulates even where it equals `tokens`, so that
    /// either number can change without a change of the kind of counter.
    pub capacity: Option<u32>,
    /// Tokens that may be taken from later windows.
    pub reserve: u32,
    /// The shards of each counter, each with its part of `tokens`.
    pub shards: u32,
}

impl Limit {
    /// Reads `LIMIT/PERIOD`, such as `2000/hour` or `100/5m`.
    ///
    /// # Errors
    ///
    /// See [`LimitError`].
    pub fn parse(text: &str) -> Result<Limit, LimitError> {
        let (tokens, period) = text.split_once('/').ok_or(LimitError::Syntax)?;
        Limit::new(parse_tokens(tokens)?, period)
    }

    /// A plain limit: windows are aligned to the Unix epoch and independent.
    ///
    /// # Errors
    ///
    /// See [`LimitError`].
    pub fn new(tokens: u32, period: &str) -> Result<Limit, LimitError> {
        let windows = Period::parse(period).map_err(LimitError::Period)?.windows();
        let period_text = period.to_owned();
        Ok(Limit { tokens, windows, period_text, capacity: None, reserve: 0, shards: 1 })
    }

    /// The most tokens that a window can have.
    pub fn capacity(&self) -> u32 {
        self.capacity.map_or(self.tokens, |capacity| capacity.max(self.tokens))
    }
}

fn parse_tokens(text: &str) -> Result<u32, LimitError> {
    let digits = text.replace('_', "");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(LimitError::Syntax);
    }
    match digits.parse::<u32>() {
        Ok(0) => Err(LimitError::Zero),
        Ok(tokens) => Ok(tokens),
        Err(_) => Err(LimitError::TooLarge),
    }
}

/// Why a text is not a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LimitError {
    /// It is not `LIMIT/PERIOD`.
    Syntax,
    /// The limit is 0.
    Zero,
    /// The limit is greater than 2^32 - 1.
    TooLarge,
    /// The period is invalid.
    Period(PeriodError),
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitError::Syntax => f.write_str("write it as `LIMIT/PERIOD`, such as `33/minute` or `100/5m`"),
            LimitError::Zero => f.write_str("a limit is at least `1`"),
            LimitError::TooLarge => write!(f, "a limit is at most `{}`", u32::MAX),
            LimitError::Period(error) => error.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_written() {
        let limit = Limit::parse("2000/hour").unwrap();
        assert_eq!(
            (limit.tokens, limit.windows, limit.period_text.as_str()),
            (2000, Windows::Even { period_ms: 3_600_000, offset_ms: 0 }, "hour")
        );
        assert_eq!(Limit::parse("4294967295/10ms").unwrap().tokens, u32::MAX);
        assert_eq!(Limit::parse("1_000/5m").unwrap().tokens, 1000);
    }

    #[test]
    fn an_invalid_limit_is_rejected_with_its_reason() {
        for (text, error) in [
            ("2000", LimitError::Syntax),
            ("/hour", LimitError::Syntax),
            ("-1/hour", LimitError::Syntax),
            ("1.5/hour", LimitError::Syntax),
            ("0/hour", LimitError::Zero),
            ("_/hour", LimitError::Syntax),
            ("4294967296/hour", LimitError::TooLarge),
            ("5/hours", LimitError::Period(PeriodError::Syntax)),
            ("5/1ms", LimitError::Period(PeriodError::TooShort)),
        ] {
            assert_eq!(Limit::parse(text), Err(error), "{text}");
        }
    }
}
