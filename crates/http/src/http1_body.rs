//! Bodies of HTTP/1.1 messages as bytes, without I/O (RFC 9112, sections 6 and 7): finds their end, decodes and writes chunks,
//! and parses and writes fields, of which trailers consist.
//!
//! `httparse` parses chunk sizes and fields; field values share the memory of the received bytes.

use std::io::Write;

use bytes::{Buf, Bytes};
use http::Version;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body::{Frame, SizeHint};
use memchr::memmem;

/// The most fields of a trailer section.
const TRAILERS_MAX: usize = 100;
/// A trailer section of this size is parsed once its end has arrived.
const UNPARSED_TRAILERS_BYTES: usize = 1024;
/// The longest line of a chunk size, with its extensions.
const CHUNK_LINE_MAX_BYTES: usize = 4 * 1024;
/// The most bytes of chunk extensions in one body (RFC 9112, section 7.1.1: a server limits their total).
const EXTENSIONS_MAX_BYTES: usize = 16 * 1024;
/// What follows the data of the last chunk, where there are no trailers.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// Why a message is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MalformedMessage {
    Head(httparse::Error),
    HeadTooLarge,
    Status,
    Field,
    /// The end of the body is unknown.
    Length,
    Chunk,
    Trailers,
}

impl MalformedMessage {
    /// The problem, as the end of a sentence about the message.
    pub fn as_str(self) -> &'static str {
        match self {
            MalformedMessage::Head(httparse::Error::HeaderName) => "its head has an invalid field name",
            MalformedMessage::Head(httparse::Error::HeaderValue) => "its head has an invalid field value",
            MalformedMessage::Head(httparse::Error::Version) => "it is not HTTP/1.0 or HTTP/1.1",
            MalformedMessage::Head(httparse::Error::TooManyHeaders) => "its head has more than 100 fields",
            MalformedMessage::Head(_) => "its head is malformed",
            MalformedMessage::HeadTooLarge => "its head is larger than 64 KiB",
            MalformedMessage::Status => "its status is not a number from 100 to 999",
            MalformedMessage::Field => "its head has an invalid field",
            MalformedMessage::Length => "its Content-Length or Transfer-Encoding is malformed",
            MalformedMessage::Chunk => "a chunk of its body is malformed",
            MalformedMessage::Trailers => "its trailers are malformed",
        }
    }
}

/// A field that was parsed in `received`, whose memory the value shares.
pub fn parse_field(
    field: &httparse::Header<'_>,
    received: &Bytes,
) -> Result<(HeaderName, HeaderValue), MalformedMessage> {
    let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_invalid| MalformedMessage::Field)?;
    let value =
        HeaderValue::from_maybe_shared(received.slice_ref(field.value)).map_err(|_invalid| MalformedMessage::Field)?;
    Ok((name, value))
}

pub fn write_field(name: &HeaderName, value: &HeaderValue, to: &mut Vec<u8>) {
    to.extend_from_slice(name.as_str().as_bytes());
    to.extend_from_slice(b": ");
    to.extend_from_slice(value.as_bytes());
    to.extend_from_slice(b"\r\n");
}

/// Whether a list has an element, regardless of case.
pub fn has_element(list: &HeaderValue, element: &[u8]) -> bool {
    elements(list).any(|known| known.eq_ignore_ascii_case(element))
}

/// The elements of a comma-separated list.
pub fn elements(list: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    list.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Whether a line ends in a line feed without a carriage return. The loop has no branch, so that the compiler vectorizes it.
pub fn has_bare_line_feed(bytes: &[u8]) -> bool {
    let pairs = bytes.iter().zip(bytes.iter().skip(1));
    let bare = pairs.fold(0, |bare, (first, second)| bare | u8::from(*second == b'\n') & u8::from(*first != b'\r'));
    bare != 0 || bytes.first() == Some(&b'\n')
}

/// Writes the line before the data of a chunk. A line end follows the data.
pub fn write_chunk_size(bytes: usize, to: &mut Vec<u8>) {
    // Writing to a vector does not fail.
    let _ = write!(to, "{bytes:x}\r\n");
}

/// Writes the end of a chunked body; of its trailers, those that the second map announces in Trailer.
pub fn write_last_chunk(trailers: Option<(&HeaderMap, &HeaderMap)>, to: &mut Vec<u8>) {
    to.extend_from_slice(b"0\r\n");
    if let Some((trailers, head)) = trailers {
        for (name, value) in trailers {
            if head.get_all(header::TRAILER).iter().any(|list| has_element(list, name.as_str().as_bytes())) {
                write_field(name, value, to);
            }
        }
    }
    to.extend_from_slice(b"\r\n");
}

/// Decodes the body of a message, and finds its end (RFC 9112, section 6.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyDecoder {
    /// Bytes left.
    Length(u64),
    Chunked(ChunkedBody),
    /// The body ends with the connection.
    UntilClose,
    Ended,
}

