//! An HTTP/1.1 connection to an upstream server.
//!
//! The task that waits for the response, or for the next frame of its body, does the I/O: no other task and no channel is
//! between a request and its connection. An idle connection has no buffers.

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Request, Response};
use http_body::{Body, Frame};
use hyper::ext::ReasonPhrase;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::task::unconstrained;

use super::connect::ResolvedTarget;
use super::http1_codec::{self, BodyDecoder, MalformedResponse, RequestFraming, ResponseHead};
use super::request_body::{BodyError, RequestBody};
use super::request_limit::ConnectionPermit;
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;
use crate::metrics::upstream::CountedConnection;

/// Size of the buffer for a read of a head.
const READ_HEAD_BYTES: usize = 4 * 1024;
/// Size of the buffer for a read of a body of unknown length.
const READ_UNKNOWN_BYTES: usize = 32 * 1024;
/// The largest buffer for a read. A body takes half of the CPU time that it takes with 64 KiB; more would be held for each client
/// that reads slowly.
const READ_MAX_BYTES: usize = 128 * 1024;
/// A large buffer that is filled to less than one part in this many is replaced by one of the right size.
const SPARSE_DIVISOR: usize = 4;
/// Frames of a request body of up to this size are copied behind other bytes that wait to be sent.
const COPIED_FRAME_MAX_BYTES: usize = 4 * 1024;
/// No more frames are taken while so many bytes wait to be sent.
const OUTGOING_MAX_BYTES: usize = 16 * 1024;

/// A connection with one request at a time.
pub struct Http1Connection {
    stream: IoStream,
    /// Received bytes that no response has taken.
    received: Bytes,
    /// The last request, while it is sent, or may be sent again. Its body is taken from here.
    request: Option<Box<Request<RequestBody>>>,
    send_state: SendState,
    framing: RequestFraming,
    outgoing: Outgoing,
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
    /// The server takes no more of it.
    Refused,
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
    Malformed(MalformedResponse),
    /// The body of the request failed.
    RequestBody(BodyError),
}

