//! The connections of one worker to one server. [`ConnectionPool`] keeps idle HTTP/1.1 connections and shared HTTP/2
//! connections; [`ServerPool`] adds the number of requests in flight and, where connections are limited, the queue of
//! waiters.
//!
//! A limit of the whole process is divided among the workers, so that they need not coordinate; each gets at least one.
//! Waiters are served in order of arrival, with a connection that became free, or with the permit of one that closed.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use http::header::{self, HeaderValue};
use http::{Request, uri};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::connect::{Connected, Connector, HttpVersion, ResolvedTarget};
use super::connection::UpstreamConnection;
use super::http1::Http1Connection;
use super::http2::{self, Http2Connection, Http2Stream, StreamCapacity};
use super::request_body::RequestBody;
use super::request_limit::{ConnectionPermit, PermitIssuer};
use crate::io_stream::descriptor_limit;
use transom_config::upstream::{HostField, Scheme, Server, TransportSettings, UpstreamPolicy};
use transom_http::error::RequestError;
use transom_limiter::handles::Handle as _;
use transom_rules::public_location::UrlAuthority;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::WorkerId;
use transom_runtime::metrics::upstream::{ActiveGauge, ConnectionGauge, CountedConnection};

/// HTTP/2 connections to one server. Beyond this number, requests wait for a stream.
const HTTP2_CONNECTIONS_MAX: usize = 64;
/// The shortest silence after which a PING checks a server.
const PING_AFTER_MIN: Duration = Duration::from_secs(1);

pub struct ConnectionPool {
    server: Server,
    connector: Connector,
    /// The Host field, where it differs from the client's.
    host: Option<HeaderValue>,
    /// The last one used is on top: it is the most likely to be open, and the others can expire.
    #[allow(clippy::vec_box, reason = "a connection is moved often, and large")]
    idle: RefCell<Vec<Box<Http1Connection>>>,
    /// Most idle connections. Set with the configuration.
    pub idle_max: Cell<usize>,
    http2: RefCell<Vec<Rc<Http2Connection>>>,
    /// The server has chosen HTTP/2, and will probably do so again.
    prefers_http2: Cell<bool>,
    /// One task opens an HTTP/2 connection while the others wait for it.
    opening: Semaphore,
    /// Counts connections; `None` for health checks.
    gauge: Option<Rc<ConnectionGauge>>,
    clock: Clock,
}

impl ConnectionPool {
    pub fn new(
        server: Server,
        transport: &TransportSettings,
        gauge: Option<Rc<ConnectionGauge>>,
        clock: Clock,
    ) -> Rc<ConnectionPool> {
        let host = match &transport.host {
            HostField::Keep => None,
            HostField::Server => Some(authority(&server)),
            HostField::Fixed(host) => HeaderValue::from_str(host).ok(),
        };
        let connector = Connector::new(server.clone(), transport, clock.clone());
        Rc::new(ConnectionPool {
            host,
            idle: RefCell::default(),
            idle_max: Cell::new(0),
            http2: RefCell::default(),
            prefers_http2: Cell::new(connector.is_http2()),
            opening: Semaphore::new(1),
            gauge,
            connector,
            server,
            clock,
        })
    }

    /// Whether the server is only sent HTTP/2.
    pub fn is_http2(&self) -> bool {
        self.connector.is_http2()
    }

    /// The Host field for requests without one.
    pub fn authority(&self) -> HeaderValue {
        self.host.clone().unwrap_or_else(|| authority(&self.server))
    }

