//! What clients may do on one HTTP/2 connection.

use std::time::Duration;

use super::{DAY_MS, read_duration_ms, section_table};
use crate::config::diagnostics::Report;
use crate::config::limits::Http2;
use crate::config::toml_reader::Item;

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
    for (key, number, most) in [
        ("max_concurrent_streams", &mut http2.max_concurrent_streams, 10_000),
        ("max_resets", &mut http2.max_resets, 1_000_000),
        ("max_control_frames", &mut http2.max_control_frames, 1_000_000),
    ] {
        if let Some(value) = table.get(key).and_then(|item| item.integer(1..=most, report)) {
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
