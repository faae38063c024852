//! HTTP/1.1 messages as bytes, without I/O (RFC 9112): writes request heads and chunks, parses response heads, and separates
//! response bodies.
//!
//! `httparse` parses heads, chunk sizes and trailers; field values share the memory of the received bytes.

use std::io::Write;
use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::ext::ReasonPhrase;

use super::request_body::RequestBody;

/// The largest response head, or trailer section, that is accepted.
const HEAD_MAX_BYTES: usize = 64 * 1024;
/// The most fields of a response head, or of trailers.
const FIELDS_MAX: usize = 100;
/// Number of fields that the gateway adds to a response; memory for them is reserved.
const ADDED_FIELDS: usize = 6;
/// The longest line of a chunk size, with its extensions.
const CHUNK_LINE_MAX_BYTES: usize = 4 * 1024;
/// Estimated bytes of a request line beside its target.
const LINE_BYTES: usize = 32;
/// Estimated bytes of a field.
const FIELD_BYTES: usize = 40;
/// What follows the data of the last chunk, where there are no trailers.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// Why a response is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MalformedResponse {
    Head(httparse::Error),
    HeadTooLarge,
    Status,
    Field,
    /// The end of the body is unknown.
    Length,
    Chunk,
    Trailers,
}

impl MalformedResponse {
    pub fn as_str(self) -> &'static str {
        match self {
            MalformedResponse::Head(httparse::Error::HeaderName) => "its head has an invalid field name",
            MalformedResponse::Head(httparse::Error::HeaderValue) => "its head has an invalid field value",
            MalformedResponse::Head(httparse::Error::Version) => "it is not HTTP/1.0 or HTTP/1.1",
            MalformedResponse::Head(httparse::Error::TooManyHeaders) => "its head has more than 100 fields",
            MalformedResponse::Head(_) => "its head is malformed",
            MalformedResponse::HeadTooLarge => "its head is larger than 64 KiB",
            MalformedResponse::Status => "its status is not a number from 100 to 999",
            MalformedResponse::Field => "its head has an invalid field",
            MalformedResponse::Length => "its Content-Length or Transfer-Encoding is malformed",
            MalformedResponse::Chunk => "a chunk of its body is malformed",
            MalformedResponse::Trailers => "its trailers are malformed",
        }
    }
}

/// How the end of a request body is announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestFraming {
    /// The head is the whole request.
    NoBody,
    /// By Content-Length; so many bytes are left.
    Length(u64),
    /// By chunks, because the length is unknown.
    Chunked,
}

impl RequestFraming {
    pub fn of(body: &RequestBody) -> RequestFraming {
        match body.size_hint().exact() {
            _ if body.is_end_stream() => RequestFraming::NoBody,
            Some(length) => RequestFraming::Length(length),
            None => RequestFraming::Chunked,
        }
    }
}

/// Writes the head of a request. The request is in HTTP/1.1 form: its target has no authority, and Host is a field.
pub fn write_request_head(request: &Request<RequestBody>, framing: RequestFraming, head: &mut Vec<u8>) {
    let headers = request.headers();
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    head.reserve(LINE_BYTES + target.len() + headers.len() * FIELD_BYTES);
    head.extend_from_slice(request.method().as_str().as_bytes());
    head.push(b' ');
    if !target.starts_with('/') {
        // The target is only a query.
        head.push(b'/');
    }
    head.extend_from_slice(target.as_bytes());
    head.extend_from_slice(b" HTTP/1.1\r\n");
    for (name, value) in headers {
        // Only `framing` announces a body.
        if *name != header::CONTENT_LENGTH || framing == RequestFraming::NoBody && value == "0" {
            write_field(name, value, head);
        }
    }
    match framing {
        RequestFraming::NoBody => {}
        RequestFraming::Length(length) => {
            // Writing to a vector does not fail.
            let _ = write!(head, "content-length: {length}\r\n");
        }
        RequestFraming::Chunked => head.extend_from_slice(b"transfer-encoding: chunked\r\n"),
    }
    head.extend_from_slice(b"\r\n");
}

