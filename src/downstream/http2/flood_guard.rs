//! How a client behaves on one HTTP/2 connection: what it may send beside its requests, and which of
//! them are unanswered.
//!
//! A frame that asks for no answer costs its sender next to nothing, and the gateway the work of reading it; PING and
//! SETTINGS are even answered. h2 limits some of that and answers the rest for ever. So such frames are counted here,
//! second by second. Requests are not: rules count those. This file reads no clock; time is handed in as ticks.

use crate::downstream::http2::frame_header::FrameHeader;

/// Ticks of a second.
const SECOND: u64 = 10;

/// A client earns some control frames with every stream it opens, and with what it is sent: windows are
/// opened for that, and round trips measured.
const EARNED_BY_STREAM: u32 = 8;
const BYTES_FOR_ONE: u32 = 1024;

/// What a frame of a header block adds to its payload.
const FRAME_HEAD_BYTES: u32 = 9;

/// Error codes of RST_STREAM that tell a client that it was wrong (RFC 9113, section 7): PROTOCOL_ERROR, FLOW_CONTROL_ERROR,
/// STREAM_CLOSED, FRAME_SIZE_ERROR and REFUSED_STREAM.
pub fn blames_client(code: u32) -> bool {
    matches!(code, 1 | 3 | 5 | 6 | 7)
}

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
    /// Requests that are malformed, that have too large a head, or that there is no room for.
    BadRequest,
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
            Abuse::BadRequest => "bad_request",
            Abuse::Unknown => "unknown",
        }
    }
}

/// What a connection may do in a second.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Streams that the client resets.
    pub resets: u32,
    /// Requests that are refused for their heads, and streams that the gateway resets because of what the client has sent.
    pub bad_requests: u32,
    pub control: u32,
    /// Of one header block, as it comes, with the heads of its frames.
    pub block_bytes: u32,
}

/// A request whose answer has not been sent to its end.
#[derive(Clone, Copy, Debug)]
struct PendingStream {
    stream: u32,
    /// Of its head, as far as it has come to the streams.
    head_bytes: usize,
    rejection: Option<HeadRejection>,
}

/// Why a request is not served whose head has come to the streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadRejection {
    TooLarge,
    /// All heads of the connection are.
    ConnectionFull,
}

/// What was seen of a connection.
#[derive(Debug)]
pub struct FloodGuard {
    budget: Budget,
    /// The tick at which the second began.
    second_start: u64,
    resets: u32,
    bad_requests: u32,
    control: u32,
    /// Control frames that were earned in this second.
    earned: u32,
    /// Bytes sent that have not earned anything yet.
    sent: u32,
    /// Bytes of the header block that is under way; `None` between blocks.
    block_bytes_received: Option<u32>,
    /// The last block ends with the frame that is under way.
    block_ends: bool,
    /// A frame has come.
    has_first_frame: bool,
    last_stream: u32,
    /// There are few.
    pending: Vec<PendingStream>,
    /// Of all their heads.
    head_bytes: usize,
    /// So many of them have a flaw.
    rejected_heads: usize,
}

impl FloodGuard {
    pub fn new(budget: Budget, tick: u64) -> FloodGuard {
        FloodGuard {
            budget,
            second_start: tick,
            resets: 0,
            bad_requests: 0,
            control: 0,
            earned: 0,
            sent: 0,
            block_bytes_received: None,
            block_ends: false,
            has_first_frame: false,
            last_stream: 0,
            pending: Vec::new(),
            head_bytes: 0,
            rejected_heads: 0,
        }
    }

    /// Of the heads of all requests that are not answered yet.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// What is wrong with the head of a request.
    pub fn rejection_of(&self, stream: u32) -> Option<HeadRejection> {
        if self.rejected_heads == 0 {
            return None;
        }
        self.pending.iter().find(|known| known.stream == stream).and_then(|known| known.rejection)
    }

    /// The head of a request was read.
    pub fn record_head(&mut self, stream: u32, bytes: usize, flaw: Option<HeadRejection>) {
        if let Some(known) = self.pending.iter_mut().rev().find(|known| known.stream == stream) {
            (known.head_bytes, known.rejection) = (bytes, flaw);
            self.head_bytes += bytes;
            self.rejected_heads += usize::from(flaw.is_some());
        }
    }

    /// Whether the client has come to its first frame.
    pub fn has_first_frame(&self) -> bool {
        self.has_first_frame
    }

    /// Whether a request is on its way to be answered.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The number of the last stream that the client opened; 0 before the first.
    pub fn last_stream(&self) -> u32 {
        self.last_stream
    }

    /// Whether the head of a request has begun and not ended.
    pub fn is_in_head(&self) -> bool {
        self.block_bytes_received.is_some()
    }

    /// The frame that was heard last has come as a whole.
    pub fn complete_frame(&mut self) {
        if self.block_ends {
            self.block_bytes_received = None;
            self.block_ends = false;
        }
    }

