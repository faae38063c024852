//! The actions of a route: changes of path and header fields, redirects, fixed responses, and limits of its own.
//!
//! All actions are checked here, so that they cannot fail for a request: a prefix that the path of the route does not
//! have, an unknown variable, or a header field that only the gateway may set is a problem.

use toml::de::DeValue;

use super::body_condition::BODY_KEY_LIMIT;
use super::diagnostics::{Report, quoted, quoted_list};
use super::limits::{MAX_BODY, MIN_RATE, RouteTimeouts, Timeouts};
use super::path::{PathPattern, PatternKind};
use super::response_body::{self, BODY, Body, CONTENT_TYPE};
use super::settings::{Boolean, Choice, Custom, Inline, Integer, Kind, Optional, Required, Shape, Text};
use super::template::{Template, TemplatePart, Variable};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table, nearest};
use super::values;
use transom_http::path_normalize::{EncodedSlash, PathReading};

/// Fields of one connection or one hop, which are never forwarded.
pub const CONNECTION_FIELDS: [&str; 7] =
    ["connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"];
/// Other fields that only the gateway may set, because they frame a message.
const GATEWAY_FIELDS: [&str; 3] = ["content-length", "host", "upgrade"];

const FIELDS_FIX: &str = "write, for example, `[routes.request_headers]`, then `set = { x-name = \"value\" }`";
const PATH_ACTIONS: [&str; 3] = ["strip_prefix", "replace_prefix", "rewrite"];
const RESPONSES: [&str; 2] = ["redirect", "respond"];
const PREFIX: Text = Text("path prefix", "\"/api\"");

settings! {
    /// Actions of a route, as written in the file.
    pub struct ActionSettings checked by check_actions {
        /// Remove this prefix from the path sent upstream. All paths of the route must begin with it.
        strip_prefix: Option<SpannedString> = PREFIX;
        /// Replace a prefix: `{ from = "/v1", to = "/v2" }`.
        replace_prefix: Option<PrefixSettings> =
            Optional(Inline::<PrefixSettings>::or("write `{ from = \"/api\", to = \"/v2\" }`"));
        /// A path from the route's parameters, such as `"/v2/users/{id}/{*rest}"`.
        rewrite: Option<SpannedString> = Text("path", "\"/v2/{id}\"");
        /// Replaces, in responses, what names the servers: their host in `Location`, `Content-Location` and `Refresh`, their host
        /// as the `Domain` of cookies, and paths as the server sees them in all of these and as the `Path` of cookies. See
        /// [Locations](#locations).
        rewrite_location: bool = Boolean(false);
        /// Changes to the fields of the request, see below.
        request_headers: FieldSettings = Inline::<FieldSettings>::or(FIELDS_FIX);
        /// Changes to the fields of the response, see below.
        response_headers: ResponseFieldSettings = Inline::<ResponseFieldSettings>::or(FIELDS_FIX);
        /// Redirect instead of forwarding: `{ to = "https://{host}{uri}", status = 308 }`; 301, 302, 303, 307 or 308.
        redirect: Option<RedirectSettings> =
            Optional(Inline::<RedirectSettings>::or("write `redirect = { to = \"https://{host}{uri}\", status = 308 }`"));
        /// Fixed response instead of forwarding: `{ status = 200, body = "fine\n", content_type = "text/plain;
        /// charset=utf-8" }`; status 200 to 599, body up to 64 KiB.
        respond: Option<RespondSettings> =
            Optional(Inline::<RespondSettings>::or("write `respond = { status = 200, body = \"fine\\n\" }`"));
        /// `connect`, `response_head`, `body` and `request` for this route, as in [`[timeouts]`](#timeouts).
        timeouts: Option<RouteTimeouts> =
            Optional(Inline::<RouteTimeouts>::or("write `timeouts = { response_head = \"5s\" }`"));
        /// As in [`[limits]`](#limits), for this route; `"unlimited"` switches the limit off.
        max_body: Option<Option<u64>> = Optional(MAX_BODY);
        /// As at the [top level](#top-level), for this route.
        body_key_limit: Option<usize> = Optional(BODY_KEY_LIMIT);
        /// Adds `stream_options.include_usage` to streaming requests of OpenAI that lack it, to paths that end with `/completions`, so
        /// that the stream states its usage. The chunk that states it is hidden from clients that did not ask. A body that is changed is sent
        /// in UTF-8 without its Content-Encoding; 400 for one that some servers read as a request for a stream and others do not. The
        /// [body](#values-of-the-body) is read before the decision.
        set_include_usage: bool = Boolean(false);
        /// As in [`[limits]`](#limits), for this route; `0` switches the limit off.
        min_request_rate: Option<u64> = Optional(MIN_RATE);
    }
}

