//! How the limits are told to the client.
//!
//! `RateLimit` and `RateLimit-Policy` are lists of Structured Fields (RFC 9651), as
//! draft-ietf-httpapi-ratelimit-headers-11 has them: one item per layer, `q` the limit, `w` the
//! window in seconds, `r` what remains, `t` the seconds until the window ends, rounded up. The
//! older `X-RateLimit-*` tell of one layer only, the one nearest its limit; their reset is in
//! seconds from now. Names are rendered at load, numbers into a buffer that is used again.

use std::io::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::config::QuotaFields;
use crate::count::charge::Charge;
use crate::rule::book::{Book, Desk, Line, OnLimit, Plan};
use crate::rule::window::Period;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The layers that the answers of one route tell of, in the order of the configuration.
#[derive(Debug, Default)]
pub struct Sheet {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    line: Line,
    name: String,
    limit: u32,
    period: Period,
    ietf: bool,
    legacy: bool,
}

impl Sheet {
    /// Shadow rules are left out: a client that slowed down for them would be limited by them.
    pub fn new(book: &Book, plan: &Plan, fields: &[QuotaFields]) -> Sheet {
        let mut rows = Vec::new();
        for (position, &index) in plan.rules.iter().enumerate() {
            let rule = &book.entries[index].rule;
            let style = fields[index];
            if rule.on_limit == OnLimit::Shadow || style == QuotaFields::Off {
                continue;
            }
            rows.extend(rule.layers.iter().enumerate().map(|(layer, limit)| Row {
                line: Line { rule: position, layer },
                name: rule.layer_name(layer),
                limit: limit.tokens,
                period: limit.period,
                ietf: matches!(style, QuotaFields::Ietf | QuotaFields::Both),
                legacy: matches!(style, QuotaFields::Legacy | QuotaFields::Both),
            }));
        }
        Sheet { rows }
    }

    /// Renders the fields for one decision. `text` is a buffer to work in.
    pub fn render(&self, desk: &Desk, now_ms: u64, text: &mut Vec<u8>) -> Stamp {
        let told = || self.rows.iter().filter_map(|row| desk.answer(row.line).map(|charge| (row, charge)));
        let mut stamp = Stamp::default();
        text.clear();
        told().filter(|(row, _)| row.ietf).for_each(|(row, charge)| row.write_policy(charge, text));
        stamp.policy = value(text);
        text.clear();
        told().filter(|(row, _)| row.ietf).for_each(|(row, charge)| row.write_state(charge, now_ms, text));
        stamp.state = value(text);
        // The layer nearest its limit; of several, the one that takes longest to open again.
        let nearness =
            |(row, charge): &(&Row, &Charge)| (row.remaining(charge), std::cmp::Reverse(charge.usage.end_ms));
        let nearest = told().filter(|(row, _)| row.legacy).min_by_key(nearness);
        stamp.legacy = nearest.map(|(row, charge)| Legacy {
            limit: row.limit,
            remaining: row.remaining(charge),
            reset_s: seconds_until(charge.usage.end_ms, now_ms),
        });
        stamp
    }
}

/// What an answer will say about the limits: rendered at the decision, added when the answer comes.
#[derive(Debug, Default)]
pub struct Stamp {
    policy: Option<HeaderValue>,
    state: Option<HeaderValue>,
    legacy: Option<Legacy>,
}

#[derive(Debug)]
struct Legacy {
    limit: u32,
    remaining: u32,
    reset_s: u64,
}

impl Stamp {
    /// Adds the fields to an answer. Lists that the upstream sent are kept, and joined.
    pub fn put(self, headers: &mut HeaderMap) {
        for (name, value) in [(RATELIMIT_POLICY, self.policy), (RATELIMIT, self.state)] {
            if let Some(value) = value {
                join(headers, name, value);
            }
        }
        if let Some(legacy) = self.legacy {
            headers.insert(LEGACY_LIMIT, HeaderValue::from(legacy.limit));
            headers.insert(LEGACY_REMAINING, HeaderValue::from(legacy.remaining));
            headers.insert(LEGACY_RESET, HeaderValue::from(legacy.reset_s));
        }
    }
}

/// Rule names are checked to be plain ASCII, so what was written is a value.
fn value(text: &[u8]) -> Option<HeaderValue> {
    if text.is_empty() { None } else { HeaderValue::from_bytes(text).ok() }
}

impl Row {
    fn remaining(&self, charge: &Charge) -> u32 {
        self.limit.saturating_sub(charge.usage.used)
    }

    fn write_policy(&self, charge: &Charge, text: &mut Vec<u8>) {
        let window_ms = match self.period {
            Period::Fixed { ms } => ms,
            Period::Month => {
                let window = self.period.window_at(charge.usage.end_ms - 1);
                window.end_ms - window.start_ms
            }
        };
        self.write_name(text);
        // Writing to memory does not fail. A window under a second has no exact `w`.
        let _ = write!(text, ";q={};w={}", self.limit, window_ms.div_ceil(1000));
    }

    fn write_state(&self, charge: &Charge, now_ms: u64, text: &mut Vec<u8>) {
        self.write_name(text);
        let _ = write!(text, ";r={};t={}", self.remaining(charge), seconds_until(charge.usage.end_ms, now_ms));
    }

    fn write_name(&self, text: &mut Vec<u8>) {
        let separator: &[u8] = if text.is_empty() { b"\"" } else { b", \"" };
        text.extend_from_slice(separator);
        text.extend_from_slice(self.name.as_bytes());
        text.push(b'"');
    }
}

/// Seconds from now until a moment, rounded up.
pub fn seconds_until(then_ms: u64, now_ms: u64) -> u64 {
    then_ms.saturating_sub(now_ms).div_ceil(1000)
}

/// Sets a list field, or adds to it behind what the upstream said.
fn join(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let mut joined = Vec::new();
    for known in headers.get_all(&name) {
        joined.extend_from_slice(known.as_bytes());
        joined.extend_from_slice(b", ");
    }
    if joined.is_empty() {
        headers.insert(name, value);
        return;
    }
    joined.extend_from_slice(value.as_bytes());
    // Both halves came out of a parser or a renderer of values.
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(name, joined);
    }
}
