//! `set_include_usage`: asks OpenAI servers for the usage of a stream, and hides the chunk that states it from clients that did not ask.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::response::{BodyEnded, BodyObserver, Content, observe};
use crate::upstream::response_body::{UpstreamBody, UpstreamBodyError};
use transom_config::route_actions::Actions;
use transom_http::error::RequestError;
use transom_rules::compiled_config::stream_members;
use transom_usage::json_pointer::is_same_name;
use transom_usage::request_body::BodyValues;
use transom_usage::values::Text;

/// Longer events are no chunk of usage.
const EVENT_MAX_BYTES: usize = 16 << 10;
const USAGE: &[u8] = b"usage";
/// The members of a chunk of usage.
const CHUNK_MEMBERS: [&str; 9] =
    ["choices", "created", "id", "model", "object", "obfuscation", "service_tier", "system_fingerprint", "usage"];
const STREAM: &str = "stream";
const OPTIONS: &str = "stream_options";
const INCLUDE_USAGE: &str = "include_usage";

/// The members of a request that decide.
#[derive(Default)]
struct Members<'t> {
    stream: Option<&'t RawValue>,
    options: Option<&'t RawValue>,
    has_usage: bool,
    /// Whether a name is one of these to some servers only.
    is_ambiguous: bool,
}

/// The body of a streaming request that asks for its usage.
#[derive(Debug)]
pub struct RewrittenBody {
    pub data: Vec<u8>,
    /// The client has not asked for the usage in any way.
    pub hides_usage: bool,
}

/// Whether `include_usage` is set in requests for this path. Servers refuse the member in other requests of these APIs.
pub fn sets_include_usage(actions: Option<&Actions>, path: &str) -> bool {
    actions.is_some_and(|actions| actions.set_include_usage && is_completion(path))
}

/// Whether servers read a path as that of completions: some ignore its case, slashes at its end, and parameters of its segments.
fn is_completion(path: &str) -> bool {
    let segments = path.split('/').flat_map(|part| part.split("%2F"));
    let names = segments.map(|segment| segment.split(';').next().unwrap_or_default());
    names.filter(|name| !name.is_empty()).last().is_some_and(|last| last.eq_ignore_ascii_case("completions"))
}

/// The body of a streaming request, with `include_usage`. `None`: the request asks for its usage, or for no stream. Fails for what
/// some servers read as a request for a stream, or for one without its usage, and others do not. `text`: of the body, without its
/// content coding.
pub fn asking_for_usage(text: &[u8], values: &BodyValues) -> Result<Option<RewrittenBody>, RequestError> {
    let [stream, _] = stream_members();
    let asks_for_none = match values.text(&stream) {
        Text::Absent => !values.is_container(&stream),
        text => matches!(text, Text::Found("false" | "0")),
    };
    if asks_for_none {
        return Ok(None);
    }
    let unclear = RequestError::BodyAmbiguous("asks for a stream in a form that servers read differently");
    let members = Members::read(text).ok().filter(|members| !members.is_ambiguous).ok_or_else(|| unclear.clone())?;
    // Servers may read any other value as true.
    if members.stream.is_none_or(|value| ["false", "0"].contains(&value.get())) {
        return Ok(None);
    }
    let written = members.options.map(RawValue::get);
    let mut options: Map<String, Value> = match written {
        None | Some("null") => Map::new(),
        Some(written) => serde_json::from_str(written).map_err(|_invalid| unclear.clone())?,
    };
    if options.keys().any(|name| is_taken_for(INCLUDE_USAGE, name)) {
        return Err(unclear);
    }
    if options.insert(INCLUDE_USAGE.to_owned(), true.into()) == Some(true.into()) {
        return Ok(None);
    }
    let options = serde_json::to_string(&options).map_err(|_invalid| unclear.clone())?;
    let (before, options, after) = match written {
        // The text of the value is a part of the body.
        Some(written) => {
            let start = written.as_ptr().addr() - text.as_ptr().addr();
            (&text[..start], options, &text[start + written.len()..])
        }
        // Another member follows: that of the stream.
        None => {
            let (before, after) = text.split_at(text.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1));
            (before, format!("\"{OPTIONS}\":{options},"), after)
        }
    };
    let data = [before, options.as_bytes(), after].concat();
    // A client may ask for it in another way, too.
    Ok(Some(RewrittenBody { data, hides_usage: !members.has_usage }))
}

/// Whether some servers take a name for `known`, which it is not.
fn is_taken_for(known: &str, name: &str) -> bool {
    name != known && is_same_name(known, name.as_bytes())
}

