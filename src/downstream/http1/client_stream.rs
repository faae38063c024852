//! `ClientStream`: the stream of an HTTP/1.1 client, shared by its connection and the body of the current request.
//!
//! The body is read from the socket when it is polled: no channel is between the client and the upstream. The task that polls
//! it is that of the connection or, over HTTP/2, that of the upstream stream. A socket wakes only the task that asked last; so
//! the connection does not read while the body waits.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::http::error::RequestError;
use crate::http::http1_body::BodyDecoder;
use crate::http::http1_head::{HeadLimits, RequestHead, may_complete_head, parse_request_head};
use crate::http1_stream::{Http1Stream, Outgoing, READ_HEAD_BYTES};
use crate::io_stream::{CloseWatcher, IoStream};
use crate::upstream::request_body::{BodyError, BodySource};

/// The most bytes of a body that nothing takes, so that the next request on the connection can be served.
const DISCARD_MAX_BYTES: usize = 64 * 1024;

/// The stream of a client.
pub struct ClientStream {
    state: RefCell<StreamState>,
    /// Counts requests, so that the body of an earlier one reads nothing.
    request: Cell<u64>,
}

struct StreamState {
    stream: Http1Stream,
    /// Bytes of the next head that were not parsed yet.
    unparsed: usize,
    /// The rest of the body of the current request.
    body: BodyDecoder,
    expectation: Expectation,
    /// The task that waits for bytes of the body.
    body_waker: Option<Waker>,
    /// The task of the connection, if the current request has a body.
    connection_waker: Option<Waker>,
    is_read_closed: bool,
    unread: UnreadBytes,
}

/// `Expect: 100-continue` of the current request (RFC 9110, section 10.1.1).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expectation {
    /// Not given, or fulfilled.
    None,
    /// The client waits for 100 (Continue).
    Waiting,
    /// 100 (Continue) is to be sent, because the body is wanted.
    Wanted,
}

/// What is known of bytes that wait in the socket, while a response is made. The end of the stream cannot be read behind them.
enum UnreadBytes {
    None,
    /// Under TLS, these may be the close_notify alert that precedes the end of the connection; a watcher notices that end.
    Some(Option<CloseWatcher>),
}

/// Why there is no request head.
#[derive(Debug)]
pub enum HeadFailure {
    /// The client has closed the connection.
    Closed,
    Unusable(RequestError),
}

impl ClientStream {
    pub fn new(io: IoStream) -> Rc<ClientStream> {
        let state = StreamState {
            stream: Http1Stream::new(io),
            unparsed: 0,
            body: BodyDecoder::Ended,
            expectation: Expectation::None,
            body_waker: None,
            connection_waker: None,
            is_read_closed: false,
            unread: UnreadBytes::None,
        };
        Rc::new(ClientStream { state: RefCell::new(state), request: Cell::new(0) })
    }

    /// Polls the head of the next request.
    pub fn poll_head(&self, limits: HeadLimits, cx: &mut Context<'_>) -> Poll<Result<RequestHead, HeadFailure>> {
        let state = &mut *self.state.borrow_mut();
        loop {
            // A head that arrives byte by byte is not parsed each time.
            if state.unparsed > 0 && may_complete_head(&state.stream.received, state.unparsed, limits.bytes) {
                let parsed = parse_request_head(&mut state.stream.received, limits);
                state.unparsed = 0;
                if let Some(head) = parsed.map_err(HeadFailure::Unusable).transpose() {
                    return Poll::Ready(head);
                }
            }
            // The next read of a long head is as large as what was received of it.
            let capacity = state.stream.received.len().clamp(READ_HEAD_BYTES, limits.bytes.max(READ_HEAD_BYTES));
            match ready!(state.poll_receive(capacity, cx)) {
                Ok(0) | Err(_) => return Poll::Ready(Err(HeadFailure::Closed)),
                Ok(bytes) => state.unparsed += bytes,
            }
        }
    }

    /// Whether a head has begun, other than with empty lines, and is not complete.
    pub fn is_in_head(&self) -> bool {
        self.state.borrow().stream.received.iter().any(|byte| !matches!(byte, b'\r' | b'\n'))
    }

    /// Begins a request with this body.
    pub fn begin_request(self: &Rc<Self>, body: BodyDecoder, expects_continue: bool) -> BodySource {
        if body.has_ended() {
            return BodySource::Empty;
        }
        let mut state = self.state.borrow_mut();
        state.body = body;
        state.expectation = if expects_continue { Expectation::Waiting } else { Expectation::None };
        BodySource::Http1(Box::pin(RequestBody { stream: Rc::downgrade(self), request: self.request.get() }))
    }

    /// Called before the task of the connection polls a request.
    pub fn before_poll(&self, cx: &Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        if state.body.has_ended() {
            return;
        }
        // Set again if this poll polls the body.
        state.body_waker.take_if(|waker| waker.will_wake(cx.waker()));
        if !is_woken_by(state.connection_waker.as_ref(), cx) {
            state.connection_waker = Some(cx.waker().clone());
        }
    }

    /// Whether 100 (Continue) is to be sent. Returns true once.
    pub fn take_continue(&self) -> bool {
        let expectation = &mut self.state.borrow_mut().expectation;
        let is_wanted = *expectation == Expectation::Wanted;
        if is_wanted {
            *expectation = Expectation::None;
        }
        is_wanted
    }

