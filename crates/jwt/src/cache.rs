//! A cache of verified tokens: verifying a signature costs more than the rest of a decision.
//!
//! Each worker has a cache. It is emptied when the published keys change, and every new configuration replaces it, so that
//! no token outlives the keys that verified it. An entry has the keyed 128-bit hash of a token, its lifetime, and the values
//! of the claims that rules use as keys. Of the rejected tokens only the last one is remembered, because several rules of one
//! request may need it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use super::published_keys::PublishedKeys;
use super::token::{Claims, Lifetime, TokenError, TokenVerifier};
use transom_limiter::key::KeyHasher;

/// Most tokens in one generation. There are two generations.
const GENERATION_MAX_TOKENS: usize = 4096;
/// A token with longer claims is verified every time, so that memory is bounded.
const VALUES_MAX_BYTES: usize = 512;

/// The verified tokens of one worker.
pub struct TokenCache {
    /// The published keys follow the configured ones.
    verifier: RefCell<TokenVerifier>,
    configured_keys: usize,
    /// The published keys, and the version of those in `verifier`.
    published: Option<Arc<PublishedKeys>>,
    version: Cell<u64>,
    /// The names of all claims that rules use as keys.
    claims: Vec<String>,
    /// The seeded hash, before a token is added.
    hasher: KeyHasher,
    generations: RefCell<Generations>,
    /// The last rejected token, the time of its rejection (Unix milliseconds), and the reason.
    last_rejected: Cell<Option<(TokenHash, u64, TokenError)>>,
    /// Whether API keys come in the field of tokens: a malformed token is an API key.
    pub has_api_keys_beside: bool,
}

/// When the younger generation is full, it replaces the older one. A token that is used again moves to the younger
/// generation, so that tokens in use remain.
#[derive(Default)]
struct Generations {
    young: Generation,
    old: Generation,
}

type TokenHash = (u64, u64);
type Generation = HashMap<TokenHash, CachedToken, foldhash::fast::RandomState>;

struct CachedToken {
    lifetime: Lifetime,
    /// In the order of `TokenCache::claims`.
    values: Box<[Option<Box<str>>]>,
}

impl TokenCache {
    pub fn new(verifier: TokenVerifier, claims: Vec<String>, hasher: KeyHasher) -> TokenCache {
        TokenCache {
            configured_keys: verifier.keys.len(),
            verifier: RefCell::new(verifier),
            published: None,
            version: Cell::new(0),
            claims,
            hasher,
            generations: RefCell::default(),
            last_rejected: Cell::default(),
            has_api_keys_beside: false,
        }
    }

    /// Verifies tokens with published keys too.
    pub fn with_published(self, published: Option<Arc<PublishedKeys>>) -> TokenCache {
        TokenCache { published, ..self }
    }

    /// Verifies a token at the time `now_ms` (Unix milliseconds of the wall clock), and passes the value of a claim to `take`.
    /// Returns `false` if the token does not have the claim.
    pub fn with_claim(
        &self,
        token: &[u8],
        name: &str,
        now_ms: u64,
        take: impl FnOnce(&str),
    ) -> Result<bool, TokenError> {
        if let Some(published) = &self.published
            && published.version() != self.version.get()
        {
            self.take_over(published);
        }
        let position = self.claims.iter().position(|claim| claim == name);
        if position.is_none() && !name.is_empty() {
            return self.with_other_claim(token, name, now_ms, take);
        }
        let hash = self.hash(token);
        let mut generations = self.generations.borrow_mut();
        let fresh;
        let verified = match generations.find(hash, now_ms) {
            Some(verified) => verified,
            None => {
                fresh = self.verify(token, hash, now_ms)?;
                if fresh.bytes() > VALUES_MAX_BYTES { &fresh } else { generations.insert(hash, fresh) }
            }
        };
        let value = position.and_then(|position| verified.values[position].as_deref());
        value.map(take);
        Ok(value.is_some())
    }

    /// As [`TokenCache::with_claim`], for a claim that the configuration does not name, as a deny entry of the store may: such
    /// claims are not kept.
    #[cold]
    fn with_other_claim(
        &self,
        token: &[u8],
        name: &str,
        now_ms: u64,
        take: impl FnOnce(&str),
    ) -> Result<bool, TokenError> {
        let (claims, _lifetime) = self.verifier.borrow().verify(token, now_ms).map_err(|why| self.explain(why))?;
        let value = claims.text(name);
        value.as_deref().map(take);
        Ok(value.is_some())
    }