    /// A frame begins to come.
    pub fn record_received(&mut self, frame: FrameHeader, tick: u64) -> Option<Abuse> {
        self.roll_second(tick);
        self.has_first_frame = true;
        self.complete_frame();
        match frame.kind {
            FrameHeader::HEADERS => {
                if frame.stream > self.last_stream {
                    // h2 refuses requests beyond the streams that there may be, and ignores all once it leaves.
                    if self.pending.len() >= self.budget.bad_requests as usize {
                        return Some(Abuse::BadRequest);
                    }
                    self.last_stream = frame.stream;
                    self.pending.push(PendingStream { stream: frame.stream, head_bytes: 0, rejection: None });
                    self.earned = self.earned.saturating_add(EARNED_BY_STREAM);
                }
                self.block_bytes_received = Some(0);
                self.extend_block(frame)
            }
            FrameHeader::CONTINUATION => self.extend_block(frame),
            FrameHeader::DATA if frame.length > 0 || frame.ends_stream() => None,
            FrameHeader::DATA => self.record_control_frame(Abuse::EmptyData),
            FrameHeader::RST_STREAM => {
                self.finish_stream(frame.stream);
                self.resets += 1;
                (self.resets > self.budget.resets).then_some(Abuse::Reset)
            }
            // h2 takes as many as were asked for.
            FrameHeader::SETTINGS if frame.is_acknowledgement() => None,
            // It takes any number of answers to a PING that was never sent.
            FrameHeader::PING => self.record_control_frame(Abuse::Ping),
            FrameHeader::SETTINGS => self.record_control_frame(Abuse::Settings),
            FrameHeader::PRIORITY => self.record_control_frame(Abuse::Priority),
            FrameHeader::WINDOW_UPDATE => self.record_control_frame(Abuse::WindowUpdate),
            _ => self.record_control_frame(Abuse::Unknown),
        }
    }

    /// A frame begins to be sent.
    pub fn record_sent_frame(&mut self, frame: FrameHeader, tick: u64) -> Option<Abuse> {
        if frame.ends_stream() || frame.kind == FrameHeader::RST_STREAM {
            self.finish_stream(frame.stream);
        }
        if frame.kind == FrameHeader::RST_STREAM && blames_client(frame.code) {
            return self.bad_request(tick);
        }
        None
    }

    /// A request was bad, or its stream.
    pub fn bad_request(&mut self, tick: u64) -> Option<Abuse> {
        self.roll_second(tick);
        self.bad_requests += 1;
        (self.bad_requests > self.budget.bad_requests).then_some(Abuse::BadRequest)
    }

    fn roll_second(&mut self, tick: u64) {
        if tick >= self.second_start + SECOND {
            self.second_start = tick;
            (self.resets, self.bad_requests, self.control, self.earned) = (0, 0, 0, 0);
        }
    }

    /// So many bytes were sent.
    pub fn record_sent_bytes(&mut self, bytes: usize) {
        let sent = self.sent.saturating_add(bytes as u32);
        self.earned = self.earned.saturating_add(sent / BYTES_FOR_ONE);
        self.sent = sent % BYTES_FOR_ONE;
    }

    fn extend_block(&mut self, frame: FrameHeader) -> Option<Abuse> {
        let bytes = self.block_bytes_received.unwrap_or(0).saturating_add(frame.length + FRAME_HEAD_BYTES);
        self.block_bytes_received = Some(bytes);
        self.block_ends = frame.ends_head();
        (bytes > self.budget.block_bytes).then_some(Abuse::Continuation)
    }

    fn record_control_frame(&mut self, kind: Abuse) -> Option<Abuse> {
        self.control += 1;
        (self.control > self.budget.control.saturating_add(self.earned)).then_some(kind)
    }

