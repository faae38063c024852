//! Of any path: it is refused, or its normal form is its own, and has nothing left in it that another reader
//! could resolve.

use transom::config::EncodedSlash;
use transom::http::path::normalize;

pub fn holds(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    for slashes in [EncodedSlash::Refuse, EncodedSlash::Keep] {
        let Ok(once) = normalize(path, slashes) else { continue };
        let again = normalize(&once, slashes).expect("a normal form is accepted");
        assert_eq!(once, again, "{path:?}");
        assert!(once.starts_with('/') && !once.contains("//") && !once.contains('\\'), "{path:?}");
        assert!(once.is_ascii() && !once.contains("%00"), "{path:?}");
        for segment in once.split('/') {
            let dots = segment.split(';').next().unwrap_or_default();
            assert!(dots != "." && dots != "..", "{path:?}");
        }
        if slashes == EncodedSlash::Refuse {
            assert!(!once.contains("%2F") && !once.contains("%5C"), "{path:?}");
        }
    }
}
