//! Informational answers (1xx) of an upstream, on their way to the client past hyper, which can not
//! send them from a service. RFC 9110, section 15.2: a proxy forwards them.
//!
//! The connection to the upstream puts them in, the guard of the client's socket takes them out
//! before it sends anything else. Both are driven by one task; hyper asks for what may be shared
//! between threads all the same.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http::HeaderMap;

/// So many bytes of heads may wait; what is beyond is dropped, for they are only hints.
const WAITING_MAX_BYTES: usize = 16 * 1024;

/// Heads that wait for one client connection.
#[derive(Debug, Default)]
pub struct Interim {
    waiting: AtomicBool,
    heads: Mutex<Vec<u8>>,
}

impl Interim {
    /// Adds a head. 100 and 101 are not passed on: each is between two neighbours only.
    pub fn put(&self, status: u16, reason: &str, fields: &HeaderMap) {
        if !(102..200).contains(&status) {
            return;
        }
        let mut heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        let start = heads.len();
        heads.extend_from_slice(format!("HTTP/1.1 {status} {reason}\r\n").as_bytes());
        for (name, value) in fields.iter().filter(|(name, _)| !is_about_the_connection(name.as_str())) {
            heads.extend_from_slice(name.as_str().as_bytes());
            heads.extend_from_slice(b": ");
            heads.extend_from_slice(value.as_bytes());
            heads.extend_from_slice(b"\r\n");
        }
        heads.extend_from_slice(b"\r\n");
        if heads.len() > WAITING_MAX_BYTES {
            heads.truncate(start);
        }
        // Ordering: relaxed; the same task looks at it next.
        self.waiting.store(!heads.is_empty(), Ordering::Relaxed);
    }

    /// What waits, if anything does. Costs a load where nothing does.
    pub fn take(&self) -> Option<Bytes> {
        if !self.waiting.load(Ordering::Relaxed) {
            return None;
        }
        self.waiting.store(false, Ordering::Relaxed);
        Some(Bytes::from(std::mem::take(&mut *self.heads.lock().unwrap_or_else(PoisonError::into_inner))))
    }
}

/// An informational answer has no body, and its connection goes on.
fn is_about_the_connection(name: &str) -> bool {
    matches!(
        name,
        "connection" | "keep-alive" | "proxy-connection" | "te" | "transfer-encoding" | "upgrade" | "content-length"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_written_as_heads_and_taken_once() {
        let interim = Interim::default();
        let mut fields = HeaderMap::new();
        fields.insert("link", "</a.css>; rel=preload".parse().unwrap());
        fields.insert("connection", "close".parse().unwrap());
        interim.put(100, "Continue", &fields);
        assert_eq!(interim.take(), None);
        interim.put(103, "Early Hints", &fields);
        assert_eq!(interim.take().unwrap(), "HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n");
        assert_eq!(interim.take(), None);
    }

    #[test]
    fn what_nobody_takes_does_not_pile_up() {
        let interim = Interim::default();
        (0..10_000).for_each(|_| interim.put(102, "Processing", &HeaderMap::new()));
        assert!(interim.take().unwrap().len() <= WAITING_MAX_BYTES);
    }
}
