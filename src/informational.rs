//! Informational answers (1xx) of an upstream, on their way to the client. RFC 9110, section 15.2: a proxy forwards them.
//!
//! The connection to the upstream puts them in. For HTTP/1.1 they go past hyper, which can not send them from a service:
//! the guard of the client's socket takes them out before it sends anything else. Of HTTP/2 whoever looks after the stream
//! gives them to h2. One task drives both sides.

use std::cell::RefCell;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};

/// So many bytes of heads may wait; what is beyond is dropped, for they are only hints.
pub const QUEUE_MAX_BYTES: usize = 16 * 1024;

/// Fields of one head; one with more is not told on a stream.
const FIELDS_MAX: usize = 128;

/// Heads that wait for one client connection.
#[derive(Debug, Default)]
pub struct InformationalQueue(RefCell<Vec<u8>>);

impl InformationalQueue {
    /// Adds a head. 100 and 101 are not passed on: each is between two neighbours only.
    pub fn push<'a>(&self, status: u16, reason: &str, fields: impl Iterator<Item = (&'a str, &'a [u8])>) {
        if !(102..200).contains(&status) {
            return;
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
        if heads.len() > QUEUE_MAX_BYTES {
            heads.truncate(start);
        }
    }

    /// What waits, if anything does.
    pub fn take(&self) -> Option<Bytes> {
        let mut heads = self.0.borrow_mut();
        if heads.is_empty() { None } else { Some(Bytes::from(std::mem::take(&mut *heads))) }
    }
}

/// Heads that were taken, one by one, for a stream of HTTP/2.
pub fn parse_heads(mut heads: &[u8]) -> impl Iterator<Item = Response<()>> {
    std::iter::from_fn(move || {
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut head = httparse::Response::new(&mut fields);
        let httparse::Status::Complete(length) = head.parse(heads).ok()? else { return None };
        let mut answer = Response::builder().status(head.code?).body(()).ok()?;
        for field in head.headers {
            let (name, value) = (HeaderName::from_bytes(field.name.as_bytes()), HeaderValue::from_bytes(field.value));
            if let (Ok(name), Ok(value)) = (name, value) {
                answer.headers_mut().append(name, value);
            }
        }
        heads = &heads[length..];
        Some(answer)
    })
}

/// An informational answer has no body, and its connection goes on.
fn is_connection_specific(name: &str) -> bool {
    ["connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade", "content-length"]
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_written_as_heads_and_taken_once() {
        let interim = InformationalQueue::default();
        let fields = [("Link", &b"</a.css>; rel=preload"[..]), ("Connection", b"close")];
        interim.push(100, "Continue", fields.into_iter());
        assert_eq!(interim.take(), None);
        interim.push(103, "Early Hints", fields.into_iter());
        assert_eq!(interim.take().unwrap(), "HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n");
        assert_eq!(interim.take(), None);
    }

    #[test]
    fn heads_are_read_one_by_one() {
        let interim = InformationalQueue::default();
        interim.push(103, "Early Hints", [("Link", &b"<a>"[..]), ("Link", b"<b>")].into_iter());
        interim.push(102, "", std::iter::empty());
        let told: Vec<_> = parse_heads(&interim.take().unwrap()).collect();
        assert_eq!(told.iter().map(|answer| answer.status().as_u16()).collect::<Vec<_>>(), [103, 102]);
        assert!(told[0].headers().get_all("link").iter().eq(["<a>", "<b>"]) && told[1].headers().is_empty());
        assert_eq!(parse_heads(b"").count(), 0);
    }

    #[test]
    fn what_nobody_takes_does_not_pile_up() {
        let interim = InformationalQueue::default();
        (0..10_000).for_each(|_| interim.push(102, "Processing", std::iter::empty()));
        assert!(interim.take().unwrap().len() <= QUEUE_MAX_BYTES);
    }
}
