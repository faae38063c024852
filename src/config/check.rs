//! From what the file says to what the gateway runs: parse, don't validate.
//!
//! Every setting becomes its final value here, or a problem; nothing is looked at again later. A
//! setting that is wrong is replaced by a stand-in, so that the rest of the file is checked as well:
//! a `Config` with a stand-in in it is never returned. This file opens no file and no socket.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;

use super::diagnostics::{Problem, Report, Span, quoted, quoted_list};
use super::limits::Timeouts;
use super::route::{EncodedSlash, ForwardPath, PathParameters, PathReading, TrailingSlash};
use super::toml_reader::{Item, Table, nearest, toml_errors};
use super::{AccessLog, Config, Counters, RateLimitStyle, ReadFile, ReadVariable};
use clients::DefinedPlans;
use redis::DefaultSharing;
use routes::Schemes;
use transom_limiter::rule::{OnOutage, Rule, Sharing};
use transom_limiter::window::duration_ms;

mod actions;
mod balance;
mod calendar_windows;
mod certificates;
mod clients;
mod cost;
mod http2;
mod jwt;
mod key;
mod limits;
mod listen;
mod overrides;
mod path;
mod redis;
mod redis_url;
mod refusal_response;
mod route_match;
mod routes;
pub mod rule_windows;
mod rules;
mod template;
mod trusted_proxies;
mod unreachable_routes;
mod upstream_tls;
mod upstreams;
mod window_table;

const HEADER_FORMATS: [(&str, RateLimitStyle); 4] = [
    ("ietf", RateLimitStyle::Ietf),
    ("legacy", RateLimitStyle::Legacy),
    ("both", RateLimitStyle::Both),
    ("off", RateLimitStyle::Off),
];

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// Reads a configuration, or returns everything that is wrong with it.
pub fn read_config(text: &str, files: ReadFile, variables: ReadVariable) -> Result<Config, Vec<Problem>> {
    let mut report = Report::new(text);
    let sound = toml_errors::skip_syntax_errors(text, &mut report);
    let (document, _) = DeTable::parse_recoverable(&sound);
    let mut config = read_top_level(Table::new(document.get_ref(), 0..0, "the file"), files, variables, &mut report);
    match report.into_problems() {
        problems if problems.is_empty() => {
            calendar_windows::fill_calendars(&mut config.rules);
            Ok(config)
        }
        problems => Err(problems),
    }
}

fn read_path_reading(top: &mut Table, report: &mut Report) -> PathReading {
    let slashes = [("refuse", EncodedSlash::Refuse), ("keep", EncodedSlash::Keep)];
    let encoded_slash = top.get("encoded_slash").and_then(|item| item.choice(&slashes, report));
    let parameters =
        [("keep", PathParameters::Keep), ("strip", PathParameters::Strip), ("refuse", PathParameters::Refuse)];
    let parameters = top.get("path_parameters").and_then(|item| item.choice(&parameters, report));
    let slashes = [("keep", TrailingSlash::Keep), ("ignore", TrailingSlash::Ignore)];
    let trailing_slash = top.get("trailing_slash").and_then(|item| item.choice(&slashes, report));
    PathReading {
        encoded_slash: encoded_slash.unwrap_or(EncodedSlash::Refuse),
        parameters: parameters.unwrap_or(PathParameters::Keep),
        trailing_slash: trailing_slash.unwrap_or(TrailingSlash::Keep),
    }
}

