//! The routes: which requests each takes, where they go, and which rules hold them.

use toml::de::DeValue;

use super::rules::RuleResponses;
use super::unreachable_routes::ParsedRoute;
use super::{Definitions, actions, cost, path, route_match, unreachable_routes};
use crate::config::diagnostics::{Report, quoted};
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
    unreachable_routes::report_unreachable(&drafts, report);
    unreachable_routes::assign_names(drafts, report)
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
    let cost = cost.and_then(|item| self::read_cost(&item, &used, rules, report));

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
fn read_cost(item: &Item, used: &[usize], rules: &Rules, report: &mut Report) -> Option<u32> {
    let cost = item.integer(0..=u64::from(u32::MAX), report).and_then(|cost| u32::try_from(cost).ok())?;
    let fixed = used.iter().map(|rule| &rules.entries[*rule].value.0);
    let fixed: Vec<&Rule> = fixed.filter(|rule| matches!(rule.cost, Cost::Fixed(_))).collect();
    if fixed.is_empty() && rules.complete {
        let message = "`cost` has no effect: no rule of this route has a fixed cost";
        report.missing(item.key_span.clone(), message, "remove it, or name a rule in `rules`");
    }
    let smallest = fixed.iter().flat_map(|rule| rule.variants()).filter_map(cost::smallest_capacity).min();
    cost::report_unaffordable(item, cost, smallest, report);
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
