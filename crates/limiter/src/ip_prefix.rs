//! Networks (CIDR), and the most specific network that contains an address.
//!
//! Networks are nested or disjoint. Together they divide the addresses into ranges, each of which belongs to one
//! network or to none. A table finds the few ranges near an address, whatever the number of networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
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
    networks: Vec<NestedNetwork<T>>,
    v4: Ranges<u32>,
    v6: Ranges<u128>,
}

/// A network among others.
#[derive(Clone, Copy, Debug)]
struct NestedNetwork<T> {
    value: T,
    /// The narrowest network around it.
    parent: Option<Position>,
}

/// A position in [`Networks::networks`], counted from 1.
type Position = NonZeroU32;

impl<T: Copy> Networks<T> {
    /// Of equal networks, the last one is the most specific.
    pub fn new(networks: impl IntoIterator<Item = (Network, T)>) -> Networks<T> {
        let mut by_family = [Vec::new(), Vec::new()];
        for (network, value) in networks {
            let (family, first, last) = network.bounds();
            by_family[family].push((first, last, value));
        }
        let mut networks = Vec::with_capacity(by_family.iter().map(Vec::len).sum());
        let [v4, v6] = by_family.map(|family| to_ranges(family, &mut networks));
        // The range behind the last address is left out.
        let v4 = v4.into_iter().filter_map(|(start, network)| Some((u32::try_from(start).ok()?, network)));
        Networks { v4: Ranges::new(v4.collect()), v6: Ranges::new(v6), networks }
    }

    /// The value of the most specific network that contains an address.
    #[inline]
    pub fn most_specific(&self, address: IpAddr) -> Option<T> {
        self.find(address).map(|position| self.at(position).value)
    }

    /// The values of all networks that contain an address, the most specific first.
    pub fn all_around(&self, address: IpAddr) -> impl Iterator<Item = T> {
        let networks = std::iter::successors(self.find(address), |inner| self.at(*inner).parent);
        networks.map(|position| self.at(position).value)
    }

    #[inline]
    fn at(&self, position: Position) -> &NestedNetwork<T> {
        &self.networks[position.get() as usize - 1]
    }

    fn find(&self, address: IpAddr) -> Option<Position> {
        match address.to_canonical() {
            IpAddr::V4(v4) => self.v4.find(v4.to_bits()),
            IpAddr::V6(v6) => self.v6.find(v6.to_bits()),
        }
    }
}

/// The ranges of one family. A table of equal sections, about as many as there are ranges, leads to the few ranges that
/// begin in the section of an address.
#[derive(Debug)]
struct Ranges<N> {
    /// Ascending.
    starts: Box<[N]>,
    /// The most specific network of each range.
    networks: Box<[Option<Position>]>,
    /// For each section, the number of ranges that begin before it. The first section begins with the first range.
    sections: Box<[u32]>,
    /// The size of a section is a power of two.
    section_bits: u32,
}

/// The number of an address.
trait Number: Copy + Ord {
    /// The section of the number, counted from that of `first`, which is not above it.
    fn section(self, first: Self, section_bits: u32) -> usize;
}

impl Number for u32 {
    fn section(self, first: u32, section_bits: u32) -> usize {
        ((self - first) >> section_bits) as usize
    }
}

impl Number for u128 {
    fn section(self, first: u128, section_bits: u32) -> usize {
        usize::try_from((self - first) >> section_bits).unwrap_or(usize::MAX)
    }
}

impl<N: Number> Ranges<N> {
    fn new(ranges: Vec<(N, Option<Position>)>) -> Ranges<N> {
        let (starts, networks): (Vec<N>, Vec<Option<Position>>) = ranges.into_iter().unzip();
        let (mut sections, mut section_bits) = (Vec::new(), 0);
        if let (Some(first), Some(last)) = (starts.first(), starts.last()) {
            while last.section(*first, section_bits) > starts.len() {
                section_bits += 1;
            }
            for (position, start) in starts.iter().enumerate() {
                sections.resize(start.section(*first, section_bits) + 1, position as u32);
            }
        }
        Ranges { starts: starts.into(), networks: networks.into(), sections: sections.into(), section_bits }
    }

