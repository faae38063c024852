//! Exact non-negative decimal numbers, and the reader of JSON numbers. No floating-point number is involved.

use std::fmt;

/// A number as an integer multiple of 10^-12, which is exact up to 3.4·10^26.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Decimal(u128);

/// Digits after the decimal point.
const SCALE: i64 = 12;
const ONE: u128 = 10_u128.pow(SCALE as u32);

impl Decimal {
    pub const ZERO: Decimal = Decimal(0);
    pub const ONE: Decimal = Decimal(ONE);
    pub const MAX: Decimal = Decimal(u128::MAX);

    /// Reads a number in the notation of JSON. `None` if the text is no number, or a number that is negative, too large, or has more
    /// than 12 digits after the decimal point.
    pub fn parse(text: &str) -> Option<Decimal> {
        let mut reader = NumberReader::default();
        reader.start(true);
        let is_number = text.bytes().all(|byte| reader.push(byte)) && reader.is_complete();
        is_number.then(|| reader.value()).flatten()
    }

    /// As [`Decimal::parse`], but at most [`Decimal::MAX`].
    pub fn parse_saturating(text: &str) -> Option<Decimal> {
        let mut reader = NumberReader::default();
        reader.start(true);
        let is_number = text.bytes().all(|byte| reader.push(byte)) && reader.is_complete();
        is_number.then(|| if reader.is_too_great() { Some(Decimal::MAX) } else { reader.value() }).flatten()
    }

    #[must_use]
    pub fn saturating_add(self, other: Decimal) -> Decimal {
        Decimal(self.0.saturating_add(other.0))
    }

    /// Rounded up to the last digit; at most [`Decimal::MAX`].
    #[must_use]
    pub fn saturating_mul(self, other: Decimal) -> Decimal {
        // A product that overflows exceeds 10^14: more tokens than a request has.
        self.0.checked_mul(other.0).map_or(Decimal::MAX, |product| Decimal(product.div_ceil(ONE)))
    }

    pub fn checked_sub(self, other: Decimal) -> Option<Decimal> {
        self.0.checked_sub(other.0).map(Decimal)
    }

    /// The least integer that is not less, at most `u64::MAX`.
    pub fn rounded_up(self) -> u64 {
        u64::try_from(self.0.div_ceil(ONE)).unwrap_or(u64::MAX)
    }

    /// The sum of the products, rounded up, at most `u32::MAX`.
    pub fn rounded_sum(products: impl Iterator<Item = (Decimal, Decimal)>) -> u32 {
        // A product that overflows exceeds 10^14, and thus the result.
        let sum = products.fold(0_u128, |sum, (a, b)| sum.saturating_add(a.0.saturating_mul(b.0)));
        u32::try_from(sum.div_ceil(ONE * ONE)).unwrap_or(u32::MAX)
    }
}

/// In digits, without zeros at the ends.
impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.0 / ONE, self.0 % ONE);
        match fraction {
            0 => write!(f, "{whole}"),
            _ => f.write_str(format!("{whole}.{fraction:012}").trim_end_matches('0')),
        }
    }
}

impl From<u64> for Decimal {
    fn from(number: u64) -> Decimal {
        Decimal(u128::from(number) * ONE)
    }
}

/// The part of a number that was read last (RFC 8259, section 6).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Part {
    #[default]
    Start,
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

/// Reads a number byte by byte.
#[derive(Default)]
pub struct NumberReader {
    part: Part,
    /// Whether the value is of interest. Otherwise only the form is checked.
    is_wanted: bool,
    is_negative: bool,
    is_exponent_negative: bool,
    /// The digits up to the last one that is not zero.
    significand: u128,
    /// Zeros after these digits.
    zeros: u32,
    fraction_digits: u32,
    exponent: u32,
    is_overflown: bool,
}

impl NumberReader {
    pub fn start(&mut self, is_wanted: bool) {
        *self = NumberReader { is_wanted, ..NumberReader::default() };
    }

    /// `false` if a number does not go on with this byte.
    #[inline]
    pub fn push(&mut self, byte: u8) -> bool {
        use Part::{Exponent, ExponentDigits, ExponentSign, Fraction, Integer, Minus, Point, Start, Zero};
        self.part = match (byte, self.part) {
            (b'-', Start) => Minus,
            (b'0', Start | Minus) => Zero,
            (b'0'..=b'9', Start | Minus | Integer) => Integer,
            (b'.', Zero | Integer) => Point,
            (b'0'..=b'9', Point | Fraction) => Fraction,
            (b'e' | b'E', Zero | Integer | Fraction) => Exponent,
            (b'+' | b'-', Exponent) => ExponentSign,
            (b'0'..=b'9', Exponent | ExponentSign | ExponentDigits) => ExponentDigits,
            _ => return false,
        };
        if self.is_wanted {
            self.record(byte);
        }
        true
    }

    /// Skips digits of a number whose value is not of interest. Returns how many.
    #[inline]
    pub fn skip_digits(&self, bytes: &[u8]) -> usize {
        match self.part {
            Part::Integer | Part::Fraction | Part::ExponentDigits if !self.is_wanted => {
                bytes.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(bytes.len())
            }
            _ => 0,
        }
    }

