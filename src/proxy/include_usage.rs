//! `set_include_usage`: asks OpenAI servers for the usage of a stream, and hides the chunk that states it from clients that did not ask.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::response::{BodyEnded, BodyObserver, Content, observe};
use crate::upstream::response_body::{UpstreamBody, UpstreamBodyError};
use transom_rules::compiled_config::stream_members;
use transom_usage::request_body::BodyValues;
use transom_usage::values::Text;

/// Longer events are no chunk of usage.
const EVENT_MAX_BYTES: usize = 16 << 10;
const USAGE: &[u8] = b"usage";
/// The members of a chunk of usage.
const CHUNK_MEMBERS: [&str; 9] =
    ["choices", "created", "id", "model", "object", "obfuscation", "service_tier", "system_fingerprint", "usage"];
const OPTIONS: &str = "stream_options";

/// The body of a streaming request, with `include_usage`. `None`: the request has it, or is another one.
pub fn asking_for_usage(body: &[u8], values: &BodyValues, headers: &HeaderMap) -> Option<Vec<u8>> {
    let is_true = stream_members().map(|pointer| values.text(&pointer) == Text::Found("true"));
    if is_true != [true, false] || headers.contains_key(CONTENT_ENCODING) {
        return None;
    }
    let members: HashMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
    // Servers may read another case of a name as the same member, and a client that asks for usage in another way wants to see it.
    let is_other = |name: &String| name.eq_ignore_ascii_case(OPTIONS) && name != OPTIONS || name == "usage";
    if members.get("stream").is_none_or(|value| value.get() != "true") || members.keys().any(is_other) {
        return None;
    }
    let written = members.get(OPTIONS).map(|value| value.get());
    let mut options: Map<String, Value> = match written {
        None | Some("null") => Map::new(),
        Some(written) => serde_json::from_str(written).ok()?,
    };
    options.insert("include_usage".to_owned(), true.into());
    let options = serde_json::to_string(&options).ok()?;
    let (before, options, after) = match written {
        // The text of the value is a part of the body.
        Some(written) => {
            let start = written.as_ptr().addr() - body.as_ptr().addr();
            (&body[..start], options, &body[start + written.len()..])
        }
        // Another member follows: that of the stream.
        None => {
            let (before, after) = body.split_at(body.iter().position(|byte| *byte == b'{')? + 1);
            (before, format!("\"{OPTIONS}\":{options},"), after)
        }
    };
    Some([before, options.as_bytes(), after].concat())
}

/// Hides the chunk of usage in a stream of events.
pub fn hide_usage(response: &mut Response<Content>) {
    let media_type = response.headers().get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let is_stream = media_type.to_ascii_lowercase().starts_with(b"text/event-stream");
    if !is_stream || response.headers().contains_key(CONTENT_ENCODING) {
        return;
    }
    if let Content::Upstream(_) = response.body()
        && let Content::Upstream(body) = std::mem::replace(response.body_mut(), Content::Local(None))
    {
        response.headers_mut().remove(CONTENT_LENGTH);
        let filter = EventFilter::default();
        *response.body_mut() =
            Content::Filtered(Box::new(FilteredBody { body, filter, trailers: None, observer: None }));
    }
}

/// A stream of events without the chunk of usage.
pub struct FilteredBody {
    body: UpstreamBody,
    filter: EventFilter,
    trailers: Option<HeaderMap>,
    /// Is shown the whole stream.
    pub observer: Option<Box<dyn BodyObserver>>,
}

impl FilteredBody {
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamBodyError>>> {
        loop {
            if let Some(trailers) = self.trailers.take() {
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            let mut frame = Pin::new(&mut self.body).poll_frame(cx);
            self.observer = self.observer.take().and_then(|observer| observe(observer, &mut frame));
            let shown = match frame {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.filter.push(&bytes),
                    Err(frame) => {
                        self.trailers = frame.into_trailers().ok();
                        self.filter.finish()
                    }
                },
                Poll::Ready(None) => match self.filter.finish() {
                    rest if rest.is_empty() => return Poll::Ready(None),
                    rest => rest,
                },
            };
            if !shown.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(shown.into()))));
            }
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && self.filter.event.is_empty() && self.trailers.is_none()
    }
}

impl Drop for FilteredBody {
    fn drop(&mut self) {
        let end = if self.body.is_end_stream() { BodyEnded::Complete(None) } else { BodyEnded::Aborted };
        self.observer.take().into_iter().for_each(|observer| observer.end(end));
    }
}

/// Holds the current event back until it is complete.
#[derive(Default)]
struct EventFilter {
    event: Vec<u8>,
    /// The event is too long to be a chunk of usage, and was passed on up to here.
    is_passing: bool,
    /// Whether the line at hand has a byte other than a carriage return.
    has_text: bool,
}