    #[inline]
    fn find(&self, number: N) -> Option<Position> {
        let first = *self.starts.first().filter(|first| **first <= number)?;
        let section = number.section(first, self.section_bits);
        let begin = self.sections.get(section).map_or(self.starts.len(), |begin| *begin as usize);
        let end = self.sections.get(section.saturating_add(1)).map_or(self.starts.len(), |end| *end as usize);
        let next = begin + self.starts[begin..end].partition_point(|start| *start <= number);
        // The first range begins at or before the number.
        self.networks[next - 1]
    }
}

/// Adds networks to a list, and divides the addresses into ranges with the most specific network of each.
fn to_ranges<T: Copy>(
    mut family: Vec<(u128, u128, T)>,
    networks: &mut Vec<NestedNetwork<T>>,
) -> Vec<(u128, Option<Position>)> {
    // Wide networks before narrow ones that begin with them.
    family.sort_by_key(|(first, last, _)| (*first, std::cmp::Reverse(*last)));
    let mut spans = Vec::new();
    // The networks that contain the current position, from the widest to the narrowest.
    let mut open: Vec<(u128, Position)> = Vec::new();
    for (first, last, value) in family {
        close(&mut open, Some(first), &mut spans);
        networks.push(NestedNetwork { value, parent: open.last().map(|(_, parent)| *parent) });
        // There are fewer networks than a `u32` counts, or the last ones are left out.
        let Some(position) = u32::try_from(networks.len()).ok().and_then(Position::new) else { continue };
        begin(&mut spans, first, Some(position));
        open.push((last, position));
    }
    close(&mut open, None, &mut spans);
    spans
}

/// Closes the networks that end before a position; the range after each belongs to the network around it.
fn close(open: &mut Vec<(u128, Position)>, position: Option<u128>, spans: &mut Vec<(u128, Option<Position>)>) {
    while let Some((last, _)) = open.pop_if(|(last, _)| position.is_none_or(|position| *last < position)) {
        if let Some(next) = last.checked_add(1) {
            begin(spans, next, open.last().map(|(_, network)| *network));
        }
    }
}

/// A range that begins where another has just begun replaces it.
fn begin(spans: &mut Vec<(u128, Option<Position>)>, start: u128, network: Option<Position>) {
    match spans.last_mut() {
        Some(known) if known.0 == start => known.1 = network,
        _ => spans.push((start, network)),
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
            all in proptest::collection::hash_map((0..64_u32, 0..=6_u8), 0..100_usize, 0..24),
            address in 0..64_u32,
            is_v6 in any::<bool>(),
            spread in 0..=26_u32,
        ) {
            // Networks of six bits, which `hidden` bits precede.
            let hidden = if is_v6 { 4 * spread } else { spread };
            let at = |number: u32| match is_v6 {
                false => IpAddr::V4(Ipv4Addr::from_bits(number.rotate_right(6 + hidden))),
                true => IpAddr::V6(Ipv6Addr::from_bits(u128::from(number).rotate_right(6 + hidden))),
            };
            let containing = |number, bits| Network::containing(at(number), hidden as u8 + bits);
            let all: std::collections::HashMap<Network, usize> =
                all.into_iter().map(|((number, prefix), value)| (containing(number, prefix), value)).collect();
            let holding = all.iter().filter(|(network, _)| Network::containing(at(address), network.prefix) == **network);
            let mut holding: Vec<_> = holding.collect();
            holding.sort_by_key(|(network, _)| std::cmp::Reverse(network.prefix));
            let expected: Vec<usize> = holding.into_iter().map(|(_, value)| *value).collect();
            let networks = Networks::new(all.iter().map(|(network, value)| (*network, *value)));
            prop_assert_eq!(networks.most_specific(at(address)), expected.first().copied());
            prop_assert_eq!(networks.all_around(at(address)).collect::<Vec<_>>(), expected);
        }
    }
}
