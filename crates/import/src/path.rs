//! Patterns of routes for the prefixes and regular expressions of other products.

use std::cmp::Reverse;

/// What a route for a prefix ends with.
const REST: &str = "{*rest}";

/// A path as a literal pattern.
pub fn literal(path: &str) -> String {
    let mut pattern = path.replace('{', "%7B").replace('}', "%7D").replace('*', "%2A");
    if pattern.ends_with('$') {
        pattern.truncate(pattern.len() - 1);
        pattern.push_str("%24");
    }
    pattern
}

/// Patterns of whole segments: `/api` and all below it. Other paths that begin with the text, such as `/apis`, do not match.
pub fn segments(prefix: &str) -> Vec<String> {
    let below = format!("{}/{REST}", literal(prefix.trim_end_matches('/')));
    if prefix.ends_with('/') { vec![below] } else { vec![literal(prefix), below] }
}

/// Patterns of all paths that begin with the text, also within a segment.
pub fn prefix(prefix: &str) -> Vec<String> {
    let mut patterns = segments(prefix);
    if !prefix.ends_with('/') {
        patterns.extend(within(&literal(prefix)));
    }
    patterns
}

/// Patterns of the paths that go on within the last segment of a pattern.
fn within(pattern: &str) -> [String; 2] {
    [format!("{pattern}*"), format!("{pattern}*/{REST}")]
}

/// For a pattern of paths that go on within the last segment of `from`: the pattern with a name for this part, and the path in which
/// `to` replaces the text `from`.
pub fn within_segment(pattern: &str, from: &str, to: &str) -> Option<(String, String)> {
    let from = literal(from);
    let rest = pattern.strip_prefix(&from)?.strip_prefix('*')?;
    Some((format!("{from}{{more}}{rest}"), format!("{}{{more}}{rest}", literal(to))))
}

/// Whether all paths that match `inner` match `outer`, too.
pub fn covers(outer: &str, inner: &str) -> bool {
    let (mut outer, mut inner) = (outer.split('/'), inner.split('/'));
    loop {
        match (outer.next(), inner.next()) {
            (Some(rest), Some(_)) if rest.starts_with("{*") => return true,
            (Some(outer), Some(inner)) if outer == inner => {}
            (Some(outer), Some(inner)) if outer.starts_with('{') && !inner.starts_with("{*") => {}
            (None, None) => return true,
            _ => return false,
        }
    }
}

/// What two patterns both match.
#[derive(PartialEq, Eq, Debug)]
pub enum Common {
    Nothing,
    Pattern(String),
    /// No single pattern matches it, if it is anything.
    Unknown,
}

pub fn common(one: &str, other: &str) -> Common {
    let (mut both, mut is_known) = (Vec::new(), true);
    let (mut ones, mut others) = (one.split('/').peekable(), other.split('/').peekable());
    loop {
        let (one, other) = match (ones.next(), others.next()) {
            (None, None) => break,
            (Some(one), Some(other)) => (one, other),
            _ => return Common::Nothing,
        };
        if Segment::of(one) == Segment::Rest {
            both.extend([other].into_iter().chain(others));
            break;
        }
        if Segment::of(other) == Segment::Rest {
            both.extend([one].into_iter().chain(ones));
            break;
        }
        match common_segment(one, other) {
            Some(Some(segment)) => both.push(segment),
            Some(None) => is_known = false,
            None => return Common::Nothing,
        }
    }
    if is_known { Common::Pattern(both.join("/")) } else { Common::Unknown }
}

/// Whether the router takes the first pattern for paths that match both.
pub fn precedes(one: &str, other: &str) -> bool {
    // Of segments with literal text, the one with more of it.
    let order = |text: &str| match Segment::of(text) {
        Segment::Partial => (Segment::Partial, Reverse(literal_length(text))),
        segment => (segment, Reverse(0)),
    };
    let difference = one.split('/').zip(other.split('/')).map(|(one, other)| (order(one), order(other)));
    { difference }.find(|(one, other)| one != other).is_some_and(|(one, other)| one < other)
}

/// A kind of segments. The router tries them in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Segment {
    Literal,
    /// With a `*` or a name in it.
    Partial,
    Parameter,
    Rest,
}

impl Segment {
    fn of(text: &str) -> Segment {
        match text {
            text if text.starts_with("{*") => Segment::Rest,
            text if text.starts_with('{') => Segment::Parameter,
            text if text.contains(['*', '{']) => Segment::Partial,
            _ => Segment::Literal,
        }
    }
}

/// The length of a segment without wildcards.
fn literal_length(segment: &str) -> usize {
    let parts = segment.split(['*', '{']);
    parts.map(|part| part.rsplit_once('}').map_or(part, |(_, text)| text).len()).sum()
}

