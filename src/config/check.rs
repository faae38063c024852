//! Turns the TOML document into a [`Config`]: every setting becomes its final value, or a problem is reported.
//!
//! An invalid setting is replaced by a placeholder, so that the rest of the file is checked as well. A `Config` with
//! placeholders is never returned. This module opens no file and no socket; the report has functions that read files and
//! environment variables.

use toml::de::DeTable;

use super::calendar;
use super::clients::{DefinedPlans, read_clients};
use super::counters::Counters;
use super::diagnostics::{Problem, Report};
use super::jwt::{read_jwt, report_missing_or_unused_jwt};
use super::limits::{Http2, Limits, Timeouts};
use super::listen::{Admin, Listen};
use super::path::PathReading;
use super::redis::{StoreConfig, TABLE_FIX};
use super::route::{RouteContext, read_routes};
use super::rule::{RuleResponses, read_rules};
use super::settings::Section;
use super::toml_reader::{Table, toml_errors};
use super::upstream::read_upstreams;
use super::{AccessLogSettings, Config, General};
use transom_limiter::rule::Rule;

/// Reads the configuration that a report is on, or returns all problems in it.
pub fn read_config(mut report: Report) -> Result<Config, Vec<Problem>> {
    let top_level = General::settings().into_iter().chain(PathReading::settings());
    report.top_level_keys = top_level.map(|setting| setting.key).collect();
    let valid_text = toml_errors::skip_syntax_errors(report.text, &mut report);
    let (document, _) = DeTable::parse_recoverable(&valid_text);
    let mut config = read_top_level(Table::new(document.get_ref(), 0..0, "the file"), &mut report);
    match report.into_problems() {
        problems if problems.is_empty() => {
            calendar::fill_calendars(&mut config.rules);
            Ok(config)
        }
        problems => Err(problems),
    }
}

fn read_top_level(mut top: Table, report: &mut Report) -> Config {
    let general = General::read(&mut top, report);
    let path_reading = PathReading::read(&mut top, report);
    let before = report.count();
    let listen = Listen::read_section(top.get("listen"), report);
    let listen_is_valid = report.count() == before;
    let admin = Admin::read_section(top.get("admin"), report);
    let certs = listen.client_certs();
    let counters = Counters::read_section(top.get("counters"), report);
    let timeouts = Timeouts::read_section(top.get("timeouts"), report);
    let http2 = Http2::read_section(top.get("http2"), report);
    let limits = Limits::read_section(top.get("limits"), report);
    let access_log = AccessLogSettings::read_section(top.get("access_log"), report).file;
    let jwt = top.get("jwt");
    let upstreams = top.get("upstreams");
    let rules = top.get("rules");
    let clients = top.get("clients");
    let routes = top.require("routes", "write `[[routes]]`, then its `path` and its `upstream`");
    for key in ["redis", "shared"] {
        top.suggest_for(key, "counters", TABLE_FIX);
    }
    let misspelled = top.finish(report);

    let placeholder = misspelled.contains(&"counters").then(|| StoreConfig::placeholder().default_sharing());
    let sharing = counters.default_sharing().or(placeholder);
    report_missing_or_unused_jwt(jwt.as_ref(), rules.as_ref(), clients.as_ref(), &misspelled, report);
    let jwt = read_jwt(jwt, report);
    let mut upstreams = read_upstreams(upstreams, report);
    upstreams.complete &= !misspelled.contains(&"upstreams");
    let mut rules = read_rules(rules, general.headers, certs, sharing, report);
    rules.complete &= !misspelled.contains(&"rules");
    // A trusted proxy sends the scheme of the original request. Invalid addresses may belong to either scheme.
    let any_scheme = !listen.trusted_proxies.is_empty() || !listen_is_valid || misspelled.contains(&"listen");
    let context = RouteContext {
        reading: path_reading,
        upstreams: &upstreams,
        rules: &rules,
        timeouts: &timeouts,
        http: any_scheme || !listen.http.is_empty(),
        https: any_scheme || !listen.https.is_empty(),
    };
    let routes = read_routes(routes, &context, report);

    let plans = rules.entries.iter().flat_map(|rule| &rule.value.0.plans).map(|plan| plan.name.as_str()).collect();
    let clients = read_clients(clients, &DefinedPlans { names: plans, complete: rules.complete }, certs, report);

    let (rules, responses): (Vec<Rule>, Vec<RuleResponses>) = rules.into_values().into_iter().unzip();
    let count_when = responses.iter().map(|responses| responses.count_when.clone()).collect();
    let (rate_limit_styles, refusal_responses) =
        responses.into_iter().map(|responses| (responses.rate_limit_style, responses.refusal)).unzip();
    Config {
        listen,
        admin,
        general,
        counters,
        timeouts,
        http2,
        limits,
        access_log,
        clients,
        jwt,
        path_reading,
        upstreams: upstreams.into_values(),
        rules,
        rate_limit_styles,
        refusal_responses,
        count_when,
        routes,
    }
}
