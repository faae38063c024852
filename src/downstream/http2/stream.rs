//! One HTTP/2 stream above h2: the request on it, the answer, and what is left of the request's body
//! when the answer is over.
//!
//! An answer that waits for nothing, such as a refusal, is given within the task of its connection: when all requests
//! that have come are read, so that their answers leave together. Any other gets a task of its own. A stream on which
//! nothing moves is reset. And a body that nobody wants any more is read on for a moment: a client that is told to stop
//! in the middle of sending may drop the answer with the rest.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header;
use http::{Method, Request, Response};
use http_body::Body as _;

use crate::downstream::http2::body_sender::BodySender;
use crate::downstream::http2::flood_guard::HeadRejection;
use crate::downstream::http2::monitor::Monitor;
use crate::downstream::http2::tunnel;
use crate::downstream::http2::tunnel::StreamTunnel;
use crate::http::error::RequestError;
use crate::http::headers;
use crate::informational;
use crate::proxy::handler::{ResponseFuture, handle};
use crate::proxy::peer::{ConnectionInfo, Peer};
use crate::proxy::request_record;
use crate::proxy::response::{self, ResponseBody};
use crate::proxy::worker_state::WorkerState;

/// How much of an unwanted body is read, and for how long; then the client's window stays shut, and the
/// stream is reset. Some clients drop an answer that they find together with the reset, so one that gets no time on its
/// processor is given some; what it keeps is one of its own streams.
const DRAIN_MAX_BYTES: usize = 256 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// What streams need that a connection keeps for those to come.
const FREE_PEERS_MAX: usize = 32;

/// What takes an answer to its client.
type Respond = SendResponse<Bytes>;

/// All streams of a connection.
pub struct Streams {
    shared: Rc<StreamContext>,
    /// Answers that are there, and not sent yet.
    ready_responses: Vec<(Response<ResponseBody>, Respond)>,
}

struct StreamContext {
    worker: Rc<WorkerState>,
    /// The connection as a whole.
    connection_peer: Peer,
    monitor: Rc<Monitor>,
    /// For streams to come.
    free_peers: RefCell<Vec<Rc<Peer>>>,
}

impl Streams {
    pub fn new(worker: Rc<WorkerState>, origin: Rc<ConnectionInfo>, session: Rc<Monitor>) -> Streams {
        let whole = Peer::new(origin, worker.timers.new_timer(), Rc::default(), Rc::default());
        let shared = StreamContext { worker, connection_peer: whole, monitor: session, free_peers: RefCell::default() };
        Streams { shared: Rc::new(shared), ready_responses: Vec::new() }
    }

    /// Takes a request.
    pub fn accept(&mut self, mut request: Request<RecvStream>, mut respond: Respond) {
        let mut flaw = None;
        match self.shared.monitor.rejection_of(respond.stream_id().into()) {
            None => {}
            // The client may ask again.
            Some(HeadRejection::ConnectionFull) => return respond.send_reset(Reason::REFUSED_STREAM),
            Some(HeadRejection::TooLarge) => flaw = Some(RequestError::HeadTooLarge),
        }
        let mut tunnel = None;
        let is_connect = request.method() == Method::CONNECT;
        if is_connect && !tunnel::prepare_connect(&mut request) {
            // It had a body, where none can be.
            return respond.send_reset(Reason::INTERNAL_ERROR);
        }
        let is_head = request.method() == Method::HEAD;
        let (parts, stream) = request.into_parts();
        let mut body = None;
        if is_connect {
            tunnel = Some(stream);
        } else if !stream.is_end_stream() {
            body = Some(stream);
        }
        let (peer, is_bare) = (self.shared.take_peer(), body.is_none());
        let request = Request::from_parts(parts, body);
        // Chunks are unknown here, and so is a length beside them.
        let mut passing = ResponseFuture::start(|| handle(&self.shared.worker, &peer, request, |_marks| flaw));
        if is_bare && let Some(mut answer) = passing.take_ready() {
            self.shared.recycle_peer(peer);
            if is_head {
                response::strip_body(&mut answer);
            }
            return self.ready_responses.push((answer, respond));
        }
        self.shared.spawn_task(StreamState::AwaitingResponse { response: passing, is_head, tunnel }, respond, peer);
    }

    /// Records requests that h2 has answered by itself.
    pub fn record_rejected_by_h2(&self) {
        let StreamContext { worker, connection_peer: whole, monitor: session, .. } = &*self.shared;
        for _ in 0..session.take_unrecorded_rejections() {
            request_record::record_rejected_head(worker, whole.connection.address, &RequestError::HeadTooLarge);
        }
    }

