//! Parses the path pattern of a route: literal segments, `{name}` and `{*name}`.
//!
//! The path of a request is normalized before it is matched, so a pattern that is not normalized would never match.
//! Such a pattern is a problem, and the fix is its normal form. Segments are the parts between slashes: `/` has one
//! empty segment, and `/a/` ends with an empty segment.

use super::values::Parsed;
use crate::config::diagnostics::{Report, quoted};
use crate::config::route::{
    EncodedSlash, PathParameters, PathPattern, PathReading, Segment, TrailingSlash, find_ambiguity, is_pchar,
};
use crate::config::toml_reader::SpannedStr;

/// The router does not match more segments than this one by one.
const SEGMENTS_MAX: usize = 64;

pub fn read_path(word: &SpannedStr, reading: PathReading, report: &mut Report) -> Option<PathPattern> {
    match parse_pattern(word.text, reading) {
        Ok(segments) => Some(PathPattern { text: word.text.to_owned(), segments }),
        Err((message, fix)) => {
            report.problem(word.span.clone(), message, fix);
            None
        }
    }
}

pub fn is_param_name(text: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(first) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn parse_pattern(text: &str, reading: PathReading) -> Parsed<Vec<Segment>> {
    let path = |what: &str| format!("the path {} {what}", quoted(text));
    let write = || format!("write `path = \"{}\"`", normalize_pattern(text));
    let Some(rest) = text.strip_prefix('/') else {
        return Err(match text.split_once("://") {
            Some((_, rest)) => {
                let (host, path_of) = rest.split_once('/').unwrap_or((rest, ""));
                let fix = format!(
                    "write `path = \"{}\"`, and `host = \"{host}\"`",
                    normalize_pattern(&format!("/{path_of}"))
                );
                (path("is a whole URL"), fix)
            }
            None => (path("does not begin with `/`"), write()),
        });
    };
    if rest.contains(['?', '#']) {
        return Err((path("has a query or a fragment, which a route does not match"), write()));
    }
    if reading.trailing_slash == TrailingSlash::Ignore && rest.ends_with('/') {
        let what =
            path("can never match: with `trailing_slash = \"ignore\"`, the path of a request never ends with a slash");
        return Err((what, format!("write `path = \"{}\"`", normalize_pattern(text.trim_end_matches('/')))));
    }
    let parts: Vec<&str> = rest.split('/').collect();
    let mut segments: Vec<Segment> = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        let last = i + 1 == parts.len();
        let segment = match parse_parameter(part)? {
            Some(segment) => segment,
            None => parse_literal(part, last, reading).map_err(|what| match what {
                LiteralError::Form(what) => (path(&what), write()),
                LiteralError::Other(what, fix) => (path(&what), fix),
            })?,
        };
        if let (Segment::Rest(name), false) = (&segment, last) {
            let message = path(&format!("continues after `{{*{name}}}`, which matches the rest of the path"));
            return Err((message, format!("end the path with `{{*{name}}}`, or write `{{{name}}}` for one segment")));
        }
        if parameter_name(&segment).is_some()
            && segments.iter().any(|other| parameter_name(other) == parameter_name(&segment))
        {
            return Err((
                path(&format!("has {} twice", quoted(part))),
                String::from("give one of the two another name"),
            ));
        }
        segments.push(segment);
    }
    if segments.iter().filter(|segment| !matches!(segment, Segment::Rest(_))).count() > SEGMENTS_MAX {
        let fix = format!("end it with `{{*rest}}` after at most `{SEGMENTS_MAX}` segments");
        return Err((format!("a path with more than `{SEGMENTS_MAX}` segments can never match"), fix));
    }
    Ok(segments)
}

fn parameter_name(segment: &Segment) -> Option<&str> {
    match segment {
        Segment::Literal(_) => None,
        Segment::Param(name) | Segment::Rest(name) => Some(name),
    }
}

