//! For any path: normalization rejects it, or returns a path that normalization does not change and in which no other
//! parser finds anything to resolve.

use transom_http::path_normalize::{EncodedSlash, PathParameters, PathReading, TrailingSlash, normalize};

pub fn holds(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    let read =
        |encoded_slash, path_parameters, trailing_slash| PathReading { encoded_slash, path_parameters, trailing_slash };
    for reading in [
        read(EncodedSlash::Refuse, PathParameters::Keep, TrailingSlash::Keep),
        read(EncodedSlash::Keep, PathParameters::Keep, TrailingSlash::Keep),
        read(EncodedSlash::Keep, PathParameters::Strip, TrailingSlash::Ignore),
        read(EncodedSlash::Refuse, PathParameters::Refuse, TrailingSlash::Ignore),
    ] {
        let Ok(once) = normalize(path, reading) else { continue };
        let again = normalize(&once, reading).expect("a normal form is accepted");
        assert_eq!(once, again, "{path:?}");
        assert!(once.starts_with('/') && !once.contains("//") && !once.contains('\\'), "{path:?}");
        assert!(once.is_ascii() && !once.contains("%00"), "{path:?}");
        for segment in once.split('/') {
            let dots = segment.split(';').next().unwrap_or_default();
            assert!(dots != "." && dots != "..", "{path:?}");
        }
        assert!(reading.path_parameters == PathParameters::Keep || !once.contains(';'), "{path:?}");
        assert!(reading.trailing_slash == TrailingSlash::Keep || once == "/" || !once.ends_with('/'), "{path:?}");
        if reading.encoded_slash == EncodedSlash::Refuse {
            assert!(!once.contains("%2F") && !once.contains("%5C"), "{path:?}");
        }
    }
}
