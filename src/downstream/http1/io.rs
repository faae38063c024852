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
use crate::io_stream::{Ending, Wire};
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
    stream: Wire,
    stage: Rc<ConnectionState>,
    worker: Rc<WorkerState>,
    peer: Rc<Peer>,
    /// What is sent before anything of hyper's: informational answers, or one instead of hyper's own.
    ahead: Bytes,
    replaced: bool,
    /// An answer of this file's own is under way.
    owing: bool,
    lingering: Option<Lingering>,
    shut: bool,
    at_end: bool,
    /// Bytes of a next request are known to wait, behind which nothing can be seen.
    ahead_of_turn: bool,
    /// Under TLS a client says goodbye with such bytes, before it closes the connection.
    ending: Option<Ending>,
    /// What passes is no HTTP any more.
    aside: bool,
}

impl Http1Io {
    pub fn new(stream: Wire, stage: Rc<ConnectionState>, worker: Rc<WorkerState>, peer: Rc<Peer>) -> Http1Io {
        Http1Io {
            stream,
            stage,
            worker,
            peer,
            ahead: Bytes::new(),
            replaced: false,
            owing: false,
            lingering: None,
            shut: false,
            at_end: false,
            ahead_of_turn: false,
            ending: None,
            aside: false,
        }
    }

    /// Ready when there may be something to read.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_readable(cx)
    }

    /// Takes back bytes that were read from it, to be read again.
    pub fn put_back(&mut self, early: Bytes) {
        self.stage.forget_received();
        self.stream.put_back(early);
    }

    /// Leaves everything as it is from now on.
    pub fn step_aside(&mut self) {
        self.aside = true;
    }

    /// Notices an answer that nobody above hyper gave. `true`: it is replaced, and not to be sent.
    fn replaces(&mut self, start: &[u8]) -> bool {
        if !self.stage.is_quiet() || self.replaced || self.aside {
            return false;
        }
        let status = start.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|digits| digits.parse().ok());
        if let Some(status) = status {
            let mut fault = responses::fault_of_parser(status);
            let head_bytes = || self.worker.config().compiled.config.limits.request_head;
            if fault == RequestError::HeadTooLarge && self.stage.has_long_target(head_bytes()) {
                fault = RequestError::TargetTooLong;
            }
            self.ahead = responses::written(&responses::fault(&fault));
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, &fault);
            self.replaced = true;
        }
        status.is_some()
    }

    /// Answers a head that is no request, or is late, where hyper does not. The buffer of a socket on which nothing is under
    /// way has room for the answer.
    pub fn refuse(&mut self, fault: &RequestError) {
        if self.stage.is_quiet() && !self.replaced && !self.at_end {
            request_record::record_rejected_head(&self.worker, self.peer.connection.address, fault);
            self.stream.send_at_once(&responses::written(&responses::fault(fault)));
        }
    }

    /// Answers what has just come, if that is a request that is refused as the one before.
    fn refuses_again(&mut self) -> bool {
        let mut again = self.peer.repeat_refusal.borrow_mut();
        let Some(known) = &*again else { return false };
        // The last answer of a connection says so, and hyper sees to it.
        let may_be = self.stage.repeats() && !self.stage.is_last();
        let Some(answer) = may_be.then(|| known.refuse(&self.worker)).flatten() else {
            // It would keep the configuration of its time.
            *again = None;
            return false;
        };
        self.stage.begin(Some(0));
        self.stage.moved();
        self.stage.end();
        (self.ahead, self.owing) = (answer, true);
        true
    }

    /// Sends what is left of an answer to a request that was refused again.
    fn poll_owed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_ahead(cx))?;
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.stage.flushed();
        self.owing = false;
        Poll::Ready(Ok(()))
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ahead.is_empty()
            && let Some(hints) = self.stage.interim().take()
        {
            self.ahead = hints;
        }
        while !self.ahead.is_empty() {
            let sent = Pin::new(&mut self.stream).poll_write(cx, &self.ahead);
            self.stage.sent(&sent);
            match ready!(sent)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                bytes => self.ahead.advance(bytes),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Notices a client that goes away while its answer is made; wakes the task when it does. hyper
    /// would read to find out, into a buffer that it has to allocate for that.
    fn poll_hung_up(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ahead_of_turn {
            // Behind what it has sent, its end can not be read. A request that waits is looked after now and
            // then, so that nobody holds a place who is gone.
            let gone = match &self.ending {
                Some(ending) => ending.poll_ended(&self.stream, cx).is_ready(),
                None => self.stage.waits().get() && self.stream.has_hung_up(),
            };
            return if gone { Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())) } else { Poll::Pending };
        }
        if ready!(self.stream.poll_waiting(cx))? {
            self.ahead_of_turn = true;
            self.ending = self.stream.ending();
            return if self.ending.is_some() { self.poll_hung_up(cx) } else { Poll::Pending };
        }
        self.at_end = true;
        Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
    }

    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let lingering = self.lingering.get_or_insert_with(Lingering::new);
        let mut scratch = [0; 4096];
        while !self.at_end && lingering.read < LINGER_BYTES && !lingering.is_over(cx) {
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => lingering.read += buffer.filled().len(),
                Ok(()) | Err(_) => self.at_end = true,
            }
        }
        Poll::Ready(())
    }

    /// Closes the connection at once, with whatever waits to be sent. The kernel would keep all of that for as long as the
    /// client asks for a byte of it now and then.
    pub fn abandon(self) {
        self.stream.reset_at_end();
    }
}

