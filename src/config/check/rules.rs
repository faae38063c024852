//! `[rules.NAME]`: the key that a rule counts by, its layers, its cost, and what happens at the limit.
//!
//! This file checks each rule by itself. `routes` checks that the key of a rule exists on the routes that use the rule.

use std::collections::BTreeSet;
use std::time::Duration;

use toml::de::DeValue;

use super::values::{Definitions, FIELD_NAME_FIX, parse_field_name, read_duration_ms};
use super::{key, overrides, rule_windows};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::ClientCerts;
use crate::config::redis::{DefaultSharing, RuleSharingSettings};
use crate::config::response_body::{BODY, Body, CONTENT_TYPE, check_content_type};
use crate::config::settings::{DAY_MS, Kind};
use crate::config::toml_reader::{Item, Table};
use crate::config::{RATE_LIMIT_STYLES, RateLimitStyle, RefusalResponse};
use transom_limiter::key::OnMissing;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Rule};

/// The default of `max_waiting`: requests that one rule may delay at a time.
const MAX_WAITING_DEFAULT: u32 = 1000;
const MAX_WAITING_MAX: u64 = 1_000_000;
const COST_MAX: u64 = u32::MAX as u64;
const COST_FORMS: &str = "write a whole number, or a table such as `cost = { request-header = \"x-cost\" }`";

/// How a rule appears in responses.
pub struct RuleResponses {
    pub rate_limit_style: RateLimitStyle,
    pub refusal: RefusalResponse,
}

pub fn read_rules(
    item: Option<Item>,
    rate_limit_style: RateLimitStyle,
    certs: ClientCerts,
    default_sharing: DefaultSharing,
    report: &mut Report,
) -> Definitions<(Rule, RuleResponses)> {
    let rules = Definitions::read(item, report, |name, table, report| {
        // The placeholder for an invalid rule. It has no key and no layers, so it causes no further problems.
        let mut rule = Rule::new(name, Vec::new(), OnMissing::Skip, Vec::new());
        let mut responses = RuleResponses { rate_limit_style, refusal: RefusalResponse::default() };
        if let Some(table) = table {
            read_rule(&mut rule, &mut responses, table, certs, default_sharing, report);
        }
        (rule, responses)
    });
    report_equal_layer_names(&rules, report);
    rules
}

/// Reads the table of one rule into `rule` and `responses`.
fn read_rule(
    rule: &mut Rule,
    responses: &mut RuleResponses,
    mut table: Table,
    certs: ClientCerts,
    default_sharing: DefaultSharing,
    report: &mut Report,
) {
    let key = key::KeySettings {
        key: table
            .require("key", "write `key = \"ip\"` to count each address, or `key = \"global\"` to count all as one"),
        on_missing: table.get("on_missing_key"),
        ipv4_prefix: table.get("ipv4_prefix"),
        ipv6_prefix: table.get("ipv6_prefix"),
        certs,
    };
    let windows = table.require("windows", "write `windows = [\"33/minute\"]`");
    let cost = table.get("cost");
    let limit_action = LimitActionSettings {
        on_limit: table.get("on_limit"),
        delay: table.get("max_delay"),
        waiting: table.get("max_waiting"),
    };
    let count_refused = table.get("count_refused");
    let sharing = RuleSharingSettings::take_from(&mut table);
    let refusal = RefusalSettings::take_from(&mut table);
    check_content_type(&table, "the rule", report);
    let exceptions = overrides::OverrideSettings {
        plans: table.get("plans"),
        overrides: table.get("overrides"),
        exemptions: table.get("exemptions"),
    };
    let rate_limit_style = table.get("headers").and_then(|item| item.choice(&RATE_LIMIT_STYLES, report));
    table.suggest_for("mode", "shared", "did you mean `shared`? In a rule, the setting has this name");
    let misspelled = table.finish(report);

    (rule.key, rule.on_missing) = key.read(misspelled.contains(&"on_missing_key"), report);
    let windows_span = windows.as_ref().map(|item| item.span.clone());
    rule.layers = windows.as_ref().map(|item| rule_windows::read_layers(item, report)).unwrap_or_default();
    exceptions.read(rule, report);
    rule.cost = cost.and_then(|item| read_cost(&item, rule, report)).unwrap_or(Cost::Fixed(1));
    rule.on_limit = limit_action.read(misspelled.contains(&"max_delay"), report).unwrap_or(OnLimit::Refuse);
    sharing.read(rule, default_sharing, misspelled.contains(&"shared"), report);
    rule.count_refused = count_refused.and_then(|item| item.boolean(report)).unwrap_or(false);
    if let (Some(span), true) = (windows_span, rule.variants().flatten().any(|limit| limit.shards > 1)) {
        let other = match (&rule.cost, rule.on_limit) {
            (Cost::Response { .. }, _) => Some("a cost from a response header"),
            (_, OnLimit::Delay { .. }) => Some("`on_limit = \"delay\"`"),
            _ => None,
        };
        if let Some(other) = other {
            let message = format!("`shards` cannot be combined with {other}");
            report.problem(span, message, "remove `shards`");
        }
    }
    if let (Some(item), true) = (&windows, rule_windows::layers_are_comparable(rule)) {
        rule_windows::report_unreachable_layers(item, &rule.layers, report);
    }
    responses.rate_limit_style = rate_limit_style.unwrap_or(responses.rate_limit_style);
    responses.refusal = refusal.read(report);
}

