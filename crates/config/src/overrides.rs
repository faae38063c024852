//! Exceptions of a rule: plans for clients, overrides for single keys, and exemptions.
//!
//! The configured value of a key is compared with the value in a request, byte by byte. A value that no request can
//! have would have no effect, so it is a problem.

use std::collections::HashSet;

use toml::de::DeValue;

use super::diagnostics::{Report, Span, quoted, quoted_list};
use super::key_kind::{KeyKind, ValueForm};
use super::settings::{Custom, Required, Section, Shape, Tables, Word};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::values::{check_name, is_pattern, read_digest, read_fingerprint, read_network};
use super::window::{concurrent, require_limits, suggest_windows, windows};
use transom_http::client_address::UNIX;
use transom_limiter::ip_prefix::{Network, canonical_address};
use transom_limiter::key::KeyPart;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Exemptions, KeyValue, Override, Plan, Rule};
use transom_limiter::secret_digest::Digest;

const PLAN_FIX: &str = "write `[rules.NAME.plans.PLAN]`, then its `windows`";
const OVERRIDE_FIX: &str = "write `[[rules.NAME.overrides]]`, then its `key` and its `windows`";
const EXEMPTIONS: &str = "[\"10.0.0.0/8\", \"key:VALUE\"]";
/// The prefix of an exemption that is the value of a key rather than a network.
const KEY_PREFIX: &str = "key:";

settings! {
    /// Exceptions of a rule.
    pub struct ExceptionSettings {
        /// Windows and `concurrent` of clients on this plan: `[rules.NAME.plans.PLAN]`, see
        /// [below](#plans-overrides-exemptions). Rules can have plans of the same name; a rule without a client's plan uses
        /// its default windows.
        plans: Vec<Plan> = Custom::or_empty(|| Shape::map_of(Shape::Table(PlanSettings::settings())), read_plans);
        /// Windows of single keys: tables with `key`, and `windows` or `concurrent`.
        overrides: Vec<OverrideSettings> = Tables::<OverrideSettings>::or("the override", OVERRIDE_FIX);
        /// Requests that the rule does not count, by network (`"10.0.0.0/8"`, an address, `{ network = "10.0.0.0/8" }`) or
        /// key (`"key:VALUE"`, `{ key = … }`). Networks are compared with the client's address. The response does not
        /// mention the rule.
        exemptions: Vec<ExemptionSettings> = Custom::or_empty(
            || Shape::list_of(vec![Shape::Text("networks, keys"), Shape::Table(ExemptionSettings::settings())]),
            read_exemptions,
        );
    }
}

settings! {
    /// Limits of clients on a plan.
    pub struct PlanSettings checked by check_plan {
        /// As in the rule. Without it: those of the rule.
        windows: Vec<Limit> = windows();
        /// As in the rule. Without it: that of the rule.
        concurrent: Option<u32> = concurrent();
    }
}

settings! {
    /// Limits of a single key.
    pub struct OverrideSettings checked by check_override {
        /// Value of the rule's key in a request; a list if the rule's key is a list.
        key: Option<WrittenKey> = Required(written_key(), "write `key = \"VALUE\"`: the value of the rule's key in a request");
        /// As in the rule. Without it: those of the rule.
        windows: Vec<Limit> = windows();
        /// As in the rule. Without it: that of the rule.
        concurrent: Option<u32> = concurrent();
    }
}

settings! {
    /// Requests that a rule does not count.
    pub struct ExemptionSettings checked by check_exemption {
        /// As in overrides.
        key: Option<WrittenKey> = written_key();
        /// Network or address of the client.
        network: Option<Network> = Word { shape: "network", example: "\"10.0.0.0/8\"", read: read_network };
    }
}

fn check_plan(_plan: &mut PlanSettings, table: &mut Table, _report: &mut Report) {
    suggest_windows(table);
    require_limits(table);
}

fn check_override(_override: &mut OverrideSettings, table: &mut Table, _report: &mut Report) {
    suggest_windows(table);
    require_limits(table);
}

fn check_exemption(_exemption: &mut ExemptionSettings, table: &Table, report: &mut Report) {
    if table.lacks("key") == table.lacks("network") {
        let message = "an exemption is either a `key` or a `network`";
        let fix = "write `{ key = \"VALUE\" }` or `{ network = \"10.0.0.0/8\" }`";
        report.missing(table.span.clone(), message, fix);
    }
}

