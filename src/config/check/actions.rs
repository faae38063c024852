//! The actions of a route: changes of path and header fields, redirects, fixed responses, and limits of its own.
//!
//! All actions are checked here, so that they cannot fail for a request: a prefix that the path of the route does not
//! have, an unknown variable, or a header field that only the gateway may set is a problem.

use toml::de::DeValue;

use super::path;
use super::template::read_template;
use super::values::{FIELD_NAME_FIX, parse_field_name, read_body};
use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::limits::{MAX_BODY, MIN_RATE, RouteTimeouts, Timeouts};
use crate::config::route::{
    Actions, EncodedSlash, FieldChanges, LocalResponse, PathChange, PathPattern, PathReading, Segment, Template,
    TemplatePart, Variable,
};
use crate::config::settings::{Kind, Section};
use crate::config::toml_reader::{Item, SpannedStr, Table};

/// Fields that frame a message or belong to one connection, so that only the gateway may set them.
const GATEWAY_FIELDS: [&str; 10] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

const REDIRECT: &str = "{ to = \"https://{host}{uri}\", status = 308 }";
const RESPOND: &str = "{ status = 200, body = \"fine\\n\" }";
const FIELDS_FIX: &str = "write, for example, `[routes.request_headers]`, then `set = { x-name = \"value\" }`";

/// The settings of a route for its actions.
pub struct ActionSettings<'d> {
    strip_prefix: Option<Item<'d>>,
    replace_prefix: Option<Item<'d>>,
    rewrite: Option<Item<'d>>,
    request_headers: Option<Item<'d>>,
    response_headers: Option<Item<'d>>,
    redirect: Option<Item<'d>>,
    respond: Option<Item<'d>>,
    timeouts: Option<Item<'d>>,
    max_body: Option<Item<'d>>,
    min_request_rate: Option<Item<'d>>,
}

