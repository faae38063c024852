//! The address of a client: an IP address, or [`UNIX`] for all callers of Unix sockets, which are one client. [`AddressSet`] is a set
//! of such addresses, as `trusted_proxies` lists them.

use std::fmt;
use std::net::{AddrParseError, IpAddr};
use std::str::FromStr;

use transom_limiter::ip_prefix::{Network, NetworkError, Networks};

/// The callers of Unix sockets, as nginx writes them: in the configuration, in keys, in logs and in `X-Forwarded-For`.
pub const UNIX: &str = "unix:";
/// Prefix length that identifies an IPv6 client: a client usually controls a /64.
const V6_CLIENT_PREFIX: u8 = 64;

/// Where a connection or a request comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ClientAddress {
    Ip(IpAddr),
    /// A Unix socket, whose callers have no address.
    Unix,
}

impl ClientAddress {
    #[inline]
    pub fn ip(self) -> Option<IpAddr> {
        match self {
            ClientAddress::Ip(ip) => Some(ip),
            ClientAddress::Unix => None,
        }
    }

    /// As [`IpAddr::to_canonical`].
    pub fn to_canonical(self) -> ClientAddress {
        match self {
            ClientAddress::Ip(ip) => ClientAddress::Ip(ip.to_canonical()),
            ClientAddress::Unix => ClientAddress::Unix,
        }
    }

    /// The address for limits of a client: for IPv6, that of its network.
    pub fn client_network(self) -> ClientAddress {
        match self.to_canonical() {
            ClientAddress::Ip(ip @ IpAddr::V6(_)) => Network::containing(ip, V6_CLIENT_PREFIX).address.into(),
            client @ (ClientAddress::Ip(IpAddr::V4(_)) | ClientAddress::Unix) => client,
        }
    }
}

impl From<IpAddr> for ClientAddress {
    fn from(ip: IpAddr) -> ClientAddress {
        ClientAddress::Ip(ip)
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientAddress::Ip(ip) => ip.fmt(f),
            ClientAddress::Unix => f.write_str(UNIX),
        }
    }
}

impl FromStr for ClientAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<ClientAddress, AddrParseError> {
        if text == UNIX { Ok(ClientAddress::Unix) } else { text.parse().map(ClientAddress::Ip) }
    }
}

/// The addresses of a network, or that of Unix sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressRange {
    Network(Network),
    Unix,
}

impl FromStr for AddressRange {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<AddressRange, NetworkError> {
        if text == UNIX { Ok(AddressRange::Unix) } else { text.parse().map(AddressRange::Network) }
    }
}

/// A set of addresses, compiled.
#[derive(Debug)]
pub struct AddressSet {
    networks: Networks<()>,
    has_unix: bool,
}

impl AddressSet {
    pub fn new(ranges: &[AddressRange]) -> AddressSet {
        let networks = ranges.iter().filter_map(|range| match range {
            AddressRange::Network(network) => Some((*network, ())),
            AddressRange::Unix => None,
        });
        AddressSet { networks: Networks::new(networks), has_unix: ranges.contains(&AddressRange::Unix) }
    }

    #[inline]
    pub fn contains(&self, address: ClientAddress) -> bool {
        match address {
            ClientAddress::Ip(ip) => self.networks.most_specific(ip).is_some(),
            ClientAddress::Unix => self.has_unix,
        }
    }
}
