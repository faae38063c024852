//! Prepares the header fields of requests and responses for the next hop.
//!
//! Fields that concern one connection, and those that `Connection` lists, are not forwarded (RFC 9110, section 7.6.1). A
//! client cannot use `Connection` to remove fields that the gateway or the upstream relies on.

use http::StatusCode;
use http::header::{self, Entry, HeaderMap, HeaderName, HeaderValue};

use super::client_address::{ClientAddress, UNIX};
use super::forwarded::{ClientInfo, X_FORWARDED_FOR, X_FORWARDED_PROTO, element_of_hop};
use super::http1_head::{may_state_length, never_has_body};
use crate::forwarded::ForwardedField;
use crate::percent_encoding::byte_set;

const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// End-to-end fields: `Connection` may list them without effect.
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

/// Hop-by-hop fields that are removed by name.
static CONNECTION_FIELDS: [(SpecialFields, HeaderName); 4] = [
    (SpecialFields::TE, header::TE),
    (SpecialFields::TRANSFER_ENCODING, header::TRANSFER_ENCODING),
    (SpecialFields::EXPECT, header::EXPECT),
    (SpecialFields::UPGRADE, header::UPGRADE),
];

/// Bytes of names that no server confuses with other names. Names are in lower case here.
const PLAIN_NAME_BYTES: [bool; 256] = byte_set(b"abcdefghijklmnopqrstuvwxyz0123456789-");

/// A set of fields that need special treatment. It is computed in one pass, so that the usual message without such
/// fields needs no lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpecialFields(u16);

impl SpecialFields {
    pub const HOST: SpecialFields = SpecialFields(1);
    pub const TE: SpecialFields = SpecialFields(1 << 1);
    pub const CONNECTION: SpecialFields = SpecialFields(1 << 2);
    pub const TRANSFER_ENCODING: SpecialFields = SpecialFields(1 << 3);
    pub const EXPECT: SpecialFields = SpecialFields(1 << 4);
    /// Fields that are always removed.
    const DROPPED: SpecialFields = SpecialFields(1 << 5);
    /// Names that some servers confuse with others: CGI maps `x-user` and `x_user` to one variable.
    const AMBIGUOUS_NAME: SpecialFields = SpecialFields(1 << 6);
    const TRAILER: SpecialFields = SpecialFields(1 << 7);
    /// Forwarding fields, which any client can send.
    const UNTRUSTED_FORWARDING: SpecialFields = SpecialFields(1 << 9);
    pub const UPGRADE: SpecialFields = SpecialFields(1 << 8);
    pub const CONTENT_LENGTH: SpecialFields = SpecialFields(1 << 10);
    const FRAMING: SpecialFields = SpecialFields(SpecialFields::CONTENT_LENGTH.0 | SpecialFields::TRANSFER_ENCODING.0);

    /// The special fields of a message.
    pub fn present_in(headers: &HeaderMap) -> SpecialFields {
        headers.keys().fold(SpecialFields::default(), |special, name| {
            SpecialFields(special.0 | SpecialFields::of_name(name.as_str()).0)
        })
    }

    fn of_name(name: &str) -> SpecialFields {
        match name {
            "host" => SpecialFields::HOST,
            "te" => SpecialFields::TE,
            "connection" => SpecialFields::CONNECTION,
            "transfer-encoding" => SpecialFields::TRANSFER_ENCODING,
            "expect" => SpecialFields::EXPECT,
            "upgrade" => SpecialFields::UPGRADE,
            "content-length" => SpecialFields::CONTENT_LENGTH,
            "forwarded" | "keep-alive" | "proxy-connection" | "proxy-authorization" | "proxy-authenticate" => {
                SpecialFields::DROPPED
            }
            "trailer" => SpecialFields::TRAILER,
            "x-real-ip" => SpecialFields::UNTRUSTED_FORWARDING,
            name if name.starts_with("x-forwarded-") => SpecialFields::UNTRUSTED_FORWARDING,
            name if name.bytes().all(|byte| PLAIN_NAME_BYTES[usize::from(byte)]) => SpecialFields::default(),
            _ => SpecialFields::AMBIGUOUS_NAME,
        }
    }

