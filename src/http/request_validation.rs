//! Is this one clear request? What could be read in two ways is refused before it counts.
//!
//! hyper has parsed the head, so syntax is settled; what is decided here is what hyper leaves to a
//! proxy: the form of the target (RFC 9112, section 3.2), Host (RFC 9110, section 7.2), message
//! framing (RFC 9112, section 6.1) and expectations (RFC 9110, section 10.1.1). Requests of HTTP/2 and HTTP/1.0 are
//! translated first, so that behind it there is one kind of request only.

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, Version};

use super::error::RequestError;
use super::headers::SpecialFields;
use super::websocket_handshake::{self, UpgradeMethod};
use crate::config::route::byte_set;

/// What the gate found out on the way.
#[derive(Debug)]
pub struct ValidatedRequest<'a> {
    /// Lower case, without port and trailing dot; empty where HTTP/1.0 named none.
    pub host: Cow<'a, str>,
    /// Which fields need attention when the request is forwarded.
    pub special_fields: SpecialFields,
    /// How it asks for a WebSocket, if it does.
    pub websocket: Option<UpgradeMethod>,
}

/// Lets a request pass, or says what is wrong with it.
pub fn validate(parts: &Parts) -> Result<ValidatedRequest<'_>, RequestError> {
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        let is_extended = parts.method == Method::CONNECT && websocket_handshake::is_extended_connect(parts);
        return Err(if is_extended { RequestError::UNKNOWN_PROTOCOL } else { RequestError::Method });
    }
    if !is_valid_method(parts.method.as_str()) {
        return Err(RequestError::Malformed);
    }
    let marks = SpecialFields::present_in(&parts.headers);
    if marks.has(SpecialFields::TRANSFER_ENCODING) {
        check_transfer_encoding(&parts.headers)?;
    }
    if marks.has(SpecialFields::CONTENT_LENGTH) {
        check_content_length(&parts.headers)?;
    }
    if marks.has(SpecialFields::EXPECT) {
        check_expect(&parts.headers)?;
    }
    let websocket = websocket_handshake::requested_upgrade(parts, marks.has(SpecialFields::UPGRADE))?;
    let host = host_field(parts)?;
    check_target(parts, host.map(|host| host.authority))?;
    Ok(ValidatedRequest { host: host.map_or(Cow::Borrowed(""), Host::normalized), special_fields: marks, websocket })
}

/// Makes a request of another version look like one of HTTP/1.1.
pub fn translate(parts: &mut Parts) -> Result<(), RequestError> {
    match parts.version {
        _ if parts.method == Method::CONNECT => Ok(()),
        Version::HTTP_2 => translate_http2(parts),
        Version::HTTP_10 => translate_http1_0(parts),
        _ => Ok(()),
    }
}

/// HTTP/1.0 may name the host in the target alone: then the target's authority becomes Host (RFC 9112, section 3.2.2), for
/// routes and for the upstream.
fn translate_http1_0(parts: &mut Parts) -> Result<(), RequestError> {
    let Some(authority) = parts.uri.authority() else { return Ok(()) };
    if !parts.headers.contains_key(header::HOST) {
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| RequestError::Host(MALFORMED_AUTHORITY))?;
        parts.headers.insert(header::HOST, host);
    }
    Ok(())
}

const MALFORMED_AUTHORITY: &str = "the authority of the request target is malformed";

