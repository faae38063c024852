//! A rule: who is counted, in which layers, and what happens at the limit.
//!
//! What a single rule says is checked here; whether its key exists on the routes that use it is seen
//! only there (`routes`).

use std::collections::BTreeSet;

use toml::de::DeValue;

use super::{FIELDS, Section, exceptions, key, layers};
use crate::config::QuotaFields;
use crate::config::document::{Item, Later, Table};
use crate::config::problem::{Report, shown};
use crate::rule::key::OnMissing;
use crate::rule::terms::{Cost, Exemptions, OnLimit, Rule};

const LATER: [Later; 5] = [
    ("count_refused", "remove it; a refused request consumes nothing"),
    ("max_delay", "remove it; a request over the limit is refused at once"),
    ("status", "remove it; a refusal is 429"),
    ("body", "remove it; a refusal has a problem document"),
    ("content_type", "remove it; a refusal has a problem document"),
];

pub fn rules(item: Option<Item>, fields: QuotaFields, report: &mut Report) -> Section<(Rule, QuotaFields)> {
    let rules = Section::read(item, report, |name, table, report| {
        // Stands in for a rule that cannot be read; it asks for nothing, so no problem follows.
        let mut rule = Rule {
            name: name.to_owned(),
            key: Vec::new(),
            on_missing: OnMissing::Skip,
            layers: Vec::new(),
            plans: Vec::new(),
            overrides: Vec::new(),
            exemptions: Exemptions::default(),
            cost: Cost::Fixed(1),
            on_limit: OnLimit::Refuse,
            count_refused: false,
        };
        let fields = table.and_then(|table| read(&mut rule, table, report)).unwrap_or(fields);
        (rule, fields)
    });
    layer_names(&rules, report);
    rules
}

/// Fills in a rule; returns its own fields, if it says so.
fn read(rule: &mut Rule, mut table: Table, report: &mut Report) -> Option<QuotaFields> {
    let key = key::Settings {
        key: table
            .require("key", "write `key = \"ip\"` to count each address, or `key = \"global\"` to count all as one"),
        on_missing: table.get("on_missing_key"),
        ipv4_prefix: table.get("ipv4_prefix"),
        ipv6_prefix: table.get("ipv6_prefix"),
    };
    let windows = table.require("windows", "write `windows = [\"33/minute\"]`");
    let cost = table.get("cost");
    let on_limit = table.get("on_limit");
    let exceptions = exceptions::Settings {
        plans: table.get("plans"),
        overrides: table.get("overrides"),
        exemptions: table.get("exemptions"),
    };
    let fields = table.get("headers").and_then(|item| item.choice(&FIELDS, report));
    let misspelt = table.finish(&LATER, report);

    (rule.key, rule.on_missing) = key.read(misspelt.contains(&"on_missing_key"), report);
    let cost_span = cost.as_ref().map(|item| item.span.clone());
    let cost = cost.and_then(|item| self::cost(&item, report)).unwrap_or(1);
    rule.cost = Cost::Fixed(cost);
    rule.layers = windows.map(|item| layers::layers(&item, report)).unwrap_or_default();
    exceptions.read(rule, report);
    rule.on_limit = on_limit.and_then(|item| self::on_limit(&item, report)).unwrap_or(OnLimit::Refuse);

    let smallest = rule.variants().flatten().map(|limit| limit.tokens).min();
    if let (Some(span), Some(smallest)) = (cost_span, smallest.filter(|smallest| *smallest < cost)) {
        let message =
            format!("a request that costs `{cost}` can never be admitted: the smallest limit is `{smallest}`");
        report.problem(span, message, format!("write a cost of at most `{smallest}`, or raise the limit"));
    }
    fields
}

fn cost(item: &Item, report: &mut Report) -> Option<u32> {
    let later = match item.value {
        DeValue::String(text) => text.starts_with("header:"),
        DeValue::Table(_) => true,
        _ => false,
    };
    if later {
        let message = "a cost that a header field tells is not in this version of transom yet";
        report.problem(item.span.clone(), message, "write what every request costs, such as `cost = 1`");
        return None;
    }
    item.integer(0..=u64::from(u32::MAX), report).and_then(|cost| u32::try_from(cost).ok())
}

fn on_limit(item: &Item, report: &mut Report) -> Option<OnLimit> {
    if matches!(item.value, DeValue::String(text) if text == "delay") {
        let message = "`on_limit = \"delay\"` is not in this version of transom yet";
        report.problem(item.span.clone(), message, "write `on_limit = \"refuse\"`, or `\"shadow\"` to only watch");
        return None;
    }
    item.choice(&[("refuse", OnLimit::Refuse), ("shadow", OnLimit::Shadow)], report)
}

/// Answers and metrics tell layers apart by their names alone.
fn layer_names(rules: &Section<(Rule, QuotaFields)>, report: &mut Report) {
    let mut taken: Vec<(String, &str)> = Vec::new();
    for entry in &rules.entries {
        let rule = &entry.value.0;
        let layers = rule.variants().flat_map(|layers| (0..layers.len()).map(move |layer| (layers, layer)));
        let names: BTreeSet<String> = layers.map(|(layers, layer)| rule.layer_name(layers, layer)).collect();
        if let Some((name, other)) = taken.iter().find(|(name, _)| names.contains(name)) {
            let message = format!(
                "answers would call two layers {}: one of the rule {}, one of the rule {}",
                shown(name),
                shown(other),
                shown(&rule.name)
            );
            report.problem(entry.span.clone(), message, "give one of the two rules another name");
        }
        taken.extend(names.into_iter().map(|name| (name, entry.name.as_str())));
    }
}
