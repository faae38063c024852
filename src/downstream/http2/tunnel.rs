//! A tunnel on one HTTP/2 stream, opened by an extended CONNECT (RFC 8441): the client's end.
//!
//! A reset by the client is noticed even if neither side sends, or the upstream reads nothing. The end of one side ends the
//! other. Data for the client is not buffered: the upstream is read only while the client's window is open.

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

use crate::proxy::peer::Peer;
use crate::proxy::websocket::TunnelSession;
use transom_http::websocket_handshake;

/// Prepares an extended CONNECT as a WebSocket handshake; `false`: it announces a body, which a CONNECT cannot have.
pub fn prepare_connect(request: &mut Request<RecvStream>) -> bool {
    let length = request.headers().get(header::CONTENT_LENGTH);
    if length.is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')) {
        return false;
    }
    if let Some(protocol) = request.extensions_mut().remove::<Protocol>() {
        websocket_handshake::convert_extended_connect(request, protocol.as_str());
    }
    true
}

/// A running tunnel. Dropping it before its end resets the stream.
pub struct StreamTunnel {
    send_half: Rc<SendHalf>,
    /// Returns whether the tunnel ended without an error.
    session: Pin<Box<dyn Future<Output = bool>>>,
}

/// The direction to the client.
struct SendHalf {
    stream: RefCell<SendStream<Bytes>>,
    /// The end of the stream was sent.
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
        stream: SendStream<Bytes>,
        receive_stream: RecvStream,
        tunnel: Box<TunnelSession>,
        peer: &Rc<Peer>,
    ) -> StreamTunnel {
        let send_half = Rc::new(SendHalf { stream: RefCell::new(stream), is_finished: Cell::default() });
        let client = StreamIo { send_half: Rc::clone(&send_half), receive_stream, unread: Bytes::new() };
        let peer = Rc::clone(peer);
        let session = Box::pin(async move { tunnel.run(client, Bytes::new(), &peer.timer).await });
        StreamTunnel { send_half, session }
    }

    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.send_half.is_finished.get() && self.send_half.stream.borrow_mut().poll_reset(cx).is_ready() {
            // The client has reset the stream or closed its connection. `session` does not notice while the upstream reads
            // nothing, because the client is not read then; and it takes some reset codes for an ordinary end.
            return Poll::Ready(());
        }
        if ready!(self.session.as_mut().poll(cx)) {
            // Also for a tunnel that ended by its idle timeout.
            let _ = self.send_half.finish();
        }
        Poll::Ready(())
    }
}

/// The stream as `AsyncRead` and `AsyncWrite`.
struct StreamIo {
    send_half: Rc<SendHalf>,
    receive_stream: RecvStream,
    /// Received bytes that were not read yet.
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
        // Fails if the stream is reset, which `poll` reports.
        let _ = this.receive_stream.flow_control().release_capacity(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut stream = self.send_half.stream.borrow_mut();
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        stream.reserve_capacity(bytes.len());
        while stream.capacity() == 0 {
            match ready!(stream.poll_capacity(cx)) {
                Some(capacity) => capacity.map_err(io::Error::other)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        let bytes = &bytes[..bytes.len().min(stream.capacity())];
        stream.send_data(Bytes::copy_from_slice(bytes), false).map_err(io::Error::other)?;
        Poll::Ready(Ok(bytes.len()))
    }

    /// h2 flushes with the connection.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send_half.finish())
    }
}
