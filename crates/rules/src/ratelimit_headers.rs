//! Reports the limits to the client in header fields.
//!
//! `RateLimit` and `RateLimit-Policy` are lists of Structured Fields (RFC 9651) as in
//! draft-ietf-httpapi-ratelimit-headers-11: one item per layer, with `q` the limit, `w` the window in seconds, `r` the
//! remaining tokens, and `t` the seconds until the window ends, rounded up. `w` is a whole number: windows that are not whole
//! seconds are stated as several windows that are, with as many times the limit. During a penalty, all layers of its rule have no
//! tokens until the penalty ends. A limit of concurrent requests has `q`, `qu` and `r` only. `qu` is the unit of a limit that counts
//! something else than requests. Limits of bytes are stated in bytes, and not in tokens of several bytes. Other fields, such as
//! `X-RateLimit-*`, report one layer only, the nearest to its limit: `NEAREST_FIELDS` lists them. Names are rendered at load.

use std::ops::Range;

use http::header::{Entry, HeaderMap, HeaderName, HeaderValue};
use jiff::Timestamp;
use sfv::{List, ListEntry, Parser};
use smallvec::SmallVec;

use transom_config::rule::{GatewayRule, QuotaUnit, RateLimitStyle};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::concurrency::ConcurrencyUsage;
use transom_limiter::handles::{IdVec, LayerId, PlanPosition, RuleId, VariantId};
use transom_limiter::limit::Limit;
use transom_limiter::verdict::{Verdicts, WindowVerdict};
use transom_limiter::window::Windows;
use transom_limiter::window_kind::Usage;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The greatest integer of Structured Fields.
const INTEGER_MAX: u64 = 999_999_999_999_999;

/// Fields that report one layer: of the layers that they are about, the one with the fewest remaining tokens.
#[derive(Debug)]
struct NearestFields {
    /// Style and units of the rules that they are about.
    style: RateLimitStyle,
    units: ReportedUnits,
    limit: HeaderName,
    remaining: HeaderName,
    reset: HeaderName,
    reset_form: ResetForm,
}

/// How the end of a window is written.
#[derive(Clone, Copy, Debug)]
enum ResetForm {
    /// Seconds from now, rounded up.
    Seconds,
    /// The time from now as Go writes durations: `20ms`, `1.5s`, `6m0s`.
    Duration,
    /// The time in RFC 3339, rounded up to whole seconds.
    Timestamp,
}

#[derive(Clone, Copy, Debug)]
enum ReportedUnits {
    All,
    Only(&'static [QuotaUnit]),
}

const ALL: ReportedUnits = ReportedUnits::All;
const REQUESTS: ReportedUnits = ReportedUnits::Only(&[QuotaUnit::Requests]);
const INPUT: ReportedUnits = ReportedUnits::Only(&[QuotaUnit::InputTokens]);
const OUTPUT: ReportedUnits = ReportedUnits::Only(&[QuotaUnit::OutputTokens]);
const TOKENS: ReportedUnits =
    ReportedUnits::Only(&[QuotaUnit::Tokens, QuotaUnit::InputTokens, QuotaUnit::OutputTokens]);

static NEAREST_FIELDS: [NearestFields; 7] = {
    use RateLimitStyle::{Anthropic, Legacy, OpenAi};
    use ResetForm::{Duration, Seconds, Timestamp};
    [
        NearestFields::new(Legacy, ALL, Seconds, ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]),
        NearestFields::new(
            OpenAi,
            REQUESTS,
            Duration,
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
        ),
        NearestFields::new(
            OpenAi,
            TOKENS,
            Duration,
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ),
        NearestFields::new(
            Anthropic,
            REQUESTS,
            Timestamp,
            [
                "anthropic-ratelimit-requests-limit",
                "anthropic-ratelimit-requests-remaining",
                "anthropic-ratelimit-requests-reset",
            ],
        ),
        NearestFields::new(
            Anthropic,
            TOKENS,
            Timestamp,
            [
                "anthropic-ratelimit-tokens-limit",
                "anthropic-ratelimit-tokens-remaining",
                "anthropic-ratelimit-tokens-reset",
            ],
        ),
        NearestFields::new(
            Anthropic,
            INPUT,
            Timestamp,
            [
                "anthropic-ratelimit-input-tokens-limit",
                "anthropic-ratelimit-input-tokens-remaining",
                "anthropic-ratelimit-input-tokens-reset",
            ],
        ),
        NearestFields::new(
            Anthropic,
            OUTPUT,
            Timestamp,
            [
                "anthropic-ratelimit-output-tokens-limit",
                "anthropic-ratelimit-output-tokens-remaining",
                "anthropic-ratelimit-output-tokens-reset",
            ],
        ),
    ]
};

