//! The bearer token of a request (RFC 6750, section 2.1).

use http::header::{self, HeaderMap};

/// Two Authorization fields: the upstream might believe the other one.
#[derive(PartialEq, Eq, Debug)]
pub struct DuplicateAuthorization;

/// The token; `None` if there is no Authorization, or one of another scheme.
pub fn bearer_token(headers: &HeaderMap) -> Result<Option<&[u8]>, DuplicateAuthorization> {
    let mut fields = headers.get_all(header::AUTHORIZATION).iter();
    let credentials = match (fields.next(), fields.next()) {
        (None, _) => return Ok(None),
        (Some(field), None) => field.as_bytes().trim_ascii(),
        (Some(_), Some(_)) => return Err(DuplicateAuthorization),
    };
    let end = credentials.iter().position(u8::is_ascii_whitespace).unwrap_or(credentials.len());
    let (scheme, rest) = credentials.split_at(end);
    // RFC 9110, section 11.1: schemes have no case.
    Ok(scheme.eq_ignore_ascii_case(b"bearer").then_some(rest.trim_ascii_start()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn of(fields: &[&'static str]) -> Result<Option<String>, DuplicateAuthorization> {
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.append("authorization", HeaderValue::from_static(field));
        }
        bearer_token(&headers).map(|token| token.map(|token| String::from_utf8(token.to_vec()).unwrap()))
    }

    #[test]
    fn the_scheme_has_no_case() {
        for field in ["Bearer abc", "bearer abc", "BEARER  abc ", "Bearer\tabc"] {
            assert_eq!(of(&[field]), Ok(Some("abc".to_owned())), "{field}");
        }
    }

    #[test]
    fn other_schemes_are_no_token_and_an_empty_token_is_one() {
        for field in ["", "Basic abc", "Bearerabc", "DPoP abc", "abc"] {
            assert_eq!(of(&[field]), Ok(None), "{field}");
        }
        assert_eq!(of(&[]), Ok(None));
        // Which is malformed, and not absent.
        assert_eq!(of(&["Bearer"]), Ok(Some(String::new())));
        assert_eq!(of(&["Bearer a b"]), Ok(Some("a b".to_owned())));
    }

    #[test]
    fn two_are_not_chosen_from() {
        assert_eq!(of(&["Bearer abc", "Bearer abc"]), Err(DuplicateAuthorization));
        assert_eq!(of(&["Basic abc", "Bearer abc"]), Err(DuplicateAuthorization));
    }
}
