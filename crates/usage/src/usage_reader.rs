//! Reads what a body says was used, as its bytes pass. The entry point of this crate.

use std::sync::Arc;

use super::content_decoder::{ContentDecoder, DecodeError};
use super::decimal::Decimal;
use super::event_stream::{AwsEventStream, DocumentSink, ServerSentEvents};
use super::format::{KnownFormats, want_models};
use super::json_pointer::{JsonPointer, PointerTree, SlotId, TextId};
use super::json_scanner::{Document, JsonScanner};
use super::usage::{Kind, Usage};
use super::values::{Text, Value, Values};

/// Where usage is stated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UsageSource {
    /// In the members of the known APIs.
    Known,
    /// At these pointers. Their sum is of the kind `input`.
    Pointers(Vec<JsonPointer>),
}

/// Names a source of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SourceId(usize);

/// What is read of a body, for one or several sources. Made once, for all bodies.
#[derive(Debug)]
pub struct ReadingPlan {
    tree: PointerTree,
    model: TextId,
    known: Option<KnownFormats>,
    sources: Vec<Option<Vec<SlotId>>>,
}

/// Why a body states no usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Missing {
    /// A body without these members, or with other values than numbers of tokens.
    Absent,
    /// The content coding is unknown, or the data are invalid.
    Compressed,
    /// It expands too much, or needs too much memory.
    TooLarge,
    NotJson,
    /// It broke off before.
    Aborted,
}

impl Missing {
    pub const ALL: [Missing; 5] =
        [Missing::Absent, Missing::Compressed, Missing::TooLarge, Missing::NotJson, Missing::Aborted];

    /// The label in metrics.
    pub fn name(self) -> &'static str {
        ["absent", "compressed", "too-large", "not-json", "aborted"][self as usize]
    }
}

impl ReadingPlan {
    /// A plan that reads the name of the model in a response.
    pub fn of_responses() -> ReadingPlan {
        let mut tree = PointerTree::default();
        let model = want_models(&mut tree);
        ReadingPlan { tree, model, known: None, sources: Vec::new() }
    }

    pub fn add(&mut self, source: &UsageSource) -> SourceId {
        let slots = match source {
            UsageSource::Known => {
                self.known.get_or_insert_with(|| KnownFormats::want(&mut self.tree));
                None
            }
            UsageSource::Pointers(pointers) => {
                let slots = pointers.iter().map(|pointer| {
                    let slot = self.tree.add_slot();
                    self.tree.want_number(PointerTree::ROOT, pointer, slot);
                    slot
                });
                Some(slots.collect())
            }
        };
        self.sources.push(slots);
        SourceId(self.sources.len() - 1)
    }
}

/// How the documents of a body are framed.
enum Framing {
    /// One document. The elements of an array are documents of a stream, as of Gemini.
    Json,
    /// One document a line.
    Lines,
    Events(ServerSentEvents),
    Aws(AwsEventStream),
}

/// The documents of a body.
struct Documents {
    plan: Arc<ReadingPlan>,
    scanner: JsonScanner,
    values: Values,
    /// Whether a document was JSON.
    has_json: bool,
    /// Whether a document was not JSON, such as `[DONE]`.
    has_other: bool,
}

/// Reads one body.
pub struct UsageReader {
    decoder: ContentDecoder,
    framing: Framing,
    documents: Documents,
}

impl DocumentSink for Documents {
    fn data(&mut self, bytes: &[u8]) {
        self.scanner.push(&self.plan.tree, &mut self.values, bytes);
    }

    fn end_document(&mut self) {
        self.end(false);
    }
}

impl Documents {
    /// `keeps_part`: what a document states that broke off counts.
    fn end(&mut self, keeps_part: bool) {
        let document = self.scanner.finish(&self.plan.tree, &mut self.values);
        self.has_json |= document == Document::Complete;
        self.has_other |= matches!(document, Document::Malformed | Document::Incomplete);
        match document {
            Document::Complete => self.values.commit(),
            Document::Incomplete if keeps_part => self.values.commit(),
            _ => self.values.discard(),
        }
    }
}