    /// Whether the client waits for 100 (Continue), which is not sent any more: it may send the body or another request.
    pub fn is_expectation_open(&self) -> bool {
        let state = self.state.borrow();
        state.expectation != Expectation::None && state.stream.received.is_empty()
    }

    /// Ready when the client has closed the connection; else wakes the task then. `is_delayed`: the connection is polled now and
    /// then, so that a disconnected client does not count as a waiter.
    pub fn poll_closed(&self, is_delayed: bool, cx: &mut Context<'_>) -> Poll<()> {
        let state = &mut *self.state.borrow_mut();
        if state.body_waker.is_some() {
            return Poll::Pending;
        }
        loop {
            if let UnreadBytes::Some(watcher) = &state.unread {
                return match watcher {
                    Some(watcher) => watcher.poll_closed(&state.stream.io, cx),
                    None if is_delayed && state.stream.io.is_closed_by_peer() => Poll::Ready(()),
                    None => Poll::Pending,
                };
            }
            let Ok(true) = ready!(state.stream.io.poll_has_data(cx)) else {
                state.is_read_closed = true;
                return Poll::Ready(());
            };
            state.unread = UnreadBytes::Some(state.stream.io.close_watcher());
        }
    }

    /// Ends the current request, and returns whether another one can follow: the rest of its body is short, and was received or
    /// can be received without waiting.
    pub fn end_request(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        self.request.update(|request| request + 1);
        (state.body_waker, state.connection_waker) = (None, None);
        let mut discarded = 0;
        while !state.body.has_ended() && discarded <= DISCARD_MAX_BYTES {
            match state.poll_frame(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Some(Ok(frame))) => discarded += frame.data_ref().map_or(0, Bytes::len),
                Poll::Ready(None) => {}
                Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
            }
        }
        if state.stream.received.is_empty() {
            // Empty, but it may own a buffer.
            state.stream.received = Bytes::new();
        }
        state.unparsed = state.stream.received.len();
        state.body.has_ended()
    }

    pub fn outgoing(&self) -> RefMut<'_, Outgoing> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.stream.outgoing)
    }

    /// Sends all bytes that wait.
    pub fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state.borrow_mut().stream.poll_send(cx)
    }

    /// Sends an error response without waiting, if the client can read it. The socket of a connection without a response in
    /// progress has room for it.
    pub fn try_send(&self, response: &[u8]) {
        let state = &mut *self.state.borrow_mut();
        if !state.is_read_closed {
            state.stream.io.try_send(response);
        }
    }

    /// The stream, the bytes received behind the last request, and whether the client has closed its side.
    pub fn into_parts(self) -> (IoStream, Bytes, bool) {
        let state = self.state.into_inner();
        (state.stream.io, state.stream.received, state.is_read_closed)
    }
}

impl StreamState {
    fn poll_receive(&mut self, capacity: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let received = ready!(self.stream.poll_receive(capacity, cx));
        self.unread = UnreadBytes::None;
        self.is_read_closed |= matches!(received, Ok(0) | Err(_));
        Poll::Ready(received)
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            match self.body.decode(&mut self.stream.received) {
                Ok(None) if !self.body.has_ended() => {}
                Ok(frame) => {
                    if self.stream.received.is_empty() {
                        // Empty, but it may own a buffer.
                        self.stream.received = Bytes::new();
                    }
                    return Poll::Ready(frame.map(Ok));
                }
                Err(malformed) => return Poll::Ready(Some(Err(malformed.as_str().into()))),
            }
            match ready!(self.poll_receive(Http1Stream::capacity_for(self.body.expected_bytes()), cx)) {
                Ok(0) => return Poll::Ready(Some(Err("the client closed the connection".into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }
}

fn is_woken_by(waker: Option<&Waker>, cx: &Context<'_>) -> bool {
    waker.is_some_and(|waker| waker.will_wake(cx.waker()))
}

/// The body of a request.
struct RequestBody {
    stream: Weak<ClientStream>,
    /// The number of the request.
    request: u64,
}

impl RequestBody {
    /// The stream, while the request is in progress.
    fn stream(&self) -> Option<Rc<ClientStream>> {
        self.stream.upgrade().filter(|stream| stream.request.get() == self.request)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(stream) = self.stream() else { return Poll::Ready(Some(Err("the response has ended".into()))) };
        let state = &mut *stream.state.borrow_mut();
        let polled = state.poll_frame(cx);
        if polled.is_pending() {
            state.body_waker = Some(cx.waker().clone());
            if state.expectation == Expectation::Waiting {
                state.expectation = Expectation::Wanted;
                state.connection_waker.iter().for_each(Waker::wake_by_ref);
            }
        } else {
            (state.body_waker, state.expectation) = (None, Expectation::None);
            if !is_woken_by(state.connection_waker.as_ref(), cx) {
                // The connection watches the socket now.
                state.connection_waker.iter().for_each(Waker::wake_by_ref);
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.stream().is_none_or(|stream| stream.state.borrow().body.has_ended())
    }

    fn size_hint(&self) -> SizeHint {
        self.stream().map_or_else(SizeHint::default, |stream| stream.state.borrow().body.size_hint())
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(stream) = self.stream() else { return };
        let state = &mut *stream.state.borrow_mut();
        if state.body_waker.take().is_some() {
            // The connection watches the socket now.
            state.connection_waker.iter().for_each(Waker::wake_by_ref);
        }
    }
}
