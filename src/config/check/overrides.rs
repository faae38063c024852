//! Exceptions of a rule: plans for clients, overrides for single keys, and exemptions.
//!
//! The configured value of a key is compared with the value in a request, byte by byte. A value that no request can
//! have would have no effect, so it is a problem.

use std::collections::HashSet;

use toml::de::DeValue;

use super::rule_windows;
use super::values::{check_name, read_digest, read_fingerprint, read_network};
use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::toml_reader::{Item, SpannedStr};
use transom_limiter::ip_prefix::{Network, canonical_address};
use transom_limiter::key::KeyPart;
use transom_limiter::rule::{Exemptions, KeyValue, Override, Plan, Rule};
use transom_limiter::secret_digest::Digest;

const PLAN_FIX: &str = "write `[rules.NAME.plans.PLAN]`, then its `windows`";
const OVERRIDE_FIX: &str = "write `[[rules.NAME.overrides]]`, then its `key` and its `windows`";
const WINDOWS_FIX: &str = "write `windows = [\"33/minute\"]`";
const EXEMPTIONS: &str = "[\"10.0.0.0/8\", \"key:VALUE\"]";

/// The prefix of an exemption that is the value of a key rather than a network.
const KEY_PREFIX: &str = "key:";

/// The settings of a rule for exceptions.
pub struct OverrideSettings<'d> {
    pub plans: Option<Item<'d>>,
    pub overrides: Option<Item<'d>>,
    pub exemptions: Option<Item<'d>>,
}

impl OverrideSettings<'_> {
    /// Reads the exceptions into a rule whose key has been read.
    pub fn read(self, rule: &mut Rule, report: &mut Report) {
        rule.plans = self.plans.map(|item| read_plans(&item, &rule.name, report)).unwrap_or_default();
        let mut keys = OverrideKeys { parts: &rule.key, seen: HashSet::new() };
        rule.overrides = self.overrides.map(|item| read_overrides(&item, &mut keys, report)).unwrap_or_default();
        rule.exemptions = self.exemptions.map(|item| read_exemptions(&item, &mut keys, report)).unwrap_or_default();
    }
}

fn read_plans(item: &Item, rule: &str, report: &mut Report) -> Vec<Plan> {
    let Some(table) = item.table("the plans", PLAN_FIX, report) else { return Vec::new() };
    let mut plans = Vec::new();
    for entry in table.items() {
        check_name(&entry, report);
        let title = format!("`[rules.{rule}.plans.{}]`", entry.key);
        let Some(mut table) = entry.table(title, PLAN_FIX, report) else { continue };
        let windows = table.require("windows", WINDOWS_FIX);
        table.finish(report);
        let layers = windows.map(|item| rule_windows::read_layers(&item, report)).unwrap_or_default();
        plans.push(Plan { name: entry.key.to_owned(), layers });
    }
    plans
}

fn read_overrides(item: &Item, keys: &mut OverrideKeys, report: &mut Report) -> Vec<Override> {
    let DeValue::Array(_) = item.value else {
        return item.wrong_type("a list of tables", OVERRIDE_FIX, report).unwrap_or_default();
    };
    let mut overrides = Vec::new();
    for entry in item.list("[]", report).unwrap_or_default() {
        let Some(mut table) = entry.table("the override", OVERRIDE_FIX, report) else { continue };
        let key = table.require("key", "write `key = \"VALUE\"`: the value of the rule's key in a request");
        let windows = table.require("windows", WINDOWS_FIX);
        table.finish(report);
        let key = key.and_then(|item| keys.read(&item, report));
        let layers = windows.map(|item| rule_windows::read_layers(&item, report)).unwrap_or_default();
        overrides.extend(key.map(|key| Override { key, layers }));
    }
    overrides
}

fn read_exemptions(item: &Item, keys: &mut OverrideKeys, report: &mut Report) -> Exemptions {
    let mut exemptions = Exemptions::default();
    for entry in item.list(EXEMPTIONS, report).unwrap_or_default() {
        match entry.value {
            DeValue::String(text) => match text.strip_prefix(KEY_PREFIX) {
                Some(value) => {
                    let word = SpannedStr { text: value, span: entry.span.clone() };
                    exemptions.keys.extend(keys.read_values(&[word], &entry, report));
                }
                None => exemptions.networks.extend(read_exempt_network(text, &entry, report)),
            },
            DeValue::Table(_) => {
                let Some(mut table) = entry.table("the exemption", "", report) else { continue };
                let key = table.get("key");
                let network = table.get("network");
                let misspelled = table.finish(report);
                if key.is_none() == network.is_none() && misspelled.is_empty() {
                    let message = "an exemption is either a `key` or a `network`";
                    let fix = "write `{ key = \"VALUE\" }` or `{ network = \"10.0.0.0/8\" }`";
                    report.missing(entry.span.clone(), message, fix);
                }
                exemptions.keys.extend(key.and_then(|item| keys.read(&item, report)));
                let word = network.and_then(|item| item.string("\"10.0.0.0/8\"", report));
                exemptions.networks.extend(word.and_then(|word| read_network(&word, report)));
            }
            _ => {
                let fix = entry.fix_with(EXEMPTIONS);
                entry.wrong_type::<()>("a network or the value of a key", &fix, report);
            }
        }
    }
    exemptions
}

/// Reads a network. A text without `/`, `.` and `:` may be intended as the value of a key.
fn read_exempt_network(text: &str, entry: &Item, report: &mut Report) -> Option<Network> {
    if text.contains(['/', '.', ':']) || text.is_empty() {
        return read_network(&SpannedStr { text, span: entry.span.clone() }, report);
    }
    let fix = format!("write `\"{KEY_PREFIX}{text}\"`, if this is the value of a key");
    report.problem(entry.span.clone(), format!("{} is not a network", quoted(text)), fix);
    None
}

