//! SHA-256 digests of secrets, which configuration files contain instead of the secrets.
//!
//! An API key is long and random, so it cannot be guessed, however fast the digest is; a slow password hash would only
//! slow down every request. Digests are looked up in a hash map in variable time: an attacker who measures it learns
//! about digests, from which the keys cannot be computed.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// Characters of a digest that are shown.
const BRIEF_CHARS: usize = 8;

/// The SHA-256 of a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The prefix of a digest in a file.
    pub const PREFIX: &str = "sha256:";

    /// The digest of a secret.
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

    /// The 32 bytes of the digest.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The first characters, for lists.
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
    fn the_digest_is_sha_256() {
        assert_eq!(Digest::of(b"abc").to_string(), ABC);
        assert_eq!(Digest::of(b"abc").bytes()[..3], [0xba, 0x78, 0x16]);
        assert_eq!(format!("{:?}", Digest::of(b"abc")), "sha256:ba7816bf…");
    }

    #[test]
    fn a_printed_digest_is_read_back() {
        assert_eq!(Digest::parse(ABC), Some(Digest::of(b"abc")));
        assert_eq!(Digest::parse(&format!("sha256:{}", ABC[7..].to_uppercase())), Some(Digest::of(b"abc")));
        for text in ["", "abc", "sha256:", &ABC[7..], &ABC[..70], &format!("{ABC}0"), &ABC.replace('b', "x")] {
            assert_eq!(Digest::parse(text), None, "{text}");
        }
    }
}