    /// Hands over the answers that are there; `false` if there are none. h2 would send each by itself if it were given
    /// them one by one, with a system call for each.
    pub fn send_ready_responses(&mut self) -> bool {
        if self.ready_responses.is_empty() {
            return false;
        }
        let Streams { shared, ready_responses: at_hand } = self;
        shared.worker.share_end_time(|| {
            at_hand.drain(..).for_each(|(answer, respond)| shared.send_local_response(answer, respond))
        });
        true
    }
}

impl StreamContext {
    fn take_peer(&self) -> Rc<Peer> {
        let free = self.free_peers.borrow_mut().pop();
        free.unwrap_or_else(|| Rc::new(Peer::for_stream(&self.connection_peer, self.worker.timers.new_timer())))
    }

    fn recycle_peer(&self, peer: Rc<Peer>) {
        // A body that somebody still has would be left with a stream to come, and hints told there. So they go with the peer.
        let is_free = peer.body_drain.as_ref().is_none_or(|unwanted| Rc::strong_count(unwanted) == 1)
            && Rc::strong_count(&peer.informational) == 1;
        let mut free = self.free_peers.borrow_mut();
        if is_free && free.len() < FREE_PEERS_MAX {
            free.push(peer);
        }
    }

    /// Lets a task look after a stream.
    fn spawn_task(self: &Rc<Self>, stage: StreamState, respond: Respond, peer: Rc<Peer>) {
        self.monitor.task_started();
        let work = StreamTask { state: stage, respond, peer, shared: Rc::clone(self), informational_bytes: 0 };
        drop(tokio::task::spawn_local(work));
    }

    /// Gives an answer of the gateway's own.
    fn send_local_response(self: &Rc<Self>, answer: Response<ResponseBody>, mut respond: Respond) {
        let Some((mut sending, mut body)) = self.send_head(answer, &mut respond, false) else { return };
        // Some of the client's window at least must be open: else the stream is looked after.
        sending.reserve_capacity(1);
        if sending.capacity() > 0
            && let Some(bytes) = body.take_local()
        {
            // Fails if the client has reset the stream meanwhile.
            let _ = sending.send_data(bytes, true);
            return;
        }
        let peer = self.take_peer();
        peer.body_timeout.set(self.worker.config().compiled.config.timeouts.body);
        peer.timer.arm(peer.body_timeout.get());
        self.spawn_task(StreamState::Body(BodySender::new(body, sending)), respond, peer);
    }

    /// Sends the head of an answer; `None` if nothing follows. A stream that `stays_open` does not end with it.
    fn send_head(
        &self,
        answer: Response<ResponseBody>,
        respond: &mut Respond,
        stays_open: bool,
    ) -> Option<(SendStream<Bytes>, ResponseBody)> {
        let (mut head, body) = answer.into_parts();
        if !headers::answer_on_stream(&mut head.headers) {
            head.headers.insert(header::DATE, self.worker.date());
        }
        let is_all = !stays_open && body.is_end_stream();
        match respond.send_response(Response::from_parts(head, ()), is_all) {
            Ok(sending) => (!is_all).then_some((sending, body)),
            Err(error) => {
                // The client has reset the stream; nothing else is wrong with answers.
                tracing::debug!(%error, "an answer could not be given");
                respond.send_reset(Reason::INTERNAL_ERROR);
                None
            }
        }
    }
}

/// All that is to be done for a stream. Dropped, it resets a stream that is not at its end.
struct StreamTask {
    state: StreamState,
    respond: Respond,
    peer: Rc<Peer>,
    shared: Rc<StreamContext>,
    /// So many bytes of informational answers were told.
    informational_bytes: usize,
}

enum StreamState {
    /// There is no answer yet; `tunnel` is what the client sends if a CONNECT is granted.
    AwaitingResponse {
        response: ResponseFuture,
        is_head: bool,
        tunnel: Option<RecvStream>,
    },
    Body(BodySender),
    Tunnel(Box<StreamTunnel>),
    /// What is left is the rest of the request's body, of which so many bytes have been read.
    DrainingRequest(usize),
}

