//! Paths: how those of requests are normalized, and the patterns of routes.
//!
//! The path of a request is normalized before it is matched, so a pattern that is not normalized would never match.
//! Such a pattern is a problem, and the fix is its normal form.

use super::diagnostics::{Parsed, Report, quoted};
use super::settings::Choice;
use super::toml_reader::SpannedString;
use transom_http::path_normalize::{EncodedSlash, PathParameters, PathReading, TrailingSlash};
use transom_http::percent_encoding::{decode_escape, find_ambiguity, is_pchar, push_encoded};

/// The router does not match more segments than this one by one.
const SEGMENTS_MAX: usize = 64;

settings! {
    /// How request paths are normalized, for routes and rules alike. [`ForwardPath`] decides what is forwarded.
    pub struct PathSettings {
        /// Paths with `%2F` or `%5C`. `"refuse"`: 400, because servers interpret them differently. `"keep"`: ordinary bytes.
        encoded_slash: EncodedSlash =
            Choice(EncodedSlash::Refuse, &[("refuse", EncodedSlash::Refuse), ("keep", EncodedSlash::Keep)]);
        /// A `;` (or `%3B`) in a path segment and the text after it, as in `/login;v=1`. `"keep"`: ordinary bytes. `"strip"`:
        /// routes and rules see `/login`. `"refuse"`: 400.
        path_parameters: PathParameters = Choice(
            PathParameters::Keep,
            &[("keep", PathParameters::Keep), ("strip", PathParameters::Strip), ("refuse", PathParameters::Refuse)],
        );
        /// `"keep"`: `/login/` and `/login` are different paths. `"ignore"`: routes and rules see `/login`.
        trailing_slash: TrailingSlash =
            Choice(TrailingSlash::Keep, &[("keep", TrailingSlash::Keep), ("ignore", TrailingSlash::Ignore)]);
    }
}

impl PathSettings {
    pub fn reading(&self) -> PathReading {
        PathReading {
            encoded_slash: self.encoded_slash,
            path_parameters: self.path_parameters,
            trailing_slash: self.trailing_slash,
        }
    }
}

/// Whether the path that the client sent is forwarded, or the normalized path that was matched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardPath {
    Original,
    Normalized,
}

/// A path pattern, segment by segment. Segments are the parts between slashes: `/` has one empty segment, and `/a/` ends
/// with an empty segment.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PathPattern {
    /// As configured.
    pub text: String,
    pub segments: Vec<Segment>,
}

/// What a pattern is used for.
#[derive(Clone, Copy)]
pub enum PatternKind<'p> {
    /// Compared with the paths of requests.
    Route,
    /// The beginning of such paths. It has no parameters.
    Prefix,
    /// Sent upstream, with the parameters of this path of a route, if there is a valid one.
    Rewrite(Option<&'p PathPattern>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Segment {
    Literal(String),
    /// `{name}`: one segment that is not empty.
    Param(String),
    /// `{*name}`: the rest of the path, possibly empty; always last.
    Rest(String),
}

impl Segment {
    pub fn literal(&self) -> Option<&str> {
        if let Segment::Literal(text) = self { Some(text) } else { None }
    }

    pub fn param_name(&self) -> Option<&str> {
        match self {
            Segment::Param(name) | Segment::Rest(name) => Some(name),
            Segment::Literal(_) => None,
        }
    }
}

impl PathPattern {
    pub fn read(
        written: &SpannedString,
        kind: PatternKind,
        reading: PathReading,
        report: &mut Report,
    ) -> Option<PathPattern> {
        let parser = PatternParser { key: &written.key, kind, reading };
        let segments = report.accept(written.span.clone(), parser.parse(&written.text))?;
        Some(PathPattern { text: written.text.clone(), segments })
    }

    /// The literal segments at the beginning, as in paths that match.
    pub fn literal_prefix(&self) -> String {
        self.segments.iter().map_while(Segment::literal).flat_map(|text| ["/", text]).collect()
    }

    /// The names of the parameters, in order.
    pub fn param_names(&self) -> Vec<&str> {
        self.segments.iter().filter_map(Segment::param_name).collect()
    }
}

/// Parses the patterns of one setting.
struct PatternParser<'p> {
    /// The setting, for fixes.
    key: &'p str,
    kind: PatternKind<'p>,
    reading: PathReading,
}

