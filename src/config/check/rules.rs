//! A rule: who is counted, in which layers, and what happens at the limit.
//!
//! What a single rule says is checked here; whether its key exists on the routes that use it is seen
//! only there (`routes`).

use std::collections::BTreeSet;
use std::time::Duration;

use super::redis::{DefaultSharing, RuleSharingSettings};
use super::{
    DAY_MS, Definitions, HEADER_FORMATS, cost, key, overrides, read_duration_ms, refusal_response, rule_windows,
};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::ClientCerts;
use crate::config::toml_reader::{Item, Table};
use crate::config::{RateLimitStyle, RefusalResponse};
use transom_limiter::key::OnMissing;
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
    let refusal = refusal_response::RefusalSettings::take_from(&mut table);
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
    rule.cost = cost.and_then(|item| cost::read_cost(&item, rule, report)).unwrap_or(Cost::Fixed(1));
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
