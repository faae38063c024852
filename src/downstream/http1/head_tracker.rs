//! The bytes of requests' heads, for what they tell and hyper does not.
//!
//! What comes from a client is told apart as heads and bodies, also where several requests come at once or in pieces: how
//! long a body is, hyper says with each head, and where the chunks of one end, `chunks` finds out. Heads are kept until
//! the next bytes come, bodies are passed over.

use crate::downstream::http1::chunked::ChunkedScanner;

/// Room for the next head that a connection keeps.
const RETAINED_BYTES: usize = 1024;

#[derive(Debug)]
pub struct HeadTracker {
    /// A head, and what has come behind it that is not known to be of its request's body.
    bytes: Vec<u8>,
    /// They are one head with proper line ends and without a `#`, and nothing else.
    is_single_clean_head: bool,
    /// They are what the head before was, to the byte.
    repeats_previous: bool,
    /// How many of them are the head of the request that has begun.
    head_bytes: usize,
    /// And how many belong to that request, with its body.
    request_bytes: usize,
    body: RemainingBody,
}

/// What is to come of a request's body.
#[derive(Debug)]
enum RemainingBody {
    Length(u64),
    Chunked(ChunkedScanner),
}

impl RemainingBody {
    /// Passes over what belongs to the body; says how much that is.
    fn skip(&mut self, bytes: &[u8]) -> usize {
        match self {
            RemainingBody::Length(left) => {
                let passed = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= passed as u64;
                passed
            }
            RemainingBody::Chunked(chunks) => chunks.skip_body(bytes),
        }
    }
}

impl Default for HeadTracker {
    fn default() -> HeadTracker {
        HeadTracker {
            bytes: Vec::new(),
            is_single_clean_head: false,
            repeats_previous: false,
            head_bytes: 0,
            request_bytes: 0,
            body: RemainingBody::Length(0),
        }
    }
}

impl HeadTracker {
    /// A head is complete; `body_bytes` are to follow, if their number is known. If not, it is in chunks.
    pub fn begin_request(&mut self, body_bytes: Option<u64>) {
        self.discard_request();
        self.head_bytes = if self.is_single_clean_head { self.bytes.len() } else { end_of_head(&self.bytes) };
        self.body = body_bytes.map_or_else(|| RemainingBody::Chunked(ChunkedScanner::default()), RemainingBody::Length);
        self.request_bytes = self.head_bytes + self.body.skip(&self.bytes[self.head_bytes..]);
    }

    /// Bytes have come: what is left of the request's body and, behind it, what may be another head. Returns
    /// whether there is any of that; `busy`: a request is under way.
    pub fn receive(&mut self, bytes: &[u8], busy: bool) -> bool {
        self.repeats_previous = false;
        let of_body = self.body.skip(bytes);
        let rest = &bytes[of_body..];
        if rest.is_empty() {
            return false;
        }
        self.repeats_previous =
            self.is_single_clean_head && self.request_bytes == self.bytes.len() && rest == self.bytes;
        if self.repeats_previous {
            (self.head_bytes, self.request_bytes) = (0, 0);
            return !busy;
        }
        self.discard_request();
        self.is_single_clean_head = self.bytes.is_empty() && is_single_clean_head(rest);
        self.bytes.extend_from_slice(rest);
        !busy
    }

    /// Whether what has come is one head, and the same to the byte as that of the request before.
    pub fn repeats_previous(&self) -> bool {
        self.repeats_previous
    }

    /// Lets go of the request that has begun.
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

    /// Whether a line of the head of the request just begun ends in a line feed alone. hyper takes
    /// that for the end of a line, and others may not; so what one of them takes for a field could be a
    /// request here.
    pub fn has_bare_line_end(&self) -> bool {
        !self.is_single_clean_head && self.lines().any(|line| !line.ends_with(b"\r\n"))
    }

