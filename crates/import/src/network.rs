//! Sets of addresses as lists of prefixes: what an order of `allow` and `deny` admits.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A prefix. The bits behind it are 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Network {
    is_v6: bool,
    /// The address of IPv4 in the upper 32 bits.
    bits: u128,
    length: u32,
}

impl Network {
    pub const ALL: [Network; 2] =
        [Network { bits: 0, length: 0, is_v6: false }, Network { bits: 0, length: 0, is_v6: true }];

    /// `ADDRESS` or `ADDRESS/LENGTH`; `None` otherwise.
    pub fn parse(text: &str) -> Option<Network> {
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length.parse::<u32>().ok()?)),
            None => (text, None),
        };
        let (bits, size, is_v6) = match address.trim_matches(['[', ']']).parse().ok()? {
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32, false),
            IpAddr::V6(address) => (address.to_bits(), 128, true),
        };
        let length = length.unwrap_or(size);
        (length <= size).then(|| Network { bits: bits & mask(length), length, is_v6 })
    }

    pub fn contains(&self, other: &Network) -> bool {
        self.is_v6 == other.is_v6 && self.length <= other.length && other.bits & mask(self.length) == self.bits
    }

    fn size(&self) -> u32 {
        if self.is_v6 { 128 } else { 32 }
    }
}

fn mask(length: u32) -> u128 {
    if length == 0 { 0 } else { u128::MAX << (128 - length) }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_v6 {
            true => write!(f, "{}", Ipv6Addr::from_bits(self.bits))?,
            false => write!(f, "{}", Ipv4Addr::from_bits((self.bits >> 96) as u32))?,
        }
        if self.length == self.size() { Ok(()) } else { write!(f, "/{}", self.length) }
    }
}

/// The addresses of both.
pub fn intersection(set: &[Network], with: &Network) -> Vec<Network> {
    let common = |network: &Network| match (network.contains(with), with.contains(network)) {
        (true, _) => Some(*with),
        (_, true) => Some(*network),
        _ => None,
    };
    set.iter().filter_map(common).collect()
}

/// The addresses of the set that are not in the network.
pub fn difference(set: &[Network], without: &Network) -> Vec<Network> {
    let mut left = Vec::new();
    for network in set {
        if without.contains(network) {
            continue;
        }
        if !network.contains(without) {
            left.push(*network);
            continue;
        }
        // The other halves on the way from the network to the part.
        for length in network.length + 1..=without.length {
            let bits = (without.bits & mask(length)) ^ (1 << (128 - length));
            left.push(Network { bits, length, is_v6: network.is_v6 });
        }
    }
    left
}

/// The addresses that two conditions have in common. Empty conditions match all; `None` if there are none.
pub fn networks_of_both(one: &[String], other: &[String]) -> Option<Vec<String>> {
    if one.is_empty() || other.is_empty() {
        return Some([one, other].concat());
    }
    let parsed = |list: &[String]| list.iter().filter_map(|network| Network::parse(network)).collect::<Vec<_>>();
    let (one, other) = (parsed(one), parsed(other));
    let common: Vec<String> =
        other.iter().flat_map(|network| intersection(&one, network)).map(|network| network.to_string()).collect();
    (!common.is_empty()).then_some(common)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> Vec<Network> {
        text.split(' ').map(|network| Network::parse(network).unwrap()).collect()
    }

    fn text(set: &[Network]) -> String {
        set.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn parts_are_removed_exactly() {
        let [ten, eleven] = [set("10.0.0.0/8"), set("11.0.0.0/8")];
        assert_eq!(text(&difference(&ten, &set("10.0.0.0/10")[0])), "10.128.0.0/9 10.64.0.0/10");
        assert_eq!(text(&difference(&ten, &eleven[0])), "10.0.0.0/8");
        assert_eq!(text(&difference(&ten, &Network::ALL[0])), "");
        assert_eq!(text(&difference(&Network::ALL, &set("::/1")[0])), "0.0.0.0/0 8000::/1");
        assert_eq!(difference(&Network::ALL, &set("192.0.2.7")[0]).len(), 33);
        assert_eq!(text(&intersection(&Network::ALL, &set("2001:db8::/32")[0])), "2001:db8::/32");
        assert_eq!(Network::parse("10.0.0.0/33"), None);
    }
}
