//! How the limits are told to the client.
//!
//! `RateLimit` and `RateLimit-Policy` are lists of Structured Fields (RFC 9651), as
//! draft-ietf-httpapi-ratelimit-headers-11 has them: one item per layer, `q` the limit, `w` the
//! window in seconds, `r` what remains, `t` the seconds until the window ends, rounded up. The
//! older `X-RateLimit-*` tell of one layer only, the one nearest its limit; their reset is in
//! seconds from now. Names are rendered at load, numbers into a buffer that is used again.

use std::ops::Range;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::config::RateLimitStyle;
use transom_limiter::acquire::Charge;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::rule_set::{ChargePlan, LayerRef, RuleSet};
use transom_limiter::window::Windows;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The layers that the answers of one route tell of, in the order of the configuration.
#[derive(Debug, Default)]
pub struct RateLimitTemplate {
    rules: Vec<ReportedRule>,
    layers: Vec<ReportedLayer>,
}

/// A rule that answers tell of. It may have thousands of variants, but a request only one of them.
#[derive(Debug)]
struct ReportedRule {
    /// The rule's position in the roster.
    position: usize,
    /// The rows of each variant.
    variants: Vec<Range<usize>>,
}

#[derive(Debug)]
struct ReportedLayer {
    layer: LayerRef,
    /// Whether everyone has this layer, and not only some clients.
    is_default: bool,
    /// The name as a structured-field string, with what separates it from the item before.
    name: String,
    limit: u32,
    /// What may accumulate; used is what is missing of it.
    capacity: u64,
    windows: Windows,
    is_ietf: bool,
    is_legacy: bool,
}

impl RateLimitTemplate {
    /// Shadow rules are left out: a client that slowed down for them would be limited by them.
    pub fn new(rule_set: &RuleSet, charge_plan: &ChargePlan, fields: &[RateLimitStyle]) -> RateLimitTemplate {
        let (mut rules, mut rows) = (Vec::new(), Vec::new());
        for (position, &index) in charge_plan.rules.iter().enumerate() {
            let entry = &rule_set.rules[index];
            let style = fields[index];
            if entry.rule.is_shadow() || style == RateLimitStyle::Off {
                continue;
            }
            let first = rows.len();
            let variants = (0..entry.rule.variants().count()).map(|variant| entry.variant(variant));
            let variants = variants.map(|layers| first + layers.start..first + layers.end).collect();
            rules.push(ReportedRule { position, variants });
            rows.extend(entry.rule.variants().flatten().enumerate().map(|(layer, limit)| ReportedLayer {
                layer: LayerRef { rule: position, layer },
                is_default: entry.variant(0).contains(&layer),
                name: format!(", \"{}\"", entry.layer_name(layer)),
                limit: limit.tokens,
                capacity: u64::from(limit.capacity.max(limit.tokens)),
                windows: limit.windows.clone(),
                is_ietf: matches!(style, RateLimitStyle::Ietf | RateLimitStyle::Both),
                is_legacy: matches!(style, RateLimitStyle::Legacy | RateLimitStyle::Both),
            }));
        }
        RateLimitTemplate { rules, layers: rows }
    }

    /// The rows of the windows that a request was counted in, and their answers.
    fn applicable<'a>(&'a self, context: &'a DecisionContext) -> impl Iterator<Item = (&'a ReportedLayer, &'a Charge)> {
        let rows = self.rules.iter().filter_map(|told| {
            let keyed_request = context.inputs.keyed_requests.get(told.position).copied().flatten()?;
            Some(&self.layers[told.variants[keyed_request.variant].clone()])
        });
        rows.flatten().filter_map(|row| context.charge_of(row.layer).map(|charge| (row, charge)))
    }

    /// `RateLimit-Policy` for requests to which all rules apply, if it is the same for all of them:
    /// months differ in length.
    pub fn constant_policy(&self) -> Option<HeaderValue> {
        let mut text = Vec::new();
        for row in self.layers.iter().filter(|row| row.is_ietf && row.is_default) {
            row.write_policy(row.windows.period_ms()?, &mut text);
        }
        list(&text)
    }

    /// Renders the fields for one decision. `policy` is what [`RateLimitTemplate::policy`] gave; `text` is a
    /// buffer to work in.
    pub fn render(
        &self,
        context: &DecisionContext,
        policy: Option<&HeaderValue>,
        now_ms: u64,
        text: &mut Vec<u8>,
    ) -> RateLimitFields {
        let mut stamp = RateLimitFields::default();
        let usual = |told: &ReportedRule| {
            context.inputs.keyed_requests.get(told.position).copied().flatten().is_some_and(|a| a.variant == 0)
        };
        let all = self.rules.iter().all(usual);
        text.clear();
        for (row, charge) in self.applicable(context).filter(|(row, _)| row.is_ietf) {
            row.write_state(charge, now_ms, text);
        }
        stamp.state = list(text);
        stamp.policy = match policy {
            Some(policy) if all => Some(policy.clone()),
            _ => self.policy_of(context, text),
        };
        stamp.legacy = self.nearest(context, now_ms).map(Box::new);
        stamp
    }

    /// `RateLimit-Policy` of the layers that applied to a request.
    fn policy_of(&self, context: &DecisionContext, text: &mut Vec<u8>) -> Option<HeaderValue> {
        text.clear();
        for (row, charge) in self.applicable(context).filter(|(row, _)| row.is_ietf) {
            row.write_policy(row.windows.length_ms(charge.usage.end_ms), text);
        }
        list(text)
    }

    /// The layer nearest its limit; of several, the one that takes longest to open again.
    fn nearest(&self, context: &DecisionContext, now_ms: u64) -> Option<LegacyFields> {
        let told = self.applicable(context).filter(|(row, _)| row.is_legacy);
        let nearness =
            |(row, charge): &(&ReportedLayer, &Charge)| (row.remaining(charge), std::cmp::Reverse(charge.usage.end_ms));
        told.min_by_key(nearness).map(|(row, charge)| LegacyFields {
            limit: row.limit,
            remaining: row.remaining(charge),
            reset_s: seconds_until(charge.usage.end_ms, now_ms),
        })
    }
}

