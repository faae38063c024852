//! What is known of a connection on both sides of hyper: what it is at, and how long that may take.
//!
//! The service above hyper and the guard below it each tell what they see. Nothing here reads or writes.

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

/// How long a connection that waits for its next request keeps what reads it: buffers above all. Whoever sends
/// requests one after the other does not notice.
const BUFFERED_IDLE: Duration = Duration::from_secs(1);

/// What the two sides of hyper know together: the service above it and the socket below it.
#[derive(Debug)]
pub struct ConnectionState {
    drain: Rc<Drain>,
    /// A request is being answered.
    pub(super) busy: Cell<bool>,
    /// Bytes of an answer may not have been flushed yet.
    unflushed: Cell<bool>,
    /// Bytes of a head have come that is not complete.
    has_partial_head: Cell<bool>,
    /// The bytes of the last head.
    head_tracker: RefCell<HeadTracker>,
    /// Informational answers that wait to be sent.
    informational: Rc<InformationalQueue>,
    /// Whether the request waits for its turn.
    is_delayed: Rc<Cell<bool>>,
    phase: Cell<Phase>,
    /// Limits the wait for a head, and how long an answer may stand still.
    timer: Rc<Timer>,
    head_timeout: Duration,
    /// The timer stands for the first part of `head_limit`, which is `ALERT`.
    is_buffered_idle: Cell<bool>,
    /// That part is over, and nothing has come.
    has_idled: Cell<bool>,
    /// The connection is being closed.
    pub(super) closing: Cell<bool>,
    body_timeout: Rc<Cell<Duration>>,
    /// Bytes of an answer that a client has to take a second, over each `body_limit`, once it does not take all at once.
    min_bytes_per_second: u64,
    /// How many of these are still to be taken before the time begins anew; 0 while the client keeps up.
    bytes_due: Cell<u64>,
    /// There is no more of the answer at present: whoever has taken all of it has kept up.
    awaits_body: Cell<bool>,
}

/// What a connection is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waiting for a request.
    Head,
    /// Waiting for what the gateway will answer, which has limits of its own.
    Processing,
    /// Sending an answer, until its last byte has left.
    Responding,
}

impl ConnectionState {
    /// A connection that waits for its first request. `head_limit` is for each head, `body_limit`
    /// for how long a body may stand still, `rate` the bytes of an answer that are taken a second.
    pub fn new(
        timer: Rc<Timer>,
        drain: Rc<Drain>,
        head_limit: Duration,
        body_limit: Duration,
        rate: u64,
    ) -> Rc<ConnectionState> {
        timer.arm(head_limit);
        let stage = ConnectionState {
            drain,
            busy: Cell::new(false),
            unflushed: Cell::new(false),
            has_partial_head: Cell::new(false),
            head_tracker: RefCell::default(),
            informational: Rc::default(),
            is_delayed: Rc::default(),
            phase: Cell::new(Phase::Head),
            timer,
            head_timeout: head_limit,
            is_buffered_idle: Cell::new(false),
            has_idled: Cell::new(false),
            closing: Cell::new(false),
            body_timeout: Rc::new(Cell::new(body_limit)),
            min_bytes_per_second: rate,
            bytes_due: Cell::new(0),
            awaits_body: Cell::new(false),
        };
        Rc::new(stage)
    }

    /// Whether the answer that is made now is the last one on the connection, because the gateway drains.
    pub fn is_last(&self) -> bool {
        self.drain.has_begun()
    }

    pub fn informational(&self) -> &Rc<InformationalQueue> {
        &self.informational
    }

    /// How long a body may stand still; a request may have a limit of its own.
    pub fn body_timeout(&self) -> &Rc<Cell<Duration>> {
        &self.body_timeout
    }

    pub fn is_delayed(&self) -> &Rc<Cell<bool>> {
        &self.is_delayed
    }

    /// A request's head is complete; `body_bytes` are to follow, if their number is known.
    pub fn begin_request(&self, body_bytes: Option<u64>) {
        self.phase.set(Phase::Processing);
        self.timer.disarm();
        self.busy.set(true);
        self.unflushed.set(true);
        self.has_partial_head.set(false);
        self.head_tracker.borrow_mut().begin_request(body_bytes);
    }

    /// Whether one head has come where a request is awaited, the same to the byte as that of the request before.
    pub fn repeats_previous(&self) -> bool {
        self.phase.get() == Phase::Head
            && self.has_no_pending_response()
            && self.head_tracker.borrow().repeats_previous()
    }

