//! Finds the parts of a rate-limit key, or of a load balancing hash, in a request.
//!
//! A part is fed to a closure as borrowed bytes, to be hashed or looked up; only values that have to be decoded are
//! copied. [`KeySource`] is compiled once from the [`KeyPart`] of the configuration. All else that is known of the kinds of
//! parts is in the table [`transom_config::key_kind`].

use std::borrow::Cow;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::ops::Range;

use http::header::{HeaderMap, HeaderName};
use http::{Method, Uri};

use transom_config::key_kind::number as kind;
use transom_config::upstream::LoadBalancing;
use transom_http::client_address::{ClientAddress, UNIX};
use transom_http::request_values::{
    CredentialsError, DuplicateAuthorization, InvalidEscape, Occurrence, basic_user, bearer_token, cookie,
    query_parameter,
};
use transom_jwt::cache::TokenCache;
use transom_jwt::token::TokenError;
use transom_limiter::ip_prefix::canonical_address;
use transom_limiter::key::{KeyHasher, KeyPart, Prefixes, Seed};
use transom_usage::json_pointer::JsonPointer;
use transom_usage::request_body::BodyValues;
use transom_usage::values::Text;

/// What keys can be made of in a request, before any header field is added or removed.
pub struct RequestAttributes<'a> {
    /// The address of the client.
    pub address: ClientAddress,
    pub connection: ConnectionValues<'a>,
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
    /// What was read of the body; `None` for requests without a body, and of routes whose rules read none.
    pub body: Option<&'a BodyValues>,
}

/// What keys can be made of in the connection of a request. Where the connection is not known, all of it is missing.
#[derive(Clone, Copy, Default)]
pub struct ConnectionValues<'a> {
    /// The client's verified certificate.
    pub client_cert: Option<&'a ClientCertificate>,
}

/// What keys can be made of in a verified certificate.
#[derive(Debug)]
pub struct ClientCertificate {
    /// SHA-256, in lower-case hex.
    pub fingerprint: Cow<'static, str>,
    /// The first name of subjectAltName.
    pub san: Option<Cow<'static, str>>,
    /// The common name.
    pub cn: Option<Cow<'static, str>>,
}

/// Where one part of a key is found.
#[derive(Debug)]
pub enum KeySource {
    Ip(Prefixes),
    Header(HeaderName),
    Cookie(String),
    Query(String),
    /// The token of `Authorization: Bearer`.
    Bearer,
    /// The name of a claim.
    Jwt(String),
    /// A value of the JSON body.
    Json(JsonPointer),
    /// The position of a parameter in the path of the route.
    Param(usize),
    /// No request of the route has the part.
    Unavailable,
    BasicUser,
    ClientCert,
    ClientCertSan,
    ClientCertCn,
    Host,
    Method,
    Path,
    Route,
    Global,
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
    /// The value of the body is too long, not Unicode, or a number of another form.
    UnreadableMember,
    /// The part names no client, and the rule refuses such keys.
    Unknown,
    Token(TokenError),
}

impl KeySource {
    /// `params` are the names of the route's path parameters, in path order.
    pub fn new(part: &KeyPart, params: &[&str]) -> KeySource {
        let name = part.name().unwrap_or_default();
        match part.kind.number {
            kind::IPV4 => part.prefixes().map_or(KeySource::Unavailable, KeySource::Ip),
            // The configuration check rejects invalid names; no request has a field of such a name.
            kind::HEADER => HeaderName::from_bytes(name.as_bytes()).map_or(KeySource::Unavailable, KeySource::Header),
            kind::COOKIE => KeySource::Cookie(name.to_owned()),
            kind::QUERY => KeySource::Query(name.to_owned()),
            kind::BEARER => KeySource::Bearer,
            kind::JWT => KeySource::Jwt(name.to_owned()),
            // The configuration check rejects invalid pointers.
            kind::JSON => JsonPointer::parse(name).map_or(KeySource::Unavailable, KeySource::Json),
            kind::PARAM => {
                let position = params.iter().position(|known| *known == name);
                position.map_or(KeySource::Unavailable, KeySource::Param)
            }
            kind::BASIC_USER => KeySource::BasicUser,
            kind::CLIENT_CERT => KeySource::ClientCert,
            kind::CLIENT_CERT_SAN => KeySource::ClientCertSan,
            kind::CLIENT_CERT_CN => KeySource::ClientCertCn,
            kind::HOST => KeySource::Host,
            kind::METHOD => KeySource::Method,
            kind::PATH => KeySource::Path,
            kind::ROUTE => KeySource::Route,
            kind::GLOBAL => KeySource::Global,
            // A client, which `client_plans` finds, or an entry of a descriptor: the configuration check rejects rules by
            // entries on routes.
            _ => KeySource::Unavailable,
        }
    }