/// The rest of a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkedBody {
    next: ChunkPosition,
    /// Bytes of extensions so far.
    extension_bytes: usize,
    /// The largest trailer section.
    trailers_max_bytes: usize,
}

/// What follows in a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ChunkPosition {
    /// The line with the size of a chunk.
    Size,
    /// Data of a chunk: bytes left.
    Data(u64),
    /// The line end behind the data of a chunk.
    DataEnd,
    Trailers,
}

impl BodyDecoder {
    /// Reads a Content-Length or Transfer-Encoding (RFC 9112, section 6.3). The trailers may have `trailers_max_bytes`.
    pub fn of_framing(
        name: &HeaderName,
        value: &[u8],
        version: Version,
        trailers_max_bytes: usize,
    ) -> Result<BodyDecoder, MalformedMessage> {
        let body = if *name == header::CONTENT_LENGTH {
            let digits = Some(value).filter(|value| value.iter().all(u8::is_ascii_digit));
            // Some servers have 63 bits.
            let length = digits.and_then(|digits| str::from_utf8(digits).ok()?.parse::<i64>().ok()?.try_into().ok());
            length.map(BodyDecoder::of_length)
        } else {
            let is_chunked = value.eq_ignore_ascii_case(b"chunked") && version == Version::HTTP_11;
            is_chunked.then(|| BodyDecoder::chunked(trailers_max_bytes))
        };
        body.ok_or(MalformedMessage::Length)
    }

    pub fn chunked(trailers_max_bytes: usize) -> BodyDecoder {
        BodyDecoder::Chunked(ChunkedBody { next: ChunkPosition::Size, extension_bytes: 0, trailers_max_bytes })
    }

    fn of_length(bytes: u64) -> BodyDecoder {
        if bytes == 0 { BodyDecoder::Ended } else { BodyDecoder::Length(bytes) }
    }

    pub fn has_ended(&self) -> bool {
        *self == BodyDecoder::Ended
    }

    /// Takes the next frame from `received`. `None`: the body has ended, or more bytes are needed.
    pub fn decode(&mut self, received: &mut Bytes) -> Result<Option<Frame<Bytes>>, MalformedMessage> {
        match self {
            BodyDecoder::Ended => Ok(None),
            BodyDecoder::UntilClose => Ok(take_data(received, u64::MAX)),
            BodyDecoder::Length(left) => {
                let frame = take_data(received, *left);
                *self = BodyDecoder::of_length(*left - data_bytes(frame.as_ref()));
                Ok(frame)
            }
            BodyDecoder::Chunked(body) => {
                let (frame, has_ended) = body.decode(received)?;
                if has_ended {
                    *self = BodyDecoder::Ended;
                }
                Ok(frame)
            }
        }
    }

    /// The number of bytes of the body that will probably follow; `None`: unknown.
    pub fn expected_bytes(&self) -> Option<u64> {
        match self {
            BodyDecoder::Length(left) | BodyDecoder::Chunked(ChunkedBody { next: ChunkPosition::Data(left), .. }) => {
                Some(*left)
            }
            BodyDecoder::Chunked(_) | BodyDecoder::UntilClose => None,
            BodyDecoder::Ended => Some(0),
        }
    }

    pub fn size_hint(&self) -> SizeHint {
        match self {
            BodyDecoder::Length(left) => SizeHint::with_exact(*left),
            BodyDecoder::Chunked(_) | BodyDecoder::UntilClose => SizeHint::default(),
            BodyDecoder::Ended => SizeHint::with_exact(0),
        }
    }
}

