//! What a client sends on an HTTP/2 connection, between its socket and h2: all of it passes, but for what h2 would end the
//! connection for although it need not.
//!
//! A block of fields is held until it is complete, and scanned (`hpack`). An empty DATA frame becomes one that is ignored: h2 bears with a
//! hundred of them in the life of a connection, and `conduct` counts them by the second. This file knows no socket.

use super::frames::{Frame, HEAD_BYTES, PREFACE};
use super::hpack::{Flaw, Limits, MALFORMED, Scanned, Scanner};

/// A frame type that nobody knows (RFC 9113, section 4.1).
const UNKNOWN: u8 = 0xff;
/// The largest payload that h2 takes in one frame.
const PAYLOAD_MAX_BYTES: usize = 16 * 1024;
/// HEADERS on stream 0: an error of the connection.
const BROKEN: [u8; HEAD_BYTES] = [0, 0, 0, Frame::HEADERS, 4, 0, 0, 0, 0];

/// A block of fields that has come.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub stream: u32,
    /// It opens the stream; otherwise it is trailers.
    pub is_head: bool,
    /// Of its fields, as the limits count.
    pub bytes: usize,
    pub flaw: Option<Flaw>,
}

/// What is told of the blocks that pass, and asked for.
pub trait Watch {
    /// How many bytes of fields a head may have that comes now.
    fn room(&self) -> usize;
    fn block(&self, block: Block);
}

#[derive(Debug)]
pub struct Input {
    scanner: Scanner,
    /// The beginning of a frame's head, or of a block.
    held: Vec<u8>,
    /// So much of it is whole frames.
    whole: usize,
    /// What goes to h2 before anything else is read; so much of it has gone.
    ready: Vec<u8>,
    given: usize,
    /// Bytes that pass before the next frame.
    skip: usize,
    /// There was an error of the connection, of which h2 is told. Nothing behind it passes: h2 takes some such errors for those
    /// of a stream, and does not read the fields then.
    is_over: bool,
    last_stream: u32,
}

/// Where a block ends.
enum End {
    /// More has to come; so much of what is there is whole frames.
    Later(usize),
    At(usize),
    /// Another frame comes in between, or none has a place for padding.
    Never,
}

impl Input {
    pub fn new(limits: Limits) -> Input {
        Input {
            scanner: Scanner::new(limits),
            held: Vec::new(),
            whole: 0,
            ready: Vec::new(),
            given: 0,
            skip: PREFACE.len(),
            is_over: false,
            last_stream: 0,
        }
    }

    /// What goes to h2 first; it is asked for until there is none.
    pub fn take_ready(&mut self, most: usize) -> &[u8] {
        let start = self.given;
        self.given = self.ready.len().min(start + most);
        if start == self.given {
            // Memory is kept only for what comes often.
            self.ready = Vec::new();
            self.given = 0;
            return &[];
        }
        &self.ready[start..self.given]
    }

    /// Looks at what has come. So many of the bytes pass as they are; the others are held, or ready.
    pub fn pass(&mut self, bytes: &mut [u8], watch: &impl Watch) -> usize {
        if self.held.is_empty() {
            let (passed, taken) = self.screen(bytes, false, watch);
            self.held.extend_from_slice(&bytes[taken..]);
            return passed;
        }
        let mut held = std::mem::take(&mut self.held);
        held.extend_from_slice(bytes);
        let (_, taken) = self.screen(&mut held, true, watch);
        if taken < held.len() {
            held.drain(..taken);
            self.held = held;
        }
        0
    }

    /// Takes whole frames. How many bytes pass unchanged, and how many were taken; those between are ready. All of them are
    /// if it is `diverted`.
    fn screen(&mut self, bytes: &mut [u8], mut diverted: bool, watch: &impl Watch) -> (usize, usize) {
        let (mut at, mut passed) = (0, 0);
        while at < bytes.len() {
            if self.is_over {
                return (passed, bytes.len());
            }
            let left = &mut bytes[at..];
            let pass = if self.skip > 0 {
                self.skip.min(left.len())
            } else {
                let Some(head) = left.first_chunk::<HEAD_BYTES>() else { break };
                let frame = Frame::read(head);
                if frame.kind == Frame::HEADERS {
                    match block_end(left, std::mem::take(&mut self.whole)) {
                        End::Later(whole) => {
                            self.whole = whole;
                            break;
                        }
                        End::Never => {
                            self.break_off();
                            continue;
                        }
                        End::At(end) => {
                            if let Some(instead) = self.block(&left[..end], frame, watch) {
                                self.ready.extend_from_slice(&instead);
                                diverted = true;
                                at += end;
                                continue;
                            }
                            end
                        }
                    }
                } else if frame.kind == Frame::PUSH_PROMISE {
                    // No client sends one (RFC 9113, section 8.4). It has fields as well.
                    self.break_off();
                    continue;
                } else {
                    let is_empty = frame.kind == Frame::DATA && frame.length == 0 && !frame.ends_stream();
                    if is_empty && (1..=self.last_stream).contains(&frame.stream) {
                        left[3] = UNKNOWN;
                    }
                    self.skip = HEAD_BYTES + frame.length as usize;
                    continue;
                }
            };
            self.skip = self.skip.saturating_sub(pass);
            if diverted {
                self.ready.extend_from_slice(&left[..pass]);
            } else {
                passed += pass;
            }
            at += pass;
        }
        (passed, at)
    }

