//! Resolves a query, which names rules and the values of their keys: the key of each rule, with the windows that apply to it.
//! `resolved_request` does so for requests. A test compares the results of both.

use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::PartPosition;
use crate::access::{DenyList, Scope};
use crate::client_plans::{CallerIdentity, ClientCheck, ClientPart, ClientPlans};
use crate::key_source::{feed_address, is_usable_key};
use crate::overrides::{Overrides, RuleTreatment, feed_text};
use crate::rate_limit_key::{KeyDescription, KeyHashers};
use crate::store_key_text::{KeyDigester, KeyTextFormat};
use transom_config::access::DenyEntry;
use transom_config::key_kind::ENTRY;
use transom_http::error::ApiError;
use transom_limiter::handles::{Handle, IdVec, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule_set::{CompiledRule, KeyedRequest, NotCounted, RuleSet};

/// The key of a descriptor's entry in which Envoy sends the address of the client.
const REMOTE_ADDRESS: &str = "remote_address";

/// All rules, as queries use them.
#[derive(Debug)]
pub struct QueriedRules {
    rule_set: Arc<RuleSet>,
    /// Digests secret key parts for the shared store; `None` without one.
    digester: Option<Arc<KeyDigester>>,
    rules: IdVec<RuleId, QueriedRule>,
}

#[derive(Debug)]
struct QueriedRule {
    hashers: KeyHashers,
    text_format: KeyTextFormat,
    overrides: Option<Arc<Overrides>>,
    /// The parts of the key that name clients.
    client_parts: Vec<ClientPart>,
    /// Set if keys that name no client are not counted.
    client_check: Option<ClientCheck>,
}

/// A query, with the caller that its keys name.
pub struct ResolvedQuery<'a, K> {
    rules: &'a QueriedRules,
    values: &'a [RuleKeyValues<'a, K>],
    /// All clients, if there are any.
    clients: Option<&'a ClientPlans>,
    /// Who the caller is by the key of each rule.
    callers: SmallVec<[CallerIdentity<'a>; 4]>,
}

/// A rule of a query with its key.
pub struct KeyedRule {
    pub rule: RuleId,
    pub found: Result<KeyedRequest, NotCounted>,
    /// The key in the shared store; `None` if the rule is not shared.
    pub store_key: Option<Rc<str>>,
}

impl KeyedRule {
    /// What distinguishes the counters of a rule's keys; `None` if the key is not counted.
    pub fn identity(&self) -> Option<(RuleId, KeyHash)> {
        Some((self.rule, self.found.ok()?.key))
    }

    /// Whether the rule refuses the key.
    pub fn is_refused(&self) -> bool {
        self.found.is_err_and(NotCounted::refuses)
    }
}

/// The key of one rule: the values of its parts, and the cost, or `None` for the default cost of the rule.
pub struct RuleKeyValues<'a, K> {
    pub rule: RuleId,
    pub key: &'a [K],
    pub cost: Option<u32>,
}

impl QueriedRules {
    pub fn new(
        rule_set: &Arc<RuleSet>,
        overrides: &IdVec<RuleId, Option<Arc<Overrides>>>,
        seed: Seed,
        digester: Option<Arc<KeyDigester>>,
    ) -> QueriedRules {
        let queried = |(rule, compiled): (&CompiledRule, &Option<Arc<Overrides>>)| QueriedRule {
            hashers: KeyHashers::new(rule, seed, None),
            text_format: KeyTextFormat::new(&rule.rule, &rule.rule.key, false),
            overrides: compiled.clone(),
            client_parts: Vec::new(),
            client_check: None,
        };
        let rules = rule_set.rules.iter().zip(overrides).map(queried).collect();
        QueriedRules { rules, rule_set: Arc::clone(rule_set), digester }
    }

