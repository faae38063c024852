//! What a token says (RFC 7519, section 4), once it is known who signed it.

use serde_json::{Map, Value};

use super::{Lifetime, TokenError, TokenVerifier, jws};

/// Integers beyond are not the same to everybody who reads JSON (RFC 7493, section 2.2).
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

pub struct Claims(Map<String, Value>);

impl Claims {
    /// Reads a payload, as it is encoded in a token.
    pub fn parse(payload: &[u8]) -> Result<Claims, TokenError> {
        jws::decode_object(payload).map(Claims)
    }

    /// When the token is valid, if it is valid at a time (Unix milliseconds) and from and for the right ones.
    pub fn check(&self, trust: &TokenVerifier, now_ms: u64) -> Result<Lifetime, TokenError> {
        let begins_ms = self.date_ms("nbf")?.map_or(0, |begins_ms| begins_ms.saturating_sub(trust.leeway_ms));
        let ends_ms = self.date_ms("exp")?.map(|ends_ms| ends_ms.saturating_add(trust.leeway_ms));
        let lifetime = Lifetime { begins_ms, ends_ms };
        lifetime.check(now_ms)?;
        if !trust.issuers.is_empty() && !self.claim_is_one_of("iss", &trust.issuers) {
            return Err(TokenError::Issuer);
        }
        if !trust.audiences.is_empty() && !self.claim_is_one_of("aud", &trust.audiences) {
            return Err(TokenError::Audience);
        }
        Ok(lifetime)
    }

    /// A claim's value as text; `None` if there is none that could tell callers apart. The name is
    /// that of a claim, or, with dots, of a claim within claims.
    pub fn text(&self, name: &str) -> Option<String> {
        let value = match self.0.get(name) {
            Some(value) => Some(value),
            None => {
                let mut names = name.split('.');
                let first = names.next().and_then(|name| self.0.get(name));
                names.fold(first, |value, name| value.and_then(|value| value.get(name)))
            }
        };
        match value? {
            Value::String(text) if !text.is_empty() => Some(text.clone()),
            Value::Number(number) => {
                let exact = !number.is_f64() || number.as_f64().is_some_and(|number| number.abs() < EXACT_MAX);
                exact.then(|| number.to_string())
            }
            Value::Bool(truth) => Some(truth.to_string()),
            Value::String(_) | Value::Null | Value::Array(_) | Value::Object(_) => None,
        }
    }

    /// A NumericDate: seconds since the epoch, with a fraction or without.
    fn date_ms(&self, name: &str) -> Result<Option<u64>, TokenError> {
        match self.0.get(name) {
            None => Ok(None),
            // What lies before the epoch, or past the end of time, is as good as those two.
            Some(value) => value.as_f64().map(|seconds| Some((seconds * 1e3) as u64)).ok_or(TokenError::Malformed),
        }
    }

