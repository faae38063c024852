//! `[rules.NAME]`: the layers of a rule, its cost, what happens at the limit, and the response to refused requests.
//!
//! This file checks each rule by itself. `route` checks that the key of a rule exists on the routes that use the rule.

use std::collections::BTreeSet;
use std::ops::{Deref, RangeInclusive};
use std::time::Duration;

use toml::de::DeValue;

use super::body_condition::BodyCondition;
use super::byte_cost::{self, ByteCost, COUNTED, CountedBytes, ON_EXCEEDED, OnExceeded};
use super::count_when::{CountWhen, read_statuses};
use super::descriptor::{Descriptor, check_descriptor};
use super::diagnostics::{Report, Span, quoted};
use super::key::{KeySettings, OnUnknownKey};
use super::key_format::{KEY_FORMAT, check_key_format};
use super::key_kind::{CLIENT, JSON};
use super::listen::ClientCerts;
use super::overrides::ExceptionSettings;
use super::redis::{DefaultSharing, OUTAGES, RULE_MODES, TABLE_FIX};
use super::response_body::{BODY, BODY_STYLES, Body, BodyStyle, CONTENT_TYPE, check_body_style, check_content_type};
use super::settings::{
    Boolean, Choice, Custom, DAY_MS, Inline, Integer, Optional, Section, Shape, Size, Time, TimeOrZero, Word,
};
use super::toml_reader::{Item, Table};
use super::usage_cost::{
    FAILED, ON_MISSING_USAGE, OnMissingUsage, Reserve, UsageCost, report_without_usage, reserve, usage, weights,
};
use super::values::{Definitions, parse_field_name, read_field_name};
use super::window::{
    concurrent, layers_are_comparable, report_unreachable_layers, require_limits, suggest_windows, windows,
};
use transom_limiter::handles::RuleId;
use transom_limiter::key::OnMissing;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, KeyFormat, OnLimit, OnOutage, Rule, Sharing};
use transom_usage::usage::{CountedTokens, ModelWeights};
use transom_usage::usage_reader::UsageSource;

/// `headers` of the configuration and of rules.
pub const RATE_LIMIT_STYLES: [(&str, RateLimitStyle); 6] = [
    ("ietf", RateLimitStyle::Ietf),
    ("legacy", RateLimitStyle::Legacy),
    ("both", RateLimitStyle::Both),
    ("openai", RateLimitStyle::OpenAi),
    ("anthropic", RateLimitStyle::Anthropic),
    ("off", RateLimitStyle::Off),
];

/// `max_delay` and `max_waiting` complete the choice `delay`.
const ON_LIMIT: [(&str, OnLimit); 3] = [
    ("refuse", OnLimit::Refuse),
    ("delay", OnLimit::Delay { max_delay_ms: 0, max_waiting: 0 }),
    ("shadow", OnLimit::Shadow),
];
const COST_MAX: u64 = u32::MAX as u64;
const COST_FORMS: &str = "write a whole number, or a table such as `cost = { request-header = \"x-cost\" }`";
const COST_FIELD: Word<String> = Word { shape: "field name", example: "\"x-cost\"", read: read_field_name };

