//! Changing over to WebSocket on an HTTP/1.1 connection, as far as a proxy has to understand it (RFC 9110,
//! section 7.8; RFC 6455, section 4).
//!
//! It is the only protocol that is changed over to. Any other that a client offers stays behind, as it may
//! by the RFC, and its request goes on as an ordinary one: behind `h2c` a client could send requests that
//! no rule would see.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};

use super::fault::Fault;

const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");

/// Whether a request that has an Upgrade field asks for WebSocket. It is to be asked before fields are
/// made ready for the upstream.
pub fn is_wanted(parts: &Parts) -> Result<bool, Fault> {
    let headers = &parts.headers;
    if parts.version != Version::HTTP_11 || !only(headers, &header::UPGRADE).is_some_and(is_websocket) {
        return Ok(false);
    }
    let options = headers.get_all(header::CONNECTION).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    if !options.map(<[u8]>::trim_ascii).any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return Ok(false);
    }
    let no_length = headers.get_all(header::CONTENT_LENGTH).iter().all(|length| length.as_bytes() == b"0");
    if headers.contains_key(header::TRANSFER_ENCODING) || !no_length {
        // Where the body ends and the other protocol begins would be a matter of opinion.
        return Err(Fault::Framing("a request that asks for another protocol can not have a body"));
    }
    Ok(parts.method == Method::GET && only(headers, &header::SEC_WEBSOCKET_KEY).is_some())
}

/// Puts back the two fields that make the change, behind those that stayed behind.
pub fn ask(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, WEBSOCKET);
}

/// Whether an answer changes over to another protocol.
pub fn is_switch<B>(answer: &Response<B>) -> bool {
    answer.status() == StatusCode::SWITCHING_PROTOCOLS
}

/// Whether an answer changes over to the protocol that was asked for.
pub fn is_granted<B>(answer: &Response<B>) -> bool {
    is_switch(answer) && only(answer.headers(), &header::UPGRADE).is_some_and(is_websocket)
}

/// The value of a field that is given once.
fn only<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

fn is_websocket(value: &HeaderValue) -> bool {
    value.as_bytes().eq_ignore_ascii_case(b"websocket")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn asked(change: impl FnOnce(&mut Request<()>)) -> Result<bool, Fault> {
        let mut request = Request::get("/")
            .header("connection", "keep-alive, Upgrade")
            .header("upgrade", "WebSocket")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .body(())
            .unwrap();
        change(&mut request);
        is_wanted(&request.into_parts().0)
    }

    fn set(request: &mut Request<()>, name: &'static str, value: &'static str) {
        request.headers_mut().insert(name, HeaderValue::from_static(value));
    }

    #[test]
    fn a_clear_handshake_is_one() {
        assert_eq!(asked(|_| {}), Ok(true));
        assert_eq!(asked(|request| set(request, "content-length", "0")), Ok(true));
    }

    #[test]
    fn what_is_none_goes_on_without() {
        assert_eq!(asked(|request| set(request, "upgrade", "h2c")), Ok(false));
        assert_eq!(asked(|request| set(request, "upgrade", "websocket, h2c")), Ok(false));
        assert_eq!(asked(|request| set(request, "connection", "keep-alive")), Ok(false));
        assert_eq!(asked(|request| *request.method_mut() = Method::POST), Ok(false));
        assert_eq!(asked(|request| *request.version_mut() = Version::HTTP_10), Ok(false));
        assert_eq!(asked(|request| *request.version_mut() = Version::HTTP_2), Ok(false));
        assert_eq!(asked(|request| drop(request.headers_mut().remove("sec-websocket-key"))), Ok(false));
        let two = |request: &mut Request<()>| {
            request.headers_mut().append("upgrade", WEBSOCKET);
        };
        assert_eq!(asked(two), Ok(false));
    }

    #[test]
    fn one_with_a_body_is_refused() {
        assert!(matches!(asked(|request| set(request, "content-length", "1")), Err(Fault::Framing(_))));
        assert!(matches!(asked(|request| set(request, "transfer-encoding", "chunked")), Err(Fault::Framing(_))));
        assert_eq!(
            asked(|request| {
                set(request, "upgrade", "h2c");
                set(request, "content-length", "1");
            }),
            Ok(false)
        );
    }

    #[test]
    fn only_what_was_asked_for_is_granted() {
        let answer = |status: u16, upgrade: &str| {
            Response::builder().status(status).header("upgrade", upgrade).body(()).unwrap()
        };
        assert!(is_granted(&answer(101, "websocket")));
        assert!(!is_granted(&answer(200, "websocket")));
        assert!(!is_granted(&answer(101, "h2c")));
    }
}
