//! For any bytes of a client: the accepted requests do not depend on how the bytes are cut; each has one host, a method and a
//! target that the gateway serves; they begin and end where a simple reader finds their beginning and end; and the head that is sent
//! to a server is read again as it was.

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Version};
use transom_http::http1_head::{Framing, HeadLimits, parse_request_head, parse_sent_request_head, write_request_head};
use transom_http::request_validation::{self, Schemes};

const LIMITS: HeadLimits = HeadLimits { fields: 20, bytes: 500 };

const CLEARTEXT: Schemes = Schemes { is_connection_secure: false, is_client_secure: false };

/// An accepted request.
#[derive(Clone, PartialEq, Debug)]
struct Accepted {
    method: String,
    fields: usize,
    body: Vec<u8>,
}

/// The requests up to the first that is refused or incomplete.
fn accepted<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Accepted> {
    let (mut received, mut requests, mut current) = (Bytes::new(), Vec::new(), None);
    for piece in pieces {
        received = [&received, piece].concat().into();
        loop {
            if current.is_none() {
                match parse_request_head(&mut received, LIMITS) {
                    Ok(Some(head))
                        if head.error.is_none() && request_validation::validate(&head.parts, CLEARTEXT).is_ok() =>
                    {
                        check(&head.parts);
                        let (method, fields) = (head.parts.method.to_string(), head.parts.headers.len());
                        current = Some((Accepted { method, fields, body: Vec::new() }, head.body));
                    }
                    Ok(None) => break,
                    Ok(Some(_)) | Err(_) => return requests,
                }
            }
            let Some((request, body)) = &mut current else { break };
            match body.decode(&mut received) {
                Ok(Some(frame)) => request.body.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
                Ok(None) if !body.has_ended() => break,
                Ok(None) => {}
                Err(_) => return requests,
            }
            if body.has_ended() {
                requests.extend(current.take().map(|(request, _)| request));
            }
        }
    }
    requests
}

fn check(parts: &Parts) {
    let valid = request_validation::validate(parts, CLEARTEXT).unwrap();
    assert!(parts.method != Method::CONNECT && parts.method != Method::TRACE);
    assert!(parts.uri.path().starts_with('/') || (parts.uri.path() == "*" && parts.method == Method::OPTIONS));
    let hosts = parts.headers.get_all("host").iter().count();
    assert!(hosts == 1 || (hosts == 0 && parts.version == Version::HTTP_10));
    assert!(
        !valid.host.contains(['@', '/', ' ', '?', '#']) && !valid.host.bytes().any(|byte| byte.is_ascii_uppercase())
    );
    let codings: Vec<_> = parts.headers.get_all("transfer-encoding").iter().collect();
    assert!(codings.len() <= 1 && codings.iter().all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked")));
    assert!(codings.is_empty() || !parts.headers.contains_key("content-length"));
    assert!(parts.headers.get_all("content-length").iter().count() <= 1);
    if parts.uri.path() != "*" {
        check_resend(parts);
    }
}

/// A head that is sent to a server is read again as it was.
fn check_resend(parts: &Parts) {
    let mut request = Request::from_parts(parts.clone(), String::new());
    // Any other length announces a body.
    if parts.headers.get("content-length").is_some_and(|length| length != "0") {
        request.headers_mut().remove("content-length");
    }
    let mut head = Vec::new();
    write_request_head(&request, Framing::NoBody, &mut head);
    let read = parse_sent_request_head(head.into()).unwrap();
    assert_eq!((read.method(), read.headers()), (request.method(), request.headers()));
    assert_eq!((read.uri().path(), read.uri().query()), (request.uri().path(), request.uri().query()));
}

/// Takes a line that ends in CR LF.
fn take_line<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    let line = &bytes[..end];
    *bytes = &bytes[end + 2..];
    (!line.contains(&b'\n')).then_some(line)
}

/// A simple reader: takes a request of which nothing is ambiguous.
fn read_simply(bytes: &mut &[u8]) -> Option<Accepted> {
    let mut line = take_line(bytes)?;
    while line.is_empty() {
        line = take_line(bytes)?;
    }
    let method = String::from_utf8(line.split(|byte| *byte == b' ').next()?.to_vec()).ok()?;
    let (mut fields, mut length, mut is_chunked) = (0, 0, false);
    loop {
        let line = take_line(bytes)?;
        if line.is_empty() {
            break;
        }
        fields += 1;
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b':')?);
        match &*name.to_ascii_lowercase() {
            b"content-length" => length = str::from_utf8(&value[1..]).ok()?.trim().parse().ok()?,
            b"transfer-encoding" => is_chunked = true,
            _ => {}
        }
    }
    let mut body = Vec::new();
    if is_chunked {
        loop {
            let line = take_line(bytes)?;
            let size = line.split(|byte| *byte == b';').next()?;
            let size = usize::from_str_radix(str::from_utf8(size).ok()?.trim(), 16).ok()?;
            if size == 0 {
                while !take_line(bytes)?.is_empty() {}
                break;
            }
            body.extend_from_slice(bytes.get(..size)?);
            *bytes = bytes[size..].strip_prefix(b"\r\n")?;
        }
    } else {
        body.extend_from_slice(bytes.get(..length)?);
        *bytes = &bytes[length..];
    }
    Some(Accepted { method, fields, body })
}

pub fn holds(bytes: &[u8]) {
    let whole = accepted(std::iter::once(bytes));
    let (first, second) = bytes.split_at(bytes.len() / 2);
    assert_eq!(whole, accepted([first, second].into_iter()), "{:?}", bytes.escape_ascii().to_string());
    assert_eq!(whole, accepted(bytes.chunks(1)), "{:?}", bytes.escape_ascii().to_string());
    let mut rest = bytes;
    for request in whole {
        assert_eq!(Some(request), read_simply(&mut rest), "{:?}", bytes.escape_ascii().to_string());
    }
}
