//! One client connection that speaks HTTP/1.1: hyper's loop of requests and answers, its limits, and its end.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, DATE};
use http::{HeaderValue, Method, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWrite;

use crate::downstream::drain::DrainGuard;
use crate::downstream::http1::connection_state::ConnectionState;
use crate::downstream::http1::io::Http1Io;
use crate::http::error::RequestError;
use crate::http::headers::SpecialFields;
use crate::io_stream::IoStream;
use crate::proxy::handler::{ResponseFuture, handle};
use crate::proxy::peer::{ConnectionInfo, Peer};
use crate::proxy::response::{self, ResponseBody};
use crate::proxy::worker_state::WorkerState;

/// Fields that hyper has room for without an allocation for each head.
const USUAL_FIELDS: usize = 100;

/// Serves a connection until it ends. While the gateway drains, an answer says that it is the last one; a connection
/// that is not released yet stays for a request that may be on its way, which would be lost if it were closed.
///
/// What reads requests has buffers. While none is awaited soon it is not there, so that a connection
/// that lies idle takes little memory.
pub async fn serve(wire: IoStream, origin: Rc<ConnectionInfo>, worker: Rc<WorkerState>, drain_guard: DrainGuard) {
    let address = origin.address;
    let (stage, shape) = {
        let config = &worker.config().compiled.config;
        let (timeouts, limits) = (&config.timeouts, &config.limits);
        let timer = worker.timers.new_timer();
        let drain = Rc::clone(drain_guard.drain());
        let stage = ConnectionState::new(timer, drain, timeouts.request_head, timeouts.body, limits.min_response_rate);
        (stage, ParserLimits { fields: limits.request_fields, head_bytes: limits.request_head })
    };
    let mut peer =
        Peer::new(origin, worker.timers.new_timer(), Rc::clone(stage.informational()), Rc::clone(stage.is_delayed()));
    peer.body_timeout = Rc::clone(stage.body_timeout());
    let peer = Rc::new(peer);
    let mut door = Http1Service { worker: Rc::clone(&worker), stage: Rc::clone(&stage), peer: Rc::clone(&peer) };
    let mut guard = Http1Io::new(wire, Rc::clone(&stage), Rc::clone(&worker), Rc::clone(&peer));
    loop {
        match wait_for_request(&guard, &stage, &drain_guard).await {
            IdleEnd::Readable => {}
            IdleEnd::Late => break,
            IdleEnd::Drained => break finish(guard, Bytes::new(), &stage, &peer).await,
        }
        let mut connection = shape.new_connection(guard, door);
        match drive_hyper(&mut connection, &stage, &drain_guard).await {
            Ok(DriveEnd::Idle) => {
                let parts = connection.into_parts();
                (guard, door) = (parts.io.into_inner(), parts.service);
                peer.repeat_refusal.take();
                // What is no request may have come, as an empty line.
                if !parts.read_buf.is_empty() {
                    guard.unread(parts.read_buf);
                }
            }
            Ok(DriveEnd::Finished) => {
                let leaving = {
                    let parts = connection.into_parts();
                    finish(parts.io.into_inner(), parts.read_buf, &stage, &peer)
                };
                break leaving.await;
            }
            Ok(DriveEnd::Late) => {
                let mut guard = connection.into_parts().io.into_inner();
                match stage.timeout_error() {
                    Some(fault @ RequestError::HeadTimeout) => guard.send_error(&fault),
                    Some(fault) => {
                        worker.metrics.request_error(fault.kind());
                        if fault == RequestError::Stalled {
                            guard.reset();
                        }
                    }
                    None => {}
                }
                break;
            }
            Err(error) => {
                tracing::debug!(%address, %error, "a client connection broke off");
                if error.is_parse() {
                    let mut guard = connection.into_parts().io.into_inner();
                    guard.send_error(&RequestError::Malformed);
                    finish(guard, Bytes::new(), &stage, &peer).await;
                }
                break;
            }
        }
    }
}

/// hyper's side of a connection; apart, so that one that lies idle has no room for it.
type Connection = Box<http1::Connection<TokioIo<Http1Io>, Http1Service>>;

/// How large a head may be.
struct ParserLimits {
    fields: usize,
    head_bytes: usize,
}

impl ParserLimits {
    fn new_connection(&self, guard: Http1Io, door: Http1Service) -> Connection {
        let mut builder = http1::Builder::new();
        if self.fields != USUAL_FIELDS {
            builder.max_headers(self.fields);
        }
        builder
            .header_read_timeout(None)
            .auto_date_header(false)
            // The guard looks for clients that go away.
            .half_close(true)
            // The read buffer may hold more than this once it has grown.
            .max_header_size(self.head_bytes)
            .max_buf_size(self.head_bytes);
        Box::new(builder.serve_connection(TokioIo::new(guard), door))
    }
}

/// How a wait for a request ends.
enum IdleEnd {
    /// There is something to read.
    Readable,
    Late,
    Drained,
}

/// Waits until something comes.
async fn wait_for_request(guard: &Http1Io, stage: &ConnectionState, drain_guard: &DrainGuard) -> IdleEnd {
    poll_fn(|cx| {
        if guard.poll_readable(cx).is_ready() {
            Poll::Ready(IdleEnd::Readable)
        } else if drain_guard.poll_closing_idle(cx) {
            Poll::Ready(IdleEnd::Drained)
        } else if stage.poll_timed_out(cx) {
            Poll::Ready(IdleEnd::Late)
        } else {
            Poll::Pending
        }
    })
    .await
}

/// How hyper's part in a connection ends.
enum DriveEnd {
    /// No other request comes for a while.
    Idle,
    /// There will be no other request.
    Finished,
    Late,
}

/// Lets hyper answer requests.
async fn drive_hyper(
    connection: &mut Connection,
    state: &ConnectionState,
    drain_guard: &DrainGuard,
) -> Result<DriveEnd, hyper::Error> {
    let mut told = false;
    poll_fn(|cx| {
        let mut poll = Pin::new(&mut **connection).poll(cx).map_ok(|()| DriveEnd::Finished);
        if poll.is_pending() && state.poll_timed_out(cx) {
            return Poll::Ready(Ok(DriveEnd::Late));
        }
        if poll.is_pending() && !told && (state.take_idled() || drain_guard.poll_closing_idle(cx) && state.is_idle()) {
            // With nothing under way, hyper is done at once. If it still reads a body behind an answer, it
            // closes the connection after that.
            told = true;
            Pin::new(&mut **connection).graceful_shutdown();
            poll = connection.poll_without_shutdown(cx).map_ok(|()| DriveEnd::Idle);
        }
        poll
    })
    .await
}

/// What comes after the last answer: the tunnel that it opened, or the end. Boxed, so that the wait for a
/// request has no room for it.
fn finish<'a>(
    mut guard: Http1Io,
    early: Bytes,
    stage: &'a ConnectionState,
    peer: &'a Peer,
) -> Pin<Box<impl Future<Output = ()> + use<'a>>> {
    Box::pin(async move {
        let Some(passage) = peer.tunnel.take() else {
            // hyper does so itself, unless the client had offered to change to another protocol, or was not there.
            let closed = poll_fn(|cx| match Pin::new(&mut guard).poll_shutdown(cx) {
                Poll::Pending if !stage.poll_timed_out(cx) => Poll::Pending,
                _ => Poll::Ready(()),
            });
            return closed.await;
        };
        guard.pass_through();
        passage.run(guard, early, &peer.timer).await;
    })
}