impl ChunkedBody {
    /// Takes the next frame, and returns whether the body has ended.
    fn decode(&mut self, received: &mut Bytes) -> Result<(Option<Frame<Bytes>>, bool), MalformedMessage> {
        loop {
            match &mut self.next {
                ChunkPosition::Size => match take_chunk_size(received, &mut self.extension_bytes)? {
                    None => return Ok((None, false)),
                    Some(0) => self.next = ChunkPosition::Trailers,
                    Some(size) => self.next = ChunkPosition::Data(size),
                },
                ChunkPosition::Data(left) => {
                    let frame = take_data(received, *left);
                    *left -= data_bytes(frame.as_ref());
                    let is_whole = *left == 0;
                    // Frame and end together take one write to the other side.
                    let is_last = is_whole && received.starts_with(LAST_CHUNK);
                    if is_last {
                        received.advance(LAST_CHUNK.len());
                    } else if is_whole {
                        self.next = ChunkPosition::DataEnd;
                    }
                    return Ok((frame, is_last));
                }
                ChunkPosition::DataEnd => match received.get(..2) {
                    Some(b"\r\n") => {
                        received.advance(2);
                        self.next = ChunkPosition::Size;
                    }
                    Some(_) => return Err(MalformedMessage::Chunk),
                    None => return Ok((None, false)),
                },
                ChunkPosition::Trailers => {
                    let Some(trailers) = take_trailers(received, self.trailers_max_bytes)? else {
                        return Ok((None, false));
                    };
                    return Ok(((!trailers.is_empty()).then(|| Frame::trailers(trailers)), true));
                }
            }
        }
    }
}

fn take_data(received: &mut Bytes, most: u64) -> Option<Frame<Bytes>> {
    let bytes = usize::try_from(most).unwrap_or(usize::MAX).min(received.len());
    (bytes > 0).then(|| Frame::data(received.split_to(bytes)))
}

fn data_bytes(frame: Option<&Frame<Bytes>>) -> u64 {
    frame.and_then(Frame::data_ref).map_or(0, |data| data.len() as u64)
}

/// Takes the line with the size of a chunk; counts the bytes behind the size. `None`: it is incomplete.
fn take_chunk_size(received: &mut Bytes, extension_bytes: &mut usize) -> Result<Option<u64>, MalformedMessage> {
    // httparse takes an empty line for a size of 0, and a line feed for a part of an extension.
    if received.first().is_some_and(|first| !first.is_ascii_hexdigit()) {
        return Err(MalformedMessage::Chunk);
    }
    match httparse::parse_chunk_size(received) {
        Ok(httparse::Status::Complete((length, size))) if !received[..length - 2].contains(&b'\n') => {
            let digits = received.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
            *extension_bytes += length - 2 - digits;
            received.advance(length);
            if *extension_bytes <= EXTENSIONS_MAX_BYTES { Ok(Some(size)) } else { Err(MalformedMessage::Chunk) }
        }
        Ok(httparse::Status::Partial) if received.len() < CHUNK_LINE_MAX_BYTES => Ok(None),
        _ => Err(MalformedMessage::Chunk),
    }
}

