//! Limits on what a client may send on one HTTP/2 connection beside its requests, and the list of its unfinished requests.
//!
//! A control frame costs its sender almost nothing, and the gateway the work of reading it; PING and SETTINGS even get a
//! response. h2 limits some frames and responds to the rest without limit. So these frames are counted here per second.
//! Requests are counted by rules, not here. This file reads no clock: the caller passes ticks.

use crate::downstream::http2::frame_header::FrameHeader;

/// Ticks per second.
const SECOND: u64 = 10;

/// Additional control frames that a client may send for each stream that it opens, and for each so many bytes sent to it: it
/// sends WINDOW_UPDATE for them, and PING to measure round trips.
const EARNED_BY_STREAM: u32 = 8;
const BYTES_FOR_ONE: u32 = 1024;

/// Length of a frame header, which counts as part of a header block.
const FRAME_HEAD_BYTES: u32 = 9;

/// Whether an error code of RST_STREAM blames the client (RFC 9113, section 7): PROTOCOL_ERROR, FLOW_CONTROL_ERROR,
/// STREAM_CLOSED, FRAME_SIZE_ERROR and REFUSED_STREAM.
pub fn blames_client(code: u32) -> bool {
    matches!(code, 1 | 3 | 5 | 6 | 7)
}

/// What a client sent too often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Abuse {
    Reset,
    Ping,
    Settings,
    Priority,
    WindowUpdate,
    EmptyData,
    Continuation,
    /// Requests that are malformed, have too large a head, or exceed the limits of the connection.
    BadRequest,
    Unknown,
}

impl Abuse {
    /// The value of the label `kind` in metrics.
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

/// Limits of a connection per second.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Streams reset by the client.
    pub resets: u32,
    /// Requests rejected because of their heads, and streams that the gateway resets because of what the client sent.
    pub bad_requests: u32,
    /// Control frames, beside those earned.
    pub control: u32,
    /// Size of one encoded header block, with its frame headers (not per second).
    pub block_bytes: u32,
}

/// A request whose response was not sent completely.
#[derive(Clone, Copy, Debug)]
struct PendingStream {
    stream: u32,
    /// Size of its decoded head; 0 until the head is complete.
    head_bytes: usize,
    rejection: Option<HeadRejection>,
    /// The gateway handles the request.
    is_accepted: bool,
}

/// Why a request with a valid head is not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadRejection {
    TooLarge,
    /// The heads of all requests on the connection are too large together.
    ConnectionFull,
}

