//! One HTTP/1.1 client connection: runs hyper while requests arrive, enforces the timeouts, and ends the connection.

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

/// Fields that hyper parses without an allocation per head.
const USUAL_FIELDS: usize = 100;

/// Serves a connection until it ends. While the gateway drains, responses have `Connection: close`. An idle connection
/// stays open in the first step of the drain, because a request may be on its way and closing would lose it.
///
/// hyper's state has buffers. It exists only around requests, so that an idle connection uses little memory.
pub async fn serve(io: IoStream, connection: Rc<ConnectionInfo>, worker: Rc<WorkerState>, drain_guard: DrainGuard) {
    let address = connection.address;
    let (state, parser_limits) = {
        let config = &worker.config().compiled.config;
        let (timeouts, limits) = (&config.timeouts, &config.limits);
        let timer = worker.timers.new_timer();
        let drain = Rc::clone(drain_guard.drain());
        let state = ConnectionState::new(timer, drain, timeouts.request_head, timeouts.body, limits.min_response_rate);
        (state, ParserLimits { fields: limits.request_fields, head_bytes: limits.request_head })
    };
    let mut peer = Peer::new(
        connection,
        worker.timers.new_timer(),
        Rc::clone(state.informational()),
        Rc::clone(state.is_delayed()),
    );
    peer.body_timeout = Rc::clone(state.body_timeout());
    let peer = Rc::new(peer);
    let mut service = Http1Service { worker: Rc::clone(&worker), state: Rc::clone(&state), peer: Rc::clone(&peer) };
    let mut io = Http1Io::new(io, Rc::clone(&state), Rc::clone(&worker), Rc::clone(&peer));
    loop {
        match wait_for_request(&io, &state, &drain_guard).await {
            IdleEnd::Readable => {}
            IdleEnd::Late => break,
            IdleEnd::Drained => break finish(io, Bytes::new(), &state, &peer).await,
        }
        let mut connection = parser_limits.new_connection(io, service);
        match drive_hyper(&mut connection, &state, &drain_guard).await {
            Ok(DriveEnd::Idle) => {
                let parts = connection.into_parts();
                (io, service) = (parts.io.into_inner(), parts.service);
                // Bytes without a request may have been received, such as an empty line.
                if !parts.read_buf.is_empty() {
                    io.unread(parts.read_buf);
                }
            }
            Ok(DriveEnd::Finished) => {
                let finishing = {
                    let parts = connection.into_parts();
                    finish(parts.io.into_inner(), parts.read_buf, &state, &peer)
                };
                break finishing.await;
            }
            Ok(DriveEnd::Late) => {
                let mut io = connection.into_parts().io.into_inner();
                match state.timeout_error() {
                    Some(error @ RequestError::HeadTimeout) => io.send_error(&error),
                    Some(error) => {
                        worker.metrics.request_error(error.kind_index());
                        if error == RequestError::Stalled {
                            io.reset();
                        }
                    }
                    None => {}
                }
                break;
            }
            Err(error) => {
                tracing::debug!(%address, %error, "client connection failed");
                if error.is_parse() {
                    let mut io = connection.into_parts().io.into_inner();
                    io.send_error(&RequestError::Malformed);
                    finish(io, Bytes::new(), &state, &peer).await;
                }
                break;
            }
        }
    }
}

/// hyper's connection. Boxed, so that an idle connection uses no memory for it.
type Connection = Box<http1::Connection<TokioIo<Http1Io>, Http1Service>>;

/// Limits on a request head.
struct ParserLimits {
    fields: usize,
    head_bytes: usize,
}

impl ParserLimits {
    fn new_connection(&self, io: Http1Io, service: Http1Service) -> Connection {
        let mut builder = http1::Builder::new();
        if self.fields != USUAL_FIELDS {
            builder.max_headers(self.fields);
        }
        builder
            .header_read_timeout(None)
            .auto_date_header(false)
            // `Http1Io` notices clients that close the connection.
            .half_close(true)
            // Both, because a grown read buffer may hold more than the maximum buffer size.
            .max_header_size(self.head_bytes)
            .max_buf_size(self.head_bytes);
        Box::new(builder.serve_connection(TokioIo::new(io), service))
    }
}

/// How the wait for a request ends.
enum IdleEnd {
    /// Bytes, or the end of the stream, can be read.
    Readable,
    Late,
    Drained,
}

