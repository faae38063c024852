//! The header with which a proxy says who is behind a connection: the PROXY protocol, versions 1 and 2
//! (HAProxy's specification, proxy-protocol.txt, sections 2.1 and 2.2).
//!
//! It comes before everything else, TLS included. Nothing of it is trusted by its looks: whoever calls
//! this has made sure that the connection comes from a proxy. This file reads no socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What version 2 begins with: nothing that HTTP or TLS begin with.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, family, length.
const FIXED_BYTES: usize = 16;

/// A line of version 1 is at most so long, with its end.
const LINE_MAX_BYTES: usize = 107;
/// The longest header that is read. What proxies add about TLS takes some hundred bytes.
pub const MAX_BYTES: usize = FIXED_BYTES + 4096;

/// What is known after so many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderProgress {
    /// All of this belongs to the header, and more of it has to come.
    Incomplete,
    /// The header is so many bytes long.
    Complete { length: usize, source: ProxiedAddress },
    /// This is no header.
    Malformed,
}

/// Who opened the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProxiedAddress {
    Client(IpAddr),
    /// The proxy itself, such as to see whether anybody answers; or it does not say.
    Proxy,
}

pub fn parse(bytes: &[u8]) -> HeaderProgress {
    let common = bytes.len().min(SIGNATURE.len());
    if bytes[..common] == SIGNATURE[..common] { parse_v2(bytes) } else { parse_v1(bytes) }
}

/// Version 1: a line of text.
fn parse_v1(bytes: &[u8]) -> HeaderProgress {
    let start = &bytes[..bytes.len().min(LINE_MAX_BYTES)];
    let Some(end) = start.windows(2).position(|pair| pair == b"\r\n") else {
        const PREFIX: &[u8] = b"PROXY ";
        let common = start.len().min(PREFIX.len());
        let goes_on = start.len() < LINE_MAX_BYTES && start[..common] == PREFIX[..common];
        return if goes_on { HeaderProgress::Incomplete } else { HeaderProgress::Malformed };
    };
    let source = std::str::from_utf8(&start[..end]).ok().and_then(parse_v1_line);
    source.map_or(HeaderProgress::Malformed, |source| HeaderProgress::Complete { length: end + 2, source })
}

fn parse_v1_line(line: &str) -> Option<ProxiedAddress> {
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        // Whatever follows is to be ignored.
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

/// Version 2: numbers in network order.
fn parse_v2(bytes: &[u8]) -> HeaderProgress {
    let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED_BYTES>() else { return HeaderProgress::Incomplete };
    let [.., command, family, high, low] = *fixed;
    let length = FIXED_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if length > MAX_BYTES {
        return HeaderProgress::Malformed;
    }
    // What stands behind the addresses (TLVs) is not looked at.
    let source = match (command, family) {
        (0x20, _) => Some(ProxiedAddress::Proxy),
        (0x21, 0x11) if length >= FIXED_BYTES + 12 => {
            rest.first_chunk::<4>().map(|octets| ProxiedAddress::Client(Ipv4Addr::from(*octets).into()))
        }
        (0x21, 0x21) if length >= FIXED_BYTES + 36 => {
            rest.first_chunk::<16>().map(|octets| ProxiedAddress::Client(Ipv6Addr::from(*octets).into()))
        }
        // Too short for the addresses that it announces.
        (0x21, 0x11 | 0x21) => return HeaderProgress::Malformed,
        // Unix sockets, datagrams, or not told.
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
    fn lines_are_read() {
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
    fn what_is_no_line_is_not_taken_for_one() {
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
    fn binary_headers_are_read() {
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
    fn binary_headers_that_make_no_sense_are_refused() {
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
        /// Whatever comes: no panic, never more than there is, and what is known does not change
        /// with what follows.
        #[test]
        fn any_bytes_are_read_or_refused(
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
