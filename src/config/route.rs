//! Routes: what they match, what they change in requests and responses (path, header fields, limits), and what they
//! respond with themselves. Also how request paths are normalized.
//!
//! Plain data, already checked: all variables of templates exist, and no text can inject a line into a message head.

use super::limits::Timeouts;
use super::settings::Choice;

/// One entry of `[[routes]]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Route {
    /// Unique; used as a metrics label.
    pub name: String,
    /// Lower-case host names without port; `*.example.com` for all names below one; empty: any.
    pub hosts: Vec<String>,
    /// Upper-case; empty: any.
    pub methods: Vec<String>,
    /// Required request fields, by lower-case name, with their value; `None`: any value.
    pub headers: Vec<(String, Option<String>)>,
    pub path: PathPattern,
    /// `Some(true)`: only requests that came by https; `Some(false)`: only others; `None`: both.
    pub secure: Option<bool>,
    /// Changes to requests and responses, if any.
    pub actions: Option<Box<Actions>>,
    /// Position in [`super::Config::upstreams`]; meaningless if `actions` have a response.
    pub upstream: usize,
    /// Whether WebSocket upgrades are allowed.
    pub websocket: bool,
    /// Positions in [`super::Config::rules`].
    pub rules: Vec<usize>,
    /// Replaces the cost of rules with a fixed cost.
    pub cost: Option<u32>,
}

/// A path pattern, segment by segment.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PathPattern {
    /// As configured.
    pub text: String,
    pub segments: Vec<Segment>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Segment {
    Literal(String),
    /// `{name}`: one segment that is not empty.
    Param(String),
    /// `{*name}`: the rest of the path, possibly empty; always last.
    Rest(String),
}

impl PathPattern {
    /// The names of the parameters, in order.
    pub fn param_names(&self) -> Vec<&str> {
        let names = self.segments.iter().filter_map(|segment| match segment {
            Segment::Param(name) | Segment::Rest(name) => Some(name.as_str()),
            Segment::Literal(_) => None,
        });
        names.collect()
    }
}

settings! {
    /// How request paths are normalized, for routes and rules alike. [`ForwardPath`] decides what is forwarded.
    pub struct PathReading {
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

impl Copy for PathReading {}

impl PathReading {
    /// Keeps parameters and a trailing slash, as paths for the upstream need it.
    pub fn verbatim(encoded_slash: EncodedSlash) -> PathReading {
        PathReading { encoded_slash, path_parameters: PathParameters::Keep, trailing_slash: TrailingSlash::Keep }
    }
}

/// The meaning of `;` in a path segment and of the text behind it (RFC 3986, section 3.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathParameters {
    /// They are ordinary bytes of the segment.
    Keep,
    /// The segment ends before them.
    Strip,
    /// The response is 400.
    Refuse,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrailingSlash {
    /// Paths with and without a trailing slash differ.
    Keep,
    /// A trailing slash is removed.
    Ignore,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EncodedSlash {
    /// The response to `%2F` or `%5C` in a path is 400, because servers interpret them differently.
    Refuse,
    /// They are ordinary bytes of a segment.
    Keep,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardPath {
    /// The bytes that the client sent.
    Original,
    /// The normalized path that was matched.
    Normalized,
}

/// Whether a byte may stand unescaped in a path segment: `pchar` of RFC 3986, section 3.3, without percent-encodings.
/// Patterns and normalized paths leave exactly these bytes unescaped.
pub fn is_pchar(byte: u8) -> bool {
    PCHAR[usize::from(byte)]
}

const PCHAR: [bool; 256] = byte_set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@");

/// A lookup table of the given bytes.
pub const fn byte_set(bytes: &[u8]) -> [bool; 256] {
    let mut set = [false; 256];
    let mut i = 0;
    while i < bytes.len() {
        set[bytes[i] as usize] = true;
        i += 1;
    }
    set
}

/// Why a normalized segment is ambiguous, if it is: some servers interpret it differently.
/// - `..;x` as `..`: servers that remove path parameters before they resolve dot segments;
/// - `login%0A` as `login`: `$` in a regular expression matches before a line end. Other control characters end
///   strings or are dropped;
/// - `%C0%AF`, which is not UTF-8, as `/`: decoders that accept overlong encodings.
pub fn find_ambiguity(segment: &str) -> Option<&'static str> {
    let dots = segment.split(';').next().unwrap_or_default();
    if (dots == "." || dots == "..") && dots != segment {
        return Some("the path has dots before a semicolon");
    }
    let mut before = 0;
    for code in segment.split('%').skip(1) {
        let digits = code.get(..2).unwrap_or_default();
        let byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        if byte.is_ascii_control() {
            return Some("the path contains an encoded control character");
        }
        if let (0xC0 | 0xC1, 0x80..=0xBF) | (0xE0, 0x80..=0x9F) | (0xF0, 0x80..=0x8F) = (before, byte) {
            return Some("the path contains an overlong encoding of a character");
        }
        // Only adjacent codes form one character.
        before = if code.len() == 2 { byte } else { 0 };
    }
    None
}

/// Changes that a route makes to requests and responses.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Actions {
    /// Sent by the gateway instead of forwarding the request.
    pub response: Option<LocalResponse>,
    pub path: Option<PathChange>,
    pub request_fields: FieldChanges,
    pub response_fields: FieldChanges,
    /// Replaces [`super::Config::timeouts`].
    pub timeouts: Option<Timeouts>,
    /// Replaces [`super::limits::Limits::max_body`]; `Some(None)`: no limit.
    pub max_body: Option<Option<u64>>,
    /// Replaces [`super::limits::Limits::min_request_rate`].
    pub min_request_rate: Option<u64>,
}

/// A response by the gateway itself.
#[derive(Clone, PartialEq, Debug)]
pub enum LocalResponse {
    Redirect { to: Template, status: u16 },
    Respond { status: u16, body: Option<Body> },
}

/// A body and its media type, which is valid as a field value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    pub text: String,
    pub content_type: String,
}

/// The path to forward instead of the matched one.
#[derive(Clone, PartialEq, Debug)]
pub enum PathChange {
    /// Replaces `from`, with which all paths of the route begin, with `to`.
    Prefix { from: String, to: String },
    /// Built from the route's parameters.
    Rewrite(PathPattern),
}

/// Changes to header fields, applied in this order: remove, set, add.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FieldChanges {
    pub remove: Vec<String>,
    /// Replaces all fields of the name.
    pub set: Vec<(String, Template)>,
    /// Keeps other fields of the name.
    pub add: Vec<(String, Template)>,
}

impl FieldChanges {
    pub fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.set.is_empty() && self.add.is_empty()
    }
}

/// A text with variables.
#[derive(Clone, PartialEq, Debug)]
pub struct Template(pub Vec<TemplatePart>);

#[derive(Clone, PartialEq, Debug)]
pub enum TemplatePart {
    Literal(String),
    Variable(Variable),
}

#[derive(Clone, PartialEq, Debug)]
pub enum Variable {
    /// The client's IP address.
    ClientIp,
    /// `http` or `https`.
    Scheme,
    /// Lower case, without port.
    Host,
    Method,
    /// Normalized.
    Path,
    /// As received, without the question mark; empty if there is none.
    Query,
    /// The path, with `?` and the query if there is one.
    Uri,
    /// The name of the route.
    Route,
    /// The route's parameter at this position.
    Param(usize),
}