/// Takes the trailers and the empty line behind them. `None`: they are incomplete.
fn take_trailers(received: &mut Bytes, max_bytes: usize) -> Result<Option<HeaderMap>, MalformedMessage> {
    // A long section that arrives byte by byte is not parsed each time.
    let is_long = (UNPARSED_TRAILERS_BYTES..max_bytes).contains(&received.len());
    // An empty section is only the empty line.
    if is_long && !received.starts_with(b"\r\n") && memmem::find(received, b"\n\r\n").is_none() {
        return Ok(None);
    }
    let mut fields = [httparse::EMPTY_HEADER; TRAILERS_MAX];
    match httparse::parse_headers(received, &mut fields) {
        // Parsers disagree whether a line feed alone ends a line, and so where the next message begins.
        Ok(httparse::Status::Complete((length, fields)))
            if length <= max_bytes && !has_bare_line_feed(&received[..length]) =>
        {
            let trailers = fields.iter().map(|field| parse_field(field, received)).collect::<Result<_, _>>();
            let trailers = trailers.map_err(|_invalid| MalformedMessage::Trailers)?;
            received.advance(length);
            Ok(Some(trailers))
        }
        Ok(httparse::Status::Partial) if received.len() < max_bytes => Ok(None),
        _ => Err(MalformedMessage::Trailers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of a body that arrives in these pieces, and whether it has ended; `None`: it is malformed.
    fn decoded(mut body: BodyDecoder, pieces: &[&[u8]]) -> Option<(Vec<u8>, bool)> {
        let (mut data, mut received) = (Vec::new(), Bytes::new());
        for piece in pieces {
            received = [&received, *piece].concat().into();
            while let Some(frame) = body.decode(&mut received).ok()? {
                data.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
            }
        }
        Some((data, body.has_ended()))
    }

    #[test]
    fn a_chunked_body_is_decoded_however_it_is_cut() {
        for (text, data) in [
            ("0\r\n\r\n", ""),
            ("3\r\nabc\r\n0\r\n\r\n", "abc"),
            ("2;a=b\r\n\r\n\r\n01 \r\n0\r\n000\r\nX: y\r\nZ: 0\r\n\r\n", "\r\n0"),
            ("A\r\n0\r\n\r\n12345\r\n1;x\r\n6\r\n0;y\r\n\r\n", "0\r\n\r\n123456"),
        ] {
            for cut in 0..text.len() {
                let (first, second) = text.as_bytes().split_at(cut);
                assert!(!decoded(BodyDecoder::chunked(100), &[first]).unwrap().1, "{text:?} {cut}");
                assert_eq!(
                    decoded(BodyDecoder::chunked(100), &[first, second]).unwrap(),
                    (data.into(), true),
                    "{text:?} {cut}"
                );
            }
            let single: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
            assert_eq!(decoded(BodyDecoder::chunked(100), &single).unwrap(), (data.into(), true), "{text:?}");
        }
    }

    /// The end is found before the next message is complete, however much of it follows.
    #[test]
    fn a_chunked_body_ends_before_a_long_next_head() {
        let next = [b"GET / HTTP/1.1\r\nX: ", [b'x'; 2 * UNPARSED_TRAILERS_BYTES].as_slice()].concat();
        for end in ["0\r\n\r\n", "0\r\nA: b\r\n\r\n"] {
            let all = [b"1\r\na\r\n", end.as_bytes(), &next].concat();
            for cut in 0..=6 + end.len() {
                let (first, second) = all.split_at(cut);
                let (data, has_ended) = decoded(BodyDecoder::chunked(64 * 1024), &[first, second]).unwrap();
                assert!(data == b"a" && has_ended, "{end:?} {cut}");
            }
        }
    }

    #[test]
    fn malformed_chunks_are_found() {
        for text in [
            "\r\n",
            "x\r\n",
            " 3\r\nabc\r\n",
            "-1\r\n",
            "0x3\r\nabc\r\n",
            "3\nabc\r\n",
            "3;a\nb\r\nabc\r\n",
            "3\r\nabcd\r\n",
            "3\r\nabc\n0\r\n\r\n",
            "11111111111111111\r\n",
            "0\r\nno field\r\n\r\n",
            "0\r\n\n",
            "0\r\nX: y\n\r\n\r\n",
            "0\r\n\rX",
        ] {
            assert_eq!(decoded(BodyDecoder::chunked(100), &[text.as_bytes()]), None, "{text:?}");
        }
        let long = format!("3;{}", "x".repeat(CHUNK_LINE_MAX_BYTES));
        assert_eq!(decoded(BodyDecoder::chunked(100), &[long.as_bytes()]), None);
        let extensions = "1;x\r\na\r\n".repeat(EXTENSIONS_MAX_BYTES / 2 + 1);
        assert_eq!(decoded(BodyDecoder::chunked(100), &[extensions.as_bytes()]), None);
        assert!(decoded(BodyDecoder::chunked(100), &[&extensions.as_bytes()["1;x\r\na\r\n".len()..]]).is_some());
        let trailers = format!("0\r\nx: {}", "x".repeat(100));
        assert_eq!(decoded(BodyDecoder::chunked(100), &[trailers.as_bytes()]), None);
    }

    #[test]
    fn bytes_behind_a_body_are_left() {
        for (mut body, text) in
            [(BodyDecoder::Length(3), "abcHTTP"), (BodyDecoder::chunked(100), "3\r\nabc\r\n0\r\n\r\nHTTP")]
        {
            let mut received = Bytes::from(text);
            assert_eq!(body.decode(&mut received).unwrap().unwrap().into_data().unwrap(), "abc");
            assert!(body.has_ended());
            assert_eq!(received, "HTTP");
        }
    }

    #[test]
    fn only_announced_trailers_are_sent() {
        let map = |fields: &[(&'static str, &'static str)]| {
            fields
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
                .collect()
        };
        let written = |trailers: Option<(&HeaderMap, &HeaderMap)>| {
            let mut end = Vec::new();
            write_last_chunk(trailers, &mut end);
            String::from_utf8(end).unwrap()
        };
        let trailers = map(&[("x-sum", "1"), ("x-other", "2")]);
        assert_eq!(written(Some((&trailers, &map(&[("trailer", "X-Sum, y")])))), "0\r\nx-sum: 1\r\n\r\n");
        assert_eq!(written(Some((&trailers, &map(&[])))), "0\r\n\r\n");
        assert_eq!(written(None), "0\r\n\r\n");
    }
}
