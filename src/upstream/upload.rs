//! The body of a request on its way to an upstream: nothing is collected, every piece moves when the
//! upstream takes it.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::inbound::Inbound;

/// How far the upload of a request's body has come, for the one who waits for the answer.
#[derive(Debug, Default)]
pub struct Progress {
    /// A piece was taken since this was last asked.
    pub moved: Cell<bool>,
    /// The upstream would take more, but the client has not sent it.
    pub starved: Cell<bool>,
    /// The client broke off, or its chunks are malformed.
    pub failed: Cell<bool>,
}

/// The body of a request to the upstream.
pub enum Upload {
    Empty,
    Client { body: Inbound, progress: Rc<Progress> },
}

impl Upload {
    pub fn new(body: Inbound) -> Upload {
        if body.is_end_stream() { Upload::Empty } else { Upload::Client { body, progress: Rc::default() } }
    }

    /// How far it has come; `None` where there is nothing to send.
    pub fn progress(&self) -> Option<Rc<Progress>> {
        match self {
            Upload::Empty => None,
            Upload::Client { progress, .. } => Some(Rc::clone(progress)),
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Upload::Client { body, progress } = self.get_mut() else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        progress.starved.set(frame.is_pending());
        match &frame {
            Poll::Ready(Some(Ok(_))) => progress.moved.set(true),
            Poll::Ready(Some(Err(_))) => progress.failed.set(true),
            Poll::Ready(None) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Upload::Empty => true,
            Upload::Client { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Upload::Empty => SizeHint::with_exact(0),
            Upload::Client { body, .. } => body.size_hint(),
        }
    }
}
