//! Filters the bytes of a client between its socket and h2, so that h2 does not end the connection for errors of one stream.
//!
//! A header block is held until it is complete, and checked by `hpack`. An empty DATA frame is replaced by a frame of an
//! unknown type: h2 accepts only a hundred of them per connection, and `flood_guard` limits them per second. Other bytes pass
//! unchanged. This file knows no socket.

use crate::downstream::http2::frame_header::{FRAME_HEADER_BYTES, FrameHeader, PREFACE};
use crate::downstream::http2::hpack::{BlockError, HeadLimits, HpackScanner, MALFORMED, ScanResult};

/// An undefined frame type, which receivers ignore (RFC 9113, section 4.1).
const UNKNOWN: u8 = 0xff;
/// The largest frame payload that h2 accepts.
const PAYLOAD_MAX_BYTES: usize = 16 * 1024;
/// HEADERS on stream 0: a connection error of type PROTOCOL_ERROR.
const INVALID_FRAME: [u8; FRAME_HEADER_BYTES] = [0, 0, 0, FrameHeader::HEADERS, 4, 0, 0, 0, 0];
/// HEADERS beyond the frame size: a connection error of type FRAME_SIZE_ERROR.
const OVERSIZED_FRAME: [u8; FRAME_HEADER_BYTES] = [0xff, 0xff, 0xff, FrameHeader::HEADERS, 4, 0, 0, 0, 1];

/// A complete header block.
#[derive(Clone, Copy, Debug)]
pub struct HeaderBlock {
    pub stream: u32,
    /// The block opens its stream; else it is a trailer section.
    pub is_head: bool,
    /// Size of its fields, as limits count it.
    pub bytes: usize,
    pub error: Option<BlockError>,
}

/// Observes complete header blocks, and limits their size.
pub trait BlockObserver {
    /// Bytes of fields that the next head may have.
    fn max_head_bytes(&self) -> usize;
    /// Called for each complete block.
    fn record_block(&self, block: HeaderBlock);
}

/// The filter of one connection.
#[derive(Debug)]
pub struct HeaderScanner {
    scanner: HpackScanner,
    /// Bytes of an incomplete frame header or header block.
    partial: Vec<u8>,
    /// Bytes of `partial` that are complete frames.
    complete_bytes: usize,
    /// Bytes for h2, before others are read; `output_taken` of them were taken.
    output: Vec<u8>,
    output_taken: usize,
    /// Bytes that pass unchecked before the next frame header.
    skip: usize,
    /// A connection error was passed to h2. No further bytes pass: h2 takes some of these errors for stream errors, and would
    /// continue without decoding the fields.
    is_failed: bool,
    last_stream: u32,
}

/// The end of a header block.
enum BlockEnd {
    /// The block is incomplete; length of its complete frames.
    Incomplete(usize),
    At(usize),
    /// The block is interrupted by another frame, or has a frame of another stream.
    Invalid,
    /// A frame is larger than h2 accepts.
    Oversized,
}

impl HeaderScanner {
    pub fn new(limits: HeadLimits) -> HeaderScanner {
        HeaderScanner {
            scanner: HpackScanner::new(limits),
            partial: Vec::new(),
            complete_bytes: 0,
            output: Vec::new(),
            output_taken: 0,
            skip: PREFACE.len(),
            is_failed: false,
            last_stream: 0,
        }
    }

    /// Takes up to `most` bytes for h2. Must be called until it returns none, before bytes are read.
    pub fn take_output(&mut self, most: usize) -> &[u8] {
        let start = self.output_taken;
        self.output_taken = self.output.len().min(start + most);
        if start == self.output_taken {
            // Free the memory: output is rare.
            self.output = Vec::new();
            self.output_taken = 0;
            return &[];
        }
        &self.output[start..self.output_taken]
    }

    /// Filters received bytes. Returns how many of them, from the start, pass unchanged; the others are held or in the output.
    pub fn filter(&mut self, bytes: &mut [u8], observer: &impl BlockObserver) -> usize {
        if self.partial.is_empty() {
            let (passed, taken) = self.filter_frames(bytes, false, observer);
            self.partial.extend_from_slice(&bytes[taken..]);
            return passed;
        }
        let mut held = std::mem::take(&mut self.partial);
        held.extend_from_slice(bytes);
        let (_, taken) = self.filter_frames(&mut held, true, observer);
        if taken < held.len() {
            held.drain(..taken);
            self.partial = held;
        }
        0
    }

