//! Informational responses (1xx) on their way from an upstream connection to the client (RFC 9110, section 15.2: a proxy
//! forwards them).
//!
//! The upstream connection pushes heads into an `InformationalQueue`. For HTTP/1.1, the connection sends
//! them before the response. For HTTP/2, the stream's task passes them to h2. One task drives both sides.

use std::cell::RefCell;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};

/// Bytes of heads that may wait. Further heads are dropped: they are only hints.
pub const QUEUE_MAX_BYTES: usize = 16 * 1024;

/// Fields of one head on HTTP/2. A head with more is not forwarded.
const FIELDS_MAX: usize = 128;

/// Heads that wait for one client connection, serialized as HTTP/1.1.
#[derive(Debug, Default)]
pub struct InformationalQueue(RefCell<Vec<u8>>);

impl InformationalQueue {
    /// Adds a head. Returns whether it will be forwarded: 100 and 101 concern only the upstream connection, and a full queue
    /// takes no more.
    pub fn push<'a>(&self, status: u16, reason: &str, fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> bool {
        if !(102..200).contains(&status) {
            return false;
        }
        let mut heads = self.0.borrow_mut();
        let start = heads.len();
        heads.extend_from_slice(format!("HTTP/1.1 {status} {reason}\r\n").as_bytes());
        for (name, value) in fields.filter(|(name, _)| !is_connection_specific(name)) {
            heads.extend(name.bytes().map(|byte| byte.to_ascii_lowercase()));
            heads.extend_from_slice(b": ");
            heads.extend_from_slice(value);
            heads.extend_from_slice(b"\r\n");
        }
        heads.extend_from_slice(b"\r\n");
        let has_room = heads.len() <= QUEUE_MAX_BYTES;
        if !has_room {
            heads.truncate(start);
        }
        has_room
    }

    /// Takes all waiting heads.
    pub fn take(&self) -> Option<Bytes> {
        let mut heads = self.0.borrow_mut();
        if heads.is_empty() { None } else { Some(Bytes::from(std::mem::take(&mut *heads))) }
    }
}

/// Parses the heads of a queue, for an HTTP/2 stream.
pub fn parse_heads(mut heads: &[u8]) -> impl Iterator<Item = Response<()>> {
    std::iter::from_fn(move || {
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut head = httparse::Response::new(&mut fields);
        let httparse::Status::Complete(length) = head.parse(heads).ok()? else { return None };
        let mut response = Response::builder().status(head.code?).body(()).ok()?;
        for field in head.headers {
            let (name, value) = (HeaderName::from_bytes(field.name.as_bytes()), HeaderValue::from_bytes(field.value));
            if let (Ok(name), Ok(value)) = (name, value) {
                response.headers_mut().append(name, value);
            }
        }
        heads = &heads[length..];
        Some(response)
    })
}

/// Whether a field describes the connection or a body; an informational response has no body.
fn is_connection_specific(name: &str) -> bool {
    ["connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade", "content-length"]
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_serialized_and_taken_once() {
        let queue = InformationalQueue::default();
        let fields = [("Link", &b"</a.css>; rel=preload"[..]), ("Connection", b"close")];
        queue.push(100, "Continue", fields.into_iter());
        assert_eq!(queue.take(), None);
        queue.push(103, "Early Hints", fields.into_iter());
        assert_eq!(queue.take().unwrap(), "HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n");
        assert_eq!(queue.take(), None);
    }

    #[test]
    fn heads_are_parsed_one_by_one() {
        let queue = InformationalQueue::default();
        queue.push(103, "Early Hints", [("Link", &b"<a>"[..]), ("Link", b"<b>")].into_iter());
        queue.push(102, "", std::iter::empty());
        let parsed: Vec<_> = parse_heads(&queue.take().unwrap()).collect();
        assert_eq!(parsed.iter().map(|response| response.status().as_u16()).collect::<Vec<_>>(), [103, 102]);
        assert!(parsed[0].headers().get_all("link").iter().eq(["<a>", "<b>"]) && parsed[1].headers().is_empty());
        assert_eq!(parse_heads(b"").count(), 0);
    }

    #[test]
    fn the_queue_is_bounded_when_heads_are_not_taken() {
        let queue = InformationalQueue::default();
        let queued = (0..10_000).filter(|_| queue.push(102, "Processing", std::iter::empty())).count();
        assert!((1..10_000).contains(&queued));
        assert!(queue.take().unwrap().len() <= QUEUE_MAX_BYTES);
    }
}