    fn finish_stream(&mut self, stream: u32) {
        if let Some(at) = self.pending.iter().position(|known| known.stream == stream) {
            let known = self.pending.swap_remove(at);
            self.head_bytes -= known.head_bytes;
            self.rejected_heads -= usize::from(known.rejection.is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { resets: 3, bad_requests: 3, control: 5, block_bytes: 64 * 1024 };

    fn frame(kind: u8, flags: u8, stream: u32, length: u32) -> FrameHeader {
        FrameHeader { kind, flags, stream, length, code: 0 }
    }

    #[test]
    fn what_is_over_the_budget_of_a_second_is_told_by_its_kind() {
        for (kind, flags, abuse) in [
            (FrameHeader::PING, 0, Abuse::Ping),
            (FrameHeader::PING, 1, Abuse::Ping),
            (FrameHeader::SETTINGS, 0, Abuse::Settings),
            (FrameHeader::PRIORITY, 0, Abuse::Priority),
            (FrameHeader::WINDOW_UPDATE, 0, Abuse::WindowUpdate),
            (FrameHeader::DATA, 0, Abuse::EmptyData),
            (0xfa, 0, Abuse::Unknown),
        ] {
            let mut conduct = FloodGuard::new(BUDGET, 7);
            for tick in [7, 17, 27] {
                (0..5).for_each(|_| {
                    assert_eq!(conduct.record_received(frame(kind, flags, 0, 0), tick), None, "{abuse:?}")
                });
            }
            assert_eq!(conduct.record_received(frame(kind, flags, 0, 0), 36), Some(abuse));
        }
        let mut conduct = FloodGuard::new(BUDGET, 0);
        for n in 1..=3 {
            assert_eq!(conduct.record_received(frame(FrameHeader::HEADERS, 5, 2 * n - 1, 10), 0), None);
            assert_eq!(conduct.record_received(frame(FrameHeader::RST_STREAM, 0, 2 * n - 1, 4), 0), None);
        }
        assert!(!conduct.is_busy());
        assert_eq!(conduct.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 9), Some(Abuse::Reset));
        assert_eq!(conduct.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 10), None);
    }

    #[test]
    fn requests_answers_and_acknowledgements_are_free() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        for n in 0..1000 {
            assert_eq!(conduct.record_received(frame(FrameHeader::HEADERS, 4, 2 * n + 1, 10), 0), None);
            assert_eq!(conduct.record_received(frame(FrameHeader::DATA, 0, 2 * n + 1, 10), 0), None);
            assert_eq!(conduct.record_received(frame(FrameHeader::DATA, 1, 2 * n + 1, 0), 0), None);
            assert_eq!(conduct.record_received(frame(FrameHeader::PING, 1, 0, 8), 0), None);
            assert_eq!(conduct.record_sent_frame(frame(FrameHeader::HEADERS, 5, 2 * n + 1, 10), 0), None);
        }
        assert!(!conduct.is_busy() && !conduct.is_in_head());
    }

    #[test]
    fn streams_and_answers_earn_control_frames() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        conduct.record_received(frame(FrameHeader::HEADERS, 5, 1, 10), 0);
        (0..4).for_each(|_| conduct.record_sent_bytes(512));
        let allowed =
            (0..100).take_while(|_| conduct.record_received(frame(FrameHeader::WINDOW_UPDATE, 0, 0, 4), 0).is_none());
        assert_eq!(allowed.count(), 5 + 8 + 2);
    }

    #[test]
    fn bad_requests_are_counted_and_forgotten_with_their_second() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        let reset = |code| FrameHeader { code, ..frame(FrameHeader::RST_STREAM, 0, 1, 4) };
        // A stream that ends because the client cancelled it, or because an upstream failed, is no abuse.
        (0..9).for_each(|code| {
            let expected = (code == 6 || code == 7).then_some(Abuse::BadRequest);
            assert_eq!(conduct.record_sent_frame(reset(code), 9), expected, "{code}");
        });
        assert_eq!(conduct.record_sent_frame(reset(1), 10), None);
    }

    #[test]
    fn requests_that_nobody_answers_have_an_end() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        let mut hear =
            |n: u32| conduct.record_received(frame(FrameHeader::HEADERS, 5, 2 * n + 1, 10), u64::from(n) * SECOND);
        assert_eq!([0, 1, 2, 3].map(&mut hear), [None, None, None, Some(Abuse::BadRequest)]);
    }

    #[test]
    fn heads_are_known_until_they_are_answered() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        for (stream, flaw) in [(1, None), (3, Some(HeadRejection::TooLarge)), (5, None)] {
            conduct.record_received(frame(FrameHeader::HEADERS, 5, stream, 10), 0);
            conduct.record_head(stream, 100, flaw);
        }
        assert_eq!((conduct.rejection_of(1), conduct.rejection_of(3)), (None, Some(HeadRejection::TooLarge)));
        assert_eq!(conduct.head_bytes(), 300);
        assert_eq!(conduct.record_sent_frame(frame(FrameHeader::HEADERS, 5, 3, 10), 0), None);
        conduct.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 0);
        assert_eq!((conduct.rejection_of(3), conduct.head_bytes()), (None, 100));
    }

    #[test]
    fn a_head_ends_with_the_last_byte_of_its_last_frame() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        assert!(!conduct.has_first_frame());
        conduct.record_received(frame(FrameHeader::HEADERS, 1, 1, 10), 0);
        conduct.complete_frame();
        assert!(conduct.has_first_frame() && conduct.is_in_head() && conduct.is_busy());
        conduct.record_received(frame(FrameHeader::CONTINUATION, 4, 1, 10), 0);
        assert!(conduct.is_in_head());
        conduct.complete_frame();
        assert!(!conduct.is_in_head());
    }

    #[test]
    fn a_head_that_does_not_end_is_too_long_at_some_point() {
        let mut conduct = FloodGuard::new(BUDGET, 0);
        conduct.record_received(frame(FrameHeader::HEADERS, 0, 1, 16_000), 0);
        let allowed = (0..100)
            .take_while(|_| conduct.record_received(frame(FrameHeader::CONTINUATION, 0, 1, 16_000), 0).is_none());
        assert_eq!(allowed.count(), 3);
    }
}
