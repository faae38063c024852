//! A set of keys as issuers publish it: a JSON Web Key Set (RFC 7517).
//!
//! Keys that are for something else, or of a kind that is not known here, are passed over, as
//! section 5 asks; a key that is meant for us and is broken is not.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::verification_key::{Algorithm, InvalidKey, VerificationKey};

/// Why a file is no set of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JwksError {
    /// No JSON, at a line and a column.
    Json(usize, usize),
    /// No list `keys`.
    NoKeys,
    /// None of its keys is for us.
    NoUsableKey,
    /// One is broken: its position from 1.
    BadKey(usize, InvalidKey),
}

/// The keys of a set, with the algorithms that they are for.
pub fn parse(text: &[u8]) -> Result<Vec<VerificationKey>, JwksError> {
    let set: Value = serde_json::from_slice(text).map_err(|error| JwksError::Json(error.line(), error.column()))?;
    let Some(Value::Array(members)) = set.get("keys") else { return Err(JwksError::NoKeys) };
    let mut keys = Vec::new();
    for (i, member) in members.iter().enumerate() {
        let Value::Object(member) = member else { continue };
        if let Some(read) = parse_key(member) {
            keys.push(read.map_err(|flaw| JwksError::BadKey(i + 1, flaw))?);
        }
    }
    if keys.is_empty() { Err(JwksError::NoUsableKey) } else { Ok(keys) }
}

/// One key; `None` if it is not for verifying, or not with what is known here.
fn parse_key(member: &Map<String, Value>) -> Option<Result<VerificationKey, InvalidKey>> {
    let text = |name: &str| member.get(name).and_then(Value::as_str);
    let algorithm = match (text("kty")?, text("crv")) {
        ("oct", _) => Algorithm::Hs256,
        ("RSA", _) => Algorithm::Rs256,
        ("EC", Some("P-256")) => Algorithm::Es256,
        ("OKP", Some("Ed25519")) => Algorithm::EdDsa,
        _ => return None,
    };
    let for_another = text("alg").is_some_and(|named| named != algorithm.name());
    let for_encryption = text("use").is_some_and(|named| named != "sig");
    let operations = member.get("key_ops").and_then(Value::as_array);
    let for_no_verifying = operations.is_some_and(|all| !all.iter().any(|one| one == "verify"));
    if for_another || for_encryption || for_no_verifying {
        return None;
    }
    let kid = text("kid").map(str::to_owned);
    let bytes = |name: &str| {
        let encoded = text(name).ok_or(InvalidKey::WrongKind(algorithm))?;
        URL_SAFE_NO_PAD.decode(encoded).map_err(|_invalid| InvalidKey::WrongKind(algorithm))
    };
    Some(match algorithm {
        Algorithm::Hs256 => bytes("k").and_then(|secret| VerificationKey::from_secret(&secret, kid)),
        Algorithm::Rs256 => bytes("n").and_then(|n| VerificationKey::from_rsa(&n, &bytes("e")?, kid)),
        Algorithm::Es256 => {
            bytes("x").and_then(|x| VerificationKey::from_public_bytes(algorithm, &point(&x, &bytes("y")?), kid))
        }
        Algorithm::EdDsa => bytes("x").and_then(|x| VerificationKey::from_public_bytes(algorithm, &x, kid)),
    })
}

/// A point of a curve, uncompressed (SEC 1, section 2.3.3).
fn point(x: &[u8], y: &[u8]) -> Vec<u8> {
    [&[4], x, y].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWY";

    #[test]
    fn keys_for_something_else_are_passed_over() {
        let good = format!(r#"{{"kty": "oct", "k": "{SECRET}"}}"#);
        let others = r#"{"kty": "RSA", "use": "enc", "n": "AQAB", "e": "AQAB"}, {"kty": "RSA", "alg": "PS256"}, {"kty": "EC", "crv": "P-521"},
            {"kty": "OKP", "crv": "X25519", "x": ""}, {"kty": "new"}, {"k": 1}, 7, {"kty": "oct", "key_ops": ["sign"]}"#;
        assert_eq!(parse(format!(r#"{{"keys": [{others}, {good}]}}"#).as_bytes()).unwrap().len(), 1);
        assert_eq!(parse(format!(r#"{{"keys": [{others}]}}"#).as_bytes()), Err(JwksError::NoUsableKey));
    }

    #[test]
    fn a_key_for_us_that_is_broken_is_said() {
        for (member, flaw) in [
            (r#"{"kty": "oct"}"#, InvalidKey::WrongKind(Algorithm::Hs256)),
            (r#"{"kty": "oct", "k": "c2hvcnQ"}"#, InvalidKey::ShortSecret(5)),
            (r#"{"kty": "oct", "k": "+/+/"}"#, InvalidKey::WrongKind(Algorithm::Hs256)),
            (r#"{"kty": "RSA", "n": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::Rs256)),
            (r#"{"kty": "RSA", "n": "", "e": ""}"#, InvalidKey::WrongKind(Algorithm::Rs256)),
            (r#"{"kty": "EC", "crv": "P-256", "x": "AQAB", "y": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::Es256)),
            (r#"{"kty": "OKP", "crv": "Ed25519", "x": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::EdDsa)),
        ] {
            let set = format!(r#"{{"keys": [{{"kty": "new"}}, {member}]}}"#);
            assert_eq!(parse(set.as_bytes()), Err(JwksError::BadKey(2, flaw)), "{member}");
        }
        // On no curve.
        let point = format!(r#"{{"keys": [{{"kty": "EC", "crv": "P-256", "x": "{SECRET}", "y": "{SECRET}"}}]}}"#);
        assert_eq!(parse(point.as_bytes()), Err(JwksError::BadKey(1, InvalidKey::WrongKind(Algorithm::Es256))));
    }

    #[test]
    fn what_is_no_set_is_said() {
        assert_eq!(parse(b"{\n  keys"), Err(JwksError::Json(2, 3)));
        assert_eq!(parse(b""), Err(JwksError::Json(1, 0)));
        for text in ["[]", "{}", r#"{"keys": {}}"#, "7"] {
            assert_eq!(parse(text.as_bytes()), Err(JwksError::NoKeys), "{text}");
        }
    }
}