impl PatternParser<'_> {
    fn parse(&self, text: &str) -> Parsed<Vec<Segment>> {
        let path = |what: &str| format!("the path {} {what}", quoted(text));
        let write = |path: &str| self.write(&normalize_pattern(path), text);
        if let Some((what, folder, is_exact)) = find_foreign_pattern(text, self.kind) {
            let nearest = if is_exact { folder } else { format!("{}{}", folder.trim_end_matches('/'), self.rest()) };
            let literal = literal_form(text).filter(|(_, path)| self.parse(path).is_ok());
            let literal =
                literal.map(|(c, path)| format!("; if the `{c}` is literal, write `{} = \"{path}\"`", self.key));
            let (why, explained) = match self.kind {
                PatternKind::Route => (
                    "which a route does not match",
                    ", the nearest that a route can match: a segment is literal, `{name}` for any one segment, or `{*rest}` for \
                     the rest",
                ),
                PatternKind::Prefix | PatternKind::Rewrite(_) => ("which has no meaning here", ""),
            };
            return Err((path(&format!("{what}, {why}")), write(&nearest) + explained + &literal.unwrap_or_default()));
        }
        let Some(rest) = text.strip_prefix('/') else {
            let Some((_, url)) = text.split_once("://") else {
                return Err((path("does not begin with `/`"), write(text)));
            };
            let (host, path_of_url) = url.split_once('/').unwrap_or((url, ""));
            let fix = write(&format!("/{path_of_url}"));
            return Err((
                path("is a whole URL"),
                match self.kind {
                    PatternKind::Route => format!("{fix}, and `host = \"{host}\"`"),
                    PatternKind::Prefix | PatternKind::Rewrite(_) => fix,
                },
            ));
        };
        if rest.contains(['?', '#']) {
            return Err((path("has a query or a fragment, which is no part of a path"), write(text)));
        }
        if self.reading.trailing_slash == TrailingSlash::Ignore && rest.ends_with('/') {
            let what =
                "can never match: with `trailing_slash = \"ignore\"`, the path of a request never ends with a slash";
            return Err((path(what), write(text.trim_end_matches('/'))));
        }
        let mut segments: Vec<Segment> = Vec::new();
        let mut parts = rest.split('/').peekable();
        while let Some(part) = parts.next() {
            let is_last = parts.peek().is_none();
            if part.is_empty() && !is_last {
                return Err((path("has two slashes in a row"), write(text)));
            }
            let segment = match parse_parameter(part)? {
                Some(segment) => segment,
                None => self
                    .parse_literal(part)
                    .map_err(|(what, fix)| (path(&what), fix.map_or_else(|| write(text), str::to_owned)))?,
            };
            if let (Segment::Rest(name), false) = (&segment, is_last) {
                let message = path(&format!("continues after `{{*{name}}}`, which matches the rest of the path"));
                return Err((
                    message,
                    format!("end the path with `{{*{name}}}`, or write `{{{name}}}` for one segment"),
                ));
            }
            let name = segment.param_name();
            if name.is_some() && segments.iter().any(|other| other.param_name() == name) {
                let message = path(&format!("has {} twice", quoted(part)));
                return Err((message, String::from("give one of the two another name")));
            }
            segments.push(segment);
        }
        if segments.iter().filter(|segment| !matches!(segment, Segment::Rest(_))).count() > SEGMENTS_MAX {
            let fix = format!("end it with `{{*rest}}` after at most `{SEGMENTS_MAX}` segments");
            return Err((format!("a path with more than `{SEGMENTS_MAX}` segments can never match"), fix));
        }
        Ok(segments)
    }

    /// The fix for `text`: to write this path, if it is valid, or else one that always is.
    fn write(&self, path: &str, text: &str) -> String {
        let is_valid = path != text && self.parse(path).is_ok();
        let path = if is_valid { path.to_owned() } else { format!("/{}", self.rest().trim_start_matches('/')) };
        format!("write `{} = \"{path}\"`", self.key)
    }

    /// What stands for the rest of a path: the last parameter of the route's path in a path that is built from it.
    fn rest(&self) -> String {
        let last = |path: &PathPattern| path.segments.iter().rfind(|segment| segment.literal().is_none()).cloned();
        match self.kind {
            PatternKind::Route => String::from("/{*rest}"),
            PatternKind::Prefix => String::new(),
            PatternKind::Rewrite(path) => match path.and_then(last) {
                Some(Segment::Rest(name)) => format!("/{{*{name}}}"),
                Some(Segment::Param(name)) => format!("/{{{name}}}"),
                Some(Segment::Literal(_)) | None => String::new(),
            },
        }
    }

    /// Parses a literal segment. The error is what is wrong, and the fix unless it is the normal form.
    fn parse_literal(&self, part: &str) -> Result<Segment, (String, Option<&'static str>)> {
        let reading = self.reading;
        if let "." | ".." = normalize_segment(part).as_str() {
            let what = format!("has the segment {}, which normalization removes from every request", quoted(part));
            return Err((what, None));
        }
        if let Some(what) = difference_from_normal(part) {
            return Err((what, None));
        }
        if let Some(ambiguity) = find_ambiguity(part) {
            let what = format!("can never match: a request is refused if {ambiguity}");
            return Err((what, Some("write the path that clients request")));
        }
        if part.contains(';') && reading.path_parameters != PathParameters::Keep {
            let why = match reading.path_parameters {
                PathParameters::Strip => "the `;` and what follows it are removed before matching",
                PathParameters::Keep | PathParameters::Refuse => "requests with it are refused",
            };
            let fix = "write the path without `;`, or `path_parameters = \"keep\"` at the top of the file";
            return Err((format!("can never match: it contains `;`, and {why}"), Some(fix)));
        }
        let slash = ["%2F", "%5C"].into_iter().find(|code| part.contains(code));
        if let (Some(code), EncodedSlash::Refuse) = (slash, reading.encoded_slash) {
            let what = format!("can never match: it contains `{code}`, and requests with it are refused");
            return Err((what, Some("write `encoded_slash = \"keep\"` at the top of the file")));
        }
        Ok(Segment::Literal(match self.kind {
            PatternKind::Route | PatternKind::Prefix => normalize_segment(part),
            PatternKind::Rewrite(_) => part.to_owned(),
        }))
    }
}