impl ReportedLayer {
    fn remaining(&self, charge: &Charge) -> u64 {
        self.capacity.saturating_sub(charge.usage.used)
    }

    /// A window under a second has no exact `w`; it is told as one second.
    fn write_policy(&self, window_ms: u64, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";q=");
        push_number(u64::from(self.limit), text);
        text.extend_from_slice(b";w=");
        push_number(window_ms.div_ceil(1000), text);
    }

    fn write_state(&self, charge: &Charge, now_ms: u64, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";r=");
        push_number(self.remaining(charge), text);
        text.extend_from_slice(b";t=");
        push_number(seconds_until(charge.usage.end_ms, now_ms), text);
    }
}

/// What an answer will say about the limits: rendered at the decision, added when the answer comes.
#[derive(Clone, Debug, Default)]
pub struct RateLimitFields {
    policy: Option<HeaderValue>,
    state: Option<HeaderValue>,
    /// Elsewhere, since few want it.
    legacy: Option<Box<LegacyFields>>,
}

#[derive(Clone, Debug)]
struct LegacyFields {
    limit: u32,
    remaining: u64,
    reset_s: u64,
}

impl RateLimitFields {
    /// Says that hardly another answer will say the same. HTTP/2 then leaves it out of the table that both sides keep of
    /// what is said again (RFC 7541, section 6.2.3), and that it would fill.
    pub fn without_indexing(mut self) -> RateLimitFields {
        if let Some(state) = &mut self.state {
            state.set_sensitive(true);
        }
        self
    }

    /// Adds the fields to an answer. Lists that the upstream sent are kept, and joined.
    pub fn add_to(self, headers: &mut HeaderMap) {
        for (name, value) in [(RATELIMIT_POLICY, self.policy), (RATELIMIT, self.state)] {
            if let Some(value) = value {
                append_list(headers, name, value);
            }
        }
        if let Some(legacy) = self.legacy {
            headers.insert(LEGACY_LIMIT, number(u64::from(legacy.limit)));
            headers.insert(LEGACY_REMAINING, number(legacy.remaining));
            headers.insert(LEGACY_RESET, number(legacy.reset_s));
        }
    }
}

/// A list of items, each of which was written with a separator before it.
fn list(items: &[u8]) -> Option<HeaderValue> {
    // Rule names are checked to be plain ASCII, so what was written is a value.
    items.strip_prefix(b", ").and_then(|text| HeaderValue::from_bytes(text).ok())
}

/// Numbers below 10,000, four digits each.
static DIGITS: [u8; 40_000] = {
    let (mut digits, mut at) = ([0; 40_000], 0);
    while at < 40_000 {
        let of_ten = [1000, 100, 10, 1];
        digits[at] = b'0' + (at / 4 / of_ten[at % 4] % 10) as u8;
        at += 1;
    }
    digits
};

/// A number as a field value. `From` would allocate twice for it; here the small ones are not even counted
/// by whom they are shared.
pub fn number(number: u64) -> HeaderValue {
    if number < 10_000 {
        let end = number as usize * 4 + 4;
        let start = end - 1 - number.checked_ilog10().unwrap_or(0) as usize;
        if let Ok(digits) = std::str::from_utf8(&DIGITS[start..end]) {
            return HeaderValue::from_static(digits);
        }
    }
    HeaderValue::from_str(itoa::Buffer::new().format(number)).unwrap_or(const { HeaderValue::from_static("0") })
}

/// Writes a number in decimal digits.
pub fn push_number(number: u64, text: &mut Vec<u8>) {
    text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Seconds from now until a moment, rounded up.
pub fn seconds_until(then_ms: u64, now_ms: u64) -> u64 {
    then_ms.saturating_sub(now_ms).div_ceil(1000)
}

/// Sets a list field, or adds to it behind what the upstream said.
fn append_list(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    // Seldom is there one, and looking through the names is less than hashing ours.
    if !headers.keys().any(|known| *known == name) {
        headers.insert(name, value);
        return;
    }
    let mut joined = Vec::new();
    for known in headers.get_all(&name) {
        joined.extend_from_slice(known.as_bytes());
        joined.extend_from_slice(b", ");
    }
    joined.extend_from_slice(value.as_bytes());
    // Both halves came out of a parser or a renderer of values.
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(name, joined);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_told_in_decimal_digits() {
        for value in (0..10_100).chain([99_999, 100_000, u64::MAX]) {
            assert_eq!(number(value), value.to_string().as_str());
        }
    }
}
