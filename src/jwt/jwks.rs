//! A set of keys as issuers publish it: a JSON Web Key Set (RFC 7517).
//!
//! Keys that are for something else, or of a kind that is not known here, are passed over, as
//! section 5 asks; a key that is meant for us and is broken is not.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::verification_key::{Algorithm, InvalidKey, Key};

/// Why a file is no set of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BadSet {
    /// No JSON, at a line and a column.
    Json(usize, usize),
    /// No list `keys`.
    NoList,
    /// None of its keys is for us.
    Nothing,
    /// One is broken: its position from 1.
    Key(usize, InvalidKey),
}

/// The keys of a set, with the algorithms that they are for.
pub fn read(text: &[u8]) -> Result<Vec<Key>, BadSet> {
    let set: Value = serde_json::from_slice(text).map_err(|error| BadSet::Json(error.line(), error.column()))?;
    let Some(Value::Array(members)) = set.get("keys") else { return Err(BadSet::NoList) };
    let mut keys = Vec::new();
    for (i, member) in members.iter().enumerate() {
        let Value::Object(member) = member else { continue };
        if let Some(read) = key(member) {
            keys.push(read.map_err(|flaw| BadSet::Key(i + 1, flaw))?);
        }
    }
    if keys.is_empty() { Err(BadSet::Nothing) } else { Ok(keys) }
}

/// One key; `None` if it is not for verifying, or not with what is known here.
fn key(member: &Map<String, Value>) -> Option<Result<Key, InvalidKey>> {
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
        let encoded = text(name).ok_or(InvalidKey::OtherKind(algorithm))?;
        URL_SAFE_NO_PAD.decode(encoded).map_err(|_invalid| InvalidKey::OtherKind(algorithm))
    };
    Some(match algorithm {
        Algorithm::Hs256 => bytes("k").and_then(|secret| Key::secret(&secret, kid)),
        Algorithm::Rs256 => bytes("n").and_then(|n| Key::rsa(&n, &bytes("e")?, kid)),
        Algorithm::Es256 => bytes("x").and_then(|x| Key::public(algorithm, &point(&x, &bytes("y")?), kid)),
        Algorithm::EdDsa => bytes("x").and_then(|x| Key::public(algorithm, &x, kid)),
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
        assert_eq!(read(format!(r#"{{"keys": [{others}, {good}]}}"#).as_bytes()).unwrap().len(), 1);
        assert_eq!(read(format!(r#"{{"keys": [{others}]}}"#).as_bytes()), Err(BadSet::Nothing));
    }

    #[test]
    fn a_key_for_us_that_is_broken_is_said() {
        for (member, flaw) in [
            (r#"{"kty": "oct"}"#, InvalidKey::OtherKind(Algorithm::Hs256)),
            (r#"{"kty": "oct", "k": "c2hvcnQ"}"#, InvalidKey::ShortSecret(5)),
            (r#"{"kty": "oct", "k": "+/+/"}"#, InvalidKey::OtherKind(Algorithm::Hs256)),
            (r#"{"kty": "RSA", "n": "AQAB"}"#, InvalidKey::OtherKind(Algorithm::Rs256)),
            (r#"{"kty": "RSA", "n": "", "e": ""}"#, InvalidKey::OtherKind(Algorithm::Rs256)),
            (r#"{"kty": "EC", "crv": "P-256", "x": "AQAB", "y": "AQAB"}"#, InvalidKey::OtherKind(Algorithm::Es256)),
            (r#"{"kty": "OKP", "crv": "Ed25519", "x": "AQAB"}"#, InvalidKey::OtherKind(Algorithm::EdDsa)),
        ] {
            let set = format!(r#"{{"keys": [{{"kty": "new"}}, {member}]}}"#);
            assert_eq!(read(set.as_bytes()), Err(BadSet::Key(2, flaw)), "{member}");
        }
        // On no curve.
        let point = format!(r#"{{"keys": [{{"kty": "EC", "crv": "P-256", "x": "{SECRET}", "y": "{SECRET}"}}]}}"#);
        assert_eq!(read(point.as_bytes()), Err(BadSet::Key(1, InvalidKey::OtherKind(Algorithm::Es256))));
    }

    #[test]
    fn what_is_no_set_is_said() {
        assert_eq!(read(b"{\n  keys"), Err(BadSet::Json(2, 3)));
        assert_eq!(read(b""), Err(BadSet::Json(1, 0)));
        for text in ["[]", "{}", r#"{"keys": {}}"#, "7"] {
            assert_eq!(read(text.as_bytes()), Err(BadSet::NoList), "{text}");
        }
    }
}
