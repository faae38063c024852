//! What is known of a connection on both sides of hyper: what it is at, and how long that may take.
//!
//! The service above hyper and the guard below it each tell what they see. Nothing here reads or writes.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::downstream::drain::Drain;
use crate::downstream::http1::head_tracker::Head;
use crate::http::error::RequestError;
use crate::http::headers::SpecialFields;
use crate::informational::Interim;
use crate::timer::Timer;

/// How long a connection that waits for its next request keeps what reads it: buffers above all. Whoever sends
/// requests one after the other does not notice.
const ALERT: Duration = Duration::from_secs(1);

/// What the two sides of hyper know together: the service above it and the socket below it.
#[derive(Debug)]
pub struct ConnectionState {
    drain: Rc<Drain>,
    /// A request is being answered.
    pub(super) busy: Cell<bool>,
    /// Bytes of an answer may not have been flushed yet.
    unflushed: Cell<bool>,
    /// Bytes of a head have come that is not complete.
    heard: Cell<bool>,
    /// The bytes of the last head.
    head: RefCell<Head>,
    /// Informational answers that wait to be sent.
    interim: Rc<Interim>,
    /// Whether the request waits for its turn.
    waits: Rc<Cell<bool>>,
    phase: Cell<Phase>,
    /// Limits the wait for a head, and how long an answer may stand still.
    timer: Rc<Timer>,
    head_limit: Duration,
    /// The timer stands for the first part of `head_limit`, which is `ALERT`.
    alert: Cell<bool>,
    /// That part is over, and nothing has come.
    tired: Cell<bool>,
    /// The connection is being closed.
    pub(super) closing: Cell<bool>,
    body_limit: Rc<Cell<Duration>>,
    /// Bytes of an answer that a client has to take a second, over each `body_limit`, once it does not take all at once.
    rate: u64,
    /// How many of these are still to be taken before the time begins anew; 0 while the client keeps up.
    owed: Cell<u64>,
    /// There is no more of the answer at present: whoever has taken all of it has kept up.
    drained: Cell<bool>,
}

