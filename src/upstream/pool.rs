//! The connections to one server, of one event loop: idle ones, and those that several requests share.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::header::{self, HeaderValue};
use http::{Request, uri};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::connect::{Dial, Spoken};
use super::connection::{ResolvedTarget, UpstreamConnection};
use super::http1::Connection;
use super::http2::{Http2Connection, Http2Stream, State};
use super::request_upload::Upload;
use crate::clock::Clock;
use crate::config::{HostField, Scheme, Server, TransportSettings};
use crate::http::error::RequestError;

/// Shared connections to one server; beyond, requests wait for each other.
const SHARED_MAX: usize = 64;
/// The least time in which a server is expected to say something.
const QUIET_MIN: Duration = Duration::from_secs(1);

pub struct Pool {
    server: Server,
    dial: Dial,
    /// What Host says, where it is not what the client said.
    host: Option<HeaderValue>,
    /// The last one used is on top: it is the likeliest to be alive, and the rest can age.
    #[allow(clippy::vec_box, reason = "a connection is moved often, and large")]
    idle: RefCell<Vec<Box<Connection>>>,
    /// How many of them are kept. Set with the configuration.
    pub idle_max: Cell<usize>,
    shared: RefCell<Vec<Rc<Http2Connection>>>,
    /// The server has chosen HTTP/2, and probably will again.
    shares: Cell<bool>,
    /// One opens a shared connection, and the others wait for it.
    opening: Semaphore,
    clock: Clock,
}

impl Pool {
    pub fn new(server: Server, way: &TransportSettings, clock: Clock) -> Rc<Pool> {
        let host = match &way.host {
            HostField::Keep => None,
            HostField::Server => Some(authority(&server)),
            HostField::Fixed(host) => HeaderValue::from_str(host).ok(),
        };
        let dial = Dial::new(server.clone(), way, clock.clone());
        Rc::new(Pool {
            host,
            idle: RefCell::default(),
            idle_max: Cell::new(0),
            shared: RefCell::default(),
            shares: Cell::new(dial.is_http2()),
            opening: Semaphore::new(1),
            dial,
            server,
            clock,
        })
    }

    /// Whether the server is spoken to in HTTP/2 only.
    pub fn is_http2(&self) -> bool {
        self.dial.is_http2()
    }

    /// What Host says to the server when the client said nothing.
    pub fn authority(&self) -> HeaderValue {
        self.host.clone().unwrap_or_else(|| authority(&self.server))
    }

    /// Says in Host, or in the target that another server was sent, what this server is to be told.
    pub fn address(&self, request: &mut Request<Upload>) {
        if let Some(host) = &self.host {
            super::http2::origin_form(request);
            request.headers_mut().insert(header::HOST, host.clone());
        }
    }

    /// A connection that takes a request right now. Whether it is still alive is found out when it is used.
    pub fn take(&self) -> Option<UpstreamConnection> {
        if let Some(connection) = self.idle.borrow_mut().pop() {
            return Some(UpstreamConnection::Alone(connection));
        }
        self.share(usize::MAX)
    }

    /// A place on the shared connection with the fewest requests of those that have room. Where there are `enough` of them, a
    /// request waits for others on a full one.
    pub fn share(&self, enough: usize) -> Option<UpstreamConnection> {
        let (mut free, mut full) = (None, None);
        let mut shared = self.shared.borrow_mut();
        shared.retain(|connection| {
            let emptiest = match connection.state() {
                // Nothing is sent on those that are left out; they end with the last answer.
                State::Closed => return false,
                State::Pending => return true,
                State::Full => &mut full,
                State::Free => &mut free,
            };
            if emptiest.as_ref().is_none_or(|known: &Rc<Http2Connection>| connection.load() < known.load()) {
                *emptiest = Some(Rc::clone(connection));
            }
            true
        });
        let full = full.filter(|_| shared.len() >= enough);
        free.or(full).map(|connection| UpstreamConnection::Shared(Http2Stream::of(connection)))
    }

    /// A connection that was opened less than `patience` ago, and on which the server has not allowed a stream yet. An older
    /// one is given up.
    fn pending(&self, patience: Duration) -> Option<Rc<Http2Connection>> {
        let now = self.clock.instant();
        let is_pending = |connection: &Rc<Http2Connection>| connection.state() == State::Pending;
        let mut shared = self.shared.borrow_mut();
        shared.retain(|connection| !is_pending(connection) || now.duration_since(connection.opened) < patience);
        shared.iter().find(|connection| is_pending(connection)).map(Rc::clone)
    }

    /// Closes the connection that has been idle for the longest, to make room for one of another kind.
    pub fn close_one(&self) {
        let mut idle = self.idle.borrow_mut();
        let oldest = (!idle.is_empty()).then(|| idle.remove(0));
        drop(idle);
        drop(oldest);
    }