/// HTTP/2 (RFC 9113, section 8.3): Host says what `:authority` says, and cookies stand in one field.
fn translate_http2(parts: &mut Parts) -> Result<(), RequestError> {
    let (mut hosts, mut cookies, mut lengths) = (0, 0, 0);
    for (name, value) in &parts.headers {
        if name == header::COOKIE {
            cookies += 1;
        } else if name == header::HOST {
            hosts += 1;
        } else if name == header::CONTENT_LENGTH {
            lengths += 1;
            // None at all passes for 0 in HTTP/2. Servers of HTTP/1.1 refuse such a field, or read on without one.
            if value.is_empty() {
                return Err(RequestError::Framing("Content-Length is empty"));
            }
        }
        // What HTTP/1.1 can not say (RFC 9113, section 8.2.1): a server would read another value than was counted by.
        if value.as_bytes() != value.as_bytes().trim_ascii() {
            return Err(RequestError::Malformed);
        }
    }
    if lengths > 1 {
        return Err(RequestError::REPEATED_LENGTH);
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
    let same = |host: &HeaderValue| host.to_str().is_ok_and(|host| is_same_authority(authority.as_str(), host, port));
    match hosts {
        0 => {}
        1 if parts.headers.get(header::HOST).is_some_and(same) => {}
        1 => return Err(RequestError::Host("the Host field is not `:authority`")),
        _ => return Err(RequestError::Host("the Host field is given more than once")),
    }
    // Of an authority that is none, the check of Host tells.
    let host =
        HeaderValue::from_str(authority.as_str()).map_err(|_| RequestError::Host("`:authority` is malformed"))?;
    parts.headers.insert(header::HOST, host);
    Ok(())
}

/// Methods are case-sensitive, but some servers take `post` for POST.
fn is_valid_method(method: &str) -> bool {
    method.len() <= 32
        && method.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
}

fn check_transfer_encoding(headers: &HeaderMap) -> Result<(), RequestError> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            if headers.contains_key(header::CONTENT_LENGTH) {
                return Err(RequestError::CONFLICTING_LENGTHS);
            }
            Ok(())
        }
        (Some(_), _) => Err(RequestError::Framing("the only transfer coding understood is `chunked`, given once")),
    }
}

/// Content-Length as every server reads it. Some take a leading zero for octal, and some count in 63 bits.
fn check_content_length(headers: &HeaderMap) -> Result<(), RequestError> {
    let is_clear = |length: &HeaderValue| match length.as_bytes() {
        b"0" => true,
        [b'1'..=b'9', ..] => length.to_str().is_ok_and(|digits| digits.parse::<i64>().is_ok()),
        _ => false,
    };
    let are_clear = headers.get_all(header::CONTENT_LENGTH).iter().all(is_clear);
    are_clear.then_some(()).ok_or(RequestError::Framing("Content-Length is not one number of bytes"))
}

fn check_expect(headers: &HeaderMap) -> Result<(), RequestError> {
    let mut expectations = headers.get_all(header::EXPECT).iter();
    let known = expectations.all(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    known.then_some(()).ok_or(RequestError::Expectation)
}

/// The one Host field, checked for its form.
fn host_field(parts: &Parts) -> Result<Option<Host<'_>>, RequestError> {
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host,
        (None, _) if parts.version == Version::HTTP_10 => return Ok(None),
        (None, _) => return Err(RequestError::Host("the Host field is missing")),
        (Some(_), Some(_)) => return Err(RequestError::Host("the Host field is given more than once")),
    };
    parse_host(host).map(Some).ok_or(RequestError::Host("the Host field is malformed"))
}

/// A host as it was named.
#[derive(Clone, Copy)]
struct Host<'a> {
    authority: &'a str,
    /// Without the port.
    name: &'a str,
    /// Some letter may be a capital.
    has_uppercase: bool,
}

impl<'a> Host<'a> {
    fn normalized(self) -> Cow<'a, str> {
        let name = self.name.strip_suffix('.').unwrap_or(self.name);
        if self.has_uppercase { Cow::Owned(name.to_ascii_lowercase()) } else { Cow::Borrowed(name) }
    }
}

/// `host[:port]`, or `None`: RFC 3986's reg-name or IP literal, no user information.
fn parse_host(host: &HeaderValue) -> Option<Host<'_>> {
    let authority = host.to_str().ok()?;
    let (name, port) = split_port(authority);
    let class = name.bytes().fold(0, |class, byte| class | REG_NAME[usize::from(byte)]);
    let port_is_fine = port.is_none_or(is_port);
    let name_is_fine = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => class & INVALID == 0 && !has_empty_label(name.as_bytes()),
    };
    (port_is_fine && name_is_fine).then_some(Host { authority, name, has_uppercase: class & UPPERCASE != 0 })
}

/// Whether this is the number of a port, or nothing, which stands for the usual one.
fn is_port(port: &str) -> bool {
    port.is_empty() || port.len() <= 5 && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok()
}