fn read_top_level(mut top: Table, files: ReadFile, variables: ReadVariable, report: &mut Report) -> Config {
    let workers = top.get("workers").and_then(|item| item.integer(1..=1024, report));
    let pid_file = top.get("pid_file").and_then(|item| read_pid_file(&item, report));
    let fields =
        top.get("headers").and_then(|item| item.choice(&HEADER_FORMATS, report)).unwrap_or(RateLimitStyle::Ietf);
    let path_reading = read_path_reading(&mut top, report);
    let paths = [("original", ForwardPath::Original), ("normalized", ForwardPath::Normalized)];
    let forward_path = top.get("forward_path").and_then(|item| item.choice(&paths, report));
    let before = report.count();
    let (listen, proxies) = listen::read_listen(top.get("listen"), files, report);
    let listen_is_sound = report.count() == before;
    let admin = listen::read_admin(top.get("admin"), report);
    let certs = listen.client_certs();
    let (counters, mut sharing) = read_counters(top.get("counters"), files, variables, report);
    let timeouts = read_timeouts(top.get("timeouts"), report);
    let http2 = http2::read_http2(top.get("http2"), report);
    let limits = limits::read_limits(top.get("limits"), report);
    let access_log = read_access_log(top.get("access_log"), report);
    let jwt = top.get("jwt");
    let upstreams = top.get("upstreams");
    let rules = top.get("rules");
    let clients = top.get("clients");
    let routes = top.require("routes", "write `[[routes]]`, then its `path` and its `upstream`");
    for key in ["redis", "shared"] {
        top.suggest_for(key, "counters", redis::TABLE_FIX);
    }
    let misspelt = top.finish(report);

    if misspelt.contains(&"counters") {
        sharing = DefaultSharing::Shared(Sharing::Lease, OnOutage::Local);
    }
    jwt::report_missing_or_unused_jwt(jwt.as_ref(), rules.as_ref(), clients.as_ref(), &misspelt, report);
    let jwt = jwt::read_jwt(jwt, files, report);
    let mut upstreams = upstreams::read_upstreams(upstreams, files, report);
    upstreams.complete &= !misspelt.contains(&"upstreams");
    let mut rules = rules::read_rules(rules, fields, certs, sharing, report);
    rules.complete &= !misspelt.contains(&"rules");
    // A trusted proxy says by which scheme it was asked. Addresses that could not be read may be of either.
    let any_scheme = proxies.is_some() || !listen_is_sound || misspelt.contains(&"listen");
    let schemes =
        Schemes { http: any_scheme || !listen.http.is_empty(), https: any_scheme || !listen.https.is_empty() };
    let routes = routes::read_routes(routes, path_reading, &upstreams, &rules, &timeouts, schemes, report);

    let plans = rules.entries.iter().flat_map(|rule| &rule.value.0.plans).map(|plan| plan.name.as_str()).collect();
    let clients =
        clients::read_clients(clients, &DefinedPlans { names: plans, complete: rules.complete }, certs, files, report);

    let (rules, looks): (Vec<Rule>, Vec<rules::RuleResponses>) = rules.into_values().into_iter().unzip();
    let (fields, refusals) = looks.into_iter().map(|looks| (looks.fields, looks.refusal)).unzip();
    Config {
        listen,
        admin,
        workers: workers.map(|workers| workers as usize),
        pid_file,
        counters,
        timeouts,
        http2,
        limits,
        trusted_proxies: proxies,
        access_log,
        clients,
        jwt,
        path_reading,
        forward_path: forward_path.unwrap_or(ForwardPath::Original),
        upstreams: upstreams.into_values(),
        rules,
        rate_limit_styles: fields,
        refusal_responses: refusals,
        routes,
    }
}

/// A table that may be left out and has a header of its own.
fn section_table<'d>(item: Option<Item<'d>>, report: &mut Report) -> Option<Table<'d>> {
    let item = item?;
    let header = format!("[{}]", item.key);
    item.table(format!("`{header}`"), &format!("write `{header}`, then its settings, each on a line"), report)
}

/// The counters, and how rules are counted that do not say it themselves.
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
    let mut usual = DefaultSharing::Own;
    if let Some(mut table) = section_table(item, report) {
        let capacity = table.get("capacity").and_then(|item| item.integer(64..=1_000_000_000, report));
        counters.capacity = capacity.map_or(counters.capacity, |capacity| capacity as usize);
        counters.file =
            table.get("file").and_then(|item| read_absolute_path(&item, "\"/run/transom/counters\"", report));
        let snapshot = table.get("snapshot");
        let at = snapshot.as_ref().map(|item| item.span.clone());
        counters.snapshot = snapshot.and_then(|item| read_absolute_path(&item, "\"/var/lib/transom/counts\"", report));
        read_timeout(&mut table, "snapshot_every", &mut counters.snapshot_every, 1000..=DAY_MS, report);
        let taken = |file: &PathBuf| ["", ".lock", ".new", ".old"].map(|ending| format!("{}{ending}", file.display()));
        let taken = counters.file.as_ref().map(taken).unwrap_or_default();
        let is_taken = |path: &&PathBuf| taken.iter().any(|taken| Path::new(taken) == path.as_path());
        if let (Some(at), Some(_)) = (at.clone(), counters.snapshot.as_ref().filter(is_taken)) {
            report.problem(at, "`snapshot` is `file`, or what lies beside it", "name another for `snapshot`");
        }
        if let Some(item) = table.get("shared") {
            (counters.shared, usual) = redis::read_shared(&item, files, variables, report);
            if let Some(at) = at {
                let message =
                    "`snapshot` is given, and `[counters.shared]`: tokens that were spent would be there again";
                report.problem(at, message, "remove `snapshot`; what is shared is counted in Redis");
            }
        }
        for key in ["redis", "mode", "on_outage", "prefix", "timeout"] {
            table.suggest_for(key, "shared", "write it below `[counters.shared]`");
        }
        if table.finish(report).contains(&"shared") {
            usual = DefaultSharing::Shared(Sharing::Lease, OnOutage::Local);
        }
    }
    (counters, usual)
}

