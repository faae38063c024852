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
pub fn asked(request: &mut Request<RecvStream>) -> bool {
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
pub struct Strand {
    outward: Rc<Outward>,
    /// Tells whether the tunnel ended in order.
    passing: Pin<Box<dyn Future<Output = bool>>>,
}

/// What goes to the client.
struct Outward {
    sending: RefCell<SendStream<Bytes>>,
    /// There is nothing more to send.
    is_shut: Cell<bool>,
}

impl Outward {
    fn shut(&self) -> io::Result<()> {
        if self.is_shut.replace(true) {
            return Ok(());
        }
        self.sending.borrow_mut().send_data(Bytes::new(), true).map_err(io::Error::other)
    }
}

impl Strand {
    pub fn new(sending: SendStream<Bytes>, inward: RecvStream, passage: TunnelSession, peer: &Rc<Peer>) -> Strand {
        let outward = Rc::new(Outward { sending: RefCell::new(sending), is_shut: Cell::default() });
        let client = Client { outward: Rc::clone(&outward), inward, early: Bytes::new() };
        let peer = Rc::clone(peer);
        let passing = Box::pin(async move { passage.run(client, Bytes::new(), &peer.timer).await });
        Strand { outward, passing }
    }

    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.outward.is_shut.get() && self.outward.sending.borrow_mut().poll_reset(cx).is_ready() {
            // The client has reset the stream, or its connection is gone. The tunnel would not find out while the upstream
            // takes nothing, since nothing is read from the client then; and some codes of a reset look like an ordinary end.
            return Poll::Ready(());
        }
        if ready!(self.passing.as_mut().poll(cx)) {
            // One that was silent for too long ends in order as well.
            let _ = self.outward.shut();
        }
        Poll::Ready(())
    }
}

/// The stream, as bytes.
struct Client {
    outward: Rc<Outward>,
    inward: RecvStream,
    /// What has come and was not read yet.
    early: Bytes,
}

impl AsyncRead for Client {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.early.is_empty() {
            match ready!(this.inward.poll_data(cx)) {
                Some(Ok(bytes)) => this.early = bytes,
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) => {
                    let is_end = matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL));
                    return Poll::Ready(if is_end { Ok(()) } else { Err(io::Error::other(error)) });
                }
            }
        }
        let bytes = this.early.len().min(buffer.remaining());
        buffer.put_slice(&this.early[..bytes]);
        this.early.advance(bytes);
        // Fails where the stream is gone, which is told elsewhere.
        let _ = this.inward.flow_control().release_capacity(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut sending = self.outward.sending.borrow_mut();
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
        Poll::Ready(self.outward.shut())
    }
}
