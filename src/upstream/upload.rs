//! The body of a request on its way to an upstream: nothing is collected, every piece moves when the
//! upstream takes it.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

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

/// Where the body of a request is left that nobody wants any more, for clients that are to send it all the same.
#[derive(Debug, Default)]
pub struct Unwanted {
    body: RefCell<Option<Incoming>>,
    moved: Cell<bool>,
}

impl Unwanted {
    pub fn take(&self) -> Option<Incoming> {
        self.body.take()
    }

    /// Whether a piece of the body was taken by whoever wanted it, since this was last asked.
    pub fn has_moved(&self) -> bool {
        self.moved.take()
    }
}

/// The body of a request to the upstream.
pub enum Upload {
    Empty,
    Client { body: Inbound, progress: Rc<Progress> },
}

/// A body as it comes from the client. Dropped before its end, it is left where it may be.
pub struct Inbound {
    /// Always there, until it is dropped.
    body: Option<Incoming>,
    unwanted: Option<Rc<Unwanted>>,
}

impl Inbound {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        if let (true, Some(unwanted)) = (frame.is_ready(), &self.unwanted) {
            unwanted.moved.set(true);
        }
        frame
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        if let (Some(unwanted), Some(body)) = (&self.unwanted, self.body.take().filter(|body| !body.is_end_stream())) {
            unwanted.body.replace(Some(body));
        }
    }
}

impl Upload {
    pub fn new(body: Incoming, unwanted: Option<&Rc<Unwanted>>) -> Upload {
        if body.is_end_stream() {
            return Upload::Empty;
        }
        Upload::Client { body: Inbound { body: Some(body), unwanted: unwanted.cloned() }, progress: Rc::default() }
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
        let frame = body.poll_frame(cx);
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
            Upload::Client { body, .. } => body.body.as_ref().is_none_or(Body::is_end_stream),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Upload::Empty => SizeHint::with_exact(0),
            Upload::Client { body, .. } => body.body.as_ref().map_or_else(SizeHint::default, Body::size_hint),
        }
    }
}
