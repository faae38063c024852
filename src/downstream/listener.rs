//! Listening sockets: for every address of TCP one per worker, and one of a Unix socket, opened or inherited before the workers start, so that an address
//! in use is a start error. `accept_connections` is a worker's accept loop.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::Path;
use std::rc::Rc;
use std::task::{Context, Poll};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UnixListener};

use super::connection_setup::{refuse, serve_connection};
use super::listener_context::{Listener, ListenerProtocol, TlsId};
use super::socket_file::SocketFile;
use crate::io_stream::StreamSocket;
use crate::proxy::log_throttle::handle_accept_error;
use transom_config::listen::Listen;
use transom_config::listen_address::{ListenAddress, ListenSocket};
use transom_http::client_address::ClientAddress;
use transom_limiter::handles::Handle as _;

/// Bytes that wait unsent in the kernel for one client, beside those in flight. Without it a client that reads slowly
/// occupies megabytes of the memory that all connections of the machine share.
const UNSENT_MAX_BYTES: u32 = 128 * 1024;

/// A listening socket of this process: every queue is there once. An upgrade passes them on.
#[derive(Debug)]
pub struct OpenSocket {
    /// As configured.
    pub address: ListenAddress,
    /// Of a Unix socket. Dropped before the socket, which keeps the inode of the file from being used again.
    pub file: Option<SocketFile>,
    pub socket: Socket,
}

/// Listening sockets that were opened before this process started: by a service manager or by the previous process.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<InheritedSocket>,
    /// Whether a socket that the configuration does not name is an error.
    must_use_all: bool,
}

#[derive(Debug)]
struct InheritedSocket {
    /// Its address is that in the configuration of the process that opened the socket, if known; else as `local`.
    open: OpenSocket,
    /// The bound address. It differs from the configured one if that has port 0.
    local: ListenAddress,
}

impl InheritedSockets {
    /// Sockets of a service manager. The manager is configured with them, so an unused one is a configuration error.
    pub fn from_service_manager(sockets: Vec<Socket>) -> io::Result<InheritedSockets> {
        let open = sockets.into_iter().map(|socket| {
            let address = local_address(&socket)?;
            let file = match &address {
                ListenAddress::Tcp(_) => None,
                ListenAddress::Unix(path) => Some(SocketFile::inherited(path.clone(), None)),
            };
            Ok(OpenSocket { address, socket, file })
        });
        let mut inherited = InheritedSockets::from_predecessor(open.collect::<io::Result<_>>()?)?;
        inherited.must_use_all = true;
        Ok(inherited)
    }

    /// Sockets of the process that this one replaces, with the addresses of its configuration. The configuration may have
    /// changed since, so unused sockets are closed.
    pub fn from_predecessor(sockets: Vec<OpenSocket>) -> io::Result<InheritedSockets> {
        let inherit = |open: OpenSocket| Ok(InheritedSocket { local: local_address(&open.socket)?, open });
        let sockets = sockets.into_iter().map(inherit).collect::<io::Result<_>>()?;
        Ok(InheritedSockets { sockets, must_use_all: false })
    }

    /// Takes all sockets of an address. Each has a queue of its own, and connections in a queue without an accept loop
    /// would never be accepted.
    fn take(&mut self, address: &ListenAddress) -> Vec<OpenSocket> {
        let matches_address = |socket: &&InheritedSocket| socket.open.address == *address || socket.local == *address;
        // Several addresses may have port 0: only sockets with the same bound address belong together.
        let Some(local) = self.sockets.iter().find(matches_address).map(|socket| socket.local.clone()) else {
            return Vec::new();
        };
        self.sockets.extract_if(.., |socket| socket.local == local).map(|socket| socket.open).collect()
    }

    /// The Unix sockets that were not taken. `Err`: the address of a socket that must be. Others of TCP are closed: they have
    /// queues of their own.
    pub fn into_unused(self) -> Result<Vec<OpenSocket>, ListenAddress> {
        match self.sockets.first() {
            Some(first) if self.must_use_all => Err(first.local.clone()),
            _ => Ok(self.sockets.into_iter().map(|socket| socket.open).filter(|open| open.file.is_some()).collect()),
        }
    }
}