impl<'d> ActionSettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> ActionSettings<'d> {
        ActionSettings {
            strip_prefix: table.get("strip_prefix"),
            replace_prefix: table.get("replace_prefix"),
            rewrite: table.get("rewrite"),
            request_headers: table.get("request_headers"),
            response_headers: table.get("response_headers"),
            redirect: table.get("redirect"),
            respond: table.get("respond"),
            timeouts: table.get("timeouts"),
            max_body: table.get("max_body"),
            min_request_rate: table.get("min_request_rate"),
        }
    }

    /// Whether the route has a `redirect` or `respond`, and so needs no upstream.
    pub fn responds_directly(&self) -> bool {
        self.redirect.is_some() || self.respond.is_some()
    }

    /// `path` is the path of the route, unless it is invalid. `timeouts` are the defaults for all routes.
    pub fn read(
        self,
        path: Option<&PathPattern>,
        slashes: EncodedSlash,
        timeouts: &Timeouts,
        report: &mut Report,
    ) -> Option<Box<Actions>> {
        self.report_contradictions(report);
        let actions = Actions {
            path: self.read_path_change(path, slashes, report),
            response: read_direct_response(self.redirect, self.respond, path, report),
            request_fields: self
                .request_headers
                .map(|item| read_field_changes(&item, path, report))
                .unwrap_or_default(),
            response_fields: self
                .response_headers
                .map(|item| read_field_changes(&item, path, report))
                .unwrap_or_default(),
            timeouts: self.timeouts.and_then(|item| read_route_timeouts(&item, timeouts, report)),
            max_body: self.max_body.and_then(|item| MAX_BODY.read(&item, report)),
            min_request_rate: self.min_request_rate.and_then(|item| MIN_RATE.read(&item, report)),
        };
        (actions != Actions::default()).then(|| Box::new(actions))
    }

    /// Reports settings that exclude each other.
    fn report_contradictions(&self, report: &mut Report) {
        let paths = [&self.strip_prefix, &self.replace_prefix, &self.rewrite];
        let responses = [&self.redirect, &self.respond];
        for (what, items) in [("change the path", &paths[..]), ("generate a response", &responses[..])] {
            let given: Vec<&Item> = items.iter().filter_map(|item| item.as_ref()).collect();
            if let [_, second, ..] = given.as_slice() {
                let message = format!(
                    "{} {what}, and only one of them can",
                    quoted_list(given.iter().map(|item| item.key), "and")
                );
                report.missing(second.key_span.clone(), message, "keep one of them");
            }
        }
        if let Some(response) = responses.iter().find_map(|item| item.as_ref()) {
            let unused = [&paths[..], &[&self.request_headers, &self.timeouts, &self.min_request_rate]].concat();
            for item in unused.into_iter().flatten() {
                let message = format!(
                    "`{}` has no effect with `{}`, which forwards nothing to an upstream",
                    item.key, response.key
                );
                report.missing(item.key_span.clone(), message, "remove one of the two");
            }
        }
    }

    fn read_path_change(
        &self,
        path: Option<&PathPattern>,
        slashes: EncodedSlash,
        report: &mut Report,
    ) -> Option<PathChange> {
        if let Some(item) = &self.strip_prefix {
            let from = read_matched_prefix(item, path, slashes, report)?;
            return Some(PathChange::Prefix { from, to: String::new() });
        }
        if let Some(item) = &self.replace_prefix {
            let mut table = item.table("`replace_prefix`", "write `{ from = \"/api\", to = \"/v2\" }`", report)?;
            let from = table.require("from", "write `from = \"/api\"`: the prefix of the path");
            let to = table.require("to", "write `to = \"/v2\"`: the new prefix");
            table.finish(report);
            let from = from.and_then(|item| read_matched_prefix(&item, path, slashes, report));
            let to = to.and_then(|item| read_prefix(&item, slashes, report));
            return Some(PathChange::Prefix { from: from?, to: to? });
        }
        let item = self.rewrite.as_ref()?;
        let word = item.string("\"/v2/{id}\"", report)?;
        let rewrite = path::read_path(&word, PathReading::verbatim(slashes), report)?;
        let lacking = rewrite.segments.iter().find(|segment| match segment {
            Segment::Literal(_) => false,
            segment => path.is_some_and(|path| !path.segments.contains(segment)),
        });
        if let Some(Segment::Param(name) | Segment::Rest(name)) = lacking {
            let message = format!(
                "{} uses the parameter `{name}`, which the path of this route does not have",
                quoted(word.text)
            );
            let fix = format!("use the parameters of the path {}", quoted(path.map_or("", |path| path.text.as_str())));
            report.problem(word.span, message, fix);
            return None;
        }
        Some(PathChange::Rewrite(rewrite))
    }
}

/// Reads a path prefix, without a slash at its end; `/` becomes the empty string.
fn read_prefix(item: &Item, slashes: EncodedSlash, report: &mut Report) -> Option<String> {
    let word = item.string("\"/api\"", report)?;
    let pattern = path::read_path(&word, PathReading::verbatim(slashes), report)?;
    if pattern.segments.iter().any(|segment| !matches!(segment, Segment::Literal(_))) {
        let message = format!("{} has a parameter, which a prefix cannot have", quoted(word.text));
        report.problem(word.span, message, "write a prefix without parameters, or use `rewrite`");
        return None;
    }
    Some(pattern.text.strip_suffix('/').unwrap_or(&pattern.text).to_owned())
}