settings! {
    /// A rule, apart from its key and its exceptions.
    pub struct RuleSettings {
        /// Layers; every layer must admit a request. Required unless there is `concurrent`.
        windows: Vec<Limit> = windows();
        /// [Requests of a key in flight at a time](#concurrent-requests), beside or instead of `windows`. Without it: any number.
        concurrent: Option<u32> = concurrent();
        /// Tokens that a request takes. A rule of cost 0 counts nothing. [Table](#cost): the cost is in a field.
        cost: WrittenCost = Custom {
            default: WrittenCost::Fixed(1),
            default_text: Some("1"),
            shape: || Shape::AnyOf(vec![Shape::Integer(0..=COST_MAX), Shape::Table(CostSettings::settings())]),
            read: read_cost,
        };
        /// What happens to a request that exceeds a layer. `"delay"`: it [waits](#delay) for a later window. `"shadow"`:
        /// metrics and log report the decision; it is neither enforced nor shown to the client. A request that another rule
        /// refuses is not decided.
        on_limit: OnLimit = Choice(OnLimit::Refuse, &ON_LIMIT);
        /// Longest wait of a request; required with `"delay"`. A request that would wait longer is refused at once.
        max_delay: Option<Duration> = Optional(Time(Duration::from_secs(2), 1..=DAY_MS));
        /// Requests of all keys that wait because of this rule at a time. Further requests are refused at once.
        max_waiting: u32 = Integer(1000, 1..=1_000_000);
        /// `false`: a refused request takes nothing in any layer. `true`: it takes what is left, up to its cost, in all
        /// layers of this rule, even if another rule refused it. It never opens a `"first-request"` window.
        count_refused: bool = Boolean(false);
        /// Only requests with [such a response](#counted-responses) stay charged. Without it: all.
        count_when: Option<CountWhen> = Optional(Inline::<CountWhen>::or("write, for example, `count_when = { status = [401] }`"));
        /// Only requests whose JSON body has [such a value](#values-of-the-body) are counted, and those whose body is not a JSON
        /// object. Without it: all.
        when: Option<BodyCondition> = Optional(Inline::<BodyCondition>::or(
            "write, for example, `when = { json = \"/model\", in = [\"gpt-5*\"] }`",
        ));
        /// Lock-out: after a refusal by a window of this rule, the key stays refused for so long, counted from that refusal.
        /// Refusals meanwhile do not extend it. A [shared](../guides/shared-counters.md#lease-or-exact) rule counts as with
        /// `shared = "exact"`.
        penalty: Option<Duration> = Optional(Time(Duration::from_secs(3600), 1000..=365 * DAY_MS));
        /// The [descriptors](../guides/envoy.md) of Envoy's rate limit service that the rule answers to, such as
        /// `{ domain = "api", entries = ["remote_address"] }`. Needs `ratelimit_service` in [`[listen]`](#listen).
        descriptor: Option<Descriptor> = Optional(Inline::<Descriptor>::or(
            "write, for example, `descriptor = { domain = \"api\", entries = [\"remote_address\"] }`",
        ));
        /// How gateways [count together](../guides/shared-counters.md#lease-or-exact). `"off"` (also allowed without
        /// `[counters.shared]`): this gateway counts alone. Without it: `mode` of [`[counters.shared]`](#countersshared).
        shared: Option<Sharing> = Optional(Choice(Sharing::Lease, &RULE_MODES));
        /// Names of the counters in Redis, [as another service writes them](../guides/shared-counters.md#names-of-another-service),
        /// such as `"service:{key}:{window}"`. Without it: the [default names](../guides/shared-counters.md#names-in-redis).
        key_format: Option<KeyFormat> = KEY_FORMAT;
        /// What the rule does while the store is unavailable. Without it: `on_outage` of `[counters.shared]`.
        on_outage: Option<OnOutage> = Optional(Choice(OnOutage::Local, &OUTAGES));
        /// Status of a refusal, also in the problem document. Without it: 429.
        status: Option<u16> = Optional(Integer(429, 400..=599));
        /// Body of a refusal, instead of a problem document. If several rules refuse, the rule that blocks longest decides. Its
        /// [variables](#variables-of-a-refusal) are replaced; all other braces stay.
        body: Option<String> = BODY;
        /// Media type of `body`. Without it: `"text/plain; charset=utf-8"`.
        content_type: Option<String> = CONTENT_TYPE;
        /// Instead of `body`: the refusal is an error of [this API](#fields-and-errors-of-model-apis), as its SDKs expect it.
        body_style: Option<BodyStyle> = Optional(Choice(BodyStyle::OpenAi, &BODY_STYLES));
        /// Upper bound of a random addition to `Retry-After`, so that waiting clients do not return at the same moment.
        retry_jitter: Duration = TimeOrZero(Duration::from_secs(5));
        /// Rate limit fields of this rule. Without it: as at the [top level](#top-level).
        headers: Option<RateLimitStyle> = Optional(Choice(RateLimitStyle::Ietf, &RATE_LIMIT_STYLES));
    }
}

