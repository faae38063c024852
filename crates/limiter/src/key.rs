//! Keys: their parts, and the hash that finds a counter.
//!
//! Parts are fed to a keyed hash (SipHash-1-3 with 128 bits of output; Aumasson and Bernstein, 2012) one by one, each
//! after its kind and length. So no two keys of a rule feed the same bytes, and clients cannot choose keys that collide
//! without knowing the seed.

use std::fmt;
use std::hash::{Hash, Hasher};

use siphasher::sip128::{Hasher128, SipHasher13};

/// One part of a key, as configured.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum KeyPart {
    /// The client's address, grouped by prefix.
    Ip {
        /// Prefix length of IPv4 addresses, at most 32.
        v4_prefix: u8,
        /// Prefix length of IPv6 addresses, at most 128.
        v6_prefix: u8,
    },
    /// A request field, by its lower-case name.
    Header(String),
    /// A cookie, by its name.
    Cookie(String),
    /// A parameter of the query, by its name when decoded.
    Query(String),
    /// A claim of the request's bearer token.
    Jwt(String),
    /// A parameter of the route's path.
    Param(String),
    /// The user name of Basic authentication. The password is not verified.
    BasicUser,
    /// The SHA-256 of the client's verified certificate.
    ClientCert,
    /// The host of the request.
    Host,
    /// The method of the request.
    Method,
    /// The normalized path.
    Path,
    /// The name of the route.
    Route,
    /// An entry of a descriptor, by its key. HTTP requests have none.
    Entry(String),
    /// One counter for all requests.
    Global,
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyPart::Ip { .. } => f.write_str("ip"),
            KeyPart::Header(name) => write!(f, "header:{name}"),
            KeyPart::Cookie(name) => write!(f, "cookie:{name}"),
            KeyPart::Query(name) => write!(f, "query:{name}"),
            KeyPart::Jwt(claim) => write!(f, "jwt:{claim}"),
            KeyPart::Param(name) => write!(f, "param:{name}"),
            KeyPart::BasicUser => f.write_str("basic-user"),
            KeyPart::ClientCert => f.write_str("client-cert"),
            KeyPart::Host => f.write_str("host"),
            KeyPart::Method => f.write_str("method"),
            KeyPart::Path => f.write_str("path"),
            KeyPart::Route => f.write_str("route"),
            KeyPart::Entry(name) => write!(f, "entry:{name}"),
            KeyPart::Global => f.write_str("global"),
        }
    }
}

/// What happens to a request that lacks a part of the key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OnMissing {
    /// All parts are always present.
    Never,
    /// The request is refused.
    Refuse,
    /// The rule does not apply to the request.
    Skip,
    /// The request is counted under this key instead.
    Fallback(Vec<KeyPart>),
}

/// The secret that keys the hash. Equal seeds find equal counters.
#[derive(Clone, Copy)]
pub struct Seed(pub u64, pub u64);

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Seed {
    /// The public seed for hashes on which all gateways agree.
    pub const SHARED: Seed = Seed(0, 0);

    /// The hash of texts with this seed.
    pub fn hash(self, texts: &[&str]) -> u64 {
        let mut hasher = KeyHasher::new(self, 0);
        for text in texts {
            hasher.add_part(0, text.as_bytes());
        }
        hasher.finish().bucket_hash
    }
}

/// The hash of a key under one rule. It identifies one counter in each of the rule's layers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KeyHash {
    /// Bits that select the buckets.
    pub bucket_hash: u64,
    /// Bits that distinguish the keys of a bucket.
    pub tag: u64,
}

/// Hashes the parts of one key in order.
#[derive(Clone, Debug)]
pub struct KeyHasher(SipHasher13);

impl KeyHasher {
    /// Starts the hash of a key. `rule` is the hash prefix of the rule, so that two rules never share a counter.
    #[inline]
    pub fn new(seed: Seed, rule: u64) -> KeyHasher {
        let mut hasher = SipHasher13::new_with_keys(seed.0, seed.1);
        hasher.write_u64(rule);
        KeyHasher(hasher)
    }

    /// Adds a part; `kind` distinguishes parts of different sources with equal bytes.
    #[inline]
    pub fn add_part(&mut self, kind: u8, bytes: &[u8]) {
        self.0.write_u64(u64::from(kind) << 56 | bytes.len() as u64);
        self.0.write(bytes);
    }

    /// Adds a key of any type that can be hashed.
    pub fn add<K: Hash + ?Sized>(&mut self, key: &K) {
        key.hash(&mut self.0);
    }

    /// The hash of all parts.
    #[inline]
    pub fn finish(self) -> KeyHash {
        let hash = self.0.finish128();
        KeyHash { bucket_hash: hash.h1, tag: hash.h2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(rule: u64, parts: &[(u8, &[u8])]) -> KeyHash {
        let mut hasher = KeyHasher::new(Seed(1, 2), rule);
        for (kind, bytes) in parts {
            hasher.add_part(*kind, bytes);
        }
        hasher.finish()
    }

    #[test]
    fn keys_with_equal_concatenations_differ() {
        let all = [
            hash(1, &[(1, b"ab"), (1, b"c")]),
            hash(1, &[(1, b"a"), (1, b"bc")]),
            hash(1, &[(1, b"abc")]),
            hash(1, &[(2, b"abc")]),
            hash(1, &[(1, b"abc"), (1, b"")]),
            hash(2, &[(1, b"abc")]),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert!(a.bucket_hash != b.bucket_hash && a.tag != b.tag);
            }
        }
    }

    #[test]
    fn equal_keys_with_equal_seeds_have_equal_hashes() {
        assert_eq!(hash(7, &[(1, b"10.0.0.1")]), hash(7, &[(1, b"10.0.0.1")]));
    }
}
