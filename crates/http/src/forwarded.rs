//! Finds the client behind trusted proxies, in `X-Forwarded-For` or `Forwarded`, or in a field that has one address.
//!
//! Every proxy appends the address of its peer, so a client can forge all but the end of the list. The list is read from
//! its end to the first address that is no trusted proxy, or to a given place. An unreadable element ends the search: the
//! proxy that appended it counts as the client.

use std::net::{IpAddr, Ipv6Addr};

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::client_address::{AddressRange, AddressSet, ClientAddress, UNIX};

/// Upper bound of the hops that are read.
pub const HOPS_MAX: usize = 32;
/// Upper bound of a node (RFC 7239, section 6): an IPv6 address with a zone, brackets and a port.
const NODE_MAX_BYTES: usize = 128;

pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The header field in which trusted proxies name the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardedField {
    XForwardedFor,
    /// RFC 7239.
    Forwarded,
}

/// Where trusted proxies name the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ClientPlace {
    /// The first address from the end of the forwarding header that is no trusted proxy.
    FirstUntrusted,
    /// This element of the forwarding header, counted from the end, which is 1. The addresses after it are not compared.
    Hop(usize),
    /// A field that has one address. The scheme is still read at the place of the client in `X-Forwarded-For`.
    Field(HeaderName),
}

/// The proxies whose forwarding header is trusted, compiled.
#[derive(Debug)]
pub struct TrustedProxies {
    proxies: AddressSet,
    field: ForwardedField,
    place: ClientPlace,
}

/// The client of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientInfo {
    pub address: ClientAddress,
    /// Whether the client used https.
    pub is_secure: bool,
    /// The place of the client in the forwarding header, counted from the end; 0 if it is the peer.
    pub hops: usize,
    /// The forwarding header that was trusted; `None` if the peer is no trusted proxy.
    pub trusted_header: Option<ForwardedField>,
    /// Whether the client was named by [`ClientPlace::Field`].
    pub is_from_field: bool,
}

impl ClientInfo {
    /// The client is the peer.
    pub fn of_peer(address: ClientAddress, is_secure: bool) -> ClientInfo {
        ClientInfo { address, is_secure, hops: 0, trusted_header: None, is_from_field: false }
    }
}

impl TrustedProxies {
    pub fn new(proxies: &[AddressRange], field: ForwardedField, place: ClientPlace) -> TrustedProxies {
        TrustedProxies { proxies: AddressSet::new(proxies), field, place }
    }

    pub fn contains(&self, address: ClientAddress) -> bool {
        self.proxies.contains(address)
    }

    /// The field of [`ClientPlace::Field`].
    pub fn client_field(&self) -> Option<&HeaderName> {
        if let ClientPlace::Field(name) = &self.place { Some(name) } else { None }
    }

    /// The client of a request about which the proxy `peer` asks. The proxy is trusted without being listed.
    pub fn client_of_proxy(&self, peer: ClientAddress, headers: &HeaderMap) -> ClientInfo {
        let client = self.client_from_x_forwarded_for(peer, false, headers);
        // The proxy passes fields of its own peer on. That peer is the last element.
        let nearest = self.client_field().and_then(|_| x_forwarded_for_addresses(headers).next().flatten());
        match nearest {
            Some(nearest) if self.proxies.contains(nearest) => self.named_by_field(client, nearest, headers),
            // Without the element, the field may be the client's own.
            _ => client,
        }
    }

    /// The client behind `peer`, by the value of one `X-Forwarded-For`, which may be empty, and the other fields, with its
    /// scheme if they have it; `None` if the peer is no trusted proxy, or neither names a client.
    pub fn client_in_log(
        &self,
        peer: ClientAddress,
        list: &[u8],
        headers: &HeaderMap,
    ) -> Option<(ClientAddress, Option<bool>)> {
        if !self.proxies.contains(peer) {
            return None;
        }
        match self.client_field() {
            Some(name) if headers.contains_key(name) => Some((address_in_field(headers, name).unwrap_or(peer), None)),
            None if self.reads_forwarded() && headers.contains_key(header::FORWARDED) => {
                let (address, _, is_secure) = self.client_in_forwarded(peer, headers);
                Some((address, is_secure))
            }
            _ => (!list.is_empty()).then(|| (self.client_in_list(peer, addresses_from_the_end(list)).0, None)),
        }
    }

