//! Imports the configuration of `envoyproxy/ratelimit`: each limit is a rule that answers to its descriptors.

use std::path::PathBuf;

use crate::gateway::{Gateway, Named, Section, Value, table, table_name, unused_name};
use crate::rate::Window;
use crate::source::{Effect, ImportError};
use crate::tree::{Entry, Node, read_all, translated};
use crate::{Files, Translated};

/// The port of the service.
const ADDRESS: &str = "0.0.0.0:8081";
/// The greatest limit of a window.
const LIMIT_MAX: u64 = u32::MAX as u64;

pub fn import(files: &Files, paths: &[PathBuf]) -> Result<Translated, ImportError> {
    let documents = read_all(files, paths)?;
    let mut importer = Importer::default();
    for document in &documents {
        let Some(domain) = document.text_of("domain") else {
            let fix = "name a file of the service's configuration, which begins with `domain`";
            return Err(ImportError::at(&document.position, "there is no `domain`", fix));
        };
        importer.domain = domain.to_owned();
        importer.descriptors(document, &[]);
    }
    let mut gateway = importer.gateway;
    gateway.listen.comment("The port of the service.");
    gateway.listen.set("ratelimit_service", ADDRESS);
    // The service increments the counters of all descriptors, also if one of them is over its limit.
    let count = gateway.rules.len();
    let is_enforced = |rule: &&mut Named| rule.section.get("on_limit").is_none() && rule.section.get("cost").is_none();
    if count > 1 {
        gateway.rules.iter_mut().filter(is_enforced).for_each(|rule| rule.section.set("count_refused", true));
    }
    if !importer.denied.is_empty() {
        gateway.deny(&importer.denied);
    }
    Ok(translated(&documents, gateway))
}

#[derive(Default)]
struct Importer {
    gateway: Gateway,
    domain: String,
    /// Addresses with a limit of 0.
    denied: Vec<String>,
}

impl Importer {
    /// The descriptors below a node, whose entries are given.
    fn descriptors(&mut self, node: &Node, above: &[String]) {
        let siblings = node.list_of("descriptors");
        for descriptor in siblings {
            let Some(key) = descriptor.text_of("key") else {
                let text = "a descriptor without `key`".to_owned();
                self.gateway.note(Effect::NotEnforced, &descriptor.position, text);
                continue;
            };
            let value = descriptor.text_of("value");
            if let Some(wildcard) =
                descriptor.setting("value").filter(|_| value.is_some_and(|value| value.ends_with('*')))
            {
                let why = "entries match whole values";
                wildcard.note(&mut self.gateway, Effect::NotEnforced, why);
                continue;
            }
            let entry = value.map_or(key.to_owned(), |value| format!("{key}={value}"));
            let mut entries = above.to_vec();
            entries.push(entry);
            let general = siblings
                .iter()
                .find(|other| other.text_of("key") == Some(key) && other.text_of("value").is_none() && value.is_some());
            self.descriptor(descriptor, &entries, general);
            self.descriptors(descriptor, &entries);
            if let Some(general) = general {
                self.note_children(descriptor, general, &entries);
            }
        }
    }

