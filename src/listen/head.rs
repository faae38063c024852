//! The bytes of a request's head, for what they tell and hyper does not.
//!
//! They are kept of what comes while nothing is under way. A head that came along with the request before it is not
//! told apart here: of that, hyper's own reading holds.

/// Room for the next head that a connection keeps.
const KEPT_BYTES: usize = 1024;

#[derive(Debug)]
pub struct Head {
    /// A head, and what was sent along with it.
    bytes: Vec<u8>,
    /// Some line feed has no carriage return before it, or some byte is a `#`; they may as well be of a body.
    odd: bool,
    /// A request has begun since, so that the next bytes are those of another.
    begun: bool,
    /// Bytes of the request's body that have not come; `None` where nobody knows, because it is in chunks.
    body_left: Option<u64>,
}

impl Default for Head {
    fn default() -> Head {
        Head { bytes: Vec::new(), odd: false, begun: false, body_left: Some(0) }
    }
}

impl Head {
    /// A head is complete; `body_bytes` are to follow, if their number is known.
    pub fn begin(&mut self, body_bytes: Option<u64>) {
        let known = if self.begun || body_bytes == Some(0) { 0 } else { self.behind() };
        self.body_left = body_bytes.map(|bytes| bytes.saturating_sub(known));
        self.begun = true;
    }

    /// Bytes that came with a head, behind it.
    fn behind(&self) -> u64 {
        let end = self.bytes.windows(4).position(|four| four == b"\r\n\r\n");
        end.map_or(0, |end| (self.bytes.len() - end - 4) as u64)
    }

    /// Bytes have come: what is left of the request's body and, behind it, what may be another head. Returns
    /// whether there is any of that; `busy`: a request is under way.
    pub fn receive(&mut self, bytes: &[u8], busy: bool) -> bool {
        let of_body = self.body_left.map_or(0, |left| usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len()));
        self.body_left = self.body_left.map(|left| left - of_body as u64);
        let is_head = !busy && of_body < bytes.len();
        if is_head {
            self.hear(&bytes[of_body..]);
        }
        is_head
    }

    fn hear(&mut self, bytes: &[u8]) {
        if self.begun {
            self.begun = false;
            self.odd = false;
            self.bytes.clear();
            self.bytes.shrink_to(KEPT_BYTES);
        }
        // Behind chunks that nobody wanted, these may as well be more of them.
        self.odd |= self.body_left.is_some() && is_odd(self.bytes.last().copied(), bytes);
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether a line of the head that came with the request just begun ends in a line feed alone. hyper takes
    /// that for the end of a line, and others may not; so what one of them takes for a field could be a
    /// request here.
    pub fn has_bare_line_end(&self) -> bool {
        let lines = || self.bytes.split_inclusive(|byte| *byte == b'\n');
        let is_empty = |line: &&[u8]| *line == b"\r\n";
        // Behind the empty line comes the body, which may have any bytes.
        self.odd && lines().skip_while(is_empty).take_while(|line| !is_empty(line)).any(|line| !line.ends_with(b"\r\n"))
    }

    /// Whether the target of the request just begun has a fragment. No client sends one (RFC 9112, section 3.2); hyper
    /// leaves it out, and others take it for a part of the path.
    pub fn has_fragment(&self) -> bool {
        let first = || self.bytes.split(|byte| *byte == b'\n').find(|line| !matches!(line, [] | [b'\r']));
        self.odd && first().is_some_and(|line| line.contains(&b'#'))
    }

    /// Whether a head that came with the request just begun gives both chunks and a length for its body. hyper
    /// leaves the length out, so only the bytes can tell. Behind what is kept of them, what RFC 9112, section
    /// 6.3 says holds: the chunks count, and the connection is closed.
    pub fn gives_length_beside_chunks(&self) -> bool {
        let lines = self.bytes.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let (mut chunks, mut length) = (false, false);
        for line in lines {
            let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
            chunks |= name.eq_ignore_ascii_case(b"transfer-encoding");
            length |= name.eq_ignore_ascii_case(b"content-length");
            // Behind a head with a body comes the body, which may look like anything.
            if (chunks && length) || (line.is_empty() && (chunks || length)) {
                break;
            }
        }
        chunks && length
    }
}

/// Whether a line feed comes without a carriage return before it, or there is a `#`; `last` is the byte before
/// these. All bytes are looked at, without a branch: so the compiler takes many at a time.
fn is_odd(last: Option<u8>, bytes: &[u8]) -> bool {
    let begins_odd = bytes
        .first()
        .is_some_and(|first| *first == b'#' || (*first == b'\n' && last.is_some_and(|last| last != b'\r')));
    let pairs = bytes.iter().zip(bytes.iter().skip(1));
    let odd = pairs.fold(0, |odd, (first, second)| {
        odd | (u8::from(*second == b'\n') & u8::from(*first != b'\r')) | u8::from(*second == b'#')
    });
    begins_odd || odd != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(pieces: &[&str]) -> Head {
        let mut head = Head::default();
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
            ("GET / HTTP/1.1\r\nHost: a\n\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\n\n", true),
        ] {
            for at in 1..text.len() {
                let mut head = heard(&[&text[..at], &text[at..]]);
                head.begin(Some(0));
                assert_eq!(head.has_bare_line_end(), bare, "{text:?} {at}");
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
                let mut head = heard(&[&text[..at], &text[at..]]);
                head.begin(Some(0));
                assert_eq!(head.has_fragment(), fragment, "{text:?} {at}");
                assert!(!head.has_bare_line_end());
            }
        }
    }

    #[test]
    fn the_rest_of_a_body_is_no_head() {
        let mut head = heard(&["POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n01"]);
        head.begin(Some(10));
        assert!(!head.receive(b"2\n4567", false) && !head.receive(b"8", true));
        assert!(head.receive(b"\nGET / HTTP/1.1\r\n\r\n", false));
        head.begin(Some(0));
        assert!(!head.has_bare_line_end());
        assert!(head.receive(b"GET / HTTP/1.1\n\r\n", false));
        head.begin(Some(0));
        assert!(head.has_bare_line_end());
    }
}
