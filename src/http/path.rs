//! Which endpoint a path names: one spelling for all the spellings of a path.
//!
//! RFC 3986, section 6.2.2: percent-encoded unreserved characters are decoded, hex digits become
//! upper case, dot segments are resolved; beyond it, runs of slashes become one, as most servers
//! read them. What servers disagree about is refused rather than guessed.

use std::borrow::Cow;

use super::fault::Fault;

/// Whether `%2F` and `%5C` are refused or are ordinary bytes of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slashes {
    Refuse,
    Keep,
}

/// The normal form of an absolute path (it starts with a slash; no query).
pub fn normalize(path: &str, slashes: Slashes) -> Result<Cow<'_, str>, Fault> {
    if is_normal(path.as_bytes()) {
        return Ok(Cow::Borrowed(path));
    }
    resolve(&decode(path, slashes)?).map(Cow::Owned)
}

/// Whether there is nothing to do: no escape, no backslash, no empty or dotted segment inside.
/// A segment that merely starts with a dot is sent the long way round.
fn is_normal(path: &[u8]) -> bool {
    let mut previous = 0;
    for &byte in path {
        if byte == b'%' || byte == b'\\' || (previous == b'/' && (byte == b'/' || byte == b'.')) {
            return false;
        }
        previous = byte;
    }
    path.first() == Some(&b'/')
}

fn decode(path: &str, slashes: Slashes) -> Result<String, Fault> {
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find(['%', '\\']) {
        out.push_str(&rest[..at]);
        if rest.as_bytes()[at] == b'\\' {
            return Err(Fault::Path("the path contains a backslash"));
        }
        let byte = rest.get(at + 1..at + 3).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let byte = byte.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let byte = byte.ok_or(Fault::Path("the path contains a `%` without two hex digits"))?;
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            0 => return Err(Fault::Path("the path contains an encoded NUL")),
            b'/' | b'\\' if slashes == Slashes::Refuse => {
                return Err(Fault::Path("the path contains an encoded slash"));
            }
            _ => {
                const HEX: &[u8; 16] = b"0123456789ABCDEF";
                out.extend(['%', HEX[usize::from(byte >> 4)].into(), HEX[usize::from(byte & 15)].into()]);
            }
        }
        rest = &rest[at + 3..];
    }
    out.push_str(rest);
    Ok(out)
}

fn resolve(path: &str) -> Result<String, Fault> {
    let Some(rest) = path.strip_prefix('/') else { return Err(Fault::Path("the path does not start with a slash")) };
    let mut segments: Vec<&str> = Vec::new();
    // Whether the path ends in a slash once what is last has been resolved.
    let mut open = true;
    for segment in rest.split('/') {
        open = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop().ok_or(Fault::Path("the path leads above the root"))?;
            }
            segment => segments.push(segment),
        }
    }
    let mut out = String::with_capacity(path.len());
    for segment in &segments {
        out.push('/');
        out.push_str(segment);
    }
    if open || segments.is_empty() {
        out.push('/');
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(path: &str) -> Result<String, Fault> {
        normalize(path, Slashes::Refuse).map(Cow::into_owned)
    }

    #[test]
    fn every_spelling_of_login_is_login() {
        for path in [
            "/login",
            "//login",
            "/%6Cogin",
            "/%6cogin",
            "/x/../login",
            "/./login",
            "/x/%2e%2E/login",
            "///x//..//login",
        ] {
            assert_eq!(normal(path).as_deref(), Ok("/login"), "{path}");
        }
    }

    #[test]
    fn a_trailing_slash_stays_and_dots_leave_one() {
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
        ] {
            assert_eq!(normal(path).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn what_servers_disagree_about_is_refused() {
        for path in [
            "/..",
            "/a/../..",
            "/%2e%2e/x",
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
        ] {
            assert!(normal(path).is_err(), "{path}");
        }
        assert_eq!(normalize("/a%2fb", Slashes::Keep).as_deref(), Ok("/a%2Fb"));
    }

    #[test]
    fn the_normal_form_is_its_own() {
        for path in ["/a/%2e/b", "//x/../é", "/%7euser/%41", "/.//."] {
            let once = normal(path).unwrap();
            assert_eq!(normal(&once).as_deref(), Ok(once.as_str()));
        }
    }
}