/// The segment that matches what both match, or none if there is no such segment; `None` if nothing matches both.
fn common_segment<'s>(one: &'s str, other: &'s str) -> Option<Option<&'s str>> {
    if one == other {
        return Some(Some(one));
    }
    let order = |text| (Segment::of(text), Reverse(literal_length(text)));
    let (narrow, wide) = if order(one) <= order(other) { (one, other) } else { (other, one) };
    match (Segment::of(narrow), Segment::of(wide)) {
        (Segment::Literal, Segment::Literal) => None,
        (_, Segment::Parameter | Segment::Rest) => (!narrow.is_empty()).then_some(Some(narrow)),
        (kind, _) => {
            let ends = |text: &'s str| Some((text.split_once(['*', '{'])?.0, text.rsplit_once(['*', '}'])?.1));
            let (first, last) = ends(narrow).unwrap_or((narrow, narrow));
            let (start, end) = ends(wide)?;
            let is_possible = (first.starts_with(start) || start.starts_with(first) && kind == Segment::Partial)
                && (last.ends_with(end) || end.ends_with(last) && kind == Segment::Partial);
            let is_exact = kind == Segment::Literal && wide.matches(['*', '{']).count() == 1;
            match is_exact {
                true => (is_possible && narrow.len() > start.len() + end.len()).then_some(Some(narrow)),
                // Such as `api-v1*` and `api*`, or the same pattern with a name: `api{more}` and `api*`.
                false if first.starts_with(start) && last.ends_with(end) && wide.matches(['*', '{']).count() == 1 => {
                    Some(Some(narrow))
                }
                false => is_possible.then_some(None),
            }
        }
    }
}

/// The patterns that match the same paths as a regular expression; `None` if no patterns do. The expression may consist of literals,
/// alternatives in parentheses, `[^/]+`, and at its end `$`, `(/|$)`, or what matches all. One that ends within a
/// segment matches further paths, such as `/apis` beside `/api`: the second value has their patterns.
pub fn of_regex(regex: &str) -> Option<(Vec<String>, Vec<String>)> {
    let rest = regex.strip_prefix('^')?;
    let (rest, end) = split_end(rest);
    let mut paths = vec![String::new()];
    let mut params = 0;
    let mut chars = rest;
    while let Some(first) = chars.chars().next() {
        if let Some(after) = segment_class(chars) {
            let is_whole = paths.iter().all(|path| path.ends_with('/')) && (after.is_empty() || after.starts_with('/'));
            if paths.iter().any(|path| path.ends_with(['*', '}'])) {
                return None;
            }
            params += 1;
            let param = if is_whole { format!("{{p{params}}}") } else { "*".to_owned() };
            paths.iter_mut().for_each(|path| path.push_str(&param));
            chars = after;
        } else if first == '(' {
            let (group, after) = chars[1..].split_once(')')?;
            let group = group.strip_prefix("?:").unwrap_or(group);
            let alternatives: Vec<String> = group.split('|').map(literal_regex).collect::<Option<_>>()?;
            if after.starts_with(['?', '*', '+', '{']) || alternatives.len() * paths.len() > 64 {
                return None;
            }
            let joined = |path: &String| alternatives.iter().map(|text| format!("{path}{text}")).collect::<Vec<_>>();
            paths = paths.iter().flat_map(joined).collect();
            chars = after;
        } else {
            let end = chars[1..].find(['(', '[']).map_or(chars.len(), |at| at + 1);
            let end = if chars.starts_with('[') { return None } else { end };
            let text = literal_regex(&chars[..end])?;
            paths.iter_mut().for_each(|path| path.push_str(&text));
            chars = &chars[end..];
        }
    }
    if paths.iter().any(|path| !path.starts_with('/')) {
        return None;
    }
    let in_segment = paths.iter().filter(|path| end == End::Anything && !path.ends_with(['/', '*', '}']));
    let further = in_segment.flat_map(|path| within(path)).collect();
    let patterns = paths.into_iter().flat_map(|path| match end {
        End::Here => vec![path],
        End::Segment | End::Anything if !path.ends_with('/') => vec![path.clone(), format!("{path}/{REST}")],
        End::Segment | End::Anything => vec![format!("{path}{REST}")],
    });
    Some((patterns.collect(), further))
}