/// The settings for requests over the limit.
struct LimitActionSettings<'d> {
    on_limit: Option<Item<'d>>,
    delay: Option<Item<'d>>,
    waiting: Option<Item<'d>>,
}

impl LimitActionSettings<'_> {
    /// `misspelled` is true if an unknown setting was probably meant to be `max_delay`.
    fn read(self, misspelled: bool, report: &mut Report) -> Option<OnLimit> {
        let two_seconds = Duration::from_secs(2);
        let delay_ms = self.delay.as_ref().map(|item| read_duration_ms(item, 1..=DAY_MS, two_seconds, report));
        let max_waiting = self.waiting.as_ref().map(|item| item.integer(1..=MAX_WAITING_MAX, report));
        // `max_delay` and `max_waiting` complete this choice below.
        let delay = OnLimit::Delay { max_delay_ms: 0, max_waiting: MAX_WAITING_DEFAULT };
        let choices = [("refuse", OnLimit::Refuse), ("delay", delay), ("shadow", OnLimit::Shadow)];
        let chosen = match &self.on_limit {
            Some(item) => item.choice(&choices, report)?,
            None => OnLimit::Refuse,
        };
        let max_waiting = max_waiting.flatten().and_then(|max| u32::try_from(max).ok()).unwrap_or(MAX_WAITING_DEFAULT);
        match (chosen, &self.on_limit, delay_ms) {
            (OnLimit::Delay { .. }, Some(item), None) => {
                if !misspelled {
                    let message = "`on_limit = \"delay\"` needs `max_delay`, the longest time that a request may wait";
                    report.missing(item.span.clone(), message, "add `max_delay = \"2s\"`");
                }
                None
            }
            (OnLimit::Delay { .. }, _, delay_ms) => {
                Some(OnLimit::Delay { max_delay_ms: delay_ms.flatten()?, max_waiting })
            }
            (OnLimit::Refuse | OnLimit::Shadow, ..) => {
                for item in [&self.delay, &self.waiting].into_iter().flatten() {
                    let message = format!("`{}` has no effect: the rule does not delay requests", item.key);
                    report.missing(item.key_span.clone(), message, "add `on_limit = \"delay\"`, or remove it");
                }
                Some(chosen)
            }
        }
    }
}

