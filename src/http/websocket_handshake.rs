//! Opening a WebSocket, as far as a proxy has to understand it: by changing over an HTTP/1.1 connection (RFC 9110,
//! section 7.8; RFC 6455, section 4), or with an extended CONNECT on a stream of HTTP/2 (RFC 8441).
//!
//! It is the only protocol that is changed over to. Any other that a client offers stays behind, as it may
//! by the RFC, and its request goes on as an ordinary one: behind `h2c` a client could send requests that
//! no rule would see. A CONNECT has nothing that it could go on as, and is refused.
//!
//! An extended CONNECT is made the GET that it stands for as soon as it comes, so that routes, rules and the
//! upstream meet one kind of handshake only.

use aws_lc_rs::{digest, rand};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};

use super::error::RequestError;

const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");

/// What a server adds to a key before it takes the digest (RFC 6455, section 1.3).
const ACCEPT_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// What an extended CONNECT asks for, among the extensions of its request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ExtendedConnect {
    WebSocket,
    Other,
}

/// How a client asks for a WebSocket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpgradeMethod {
    /// Its connection changes over.
    Upgrade,
    /// By an extended CONNECT.
    ExtendedConnect,
}

/// Takes note of a CONNECT that names a protocol. One that asks for a WebSocket becomes the GET that it stands for.
pub fn convert_extended_connect<B>(request: &mut Request<B>, protocol: &str) {
    let asked =
        if protocol.eq_ignore_ascii_case("websocket") { ExtendedConnect::WebSocket } else { ExtendedConnect::Other };
    if asked == ExtendedConnect::WebSocket {
        *request.method_mut() = Method::GET;
    }
    request.extensions_mut().insert(asked);
}

/// Whether a request was an extended CONNECT, for whatever protocol.
pub fn is_extended_connect(parts: &Parts) -> bool {
    parts.extensions.get::<ExtendedConnect>().is_some()
}

/// How a request asks for a WebSocket, if it does; `names` says whether it has an Upgrade field. It is to be asked before
/// fields are made ready for the upstream.
pub fn requested_upgrade(parts: &Parts, names: bool) -> Result<Option<UpgradeMethod>, RequestError> {
    if parts.version == Version::HTTP_2 {
        return Ok(
            (parts.extensions.get() == Some(&ExtendedConnect::WebSocket)).then_some(UpgradeMethod::ExtendedConnect)
        );
    }
    Ok((names && is_http1_handshake(parts)?).then_some(UpgradeMethod::Upgrade))
}

/// Whether a request that has an Upgrade field asks for WebSocket.
fn is_http1_handshake(parts: &Parts) -> Result<bool, RequestError> {
    let headers = &parts.headers;
    if parts.version != Version::HTTP_11 || !single_value(headers, &header::UPGRADE).is_some_and(is_websocket) {
        return Ok(false);
    }
    let options = headers.get_all(header::CONNECTION).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    if !options.map(<[u8]>::trim_ascii).any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return Ok(false);
    }
    let no_length = headers.get_all(header::CONTENT_LENGTH).iter().all(|length| length.as_bytes() == b"0");
    if headers.contains_key(header::TRANSFER_ENCODING) || !no_length {
        // Where the body ends and the other protocol begins would be a matter of opinion.
        return Err(RequestError::Framing("a request that asks for another protocol can not have a body"));
    }
    Ok(parts.method == Method::GET && single_value(headers, &header::SEC_WEBSOCKET_KEY).is_some())
}

/// `Sec-WebSocket-Key` of a handshake: a nonce of 16 bytes, as it is written.
#[derive(Clone, Debug)]
pub struct HandshakeKey(HeaderValue);

impl HandshakeKey {
    /// One for a handshake that the gateway makes by itself.
    pub fn generate() -> Result<HandshakeKey, RequestError> {
        let mut nonce = [0; 16];
        rand::fill(&mut nonce).map_err(|_no_entropy| RequestError::Panic)?;
        HeaderValue::from_str(&STANDARD.encode(nonce)).map(HandshakeKey).map_err(|_invalid| RequestError::Panic)
    }

    /// The key of a handshake; `None` if that has none.
    pub fn from_headers(headers: &HeaderMap) -> Option<HandshakeKey> {
        headers.get(header::SEC_WEBSOCKET_KEY).cloned().map(HandshakeKey)
    }

    /// Takes the key from a handshake; `None` if that has none.
    pub fn take_from(headers: &mut HeaderMap) -> Option<HandshakeKey> {
        headers.remove(header::SEC_WEBSOCKET_KEY).map(HandshakeKey)
    }

    pub fn insert_into(&self, headers: &mut HeaderMap) {
        headers.insert(header::SEC_WEBSOCKET_KEY, self.0.clone());
    }

    /// What a server says that has understood the handshake.
    fn accept_value(&self) -> String {
        let mut digest = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        digest.update(self.0.as_bytes());
        digest.update(ACCEPT_GUID);
        STANDARD.encode(digest.finish())
    }

    /// Whether an answer is one to this handshake.
    pub fn is_accepted(&self, headers: &HeaderMap) -> bool {
        single_value(headers, &header::SEC_WEBSOCKET_ACCEPT)
            .is_some_and(|value| value.as_bytes() == self.accept_value().as_bytes())
    }
}

