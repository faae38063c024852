//! gRPC over HTTP/2: messages with their prefix, statuses in trailers (the protocol document of gRPC, PROTOCOL-HTTP2).
//! Messages are not compressed.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::Response;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http_body::{Body, Frame};
use prost::Message;

use crate::proxy::response::{Content, ResponseBody};
use crate::upstream::request_body::ClientBody;
use crate::upstream::response_body::UpstreamBodyError;

/// Bytes of a message. The default of gRPC libraries, 4 MiB, is for messages with content; descriptors are short, but their
/// values are fields of HTTP requests, and a client must not get past its limit by a long field.
pub const MESSAGE_MAX_BYTES: usize = 1024 * 1024;
/// How long a call may send nothing that watches for a change.
pub const STREAM_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The compressed flag and the length of a message.
const PREFIX_BYTES: usize = 5;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// Why a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrpcError {
    pub code: u8,
    message: &'static str,
}

impl GrpcError {
    /// The codes of failed calls, with their names in metrics.
    pub const CODES: [(u8, &str); 6] = [
        (3, "invalid_argument"),
        (5, "not_found"),
        (8, "resource_exhausted"),
        (12, "unimplemented"),
        (13, "internal"),
        (14, "unavailable"),
    ];

    pub const fn invalid_argument(message: &'static str) -> GrpcError {
        GrpcError { code: 3, message }
    }

    pub const fn not_found(message: &'static str) -> GrpcError {
        GrpcError { code: 5, message }
    }

    pub const fn unimplemented(message: &'static str) -> GrpcError {
        GrpcError { code: 12, message }
    }

    pub const fn internal(message: &'static str) -> GrpcError {
        GrpcError { code: 13, message }
    }

    pub const fn unavailable(message: &'static str) -> GrpcError {
        GrpcError { code: 14, message }
    }

    /// A response that consists of its head only.
    pub fn response(self) -> Response<ResponseBody> {
        let mut response = Response::new(ResponseBody::unrecorded(Content::from(Bytes::new())));
        self.add_to(response.headers_mut());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        response
    }

    fn add_to(self, fields: &mut HeaderMap) {
        fields.insert(GRPC_STATUS, HeaderValue::from(u16::from(self.code)));
        fields.insert(GRPC_MESSAGE, HeaderValue::from_static(self.message));
        if self == COMPRESSED {
            fields.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
    }
}

const COMPRESSED: GrpcError = GrpcError::unimplemented("compressed messages are not supported");
const TOO_LARGE: GrpcError = GrpcError { code: 8, message: "the message is larger than 1 MiB" };

/// Decodes a message.
pub fn decode<M: Message + Default>(message: Bytes) -> Result<M, GrpcError> {
    M::decode(message).map_err(|_| GrpcError::internal("the message is malformed"))
}

/// Encodes a message with its prefix.
pub fn encode(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX_BYTES + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer grows, so that encoding cannot fail.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

/// Reads the messages of a call.
pub struct MessageReader {
    body: ClientBody,
    is_compressed: bool,
    buffered: BytesMut,
}

impl MessageReader {
    /// `fields`: of the request.
    pub fn new(body: ClientBody, fields: &HeaderMap) -> MessageReader {
        let is_compressed = fields.get(GRPC_ENCODING).is_some_and(|encoding| encoding != "identity");
        MessageReader { body, is_compressed, buffered: BytesMut::new() }
    }

    /// The only message of a call.
    pub async fn read_single(&mut self) -> Result<Bytes, GrpcError> {
        const NOT_ONE: GrpcError = GrpcError::unimplemented("the method takes one message");
        let message = std::future::poll_fn(|cx| self.poll_message(cx)).await.unwrap_or(Err(NOT_ONE))?;
        match std::future::poll_fn(|cx| self.poll_message(cx)).await {
            None => Ok(message),
            Some(another) => Err(another.err().unwrap_or(NOT_ONE)),
        }
    }

    /// The next message; `None` at the end of the body.
    pub fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, GrpcError>>> {
        loop {
            match self.take_message() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame.data_ref().into_iter().for_each(|data| self.buffered.extend_from_slice(data)),
                None if self.buffered.is_empty() => return Poll::Ready(None),
                None | Some(Err(_)) => {
                    return Poll::Ready(Some(Err(GrpcError::internal("the message is incomplete"))));
                }
            }
        }
    }

    /// Takes a message off the buffer, if it is complete.
    fn take_message(&mut self) -> Result<Option<Bytes>, GrpcError> {
        let Some((prefix, rest)) = self.buffered.split_first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let [flag, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        match flag {
            0 => {}
            1 if self.is_compressed => return Err(COMPRESSED),
            1 => return Err(GrpcError::internal("the message is compressed, but there is no `grpc-encoding`")),
            _ => return Err(GrpcError::internal("the compressed flag is neither 0 nor 1")),
        }
        if length > MESSAGE_MAX_BYTES {
            return Err(TOO_LARGE);
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.buffered.advance(PREFIX_BYTES);
        Ok(Some(self.buffered.split_to(length).freeze()))
    }
}

/// What a response sends after its first message.
pub enum Following {
    /// Nothing: the call is complete.
    End,
    /// An answer to each message of the client.
    Answers(MessageReader, fn(Bytes) -> Result<Bytes, GrpcError>),
    /// One message later, and then the end with an error.
    Later(Pin<Box<dyn Future<Output = (Bytes, GrpcError)>>>),
}

/// The messages of a response, with their prefixes, and the status in the trailers.
struct GrpcBody {
    first: Option<Bytes>,
    following: Following,
    /// `None` once the trailers were sent.
    result: Option<Result<(), GrpcError>>,
}

/// The response to a call: its first message, with its prefix, if there is one.
pub fn response(first: Option<Bytes>, following: Following) -> Response<ResponseBody> {
    let body = GrpcBody { first, following, result: Some(Ok(())) };
    let mut response = Response::new(ResponseBody::unrecorded(Content::Stream(Box::pin(body))));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

impl GrpcBody {
    fn poll_following(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match &mut self.following {
            Following::End => return Poll::Ready(None),
            Following::Answers(reader, answer) => match ready!(reader.poll_message(cx)) {
                None => {}
                Some(message) => match message.and_then(*answer) {
                    Ok(answer) => return Poll::Ready(Some(answer)),
                    Err(error) => self.result = Some(Err(error)),
                },
            },
            Following::Later(later) => {
                let (message, error) = ready!(later.as_mut().poll(cx));
                (self.following, self.result) = (Following::End, Some(Err(error)));
                return Poll::Ready(Some(message));
            }
        }
        self.following = Following::End;
        Poll::Ready(None)
    }
}

impl Body for GrpcBody {
    type Data = Bytes;
    type Error = UpstreamBodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamBodyError>>> {
        let this = self.get_mut();
        if let Some(message) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        if let Some(message) = ready!(this.poll_following(cx)) {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        let trailers = this.result.take().map(|result| {
            let mut trailers = HeaderMap::new();
            match result {
                Ok(()) => drop(trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"))),
                Err(error) => error.add_to(&mut trailers),
            }
            Ok(Frame::trailers(trailers))
        });
        Poll::Ready(trailers)
    }
}
