//! Who may do what on the admin address: the hosts that it accepts, its tokens with their roles, and the origin of requests that a
//! browser sends.

use std::net::{Ipv4Addr, Ipv6Addr};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{Method, Request};

use transom_config::listen::{Admin, Role};
use transom_http::error::ApiError;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// What `GET` needs a token for, once `[admin] tokens` is set.
const PROTECTED: &str = "/v1/";

/// Who sends a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// The name of its token; `None` without one.
    pub token: Option<String>,
    /// Without tokens in the configuration, each caller has every right.
    role: Role,
}

impl Caller {
    /// The caller of an address that asks for no token.
    pub const ANYONE: Caller = Caller { token: None, role: Role::Clients };

    /// Checks that a request names a host of the admin address, and that it has a token if it needs one. A request that may
    /// change something must not come from another origin.
    pub fn identify<B>(request: &Request<B>, settings: &Admin) -> Result<Caller, ApiError> {
        let fields = request.headers();
        let is_safe = [Method::GET, Method::HEAD].contains(request.method());
        let token = find_token(fields, settings);
        let is_protected = !settings.tokens.is_empty() && request.uri().path().starts_with(PROTECTED);
        let has_tokens = settings.known_tokens().next().is_some();
        let caller = match token {
            Some(caller) => caller,
            None if has_tokens && (!is_safe || is_protected) => return Err(ApiError::Unauthorized),
            None => Caller::ANYONE,
        };
        if !is_safe && is_cross_origin(fields) {
            return Err(ApiError::CrossOrigin);
        }
        Ok(caller)
    }

    /// Checks that the caller has a role.
    pub fn require(&self, needed: Role) -> Result<(), ApiError> {
        match (&self.token, self.role >= needed) {
            (Some(token), false) => {
                Err(ApiError::Forbidden { token: token.clone(), role: self.role.name(), needed: needed.name() })
            }
            _ => Ok(()),
        }
    }
}

/// The caller whose token a request has (RFC 6750). All tokens are compared, so that the time tells nothing about them.
fn find_token(fields: &HeaderMap, settings: &Admin) -> Option<Caller> {
    let (scheme, given) = fields.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let is_bearer = scheme.eq_ignore_ascii_case("bearer");
    let mut found = None;
    for token in settings.known_tokens() {
        let is_same = verify_slices_are_equal(given.trim().as_bytes(), token.secret.0.as_bytes()).is_ok();
        if is_same && is_bearer {
            found = Some(Caller { token: Some(token.name.to_owned()), role: token.role });
        }
    }
    found
}

/// Checks that all hosts that a request names belong to the admin address. HTTP/1.0 clients may name none; browsers always do.
pub fn check_host<B>(request: &Request<B>, settings: &Admin) -> Result<(), ApiError> {
    let fields = request.headers().get_all(HOST).iter().map(|value| Authority::try_from(value.as_bytes()).ok());
    let mut named = fields.chain(request.uri().authority().map(|authority| Some(authority.clone())));
    let is_allowed =
        named.all(|authority| authority.is_some_and(|authority| is_allowed_host(authority.host(), &settings.hosts)));
    if is_allowed { Ok(()) } else { Err(ApiError::UnknownHost) }
}

fn is_allowed_host(host: &str, hosts: &[String]) -> bool {
    let host = host.to_ascii_lowercase();
    let ip = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_ip = host.parse::<Ipv4Addr>().is_ok() || ip.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    let is_named = |known: &String| match known.strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => host == *known,
    };
    is_ip || host == "localhost" || hosts.iter().any(is_named)
}

/// Whether a browser marks the request as cross-origin: any web page can make a browser send requests to an address that only
/// this machine reaches.
pub fn is_cross_origin(fields: &HeaderMap) -> bool {
    let text = |name: &HeaderName| fields.get(name).map(|value| value.to_str().unwrap_or_default());
    let site = text(&SEC_FETCH_SITE);
    let Some(origin) = text(&ORIGIN) else { return site.is_some_and(|site| !["same-origin", "none"].contains(&site)) };
    let host = text(&HOST).unwrap_or_default();
    origin.split_once("://").is_none_or(|(_, authority)| authority != host)
}