    /// Filters complete frames. Returns how many bytes pass unchanged, and how many were consumed; those between are in the
    /// output. If `diverted`, all consumed bytes are in the output.
    fn filter_frames(&mut self, bytes: &mut [u8], mut diverted: bool, observer: &impl BlockObserver) -> (usize, usize) {
        let (mut at, mut passed) = (0, 0);
        while at < bytes.len() {
            if self.is_failed {
                return (passed, bytes.len());
            }
            let left = &mut bytes[at..];
            let pass = if self.skip > 0 {
                self.skip.min(left.len())
            } else {
                let Some(head) = left.first_chunk::<FRAME_HEADER_BYTES>() else { break };
                let frame = FrameHeader::read(head);
                if frame.kind == FrameHeader::HEADERS {
                    match block_end(left, std::mem::take(&mut self.complete_bytes), frame.stream) {
                        BlockEnd::Incomplete(whole) => {
                            self.complete_bytes = whole;
                            break;
                        }
                        BlockEnd::Invalid => {
                            self.fail_connection(INVALID_FRAME);
                            continue;
                        }
                        BlockEnd::Oversized => {
                            self.fail_connection(OVERSIZED_FRAME);
                            continue;
                        }
                        BlockEnd::At(end) => {
                            if let Some(replacement) = self.scan_block(&left[..end], frame, observer) {
                                self.output.extend_from_slice(&replacement);
                                diverted = true;
                                at += end;
                                continue;
                            }
                            end
                        }
                    }
                } else if frame.kind == FrameHeader::PUSH_PROMISE {
                    // A client must not send PUSH_PROMISE (RFC 9113, section 8.4), and it would change the HPACK table.
                    self.fail_connection(INVALID_FRAME);
                    continue;
                } else {
                    // h2 rejects the others, on idle streams and without the length of their padding.
                    let is_empty = frame.kind == FrameHeader::DATA && frame.length == 0 && !frame.ends_stream();
                    let is_of_client = frame.stream % 2 == 1 && frame.stream <= self.last_stream;
                    if is_empty && is_of_client && !frame.is_padded() {
                        left[3] = UNKNOWN;
                    }
                    self.skip = FRAME_HEADER_BYTES + frame.length as usize;
                    continue;
                }
            };
            self.skip = self.skip.saturating_sub(pass);
            if diverted {
                self.output.extend_from_slice(&left[..pass]);
            } else {
                passed += pass;
            }
            at += pass;
        }
        (passed, at)
    }

    /// Makes h2 end the connection with the error that this frame causes.
    fn fail_connection(&mut self, frame: [u8; FRAME_HEADER_BYTES]) {
        self.output.extend_from_slice(&frame);
        self.is_failed = true;
    }

    /// Checks a block of complete frames that begins with `first`. Returns the frames that replace it; `None`: it passes
    /// unchanged.
    fn scan_block(&mut self, frames: &[u8], first: FrameHeader, observer: &impl BlockObserver) -> Option<Vec<u8>> {
        let mut gathered = Vec::new();
        let payload = &frames[FRAME_HEADER_BYTES..][..first.length as usize];
        let Some(mut block) = fragment(payload, first) else {
            self.is_failed = true;
            return Some(INVALID_FRAME.to_vec());
        };
        let mut rest = &frames[FRAME_HEADER_BYTES + payload.len()..];
        if !rest.is_empty() {
            gathered.extend_from_slice(block);
            while let Some((head, behind)) = rest.split_first_chunk::<FRAME_HEADER_BYTES>() {
                let (payload, behind) = behind.split_at(FrameHeader::read(head).length as usize);
                gathered.extend_from_slice(payload);
                rest = behind;
            }
            block = &gathered;
        }
        let is_head = first.stream > self.last_stream;
        self.last_stream = self.last_stream.max(first.stream);
        let max_bytes = if is_head { observer.max_head_bytes() } else { usize::MAX };
        let ScanResult { bytes, mut error } = self.scanner.scan(block, is_head, max_bytes);
        if error.is_none() && depends_on_itself(payload, first) {
            // A stream error for which h2 would not decode the fields.
            error = Some((BlockError::Malformed, [block, MALFORMED].concat()));
        }
        observer.record_block(HeaderBlock {
            stream: first.stream,
            is_head,
            bytes,
            error: error.as_ref().map(|(error, _)| *error),
        });
        let Some((error, mut block)) = error else {
            // Joined, because h2 decodes frame by frame, and takes a malformed field before the last frame for a connection error.
            return (!gathered.is_empty()).then(|| encode_frames(first, &gathered));
        };
        if !is_head && let BlockError::TooLarge { .. } = error {
            // Trailers that are too large have no response: the stream is reset.
            block.extend_from_slice(MALFORMED);
        }
        self.is_failed |= error == BlockError::Undecodable;
        Some(encode_frames(first, &block))
    }
}

