//! The framing of bodies that consist of many documents: server-sent events (WHATWG HTML, section 9.2.6), and the event streams of
//! AWS, `application/vnd.amazon.eventstream`. A frame is passed on in pieces; nothing is buffered.

use memchr::memchr2;

/// Receives the documents of a stream.
pub trait DocumentSink {
    fn data(&mut self, bytes: &[u8]);
    fn end_document(&mut self);
}

/// Where in a line of server-sent events the next byte is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Line {
    /// In a byte order mark, after so many of its bytes.
    Mark(u8),
    /// In the name `data`, after so many of its bytes. With 0: at the start of a line.
    Name(u8),
    /// After the colon: one space may follow.
    Space,
    Data,
    /// A comment or another field.
    Other,
}

const MARK: [u8; 3] = [0xEF, 0xBB, 0xBF];
const NAME: [u8; 4] = *b"data";

/// Server-sent events. The data of an event are its lines with the name `data`, joined by line feeds.
pub struct ServerSentEvents {
    line: Line,
    /// Whether the previous byte was a carriage return: a line feed after it ends no further line.
    after_cr: bool,
    has_data: bool,
}

impl Default for ServerSentEvents {
    fn default() -> ServerSentEvents {
        ServerSentEvents { line: Line::Mark(0), after_cr: false, has_data: false }
    }
}

impl ServerSentEvents {
    pub fn push(&mut self, bytes: &[u8], sink: &mut impl DocumentSink) {
        let mut rest = bytes;
        while let Some((&byte, after)) = rest.split_first() {
            if std::mem::take(&mut self.after_cr) && byte == b'\n' {
                rest = after;
            } else if matches!(byte, b'\r' | b'\n') {
                self.after_cr = byte == b'\r';
                self.end_line(sink);
                rest = after;
            } else if matches!(self.line, Line::Data | Line::Other) {
                let (text, end) = rest.split_at(memchr2(b'\r', b'\n', rest).unwrap_or(rest.len()));
                if self.line == Line::Data {
                    sink.data(text);
                }
                rest = end;
            } else {
                rest = if self.begin_line(byte, sink) { after } else { rest };
            }
        }
    }

    /// A byte before the data of a line; `false` if the byte belongs to the data.
    fn begin_line(&mut self, byte: u8, sink: &mut impl DocumentSink) -> bool {
        self.line = match (self.line, byte) {
            (Line::Mark(2), byte) if byte == MARK[2] => Line::Name(0),
            (Line::Mark(read), byte) if byte == MARK[usize::from(read)] => Line::Mark(read + 1),
            (Line::Mark(0), _) => {
                self.line = Line::Name(0);
                return false;
            }
            (Line::Name(4), b':') => {
                self.begin_data(sink);
                Line::Space
            }
            (Line::Name(read), byte) if NAME.get(usize::from(read)) == Some(&byte) => Line::Name(read + 1),
            (Line::Space, b' ') => Line::Data,
            (Line::Space, _) => {
                self.line = Line::Data;
                return false;
            }
            _ => Line::Other,
        };
        true
    }

    fn begin_data(&mut self, sink: &mut impl DocumentSink) {
        if std::mem::replace(&mut self.has_data, true) {
            sink.data(b"\n");
        }
    }

    fn end_line(&mut self, sink: &mut impl DocumentSink) {
        match self.line {
            // A name without a colon: its value is empty.
            Line::Name(4) => self.begin_data(sink),
            Line::Mark(0) | Line::Name(0) if std::mem::take(&mut self.has_data) => sink.end_document(),
            _ => {}
        }
        self.line = Line::Name(0);
    }
}

/// The event stream of AWS: messages of a prelude (lengths and their checksum), headers, payload and checksum.
#[derive(Default)]
pub struct AwsEventStream {
    prelude: [u8; PRELUDE_BYTES],
    prelude_read: usize,
    /// Bytes left of the headers, the payload and the checksum, in this order.
    left: [u32; 3],
    is_malformed: bool,
}

const PRELUDE_BYTES: usize = 12;
const CHECKSUM_BYTES: u32 = 4;

