//! The routes: which requests each takes, where they go, and which rules hold them.

use toml::de::DeValue;

use std::collections::HashMap;

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

/// By which schemes requests can come.
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
    let mut drafts: Vec<ParsedRoute> = Vec::new();
    for item in items {
        let fix = "write `[[routes]]`, then its `path` and its `upstream`, each on a line";
        let Some(table) = item.table("`[[routes]]`", fix, report) else { continue };
        drafts.push(read_route(table, reading, upstreams, rules, timeouts, schemes, report));
    }
    report_unreachable(&drafts, report);
    assign_names(drafts, report)
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
    let path = table.require("path", "write `path = \"/{*rest}\"` to take every request, or the path of some");
    let span = path.as_ref().map_or(header, |item| item.span.clone());
    let before = report.count();
    let hosts = route_match::read_hosts(table.get("host"), "the route then takes any host", report);
    let methods = route_match::read_methods(table.get("methods"), report);
    let headers = route_match::read_headers(table.get("headers"), report);
    let secure = table.get("scheme").map(|item| read_scheme(&item, schemes, report));
    let certain = report.count() == before;
    let actions = actions::ActionSettings::take_from(&mut table);
    let upstream = if actions.responds_directly() {
        report_unused_upstream(table.get("upstream"), report)
    } else {
        table.require("upstream", upstream_fix(upstreams))
    };
    let names = table.get("rules");
    let cost = table.get("cost");
    let websocket = table.get("websocket").and_then(|item| item.boolean(report)).unwrap_or(true);
    let misspelt = table.finish(report);

    let named = name.as_ref().map(|item| item.span.clone());
    let name = name.and_then(|item| self::read_name(&item, report));
    let path = path
        .and_then(|item| item.string("\"/{*rest}\"", report))
        .and_then(|word| path::read_path(&word, reading, report));
    let upstream = upstream.and_then(|item| {
        let word = item.string(&format!("\"{}\"", example_upstream(upstreams)), report)?;
        upstreams.find("upstream", word.text, word.span, report)
    });
    let actions = actions.read(path.as_ref(), reading.encoded_slash, timeouts, report);
    let used = names.and_then(|item| read_rule_names(&item, path.as_ref(), rules, report)).unwrap_or_default();
    let cost = cost.and_then(|item| self::read_route_cost(&item, &used, rules, report));

    ParsedRoute {
        name_span: named.filter(|_| name.is_some()),
        span,
        is_complete: certain && path.is_some() && misspelt.is_empty(),
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
            rules: used,
            cost,
        },
    }
}

/// Whether a route is for https; no route can be for a scheme that no request comes by.
fn read_scheme(item: &Item, schemes: Schemes, report: &mut Report) -> Option<bool> {
    let secure = item.choice(&[("http", false), ("https", true)], report)?;
    let (message, fix) = match secure {
        true if !schemes.https => (
            "this route can never match: no request comes by https without `[listen.https]` or `trusted_proxies`",
            "add `[listen.https]`, or `trusted_proxies` if a proxy in front ends TLS; or remove `scheme`",
        ),
        false if !schemes.http => (
            "this route can never match: no request comes by http without `http` in `[listen]` or `trusted_proxies`",
            "add `http` to `[listen]`, or remove the route",
        ),
        secure => return Some(secure),
    };
    report.missing(item.span.clone(), message, fix);
    Some(secure)
}

/// A route that answers by itself has no upstream.
fn report_unused_upstream<'d>(item: Option<Item<'d>>, report: &mut Report) -> Option<Item<'d>> {
    if let Some(item) = item {
        let message = "`upstream` has no effect: the route answers by itself";
        report.missing(item.key_span, message, "remove it, or what the route answers");
    }
    None
}

/// An upstream that there is, to show how to name one.
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
        report.problem(word.span, message, "write from 1 to 128 characters on one line, or leave it out");
        return None;
    }
    Some(word.text.to_owned())
}

/// The positions of the rules that a route names.
fn read_rule_names(item: &Item, path: Option<&PathPattern>, rules: &Rules, report: &mut Report) -> Option<Vec<usize>> {
    let words = item.strings("[]", report)?;
    let mut found = Vec::new();
    for (i, word) in words.iter().enumerate() {
        if words[..i].iter().any(|other| other.text == word.text) {
            report.problem(word.span.clone(), format!("{} is there twice", quoted(word.text)), "remove it");
            continue;
        }
        let Some(position) = rules.find("rule", word.text, word.span.clone(), report) else { continue };
        if let Some(path) = path {
            check_params(word, path, &rules.entries[position].value.0, report);
        }
        found.push(position);
    }
    Some(found)
}

/// What a request costs on a route, under those of its rules that have a fixed cost.
fn read_route_cost(item: &Item, used: &[usize], rules: &Rules, report: &mut Report) -> Option<u32> {
    let cost = item.integer(0..=u64::from(u32::MAX), report).and_then(|cost| u32::try_from(cost).ok())?;
    let fixed = used.iter().map(|rule| &rules.entries[*rule].value.0);
    let fixed: Vec<&Rule> = fixed.filter(|rule| matches!(rule.cost, Cost::Fixed(_))).collect();
    if fixed.is_empty() && rules.complete {
        let message = "`cost` has no effect: no rule of this route has a fixed cost";
        report.missing(item.key_span.clone(), message, "remove it, or name a rule in `rules`");
    }
    let smallest = fixed.iter().flat_map(|rule| rule.variants()).filter_map(rules::smallest_capacity).min();
    rules::report_unaffordable(item, cost, smallest, report);
    Some(cost)
}