    fn break_off(&mut self) {
        self.ready.extend_from_slice(&BROKEN);
        self.is_over = true;
    }

    /// Scans a block of whole frames, the first of which is `first`. What takes its place, if it does not go on as it is.
    fn block(&mut self, frames: &[u8], first: Frame, watch: &impl Watch) -> Option<Vec<u8>> {
        let mut gathered = Vec::new();
        let payload = &frames[HEAD_BYTES..][..first.length as usize];
        let Some(mut block) = fragment(payload, first) else {
            self.is_over = true;
            return Some(BROKEN.to_vec());
        };
        let mut rest = &frames[HEAD_BYTES + payload.len()..];
        if !rest.is_empty() {
            gathered.extend_from_slice(block);
            while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
                let (payload, behind) = behind.split_at(Frame::read(head).length as usize);
                gathered.extend_from_slice(payload);
                rest = behind;
            }
            block = &gathered;
        }
        let is_head = first.stream > self.last_stream;
        self.last_stream = self.last_stream.max(first.stream);
        let room = if is_head { watch.room() } else { usize::MAX };
        let Scanned { bytes, mut flaw } = self.scanner.scan(block, room);
        if flaw.is_none() && depends_on_itself(payload, first) {
            // An error of the stream, for which h2 would leave the fields unread.
            flaw = Some((Flaw::Malformed, [block, MALFORMED].concat()));
        }
        watch.block(Block { stream: first.stream, is_head, bytes, flaw: flaw.as_ref().map(|(flaw, _)| *flaw) });
        let Some((flaw, mut block)) = flaw else {
            // h2 reads frame by frame, and takes what is malformed in one before the last for an error of the connection.
            return (!gathered.is_empty()).then(|| framed(first, &gathered));
        };
        if !is_head && let Flaw::TooLarge { .. } = flaw {
            // Nobody can be told of trailers that are too large but by the end of the stream.
            block.extend_from_slice(MALFORMED);
        }
        self.is_over |= flaw == Flaw::Undecodable;
        Some(framed(first, &block))
    }
}

/// Where the block ends that these bytes begin with, of which so many were looked at before.
fn block_end(bytes: &[u8], known: usize) -> End {
    let mut at = known;
    while let Some(head) = bytes.get(at..).and_then(<[u8]>::first_chunk::<HEAD_BYTES>) {
        let frame = Frame::read(head);
        if at > 0 && frame.kind != Frame::CONTINUATION {
            return End::Never;
        }
        let end = at + HEAD_BYTES + frame.length as usize;
        if end > bytes.len() {
            break;
        }
        at = end;
        if frame.ends_head() {
            return End::At(at);
        }
    }
    End::Later(at)
}

/// The fields in the payload of HEADERS (RFC 9113, section 6.2).
fn fragment(payload: &[u8], frame: Frame) -> Option<&[u8]> {
    let (padding, payload) = match payload.split_first() {
        Some((padding, payload)) if frame.is_padded() => (usize::from(*padding), payload),
        None if frame.is_padded() => return None,
        _ => (0, payload),
    };
    let payload = if frame.has_priority() { payload.get(5..)? } else { payload };
    payload.get(..payload.len().checked_sub(padding)?)
}

/// Whether HEADERS with a priority makes its stream depend on itself (RFC 7540, section 5.3.1).
fn depends_on_itself(payload: &[u8], frame: Frame) -> bool {
    let at = usize::from(frame.is_padded());
    let parent = payload.get(at..).and_then(<[u8]>::first_chunk).map(|parent| u32::from_be_bytes(*parent) & !(1 << 31));
    frame.has_priority() && parent == Some(frame.stream)
}

/// A block as frames, without priority and padding.
fn framed(first: Frame, block: &[u8]) -> Vec<u8> {
    let mut frames = Vec::with_capacity(block.len() + HEAD_BYTES);
    let mut fragments = block.chunks(PAYLOAD_MAX_BYTES);
    let mut kind = Frame::HEADERS;
    // An empty block is one frame as well.
    let mut fragment = fragments.next().unwrap_or_default();
    loop {
        let next = fragments.next();
        frames.extend_from_slice(&Frame::header(kind, first, fragment.len(), next.is_none()));
        frames.extend_from_slice(fragment);
        kind = Frame::CONTINUATION;
        let Some(next) = next else { return frames };
        fragment = next;
    }
}
