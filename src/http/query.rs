//! One parameter of a query, however it is spelt.
//!
//! A query is read as servers read a form (WHATWG URL, section 5.1): pairs between `&`, with `%XX` and
//! `+` decoded in names and values alike, so that no spelling of a value is another value. Nothing
//! is copied where nothing is encoded.

use std::borrow::Cow;

use super::percent_decode::{Decoded, Malformed};

/// What a request says under one name.
#[derive(PartialEq, Eq, Debug)]
pub enum Given<'a> {
    Nothing,
    Once(Cow<'a, [u8]>),
    /// The upstream might believe the other one.
    Twice,
}

/// The value of a parameter. Names are all read; of values, only the one that is asked for.
pub fn parameter<'a>(query: &'a str, name: &str) -> Result<Given<'a>, Malformed> {
    let mut given = None;
    for pair in query.as_bytes().split(|byte| *byte == b'&') {
        let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
        if !is(&pair[..equals], name.as_bytes())? {
            continue;
        }
        if given.is_some() {
            return Ok(Given::Twice);
        }
        given = Some(pair.get(equals + 1..).unwrap_or_default());
    }
    match given {
        None | Some(b"") => Ok(Given::Nothing),
        Some(value) if Decoded::is_plain(value) => Ok(Given::Once(Cow::Borrowed(value))),
        Some(value) => Decoded::new(value).collect::<Result<Vec<u8>, Malformed>>().map(Cow::Owned).map(Given::Once),
    }
}

/// Whether a name, as it was sent, is the one.
fn is(sent: &[u8], name: &[u8]) -> Result<bool, Malformed> {
    if Decoded::is_plain(sent) {
        return Ok(sent == name);
    }
    let mut wanted = name.iter();
    let mut same = true;
    // To its end, for what is malformed there.
    for byte in Decoded::new(sent) {
        same &= wanted.next() == Some(&byte?);
    }
    Ok(same && wanted.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(query: &str) -> Result<Option<String>, Malformed> {
        Ok(match parameter(query, "token")? {
            Given::Nothing => None,
            Given::Once(value) => Some(String::from_utf8(value.into_owned()).unwrap()),
            Given::Twice => Some("twice".to_owned()),
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
        assert!(matches!(parameter("a=%20&token=abc", "token"), Ok(Given::Once(Cow::Borrowed(b"abc")))));
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
            assert_eq!(token(query), Err(Malformed), "{query}");
        }
        // The value of another parameter is nobody's business here.
        assert_eq!(token("discount=50%&token=a"), Ok(Some("a".to_owned())));
    }
}
