//! HTTP/2 frames as they pass by (RFC 9113, section 4.1): nine bytes say what a frame is, the rest is
//! skipped. Nothing is kept and nothing is copied.
//!
//! This file knows no limits and no socket; what is too much is `conduct`'s business.

/// What every client sends before its first frame (RFC 9113, section 3.4).
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const FRAME_HEADER_BYTES: usize = 9;

/// What RST_STREAM says.
const CODE_BYTES: usize = 4;

/// The head of one frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    /// Of what follows the head, in bytes.
    pub length: u32,
    /// Of RST_STREAM: why the stream ends (RFC 9113, section 7). 0 for any other frame.
    pub code: u32,
}

impl FrameHeader {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;

    const ACK: u8 = 1;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    const PADDED: u8 = 8;
    const HAS_PRIORITY: u8 = 0x20;

    pub fn read(head: &[u8; FRAME_HEADER_BYTES]) -> FrameHeader {
        let [a, b, c, kind, flags, s0, s1, s2, s3] = *head;
        // The highest bit of the stream is reserved.
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        FrameHeader { kind, flags, stream, length: u32::from_be_bytes([0, a, b, c]), code: 0 }
    }

    /// The head of HEADERS or CONTINUATION in a block that takes the place of one which began with `first`.
    pub fn header(kind: u8, first: FrameHeader, length: usize, is_last: bool) -> [u8; FRAME_HEADER_BYTES] {
        let [_, a, b, c] = (length as u32).to_be_bytes();
        let [s0, s1, s2, s3] = first.stream.to_be_bytes();
        let mut flags = if is_last { FrameHeader::END_HEADERS } else { 0 };
        if kind == FrameHeader::HEADERS {
            flags |= first.flags & FrameHeader::END_STREAM;
        }
        [a, b, c, kind, flags, s0, s1, s2, s3]
    }

    pub fn ends_stream(&self) -> bool {
        matches!(self.kind, FrameHeader::DATA | FrameHeader::HEADERS) && self.flags & FrameHeader::END_STREAM != 0
    }

    pub fn ends_head(&self) -> bool {
        self.flags & FrameHeader::END_HEADERS != 0
    }

    pub fn is_padded(&self) -> bool {
        self.flags & FrameHeader::PADDED != 0
    }

    pub fn has_priority(&self) -> bool {
        self.flags & FrameHeader::HAS_PRIORITY != 0
    }

    /// The answer to a SETTINGS or PING of ours.
    pub fn is_acknowledgement(&self) -> bool {
        matches!(self.kind, FrameHeader::SETTINGS | FrameHeader::PING) && self.flags & FrameHeader::ACK != 0
    }
}

/// Where a stream of frames stands.
#[derive(Debug)]
pub struct FrameReader {
    /// Of RST_STREAM, its code as well.
    head: [u8; FRAME_HEADER_BYTES + CODE_BYTES],
    /// Bytes of it that have come.
    filled: usize,
    /// Bytes that are passed over before the next head.
    skip: usize,
}

impl FrameReader {
    /// What a client sends: a preface first.
    pub fn for_client() -> FrameReader {
        FrameReader { head: [0; FRAME_HEADER_BYTES + CODE_BYTES], filled: 0, skip: PREFACE.len() }
    }

    pub fn for_server() -> FrameReader {
        FrameReader { head: [0; FRAME_HEADER_BYTES + CODE_BYTES], filled: 0, skip: 0 }
    }

    /// Looks at the next bytes, and tells of every frame whose head is complete.
    pub fn read_frames(&mut self, mut bytes: &[u8], mut tell: impl FnMut(FrameHeader)) {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let whole =
                if self.filled >= FRAME_HEADER_BYTES { FRAME_HEADER_BYTES + CODE_BYTES } else { FRAME_HEADER_BYTES };
            let taken = (whole - self.filled).min(bytes.len());
            self.head[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < whole {
                continue;
            }
            let [head @ .., c0, c1, c2, c3] = self.head;
            let mut frame = FrameHeader::read(&head);
            self.skip = frame.length as usize;
            if frame.kind == FrameHeader::RST_STREAM && self.skip >= CODE_BYTES {
                if self.filled == FRAME_HEADER_BYTES {
                    self.skip = 0;
                    continue;
                }
                frame.code = u32::from_be_bytes([c0, c1, c2, c3]);
                self.skip -= CODE_BYTES;
            }
            self.filled = 0;
            tell(frame);
        }
    }

    /// Whether the last frame that was told of has come as a whole.
    pub fn is_frame_complete(&self) -> bool {
        self.skip == 0
    }

    /// Whether another frame could begin here.
    pub fn is_between_frames(&self) -> bool {
        self.skip == 0 && self.filled == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(kind: u8, flags: u8, stream: u32, length: usize) -> Vec<u8> {
        let mut bytes = (length as u32).to_be_bytes()[1..].to_vec();
        bytes.extend([kind, flags]);
        bytes.extend(stream.to_be_bytes());
        bytes.extend(vec![0xff; length]);
        bytes
    }

    #[test]
    fn frames_are_told_wherever_they_are_cut() {
        let mut all = PREFACE.to_vec();
        all.extend(bytes(FrameHeader::SETTINGS, 0, 0, 18));
        all.extend(bytes(FrameHeader::HEADERS, 5, 1, 300));
        all.extend(bytes(FrameHeader::DATA, 1, 0x8000_0003, 70_000));
        all.extend(bytes(FrameHeader::PING, 1, 0, 8));
        all.extend(bytes(FrameHeader::RST_STREAM, 0, 5, 4));
        let expected = [
            FrameHeader { kind: FrameHeader::SETTINGS, flags: 0, stream: 0, length: 18, code: 0 },
            FrameHeader { kind: FrameHeader::HEADERS, flags: 5, stream: 1, length: 300, code: 0 },
            FrameHeader { kind: FrameHeader::DATA, flags: 1, stream: 3, length: 70_000, code: 0 },
            FrameHeader { kind: FrameHeader::PING, flags: 1, stream: 0, length: 8, code: 0 },
            FrameHeader { kind: FrameHeader::RST_STREAM, flags: 0, stream: 5, length: 4, code: 0xffff_ffff },
        ];
        for size in [1, 2, 8, 9, 10, 25, 1000, all.len()] {
            let (mut frames, mut told) = (FrameReader::for_client(), Vec::new());
            all.chunks(size).for_each(|piece| frames.read_frames(piece, |frame| told.push(frame)));
            assert_eq!(told, expected, "pieces of {size}");
            assert!(frames.is_between_frames());
        }
        assert!(expected[1].ends_stream() && expected[1].ends_head() && expected[2].ends_stream());
        assert!(expected[3].is_acknowledgement() && !expected[3].ends_stream());
    }

    #[test]
    fn a_frame_is_whole_with_its_last_byte() {
        let (mut frames, all) = (FrameReader::for_server(), bytes(FrameHeader::HEADERS, 4, 1, 3));
        frames.read_frames(&all[..11], |_| {});
        assert!(!frames.is_frame_complete() && !frames.is_between_frames());
        frames.read_frames(&all[11..], |_| {});
        assert!(frames.is_frame_complete() && frames.is_between_frames());
        frames.read_frames(&all[..4], |_| {});
        assert!(frames.is_frame_complete() && !frames.is_between_frames());
    }
}