settings! {
    /// A cost that a field of the request, or the response states.
    pub struct CostSettings checked by check_cost_table {
        /// Field of the request with the cost: a whole number from 0 to `max`. Another value, or a field given twice, gets
        /// 400. A cost of 0 takes nothing, and is admitted even if nothing is left or the limit is exceeded, so only let trusted
        /// clients set the field.
        request_header as "request-header": Option<String> = COST_FIELD;
        /// Field of the response with the cost, up to `max`. The difference from `reserve` is charged or refunded when the
        /// response head arrives, before the `RateLimit` fields are computed. If the window has too few tokens left, later
        /// windows grant that much less.
        response_header as "response-header": Option<String> = COST_FIELD;
        /// The usage that the response states, in its body. `"auto"`: in the members of [the known APIs](#usage), as JSON or as a
        /// stream of events. The difference from `reserve` is charged or refunded at the end of the body.
        usage: Option<UsageSource> = usage();
        /// With `usage`: [factor of each kind](#usage). Without it: every kind counts once.
        weights: Option<ModelWeights> = weights();
        /// With `usage`: what a response costs at least that states none, or breaks off. `"reserve"`: what was charged in advance.
        /// `"estimate"`: a token of output for each four bytes of its decoded body, and at least what was charged in advance.
        on_missing_usage: OnMissingUsage = Choice(OnMissingUsage::Reserve, &ON_MISSING_USAGE);
        /// The cost is the size of [bodies](#bytes), in steps of `unit`, rounded up for each request: of those of requests, of
        /// responses, or of both.
        bytes: Option<CountedBytes> = Optional(Choice(CountedBytes::Both, &COUNTED));
        /// With `bytes`: the bytes for which a request takes one token.
        unit: u64 = Size(byte_cost::DEFAULT_UNIT, "\"1KiB\"", 1..=byte_cost::UNIT_MAX);
        /// With `bytes`: what happens to a transfer that has exceeded the limit. `"cut"`: it is [broken off](#bytes).
        on_exceeded: OnExceeded = Choice(OnExceeded::Finish, &ON_EXCEEDED);
        /// With `usage`, `bytes` or `response-header`: statuses such as `429` and `"5xx"` of the server for which a response costs
        /// nothing that states no cost. With `usage`, the default is `["4xx", "5xx"]`, and requests that reach no server cost
        /// nothing either, unless the list is empty.
        refund_on: Option<Vec<RangeInclusive<u16>>> = Optional(Custom::or_empty(
            || Shape::list_of(vec![Shape::Integer(100..=599), Shape::Text("`\"4xx\"`")]),
            read_refund_statuses,
        ));
        /// With `request-header`: cost without the field.
        default: u32 = Integer(1, 0..=COST_MAX);
        /// With `bytes`: tokens that are charged in advance; 0 by default. With `response-header` and `usage`: charged in
        /// advance, and the whole charge if the response states no cost, or an unclear one. A client that disconnects before the
        /// response head pays `reserve`, so set it to the usual cost. With 0 a request takes nothing until its response, and is
        /// admitted while a token is left; the store then decides each request, as with `shared = "exact"`. With `usage` also a
        /// [table](#reserve).
        reserve: Reserve = reserve();
        /// Greatest cost. Without it: the smallest capacity of the rule's layers, or of a plan or override if that is larger. With
        /// `usage` and `bytes`: greatest `reserve`; what was used is charged whole.
        max: Option<u32> = Optional(Integer(100, 1..=COST_MAX));
    }
}

/// The rate-limit header fields of responses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateLimitStyle {
    /// `RateLimit` and `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11).
    Ietf,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    Legacy,
    Both,
    /// `X-RateLimit-Limit-Requests` and others.
    OpenAi,
    /// `Anthropic-RateLimit-Requests-Limit` and others.
    Anthropic,
    Off,
}

/// What the limits of a rule are a number of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuotaUnit {
    Requests,
    /// Of language models.
    Tokens,
    InputTokens,
    OutputTokens,
    /// Tokens with weights, such as prices.
    WeightedTokens,
    /// What a field of the request or the response states.
    Stated,
    Bytes,
}

impl QuotaUnit {
    /// The value of `qu` in `RateLimit-Policy`, which is `requests` without it.
    pub fn text(self) -> Option<&'static str> {
        match self {
            QuotaUnit::Tokens => Some("tokens"),
            QuotaUnit::InputTokens => Some("input-tokens"),
            QuotaUnit::OutputTokens => Some("output-tokens"),
            QuotaUnit::WeightedTokens => Some("weighted-tokens"),
            QuotaUnit::Bytes => Some("content-bytes"),
            QuotaUnit::Requests | QuotaUnit::Stated => None,
        }
    }
}

/// The response to requests that a rule refuses, as far as the rule configures it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RefusalResponse {
    /// From 400 to 599.
    pub status: Option<u16>,
    /// Replaces the problem document.
    pub body: Option<Body>,
    /// Replaces the problem document by an error of the API, and adds the fields that its SDKs read.
    pub body_style: Option<BodyStyle>,
    /// Upper bound in seconds of the random time that is added to Retry-After.
    pub retry_jitter_s: u64,
}

/// A rule of the limiter with the settings that only the gateway knows: how the rule appears in responses, and which keys and
/// responses it counts.
#[derive(Clone, PartialEq, Debug)]
pub struct GatewayRule {
    pub rule: Rule,
    /// The rate-limit header fields.
    pub rate_limit_style: RateLimitStyle,
    pub refusal: RefusalResponse,
    /// The responses whose requests it counts; `None`: all.
    pub count_when: Option<CountWhen>,
    /// The requests that it counts; `None`: all.
    pub when: Option<BodyCondition>,
    /// The usage that is the cost; `None`: another cost.
    pub usage: Option<UsageCost>,
    /// The bytes that are the cost; `None`: another cost.
    pub bytes: Option<ByteCost>,
    /// Statuses of the upstream with which a request costs nothing, unless its response states a cost.
    pub refund_on: Vec<RangeInclusive<u16>>,
    /// What happens to keys that name no client.
    pub on_unknown_key: OnUnknownKey,
    /// The descriptors that it answers to.
    pub descriptor: Option<Descriptor>,
}

