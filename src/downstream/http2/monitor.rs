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

use crate::downstream::http1::io::LINGER;
use crate::downstream::http2::flood_guard::{Abuse, Budget, FloodGuard, HeadFlaw};
use crate::downstream::http2::frame_header::{Frame, Frames};
use crate::downstream::http2::header_scanner::{Block, Input, Watch};
use crate::downstream::http2::hpack;
use crate::downstream::http2::hpack::Flaw;
use crate::io_stream::Wire;
use crate::timer::{Timer, Timers};

/// How long the last frames may take once a connection that ends has nothing left to answer. A client says that it has
/// heard of the end, so that nothing which it sent before is lost; only one that does not is waited for so long.
const PARTING: Duration = Duration::from_secs(5);

/// What is read of a connection before others have their turn. Reading a head costs up to a thousand times as much as sending it.
const TURN_BYTES: usize = 16 * 1024;

/// What the heads of all requests on a connection may take together, in multiples of what one may.
const HEADS_TOGETHER: usize = 16;

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
    /// Of one request's head.
    pub request: hpack::Limits,
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
pub struct Monitor {
    timers: Rc<Timers>,
    limits: Limits,
    conduct: RefCell<FloodGuard>,
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
    /// Bytes that were read in this turn.
    read: Cell<usize>,
    /// Requests that h2 has answered by itself, and that are not recorded yet.
    unrecorded: Cell<usize>,
}

impl Monitor {
    pub fn new(timers: &Rc<Timers>, limits: Limits, budget: Budget) -> Rc<Monitor> {
        let timer = timers.timer();
        timer.arm(limits.head);
        Rc::new(Monitor {
            conduct: RefCell::new(FloodGuard::new(budget, timers.tick())),
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
            read: Cell::default(),
            unrecorded: Cell::default(),
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

    /// The connection has its turn.
    pub fn begin_turn(&self) {
        self.read.set(0);
    }

    /// Why a request is not served.
    pub fn flaw_of(&self, stream: u32) -> Option<HeadFlaw> {
        self.conduct.borrow().flaw_of(stream)
    }

    /// How many requests h2 has refused for the size of their heads, since this was last asked.
    pub fn take_unrecorded(&self) -> usize {
        self.unrecorded.take()
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

    /// What a head may have beside all others.
    fn room_beside(&self, conduct: &FloodGuard) -> usize {
        (self.limits.request.bytes * HEADS_TOGETHER).saturating_sub(conduct.head_bytes())
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
            if let Some(abuse) = conduct.said(frame, self.timers.tick()) {
                self.abuse.set(Some(abuse));
            }
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

impl Watch for Monitor {
    fn room(&self) -> usize {
        self.room_beside(&self.conduct.borrow())
    }

    fn block(&self, block: Block) {
        let mut conduct = self.conduct.borrow_mut();
        let mut flaw = None;
        if let Some(Flaw::TooLarge { by_h2 }) = block.flaw {
            let is_crowded = block.bytes < self.limits.request.bytes && block.bytes >= self.room_beside(&conduct);
            if is_crowded {
                // It is reset, which is counted then.
                flaw = Some(HeadFlaw::Crowded);
            } else {
                self.unrecorded.set(self.unrecorded.get() + usize::from(by_h2 && block.is_head));
                flaw = Some(HeadFlaw::TooLarge);
                let abuse = conduct.bad_request(self.timers.tick());
                self.abuse.set(self.abuse.get().or(abuse));
            }
        }
        if block.is_head {
            // One that is refused is soon gone.
            let bytes = if flaw.is_some() { 0 } else { block.bytes };
            conduct.head_came(block.stream, bytes, flaw);
        }
    }
}

/// A client's socket, watched over.
pub struct MonitoredIo {
    stream: Wire,
    session: Rc<Monitor>,
    input: Input,
    inbound: Frames,
    outbound: Frames,
    /// How long what still comes is read, once nothing more is sent.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl MonitoredIo {
    pub fn new(stream: Wire, session: Rc<Monitor>) -> MonitoredIo {
        let (inbound, outbound) = (Frames::of_client(), Frames::of_server());
        let input = Input::new(session.limits.request);
        MonitoredIo { stream, session, input, inbound, outbound, lingering: None }
    }
}

impl AsyncRead for MonitoredIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let session = &*this.session;
        loop {
            let ready = this.input.take_ready(buffer.remaining());
            if !ready.is_empty() {
                buffer.put_slice(ready);
                return Poll::Ready(Ok(()));
            }
            if session.read.get() >= TURN_BYTES {
                // Others first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let before = buffer.filled().len();
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
            let came = &mut buffer.filled_mut()[before..];
            session.read.set(session.read.get() + came.len());
            session.heard(&mut this.inbound, came);
            let passed = this.input.pass(came, session);
            if session.abuse.get().is_some() {
                // Nothing of it reaches h2.
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
            let is_end = came.is_empty();
            buffer.set_filled(before + passed);
            if passed > 0 || is_end || read.is_err() {
                return Poll::Ready(read);
            }
        }
    }
}

impl AsyncWrite for MonitoredIo {
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

impl Drop for MonitoredIo {
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Wake;

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::downstream::http2::frame_header::PREFACE;

    struct Woken(Mutex<usize>);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() += 1;
        }
    }

    fn session() -> Rc<Monitor> {
        let time = Duration::from_secs(60);
        let request = hpack::Limits { fields: 100, bytes: 64 * 1024 };
        let limits = Limits { head: time, idle: time, body: time, least: 0, request };
        let budget = Budget { resets: 200, bad_requests: 400, control: 1000, block_bytes: 64 * 1024 };
        Monitor::new(&Rc::new(Timers::default()), limits, budget)
    }

    /// A client's end, and the gateway's.
    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_connection_that_has_much_to_read_takes_turns() {
        let (mut client, socket) = connected().await;
        // DATA frames of 1000 bytes; how many are kept for the reader does not matter here.
        let frame = [&[0, 3, 0xe8, Frame::DATA, 0, 0, 0, 0, 1][..], &[0; 1000]].concat();
        let all = [&PREFACE[..], &frame.repeat(50)].concat();
        client.write_all(&all).await.unwrap();
        while socket.peek(&mut vec![0; all.len()]).await.unwrap() < all.len() {}
        let session = session();
        let mut watched = MonitoredIo::new(Wire::tcp(socket), Rc::clone(&session));
        let woken = Arc::new(Woken(Mutex::new(0)));
        let waker = Arc::clone(&woken).into();
        let cx = &mut Context::from_waker(&waker);
        let (mut turns, mut read) = (0, 0);
        while read < all.len() {
            session.begin_turn();
            let before = read;
            let mut memory = [0; 8192];
            loop {
                let mut buffer = ReadBuf::new(&mut memory);
                let polled = Pin::new(&mut watched).poll_read(cx, &mut buffer);
                if polled.is_pending() {
                    break;
                }
                read += buffer.filled().len();
            }
            turns += 1;
            assert!(read - before < TURN_BYTES + memory.len(), "{} bytes in one turn", read - before);
            // It asks for its next turn, but is not at once given it.
            assert!(read == all.len() || *woken.0.lock().unwrap() == turns);
        }
        assert!(turns > 1);
    }
}
