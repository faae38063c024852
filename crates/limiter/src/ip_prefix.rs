//! Networks (CIDR), and the most specific network that contains an address.
//!
//! Networks are nested or disjoint. Together they divide the addresses into ranges, each of which belongs to one
//! network or to none. A binary search finds the range of an address: a hundred thousand networks cost seventeen
//! comparisons.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// All addresses with a common prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Network {
    /// The first address. IPv4 addresses are never mapped into IPv6.
    pub address: IpAddr,
    /// The length of the common prefix in bits.
    pub prefix: u8,
}

/// Why a text is not a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkError {
    /// It is not `ADDRESS/BITS` or an address.
    Syntax,
    /// The address has bits after the prefix; this network was likely meant.
    HostBits(Network),
}

impl Network {
    /// The network of an address with this prefix length.
    pub fn containing(address: IpAddr, prefix: u8) -> Network {
        match (address, address.to_canonical()) {
            (IpAddr::V6(_), IpAddr::V4(v4)) if prefix >= 96 => Network::containing(v4.into(), prefix - 96),
            (IpAddr::V4(v4), _) => {
                let prefix = prefix.min(32);
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                Network { address: Ipv4Addr::from_bits(v4.to_bits() & mask).into(), prefix }
            }
            (IpAddr::V6(v6), _) => {
                let prefix = prefix.min(128);
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                Network { address: Ipv6Addr::from_bits(v6.to_bits() & mask).into(), prefix }
            }
        }
    }

    /// The address family, and the first and last address as numbers.
    fn bounds(self) -> (usize, u128, u128) {
        let (family, first, bits) = to_number(self.address);
        let host_mask = u128::MAX.checked_shr(128 - (bits - u32::from(self.prefix))).unwrap_or(0);
        (family, first, first | host_mask)
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    /// Reads `ADDRESS/BITS`, or an address alone.
    fn from_str(text: &str) -> Result<Network, NetworkError> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| NetworkError::Syntax)?;
        let max_prefix = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
            Some(_) => None,
            None => Some(max_prefix),
        };
        let prefix = prefix.filter(|prefix| *prefix <= max_prefix).ok_or(NetworkError::Syntax)?;
        let network = Network::containing(address, prefix);
        let as_written = Network::containing(address, max_prefix);
        if network.address == as_written.address { Ok(network) } else { Err(NetworkError::HostBits(network)) }
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The address that is counted: for an IPv6 address that embeds an IPv4 address, the IPv4 address. IPv4-mapped
/// addresses (RFC 4291, 2.5.5.2), NAT64 (RFC 6052), 6to4 (RFC 3056) and Teredo (RFC 4380, where the address is
/// inverted) would otherwise give one client several counters.
pub fn canonical_address(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let v4 = match v6.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            (high, low)
        }
        [0x2001, 0, _, _, _, _, high, low] => (!high, !low),
        _ => return address,
    };
    Ipv4Addr::from_bits(u32::from(v4.0) << 16 | u32::from(v4.1)).into()
}

/// The family, the number and the length of an address.
fn to_number(address: IpAddr) -> (usize, u128, u32) {
    match address.to_canonical() {
        IpAddr::V4(v4) => (0, v4.to_bits().into(), 32),
        IpAddr::V6(v6) => (1, v6.to_bits(), 128),
    }
}

/// Networks, each with a value.
#[derive(Debug)]
pub struct Networks<T> {
    /// For each family, the start and the value of each range; in ascending order.
    ranges: [Vec<(u128, Option<T>)>; 2],
}

impl<T: Copy> Networks<T> {
    /// Of equal networks, the last one wins.
    pub fn new(networks: impl IntoIterator<Item = (Network, T)>) -> Networks<T> {
        let mut by_family = [Vec::new(), Vec::new()];
        for (network, value) in networks {
            let (family, first, last) = network.bounds();
            by_family[family].push((first, last, value));
        }
        Networks { ranges: by_family.map(to_ranges) }
    }

    /// The value of the most specific network that contains an address.
    pub fn most_specific(&self, address: IpAddr) -> Option<T> {
        let (family, number, _) = to_number(address);
        let ranges = &self.ranges[family];
        let next = ranges.partition_point(|(start, _)| *start <= number);
        next.checked_sub(1).and_then(|position| ranges[position].1)
    }
}

fn to_ranges<T: Copy>(mut networks: Vec<(u128, u128, T)>) -> Vec<(u128, Option<T>)> {
    // Wide networks before narrow ones that begin with them.
    networks.sort_by_key(|(first, last, _)| (*first, std::cmp::Reverse(*last)));
    let mut spans = Vec::new();
    // The networks that contain the current position, from the widest to the narrowest.
    let mut open: Vec<(u128, T)> = Vec::new();
    for (first, last, value) in networks {
        close(&mut open, Some(first), &mut spans);
        begin(&mut spans, first, Some(value));
        open.push((last, value));
    }
    close(&mut open, None, &mut spans);
    spans
}

