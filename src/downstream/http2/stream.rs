//! HTTP/2 streams above h2: the request, the response, and the rest of the request body after the response.
//!
//! A response that is ready at once, such as a refusal, is sent by the connection's task after all received requests
//! are read, so that responses leave in one write. Every other stream gets a task. A stream without progress is reset.
//! The rest of a request body is read for a moment after the response: a client that is stopped while sending may lose
//! the response.

use std::cell::RefCell;
use std::error::Error;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Method, Request, Response, header};
use http_body::Body as _;

use crate::downstream::http2::flood_guard::{self, HeadRejection};
use crate::downstream::http2::monitor::Monitor;
use crate::downstream::http2::tunnel;
use crate::downstream::http2::tunnel::StreamTunnel;
use crate::informational;
use crate::proxy::handler::{ResponseFuture, handle};
use crate::proxy::peer::{ConnectionInfo, Peer};
use crate::proxy::request_record;
use crate::proxy::response::{self, ResponseBody};
use crate::proxy::worker_state::WorkerState;
use crate::ratelimit_service::RatelimitService;
use crate::upstream::request_body::BodySource;
use transom_http::error::RequestError;
use transom_http::headers;
use transom_http::http1_head::never_has_body;

/// Limits on reading the rest of a request body after the response. Then the stream is reset. The time helps clients on busy
/// machines, and occupies only one of the client's own streams.
const DRAIN_MAX_BYTES: usize = 256 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// From the last of these bytes to the reset: some clients, such as curl 7.88, drop a response that they read together with the
/// reset. The client's window stays closed meanwhile, so a longer wait would only delay a client that waits for it.
const RESET_DELAY: Duration = Duration::from_secs(1);

/// Peers that a connection keeps for later streams.
const FREE_PEERS_MAX: usize = 32;

/// Sends the response of a stream.
type Respond = SendResponse<Bytes>;

/// All streams of a connection.
pub struct Streams {
    shared: Rc<StreamContext>,
    /// Responses that were ready at once, and are not sent yet.
    ready_responses: Vec<(Response<ResponseBody>, Respond)>,
}

/// Shared by the tasks of a connection's streams.
struct StreamContext {
    worker: Rc<WorkerState>,
    /// Template for the peers of streams.
    connection: Rc<ConnectionInfo>,
    monitor: Rc<Monitor>,
    /// Answers the requests; `None`: they are forwarded.
    service: Option<Rc<RatelimitService>>,
    /// Peers of ended streams, to be reused.
    free_peers: RefCell<Vec<Rc<Peer>>>,
}

impl Streams {
    pub fn new(
        worker: Rc<WorkerState>,
        connection: Rc<ConnectionInfo>,
        monitor: Rc<Monitor>,
        service: Option<Rc<RatelimitService>>,
    ) -> Streams {
        let shared = StreamContext { worker, connection, monitor, service, free_peers: RefCell::default() };
        Streams { shared: Rc::new(shared), ready_responses: Vec::new() }
    }

    /// Accepts a request: handles it at once, or starts a task for its stream.
    pub fn accept(&mut self, mut request: Request<RecvStream>, mut respond: Respond) {
        let mut error = None;
        let stream_id = respond.stream_id().into();
        match self.shared.monitor.rejection_of(stream_id) {
            None => {}
            // The client may retry it (RFC 9113, section 8.7).
            Some(HeadRejection::ConnectionFull) => return respond.send_reset(Reason::REFUSED_STREAM),
            Some(HeadRejection::TooLarge) => error = Some(RequestError::HeadTooLarge),
        }
        let mut tunnel = None;
        let is_connect = request.method() == Method::CONNECT;
        if is_connect && !tunnel::prepare_connect(&mut request) {
            // The request announces a body, which a CONNECT cannot have.
            return respond.send_reset(Reason::INTERNAL_ERROR);
        }
        self.shared.monitor.accept(stream_id);
        let is_head = request.method() == Method::HEAD;
        let (parts, stream) = request.into_parts();
        let mut body = BodySource::Empty;
        if is_connect {
            tunnel = Some(stream);
        } else if !stream.is_end_stream() {
            body = BodySource::from(stream);
        }
        let (peer, has_no_body) = (self.shared.take_peer(), matches!(body, BodySource::Empty));
        // HTTP/2 has no chunked coding, so the message length is never ambiguous.
        let StreamContext { worker, service, .. } = &*self.shared;
        let mut response = ResponseFuture::start(|| match service {
            Some(service) => service.handle(worker, &peer, parts, body, error),
            None => handle(worker, &peer, parts, body, error),
        });
        if has_no_body && let Some(mut response) = response.take_ready() {
            self.shared.recycle_peer(peer);
            if is_head {
                response::strip_body(&mut response);
            }
            return self.ready_responses.push((response, respond));
        }
        self.shared.spawn_task(StreamState::AwaitingResponse { response, is_head, tunnel }, respond, peer);
    }

