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
    /// Literal text with wildcards: `*.css`, `v{n}`.
    Wildcards(WildcardSegment),
    /// `{name}`: one segment that is not empty.
    Param(String),
    /// `{*name}`: the rest of the path, possibly empty; always last.
    Rest(String),
}

/// A segment with wildcards between literal texts. A wildcard is `{name}` or `*`, and matches one or more characters.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WildcardSegment {
    /// One more than wildcards. The first and the last may be empty, but some text is not. In the path of a route, no text between
    /// two wildcards is empty.
    pub texts: Vec<String>,
    /// `None`: `*`, which has no name.
    pub names: Vec<Option<String>>,
}

impl Segment {
    pub fn literal(&self) -> Option<&str> {
        if let Segment::Literal(text) = self { Some(text) } else { None }
    }

    /// The names of the parameters, in order; `None` for a `*`.
    fn params(&self) -> impl Iterator<Item = Option<&str>> {
        let (name, several) = match self {
            Segment::Literal(_) => (None, None),
            Segment::Wildcards(segment) => (None, Some(&segment.names)),
            Segment::Param(name) | Segment::Rest(name) => (Some(name.as_str()), None),
        };
        name.map(Some).into_iter().chain(several.into_iter().flatten().map(Option::as_deref))
    }
}

impl WildcardSegment {
    /// How specific the segment is among others that match the same text: the longer literal text in all, at its beginning, and
    /// at its end.
    pub fn specificity(&self) -> [usize; 3] {
        let length = |text: Option<&String>| text.map_or(0, String::len);
        [self.texts.iter().map(String::len).sum(), length(self.texts.first()), length(self.texts.last())]
    }

    /// A segment that matches, with this text for each wildcard.
    pub fn filled_with(&self, text: &str) -> String {
        self.texts.join(text)
    }