/// Parses `{name}` and `{*name}`; `None` for a literal. Recognizes the parameters of other routers, to suggest a fix.
fn parse_parameter(part: &str) -> Parsed<Option<Segment>> {
    let no_parameter = |fix: String| Err((format!("{} is not a parameter", quoted(part)), fix));
    if part == "*" || part == "**" {
        return no_parameter(String::from("write `{*rest}` for the rest of the path, or `{name}` for one segment"));
    }
    let foreign = part.strip_prefix([':', '<']).map(|rest| rest.trim_end_matches('>'));
    if let Some(name) = foreign.filter(|name| is_param_name(name)) {
        return no_parameter(format!("write `{{{name}}}`"));
    }
    if !part.contains(['{', '}']) {
        return Ok(None);
    }
    let inner = part.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let Some(inner) = inner.filter(|inner| !inner.contains(['{', '}'])) else {
        let fix = "write `{name}` as a whole segment, such as `/users/{id}/files`";
        return Err((format!("{} is neither a parameter nor a literal", quoted(part)), fix.to_owned()));
    };
    let (name, rest) = inner.strip_prefix('*').map_or((inner, false), |name| (name, true));
    if is_param_name(name) {
        let name = name.to_owned();
        return Ok(Some(if rest { Segment::Rest(name) } else { Segment::Param(name) }));
    }
    let bare: String =
        name.split([':', '=']).next().unwrap_or("").chars().map(|c| if c == '-' { '_' } else { c }).collect();
    match bare.trim_matches(['*', '.']) {
        "" if rest => no_parameter(String::from("a parameter needs a name: write `{*rest}`")),
        "" => no_parameter(String::from("a parameter needs a name: write `{id}`")),
        bare if is_param_name(bare) && (rest || name.contains(['*', '.'])) => {
            no_parameter(format!("write `{{*{bare}}}`"))
        }
        bare if is_param_name(bare) => no_parameter(format!("write `{{{bare}}}`")),
        _ => no_parameter(String::from(
            "a name has letters, digits and `_`, and does not start with a digit: write `{id}`",
        )),
    }
}

/// Why a literal segment is rejected.
enum LiteralError {
    /// The segment differs from its normal form.
    Form(String),
    Other(String, String),
}

fn parse_literal(part: &str, last: bool, reading: PathReading) -> Result<Segment, LiteralError> {
    let form = |what: &str| Err(LiteralError::Form(what.to_owned()));
    if part.is_empty() && !last {
        return form("has two slashes in a row");
    }
    let plain = normalize_segment(part);
    if plain == "." || plain == ".." {
        return form(&format!("has the segment {}, which normalization removes from every request", quoted(part)));
    }
    if plain != part {
        return form(&match normalization_error(part) {
            Some(what) => what,
            None => String::from("is not in its normal form"),
        });
    }
    if let Some(doubt) = find_ambiguity(part) {
        let what = format!("can never match: a request is refused if {doubt}");
        return Err(LiteralError::Other(what, String::from("write the path that clients request")));
    }
    if part.contains(';') && reading.path_parameters != PathParameters::Keep {
        let why = match reading.path_parameters {
            PathParameters::Strip => "the `;` and what follows it are removed before matching",
            PathParameters::Keep | PathParameters::Refuse => "requests with it are refused",
        };
        let fix = String::from("write the path without `;`, or `path_parameters = \"keep\"` at the top of the file");
        return Err(LiteralError::Other(format!("can never match: it contains `;`, and {why}"), fix));
    }
    let slash = ["%2F", "%5C"].into_iter().find(|code| part.contains(code));
    match (slash, reading.encoded_slash) {
        (Some(code), EncodedSlash::Refuse) => {
            let what = format!("can never match: it contains `{code}`, and requests with it are refused");
            Err(LiteralError::Other(what, String::from("write `encoded_slash = \"keep\"` at the top of the file")))
        }
        _ => Ok(Segment::Literal(part.to_owned())),
    }
}

fn normalization_error(part: &str) -> Option<String> {
    let mut rest = part;
    while let Some(c) = rest.chars().next() {
        let code = rest.get(..3).and_then(decode_escape);
        match (c, code) {
            ('%', None) => return Some(String::from("has a `%` without two hex digits")),
            ('%', Some(byte)) if is_pchar(byte) => {
                return Some(format!("encodes `{}`, which is written without encoding", char::from(byte)));
            }
            ('%', Some(_)) if rest[..3].contains(|c: char| c.is_ascii_lowercase()) => {
                return Some(format!("has the encoding `{}` in lower case", &rest[..3]));
            }
            ('%', Some(_)) => rest = &rest[3..],
            (c, _) if !c.is_ascii() || !is_pchar(c as u8) => {
                return Some(format!("has {}, which must be percent-encoded", quoted(&c.to_string())));
            }
            (c, _) => rest = &rest[c.len_utf8()..],
        }
    }
    None
}

