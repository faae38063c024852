//! Listening sockets, one for each event loop, and the loop that accepts.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpListener;

use super::connection_setup::{refuse, serve_connection};
use super::listener_context::Listener;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// What may wait in the kernel to be sent to one client, beside what is on its way there. A client that takes little would
/// otherwise have megabytes kept for it, in memory that all connections of the machine share.
const UNSENT_MAX_BYTES: u32 = 128 * 1024;
/// How long to wait when there are no descriptors left: one must be closed first.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Sockets that somebody has opened for the gateway before it started.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<InheritedSocket>,
    /// Whether each of them has to be wanted.
    must_use_all: bool,
}

#[derive(Debug)]
struct InheritedSocket {
    /// As whoever opened it had it configured, where that is known.
    configured: SocketAddr,
    /// Another one if the port was the system's to choose.
    local: SocketAddr,
    listener: StdListener,
}

impl InheritedSockets {
    /// Those of a service manager, which has them configured as well: one that nobody wants is a mistake.
    pub fn from_service_manager(listeners: Vec<StdListener>) -> io::Result<InheritedSockets> {
        let named = listeners.into_iter().map(|listener| Ok((listener.local_addr()?, listener)));
        let mut inherited = InheritedSockets::from_predecessor(named.collect::<io::Result<_>>()?)?;
        inherited.must_use_all = true;
        Ok(inherited)
    }

    /// Those of the process whose place is taken, with their addresses as that had them configured. The
    /// configuration may have changed since.
    pub fn from_predecessor(listeners: Vec<(SocketAddr, StdListener)>) -> io::Result<InheritedSockets> {
        let heirloom = |(configured, listener): (SocketAddr, StdListener)| {
            Ok(InheritedSocket { configured, local: listener.local_addr()?, listener })
        };
        let sockets = listeners.into_iter().map(heirloom).collect::<io::Result<_>>()?;
        Ok(InheritedSockets { sockets, must_use_all: false })
    }

    /// All sockets of an address. Several of them have a queue each, and none may be left without somebody who
    /// accepts.
    pub fn take(&mut self, address: SocketAddr) -> Vec<StdListener> {
        let means = |socket: &InheritedSocket| socket.configured == address || socket.local == address;
        // Several addresses may leave the port to the system.
        let Some(local) = self.sockets.iter().find(|socket| means(socket)).map(|socket| socket.local) else {
            return Vec::new();
        };
        self.sockets.extract_if(.., |socket| socket.local == local).map(|socket| socket.listener).collect()
    }

    /// The address of a socket that nobody took, and somebody should have taken.
    pub fn unused_address(&self) -> Option<SocketAddr> {
        self.sockets.first().filter(|_| self.must_use_all).map(|socket| socket.local)
    }
}

/// The listeners of one address.
pub struct OpenedAddress {
    /// With the port that was chosen.
    pub address: SocketAddr,
    /// At least one for each loop; the first ones have each a queue of its own, the others share these.
    pub listeners: Vec<StdListener>,
    pub queues: usize,
}

/// Listeners for `count` loops, on one address.
pub fn open_address(address: SocketAddr, count: usize, inherited: &mut InheritedSockets) -> io::Result<OpenedAddress> {
    let mut listeners = inherited.take(address);
    if listeners.is_empty() {
        check_is_free(address)?;
        let (address, listeners) = bind_all(address, count)?;
        return Ok(OpenedAddress { address, queues: listeners.len(), listeners });
    }
    let address = listeners[0].local_addr()?;
    for listener in &listeners {
        listener.set_nonblocking(true)?;
        SockRef::from(listener).set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?;
    }
    // More of their own would get connections at once, which nobody accepts if the start fails after all. Of loops
    // that share a queue, whichever is the first to look takes a connection.
    let queues = listeners.len();
    while listeners.len() < count {
        listeners.push(listeners[listeners.len() % queues].try_clone()?);
    }
    Ok(OpenedAddress { address, listeners, queues })
}

/// Opens `count` listeners on one address. The kernel spreads connections over them, so that loops
/// need not share a queue. Port 0 is chosen once, for all.
fn bind_all(address: SocketAddr, count: usize) -> io::Result<(SocketAddr, Vec<StdListener>)> {
    let first = bind(address)?;
    let address = first.local_addr()?;
    let mut listeners = vec![first];
    while listeners.len() < count {
        listeners.push(bind(address)?);
    }
    Ok((address, listeners))
}

fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    // Connections have it from the socket that they are accepted by.
    socket.set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Whether nobody listens on an address yet. `SO_REUSEPORT` would let a second gateway of the same
/// user share the port without a word.
fn check_is_free(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Accepts until the loop drains. What waits in the queue by then is still accepted, because closing
/// the socket would reset it.
pub async fn accept_connections(socket: TcpListener, listener: Rc<Listener>) {
    let drain_guard = listener.listener_context.drain.register();
    loop {
        let accepted = poll_fn(|cx| match socket.poll_accept(cx) {
            Poll::Ready(accepted) => Poll::Ready(Some(accepted)),
            Poll::Pending if drain_guard.poll_begun(cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, peer))) => {
                let Some(place) = listener.listener_context.connection_limit.acquire() else {
                    refuse(stream, peer.ip(), &listener);
                    continue;
                };
                // An answer should not wait for the acknowledgement of the one before.
                if stream.set_nodelay(true).is_ok() {
                    let drain_guard = listener.listener_context.drain.register();
                    tokio::task::spawn_local(serve_connection(
                        stream,
                        peer.ip(),
                        place,
                        Rc::clone(&listener),
                        drain_guard,
                    ));
                }
            }
            Some(Err(error)) if is_connection_error(&error) => {}
            Some(Err(error)) => {
                tracing::warn!(%error, "no connection can be accepted for the moment");
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
}

fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