    /// Finds the clients that keys name, and checks that keys name one.
    pub fn with_clients(
        mut self,
        clients: Option<&ClientPlans>,
        checks: IdVec<RuleId, Option<ClientCheck>>,
    ) -> QueriedRules {
        for ((queried, compiled), check) in self.rules.iter_mut().zip(&self.rule_set.rules).zip(checks) {
            queried.client_parts = clients.map(|clients| clients.client_parts(&compiled.rule.key)).unwrap_or_default();
            queried.client_check = check;
        }
        self
    }

    /// `clients`: all clients, if there are any.
    pub fn resolve<'a, K: AsRef<str>>(
        &'a self,
        values: &'a [RuleKeyValues<'a, K>],
        clients: Option<&'a ClientPlans>,
    ) -> ResolvedQuery<'a, K> {
        let callers = values.iter().map(|values| self.caller(values, clients)).collect();
        ResolvedQuery { rules: self, values, clients, callers }
    }

    /// Who the caller is by the key of one rule.
    fn caller<'c, K: AsRef<str>>(
        &self,
        RuleKeyValues { rule, key, .. }: &RuleKeyValues<'_, K>,
        clients: Option<&'c ClientPlans>,
    ) -> CallerIdentity<'c> {
        let is_ip = |(part, _): &(&KeyPart, &K)| part.prefixes().is_some();
        let address = self.rule_set.rules[*rule].rule.key.iter().zip(*key).find(is_ip);
        let address = address.and_then(|(_, value)| value.as_ref().parse().ok());
        let named = self.rules[*rule]
            .client_parts
            .iter()
            .filter_map(|part| Some(clients?.named_by(part, key.get(part.position.index())?.as_ref().as_bytes())));
        named.fold(CallerIdentity { address, ..CallerIdentity::default() }, CallerIdentity::or)
    }

    /// The key in the shared store; `None` if the rule is not shared.
    fn store_key<K: AsRef<str>>(&self, values: &RuleKeyValues<'_, K>) -> Option<Rc<str>> {
        let is_shared = self.rule_set.rules[values.rule].rule.is_shared();
        let digester = self.digester.as_ref().filter(|_| is_shared)?;
        let mut text = String::new();
        self.rules[values.rule].text_format.write_values(values.key, digester, &mut text).then(|| text.into())
    }

    /// The key of a query, as of a request with that key.
    pub fn describe_key<K: AsRef<str>>(
        &self,
        rule: RuleId,
        key: &[K],
        clients: Option<&ClientPlans>,
        digester: &KeyDigester,
    ) -> KeyDescription {
        let (format, mut values) = (&self.rules[rule].text_format, key.iter());
        let mut client = None;
        let describe = |(position, part): (PartPosition, &KeyPart)| {
            let value = values.next().map_or("", K::as_ref);
            let mut readable = None;
            let mut take = |kind, bytes: &[u8]| readable = Some(format.readable_part(position, kind, bytes, digester));
            match (part.prefixes(), value.parse()) {
                (Some(prefixes), Ok(address)) => feed_address(address, prefixes, &mut take),
                _ => take(part.kind.number, value.as_bytes()),
            }
            client = client.take().or_else(|| format.client_of_part(position, value.as_bytes(), clients));
            (format.part_name(position), readable)
        };
        let parts = format.parts().map(describe).collect();
        KeyDescription {
            is_network_exempt: false,
            is_left_out: false,
            missing: None,
            is_fallback: false,
            parts,
            client,
        }
    }
}

