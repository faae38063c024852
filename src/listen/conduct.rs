//! How a client behaves on one HTTP/2 connection: what it may send beside its requests, and which of
//! them are unanswered.
//!
//! A frame that asks for no answer costs its sender next to nothing, and the gateway the work of reading it; PING and
//! SETTINGS are even answered. h2 limits some of that and answers the rest for ever. So such frames are counted here,
//! second by second. Requests are not: rules count those. This file reads no clock; time is handed in as ticks.

use super::frames::Frame;

/// Ticks of a second.
const SECOND: u64 = 10;

/// A client earns some control frames with every stream it opens, and with what it is sent: windows are
/// opened for that, and round trips measured.
const EARNED_BY_STREAM: u32 = 8;
const BYTES_FOR_ONE: u32 = 1024;

/// Of a header block that is not complete. What it may be when it is, h2 decides.
const BLOCK_MAX_BYTES: u32 = 64 * 1024;

/// What a client did too often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Abuse {
    Reset,
    Ping,
    Settings,
    Priority,
    WindowUpdate,
    EmptyData,
    Continuation,
    Unknown,
}

impl Abuse {
    /// As metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Abuse::Reset => "reset",
            Abuse::Ping => "ping",
            Abuse::Settings => "settings",
            Abuse::Priority => "priority",
            Abuse::WindowUpdate => "window_update",
            Abuse::EmptyData => "empty_data",
            Abuse::Continuation => "continuation",
            Abuse::Unknown => "unknown",
        }
    }
}

/// What a connection may do in a second.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub resets: u32,
    pub control: u32,
}

/// What was seen of a connection.
#[derive(Debug)]
pub struct Conduct {
    budget: Budget,
    /// The tick at which the second began.
    since: u64,
    resets: u32,
    control: u32,
    /// Control frames that were earned in this second.
    earned: u32,
    /// Bytes sent that have not earned anything yet.
    sent: u32,
    /// Bytes of the header block that is under way; `None` between blocks.
    block: Option<u32>,
    /// The last block ends with the frame that is under way.
    block_ends: bool,
    /// A frame has come.
    opened: bool,
    last_stream: u32,
    /// Streams whose answer has not been sent to its end. There are few.
    unanswered: Vec<u32>,
}

impl Conduct {
    pub fn new(budget: Budget, tick: u64) -> Conduct {
        Conduct {
            budget,
            since: tick,
            resets: 0,
            control: 0,
            earned: 0,
            sent: 0,
            block: None,
            block_ends: false,
            opened: false,
            last_stream: 0,
            unanswered: Vec::new(),
        }
    }

    /// Whether the client has come to its first frame.
    pub fn has_opened(&self) -> bool {
        self.opened
    }

