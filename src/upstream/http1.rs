//! An HTTP/1.1 connection to an upstream server.
//!
//! The task that waits for the response, or for the next frame of its body, does the I/O: no other task and no channel is
//! between a request and its connection. An idle connection has no buffers.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::{Body, Frame};
use tokio::task::unconstrained;

use super::connect::ResolvedTarget;
use super::request_body::{BodyError, RequestBody};
use super::request_limit::ConnectionPermit;
use crate::http1_stream::{Http1Stream, READ_HEAD_BYTES, WrongLength};
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;
use transom_http::http1_body::{BodyDecoder, MalformedMessage};
use transom_http::http1_head::{self, Framing, RESPONSE_HEAD_MAX_BYTES, ResponseHead};
use transom_runtime::metrics::upstream::CountedConnection;

/// A connection with one request at a time.
pub struct Http1Connection {
    stream: Http1Stream,
    /// The last request, while it is sent. Its body is taken from here. A request to switch protocols stays until the response
    /// has begun.
    request: Option<Box<Request<RequestBody>>>,
    /// The head of the last request, until the response has begun, if it is all that is needed to send the request again. Kept
    /// instead of the request, which takes several times the memory.
    sent_head: Bytes,
    /// The method of the last request is HEAD.
    is_head: bool,
    send_state: SendState,
    framing: Framing,
    /// The body of the response.
    body: BodyDecoder,
    /// No other request follows: an exchange is not finished or has failed, or the server closes the connection.
    is_closing: bool,
    /// Receives 1xx responses.
    informational: Option<Rc<InformationalQueue>>,
    has_forwarded_informational: bool,
    /// The server's address.
    pub target: ResolvedTarget,
    /// When the last response arrived, if that ended the exchange too: saves a clock read when the connection becomes
    /// idle.
    pub idle_since: Option<Instant>,
    /// Its permit among the connections to the server, where these are limited.
    pub permit: Option<ConnectionPermit>,
    pub counted: CountedConnection,
}

/// How far the last request was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SendState {
    /// None of it, because the connection was not usable.
    Unsent,
    /// Frames of the body remain.
    Body,
    /// All of it is in `outgoing`.
    Flush,
    Sent,
    /// The server takes no more of it: it has closed the connection. The end of the stream was received before.
    Refused,
    /// The connection has failed. The failed write has consumed the error of the socket, so the next read returns the end of the
    /// stream even if the server has not closed the connection.
    Failed,
}

/// Why an exchange failed.
#[derive(Debug)]
pub enum Http1Error {
    /// The server had closed the connection, or had sent bytes without a request. Nothing was sent.
    Unusable,
    /// The server closed the connection before the head of the response was complete.
    Closed,
    /// The server closed the connection within the body of the response.
    Truncated,
    Io(io::Error),
    Malformed(MalformedMessage),
    /// The body of the request failed.
    RequestBody(BodyError),
}

impl Http1Connection {
    /// Starts HTTP/1.1 on a connected stream.
    pub fn new(stream: IoStream, target: ResolvedTarget, counted: CountedConnection) -> Http1Connection {
        Http1Connection {
            stream: Http1Stream::new(stream),
            request: None,
            sent_head: Bytes::new(),
            is_head: false,
            send_state: SendState::Sent,
            framing: Framing::NoBody,
            body: BodyDecoder::Ended,
            is_closing: false,
            informational: None,
            has_forwarded_informational: false,
            target,
            idle_since: None,
            permit: None,
            counted,
        }
    }

    /// Whether the last exchange ended in such a way that another request can follow.
    pub fn is_reusable(&self) -> bool {
        self.send_state == SendState::Sent && !self.is_closing && self.stream.received.is_empty()
    }

    /// Whether a request can be sent now. Notices when the server has closed the connection, or has sent bytes without a
    /// request.
    pub fn is_ready(&mut self) -> bool {
        if self.is_reusable() {
            // Without tokio's budget of a task, which would run out while a pool of closed connections is searched.
            let receiving = unconstrained(poll_fn(|cx| self.stream.poll_receive(READ_HEAD_BYTES, cx)));
            self.is_closing = pin!(receiving).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        }
        self.is_reusable()
    }