impl GatewayRule {
    /// Whether the key has the client as a part.
    pub fn counts_clients(&self) -> bool {
        self.key.iter().any(|part| CLIENT.has(part))
    }

    pub fn quota_unit(&self) -> QuotaUnit {
        match (&self.usage, &self.cost) {
            (Some(usage), _) => match usage.weights.counted_tokens() {
                Some(CountedTokens::All) => QuotaUnit::Tokens,
                Some(CountedTokens::Input) => QuotaUnit::InputTokens,
                Some(CountedTokens::Output) => QuotaUnit::OutputTokens,
                None => QuotaUnit::WeightedTokens,
            },
            (None, _) if self.bytes.is_some() => QuotaUnit::Bytes,
            (None, Cost::Fixed(_)) => QuotaUnit::Requests,
            (None, Cost::Request { .. } | Cost::Response { .. }) => QuotaUnit::Stated,
        }
    }

    /// Whether it depends on the body of requests.
    pub fn reads_bodies(&self) -> bool {
        let reserves = self.usage.as_ref().is_some_and(|usage| usage.reserve.reads_bodies());
        self.when.is_some() || reserves || self.key.iter().any(|part| JSON.has(part))
    }

    /// The names of its limits in responses and metrics.
    pub fn layer_names(&self) -> impl Iterator<Item = String> {
        let layers = self.fixed_variants().flat_map(|layers| layers.iter().map(move |layer| (layers, layer)));
        let names = layers.map(|(layers, layer)| self.layer_name(layers, layer));
        names.chain(self.concurrent_name()).chain(self.penalty_name())
    }
}

impl Deref for GatewayRule {
    type Target = Rule;

    fn deref(&self) -> &Rule {
        &self.rule
    }
}

/// A rule that was checked by itself, and the positions of settings that other sections may make useless; `None`: not given.
pub struct CheckedRule {
    pub rule: GatewayRule,
    pub key_span: Option<Span>,
    pub on_unknown_key_span: Option<Span>,
    pub key_format_span: Option<Span>,
    pub descriptor_span: Option<Span>,
}

/// The cost of a request as written in the file. The layers of the rule bound it.
#[derive(Clone, PartialEq, Debug)]
pub enum WrittenCost {
    Fixed(u32),
    Stated(CostSource, Box<CostSettings>),
}

/// Where the cost is stated.
#[derive(Clone, PartialEq, Debug)]
pub enum CostSource {
    RequestHeader(String),
    ResponseHeader(String),
    Usage(UsageSource),
    Bytes(CountedBytes),
}

pub fn read_rules(
    item: Option<Item>,
    rate_limit_style: RateLimitStyle,
    certs: ClientCerts,
    default_sharing: DefaultSharing,
    report: &mut Report,
) -> Definitions<RuleId, CheckedRule> {
    let rules = Definitions::read(item, report, |name, table, report| {
        // The placeholder for an invalid rule. It has no key and no layers, so it causes no further problems.
        let rule = GatewayRule {
            rule: Rule::new(name, Vec::new(), OnMissing::Skip, Vec::new()),
            rate_limit_style,
            refusal: RefusalResponse::default(),
            count_when: None,
            when: None,
            usage: None,
            bytes: None,
            refund_on: Vec::new(),
            on_unknown_key: OnUnknownKey::Count,
            descriptor: None,
        };
        let mut checked = CheckedRule {
            rule,
            key_span: None,
            on_unknown_key_span: None,
            key_format_span: None,
            descriptor_span: None,
        };
        if let Some(table) = table {
            read_rule(&mut checked, table, certs, default_sharing, report);
        }
        checked
    });
    report_equal_layer_names(&rules, report);
    rules
}

