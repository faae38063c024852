//! `IoStream`: a byte stream to a client or server over TCP, a Unix socket or TLS, which writes in the cheapest way.
//!
//! A head and a small body arrive as two slices. Copying a few hundred bytes and writing one slice costs less than a vectored
//! write; for large bodies the opposite holds. Under TLS, one slice is one record.

use std::future::poll_fn;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use rustix::process::{Resource, getrlimit};
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

use transom_runtime::metrics::events::ByteCounters;

/// Slices of up to this many bytes together are copied into one.
const COPY_MAX_BYTES: usize = 2048;

/// A connected stream, with bytes that were put back to be read again.
#[derive(Debug)]
pub struct IoStream {
    stream: Transport,
    /// Bytes that `poll_read` returns first.
    unread: Bytes,
    /// Counts the bytes of clients; `None` for upstream servers.
    counters: Option<Rc<ByteCounters>>,
}

#[derive(Debug)]
enum Transport {
    Clear(StreamSocket),
    Tls(Box<TlsStream<StreamSocket>>),
}

/// A connected socket.
#[derive(Debug)]
pub enum StreamSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl StreamSocket {
    /// Sends without waiting for the acknowledgement of what was sent before (Nagle's algorithm). Unix sockets always do.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            StreamSocket::Tcp(tcp) => tcp.set_nodelay(true),
            StreamSocket::Unix(_) => Ok(()),
        }
    }

    /// Copies received bytes, which stay there to be read. Ready with 0 at the end of the stream.
    fn poll_peek(&self, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        let unix = match self {
            StreamSocket::Tcp(tcp) => return tcp.poll_peek(cx, &mut ReadBuf::new(bytes)),
            StreamSocket::Unix(unix) => unix,
        };
        loop {
            ready!(unix.poll_read_ready(cx))?;
            let peeked = unix.try_io(Interest::READABLE, || Ok(recv(unix, &mut *bytes, RecvFlags::PEEK)?.0));
            if !peeked.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
                return Poll::Ready(peeked);
            }
        }
    }

    /// As [`TcpStream::peek`].
    pub async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        poll_fn(|cx| self.poll_peek(cx, bytes)).await
    }
}

impl AsFd for StreamSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            StreamSocket::Tcp(tcp) => tcp.as_fd(),
            StreamSocket::Unix(unix) => unix.as_fd(),
        }
    }
}

impl AsyncRead for StreamSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            StreamSocket::Tcp(tcp) => Pin::new(tcp).poll_read(cx, buffer),
            StreamSocket::Unix(unix) => Pin::new(unix).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for StreamSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            StreamSocket::Tcp(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            StreamSocket::Unix(unix) => Pin::new(unix).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            StreamSocket::Tcp(tcp) => Pin::new(tcp).poll_write_vectored(cx, slices),
            StreamSocket::Unix(unix) => Pin::new(unix).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Sockets have no write buffer in this process.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            StreamSocket::Tcp(tcp) => Pin::new(tcp).poll_shutdown(cx),
            StreamSocket::Unix(unix) => Pin::new(unix).poll_shutdown(cx),
        }
    }
}

/// The number of descriptors that the process may open.
pub fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

impl IoStream {
    pub fn tcp(stream: TcpStream) -> IoStream {
        IoStream::clear(StreamSocket::Tcp(stream))
    }

    pub fn unix(stream: UnixStream) -> IoStream {
        IoStream::clear(StreamSocket::Unix(stream))
    }

    /// A stream without TLS.
    pub fn clear(socket: StreamSocket) -> IoStream {
        IoStream::new(Transport::Clear(socket))
    }

    pub fn tls(stream: TlsStream<StreamSocket>) -> IoStream {
        IoStream::new(Transport::Tls(Box::new(stream)))
    }

    fn new(stream: Transport) -> IoStream {
        IoStream { stream, unread: Bytes::new(), counters: None }
    }

    /// Counts the bytes that are read and written from now on.
    pub fn counted(self, counters: &Rc<ByteCounters>) -> IoStream {
        IoStream { counters: Some(Rc::clone(counters)), ..self }
    }

