//! One HTTP/2 connection to an upstream server, shared by the requests of one worker.
//!
//! Unlike an HTTP/1.1 connection, it serves several tasks, so its driver is a task of its own. A request is a stream;
//! dropping the request resets this stream and nothing else. The flow-control windows of all streams together fit that
//! of the connection, so that a client that reads slowly does not stall the others.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::Reason;
use http::header::{self, HeaderMap};
use http::uri::{Authority, Scheme, Uri};
use http::{Method, Request, Response, Version};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::ext::Protocol;
use hyper::rt::Executor;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::request_body::{ReplayBody, RequestBody};
use super::request_limit::ConnectionPermit;
use crate::io_stream::IoStream;
use transom_http::websocket_handshake::{self, HandshakeKey};
use transom_runtime::metrics::upstream::CountedConnection;

/// Concurrent streams of one connection; servers may allow fewer.
const STREAMS_MAX: usize = 100;
/// hyper's value for the server's limit until SETTINGS arrive.
const STREAM_LIMIT_UNKNOWN: usize = usize::MAX - 1;
/// Of a response body, read ahead of the client.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX as u32;
/// The largest response head that is accepted.
const HEAD_MAX_BYTES: u32 = 64 * 1024;
/// The longest wait for the response to a PING.
const PING_TIMEOUT_MAX: Duration = Duration::from_secs(20);

/// Runs hyper's tasks on the worker they belong to.
#[derive(Clone, Copy, Debug)]
struct LocalExecutor;

impl<F: Future + 'static> Executor<F> for LocalExecutor {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

pub struct Http2Connection {
    sender: RefCell<SendRequest<RequestBody>>,
    driver: Rc<Driver>,
    /// Requests that have a stream, or wait for one.
    active_streams: Cell<usize>,
    /// A request was sent here.
    has_been_used: Cell<bool>,
    /// No new request is sent here; requests in flight finish.
    is_retired: Cell<bool>,
    /// When the connection was opened.
    pub opened_at: Instant,
    /// When a request was last in flight.
    pub idle_since: Cell<Instant>,
    pub address: Option<SocketAddr>,
    scheme: Scheme,
    /// Its permit among the connections to the server, where these are limited.
    permit: RefCell<Option<ConnectionPermit>>,
    /// Idle while no request has a stream.
    counted: CountedConnection,
}

impl Http2Connection {
    /// Starts HTTP/2 on a connected stream. No request can be sent before the server's SETTINGS arrive: see
    /// [`Http2Connection::wait_for_stream_limit`]. After `ping_after` without input while requests are in flight, a PING
    /// checks the server.
    pub async fn new(
        stream: IoStream,
        scheme: Scheme,
        address: Option<SocketAddr>,
        ping_after: Duration,
        now: Instant,
        counted: CountedConnection,
    ) -> io::Result<Rc<Http2Connection>> {
        counted.set_idle(true);
        let read_events = Rc::new(ReadEvents::default());
        let (sender, connection) = Builder::new(LocalExecutor)
            .timer(TokioTimer::new())
            .initial_max_send_streams(STREAM_LIMIT_UNKNOWN)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(HEAD_MAX_BYTES)
            .keep_alive_interval(ping_after)
            .keep_alive_timeout(ping_after.min(PING_TIMEOUT_MAX))
            .handshake(TokioIo::new(NotifyingIo::new(stream, Rc::clone(&read_events))))
            .await
            .map_err(io::Error::other)?;
        let driver = Rc::new(Driver { connection: RefCell::new(Some(connection)), read_events });
        tokio::task::spawn_local(Rc::clone(&driver).run());
        Ok(Rc::new(Http2Connection {
            sender: RefCell::new(sender),
            driver,
            active_streams: Cell::new(0),
            has_been_used: Cell::new(false),
            is_retired: Cell::new(false),
            opened_at: now,
            idle_since: Cell::new(now),
            address,
            scheme,
            permit: RefCell::default(),
            counted,
        }))
    }

