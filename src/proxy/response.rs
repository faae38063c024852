//! The response to a client: refusals and errors turned into responses, and a body that ends the request's record.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{HeaderMap, Method, Response, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::{BodyExt, Full};

use super::include_usage::FilteredBody;
use super::request_record::RequestRecord;
use crate::upstream::response_body::{UpstreamBody, UpstreamBodyError};
use transom_http::error::RequestError;
use transom_http::headers;
use transom_http::http1_head::never_has_body;
use transom_rules::responses::{ErrorFormat, LocalResponse, WrittenRefusal};
use transom_rules::route_actions::ResponseChanges;

/// Why a request is not forwarded.
pub enum Rejection {
    Refused(LocalResponse),
    Error(RequestError),
}

impl Rejection {
    #[cold]
    pub fn into_response(self, format: ResponseFormat, mut record: RequestRecord) -> Response<ResponseBody> {
        record.release_all_slots();
        match self {
            Rejection::Refused(reply) => refusal_response(reply, format, record),
            Rejection::Error(error) => error_response(&error, format, record),
        }
    }
}

/// How the response to one request is sent.
pub struct ResponseFormat {
    errors: ErrorFormat,
    /// Over HTTP/1, to a request other than HEAD.
    is_http1_with_body: bool,
    /// By the route; `None` before it is known.
    pub changes: Option<Box<ResponseChanges>>,
}

impl ResponseFormat {
    pub fn of(parts: &Parts) -> ResponseFormat {
        let is_http1_with_body = parts.version != Version::HTTP_2 && parts.method != Method::HEAD;
        ResponseFormat { errors: ErrorFormat::of(parts), is_http1_with_body, changes: None }
    }

    /// Whether a refusal needs no map of its fields: they are sent as they are.
    pub fn takes_written(&self) -> bool {
        self.is_http1_with_body && self.changes.is_none()
    }

    /// Identifies the request in a response of the upstream or the route, and makes the changes of the route.
    pub fn change_fields(self, headers: &mut HeaderMap, record: &RequestRecord) {
        record.identify(headers);
        if let Some(changes) = self.changes {
            changes.apply(headers);
        }
    }

    // Inlined, so that the response and the record are not moved once more.
    #[inline(always)]
    fn finish_local(self, mut response: LocalResponse, record: RequestRecord) -> Response<ResponseBody> {
        record.identify(response.headers_mut());
        if let Some(changes) = self.changes {
            changes.apply_to_local_response(response.headers_mut());
        }
        finish(response.map(Content::from), record)
    }
}

/// The response to a refused request.
#[inline(always)]
pub fn refusal_response(reply: LocalResponse, format: ResponseFormat, record: RequestRecord) -> Response<ResponseBody> {
    let response = format.errors.refusal(reply);
    format.finish_local(response, record)
}

/// As [`refusal_response`], on an HTTP/1.1 connection. See [`ResponseFormat::takes_written`].
pub fn written_refusal_response(refusal: WrittenRefusal, mut record: RequestRecord) -> Response<ResponseBody> {
    record.set_status(refusal.status.as_u16());
    let mut body = ResponseBody::new(Content::from(refusal.body), record);
    body.0.fields = Some(refusal.fields);
    let mut response = Response::new(body);
    *response.status_mut() = refusal.status;
    response
}

/// The response to a request that failed; records the error.
pub fn error_response(
    error: &RequestError,
    format: ResponseFormat,
    mut record: RequestRecord,
) -> Response<ResponseBody> {
    record.record_error(error);
    let response = format.errors.error(error);
    format.finish_local(response, record)
}

/// The response of the upstream or the route.
pub fn forwarded_response(
    mut response: Response<Content>,
    format: ResponseFormat,
    record: RequestRecord,
) -> Response<ResponseBody> {
    format.change_fields(response.headers_mut(), &record);
    finish(response, record)
}

/// Ties a response to the record of its request.
fn finish(response: Response<Content>, mut record: RequestRecord) -> Response<ResponseBody> {
    record.set_status(response.status().as_u16());
    record.set_grpc_status(response.headers());
    response.map(|content| ResponseBody::new(content, record))
}