/// A rule that counts by a parameter is told what to do where a path has none.
fn check_params(word: &SpannedStr, path: &PathPattern, rule: &Rule, report: &mut Report) {
    let has = |name: &str| {
        path.segments.iter().any(|segment| match segment {
            Segment::Literal(_) => false,
            Segment::Param(other) | Segment::Rest(other) => other == name,
        })
    };
    let lacking = rule.key.iter().find_map(|part| match part {
        KeyPart::Param(name) if !has(name) => Some(name),
        _ => None,
    });
    if let (Some(name), OnMissing::Never) = (lacking, &rule.on_missing) {
        let message = format!(
            "the rule {} counts by `param:{name}`, and the path {} has no `{{{name}}}`",
            quoted(word.text),
            quoted(&path.text)
        );
        let fix = format!("add `{{{name}}}` to the path, or `on_missing_key = \"skip\"` to `[rules.{}]`", word.text);
        report.missing(word.span.clone(), message, fix);
    }
}

/// A route as far as it could be read.
pub struct ParsedRoute {
    pub route: Route,
    /// Of its name, if it has one of its own.
    pub name_span: Option<Span>,
    /// Of the path, or else of the header.
    pub span: Span,
    /// Whether all that decides which requests it takes could be read.
    pub is_complete: bool,
}

/// Reports the routes that others leave nothing to. Only equals are compared: a route that asks
/// for less than another never takes everything from it, for it is less specific.
pub fn report_unreachable(drafts: &[ParsedRoute], report: &mut Report) {
    let mut earlier: HashMap<_, Vec<&ParsedRoute>> = HashMap::new();
    for draft in drafts.iter().filter(|draft| draft.is_complete) {
        let before =
            earlier.entry((path_shape(&draft.route), sorted_headers(&draft.route), draft.route.secure)).or_default();
        if let Some(lines) = covering_lines(&draft.route, before, report) {
            let message = match lines.as_slice() {
                [line] => format!("this route can never match: the route on line `{line}` takes all its requests"),
                lines => {
                    let lines: Vec<String> = lines.iter().map(usize::to_string).collect();
                    let lines = quoted_list(lines.iter().map(String::as_str), "and");
                    format!("this route can never match: the routes on lines {lines} take all its requests")
                }
            };
            let fix = "remove one of them, or tell them apart by `path`, `host`, `scheme`, `methods` or `headers`";
            report.missing(draft.span.clone(), message, fix);
        }
        before.push(draft);
    }
}

/// The lines of the routes that take all requests of another, of equal path and fields: for each
/// of its hosts and methods the first that asks for both.
fn covering_lines(route: &Route, before: &[&ParsedRoute], report: &Report) -> Option<Vec<usize>> {
    let mut lines = Vec::new();
    for host in values_or_any(&route.hosts) {
        for method in values_or_any(&route.methods) {
            let takes = |other: &&&ParsedRoute| {
                values_or_any(&other.route.hosts).any(|h| h == host)
                    && values_or_any(&other.route.methods).any(|m| m == method)
            };
            lines.push(report.line(before.iter().find(takes)?.span.start));
        }
    }
    lines.sort_unstable();
    lines.dedup();
    Some(lines)
}

/// The values of a list; `None`, for any, where it is empty.
fn values_or_any(values: &[String]) -> impl Iterator<Item = Option<&str>> {
    let any = values.is_empty().then_some(None);
    values.iter().map(|value| Some(value.as_str())).chain(any)
}

/// The path without the names of its parameters.
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

/// Gives a name to each route that has none, and reports those that share one.
pub fn assign_names(drafts: Vec<ParsedRoute>, report: &mut Report) -> Vec<Route> {
    let mut explicit: HashMap<&str, usize> = HashMap::new();
    for draft in &drafts {
        let Some(span) = &draft.name_span else { continue };
        let line = report.line(span.start);
        if let Some(other) = explicit.insert(&draft.route.name, line) {
            let message = format!("the route {} has its name on line `{other}` already", quoted(&draft.route.name));
            report.problem(span.clone(), message, "give one of the two another name");
        }
    }
    // How much of itself each route tells; more, step by step, while two would be called alike.
    let mut levels = vec![0; drafts.len()];
    let name = |i: usize, level: usize| match drafts[i].name_span {
        Some(_) => drafts[i].route.name.clone(),
        None => default_name(&drafts[i].route, i, level),
    };
    for level in 0..NAME_LEVELS {
        let names: Vec<String> = (0..drafts.len()).map(|i| name(i, levels[i])).collect();
        let mut count: HashMap<&str, usize> = HashMap::new();
        for name in &names {
            *count.entry(name).or_default() += 1;
        }
        for i in 0..drafts.len() {
            if count[names[i].as_str()] > 1 {
                levels[i] = level + 1;
            }
        }
    }
    let names: Vec<String> = (0..drafts.len()).map(|i| name(i, levels[i])).collect();
    drafts.into_iter().zip(names).map(|(draft, name)| Route { name, ..draft.route }).collect()
}

const NAME_LEVELS: usize = 4;

fn default_name(route: &Route, position: usize, level: usize) -> String {
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
    // An explicit name, or a value with blanks in it, may still spell the same.
    if level >= NAME_LEVELS {
        name = format!("{name} #{}", position + 1);
    }
    name
}
