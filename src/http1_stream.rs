//! `Http1Stream`: the byte stream of an HTTP/1.1 connection, to a client or to a server, with received bytes that no message
//! has taken, and bytes that wait to be sent.
//!
//! A stream that waits holds no buffer.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::Frame;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use crate::io_stream::IoStream;
use transom_http::http1_body;
use transom_http::http1_head::{Framing, SMALL_BODY_MAX_BYTES};

/// The capacity of a read of a head. Such reads go through the stack, and their bytes are copied into memory of their size.
pub const READ_HEAD_BYTES: usize = 4 * 1024;
/// The capacity of a read of a body of unknown length.
const READ_UNKNOWN_BYTES: usize = 32 * 1024;
/// The largest capacity of a read. A body takes half of the CPU time that it takes with 64 KiB; more would be held for each client
/// that reads slowly.
const READ_MAX_BYTES: usize = 128 * 1024;
/// A large buffer that is filled to less than one part in this many is replaced by one of the right size.
const SPARSE_DIVISOR: usize = 4;
/// No more frames are taken while so many bytes wait to be sent.
const OUTGOING_MAX_BYTES: usize = 16 * 1024;

/// The byte stream of a connection.
pub struct Http1Stream {
    pub io: IoStream,
    /// Received bytes that no message has taken.
    pub received: Bytes,
    pub outgoing: Outgoing,
}

impl Http1Stream {
    pub fn new(io: IoStream) -> Http1Stream {
        Http1Stream { io, received: Bytes::new(), outgoing: Outgoing::default() }
    }

    /// The capacity of a read of a body with so many bytes left; `None`: unknown.
    pub fn capacity_for(bytes_left: Option<u64>) -> usize {
        let wanted = match bytes_left {
            // One byte more, because a read that fills its buffer leaves it unknown whether more bytes wait.
            Some(bytes) => usize::try_from(bytes).unwrap_or(usize::MAX).saturating_add(1),
            None => READ_UNKNOWN_BYTES,
        };
        wanted.clamp(READ_HEAD_BYTES, READ_MAX_BYTES)
    }

    /// Receives up to `capacity` bytes; returns their number, 0 at the end of the stream.
    pub fn poll_receive(&mut self, capacity: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if capacity <= READ_HEAD_BYTES {
            let mut bytes = [const { MaybeUninit::uninit() }; READ_HEAD_BYTES];
            let mut bytes = ReadBuf::uninit(&mut bytes);
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut bytes))?;
            self.append(bytes.filled());
            return Poll::Ready(Ok(bytes.filled().len()));
        }
        // No buffer is allocated before there are bytes.
        if self.io.poll_readable(cx).is_pending() {
            self.shrink();
            return Poll::Pending;
        }
        let mut buffer = BytesMut::from(std::mem::take(&mut self.received));
        buffer.reserve(capacity);
        let polled = pin!(self.io.read_buf(&mut buffer)).poll(cx);
        let is_sparse = buffer.is_empty() || buffer.len() < capacity / SPARSE_DIVISOR;
        self.received = if is_sparse { Bytes::copy_from_slice(&buffer) } else { buffer.freeze() };
        polled
    }

    /// Releases the memory of messages that were taken, of which a short rest would hold all.
    pub fn shrink(&mut self) {
        if self.received.len() <= READ_HEAD_BYTES {
            self.received = Bytes::copy_from_slice(&self.received);
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        if self.received.is_empty() {
            self.received = Bytes::copy_from_slice(bytes);
        } else {
            let mut all = BytesMut::from(std::mem::take(&mut self.received));
            all.extend_from_slice(bytes);
            self.received = all.freeze();
        }
    }

    /// Sends all bytes that wait.
    pub fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.outgoing.poll_send(&mut self.io, cx)
    }
}

/// A body does not have the announced length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongLength;

/// Bytes that wait to be sent: `front`, then `frame`, then `back`.
#[derive(Default)]
pub struct Outgoing {
    front: Vec<u8>,
    /// Bytes of `front` that were sent.
    sent: usize,
    frame: Bytes,
    back: Vec<u8>,
}

impl Outgoing {
    pub fn is_empty(&self) -> bool {
        self.front.is_empty() && self.frame.is_empty() && self.back.is_empty()
    }

    /// The number of bytes that wait.
    pub fn len(&self) -> usize {
        self.front.len() - self.sent + self.frame.len() + self.back.len()
    }

    pub fn has_room(&self) -> bool {
        self.frame.is_empty() && self.front.len() < OUTGOING_MAX_BYTES
    }

    /// Where bytes behind all others are added.
    pub fn end_mut(&mut self) -> &mut Vec<u8> {
        if self.frame.is_empty() { &mut self.front } else { &mut self.back }
    }

