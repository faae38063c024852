//! The members of a request body that rules depend on, read from the whole body before the request is decided.
//!
//! What servers may read differently must not decide: of two spellings of a document, each server has to see the values that are
//! read here. Therefore names are compared without regard to case, a repeated member is an error, documents in UTF-16 and UTF-32 and
//! the numbers `NaN` and `Infinity` are read as well, and a body is rejected that begins as JSON and is none, or that a server without
//! its content coding or charset could read as another document.

use std::borrow::Cow;
use std::sync::Arc;

use super::content_decoder::{ContentDecoder, DecodeError};
use super::decimal::Decimal;
use super::format::requested_model;
use super::json_pointer::{JsonPointer, PointerTree, SlotId, TextId};
use super::json_scanner::{Document, JsonScanner, may_be_json};
use super::usage::RequestedModel;
use super::values::{Text, Value, Values};

/// What is read of bodies. Made once, for all bodies.
#[derive(Debug)]
pub struct BodyPlan {
    tree: PointerTree,
    members: Vec<(JsonPointer, SlotId, TextId)>,
}

/// Why a body cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyError {
    /// It has a member twice on the way to a pointer.
    RepeatedMember,
    /// It begins as JSON, and is none, or has too many levels: some servers may read it all the same.
    NotJson,
    /// Its content coding or charset is unknown, its data are invalid, or they are JSON without the coding, too.
    Undecodable,
    /// Without its content coding it exceeds the limit.
    TooLarge,
    /// Its content coding cannot be decoded now: too much memory is in use for others.
    NoMemory,
}

/// What was read of one body.
#[derive(Debug)]
pub struct BodyValues {
    plan: Arc<BodyPlan>,
    values: Values,
    is_object: bool,
    bytes: usize,
}

impl BodyPlan {
    /// `None` without pointers.
    pub fn new(mut pointers: Vec<JsonPointer>) -> Option<Arc<BodyPlan>> {
        pointers.sort_unstable();
        pointers.dedup();
        let mut tree = PointerTree::ignoring_case();
        let member = |pointer: JsonPointer| {
            let (slot, text) = (tree.add_slot(), tree.add_text());
            tree.want_number(PointerTree::ROOT, &pointer, slot);
            tree.want_text(PointerTree::ROOT, &pointer, text);
            (pointer, slot, text)
        };
        let members: Vec<_> = pointers.into_iter().map(member).collect();
        (!members.is_empty()).then(|| Arc::new(BodyPlan { tree, members }))
    }
}

