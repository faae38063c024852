//! Decoder for Huffman-coded strings in HPACK (RFC 7541, section 5.2 and appendix B). Used by `hpack`.

/// The end-of-string symbol, which must not occur in a string.
const EOS: u16 = 256;
const LENGTH_MAX: usize = 30;

/// Code length in bits of each byte and of `EOS`. The code is canonical: codes of one length are consecutive in the order of the
/// bytes, and longer codes follow shorter ones. So the lengths determine the code.
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28,
    28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12,
    10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6,
    5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22,
    22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20,
    22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28,
    27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28,
    27, 27, 27, 27, 27, 26, 30,
];

/// Decoding tables, by code length.
struct Codes {
    /// The first code of a length.
    first: [u32; LENGTH_MAX + 1],
    /// One more than the last code of a length, left-aligned in 32 bits.
    limit: [u64; LENGTH_MAX + 1],
    /// Index in `symbols` of the first symbol of a length.
    offset: [u32; LENGTH_MAX + 1],
    /// Bytes and `EOS` in the order of their codes.
    symbols: [u16; 257],
}

const CODES: Codes = {
    let mut codes = Codes {
        first: [0; LENGTH_MAX + 1],
        limit: [0; LENGTH_MAX + 1],
        offset: [0; LENGTH_MAX + 1],
        symbols: [0; 257],
    };
    let (mut next, mut known, mut length) = (0, 0, 1);
    while length <= LENGTH_MAX {
        codes.first[length] = next;
        codes.offset[length] = known;
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                codes.symbols[known as usize] = symbol as u16;
                known += 1;
                next += 1;
            }
            symbol += 1;
        }
        codes.limit[length] = (next as u64) << (32 - length);
        next <<= 1;
        length += 1;
    }
    codes
};

/// Appends the decoded string to `decoded`; `None` if the encoding is invalid.
pub fn decode(encoded: &[u8], decoded: &mut Vec<u8>) -> Option<()> {
    static TABLE: Codes = CODES;
    // The next bits are the highest.
    let (mut bits, mut held) = (0u64, 0usize);
    let mut encoded = encoded.iter();
    loop {
        while held <= 56
            && let Some(byte) = encoded.next()
        {
            bits |= u64::from(*byte) << (56 - held);
            held += 8;
        }
        let window = bits >> 32;
        let mut length = 5;
        while length <= LENGTH_MAX && window >= TABLE.limit[length] {
            length += 1;
        }
        if length > held {
            // Padding: the first bits of EOS, fewer than eight.
            let is_padding = held < 8 && bits == !(u64::MAX >> held);
            return is_padding.then_some(());
        }
        let code = (window >> (32 - length)) as u32;
        match TABLE.symbols[(TABLE.offset[length] + code - TABLE.first[length]) as usize] {
            EOS => return None,
            byte => decoded.push(byte as u8),
        }
        bits <<= length;
        held -= length;
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    fn decoded(encoded: &[u8]) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        decode(encoded, &mut all).map(|()| all)
    }

    /// The code of a byte, as a number.
    fn code(symbol: usize) -> u32 {
        let length = usize::from(LENGTHS[symbol]);
        let before = LENGTHS[..symbol].iter().filter(|other| usize::from(**other) == length).count();
        CODES.first[length] + before as u32
    }

    pub fn encoded(text: &[u8]) -> Vec<u8> {
        let (mut bits, mut held, mut encoded) = (0u64, 0, Vec::new());
        for byte in text {
            let length = LENGTHS[usize::from(*byte)];
            bits = bits << length | u64::from(code((*byte).into()));
            held += length;
            while held >= 8 {
                held -= 8;
                encoded.push((bits >> held) as u8);
            }
        }
        if held > 0 {
            encoded.push((bits << (8 - held)) as u8 | 0xff >> held);
        }
        encoded
    }

    #[test]
    fn the_examples_of_the_rfc_are_decoded() {
        // RFC 7541, appendix C.4.1 and C.6.1.
        let host = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(decoded(&host).unwrap(), b"www.example.com");
        let date = [
            0xd0, 0x7a, 0xbe, 0x94, 0x10, 0x54, 0xd4, 0x44, 0xa8, 0x20, 0x05, 0x95, 0x04, 0x0b, 0x81, 0x66, 0xe0, 0x82,
            0xa6, 0x2d, 0x1b, 0xff,
        ];
        assert_eq!(decoded(&date).unwrap(), b"Mon, 21 Oct 2013 20:13:21 GMT");
        // Codes that appendix B lists.
        assert_eq!(
            (code(0), code(b'\n'.into()), code(b'~'.into()), code(255)),
            (0x1ff8, 0x3fff_fffc, 0x1ffd, 0x3ff_ffee)
        );
        assert_eq!(code(256), 0x3fff_ffff);
    }

    #[test]
    fn every_byte_is_decoded_at_every_position() {
        for byte in 0..=255 {
            for text in [vec![byte], vec![b'0', byte], vec![byte; 3], vec![b'X', byte, b'a']] {
                assert_eq!(decoded(&encoded(&text)).unwrap(), text);
            }
        }
        assert_eq!(decoded(&[]).unwrap(), b"");
    }

    #[test]
    fn invalid_strings_are_reported() {
        // A byte of padding, padding of zeros, and EOS.
        for bad in [&[0xff][..], &[0x1f, 0xff], &[0b0000_0000], &[0xff, 0xff, 0xff, 0xff], &[0xff, 0xff, 0xff, 0xfc]] {
            assert_eq!(decoded(bad), None, "{bad:x?}");
        }
    }
}