impl NearestFields {
    const fn new(
        style: RateLimitStyle,
        units: ReportedUnits,
        reset_form: ResetForm,
        [limit, remaining, reset]: [&'static str; 3],
    ) -> NearestFields {
        NearestFields {
            style,
            units,
            limit: HeaderName::from_static(limit),
            remaining: HeaderName::from_static(remaining),
            reset: HeaderName::from_static(reset),
            reset_form,
        }
    }

    fn are_about(&self, rule: &ReportedRule) -> bool {
        let has_style = match rule.style {
            RateLimitStyle::Both => self.style == RateLimitStyle::Legacy,
            style => self.style == style,
        };
        let has_unit = match self.units {
            ReportedUnits::All => true,
            ReportedUnits::Only(units) => units.contains(&rule.unit),
        };
        has_style && has_unit
    }
}

impl ResetForm {
    /// The end of a window at `reset_ms`.
    fn value(self, reset_ms: u64, now_ms: u64) -> HeaderValue {
        let text = match self {
            ResetForm::Seconds => return number(seconds_until(reset_ms, now_ms)),
            ResetForm::Duration => duration(reset_ms.saturating_sub(now_ms)),
            ResetForm::Timestamp => timestamp(reset_ms.max(now_ms)),
        };
        // Digits, letters and punctuation, so the conversion succeeds.
        HeaderValue::try_from(text).unwrap_or(const { HeaderValue::from_static("0") })
    }
}

/// A duration as Go writes it, exact to the millisecond.
fn duration(ms: u64) -> String {
    if (1..1000).contains(&ms) {
        return format!("{ms}ms");
    }
    let (hours, minutes, seconds, rest) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000);
    let mut text = match (hours, minutes) {
        (0, 0) => format!("{seconds}"),
        (0, _) => format!("{minutes}m{seconds}"),
        (_, _) => format!("{hours}h{minutes}m{seconds}"),
    };
    if rest > 0 {
        text.push_str(format!(".{rest:03}").trim_end_matches('0'));
    }
    text.push('s');
    text
}

/// Unix milliseconds in RFC 3339, rounded up to whole seconds.
fn timestamp(unix_ms: u64) -> String {
    let second = i64::try_from(unix_ms.div_ceil(1000)).ok();
    // No window ends beyond the calendar.
    second.and_then(|second| Timestamp::from_second(second).ok()).unwrap_or(Timestamp::MAX).to_string()
}

/// Whether the gateway adds fields of this name to responses.
pub fn is_rate_limit_field(name: &HeaderName) -> bool {
    let mut nearest = NEAREST_FIELDS.iter().flat_map(|fields| [&fields.limit, &fields.remaining, &fields.reset]);
    [RATELIMIT, RATELIMIT_POLICY].contains(name) || nearest.any(|known| known == name)
}

/// The layers that the responses of one route report, in the order of the configuration.
#[derive(Debug, Default)]
pub struct RateLimitTemplate {
    rules: Vec<ReportedRule>,
    layers: Vec<ReportedLayer>,
    concurrency: Vec<ReportedConcurrency>,
    /// The fields that report one layer of these rules.
    nearest: Vec<&'static NearestFields>,
}

/// A limit of concurrent requests that responses report.
#[derive(Debug)]
struct ReportedConcurrency {
    position: PlanPosition,
    /// As in [`ReportedLayer`].
    name: String,
    /// The limit in the default variant.
    default: Option<u32>,
}