/// What a connection is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waiting for a request.
    Head,
    /// Waiting for what the gateway will answer, which has limits of its own.
    Deciding,
    /// Sending an answer, until its last byte has left.
    Answering,
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
            heard: Cell::new(false),
            head: RefCell::default(),
            interim: Rc::default(),
            waits: Rc::default(),
            phase: Cell::new(Phase::Head),
            timer,
            head_limit,
            alert: Cell::new(false),
            tired: Cell::new(false),
            closing: Cell::new(false),
            body_limit: Rc::new(Cell::new(body_limit)),
            rate,
            owed: Cell::new(0),
            drained: Cell::new(false),
        };
        Rc::new(stage)
    }

    /// Whether the answer that is made now is the last one on the connection, because the gateway drains.
    pub fn is_last(&self) -> bool {
        self.drain.has_begun()
    }

    pub fn interim(&self) -> &Rc<Interim> {
        &self.interim
    }

    /// How long a body may stand still; a request may have a limit of its own.
    pub fn body_limit(&self) -> &Rc<Cell<Duration>> {
        &self.body_limit
    }

    pub fn waits(&self) -> &Rc<Cell<bool>> {
        &self.waits
    }

    /// A request's head is complete; `body_bytes` are to follow, if their number is known.
    pub fn begin(&self, body_bytes: Option<u64>) {
        self.phase.set(Phase::Deciding);
        self.timer.disarm();
        self.busy.set(true);
        self.unflushed.set(true);
        self.heard.set(false);
        self.head.borrow_mut().begin(body_bytes);
    }

    /// Whether one head has come where a request is awaited, the same to the byte as that of the request before.
    pub fn repeats(&self) -> bool {
        self.phase.get() == Phase::Head && self.is_quiet() && self.head.borrow().repeats()
    }

    /// Bytes have come. Fails where the trailers of a request are malformed: its end is not known.
    pub(super) fn receive(&self, bytes: &[u8]) -> io::Result<()> {
        let mut head = self.head.borrow_mut();
        if head.receive(bytes, self.busy.get()) {
            self.heard.set(true);
        }
        if head.has_malformed_trailers() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) }
    }

    /// Whether the target makes the next request line at least this long.
    pub(super) fn has_long_target(&self, bytes: usize) -> bool {
        self.head.borrow().has_long_target(bytes)
    }

    /// Forgets the bytes received since the last request: they are read once more.
    pub(super) fn forget_received(&self) {
        self.head.take();
    }

    /// What is wrong with the request just begun that only its bytes tell. `marks` are those of its fields, `fields` is the
    /// number of them that hyper has kept.
    pub fn doubt(&self, marks: SpecialFields, fields: usize) -> Option<RequestError> {
        let head = self.head.borrow();
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
    pub fn moved(&self) {
        self.phase.set(Phase::Answering);
        self.drained.set(false);
        if self.owed.get() == 0 {
            self.timer.arm(self.body_limit.get());
        }
    }

    /// The answer's next piece is not there yet.
    pub fn awaits_piece(&self) {
        self.drained.set(true);
    }

    /// Its answer has been handed over to the last byte.
    pub fn end(&self) {
        self.busy.set(false);
    }

    /// The last byte of the answer has left.
    pub(super) fn flushed(&self) {
        self.unflushed.set(false);
        self.owed.set(0);
        if self.phase.replace(Phase::Head) != Phase::Head {
            self.timer.arm(self.head_limit.min(ALERT));
            self.alert.set(true);
        }
    }

    /// Nothing more will be sent. What the client may still do has a limit of its own.
    pub(super) fn depart(&self) {
        self.timer.disarm();
    }

    /// Bytes were sent, or could not be: an answer that moves may take as long as it likes, if it moves
    /// as much in each of its limits as a client has to take.
    pub(super) fn sent(&self, sent: &Poll<io::Result<usize>>) {
        if self.phase.get() != Phase::Answering {
            return;
        }
        let Poll::Ready(sent) = sent else {
            if self.owed.get() == 0 {
                let limit_ms = u64::try_from(self.body_limit.get().as_millis()).unwrap_or(u64::MAX);
                self.owed.set(self.rate.saturating_mul(limit_ms) / 1000);
            }
            return;
        };
        let sent = sent.as_ref().map_or(0, |bytes| *bytes as u64);
        self.owed.set(self.owed.get().saturating_sub(sent));
        if self.owed.get() == 0 {
            self.timer.arm(self.body_limit.get());
        }
    }

    /// All that there is of an answer has been sent, and more is to come.
    pub(super) fn caught_up(&self) {
        if self.drained.get() && self.owed.replace(0) > 0 {
            self.timer.arm(self.body_limit.get());
        }
    }

    /// What a connection is late with, if anything is under way: the client does not send the rest of a head or does not
    /// take its answer, or the upstream does not go on.
    pub fn lateness(&self) -> Option<RequestError> {
        match self.phase.get() {
            Phase::Answering if self.drained.get() => Some(RequestError::ResponseTimeout),
            Phase::Answering => Some(RequestError::Stalled),
            Phase::Head if self.heard.get() => Some(RequestError::HeadTimeout),
            Phase::Head | Phase::Deciding => None,
        }
    }

    /// Whether a head took too long, or an answer stands still; wakes the task when it does.
    pub fn poll_late(&self, cx: &Context<'_>) -> bool {
        let mut late = self.phase.get() != Phase::Deciding && self.timer.poll_up(cx);
        if late && self.phase.get() == Phase::Head && self.alert.replace(false) {
            self.tired.set(!self.heard.get() && !self.closing.get());
            self.timer.prolong(self.head_limit.saturating_sub(ALERT));
            late = self.timer.poll_up(cx);
        }
        late
    }

    /// Whether a request was answered some time ago, and no byte of another has come since. Told once.
    pub fn is_tired(&self) -> bool {
        self.tired.replace(false)
    }

    /// Whether nothing of a request has come, and none was answered just now.
    pub fn is_untouched(&self) -> bool {
        self.phase.get() == Phase::Head && !self.alert.get() && !self.heard.get() && !self.closing.get()
    }

    pub(super) fn is_quiet(&self) -> bool {
        !self.busy.get() && !self.unflushed.get()
    }
}
