//! Why a gateway can not start, or not take over a configuration: what its operator reads, with what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use crate::persistence::open::OpenError;

/// Why the gateway could not start.
#[derive(Debug)]
pub enum StartError {
    Listen {
        address: SocketAddr,
        source: io::Error,
    },
    /// A socket was handed over for an address that is not configured.
    Inherited(SocketAddr),
    Tls(rustls::Error),
    AccessLog(io::Error),
    Thread(io::Error),
    Counters(OpenError),
    Layers(TooManyLayers),
    /// The clock is where no window can be counted.
    Clock,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Listen { address, source } if source.kind() == io::ErrorKind::PermissionDenied => {
                write!(f, "can not listen on `{address}` (ports under 1024 take CAP_NET_BIND_SERVICE)")
            }
            StartError::Listen { address, .. } => write!(f, "can not listen on `{address}`"),
            StartError::Inherited(address) => {
                write!(f, "a socket was handed over for `{address}`, which is not in `listen`: write it there just so")
            }
            StartError::Tls(_) => f.write_str("TLS can not be set up"),
            StartError::Counters(error) => error.fmt(f),
            StartError::Layers(error) => error.fmt(f),
            StartError::Clock => f.write_str("the clock is before 1970 or after 2109: set it"),
            StartError::AccessLog(_) => f.write_str("can not open the access log"),
            StartError::Thread(_) => f.write_str("can not start an event loop"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::Listen { source, .. } => Some(source),
            StartError::AccessLog(source) | StartError::Thread(source) => Some(source),
            StartError::Tls(source) => Some(source),
            StartError::Counters(error) => error.source(),
            StartError::Inherited(_) | StartError::Layers(_) | StartError::Clock => None,
        }
    }
}

/// Why a configuration could not be taken over while running.
#[derive(Debug)]
pub enum ReloadError {
    /// A change of this takes a restart, or an upgrade.
    NeedsRestart(&'static str),
    Tls(rustls::Error),
    AccessLog(io::Error),
    Layers(TooManyLayers),
}

/// How their counters are written is kept for as long as the counters are, and there is no room for more.
#[derive(Debug)]
pub struct TooManyLayers;

impl fmt::Display for TooManyLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too many rules have rolled over, waited, reserved or been split since counting began: stop all gateways that count together, remove `counters.file` if there is one, and start again")
    }
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReloadError::NeedsRestart(section) => write!(f, "a change of {section} takes a restart, or an upgrade"),
            ReloadError::Tls(error) => write!(f, "TLS can not be set up: {error}"),
            ReloadError::AccessLog(error) => write!(f, "can not open the access log: {error}"),
            ReloadError::Layers(error) => error.fmt(f),
        }
    }
}
