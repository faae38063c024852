//! Why a gateway cannot start or reload, for the operator.

use std::fmt;
use std::io;

use crate::persistence::open::OpenError;
use transom_config::listen_address::ListenAddress;
use transom_limiter::rule_set::ChangedCounters;

/// Why the gateway cannot start.
#[derive(Debug)]
pub enum StartError {
    Listen {
        address: ListenAddress,
        source: io::Error,
    },
    /// An inherited socket has an address that is not configured.
    Inherited(ListenAddress),
    Tls(rustls::Error),
    AccessLog(io::Error),
    AuditLog(io::Error),
    Tracing(io::Error),
    Thread(io::Error),
    Counters(OpenError),
    /// The clock is outside the range of countable windows.
    Clock,
}

impl StartError {
    /// What to do, where the cause alone does not say it.
    pub fn fix(&self) -> Option<String> {
        let StartError::Listen { address, source } = self else { return None };
        let address = match address {
            ListenAddress::Tcp(address) => address,
            ListenAddress::Unix(_) => return fix_of_socket_file(source).map(str::to_owned),
        };
        match source.kind() {
            io::ErrorKind::PermissionDenied => {
                Some("ports below 1024 need CAP_NET_BIND_SERVICE, which the systemd unit grants".to_owned())
            }
            io::ErrorKind::AddrInUse => Some(format!(
                "`ss -ltnp 'sport = :{}'` names the process that listens there: stop it, or use another port; `transom upgrade` \
                 replaces a running gateway",
                address.port()
            )),
            io::ErrorKind::AddrNotAvailable => Some(
                "write an address of this machine (`ip address` lists them), or `0.0.0.0` for all of them".to_owned(),
            ),
            _ => None,
        }
    }
}

/// As [`StartError::fix`], for a Unix socket.
fn fix_of_socket_file(source: &io::Error) -> Option<&'static str> {
    match source.kind() {
        io::ErrorKind::PermissionDenied => Some(
            "the user of the gateway must be able to write to the folder; `owner`, and a `group` that the user is not in, need root, \
             or a unit for the socket: `SocketMode=`, `SocketUser=` and `SocketGroup=`",
        ),
        io::ErrorKind::AddrInUse => Some(
            "a process accepts connections there: stop it, or use another path; `transom upgrade` replaces a running gateway",
        ),
        io::ErrorKind::AlreadyExists => Some("move the file away, or use another path"),
        io::ErrorKind::NotFound => Some("make the folder: `RuntimeDirectory=` of the systemd unit makes one in `/run`"),
        _ => None,
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Listen { address, .. } => write!(f, "cannot listen on `{address}`"),
            StartError::Inherited(address) => {
                write!(
                    f,
                    "a socket was handed over for `{address}`, which is not in `listen`: add it to `listen` exactly as written here"
                )
            }
            StartError::Tls(_) => f.write_str("TLS cannot be set up"),
            StartError::Counters(error) => error.fmt(f),
            StartError::Clock => f.write_str("the clock is before 1970 or after 2109: set it"),
            StartError::AccessLog(_) => f.write_str("cannot open the access log"),
            StartError::AuditLog(_) => f.write_str("cannot open the audit log"),
            StartError::Tracing(_) => f.write_str("spans cannot be exported"),
            StartError::Thread(_) => f.write_str("cannot start a thread"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::Listen { source, .. } => Some(source),
            StartError::AccessLog(source)
            | StartError::AuditLog(source)
            | StartError::Tracing(source)
            | StartError::Thread(source) => Some(source),
            StartError::Tls(source) => Some(source),
            StartError::Counters(error) => error.source(),
            StartError::Inherited(_) | StartError::Clock => None,
        }
    }
}

/// Why a configuration cannot be applied while running.
#[derive(Debug)]
pub enum ReloadError {
    /// A change of this setting requires a restart or an upgrade.
    NeedsRestart(&'static str),
    Tls(rustls::Error),
    AccessLog(io::Error),
    AuditLog(io::Error),
    Tracing(io::Error),
    KeySet(StartError),
    SharedDeny(StartError),
    Acme(StartError),
    /// The change gives a layer other counters.
    ChangedCounters(ChangedCounters),
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReloadError::NeedsRestart(setting @ "counters.capacity") => {
                write!(f, "a change of `{setting}` needs a restart: an upgrade keeps the table")
            }
            ReloadError::NeedsRestart(setting) => write!(f, "a change of `{setting}` needs a restart or an upgrade"),
            ReloadError::Tls(error) => write!(f, "TLS cannot be set up: {error}"),
            ReloadError::AccessLog(error) => write!(f, "cannot open the access log: {error}"),
            ReloadError::AuditLog(error) => write!(f, "cannot open the audit log: {error}"),
            ReloadError::Tracing(error) => write!(f, "spans cannot be exported: {error}"),
            ReloadError::KeySet(error) => write!(f, "the key set cannot be fetched: {error}"),
            ReloadError::SharedDeny(error) | ReloadError::Acme(error) => {
                write!(f, "{error}")?;
                std::error::Error::source(error).map_or(Ok(()), |source| write!(f, ": {source}"))
            }
            ReloadError::ChangedCounters(ChangedCounters { rule, layer, setting }) => write!(
                f,
                "rule `{rule}`, `{layer}`: a change of `{setting}` changes how usage is counted, and needs a restart or an upgrade, which starts this layer with unused counters"
            ),
        }
    }
}