impl BodyValues {
    /// Reads a whole body, which has at most `max_bytes` without its content coding. Returns also the text that was read, in UTF-8.
    pub fn read<'b>(
        plan: &Arc<BodyPlan>,
        body: &'b [u8],
        coding: BodyCoding<'_>,
        max_bytes: usize,
    ) -> Result<(BodyValues, Cow<'b, [u8]>), BodyError> {
        let kind = coding.kind()?;
        let decoded = decode(body, ContentDecoder::new(coding.content_encoding), max_bytes)?;
        let bytes = decoded.len();
        let (mut scanner, mut values) = (JsonScanner::of_requests(), Values::new(&plan.tree));
        let text = to_utf8(decoded);
        scanner.push(&plan.tree, &mut values, &text);
        let is_complete = scanner.finish(&plan.tree, &mut values) == Document::Complete;
        let is_json = is_complete && !scanner.has_unchecked_levels();
        if values.has_repeated_member() {
            return Err(BodyError::RepeatedMember);
        }
        if is_json {
            values.commit();
        } else if may_be_json(&text) {
            return Err(BodyError::NotJson);
        } else {
            values.discard();
        }
        let is_object = is_json && kind == BodyKind::Any && text.trim_ascii_start().starts_with(b"{");
        Ok((BodyValues { plan: Arc::clone(plan), values, is_object, bytes }, text))
    }

    /// The text at a pointer of the plan, or the number or Boolean as text.
    pub fn text(&self, pointer: &JsonPointer) -> Text<'_> {
        self.member(pointer).map_or(Text::Absent, |(_, text)| self.values.text(text))
    }

    /// Whether an array or an object is at a pointer of the plan.
    pub fn is_container(&self, pointer: &JsonPointer) -> bool {
        self.member(pointer).is_some_and(|(slot, text)| {
            self.values.text(text) == Text::Absent
                && matches!(self.values.get(slot), Value::Unreadable | Value::Array(_))
        })
    }

    /// The number at a pointer of the plan, also in a text, as some servers read it. One that is too great is [`Decimal::MAX`].
    pub fn number(&self, pointer: &JsonPointer) -> Option<Decimal> {
        let (slot, text) = self.member(pointer)?;
        match (self.values.get(slot), self.values.text(text)) {
            (Value::Number(number), _) => Some(number),
            (Value::TooGreat, _) => Some(Decimal::MAX),
            (Value::Unreadable, Text::Found(text)) => {
                let digits = text.trim().trim_start_matches('+').replace('_', "");
                let without_zeros = digits.trim_start_matches('0');
                match without_zeros.starts_with(|c: char| c.is_ascii_digit()) {
                    true => Decimal::parse_saturating(without_zeros),
                    // A zero before the end or a point is a digit.
                    false => {
                        Decimal::parse_saturating(&digits[(digits.len() - without_zeros.len()).saturating_sub(1)..])
                    }
                }
            }
            (Value::Absent | Value::Unreadable | Value::Array(_), _) => None,
        }
    }

    /// How many answers a value asks for, at least 1: a number, or a list of so many prompts. A list of numbers is one prompt, in
    /// tokens.
    pub fn answers(&self, pointer: &JsonPointer) -> Decimal {
        let prompts = self.member(pointer).and_then(|(slot, _)| match self.values.get(slot) {
            Value::Array(prompts) => Some(prompts.into()),
            // A text is one prompt, also if it consists of digits.
            Value::Unreadable if pointer.name() == Some("prompt") => None,
            _ => self.number(pointer),
        });
        prompts.unwrap_or(Decimal::ONE).max(Decimal::ONE)
    }

    /// The model, if the plan reads it.
    pub fn model(&self) -> RequestedModel<'_> {
        self.text(&requested_model()).into()
    }

    fn member(&self, pointer: &JsonPointer) -> Option<(SlotId, TextId)> {
        let mut members = self.plan.members.iter();
        members.find(|(known, ..)| known == pointer).map(|(_, slot, text)| (*slot, *text))
    }

    /// Whether the body is a JSON object, for every server: not by the type of a form.
    pub fn is_object(&self) -> bool {
        self.is_object
    }

    /// Its length without its content coding.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// How the fields of a request say that its body is coded.
#[derive(Clone, Copy, Default, Debug)]
pub struct BodyCoding<'f> {
    /// Of all lines.
    pub content_encoding: Option<&'f [u8]>,
    pub content_type: Option<&'f [u8]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyKind {
    /// Servers read it as a form, even if it is JSON.
    Form,
    Any,
}

/// The charsets of JSON: those that are read here, whatever the name.
const CHARSETS: [&str; 9] =
    ["utf-8", "utf8", "us-ascii", "utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be"];

impl BodyCoding<'_> {
    fn kind(self) -> Result<BodyKind, BodyError> {
        let value = String::from_utf8_lossy(self.content_type.unwrap_or_default()).to_ascii_lowercase();
        let charset = |parameter: &str| {
            let value = parameter.split_once('=').map_or("", |(_, value)| value);
            value.trim_matches([' ', '\t', '"', '\'']).to_owned()
        };
        let charsets: Vec<String> =
            value.split([';', ',']).filter(|part| part.contains("charset")).map(charset).collect();
        match &charsets[..] {
            [] => {}
            [charset] if CHARSETS.contains(&charset.as_str()) => {}
            _ => return Err(BodyError::Undecodable),
        }
        let is_form = value.contains("application/x-www-form-urlencoded") || value.contains("multipart/");
        Ok(if is_form { BodyKind::Form } else { BodyKind::Any })
    }
}