    /// Whether the client is read from `Forwarded`.
    pub fn reads_forwarded(&self) -> bool {
        self.field == ForwardedField::Forwarded
    }

    /// The client of a request that arrived on a connection from `peer`.
    pub fn client(&self, peer: ClientAddress, is_secure: bool, headers: &HeaderMap) -> ClientInfo {
        if !self.proxies.contains(peer) {
            return ClientInfo::of_peer(peer, is_secure);
        }
        let client = match self.field {
            ForwardedField::XForwardedFor => self.client_from_x_forwarded_for(peer, is_secure, headers),
            ForwardedField::Forwarded => self.client_from_forwarded(peer, is_secure, headers),
        };
        self.named_by_field(client, peer, headers)
    }

    /// The client that the field of [`ClientPlace::Field`] names, if it is configured. The client is `sender` if the field does not
    /// have exactly one address.
    fn named_by_field(&self, client: ClientInfo, sender: ClientAddress, headers: &HeaderMap) -> ClientInfo {
        let Some(name) = self.client_field() else { return client };
        let named = address_in_field(headers, name);
        ClientInfo { address: named.unwrap_or(sender), is_from_field: named.is_some(), ..client }
    }

    /// The client in a list that is given from its end, and the number of elements up to there: the first address that is no
    /// trusted proxy, or the element of a given place. An unreadable hop ends the search. If the list is too short for the place,
    /// the client is the peer.
    fn client_in_list(
        &self,
        peer: ClientAddress,
        mut list: impl Iterator<Item = Option<ClientAddress>>,
    ) -> (ClientAddress, usize) {
        if let ClientPlace::Hop(hops) = self.place {
            let is_usable =
                |address: &ClientAddress| *address != ClientAddress::Unix || self.proxies.contains(*address);
            let client = list.nth(hops - 1).flatten().filter(is_usable);
            return client.map_or((peer, 0), |address| (address, hops));
        }
        let (mut client, mut hops) = (peer, 0);
        for address in list.take(HOPS_MAX).map_while(|hop| hop) {
            // Only the proxy can distinguish the callers of its Unix socket.
            if address == ClientAddress::Unix && !self.proxies.contains(address) {
                break;
            }
            (client, hops) = (address, hops + 1);
            if !self.proxies.contains(address) {
                break;
            }
        }
        (client, hops)
    }

    fn client_from_x_forwarded_for(&self, peer: ClientAddress, is_secure: bool, headers: &HeaderMap) -> ClientInfo {
        let (address, hops) = self.client_in_list(peer, x_forwarded_for_addresses(headers));
        let scheme = element_of_hop(headers.get_all(X_FORWARDED_PROTO), hops);
        let is_secure = scheme.and_then(is_https).unwrap_or(is_secure);
        let trusted_header = Some(ForwardedField::XForwardedFor);
        ClientInfo { address, is_secure, hops, trusted_header, is_from_field: false }
    }

    /// As [`TrustedProxies::client_from_x_forwarded_for`] for `Forwarded`, whose elements also have the scheme.
    fn client_from_forwarded(&self, peer: ClientAddress, is_secure: bool, headers: &HeaderMap) -> ClientInfo {
        let (address, hops, named) = self.client_in_forwarded(peer, headers);
        let (is_secure, trusted_header) = (named.unwrap_or(is_secure), Some(self.field));
        ClientInfo { address, is_secure, hops, trusted_header, is_from_field: false }
    }

