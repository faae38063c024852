//! Normalizes paths, so that a path has one form however it is encoded.
//!
//! RFC 3986, section 6.2.2: dot segments are resolved, hex digits become upper case, escaped unreserved characters are
//! decoded. Beyond the RFC, every character that a segment may contain, such as `@`, is decoded, every other, such as `|`
//! or a byte of UTF-8, is encoded, and runs of slashes become one, since servers treat these forms as equal. Paths that
//! servers read differently are refused, unless the configuration says how the upstream reads them.

use std::borrow::Cow;

use super::error::RequestError;
use crate::percent_encoding::{find_ambiguity, is_pchar, push_encoded};

/// How paths are normalized beyond RFC 3986, as the setting of each name says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathReading {
    pub encoded_slash: EncodedSlash,
    pub path_parameters: PathParameters,
    pub trailing_slash: TrailingSlash,
}

impl PathReading {
    /// Keeps parameters and a trailing slash, as paths for the upstream need it.
    pub fn verbatim(encoded_slash: EncodedSlash) -> PathReading {
        PathReading { encoded_slash, path_parameters: PathParameters::Keep, trailing_slash: TrailingSlash::Keep }
    }
}

/// The meaning of `;` in a path segment and of the text behind it (RFC 3986, section 3.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathParameters {
    Keep,
    Strip,
    Refuse,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrailingSlash {
    Keep,
    Ignore,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EncodedSlash {
    Refuse,
    Keep,
}

/// A target with `"`, `<` and `>` in its query as `%22`, `%3C` and `%3E`. The URL parser of browsers accepts these characters in
/// a query, and encodes them (WHATWG URL, section 4.4); `Uri` accepts them only encoded.
pub fn encode_query(target: &str) -> Cow<'_, str> {
    let accepted_by_browsers = ['"', '<', '>'];
    let Some((path, query)) = target.split_once('?').filter(|(_, query)| query.contains(accepted_by_browsers)) else {
        return Cow::Borrowed(target);
    };
    let mut out = format!("{path}?");
    for character in query.chars() {
        match character {
            '"' => out.push_str("%22"),
            '<' => out.push_str("%3C"),
            '>' => out.push_str("%3E"),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

/// Normalizes an absolute path: one that starts with a slash, without a query.
pub fn normalize(path: &str, reading: PathReading) -> Result<Cow<'_, str>, RequestError> {
    let needs_no_reading = |path: &str| {
        (reading.path_parameters == PathParameters::Keep || !path.contains(';'))
            && (reading.trailing_slash == TrailingSlash::Keep || path == "/" || !path.ends_with('/'))
    };
    if is_normal(path.as_bytes()) && needs_no_reading(path) {
        return Ok(Cow::Borrowed(path));
    }
    resolve_segments(&reencode(path, reading.encoded_slash)?, reading).map(Cow::Owned)
}

/// Whether a path is certainly normal: only plain characters, no empty segment, and none that starts with a dot. Other
/// normal paths take the slow path.
fn is_normal(path: &[u8]) -> bool {
    let mut after_slash = false;
    for &byte in path {
        if byte == b'/' {
            if after_slash {
                return false;
            }
            after_slash = true;
        } else if !is_pchar(byte) || (after_slash && byte == b'.') {
            return false;
        } else {
            after_slash = false;
        }
    }
    path.first() == Some(&b'/')
}

/// Decodes the characters that need no escape, and encodes those that do.
fn reencode(path: &str, slashes: EncodedSlash) -> Result<String, RequestError> {
    let mut out = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'/' => out.push('/'),
            b'\\' => return Err(RequestError::Path("the path contains a backslash")),
            b'%' => {
                let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
                let (Some(high), Some(low)) = (digit(bytes.next()), digit(bytes.next())) else {
                    return Err(RequestError::Path("the path contains a `%` without two hex digits"));
                };
                match (high << 4 | low) as u8 {
                    b'/' | b'\\' if slashes == EncodedSlash::Refuse => {
                        return Err(RequestError::Path("the path contains an encoded slash"));
                    }
                    byte => push_encoded(byte, &mut out),
                }
            }
            byte => push_encoded(byte, &mut out),
        }
    }
    Ok(out)
}

