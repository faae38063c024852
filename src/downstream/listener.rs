//! Listening sockets: for every address one per worker, opened or inherited before the workers start, so that an address
//! in use is a start error. `accept_connections` is a worker's accept loop.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::task::Poll;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpListener;

use super::connection_setup::{refuse, serve_connection};
use super::listener_context::{Listener, ListenerProtocol, TlsId};
use crate::proxy::log_throttle::handle_accept_error;
use transom_config::listen::Listen;
use transom_limiter::handles::Handle as _;

/// Bytes that wait unsent in the kernel for one client, beside those in flight. Without it a client that reads slowly
/// occupies megabytes of the memory that all connections of the machine share.
const UNSENT_MAX_BYTES: u32 = 128 * 1024;

/// Listening sockets that were opened before this process started: by a service manager or by the previous process.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<InheritedSocket>,
    /// Whether a socket that the configuration does not name is an error.
    must_use_all: bool,
}

#[derive(Debug)]
struct InheritedSocket {
    /// The address in the configuration of the process that opened the socket, if known; else as `local`.
    configured: SocketAddr,
    /// The bound address. It differs from `configured` if that has port 0.
    local: SocketAddr,
    listener: StdListener,
}

impl InheritedSockets {
    /// Sockets of a service manager. The manager is configured with them, so an unused one is a configuration error.
    pub fn from_service_manager(listeners: Vec<StdListener>) -> io::Result<InheritedSockets> {
        let named = listeners.into_iter().map(|listener| Ok((listener.local_addr()?, listener)));
        let mut inherited = InheritedSockets::from_predecessor(named.collect::<io::Result<_>>()?)?;
        inherited.must_use_all = true;
        Ok(inherited)
    }

    /// Sockets of the process that this one replaces, with the addresses of its configuration. The configuration may have
    /// changed since, so unused sockets are closed.
    pub fn from_predecessor(listeners: Vec<(SocketAddr, StdListener)>) -> io::Result<InheritedSockets> {
        let inherit = |(configured, listener): (SocketAddr, StdListener)| {
            Ok(InheritedSocket { configured, local: listener.local_addr()?, listener })
        };
        let sockets = listeners.into_iter().map(inherit).collect::<io::Result<_>>()?;
        Ok(InheritedSockets { sockets, must_use_all: false })
    }

    /// Takes all sockets of an address. Each has a queue of its own, and connections in a queue without an accept loop
    /// would never be accepted.
    pub fn take(&mut self, address: SocketAddr) -> Vec<StdListener> {
        let matches_address = |socket: &InheritedSocket| socket.configured == address || socket.local == address;
        // Several addresses may have port 0: only sockets with the same bound address belong together.
        let Some(local) = self.sockets.iter().find(|socket| matches_address(socket)).map(|socket| socket.local) else {
            return Vec::new();
        };
        self.sockets.extract_if(.., |socket| socket.local == local).map(|socket| socket.listener).collect()
    }

    /// The address of a socket that was not taken although every socket must be.
    pub fn unused_address(&self) -> Option<SocketAddr> {
        self.sockets.first().filter(|_| self.must_use_all).map(|socket| socket.local)
    }
}

/// All listening sockets of the gateway.
pub struct Listeners {
    /// Bound addresses, with the ports that the system chose.
    pub http: Vec<SocketAddr>,
    pub https: Vec<SocketAddr>,
    pub ratelimit_service: Vec<SocketAddr>,
    pub forward_auth: Vec<SocketAddr>,
    pub by_worker: Vec<Vec<WorkerListener>>,
    /// Every queue once, with its address as configured: what a hot upgrade passes to the next process.
    pub sockets: Vec<(SocketAddr, StdListener)>,
}

/// A socket on which one worker accepts.
pub struct WorkerListener {
    pub socket: StdListener,
    /// As configured.
    pub address: SocketAddr,
    /// `None`: without TLS.
    pub tls: Option<TlsId>,
    pub protocol: ListenerProtocol,
}