/// Reads the table of one rule into `checked`.
fn read_rule(
    checked: &mut CheckedRule,
    mut table: Table,
    certs: ClientCerts,
    default_sharing: DefaultSharing,
    report: &mut Report,
) {
    let key = KeySettings::read(&mut table, report);
    report.size_unit = byte_cost::size_unit(&table);
    let settings = RuleSettings::read(&mut table, report);
    let exceptions = ExceptionSettings::read(&mut table, report);
    report.size_unit = None;
    table.suggest_for("mode", "shared", "did you mean `shared`? In a rule, the setting has this name");

    for key in ["shadow", "dry_run", "shadow_mode", "limit_req_dry_run"] {
        table.suggest_for(key, "on_limit", "write `on_limit = \"shadow\"`");
    }
    suggest_windows(&mut table);
    for (key, meant) in [("limit_req_status", "status"), ("rejected_code", "status"), ("status_code", "status")] {
        table.suggest_for(key, meant, format!("write `{meant} = 429`"));
    }

    checked.on_unknown_key_span = table.given("on_unknown_key").map(|item| item.key_span);
    checked.key_format_span = table.given("key_format").map(|item| item.span);
    checked.descriptor_span = table.given("descriptor").map(|item| item.key_span);
    let (key, on_missing, on_unknown_key) = key.finish(settings.descriptor.as_ref(), &mut table, certs, report);
    checked.rule.on_unknown_key = on_unknown_key;
    checked.key_span = table.given("key").map(|item| item.span);
    let rule = &mut checked.rule.rule;
    (rule.key, rule.on_missing) = (key, on_missing);
    rule.layers.clone_from(&settings.windows);
    rule.concurrent = settings.concurrent;
    exceptions.finish(rule, report);
    require_limits(&mut table);
    rule.cost = resolve_cost(&settings.cost, &table, rule, report);
    rule.on_limit = settings.resolve_on_limit(&table, report);
    rule.count_refused = settings.count_refused;
    rule.key_format.clone_from(&settings.key_format);
    rule.penalty_ms = settings.penalty.map(|penalty| penalty.as_millis() as u64);
    if let Some((mode, outage)) = default_sharing {
        rule.sharing = settings.shared.unwrap_or(mode);
        rule.on_outage = settings.on_outage.unwrap_or(outage);
    }
    check_sharing(rule.sharing, default_sharing, &table, report);
    let has_windows = !table.lacks("windows") || rule.variants().any(|layers| !layers.is_empty());
    if !has_windows && rule.concurrent_name().is_some() {
        rule.sharing = Sharing::Local;
        report_settings_of_windows(&table, report);
    }
    // A refund comes with the response: by then the lease of a sliding window may have ended.
    let has_refunds = settings.count_when.is_some() || rule.has_response_cost();
    if rule.sharing == Sharing::Lease && has_refunds && rule.has_sliding_windows() {
        rule.sharing = Sharing::Exact;
    }
    check_layers(rule, &table, report);
    check_content_type(&table, "the rule", report);
    check_body_style(&table, report);
    if let Some(item) = table.given("count_when").filter(|_| is_without_windows(rule, &table)) {
        let message = "`count_when` has no effect: the rule has no `windows`";
        report.missing(item.key_span, message, "add `windows`, or remove it");
    }
    check_penalty(rule, &table, report);
    check_key_format(rule, &table, report);
    check_descriptor(rule, settings.descriptor.as_ref(), &table, report);
    if let (Some(item), Some(_)) = (table.given("when"), table.given("descriptor")) {
        let message = "`when` cannot be combined with `descriptor`: requests to the rate limit service have no body";
        report.problem(item.key_span, message, "remove one of the two");
    }
    table.finish(report);

    let gateway_rule = &mut checked.rule;
    gateway_rule.rate_limit_style = settings.headers.unwrap_or(gateway_rule.rate_limit_style);
    gateway_rule.refusal = RefusalResponse {
        status: settings.status,
        body: Body::new(settings.body, settings.content_type),
        body_style: settings.body_style,
        retry_jitter_s: settings.retry_jitter.as_millis().div_ceil(1000) as u64,
    };
    gateway_rule.count_when = settings.count_when;
    gateway_rule.when = settings.when;
    if let WrittenCost::Stated(source, cost) = settings.cost {
        let by_default: &[_] = if matches!(source, CostSource::Usage(_)) { &FAILED } else { &[] };
        gateway_rule.refund_on = cost.refund_on.unwrap_or_else(|| by_default.to_vec());
        match source {
            CostSource::RequestHeader(_) | CostSource::ResponseHeader(_) => {}
            CostSource::Usage(source) => {
                let (weights, on_missing) = (cost.weights.unwrap_or_default(), cost.on_missing_usage);
                let (reserve, reserve_max) = (cost.reserve, cost.max.unwrap_or(u32::MAX));
                gateway_rule.usage = Some(UsageCost { source, weights, on_missing, reserve, reserve_max });
            }
            CostSource::Bytes(counted) => {
                gateway_rule.bytes = Some(ByteCost { counted, unit: cost.unit, on_exceeded: cost.on_exceeded });
            }
        }
    }
    gateway_rule.descriptor = settings.descriptor;
}

