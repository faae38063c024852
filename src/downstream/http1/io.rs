//! Stands between hyper and a client's socket, for what hyper does not do.
//!
//! A request that is refused as the one before, and the same to the byte, is answered here, and hyper never sees it.
//! When hyper can not read a request's head it answers by itself, with an empty body; here that becomes a problem
//! document. A head that takes too long is answered too. And a connection that is closed while the client still sends is
//! not reset under the answer: what comes is read and thrown away for a moment, as RFC 9112, section 9.6 advises.

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

/// How much, and for how long, a closing connection still reads: with bytes unread it is reset, and a client that has not
/// read its answer yet never does.
pub const LINGER_BYTES: usize = 64 * 1024 * 1024;
pub const LINGER: Duration = Duration::from_secs(1);
/// Many a client reads no answer before it has sent everything. So whoever is sending may take longer, in steps of
/// `LINGER`, but is not waited for longer than a few of them without a byte.
const LINGER_STEPS: u32 = 30;
const QUIET_STEPS: u32 = 5;

pub struct Http1Io {
    stream: IoStream,
    state: Rc<ConnectionState>,
    worker: Rc<WorkerState>,
    peer: Rc<Peer>,
    /// What is sent before anything of hyper's: informational answers, or one instead of hyper's own.
    queued: Bytes,
    has_replaced_response: bool,
    /// An answer of this file's own is under way.
    is_sending_refusal: bool,
    lingering: Option<LingerState>,
    is_shut_down: bool,
    is_read_closed: bool,
    /// Bytes of a next request are known to wait, behind which nothing can be seen.
    has_pipelined_bytes: bool,
    /// Under TLS a client says goodbye with such bytes, before it closes the connection.
    close_watcher: Option<CloseWatcher>,
    /// What passes is no HTTP any more.
    is_passthrough: bool,
}

impl Http1Io {
    pub fn new(stream: IoStream, stage: Rc<ConnectionState>, worker: Rc<WorkerState>, peer: Rc<Peer>) -> Http1Io {
        Http1Io {
            stream,
            state: stage,
            worker,
            peer,
            queued: Bytes::new(),
            has_replaced_response: false,
            is_sending_refusal: false,
            lingering: None,
            is_shut_down: false,
            is_read_closed: false,
            has_pipelined_bytes: false,
            close_watcher: None,
            is_passthrough: false,
        }
    }

    /// Ready when there may be something to read.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_readable(cx)
    }

    /// Takes back bytes that were read from it, to be read again.
    pub fn unread(&mut self, early: Bytes) {
        self.state.forget_received();
        self.stream.unread(early);
    }

    /// Leaves everything as it is from now on.
    pub fn pass_through(&mut self) {
        self.is_passthrough = true;
    }

    /// Notices an answer that nobody above hyper gave. `true`: it is replaced, and not to be sent.
    fn replace_parser_response(&mut self, start: &[u8]) -> bool {
        if !self.state.has_no_pending_response() || self.has_replaced_response || self.is_passthrough {
            return false;
        }
        let status = start.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|digits| digits.parse().ok());
        if let Some(status) = status {
            let mut fault = responses::fault_of_parser(status);
            let head_bytes = || self.worker.config().compiled.config.limits.request_head;
            if fault == RequestError::HeadTooLarge && self.state.has_long_target(head_bytes()) {
                fault = RequestError::TargetTooLong;
            }
            self.queued = responses::written(&responses::fault(&fault));
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, &fault);
            self.has_replaced_response = true;
        }
        status.is_some()
    }

    /// Answers a head that is no request, or is late, where hyper does not. The buffer of a socket on which nothing is under
    /// way has room for the answer.
    pub fn send_error(&mut self, fault: &RequestError) {
        if self.state.has_no_pending_response() && !self.has_replaced_response && !self.is_read_closed {
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, fault);
            self.stream.try_send(&responses::written(&responses::fault(fault)));
        }
    }

    /// Answers what has just come, if that is a request that is refused as the one before.
    fn refuse_repeated(&mut self) -> bool {
        let mut again = self.peer.repeat_refusal.borrow_mut();
        let Some(known) = &*again else { return false };
        // The last answer of a connection says so, and hyper sees to it.
        let may_be = self.state.repeats_previous() && !self.state.is_last();
        let Some(answer) = may_be.then(|| known.refuse(&self.worker)).flatten() else {
            // It would keep the configuration of its time.
            *again = None;
            return false;
        };
        self.state.begin_request(Some(0));
        self.state.record_progress();
        self.state.finish_response();
        (self.queued, self.is_sending_refusal) = (answer, true);
        true
    }

    /// Sends what is left of an answer to a request that was refused again.
    fn poll_send_refusal(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send_queued(cx))?;
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.state.response_flushed();
        self.is_sending_refusal = false;
        Poll::Ready(Ok(()))
    }

    fn poll_send_queued(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.queued.is_empty()
            && let Some(hints) = self.state.informational().take()
        {
            self.queued = hints;
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

    /// Notices a client that goes away while its answer is made; wakes the task when it does. hyper
    /// would read to find out, into a buffer that it has to allocate for that.
    fn poll_client_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_pipelined_bytes {
            // Behind what it has sent, its end can not be read. A request that waits is looked after now and
            // then, so that nobody holds a place who is gone.
            let gone = match &self.close_watcher {
                Some(ending) => ending.poll_closed(&self.stream, cx).is_ready(),
                None => self.state.is_delayed().get() && self.stream.is_closed_by_peer(),
            };
            return if gone { Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())) } else { Poll::Pending };
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

    /// Closes the connection at once, with whatever waits to be sent. The kernel would keep all of that for as long as the
    /// client asks for a byte of it now and then.
    pub fn reset(self) {
        self.stream.reset_on_close();
    }
}

/// What a closing connection still reads.
struct LingerState {
    timer: Pin<Box<Sleep>>,
    /// How many steps are over, and how many of them in a row were without a byte.
    steps: u32,
    quiet_steps: u32,
    /// Bytes read, now and at the end of the last step.
    read: usize,
    read_before: usize,
}

impl LingerState {
    fn new() -> LingerState {
        LingerState { timer: Box::pin(tokio::time::sleep(LINGER)), steps: 0, quiet_steps: 0, read: 0, read_before: 0 }
    }

    /// Whether it took too long; wakes the task at the end of each step.
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
        loop {
            if this.is_sending_refusal {
                ready!(this.poll_send_refusal(cx))?;
            }
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
            let came = buffer.filled().len() > before;
            this.is_read_closed |= !came;
            this.has_pipelined_bytes = false;
            this.close_watcher = None;
            if came {
                this.state.receive(&buffer.filled()[before..])?;
                if this.refuse_repeated() {
                    buffer.set_filled(before);
                    continue;
                }
            }
            return Poll::Ready(read);
        }
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
        if let Poll::Ready(gone) = this.poll_client_closed(cx) {
            return Poll::Ready(gone);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.state.closing.set(true);
        if !this.is_shut_down {
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
