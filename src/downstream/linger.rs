//! Lingering close (RFC 9112, section 9.6): a connection that the gateway closes while the client still sends is read for a
//! moment. Closing a socket with unread bytes resets the connection, and a client that has not read its response yet loses it.

use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::timeout;

use crate::downstream::drain::Drain;
use crate::io_stream::IoStream;

/// Lingering ends after a second without any byte. Many clients read a response only after they have sent the whole request; so it
/// ends five seconds after the last byte, if there were some, and after thirty in all. Counted in steps of a second.
pub const LINGER: Duration = Duration::from_secs(1);
const QUIET_STEPS_MAX: u32 = 5;
const STEPS_MAX: u32 = 30;
/// The most bytes that are read.
const LINGER_BYTES: usize = 64 * 1024 * 1024;
/// The most bytes of one read.
const READ_BYTES: usize = 4 * 1024;

/// Reads and discards what the client sends, until it closes the connection or a limit is reached, and not much longer once the
/// drain closes idle connections. The write side was shut down.
pub async fn linger(io: &mut IoStream, drain: &Drain) {
    let (mut received, mut quiet_steps) = (0, 0);
    for _ in 0..STEPS_MAX {
        let received_before = received;
        if timeout(LINGER, poll_fn(|cx| poll_discard(io, &mut received, cx))).await.is_ok() {
            return;
        }
        quiet_steps = if received == received_before { quiet_steps + 1 } else { 0 };
        if received == 0 || quiet_steps == QUIET_STEPS_MAX || drain.is_closing_idle() {
            return;
        }
    }
}

/// Ready when the client has closed the connection, or has sent too much.
fn poll_discard(io: &mut IoStream, received: &mut usize, cx: &mut Context<'_>) -> Poll<()> {
    while *received < LINGER_BYTES {
        let mut bytes = [const { MaybeUninit::uninit() }; READ_BYTES];
        let mut bytes = ReadBuf::uninit(&mut bytes);
        match ready!(Pin::new(&mut *io).poll_read(cx, &mut bytes)) {
            Ok(()) if !bytes.filled().is_empty() => *received += bytes.filled().len(),
            Ok(()) | Err(_) => break,
        }
    }
    Poll::Ready(())
}