/// Whether nothing stands before a dot; behind the last one that is fine. All bytes are looked at, without a branch: so
/// the compiler takes many at a time.
fn has_empty_label(name: &[u8]) -> bool {
    let pairs = name.iter().zip(name.iter().skip(1));
    matches!(name.first(), None | Some(b'.'))
        || pairs.fold(false, |found, (first, second)| found | (*first == b'.') & (*second == b'.'))
}

/// What a byte may be in a name: a capital letter, or nothing that belongs there. Classes are bits, so
/// that one pass tells of all.
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

/// Origin form, or absolute form that names the same host; `*` for OPTIONS.
fn check_target(parts: &Parts, host: Option<&str>) -> Result<(), RequestError> {
    let uri = &parts.uri;
    if uri.path() == "*" && parts.method == Method::OPTIONS {
        return Ok(());
    }
    if !uri.path().starts_with('/') {
        return Err(RequestError::Target("the request target is not a path"));
    }
    // A translated request has its authority from there.
    let Some(authority) = uri.authority().filter(|_| parts.version != Version::HTTP_2) else { return Ok(()) };
    match uri.scheme_str() {
        Some("http") if host.is_none_or(|host| is_same_authority(authority.as_str(), host, "80")) => Ok(()),
        Some("http") => Err(RequestError::Host("the Host field is not the host of the request target")),
        Some(_) | None => Err(RequestError::Target("the request target is of another scheme")),
    }
}