fn write_field(name: &HeaderName, value: &HeaderValue, to: &mut Vec<u8>) {
    to.extend_from_slice(name.as_str().as_bytes());
    to.extend_from_slice(b": ");
    to.extend_from_slice(value.as_bytes());
    to.extend_from_slice(b"\r\n");
}

/// Writes the line before the data of a chunk. A line end follows the data.
pub fn write_chunk_size(bytes: usize, to: &mut Vec<u8>) {
    // Writing to a vector does not fail.
    let _ = write!(to, "{bytes:x}\r\n");
}

/// Writes the end of a chunked body, with the trailers that `head` announces in Trailer.
pub fn write_last_chunk(trailers: Option<&HeaderMap>, head: &HeaderMap, to: &mut Vec<u8>) {
    to.extend_from_slice(b"0\r\n");
    for (name, value) in trailers.into_iter().flatten() {
        if head.get_all(header::TRAILER).iter().any(|list| has_element(list, name.as_str().as_bytes())) {
            write_field(name, value, to);
        }
    }
    to.extend_from_slice(b"\r\n");
}

/// Whether a list has an element, regardless of case.
fn has_element(list: &HeaderValue, element: &[u8]) -> bool {
    list.as_bytes().split(|byte| *byte == b',').any(|known| known.trim_ascii().eq_ignore_ascii_case(element))
}

/// The head of a response.
#[derive(Debug)]
pub struct ResponseHead {
    pub response: Response<()>,
    pub body: BodyDecoder,
    /// The server takes another request on the connection.
    pub keeps_alive: bool,
}

impl ResponseHead {
    /// Whether another response to the same request follows.
    pub fn is_interim(&self) -> bool {
        self.response.status().is_informational() && self.response.status() != StatusCode::SWITCHING_PROTOCOLS
    }
}

/// Whether `received`, whose last `new` bytes were not parsed, may begin with a complete head, or is too long.
pub fn may_complete_head(received: &[u8], new: usize) -> bool {
    // The end of a head is `\n\n` or `\n\r\n`, of which the first bytes may be old.
    let tail = &received[received.len().saturating_sub(new + 2)..];
    let is_first = new == received.len();
    let has_end = || tail.windows(2).any(|pair| pair == b"\n\n") || tail.windows(3).any(|three| three == b"\n\r\n");
    is_first || received.len() > HEAD_MAX_BYTES || has_end()
}

/// Parses a response head, and removes it from `received`. `None`: it is incomplete. `method` is that of the request.
pub fn parse_response_head(received: &mut Bytes, method: &Method) -> Result<Option<ResponseHead>, MalformedResponse> {
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut head = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut head, received, &mut fields);
    let length = match parsed.map_err(MalformedResponse::Head)? {
        httparse::Status::Complete(length) if length <= HEAD_MAX_BYTES => length,
        httparse::Status::Partial if received.len() <= HEAD_MAX_BYTES => return Ok(None),
        _ => return Err(MalformedResponse::HeadTooLarge),
    };
    let status = head.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(MalformedResponse::Status)?;
    let may_have_body = *method != Method::HEAD
        && !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED;
    let version = if head.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let mut response = Response::new(());
    (*response.status_mut(), *response.version_mut()) = (status, version);
    let reason = head.reason.unwrap_or_default();
    if Some(reason) != status.canonical_reason()
        && let Ok(reason) = ReasonPhrase::try_from(reason.as_bytes())
    {
        response.extensions_mut().insert(reason);
    }
    let (mut keeps_alive, mut is_closed) = (version == Version::HTTP_11, false);
    let (mut body, mut has_framing) = (BodyDecoder::UntilClose, false);
    let headers = response.headers_mut();
    headers.reserve(head.headers.len() + ADDED_FIELDS);
    for field in &*head.headers {
        let (name, value) = parse_field(field, received)?;
        match name {
            header::CONNECTION => {
                keeps_alive |= has_element(&value, b"keep-alive");
                is_closed |= has_element(&value, b"close");
            }
            header::CONTENT_LENGTH | header::TRANSFER_ENCODING if may_have_body => {
                // Two announcements are ambiguous, even if they are equal.
                if std::mem::replace(&mut has_framing, true) {
                    return Err(MalformedResponse::Length);
                }
                body = BodyDecoder::of_framing(&name, value.as_bytes(), version)?;
            }
            _ => {}
        }
        headers.append(name, value);
    }
    if !may_have_body {
        body = BodyDecoder::Ended;
    }
    received.advance(length);
    // After 101 the connection speaks another protocol. Only the end of the connection ends a body without a length.
    let keeps_alive =
        keeps_alive && !is_closed && status != StatusCode::SWITCHING_PROTOCOLS && body != BodyDecoder::UntilClose;
    Ok(Some(ResponseHead { response, body, keeps_alive }))
}