impl AwsEventStream {
    pub fn push(&mut self, bytes: &[u8], sink: &mut impl DocumentSink) {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_malformed {
            if self.prelude_read < PRELUDE_BYTES {
                let (part, after) = rest.split_at(rest.len().min(PRELUDE_BYTES - self.prelude_read));
                self.prelude[self.prelude_read..][..part.len()].copy_from_slice(part);
                self.prelude_read += part.len();
                rest = after;
                if self.prelude_read == PRELUDE_BYTES {
                    self.read_prelude();
                }
                continue;
            }
            let part = self.left.iter().position(|left| *left > 0).unwrap_or(2);
            let length = rest.len().min(self.left[part] as usize);
            self.left[part] -= length as u32;
            if part == 1 {
                sink.data(&rest[..length]);
            }
            rest = &rest[length..];
            if self.left == [0; 3] {
                self.prelude_read = 0;
                sink.end_document();
            }
        }
    }

    pub fn is_malformed(&self) -> bool {
        self.is_malformed
    }

    fn read_prelude(&mut self) {
        let number = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|n| self.prelude[at + n]));
        let (total, headers) = (number(0), number(4));
        let payload =
            total.checked_sub(PRELUDE_BYTES as u32 + CHECKSUM_BYTES).and_then(|rest| rest.checked_sub(headers));
        match payload.filter(|_| number(8) == crc32(&self.prelude[..8])) {
            Some(payload) => self.left = [headers, payload, CHECKSUM_BYTES],
            None => self.is_malformed = true,
        }
    }
}

/// The checksum of IEEE 802.3, of a few bytes.
fn crc32(bytes: &[u8]) -> u32 {
    let shift = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Documents(Vec<Vec<u8>>, Vec<u8>);

    impl DocumentSink for Documents {
        fn data(&mut self, bytes: &[u8]) {
            self.1.extend_from_slice(bytes);
        }

        fn end_document(&mut self) {
            self.0.push(std::mem::take(&mut self.1));
        }
    }

    /// The events of a stream, which are equal for all sizes of pieces.
    fn events(stream: &[u8]) -> Vec<String> {
        let read = |size: usize| {
            let (mut parser, mut documents) = (ServerSentEvents::default(), Documents::default());
            stream.chunks(size).for_each(|piece| parser.push(piece, &mut documents));
            documents.0.iter().map(|event| String::from_utf8_lossy(event).into_owned()).collect::<Vec<_>>()
        };
        let whole = read(stream.len());
        (1..stream.len()).for_each(|size| assert_eq!(read(size), whole, "in pieces of {size}"));
        whole
    }

    #[test]
    fn events_are_those_of_the_standard() {
        let examples = "data: YHOO\ndata: +2\ndata: 10\n\n: comment\nid: 1\ndata: first\n\ndata:second\nid\n\ndata:  third\n\n\
            data\n\ndata\ndata\n\ndata:";
        assert_eq!(events(examples.as_bytes()), ["YHOO\n+2\n10", "first", "second", " third", "", "\n"]);
        let ends = "\u{feff}data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d\n\r\n\r\ndata:e\r\r\ndatax: f\nda: f\nData: f\n data: f\n\n";
        assert_eq!(events(ends.as_bytes()), ["a", "b", "c", "d", "e"]);
        assert_eq!(events(b"\xEF\xBB\ndata: a\n\n"), ["a"]);
        assert_eq!(events(b"\n\ndata: a: b \n\n"), ["a: b "]);
        assert_eq!(events(b"event: ping\n\nretry: 5\ndata\n: \n\n"), [""]);
    }

    fn message(headers: &[u8], payload: &[u8]) -> Vec<u8> {
        let lengths =
            [16 + headers.len() + payload.len(), headers.len()].map(|length| (length as u32).to_be_bytes()).concat();
        let checksum = crc32(&lengths).to_be_bytes();
        [&lengths, &checksum[..], headers, payload, &[0; 4]].concat()
    }

    #[test]
    fn messages_of_aws_are_read() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        let stream = [message(b"header", b"{}"), message(b"", b""), message(b"", b"payload")].concat();
        for size in 1..stream.len() {
            let (mut parser, mut documents) = (AwsEventStream::default(), Documents::default());
            stream.chunks(size).for_each(|piece| parser.push(piece, &mut documents));
            assert_eq!(documents.0, [&b"{}"[..], b"", b"payload"], "in pieces of {size}");
            assert!(!parser.is_malformed());
        }
        let mut broken = stream.clone();
        broken[1] ^= 1;
        let mut parser = AwsEventStream::default();
        parser.push(&broken, &mut Documents::default());
        assert!(parser.is_malformed());
    }
}
