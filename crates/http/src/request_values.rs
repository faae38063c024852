//! Reads query parameters, cookies and credentials from a request.
//!
//! A value has one meaning however it is encoded, so that a client cannot get a fresh counter by encoding its key
//! differently. A name that occurs twice is reported as repeated: the upstream might use the other value. A value is
//! copied only if it has to be decoded.

use std::borrow::Cow;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use http::header::{self, HeaderMap};

/// What a request has under one name.
#[derive(PartialEq, Eq, Debug)]
pub enum Occurrence<'a> {
    /// The name is absent, or its value is empty.
    Absent,
    Single(Cow<'a, [u8]>),
    /// The upstream might use the other value.
    Repeated,
}

/// The request has more than one `Authorization` field; the upstream might use the other one.
#[derive(PartialEq, Eq, Debug)]
pub struct DuplicateAuthorization;

/// Why the user name of Basic authentication is unknown.
#[derive(PartialEq, Eq, Debug)]
pub enum CredentialsError {
    /// As [`DuplicateAuthorization`].
    Repeated,
    /// Not Base64.
    Malformed,
}

/// A `%` that is not followed by two hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InvalidEscape;

/// The value of a query parameter, read as servers read a form (WHATWG URL, section 5.1): pairs between `&`, with `%XX`
/// and `+` decoded in names and values. Every name has to be decodable; of the values, only the requested one.
///
/// Some servers also split at `;`, others ignore the case of names or replace characters in them. A query in which these find
/// another value counts as repeated.
pub fn query_parameter<'a>(query: &'a str, name: &str) -> Result<Occurrence<'a>, InvalidEscape> {
    Ok(match query_parameter_or_empty(query, name)? {
        Occurrence::Single(value) if value.is_empty() => Occurrence::Absent,
        found => found,
    })
}

/// As [`query_parameter`], where an empty value is a value: without a pair of the name, the parameter is absent.
pub fn query_parameter_or_empty<'a>(query: &'a str, name: &str) -> Result<Occurrence<'a>, InvalidEscape> {
    let mut pairs = Pairs::default();
    for pair in query.as_bytes().split(|byte| *byte == b'&') {
        pairs.add_if(pair, name_matches(name_of(pair), name.as_bytes())?);
    }
    if query.contains(';') {
        let mut split = Pairs::default();
        for pair in query.as_bytes().split(|byte| matches!(byte, b'&' | b';')) {
            split.add_if(pair, name_matches(name_of(pair), name.as_bytes()) == Ok(true));
        }
        if split != pairs {
            return Ok(Occurrence::Repeated);
        }
    }
    let mut pieces = query.as_bytes().split(|byte| matches!(byte, b'&' | b';')).map(name_of);
    if pairs.is_repeated || pieces.any(|piece| is_look_alike(piece, name.as_bytes(), Case::Ignored)) {
        return Ok(Occurrence::Repeated);
    }
    match pairs.value {
        None => Ok(Occurrence::Absent),
        Some(value) if PercentDecoder::is_plain(value) => Ok(Occurrence::Single(Cow::Borrowed(value))),
        Some(value) => PercentDecoder::new(value)
            .collect::<Result<Vec<u8>, InvalidEscape>>()
            .map(Cow::Owned)
            .map(Occurrence::Single),
    }
}

/// Whether a query has pairs of a name, however many.
pub fn has_query_parameter(query: &str, name: &str) -> bool {
    query.as_bytes().split(|byte| *byte == b'&').any(|pair| name_matches(name_of(pair), name.as_bytes()) == Ok(true))
}

/// The pairs of a query with one name.
#[derive(PartialEq, Eq, Default)]
struct Pairs<'a> {
    /// The first value, encoded.
    value: Option<&'a [u8]>,
    is_repeated: bool,
}

impl<'a> Pairs<'a> {
    fn add_if(&mut self, pair: &'a [u8], has_name: bool) {
        if !has_name {
            return;
        }
        self.is_repeated |= self.value.is_some();
        self.value = self.value.or_else(|| Some(pair.get(name_of(pair).len() + 1..).unwrap_or_default()));
    }
}

/// The encoded name of a pair.
fn name_of(pair: &[u8]) -> &[u8] {
    let equals = pair.iter().position(|byte| *byte == b'=');
    &pair[..equals.unwrap_or(pair.len())]
}

/// Whether an encoded name decodes to `name`.
fn name_matches(encoded: &[u8], name: &[u8]) -> Result<bool, InvalidEscape> {
    if PercentDecoder::is_plain(encoded) {
        return Ok(encoded == name);
    }
    let mut expected = name.iter();
    let mut is_same = true;
    // The loop does not stop at the first difference, so that every invalid escape is found.
    for byte in PercentDecoder::new(encoded) {
        is_same &= expected.next() == Some(&byte?);
    }
    Ok(is_same && expected.next().is_none())
}

