//! Turns the TOML document into a [`Config`]: every setting becomes its final value, or a problem is reported.
//!
//! An invalid setting is replaced by a placeholder, so that the rest of the file is checked as well. A `Config` with
//! placeholders is never returned. This module opens no file and no socket; the caller passes functions that read files
//! and environment variables.

use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

use super::diagnostics::{Problem, Report, quoted};
use super::limits::{Http2, Limits, Timeouts};
use super::route::PathReading;
use super::settings::{DAY_MS, Section, Time, section_table};
use super::toml_reader::{Item, Table, toml_errors};
use super::{AccessLog, Config, Counters, General, ReadFile, ReadVariable};
use clients::DefinedPlans;
use redis::DefaultSharing;
use routes::Schemes;
use transom_limiter::rule::{OnOutage, Rule, Sharing};

mod actions;
mod calendar_windows;
mod clients;
mod jwt;
pub mod key;
mod listen;
mod overrides;
mod path;
mod redis;
mod redis_url;
mod route_match;
mod routes;
pub mod rule_windows;
mod rules;
mod template;
mod upstream_tls;
mod upstreams;
mod values;

/// Reads a configuration, or returns all problems in it.
pub fn read_config(text: &str, files: ReadFile, variables: ReadVariable) -> Result<Config, Vec<Problem>> {
    let mut report = Report::new(text);
    let valid_text = toml_errors::skip_syntax_errors(text, &mut report);
    let (document, _) = DeTable::parse_recoverable(&valid_text);
    let mut config = read_top_level(Table::new(document.get_ref(), 0..0, "the file"), files, variables, &mut report);
    match report.into_problems() {
        problems if problems.is_empty() => {
            calendar_windows::fill_calendars(&mut config.rules);
            Ok(config)
        }
        problems => Err(problems),
    }
}

fn read_top_level(mut top: Table, files: ReadFile, variables: ReadVariable, report: &mut Report) -> Config {
    let general = General::read(&mut top, report);
    let path_reading = PathReading::read(&mut top, report);
    let before = report.count();
    let (listen, trusted_proxies) = listen::read_listen(top.get("listen"), files, report);
    let listen_is_valid = report.count() == before;
    let admin = listen::read_admin(top.get("admin"), report);
    let certs = listen.client_certs();
    let (counters, mut sharing) = read_counters(top.get("counters"), files, variables, report);
    let timeouts = Timeouts::read_section(top.get("timeouts"), report);
    let http2 = Http2::read_section(top.get("http2"), report);
    let limits = Limits::read_section(top.get("limits"), report);
    let access_log = read_access_log(top.get("access_log"), report);
    let jwt = top.get("jwt");
    let upstreams = top.get("upstreams");
    let rules = top.get("rules");
    let clients = top.get("clients");
    let routes = top.require("routes", "write `[[routes]]`, then its `path` and its `upstream`");
    for key in ["redis", "shared"] {
        top.suggest_for(key, "counters", redis::TABLE_FIX);
    }
    let misspelled = top.finish(report);

    if misspelled.contains(&"counters") {
        sharing = DefaultSharing::Shared(Sharing::Lease, OnOutage::Local);
    }
    jwt::report_missing_or_unused_jwt(jwt.as_ref(), rules.as_ref(), clients.as_ref(), &misspelled, report);
    let jwt = jwt::read_jwt(jwt, files, report);
    let mut upstreams = upstreams::read_upstreams(upstreams, files, report);
    upstreams.complete &= !misspelled.contains(&"upstreams");
    let mut rules = rules::read_rules(rules, general.headers, certs, sharing, report);
    rules.complete &= !misspelled.contains(&"rules");
    // A trusted proxy sends the scheme of the original request. Invalid addresses may belong to either scheme.
    let any_scheme = trusted_proxies.is_some() || !listen_is_valid || misspelled.contains(&"listen");
    let schemes =
        Schemes { http: any_scheme || !listen.http.is_empty(), https: any_scheme || !listen.https.is_empty() };
    let routes = routes::read_routes(routes, path_reading, &upstreams, &rules, &timeouts, schemes, report);

    let plans = rules.entries.iter().flat_map(|rule| &rule.value.0.plans).map(|plan| plan.name.as_str()).collect();
    let clients =
        clients::read_clients(clients, &DefinedPlans { names: plans, complete: rules.complete }, certs, files, report);

    let (rules, responses): (Vec<Rule>, Vec<rules::RuleResponses>) = rules.into_values().into_iter().unzip();
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
        trusted_proxies,
        access_log,
        clients,
        jwt,
        path_reading,
        upstreams: upstreams.into_values(),
        rules,
        rate_limit_styles,
        refusal_responses,
        routes,
    }
}

