//! `[[routes]]`: which requests each route matches, where they are forwarded, and which rules limit them.
//!
//! The most specific matching route wins, and among equally specific routes the first in the file. A route is
//! unreachable if earlier routes match the same requests.

use std::collections::HashMap;

use toml::de::DeValue;

use super::rules::{self, RuleResponses};
use super::values::Definitions;
use super::{actions, path, route_match};
use crate::config::diagnostics::{Report, Span, quoted, quoted_list};
use crate::config::limits::Timeouts;
use crate::config::route::{PathPattern, PathReading, Route, Segment};
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::config::upstream::Upstream;
use transom_limiter::key::{KeyPart, OnMissing};
use transom_limiter::rule::{Cost, Rule};

type Rules = Definitions<(Rule, RuleResponses)>;

/// The schemes that requests can have.
#[derive(Clone, Copy)]
pub struct Schemes {
    pub http: bool,
    pub https: bool,
}

pub fn read_routes(
    item: Option<Item>,
    reading: PathReading,
    upstreams: &Definitions<Upstream>,
    rules: &Rules,
    timeouts: &Timeouts,
    schemes: Schemes,
    report: &mut Report,
) -> Vec<Route> {
    let Some(item) = item else { return Vec::new() };
    if let DeValue::Table(_) = item.value {
        let fix = "write `[[routes]]`, in two brackets, above each route";
        return item.wrong_type("a list of tables", fix, report).unwrap_or_default();
    }
    let items = item.list("[{ path = \"/{*rest}\", upstream = \"NAME\" }]", report).unwrap_or_default();
    if items.is_empty() && matches!(item.value, DeValue::Array(_)) {
        let fix = "write `[[routes]]`, then its `path` and its `upstream`";
        report.missing(item.key_span, "there are no routes", fix);
    }
    let mut routes: Vec<ParsedRoute> = Vec::new();
    for item in items {
        let fix = "write `[[routes]]`, then its `path` and its `upstream`, each on a line";
        let Some(table) = item.table("`[[routes]]`", fix, report) else { continue };
        routes.push(read_route(table, reading, upstreams, rules, timeouts, schemes, report));
    }
    report_unreachable(&routes, report);
    assign_names(routes, report)
}

fn read_route(
    mut table: Table,
    reading: PathReading,
    upstreams: &Definitions<Upstream>,
    rules: &Rules,
    timeouts: &Timeouts,
    schemes: Schemes,
    report: &mut Report,
) -> ParsedRoute {
    let header = table.span.clone();
    let name = table.get("name");
    let path = table.require("path", "write `path = \"/{*rest}\"` to match every request, or another path");
    let span = path.as_ref().map_or(header, |item| item.span.clone());
    let before = report.count();
    let hosts = route_match::read_hosts(table.get("host"), "the route then matches any host", report);
    let methods = route_match::read_methods(table.get("methods"), report);
    let headers = route_match::read_headers(table.get("headers"), report);
    let secure = table.get("scheme").map(|item| read_scheme(&item, schemes, report));
    let conditions_are_valid = report.count() == before;
    let actions = actions::ActionSettings::take_from(&mut table);
    let upstream = if actions.responds_directly() {
        report_unused_upstream(table.get("upstream"), report)
    } else {
        table.require("upstream", upstream_fix(upstreams))
    };
    let names = table.get("rules");
    let cost = table.get("cost");
    let websocket = table.get("websocket").and_then(|item| item.boolean(report)).unwrap_or(true);
    let misspelled = table.finish(report);

    let name_span = name.as_ref().map(|item| item.span.clone());
    let name = name.and_then(|item| read_name(&item, report));
    let path = path
        .and_then(|item| item.string("\"/{*rest}\"", report))
        .and_then(|word| path::read_path(&word, reading, report));
    let upstream = upstream.and_then(|item| {
        let word = item.string(&format!("\"{}\"", example_upstream(upstreams)), report)?;
        upstreams.find("upstream", word.text, word.span, report)
    });
    let actions = actions.read(path.as_ref(), reading.encoded_slash, timeouts, report);
    let rule_indices = names.and_then(|item| read_rule_names(&item, path.as_ref(), rules, report)).unwrap_or_default();
    let cost = cost.and_then(|item| read_route_cost(&item, &rule_indices, rules, report));

    ParsedRoute {
        name_span: name_span.filter(|_| name.is_some()),
        span,
        is_complete: conditions_are_valid && path.is_some() && misspelled.is_empty(),
        route: Route {
            name: name.unwrap_or_default(),
            hosts: hosts.unwrap_or_default(),
            methods: methods.unwrap_or_default(),
            headers: headers.unwrap_or_default(),
            path: path.unwrap_or(PathPattern { text: String::new(), segments: Vec::new() }),
            secure: secure.flatten(),
            actions,
            upstream: upstream.unwrap_or(0),
            websocket,
            rules: rule_indices,
            cost,
        },
    }
}

