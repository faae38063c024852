//! Validates request heads, and refuses requests that two servers could read differently.
//!
//! `http1_head` or h2 has checked the syntax. This file checks what they leave to a proxy: the form of the target (RFC 9112, section
//! 3.2), Host (RFC 9110, section 7.2), message framing (RFC 9112, section 6.1) and expectations (RFC 9110, section
//! 10.1.1). Requests of HTTP/2 and HTTP/1.0 are first translated to the form of HTTP/1.1.

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, Version};

use super::error::RequestError;
use super::headers::SpecialFields;
use super::websocket_handshake::{self, UpgradeMethod};
use crate::percent_encoding::byte_set;

/// What the target of a request may name as its scheme: that of the connection, or the one that a trusted proxy reports.
#[derive(Clone, Copy, Debug)]
pub struct Schemes {
    pub is_connection_secure: bool,
    pub is_client_secure: bool,
}

/// The result of the validation.
#[derive(Debug)]
pub struct ValidatedRequest<'a> {
    /// Lower case, without port and trailing dot; empty if an HTTP/1.0 request names no host.
    pub host: Cow<'a, str>,
    /// The fields that need special treatment when the request is forwarded.
    pub special_fields: SpecialFields,
    /// How the request opens a WebSocket; `None` if it does not.
    pub websocket: Option<UpgradeMethod>,
}

/// Validates a request head.
pub fn validate(parts: &Parts, schemes: Schemes) -> Result<ValidatedRequest<'_>, RequestError> {
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        let is_extended = websocket_handshake::is_extended_connect(parts);
        return Err(if is_extended { RequestError::UNKNOWN_PROTOCOL } else { RequestError::Method });
    }
    if !is_valid_method(parts.method.as_str()) {
        return Err(RequestError::Malformed);
    }
    let special_fields = SpecialFields::present_in(&parts.headers);
    if special_fields.has(SpecialFields::TRANSFER_ENCODING) {
        check_transfer_encoding(parts)?;
    }
    if special_fields.has(SpecialFields::CONTENT_LENGTH) {
        check_content_length(&parts.headers)?;
    }
    if special_fields.has(SpecialFields::EXPECT) {
        check_expect(&parts.headers)?;
    }
    let websocket = websocket_handshake::requested_upgrade(parts, special_fields.has(SpecialFields::UPGRADE))?;
    let host = host_field(parts)?;
    check_target(parts, host.map(|host| host.authority), schemes)?;
    Ok(ValidatedRequest { host: host.map_or(Cow::Borrowed(""), Host::normalized), special_fields, websocket })
}

/// Converts a request of another version to the form of HTTP/1.1.
pub fn translate(parts: &mut Parts) -> Result<(), RequestError> {
    match parts.version {
        _ if parts.method == Method::CONNECT => Ok(()),
        Version::HTTP_2 => translate_http2(parts),
        Version::HTTP_10 => translate_http1_0(parts),
        _ => Ok(()),
    }
}

/// An HTTP/1.0 request may name the host only in its target: the authority of the target becomes Host (RFC 9112, section
/// 3.2.2), for routes and for the upstream.
fn translate_http1_0(parts: &mut Parts) -> Result<(), RequestError> {
    let Some(authority) = parts.uri.authority() else { return Ok(()) };
    if !parts.headers.contains_key(header::HOST) {
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| RequestError::Host(MALFORMED_AUTHORITY))?;
        parts.headers.insert(header::HOST, host);
    }
    Ok(())
}

const MALFORMED_AUTHORITY: &str = "the authority of the request target is malformed";

