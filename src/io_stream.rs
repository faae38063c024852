//! A stream of bytes to or from somebody: TCP, a Unix socket, or TLS; it sends what it is given in the
//! cheapest way.
//!
//! A head and a small body come as two pieces. Copying a few hundred bytes together and sending them
//! as one costs less than the system call that gathers pieces; for large bodies it is the other way
//! round. And under TLS one piece is one record.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::dup;
use rustix::process::{Resource, getrlimit};
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

/// Up to so many bytes are copied together.
const COPY_MAX_BYTES: usize = 2048;

#[derive(Debug)]
pub struct IoStream {
    stream: Transport,
    /// What was read before, to find out what is spoken here.
    unread: Bytes,
}

#[derive(Debug)]
enum Transport {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// How many descriptors the process may have.
pub fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

impl IoStream {
    pub fn tcp(stream: TcpStream) -> IoStream {
        IoStream { stream: Transport::Tcp(stream), unread: Bytes::new() }
    }

    pub fn unix(stream: UnixStream) -> IoStream {
        IoStream { stream: Transport::Unix(stream), unread: Bytes::new() }
    }

    pub fn tls(stream: TlsStream<TcpStream>) -> IoStream {
        IoStream { stream: Transport::Tls(Box::new(stream)), unread: Bytes::new() }
    }

    /// Takes back bytes that were read from it, to be read again. It has none so far.
    pub fn unread(&mut self, early: Bytes) {
        self.unread = early;
    }

    /// What both sides have agreed to speak inside TLS (RFC 7301), if they have.
    pub fn alpn(&self) -> Option<&[u8]> {
        match &self.stream {
            Transport::Tls(tls) => tls.get_ref().1.alpn_protocol(),
            Transport::Tcp(_) | Transport::Unix(_) => None,
        }
    }

    /// Whether bytes wait to be read, of whatever layer: `false` at their end. Takes none of them.
    pub fn poll_has_data(&self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if !self.unread.is_empty() {
            return Poll::Ready(Ok(true));
        }
        let mut scratch = [0; 1];
        match &self.stream {
            Transport::Tcp(tcp) => tcp.poll_peek(cx, &mut ReadBuf::new(&mut scratch)),
            Transport::Tls(tls) => tls.get_ref().0.poll_peek(cx, &mut ReadBuf::new(&mut scratch)),
            // tokio can not peek here; only upstream servers are reached by Unix sockets.
            Transport::Unix(_) => return Poll::Pending,
        }
        .map_ok(|bytes| bytes > 0)
    }

    /// Ready when there may be something to read: bytes, or their end. Makes no system call.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.unread.is_empty() {
            return Poll::Ready(());
        }
        match &self.stream {
            Transport::Tcp(tcp) => tcp.poll_read_ready(cx),
            Transport::Unix(unix) => unix.poll_read_ready(cx),
            // What has been taken off the socket already is not announced again.
            Transport::Tls(tls) if !tls.get_ref().1.wants_read() => return Poll::Ready(()),
            Transport::Tls(tls) => tls.get_ref().0.poll_read_ready(cx),
        }
        .map(drop)
    }

    /// Whether the other side has closed the connection, whatever it has sent before.
    pub fn is_closed_by_peer(&self) -> bool {
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut polled = [match &self.stream {
            Transport::Tcp(tcp) => PollFd::new(tcp, PollFlags::RDHUP),
            Transport::Unix(unix) => PollFd::new(unix, PollFlags::RDHUP),
            Transport::Tls(tls) => PollFd::new(tls.get_ref().0, PollFlags::RDHUP),
        }];
        poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(ends)
    }

    /// What notices the end of a TLS connection behind bytes that nobody reads for now; `None` if it is
    /// none, or can not be watched.
    pub fn close_watcher(&self) -> Option<CloseWatcher> {
        let Transport::Tls(tls) = &self.stream else { return None };
        // A descriptor of its own: what is known of the other one decides whether it is read from.
        let watched = dup(tls.get_ref().0).ok()?;
        TcpStream::from_std(watched.into()).ok().map(CloseWatcher)
    }

    /// Once it is closed, nothing more of what waits in the kernel is sent.
    pub fn reset_on_close(&self) {
        let _ = match &self.stream {
            Transport::Tcp(tcp) => tcp.set_zero_linger(),
            Transport::Tls(tls) => tls.get_ref().0.set_zero_linger(),
            // Closing one throws away nothing that was sent, and keeps nothing that was not.
            Transport::Unix(_) => Ok(()),
        };
    }

    /// Sends what there is room for right now.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let cx = &mut Context::from_waker(Waker::noop());
        if let Poll::Ready(Ok(_)) = Pin::new(&mut *self).poll_write(cx, bytes) {
            let _ = Pin::new(self).poll_flush(cx);
        }
    }
}

/// Wakes whenever something more has come on a connection, whether or not it is read.
#[derive(Debug)]
pub struct CloseWatcher(TcpStream);

impl CloseWatcher {
    /// Ready when the other side has closed the connection.
    pub fn poll_closed(&self, wire: &IoStream, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if ready!(self.0.poll_read_ready(cx)).is_err() {
                return Poll::Ready(());
            }
            // Forgotten before it is looked, so that what comes in between is not missed.
            let _ = self.0.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            if wire.is_closed_by_peer() {
                return Poll::Ready(());
            }
        }
    }
}

impl AsyncRead for IoStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.unread.is_empty() {
            let length = self.unread.len().min(buffer.remaining());
            buffer.put_slice(&self.unread[..length]);
            self.unread.advance(length);
            if self.unread.is_empty() {
                // Its memory would last as long as the connection.
                self.unread = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        match &mut self.stream {
            Transport::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Transport::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Transport::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl Transport {
    fn poll_writev(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Transport::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Transport::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }
}

impl AsyncWrite for IoStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Transport::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Transport::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        match slices {
            [only] => self.poll_write(cx, only),
            several if total <= COPY_MAX_BYTES => {
                // An array would have to be zeroed first.
                let mut together = SmallVec::<[u8; COPY_MAX_BYTES]>::new();
                several.iter().for_each(|slice| together.extend_from_slice(slice));
                self.poll_write(cx, &together)
            }
            several => self.stream.poll_writev(cx, several),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            // What was written to a socket has left.
            Transport::Tcp(_) | Transport::Unix(_) => Poll::Ready(Ok(())),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Transport::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