/// Source of a response's body.
pub enum Content {
    /// Made by the gateway; `None` once it was taken.
    Local(Option<Bytes>),
    Upstream(UpstreamBody),
    /// Of the upstream, without the usage that the client has not asked for.
    Filtered(Box<FilteredBody>),
    /// Made by the gateway while it is sent.
    Stream(LocalStream),
}

/// A body that the gateway makes while it is sent, with trailers.
pub type LocalStream = Pin<Box<dyn HttpBody<Data = Bytes, Error = UpstreamBodyError>>>;

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Content {
        Content::Local(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }
}

impl From<UpstreamBody> for Content {
    fn from(download: UpstreamBody) -> Content {
        Content::Upstream(download)
    }
}

/// Follows a body while it is sent.
pub trait BodyObserver {
    /// Whether the body is to be broken off.
    fn is_cut(&self) -> bool {
        false
    }

    fn data(&mut self, bytes: &[u8]);

    /// The body has ended, with its trailers, if it has any; or it broke off, or the client has gone away.
    fn end(self: Box<Self>, end: BodyEnded<'_>);
}

/// How a body has ended.
#[derive(Clone, Copy)]
pub enum BodyEnded<'a> {
    Complete(Option<&'a HeaderMap>),
    Aborted,
}

/// A body that owns the record of its request: dropping the body ends the request. Boxed, because it is moved many times
/// together with the head of its response.
pub struct ResponseBody(Box<BodyState>);

struct BodyState {
    content: Content,
    /// Fields of the response beside those of its map, in HTTP/1.1 syntax. The id of the request follows them.
    fields: Option<Rc<[u8]>>,
    /// After `content`, so that an upstream connection is closed before the slots of its request are released.
    record: Option<RequestRecord>,
    observer: Option<Box<dyn BodyObserver>>,
    /// How the upstream's response broke off, until the connection has been given the error.
    pending_error: Option<UpstreamBodyError>,
}

impl ResponseBody {
    pub fn new(content: Content, record: RequestRecord) -> ResponseBody {
        ResponseBody::of(content, Some(record))
    }

    /// A body without a record: a tunnel has taken the record, or a panic has ended it.
    pub fn unrecorded(content: Content) -> ResponseBody {
        ResponseBody::of(content, None)
    }

    fn of(content: Content, record: Option<RequestRecord>) -> ResponseBody {
        ResponseBody(Box::new(BodyState { content, fields: None, record, observer: None, pending_error: None }))
    }

    /// Writes the fields of the response that are not in its map.
    pub fn write_fields(&self, head: &mut Vec<u8>) {
        if let (Some(fields), Some(record)) = (&self.0.fields, &self.0.record) {
            head.extend_from_slice(fields);
            record.request_id().write_field(head);
        }
    }

    /// `observer` follows the rest of the body.
    pub fn observe(&mut self, observer: Box<dyn BodyObserver>) {
        match &mut self.0.content {
            Content::Filtered(body) => body.observer = Some(observer),
            _ => self.0.observer = Some(observer),
        }
    }

    /// Sets the observer of what is sent of the body: what `observer` makes of the present one.
    pub fn observe_sent(&mut self, observer: impl FnOnce(Option<Box<dyn BodyObserver>>) -> Box<dyn BodyObserver>) {
        self.0.observer = Some(observer(self.0.observer.take()));
        if let Content::Local(Some(bytes)) = &mut self.0.content {
            // As a stream, so that the connection polls the body instead of taking the bytes.
            let stream = Full::new(std::mem::take(bytes)).map_err(|never| match never {});
            self.0.content = Content::Stream(Box::pin(stream));
        }
    }

    /// The whole body, if the gateway made it.
    pub fn local(&self) -> Option<Bytes> {
        let Content::Local(bytes) = &self.0.content else { return None };
        Some(bytes.clone().unwrap_or_default())
    }

    /// Takes a body that the gateway made, as a whole.
    pub fn take_local(&mut self) -> Option<Bytes> {
        let Content::Local(bytes) = &mut self.0.content else { return None };
        let bytes = bytes.take()?;
        if let Some(record) = &mut self.0.record {
            record.add_bytes_sent(bytes.len());
        }
        Some(bytes)
    }