    /// Records requests that were rejected before they could be handled: with 431 by h2, or with a reset.
    pub fn record_rejected(&self) {
        let StreamContext { worker, connection, monitor, .. } = &*self.shared;
        let record = |error| request_record::record_rejected_head(worker, connection.address, error, None);
        (0..monitor.take_unrecorded_rejections()).for_each(|_| record(&RequestError::HeadTooLarge));
        for code in monitor.take_reset_codes() {
            record(match Reason::from(code) {
                Reason::REFUSED_STREAM => &RequestError::StreamRefused,
                _ => &RequestError::Malformed,
            });
        }
    }

    /// Passes the ready responses to h2; `false` if there are none. Passed one by one, h2 would write each with a
    /// system call of its own.
    pub fn send_ready_responses(&mut self) -> bool {
        if self.ready_responses.is_empty() {
            return false;
        }
        let Streams { shared, ready_responses } = self;
        shared.worker.share_end_time(|| {
            ready_responses.drain(..).for_each(|(response, respond)| shared.send_local_response(response, respond))
        });
        true
    }
}

impl StreamContext {
    fn take_peer(&self) -> Rc<Peer> {
        let free = self.free_peers.borrow_mut().pop();
        free.unwrap_or_else(|| Rc::new(Peer::for_stream(Rc::clone(&self.connection), self.worker.timers.new_timer())))
    }

    fn recycle_peer(&self, peer: Rc<Peer>) {
        // A peer is not reused while the body or the informational queue has another owner: they belong to the old stream.
        let is_free = peer.body_drain.as_ref().is_none_or(|body_drain| Rc::strong_count(body_drain) == 1)
            && Rc::strong_count(&peer.informational) == 1;
        let mut free = self.free_peers.borrow_mut();
        if is_free && free.len() < FREE_PEERS_MAX {
            free.push(peer);
        }
    }

    /// Starts the task of a stream.
    fn spawn_task(self: &Rc<Self>, state: StreamState, respond: Respond, peer: Rc<Peer>) {
        self.monitor.task_started();
        let task = StreamTask { state, respond, peer, shared: Rc::clone(self), informational_bytes: 0 };
        drop(tokio::task::spawn_local(task));
    }

    /// Sends a response that was ready at once.
    fn send_local_response(self: &Rc<Self>, response: Response<ResponseBody>, mut respond: Respond) {
        let Some((mut send_stream, mut body)) = self.send_head(response, &mut respond, false) else { return };
        // If the client's window is closed, the stream needs a task.
        send_stream.reserve_capacity(1);
        if send_stream.capacity() > 0
            && let Some(bytes) = body.take_local()
        {
            // Fails if the client has reset the stream.
            let _ = send_stream.send_data(bytes, true);
            return;
        }
        let peer = self.take_peer();
        peer.body_timeout.set(self.worker.config().served.config.timeouts.body);
        peer.timer.arm(peer.body_timeout.get());
        self.spawn_task(StreamState::Body(BodySender::new(body, send_stream)), respond, peer);
    }

    /// Sends a response head; `None` if no body follows. `stays_open`: a tunnel follows, so the stream does not end.
    fn send_head(
        &self,
        response: Response<ResponseBody>,
        respond: &mut Respond,
        stays_open: bool,
    ) -> Option<(SendStream<Bytes>, ResponseBody)> {
        let (mut head, body) = response.into_parts();
        if !headers::remove_connection_fields(&mut head.headers) {
            head.headers.insert(header::DATE, self.worker.date());
        }
        let ends_stream = !stays_open && body.is_end_stream();
        match respond.send_response(Response::from_parts(head, ()), ends_stream) {
            Ok(send_stream) => (!ends_stream).then_some((send_stream, body)),
            Err(error) => {
                // The only cause is a stream reset by the client.
                tracing::debug!(%error, "response not sent: the stream is reset");
                respond.send_reset(Reason::INTERNAL_ERROR);
                None
            }
        }
    }
}

/// The task of a stream. Dropping it resets a stream that has not ended.
struct StreamTask {
    state: StreamState,
    respond: Respond,
    peer: Rc<Peer>,
    shared: Rc<StreamContext>,
    /// Bytes of informational responses sent so far.
    informational_bytes: usize,
}

