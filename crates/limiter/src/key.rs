//! Keys: their parts, and the hash that finds a counter.
//!
//! Parts are fed to a keyed hash (SipHash-1-3 with 128 bits of output; Aumasson and Bernstein, 2012) one by one, each
//! after its kind and length. So no two keys of a rule feed the same bytes, and clients cannot choose keys that collide
//! without knowing the seed.

use std::fmt;
use std::hash::{Hash, Hasher};

use siphasher::sip128::{Hasher128, SipHasher13};

/// A kind of key parts, such as the fields of requests. The user of this crate defines the kinds and reads their values; here,
/// they are only compared.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PartKind {
    /// The name in texts for people: `header` in `header:x-user`.
    pub name: &'static str,
    /// The name in identities of counters, see [`crate::identity`]. A changed name gives every key unused counters.
    pub identity: &'static str,
    /// The number in hashes of keys, see [`KeyHasher::add_part`]. A changed number gives every key unused counters.
    pub number: u8,
}

impl PartKind {
    /// The kind of [`KeyPart::GLOBAL`].
    pub const GLOBAL: PartKind = PartKind { name: "global", identity: "Global", number: 9 };
}

/// One part of a key, as configured.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KeyPart {
    /// The kind of the part.
    pub kind: &'static PartKind,
    /// What the configuration adds to the kind.
    pub argument: PartArgument,
}

/// What the configuration adds to the kind of a part.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum PartArgument {
    /// There is one part of the kind.
    None,
    /// The name of what is read, such as that of a field.
    Name(String),
    /// How addresses are grouped.
    Prefixes(Prefixes),
}

/// How many leading bits of an address are counted: addresses with the same leading bits are one client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prefixes {
    /// Prefix length of IPv4 addresses, at most 32.
    pub v4: u8,
    /// Prefix length of IPv6 addresses, at most 128.
    pub v6: u8,
}

impl KeyPart {
    /// One counter for all requests.
    pub const GLOBAL: KeyPart = KeyPart { kind: &PartKind::GLOBAL, argument: PartArgument::None };

    /// The name of what is read, if the kind has names.
    pub fn name(&self) -> Option<&str> {
        match &self.argument {
            PartArgument::Name(name) => Some(name),
            PartArgument::None | PartArgument::Prefixes(_) => None,
        }
    }

    /// How addresses are grouped, if the part is an address.
    pub fn prefixes(&self) -> Option<Prefixes> {
        match self.argument {
            PartArgument::Prefixes(prefixes) => Some(prefixes),
            PartArgument::None | PartArgument::Name(_) => None,
        }
    }
}

/// As in the configuration, without prefixes.
impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{}:{name}", self.kind.name),
            None => f.write_str(self.kind.name),
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
