//! `UpstreamConnection`: what one request is sent on, an HTTP/1.1 connection or a stream of a shared HTTP/2 connection.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use super::http1::{Http1Connection, SendError};
use super::http2::{self, Http2Stream};
use super::request_body::RequestBody;
use super::request_limit::ConnectionPermit;
use super::tunnel::Tunnel;
use super::tunnel::UpstreamIo;
use crate::informational::InformationalQueue;

/// A connection, or a stream of one, for one request.
pub enum UpstreamConnection {
    /// An HTTP/1.1 connection, used by one request at a time.
    Http1(Box<Http1Connection>),
    /// A stream of a shared HTTP/2 connection.
    Http2(Http2Stream),
}

impl UpstreamConnection {
    /// Writes the request target in the form of this protocol; an earlier attempt may have used the other one.
    pub fn prepare_request(&self, request: &mut Request<RequestBody>) {
        if let UpstreamConnection::Http1(_) = self {
            http2::to_http1_form(request);
        }
    }

    /// Sends a request and waits for the head of the response: see [`Http1Connection::send`].
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(
        &mut self,
        request: Box<Request<RequestBody>>,
        captures_head: bool,
        informational: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<Incoming>, SendError> {
        match self {
            UpstreamConnection::Http1(connection) => connection.send(request, captures_head, informational).await,
            // Boxed, so that HTTP/1.1 requests take no memory for it.
            UpstreamConnection::Http2(stream) => Box::pin(stream.send(request)).await,
        }
    }

    /// Sets the connection permit of the server; a shared connection that has a permit keeps it.
    pub fn set_permit(&mut self, permit: Option<ConnectionPermit>) {
        match self {
            UpstreamConnection::Http1(connection) => connection.permit = permit,
            UpstreamConnection::Http2(stream) => stream.set_permit(permit),
        }
    }

    /// The last request, to be sent again: over HTTP/1.1 if it was sent with `captures_head`, over HTTP/2 if its body can be
    /// replayed.
    pub fn take_replay(&mut self) -> Option<Request<RequestBody>> {
        match self {
            UpstreamConnection::Http1(connection) => connection.replay_request(),
            UpstreamConnection::Http2(stream) => stream.take_replay(),
        }
    }

    /// Called when the head of the response has arrived.
    pub fn on_response_head(&mut self, now: Instant) {
        match self {
            UpstreamConnection::Http1(connection) => connection.idle_since = Some(now),
            UpstreamConnection::Http2(stream) => stream.on_response_head(now),
        }
    }

    /// Returns the last request if it may be sent again after `error`. If `is_repeatable`, also when the connection
    /// ended before the first byte of a response.
    pub fn take_retryable(&mut self, error: &hyper::Error, is_repeatable: bool) -> Option<Request<RequestBody>> {
        match self {
            UpstreamConnection::Http1(connection) if is_repeatable && closed_before_response(error) => {
                connection.replay_request()
            }
            UpstreamConnection::Http2(stream) if http2::is_unprocessed(error) => stream.take_replay(),
            UpstreamConnection::Http2(stream)
                if is_repeatable && (closed_before_response(error) || http2::is_connection_lost(error)) =>
            {
                stream.take_replay()
            }
            UpstreamConnection::Http1(_) | UpstreamConnection::Http2(_) => None,
        }
    }

    /// Polls the next frame of the response body.
    pub fn poll_body(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match self {
            UpstreamConnection::Http1(connection) => connection.poll_body(body, cx),
            UpstreamConnection::Http2(_) => Pin::new(body).poll_frame(cx),
        }
    }

    /// Whether the body of a response is complete, once it yields no more frames. hyper treats a stream that was reset
    /// with NO_ERROR as ended, but only END_STREAM ends a message (RFC 9113, section 8.1).
    pub fn is_complete(&self, body: &Incoming) -> bool {
        match self {
            UpstreamConnection::Http1(_) => true,
            UpstreamConnection::Http2(_) => body.is_end_stream(),
        }
    }

    /// The tunnel, after a response that switched protocols.
    pub async fn into_tunnel(self) -> Option<Tunnel> {
        match self {
            UpstreamConnection::Http1(mut connection) => {
                let permit = connection.permit.take();
                let (stream, early_bytes, counted) = connection.into_stream().await?;
                Some(Tunnel::new(UpstreamIo::Http1(stream, (permit, counted)), early_bytes))
            }
            UpstreamConnection::Http2(stream) => {
                let (io, stream) = Box::pin(stream.into_stream()).await?;
                Some(Tunnel::new(UpstreamIo::Http2(TokioIo::new(io), stream), Bytes::new()))
            }
        }
    }
}

/// Whether the connection ended before the first byte of a response.
fn closed_before_response(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || is_reset(error)
}

fn is_reset(error: &hyper::Error) -> bool {
    use std::error::Error;
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    source.is_some_and(|error| matches!(error.kind(), BrokenPipe | ConnectionReset))
}