impl Http1Connection {
    /// Starts HTTP/1.1 on a connected stream.
    pub fn new(stream: IoStream, target: ResolvedTarget, counted: CountedConnection) -> Http1Connection {
        Http1Connection {
            stream,
            received: Bytes::new(),
            request: None,
            send_state: SendState::Sent,
            framing: RequestFraming::NoBody,
            outgoing: Outgoing::default(),
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
        self.send_state == SendState::Sent && !self.is_closing && self.received.is_empty()
    }

    /// Whether a request can be sent now. Notices when the server has closed the connection, or has sent bytes without a
    /// request.
    pub fn is_ready(&mut self) -> bool {
        if self.is_reusable() {
            // Without tokio's budget of a task, which would run out while a pool of closed connections is searched.
            let receiving = unconstrained(poll_fn(|cx| self.poll_receive(READ_HEAD_BYTES, cx)));
            self.is_closing = pin!(receiving).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        }
        self.is_reusable()
    }

    /// Called when the last response has ended. `now` is called if the response did not arrive whole.
    pub fn become_idle(&mut self, now: impl FnOnce() -> Instant) {
        self.request = None;
        self.informational = None;
        // Empty, but it may own a buffer.
        self.received = Bytes::new();
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
        self.framing = RequestFraming::of(request.body());
        self.send_state = match self.framing {
            _ if !is_ready => SendState::Unsent,
            RequestFraming::NoBody | RequestFraming::Length(0) => SendState::Flush,
            RequestFraming::Length(_) | RequestFraming::Chunked => SendState::Body,
        };
        self.is_closing = true;
        let request = self.request.insert(request);
        if !is_ready {
            return Err(Http1Error::Unusable);
        }
        (self.informational, self.has_forwarded_informational) = (informational, false);
        http1_codec::write_request_head(request, self.framing, &mut self.outgoing.front);
        poll_fn(|cx| self.poll_response(cx)).await
    }

    /// The last request, if none of it was sent.
    pub fn take_unsent(&mut self) -> Option<Box<Request<RequestBody>>> {
        if self.send_state == SendState::Unsent { self.request.take() } else { None }
    }

    /// The last request, to be sent again, if it had no body and nothing of a response was passed on.
    pub fn take_replay(&mut self) -> Option<Box<Request<RequestBody>>> {
        let is_repeatable = self.framing == RequestFraming::NoBody && !self.has_forwarded_informational;
        if is_repeatable { self.request.take() } else { None }
    }

    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<()>, Http1Error>> {
        self.send_available(cx).map_err(Http1Error::RequestBody)?;
        loop {
            match ready!(self.poll_receive(READ_HEAD_BYTES, cx)) {
                Ok(0) => return Poll::Ready(Err(Http1Error::Closed)),
                // A head that arrives byte by byte is not parsed each time.
                Ok(bytes) if !http1_codec::may_complete_head(&self.received, bytes) => continue,
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
    fn take_head(&mut self) -> Result<Option<ResponseHead>, MalformedResponse> {
        // There is a request until a response has begun.
        let method = self.request.as_ref().map_or(&Method::GET, |request| request.method());
        while !self.received.is_empty() {
            let Some(head) = http1_codec::parse_response_head(&mut self.received, method)? else { return Ok(None) };
            if !head.is_interim() {
                return Ok(Some(head));
            }
            let status = head.response.status();
            if let Some(informational) = &self.informational {
                let reason = head.response.extensions().get::<ReasonPhrase>().map(ReasonPhrase::as_bytes);
                let reason = reason.and_then(|reason| str::from_utf8(reason).ok()).or(status.canonical_reason());
                let fields = head.response.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
                self.has_forwarded_informational |=
                    informational.push(status.as_u16(), reason.unwrap_or_default(), fields);
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
            // A long response does not keep its request.
            self.request = None;
        }
        loop {
            let frame = self.body.decode(&mut self.received).map_err(Http1Error::Malformed)?;
            if frame.is_some() || self.body.has_ended() {
                return Poll::Ready(Ok(frame));
            }
            self.idle_since = None;
            let wanted = match self.body.expected_bytes() {
                // One byte more, because a read that fills its buffer leaves it unknown whether more bytes wait.
                Some(bytes) => usize::try_from(bytes).unwrap_or(usize::MAX).saturating_add(1),
                None => READ_UNKNOWN_BYTES,
            };
            match ready!(self.poll_receive(wanted.clamp(READ_HEAD_BYTES, READ_MAX_BYTES), cx)) {
                Ok(0) if self.body == BodyDecoder::UntilClose => {
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

    /// Receives bytes into a buffer with room for `capacity`; returns their number, 0 at the end of the stream.
    fn poll_receive(&mut self, capacity: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.received.is_empty() {
            // A connection that waits holds no buffer.
            self.received = Bytes::new();
            if !self.stream.is_tls() {
                // TLS may hold bytes, or an error, that the socket does not announce.
                ready!(self.stream.poll_readable(cx));
            }
        }
        let mut buffer = match self.received.is_empty() {
            true => BytesMut::with_capacity(capacity),
            false => BytesMut::from(std::mem::take(&mut self.received)),
        };
        buffer.reserve(capacity);
        let polled = pin!(self.stream.read_buf(&mut buffer)).poll(cx);
        let is_sparse = buffer.is_empty() || capacity > READ_HEAD_BYTES && buffer.len() < capacity / SPARSE_DIVISOR;
        self.received = if is_sparse { Bytes::copy_from_slice(&buffer) } else { buffer.freeze() };
        polled
    }

    /// Sends what is available of the request, and what the server takes of it without waiting.
    fn send_available(&mut self, cx: &mut Context<'_>) -> Result<(), BodyError> {
        while matches!(self.send_state, SendState::Body | SendState::Flush) {
            self.take_frames(cx)?;
            let is_waiting = self.outgoing.is_empty() && self.send_state == SendState::Body;
            match self.outgoing.poll_send(&mut self.stream, cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(())) if is_waiting => return Ok(()),
                Poll::Ready(Ok(())) if self.send_state == SendState::Flush => self.send_state = SendState::Sent,
                Poll::Ready(Ok(())) => {}
                // The response may have been sent before; its end, or that of the connection, follows.
                Poll::Ready(Err(_)) => self.send_state = SendState::Refused,
            }
        }
        Ok(())
    }

    /// Takes frames of the request body until `outgoing` is full or the client has sent no more.
    fn take_frames(&mut self, cx: &mut Context<'_>) -> Result<(), BodyError> {
        let Some(request) = &mut self.request else { return Ok(()) };
        let is_chunked = self.framing == RequestFraming::Chunked;
        // The next request would begin elsewhere than the server expects.
        let wrong_length = || BodyError::from("the body does not have its Content-Length");
        while self.send_state == SendState::Body && self.outgoing.has_room() {
            let Poll::Ready(frame) = Pin::new(request.body_mut()).poll_frame(cx) else { return Ok(()) };
            let mut trailers = None;
            let mut is_last = frame.is_none();
            if let Some(frame) = frame.transpose()? {
                match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => {
                        if let RequestFraming::Length(left) = &mut self.framing {
                            *left = left.checked_sub(data.len() as u64).ok_or_else(wrong_length)?;
                        }
                        self.outgoing.push(data, is_chunked);
                    }
                    Err(frame) => (trailers, is_last) = (frame.into_trailers().ok(), true),
                }
                is_last |= request.body().is_end_stream();
            }
            match self.framing {
                RequestFraming::Length(0) => is_last = true,
                RequestFraming::Length(_) if is_last => return Err(wrong_length()),
                RequestFraming::Chunked if is_last => {
                    let end = self.outgoing.end_mut();
                    http1_codec::write_last_chunk(trailers.as_ref(), request.headers(), end);
                }
                _ => {}
            }
            if is_last {
                self.send_state = SendState::Flush;
            }
        }
        Ok(())
    }

    /// The byte stream, and the bytes received after the head of the last response, if that switched protocols; the
    /// connection counts for as long as the third part is held.
    pub fn into_stream(self) -> (IoStream, Bytes, CountedConnection) {
        (self.stream, self.received, self.counted)
    }
}

/// Bytes that wait to be sent: `front`, then `frame`, then `back`.
#[derive(Default)]
struct Outgoing {
    front: Vec<u8>,
    /// Bytes of `front` that were sent.
    sent: usize,
    frame: Bytes,
    back: Vec<u8>,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.front.is_empty() && self.frame.is_empty() && self.back.is_empty()
    }

    fn has_room(&self) -> bool {
        self.frame.is_empty() && self.front.len() < OUTGOING_MAX_BYTES
    }

    /// Where bytes behind all others are added.
    fn end_mut(&mut self) -> &mut Vec<u8> {
        if self.frame.is_empty() { &mut self.front } else { &mut self.back }
    }

    /// Adds the data of a frame, as a chunk if `is_chunk`. To be called only if [`Outgoing::has_room`] is true.
    fn push(&mut self, data: Bytes, is_chunk: bool) {
        if is_chunk {
            http1_codec::write_chunk_size(data.len(), &mut self.front);
        }
        if data.len() <= COPIED_FRAME_MAX_BYTES {
            self.front.extend_from_slice(&data);
        } else {
            self.frame = data;
        }
        if is_chunk {
            self.end_mut().extend_from_slice(b"\r\n");
        }
    }

    /// Sends all bytes.
    fn poll_send(&mut self, stream: &mut IoStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let front = &self.front[self.sent..];
            let stream = Pin::new(&mut *stream);
            let sent = match self.frame.is_empty() {
                true => ready!(stream.poll_write(cx, front))?,
                false => {
                    let slices = [front, &self.frame, &self.back].map(IoSlice::new);
                    ready!(stream.poll_write_vectored(cx, &slices))?
                }
            };
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(sent);
        }
        Pin::new(stream).poll_flush(cx)
    }

    /// Removes sent bytes.
    fn advance(&mut self, sent: usize) {
        self.sent += sent;
        let Some(beyond_front) = self.sent.checked_sub(self.front.len()) else { return };
        let of_frame = beyond_front.min(self.frame.len());
        self.frame.advance(of_frame);
        // The rest of the frame is sent from `frame` alone, and `back` only after it.
        (self.front, self.sent) = (Vec::new(), 0);
        if self.frame.is_empty() {
            let of_back = beyond_front - of_frame;
            self.frame = Bytes::new();
            if of_back < self.back.len() {
                (self.front, self.sent) = (std::mem::take(&mut self.back), of_back);
            }
            self.back = Vec::new();
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::net::UnixStream;

    /// The peer receives all bytes in order, however many the socket takes at once.
    #[tokio::test]
    async fn outgoing_bytes_are_sent_in_order() {
        for is_chunk in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (mut stream, mut peer) = (IoStream::unix(ours), IoStream::unix(theirs));
            let (mut outgoing, mut expected, mut received) = (Outgoing::default(), Vec::new(), Vec::new());
            for bytes in [1, COPIED_FRAME_MAX_BYTES, COPIED_FRAME_MAX_BYTES + 1, 3_000_000, 2] {
                if !outgoing.has_room() {
                    let sending = poll_fn(|cx| outgoing.poll_send(&mut stream, cx));
                    let receiving = async {
                        while received.len() < expected.len() {
                            peer.read_buf(&mut received).await.unwrap();
                        }
                    };
                    tokio::join!(async { sending.await.unwrap() }, receiving);
                    assert!(outgoing.is_empty());
                }
                let data: Bytes = (0..bytes).map(|at| (at % 251) as u8).collect();
                if is_chunk {
                    expected.extend_from_slice(format!("{bytes:x}\r\n").as_bytes());
                }
                expected.extend_from_slice(&data);
                if is_chunk {
                    expected.extend_from_slice(b"\r\n");
                }
                outgoing.push(data, is_chunk);
            }
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(outgoing.poll_send(&mut stream, cx).is_ready() && outgoing.is_empty());
            while received.len() < expected.len() {
                peer.read_buf(&mut received).await.unwrap();
            }
            assert!(received == expected);
        }
    }

    #[test]
    fn a_write_may_end_anywhere() {
        for sent in 0..=9 {
            let mut outgoing = Outgoing { front: b"abc".into(), sent: 0, frame: "def".into(), back: b"ghi".into() };
            outgoing.advance(sent);
            let rest = [&outgoing.front[outgoing.sent..], &outgoing.frame, &outgoing.back].concat();
            assert_eq!((rest.as_slice(), outgoing.is_empty()), (&b"abcdefghi"[sent..], sent == 9), "{sent}");
        }
    }
}