    /// Whether this is the name of the server in its URL, or the one that it is sent. Port 0: any.
    pub fn has_name(&self, authority: UrlAuthority<'_>) -> bool {
        let Server { scheme, host, port, .. } = &self.server;
        let default_port = if *scheme == Scheme::Https { 443 } else { 80 };
        let is_name = |name: UrlAuthority<'_>| {
            name.host.eq_ignore_ascii_case(authority.host) && (authority.port == 0 || authority.port == name.port)
        };
        let sent = self.host.as_ref().and_then(|host| host.to_str().ok());
        // The path of a Unix socket is no name.
        *port != 0 && is_name(UrlAuthority { host, port: *port })
            || sent.and_then(|sent| UrlAuthority::parse(sent, default_port)).is_some_and(is_name)
    }

    /// Sets Host as configured for this server; an earlier attempt may have set that of another server.
    pub fn set_host(&self, request: &mut Request<RequestBody>) {
        if let Some(host) = &self.host {
            http2::to_http1_form(request);
            request.headers_mut().insert(header::HOST, host.clone());
        }
    }

    /// A connection that takes a request now. Whether it is still open shows when it is used.
    pub fn take_ready(&self) -> Option<UpstreamConnection> {
        if let Some(connection) = self.idle.borrow_mut().pop() {
            connection.counted.set_idle(false);
            return Some(UpstreamConnection::Http1(connection));
        }
        self.open_stream(usize::MAX)
    }

    /// A stream of the shared connection with the fewest requests that takes one. Where there are `enough` connections,
    /// a full one will do, on which the request waits for others.
    pub fn open_stream(&self, enough: usize) -> Option<UpstreamConnection> {
        let (mut free, mut full) = (None, None);
        let mut shared = self.http2.borrow_mut();
        shared.retain(|connection| {
            let least_loaded = match connection.state() {
                // A dropped connection gets no more requests, and ends with the last response.
                StreamCapacity::Closed => return false,
                StreamCapacity::Pending => return true,
                StreamCapacity::Full => &mut full,
                StreamCapacity::Free => &mut free,
            };
            if least_loaded
                .as_ref()
                .is_none_or(|known: &Rc<Http2Connection>| connection.active_streams() < known.active_streams())
            {
                *least_loaded = Some(Rc::clone(connection));
            }
            true
        });
        let full = full.filter(|_| shared.len() >= enough);
        free.or(full).map(|connection| UpstreamConnection::Http2(Box::new(Http2Stream::open(connection))))
    }

    /// A connection that was opened less than `patience` ago and waits for SETTINGS. Older ones are dropped.
    fn pending_http2(&self, patience: Duration) -> Option<Rc<Http2Connection>> {
        let now = self.clock.instant();
        let is_pending = |connection: &Rc<Http2Connection>| connection.state() == StreamCapacity::Pending;
        let mut shared = self.http2.borrow_mut();
        shared.retain(|connection| !is_pending(connection) || now.duration_since(connection.opened_at) < patience);
        shared.iter().find(|connection| is_pending(connection)).map(Rc::clone)
    }

    /// Closes the connection that has been idle longest, to free its permit.
    pub fn close_oldest_idle(&self) {
        let mut idle = self.idle.borrow_mut();
        let oldest = (!idle.is_empty()).then(|| idle.remove(0));
        drop(idle);
        drop(oldest);
    }

    /// Closes the idle connections, and keeps none from now on. Requests in flight end.
    pub fn retire(&self) {
        self.idle_max.set(0);
        let idle = self.idle.take();
        let http2 = self.http2.take();
        drop((idle, http2));
    }

    /// Keeps a connection whose last response has ended, if another request can follow.
    pub fn put_idle(&self, mut connection: Box<Http1Connection>) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < self.idle_max.get()
            && self.connector.is_for_all_clients()
            && self.is_current_target(&mut connection.target)
            && connection.is_reusable()
        {
            connection.become_idle(|| self.clock.instant());
            idle.push(connection);
        }
    }

    /// Whether the server still has the address of a connection.
    fn is_current_target(&self, target: &mut ResolvedTarget) -> bool {
        let resolver = &self.connector.resolver;
        if target.generation == resolver.generation() {
            return true;
        }
        target.generation = resolver.generation();
        target.address.is_none_or(|address| resolver.contains(&address))
    }

    /// Closes connections that were idle for longer than `limit`, that the server closed, or whose address the server
    /// no longer has.
    pub fn sweep(&self, limit: Duration) {
        let now = self.clock.instant();
        let idle_for = |since: Instant| now.duration_since(since);
        self.idle.borrow_mut().retain_mut(|idle| {
            let idle_for = idle.idle_since.map_or(Duration::ZERO, idle_for);
            idle_for < limit && self.is_current_target(&mut idle.target) && idle.is_ready()
        });
        self.http2.borrow_mut().retain(|shared| {
            if shared.address.is_some_and(|address| !self.connector.resolver.contains(&address)) {
                shared.retire();
            }
            if shared.active_streams() > 0 {
                shared.idle_since.set(now);
            }
            idle_for(shared.idle_since.get()) < limit && shared.state() != StreamCapacity::Closed
        });
        let is_empty = self.idle.borrow().is_empty() && self.http2.borrow().is_empty();
        if !is_empty && self.connector.resolver.is_stale() {
            self.connector.resolver.refresh();
        }
    }

    /// A new connection has failed after it was opened: the server may have moved. The name is resolved before the next connection.
    pub fn mark_suspect(&self) {
        self.connector.resolver.mark_suspect();
    }

    /// Whether the server no longer has the address of a connection, once its name is resolved again.
    pub async fn has_moved(&self, address: Option<SocketAddr>) -> bool {
        let Some(address) = address else { return false };
        let resolver = &self.connector.resolver;
        !resolver.new_addresses(&[address]).await.is_empty() && !resolver.contains(&address)
    }

    /// Opens a connection, or a stream of one that takes a request, within `within`. After `ping_after`
    /// without input, a PING checks an HTTP/2 server. `is_exclusive`: no other request will use the connection.
    /// `keeps_pending`: a new connection whose SETTINGS do not arrive in time stays in the pool, for the next request. `client`:
    /// whose request will use the connection; `None`: the gateway's own.
    pub async fn connect(
        &self,
        client: Option<IpAddr>,
        within: Duration,
        ping_after: Duration,
        is_exclusive: bool,
        keeps_pending: bool,
    ) -> Result<UpstreamConnection, RequestError> {
        match timeout(within, self.open(client, within, ping_after, is_exclusive, keeps_pending)).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => Err(RequestError::ConnectTimeout),
            Ok(Err(error)) => Err(RequestError::Connect(format!("{}: {error}", self.server.url))),
            Err(_elapsed) => {
                self.mark_suspect();
                Err(RequestError::ConnectTimeout)
            }
        }
    }

    async fn open(
        &self,
        client: Option<IpAddr>,
        within: Duration,
        ping_after: Duration,
        is_exclusive: bool,
        keeps_pending: bool,
    ) -> io::Result<UpstreamConnection> {
        let mut shares = self.prefers_http2.get() && !is_exclusive;
        let start = self.clock.instant();
        let _permit = match shares {
            true => Some(self.opening.acquire().await.map_err(io::Error::other)?),
            false => None,
        };
        let mut dial = self.connector.dial(is_exclusive, client);
        loop {
            if shares && let Some(connection) = self.open_stream(HTTP2_CONNECTIONS_MAX) {
                return Ok(connection);
            }
            let pending = if shares { self.pending_http2(within / 2) } else { None };
            let is_new = pending.is_none();
            let connection = match pending {
                Some(connection) => connection,
                // A new connection would hardly be ready in time, and every request that waits here would open one.
                None if self.clock.instant().duration_since(start) > within * 3 / 4 => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                None => match self.start_http(dial.connect().await?, ping_after).await? {
                    NewConnection::Http1(connection) => return Ok(UpstreamConnection::Http1(connection)),
                    NewConnection::Http2(connection) => connection,
                },
            };
            let add = || self.http2.borrow_mut().push(Rc::clone(&connection));
            if is_new && keeps_pending {
                add();
            }
            if let Err(error) = connection.wait_for_stream_limit().await {
                // Its task may not have ended yet, and it must not be taken again.
                connection.retire();
                dial.on_failure(connection.address, error)?;
                continue;
            }
            if is_new && !keeps_pending {
                add();
            }
            // Other requests may have taken the streams.
            if connection.state() == StreamCapacity::Free {
                return Ok(UpstreamConnection::Http2(Box::new(Http2Stream::open(connection))));
            }
            shares = true;
        }
    }

    /// Starts HTTP on a new stream.
    async fn start_http(&self, connected: Connected, ping_after: Duration) -> io::Result<NewConnection> {
        let Connected { stream, version, target } = connected;
        let counted = CountedConnection::new(self.gauge.as_ref());
        match version {
            HttpVersion::Http1 => {
                self.prefers_http2.set(self.connector.is_http2());
                Ok(NewConnection::Http1(Box::new(Http1Connection::new(stream, target, counted))))
            }
            HttpVersion::Http2 => {
                self.prefers_http2.set(true);
                let scheme = if self.server.scheme == Scheme::Https { uri::Scheme::HTTPS } else { uri::Scheme::HTTP };
                let ping_after = ping_after.max(PING_AFTER_MIN);
                let now = self.clock.instant();
                Http2Connection::new(stream, scheme, target.address, ping_after, now, counted)
                    .await
                    .map(NewConnection::Http2)
            }
        }
    }
}

