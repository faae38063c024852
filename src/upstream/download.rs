//! The body of an upstream's answer on its way back: nothing is collected, every piece moves when the
//! client takes it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::connection::Connection;
use super::pool::Pool;

/// The body of an upstream's answer. It drives the connection it comes from, and gives it back to
/// the pool at its end; dropped before, it takes the connection with it, which cancels the request.
pub struct Download {
    body: Incoming,
    connection: Option<(Box<Connection>, Rc<Pool>)>,
}

impl Download {
    pub fn new(body: Incoming, connection: Box<Connection>, pool: Rc<Pool>) -> Download {
        let mut download = Download { body, connection: Some((connection, pool)) };
        if download.body.is_end_stream() {
            download.release();
        }
        download
    }

    fn release(&mut self) {
        if let Some((connection, pool)) = self.connection.take() {
            pool.put(connection);
        }
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        let frame = match &mut this.connection {
            Some((connection, _)) => connection.poll_body(&mut this.body, cx),
            None => Pin::new(&mut this.body).poll_frame(cx),
        };
        if let Poll::Ready(None) = frame {
            this.release();
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

impl Drop for Download {
    /// A body of known length is often not polled beyond its last byte.
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            self.release();
        }
    }
}
