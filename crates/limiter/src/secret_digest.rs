//! What stands in a file for a secret: its SHA-256.
//!
//! An API key is long and drawn at random, so nobody finds it by trying, however fast each try is: the
//! slow digests that passwords need would only slow down every request. A digest can be looked up in a
//! hash map, although that takes a time that depends on what is looked for: whoever measures it
//! learns about digests, whose keys can not be computed from them. This file knows no file and no
//! request.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// How many characters of a digest tell it from others where it is only shown.
const BRIEF_CHARS: usize = 8;

/// The SHA-256 of a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// What a digest in a file begins with.
    pub const PREFIX: &str = "sha256:";

    pub fn of(secret: &[u8]) -> Digest {
        Digest(Sha256::digest(secret).into())
    }

    /// Reads `sha256:` and 64 hex digits, of any case.
    pub fn parse(text: &str) -> Option<Digest> {
        let digits = text.strip_prefix(Digest::PREFIX)?.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Some(Digest(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The beginning of it, for lists that people read.
    pub fn brief(&self) -> String {
        let mut text = self.to_string();
        text.truncate(Digest::PREFIX.len() + BRIEF_CHARS);
        text.push('…');
        text
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Digest::PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.brief())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-4, the example "abc".
    const ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn it_is_sha_256() {
        assert_eq!(Digest::of(b"abc").to_string(), ABC);
        assert_eq!(format!("{:?}", Digest::of(b"abc")), "sha256:ba7816bf…");
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(Digest::parse(ABC), Some(Digest::of(b"abc")));
        assert_eq!(Digest::parse(&format!("sha256:{}", ABC[7..].to_uppercase())), Some(Digest::of(b"abc")));
        for text in ["", "abc", "sha256:", &ABC[7..], &ABC[..70], &format!("{ABC}0"), &ABC.replace('b', "x")] {
            assert_eq!(Digest::parse(text), None, "{text}");
        }
    }
}
