//! One HTTP/1.1 client connection: receives requests, sends responses, enforces the timeouts, and ends the connection.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::TRAILER;
use http::{HeaderMap, Method, Response, Version};
use tokio::io::AsyncWrite;

use crate::downstream::drain::DrainGuard;
use crate::downstream::http1::client_stream::{ClientStream, HeadFailure};
use crate::downstream::http1::response_sender::{ResponseSender, SendFailure};
use crate::downstream::linger::linger;
use crate::io_stream::IoStream;
use crate::proxy::handler::{ResponseFuture, handle};
use crate::proxy::peer::{ConnectionInfo, Peer};
use crate::proxy::request_record;
use crate::proxy::response::{self, ResponseBody};
use crate::proxy::websocket::TunnelSession;
use crate::proxy::worker_state::WorkerState;
use crate::timer::Timer;
use transom_http::error::RequestError;
use transom_http::http1_head::{self, Framing, HeadLimits, RequestHead};
use transom_rules::responses;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Serves a connection until it ends. While the gateway drains, responses have `Connection: close`. An idle connection
/// stays open in the first step of the drain, because a request may be on its way and closing would lose it.
pub async fn serve(io: IoStream, connection: Rc<ConnectionInfo>, worker: Rc<WorkerState>, drain_guard: DrainGuard) {
    let mut connection = ClientConnection::new(io, connection, worker, &drain_guard);
    let end = poll_fn(|cx| connection.poll(cx)).await;
    Box::pin(connection.finish(end)).await;
}

/// A connection, and what its requests need.
struct ClientConnection<'d> {
    stream: Rc<ClientStream>,
    phase: Phase,
    peer: Rc<Peer>,
    worker: Rc<WorkerState>,
    drain_guard: &'d DrainGuard,
    /// Limits the wait for a head, and the time for which a response may make no progress.
    timer: Rc<Timer>,
    head_limits: HeadLimits,
    head_timeout: Duration,
    min_response_rate: u64,
}

/// What a connection does.
enum Phase {
    /// Receiving the head of the next request.
    Head,
    /// Waiting for the head of the response.
    Processing(ResponseFuture, RequestTraits),
    /// Sending the response.
    Responding(ResponseSender, AfterResponse),
    Ended,
}

/// What a response depends on, of the head of its request.
#[derive(Clone, Copy)]
struct RequestTraits {
    version: Version,
    is_head: bool,
    /// The client takes another response on the connection.
    keeps_alive: bool,
    takes_trailers: bool,
}

/// What follows a response.
enum AfterResponse {
    /// Another request, if the body of this one has ended.
    Request,
    End(ConnectionEnd),
}

/// How a connection ends.
enum ConnectionEnd {
    /// It is closed without another byte.
    Dropped,
    /// Bytes that wait to be sent are discarded too. The kernel would otherwise keep them for as long as the client reads a byte now
    /// and then.
    Reset,
    /// The gateway closes its side, and reads for a moment what the client still sends.
    Closed,
    Tunnel(Box<TunnelSession>),
}