    fn record(&mut self, byte: u8) {
        match self.part {
            Part::Minus => self.is_negative = true,
            Part::ExponentSign => self.is_exponent_negative = byte == b'-',
            Part::ExponentDigits => {
                self.exponent = self.exponent.saturating_mul(10).saturating_add(u32::from(byte - b'0'));
            }
            Part::Zero | Part::Integer | Part::Fraction => {
                self.fraction_digits = self.fraction_digits.saturating_add(u32::from(self.part == Part::Fraction));
                self.record_digit(byte - b'0');
            }
            Part::Start | Part::Point | Part::Exponent => {}
        }
    }

    fn record_digit(&mut self, digit: u8) {
        if digit == 0 {
            self.zeros = self.zeros.saturating_add(1);
            return;
        }
        let power = if self.significand == 0 { Some(1) } else { 10_u128.checked_pow(self.zeros.saturating_add(1)) };
        let shifted = power.and_then(|power| self.significand.checked_mul(power));
        match shifted.and_then(|shifted| shifted.checked_add(u128::from(digit))) {
            Some(significand) => (self.significand, self.zeros) = (significand, 0),
            None => self.is_overflown = true,
        }
    }

    /// Whether the bytes so far are a number.
    pub fn is_complete(&self) -> bool {
        matches!(self.part, Part::Zero | Part::Integer | Part::Fraction | Part::ExponentDigits)
    }

    /// The value of a number that was read completely; `None` if no [`Decimal`] equals it.
    pub fn value(&self) -> Option<Decimal> {
        if self.is_overflown {
            return None;
        }
        if self.significand == 0 {
            return Some(Decimal::ZERO);
        }
        // The last digit of the significand is not zero, so a negative power leaves a remainder.
        let factor = 10_u128.checked_pow(u32::try_from(self.power()).ok()?)?;
        self.significand.checked_mul(factor).filter(|_| !self.is_negative).map(Decimal)
    }

    /// The power of ten by which the significand is multiplied.
    fn power(&self) -> i64 {
        let exponent = i64::from(self.exponent) * if self.is_exponent_negative { -1 } else { 1 };
        exponent + i64::from(self.zeros) - i64::from(self.fraction_digits) + SCALE
    }

    /// Whether a number that was read completely is greater than each [`Decimal`], or has more digits than can be told.
    pub fn is_too_great(&self) -> bool {
        !self.is_negative && self.value().is_none() && (self.is_overflown || self.power() >= 0)
    }

    /// Whether only a minus was read.
    pub fn is_minus(&self) -> bool {
        self.part == Part::Minus
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn products_are_rounded_up_and_saturate() {
        let product = |a: &str, b: &str| Decimal::parse(a).unwrap().saturating_mul(Decimal::parse(b).unwrap());
        assert_eq!(product("2.5", "3"), Decimal(7_500_000_000_000));
        assert_eq!(product("0.000000000001", "0.5"), Decimal(1));
        assert_eq!(product("300000000000000", "1"), Decimal::from(300_000_000_000_000));
        assert_eq!(product("400000000000000", "1"), Decimal::MAX);
    }

    #[test]
    fn numbers_are_exact_or_absent() {
        let exact = [
            ("0", 0),
            ("-0.00e5", 0),
            ("7", 7_000_000_000_000),
            ("1e3", 1_000_000_000_000_000),
            ("1200E-2", 12_000_000_000_000),
            ("0.000000000001", 1),
            ("10.50000000000000000000000000000000000000000000000000", 10_500_000_000_000),
            ("0.0000000000000000000000000000000000000000001e43", 1_000_000_000_000),
            ("100000000000000000000000000000000000000000000000000e-50", 1_000_000_000_000),
        ];
        for (text, expected) in exact {
            assert_eq!(Decimal::parse(text), Some(Decimal(expected)), "{text}");
        }
        let absent = [
            "-1",
            "1e-13",
            "0.0000000000001",
            "1e27",
            "1e99999999999",
            "1e-99999999999",
            "",
            "-",
            "01",
            "1.",
            ".5",
            "+1",
            "1e",
            "1e+",
            "0x1",
            "1 ",
            "NaN",
            "340282366920938463463374607431768211456",
        ];
        for text in absent {
            assert_eq!(Decimal::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sums_are_rounded_up_and_saturate() {
        let cost = |products: &[(u64, &str)]| {
            let products =
                products.iter().map(|(number, weight)| (Decimal::from(*number), Decimal::parse(weight).unwrap()));
            Decimal::rounded_sum(products)
        };
        assert_eq!(cost(&[(10, "0.1"), (20, "0.1")]), 3);
        assert_eq!(cost(&[(10, "0.1"), (20, "0.1"), (1, "0.000000000001")]), 4);
        assert_eq!(cost(&[(u64::MAX, "1000000000"), (u64::MAX, "1")]), u32::MAX);
        assert_eq!(Decimal::parse("4.000000000001").unwrap().rounded_up(), 5);
    }

    proptest! {
        #[test]
        fn digits_and_exponents_are_equal(number in 0..=u64::MAX, places in 0..12_u32) {
            let (power, text) = (10_u64.pow(places), format!("{number}e-{places}"));
            let expected = Decimal(u128::from(number) * 10_u128.pow(12 - places));
            prop_assert_eq!(Decimal::parse(&text), Some(expected));
            let text = format!("{}.{:0>width$}0", number / power, number % power, width = places as usize);
            prop_assert_eq!(Decimal::parse(&text), Some(expected));
        }
    }
}
