//! Reads a JSON Web Key Set (RFC 7517), as issuers publish it.
//!
//! Keys for another use or of an unsupported kind are skipped, as section 5 requires; an invalid key of a supported kind is
//! an error.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::token::KEYS_TRIED_MAX;
use super::verification_key::{Algorithm, InvalidKey, VerificationKey};

/// Enough for the old and new keys of a few issuers.
pub const KEYS_MAX: usize = 32;

/// Why a file is not a usable key set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JwksError {
    /// Not JSON; with the line and column of the error.
    Json(usize, usize),
    /// There is no list `keys`.
    NoKeys,
    /// No key can verify tokens.
    NoUsableKey,
    /// A key is invalid; with its position, counted from 1.
    BadKey(usize, InvalidKey),
    /// More than [`KEYS_MAX`] keys can verify tokens.
    TooManyKeys,
    /// More than [`KEYS_TRIED_MAX`] keys may match one token.
    Ambiguous(Algorithm),
}

impl fmt::Display for JwksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JwksError::Json(line, column) => write!(f, "it is not JSON: line {line}, column {column}"),
            JwksError::NoKeys => f.write_str("it has no list `keys`"),
            JwksError::NoUsableKey => f.write_str("it has no public key for RS256, ES256 or EdDSA"),
            JwksError::BadKey(position, error) => f.write_str(&error.explain(&format!("key {position}")).0),
            JwksError::TooManyKeys => write!(f, "it has more than {KEYS_MAX} keys"),
            JwksError::Ambiguous(algorithm) => {
                let name = algorithm.name();
                write!(
                    f,
                    "more than {KEYS_TRIED_MAX} of its keys for {name} may match one token: they have no `kid` of their own"
                )
            }
        }
    }
}

/// Parses a key set; returns the keys that can verify tokens.
pub fn parse(text: &[u8]) -> Result<Vec<VerificationKey>, JwksError> {
    let set: Value = serde_json::from_slice(text).map_err(|error| JwksError::Json(error.line(), error.column()))?;
    let Some(Value::Array(members)) = set.get("keys") else { return Err(JwksError::NoKeys) };
    let mut keys = Vec::new();
    for (i, member) in members.iter().enumerate() {
        let Value::Object(member) = member else { continue };
        if let Some(read) = parse_key(member) {
            keys.push(read.map_err(|error| JwksError::BadKey(i + 1, error))?);
        }
    }
    if keys.is_empty() { Err(JwksError::NoUsableKey) } else { Ok(keys) }
}

/// Parses a key set that an issuer publishes. Keys that cannot be used are skipped, so that one of them does not disable
/// the others. Secrets are skipped too: what everyone can read signs no tokens. Equal keys count once.
pub fn parse_published(text: &[u8]) -> Result<Vec<VerificationKey>, JwksError> {
    let set: Value = serde_json::from_slice(text).map_err(|error| JwksError::Json(error.line(), error.column()))?;
    let Some(Value::Array(members)) = set.get("keys") else { return Err(JwksError::NoKeys) };
    let mut keys: Vec<VerificationKey> = Vec::new();
    let public = members.iter().filter_map(Value::as_object);
    for member in public.filter(|member| member.get("kty").is_some_and(|kind| kind != "oct")) {
        let Some(Ok(key)) = parse_key(member) else { continue };
        if keys.contains(&key) {
            continue;
        }
        if keys.len() == KEYS_MAX {
            return Err(JwksError::TooManyKeys);
        }
        keys.push(key);
    }
    let all: Vec<&VerificationKey> = keys.iter().collect();
    match ambiguous_algorithm(&all) {
        Some(algorithm) => Err(JwksError::Ambiguous(algorithm)),
        None if keys.is_empty() => Err(JwksError::NoUsableKey),
        None => Ok(keys),
    }
}

/// The algorithm of a key that more than `KEYS_TRIED_MAX` keys cannot be distinguished from, because they have the same
/// `kid` or one of the two has none.
pub fn ambiguous_algorithm(keys: &[&VerificationKey]) -> Option<Algorithm> {
    let alike = |key: &VerificationKey, other: &VerificationKey| {
        key.algorithm == other.algorithm && (key.kid.is_none() || other.kid.is_none() || key.kid == other.kid)
    };
    let is_crowded = |key: &&&VerificationKey| keys.iter().filter(|other| alike(key, other)).count() > KEYS_TRIED_MAX;
    keys.iter().find(is_crowded).map(|key| key.algorithm)
}