/// Reads a prefix, which all paths of the route must have.
fn read_matched_prefix(
    item: &Item,
    path: Option<&PathPattern>,
    slashes: EncodedSlash,
    report: &mut Report,
) -> Option<String> {
    let prefix = read_prefix(item, slashes, report)?;
    let literals = |path: &PathPattern| {
        let literals = path.segments.iter().map_while(|segment| match segment {
            Segment::Literal(text) => Some(format!("/{text}")),
            Segment::Param(_) | Segment::Rest(_) => None,
        });
        literals.collect::<String>()
    };
    let begins = |path: &PathPattern| {
        let rest = literals(path).strip_prefix(&prefix).map(str::to_owned);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if let Some(path) = path.filter(|path| !begins(path)) {
        let message = format!("no path of this route begins with {}", quoted(&prefix));
        let own = literals(path);
        let fix = match own.trim_end_matches('/') {
            "" => String::from("write the path with its prefix, such as `/api/{*rest}`"),
            own => format!("its paths begin with {}", quoted(own)),
        };
        report.problem(item.span.clone(), message, fix);
        return None;
    }
    Some(prefix)
}

fn read_direct_response(
    redirect: Option<Item>,
    respond: Option<Item>,
    path: Option<&PathPattern>,
    report: &mut Report,
) -> Option<LocalResponse> {
    let redirect = redirect.and_then(|item| self::read_redirect(&item, path, report));
    let respond = respond.and_then(|item| self::read_respond(&item, report));
    redirect.or(respond)
}

fn read_redirect(item: &Item, path: Option<&PathPattern>, report: &mut Report) -> Option<LocalResponse> {
    let mut table = item.table("`redirect`", &format!("write `redirect = {REDIRECT}`"), report)?;
    let to = table.require("to", "write `to = \"https://{host}{uri}\"`");
    let status = table.get("status");
    table.finish(report);
    let statuses = [301, 302, 303, 307, 308];
    let status = status.map_or(Some(308), |item| {
        let status = item.integer(100..=599, report)?;
        if !statuses.contains(&status) {
            let message = format!("`{status}` is not a redirect status");
            report.problem(item.span, message, "write `301`, `302`, `303`, `307` or `308`");
            return None;
        }
        u16::try_from(status).ok()
    });
    let word = to?.string("\"https://{host}{uri}\"", report)?;
    let to = read_template(&word, path, report)?;
    if !is_safe_location(&to) {
        let fix = "begin with `https://`, `http://`, `{scheme}://`, one `/`, `{path}` or `{uri}`, and write no spaces";
        report.problem(word.span, format!("{} is not a redirect target", quoted(word.text)), fix);
        return None;
    }
    Some(LocalResponse::Redirect { to, status: status? })
}

/// Whether a template is an absolute URL, or a path on the same host. The host must be fixed or the host of the
/// request: other variables would let a client choose the target (open redirect).
fn is_safe_location(Template(pieces): &Template) -> bool {
    let is_valid = |piece: &TemplatePart| match piece {
        TemplatePart::Literal(text) => text.bytes().all(|byte| byte.is_ascii_graphic()),
        TemplatePart::Variable(_) => true,
    };
    let begins = match pieces.as_slice() {
        [TemplatePart::Literal(text), rest @ ..] => {
            match text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")) {
                Some(host) => is_safe_authority(host, rest),
                // A second slash would start a host.
                None if text == "/" => matches!(rest, [] | [TemplatePart::Variable(Variable::Param(_)), ..]),
                None => text.starts_with('/') && !text.starts_with("//"),
            }
        }
        [TemplatePart::Variable(Variable::Path | Variable::Uri), ..] => true,
        [TemplatePart::Variable(Variable::Scheme), TemplatePart::Literal(text), rest @ ..] => {
            text.strip_prefix("://").is_some_and(|host| is_safe_authority(host, rest))
        }
        _ => false,
    };
    begins && pieces.iter().all(is_valid)
}

/// Whether the authority, the part before the path, has a host and contains no variable other than `{host}`.
fn is_safe_authority(first: &str, rest: &[TemplatePart]) -> bool {
    if first.is_empty() && !matches!(rest.first(), Some(TemplatePart::Variable(Variable::Host))) {
        return false;
    }
    if let Some(end) = first.find(['/', '?', '#']) {
        return end > 0;
    }
    for piece in rest {
        match piece {
            TemplatePart::Literal(text) if text.contains(['/', '?', '#']) => return true,
            TemplatePart::Literal(_) | TemplatePart::Variable(Variable::Host) => {}
            TemplatePart::Variable(Variable::Path | Variable::Uri) => return true,
            TemplatePart::Variable(_) => return false,
        }
    }
    true
}

