//! The body of an upstream's answer on its way back: nothing is collected, every piece moves when the
//! client takes it.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep_until};

use super::connection::UpstreamConnection;
use super::request_limit::RequestPermit;
use super::server_pool::ActiveRequest;
use super::tunnel::Tunnel;

/// The body of an upstream's answer. It drives the connection it comes from, and gives it back to
/// the pool at its end; dropped before, it takes the connection with it, which cancels the request.
pub struct Download {
    body: Incoming,
    source: Option<ResponseSource>,
    /// When it is broken off, come what may.
    ends: Option<Pin<Box<Sleep>>>,
}

/// Where it comes from, and what is held until its end.
pub struct ResponseSource {
    pub connection: UpstreamConnection,
    pub visit: ActiveRequest,
    pub ticket: Option<RequestPermit>,
}

/// Why an answer ended before its end.
#[derive(Debug)]
pub enum Broken {
    Upstream(hyper::Error),
    /// The upstream reset the stream before the end of the response, and named no error.
    Reset,
    /// The whole request took too long.
    Late,
}

impl Download {
    pub fn new(body: Incoming, source: ResponseSource, ends: Option<Instant>) -> Download {
        let mut download = Download { body, source: Some(source), ends: None };
        if download.body.is_end_stream() {
            download.release();
        } else if let Some(ends) = ends {
            download.ends = Some(Box::pin(sleep_until(ends.into())));
        }
        download
    }

    /// The answer that switched protocols: its connection is given to nobody else.
    pub fn switched(body: Incoming, source: ResponseSource) -> Download {
        Download { body, source: Some(source), ends: None }
    }

    /// The stream behind an answer that switched protocols.
    pub async fn into_tunnel(mut self) -> Option<Tunnel> {
        let ResponseSource { connection, visit, ticket } = self.source.take()?;
        Some(connection.into_tunnel().await?.held_by(visit, ticket))
    }

    fn release(&mut self) {
        if let Some(ResponseSource { connection, visit, ticket }) = self.source.take() {
            visit.place().put(connection);
            drop(ticket);
        }
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        // Whether or not there is more: an answer that never pauses ends as well.
        if this.ends.as_mut().is_some_and(|ends| ends.as_mut().poll(cx).is_ready()) {
            (this.source, this.ends) = (None, None);
            return Poll::Ready(Some(Err(Broken::Late)));
        }
        let frame = match &mut this.source {
            Some(source) => source.connection.poll_body(&mut this.body, cx),
            None => Pin::new(&mut this.body).poll_frame(cx),
        };
        if let Poll::Ready(None) = frame {
            if this.source.as_ref().is_some_and(|source| !source.connection.is_complete(&this.body)) {
                this.source = None;
                return Poll::Ready(Some(Err(Broken::Reset)));
            }
            this.release();
        }
        frame.map_err(Broken::Upstream)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Download {
    /// A body of known length is often not polled beyond its last byte.
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            self.release();
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Upstream(error) => write!(f, "{error}"),
            Broken::Reset => f.write_str("the stream was reset with NO_ERROR before END_STREAM"),
            Broken::Late => f.write_str("the whole request took longer than `timeouts.request`"),
        }
    }
}

impl std::error::Error for Broken {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Broken::Upstream(error) => Some(error),
            Broken::Reset | Broken::Late => None,
        }
    }
}
