//! The body of a request: from the client, through its limits, to the upstream. Nothing is buffered beyond what a retry
//! over HTTP/2 needs, or rules read before they decide; every frame moves when the upstream takes it.
//!
//! From the client inwards: [`BodySource`] unites HTTP/1.1 and HTTP/2, [`ClientBody`] leaves an unfinished body to a
//! [`BodyDrain`], [`Upload`] applies limits and replays, and [`RequestBody`] is what upstream connections send.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::header::{self, HeaderMap, HeaderName};
use http_body::{Body, Frame, SizeHint};

use crate::timer::{Timer, Timers};
use transom_http::error::RequestError;
use transom_http::headers;
use transom_usage::memory_budget::MemoryShare;

/// Where a body comes from.
pub enum BodySource {
    Empty,
    /// Read from the connection of the client.
    Http1(Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>),
    Http2(Http2Body),
    Observed(Box<ObservedBody>),
    /// In memory.
    Buffered(Box<BufferedBody>),
}

const BUFFERED_FRAME_BYTES: usize = 64 << 10;

/// A body that was read as a whole.
pub struct BufferedBody {
    data: Bytes,
    trailers: Option<HeaderMap>,
    /// Held until the body is dropped.
    memory: MemoryShare,
}

impl BufferedBody {
    pub fn new(data: Bytes, trailers: Option<HeaderMap>, memory: MemoryShare) -> BufferedBody {
        BufferedBody { data, trailers, memory }
    }

    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Replaces the data. `false`: they take too much memory.
    pub fn replace_data(&mut self, data: Vec<u8>) -> bool {
        let fits = self.memory.grow_to(data.capacity());
        self.data = Bytes::from(data);
        fits
    }

    fn take_frame(&mut self) -> Option<Frame<Bytes>> {
        // In parts, so that the deadline of an upload sees it move.
        let data = self.data.split_to(self.data.len().min(BUFFERED_FRAME_BYTES));
        if data.is_empty() { self.trailers.take().map(Frame::trailers) } else { Some(Frame::data(data)) }
    }
}

/// Called with the data of a body as it passes. An error breaks the body off.
pub type DataObserver = Box<dyn FnMut(&[u8]) -> Result<(), UploadViolation>>;

/// A body whose data is shown to an observer as it passes.
pub struct ObservedBody {
    body: BodySource,
    observer: DataObserver,
}

/// The body on an HTTP/2 stream.
#[derive(Debug)]
pub struct Http2Body {
    stream: RecvStream,
    /// Bytes that remain of Content-Length, if there is one; h2 enforces it.
    bytes_left: Option<u64>,
    /// The data has ended; trailers may follow.
    is_data_done: bool,
}

impl From<RecvStream> for BodySource {
    fn from(stream: RecvStream) -> BodySource {
        BodySource::Http2(Http2Body { stream, bytes_left: None, is_data_done: false })
    }
}

impl BodySource {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            BodySource::Empty => Poll::Ready(None),
            BodySource::Http1(body) => body.as_mut().poll_frame(cx),
            BodySource::Http2(body) => body.poll_frame(cx),
            BodySource::Observed(observed) => {
                let frame = observed.body.poll_frame(cx);
                if let Poll::Ready(Some(Ok(frame))) = &frame
                    && let Some(Err(violation)) = frame.data_ref().map(|data| (observed.observer)(data))
                {
                    return Poll::Ready(Some(Err(violation.into())));
                }
                frame
            }
            BodySource::Buffered(body) => Poll::Ready(body.take_frame().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            BodySource::Empty => true,
            BodySource::Http1(body) => body.is_end_stream(),
            BodySource::Http2(body) => body.stream.is_end_stream(),
            BodySource::Observed(observed) => observed.body.is_end_stream(),
            BodySource::Buffered(body) => body.data.is_empty() && body.trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            BodySource::Empty => SizeHint::with_exact(0),
            BodySource::Http1(body) => body.size_hint(),
            BodySource::Http2(body) => body.bytes_left.map_or_else(SizeHint::default, SizeHint::with_exact),
            BodySource::Observed(observed) => observed.body.size_hint(),
            // Trailers need a chunked body.
            BodySource::Buffered(body) if body.trailers.is_some() => SizeHint::default(),
            BodySource::Buffered(body) => SizeHint::with_exact(body.data.len() as u64),
        }
    }
}

