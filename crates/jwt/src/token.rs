//! The verification of a signed JSON Web Token: its compact form (RFC 7515), the signature, and the claims (RFC 7519).
//!
//! The header of a token is not trusted: its algorithm and key id only select among the configured keys, each of which
//! has one algorithm. The payload is parsed after the signature is verified.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::verification_key::VerificationKey;

/// Most keys that the signature of one token is verified with. Each verification costs 20 to 60 µs, whereas sending a token
/// costs the client nothing.
pub const KEYS_TRIED_MAX: usize = 4;

/// The keys, issuers and audiences of trusted tokens. Without keys, no token is trusted.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TokenVerifier {
    pub keys: Vec<VerificationKey>,
    /// Accepted issuers (`iss`); empty: any issuer.
    pub issuers: Vec<String>,
    /// Accepted audiences (`aud`); empty: any audience.
    pub audiences: Vec<String>,
    /// Tolerated difference between the clocks of the issuer and of the gateway.
    pub leeway_ms: u64,
}

/// Why a token is rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenError {
    Malformed,
    /// The header has `crit`: it requires an extension, and none is supported.
    CriticalExtension,
    /// No key has the algorithm and the key id of the token.
    UnknownKey,
    /// More than [`KEYS_TRIED_MAX`] keys match, because the token has no key id.
    AmbiguousKey,
    Signature,
    Expired,
    NotYetValid,
    Issuer,
    Audience,
    /// No configured key verifies it, and the key set of the issuer was not fetched yet, or too long ago.
    KeysUnavailable,
}

impl TokenError {
    /// The reason, for the client.
    pub fn reason(self) -> &'static str {
        match self {
            TokenError::Malformed => "the token is malformed",
            TokenError::CriticalExtension => "the token needs an extension that is not known here",
            TokenError::UnknownKey => "the token is not signed with a key and an algorithm that are trusted here",
            TokenError::AmbiguousKey => "the token does not say by `kid` which of many keys it is signed with",
            TokenError::Signature => "the token's signature is not valid",
            TokenError::Expired => "the token has expired",
            TokenError::NotYetValid => "the token is not valid yet",
            TokenError::Issuer => "the token's issuer is not trusted here",
            TokenError::Audience => "the token is meant for another audience",
            TokenError::KeysUnavailable => "the keys that verify tokens are not available at the moment",
        }
    }
}

/// The time in which a token is valid, including the leeway; Unix milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lifetime {
    pub begins_ms: u64,
    /// The first moment at which the token is no longer valid; `None`: it does not expire.
    pub ends_ms: Option<u64>,
}

impl Lifetime {
    pub fn check(self, now_ms: u64) -> Result<(), TokenError> {
        if self.ends_ms.is_some_and(|ends_ms| now_ms >= ends_ms) {
            return Err(TokenError::Expired);
        }
        if now_ms < self.begins_ms {
            return Err(TokenError::NotYetValid);
        }
        Ok(())
    }
}

impl TokenVerifier {
    /// Verifies a token at the time `now_ms` (Unix milliseconds); returns its claims and lifetime.
    pub fn verify(&self, token: &[u8], now_ms: u64) -> Result<(Claims, Lifetime), TokenError> {
        let jws = Jws::parse(token)?;
        let candidates = || self.keys.iter().filter(|key| jws.may_be_signed_by(key));
        match candidates().take(KEYS_TRIED_MAX + 1).count() {
            0 => return Err(TokenError::UnknownKey),
            1..=KEYS_TRIED_MAX => {}
            _ => return Err(TokenError::AmbiguousKey),
        }
        if !candidates().any(|key| key.verifies(jws.signing_input, &jws.signature)) {
            return Err(TokenError::Signature);
        }
        let claims = Claims::parse(jws.payload)?;
        let lifetime = claims.check(self, now_ms)?;
        Ok((claims, lifetime))
    }
}

/// The parts of a token in compact form. Base64url is decoded strictly, without padding and unused bits, so that a token has
/// exactly one encoding.
struct Jws<'t> {
    /// As in the header; only selects a key.
    algorithm: String,
    kid: Option<String>,
    /// The encoded header and payload: the bytes that are signed.
    signing_input: &'t [u8],
    /// Base64url.
    payload: &'t [u8],
    signature: Vec<u8>,
}

