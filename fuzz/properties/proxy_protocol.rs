//! For any bytes: the length of a PROXY header does not depend on the bytes after it, each shorter prefix of the header is
//! incomplete, and malformed bytes stay malformed when more follow.

use transom::downstream::proxy_protocol::{HeaderProgress, MAX_BYTES, parse};

pub fn holds(bytes: &[u8]) {
    let whole = parse(bytes);
    match whole {
        HeaderProgress::Complete { length, .. } => {
            assert!(length <= bytes.len() && length <= MAX_BYTES);
            assert_eq!(parse(&bytes[..length]), whole);
            for end in 0..length {
                assert_eq!(parse(&bytes[..end]), HeaderProgress::Incomplete, "{end} of {length} bytes");
            }
        }
        HeaderProgress::Incomplete => {
            assert!(bytes.len() < MAX_BYTES);
            assert!((0..bytes.len()).all(|end| parse(&bytes[..end]) == HeaderProgress::Incomplete));
        }
        HeaderProgress::Malformed => {
            let mut longer = bytes.to_vec();
            longer.extend_from_slice(b"\r\n\0\r\nQUIT\n 1 2\r\n");
            assert_eq!(parse(&longer), HeaderProgress::Malformed);
        }
    }
}