/// The address that a socket is bound to.
fn local_address(socket: &Socket) -> io::Result<ListenAddress> {
    let local = socket.local_addr()?;
    let unix = || local.as_pathname().map(|path| ListenAddress::Unix(path.to_owned()));
    let unknown = || io::Error::other("a listening socket has neither an IP address nor a path");
    local.as_socket().map(ListenAddress::Tcp).or_else(unix).ok_or_else(unknown)
}

/// All listening sockets of the workers.
pub struct Listeners {
    /// Bound addresses, with the ports that the system chose.
    pub http: Vec<ListenAddress>,
    pub https: Vec<ListenAddress>,
    pub ratelimit_service: Vec<ListenAddress>,
    pub forward_auth: Vec<ListenAddress>,
    pub by_worker: Vec<Vec<WorkerListener>>,
    pub sockets: Vec<OpenSocket>,
}

/// A socket on which one worker accepts.
pub struct WorkerListener {
    pub socket: Socket,
    /// As configured.
    pub address: ListenAddress,
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
    ) -> Result<Listeners, (ListenAddress, io::Error)> {
        let by_worker = (0..workers).map(|_| Vec::new()).collect();
        let mut listeners = Listeners {
            http: Vec::new(),
            https: Vec::new(),
            ratelimit_service: Vec::new(),
            forward_auth: Vec::new(),
            by_worker,
            sockets: Vec::new(),
        };
        let mut open = |socket: &ListenSocket, tls, protocol| {
            listeners.add(socket, tls, protocol, inherited).map_err(|source| (socket.address.clone(), source))
        };
        let (mut http, mut https_addresses, mut ratelimit_service) = (Vec::new(), Vec::new(), Vec::new());
        let mut forward_auth = Vec::new();
        for socket in &listen.http {
            http.push(open(socket, None, ListenerProtocol::Http)?);
        }
        for (index, https) in listen.https.iter().enumerate() {
            for socket in &https.address {
                https_addresses.push(open(socket, Some(TlsId::at(index)), ListenerProtocol::Http)?);
            }
        }
        if let Some(service) = &listen.ratelimit_service {
            let tls = service.tls().map(|_| TlsId::at(listen.https.len()));
            for socket in service.addresses() {
                ratelimit_service.push(open(socket, tls, ListenerProtocol::RatelimitService)?);
            }
        }
        for socket in &listen.forward_auth {
            forward_auth.push(open(socket, None, ListenerProtocol::ForwardAuth)?);
        }
        (listeners.http, listeners.https) = (http, https_addresses);
        (listeners.ratelimit_service, listeners.forward_auth) = (ratelimit_service, forward_auth);
        for OpenSocket { address, socket, .. } in &listeners.sockets {
            socket.listen(listen.backlog).map_err(|source| (address.clone(), source))?;
        }
        Ok(listeners)
    }

    fn add(
        &mut self,
        configured: &ListenSocket,
        tls: Option<TlsId>,
        protocol: ListenerProtocol,
        inherited: &mut InheritedSockets,
    ) -> io::Result<ListenAddress> {
        let workers = self.by_worker.len();
        let opened = open_queues(configured, workers, inherited)?;
        let bound = local_address(&opened[0].socket)?;
        // Without a queue for each worker, workers share them: of these, the first to look takes a connection. More queues would
        // receive connections at once, and these would be lost if the start fails after all.
        for position in 0..workers.max(opened.len()) {
            // A worker may get several sockets: the process that opened them may have had more workers.
            self.by_worker[position % workers].push(WorkerListener {
                socket: opened[position % opened.len()].socket.try_clone()?,
                address: configured.address.clone(),
                tls,
                protocol,
            });
        }
        self.sockets.extend(opened);
        Ok(bound)
    }
}

/// Opens the one socket of an address that the workers do not serve, or takes it from `inherited`. Returns it with its bound address.
pub fn open_one(
    configured: &ListenSocket,
    backlog: i32,
    inherited: &mut InheritedSockets,
) -> io::Result<(OpenSocket, ListenAddress)> {
    let taken = inherited.take(&configured.address).into_iter().next();
    let open = match (taken, &configured.address) {
        (Some(inherited), _) => take_over(inherited, configured)?,
        (None, ListenAddress::Unix(path)) => bind_unix(path, configured)?,
        // With `SO_REUSEADDR`, and both families on `[::]`.
        (None, ListenAddress::Tcp(address)) => {
            let socket = Socket::from(StdListener::bind(address)?);
            socket.set_nonblocking(true)?;
            OpenSocket { address: configured.address.clone(), socket, file: None }
        }
    };
    open.socket.listen(backlog)?;
    let bound = local_address(&open.socket)?;
    Ok((open, bound))
}