/// Makes an answer that changes over a connection the one to an extended CONNECT (RFC 8441, section 5).
pub fn to_connect_response<B>(answer: &mut Response<B>) {
    *answer.status_mut() = StatusCode::OK;
    for name in [header::CONNECTION, header::UPGRADE, header::SEC_WEBSOCKET_ACCEPT, header::CONTENT_LENGTH] {
        answer.headers_mut().remove(name);
    }
}

/// The other way round: makes the answer that opened a stream to the upstream one that changes over a connection.
pub fn to_switching_protocols<B>(answer: &mut Response<B>, key: Option<&HandshakeKey>) {
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    insert_upgrade_fields(answer.headers_mut());
    if let Some(accept) = key.and_then(|key| HeaderValue::from_str(&key.accept_value()).ok()) {
        answer.headers_mut().insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    }
}

/// Takes away the two fields that make the change.
pub fn remove_upgrade_fields(headers: &mut HeaderMap) {
    headers.remove(header::CONNECTION);
    headers.remove(header::UPGRADE);
}

/// Puts back the two fields that make the change, behind those that stayed behind.
pub fn insert_upgrade_fields(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, WEBSOCKET);
}

/// Whether an answer changes over to another protocol.
pub fn is_switching_protocols<B>(answer: &Response<B>) -> bool {
    answer.status() == StatusCode::SWITCHING_PROTOCOLS
}

/// Whether an answer changes over to the protocol that was asked for.
pub fn accepts_websocket<B>(answer: &Response<B>) -> bool {
    is_switching_protocols(answer) && single_value(answer.headers(), &header::UPGRADE).is_some_and(is_websocket)
}

/// The value of a field that is given once.
fn single_value<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
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

    fn asked(change: impl FnOnce(&mut Request<()>)) -> Result<bool, RequestError> {
        let mut request = Request::get("/")
            .header("connection", "keep-alive, Upgrade")
            .header("upgrade", "WebSocket")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .body(())
            .unwrap();
        change(&mut request);
        is_http1_handshake(&request.into_parts().0)
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
        assert!(matches!(asked(|request| set(request, "content-length", "1")), Err(RequestError::Framing(_))));
        assert!(matches!(asked(|request| set(request, "transfer-encoding", "chunked")), Err(RequestError::Framing(_))));
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
        assert!(accepts_websocket(&answer(101, "websocket")));
        assert!(!accepts_websocket(&answer(200, "websocket")));
        assert!(!accepts_websocket(&answer(101, "h2c")));
    }

    #[test]
    fn an_extended_connect_becomes_the_get_it_stands_for() {
        let extended = |protocol: &str| {
            let mut request = Request::connect("https://a/chat").version(Version::HTTP_2).body(()).unwrap();
            convert_extended_connect(&mut request, protocol);
            request.into_parts().0
        };
        let parts = extended("WebSocket");
        assert!(is_extended_connect(&parts));
        assert_eq!(
            (&parts.method, requested_upgrade(&parts, false)),
            (&Method::GET, Ok(Some(UpgradeMethod::ExtendedConnect)))
        );
        let parts = extended("connect-udp");
        assert!(is_extended_connect(&parts));
        assert_eq!((&parts.method, requested_upgrade(&parts, false)), (&Method::CONNECT, Ok(None)));
        let plain = Request::get("https://a/chat").version(Version::HTTP_2).body(()).unwrap().into_parts().0;
        assert!(!is_extended_connect(&plain));
        assert_eq!(requested_upgrade(&plain, true), Ok(None));
    }

    #[test]
    fn a_key_is_accepted_by_whoever_has_read_it() {
        // RFC 6455, section 1.3.
        let mut headers = HeaderMap::new();
        headers.insert("sec-websocket-key", HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ=="));
        let key = HandshakeKey::take_from(&mut headers).unwrap();
        assert!(headers.is_empty() && !key.is_accepted(&headers));
        headers.insert("sec-websocket-accept", HeaderValue::from_static("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert!(key.is_accepted(&headers));
        let own = HandshakeKey::generate().unwrap();
        assert!(!own.is_accepted(&headers));
        assert_ne!(own.0, HandshakeKey::generate().unwrap().0);
        assert_eq!(STANDARD.decode(&own.0).unwrap().len(), 16);
    }

    #[test]
    fn answers_are_made_those_of_the_other_version() {
        let mut answer = Response::builder()
            .status(101)
            .header("upgrade", "websocket")
            .header("sec-websocket-accept", "a")
            .header("sec-websocket-protocol", "chat")
            .body(())
            .unwrap();
        to_connect_response(&mut answer);
        assert_eq!((answer.status().as_u16(), answer.headers().len()), (200, 1));
        let key = HandshakeKey(HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ=="));
        to_switching_protocols(&mut answer, Some(&key));
        assert!(accepts_websocket(&answer) && key.is_accepted(answer.headers()));
        remove_upgrade_fields(answer.headers_mut());
        assert!(!accepts_websocket(&answer));
    }
}