    fn count_sent(&self, sent: &Poll<io::Result<usize>>) {
        if let (Some(counters), Poll::Ready(Ok(bytes))) = (&self.counters, sent) {
            counters.sent(*bytes);
        }
    }

    /// Puts back bytes that were read, to be read again. There must be none put back already.
    pub fn unread(&mut self, early: Bytes) {
        self.unread = early;
    }

    /// The protocol negotiated by ALPN (RFC 7301), if any.
    pub fn alpn(&self) -> Option<&[u8]> {
        match &self.stream {
            Transport::Tls(tls) => tls.get_ref().1.alpn_protocol(),
            Transport::Clear(_) => None,
        }
    }

    fn socket(&self) -> &StreamSocket {
        match &self.stream {
            Transport::Clear(socket) => socket,
            Transport::Tls(tls) => tls.get_ref().0,
        }
    }

    /// Ready with `true` once bytes can be read (under TLS: encrypted ones), with `false` at the end of the stream. Consumes
    /// nothing.
    pub fn poll_has_data(&self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if !self.unread.is_empty() {
            return Poll::Ready(Ok(true));
        }
        self.socket().poll_peek(cx, &mut [0; 1]).map_ok(|bytes| bytes > 0)
    }

    /// Ready when bytes, or the end of the stream, can probably be read; always under TLS, which may hold bytes, or an error, that
    /// the socket does not announce. Makes no system call.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.unread.is_empty() {
            return Poll::Ready(());
        }
        match &self.stream {
            Transport::Clear(StreamSocket::Tcp(tcp)) => tcp.poll_read_ready(cx),
            Transport::Clear(StreamSocket::Unix(unix)) => unix.poll_read_ready(cx),
            Transport::Tls(_) => return Poll::Ready(()),
        }
        .map(drop)
    }

    /// Whether the peer has closed the connection, even if unread bytes precede the end.
    pub fn is_closed_by_peer(&self) -> bool {
        let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut polled = [PollFd::new(self.socket(), PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(closed)
    }

    /// Makes closing the stream discard bytes that wait in the kernel to be sent.
    pub fn reset_on_close(&self) {
        // Closing a Unix socket leaves nothing unsent in the kernel.
        if let StreamSocket::Tcp(tcp) = self.socket() {
            let _ = tcp.set_zero_linger();
        }
    }

    /// Reads and discards what the socket has, up to about `most` bytes, without waiting.
    pub fn try_discard(&mut self, most: usize) {
        let cx = &mut Context::from_waker(Waker::noop());
        let (mut scratch, mut discarded) = ([0; 4096], 0);
        while discarded < most {
            let mut buffer = ReadBuf::new(&mut scratch);
            match Pin::new(&mut *self).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => discarded += buffer.filled().len(),
                Poll::Ready(_) | Poll::Pending => return,
            }
        }
    }

    /// Writes what the socket takes without waiting; drops the rest and any error.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let cx = &mut Context::from_waker(Waker::noop());
        if let Poll::Ready(Ok(_)) = Pin::new(&mut *self).poll_write(cx, bytes) {
            let _ = Pin::new(self).poll_flush(cx);
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
                // Free the memory; the connection may last long.
                self.unread = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = match &mut self.stream {
            Transport::Clear(stream) => Pin::new(stream).poll_read(cx, buffer),
            Transport::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
        self.counters.iter().for_each(|counters| counters.received(buffer.filled().len() - before));
        read
    }
}

impl Transport {
    fn poll_writev(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Transport::Clear(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }
}

impl AsyncWrite for IoStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = match &mut self.stream {
            Transport::Clear(stream) => Pin::new(stream).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        };
        self.count_sent(&sent);
        sent
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
                // SmallVec, because an array would have to be zeroed first.
                let mut joined = SmallVec::<[u8; COPY_MAX_BYTES]>::new();
                several.iter().for_each(|slice| joined.extend_from_slice(slice));
                self.poll_write(cx, &joined)
            }
            several => {
                let sent = self.stream.poll_writev(cx, several);
                self.count_sent(&sent);
                sent
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Transport::Clear(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Transport::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
