//! Bytes in both directions, after an upstream has switched protocols: nothing is understood of them.
//!
//! Each direction ends by itself, so that either side may stop sending and still be answered. What can
//! not be passed on waits in a buffer, and nothing more is read meanwhile; a tunnel that is silent has
//! no buffers.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::request_limit::RequestPermit;
use super::server_pool::ActiveRequest;
use super::tunnel_io::FarEnd;
use crate::timer::Timer;

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 16 * 1024;
/// Pieces that one direction may move before others have a turn.
const PIECES_AT_ONCE: usize = 32;

/// The upstream's end.
pub struct Tunnel {
    far: FarEnd,
    /// What came behind the head of the answer.
    early: Bytes,
    /// What a request has at its server until it ends; given back with the tunnel.
    _held: Option<(ActiveRequest, Option<RequestPermit>)>,
}

/// How many bytes have passed.
#[derive(Debug, Default)]
pub struct ByteCounts {
    pub to_client: Cell<u64>,
    pub to_upstream: Cell<u64>,
}

/// How a tunnel ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Both sides had nothing more to say.
    Finished,
    /// Nobody said anything for too long.
    Silent,
    BrokenByClient,
    BrokenByUpstream,
}

impl Tunnel {
    pub fn new(far: FarEnd, early: Bytes) -> Tunnel {
        Tunnel { far, early, _held: None }
    }

    /// The same, as the rest of this visit.
    pub fn held_by(self, visit: ActiveRequest, ticket: Option<RequestPermit>) -> Tunnel {
        Tunnel { _held: Some((visit, ticket)), ..self }
    }

    /// Passes bytes until both sides have ended, one is gone, or both have been silent for `limit`. `early`
    /// is what the client sent before it could know that there is a tunnel.
    pub async fn run(
        mut self,
        mut client: impl AsyncRead + AsyncWrite + Unpin,
        early: Bytes,
        limit: Duration,
        timer: &Timer,
        toll: &ByteCounts,
    ) -> End {
        let mut up = Direction { waiting: early, ..Direction::default() };
        let mut down = Direction { waiting: self.early, ..Direction::default() };
        timer.arm(limit);
        let end = poll_fn(|cx| {
            let passed = toll.to_client.get() + toll.to_upstream.get();
            let upwards = up.poll(&mut client, &mut self.far, &toll.to_upstream, cx);
            let downwards = down.poll(&mut self.far, &mut client, &toll.to_client, cx);
            match (upwards, downwards) {
                (Poll::Ready(Err(Broken::Reading)), _) | (_, Poll::Ready(Err(Broken::Writing))) => {
                    return Poll::Ready(End::BrokenByClient);
                }
                (Poll::Ready(Err(Broken::Writing)), _) | (_, Poll::Ready(Err(Broken::Reading))) => {
                    return Poll::Ready(End::BrokenByUpstream);
                }
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => return Poll::Ready(End::Finished),
                _ => {}
            }
            if toll.to_client.get() + toll.to_upstream.get() > passed {
                timer.arm(limit);
            }
            if timer.poll_expired(cx) { Poll::Ready(End::Silent) } else { Poll::Pending }
        });
        let end = end.await;
        timer.disarm();
        end
    }
}

/// Which side of a direction failed.
enum Broken {
    Reading,
    Writing,
}

/// One direction of a tunnel.
#[derive(Default)]
struct Direction {
    /// What was read and could not be passed on yet.
    waiting: Bytes,
    unflushed: bool,
    /// No more will be read.
    at_end: bool,
    /// And the other side knows.
    shut: bool,
}

impl Direction {
    fn poll(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        toll: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        for _ in 0..PIECES_AT_ONCE {
            ready!(self.poll_pass_on(to, toll, cx)).map_err(|_gone| Broken::Writing)?;
            if self.at_end {
                if !self.shut {
                    // Whoever has gone away altogether needs not be told.
                    let _ = ready!(Pin::new(&mut *to).poll_shutdown(cx));
                    self.shut = true;
                }
                return Poll::Ready(Ok(()));
            }
            let mut piece = [MaybeUninit::uninit(); PIECE_BYTES];
            let mut piece = ReadBuf::uninit(&mut piece);
            match Pin::new(&mut *from).poll_read(cx, &mut piece) {
                Poll::Ready(Ok(())) if piece.filled().is_empty() => self.at_end = true,
                Poll::Ready(Ok(())) => {
                    let sent = self.write_at_once(piece.filled(), to, toll, cx).map_err(|_gone| Broken::Writing)?;
                    self.waiting = Bytes::copy_from_slice(&piece.filled()[sent..]);
                }
                Poll::Ready(Err(_gone)) => return Poll::Ready(Err(Broken::Reading)),
                Poll::Pending => {
                    // Under TLS what was written may not have left.
                    if self.unflushed && Pin::new(&mut *to).poll_flush(cx).is_ready() {
                        self.unflushed = false;
                    }
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes what the other side takes right now, without a copy; says how much that was.
    fn write_at_once(
        &mut self,
        bytes: &[u8],
        to: &mut (impl AsyncWrite + Unpin),
        toll: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> io::Result<usize> {
        match Pin::new(to).poll_write(cx, bytes) {
            Poll::Ready(Ok(sent)) => {
                self.unflushed = true;
                toll.set(toll.get() + sent as u64);
                Ok(sent)
            }
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Ok(0),
        }
    }

    fn poll_pass_on(
        &mut self,
        to: &mut (impl AsyncWrite + Unpin),
        toll: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.waiting.is_empty() {
            let sent = ready!(Pin::new(&mut *to).poll_write(cx, &self.waiting))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            toll.set(toll.get() + sent as u64);
            self.waiting.advance(sent);
        }
        self.waiting = Bytes::new();
        Poll::Ready(Ok(()))
    }
}
