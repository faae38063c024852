//! Identities of counters: the texts whose hashes distinguish the counters of one layer from those of all others.
//!
//! Counters in files and those of running processes are found by these texts. A changed text gives every key unused counters, so
//! nothing in the texts is derived from names in the code. The texts of windows are written in `window`, and the caller names the kinds
//! of key parts. All forms are documented in docs/explanation/persistence.md; a test has the texts of many rules as literals.

use crate::key::{KeyPart, PartArgument, Prefixes, Seed};
use crate::rule::Rule;
use crate::window::Windows;
use crate::window_kind::WindowKind;

/// Version of the texts. Counters files and snapshots name it: a file of another version is not read. To be raised with a change
/// of any text.
pub const VERSION: u32 = 0;

/// The text of a key, such as `[Ip { v4_prefix: 32, v6_prefix: 64 }, Header("x-user")]`.
pub fn key_text(parts: &[KeyPart]) -> String {
    let parts: Vec<String> = parts.iter().map(part_text).collect();
    format!("[{}]", parts.join(", "))
}

fn part_text(part: &KeyPart) -> String {
    let kind = part.kind.identity;
    match &part.argument {
        PartArgument::None => kind.to_owned(),
        PartArgument::Name(name) => format!("{kind}(\"{}\")", escape(name)),
        PartArgument::Prefixes(Prefixes { v4, v6 }) => format!("{kind} {{ v4_prefix: {v4}, v6_prefix: {v6} }}"),
    }
}

/// Quotes, backslashes and control characters of ASCII are escaped as in Rust literals, so that no name contains the end of its
/// part. All other characters are literal.
fn escape(name: &str) -> String {
    let mut escaped = String::with_capacity(name.len());
    for character in name.chars() {
        match character {
            '"' => escaped.push_str("\\\""),
            '\\' => escaped.push_str("\\\\"),
            '\0' => escaped.push_str("\\0"),
            '\t' => escaped.push_str("\\t"),
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            _ if character.is_ascii_control() => {
                escaped.push_str(&format!("\\u{{{:x}}}", u32::from(character)));
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

/// The text of windows and of what the words of their counters mean, so that no word is read as one of another kind. The limit is
/// not included: a changed limit applies to the usage so far. `shards`: shards of each counter, at least 1.
fn counters_text(windows: &Windows, kind: WindowKind, shards: u32) -> String {
    let windows = windows.text();
    match kind {
        WindowKind::Plain if shards > 1 => format!("{windows} in {shards} shards"),
        WindowKind::Accumulating if shards > 1 => format!("{windows} accumulating in {shards} shards"),
        WindowKind::Accumulating => format!("{windows} accumulating"),
        // Windows distinguish counters of these kinds from all others.
        WindowKind::Plain | WindowKind::Floating | WindowKind::Sliding | WindowKind::Leased => windows,
    }
}

/// The identity of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerIdentity<'a> {
    /// The name of the rule.
    pub rule: &'a str,
    /// The text of the key, see [`key_text`].
    pub key: String,
    /// The text of the windows; `None` for the layer that counts penalties. Their length is not included, so that a reload keeps
    /// penalties.
    pub windows: Option<String>,
}

impl LayerIdentity<'_> {
    /// The hash that distinguishes the counters of the layer from those of all others.
    pub fn hash(&self, seed: Seed) -> u64 {
        let layer = match &self.windows {
            Some(windows) => seed.hash(&["layer", self.rule, windows]),
            None => seed.hash(&["penalty", self.rule]),
        };
        layer ^ seed.hash(&["rule", self.rule, &self.key])
    }
}

/// The prefix of the hash of every key of a rule.
pub fn key_prefix(rule: &Rule, seed: Seed) -> u64 {
    seed.hash(&["rule", &rule.name, &key_text(&rule.key)])
}

/// The identities of a rule's layers: those of all variants, in order, then that of penalties.
pub fn layers(rule: &Rule) -> Vec<LayerIdentity<'_>> {
    let identity = |windows| LayerIdentity { rule: &rule.name, key: key_text(&rule.key), windows };
    let windows = rule.variants().flatten().map(|limit| {
        let (kind, shards) = rule.counter_kind(limit);
        Some(counters_text(&limit.windows, kind, shards))
    });
    windows.chain(rule.penalty_ms.map(|_| None)).map(identity).collect()
}