    /// Whether the target of the request just begun has a fragment. No client sends one (RFC 9112, section 3.2); hyper
    /// leaves it out, and others take it for a part of the path.
    pub fn has_fragment(&self) -> bool {
        let first = || self.lines().find(|line| !matches!(*line, b"\r\n" | b"\n"));
        !self.is_single_clean_head && first().is_some_and(|line| line.contains(&b'#'))
    }

    /// Whether the target makes the next request line at least this long, as far as that has come.
    pub fn has_long_target(&self, bytes: usize) -> bool {
        let mut lines = self.bytes[self.request_bytes..].split(|byte| *byte == b'\n');
        let line = lines.find(|line| !matches!(*line, b"" | b"\r"));
        line.is_some_and(|line| line.len() >= bytes && line.contains(&b' '))
    }

    /// The number of field lines in the head of the request just begun, including those that hyper drops.
    pub fn fields(&self) -> usize {
        let head = &self.bytes[..self.head_bytes];
        let begin = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(head.len());
        let lines = head[begin..].iter().filter(|byte| **byte == b'\n').count();
        // The request line and the empty line at the end are not fields.
        lines.saturating_sub(2)
    }

    /// Whether the body of the request just begun has a trailer line that does not end in CR LF.
    pub fn has_malformed_trailers(&self) -> bool {
        matches!(&self.body, RemainingBody::Chunked(chunks) if chunks.is_malformed())
    }
}

/// Where a head ends: behind the first empty line, but for those before it, which hyper passes over.
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

/// Whether these bytes are one head, of which each line ends as it should: no line feed stands without a carriage
/// return before it, and none before one but at the end; and no byte is a `#`. All bytes are looked at, without a branch: so the compiler
/// takes many at a time.
fn is_single_clean_head(bytes: &[u8]) -> bool {
    if bytes.first() == Some(&b'\n') {
        return false;
    }
    let inside = bytes.len().saturating_sub(2);
    let pairs = bytes[..inside].iter().zip(bytes[..inside].iter().skip(1));
    let doubt = pairs.fold(0, |doubt, (first, second)| {
        let is_bare = u8::from(*second == b'\n') & u8::from(*first != b'\r');
        doubt | is_bare | (u8::from(*second == b'\r') & u8::from(*first == b'\n')) | u8::from(*second == b'#')
    });
    doubt == 0 && bytes.ends_with(b"\r\n\r\n")
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
    fn bare_line_feeds_are_found_wherever_a_head_is_cut() {
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
    fn the_same_head_again_is_known_by_its_bytes() {
        const GET: &[u8] = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n";
        const OTHER: &[u8] = b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n";
        let mut head = HeadTracker::default();
        let mut next = |pieces: &[&[u8]], bodies: &[u64]| {
            for piece in pieces {
                head.receive(piece, false);
            }
            let repeats = head.repeats_previous();
            bodies.iter().for_each(|body| head.begin_request(Some(*body)));
            repeats
        };
        assert_eq!([(); 3].map(|()| next(&[GET], &[0])), [false, true, true]);
        assert_eq!([OTHER, OTHER, GET].map(|bytes| next(&[bytes], &[0])), [false, true, false]);
        // In pieces, behind an empty line, two at once: what is not plainly the same is another.
        assert!(!next(&[&GET[..9], &GET[9..]], &[0]) && !next(&[GET], &[0]) && next(&[GET], &[0]));
        assert!(!next(&[&[b"\r\n", GET].concat()], &[0]) && !next(&[GET], &[0]) && next(&[GET], &[0]));
        assert!(!next(&[&GET.repeat(2)], &[0, 0]) && !next(&[GET], &[0]) && next(&[GET], &[0]));
        // A body may look like a head.
        assert!(next(&[GET], &[GET.len() as u64]) && !next(&[GET], &[]) && next(&[GET], &[0]));
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
    fn the_rest_of_a_body_is_no_head() {
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
    fn heads_behind_others_are_told_apart() {
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
