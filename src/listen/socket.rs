//! Listening sockets, one for each event loop, and the loop that accepts.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use super::arrival::{arrive, turn_away};
use super::lobby::Listener;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// How long to wait when there are no descriptors left: one must be closed first.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Sockets that whoever started the gateway has opened for it, by their addresses.
#[derive(Debug, Default)]
pub struct Inherited(Vec<(SocketAddr, StdListener)>);

impl Inherited {
    pub fn new(listeners: Vec<StdListener>) -> io::Result<Inherited> {
        listeners
            .into_iter()
            .map(|listener| Ok((listener.local_addr()?, listener)))
            .collect::<io::Result<_>>()
            .map(Inherited)
    }

    pub fn take(&mut self, address: SocketAddr) -> Option<StdListener> {
        let position = self.0.iter().position(|(known, _)| *known == address)?;
        Some(self.0.swap_remove(position).1)
    }

    /// The address of a socket that nobody took.
    pub fn left_over(&self) -> Option<SocketAddr> {
        self.0.first().map(|(address, _)| *address)
    }
}

/// A listener for each of `count` loops, on one address.
pub fn open(
    address: SocketAddr,
    count: usize,
    inherited: &mut Inherited,
) -> io::Result<(SocketAddr, Vec<StdListener>)> {
    let Some(listener) = inherited.take(address) else {
        is_free(address)?;
        return bind_all(address, count);
    };
    listener.set_nonblocking(true)?;
    // They share one queue: whichever loop is the first to look takes a connection.
    let mut listeners = vec![listener];
    while listeners.len() < count {
        listeners.push(listeners[0].try_clone()?);
    }
    Ok((address, listeners))
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
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Whether nobody listens on an address yet. `SO_REUSEPORT` would let a second gateway of the same
/// user share the port without a word.
fn is_free(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Accepts until the loop drains. What waits in the queue by then is still accepted, because closing
/// the socket would reset it.
pub async fn accept(socket: TcpListener, listener: Rc<Listener>) {
    let guest = listener.lobby.drain.enter();
    loop {
        let accepted = poll_fn(|cx| match socket.poll_accept(cx) {
            Poll::Ready(accepted) => Poll::Ready(Some(accepted)),
            Poll::Pending if guest.poll_begun(cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, peer))) => {
                let Some(place) = listener.lobby.capacity.enter() else {
                    turn_away(stream, &listener);
                    continue;
                };
                // An answer should not wait for the acknowledgement of the one before.
                if stream.set_nodelay(true).is_ok() {
                    let guest = listener.lobby.drain.enter();
                    tokio::task::spawn_local(arrive(stream, peer.ip(), place, Rc::clone(&listener), guest));
                }
            }
            Some(Err(error)) if is_about_one_connection(&error) => {}
            Some(Err(error)) => {
                tracing::warn!(%error, "no connection can be accepted for the moment");
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