    /// Whether the sets have a field in common.
    pub fn has(self, mark: SpecialFields) -> bool {
        self.0 & mark.0 != 0
    }
}

/// Fields of requests that the configuration names.
#[derive(Clone, Copy)]
pub struct ConfiguredFields<'a> {
    /// Has the address of the client, if trusted proxies name it there.
    pub client: Option<&'a HeaderName>,
    /// Parts of rule keys, which stay.
    pub keys: &'a [HeaderName],
}

/// Prepares the fields of a request for the upstream: removes hop-by-hop fields and adds the forwarding fields. `peer` is
/// the other end of the connection, `client` the client behind it.
pub fn forward_request(
    headers: &mut HeaderMap,
    special: SpecialFields,
    peer: &HeaderValue,
    client: &ClientInfo,
    ConfiguredFields { client: client_field, keys }: ConfiguredFields<'_>,
) {
    let forwarded = if client.trusted_header == Some(ForwardedField::Forwarded) {
        forwarded_value(headers, peer, client)
    } else {
        None
    };
    let wants_trailers = special.has(SpecialFields::TE) && accepts_trailers(headers);
    remove_hop_by_hop(headers, special, keys);
    if special.has(SpecialFields::AMBIGUOUS_NAME) {
        remove_matching(headers, |name| {
            SpecialFields::of_name(name.as_str()).has(SpecialFields::AMBIGUOUS_NAME) && !keys.contains(name)
        });
    }
    if special.has(SpecialFields::TRAILER) {
        filter_trailer_field(headers, keys);
    }
    if wants_trailers {
        // Trailers of the response are forwarded, so the upstream may send them.
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    // An address that was not taken may be forged.
    if let Some(name) = client_field.filter(|_| !client.is_from_field) {
        headers.remove(name);
    }
    if client.trusted_header == Some(ForwardedField::XForwardedFor) {
        return extend_forwarding_fields(headers, peer, client);
    }
    // The forwarding fields of an untrusted peer are replaced.
    if special.has(SpecialFields::UNTRUSTED_FORWARDING) {
        remove_matching(headers, |name| {
            SpecialFields::of_name(name.as_str()).has(SpecialFields::UNTRUSTED_FORWARDING) && !keys.contains(name)
        });
    }
    if let Some(forwarded) = forwarded {
        headers.insert(header::FORWARDED, forwarded);
        headers.insert(X_FORWARDED_FOR, address_value(client.address));
    } else {
        headers.insert(X_FORWARDED_FOR, peer.clone());
    }
    headers.insert(X_FORWARDED_PROTO, scheme_value(client.is_secure));
    match headers.get(header::HOST).cloned() {
        Some(host) => headers.insert(X_FORWARDED_HOST, host),
        None => headers.remove(X_FORWARDED_HOST),
    };
}

fn scheme_value(is_secure: bool) -> HeaderValue {
    HeaderValue::from_static(if is_secure { "https" } else { "http" })
}

/// Appends the address of a trusted proxy to `X-Forwarded-For`. Of a list of schemes or hosts, only the element of the client
/// stays: the other elements are not the client's, may be forged, and most servers expect one. The next hop, at which the client is
/// one place further from the end, reads this element too.
fn extend_forwarding_fields(headers: &mut HeaderMap, peer: &HeaderValue, client: &ClientInfo) {
    let addresses = join_lines(headers.get_all(X_FORWARDED_FOR).iter().chain([peer]));
    headers.insert(X_FORWARDED_FOR, addresses.unwrap_or_else(|| peer.clone()));
    keep_element_of_client(headers, X_FORWARDED_PROTO, client, |_| Some(scheme_value(client.is_secure)));
    keep_element_of_client(headers, X_FORWARDED_HOST, client, |headers| headers.get(header::HOST).cloned());
}

/// Reduces a list of a forwarding field to the element of the client, or to `default` if it has no element.
fn keep_element_of_client(
    headers: &mut HeaderMap,
    name: HeaderName,
    client: &ClientInfo,
    default: impl FnOnce(&HeaderMap) -> Option<HeaderValue>,
) {
    let lines = headers.get_all(&name);
    let value = match element_of_hop(&lines, client.hops) {
        // Usually this element is the whole field.
        Some(element) if lines.iter().map(HeaderValue::as_bytes).eq([element]) => return,
        Some(element) => HeaderValue::from_bytes(element).ok(),
        None => default(headers),
    };
    if let Some(value) = value {
        headers.insert(name, value);
    }
}

/// The value of `Forwarded` (RFC 7239) with an element for the peer appended. IPv6 addresses are in brackets and quotes.
fn forwarded_value(headers: &HeaderMap, peer: &HeaderValue, client: &ClientInfo) -> Option<HeaderValue> {
    let peer = peer.to_str().ok()?;
    let proto = if client.is_secure { "https" } else { "http" };
    let hop = match peer.contains(':') {
        // A caller of a Unix socket has no name in RFC 7239.
        _ if peer == UNIX => format!("for=unknown;proto={proto}"),
        true => format!("for=\"[{peer}]\";proto={proto}"),
        false => format!("for={peer};proto={proto}"),
    };
    join_lines(headers.get_all(header::FORWARDED).iter().chain([&HeaderValue::from_str(&hop).ok()?]))
}

/// Joins the lines of a list field.
fn join_lines<'a>(lines: impl Iterator<Item = &'a HeaderValue>) -> Option<HeaderValue> {
    let lines: Vec<&[u8]> = lines.map(HeaderValue::as_bytes).filter(|line| !line.is_empty()).collect();
    HeaderValue::from_bytes(&lines.join(&b", "[..])).ok()
}

