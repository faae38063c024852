//! A tunnel on one stream of HTTP/2, behind an extended CONNECT (RFC 8441): the client's end of it.
//!
//! hyper moves what is sent in a future of its own, which it would have run as a task. Here it is polled by whoever
//! works at the stream, together with the tunnel: so it is seen when the client resets the stream, even if nobody has
//! anything to send, or the upstream takes nothing; and the end of the one is the end of the other. What waits for the
//! client's window is a piece or two, and then the upstream is not read any more.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Request;
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::gateway::hall::Peer;
use crate::gateway::passage::Passage;
use crate::http::upgrade;

/// What hyper does to send what the tunnel brings.
pub type Sending = Pin<Box<dyn Future<Output = ()>>>;

/// Takes note of what a CONNECT asks for; `None` if it names no protocol, and so can not be granted.
pub fn asked(request: &mut Request<Incoming>) -> Option<OnUpgrade> {
    let protocol = request.extensions_mut().remove::<Protocol>()?;
    let granted = hyper::upgrade::on(&mut *request);
    upgrade::extend(request, protocol.as_str());
    Some(granted)
}

/// A tunnel, to its end. Dropped before, it resets the stream.
pub struct Strand {
    /// `None` once everything has been sent, or the client has reset the stream.
    sending: Option<Sending>,
    /// Tells whether the tunnel ended in order; `None` once it has.
    passing: Option<Pin<Box<dyn Future<Output = bool>>>>,
    /// There is nothing more to send.
    is_shut: Rc<Cell<bool>>,
    peer: Rc<Peer>,
}

impl Strand {
    pub fn new(sending: Sending, granted: OnUpgrade, passage: Passage, peer: &Rc<Peer>) -> Strand {
        let (is_shut, peer) = (Rc::<Cell<bool>>::default(), Rc::clone(peer));
        let passing = {
            let (is_shut, peer) = (Rc::clone(&is_shut), Rc::clone(&peer));
            async move {
                // hyper has kept its promise by now.
                let Ok(stream) = granted.await else { return false };
                passage.open(Client { stream: TokioIo::new(stream), is_shut }, Bytes::new(), &peer.timer).await
            }
        };
        Strand { sending: Some(sending), passing: Some(Box::pin(passing)), is_shut, peer }
    }

    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_sending(cx);
        let Some(passing) = &mut self.passing else { return self.poll_rest(cx) };
        if self.sending.is_none() && !self.is_shut.get() {
            // The client has reset the stream, or its connection is gone. The tunnel would not find out while the upstream
            // takes nothing, since nothing is read from the client then; and some codes of a reset look like an ordinary end.
            return Poll::Ready(());
        }
        match passing.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(false) => Poll::Ready(()),
            Poll::Ready(true) => {
                self.passing = None;
                self.peer.timer.arm(self.peer.body_limit.get());
                self.poll_sending(cx);
                self.poll_rest(cx)
            }
        }
    }

    fn poll_sending(&mut self, cx: &mut Context<'_>) {
        if let Some(sending) = &mut self.sending
            && sending.as_mut().poll(cx).is_ready()
        {
            self.sending = None;
        }
    }

    /// The tunnel is over, and its last bytes may still wait for the client's window.
    fn poll_rest(&self, cx: &Context<'_>) -> Poll<()> {
        if self.sending.is_none() || self.peer.timer.poll_up(cx) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Strand {
    /// In this order: without the tunnel, hyper would take the stream for one that has ended well.
    fn drop(&mut self) {
        self.sending = None;
        self.passing = None;
    }
}

/// The stream, as bytes.
struct Client {
    stream: TokioIo<Upgraded>,
    is_shut: Rc<Cell<bool>>,
}

impl AsyncRead for Client {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Client {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.is_shut.set(true);
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}
