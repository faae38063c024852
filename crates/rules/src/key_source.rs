//! Finds the parts of a rate-limit key, or of a load balancing hash, in a request.
//!
//! A part is fed to a closure as borrowed bytes, to be hashed or looked up; only values that have to be decoded are
//! copied. [`KeySource`] is compiled once from the [`KeyPart`] of the configuration.

use std::borrow::Cow;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::ops::Range;

use http::header::{HeaderMap, HeaderName};
use http::{Method, Uri};

use transom_config::upstream::LoadBalancing;
use transom_http::request_values::{CredentialsError, DuplicateAuthorization, InvalidEscape, Occurrence};
use transom_http::request_values::{basic_user, bearer_token, cookie, query_parameter};
use transom_jwt::cache::TokenCache;
use transom_jwt::token::TokenError;
use transom_limiter::ip_prefix::canonical_address;
use transom_limiter::key::{KeyHasher, KeyPart, Seed};

/// What keys can be made of in a request, before any header field is added or removed.
pub struct RequestAttributes<'a> {
    /// The address of the client.
    pub address: IpAddr,
    /// The fingerprint of the client's verified certificate: SHA-256, in lower-case hex.
    pub client_cert: Option<&'a str>,
    pub host: &'a str,
    pub method: &'a Method,
    /// Normalized.
    pub path: &'a str,
    /// The values of the route's path parameters, as ranges of `path`.
    pub params: &'a [Range<usize>],
    /// The target as received, for its query.
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    /// The name of the route.
    pub route: &'a str,
    /// Verifies tokens.
    pub tokens: &'a TokenCache,
    /// Wall clock in Unix milliseconds, for the validity of tokens; 0 if no tokens are configured.
    pub wall_ms: u64,
}

/// Where one part of a key is found.
#[derive(Debug)]
pub enum KeySource {
    Ip {
        v4_prefix: u8,
        v6_prefix: u8,
    },
    Header(HeaderName),
    Cookie(String),
    Query(String),
    /// The name of a claim.
    Jwt(String),
    /// The position of a parameter in the path of the route.
    Param(usize),
    /// No request of the route has the part.
    Unavailable,
    BasicUser,
    ClientCert,
    Host,
    Method,
    Path,
    Route,
    Global,
}

/// The kind of a part in the hash of a key. The numbers must not change, because stored counters depend on them.
pub mod kind {
    pub const IPV4: u8 = 1;
    pub const IPV6: u8 = 2;
    pub const HEADER: u8 = 3;
    pub const PARAM: u8 = 4;
    pub const HOST: u8 = 5;
    pub const METHOD: u8 = 6;
    pub const PATH: u8 = 7;
    pub const ROUTE: u8 = 8;
    pub const GLOBAL: u8 = 9;
    pub const COOKIE: u8 = 10;
    pub const QUERY: u8 = 11;
    pub const JWT: u8 = 12;
    pub const CLIENT_CERT: u8 = 13;
    pub const BASIC_USER: u8 = 14;
    pub const ENTRY: u8 = 15;
}

/// Why a request has no usable value for a part.
pub enum KeyError {
    Missing,
    /// The part occurs more than once. The upstream might use the other value.
    Ambiguous,
    /// More than one `Authorization` field.
    RepeatedAuthorization,
    /// The credentials of Basic authentication are not Base64. Servers decode them differently.
    MalformedCredentials,
    InvalidEscape,
    /// The value of a field or cookie has bytes outside of printable ASCII. Servers decode such bytes differently, and many
    /// of them are invisible.
    NotPrintable,
    /// The part names no client, and the rule refuses such keys.
    Unknown,
    Token(TokenError),
}