impl Http2Body {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if !self.is_data_done {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    // Lets the client send as many bytes more.
                    let _ = self.stream.flow_control().release_capacity(bytes.len());
                    self.bytes_left = self.bytes_left.map(|bytes_left| bytes_left.saturating_sub(bytes.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // Only END_STREAM ends a body. A reset before it, whatever its code, aborts the upload.
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => self.is_data_done = true,
            }
        }
        match ready!(self.stream.poll_trailers(cx)) {
            Ok(trailers) => Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers)))),
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }
}

/// Holds the unread rest of a request body after the response has ended.
///
/// A response may be complete before the request body is. HTTP/1.1 closes the connection after it. An HTTP/2 stream
/// would be reset, and clients would discard the response with it; so the server of the stream takes the body from here
/// and goes on reading for a moment.
#[derive(Default)]
pub struct BodyDrain {
    body: RefCell<Option<BodySource>>,
    has_progress: Cell<bool>,
}

impl BodyDrain {
    /// Whether there is an unread body.
    pub fn has_body(&self) -> bool {
        self.body.borrow().is_some()
    }

    /// Reads the next frame and returns its length; `None` at the end.
    pub fn poll_chunk(&self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        let mut body = self.body.borrow_mut();
        let Some(body) = &mut *body else { return Poll::Ready(None) };
        body.poll_frame(cx).map(|frame| Some(frame?.ok()?.data_ref().map_or(0, Bytes::len)))
    }

    /// Drops the body.
    pub fn clear(&self) {
        drop(self.body.take());
    }

    /// Whether the upload has read a frame since the last call.
    pub fn take_progress(&self) -> bool {
        self.has_progress.take()
    }
}

/// The body of a client's request. If it is dropped before its end, the rest goes to its [`BodyDrain`].
pub struct ClientBody {
    /// `Some` until the drop.
    body: Option<BodySource>,
    drain: Option<Rc<BodyDrain>>,
}

impl ClientBody {
    /// `headers`: of the request.
    pub fn new(mut body: BodySource, headers: &HeaderMap, drain: Option<&Rc<BodyDrain>>) -> ClientBody {
        if let BodySource::Http2(http2_body) = &mut body {
            let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
            http2_body.bytes_left = length.and_then(|length| length.parse().ok());
        }
        let drain = drain.filter(|_| !matches!(body, BodySource::Empty)).cloned();
        ClientBody { body: Some(body), drain }
    }
}

impl ClientBody {
    /// A body that was read as a whole.
    pub fn buffered(body: BufferedBody) -> ClientBody {
        ClientBody { body: Some(BodySource::Buffered(Box::new(body))), drain: None }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = body.poll_frame(cx);
        if let (true, Some(drain)) = (frame.is_ready(), &self.drain) {
            drain.has_progress.set(true);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(BodySource::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, BodySource::size_hint)
    }
}

impl Drop for ClientBody {
    fn drop(&mut self) {
        if let (Some(drain), Some(body)) = (&self.drain, self.body.take().filter(|body| !body.is_end_stream())) {
            drain.body.replace(Some(body));
        }
    }
}

/// The progress of an upload, for the task that waits for the response.
#[derive(Debug, Default)]
pub struct UploadProgress {
    /// A frame was read since the last check.
    pub has_moved: Cell<bool>,
    /// The upstream would take more, but the client has not sent it.
    pub is_starved: Cell<bool>,
    /// The client aborted the body, or its chunks are malformed.
    pub has_failed: Cell<bool>,
    /// The body is larger, or slower, than allowed.
    pub violation: Cell<Option<UploadViolation>>,
    pub received_bytes: Cell<u64>,
}

impl UploadProgress {
    /// The error on the client's side, if there is one.
    pub fn client_error(&self) -> Option<RequestError> {
        self.violation.get().map(RequestError::from).or(self.has_failed.get().then_some(RequestError::Body))
    }
}

/// Why a body ended early.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The request body that an upstream connection sends. Most requests have none, and requests are moved often, which
/// costs by size; so the parts of a body are boxed.
pub enum RequestBody {
    Empty,
    /// No body: the request asks to switch protocols.
    Upgrade,
    Client(Box<Upload>),
    /// As `Client`, and the body can be replayed.
    Replayable(ReplayBody),
}

/// A body that a client sends, with its limits.
pub struct Upload {
    body: ClientBody,
    progress: Rc<UploadProgress>,
    limits: UploadLimits,
    /// What an HTTP/2 stream has taken, once the body is replayable.
    replay: Option<Box<ReplayBuffer>>,
}

impl RequestBody {
    /// The body that an upstream connection sends. `limits` is called only if there is a body.
    pub fn new(body: ClientBody, limits: impl FnOnce() -> UploadLimits) -> RequestBody {
        if body.is_end_stream() {
            return RequestBody::Empty;
        }
        RequestBody::Client(Box::new(Upload { body, progress: Rc::default(), limits: limits(), replay: None }))
    }