fn read_respond(item: &Item, report: &mut Report) -> Option<LocalResponse> {
    let mut table = item.table("`respond`", &format!("write `respond = {RESPOND}`"), report)?;
    let status = table.get("status");
    let kind = table.get("content_type");
    let body = table.get("body");
    table.finish(report);
    let status = status.map_or(Some(200), |item| item.integer(200..=599, report));
    if let (Some(status @ (204 | 304)), Some(body)) = (status, &body) {
        let message = format!("a response with status `{status}` has no body");
        report.problem(body.key_span.clone(), message, "remove `body`, or write another status");
    }
    let body = read_body(body, kind, "the response", report);
    Some(LocalResponse::Respond { status: u16::try_from(status?).ok()?, body })
}

fn read_field_changes(item: &Item, path: Option<&PathPattern>, report: &mut Report) -> FieldChanges {
    let Some(mut table) = item.table(format!("`{}`", item.key), FIELDS_FIX, report) else {
        return FieldChanges::default();
    };
    let (set, add, remove) = (table.get("set"), table.get("add"), table.get("remove"));
    table.finish(report);
    let set = set.map(|item| read_field_templates(&item, path, report)).unwrap_or_default();
    let add = add.map(|item| read_field_templates(&item, path, report)).unwrap_or_default();
    let words = remove.and_then(|item| item.strings("[\"x-name\"]", report)).unwrap_or_default();
    let remove: Vec<String> = words.iter().filter_map(|word| read_field_name(word, report)).collect();
    FieldChanges { remove, set, add }
}

/// Reads a table of field names, each with a template.
fn read_field_templates(item: &Item, path: Option<&PathPattern>, report: &mut Report) -> Vec<(String, Template)> {
    let fix = format!("write `{} = {{ x-name = \"value\" }}`", item.key);
    let Some(table) = item.table(format!("`{}`", item.key), &fix, report) else { return Vec::new() };
    let mut values: Vec<(String, Template)> = Vec::new();
    for entry in table.items() {
        let name = read_field_name(&SpannedStr { text: entry.key, span: entry.key_span.clone() }, report);
        let value = entry.string("\"value\"", report).and_then(|word| read_template(&word, path, report));
        let (Some(name), Some(value)) = (name, value) else { continue };
        if values.iter().any(|(other, _)| *other == name) {
            let message = format!("{} is listed twice: field names are not case-sensitive", quoted(entry.key));
            report.problem(entry.key_span, message, "remove one of the two");
        }
        values.push((name, value));
    }
    values
}

/// Reads the name of a field that a route may change.
fn read_field_name(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let Some(name) = parse_field_name(word.text) else {
        report.problem(word.span.clone(), format!("{} is not a header field name", quoted(word.text)), FIELD_NAME_FIX);
        return None;
    };
    if GATEWAY_FIELDS.contains(&name.as_str()) {
        let message = format!("a route cannot change {}", quoted(word.text));
        let fix = "remove it: the gateway sets this field for the connection or the length of the message";
        report.problem(word.span.clone(), message, fix);
        return None;
    }
    Some(name)
}

fn read_route_timeouts(item: &Item, timeouts: &Timeouts, report: &mut Report) -> Option<Timeouts> {
    if !matches!(item.value, DeValue::Table(_)) {
        return item.wrong_type("a table", "write `timeouts = { response_head = \"5s\" }`", report);
    }
    let mut table = item.table("`timeouts` of a route", "", report)?;
    let own = RouteTimeouts::read(&mut table, report).over(timeouts);
    table.finish(report);
    Some(own)
}
