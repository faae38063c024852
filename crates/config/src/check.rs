//! Turns the TOML document into a [`Config`]: every setting becomes its final value, or a problem is reported.
//!
//! An invalid setting is replaced by a placeholder, so that the rest of the file is checked as well. A `Config` with
//! placeholders is never returned. This module opens no file and no socket; the report has functions that read files and
//! environment variables.

use toml::de::DeTable;

use super::access::{AccessContext, KnownClients, read_access};
use super::acme;
use super::clients::{DefinedPlans, read_clients, report_missing_clients, report_unused_on_unknown_key};
use super::counters::Counters;
use super::descriptor::report_unused_descriptors;
use super::diagnostics::{Problem, Report};
use super::foreign;
use super::jwt::{first_claim, read_jwt, report_missing_or_unused_jwt};
use super::key_format::check_key_formats;
use super::limits::{DrainSettings, Http2, Limits, Timeouts};
use super::listen::{Admin, read_listen};
use super::notify::read_notify;
use super::path::PathSettings;
use super::redaction::{HiddenValues, shown_text};
use super::redis::{StoreConfig, TABLE_FIX};
use super::references;
use super::route::{RouteContext, read_routes};
use super::rule::read_rules;
use super::settings::Section;
use super::span_export::read_tracing;
use super::toml_reader::{Item, Table, toml_errors};
use super::upstream::read_upstreams;
use super::{Config, General, MetricsSettings, read_access_log};

/// Reads the configuration that a report is on, or returns all problems in it.
pub fn read_config(text: &str, mut report: Report) -> Result<Config, Vec<Problem>> {
    let top_level = General::settings().into_iter().chain(PathSettings::settings());
    report.top_level_keys = top_level.map(|setting| setting.key).chain(["access_log"]).collect();
    if let (Some((span, message, fix)), false) = (foreign::configuration(text), is_toml(text)) {
        report.problem(span, message, fix);
        return Err(report.into_problems());
    }
    let valid_text = toml_errors::skip_syntax_errors(text, &mut report);
    let (mut document, _) = DeTable::parse_recoverable(&valid_text);
    references::resolve(document.get_mut(), &mut report);
    let mut config = read_top_level(Table::new(document.get_ref(), 0..0, "the file"), &mut report);
    let mut hidden = report.hidden.clone();
    match report.into_problems() {
        problems if problems.is_empty() => {
            // They were checked where they were read.
            config.set_limits_of_listed_clients();
            hidden.set_public_text(text);
            (config.hidden, config.text) = (hidden, shown_text(text));
            Ok(config)
        }
        problems => Err(problems),
    }
}

fn is_toml(text: &str) -> bool {
    DeTable::parse_recoverable(text).1.is_empty()
}

/// Keys of the top level, what is meant by them, and the fix.
const MISPLACED: [(&str, &str, &str); 3] = [
    ("redis", "counters", TABLE_FIX),
    ("shared", "counters", TABLE_FIX),
    ("route", "routes", "write `[[routes]]`, once for each route"),
];

