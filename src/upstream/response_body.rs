//! The body of an upstream response. Nothing is buffered: every frame moves when the client takes it.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep_until};

use super::connection::{ConnectionError, UpstreamConnection};
use super::pool::ActiveRequest;
use super::request_limit::RequestPermit;
use super::tunnel::Tunnel;

/// The body of an upstream response. It drives the connection it comes from, and returns the connection to the pool at
/// its end. If it is dropped earlier, the connection is dropped too, which cancels the request.
pub struct UpstreamBody {
    /// `None` once the response has ended.
    source: Option<ResponseSource>,
    /// When the whole request times out.
    deadline: Option<Pin<Box<Sleep>>>,
}

/// The connection of a response, and what is held until the response ends.
pub struct ResponseSource {
    pub connection: UpstreamConnection,
    pub active: ActiveRequest,
    pub request_permit: Option<RequestPermit>,
}

/// Why a response ended early.
#[derive(Debug)]
pub enum UpstreamBodyError {
    Upstream(ConnectionError),
    /// The upstream reset the stream with NO_ERROR before the end of the response.
    Reset,
    /// The whole request took too long.
    TimedOut,
    /// A rule breaks off transfers that exceed it.
    LimitExceeded,
}

impl UpstreamBody {
    pub fn new(source: ResponseSource, deadline: Option<Instant>) -> UpstreamBody {
        let has_ended = source.connection.has_response_ended();
        let mut upstream_body = UpstreamBody { source: Some(source), deadline: None };
        if has_ended {
            upstream_body.release();
        } else if let Some(deadline) = deadline {
            upstream_body.deadline = Some(Box::pin(sleep_until(deadline.into())));
        }
        upstream_body
    }

    /// A response that switched protocols: its connection is not used again.
    pub fn upgraded(source: ResponseSource) -> UpstreamBody {
        UpstreamBody { source: Some(source), deadline: None }
    }

    /// The byte stream, after a response that switched protocols.
    pub async fn into_tunnel(mut self) -> Option<Tunnel> {
        let ResponseSource { connection, active, request_permit } = self.source.take()?;
        Some(connection.into_tunnel().await?.holding(active, request_permit))
    }

    fn release(&mut self) {
        if let Some(ResponseSource { connection, active, request_permit }) = self.source.take() {
            active.server().release(connection);
            drop(request_permit);
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = UpstreamBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamBodyError>>> {
        let this = &mut *self;
        // Checked even if a frame is available: a response that never pauses has to end too.
        if this.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready()) {
            (this.source, this.deadline) = (None, None);
            return Poll::Ready(Some(Err(UpstreamBodyError::TimedOut)));
        }
        let Some(source) = &mut this.source else { return Poll::Ready(None) };
        let frame = source.connection.poll_body(cx);
        if let Poll::Ready(None) = frame {
            if !source.connection.has_response_ended() {
                this.source = None;
                return Poll::Ready(Some(Err(UpstreamBodyError::Reset)));
            }
            this.release();
        }
        frame.map_err(UpstreamBodyError::Upstream)
    }

    fn is_end_stream(&self) -> bool {
        self.source.as_ref().is_none_or(|source| source.connection.has_response_ended())
    }

    fn size_hint(&self) -> SizeHint {
        self.source.as_ref().map_or(SizeHint::with_exact(0), |source| source.connection.body_size_hint())
    }
}

impl Drop for UpstreamBody {
    /// A body of known length is often not polled beyond its last byte.
    fn drop(&mut self) {
        if self.is_end_stream() {
            self.release();
        }
    }
}

impl fmt::Display for UpstreamBodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UpstreamBodyError::Upstream(error) => write!(f, "{error}"),
            UpstreamBodyError::Reset => f.write_str("the stream was reset with NO_ERROR before END_STREAM"),
            UpstreamBodyError::LimitExceeded => f.write_str("the transfer exceeds a limit of bytes"),
            UpstreamBodyError::TimedOut => f.write_str("the whole request took longer than `timeouts.request`"),
        }
    }
}

impl std::error::Error for UpstreamBodyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            UpstreamBodyError::Upstream(error) => Some(error),
            UpstreamBodyError::Reset | UpstreamBodyError::TimedOut | UpstreamBodyError::LimitExceeded => None,
        }
    }
}