/// HTTP/2 (RFC 9113, section 8.3): Host becomes `:authority`, and cookies are joined in one field.
fn translate_http2(parts: &mut Parts) -> Result<(), RequestError> {
    let (mut hosts, mut cookies) = (0, 0);
    for (name, value) in &parts.headers {
        if name == header::COOKIE {
            cookies += 1;
        } else if name == header::HOST {
            hosts += 1;
        }
        // HTTP/1.1 cannot express white space around a value (RFC 9113, section 8.2.1): a server would read another value
        // than the one that the key was made of.
        if value.as_bytes() != value.as_bytes().trim_ascii() {
            return Err(RequestError::Malformed);
        }
    }
    if cookies > 1 {
        let joined = parts.headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect::<Vec<_>>();
        let joined = HeaderValue::from_bytes(&joined.join(&b"; "[..])).map_err(|_| RequestError::Malformed)?;
        parts.headers.insert(header::COOKIE, joined);
    }
    let Some(authority) = parts.uri.authority() else { return Ok(()) };
    let port = match parts.uri.scheme_str() {
        Some("http") => "80",
        Some("https") => "443",
        Some(_) | None => return Err(RequestError::Target("the request target is of another scheme")),
    };
    let is_same =
        |host: &HeaderValue| host.to_str().is_ok_and(|host| is_same_authority(authority.as_str(), host, port));
    match hosts {
        0 => {}
        1 if parts.headers.get(header::HOST).is_some_and(is_same) => {}
        1 => return Err(RequestError::Host("the Host field is not `:authority`")),
        _ => return Err(RequestError::Host("the Host field is given more than once")),
    }
    // `validate` checks the syntax of the host.
    let host =
        HeaderValue::from_str(authority.as_str()).map_err(|_| RequestError::Host("`:authority` is malformed"))?;
    parts.headers.insert(header::HOST, host);
    Ok(())
}

/// Whether all servers read the method alike. Methods are case-sensitive, but some servers read `post` as POST.
pub fn is_valid_method(method: &str) -> bool {
    method.len() <= 32
        && method.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
}

fn check_transfer_encoding(parts: &Parts) -> Result<(), RequestError> {
    let headers = &parts.headers;
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        _ if parts.version == Version::HTTP_10 => Err(RequestError::Framing("HTTP/1.0 has no Transfer-Encoding")),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            if headers.contains_key(header::CONTENT_LENGTH) {
                return Err(RequestError::CONFLICTING_LENGTHS);
            }
            Ok(())
        }
        (Some(_), _) => Err(RequestError::Framing("the only transfer coding understood is `chunked`, given once")),
    }
}

/// Accepts only one field, with a value that all servers read alike. Some read a leading zero as octal, and some have 63 bits.
fn check_content_length(headers: &HeaderMap) -> Result<(), RequestError> {
    let is_unambiguous = |length: &HeaderValue| match length.as_bytes() {
        b"0" => true,
        [b'1'..=b'9', ..] => length.to_str().is_ok_and(|digits| digits.parse::<i64>().is_ok()),
        _ => false,
    };
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    match (lengths.next(), lengths.next()) {
        (_, Some(_)) => Err(RequestError::REPEATED_LENGTH),
        (Some(length), None) if !is_unambiguous(length) => {
            Err(RequestError::Framing("Content-Length is not one number of bytes"))
        }
        _ => Ok(()),
    }
}

fn check_expect(headers: &HeaderMap) -> Result<(), RequestError> {
    let mut expectations = headers.get_all(header::EXPECT).iter();
    let all_known = expectations.all(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    all_known.then_some(()).ok_or(RequestError::Expectation)
}

/// The host of the only Host field.
fn host_field(parts: &Parts) -> Result<Option<Host<'_>>, RequestError> {
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host,
        (None, _) if parts.version == Version::HTTP_10 => return Ok(None),
        (None, _) => return Err(RequestError::Host("the Host field is missing")),
        (Some(_), Some(_)) => return Err(RequestError::Host("the Host field is given more than once")),
    };
    let host = host.to_str().ok().and_then(parse_host);
    host.map(Some).ok_or(RequestError::Host("the Host field is malformed"))
}

/// The host of a Host field as routes match it: lower case, without port and trailing dot. `None` if it is malformed.
pub fn normalized_host(field: &str) -> Option<Cow<'_, str>> {
    parse_host(field).map(Host::normalized)
}

/// The port in the Host field of a valid request; `None` if there is none.
pub fn host_port(headers: &HeaderMap) -> Option<&str> {
    let host = headers.get(header::HOST)?.to_str().ok()?;
    split_port(host).1.filter(|port| !port.is_empty())
}

/// The host of a request, as received.
#[derive(Clone, Copy)]
struct Host<'a> {
    authority: &'a str,
    /// Without the port.
    name: &'a str,
    /// Whether the name has upper-case letters.
    has_uppercase: bool,
}

impl<'a> Host<'a> {
    fn normalized(self) -> Cow<'a, str> {
        let name = self.name.strip_suffix('.').unwrap_or(self.name);
        if self.has_uppercase { Cow::Owned(name.to_ascii_lowercase()) } else { Cow::Borrowed(name) }
    }
}

