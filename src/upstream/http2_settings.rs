//! The stream of an HTTP/2 connection, which tells when the server has said something.
//!
//! How many streams a server allows is in the first thing it says, and may change. hyper knows it from then on, but tells
//! nobody that it does; so whoever waits for a stream looks again whenever something has come.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::io_stream::IoStream;

/// Wakes those who wait for what the server says.
#[derive(Debug, Default)]
pub struct Listener {
    heard: Notify,
    /// Why nothing more comes: hyper only says that nothing does.
    failure: RefCell<Option<String>>,
}

impl Listener {
    /// Ready when something has come since this was called, or nothing more will.
    pub fn heard(&self) -> Notified<'_> {
        self.heard.notified()
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// The connection has ended.
    pub fn ended(&self, why: impl FnOnce() -> String) {
        self.failure.borrow_mut().get_or_insert_with(why);
        self.heard.notify_waiters();
    }

    fn hear(&self, read: &io::Result<()>) {
        // They run when what was read has been understood: one task at a time runs on a loop.
        self.heard.notify_waiters();
        if let Err(error) = read {
            self.failure.replace(Some(error.to_string()));
        }
    }
}

pub struct Greeting {
    wire: IoStream,
    listener: Rc<Listener>,
}

impl Greeting {
    pub fn new(wire: IoStream, listener: Rc<Listener>) -> Greeting {
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