/// A rule that responses report. It may have thousands of variants; a request has one.
#[derive(Debug)]
struct ReportedRule {
    position: PlanPosition,
    style: RateLimitStyle,
    unit: QuotaUnit,
    /// The range of [`RateLimitTemplate::layers`] of each variant.
    variants: IdVec<VariantId, Range<usize>>,
}

#[derive(Debug)]
struct ReportedLayer {
    layer: LayerRef,
    /// Whether the layer belongs to the default variant.
    is_default: bool,
    /// The name as a structured-field string, after the separator from the previous item.
    name: String,
    limit: u32,
    /// How many windows are a whole number of seconds together.
    stated_windows: u64,
    /// Tokens that can accumulate; remaining tokens are the capacity less the usage.
    capacity: u64,
    windows: Windows,
    /// The parameter `qu`.
    unit: Option<&'static str>,
    /// The bytes of a token in a rule that counts bytes; otherwise 1.
    unit_size: u64,
    is_ietf: bool,
}

impl RateLimitTemplate {
    /// Shadow rules are not reported: clients would slow down for them.
    pub fn new<'r>(charge_plan: &ChargePlan, rule_of: impl Fn(RuleId) -> &'r GatewayRule) -> RateLimitTemplate {
        let (mut rules, mut layers, mut concurrency) = (Vec::new(), Vec::new(), Vec::new());
        for (position, rule) in charge_plan.compiled_rules() {
            let configured = rule_of(charge_plan.rules()[position]);
            let (style, unit) = (configured.rate_limit_style, configured.quota_unit());
            let unit_size = configured.bytes.map_or(1, |bytes| bytes.unit);
            if rule.rule.is_shadow() || style == RateLimitStyle::Off {
                continue;
            }
            let is_ietf = matches!(style, RateLimitStyle::Ietf | RateLimitStyle::Both);
            concurrency.extend(rule.concurrent_name().filter(|_| is_ietf).map(|name| ReportedConcurrency {
                position,
                name: format!(", \"{name}\""),
                default: rule.rule.concurrent,
            }));
            let layer = |(variant, id, limit): (VariantId, LayerId, &Limit)| ReportedLayer {
                layer: LayerRef { position, id },
                is_default: variant == VariantId::DEFAULT,
                name: format!(", \"{}\"", rule.layer_name(id)),
                limit: limit.tokens,
                stated_windows: limit.windows.in_whole_seconds(),
                capacity: u64::from(limit.capacity()),
                windows: limit.windows.clone(),
                unit: unit.text(),
                unit_size,
                is_ietf,
            };
            let mut variants = IdVec::new();
            for (variant, limits) in rule.variants() {
                let first = layers.len();
                layers.extend(limits.map(|(id, limit)| layer((variant, id, limit))));
                variants.push(first..layers.len());
            }
            rules.push(ReportedRule { position, style, unit, variants });
        }
        let are_used = |fields: &&NearestFields| rules.iter().any(|rule| fields.are_about(rule));
        let nearest = NEAREST_FIELDS.iter().filter(are_used).collect();
        RateLimitTemplate { rules, layers, concurrency, nearest }
    }

    /// The limits of concurrent requests that apply to a request.
    fn concurrency<'a>(
        &'a self,
        verdicts: Verdicts<'a>,
    ) -> impl Iterator<Item = (&'a ReportedConcurrency, &'a ConcurrencyUsage)> {
        self.concurrency.iter().filter_map(move |reported| {
            let mut usages = verdicts.slots().iter();
            Some((reported, usages.find(|usage| usage.position == reported.position)?))
        })
    }

    /// The layers that a request was counted in, and their windows.
    fn applicable<'a>(
        &'a self,
        verdicts: Verdicts<'a>,
    ) -> impl Iterator<Item = (&'a ReportedLayer, WindowVerdict<'a>)> {
        self.applicable_of(self.rules.iter(), verdicts)
    }

    fn applicable_of<'a>(
        &'a self,
        rules: impl Iterator<Item = &'a ReportedRule>,
        verdicts: Verdicts<'a>,
    ) -> impl Iterator<Item = (&'a ReportedLayer, WindowVerdict<'a>)> {
        let layers = rules.filter_map(move |rule| {
            let keyed_request = verdicts.keyed_requests().get(rule.position).copied().flatten()?;
            Some(&self.layers[rule.variants[keyed_request.variant].clone()])
        });
        layers.flatten().filter_map(move |layer| verdicts.window_of(layer.layer).map(|window| (layer, window)))
    }

    /// `RateLimit-Policy` for requests to which all rules apply in their default variant; `None` if it is not constant:
    /// months differ in length.
    pub fn constant_policy(&self) -> Option<HeaderValue> {
        let mut text = Vec::new();
        for layer in self.layers.iter().filter(|layer| layer.is_ietf && layer.is_default) {
            layer.write_policy(layer.windows.period_ms()?, &mut text);
        }
        for reported in &self.concurrency {
            reported.default.iter().for_each(|limit| reported.write_policy(*limit, &mut text));
        }
        list(&text)
    }

    /// Renders the fields for one decision. `policy` is the result of [`RateLimitTemplate::constant_policy`]; `text` is
    /// scratch memory.
    pub fn render(
        &self,
        verdicts: Verdicts<'_>,
        policy: Option<&HeaderValue>,
        now_ms: u64,
        text: &mut Vec<u8>,
    ) -> RateLimitFields {
        let mut fields = RateLimitFields::default();
        let is_default = |rule: &ReportedRule| {
            verdicts
                .keyed_requests()
                .get(rule.position)
                .copied()
                .flatten()
                .is_some_and(|key| key.variant == VariantId::DEFAULT)
        };
        let all_default = self.rules.iter().all(is_default);
        text.clear();
        for (layer, window) in self.applicable(verdicts).filter(|(layer, _)| layer.is_ietf) {
            layer.write_state(window.stated_usage(), now_ms, text);
        }
        for (reported, usage) in self.concurrency(verdicts) {
            reported.write_state(usage, text);
        }
        fields.state = list(text);
        fields.policy = match policy {
            Some(policy) if all_default => Some(policy.clone()),
            _ => self.policy_of(verdicts, text),
        };
        if !self.nearest.is_empty() {
            let nearest = self.nearest.iter().filter_map(|fields| self.nearest_limit(fields, verdicts, now_ms));
            fields.nearest = Some(Box::new(nearest.collect()));
        }
        fields
    }

    /// `RateLimit-Policy` of the layers that apply to a request.
    fn policy_of(&self, verdicts: Verdicts<'_>, text: &mut Vec<u8>) -> Option<HeaderValue> {
        text.clear();
        for (layer, window) in self.applicable(verdicts).filter(|(layer, _)| layer.is_ietf) {
            layer.write_policy(layer.windows.length_ms(window.usage().end_ms), text);
        }
        for (reported, usage) in self.concurrency(verdicts) {
            reported.write_policy(usage.limit, text);
        }
        list(text)
    }

    /// The layer with the fewest remaining tokens; of several, the one whose window ends last.
    fn nearest_limit(
        &self,
        fields: &'static NearestFields,
        verdicts: Verdicts<'_>,
        now_ms: u64,
    ) -> Option<NearestLimit> {
        let rules = self.rules.iter().filter(|rule| fields.are_about(rule));
        let reported = self.applicable_of(rules, verdicts);
        let reported = reported.map(|(layer, window)| (layer, window.stated_usage()));
        let nearness =
            |(layer, usage): &(&ReportedLayer, Usage)| (layer.remaining(*usage), std::cmp::Reverse(usage.end_ms));
        reported.min_by_key(nearness).map(|(layer, usage)| NearestLimit {
            fields,
            limit: layer.stated(layer.limit.into()),
            remaining: layer.stated(layer.remaining(usage)),
            reset_ms: usage.end_ms,
            now_ms,
        })
    }
}