/// Removes dot segments and empty segments.
fn resolve_segments(path: &str, reading: PathReading) -> Result<String, RequestError> {
    let Some(rest) = path.strip_prefix('/') else {
        return Err(RequestError::Path("the path does not start with a slash"));
    };
    let mut segments: Vec<&str> = Vec::new();
    // Whether the resolved path ends in a slash.
    let mut ends_in_slash = true;
    for segment in rest.split('/') {
        let segment = without_parameters(segment, reading.path_parameters)?;
        ends_in_slash = matches!(segment, "" | "." | "..");
        match segment {
            "." => {}
            ".." => match segments.pop() {
                None => return Err(RequestError::Path("the path leads above the root")),
                // Servers disagree whether `..` removes the empty segment or the one before.
                Some("") => return Err(RequestError::Path("the path has a `..` behind an empty segment")),
                Some(_) => {}
            },
            segment => match find_ambiguity(segment) {
                None => segments.push(segment),
                Some(ambiguity) => return Err(RequestError::Path(ambiguity)),
            },
        }
    }
    let mut out = String::with_capacity(path.len());
    segments.retain(|segment| !segment.is_empty());
    for segment in &segments {
        out.push('/');
        out.push_str(segment);
    }
    if segments.is_empty() || (ends_in_slash && reading.trailing_slash == TrailingSlash::Keep) {
        out.push('/');
    }
    Ok(out)
}

