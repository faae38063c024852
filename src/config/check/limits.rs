//! `[limits]`, `[http2]` and `[timeouts]`: sizes, rates and times, most of them for client connections.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::values::{DAY_MS, read_duration_ms, read_timeout, section_table};
use crate::config::diagnostics::{Report, quoted};
use crate::config::limits::{Http2, Limits, Timeouts};
use crate::config::toml_reader::{Item, Table};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
const UNITS: [(&str, u64); 8] = [
    ("KiB", KIB),
    ("MiB", MIB),
    ("GiB", GIB),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

pub fn read_limits(item: Option<Item>, report: &mut Report) -> Limits {
    let mut limits = Limits {
        request_head: 64 * KIB as usize,
        request_fields: 100,
        max_body: None,
        min_request_rate: 240,
        rate_grace: Duration::from_secs(10),
        min_response_rate: 240,
    };
    let Some(mut table) = section_table(item, report) else { return limits };
    // The smallest read buffer that hyper accepts is 8 KiB.
    let head = table.get("request_head").and_then(|item| read_size(&item, 8 * KIB..=MIB, "\"64KiB\"", report));
    limits.request_head = head.map_or(limits.request_head, |bytes| bytes as usize);
    let fields = table.get("request_fields").and_then(|item| item.integer(1..=1000, report));
    limits.request_fields = fields.map_or(limits.request_fields, |fields| fields as usize);
    limits.max_body = table.get("max_body").and_then(|item| read_max_body(&item, report)).flatten();
    for (key, rate) in
        [("min_request_rate", &mut limits.min_request_rate), ("min_response_rate", &mut limits.min_response_rate)]
    {
        *rate = table.get(key).and_then(|item| self::read_rate(&item, report)).unwrap_or(*rate);
    }
    let grace = table.get("rate_grace").and_then(|item| read_duration_ms(&item, 1..=DAY_MS, limits.rate_grace, report));
    limits.rate_grace = grace.map_or(limits.rate_grace, Duration::from_millis);
    table.finish(report);
    limits
}

/// Reads the maximum size of a body in bytes; `Some(None)` is unlimited.
pub fn read_max_body(item: &Item, report: &mut Report) -> Option<Option<u64>> {
    match item.value {
        DeValue::String(text) if text == "unlimited" => Some(None),
        _ => read_size(item, 0..=u64::MAX / 2, "\"10MiB\"", report).map(Some),
    }
}

/// Reads a minimum rate in bytes per second; 0 disables the check.
pub fn read_rate(item: &Item, report: &mut Report) -> Option<u64> {
    read_size(item, 0..=GIB, "240", report)
}

/// Reads a size in bytes: a whole number, or a string with a unit.
fn read_size(item: &Item, range: RangeInclusive<u64>, example: &str, report: &mut Report) -> Option<u64> {
    let DeValue::String(text) = item.value else {
        return match item.value {
            DeValue::Integer(_) => item.integer(range, report),
            _ => item.wrong_type("a size", &item.fix_with(example), report),
        };
    };
    let bytes = UNITS.iter().find_map(|(unit, bytes)| {
        let digits = text.strip_suffix(unit)?.trim_end();
        let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u64>().ok()?.checked_mul(*bytes)
    });
    let (message, fix) = match bytes {
        Some(bytes) if range.contains(&bytes) => return Some(bytes),
        Some(_) => (
            format!("`{}` cannot be {}", item.key, quoted(text)),
            format!("write a size from `{}` to `{}` bytes", range.start(), range.end()),
        ),
        None => {
            let fix = "write a whole number of bytes, or one with `KiB`, `MiB` or `GiB`, such as";
            (format!("{} is not a size", quoted(text)), format!("{fix} `{example}`"))
        }
    };
    report.problem(item.span.clone(), message, fix);
    None
}

pub fn read_http2(item: Option<Item>, report: &mut Report) -> Http2 {
    let mut http2 = Http2 {
        h2c: true,
        max_concurrent_streams: 100,
        idle: Duration::from_secs(60),
        ping: Some(Duration::from_secs(30)),
        max_resets: 200,
        max_control_frames: 1000,
    };
    let Some(mut table) = section_table(item, report) else { return http2 };
    if let Some(h2c) = table.get("h2c").and_then(|item| item.boolean(report)) {
        http2.h2c = h2c;
    }
    for (key, number, max) in [
        ("max_concurrent_streams", &mut http2.max_concurrent_streams, 10_000),
        ("max_resets", &mut http2.max_resets, 1_000_000),
        ("max_control_frames", &mut http2.max_control_frames, 1_000_000),
    ] {
        if let Some(value) = table.get(key).and_then(|item| item.integer(1..=max, report)) {
            *number = value as u32;
        }
    }
    if let Some(ms) = table.get("idle").and_then(|item| read_duration_ms(&item, 1..=DAY_MS, http2.idle, report)) {
        http2.idle = Duration::from_millis(ms);
    }
    let ping = table.get("ping").and_then(|item| read_duration_ms(&item, 0..=DAY_MS, Duration::from_secs(30), report));
    if let Some(ms) = ping {
        http2.ping = (ms > 0).then(|| Duration::from_millis(ms));
    }
    table.finish(report);
    http2
}

pub fn read_timeouts(item: Option<Item>, report: &mut Report) -> Timeouts {
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

/// Reads the timeouts of one request, which a route can override.
pub fn read_request_timeouts(table: &mut Table, timeouts: &mut Timeouts, report: &mut Report) {
    read_timeout(table, "connect", &mut timeouts.connect, 1..=DAY_MS, report);
    read_timeout(table, "response_head", &mut timeouts.response_head, 1..=DAY_MS, report);
    read_timeout(table, "body", &mut timeouts.body, 1..=DAY_MS, report);
    if let Some(item) = table.get("request") {
        let ms = read_duration_ms(&item, 1..=DAY_MS, Duration::from_secs(300), report);
        timeouts.request = ms.map(Duration::from_millis);
    }
}
