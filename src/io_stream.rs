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
pub struct Wire {
    stream: Stream,
    /// What was read before, to find out what is spoken here.
    early: Bytes,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// How many descriptors the process may have.
pub fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

impl Wire {
    pub fn tcp(stream: TcpStream) -> Wire {
        Wire { stream: Stream::Tcp(stream), early: Bytes::new() }
    }

    pub fn unix(stream: UnixStream) -> Wire {
        Wire { stream: Stream::Unix(stream), early: Bytes::new() }
    }

    pub fn tls(stream: TlsStream<TcpStream>) -> Wire {
        Wire { stream: Stream::Tls(Box::new(stream)), early: Bytes::new() }
    }

    /// Takes back bytes that were read from it, to be read again. It has none so far.
    pub fn put_back(&mut self, early: Bytes) {
        self.early = early;
    }

    /// What both sides have agreed to speak inside TLS (RFC 7301), if they have.
    pub fn alpn(&self) -> Option<&[u8]> {
        match &self.stream {
            Stream::Tls(tls) => tls.get_ref().1.alpn_protocol(),
            Stream::Tcp(_) | Stream::Unix(_) => None,
        }
    }

    /// Whether bytes wait to be read, of whatever layer: `false` at their end. Takes none of them.
    pub fn poll_waiting(&self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if !self.early.is_empty() {
            return Poll::Ready(Ok(true));
        }
        let mut scratch = [0; 1];
        match &self.stream {
            Stream::Tcp(tcp) => tcp.poll_peek(cx, &mut ReadBuf::new(&mut scratch)),
            Stream::Tls(tls) => tls.get_ref().0.poll_peek(cx, &mut ReadBuf::new(&mut scratch)),
            // tokio can not peek here; only upstream servers are reached by Unix sockets.
            Stream::Unix(_) => return Poll::Pending,
        }
        .map_ok(|bytes| bytes > 0)
    }

    /// Ready when there may be something to read: bytes, or their end. Makes no system call.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.early.is_empty() {
            return Poll::Ready(());
        }
        match &self.stream {
            Stream::Tcp(tcp) => tcp.poll_read_ready(cx),
            Stream::Unix(unix) => unix.poll_read_ready(cx),
            // What has been taken off the socket already is not announced again.
            Stream::Tls(tls) if !tls.get_ref().1.wants_read() => return Poll::Ready(()),
            Stream::Tls(tls) => tls.get_ref().0.poll_read_ready(cx),
        }
        .map(drop)
    }

    /// Whether the other side has closed the connection, whatever it has sent before.
    pub fn has_hung_up(&self) -> bool {
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut polled = [match &self.stream {
            Stream::Tcp(tcp) => PollFd::new(tcp, PollFlags::RDHUP),
            Stream::Unix(unix) => PollFd::new(unix, PollFlags::RDHUP),
            Stream::Tls(tls) => PollFd::new(tls.get_ref().0, PollFlags::RDHUP),
        }];
        poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(ends)
    }

    /// What notices the end of a TLS connection behind bytes that nobody reads for now; `None` if it is
    /// none, or can not be watched.
    pub fn ending(&self) -> Option<Ending> {
        let Stream::Tls(tls) = &self.stream else { return None };
        // A descriptor of its own: what is known of the other one decides whether it is read from.
        let watched = dup(tls.get_ref().0).ok()?;
        TcpStream::from_std(watched.into()).ok().map(Ending)
    }

    /// Once it is closed, nothing more of what waits in the kernel is sent.
    pub fn reset_at_end(&self) {
        let _ = match &self.stream {
            Stream::Tcp(tcp) => tcp.set_zero_linger(),
            Stream::Tls(tls) => tls.get_ref().0.set_zero_linger(),
            // Closing one throws away nothing that was sent, and keeps nothing that was not.
            Stream::Unix(_) => Ok(()),
        };
    }

    /// Sends what there is room for right now.
    pub fn send_at_once(&mut self, bytes: &[u8]) {
        let cx = &mut Context::from_waker(Waker::noop());
        if let Poll::Ready(Ok(_)) = Pin::new(&mut *self).poll_write(cx, bytes) {
            let _ = Pin::new(self).poll_flush(cx);
        }
    }
}

/// Wakes whenever something more has come on a connection, whether or not it is read.
#[derive(Debug)]
pub struct Ending(TcpStream);

impl Ending {
    /// Ready when the other side has closed the connection.
    pub fn poll_ended(&self, wire: &Wire, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if ready!(self.0.poll_read_ready(cx)).is_err() {
                return Poll::Ready(());
            }
            // Forgotten before it is looked, so that what comes in between is not missed.
            let _ = self.0.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            if wire.has_hung_up() {
                return Poll::Ready(());
            }
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.early.is_empty() {
            let length = self.early.len().min(buffer.remaining());
            buffer.put_slice(&self.early[..length]);
            self.early.advance(length);
            if self.early.is_empty() {
                // Its memory would last as long as the connection.
                self.early = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl Stream {
    fn poll_gather(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Stream::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
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
            several => self.stream.poll_gather(cx, several),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            // What was written to a socket has left.
            Stream::Tcp(_) | Stream::Unix(_) => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