    /// Calls `take` once with the number of the kind of the part and its value.
    #[inline]
    pub fn feed(&self, request: &RequestAttributes<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), KeyError> {
        match self {
            KeySource::Ip(prefixes) => feed_address(request.address, *prefixes, take),
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
            KeySource::ClientCert => {
                let certificate = request.connection.client_cert.ok_or(KeyError::Missing)?;
                take(kind::CLIENT_CERT, certificate.fingerprint.as_bytes());
            }
            KeySource::ClientCertSan => {
                let name = request.connection.client_cert.and_then(|certificate| certificate.san.as_deref());
                take(kind::CLIENT_CERT_SAN, name.ok_or(KeyError::Missing)?.as_bytes());
            }
            KeySource::ClientCertCn => {
                let name = request.connection.client_cert.and_then(|certificate| certificate.cn.as_deref());
                take(kind::CLIENT_CERT_CN, name.ok_or(KeyError::Missing)?.as_bytes());
            }
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
            KeySource::Json(pointer) => match request.body.map_or(Text::Absent, |body| body.text(pointer)) {
                Text::Absent | Text::Found("") => return Err(KeyError::Missing),
                Text::Unreadable => return Err(KeyError::UnreadableMember),
                Text::Found(text) => take(kind::JSON, text.as_bytes()),
            },
            KeySource::Bearer => match bearer_of(request)? {
                b"" => return Err(KeyError::Missing),
                token => take(kind::BEARER, token),
            },
            KeySource::Jwt(claim) => {
                let token = bearer_of(request)?;
                let take = |value: &str| take(kind::JWT, value.as_bytes());
                match request.tokens.with_claim(token, claim, request.wall_ms, take) {
                    Ok(true) => {}
                    Ok(false) => return Err(KeyError::Missing),
                    Err(TokenError::Malformed) if request.tokens.has_api_keys_beside => return Err(KeyError::Missing),
                    Err(error) => return Err(KeyError::Token(error)),
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

fn bearer_of<'a>(request: &RequestAttributes<'a>) -> Result<&'a [u8], KeyError> {
    let token = bearer_token(request.headers).map_err(|DuplicateAuthorization| KeyError::RepeatedAuthorization)?;
    token.ok_or(KeyError::Missing)
}

/// Whether the value of a part can be counted: that of a field or cookie must be printable ASCII.
pub fn is_usable_key(part_kind: u8, value: &[u8]) -> bool {
    !matches!(part_kind, kind::HEADER | kind::COOKIE | kind::BEARER)
        || value.iter().all(|byte| matches!(byte, b' '..=b'~'))
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
pub fn feed_address(address: ClientAddress, prefixes: Prefixes, take: &mut impl FnMut(u8, &[u8])) {
    let ClientAddress::Ip(address) = address else { return take(kind::UNIX, UNIX.as_bytes()) };
    match canonical_address(address) {
        IpAddr::V4(v4) => take(kind::IPV4, &mask_host_bits(v4.to_bits(), 32 - prefixes.v4).to_be_bytes()),
        IpAddr::V6(v6) => take(kind::IPV6, &mask_host_bits(v6.to_bits(), 128 - prefixes.v6).to_be_bytes()),
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::overrides::{feed_part, feed_text};
    use crate::rate_limit_key::tests::{SEED, with_request};
    use crate::store_key_text::tests::{headers, token, tokens};
    use transom_config::key::parse_part;
    use transom_config::key_kind::{Argument, BEARER, CLIENT, ENTRY, JWT, KINDS, KeyKind, ValueForm};
    use transom_usage::request_body::{BodyCoding, BodyPlan};

    /// The connection of the requests in tests. It has everything.
    pub const CONNECTION: ConnectionValues<'_> = ConnectionValues { client_cert: Some(&CERTIFICATE) };
    static CERTIFICATE: ClientCertificate = ClientCertificate {
        fingerprint: Cow::Borrowed("f00d"),
        san: Some(Cow::Borrowed("spiffe://example/api")),
        cn: Some(Cow::Borrowed("api")),
    };

    /// What a part is in a request that has all parts.
    fn fed(kind: &KeyKind, part: &KeyPart) -> Vec<(u8, Vec<u8>)> {
        let bearer = format!("Bearer {}", token(r#"{"sub":"alice"}"#));
        // Of `bob:secret`.
        let authorization = if JWT.has(part) || BEARER.has(part) { &bearer } else { "Basic Ym9iOnNlY3JldA==" };
        let headers = headers(&[
            ("x-api-key", b"key"),
            ("cookie", b"session=opened"),
            ("authorization", authorization.as_bytes()),
        ]);
        let uri = Uri::from_static("/u/77?api_key=key");
        with_request("10.0.0.7", &headers, &tokens(), |request| {
            let pointer = JsonPointer::parse("/model").unwrap();
            let plan = BodyPlan::new(vec![pointer]).unwrap();
            let (body, _) = BodyValues::read(&plan, b"{\"model\":\"m\"}", BodyCoding::default(), 99).unwrap();
            let request = RequestAttributes { uri: &uri, body: Some(&body), ..*request };
            let mut fed = Vec::new();
            let found =
                KeySource::new(part, &["id"]).feed(&request, &mut |kind, value| fed.push((kind, value.to_vec())));
            assert!(found.is_ok(), "a request has no `{}`", kind.part.name);
            fed
        })
    }

    #[test]
    fn every_kind_is_read_from_its_name_from_a_request_and_from_the_decision_api() {
        let has_source = |kind: &&KeyKind| ![&ENTRY, &CLIENT].iter().any(|other| std::ptr::eq(*kind, *other));
        for kind in KINDS.into_iter().filter(has_source) {
            let text = match &kind.argument {
                Argument::None | Argument::Prefixes | Argument::Unwritten => kind.part.name,
                Argument::Name(form) => form.example,
            };
            let part = parse_part(text).unwrap();
            assert_eq!(part.to_string(), text);
            assert!(std::ptr::eq(KeyKind::of(&part), kind), "{text}");
            // Those that the rule does not state are set later.
            let part = if part.prefixes().is_some() { kind.of_prefixes(24, 64) } else { part };
            let of_request = fed(kind, &part);
            let [(number, value)] = of_request.as_slice() else { panic!("{text}: {of_request:?}") };
            assert_eq!(*number, kind.part.number, "{text}");
            assert_eq!(value.is_empty(), part == KeyPart::GLOBAL, "{text}");
            let query = match kind.value {
                ValueForm::Address => "10.0.0.7",
                ValueForm::Fingerprint | ValueForm::Text(_) => std::str::from_utf8(value).unwrap(),
            };
            for digest in [false, true] {
                let [mut request_hash, mut query_hash] = [KeyHasher::new(SEED, 0), KeyHasher::new(SEED, 0)];
                feed_part(&mut request_hash, *number, value, digest);
                assert_eq!(feed_text(&mut query_hash, &part, query, digest), Some(()), "{text}");
                assert_eq!(request_hash.finish(), query_hash.finish(), "{text}");
            }
        }
    }

    #[test]
    fn all_callers_of_unix_sockets_have_one_key() {
        let unix = |prefixes: Prefixes| {
            let mut fed = Vec::new();
            feed_address(ClientAddress::Unix, prefixes, &mut |kind, value| fed.push((kind, value.to_vec())));
            fed
        };
        let narrow = unix(Prefixes { v4: 32, v6: 128 });
        assert_eq!(narrow, [(kind::UNIX, b"unix:".to_vec())]);
        assert_eq!(unix(Prefixes { v4: 0, v6: 0 }), narrow);
        let [mut of_request, mut of_query] = [KeyHasher::new(SEED, 0), KeyHasher::new(SEED, 0)];
        of_request.add_part(kind::UNIX, b"unix:");
        assert_eq!(feed_text(&mut of_query, &KINDS[0].of_prefixes(24, 64), "unix:", false), Some(()));
        assert_eq!(of_request.finish(), of_query.finish());
    }

    #[test]
    fn no_request_has_an_entry_of_a_descriptor() {
        assert!(matches!(KeySource::new(&ENTRY.of_name("user"), &["user"]), KeySource::Unavailable));
    }
}
