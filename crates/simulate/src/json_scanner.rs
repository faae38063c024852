//! A scanner for one JSON object on a line. It allocates nothing and reports where values are; values that the caller does
//! not want are skipped without being checked.

use memchr::{memchr, memchr2};

/// Texts up to this length are searched a word at a time: a call of `memchr` would take longer.
const SHORT_BYTES: usize = 48;

/// A text in a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Span {
    pub at: u32,
    pub len: u32,
    pub escape: Escape,
}

/// How characters of a text are escaped.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Escape {
    #[default]
    None,
    /// `\"`, `\x22`, `\u0022`: JSON, nginx, Apache.
    Backslash,
    /// `%22`.
    Percent,
    /// Percent signs alone, as `%25`: of a path or query that is encoded a second time.
    EncodedPercent,
    /// Blanks, as `+`.
    Plus,
    /// `#22`: HAProxy.
    Hash,
    /// An array of JSON, whose texts are the lines of a field: a list.
    Lines,
}

/// A value of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value {
    /// A string, without its quotes.
    Text(Span),
    Number(Span),
    Bool(bool),
    Null,
    /// The scanner is before the brace.
    Object,
    /// The scanner is before the bracket.
    Array,
}

/// The line is not a JSON object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed;

/// A position in a line.
pub struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Span {
    /// The text in its buffer, still escaped.
    pub fn of(self, buffer: &[u8]) -> &[u8] {
        buffer.get(self.at as usize..(self.at + self.len) as usize).unwrap_or_default()
    }

    /// The part of the span from `from` on, `len` bytes.
    pub fn part(self, from: usize, len: usize) -> Span {
        Span { at: self.at + from as u32, len: len as u32, escape: self.escape }
    }

    /// The text in its buffer, without escapes. `out` is memory for that.
    pub fn decoded<'b>(self, buffer: &'b [u8], out: &'b mut Vec<u8>) -> &'b [u8] {
        let text = self.of(buffer);
        match self.escape {
            Escape::None => text,
            Escape::Backslash => unescape(text, out),
            Escape::Percent => decode_hex(text, b'%', |_| true, out),
            Escape::EncodedPercent => decode_hex(text, b'%', |byte| byte == b'%', out),
            Escape::Hash => decode_hex(text, b'#', |_| true, out),
            Escape::Lines => join_lines(text, out),
            Escape::Plus => {
                out.clear();
                out.extend(text.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }));
                out
            }
        }
    }
}