/// Whether two name the same host; `port` is the one that need not be named.
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

    fn pass(request: http::request::Builder) -> Result<String, RequestError> {
        let (parts, ()) = request.body(()).unwrap().into_parts();
        validate(&parts).map(|clear| clear.host.into_owned())
    }

    #[test]
    fn clear_requests_pass() {
        for (uri, host, name) in [
            ("/", "example.com", "example.com"),
            ("/a?b", "Example.COM.:8080", "example.com"),
            ("/", "[::1]:8080", "[::1]"),
            ("http://example.com/a", "example.com", "example.com"),
            ("http://EXAMPLE.com:80/a", "example.com", "example.com"),
            ("/", "a.b.c.:65535", "a.b.c"),
            ("/", "a:", "a"),
        ] {
            assert_eq!(pass(Request::get(uri).header("host", host)).as_deref(), Ok(name), "{uri} {host}");
        }
        assert_eq!(pass(Request::get("/").version(Version::HTTP_10)).as_deref(), Ok(""));
        assert!(pass(Request::options("*").header("host", "a")).is_ok());
        assert!(pass(Request::post("/").header("host", "a").header("transfer-encoding", "Chunked")).is_ok());
        assert!(pass(Request::post("/").header("host", "a").header("expect", "100-Continue")).is_ok());
    }

    #[test]
    fn ambiguous_hosts_are_refused() {
        assert!(matches!(pass(Request::get("/")), Err(RequestError::Host(_))));
        assert!(matches!(pass(Request::get("/").header("host", "a").header("host", "a")), Err(RequestError::Host(_))));
        for host in [
            "", "a b", "u@a", "a/b", "a:80:80", "a:x", "a:123456", "a:65536", "a:+80", "[::1", "[x]", ":80", "a\u{e9}",
            "a?b", "a#b", ".", ".a", "a..b", "a..", "..:80",
        ] {
            let value = HeaderValue::from_bytes(host.as_bytes()).unwrap();
            assert!(matches!(pass(Request::get("/").header("host", value)), Err(RequestError::Host(_))), "{host}");
        }
        assert!(matches!(pass(Request::get("http://b/").header("host", "a")), Err(RequestError::Host(_))));
        assert!(matches!(pass(Request::get("http://u@a/").header("host", "a")), Err(RequestError::Host(_))));
        assert!(matches!(pass(Request::get("http://a:81/").header("host", "a")), Err(RequestError::Host(_))));
    }

    #[test]
    fn targets_that_are_no_path_are_refused() {
        assert!(matches!(pass(Request::get("admin").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(pass(Request::get("a:80").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(pass(Request::get("*").header("host", "a")), Err(RequestError::Target(_))));
        assert!(matches!(pass(Request::get("ftp://a/").header("host", "a")), Err(RequestError::Target(_))));
        assert_eq!(pass(Request::connect("a:80").header("host", "a")), Err(RequestError::Method));
        assert_eq!(pass(Request::trace("/").header("host", "a")), Err(RequestError::Method));
        for method in ["post", "Post", "M.", &"M".repeat(33)] {
            assert_eq!(
                pass(Request::builder().method(method).uri("/").header("host", "a")),
                Err(RequestError::Malformed)
            );
        }
    }

    #[test]
    fn the_authority_of_a_target_of_http_1_0_becomes_host() {
        let translated = |request: http::request::Builder| {
            let (mut parts, ()) = request.version(Version::HTTP_10).body(()).unwrap().into_parts();
            translate(&mut parts)?;
            let host = validate(&parts)?.host.into_owned();
            Ok((host, parts.headers.get("host").map(|host| host.to_str().unwrap().to_owned())))
        };
        let told = |host: &str, field: &str| Ok((host.to_owned(), Some(field.to_owned())));
        assert_eq!(translated(Request::get("http://Example.com.:81/")), told("example.com", "Example.com.:81"));
        assert_eq!(translated(Request::get("http://a/").header("host", "a:80")), told("a", "a:80"));
        assert_eq!(translated(Request::get("/")), Ok((String::new(), None)));
        for request in [Request::get("http://a/").header("host", "b"), Request::get("http://u@a/")] {
            assert!(matches!(translated(request), Err(RequestError::Host(_))));
        }
        assert!(matches!(translated(Request::get("https://a/")), Err(RequestError::Target(_))));
    }

    #[test]
    fn a_request_of_http_2_is_translated() {
        let translated = |request: http::request::Builder| {
            let (mut parts, ()) = request.version(Version::HTTP_2).body(()).unwrap().into_parts();
            translate(&mut parts)?;
            validate(&parts).map(|clear| clear.host.into_owned())?;
            let fields = |name| parts.headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned());
            Ok((fields("host").collect::<Vec<_>>().join("|"), fields("cookie").collect::<Vec<_>>().join("|")))
        };
        let told = |host: &str, cookie: &str| Ok((host.to_owned(), cookie.to_owned()));
        let get = |uri| Request::get(uri);
        assert_eq!(translated(get("http://A:80/b")), told("A:80", ""));
        assert_eq!(translated(get("https://a:443/b").header("host", "A")), told("a:443", ""));
        assert_eq!(translated(get("/b").header("host", "a")), told("a", ""));
        let cookies = get("http://a/").header("cookie", "b=1").header("x", "y").header("cookie", "c=2; d");
        assert_eq!(translated(cookies), told("a", "b=1; c=2; d"));
        assert!(matches!(translated(get("/b")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("http://u@a/b")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("http://a/b").header("host", "b")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("https://a/b").header("host", "a:80")), Err(RequestError::Host(_))));
        assert!(matches!(translated(get("ws://a/b")), Err(RequestError::Target(_))));
        assert!(matches!(translated(get("http://a/").header("x", " y")), Err(RequestError::Malformed)));
        assert!(matches!(translated(Request::connect("a:80")), Err(RequestError::Method)));
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
            assert!(matches!(pass(request), Err(RequestError::Framing(_))), "{codings:?}");
        }
        for length in ["", "00", "010", "+1", "-1", "1,1", "1 ", "0x1", "9223372036854775808", "99999999999999999999"] {
            let request = Request::post("/").header("host", "a").header("content-length", length);
            assert!(matches!(pass(request), Err(RequestError::Framing(_))), "{length:?}");
        }
        for length in ["0", "1", "10", "9223372036854775807"] {
            let request = Request::post("/").header("host", "a").header("content-length", length);
            assert!(pass(request).is_ok(), "{length:?}");
        }
        let both =
            Request::post("/").header("host", "a").header("transfer-encoding", "chunked").header("content-length", "3");
        assert!(matches!(pass(both), Err(RequestError::Framing(_))));
        assert_eq!(pass(Request::post("/").header("host", "a").header("expect", "x")), Err(RequestError::Expectation));
    }
}
