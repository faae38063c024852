//! The request that a proxy asks about, from the fields of its authorization request: `auth_request` of nginx, `forward_auth` of
//! Caddy, `forwardAuth` of Traefik.
//!
//! The method is in `X-Forwarded-Method` or `X-Original-Method`, the target in `X-Forwarded-Uri` or `X-Original-URI`, the host
//! in `X-Forwarded-Host`, or else in `Host`. All other fields are those of the original request. A client can add a field that
//! the proxy does not set: where two fields name the same part, the request is refused rather than one of them believed.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::method::Method;
use http::request::Parts;
use http::uri::{PathAndQuery, Uri};

use super::error::RequestError;
use super::forwarded::element_of_hop;
use super::path_normalize::encode_query;

const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");

/// Replaces method, target and Host of an authorization request by those of the original request. `hops` is the place of the
/// client in `X-Forwarded-For`: a list in `X-Forwarded-Host` has an element for each proxy.
pub fn restore_request(parts: &mut Parts, hops: usize) -> Result<(), RequestError> {
    let fields = &mut parts.headers;
    let repeated = RequestError::OriginalRequest("X-Forwarded-Host is given more than once");
    let host = take(fields, [&FORWARDED_HOST], repeated)?;
    let repeated = RequestError::OriginalRequest("more than one of X-Forwarded-Method and X-Original-Method is given");
    let method = take(fields, [&FORWARDED_METHOD, &ORIGINAL_METHOD], repeated)?;
    let repeated = RequestError::OriginalRequest("more than one of X-Forwarded-Uri and X-Original-URI is given");
    let target = take(fields, [&FORWARDED_URI, &ORIGINAL_URI], repeated)?;

    let method = method.ok_or(RequestError::OriginalRequest("X-Forwarded-Method is missing"))?;
    let target = target.ok_or(RequestError::OriginalRequest("X-Forwarded-Uri is missing"))?;
    parts.method = Method::from_bytes(method.as_bytes())
        .map_err(|_invalid| RequestError::OriginalRequest("X-Forwarded-Method is no method"))?;
    parts.uri = read_target(&target).ok_or(RequestError::OriginalRequest("X-Forwarded-Uri is no path"))?;
    let host = host.as_ref().and_then(|host| element_of_hop([host], hops));
    if let Some(host) = host.and_then(|host| HeaderValue::from_bytes(host).ok()) {
        fields.insert(header::HOST, host);
    }
    Ok(())
}

/// Removes these fields, of which only one may be given, and once. An empty value is none: nginx sends no field then.
fn take<const N: usize>(
    fields: &mut HeaderMap,
    names: [&HeaderName; N],
    repeated: RequestError,
) -> Result<Option<HeaderValue>, RequestError> {
    let mut found = None;
    for name in names {
        if let header::Entry::Occupied(values) = fields.entry(name) {
            for value in values.remove_entry_mult().1 {
                if found.replace(value).is_some() {
                    return Err(repeated);
                }
            }
        }
    }
    Ok(found.filter(|value| !value.is_empty()))
}

/// A path with its query.
fn read_target(value: &HeaderValue) -> Option<Uri> {
    // `PathAndQuery` accepts a text without a slash at its beginning, and drops a fragment.
    let target =
        str::from_utf8(value.as_bytes()).ok().filter(|target| target.starts_with('/') && !target.contains('#'))?;
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = Some(PathAndQuery::try_from(encode_query(target).as_ref()).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    /// The method, the target, Host, and the other fields.
    fn restore(fields: &[(&str, &str)]) -> Result<(String, String, String, usize), String> {
        let mut request = Request::get("/auth").header("host", "auth.test").header("x-api-key", "k");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        restore_request(&mut parts, 2).map_err(|error| match error {
            RequestError::OriginalRequest(problem) => problem.to_owned(),
            other => panic!("{other}"),
        })?;
        let host = parts.headers[header::HOST].to_str().unwrap().to_owned();
        Ok((parts.method.to_string(), parts.uri.to_string(), host, parts.headers.len() - 1))
    }

    #[test]
    fn the_original_request_is_restored() {
        let restored =
            |method: &str, target: &str, host: &str| Ok((method.to_owned(), target.to_owned(), host.to_owned(), 1));
        assert_eq!(
            restore(&[("x-forwarded-method", "POST"), ("x-forwarded-uri", "/a?b=%2f"), ("x-forwarded-host", "a.test")]),
            restored("POST", "/a?b=%2f", "a.test")
        );
        assert_eq!(
            restore(&[("x-original-method", "GET"), ("x-original-uri", "//a/../b")]),
            restored("GET", "//a/../b", "auth.test")
        );
        assert_eq!(
            restore(&[("x-original-method", "GET"), ("x-original-uri", "/a?\"b\""), ("x-forwarded-host", "a, b ,c")]),
            restored("GET", "/a?%22b%22", "b")
        );
        assert_eq!(
            restore(&[("x-original-method", "OPTIONS"), ("x-forwarded-uri", "/"), ("x-forwarded-host", "")]),
            restored("OPTIONS", "/", "auth.test")
        );
    }

    #[test]
    fn missing_and_ambiguous_fields_are_refused() {
        let (method, target) = (("x-forwarded-method", "GET"), ("x-forwarded-uri", "/"));
        for (fields, error) in [
            (&[method][..], "X-Forwarded-Uri is missing"),
            (&[target], "X-Forwarded-Method is missing"),
            (&[method, ("x-original-uri", "")], "X-Forwarded-Uri is missing"),
            (
                &[method, target, ("x-original-uri", "/")],
                "more than one of X-Forwarded-Uri and X-Original-URI is given",
            ),
            (&[method, target, target], "more than one of X-Forwarded-Uri and X-Original-URI is given"),
            (&[method, method, target], "more than one of X-Forwarded-Method and X-Original-Method is given"),
            (
                &[method, target, ("x-forwarded-host", "a"), ("x-forwarded-host", "b")],
                "X-Forwarded-Host is given more than once",
            ),
            (&[("x-forwarded-method", "G T"), target], "X-Forwarded-Method is no method"),
            (&[method, ("x-forwarded-uri", "a")], "X-Forwarded-Uri is no path"),
            (&[method, ("x-forwarded-uri", "http://a.test/")], "X-Forwarded-Uri is no path"),
            (&[method, ("x-forwarded-uri", "/a b")], "X-Forwarded-Uri is no path"),
            (&[method, ("x-forwarded-uri", "?a")], "X-Forwarded-Uri is no path"),
            (&[method, ("x-forwarded-uri", "/a#b")], "X-Forwarded-Uri is no path"),
            (&[method, ("x-forwarded-uri", "*")], "X-Forwarded-Uri is no path"),
        ] {
            assert_eq!(restore(fields), Err(error.to_owned()), "{fields:?}");
        }
    }
}