/// Reads whether a route is for `https`. Reports a scheme that no request can have.
fn read_scheme(item: &Item, schemes: Schemes, report: &mut Report) -> Option<bool> {
    let secure = item.choice(&[("http", false), ("https", true)], report)?;
    let (message, fix) = match secure {
        true if !schemes.https => (
            "this route can never match: requests use https only with `[listen.https]` or `trusted_proxies`",
            "add `[listen.https]`, or `trusted_proxies` if a proxy in front terminates TLS; or remove `scheme`",
        ),
        false if !schemes.http => (
            "this route can never match: requests use http only with `http` in `[listen]` or `trusted_proxies`",
            "add `http` to `[listen]`, or remove the route",
        ),
        secure => return Some(secure),
    };
    report.missing(item.span.clone(), message, fix);
    Some(secure)
}

/// Reports the upstream of a route with a `redirect` or `respond`, which forwards nothing.
fn report_unused_upstream<'d>(item: Option<Item<'d>>, report: &mut Report) -> Option<Item<'d>> {
    if let Some(item) = item {
        let message = "`upstream` has no effect: the route has `redirect` or `respond`";
        report.missing(item.key_span, message, "remove it, or remove `redirect` or `respond`");
    }
    None
}

/// The name of the first upstream, as an example in a fix.
fn example_upstream(upstreams: &Definitions<Upstream>) -> &str {
    upstreams.entries.first().map_or("NAME", |entry| entry.name.as_str())
}

fn upstream_fix(upstreams: &Definitions<Upstream>) -> String {
    match upstreams.entries.is_empty() {
        false => format!("write `upstream = \"{}\"`", example_upstream(upstreams)),
        true => String::from("write `upstream = \"NAME\"`, and define it: `[upstreams.NAME]`"),
    }
}

fn read_name(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"login\"", report)?;
    if word.text.is_empty() || word.text.chars().count() > 128 || word.text.contains(char::is_control) {
        let message = format!("{} cannot be the name of a route", quoted(word.text));
        report.problem(word.span, message, "write from 1 to 128 characters on one line, or remove it");
        return None;
    }
    Some(word.text.to_owned())
}

/// Reads the rules that a route names, as indices.
fn read_rule_names(item: &Item, path: Option<&PathPattern>, rules: &Rules, report: &mut Report) -> Option<Vec<usize>> {
    let words = item.strings("[]", report)?;
    let mut found = Vec::new();
    for (i, word) in words.iter().enumerate() {
        if words[..i].iter().any(|other| other.text == word.text) {
            report.problem(word.span.clone(), format!("{} is listed twice", quoted(word.text)), "remove it");
            continue;
        }
        let Some(index) = rules.find("rule", word.text, word.span.clone(), report) else { continue };
        if let Some(path) = path {
            check_params(word, path, &rules.entries[index].value.0, report);
        }
        found.push(index);
    }
    Some(found)
}

/// Reads the cost of a request on a route. It replaces the cost of those rules of the route that have a fixed cost.
fn read_route_cost(item: &Item, rule_indices: &[usize], rules: &Rules, report: &mut Report) -> Option<u32> {
    let cost = item.integer(0..=u64::from(u32::MAX), report).and_then(|cost| u32::try_from(cost).ok())?;
    let fixed = rule_indices.iter().map(|rule| &rules.entries[*rule].value.0);
    let fixed: Vec<&Rule> = fixed.filter(|rule| matches!(rule.cost, Cost::Fixed(_))).collect();
    if fixed.is_empty() && rules.complete {
        let message = "`cost` has no effect: no rule of this route has a fixed cost";
        report.missing(item.key_span.clone(), message, "remove it, or name a rule in `rules`");
    }
    let smallest = fixed.iter().flat_map(|rule| rule.variants()).filter_map(rules::smallest_capacity).min();
    rules::report_unaffordable(item, cost, smallest, report);
    Some(cost)
}

/// Reports a rule that counts by a path parameter that the route does not have, unless the rule has `on_missing_key`.
fn check_params(word: &SpannedStr, path: &PathPattern, rule: &Rule, report: &mut Report) {
    let has = |name: &str| {
        path.segments.iter().any(|segment| match segment {
            Segment::Literal(_) => false,
            Segment::Param(other) | Segment::Rest(other) => other == name,
        })
    };
    let missing_param = rule.key.iter().find_map(|part| match part {
        KeyPart::Param(name) if !has(name) => Some(name),
        _ => None,
    });
    if let (Some(name), OnMissing::Never) = (missing_param, &rule.on_missing) {
        let message = format!(
            "the rule {} counts by `param:{name}`, but the path {} has no `{{{name}}}`",
            quoted(word.text),
            quoted(&path.text)
        );
        let fix = format!("add `{{{name}}}` to the path, or `on_missing_key = \"skip\"` to `[rules.{}]`", word.text);
        report.missing(word.span.clone(), message, fix);
    }
}

/// A route that was read, with the positions that problems refer to. Invalid settings have defaults.
struct ParsedRoute {
    route: Route,
    /// The position of the configured name, if the route has one.
    name_span: Option<Span>,
    /// The position of the path, or of the table if there is no path.
    span: Span,
    /// Whether all settings that requests are matched by are valid.
    is_complete: bool,
}

