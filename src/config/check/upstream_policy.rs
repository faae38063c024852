//! Load balancing, health checks, ejection, retries and limits of an upstream.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::key;
use super::values::read_duration_ms;
use crate::config::diagnostics::{Report, quoted};
use crate::config::settings::DAY_MS;
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::config::upstream::{Ejection, HealthChecks, LoadBalancing, Retries, UpstreamLimits, UpstreamPolicy};
use transom_limiter::key::KeyPart;

const WEIGHT_MAX: u64 = 1000;
const COUNT_MAX: u64 = 1_000_000;
const HASH_EXAMPLE: &str = "{ hash = \"ip\" }";
const STATUSES_EXAMPLE: &str = "[502, 503, 504]";
const CAUSES: [&str; 3] = ["connect-failure", "reset", "timeout"];

/// The settings of an upstream that apply to its servers as a group.
pub struct PolicySettings<'d> {
    balance: Option<Item<'d>>,
    slow_start: Option<Item<'d>>,
    health: Option<Item<'d>>,
    ejection: Option<Item<'d>>,
    retries: Option<Item<'d>>,
    max_connections: Option<Item<'d>>,
    max_idle_connections: Option<Item<'d>>,
    max_pending: Option<Item<'d>>,
    max_requests: Option<Item<'d>>,
}

impl<'d> PolicySettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> PolicySettings<'d> {
        PolicySettings {
            balance: table.get("balance"),
            slow_start: table.get("slow_start"),
            health: table.get("health"),
            ejection: table.get("ejection"),
            retries: table.get("retries"),
            max_connections: table.get("max_connections"),
            max_idle_connections: table.get("max_idle_connections"),
            max_pending: table.get("max_pending"),
            max_requests: table.get("max_requests"),
        }
    }

    /// Reports all these settings for an upstream without servers.
    pub fn report_without_servers(self, report: &mut Report) {
        let all = [
            self.balance,
            self.slow_start,
            self.health,
            self.ejection,
            self.retries,
            self.max_connections,
            self.max_idle_connections,
            self.max_pending,
            self.max_requests,
        ];
        for item in all.into_iter().flatten() {
            let message = format!("`{}` has no effect: the upstream has no `servers`", item.key);
            report.missing(item.key_span, message, "remove it, or write `servers` instead of `builtin`");
        }
    }

    pub fn read(self, report: &mut Report) -> UpstreamPolicy {
        let limited = self.max_connections.is_some();
        let mut count = |item: Option<Item>| item.and_then(|item| read_u32(&item, 1..=COUNT_MAX, report));
        let max_requests = count(self.max_requests);
        let max_connections = count(self.max_connections);
        if let (Some(item), false) = (&self.max_pending, limited) {
            let message = "`max_pending` has no effect without `max_connections`";
            report.missing(item.key_span.clone(), message, "add `max_connections`, or remove it");
        }
        let max_pending = self.max_pending.and_then(|item| read_u32(&item, 0..=COUNT_MAX, report));
        let max_idle = self.max_idle_connections.and_then(|item| read_u32(&item, 0..=COUNT_MAX, report));
        let default = UpstreamPolicy::default();
        let slow_start =
            self.slow_start.and_then(|item| read_duration(&item, 0..=DAY_MS, Duration::from_secs(30), report));
        UpstreamPolicy {
            balance: self.balance.and_then(|item| read_balance(&item, report)).unwrap_or(default.balance),
            slow_start: slow_start.unwrap_or(default.slow_start),
            health: self.health.and_then(|item| read_health(&item, report)),
            ejection: self.ejection.map_or(default.ejection, |item| read_ejection(&item, report)),
            retries: self.retries.map_or(default.retries, |item| read_retries(&item, report)),
            limits: UpstreamLimits {
                max_connections,
                max_idle_connections: max_idle.unwrap_or(default.limits.max_idle_connections),
                max_pending: max_pending.unwrap_or(default.limits.max_pending),
                max_requests,
            },
        }
    }
}

