//! Tracks request heads in the bytes of a connection, for what hyper does not report about them: line endings, fragments,
//! and the number of field lines.
//!
//! Heads and bodies are separated also when requests are pipelined or arrive in pieces: hyper reports the length of each body
//! with its head, and `chunked` finds the end of a chunked one. Heads are kept until the next bytes arrive; bodies are skipped.

use crate::downstream::http1::chunked::ChunkedScanner;

/// Buffer capacity that a connection retains for its next head.
const RETAINED_BYTES: usize = 1024;

/// The head of the current request, and bytes received behind the request.
#[derive(Debug)]
pub struct HeadTracker {
    /// A head, and the bytes behind it that are not known to belong to its body.
    bytes: Vec<u8>,
    /// `bytes` are exactly one head whose lines end in CR LF, without a `#`.
    is_single_clean_head: bool,
    /// Length of the current request's head in `bytes`.
    head_bytes: usize,
    /// Length of the current request in `bytes`, with its body.
    request_bytes: usize,
    body: RemainingBody,
}

/// The part of a request's body that was not received yet.
#[derive(Debug)]
enum RemainingBody {
    Length(u64),
    Chunked(ChunkedScanner),
}

impl RemainingBody {
    /// Skips the bytes of the body; returns their number.
    fn skip(&mut self, bytes: &[u8]) -> usize {
        match self {
            RemainingBody::Length(left) => {
                let passed = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= passed as u64;
                passed
            }
            RemainingBody::Chunked(scanner) => scanner.skip_body(bytes),
        }
    }
}

impl Default for HeadTracker {
    fn default() -> HeadTracker {
        HeadTracker {
            bytes: Vec::new(),
            is_single_clean_head: false,
            head_bytes: 0,
            request_bytes: 0,
            body: RemainingBody::Length(0),
        }
    }
}

impl HeadTracker {
    /// Begins a request, whose head is complete. `body_bytes`: length of its body; `None`: it is chunked.
    pub fn begin_request(&mut self, body_bytes: Option<u64>) {
        self.discard_request();
        self.head_bytes = if self.is_single_clean_head { self.bytes.len() } else { end_of_head(&self.bytes) };
        self.body = body_bytes.map_or_else(|| RemainingBody::Chunked(ChunkedScanner::default()), RemainingBody::Length);
        self.request_bytes = self.head_bytes + self.body.skip(&self.bytes[self.head_bytes..]);
    }

    /// Takes received bytes: the rest of the current body and, behind it, bytes of the next head. Returns whether there are
    /// bytes of a next head while no request is in flight (`busy` is false).
    pub fn receive(&mut self, bytes: &[u8], busy: bool) -> bool {
        let body_bytes = self.body.skip(bytes);
        let rest = &bytes[body_bytes..];
        if rest.is_empty() {
            return false;
        }
        self.discard_request();
        self.is_single_clean_head = self.bytes.is_empty() && is_single_clean_head(rest);
        self.bytes.extend_from_slice(rest);
        !busy
    }

    /// Bytes behind the current request.
    pub fn next_bytes(&self) -> &[u8] {
        &self.bytes[self.request_bytes..]
    }

    /// Discards the bytes of the current request.
    fn discard_request(&mut self) {
        if self.request_bytes == 0 {
            return;
        }
        if self.request_bytes == self.bytes.len() {
            self.bytes.clear();
        } else {
            drop(self.bytes.drain(..self.request_bytes));
        }
        self.is_single_clean_head = false;
        self.bytes.shrink_to(RETAINED_BYTES);
        (self.head_bytes, self.request_bytes) = (0, 0);
    }

    fn lines(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes[..self.head_bytes].split_inclusive(|byte| *byte == b'\n')
    }

    /// Whether a line of the current head ends in a line feed without a carriage return. hyper accepts that as the end of a
    /// line, other parsers may not: one would see a field where the other sees a request (request smuggling).
    pub fn has_bare_line_end(&self) -> bool {
        !self.is_single_clean_head && self.lines().any(|line| !line.ends_with(b"\r\n"))
    }

    /// Whether the target of the current request has a fragment. No client sends one (RFC 9112, section 3.2); hyper drops
    /// the fragment, other parsers take it as part of the path.
    pub fn has_fragment(&self) -> bool {
        let first = || self.lines().find(|line| !matches!(*line, b"\r\n" | b"\n"));
        !self.is_single_clean_head && first().is_some_and(|line| line.contains(&b'#'))
    }

    /// Whether the next request line, as far as received, has at least `bytes` bytes because of its target.
    pub fn has_long_target(&self, bytes: usize) -> bool {
        let mut lines = self.next_bytes().split(|byte| *byte == b'\n');
        let line = lines.find(|line| !matches!(*line, b"" | b"\r"));
        line.is_some_and(|line| line.len() >= bytes && line.contains(&b' '))
    }

