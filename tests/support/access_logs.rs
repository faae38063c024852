//! Generates access logs as a busy service writes them: few clients send most requests, the rate follows the day, and some
//! clients send bursts. Equal seeds make equal logs.

use std::io::{self, Write};

/// The start of every log: 2023-11-14T00:00:00Z, Unix milliseconds.
pub const START_MS: u64 = 1_699_920_000_000;
const DAY_MS: f64 = 86_400_000.0;
const PATHS: [&str; 6] =
    ["/api/search?q=shoes", "/api/items/1234", "/api/items/77?fields=name", "/api/cart", "/login", "/static/app.css"];
/// One in so many requests starts a burst.
const BURST_EVERY: u64 = 2000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogForm {
    Combined,
    /// As this gateway writes it.
    Transom,
}

/// What a log is like.
#[derive(Clone, Copy, Debug)]
pub struct LogShape {
    pub form: LogForm,
    pub lines: u64,
    pub clients: u32,
    pub seed: u64,
}

/// Writes the log of one day.
pub fn write_log(out: &mut impl Write, shape: LogShape) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(shape.seed);
    let mut now_ms = 0.0;
    let (mut burst_client, mut burst_left) = (0, 0_u32);
    for _ in 0..shape.lines {
        // Four times as many requests in the evening as in the early morning.
        let rate = 1.0 - 0.6 * (now_ms / DAY_MS * std::f64::consts::TAU).cos();
        now_ms += DAY_MS / shape.lines as f64 * random.f64() * 2.0 / rate.max(0.1) * 0.8;
        if burst_left == 0 && random.u64(..BURST_EVERY) == 0 {
            (burst_client, burst_left) = (random.u32(..shape.clients), random.u32(20..400));
        }
        // A power law: the first hundredth of the clients sends a third of the requests.
        let drawn = (f64::from(shape.clients) * random.f64().powi(4)) as u32;
        let client = if burst_left > 0 && random.bool() { burst_client } else { drawn.min(shape.clients - 1) };
        burst_left = burst_left.saturating_sub(1);
        let path = PATHS[random.usize(..PATHS.len())];
        let status = if random.u8(..20) == 0 { 404 } else { 200 };
        let bytes = random.u32(100..20_000);
        let [_, b, c, d] = (client + 1).to_be_bytes();
        let time = (START_MS as f64 + now_ms) as u64;
        let (hour, minute, second) = (time / 3_600_000 % 24, time / 60_000 % 60, time / 1000 % 60);
        let day = 14 + (time - START_MS) / 86_400_000;
        match shape.form {
            LogForm::Combined => writeln!(
                out,
                "10.{b}.{c}.{d} - - [{day:02}/Nov/2023:{hour:02}:{minute:02}:{second:02} +0000] \"GET {path} HTTP/1.1\" \
                 {status} {bytes} \"https://shop.example/\" \"Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/128.0\""
            )?,
            LogForm::Transom => writeln!(
                out,
                "{{\"time\":\"2023-11-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z\",\
                 \"request_id\":\"{:016x}\",\"method\":\"GET\",\"host\":\"shop.example\",\"path\":\"{}\",\
                 \"protocol\":\"HTTP/1.1\",\"user_agent\":\"Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/128.0\",\
                 \"referrer\":\"https://shop.example/\",\"client\":\"10.{b}.{c}.{d}\",\"route\":\"all\",\
                 \"status\":{status},\"bytes_received\":0,\"bytes_sent\":{bytes},\"duration_ms\":1.25,\
                 \"upstream\":\"u\",\"server\":\"127.0.0.1:9001\",\"upstream_ms\":1.1,\
                 \"rules\":{{\"per-client\":\"admitted\"}}}}",
                time % 1000,
                client as u64 * 0x9E37_79B9 + now_ms as u64,
                path.split('?').next().unwrap_or(path)
            )?,
        }
    }
    out.flush()
}