/// The path of a file that is one and the same wherever the gateway is started.
fn read_absolute_path(item: &Item, example: &str, report: &mut Report) -> Option<PathBuf> {
    let word = item.string(example, report)?;
    if word.text.starts_with('/') && !word.text.ends_with('/') {
        return Some(PathBuf::from(word.text));
    }
    let message = format!("`{}` is {}, which is no absolute path of a file", item.key, quoted(word.text));
    report.problem(word.span, message, item.fix_with(example));
    None
}

fn read_timeouts(item: Option<Item>, report: &mut Report) -> Timeouts {
    let mut timeouts = Timeouts {
        proxy_protocol: Duration::from_secs(5),
        tls_handshake: Duration::from_secs(10),
        request_head: Duration::from_secs(30),
        connect: Duration::from_secs(5),
        response_head: Duration::from_secs(60),
        body: Duration::from_secs(60),
        upstream_idle: Duration::from_secs(60),
        tunnel: Duration::from_secs(60 * 60),
        drain: Duration::from_secs(30),
        upgrade: Duration::from_secs(60),
        request: None,
    };
    if let Some(mut table) = section_table(item, report) {
        read_timeout(&mut table, "proxy_protocol", &mut timeouts.proxy_protocol, 1..=DAY_MS, report);
        read_timeout(&mut table, "tls_handshake", &mut timeouts.tls_handshake, 1..=DAY_MS, report);
        read_timeout(&mut table, "request_head", &mut timeouts.request_head, 1..=DAY_MS, report);
        read_request_timeouts(&mut table, &mut timeouts, report);
        read_timeout(&mut table, "upstream_idle", &mut timeouts.upstream_idle, 1..=DAY_MS, report);
        read_timeout(&mut table, "tunnel", &mut timeouts.tunnel, 1..=DAY_MS, report);
        read_timeout(&mut table, "drain", &mut timeouts.drain, 0..=DAY_MS, report);
        read_timeout(&mut table, "upgrade", &mut timeouts.upgrade, 1..=DAY_MS, report);
        table.finish(report);
    }
    timeouts
}

/// Those of one request, which routes may have of their own.
fn read_request_timeouts(table: &mut Table, timeouts: &mut Timeouts, report: &mut Report) {
    read_timeout(table, "connect", &mut timeouts.connect, 1..=DAY_MS, report);
    read_timeout(table, "response_head", &mut timeouts.response_head, 1..=DAY_MS, report);
    read_timeout(table, "body", &mut timeouts.body, 1..=DAY_MS, report);
    if let Some(item) = table.get("request") {
        let ms = read_duration_ms(&item, 1..=DAY_MS, Duration::from_secs(300), report);
        timeouts.request = ms.map(Duration::from_millis);
    }
}

fn read_timeout(
    table: &mut Table,
    key: &'static str,
    timeout: &mut Duration,
    range: RangeInclusive<u64>,
    report: &mut Report,
) {
    let ms = table.get(key).and_then(|item| read_duration_ms(&item, range, *timeout, report));
    *timeout = ms.map_or(*timeout, Duration::from_millis);
}

