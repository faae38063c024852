//! Finds the rules that answer to a descriptor: a list of entries, each a key and a value.
//!
//! The patterns of all rules form a tree, one level for each entry. Of the patterns that match all entries, the most
//! specific one wins: a fixed value in the first entry, then in the second, and so on.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use transom_config::descriptor::Descriptor;
use transom_config::rule::GatewayRule;
use transom_limiter::handles::{IdVec, RuleId};

type Map<T> = HashMap<Box<[u8]>, T, RandomState>;

/// The rules by domain and descriptor.
#[derive(Debug, Default)]
pub struct DescriptorIndex {
    domains: Map<Node>,
}

/// The rules with one pattern.
#[derive(Debug, Default)]
pub struct DescriptorMatch {
    /// At least one.
    pub rules: Vec<RuleId>,
    /// The entries with any value, whose values are the key.
    pub open_entries: Vec<usize>,
}

/// The patterns with the same first entries.
#[derive(Debug, Default)]
struct Node {
    /// The rules whose pattern ends here.
    matched: DescriptorMatch,
    /// The next entry, by its key.
    next: Map<NextEntry>,
}

#[derive(Debug, Default)]
struct NextEntry {
    by_value: Map<Node>,
    any_value: Option<Box<Node>>,
}

impl DescriptorIndex {
    pub fn new(rules: &IdVec<RuleId, GatewayRule>) -> DescriptorIndex {
        let mut index = DescriptorIndex::default();
        let descriptors = rules.enumerate().filter_map(|(id, rule)| Some((id, rule.descriptor.as_ref()?)));
        for (rule, Descriptor { domain, entries }) in descriptors {
            let mut node = index.domains.entry(domain.as_bytes().into()).or_default();
            for entry in entries {
                let next = node.next.entry(entry.key.as_bytes().into()).or_default();
                node = match &entry.value {
                    Some(value) => next.by_value.entry(value.as_bytes().into()).or_default(),
                    None => next.any_value.get_or_insert_default(),
                };
            }
            node.matched.rules.push(rule);
            let open = entries.iter().enumerate().filter(|(_, entry)| entry.value.is_none());
            node.matched.open_entries = open.map(|(position, _)| position).collect();
        }
        index
    }

    /// The rules that answer to the descriptor with these entries. `None`: no rule does.
    pub fn find<'e>(
        &self,
        domain: &str,
        entries: impl Iterator<Item = (&'e [u8], &'e [u8])> + Clone,
    ) -> Option<&DescriptorMatch> {
        self.domains.get(domain.as_bytes())?.find(entries)
    }
}

impl Node {
    fn find<'e>(&self, mut entries: impl Iterator<Item = (&'e [u8], &'e [u8])> + Clone) -> Option<&DescriptorMatch> {
        let Some((key, value)) = entries.next() else {
            return Some(&self.matched).filter(|matched| !matched.rules.is_empty());
        };
        let next = self.next.get(key)?;
        let by_value = next.by_value.get(value).and_then(|node| node.find(entries.clone()));
        by_value.or_else(|| next.any_value.as_ref()?.find(entries))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use transom_config::descriptor::DescriptorEntry;
    use transom_config::key::OnUnknownKey;
    use transom_config::rule::{RateLimitStyle, RefusalResponse};
    use transom_limiter::handles::Handle;
    use transom_limiter::key::{KeyPart, OnMissing};
    use transom_limiter::rule::Rule;

    fn any_pattern() -> impl Strategy<Value = Descriptor> {
        let entry = (select(vec!["a", "b"]), select(vec![None, Some("x"), Some("y"), Some("")]));
        let entry = entry.prop_map(|(key, value): (&str, Option<&str>)| DescriptorEntry {
            key: key.to_owned(),
            value: value.map(str::to_owned),
        });
        let domain = select(vec!["one", "two"]).prop_map(str::to_owned);
        (domain, proptest::collection::vec(entry, 1..4)).prop_map(|(domain, entries)| Descriptor { domain, entries })
    }

    fn rule(descriptor: &Option<Descriptor>) -> GatewayRule {
        GatewayRule {
            rule: Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, Vec::new()),
            rate_limit_style: RateLimitStyle::Off,
            refusal: RefusalResponse::default(),
            count_when: None,
            when: None,
            usage: None,
            bytes: None,
            refund_on: Vec::new(),
            on_unknown_key: OnUnknownKey::Count,
            descriptor: descriptor.clone(),
        }
    }

    proptest! {
        /// The same rules are found as by trying all patterns.
        #[test]
        fn the_most_specific_pattern_is_found(
            patterns in proptest::collection::vec(proptest::option::weighted(0.9, any_pattern()), 0..12),
            domain in select(vec!["one", "two", "three"]),
            entries in proptest::collection::vec((select(vec!["a", "b", "c"]), select(vec!["x", "y", "z", ""])), 0..4),
        ) {
            let matches = |pattern: &Descriptor| {
                pattern.domain == domain
                    && pattern.entries.len() == entries.len()
                    && pattern.entries.iter().zip(&entries).all(|(expected, (key, value))| {
                        expected.key == *key && expected.value.as_ref().is_none_or(|expected| expected == value)
                    })
            };
            let openness = |pattern: &Descriptor| -> Vec<bool> {
                pattern.entries.iter().map(|entry| entry.value.is_none()).collect()
            };
            let matching = || patterns.iter().enumerate().filter_map(|(rule, pattern)| {
                pattern.as_ref().filter(|pattern| matches(pattern)).map(|pattern| (rule, openness(pattern)))
            });
            let best = matching().map(|(_, openness)| openness).min();
            let best_matching = matching().filter(|(_, openness)| Some(openness) == best.as_ref());
            let expected: Vec<RuleId> = best_matching.map(|(rule, _)| RuleId::at(rule)).collect();

            let index = DescriptorIndex::new(&patterns.iter().map(rule).collect());
            let entries = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes()));
            let found = index.find(domain, entries);
            prop_assert_eq!(found.map_or(&[][..], |found| &found.rules), expected);
            let open = best.iter().flatten().enumerate().filter(|(_, is_open)| **is_open).map(|(position, _)| position);
            prop_assert_eq!(found.map_or(&[][..], |found| &found.open_entries), open.collect::<Vec<_>>());
        }
    }
}