impl ReportedLayer {
    fn remaining(&self, usage: Usage) -> u64 {
        self.capacity.saturating_sub(usage.used)
    }

    /// A number of tokens in the unit of the fields.
    #[inline]
    fn stated(&self, tokens: u64) -> u64 {
        match self.unit_size {
            1 => tokens,
            unit_size => tokens.saturating_mul(unit_size).min(INTEGER_MAX),
        }
    }

    fn write_policy(&self, window_ms: u64, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";q=");
        push_number(self.stated(u64::from(self.limit) * self.stated_windows), text);
        text.extend_from_slice(b";w=");
        push_number(window_ms * self.stated_windows / 1000, text);
        if let Some(unit) = self.unit {
            text.extend_from_slice(b";qu=\"");
            text.extend_from_slice(unit.as_bytes());
            text.push(b'"');
        }
    }

    fn write_state(&self, usage: Usage, now_ms: u64, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";r=");
        push_number(self.stated(self.remaining(usage)), text);
        text.extend_from_slice(b";t=");
        push_number(seconds_until(usage.end_ms, now_ms), text);
    }
}

impl ReportedConcurrency {
    fn write_policy(&self, limit: u32, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";q=");
        push_number(u64::from(limit), text);
        text.extend_from_slice(b";qu=\"concurrent-requests\"");
    }

    fn write_state(&self, usage: &ConcurrencyUsage, text: &mut Vec<u8>) {
        text.extend_from_slice(self.name.as_bytes());
        text.extend_from_slice(b";r=");
        push_number(usage.remaining(), text);
    }
}

