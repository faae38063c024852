//! What carries one request and its answer: a connection of its own, or a stream of a shared one.

use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use super::http1::{Connection, SendError};
use super::http2::{self, Http2Stream};
use super::request_upload::Upload;
use super::server_pool::ConnectionPermit;
use super::tunnel::Tunnel;
use super::tunnel_io::FarEnd;
use crate::informational::InformationalQueue;

pub enum UpstreamConnection {
    /// HTTP/1.1.
    Alone(Box<Connection>),
    /// HTTP/2.
    Shared(Http2Stream),
}

/// Where a connection leads, and since when that is known.
#[derive(Clone, Copy, Debug)]
pub struct ResolvedTarget {
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// Of the server's addresses, at which this was one of them.
    pub era: u32,
}

impl UpstreamConnection {
    /// Writes the target as it is sent here; it may have been addressed to a server that speaks otherwise.
    pub fn address(&self, request: &mut Request<Upload>) {
        if let UpstreamConnection::Alone(_) = self {
            http2::origin_form(request);
        }
    }

    /// Sends a request and waits for the head of its answer: see [`Connection::send`].
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(
        &mut self,
        request: Box<Request<Upload>>,
        keeps: bool,
        interim: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<Incoming>, SendError> {
        match self {
            UpstreamConnection::Alone(connection) => connection.send(request, keeps, interim).await,
            // Apart, so that the others take no memory for it.
            UpstreamConnection::Shared(lease) => Box::pin(lease.send(request)).await,
        }
    }

    /// Takes room among the connections to its server; a shared one keeps what it has.
    pub fn occupy(&mut self, slot: Option<ConnectionPermit>) {
        match self {
            UpstreamConnection::Alone(connection) => connection.slot = slot,
            UpstreamConnection::Shared(lease) => lease.occupy(slot),
        }
    }

    /// The last request, where it was sent with `keeps`, or over HTTP/2 and nothing of its body is lost.
    pub fn sent(&mut self) -> Option<Request<Upload>> {
        match self {
            UpstreamConnection::Alone(connection) => connection.sent(),
            UpstreamConnection::Shared(lease) => lease.sent(),
        }
    }

    /// The head of the answer has come.
    pub fn answered(&mut self, now: Instant) {
        match self {
            UpstreamConnection::Alone(connection) => connection.idle_since = Some(now),
            UpstreamConnection::Shared(lease) => lease.answered(now),
        }
    }

    /// The last request, if it may be sent once more after this error. `spare`: it may be if the connection
    /// ended before a byte of the answer came.
    pub fn again(&mut self, error: &hyper::Error, spare: bool) -> Option<Request<Upload>> {
        match self {
            UpstreamConnection::Alone(connection) if spare && ended_early(error) => connection.sent(),
            UpstreamConnection::Shared(lease) if http2::is_unprocessed(error) => lease.sent(),
            UpstreamConnection::Shared(lease) if spare && (ended_early(error) || http2::is_cut(error)) => lease.sent(),
            UpstreamConnection::Alone(_) | UpstreamConnection::Shared(_) => None,
        }
    }

    /// The next piece of the body of an answer.
    pub fn poll_body(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match self {
            UpstreamConnection::Alone(connection) => connection.poll_body(body, cx),
            UpstreamConnection::Shared(_) => Pin::new(body).poll_frame(cx),
        }
    }

    /// Whether the body of a response is complete, once it gives no more. hyper takes a stream that was reset with NO_ERROR
    /// for one that has ended, but only END_STREAM ends a message (RFC 9113, section 8.1).
    pub fn is_complete(&self, body: &Incoming) -> bool {
        match self {
            UpstreamConnection::Alone(_) => true,
            UpstreamConnection::Shared(_) => body.is_end_stream(),
        }
    }

    /// The stream, after an answer that switched protocols.
    pub async fn into_tunnel(self) -> Option<Tunnel> {
        match self {
            UpstreamConnection::Alone(mut connection) => {
                let slot = connection.slot.take();
                let (wire, early) = connection.into_stream().await?;
                Some(Tunnel::new(FarEnd::Connection(wire, slot), early))
            }
            UpstreamConnection::Shared(lease) => {
                let (stream, lease) = Box::pin(lease.into_stream()).await?;
                Some(Tunnel::new(FarEnd::Stream(TokioIo::new(stream), lease), Bytes::new()))
            }
        }
    }
}

/// Whether the connection ended before a byte of the answer came.
fn ended_early(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || is_reset(error)
}

fn is_reset(error: &hyper::Error) -> bool {
    use std::error::Error;
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    source.is_some_and(|error| matches!(error.kind(), BrokenPipe | ConnectionReset))
}