/// A new connection.
enum NewConnection {
    Http1(Box<Http1Connection>),
    Http2(Rc<Http2Connection>),
}

/// The host of a server's URL, with the port if it names one.
fn authority(server: &Server) -> HeaderValue {
    let authority = server.url.split_once("://").map_or("localhost", |(_, authority)| authority);
    HeaderValue::from_str(authority).unwrap_or_else(|_| HeaderValue::from_static("localhost"))
}

/// Idle connections to all servers together use at most one in this many descriptors.
const IDLE_DESCRIPTOR_DIVISOR: u64 = 4;

/// One server of an upstream, as one worker uses it.
pub struct ServerPool {
    pub pool: Rc<ConnectionPool>,
    active_requests: Cell<u32>,
    active_gauge: ActiveGauge,
    /// Connections that this worker may have; `None`: no limit.
    connection_max: Cell<Option<u32>>,
    /// Connections that are open or being opened, where they are limited.
    open_connections: Cell<u32>,
    waiters: RefCell<VecDeque<Waiter>>,
}

/// What a waiter receives.
pub enum Offer {
    Connection(UpstreamConnection),
    Permit(ConnectionPermit),
}

/// A request that waits for a connection.
struct Waiter {
    offer: oneshot::Sender<Offer>,
    /// Whether a stream of a shared connection will do.
    accepts_stream: bool,
}

