//! Listening sockets, one for each event loop, and the loop that accepts.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use super::arrival::arrive;
use super::drain::Drain;
use crate::gateway::hall::Hall;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// How long to wait when there are no descriptors left: one must be closed first.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Opens `count` listeners on one address. The kernel spreads connections over them, so that loops
/// need not share a queue. Port 0 is chosen once, for all.
pub fn open(address: SocketAddr, count: usize) -> io::Result<(SocketAddr, Vec<StdListener>)> {
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
pub fn is_free(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Accepts until the loop drains. What waits in the queue by then is still accepted, because closing
/// the socket would reset it.
pub async fn accept(listener: TcpListener, hall: Rc<Hall>, drain: Rc<Drain>) {
    let guest = drain.enter();
    loop {
        let accepted = poll_fn(|cx| match listener.poll_accept(cx) {
            Poll::Ready(accepted) => Poll::Ready(Some(accepted)),
            Poll::Pending if guest.poll_begun(cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, peer))) => {
                // An answer should not wait for the acknowledgement of the one before.
                if stream.set_nodelay(true).is_ok() {
                    tokio::task::spawn_local(arrive(stream, peer.ip(), Rc::clone(&hall), drain.enter()));
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
