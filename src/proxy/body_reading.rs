//! Reads the body of a request before its rules decide, if they depend on it. The body is then forwarded from memory.
//!
//! A body is bounded by `body_key_limit`, the time by that of every request body, and the memory of all such bodies together.

use std::borrow::Cow;
use std::future::poll_fn;
use std::hash::BuildHasher as _;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use http_body::Body as _;

use super::include_usage::{RewrittenBody, asking_for_usage};
use super::response_cost::joined;
use crate::timer::Timer;
use crate::upstream::request_body::{BufferedBody, ClientBody, RequestBody, UploadLimits};
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;
use transom_usage::memory_budget::{MemoryBudget, MemoryShare};
use transom_usage::request_body::{BodyCoding, BodyError, BodyPlan, BodyValues};

/// What all bodies may take that are read before their decision, until they are forwarded.
static MEMORY: MemoryBudget = MemoryBudget::new(256 << 20);
/// Hashes clients, whose parts of the memory are bounded. Randomly seeded, so that none can choose the address of another's part.
static CLIENT_HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// What is read of a body before the decision.
pub struct BodyReading {
    pub client: ClientAddress,
    pub plan: Arc<BodyPlan>,
    pub max_bytes: usize,
    pub limits: UploadLimits,
    /// How long the client may send nothing.
    pub timeout: Duration,
    pub set_include_usage: bool,
}

/// A body that was read.
pub struct ReadBody {
    pub body: ClientBody,
    pub values: Box<BodyValues>,
    /// The usage of the stream is to be hidden from the client.
    pub hides_usage: bool,
}

impl BodyReading {
    /// Reads a body to its end.
    pub async fn read(
        self,
        body: ClientBody,
        headers: &mut HeaderMap,
        timer: &Timer,
    ) -> Result<ReadBody, RequestError> {
        let BodyReading { client, plan, max_bytes, limits, timeout, set_include_usage } = self;
        let memory = MEMORY.share_of(CLIENT_HASHER.hash_one(client.client_network()));
        let body = RequestBody::new(body, || limits.at_most(max_bytes as u64));
        let mut body = read_to_end(body, memory, timeout, timer).await?;
        let (values, text) = read_values(&plan, body.data(), headers, max_bytes)?;
        let rewritten = if set_include_usage { asking_for_usage(&text, &values)? } else { None };
        let hides_usage = rewritten.as_ref().is_some_and(|rewritten| rewritten.hides_usage);
        if let Some(RewrittenBody { data, .. }) = rewritten {
            headers.remove(CONTENT_ENCODING);
            // A stream that is coded could not be filtered.
            headers.remove(ACCEPT_ENCODING);
            // It is UTF-8 now.
            let has_charset =
                |kind: &HeaderValue| kind.as_bytes().to_ascii_lowercase().windows(7).any(|part| part == b"charset");
            if headers.get(CONTENT_TYPE).is_some_and(has_charset) {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            }
            if let Some(length) = headers.get_mut(CONTENT_LENGTH) {
                *length = data.len().into();
            }
            if !body.replace_data(data) {
                return Err(RequestError::BodyMemory);
            }
        }
        Ok(ReadBody { body: ClientBody::buffered(body), values: Box::new(values), hides_usage })
    }
}

/// What rules read of a whole body, and its text without its content coding.
pub fn read_values<'b>(
    plan: &Arc<BodyPlan>,
    body: &'b [u8],
    headers: &HeaderMap,
    max_bytes: usize,
) -> Result<(BodyValues, Cow<'b, [u8]>), RequestError> {
    if body.len() > max_bytes {
        return Err(RequestError::BodyTooLarge(max_bytes as u64));
    }
    let [content_encoding, content_type] = [CONTENT_ENCODING, CONTENT_TYPE].map(|name| joined(headers, name));
    let coding = BodyCoding { content_encoding: content_encoding.as_deref(), content_type: content_type.as_deref() };
    BodyValues::read(plan, body, coding, max_bytes).map_err(|error| match error {
        BodyError::RepeatedMember => RequestError::BodyAmbiguous("has a member twice that the limits depend on"),
        BodyError::NotJson => RequestError::BodyAmbiguous("begins as JSON, and is none or has too many levels"),
        BodyError::Undecodable => RequestError::BodyCoding,
        BodyError::TooLarge => RequestError::BodyTooLarge(max_bytes as u64),
        BodyError::NoMemory => RequestError::BodyMemory,
    })
}

async fn read_to_end(
    mut body: RequestBody,
    mut memory: MemoryShare,
    timeout: Duration,
    timer: &Timer,
) -> Result<BufferedBody, RequestError> {
    let progress = body.progress();
    let (mut data, mut trailers) = (Vec::new(), None);
    loop {
        timer.arm(timeout);
        let frame = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
            Poll::Pending if timer.poll_expired(cx) => Poll::Ready(Err(RequestError::BodyTimeout)),
            frame => frame.map(Ok),
        });
        let frame = frame.await;
        timer.disarm();
        let Some(frame) = frame? else { break };
        let client_error = |_| progress.as_ref().and_then(|progress| progress.client_error());
        match frame.map_err(client_error).map_err(|error| error.unwrap_or(RequestError::Body))?.into_data() {
            Ok(bytes) => {
                data.extend_from_slice(&bytes);
                if !memory.grow_to(data.capacity()) {
                    return Err(RequestError::BodyMemory);
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    Ok(BufferedBody::new(Bytes::from(data), trailers, memory))
}
