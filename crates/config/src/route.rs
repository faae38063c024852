//! `[[routes]]`: which requests each route matches, where they are forwarded, and which rules limit them.
//!
//! The most specific matching route wins, and among equally specific routes the first in the file. A route is
//! unreachable if earlier routes match the same requests.

use std::collections::{HashMap, HashSet};

use http::{HeaderValue, Method};
use toml::de::DeValue;

use super::access::{Allowed, KnownClients, allow_list};
use super::diagnostics::{Report, Span, quoted};
use super::host::{read_distinct, read_hosts};
use super::key_kind::{ENTRY, PARAM};
use super::limits::Timeouts;
use super::path::{PathPattern, PatternKind, Segment};
use super::route_actions::{ActionContext, ActionSettings, Actions, CONNECTION_FIELDS, responds_directly};
use super::rule::{self, CheckedRule, RATE_LIMIT_STYLES};
use super::settings::{Boolean, Choice, Custom, Integer, Optional, Required, Section, Shape, Text, Texts, Word};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::upstream::Upstream;
use super::values::{Definitions, FIELD_NAME_FIX, parse_field_name, read_network};
use super::{RouteId, UpstreamId};
use transom_http::path_normalize::PathReading;
use transom_http::percent_encoding::decode_escape;
use transom_limiter::handles::{IdVec, RuleId};
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::{KeyPart, OnMissing};
use transom_limiter::rule::{Cost, Rule};

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
    /// Required query parameters, decoded, with their value; `None`: any value.
    pub query: Vec<(String, Option<String>)>,
    /// Networks of the client's address; empty: any.
    pub networks: Vec<Network>,
    pub path: PathPattern,
    /// `Some(true)`: only requests that came by https; `Some(false)`: only others; `None`: both.
    pub secure: Option<bool>,
    /// Changes to requests and responses, if any.
    pub actions: Option<Box<Actions>>,
    /// `None` if `actions` have a response.
    pub upstream: Option<UpstreamId>,
    /// Whether WebSocket upgrades are allowed.
    pub websocket: bool,
    pub rules: Vec<RuleId>,
    /// Networks and clients whose requests are allowed; empty: all.
    pub allow: Vec<Allowed>,
    /// Replaces the cost of rules with a fixed cost.
    pub cost: Option<u32>,
}

impl Route {
    /// The shortest prefix of the networks, as of an IPv6 address; `None` if there are no networks.
    pub fn widest_network(&self) -> Option<u8> {
        self.networks.iter().map(|network| network.prefix + if network.address.is_ipv4() { 96 } else { 0 }).min()
    }
}

settings! {
    /// The conditions of a route, as written in the file.
    pub struct RouteConditions {
        /// Path of the request. `{name}` matches a non-empty segment or part of a segment, `*` too, as a part and without a name;
        /// `{*name}` matches the rest, possibly empty. In a literal, `%2A` stands for a `*`, and `%24` for a `$` at the end.
        path: Option<SpannedString> = Required(
            Text("pattern", "\"/{*rest}\""),
            "write `path = \"/{*rest}\"` to match every request, or another path",
        );
        /// Host of the request. `"*.example.com"` matches all names below `example.com`. Without it: any.
        host: Vec<String> = Custom::or_empty(|| Shape::one_or_list("name"), |item, report| {
            read_hosts(item, "the route then matches any host", report)
        });
        /// Methods of the request; `GET` includes HEAD. Without it: any.
        methods: Vec<String> = Custom::or_empty(|| Shape::one_or_list("method"), read_methods);
        /// Fields that must be present. A request with a repeated field whose value a route compares gets 400. Connection
        /// fields, `Forwarded` and `X-Forwarded-For`, `-Proto`, `-Host` are not allowed, because the gateway removes or
        /// replaces them: use `host` and `scheme`.
        headers: Vec<(String, Option<String>)> =
            Custom::or_empty(
            || Shape::described(
                "table of field = value or `true`",
                Shape::map_of(Shape::AnyOf(vec![Shape::Text("value"), Shape::Boolean])),
            ),
            read_headers,
        );
        /// Query parameters that must be present, by their decoded names; `true`: with any value, also none. A request with a
        /// repeated parameter whose value a route compares gets 400.
        query: Vec<(String, Option<String>)> = Custom::or_empty(
            || Shape::described(
                "table of parameter = value or `true`",
                Shape::map_of(Shape::AnyOf(vec![Shape::Text("value"), Shape::Boolean])),
            ),
            read_query,
        );
        /// Networks of the client's address, as [`trusted_proxies`](#listen) and the PROXY protocol determine it. Other requests
        /// match other routes, or get 404; `allow` refuses them instead. Without it: any.
        networks: Vec<Network> = Custom::or_empty(|| Shape::one_or_list("network"), read_networks);
        /// Scheme of the client's request, or the scheme that a trusted proxy reports. Without it: both. A scheme that no
        /// listener and no trusted proxy can produce is an error.
        scheme: Option<bool> = Optional(Choice(false, &[("http", false), ("https", true)]));
    }
}