impl<'d> ClientConnection<'d> {
    fn new(
        io: IoStream,
        connection: Rc<ConnectionInfo>,
        worker: Rc<WorkerState>,
        drain_guard: &'d DrainGuard,
    ) -> ClientConnection<'d> {
        let worker_config = worker.config();
        let config = &worker_config.served.config;
        let timer = worker.timers.new_timer();
        timer.arm(config.timeouts.request_head);
        let peer = Peer::new(connection, worker.timers.new_timer());
        peer.body_timeout.set(config.timeouts.body);
        ClientConnection {
            stream: ClientStream::new(io, &worker.timers),
            phase: Phase::Head,
            peer: Rc::new(peer),
            timer,
            head_limits: HeadLimits { fields: config.limits.request_fields, bytes: config.limits.request_head },
            head_timeout: config.timeouts.request_head,
            min_response_rate: config.limits.min_response_rate,
            worker,
            drain_guard,
        }
    }

    /// Ready when no other request follows.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        loop {
            let next = match &mut self.phase {
                Phase::Head => ready!(self.poll_head(cx)).map(|head| self.begin_request(head)),
                Phase::Processing(response, traits) => {
                    let traits = *traits;
                    let response = ready!(poll_response(response, &self.stream, &self.peer, cx));
                    response.map(|response| self.begin_response(response, traits))
                }
                Phase::Responding(sender, _) => match ready!(sender.poll(&self.stream, &self.peer, &self.timer, cx)) {
                    Ok(()) => self.end_response(),
                    Err(failure) => Err(self.abort_response(failure)),
                },
                Phase::Ended => Err(ConnectionEnd::Dropped),
            };
            match next {
                Ok(phase) => self.phase = phase,
                Err(end) => {
                    self.phase = Phase::Ended;
                    return Poll::Ready(end);
                }
            }
        }
    }

    /// Polls the head of the next request. A head that is not complete in time, or not HTTP, gets an error response.
    fn poll_head(&self, cx: &mut Context<'_>) -> Poll<Result<RequestHead, ConnectionEnd>> {
        match self.stream.poll_head(self.head_limits, cx) {
            Poll::Ready(Ok(head)) => return Poll::Ready(Ok(head)),
            Poll::Ready(Err(HeadFailure::Closed)) => {
                if self.stream.is_in_head() {
                    self.record_rejected_head(&RequestError::HeadIncomplete);
                }
            }
            Poll::Ready(Err(HeadFailure::Unusable(error))) => self.reject_head(&error),
            Poll::Pending if self.drain_guard.poll_closing_idle(cx) && !self.stream.is_in_head() => {}
            Poll::Pending if self.timer.poll_expired(cx) => {
                if self.stream.is_in_head() {
                    self.reject_head(&RequestError::HeadTimeout);
                }
                return Poll::Ready(Err(ConnectionEnd::Dropped));
            }
            Poll::Pending => return Poll::Pending,
        }
        Poll::Ready(Err(ConnectionEnd::Closed))
    }

    fn reject_head(&self, error: &RequestError) {
        self.record_rejected_head(error);
        let is_head = self.stream.with_first_line(|line| line.is_some_and(|line| line.method == "HEAD"));
        self.stream.try_send(&responses::http1_bytes(&responses::error_response(error), is_head, &self.worker.date()));
    }

    fn record_rejected_head(&self, error: &RequestError) {
        let address = self.peer.connection.address;
        self.stream.with_first_line(|line| request_record::record_rejected_head(&self.worker, address, error, line));
    }

    fn begin_request(&self, head: RequestHead) -> Phase {
        let RequestHead { parts, body, keeps_alive, expects_continue, takes_trailers, error } = head;
        self.timer.disarm();
        let is_head = parts.method == Method::HEAD;
        let traits = RequestTraits { version: parts.version, is_head, keeps_alive, takes_trailers };
        let body = self.stream.begin_request(body, expects_continue);
        Phase::Processing(ResponseFuture::start(|| handle(&self.worker, &self.peer, parts, body, error)), traits)
    }

    fn begin_response(&self, mut response: Response<ResponseBody>, traits: RequestTraits) -> Phase {
        let RequestTraits { version, is_head, keeps_alive, takes_trailers } = traits;
        let tunnel = self.peer.tunnel.take();
        let framing = Framing::of_response(&response, version, is_head);
        if framing == Framing::NoBody && tunnel.is_none() {
            response::strip_body(&mut response);
        }
        let keeps_alive = keeps_alive && !self.drain_guard.drain().has_begun() && self.stream.may_keep_alive();
        let announced_trailers = if takes_trailers { trailer_fields(response.headers()) } else { None };
        queue_informational(&self.stream, &self.peer);
        let keeps_alive = {
            let (date, mut outgoing) = (self.worker.date(), self.stream.outgoing());
            let write_more = |head: &mut Vec<u8>| response.body().write_fields(head);
            let head = outgoing.end_mut();
            http1_head::write_response_head(&response, framing, version, keeps_alive, &date, write_more, head)
        };
        let next = match tunnel {
            Some(session) => AfterResponse::End(ConnectionEnd::Tunnel(session)),
            None if keeps_alive => AfterResponse::Request,
            None => AfterResponse::End(ConnectionEnd::Closed),
        };
        self.timer.arm(self.peer.body_timeout.get());
        let sender = ResponseSender::new(response.into_body(), framing, announced_trailers, self.min_response_rate);
        Phase::Responding(sender, next)
    }

    /// Called when the response was sent.
    fn end_response(&mut self) -> Result<Phase, ConnectionEnd> {
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Responding(_, AfterResponse::End(end)) => Err(end),
            _ if self.stream.end_request() => {
                self.timer.arm(self.head_timeout);
                Ok(Phase::Head)
            }
            _ => Err(ConnectionEnd::Closed),
        }
    }

    fn abort_response(&self, failure: SendFailure) -> ConnectionEnd {
        let mut is_stalled = false;
        if let SendFailure::TimedOut(error) = failure {
            self.worker.metrics.request_error(error.kind_id());
            is_stalled = error == RequestError::Stalled;
        }
        if is_stalled || self.needs_reset() { ConnectionEnd::Reset } else { ConnectionEnd::Dropped }
    }

    /// Whether a response is unfinished of which the end of the connection ends the body: only a reset shows that the body is not
    /// whole.
    fn needs_reset(&self) -> bool {
        matches!(&self.phase, Phase::Responding(sender, _) if sender.ends_by_close())
    }

    async fn finish(self, end: ConnectionEnd) {
        let drain = self.drain_guard.drain();
        let (stream, peer, timer) = (Rc::clone(&self.stream), Rc::clone(&self.peer), Rc::clone(&self.timer));
        // Its fields cannot be moved out, because it has a `Drop`.
        drop(self);
        // Bodies hold weak references.
        let Some((mut io, early_bytes, is_read_closed)) = Rc::into_inner(stream).map(ClientStream::into_parts) else {
            return;
        };
        match end {
            ConnectionEnd::Dropped => {}
            ConnectionEnd::Reset => io.reset_on_close(),
            ConnectionEnd::Tunnel(session) => drop(session.run(io, early_bytes, &peer.timer).await),
            ConnectionEnd::Closed => {
                timer.arm(peer.body_timeout.get());
                let is_shut_down = poll_fn(|cx| match Pin::new(&mut io).poll_shutdown(cx) {
                    Poll::Pending if !timer.poll_expired(cx) => Poll::Pending,
                    polled => Poll::Ready(matches!(polled, Poll::Ready(Ok(())))),
                });
                if is_shut_down.await && !is_read_closed {
                    linger(&mut io, drain).await;
                }
            }
        }
    }
}