    /// The number of field lines in the current head, including those that hyper drops.
    pub fn fields(&self) -> usize {
        let head = &self.bytes[..self.head_bytes];
        let begin = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(head.len());
        let lines = head[begin..].iter().filter(|byte| **byte == b'\n').count();
        // The request line and the empty line at the end are not fields.
        lines.saturating_sub(2)
    }

    /// Whether the body of the current request has a trailer line that does not end in CR LF.
    pub fn has_malformed_trailers(&self) -> bool {
        matches!(&self.body, RemainingBody::Chunked(scanner) if scanner.is_malformed())
    }
}

/// The length of a head: up to its first empty line. hyper skips empty lines before the request line.
fn end_of_head(bytes: &[u8]) -> usize {
    let (mut end, mut begun) = (0, false);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        end += line.len();
        let is_empty = matches!(line, b"\r\n" | b"\n");
        if is_empty && begun {
            break;
        }
        begun |= !is_empty;
    }
    end
}

/// Whether `bytes` are exactly one head whose lines all end in CR LF, without a `#`: every line feed follows a carriage
/// return, and only at the end does an empty line follow. The loop has no branch, so that the compiler vectorizes it.
fn is_single_clean_head(bytes: &[u8]) -> bool {
    if bytes.first() == Some(&b'\n') {
        return false;
    }
    let inside = bytes.len().saturating_sub(2);
    let pairs = bytes[..inside].iter().zip(bytes[..inside].iter().skip(1));
    let problem = pairs.fold(0, |problem, (first, second)| {
        let is_bare = u8::from(*second == b'\n') & u8::from(*first != b'\r');
        problem | is_bare | (u8::from(*second == b'\r') & u8::from(*first == b'\n')) | u8::from(*second == b'#')
    });
    problem == 0 && bytes.ends_with(b"\r\n\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(pieces: &[&str]) -> HeadTracker {
        let mut head = HeadTracker::default();
        for piece in pieces {
            assert!(head.receive(piece.as_bytes(), false));
        }
        head
    }

    #[test]
    fn bare_line_feeds_are_found_in_a_head_cut_anywhere() {
        for (text, bare) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", false),
            ("\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nbody\nbody", false),
            ("GET / HTTP/1.1\nHost: a\r\n\r\n", true),
            ("\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\n\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\n\n", true),
        ] {
            let whole = std::iter::once(vec![text]);
            for pieces in whole.chain((1..text.len()).map(|at| vec![&text[..at], &text[at..]])) {
                let mut head = received(&pieces);
                head.begin_request(Some(0));
                assert_eq!(head.has_bare_line_end(), bare, "{pieces:?}");
            }
        }
    }

    #[test]
    fn fragments_are_found_wherever_a_head_is_cut() {
        for (text, fragment) in [
            ("GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", true),
            ("\r\nGET /# HTTP/1.1\r\nHost: a\r\n\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\nX: #\r\n\r\n#", false),
        ] {
            for at in 1..text.len() {
                let mut head = received(&[&text[..at], &text[at..]]);
                head.begin_request(Some(0));
                assert_eq!(head.has_fragment(), fragment, "{text:?} {at}");
                assert!(!head.has_bare_line_end());
            }
        }
    }

    #[test]
    fn the_rest_of_a_body_is_not_part_of_the_next_head() {
        let mut head = received(&["POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n01"]);
        head.begin_request(Some(10));
        assert!(!head.receive(b"2\n4567", false) && !head.receive(b"8", true));
        assert!(head.receive(b"\nGET / HTTP/1.1\r\n\r\n", false));
        head.begin_request(Some(0));
        assert!(!head.has_bare_line_end());
        assert!(head.receive(b"GET / HTTP/1.1\n\r\n", false));
        head.begin_request(Some(0));
        assert!(head.has_bare_line_end());
    }

    #[test]
    fn pipelined_heads_are_separated() {
        const CHUNKED: &str = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        let bodies = [
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), Some(0)),
            ("POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\na\n\nb".to_owned(), Some(4)),
            (format!("{CHUNKED}3;x=\"y\r\na\n\n\r\n0C\r\n0\r\n\r\nGET /\n\r\n0\r\nX: y\r\n\r\n"), None),
        ];
        for (first, length) in &bodies {
            for (second, bare, fields) in [
                ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", false, 1),
                ("\r\n\r\nGET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", true, 2),
                ("GET / HTTP/1.1\nHost: a\n\n", true, 1),
                ("GET / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", false, 2),
            ] {
                let all = format!("{first}{second}");
                let end = end_of_head(first.as_bytes());
                for cut in end..all.len() {
                    let mut head = received(&[&all[..cut]]);
                    head.begin_request(*length);
                    assert!(!head.has_bare_line_end() && !head.has_malformed_trailers(), "{all:?}");
                    assert_eq!(head.fields(), usize::from(*length != Some(0)), "{all:?}");
                    head.receive(&all.as_bytes()[cut..], false);
                    head.begin_request(Some(0));
                    assert_eq!(head.has_bare_line_end(), bare, "{all:?} {cut}");
                    assert_eq!(head.fields(), fields, "{all:?} {cut}");
                }
            }
        }
    }
}
