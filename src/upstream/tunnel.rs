//! Relays bytes in both directions after an upstream has switched protocols.
//!
//! Each direction ends by itself, so that a side that has stopped sending still receives. Bytes that cannot be written
//! are buffered, and nothing more is read meanwhile; an idle tunnel has no buffers.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::http2::Http2Stream;
use super::pool::ActiveRequest;
use super::request_limit::{ConnectionPermit, RequestPermit};
use crate::io_stream::IoStream;
use crate::timer::Timer;
use transom_runtime::metrics::upstream::CountedConnection;

/// The most bytes of one read.
const READ_BYTES: usize = 16 * 1024;
/// Reads of one direction before other tasks get a turn.
const READS_PER_POLL: usize = 32;

/// The upstream's end of a tunnel.
pub struct Tunnel {
    upstream: UpstreamIo,
    /// Bytes read after the head of the response.
    early_bytes: Bytes,
    /// The permits of the request, held until the tunnel ends.
    _held: Option<(ActiveRequest, Option<RequestPermit>)>,
}

/// Bytes relayed so far.
#[derive(Debug, Default)]
pub struct ByteCounts {
    pub to_client: Cell<u64>,
    pub to_upstream: Cell<u64>,
}

/// How a tunnel ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TunnelEnd {
    /// Both sides have ended.
    Finished,
    /// Neither side sent anything for too long.
    Idle,
    BrokenByClient,
    BrokenByUpstream,
}

impl Tunnel {
    pub fn new(upstream: UpstreamIo, early_bytes: Bytes) -> Tunnel {
        Tunnel { upstream, early_bytes, _held: None }
    }

    /// Holds the permits of the request until the tunnel ends.
    pub fn holding(self, active: ActiveRequest, request_permit: Option<RequestPermit>) -> Tunnel {
        Tunnel { _held: Some((active, request_permit)), ..self }
    }

    /// Relays bytes until both sides have ended, one fails, or both have been idle for `limit`. `early_bytes`: bytes that the
    /// client sent before the response.
    pub async fn run(
        mut self,
        mut client: impl AsyncRead + AsyncWrite + Unpin,
        early_bytes: Bytes,
        limit: Duration,
        timer: &Timer,
        counts: &ByteCounts,
    ) -> TunnelEnd {
        let mut up = Direction { buffered: early_bytes, ..Direction::default() };
        let mut down = Direction { buffered: self.early_bytes, ..Direction::default() };
        timer.arm(limit);
        let end = poll_fn(|cx| {
            let before = counts.to_client.get() + counts.to_upstream.get();
            let upwards = up.poll_transfer(&mut client, &mut self.upstream, &counts.to_upstream, cx);
            let downwards = down.poll_transfer(&mut self.upstream, &mut client, &counts.to_client, cx);
            match (upwards, downwards) {
                (Poll::Ready(Err(FailedSide::Reading)), _) | (_, Poll::Ready(Err(FailedSide::Writing))) => {
                    return Poll::Ready(TunnelEnd::BrokenByClient);
                }
                (Poll::Ready(Err(FailedSide::Writing)), _) | (_, Poll::Ready(Err(FailedSide::Reading))) => {
                    return Poll::Ready(TunnelEnd::BrokenByUpstream);
                }
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => return Poll::Ready(TunnelEnd::Finished),
                _ => {}
            }
            if counts.to_client.get() + counts.to_upstream.get() > before {
                timer.arm(limit);
            }
            if timer.poll_expired(cx) { Poll::Ready(TunnelEnd::Idle) } else { Poll::Pending }
        });
        let end = end.await;
        timer.disarm();
        end
    }
}

/// The side of a direction that failed.
enum FailedSide {
    Reading,
    Writing,
}

/// One direction of a tunnel.
#[derive(Default)]
struct Direction {
    /// Bytes that were read and not yet written.
    buffered: Bytes,
    needs_flush: bool,
    /// The reading side has ended.
    at_end: bool,
    /// The writing side was shut down.
    is_shut_down: bool,
}

