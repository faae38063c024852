//! Which requests belong to the same server: a hash of parts of the request, for upstreams that choose
//! by one.
//!
//! The parts are those of a rule's key, found in the same way. The hash is the same on every gateway,
//! and nothing secret: it says who is served together, and not who is counted together.

use std::num::NonZeroU64;

use super::key_source::KeySource;
use super::rate_limit_key::RequestAttributes;
use crate::config::upstream::LoadBalancing;
use transom_limiter::key::{KeyHasher, Seed};

/// Where the parts of an upstream's hash are found.
#[derive(Debug)]
pub struct HashKey(Vec<KeySource>);

impl HashKey {
    /// `None` for an upstream that does not choose by a hash.
    pub fn new(balance: &LoadBalancing) -> Option<HashKey> {
        match balance {
            // No part is a parameter of a route's path: the configuration has been checked.
            LoadBalancing::Hash(parts) => Some(HashKey(parts.iter().map(|part| KeySource::new(part, &[])).collect())),
            LoadBalancing::LeastRequests | LoadBalancing::RoundRobin => None,
        }
    }

    /// The hash; `None` if the request lacks a part, or gives one twice.
    pub fn hash(&self, caller: &RequestAttributes<'_>) -> Option<NonZeroU64> {
        let mut hasher = KeyHasher::new(Seed::SHARED, 0);
        for part in &self.0 {
            part.feed(caller, &mut |kind, bytes| hasher.add_part(kind, bytes)).ok()?;
        }
        // One bit less, so that an absent hash takes no room in every request's future.
        NonZeroU64::new(hasher.finish().bucket_hash | 1)
    }
}
