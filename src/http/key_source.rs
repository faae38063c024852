//! Where the parts of a key are found in a request.
//!
//! A part is handed on piece by piece as it stands there, to be hashed or looked up: nothing is
//! copied. The same is worked out here for what the configuration says a part may be.

use std::borrow::Cow;
use std::net::IpAddr;

use http::header::HeaderName;

use super::percent_decode::InvalidEscape;
use super::query::Occurrence;
use super::rate_limit_key::RequestAttributes;
use super::{bearer, cookie, query};
use crate::jwt::token::TokenError;
use transom_limiter::ip_prefix::canonical_address;
use transom_limiter::key::KeyPart;

/// Where a part is found.
#[derive(Debug)]
pub enum KeySource {
    Ip {
        v4_prefix: u8,
        v6_prefix: u8,
    },
    Header(HeaderName),
    Cookie(String),
    Query(String),
    /// By the name of the claim.
    Jwt(String),
    /// By the parameter's position in the route's path.
    Param(usize),
    /// No request of the route has it.
    Unavailable,
    ClientCert,
    Host,
    Method,
    Path,
    Route,
    Global,
}

/// Why a part could not be had.
pub enum KeyError {
    Missing,
    Ambiguous,
    /// More than one Authorization, whichever claim of its token is asked for.
    RepeatedAuthorization,
    InvalidEscape,
    Token(TokenError),
}

impl KeySource {
    /// `params` are the names of the route's parameters, in their order.
    pub fn new(part: &KeyPart, params: &[&str]) -> KeySource {
        match part {
            KeyPart::Ip { v4_prefix, v6_prefix } => KeySource::Ip { v4_prefix: *v4_prefix, v6_prefix: *v6_prefix },
            // The configuration has been checked; what can be no name is in no request.
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
            KeyPart::ClientCert => KeySource::ClientCert,
            KeyPart::Host => KeySource::Host,
            KeyPart::Method => KeySource::Method,
            KeyPart::Path => KeySource::Path,
            KeyPart::Route => KeySource::Route,
            KeyPart::Global => KeySource::Global,
        }
    }

    /// Hands on the part of a request, and of what kind it is.
    #[inline]
    pub fn feed(&self, caller: &RequestAttributes<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), KeyError> {
        match self {
            KeySource::Ip { v4_prefix, v6_prefix } => feed_address(caller.address, *v4_prefix, *v6_prefix, take),
            KeySource::Header(name) => {
                let mut values = caller.headers.get_all(name).iter();
                match (values.next(), values.next()) {
                    (Some(value), None) if !value.is_empty() => take(3, value.as_bytes()),
                    (None, _) | (Some(_), None) => return Err(KeyError::Missing),
                    (Some(_), Some(_)) => return Err(KeyError::Ambiguous),
                }
            }
            KeySource::Param(position) => {
                let range = caller.params.get(*position).ok_or(KeyError::Missing)?;
                take(4, caller.path[range.clone()].as_bytes());
            }
            KeySource::Unavailable => return Err(KeyError::Missing),
            KeySource::ClientCert => take(13, caller.client_cert.ok_or(KeyError::Missing)?.as_bytes()),
            KeySource::Host => take(5, caller.host.as_bytes()),
            KeySource::Method => take(6, caller.method.as_str().as_bytes()),
            KeySource::Path => take(7, caller.path.as_bytes()),
            KeySource::Route => take(8, caller.route.as_bytes()),
            KeySource::Global => take(9, b""),
            KeySource::Cookie(name) => take(10, &single(cookie::cookie(caller.headers, name))?),
            KeySource::Query(name) => {
                let query = caller.uri.query().unwrap_or_default();
                take(
                    11,
                    &single(query::query_parameter(query, name).map_err(|InvalidEscape| KeyError::InvalidEscape)?)?,
                );
            }
            KeySource::Jwt(claim) => {
                let token = bearer::bearer_token(caller.headers)
                    .map_err(|bearer::DuplicateAuthorization| KeyError::RepeatedAuthorization)?;
                let take = |value: &str| take(12, value.as_bytes());
                let token = token.ok_or(KeyError::Missing)?;
                if !caller.tokens.with_claim(token, claim, caller.wall_ms, take).map_err(KeyError::Token)? {
                    return Err(KeyError::Missing);
                }
            }
        }
        Ok(())
    }
}

fn single(given: Occurrence<'_>) -> Result<Cow<'_, [u8]>, KeyError> {
    match given {
        Occurrence::Single(value) => Ok(value),
        Occurrence::Absent => Err(KeyError::Missing),
        Occurrence::Repeated => Err(KeyError::Ambiguous),
    }
}

/// Hands on as much of an address as is counted.
#[inline]
pub fn feed_address(address: IpAddr, v4_prefix: u8, v6_prefix: u8, take: &mut impl FnMut(u8, &[u8])) {
    match canonical_address(address) {
        IpAddr::V4(v4) => take(1, &mask_host_bits(v4.to_bits(), 32 - v4_prefix).to_be_bytes()),
        IpAddr::V6(v6) => take(2, &mask_host_bits(v6.to_bits(), 128 - v6_prefix).to_be_bytes()),
    }
}

/// The kind of a part, as [`KeySource::feed`] tells it; addresses are of two, and tell it themselves.
pub fn part_kind(part: &KeyPart) -> u8 {
    match part {
        KeyPart::Ip { .. } => 1,
        KeyPart::Header(_) => 3,
        KeyPart::Param(_) => 4,
        KeyPart::Host => 5,
        KeyPart::Method => 6,
        KeyPart::Path => 7,
        KeyPart::Route => 8,
        KeyPart::Global => 9,
        KeyPart::Cookie(_) => 10,
        KeyPart::Query(_) => 11,
        KeyPart::Jwt(_) => 12,
        KeyPart::ClientCert => 13,
    }
}

/// Clears the last `host_bits` bits of an address.
fn mask_host_bits<T>(bits: T, host_bits: u8) -> T
where
    T: Copy + Default + std::ops::Shr<u8, Output = T> + std::ops::Shl<u8, Output = T>,
{
    if usize::from(host_bits) >= size_of::<T>() * 8 { T::default() } else { (bits >> host_bits) << host_bits }
}