    /// Waits until the server allows a stream.
    pub async fn wait_for_stream_limit(&self) -> io::Result<()> {
        loop {
            let next_read = self.driver.read_events.next_read();
            if self.max_streams() > 0 {
                return Ok(());
            }
            if let Some(failure) = self.driver.read_events.failure() {
                return Err(io::Error::other(format!("HTTP/2: {failure}")));
            }
            next_read.await;
        }
    }

    /// Whether the connection takes a request.
    pub fn state(&self) -> StreamCapacity {
        let max = self.max_streams();
        if self.is_retired.get() || self.sender.borrow().is_closed() || max == 0 && self.has_been_used.get() {
            StreamCapacity::Closed
        } else if max == 0 {
            StreamCapacity::Pending
        } else if self.active_streams.get() >= max {
            StreamCapacity::Full
        } else {
            StreamCapacity::Free
        }
    }

    /// Streams that the server allows at a time, by its last SETTINGS. 0 before the first.
    fn max_streams(&self) -> usize {
        let connection = self.driver.connection.borrow();
        let max = connection.as_ref().map_or(STREAM_LIMIT_UNKNOWN, |connection| connection.current_max_send_streams());
        if max == STREAM_LIMIT_UNKNOWN { 0 } else { max.min(STREAMS_MAX) }
    }

    /// Requests in flight.
    pub fn active_streams(&self) -> usize {
        self.active_streams.get()
    }

    pub fn retire(&self) {
        self.is_retired.set(true);
    }
}

/// Whether a connection takes a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamCapacity {
    /// It takes no more requests. Also if the server had allowed streams, and then lowers their number to 0.
    Closed,
    /// Not yet: the server's SETTINGS have not arrived.
    Pending,
    /// A request would wait until another one has ended.
    Full,
    /// A request can be sent.
    Free,
}

/// hyper's driver, and the reads it has done.
struct Driver {
    /// `None` once the connection has ended.
    connection:
        RefCell<Option<hyper::client::conn::http2::Connection<TokioIo<NotifyingIo>, RequestBody, LocalExecutor>>>,
    read_events: Rc<ReadEvents>,
}

impl Driver {
    /// Drives the connection to its end.
    async fn run(self: Rc<Driver>) {
        let ended = poll_fn(|cx| match &mut *self.connection.borrow_mut() {
            Some(connection) => Pin::new(connection).poll(cx),
            None => Poll::Ready(Ok(())),
        });
        let ended = ended.await;
        // The drop wakes requests that wait for responses or bodies.
        drop(self.connection.take());
        self.read_events.on_end(|| match ended {
            Ok(()) => String::from("it closed the connection"),
            Err(error) => describe(&error),
        });
    }

    /// Whether the server allows extended CONNECT (RFC 8441).
    fn supports_extended_connect(&self) -> bool {
        self.connection.borrow().as_ref().is_some_and(|connection| connection.is_extended_connect_protocol_enabled())
    }
}

