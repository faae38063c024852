//! The stream between h2 and a client's socket: reads the headers of passing frames, and enforces timeouts and frame limits.
//!
//! h2 has no idle timeout, no timeout for an unfinished header block, none for a client that does not read, and responds to
//! PING and SETTINGS without limit. This file adds them. It knows no requests: `stream` does.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::downstream::http2::flood_guard::{Abuse, Budget, FloodGuard, HeadRejection};
use crate::downstream::http2::frame_header::{FrameHeader, FrameReader};
use crate::downstream::http2::header_scanner::{BlockObserver, HeaderBlock, HeaderScanner};
use crate::downstream::http2::hpack;
use crate::downstream::http2::hpack::BlockError;
use crate::downstream::linger::LINGER;
use crate::io_stream::IoStream;
use crate::timer::{Timer, Timers};

/// Time limit for the last frames of a closing connection without requests. h2 sends a PING after GOAWAY, and closes when the
/// client acknowledges it; only a client that does not acknowledge takes this long.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes read from a connection before other tasks get their turn. Reading a head costs up to a thousand times as much as
/// sending it.
const TURN_BYTES: usize = 16 * 1024;

/// Limit on the heads of all unfinished requests of a connection together, in multiples of the limit on one.
const CONNECTION_HEADS: usize = 16;

/// Error codes of GOAWAY (RFC 9113, section 7).
const PROTOCOL_ERROR: u32 = 0x1;
const ENHANCE_YOUR_CALM: u32 = 0xb;

/// The most unread bytes that are discarded before a connection with an error is closed.
const DISCARD_MAX_BYTES: usize = 64 * 1024;

/// Timeouts of a connection, and limits on its heads.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// For the first frame, and for each header block.
    pub head: Duration,
    /// For a connection without a request.
    pub idle: Duration,
    /// For a write without progress.
    pub body: Duration,
    /// Bytes of response bodies that a client must read in each `body`, while only sending is left to do.
    pub min_body_bytes: u64,
    /// For the head of one request.
    pub request: hpack::HeadLimits,
}

/// What a connection does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waiting for the preface and the first frame.
    Opening,
    /// A header block has begun.
    Head,
    /// No request is in flight.
    Idle,
    /// Stream tasks are active, which have timeouts of their own.
    Busy,
    /// All that is left is to send what h2 buffers.
    Sending,
    /// GOAWAY was sent, and no request is in flight.
    Closing,
}

/// What to do with a connection that timed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutAction {
    /// Send GOAWAY and finish.
    Shutdown,
    /// Close the connection.
    Close(Unfinished),
}

/// What a connection that timed out has not finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfinished {
    /// A header block.
    Head,
    /// Responses, which the client does not read.
    Responses,
    Nothing,
}

/// State of a connection, shared by the code above h2 and the `MonitoredIo` below it.
#[derive(Debug)]
pub struct Monitor {
    timers: Rc<Timers>,
    limits: ConnectionLimits,
    flood_guard: RefCell<FloodGuard>,
    abuse: Cell<Option<Abuse>>,
    /// h2 has sent GOAWAY because of a connection error.
    is_broken: Cell<bool>,
    /// The connection does not begin with the preface. h2 sends no GOAWAY.
    is_preface_invalid: Cell<bool>,
    /// Streams with a task.
    active_tasks: Cell<usize>,
    /// How many of them are tunnels, on which the client may still send when the response has ended.
    tunnels: Cell<usize>,
    is_shutting_down: Cell<bool>,
    phase: Cell<Phase>,
    timer: Rc<Timer>,
    /// The tick at which bytes were last received.
    last_received_tick: Cell<u64>,
    /// Armed while bytes wait to be sent.
    write_timer: Rc<Timer>,
    is_write_blocked: Cell<bool>,
    /// They have waited too long.
    write_timed_out: Cell<bool>,
    /// Bytes of response bodies sent since the timer was armed.
    body_bytes_sent: Cell<u64>,
    /// Bytes read in this turn.
    turn_bytes_read: Cell<usize>,
    /// Requests that h2 has rejected itself, and that are not recorded yet.
    unrecorded_rejections: Cell<usize>,
}

