//! One HTTP/2 connection to an upstream server, shared by the requests of an event loop.
//!
//! Other than over HTTP/1.1 nobody can drive it in passing, for it is everybody's: it is a task of its
//! own. A request is a stream of it, and gives that up by being dropped, which resets the stream and
//! nothing else.
//!
//! Windows are chosen so that all streams together can not use up that of the connection: a client that
//! reads slowly holds up nobody else.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::Reason;
use http::header::{self, HeaderMap};
use http::uri::{Authority, Scheme, Uri};
use http::{Method, Request, Response, Version};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::ext::Protocol;
use hyper::rt::Executor;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioIo, TokioTimer};

use super::http1::SendError;
use super::http2_settings::{Greeting, Listener};
use super::replay_body::ReplayBody;
use super::request_upload::Upload;
use super::server_pool::ConnectionPermit;
use crate::http::websocket_handshake::{self, Key};
use crate::io_stream::IoStream;

/// Requests at a time on one connection; servers may allow fewer.
const STREAMS_MAX: usize = 100;
/// What hyper takes for the server's limit before the server has said it.
const UNSAID: usize = usize::MAX - 1;
/// Of an answer's body, read ahead of the client.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX as u32;
/// The largest head of an answer that is accepted.
const HEAD_MAX_BYTES: u32 = 64 * 1024;
/// The longest wait for the answer to a PING.
const PING_PATIENCE: Duration = Duration::from_secs(20);

/// Runs hyper's tasks on the event loop they belong to.
#[derive(Clone, Copy, Debug)]
struct OnLoop;

impl<F: Future + 'static> Executor<F> for OnLoop {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

pub struct Http2Connection {
    sender: RefCell<SendRequest<Upload>>,
    driver: Rc<Driver>,
    /// Requests that have a stream, or wait for one.
    streams: Cell<usize>,
    /// A request was sent here.
    used: Cell<bool>,
    /// No request is sent here any more; those under way finish.
    retired: Cell<bool>,
    /// When it was made.
    pub opened: Instant,
    /// When it was last seen at work.
    pub idle_since: Cell<Instant>,
    pub address: Option<SocketAddr>,
    scheme: Scheme,
    /// Its room among the connections to its server, where these are limited.
    slot: RefCell<Option<ConnectionPermit>>,
}

impl Http2Connection {
    /// Makes a connection of a connected stream. No request can be sent before the server has said how many streams it
    /// allows: see [`Multiplex::allows_streams`]. It is seen whether the server still answers when it has been silent for
    /// as long as `quiet` while there are requests.
    pub async fn new(
        wire: IoStream,
        scheme: Scheme,
        address: Option<SocketAddr>,
        quiet: Duration,
        now: Instant,
    ) -> io::Result<Rc<Http2Connection>> {
        let listener = Rc::new(Listener::default());
        let (sender, connection) = Builder::new(OnLoop)
            .timer(TokioTimer::new())
            .initial_max_send_streams(UNSAID)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(HEAD_MAX_BYTES)
            .keep_alive_interval(quiet)
            .keep_alive_timeout(quiet.min(PING_PATIENCE))
            .handshake(TokioIo::new(Greeting::new(wire, Rc::clone(&listener))))
            .await
            .map_err(io::Error::other)?;
        let driver = Rc::new(Driver { connection: RefCell::new(Some(connection)), listener });
        tokio::task::spawn_local(Rc::clone(&driver).run());
        Ok(Rc::new(Http2Connection {
            sender: RefCell::new(sender),
            driver,
            streams: Cell::new(0),
            used: Cell::new(false),
            retired: Cell::new(false),
            opened: now,
            idle_since: Cell::new(now),
            address,
            scheme,
            slot: RefCell::default(),
        }))
    }

    /// Waits until the server allows a stream.
    pub async fn allows_streams(&self) -> io::Result<()> {
        loop {
            let heard = self.driver.listener.heard();
            if self.most() > 0 {
                return Ok(());
            }
            if let Some(failure) = self.driver.listener.failure() {
                return Err(io::Error::other(format!("HTTP/2: {failure}")));
            }
            heard.await;
        }
    }

    /// What can be sent here.
    pub fn state(&self) -> State {
        let most = self.most();
        if self.retired.get() || self.sender.borrow().is_closed() || most == 0 && self.used.get() {
            State::Closed
        } else if most == 0 {
            State::Pending
        } else if self.streams.get() >= most {
            State::Full
        } else {
            State::Free
        }
    }