/// One request at a server, until its response ends.
pub struct ActiveRequest(Rc<ServerPool>);

impl ServerPool {
    pub fn new(pool: Rc<ConnectionPool>, meter: ActiveGauge) -> Rc<ServerPool> {
        Rc::new(ServerPool {
            pool,
            active_requests: Cell::new(0),
            active_gauge: meter,
            connection_max: Cell::new(None),
            open_connections: Cell::new(0),
            waiters: RefCell::default(),
        })
    }

    /// Sets this worker's share of the limits. `servers`: in all upstreams together.
    pub fn set_limits(&self, limits: &UpstreamPolicy, worker: WorkerId, workers: usize, servers: usize) {
        self.connection_max.set(limits.max_connections.map(|max| worker_share(max, worker, workers)));
        // Idle connections to one server leave descriptors for clients and for connections to others.
        let spare = descriptor_limit() / IDLE_DESCRIPTOR_DIVISOR / servers.max(1) as u64;
        let idle = limits.max_idle_connections.min(u32::try_from(spare).unwrap_or(u32::MAX));
        self.pool.idle_max.set(worker_share(idle, worker, workers) as usize);
    }

    pub fn active_requests(&self) -> u32 {
        self.active_requests.get()
    }

    pub fn begin_request(self: &Rc<ServerPool>) -> ActiveRequest {
        self.active_requests.set(self.active_requests.get() + 1);
        self.active_gauge.started();
        ActiveRequest(Rc::clone(self))
    }

    /// A permit for one more connection; `None` where connections are not limited.
    pub fn acquire_permit(self: &Rc<ServerPool>) -> Result<Option<ConnectionPermit>, ConnectionLimitReached> {
        match self.connection_max.get() {
            None => Ok(None),
            Some(max) if self.open_connections.get() < max => Ok(Some(self.new_permit())),
            Some(_) => Err(ConnectionLimitReached),
        }
    }

