//! The body of an answer on its way to the client, and the end of the request's record.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_LENGTH;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::request_record::RequestRecord;
use crate::upstream::response_body::{Broken, Download};

/// Where the bytes come from.
pub enum Content {
    /// An answer of the gateway's own; `None` once it was taken.
    Local(Option<Bytes>),
    Upstream(Download),
}

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Content {
        Content::Local(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }
}

impl From<Download> for Content {
    fn from(download: Download) -> Content {
        Content::Upstream(download)
    }
}

/// A body that knows its request's record: when it is dropped, the request is over. It is handed on many times with
/// the head of its answer, and so is small.
pub struct ResponseBody(Box<BodyState>);

struct BodyState {
    content: Content,
    record: Option<RequestRecord>,
    /// How the upstream's answer broke off, until hyper has been told.
    pending_error: Option<Broken>,
}

impl ResponseBody {
    pub fn new(content: Content, record: RequestRecord) -> ResponseBody {
        ResponseBody(Box::new(BodyState { content, record: Some(record), pending_error: None }))
    }

    /// Takes the content as a whole, where it is the gateway's own: there is nothing to wait for.
    pub fn take_local(&mut self) -> Option<Bytes> {
        let Content::Local(bytes) = &mut self.0.content else { return None };
        let bytes = bytes.take()?;
        if let Some(record) = &mut self.0.record {
            record.add_bytes_sent(bytes.len());
        }
        Some(bytes)
    }

    /// For an answer to a request whose record was lost in a panic.
    pub fn unrecorded(content: Content) -> ResponseBody {
        ResponseBody(Box::new(BodyState { content, record: None, pending_error: None }))
    }
}

/// Makes an answer one to HEAD: the length of its body stays, the body goes.
pub fn strip_body(answer: &mut Response<ResponseBody>) {
    if !answer.body().is_end_stream() {
        set_content_length(answer);
        answer.body_mut().0.content = Content::Local(None);
    }
}

/// Names the length of a body in the head, if it is known.
pub fn set_content_length(answer: &mut Response<ResponseBody>) {
    if let (Some(length), false) = (answer.body().size_hint().exact(), answer.headers().contains_key(CONTENT_LENGTH)) {
        answer.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self.get_mut().0;
        if let Some(error) = this.pending_error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let frame = match &mut this.content {
            Content::Local(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Upstream(download) => Pin::new(download).poll_frame(cx),
        };
        if let (Some(record), Poll::Ready(Some(frame))) = (&mut this.record, &frame) {
            match frame {
                Ok(frame) => record.add_bytes_sent(frame.data_ref().map_or(0, Bytes::len)),
                Err(error) => record.record_upstream_abort(error),
            }
        }
        if let Poll::Ready(Some(Err(error))) = frame {
            // hyper drops what it has not sent yet when it hears of an error. What came before it,
            // the head above all, goes out first: hyper flushes while it waits.
            this.pending_error = Some(error);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.0.content {
            Content::Local(bytes) => bytes.is_none(),
            Content::Upstream(download) => download.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0.content {
            Content::Local(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Upstream(download) => download.size_hint(),
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let (false, Some(record)) = (self.is_end_stream(), &mut self.0.record) {
            record.record_truncation();
        }
    }
}