    /// Streams that the server allows at a time: what it said last. 0 before it has said something.
    fn most(&self) -> usize {
        let connection = self.driver.connection.borrow();
        let most = connection.as_ref().map_or(UNSAID, |connection| connection.current_max_send_streams());
        if most == UNSAID { 0 } else { most.min(STREAMS_MAX) }
    }

    /// Requests that are under way.
    pub fn load(&self) -> usize {
        self.streams.get()
    }

    pub fn retire(&self) {
        self.retired.set(true);
    }
}

/// What can be sent on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// No further request. A server that had allowed streams, and then allows none, wants no more of them here.
    Closed,
    /// Nothing yet: the server has not allowed a stream.
    Pending,
    /// A request, which waits until another one has ended.
    Full,
    /// A request.
    Free,
}

/// What moves the requests of a connection.
struct Driver {
    /// `None` once it has ended.
    connection: RefCell<Option<hyper::client::conn::http2::Connection<TokioIo<Greeting>, Upload, OnLoop>>>,
    listener: Rc<Listener>,
}

impl Driver {
    /// Drives the connection to its end.
    async fn run(self: Rc<Driver>) {
        let ended = poll_fn(|cx| match &mut *self.connection.borrow_mut() {
            Some(connection) => Pin::new(connection).poll(cx),
            None => Poll::Ready(Ok(())),
        });
        let ended = ended.await;
        // Requests that wait for responses and bodies are woken by its end.
        drop(self.connection.take());
        self.listener.ended(|| match ended {
            Ok(()) => String::from("it closed the connection"),
            Err(error) => describe(&error),
        });
    }

    /// Whether the server takes tunnels on streams, by an extended CONNECT (RFC 8441).
    fn takes_tunnels(&self) -> bool {
        self.connection.borrow().as_ref().is_some_and(|connection| connection.is_extended_connect_protocol_enabled())
    }
}

fn describe(error: &hyper::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// A request's place on a connection, until its answer has ended.
pub struct Http2Stream {
    connection: Rc<Http2Connection>,
    /// The head of the request once more.
    spare: Option<Box<Request<Upload>>>,
    /// Its body, if it has one and no answer has come.
    loan: Option<ReplayBody>,
    /// When the answer's head came.
    answered: Option<Instant>,
    /// What the answer has made of the stream.
    tunnel: Option<OnUpgrade>,
}

impl Http2Stream {
    pub fn of(connection: Rc<Http2Connection>) -> Http2Stream {
        connection.streams.set(connection.streams.get() + 1);
        connection.used.set(true);
        Http2Stream { connection, spare: None, loan: None, answered: None, tunnel: None }
    }

    /// Sends a request and waits for the head of its answer. Informational answers before it are not told. A handshake for
    /// a WebSocket becomes an extended CONNECT, and its answer what it would be over HTTP/1.1; where the server has not
    /// offered that, an ordinary request.
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(&mut self, mut request: Box<Request<Upload>>) -> Result<Response<Incoming>, SendError> {
        self.spare = Some(Box::new(again(&request)));
        let body = std::mem::replace(request.body_mut(), Upload::Empty);
        (*request.body_mut(), self.loan) = body.lend();
        address(&mut request, &self.connection.scheme);
        if !matches!(request.body(), Upload::Upgrade) {
            let sending = self.connection.sender.borrow_mut().try_send_request(*request);
            return sending.await;
        }
        websocket_handshake::withdraw(request.headers_mut());
        let key = self.connection.driver.takes_tunnels().then(|| connect(&mut request));
        let sending = self.connection.sender.borrow_mut().try_send_request(*request);
        let mut answer = sending.await?;
        // What stands for 101, though any other success would open a tunnel as well, is what hyper makes one of.
        if let Some(key) = key
            && answer.extensions().get::<OnUpgrade>().is_some()
        {
            self.tunnel = Some(hyper::upgrade::on(&mut answer));
            websocket_handshake::grant_connection(&mut answer, key.as_ref());
        }
        Ok(answer)
    }

    /// The stream, after an answer that made it a tunnel.
    pub async fn into_stream(mut self) -> Option<(Upgraded, Http2Stream)> {
        let stream = self.tunnel.take()?.await.ok()?;
        Some((stream, self))
    }

    /// Gives the connection room, unless it has some.
    pub fn occupy(&self, slot: Option<ConnectionPermit>) {
        if let Some(slot) = slot {
            self.connection.slot.borrow_mut().get_or_insert(slot);
        }
    }

    /// The head of the answer has come: nobody will want the body back.
    pub fn answered(&mut self, now: Instant) {
        self.answered = Some(now);
        if let Some(loan) = self.loan.take() {
            loan.settle();
            self.spare = None;
        }
    }

    /// The request once more, if nothing of its body is lost.
    pub fn sent(&mut self) -> Option<Request<Upload>> {
        let mut request = *self.spare.take()?;
        if let Some(loan) = self.loan.take() {
            *request.body_mut() = loan.take_back()?;
        }
        Some(request)
    }
}

impl Drop for Http2Stream {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.streams.set(connection.streams.get().saturating_sub(1));
        if let Some(answered) = self.answered {
            connection.idle_since.set(answered.max(connection.idle_since.get()));
        }
    }
}