/// Prepares the fields of a response for the client. Returns `false` if the end of the body is ambiguous: only one numeric
/// Content-Length, or one Transfer-Encoding of `chunked`, is unambiguous (RFC 9112, section 6.3). hyper's
/// HTTP/2 client accepts more, and the gateway would forward it. A response whose status excludes a body only loses the fields.
pub fn forward_response(headers: &mut HeaderMap, status: StatusCode) -> bool {
    let (mut special, mut is_framed, mut is_ambiguous) = (SpecialFields::default(), false, false);
    for (name, value) in &*headers {
        let mark = SpecialFields::of_name(name.as_str());
        special = SpecialFields(special.0 | mark.0);
        if mark.has(SpecialFields::FRAMING) {
            let value = value.as_bytes();
            let is_valid = match mark.has(SpecialFields::CONTENT_LENGTH) {
                true => is_content_length(value),
                false => value.eq_ignore_ascii_case(b"chunked"),
            };
            is_ambiguous |= !is_valid || is_framed;
            is_framed = true;
        }
    }
    if is_ambiguous && !never_has_body(status) {
        return false;
    }
    if is_ambiguous || is_framed && !may_state_length(status) {
        headers.remove(header::CONTENT_LENGTH);
    }
    remove_hop_by_hop(headers, special, &[]);
    true
}

/// Whether a text is a number of bytes. Some clients have 63 bits.
fn is_content_length(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_digit) && str::from_utf8(text).is_ok_and(|digits| digits.parse::<i64>().is_ok())
}

/// Fields that are processed before the body, beside those of other lists.
static FORBIDDEN_IN_TRAILERS: [HeaderName; 8] = [
    header::CACHE_CONTROL,
    header::CONTENT_ENCODING,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::MAX_FORWARDS,
    header::SET_COOKIE,
    header::TE,
    header::TRAILER,
];