/// Opens the queues of one address for `count` workers, at least one.
fn open_queues(
    configured: &ListenSocket,
    count: usize,
    inherited: &mut InheritedSockets,
) -> io::Result<Vec<OpenSocket>> {
    let taken = inherited.take(&configured.address);
    match &configured.address {
        _ if !taken.is_empty() => taken.into_iter().map(|socket| take_over(socket, configured)).collect(),
        // The kernel distributes nothing over several Unix sockets: workers share one.
        ListenAddress::Unix(path) => Ok(vec![bind_unix(path, configured)?]),
        ListenAddress::Tcp(address) => {
            check_is_free(*address)?;
            let sockets = bind_all(*address, count)?.into_iter();
            let open = |socket| OpenSocket { address: configured.address.clone(), socket, file: None };
            Ok(sockets.map(open).collect())
        }
    }
}

fn bind_unix(path: &Path, configured: &ListenSocket) -> io::Result<OpenSocket> {
    let (socket, file) = SocketFile::bind(path, configured.permissions)?;
    socket.set_nonblocking(true)?;
    Ok(OpenSocket { address: configured.address.clone(), socket, file: Some(file) })
}

/// Prepares an inherited socket.
fn take_over(inherited: OpenSocket, configured: &ListenSocket) -> io::Result<OpenSocket> {
    inherited.socket.set_nonblocking(true)?;
    match &inherited.file {
        None => inherited.socket.set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?,
        Some(file) => file.set_permissions(configured.permissions)?,
    }
    Ok(OpenSocket { address: configured.address.clone(), ..inherited })
}

/// Binds `count` sockets to one address. The kernel distributes connections over them, so that workers share no queue.
/// For port 0 the system chooses one port for all.
fn bind_all(address: SocketAddr, count: usize) -> io::Result<Vec<Socket>> {
    let first = bind(address)?;
    let address = first.local_addr()?.as_socket().unwrap_or(address);
    let mut sockets = vec![first];
    while sockets.len() < count {
        sockets.push(bind(address)?);
    }
    Ok(sockets)
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
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
    Ok(socket)
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

/// A listening socket in the runtime of a thread.
pub enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Acceptor {
    pub fn new(socket: Socket) -> io::Result<Acceptor> {
        match socket.local_addr()?.is_unix() {
            false => TcpListener::from_std(socket.into()).map(Acceptor::Tcp),
            true => UnixListener::from_std(socket.into()).map(Acceptor::Unix),
        }
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(StreamSocket, ClientAddress)>> {
        match self {
            Acceptor::Tcp(listener) => {
                let accepted = listener.poll_accept(cx);
                accepted.map_ok(|(stream, peer)| (StreamSocket::Tcp(stream), peer.ip().into()))
            }
            Acceptor::Unix(listener) => {
                let accepted = listener.poll_accept(cx);
                accepted.map_ok(|(stream, _unnamed)| (StreamSocket::Unix(stream), ClientAddress::Unix))
            }
        }
    }

    /// The next connection. Cancel-safe.
    pub async fn accept(&self) -> io::Result<StreamSocket> {
        poll_fn(|cx| self.poll_accept(cx)).await.map(|(stream, _peer)| stream)
    }
}

/// Accepts connections until the drain begins. Connections in the queue at that moment are still accepted, because
/// closing the socket would reset them.
pub async fn accept_connections(socket: Acceptor, listener: Rc<Listener>) {
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
                    refuse(stream, peer, &listener);
                    continue;
                };
                // A response must not wait for the acknowledgement of the previous one (Nagle's algorithm).
                if stream.set_nodelay().is_ok() {
                    let drain_guard = context.drain.register();
                    let connection = serve_connection(stream, peer, slot, Rc::clone(&listener), drain_guard);
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
