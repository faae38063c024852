//! Whether a bearer token is genuine, and what it says: signed JSON Web Tokens (RFC 7519) in their
//! compact form (RFC 7515, section 7.1).
//!
//! `envelope` takes a token apart, `key` says whether a signature is that of a key, `jwks` reads sets
//! of keys, `claims` is what a token says, `checker` remembers what was found out. What a token says
//! of its algorithm is never believed: it only chooses among the keys, each of which has one
//! algorithm. This room opens no file, reads no clock and does not know where a token was found.

use std::fmt;

pub mod cache;
pub mod claims;
pub mod jwks;
pub mod jws;
pub mod verification_key;

use claims::Claims;
use jws::Jws;
use verification_key::VerificationKey;

/// With how many keys the signature of one token is verified at most. Each costs 20 to 60 µs, and the sender of the token
/// pays nothing for it.
pub const KEYS_TRIED_MAX: usize = 4;

/// Whose tokens are believed. No keys: nobody's.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TokenVerifier {
    pub keys: Vec<VerificationKey>,
    /// Who may have issued a token; empty: anybody with one of the keys.
    pub issuers: Vec<String>,
    /// For whom a token may be meant; empty: for anybody.
    pub audiences: Vec<String>,
    /// How far the issuer's clock may be from ours.
    pub leeway_ms: u64,
}

/// Why a token is not believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenError {
    Malformed,
    /// It says that it must not be read without an extension that is not known here.
    CriticalExtension,
    /// No key has both its algorithm and its key id.
    UnknownKey,
    /// More than [`KEYS_TRIED_MAX`] keys could be the one, and it does not name one.
    AmbiguousKey,
    Signature,
    Expired,
    NotYetValid,
    Issuer,
    Audience,
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenError::Malformed => "the token is malformed",
            TokenError::CriticalExtension => "the token needs an extension that is not known here",
            TokenError::UnknownKey => "the token is not signed with a key and an algorithm that are trusted here",
            TokenError::AmbiguousKey => "the token does not say by `kid` which of many keys it is signed with",
            TokenError::Signature => "the token's signature is not valid",
            TokenError::Expired => "the token has expired",
            TokenError::NotYetValid => "the token is not valid yet",
            TokenError::Issuer => "the token's issuer is not trusted here",
            TokenError::Audience => "the token is meant for another audience",
        })
    }
}

/// When a token is valid, with the leeway in it (Unix milliseconds).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lifetime {
    pub begins_ms: u64,
    /// The first moment at which it is not valid any more; `None`: it has no end.
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
    /// What a token says and when it is valid, if it is genuine and valid now (Unix milliseconds).
    pub fn verify(&self, token: &[u8], now_ms: u64) -> Result<(Claims, Lifetime), TokenError> {
        let envelope = Jws::parse(token)?;
        let candidates = || self.keys.iter().filter(|key| envelope.may_be_signed_by(key));
        match candidates().take(KEYS_TRIED_MAX + 1).count() {
            0 => return Err(TokenError::UnknownKey),
            1..=KEYS_TRIED_MAX => {}
            _ => return Err(TokenError::AmbiguousKey),
        }
        if !candidates().any(|key| key.verifies(envelope.signing_input, &envelope.signature)) {
            return Err(TokenError::Signature);
        }
        // Nothing the payload says is looked at before it is known whose it is.
        let claims = Claims::parse(envelope.payload)?;
        let lifetime = claims.check(self, now_ms)?;
        Ok((claims, lifetime))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

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

    /// Header and signature of each of the tokens with that payload.
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

    fn trust() -> TokenVerifier {
        TokenVerifier { keys: jwks::parse(KEYS.as_bytes()).unwrap(), ..TokenVerifier::default() }
    }

    fn verify(token: &str) -> Result<Option<String>, TokenError> {
        trust().verify(token.as_bytes(), NOW_MS).map(|(claims, _)| claims.text("iss"))
    }

    #[test]
    fn the_tokens_of_the_standard_are_genuine() {
        for (header, signature) in TOKENS {
            let token = format!("{header}.{PAYLOAD}.{signature}");
            assert_eq!(verify(&token), Ok(Some("joe".to_owned())), "{header}");
            let expired = trust().verify(token.as_bytes(), 1_300_819_380_000);
            assert_eq!(expired.map(|_| ()), Err(TokenError::Expired));
        }
        // Genuine, though its payload is no claims.
        let signed = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc.hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg";
        assert_eq!(verify(signed), Err(TokenError::Malformed));
        assert_eq!(verify(&signed.replace("hgyY", "hgyZ")), Err(TokenError::Signature));
    }

    #[test]
    fn what_was_changed_is_not_genuine() {
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
    fn a_token_has_one_spelling() {
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
    fn an_algorithm_that_no_key_has_is_refused() {
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
    fn a_key_is_chosen_by_its_id() {
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
        assert!(with(&unnamed, "a2").is_ok(), "a key without an id is tried with all");
    }

    #[test]
    fn nobody_is_believed_without_keys() {
        let token = format!("{}.{PAYLOAD}.{}", TOKENS[0].0, TOKENS[0].1);
        assert_eq!(TokenVerifier::default().verify(token.as_bytes(), NOW_MS).map(|_| ()), Err(TokenError::UnknownKey));
    }

    #[test]
    fn keys_do_not_show_what_they_are_made_of() {
        let shown = format!("{:?}", trust());
        assert!(shown.contains("Hs256") && shown.contains("a1"), "{shown}");
        let secret = URL_SAFE_NO_PAD
            .decode("AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow")
            .unwrap();
        for bytes in [&secret[..4], &secret[4..8]] {
            let decimal: Vec<String> = bytes.iter().map(u8::to_string).collect();
            assert!(!shown.contains(&decimal.join(", ")), "{shown}");
        }
    }
}
