//! Verified tokens, remembered: a signature costs more than all the rest of a decision.
//!
//! Each event loop has a checker of its own, made anew with every configuration, so that no token
//! outlives the keys that it was verified with. A token is remembered by its keyed 128-bit hash, with the time
//! in which it is valid, and with the values of those claims only that some rule counts by. Of the tokens that were
//! refused the last one alone is remembered, for several rules of a request may ask for it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::mem;

use super::claims::Claims;
use super::{Lifetime, TokenError, TokenVerifier};
use transom_limiter::key::KeyHasher;

/// Tokens of one generation. Two are kept, so twice as many are remembered at most.
const GENERATION_MAX_TOKENS: usize = 4096;
/// A token whose claims are longer is verified every time, so that memory is bounded as well.
const VALUES_MAX_BYTES: usize = 512;

pub struct TokenCache {
    trust: TokenVerifier,
    /// The names of all claims that some rule counts by.
    claims: Vec<String>,
    /// The keyed hash, before a token.
    hasher: KeyHasher,
    generations: RefCell<Generations>,
    /// The token that was refused last, when (Unix milliseconds), and why.
    last_refused: Cell<Option<(TokenHash, u64, TokenError)>>,
}

/// When the younger generation is full it becomes the older one, and that is forgotten. What is asked
/// for again moves to the younger, so tokens in use stay.
#[derive(Default)]
struct Generations {
    young: Generation,
    old: Generation,
}

type TokenHash = (u64, u64);
type Generation = HashMap<TokenHash, CachedToken, foldhash::fast::RandomState>;

struct CachedToken {
    lifetime: Lifetime,
    /// In the order of the checker's names.
    values: Box<[Option<Box<str>>]>,
}

impl TokenCache {
    pub fn new(trust: TokenVerifier, claims: Vec<String>, start: KeyHasher) -> TokenCache {
        TokenCache { trust, claims, hasher: start, generations: RefCell::default(), last_refused: Cell::default() }
    }

    /// Hands the value of a claim of a token that is valid at a time (Unix milliseconds of the wall clock) to `take`; `false`
    /// if the token has none.
    pub fn with_claim(
        &self,
        token: &[u8],
        name: &str,
        now_ms: u64,
        take: impl FnOnce(&str),
    ) -> Result<bool, TokenError> {
        let position = self.claims.iter().position(|known| known == name);
        let hash = self.hash(token);
        let mut known = self.generations.borrow_mut();
        let fresh;
        let verified = match known.find(hash, now_ms) {
            Some(verified) => verified,
            None => {
                fresh = self.verify(token, hash, now_ms)?;
                if fresh.bytes() > VALUES_MAX_BYTES { &fresh } else { known.insert(hash, fresh) }
            }
        };
        let value = position.and_then(|position| verified.values[position].as_deref());
        value.map(take);
        Ok(value.is_some())
    }

    #[cold]
    fn verify(&self, token: &[u8], hash: TokenHash, now_ms: u64) -> Result<CachedToken, TokenError> {
        match self.last_refused.get() {
            Some((refused, at_ms, why)) if (refused, at_ms) == (hash, now_ms) => Err(why),
            _ => {
                let verified = self.trust.verify(token, now_ms);
                let verified = verified.inspect_err(|why| self.last_refused.set(Some((hash, now_ms, *why))));
                verified.map(|(claims, lifetime)| self.extract_claims(&claims, lifetime))
            }
        }
    }

    fn hash(&self, token: &[u8]) -> TokenHash {
        let mut hasher = self.hasher.clone();
        hasher.add_part(0, token);
        let hash = hasher.finish();
        (hash.bucket_hash, hash.tag)
    }

    fn extract_claims(&self, claims: &Claims, lifetime: Lifetime) -> CachedToken {
        let values = self.claims.iter().map(|name| claims.text(name).map(String::into_boxed_str)).collect();
        CachedToken { lifetime, values }
    }
}

impl Generations {
    /// A token that is valid now. The wall clock may have been set back since it was verified.
    fn find(&mut self, hash: TokenHash, now_ms: u64) -> Option<&CachedToken> {
        if let Some(verified) = self.old.remove(&hash) {
            self.insert(hash, verified);
        }
        self.young.get(&hash).filter(|verified| verified.lifetime.check(now_ms).is_ok())
    }

