//! The routes beside each other: whether each can be reached, and what each is called.
//!
//! Among routes that fit a request the most specific wins, and among equally specific ones the first
//! in the file. So a route is out of reach where routes before it ask for just the same.

use std::collections::HashMap;

use crate::config::diagnostics::{Report, Span, quoted, quoted_list};
use crate::config::route::{Route, Segment};

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