/// Makes a handshake of HTTP/1.1 an extended CONNECT; returns the key, which there is no use for there.
fn connect(request: &mut Request<Upload>) -> Option<Key> {
    *request.method_mut() = Method::CONNECT;
    request.extensions_mut().insert(Protocol::from_static("websocket"));
    // A request that comes back unsent is made one once more.
    let known = request.extensions_mut().remove::<Key>();
    let key = Key::taken_from(request.headers_mut()).or(known)?;
    request.extensions_mut().insert(key.clone());
    Some(key)
}

fn again(request: &Request<Upload>) -> Request<Upload> {
    let is_handshake = matches!(request.body(), Upload::Upgrade);
    let mut again = Request::new(if is_handshake { Upload::Upgrade } else { Upload::Empty });
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    again.headers_mut().clone_from(request.headers());
    again
}

/// Moves Host to where HTTP/2 has it: `:scheme` and `:authority` are parts of the target.
fn address(request: &mut Request<Upload>, scheme: &Scheme) {
    *request.version_mut() = Version::HTTP_2;
    if request.uri().authority().is_some() {
        return;
    }
    let host = request.headers_mut().remove(header::HOST);
    let authority = host.and_then(|host| Authority::from_maybe_shared(Bytes::copy_from_slice(host.as_bytes())).ok());
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(scheme.clone());
    // A Host with escapes can be none. Nobody is called so (RFC 6761), and least of all a server that is trusted.
    parts.authority = Some(authority.unwrap_or_else(|| Authority::from_static("invalid")));
    // All three parts are there, so together they are a target.
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
}

/// Takes a request that was addressed for HTTP/2 back to what HTTP/1.1 sends.
pub fn origin_form(request: &mut Request<Upload>) {
    let Some(authority) = request.uri().authority().cloned() else { return };
    *request.version_mut() = Version::HTTP_11;
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    (parts.scheme, parts.authority) = (None, None);
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    let headers: &mut HeaderMap = request.headers_mut();
    if let Ok(host) = authority.as_str().parse() {
        headers.insert(header::HOST, host);
    }
}

/// Whether the server says that it has not looked at the request (RFC 9113, section 8.7).
pub fn is_unprocessed(error: &hyper::Error) -> bool {
    cause(error).is_some_and(|cause| {
        let reason = cause.reason();
        cause.is_remote()
            && (cause.is_reset() && reason == Some(Reason::REFUSED_STREAM)
                || cause.is_go_away() && reason == Some(Reason::NO_ERROR))
    })
}

/// Whether the connection was cut.
pub fn is_cut(error: &hyper::Error) -> bool {
    cause(error).is_some_and(h2::Error::is_io)
}

fn cause(error: &hyper::Error) -> Option<&h2::Error> {
    use std::error::Error;
    error.source().and_then(|source| source.downcast_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_becomes_authority_and_back() {
        let mut request = Request::get("/a?b").header("host", "api.internal:8443").body(Upload::Empty).unwrap();
        address(&mut request, &Scheme::HTTPS);
        assert_eq!(request.uri(), "https://api.internal:8443/a?b");
        assert!(!request.headers().contains_key("host"));
        origin_form(&mut request);
        assert_eq!(request.uri(), "/a?b");
        assert_eq!(request.headers()["host"], "api.internal:8443");
    }
}
