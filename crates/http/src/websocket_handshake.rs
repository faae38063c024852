//! WebSocket handshakes, as far as a proxy has to understand them: the upgrade of an HTTP/1.1 connection (RFC 9110,
//! section 7.8; RFC 6455, section 4), and the extended CONNECT of HTTP/2 (RFC 8441).
//!
//! WebSocket is the only supported upgrade. The Upgrade field of another protocol is removed, as the RFC allows, and the
//! request continues as an ordinary one: after an upgrade to `h2c` a client could send requests past the rules. A CONNECT
//! for another protocol is refused. An extended CONNECT for WebSocket becomes the equivalent GET at once, so that routes,
//! rules and the upstream handle one kind of handshake.

use aws_lc_rs::{digest, rand};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};

use super::error::RequestError;

const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");

/// The suffix of the key in the digest of a server (RFC 6455, section 1.3).
const ACCEPT_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// The protocol of an extended CONNECT, stored in the extensions of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ExtendedConnect {
    WebSocket,
    Other,
}

/// How a client opens a WebSocket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpgradeMethod {
    /// By an upgrade of its HTTP/1.1 connection.
    Upgrade,
    /// By an extended CONNECT.
    ExtendedConnect,
}

/// Marks a request as an extended CONNECT. A CONNECT for a WebSocket becomes the equivalent GET.
pub fn convert_extended_connect<B>(request: &mut Request<B>, protocol: &str) {
    let extended =
        if protocol.eq_ignore_ascii_case("websocket") { ExtendedConnect::WebSocket } else { ExtendedConnect::Other };
    if extended == ExtendedConnect::WebSocket {
        *request.method_mut() = Method::GET;
    }
    request.extensions_mut().insert(extended);
}

/// Whether a request was an extended CONNECT, for any protocol.
pub fn is_extended_connect(parts: &Parts) -> bool {
    parts.extensions.get::<ExtendedConnect>().is_some()
}

/// How a request opens a WebSocket, if it does. `has_upgrade` says whether it has an Upgrade field. To be called before
/// fields are removed for the upstream.
pub fn requested_upgrade(parts: &Parts, has_upgrade: bool) -> Result<Option<UpgradeMethod>, RequestError> {
    if parts.version == Version::HTTP_2 {
        return Ok(
            (parts.extensions.get() == Some(&ExtendedConnect::WebSocket)).then_some(UpgradeMethod::ExtendedConnect)
        );
    }
    Ok((has_upgrade && is_http1_handshake(parts)?).then_some(UpgradeMethod::Upgrade))
}

/// Whether a request with an Upgrade field is a WebSocket handshake.
fn is_http1_handshake(parts: &Parts) -> Result<bool, RequestError> {
    let headers = &parts.headers;
    if parts.version != Version::HTTP_11 || !single_value(headers, &header::UPGRADE).is_some_and(is_websocket) {
        return Ok(false);
    }
    let options = headers.get_all(header::CONNECTION).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    if !options.map(<[u8]>::trim_ascii).any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return Ok(false);
    }
    let has_no_body = headers.get_all(header::CONTENT_LENGTH).iter().all(|length| length.as_bytes() == b"0");
    if headers.contains_key(header::TRANSFER_ENCODING) || !has_no_body {
        // Servers disagree on where the body ends and the other protocol begins.
        return Err(RequestError::Framing("a request that upgrades to another protocol cannot have a body"));
    }
    Ok(parts.method == Method::GET && single_value(headers, &header::SEC_WEBSOCKET_KEY).is_some())
}

/// The value of `Sec-WebSocket-Key`: a nonce of 16 bytes in base64.
#[derive(Clone, Debug)]
pub struct HandshakeKey(HeaderValue);

impl HandshakeKey {
    /// A random key, for a handshake of the gateway.
    pub fn generate() -> Result<HandshakeKey, RequestError> {
        let mut nonce = [0; 16];
        rand::fill(&mut nonce).map_err(|_no_entropy| RequestError::Panic)?;
        HeaderValue::from_str(&STANDARD.encode(nonce)).map(HandshakeKey).map_err(|_invalid| RequestError::Panic)
    }

    /// The key of a handshake, if it has one.
    pub fn from_headers(headers: &HeaderMap) -> Option<HandshakeKey> {
        headers.get(header::SEC_WEBSOCKET_KEY).cloned().map(HandshakeKey)
    }

    /// Removes the key from a handshake, if it has one.
    pub fn take_from(headers: &mut HeaderMap) -> Option<HandshakeKey> {
        headers.remove(header::SEC_WEBSOCKET_KEY).map(HandshakeKey)
    }

    pub fn insert_into(&self, headers: &mut HeaderMap) {
        headers.insert(header::SEC_WEBSOCKET_KEY, self.0.clone());
    }

    /// The `Sec-WebSocket-Accept` of a server that accepts the handshake.
    fn accept_value(&self) -> String {
        let mut digest = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        digest.update(self.0.as_bytes());
        digest.update(ACCEPT_GUID);
        STANDARD.encode(digest.finish())
    }