/// The rate limit fields of one response: rendered at the decision, added to the response later.
#[derive(Clone, Debug, Default)]
pub struct RateLimitFields {
    policy: Option<HeaderValue>,
    state: Option<HeaderValue>,
    /// Boxed, since few configurations use them.
    nearest: Option<Box<SmallVec<[NearestLimit; 4]>>>,
}

/// The layer that some fields report.
#[derive(Clone, Debug)]
struct NearestLimit {
    fields: &'static NearestFields,
    limit: u64,
    remaining: u64,
    /// The end of the window, Unix milliseconds, as the present.
    reset_ms: u64,
    now_ms: u64,
}

impl RateLimitFields {
    /// Marks the value of `RateLimit` as unlikely to repeat. HTTP/2 then does not add the value to the dynamic table, which
    /// such values would fill (RFC 7541, section 6.2.3).
    pub fn without_indexing(mut self) -> RateLimitFields {
        if let Some(state) = &mut self.state {
            state.set_sensitive(true);
        }
        self
    }

    /// Whether a field states milliseconds.
    pub fn state_ms(&self) -> bool {
        let mut nearest = self.nearest.iter().flat_map(|all| &***all);
        nearest.any(|limit| matches!(limit.fields.reset_form, ResetForm::Duration))
    }

    /// Adds the fields to a response. Lists of items from the upstream are kept and extended; the other fields are replaced.
    pub fn add_to(self, headers: &mut HeaderMap) {
        for (name, value) in [(RATELIMIT_POLICY, self.policy), (RATELIMIT, self.state)] {
            if let Some(value) = value {
                append_list(headers, name, value);
            }
        }
        for NearestLimit { fields, limit, remaining, reset_ms, now_ms } in self.nearest.into_iter().flat_map(|all| *all)
        {
            headers.insert(fields.limit.clone(), number(limit));
            headers.insert(fields.remaining.clone(), number(remaining));
            headers.insert(fields.reset.clone(), fields.reset_form.value(reset_ms, now_ms));
        }
    }
}