/// The keys that have an override or an exemption; each may have only one.
struct OverrideKeys<'r> {
    parts: &'r [KeyPart],
    seen: HashSet<Vec<Digest>>,
}

impl OverrideKeys<'_> {
    /// Reads the value of a key: a string, or a list with a string for each part.
    fn read(&mut self, item: &Item, report: &mut Report) -> Option<Vec<KeyValue>> {
        let words = item.strings("\"VALUE\"", report)?;
        self.read_values(&words, item, report)
    }

    fn read_values(&mut self, words: &[SpannedStr], item: &Item, report: &mut Report) -> Option<Vec<KeyValue>> {
        if self.parts.is_empty() {
            // The key of the rule is invalid, which is already reported.
            return None;
        }
        if self.parts.contains(&KeyPart::Global) {
            let message = "the rule has the key `global`, which has no values";
            report.problem(item.span.clone(), message, "remove it, or change the rule's windows");
            return None;
        }
        if words.len() != self.parts.len() {
            let parts: Vec<String> = self.parts.iter().map(KeyPart::to_string).collect();
            let parts = quoted_list(parts.iter().map(String::as_str), "and");
            let count = match words.len() {
                1 => "one value is".to_owned(),
                count => format!("{count} values are"),
            };
            let message = format!("the rule's key has the parts {parts}, but {count} given");
            let example: Vec<String> = self.parts.iter().map(|part| format!("\"{}\"", example_value(part))).collect();
            let fix = match example.as_slice() {
                [one] => format!("give one value: `key = {one}`"),
                several => format!("give a value for each part, in this order: `{{ key = [{}] }}`", several.join(", ")),
            };
            report.problem(item.span.clone(), message, fix);
            return None;
        }
        let values: Vec<Option<KeyValue>> =
            self.parts.iter().zip(words).map(|(part, word)| read_value(part, word, report)).collect();
        let values: Vec<KeyValue> = values.into_iter().collect::<Option<_>>()?;
        if !self.seen.insert(values.iter().map(KeyValue::digest).collect()) {
            let message = "this key already has an override or an exemption";
            report.problem(item.span.clone(), message, "keep one of the two");
            return None;
        }
        Some(values)
    }
}

fn example_value(part: &KeyPart) -> &'static str {
    match part {
        KeyPart::Ip { .. } => "192.0.2.7",
        KeyPart::Host => "api.example.com",
        KeyPart::Method => "GET",
        KeyPart::Path => "/login",
        KeyPart::ClientCert => "9f86d081…",
        KeyPart::Header(_)
        | KeyPart::Cookie(_)
        | KeyPart::Query(_)
        | KeyPart::Jwt(_)
        | KeyPart::Param(_)
        | KeyPart::Route
        | KeyPart::Global => "VALUE",
    }
}

/// Reads the value of one part, in the form in which requests are compared.
fn read_value(part: &KeyPart, word: &SpannedStr, report: &mut Report) -> Option<KeyValue> {
    let text = word.text;
    if let KeyPart::Ip { v4_prefix, v6_prefix } = part {
        let Ok(address) = text.parse().map(canonical_address) else {
            let fix =
                "write an address such as `192.0.2.7`; a network can be exempt, but cannot have windows of its own";
            report.problem(word.span.clone(), format!("{} is not an IP address", quoted(text)), fix);
            return None;
        };
        // The rule counts addresses with this prefix as one client, so the override applies to all of them.
        let prefix = if address.is_ipv4() { *v4_prefix } else { *v6_prefix };
        return Some(KeyValue::Clear(Network::containing(address, prefix).address.to_string()));
    }
    if *part == KeyPart::ClientCert {
        return read_fingerprint(word, report).map(KeyValue::Clear);
    }
    if text.starts_with(Digest::PREFIX) {
        let digest = read_digest(word, report)?;
        return Some(KeyValue::Digest(digest));
    }
    let fix = match part {
        KeyPart::Header(_) if text.is_empty() || text.trim() != text => {
            "write the value of the field, without spaces around it"
        }
        KeyPart::Header(_) if text.contains(|c: char| c.is_control() && c != '\t') => "remove control characters",
        KeyPart::Cookie(_) | KeyPart::Query(_) | KeyPart::Jwt(_) if text.is_empty() => {
            "write a value; an empty value counts as missing"
        }
        KeyPart::Host if text.is_empty() || text.contains(|c: char| c.is_uppercase() || "/: ".contains(c)) => {
            "write the host name alone, in lower case"
        }
        KeyPart::Method if text.is_empty() || text.contains(|c: char| c.is_lowercase() || c == ' ') => {
            "write a method in upper case, such as `GET`"
        }
        KeyPart::Path if !text.starts_with('/') => "write the path as it is matched, such as `/login`",
        KeyPart::Ip { .. }
        | KeyPart::Header(_)
        | KeyPart::Cookie(_)
        | KeyPart::Query(_)
        | KeyPart::Jwt(_)
        | KeyPart::Param(_)
        | KeyPart::ClientCert
        | KeyPart::Host
        | KeyPart::Method
        | KeyPart::Path
        | KeyPart::Route
        | KeyPart::Global => return Some(KeyValue::Clear(text.to_owned())),
    };
    report.problem(word.span.clone(), format!("a request never has {} as its `{part}`", quoted(text)), fix);
    None
}