settings! {
    /// What happens to the requests of a route, as written in the file.
    pub struct RouteSettings {
        /// Where requests go. Required, unless the route responds itself.
        upstream: Option<SpannedString> = Text("name", "\"NAME\"");
        /// Rules that apply. A rule on several routes counts once across them.
        rules: Vec<SpannedString> = Texts("name", "[\"NAME\"]");
        /// Networks of the client's address, and [clients](#clients) as `"client:NAME"`, whose requests are allowed. All other
        /// requests get 403. Default: all are allowed. See [Deny and allow lists](#access).
        allow: Vec<Allowed> = allow_list();
        /// Whether clients may open [WebSockets](#websocket).
        websocket: bool = Boolean(true);
        /// Cost of a request here, for rules with a fixed cost. Without it: the rules' own.
        cost: Option<u32> = Optional(Integer(1, 0..=u32::MAX as u64));
        /// Label in metrics and log. Without it: derived from path, host and methods.
        name: Option<String> = Word { shape: "text", example: "\"login\"", read: read_name };
    }
}

fn read_methods(item: &Item, report: &mut Report) -> Option<Vec<String>> {
    const WITHOUT: &str = "the route then matches any method";
    let method = |word: &SpannedStr| {
        let upper = word.text.to_ascii_uppercase();
        let fix = match Method::from_bytes(word.text.as_bytes()) {
            _ if ["", "*", "ANY", "ALL"].contains(&upper.as_str()) => format!("remove `methods`: {WITHOUT}"),
            // Both are valid in a method (RFC 9110, section 9.1), and no client sends one with them.
            _ if upper.starts_with(['!', '~']) => {
                let name = upper.trim_start_matches(['!', '~', '*', ' ']);
                format!(
                    "list the methods that the route matches, or write a route with `methods = [\"{name}\"]`, which is more \
                     specific, beside this one"
                )
            }
            _ if upper.contains('|') => {
                let methods: Vec<String> =
                    upper.trim_matches(['^', '(', ')', '$']).split('|').map(|one| format!("\"{one}\"")).collect();
                format!("write each method as its own string: `[{}]`", methods.join(", "))
            }
            _ if upper.contains(['*', '^', '$']) => String::from("list the methods that the route matches"),
            Ok(_) if word.text == upper => return Ok(upper),
            Ok(_) => format!("write `\"{upper}\"`: methods are in upper case"),
            Err(_) => String::from("write each method as its own string, such as `[\"GET\", \"POST\"]`"),
        };
        Err((format!("{} is not a method", quoted(word.text)), fix))
    };
    read_distinct(item, "[\"GET\"]", WITHOUT, method, report)
}