/// Waits until bytes arrive, without hyper.
async fn wait_for_request(io: &Http1Io, state: &ConnectionState, drain_guard: &DrainGuard) -> IdleEnd {
    poll_fn(|cx| {
        if io.poll_readable(cx).is_ready() {
            Poll::Ready(IdleEnd::Readable)
        } else if drain_guard.poll_closing_idle(cx) {
            Poll::Ready(IdleEnd::Drained)
        } else if state.poll_timed_out(cx) {
            Poll::Ready(IdleEnd::Late)
        } else {
            Poll::Pending
        }
    })
    .await
}

/// How a run of hyper ends.
enum DriveEnd {
    /// No request arrived for a while; hyper's buffers are freed.
    Idle,
    /// No other request follows.
    Finished,
    Late,
}

/// Runs hyper until the connection is idle, finished, or timed out.
async fn drive_hyper(
    connection: &mut Connection,
    state: &ConnectionState,
    drain_guard: &DrainGuard,
) -> Result<DriveEnd, hyper::Error> {
    let mut is_shutting_down = false;
    poll_fn(|cx| {
        let mut poll = Pin::new(&mut **connection).poll(cx).map_ok(|()| DriveEnd::Finished);
        if poll.is_pending() && state.poll_timed_out(cx) {
            return Poll::Ready(Ok(DriveEnd::Late));
        }
        if poll.is_pending()
            && !is_shutting_down
            && (state.take_idled() || drain_guard.poll_closing_idle(cx) && state.is_idle())
        {
            // Without a request in flight, hyper finishes at once. If it still reads a request body behind the response, it
            // closes the connection after that.
            is_shutting_down = true;
            Pin::new(&mut **connection).graceful_shutdown();
            poll = connection.poll_without_shutdown(cx).map_ok(|()| DriveEnd::Idle);
        }
        poll
    })
    .await
}

/// Continues after the last response: runs the tunnel that it opened, or closes the connection. Boxed, so that a waiting
/// connection uses no memory for it.
fn finish<'a>(
    mut io: Http1Io,
    early: Bytes,
    state: &'a ConnectionState,
    peer: &'a Peer,
) -> Pin<Box<impl Future<Output = ()> + use<'a>>> {
    Box::pin(async move {
        let Some(tunnel) = peer.tunnel.take() else {
            // hyper shuts down itself, unless the client had offered an upgrade, or hyper was not running.
            let shutdown = poll_fn(|cx| match Pin::new(&mut io).poll_shutdown(cx) {
                Poll::Pending if !state.poll_timed_out(cx) => Poll::Pending,
                _ => Poll::Ready(()),
            });
            return shutdown.await;
        };
        io.pass_through();
        tunnel.run(io, early, &peer.timer).await;
    })
}

/// The hyper service of a connection.
struct Http1Service {
    worker: Rc<WorkerState>,
    state: Rc<ConnectionState>,
    peer: Rc<Peer>,
}

impl Service<Request<Incoming>> for Http1Service {
    type Response = Response<TrackedBody>;
    type Error = Infallible;
    type Future = Http1ResponseFuture;

    fn call(&self, request: Request<Incoming>) -> Http1ResponseFuture {
        self.state.begin_request(request.body().size_hint().exact());
        let fields = request.headers().len();
        let is_head = request.method() == Method::HEAD;
        let find_error = |special: SpecialFields| self.state.find_framing_error(special, fields);
        let response = ResponseFuture::start(|| handle(&self.worker, &self.peer, request, find_error));
        Http1ResponseFuture { response, is_head, state: Rc::clone(&self.state), worker: Rc::clone(&self.worker) }
    }
}

/// The response to one request.
struct Http1ResponseFuture {
    response: ResponseFuture,
    is_head: bool,
    state: Rc<ConnectionState>,
    worker: Rc<WorkerState>,
}

impl Future for Http1ResponseFuture {
    type Output = Result<Response<TrackedBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut response = ready!(this.response.poll_response(cx));
        if this.is_head {
            response::strip_body(&mut response);
        }
        let state = Rc::clone(&this.state);
        state.record_progress();
        let mut response = response.map(|body| TrackedBody { body, state });
        if !response.headers().keys().any(|name| *name == DATE) {
            response.headers_mut().insert(DATE, this.worker.date());
        }
        if this.state.is_last() && !response.status().is_informational() {
            // hyper closes the connection behind a response with this field.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Poll::Ready(Ok(response))
    }
}

/// A response body that reports its progress to the connection state.
struct TrackedBody {
    body: ResponseBody,
    state: Rc<ConnectionState>,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = <ResponseBody as HttpBody>::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match frame {
            Poll::Ready(_) => this.state.record_progress(),
            Poll::Pending => this.state.await_body(),
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
        self.state.finish_response();
    }
}