impl KeySource {
    /// `params` are the names of the route's path parameters, in path order.
    pub fn new(part: &KeyPart, params: &[&str]) -> KeySource {
        match part {
            KeyPart::Ip { v4_prefix, v6_prefix } => KeySource::Ip { v4_prefix: *v4_prefix, v6_prefix: *v6_prefix },
            // The configuration check rejects invalid names; no request has a field of such a name.
            KeyPart::Header(name) => {
                HeaderName::from_bytes(name.as_bytes()).map_or(KeySource::Unavailable, KeySource::Header)
            }
            KeyPart::Cookie(name) => KeySource::Cookie(name.clone()),
            KeyPart::Query(name) => KeySource::Query(name.clone()),
            KeyPart::Jwt(claim) => KeySource::Jwt(claim.clone()),
            KeyPart::Param(name) => {
                let position = params.iter().position(|known| known == name);
                position.map_or(KeySource::Unavailable, KeySource::Param)
            }
            KeyPart::BasicUser => KeySource::BasicUser,
            KeyPart::ClientCert => KeySource::ClientCert,
            KeyPart::Host => KeySource::Host,
            KeyPart::Method => KeySource::Method,
            KeyPart::Path => KeySource::Path,
            KeyPart::Route => KeySource::Route,
            // The configuration check rejects such rules on routes.
            KeyPart::Entry(_) => KeySource::Unavailable,
            KeyPart::Global => KeySource::Global,
        }
    }

    /// Calls `take` once with the kind of the part (see [`part_kind`]) and its value.
    #[inline]
    pub fn feed(&self, request: &RequestAttributes<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), KeyError> {
        match self {
            KeySource::Ip { v4_prefix, v6_prefix } => feed_address(request.address, *v4_prefix, *v6_prefix, take),
            KeySource::Header(name) => {
                let mut values = request.headers.get_all(name).iter();
                match (values.next(), values.next()) {
                    (Some(value), None) if !value.is_empty() => take(kind::HEADER, value.as_bytes()),
                    (None, _) | (Some(_), None) => return Err(KeyError::Missing),
                    (Some(_), Some(_)) => return Err(KeyError::Ambiguous),
                }
            }
            KeySource::Param(position) => {
                let range = request.params.get(*position).ok_or(KeyError::Missing)?;
                take(kind::PARAM, request.path[range.clone()].as_bytes());
            }
            KeySource::Unavailable => return Err(KeyError::Missing),
            KeySource::ClientCert => take(kind::CLIENT_CERT, request.client_cert.ok_or(KeyError::Missing)?.as_bytes()),
            KeySource::Host => take(kind::HOST, request.host.as_bytes()),
            KeySource::Method => take(kind::METHOD, request.method.as_str().as_bytes()),
            KeySource::Path => take(kind::PATH, request.path.as_bytes()),
            KeySource::Route => take(kind::ROUTE, request.route.as_bytes()),
            KeySource::Global => take(kind::GLOBAL, b""),
            KeySource::Cookie(name) => take(kind::COOKIE, &single(cookie(request.headers, name))?),
            KeySource::Query(name) => {
                let query = request.uri.query().unwrap_or_default();
                let value = query_parameter(query, name).map_err(|InvalidEscape| KeyError::InvalidEscape)?;
                take(kind::QUERY, &single(value)?);
            }
            KeySource::BasicUser => {
                let user = basic_user(request.headers).map_err(|error| match error {
                    CredentialsError::Repeated => KeyError::RepeatedAuthorization,
                    CredentialsError::Malformed => KeyError::MalformedCredentials,
                });
                let user = user?.ok_or(KeyError::Missing)?;
                take(kind::BASIC_USER, &user);
            }
            KeySource::Jwt(claim) => {
                let token = bearer_token(request.headers)
                    .map_err(|DuplicateAuthorization| KeyError::RepeatedAuthorization)?
                    .ok_or(KeyError::Missing)?;
                let take = |value: &str| take(kind::JWT, value.as_bytes());
                if !request.tokens.with_claim(token, claim, request.wall_ms, take).map_err(KeyError::Token)? {
                    return Err(KeyError::Missing);
                }
            }
        }
        Ok(())
    }
}