/// Finds the end of the block at the start of `bytes`, of which `known` bytes are complete frames, and checks what joining the
/// frames would hide from h2: that they are of one stream, and no larger than allowed.
fn block_end(bytes: &[u8], known: usize, stream: u32) -> BlockEnd {
    let mut at = known;
    while let Some(head) = bytes.get(at..).and_then(<[u8]>::first_chunk::<FRAME_HEADER_BYTES>) {
        let frame = FrameHeader::read(head);
        if at > 0 && frame.kind != FrameHeader::CONTINUATION || frame.stream != stream {
            return BlockEnd::Invalid;
        }
        if frame.length as usize > PAYLOAD_MAX_BYTES {
            return BlockEnd::Oversized;
        }
        let end = at + FRAME_HEADER_BYTES + frame.length as usize;
        if end > bytes.len() {
            break;
        }
        at = end;
        if frame.ends_head() {
            return BlockEnd::At(at);
        }
    }
    BlockEnd::Incomplete(at)
}

/// The field block fragment in the payload of HEADERS (RFC 9113, section 6.2); `None`: its padding is invalid.
fn fragment(payload: &[u8], frame: FrameHeader) -> Option<&[u8]> {
    let (padding, payload) = match payload.split_first() {
        Some((padding, payload)) if frame.is_padded() => (usize::from(*padding), payload),
        None if frame.is_padded() => return None,
        _ => (0, payload),
    };
    let payload = if frame.has_priority() { payload.get(5..)? } else { payload };
    payload.get(..payload.len().checked_sub(padding)?)
}

/// Whether the priority of HEADERS makes its stream depend on itself (RFC 7540, section 5.3.1).
fn depends_on_itself(payload: &[u8], frame: FrameHeader) -> bool {
    let at = usize::from(frame.is_padded());
    let parent = payload.get(at..).and_then(<[u8]>::first_chunk).map(|parent| u32::from_be_bytes(*parent) & !(1 << 31));
    frame.has_priority() && parent == Some(frame.stream)
}

/// Encodes a block as frames, without priority and padding.
fn encode_frames(first: FrameHeader, block: &[u8]) -> Vec<u8> {
    let mut frames = Vec::with_capacity(block.len() + FRAME_HEADER_BYTES);
    let mut fragments = block.chunks(PAYLOAD_MAX_BYTES);
    let mut kind = FrameHeader::HEADERS;
    // An empty block is one frame as well.
    let mut fragment = fragments.next().unwrap_or_default();
    loop {
        let next = fragments.next();
        frames.extend_from_slice(&FrameHeader::header(kind, first, fragment.len(), next.is_none()));
        frames.extend_from_slice(fragment);
        kind = FrameHeader::CONTINUATION;
        let Some(next) = next else { return frames };
        fragment = next;
    }
}

#[cfg(test)]
mod tests {
    //! Random connections: the test knows the meaning of each request, and h2 behind the filter must see exactly that.

    use std::cell::RefCell;
    use std::collections::{HashMap, VecDeque};
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use bytes::Bytes;
    use fastrand::Rng;
    use h2::RecvStream;
    use h2::server::{Connection, SendResponse};
    use http::{HeaderMap, HeaderName, HeaderValue, Request};
    use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

    use super::*;
    use crate::downstream::http2::frame_header::FrameReader;
    use crate::downstream::http2::huffman;

