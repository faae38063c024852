//! The cluster slot of a key: CRC-16 (XMODEM) of its hash tag, modulo the number of slots.

pub const SLOTS: u16 = 16_384;

/// The slot of a key. If the key has a hash tag, `{...}`, only the tag is hashed.
pub fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    crc16(tag.filter(|tag| !tag.is_empty()).unwrap_or(key).as_bytes()) % SLOTS
}

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let at = usize::from((crc >> 8) as u8 ^ byte);
        crc << 8 ^ TABLE[at]
    })
}

const TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        // As `CLUSTER KEYSLOT` replies.
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("a{foo}b{bar}"), 12182);
        assert_eq!(slot("foo{}{bar}"), 8363);
        assert_eq!(slot("{foo"), slot("{foo"));
    }
}