settings! {
    /// A replacement of a prefix.
    pub struct PrefixSettings {
        /// Prefix that all paths of the route begin with.
        from: Option<SpannedString> = Required(PREFIX, "write `from = \"/api\"`: the prefix of the path");
        /// New prefix.
        to: Option<SpannedString> = Required(PREFIX, "write `to = \"/v2\"`: the new prefix");
    }
}

settings! {
    /// Changes to header fields.
    pub struct FieldSettings checked by check_request_fields {
        /// Replaces all fields of the name.
        set: Vec<(String, SpannedString)> = field_texts();
        /// Keeps other fields of the name.
        add: Vec<(String, SpannedString)> = field_texts();
        /// Removes all fields of the name.
        remove: Vec<String> = field_names();
    }
}

settings! {
    /// Changes to the header fields of responses.
    pub struct ResponseFieldSettings checked by check_response_fields {
        /// Replaces all fields of the name.
        set: Vec<(String, SpannedString)> = field_texts();
        /// Keeps other fields of the name.
        add: Vec<(String, SpannedString)> = field_texts();
        /// Removes all fields of the name.
        remove: Vec<String> = field_names();
        /// `"all"`: also changes refusals and errors, which the gateway makes itself.
        on: ChangedResponses =
            Choice(ChangedResponses::Upstream, &[("upstream", ChangedResponses::Upstream), ("all", ChangedResponses::All)]);
    }
}

fn field_names() -> Custom<Vec<String>> {
    Custom::or_empty(
        || Shape::one_or_list("name of a field"),
        |item, report| {
            let words = item.strings("[\"x-name\"]", report)?;
            Some(words.iter().filter_map(|word| read_field_name(word, report)).collect())
        },
    )
}

fn field_texts() -> Custom<Vec<(String, SpannedString)>> {
    Custom::or_empty(
        || Shape::described("table of field = text", Shape::map_of(Shape::Text("text"))),
        |item, report| {
            let fix = format!("write `{} = {{ x-name = \"value\" }}`", item.key);
            let table = item.table(format!("`{}`", item.key), &fix, report)?;
            let read = |entry: &Item| {
                let name = read_field_name(&SpannedStr { text: entry.key, span: entry.key_span.clone() }, report);
                name.zip(Text("text", "\"value\"").read(entry, report).flatten())
            };
            Some(table.items().iter().filter_map(read).collect())
        },
    )
}

settings! {
    /// A redirect.
    pub struct RedirectSettings {
        /// Target.
        to: Option<SpannedString> =
            Required(Text("URL or path with variables", "\"https://{host}{uri}\""), "write `to = \"https://{host}{uri}\"`");
        /// Status code.
        status: u16 = Custom {
            default: 308,
            default_text: Some("308"),
            shape: || Shape::described("301, 302, 303, 307, 308", Shape::Integer(301..=308)),
            read: |item, report| {
                let status = item.integer(100..=599, report)?;
                if ![301, 302, 303, 307, 308].contains(&status) {
                    let message = format!("`{status}` is not a redirect status");
                    report.problem(item.span.clone(), message, "write `301`, `302`, `303`, `307` or `308`");
                }
                u16::try_from(status).ok()
            },
        };
    }
}

settings! {
    /// A fixed response.
    pub struct RespondSettings checked by check_respond {
        /// Status code.
        status: u16 = Integer(200, 200..=599);
        /// Text.
        body: Option<String> = BODY;
        /// Media type of the body.
        content_type: Option<String> = CONTENT_TYPE;
    }
}

/// Changes that a route makes to requests and responses.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Actions {
    /// Sent by the gateway instead of forwarding the request.
    pub response: Option<LocalResponse>,
    pub path: Option<PathChange>,
    /// Replaces names and paths of the servers in responses.
    pub rewrite_location: bool,
    pub request_fields: FieldChanges,
    pub response_fields: FieldChanges,
    pub changed_responses: ChangedResponses,
    /// Replaces [`super::Config::timeouts`].
    pub timeouts: Option<Timeouts>,
    /// Replaces [`super::limits::Limits::max_body`]; `Some(None)`: no limit.
    pub max_body: Option<Option<u64>>,
    /// Replaces [`super::General::body_key_limit`].
    pub body_key_limit: Option<usize>,
    /// Asks for the usage of streams.
    pub set_include_usage: bool,
    /// Replaces [`super::limits::Limits::min_request_rate`].
    pub min_request_rate: Option<u64>,
}

