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
use crate::downstream::http2::flood_guard::{Abuse, Budget, FloodGuard, HeadRejection};
use crate::downstream::http2::frame_header::{FrameHeader, FrameReader};
use crate::downstream::http2::header_scanner::{BlockObserver, HeaderBlock, HeaderScanner};
use crate::downstream::http2::hpack;
use crate::downstream::http2::hpack::BlockError;
use crate::io_stream::IoStream;
use crate::timer::{Timer, Timers};

/// How long the last frames may take once a connection that ends has nothing left to answer. A client says that it has
/// heard of the end, so that nothing which it sent before is lost; only one that does not is waited for so long.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What is read of a connection before others have their turn. Reading a head costs up to a thousand times as much as sending it.
const TURN_BYTES: usize = 16 * 1024;

/// What the heads of all requests on a connection may take together, in multiples of what one may.
const CONNECTION_HEADS: usize = 16;

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
    pub min_body_bytes: u64,
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
    Closing,
}

/// What is to be done about a connection that took too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutAction {
    /// The client is told that no more requests are taken.
    Shutdown,
    /// The connection is closed; the client was in the middle of a head, or not.
    Close { in_head: bool },
}

/// What h2's two sides know together.
#[derive(Debug)]
pub struct Monitor {
    timers: Rc<Timers>,
    limits: Limits,
    flood_guard: RefCell<FloodGuard>,
    abuse: Cell<Option<Abuse>>,
    /// h2 has told the client of an error of the connection.
    is_broken: Cell<bool>,
    /// Somebody works at so many streams.
    active_tasks: Cell<usize>,
    /// So many of them are tunnels, on which the client may still send when its answer has ended.
    tunnels: Cell<usize>,
    is_shutting_down: Cell<bool>,
    phase: Cell<Phase>,
    timer: Rc<Timer>,
    /// The tick at which the client was last heard.
    last_received_tick: Cell<u64>,
    /// Armed while bytes wait to be sent.
    write_timer: Rc<Timer>,
    is_write_blocked: Cell<bool>,
    /// They have waited for too long.
    write_timed_out: Cell<bool>,
    /// Bytes of answers that were sent since the phase began, or this was last looked at.
    body_bytes_sent: Cell<u64>,
    /// Bytes that were read in this turn.
    turn_bytes_read: Cell<usize>,
    /// Requests that h2 has answered by itself, and that are not recorded yet.
    unrecorded_rejections: Cell<usize>,
}

impl Monitor {
    pub fn new(timers: &Rc<Timers>, limits: Limits, budget: Budget) -> Rc<Monitor> {
        let timer = timers.new_timer();
        timer.arm(limits.head);
        Rc::new(Monitor {
            flood_guard: RefCell::new(FloodGuard::new(budget, timers.tick())),
            limits,
            abuse: Cell::default(),
            is_broken: Cell::default(),
            active_tasks: Cell::default(),
            tunnels: Cell::default(),
            is_shutting_down: Cell::default(),
            phase: Cell::new(Phase::Opening),
            timer,
            last_received_tick: Cell::new(timers.tick()),
            write_timer: timers.new_timer(),
            is_write_blocked: Cell::default(),
            write_timed_out: Cell::default(),
            body_bytes_sent: Cell::default(),
            turn_bytes_read: Cell::default(),
            unrecorded_rejections: Cell::default(),
            timers: Rc::clone(timers),
        })
    }

    /// Somebody begins to work at a stream.
    pub fn task_started(&self) {
        self.active_tasks.set(self.active_tasks.get() + 1);
        self.update_phase(false);
    }

    /// Somebody has done all there was to do for a stream.
    pub fn task_ended(&self) {
        self.active_tasks.set(self.active_tasks.get() - 1);
        self.update_phase(false);
    }

    /// A stream that somebody works at has become a tunnel.
    pub fn tunnel_opened(&self) {
        self.tunnels.set(self.tunnels.get() + 1);
        self.update_phase(false);
    }

    /// It is none any more.
    pub fn tunnel_ended(&self) {
        self.tunnels.set(self.tunnels.get() - 1);
    }

    /// The client has been told that the connection ends.
    pub fn begin_shutdown(&self) {
        self.is_shutting_down.set(true);
        self.update_phase(false);
    }

