//! One HTTP/2 connection below h2: the frames that pass, how the client behaves, and what the
//! connection waits for.
//!
//! h2 has no idle timeout, none for a header block that does not end, and none for a client that does
//! not read; and it answers PING and SETTINGS for ever. All of that is seen here, from the heads of the
//! frames alone. This file knows nothing of requests: `stream` does.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::conduct::{Abuse, Budget, Conduct};
use super::frames::{Frame, Frames};
use super::guard::LINGER;
use crate::timer::{Timer, Timers};
use crate::wire::Wire;

/// How long the last frames may take once a connection that ends has nothing left to answer. A client says that it has
/// heard of the end, so that nothing which it sent before is lost; only one that does not is waited for so long.
const PARTING: Duration = Duration::from_secs(5);

/// RFC 9113, section 7.
const ENHANCE_YOUR_CALM: u32 = 0xb;

/// How long things may take on a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Until the first frame, and then for each header block.
    pub head: Duration,
    /// Without a request.
    pub idle: Duration,
    /// Without a byte sent, while there are some to send.
    pub body: Duration,
    /// Bytes of answers that a client has to take in each `body`, once these are all that is left to do.
    pub least: u64,
}

/// What a connection is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waiting for the preface and the first frame.
    Opening,
    /// A header block has begun.
    Head,
    /// Nothing is asked.
    Idle,
    /// Answers are made, or sent; each stream has limits of its own.
    Busy,
    /// All that is left to do is to send what h2 holds, and the client does not let it.
    Sending,
    /// Told to end, with nothing left to answer.
    Parting,
}

/// What is to be done about a connection that took too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Late {
    /// The client is told that no more requests are taken.
    Leave,
    /// The connection is closed; the client was in the middle of a head, or not.
    Close { in_head: bool },
}

/// What h2's two sides know together.
#[derive(Debug)]
pub struct Session {
    timers: Rc<Timers>,
    limits: Limits,
    conduct: RefCell<Conduct>,
    abuse: Cell<Option<Abuse>>,
    /// h2 has told the client of an error of the connection.
    is_broken: Cell<bool>,
    /// Somebody works at so many streams.
    attended: Cell<usize>,
    /// So many of them are tunnels, on which the client may still send when its answer has ended.
    tunnels: Cell<usize>,
    is_leaving: Cell<bool>,
    phase: Cell<Phase>,
    timer: Rc<Timer>,
    /// The tick at which the client was last heard.
    heard: Cell<u64>,
    /// Armed while bytes wait to be sent.
    stall: Rc<Timer>,
    is_stalled: Cell<bool>,
    /// They have waited for too long.
    is_given_up: Cell<bool>,
    /// Bytes of answers that were sent since the phase began, or this was last looked at.
    taken: Cell<u64>,
}

impl Session {
    pub fn new(timers: &Rc<Timers>, limits: Limits, budget: Budget) -> Rc<Session> {
        let timer = timers.timer();
        timer.arm(limits.head);
        Rc::new(Session {
            conduct: RefCell::new(Conduct::new(budget, timers.tick())),
            limits,
            abuse: Cell::default(),
            is_broken: Cell::default(),
            attended: Cell::default(),
            tunnels: Cell::default(),
            is_leaving: Cell::default(),
            phase: Cell::new(Phase::Opening),
            timer,
            heard: Cell::new(timers.tick()),
            stall: timers.timer(),
            is_stalled: Cell::default(),
            is_given_up: Cell::default(),
            taken: Cell::default(),
            timers: Rc::clone(timers),
        })
    }

    /// Somebody begins to work at a stream.
    pub fn attend(&self) {
        self.attended.set(self.attended.get() + 1);
        self.look(false);
    }

    /// Somebody has done all there was to do for a stream.
    pub fn leave(&self) {
        self.attended.set(self.attended.get() - 1);
        self.look(false);
    }

    /// A stream that somebody works at has become a tunnel.
    pub fn tunnel_opened(&self) {
        self.tunnels.set(self.tunnels.get() + 1);
        self.look(false);
    }

    /// It is none any more.
    pub fn tunnel_ended(&self) {
        self.tunnels.set(self.tunnels.get() - 1);
    }

    /// The client has been told that the connection ends.
    pub fn is_ending(&self) {
        self.is_leaving.set(true);
        self.look(false);
    }

    /// What the client did too often, if it did.
    pub fn abuse(&self) -> Option<Abuse> {
        self.abuse.get()
    }

    /// Whether h2 gave up on what it read.
    pub fn is_broken(&self) -> bool {
        self.is_broken.get()
    }

    /// Whether something took too long; wakes the task when it does.
    pub fn poll_late(&self, cx: &Context<'_>) -> Option<Late> {
        if self.stall.poll_up(cx) {
            self.is_given_up.set(true);
            return Some(Late::Close { in_head: false });
        }
        if !self.timer.poll_up(cx) {
            return None;
        }
        Some(match self.phase.get() {
            Phase::Idle => Late::Leave,
            phase => Late::Close { in_head: phase == Phase::Head },
        })
    }