impl Monitor {
    pub fn new(timers: &Rc<Timers>, limits: ConnectionLimits, budget: Budget) -> Rc<Monitor> {
        let timer = timers.new_timer();
        timer.arm(limits.head);
        Rc::new(Monitor {
            flood_guard: RefCell::new(FloodGuard::new(budget, timers.tick())),
            limits,
            abuse: Cell::default(),
            is_broken: Cell::default(),
            is_preface_invalid: Cell::default(),
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

    /// The task of a stream starts.
    pub fn task_started(&self) {
        self.active_tasks.set(self.active_tasks.get() + 1);
        self.update_phase(false);
    }

    /// The task of a stream has ended.
    pub fn task_ended(&self) {
        self.active_tasks.set(self.active_tasks.get() - 1);
        self.update_phase(false);
    }

    /// A stream with a task has become a tunnel.
    pub fn tunnel_opened(&self) {
        self.tunnels.set(self.tunnels.get() + 1);
        self.update_phase(false);
    }

    /// A tunnel has ended.
    pub fn tunnel_ended(&self) {
        self.tunnels.set(self.tunnels.get() - 1);
    }

    /// GOAWAY is sent.
    pub fn begin_shutdown(&self) {
        self.is_shutting_down.set(true);
        self.update_phase(false);
    }

    /// A new turn of the connection's task begins.
    pub fn begin_turn(&self) {
        self.turn_bytes_read.set(0);
    }

    /// Why a request is not served, if it is not.
    pub fn rejection_of(&self, stream: u32) -> Option<HeadRejection> {
        self.flood_guard.borrow().rejection_of(stream)
    }

    /// The gateway handles a request.
    pub fn accept(&self, stream: u32) {
        self.flood_guard.borrow_mut().accept(stream);
    }

    /// The error codes with which requests were reset since the last call, before they were accepted.
    pub fn take_reset_codes(&self) -> Vec<u32> {
        self.flood_guard.borrow_mut().take_reset_codes()
    }

    /// Whether a header block has begun and not ended.
    pub fn is_in_head(&self) -> bool {
        self.flood_guard.borrow().is_in_head()
    }

    /// The number of requests that h2 has rejected for the size of their heads since the last call.
    pub fn take_unrecorded_rejections(&self) -> usize {
        self.unrecorded_rejections.take()
    }

    /// What the client sent too often, if it did.
    pub fn abuse(&self) -> Option<Abuse> {
        self.abuse.get()
    }

    /// Whether h2 ended the connection because of an error in what it read.
    pub fn is_broken(&self) -> bool {
        self.is_broken.get() || self.is_preface_invalid.get()
    }

    /// The connection does not begin with the preface.
    pub fn record_invalid_preface(&self) {
        self.is_preface_invalid.set(true);
    }

    /// The code of the GOAWAY that h2 does not send.
    fn goaway_code(&self) -> Option<u32> {
        let by_preface = self.is_preface_invalid.get().then_some(PROTOCOL_ERROR);
        self.abuse.get().map(|_| ENHANCE_YOUR_CALM).or(by_preface)
    }

    /// Whether the connection has timed out; if not, the task is woken when it does.
    pub fn poll_timed_out(&self, cx: &Context<'_>) -> Option<TimeoutAction> {
        if self.write_timer.poll_expired(cx) {
            self.write_timed_out.set(true);
            let is_busy = self.flood_guard.borrow().is_busy();
            return Some(TimeoutAction::Close(if is_busy { Unfinished::Responses } else { Unfinished::Nothing }));
        }
        if !self.timer.poll_expired(cx) {
            return None;
        }
        Some(match self.phase.get() {
            Phase::Idle => TimeoutAction::Shutdown,
            Phase::Head => TimeoutAction::Close(Unfinished::Head),
            Phase::Sending => TimeoutAction::Close(Unfinished::Responses),
            Phase::Opening | Phase::Busy | Phase::Closing => TimeoutAction::Close(Unfinished::Nothing),
        })
    }

    /// Determines the phase of the connection and arms its timeout. `has_sent`: bytes were sent.
    fn update_phase(&self, has_sent: bool) {
        let guard = self.flood_guard.borrow();
        let phase = match () {
            () if !guard.has_first_frame() && !self.is_shutting_down.get() => Phase::Opening,
            () if guard.is_in_head() => Phase::Head,
            () if guard.is_busy() && self.active_tasks.get() > 0 || self.tunnels.get() > 0 => Phase::Busy,
            () if guard.is_busy() => Phase::Sending,
            () if self.is_shutting_down.get() => Phase::Closing,
            () => Phase::Idle,
        };
        // Only bytes of response bodies are progress; acknowledgements of PING, for example, are not.
        let has_progress =
            has_sent && phase == Phase::Sending && self.body_bytes_sent.get() >= self.limits.min_body_bytes.max(1);
        if self.phase.replace(phase) == phase && !has_progress {
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

    /// Bytes that a head may have beside the heads of all other unfinished requests.
    fn available_head_bytes(&self, guard: &FloodGuard) -> usize {
        (self.limits.request.bytes * CONNECTION_HEADS).saturating_sub(guard.head_bytes())
    }

    /// Time since bytes were last received.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.timers.tick().saturating_sub(self.last_received_tick.get()).saturating_mul(100))
    }

    fn record_received(&self, frames: &mut FrameReader, bytes: &[u8]) {
        let tick = self.timers.tick();
        self.last_received_tick.set(tick);
        let mut guard = self.flood_guard.borrow_mut();
        let mut abuse = None;
        frames.read_frames(bytes, |frame| abuse = abuse.or(guard.record_received(frame, tick)));
        if frames.is_frame_complete() {
            guard.complete_frame();
        }
        drop(guard);
        if abuse.is_some() {
            self.abuse.set(abuse);
        }
        self.update_phase(false);
    }

    fn record_sent_frames(&self, frames: &mut FrameReader, bytes: &[u8]) {
        let mut guard = self.flood_guard.borrow_mut();
        frames.read_frames(bytes, |frame| {
            if let Some(abuse) = guard.record_sent_frame(frame, self.timers.tick()) {
                self.abuse.set(Some(abuse));
            }
            if frame.kind == FrameHeader::DATA {
                self.body_bytes_sent.set(self.body_bytes_sent.get().saturating_add(u64::from(frame.length)));
            }
            if frame.kind == FrameHeader::GOAWAY && !self.is_shutting_down.get() {
                self.is_broken.set(true);
            }
        });
        guard.record_sent_bytes(bytes.len());
    }

    /// Records the result of a write.
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
        let mut guard = self.flood_guard.borrow_mut();
        let mut rejection = None;
        if let Some(BlockError::TooLarge { by_h2 }) = block.error {
            let is_full = block.bytes < self.limits.request.bytes && block.bytes >= self.available_head_bytes(&guard);
            if is_full {
                // Not counted here: the reset of its stream is.
                rejection = Some(HeadRejection::ConnectionFull);
            } else {
                self.unrecorded_rejections.set(self.unrecorded_rejections.get() + usize::from(by_h2 && block.is_head));
                rejection = Some(HeadRejection::TooLarge);
                let abuse = guard.bad_request(self.timers.tick());
                self.abuse.set(self.abuse.get().or(abuse));
            }
        }
        if block.is_head {
            // The head of a rejected request is freed soon.
            let bytes = if rejection.is_some() { 0 } else { block.bytes };
            guard.record_head(block.stream, bytes, rejection);
        }
    }
}

/// A client's stream, as h2 sees it.
pub struct MonitoredIo {
    stream: IoStream,
    monitor: Rc<Monitor>,
    header_scanner: HeaderScanner,
    inbound: FrameReader,
    outbound: FrameReader,
    /// Limits reading after the write side was closed.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl MonitoredIo {
    pub fn new(stream: IoStream, monitor: Rc<Monitor>) -> MonitoredIo {
        let (inbound, outbound) = (FrameReader::for_client(), FrameReader::for_server());
        let header_scanner = HeaderScanner::new(monitor.limits.request);
        MonitoredIo { stream, monitor, header_scanner, inbound, outbound, lingering: None }
    }
}

impl AsyncRead for MonitoredIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let monitor = &*this.monitor;
        loop {
            let ready = this.header_scanner.take_output(buffer.remaining());
            if !ready.is_empty() {
                buffer.put_slice(ready);
                return Poll::Ready(Ok(()));
            }
            if monitor.turn_bytes_read.get() >= TURN_BYTES {
                // Let other tasks run first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let before = buffer.filled().len();
            let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buffer));
            let received = &mut buffer.filled_mut()[before..];
            monitor.turn_bytes_read.set(monitor.turn_bytes_read.get() + received.len());
            monitor.record_received(&mut this.inbound, received);
            let passed = this.header_scanner.filter(received, monitor);
            if monitor.abuse.get().is_some() {
                // h2 gets none of these bytes.
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
            let is_end = received.is_empty();
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

    /// Reads for a moment after the write side was closed: closing with unread bytes would reset the connection, and the client
    /// could lose the last response.
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
    /// Discards unsent bytes after a write timeout, because the kernel would keep them. Sends GOAWAY after an error that h2 does
    /// not report, if the last frame was sent completely.
    fn drop(&mut self) {
        if self.monitor.write_timed_out.get() {
            self.stream.reset_on_close();
        }
        if let (Some(code), true) = (self.monitor.goaway_code(), self.outbound.is_between_frames()) {
            let mut goaway = [0, 0, 8, FrameHeader::GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            goaway[9..13].copy_from_slice(&self.monitor.flood_guard.borrow().last_stream().to_be_bytes());
            goaway[13..].copy_from_slice(&code.to_be_bytes());
            self.stream.try_send(&goaway);
            // Closing with unread bytes resets the connection, and the client could lose the GOAWAY.
            self.stream.try_discard(DISCARD_MAX_BYTES);
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
        let request = hpack::HeadLimits { fields: 100, bytes: 64 * 1024 };
        let limits = ConnectionLimits { head: time, idle: time, body: time, min_body_bytes: 0, request };
        let budget = Budget { resets: 200, bad_requests: 400, control: 1000, block_bytes: 64 * 1024 };
        Monitor::new(&Rc::new(Timers::default()), limits, budget)
    }

    /// The client's end and the gateway's end.
    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_connection_with_much_to_read_takes_turns() {
        let (mut client, socket) = connected().await;
        // DATA frames of 1000 bytes.
        let frame = [&[0, 3, 0xe8, FrameHeader::DATA, 0, 0, 0, 0, 1][..], &[0; 1000]].concat();
        let all = [&PREFACE[..], &frame.repeat(50)].concat();
        client.write_all(&all).await.unwrap();
        while socket.peek(&mut vec![0; all.len()]).await.unwrap() < all.len() {}
        let monitor = test_monitor();
        let mut io = MonitoredIo::new(IoStream::tcp(socket), Rc::clone(&monitor));
        let woken = Arc::new(Woken(Mutex::new(0)));
        let waker = Arc::clone(&woken).into();
        let cx = &mut Context::from_waker(&waker);
        let (mut turns, mut read) = (0, 0);
        while read < all.len() {
            monitor.begin_turn();
            let before = read;
            let mut memory = [0; 8192];
            loop {
                let mut buffer = ReadBuf::new(&mut memory);
                let polled = Pin::new(&mut io).poll_read(cx, &mut buffer);
                if polled.is_pending() {
                    break;
                }
                read += buffer.filled().len();
            }
            turns += 1;
            assert!(read - before < TURN_BYTES + memory.len(), "{} bytes in one turn", read - before);
            // The task is woken for its next turn, and does not continue at once.
            assert!(read == all.len() || *woken.0.lock().unwrap() == turns);
        }
        assert!(turns > 1);
    }
}