impl<'a> Scanner<'a> {
    pub fn new(bytes: &'a [u8]) -> Scanner<'a> {
        Scanner { bytes, at: 0 }
    }

    /// Calls `member` with the key of each member of the object here. `member` has to read or skip the value.
    pub fn object(
        &mut self,
        member: &mut impl FnMut(&mut Scanner<'a>, Span) -> Result<(), Malformed>,
    ) -> Result<(), Malformed> {
        self.expect(b'{')?;
        if self.next_byte()? == b'}' {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.expect(b'"')?;
            let key = self.text()?;
            self.expect(b':')?;
            member(self, key)?;
            match self.next_byte()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(Malformed),
            }
        }
    }

    /// Reads a scalar, or says what is here.
    #[inline]
    pub fn value(&mut self) -> Result<Value, Malformed> {
        match self.next_byte()? {
            b'"' => {
                self.at += 1;
                self.text().map(Value::Text)
            }
            b'{' => Ok(Value::Object),
            b'[' => Ok(Value::Array),
            b't' => self.literal(b"true", Value::Bool(true)),
            b'f' => self.literal(b"false", Value::Bool(false)),
            b'n' => self.literal(b"null", Value::Null),
            b'-' | b'0'..=b'9' => {
                let start = self.at;
                let rest = self.bytes[start..].iter();
                self.at +=
                    rest.take_while(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')).count();
                Ok(Value::Number(self.span(start, self.at, false)))
            }
            _ => Err(Malformed),
        }
    }

    /// The text of the object or array here, which is skipped.
    pub fn nested(&mut self) -> Result<Span, Malformed> {
        let start = self.at;
        self.skip_nested()?;
        Ok(self.span(start, self.at, false))
    }

    /// Skips the object or array here.
    pub fn skip_nested(&mut self) -> Result<(), Malformed> {
        let mut depth = 0_usize;
        loop {
            match self.next_byte()? {
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth = depth.checked_sub(1).ok_or(Malformed)?,
                b'"' => {
                    self.at += 1;
                    self.text()?;
                    continue;
                }
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Skips any value.
    #[inline]
    pub fn skip(&mut self) -> Result<(), Malformed> {
        match self.value()? {
            Value::Object | Value::Array => self.skip_nested(),
            _ => Ok(()),
        }
    }

    /// Reads the array here, and calls `element` with each element: `None` if it is no text. Returns the array.
    pub fn array(&mut self, element: &mut impl FnMut(Option<Span>)) -> Result<Span, Malformed> {
        self.expect(b'[')?;
        let start = self.at - 1;
        let mut is_at_end = self.next_byte()? == b']';
        while !is_at_end {
            element(match self.value()? {
                Value::Text(text) => Some(text),
                Value::Object | Value::Array => {
                    self.skip_nested()?;
                    None
                }
                _ => None,
            });
            match self.next_byte()? {
                b',' => self.at += 1,
                b']' => is_at_end = true,
                _ => return Err(Malformed),
            }
        }
        self.at += 1;
        Ok(self.span(start, self.at, false))
    }

    /// Whether nothing but white space is left.
    pub fn is_at_end(&self) -> bool {
        self.bytes[self.at..].iter().all(u8::is_ascii_whitespace)
    }

    /// The rest of a string whose opening quote was read.
    #[inline]
    fn text(&mut self) -> Result<Span, Malformed> {
        let start = self.at;
        let mut is_escaped = false;
        loop {
            self.at += find_end(self.bytes.get(self.at..).ok_or(Malformed)?).ok_or(Malformed)?;
            if self.bytes[self.at] == b'"' {
                let span = self.span(start, self.at, is_escaped);
                self.at += 1;
                return Ok(span);
            }
            is_escaped = true;
            self.at += 2;
        }
    }

    fn span(&self, start: usize, end: usize, is_escaped: bool) -> Span {
        let escape = if is_escaped { Escape::Backslash } else { Escape::None };
        Span { at: start as u32, len: (end - start) as u32, escape }
    }

    fn literal(&mut self, text: &[u8], value: Value) -> Result<Value, Malformed> {
        if !self.bytes[self.at..].starts_with(text) {
            return Err(Malformed);
        }
        self.at += text.len();
        Ok(value)
    }

    #[inline]
    fn next_byte(&mut self) -> Result<u8, Malformed> {
        loop {
            match self.bytes.get(self.at) {
                Some(b' ' | b'\t' | b'\r' | b'\n') => self.at += 1,
                Some(byte) => return Ok(*byte),
                None => return Err(Malformed),
            }
        }
    }

    #[inline]
    fn expect(&mut self, byte: u8) -> Result<(), Malformed> {
        if self.next_byte()? != byte {
            return Err(Malformed);
        }
        self.at += 1;
        Ok(())
    }
}

/// The position of the next quote or backslash.
#[inline]
fn find_end(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(word) = text.get(at..at + 8).filter(|_| at < SHORT_BYTES) {
        let word = u64::from_le_bytes(word.try_into().ok()?);
        let found = zero_bytes(word ^ (BYTES * u64::from(b'"'))) | zero_bytes(word ^ (BYTES * u64::from(b'\\')));
        if found != 0 {
            return Some(at + found.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    memchr2(b'"', b'\\', &text[at..]).map(|found| at + found)
}

/// One in each byte.
const BYTES: u64 = 0x0101_0101_0101_0101;

/// Sets the upper bit of the first byte that is zero, and none below it.
fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(BYTES) & !word & (BYTES << 7)
}

/// The texts of an array as one list (RFC 9110, section 5.3).
fn join_lines<'b>(array: &[u8], out: &'b mut Vec<u8>) -> &'b [u8] {
    out.clear();
    let mut buffer = Vec::new();
    // The array was read before.
    let _ = Scanner::new(array).array(&mut |text| {
        if !out.is_empty() {
            out.extend_from_slice(b", ");
        }
        out.extend_from_slice(text.unwrap_or_default().decoded(array, &mut buffer));
    });
    out
}

/// Decodes a sign with two hexadecimal digits behind it, where it stands for a byte that `is_encoded`.
fn decode_hex<'b>(text: &[u8], sign: u8, is_encoded: impl Fn(u8) -> bool, out: &'b mut Vec<u8>) -> &'b [u8] {
    out.clear();
    let digit = |at: usize| char::from(*text.get(at)?).to_digit(16);
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        let pair = digit(at + 1).zip(digit(at + 2)).filter(|_| *byte == sign);
        let code = pair.map(|(high, low)| (16 * high + low) as u8).filter(|code| is_encoded(*code));
        out.push(code.unwrap_or(*byte));
        at += if code.is_some() { 3 } else { 1 };
    }
    out
}

/// Decodes the escapes of JSON strings, and those of nginx and Apache (`\x22`, `\"`), into `out`.
pub fn unescape<'b>(text: &[u8], out: &'b mut Vec<u8>) -> &'b [u8] {
    out.clear();
    let hex = |digits: Option<&[u8]>| u32::from_str_radix(std::str::from_utf8(digits?).ok()?, 16).ok();
    let mut rest = text;
    while let Some(at) = memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        let (code, length) = match rest.get(at + 1) {
            Some(b'n') => (Some(10), 2),
            Some(b't') => (Some(9), 2),
            Some(b'r') => (Some(13), 2),
            Some(b'b') => (Some(8), 2),
            Some(b'f') => (Some(12), 2),
            Some(b'u') => (hex(rest.get(at + 2..at + 6)), 6),
            Some(b'x') => {
                if let Some(byte) = hex(rest.get(at + 2..at + 4)) {
                    out.push(byte as u8);
                }
                rest = rest.get(at + 4..).unwrap_or_default();
                continue;
            }
            Some(byte) => {
                out.push(*byte);
                (None, 2)
            }
            None => (None, 1),
        };
        rest = rest.get(at + length..).unwrap_or_default();
        let mut code = code;
        // A pair of surrogates is one character.
        if let Some(high @ 0xD800..=0xDBFF) = code
            && rest.starts_with(b"\\u")
            && let Some(low @ 0xDC00..=0xDFFF) = hex(rest.get(2..6))
        {
            code = Some(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
            rest = &rest[6..];
        }
        if let Some(code) = code {
            let sign = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            out.extend_from_slice(sign.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
    out.extend_from_slice(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn members(line: &str) -> Result<Vec<(String, String)>, Malformed> {
        let mut found = Vec::new();
        let mut scanner = Scanner::new(line.as_bytes());
        scanner.object(&mut |scanner, key| {
            let key = String::from_utf8_lossy(key.of(line.as_bytes())).into_owned();
            let text = |span: Span| {
                let text = span.of(line.as_bytes());
                String::from_utf8_lossy(unescape(text, &mut Vec::new())).into_owned()
            };
            let value = match scanner.value()? {
                Value::Text(span) | Value::Number(span) => text(span),
                Value::Array => {
                    let mut texts = Vec::new();
                    let array = scanner.array(&mut |element| texts.push(element.map(text)))?;
                    format!("{texts:?} {}", String::from_utf8_lossy(array.of(line.as_bytes())))
                }
                Value::Object => {
                    scanner.skip_nested()?;
                    "{}".to_owned()
                }
                other => format!("{other:?}"),
            };
            found.push((key, value));
            Ok(())
        })?;
        if scanner.is_at_end() { Ok(found) } else { Err(Malformed) }
    }

    #[test]
    fn values_are_found() {
        let line = r#" {"a":"x\"y\u00e9\ud83d\ude00\/", "b" : -1.5e3,"c":{"d":["}",{}]},"e":["f", 1 ,"g" ],"h":[],"i":null,"j":true} "#;
        let found = members(line).unwrap();
        let found: Vec<(&str, &str)> = found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(
            found,
            [
                ("a", "x\"yé😀/"),
                ("b", "-1.5e3"),
                ("c", "{}"),
                ("e", "[Some(\"f\"), None, Some(\"g\")] [\"f\", 1 ,\"g\" ]"),
                ("h", "[] []"),
                ("i", "Null"),
                ("j", "Bool(true)")
            ]
        );
        for line in [
            "",
            "{",
            "{}x",
            "[]",
            r#"{"a"}"#,
            r#"{"a":["b" "c"]}"#,
            r#"{"a":["b",]}"#,
            r#"{"a":}"#,
            r#"{"a":"b}"#,
            r#"{"a":1 "b":2}"#,
            r#"{"a":"\"#,
        ] {
            assert_eq!(members(line), Err(Malformed), "{line}");
        }
    }

    #[test]
    fn escapes_of_nginx_and_apache_are_decoded() {
        for (text, expected) in [("a\\x22b", "a\"b"), ("a\\\"b\\\\", "a\"b\\"), ("\\", ""), ("\\x4", "")] {
            assert_eq!(unescape(text.as_bytes(), &mut Vec::new()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn other_escapes_are_decoded() {
        for (escape, text, expected) in [
            (Escape::None, "a%20b", "a%20b"),
            (Escape::Percent, "a%20b%2c%", "a b,%"),
            (Escape::EncodedPercent, "/a%2520b%20c%25", "/a%20b%20c%"),
            (Escape::Hash, "a#22b#zz#", "a\"b#zz#"),
            (Escape::Plus, "a+b", "a b"),
            (Escape::Lines, r#"["a, b" , "c\"d"]"#, r#"a, b, c"d"#),
        ] {
            let span = Span { at: 0, len: text.len() as u32, escape };
            assert_eq!(span.decoded(text.as_bytes(), &mut Vec::new()), expected.as_bytes(), "{escape:?}");
        }
    }

    proptest! {
        #[test]
        fn strings_are_read_as_serde_json_reads_them(text in "\\PC{0,20}[\\x00-\\x1f\"\\\\]{0,3}") {
            let line = serde_json::json!({ "key": text }).to_string();
            prop_assert_eq!(members(&line), Ok(vec![("key".to_owned(), text)]));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let text = [b"{\"a\":", &bytes[..]].concat();
            let _ = Scanner::new(&text).object(&mut |scanner, _key| scanner.skip());
            unescape(&bytes, &mut Vec::new());
        }
    }
}