/// Reads the list `servers`: each item is a URL, or a table with `url` and `weight`.
pub fn read_server_list<'d>(item: &Item<'d>, example: &str, report: &mut Report) -> Option<Vec<(SpannedStr<'d>, u32)>> {
    let DeValue::Array(_) = item.value else {
        return item.strings(example, report).map(|words| words.into_iter().map(|word| (word, 1)).collect());
    };
    let items = item.list(example, report)?;
    let read = |item: &Item<'d>| match item.value {
        DeValue::Table(_) => {
            let fix = "write `{ url = \"http://127.0.0.1:9001\", weight = 3 }`";
            let mut table = item.table("a server", fix, report)?;
            let url = table.require("url", fix).and_then(|item| item.string("\"http://127.0.0.1:9001\"", report));
            let weight = table.get("weight").and_then(|item| read_u32(&item, 1..=WEIGHT_MAX, report));
            table.finish(report);
            Some((url?, weight.unwrap_or(1)))
        }
        _ => item.string(example, report).map(|word| (word, 1)),
    };
    let servers: Vec<_> = items.iter().filter_map(read).collect();
    (items.is_empty() || !servers.is_empty()).then_some(servers)
}

fn read_balance(item: &Item, report: &mut Report) -> Option<LoadBalancing> {
    let DeValue::Table(_) = item.value else {
        let words = [("least-requests", Some(true)), ("round-robin", Some(false)), ("hash", None)];
        let chosen = item.choice(&words, report)?;
        if chosen.is_none() {
            let fix = item.fix_with(HASH_EXAMPLE);
            report.problem(item.span.clone(), "`balance = \"hash\"` does not say what is hashed", fix);
        }
        return chosen.map(|least| if least { LoadBalancing::LeastRequests } else { LoadBalancing::RoundRobin });
    };
    let mut table = item.table("`balance`", &item.fix_with(HASH_EXAMPLE), report)?;
    let parts = table.require("hash", item.fix_with(HASH_EXAMPLE));
    let parts = parts.and_then(|item| read_hash_parts(&item, report));
    table.finish(report);
    parts.map(LoadBalancing::Hash)
}

/// Reads the key parts to hash. Only parts that exist on every route are allowed.
fn read_hash_parts(item: &Item, report: &mut Report) -> Option<Vec<KeyPart>> {
    let parts = key::read_parts(item, &KeyPart::Ip { v4_prefix: 32, v6_prefix: 128 }, report)?;
    for part in &parts {
        let why = match part {
            KeyPart::Param(_) => "`param` cannot be hashed: it belongs to one route, and an upstream can have several",
            KeyPart::Jwt(_) => "a claim cannot be hashed: tokens are verified only for rules that count by a claim",
            KeyPart::Global => "`global` cannot be hashed: one server would receive all requests",
            KeyPart::Ip { .. }
            | KeyPart::Header(_)
            | KeyPart::Cookie(_)
            | KeyPart::Query(_)
            | KeyPart::ClientCert
            | KeyPart::Host
            | KeyPart::Method
            | KeyPart::Path
            | KeyPart::Route => continue,
        };
        let fix =
            "hash `ip`, `header:NAME`, `cookie:NAME`, `query:NAME`, `client-cert`, `host`, `method`, `path` or `route`";
        report.problem(item.span.clone(), why, fix);
        return None;
    }
    Some(parts)
}

fn read_health(item: &Item, report: &mut Report) -> Option<HealthChecks> {
    let mut table = item.table("`health`", "write `health = { path = \"/healthz\" }`", report)?;
    let path = table.require("path", "write `path = \"/healthz\"`, or `path = \"/\"`");
    let default = HealthChecks::default();
    let mut get = |name| table.get(name);
    let (method, host, statuses) = (get("method"), get("host"), get("status"));
    let (interval, limit) = (get("interval"), get("timeout"));
    let (healthy, unhealthy) = (get("healthy_after"), get("unhealthy_after"));
    table.finish(report);
    let streak = |item: Option<Item>, default, report: &mut Report| {
        item.and_then(|item| read_u32(&item, 1..=1000, report)).unwrap_or(default)
    };
    let time_or = |item: Option<Item>, default: Duration, report: &mut Report| {
        item.and_then(|item| read_duration(&item, 10..=DAY_MS, default, report)).unwrap_or(default)
    };
    let method =
        method.and_then(|item| item.choice(&[("GET", "GET"), ("HEAD", "HEAD"), ("OPTIONS", "OPTIONS")], report));
    Some(HealthChecks {
        path: path.and_then(|item| read_health_path(&item, report)).unwrap_or(default.path),
        method: method.map_or(default.method, str::to_owned),
        host: host.and_then(|item| read_health_host(&item, report)),
        interval: time_or(interval, default.interval, report),
        timeout: time_or(limit, default.timeout, report),
        healthy_after: streak(healthy, default.healthy_after, report),
        unhealthy_after: streak(unhealthy, default.unhealthy_after, report),
        statuses: statuses.map_or(default.statuses, |item| read_status_ranges(&item, report)),
    })
}

