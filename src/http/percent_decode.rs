//! Percent-encoded bytes in a query or a cookie, one by one, without a copy.

/// Reads bytes with `%XX` and `+` decoded.
#[derive(Clone)]
pub struct PercentDecoder<'a> {
    rest: &'a [u8],
}

/// A `%` without two hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InvalidEscape;

impl<'a> PercentDecoder<'a> {
    pub fn new(text: &'a [u8]) -> PercentDecoder<'a> {
        PercentDecoder { rest: text }
    }

    /// Whether a text is its own decoding.
    pub fn is_plain(text: &[u8]) -> bool {
        !text.iter().any(|byte| matches!(byte, b'%' | b'+'))
    }
}

impl Iterator for PercentDecoder<'_> {
    type Item = Result<u8, InvalidEscape>;

    fn next(&mut self) -> Option<Result<u8, InvalidEscape>> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        match (first, rest) {
            (b'+', _) => Some(Ok(b' ')),
            (b'%', [high, low, rest @ ..]) => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (Some(high), Some(low)) = (digit(*high), digit(*low)) else { return Some(Err(InvalidEscape)) };
                self.rest = rest;
                Some(Ok((high << 4 | low) as u8))
            }
            (b'%', _) => Some(Err(InvalidEscape)),
            (plain, _) => Some(Ok(*plain)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_escape_is_one_byte() {
        let decoded = |text: &str| PercentDecoder::new(text.as_bytes()).collect::<Result<Vec<u8>, InvalidEscape>>();
        assert_eq!(decoded("a%20b+c%2bd%C3%A9"), Ok("a b c+d\u{e9}".as_bytes().to_vec()));
        assert_eq!(decoded("%00%ff"), Ok(vec![0, 255]));
        // What was decoded is not decoded again.
        assert_eq!(decoded("%2541"), Ok(b"%41".to_vec()));
        for text in ["%", "a%2", "%2", "%zz", "%4g", "%%41", "%+1", "% 1"] {
            assert_eq!(decoded(text), Err(InvalidEscape), "{text}");
        }
    }
}