fn read_top_level(mut top: Table, report: &mut Report) -> Config {
    let general = General::read(&mut top, report);
    let path_reading = PathSettings::read(&mut top, report).reading();
    let before = report.count();
    let listen = read_listen(top.get("listen"), report);
    let listen_is_valid = report.count() == before;
    let admin = Admin::read_section(top.get("admin"), report);
    let certs = listen.client_certs();
    let counters = Counters::read_section(top.get("counters"), report);
    let timeouts = Timeouts::read_section(top.get("timeouts"), report);
    let drain = DrainSettings::read_section(top.get("drain"), report);
    let http2 = Http2::read_section(top.get("http2"), report);
    let limits = Limits::read_section(top.get("limits"), report);
    let access_log = top.get("access_log").and_then(|item| read_access_log(item, report));
    let metrics_item = top.get("metrics");
    let metrics = MetricsSettings::read_section(metrics_item.clone(), report);
    let tracing = read_tracing(top.get("tracing"), report);
    let notify = top.get("notify");
    let jwt = top.get("jwt");
    let upstreams = top.get("upstreams");
    let rules = top.get("rules");
    let clients = top.get("clients");
    let access = top.get("access");
    let routes = match &listen.ratelimit_service {
        Some(_) => top.get("routes"),
        None => top.require("routes", "write `[[routes]]`, then its `path` and its `upstream`"),
    };
    MISPLACED.iter().for_each(|(key, meant, fix)| top.suggest_for(key, meant, *fix));
    let misspelled = top.finish(report);

    let placeholder = misspelled.contains(&"counters").then(|| StoreConfig::placeholder().default_sharing());
    let sharing = counters.default_sharing().or(placeholder);
    let claim = first_claim(rules.as_ref(), clients.as_ref());
    report_missing_or_unused_jwt(jwt.as_ref(), claim, access.is_some(), &misspelled, report);
    let (jwt, key_set) = read_jwt(jwt, report).unzip();
    let mut upstreams = read_upstreams(upstreams, report);
    upstreams.complete &= !misspelled.contains(&"upstreams");
    let mut rules = read_rules(rules, general.headers, certs, sharing, report);
    rules.complete &= !misspelled.contains(&"rules");
    let formats = rules.entries.iter().map(|entry| (&entry.value.rule.rule, entry.value.key_format_span.as_ref()));
    check_key_formats(formats, counters.shared.as_ref(), report);
    let notify = read_notify(notify, &rules, report);
    if listen.ratelimit_service.is_none() && listen_is_valid && !misspelled.contains(&"listen") {
        report_unused_descriptors(&rules, report);
    }
    // A trusted proxy sends the scheme of the original request. Invalid addresses may belong to either scheme.
    let is_proxied = listen.trusted_networks().next().is_some() || !listen.forward_auth.is_empty();
    let any_scheme = is_proxied || !listen_is_valid || misspelled.contains(&"listen");
    let plans = rules.entries.iter().flat_map(|rule| &rule.value.rule.plans).map(|plan| plan.name.as_str()).collect();
    let before = report.count();
    let plans = DefinedPlans { names: plans, complete: rules.complete, rules: &rules };
    let clients = read_clients(clients, &plans, certs, sharing.is_some(), report);
    let clients_complete = report.count() == before && !misspelled.contains(&"clients");
    if clients_complete {
        report_missing_clients(&rules, clients.as_ref(), report);
        report_unused_on_unknown_key(&rules, clients.as_ref(), report);
        report_unused_client_metrics(metrics_item.as_ref().filter(|_| metrics.clients && clients.is_none()), report);
    }
    let known_clients = KnownClients::new(clients.as_ref(), clients_complete && !report.has_syntax_errors);
    let context = RouteContext {
        reading: path_reading,
        upstreams: &upstreams,
        rules: &rules,
        clients: &known_clients,
        timeouts: &timeouts,
        http: any_scheme || !listen.http.is_empty(),
        https: any_scheme || !listen.https.is_empty(),
    };
    let mut routes = read_routes(routes, &context, report);
    let has_store = counters.shared.is_some() || misspelled.contains(&"counters");
    acme::add_challenge_route(&listen, (path_reading, has_store), &mut routes, report);
    let access_context = AccessContext {
        clients: &known_clients,
        route_names: routes.iter().map(|route| route.name.as_str()).collect(),
        routes_complete: !misspelled.contains(&"routes") && !report.has_syntax_errors,
        has_jwt: jwt.is_some(),
        has_store,
    };
    let access = read_access(access, &access_context, report);

    Config {
        listen,
        admin,
        general,
        counters,
        timeouts,
        drain,
        http2,
        limits,
        access_log,
        metrics,
        tracing,
        notify,
        clients,
        access,
        jwt,
        key_set: key_set.flatten(),
        path_reading,
        upstreams: upstreams.into_values(),
        rules: rules.into_values().into_iter().map(|checked| checked.rule).collect(),
        routes,
        hidden: HiddenValues::default(),
        text: String::new(),
    }
}

/// Reports a `clients` of `[metrics]` without clients.
fn report_unused_client_metrics(metrics: Option<&Item>, report: &mut Report) {
    let tables = metrics.into_iter().flat_map(Item::tables);
    if let Some(item) = tables.filter_map(|table| table.given("clients")).next() {
        let message = "`clients` has no effect: there is no `[clients]`";
        report.missing(item.key_span, message, "add `[clients]`, or remove it");
    }
}