/// Reports routes that earlier routes make unreachable. Only routes with the same path shape, headers and scheme are
/// compared: a route with fewer conditions is less specific, so it never makes another unreachable.
fn report_unreachable(routes: &[ParsedRoute], report: &mut Report) {
    let mut earlier: HashMap<_, Vec<&ParsedRoute>> = HashMap::new();
    for route in routes.iter().filter(|route| route.is_complete) {
        let before =
            earlier.entry((path_shape(&route.route), sorted_headers(&route.route), route.route.secure)).or_default();
        if let Some(lines) = covering_lines(&route.route, before, report) {
            let message = match lines.as_slice() {
                [line] => format!("this route can never match: the route on line `{line}` matches all its requests"),
                lines => {
                    let lines: Vec<String> = lines.iter().map(usize::to_string).collect();
                    let lines = quoted_list(lines.iter().map(String::as_str), "and");
                    format!("this route can never match: the routes on lines {lines} match all its requests")
                }
            };
            let fix = "remove one of them, or distinguish them by `path`, `host`, `scheme`, `methods` or `headers`";
            report.missing(route.span.clone(), message, fix);
        }
        before.push(route);
    }
}

/// The lines of the earlier routes that match all requests of `route`: for each of its hosts and methods, the first
/// earlier route with both. `None` if there is a combination that no earlier route matches.
fn covering_lines(route: &Route, before: &[&ParsedRoute], report: &Report) -> Option<Vec<usize>> {
    let mut lines = Vec::new();
    for host in values_or_any(&route.hosts) {
        for method in values_or_any(&route.methods) {
            let is_match = |other: &&&ParsedRoute| {
                values_or_any(&other.route.hosts).any(|h| h == host)
                    && values_or_any(&other.route.methods).any(|m| m == method)
            };
            lines.push(report.line(before.iter().find(is_match)?.span.start));
        }
    }
    lines.sort_unstable();
    lines.dedup();
    Some(lines)
}

/// The values of a list, or a single `None` for any value if the list is empty.
fn values_or_any(values: &[String]) -> impl Iterator<Item = Option<&str>> {
    let any = values.is_empty().then_some(None);
    values.iter().map(|value| Some(value.as_str())).chain(any)
}

/// The segments of a path, without the names of parameters.
fn path_shape(route: &Route) -> Vec<(&str, bool)> {
    let mut shape = Vec::new();
    for segment in &route.path.segments {
        shape.push(match segment {
            Segment::Literal(text) => (text.as_str(), true),
            Segment::Param(_) => ("one", false),
            Segment::Rest(_) => ("rest", false),
        });
    }
    shape
}

fn sorted_headers(route: &Route) -> Vec<&(String, Option<String>)> {
    let mut fields: Vec<_> = route.headers.iter().collect();
    fields.sort();
    fields
}

/// Gives a name to each route that has none, and reports configured names that are not unique.
fn assign_names(routes: Vec<ParsedRoute>, report: &mut Report) -> Vec<Route> {
    let mut explicit: HashMap<&str, usize> = HashMap::new();
    for route in &routes {
        let Some(span) = &route.name_span else { continue };
        let line = report.line(span.start);
        if let Some(other) = explicit.insert(&route.route.name, line) {
            let message =
                format!("the name {} is already used by the route on line `{other}`", quoted(&route.route.name));
            report.problem(span.clone(), message, "give one of the two another name");
        }
    }
    // The level of detail of each default name. It rises step by step while two routes have the same name.
    let mut levels = vec![0; routes.len()];
    let name = |i: usize, level: usize| match routes[i].name_span {
        Some(_) => routes[i].route.name.clone(),
        None => default_name(&routes[i].route, i, level),
    };
    for level in 0..NAME_LEVELS {
        let names: Vec<String> = (0..routes.len()).map(|i| name(i, levels[i])).collect();
        let mut count: HashMap<&str, usize> = HashMap::new();
        for name in &names {
            *count.entry(name).or_default() += 1;
        }
        for i in 0..routes.len() {
            if count[names[i].as_str()] > 1 {
                levels[i] = level + 1;
            }
        }
    }
    let names: Vec<String> = (0..routes.len()).map(|i| name(i, levels[i])).collect();
    routes.into_iter().zip(names).map(|(route, name)| Route { name, ..route.route }).collect()
}

/// Levels of detail: the path; with host and scheme; with methods; with headers; with the number of the route.
const NAME_LEVELS: usize = 4;

/// The name of a route without a configured name.
fn default_name(route: &Route, index: usize, level: usize) -> String {
    let mut name = route.path.text.clone();
    if level >= 1 {
        name = format!("{}{name}", route.hosts.join(","));
        name =
            route.secure.map_or(String::new(), |secure| String::from(if secure { "https " } else { "http " })) + &name;
    }
    if level >= 2 && !route.methods.is_empty() {
        name = format!("{} {name}", route.methods.join(","));
    }
    if level >= 3 {
        for (field, value) in &route.headers {
            name = format!("{name} {field}={}", value.as_deref().unwrap_or("*"));
        }
    }
    // A configured name, or a header value with spaces, may still equal the default name.
    if level >= NAME_LEVELS {
        name = format!("{name} #{}", index + 1);
    }
    name
}