/// Parses one key; `None` if the key has another use or an unsupported kind.
fn parse_key(member: &Map<String, Value>) -> Option<Result<VerificationKey, InvalidKey>> {
    let text = |name: &str| member.get(name).and_then(Value::as_str);
    let algorithm = match (text("kty")?, text("crv")) {
        ("oct", _) => Algorithm::Hs256,
        ("RSA", _) => Algorithm::Rs256,
        ("EC", Some("P-256")) => Algorithm::Es256,
        ("OKP", Some("Ed25519")) => Algorithm::EdDsa,
        _ => return None,
    };
    let is_for_other_algorithm = text("alg").is_some_and(|named| named != algorithm.name());
    let is_for_encryption = text("use").is_some_and(|named| named != "sig");
    let operations = member.get("key_ops").and_then(Value::as_array);
    let cannot_verify = operations.is_some_and(|all| !all.iter().any(|operation| operation == "verify"));
    if is_for_other_algorithm || is_for_encryption || cannot_verify {
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
    fn keys_for_other_uses_are_skipped() {
        let good = format!(r#"{{"kty": "oct", "k": "{SECRET}"}}"#);
        let others = r#"{"kty": "RSA", "use": "enc", "n": "AQAB", "e": "AQAB"}, {"kty": "RSA", "alg": "PS256"}, {"kty": "EC", "crv": "P-521"},
            {"kty": "OKP", "crv": "X25519", "x": ""}, {"kty": "new"}, {"k": 1}, 7, {"kty": "oct", "key_ops": ["sign"]}"#;
        assert_eq!(parse(format!(r#"{{"keys": [{others}, {good}]}}"#).as_bytes()).unwrap().len(), 1);
        assert_eq!(parse(format!(r#"{{"keys": [{others}]}}"#).as_bytes()), Err(JwksError::NoUsableKey));
    }

    #[test]
    fn an_invalid_key_of_a_supported_kind_is_reported() {
        for (member, error) in [
            (r#"{"kty": "oct"}"#, InvalidKey::WrongKind(Algorithm::Hs256)),
            (r#"{"kty": "oct", "k": "c2hvcnQ"}"#, InvalidKey::ShortSecret(5)),
            (r#"{"kty": "oct", "k": "+/+/"}"#, InvalidKey::WrongKind(Algorithm::Hs256)),
            (r#"{"kty": "RSA", "n": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::Rs256)),
            (r#"{"kty": "RSA", "n": "", "e": ""}"#, InvalidKey::WrongKind(Algorithm::Rs256)),
            (r#"{"kty": "EC", "crv": "P-256", "x": "AQAB", "y": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::Es256)),
            (r#"{"kty": "OKP", "crv": "Ed25519", "x": "AQAB"}"#, InvalidKey::WrongKind(Algorithm::EdDsa)),
        ] {
            let set = format!(r#"{{"keys": [{{"kty": "new"}}, {member}]}}"#);
            assert_eq!(parse(set.as_bytes()), Err(JwksError::BadKey(2, error)), "{member}");
        }
        // A point that is not on the curve.
        let point = format!(r#"{{"keys": [{{"kty": "EC", "crv": "P-256", "x": "{SECRET}", "y": "{SECRET}"}}]}}"#);
        assert_eq!(parse(point.as_bytes()), Err(JwksError::BadKey(1, InvalidKey::WrongKind(Algorithm::Es256))));
    }

    /// An Ed25519 key, with the last byte given.
    fn ed25519(last: u8, more: &str) -> String {
        let x = URL_SAFE_NO_PAD.encode([[7; 31].as_slice(), &[last]].concat());
        format!(r#"{{"kty": "OKP", "crv": "Ed25519", "x": "{x}"{more}}}"#)
    }

    fn published(members: &[String]) -> Result<usize, JwksError> {
        parse_published(format!(r#"{{"keys": [{}]}}"#, members.join(",")).as_bytes()).map(|keys| keys.len())
    }

    #[test]
    fn a_published_secret_is_no_key() {
        let secret = format!(r#"{{"kty": "oct", "k": "{SECRET}"}}"#);
        assert_eq!(published(std::slice::from_ref(&secret)), Err(JwksError::NoUsableKey));
        let keys = parse_published(format!(r#"{{"keys": [{secret}, {}]}}"#, ed25519(1, "")).as_bytes()).unwrap();
        assert!(keys.len() == 1 && keys[0].algorithm == Algorithm::EdDsa);
    }

    #[test]
    fn unusable_keys_of_a_published_set_are_skipped() {
        let bad = r#"{"kty": "RSA", "n": "AQAB", "e": "AQAB"}, {"kty": "EC", "crv": "P-256", "x": "", "y": ""}, 7, {}"#;
        assert_eq!(published(&[bad.to_owned(), ed25519(1, "")]), Ok(1));
        assert_eq!(published(&[bad.to_owned()]), Err(JwksError::NoUsableKey));
    }

    #[test]
    fn the_number_of_published_keys_is_bounded() {
        let keys = |count| (0..count).map(|n| ed25519(n, &format!(r#", "kid": "{n}""#))).collect::<Vec<_>>();
        assert_eq!(published(&keys(32)), Ok(32));
        assert_eq!(published(&keys(33)), Err(JwksError::TooManyKeys));
        // Equal keys count once, and key ids may be repeated.
        assert_eq!(published(&[keys(32), keys(32)].concat()), Ok(32));
        let alike = |count| (0..count).map(|n| ed25519(n, r#", "kid": "a""#)).collect::<Vec<_>>();
        assert_eq!(published(&alike(4)), Ok(4));
        assert_eq!(published(&alike(5)), Err(JwksError::Ambiguous(Algorithm::EdDsa)));
    }

    #[test]
    fn a_file_without_a_key_set_is_reported() {
        assert_eq!(parse(b"{\n  keys"), Err(JwksError::Json(2, 3)));
        assert_eq!(parse(b""), Err(JwksError::Json(1, 0)));
        for text in ["[]", "{}", r#"{"keys": {}}"#, "7"] {
            assert_eq!(parse(text.as_bytes()), Err(JwksError::NoKeys), "{text}");
        }
    }
}