/// Reports a penalty without effect, or beside settings that exclude it.
fn check_penalty(rule: &Rule, table: &Table, report: &mut Report) {
    let Some(item) = table.given("penalty") else { return };
    if is_without_windows(rule, table) {
        let message = "`penalty` has no effect: the rule has no `windows`";
        return report.missing(item.key_span, message, "add `windows`, or remove it");
    }
    let is_sharded = rule.variants().flatten().any(|limit| limit.shards > 1);
    let other = match () {
        () if rule.delays() => "`on_limit = \"delay\"`",
        () if rule.is_shared() && is_sharded => "`shards` of shared counters",
        () => return,
    };
    report.problem(item.key_span, format!("`penalty` cannot be combined with {other}"), "remove one of the two");
}

/// Whether no variant of a rule has windows, and none were meant.
fn is_without_windows(rule: &Rule, table: &Table) -> bool {
    table.lacks("windows") && rule.variants().all(<[Limit]>::is_empty)
}

impl RuleSettings {
    /// What happens at the limit, with the settings of the delay.
    fn resolve_on_limit(&self, table: &Table, report: &mut Report) -> OnLimit {
        let item = table.given("on_limit");
        match (self.on_limit, self.max_delay) {
            (OnLimit::Delay { .. }, Some(delay)) => {
                OnLimit::Delay { max_delay_ms: delay.as_millis() as u64, max_waiting: self.max_waiting }
            }
            (OnLimit::Delay { .. }, None) => {
                if let Some(item) = item.filter(|_| table.lacks("max_delay")) {
                    let message = "`on_limit = \"delay\"` needs `max_delay`, the longest time that a request may wait";
                    report.missing(item.span, message, "add `max_delay = \"2s\"`");
                }
                OnLimit::Refuse
            }
            (chosen @ (OnLimit::Refuse | OnLimit::Shadow), _) => {
                let is_valid = |item: Item| ON_LIMIT.iter().any(|(word, _)| item.value.as_str() == Some(word));
                let unused = ["max_delay", "max_waiting"].into_iter().filter_map(|key| table.given(key));
                for item in unused.filter(|_| item.clone().is_none_or(is_valid)) {
                    let message = format!("`{}` has no effect: the rule does not delay requests", item.key);
                    report.missing(item.key_span, message, "add `on_limit = \"delay\"`, or remove it");
                }
                chosen
            }
        }
    }
}

/// Reports settings of shared counters that have no effect.
fn check_sharing(sharing: Sharing, default_sharing: DefaultSharing, table: &Table, report: &mut Report) {
    let shared = table.given("shared");
    let others = ["on_outage", "key_format"].into_iter().filter_map(|key| table.given(key));
    if default_sharing.is_none() {
        // `shared = "off"` is what happens without `[counters.shared]`, so it is not a problem.
        let shared = shared.filter(|item| item.value.as_str() != Some("off"));
        for item in shared.into_iter().chain(others) {
            let message = format!("`{}` has no effect: there is no `[counters.shared]`", item.key);
            report.missing(item.key_span, message, format!("remove it, or {TABLE_FIX}"));
        }
    } else if sharing == Sharing::Local {
        for item in others {
            let message = format!("`{}` has no effect: the rule has `shared = \"off\"`", item.key);
            report.missing(item.key_span, message, "remove it, or remove `shared = \"off\"`");
        }
    }
}

/// Reports settings that concern only windows, for a rule that limits only the requests in flight.
fn report_settings_of_windows(table: &Table, report: &mut Report) {
    for item in ["cost", "count_refused", "key_format"].into_iter().filter_map(|key| table.given(key)) {
        let message = format!("`{}` has no effect: the rule has no `windows`", item.key);
        report.missing(item.key_span, message, "add `windows`, or remove it");
    }
}