fn read_health_path(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"/healthz\"", report)?;
    let is_valid = |byte: u8| byte.is_ascii_graphic() && !b"#\"<>\\^`{|}".contains(&byte);
    if !word.text.starts_with('/') || !word.text.bytes().all(is_valid) {
        let message = format!("{} is not a valid request path", quoted(word.text));
        report.problem(word.span, message, "write a path such as `\"/healthz\"`, with other characters as `%XX`");
        return None;
    }
    Some(word.text.to_owned())
}

fn read_health_host(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"api.example.com\"", report)?;
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if word.text.is_empty() || !word.text.bytes().all(is_valid) {
        let message = format!("{} is not a valid Host field", quoted(word.text));
        report.problem(word.span, message, "write a host such as `\"api.example.com\"`");
        return None;
    }
    Some(word.text.to_owned())
}

/// Reads status codes and ranges of status codes.
fn read_status_ranges(item: &Item, report: &mut Report) -> Vec<RangeInclusive<u16>> {
    let items = match item.value {
        DeValue::Array(_) => item.list("[\"200-299\"]", report).unwrap_or_default(),
        _ => vec![item.clone()],
    };
    if items.is_empty() {
        report.problem(item.span.clone(), "`status` is an empty list", item.fix_with("\"200-299\""));
    }
    let read = |item: &Item| {
        if let DeValue::Integer(_) = item.value {
            let status = item.integer(100..=599, report).and_then(|status| u16::try_from(status).ok())?;
            return Some(status..=status);
        }
        let word = item.string("\"200-299\"", report)?;
        let (from, to) = word.text.split_once('-').unwrap_or((word.text, word.text));
        let status = |text: &str| text.trim().parse().ok().filter(|status| (100..=599).contains(status));
        let range = status(from).zip(status(to)).filter(|(from, to)| from <= to);
        if range.is_none() {
            let message = format!("{} is not a range of status codes", quoted(word.text));
            report.problem(word.span, message, "write a range such as `\"200-299\"`, or a status such as `204`");
        }
        range.map(|(from, to)| from..=to)
    };
    items.iter().filter_map(read).collect()
}

fn read_ejection(item: &Item, report: &mut Report) -> Option<Ejection> {
    let default = Ejection::default();
    if let DeValue::Boolean(_) = item.value {
        return item.boolean(report).filter(|on| *on).map(|_| default);
    }
    let fix = "write `ejection = { failures = 5 }`, or `ejection = false`";
    let Some(mut table) = item.table("`ejection`", fix, report) else { return Some(default) };
    let failures = table.get("failures").and_then(|item| read_u32(&item, 1..=1000, report));
    let statuses = table.get("statuses").map(|item| read_error_statuses(&item, report));
    let (first, longest) = (table.get("time"), table.get("max_time"));
    let share = table.get("max_ejected").and_then(|item| read_percent(&item, report));
    table.finish(report);
    let time_or = |item: &Option<Item>, default: Duration, report: &mut Report| {
        item.as_ref().and_then(|item| read_duration(item, 1..=DAY_MS, default, report)).unwrap_or(default)
    };
    let first_time = time_or(&first, default.time, report);
    let max_time = time_or(&longest, default.max_time.max(first_time), report);
    if let (Some(item), true) = (&longest, max_time < first_time) {
        report.problem(item.span.clone(), "`max_time` is shorter than `time`", "write a longer time, or remove it");
    }
    Some(Ejection {
        failures: failures.unwrap_or(default.failures),
        statuses: statuses.unwrap_or(default.statuses),
        time: first_time,
        max_time,
        max_ejected: share.and_then(|share| u8::try_from(share).ok()).unwrap_or(default.max_ejected),
    })
}