impl Direction {
    fn poll_transfer(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        counts: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), FailedSide>> {
        for _ in 0..READS_PER_POLL {
            ready!(self.poll_write_buffered(to, counts, cx)).map_err(|_gone| FailedSide::Writing)?;
            if self.at_end {
                if !self.is_shut_down {
                    ready!(self.poll_flush(to, cx)).map_err(|_gone| FailedSide::Writing)?;
                    // A peer that has closed the connection needs no shutdown.
                    let _ = ready!(Pin::new(&mut *to).poll_shutdown(cx));
                    self.is_shut_down = true;
                }
                return Poll::Ready(Ok(()));
            }
            let mut piece = [MaybeUninit::uninit(); READ_BYTES];
            let mut piece = ReadBuf::uninit(&mut piece);
            match Pin::new(&mut *from).poll_read(cx, &mut piece) {
                Poll::Ready(Ok(())) if piece.filled().is_empty() => self.at_end = true,
                Poll::Ready(Ok(())) => {
                    let sent = self.try_write(piece.filled(), to, counts, cx).map_err(|_gone| FailedSide::Writing)?;
                    self.buffered = Bytes::copy_from_slice(&piece.filled()[sent..]);
                }
                Poll::Ready(Err(_gone)) => return Poll::Ready(Err(FailedSide::Reading)),
                Poll::Pending => {
                    if let Poll::Ready(Err(_gone)) = self.poll_flush(to, cx) {
                        return Poll::Ready(Err(FailedSide::Writing));
                    }
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes as much as possible without waiting and without a copy. Returns the bytes written.
    fn try_write(
        &mut self,
        bytes: &[u8],
        to: &mut (impl AsyncWrite + Unpin),
        counts: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> io::Result<usize> {
        match Pin::new(to).poll_write(cx, bytes) {
            Poll::Ready(Ok(sent)) => {
                self.needs_flush = true;
                counts.set(counts.get() + sent as u64);
                Ok(sent)
            }
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Ok(0),
        }
    }

    /// TLS may hold bytes that were written.
    fn poll_flush(&mut self, to: &mut (impl AsyncWrite + Unpin), cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.needs_flush {
            ready!(Pin::new(to).poll_flush(cx))?;
            self.needs_flush = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_buffered(
        &mut self,
        to: &mut (impl AsyncWrite + Unpin),
        counts: &Cell<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.buffered.is_empty() {
            let sent = ready!(Pin::new(&mut *to).poll_write(cx, &self.buffered))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.needs_flush = true;
            counts.set(counts.get() + sent as u64);
            self.buffered.advance(sent);
        }
        self.buffered = Bytes::new();
        Poll::Ready(Ok(()))
    }
}

/// The byte stream of a tunnel: an HTTP/1.1 connection that switched protocols, or an HTTP/2 stream.
pub enum UpstreamIo {
    /// With its count among the connections to the server, and its permit where these are limited.
    Http1(IoStream, (Option<ConnectionPermit>, CountedConnection)),
    /// With its stream's count on the connection.
    Http2(TokioIo<Upgraded>, Http2Stream),
}

impl AsyncRead for UpstreamIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamIo::Http1(stream, _) => Pin::new(stream).poll_read(cx, buffer),
            UpstreamIo::Http2(stream, _) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for UpstreamIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            UpstreamIo::Http1(stream, _) => Pin::new(stream).poll_write(cx, bytes),
            UpstreamIo::Http2(stream, _) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamIo::Http1(stream, _) => Pin::new(stream).poll_flush(cx),
            UpstreamIo::Http2(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamIo::Http1(stream, _) => Pin::new(stream).poll_shutdown(cx),
            UpstreamIo::Http2(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Takes bytes into a buffer, and fails when they are sent.
    struct FailingFlush;

    impl AsyncWrite for FailingFlush {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A source that pauses behind its bytes.
    struct Pausing(&'static [u8]);

    impl AsyncRead for Pausing {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            if self.0.is_empty() {
                return Poll::Pending;
            }
            buffer.put_slice(std::mem::take(&mut self.0));
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn bytes_that_cannot_be_flushed_end_the_tunnel() {
        let cx = &mut Context::from_waker(Waker::noop());
        let transfer = |from: &mut (dyn AsyncRead + Unpin), cx: &mut Context<'_>| {
            Direction::default().poll_transfer(&mut Box::new(from), &mut FailingFlush, &Cell::default(), cx)
        };
        let is_broken = |end| matches!(end, Poll::Ready(Err(FailedSide::Writing)));
        assert!(is_broken(transfer(&mut Pausing(b"bytes"), cx)), "the source pauses");
        assert!(is_broken(transfer(&mut &b"bytes"[..], cx)), "the source has ended");
        assert!(matches!(transfer(&mut Pausing(b""), cx), Poll::Pending), "nothing was written");
    }
}