    /// Whether a response accepts this handshake.
    pub fn is_accepted(&self, headers: &HeaderMap) -> bool {
        single_value(headers, &header::SEC_WEBSOCKET_ACCEPT)
            .is_some_and(|value| value.as_bytes() == self.accept_value().as_bytes())
    }
}

/// Converts a `101 Switching Protocols` response to the response to an extended CONNECT (RFC 8441, section 5).
pub fn to_connect_response<B>(response: &mut Response<B>) {
    *response.status_mut() = StatusCode::OK;
    for name in [header::CONNECTION, header::UPGRADE, header::SEC_WEBSOCKET_ACCEPT, header::CONTENT_LENGTH] {
        response.headers_mut().remove(name);
    }
}

/// Converts the response to an extended CONNECT to `101 Switching Protocols`.
pub fn to_switching_protocols<B>(response: &mut Response<B>, key: Option<&HandshakeKey>) {
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    insert_upgrade_fields(response.headers_mut());
    if let Some(accept) = key.and_then(|key| HeaderValue::from_str(&key.accept_value()).ok()) {
        response.headers_mut().insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    }
}

/// Removes `Connection` and `Upgrade`.
pub fn remove_upgrade_fields(headers: &mut HeaderMap) {
    headers.remove(header::CONNECTION);
    headers.remove(header::UPGRADE);
}

/// Sets `Connection` and `Upgrade` for WebSocket, after the hop-by-hop fields were removed.
pub fn insert_upgrade_fields(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, WEBSOCKET);
}

/// Whether a response switches to another protocol.
pub fn is_switching_protocols<B>(response: &Response<B>) -> bool {
    response.status() == StatusCode::SWITCHING_PROTOCOLS
}

/// Whether a response switches to WebSocket.
pub fn accepts_websocket<B>(response: &Response<B>) -> bool {
    is_switching_protocols(response) && single_value(response.headers(), &header::UPGRADE).is_some_and(is_websocket)
}

/// The value of a field that occurs exactly once.
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

    fn is_handshake(change: impl FnOnce(&mut Request<()>)) -> Result<bool, RequestError> {
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
    fn a_complete_handshake_is_recognized() {
        assert_eq!(is_handshake(|_| {}), Ok(true));
        assert_eq!(is_handshake(|request| set(request, "content-length", "0")), Ok(true));
    }

    #[test]
    fn other_requests_are_no_handshake() {
        assert_eq!(is_handshake(|request| set(request, "upgrade", "h2c")), Ok(false));
        assert_eq!(is_handshake(|request| set(request, "upgrade", "websocket, h2c")), Ok(false));
        assert_eq!(is_handshake(|request| set(request, "connection", "keep-alive")), Ok(false));
        assert_eq!(is_handshake(|request| *request.method_mut() = Method::POST), Ok(false));
        assert_eq!(is_handshake(|request| *request.version_mut() = Version::HTTP_10), Ok(false));
        assert_eq!(is_handshake(|request| *request.version_mut() = Version::HTTP_2), Ok(false));
        assert_eq!(is_handshake(|request| drop(request.headers_mut().remove("sec-websocket-key"))), Ok(false));
        let two = |request: &mut Request<()>| {
            request.headers_mut().append("upgrade", WEBSOCKET);
        };
        assert_eq!(is_handshake(two), Ok(false));
    }

    #[test]
    fn a_handshake_with_a_body_is_refused() {
        assert!(matches!(is_handshake(|request| set(request, "content-length", "1")), Err(RequestError::Framing(_))));
        assert!(matches!(
            is_handshake(|request| set(request, "transfer-encoding", "chunked")),
            Err(RequestError::Framing(_))
        ));
        assert_eq!(
            is_handshake(|request| {
                set(request, "upgrade", "h2c");
                set(request, "content-length", "1");
            }),
            Ok(false)
        );
    }

    #[test]
    fn only_a_switch_to_websocket_is_accepted() {
        let response = |status: u16, upgrade: &str| {
            Response::builder().status(status).header("upgrade", upgrade).body(()).unwrap()
        };
        assert!(accepts_websocket(&response(101, "websocket")));
        assert!(!accepts_websocket(&response(200, "websocket")));
        assert!(!accepts_websocket(&response(101, "h2c")));
    }

    #[test]
    fn an_extended_connect_becomes_the_equivalent_get() {
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
    fn a_key_is_accepted_by_the_digest_of_the_key() {
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
    fn responses_are_converted_between_versions() {
        let mut response = Response::builder()
            .status(101)
            .header("upgrade", "websocket")
            .header("sec-websocket-accept", "a")
            .header("sec-websocket-protocol", "chat")
            .body(())
            .unwrap();
        to_connect_response(&mut response);
        assert_eq!((response.status().as_u16(), response.headers().len()), (200, 1));
        let key = HandshakeKey(HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ=="));
        to_switching_protocols(&mut response, Some(&key));
        assert!(accepts_websocket(&response) && key.is_accepted(response.headers()));
        remove_upgrade_fields(response.headers_mut());
        assert!(!accepts_websocket(&response));
    }
}