    /// Shows the data of the client to an observer as it passes.
    pub fn observe(&mut self, observer: DataObserver) {
        if let RequestBody::Client(upload) = self
            && let Some(body) = upload.body.body.take()
        {
            upload.body.body = Some(BodySource::Observed(Box::new(ObservedBody { body, observer })));
        }
    }

    /// The upload's progress; `None` if there is no body.
    pub fn progress(&self) -> Option<Rc<UploadProgress>> {
        match self {
            RequestBody::Empty | RequestBody::Upgrade | RequestBody::Replayable(_) => None,
            RequestBody::Client(upload) => Some(Rc::clone(&upload.progress)),
        }
    }

    /// Makes the body replayable: returns the body for an HTTP/2 stream, and the handle that takes it back if the
    /// server does not process the stream.
    pub fn into_replayable(self) -> (RequestBody, Option<ReplayBody>) {
        let replay_body = match self {
            RequestBody::Empty | RequestBody::Upgrade => return (self, None),
            RequestBody::Client(upload) => ReplayBody::new(upload),
            RequestBody::Replayable(replay_body) => replay_body,
        };
        (RequestBody::Replayable(replay_body.clone()), Some(replay_body))
    }
}

impl Upload {
    /// Polls the next frame from the client.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Upload { body, progress, limits, .. } = self;
        let mut frame = Pin::new(body).poll_frame(cx);
        progress.is_starved.set(frame.is_pending());
        match &mut frame {
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() => {
                progress.has_moved.set(true);
                // HTTP/1.1 forwards only announced trailers; HTTP/2 forwards all.
                if let Some(trailers) = frame.trailers_mut() {
                    headers::forward_request_trailers(trailers);
                    limits
                        .removed_trailers
                        .iter()
                        .flat_map(|names| &**names)
                        .for_each(|name| _ = trailers.remove(name));
                }
            }
            Poll::Ready(Some(Ok(_))) => progress.has_moved.set(true),
            Poll::Ready(Some(Err(error))) => match error.downcast_ref::<UploadViolation>() {
                Some(violation) => progress.violation.set(Some(*violation)),
                None => progress.has_failed.set(true),
            },
            Poll::Ready(None) | Poll::Pending => {}
        }
        let received = match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                progress.received_bytes.update(|received| received + bytes as u64);
                Some(Poll::Ready(bytes))
            }
            Poll::Pending => Some(Poll::Pending),
            Poll::Ready(None | Some(Err(_))) => None,
        };
        if let Some(received) = received
            && let Some(violation) = limits.check(received, cx)
        {
            progress.violation.set(Some(violation));
            return Poll::Ready(Some(Err(violation.into())));
        }
        frame
    }

    /// Polls the next frame: first those that an earlier stream has taken, then the client's.
    fn poll_frame_or_replay(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(mut replay) = self.replay.take() else { return self.poll_frame(cx) };
        let frame = if let Some(resend) = replay.take_resend() {
            Poll::Ready(Some(Ok(Frame::data(resend))))
        } else if replay.has_ended() {
            Poll::Ready(None)
        } else {
            let frame = self.poll_frame(cx);
            if let Poll::Ready(frame) = &frame {
                replay.record_frame(frame.as_ref());
            }
            frame
        };
        self.replay = Some(replay);
        frame
    }

    pub fn is_end_stream(&self) -> bool {
        self.replay.as_ref().is_none_or(|replay| replay.pending_resend().is_empty()) && self.body.is_end_stream()
    }

    pub fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let resend = self.replay.as_ref().map_or(0, |replay| replay.pending_resend().len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + resend);
        }
        hint.set_lower(hint.lower() + resend);
        hint
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            RequestBody::Empty | RequestBody::Upgrade => Poll::Ready(None),
            RequestBody::Client(upload) => upload.poll_frame_or_replay(cx),
            RequestBody::Replayable(replay_body) => replay_body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            RequestBody::Empty | RequestBody::Upgrade => true,
            RequestBody::Client(upload) => upload.is_end_stream(),
            RequestBody::Replayable(replay_body) => replay_body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            RequestBody::Empty | RequestBody::Upgrade => SizeHint::with_exact(0),
            RequestBody::Client(upload) => upload.size_hint(),
            RequestBody::Replayable(replay_body) => replay_body.size_hint(),
        }
    }
}

