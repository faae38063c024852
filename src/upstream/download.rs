//! The body of an upstream's answer on its way back: nothing is collected, every piece moves when the
//! client takes it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::carrier::Carrier;
use super::pool::Pool;
use super::tunnel::Tunnel;

/// The body of an upstream's answer. It drives the connection it comes from, and gives it back to
/// the pool at its end; dropped before, it takes the connection with it, which cancels the request.
pub struct Download {
    body: Incoming,
    carrier: Option<(Carrier, Rc<Pool>)>,
}

impl Download {
    pub fn new(body: Incoming, carrier: Carrier, pool: Rc<Pool>) -> Download {
        let mut download = Download { body, carrier: Some((carrier, pool)) };
        if download.body.is_end_stream() {
            download.release();
        }
        download
    }

    /// The answer that switched protocols: its connection is given to nobody else.
    pub fn switched(body: Incoming, carrier: Carrier, pool: Rc<Pool>) -> Download {
        Download { body, carrier: Some((carrier, pool)) }
    }

    /// The stream behind an answer that switched protocols.
    pub async fn into_tunnel(mut self) -> Option<Tunnel> {
        let (carrier, _) = self.carrier.take()?;
        carrier.into_tunnel().await
    }

    fn release(&mut self) {
        if let Some((carrier, pool)) = self.carrier.take() {
            pool.put(carrier);
        }
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        let frame = match &mut this.carrier {
            Some((carrier, _)) => carrier.poll_body(&mut this.body, cx),
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