    /// Whether a claim is one of these names, or a list with one of them.
    fn claim_is_one_of(&self, claim: &str, wanted: &[String]) -> bool {
        let is_wanted = |value: &Value| value.as_str().is_some_and(|name| wanted.iter().any(|one| one == name));
        match (self.0.get(claim), claim) {
            (Some(Value::Array(all)), "aud") => all.iter().any(is_wanted),
            (Some(value), _) => is_wanted(value),
            (None, _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn claims(value: Value) -> Claims {
        let Value::Object(claims) = value else { panic!() };
        Claims(claims)
    }

    fn check(value: Value, trust: &TokenVerifier, now_ms: u64) -> Result<(), TokenError> {
        claims(value).check(trust, now_ms).map(drop)
    }

    #[test]
    fn a_token_is_valid_from_nbf_until_exp() {
        let trust = TokenVerifier::default();
        let times = json!({ "nbf": 1000, "exp": 2000 });
        for (now_ms, found) in [
            (999_999, Err(TokenError::NotYetValid)),
            (1_000_000, Ok(())),
            (1_999_999, Ok(())),
            (2_000_000, Err(TokenError::Expired)),
        ] {
            assert_eq!(check(times.clone(), &trust, now_ms), found, "{now_ms}");
        }
        let lenient = TokenVerifier { leeway_ms: 5000, ..TokenVerifier::default() };
        for (now_ms, found) in [
            (994_999, Err(TokenError::NotYetValid)),
            (995_000, Ok(())),
            (2_004_999, Ok(())),
            (2_005_000, Err(TokenError::Expired)),
        ] {
            assert_eq!(check(times.clone(), &lenient, now_ms), found, "{now_ms}");
        }
        assert_eq!(check(json!({ "exp": 1.5 }), &trust, 1499), Ok(()));
        assert_eq!(check(json!({ "exp": 1.5 }), &trust, 1500), Err(TokenError::Expired));
        assert_eq!(check(json!({}), &trust, u64::MAX), Ok(()));
        assert_eq!(check(json!({ "exp": 1e300, "nbf": -1e300 }), &trust, 0), Ok(()));
        assert_eq!(check(json!({ "exp": -1 }), &trust, 0), Err(TokenError::Expired));
    }

    #[test]
    fn a_time_that_is_none_is_not_passed_over() {
        for value in [json!("2000"), json!(null), json!([2000]), json!(true)] {
            for name in ["exp", "nbf"] {
                assert_eq!(
                    check(json!({ name: value }), &TokenVerifier::default(), 1),
                    Err(TokenError::Malformed),
                    "{value}"
                );
            }
        }
    }

    #[test]
    fn issuer_and_audience_must_be_named_where_they_are_asked_for() {
        let both = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let issued = TokenVerifier { issuers: both(&["a", "b"]), ..TokenVerifier::default() };
        for (token, found) in [
            (json!({ "iss": "a" }), Ok(())),
            (json!({ "iss": "b" }), Ok(())),
            (json!({ "iss": "A" }), Err(TokenError::Issuer)),
            (json!({ "iss": ["a"] }), Err(TokenError::Issuer)),
            (json!({ "aud": "a" }), Err(TokenError::Issuer)),
        ] {
            assert_eq!(check(token, &issued, 0), found);
        }
        let meant = TokenVerifier { audiences: both(&["a", "b"]), ..TokenVerifier::default() };
        for (token, found) in [
            (json!({ "aud": "a" }), Ok(())),
            (json!({ "aud": ["x", "b"] }), Ok(())),
            (json!({ "aud": ["x"] }), Err(TokenError::Audience)),
            (json!({ "aud": [] }), Err(TokenError::Audience)),
            (json!({ "aud": 1 }), Err(TokenError::Audience)),
            (json!({}), Err(TokenError::Audience)),
        ] {
            assert_eq!(check(token, &meant, 0), found);
        }
    }

    #[test]
    fn texts_numbers_and_truths_are_values() {
        let token = claims(json!({
            "sub": "alice", "uid": 42, "negative": -1, "half": 0.5, "admin": true, "none": null, "empty": "",
            "list": ["a"], "huge": 1e20, "largest": u64::MAX,
            "realm": { "id": "r1", "deep": { "er": 7 } }, "realm.id": "literal", "https://example.com/plan": "gold",
        }));
        for (name, value) in [
            ("sub", Some("alice")),
            ("uid", Some("42")),
            ("negative", Some("-1")),
            ("half", Some("0.5")),
            ("admin", Some("true")),
            ("largest", Some("18446744073709551615")),
            ("realm.deep.er", Some("7")),
            ("realm.id", Some("literal")),
            ("https://example.com/plan", Some("gold")),
            ("none", None),
            ("empty", None),
            ("list", None),
            ("list.0", None),
            ("huge", None),
            ("realm", None),
            ("realm.missing.er", None),
            ("Sub", None),
        ] {
            assert_eq!(token.text(name).as_deref(), value, "{name}");
        }
    }
}