    /// Verifies a token as [`TokenCache::with_claim`] does.
    pub fn check(&self, token: &[u8], now_ms: u64) -> Result<(), TokenError> {
        self.with_claim(token, "", now_ms, |_claim| ()).map(drop)
    }

    /// Takes over changed keys.
    #[cold]
    fn take_over(&self, published: &PublishedKeys) {
        let (version, keys) = published.keys();
        self.version.set(version);
        let own = &mut self.verifier.borrow_mut().keys;
        own.truncate(self.configured_keys);
        own.extend_from_slice(&keys);
        self.generations.take();
        self.last_rejected.take();
    }

    #[cold]
    fn verify(&self, token: &[u8], hash: TokenHash, now_ms: u64) -> Result<CachedToken, TokenError> {
        match self.last_rejected.get() {
            Some((rejected, at_ms, why)) if (rejected, at_ms) == (hash, now_ms) => Err(why),
            _ => {
                let verified = self.verifier.borrow().verify(token, now_ms).map_err(|why| self.explain(why));
                let verified = verified.inspect_err(|why| self.last_rejected.set(Some((hash, now_ms, *why))));
                verified.map(|(claims, lifetime)| self.extract_claims(&claims, lifetime))
            }
        }
    }

    /// The reason for a rejection, with regard to the published keys. An unknown key may have been published since.
    fn explain(&self, why: TokenError) -> TokenError {
        let Some(published) = &self.published else { return why };
        if why == TokenError::UnknownKey {
            published.want_refresh();
        }
        let has_published = self.verifier.borrow().keys.len() > self.configured_keys;
        match why {
            TokenError::UnknownKey | TokenError::AmbiguousKey | TokenError::Signature if !has_published => {
                TokenError::KeysUnavailable
            }
            why => why,
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
    /// A token that is valid now. Its begin is checked as well, because the wall clock may have been set back.
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
    use crate::published_keys::KeySet;
    use crate::verification_key::VerificationKey;
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

    fn cache() -> TokenCache {
        let verifier = TokenVerifier {
            keys: vec![VerificationKey::from_secret(SECRET, None).unwrap()],
            ..TokenVerifier::default()
        };
        TokenCache::new(verifier, vec!["plan".to_owned(), "sub".to_owned()], KeyHasher::new(Seed(1, 2), 0))
    }

    /// Removes the keys, so that only cached tokens are accepted.
    fn without_keys(cache: &mut TokenCache) {
        cache.verifier.get_mut().keys.clear();
    }

    fn sub(cache: &TokenCache, token: &str, now_ms: u64) -> Result<Option<String>, TokenError> {
        let mut value = None;
        let found = cache.with_claim(token.as_bytes(), "sub", now_ms, |text| value = Some(text.to_owned()))?;
        assert_eq!(found, value.is_some());
        Ok(value)
    }

    fn cached_tokens(cache: &TokenCache) -> usize {
        let known = cache.generations.borrow();
        known.young.len() + known.old.len()
    }

    #[test]
    fn a_claim_that_the_configuration_does_not_name_is_read() {
        let (cache, token) = (cache(), token(r#"{"sub":"a","email":"a@b.test"}"#));
        let read = |name: &str, token: &str| {
            let mut value = None;
            cache
                .with_claim(token.as_bytes(), name, 0, |text| value = Some(text.to_owned()))
                .map(|found| (found, value))
        };
        assert_eq!(read("email", &token), Ok((true, Some("a@b.test".to_owned()))));
        assert_eq!(read("name", &token), Ok((false, None)));
        assert!(read("email", &format!("{token}x")).is_err());
    }

    #[test]
    fn a_signature_is_checked_once() {
        let (mut cache, token) = (cache(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&cache, &token, 0), Ok(Some("alice".to_owned())));
        without_keys(&mut cache);
        assert_eq!(sub(&cache, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&cache, &self::token(r#"{"sub":"bob"}"#), 0), Err(TokenError::UnknownKey));
    }

    #[test]
    fn no_token_outlives_the_published_key_that_verified_it() {
        let key = VerificationKey::from_secret(SECRET, None).unwrap();
        let other = VerificationKey::from_secret(&[1; 32], None).unwrap();
        let published = Arc::new(PublishedKeys::new(|| {}));
        let cache = TokenCache::new(TokenVerifier::default(), vec!["sub".to_owned()], KeyHasher::new(Seed(1, 2), 0));
        let (cache, token) = (cache.with_published(Some(Arc::clone(&published))), token(r#"{"sub":"alice"}"#));
        let replace = |keys: &[&VerificationKey]| {
            let keys = keys.iter().map(|key| (*key).clone()).collect();
            published.replace(KeySet { keys, text: Arc::new([]), fetched_at_ms: 0 })
        };
        assert_eq!(sub(&cache, &token, 0), Err(TokenError::KeysUnavailable));
        assert!(published.take_wanted_refresh() && !published.take_wanted_refresh());
        assert!(replace(&[&key]));
        assert_eq!(sub(&cache, &token, 0), Ok(Some("alice".to_owned())));
        assert!(!replace(&[&key]), "the same keys");
        assert!(replace(&[&other, &key]));
        assert_eq!((sub(&cache, &token, 0), cached_tokens(&cache)), (Ok(Some("alice".to_owned())), 1));
        assert!(replace(&[&other]));
        assert_eq!((sub(&cache, &token, 0), cached_tokens(&cache)), (Err(TokenError::Signature), 0));
        assert!(replace(&[&key]));
        assert_eq!(sub(&cache, &token, 0), Ok(Some("alice".to_owned())));
        published.remove();
        assert_eq!((sub(&cache, &token, 0), cached_tokens(&cache)), (Err(TokenError::KeysUnavailable), 0));
    }

    #[test]
    fn a_token_is_not_cached_beyond_its_lifetime() {
        let (cache, token) = (cache(), token(r#"{"sub":"alice","exp":100}"#));
        assert_eq!(sub(&cache, &token, 99_999), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&cache, &token, 100_000), Err(TokenError::Expired));
        assert_eq!(sub(&cache, &token, 100_001), Err(TokenError::Expired));
        // The wall clock was ahead.
        assert_eq!(sub(&cache, &token, 99_999), Ok(Some("alice".to_owned())));
        let later = self::token(r#"{"sub":"bob","nbf":50}"#);
        assert_eq!(sub(&cache, &later, 50_000), Ok(Some("bob".to_owned())));
        assert_eq!(sub(&cache, &later, 49_999), Err(TokenError::NotYetValid));
    }

    #[test]
    fn the_last_rejected_token_is_verified_once_for_the_same_time() {
        let mut cache = cache();
        let forged = token(r#"{"sub":"alice"}"#).replace("eyJz", "eyJ0");
        assert_eq!(sub(&cache, &forged, 7), Err(TokenError::Signature));
        without_keys(&mut cache);
        assert_eq!(sub(&cache, &forged, 7), Err(TokenError::Signature));
        assert_eq!(sub(&cache, &forged, 8), Err(TokenError::UnknownKey));
    }

    #[test]
    fn rejected_and_overlong_tokens_are_not_cached() {
        let cache = cache();
        let other = token(r#"{"sub":"alice"}"#).replace("eyJz", "eyJ0");
        for token in ["", "a.b.c", &other, &token(r#"{"exp":0}"#), &token(r#"{"nbf":1}"#)] {
            assert!(sub(&cache, token, 0).is_err());
        }
        let long = "x".repeat(VALUES_MAX_BYTES + 1);
        assert_eq!(sub(&cache, &token(&format!(r#"{{"sub":"{long}"}}"#)), 0), Ok(Some(long)));
        assert_eq!(cached_tokens(&cache), 0);
        assert_eq!(sub(&cache, &token("{}"), 0), Ok(None), "valid, without the claim");
        assert_eq!(cached_tokens(&cache), 1);
    }

    #[test]
    fn the_size_is_bounded_and_tokens_in_use_remain() {
        let (mut cache, used) = (cache(), token(r#"{"sub":"alice"}"#));
        for n in 0..5 * GENERATION_MAX_TOKENS {
            sub(&cache, &token(&format!(r#"{{"sub":{n}}}"#)), 0).unwrap();
            if n % (GENERATION_MAX_TOKENS / 2) == 0 {
                sub(&cache, &used, 0).unwrap();
            }
            assert!(cached_tokens(&cache) <= 2 * GENERATION_MAX_TOKENS);
        }
        without_keys(&mut cache);
        assert_eq!(sub(&cache, &used, 0), Ok(Some("alice".to_owned())));
        assert_eq!(sub(&cache, &token(r#"{"sub":0}"#), 0), Err(TokenError::UnknownKey));
    }
}