impl ExceptionSettings {
    /// Sets the exceptions of a rule whose key and limits have been read.
    pub fn finish(self, rule: &mut Rule, report: &mut Report) {
        let layers_or_default = |layers: Vec<Limit>| if layers.is_empty() { rule.layers.clone() } else { layers };
        let plan = |Plan { name, layers, concurrent }: Plan| {
            let layers = layers_or_default(layers);
            Plan { name, layers, concurrent: concurrent.or(rule.concurrent) }
        };
        let plans = self.plans.into_iter().map(plan).collect();
        let mut keys = OverrideKeys { parts: &rule.key, seen: HashSet::new() };
        let mut overrides = Vec::new();
        for OverrideSettings { key, windows, concurrent } in self.overrides {
            let (layers, concurrent) = (layers_or_default(windows), concurrent.or(rule.concurrent));
            let key = key.and_then(|key| keys.read(&key, report));
            overrides.extend(key.map(|key| Override { key, layers, concurrent }));
        }
        let mut exemptions = Exemptions::default();
        for ExemptionSettings { key, network } in self.exemptions {
            exemptions.networks.extend(network);
            exemptions.keys.extend(key.and_then(|key| keys.read(&key, report)));
        }
        (rule.plans, rule.overrides, rule.exemptions) = (plans, overrides, exemptions);
    }
}

fn read_plans(item: &Item, report: &mut Report) -> Option<Vec<Plan>> {
    let table = item.table("the plans", PLAN_FIX, report)?;
    let read_plan = |entry: Item| {
        check_name(&entry, report);
        let table = entry.table(format!("the plan {}", quoted(entry.key)), PLAN_FIX, report)?;
        let PlanSettings { windows, concurrent } = PlanSettings::read_all(table, report);
        Some(Plan { name: entry.key.to_owned(), layers: windows, concurrent })
    };
    Some(table.items().into_iter().filter_map(read_plan).collect())
}

fn read_exemptions(item: &Item, report: &mut Report) -> Option<Vec<ExemptionSettings>> {
    let items = item.list(EXEMPTIONS, report)?;
    let read_exemption = |entry: &Item| match entry.value {
        DeValue::String(text) => {
            let word = |text| SpannedStr { text, span: entry.span.clone() };
            Some(match text.strip_prefix(KEY_PREFIX) {
                Some(value) => ExemptionSettings { key: Some(WrittenKey::new(entry, &[word(value)])), network: None },
                None => ExemptionSettings { key: None, network: read_exempt_network(&word(text), report) },
            })
        }
        DeValue::Table(_) => Some(ExemptionSettings::read_all(entry.table("the exemption", "", report)?, report)),
        _ => entry.wrong_type("a network or the value of a key", &entry.fix_with(EXEMPTIONS), report),
    };
    Some(items.iter().filter_map(read_exemption).collect())
}

/// Reads a network. A text without `/`, `.` and `:` may be intended as the value of a key.
fn read_exempt_network(word: &SpannedStr, report: &mut Report) -> Option<Network> {
    if word.text.contains(['/', '.', ':']) || ["", "localhost"].contains(&word.text) {
        return read_network(word, report);
    }
    let fix = format!("write `\"{KEY_PREFIX}{}\"`, if this is the value of a key", word.text);
    report.reject(word.span.clone(), format!("{} is not a network", quoted(word.text)), fix)
}

/// The value of a rule's key, with a text for each part. The parts are not yet known.
#[derive(Clone, PartialEq, Debug)]
pub struct WrittenKey {
    texts: Vec<SpannedString>,
    span: Span,
}

impl WrittenKey {
    fn new(item: &Item, words: &[SpannedStr]) -> WrittenKey {
        let texts = words.iter().map(|word| SpannedString::new(item.key, word)).collect();
        WrittenKey { texts, span: item.span.clone() }
    }
}

fn written_key() -> Custom<Option<WrittenKey>> {
    Custom::or_empty(
        || Shape::one_or_list("text"),
        |item, report| Some(Some(WrittenKey::new(item, &item.strings("\"VALUE\"", report)?))),
    )
}

