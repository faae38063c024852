//! A token taken apart: what is signed, the signature, and what the header says of both.
//!
//! Base64url is read strictly, without padding and without stray bits, as RFC 7515 has it: a token
//! has one spelling.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::TokenError;
use super::verification_key::VerificationKey;

pub struct Jws<'t> {
    /// As the token names it; only good to choose a key.
    algorithm: String,
    kid: Option<String>,
    /// Header and payload as they were sent: the bytes that are signed.
    pub signing_input: &'t [u8],
    /// Still encoded.
    pub payload: &'t [u8],
    pub signature: Vec<u8>,
}

impl<'t> Jws<'t> {
    pub fn parse(token: &'t [u8]) -> Result<Jws<'t>, TokenError> {
        let mut parts = token.splitn(4, |byte| *byte == b'.');
        // Five parts would be an encrypted token.
        let (Some(header), Some(payload), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        let signed = &token[..header.len() + 1 + payload.len()];
        let header = decode_object(header)?;
        // Section 4.1.11: what is critical must be understood, and nothing is.
        if header.contains_key("crit") {
            return Err(TokenError::CriticalExtension);
        }
        let Some(Value::String(algorithm)) = header.get("alg") else { return Err(TokenError::Malformed) };
        let kid = match header.get("kid") {
            None => None,
            Some(Value::String(kid)) => Some(kid.clone()),
            Some(_) => return Err(TokenError::Malformed),
        };
        Ok(Jws { algorithm: algorithm.clone(), kid, signing_input: signed, payload, signature: decode(signature)? })
    }

    /// Whether a key could be the one: of this algorithm, and of this id where both have one.
    pub fn may_be_signed_by(&self, key: &VerificationKey) -> bool {
        let same_id = match (&self.kid, &key.kid) {
            (Some(kid), Some(of_key)) => kid == of_key,
            (None, _) | (_, None) => true,
        };
        same_id && key.algorithm.name() == self.algorithm
    }
}

/// A part of a token that is a JSON object.
pub fn decode_object(part: &[u8]) -> Result<Map<String, Value>, TokenError> {
    match serde_json::from_slice(&decode(part)?) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) | Err(_) => Err(TokenError::Malformed),
    }
}

fn decode(part: &[u8]) -> Result<Vec<u8>, TokenError> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_invalid| TokenError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(token: &str) -> Result<(), TokenError> {
        Jws::parse(token.as_bytes()).map(|_| ())
    }

    fn with_header(header: &str) -> String {
        format!("{}.e30.c2ln", URL_SAFE_NO_PAD.encode(header))
    }

    #[test]
    fn what_is_no_token_is_malformed() {
        for token in ["", ".", "..", "...", "a.b.c", "e30.e30.", "e30.e30.c2ln", "e30.e30", "é.é.é"] {
            assert_eq!(open(token), Err(TokenError::Malformed), "{token}");
        }
        let good = with_header(r#"{"alg":"HS256"}"#);
        assert_eq!(open(&good), Ok(()));
        for token in [format!("{good}="), format!("{good}.x.y"), format!(" {good}"), good.replace(".e30.", ".e30.e30.")]
        {
            assert_eq!(open(&token), Err(TokenError::Malformed), "{token}");
        }
        for header in [r#"{"alg":1}"#, r#"{"alg":"HS256","kid":7}"#, r#"["alg"]"#, r#"{"alg":"HS256""#, "{}"] {
            assert_eq!(open(&with_header(header)), Err(TokenError::Malformed), "{header}");
        }
    }

    #[test]
    fn a_signature_has_one_spelling() {
        // `c2ln` is `sig`; the last letter of `c2k` may not carry bits that mean nothing.
        let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256"}"#);
        assert_eq!(open(&format!("{header}.e30.c2k")), Ok(()));
        assert_eq!(open(&format!("{header}.e30.c2l")), Err(TokenError::Malformed));
        assert_eq!(open(&format!("{header}.e30.c2k=")), Err(TokenError::Malformed));
        assert_eq!(open(&format!("{header}.e30.c+/k")), Err(TokenError::Malformed));
    }

    #[test]
    fn what_is_critical_is_not_ignored() {
        let token = with_header(r#"{"alg":"HS256","b64":false,"crit":["b64"]}"#);
        assert_eq!(open(&token), Err(TokenError::CriticalExtension));
    }
}