/// A list field of items, each written with a separator before it.
fn list(items: &[u8]) -> Option<HeaderValue> {
    // Rule names are plain ASCII by the configuration check, so the conversion succeeds.
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

/// A number as a field value. `From` would allocate twice; values below 10,000 are static and need not even a reference
/// count.
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

/// Seconds from `now_ms` until `then_ms`, rounded up.
pub fn seconds_until(then_ms: u64, now_ms: u64) -> u64 {
    then_ms.saturating_sub(now_ms).div_ceil(1000)
}

/// Whether a field value is a list of items with parameters (RFC 9651, section 4.2), and of no inner list. An empty list is none.
fn is_item_list(value: &[u8]) -> bool {
    let list = Parser::new(value).parse::<List>().unwrap_or_default();
    !list.is_empty() && list.iter().all(|entry| matches!(entry, ListEntry::Item(_)))
}

/// Sets a list field, or appends to its value from the upstream. A value in another form, such as that of older drafts
/// (`limit=100, remaining=3`), is replaced: joined, none of the limits could be read.
fn append_list(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let mut known = match headers.entry(name) {
        Entry::Vacant(field) => {
            field.insert(value);
            return;
        }
        Entry::Occupied(known) => known,
    };
    let lines = known.iter().map(HeaderValue::as_bytes).filter(|line| !line.is_empty());
    let mut joined = lines.collect::<Vec<_>>().join(&b", "[..]);
    if is_item_list(&joined) {
        joined.extend_from_slice(b", ");
    } else {
        joined.clear();
    }
    joined.extend_from_slice(value.as_bytes());
    // Both parts are valid field values, so the conversion succeeds.
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        known.insert(joined);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_in_decimal() {
        for value in (0..10_100).chain([99_999, 100_000, u64::MAX]) {
            assert_eq!(number(value), value.to_string().as_str());
        }
    }

    #[test]
    fn durations_are_those_of_go() {
        for (ms, text) in [
            (0, "0s"),
            (1, "1ms"),
            (20, "20ms"),
            (999, "999ms"),
            (1000, "1s"),
            (1001, "1.001s"),
            (8640, "8.64s"),
            (59_900, "59.9s"),
            (60_000, "1m0s"),
            (86_400, "1m26.4s"),
            (360_000, "6m0s"),
            (3_599_999, "59m59.999s"),
            (3_600_000, "1h0m0s"),
            (366 * 86_400_000, "8784h0m0s"),
        ] {
            assert_eq!(duration(ms), text);
            assert_eq!(ResetForm::Duration.value(5000 + ms, 5000), text);
        }
        // A window that has ended meanwhile.
        assert_eq!(ResetForm::Duration.value(1, 2), "0s");
    }

    #[test]
    fn timestamps_are_whole_seconds() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (1, "1970-01-01T00:00:01Z"),
            (784_111_777_000, "1994-11-06T08:49:37Z"),
            (784_111_777_001, "1994-11-06T08:49:38Z"),
            (1_709_164_800_000, "2024-02-29T00:00:00Z"),
        ] {
            assert_eq!(ResetForm::Timestamp.value(ms, 0), text);
        }
        assert_eq!(ResetForm::Timestamp.value(0, 784_111_777_000), "1994-11-06T08:49:37Z");
        assert!(!timestamp(u64::MAX).is_empty());
    }

    #[test]
    fn each_field_has_one_meaning() {
        let names = || NEAREST_FIELDS.iter().flat_map(|fields| [&fields.limit, &fields.remaining, &fields.reset]);
        for name in names() {
            assert_eq!(names().filter(|other| *other == name).count(), 1, "{name}");
            assert!(is_rate_limit_field(name));
        }
        assert!(!is_rate_limit_field(&http::header::RETRY_AFTER));
    }

    #[test]
    fn lists_of_items_are_told_from_other_fields() {
        for list in [
            "\"per-client\";r=50;t=30",
            "\"a\";q=100;w=60 ,\t\"b\"; q=1;qu=\"requests\"",
            "100;w=60",
            " 10, 20;w=1 ",
            "\"a\\\"b\\\\\"",
            "token;a;b=?1;c=:aGk=:;d=@1700000000;e=-1.5;f=%\"f%c3%bc\";*g=a/b:c",
        ] {
            assert!(is_item_list(list.as_bytes()), "{list}");
        }
        for other in [
            "",
            " ",
            "limit=100, remaining=3, reset=5",
            "limit=100",
            "100, 100;window=60;",
            "\"a\",",
            ",\"a\"",
            "\"a\" \"b\"",
            "\"a\" ;q=1",
            "(\"a\" \"b\");r=1",
            "\"a",
            "\"a\\b\"",
            "\"\u{e9}\"",
            "\"a\";R=1",
            "\"a\";r=",
            "1234567890123456",
            "1.2345",
            "-",
            "1.",
            "?2",
            ":a",
            "%\"%C3\"",
            "50;w=60, limit=1",
        ] {
            assert!(!is_item_list(other.as_bytes()), "{other}");
        }
    }
}