impl<'t> Jws<'t> {
    fn parse(token: &'t [u8]) -> Result<Jws<'t>, TokenError> {
        let mut parts = token.splitn(4, |byte| *byte == b'.');
        // An encrypted token has five parts.
        let (Some(header), Some(payload), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        let signing_input = &token[..header.len() + 1 + payload.len()];
        let header = decode_object(header)?;
        // RFC 7515, section 4.1.11: a critical extension must be understood, and none is supported.
        if header.contains_key("crit") {
            return Err(TokenError::CriticalExtension);
        }
        let Some(Value::String(algorithm)) = header.get("alg") else { return Err(TokenError::Malformed) };
        let kid = match header.get("kid") {
            None => None,
            Some(Value::String(kid)) => Some(kid.clone()),
            Some(_) => return Err(TokenError::Malformed),
        };
        Ok(Jws { algorithm: algorithm.clone(), kid, signing_input, payload, signature: decode(signature)? })
    }

    /// Whether the algorithms are equal, and the key ids where both have one.
    fn may_be_signed_by(&self, key: &VerificationKey) -> bool {
        let same_id = match (&self.kid, &key.kid) {
            (Some(kid), Some(key_kid)) => kid == key_kid,
            (None, _) | (_, None) => true,
        };
        same_id && key.algorithm.name() == self.algorithm
    }
}

/// Whether a text may be a token in compact form: three parts, of which the first begins as a JSON object in base64url does. An
/// API key can have this form too.
pub fn may_be_token(text: &[u8]) -> bool {
    // The bits of `{`, and of the two bits that begin any ASCII character.
    let begins = matches!(text, [b'e', b'w'..=b'z' | b'0'..=b'9' | b'-' | b'_', ..]);
    begins && text.iter().filter(|byte| **byte == b'.').count() == 2
}

/// Decodes a part of a token that is a JSON object.
fn decode_object(part: &[u8]) -> Result<Map<String, Value>, TokenError> {
    match serde_json::from_slice(&decode(part)?) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) | Err(_) => Err(TokenError::Malformed),
    }
}

fn decode(part: &[u8]) -> Result<Vec<u8>, TokenError> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_invalid| TokenError::Malformed)
}

/// JSON parsers may round integers beyond this (RFC 7493, section 2.2).
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// The claims of a verified token (RFC 7519, section 4).
pub struct Claims(Map<String, Value>);

impl Claims {
    /// Decodes the payload of a token.
    fn parse(payload: &[u8]) -> Result<Claims, TokenError> {
        decode_object(payload).map(Claims)
    }

    /// Checks lifetime, issuer and audience at the time `now_ms` (Unix milliseconds); returns the lifetime.
    fn check(&self, verifier: &TokenVerifier, now_ms: u64) -> Result<Lifetime, TokenError> {
        let begins_ms = self.date_ms("nbf")?.map_or(0, |begins_ms| begins_ms.saturating_sub(verifier.leeway_ms));
        let ends_ms = self.date_ms("exp")?.map(|ends_ms| ends_ms.saturating_add(verifier.leeway_ms));
        let lifetime = Lifetime { begins_ms, ends_ms };
        lifetime.check(now_ms)?;
        if !verifier.issuers.is_empty() && !self.claim_is_one_of("iss", &verifier.issuers) {
            return Err(TokenError::Issuer);
        }
        if !verifier.audiences.is_empty() && !self.claim_is_one_of("aud", &verifier.audiences) {
            return Err(TokenError::Audience);
        }
        Ok(lifetime)
    }