/// Bytes of a coded body that are decoded before its length is checked again.
const PIECE_BYTES: usize = 4096;

fn decode(body: &[u8], mut decoder: ContentDecoder, max_bytes: usize) -> Result<Cow<'_, [u8]>, BodyError> {
    if decoder.is_identity() {
        return Ok(Cow::Borrowed(body));
    }
    let mut decoded = Vec::new();
    for piece in body.chunks(PIECE_BYTES) {
        decoder.push(piece, &mut |bytes: &[u8]| {
            if decoded.len() <= max_bytes {
                decoded.extend_from_slice(bytes);
            }
        });
        match decoder.error() {
            Some(DecodeError::Unreadable) => return Err(BodyError::Undecodable),
            Some(DecodeError::TooLarge) => return Err(BodyError::TooLarge),
            Some(DecodeError::NoMemory) => return Err(BodyError::NoMemory),
            None if decoded.len() > max_bytes => return Err(BodyError::TooLarge),
            None => {}
        }
    }
    // Most servers ignore codings of requests, and some ignore what follows the end, or read what has none.
    let is_json_too = matches!(to_utf8(Cow::Borrowed(body)).trim_ascii_start().first(), Some(b'{' | b'['));
    match decoder.is_exact() && !is_json_too {
        true => Ok(Cow::Owned(decoded)),
        false => Err(BodyError::Undecodable),
    }
}