    /// A piece that was taken did not reach the client.
    pub fn record_truncation(&mut self) {
        self.0.record.iter_mut().for_each(RequestRecord::record_truncation);
    }
}

/// Removes the body of a response to HEAD, which keeps its Content-Length, or of one whose status excludes a body.
pub fn strip_body(response: &mut Response<ResponseBody>) {
    if !response.body().is_end_stream() {
        if !never_has_body(response.status()) {
            set_content_length(response);
        }
        response.body_mut().0.content = Content::Local(None);
    }
}

/// Adds Content-Length if the length of the body is known and the field is absent.
pub fn set_content_length(response: &mut Response<ResponseBody>) {
    let length = response.body().size_hint().exact();
    if let (Some(length), false) = (length, response.headers().contains_key(CONTENT_LENGTH)) {
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = UpstreamBodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamBodyError>>> {
        let this = &mut *self.get_mut().0;
        if let Some(error) = this.pending_error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let mut frame = match &mut this.content {
            Content::Local(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Upstream(download) => Pin::new(download).poll_frame(cx),
            Content::Filtered(body) => body.poll_frame(cx),
            Content::Stream(stream) => stream.as_mut().poll_frame(cx),
        };
        if let Poll::Ready(Some(Ok(frame))) = &mut frame {
            frame.trailers_mut().into_iter().for_each(headers::forward_response_trailers);
        }
        if this.observer.is_some() {
            this.observer = this.observer.take().and_then(|observer| observe(observer, &mut frame));
        }
        if let (Some(record), Poll::Ready(Some(frame))) = (&mut this.record, &frame) {
            match frame {
                Ok(frame) => {
                    record.add_bytes_sent(frame.data_ref().map_or(0, Bytes::len));
                    frame.trailers_ref().into_iter().for_each(|trailers| record.set_grpc_status(trailers));
                }
                Err(error) => record.record_upstream_abort(error),
            }
        }
        if let Poll::Ready(Some(Err(error))) = frame {
            // h2 drops what it has queued when a stream is reset. Returning `Pending` once lets the connection send the head and
            // the data first.
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
            Content::Filtered(body) => body.is_end_stream(),
            Content::Stream(stream) => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0.content {
            Content::Local(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Upstream(download) => download.size_hint(),
            Content::Filtered(_) => SizeHint::default(),
            Content::Stream(stream) => stream.size_hint(),
        }
    }
}

/// Shows the observer a frame, which becomes an error if it breaks the body off. Returns the observer unless the body has ended.
#[inline(never)]
pub fn observe(
    mut observer: Box<dyn BodyObserver>,
    frame: &mut Poll<Option<Result<Frame<Bytes>, UpstreamBodyError>>>,
) -> Option<Box<dyn BodyObserver>> {
    if matches!(frame, Poll::Ready(Some(Ok(frame))) if frame.is_data()) && observer.is_cut() {
        *frame = Poll::Ready(Some(Err(UpstreamBodyError::LimitExceeded)));
    }
    let end = match frame {
        Poll::Pending => return Some(observer),
        Poll::Ready(None) => BodyEnded::Complete(None),
        Poll::Ready(Some(Err(_))) => BodyEnded::Aborted,
        Poll::Ready(Some(Ok(frame))) => match (frame.data_ref(), frame.trailers_ref()) {
            (None, Some(trailers)) => BodyEnded::Complete(Some(trailers)),
            (data, _) => {
                observer.data(data.map_or(&[], |data| data));
                return Some(observer);
            }
        },
    };
    observer.end(end);
    None
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // A body of known length is often not polled beyond its last byte.
        let is_complete = self.is_end_stream();
        if let (false, Some(record)) = (is_complete, &mut self.0.record) {
            record.record_truncation();
        }
        if let Some(observer) = self.0.observer.take() {
            observer.end(if is_complete { BodyEnded::Complete(None) } else { BodyEnded::Aborted });
        }
    }
}
