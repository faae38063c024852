//! Whom a rule does not treat as everyone: whom it exempts, and who has windows of their own.
//!
//! Keys are found as their counters are, by their hash, made at load of what the configuration says.
//! So a request costs one more look into a map, and where a rule has no exceptions nothing at all. An
//! exemption or an override by the key's value goes before the plan of a client.

use std::collections::HashMap;
use std::net::IpAddr;

use foldhash::fast::RandomState;

use super::client_plans::{ClientPlans, PlanId, SECRET_MAX_BYTES};
use super::key_source::{feed_address, part_kind};
use transom_limiter::ip_prefix::Networks;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart};
use transom_limiter::rule::KeyValue;
use transom_limiter::rule_set::CompiledRule;
use transom_limiter::secret_digest::Digest;

/// The exceptions of one rule, made ready.
#[derive(Debug)]
pub struct Overrides {
    networks: Option<Networks<()>>,
    /// The hashes are keyed already, so it matters little how the map hashes them.
    keys: HashMap<KeyHash, RuleTreatment, RandomState>,
    /// If some key is given as a digest, all are looked up by the digests of their parts.
    pub digest_hasher: Option<KeyHasher>,
    /// For each plan that a client is on, the variant of the rule.
    plans: Vec<usize>,
}

/// How a rule treats a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleTreatment {
    Exempt,
    /// With the windows of this variant.
    Variant(usize),
}

impl Overrides {
    /// `None` if the rule has none. `start` is the hash of the rule's key as far as it does not depend
    /// on a request.
    pub fn new(entry: &CompiledRule, start: &KeyHasher, clients: Option<&ClientPlans>) -> Option<Overrides> {
        let rule = &entry.rule;
        let plans = clients.map_or(&[][..], |clients| &clients.plans);
        let plans: Vec<usize> = plans.iter().map(|plan| entry.variant_of_plan(plan)).collect();
        let overridden = rule.overrides.iter().enumerate();
        let overridden =
            overridden.map(|(i, other)| (&other.key, RuleTreatment::Variant(entry.variant_of_override(i))));
        let exempt = rule.exemptions.keys.iter().map(|key| (key, RuleTreatment::Exempt));
        let keys: Vec<_> = overridden.chain(exempt).collect();
        let digests = keys.iter().any(|(key, _)| key.iter().any(|value| matches!(value, KeyValue::Digest(_))));
        let exceptions = Overrides {
            networks: (!rule.exemptions.networks.is_empty())
                .then(|| Networks::new(rule.exemptions.networks.iter().map(|network| (*network, ())))),
            keys: keys.iter().map(|(key, standing)| (hash_values(start, &rule.key, key, digests), *standing)).collect(),
            digest_hasher: digests.then(|| start.clone()),
            plans: if plans.iter().any(|variant| *variant != 0) { plans } else { Vec::new() },
        };
        let any = exceptions.networks.is_some() || !exceptions.keys.is_empty() || !exceptions.plans.is_empty();
        any.then_some(exceptions)
    }

    /// Whether requests from an address are not counted.
    pub fn exempts(&self, address: IpAddr) -> bool {
        self.networks.as_ref().is_some_and(|networks| networks.of(address).is_some())
    }

    /// Whether single keys are exceptions.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    pub fn treatment_of(&self, key: KeyHash) -> Option<RuleTreatment> {
        self.keys.get(&key).copied()
    }

    /// Whether it matters which plan a client is on.
    pub fn has_plans(&self) -> bool {
        !self.plans.is_empty()
    }

    pub fn variant_of(&self, plan: Option<PlanId>) -> usize {
        plan.and_then(|plan| self.plans.get(plan as usize)).copied().unwrap_or(0)
    }
}

/// The hash that a request with these values has; as digests, if they are looked up so.
fn hash_values(start: &KeyHasher, parts: &[KeyPart], values: &[KeyValue], digests: bool) -> KeyHash {
    let mut hasher = start.clone();
    for (part, value) in parts.iter().zip(values) {
        match value {
            // The configuration has been checked: what is no address never gets here.
            KeyValue::Clear(text) => feed_text(&mut hasher, part, text, digests).unwrap_or_default(),
            KeyValue::Digest(digest) => hasher.add_part(part_kind(part), digest.bytes()),
        }
    }
    hasher.finish()
}

