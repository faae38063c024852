//! One parameter of a query, however it is spelt.
//!
//! A query is read as servers read a form (WHATWG URL, section 5.1): pairs between `&`, with `%XX` and
//! `+` decoded in names and values alike, so that no spelling of a value is another value. Nothing
//! is copied where nothing is encoded.

use std::borrow::Cow;

use super::percent_decode::{InvalidEscape, PercentDecoder};

/// What a request says under one name.
#[derive(PartialEq, Eq, Debug)]
pub enum Occurrence<'a> {
    Absent,
    Single(Cow<'a, [u8]>),
    /// The upstream might believe the other one.
    Repeated,
}

/// The value of a parameter. Names are all read; of values, only the one that is asked for.
pub fn query_parameter<'a>(query: &'a str, name: &str) -> Result<Occurrence<'a>, InvalidEscape> {
    let mut given = None;
    for pair in query.as_bytes().split(|byte| *byte == b'&') {
        let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
        if !name_matches(&pair[..equals], name.as_bytes())? {
            continue;
        }
        if given.is_some() {
            return Ok(Occurrence::Repeated);
        }
        given = Some(pair.get(equals + 1..).unwrap_or_default());
    }
    match given {
        None | Some(b"") => Ok(Occurrence::Absent),
        Some(value) if PercentDecoder::is_plain(value) => Ok(Occurrence::Single(Cow::Borrowed(value))),
        Some(value) => PercentDecoder::new(value)
            .collect::<Result<Vec<u8>, InvalidEscape>>()
            .map(Cow::Owned)
            .map(Occurrence::Single),
    }
}

/// Whether a name, as it was sent, is the one.
fn name_matches(sent: &[u8], name: &[u8]) -> Result<bool, InvalidEscape> {
    if PercentDecoder::is_plain(sent) {
        return Ok(sent == name);
    }
    let mut wanted = name.iter();
    let mut same = true;
    // To its end, for what is malformed there.
    for byte in PercentDecoder::new(sent) {
        same &= wanted.next() == Some(&byte?);
    }
    Ok(same && wanted.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(query: &str) -> Result<Option<String>, InvalidEscape> {
        Ok(match query_parameter(query, "token")? {
            Occurrence::Absent => None,
            Occurrence::Single(value) => Some(String::from_utf8(value.into_owned()).unwrap()),
            Occurrence::Repeated => Some("twice".to_owned()),
        })
    }

    #[test]
    fn all_spellings_of_a_value_are_one() {
        for query in [
            "token=a+b",
            "token=a%20b",
            "token=%61%20%62",
            "x=1&token=a+b&y=2",
            "%74oken=a+b",
            "toke%6e=a+b",
            "&&token=a+b&",
            "=x&token=a+b",
        ] {
            assert_eq!(token(query), Ok(Some("a b".to_owned())), "{query}");
        }
        assert_eq!(token("token=a=b"), Ok(Some("a=b".to_owned())));
        assert_eq!(token("token=a%26b"), Ok(Some("a&b".to_owned())));
    }

    #[test]
    fn nothing_is_copied_where_nothing_is_encoded() {
        assert!(matches!(query_parameter("a=%20&token=abc", "token"), Ok(Occurrence::Single(Cow::Borrowed(b"abc")))));
    }

    #[test]
    fn an_absent_or_empty_value_is_none() {
        for query in ["", "token", "token=", "Token=a", "tokens=a", "toke=a", "a=token", "token%00=a", "a;token=b"] {
            assert_eq!(token(query), Ok(None), "{query}");
        }
    }

    #[test]
    fn two_of_a_name_are_not_chosen_from() {
        for query in ["token=a&token=b", "token=a&token=a", "token&token=a", "token=a&%74oken=b", "token=&x&token="] {
            assert_eq!(token(query), Ok(Some("twice".to_owned())), "{query}");
        }
    }

    #[test]
    fn what_can_not_be_decoded_is_malformed() {
        for query in ["token=%", "token=%zz", "token=a%2", "%zz=1&token=a", "token=a&%=", "token%=a"] {
            assert_eq!(token(query), Err(InvalidEscape), "{query}");
        }
        // The value of another parameter is nobody's business here.
        assert_eq!(token("discount=50%&token=a"), Ok(Some("a".to_owned())));
    }
}