pub fn is_param_name(text: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(first) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Parses `{name}` and `{*name}`; `None` for a literal. Recognizes the parameters of other routers, to suggest a fix.
fn parse_parameter(part: &str) -> Parsed<Option<Segment>> {
    let no_parameter = |fix: &str| Err((format!("{} is not a parameter", quoted(part)), fix.to_owned()));
    if part == "*" || part == "**" {
        return no_parameter("write `{*rest}` for the rest of the path, or `{name}` for one segment");
    }
    let foreign = part.strip_prefix([':', '<']).map(|rest| rest.trim_end_matches('>'));
    if let Some(name) = foreign.filter(|name| is_param_name(name)) {
        return no_parameter(&format!("write `{{{name}}}`"));
    }
    if !part.contains(['{', '}']) {
        return Ok(None);
    }
    let inner = part.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let Some(inner) = inner.filter(|inner| !inner.contains(['{', '}'])) else {
        let fix = "write `{name}` as a whole segment, such as `/users/{id}/files`";
        return Err((format!("{} is neither a parameter nor a literal", quoted(part)), fix.to_owned()));
    };
    let (name, is_rest) = inner.strip_prefix('*').map_or((inner, false), |name| (name, true));
    if is_param_name(name) {
        let segment = if is_rest { Segment::Rest } else { Segment::Param };
        return Ok(Some(segment(name.to_owned())));
    }
    let bare = name.split([':', '=']).next().unwrap_or_default().replace('-', "_");
    match bare.trim_matches(['*', '.']) {
        "" if is_rest => no_parameter("a parameter needs a name: write `{*rest}`"),
        "" => no_parameter("a parameter needs a name: write `{id}`"),
        bare if !is_param_name(bare) => {
            no_parameter("a name has letters, digits and `_`, and does not start with a digit: write `{id}`")
        }
        bare if is_rest || name.contains(['*', '.']) => no_parameter(&format!("write `{{*{bare}}}`")),
        bare => no_parameter(&format!("write `{{{bare}}}`")),
    }
}

/// Modifiers of nginx before the path of a location, and whether the path is a prefix.
const LOCATION_MODIFIERS: [(&str, bool); 4] = [("^~", true), ("~*", true), ("~", true), ("=", false)];
/// What regular expressions contain, and paths hardly ever.
const EXPRESSION_PARTS: [&str; 15] =
    [".*", ".+", "[^", "[a-z", "[A-Z", "[0-9", "(?", "|", "\\", "(.", "/?(", "^", ")?", ")*", ")+"];
/// Characters of paths that look like a pattern. A literal path has them encoded.
const PATTERN_CHARS: [char; 5] = ['*', '$', '(', ')', '+'];

/// Recognizes patterns that other products have and that would be taken literally: regular expressions, locations of nginx,
/// and wildcards within a segment. Returns what is wrong, the literal path at the beginning, and whether that is the whole path.
fn find_foreign_pattern(text: &str, kind: PatternKind) -> Option<(&'static str, String, bool)> {
    let modifier = LOCATION_MODIFIERS.iter().find_map(|(mark, is_prefix)| Some((text.strip_prefix(mark)?, *is_prefix)));
    let (pattern, is_prefix) = modifier.unwrap_or((text, true));
    let pattern = pattern.trim_start();
    // Expressions within braces belong to a parameter of another router.
    let mut depth = 0_i32;
    let outside: String = pattern
        .chars()
        .filter(|c| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth == 0
        })
        .collect();
    let is_expression = text.starts_with('~')
        || EXPRESSION_PARTS.iter().any(|part| outside.contains(part))
        || outside.ends_with('$') && outside.len() > 1;
    let has_group = outside.split('$').skip(1).any(|behind| behind.starts_with(|c: char| c.is_ascii_digit()));
    // A route has a parameter instead of a segment `*`, see `parse_parameter`.
    let is_route = matches!(kind, PatternKind::Route) && text.starts_with('/');
    let is_wildcard =
        |part: &str| part.contains('*') && !part.contains(['{', '}']) && !(is_route && ["*", "**"].contains(&part));
    let what = match () {
        () if is_expression => "is a regular expression",
        () if modifier.is_some() => "begins with a modifier of nginx",
        () if pattern.split('/').any(is_wildcard) => "has a `*`",
        () if has_group => "has a group of a regular expression",
        () => return None,
    };
    let anchored = pattern.trim_start_matches('^');
    let is_special = |c: char| "(){}[]*+|\\$^".contains(c) || is_expression && c == '?';
    let repeats = [".*", ".+"].iter().filter_map(|part| anchored.find(part)).min().unwrap_or(anchored.len());
    let (literal, special) = anchored.split_at(anchored.find(is_special).unwrap_or(anchored.len()).min(repeats));
    if !is_prefix || special == "$" {
        return Some((what, normalize_pattern(literal), true));
    }
    if !literal.starts_with('/') && (is_expression || modifier.is_some()) {
        return Some((what, String::from("/"), false));
    }
    // The last segment is whole if the pattern goes on with a slash or with anything.
    let is_whole = ["/", "(/", "(.", ".*", ".+"].iter().any(|next| special.starts_with(next));
    let is_whole = is_whole || ["", "*"].contains(&special);
    let folder = if is_whole { literal } else { &literal[..literal.rfind('/').unwrap_or(0)] };
    Some((what, normalize_pattern(folder.trim_end_matches('/')), false))
}

