//! What a client speaks that did not negotiate it: HTTP/2 begins with a preface that can be nothing
//! else (RFC 9113, section 3.3), and everything else is HTTP/1.1.
//!
//! The first bytes are read here, once, and handed on with the connection, so finding out costs no
//! system call.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

use super::drain::DrainGuard;
use crate::downstream::http2::frame_header::PREFACE;
use crate::io_stream::IoStream;
use crate::proxy::worker_state::WorkerState;

/// How long a preface may take from its first byte to its last: it is one packet.
const PREFACE_MAX: Duration = Duration::from_secs(3);

/// What hyper would read at first of HTTP/1.1; by whether that is filled it finds out how much to read next.
const FIRST_BYTES: usize = 8192;

/// What is spoken on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    Http1,
    Http2,
}

/// Waits for the first bytes of a client. `None` if it says nothing in time, or leaves: then there is
/// nobody to answer.
pub async fn detect_protocol(
    mut wire: IoStream,
    worker: &Rc<WorkerState>,
    drain_guard: &DrainGuard,
) -> Option<(IoStream, Protocol)> {
    let timer = worker.timers.new_timer();
    let limit = worker.config().compiled.config.timeouts.request_head;
    timer.arm(limit);
    let mut preface = Vec::new();
    let (first, spoken) = poll_fn(|cx| {
        loop {
            let mut bytes = [0; FIRST_BYTES];
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut wire).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(None),
                Poll::Pending if timer.poll_expired(cx) || drain_guard.poll_closing_idle(cx) => {
                    return Poll::Ready(None);
                }
                Poll::Pending => return Poll::Pending,
            }
            let so_far = preface.len();
            let spoken = classify(&preface, buffer.filled());
            if let (Some(spoken), 0) = (spoken, so_far) {
                return Poll::Ready(Some((Bytes::copy_from_slice(buffer.filled()), spoken)));
            }
            preface.extend_from_slice(buffer.filled());
            if let Some(spoken) = spoken {
                return Poll::Ready(Some((Bytes::from(std::mem::take(&mut preface)), spoken)));
            }
            if so_far == 0 {
                timer.arm(PREFACE_MAX.min(limit));
            }
        }
    })
    .await?;
    wire.unread(first);
    Some((wire, spoken))
}

/// What these bytes begin; `None` while it can be either.
fn classify(before: &[u8], bytes: &[u8]) -> Option<Protocol> {
    let begins = before.iter().chain(bytes).zip(PREFACE).all(|(byte, wanted)| byte == wanted);
    match begins {
        false => Some(Protocol::Http1),
        true if before.len() + bytes.len() >= PREFACE.len() => Some(Protocol::Http2),
        true => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_differs_decides() {
        assert_eq!(classify(b"", b"GET / HTTP/1.1\r\n"), Some(Protocol::Http1));
        assert_eq!(classify(b"", b"P"), None);
        assert_eq!(classify(b"P", b"OST / HTTP/1.1\r\n"), Some(Protocol::Http1));
        assert_eq!(classify(b"PRI", b" * HTTP/1.1\r\n"), Some(Protocol::Http1));
        for cut in 0..PREFACE.len() {
            let (before, rest) = PREFACE.split_at(cut);
            assert_eq!(classify(before, &rest[..rest.len() - 1]), None);
            assert_eq!(classify(before, rest), Some(Protocol::Http2));
            assert_eq!(classify(before, &[rest, b"\0\0"].concat()), Some(Protocol::Http2));
        }
    }
}