/// The keys that have an override or an exemption; each may have only one.
struct OverrideKeys<'r> {
    parts: &'r [KeyPart],
    seen: HashSet<Vec<Digest>>,
}

impl OverrideKeys<'_> {
    /// The values of a key, in the form in which requests are compared.
    fn read(&mut self, WrittenKey { texts, span }: &WrittenKey, report: &mut Report) -> Option<Vec<KeyValue>> {
        if self.parts.is_empty() {
            // The key of the rule is invalid, which is already reported.
            return None;
        }
        if self.parts.contains(&KeyPart::GLOBAL) {
            let message = "the rule has the key `global`, which has no values";
            return report.reject(span.clone(), message, "remove it, or change the rule's windows");
        }
        if texts.len() != self.parts.len() {
            let parts: Vec<String> = self.parts.iter().map(KeyPart::to_string).collect();
            let parts = quoted_list(parts.iter().map(String::as_str), "and");
            let count = match texts.len() {
                1 => "one value is".to_owned(),
                count => format!("{count} values are"),
            };
            let message = format!("the rule's key has the parts {parts}, but {count} given");
            let example: Vec<String> =
                self.parts.iter().map(|part| format!("\"{}\"", KeyKind::of(part).example_value)).collect();
            let fix = match example.as_slice() {
                [one] => format!("give one value: `key = {one}`"),
                several => format!("give a value for each part, in this order: `{{ key = [{}] }}`", several.join(", ")),
            };
            return report.reject(span.clone(), message, fix);
        }
        let read_value = |(part, text): (&KeyPart, &SpannedString)| read_value(part, &text.as_str(), report);
        // Collected twice, so that the values of all parts are checked.
        let values: Vec<Option<KeyValue>> = self.parts.iter().zip(texts).map(read_value).collect();
        let values: Vec<KeyValue> = values.into_iter().collect::<Option<_>>()?;
        if !self.seen.insert(values.iter().map(KeyValue::digest).collect()) {
            let message = "this key already has an override or an exemption";
            return report.reject(span.clone(), message, "keep one of the two");
        }
        Some(values)
    }
}

/// Reads the value of one part, in the form in which requests are compared.
pub fn read_value(part: &KeyPart, word: &SpannedStr, report: &mut Report) -> Option<KeyValue> {
    let text = word.text;
    let find_fix = match &KeyKind::of(part).value {
        ValueForm::Address => return read_address(part, word, report),
        ValueForm::Fingerprint => return read_fingerprint(word, report).map(KeyValue::Clear),
        ValueForm::Text(find_fix) => find_fix,
    };
    if text.starts_with(Digest::PREFIX) {
        let digest = read_digest(word, report)?;
        return Some(KeyValue::Digest(digest));
    }
    if is_pattern(text) {
        let message = format!("{} is a pattern, and values of a key are compared as a whole", quoted(text));
        let fix = "write each value; a group of clients can share a plan: `[rules.NAME.plans.PLAN]`; for a value with a literal `*`, \
                   write its digest: `sha256:` and 64 hex digits";
        return report.reject(word.span.clone(), message, fix);
    }
    let Some(fix) = find_fix(text) else { return Some(KeyValue::Clear(text.to_owned())) };
    report.reject(word.span.clone(), format!("a request never has {} as its `{part}`", quoted(text)), fix)
}

fn read_address(part: &KeyPart, word: &SpannedStr, report: &mut Report) -> Option<KeyValue> {
    if word.text == UNIX {
        return Some(KeyValue::Clear(UNIX.to_owned()));
    }
    let Ok(address) = word.text.parse().map(canonical_address) else {
        let fix = "write an address such as `192.0.2.7`; a network can be exempt, but cannot have windows of its own";
        return report.reject(word.span.clone(), format!("{} is not an IP address", quoted(word.text)), fix);
    };
    // The rule counts addresses with these prefixes as one client, so the override applies to all of them.
    let prefixes = part.prefixes()?;
    let prefix = if address.is_ipv4() { prefixes.v4 } else { prefixes.v6 };
    Some(KeyValue::Clear(Network::containing(address, prefix).address.to_string()))
}