/// The limits of one request body: size and minimum rate.
///
/// The rate is checked only while the upstream would take more and the client has not sent it: a client that sends to a
/// slow upstream is not slow itself. The first interval begins with the first wait for the client. A body that is
/// always available when it is polled needs no timer and no clock read.
#[derive(Debug)]
pub struct UploadLimits {
    /// `None`: any size.
    max_bytes: Option<u64>,
    min_rate: Option<MinUploadRate>,
    /// Trailers that the route does not forward.
    removed_trailers: Option<Arc<[HeaderName]>>,
    received: u64,
}

/// How fast a client has to send a body.
#[derive(Debug)]
pub struct MinUploadRate {
    timers: Rc<Timers>,
    /// Bytes to receive in each interval.
    min_bytes: u64,
    interval: Duration,
    /// Armed at the first wait.
    timer: Option<Rc<Timer>>,
    /// Bytes received before this interval.
    received_before: u64,
}

/// How a body violated its limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UploadViolation {
    TooLarge(u64),
    TooSlow,
    /// A rule breaks off transfers that exceed it.
    LimitExceeded,
}

impl UploadLimits {
    pub fn new(max_bytes: Option<u64>, min_rate: Option<MinUploadRate>) -> UploadLimits {
        UploadLimits { max_bytes, min_rate, removed_trailers: None, received: 0 }
    }

    /// Removes these trailers, too.
    pub fn without_trailers(self, removed_trailers: Option<Arc<[HeaderName]>>) -> UploadLimits {
        UploadLimits { removed_trailers, ..self }
    }

    /// With another limit of size, if that is lower.
    pub fn at_most(self, max_bytes: u64) -> UploadLimits {
        UploadLimits { max_bytes: Some(self.max_bytes.map_or(max_bytes, |own| own.min(max_bytes))), ..self }
    }

    /// Checks a poll of the body: `Ready` with the bytes received, or `Pending`, in which case the task is woken when
    /// the interval ends.
    pub fn check(&mut self, received: Poll<usize>, cx: &Context<'_>) -> Option<UploadViolation> {
        match (received, &mut self.min_rate) {
            (Poll::Ready(bytes), _) => {
                self.received += bytes as u64;
                self.max_bytes.filter(|max_bytes| self.received > *max_bytes).map(UploadViolation::TooLarge)
            }
            (Poll::Pending, Some(min_rate)) => min_rate.is_slow(self.received, cx).then_some(UploadViolation::TooSlow),
            (Poll::Pending, None) => None,
        }
    }
}

impl MinUploadRate {
    /// At least `rate` bytes a second, averaged over `interval`.
    pub fn new(timers: &Rc<Timers>, rate: u64, interval: Duration) -> Option<MinUploadRate> {
        let min_bytes = u128::from(rate) * interval.as_millis() / 1000;
        let min_bytes = u64::try_from(min_bytes).unwrap_or(u64::MAX);
        (min_bytes > 0).then(|| MinUploadRate {
            timers: Rc::clone(timers),
            min_bytes,
            interval,
            timer: None,
            received_before: 0,
        })
    }

    fn is_slow(&mut self, received: u64, cx: &Context<'_>) -> bool {
        if let Some(timer) = &self.timer {
            if !timer.poll_expired(cx) {
                return false;
            }
            if received - self.received_before < self.min_bytes {
                return true;
            }
        }
        let timer = self.timer.get_or_insert_with(|| self.timers.new_timer());
        timer.arm(self.interval);
        self.received_before = received;
        timer.poll_expired(cx)
    }
}