/// An error of hyper, with its cause.
pub fn describe(error: &hyper::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// A request's stream, counted until the response has ended.
pub struct Http2Stream {
    connection: Rc<Http2Connection>,
    /// The request, if none of it was sent.
    unsent: Option<Box<Request<RequestBody>>>,
    /// A copy of the request head, for a retry.
    saved_head: Option<Box<Request<RequestBody>>>,
    /// The request body, if there is one and no response head has arrived.
    replay_body: Option<ReplayBody>,
    /// When the response head arrived.
    responded_at: Option<Instant>,
    /// The body of the response.
    body: Option<Incoming>,
    /// The tunnel, after a response to an extended CONNECT.
    upgrade: Option<OnUpgrade>,
}

impl Http2Stream {
    /// The address of the server; `None` for a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        self.connection.address
    }

    pub fn open(connection: Rc<Http2Connection>) -> Http2Stream {
        connection.active_streams.set(connection.active_streams.get() + 1);
        connection.has_been_used.set(true);
        connection.counted.set_idle(false);
        Http2Stream {
            connection,
            unsent: None,
            saved_head: None,
            replay_body: None,
            responded_at: None,
            body: None,
            upgrade: None,
        }
    }

    /// Sends a request and waits for the head of the response. 1xx responses before it are not forwarded. A WebSocket
    /// handshake becomes an extended CONNECT, and its response is turned into that of HTTP/1.1. If the server has not
    /// enabled extended CONNECT, the handshake becomes an ordinary request.
    pub async fn send(&mut self, mut request: Box<Request<RequestBody>>) -> hyper::Result<Response<()>> {
        self.saved_head = Some(Box::new(copy_head(&request)));
        let body = std::mem::replace(request.body_mut(), RequestBody::Empty);
        (*request.body_mut(), self.replay_body) = body.into_replayable();
        to_http2_form(&mut request, &self.connection.scheme);
        let mut key = None;
        if matches!(request.body(), RequestBody::Upgrade) {
            websocket_handshake::remove_upgrade_fields(request.headers_mut());
            key = self.connection.driver.supports_extended_connect().then(|| to_extended_connect(&mut request));
        }
        let sending = self.connection.sender.borrow_mut().try_send_request(*request);
        let mut response = sending.await.map_err(|mut error| {
            self.unsent = error.take_message().map(Box::new);
            error.into_error()
        })?;
        // The response that hyper upgrades is the equivalent of 101, although any 2xx would open a tunnel too.
        if let Some(key) = key
            && response.extensions().get::<OnUpgrade>().is_some()
        {
            self.upgrade = Some(hyper::upgrade::on(&mut response));
            websocket_handshake::to_switching_protocols(&mut response, key.as_ref());
        }
        Ok(response.map(|body| self.body = Some(body)))
    }

    /// The last request, if none of it was sent.
    pub fn take_unsent(&mut self) -> Option<Box<Request<RequestBody>>> {
        self.unsent.take()
    }

    /// Polls the next frame of the response body.
    pub fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        self.body.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }

    /// The body of the response, as far as it was not taken.
    pub fn body(&self) -> Option<&Incoming> {
        self.body.as_ref()
    }

    /// The byte stream, after a response that opened a tunnel.
    pub async fn into_stream(mut self) -> Option<(Upgraded, Http2Stream)> {
        let stream = self.upgrade.take()?.await.ok()?;
        Some((stream, self))
    }

    /// Gives the connection its permit, unless it has one.
    pub fn set_permit(&self, permit: Option<ConnectionPermit>) {
        if let Some(permit) = permit {
            self.connection.permit.borrow_mut().get_or_insert(permit);
        }
    }

    /// Called when the head of the response has arrived: the body will not be sent again.
    pub fn on_response_head(&mut self, now: Instant) {
        self.responded_at = Some(now);
        if let Some(replay_body) = self.replay_body.take() {
            replay_body.stop_recording();
            self.saved_head = None;
        }
    }

    /// The request, to be sent again, if its body can be replayed.
    pub fn take_replay(&mut self) -> Option<Box<Request<RequestBody>>> {
        let mut request = self.saved_head.take()?;
        if let Some(replay_body) = self.replay_body.take() {
            *request.body_mut() = replay_body.rewind()?;
        }
        Some(request)
    }
}

impl Drop for Http2Stream {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.active_streams.set(connection.active_streams.get().saturating_sub(1));
        connection.counted.set_idle(connection.active_streams.get() == 0);
        if let Some(responded_at) = self.responded_at {
            connection.idle_since.set(responded_at.max(connection.idle_since.get()));
        }
    }
}

/// Turns an HTTP/1.1 WebSocket handshake into an extended CONNECT. Returns the key, which HTTP/2 does not send.
fn to_extended_connect(request: &mut Request<RequestBody>) -> Option<HandshakeKey> {
    *request.method_mut() = Method::CONNECT;
    request.extensions_mut().insert(Protocol::from_static("websocket"));
    // For a request that is sent a second time.
    let earlier = request.extensions_mut().remove::<HandshakeKey>();
    let key = HandshakeKey::take_from(request.headers_mut()).or(earlier)?;
    request.extensions_mut().insert(key.clone());
    Some(key)
}

