//! Heads of HTTP/1.1 messages as bytes, without I/O (RFC 9112): parses and writes those of requests and responses.
//!
//! `httparse` parses them; field values share the memory of the received bytes.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use memchr::memmem;

use super::error::RequestError;
use super::http1_body::{
    BodyDecoder, MalformedMessage, elements, has_bare_line_feed, has_element, parse_field, write_field,
};
use super::path_normalize::encode_query;

/// The largest response head, or trailer section of a response, that is accepted.
pub const RESPONSE_HEAD_MAX_BYTES: usize = 64 * 1024;
/// The most fields of a response head.
const RESPONSE_FIELDS_MAX: usize = 100;
/// The most fields of a request head that are parsed without an allocation.
const USUAL_FIELDS: usize = 100;
/// Number of fields that the gateway adds to a message; memory for them is reserved.
const ADDED_FIELDS: usize = 6;
/// The longest target that `Uri` takes.
const TARGET_MAX_BYTES: usize = u16::MAX as usize - 1;
/// Bodies of up to this size are copied behind other bytes that wait to be sent.
pub const SMALL_BODY_MAX_BYTES: usize = 4 * 1024;
/// Estimated bytes of a first line beside the target.
const LINE_BYTES: usize = 32;
/// Estimated bytes of a field.
const FIELD_BYTES: usize = 40;

/// How a head announces the end of the body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framing {
    /// The head is the whole message.
    NoBody,
    /// By Content-Length; so many bytes are left.
    Length(u64),
    /// By chunks, because the length is unknown.
    Chunked,
    /// By the end of the connection, because the length is unknown, and the client does not know chunks. Only of responses.
    UntilClose,
}

impl Framing {
    pub fn of_request(body: &impl Body) -> Framing {
        match body.size_hint().exact() {
            _ if body.is_end_stream() => Framing::NoBody,
            Some(length) => Framing::Length(length),
            None => Framing::Chunked,
        }
    }

    /// The framing of the response to a request with this version, to HEAD if `is_head`.
    pub fn of_response(response: &Response<impl Body>, version: Version, is_head: bool) -> Framing {
        match response.body().size_hint().exact() {
            _ if is_head || never_has_body(response.status()) => Framing::NoBody,
            Some(length) => Framing::Length(length),
            None if version == Version::HTTP_10 => Framing::UntilClose,
            None => Framing::Chunked,
        }
    }

    /// The length of a body that is copied behind its head, to be sent together.
    fn small_body_bytes(self) -> usize {
        match self {
            Framing::Length(length) if length <= SMALL_BODY_MAX_BYTES as u64 => length as usize,
            _ => 0,
        }
    }

    fn write_field(self, head: &mut Vec<u8>) {
        match self {
            Framing::NoBody | Framing::UntilClose => {}
            Framing::Length(length) => {
                head.extend_from_slice(b"content-length: ");
                head.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
                head.extend_from_slice(b"\r\n");
            }
            Framing::Chunked => head.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        }
    }
}

/// Whether responses with this status have no body, whatever their fields say (RFC 9112, section 6.3).
pub fn never_has_body(status: StatusCode) -> bool {
    status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

/// Whether responses with this status may have a Content-Length (RFC 9110, section 8.6).
pub fn may_state_length(status: StatusCode) -> bool {
    !status.is_informational() && status != StatusCode::NO_CONTENT
}

/// Writes the head of a request. The request is in HTTP/1.1 form: its target has no authority, and Host is a field.
pub fn write_request_head(request: &Request<impl Body>, framing: Framing, head: &mut Vec<u8>) {
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
        if *name != header::CONTENT_LENGTH || framing == Framing::NoBody && value == "0" {
            write_field(name, value, head);
        }
    }
    framing.write_field(head);
    head.extend_from_slice(b"\r\n");
}

