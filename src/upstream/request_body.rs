//! The body of a request as it comes from the client, and what becomes of it when nobody wants it any more.
//!
//! An answer may be there before the body has come. HTTP/1.1 closes the connection behind it. A stream of HTTP/2
//! would be reset, and clients drop the answer with it; so whoever serves the stream gets the body
//! back, to go on reading for a moment.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::header::{self, HeaderMap};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::request_upload::Broken;

/// What brings a body.
#[derive(Debug)]
pub enum BodySource {
    Nothing,
    Connection(Incoming),
    Stream(Streamed),
}

/// A body on a stream of HTTP/2.
#[derive(Debug)]
pub struct Streamed {
    stream: RecvStream,
    /// Bytes that are still to come, where a length was named; h2 holds the client to it.
    left: Option<u64>,
    /// What may follow is trailers.
    is_data_done: bool,
}

impl From<Incoming> for BodySource {
    fn from(body: Incoming) -> BodySource {
        BodySource::Connection(body)
    }
}

/// `None` where the stream has ended with the head.
impl From<Option<RecvStream>> for BodySource {
    fn from(stream: Option<RecvStream>) -> BodySource {
        let streamed = |stream| BodySource::Stream(Streamed { stream, left: None, is_data_done: false });
        stream.map_or(BodySource::Nothing, streamed)
    }
}

impl BodySource {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self {
            BodySource::Nothing => Poll::Ready(None),
            BodySource::Connection(body) => Pin::new(body).poll_frame(cx).map_err(Broken::from),
            BodySource::Stream(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            BodySource::Nothing => true,
            BodySource::Connection(body) => body.is_end_stream(),
            BodySource::Stream(body) => body.stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            BodySource::Nothing => SizeHint::with_exact(0),
            BodySource::Connection(body) => body.size_hint(),
            BodySource::Stream(body) => body.left.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

impl Streamed {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if !self.is_data_done {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    // As soon as it is taken the client may send more.
                    let _ = self.stream.flow_control().release_capacity(bytes.len());
                    self.left = self.left.map(|left| left.saturating_sub(bytes.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                // Only END_STREAM ends a body. A reset before it, whatever its code, breaks the upload off.
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => self.is_data_done = true,
            }
        }
        match ready!(self.stream.poll_trailers(cx)) {
            Ok(trailers) => Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers)))),
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }
}

/// Where the body of a request is left that nobody wants any more.
#[derive(Debug, Default)]
pub struct BodyDrain {
    body: RefCell<Option<BodySource>>,
    moved: Cell<bool>,
}

impl BodyDrain {
    /// Whether there is a body that nobody wants.
    pub fn is_left(&self) -> bool {
        self.body.borrow().is_some()
    }

    /// Takes the next piece of it and tells its length, or `None` at its end.
    pub fn poll_piece(&self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        let mut body = self.body.borrow_mut();
        let Some(body) = &mut *body else { return Poll::Ready(None) };
        body.poll_frame(cx).map(|frame| Some(frame?.ok()?.data_ref().map_or(0, Bytes::len)))
    }

    /// Lets go of it.
    pub fn clear(&self) {
        drop(self.body.take());
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
    body: Option<BodySource>,
    unwanted: Option<Rc<BodyDrain>>,
}

impl Inbound {
    /// `headers` are those that came with it.
    pub fn new(body: impl Into<BodySource>, headers: &HeaderMap, unwanted: Option<&Rc<BodyDrain>>) -> Inbound {
        let mut body = body.into();
        if let BodySource::Stream(streamed) = &mut body {
            let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
            streamed.left = length.and_then(|length| length.parse().ok());
        }
        let unwanted = unwanted.filter(|_| !matches!(body, BodySource::Nothing)).cloned();
        Inbound { body: Some(body), unwanted }
    }
}

impl Body for Inbound {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = body.poll_frame(cx);
        if let (true, Some(unwanted)) = (frame.is_ready(), &self.unwanted) {
            unwanted.moved.set(true);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(BodySource::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, BodySource::size_hint)
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        if let (Some(unwanted), Some(body)) = (&self.unwanted, self.body.take().filter(|body| !body.is_end_stream())) {
            unwanted.body.replace(Some(body));
        }
    }
}