/// The normal form of a pattern.
fn normalize_pattern(text: &str) -> String {
    let path = text.split(['?', '#']).next().unwrap_or(text);
    let mut parts: Vec<String> = Vec::new();
    let count = path.split('/').count();
    for (i, part) in path.split('/').enumerate() {
        let plain = if part.starts_with('{') { part.to_owned() } else { normalize_segment(part) };
        match plain.as_str() {
            ".." => {
                parts.pop();
            }
            "." => {}
            "" if i + 1 < count => {}
            _ => parts.push(plain),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The normal form of a segment: only characters that must be percent-encoded are (RFC 3986, section 6.2.2).
fn normalize_segment(part: &str) -> String {
    let mut out = String::new();
    let mut rest = part.as_bytes();
    while let Some(byte) = rest.first().copied() {
        let code = rest.get(..3).and_then(|code| std::str::from_utf8(code).ok()).and_then(decode_escape);
        let (byte, width, escaped) = code.map_or((byte, 1, false), |byte| (byte, 3, true));
        match escaped {
            _ if is_pchar(byte) => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
        rest = &rest[width..];
    }
    out
}

/// The byte that `%XX` encodes.
fn decode_escape(code: &str) -> Option<u8> {
    let digits = code.strip_prefix('%').filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP: PathReading = PathReading {
        encoded_slash: EncodedSlash::Keep,
        path_parameters: PathParameters::Keep,
        trailing_slash: TrailingSlash::Keep,
    };

    #[test]
    fn patterns_are_read_as_written() {
        let literal = |text: &str| Segment::Literal(text.to_owned());
        let read = |text| parse_pattern(text, KEEP);
        assert_eq!(read("/"), Ok(vec![literal("")]));
        assert_eq!(read("/a/"), Ok(vec![literal("a"), literal("")]));
        assert_eq!(read("/a/{id}/{*rest}").unwrap()[1..], [Segment::Param("id".into()), Segment::Rest("rest".into())]);
        assert_eq!(read("/a:b@c,d/%2F%C3%A9"), Ok(vec![literal("a:b@c,d"), literal("%2F%C3%A9")]));
    }

    #[test]
    fn the_normal_form_of_a_rejected_path_is_accepted() {
        for text in [
            "a",
            "//a",
            "/a//b",
            "/./a",
            "/a/../b",
            "/a/..",
            "/%41",
            "/%c3%a9",
            "/é",
            "/a b",
            "/100%",
            "/a?b=1",
            "/%2e%2E/x",
            "/\"",
            "/a\\b",
            "/%",
            "/%4",
            "/[x]",
            "?",
            "/a//",
            "/é%e9",
        ] {
            assert!(parse_pattern(text, KEEP).is_err(), "{text}");
            assert!(parse_pattern(&normalize_pattern(text), KEEP).is_ok(), "{text} -> {}", normalize_pattern(text));
        }
    }

    #[test]
    fn a_path_has_at_most_the_segments_that_are_matched() {
        let deep = "/a".repeat(SEGMENTS_MAX);
        assert!(parse_pattern(&deep, KEEP).is_ok());
        assert!(parse_pattern(&format!("{deep}/{{*rest}}"), KEEP).is_ok());
        assert!(parse_pattern(&format!("{deep}/a"), KEEP).is_err());
    }

    #[test]
    fn other_routers_patterns_are_recognised() {
        for (text, fix) in [
            ("/users/:id", "write `{id}`"),
            ("/users/<id>", "write `{id}`"),
            ("/users/{id:[0-9]+}", "write `{id}`"),
            ("/users/{user-id}", "write `{user_id}`"),
            ("/files/{path*}", "write `{*path}`"),
            ("/files/{path...}", "write `{*path}`"),
            ("/files/{*}", "a parameter needs a name: write `{*rest}`"),
            ("/{}", "a parameter needs a name: write `{id}`"),
        ] {
            assert_eq!(parse_pattern(text, KEEP).unwrap_err().1, fix);
        }
    }
}