/// Reads `[counters]`: the settings, and how rules are shared by default.
fn read_counters(
    item: Option<Item>,
    files: ReadFile,
    variables: ReadVariable,
    report: &mut Report,
) -> (Counters, DefaultSharing) {
    let mut counters = Counters {
        capacity: 1_000_000,
        file: None,
        snapshot: None,
        snapshot_every: Duration::from_secs(5),
        shared: None,
    };
    let mut sharing = DefaultSharing::Unshared;
    if let Some(mut table) = section_table(item, report) {
        let capacity = table.get("capacity").and_then(|item| item.integer(64..=1_000_000_000, report));
        counters.capacity = capacity.map_or(counters.capacity, |capacity| capacity as usize);
        counters.file =
            table.get("file").and_then(|item| read_absolute_path(&item, "\"/run/transom/counters\"", report));
        let snapshot = table.get("snapshot");
        let snapshot_span = snapshot.as_ref().map(|item| item.span.clone());
        counters.snapshot = snapshot.and_then(|item| read_absolute_path(&item, "\"/var/lib/transom/counts\"", report));
        counters.snapshot_every = table.read("snapshot_every", &Time(counters.snapshot_every, 1000..=DAY_MS), report);
        let file_paths =
            |file: &PathBuf| ["", ".lock", ".new", ".old"].map(|ending| format!("{}{ending}", file.display()));
        let file_paths = counters.file.as_ref().map(file_paths).unwrap_or_default();
        let is_file_path = |path: &&PathBuf| file_paths.iter().any(|other| Path::new(other) == path.as_path());
        if let (Some(span), Some(_)) = (snapshot_span.clone(), counters.snapshot.as_ref().filter(is_file_path)) {
            report.problem(
                span,
                "`snapshot` is the path of `file` or of one of its companion files",
                "write another path for `snapshot`",
            );
        }
        if let Some(item) = table.get("shared") {
            (counters.shared, sharing) = redis::read_shared(&item, files, variables, report);
            if let Some(span) = snapshot_span {
                let message =
                    "`snapshot` and `[counters.shared]` are both given: a restored snapshot would return spent tokens";
                report.problem(span, message, "remove `snapshot`; shared counters are kept in Redis");
            }
        }
        for key in ["redis", "mode", "on_outage", "prefix", "timeout"] {
            table.suggest_for(key, "shared", "write it in `[counters.shared]`");
        }
        if table.finish(report).contains(&"shared") {
            sharing = DefaultSharing::Shared(Sharing::Lease, OnOutage::Local);
        }
    }
    (counters, sharing)
}

/// Reads the absolute path of a file, which does not depend on the working directory.
fn read_absolute_path(item: &Item, example: &str, report: &mut Report) -> Option<PathBuf> {
    let word = item.string(example, report)?;
    if word.text.starts_with('/') && !word.text.ends_with('/') {
        return Some(PathBuf::from(word.text));
    }
    let message = format!("`{}` is {}, which is not the absolute path of a file", item.key, quoted(word.text));
    report.problem(word.span, message, item.fix_with(example));
    None
}

fn read_access_log(item: Option<Item>, report: &mut Report) -> Option<AccessLog> {
    let mut table = section_table(item, report)?;
    let file = table.require("file", "write `file = \"stdout\"`, or the path of a file");
    let file = file.and_then(|item| item.string("\"stdout\"", report));
    table.finish(report);
    let file = file?;
    match file.text {
        "" => {
            report.problem(file.span, "`file` is empty", "write `file = \"stdout\"`, or the path of a file");
            None
        }
        "stdout" => Some(AccessLog::Stdout),
        path => Some(AccessLog::File(PathBuf::from(path))),
    }
}