/// A field that was parsed in `received`, whose memory the value shares.
fn parse_field(field: &httparse::Header<'_>, received: &Bytes) -> Result<(HeaderName, HeaderValue), MalformedResponse> {
    let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_invalid| MalformedResponse::Field)?;
    let value =
        HeaderValue::from_maybe_shared(received.slice_ref(field.value)).map_err(|_invalid| MalformedResponse::Field)?;
    Ok((name, value))
}

/// Decodes the body of a response, and finds its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyDecoder {
    /// Bytes left.
    Length(u64),
    Chunked(ChunkPosition),
    /// The body ends with the connection.
    UntilClose,
    Ended,
}

/// What follows in a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChunkPosition {
    /// The line with the size of a chunk.
    Size,
    /// Data of a chunk: bytes left.
    Data(u64),
    /// The line end behind the data of a chunk.
    DataEnd,
    Trailers,
}

impl BodyDecoder {
    /// Reads a Content-Length or Transfer-Encoding (RFC 9112, section 6.3).
    fn of_framing(name: &HeaderName, value: &[u8], version: Version) -> Result<BodyDecoder, MalformedResponse> {
        let body = if *name == header::CONTENT_LENGTH {
            let digits = Some(value).filter(|value| value.iter().all(u8::is_ascii_digit));
            digits.and_then(|digits| str::from_utf8(digits).ok()?.parse().ok()).map(BodyDecoder::of_length)
        } else {
            let is_chunked = value.eq_ignore_ascii_case(b"chunked") && version == Version::HTTP_11;
            is_chunked.then_some(BodyDecoder::Chunked(ChunkPosition::Size))
        };
        body.ok_or(MalformedResponse::Length)
    }

    fn of_length(bytes: u64) -> BodyDecoder {
        if bytes == 0 { BodyDecoder::Ended } else { BodyDecoder::Length(bytes) }
    }

    pub fn has_ended(&self) -> bool {
        *self == BodyDecoder::Ended
    }

    /// Takes the next frame from `received`. `None`: the body has ended, or more bytes are needed.
    pub fn decode(&mut self, received: &mut Bytes) -> Result<Option<Frame<Bytes>>, MalformedResponse> {
        loop {
            match self {
                BodyDecoder::Ended => return Ok(None),
                BodyDecoder::UntilClose => return Ok(take_data(received, u64::MAX)),
                BodyDecoder::Length(left) => {
                    let frame = take_data(received, *left);
                    *self = BodyDecoder::of_length(*left - data_bytes(frame.as_ref()));
                    return Ok(frame);
                }
                BodyDecoder::Chunked(ChunkPosition::Size) => {
                    let Some(size) = take_chunk_size(received)? else { return Ok(None) };
                    *self = BodyDecoder::Chunked(match size {
                        0 => ChunkPosition::Trailers,
                        size => ChunkPosition::Data(size),
                    });
                }
                BodyDecoder::Chunked(ChunkPosition::Data(left)) => {
                    let frame = take_data(received, *left);
                    *left -= data_bytes(frame.as_ref());
                    if *left == 0 {
                        // Frame and end together take one write to the client.
                        *self = if received.starts_with(LAST_CHUNK) {
                            received.advance(LAST_CHUNK.len());
                            BodyDecoder::Ended
                        } else {
                            BodyDecoder::Chunked(ChunkPosition::DataEnd)
                        };
                    }
                    return Ok(frame);
                }
                BodyDecoder::Chunked(ChunkPosition::DataEnd) => match received.get(..2) {
                    Some(b"\r\n") => {
                        received.advance(2);
                        *self = BodyDecoder::Chunked(ChunkPosition::Size);
                    }
                    Some(_) => return Err(MalformedResponse::Chunk),
                    None => return Ok(None),
                },
                BodyDecoder::Chunked(ChunkPosition::Trailers) => {
                    let Some(trailers) = take_trailers(received)? else { return Ok(None) };
                    *self = BodyDecoder::Ended;
                    return Ok((!trailers.is_empty()).then(|| Frame::trailers(trailers)));
                }
            }
        }
    }