/// What a closing connection still reads.
struct Lingering {
    step: Pin<Box<Sleep>>,
    /// How many steps are over, and how many of them in a row were without a byte.
    steps: u32,
    quiet: u32,
    /// Bytes read, now and at the end of the last step.
    read: usize,
    before: usize,
}

impl Lingering {
    fn new() -> Lingering {
        Lingering { step: Box::pin(tokio::time::sleep(LINGER)), steps: 0, quiet: 0, read: 0, before: 0 }
    }

    /// Whether it took too long; wakes the task at the end of each step.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        while self.step.as_mut().poll(cx).is_ready() {
            self.steps += 1;
            self.quiet = if self.read == self.before { self.quiet + 1 } else { 0 };
            self.before = self.read;
            if self.read == 0 || self.quiet >= QUIET_STEPS || self.steps >= LINGER_STEPS {
                return true;
            }
            let next = self.step.deadline() + LINGER;
            self.step.as_mut().reset(next);
        }
        false
    }
}

impl AsyncRead for Http1Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.aside {
            return Pin::new(&mut this.stream).poll_read(cx, buffer);
        }
        let before = buffer.filled().len();
        loop {
            if this.owing {
                ready!(this.poll_owed(cx))?;
            }
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
            let came = buffer.filled().len() > before;
            this.at_end |= !came;
            this.ahead_of_turn = false;
            this.ending = None;
            if came {
                this.stage.receive(&buffer.filled()[before..])?;
                if this.refuses_again() {
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
        if this.replaces(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(this.poll_ahead(cx))?;
        let sent = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.stage.sent(&sent);
        sent
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if slices.first().is_some_and(|first| this.replaces(first)) {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        ready!(this.poll_ahead(cx))?;
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.stage.sent(&sent);
        sent
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_ahead(cx))?;
        ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
        if this.aside {
            return Poll::Ready(Ok(()));
        }
        if !this.stage.busy.get() {
            this.stage.flushed();
            return Poll::Ready(Ok(()));
        }
        this.stage.caught_up();
        if let Poll::Ready(gone) = this.poll_hung_up(cx) {
            return Poll::Ready(gone);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.stage.closing.set(true);
        if !this.shut {
            ready!(this.poll_ahead(cx))?;
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.shut = true;
            this.stage.depart();
        }
        if this.aside {
            return Poll::Ready(Ok(()));
        }
        ready!(this.poll_linger(cx));
        Poll::Ready(Ok(()))
    }
}