/// Checks the layers against the cost, and against what happens at the limit.
fn check_layers(rule: &Rule, table: &Table, report: &mut Report) {
    let windows = table.given("windows");
    let Some(item) = windows.clone().or(table.given("plans")).or(table.given("overrides")) else { return };
    let limits = || rule.variants().flatten();
    // Layers of plans and overrides with the same windows share counters, and a reserve concerns all layers.
    let is_account = |limit: &Limit| {
        rule.reserves() || limits().any(|other| other.windows == limit.windows && other.capacity.is_some())
    };
    let has_sharded_account = limits().any(|limit| limit.shards > 1 && is_account(limit));
    let excludes_shards = match (&rule.cost, rule.on_limit) {
        (Cost::Response { .. }, _) => Some(stated_by(rule)),
        (_, OnLimit::Delay { .. }) => Some("`on_limit = \"delay\"`"),
        _ if has_sharded_account && rule.count_refused => Some("`count_refused` and `capacity` or `reserve`"),
        _ if rule.count_refused && rule.is_shared() => {
            Some("`count_refused` in a rule that gateways share (`shared = \"off\"` counts on this machine alone)")
        }
        _ if has_sharded_account && rule.is_shared() => Some(
            "`capacity` or `reserve` in a rule that gateways share (`shared = \"off\"` counts on this machine alone)",
        ),
        _ => None,
    };
    if let (Some(other), true) = (excludes_shards, limits().any(|limit| limit.shards > 1)) {
        let message = format!("`shards` cannot be combined with {other}");
        report.problem(item.span.clone(), message, "remove `shards`");
    }
    if rule.has_sliding_windows() && matches!(rule.on_limit, OnLimit::Delay { .. }) {
        let message = "`sliding` cannot be combined with `on_limit = \"delay\"`";
        report.problem(item.span.clone(), message, "remove `sliding`, or remove `on_limit`");
    }
    if let Some(windows) = windows.filter(|_| layers_are_comparable(rule)) {
        report_unreachable_layers(&windows, &rule.layers, report);
    }
}

/// Reports two layers with the same name: responses and metrics distinguish layers by name only.
fn report_equal_layer_names(rules: &Definitions<RuleId, CheckedRule>, report: &mut Report) {
    let mut used: Vec<(String, &str)> = Vec::new();
    for entry in &rules.entries {
        let rule = &entry.value.rule;
        let names: BTreeSet<String> = rule.layer_names().collect();
        if let Some((name, other)) = used.iter().find(|(name, _)| names.contains(name)) {
            let message = format!(
                "two layers have the name {} in responses: one of the rule {}, one of the rule {}",
                quoted(name),
                quoted(other),
                quoted(&rule.name)
            );
            report.problem(entry.span.clone(), message, "give one of the two rules another name");
        }
        used.extend(names.into_iter().map(|name| (name, entry.name.as_str())));
    }
}

fn read_cost(item: &Item, report: &mut Report) -> Option<WrittenCost> {
    match item.value {
        DeValue::Table(_) => {
            let table = item.table("the cost", COST_FORMS, report)?;
            let mut cost = CostSettings::read_all(table, report);
            Some(cost.take_source().map_or(WrittenCost::Fixed(1), |source| WrittenCost::Stated(source, Box::new(cost))))
        }
        DeValue::String(text) if text.contains(':') || text.starts_with(|c: char| c.is_ascii_alphabetic()) => {
            let name = parse_field_name(text.trim_start_matches("header:"));
            let fix = format!("write `cost = {{ request-header = \"{}\" }}`", name.as_deref().unwrap_or("x-cost"));
            item.wrong_type("a whole number or a table", &fix, report)
        }
        _ => Some(WrittenCost::Fixed(u32::try_from(item.integer(0..=COST_MAX, report)?).ok()?)),
    }
}

/// The cost of a rule with [`Cost::Response`], in messages.
pub fn stated_by(rule: &Rule) -> &'static str {
    match rule.cost {
        Cost::Response { source: None, .. } => "a cost by `usage` or `bytes`",
        _ => "a cost from a response header",
    }
}

fn read_refund_statuses(item: &Item, report: &mut Report) -> Option<Vec<RangeInclusive<u16>>> {
    let is_empty = matches!(item.value, DeValue::Array(list) if list.is_empty());
    if is_empty { Some(Vec::new()) } else { read_statuses(item, report) }
}

impl CostSettings {
    /// Where the cost is stated; `None` if nowhere or in several places, which is reported.
    fn take_source(&mut self) -> Option<CostSource> {
        let given = [
            self.request_header.take().map(CostSource::RequestHeader),
            self.response_header.take().map(CostSource::ResponseHeader),
            self.usage.take().map(CostSource::Usage),
            self.bytes.take().map(CostSource::Bytes),
        ];
        let mut given = given.into_iter().flatten();
        given.next().filter(|_| given.next().is_none())
    }
}

/// Where the cost is stated: the key, and which of the keys of the amount is of use with it, and which is not.
const COST_SOURCES: [(&str, &str, &str); 4] = [
    ("request-header", "default", "reserve"),
    ("response-header", "reserve", "default"),
    ("usage", "reserve", "default"),
    ("bytes", "reserve", "default"),
];

