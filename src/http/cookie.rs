//! One cookie, however it is spelt.
//!
//! Cookies come as `a=b; c=d` (RFC 6265, section 5.4), in one field or in several (RFC 9113, section
//! 8.2.3). Names are compared byte by byte. Of values there are spellings that servers take for one:
//! white space around them and one pair of quotes are no part of a value, and escapes are decoded
//! where they can be, for many frameworks do. Quoted values with a backslash are decoded by some servers
//! and not by others (RFC 6265 allows none), so they are refused like a cookie that is given twice.

use std::borrow::Cow;

use http::header::{self, HeaderMap};

use super::percent_decode::{InvalidEscape, PercentDecoder};
use super::query::Occurrence;

/// The value of a cookie.
pub fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Occurrence<'a> {
    let mut given = None;
    for field in headers.get_all(header::COOKIE) {
        for pair in field.as_bytes().split(|byte| *byte == b';') {
            let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
            if pair[..equals].trim_ascii() != name.as_bytes() {
                continue;
            }
            if given.is_some() {
                return Occurrence::Repeated;
            }
            given = Some(pair.get(equals + 1..).unwrap_or_default());
        }
    }
    match given.map(unquote_cookie) {
        Some(value) if given != Some(value) && value.contains(&b'\\') => Occurrence::Repeated,
        None | Some(b"") => Occurrence::Absent,
        Some(value) => Occurrence::Single(decode_cookie(value)),
    }
}

/// A value without white space and quotes around it.
fn unquote_cookie(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    match value {
        [b'"', inner @ .., b'"'] => inner,
        _ => value,
    }
}

/// A value that is no encoding stays as it is, as those do that decode values.
fn decode_cookie(value: &[u8]) -> Cow<'_, [u8]> {
    if PercentDecoder::is_plain(value) {
        return Cow::Borrowed(value);
    }
    match PercentDecoder::new(value).collect::<Result<Vec<u8>, InvalidEscape>>() {
        Ok(decoded) => Cow::Owned(decoded),
        Err(InvalidEscape) => Cow::Borrowed(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn session(fields: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.append("cookie", HeaderValue::from_bytes(field.as_bytes()).unwrap());
        }
        match cookie(&headers, "session") {
            Occurrence::Absent => None,
            Occurrence::Single(value) => Some(String::from_utf8(value.into_owned()).unwrap()),
            Occurrence::Repeated => Some("twice".to_owned()),
        }
    }

    #[test]
    fn a_cookie_is_found_wherever_it_stands() {
        for fields in [
            &["session=abc"][..],
            &["a=b; session=abc"],
            &["session=abc; a=b"],
            &["a=b;session=abc;c=d"],
            &["a=b", "session=abc"],
            &["a=b; ", " session = abc "],
            &["session=\"abc\""],
            &["session=%61bc"],
            &["; ;session=abc;;"],
        ] {
            assert_eq!(session(fields).as_deref(), Some("abc"), "{fields:?}");
        }
        assert_eq!(session(&["session=a=b=="]).as_deref(), Some("a=b=="));
        assert_eq!(session(&["session=%zz%61"]).as_deref(), Some("%zz%61"), "no encoding");
        assert_eq!(session(&["session=\"abc"]).as_deref(), Some("\"abc"));
        assert_eq!(session(&["session=\""]).as_deref(), Some("\""));
    }

    #[test]
    fn nothing_is_copied_where_nothing_is_encoded() {
        let mut headers = HeaderMap::new();
        headers.insert("cookie", HeaderValue::from_static("a=%20; session=\"abc\""));
        assert_eq!(cookie(&headers, "session"), Occurrence::Single(Cow::Borrowed(b"abc")));
        assert!(matches!(cookie(&headers, "session"), Occurrence::Single(Cow::Borrowed(_))));
    }

    #[test]
    fn an_absent_or_empty_cookie_is_none() {
        for fields in [
            &[][..],
            &[""],
            &["session"],
            &["session="],
            &["session=\"\""],
            &["Session=a"],
            &["sessions=a"],
            &["a=session=b"],
        ] {
            assert_eq!(session(fields), None, "{fields:?}");
        }
    }

    #[test]
    fn two_of_a_name_are_not_chosen_from() {
        for fields in [
            &["session=a; session=b"][..],
            &["session=a; session=a"],
            &["session=a", "session=b"],
            &["session; session=a"],
        ] {
            assert_eq!(session(fields).as_deref(), Some("twice"), "{fields:?}");
        }
    }
}
