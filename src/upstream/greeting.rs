//! The stream of an HTTP/2 connection, which tells when the server has said something.
//!
//! How many streams a server allows is in the first thing it says. hyper knows it from then on, but tells
//! nobody that it does; so whoever wants to know looks again whenever something has come.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::wire::Wire;

/// Who is woken by what comes, as long as they want to be.
#[derive(Debug, Default)]
pub struct Listener {
    waker: RefCell<Option<Waker>>,
    /// Why nothing more came: hyper only says that nothing did.
    failure: RefCell<Option<String>>,
}

impl Listener {
    pub fn wait(&self, waker: &Waker) {
        self.waker.replace(Some(waker.clone()));
    }

    pub fn leave(&self) {
        self.waker.take();
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.take()
    }

    fn hear(&self, read: &io::Result<()>) {
        // It runs when what was read has been understood: one task at a time runs on a loop.
        self.waker.borrow().iter().for_each(Waker::wake_by_ref);
        if let Err(error) = read {
            self.failure.replace(Some(error.to_string()));
        }
    }
}

pub struct Greeting {
    wire: Wire,
    listener: Rc<Listener>,
}

impl Greeting {
    pub fn new(wire: Wire, listener: Rc<Listener>) -> Greeting {
        Greeting { wire, listener }
    }
}

impl AsyncRead for Greeting {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.wire).poll_read(cx, buffer));
        self.listener.hear(&read);
        Poll::Ready(read)
    }
}

impl AsyncWrite for Greeting {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}