/// The expression with `[^/]+` in place of each class of characters that is repeated, such as `\d+` or `[a-z-]{2}`: it matches more.
/// `None` if it has no such class.
pub fn with_any_characters(regex: &str) -> Option<String> {
    let (mut wider, mut rest, mut is_wider) = (String::new(), regex, false);
    while let Some(first) = rest.chars().next() {
        if let Some(after) = repeated_class(rest) {
            wider.push_str("[^/]+");
            (rest, is_wider) = (after, true);
            continue;
        }
        let length = match segment_class(rest) {
            Some(after) => rest.len() - after.len(),
            None if first == '\\' => rest.char_indices().nth(2).map_or(rest.len(), |(at, _)| at),
            None => first.len_utf8(),
        };
        let (text, after) = rest.split_at(length);
        wider.push_str(text);
        rest = after;
    }
    is_wider.then_some(wider)
}

/// What stands behind a class of characters without `/`, and behind its `+` or `{…}`.
fn repeated_class(text: &str) -> Option<&str> {
    let after = match text.strip_prefix('[') {
        Some(class) => {
            let (class, after) = class.split_once(']')?;
            let is_listed = !class.is_empty() && !class.starts_with('^') && !class.contains(['/', '[', '\\']);
            // As the range `+-9` does.
            let may_contain_slash = |range: &[u8]| {
                range[1] == b'-' && !(range[0].is_ascii_alphanumeric() && range[2].is_ascii_alphanumeric())
            };
            let has_slash = class.as_bytes().windows(3).any(may_contain_slash);
            Some(after).filter(|_| is_listed && !has_slash)?
        }
        None => ["\\d", "\\w"].iter().find_map(|class| text.strip_prefix(class))?,
    };
    let Some(count) = after.strip_prefix('{') else { return after.strip_prefix('+') };
    let (count, after) = count.split_once('}')?;
    let is_count = count.bytes().all(|byte| byte.is_ascii_digit() || byte == b',');
    (is_count && count.starts_with(|first| ('1'..='9').contains(&first))).then_some(after)
}

/// A pattern of all paths that a regular expression matches, and of others.
pub fn widened(regex: &str) -> String {
    let text = regex.strip_prefix('^').unwrap_or("");
    let (mut depth, mut is_escaped, mut has_alternatives) = (0, false, false);
    for c in text.chars() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' => has_alternatives |= depth == 0,
            _ => {}
        }
    }
    let end = text.find(|c| ".*+?[](){}|^$\\".contains(c)).unwrap_or(text.len());
    // A quantifier counts for the character before it.
    let end = if text[end..].starts_with(['*', '?', '{']) { end.saturating_sub(1) } else { end };
    match text.get(..end).and_then(|text| text.rfind('/')).filter(|_| !has_alternatives) {
        Some(at) => format!("{}/{REST}", literal(&text[..at])),
        None => format!("/{REST}"),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// `$`
    Here,
    /// `(/|$)`
    Segment,
    Anything,
}

fn split_end(regex: &str) -> (&str, End) {
    for (suffix, end) in [
        ("(/|$)(.*)", End::Segment),
        ("(?:/|$)", End::Segment),
        ("(/|$)", End::Segment),
        ("($|/)", End::Segment),
        ("(/.*)?$", End::Segment),
        ("(.*)$", End::Anything),
        (".*$", End::Anything),
        ("(.*)", End::Anything),
        (".*", End::Anything),
        ("$", End::Here),
    ] {
        if let Some(rest) = regex.strip_suffix(suffix)
            && !rest.ends_with('\\')
        {
            return (rest, end);
        }
    }
    (regex, End::Anything)
}

/// What stands behind a class for one whole segment.
fn segment_class(text: &str) -> Option<&str> {
    ["([^/]+)", "[^/]+", "(?:[^/]+)"].iter().find_map(|class| text.strip_prefix(class)).or_else(|| {
        let (name, rest) = text.strip_prefix("(?<")?.split_once('>')?;
        name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_').then_some(())?;
        rest.strip_prefix("[^/]+)")
    })
}