impl UsageReader {
    /// With the values of Content-Type and Content-Encoding.
    pub fn new(plan: &Arc<ReadingPlan>, content_type: Option<&[u8]>, content_encoding: Option<&[u8]>) -> UsageReader {
        let media_type = content_type.unwrap_or_default().split(|byte| *byte == b';').next().unwrap_or_default();
        let framing = match &media_type.trim_ascii().to_ascii_lowercase()[..] {
            b"text/event-stream" => Framing::Events(ServerSentEvents::default()),
            b"application/x-ndjson" | b"application/ndjson" | b"application/jsonl" => Framing::Lines,
            b"application/vnd.amazon.eventstream" => Framing::Aws(AwsEventStream::default()),
            _ => Framing::Json,
        };
        let reads_elements = matches!(framing, Framing::Json);
        UsageReader {
            decoder: ContentDecoder::new(content_encoding),
            framing,
            documents: Documents {
                plan: Arc::clone(plan),
                scanner: JsonScanner::new(reads_elements),
                values: Values::new(&plan.tree),
                has_json: false,
                has_other: false,
            },
        }
    }

    /// The next bytes of the body.
    pub fn push(&mut self, bytes: &[u8]) {
        let UsageReader { decoder, framing, documents } = self;
        if matches!(framing, Framing::Json) && documents.scanner.is_malformed() {
            return;
        }
        decoder.push(bytes, &mut |decoded: &[u8]| match framing {
            Framing::Json => documents.data(decoded),
            Framing::Lines => {
                for (nth, line) in decoded.split(|byte| *byte == b'\n').enumerate() {
                    if nth > 0 {
                        documents.end_document();
                    }
                    documents.data(line);
                }
            }
            Framing::Events(events) => events.push(decoded, documents),
            Framing::Aws(messages) => messages.push(decoded, documents),
        });
    }

    /// The body has ended; with `is_aborted`, before its end. An event that no empty line follows counts if it is complete.
    pub fn finish(mut self, is_aborted: bool) -> Reading {
        self.documents.end(is_aborted);
        let is_malformed = match &self.framing {
            Framing::Json => !is_aborted && self.documents.has_other,
            Framing::Lines | Framing::Events(_) => false,
            Framing::Aws(messages) => messages.is_malformed(),
        };
        let Documents { plan, values, has_json, has_other, .. } = self.documents;
        let missing = match self.decoder.error() {
            Some(DecodeError::Unreadable) => Missing::Compressed,
            Some(DecodeError::TooLarge | DecodeError::NoMemory) => Missing::TooLarge,
            None if is_aborted => Missing::Aborted,
            None if has_json || !(has_other || is_malformed) => Missing::Absent,
            None => Missing::NotJson,
        };
        let undecoded = self.decoder.error().map(|_| missing);
        Reading { plan, values, missing, is_malformed, undecoded, decoded_bytes: self.decoder.decoded_bytes() }
    }
}

/// What a body stated.
pub struct Reading {
    plan: Arc<ReadingPlan>,
    values: Values,
    missing: Missing,
    /// Whether nothing of it counts.
    is_malformed: bool,
    undecoded: Option<Missing>,
    decoded_bytes: u64,
}

impl Reading {
    pub fn usage(&self, source: SourceId) -> Result<Usage, Missing> {
        if self.is_malformed {
            return Err(self.missing);
        }
        let usage = match (&self.plan.sources[source.0], &self.plan.known) {
            (Some(slots), _) => self.sum(slots),
            (None, Some(known)) => known.usage(&self.values),
            (None, None) => None,
        };
        usage.ok_or(self.missing)
    }

    /// The sum of the numbers; `None` if there is none, or a value that is no number.
    fn sum(&self, slots: &[SlotId]) -> Option<Usage> {
        let mut sum = None;
        for slot in slots {
            match self.values.get(*slot) {
                Value::Absent => {}
                Value::Unreadable | Value::TooGreat | Value::Array(_) => return None,
                Value::Number(number) => sum = Some(sum.unwrap_or(Decimal::ZERO).saturating_add(number)),
            }
        }
        let mut usage = Usage::default();
        usage[Kind::Input] = sum?;
        Some(usage)
    }

    /// Why a part of it was not decoded; `None` if all of it was.
    pub fn undecoded(&self) -> Option<Missing> {
        self.undecoded
    }

    /// Its length without its content coding, as far as it was decoded.
    pub fn decoded_bytes(&self) -> u64 {
        self.decoded_bytes
    }