    /// Keeps a connection whose last answer has ended. Whether it takes another request is found out
    /// when there is one; but one that still sends a body is not kept.
    pub fn put(&self, mut connection: Box<Connection>) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < self.idle_max.get() && self.is_known(&mut connection.bearing) && connection.is_done() {
            connection.idle_since.get_or_insert_with(|| self.clock.instant());
            idle.push(connection);
        }
    }

    /// Whether a connection leads to an address that the server still has.
    fn is_known(&self, bearing: &mut ResolvedTarget) -> bool {
        let names = &self.dial.names;
        if bearing.era == names.era() {
            return true;
        }
        bearing.era = names.era();
        bearing.address.is_none_or(|address| names.has(&address))
    }

    /// Closes what has been idle for longer than `limit`, was closed by the server, or leads to an address that
    /// is the server's no more.
    pub fn sweep(&self, limit: Duration) {
        let now = self.clock.instant();
        let lasted = |since: Instant| now.duration_since(since);
        self.idle.borrow_mut().retain_mut(|idle| {
            let lasted = idle.idle_since.map_or(Duration::ZERO, lasted);
            lasted < limit && self.is_known(&mut idle.bearing) && idle.is_ready()
        });
        self.shared.borrow_mut().retain(|shared| {
            if shared.address.is_some_and(|address| !self.dial.names.has(&address)) {
                shared.retire();
            }
            if shared.load() > 0 {
                shared.idle_since.set(now);
            }
            lasted(shared.idle_since.get()) < limit && shared.state() != State::Closed
        });
        let is_empty = self.idle.borrow().is_empty() && self.shared.borrow().is_empty();
        if !is_empty && self.dial.names.is_due() {
            self.dial.names.refresh();
        }
    }

    /// A connection that was not there before, or a place on one that has room, no later than `within`. It is seen
    /// whether a server of HTTP/2 that was silent for as long as `quiet` is still there. `alone`: one that no other
    /// request will ever use. `keeps`: one on which the server allows no stream in time is left for the next request that
    /// opens one.
    pub async fn connect(
        &self,
        within: Duration,
        quiet: Duration,
        alone: bool,
        keeps: bool,
    ) -> Result<UpstreamConnection, RequestError> {
        match timeout(within, self.open(within, quiet, alone, keeps)).await {
            Ok(Ok(carrier)) => Ok(carrier),
            Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => Err(RequestError::ConnectTimeout),
            Ok(Err(error)) => Err(RequestError::Connect(format!("{}: {error}", self.server.url))),
            Err(_elapsed) => Err(RequestError::ConnectTimeout),
        }
    }

    async fn open(
        &self,
        within: Duration,
        quiet: Duration,
        alone: bool,
        keeps: bool,
    ) -> io::Result<UpstreamConnection> {
        let mut shares = self.shares.get() && !alone;
        let start = self.clock.instant();
        let _turn = match shares {
            true => Some(self.opening.acquire().await.map_err(io::Error::other)?),
            false => None,
        };
        loop {
            if shares && let Some(carrier) = self.share(SHARED_MAX) {
                return Ok(carrier);
            }
            let pending = if shares { self.pending(within / 2) } else { None };
            let is_new = pending.is_none();
            let connection = match pending {
                Some(connection) => connection,
                // It would hardly be there in time, and the requests that wait here would each open one.
                None if self.clock.instant().duration_since(start) > within * 3 / 4 => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                None => match self.dial(quiet, alone).await? {
                    Dialed::Alone(connection) => return Ok(UpstreamConnection::Alone(connection)),
                    Dialed::Shared(connection) => connection,
                },
            };
            let add = || self.shared.borrow_mut().push(Rc::clone(&connection));
            if is_new && keeps {
                add();
            }
            connection.allows_streams().await?;
            if is_new && !keeps {
                add();
            }
            // Other requests may have been faster.
            if connection.state() == State::Free {
                return Ok(UpstreamConnection::Shared(Http2Stream::of(connection)));
            }
            shares = true;
        }
    }

    async fn dial(&self, quiet: Duration, alone: bool) -> io::Result<Dialed> {
        let era = self.dial.names.era();
        let dialed = self.dial.open(alone).await?;
        let bearing = ResolvedTarget { address: dialed.address, era };
        match dialed.spoken {
            Spoken::Http1 => {
                self.shares.set(self.dial.is_http2());
                let connection = Connection::new(dialed.wire, bearing).await.map_err(io::Error::other)?;
                Ok(Dialed::Alone(Box::new(connection)))
            }
            Spoken::Http2 => {
                self.shares.set(true);
                let scheme = if self.server.scheme == Scheme::Https { uri::Scheme::HTTPS } else { uri::Scheme::HTTP };
                let quiet = quiet.max(QUIET_MIN);
                let now = self.clock.instant();
                Http2Connection::new(dialed.wire, scheme, dialed.address, quiet, now).await.map(Dialed::Shared)
            }
        }
    }
}

/// A new connection.
enum Dialed {
    Alone(Box<Connection>),
    Shared(Rc<Http2Connection>),
}

/// The host of a server's URL, with the port if it names one.
fn authority(server: &Server) -> HeaderValue {
    let authority = server.url.split_once("://").map_or("localhost", |(_, authority)| authority);
    HeaderValue::from_str(authority).unwrap_or_else(|_| HeaderValue::from_static("localhost"))
}