impl EventFilter {
    /// Returns what can be passed on.
    fn push(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut shown = Vec::new();
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            bytes = rest;
            self.event.extend_from_slice(line);
            self.has_text |= line.iter().any(|byte| !matches!(byte, b'\r' | b'\n'));
            let is_complete = end.is_some() && !std::mem::take(&mut self.has_text);
            if is_complete && !std::mem::take(&mut self.is_passing) && states_only_usage(&self.event) {
                self.event.clear();
            } else if is_complete || self.is_passing || self.event.len() > EVENT_MAX_BYTES {
                self.is_passing = !is_complete;
                shown.append(&mut self.event);
            }
        }
        shown
    }

    fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.event)
    }
}

/// Whether an event is the chunk of OpenAI that states the usage, and nothing else.
fn states_only_usage(event: &[u8]) -> bool {
    if !event.windows(USAGE.len()).any(|part| part == USAGE) {
        return false;
    }
    let data: Vec<&[u8]> = event.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:")).collect();
    let data = data.join(&b'\n');
    let Ok(chunk) = serde_json::from_slice::<HashMap<String, &RawValue>>(&data) else { return false };
    let member = |name| chunk.get(name).map(|value: &&RawValue| value.get());
    let choices = member("choices").and_then(|choices| serde_json::from_str::<Vec<IgnoredAny>>(choices).ok());
    let has_usage = member("usage").is_some_and(|usage| usage != "null");
    choices.is_some_and(|choices| choices.is_empty())
        && has_usage
        && chunk.keys().all(|name| CHUNK_MEMBERS.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_usage::request_body::{BodyCoding, BodyPlan};

    fn asking(body: &str) -> Option<String> {
        let plan = BodyPlan::new(stream_members().to_vec()).unwrap();
        let values = BodyValues::read(&plan, body.as_bytes(), BodyCoding::default(), 999).unwrap();
        asking_for_usage(body.as_bytes(), &values, &HeaderMap::new()).map(|body| String::from_utf8(body).unwrap())
    }

    #[test]
    fn streaming_requests_ask_for_usage_once() {
        let set = "{\"include_usage\":true}";
        for (body, expected) in [
            (" { \"a\":1e2, \"stream\":true}", format!(" {{\"stream_options\":{set}, \"a\":1e2, \"stream\":true}}")),
            ("{\"stream\":true,\"stream_options\":null}", format!("{{\"stream\":true,\"stream_options\":{set}}}")),
            (
                "{\"stream_\\u006fptions\": {\"include_usage\":false} ,\"stream\":true}",
                format!("{{\"stream_\\u006fptions\": {set} ,\"stream\":true}}"),
            ),
            (
                "{\"stream_options\":{\"x\":[1]},\"stream\":true}",
                "{\"stream_options\":{\"include_usage\":true,\"x\":[1]},\"stream\":true}".to_owned(),
            ),
        ] {
            assert_eq!(asking(body).as_deref(), Some(expected.as_str()), "{body}");
        }
        for body in [
            "{\"stream\":false}",
            "{}",
            "[]",
            "no JSON",
            "{\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
            "{\"stream\":true,\"stream_options\":7}",
            "{\"stream\":\"true\"}",
            "{\"STREAM\":true}",
            "{\"stream\":true,\"Stream_Options\":{}}",
            "{\"stream\":true,\"usage\":{\"include\":true}}",
        ] {
            assert_eq!(asking(body), None, "{body}");
        }
    }

    #[test]
    fn only_the_chunk_of_usage_is_hidden() {
        let (usage, long) = ("{\"choices\":[],\"usage\":{\"total_tokens\":3}}", "x".repeat(2 * EVENT_MAX_BYTES));
        let kept = [
            format!("data: {}\n\n", usage.replace("[]", "[1]")),
            format!("event: a\r\ndata: {}\r\n\r\n", usage.replace("{\"total_tokens\":3}", "null")),
            format!("data: {long} {usage}\n\n"),
            format!("data: {}\n\n", usage.replace("{\"choices", "{\"error\":1,\"choices")),
            "data: [DONE]\n\n: usage\n".to_owned(),
        ];
        let whole =
            usage.replace("{\"choices", "{\"id\":\"x\",\"object\":\"y\",\"created\":1,\"model\":\"m\",\"choices");
        let hidden = [format!("data: {whole}\n\n"), format!("id: 1\r\ndata:{usage}\r\n\r\n")];
        let stream = [&kept[0], &hidden[0], &kept[1], &hidden[1], &kept[2], &hidden[0], &kept[3], &kept[4]]
            .map(String::as_str)
            .concat();
        for size in [1, 2, 7, 1000, stream.len()] {
            let mut filter = EventFilter::default();
            let mut shown: Vec<u8> = stream.as_bytes().chunks(size).flat_map(|piece| filter.push(piece)).collect();
            shown.extend(filter.finish());
            assert!(shown == kept.concat().as_bytes(), "in pieces of {size}");
        }
    }
}