impl<'t> Members<'t> {
    fn read(text: &'t [u8]) -> serde_json::Result<Members<'t>> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let members = json.deserialize_map(Members::default())?;
        json.end().map(|()| members)
    }
}

impl<'t> Visitor<'t> for Members<'t> {
    type Value = Members<'t>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'t>>(mut self, mut map: A) -> Result<Members<'t>, A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                STREAM => self.stream = Some(map.next_value()?),
                OPTIONS => self.options = Some(map.next_value()?),
                name => {
                    self.has_usage |= name == "usage";
                    self.is_ambiguous |= is_taken_for(STREAM, name) || is_taken_for(OPTIONS, name);
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(self)
    }
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

    /// The body as it is sent, and whether the usage is hidden; `None`: it is refused.
    fn asking(body: &[u8]) -> Option<(String, bool)> {
        let plan = BodyPlan::new(stream_members().to_vec()).unwrap();
        let (values, text) = BodyValues::read(&plan, body, BodyCoding::default(), 999).unwrap();
        let sent = asking_for_usage(&text, &values).ok()?.map(|rewritten| (rewritten.data, rewritten.hides_usage));
        let (data, hides_usage) = sent.unwrap_or_else(|| (text.to_vec(), false));
        Some((String::from_utf8_lossy(&data).into_owned(), hides_usage))
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
            (
                "{\"stream_options\":{\"include_usage\":\"true\"},\"stream\":true}",
                format!("{{\"stream_options\":{set},\"stream\":true}}"),
            ),
            // Values that some servers read as true.
            ("{\"stream\":1}", format!("{{\"stream_options\":{set},\"stream\":1}}")),
            ("{\"stream\":\"true\"}", format!("{{\"stream_options\":{set},\"stream\":\"true\"}}")),
            ("{\"stream\":[0]}", format!("{{\"stream_options\":{set},\"stream\":[0]}}")),
            (
                "{\"stream\":true,\"x\":\"\\ud83d\"}",
                format!("{{\"stream_options\":{set},\"stream\":true,\"x\":\"\\ud83d\"}}"),
            ),
            // Without the mark.
            ("\u{feff}{\"stream\":true}", format!("{{\"stream_options\":{set},\"stream\":true}}")),
        ] {
            assert_eq!(asking(body.as_bytes()), Some((expected, true)), "{body}");
        }
        let utf16: Vec<u8> = "{\"stream\":true}".encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert_eq!(asking(&utf16), Some((format!("{{\"stream_options\":{set},\"stream\":true}}"), true)));
        // Text that is no UTF-8 stays as it is.
        let expected = format!("{{\"stream_options\":{set},\"stream\":true,\"x\":\"\u{fffd}\"}}");
        assert_eq!(asking(b"{\"stream\":true,\"x\":\"\xFF\"}"), Some((expected, true)));
        // The client asks for it in the way of OpenRouter, too.
        for usage in ["null", "{\"include\":true}"] {
            let expected = format!("{{\"stream_options\":{set},\"stream\":true,\"usage\":{usage}}}");
            assert_eq!(asking(format!("{{\"stream\":true,\"usage\":{usage}}}").as_bytes()), Some((expected, false)));
        }
        for body in [
            "{\"stream\":false}",
            "{\"stream\":null}",
            "{\"stream\":0}",
            "{\"Stream\":false}",
            "{\"stream\":false,\"x\":NaN,\"stream_Options\":1}",
            "{}",
            "[]",
            "no JSON",
            "{\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
        ] {
            assert_eq!(asking(body.as_bytes()), Some((body.to_owned(), false)), "{body}");
        }
        for body in [
            &b"{\"stream\":true,\"stream_options\":7}"[..],
            b"{\"stream\":true,\"stream_options\":[]}",
            b"{\"STREAM\":true}",
            b"{\"stream\":true,\"Stream_Options\":{}}",
            b"{\"stream\":true,\"Stream_Options\":null}",
            "{\"stream\":true,\"\u{17f}tream_options\":null}".as_bytes(),
            b"{\"stream\":true,\"stream_options\":{\"Include_usage\":true}}",
        ] {
            assert_eq!(asking(body), None, "{}", String::from_utf8_lossy(body));
        }
    }

    #[test]
    fn servers_know_a_path_by_its_last_name() {
        for path in
            ["/v1/completions", "/completions/", "/a/completions;x", "/a/Completions;x/;y//", "/v1/chat%2Fcompletions"]
        {
            assert!(is_completion(path), "{path}");
        }
        for path in ["/v1/completions/7", "/v1/embeddings", "/", "/v1/completions-x", "/v1/x;completions"] {
            assert!(!is_completion(path), "{path}");
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