    fn new_permit(self: &Rc<ServerPool>) -> ConnectionPermit {
        self.open_connections.set(self.open_connections.get() + 1);
        // The coercion needs a variable of the concrete type.
        let issuer: Weak<ServerPool> = Rc::downgrade(self);
        ConnectionPermit::new(issuer)
    }

    /// Appends a request to the queue of those that wait for a connection. `accepts_stream`: the request can use a stream of
    /// a shared connection too.
    pub fn enqueue(&self, accepts_stream: bool) -> oneshot::Receiver<Offer> {
        let (offer, offered) = oneshot::channel();
        let mut waiters = self.waiters.borrow_mut();
        waiters.retain(|waiter| !waiter.offer.is_closed());
        waiters.push_back(Waiter { offer, accepts_stream });
        offered
    }

    /// Gives waiters the free streams of a shared connection that was just opened.
    pub fn serve_stream_waiters(&self) {
        let first = || self.waiters.borrow().iter().position(|waiter| waiter.accepts_stream);
        while let Some(first) = first() {
            let Some(connection) = self.pool.open_stream(1) else { return };
            let next = self.waiters.borrow_mut().remove(first);
            // If the waiting request was canceled, the send fails and drops the stream.
            drop(next.map(|next| next.offer.send(Offer::Connection(connection))));
        }
    }

    /// Gives a connection to the first waiter, or back to the pool.
    pub fn release(&self, connection: UpstreamConnection) {
        // A stream of a shared connection has ended with its response.
        let UpstreamConnection::Http1(mut connection) = connection else { return };
        if !self.pool.connector.is_for_all_clients() {
            // Its drop gives the permit to the first waiter.
            return drop(connection);
        }
        if self.connection_max.get().is_none() || self.waiters.borrow().is_empty() || !connection.is_ready() {
            return self.pool.put_idle(connection);
        }
        loop {
            let Some(next) = self.waiters.borrow_mut().pop_front() else { return self.pool.put_idle(connection) };
            match next.offer.send(Offer::Connection(UpstreamConnection::Http1(connection))) {
                Ok(()) => return,
                // That waiter has given up.
                Err(Offer::Connection(UpstreamConnection::Http1(back))) => connection = back,
                Err(_) => return,
            }
        }
    }
}

/// The connection limit is reached.
pub struct ConnectionLimitReached;

impl ActiveRequest {
    pub fn server(&self) -> &ServerPool {
        &self.0
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.active_requests.set(self.0.active_requests.get() - 1);
        self.0.active_gauge.ended();
    }
}

impl PermitIssuer for ServerPool {
    fn take_back(self: Rc<ServerPool>) {
        self.open_connections.set(self.open_connections.get() - 1);
        // After the limit was lowered, there may be no permit yet.
        if self.connection_max.get().is_some_and(|max| self.open_connections.get() >= max) {
            return;
        }
        let next = self.waiters.borrow_mut().pop_front();
        if let Some(next) = next {
            // If that waiter has given up, its permit is dropped, and goes to the next.
            drop(next.offer.send(Offer::Permit(self.new_permit())));
        }
    }
}

/// One worker's share of a limit. The shares add up to the limit, or are 1 each if that is more; those of 0 are 0.
fn worker_share(max: u32, worker: WorkerId, workers: usize) -> u32 {
    let (each, rest) = (max as usize / workers.max(1), max as usize % workers.max(1));
    u32::try_from(each + usize::from(worker.index() < rest)).unwrap_or(u32::MAX).max(max.min(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_shares_add_up() {
        let sum =
            |max, workers| (0..workers).map(|worker| worker_share(max, WorkerId::at(worker), workers)).sum::<u32>();
        for (max, workers) in [(1, 1), (4, 4), (10, 4), (7, 2), (1_000_000, 7)] {
            assert_eq!(sum(max, workers), max);
        }
        assert_eq!((sum(2, 8), sum(0, 8)), (8, 0));
    }
}