    /// The number of bytes of the body that will probably follow; `None`: unknown.
    pub fn expected_bytes(&self) -> Option<u64> {
        match self {
            BodyDecoder::Length(left) | BodyDecoder::Chunked(ChunkPosition::Data(left)) => Some(*left),
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

fn take_data(received: &mut Bytes, most: u64) -> Option<Frame<Bytes>> {
    let bytes = usize::try_from(most).unwrap_or(usize::MAX).min(received.len());
    (bytes > 0).then(|| Frame::data(received.split_to(bytes)))
}

fn data_bytes(frame: Option<&Frame<Bytes>>) -> u64 {
    frame.and_then(Frame::data_ref).map_or(0, |data| data.len() as u64)
}

/// Takes the line with the size of a chunk. `None`: it is incomplete.
fn take_chunk_size(received: &mut Bytes) -> Result<Option<u64>, MalformedResponse> {
    // httparse takes an empty line for a size of 0, and a line feed for a part of an extension.
    if received.first().is_some_and(|first| !first.is_ascii_hexdigit()) {
        return Err(MalformedResponse::Chunk);
    }
    match httparse::parse_chunk_size(received) {
        Ok(httparse::Status::Complete((length, size))) if !received[..length - 2].contains(&b'\n') => {
            received.advance(length);
            Ok(Some(size))
        }
        Ok(httparse::Status::Partial) if received.len() < CHUNK_LINE_MAX_BYTES => Ok(None),
        _ => Err(MalformedResponse::Chunk),
    }
}

/// Takes the trailers and the empty line behind them. `None`: they are incomplete.
fn take_trailers(received: &mut Bytes) -> Result<Option<HeaderMap>, MalformedResponse> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    match httparse::parse_headers(received, &mut fields) {
        Ok(httparse::Status::Complete((length, fields))) => {
            let trailers = fields.iter().map(|field| parse_field(field, received)).collect::<Result<_, _>>();
            let trailers = trailers.map_err(|_invalid| MalformedResponse::Trailers)?;
            received.advance(length);
            Ok(Some(trailers))
        }
        Ok(httparse::Status::Partial) if received.len() < HEAD_MAX_BYTES => Ok(None),
        _ => Err(MalformedResponse::Trailers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nX: \r\nX: b\r\nContent-Length: 3\r\n\r\n";

    fn head(text: &str) -> Result<Option<ResponseHead>, MalformedResponse> {
        parse_response_head(&mut Bytes::copy_from_slice(text.as_bytes()), &Method::GET)
    }

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
    fn a_head_is_taken_once_it_is_complete() {
        for cut in 0..HEAD.len() {
            assert!(head(&HEAD[..cut]).unwrap().is_none(), "{cut}");
        }
        let mut received = Bytes::from(format!("{HEAD}abc"));
        let head = parse_response_head(&mut received, &Method::GET).unwrap().unwrap();
        assert_eq!(
            (head.response.status(), head.body, head.keeps_alive),
            (StatusCode::OK, BodyDecoder::Length(3), true)
        );
        assert!(head.response.headers().get_all("x").iter().eq(["", "b"]));
        assert_eq!((received, head.response.headers().len()), (Bytes::from("abc"), 4));
    }

    #[test]
    fn a_head_is_parsed_again_once_its_end_may_be_there() {
        for text in [HEAD, "HTTP/1.1 200 OK\nX: y\n\n"] {
            for new in 1..4 {
                assert!(may_complete_head(text.as_bytes(), new));
                assert!(!may_complete_head(&text.as_bytes()[..text.len() - 1], new));
            }
        }
        assert!(may_complete_head(b"SSH", 3) && may_complete_head(&[b'x'; HEAD_MAX_BYTES + 1], 1));
    }

    #[test]
    fn the_end_of_a_body_is_known_from_the_head() {
        let body = |status: &str, fields: &str| {
            head(&format!("HTTP/{status} X\r\n{fields}\r\n")).map(|head| head.map(|head| (head.body, head.keeps_alive)))
        };
        let of = |body, keeps_alive| Ok(Some((body, keeps_alive)));
        assert_eq!(body("1.1 200", "Content-Length: 0\r\n"), of(BodyDecoder::Ended, true));
        assert_eq!(body("1.1 200", "Content-Length: 5\r\nConnection: a, Close\r\n"), of(BodyDecoder::Length(5), false));
        let chunked = BodyDecoder::Chunked(ChunkPosition::Size);
        assert_eq!(body("1.1 200", "Transfer-Encoding: Chunked\r\n"), of(chunked, true));
        assert_eq!(body("1.1 200", ""), of(BodyDecoder::UntilClose, false));
        assert_eq!(body("1.0 200", "Content-Length: 5\r\n"), of(BodyDecoder::Length(5), false));
        assert_eq!(
            body("1.0 200", "Content-Length: 5\r\nConnection: keep-alive\r\n"),
            of(BodyDecoder::Length(5), true)
        );
        assert_eq!(body("1.1 204", "Content-Length: 5\r\n"), of(BodyDecoder::Ended, true));
        assert_eq!(body("1.1 304", "Transfer-Encoding: chunked\r\n"), of(BodyDecoder::Ended, true));
        assert_eq!(body("1.1 101", ""), of(BodyDecoder::Ended, false));
        let fields = [
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "Content-Length: 5\r\nContent-Length: 5\r\n",
            "Content-Length: +5\r\n",
            "Content-Length: 5, 5\r\n",
            "Content-Length: \r\n",
            "Content-Length: 18446744073709551616\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        ];
        fields.into_iter().for_each(|fields| assert_eq!(body("1.1 200", fields), Err(MalformedResponse::Length)));
        assert_eq!(body("1.0 200", "Transfer-Encoding: chunked\r\n"), Err(MalformedResponse::Length));
        let long = format!("X: {}\r\n", "x".repeat(HEAD_MAX_BYTES));
        assert_eq!(body("1.1 200", &long), Err(MalformedResponse::HeadTooLarge));
        assert_eq!(head(&format!("HTTP/1.1 200 X\r\n{long}")).unwrap_err(), MalformedResponse::HeadTooLarge);
        let many = "X: y\r\n".repeat(FIELDS_MAX + 1);
        assert_eq!(body("1.1 200", &many), Err(MalformedResponse::Head(httparse::Error::TooManyHeaders)));
    }

    #[test]
    fn a_chunked_body_is_decoded_however_it_is_cut() {
        for (text, data) in [
            ("0\r\n\r\n", ""),
            ("3\r\nabc\r\n0\r\n\r\n", "abc"),
            ("2;a=b\r\n\r\n\r\n01 \r\n0\r\n000\r\nX: y\r\nZ: 0\r\n\r\n", "\r\n0"),
            ("A\r\n0\r\n\r\n12345\r\n1;x\r\n6\r\n0;y\r\n\r\n", "0\r\n\r\n123456"),
        ] {
            let chunked = BodyDecoder::Chunked(ChunkPosition::Size);
            for cut in 0..text.len() {
                let (first, second) = text.as_bytes().split_at(cut);
                assert!(!decoded(chunked, &[first]).unwrap().1, "{text:?} {cut}");
                assert_eq!(decoded(chunked, &[first, second]).unwrap(), (data.into(), true), "{text:?} {cut}");
            }
            let single: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
            assert_eq!(decoded(chunked, &single).unwrap(), (data.into(), true), "{text:?}");
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
        ] {
            assert_eq!(decoded(BodyDecoder::Chunked(ChunkPosition::Size), &[text.as_bytes()]), None, "{text:?}");
        }
        let long = format!("3;{}", "x".repeat(CHUNK_LINE_MAX_BYTES));
        assert_eq!(decoded(BodyDecoder::Chunked(ChunkPosition::Size), &[long.as_bytes()]), None);
        let trailers = format!("0\r\nx: {}", "x".repeat(HEAD_MAX_BYTES));
        assert_eq!(decoded(BodyDecoder::Chunked(ChunkPosition::Size), &[trailers.as_bytes()]), None);
    }

    #[test]
    fn bytes_behind_a_body_are_left() {
        for (mut body, text) in [
            (BodyDecoder::Length(3), "abcHTTP"),
            (BodyDecoder::Chunked(ChunkPosition::Size), "3\r\nabc\r\n0\r\n\r\nHTTP"),
        ] {
            let mut received = Bytes::from(text);
            assert_eq!(body.decode(&mut received).unwrap().unwrap().into_data().unwrap(), "abc");
            assert!(body.has_ended());
            assert_eq!(received, "HTTP");
        }
    }

    #[test]
    fn a_request_head_announces_its_body_once() {
        let written = |framing, fields: &[(&'static str, &'static str)]| {
            let mut request = Request::post("/a?b").body(RequestBody::Empty).unwrap();
            for (name, value) in fields {
                request.headers_mut().append(*name, HeaderValue::from_static(value));
            }
            let mut head = Vec::new();
            write_request_head(&request, framing, &mut head);
            String::from_utf8(head).unwrap()
        };
        let start = "POST /a?b HTTP/1.1\r\nhost: a\r\n";
        let host = ("host", "a");
        assert_eq!(written(RequestFraming::NoBody, &[host]), format!("{start}\r\n"));
        assert_eq!(written(RequestFraming::NoBody, &[host, ("content-length", "3")]), format!("{start}\r\n"));
        assert_eq!(
            written(RequestFraming::Chunked, &[host, ("content-length", "3")]),
            format!("{start}transfer-encoding: chunked\r\n\r\n")
        );
        let with_length = format!("{start}content-length: 0\r\n\r\n");
        assert_eq!(written(RequestFraming::NoBody, &[host, ("content-length", "0")]), with_length);
        let with_length = with_length.replace('0', "5");
        assert_eq!(written(RequestFraming::Length(5), &[host, ("content-length", "5")]), with_length);
        assert_eq!(written(RequestFraming::Length(5), &[host]), with_length);
    }

    #[test]
    fn only_announced_trailers_are_sent() {
        let map = |fields: &[(&'static str, &'static str)]| {
            fields
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
                .collect()
        };
        let written = |trailers: Option<&HeaderMap>, head: &HeaderMap| {
            let mut end = Vec::new();
            write_last_chunk(trailers, head, &mut end);
            String::from_utf8(end).unwrap()
        };
        let trailers = map(&[("x-sum", "1"), ("x-other", "2")]);
        assert_eq!(written(Some(&trailers), &map(&[("trailer", "X-Sum, y")])), "0\r\nx-sum: 1\r\n\r\n");
        assert_eq!(written(Some(&trailers), &map(&[])), "0\r\n\r\n");
        assert_eq!(written(None, &map(&[("trailer", "x-sum")])), "0\r\n\r\n");
    }
}
