//! Where the parts of a key are found in a request.
//!
//! A part is handed on piece by piece as it stands there, to be hashed or looked up: nothing is
//! copied. The same is worked out here for what the configuration says a part may be.

use std::borrow::Cow;
use std::net::IpAddr;

use http::header::HeaderName;

use super::percent_decode::Malformed;
use super::query::Given;
use super::rate_limit_key::Caller;
use super::{bearer, cookie, query};
use crate::jwt::Invalid;
use transom_limiter::ip_prefix::counted;
use transom_limiter::key::Part;

/// Where a part is found.
#[derive(Debug)]
pub enum Source {
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
    Nowhere,
    ClientCert,
    Host,
    Method,
    Path,
    Route,
    Global,
}

/// Why a part could not be had.
pub enum Lack {
    Missing,
    Ambiguous,
    /// More than one Authorization, whichever claim of its token is asked for.
    Authorizations,
    Escape,
    Token(Invalid),
}

impl Source {
    /// `params` are the names of the route's parameters, in their order.
    pub fn new(part: &Part, params: &[&str]) -> Source {
        match part {
            Part::Ip { v4_prefix, v6_prefix } => Source::Ip { v4_prefix: *v4_prefix, v6_prefix: *v6_prefix },
            // The configuration has been checked; what can be no name is in no request.
            Part::Header(name) => HeaderName::from_bytes(name.as_bytes()).map_or(Source::Nowhere, Source::Header),
            Part::Cookie(name) => Source::Cookie(name.clone()),
            Part::Query(name) => Source::Query(name.clone()),
            Part::Jwt(claim) => Source::Jwt(claim.clone()),
            Part::Param(name) => {
                let position = params.iter().position(|known| known == name);
                position.map_or(Source::Nowhere, Source::Param)
            }
            Part::ClientCert => Source::ClientCert,
            Part::Host => Source::Host,
            Part::Method => Source::Method,
            Part::Path => Source::Path,
            Part::Route => Source::Route,
            Part::Global => Source::Global,
        }
    }

    /// Hands on the part of a request, and of what kind it is.
    #[inline]
    pub fn feed(&self, caller: &Caller<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), Lack> {
        match self {
            Source::Ip { v4_prefix, v6_prefix } => address(caller.address, *v4_prefix, *v6_prefix, take),
            Source::Header(name) => {
                let mut values = caller.headers.get_all(name).iter();
                match (values.next(), values.next()) {
                    (Some(value), None) if !value.is_empty() => take(3, value.as_bytes()),
                    (None, _) | (Some(_), None) => return Err(Lack::Missing),
                    (Some(_), Some(_)) => return Err(Lack::Ambiguous),
                }
            }
            Source::Param(position) => {
                let range = caller.params.get(*position).ok_or(Lack::Missing)?;
                take(4, caller.path[range.clone()].as_bytes());
            }
            Source::Nowhere => return Err(Lack::Missing),
            Source::ClientCert => take(13, caller.client_cert.ok_or(Lack::Missing)?.as_bytes()),
            Source::Host => take(5, caller.host.as_bytes()),
            Source::Method => take(6, caller.method.as_str().as_bytes()),
            Source::Path => take(7, caller.path.as_bytes()),
            Source::Route => take(8, caller.route.as_bytes()),
            Source::Global => take(9, b""),
            Source::Cookie(name) => take(10, &once(cookie::named(caller.headers, name))?),
            Source::Query(name) => {
                let query = caller.uri.query().unwrap_or_default();
                take(11, &once(query::parameter(query, name).map_err(|Malformed| Lack::Escape)?)?);
            }
            Source::Jwt(claim) => {
                let token = bearer::token(caller.headers).map_err(|bearer::Twice| Lack::Authorizations)?;
                let take = |value: &str| take(12, value.as_bytes());
                let token = token.ok_or(Lack::Missing)?;
                if !caller.tokens.claim(token, claim, caller.wall_ms, take).map_err(Lack::Token)? {
                    return Err(Lack::Missing);
                }
            }
        }
        Ok(())
    }
}

fn once(given: Given<'_>) -> Result<Cow<'_, [u8]>, Lack> {
    match given {
        Given::Once(value) => Ok(value),
        Given::Nothing => Err(Lack::Missing),
        Given::Twice => Err(Lack::Ambiguous),
    }
}

/// Hands on as much of an address as is counted.
#[inline]
pub fn address(address: IpAddr, v4_prefix: u8, v6_prefix: u8, take: &mut impl FnMut(u8, &[u8])) {
    match counted(address) {
        IpAddr::V4(v4) => take(1, &prefix(v4.to_bits(), 32 - v4_prefix).to_be_bytes()),
        IpAddr::V6(v6) => take(2, &prefix(v6.to_bits(), 128 - v6_prefix).to_be_bytes()),
    }
}

/// The kind of a part, as [`Source::feed`] tells it; addresses are of two, and tell it themselves.
pub fn kind(part: &Part) -> u8 {
    match part {
        Part::Ip { .. } => 1,
        Part::Header(_) => 3,
        Part::Param(_) => 4,
        Part::Host => 5,
        Part::Method => 6,
        Part::Path => 7,
        Part::Route => 8,
        Part::Global => 9,
        Part::Cookie(_) => 10,
        Part::Query(_) => 11,
        Part::Jwt(_) => 12,
        Part::ClientCert => 13,
    }
}

/// Clears the last `host_bits` bits of an address.
fn prefix<T>(bits: T, host_bits: u8) -> T
where
    T: Copy + Default + std::ops::Shr<u8, Output = T> + std::ops::Shl<u8, Output = T>,
{
    if usize::from(host_bits) >= size_of::<T>() * 8 { T::default() } else { (bits >> host_bits) << host_bits }
}