impl Listeners {
    /// Opens the sockets of `workers` workers, or takes them from `inherited`. An error has the address that failed.
    pub fn open(
        listen: &Listen,
        workers: usize,
        inherited: &mut InheritedSockets,
    ) -> Result<Listeners, (SocketAddr, io::Error)> {
        let by_worker = (0..workers).map(|_| Vec::new()).collect();
        let mut listeners = Listeners {
            http: Vec::new(),
            https: Vec::new(),
            ratelimit_service: Vec::new(),
            forward_auth: Vec::new(),
            by_worker,
            sockets: Vec::new(),
        };
        let mut open = |address: SocketAddr, tls, protocol| {
            listeners.add(address, tls, protocol, inherited).map_err(|source| (address, source))
        };
        let (mut http, mut https_addresses, mut ratelimit_service) = (Vec::new(), Vec::new(), Vec::new());
        let mut forward_auth = Vec::new();
        for address in &listen.http {
            http.push(open(*address, None, ListenerProtocol::Http)?);
        }
        for (index, https) in listen.https.iter().enumerate() {
            for address in &https.address {
                https_addresses.push(open(*address, Some(TlsId::at(index)), ListenerProtocol::Http)?);
            }
        }
        if let Some(service) = &listen.ratelimit_service {
            let tls = service.tls().map(|_| TlsId::at(listen.https.len()));
            for address in service.addresses() {
                ratelimit_service.push(open(*address, tls, ListenerProtocol::RatelimitService)?);
            }
        }
        for address in &listen.forward_auth {
            forward_auth.push(open(*address, None, ListenerProtocol::ForwardAuth)?);
        }
        (listeners.http, listeners.https) = (http, https_addresses);
        (listeners.ratelimit_service, listeners.forward_auth) = (ratelimit_service, forward_auth);
        for (address, socket) in &listeners.sockets {
            set_backlog(socket, listen.backlog).map_err(|source| (*address, source))?;
        }
        Ok(listeners)
    }

    fn add(
        &mut self,
        address: SocketAddr,
        tls: Option<TlsId>,
        protocol: ListenerProtocol,
        inherited: &mut InheritedSockets,
    ) -> io::Result<SocketAddr> {
        let workers = self.by_worker.len();
        let opened = open_address(address, workers, inherited)?;
        for socket in &opened.listeners[..opened.queues] {
            self.sockets.push((address, socket.try_clone()?));
        }
        // A worker may get several sockets: the process that opened them may have had more workers.
        for (position, socket) in opened.listeners.into_iter().enumerate() {
            self.by_worker[position % workers].push(WorkerListener { socket, address, tls, protocol });
        }
        Ok(opened.address)
    }
}

/// The sockets of one address.
struct OpenedAddress {
    /// Bound address, with the port that the system chose.
    address: SocketAddr,
    /// At least one per worker. The first `queues` have a queue each; the others share these queues.
    listeners: Vec<StdListener>,
    queues: usize,
}

/// Opens one address for `count` workers.
fn open_address(address: SocketAddr, count: usize, inherited: &mut InheritedSockets) -> io::Result<OpenedAddress> {
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
    // Additional sockets share the inherited queues. Queues of their own would receive connections at once, and these
    // would be lost if the start fails after all. Of workers that share a queue, the first to look takes a connection.
    let queues = listeners.len();
    while listeners.len() < count {
        listeners.push(listeners[listeners.len() % queues].try_clone()?);
    }
    Ok(OpenedAddress { address, listeners, queues })
}

/// Binds `count` sockets to one address. The kernel distributes connections over them, so that workers share no queue.
/// For port 0 the system chooses one port for all.
fn bind_all(address: SocketAddr, count: usize) -> io::Result<(SocketAddr, Vec<StdListener>)> {
    let first = bind(address)?;
    let address = first.local_addr()?;
    let mut listeners = vec![first];
    while listeners.len() < count {
        listeners.push(bind(address)?);
    }
    Ok((address, listeners))
}

/// Sets how many connections may wait in the kernel. The first call makes the socket listen.
pub fn set_backlog(socket: &StdListener, backlog: i32) -> io::Result<()> {
    SockRef::from(socket).listen(backlog)
}

fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    // Accepted connections inherit this option.
    socket.set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Fails if another process listens on the address. `SO_REUSEPORT` alone would let a second gateway of the same user share
/// the port silently.
fn check_is_free(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Accepts connections until the drain begins. Connections in the queue at that moment are still accepted, because
/// closing the socket would reset them.
pub async fn accept_connections(socket: TcpListener, listener: Rc<Listener>) {
    let context = &listener.listener_context;
    let drain_guard = context.drain.register();
    loop {
        let accepted = poll_fn(|cx| match socket.poll_accept(cx) {
            Poll::Ready(accepted) => Poll::Ready(Some(accepted)),
            Poll::Pending if drain_guard.poll_begun(cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, peer))) => {
                listener.metrics.accepted();
                let Some(slot) = context.connection_limit.acquire() else {
                    refuse(stream, peer.ip().into(), &listener);
                    continue;
                };
                // A response must not wait for the acknowledgement of the previous one (Nagle's algorithm).
                if stream.set_nodelay(true).is_ok() {
                    let drain_guard = context.drain.register();
                    let connection =
                        serve_connection(stream, peer.ip().into(), slot, Rc::clone(&listener), drain_guard);
                    tokio::task::spawn_local(connection);
                }
            }
            Some(Err(error)) => {
                let worker = &context.worker;
                handle_accept_error(
                    error,
                    "accepting connections failed; retrying",
                    &worker.log_throttle,
                    &worker.clock,
                )
                .await;
            }
        }
    }
}