static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Fields that HTTP/2 messages must not have (RFC 9113, section 8.2.2).
static FORBIDDEN_IN_HTTP2: [HeaderName; 4] =
    [header::CONNECTION, header::TRANSFER_ENCODING, header::UPGRADE, header::TE];

/// Removes the fields of a response that HTTP/2 forbids. Returns whether the response has a `Date`.
pub fn remove_connection_fields(headers: &mut HeaderMap) -> bool {
    let (mut has_date, mut has_forbidden) = (false, false);
    for name in headers.keys() {
        match *name {
            header::DATE => has_date = true,
            header::CONNECTION | header::TRANSFER_ENCODING | header::UPGRADE | header::TE => has_forbidden = true,
            _ => has_forbidden |= *name == KEEP_ALIVE || *name == PROXY_CONNECTION,
        }
    }
    if has_forbidden {
        let names = FORBIDDEN_IN_HTTP2.iter().chain([&KEEP_ALIVE, &PROXY_CONNECTION]);
        names.for_each(|name| drop(headers.remove(name)));
    }
    has_date
}

fn accepts_trailers(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(header::TE).iter().filter_map(|te| te.to_str().ok());
    codings.flat_map(|te| te.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// Removes the fields that concern one connection. Expect is removed too: the gateway sends 100 (Continue) when it
/// starts to read the body.
fn remove_hop_by_hop(headers: &mut HeaderMap, special: SpecialFields, keys: &[HeaderName]) {
    if special.has(SpecialFields::CONNECTION)
        && let Entry::Occupied(connection) = headers.entry(header::CONNECTION)
    {
        let names = connection_options(connection.iter());
        connection.remove();
        for name in names {
            if !NEVER_HOP_BY_HOP.contains(&name) && !keys.contains(&name) {
                headers.remove(name);
            }
        }
    }
    for (mark, name) in &CONNECTION_FIELDS {
        if special.has(*mark) {
            headers.remove(name);
        }
    }
    if special.has(SpecialFields::DROPPED) {
        remove_matching(headers, |name| SpecialFields::of_name(name.as_str()).has(SpecialFields::DROPPED));
    }
}

fn remove_matching(headers: &mut HeaderMap, is_removed: impl Fn(&HeaderName) -> bool) {
    while let Some(name) = headers.keys().find(|name| is_removed(name)).cloned() {
        headers.remove(name);
    }
}

/// Removes names from `Trailer` that are not allowed in trailers. Over HTTP/1.1 only the trailers listed there are sent.
fn filter_trailer_field(headers: &mut HeaderMap, keys: &[HeaderName]) {
    let values = headers.get_all(header::TRAILER).iter().filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(',')).map(str::trim);
    let names = names.filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok());
    let names = names.filter(|name| is_allowed_in_trailers(name) && !keys.contains(name));
    let names: Vec<String> = names.map(|name| name.to_string()).collect();
    headers.remove(header::TRAILER);
    if let (false, Ok(value)) = (names.is_empty(), HeaderValue::from_str(&names.join(", "))) {
        headers.insert(header::TRAILER, value);
    }
}

/// Removes the trailers of a response that could be taken for fields of the head, or that concern one connection.
pub fn forward_response_trailers(trailers: &mut HeaderMap) {
    // A name that servers confuse with others is none that they act on in a response.
    let is_usual = |name: &HeaderName| {
        let special = SpecialFields::of_name(name.as_str());
        special == SpecialFields::default() || special == SpecialFields::AMBIGUOUS_NAME
    };
    remove_matching(trailers, |name| !is_usual(name) || is_field_of_head(name));
}

/// Removes the trailers of a request that could be taken for fields of the head, or that concern one connection.
pub fn forward_request_trailers(trailers: &mut HeaderMap) {
    remove_matching(trailers, |name| !is_allowed_in_trailers(name));
}

fn is_allowed_in_trailers(name: &HeaderName) -> bool {
    SpecialFields::of_name(name.as_str()) == SpecialFields::default() && !is_field_of_head(name)
}