enum StreamState {
    /// The response head is not there yet. `tunnel`: what the client sends, if a CONNECT succeeds.
    AwaitingResponse {
        response: ResponseFuture,
        is_head: bool,
        tunnel: Option<RecvStream>,
    },
    Body(BodySender),
    Tunnel(Box<StreamTunnel>),
    /// The response has ended; the rest of the request body is read. Bytes read so far.
    DrainingRequest(usize),
}

impl Future for StreamTask {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        loop {
            match &mut this.state {
                StreamState::AwaitingResponse { response, is_head, tunnel } => {
                    let response = response.poll_response(cx);
                    let heads = this.peer.informational.take();
                    // The client may have reset the stream.
                    if (response.is_pending() || heads.is_some()) && this.respond.poll_reset(cx).is_ready() {
                        return Poll::Ready(());
                    }
                    if let Some(heads) = heads {
                        send_informational(&heads, &mut this.informational_bytes, &mut this.respond);
                    }
                    let mut response = ready!(response);
                    if *is_head {
                        response::strip_body(&mut response);
                    }
                    let tunnel = tunnel.take();
                    this.state = this.begin_response(response, tunnel);
                }
                StreamState::Body(sender) => {
                    if sender.poll(&this.peer, cx).is_pending() {
                        let error = sender.timeout_error();
                        ready!(this.poll_stalled(cx));
                        this.shared.worker.metrics.request_error(error.kind_id());
                        return Poll::Ready(());
                    }
                    this.state = this.begin_request_drain();
                }
                StreamState::Tunnel(tunnel) => return tunnel.poll(cx),
                StreamState::DrainingRequest(read) => return poll_request_drain(&this.peer, read, cx),
            }
        }
    }
}

impl StreamTask {
    /// Sends the response head; returns the next state.
    fn begin_response(&mut self, mut response: Response<ResponseBody>, tunnel: Option<RecvStream>) -> StreamState {
        let (shared, peer) = (&self.shared, &self.peer);
        peer.timer.arm(peer.body_timeout.get());
        if let Some((receive_stream, session)) = tunnel.zip(peer.tunnel.take()) {
            let Some((send_stream, _)) = shared.send_head(response, &mut self.respond, true) else {
                return self.begin_request_drain();
            };
            shared.monitor.tunnel_opened();
            return StreamState::Tunnel(Box::new(StreamTunnel::new(send_stream, receive_stream, session, peer)));
        }
        // An upstream over HTTP/2 may end such a response behind its head, or send a body all the same.
        if never_has_body(response.status()) {
            response::strip_body(&mut response);
        } else if !response.body().is_end_stream() {
            response::set_content_length(&mut response);
        }
        match shared.send_head(response, &mut self.respond, false) {
            Some((send_stream, body)) => StreamState::Body(BodySender::new(body, send_stream)),
            None => self.begin_request_drain(),
        }
    }

    /// Ends the response; returns the next state.
    fn begin_request_drain(&mut self) -> StreamState {
        // Drop the response first: only then is the rest of the request body unused.
        self.state = StreamState::DrainingRequest(0);
        self.peer.timer.arm(DRAIN_TIMEOUT);
        StreamState::DrainingRequest(0)
    }

    /// The response body makes no progress: ready when the stream must be reset.
    fn poll_stalled(&self, cx: &Context<'_>) -> Poll<()> {
        let Peer { timer, body_drain, body_timeout, .. } = &*self.peer;
        if !timer.poll_expired(cx) {
            return Poll::Pending;
        }
        // A response may pause while its request body makes progress.
        if !body_drain.as_ref().is_some_and(|body_drain| body_drain.take_progress()) {
            return Poll::Ready(());
        }
        timer.arm(body_timeout.get());
        let _ = timer.poll_expired(cx);
        Poll::Pending
    }
}

/// Sends informational responses. Flow control does not limit them, so their bytes per request are bounded.
fn send_informational(heads: &[u8], sent_bytes: &mut usize, respond: &mut Respond) {
    *sent_bytes += heads.len();
    if *sent_bytes <= informational::QUEUE_MAX_BYTES {
        // Errors are ignored: the heads are only heads.
        informational::parse_heads(heads).for_each(|head| drop(respond.send_informational(head)));
    }
}

/// Reads the rest of a request body; ready when the stream can end.
fn poll_request_drain(peer: &Peer, read: &mut usize, cx: &mut Context<'_>) -> Poll<()> {
    let Some(body_drain) = peer.body_drain.as_ref().filter(|body_drain| body_drain.has_body()) else {
        return Poll::Ready(());
    };
    while *read < DRAIN_MAX_BYTES {
        match body_drain.poll_chunk(cx) {
            Poll::Ready(Some(bytes)) => *read += bytes,
            Poll::Ready(None) => return Poll::Ready(()),
            Poll::Pending => break,
        }
        if *read >= DRAIN_MAX_BYTES {
            peer.timer.arm(RESET_DELAY);
        }
    }
    if peer.timer.poll_expired(cx) { Poll::Ready(()) } else { Poll::Pending }
}

