//! What passes between the gateway and the service manager that started it: sockets that it has opened
//! (sd_listen_fds(3)), and what it is told (sd_notify(3)). Where there is none, nothing happens.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use listenfd::ListenFd;

use crate::downstream::listener::InheritedSockets;

pub const READY: &str = "READY=1";
pub const RELOADING: &str = "RELOADING=1";
pub const STOPPING: &str = "STOPPING=1";

/// Says that another process serves from now on.
pub fn main_pid(pid: u32) -> String {
    format!("MAINPID={pid}")
}

/// More than anybody hands over; room is made for as many as are claimed.
const SOCKETS_MAX: usize = 4096;

/// The sockets that were handed over to this process. To be asked once.
pub fn sockets() -> io::Result<InheritedSockets> {
    let claimed = env::var("LISTEN_FDS").ok().and_then(|count| count.parse::<usize>().ok());
    if let Some(count) = claimed.filter(|count| *count > SOCKETS_MAX) {
        return Err(io::Error::other(format!(
            "`LISTEN_FDS` says that they are {count}, and more than {SOCKETS_MAX} are not taken"
        )));
    }
    let mut handed = ListenFd::from_env();
    let mut listeners = Vec::new();
    for position in 0..handed.len() {
        listeners.extend(handed.take_tcp_listener(position)?);
    }
    InheritedSockets::from_service_manager(listeners)
}

/// Tells the service manager what the gateway is at.
pub fn notify(state: &str) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes() {
        // A name that is in no file system.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // Whoever does not listen is not waited for.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager can not be told `{state}`");
    }
}