/// Whether a field is processed before the body, and so is no trailer (RFC 9110, section 6.5.1).
fn is_field_of_head(name: &HeaderName) -> bool {
    NEVER_HOP_BY_HOP.contains(name) || FORBIDDEN_IN_TRAILERS.contains(name)
}

/// The field names that `Connection` lists. The options `keep-alive` and `close` are not field names.
fn connection_options<'a>(values: impl Iterator<Item = &'a HeaderValue>) -> Vec<HeaderName> {
    let is_option = |option: &[u8]| option.eq_ignore_ascii_case(b"keep-alive") || option.eq_ignore_ascii_case(b"close");
    let mut values = values.map(HeaderValue::as_bytes).filter(|value| !is_option(value));
    let Some(first) = values.next() else { return Vec::new() };
    let options = std::iter::once(first)
        .chain(values)
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii);
    options.filter(|option| !is_option(option)).filter_map(|option| HeaderName::from_bytes(option).ok()).collect()
}

/// An address as a field value.
pub fn address_value(peer: ClientAddress) -> HeaderValue {
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

    #[test]
    fn an_http2_response_has_no_connection_fields() {
        let mut response =
            headers(&[("connection", "close"), ("keep-alive", "timeout=5"), ("upgrade", "a"), ("x", "y")]);
        assert!(!remove_connection_fields(&mut response));
        assert_eq!(response, headers(&[("x", "y")]));
        for name in FORBIDDEN_IN_HTTP2.iter().chain([&KEEP_ALIVE, &PROXY_CONNECTION]) {
            let mut response = HeaderMap::from_iter([(name.clone(), HeaderValue::from_static("z"))]);
            response.insert(header::DATE, HeaderValue::from_static("today"));
            assert!(remove_connection_fields(&mut response));
            assert_eq!(response.len(), 1, "{name}");
        }
    }

    fn forwarded(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        forwarded_from("::ffff:192.0.2.7", None, fields)
    }

    fn forwarded_from(
        peer: &str,
        trusted: Option<ForwardedField>,
        fields: &[(&'static str, &'static str)],
    ) -> HeaderMap {
        let mut headers = headers(fields);
        let (special, address) = (SpecialFields::present_in(&headers), address_value(peer.parse().unwrap()));
        let client = match trusted {
            None => ClientInfo::of_peer(peer.parse().unwrap(), false),
            Some(_) => ClientInfo {
                hops: 1,
                trusted_header: trusted,
                ..ClientInfo::of_peer("198.51.100.1".parse().unwrap(), true)
            },
        };
        let keys = [HeaderName::from_static("x-api-key")];
        forward_request(&mut headers, special, &address, &client, ConfiguredFields { client: None, keys: &keys });
        headers
    }

    #[test]
    fn the_field_of_the_client_is_forwarded_only_if_it_named_the_client() {
        let field = HeaderName::from_static("x-real-ip");
        let peer = || ClientInfo::of_peer("10.0.0.1".parse().unwrap(), false);
        let trusted = ClientInfo { trusted_header: Some(ForwardedField::XForwardedFor), ..peer() };
        for (client, stays) in
            [(peer(), false), (trusted, false), (ClientInfo { is_from_field: true, ..trusted }, true)]
        {
            let mut fields = headers(&[("host", "a"), ("x-real-ip", "192.0.2.7"), ("connection", "x-real-ip")]);
            let (special, peer) = (SpecialFields::present_in(&fields), address_value("10.0.0.1".parse().unwrap()));
            let configured = ConfiguredFields { client: Some(&field), keys: std::slice::from_ref(&field) };
            forward_request(&mut fields, special, &peer, &client, configured);
            assert_eq!(fields.contains_key(&field), stays, "{client:?}");
        }
    }

    #[test]
    fn the_fields_of_a_trusted_proxy_are_extended() {
        let fields = [
            ("host", "a"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-for", "10.0.0.2"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "shop.example"),
            ("x-forwarded-port", "443"),
            ("forwarded", "for=6.6.6.6"),
        ];
        let out = forwarded_from("10.0.0.1", Some(ForwardedField::XForwardedFor), &fields);
        assert_eq!(out["x-forwarded-for"], "198.51.100.1, 10.0.0.2, 10.0.0.1");
        assert_eq!(out["x-forwarded-proto"], "https");
        assert_eq!(out["x-forwarded-host"], "shop.example");
        assert_eq!(out["x-forwarded-port"], "443");
        assert!(!out.contains_key("forwarded"));
        for (lines, kept) in [
            (&["https, http"][..], "http"),
            (&["https", " WSS "], "WSS"),
            (&["https, http,"], "http"),
            (&[" http"], "http"),
            (&[","], "https"),
            (&[], "https"),
        ] {
            let lines = lines.iter().map(|line| ("x-forwarded-proto", *line));
            let fields: Vec<_> = lines.chain([("x-forwarded-for", "198.51.100.1")]).collect();
            let out = forwarded_from("10.0.0.1", Some(ForwardedField::XForwardedFor), &fields);
            assert!(out.get_all("x-forwarded-proto").iter().eq([kept]), "{fields:?}: {out:?}");
        }
        let out = forwarded_from("fd00::1", Some(ForwardedField::Forwarded), &fields);
        assert_eq!(out["forwarded"], "for=6.6.6.6, for=\"[fd00::1]\";proto=https");
        assert_eq!(out["x-forwarded-for"], "198.51.100.1");
        assert_eq!(out["x-forwarded-proto"], "https");
        assert_eq!(out["x-forwarded-host"], "a");
        assert!(!out.contains_key("x-forwarded-port"));
    }

    #[test]
    fn hop_by_hop_fields_are_removed() {
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
    fn connection_cannot_remove_end_to_end_fields() {
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
    fn forwarding_fields_of_an_untrusted_client_are_replaced() {
        let out = forwarded(&[
            ("host", "a"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-for", "5.6.7.8"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
            ("forwarded", "for=1.2.3.4"),
            ("x-forwarded-port", "443"),
            ("x-real-ip", "1.2.3.4"),
        ]);
        assert!(!out.contains_key("x-forwarded-port") && !out.contains_key("x-real-ip"));
        let all = |name: &str| out.get_all(name).iter().map(|v| v.to_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(all("x-forwarded-for"), ["192.0.2.7"]);
        assert_eq!(all("x-forwarded-proto"), ["http"]);
        assert_eq!(all("x-forwarded-host"), ["a"]);
        assert!(all("forwarded").is_empty());
    }

    #[test]
    fn ambiguous_names_are_removed() {
        let out =
            forwarded(&[("host", "a"), ("x_user", "1"), ("x_forwarded_for", "6.6.6.6"), ("x.y", "1"), ("x-ok1", "1")]);
        assert!(!out.contains_key("x_user") && !out.contains_key("x_forwarded_for") && !out.contains_key("x.y"));
        assert!(out.contains_key("x-ok1"));
    }

    #[test]
    fn trailers_cannot_replace_fields_of_the_head() {
        let out = forwarded(&[
            ("host", "a"),
            ("trailer", "X-Digest, X-Forwarded-For, x-api-key"),
            ("trailer", "host, x_y, x-b"),
        ]);
        assert_eq!(out["trailer"], "x-digest, x-b");
        assert!(!forwarded(&[("host", "a"), ("trailer", "cookie")]).contains_key("trailer"));
    }

    #[test]
    fn only_trailers_of_te_is_forwarded() {
        assert_eq!(forwarded(&[("host", "a"), ("te", "gzip, trailers"), ("connection", "te")])["te"], "trailers");
        assert!(!forwarded(&[("host", "a"), ("te", "gzip")]).contains_key("te"));
    }
}