    /// The client in `Forwarded`, the number of elements up to there, and the scheme of the last of them that has one.
    fn client_in_forwarded(&self, peer: ClientAddress, headers: &HeaderMap) -> (ClientAddress, usize, Option<bool>) {
        let mut client = (peer, 0, None);
        let place = if let ClientPlace::Hop(hops) = self.place { Some(hops) } else { None };
        let mut seen = 0;
        for line in headers.get_all(header::FORWARDED).iter().rev() {
            let Some((elements, count)) = last_elements(line.as_bytes()) else { return client };
            for element in elements[..count].iter().rev() {
                seen += 1;
                if place.is_some_and(|place| seen < place) {
                    continue;
                }
                let hop = if seen <= HOPS_MAX { parse_element(element) } else { None };
                let Some(hop) = hop else { return client };
                client = (hop.address.into(), seen, hop.is_secure.or(client.2));
                if place.is_some() || !self.proxies.contains(client.0) {
                    return client;
                }
            }
        }
        client
    }
}

/// The address of a field that is given once and has one address.
fn address_in_field(headers: &HeaderMap, name: &HeaderName) -> Option<ClientAddress> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { parse_node(value.as_bytes().trim_ascii()).map(ClientAddress::Ip) }
}

/// The addresses of all `X-Forwarded-For` lines, from the end; `None` for an element that is no address.
fn x_forwarded_for_addresses(headers: &HeaderMap) -> impl Iterator<Item = Option<ClientAddress>> {
    headers.get_all(X_FORWARDED_FOR).iter().rev().map(HeaderValue::as_bytes).flat_map(addresses_from_the_end)
}

fn addresses_from_the_end(line: &[u8]) -> impl Iterator<Item = Option<ClientAddress>> {
    elements_from_end(line).map(|element| match element {
        element if element == UNIX.as_bytes() => Some(ClientAddress::Unix),
        element => parse_node(element).map(ClientAddress::Ip),
    })
}

/// The elements of a list, from its end. A recipient ignores empty elements (RFC 9110, section 5.6.1).
fn elements_from_end(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}

/// The element of a list of a forwarding field that the proxy next to the client has added. Every proxy appends an element, as to
/// `X-Forwarded-For`. The first element of a shorter list: some proxies replace the list, or pass it on unchanged.
pub fn element_of_hop<'a>(
    lines: impl IntoIterator<Item = &'a HeaderValue, IntoIter: DoubleEndedIterator>,
    hops: usize,
) -> Option<&'a [u8]> {
    let elements = lines.into_iter().rev().map(HeaderValue::as_bytes).flat_map(elements_from_end);
    elements.take(hops.max(1)).last()
}

fn is_https(scheme: &[u8]) -> Option<bool> {
    match scheme {
        scheme if scheme.eq_ignore_ascii_case(b"https") => Some(true),
        scheme if scheme.eq_ignore_ascii_case(b"http") => Some(false),
        _ => None,
    }
}

/// Parses an address with or without a port. IPv6 with a port is in brackets. A zone is dropped: it is meaningful only on
/// the host that added it.
fn parse_node(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= NODE_MAX_BYTES)?;
    let v6 = |text: &str| {
        let address = text.split_once('%').map_or(text, |(address, _zone)| address);
        address.parse::<Ipv6Addr>().ok().map(|address| IpAddr::from(address).to_canonical())
    };
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        return v6(address).filter(|_| port.is_empty() || port.strip_prefix(':').is_some_and(is_port));
    }
    match text.split_once(':') {
        Some((address, port)) if !port.contains(':') => {
            address.parse().ok().filter(|address: &IpAddr| address.is_ipv4() && is_port(port))
        }
        Some(_) => v6(text),
        None => text.parse().ok(),
    }
}