/// Whether names are compared with regard to case.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Kept,
    Ignored,
}

/// Whether some servers take an encoded name for `name`, which it is not. PHP replaces `.`, `[` and spaces by `_`, skips leading
/// spaces, and ends a name at NUL; ASP.NET ignores case. PHP, Rack and the `qs` of Express take `name[]=a` for a list `name`.
fn is_look_alike(encoded: &[u8], name: &[u8], case: Case) -> bool {
    if encoded.len() < name.len() {
        return false;
    }
    let fold = |byte: u8| match byte {
        b'.' | b'[' | b' ' => b'_',
        byte if case == Case::Ignored => byte.to_ascii_lowercase(),
        byte => byte,
    };
    let decoded = PercentDecoder::new(encoded).map_while(Result::ok).skip_while(|byte| *byte == b' ');
    let decoded = decoded.take_while(|byte| *byte != 0);
    let is_name = |decoded: &mut dyn Iterator<Item = u8>| decoded.map(fold).eq(name.iter().copied().map(fold));
    (is_name(&mut decoded.clone()) || is_name(&mut decoded.take_while(|byte| *byte != b'[')))
        && name_matches(encoded, name) != Ok(true)
}

/// The value of a cookie. Cookies are pairs `a=b; c=d` (RFC 6265, section 5.4) in one field or several (RFC 9113,
/// section 8.2.3). Names are compared byte by byte. A cookie whose name some servers take for this one counts as repeated: PHP
/// decodes names and replaces characters. One in another case is another cookie, as in browsers: `session` of one application is
/// sent beside `SESSION` of another.
///
/// Encodings that servers treat as equal are one value: white space and one pair of quotes around the value are removed,
/// and escapes `%XX` are decoded where they are valid, as many frameworks do. A quoted value with a backslash counts as
/// repeated, and so is refused: some servers decode the backslash, others do not, and RFC 6265 allows none. So does a
/// further cookie of the name behind white space or a comma, where some servers begin a new pair.
pub fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Occurrence<'a> {
    let mut found = None;
    let separators = |byte: &u8| matches!(byte, b';' | b',') || byte.is_ascii_whitespace();
    let fields = headers.get_all(header::COOKIE).into_iter();
    let pieces = fields.flat_map(|field| field.as_bytes().split(separators));
    let mut named = 0;
    for other in pieces.filter(|piece| piece.contains(&b'=')).map(name_of) {
        if other == name.as_bytes() {
            named += 1;
        } else if is_look_alike(other, name.as_bytes(), Case::Kept) || name_matches(other, name.as_bytes()) == Ok(true)
        {
            return Occurrence::Repeated;
        }
    }
    if named > 1 {
        return Occurrence::Repeated;
    }
    for field in headers.get_all(header::COOKIE) {
        for pair in field.as_bytes().split(|byte| *byte == b';') {
            let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
            if pair[..equals].trim_ascii() != name.as_bytes() {
                continue;
            }
            if found.is_some() {
                return Occurrence::Repeated;
            }
            found = Some(pair.get(equals + 1..).unwrap_or_default());
        }
    }
    match found.map(unquote_cookie) {
        Some(value) if found != Some(value) && value.contains(&b'\\') => Occurrence::Repeated,
        None | Some(b"") => Occurrence::Absent,
        Some(value) => Occurrence::Single(decode_cookie(value)),
    }
}

/// Removes the white space and the pair of quotes around a value.
fn unquote_cookie(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    match value {
        [b'"', inner @ .., b'"'] => inner,
        _ => value,
    }
}

/// Decodes the escapes of a value. A value with an invalid escape stays as it is, as in the frameworks that decode.
fn decode_cookie(value: &[u8]) -> Cow<'_, [u8]> {
    if !value.contains(&b'%') {
        return Cow::Borrowed(value);
    }
    match PercentDecoder::new(value).with_plus().collect::<Result<Vec<u8>, InvalidEscape>>() {
        Ok(decoded) => Cow::Owned(decoded),
        Err(InvalidEscape) => Cow::Borrowed(value),
    }
}

/// The bearer token of a request (RFC 6750, section 2.1); `None` without an `Authorization` field, or if the field has
/// another scheme.
pub fn bearer_token(headers: &HeaderMap) -> Result<Option<&[u8]>, DuplicateAuthorization> {
    credentials(headers, b"bearer")
}