/// Adds a part of a key that was given as a text; `None` if it is no address where there has to be one.
pub fn feed_text(hasher: &mut KeyHasher, part: &KeyPart, text: &str, digest: bool) -> Option<()> {
    match part {
        KeyPart::Ip { v4_prefix, v6_prefix } => {
            let parsed = text.parse().ok()?;
            feed_address(parsed, *v4_prefix, *v6_prefix, &mut |kind, bytes| feed_part(hasher, kind, bytes, digest));
        }
        _ => feed_part(hasher, part_kind(part), text.as_bytes(), digest),
    }
    Some(())
}

/// Adds a part of a key, or its digest. What is too long for a secret is no secret that is known, so
/// it need not be digested.
pub fn feed_part(hasher: &mut KeyHasher, kind: u8, bytes: &[u8], digest: bool) {
    match digest && bytes.len() <= SECRET_MAX_BYTES {
        true => hasher.add_part(kind, Digest::of(bytes).bytes()),
        false => hasher.add_part(kind, bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::HeaderMap;

    use super::*;
    use crate::http::rate_limit_key::RuleKey;
    use crate::http::rate_limit_key::tests::{SEED, resolve, route, rule};
    use transom_limiter::key::OnMissing;
    use transom_limiter::rule::Exemptions;
    use transom_limiter::rule_set::RuleSet;

    /// A rule on every kind of part, and a request that has all of them.
    fn parts() -> (Vec<KeyPart>, HeaderMap, [&'static str; 7]) {
        let parts = [
            KeyPart::Ip { v4_prefix: 24, v6_prefix: 64 },
            KeyPart::Header("x-user".to_owned()),
            KeyPart::Param("id".to_owned()),
            KeyPart::Host,
            KeyPart::Method,
            KeyPart::Path,
            KeyPart::Route,
        ];
        let mut headers = HeaderMap::new();
        headers.insert("x-user", "bob".parse().unwrap());
        (parts.to_vec(), headers, ["10.0.0.7", "bob", "77", "example.com", "GET", "/u/77", "route"])
    }

    fn exempting(key: &[KeyPart], keys: Vec<Vec<KeyValue>>) -> RuleKey {
        let mut rule = rule(key, OnMissing::Fallback(vec![KeyPart::Global]));
        rule.exemptions = Exemptions { keys, networks: vec!["192.0.2.0/24".parse().unwrap()] };
        let rule_set = RuleSet::new(&[rule], SEED, None);
        let exceptions = RuleKey::compile_overrides(&rule_set.rules[0], None, SEED).map(Arc::new);
        RuleKey::new(&rule_set.rules[0], &route(), SEED).with_overrides(exceptions)
    }

    #[test]
    fn a_key_is_exempt_by_the_values_that_requests_have() {
        let (parts, headers, values) = parts();
        for digests in [false, true] {
            // An address is never a secret.
            let value = |(i, text): (usize, &&str)| match digests && i > 0 {
                true => KeyValue::Digest(Digest::of(text.as_bytes())),
                false => KeyValue::Clear((*text).to_owned()),
            };
            let key: Vec<KeyValue> = values.iter().enumerate().map(value).collect();
            let all = exempting(&parts, vec![key.clone()]);
            assert_eq!(resolve(&all, "10.0.0.99", &headers), Ok(None));
            assert!(resolve(&all, "10.0.1.7", &headers).unwrap().is_some());
            assert!(resolve(&all, "10.0.0.99", &HeaderMap::new()).unwrap().is_some(), "counted under the fallback");
            // Whichever part differs.
            for i in 0..parts.len() {
                let mut other = key.clone();
                other[i] = KeyValue::Clear("10.9.9.9".to_owned());
                let other = exempting(&parts, vec![other]);
                assert!(resolve(&other, "10.0.0.99", &headers).unwrap().is_some(), "{}", parts[i]);
            }
        }
    }

    #[test]
    fn a_network_is_exempt_whatever_the_key() {
        let rule = exempting(&[KeyPart::Header("x-user".to_owned())], vec![]);
        assert_eq!(resolve(&rule, "192.0.2.255", &HeaderMap::new()), Ok(None));
        assert_eq!(resolve(&rule, "::ffff:192.0.2.1", &HeaderMap::new()), Ok(None));
        assert!(resolve(&rule, "192.0.3.0", &HeaderMap::new()).unwrap().is_some());
    }

    #[test]
    fn a_rule_without_exceptions_looks_for_none() {
        let rule_set = RuleSet::new(&[rule(&[KeyPart::Host], OnMissing::Never)], SEED, None);
        assert!(RuleKey::compile_overrides(&rule_set.rules[0], None, SEED).is_none());
    }
}
