//! The service manager's protocols: socket activation (sd_listen_fds(3)) and notifications (sd_notify(3)). Without a
//! service manager nothing happens.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use listenfd::ListenFd;
use socket2::Socket;

use crate::downstream::listener::InheritedSockets;

pub const READY: &str = "READY=1";
pub const RELOADING: &str = "RELOADING=1";
pub const STOPPING: &str = "STOPPING=1";

/// The notification that another process serves from now on.
pub fn main_pid(pid: u32) -> String {
    format!("MAINPID={pid}")
}

/// Most inherited sockets; memory is reserved for the number claimed.
const SOCKETS_MAX: usize = 4096;

/// The sockets passed to this process. Call once.
pub fn sockets() -> io::Result<InheritedSockets> {
    let claimed = env::var("LISTEN_FDS").ok().and_then(|count| count.parse::<usize>().ok());
    if let Some(count) = claimed.filter(|count| *count > SOCKETS_MAX) {
        return Err(io::Error::other(format!("`LISTEN_FDS` is {count}; at most {SOCKETS_MAX} sockets are accepted")));
    }
    let mut passed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for position in 0..passed.len() {
        // The error of a descriptor that is neither is that of TCP.
        match passed.take_unix_listener(position) {
            Ok(unix) => sockets.extend(unix.map(Socket::from)),
            Err(_) => sockets.extend(passed.take_tcp_listener(position)?.map(Socket::from)),
        }
    }
    InheritedSockets::from_service_manager(sockets)
}

/// Notifies the service manager of a state.
pub fn notify(state: &str) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes() {
        // An abstract socket name.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // A full queue must not block the gateway.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot notify the service manager of `{state}`");
    }
}