impl Drop for ClientConnection<'_> {
    /// The gateway stops, or the task has panicked, before the connection has ended: records a head that does not become complete,
    /// and shows the client that a response is not whole.
    fn drop(&mut self) {
        if matches!(self.phase, Phase::Head) && self.stream.is_in_head() {
            self.record_rejected_head(&RequestError::HeadIncomplete);
        }
        if self.needs_reset() {
            self.stream.reset_on_close();
        }
    }
}

/// Polls the head of the response; fails if the client has closed the connection.
fn poll_response(
    response: &mut ResponseFuture,
    stream: &ClientStream,
    peer: &Peer,
    cx: &mut Context<'_>,
) -> Poll<Result<Response<ResponseBody>, ConnectionEnd>> {
    stream.before_poll(cx);
    if let Poll::Ready(response) = response.poll_response(cx) {
        return Poll::Ready(Ok(response));
    }
    if stream.take_continue() {
        stream.outgoing().end_mut().extend_from_slice(CONTINUE);
    }
    // The queue is bounded, and takes no more while the client does not read.
    if stream.outgoing().is_empty() {
        queue_informational(stream, peer);
    }
    let is_broken = matches!(stream.poll_send(cx), Poll::Ready(Err(_)));
    if is_broken || stream.poll_closed(cx).is_ready() {
        return Poll::Ready(Err(ConnectionEnd::Dropped));
    }
    Poll::Pending
}

/// Takes the waiting informational responses, to be sent before other bytes.
fn queue_informational(stream: &ClientStream, peer: &Peer) {
    if let Some(heads) = peer.informational.take() {
        stream.outgoing().end_mut().extend_from_slice(&heads);
    }
}

/// The fields that announce trailers; `None` if there are none.
fn trailer_fields(headers: &HeaderMap) -> Option<Box<HeaderMap>> {
    let fields = || headers.get_all(TRAILER).iter().map(|names| (TRAILER, names.clone())).collect();
    headers.contains_key(TRAILER).then(|| Box::new(fields()))
}
