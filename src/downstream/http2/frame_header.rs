//! HTTP/2 frame headers (RFC 9113, section 4.1), read from a stream of bytes. Payloads are skipped and nothing is copied.
//!
//! This file knows no limits and no socket; `flood_guard` decides what is too much.

/// The connection preface of a client (RFC 9113, section 3.4).
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Length of a frame header.
pub const FRAME_HEADER_BYTES: usize = 9;

/// Length of the error code in RST_STREAM.
const CODE_BYTES: usize = 4;

/// One frame header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    /// Payload length in bytes.
    pub length: u32,
    /// Error code of RST_STREAM (RFC 9113, section 7); 0 for other reader.
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

    /// Decodes a frame header.
    pub fn read(head: &[u8; FRAME_HEADER_BYTES]) -> FrameHeader {
        let [a, b, c, kind, flags, s0, s1, s2, s3] = *head;
        // The highest bit of the stream is reserved.
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        FrameHeader { kind, flags, stream, length: u32::from_be_bytes([0, a, b, c]), code: 0 }
    }

    /// Encodes the header of HEADERS or CONTINUATION, for a block that replaces the one beginning with `first`.
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

    /// The acknowledgement of a SETTINGS or PING.
    pub fn is_acknowledgement(&self) -> bool {
        matches!(self.kind, FrameHeader::SETTINGS | FrameHeader::PING) && self.flags & FrameHeader::ACK != 0
    }
}

/// Reads frame headers from a stream of bytes that arrives in pieces.
#[derive(Debug)]
pub struct FrameReader {
    /// The header being read; for RST_STREAM with its error code.
    header: [u8; FRAME_HEADER_BYTES + CODE_BYTES],
    /// Bytes of `head` received so far.
    filled: usize,
    /// Bytes to skip before the next frame header.
    skip: usize,
}

impl FrameReader {
    /// For the bytes of a client, which begin with the preface.
    pub fn for_client() -> FrameReader {
        FrameReader { header: [0; FRAME_HEADER_BYTES + CODE_BYTES], filled: 0, skip: PREFACE.len() }
    }

    /// For the bytes of a server.
    pub fn for_server() -> FrameReader {
        FrameReader { header: [0; FRAME_HEADER_BYTES + CODE_BYTES], filled: 0, skip: 0 }
    }

    /// Reads the next bytes, and calls `on_frame` for every complete frame header.
    pub fn read_frames(&mut self, mut bytes: &[u8], mut on_frame: impl FnMut(FrameHeader)) {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let wanted =
                if self.filled >= FRAME_HEADER_BYTES { FRAME_HEADER_BYTES + CODE_BYTES } else { FRAME_HEADER_BYTES };
            let taken = (wanted - self.filled).min(bytes.len());
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < wanted {
                continue;
            }
            let [head @ .., c0, c1, c2, c3] = self.header;
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
            on_frame(frame);
        }
    }

    /// Whether the last reported frame was received completely.
    pub fn is_frame_complete(&self) -> bool {
        self.skip == 0
    }

    /// Whether the next byte begins a frame.
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
    fn frames_cut_anywhere_are_reported() {
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
            let (mut reader, mut reported) = (FrameReader::for_client(), Vec::new());
            all.chunks(size).for_each(|piece| reader.read_frames(piece, |frame| reported.push(frame)));
            assert_eq!(reported, expected, "pieces of {size}");
            assert!(reader.is_between_frames());
        }
        assert!(expected[1].ends_stream() && expected[1].ends_head() && expected[2].ends_stream());
        assert!(expected[3].is_acknowledgement() && !expected[3].ends_stream());
    }

    #[test]
    fn a_frame_is_complete_with_its_last_byte() {
        let (mut reader, all) = (FrameReader::for_server(), bytes(FrameHeader::HEADERS, 4, 1, 3));
        reader.read_frames(&all[..11], |_| {});
        assert!(!reader.is_frame_complete() && !reader.is_between_frames());
        reader.read_frames(&all[11..], |_| {});
        assert!(reader.is_frame_complete() && reader.is_between_frames());
        reader.read_frames(&all[..4], |_| {});
        assert!(reader.is_frame_complete() && !reader.is_between_frames());
    }
}