    /// The connection has its turn.
    pub fn begin_turn(&self) {
        self.turn_bytes_read.set(0);
    }

    /// Why a request is not served.
    pub fn rejection_of(&self, stream: u32) -> Option<HeadRejection> {
        self.flood_guard.borrow().rejection_of(stream)
    }

    /// How many requests h2 has refused for the size of their heads, since this was last asked.
    pub fn take_unrecorded_rejections(&self) -> usize {
        self.unrecorded_rejections.take()
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
    pub fn poll_timed_out(&self, cx: &Context<'_>) -> Option<TimeoutAction> {
        if self.write_timer.poll_expired(cx) {
            self.write_timed_out.set(true);
            return Some(TimeoutAction::Close { in_head: false });
        }
        if !self.timer.poll_expired(cx) {
            return None;
        }
        Some(match self.phase.get() {
            Phase::Idle => TimeoutAction::Shutdown,
            phase => TimeoutAction::Close { in_head: phase == Phase::Head },
        })
    }

    /// Finds out what the connection is at, and how long that may take. `moved`: bytes were sent.
    fn update_phase(&self, moved: bool) {
        let conduct = self.flood_guard.borrow();
        let phase = match () {
            () if !conduct.has_first_frame() && !self.is_shutting_down.get() => Phase::Opening,
            () if conduct.is_in_head() => Phase::Head,
            () if conduct.is_busy() && self.active_tasks.get() > 0 || self.tunnels.get() > 0 => Phase::Busy,
            () if conduct.is_busy() => Phase::Sending,
            () if self.is_shutting_down.get() => Phase::Closing,
            () => Phase::Idle,
        };
        // Other frames than those of answers, such as what a PING is answered with, get nobody further.
        let goes_on =
            moved && phase == Phase::Sending && self.body_bytes_sent.get() >= self.limits.min_body_bytes.max(1);
        if self.phase.replace(phase) == phase && !goes_on {
            return;
        }
        self.body_bytes_sent.set(0);
        match phase {
            Phase::Opening | Phase::Head => self.timer.arm(self.limits.head),
            Phase::Idle => self.timer.arm(self.limits.idle),
            Phase::Busy => self.timer.disarm(),
            Phase::Sending => self.timer.arm(self.limits.body),
            Phase::Closing => self.timer.arm(CLOSE_TIMEOUT),
        }
    }

    /// What a head may have beside all others.
    fn available_head_bytes(&self, conduct: &FloodGuard) -> usize {
        (self.limits.request.bytes * CONNECTION_HEADS).saturating_sub(conduct.head_bytes())
    }

    /// How long the client has said nothing.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.timers.tick().saturating_sub(self.last_received_tick.get()).saturating_mul(100))
    }

    fn record_received(&self, frames: &mut FrameReader, bytes: &[u8]) {
        let tick = self.timers.tick();
        self.last_received_tick.set(tick);
        let mut conduct = self.flood_guard.borrow_mut();
        let mut abuse = None;
        frames.read_frames(bytes, |frame| abuse = abuse.or(conduct.record_received(frame, tick)));
        if frames.is_frame_complete() {
            conduct.complete_frame();
        }
        drop(conduct);
        if abuse.is_some() {
            self.abuse.set(abuse);
        }
        self.update_phase(false);
    }

    fn record_sent_frames(&self, frames: &mut FrameReader, bytes: &[u8]) {
        let mut conduct = self.flood_guard.borrow_mut();
        frames.read_frames(bytes, |frame| {
            if let Some(abuse) = conduct.record_sent_frame(frame, self.timers.tick()) {
                self.abuse.set(Some(abuse));
            }
            if frame.kind == FrameHeader::DATA {
                self.body_bytes_sent.set(self.body_bytes_sent.get().saturating_add(u64::from(frame.length)));
            }
            if frame.kind == FrameHeader::GOAWAY && !self.is_shutting_down.get() {
                self.is_broken.set(true);
            }
        });
        conduct.record_sent_bytes(bytes.len());
    }

    /// Bytes were sent, could not be sent, or wait.
    fn record_write(&self, sent: &Poll<io::Result<usize>>) {
        match (sent.is_pending(), self.is_write_blocked.replace(sent.is_pending())) {
            (true, false) => self.write_timer.arm(self.limits.body),
            (false, true) => self.write_timer.disarm(),
            _ => {}
        }
        self.update_phase(sent.is_ready());
    }
}