/// A segment without its path parameters, if they are to be stripped.
fn without_parameters(segment: &str, parameters: PathParameters) -> Result<&str, RequestError> {
    match (segment.split_once(';'), parameters) {
        (None, _) | (Some(_), PathParameters::Keep) => Ok(segment),
        (Some(_), PathParameters::Refuse) => Err(RequestError::Path("the path contains a semicolon")),
        // The upstream receives the parameters too, so they must not be ambiguous.
        (Some((name, _)), PathParameters::Strip) => {
            find_ambiguity(segment).map_or(Ok(name), |ambiguity| Err(RequestError::Path(ambiguity)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn normal(path: &str) -> Result<String, RequestError> {
        normalize(path, PathReading::verbatim(EncodedSlash::Refuse)).map(Cow::into_owned)
    }

    /// Normalizes with the given settings.
    fn read(path: &str, parameters: PathParameters, trailing_slash: TrailingSlash) -> Result<String, RequestError> {
        let reading = PathReading { encoded_slash: EncodedSlash::Refuse, path_parameters: parameters, trailing_slash };
        normalize(path, reading).map(Cow::into_owned)
    }

    #[test]
    fn only_queries_are_encoded() {
        for (target, encoded) in [
            ("/a?b=\"<c>\"&d=%22", "/a?b=%22%3Cc%3E%22&d=%22"),
            ("/?\u{e9}\"?", "/?\u{e9}%22?"),
            ("/<a>\"", "/<a>\""),
            ("/<?>", "/<?%3E"),
        ] {
            assert_eq!(encode_query(target), encoded);
        }
        assert!(matches!(encode_query("/a?b=%22{c}|"), Cow::Borrowed(_)));
    }

    #[test]
    fn every_encoding_of_login_is_login() {
        for path in
            ["/login", "//login", "/%6Cogin", "/%6cogin", "/x/../login", "/./login", "/x/%2e%2E/login", "///.//login"]
        {
            assert_eq!(normal(path).as_deref(), Ok("/login"), "{path}");
        }
    }

    #[test]
    fn a_character_equals_its_escape() {
        for (path, expected) in [
            ("/users/%40me", "/users/@me"),
            ("/a%3ab%3b%2c", "/a:b;,"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/a|b[c]", "/a%7Cb%5Bc%5D"),
        ] {
            assert_eq!(normal(path).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn a_trailing_slash_is_kept_and_dot_segments_leave_one() {
        for (path, expected) in [
            ("/", "/"),
            ("//", "/"),
            ("/a/", "/a/"),
            ("/a//", "/a/"),
            ("/a/.", "/a/"),
            ("/a/b/..", "/a/"),
            ("/a/..", "/"),
            ("/.well-known/x", "/.well-known/x"),
            ("/...", "/..."),
            ("/a/.b/..c", "/a/.b/..c"),
            ("/a%20b%c3%a9", "/a%20b%C3%A9"),
            ("/a;v=1,2@:!$&'()*+=", "/a;v=1,2@:!$&'()*+="),
            ("/%252F", "/%252F"),
            ("/%252e%252e/a", "/%252e%252e/a"),
            ("/a%3fb%23c", "/a%3Fb%23c"),
            ("/..a;b/c;..", "/..a;b/c;.."),
            ("/%E0%A4%85%F0%9F%98%80", "/%E0%A4%85%F0%9F%98%80"),
            ("/%c0x%80", "/%C0x%80"),
        ] {
            assert_eq!(normal(path).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn ambiguous_paths_are_refused() {
        for path in [
            "/..",
            "/a/../..",
            "/%2e%2e/x",
            "/a//../b",
            "//../b",
            "/a/b//../..",
            "/%",
            "/%4",
            "/%zz",
            "/%+1",
            "/%00",
            "/a%2fb",
            "/a%5Cb",
            "/a\\b",
            "",
            "*",
            "a/b",
            // Tomcat and Jetty remove path parameters, and then resolve dot segments.
            "/..;/admin",
            "/a/..;x=1/admin",
            "/a/%2e%2e;/admin",
            "/a/.;/admin",
            "/..%3b/admin",
            // `$` of a pattern matches before a line end.
            "/login%0a",
            "/login%0D%0A",
            "/login%7f",
            "/a%09/..",
            // Overlong UTF-8 of a slash, a dot and a letter.
            "/a%c0%afb",
            "/%c0%ae%c0%ae/admin",
            "/%C1%ACogin",
            "/%e0%80%af",
            "/%F0%80%80%AF",
        ] {
            assert!(normal(path).is_err(), "{path}");
        }
        assert_eq!(normalize("/a%2fb", PathReading::verbatim(EncodedSlash::Keep)).as_deref(), Ok("/a%2Fb"));
    }

    #[test]
    fn path_parameters_are_handled_as_configured() {
        for (path, expected) in [
            ("/login", "/login"),
            ("/login;x", "/login"),
            ("/login;x=1;y=2", "/login"),
            ("/login;", "/login"),
            ("/login%3Bx", "/login"),
            ("/login%3bx;y", "/login"),
            ("/a;x/b;y/c", "/a/b/c"),
            ("/a;x/", "/a/"),
            ("/a/;x", "/a/"),
            ("/;x/login", "/login"),
            ("/;x", "/"),
            ("/a/b;x/../login", "/a/login"),
        ] {
            assert_eq!(read(path, PathParameters::Strip, TrailingSlash::Keep).as_deref(), Ok(expected), "{path}");
            let is_refused = read(path, PathParameters::Refuse, TrailingSlash::Keep).is_err();
            assert_eq!(is_refused, path != "/login", "{path}");
        }
        for path in ["/..;x/login", "/a;%0a", "/a;%zz", "/a;%2f", "/a;\\", "/a/;x/../b", "/a;%c0%af"] {
            assert!(read(path, PathParameters::Strip, TrailingSlash::Keep).is_err(), "{path}");
        }
    }

    #[test]
    fn a_trailing_slash_is_handled_as_configured() {
        for (path, expected) in [
            ("/", "/"),
            ("//", "/"),
            ("/login/", "/login"),
            ("/login//", "/login"),
            ("/login/.", "/login"),
            ("/login/x/..", "/login"),
            ("/a/b/", "/a/b"),
            ("/a;x/", "/a;x"),
        ] {
            assert_eq!(read(path, PathParameters::Keep, TrailingSlash::Ignore).as_deref(), Ok(expected), "{path}");
        }
        assert_eq!(read("/login;x/;y", PathParameters::Strip, TrailingSlash::Ignore).as_deref(), Ok("/login"));
    }

    #[test]
    fn a_normal_path_is_not_copied() {
        for (path, path_parameters, trailing_slash) in [
            ("/a.b/c;d/", PathParameters::Keep, TrailingSlash::Keep),
            ("/a", PathParameters::Strip, TrailingSlash::Ignore),
            ("/", PathParameters::Refuse, TrailingSlash::Ignore),
        ] {
            let reading = PathReading { encoded_slash: EncodedSlash::Refuse, path_parameters, trailing_slash };
            assert!(matches!(normalize(path, reading), Ok(Cow::Borrowed(found)) if found == path), "{path}");
        }
    }

    #[test]
    fn a_normalized_path_is_normal() {
        for path in ["/a/%2e/b", "//x/é", "/%7euser/%41", "/.//."] {
            let once = normal(path).unwrap();
            assert_eq!(normal(&once).as_deref(), Ok(once.as_str()));
        }
    }

    /// A normalized segment with all kinds of characters.
    fn segment() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => "[a-zA-Z0-9._~!$&'()*+,=:@-]{1,3}",
            1 => Just(String::from(";v")),
            1 => Just(String::from("%20")),
            1 => Just(String::from("%C3%A9")),
            1 => Just(String::from("%25")),
        ];
        let segment = proptest::collection::vec(piece, 1..4).prop_map(|pieces| pieces.concat());
        segment.prop_filter("dot segments", |segment| {
            find_ambiguity(segment).is_none() && !matches!(segment.as_str(), "." | "..")
        })
    }

    /// One of the encodings of a path, selected by `choices`.
    fn encoded_differently(segments: &[String], choices: &[u8]) -> String {
        let mut choices = choices.iter().copied().cycle();
        let mut choice = move |of: u8| choices.next().unwrap_or_default() % of;
        let mut out = String::new();
        for segment in segments {
            out.push_str(["/", "//", "/./", "/%2e/", "/x/../", "/x/%2E./", "/x/y/../../"][usize::from(choice(7))]);
            let bytes = segment.as_bytes();
            let mut at = 0;
            while at < bytes.len() {
                let width = if bytes[at] == b'%' { 3 } else { 1 };
                let piece = &segment[at..at + width];
                match (width, choice(3)) {
                    (1, 0) => out.push_str(&format!("%{:02x}", bytes[at])),
                    (1, 1) => out.push_str(&format!("%{:02X}", bytes[at])),
                    (3, 0) => out.push_str(&piece.to_ascii_lowercase()),
                    _ => out.push_str(piece),
                }
                at += width;
            }
        }
        out
    }

    proptest! {
        #[test]
        fn all_encodings_of_a_path_normalize_to_one_path(
            segments in proptest::collection::vec(segment(), 1..5),
            choices in proptest::collection::vec(any::<u8>(), 1..40),
        ) {
            let expected: String = segments.iter().map(|segment| format!("/{segment}")).collect();
            let encoded = encoded_differently(&segments, &choices);
            prop_assert_eq!(normal(&expected), Ok(expected.clone()));
            // An ambiguous encoding, `..` after `//`, is refused; no encoding gives another path.
            if let Ok(found) = normal(&encoded) {
                prop_assert_eq!(found, expected);
            }
        }

        #[test]
        fn normalizing_twice_changes_nothing_and_leaves_no_dot_segment(path in "/[a/.%;2e5cCfF0\\\\é|]{0,24}") {
            if let Ok(once) = read(&path, PathParameters::Strip, TrailingSlash::Ignore) {
                prop_assert_eq!(read(&once, PathParameters::Strip, TrailingSlash::Ignore), Ok(once.clone()));
                prop_assert!(!once.contains(';') && (once == "/" || !once.ends_with('/')));
            }
            if let Ok(once) = normal(&path) {
                prop_assert_eq!(normal(&once), Ok(once.clone()));
                prop_assert!(once.starts_with('/') && !once.contains("//") && !once.contains("/../") && !once.contains("/./"));
            }
        }
    }
}
