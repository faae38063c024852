//! Patterns of routes for the prefixes and regular expressions of other products.

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
        let within = literal(prefix);
        patterns.extend([format!("{within}*"), format!("{within}*/{REST}")]);
    }
    patterns
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

/// The patterns that match the same paths as a regular expression; `None` if no patterns do. The expression may consist of literals,
/// alternatives in parentheses, `[^/]+`, and at its end `$`, `(/|$)`, or what matches all. One that ends within a
/// segment matches further paths: `/apis` beside `/api`; the second value says so.
pub fn of_regex(regex: &str) -> Option<(Vec<String>, bool)> {
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
    let ends_in_segment = end == End::Anything && paths.iter().any(|path| !path.ends_with('/'));
    let patterns = paths.into_iter().flat_map(|path| match end {
        End::Here => vec![path],
        End::Segment | End::Anything if !path.ends_with('/') => vec![path.clone(), format!("{path}/{REST}")],
        End::Segment | End::Anything => vec![format!("{path}{REST}")],
    });
    Some((patterns.collect(), ends_in_segment))
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
fn literal_regex(regex: &str) -> Option<String> {
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
        assert_eq!(of_regex("^/api").map(|(_, more)| more), Some(true));
        assert_eq!(of_regex("^/api/.*$").map(|(_, more)| more), Some(false));
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
    fn patterns_cover_others() {
        assert!(covers("/api/{*rest}", "/api/v1/{*rest}") && covers("/u/{p1}", "/u/me") && covers("/{*rest}", "/"));
        assert!(!covers("/u/{p1}", "/u/{*rest}") && !covers("/api/v1", "/api/{*rest}") && !covers("/a/b", "/a"));
    }
}