    /// Whether a request is on its way to be answered.
    pub fn is_busy(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// The number of the last stream that the client opened; 0 before the first.
    pub fn last_stream(&self) -> u32 {
        self.last_stream
    }

    /// Whether the head of a request has begun and not ended.
    pub fn is_in_head(&self) -> bool {
        self.block.is_some()
    }

    /// The frame that was heard last has come as a whole.
    pub fn whole(&mut self) {
        if self.block_ends {
            self.block = None;
            self.block_ends = false;
        }
    }

    /// A frame begins to come.
    pub fn heard(&mut self, frame: Frame, tick: u64) -> Option<Abuse> {
        if tick >= self.since + SECOND {
            self.since = tick;
            (self.resets, self.control, self.earned) = (0, 0, 0);
        }
        self.opened = true;
        self.whole();
        match frame.kind {
            Frame::HEADERS => {
                if frame.stream > self.last_stream {
                    self.last_stream = frame.stream;
                    self.unanswered.push(frame.stream);
                    self.earned = self.earned.saturating_add(EARNED_BY_STREAM);
                }
                self.block = Some(0);
                self.head_goes_on(frame)
            }
            Frame::CONTINUATION => self.head_goes_on(frame),
            Frame::DATA if frame.length > 0 || frame.ends_stream() => None,
            Frame::DATA => self.control(Abuse::EmptyData),
            Frame::RST_STREAM => {
                self.answered(frame.stream);
                self.resets += 1;
                (self.resets > self.budget.resets).then_some(Abuse::Reset)
            }
            // h2 takes as many as were asked for.
            Frame::SETTINGS if frame.is_acknowledgement() => None,
            // It takes any number of answers to a PING that was never sent.
            Frame::PING => self.control(Abuse::Ping),
            Frame::SETTINGS => self.control(Abuse::Settings),
            Frame::PRIORITY => self.control(Abuse::Priority),
            Frame::WINDOW_UPDATE => self.control(Abuse::WindowUpdate),
            _ => self.control(Abuse::Unknown),
        }
    }

    /// A frame begins to be sent.
    pub fn said(&mut self, frame: Frame) {
        if frame.ends_stream() || frame.kind == Frame::RST_STREAM {
            self.answered(frame.stream);
        }
    }

    /// So many bytes were sent.
    pub fn sent(&mut self, bytes: usize) {
        let sent = self.sent.saturating_add(bytes as u32);
        self.earned = self.earned.saturating_add(sent / BYTES_FOR_ONE);
        self.sent = sent % BYTES_FOR_ONE;
    }

    fn head_goes_on(&mut self, frame: Frame) -> Option<Abuse> {
        let bytes = self.block.unwrap_or(0).saturating_add(frame.length);
        self.block = Some(bytes);
        self.block_ends = frame.ends_head();
        (bytes > BLOCK_MAX_BYTES).then_some(Abuse::Continuation)
    }

    fn control(&mut self, kind: Abuse) -> Option<Abuse> {
        self.control += 1;
        (self.control > self.budget.control.saturating_add(self.earned)).then_some(kind)
    }

    fn answered(&mut self, stream: u32) {
        if let Some(at) = self.unanswered.iter().position(|known| *known == stream) {
            self.unanswered.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { resets: 3, control: 5 };

    fn frame(kind: u8, flags: u8, stream: u32, length: u32) -> Frame {
        Frame { kind, flags, stream, length }
    }

    #[test]
    fn what_is_over_the_budget_of_a_second_is_told_by_its_kind() {
        for (kind, flags, abuse) in [
            (Frame::PING, 0, Abuse::Ping),
            (Frame::PING, 1, Abuse::Ping),
            (Frame::SETTINGS, 0, Abuse::Settings),
            (Frame::PRIORITY, 0, Abuse::Priority),
            (Frame::WINDOW_UPDATE, 0, Abuse::WindowUpdate),
            (Frame::DATA, 0, Abuse::EmptyData),
            (0xfa, 0, Abuse::Unknown),
        ] {
            let mut conduct = Conduct::new(BUDGET, 7);
            for tick in [7, 17, 27] {
                (0..5).for_each(|_| assert_eq!(conduct.heard(frame(kind, flags, 0, 0), tick), None, "{abuse:?}"));
            }
            assert_eq!(conduct.heard(frame(kind, flags, 0, 0), 36), Some(abuse));
        }
        let mut conduct = Conduct::new(BUDGET, 0);
        for n in 1..=3 {
            assert_eq!(conduct.heard(frame(Frame::HEADERS, 5, 2 * n - 1, 10), 0), None);
            assert_eq!(conduct.heard(frame(Frame::RST_STREAM, 0, 2 * n - 1, 4), 0), None);
        }
        assert!(!conduct.is_busy());
        assert_eq!(conduct.heard(frame(Frame::RST_STREAM, 0, 5, 4), 9), Some(Abuse::Reset));
        assert_eq!(conduct.heard(frame(Frame::RST_STREAM, 0, 5, 4), 10), None);
    }

    #[test]
    fn requests_answers_and_acknowledgements_are_free() {
        let mut conduct = Conduct::new(BUDGET, 0);
        for n in 0..1000 {
            assert_eq!(conduct.heard(frame(Frame::HEADERS, 4, 2 * n + 1, 10), 0), None);
            assert_eq!(conduct.heard(frame(Frame::DATA, 0, 2 * n + 1, 10), 0), None);
            assert_eq!(conduct.heard(frame(Frame::DATA, 1, 2 * n + 1, 0), 0), None);
            assert_eq!(conduct.heard(frame(Frame::PING, 1, 0, 8), 0), None);
            conduct.said(frame(Frame::HEADERS, 5, 2 * n + 1, 10));
        }
        assert!(!conduct.is_busy() && !conduct.is_in_head());
    }

    #[test]
    fn streams_and_answers_earn_control_frames() {
        let mut conduct = Conduct::new(BUDGET, 0);
        conduct.heard(frame(Frame::HEADERS, 5, 1, 10), 0);
        (0..4).for_each(|_| conduct.sent(512));
        let allowed = (0..100).take_while(|_| conduct.heard(frame(Frame::WINDOW_UPDATE, 0, 0, 4), 0).is_none());
        assert_eq!(allowed.count(), 5 + 8 + 2);
    }

    #[test]
    fn a_head_ends_with_the_last_byte_of_its_last_frame() {
        let mut conduct = Conduct::new(BUDGET, 0);
        assert!(!conduct.has_opened());
        conduct.heard(frame(Frame::HEADERS, 1, 1, 10), 0);
        conduct.whole();
        assert!(conduct.has_opened() && conduct.is_in_head() && conduct.is_busy());
        conduct.heard(frame(Frame::CONTINUATION, 4, 1, 10), 0);
        assert!(conduct.is_in_head());
        conduct.whole();
        assert!(!conduct.is_in_head());
    }

    #[test]
    fn a_head_that_does_not_end_is_too_long_at_some_point() {
        let mut conduct = Conduct::new(BUDGET, 0);
        conduct.heard(frame(Frame::HEADERS, 0, 1, 16_000), 0);
        let allowed = (0..100).take_while(|_| conduct.heard(frame(Frame::CONTINUATION, 0, 1, 16_000), 0).is_none());
        assert_eq!(allowed.count(), 3);
    }
}