/// The user name of Basic authentication (RFC 7617, section 2); `None` without it, or without a user name.
///
/// Padding and trailing bits do not matter, so that all spellings of a name count as one. Other deviations from Base64 are
/// an error: many servers skip or replace wrong characters, and so read a name that the gateway would not.
pub fn basic_user(headers: &HeaderMap) -> Result<Option<Vec<u8>>, CredentialsError> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    let credentials = credentials(headers, b"basic").map_err(|DuplicateAuthorization| CredentialsError::Repeated)?;
    let Some(text) = credentials else { return Ok(None) };
    let mut decoded = LENIENT.decode(text).map_err(|_| CredentialsError::Malformed)?;
    Ok(decoded.iter().position(|byte| *byte == b':').filter(|end| *end > 0).map(|end| {
        decoded.truncate(end);
        decoded
    }))
}

/// The credentials of a scheme, in lower case here; `None` without an `Authorization` field, or with another scheme.
fn credentials<'h>(headers: &'h HeaderMap, of_scheme: &[u8]) -> Result<Option<&'h [u8]>, DuplicateAuthorization> {
    let mut fields = headers.get_all(header::AUTHORIZATION).iter();
    let credentials = match (fields.next(), fields.next()) {
        (None, _) => return Ok(None),
        (Some(field), None) => field.as_bytes().trim_ascii(),
        (Some(_), Some(_)) => return Err(DuplicateAuthorization),
    };
    let end = credentials.iter().position(u8::is_ascii_whitespace).unwrap_or(credentials.len());
    let (scheme, rest) = credentials.split_at(end);
    // RFC 9110, section 11.1: schemes are case-insensitive.
    Ok(scheme.eq_ignore_ascii_case(of_scheme).then_some(rest.trim_ascii_start()))
}

/// Iterates over bytes with `%XX` and, in forms, `+` decoded.
#[derive(Clone)]
struct PercentDecoder<'a> {
    rest: &'a [u8],
    /// What `+` stands for.
    plus: u8,
}

impl<'a> PercentDecoder<'a> {
    fn new(text: &'a [u8]) -> PercentDecoder<'a> {
        PercentDecoder { rest: text, plus: b' ' }
    }

    /// Outside of forms, `+` is an ordinary character.
    fn with_plus(self) -> PercentDecoder<'a> {
        PercentDecoder { plus: b'+', ..self }
    }

    /// Whether a text has nothing to decode.
    fn is_plain(text: &[u8]) -> bool {
        !text.iter().any(|byte| matches!(byte, b'%' | b'+'))
    }
}

