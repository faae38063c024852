//! Exemptions and overrides of a rule: keys and networks that are not counted, keys and plans with their own windows.
//!
//! Keys are looked up by the hash that finds their counters, computed at load from the configuration. A request thus
//! costs one more map lookup, and nothing if the rule has no exceptions. A key takes precedence over a plan.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::PlanId;
use super::client_plans::{ClientPlan, SECRET_MAX_BYTES};
use super::key_source::feed_address;
use transom_config::client_limits::{LimitsId, LimitsText};
use transom_http::client_address::ClientAddress;
use transom_limiter::handles::{IdVec, VariantId};
use transom_limiter::ip_prefix::Networks;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart};
use transom_limiter::rule::KeyValue;
use transom_limiter::rule_set::CompiledRule;
use transom_limiter::secret_digest::Digest;

/// The compiled exemptions and overrides of one rule.
#[derive(Debug)]
pub struct Overrides {
    networks: Option<Networks<()>>,
    /// Keys are hashed with a secret seed already, so the hash of the map need not resist collisions.
    keys: HashMap<KeyHash, RuleTreatment, RandomState>,
    /// Set if a key is configured as a digest: then all keys are looked up by the digests of their parts.
    pub digest_hasher: Option<KeyHasher>,
    /// The variant of the rule for each plan; empty if the rule treats all plans alike.
    plans: IdVec<PlanId, VariantId>,
    /// The same for the limits of single clients.
    limits: HashMap<LimitsId, VariantId, RandomState>,
}

/// The plans that clients can have, and the limits of single clients that rules have.
#[derive(Clone, Copy)]
pub struct KnownPlans<'a> {
    pub names: &'a IdVec<PlanId, String>,
    pub limits: &'a [LimitsText],
}

/// How a rule treats a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleTreatment {
    Exempt,
    /// Counted in the windows of this variant.
    Variant(VariantId),
}

impl Overrides {
    /// `None` if the rule has neither exemptions nor overrides. `hasher` is that of the rule's keys, before the parts.
    pub fn new(compiled: &CompiledRule, hasher: &KeyHasher, known: Option<KnownPlans<'_>>) -> Option<Overrides> {
        let rule = &compiled.rule;
        let plans = known.map(|known| known.names.map(|plan| rule.variant_of_plan(plan))).unwrap_or_default();
        let own: HashMap<&str, VariantId> =
            rule.client_variants().map(|(variant, limits)| (limits.name.as_str(), variant)).collect();
        let variant_of_limits = |limits: &LimitsText| {
            let of_plan = || rule.variant_of_plan(limits.plan());
            (limits.id, own.get(limits.text.as_str()).copied().unwrap_or_else(of_plan))
        };
        let limits = known.iter().flat_map(|known| known.limits).map(variant_of_limits).collect();
        let treats_all_alike = own.is_empty() && plans.iter().all(|variant| *variant == VariantId::DEFAULT);
        let (plans, limits) = if treats_all_alike { Default::default() } else { (plans, limits) };
        let overridden = rule.override_variants();
        let overridden = overridden.map(|(variant, other)| (&other.key, RuleTreatment::Variant(variant)));
        let exempt = rule.exemptions.keys.iter().map(|key| (key, RuleTreatment::Exempt));
        let keys: Vec<_> = overridden.chain(exempt).collect();
        let digests = keys.iter().any(|(key, _)| key.iter().any(|value| matches!(value, KeyValue::Digest(_))));
        let overrides = Overrides {
            networks: (!rule.exemptions.networks.is_empty())
                .then(|| Networks::new(rule.exemptions.networks.iter().map(|network| (*network, ())))),
            keys: keys
                .iter()
                .map(|(key, treatment)| (hash_values(hasher, &rule.key, key, digests), *treatment))
                .collect(),
            digest_hasher: digests.then(|| hasher.clone()),
            plans,
            limits,
        };
        let any = overrides.networks.is_some() || !overrides.keys.is_empty() || !overrides.plans.is_empty();
        any.then_some(overrides)
    }

    /// Whether requests from an address are exempt.
    pub fn exempts(&self, address: ClientAddress) -> bool {
        let networks = self.networks.as_ref().zip(address.ip());
        networks.is_some_and(|(networks, ip)| networks.most_specific(ip).is_some())
    }

    /// Whether single keys have an exemption or override.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The exemption or override of a key.
    pub fn treatment_of(&self, key: KeyHash) -> Option<RuleTreatment> {
        self.keys.get(&key).copied()
    }

    /// Whether the variant depends on the plan of the client.
    pub fn has_plans(&self) -> bool {
        !self.plans.is_empty()
    }