    /// Bytes have come. Fails where the trailers of a request are malformed: its end is not known.
    pub(super) fn receive(&self, bytes: &[u8]) -> io::Result<()> {
        let mut head = self.head_tracker.borrow_mut();
        if head.receive(bytes, self.busy.get()) {
            self.has_partial_head.set(true);
        }
        if head.has_malformed_trailers() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) }
    }

    /// Whether the target makes the next request line at least this long.
    pub(super) fn has_long_target(&self, bytes: usize) -> bool {
        self.head_tracker.borrow().has_long_target(bytes)
    }

    /// Forgets the bytes received since the last request: they are read once more.
    pub(super) fn forget_received(&self) {
        self.head_tracker.take();
    }

    /// What is wrong with the request just begun that only its bytes tell. `marks` are those of its fields, `fields` is the
    /// number of them that hyper has kept.
    pub fn find_framing_error(&self, marks: SpecialFields, fields: usize) -> Option<RequestError> {
        let head = self.head_tracker.borrow();
        if head.has_bare_line_end() || head.has_malformed_trailers() {
            return Some(RequestError::BARE_LINE_FEED);
        }
        if head.has_fragment() {
            return Some(RequestError::Target("the request target has a fragment"));
        }
        let is_chunked = marks.has(SpecialFields::TRANSFER_ENCODING);
        if !is_chunked && !marks.has(SpecialFields::CONTENT_LENGTH) {
            return None;
        }
        // The only fields that hyper drops are a Content-Length beside chunks, and all but one of several equal ones.
        let doubt = if is_chunked { RequestError::DOUBTFUL_LENGTH } else { RequestError::REPEATED_LENGTH };
        (head.fields() != fields).then_some(doubt)
    }

    /// The head of its answer is there, or another piece of either body has moved.
    pub fn record_progress(&self) {
        self.phase.set(Phase::Responding);
        self.awaits_body.set(false);
        if self.bytes_due.get() == 0 {
            self.timer.arm(self.body_timeout.get());
        }
    }

    /// The answer's next piece is not there yet.
    pub fn await_body(&self) {
        self.awaits_body.set(true);
    }

    /// Its answer has been handed over to the last byte.
    pub fn finish_response(&self) {
        self.busy.set(false);
    }

    /// The last byte of the answer has left.
    pub(super) fn response_flushed(&self) {
        self.unflushed.set(false);
        self.bytes_due.set(0);
        if self.phase.replace(Phase::Head) != Phase::Head {
            self.timer.arm(self.head_timeout.min(BUFFERED_IDLE));
            self.is_buffered_idle.set(true);
        }
    }

    /// Nothing more will be sent. What the client may still do has a limit of its own.
    pub(super) fn disarm(&self) {
        self.timer.disarm();
    }

    /// Bytes were sent, or could not be: an answer that moves may take as long as it likes, if it moves
    /// as much in each of its limits as a client has to take.
    pub(super) fn record_sent(&self, sent: &Poll<io::Result<usize>>) {
        if self.phase.get() != Phase::Responding {
            return;
        }
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

    /// All that there is of an answer has been sent, and more is to come.
    pub(super) fn record_caught_up(&self) {
        if self.awaits_body.get() && self.bytes_due.replace(0) > 0 {
            self.timer.arm(self.body_timeout.get());
        }
    }

    /// What a connection is late with, if anything is under way: the client does not send the rest of a head or does not
    /// take its answer, or the upstream does not go on.
    pub fn timeout_error(&self) -> Option<RequestError> {
        match self.phase.get() {
            Phase::Responding if self.awaits_body.get() => Some(RequestError::ResponseTimeout),
            Phase::Responding => Some(RequestError::Stalled),
            Phase::Head if self.has_partial_head.get() => Some(RequestError::HeadTimeout),
            Phase::Head | Phase::Processing => None,
        }
    }

    /// Whether a head took too long, or an answer stands still; wakes the task when it does.
    pub fn poll_timed_out(&self, cx: &Context<'_>) -> bool {
        let mut late = self.phase.get() != Phase::Processing && self.timer.poll_expired(cx);
        if late && self.phase.get() == Phase::Head && self.is_buffered_idle.replace(false) {
            self.has_idled.set(!self.has_partial_head.get() && !self.closing.get());
            self.timer.extend(self.head_timeout.saturating_sub(BUFFERED_IDLE));
            late = self.timer.poll_expired(cx);
        }
        late
    }

    /// Whether a request was answered some time ago, and no byte of another has come since. Told once.
    pub fn take_idled(&self) -> bool {
        self.has_idled.replace(false)
    }

    /// Whether nothing of a request has come, and none was answered just now.
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