impl Drop for StreamTask {
    fn drop(&mut self) {
        // Drop the response first: it releases the permits of its request.
        let state = std::mem::replace(&mut self.state, StreamState::DrainingRequest(0));
        if let StreamState::Tunnel(_) = state {
            self.shared.monitor.tunnel_ended();
        }
        drop(state);
        let Peer { timer, body_drain, tunnel, informational, .. } = &*self.peer;
        drop(informational.take());
        if let Some(body_drain) = body_drain {
            body_drain.clear();
        }
        // Left if the stream was reset between the response that opens a tunnel and the tunnel.
        drop(tunnel.take());
        // A waker would keep the memory of this task allocated.
        timer.detach();
        self.shared.recycle_peer(Rc::clone(&self.peer));
        self.shared.monitor.task_ended();
    }
}

/// Sends a response body on an HTTP/2 stream. The next piece is polled when h2 has taken the one before, as the client's
/// window opens.
pub struct BodySender {
    body: ResponseBody,
    stream: SendStream<Bytes>,
    /// A piece that waits for the client's window, and whether it is the last.
    pending: Option<(Bytes, bool)>,
}

impl BodySender {
    pub fn new(body: ResponseBody, stream: SendStream<Bytes>) -> BodySender {
        BodySender { body, stream, pending: None }
    }

    /// The error of a body that makes no progress: the client does not open its window, or the upstream does not continue.
    fn timeout_error(&self) -> RequestError {
        if self.pending.is_some() { RequestError::Stalled } else { RequestError::ResponseTimeout }
    }

    /// Ready when the body was sent, or the stream is reset. Progress re-arms the timer of `peer`.
    pub fn poll(&mut self, peer: &Peer, cx: &mut Context<'_>) -> Poll<()> {
        match self.poll_send(peer, cx) {
            // A reset by the client ends any wait.
            Poll::Pending => self.stream.poll_reset(cx).map(drop),
            Poll::Ready(_) => Poll::Ready(()),
        }
    }

    /// An error means that the stream is reset.
    fn poll_send(&mut self, peer: &Peer, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            if let Some((piece, is_last)) = &self.pending {
                let is_last = *is_last;
                // An empty piece, with which many servers end a body, needs no window, and never gets capacity.
                while !piece.is_empty() && self.stream.capacity() == 0 {
                    match ready!(self.stream.poll_capacity(cx)) {
                        Some(capacity) => capacity?,
                        None => return Poll::Ready(Ok(())),
                    };
                }
                let piece = self.pending.take().map(|(piece, _)| piece).unwrap_or_default();
                self.stream.send_data(piece, is_last)?;
                if is_last {
                    return Poll::Ready(Ok(()));
                }
            }
            let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
            peer.timer.arm(peer.body_timeout.get());
            let frame = match frame {
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                Some(Ok(frame)) => frame,
                Some(Err(error)) => {
                    self.stream.send_reset(reset_reason(&error));
                    return Poll::Ready(Ok(()));
                }
            };
            match frame.into_data() {
                Ok(piece) if piece.is_empty() && !self.body.is_end_stream() => {}
                Ok(piece) => {
                    let is_last = self.body.is_end_stream();
                    // Reserve one byte: reserved capacity is unavailable to other streams, and h2 requests the rest itself.
                    self.stream.reserve_capacity(usize::from(!piece.is_empty()));
                    self.pending = Some((piece, is_last));
                }
                Err(frame) => {
                    let Ok(trailers) = frame.into_trailers() else { continue };
                    self.stream.reserve_capacity(0);
                    return Poll::Ready(self.stream.send_trailers(trailers));
                }
            }
        }
    }
}

impl Drop for BodySender {
    fn drop(&mut self) {
        if self.pending.is_some() {
            self.body.record_truncation();
        }
    }
}

/// The reset code for a body that failed: the code of the upstream's stream, if it has one. A code that blames the sender of
/// the request blames the gateway, so the client gets INTERNAL_ERROR instead.
fn reset_reason(error: &(dyn Error + 'static)) -> Reason {
    let mut error = Some(error);
    while let Some(cause) = error {
        if let Some(reason) = cause.downcast_ref::<h2::Error>().and_then(h2::Error::reason) {
            return if flood_guard::blames_client(reason.into()) { Reason::INTERNAL_ERROR } else { reason };
        }
        error = cause.source();
    }
    Reason::INTERNAL_ERROR
}