/// `host[:port]`, or `None`: RFC 3986's reg-name or IP literal, no user information.
fn parse_host(authority: &str) -> Option<Host<'_>> {
    let (name, port) = split_port(authority);
    let class = name.bytes().fold(0, |class, byte| class | REG_NAME[usize::from(byte)]);
    let is_valid_port = port.is_none_or(is_port);
    let is_valid_name = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => class & INVALID == 0 && !has_empty_label(name.as_bytes()),
    };
    (is_valid_port && is_valid_name).then_some(Host { authority, name, has_uppercase: class & UPPERCASE != 0 })
}

/// Whether a text is a port number, or empty for the default port.
fn is_port(port: &str) -> bool {
    port.is_empty() || port.len() <= 5 && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok()
}

/// Whether a label is empty, other than after a trailing dot. The loop reads all bytes without a branch, so that the
/// compiler vectorizes it.
fn has_empty_label(name: &[u8]) -> bool {
    let pairs = name.iter().zip(name.iter().skip(1));
    matches!(name.first(), None | Some(b'.'))
        || pairs.fold(false, |found, (first, second)| found | (*first == b'.') & (*second == b'.'))
}

/// Classes of bytes in a host name. Classes are bits, so that one pass collects them all.
const UPPERCASE: u8 = 1;
const INVALID: u8 = 2;

/// unreserved, pct-encoded or sub-delims (RFC 3986, section 3.2.2).
const REG_NAME: [u8; 256] = {
    let known = byte_set(b"abcdefghijklmnopqrstuvwxyz0123456789-._~%!$&'()*+,;=");
    let mut classes = [INVALID; 256];
    let mut byte = 0;
    while byte < 256 {
        if known[byte] {
            classes[byte] = 0;
        } else if (byte as u8).is_ascii_uppercase() {
            classes[byte] = UPPERCASE;
        }
        byte += 1;
    }
    classes
};

/// Splits at the last colon that is not part of an IP literal.
fn split_port(authority: &str) -> (&str, Option<&str>) {
    match authority.bytes().rposition(|byte| byte == b':' || byte == b']') {
        Some(at) if authority.as_bytes()[at] == b':' => (&authority[..at], Some(&authority[at + 1..])),
        _ => (authority, None),
    }
}

/// Origin form, or absolute form that names the same scheme and host; `*` for OPTIONS.
fn check_target(parts: &Parts, host: Option<&str>, schemes: Schemes) -> Result<(), RequestError> {
    let uri = &parts.uri;
    let is_server_wide = uri.path() == "*" && parts.method == Method::OPTIONS;
    if !is_server_wide && !uri.path().starts_with('/') {
        return Err(RequestError::Target("the request target is not a path"));
    }
    // The Host of a translated HTTP/2 request is its authority.
    let Some(authority) = uri.authority().filter(|_| parts.version != Version::HTTP_2) else { return Ok(()) };
    let (is_secure, port) = match uri.scheme_str() {
        Some("http") => (false, "80"),
        Some("https") => (true, "443"),
        Some(_) | None => return Err(RequestError::Target("the request target is of another scheme")),
    };
    if ![schemes.is_connection_secure, schemes.is_client_secure].contains(&is_secure) {
        return Err(RequestError::Target("the scheme of the request target is not that of the connection"));
    }
    if host.is_some_and(|host| !is_same_authority(authority.as_str(), host, port)) {
        return Err(RequestError::Host("the Host field is not the host of the request target"));
    }
    Ok(())
}