fn copy_head(request: &Request<RequestBody>) -> Request<RequestBody> {
    let is_handshake = matches!(request.body(), RequestBody::Upgrade);
    let mut copy = Request::new(if is_handshake { RequestBody::Upgrade } else { RequestBody::Empty });
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    copy.headers_mut().clone_from(request.headers());
    copy
}

/// Moves Host to `:scheme` and `:authority`, which are parts of the target.
fn to_http2_form(request: &mut Request<RequestBody>, scheme: &Scheme) {
    *request.version_mut() = Version::HTTP_2;
    if request.uri().authority().is_some() {
        return;
    }
    let host = request.headers_mut().remove(header::HOST);
    let authority = host.and_then(|host| Authority::from_maybe_shared(Bytes::copy_from_slice(host.as_bytes())).ok());
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(scheme.clone());
    // A Host with escapes is no authority. `.invalid` names no server (RFC 6761).
    parts.authority = Some(authority.unwrap_or_else(|| Authority::from_static("invalid")));
    // All three parts are present, so together they form a URI.
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
}

/// Turns a request in HTTP/2 form back into HTTP/1.1 form.
pub fn to_http1_form(request: &mut Request<RequestBody>) {
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

/// Whether the server states that it has not processed the request (RFC 9113, section 8.7).
pub fn is_unprocessed(error: &hyper::Error) -> bool {
    h2_error(error).is_some_and(|cause| {
        let reason = cause.reason();
        cause.is_remote()
            && (cause.is_reset() && reason == Some(Reason::REFUSED_STREAM)
                || cause.is_go_away() && reason == Some(Reason::NO_ERROR))
    })
}

/// Whether the connection was lost.
pub fn is_connection_lost(error: &hyper::Error) -> bool {
    error.is_incomplete_message()
        || error.is_canceled()
        || error.is_closed()
        || h2_error(error).is_some_and(h2::Error::is_io)
}

fn h2_error(error: &hyper::Error) -> Option<&h2::Error> {
    use std::error::Error;
    error.source().and_then(|source| source.downcast_ref())
}

/// Notifies tasks that wait for SETTINGS. hyper knows the server's stream limit once it has read SETTINGS, and offers
/// no event for it, so waiting tasks check the limit again after every read.
#[derive(Debug, Default)]
struct ReadEvents {
    notify: Notify,
    /// Why the connection ended; hyper only reports that it did.
    failure: RefCell<Option<String>>,
}

impl ReadEvents {
    /// Ready when something was read since this call, or when the connection has ended.
    fn next_read(&self) -> Notified<'_> {
        self.notify.notified()
    }

    fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// The connection has ended.
    fn on_end(&self, why: impl FnOnce() -> String) {
        self.failure.borrow_mut().get_or_insert_with(why);
        self.notify.notify_waiters();
    }

    fn on_read(&self, read: &io::Result<()>) {
        // Waiting tasks run after hyper has processed what was read: a worker runs one task at a time.
        self.notify.notify_waiters();
        if let Err(error) = read {
            self.failure.replace(Some(error.to_string()));
        }
    }
}

struct NotifyingIo {
    stream: IoStream,
    events: Rc<ReadEvents>,
}

impl NotifyingIo {
    fn new(stream: IoStream, read_events: Rc<ReadEvents>) -> NotifyingIo {
        NotifyingIo { stream, events: read_events }
    }
}

impl AsyncRead for NotifyingIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.events.on_read(&read);
        Poll::Ready(read)
    }
}

impl AsyncWrite for NotifyingIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_becomes_authority_and_back() {
        let mut request = Request::get("/a?b").header("host", "api.internal:8443").body(RequestBody::Empty).unwrap();
        to_http2_form(&mut request, &Scheme::HTTPS);
        assert_eq!(request.uri(), "https://api.internal:8443/a?b");
        assert!(!request.headers().contains_key("host"));
        to_http1_form(&mut request);
        assert_eq!(request.uri(), "/a?b");
        assert_eq!(request.headers()["host"], "api.internal:8443");
    }
}
