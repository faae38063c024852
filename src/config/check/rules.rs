//! A rule: who is counted, in which layers, and what happens at the limit.
//!
//! What a single rule says is checked here; whether its key exists on the routes that use it is seen
//! only there (`routes`).

use std::collections::BTreeSet;
use std::time::Duration;

use toml::de::DeValue;

use super::redis::{DefaultSharing, RuleSharingSettings};
use super::values::{
    DAY_MS, Definitions, FIELD_NAME_FIX, HEADER_FORMATS, parse_field_name, read_body, read_duration_ms,
};
use super::{key, overrides, rule_windows};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::ClientCerts;
use crate::config::toml_reader::{Item, Table};
use crate::config::{RateLimitStyle, RefusalResponse};
use transom_limiter::key::OnMissing;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Rule};

/// How many requests may wait because of a rule that does not say.
const WAITING: u32 = 1000;
const WAITING_MAX: u64 = 1_000_000;

/// What answers show of a rule.
pub struct RuleResponses {
    pub fields: RateLimitStyle,
    pub refusal: RefusalResponse,
}

pub fn read_rules(
    item: Option<Item>,
    fields: RateLimitStyle,
    certs: ClientCerts,
    usual: DefaultSharing,
    report: &mut Report,
) -> Definitions<(Rule, RuleResponses)> {
    let rules = Definitions::read(item, report, |name, table, report| {
        // Stands in for a rule that cannot be read; it asks for nothing, so no problem follows.
        let mut rule = Rule::new(name, Vec::new(), OnMissing::Skip, Vec::new());
        let mut looks = RuleResponses { fields, refusal: RefusalResponse::default() };
        if let Some(table) = table {
            read_rule(&mut rule, &mut looks, table, certs, usual, report);
        }
        (rule, looks)
    });
    report_equal_layer_names(&rules, report);
    rules
}

/// Fills in a rule, and what answers show of it.
fn read_rule(
    rule: &mut Rule,
    looks: &mut RuleResponses,
    mut table: Table,
    certs: ClientCerts,
    usual: DefaultSharing,
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
    let limits = LimitActionSettings {
        on_limit: table.get("on_limit"),
        delay: table.get("max_delay"),
        waiting: table.get("max_waiting"),
    };
    let count_refused = table.get("count_refused");
    let sharing = RuleSharingSettings::take_from(&mut table);
    let refusal = RefusalSettings::take_from(&mut table);
    let exceptions = overrides::OverrideSettings {
        plans: table.get("plans"),
        overrides: table.get("overrides"),
        exemptions: table.get("exemptions"),
    };
    let fields = table.get("headers").and_then(|item| item.choice(&HEADER_FORMATS, report));
    table.suggest_for("mode", "shared", "did you mean `shared`? That is how it is called in a rule");
    let misspelt = table.finish(report);

    (rule.key, rule.on_missing) = key.read(misspelt.contains(&"on_missing_key"), report);
    let shards = windows.as_ref().map(|item| item.span.clone());
    rule.layers = windows.as_ref().map(|item| rule_windows::read_layers(item, report)).unwrap_or_default();
    exceptions.read(rule, report);
    rule.cost = cost.and_then(|item| read_cost(&item, rule, report)).unwrap_or(Cost::Fixed(1));
    rule.on_limit = limits.read(misspelt.contains(&"max_delay"), report).unwrap_or(OnLimit::Refuse);
    sharing.read(rule, usual, misspelt.contains(&"shared"), report);
    rule.count_refused = count_refused.and_then(|item| item.boolean(report)).unwrap_or(false);
    if let (Some(span), true) = (shards, rule.variants().flatten().any(|limit| limit.shards > 1)) {
        let other = match (&rule.cost, rule.on_limit) {
            (Cost::Response { .. }, _) => Some("a cost that the answer tells"),
            (_, OnLimit::Delay { .. }) => Some("`on_limit = \"delay\"`"),
            _ => None,
        };
        if let Some(other) = other {
            let message = format!("`shards` are for windows that stand for themselves, and {other} ties them together");
            report.problem(span, message, "remove `shards`");
        }
    }
    if let (Some(item), true) = (&windows, rule_windows::layers_are_comparable(rule)) {
        rule_windows::report_unreachable_layers(item, &rule.layers, report);
    }
    looks.fields = fields.unwrap_or(looks.fields);
    looks.refusal = refusal.read(report);
}

/// What a rule says about a request that finds a layer full.
struct LimitActionSettings<'d> {
    on_limit: Option<Item<'d>>,
    delay: Option<Item<'d>>,
    waiting: Option<Item<'d>>,
}