/// Whether two authorities name the same host and port; `port` is the default.
fn is_same_authority(a: &str, b: &str, port: &str) -> bool {
    let split = |authority| {
        let (name, named) = split_port(authority);
        (name, named.filter(|named| !named.is_empty()).unwrap_or(port))
    };
    let ((a, a_port), (b, b_port)) = (split(a), split(b));
    a.eq_ignore_ascii_case(b) && a_port == b_port
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    const CLEARTEXT: Schemes = Schemes { is_connection_secure: false, is_client_secure: false };

    fn validated_host(request: http::request::Builder) -> Result<String, RequestError> {
        let (parts, ()) = request.body(()).unwrap().into_parts();
        validate(&parts, CLEARTEXT).map(|request| request.host.into_owned())
    }

    /// RFC 9112, section 3.2.2.
    #[test]
    fn the_absolute_form_names_the_scheme_of_the_connection_or_of_the_client() {
        let is_valid = |target: &str, host: &str, is_connection_secure, is_client_secure| {
            let (parts, ()) = Request::get(target).header("host", host).body(()).unwrap().into_parts();
            validate(&parts, Schemes { is_connection_secure, is_client_secure }).is_ok()
        };
        for (connection, client) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(is_valid("http://a/b", "a", connection, client), !connection || !client);
            assert_eq!(is_valid("https://a/b", "a", connection, client), connection || client);
            assert!(is_valid("/b", "a", connection, client));
        }
        assert!(is_valid("https://a:443/", "a", true, true) && !is_valid("https://a:80/", "a", true, true));
        assert!(!is_valid("https://b/", "a", true, true));
    }

    #[test]
    fn unambiguous_requests_are_valid() {
        for (uri, host, name) in [
            ("/", "example.com", "example.com"),
            ("/a?b", "Example.COM.:8080", "example.com"),
            ("/", "[::1]:8080", "[::1]"),
            ("/", "[::1]", "[::1]"),
            ("http://example.com/a", "example.com", "example.com"),
            ("http://EXAMPLE.com:80/a", "example.com", "example.com"),
            ("/", "a.b.c.:65535", "a.b.c"),
            ("/", "a:", "a"),
        ] {
            assert_eq!(validated_host(Request::get(uri).header("host", host)).as_deref(), Ok(name), "{uri} {host}");
        }
        assert_eq!(validated_host(Request::get("/").version(Version::HTTP_10)).as_deref(), Ok(""));
        assert!(validated_host(Request::options("*").header("host", "a")).is_ok());
        assert!(validated_host(Request::post("/").header("host", "a").header("transfer-encoding", "Chunked")).is_ok());
        assert!(validated_host(Request::post("/").header("host", "a").header("expect", "100-Continue")).is_ok());
    }

    #[test]
    fn a_host_is_copied_only_if_it_changes() {
        assert!(matches!(normalized_host("a.b.:80"), Some(Cow::Borrowed("a.b"))));
        assert_eq!(normalized_host("A.b").as_deref(), Some("a.b"));
    }

    #[test]
    fn ambiguous_hosts_are_refused() {
        assert!(matches!(validated_host(Request::get("/")), Err(RequestError::Host(_))));
        assert!(matches!(
            validated_host(Request::get("/").header("host", "a").header("host", "a")),
            Err(RequestError::Host(_))
        ));
        for host in [
            "", "a b", "u@a", "a/b", "a:80:80", "a:x", "a:123456", "a:65536", "a:+80", "[::1", "[x]", ":80", "a\u{e9}",
            "a?b", "a#b", ".", ".a", "a..b", "a..b..c", "a..", "..:80",
        ] {
            let value = HeaderValue::from_bytes(host.as_bytes()).unwrap();
            assert!(
                matches!(validated_host(Request::get("/").header("host", value)), Err(RequestError::Host(_))),
                "{host}"
            );
        }
        assert!(matches!(validated_host(Request::get("http://b/").header("host", "a")), Err(RequestError::Host(_))));
        assert!(matches!(validated_host(Request::get("http://u@a/").header("host", "a")), Err(RequestError::Host(_))));
        assert!(matches!(validated_host(Request::get("http://a:81/").header("host", "a")), Err(RequestError::Host(_))));
    }

    #[test]
    fn targets_other_than_a_path_are_refused() {
        assert!(matches!(validated_host(Request::get("admin").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(validated_host(Request::get("a:80").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(validated_host(Request::get("*").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(validated_host(Request::get("ftp://a/").header("host", "a")), Err(RequestError::Target(_))));
        assert_eq!(validated_host(Request::connect("a:80").header("host", "a")), Err(RequestError::Method));
        assert_eq!(validated_host(Request::trace("/").header("host", "a")), Err(RequestError::Method));
        for method in ["post", "Post", "M.", &"M".repeat(33)] {
            assert_eq!(
                validated_host(Request::builder().method(method).uri("/").header("host", "a")),
                Err(RequestError::Malformed)
            );
        }
    }

    #[test]
    fn the_authority_of_an_http_1_0_target_becomes_host() {
        let translated = |request: http::request::Builder| {
            let (mut parts, ()) = request.version(Version::HTTP_10).body(()).unwrap().into_parts();
            translate(&mut parts)?;
            let host = validate(&parts, CLEARTEXT)?.host.into_owned();
            Ok((host, parts.headers.get("host").map(|host| host.to_str().unwrap().to_owned())))
        };
        let expected = |host: &str, field: &str| Ok((host.to_owned(), Some(field.to_owned())));
        assert_eq!(translated(Request::get("http://Example.com.:81/")), expected("example.com", "Example.com.:81"));
        assert_eq!(translated(Request::get("http://a/").header("host", "a:80")), expected("a", "a:80"));
        assert_eq!(translated(Request::get("/")), Ok((String::new(), None)));
        for request in [Request::get("http://a/").header("host", "b"), Request::get("http://u@a/")] {
            assert!(matches!(translated(request), Err(RequestError::Host(_))));
        }
        assert!(matches!(translated(Request::get("https://a/")), Err(RequestError::Target(_))));
    }

    #[test]
    fn an_http_2_request_is_translated() {
        let translated = |request: http::request::Builder| {
            let (mut parts, ()) = request.version(Version::HTTP_2).body(()).unwrap().into_parts();
            translate(&mut parts)?;
            validate(&parts, CLEARTEXT).map(|request| request.host.into_owned())?;
            let fields = |name| parts.headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned());
            Ok((fields("host").collect::<Vec<_>>().join("|"), fields("cookie").collect::<Vec<_>>().join("|")))
        };
        let expected = |host: &str, cookie: &str| Ok((host.to_owned(), cookie.to_owned()));
        let get = |uri| Request::get(uri);
        assert_eq!(translated(get("http://A:80/b")), expected("A:80", ""));
        assert_eq!(translated(get("https://a:443/b").header("host", "A")), expected("a:443", ""));
        assert_eq!(translated(get("/b").header("host", "a")), expected("a", ""));
        let cookies = get("http://a/").header("cookie", "b=1").header("x", "y").header("cookie", "c=2; d");
        assert_eq!(translated(cookies), expected("a", "b=1; c=2; d"));
        assert!(matches!(translated(get("/b")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("http://u@a/b")), Err(RequestError::Host(_))));
        let other = translated(get("http://a/b").header("host", "b"));
        assert_eq!(other, Err(RequestError::Host("the Host field is not `:authority`")));
        assert!(matches!(translated(get("https://a/b").header("host", "a:80")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("ws://a/b")), Err(RequestError::Target(_))));
        assert!(matches!(translated(get("http://a/").header("x", " y")), Err(RequestError::Malformed)));
        assert!(matches!(translated(Request::connect("a:80")), Err(RequestError::Method)));
        assert_eq!(translated(get("http://a/").header("content-length", "1")), expected("a", ""));
        let lengths = get("http://a/").header("content-length", "1").header("content-length", "1");
        assert!(matches!(translated(lengths), Err(RequestError::Framing(_))));
        assert!(matches!(translated(get("http://a/").header("content-length", "")), Err(RequestError::Framing(_))));
    }

    #[test]
    fn ambiguous_framing_is_refused() {
        for codings in [
            &["gzip, chunked"][..],
            &["chunked, chunked"],
            &["identity", "chunked"],
            &["chunked", "chunked"],
            &[",chunked"],
            &[""],
        ] {
            let request =
                codings.iter().fold(Request::post("/").header("host", "a"), |r, c| r.header("transfer-encoding", *c));
            assert!(matches!(validated_host(request), Err(RequestError::Framing(_))), "{codings:?}");
        }
        for length in ["", "00", "010", "+1", "-1", "1,1", "1 ", "0x1", "9223372036854775808", "99999999999999999999"] {
            let request = Request::post("/").header("host", "a").header("content-length", length);
            assert!(matches!(validated_host(request), Err(RequestError::Framing(_))), "{length:?}");
        }
        for length in ["0", "1", "10", "9223372036854775807"] {
            let request = Request::post("/").header("host", "a").header("content-length", length);
            assert!(validated_host(request).is_ok(), "{length:?}");
        }
        let both =
            Request::post("/").header("host", "a").header("transfer-encoding", "chunked").header("content-length", "3");
        assert!(matches!(validated_host(both), Err(RequestError::Framing(_))));
        assert_eq!(
            validated_host(Request::post("/").header("host", "a").header("expect", "x")),
            Err(RequestError::Expectation)
        );
    }
}
