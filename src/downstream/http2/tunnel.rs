//! A tunnel on one stream of HTTP/2, behind an extended CONNECT (RFC 8441): the client's end of it.
//!
//! It is seen when the client resets the stream, even if nobody has anything to send, or the upstream takes nothing; and
//! the end of the one is the end of the other. Nothing waits for the client's window here: the upstream is not read any
//! more until it opens.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::ext::Protocol;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, header};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::websocket_handshake;
use crate::proxy::peer::Peer;
use crate::proxy::websocket::TunnelSession;

/// Takes note of what a CONNECT asks for; `false` if it can not be answered, since it would have a body.
pub fn prepare_connect(request: &mut Request<RecvStream>) -> bool {
    let length = request.headers().get(header::CONTENT_LENGTH);
    if length.is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')) {
        return false;
    }
    if let Some(protocol) = request.extensions_mut().remove::<Protocol>() {
        websocket_handshake::extend(request, protocol.as_str());
    }
    true
}

/// A tunnel, to its end. Dropped before, it resets the stream.
pub struct StreamTunnel {
    send_half: Rc<SendHalf>,
    /// Tells whether the tunnel ended in order.
    session: Pin<Box<dyn Future<Output = bool>>>,
}

/// What goes to the client.
struct SendHalf {
    stream: RefCell<SendStream<Bytes>>,
    /// There is nothing more to send.
    is_finished: Cell<bool>,
}

impl SendHalf {
    fn finish(&self) -> io::Result<()> {
        if self.is_finished.replace(true) {
            return Ok(());
        }
        self.stream.borrow_mut().send_data(Bytes::new(), true).map_err(io::Error::other)
    }
}

impl StreamTunnel {
    pub fn new(
        sending: SendStream<Bytes>,
        inward: RecvStream,
        passage: TunnelSession,
        peer: &Rc<Peer>,
    ) -> StreamTunnel {
        let outward = Rc::new(SendHalf { stream: RefCell::new(sending), is_finished: Cell::default() });
        let client = StreamIo { outward: Rc::clone(&outward), receive_stream: inward, unread: Bytes::new() };
        let peer = Rc::clone(peer);
        let passing = Box::pin(async move { passage.run(client, Bytes::new(), &peer.timer).await });
        StreamTunnel { send_half: outward, session: passing }
    }

    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.send_half.is_finished.get() && self.send_half.stream.borrow_mut().poll_reset(cx).is_ready() {
            // The client has reset the stream, or its connection is gone. The tunnel would not find out while the upstream
            // takes nothing, since nothing is read from the client then; and some codes of a reset look like an ordinary end.
            return Poll::Ready(());
        }
        if ready!(self.session.as_mut().poll(cx)) {
            // One that was silent for too long ends in order as well.
            let _ = self.send_half.finish();
        }
        Poll::Ready(())
    }
}

/// The stream, as bytes.
struct StreamIo {
    outward: Rc<SendHalf>,
    receive_stream: RecvStream,
    /// What has come and was not read yet.
    unread: Bytes,
}

impl AsyncRead for StreamIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.unread.is_empty() {
            match ready!(this.receive_stream.poll_data(cx)) {
                Some(Ok(bytes)) => this.unread = bytes,
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) => {
                    let is_end = matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL));
                    return Poll::Ready(if is_end { Ok(()) } else { Err(io::Error::other(error)) });
                }
            }
        }
        let bytes = this.unread.len().min(buffer.remaining());
        buffer.put_slice(&this.unread[..bytes]);
        this.unread.advance(bytes);
        // Fails where the stream is gone, which is told elsewhere.
        let _ = this.receive_stream.flow_control().release_capacity(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut sending = self.outward.stream.borrow_mut();
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        sending.reserve_capacity(bytes.len());
        while sending.capacity() == 0 {
            match ready!(sending.poll_capacity(cx)) {
                Some(capacity) => capacity.map_err(io::Error::other)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        let bytes = &bytes[..bytes.len().min(sending.capacity())];
        sending.send_data(Bytes::copy_from_slice(bytes), false).map_err(io::Error::other)?;
        Poll::Ready(Ok(bytes.len()))
    }

    /// What was sent leaves with the connection.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.outward.finish())
    }
}