/// Counts of one connection.
#[derive(Debug)]
pub struct FloodGuard {
    budget: Budget,
    /// The tick at which the current second began.
    second_start: u64,
    resets: u32,
    bad_requests: u32,
    control: u32,
    /// Additional control frames allowed in this second.
    earned: u32,
    /// Bytes sent that have not earned a control frame yet.
    sent: u32,
    /// Bytes of the header block being received; `None` between blocks.
    block_bytes_received: Option<u32>,
    /// The header block ends with the current frame.
    block_ends: bool,
    /// A frame was received.
    has_first_frame: bool,
    last_stream: u32,
    /// Unfinished requests. There are few, so that a search is cheap.
    pending: Vec<PendingStream>,
    /// Size of all their heads.
    head_bytes: usize,
    /// How many of them have a rejection.
    rejected_heads: usize,
    /// Codes of the resets of requests that were not accepted.
    reset_codes: Vec<u32>,
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
            reset_codes: Vec::new(),
        }
    }

    /// Size of the decoded heads of all unfinished requests.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// Why a request is not served, if it is not.
    pub fn rejection_of(&self, stream: u32) -> Option<HeadRejection> {
        if self.rejected_heads == 0 {
            return None;
        }
        self.pending.iter().find(|request| request.stream == stream).and_then(|request| request.rejection)
    }

    /// The gateway handles a request.
    pub fn accept(&mut self, stream: u32) {
        if let Some(request) = self.pending.iter_mut().rev().find(|request| request.stream == stream) {
            request.is_accepted = true;
        }
    }

    /// The error codes with which requests were reset since the last call, before they were accepted.
    pub fn take_reset_codes(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.reset_codes)
    }

    /// Records the decoded head of a request.
    pub fn record_head(&mut self, stream: u32, bytes: usize, rejection: Option<HeadRejection>) {
        if let Some(request) = self.pending.iter_mut().rev().find(|request| request.stream == stream) {
            (request.head_bytes, request.rejection) = (bytes, rejection);
            self.head_bytes += bytes;
            self.rejected_heads += usize::from(rejection.is_some());
        }
    }

    /// Whether the client has sent its first frame.
    pub fn has_first_frame(&self) -> bool {
        self.has_first_frame
    }

    /// Whether a request is unfinished.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The number of the last stream that the client opened; 0 before the first.
    pub fn last_stream(&self) -> u32 {
        self.last_stream
    }

    /// Whether a header block has begun and not ended.
    pub fn is_in_head(&self) -> bool {
        self.block_bytes_received.is_some()
    }

    /// Records that the last frame was received completely.
    pub fn complete_frame(&mut self) {
        if self.block_ends {
            self.block_bytes_received = None;
            self.block_ends = false;
        }
    }

    /// Records a received frame header. Returns the abuse, if a limit is exceeded.
    pub fn record_received(&mut self, frame: FrameHeader, tick: u64) -> Option<Abuse> {
        self.roll_second(tick);
        self.has_first_frame = true;
        self.complete_frame();
        match frame.kind {
            FrameHeader::HEADERS => {
                if frame.stream > self.last_stream {
                    // h2 rejects streams beyond the limit, and ignores all after GOAWAY.
                    if self.pending.len() >= self.budget.bad_requests as usize {
                        return Some(Abuse::BadRequest);
                    }
                    self.last_stream = frame.stream;
                    self.pending.push(PendingStream {
                        stream: frame.stream,
                        head_bytes: 0,
                        rejection: None,
                        is_accepted: false,
                    });
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
            // h2 accepts only as many as it has sent SETTINGS.
            FrameHeader::SETTINGS if frame.is_acknowledgement() => None,
            // Acknowledgements count too: h2 accepts any number of them, even without a PING.
            FrameHeader::PING => self.record_control_frame(Abuse::Ping),
            FrameHeader::SETTINGS => self.record_control_frame(Abuse::Settings),
            FrameHeader::PRIORITY => self.record_control_frame(Abuse::Priority),
            FrameHeader::WINDOW_UPDATE => self.record_control_frame(Abuse::WindowUpdate),
            _ => self.record_control_frame(Abuse::Unknown),
        }
    }

    /// Records a sent frame header.
    pub fn record_sent_frame(&mut self, frame: FrameHeader, tick: u64) -> Option<Abuse> {
        let is_new = |request: &PendingStream| request.stream == frame.stream && !request.is_accepted;
        if frame.kind == FrameHeader::RST_STREAM && self.pending.iter().any(is_new) {
            self.reset_codes.push(frame.code);
        }
        if frame.ends_stream() || frame.kind == FrameHeader::RST_STREAM {
            self.finish_stream(frame.stream);
        }
        if frame.kind == FrameHeader::RST_STREAM && blames_client(frame.code) {
            return self.bad_request(tick);
        }
        None
    }

    /// Counts a bad request.
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

    /// Counts sent bytes, which earn control frames.
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
        if let Some(at) = self.pending.iter().position(|request| request.stream == stream) {
            let request = self.pending.swap_remove(at);
            self.head_bytes -= request.head_bytes;
            self.rejected_heads -= usize::from(request.rejection.is_some());
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
    fn frames_beyond_the_limit_of_a_second_are_reported_by_kind() {
        for (kind, flags, abuse) in [
            (FrameHeader::PING, 0, Abuse::Ping),
            (FrameHeader::PING, 1, Abuse::Ping),
            (FrameHeader::SETTINGS, 0, Abuse::Settings),
            (FrameHeader::PRIORITY, 0, Abuse::Priority),
            (FrameHeader::WINDOW_UPDATE, 0, Abuse::WindowUpdate),
            (FrameHeader::DATA, 0, Abuse::EmptyData),
            (0xfa, 0, Abuse::Unknown),
        ] {
            let mut guard = FloodGuard::new(BUDGET, 7);
            for tick in [7, 17, 27] {
                (0..5)
                    .for_each(|_| assert_eq!(guard.record_received(frame(kind, flags, 0, 0), tick), None, "{abuse:?}"));
            }
            assert_eq!(guard.record_received(frame(kind, flags, 0, 0), 36), Some(abuse));
        }
        let mut guard = FloodGuard::new(BUDGET, 0);
        for n in 1..=3 {
            assert_eq!(guard.record_received(frame(FrameHeader::HEADERS, 5, 2 * n - 1, 10), 0), None);
            assert_eq!(guard.record_received(frame(FrameHeader::RST_STREAM, 0, 2 * n - 1, 4), 0), None);
        }
        assert!(!guard.is_busy());
        assert_eq!(guard.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 9), Some(Abuse::Reset));
        assert_eq!(guard.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 10), None);
    }

    #[test]
    fn requests_responses_and_acknowledgements_are_not_limited() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        for n in 0..1000 {
            assert_eq!(guard.record_received(frame(FrameHeader::HEADERS, 4, 2 * n + 1, 10), 0), None);
            assert_eq!(guard.record_received(frame(FrameHeader::DATA, 0, 2 * n + 1, 10), 0), None);
            assert_eq!(guard.record_received(frame(FrameHeader::DATA, 1, 2 * n + 1, 0), 0), None);
            assert_eq!(guard.record_received(frame(FrameHeader::PING, 1, 0, 8), 0), None);
            assert_eq!(guard.record_sent_frame(frame(FrameHeader::HEADERS, 5, 2 * n + 1, 10), 0), None);
        }
        assert!(!guard.is_busy() && !guard.is_in_head());
    }

    #[test]
    fn streams_and_responses_earn_control_frames() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        guard.record_received(frame(FrameHeader::HEADERS, 5, 1, 10), 0);
        (0..4).for_each(|_| guard.record_sent_bytes(512));
        let allowed =
            (0..100).take_while(|_| guard.record_received(frame(FrameHeader::WINDOW_UPDATE, 0, 0, 4), 0).is_none());
        assert_eq!(allowed.count(), 5 + 8 + 2);
    }

    #[test]
    fn bad_requests_are_counted_per_second() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        let reset = |code| FrameHeader { code, ..frame(FrameHeader::RST_STREAM, 0, 1, 4) };
        // A stream that ends because the client cancelled it, or because an upstream failed, is no abuse.
        (0..9).for_each(|code| {
            let expected = (code == 6 || code == 7).then_some(Abuse::BadRequest);
            assert_eq!(guard.record_sent_frame(reset(code), 9), expected, "{code}");
        });
        assert_eq!(guard.record_sent_frame(reset(1), 10), None);
    }

    #[test]
    fn unfinished_requests_are_limited() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        let mut receive =
            |n: u32| guard.record_received(frame(FrameHeader::HEADERS, 5, 2 * n + 1, 10), u64::from(n) * SECOND);
        assert_eq!([0, 1, 2, 3].map(&mut receive), [None, None, None, Some(Abuse::BadRequest)]);
    }

    #[test]
    fn heads_are_counted_until_their_response_is_sent() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        for (stream, rejection) in [(1, None), (3, Some(HeadRejection::TooLarge)), (5, None)] {
            guard.record_received(frame(FrameHeader::HEADERS, 5, stream, 10), 0);
            guard.record_head(stream, 100, rejection);
        }
        assert_eq!((guard.rejection_of(1), guard.rejection_of(3)), (None, Some(HeadRejection::TooLarge)));
        assert_eq!(guard.head_bytes(), 300);
        assert_eq!(guard.record_sent_frame(frame(FrameHeader::HEADERS, 5, 3, 10), 0), None);
        guard.record_received(frame(FrameHeader::RST_STREAM, 0, 5, 4), 0);
        assert_eq!((guard.rejection_of(3), guard.head_bytes()), (None, 100));
    }

    #[test]
    fn a_head_ends_with_the_last_byte_of_its_last_frame() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        assert!(!guard.has_first_frame());
        guard.record_received(frame(FrameHeader::HEADERS, 1, 1, 10), 0);
        guard.complete_frame();
        assert!(guard.has_first_frame() && guard.is_in_head() && guard.is_busy());
        guard.record_received(frame(FrameHeader::CONTINUATION, 4, 1, 10), 0);
        assert!(guard.is_in_head());
        guard.complete_frame();
        assert!(!guard.is_in_head());
    }

    #[test]
    fn a_head_without_an_end_is_limited_in_size() {
        let mut guard = FloodGuard::new(BUDGET, 0);
        guard.record_received(frame(FrameHeader::HEADERS, 0, 1, 16_000), 0);
        let allowed =
            (0..100).take_while(|_| guard.record_received(frame(FrameHeader::CONTINUATION, 0, 1, 16_000), 0).is_none());
        assert_eq!(allowed.count(), 3);
    }
}