fn is_port(text: &str) -> bool {
    (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The parts of a `Forwarded` element that the gateway uses.
struct ForwardedElement {
    address: IpAddr,
    is_secure: Option<bool>,
}

/// The last elements of a line, and their number; `None` if a quoted string is not terminated.
fn last_elements(line: &[u8]) -> Option<([&[u8]; HOPS_MAX], usize)> {
    let mut last: [&[u8]; HOPS_MAX] = [&[]; HOPS_MAX];
    let mut count = 0;
    for element in split_outside_quotes(line, b',') {
        let element = element?.trim_ascii();
        if element.is_empty() {
            continue;
        }
        if count == HOPS_MAX {
            last.rotate_left(1);
            count -= 1;
        }
        last[count] = element;
        count += 1;
    }
    Some((last, count))
}

/// Splits at a separator outside of quoted strings. Ends with `None` if a quoted string is not terminated.
fn split_outside_quotes(text: &[u8], separator: u8) -> impl Iterator<Item = Option<&[u8]>> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let (mut quoted, mut escaped) = (false, false);
        for (at, byte) in text.iter().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                byte if *byte == separator && !quoted => {
                    rest = Some(&text[at + 1..]);
                    return Some(Some(&text[..at]));
                }
                _ => {}
            }
        }
        rest = None;
        Some(Some(text).filter(|_| !quoted))
    })
}

/// Parses `for=…;proto=…` in any order; `None` if a name occurs twice.
fn parse_element(element: &[u8]) -> Option<ForwardedElement> {
    let (mut address, mut proto) = (None, None);
    for pair in split_outside_quotes(element, b';') {
        let pair = pair?.trim_ascii();
        if pair.is_empty() {
            continue;
        }
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&pair[..equals], &pair[equals + 1..]);
        let mut buffer = [0; NODE_MAX_BYTES];
        if name.eq_ignore_ascii_case(b"for") {
            let node = parse_node(unquote(value, &mut buffer)?)?;
            if address.replace(node).is_some() {
                return None;
            }
        } else if name.eq_ignore_ascii_case(b"proto") && proto.replace(is_https(unquote(value, &mut buffer)?)).is_some()
        {
            return None;
        }
    }
    Some(ForwardedElement { address: address?, is_secure: proto.flatten() })
}

