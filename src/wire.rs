//! A TCP stream that sends what it is given in the cheapest way.
//!
//! A head and a small body come as two pieces. Copying a few hundred bytes together and sending them
//! as one costs less than the system call that gathers pieces; for large bodies it is the other way
//! round.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Up to so many bytes are copied together.
const COPY_MAX_BYTES: usize = 2048;

#[derive(Debug)]
pub struct Wire(pub TcpStream);

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let stream = Pin::new(&mut self.0);
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        match slices {
            [only] => stream.poll_write(cx, only),
            several if total <= COPY_MAX_BYTES => {
                // An array would have to be zeroed first.
                let mut together = SmallVec::<[u8; COPY_MAX_BYTES]>::new();
                several.iter().for_each(|slice| together.extend_from_slice(slice));
                stream.poll_write(cx, &together)
            }
            several => stream.poll_write_vectored(cx, several),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