impl BlockObserver for Monitor {
    fn max_head_bytes(&self) -> usize {
        self.available_head_bytes(&self.flood_guard.borrow())
    }

    fn record_block(&self, block: HeaderBlock) {
        let mut conduct = self.flood_guard.borrow_mut();
        let mut flaw = None;
        if let Some(BlockError::TooLarge { by_h2 }) = block.error {
            let is_crowded =
                block.bytes < self.limits.request.bytes && block.bytes >= self.available_head_bytes(&conduct);
            if is_crowded {
                // It is reset, which is counted then.
                flaw = Some(HeadRejection::ConnectionFull);
            } else {
                self.unrecorded_rejections.set(self.unrecorded_rejections.get() + usize::from(by_h2 && block.is_head));
                flaw = Some(HeadRejection::TooLarge);
                let abuse = conduct.bad_request(self.timers.tick());
                self.abuse.set(self.abuse.get().or(abuse));
            }
        }
        if block.is_head {
            // One that is refused is soon gone.
            let bytes = if flaw.is_some() { 0 } else { block.bytes };
            conduct.record_head(block.stream, bytes, flaw);
        }
    }
}

/// A client's socket, watched over.
pub struct MonitoredIo {
    stream: IoStream,
    monitor: Rc<Monitor>,
    header_scanner: HeaderScanner,
    inbound: FrameReader,
    outbound: FrameReader,
    /// How long what still comes is read, once nothing more is sent.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl MonitoredIo {
    pub fn new(stream: IoStream, session: Rc<Monitor>) -> MonitoredIo {
        let (inbound, outbound) = (FrameReader::for_client(), FrameReader::for_server());
        let input = HeaderScanner::new(session.limits.request);
        MonitoredIo { stream, monitor: session, header_scanner: input, inbound, outbound, lingering: None }
    }
}

impl AsyncRead for MonitoredIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let session = &*this.monitor;
        loop {
            let ready = this.header_scanner.take_output(buffer.remaining());
            if !ready.is_empty() {
                buffer.put_slice(ready);
                return Poll::Ready(Ok(()));
            }
            if session.turn_bytes_read.get() >= TURN_BYTES {
                // Others first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let before = buffer.filled().len();
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
            let came = &mut buffer.filled_mut()[before..];
            session.turn_bytes_read.set(session.turn_bytes_read.get() + came.len());
            session.record_received(&mut this.inbound, came);
            let passed = this.header_scanner.filter(came, session);
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
            this.monitor.record_sent_frames(&mut this.outbound, &bytes[..n]);
        }
        this.monitor.record_write(&sent);
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
                this.monitor.record_sent_frames(&mut this.outbound, &slice[..n]);
                left -= n;
            }
        }
        this.monitor.record_write(&sent);
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
        if self.monitor.write_timed_out.get() {
            self.stream.reset_on_close();
        }
        if self.monitor.abuse.get().is_some() && self.outbound.is_between_frames() {
            let mut goaway = [0, 0, 8, FrameHeader::GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            goaway[9..13].copy_from_slice(&self.monitor.flood_guard.borrow().last_stream().to_be_bytes());
            goaway[13..].copy_from_slice(&ENHANCE_YOUR_CALM.to_be_bytes());
            self.stream.try_send(&goaway);
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

    fn test_monitor() -> Rc<Monitor> {
        let time = Duration::from_secs(60);
        let request = hpack::Limits { fields: 100, bytes: 64 * 1024 };
        let limits = Limits { head: time, idle: time, body: time, min_body_bytes: 0, request };
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
        let frame = [&[0, 3, 0xe8, FrameHeader::DATA, 0, 0, 0, 0, 1][..], &[0; 1000]].concat();
        let all = [&PREFACE[..], &frame.repeat(50)].concat();
        client.write_all(&all).await.unwrap();
        while socket.peek(&mut vec![0; all.len()]).await.unwrap() < all.len() {}
        let session = test_monitor();
        let mut watched = MonitoredIo::new(IoStream::tcp(socket), Rc::clone(&session));
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
