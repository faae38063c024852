//! The PROXY protocol, versions 1 and 2: the header by which a load balancer names the client of a connection (HAProxy's
//! specification, proxy-protocol.txt, sections 2.1 and 2.2).
//!
//! The header precedes everything else, TLS included. The caller must make sure that the peer is a trusted proxy. This
//! parser reads no socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Start of a version 2 header. Neither HTTP nor TLS begins with these bytes.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, address family, length.
const FIXED_BYTES: usize = 16;

/// Maximum length of a version 1 line, including CR LF.
const LINE_MAX_BYTES: usize = 107;
/// The longest accepted header. TLS information that proxies add takes some hundred bytes.
pub const MAX_BYTES: usize = FIXED_BYTES + 4096;

/// Result of parsing the bytes received so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderProgress {
    /// All bytes belong to the header, and more must follow.
    Incomplete,
    /// The header takes the first `length` bytes.
    Complete { length: usize, source: ProxiedAddress },
    /// The bytes are not a PROXY header.
    Malformed,
}

/// The source address of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProxiedAddress {
    Client(IpAddr),
    /// The proxy itself, as for a health check; or the header names no IP address.
    Proxy,
}

/// Parses the start of a connection.
pub fn parse(bytes: &[u8]) -> HeaderProgress {
    let common = bytes.len().min(SIGNATURE.len());
    if bytes[..common] == SIGNATURE[..common] { parse_v2(bytes) } else { parse_v1(bytes) }
}

/// Version 1: one line of text.
fn parse_v1(bytes: &[u8]) -> HeaderProgress {
    let start = &bytes[..bytes.len().min(LINE_MAX_BYTES)];
    let Some(end) = start.windows(2).position(|pair| pair == b"\r\n") else {
        const PREFIX: &[u8] = b"PROXY ";
        let common = start.len().min(PREFIX.len());
        let may_continue = start.len() < LINE_MAX_BYTES && start[..common] == PREFIX[..common];
        return if may_continue { HeaderProgress::Incomplete } else { HeaderProgress::Malformed };
    };
    let source = std::str::from_utf8(&start[..end]).ok().and_then(parse_v1_line);
    source.map_or(HeaderProgress::Malformed, |source| HeaderProgress::Complete { length: end + 2, source })
}

fn parse_v1_line(line: &str) -> Option<ProxiedAddress> {
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        // The specification says to ignore the rest of the line.
        ["PROXY", "UNKNOWN", ..] => Some(ProxiedAddress::Proxy),
        ["PROXY", family @ ("TCP4" | "TCP6"), source, destination, source_port, destination_port] => {
            let address = |text: &str| -> Option<IpAddr> {
                match *family {
                    "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
                    _ => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
                }
            };
            let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok();
            let source = address(source)?;
            (address(destination).is_some() && is_port(source_port) && is_port(destination_port))
                .then_some(ProxiedAddress::Client(source))
        }
        _ => None,
    }
}

