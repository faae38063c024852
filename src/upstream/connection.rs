//! `UpstreamConnection`: what one request is sent on, an HTTP/1.1 connection or a stream of a shared HTTP/2 connection.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper_util::rt::TokioIo;

use super::http1::{Http1Connection, Http1Error};
use super::http2::{self, Http2Stream};
use super::request_body::RequestBody;
use super::request_limit::ConnectionPermit;
use super::tunnel::{Tunnel, UpstreamIo};
use crate::informational::InformationalQueue;

/// A connection, or a stream of one, for one request.
pub enum UpstreamConnection {
    /// An HTTP/1.1 connection, used by one request at a time.
    Http1(Box<Http1Connection>),
    /// A stream of a shared HTTP/2 connection.
    Http2(Box<Http2Stream>),
}

/// Why there is no response, or why its body broke off.
#[derive(Debug)]
pub enum ConnectionError {
    Http1(Http1Error),
    Http2(hyper::Error),
}

impl UpstreamConnection {
    /// Writes the request target in the form of this protocol; an earlier attempt may have used the other one.
    pub fn prepare_request(&self, request: &mut Request<RequestBody>) {
        if let UpstreamConnection::Http1(_) = self {
            http2::to_http1_form(request);
        }
    }

    /// Sends a request and waits for the head of the response. Over HTTP/1.1, 1xx responses before it go to `informational`.
    pub async fn send(
        &mut self,
        request: Box<Request<RequestBody>>,
        informational: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<()>, ConnectionError> {
        match self {
            UpstreamConnection::Http1(connection) => {
                connection.send(request, informational).await.map_err(ConnectionError::Http1)
            }
            // Boxed, so that HTTP/1.1 requests take no memory for it.
            UpstreamConnection::Http2(stream) => Box::pin(stream.send(request)).await.map_err(ConnectionError::Http2),
        }
    }

    /// Sets the connection permit of the server; a shared connection that has a permit keeps it.
    /// The address of the server; `None` for a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            UpstreamConnection::Http1(connection) => connection.target.address,
            UpstreamConnection::Http2(stream) => stream.address(),
        }
    }

    pub fn set_permit(&mut self, permit: Option<ConnectionPermit>) {
        match self {
            UpstreamConnection::Http1(connection) => connection.permit = permit,
            UpstreamConnection::Http2(stream) => stream.set_permit(permit),
        }
    }

    /// Whether a request can be sent now.
    pub fn is_ready(&mut self) -> bool {
        match self {
            UpstreamConnection::Http1(connection) => connection.is_ready(),
            UpstreamConnection::Http2(_) => true,
        }
    }

    /// The last request, if none of it was sent.
    pub fn take_unsent(&mut self) -> Option<Box<Request<RequestBody>>> {
        match self {
            UpstreamConnection::Http1(connection) => connection.take_unsent(),
            UpstreamConnection::Http2(stream) => stream.take_unsent(),
        }
    }

    /// The last request, to be sent again: over HTTP/1.1 if it had no body, over HTTP/2 if its body can be replayed.
    pub fn take_replay(&mut self) -> Option<Box<Request<RequestBody>>> {
        match self {
            UpstreamConnection::Http1(connection) => connection.take_replay(),
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
    /// ended before the head of a response.
    pub fn take_retryable(
        &mut self,
        error: &ConnectionError,
        is_repeatable: bool,
    ) -> Option<Box<Request<RequestBody>>> {
        let may_retry = error.is_unprocessed() || is_repeatable && error.is_closed_without_response();
        may_retry.then(|| self.take_replay()).flatten()
    }

    /// Polls the next frame of the response body.
    pub fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ConnectionError>>> {
        match self {
            UpstreamConnection::Http1(connection) => connection.poll_body(cx).map_err(ConnectionError::Http1),
            UpstreamConnection::Http2(stream) => stream.poll_body(cx).map_err(ConnectionError::Http2),
        }
    }

    /// Whether the response has ended.
    pub fn has_response_ended(&self) -> bool {
        match self {
            UpstreamConnection::Http1(connection) => connection.body().has_ended(),
            // hyper yields no more frames of a stream that was reset with NO_ERROR, but only END_STREAM ends a message (RFC
            // 9113, section 8.1).
            UpstreamConnection::Http2(stream) => stream.body().is_some_and(Body::is_end_stream),
        }
    }

    /// The length of the rest of the response body.
    pub fn body_size_hint(&self) -> SizeHint {
        match self {
            UpstreamConnection::Http1(connection) => connection.body().size_hint(),
            UpstreamConnection::Http2(stream) => stream.body().map(Body::size_hint).unwrap_or_default(),
        }
    }

    /// The tunnel, after a response that switched protocols.
    pub async fn into_tunnel(self) -> Option<Tunnel> {
        match self {
            UpstreamConnection::Http1(mut connection) => {
                let permit = connection.permit.take();
                let (stream, early_bytes, counted) = connection.into_stream();
                Some(Tunnel::new(UpstreamIo::Http1(stream, (permit, counted)), early_bytes))
            }
            UpstreamConnection::Http2(stream) => {
                let (io, stream) = Box::pin(stream.into_stream()).await?;
                Some(Tunnel::new(UpstreamIo::Http2(TokioIo::new(io), stream), Bytes::new()))
            }
        }
    }
}

impl ConnectionError {
    /// Whether the server states that it has not processed the request.
    pub fn is_unprocessed(&self) -> bool {
        match self {
            ConnectionError::Http1(_) => false,
            ConnectionError::Http2(error) => http2::is_unprocessed(error),
        }
    }

    /// Whether the body of the request has failed, and not the server.
    pub fn is_of_request_body(&self) -> bool {
        matches!(self, ConnectionError::Http1(Http1Error::RequestBody(_)))
    }

    /// Whether the connection ended before the head of a response.
    pub fn is_closed_without_response(&self) -> bool {
        match self {
            ConnectionError::Http1(error) => matches!(error, Http1Error::Unusable | Http1Error::Closed),
            ConnectionError::Http2(error) => http2::is_connection_lost(error),
        }
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionError::Http1(error) => error.fmt(f),
            ConnectionError::Http2(error) => f.write_str(&http2::describe(error)),
        }
    }
}

impl std::error::Error for ConnectionError {}