/// The only character of a pattern in a path, and the path with it encoded: it may be literal.
fn literal_form(text: &str) -> Option<(char, String)> {
    let is_special = |c: char| PATTERN_CHARS.contains(&c) || "^|[]\\".contains(c);
    let mut special = text.char_indices().filter(|(_, c)| is_special(*c));
    let (Some((at, c)), None) = (special.next(), special.next()) else { return None };
    let (before, behind) = (&text[..at], &text[at + 1..]);
    let is_expression = before.ends_with('.')
        || c == '*' && before.ends_with('/') && (behind.is_empty() || behind.starts_with('/'))
        || c == '$' && behind.starts_with(|c: char| c.is_ascii_digit());
    (before.starts_with('/') && !is_expression).then(|| (c, format!("{before}%{:02X}{behind}", u32::from(c))))
}

/// The first difference of a segment from its normal form.
fn difference_from_normal(part: &str) -> Option<String> {
    let is_lower = |c: char| c.is_ascii_lowercase();
    part.char_indices().find_map(|(at, c)| match (c, decode_escape(&part.as_bytes()[at..])) {
        ('%', None) => Some(String::from("has a `%` without two hex digits")),
        (_, Some(byte)) if PATTERN_CHARS.contains(&char::from(byte)) && !part[at..at + 3].contains(is_lower) => None,
        (_, Some(byte)) if is_pchar(byte) => {
            Some(format!("encodes `{}`, which is written without encoding", char::from(byte)))
        }
        (_, Some(_)) => {
            let code = &part[at..at + 3];
            code.contains(is_lower).then(|| format!("has the encoding `{code}` in lower case"))
        }
        (c, None) => {
            let is_plain = u8::try_from(c).is_ok_and(is_pchar);
            (!is_plain).then(|| format!("has {}, which must be percent-encoded", quoted(&c.to_string())))
        }
    })
}