/// Fields that the gateway removes from every request, beside those of the connection, or replaces if the client is not
/// a trusted proxy. With such a field, a client could choose a route and its rules, and the upstream would not see the
/// field.
const NOT_FORWARDED: [&str; 6] = [
    "forwarded",
    "proxy-authenticate",
    "proxy-authorization",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

/// Reads the header fields that a request must have: each a value, or `None` for any value.
fn read_headers(item: &Item, report: &mut Report) -> Option<Vec<(String, Option<String>)>> {
    let fix = match item.value {
        DeValue::String(style) if RATE_LIMIT_STYLES.iter().any(|(word, _)| word == style) => {
            "write it in `[rules.NAME]` or at the top of the file: rate limit fields belong to rules, and these are \
             conditions of the route"
        }
        _ => "write `headers = { \"x-version\" = \"2\" }`, or `true` for any value",
    };
    let table = item.table("`headers`", fix, report)?;
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for entry in table.items() {
        let Item { key, key_span, span, value, .. } = &entry;
        let name = parse_field_name(key).unwrap_or_default();
        let is_removed = |name| CONNECTION_FIELDS.contains(&name) || NOT_FORWARDED.contains(&name);
        let (span, message, fix) = match value {
            _ if name.is_empty() => (key_span, format!("{} is not a header field name", quoted(key)), FIELD_NAME_FIX),
            _ if found.iter().any(|(other, _)| *other == name) => {
                let message = format!("{} is listed twice: field names are not case-sensitive", quoted(key));
                (key_span, message, "remove one of the two")
            }
            _ if is_removed(name.as_str()) => {
                let name = quoted(&name);
                let message = format!(
                    "a route cannot match {name}: the gateway does not forward this field as the client sent it"
                );
                (key_span, message, "remove it, and match another field, `host` or `scheme`")
            }
            DeValue::Boolean(true) => {
                found.push((name, None));
                continue;
            }
            DeValue::String(value) if is_foreign_pattern(&name, value) => {
                let message = format!("{} is a pattern, and a route compares the whole value", quoted(value));
                (span, message, "write one value, or `true` for any value: each value needs a route of its own")
            }
            DeValue::String(value) if HeaderValue::from_str(value).is_ok() && value.trim() == value => {
                found.push((name, Some(value.to_string())));
                continue;
            }
            DeValue::String(value) => {
                let message = format!("{} is not a valid header field value", quoted(value));
                (span, message, "write it without line breaks, and without spaces around it")
            }
            DeValue::Boolean(false) => {
                let fix = "remove it: a route without this header matches the requests that more specific routes do not match";
                (span, String::from("a route cannot require a header field to be absent"), fix)
            }
            _ => {
                let fix = match (value, name.as_str()) {
                    (DeValue::Table(_) | DeValue::Array(_), "set" | "add" | "remove" | "request" | "response") => {
                        "these are conditions of the route; write `request_headers = { set = { x-name = \"value\" } }` or \
                         `response_headers` to change fields"
                    }
                    _ => "write the value in quotes, or `true` for any value",
                };
                let _: Option<()> = entry.wrong_type("a string or `true`", fix, report);
                continue;
            }
        };
        report.problem(span.clone(), message, fix);
    }
    Some(found)
}

/// Reads the query parameters that a request must have: each a value, or `None` for any value.
fn read_query(item: &Item, report: &mut Report) -> Option<Vec<(String, Option<String>)>> {
    let table = item.table(
        "`query`",
        "write `query = { version = \"2\" }`, or `query = { version = true }` for any value",
        report,
    )?;
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for entry in table.items() {
        let Item { key, key_span, span, value, .. } = &entry;
        let is_encoded =
            |text: &str| text.match_indices('%').any(|(at, _)| decode_escape(&text.as_bytes()[at..]).is_some());
        let (span, message, fix) = match value {
            _ if key.is_empty() => {
                (key_span, String::from("a query parameter has a name"), "write the name before the `=`")
            }
            _ if is_encoded(key) => {
                let message = format!("{} is percent-encoded, and names are compared decoded", quoted(key));
                (key_span, message, "write the decoded name")
            }
            DeValue::Boolean(true) => {
                found.push(((*key).to_owned(), None));
                continue;
            }
            DeValue::String(value) if is_foreign_pattern("", value) => {
                let message = format!("{} is a pattern, and a route compares the whole value", quoted(value));
                (span, message, "write one value, or `true` for any value: each value needs a route of its own")
            }
            DeValue::String(value) if is_encoded(value) => {
                let message = format!("{} is percent-encoded, and values are compared decoded", quoted(value));
                (span, message, "write the decoded value")
            }
            DeValue::String(value) => {
                found.push(((*key).to_owned(), Some(value.to_string())));
                continue;
            }
            DeValue::Boolean(false) => {
                let fix = "remove it: a route without this parameter matches the requests that more specific routes do not match";
                (span, String::from("a route cannot require a query parameter to be absent"), fix)
            }
            _ => {
                let fix = "write the value in quotes, or `true` for any value";
                let _: Option<()> = entry.wrong_type("a string or `true`", fix, report);
                continue;
            }
        };
        report.problem(span.clone(), message, fix);
    }
    Some(found)
}

fn read_networks(item: &Item, report: &mut Report) -> Option<Vec<Network>> {
    const WITHOUT: &str = "the route then matches any client";
    let words = item.strings("[\"10.0.0.0/8\"]", report)?;
    if words.is_empty() {
        return report.reject(item.span.clone(), "`networks` is empty", format!("remove it: {WITHOUT}"));
    }
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    for word in &words {
        let (message, fix) = match word.text {
            "all" | "any" | "*" => {
                (format!("{} is not a network", quoted(word.text)), format!("remove `networks`: {WITHOUT}"))
            }
            text if text.starts_with(['!', '-']) => {
                let fix = "write a route with the network, which is more specific, beside one without `networks`";
                (format!("{} is not a network", quoted(text)), fix.to_owned())
            }
            text if text.starts_with("unix") => {
                let fix = "remove it: a client of a Unix socket has no address, and matches routes without `networks`";
                (format!("{} is not a network", quoted(text)), fix.to_owned())
            }
            text => match read_network(word, report) {
                Some(network) if !seen.insert(network) => {
                    (format!("{} is listed twice", quoted(text)), String::from("remove it"))
                }
                network => {
                    found.extend(network);
                    continue;
                }
            },
        };
        report.problem(word.span.clone(), message, fix);
    }
    Some(found)
}

/// Whether the value of a field is a pattern of another product: a regular expression, a negation or a wildcard. `*/*` and
/// entity tags are values.
fn is_foreign_pattern(field: &str, value: &str) -> bool {
    let is_expression = value.starts_with(['~', '^', '!'])
        || [".*", ".+", "(?", "[^", "\\d", "\\w", "\\.", "|", "/^", "$/"].iter().any(|part| value.contains(part));
    let without_any_type = value.replace("*/*", "");
    let is_wildcard =
        without_any_type.starts_with('*') || without_any_type.ends_with('*') || without_any_type.contains("/*");
    let is_entity_tag = field.starts_with("if-") && (value == "*" || value.contains('"'));
    (is_expression || is_wildcard) && !is_entity_tag
}

fn read_name(word: &SpannedStr, report: &mut Report) -> Option<String> {
    if word.text.is_empty() || word.text.chars().count() > 128 || word.text.contains(char::is_control) {
        let message = format!("{} cannot be the name of a route", quoted(word.text));
        return report.reject(word.span.clone(), message, "write from 1 to 128 characters on one line, or remove it");
    }
    Some(word.text.to_owned())
}

/// Settings outside of `[[routes]]` that routes depend on.
pub struct RouteContext<'c> {
    pub reading: PathReading,
    pub upstreams: &'c Definitions<UpstreamId, Upstream>,
    pub rules: &'c Definitions<RuleId, CheckedRule>,
    pub clients: &'c KnownClients<'c>,
    pub timeouts: &'c Timeouts,
    /// Whether requests can have the schemes.
    pub http: bool,
    pub https: bool,
}