impl Actions {
    /// Whether a text tells whose request it is.
    pub fn name_client(&self) -> bool {
        self.texts().any(|(_, text)| text.names_client())
    }

    /// The texts with variables, each with its field, or with `to` of a redirect.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &Template)> {
        let target = match &self.response {
            Some(LocalResponse::Redirect { to, .. }) => Some(("to", to)),
            Some(LocalResponse::Respond { .. } | LocalResponse::AcmeChallenge) | None => None,
        };
        let fields = [&self.request_fields, &self.response_fields].into_iter();
        let fields = fields.flat_map(|fields| fields.set.iter().chain(&fields.add));
        fields.map(|(name, text)| (name.as_str(), text)).chain(target)
    }
}

/// The responses of a route whose fields change.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum ChangedResponses {
    /// Those of the upstream, or of the route's redirect or fixed response.
    #[default]
    Upstream,
    /// Refusals and errors too.
    All,
}

/// A response by the gateway itself.
#[derive(Clone, PartialEq, Debug)]
pub enum LocalResponse {
    Redirect {
        to: Template,
        status: u16,
    },
    Respond {
        status: u16,
        body: Option<Body>,
    },
    /// The key authorization of an ACME challenge, see [`super::acme::add_challenge_route`].
    AcmeChallenge,
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

/// Whether a route has a `redirect` or `respond`, and so needs no upstream.
pub fn responds_directly(route: &Table) -> bool {
    RESPONSES.iter().any(|key| route.given(key).is_some())
}

/// Reports settings that exclude each other.
fn check_actions(_settings: &mut ActionSettings, table: &Table, report: &mut Report) {
    let given = |keys: &[&str]| keys.iter().filter_map(|key| table.given(key)).collect::<Vec<Item>>();
    for (what, keys) in [("change the path", &PATH_ACTIONS[..]), ("generate a response", &RESPONSES[..])] {
        let items = given(keys);
        if let [_, second, ..] = items.as_slice() {
            let keys = quoted_list(items.iter().map(|item| item.key), "and");
            let message = format!("{keys} {what}, and only one of them can");
            report.missing(second.key_span.clone(), message, "keep one of them");
        }
    }
    let Some(response) = given(&RESPONSES).into_iter().next() else { return };
    for item in [
        given(&PATH_ACTIONS),
        given(&["rewrite_location", "request_headers", "timeouts", "min_request_rate", "set_include_usage"]),
    ]
    .concat()
    {
        let message =
            format!("`{}` has no effect with `{}`, which forwards nothing to an upstream", item.key, response.key);
        report.missing(item.key_span, message, "remove one of the two");
    }
}

fn check_request_fields(_settings: &mut FieldSettings, table: &mut Table, report: &mut Report) {
    suggest_set(table, report);
}

/// The fixes for fields that stand beside `set` instead of in it.
fn suggest_set(table: &mut Table, report: &Report) {
    for item in table.items() {
        let is_name = |key: &str| key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let is_misspelled = nearest(item.key, ["set", "add", "remove", "on"]).is_some();
        if let (DeValue::String(_), true) = (item.value, is_name(item.key) && !is_misspelled) {
            let fix = format!("write `set = {{ {} = {} }}`", item.key, report.source(item.span.clone()));
            table.suggest_for(item.key, "set", fix);
        }
    }
}

fn check_response_fields(_settings: &mut ResponseFieldSettings, table: &mut Table, report: &mut Report) {
    for item in table.items() {
        if let (Some(word @ ("all" | "upstream")), false) = (item.value.as_str(), item.key.contains('-')) {
            table.suggest_for(item.key, "on", format!("write `on = \"{word}\"`"));
        }
    }
    suggest_set(table, report);
    let changes_none = ["set", "add", "remove"].iter().all(|key| table.lacks(key));
    if let (Some(item), true) = (table.given("on"), changes_none) {
        let message = "`on` has no effect without `set`, `add` or `remove`";
        report.missing(
            item.key_span,
            message,
            "add one of them, such as `set = { x-name = \"value\" }`, or remove `on`",
        );
    }
}

fn check_respond(settings: &mut RespondSettings, table: &Table, report: &mut Report) {
    if let (204 | 304, Some(body)) = (settings.status, table.given("body")) {
        let message = format!("a response with status `{}` has no body", settings.status);
        report.problem(body.key_span, message, "remove `body`, or write another status");
    }
    response_body::check_content_type(table, "the response", report);
}

/// The route that actions belong to.
pub struct ActionContext<'r> {
    /// `None` if the path is invalid.
    pub path: Option<&'r PathPattern>,
    pub encoded_slash: EncodedSlash,
    /// The timeouts for all routes.
    pub timeouts: &'r Timeouts,
}