/// The normal form of a pattern.
fn normalize_pattern(text: &str) -> String {
    let path = text.split(['?', '#']).next().unwrap_or(text);
    let mut parts: Vec<String> = Vec::new();
    let mut segments = path.split('/').peekable();
    while let Some(part) = segments.next() {
        let plain = if part.starts_with('{') { part.to_owned() } else { normalize_segment(part) };
        match plain.as_str() {
            ".." => drop(parts.pop()),
            "." => {}
            "" if segments.peek().is_some() => {}
            _ => parts.push(plain),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The normal form of a segment: only characters that must be percent-encoded are.
fn normalize_segment(part: &str) -> String {
    let mut out = String::new();
    let mut rest = part.as_bytes();
    while let [first, ..] = rest {
        let (byte, width) = decode_escape(rest).map_or((*first, 1), |byte| (byte, 3));
        push_encoded(byte, &mut out);
        rest = &rest[width..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_as(text: &str, key: &str, kind: PatternKind) -> Parsed<Vec<Segment>> {
        PatternParser { key, kind, reading: PathReading::verbatim(EncodedSlash::Keep) }.parse(text)
    }

    fn read(text: &str) -> Parsed<Vec<Segment>> {
        read_as(text, "path", PatternKind::Route)
    }

    #[test]
    fn patterns_are_read_as_written() {
        let literal = |text: &str| Segment::Literal(text.to_owned());
        assert_eq!(read("/"), Ok(vec![literal("")]));
        assert_eq!(read("/a/"), Ok(vec![literal("a"), literal("")]));
        assert_eq!(read("/a/{id}/{*rest}").unwrap()[1..], [Segment::Param("id".into()), Segment::Rest("rest".into())]);
        assert_eq!(read("/a:b@c,d/%2F%C3%A9"), Ok(vec![literal("a:b@c,d"), literal("%2F%C3%A9")]));
    }

    #[test]
    fn the_normal_form_of_a_rejected_path_is_accepted() {
        let written =
            "a //a /a//b /./a /a/../b /a/.. /%41 /%c3%a9 /é /100% /a?b=1 /%2e%2E/x /\" /a\\b /% /%4 /[x] ? /a// /é%e9";
        for text in written.split(' ').chain(["/a b"]) {
            assert!(read(text).is_err(), "{text}");
            assert!(read(&normalize_pattern(text)).is_ok(), "{text} -> {}", normalize_pattern(text));
        }
    }

    #[test]
    fn a_path_has_at_most_the_segments_that_are_matched() {
        let deep = "/a".repeat(SEGMENTS_MAX);
        assert!(read(&deep).is_ok());
        assert!(read(&format!("{deep}/{{*rest}}")).is_ok());
        assert!(read(&format!("{deep}/a")).is_err());
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
            assert_eq!(read(text).unwrap_err().1, fix);
        }
    }

    #[test]
    fn patterns_of_other_products_have_a_nearest_route() {
        for (text, nearest) in [
            ("/static/*.css", "/static/{*rest}"),
            ("/*.php", "/{*rest}"),
            ("*.php", "/{*rest}"),
            ("/api*", "/api/{*rest}"),
            ("/a/b*c/d", "/a/{*rest}"),
            ("^/api", "/api/{*rest}"),
            ("^/api/", "/api/{*rest}"),
            ("^/api$", "/api"),
            ("^/$", "/"),
            ("/api(/|$)(.*)", "/api/{*rest}"),
            ("/api/(.*)", "/api/{*rest}"),
            ("/api.*", "/api/{*rest}"),
            ("/api/?$", "/api/{*rest}"),
            ("/users/[0-9]+/files", "/users/{*rest}"),
            ("/(foo|bar)/x", "/{*rest}"),
            ("~ ^/api/v(1|2)/", "/api/{*rest}"),
            ("~* \\.(gif|jpg)$", "/{*rest}"),
            ("~*bot", "/{*rest}"),
            ("^~ /images/", "/images/{*rest}"),
            ("= /favicon.ico", "/favicon.ico"),
            ("=/", "/"),
            ("*", "/{*rest}"),
            ("**", "/{*rest}"),
            ("api/*", "/api/{*rest}"),
            ("(/a)?", "/{*rest}"),
            ("/a(/b)?", "/a/{*rest}"),
            ("/a^b", "/{*rest}"),
            ("/api/$1", "/api/{*rest}"),
        ] {
            let (message, fix) = read(text).unwrap_err();
            assert!(fix.starts_with(&format!("write `path = \"{nearest}\"`")), "{text}: {message}: {fix}");
            assert!(read(nearest).is_ok(), "{nearest}");
        }
    }

    #[test]
    fn a_path_that_looks_like_a_pattern_can_be_written_encoded() {
        for (text, literal, segment) in [
            ("/a*b", "/a%2Ab", "a*b"),
            ("/a$", "/a%24", "a$"),
            ("/*.css", "/%2A.css", "*.css"),
            ("/a^b", "/a%5Eb", "a%5Eb"),
            ("/a|b", "/a%7Cb", "a%7Cb"),
        ] {
            let (_, fix) = read(text).unwrap_err();
            assert!(fix.ends_with(&format!("is literal, write `path = \"{literal}\"`")), "{fix}");
            assert_eq!(read(literal), Ok(vec![Segment::Literal(segment.to_owned())]));
        }
        assert!(!read("/api.*").unwrap_err().1.contains("is literal, write"), "an expression is not literal");
        assert_eq!(read("/%2B%28%29"), Ok(vec![Segment::Literal(String::from("+()"))]));
        assert!(read("/%2a").is_err());
        // The upstream receives what is written.
        let rewritten = read_as("/%2A", "rewrite", PatternKind::Rewrite(None));
        assert_eq!(rewritten, Ok(vec![Segment::Literal(String::from("%2A"))]));
    }

    #[test]
    fn fixes_name_their_setting_and_are_accepted_there() {
        let segments = read("/a/{id}/{*rest}").unwrap();
        let path = PathPattern { text: String::from("/a/{id}/{*rest}"), segments };
        let (prefix, rewrite) = (PatternKind::Prefix, PatternKind::Rewrite(Some(&path)));
        for (key, kind, text, fixed) in [
            ("strip_prefix", prefix, "^/api", "/api"),
            ("strip_prefix", prefix, "/api/*", "/api"),
            ("strip_prefix", prefix, "/api/*.css", "/api"),
            ("strip_prefix", prefix, "/api(/|$)(.*)", "/api"),
            ("from", prefix, "api", "/api"),
            ("from", prefix, "https://a.example/api", "/api"),
            ("to", PatternKind::Rewrite(None), "/api/$1", "/api"),
            ("rewrite", rewrite, "/b/$1", "/b/{*rest}"),
            ("rewrite", rewrite, "/b/*", "/b/{*rest}"),
        ] {
            let (_, fix) = read_as(text, key, kind).unwrap_err();
            assert!(fix.starts_with(&format!("write `{key} = \"{fixed}\"`")), "{text}: {fix}");
            assert!(read_as(fixed, key, kind).is_ok(), "{fixed}");
        }
    }

    #[test]
    fn unusual_characters_of_paths_are_literal() {
        for text in
            ["/Users('x')", "/a$", "/$metadata", "/a+b", "/a.b", "/~user", "/a=b", "/(a)", "/.well-known/x", "/v1!"]
        {
            assert_eq!(read(text).is_ok(), text != "/a$", "{text}");
        }
    }
}
