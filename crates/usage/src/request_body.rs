//! The members of a request body that rules depend on, read from the whole body before the request is decided.
//!
//! What servers may read differently must not decide: of two spellings of a document, each server has to see the values that are
//! read here. Therefore names are compared without regard to case, a repeated member is an error, and documents in UTF-16 and
//! UTF-32 are read as well.

use std::borrow::Cow;
use std::sync::Arc;

use super::content_decoder::{ContentDecoder, DecodeError};
use super::decimal::Decimal;
use super::format::requested_model;
use super::json_pointer::{JsonPointer, PointerTree, SlotId, TextId};
use super::json_scanner::{Document, JsonScanner};
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
    /// Its content coding is unknown, or its data are invalid.
    Undecodable,
    /// Without its content coding it exceeds the limit.
    TooLarge,
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
    /// Reads a whole body, which has at most `max_bytes` without its content coding.
    pub fn read(
        plan: &Arc<BodyPlan>,
        body: &[u8],
        content_encoding: Option<&[u8]>,
        max_bytes: usize,
    ) -> Result<BodyValues, BodyError> {
        let decoded = decode(body, content_encoding, max_bytes)?;
        let bytes = decoded.len();
        let (mut scanner, mut values) = (JsonScanner::new(false), Values::new(&plan.tree));
        let text = to_utf8(decoded);
        scanner.push(&plan.tree, &mut values, &text);
        let is_json = scanner.finish(&plan.tree, &mut values) == Document::Complete;
        if values.has_repeated_member() {
            return Err(BodyError::RepeatedMember);
        }
        if is_json {
            values.commit();
        } else {
            values.discard();
        }
        let is_object = is_json && text.trim_ascii_start().starts_with(b"{");
        Ok(BodyValues { plan: Arc::clone(plan), values, is_object, bytes })
    }

    /// The text at a pointer of the plan, or the number or Boolean as text.
    pub fn text(&self, pointer: &JsonPointer) -> Text<'_> {
        self.member(pointer).map_or(Text::Absent, |(_, text)| self.values.text(text))
    }

    /// The number at a pointer of the plan.
    pub fn number(&self, pointer: &JsonPointer) -> Option<Decimal> {
        match self.values.get(self.member(pointer)?.0) {
            Value::Number(number) => Some(number),
            Value::Absent | Value::Unreadable => None,
        }
    }

    /// The name of the model, if the plan reads it.
    pub fn model(&self) -> Option<&str> {
        match self.text(&requested_model()) {
            Text::Found(name) if !name.is_empty() => Some(name),
            _ => None,
        }
    }

    fn member(&self, pointer: &JsonPointer) -> Option<(SlotId, TextId)> {
        let mut members = self.plan.members.iter();
        members.find(|(known, ..)| known == pointer).map(|(_, slot, text)| (*slot, *text))
    }

    /// Whether the body is a JSON object.
    pub fn is_object(&self) -> bool {
        self.is_object
    }

    /// Its length without its content coding.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Bytes of a coded body that are decoded before its length is checked again.
const PIECE_BYTES: usize = 4096;

fn decode<'b>(body: &'b [u8], content_encoding: Option<&[u8]>, max_bytes: usize) -> Result<Cow<'b, [u8]>, BodyError> {
    let mut decoder = ContentDecoder::new(content_encoding);
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
            None if decoded.len() > max_bytes => return Err(BodyError::TooLarge),
            None => {}
        }
    }
    Ok(Cow::Owned(decoded))
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
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn pointer(text: &str) -> JsonPointer {
        JsonPointer::parse(text).unwrap()
    }

    fn read_coded(body: &[u8], coding: Option<&[u8]>) -> Result<BodyValues, BodyError> {
        let pointers = ["/model", "/params/name", "/max_tokens", "/list/1"].map(pointer);
        BodyValues::read(&BodyPlan::new(pointers.to_vec()).unwrap(), body, coding, 1000)
    }

    fn read(body: &[u8]) -> Result<BodyValues, BodyError> {
        read_coded(body, None)
    }

    fn text(body: &str, at: &str) -> Option<String> {
        match read(body.as_bytes()).unwrap().text(&pointer(at)) {
            Text::Found(text) => Some(text.to_owned()),
            Text::Absent => None,
            Text::Unreadable => Some(String::from("?")),
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
            r#"{"model":null,"x":[],"model":"b""#,
            r#"{"params":{},"params":{"name":1}}"#,
            r#"{"params":{"name":1,"name":1}}"#,
        ] {
            assert_eq!(read(body.as_bytes()).err(), Some(BodyError::RepeatedMember), "{body}");
        }
        for body in ["", "x", "{\"model\":\"a\"}x", "{\"model\":\"a\"", "{\"model\":\"a\",}", "[{\"model\":1}]"] {
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
    }
}