    /// The variant for a plan, or for the latest limits of a client that the rules have.
    pub fn variant_of(&self, plan: Option<ClientPlan<'_>>) -> VariantId {
        let Some(ClientPlan { id, limits }) = plan else { return VariantId::DEFAULT };
        let of_limits = limits.iter().find_map(|limits| self.limits.get(limits));
        of_limits.or_else(|| self.plans.get(id)).copied().unwrap_or(VariantId::DEFAULT)
    }
}

/// The hash of a key with these values, or of their digests.
fn hash_values(hasher: &KeyHasher, parts: &[KeyPart], values: &[KeyValue], digests: bool) -> KeyHash {
    let mut hasher = hasher.clone();
    for (part, value) in parts.iter().zip(values) {
        match value {
            // The configuration check rejects values that are no address.
            KeyValue::Clear(text) => feed_text(&mut hasher, part, text, digests).unwrap_or_default(),
            KeyValue::Digest(digest) => hasher.add_part(part.kind.number, digest.bytes()),
        }
    }
    hasher.finish()
}

/// Adds a part of a key from its text; `None` if the part is an address and the text is none.
pub fn feed_text(hasher: &mut KeyHasher, part: &KeyPart, text: &str, digest: bool) -> Option<()> {
    match part.prefixes() {
        Some(prefixes) => {
            let parsed = text.parse().ok()?;
            feed_address(parsed, prefixes, &mut |kind, bytes| feed_part(hasher, kind, bytes, digest));
        }
        None => feed_part(hasher, part.kind.number, text.as_bytes(), digest),
    }
    Some(())
}

/// Adds a part of a key, or its digest. A value longer than any configured secret is not digested.
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
    use crate::rate_limit_key::RuleKey;
    use crate::rate_limit_key::tests::{SEED, resolve, route, rule};
    use transom_config::key_kind::{HEADER, HOST, IP, METHOD, PARAM, PATH, ROUTE};
    use transom_limiter::handles::{Handle, RuleId};
    use transom_limiter::key::OnMissing;
    use transom_limiter::rule::Exemptions;
    use transom_limiter::rule_set::RuleSet;

    /// Key parts, the fields of a request that has all of them, and their values.
    fn parts() -> (Vec<KeyPart>, HeaderMap, [&'static str; 7]) {
        let parts = [
            IP.of_prefixes(24, 64),
            HEADER.of_name("x-user"),
            PARAM.of_name("id"),
            HOST.part(),
            METHOD.part(),
            PATH.part(),
            ROUTE.part(),
        ];
        let mut headers = HeaderMap::new();
        headers.insert("x-user", "bob".parse().unwrap());
        (parts.to_vec(), headers, ["10.0.0.7", "bob", "77", "example.com", "GET", "/u/77", "route"])
    }

    fn exempting(key: &[KeyPart], keys: Vec<Vec<KeyValue>>) -> RuleKey {
        let mut rule = rule(key, OnMissing::Fallback(vec![KeyPart::GLOBAL]));
        rule.exemptions = Exemptions { keys, networks: vec!["192.0.2.0/24".parse().unwrap()] };
        let rule_set = RuleSet::new(&[rule], SEED, None);
        let overrides = RuleKey::compile_overrides(&rule_set.rules[RuleId::at(0)], None, SEED).map(Arc::new);
        RuleKey::new(&rule_set.rules[RuleId::at(0)], &route(), SEED).with_overrides(overrides)
    }

    #[test]
    fn a_key_is_exempt_by_the_values_of_its_parts() {
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
            // A key that differs in one part is not exempt.
            for i in 0..parts.len() {
                let mut other = key.clone();
                other[i] = KeyValue::Clear("10.9.9.9".to_owned());
                let other = exempting(&parts, vec![other]);
                assert!(resolve(&other, "10.0.0.99", &headers).unwrap().is_some(), "{}", parts[i]);
            }
        }
    }

    #[test]
    fn a_network_is_exempt_with_any_key() {
        let rule = exempting(&[HEADER.of_name("x-user")], vec![]);
        assert_eq!(resolve(&rule, "192.0.2.255", &HeaderMap::new()), Ok(None));
        assert_eq!(resolve(&rule, "::ffff:192.0.2.1", &HeaderMap::new()), Ok(None));
        assert!(resolve(&rule, "192.0.3.0", &HeaderMap::new()).unwrap().is_some());
    }

    #[test]
    fn a_rule_without_exemptions_has_no_overrides() {
        let rule_set = RuleSet::new(&[rule(&[HOST.part()], OnMissing::Never)], SEED, None);
        assert!(RuleKey::compile_overrides(&rule_set.rules[RuleId::at(0)], None, SEED).is_none());
    }
}
