//! State of an HTTP/1.1 connection that the code on both sides of hyper shares: its phase, its timeouts, and the bytes of
//! the current head.
//!
//! The service above hyper and `Http1Io` below it report what they observe. This file reads and writes no bytes.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::downstream::drain::Drain;
use crate::downstream::http1::head_tracker::HeadTracker;
use crate::http::error::RequestError;
use crate::http::headers::SpecialFields;
use crate::informational::InformationalQueue;
use crate::timer::Timer;

/// Time for which a connection that waits for its next request keeps hyper's buffers. Clients that send requests in close
/// succession are not affected.
const BUFFERED_IDLE: Duration = Duration::from_secs(1);

/// Shared by the service above hyper and the `Http1Io` below it.
#[derive(Debug)]
pub struct ConnectionState {
    drain: Rc<Drain>,
    /// A request is in flight.
    pub(super) busy: Cell<bool>,
    /// Bytes of a response may not have been flushed yet.
    unflushed: Cell<bool>,
    /// A part of a head was received.
    has_partial_head: Cell<bool>,
    head_tracker: RefCell<HeadTracker>,
    /// Informational responses that wait to be sent.
    informational: Rc<InformationalQueue>,
    /// Whether the request is delayed until a later window.
    is_delayed: Rc<Cell<bool>>,
    phase: Cell<Phase>,
    /// Limits the wait for a head, and the time for which a response may make no progress.
    timer: Rc<Timer>,
    head_timeout: Duration,
    /// The timer runs for the first part of `head_timeout`, `BUFFERED_IDLE`.
    is_buffered_idle: Cell<bool>,
    /// That part is over, and no byte was received.
    has_idled: Cell<bool>,
    /// The connection is being closed.
    pub(super) closing: Cell<bool>,
    body_timeout: Rc<Cell<Duration>>,
    /// Bytes of a response per second that a slow client must read, on average over each `body_timeout`.
    min_bytes_per_second: u64,
    /// Bytes of them that the client must still read before the timeout restarts; 0 while the client keeps up.
    bytes_due: Cell<u64>,
    /// Bytes wait to be sent, because the client does not read.
    is_blocked: Cell<bool>,
    /// The next piece of the response body is not there yet, so a client that has read all bytes keeps up.
    awaits_body: Cell<bool>,
}

/// What a connection does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waiting for a request.
    Head,
    /// Waiting for the response head, which has timeouts elsewhere.
    Processing,
    /// Sending a response, until its last byte is flushed.
    Responding,
}

impl ConnectionState {
    /// A connection that waits for its first request. `head_timeout` is for each head, `body_timeout` for bodies without
    /// progress, `min_bytes_per_second` for clients that read slowly.
    pub fn new(
        timer: Rc<Timer>,
        drain: Rc<Drain>,
        head_timeout: Duration,
        body_timeout: Duration,
        min_bytes_per_second: u64,
    ) -> Rc<ConnectionState> {
        timer.arm(head_timeout);
        let state = ConnectionState {
            drain,
            busy: Cell::new(false),
            unflushed: Cell::new(false),
            has_partial_head: Cell::new(false),
            head_tracker: RefCell::default(),
            informational: Rc::default(),
            is_delayed: Rc::default(),
            phase: Cell::new(Phase::Head),
            timer,
            head_timeout,
            is_buffered_idle: Cell::new(false),
            has_idled: Cell::new(false),
            closing: Cell::new(false),
            body_timeout: Rc::new(Cell::new(body_timeout)),
            min_bytes_per_second,
            bytes_due: Cell::new(0),
            is_blocked: Cell::new(false),
            awaits_body: Cell::new(false),
        };
        Rc::new(state)
    }

    /// Whether the current response is the last one on the connection, because the gateway drains.
    pub fn is_last(&self) -> bool {
        self.drain.has_begun()
    }

    pub fn informational(&self) -> &Rc<InformationalQueue> {
        &self.informational
    }

    /// Time for which a body may make no progress; the route of a request may set it.
    pub fn body_timeout(&self) -> &Rc<Cell<Duration>> {
        &self.body_timeout
    }

    pub fn is_delayed(&self) -> &Rc<Cell<bool>> {
        &self.is_delayed
    }

    /// Begins a request, whose head is complete. `body_bytes`: length of its body; `None`: it is chunked.
    pub fn begin_request(&self, body_bytes: Option<u64>) {
        self.phase.set(Phase::Processing);
        self.timer.disarm();
        self.busy.set(true);
        self.unflushed.set(true);
        self.has_partial_head.set(false);
        self.head_tracker.borrow_mut().begin_request(body_bytes);
    }