impl Iterator for PercentDecoder<'_> {
    type Item = Result<u8, InvalidEscape>;

    fn next(&mut self) -> Option<Result<u8, InvalidEscape>> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        match (first, rest) {
            (b'+', _) => Some(Ok(self.plus)),
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
    use http::HeaderValue;

    #[test]
    fn every_escape_is_one_byte() {
        let decoded = |text: &str| PercentDecoder::new(text.as_bytes()).collect::<Result<Vec<u8>, InvalidEscape>>();
        assert_eq!(decoded("a%20b+c%2bd%C3%A9"), Ok("a b c+d\u{e9}".as_bytes().to_vec()));
        assert_eq!(decoded("%00%ff"), Ok(vec![0, 255]));
        // A decoded `%` starts no escape.
        assert_eq!(decoded("%2541"), Ok(b"%41".to_vec()));
        for text in ["%", "a%2", "%2", "%zz", "%4g", "%%41", "%+1", "% 1"] {
            assert_eq!(decoded(text), Err(InvalidEscape), "{text}");
        }
    }

    /// The query parameter `token`.
    fn token(query: &str) -> Result<Option<String>, InvalidEscape> {
        Ok(match query_parameter(query, "token")? {
            Occurrence::Absent => None,
            Occurrence::Single(value) => Some(String::from_utf8(value.into_owned()).unwrap()),
            Occurrence::Repeated => Some("repeated".to_owned()),
        })
    }

    #[test]
    fn all_encodings_of_a_query_value_are_equal() {
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
    fn a_plain_query_value_is_not_copied() {
        assert!(matches!(query_parameter("a=%20&token=abc", "token"), Ok(Occurrence::Single(Cow::Borrowed(b"abc")))));
    }

    #[test]
    fn an_absent_or_empty_query_value_is_absent() {
        for query in ["", "token", "token=", "tokens=a", "toke=a", "a=token", "a;b=token"] {
            assert_eq!(token(query), Ok(None), "{query}");
        }
    }

    #[test]
    fn an_empty_query_value_differs_from_an_absent_one() {
        let single = |value: &'static [u8]| Ok(Occurrence::Single(Cow::Borrowed(value)));
        for (query, expected) in [
            ("", Ok(Occurrence::Absent)),
            ("tokens", Ok(Occurrence::Absent)),
            ("token", single(b"")),
            ("a&token=", single(b"")),
            ("token=a", single(b"a")),
            ("token&token", Ok(Occurrence::Repeated)),
            ("Token=a", Ok(Occurrence::Repeated)),
            ("token=%", Err(InvalidEscape)),
        ] {
            assert_eq!(query_parameter_or_empty(query, "token"), expected, "{query}");
        }
        for (query, expected) in
            [("token&tok%65n=a", true), ("Token=a", false), ("a=token", false), ("%zz&token", true)]
        {
            assert_eq!(has_query_parameter(query, "token"), expected, "{query}");
        }
    }

    #[test]
    fn a_query_parameter_given_twice_is_repeated() {
        for query in ["token=a&token=b", "token=a&token=a", "token&token=a", "token=a&%74oken=b", "token=&x&token="] {
            assert_eq!(token(query), Ok(Some("repeated".to_owned())), "{query}");
        }
    }

    /// PHP, Rack and Express read these as the parameter itself.
    #[test]
    fn a_list_of_the_name_is_repeated() {
        for query in ["token[]=a", "token[0]=a", "token%5B%5D=a", "token=a&token[x]=b", "x=1;token[]=a", "TOKEN[a"] {
            assert_eq!(token(query), Ok(Some("repeated".to_owned())), "{query}");
        }
        for query in ["tokens[]=1&token=a", "x[token]=1&token=a", "[token]=1&token=a"] {
            assert_eq!(token(query), Ok(Some("a".to_owned())), "{query}");
        }
        let single = Ok(Occurrence::Single(Cow::Borrowed(&b"a"[..])));
        assert_eq!(query_parameter("filter[id]=1&filter[user]=a", "filter[user]"), single);
    }

    #[test]
    fn a_query_that_semicolons_change_is_repeated() {
        for query in ["token=a;b", "token=a;", "a;token=b", "x=1;token=b&token=a", "token=a&x=1;%74oken=b", "token;x=a"]
        {
            assert_eq!(token(query), Ok(Some("repeated".to_owned())), "{query}");
        }
        for query in ["x=1;y&token=a", "token=a&;;", "tokens=1;2&token=a", "token=a&x=;%zz"] {
            assert_eq!(token(query), Ok(Some("a".to_owned())), "{query}");
        }
        assert_eq!(token("token=a%3Bb"), Ok(Some("a;b".to_owned())));
    }

    #[test]
    fn an_invalid_escape_is_an_error() {
        for query in ["token=%", "token=%zz", "token=a%2", "%zz=1&token=a", "token=a&%=", "token%=a"] {
            assert_eq!(token(query), Err(InvalidEscape), "{query}");
        }
        // The value of another parameter is not decoded.
        assert_eq!(token("discount=50%&token=a"), Ok(Some("a".to_owned())));
    }

    /// The cookie `session`.
    fn session(fields: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.append("cookie", HeaderValue::from_bytes(field.as_bytes()).unwrap());
        }
        match cookie(&headers, "session") {
            Occurrence::Absent => None,
            Occurrence::Single(value) => Some(String::from_utf8(value.into_owned()).unwrap()),
            Occurrence::Repeated => Some("repeated".to_owned()),
        }
    }

    #[test]
    fn a_cookie_is_found_at_every_position() {
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
        assert_eq!(session(&["session=%zz%61"]).as_deref(), Some("%zz%61"), "an invalid escape");
        assert_eq!(session(&["session=\"abc"]).as_deref(), Some("\"abc"));
        assert_eq!(session(&["session=\""]).as_deref(), Some("\""));
    }

    #[test]
    fn a_plain_cookie_is_not_copied() {
        let mut headers = HeaderMap::new();
        headers.insert("cookie", HeaderValue::from_static("a=%20; session=\"abc\""));
        assert_eq!(cookie(&headers, "session"), Occurrence::Single(Cow::Borrowed(b"abc")));
        assert!(matches!(cookie(&headers, "session"), Occurrence::Single(Cow::Borrowed(_))));
    }

    #[test]
    fn an_absent_or_empty_cookie_is_absent() {
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
    fn a_cookie_given_twice_is_repeated() {
        for fields in [
            &["session=a; session=b"][..],
            &["session=a; session=a"],
            &["session=a", "session=b"],
            &["session; session=a"],
            &["%73ession=a"],
            &["session=a; %73ession=b"],
            &["session[]=a; session=b"],
        ] {
            assert_eq!(session(fields).as_deref(), Some("repeated"), "{fields:?}");
        }
    }

    /// The bearer token in `Authorization` fields.
    fn bearer(fields: &[&'static str]) -> Result<Option<String>, DuplicateAuthorization> {
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.append("authorization", HeaderValue::from_static(field));
        }
        bearer_token(&headers).map(|token| token.map(|token| String::from_utf8(token.to_vec()).unwrap()))
    }

    /// `YWxpY2U6c2VjcmV0` is `alice:secret`.
    #[test]
    fn the_user_is_the_part_before_the_first_colon() {
        let user = |field: &'static str| {
            let mut headers = HeaderMap::new();
            headers.append("authorization", HeaderValue::from_static(field));
            basic_user(&headers).map(|user| user.map(|user| String::from_utf8(user).unwrap()))
        };
        // The last two have other trailing bits, and no padding.
        for field in
            ["Basic YWxpY2U6c2VjcmV0", "basic  YWxpY2U6c2U6dA==", "Basic YWxpY2U6c2U6dB==", "Basic YWxpY2U6c2U6dA"]
        {
            assert_eq!(user(field), Ok(Some("alice".to_owned())), "{field}");
        }
        for field in ["Basic", "Basic YWxpY2U=", "Basic OnNlY3JldA==", "Bearer YWxpY2U6c2VjcmV0"] {
            assert_eq!(user(field), Ok(None), "{field}");
        }
        for field in ["Basic !", "Basic YWxp!Y2U6c2VjcmV0", "Basic YWxp Y2U6c2VjcmV0", "Basic YWxpY2U6c2VjcmV0=="] {
            assert_eq!(user(field), Err(CredentialsError::Malformed), "{field}");
        }
    }

    #[test]
    fn the_scheme_is_case_insensitive() {
        for field in ["Bearer abc", "bearer abc", "BEARER  abc ", "Bearer\tabc"] {
            assert_eq!(bearer(&[field]), Ok(Some("abc".to_owned())), "{field}");
        }
    }

    #[test]
    fn another_scheme_has_no_token_but_bearer_has_an_empty_one() {
        for field in ["", "Basic abc", "Bearerabc", "DPoP abc", "abc"] {
            assert_eq!(bearer(&[field]), Ok(None), "{field}");
        }
        assert_eq!(bearer(&[]), Ok(None));
        // An empty token is malformed, not absent.
        assert_eq!(bearer(&["Bearer"]), Ok(Some(String::new())));
        assert_eq!(bearer(&["Bearer a b"]), Ok(Some("a b".to_owned())));
    }

    #[test]
    fn two_authorization_fields_are_an_error() {
        assert_eq!(bearer(&["Bearer abc", "Bearer abc"]), Err(DuplicateAuthorization));
        assert_eq!(bearer(&["Basic abc", "Bearer abc"]), Err(DuplicateAuthorization));
    }

    #[test]
    fn values_that_other_servers_find_are_repeated() {
        for query in [
            "api.key=a&api_key=b",
            "api.key=a",
            "api+key=a",
            "%20api_key=a",
            "API_KEY=a&api_key=b",
            "API_KEY=a",
            "api%5Bkey=a",
            "api_key%00x=a&api_key=b",
            "a=1;Api_Key=2",
        ] {
            assert_eq!(query_parameter(query, "api_key"), Ok(Occurrence::Repeated), "{query}");
        }
        for query in ["api_key=a.b", "apikey=1&api_key=a.b", "api_key=a.b&api_keys=2&api-key=3"] {
            assert_eq!(query_parameter(query, "api_key"), Ok(Occurrence::Single(Cow::Borrowed(b"a.b"))), "{query}");
        }
        assert_eq!(query_parameter("filter[user]=a", "filter[user]"), Ok(Occurrence::Single(Cow::Borrowed(b"a"))));
        let of = |text: &'static str| HeaderMap::from_iter([(header::COOKIE, HeaderValue::from_static(text))]);
        for text in
            ["session=a; x=y session=b", "session=a,session=b", "x=y\tsession=a; session=b", "session=a session=b"]
        {
            assert_eq!(cookie(&of(text), "session"), Occurrence::Repeated, "{text}");
        }
        for (text, value) in [("session=a b", "a b"), ("x=session; session=a+b", "a+b"), ("session=a%2Bb", "a+b")] {
            assert_eq!(cookie(&of(text), "session"), Occurrence::Single(Cow::Borrowed(value.as_bytes())), "{text}");
        }
    }
}