    /// As in a path of the configuration.
    pub fn written(&self) -> String {
        let wildcard = |name: &Option<String>| name.as_ref().map_or(String::from("*"), |name| format!("{{{name}}}"));
        let wildcards = self.names.iter().map(wildcard).chain([String::new()]);
        self.texts.iter().zip(wildcards).flat_map(|(text, wildcard)| [text.clone(), wildcard]).collect()
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

    /// The names of the parameters, in order. A `*` has a place among them, and an empty name.
    pub fn param_names(&self) -> Vec<&str> {
        self.segments.iter().flat_map(Segment::params).map(Option::unwrap_or_default).collect()
    }

    /// Whether the path has this parameter, of the rest of the path or of (a part of) a segment.
    fn has_param(&self, name: &str, is_rest: bool) -> bool {
        let is_kind = |segment: &&Segment| matches!(segment, Segment::Rest(_)) == is_rest;
        self.segments.iter().filter(is_kind).flat_map(Segment::params).any(|param| param == Some(name))
    }

    /// The first parameter that another path does not have.
    pub fn param_missing_in(&self, path: &PathPattern) -> Option<&str> {
        self.segments.iter().find_map(|segment| {
            let is_rest = matches!(segment, Segment::Rest(_));
            segment.params().flatten().find(|name| !path.has_param(name, is_rest))
        })
    }

    /// Whether a part of a segment is a wildcard.
    pub fn has_wildcards(&self) -> bool {
        self.segments.iter().any(|segment| matches!(segment, Segment::Wildcards(_)))
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
        let is_route = matches!(self.kind, PatternKind::Route);
        if is_route && text.len() > 2 && text.starts_with("*.") && self.parse(&format!("/{text}")).is_ok() {
            let fix = format!(
                "write `{} = \"/{text}\"` for the first segment, and a route for each deeper one: `/{{folder}}/{text}` for the \
                 second; `/{{*rest}}` matches any path",
                self.key
            );
            return Err((path("does not begin with `/`, and a `*` matches within one segment only"), fix));
        }
        if let Some((what, folder, is_exact)) = find_foreign_pattern(text, self.kind) {
            let nearest = if is_exact { folder } else { format!("{}{}", folder.trim_end_matches('/'), self.rest()) };
            let literal = literal_form(text).filter(|(_, path)| self.parse(path).is_ok());
            let literal =
                literal.map(|(c, path)| format!("; if the `{c}` is literal, write `{} = \"{path}\"`", self.key));
            let (why, explained) = match self.kind {
                PatternKind::Route => (
                    "which a route does not match",
                    ", the nearest that a route can match: `{name}` and `*` match within one segment, `{*rest}` matches the rest",
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
            let segment = match parse_wildcards(part, is_last)? {
                Some(segment) => self.check_wildcards(part, segment)?,
                None => Segment::Literal(part.to_owned()),
            };
            let segment = self
                .check_literals(segment)
                .map_err(|(what, fix)| (path(&what), fix.map_or_else(|| write(text), str::to_owned)))?;
            if let (Segment::Rest(name), false) = (&segment, is_last) {
                let message = path(&format!("continues after `{{*{name}}}`, which matches the rest of the path"));
                return Err((
                    message,
                    format!("end the path with `{{*{name}}}`, or write `{{{name}}}` for one segment"),
                ));
            }
            segments.push(segment);
            let names: Vec<&str> = segments.iter().flat_map(Segment::params).flatten().collect();
            if let Some(name) =
                names.iter().enumerate().find_map(|(at, name)| names[..at].contains(name).then_some(name))
            {
                let message = path(&format!("has {} twice", quoted(&format!("{{{name}}}"))));
                return Err((message, String::from("give one of the two another name")));
            }
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
        match self.kind {
            PatternKind::Route => String::from("/{*rest}"),
            PatternKind::Prefix => String::new(),
            PatternKind::Rewrite(path) => match path.and_then(|path| path.segments.iter().rev().find_map(last_param)) {
                Some((name, true)) => format!("/{{*{name}}}"),
                Some((name, false)) => format!("/{{{name}}}"),
                None => String::new(),
            },
        }
    }

    /// Checks what depends on the use of a pattern.
    fn check_wildcards(&self, part: &str, segment: Segment) -> Parsed<Segment> {
        let Segment::Wildcards(WildcardSegment { texts, names }) = &segment else { return Ok(segment) };
        let is_built = matches!(self.kind, PatternKind::Rewrite(_));
        if is_built && names.contains(&None) {
            let message = format!("{} has a `*`, which has no value here", quoted(part));
            return Err((message, String::from("name the parameter in both paths, such as `{name}`")));
        }
        if !is_built && texts[1..names.len()].iter().any(String::is_empty) {
            let message = format!("{} has two wildcards without text between them", quoted(part));
            let fix = match part.contains("**") {
                true => {
                    "write one `*`, for a part of one segment; `{*rest}` as the last segment matches any rest of the path"
                }
                false => "write one of them, or text between them, such as `{a}-{b}`",
            };
            return Err((message, fix.to_owned()));
        }
        Ok(segment)
    }

    /// Checks the literal texts of a segment, and normalizes them. The error is what is wrong, and the fix unless it is the normal
    /// form.
    fn check_literals(&self, segment: Segment) -> Result<Segment, (String, Option<&'static str>)> {
        let (whole, texts) = match &segment {
            Segment::Param(_) | Segment::Rest(_) => return Ok(segment),
            Segment::Literal(text) => (text.clone(), std::slice::from_ref(text)),
            // What wildcards stand for is as harmless as a letter.
            Segment::Wildcards(segment) => (segment.filled_with("x"), &*segment.texts),
        };
        if let "." | ".." = normalize_segment(&whole).as_str() {
            let what = format!("has the segment {}, which normalization removes from every request", quoted(&whole));
            return Err((what, None));
        }
        if let Some(what) = texts.iter().find_map(|text| difference_from_normal(text)) {
            return Err((what, None));
        }
        if let Some(ambiguity) = find_ambiguity(&whole) {
            let what = format!("can never match: a request is refused if {ambiguity}");
            return Err((what, Some("write the path that clients request")));
        }
        if whole.contains(';') && self.reading.path_parameters != PathParameters::Keep {
            let why = match self.reading.path_parameters {
                PathParameters::Strip => "the `;` and what follows it are removed before matching",
                PathParameters::Keep | PathParameters::Refuse => "requests with it are refused",
            };
            let fix = "write the path without `;`, or `path_parameters = \"keep\"` at the top of the file";
            return Err((format!("can never match: it contains `;`, and {why}"), Some(fix)));
        }
        let slash = ["%2F", "%5C"].into_iter().find(|code| whole.contains(code));
        if let (Some(code), EncodedSlash::Refuse) = (slash, self.reading.encoded_slash) {
            let what = format!("can never match: it contains `{code}`, and requests with it are refused");
            return Err((what, Some("write `encoded_slash = \"keep\"` at the top of the file")));
        }
        Ok(match (self.kind, segment) {
            (PatternKind::Rewrite(_), segment) => segment,
            (_, Segment::Wildcards(WildcardSegment { texts, names })) => {
                let texts = texts.iter().map(|text| normalize_segment(text)).collect();
                Segment::Wildcards(WildcardSegment { texts, names })
            }
            (_, _) => Segment::Literal(normalize_segment(&whole)),
        })
    }
}

/// The last parameter of a segment with a name, and whether it is that of the rest of the path.
fn last_param(segment: &Segment) -> Option<(&str, bool)> {
    segment.params().flatten().last().map(|name| (name, matches!(segment, Segment::Rest(_))))
}

pub fn is_param_name(text: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(first) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Parses a segment with `{name}`, `{*name}` or `*`; `None` for a literal. Recognizes the parameters of other routers, to suggest a
/// fix.
fn parse_wildcards(part: &str, is_last: bool) -> Parsed<Option<Segment>> {
    if part == "*" || part == "**" {
        let fix = match is_last {
            true => "write `{*rest}` for the rest of the path, or `{name}` for one segment",
            false => "write `{name}` for one segment",
        };
        return Err((format!("{} is a whole segment, which needs a name", quoted(part)), fix.to_owned()));
    }
    if let Some(meant) = foreign_parameter(part) {
        return Err((format!("{} is not a parameter", quoted(part)), format!("write `{meant}`")));
    }
    let mut segment = WildcardSegment { texts: vec![String::new()], names: Vec::new() };
    let mut text = String::new();
    let mut rest = part;
    while let Some(at) = rest.find(['{', '}', '*']) {
        text.push_str(&rest[..at]);
        let (wildcard, behind) = rest[at..].split_at(wildcard_length(&rest[at..]));
        let (name, is_rest) = match wildcard {
            "*" => (None, false),
            _ => match wildcard.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) {
                Some(inner) => parse_name(inner).map(|(name, is_rest)| (Some(name), is_rest))?,
                None => {
                    let message = format!("{} has a brace that is not part of a parameter", quoted(part));
                    return Err((message, String::from("write `{name}` for a parameter, `%7B` and `%7D` for braces")));
                }
            },
        };
        if let (Some(name), true) = (&name, is_rest) {
            if wildcard == part {
                return Ok(Some(Segment::Rest(name.clone())));
            }
            let message = format!("{} has `{{*{name}}}` within a segment", quoted(part));
            return Err((message, format!("write `{{{name}}}`, for a part of one segment")));
        }
        if let (Some(name), true) = (&name, wildcard == part) {
            return Ok(Some(Segment::Param(name.clone())));
        }
        segment.names.push(name);
        *segment.texts.last_mut().unwrap_or(&mut String::new()) = std::mem::take(&mut text);
        segment.texts.push(String::new());
        rest = behind;
    }
    *segment.texts.last_mut().unwrap_or(&mut String::new()) = text + rest;
    Ok((!segment.names.is_empty()).then_some(Segment::Wildcards(segment)))
}

/// The length of the wildcard or brace with which a text begins. Expressions in a parameter may contain braces.
fn wildcard_length(text: &str) -> usize {
    let mut depth = 0;
    let closing = text.bytes().position(|byte| {
        depth += i32::from(byte == b'{') - i32::from(byte == b'}');
        depth == 0
    });
    closing.map_or(text.len(), |at| at + 1)
}

/// A segment with parameters of other routers, such as `:name`, `:name*`, `:from-:to`, `<name>` and `<path:name>`, as it is written
/// here.
fn foreign_parameter(part: &str) -> Option<String> {
    if let Some(rest) = part.strip_prefix(':') {
        let is_sign = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut meant = String::new();
        for piece in rest.split(':') {
            let (name, behind) = piece.split_at(piece.find(|c| !is_sign(c)).unwrap_or(piece.len()));
            match is_param_name(name) && !meant.ends_with('}') {
                true if ["*", "+"].contains(&behind) && piece == rest => return Some(format!("{{*{name}}}")),
                true => meant += &format!("{{{name}}}{behind}"),
                false if meant.is_empty() => return None,
                false => meant += &format!(":{piece}"),
            }
        }
        return Some(meant);
    }
    let (before, rest) = part.split_once('<')?;
    let (inner, behind) = rest.split_once('>').unwrap_or((rest, ""));
    // As in Flask, which writes a type before the name, and in Rocket.
    let (kind, name) = inner.rsplit_once(':').unwrap_or(("", inner));
    let all =
        name.strip_suffix("..").or((kind == "path").then_some(name)).filter(|_| before.is_empty() && behind.is_empty());
    if let Some(all) = all.filter(|name| is_param_name(name)) {
        return Some(format!("{{*{all}}}"));
    }
    is_param_name(name).then(|| format!("{before}{{{name}}}{behind}"))
}

/// Parses what stands within braces: the name, and whether it is that of the rest of the path.
fn parse_name(inner: &str) -> Parsed<(String, bool)> {
    let no_parameter =
        |fix: &str| Err((format!("{} is not a parameter", quoted(&format!("{{{inner}}}"))), fix.to_owned()));
    let (name, is_rest) = inner.strip_prefix('*').map_or((inner, false), |name| (name, true));
    if is_param_name(name) {
        return Ok((name.to_owned(), is_rest));
    }
    if let [first, second, ..] = *name.split(',').collect::<Vec<_>>() {
        return no_parameter(&format!("write a route for each: with `{first}`, with `{second}`, and so on"));
    }
    // As in gorilla/mux, Starlette and google.api.http.
    let is_rest =
        is_rest || name.split_once([':', '=']).is_some_and(|(_, form)| [".*", ".+", "path", "**"].contains(&form));
    let bare = name.split([':', '=']).next().unwrap_or_default().replace('-', "_");
    match bare.trim_matches(['*', '.']) {
        "" if is_rest => no_parameter("a parameter needs a name: write `{*rest}`"),
        "" => no_parameter("a parameter needs a name: write `{id}`"),
        bare if !is_param_name(bare) => {
            no_parameter("a name has letters, digits and `_`, and does not start with a digit: write `{id}`")
        }
        bare if is_rest || name.contains(['*', '.']) && !name.contains([':', '=']) => {
            no_parameter(&format!("write `{{*{bare}}}`"))
        }
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
/// and a `*` where it has no meaning. Returns what is wrong, the literal path at the beginning, and whether that is the whole path.
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
    // `/*.*` has no meaning as an expression.
    let outside = outside.replace("/*.*", "/");
    let is_expression = text.starts_with('~')
        || EXPRESSION_PARTS.iter().any(|part| outside.contains(part))
        || outside.ends_with('$') && outside.len() > 1;
    let has_group = outside.split('$').skip(1).any(|behind| behind.starts_with(|c: char| c.is_ascii_digit()));
    // For the path of a route, see `parse_wildcards`.
    let is_route = matches!(kind, PatternKind::Route) && text.starts_with('/');
    let is_wildcard = |part: &str| part.contains('*') && !part.contains(['{', '}']) && !is_route;
    let what = match () {
        () if is_expression => "is a regular expression",
        () if modifier.is_some() => "begins with a modifier of nginx",
        () if pattern.split('/').any(is_wildcard) => "has a `*`",
        () if has_group => "has a group of a regular expression",
        () => return None,
    };
    if let (true, Some(path)) = (is_expression && matches!(kind, PatternKind::Route), translate_expression(pattern)) {
        return Some((what, path, true));
    }
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

/// The path of a route for a regular expression that consists of literal text and repeated classes within segments, such as
/// `^/users/[0-9]+$`, if a class is not all of it.
fn translate_expression(pattern: &str) -> Option<String> {
    const RESTS: [&str; 5] = ["(/|$)(.*)", "(/.*)?", "/(.*)", "/.*", "/"];
    let inner = pattern.trim_start_matches('^');
    let inner = inner.strip_suffix('$').unwrap_or(inner);
    let is_end = inner.len() < pattern.trim_start_matches('^').len();
    let suffix_of =
        |rest: &str| inner.strip_suffix(rest).filter(|before| !before.is_empty() && (rest != "/" || !is_end));
    let (mut rest, suffix) = match RESTS.into_iter().find_map(suffix_of) {
        Some(inner) => (inner, "/{*rest}"),
        None => (inner, ""),
    };
    let mut path = String::new();
    let mut params = 0;
    while let Some(first) = rest.chars().next() {
        let class = ["(", ""].into_iter().find_map(|open| {
            let class = rest.strip_prefix(open)?;
            let behind = match class.strip_prefix("\\d").or_else(|| class.strip_prefix("\\w")) {
                Some(behind) => behind,
                None => class.strip_prefix('[')?.split_once(']')?.1,
            };
            let behind = match behind.strip_prefix('{') {
                Some(count) => count.split_once('}')?.1,
                None => behind.strip_prefix('+').or_else(|| behind.strip_prefix('*'))?,
            };
            if open.is_empty() { Some(behind) } else { behind.strip_prefix(')') }
        });
        rest = match (class, first) {
            (Some(behind), _) => {
                params += 1;
                path += &if params == 1 { String::from("{id}") } else { format!("{{id{params}}}") };
                behind
            }
            (None, '\\') => {
                let escaped = rest[1..].chars().next().filter(|c| "./-_~".contains(*c))?;
                path.push(escaped);
                &rest[2..]
            }
            (None, c) if c.is_ascii_alphanumeric() || "/-_~".contains(c) => {
                path.push(c);
                &rest[1..]
            }
            _ => return None,
        };
    }
    (params > 0 && path.starts_with('/')).then(|| path + suffix)
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
    // A literal segment that begins with a colon looks like a parameter, too.
    let is_pattern_char = |byte| PATTERN_CHARS.contains(&char::from(byte)) || byte == b':';
    part.char_indices().find_map(|(at, c)| match (c, decode_escape(&part.as_bytes()[at..])) {
        ('%', None) => Some(String::from("has a `%` without two hex digits")),
        (_, Some(byte)) if is_pattern_char(byte) && !part[at..at + 3].contains(is_lower) => None,
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
        let plain = if part.contains('{') { part.to_owned() } else { normalize_segment(part) };
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
        assert_eq!(read("/:/:1"), Ok(vec![literal(":"), literal(":1")]));
    }

    #[test]
    fn a_segment_has_wildcards_between_its_texts() {
        for (text, texts, names) in [
            ("/*.css", vec!["", ".css"], vec![None]),
            ("/v{n}", vec!["v", ""], vec![Some("n")]),
            ("/{name}.{ext}", vec!["", ".", ""], vec![Some("name"), Some("ext")]),
            ("/a*b{c}%2A", vec!["a", "b", "*"], vec![None, Some("c")]),
            ("/*.*", vec!["", ".", ""], vec![None, None]),
        ] {
            let texts = texts.into_iter().map(str::to_owned).collect();
            let names = names.into_iter().map(|name| name.map(str::to_owned)).collect();
            let segment = WildcardSegment { texts, names };
            assert_eq!(segment.written(), text[1..].replace("%2A", "*"));
            assert_eq!(read(text), Ok(vec![Segment::Wildcards(segment)]), "{text}");
        }
        for text in ["/{a}.{a}", "/{a}/b{a}", "/a**", "/a*{b}", "/%2e{a}", "/é{a}", "/..;{a}", "/a}b", "/{id}[0-9]+"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_built_path_has_named_parameters_at_any_place() {
        let path = PathPattern { text: String::new(), segments: read("/f/{name}.{ext}/{id}/{*rest}").unwrap() };
        let kind = PatternKind::Rewrite(Some(&path));
        for (text, missing) in [
            ("/{ext}/{name}{id}.x/{*rest}", None),
            ("/v-{other}", Some("other")),
            ("/{rest}", Some("rest")),
            ("/{*id}", Some("id")),
        ] {
            let built = PathPattern { text: String::new(), segments: read_as(text, "rewrite", kind).unwrap() };
            assert_eq!(built.param_missing_in(&path), missing, "{text}");
        }
        assert!(read_as("/{name}*", "rewrite", kind).is_err());
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
            ("/users/<int:id>.json", "write `{id}.json`"),
            ("/users/:id.json", "write `{id}.json`"),
            ("/users/{id:[0-9]{2}}.json", "write `{id}`"),
            ("/static/*.{css,js}", "write a route for each: with `css`, with `js`, and so on"),
            ("/a/*/b", "write `{name}` for one segment"),
            ("/a/{*rest}.css", "write `{rest}`, for a part of one segment"),
            ("/a/{b}{c}", "write one of them, or text between them, such as `{a}-{b}`"),
            ("/a/{b", "write `{name}` for a parameter, `%7B` and `%7D` for braces"),
            ("/files/:path*", "write `{*path}`"),
            ("/files/:path+", "write `{*path}`"),
            ("/flights/:from-:to", "write `{from}-{to}`"),
            ("/v1/:name:publish", "write `{name}:publish`"),
            ("/users/:id-x", "write `{id}-x`"),
            ("/files/<path..>", "write `{*path}`"),
            ("/files/<path:name>", "write `{*name}`"),
            ("/files/{path:.*}", "write `{*path}`"),
            ("/files/{path:path}", "write `{*path}`"),
            ("/v1/{name=**}", "write `{*name}`"),
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
            ("*.php", "/*.php"),
            ("/static/*.(css|js)", "/static/{*rest}"),
            ("^/api", "/api/{*rest}"),
            ("^/api/", "/api/{*rest}"),
            ("^/api$", "/api"),
            ("^/$", "/"),
            ("/api(/|$)(.*)", "/api/{*rest}"),
            ("/api/(.*)", "/api/{*rest}"),
            ("/api.*", "/api/{*rest}"),
            ("/api/?$", "/api/{*rest}"),
            ("/users/[0-9]+/files", "/users/{id}/files"),
            ("^/users/(\\d+)\\.json$", "/users/{id}.json"),
            ("/v[0-9]+/u/([^/]+)(/|$)(.*)", "/v{id}/u/{id2}/{*rest}"),
            ("~ ^/u/[a-z]{2,5}/", "/u/{id}/{*rest}"),
            ("/(.+)\\.php$", "/{*rest}"),
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
        for (text, literal, segment) in
            [("/a$", "/a%24", "a$"), ("/a^b", "/a%5Eb", "a%5Eb"), ("/a|b", "/a%7Cb", "a%7Cb")]
        {
            let (_, fix) = read(text).unwrap_err();
            assert!(fix.ends_with(&format!("is literal, write `path = \"{literal}\"`")), "{fix}");
            assert_eq!(read(literal), Ok(vec![Segment::Literal(segment.to_owned())]));
        }
        assert!(!read("/api.*").unwrap_err().1.contains("is literal, write"), "an expression is not literal");
        assert_eq!(read("/%2A.css"), Ok(vec![Segment::Literal(String::from("*.css"))]));
        assert_eq!(read("/%3Aid"), Ok(vec![Segment::Literal(String::from(":id"))]));
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