    /// The value of a claim as text; `None` if the claim is missing, empty, or neither string, number nor boolean. A name
    /// with dots is looked up as a claim first, then as a path of nested objects.
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
            Value::Bool(flag) => Some(flag.to_string()),
            Value::String(_) | Value::Null | Value::Array(_) | Value::Object(_) => None,
        }
    }

    /// A NumericDate (seconds since the epoch, possibly with a fraction) in milliseconds.
    fn date_ms(&self, name: &str) -> Result<Option<u64>, TokenError> {
        match self.0.get(name) {
            None => Ok(None),
            // The cast saturates: times before the epoch become 0, times beyond the range its end.
            Some(value) => value.as_f64().map(|seconds| Some((seconds * 1e3) as u64)).ok_or(TokenError::Malformed),
        }
    }

    /// Whether a claim is one of `wanted`; `aud` may also be a list that has one of them.
    fn claim_is_one_of(&self, claim: &str, wanted: &[String]) -> bool {
        let is_wanted =
            |value: &Value| value.as_str().is_some_and(|name| wanted.iter().any(|accepted| accepted == name));
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
    use crate::jwks;
    use serde_json::json;

    /// The keys of RFC 7515, appendix A.1 to A.3, and of RFC 8037, appendix A.
    const KEYS: &str = r#"{"keys": [
        {"kty": "oct", "kid": "a1", "k": "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"},
        {"kty": "RSA", "kid": "a2", "use": "sig", "e": "AQAB",
         "n": "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ"},
        {"kty": "EC", "kid": "a3", "crv": "P-256", "alg": "ES256",
         "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"},
        {"kty": "OKP", "kid": "ed", "crv": "Ed25519", "key_ops": ["verify"],
         "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}
    ]}"#;

    const PAYLOAD: &str =
        "eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ";

    /// The headers and signatures of the RFC's tokens with that payload.
    const TOKENS: [(&str, &str); 3] = [
        ("eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9", "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"),
        (
            "eyJhbGciOiJSUzI1NiJ9",
            "cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw",
        ),
        (
            "eyJhbGciOiJFUzI1NiJ9",
            "DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q",
        ),
    ];

    /// Before the tokens expire.
    const NOW_MS: u64 = 1_300_000_000_000;

    fn verifier() -> TokenVerifier {
        TokenVerifier { keys: jwks::parse(KEYS.as_bytes()).unwrap(), ..TokenVerifier::default() }
    }

    fn verify(token: &str) -> Result<Option<String>, TokenError> {
        verifier().verify(token.as_bytes(), NOW_MS).map(|(claims, _)| claims.text("iss"))
    }

    #[test]
    fn the_example_tokens_of_the_rfcs_are_valid() {
        for (header, signature) in TOKENS {
            let token = format!("{header}.{PAYLOAD}.{signature}");
            assert_eq!(verify(&token), Ok(Some("joe".to_owned())), "{header}");
            let expired = verifier().verify(token.as_bytes(), 1_300_819_380_000);
            assert_eq!(expired.map(|_| ()), Err(TokenError::Expired));
        }
        // The signature is valid, but the payload has no claims.
        let signed = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc.hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg";
        assert_eq!(verify(signed), Err(TokenError::Malformed));
        assert_eq!(verify(&signed.replace("hgyY", "hgyZ")), Err(TokenError::Signature));
    }

    #[test]
    fn a_changed_token_is_rejected() {
        let other = URL_SAFE_NO_PAD.encode(r#"{"iss":"eve"}"#);
        for (header, signature) in TOKENS {
            assert_eq!(verify(&format!("{header}.{other}.{signature}")), Err(TokenError::Signature));
            assert_eq!(verify(&format!("{header}.{PAYLOAD}.")), Err(TokenError::Signature));
            let (head, tail) = signature.split_at(8);
            let changed = format!("{}{tail}", head.chars().rev().collect::<String>());
            assert_eq!(verify(&format!("{header}.{PAYLOAD}.{changed}")), Err(TokenError::Signature));
            for (foreign, _) in TOKENS.iter().filter(|(foreign, _)| *foreign != header) {
                assert_eq!(verify(&format!("{foreign}.{PAYLOAD}.{signature}")), Err(TokenError::Signature));
            }
        }
    }

    #[test]
    fn a_token_has_exactly_one_encoding() {
        for (header, signature) in TOKENS {
            let token = format!("{header}.{PAYLOAD}.{signature}");
            for at in 0..token.len() {
                for other in
                    ["", ".", "=", "A", "B", "_", "%", " "].into_iter().filter(|other| *other != &token[at..=at])
                {
                    let changed = format!("{}{other}{}", &token[..at], &token[at + 1..]);
                    assert!(verify(&changed).is_err(), "{changed}");
                }
            }
        }
    }

    #[test]
    fn an_algorithm_without_a_key_is_rejected() {
        for algorithm in ["none", "None", "", "hs256", "HS512", "RS512", "PS256", "ES384", "Ed25519"] {
            let header = URL_SAFE_NO_PAD.encode(format!(r#"{{"alg":"{algorithm}"}}"#));
            for signature in ["", TOKENS[0].1] {
                assert_eq!(
                    verify(&format!("{header}.{PAYLOAD}.{signature}")),
                    Err(TokenError::UnknownKey),
                    "{algorithm}"
                );
            }
        }
    }

    #[test]
    fn keys_are_selected_by_key_id() {
        let secret = jwks::parse(KEYS.as_bytes()).unwrap().remove(0);
        let mut unnamed = secret.clone();
        unnamed.kid = None;
        let sign = |kid: &str| {
            let header = URL_SAFE_NO_PAD.encode(format!(r#"{{"alg":"HS256","kid":"{kid}"}}"#));
            let signed = format!("{header}.{PAYLOAD}");
            let secret = URL_SAFE_NO_PAD
                .decode("AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow")
                .unwrap();
            let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &secret);
            format!("{signed}.{}", URL_SAFE_NO_PAD.encode(aws_lc_rs::hmac::sign(&key, signed.as_bytes())))
        };
        let with = |key: &VerificationKey, kid| {
            TokenVerifier { keys: vec![key.clone()], ..TokenVerifier::default() }.verify(sign(kid).as_bytes(), NOW_MS)
        };
        assert!(with(&secret, "a1").is_ok());
        assert_eq!(with(&secret, "a2").map(|_| ()), Err(TokenError::UnknownKey));
        assert!(with(&unnamed, "a2").is_ok(), "a key without an id is tried for every token");
    }

    #[test]
    fn no_token_is_trusted_without_keys() {
        let token = format!("{}.{PAYLOAD}.{}", TOKENS[0].0, TOKENS[0].1);
        assert_eq!(TokenVerifier::default().verify(token.as_bytes(), NOW_MS).map(|_| ()), Err(TokenError::UnknownKey));
    }

    #[test]
    fn the_debug_output_of_a_key_does_not_contain_it() {
        let shown = format!("{:?}", verifier());
        assert!(shown.contains("Hs256") && shown.contains("a1"), "{shown}");
        let secret = URL_SAFE_NO_PAD
            .decode("AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow")
            .unwrap();
        for bytes in [&secret[..4], &secret[4..8]] {
            let decimal: Vec<String> = bytes.iter().map(u8::to_string).collect();
            assert!(!shown.contains(&decimal.join(", ")), "{shown}");
        }
    }

    fn parse_jws(token: &str) -> Result<(), TokenError> {
        Jws::parse(token.as_bytes()).map(|_| ())
    }

    fn with_header(header: &str) -> String {
        format!("{}.e30.c2ln", URL_SAFE_NO_PAD.encode(header))
    }

    #[test]
    fn bytes_that_are_not_a_token_are_malformed() {
        for token in ["", ".", "..", "...", "a.b.c", "e30.e30.", "e30.e30.c2ln", "e30.e30", "é.é.é"] {
            assert_eq!(parse_jws(token), Err(TokenError::Malformed), "{token}");
        }
        let good = with_header(r#"{"alg":"HS256"}"#);
        assert_eq!(parse_jws(&good), Ok(()));
        for token in [format!("{good}="), format!("{good}.x.y"), format!(" {good}"), good.replace(".e30.", ".e30.e30.")]
        {
            assert_eq!(parse_jws(&token), Err(TokenError::Malformed), "{token}");
        }
        for header in [r#"{"alg":1}"#, r#"{"alg":"HS256","kid":7}"#, r#"["alg"]"#, r#"{"alg":"HS256""#, "{}"] {
            assert_eq!(parse_jws(&with_header(header)), Err(TokenError::Malformed), "{header}");
        }
    }

    #[test]
    fn a_signature_has_exactly_one_encoding() {
        // `c2k` is `si`; the unused bits of its last letter must be zero.
        let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256"}"#);
        assert_eq!(parse_jws(&format!("{header}.e30.c2k")), Ok(()));
        assert_eq!(parse_jws(&format!("{header}.e30.c2l")), Err(TokenError::Malformed));
        assert_eq!(parse_jws(&format!("{header}.e30.c2k=")), Err(TokenError::Malformed));
        assert_eq!(parse_jws(&format!("{header}.e30.c+/k")), Err(TokenError::Malformed));
    }

    #[test]
    fn a_critical_extension_is_not_ignored() {
        let token = with_header(r#"{"alg":"HS256","b64":false,"crit":["b64"]}"#);
        assert_eq!(parse_jws(&token), Err(TokenError::CriticalExtension));
    }

    fn claims(value: Value) -> Claims {
        let Value::Object(claims) = value else { panic!() };
        Claims(claims)
    }

    fn check(value: Value, verifier: &TokenVerifier, now_ms: u64) -> Result<(), TokenError> {
        claims(value).check(verifier, now_ms).map(drop)
    }

    #[test]
    fn a_token_is_valid_from_nbf_until_exp() {
        let verifier = TokenVerifier::default();
        let times = json!({ "nbf": 1000, "exp": 2000 });
        for (now_ms, found) in [
            (999_999, Err(TokenError::NotYetValid)),
            (1_000_000, Ok(())),
            (1_999_999, Ok(())),
            (2_000_000, Err(TokenError::Expired)),
        ] {
            assert_eq!(check(times.clone(), &verifier, now_ms), found, "{now_ms}");
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
        assert_eq!(check(json!({ "exp": 1.5 }), &verifier, 1499), Ok(()));
        assert_eq!(check(json!({ "exp": 1.5 }), &verifier, 1500), Err(TokenError::Expired));
        assert_eq!(check(json!({}), &verifier, u64::MAX), Ok(()));
        assert_eq!(check(json!({ "exp": 1e300, "nbf": -1e300 }), &verifier, 0), Ok(()));
        assert_eq!(check(json!({ "exp": -1 }), &verifier, 0), Err(TokenError::Expired));
    }

    #[test]
    fn a_date_of_the_wrong_type_is_malformed() {
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
    fn issuer_and_audience_are_checked_where_configured() {
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
    fn strings_numbers_and_booleans_have_a_text() {
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