impl ActionSettings {
    /// The actions, if there are any.
    pub fn resolve(self, context: &ActionContext, report: &mut Report) -> Option<Box<Actions>> {
        let actions = Actions {
            path: self.path_change(context, report),
            rewrite_location: self.rewrite_location,
            response: match (self.redirect, self.respond) {
                (Some(redirect), _) => redirect.resolve(context.path, report),
                (None, Some(RespondSettings { status, body, content_type })) => {
                    Some(LocalResponse::Respond { status, body: Body::new(body, content_type) })
                }
                (None, None) => None,
            },
            request_fields: self.request_headers.resolve(context.path, report),
            changed_responses: self.response_headers.on,
            response_fields: self.response_headers.resolve(context.path, report),
            timeouts: self.timeouts.map(|own| own.over(context.timeouts)),
            max_body: self.max_body,
            body_key_limit: self.body_key_limit,
            set_include_usage: self.set_include_usage,
            min_request_rate: self.min_request_rate,
        };
        (actions != Actions::default()).then(|| Box::new(actions))
    }

    fn path_change(&self, context: &ActionContext, report: &mut Report) -> Option<PathChange> {
        if let Some(prefix) = &self.strip_prefix {
            let from = read_matched_prefix(prefix, context, report)?;
            return Some(PathChange::Prefix { from, to: String::new() });
        }
        if let Some(PrefixSettings { from, to }) = &self.replace_prefix {
            let from = from.as_ref().and_then(|prefix| read_matched_prefix(prefix, context, report));
            let kind = PatternKind::Rewrite(None);
            let to = to.as_ref().and_then(|prefix| read_prefix(prefix, kind, context.encoded_slash, report));
            return Some(PathChange::Prefix { from: from?, to: to? });
        }
        let written = self.rewrite.as_ref()?;
        let kind = PatternKind::Rewrite(context.path);
        let rewrite = PathPattern::read(written, kind, PathReading::verbatim(context.encoded_slash), report)?;
        let path = context.path?;
        if let Some(name) = rewrite.param_missing_in(path) {
            let message = format!(
                "{} uses the parameter `{name}`, which the path of this route does not have",
                quoted(&written.text)
            );
            let fix = format!("use the parameters of the path {}", quoted(&path.text));
            report.problem(written.span.clone(), message, fix);
        }
        Some(PathChange::Rewrite(rewrite))
    }
}

/// Reads a path prefix, without a slash at its end; `/` becomes the empty string.
fn read_prefix(
    written: &SpannedString,
    kind: PatternKind,
    slashes: EncodedSlash,
    report: &mut Report,
) -> Option<String> {
    let pattern = PathPattern::read(written, kind, PathReading::verbatim(slashes), report)?;
    if !pattern.param_names().is_empty() {
        let message = format!("{} has a parameter, which a prefix cannot have", quoted(&written.text));
        return report.reject(written.span.clone(), message, "write a prefix without parameters, or use `rewrite`");
    }
    let prefix = pattern.literal_prefix();
    Some(prefix.strip_suffix('/').map(str::to_owned).unwrap_or(prefix))
}

/// Reads a prefix, which all paths of the route must have.
fn read_matched_prefix(written: &SpannedString, context: &ActionContext, report: &mut Report) -> Option<String> {
    let prefix = read_prefix(written, PatternKind::Prefix, context.encoded_slash, report)?;
    let path = context.path?;
    let own = path.literal_prefix();
    if !own.strip_prefix(&prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        let fix = match own.trim_end_matches('/') {
            "" => String::from("write the path with its prefix, such as `/api/{*rest}`"),
            own => format!("its paths begin with {}", quoted(own)),
        };
        let message = format!("no path of this route begins with {}", quoted(&written.text));
        report.problem(written.span.clone(), message, fix);
    }
    Some(prefix)
}