fn read_retries(item: &Item, report: &mut Report) -> Retries {
    let default = Retries::default();
    if let DeValue::Boolean(_) = item.value {
        return if item.boolean(report) == Some(false) { Retries::none() } else { default };
    }
    let fix = "write `retries = { attempts = 2 }`, or `retries = false`";
    let Some(mut table) = item.table("`retries`", fix, report) else { return default };
    let attempts = table.get("attempts").and_then(|item| read_u32(&item, 0..=10, report));
    let causes = table.get("on");
    let limit = table.get("try_timeout");
    let budget = table.get("budget").and_then(|item| read_percent(&item, report));
    let budget_min = table.get("budget_min").and_then(|item| read_u32(&item, 0..=COUNT_MAX, report));
    table.finish(report);
    let mut retries = Retries {
        attempts,
        try_timeout: limit.and_then(|item| read_duration(&item, 1..=DAY_MS, Duration::from_secs(2), report)),
        budget: budget.unwrap_or(default.budget),
        budget_min: budget_min.unwrap_or(default.budget_min),
        ..default
    };
    if let Some(item) = causes {
        read_retry_causes(&item, &mut retries, report);
    }
    retries
}

/// Reads the conditions of a retry: names, and status codes with or without quotes.
fn read_retry_causes(item: &Item, retries: &mut Retries, report: &mut Report) {
    let example = "[\"connect-failure\", \"reset\", 503]";
    let items = match item.value {
        DeValue::Array(_) => item.list(example, report).unwrap_or_default(),
        _ => vec![item.clone()],
    };
    (retries.on_connect_failure, retries.on_reset, retries.on_timeout) = (false, false, false);
    for item in items {
        if let DeValue::Integer(_) = item.value {
            retries.on_statuses.extend(read_error_status(&item, report));
            continue;
        }
        let Some(word) = item.string(example, report) else { continue };
        match word.text {
            "connect-failure" => retries.on_connect_failure = true,
            "reset" => retries.on_reset = true,
            "timeout" => retries.on_timeout = true,
            text => match text.parse().ok().filter(|status| (400..=599).contains(status)) {
                Some(status) => retries.on_statuses.push(status),
                None => {
                    let fix = match crate::config::toml_reader::nearest(text, CAUSES) {
                        Some(guess) => format!("did you mean `\"{guess}\"`?"),
                        None => {
                            String::from("write `connect-failure`, `reset`, `timeout`, or a status code such as `503`")
                        }
                    };
                    report.problem(word.span, format!("{} is not a retry condition", quoted(text)), fix);
                }
            },
        }
    }
}

fn read_error_statuses(item: &Item, report: &mut Report) -> Vec<u16> {
    let items = item.list(STATUSES_EXAMPLE, report).unwrap_or_default();
    items.iter().filter_map(|item| read_error_status(item, report)).collect()
}

/// Reads an error status code, from 400 to 599.
fn read_error_status(item: &Item, report: &mut Report) -> Option<u16> {
    item.integer(400..=599, report).and_then(|status| u16::try_from(status).ok())
}

/// Reads a percentage, with or without `%`.
fn read_percent(item: &Item, report: &mut Report) -> Option<u32> {
    let DeValue::String(text) = item.value else { return read_u32(item, 0..=100, report) };
    let percent = text.strip_suffix('%').and_then(|digits| digits.trim().parse().ok());
    let percent = percent.filter(|percent| *percent <= 100);
    if percent.is_none() {
        let message = format!("`{}` cannot be {}", item.key, quoted(text));
        report.problem(item.span.clone(), message, "write a whole number from `0` to `100`");
    }
    percent
}

fn read_u32(item: &Item, range: RangeInclusive<u64>, report: &mut Report) -> Option<u32> {
    item.integer(range, report).and_then(|number| u32::try_from(number).ok())
}

fn read_duration(item: &Item, range: RangeInclusive<u64>, default: Duration, report: &mut Report) -> Option<Duration> {
    read_duration_ms(item, range, default, report).map(Duration::from_millis)
}