impl LimitActionSettings<'_> {
    /// `misspelt`: there is a setting that was probably meant to be `max_delay`.
    fn read(self, misspelt: bool, report: &mut Report) -> Option<OnLimit> {
        let two_seconds = Duration::from_secs(2);
        let delay_ms = self.delay.as_ref().map(|item| read_duration_ms(item, 1..=DAY_MS, two_seconds, report));
        let waiting = self.waiting.as_ref().map(|item| item.integer(1..=WAITING_MAX, report));
        // Stands for what the two other settings complete.
        let delay = OnLimit::Delay { max_delay_ms: 0, max_waiting: WAITING };
        let words = [("refuse", OnLimit::Refuse), ("delay", delay), ("shadow", OnLimit::Shadow)];
        let chosen = match &self.on_limit {
            Some(item) => item.choice(&words, report)?,
            None => OnLimit::Refuse,
        };
        let max_waiting = waiting.flatten().and_then(|most| u32::try_from(most).ok()).unwrap_or(WAITING);
        match (chosen, &self.on_limit, delay_ms) {
            (OnLimit::Delay { .. }, Some(item), None) => {
                if !misspelt {
                    let message = "the rule does not say how long a request may wait";
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

/// Answers and metrics tell layers apart by their names alone.
fn report_equal_layer_names(rules: &Definitions<(Rule, RuleResponses)>, report: &mut Report) {
    let mut taken: Vec<(String, &str)> = Vec::new();
    for entry in &rules.entries {
        let rule = &entry.value.0;
        let layers = rule.variants().flat_map(|layers| (0..layers.len()).map(move |layer| (layers, layer)));
        let names: BTreeSet<String> = layers.map(|(layers, layer)| rule.layer_name(layers, layer)).collect();
        if let Some((name, other)) = taken.iter().find(|(name, _)| names.contains(name)) {
            let message = format!(
                "answers would call two layers {}: one of the rule {}, one of the rule {}",
                quoted(name),
                quoted(other),
                quoted(&rule.name)
            );
            report.problem(entry.span.clone(), message, "give one of the two rules another name");
        }
        taken.extend(names.into_iter().map(|name| (name, entry.name.as_str())));
    }
}

/// What a rule says about its refusals.
struct RefusalSettings<'d> {
    status: Option<Item<'d>>,
    body: Option<Item<'d>>,
    content_type: Option<Item<'d>>,
    retry_jitter: Option<Item<'d>>,
}

impl<'d> RefusalSettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> RefusalSettings<'d> {
        RefusalSettings {
            status: table.get("status"),
            body: table.get("body"),
            content_type: table.get("content_type"),
            retry_jitter: table.get("retry_jitter"),
        }
    }

    pub fn read(self, report: &mut Report) -> RefusalResponse {
        let status = self.status.and_then(|item| item.integer(400..=599, report));
        let body = read_body(self.body, self.content_type, "the rule", report);
        let jitter_ms =
            self.retry_jitter.and_then(|item| read_duration_ms(&item, 0..=DAY_MS, Duration::from_secs(5), report));
        RefusalResponse {
            status: status.and_then(|status| u16::try_from(status).ok()),
            body,
            retry_jitter_s: jitter_ms.unwrap_or(0).div_ceil(1000),
        }
    }
}

const COST_MAX: u64 = u32::MAX as u64;
const COST_FORMS: &str = "write a whole number, or such as `cost = { request-header = \"x-cost\" }`";

/// Reads the cost of a rule whose layers are known: they are what it is paid from.
pub fn read_cost(item: &Item, rule: &Rule, report: &mut Report) -> Option<Cost> {
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

/// The most that any request can pay in all layers.
pub fn smallest_capacity(layers: &[Limit]) -> Option<u32> {
    layers.iter().map(|limit| limit.capacity).min()
}

/// Reports a cost that no request can ever pay.
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
    let misspelt = table.finish(report);

    let number = |item: &Option<Item>, least: u64, report: &mut Report| {
        item.as_ref()
            .and_then(|item| item.integer(least..=COST_MAX, report))
            .and_then(|number| u32::try_from(number).ok())
    };
    // The fields' own name is all that is needed to know which of the two forms was meant.
    let (header, before, key, in_vain) = match (request, response) {
        (Some(header), None) => (header, &default, "default", &reserve),
        (None, Some(header)) => (header, &reserve, "reserve", &default),
        (Some(_), Some(second)) => {
            let message = "a cost is told by the request or by the answer, not by both";
            report.problem(second.key_span, message, "remove `request-header` or `response-header`");
            return None;
        }
        (None, None) => {
            if misspelt.is_empty() {
                let fix = "write `request-header = \"x-cost\"`, or `response-header`, if the upstream tells";
                report.problem(span, "the cost names no header field", fix);
            }
            return None;
        }
    };
    if let Some(item) = in_vain {
        let message = format!("`{}` has no effect beside `{}`", item.key, header.key);
        report.problem(item.key_span.clone(), message, format!("write `{key}`, or remove it"));
    }
    // A key that has less than the others must not take from what these may spend at once.
    let largest = rule.variants().filter_map(self::smallest_capacity).max();
    let most = number(&max, 1, report).or(largest).unwrap_or(u32::MAX);
    let usual = number(before, 0, report).unwrap_or(1);
    if let Some(item) = before {
        if usual > most && max.is_some() {
            let message = format!("`{key}` is `{usual}`, and `max` is `{most}`");
            report.problem(item.span.clone(), message, format!("write at most `{most}`, or raise `max`"));
        } else {
            report_unaffordable(item, usual, smallest, report);
        }
    }
    let word = header.string("\"x-cost\"", report)?;
    let Some(name) = parse_field_name(word.text) else {
        report.problem(word.span, format!("{} is no name of a header field", quoted(word.text)), FIELD_NAME_FIX);
        return None;
    };
    Some(match header.key {
        "request-header" => Cost::Request { header: name, default: usual, max: most },
        _ => Cost::Response { header: name, reserve: usual, max: most },
    })
}