/// Reports two layers with the same name: responses and metrics distinguish layers by name only.
fn report_equal_layer_names(rules: &Definitions<(Rule, RuleResponses)>, report: &mut Report) {
    let mut used: Vec<(String, &str)> = Vec::new();
    for entry in &rules.entries {
        let rule = &entry.value.0;
        let layers = rule.variants().flat_map(|layers| (0..layers.len()).map(move |layer| (layers, layer)));
        let names: BTreeSet<String> = layers.map(|(layers, layer)| rule.layer_name(layers, layer)).collect();
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

/// The settings for the response to a refused request.
struct RefusalSettings<'d> {
    status: Option<Item<'d>>,
    body: Option<Item<'d>>,
    content_type: Option<Item<'d>>,
    retry_jitter: Option<Item<'d>>,
}

impl<'d> RefusalSettings<'d> {
    fn take_from(table: &mut Table<'d>) -> RefusalSettings<'d> {
        RefusalSettings {
            status: table.get("status"),
            body: table.get("body"),
            content_type: table.get("content_type"),
            retry_jitter: table.get("retry_jitter"),
        }
    }

    fn read(self, report: &mut Report) -> RefusalResponse {
        let status = self.status.and_then(|item| item.integer(400..=599, report));
        let body = self.body.and_then(|item| BODY.read(&item, report)).flatten();
        let content_type = self.content_type.and_then(|item| CONTENT_TYPE.read(&item, report)).flatten();
        let jitter_ms =
            self.retry_jitter.and_then(|item| read_duration_ms(&item, 0..=DAY_MS, Duration::from_secs(5), report));
        RefusalResponse {
            status: status.and_then(|status| u16::try_from(status).ok()),
            body: Body::new(body, content_type),
            retry_jitter_s: jitter_ms.unwrap_or(0).div_ceil(1000),
        }
    }
}

/// Reads the cost of a rule. The layers of the rule must have been read, because they bound the cost.
fn read_cost(item: &Item, rule: &Rule, report: &mut Report) -> Option<Cost> {
    let smallest = rule.variants().filter_map(smallest_capacity).min();
    match item.value {
        DeValue::Table(_) => read_header_cost(item.table("the cost", COST_FORMS, report)?, rule, smallest, report),
        DeValue::String(text) if text.contains(':') || text.starts_with(|c: char| c.is_ascii_alphabetic()) => {
            let name = text.trim_start_matches("header:");
            let fix = format!(
                "write `cost = {{ request-header = \"{}\" }}`",
                parse_field_name(name).as_deref().unwrap_or("x-cost")
            );
            item.wrong_type("a whole number or a table", &fix, report)
        }
        _ => {
            let cost = u32::try_from(item.integer(0..=COST_MAX, report)?).ok()?;
            report_unaffordable(item, cost, smallest, report);
            Some(Cost::Fixed(cost))
        }
    }
}

/// The smallest capacity of the layers: a request of a higher cost is never admitted.
pub fn smallest_capacity(layers: &[Limit]) -> Option<u32> {
    layers.iter().map(|limit| limit.capacity).min()
}

/// Reports a cost above the smallest capacity.
pub fn report_unaffordable(item: &Item, cost: u32, smallest: Option<u32>, report: &mut Report) {
    if let Some(smallest) = smallest.filter(|smallest| *smallest < cost) {
        let message =
            format!("a request that costs `{cost}` can never be admitted: the smallest limit is `{smallest}`");
        let fix = format!("write a cost of at most `{smallest}`, or raise the limit");
        report.problem(item.span.clone(), message, fix);
    }
}

fn read_header_cost(mut table: Table, rule: &Rule, smallest: Option<u32>, report: &mut Report) -> Option<Cost> {
    let span = table.span.clone();
    let (request, response) = (table.get("request-header"), table.get("response-header"));
    let (default, reserve, max) = (table.get("default"), table.get("reserve"), table.get("max"));
    let misspelled = table.finish(report);

    let number = |item: &Option<Item>, min: u64, report: &mut Report| {
        item.as_ref()
            .and_then(|item| item.integer(min..=COST_MAX, report))
            .and_then(|number| u32::try_from(number).ok())
    };
    // The name of the header setting alone decides which of the two forms is meant.
    let (header, default_item, key, unused) = match (request, response) {
        (Some(header), None) => (header, &default, "default", &reserve),
        (None, Some(header)) => (header, &reserve, "reserve", &default),
        (Some(_), Some(second)) => {
            let message = "`request-header` and `response-header` are both given";
            report.problem(second.key_span, message, "keep one of the two");
            return None;
        }
        (None, None) => {
            if misspelled.is_empty() {
                let fix = "write `request-header = \"x-cost\"`, or `response-header` if the upstream reports the cost";
                report.problem(span, "the cost has neither `request-header` nor `response-header`", fix);
            }
            return None;
        }
    };
    if let Some(item) = unused {
        let message = format!("`{}` has no effect with `{}`", item.key, header.key);
        report.problem(item.key_span.clone(), message, format!("write `{key}`, or remove it"));
    }
    // The default of `max` is the largest capacity among plans and overrides: a plan with a small capacity must not
    // restrict the others.
    let largest = rule.variants().filter_map(smallest_capacity).max();
    let max_cost = number(&max, 1, report).or(largest).unwrap_or(u32::MAX);
    let default_cost = number(default_item, 0, report).unwrap_or(1);
    if let Some(item) = default_item {
        if default_cost > max_cost && max.is_some() {
            let message = format!("`{key}` is `{default_cost}`, which is more than `max`, `{max_cost}`");
            report.problem(item.span.clone(), message, format!("write at most `{max_cost}`, or raise `max`"));
        } else {
            report_unaffordable(item, default_cost, smallest, report);
        }
    }
    let word = header.string("\"x-cost\"", report)?;
    let Some(name) = parse_field_name(word.text) else {
        report.problem(word.span, format!("{} is not a header field name", quoted(word.text)), FIELD_NAME_FIX);
        return None;
    };
    Some(match header.key {
        "request-header" => Cost::Request { header: name, default: default_cost, max: max_cost },
        _ => Cost::Response { header: name, reserve: default_cost, max: max_cost },
    })
}