/// JSON in UTF-16 or UTF-32 begins with a mark, or has zeros among its first bytes (RFC 4627, section 3).
fn to_utf8(body: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    let Some(first) = body.first_chunk() else { return body };
    let (width, is_big_endian, mark) = match *first {
        [0xEF, 0xBB, 0xBF, _] => return Cow::Owned(body[3..].to_vec()),
        [0xFF, 0xFE, 0, 0] => (4, false, 4),
        [0, 0, 0xFE, 0xFF] => (4, true, 4),
        [0xFF, 0xFE, ..] => (2, false, 2),
        [0xFE, 0xFF, ..] => (2, true, 2),
        [0, 0, ..] => (4, true, 0),
        [_, 0, 0, 0] => (4, false, 0),
        [0, _, ..] => (2, true, 0),
        [_, 0, ..] => (2, false, 0),
        _ => return body,
    };
    let unit = |bytes: &[u8]| {
        let join = |unit: u32, byte: &u8| unit << 8 | u32::from(*byte);
        if is_big_endian { bytes.iter().fold(0, join) } else { bytes.iter().rev().fold(0, join) }
    };
    let units = body[mark..].chunks(width).map(unit);
    let text: String = if width == 4 {
        units.map(|unit| char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    } else {
        let decoded = char::decode_utf16(units.map(|unit| unit as u16));
        decoded.map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    };
    Cow::Owned(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::MemoryBudget;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn pointer(text: &str) -> JsonPointer {
        JsonPointer::parse(text).unwrap()
    }

    fn read_coded(body: &[u8], coding: Option<&[u8]>) -> Result<BodyValues, BodyError> {
        let pointers = ["/model", "/params/name", "/max_tokens", "/list/1", "/prompt"].map(pointer);
        let coding = BodyCoding { content_encoding: coding, content_type: None };
        BodyValues::read(&BodyPlan::new(pointers.to_vec()).unwrap(), body, coding, 1000).map(|(values, _)| values)
    }

    fn read_as(content_type: &str, body: &str) -> Result<BodyValues, BodyError> {
        let coding = BodyCoding { content_encoding: None, content_type: Some(content_type.as_bytes()) };
        let plan = BodyPlan::new(vec![pointer("/model")]).unwrap();
        BodyValues::read(&plan, body.as_bytes(), coding, 1000).map(|(values, _)| values)
    }

    fn read(body: &[u8]) -> Result<BodyValues, BodyError> {
        read_coded(body, None)
    }

    /// The client is not to blame if others use the memory.
    #[test]
    fn a_lack_of_memory_is_no_error_of_the_body() {
        static BUDGET: MemoryBudget = MemoryBudget::new(1 << 16);
        let mut body = Vec::new();
        let mut encoder = GzEncoder::new(&mut body, Compression::fast());
        encoder.write_all(b"{}").unwrap();
        encoder.finish().unwrap();
        let decoded = || decode(&body, ContentDecoder::within(&BUDGET, Some(b"gzip")), 1000).map(Cow::into_owned);
        assert_eq!(decoded(), Ok(b"{}".to_vec()));
        let mut others = BUDGET.share();
        assert!(others.grow_to(1));
        assert_eq!(decoded(), Err(BodyError::NoMemory));
        drop(others);
        assert_eq!(decoded(), Ok(b"{}".to_vec()));
    }

    fn text(body: &str, at: &str) -> Option<String> {
        match read(body.as_bytes()).unwrap().text(&pointer(at)) {
            Text::Found(text) => Some(text.to_owned()),
            Text::Absent => None,
            Text::Unreadable => Some(String::from("?")),
        }
    }

    #[test]
    fn a_request_asks_for_several_answers() {
        for (value, answers) in [
            ("3", 3),
            ("\"3\"", 3),
            ("1e30", u64::MAX),
            ("0", 1),
            ("-2", 1),
            ("null", 1),
            ("{\"a\":1,\"b\":2}", 1),
            ("\"text\"", 1),
            ("[]", 1),
            ("[\"a\"]", 1),
            ("[\"a\", \"b\" , null]", 3),
            ("[[1,2],[3],[[],[]]]", 3),
            // A prompt in tokens.
            ("[1, 20, 300]", 1),
            ("[1,\"a\",2,{\"x\":[1,2]},\"b\"]", 3),
        ] {
            let values = read(format!("{{\"max_tokens\":{value},\"list\":[7,8]}}").as_bytes()).unwrap();
            assert_eq!(values.answers(&pointer("/max_tokens")).rounded_up(), answers, "{value}");
            assert_eq!(values.number(&pointer("/list/1")), Some(8.into()), "{value}");
        }
        assert_eq!(read(b"{}").unwrap().answers(&pointer("/max_tokens")), Decimal::ONE);
        // A prompt of digits.
        for (value, answers) in [("\"42\"", 1), ("[\"42\",\"7\"]", 2)] {
            let values = read(format!("{{\"prompt\":{value}}}").as_bytes()).unwrap();
            assert_eq!(values.answers(&pointer("/prompt")).rounded_up(), answers, "{value}");
        }
    }

    #[test]
    fn spellings_of_one_value_are_one() {
        for body in [
            r#"{"model":"a/é"}"#,
            " {\n\"x\" : [{\"model\":1}], \"model\"\t: \"\\u0061\\/\\u00E9\" } ",
            r#"{"m\u006fdel":"a/é","models":{"model":2},"x":{"model":3,"model":4}}"#,
            r#"{"MODEL":"a/é"}"#,
        ] {
            assert_eq!(text(body, "/model").as_deref(), Some("a/é"), "{body}");
        }
        let wide = r#"{"model":"a/é"}"#;
        let utf16: Vec<u16> = wide.encode_utf16().collect();
        let documents: [Vec<u8>; 7] = [
            utf16.iter().flat_map(|unit| unit.to_le_bytes()).collect(),
            utf16.iter().flat_map(|unit| unit.to_be_bytes()).collect(),
            std::iter::once(&0xFEFF).chain(&utf16).flat_map(|unit| unit.to_le_bytes()).collect(),
            std::iter::once(&0xFEFF).chain(&utf16).flat_map(|unit| unit.to_be_bytes()).collect(),
            wide.chars().flat_map(|sign| (sign as u32).to_le_bytes()).collect(),
            wide.chars().flat_map(|sign| (sign as u32).to_be_bytes()).collect(),
            format!("\u{feff}{wide}").into_bytes(),
        ];
        for document in documents {
            let values = read(&document).unwrap();
            assert_eq!(values.text(&pointer("/model")), Text::Found("a/é"), "{document:?}");
        }
    }

    #[test]
    fn values_are_texts_of_one_form() {
        for (value, expected) in [
            ("\"\"", Some("")),
            ("10", Some("10")),
            ("1.0e1", Some("10")),
            ("0.050", Some("0.05")),
            ("-1", Some("?")),
            ("1e99", Some("?")),
            ("true", Some("true")),
            ("false", Some("false")),
            ("null", None),
            ("[]", None),
            ("{\"model\":\"a\"}", None),
            ("\"\\ud83d\"", Some("?")),
            ("\"\\ud83d\\ude00\"", Some("😀")),
        ] {
            assert_eq!(text(&format!("{{\"model\":{value}}}"), "/model").as_deref(), expected, "{value}");
        }
        assert_eq!(read(b"{\"model\":\"\xFF\"}").unwrap().text(&pointer("/model")), Text::Unreadable);
        let long = |length| text(&format!("{{\"model\":\"{}\"}}", "x".repeat(length)), "/model").unwrap();
        assert_eq!((long(950).len(), long(1025).as_str()), (950, "?"));
        let body = r#"{"max_tokens":7.5,"params":{"name":"n"},"list":[{"model":"x"},"second"]}"#;
        assert_eq!(read(body.as_bytes()).unwrap().number(&pointer("/max_tokens")), Decimal::parse("7.5"));
        for (value, number) in [
            ("\" +07_00 \"", Decimal::parse("700")),
            ("1e30", Some(Decimal::MAX)),
            ("\"1000000000000000000000000000000\"", Some(Decimal::MAX)),
            ("-1", None),
            ("-1e30", None),
            ("1e-30", None),
            ("\"x\"", None),
            ("Infinity", None),
            ("true", None),
            ("null", None),
        ] {
            let body = format!("{{\"max_tokens\":{value}}}");
            assert_eq!(read(body.as_bytes()).unwrap().number(&pointer("/max_tokens")), number, "{value}");
        }
        assert_eq!(
            ["/params/name", "/list/1", "/model"].map(|at| text(body, at)),
            [Some("n".to_owned()), Some("second".to_owned()), None]
        );
    }

    #[test]
    fn repeated_members_and_long_bodies_are_errors() {
        for body in [
            r#"{"model":"a","model":"b"}"#,
            r#"{"model":"a","\u006dodel":"a"}"#,
            r#"{"model":"a","Model":"b"}"#,
            r#"{"max_tokens":1,"max_token\u017f":2}"#,
            r#"{"max_tokens":1,"max_to\u212aens":2}"#,
            r#"{"model":null,"x":[],"model":"b""#,
            r#"{"params":{},"params":{"name":1}}"#,
            r#"{"params":{"name":1,"name":1}}"#,
        ] {
            assert_eq!(read(body.as_bytes()).err(), Some(BodyError::RepeatedMember), "{body}");
        }
        for body in ["", "x", "/x", "model=a", "\"{}\"", "[{\"model\":1}]"] {
            let values = read(body.as_bytes()).unwrap();
            assert_eq!((values.is_object(), values.text(&pointer("/model"))), (false, Text::Absent), "{body}");
        }
        let gzip = |body: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        };
        let values = read_coded(&gzip(br#"{"model":"a"}"#), Some(b"gzip")).unwrap();
        assert_eq!((values.text(&pointer("/model")), values.bytes()), (Text::Found("a"), 13));
        let read_gzip = |body: &[u8], coding: &[u8]| read_coded(body, Some(coding)).err();
        assert_eq!(read_gzip(&gzip(&[b' '; 1001]), b"gzip"), Some(BodyError::TooLarge));
        assert_eq!(read_gzip(&gzip(&vec![b' '; 8 << 20]), b"gzip"), Some(BodyError::TooLarge));
        assert_eq!(read_gzip(b"{}", b"gzip"), Some(BodyError::Undecodable));
        assert_eq!(read_gzip(b"{}", b"compress"), Some(BodyError::Undecodable));
        let whole = gzip(br#"{"model":"a"}"#);
        assert_eq!(read_gzip(&whole[..whole.len() - 9], b"gzip"), Some(BodyError::Undecodable));
    }

    /// A body that is one document to this gateway, and another one to a server that decodes it otherwise.
    #[test]
    fn bodies_that_servers_may_read_otherwise_are_rejected() {
        let compress = |zlib: bool, body: &[u8]| {
            let mut encoder = flate2::Compress::new(Compression::best(), zlib);
            let mut data = Vec::with_capacity(1000);
            encoder.compress_vec(body, &mut data, flate2::FlushCompress::Finish).unwrap();
            data
        };
        let json = br#"{"model":"a"}"#;
        let error = |coding: &[u8], body: &[u8]| read_coded(body, Some(coding)).err();
        assert_eq!(error(b"deflate", &compress(true, json)), None);
        let behind = [&compress(true, json)[..], br#" {"model":"b"}"#].concat();
        for body in [&compress(false, json)[..], &behind, b"", br#"{"model":"b"}"#] {
            assert_eq!(error(b"deflate", body), Some(BodyError::Undecodable), "{body:?}");
        }
        // The header of a frame that begins with JSON is none; brotli has no header.
        assert_eq!(error(b"br", br#"[{"model":"b"}]"#), Some(BodyError::Undecodable));
        let json = r#"{"model":"a"}"#;
        for (content_type, is_read) in [
            ("application/json; charset=utf-8", true),
            ("application/json; Charset=\"UTF-8\"", true),
            ("text/plain", true),
            ("application/json; charset=utf-7", false),
            ("application/json; charset=utf-8; charset=utf-7", false),
            ("application/json; charset*=utf-8''utf-7", false),
        ] {
            let read = read_as(content_type, json);
            assert_eq!(
                read.map(|values| values.is_object()).map_err(|error| error == BodyError::Undecodable),
                if is_read { Ok(true) } else { Err(true) },
                "{content_type}"
            );
        }
        for form in ["application/x-www-form-urlencoded", "Multipart/Form-Data; boundary=x"] {
            let values = read_as(form, json).unwrap();
            assert_eq!((values.is_object(), values.text(&pointer("/model"))), (false, Text::Found("a")), "{form}");
        }
        // Python reads numbers that JSON does not have.
        for value in ["NaN", "Infinity", "-Infinity"] {
            assert_eq!(
                text(&format!("{{\"model\":\"a\",\"x\":[{value}],\"y\":{value}}}"), "/model").as_deref(),
                Some("a")
            );
            assert_eq!(text(&format!("{{\"model\":{value}}}"), "/model").as_deref(), Some("?"), "{value}");
        }
        // Below the levels that are checked, there may be anything.
        let deep = format!("{{\"model\":\"a\",\"x\":{}/*\"*/{}}}", "[".repeat(300), "]".repeat(300));
        for body in [
            deep.as_str(),
            "{\"model\":\"a\"}x",
            "{\"model\":\"a\"}{}",
            "{\"model\":\"a\"",
            "{\"model\":\"a\",}",
            "{\"model\":\"\t\"}",
            "{\"model\":01}",
            "{'model':1}",
            "{\"model\":\"a\"/**/}",
            "\u{feff} // x\n{\"model\":\"a\"}",
            "[NAN]",
            "[-]",
            "[-Inf]",
        ] {
            assert_eq!(read(body.as_bytes()).err(), Some(BodyError::NotJson), "{body}");
        }
        let values = read(br#"{"model":["a"],"params":{"name":null},"max_tokens":{}}"#).unwrap();
        let containers = ["/model", "/params/name", "/max_tokens"].map(|at| values.is_container(&pointer(at)));
        assert_eq!(containers, [true, false, true]);
    }
}