/// A token, or the content of a quoted string.
fn unquote<'a>(value: &'a [u8], buffer: &'a mut [u8; NODE_MAX_BYTES]) -> Option<&'a [u8]> {
    let Some(inner) = value.strip_prefix(b"\"") else {
        return (!value.contains(&b'"')).then_some(value);
    };
    let mut bytes = inner.strip_suffix(b"\"")?.iter();
    let mut length = 0;
    while let Some(byte) = bytes.next() {
        let byte = match byte {
            b'\\' => bytes.next()?,
            b'"' => return None,
            byte => byte,
        };
        *buffer.get_mut(length)? = *byte;
        length += 1;
    }
    Some(&buffer[..length])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PEER: &str = "10.0.0.1";

    fn trusted_proxies(by: ForwardedField) -> TrustedProxies {
        proxies_with(by, ClientPlace::FirstUntrusted)
    }

    fn proxies_with(by: ForwardedField, place: ClientPlace) -> TrustedProxies {
        TrustedProxies::new(
            &["10.0.0.0/8", "fd00::/8"].map(|text| AddressRange::Network(text.parse().unwrap())),
            by,
            place,
        )
    }

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn found(by: ForwardedField, peer: &str, fields: &[(&'static str, &str)]) -> ClientInfo {
        trusted_proxies(by).client(peer.parse().unwrap(), false, &headers(fields))
    }

    fn by_list(lines: &[&str]) -> String {
        let fields: Vec<_> = lines.iter().map(|line| ("x-forwarded-for", *line)).collect();
        found(ForwardedField::XForwardedFor, PEER, &fields).address.to_string()
    }

    fn by_forwarded(lines: &[&str]) -> String {
        let fields: Vec<_> = lines.iter().map(|line| ("forwarded", *line)).collect();
        found(ForwardedField::Forwarded, PEER, &fields).address.to_string()
    }

    #[test]
    fn the_client_is_the_first_untrusted_address_from_the_right() {
        for (lines, client) in [
            (&[][..], PEER),
            (&["192.0.2.7"], "192.0.2.7"),
            (&["6.6.6.6, 192.0.2.7"], "192.0.2.7"),
            (&["6.6.6.6, 192.0.2.7, 10.1.1.1, fd00::1"], "192.0.2.7"),
            (&["6.6.6.6", "192.0.2.7", "10.1.1.1"], "192.0.2.7"),
            (&["192.0.2.7,,10.1.1.1 ,"], "192.0.2.7"),
            (&["10.9.9.9, 10.1.1.1"], "10.9.9.9"),
            (&["192.0.2.7:1234"], "192.0.2.7"),
            (&["[2001:db8::1]:1234"], "2001:db8::1"),
            (&["[2001:db8::1]"], "2001:db8::1"),
            (&["2001:db8::1"], "2001:db8::1"),
            (&["fe80::1%eth0"], "fe80::1"),
            (&["::ffff:192.0.2.7"], "192.0.2.7"),
            (&["192.0.2.7, ::ffff:10.1.1.1"], "192.0.2.7"),
        ] {
            assert_eq!(by_list(lines), client, "{lines:?}");
        }
    }

    #[test]
    fn the_callers_of_a_unix_socket_are_one_client_unless_they_are_trusted() {
        let network = AddressRange::Network("10.0.0.0/8".parse().unwrap());
        let client = |proxies: &[AddressRange], peer: &str, list: &'static str| {
            let headers = HeaderMap::from_iter([(X_FORWARDED_FOR, HeaderValue::from_static(list))]);
            let proxies = TrustedProxies::new(proxies, ForwardedField::XForwardedFor, ClientPlace::FirstUntrusted);
            proxies.client(peer.parse().unwrap(), false, &headers).address.to_string()
        };
        for (list, of_untrusted, of_trusted) in [
            ("192.0.2.7", "unix:", "192.0.2.7"),
            ("6.6.6.6, 192.0.2.7, 10.1.1.1", "unix:", "192.0.2.7"),
            ("192.0.2.7, unix:", "unix:", "192.0.2.7"),
            ("unix:, 192.0.2.7", "unix:", "192.0.2.7"),
            ("unix:", "unix:", "unix:"),
            ("unknown", "unix:", "unix:"),
        ] {
            assert_eq!(client(&[network], "unix:", list), of_untrusted, "{list}");
            assert_eq!(client(&[network, AddressRange::Unix], "unix:", list), of_trusted, "{list}");
        }
        // Behind a trusted proxy that has clients on a Unix socket.
        assert_eq!(client(&[network], "10.0.0.1", "192.0.2.7, unix:"), "10.0.0.1");
        assert_eq!(client(&[network, AddressRange::Unix], "10.0.0.1", "192.0.2.7, unix:"), "192.0.2.7");
        // At the place of `trusted_hops`.
        for (proxies, found) in [(&[network][..], "10.0.0.1"), (&[network, AddressRange::Unix], "unix:")] {
            let proxies = TrustedProxies::new(proxies, ForwardedField::XForwardedFor, ClientPlace::Hop(1));
            let list = headers(&[("x-forwarded-for", "192.0.2.7, unix:")]);
            assert_eq!(proxies.client("10.0.0.1".parse().unwrap(), false, &list).address.to_string(), found);
        }
    }

    #[test]
    fn an_unreadable_hop_ends_the_search_at_the_hop_before() {
        for hop in [
            "unknown",
            "_x",
            "a",
            "192.0.2",
            "192.0.2.7:",
            "192.0.2.7:a",
            "192.0.2.7:123456",
            "[::1",
            "[::1]a",
            "[::1]:",
            "::1]",
            "1:2",
            "192.0.2.7 1.1.1.1",
            "\"192.0.2.7\"",
            "for=192.0.2.7",
            "010.0.0.1",
            "1.2.3.4%eth0",
            "\u{e9}",
        ] {
            assert_eq!(by_list(&[&format!("192.0.2.7, {hop}, 10.2.2.2")]), "10.2.2.2", "{hop}");
            assert_eq!(by_list(&[&format!("192.0.2.7, {hop}")]), PEER, "{hop}");
        }
        let long = format!("192.0.2.7{}", ", 10.3.3.3".repeat(HOPS_MAX));
        assert_eq!(by_list(&[&long]), "10.3.3.3");
        assert_eq!(by_list(&[&long[..long.len() - 10]]), "192.0.2.7");
    }

    #[test]
    fn forwarded_is_parsed_as_rfc_7239_defines() {
        for (lines, client) in [
            (&[][..], PEER),
            (&["for=192.0.2.7"], "192.0.2.7"),
            (&["For=\"192.0.2.7:80\";proto=https"], "192.0.2.7"),
            (&["for=6.6.6.6, for=\"[2001:db8::1]:4711\""], "2001:db8::1"),
            (&["for=\"[2001:db8::1]\";by=10.0.0.1, for=10.1.1.1"], "2001:db8::1"),
            (&["for=6.6.6.6", "for=192.0.2.7;host=\"a,b;for=1.1.1.1\""], "192.0.2.7"),
            (&["for=\"\\192.0.2\\.7\""], "192.0.2.7"),
            (&["for=192.0.2.7, for=unknown"], PEER),
            (&["for=192.0.2.7, for=_hidden, for=10.2.2.2"], "10.2.2.2"),
            (&["for=192.0.2.7, proto=https"], PEER),
            (&["for=192.0.2.7;for=192.0.2.7"], PEER),
            (&["for=\"192.0.2.7"], PEER),
            (&["for=192.0.2.7, for=\"10.2.2.2, for=10.1.1.1"], PEER),
            (&["for=2001:db8::1"], "2001:db8::1"),
            (&["192.0.2.7"], PEER),
        ] {
            assert_eq!(by_forwarded(lines), client, "{lines:?}");
        }
    }

    #[test]
    fn the_scheme_is_that_of_the_trusted_hop() {
        let secure = |by, peer, fields: &[(&'static str, &str)]| found(by, peer, fields).is_secure;
        assert!(secure(ForwardedField::XForwardedFor, PEER, &[("x-forwarded-proto", "http, HTTPS")]));
        // Each proxy appends its scheme, or the first one alone states it.
        for (addresses, schemes, is_secure) in [
            (&["192.0.2.7, 10.1.1.1"][..], &["https,http"][..], true),
            (&["192.0.2.7, 10.1.1.1"], &["http,https"], false),
            (&["192.0.2.7, 10.1.1.1"], &["https"], true),
            (&["192.0.2.7", "10.1.1.1"], &["https", "http"], true),
            (&["6.6.6.6, 192.0.2.7, 10.1.1.1"], &["https, http,, http"], false),
            (&["6.6.6.6, 192.0.2.7, 10.1.1.1"], &["http, https, http"], true),
            (&["192.0.2.7, unknown, 10.1.1.1"], &["https, https, http"], false),
            (&["192.0.2.7"], &["https, http"], false),
            (&["192.0.2.7, 10.1.1.1"], &["wss, http"], false),
        ] {
            let addresses = addresses.iter().map(|line| ("x-forwarded-for", *line));
            let fields: Vec<_> = addresses.chain(schemes.iter().map(|line| ("x-forwarded-proto", *line))).collect();
            assert_eq!(secure(ForwardedField::XForwardedFor, PEER, &fields), is_secure, "{fields:?}");
        }
        assert!(!secure(ForwardedField::XForwardedFor, PEER, &[("x-forwarded-proto", "https, http")]));
        assert!(!secure(ForwardedField::XForwardedFor, "9.9.9.9", &[("x-forwarded-proto", "https")]));
        assert!(secure(
            ForwardedField::Forwarded,
            PEER,
            &[("forwarded", "for=192.0.2.7;proto=https, for=10.1.1.1;proto=http")]
        ));
        assert!(!secure(ForwardedField::Forwarded, PEER, &[("forwarded", "for=6.6.6.6;proto=https, for=192.0.2.7")]));
    }

    #[test]
    fn only_trusted_peers_and_the_configured_field_are_read() {
        let field = |by, peer, name| found(by, peer, &[(name, "for=6.6.6.6"), (name, "6.6.6.6")]).address.to_string();
        assert_eq!(field(ForwardedField::XForwardedFor, "192.0.2.9", "x-forwarded-for"), "192.0.2.9");
        assert_eq!(field(ForwardedField::XForwardedFor, PEER, "forwarded"), PEER);
        assert_eq!(field(ForwardedField::Forwarded, PEER, "x-forwarded-for"), PEER);
    }

    #[test]
    fn the_client_is_the_element_of_the_given_place() {
        let found = |hops, field, peer: &str, lines: &[&str]| {
            let name = if field == ForwardedField::Forwarded { "forwarded" } else { "x-forwarded-for" };
            let mut fields: Vec<_> = lines.iter().map(|line| (name, *line)).collect();
            fields.push(("x-forwarded-proto", "https, http"));
            let client =
                proxies_with(field, ClientPlace::Hop(hops)).client(peer.parse().unwrap(), false, &headers(&fields));
            (client.address.to_string(), client.hops, client.is_secure)
        };
        let x_forwarded_for = |hops, lines: &[&str]| found(hops, ForwardedField::XForwardedFor, PEER, lines);
        let expected = |client: &str, hops, is_secure| (client.to_owned(), hops, is_secure);
        for lines in [
            &["6.6.6.6, 192.0.2.7, 203.0.113.1"][..],
            &["6.6.6.6", "192.0.2.7,,", "unknown"],
            &["192.0.2.7:80, 10.1.1.1"],
        ] {
            assert_eq!(x_forwarded_for(2, lines), expected("192.0.2.7", 2, true), "{lines:?}");
        }
        // An address of a trusted proxy at the place is a client too.
        assert_eq!(x_forwarded_for(1, &["192.0.2.7, 10.1.1.1"]), expected("10.1.1.1", 1, false));
        // Lists without the place, or with an unreadable element there: the peer is the client.
        for lines in [&["192.0.2.7"][..], &[], &["6.6.6.6, unknown, 203.0.113.1"], &["192.0.2.7,,"]] {
            assert_eq!(x_forwarded_for(2, lines), expected(PEER, 0, false), "{lines:?}");
        }
        let list = ["6.6.6.6, 192.0.2.7, 203.0.113.1"];
        assert_eq!(found(2, ForwardedField::XForwardedFor, "9.9.9.9", &list), expected("9.9.9.9", 0, false));
        assert_eq!(found(2, ForwardedField::Forwarded, PEER, &list), expected(PEER, 0, false));
        let forwarded = |lines: &[&str]| found(2, ForwardedField::Forwarded, PEER, lines);
        let client = "for=6.6.6.6, for=192.0.2.7;proto=https";
        for last in ["for=203.0.113.1;proto=http", "for=_hidden", "proto=http"] {
            assert_eq!(forwarded(&[&format!("{client}, {last}")]), expected("192.0.2.7", 2, true), "{last}");
            assert_eq!(forwarded(&[client, last]), expected("192.0.2.7", 2, true), "{last}");
        }
        assert_eq!(forwarded(&["for=6.6.6.6, for=_hidden;proto=https, for=10.1.1.1"]), expected(PEER, 0, false));
        assert_eq!(forwarded(&["for=192.0.2.7;proto=https"]), expected(PEER, 0, false));
    }

    #[test]
    fn the_client_is_the_only_address_of_the_given_field() {
        const FIELD: HeaderName = HeaderName::from_static("cf-connecting-ip");
        let proxies = proxies_with(ForwardedField::XForwardedFor, ClientPlace::Field(FIELD));
        let found = |peer: &str, fields: &[(&'static str, &str)]| {
            let client = proxies.client(peer.parse().unwrap(), false, &headers(fields));
            (client.address.to_string(), client.is_from_field)
        };
        let expected = |client: &str, is_from_field| (client.to_owned(), is_from_field);
        let list = ("x-forwarded-for", "6.6.6.6, 192.0.2.9");
        for (value, client) in [
            ("192.0.2.7", "192.0.2.7"),
            (" 192.0.2.7\t", "192.0.2.7"),
            ("192.0.2.7:443", "192.0.2.7"),
            ("2001:db8::1", "2001:db8::1"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            // A trusted proxy may be a client.
            ("10.1.1.1", "10.1.1.1"),
        ] {
            assert_eq!(found(PEER, &[("cf-connecting-ip", value), list]), expected(client, true), "{value}");
            assert_eq!(found("9.9.9.9", &[("cf-connecting-ip", value), list]), expected("9.9.9.9", false), "{value}");
        }
        for value in ["", "192.0.2.7, 192.0.2.8", "unknown", "a", "192.0.2.7 192.0.2.8"] {
            assert_eq!(found(PEER, &[("cf-connecting-ip", value), list]), expected(PEER, false), "{value}");
        }
        let twice = [("cf-connecting-ip", "192.0.2.7"), ("cf-connecting-ip", "192.0.2.7")];
        assert_eq!(found(PEER, &twice), expected(PEER, false));
        assert_eq!(found(PEER, &[list]), expected(PEER, false));
        // The scheme is that of the client's place in the list.
        let scheme = |schemes| {
            let fields = [
                ("cf-connecting-ip", "192.0.2.9"),
                ("x-forwarded-for", "192.0.2.9, 10.1.1.1"),
                ("x-forwarded-proto", schemes),
            ];
            proxies.client(PEER.parse().unwrap(), false, &headers(&fields)).is_secure
        };
        assert!(scheme("https, http") && scheme("https") && !scheme("http, https"));
        // A proxy that asks about a request passes the field of its peer on, which must be trusted itself.
        let asked = |list: &str| {
            let fields = headers(&[("cf-connecting-ip", "192.0.2.7"), ("x-forwarded-for", list)]);
            proxies.client_of_proxy("127.0.0.1".parse().unwrap(), &fields).address.to_string()
        };
        assert_eq!(asked("192.0.2.7, 10.1.1.1"), "192.0.2.7");
        assert_eq!(asked("10.1.1.1, 203.0.113.66"), "203.0.113.66");
        assert_eq!(asked("unknown"), "127.0.0.1");
    }

    /// An address, as a hop in `X-Forwarded-For` and as an element of `Forwarded`.
    fn hop() -> impl Strategy<Value = (IpAddr, String, String)> {
        let v4 = prop_oneof![any::<u32>(), (0..0x0100_0000_u32).prop_map(|low| 0x0a00_0000 | low)];
        let v6 = prop_oneof![any::<u128>(), any::<u128>().prop_map(|low| (low >> 8) | (0xfd << 120))];
        prop_oneof![
            (v4, any::<bool>()).prop_map(|(bits, port)| {
                let address = std::net::Ipv4Addr::from_bits(bits);
                let text = if port { format!("{address}:8080") } else { address.to_string() };
                (address.into(), text.clone(), format!("for=\"{text}\""))
            }),
            (v6, any::<bool>()).prop_map(|(bits, port)| {
                let address = Ipv6Addr::from_bits(bits);
                let text = if port { format!("[{address}]:8080") } else { address.to_string() };
                (IpAddr::from(address).to_canonical(), text.clone(), format!("proto=http;FOR=\"{text}\""))
            }),
        ]
    }

    proptest! {
        #[test]
        fn elements_before_the_client_do_not_change_the_result(
            noise in "[ -~]{0,60}",
            hops in proptest::collection::vec(hop(), 1..20),
        ) {
            let trusted = trusted_proxies(ForwardedField::XForwardedFor);
            let expected = hops.iter().rev().map(|(address, ..)| *address).find(|address| !trusted.proxies.contains((*address).into()));
            let list: Vec<&str> = hops.iter().map(|(_, text, _)| text.as_str()).collect();
            let forwarded: Vec<&str> = hops.iter().map(|(.., text)| text.as_str()).collect();
            if let Some(expected) = expected {
                let expected = expected.to_string();
                prop_assert_eq!(by_list(&[&noise, &list.join(", ")]), expected.clone());
                prop_assert_eq!(by_list(&[&format!("{noise},{}", list.join(","))]), expected.clone());
                prop_assert_eq!(by_forwarded(&[&noise, &forwarded.join(", ")]), expected);
            }
        }
    }
}