    /// Called when the last response has ended. `now` is called if the response did not arrive whole.
    pub fn become_idle(&mut self, now: impl FnOnce() -> Instant) {
        (self.request, self.sent_head) = (None, Bytes::new());
        self.informational = None;
        self.stream.shrink();
        self.idle_since.get_or_insert_with(now);
        self.counted.set_idle(true);
    }

    /// Sends a request and waits for the head of the response. 1xx responses before it go to `informational`. Fails with
    /// [`Http1Error::Unusable`] before anything is sent if [`Http1Connection::is_ready`] is false.
    pub async fn send(
        &mut self,
        request: Box<Request<RequestBody>>,
        informational: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<()>, Http1Error> {
        let is_ready = self.is_ready();
        self.framing = Framing::of_request(request.body());
        self.send_state = match self.framing {
            _ if !is_ready => SendState::Unsent,
            Framing::NoBody | Framing::Length(0) => SendState::Flush,
            Framing::Length(_) | Framing::Chunked | Framing::UntilClose => SendState::Body,
        };
        self.is_closing = true;
        let request = self.request.insert(request);
        if !is_ready {
            return Err(Http1Error::Unusable);
        }
        (self.informational, self.has_forwarded_informational) = (informational, false);
        let head = self.stream.outgoing.end_mut();
        debug_assert!(head.is_empty(), "the request before was sent");
        http1_head::write_request_head(request, self.framing, head);
        self.sent_head = match request.body() {
            RequestBody::Empty => Bytes::copy_from_slice(head),
            RequestBody::Upgrade | RequestBody::Client(_) | RequestBody::Replayable(_) => Bytes::new(),
        };
        self.is_head = request.method() == Method::HEAD;
        poll_fn(|cx| self.poll_response(cx)).await
    }

    /// The last request, if none of it was sent.
    pub fn take_unsent(&mut self) -> Option<Box<Request<RequestBody>>> {
        if self.send_state == SendState::Unsent { self.request.take() } else { None }
    }

    /// The last request, to be sent again, if it had no body and nothing of a response was passed on.
    pub fn take_replay(&mut self) -> Option<Box<Request<RequestBody>>> {
        if self.framing != Framing::NoBody || self.has_forwarded_informational {
            return None;
        }
        self.request.take().or_else(|| {
            let head = http1_head::parse_sent_request_head(std::mem::take(&mut self.sent_head))?;
            Some(Box::new(head.map(|()| RequestBody::Empty)))
        })
    }

    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<()>, Http1Error>> {
        self.send_available(cx).map_err(Http1Error::RequestBody)?;
        loop {
            match ready!(self.stream.poll_receive(READ_HEAD_BYTES, cx)) {
                Ok(0) => return Poll::Ready(Err(Http1Error::Closed)),
                // A head that arrives byte by byte is not parsed each time.
                Ok(bytes) if !http1_head::may_complete_head(&self.stream.received, bytes, RESPONSE_HEAD_MAX_BYTES) => {
                    continue;
                }
                Ok(_) => {}
                Err(error) if is_end_of_connection(&error) => return Poll::Ready(Err(Http1Error::Closed)),
                Err(error) => return Poll::Ready(Err(Http1Error::Io(error))),
            }
            if let Some(head) = self.take_head().map_err(Http1Error::Malformed)? {
                (self.body, self.is_closing) = (head.body, !head.keeps_alive);
                return Poll::Ready(Ok(head.response));
            }
        }
    }

    /// Takes the head of the response; forwards the 1xx responses before it. `None`: the head is incomplete.
    fn take_head(&mut self) -> Result<Option<ResponseHead>, MalformedMessage> {
        while !self.stream.received.is_empty() {
            let Some(head) = http1_head::parse_response_head(&mut self.stream.received, self.is_head)? else {
                return Ok(None);
            };
            if !head.is_interim() {
                return Ok(Some(head));
            }
            let status = head.response.status();
            if let Some(informational) = &self.informational {
                let reason = http1_head::reason_phrase(&head.response);
                let fields = head.response.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
                self.has_forwarded_informational |= informational.push(status.as_u16(), reason, fields);
            }
        }
        Ok(None)
    }

    /// Polls the next frame of the response body.
    pub fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Http1Error>>> {
        let polled = self.poll_frame(cx);
        if let Poll::Ready(Err(_)) = polled {
            self.is_closing = true;
        }
        polled.map(Result::transpose)
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, Http1Error>> {
        self.send_available(cx).map_err(Http1Error::RequestBody)?;
        if self.send_state == SendState::Sent {
            // A long response keeps nothing of its request.
            (self.request, self.sent_head) = (None, Bytes::new());
        }
        loop {
            let frame = self.body.decode(&mut self.stream.received).map_err(Http1Error::Malformed)?;
            if frame.is_some() || self.body.has_ended() {
                return Poll::Ready(Ok(frame));
            }
            self.idle_since = None;
            let capacity = Http1Stream::capacity_for(self.body.expected_bytes());
            match ready!(self.stream.poll_receive(capacity, cx)) {
                Ok(0) if self.body == BodyDecoder::UntilClose && self.send_state != SendState::Failed => {
                    self.body = BodyDecoder::Ended;
                    return Poll::Ready(Ok(None));
                }
                Ok(0) => return Poll::Ready(Err(Http1Error::Truncated)),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(Http1Error::Io(error))),
            }
        }
    }

    /// The body of the response, as far as it was not taken.
    pub fn body(&self) -> &BodyDecoder {
        &self.body
    }

    /// Sends what is available of the request, and what the server takes of it without waiting.
    fn send_available(&mut self, cx: &mut Context<'_>) -> Result<(), BodyError> {
        while matches!(self.send_state, SendState::Body | SendState::Flush) {
            self.take_frames(cx)?;
            let is_waiting = self.stream.outgoing.is_empty() && self.send_state == SendState::Body;
            match self.stream.poll_send(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(())) if is_waiting => return Ok(()),
                Poll::Ready(Ok(())) if self.send_state == SendState::Flush => {
                    self.send_state = SendState::Sent;
                    // `sent_head` is not enough to send a request to switch protocols again.
                    drop(self.request.take_if(|request| !matches!(request.body(), RequestBody::Upgrade)));
                }
                Poll::Ready(Ok(())) => {}
                // The response may have been sent before; its end, or that of the connection, follows. The kernel reports EPIPE
                // if the end of the stream has arrived before the reset, and ECONNRESET otherwise.
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                    self.send_state = SendState::Refused;
                }
                Poll::Ready(Err(_)) => self.send_state = SendState::Failed,
            }
        }
        Ok(())
    }

    /// Takes frames of the request body until `outgoing` is full or the client has sent no more.
    fn take_frames(&mut self, cx: &mut Context<'_>) -> Result<(), BodyError> {
        let Some(request) = &mut self.request else { return Ok(()) };
        while self.send_state == SendState::Body && self.stream.outgoing.has_room() {
            let Poll::Ready(frame) = Pin::new(request.body_mut()).poll_frame(cx) else { return Ok(()) };
            let (frame, is_end_stream) = (frame.transpose()?, request.body().is_end_stream());
            let outgoing = &mut self.stream.outgoing;
            let is_last = outgoing.push_frame(frame, is_end_stream, &mut self.framing, Some(request.headers()));
            if is_last.map_err(|WrongLength| "the body does not have its Content-Length")? {
                self.send_state = SendState::Flush;
            }
        }
        Ok(())
    }

    /// The byte stream, and the bytes received after the head of the last response, if that switched protocols; the
    /// connection counts for as long as the third part is held.
    pub fn into_stream(self) -> (IoStream, Bytes, CountedConnection) {
        (self.stream.io, self.stream.received, self.counted)
    }
}

/// Whether a read has failed because the server has closed the connection, if no response has begun. A TLS connection may end
/// without the alert that announces its end.
fn is_end_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

impl fmt::Display for Http1Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Http1Error::Unusable => f.write_str("it closed the connection, or sent bytes before a request"),
            Http1Error::Closed => f.write_str("it closed the connection before the head of its response was complete"),
            Http1Error::Truncated => f.write_str("it closed the connection before the end of its response"),
            Http1Error::Io(error) => error.fmt(f),
            Http1Error::Malformed(malformed) => write!(f, "malformed response: {}", malformed.as_str()),
            Http1Error::RequestBody(error) => write!(f, "the request body failed: {error}"),
        }
    }
}

impl std::error::Error for Http1Error {}
