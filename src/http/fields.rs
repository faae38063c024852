//! The fields of a message in passing: what stays behind, what is added.
//!
//! RFC 9110, section 7.6.1: fields that are about this connection are not forwarded, nor are those
//! that Connection names. A client can not use that to strip what the gateway or the upstream
//! relies on.

use std::net::IpAddr;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Names that Connection may list without effect: they mean something end to end.
const NEVER_HOP_BY_HOP: [HeaderName; 9] = [
    header::HOST,
    header::AUTHORIZATION,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::FORWARDED,
    X_FORWARDED_FOR,
    X_FORWARDED_PROTO,
    X_FORWARDED_HOST,
];

/// Makes the fields of a request ready for the upstream. `keys` are fields that rules count by.
pub fn forward_request(headers: &mut HeaderMap, peer: &HeaderValue, keys: &[HeaderName]) {
    let wants_trailers = strip(headers, keys, is_dropped_from_requests);
    if wants_trailers {
        // Trailers in the answer are passed on, so the upstream may send them.
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    // What an untrusted client says about itself is replaced by what is known.
    headers.insert(X_FORWARDED_FOR, peer.clone());
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    match headers.get(header::HOST).cloned() {
        Some(host) => headers.insert(X_FORWARDED_HOST, host),
        None => headers.remove(X_FORWARDED_HOST),
    };
}

/// Makes the fields of an answer ready for the client.
pub fn forward_response(headers: &mut HeaderMap) {
    strip(headers, &[], is_dropped_from_responses);
}

/// Fields about one connection (RFC 9110, section 7.6.1; Keep-Alive and Proxy-Connection by custom).
fn is_hop_by_hop(name: &str) -> bool {
    matches!(name, "connection" | "keep-alive" | "proxy-connection" | "te" | "transfer-encoding" | "upgrade")
}

/// `expect` is not passed on: hyper asks the client for the body when the upstream takes it.
/// `forwarded` is what the client says about itself.
fn is_dropped_from_requests(name: &str) -> bool {
    is_hop_by_hop(name) || matches!(name, "expect" | "forwarded" | "proxy-authorization")
}

fn is_dropped_from_responses(name: &str) -> bool {
    is_hop_by_hop(name) || matches!(name, "proxy-authenticate")
}

/// Removes what is about one connection only, and what else is to be dropped; returns whether the
/// sender takes trailers. Usually there is next to nothing, so the fields are looked through once.
fn strip(headers: &mut HeaderMap, keys: &[HeaderName], is_dropped: fn(&str) -> bool) -> bool {
    let mut options = Vec::new();
    let mut trailers = false;
    while let Some(name) = headers.keys().find(|name| is_dropped(name.as_str())).cloned() {
        if name == header::CONNECTION {
            options = connection_options(headers);
        }
        if name == header::TE {
            let mut codings =
                headers.get_all(&name).iter().filter_map(|te| te.to_str().ok()).flat_map(|te| te.split(','));
            trailers = codings.any(|coding| coding.trim().eq_ignore_ascii_case("trailers"));
        }
        headers.remove(name);
    }
    for name in options {
        if !NEVER_HOP_BY_HOP.contains(&name) && !keys.contains(&name) {
            headers.remove(name);
        }
    }
    trailers
}

/// The field names that Connection lists, but for the two usual options, which name none.
fn connection_options(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let options = values.flat_map(|value| value.split(',')).map(str::trim);
    options
        .filter(|option| !option.eq_ignore_ascii_case("close") && !option.eq_ignore_ascii_case("keep-alive"))
        .filter_map(|option| HeaderName::from_bytes(option.as_bytes()).ok())
        .collect()
}

/// An address as a field value.
pub fn address(peer: IpAddr) -> HeaderValue {
    let text = peer.to_canonical().to_string();
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn forwarded(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = headers(fields);
        forward_request(
            &mut headers,
            &address("::ffff:192.0.2.7".parse().unwrap()),
            &[HeaderName::from_static("x-api-key")],
        );
        headers
    }

    #[test]
    fn what_is_about_the_connection_stays_behind() {
        let out = forwarded(&[
            ("host", "a"),
            ("connection", "Keep-Alive, X-Secret"),
            ("connection", "x-other"),
            ("x-secret", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "close"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("expect", "100-continue"),
            ("accept", "*/*"),
        ]);
        let mut names: Vec<&str> = out.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "host", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"]);
    }

    #[test]
    fn connection_can_not_strip_what_others_rely_on() {
        let out = forwarded(&[
            ("host", "a"),
            ("connection", "host, x-api-key, authorization, x-forwarded-for, cookie"),
            ("x-api-key", "k"),
            ("authorization", "b"),
            ("cookie", "c"),
        ]);
        for name in ["host", "x-api-key", "authorization", "cookie", "x-forwarded-for"] {
            assert!(out.contains_key(name), "{name}");
        }
    }

    #[test]
    fn what_the_client_says_of_itself_is_replaced() {
        let out = forwarded(&[
            ("host", "a"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-for", "5.6.7.8"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
            ("forwarded", "for=1.2.3.4"),
        ]);
        let all = |name: &str| out.get_all(name).iter().map(|v| v.to_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(all("x-forwarded-for"), ["192.0.2.7"]);
        assert_eq!(all("x-forwarded-proto"), ["http"]);
        assert_eq!(all("x-forwarded-host"), ["a"]);
        assert!(all("forwarded").is_empty());
    }

    #[test]
    fn only_the_wish_for_trailers_is_passed_on() {
        assert_eq!(forwarded(&[("host", "a"), ("te", "gzip, trailers"), ("connection", "te")])["te"], "trailers");
        assert!(!forwarded(&[("host", "a"), ("te", "gzip")]).contains_key("te"));
    }
}