impl KeySource {
    /// As [`KeySource::feed`], for a value that identifies a client. If it returns an error, `take` may have been called.
    #[inline]
    pub fn feed_key(&self, request: &RequestAttributes<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), KeyError> {
        let mut is_usable = true;
        self.feed(request, &mut |kind, value| {
            is_usable &= is_usable_key(kind, value);
            take(kind, value);
        })?;
        if is_usable { Ok(()) } else { Err(KeyError::NotPrintable) }
    }
}

/// Whether the value of a part can be counted: that of a field or cookie must be printable ASCII.
pub fn is_usable_key(part_kind: u8, value: &[u8]) -> bool {
    !matches!(part_kind, kind::HEADER | kind::COOKIE) || value.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

fn single(occurrence: Occurrence<'_>) -> Result<Cow<'_, [u8]>, KeyError> {
    match occurrence {
        Occurrence::Single(value) => Ok(value),
        Occurrence::Absent => Err(KeyError::Missing),
        Occurrence::Repeated => Err(KeyError::Ambiguous),
    }
}

/// Feeds the network part of an address.
#[inline]
pub fn feed_address(address: IpAddr, v4_prefix: u8, v6_prefix: u8, take: &mut impl FnMut(u8, &[u8])) {
    match canonical_address(address) {
        IpAddr::V4(v4) => take(kind::IPV4, &mask_host_bits(v4.to_bits(), 32 - v4_prefix).to_be_bytes()),
        IpAddr::V6(v6) => take(kind::IPV6, &mask_host_bits(v6.to_bits(), 128 - v6_prefix).to_be_bytes()),
    }
}

/// The kind that [`KeySource::feed`] reports for a part; of an address, the kind of IPv4.
pub fn part_kind(part: &KeyPart) -> u8 {
    match part {
        KeyPart::Ip { .. } => kind::IPV4,
        KeyPart::Header(_) => kind::HEADER,
        KeyPart::Param(_) => kind::PARAM,
        KeyPart::Host => kind::HOST,
        KeyPart::Method => kind::METHOD,
        KeyPart::Path => kind::PATH,
        KeyPart::Route => kind::ROUTE,
        KeyPart::Entry(_) => kind::ENTRY,
        KeyPart::Global => kind::GLOBAL,
        KeyPart::Cookie(_) => kind::COOKIE,
        KeyPart::Query(_) => kind::QUERY,
        KeyPart::Jwt(_) => kind::JWT,
        KeyPart::BasicUser => kind::BASIC_USER,
        KeyPart::ClientCert => kind::CLIENT_CERT,
    }
}

/// Clears the last `host_bits` bits of an address.
fn mask_host_bits<T>(bits: T, host_bits: u8) -> T
where
    T: Copy + Default + std::ops::Shr<u8, Output = T> + std::ops::Shl<u8, Output = T>,
{
    if usize::from(host_bits) >= size_of::<T>() * 8 { T::default() } else { (bits >> host_bits) << host_bits }
}

/// The parts that an upstream with hash load balancing chooses a server by.
#[derive(Debug)]
pub struct HashKey(Vec<KeySource>);

impl HashKey {
    /// `None` for an upstream with another balancing policy.
    pub fn new(balance: &LoadBalancing) -> Option<HashKey> {
        match balance {
            // The configuration check rejects path parameters here.
            LoadBalancing::Hash(parts) => Some(HashKey(parts.iter().map(|part| KeySource::new(part, &[])).collect())),
            LoadBalancing::LeastRequests | LoadBalancing::RoundRobin => None,
        }
    }

    /// The hash of the parts; `None` if the request lacks one or has one twice. The hash is equal on all gateways, so that
    /// they choose the same server. It is not secret, and not the hash that finds counters.
    pub fn hash(&self, request: &RequestAttributes<'_>) -> Option<NonZeroU64> {
        let mut hasher = KeyHasher::new(Seed::SHARED, 0);
        for part in &self.0 {
            part.feed(request, &mut |kind, bytes| hasher.add_part(kind, bytes)).ok()?;
        }
        // Never zero, so that an `Option` of the hash takes no extra byte in the future of each request.
        NonZeroU64::new(hasher.finish().bucket_hash | 1)
    }
}
