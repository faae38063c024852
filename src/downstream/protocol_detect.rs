//! Detection of HTTP/2 with prior knowledge on connections without ALPN: a client's HTTP/2 preface (RFC 9113, section 3.3)
//! cannot begin an HTTP/1.1 request.
//!
//! The bytes read for this are put back into the stream, so that detection costs no additional system call.

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

/// Time limit from the first byte of a preface to its last. A preface is one packet.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(3);

/// The bytes of a preface that cannot begin an HTTP/1.1 request, whatever follows.
const HTTP2_LINE_BYTES: usize = b"PRI * HTTP/2.0\r\n".len();

/// The capacity of a read.
const FIRST_BYTES: usize = 4096;

/// The protocol of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    Http1,
    Http2,
}

/// Reads a client's first bytes and detects the protocol. `None`: the client sent nothing in time, or closed the
/// connection. A preface that stays incomplete may as well be the head of a slow POST, and is left to HTTP/1.1.
pub async fn detect_protocol(
    mut io: IoStream,
    worker: &Rc<WorkerState>,
    drain_guard: &DrainGuard,
) -> Option<(IoStream, Protocol)> {
    let timer = worker.timers.new_timer();
    let limit = worker.config().served.config.timeouts.request_head;
    timer.arm(limit);
    let mut preface = Vec::new();
    let unfinished =
        |preface: &mut Vec<u8>| (!preface.is_empty()).then(|| (Bytes::from(std::mem::take(preface)), Protocol::Http1));
    let (first, protocol) = poll_fn(|cx| {
        loop {
            let mut bytes = [0; FIRST_BYTES];
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut io).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(unfinished(&mut preface)),
                Poll::Pending if timer.poll_expired(cx) || drain_guard.poll_closing_idle(cx) => {
                    return Poll::Ready(unfinished(&mut preface));
                }
                Poll::Pending => return Poll::Pending,
            }
            let read_before = preface.len();
            let protocol = classify(&preface, buffer.filled());
            if let (Some(protocol), 0) = (protocol, read_before) {
                return Poll::Ready(Some((Bytes::copy_from_slice(buffer.filled()), protocol)));
            }
            preface.extend_from_slice(buffer.filled());
            if let Some(protocol) = protocol {
                return Poll::Ready(Some((Bytes::from(std::mem::take(&mut preface)), protocol)));
            }
            if read_before == 0 {
                timer.arm(PREFACE_TIMEOUT.min(limit));
            }
        }
    })
    .await?;
    io.unread(first);
    Some((io, protocol))
}

/// The protocol that `before` and `bytes` begin; `None` while both are possible. A preface that is wrong behind its first line
/// is an error of HTTP/2.
fn classify(before: &[u8], bytes: &[u8]) -> Option<Protocol> {
    let received = before.len() + bytes.len();
    let equal = before.iter().chain(bytes).zip(PREFACE).take_while(|(byte, wanted)| byte == wanted).count();
    match () {
        () if equal == PREFACE.len() || equal >= HTTP2_LINE_BYTES && equal < received => Some(Protocol::Http2),
        () if equal < received => Some(Protocol::Http1),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_differs_from_the_preface_decides() {
        assert_eq!(classify(b"", b"GET / HTTP/1.1\r\n"), Some(Protocol::Http1));
        assert_eq!(classify(b"", b"P"), None);
        assert_eq!(classify(b"P", b"OST / HTTP/1.1\r\n"), Some(Protocol::Http1));
        assert_eq!(classify(b"PRI", b" * HTTP/1.1\r\n"), Some(Protocol::Http1));
        assert_eq!(classify(b"PRI * HTTP/2.0\r", b"\rSM"), Some(Protocol::Http1));
        assert_eq!(classify(b"PRI * HTTP/2.0\r", b"\n\r\nXM"), Some(Protocol::Http2));
        for cut in 0..PREFACE.len() {
            let (before, rest) = PREFACE.split_at(cut);
            assert_eq!(classify(before, &rest[..rest.len() - 1]), None);
            assert_eq!(classify(before, rest), Some(Protocol::Http2));
            assert_eq!(classify(before, &[rest, b"\0\0"].concat()), Some(Protocol::Http2));
        }
    }
}