    /// Adds data, as a chunk if `is_chunk`.
    fn push(&mut self, data: Bytes, is_chunk: bool) {
        if is_chunk {
            http1_body::write_chunk_size(data.len(), &mut self.front);
        }
        if data.len() <= SMALL_BODY_MAX_BYTES {
            self.front.extend_from_slice(&data);
        } else {
            self.frame = data;
        }
        if is_chunk {
            self.end_mut().extend_from_slice(b"\r\n");
        }
    }

    /// Adds a frame of a body (`None`: its end) and, if it is the last one, what ends the message. Returns whether it is the
    /// last. `head`: the fields that announce trailers; `None`: trailers are not sent. To be called only if
    /// [`Outgoing::has_room`] is true.
    pub fn push_frame(
        &mut self,
        frame: Option<Frame<Bytes>>,
        is_end_stream: bool,
        framing: &mut Framing,
        head: Option<&HeaderMap>,
    ) -> Result<bool, WrongLength> {
        let mut is_last = frame.is_none() || is_end_stream;
        let mut trailers = None;
        match frame.map(Frame::into_data) {
            Some(Ok(data)) if !data.is_empty() => {
                if let Framing::Length(left) = framing {
                    *left = left.checked_sub(data.len() as u64).ok_or(WrongLength)?;
                    is_last |= *left == 0;
                }
                self.push(data, *framing == Framing::Chunked);
            }
            Some(Err(frame)) => (trailers, is_last) = (frame.into_trailers().ok(), true),
            Some(Ok(_)) | None => {}
        }
        match framing {
            // The receiver would take the next message for the rest of this one.
            Framing::Length(1..) if is_last => return Err(WrongLength),
            Framing::Chunked if is_last => http1_body::write_last_chunk(trailers.as_ref().zip(head), self.end_mut()),
            _ => {}
        }
        Ok(is_last)
    }

    /// Sends all bytes.
    fn poll_send(&mut self, stream: &mut IoStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let front = &self.front[self.sent..];
            let stream = Pin::new(&mut *stream);
            let sent = match self.frame.is_empty() {
                true => ready!(stream.poll_write(cx, front))?,
                false => {
                    let slices = [front, &self.frame, &self.back].map(IoSlice::new);
                    ready!(stream.poll_write_vectored(cx, &slices))?
                }
            };
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(sent);
        }
        Pin::new(stream).poll_flush(cx)
    }

    /// Removes sent bytes.
    fn advance(&mut self, sent: usize) {
        self.sent += sent;
        let Some(beyond_front) = self.sent.checked_sub(self.front.len()) else { return };
        let of_frame = beyond_front.min(self.frame.len());
        self.frame.advance(of_frame);
        // The rest of the frame is sent from `frame` alone, and `back` only after it.
        (self.front, self.sent) = (Vec::new(), 0);
        if self.frame.is_empty() {
            let of_back = beyond_front - of_frame;
            self.frame = Bytes::new();
            if of_back < self.back.len() {
                (self.front, self.sent) = (std::mem::take(&mut self.back), of_back);
            }
            self.back = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Waker;

    use tokio::net::UnixStream;

    use super::*;

    /// The peer receives all bytes in order, however many the socket takes at once.
    #[tokio::test]
    async fn outgoing_bytes_are_sent_in_order() {
        for is_chunk in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (mut stream, mut peer) = (IoStream::unix(ours), IoStream::unix(theirs));
            let (mut outgoing, mut expected, mut received) = (Outgoing::default(), Vec::new(), Vec::new());
            for bytes in [1, SMALL_BODY_MAX_BYTES, SMALL_BODY_MAX_BYTES + 1, 3_000_000, 2] {
                if !outgoing.has_room() {
                    let sending = poll_fn(|cx| outgoing.poll_send(&mut stream, cx));
                    let receiving = async {
                        while received.len() < expected.len() {
                            peer.read_buf(&mut received).await.unwrap();
                        }
                    };
                    tokio::join!(async { sending.await.unwrap() }, receiving);
                    assert!(outgoing.is_empty());
                }
                let data: Bytes = (0..bytes).map(|at| (at % 251) as u8).collect();
                if is_chunk {
                    expected.extend_from_slice(format!("{bytes:x}\r\n").as_bytes());
                }
                expected.extend_from_slice(&data);
                if is_chunk {
                    expected.extend_from_slice(b"\r\n");
                }
                outgoing.push(data, is_chunk);
            }
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(outgoing.poll_send(&mut stream, cx).is_ready() && outgoing.is_empty());
            while received.len() < expected.len() {
                peer.read_buf(&mut received).await.unwrap();
            }
            assert!(received == expected);
        }
    }

    #[test]
    fn a_write_may_end_anywhere() {
        for sent in 0..=9 {
            let mut outgoing = Outgoing { front: b"abc".into(), sent: 0, frame: "def".into(), back: b"ghi".into() };
            outgoing.advance(sent);
            let rest = [&outgoing.front[outgoing.sent..], &outgoing.frame, &outgoing.back].concat();
            assert_eq!((rest.as_slice(), outgoing.is_empty()), (&b"abcdefghi"[sent..], sent == 9), "{sent}");
        }
    }
}