impl Future for StreamTask {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        loop {
            match &mut this.state {
                StreamState::AwaitingResponse { response: passing, is_head, tunnel } => {
                    let answer = passing.poll_response(cx);
                    let hints = this.peer.informational.take();
                    // The client may have changed its mind.
                    if (answer.is_pending() || hints.is_some()) && this.respond.poll_reset(cx).is_ready() {
                        return Poll::Ready(());
                    }
                    if let Some(hints) = hints {
                        send_informational(&hints, &mut this.informational_bytes, &mut this.respond);
                    }
                    let mut answer = ready!(answer);
                    if *is_head {
                        response::strip_body(&mut answer);
                    }
                    let tunnel = tunnel.take();
                    this.state = this.begin_response(answer, tunnel);
                }
                StreamState::Body(outflow) => {
                    if outflow.poll(&this.peer, cx).is_pending() {
                        return this.poll_stalled(cx);
                    }
                    this.state = this.begin_request_drain();
                }
                StreamState::Tunnel(strand) => return strand.poll(cx),
                StreamState::DrainingRequest(read) => return poll_request_drain(&this.peer, read, cx),
            }
        }
    }
}

impl StreamTask {
    /// Sends the head of an answer; what is to be done next.
    fn begin_response(&mut self, mut answer: Response<ResponseBody>, tunnel: Option<RecvStream>) -> StreamState {
        let (shared, peer) = (&self.shared, &self.peer);
        peer.timer.arm(peer.body_timeout.get());
        if let Some((inward, passage)) = tunnel.zip(peer.tunnel.take()) {
            let Some((outward, _)) = shared.send_head(answer, &mut self.respond, true) else {
                return self.begin_request_drain();
            };
            shared.monitor.tunnel_opened();
            return StreamState::Tunnel(Box::new(StreamTunnel::new(outward, inward, passage, peer)));
        }
        if !answer.body().is_end_stream() {
            response::set_content_length(&mut answer);
        }
        match shared.send_head(answer, &mut self.respond, false) {
            Some((sending, body)) => StreamState::Body(BodySender::new(body, sending)),
            None => self.begin_request_drain(),
        }
    }

    /// The answer is over.
    fn begin_request_drain(&mut self) -> StreamState {
        // What belongs to the request goes first: only then it is known what nobody wants.
        self.state = StreamState::DrainingRequest(0);
        self.peer.timer.arm(DRAIN_TIMEOUT);
        StreamState::DrainingRequest(0)
    }

    /// Nothing more of the answer leaves for now.
    fn poll_stalled(&self, cx: &Context<'_>) -> Poll<()> {
        let Peer { timer, body_drain: unwanted, body_timeout: body_limit, .. } = &*self.peer;
        if !timer.poll_expired(cx) {
            return Poll::Pending;
        }
        // It waits for as long as the request's body moves.
        if !unwanted.as_ref().is_some_and(|unwanted| unwanted.take_progress()) {
            return Poll::Ready(());
        }
        timer.arm(body_limit.get());
        let _ = timer.poll_expired(cx);
        Poll::Pending
    }
}

/// Passes informational answers on. No window holds them up, so there is an end to those that one request may get.
fn send_informational(heads: &[u8], hinted: &mut usize, respond: &mut Respond) {
    *hinted += heads.len();
    if *hinted <= informational::QUEUE_MAX_BYTES {
        // One that can not be told is no more than a hint.
        informational::parse_heads(heads).for_each(|head| drop(respond.send_informational(head)));
    }
}

fn poll_request_drain(peer: &Peer, read: &mut usize, cx: &mut Context<'_>) -> Poll<()> {
    let Some(unwanted) = peer.body_drain.as_ref().filter(|unwanted| unwanted.has_body()) else {
        return Poll::Ready(());
    };
    while *read < DRAIN_MAX_BYTES {
        match unwanted.poll_chunk(cx) {
            Poll::Ready(Some(bytes)) => *read += bytes,
            Poll::Ready(None) => return Poll::Ready(()),
            Poll::Pending => break,
        }
    }
    if peer.timer.poll_expired(cx) { Poll::Ready(()) } else { Poll::Pending }
}

impl Drop for StreamTask {
    fn drop(&mut self) {
        // What belongs to the request first: it gives up its place.
        let stage = std::mem::replace(&mut self.state, StreamState::DrainingRequest(0));
        if let StreamState::Tunnel(_) = stage {
            self.shared.monitor.tunnel_ended();
        }
        drop(stage);
        let Peer { timer, body_drain: unwanted, tunnel: passage, informational: interim, .. } = &*self.peer;
        drop(interim.take());
        if let Some(unwanted) = unwanted {
            unwanted.clear();
        }
        // A stream may be reset between the answer that opens a tunnel and the tunnel.
        drop(passage.take());
        // What a task has of memory lasts as long as anybody could wake it.
        timer.detach();
        self.shared.recycle_peer(Rc::clone(&self.peer));
        self.shared.monitor.task_ended();
    }
}