    fn insert(&mut self, hash: TokenHash, verified: CachedToken) -> &CachedToken {
        if self.young.len() >= GENERATION_MAX_TOKENS {
            self.old = mem::take(&mut self.young);
        }
        self.young.entry(hash).insert_entry(verified).into_mut()
    }
}

impl CachedToken {
    fn bytes(&self) -> usize {
        self.values.iter().flatten().map(|value| value.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jwt::verification_key::VerificationKey;
    use aws_lc_rs::hmac;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use transom_limiter::key::Seed;

    const SECRET: &[u8] = b"an example of a secret, long enough";

    fn token(claims: &str) -> String {
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let signed = format!("{}.{}", encode(r#"{"alg":"HS256"}"#), encode(claims));
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET), signed.as_bytes());
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn checker() -> TokenCache {
        let trust = TokenVerifier {
            keys: vec![VerificationKey::from_secret(SECRET, None).unwrap()],
            ..TokenVerifier::default()
        };
        TokenCache::new(trust, vec!["plan".to_owned(), "sub".to_owned()], KeyHasher::new(Seed(1, 2), 0))
    }

    /// From here on, only what is remembered is known.
    fn without_keys(checker: &mut TokenCache) {
        checker.trust.keys.clear();
    }

    fn sub(checker: &TokenCache, token: &str, now_ms: u64) -> Result<Option<String>, TokenError> {
        let mut value = None;
        let found = checker.with_claim(token.as_bytes(), "sub", now_ms, |text| value = Some(text.to_owned()))?;
        assert_eq!(found, value.is_some());
        Ok(value)
    }

    fn remembered(checker: &TokenCache) -> usize {
        let known = checker.generations.borrow();
        known.young.len() + known.old.len()
    }

    #[test]
    fn a_signature_is_checked_once() {
        let (mut checker, token) = (checker(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&checker, &token, 0), Ok(Some("alice".to_owned())));
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &self::token(r#"{"sub":"bob"}"#), 0), Err(TokenError::UnknownKey));
    }

    #[test]
    fn a_token_is_remembered_no_longer_than_it_is_valid() {
        let (checker, token) = (checker(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &token, 100_000), Err(TokenError::Expired));
        assert_eq!(sub(&checker, &token, 100_001), Err(TokenError::Expired));
        // The wall clock was ahead.
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        let later = self::token(r#"{"sub":"bob","nbf":50}"#);
        assert_eq!(sub(&checker, &later, 50_000), Ok(Some("bob".to_owned())));
        assert_eq!(sub(&checker, &later, 49_999), Err(TokenError::NotYetValid));
    }

    #[test]
    fn the_token_refused_last_is_verified_once_for_a_moment() {
        let mut checker = checker();
        let forged = token(r#"{"sub":"alice"}"#).replace("eyJz", "eyJ0");
        assert_eq!(sub(&checker, &forged, 7), Err(TokenError::Signature));
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &forged, 7), Err(TokenError::Signature));
        assert_eq!(sub(&checker, &forged, 8), Err(TokenError::UnknownKey));
    }

    #[test]
    fn refused_and_overlong_tokens_are_not_remembered() {
        let checker = checker();
        let other = token(r#"{"sub":"alice"}"#).replace("eyJz", "eyJ0");
        for token in ["", "a.b.c", &other, &token(r#"{"exp":0}"#), &token(r#"{"nbf":1}"#)] {
            assert!(sub(&checker, token, 0).is_err());
        }
        let long = "x".repeat(VALUES_MAX_BYTES + 1);
        assert_eq!(sub(&checker, &token(&format!(r#"{{"sub":"{long}"}}"#)), 0), Ok(Some(long)));
        assert_eq!(remembered(&checker), 0);
        assert_eq!(sub(&checker, &token("{}"), 0), Ok(None), "valid, without the claim");
        assert_eq!(remembered(&checker), 1);
    }

    #[test]
    fn memory_is_bounded_and_tokens_in_use_stay() {
        let (mut checker, used) = (checker(), token(r#"{"sub":"alice"}"#));
        for n in 0..5 * GENERATION_MAX_TOKENS {
            sub(&checker, &token(&format!(r#"{{"sub":{n}}}"#)), 0).unwrap();
            if n % (GENERATION_MAX_TOKENS / 2) == 0 {
                sub(&checker, &used, 0).unwrap();
            }
            assert!(remembered(&checker) <= 2 * GENERATION_MAX_TOKENS);
        }
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &used, 0), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &token(r#"{"sub":0}"#), 0), Err(TokenError::UnknownKey));
    }
}