/// The text that an expression without operators matches.
pub fn literal_regex(regex: &str) -> Option<String> {
    let mut text = String::new();
    let mut chars = regex.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.push(chars.next().filter(|c| !c.is_ascii_alphanumeric())?),
            '.' | '*' | '+' | '?' | '[' | ']' | '(' | ')' | '{' | '}' | '|' | '^' | '$' => return None,
            c => text.push(c),
        }
    }
    Some(literal(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_expressions() {
        let patterns = |regex: &str| of_regex(regex).map(|(patterns, _)| patterns.join(" ")).unwrap_or_default();
        assert_eq!(patterns("^/api/"), "/api/{*rest}");
        assert_eq!(patterns("^/api"), "/api /api/{*rest}");
        let further = |regex: &str| of_regex(regex).map(|(_, further)| further.join(" "));
        assert_eq!(further("^/api").as_deref(), Some("/api* /api*/{*rest}"));
        assert_eq!([further("^/api/.*$"), further("^/u/[^/]+")], [Some(String::new()), Some(String::new())]);
        assert_eq!(patterns("^/(users|orders)/([^/]+)$"), "/users/{p1} /orders/{p1}");
        assert_eq!(patterns("^/a\\.b(/|$)(.*)"), "/a.b /a.b/{*rest}");
        assert_eq!(patterns("^/v[0-9]+/"), "");
        assert_eq!(patterns("\\.php$"), "");
        assert_eq!(patterns("^/users/\\d+$"), "");
        assert_eq!(patterns("^/a(b)?$"), "");
        assert_eq!(patterns("^/static/[^/]+\\.(css|js)$"), "/static/*.css /static/*.js");
        assert_eq!(patterns("^/x[^/]+[^/]+$"), "");
    }

    #[test]
    fn classes_of_characters_become_whole_segments() {
        for (regex, wider) in [
            ("^/users/\\d+$", Some("^/users/[^/]+$")),
            ("^/v([0-9]+)/\\w{2,4}\\.json$", Some("^/v([^/]+)/[^/]+\\.json$")),
            ("^/(?<year>\\d{4})/[a-z_0-9-]+", Some("^/(?<year>[^/]+)/[^/]+")),
            ("^/users/[^/]+$", None),
            ("^/users/[^0-9]+$", None),
            ("^/users/[+-9]+$", None),
            ("^/users/[\\d/]+$", None),
            ("^/users/\\d*$", None),
            ("^/users/\\d{0,4}$", None),
            ("^/users/\\d{,4}$", None),
            ("^/x/([^/]+)$", None),
            ("^/users/[0-9]$", None),
            ("^/a\\[b]+$", None),
        ] {
            assert_eq!(with_any_characters(regex).as_deref(), wider, "{regex}");
        }
    }

    #[test]
    fn widened_patterns_match_more() {
        for (regex, pattern) in [
            ("^/items/[0-9]+$", "/items/{*rest}"),
            ("^/a/b/?$", "/a/{*rest}"),
            ("^/a/?b", "/{*rest}"),
            ("^/a/(b|c)/\\d", "/a/{*rest}"),
            ("^/a/x|^/b/", "/{*rest}"),
            ("\\.php$", "/{*rest}"),
            ("^/é?", "/{*rest}"),
        ] {
            assert_eq!(widened(regex), pattern, "{regex}");
        }
    }

    #[test]
    fn patterns_have_paths_in_common() {
        let pattern = |one, other| match common(one, other) {
            Common::Pattern(pattern) => pattern,
            other => format!("{other:?}"),
        };
        for (one, other, both) in [
            ("/api/{p1}/admin", "/api/v1/{*rest}", "/api/v1/admin"),
            ("/api/{p1}/admin", "/api/v1/{p1}", "/api/v1/admin"),
            ("/api/{p1}/admin", "/web/{*rest}", "Nothing"),
            ("/api/{p1}", "/api/", "Nothing"),
            ("/a/*.css", "/a/x.css", "/a/x.css"),
            ("/a/*.css", "/a/.css", "Nothing"),
            ("/a/*.css", "/a/*.js", "Nothing"),
            ("/a/*.css", "/a/x*", "Unknown"),
            ("/blog*/b", "/blog-x*/{*rest}", "/blog-x*/b"),
            ("/a*.css", "/ab*.css", "/ab*.css"),
            ("/a/{p1}", "/a/x*", "/a/x*"),
            ("/a", "/a/{*rest}", "Nothing"),
            ("/a*/b", "/ab/{*rest}", "/ab/b"),
            ("/a{more}/b", "/ab/{*rest}", "/ab/b"),
        ] {
            assert_eq!((pattern(one, other), pattern(other, one)), (both.to_owned(), both.to_owned()));
        }
        assert!(precedes("/api/v1/{*rest}", "/api/{p1}/admin") && !precedes("/api/{p1}/admin", "/api/v1/{*rest}"));
        assert!(!precedes("/a/{p1}", "/a/{p2}"));
        assert!(precedes("/blog-x*", "/blog*") && !precedes("/blog*", "/blog-x{more}") && !precedes("/a*", "/a{more}"));
    }

    #[test]
    fn patterns_cover_others() {
        assert!(covers("/api/{*rest}", "/api/v1/{*rest}") && covers("/u/{p1}", "/u/me") && covers("/{*rest}", "/"));
        assert!(!covers("/u/{p1}", "/u/{*rest}") && !covers("/api/v1", "/api/{*rest}") && !covers("/a/b", "/a"));
    }
}