impl<K: AsRef<str>> ResolvedQuery<'_, K> {
    /// The entry that denies the caller, as far as the keys tell: the address, the client or the value of a part. There is no
    /// route, so entries for some routes do not apply.
    pub fn denied(&self, deny: &DenyList, now_ms: u64) -> Option<DenyEntry> {
        let scope = Scope { route: None, now_ms };
        let found = self.values.iter().zip(&self.callers).find_map(|(values, caller)| {
            let parts = self.rules.rule_set.rules[values.rule].rule.key.iter().zip(values.key);
            let of_part = |(part, value): (&KeyPart, &K)| {
                let value = value.as_ref();
                let is_address = part.prefixes().is_some() || (ENTRY.has(part) && part.name() == Some(REMOTE_ADDRESS));
                let address = if is_address { value.parse().ok() } else { None };
                address
                    .and_then(|address| deny.of_address(address, scope))
                    .or_else(|| deny.of_value(part, value.as_bytes(), scope))
            };
            let client = || self.clients?.client_of(caller);
            parts.into_iter().find_map(of_part).or_else(|| deny.of_client(&client()?.name, scope))
        });
        found.cloned()
    }

    /// The key of each rule. An error is a key that does not fit its rule. `decides`: the keys are charged or checked, and not
    /// only read or reset.
    pub fn keyed_rules(&self, decides: bool) -> impl Iterator<Item = Result<KeyedRule, ApiError>> {
        // Where the key of a rule does not name the client, the keys of the other rules do.
        let of_query = self.callers.iter().copied().fold(CallerIdentity::default(), CallerIdentity::or);
        let rules = self.values.iter().zip(&self.callers);
        rules.map(move |(values, caller)| {
            let found = self.find_key(values, caller.or(of_query), decides)?;
            Ok(KeyedRule { rule: values.rule, found, store_key: self.rules.store_key(values) })
        })
    }

    fn find_key(
        &self,
        RuleKeyValues { rule, key: values, cost }: &RuleKeyValues<'_, K>,
        caller: CallerIdentity<'_>,
        decides: bool,
    ) -> Result<Result<KeyedRequest, NotCounted>, ApiError> {
        let (clients, QueriedRules { rule_set, rules, .. }) = (self.clients, self.rules);
        let (queried, rule) = (&rules[*rule], &rule_set.rules[*rule].rule);
        // A global rule takes no key, and ignores a given one.
        let parts: &[KeyPart] = if rule.key == [KeyPart::GLOBAL] { &[] } else { &rule.key };
        if parts.len() != values.len() && !parts.is_empty() {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            return Err(ApiError::Malformed(format!("the key of this rule consists of `{}`", names.join("`, `"))));
        }
        let unusable =
            parts.iter().zip(*values).find(|(part, value)| !is_usable_key(part.kind.number, value.as_ref().as_bytes()));
        if let Some((part, _)) = unusable {
            let reason = format!("`{part}` contains bytes other than printable ASCII");
            return Err(ApiError::Malformed(reason));
        }
        let hash = |start: &KeyHasher, digests: bool| -> Result<KeyHash, ApiError> {
            let mut hasher = start.clone();
            let given = if parts.is_empty() { &[][..] } else { values };
            for (part, value) in rule.key.iter().zip(given.iter().map(K::as_ref).chain(std::iter::repeat(""))) {
                feed_text(&mut hasher, part, value, digests).ok_or_else(|| {
                    ApiError::Malformed(String::from("the key is not an IP address, and the rule counts by `ip`"))
                })?;
            }
            Ok(hasher.finish())
        };
        let key = hash(&queried.hashers.counter, false)?;
        let offset = match &queried.hashers.window_offset {
            Some(start) => hash(start, false)?.bucket_hash,
            None => 0,
        };
        if let (Some(overrides), Some(address)) = (&queried.overrides, caller.address)
            && overrides.exempts(address)
        {
            return Ok(Err(NotCounted::Exempt));
        }
        let mut variant = None;
        if let Some(overrides) = queried.overrides.as_ref().filter(|overrides| overrides.has_keys()) {
            let known = match &overrides.digest_hasher {
                Some(start) => hash(start, true)?,
                None => key,
            };
            match overrides.treatment_of(known) {
                Some(RuleTreatment::Exempt) => return Ok(Err(NotCounted::Exempt)),
                Some(RuleTreatment::Variant(of_key)) => variant = Some(of_key),
                None => {}
            }
        }
        if let (Some(check), Some(clients), None) = (&queried.client_check, clients, variant) {
            let value = |part: &ClientPart| {
                values.get(part.position.index()).map_or(&[][..], |value| value.as_ref().as_bytes())
            };
            // Only the token of a subject without client tells its plan, and so its windows.
            let is_known = |named: CallerIdentity<'_>| named.is_named() && !(decides && named.is_subject);
            if !check.is_known(|part| is_known(clients.named_by(part, value(part)))) {
                return unknown_key(check, &rule.on_missing).map(Err);
            }
        }
        let variant_of_plan = || {
            let plan = clients.and_then(|clients| clients.plan_of(&caller));
            queried.overrides.as_ref().map_or(VariantId::DEFAULT, |overrides| overrides.variant_of(plan))
        };
        let variant = variant.unwrap_or_else(variant_of_plan);
        let cost = cost.unwrap_or(rule.cost.default_cost());
        Ok(Ok(KeyedRequest { key, offset, variant, cost }))
    }
}

