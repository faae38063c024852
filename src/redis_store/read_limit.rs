//! How much a server may say on a connection: not far more than it was asked for. What it says is kept in memory until an
//! answer is complete, and one that is broken, or is no Redis at all, may never come to an end.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The longest answer that is read: the map of a cluster with thousands of nodes fits.
const MOST: usize = 4 << 20;
/// For each byte that is sent so many more may come. Answers about counters are shorter than what they answer.
const FOR_EACH: usize = 8;

/// A stream of which no more is read than that.
pub struct LimitedReader<S> {
    stream: S,
    left: usize,
}

impl<S> LimitedReader<S> {
    pub fn new(stream: S) -> LimitedReader<S> {
        LimitedReader { stream, left: MOST }
    }

    fn asked(&mut self, bytes: usize) {
        self.left = self.left.saturating_add(bytes.saturating_mul(FOR_EACH)).min(MOST);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedReader<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, into))?;
        let more = into.filled().len().saturating_sub(before);
        Poll::Ready(match self.left.checked_sub(more) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(io::Error::other("it says far more than it was asked for")),
        })
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedReader<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.asked(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bytes))?;
        self.asked(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