/// Writes the head of a response in the version of its request. `keeps_alive`: the request allows another one on the connection;
/// returns whether another one follows. `date` is sent if the response has no Date. `write_more` writes fields beside those of
/// `response`.
pub fn write_response_head<B>(
    response: &Response<B>,
    framing: Framing,
    version: Version,
    mut keeps_alive: bool,
    date: &HeaderValue,
    write_more: impl FnOnce(&mut Vec<u8>),
    head: &mut Vec<u8>,
) -> bool {
    let (headers, status) = (response.headers(), response.status());
    head.reserve(LINE_BYTES + (headers.len() + ADDED_FIELDS) * FIELD_BYTES + framing.small_body_bytes());
    head.extend_from_slice(if version == Version::HTTP_10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " });
    head.extend_from_slice(status.as_str().as_bytes());
    head.push(b' ');
    head.extend_from_slice(reason_phrase(response).as_bytes());
    head.extend_from_slice(b"\r\n");
    let (mut has_date, is_switching) = (false, status == StatusCode::SWITCHING_PROTOCOLS);
    let keeps_length = framing == Framing::NoBody && may_state_length(status);
    for (name, value) in headers {
        match *name {
            // The connection has one set of options, written below.
            header::CONNECTION if !is_switching => {
                keeps_alive &= !has_element(value, b"close");
                continue;
            }
            // Only `framing` announces a body. A response without one may state the length that it would have.
            header::CONTENT_LENGTH if !keeps_length => continue,
            header::TRANSFER_ENCODING => continue,
            header::DATE => has_date = true,
            _ => {}
        }
        write_field(name, value, head);
    }
    write_more(head);
    framing.write_field(head);
    if !has_date {
        write_field(&header::DATE, date, head);
    }
    keeps_alive &= framing != Framing::UntilClose && !is_switching;
    match version {
        _ if is_switching => {}
        Version::HTTP_10 if keeps_alive => head.extend_from_slice(b"connection: keep-alive\r\n"),
        _ if !keeps_alive => head.extend_from_slice(b"connection: close\r\n"),
        _ => {}
    }
    head.extend_from_slice(b"\r\n");
    keeps_alive
}

/// What the fields of a head say about the end of the message, and of the connection.
#[derive(Default)]
struct MessageEnd {
    body: Option<BodyDecoder>,
    has_keep_alive: bool,
    has_close: bool,
}

impl MessageEnd {
    /// Fails if the end of the body is ambiguous. The trailers may have `trailers_max_bytes`.
    fn add_field(
        &mut self,
        name: &HeaderName,
        value: &HeaderValue,
        version: Version,
        trailers_max_bytes: usize,
    ) -> Result<(), MalformedMessage> {
        match *name {
            header::CONNECTION => elements(value).for_each(|option| {
                self.has_keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                self.has_close |= option.eq_ignore_ascii_case(b"close");
            }),
            header::CONTENT_LENGTH | header::TRANSFER_ENCODING => {
                let body = BodyDecoder::of_framing(name, value.as_bytes(), version, trailers_max_bytes)?;
                // Two announcements are ambiguous, even if they are equal.
                if self.body.replace(body).is_some() {
                    return Err(MalformedMessage::Length);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn keeps_alive(&self, version: Version) -> bool {
        (version == Version::HTTP_11 || self.has_keep_alive) && !self.has_close
    }
}

/// The head of a request.
#[derive(Debug)]
pub struct RequestHead {
    pub parts: Parts,
    pub body: BodyDecoder,
    /// The client takes another response on the connection.
    pub keeps_alive: bool,
    /// The client waits for 100 (Continue) before it sends the body.
    pub expects_continue: bool,
    /// The client takes trailers.
    pub takes_trailers: bool,
    /// What makes the head ambiguous, beside what `request_validation` finds in the fields.
    pub error: Option<RequestError>,
}

/// Limits of a request head. The trailers may have as many bytes.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    pub fields: usize,
    pub bytes: usize,
}

/// Parses a request head, and removes it from `received`, with empty lines before it. `None`: it is incomplete.
pub fn parse_request_head(received: &mut Bytes, limits: HeadLimits) -> Result<Option<RequestHead>, RequestError> {
    let parsed = if limits.fields <= USUAL_FIELDS {
        let mut fields = [const { MaybeUninit::uninit() }; USUAL_FIELDS];
        parse_with_fields(received, limits.bytes, &mut fields[..limits.fields])
    } else {
        parse_with_fields(received, limits.bytes, &mut vec![MaybeUninit::uninit(); limits.fields])
    };
    let Some((head, length)) = parsed? else { return Ok(None) };
    received.advance(length);
    Ok(Some(head))
}

/// Parses a head that [`write_request_head`] has written, and checks nothing. `None` for an empty head, and for a target of the
/// largest size to which the slash of an empty path was added.
pub fn parse_sent_request_head(mut head: Bytes) -> Option<Request<()>> {
    let lines = head.iter().filter(|byte| **byte == b'\n').count();
    let limits = HeadLimits { fields: lines, bytes: head.len() };
    let parsed = parse_request_head(&mut head, limits).ok()??;
    Some(Request::from_parts(parsed.parts, ()))
}

/// Returns the head and its length; `fields` is memory for as many fields as are allowed.
fn parse_with_fields<'r>(
    received: &'r Bytes,
    max_bytes: usize,
    fields: &mut [MaybeUninit<httparse::Header<'r>>],
) -> Result<Option<(RequestHead, usize)>, RequestError> {
    let mut head = httparse::Request::new(&mut []);
    let length = match head.parse_with_uninit_headers(received, fields) {
        Ok(httparse::Status::Complete(length)) if length <= max_bytes => length,
        Ok(httparse::Status::Partial) if received.len() < max_bytes => return Ok(None),
        Ok(_) if has_long_target(received, max_bytes) => return Err(RequestError::TargetTooLong),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => return Err(RequestError::HeadTooLarge),
        Err(_) => return Err(RequestError::Malformed),
    };
    let (method, target) = (head.method.unwrap_or_default(), head.path.unwrap_or_default());
    let version = if head.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let (mut parts, ()) = Request::new(()).into_parts();
    parts.method = Method::from_bytes(method.as_bytes()).map_err(|_invalid| RequestError::Malformed)?;
    parts.uri = parse_target(target, received)?;
    if parts.method == Method::OPTIONS {
        parts.uri = server_wide(parts.uri, target);
    }
    parts.version = version;
    let mut error = None;
    if target.contains('#') {
        // No client sends a fragment (RFC 9112, section 3.2); some servers take it as a part of the path.
        error = Some(RequestError::Target("the request target has a fragment"));
    }
    if has_bare_line_feed(&received[..length]) {
        error = Some(RequestError::BARE_LINE_FEED);
    }
    let mut end = MessageEnd::default();
    let (mut expects_continue, mut takes_trailers) = (false, false);
    parts.headers.reserve(head.headers.len() + ADDED_FIELDS);
    for field in &*head.headers {
        let (name, value) = parse_field(field, received).map_err(|_invalid| RequestError::Malformed)?;
        if end.add_field(&name, &value, version, max_bytes).is_err() {
            error = Some(RequestError::CONFLICTING_LENGTHS);
        }
        match name {
            header::EXPECT => expects_continue = version == Version::HTTP_11,
            header::TE => takes_trailers |= has_element(&value, b"trailers"),
            _ => {}
        }
        parts.headers.append(name, value);
    }
    let body = end.body.unwrap_or(BodyDecoder::Ended);
    let keeps_alive = end.keeps_alive(version) && error.is_none();
    Ok(Some((RequestHead { parts, body, keeps_alive, expects_continue, takes_trailers, error }, length)))
}

/// Parses a target that was received in `received`.
fn parse_target(target: &str, received: &Bytes) -> Result<Uri, RequestError> {
    if let Ok(uri) = Uri::from_maybe_shared(received.slice_ref(target.as_bytes())) {
        return Ok(uri);
    }
    let encoded = encode_query(target);
    let is_too_long = encoded.len() > TARGET_MAX_BYTES;
    let error = if is_too_long { RequestError::TargetTooLong } else { RequestError::Malformed };
    Uri::try_from(encoded.as_ref()).map_err(|_invalid| error)
}

/// The target of an OPTIONS request. An absolute form without path and query is that of `OPTIONS *` (RFC 9112, section 3.2.4);
/// `Uri` adds a slash to it.
fn server_wide(uri: Uri, target: &str) -> Uri {
    if target.split_once("://").is_none_or(|(_, rest)| rest.contains(['/', '?', '#'])) {
        return uri;
    }
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(PathAndQuery::from_static("*"));
    // All three parts are present, so together they form a URI.
    Uri::from_parts(parts).unwrap_or_default()
}

/// The first line of a request head that cannot be parsed, as far as it was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FirstLine<'a> {
    pub method: &'a str,
    /// Without authority and query, which may hold secrets. Empty if it was not received.
    pub path: &'a [u8],
    /// As in the access log; empty if it is unknown.
    pub protocol: &'static str,
}

impl FirstLine<'_> {
    /// `None` if the line does not begin with a method.
    pub fn parse(received: &[u8]) -> Option<FirstLine<'_>> {
        let mut lines = received.split(|byte| *byte == b'\n');
        let line = lines.find(|line| !matches!(*line, b"" | b"\r"))?.trim_ascii_end();
        let mut words = line.split(|byte| *byte == b' ');
        let method = words.next()?;
        let target = words.next().unwrap_or_default();
        let protocol = match words.next() {
            Some(b"HTTP/1.1") => "HTTP/1.1",
            Some(b"HTTP/1.0") => "HTTP/1.0",
            _ => "",
        };
        let method = Method::from_bytes(method).ok().and_then(|_valid| str::from_utf8(method).ok())?;
        let path = target.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
        let path = match memmem::find(path, b"://") {
            _ if path.starts_with(b"/") || path == b"*" => path,
            Some(at) => {
                let authority = &path[at + 3..];
                authority.iter().position(|byte| *byte == b'/').map_or(&b""[..], |slash| &authority[slash..])
            }
            // An authority, or the beginning of one.
            None => b"",
        };
        Some(FirstLine { method, path, protocol })
    }
}

/// Whether the request line, as far as received, has at least `bytes` bytes because of its target.
fn has_long_target(received: &[u8], bytes: usize) -> bool {
    let mut lines = received.split(|byte| *byte == b'\n');
    let line = lines.find(|line| !matches!(*line, b"" | b"\r"));
    line.is_some_and(|line| line.len() >= bytes && line.contains(&b' '))
}

/// The reason phrase that a server has sent, if it is not the usual one of the status. An extension of the response.
#[derive(Clone)]
struct ReasonPhrase(Bytes);

/// The reason phrase with which a response is sent.
pub fn reason_phrase<B>(response: &Response<B>) -> &str {
    let sent = response.extensions().get::<ReasonPhrase>().and_then(|phrase| str::from_utf8(&phrase.0).ok());
    sent.or(response.status().canonical_reason()).unwrap_or_default()
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
pub fn may_complete_head(received: &[u8], new: usize, max_bytes: usize) -> bool {
    // The end of a head is `\n\n` or `\n\r\n`, of which the first bytes may be old.
    let tail = &received[received.len().saturating_sub(new + 2)..];
    let is_first = new == received.len();
    let has_end = || tail.windows(2).any(|pair| pair == b"\n\n") || tail.windows(3).any(|three| three == b"\n\r\n");
    is_first || received.len() >= max_bytes || has_end()
}

/// Parses a response head, and removes it from `received`. `None`: it is incomplete. `is_head`: the method of the request
/// is HEAD.
pub fn parse_response_head(received: &mut Bytes, is_head: bool) -> Result<Option<ResponseHead>, MalformedMessage> {
    let mut fields = [const { MaybeUninit::uninit() }; RESPONSE_FIELDS_MAX];
    let mut head = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut head, received, &mut fields);
    let length = match parsed.map_err(MalformedMessage::Head)? {
        httparse::Status::Complete(length) if length <= RESPONSE_HEAD_MAX_BYTES => length,
        httparse::Status::Partial if received.len() <= RESPONSE_HEAD_MAX_BYTES => return Ok(None),
        _ => return Err(MalformedMessage::HeadTooLarge),
    };
    let status = head.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(MalformedMessage::Status)?;
    let may_have_body = !is_head && !never_has_body(status);
    let version = if head.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let mut response = Response::new(());
    (*response.status_mut(), *response.version_mut()) = (status, version);
    let reason = head.reason.unwrap_or_default();
    if Some(reason) != status.canonical_reason() {
        response.extensions_mut().insert(ReasonPhrase(received.slice_ref(reason.as_bytes())));
    }
    let mut end = MessageEnd::default();
    let headers = response.headers_mut();
    headers.reserve(head.headers.len() + ADDED_FIELDS);
    for field in &*head.headers {
        let (name, value) = parse_field(field, received)?;
        let added = end.add_field(&name, &value, version, RESPONSE_HEAD_MAX_BYTES);
        if may_have_body {
            added?;
        }
        headers.append(name, value);
    }
    let body = if may_have_body { end.body.unwrap_or(BodyDecoder::UntilClose) } else { BodyDecoder::Ended };
    received.advance(length);
    // After 101 the connection speaks another protocol. Only the end of the connection ends a body without a length.
    let is_reusable = status != StatusCode::SWITCHING_PROTOCOLS && body != BodyDecoder::UntilClose;
    let keeps_alive = end.keeps_alive(version) && is_reusable;
    Ok(Some(ResponseHead { response, body, keeps_alive }))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Empty;

    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nX: \r\nX: b\r\nContent-Length: 3\r\n\r\n";

    fn head(text: &str) -> Result<Option<ResponseHead>, MalformedMessage> {
        parse_response_head(&mut Bytes::copy_from_slice(text.as_bytes()), false)
    }

    #[test]
    fn a_head_is_taken_once_it_is_complete() {
        for cut in 0..HEAD.len() {
            assert!(head(&HEAD[..cut]).unwrap().is_none(), "{cut}");
        }
        let mut received = Bytes::from(format!("{HEAD}abc"));
        let head = parse_response_head(&mut received, false).unwrap().unwrap();
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
                assert!(may_complete_head(text.as_bytes(), new, 100));
                assert!(!may_complete_head(&text.as_bytes()[..text.len() - 1], new, 100));
            }
        }
        assert!(may_complete_head(b"SSH", 3, 100) && may_complete_head(&[b'x'; 101], 1, 100));
    }

    #[test]
    fn the_end_of_a_body_is_known_from_the_head() {
        let body = |status: &str, fields: &str| {
            head(&format!("HTTP/{status} X\r\n{fields}\r\n")).map(|head| head.map(|head| (head.body, head.keeps_alive)))
        };
        let of = |body, keeps_alive| Ok(Some((body, keeps_alive)));
        assert_eq!(body("1.1 200", "Content-Length: 0\r\n"), of(BodyDecoder::Ended, true));
        assert_eq!(body("1.1 200", "Content-Length: 5\r\nConnection: a, Close\r\n"), of(BodyDecoder::Length(5), false));
        let chunked = BodyDecoder::chunked(RESPONSE_HEAD_MAX_BYTES);
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
            "Content-Length: 9223372036854775808\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        ];
        fields.into_iter().for_each(|fields| assert_eq!(body("1.1 200", fields), Err(MalformedMessage::Length)));
        assert_eq!(body("1.0 200", "Transfer-Encoding: chunked\r\n"), Err(MalformedMessage::Length));
        let long = format!("X: {}\r\n", "x".repeat(RESPONSE_HEAD_MAX_BYTES));
        assert_eq!(body("1.1 200", &long), Err(MalformedMessage::HeadTooLarge));
        assert_eq!(head(&format!("HTTP/1.1 200 X\r\n{long}")).unwrap_err(), MalformedMessage::HeadTooLarge);
        let many = "X: y\r\n".repeat(RESPONSE_FIELDS_MAX + 1);
        assert_eq!(body("1.1 200", &many), Err(MalformedMessage::Head(httparse::Error::TooManyHeaders)));
    }

    const LIMITS: HeadLimits = HeadLimits { fields: 3, bytes: 100 };

    #[test]
    fn targets_are_parsed_as_browsers_and_the_rfc_say() {
        for (line, path, query) in [
            ("GET /a?b=\"<c>\"", "/a", Some("b=%22%3Cc%3E%22")),
            ("GET /a?b=%22", "/a", Some("b=%22")),
            ("GET http://a", "/", None),
            ("OPTIONS http://a", "*", None),
            ("OPTIONS *", "*", None),
            ("OPTIONS http://a/", "/", None),
            ("OPTIONS http://a?b", "/", Some("b")),
        ] {
            let head = request_head(&format!("{line} HTTP/1.1\r\n\r\n")).unwrap().unwrap();
            assert_eq!((head.parts.uri.path(), head.parts.uri.query()), (path, query), "{line}");
        }
        assert_eq!(request_head("GET /<a> HTTP/1.1\r\n\r\n").unwrap_err(), RequestError::Malformed);
    }

    #[test]
    fn the_first_line_is_read_as_far_as_it_was_received() {
        let read = |received: &'static str| {
            let line = FirstLine::parse(received.as_bytes())?;
            Some((line.method, str::from_utf8(line.path).unwrap(), line.protocol))
        };
        for (received, expected) in [
            ("GET /a HTTP/1.1\r\nHo", ("GET", "/a", "HTTP/1.1")),
            ("\r\n\r\nHEAD /a?secret HTTP/1.0\n", ("HEAD", "/a", "HTTP/1.0")),
            ("GE", ("GE", "", "")),
            ("GET /a b HTTP/1.1\r\n", ("GET", "/a", "")),
            ("GET http://user:secret@host/a?b HTTP/1.1\r\n", ("GET", "/a", "HTTP/1.1")),
            ("GET http://user:secret@host HTTP/1.1\r\n", ("GET", "", "HTTP/1.1")),
            ("GET /a://b HTTP/2.0\r\n", ("GET", "/a://b", "")),
            ("OPTIONS * HTTP/1.1\r\n", ("OPTIONS", "*", "HTTP/1.1")),
            ("CONNECT user:secret@host:443 HTTP/1.1\r\n", ("CONNECT", "", "HTTP/1.1")),
            ("GET user:secret@host/a", ("GET", "", "")),
            ("GET http:/user:secret@host/a", ("GET", "", "")),
        ] {
            assert_eq!(read(received), Some(expected), "{received:?}");
        }
        for received in ["", "\r\n", "\x16\x03\x01", "a(b /"] {
            assert_eq!(read(received), None, "{received:?}");
        }
    }

    fn request_head(text: &str) -> Result<Option<RequestHead>, RequestError> {
        parse_request_head(&mut Bytes::copy_from_slice(text.as_bytes()), LIMITS)
    }

    #[test]
    fn a_request_head_is_taken_once_it_is_complete() {
        let text = "\r\n\r\nPOST /a?b HTTP/1.1\r\nHost: a\r\nTE: x, trailers\r\nContent-Length: 3\r\n\r\n";
        for cut in 0..text.len() {
            assert!(request_head(&text[..cut]).unwrap().is_none(), "{cut}");
        }
        let mut received = Bytes::from(format!("{text}abcGET"));
        let head = parse_request_head(&mut received, LIMITS).unwrap().unwrap();
        assert_eq!((head.parts.method, head.parts.uri.to_string()), (Method::POST, "/a?b".to_owned()));
        assert_eq!((head.parts.version, head.parts.headers.len()), (Version::HTTP_11, 3));
        assert_eq!((head.body, received), (BodyDecoder::Length(3), Bytes::from("abcGET")));
        assert!(head.keeps_alive && head.takes_trailers && !head.expects_continue && head.error.is_none());
    }

    #[test]
    fn a_request_head_says_what_follows() {
        let of = |version: &str, fields: &str| {
            let head = request_head(&format!("GET / HTTP/{version}\r\n{fields}\r\n")).unwrap().unwrap();
            (head.body, head.keeps_alive, head.expects_continue)
        };
        let (none, chunked) = (BodyDecoder::Ended, BodyDecoder::chunked(LIMITS.bytes));
        assert_eq!(of("1.1", ""), (none, true, false));
        assert_eq!(of("1.0", ""), (none, false, false));
        assert_eq!(of("1.0", "Connection: a, Keep-Alive\r\nExpect: 100-continue\r\n"), (none, true, false));
        assert_eq!(of("1.1", "Connection: keep-alive\r\nConnection: Close\r\n"), (none, false, false));
        assert_eq!(of("1.1", "Transfer-Encoding: Chunked\r\nExpect: 100-continue\r\n"), (chunked, true, true));
        assert_eq!(of("1.1", "Content-Length: 0\r\n"), (none, true, false));
    }

    #[test]
    fn what_fields_do_not_show_of_a_request_head_is_an_error() {
        let error = |text: &str| request_head(text).map(|head| head.unwrap().error);
        for text in ["GET / HTTP/1.1\n\n", "GET / HTTP/1.1\r\nX: y\n\r\n", "\nGET / HTTP/1.1\r\n\r\n"] {
            assert_eq!(error(text), Ok(Some(RequestError::BARE_LINE_FEED)), "{text:?}");
        }
        assert!(matches!(error("GET /a#b HTTP/1.1\r\n\r\n"), Ok(Some(RequestError::Target(_)))));
        for fields in [
            "Content-Length: 3\r\nContent-Length: 3",
            "Content-Length: 3\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: gzip",
            "Content-Length: +3",
        ] {
            let head = request_head(&format!("GET / HTTP/1.1\r\n{fields}\r\n\r\n")).unwrap().unwrap();
            assert!(head.error == Some(RequestError::CONFLICTING_LENGTHS) && !head.keeps_alive, "{fields:?}");
        }
        for text in ["GET / HTTP/1.2\r\n\r\n", "GET  / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nX : y\r\n\r\n"] {
            assert_eq!(request_head(text).unwrap_err(), RequestError::Malformed, "{text:?}");
        }
    }

    #[test]
    fn request_heads_are_limited() {
        let of_bytes = |bytes: usize| format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(bytes - 23));
        assert!(request_head(&of_bytes(100)).unwrap().is_some());
        for text in [of_bytes(101), of_bytes(101)[..100].to_owned()] {
            assert_eq!(request_head(&text).unwrap_err(), RequestError::HeadTooLarge);
        }
        assert!(request_head(&of_bytes(101)[..99]).unwrap().is_none());
        let long_target = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100));
        assert_eq!(request_head(&long_target).unwrap_err(), RequestError::TargetTooLong);
        assert_eq!(request_head(&"x".repeat(100)).unwrap_err(), RequestError::HeadTooLarge);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(4));
        assert_eq!(request_head(&many).unwrap_err(), RequestError::HeadTooLarge);
        let target = format!("/{}", "x".repeat(TARGET_MAX_BYTES));
        let received = Bytes::from(target);
        let target = str::from_utf8(&received).unwrap();
        assert_eq!(parse_target(target, &received).unwrap_err(), RequestError::TargetTooLong);
    }

    #[test]
    fn a_response_head_announces_its_body_and_whether_the_connection_stays_open() {
        let date = HeaderValue::from_static("now");
        let written = |status: u16, fields: &[(&'static str, &'static str)], framing, version, keeps_alive| {
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in fields {
                response.headers_mut().append(*name, HeaderValue::from_static(value));
            }
            let mut head = Vec::new();
            let keeps_alive = write_response_head(&response, framing, version, keeps_alive, &date, |_| (), &mut head);
            (String::from_utf8(head).unwrap(), keeps_alive)
        };
        let (old, new) = (Version::HTTP_10, Version::HTTP_11);
        let length = [("content-length", "5"), ("date", "then")];
        let kept = |text: &str| (format!("{text}\r\n"), true);
        let closed = |text: &str| (format!("{text}connection: close\r\n\r\n"), false);
        assert_eq!(
            written(200, &length, Framing::Length(5), new, true),
            kept("HTTP/1.1 200 OK\r\ndate: then\r\ncontent-length: 5\r\n")
        );
        assert_eq!(
            written(200, &[("x", "y")], Framing::Chunked, new, false),
            closed("HTTP/1.1 200 OK\r\nx: y\r\ntransfer-encoding: chunked\r\ndate: now\r\n")
        );
        assert_eq!(
            written(404, &[], Framing::UntilClose, old, true),
            closed("HTTP/1.0 404 Not Found\r\ndate: now\r\n")
        );
        assert_eq!(
            written(200, &length, Framing::Length(5), old, true),
            kept("HTTP/1.0 200 OK\r\ndate: then\r\ncontent-length: 5\r\nconnection: keep-alive\r\n")
        );
        // Responses without a body.
        assert_eq!(
            written(304, &length, Framing::NoBody, new, true),
            kept("HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\ndate: then\r\n")
        );
        assert_eq!(
            written(204, &length, Framing::NoBody, new, true),
            kept("HTTP/1.1 204 No Content\r\ndate: then\r\n")
        );
        let switching = [("connection", "upgrade"), ("upgrade", "websocket")];
        let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\ndate: now\r\n\r\n";
        assert_eq!(written(101, &switching, Framing::NoBody, new, true), (head.to_owned(), false));
        // The response closes the connection itself.
        assert_eq!(
            written(599, &[("connection", "close")], Framing::Length(0), new, true),
            closed("HTTP/1.1 599 \r\ncontent-length: 0\r\ndate: now\r\n")
        );
    }

    #[test]
    fn a_request_head_announces_its_body_once() {
        let written = |framing, fields: &[(&'static str, &'static str)]| {
            let mut request = Request::post("/a?b").body(Empty::<Bytes>::new()).unwrap();
            for (name, value) in fields {
                request.headers_mut().append(*name, HeaderValue::from_static(value));
            }
            let mut head = Vec::new();
            write_request_head(&request, framing, &mut head);
            String::from_utf8(head).unwrap()
        };
        let start = "POST /a?b HTTP/1.1\r\nhost: a\r\n";
        let host = ("host", "a");
        assert_eq!(written(Framing::NoBody, &[host]), format!("{start}\r\n"));
        assert_eq!(written(Framing::NoBody, &[host, ("content-length", "3")]), format!("{start}\r\n"));
        assert_eq!(
            written(Framing::Chunked, &[host, ("content-length", "3")]),
            format!("{start}transfer-encoding: chunked\r\n\r\n")
        );
        let with_length = format!("{start}content-length: 0\r\n\r\n");
        assert_eq!(written(Framing::NoBody, &[host, ("content-length", "0")]), with_length);
        let with_length = with_length.replace('0', "5");
        assert_eq!(written(Framing::Length(5), &[host, ("content-length", "5")]), with_length);
        assert_eq!(written(Framing::Length(5), &[host]), with_length);
    }

    #[test]
    fn a_sent_request_head_is_parsed_again() {
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = Method::from_bytes(b"PURGE-ALL").unwrap();
        request.headers_mut().append("a", HeaderValue::from_bytes(b"\xff\t\"b\" ; c").unwrap());
        request.headers_mut().append("x-empty", HeaderValue::from_static(""));
        request.headers_mut().append("content-length", HeaderValue::from_static("0"));
        // Every character up to U+00FF that a `Uri` takes, in the path and in the query.
        let characters = ('\0'..='\u{ff}').map(String::from);
        let targets = characters.flat_map(|character| [format!("/{character}"), format!("/?{character}")]);
        let uris: Vec<Uri> = targets.filter_map(|target| Uri::from_maybe_shared(target).ok()).collect();
        assert!(uris.len() > 150);
        for uri in uris {
            *request.uri_mut() = uri;
            let mut head = Vec::new();
            write_request_head(&request, Framing::NoBody, &mut head);
            let read = parse_sent_request_head(head.into()).unwrap_or_else(|| panic!("{}", request.uri()));
            assert_eq!((read.method(), read.uri()), (request.method(), request.uri()));
            assert_eq!(read.headers(), request.headers());
        }
        // More fields than are parsed without an allocation.
        for n in 0..2 * USUAL_FIELDS {
            request.headers_mut().append("many", HeaderValue::from(n));
        }
        let mut head = Vec::new();
        write_request_head(&request, Framing::NoBody, &mut head);
        assert_eq!(parse_sent_request_head(head.into()).unwrap().headers(), request.headers());
    }
}
