//! The built-in `echo` upstream: responds with what it received, so that a first run and a test of a configuration need
//! no other server.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use http::Request;
use http_body::Body;
use serde_json::{Map, Value, json};

use super::request_body::RequestBody;
use crate::timer::Timer;
use transom_http::error::RequestError;
use transom_rules::responses::{self, LocalResponse};

/// Responds with the request's method, path, query, fields, and the length of its body. The body is read to its end and
/// discarded.
pub async fn respond(
    request: Request<RequestBody>,
    limit: Duration,
    timer: &Timer,
) -> Result<LocalResponse, RequestError> {
    let (parts, body) = request.into_parts();
    let body_bytes = read_length(body, limit, timer).await?;
    let mut fields: Map<String, Value> = Map::new();
    for name in parts.headers.keys() {
        let values = parts.headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
        fields.insert(name.to_string(), Value::String(values.collect::<Vec<_>>().join(", ")));
    }
    let echo = json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path(),
        "query": parts.uri.query(),
        "fields": fields,
        "body_bytes": body_bytes,
    });
    Ok(responses::json_response(format!("{echo:#}\n")))
}

/// Reads a body to its end. `limit`: the longest wait for a frame.
async fn read_length(mut body: RequestBody, limit: Duration, timer: &Timer) -> Result<u64, RequestError> {
    let mut length = 0;
    let progress = body.progress();
    let to_error =
        |_error| progress.as_ref().and_then(|progress| progress.client_error()).unwrap_or(RequestError::Body);
    loop {
        timer.arm(limit);
        let frame = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
            Poll::Pending if timer.poll_expired(cx) => Poll::Ready(Err(RequestError::BodyTimeout)),
            Poll::Pending => Poll::Pending,
            Poll::Ready(frame) => Poll::Ready(frame.transpose().map_err(to_error)),
        });
        let frame = frame.await;
        timer.disarm();
        match frame? {
            Some(frame) => length += frame.data_ref().map_or(0, |data| data.len() as u64),
            None => return Ok(length),
        }
    }
}