    /// The name of the model.
    pub fn model(&self) -> Option<&str> {
        match self.values.text(self.plan.model) {
            Text::Found(name) if !name.is_empty() && !self.is_malformed => Some(name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: &str = "text/event-stream";

    fn read(
        source: &UsageSource,
        kind: &str,
        body: &[u8],
        is_aborted: bool,
    ) -> (Result<[u64; 5], Missing>, Option<String>) {
        let mut plan = ReadingPlan::of_responses();
        let source = plan.add(source);
        let mut reader = UsageReader::new(&Arc::new(plan), Some(kind.as_bytes()), None);
        body.chunks(7).for_each(|piece| reader.push(piece));
        let reading = reader.finish(is_aborted);
        let usage = reading.usage(source).map(|usage| Kind::ALL.map(|kind| usage[kind].rounded_up()));
        (usage, reading.model().map(str::to_owned))
    }

    fn pointers(texts: &[&str]) -> UsageSource {
        UsageSource::Pointers(texts.iter().map(|text| JsonPointer::parse(text).unwrap()).collect())
    }

    /// Answers as the documentation of the APIs shows them, with their usage as input, cached input, cache writes, output and
    /// reasoning.
    #[test]
    fn the_formats_of_the_apis_are_normalized() {
        let rows: [(&str, &str, [u64; 5], &str); 14] = [
            // OpenAI: parts are contained in their wholes.
            (
                "",
                r#"{"model":"gpt-5","usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,
                "prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0},
                "completion_tokens_details":{"reasoning_tokens":3,"audio_tokens":0}}}"#,
                [15, 4, 0, 7, 3],
                "gpt-5",
            ),
            // Mistral and llama.cpp.
            (
                "",
                r#"{"usage":{"completion_tokens":2,"prompt_tokens":5,"total_tokens":7},"model":"m"}"#,
                [5, 0, 0, 2, 0],
                "m",
            ),
            (
                "",
                r#"{"object":"list","data":[{"embedding":[-0.1,1e-5]}],"model":"e","usage":{"prompt_tokens":8,"total_tokens":8}}"#,
                [8, 0, 0, 0, 0],
                "e",
            ),
            // DeepSeek.
            (
                "",
                r#"{"model":"d","usage":{"prompt_tokens":16,"completion_tokens":10,"prompt_cache_hit_tokens":6,"prompt_cache_miss_tokens":10}}"#,
                [10, 6, 0, 10, 0],
                "d",
            ),
            // vLLM with `continuous_usage_stats`: the last value counts.
            (
                EVENTS,
                "data: {\"model\":\"v\",\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n\
                data: {\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata: {\"usage\":null}\n\ndata: [DONE]\n\n",
                [5, 0, 0, 2, 0],
                "v",
            ),
            (
                "",
                r#"{"object":"response","model":"gpt-5","usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":6},
                "output_tokens":87,"output_tokens_details":{"reasoning_tokens":80},"total_tokens":123}}"#,
                [30, 6, 0, 7, 80],
                "gpt-5",
            ),
            (
                EVENTS,
                "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"model\":\"gpt-5\",\"usage\":null}}\n\n\
                event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"model\":\"gpt-5\",\"usage\":{\"input_tokens\":9,\
                \"input_tokens_details\":{\"cached_tokens\":2},\"output_tokens\":5,\"output_tokens_details\":{\"reasoning_tokens\":1}}}}\n\n",
                [7, 2, 0, 4, 1],
                "gpt-5",
            ),
            // Anthropic: input excludes the cache.
            (
                "",
                r#"{"model":"claude","usage":{"input_tokens":10,"cache_creation_input_tokens":3,"cache_read_input_tokens":20,"output_tokens":5}}"#,
                [10, 20, 3, 5, 0],
                "claude",
            ),
            (
                EVENTS,
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude\",\"usage\":{\"input_tokens\":25,\
                \"cache_read_input_tokens\":7,\"output_tokens\":1}}}\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\n\
                event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\n",
                [25, 7, 0, 15, 0],
                "claude",
            ),
            // Gemini: thoughts stand apart.
            (
                "",
                r#"{"usageMetadata":{"promptTokenCount":8,"cachedContentTokenCount":3,"toolUsePromptTokenCount":2,"candidatesTokenCount":10,
                "thoughtsTokenCount":30,"totalTokenCount":50},"modelVersion":"gemini"}"#,
                [7, 3, 0, 10, 30],
                "gemini",
            ),
            (
                "",
                r#"[{"usageMetadata":{"promptTokenCount":8}}
                ,{"usageMetadata":{"promptTokenCount":8,"candidatesTokenCount":4},"modelVersion":"gemini"}]"#,
                [8, 0, 0, 4, 0],
                "gemini",
            ),
            (
                "",
                r#"{"output":{},"usage":{"inputTokens":30,"outputTokens":628,"totalTokens":658,"cacheReadInputTokens":2,"cacheWriteInputTokens":1}}"#,
                [30, 2, 1, 628, 0],
                "",
            ),
            // Only a total, and a part that exceeds its whole.
            ("", r#"{"usage":{"total_tokens":7}}"#, [7, 0, 0, 0, 0], ""),
            (
                "",
                r#"{"usage":{"prompt_tokens":5,"completion_tokens":2,"completion_tokens_details":{"reasoning_tokens":9}}}"#,
                [5, 0, 0, 2, 9],
                "",
            ),
        ];
        for (kind, body, expected, model) in rows {
            let (usage, found) = read(&UsageSource::Known, kind, body.as_bytes(), false);
            assert_eq!((usage, found.as_deref().unwrap_or_default()), (Ok(expected), model), "{body}");
        }
    }

    #[test]
    fn lines_are_documents() {
        let body = "{\"model\":\"llama\",\"done\":false}\r\nno JSON\n\n{\"prompt_eval_count\":26,\"eval_count\":298}";
        for end in ["", "\n"] {
            let read = read(&UsageSource::Known, "application/x-ndjson; x=y", format!("{body}{end}").as_bytes(), false);
            assert_eq!(read, (Ok([26, 0, 0, 298, 0]), Some("llama".to_owned())));
        }
    }

    #[test]
    fn pointers_are_summed() {
        let sum = pointers(&["/a/0", "/a/2/b", "/c"]);
        assert_eq!(read(&sum, "", br#"{"a":[1,2,{"b":0.25}],"c":0.5}"#, false).0, Ok([2, 0, 0, 0, 0]));
        for (body, missing) in [
            (r#"{"a":[1],"c":"2"}"#, Missing::Absent),
            (r#"{"a":[-1]}"#, Missing::Absent),
            (r#"{"a":[1],"a":null}"#, Missing::Absent),
            (r#"{"a":[1]}]"#, Missing::NotJson),
            (r#"{"a":[1]"#, Missing::NotJson),
            ("<html>", Missing::NotJson),
            (" ", Missing::Absent),
        ] {
            assert_eq!(read(&sum, "", body.as_bytes(), false).0, Err(missing), "{body}");
        }
        assert_eq!(read(&sum, EVENTS, b"data: hello\n\n", false).0, Err(Missing::NotJson));
        assert_eq!(read(&sum, EVENTS, b"data: {}\n\ndata: [DONE]\n\n", false).0, Err(Missing::Absent));
    }

    #[test]
    fn of_a_body_that_broke_off_counts_what_was_seen() {
        let sum = pointers(&["/a", "/b"]);
        assert_eq!(read(&sum, "", br#"{"a":5,"b":7"#, true).0, Ok([5, 0, 0, 0, 0]));
        assert_eq!(read(&sum, "", br#"{"a":5"#, true).0, Err(Missing::Aborted));
        let stream = b"data: {\"a\":1}\n\ndata: {\"a\":2}\n\ndata: {\"a\":";
        assert_eq!(read(&sum, EVENTS, stream, true).0, Ok([2, 0, 0, 0, 0]));
    }

    /// Levels that are not checked cost no memory, and what follows them is read.
    #[test]
    fn deep_and_long_documents_are_read() {
        let deep = format!("{{\"x\":{}\"]}}\\\"\"{},\"a\":3}}", "[".repeat(100_000), "]".repeat(100_000));
        let long = format!("{{\"{0}\":\"{0}\",\"a\":3}}", "x\\u00e9\\n".repeat(100_000));
        for body in [deep, long] {
            assert_eq!(read(&pointers(&["/a"]), "", body.as_bytes(), false).0, Ok([3, 0, 0, 0, 0]));
        }
        assert!(std::mem::size_of::<UsageReader>() < 1024, "{}", std::mem::size_of::<UsageReader>());
    }

    #[test]
    fn escaped_names_are_compared_decoded() {
        let pointer = pointers(&["/a~1b\u{1F600}"]);
        for body in [r#"{"a\/b😀":1}"#, r#"{"\u0061/b\uD83D\ude00":1}"#] {
            assert_eq!(read(&pointer, "", body.as_bytes(), false).0, Ok([1, 0, 0, 0, 0]), "{body}");
        }
        for body in [r#"{"a/b\ud83d":1}"#, r#"{"a/b\ud83dx\ude00":1}"#, r#"{"a/b😀 ":1}"#] {
            assert_eq!(read(&pointer, "", body.as_bytes(), false).0, Err(Missing::Absent), "{body}");
        }
    }
}