pub fn read_routes(item: Option<Item>, context: &RouteContext, report: &mut Report) -> IdVec<RouteId, Route> {
    let Some(item) = item else { return IdVec::new() };
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
        routes.push(context.read_route(table, report));
    }
    report_unreachable(&routes, report);
    assign_names(&mut routes, report);
    routes.into_iter().map(|route| route.route).collect()
}

/// The fixes for prefixes and matchers in the words of other products.
fn suggest_path(table: &mut Table) {
    // As in Traefik: `rule = "PathPrefix(`/api`)"`. A name alone is meant for `rules`.
    if table.given("rule").is_some_and(|item| item.value.as_str().is_some_and(|text| text.contains('('))) {
        let fix = "write `path = \"/api/{*rest}\"`, and `host`, `methods`, `headers`, `query` or `networks` where they matter";
        table.suggest_for("rule", "path", fix);
    }
    for key in ["location", "prefix", "path_prefix", "match", "uri"] {
        let Some(Item { value: DeValue::String(prefix), .. }) = table.given(key) else { continue };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-_.~".contains(c);
        if prefix.starts_with('/') && prefix.chars().all(is_plain) {
            let fix = format!("write `path = \"{}/{{*rest}}\"`", prefix.trim_end_matches('/'));
            table.suggest_for(key, "path", fix);
        }
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

impl RouteContext<'_> {
    fn read_route(&self, mut table: Table, report: &mut Report) -> ParsedRoute {
        let before = report.count();
        let conditions = RouteConditions::read(&mut table, report);
        let path = conditions.path.as_ref();
        let path = path.and_then(|path| PathPattern::read(path, PatternKind::Route, self.reading, report));
        self.check_scheme(conditions.scheme, &table, report);
        let is_valid = report.count() == before && path.is_some();
        let actions = ActionSettings::read(&mut table, report);
        let settings = RouteSettings::read(&mut table, report);
        suggest_path(&mut table);
        let (name_item, cost_item) = (table.given("name"), table.given("cost"));
        let include_usage_item = table.given("set_include_usage");
        let needs_upstream = !responds_directly(&table);
        let lacks_upstream = needs_upstream && table.lacks("upstream");
        if let (Some(item), false) = (table.given("upstream"), needs_upstream) {
            let message = "`upstream` has no effect: the route has `redirect` or `respond`";
            report.missing(item.key_span, message, "remove it, or remove `redirect` or `respond`");
        }
        let table_span = table.span.clone();
        let is_complete = table.finish(report).is_empty() && is_valid;
        if lacks_upstream {
            report.missing(table_span.clone(), "`[[routes]]` has no `upstream`", self.upstream_fix());
        }

        let upstream = settings.upstream.filter(|_| needs_upstream);
        let upstream = upstream.and_then(|name| self.upstreams.find("upstream", &name.text, name.span, report));
        let rules = self.find_rules(&settings.rules, path.as_ref(), report);
        for allowed in &settings.allow {
            if let Allowed::Client(name) = allowed {
                self.clients.check(&name.text, &name.span, report);
            }
        }
        let reads_usage = |rule: &RuleId| self.rules.entries[*rule].value.rule.usage.is_some();
        if let Some(item) = include_usage_item.filter(|_| !rules.iter().any(reads_usage)) {
            let message = "`set_include_usage` has no effect: no rule of the route has a cost by `usage`";
            report.missing(item.key_span, message, "add such a rule to `rules`, or remove it");
        }
        if let (Some(item), Some(cost)) = (cost_item, settings.cost) {
            self.check_cost(&item, cost, &rules, report);
        }
        let context =
            ActionContext { path: path.as_ref(), encoded_slash: self.reading.encoded_slash, timeouts: self.timeouts };
        let actions = actions.resolve(&context, report);
        let path = path.unwrap_or(PathPattern { text: String::new(), segments: Vec::new() });
        ParsedRoute {
            name_span: name_item.map(|item| item.span).filter(|_| settings.name.is_some()),
            span: conditions.path.map_or(table_span, |path| path.span),
            is_complete,
            route: Route {
                name: settings.name.unwrap_or_else(|| path.text.clone()),
                hosts: conditions.host,
                methods: conditions.methods,
                headers: conditions.headers,
                query: conditions.query,
                networks: conditions.networks,
                path,
                secure: conditions.scheme,
                actions,
                upstream,
                websocket: settings.websocket,
                rules,
                allow: settings.allow,
                cost: settings.cost,
            },
        }
    }

    /// Reports a scheme that no request can have.
    fn check_scheme(&self, secure: Option<bool>, table: &Table, report: &mut Report) {
        let (message, fix) = match secure {
            Some(true) if !self.https => (
                "this route can never match: requests use https only with `[listen.https]` or `trusted_proxies`",
                "add `[listen.https]`, or `trusted_proxies` if a proxy in front terminates TLS; or remove `scheme`",
            ),
            Some(false) if !self.http => (
                "this route can never match: requests use http only with `http` in `[listen]` or `trusted_proxies`",
                "add `http` to `[listen]`, or remove the route",
            ),
            _ => return,
        };
        report.missing(table.given("scheme").map_or(0..0, |item| item.span), message, fix);
    }

    fn upstream_fix(&self) -> String {
        match self.upstreams.entries.iter().next() {
            Some(first) => format!("write `upstream = \"{}\"`", first.name),
            None => String::from("write `upstream = \"NAME\"`, and define it: `[upstreams.NAME]`"),
        }
    }

    /// The rules that a route names.
    fn find_rules(&self, names: &[SpannedString], path: Option<&PathPattern>, report: &mut Report) -> Vec<RuleId> {
        let mut found = Vec::new();
        for (i, SpannedString { text, span, .. }) in names.iter().enumerate() {
            if names[..i].iter().any(|other| other.text == *text) {
                report.problem(span.clone(), format!("{} is listed twice", quoted(text)), "remove it");
                continue;
            }
            if text.contains([',', ' ']) {
                let each: Vec<String> =
                    text.split([',', ' ']).filter(|name| !name.is_empty()).map(|name| format!("\"{name}\"")).collect();
                let fix = format!("write each name as its own string: `rules = [{}]`", each.join(", "));
                report.problem(span.clone(), format!("{} is not the name of a rule", quoted(text)), fix);
                continue;
            }
            let Some(id) = self.rules.find("rule", text, span.clone(), report) else { continue };
            found.push(id);
            // Without `on_missing_key`, a rule needs all path parameters that it counts by.
            let rule = &self.rules.entries[id].value.rule;
            if let Some(part) = rule.key.iter().find(|part| ENTRY.has(part)) {
                let message = format!("the rule {} counts by `{part}`, which only a descriptor has", quoted(text));
                report.problem(span.clone(), message, format!("add a `key` to `[rules.{text}]`, such as `\"ip\"`"));
            }
            let Some(path) = path.filter(|_| rule.on_missing == OnMissing::Never) else { continue };
            let mut params = rule.key.iter().filter(|part| PARAM.has(part)).filter_map(KeyPart::name);
            if let Some(name) = params.find(|name| !path.param_names().contains(name)) {
                let (rule, path) = (quoted(text), quoted(&path.text));
                let message =
                    format!("the rule {rule} counts by `param:{name}`, but the path {path} has no `{{{name}}}`");
                let fix = format!("add `{{{name}}}` to the path, or `on_missing_key = \"skip\"` to `[rules.{text}]`");
                report.missing(span.clone(), message, fix);
            }
        }
        found
    }

    /// Checks the cost of a request on a route. It replaces the cost of those rules of the route that have a fixed cost.
    fn check_cost(&self, item: &Item, cost: u32, rules: &[RuleId], report: &mut Report) {
        let fixed = rules.iter().map(|rule| &self.rules.entries[*rule].value.rule.rule);
        let fixed: Vec<&Rule> = fixed.filter(|rule| matches!(rule.cost, Cost::Fixed(_))).collect();
        if fixed.is_empty() && self.rules.complete {
            let message = "`cost` has no effect: no rule of this route has a fixed cost";
            report.missing(item.key_span.clone(), message, "remove it, or name a rule in `rules`");
        }
        let smallest = fixed.iter().flat_map(|rule| rule.variants()).filter_map(rule::smallest_capacity).min();
        rule::report_unaffordable(item, cost, smallest, report);
    }
}

/// Reports routes that earlier routes make unreachable. Only routes with the same path shape, headers, query and scheme are
/// compared: a route with fewer conditions is less specific, so it never makes another unreachable.
fn report_unreachable(routes: &[ParsedRoute], report: &mut Report) {
    let mut earlier: HashMap<_, Vec<&ParsedRoute>> = HashMap::new();
    for route in routes.iter().filter(|route| route.is_complete) {
        // Names of parameters do not matter.
        let shape = route.route.path.segments.iter().map(|segment| match segment {
            Segment::Literal(text) => (std::slice::from_ref(text), false),
            Segment::Wildcards(segment) => (&*segment.texts, false),
            Segment::Param(_) => (&[][..], false),
            Segment::Rest(_) => (&[][..], true),
        });
        let [headers, query] = [&route.route.headers, &route.route.query].map(|conditions| {
            let mut sorted: Vec<_> = conditions.iter().collect();
            sorted.sort();
            sorted
        });
        let others = (headers, query, route.route.networks.is_empty(), route.route.secure);
        let before = earlier.entry((shape.collect::<Vec<_>>(), others)).or_default();
        if let Some(lines) = covering_lines(route, before, report) {
            let message = match lines.as_slice() {
                [line] => format!("this route can never match: the route on line {line} matches all its requests"),
                [init @ .., last] => {
                    let lines = format!("{} and {last}", init.join(", "));
                    format!("this route can never match: the routes on lines {lines} match all its requests")
                }
                [] => continue,
            };
            let fix = "remove one of them, or distinguish them by `path`, `host`, `scheme`, `methods`, `headers`, `query` or `networks`";
            report.missing(route.span.clone(), message, fix);
        }
        before.push(route);
    }
}

/// The lines of the earlier routes that match all requests of `route`: for each of its hosts, methods and networks, the first
/// earlier route with all three that is not less specific. `None` if there is a combination that no earlier route matches.
fn covering_lines(route: &ParsedRoute, before: &[&ParsedRoute], report: &Report) -> Option<Vec<String>> {
    let mut positions = Vec::new();
    for host in values_or_any(&route.route.hosts) {
        for method in values_or_any(&route.route.methods) {
            for network in values_or_any(&route.route.networks) {
                let is_match = |other: &&&ParsedRoute| {
                    values_or_any(&other.route.hosts).any(|h| h == host)
                        && values_or_any(&other.route.methods).any(|m| m == method)
                        && values_or_any(&other.route.networks).any(|n| contains(n, network))
                        && other.route.widest_network() >= route.route.widest_network()
                };
                positions.push(before.iter().find(is_match)?.span.start);
            }
        }
    }
    positions.sort_unstable();
    positions.dedup();
    Some(positions.into_iter().map(|position| report.line_seen_from(position, route.span.start)).collect())
}

/// The values of a list, or a single `None` for any value if the list is empty.
fn values_or_any<T>(values: &[T]) -> impl Iterator<Item = Option<&T>> {
    let any = values.is_empty().then_some(None);
    values.iter().map(Some).chain(any)
}

/// Whether a network contains another one. Both are absent if routes have no networks.
fn contains(outer: Option<&Network>, inner: Option<&Network>) -> bool {
    match (outer, inner) {
        (Some(outer), Some(inner)) => {
            outer.prefix <= inner.prefix && Network::containing(inner.address, outer.prefix) == *outer
        }
        (outer, inner) => outer == inner,
    }
}

/// Gives a unique name to each route without a configured name, and reports configured names that are not unique.
fn assign_names(routes: &mut [ParsedRoute], report: &mut Report) {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    for ParsedRoute { route: Route { name, .. }, name_span, .. } in routes.iter() {
        let Some(span) = name_span else { continue };
        if let Some(other) = positions.insert(name, span.start) {
            let other = report.line_seen_from(other, span.start);
            let message = format!("the name {} is already used by the route on line {other}", quoted(name));
            report.problem(span.clone(), message, "give one of the two another name");
        }
    }
    // Routes without a configured name have their path as a name. Details are added while two routes have the same name.
    for level in 1..=NAME_LEVELS {
        let mut count: HashMap<String, usize> = HashMap::new();
        for route in routes.iter() {
            *count.entry(route.route.name.clone()).or_default() += 1;
        }
        for (index, ParsedRoute { route, name_span, .. }) in routes.iter_mut().enumerate() {
            if name_span.is_none() && count[&route.name] > 1 {
                route.name = detailed_name(route, index, level);
            }
        }
    }
}

/// Levels of detail: with host and scheme; with methods; with headers, query and networks; with the number of the route.
const NAME_LEVELS: usize = 4;

fn detailed_name(route: &Route, index: usize, level: usize) -> String {
    let scheme = route.secure.map_or("", |secure| if secure { "https " } else { "http " });
    let mut name = format!("{scheme}{}{}", route.hosts.join(","), route.path.text);
    if level >= 2 && !route.methods.is_empty() {
        name = format!("{} {name}", route.methods.join(","));
    }
    if level >= 3 {
        for (field, value) in &route.headers {
            name += &format!(" {field}={}", value.as_deref().unwrap_or("*"));
        }
        for (parameter, value) in &route.query {
            name += &format!(" ?{parameter}={}", value.as_deref().unwrap_or("*"));
        }
        match &route.networks[..] {
            [] => {}
            [network] => name += &format!(" {network}"),
            [first, others @ ..] => name += &format!(" {first} and {} more", others.len()),
        }
    }
    // A configured name, or a header value with spaces, may still equal the name.
    if level >= NAME_LEVELS {
        name += &format!(" #{}", index + 1);
    }
    name
}