/// What hyper calls with every request of a connection.
struct Http1Service {
    worker: Rc<WorkerState>,
    stage: Rc<ConnectionState>,
    peer: Rc<Peer>,
}

impl Service<Request<Incoming>> for Http1Service {
    type Response = Response<TrackedBody>;
    type Error = Infallible;
    type Future = Http1ResponseFuture;

    fn call(&self, request: Request<Incoming>) -> Http1ResponseFuture {
        self.peer.repeats_previous.set(self.stage.repeats_previous());
        self.stage.begin_request(request.body().size_hint().exact());
        // What only the bytes tell.
        let fields = request.headers().len();
        let is_head = request.method() == Method::HEAD;
        let doubts = |marks: SpecialFields| self.stage.find_framing_error(marks, fields);
        let passing = ResponseFuture::start(|| handle(&self.worker, &self.peer, request, doubts));
        Http1ResponseFuture {
            response: passing,
            is_head,
            stage: Rc::clone(&self.stage),
            worker: Rc::clone(&self.worker),
        }
    }
}

/// An answer that is there, or under way.
struct Http1ResponseFuture {
    response: ResponseFuture,
    is_head: bool,
    stage: Rc<ConnectionState>,
    worker: Rc<WorkerState>,
}

impl Future for Http1ResponseFuture {
    type Output = Result<Response<TrackedBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut answer = ready!(this.response.poll_response(cx));
        if this.is_head {
            response::strip_body(&mut answer);
        }
        let stage = Rc::clone(&this.stage);
        stage.record_progress();
        let mut answer = answer.map(|body| TrackedBody { body, stage });
        if !answer.headers().keys().any(|name| *name == DATE) {
            answer.headers_mut().insert(DATE, this.worker.date());
        }
        if this.stage.is_last() && !answer.status().is_informational() {
            // hyper closes the connection behind an answer that says so.
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Poll::Ready(Ok(answer))
    }
}

/// A body that tells the guard of the socket when it has been handed over.
struct TrackedBody {
    body: ResponseBody,
    stage: Rc<ConnectionState>,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = <ResponseBody as HttpBody>::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match frame {
            Poll::Ready(_) => this.stage.record_progress(),
            Poll::Pending => this.stage.await_body(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.stage.finish_response();
    }
}