/// What a rule does with a key that names no client.
fn unknown_key(check: &ClientCheck, on_missing: &OnMissing) -> Result<NotCounted, ApiError> {
    match on_missing {
        OnMissing::Skip if check.is_missing => Ok(NotCounted::Skipped),
        OnMissing::Fallback(parts) if check.is_missing => {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            let names = names.join("`, `");
            Err(ApiError::Malformed(format!(
                "the key names no client: requests with it are counted by `{names}`, which a query cannot give"
            )))
        }
        OnMissing::Never | OnMissing::Refuse | OnMissing::Skip | OnMissing::Fallback(_) => Ok(NotCounted::UnknownKey),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};
    use proptest::prelude::*;
    use proptest::sample::{select, subsequence};

    use super::*;
    use crate::client_plans::{ClientLookup, ClientSources};
    use crate::key_source::{ConnectionValues, RequestAttributes};
    use crate::live_clients::LiveClients;
    use crate::overrides::KnownPlans;
    use crate::rate_limit_key::RuleKey;
    use http::Method;
    use http::Uri;
    use transom_config::clients::{Client, Clients, ClientsSource};
    use transom_config::key::OnUnknownKey;
    use transom_config::key_kind::{HEADER, IP, METHOD};
    use transom_config::path::PathPattern;
    use transom_config::path::Segment;
    use transom_config::route::Route;
    use transom_http::error::RequestError;
    use transom_jwt::cache::TokenCache;
    use transom_jwt::token::TokenVerifier;
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::{Exemptions, KeyValue, Override, Plan, Rule};
    use transom_limiter::secret_digest::Digest;

    const SEED: Seed = Seed(1, 2);
    const ADDRESSES: [&str; 5] = ["10.1.2.3", "10.1.9.9", "::ffff:10.1.2.4", "203.0.113.9", "2001:db8::1"];
    const API_KEYS: [&str; 4] = ["key-of-acme", "key-of-beta", "monitor", "guess"];
    const USERS: [&str; 4] = ["user-of-acme", "user-of-gamma", "monitor", "guess"];

    fn route() -> Route {
        let segments = vec![Segment::Literal("u".to_owned()), Segment::Param("id".to_owned())];
        Route {
            name: "route".to_owned(),
            hosts: vec![],
            methods: vec![],
            headers: vec![],
            query: vec![],
            networks: vec![],
            path: PathPattern { text: "/u/{id}".to_owned(), segments },
            secure: None,
            actions: None,
            upstream: None,
            rules: vec![RuleId::at(0)],
            cost: None,
            websocket: true,
            allow: vec![],
        }
    }

    fn with_request<T>(
        address: &str,
        headers: &HeaderMap,
        tokens: &TokenCache,
        call: impl FnOnce(&RequestAttributes<'_>) -> T,
    ) -> T {
        let id = 3..5;
        call(&RequestAttributes {
            address: address.parse().unwrap(),
            connection: ConnectionValues::default(),
            host: "example.com",
            method: &Method::GET,
            path: "/u/77",
            params: std::slice::from_ref(&id),
            uri: &Uri::from_static("/u/77?token=a%20b"),
            headers,
            route: "route",
            tokens,
            wall_ms: 0,
            body: None,
        })
    }

    fn api_key() -> KeyPart {
        HEADER.of_name("x-api-key")
    }

    fn user() -> KeyPart {
        HEADER.of_name("x-user")
    }

    fn client(name: &str, plan: &str, api_keys: &[&str], subjects: &[&str], networks: &[&str]) -> Client {
        Client {
            name: name.to_owned(),
            plan: plan.to_owned(),
            api_keys: api_keys.iter().map(|key| Digest::of(key.as_bytes())).collect(),
            subjects: subjects.iter().map(|subject| (*subject).to_owned()).collect(),
            networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
            limits: Vec::new(),
            grants: Vec::new(),
        }
    }

    /// `api_key` and `subject`: the parts of a request that `[clients]` reads.
    fn clients(api_key: Option<KeyPart>, subject: Option<KeyPart>) -> ClientPlans {
        let list = vec![
            client("acme", "gold", &["key-of-acme"], &["user-of-acme"], &["10.1.0.0/16"]),
            client("beta", "silver", &["key-of-beta"], &[], &["10.1.2.0/24", "2001:db8::/64"]),
            client("gamma", "silver", &[], &["user-of-gamma"], &[]),
        ];
        let api_key = api_key.into_iter().collect();
        let (source, plan_claim, defined_plans) = (ClientsSource::File, None, Vec::new());
        let (file, limit_texts) = ("clients.toml".into(), Vec::new());
        let clients = Clients { source, file, api_key, subject, plan_claim, defined_plans, list, limit_texts };
        ClientPlans::new(&clients, false)
    }

    fn value(part: &KeyPart, [address, api_key, user]: [&str; 3]) -> String {
        let value = match part.name() {
            None if part.prefixes().is_some() => address,
            None => "GET",
            Some("x-api-key") => api_key,
            Some(_) => user,
        };
        value.to_owned()
    }

    /// A rule, and what it does with unknown keys.
    fn any_rule() -> impl Strategy<Value = (Rule, OnUnknownKey)> {
        let parts = vec![IP.of_prefixes(24, 64), api_key(), user(), METHOD.part()];
        let on_missing = select(vec![OnMissing::Skip, OnMissing::Refuse]);
        let on_unknown = select(vec![OnUnknownKey::Count, OnUnknownKey::Missing, OnUnknownKey::Refuse]);
        let known = (select(ADDRESSES.to_vec()), select(API_KEYS.to_vec()), select(USERS.to_vec()));
        let settings = (subsequence(vec!["gold", "silver"], 0..=2), any::<[bool; 4]>(), known);
        (subsequence(parts, 1..=3).prop_shuffle(), on_missing, on_unknown, settings).prop_map(
            |(key, on_missing, on_unknown, (plans, [overrides, exempts, networks, digests], known))| {
                let windows = || vec![Limit::parse("1/minute").unwrap()];
                let mut rule = Rule::new("r", key.clone(), on_missing, windows());
                let plan = |name: &str| Plan { name: name.to_owned(), layers: windows(), concurrent: None };
                rule.plans = plans.into_iter().map(plan).collect();
                let configured = |values: [&str; 3]| -> Vec<KeyValue> {
                    let clear = |part: &KeyPart| (part.clone(), value(part, values));
                    let of = |(part, text): (KeyPart, String)| match digests && part.prefixes().is_none() {
                        true => KeyValue::Digest(Digest::of(text.as_bytes())),
                        false => KeyValue::Clear(text),
                    };
                    key.iter().map(clear).map(of).collect()
                };
                if overrides {
                    let key = configured(known.into());
                    rule.overrides.push(Override { key, layers: windows(), concurrent: None });
                }
                rule.exemptions = Exemptions {
                    networks: networks.then(|| "203.0.113.0/24".parse().unwrap()).into_iter().collect(),
                    keys: exempts.then(|| configured(["10.1.9.9", "monitor", "monitor"])).into_iter().collect(),
                };
                (rule, on_unknown)
            },
        )
    }

    proptest! {
        /// A request has the fields and the address that the query names, and no others.
        #[test]
        fn a_query_finds_the_keys_plans_and_exemptions_of_a_request(
            rules in proptest::collection::vec(any_rule(), 1..4),
            reads in any::<[bool; 2]>(),
            address in select(ADDRESSES.to_vec()), key in select(API_KEYS.to_vec()), name in select(USERS.to_vec()),
        ) {
            let live = LiveClients::new(clients(reads[0].then(api_key), reads[1].then(user)));
            let clients = live.current();
            let named = |(i, (rule, _)): (usize, &(Rule, OnUnknownKey))| Rule { name: format!("r{i}"), ..rule.clone() };
            let configured: Vec<Rule> = rules.iter().enumerate().map(named).collect();
            let rule_set = Arc::new(RuleSet::new(&configured, SEED, None));
            let sources: &ClientSources = &clients;
            let known = KnownPlans { names: &clients.plans, limits: &[] };
            let overrides = rule_set.rules.iter().map(|rule| RuleKey::compile_overrides(rule, Some(known), SEED));
            let overrides: IdVec<RuleId, _> = overrides.map(|overrides| overrides.map(Arc::new)).collect();
            let check = |(rule, on_unknown): &(Rule, OnUnknownKey)| {
                ClientCheck::new(*on_unknown, &rule.key, Some(sources))
            };
            let checks: IdVec<RuleId, _> = rules.iter().map(check).collect();
            let queried = QueriedRules::new(&rule_set, &overrides, SEED, None);
            let queried = queried.with_clients(Some(&clients), checks.clone());

            let values = [address, key, name];
            let keys = configured.iter().map(|rule| rule.key.iter().map(|part| value(part, values)).collect());
            let keys: Vec<Vec<String>> = keys.collect();
            let named = |(rule, key)| RuleKeyValues { rule, key, cost: None };
            let named: Vec<_> = rule_set.rules.ids().zip(keys.iter().map(Vec::as_slice)).map(named).collect();
            let resolved = queried.resolve(&named, Some(&clients));
            let of_query: Vec<KeyedRule> = resolved.keyed_rules(true).collect::<Result<_, _>>().unwrap();

            let names = |part: &KeyPart| configured.iter().any(|rule| rule.key.contains(part));
            let mut headers = HeaderMap::new();
            for (part, name, value) in [(api_key(), "x-api-key", key), (user(), "x-user", name)] {
                names(&part).then(|| headers.insert(name, HeaderValue::from_static(value)));
            }
            let has_address = names(&IP.of_prefixes(24, 64));
            let address = if has_address { address } else { "198.51.100.1" };
            let tokens = TokenCache::new(TokenVerifier::default(), Vec::new(), KeyHasher::new(SEED, 0));
            let lookup = ClientLookup::new(Some(&clients));
            for (rule, keyed) in rule_set.rules.ids().zip(&of_query) {
                let rule_key = RuleKey::new(&rule_set.rules[rule], &route(), SEED)
                    .with_overrides(overrides[rule].clone())
                    .with_client_check(checks[rule].clone());
                let of_request =
                    with_request(address, &headers, &tokens, |request| rule_key.keyed_request(request, &lookup));
                match of_request {
                    Ok(of_request) => prop_assert_eq!(keyed.found, of_request),
                    Err(failure) => {
                        let is_unknown = matches!(
                            failure.error,
                            RequestError::KeyUnknown(_)
                                | RequestError::KeyMissing { .. }
                                | RequestError::CredentialsMissing(_)
                        );
                        prop_assert!(is_unknown, "{:?}", failure.error);
                        prop_assert_eq!(keyed.found, Err(NotCounted::UnknownKey));
                    }
                }
            }
        }
    }
}
