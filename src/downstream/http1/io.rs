//! `Http1Io`: the stream between hyper and a client's socket, for what hyper does not do.
//!
//! - hyper's empty response to a head that it cannot parse becomes a problem document, and a head that times out gets a
//!   response too.
//! - Informational responses are written before other bytes.
//! - A connection that closes while the client still sends is not reset: received bytes are read and discarded for a moment,
//!   as RFC 9112, section 9.6 advises.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::downstream::http1::connection_state::ConnectionState;
use crate::http::error::RequestError;
use crate::http::responses;
use crate::io_stream::{CloseWatcher, IoStream};
use crate::proxy::peer::Peer;
use crate::proxy::request_record;
use crate::proxy::worker_state::WorkerState;

/// Limits on what a closing connection still reads. Closing with unread bytes resets the connection, and a client that has
/// not read its response yet loses it.
pub const LINGER_BYTES: usize = 64 * 1024 * 1024;
pub const LINGER: Duration = Duration::from_secs(1);
/// Many clients read a response only after they have sent the whole request. So lingering continues in steps of `LINGER`
/// while bytes arrive, and ends after `QUIET_STEPS` without one.
const LINGER_STEPS: u32 = 30;
const QUIET_STEPS: u32 = 5;

/// A client's stream, as hyper sees it.
pub struct Http1Io {
    stream: IoStream,
    state: Rc<ConnectionState>,
    worker: Rc<WorkerState>,
    peer: Rc<Peer>,
    /// Written before hyper's bytes: informational responses, or a response of this file.
    queued: Bytes,
    /// The response to an unusable head was made by this file, and recorded.
    has_rejected_head: bool,
    lingering: Option<LingerState>,
    is_shut_down: bool,
    is_read_closed: bool,
    /// Bytes of a next request wait unread, so that the end of the stream behind them cannot be read.
    has_pipelined_bytes: bool,
    /// Under TLS these may be the close_notify alert that precedes the end of the connection.
    close_watcher: Option<CloseWatcher>,
    /// The connection is a tunnel: bytes are not HTTP any more.
    is_passthrough: bool,
}

impl Http1Io {
    pub fn new(stream: IoStream, state: Rc<ConnectionState>, worker: Rc<WorkerState>, peer: Rc<Peer>) -> Http1Io {
        Http1Io {
            stream,
            state,
            worker,
            peer,
            queued: Bytes::new(),
            has_rejected_head: false,
            lingering: None,
            is_shut_down: false,
            is_read_closed: false,
            has_pipelined_bytes: false,
            close_watcher: None,
            is_passthrough: false,
        }
    }

    /// Ready when bytes, or the end of the stream, can probably be read.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_readable(cx)
    }

    /// Puts back bytes that were read, to be read again.
    pub fn unread(&mut self, bytes: Bytes) {
        self.state.forget_received();
        self.stream.unread(bytes);
    }

    /// Passes all bytes through unchanged from now on.
    pub fn pass_through(&mut self) {
        self.is_passthrough = true;
    }

    /// Detects a response of hyper's parser, which no request in flight explains, and queues a problem document instead.
    /// `true`: hyper's response is replaced and must not be sent.
    fn replace_parser_response(&mut self, start: &[u8]) -> bool {
        if !self.state.has_no_pending_response() || self.has_rejected_head || self.is_passthrough {
            return false;
        }
        let status = start.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|digits| digits.parse().ok());
        if let Some(status) = status {
            let mut error = responses::error_of_parser_status(status);
            let head_bytes = || self.worker.config().compiled.config.limits.request_head;
            if error == RequestError::HeadTooLarge && self.state.has_long_target(head_bytes()) {
                error = RequestError::TargetTooLong;
            }
            self.queued = responses::http1_bytes(&responses::error_response(&error));
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, &error);
            self.has_rejected_head = true;
        }
        status.is_some()
    }

    /// Sends an error response for a head that is malformed or timed out, when hyper sends none. The send buffer of a socket
    /// without a response in flight can hold it.
    pub fn send_error(&mut self, error: &RequestError) {
        if self.state.has_no_pending_response() && !self.has_rejected_head && !self.is_read_closed {
            self.has_rejected_head = true;
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, error);
            self.stream.try_send(&responses::http1_bytes(&responses::error_response(error)));
        }
    }

    /// Sends `queued`, and waiting informational responses.
    fn poll_send_queued(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.queued.is_empty()
            && let Some(heads) = self.state.informational().take()
        {
            self.queued = heads;
        }
        while !self.queued.is_empty() {
            let sent = Pin::new(&mut self.stream).poll_write(cx, &self.queued);
            self.state.record_sent(&sent);
            match ready!(sent)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                bytes => self.queued.advance(bytes),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Ready with an error when the client closes the connection while its response is made; else wakes the task then. hyper
    /// would have to read to notice, into a buffer allocated for that.
    fn poll_client_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_pipelined_bytes {
            // The end of the stream cannot be read behind unread bytes. A delayed request is polled periodically, so that a
            // disconnected client does not count as a waiter.
            let is_closed = match &self.close_watcher {
                Some(watcher) => watcher.poll_closed(&self.stream, cx).is_ready(),
                None => self.state.is_delayed().get() && self.stream.is_closed_by_peer(),
            };
            return if is_closed { Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())) } else { Poll::Pending };
        }
        if ready!(self.stream.poll_has_data(cx))? {
            self.has_pipelined_bytes = true;
            self.close_watcher = self.stream.close_watcher();
            return if self.close_watcher.is_some() { self.poll_client_closed(cx) } else { Poll::Pending };
        }
        self.is_read_closed = true;
        Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
    }

    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let lingering = self.lingering.get_or_insert_with(LingerState::new);
        let mut scratch = [0; 4096];
        while !self.is_read_closed && lingering.read < LINGER_BYTES && !lingering.is_expired(cx) {
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => lingering.read += buffer.filled().len(),
                Ok(()) | Err(_) => self.is_read_closed = true,
            }
        }
        Poll::Ready(())
    }

    /// Resets the connection and discards unsent bytes. The kernel would otherwise keep them for as long as the client reads
    /// a byte now and then.
    pub fn reset(self) {
        self.stream.reset_on_close();
    }
}