/// A duration in milliseconds.
fn read_duration_ms(item: &Item, range: RangeInclusive<u64>, default: Duration, report: &mut Report) -> Option<u64> {
    let example = format!("\"{}\"", format_ms(default.as_millis() as u64));
    let word = item.string(&example, report)?;
    let (message, fix) = match duration_ms(word.text) {
        Some(ms) if range.contains(&ms) => return Some(ms),
        Some(ms) if ms > *range.end() => {
            (format!("{} is too long", quoted(word.text)), format!("at most `{}`", format_ms(*range.end())))
        }
        Some(0) => (format!("`{}` cannot be {}", item.key, quoted(word.text)), item.fix_with(&example)),
        Some(_) => (format!("{} is too short", quoted(word.text)), format!("at least `{}ms`", range.start())),
        None => {
            let seconds = word.text.parse::<u32>();
            let fix = match seconds {
                Ok(seconds) => format!("{}, if seconds are meant", item.fix_with(&format!("\"{seconds}s\""))),
                Err(_) => format!("write a whole number with `ms`, `s`, `m`, `h` or `d`, such as `{example}`"),
            };
            (format!("{} is no duration", quoted(word.text)), fix)
        }
    };
    report.problem(word.span, message, fix);
    None
}

/// A duration as operators write it.
fn format_ms(ms: u64) -> String {
    match ms {
        DAY_MS => "1d".to_owned(),
        ms if ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    }
}

fn read_pid_file(item: &Item, report: &mut Report) -> Option<PathBuf> {
    let example = "\"/run/transom/pid\"";
    let path = item.string(example, report)?;
    if path.text.is_empty() {
        report.problem(path.span, "`pid_file` is empty", format!("{}, or leave it out", item.fix_with(example)));
        return None;
    }
    Some(PathBuf::from(path.text))
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

/// What a section such as `[rules.NAME]` defines, in the order of the file.
struct Definitions<T> {
    entries: Vec<Definition<T>>,
    /// Whether all that the operator meant to define is here, as far as can be told.
    complete: bool,
}

struct Definition<T> {
    name: String,
    /// Of the name.
    span: Span,
    value: T,
}

impl<T> Definitions<T> {
    /// Reads each table of a section; `read` takes its name, its place and, if it is one, the table.
    fn read(
        item: Option<Item>,
        report: &mut Report,
        mut read: impl FnMut(&str, Option<Table>, &mut Report) -> T,
    ) -> Definitions<T> {
        let mut section = Definitions { entries: Vec::new(), complete: !report.has_syntax_errors };
        let Some(item) = item else { return section };
        let header = format!("[{}.NAME]", item.key);
        let fix = format!("write `{header}`, then its settings, each on a line");
        let Some(table) = item.table(format!("`[{}]`", item.key), &fix, report) else {
            section.complete = false;
            return section;
        };
        for entry in table.items() {
            check_name(&entry, report);
            let title = format!("`[{}.{}]`", item.key, entry.key);
            let value = read(entry.key, entry.table(title, &fix, report), report);
            section.entries.push(Definition { name: entry.key.to_owned(), span: entry.key_span, value });
        }
        section
    }

    /// The position of what is called so; a name that nothing has is reported where it stands.
    fn find(&self, what: &str, name: &str, span: Span, report: &mut Report) -> Option<usize> {
        let found = self.entries.iter().position(|entry| entry.name == name);
        if found.is_none() && self.complete {
            let names = || self.entries.iter().map(|entry| entry.name.as_str());
            let fix = match nearest(name, names()) {
                Some(guess) => format!("did you mean {}?", quoted(guess)),
                None if self.entries.is_empty() => format!("define it: `[{what}s.{}]`", nearest_name(name)),
                None => {
                    format!("define it: `[{what}s.{}]`; there is {}", nearest_name(name), quoted_list(names(), "and"))
                }
            };
            report.problem(span, format!("{what} {} is not defined", quoted(name)), fix);
        }
        found
    }

    fn into_values(self) -> Vec<T> {
        self.entries.into_iter().map(|entry| entry.value).collect()
    }
}

/// Names of rules and upstreams go into header fields and metrics as they are.
fn check_name(entry: &Item, report: &mut Report) {
    if entry.key != nearest_name(entry.key) {
        let message = format!("{} cannot be a name", quoted(entry.key));
        let fix = format!("write {}: at most 64 letters, digits, `_`, `-` and `.`", quoted(&nearest_name(entry.key)));
        report.problem(entry.key_span.clone(), message, fix);
    }
}

/// The nearest text that can be a name.
fn nearest_name(name: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let label: String = name.chars().map(fits).take(64).collect();
    if label.is_empty() { String::from("NAME") } else { label }
}