    /// RFC 7541, appendix A.
    const STATIC: &str = ":authority=|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|:status=200|\
        :status=204|:status=206|:status=304|:status=400|:status=404|:status=500|accept-charset=|accept-encoding=gzip, deflate|\
        accept-language=|accept-ranges=|accept=|access-control-allow-origin=|age=|allow=|authorization=|cache-control=|\
        content-disposition=|content-encoding=|content-language=|content-length=|content-location=|content-range=|content-type=|\
        cookie=|date=|etag=|expect=|expires=|from=|host=|if-match=|if-modified-since=|if-none-match=|if-range=|\
        if-unmodified-since=|last-modified=|link=|location=|max-forwards=|proxy-authenticate=|proxy-authorization=|range=|referer=|\
        refresh=|retry-after=|server=|set-cookie=|strict-transport-security=|transfer-encoding=|user-agent=|vary=|via=|\
        www-authenticate=";
    const NAMES: [&str; 12] = [
        "x-a",
        "x-b",
        "x-longer-name-of-a-field",
        "te",
        "accept",
        "age",
        "cookie",
        "cookie",
        "user-agent",
        "host",
        "via",
        "~",
    ];
    /// Each makes a request malformed, as its first field or as its last.
    const BAD: [(&str, &str); 18] = [
        ("X-Upper", "1"),
        ("x space", "1"),
        ("", "1"),
        ("x-a", "line\nbreak"),
        ("x-b", "\0"),
        ("cookie", "\x7f"),
        ("te", "gzip"),
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "x"),
        ("keep-alive", "1"),
        ("proxy-connection", "x"),
        (":path", "/again"),
        (":method", "GET"),
        (":method", "G T"),
        (":status", "200"),
        (":status", "none"),
        (":other", "1"),
    ];
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    const PADDED: u8 = 8;
    const PRIORITY: u8 = 0x20;

    type Field = (Vec<u8>, Vec<u8>);

    fn field(name: &str, value: impl AsRef<[u8]>) -> Field {
        (name.as_bytes().to_vec(), value.as_ref().to_vec())
    }

    fn fields_bytes<'a>(fields: impl IntoIterator<Item = &'a Field>) -> usize {
        fields.into_iter().map(|(name, value)| name.len() + value.len() + 32).sum()
    }

    fn is_over(fields: &[Field], limits: HeadLimits) -> bool {
        let cookies = fields.iter().filter(|(name, _)| name == b"cookie").count();
        let counted = fields.iter().filter(|(name, _)| !name.starts_with(b":") || name == b":authority").count();
        fields_bytes(fields) >= limits.bytes
            || counted - cookies + cookies.min(1) > limits.fields
            || cookies > 2 * limits.fields
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Meaning {
        Good,
        Malformed,
        TooLarge,
    }

    /// What the client sent on a stream.
    struct Sent {
        head: Vec<Field>,
        meaning: Meaning,
        body_bytes: usize,
        trailers: Option<(Vec<Field>, Meaning)>,
        is_open: bool,
        is_reset: bool,
    }

    /// What an h2 server has read and sent on a connection.
    struct Served {
        connection: Connection<DuplexStream, Bytes>,
        requests: HashMap<u32, Request<RecvStream>>,
        responders: Vec<SendResponse<Bytes>>,
        sent: Vec<FrameHeader>,
        error: Option<h2::Error>,
    }

    /// A client that uses all features of HPACK and HTTP/2.
    struct Client {
        rng: Rng,
        limits: HeadLimits,
        fixed: Vec<Field>,
        table: VecDeque<Field>,
        table_max: usize,
        wire: Vec<u8>,
        streams: Vec<Sent>,
        pings: usize,
    }

    impl Client {
        fn int(&mut self, block: &mut Vec<u8>, first: u8, prefix: u32, number: usize) {
            let mask = (1 << prefix) - 1;
            if number < mask {
                block.push(first | number as u8);
                return;
            }
            block.push(first | mask as u8);
            let (mut rest, mut spare) = (number - mask, 3);
            while rest >= 128 || spare > 0 && self.rng.u8(..4) == 0 {
                block.push(rest as u8 | 0x80);
                rest >>= 7;
                spare -= 1;
            }
            block.push(rest as u8);
        }

        fn text(&mut self, block: &mut Vec<u8>, text: &[u8]) {
            if self.rng.bool() {
                let encoded = huffman::tests::encoded(text);
                self.int(block, 0x80, 7, encoded.len());
                block.extend(encoded);
            } else {
                self.int(block, 0, 7, text.len());
                block.extend(text);
            }
        }

        fn resize(&mut self, block: &mut Vec<u8>) {
            self.table_max = [0, 32, 33, 100, 500, self.rng.usize(..=4096), 4095, 4096][self.rng.usize(..8)];
            self.int(block, 0x20, 5, self.table_max);
            self.evict();
        }

        fn evict(&mut self) {
            while fields_bytes(&self.table) > self.table_max {
                self.table.pop_back();
            }
        }

        /// The index of an entry of both tables.
        fn any_of(&mut self, is_wanted: impl Fn(&Field) -> bool) -> Option<usize> {
            let known = (1..).zip(self.fixed.iter().chain(&self.table));
            let found: Vec<usize> = known.filter(|(_, known)| is_wanted(known)).map(|(index, _)| index).collect();
            self.rng.choice(found)
        }

        fn encode(&mut self, fields: &[Field]) -> Vec<u8> {
            let mut block = Vec::new();
            while self.rng.u8(..8) == 0 {
                self.resize(&mut block);
            }
            for field in fields {
                if let Some(index) = self.any_of(|known| known == field).filter(|_| self.rng.u8(..4) > 0) {
                    self.int(&mut block, 0x80, 7, index);
                    continue;
                }
                let (first, prefix) = [(0x40, 6), (0x40, 6), (0x00, 4), (0x10, 4)][self.rng.usize(..4)];
                match self.any_of(|(name, _)| *name == field.0).filter(|_| self.rng.u8(..4) > 0) {
                    Some(index) => self.int(&mut block, first, prefix, index),
                    None => {
                        block.push(first);
                        self.text(&mut block, &field.0);
                    }
                }
                self.text(&mut block, &field.1);
                if first == 0x40 {
                    self.table.push_front(field.clone());
                    self.evict();
                }
            }
            block
        }

        fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
            let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
            self.wire.extend(length);
            self.wire.extend([kind, flags]);
            self.wire.extend(stream.to_be_bytes());
            self.wire.extend(payload);
        }

        /// Splits a block over HEADERS and CONTINUATION.
        fn block(&mut self, stream: u32, block: &[u8], mut flags: u8) {
            let pieces = [0, 0, 1, 2, 3, 12][self.rng.usize(..6)];
            let mut cuts: Vec<usize> = (0..pieces).map(|_| self.rng.usize(..=block.len())).collect();
            cuts.extend((0..=block.len()).step_by(16_000));
            cuts.push(block.len());
            cuts.sort_unstable();
            if block.len() < 16_000 && pieces == 0 {
                cuts = vec![0, block.len()];
            }
            let mut kind = FrameHeader::HEADERS;
            for (n, cut) in cuts.windows(2).enumerate() {
                let mut payload = block[cut[0]..cut[1]].to_vec();
                if kind == FrameHeader::HEADERS {
                    if self.rng.u8(..3) == 0 {
                        flags |= PRIORITY;
                        let on = [0, stream + 2][self.rng.usize(..2)];
                        payload.splice(..0, [&on.to_be_bytes()[..], &[7]].concat());
                    }
                    if self.rng.u8(..3) == 0 {
                        flags |= PADDED;
                        let padding = self.rng.u8(..);
                        payload.insert(0, padding);
                        payload.resize(payload.len() + usize::from(padding), 0);
                    }
                }
                let last = if n + 2 == cuts.len() { END_HEADERS } else { 0 };
                self.frame(kind, flags | last, stream, &payload);
                (kind, flags) = (FrameHeader::CONTINUATION, 0);
            }
        }

        fn value(&mut self) -> Vec<u8> {
            let most = [2, 2, 40, 200, self.limits.bytes / 2][self.rng.usize(..5)];
            let bytes = |rng: &mut Rng| loop {
                let byte = if rng.bool() { rng.u8(..) } else { rng.u8(b'0'..=b'z') };
                if byte >= 32 && byte != 127 || byte == b'\t' {
                    return byte;
                }
            };
            (0..self.rng.usize(..most)).map(|_| bytes(&mut self.rng)).collect()
        }

        fn plain(&mut self, fields: &mut Vec<Field>, count: usize) {
            for _ in 0..count {
                let name = NAMES[self.rng.usize(..NAMES.len())];
                fields.push(if name == "te" { field(name, "trailers") } else { field(name, self.value()) });
            }
        }

        /// Brings fields within the limits, beyond them, or makes them malformed. The first `pseudo` are pseudo-header fields.
        fn spoil(&mut self, fields: &mut Vec<Field>, pseudo: usize) -> Meaning {
            let meaning = [Meaning::Good, Meaning::Good, Meaning::Malformed, Meaning::TooLarge][self.rng.usize(..4)];
            let limits = match meaning {
                // One field is added below.
                Meaning::Malformed => HeadLimits { fields: self.limits.fields - 1, bytes: self.limits.bytes - 100 },
                _ => self.limits,
            };
            while is_over(fields, limits) && fields.len() > pseudo {
                fields.pop();
            }
            match meaning {
                Meaning::Good => {}
                Meaning::Malformed => {
                    let (name, value) = BAD[self.rng.usize(..BAD.len())];
                    let at = self.rng.usize(pseudo..=fields.len());
                    fields.insert(at, field(name, value));
                }
                Meaning::TooLarge => {
                    while !is_over(fields, self.limits) {
                        self.plain(fields, 1);
                    }
                    self.plain(fields, 3);
                }
            }
            meaning
        }

        fn request(&mut self) {
            let stream = self.streams.len() as u32 * 2 + 1;
            let method = ["GET", "POST", "PUT", "QUERY"][self.rng.usize(..4)];
            let path = ["/".to_owned(), "/index.html".to_owned(), format!("/{}", self.rng.u8(..9))];
            let mut head = vec![
                field(":method", method),
                field(":scheme", ["http", "https"][self.rng.usize(..2)]),
                field(":path", &path[self.rng.usize(..3)]),
                field(":authority", ["a", "example.org:80"][self.rng.usize(..2)]),
            ];
            head.truncate(self.rng.usize(3..5));
            self.rng.shuffle(&mut head);
            let pseudo = head.len();
            let count = self.rng.usize(..self.limits.fields + 2);
            self.plain(&mut head, count);
            let meaning = self.spoil(&mut head, pseudo);
            let block = self.encode(&head);
            let is_open = self.rng.bool();
            self.block(stream, &block, if is_open { 0 } else { END_STREAM });
            self.streams.push(Sent { head, meaning, body_bytes: 0, trailers: None, is_open, is_reset: false });
        }

        fn trailers(&mut self, at: usize) {
            let mut fields = Vec::new();
            self.plain(&mut fields, 2);
            let meaning = self.spoil(&mut fields, 0);
            let block = self.encode(&fields);
            self.block(at as u32 * 2 + 1, &block, END_STREAM);
            self.streams[at].trailers = Some((fields, meaning));
            self.streams[at].is_open = false;
        }

        /// Sends a frame that may stand between header blocks.
        fn other(&mut self) {
            let open: Vec<usize> = (0..self.streams.len()).filter(|at| self.streams[*at].is_open).collect();
            let any = self.rng.choice(open);
            match (self.rng.u8(..10), any) {
                (0, _) => {
                    self.frame(FrameHeader::PING, 0, 0, b"whatever");
                    self.pings += 1;
                }
                (1, _) => self.frame(FrameHeader::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 9]),
                (2, Some(at)) => self.frame(FrameHeader::WINDOW_UPDATE, 0, at as u32 * 2 + 1, &[0, 0, 0, 9]),
                (3, _) => self.frame(0xfa, 0xff, 0, b"unknown type"),
                (4, Some(at)) if self.streams.iter().filter(|sent| sent.is_reset).count() < 5 => {
                    self.frame(FrameHeader::RST_STREAM, 0, at as u32 * 2 + 1, &[0, 0, 0, 8]);
                    (self.streams[at].is_reset, self.streams[at].is_open) = (true, false);
                }
                (5 | 6, Some(at)) => self.trailers(at),
                (_, Some(at)) => {
                    let bytes = [0, 0, 1, 500][self.rng.usize(..4)];
                    let ends = self.rng.u8(..6) == 0;
                    self.frame(FrameHeader::DATA, u8::from(ends), at as u32 * 2 + 1, &vec![b'd'; bytes]);
                    self.streams[at].body_bytes += bytes;
                    self.streams[at].is_open = !ends;
                }
                _ => {}
            }
        }

        /// Sends a block that no decoder accepts.
        fn undecodable(&mut self) {
            let bad: [&[u8]; 8] = [
                b"\x80",
                b"\xff\x80\x7f",
                b"\x82\x20",
                b"\x3f\xe2\x1f",
                b"\xff\x80\x80\x80\x80\x00",
                b"\x00\x01a\x81\xff",
                b"\x00\x01a\x84\xff\xff\xff\xff",
                b"\x00\x01a\x02b",
            ];
            let block = bad[self.rng.usize(..8)];
            self.block(self.streams.len() as u32 * 2 + 1, block, END_STREAM);
        }
    }

    /// What h2 gets of a connection on which these frames follow a complete request, each received in two parts.
    fn filtered(frames: &[Vec<u8>]) -> (Vec<u8>, usize) {
        let mut scanner = HeaderScanner::new(HeadLimits { fields: 10, bytes: 1000 });
        let observer = RecordedBlocks { blocks: RefCell::default() };
        let mut filtered = Vec::new();
        let pieces = frames.iter().flat_map(|frame| [&frame[..frame.len() / 2], &frame[frame.len() / 2..]]);
        for piece in [&PREFACE[..]].into_iter().chain(pieces) {
            let mut piece = piece.to_vec();
            let passed = scanner.filter(&mut piece, &observer);
            filtered.extend_from_slice(&piece[..passed]);
            loop {
                let output = scanner.take_output(100);
                filtered.extend_from_slice(output);
                if output.is_empty() {
                    break;
                }
            }
        }
        (filtered.split_off(PREFACE.len()), observer.blocks.borrow().len())
    }

    fn raw_frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let [_, a, b, c] = (payload.len() as u32).to_be_bytes();
        [&[a, b, c, kind, flags, 0, 0, 0, stream], payload].concat()
    }

    /// RFC 9113, sections 4.2 and 6.10.
    #[test]
    fn a_block_is_joined_only_of_frames_of_one_stream_and_of_the_allowed_size() {
        let block = [0x82, 0x86, 0x84, 0x01, 0x01, b'a'];
        let (headers, continuation) = (FrameHeader::HEADERS, FrameHeader::CONTINUATION);
        let first = |stream| raw_frame(headers, END_STREAM, stream, &block[..3]);
        let whole = raw_frame(headers, 0, 1, &block[..3]);
        let last = raw_frame(continuation, END_HEADERS, 1, &block[3..]);
        assert_eq!(filtered(&[first(1), last.clone()]), (raw_frame(headers, 5, 1, &block), 1));
        // In trailers too.
        let trailers = raw_frame(headers, END_STREAM, 1, &[]);
        for other in [0, 3, 5] {
            let foreign = raw_frame(continuation, END_HEADERS, other, &block[3..]);
            assert_eq!(filtered(&[first(1), foreign.clone()]), (INVALID_FRAME.to_vec(), 0), "{other}");
            let (passed, blocks) = filtered(&[whole.clone(), last.clone(), trailers.clone(), foreign]);
            assert!(passed.ends_with(&INVALID_FRAME) && blocks == 1, "{other}");
        }
        let large = vec![0; PAYLOAD_MAX_BYTES + 1];
        for frames in [
            vec![raw_frame(headers, END_STREAM | END_HEADERS, 1, &large)],
            vec![first(1), raw_frame(continuation, END_HEADERS, 1, &large)],
        ] {
            assert_eq!(filtered(&frames), (OVERSIZED_FRAME.to_vec(), 0));
        }
    }

    #[test]
    fn only_an_empty_data_frame_without_an_error_is_replaced() {
        let request = raw_frame(FrameHeader::HEADERS, END_HEADERS, 3, &[0x82, 0x86, 0x84, 0x01, 0x01, b'a']);
        for (flags, stream, is_replaced) in
            [(0, 3, true), (0, 1, true), (PADDED, 3, false), (END_STREAM, 3, false), (0, 2, false), (0, 5, false)]
        {
            let data = raw_frame(FrameHeader::DATA, flags, stream, &[]);
            let (passed, _) = filtered(&[request.clone(), data]);
            assert_eq!(passed[request.len() + 3] == UNKNOWN, is_replaced, "{flags} {stream}");
        }
    }

    struct RecordedBlocks {
        blocks: RefCell<Vec<HeaderBlock>>,
    }

    impl BlockObserver for RecordedBlocks {
        fn max_head_bytes(&self) -> usize {
            usize::MAX
        }

        fn record_block(&self, block: HeaderBlock) {
            self.blocks.borrow_mut().push(block);
        }
    }

    fn map<'a>(fields: impl IntoIterator<Item = &'a Field>) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(HeaderName::from_bytes(name).unwrap(), HeaderValue::from_bytes(value).unwrap());
        }
        map
    }

    /// Runs an h2 server on `bytes` until it has acknowledged `pings` PINGs or failed.
    fn serve(bytes: &[u8], limits: HeadLimits, pings: usize) -> Served {
        let (mut client, server) = tokio::io::duplex(bytes.len() + 100_000);
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(matches!(Pin::new(&mut client).poll_write(cx, bytes), Poll::Ready(Ok(n)) if n == bytes.len()));
        let handshake = h2::server::Builder::new()
            .max_local_error_reset_streams(None)
            .max_header_list_size(limits.bytes as u32)
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 20)
            .handshake(server);
        let Poll::Ready(Ok(connection)) = std::pin::pin!(handshake).poll(cx) else { panic!("no handshake") };
        let mut served =
            Served { connection, requests: HashMap::new(), responders: Vec::new(), sent: Vec::new(), error: None };
        let mut frames = FrameReader::for_server();
        // Both sides are in memory, so a fixed number of polls suffices.
        for _ in 0..1000 {
            while let Poll::Ready(Some(next)) = served.connection.poll_accept(cx) {
                match next {
                    Ok((request, responder)) => {
                        served.requests.insert(request.body().stream_id().into(), request);
                        served.responders.push(responder);
                    }
                    Err(error) => {
                        served.error = Some(error);
                        return served;
                    }
                }
            }
            let mut memory = [0; 4096];
            let mut buffer = ReadBuf::new(&mut memory);
            if Pin::new(&mut client).poll_read(cx, &mut buffer).is_ready() {
                frames.read_frames(buffer.filled(), |frame| served.sent.push(frame));
            } else if served.sent.iter().filter(|f| f.kind == FrameHeader::PING && f.is_acknowledgement()).count()
                == pings
            {
                return served;
            }
        }
        panic!("the connection makes no progress");
    }

    fn check_random_connection(seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let limits = [(8, 1000), (20, 5000), (100, 17_000), (200, 40_000)][rng.usize(..4)];
        let limits = HeadLimits { fields: limits.0, bytes: limits.1 };
        let mut client = Client {
            rng,
            limits,
            fixed: STATIC.split('|').map(|entry| entry.split_once('=').unwrap()).map(|(n, v)| field(n, v)).collect(),
            table: VecDeque::new(),
            table_max: 4096,
            wire: PREFACE.to_vec(),
            streams: Vec::new(),
            pings: 0,
        };
        client.frame(FrameHeader::SETTINGS, 0, 0, &[]);
        for _ in 0..client.rng.usize(1..20) {
            client.request();
            (0..client.rng.usize(..4)).for_each(|_| client.other());
        }
        let is_broken = client.rng.u8(..4) == 0;
        if is_broken {
            client.undecodable();
        }
        client.frame(FrameHeader::PING, 0, 0, b"the last");
        client.pings += 1;

        let seen = RecordedBlocks { blocks: RefCell::default() };
        let mut input = HeaderScanner::new(limits);
        let mut bytes = Vec::new();
        let most = [1, 3, 20, 500, 20_000][client.rng.usize(..5)];
        let mut rest = &mut client.wire[..];
        while !rest.is_empty() {
            let size = client.rng.usize(1..=most).min(rest.len());
            let (received, behind) = rest.split_at_mut(size);
            let passed = input.filter(received, &seen);
            bytes.extend_from_slice(&received[..passed]);
            loop {
                let ready = input.take_output(client.rng.usize(1..5000));
                if ready.is_empty() {
                    break;
                }
                bytes.extend_from_slice(ready);
            }
            rest = behind;
        }

        let Served { connection: _connection, mut requests, responders: _responders, sent, error } =
            serve(&bytes, limits, client.pings);
        if is_broken {
            assert!(error.is_some(), "the connection survived a block that cannot be decoded");
        } else {
            assert!(error.is_none(), "the connection ended: {error:?}");
        }
        let cx = &mut Context::from_waker(Waker::noop());
        let was_refused =
            |stream| sent.iter().any(|f| f.kind == FrameHeader::RST_STREAM && f.stream == stream && f.code == 1);
        for (at, expected) in client.streams.iter().enumerate() {
            let stream = at as u32 * 2 + 1;
            let request = requests.remove(&stream);
            let seen = seen.blocks.borrow();
            let head_error = seen.iter().find(|block| block.stream == stream && block.is_head).unwrap().error;
            let is_large = matches!(head_error, Some(BlockError::TooLarge { .. }));
            assert_eq!(is_large, expected.meaning == Meaning::TooLarge, "{stream}: {head_error:?}");
            if expected.is_reset || is_broken {
                assert!(request.is_none() || expected.meaning != Meaning::Malformed);
                continue;
            }
            if expected.meaning == Meaning::Malformed {
                assert!(request.is_none() && was_refused(stream), "{stream}: {:?}", expected.head);
                continue;
            }
            if head_error == Some(BlockError::TooLarge { by_h2: true }) {
                assert!(request.is_none() && sent.iter().any(|f| f.kind == FrameHeader::HEADERS && f.stream == stream));
                continue;
            }
            let (parts, mut body) = request.unwrap_or_else(|| panic!("{stream} was lost")).into_parts();
            let get = |name: &[u8]| expected.head.iter().find(|(known, _)| known == name).map(|(_, value)| &value[..]);
            assert_eq!(Some(parts.method.as_str().as_bytes()), get(b":method"));
            assert_eq!(Some(parts.uri.path().as_bytes()), get(b":path"));
            assert_eq!(parts.uri.authority().map(|a| a.as_str().as_bytes()), get(b":authority"));
            if expected.meaning == Meaning::Good {
                assert_eq!(parts.headers, map(expected.head.iter().filter(|(name, _)| !name.starts_with(b":"))));
            }
            let is_bad = matches!(&expected.trailers, Some((_, meaning)) if *meaning != Meaning::Good);
            assert_eq!(was_refused(stream), is_bad, "{stream}: {:?}", expected.trailers);
            if is_bad {
                continue;
            }
            let mut body_bytes = 0;
            while let Poll::Ready(Some(data)) = body.poll_data(cx) {
                body_bytes += data.unwrap().len();
            }
            assert_eq!(body_bytes, expected.body_bytes);
            if let Some((fields, _)) = &expected.trailers {
                let Poll::Ready(Ok(Some(trailers))) = body.poll_trailers(cx) else { panic!("{stream}: no trailers") };
                assert_eq!(trailers, map(fields));
            }
        }
        assert!(requests.is_empty());
    }

    #[test]
    fn h2_receives_the_requests_that_clients_mean() {
        for seed in 0..80 {
            if std::panic::catch_unwind(|| check_random_connection(seed)).is_err() {
                panic!("seed {seed}");
            }
        }
    }
}
