//! A stream with a write timeout: a write that makes no progress for too long, because the peer does not read, fails.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Fails writes with `TimedOut` after `limit` without progress.
pub struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write waits for the peer.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    /// `limit` is the time between two writes that make progress.
    pub fn new(stream: S, limit: Duration) -> WriteTimeout<S> {
        WriteTimeout { stream, limit, deadline: None }
    }

    /// Starts the timer when a write has to wait, and stops it when the write makes progress.
    fn poll_with_timeout<T>(&mut self, result: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.deadline = None;
            return result;
        }
        let limit = self.limit;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.poll_with_timeout(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.poll_with_timeout(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.poll_with_timeout(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.poll_with_timeout(shut_down, cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn writes_to_a_peer_that_does_not_read_time_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (stream, mut peer) = duplex(4);
            let mut stream = WriteTimeout::new(stream, Duration::from_millis(20));
            stream.write_all(b"full").await.unwrap();
            let error = stream.write_all(b"more").await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            // A peer that reads receives all bytes, however often the stream is full.
            let (stream, sink) = duplex(4);
            let mut stream = WriteTimeout::new(stream, Duration::from_secs(60));
            let reader = async {
                let mut read = Vec::new();
                let mut sink = sink;
                sink.read_to_end(&mut read).await.map(|_| read)
            };
            let writer = async {
                stream.write_all(&[7; 1000]).await?;
                stream.shutdown().await
            };
            let (read, written) = tokio::join!(reader, writer);
            written.unwrap();
            assert_eq!(read.unwrap(), [7; 1000]);
            let mut first = [0; 4];
            peer.read_exact(&mut first).await.unwrap();
            assert_eq!(&first, b"full");
        });
    }
}