    /// Finds out what the connection is at, and how long that may take. `moved`: bytes were sent.
    fn look(&self, moved: bool) {
        let conduct = self.conduct.borrow();
        let phase = match () {
            () if !conduct.has_opened() && !self.is_leaving.get() => Phase::Opening,
            () if conduct.is_in_head() => Phase::Head,
            () if conduct.is_busy() && self.attended.get() > 0 || self.tunnels.get() > 0 => Phase::Busy,
            () if conduct.is_busy() => Phase::Sending,
            () if self.is_leaving.get() => Phase::Parting,
            () => Phase::Idle,
        };
        // Other frames than those of answers, such as what a PING is answered with, get nobody further.
        let goes_on = moved && phase == Phase::Sending && self.taken.get() >= self.limits.least.max(1);
        if self.phase.replace(phase) == phase && !goes_on {
            return;
        }
        self.taken.set(0);
        match phase {
            Phase::Opening | Phase::Head => self.timer.arm(self.limits.head),
            Phase::Idle => self.timer.arm(self.limits.idle),
            Phase::Busy => self.timer.disarm(),
            Phase::Sending => self.timer.arm(self.limits.body),
            Phase::Parting => self.timer.arm(PARTING),
        }
    }

    /// How long the client has said nothing.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.timers.tick().saturating_sub(self.heard.get()).saturating_mul(100))
    }

    fn heard(&self, frames: &mut Frames, bytes: &[u8]) {
        let tick = self.timers.tick();
        self.heard.set(tick);
        let mut conduct = self.conduct.borrow_mut();
        let mut abuse = None;
        frames.pass(bytes, |frame| abuse = abuse.or(conduct.heard(frame, tick)));
        if frames.is_whole() {
            conduct.whole();
        }
        drop(conduct);
        if abuse.is_some() {
            self.abuse.set(abuse);
        }
        self.look(false);
    }

    fn said(&self, frames: &mut Frames, bytes: &[u8]) {
        let mut conduct = self.conduct.borrow_mut();
        frames.pass(bytes, |frame| {
            conduct.said(frame);
            if frame.kind == Frame::DATA {
                self.taken.set(self.taken.get().saturating_add(u64::from(frame.length)));
            }
            if frame.kind == Frame::GOAWAY && !self.is_leaving.get() {
                self.is_broken.set(true);
            }
        });
        conduct.sent(bytes.len());
    }

    /// Bytes were sent, could not be sent, or wait.
    fn sent(&self, sent: &Poll<io::Result<usize>>) {
        match (sent.is_pending(), self.is_stalled.replace(sent.is_pending())) {
            (true, false) => self.stall.arm(self.limits.body),
            (false, true) => self.stall.disarm(),
            _ => {}
        }
        self.look(sent.is_ready());
    }
}

/// A client's socket, watched over.
pub struct Watched {
    stream: Wire,
    session: Rc<Session>,
    inbound: Frames,
    outbound: Frames,
    /// How long what still comes is read, once nothing more is sent.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    pub fn new(stream: Wire, session: Rc<Session>) -> Watched {
        let (inbound, outbound) = (Frames::of_client(), Frames::of_server());
        Watched { stream, session, inbound, outbound, lingering: None }
    }
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
        this.session.heard(&mut this.inbound, &buffer.filled()[before..]);
        if this.session.abuse.get().is_some() {
            // Nothing of it reaches h2.
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(n)) = sent {
            this.session.said(&mut this.outbound, &bytes[..n]);
        }
        this.session.sent(&sent);
        sent
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        if let Poll::Ready(Ok(mut left)) = sent {
            for slice in slices {
                let n = left.min(slice.len());
                this.session.said(&mut this.outbound, &slice[..n]);
                left -= n;
            }
        }
        this.session.sent(&sent);
        sent
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    /// Closing the connection while the client still sends, be it that it has heard of the end, would reset it under
    /// the last answer.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.lingering.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        let lingering = this.lingering.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut scratch = [0; 4096];
        while lingering.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                Ok(()) | Err(_) => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Watched {
    /// The kernel would keep what a client does not take. Whoever misbehaves is told, if the bytes before have left as a whole.
    fn drop(&mut self) {
        if self.session.is_given_up.get() {
            self.stream.reset_at_end();
        }
        if self.session.abuse.get().is_some() && self.outbound.is_between() {
            let mut goaway = [0, 0, 8, Frame::GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            goaway[9..13].copy_from_slice(&self.session.conduct.borrow().last_stream().to_be_bytes());
            goaway[13..].copy_from_slice(&ENHANCE_YOUR_CALM.to_be_bytes());
            self.stream.send_at_once(&goaway);
        }
    }
}
