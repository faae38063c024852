//! For any bytes of a body: what is read does not depend on how the bytes are cut, and is what serde_json finds in the whole, or
//! nothing.

use std::sync::Arc;

use serde::de::IgnoredAny;
use serde_json::Value;
use transom_usage::json_pointer::JsonPointer;
use transom_usage::usage::{Kind, Usage};
use transom_usage::usage_reader::{Missing, ReadingPlan, SourceId, UsageReader, UsageSource};

/// With an escape, an index, the empty name, and a pointer that leads through another.
const POINTERS: [&str; 6] =
    ["/usage/total_tokens", "/usage", "/a~1b/0/n", "/~0/12", "/", "/usage/prompt_tokens_details/cached_tokens"];
const EVENTS: &str = "text/event-stream; charset=utf-8";

struct Plan {
    plan: Arc<ReadingPlan>,
    /// One for each of `POINTERS`.
    single: Vec<SourceId>,
    /// The sum of the first and the third, and the members of the known APIs.
    others: [SourceId; 2],
}

/// What was read: the usage of each source, and the model.
type Read = (Vec<Result<Usage, Missing>>, Option<String>);

thread_local! {
    static PLAN: Plan = {
        let mut plan = ReadingPlan::of_responses();
        let pointers = |texts: &[&str]| {
            UsageSource::Pointers(texts.iter().map(|text| JsonPointer::parse(text).unwrap()).collect())
        };
        let single = POINTERS.iter().map(|text| plan.add(&pointers(&[text]))).collect();
        let others = [plan.add(&pointers(&[POINTERS[0], POINTERS[2]])), plan.add(&UsageSource::Known)];
        Plan { plan: Arc::new(plan), single, others }
    };
}

fn read<'a>(plan: &Plan, kind: &str, coding: &str, pieces: impl Iterator<Item = &'a [u8]>) -> Read {
    let mut reader = UsageReader::new(&plan.plan, Some(kind.as_bytes()), Some(coding.as_bytes()));
    pieces.for_each(|piece| reader.push(piece));
    let reading = reader.finish(false);
    let usage = plan.single.iter().chain(&plan.others).map(|source| reading.usage(*source)).collect();
    (usage, reading.model().map(str::to_owned))
}

/// What serde_json finds at a pointer; `None` if it cannot tell.
fn found(document: &[u8], pointer: &str) -> Option<Result<Value, ()>> {
    // Texts that are no UTF-8 are read like others.
    match serde_json::from_str::<Value>(&String::from_utf8_lossy(document)) {
        Ok(value) => Some(Ok(value.pointer(pointer).cloned().unwrap_or(Value::Null))),
        // Valid, apart from a single surrogate, an exponent beyond floating-point numbers, or many levels.
        Err(_) if serde_json::from_slice::<IgnoredAny>(document).is_ok() => None,
        Err(_) if document.iter().filter(|byte| matches!(byte, b'[' | b'{')).count() > 256 => None,
        Err(_) => Some(Err(())),
    }
}

/// Whether `read` is what a document or stream states last, or nothing where its value is no exact number of tokens.
fn agrees(read: &Result<Usage, Missing>, value: &Value) -> bool {
    let number = read.as_ref().ok().map(|usage| usage[Kind::Input].rounded_up());
    match value {
        Value::Number(stated) => match (stated.as_u64(), stated.as_f64(), number) {
            (Some(stated), _, number) => number == Some(stated),
            (None, _, None) => true,
            // Beyond what the count can hold.
            (None, Some(stated), Some(number)) if stated > 1e19 => number as f64 > 0.999 * 1e19,
            (None, Some(stated), Some(number)) => {
                let (excess, tolerance) = (number as f64 - stated, stated.abs() * 1e-9 + 1e-9);
                stated >= 0.0 && -tolerance < excess && excess < 1.0 + tolerance
            }
            (None, None, Some(_)) => false,
        },
        _ => number.is_none(),
    }
}

/// The data of the events of a stream, with the one that no empty line follows.
fn events(stream: &[u8]) -> Vec<Vec<u8>> {
    let stream = stream.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(stream);
    let (mut events, mut data) = (Vec::new(), None::<Vec<u8>>);
    let mut rest = stream;
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')).unwrap_or(rest.len());
        let (line, after) = rest.split_at(end);
        rest = after.strip_prefix(b"\r\n").unwrap_or(after.get(1..).unwrap_or_default());
        let value = if line == b"data" { Some(&b""[..]) } else { line.strip_prefix(b"data:") };
        match value {
            Some(value) => {
                let value = value.strip_prefix(b" ").unwrap_or(value);
                match &mut data {
                    Some(data) => data.extend([b"\n", value].concat()),
                    None => data = Some(value.to_vec()),
                }
            }
            None if line.is_empty() => events.extend(data.take()),
            None => {}
        }
    }
    events.extend(data);
    events
}

pub fn holds(bytes: &[u8]) {
    PLAN.with(|plan| holds_with(plan, bytes));
}

fn holds_with(plan: &Plan, bytes: &[u8]) {
    let text = || bytes.escape_ascii().to_string();
    // The bytes choose where they are cut.
    let seed = bytes.iter().fold(7_usize, |seed, byte| seed.wrapping_mul(31).wrapping_add(usize::from(*byte)));
    let (first, second) = bytes.split_at(seed % (bytes.len() + 1));
    let pieces = || first.chunks(1 + seed % 5).chain(second.chunks(1 + seed % 7));

    let json = read(plan, "application/json", "", std::iter::once(bytes));
    assert_eq!(json, read(plan, "application/json", "", pieces()), "{}", text());
    for (pointer, read) in POINTERS.iter().zip(&json.0) {
        match found(bytes, pointer) {
            Some(Ok(value)) => assert!(agrees(read, &value), "{pointer}: {read:?} of {}", text()),
            Some(Err(())) => assert!(read.is_err(), "{pointer}: {read:?} of {}", text()),
            None => {}
        }
    }

    let stream = read(plan, EVENTS, "", std::iter::once(bytes));
    assert_eq!(stream, read(plan, EVENTS, "", pieces()), "{}", text());
    let events = events(bytes);
    for (pointer, read) in POINTERS.iter().zip(&stream.0) {
        let found: Option<Vec<_>> = events.iter().map(|event| found(event, pointer)).collect();
        let Some(found) = found else { continue };
        let last = found.into_iter().flatten().rfind(|value| !value.is_null());
        assert!(agrees(read, &last.unwrap_or(Value::Null)), "{pointer}: {read:?} of {}", text());
    }

    let coding = ["gzip", "deflate", "br", "zstd"][seed % 4];
    read(plan, "application/vnd.amazon.eventstream", coding, pieces());
    read(plan, "application/vnd.amazon.eventstream", "", pieces());
}
