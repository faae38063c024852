//! The body of a request as it comes from the client, and what becomes of it when nobody wants it any more.
//!
//! An answer may be there before the body has come. HTTP/1.1 closes the connection behind it. A stream of HTTP/2
//! would be reset, and clients drop the answer with it; so whoever serves the stream gets the body
//! back, to go on reading for a moment.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

/// Where the body of a request is left that nobody wants any more.
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

/// A body as it comes. Dropped before its end, it is left where it may be.
#[derive(Debug)]
pub struct Inbound {
    /// Always there, until it is dropped.
    body: Option<Incoming>,
    unwanted: Option<Rc<Unwanted>>,
}

impl Inbound {
    pub fn new(body: Incoming, unwanted: Option<&Rc<Unwanted>>) -> Inbound {
        Inbound { body: Some(body), unwanted: unwanted.cloned() }
    }
}

impl Body for Inbound {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        if let (true, Some(unwanted)) = (frame.is_ready(), &self.unwanted) {
            unwanted.moved.set(true);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        if let (Some(unwanted), Some(body)) = (&self.unwanted, self.body.take().filter(|body| !body.is_end_stream())) {
            unwanted.body.replace(Some(body));
        }
    }
}
