//! The body of an answer on its way to the client, and the end of the request's record.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_LENGTH;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::request_record::Record;
use crate::upstream::response_body::{Broken, Download};

/// Where the bytes come from.
pub enum Content {
    /// An answer of the gateway's own; `None` once it was taken.
    Own(Option<Bytes>),
    Upstream(Download),
}

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Content {
        Content::Own(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }
}

impl From<Download> for Content {
    fn from(download: Download) -> Content {
        Content::Upstream(download)
    }
}

/// A body that knows its request's record: when it is dropped, the request is over. It is handed on many times with
/// the head of its answer, and so is small.
pub struct Body(Box<Outgoing>);

struct Outgoing {
    content: Content,
    record: Option<Record>,
    /// How the upstream's answer broke off, until hyper has been told.
    broken: Option<Broken>,
}

impl Body {
    pub fn new(content: Content, record: Record) -> Body {
        Body(Box::new(Outgoing { content, record: Some(record), broken: None }))
    }

    /// Takes the content as a whole, where it is the gateway's own: there is nothing to wait for.
    pub fn take_own(&mut self) -> Option<Bytes> {
        let Content::Own(bytes) = &mut self.0.content else { return None };
        let bytes = bytes.take()?;
        if let Some(record) = &mut self.0.record {
            record.sent(bytes.len());
        }
        Some(bytes)
    }

    /// For an answer to a request whose record was lost in a panic.
    pub fn unrecorded(content: Content) -> Body {
        Body(Box::new(Outgoing { content, record: None, broken: None }))
    }
}

/// Makes an answer one to HEAD: the length of its body stays, the body goes.
pub fn leave_out(answer: &mut Response<Body>) {
    if !answer.body().is_end_stream() {
        tell_length(answer);
        answer.body_mut().0.content = Content::Own(None);
    }
}

/// Names the length of a body in the head, if it is known.
pub fn tell_length(answer: &mut Response<Body>) {
    if let (Some(length), false) = (answer.body().size_hint().exact(), answer.headers().contains_key(CONTENT_LENGTH)) {
        answer.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self.get_mut().0;
        if let Some(error) = this.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let frame = match &mut this.content {
            Content::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Upstream(download) => Pin::new(download).poll_frame(cx),
        };
        if let (Some(record), Poll::Ready(Some(frame))) = (&mut this.record, &frame) {
            match frame {
                Ok(frame) => record.sent(frame.data_ref().map_or(0, Bytes::len)),
                Err(error) => record.broke_off(error),
            }
        }
        if let Poll::Ready(Some(Err(error))) = frame {
            // hyper drops what it has not sent yet when it hears of an error. What came before it,
            // the head above all, goes out first: hyper flushes while it waits.
            this.broken = Some(error);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.0.content {
            Content::Own(bytes) => bytes.is_none(),
            Content::Upstream(download) => download.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0.content {
            Content::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Upstream(download) => download.size_hint(),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let (false, Some(record)) = (self.is_end_stream(), &mut self.0.record) {
            record.cut_off();
        }
    }
}