impl From<UploadViolation> for RequestError {
    fn from(violation: UploadViolation) -> RequestError {
        match violation {
            UploadViolation::TooLarge(max_bytes) => RequestError::BodyTooLarge(max_bytes),
            UploadViolation::TooSlow => RequestError::BodyTooSlow,
            UploadViolation::LimitExceeded => RequestError::LimitExceeded,
        }
    }
}

/// For the upstream connection.
impl fmt::Display for UploadViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        RequestError::from(*self).fmt(f)
    }
}

impl std::error::Error for UploadViolation {}

/// Most bytes recorded for a replay: the initial window of a stream (RFC 9113, section 6.9.2), and therefore all that a
/// server receives before it refuses a stream.
const REPLAY_MAX_BYTES: usize = 64 * 1024;

/// A body that an HTTP/2 stream sends and that can be replayed. The stream and the request each hold one handle.
///
/// A server that shuts down (GOAWAY) or is overloaded (REFUSED_STREAM) states that it has not processed a request. That
/// request can be sent to another server, whatever its method, if its whole body is available. Therefore the bytes that a
/// stream takes are recorded while they are few and no response has arrived.
#[derive(Clone)]
pub struct ReplayBody(Rc<RefCell<Option<Box<Upload>>>>);

/// The bytes that a stream has taken of a body.
#[derive(Default)]
struct ReplayBuffer {
    /// `None` if there were too many.
    recorded: Option<Vec<u8>>,
    /// Bytes that an earlier stream took, to be sent again.
    resend: Bytes,
    has_ended: bool,
}

impl ReplayBody {
    pub fn new(upload: Box<Upload>) -> ReplayBody {
        let mut upload = upload;
        upload.replay.get_or_insert_default().start_recording();
        ReplayBody(Rc::new(RefCell::new(Some(upload))))
    }

    /// Takes the body from the stream and rewinds it, if all of its bytes are recorded.
    pub fn rewind(&self) -> Option<RequestBody> {
        let mut upload = self.0.take()?;
        upload.replay.as_mut()?.rewind().then_some(RequestBody::Client(upload))
    }

    /// Records no more bytes: the body will not be replayed.
    pub fn stop_recording(&self) {
        if let Some(replay) = self.0.borrow_mut().as_mut().and_then(|upload| upload.replay.as_mut()) {
            replay.recorded = None;
        }
    }

    pub fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.0.borrow_mut().as_mut() {
            Some(upload) => upload.poll_frame_or_replay(cx),
            None => Poll::Ready(Some(Err("the body is sent elsewhere".into()))),
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.0.borrow().as_ref().is_some_and(|upload| upload.is_end_stream())
    }

    pub fn size_hint(&self) -> SizeHint {
        self.0.borrow().as_ref().map(|upload| upload.size_hint()).unwrap_or_default()
    }
}

impl ReplayBuffer {
    /// Keeps the bytes that are taken from now on.
    fn start_recording(&mut self) {
        self.recorded = Some(Vec::new());
    }

    /// Rewinds to the beginning; `false` if its bytes are no longer recorded.
    fn rewind(&mut self) -> bool {
        let Some(mut recorded) = self.recorded.take() else { return false };
        recorded.extend_from_slice(&self.resend);
        self.resend = recorded.into();
        true
    }

    /// Bytes to send before the client's next.
    fn pending_resend(&self) -> &Bytes {
        &self.resend
    }

    /// The client's body has ended, and is not polled again.
    fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Takes the bytes to send again.
    fn take_resend(&mut self) -> Option<Bytes> {
        let resend = std::mem::take(&mut self.resend);
        self.record(&resend);
        (!resend.is_empty()).then_some(resend)
    }

    /// Records a frame from the client that the stream takes.
    fn record_frame(&mut self, frame: Option<&Result<Frame<Bytes>, BodyError>>) {
        match frame {
            None => self.has_ended = true,
            Some(Ok(frame)) if frame.is_data() => self.record(frame.data_ref().unwrap_or(&Bytes::new())),
            // Trailers are rare, and an aborted body cannot be sent again.
            Some(Ok(_) | Err(_)) => self.recorded = None,
        }
    }

    fn record(&mut self, bytes: &[u8]) {
        self.recorded = self.recorded.take().filter(|recorded| recorded.len() + bytes.len() <= REPLAY_MAX_BYTES).map(
            |mut recorded| {
                recorded.extend_from_slice(bytes);
                recorded
            },
        );
    }
}