impl Drop for Http1Io {
    /// Records a request whose head never became complete, however its connection has ended.
    fn drop(&mut self) {
        if self.state.is_in_head() && !self.has_rejected_head && !self.is_passthrough {
            let address = self.peer.connection.address;
            request_record::record_rejected_head(&self.worker, address, &RequestError::HeadIncomplete);
        }
    }
}

/// Progress of a closing connection that still reads.
struct LingerState {
    timer: Pin<Box<Sleep>>,
    /// Steps that are over, and how many of the last ones were without a byte.
    steps: u32,
    quiet_steps: u32,
    /// Bytes read so far, and at the end of the last step.
    read: usize,
    read_before: usize,
}

impl LingerState {
    fn new() -> LingerState {
        LingerState { timer: Box::pin(tokio::time::sleep(LINGER)), steps: 0, quiet_steps: 0, read: 0, read_before: 0 }
    }

    /// Whether lingering ends; if not, the task is woken at the end of the step.
    fn is_expired(&mut self, cx: &mut Context<'_>) -> bool {
        while self.timer.as_mut().poll(cx).is_ready() {
            self.steps += 1;
            self.quiet_steps = if self.read == self.read_before { self.quiet_steps + 1 } else { 0 };
            self.read_before = self.read;
            if self.read == 0 || self.quiet_steps >= QUIET_STEPS || self.steps >= LINGER_STEPS {
                return true;
            }
            let next = self.timer.deadline() + LINGER;
            self.timer.as_mut().reset(next);
        }
        false
    }
}

impl AsyncRead for Http1Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_passthrough {
            return Pin::new(&mut this.stream).poll_read(cx, buffer);
        }
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
        let received = &buffer.filled()[before..];
        this.is_read_closed |= received.is_empty();
        this.has_pipelined_bytes = false;
        this.close_watcher = None;
        if !received.is_empty() {
            this.state.receive(received)?;
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Http1Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.replace_parser_response(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(this.poll_send_queued(cx))?;
        let sent = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.state.record_sent(&sent);
        sent
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if slices.first().is_some_and(|first| this.replace_parser_response(first)) {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        ready!(this.poll_send_queued(cx))?;
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.state.record_sent(&sent);
        sent
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send_queued(cx))?;
        ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
        if this.is_passthrough {
            return Poll::Ready(Ok(()));
        }
        if !this.state.busy.get() {
            this.state.response_flushed();
            return Poll::Ready(Ok(()));
        }
        this.state.record_caught_up();
        if let Poll::Ready(closed) = this.poll_client_closed(cx) {
            return Poll::Ready(closed);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.state.closing.set(true);
        if !this.is_shut_down {
            if !this.is_read_closed {
                // The gateway closes: what the client sent behind the last response is no request.
                this.state.discard_partial_head();
            }
            ready!(this.poll_send_queued(cx))?;
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.is_shut_down = true;
            this.state.disarm();
        }
        if this.is_passthrough {
            return Poll::Ready(Ok(()));
        }
        ready!(this.poll_linger(cx));
        Poll::Ready(Ok(()))
    }
}
