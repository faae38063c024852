//! `descriptor` of a rule: the descriptors of Envoy's rate limit service that the rule answers to.
//!
//! A descriptor is a list of entries, each a key and a value. A rule fixes the values of some entries; the values of the
//! others are the key that the rule counts by.

use super::diagnostics::{Report, quoted};
use super::key_kind::{ENTRY, IP};
use super::rule::CheckedRule;
use super::settings::{Custom, Required, Shape, Words};
use super::toml_reader::{Item, SpannedStr, Table};
use super::values::{Definitions, PREFIX_NOT_STATED, is_pattern};
use transom_limiter::handles::RuleId;
use transom_limiter::key::KeyPart;
use transom_limiter::rule::Rule;

const ENTRIES_FIX: &str = "write `entries = [\"remote_address\"]`";

settings! {
    /// The descriptors that a rule answers to.
    pub struct Descriptor {
        /// Domain of the requests, as in the configuration of Envoy.
        domain: String = Required(Custom::or_empty(|| Shape::Text("text"), read_domain), "write `domain = \"api\"`");
        /// All entries of a descriptor in their order: `"KEY"` for any value, which becomes a part of the key, or
        /// `"KEY=VALUE"` for one value. If several rules match, those with the most specific entries answer: the first
        /// entry decides, then the second.
        entries: Vec<DescriptorEntry> = Required(
            Words { shape: "`\"KEY\"` or `\"KEY=VALUE\"`", example: "[\"remote_address\"]", or: "", read: read_entry },
            ENTRIES_FIX,
        );
    }
}

/// An entry of a descriptor, as a rule expects it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DescriptorEntry {
    pub key: String,
    /// `None`: any value.
    pub value: Option<String>,
}

impl Descriptor {
    /// The keys of the entries with any value.
    fn open_entries(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().filter(|entry| entry.value.is_none()).map(|entry| entry.key.as_str())
    }

    /// The key of a rule that does not state one. The settings of the rule state the prefixes of addresses.
    pub fn key(&self) -> Vec<KeyPart> {
        let part = |key: &str| match key {
            "remote_address" => IP.of_prefixes(PREFIX_NOT_STATED, PREFIX_NOT_STATED),
            key => ENTRY.of_name(key),
        };
        let parts: Vec<KeyPart> = self.open_entries().map(part).collect();
        if parts.is_empty() { vec![KeyPart::GLOBAL] } else { parts }
    }
}

fn read_domain(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"api\"", report)?;
    if word.text.is_empty() {
        return report.reject(word.span, "`domain` is empty", "write the `domain` of Envoy's rate limit filter");
    }
    Some(word.text.to_owned())
}

fn read_entry(word: &SpannedStr, report: &mut Report) -> Option<DescriptorEntry> {
    let (key, value) = match word.text.split_once('=') {
        Some((key, value)) => (key, Some(value.to_owned())),
        None => (word.text, None),
    };
    if key.is_empty() {
        let message = format!("{} names no entry", quoted(word.text));
        return report.reject(word.span.clone(), message, "write `KEY`, or `KEY=VALUE`, such as `remote_address`");
    }
    if value.as_deref().is_some_and(|value| value == "*" || is_pattern(value)) {
        let message = format!("{} has a pattern, and values of descriptors are compared as a whole", quoted(word.text));
        let fix = format!("write {} for any value, or each value in a rule of its own", quoted(key));
        return report.reject(word.span.clone(), message, fix);
    }
    Some(DescriptorEntry { key: key.to_owned(), value })
}

/// Checks the descriptor of a rule against its other settings.
pub fn check_descriptor(rule: &Rule, descriptor: Option<&Descriptor>, table: &Table, report: &mut Report) {
    let (Some(descriptor), Some(item)) = (descriptor, table.given("descriptor")) else { return };
    if table.lacks("windows") && rule.variants().all(<[_]>::is_empty) {
        let message = "`descriptor` has no effect: the rule has no `windows`";
        report.missing(item.key_span.clone(), message, "add `windows`: `concurrent` does not apply to descriptors");
    }
    let parts = if rule.key == [KeyPart::GLOBAL] { 0 } else { rule.key.len() };
    let open = descriptor.open_entries().count();
    // Without parts, the key is invalid, which is already reported.
    if parts != open && !rule.key.is_empty() && !descriptor.entries.is_empty() {
        let count = |number: usize, one: &str, more: &str| format!("{number} {}", if number == 1 { one } else { more });
        let (parts, open) = (count(parts, "part", "parts"), count(open, "entry", "entries"));
        let message = format!("the key of the rule has {parts}, but the descriptor has {open} without a value");
        let fix = "remove `key`: the entries without a value are the key; or write as many entries without a value";
        report.problem(item.span, message, fix);
    }
}

/// Reports descriptors that no listener receives.
pub fn report_unused_descriptors(rules: &Definitions<RuleId, CheckedRule>, report: &mut Report) {
    for span in rules.entries.iter().filter_map(|entry| entry.value.descriptor_span.as_ref()) {
        let message = "`descriptor` has no effect: there is no `ratelimit_service` in `[listen]`";
        report.missing(
            span.clone(),
            message,
            "add `ratelimit_service = \"127.0.0.1:8081\"` to `[listen]`, or remove it",
        );
    }
}