/// Closes the networks that end before a position; the range after each belongs to the network around it.
fn close<T: Copy>(open: &mut Vec<(u128, T)>, position: Option<u128>, spans: &mut Vec<(u128, Option<T>)>) {
    while let Some((last, _)) = open.pop_if(|(last, _)| position.is_none_or(|position| *last < position)) {
        if let Some(next) = last.checked_add(1) {
            begin(spans, next, open.last().map(|(_, value)| *value));
        }
    }
}

/// A range that begins where another has just begun replaces it.
fn begin<T>(spans: &mut Vec<(u128, Option<T>)>, start: u128, value: Option<T>) {
    match spans.last_mut() {
        Some(known) if known.0 == start => known.1 = value,
        _ => spans.push((start, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error:?}"))
    }

    #[test]
    fn a_network_around_the_mapped_ones_stays_ipv6() {
        let mapped: IpAddr = "::ffff:1.2.3.4".parse().unwrap();
        assert_eq!(Network::containing(mapped, 96), network("0.0.0.0/0"));
        assert_eq!(Network::containing(mapped, 95), Network { address: "::fffe:0:0".parse().unwrap(), prefix: 95 });
    }

    #[test]
    fn texts_are_read_strictly() {
        for text in ["10.0.0.0/8", "0.0.0.0/0", "192.0.2.7/32", "2001:db8::/32", "::/0", "::1/128"] {
            assert_eq!(network(text).to_string(), text);
        }
        assert_eq!(network("192.0.2.7").to_string(), "192.0.2.7/32");
        assert_eq!(network("::ffff:10.0.0.0/104"), network("10.0.0.0/8"));
        for text in ["", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0/8", "::/129", "a/8", "10.0.0.0/8/8"] {
            assert_eq!(text.parse::<Network>(), Err(NetworkError::Syntax), "{text}");
        }
        assert_eq!("10.1.2.3/8".parse::<Network>(), Err(NetworkError::HostBits(network("10.0.0.0/8"))));
    }

    #[test]
    fn the_most_specific_network_is_found() {
        let texts = ["10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/24", "10.1.255.255/32", "255.255.255.255/32", "::/0"];
        let networks = Networks::new(texts.iter().map(|text| (network(text), *text)));
        for (address, found) in [
            ("9.255.255.255", None),
            ("10.0.0.0", Some("10.0.0.0/8")),
            ("10.1.0.255", Some("10.1.0.0/24")),
            ("10.1.1.0", Some("10.1.0.0/16")),
            ("10.1.255.255", Some("10.1.255.255/32")),
            ("10.2.0.0", Some("10.0.0.0/8")),
            ("11.0.0.0", None),
            ("255.255.255.255", Some("255.255.255.255/32")),
            ("::ffff:10.2.0.0", Some("10.0.0.0/8")),
            ("ffff::", Some("::/0")),
        ] {
            assert_eq!(networks.most_specific(address.parse().unwrap()), found, "{address}");
        }
    }

    #[test]
    fn an_embedded_ipv4_address_counts_as_one_client() {
        for (address, expected) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("64:ff9b::192.0.2.7", "192.0.2.7"),
            ("2002:c000:207::1", "192.0.2.7"),
            ("2002:c000:207:9:8:7:6:5", "192.0.2.7"),
            ("2001:0:4136:e378:8000:63bf:3fff:fdf8", "192.0.2.7"),
            ("64:ff9b:1::192.0.2.7", "64:ff9b:1::c000:207"),
            ("2001:db8::1", "2001:db8::1"),
            ("::1", "::1"),
        ] {
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(canonical_address(address.parse().unwrap()), expected, "{address}");
        }
    }

    proptest! {
        #[test]
        fn a_look_up_finds_what_a_linear_search_finds(
            all in proptest::collection::hash_map((0..64_u32, 26..=32_u8), 0..100_usize, 0..24),
            address in 0..64_u32,
        ) {
            let at = |number: u32| IpAddr::V4(Ipv4Addr::from_bits(number));
            let all: std::collections::HashMap<Network, usize> =
                all.into_iter().map(|((number, prefix), value)| (Network::containing(at(number), prefix), value)).collect();
            let holding = all.iter().filter(|(network, _)| Network::containing(at(address), network.prefix) == **network);
            let expected = holding.max_by_key(|(network, _)| network.prefix).map(|(_, value)| *value);
            let networks = Networks::new(all.iter().map(|(network, value)| (*network, *value)));
            prop_assert_eq!(networks.most_specific(at(address)), expected);
        }
    }
}