impl RedirectSettings {
    fn resolve(self, path: Option<&PathPattern>, report: &mut Report) -> Option<LocalResponse> {
        let written = self.to?;
        if written.text.split('$').skip(1).any(|behind| behind.starts_with(|c: char| c.is_ascii_digit())) {
            let message =
                format!("{} has a group of a regular expression, which has no meaning here", quoted(&written.text));
            let fix = "name a parameter of the path: `{param.NAME}`";
            return report.reject(written.span, message, fix);
        }
        let to = Template::read(&written, path, report)?;
        if !is_safe_location(&to) {
            let fix =
                "begin with `https://`, `http://`, `{scheme}://`, one `/`, `{path}` or `{uri}`, and write no spaces";
            report.problem(written.span, format!("{} is not a redirect target", quoted(&written.text)), fix);
        }
        Some(LocalResponse::Redirect { to, status: self.status })
    }
}

/// Whether a template is an absolute URL, or a path on the same host. The host must be fixed or the host of the
/// request: other variables would let a client choose the target (open redirect).
fn is_safe_location(Template(parts): &Template) -> bool {
    // Stand for text of the client: any text, and text without a slash. Literals contain no control characters.
    const ANY: char = '\u{1}';
    const SEGMENT: char = '\u{2}';
    // Host and port, beside which nothing else belongs.
    const AUTHORITY: char = '\u{3}';
    let mut example = String::new();
    for part in parts {
        match part {
            TemplatePart::Literal(text) if text.bytes().all(|byte| byte.is_ascii_graphic()) => example += text,
            TemplatePart::Literal(_) => return false,
            TemplatePart::Variable(Variable::Scheme) => example += "https",
            TemplatePart::Variable(Variable::Host) => example += "host",
            TemplatePart::Variable(Variable::Authority) => example.push(AUTHORITY),
            // A path has no second slash behind the first.
            TemplatePart::Variable(Variable::Path | Variable::Uri) if example.is_empty() => {
                example.extend(['/', SEGMENT])
            }
            TemplatePart::Variable(Variable::Path | Variable::Uri) => example.extend(['/', ANY]),
            TemplatePart::Variable(Variable::Param(_)) => example.push(SEGMENT),
            TemplatePart::Variable(_) => example.push(ANY),
        }
    }
    match example.strip_prefix("https://").or_else(|| example.strip_prefix("http://")) {
        Some(rest) => {
            let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
            authority.chars().eq([AUTHORITY]) || !authority.is_empty() && !authority.contains([ANY, SEGMENT, AUTHORITY])
        }
        // A second slash would start a host.
        None => example.strip_prefix('/').is_some_and(|rest| !rest.starts_with(['/', ANY])),
    }
}

impl FieldSettings {
    fn resolve(self, path: Option<&PathPattern>, report: &mut Report) -> FieldChanges {
        let mut resolve = |texts: Vec<(String, SpannedString)>| {
            let mut templates: Vec<(String, Template)> = Vec::new();
            for (name, written) in texts {
                let Some(template) = Template::read(&written, path, report) else { continue };
                if templates.iter().any(|(other, _)| *other == name) {
                    let key = quoted(&written.key);
                    let message = format!("{key} is listed twice: field names are not case-sensitive");
                    report.problem(written.key_span, message, "remove one of the two");
                }
                templates.push((name, template));
            }
            templates
        };
        FieldChanges { set: resolve(self.set), add: resolve(self.add), remove: self.remove }
    }
}

impl ResponseFieldSettings {
    fn resolve(self, path: Option<&PathPattern>, report: &mut Report) -> FieldChanges {
        FieldSettings { set: self.set, add: self.add, remove: self.remove }.resolve(path, report)
    }
}

/// Reads the name of a field that a route may change.
fn read_field_name(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let name = values::read_field_name(word, report)?;
    if CONNECTION_FIELDS.contains(&name.as_str()) || GATEWAY_FIELDS.contains(&name.as_str()) {
        let message = format!("a route cannot change {}", quoted(word.text));
        let fix = "remove it: the gateway sets this field for the connection or the length of the message";
        return report.reject(word.span.clone(), message, fix);
    }
    Some(name)
}