    /// `general`: the descriptor of the same key for all values.
    fn descriptor(&mut self, node: &Node, entries: &[String], general: Option<&Node>) {
        let mut section = Section::default();
        for metric in ["detailed_metric", "value_to_metric", "share_threshold"] {
            if let Some(metric) = node.setting(metric) {
                metric.note(&mut self.gateway, Effect::LeftOut, "metrics have one series for each rule");
            }
        }
        let is_shadow = node.bool_of("shadow_mode") == Some(true);
        let Some(limit) = node.setting("rate_limit") else {
            // A value without a limit is not limited by the descriptor for all values either.
            if general.is_some_and(|general| general.get("rate_limit").is_some()) {
                self.add_unlimited(entries, node);
            }
            return;
        };
        let name = limit.node.text_of("name").map(table_name).unwrap_or_else(|| default_name(entries));
        if limit.node.bool_of("unlimited") == Some(true) {
            if general.is_some() {
                self.add_unlimited(entries, node);
            }
            return;
        }
        if let Some(replaces) = limit.node.setting("replaces") {
            replaces.node.mark_read();
            replaces.note_at(&mut self.gateway, &mut section, Effect::Stricter, "both limits apply");
        }
        section.set("descriptor", self.descriptor_value(entries));
        let multiplier = limit.node.number_of("unit_multiplier").unwrap_or(1).max(1);
        let unit = limit.node.text_of("unit").and_then(unit_ms);
        let Some(period_ms) = unit.and_then(|unit| unit.checked_mul(multiplier)) else {
            limit.note(&mut self.gateway, Effect::NotEnforced, "its unit is unknown");
            return;
        };
        let Some(requests) = limit.node.number_of("requests_per_unit") else {
            limit.note(&mut self.gateway, Effect::NotEnforced, "`requests_per_unit` is missing or no number");
            return;
        };
        let mut window = Window::plain(requests.min(LIMIT_MAX), period_ms);
        if requests == 0 {
            if !is_shadow && self.add_denied(limit, entries) {
                return;
            }
            window = Window::plain(1, unit_ms("year").unwrap_or(1));
            let why = "the smallest limit is 1: one request a year is admitted";
            limit.note_at(&mut self.gateway, &mut section, Effect::NotEnforced, why);
        }
        section.set("windows", Value::List(vec![window.value()]));
        if is_shadow {
            section.set("on_limit", "shadow");
        }
        self.add_rule(&name, section);
    }

    fn descriptor_value(&self, entries: &[String]) -> Value {
        table([("domain", self.domain.as_str().into()), ("entries", entries.to_vec().into())])
    }

    /// An address with a limit of 0 is denied; whether this is one.
    fn add_denied(&mut self, limit: &Entry, entries: &[String]) -> bool {
        let [entry] = entries else { return false };
        let Some(address) = entry.strip_prefix("remote_address=") else { return false };
        if crate::network::Network::parse(address).is_none() {
            return false;
        }
        let why = "the address is denied in all domains, see access.toml";
        limit.note(&mut self.gateway, Effect::Stricter, why);
        self.denied.push(address.to_owned());
        true
    }

    /// A rule that counts nothing precedes the one for all values.
    fn add_unlimited(&mut self, entries: &[String], node: &Node) {
        let mut section = Section::default();
        section.comment(format!("Not limited: the rule precedes that for all values ({}).", node.position));
        section.set("descriptor", self.descriptor_value(entries));
        section.set("windows", vec!["1/second"]);
        section.set("cost", 0);
        self.add_rule(&default_name(entries), section);
    }

    fn add_rule(&mut self, name: &str, section: Section) {
        let name = unused_name(name, &self.gateway.rules);
        self.gateway.rules.push(Named { name, section, ..Named::default() });
    }

    /// The service looks below the descriptor of a value only; the gateway also finds the rules below that for all values.
    fn note_children(&mut self, descriptor: &Node, general: &Node, entries: &[String]) {
        let own = descriptor.list_of("descriptors");
        let is_missing = |child: &&Node| {
            own.iter()
                .all(|own| (own.text_of("key"), own.text_of("value")) != (child.text_of("key"), child.text_of("value")))
        };
        if let Some(child) = general.list_of("descriptors").iter().find(is_missing) {
            let entry = entries.last().map_or("", String::as_str);
            let text = format!("the limit below the descriptor for all values also applies to `{entry}`");
            self.gateway.note(Effect::Stricter, &child.position, text);
        }
    }
}

/// A name that the entries suggest.
fn default_name(entries: &[String]) -> String {
    let last = entries.iter().map(|entry| {
        match entry.split_once('=') {
            Some(("generic_key", value)) => value,
            Some((key, value)) => return format!("{key}-{value}"),
            None => entry.as_str(),
        }
        .to_owned()
    });
    table_name(&last.collect::<Vec<_>>().join("-"))
}

fn unit_ms(unit: &str) -> Option<u64> {
    let seconds = match unit.to_lowercase().as_str() {
        "second" => 1,
        "minute" => 60,
        "hour" => 3600,
        "day" => 86_400,
        "week" => 604_800,
        // As the service counts: windows of 30 and of 365 days.
        "month" => 2_592_000,
        "year" => 31_536_000,
        _ => return None,
    };
    Some(seconds * 1000)
}
