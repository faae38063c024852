//! Writes PROXY headers, by which a server learns the address of the client (HAProxy's specification, proxy-protocol.txt,
//! sections 2.1 and 2.2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use transom_config::upstream::ProxyVersion;

/// Signature of version 2, version and command.
const PROXY_V2: &[u8; 13] = b"\r\n\r\n\0\r\nQUIT\n\x21";
/// As above, for a connection of the gateway's own, without addresses.
const LOCAL_V2: &[u8; 16] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
const UNKNOWN_V1: &[u8] = b"PROXY UNKNOWN\r\n";
const TCP_OVER_IPV4: u8 = 0x11;
const TCP_OVER_IPV6: u8 = 0x21;

/// The header of a connection to `server`, which is `None` for a Unix socket. `client`: `None` if it has no address, and for
/// health checks. The port of the client is 0.
pub fn proxy_header(version: ProxyVersion, client: Option<IpAddr>, server: Option<SocketAddr>) -> Vec<u8> {
    let Some(client) = client else {
        return match version {
            ProxyVersion::V1 => UNKNOWN_V1.to_vec(),
            ProxyVersion::V2 => LOCAL_V2.to_vec(),
        };
    };
    let (client, server, port) = match (client.to_canonical(), server.map(|server| server.ip().to_canonical())) {
        (client, None) if client.is_ipv4() => (client, Ipv4Addr::UNSPECIFIED.into(), 0),
        (client, None) => (client, Ipv6Addr::UNSPECIFIED.into(), 0),
        (client, Some(address)) => {
            let port = server.map_or(0, |server| server.port());
            match client.is_ipv4() == address.is_ipv4() {
                true => (client, address, port),
                // Both have to be of one family.
                false => (as_ipv6(client), as_ipv6(address), port),
            }
        }
    };
    match version {
        ProxyVersion::V1 => {
            let family = if client.is_ipv4() { "TCP4" } else { "TCP6" };
            format!("PROXY {family} {client} {server} 0 {port}\r\n").into_bytes()
        }
        ProxyVersion::V2 => {
            let octets = |address| match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            let family = if client.is_ipv4() { TCP_OVER_IPV4 } else { TCP_OVER_IPV6 };
            let addresses = [&octets(client)[..], &octets(server)[..], &[0, 0][..], &port.to_be_bytes()[..]].concat();
            [&PROXY_V2[..], &[family, 0, addresses.len() as u8][..], &addresses[..]].concat()
        }
    }
}

fn as_ipv6(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().into(),
        address @ IpAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_specified() {
        let client = |text: &str| Some(text.parse().unwrap());
        let server = |text: &str| Some(text.parse().unwrap());
        let v1 = |client, server| String::from_utf8(proxy_header(ProxyVersion::V1, client, server)).unwrap();
        for (client, server, line) in [
            (client("192.0.2.7"), server("198.51.100.1:80"), "PROXY TCP4 192.0.2.7 198.51.100.1 0 80\r\n"),
            (client("::ffff:192.0.2.7"), server("198.51.100.1:80"), "PROXY TCP4 192.0.2.7 198.51.100.1 0 80\r\n"),
            (client("2001:db8::7"), server("[2001:db8::1]:443"), "PROXY TCP6 2001:db8::7 2001:db8::1 0 443\r\n"),
            (client("192.0.2.7"), server("[2001:db8::1]:443"), "PROXY TCP6 ::ffff:192.0.2.7 2001:db8::1 0 443\r\n"),
            (client("2001:db8::7"), server("198.51.100.1:80"), "PROXY TCP6 2001:db8::7 ::ffff:198.51.100.1 0 80\r\n"),
            (client("192.0.2.7"), None, "PROXY TCP4 192.0.2.7 0.0.0.0 0 0\r\n"),
            (client("2001:db8::7"), None, "PROXY TCP6 2001:db8::7 :: 0 0\r\n"),
            (None, server("198.51.100.1:80"), "PROXY UNKNOWN\r\n"),
        ] {
            assert_eq!(v1(client, server), line);
        }
        let v2 = proxy_header(ProxyVersion::V2, client("192.0.2.7"), server("198.51.100.1:80"));
        assert_eq!(v2, b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x07\xc6\x33\x64\x01\0\0\0\x50");
        let v2 = proxy_header(ProxyVersion::V2, client("2001:db8::7"), server("[2001:db8::1]:443"));
        assert_eq!((v2.len(), &v2[12..16]), (52, &[0x21, 0x21, 0, 36][..]));
        assert_eq!(&v2[48..], [0, 0, 1, 187]);
        let local = proxy_header(ProxyVersion::V2, None, None);
        assert_eq!((local.len(), &local[12..]), (16, &[0x20, 0, 0, 0][..]));
    }
}
