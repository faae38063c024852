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
use super::{Invalid, Lifetime, Trust};
use transom_limiter::key::KeyHasher;

/// Tokens of one generation. Two are kept, so twice as many are remembered at most.
const GENERATION: usize = 4096;
/// A token whose claims are longer is verified every time, so that memory is bounded as well.
const VALUES_MAX_BYTES: usize = 512;

pub struct Checker {
    trust: Trust,
    /// The names of all claims that some rule counts by.
    claims: Vec<String>,
    /// The keyed hash, before a token.
    start: KeyHasher,
    known: RefCell<Known>,
    /// The token that was refused last, when (Unix milliseconds), and why.
    refused: Cell<Option<(Hash, u64, Invalid)>>,
}

/// When the younger generation is full it becomes the older one, and that is forgotten. What is asked
/// for again moves to the younger, so tokens in use stay.
#[derive(Default)]
struct Known {
    young: Generation,
    old: Generation,
}

type Hash = (u64, u64);
type Generation = HashMap<Hash, Verified, foldhash::fast::RandomState>;

struct Verified {
    lifetime: Lifetime,
    /// In the order of the checker's names.
    values: Box<[Option<Box<str>>]>,
}

impl Checker {
    pub fn new(trust: Trust, claims: Vec<String>, start: KeyHasher) -> Checker {
        Checker { trust, claims, start, known: RefCell::default(), refused: Cell::default() }
    }

    /// Hands the value of a claim of a token that is valid at a time (Unix milliseconds of the wall clock) to `take`; `false`
    /// if the token has none.
    pub fn claim(&self, token: &[u8], name: &str, now_ms: u64, take: impl FnOnce(&str)) -> Result<bool, Invalid> {
        let position = self.claims.iter().position(|known| known == name);
        let hash = self.hash(token);
        let mut known = self.known.borrow_mut();
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
    fn verify(&self, token: &[u8], hash: Hash, now_ms: u64) -> Result<Verified, Invalid> {
        match self.refused.get() {
            Some((refused, at_ms, why)) if (refused, at_ms) == (hash, now_ms) => Err(why),
            _ => {
                let verified = self.trust.verify(token, now_ms);
                let verified = verified.inspect_err(|why| self.refused.set(Some((hash, now_ms, *why))));
                verified.map(|(claims, lifetime)| self.read(&claims, lifetime))
            }
        }
    }

    fn hash(&self, token: &[u8]) -> Hash {
        let mut hasher = self.start.clone();
        hasher.add_part(0, token);
        let hash = hasher.finish();
        (hash.bucket_hash, hash.tag)
    }

    fn read(&self, claims: &Claims, lifetime: Lifetime) -> Verified {
        let values = self.claims.iter().map(|name| claims.text(name).map(String::into_boxed_str)).collect();
        Verified { lifetime, values }
    }
}

impl Known {
    /// A token that is valid now. The wall clock may have been set back since it was verified.
    fn find(&mut self, hash: Hash, now_ms: u64) -> Option<&Verified> {
        if let Some(verified) = self.old.remove(&hash) {
            self.insert(hash, verified);
        }
        self.young.get(&hash).filter(|verified| verified.lifetime.check(now_ms).is_ok())
    }

    fn insert(&mut self, hash: Hash, verified: Verified) -> &Verified {
        if self.young.len() >= GENERATION {
            self.old = mem::take(&mut self.young);
        }
        self.young.entry(hash).insert_entry(verified).into_mut()
    }
}

impl Verified {
    fn bytes(&self) -> usize {
        self.values.iter().flatten().map(|value| value.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jwt::verification_key::Key;
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

    fn checker() -> Checker {
        let trust = Trust { keys: vec![Key::secret(SECRET, None).unwrap()], ..Trust::default() };
        Checker::new(trust, vec!["plan".to_owned(), "sub".to_owned()], KeyHasher::new(Seed(1, 2), 0))
    }

    /// From here on, only what is remembered is known.
    fn without_keys(checker: &mut Checker) {
        checker.trust.keys.clear();
    }

    fn sub(checker: &Checker, token: &str, now_ms: u64) -> Result<Option<String>, Invalid> {
        let mut value = None;
        let found = checker.claim(token.as_bytes(), "sub", now_ms, |text| value = Some(text.to_owned()))?;
        assert_eq!(found, value.is_some());
        Ok(value)
    }

    fn remembered(checker: &Checker) -> usize {
        let known = checker.known.borrow();
        known.young.len() + known.old.len()
    }

    #[test]
    fn a_signature_is_checked_once() {
        let (mut checker, token) = (checker(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&checker, &token, 0), Ok(Some("alice".to_owned())));
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &self::token(r#"{"sub":"bob"}"#), 0), Err(Invalid::UnknownKey));
    }

    #[test]
    fn a_token_is_remembered_no_longer_than_it_is_valid() {
        let (checker, token) = (checker(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &token, 100_000), Err(Invalid::Expired));
        assert_eq!(sub(&checker, &token, 100_001), Err(Invalid::Expired));
        // The wall clock was ahead.
        assert_eq!(sub(&checker, &token, 99_999), Ok(Some("alice".to_owned())));
        let later = self::token(r#"{"sub":"bob","nbf":50}"#);
        assert_eq!(sub(&checker, &later, 50_000), Ok(Some("bob".to_owned())));
        assert_eq!(sub(&checker, &later, 49_999), Err(Invalid::NotYetValid));
    }

    #[test]
    fn the_token_refused_last_is_verified_once_for_a_moment() {
        let mut checker = checker();
        let forged = token(r#"{"sub":"alice"}"#).replace("eyJz", "eyJ0");
        assert_eq!(sub(&checker, &forged, 7), Err(Invalid::Signature));
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &forged, 7), Err(Invalid::Signature));
        assert_eq!(sub(&checker, &forged, 8), Err(Invalid::UnknownKey));
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
        for n in 0..5 * GENERATION {
            sub(&checker, &token(&format!(r#"{{"sub":{n}}}"#)), 0).unwrap();
            if n % (GENERATION / 2) == 0 {
                sub(&checker, &used, 0).unwrap();
            }
            assert!(remembered(&checker) <= 2 * GENERATION);
        }
        without_keys(&mut checker);
        assert_eq!(sub(&checker, &used, 0), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&checker, &token(r#"{"sub":0}"#), 0), Err(Invalid::UnknownKey));
    }
}