/// The key of the source alone decides which of the forms is meant.
fn check_cost_table(cost: &mut CostSettings, table: &mut Table, report: &mut Report) {
    table.suggest_for("response-body", "usage", "write `usage = { json = [\"/usage/total_tokens\"] }`");
    let fix =
        "a cost is read from a field, or from the response: write `request-header = \"x-cost\"`, or `usage = \"auto\"`";
    table.suggest_for("request-body", "request-header", fix);
    let mut given = COST_SOURCES.iter().filter_map(|source| Some((table.given(source.0)?, source)));
    let Some((item, (source, key, unused))) = given.next() else {
        if COST_SOURCES.iter().all(|(source, ..)| table.lacks(source)) {
            let fix = "write `request-header = \"x-cost\"`, or `response-header` or `usage` if the upstream reports the cost, or `bytes`";
            let message = "the cost has neither `request-header` nor `response-header` nor `usage` nor `bytes`";
            report.problem(table.span.clone(), message, fix);
        }
        return;
    };
    if let Some((second, _)) = given.next() {
        let message = format!("`{source}` and `{}` are both given", second.key);
        return report.problem(second.key_span, message, "keep one of the two");
    }
    if let Some(unused) = table.given(unused) {
        let message = format!("`{}` has no effect with `{}`", unused.key, item.key);
        report.problem(unused.key_span, message, format!("write `{key}`, or remove it"));
    }
    if *source != "usage" {
        report_without_usage(table, report);
        if let Some(reserve) = table.given("reserve").filter(|_| cost.reserve.reads_bodies()) {
            let message = format!("`reserve` cannot be a table with `{source}`");
            report.problem(reserve.span, message, "write a number");
        }
    }
    if *source == "bytes" {
        if table.given("reserve").is_none() {
            cost.reserve = Reserve::Fixed(0);
        }
    } else {
        byte_cost::report_without_bytes(table, report);
    }
    if let Some(unused) = table.given("refund_on").filter(|_| *source == "request-header") {
        let message = "`refund_on` has no effect with `request-header`";
        report.problem(unused.key_span, message, "remove it, or see `count_when`");
    }
    let default = if *key == "default" { cost.default } else { cost.reserve.default_cost() };
    if let (Some(item), Some(max)) = (table.given(key), cost.max.filter(|max| default > *max)) {
        let message = format!("`{key}` is `{default}`, which is more than `max`, `{max}`");
        report.problem(item.span, message, format!("write at most `{max}`, or raise `max`"));
    }
}

/// The cost of a request, for a rule whose layers have been read.
fn resolve_cost(cost: &WrittenCost, table: &Table, rule: &Rule, report: &mut Report) -> Cost {
    let capacities = || rule.variants().filter_map(smallest_capacity);
    // The default of `max` is the largest capacity among plans and overrides: a plan with a small capacity must not
    // restrict the others.
    let max = |max: &Option<u32>| max.or(capacities().max()).unwrap_or(u32::MAX);
    let (cost, key) = match cost {
        WrittenCost::Fixed(cost) => (Cost::Fixed(*cost), ""),
        WrittenCost::Stated(CostSource::RequestHeader(header), cost) => {
            let (source, default) = (header.clone(), cost.default);
            (Cost::Request { source, default, max: max(&cost.max) }, "default")
        }
        WrittenCost::Stated(CostSource::ResponseHeader(header), cost) => {
            let (source, reserve) = (Some(header.clone()), cost.reserve.default_cost());
            (Cost::Response { source, reserve, max: max(&cost.max) }, "reserve")
        }
        // A reserve above a capacity is lowered to it.
        WrittenCost::Stated(CostSource::Usage(_) | CostSource::Bytes(_), cost) => {
            let reserve = cost.reserve.default_cost().min(max(&None));
            return Cost::Response { source: None, reserve, max: u32::MAX };
        }
    };
    let Some(item) = table.given("cost") else { return cost };
    let default = item.tables().iter().find_map(|table| table.given(key));
    report_unaffordable(&default.unwrap_or(item), cost.default_cost(), capacities().min(), report);
    cost
}

/// The smallest capacity of the layers: a request of a higher cost is never admitted.
pub fn smallest_capacity(layers: &[Limit]) -> Option<u32> {
    layers.iter().map(Limit::capacity).min()
}

/// Reports a cost above the smallest capacity.
pub fn report_unaffordable(item: &Item, cost: u32, smallest: Option<u32>, report: &mut Report) {
    if let Some(smallest) = smallest.filter(|smallest| *smallest < cost) {
        let (message, fix) = unaffordable(cost, smallest);
        report.problem(item.span.clone(), message, fix);
    }
}

/// The message and the fix for a cost above the smallest capacity.
pub fn unaffordable(cost: u32, smallest: u32) -> (String, String) {
    let message = format!("a request that costs `{cost}` can never be admitted: the smallest limit is `{smallest}`");
    (message, format!("write a cost of at most `{smallest}`, or raise the limit"))
}