    /// Takes received bytes. Fails if the trailers of a request are malformed: its end is unknown then.
    pub(super) fn receive(&self, bytes: &[u8]) -> io::Result<()> {
        let mut head = self.head_tracker.borrow_mut();
        if head.receive(bytes, self.busy.get()) {
            self.has_partial_head.set(true);
        }
        if head.has_malformed_trailers() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) }
    }

    /// Whether the next request line has at least `bytes` bytes because of its target.
    pub(super) fn has_long_target(&self, bytes: usize) -> bool {
        self.head_tracker.borrow().has_long_target(bytes)
    }

    /// Forgets the bytes received since the last request, because they are put back and read again.
    pub(super) fn forget_received(&self) {
        self.head_tracker.take();
    }

    /// Finds errors of the current request that only its bytes show. `special` are its special fields, `fields` is the number
    /// of fields that hyper has kept.
    pub fn find_framing_error(&self, special: SpecialFields, fields: usize) -> Option<RequestError> {
        let head = self.head_tracker.borrow();
        if head.has_bare_line_end() || head.has_malformed_trailers() {
            return Some(RequestError::BARE_LINE_FEED);
        }
        if head.has_fragment() {
            return Some(RequestError::Target("the request target has a fragment"));
        }
        let is_chunked = special.has(SpecialFields::TRANSFER_ENCODING);
        if !is_chunked && !special.has(SpecialFields::CONTENT_LENGTH) {
            return None;
        }
        // hyper drops only a Content-Length beside chunked coding, and all but one of several equal Content-Lengths.
        let error = if is_chunked { RequestError::CONFLICTING_LENGTHS } else { RequestError::REPEATED_LENGTH };
        (head.fields() != fields).then_some(error)
    }

    /// The response head is there, or a piece of the request or response body was transferred.
    pub fn record_progress(&self) {
        self.phase.set(Phase::Responding);
        self.awaits_body.set(false);
        if self.bytes_due.get() == 0 {
            self.timer.arm(self.body_timeout.get());
        }
    }

    /// The next piece of the response body is not there yet.
    pub fn await_body(&self) {
        self.awaits_body.set(true);
    }

    /// hyper has taken the whole response.
    pub fn finish_response(&self) {
        self.busy.set(false);
    }

    /// The last byte of the response was flushed.
    pub(super) fn response_flushed(&self) {
        self.unflushed.set(false);
        self.bytes_due.set(0);
        if self.phase.replace(Phase::Head) != Phase::Head {
            // The client may have sent the beginning of the next head early.
            self.has_partial_head.set(!self.head_tracker.borrow().next_bytes().is_empty());
            self.timer.arm(self.head_timeout.min(BUFFERED_IDLE));
            self.is_buffered_idle.set(true);
        }
    }

    /// Whether a head has begun, other than with empty lines, and is not complete.
    pub(super) fn is_in_head(&self) -> bool {
        let is_of_head = |byte: &u8| !matches!(byte, b'\r' | b'\n');
        self.has_partial_head.get() && self.head_tracker.borrow().next_bytes().iter().any(is_of_head)
    }

    /// Discards the beginning of a head that will not be read.
    pub(super) fn discard_partial_head(&self) {
        self.has_partial_head.set(false);
    }

    /// Stops the timer when the write side is closed: lingering has its own limits.
    pub(super) fn disarm(&self) {
        self.timer.disarm();
    }

    /// Records the result of a write. A response may take any time, if the client reads the minimum rate in each
    /// `body_timeout`.
    pub(super) fn record_sent(&self, sent: &Poll<io::Result<usize>>) {
        if self.phase.get() != Phase::Responding {
            return;
        }
        self.is_blocked.set(sent.is_pending());
        let Poll::Ready(sent) = sent else {
            if self.bytes_due.get() == 0 {
                let limit_ms = u64::try_from(self.body_timeout.get().as_millis()).unwrap_or(u64::MAX);
                self.bytes_due.set(self.min_bytes_per_second.saturating_mul(limit_ms) / 1000);
            }
            return;
        };
        let sent = sent.as_ref().map_or(0, |bytes| *bytes as u64);
        self.bytes_due.set(self.bytes_due.get().saturating_sub(sent));
        if self.bytes_due.get() == 0 {
            self.timer.arm(self.body_timeout.get());
        }
    }

    /// All available bytes of the response were sent, and more follow later.
    pub(super) fn record_caught_up(&self) {
        self.is_blocked.set(false);
        if self.awaits_body.get() && self.bytes_due.replace(0) > 0 {
            self.timer.arm(self.body_timeout.get());
        }
    }

    /// The error of a connection that timed out: the client does not complete a head or does not read its response, or the
    /// upstream does not continue. `None`: no request was in flight.
    pub fn timeout_error(&self) -> Option<RequestError> {
        match self.phase.get() {
            // While bytes wait to be sent, the client is too slow, whatever the upstream does.
            Phase::Responding if self.awaits_body.get() && !self.is_blocked.get() => {
                Some(RequestError::ResponseTimeout)
            }
            Phase::Responding => Some(RequestError::Stalled),
            Phase::Head if self.has_partial_head.get() => Some(RequestError::HeadTimeout),
            Phase::Head | Phase::Processing => None,
        }
    }

    /// Whether a head or the progress of a response timed out; if not, the task is woken when it does.
    pub fn poll_timed_out(&self, cx: &Context<'_>) -> bool {
        let mut is_expired = self.phase.get() != Phase::Processing && self.timer.poll_expired(cx);
        if is_expired && self.phase.get() == Phase::Head && self.is_buffered_idle.replace(false) {
            self.has_idled.set(!self.has_partial_head.get() && !self.closing.get());
            self.timer.extend(self.head_timeout.saturating_sub(BUFFERED_IDLE));
            is_expired = self.timer.poll_expired(cx);
        }
        is_expired
    }

    /// Whether `BUFFERED_IDLE` has passed since the last response without a byte of another request. Returns true once.
    pub fn take_idled(&self) -> bool {
        self.has_idled.replace(false)
    }

    /// Whether the connection waits for a request of which no byte was received, for `BUFFERED_IDLE` at least if it served
    /// one before.
    pub fn is_idle(&self) -> bool {
        self.phase.get() == Phase::Head
            && !self.is_buffered_idle.get()
            && !self.has_partial_head.get()
            && !self.closing.get()
    }

    pub(super) fn has_no_pending_response(&self) -> bool {
        !self.busy.get() && !self.unflushed.get()
    }
}
