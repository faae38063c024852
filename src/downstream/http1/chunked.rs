//! Finds the end of a chunked body (RFC 9112, section 7.1) in the bytes of a connection.
//!
//! hyper validates chunks, and ends the connection if they are malformed. Trailer lines are validated here: hyper takes a line
//! feed without a carriage return as part of the line, other parsers take it as the end of the line.

/// Position in a chunked body.
#[derive(Debug)]
pub struct ChunkedScanner(ScanState);

impl Default for ChunkedScanner {
    fn default() -> ChunkedScanner {
        ChunkedScanner(ScanState::Size(0))
    }
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum ScanState {
    /// The size of a chunk, as far as its digits were received.
    Size(u64),
    /// A chunk extension, behind this size.
    Extension(u64),
    /// The data of a chunk with its line end: bytes left.
    Chunk(u64),
    /// The first byte of a trailer line or of the empty line at the end.
    LineStart,
    /// The rest of a trailer line.
    Line,
    /// The line feed of a trailer line.
    LineFeed,
    /// The line feed of the empty line.
    LastLineFeed,
    End,
    /// A trailer line did not end in CR LF, so parsers disagree about where the body ends.
    Malformed,
}

impl ChunkedScanner {
    /// Skips the bytes of the body; returns their number.
    pub fn skip_body(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let (Some(byte), false) = (bytes.get(at), matches!(self.0, ScanState::End)) {
            if let ScanState::Chunk(left) = self.0 {
                let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                at += skipped;
                let left = left - skipped as u64;
                self.0 = if left == 0 { ScanState::Size(0) } else { ScanState::Chunk(left) };
                continue;
            }
            self.0 = self.0.after(*byte);
            at += 1;
        }
        at
    }

    /// Whether a trailer line did not end in CR LF.
    pub fn is_malformed(&self) -> bool {
        matches!(self.0, ScanState::Malformed)
    }
}

impl ScanState {
    fn after(self, byte: u8) -> ScanState {
        let digit = char::from(byte).to_digit(16).map(u64::from);
        match (self, byte) {
            (ScanState::Size(0) | ScanState::Extension(0), b'\n') => ScanState::LineStart,
            (ScanState::Size(size) | ScanState::Extension(size), b'\n') => ScanState::Chunk(size.saturating_add(2)),
            (ScanState::Size(size), _) => match digit {
                Some(digit) => ScanState::Size(size.saturating_mul(16).saturating_add(digit)),
                None => ScanState::Extension(size),
            },
            (ScanState::LineStart, b'\r') => ScanState::LastLineFeed,
            (ScanState::Line, b'\r') => ScanState::LineFeed,
            (ScanState::LineFeed, b'\n') => ScanState::LineStart,
            (ScanState::LastLineFeed, b'\n') => ScanState::End,
            (ScanState::LineStart | ScanState::Line, b'\n') | (ScanState::LineFeed | ScanState::LastLineFeed, _) => {
                ScanState::Malformed
            }
            (ScanState::LineStart | ScanState::Line, _) => ScanState::Line,
            (ScanState::Extension(_) | ScanState::Chunk(_) | ScanState::End | ScanState::Malformed, _) => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_wherever_a_body_is_cut() {
        for body in [
            "0\r\n\r\n",
            "3\r\nabc\r\n0\r\n\r\n",
            "2;a=b\r\n\r\n\r\n1 \r\n0\r\n000\r\nX: y\r\nZ: 0\r\n\r\n",
            "a\r\n0\r\n\r\nGET \n\r\n00;0\r\n\r\n",
        ] {
            let all = format!("{body}GET / HTTP/1.1\r\n\r\n");
            for cut in 0..all.len() {
                let mut scanner = ChunkedScanner::default();
                let (first, second) = all.as_bytes().split_at(cut);
                assert_eq!(scanner.skip_body(first) + scanner.skip_body(second), body.len(), "{body:?} {cut}");
            }
        }
    }

    #[test]
    fn a_trailer_line_that_does_not_end_in_cr_lf_is_malformed() {
        for body in ["0\r\n\n", "0\r\nX: y\n\r\n\r\n", "0\r\nX: y\r\nZ: w\n\r\n", "0\r\n\rX", "0\r\nX: \ry\r\n\r\n"] {
            let all = format!("{body}GET / HTTP/1.1\r\n\r\n");
            for cut in 0..all.len() {
                let mut scanner = ChunkedScanner::default();
                let (first, second) = all.as_bytes().split_at(cut);
                assert_eq!(scanner.skip_body(first) + scanner.skip_body(second), all.len(), "{body:?} {cut}");
                assert!(scanner.is_malformed(), "{body:?}");
            }
        }
    }
}
