//! Percent-encoding of the segments of paths, and sets of bytes as lookup tables.
//!
//! `path_normalize` brings the paths of requests into the normal form of these functions, and the configuration checks that the
//! patterns of routes have it.

/// Whether a byte may stand unescaped in a path segment: `pchar` of RFC 3986, section 3.3, without percent-encodings.
/// Patterns and normalized paths leave exactly these bytes unescaped.
pub fn is_pchar(byte: u8) -> bool {
    PCHAR[usize::from(byte)]
}

const PCHAR: [bool; 256] = byte_set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@");

/// A lookup table of the given bytes.
pub const fn byte_set(bytes: &[u8]) -> [bool; 256] {
    let mut set = [false; 256];
    let mut i = 0;
    while i < bytes.len() {
        set[bytes[i] as usize] = true;
        i += 1;
    }
    set
}

/// Appends a byte of a segment, plain or escaped (RFC 3986, section 6.2.2).
pub fn push_encoded(byte: u8, out: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    if is_pchar(byte) {
        out.push(char::from(byte));
    } else {
        out.extend(['%', HEX[usize::from(byte >> 4)].into(), HEX[usize::from(byte & 15)].into()]);
    }
}

/// The byte that `%XX` at the beginning of a text encodes.
pub fn decode_escape(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    Some((digit(*high)? << 4 | digit(*low)?) as u8)
}

/// Why a normalized segment is ambiguous, if it is: some servers interpret it differently.
/// - `..;x` as `..`: servers that remove path parameters before they resolve dot segments;
/// - `login%0A` as `login`: `$` in a regular expression matches before a line end. Other control characters end
///   strings or are dropped;
/// - `%C0%AF`, which is not UTF-8, as `/`: decoders that accept overlong encodings.
pub fn find_ambiguity(segment: &str) -> Option<&'static str> {
    let dots = segment.split(';').next().unwrap_or_default();
    if (dots == "." || dots == "..") && dots != segment {
        return Some("the path has dots before a semicolon");
    }
    let mut before = 0;
    for code in segment.split('%').skip(1) {
        let digits = code.get(..2).unwrap_or_default();
        let byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        if byte.is_ascii_control() {
            return Some("the path contains an encoded control character");
        }
        if let (0xC0 | 0xC1, 0x80..=0xBF) | (0xE0, 0x80..=0x9F) | (0xF0, 0x80..=0x8F) = (before, byte) {
            return Some("the path contains an overlong encoding of a character");
        }
        // Only adjacent codes form one character.
        before = if code.len() == 2 { byte } else { 0 };
    }
    None
}