/// Version 2: binary, in network byte order.
fn parse_v2(bytes: &[u8]) -> HeaderProgress {
    let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED_BYTES>() else { return HeaderProgress::Incomplete };
    let [.., command, family, high, low] = *fixed;
    let length = FIXED_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if length > MAX_BYTES {
        return HeaderProgress::Malformed;
    }
    // TLVs behind the addresses are ignored.
    let source = match (command, family) {
        (0x20, _) => Some(ProxiedAddress::Proxy),
        (0x21, 0x11) if length >= FIXED_BYTES + 12 => {
            rest.first_chunk::<4>().map(|octets| ProxiedAddress::Client(Ipv4Addr::from(*octets).into()))
        }
        (0x21, 0x21) if length >= FIXED_BYTES + 36 => {
            rest.first_chunk::<16>().map(|octets| ProxiedAddress::Client(Ipv6Addr::from(*octets).into()))
        }
        // Too short for addresses of its family.
        (0x21, 0x11 | 0x21) => return HeaderProgress::Malformed,
        // Unix sockets, datagrams, or unspecified.
        (0x21, 0x00 | 0x12 | 0x22 | 0x31 | 0x32) => Some(ProxiedAddress::Proxy),
        _ => return HeaderProgress::Malformed,
    };
    match source {
        Some(source) if bytes.len() >= length => HeaderProgress::Complete { length, source },
        _ => HeaderProgress::Incomplete,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn client(text: &str) -> ProxiedAddress {
        ProxiedAddress::Client(text.parse().unwrap())
    }

    fn v2(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[command, family], &length, body].concat()
    }

    #[test]
    fn version_1_lines_are_parsed() {
        for (line, source) in [
            ("PROXY TCP4 192.0.2.7 198.51.100.1 56324 443\r\n", client("192.0.2.7")),
            ("PROXY TCP6 2001:db8::7 2001:db8::1 0 65535\r\n", client("2001:db8::7")),
            ("PROXY UNKNOWN\r\n", ProxiedAddress::Proxy),
            ("PROXY UNKNOWN ff:ff whatever 1\r\n", ProxiedAddress::Proxy),
        ] {
            let complete = HeaderProgress::Complete { length: line.len(), source };
            assert_eq!(parse(line.as_bytes()), complete, "{line}");
            assert_eq!(parse(format!("{line}GET / HTTP/1.1\r\n\r\n").as_bytes()), complete, "{line}");
            for end in 0..line.len() {
                assert_eq!(parse(&line.as_bytes()[..end]), HeaderProgress::Incomplete, "{end} bytes of {line}");
            }
        }
    }

    #[test]
    fn malformed_version_1_lines_are_rejected() {
        for line in [
            "GET / HTTP/1.1\r\n",
            "proxy TCP4 192.0.2.7 198.51.100.1 1 2\r\n",
            "PROXY\r\n",
            "PROXY \r\n",
            "PROXY TCP4\r\n",
            "PROXY TCP5 192.0.2.7 198.51.100.1 1 2\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 1\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 1 2 3\r\n",
            "PROXY TCP4  192.0.2.7 198.51.100.1 1 2\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 1 65536\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 +1 2\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1  2\r\n",
            "PROXY TCP4 192.0.2.777 198.51.100.1 1 2\r\n",
            "PROXY TCP4 2001:db8::7 2001:db8::1 1 2\r\n",
            "PROXY TCP6 192.0.2.7 198.51.100.1 1 2\r\n",
            "PROXY TCP6 fe80::1%eth0 2001:db8::1 1 2\r\n",
            "PROXY TCP4 192.0.2.7 198.51.100.1 1 2\n\r\n",
            "PROXY TCP4 192.0.2.\u{661} 198.51.100.1 1 2\r\n",
        ] {
            assert_eq!(parse(line.as_bytes()), HeaderProgress::Malformed, "{line:?}");
        }
        let long = format!("PROXY UNKNOWN {}\r\n", "x".repeat(LINE_MAX_BYTES));
        assert_eq!(parse(&long.as_bytes()[..LINE_MAX_BYTES - 1]), HeaderProgress::Incomplete);
        assert_eq!(parse(&long.as_bytes()[..LINE_MAX_BYTES]), HeaderProgress::Malformed);
        let longest = format!("PROXY UNKNOWN {}\r\n", "x".repeat(LINE_MAX_BYTES - 16));
        assert_eq!(
            parse(longest.as_bytes()),
            HeaderProgress::Complete { length: LINE_MAX_BYTES, source: ProxiedAddress::Proxy }
        );
    }

    #[test]
    fn version_2_headers_are_parsed() {
        let v4 = [192, 0, 2, 7, 198, 51, 100, 1, 0, 80, 1, 187];
        let v6 = [&"2001:db8::7".parse::<Ipv6Addr>().unwrap().octets()[..], &[0; 20]].concat();
        let with_tlv = [&v4[..], &[0x20, 0, 3, 1, 2, 3]].concat();
        for (header, source) in [
            (v2(0x21, 0x11, &v4), client("192.0.2.7")),
            (v2(0x21, 0x11, &with_tlv), client("192.0.2.7")),
            (v2(0x21, 0x21, &v6), client("2001:db8::7")),
            (v2(0x20, 0x00, &[]), ProxiedAddress::Proxy),
            (v2(0x20, 0x11, &v4), ProxiedAddress::Proxy),
            (v2(0x21, 0x00, &[1, 2, 3]), ProxiedAddress::Proxy),
            (v2(0x21, 0x31, &[b'/'; 216]), ProxiedAddress::Proxy),
            (v2(0x21, 0x12, &v4), ProxiedAddress::Proxy),
            (v2(0x21, 0x21, &[0x20; 4096]), client("2020:2020:2020:2020:2020:2020:2020:2020")),
        ] {
            let complete = HeaderProgress::Complete { length: header.len(), source };
            assert_eq!(parse(&header), complete);
            assert_eq!(parse(&[&header[..], b"\x16\x03\x01"].concat()), complete);
            for end in 0..header.len() {
                assert_eq!(parse(&header[..end]), HeaderProgress::Incomplete, "{end}");
            }
        }
    }

    #[test]
    fn malformed_version_2_headers_are_rejected() {
        for header in [
            v2(0x11, 0x11, &[0; 12]),
            v2(0x22, 0x11, &[0; 12]),
            v2(0x21, 0x13, &[0; 12]),
            v2(0x21, 0x41, &[0; 12]),
            v2(0x21, 0x11, &[0; 11]),
            v2(0x21, 0x21, &[0; 35]),
            v2(0x21, 0x21, &[0; 4097]),
            v2(0x20, 0x00, &[0; 65535]),
        ] {
            assert_eq!(parse(&header), HeaderProgress::Malformed);
        }
        let mut other = v2(0x20, 0, &[]);
        other[11] = b'\r';
        assert_eq!(parse(&other), HeaderProgress::Malformed);
    }

    proptest! {
        /// For any bytes: no panic, `length` is within the input, and a final result does not change with later bytes.
        #[test]
        fn a_result_for_any_bytes_is_final(
            start in prop_oneof![Just(&b""[..]), Just(&SIGNATURE[..]), Just(&b"PROXY "[..]), Just(&b"PROXY TCP4 1.2.3.4 "[..])],
            rest in proptest::collection::vec(any::<u8>(), 0..300),
            more in proptest::collection::vec(any::<u8>(), 0..20),
        ) {
            let bytes = [start, &rest].concat();
            let longer = [&bytes[..], &more].concat();
            match parse(&bytes) {
                HeaderProgress::Complete { length, source } => {
                    prop_assert!(length <= bytes.len());
                    prop_assert_eq!(parse(&longer), HeaderProgress::Complete { length, source });
                }
                HeaderProgress::Malformed => prop_assert_eq!(parse(&longer), HeaderProgress::Malformed),
                HeaderProgress::Incomplete => prop_assert!(bytes.len() < MAX_BYTES),
            }
        }
    }
}
