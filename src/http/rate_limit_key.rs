//! Who is asking: the parts of a rule's key, taken from a request.
//!
//! A rule's key is made ready once for every route that uses it. Parts are read before any field of
//! the request is taken away or added, and go straight into the hash, so nothing is copied. A part
//! that is given twice is refused: the upstream might believe the other one.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use http::header::{HeaderMap, HeaderName};
use http::{Method, Uri};

use super::client_plans::{ClientPlans, PlanId};
use super::error::RequestError;
use super::key_source::{KeyError, KeySource};
use super::overrides::{self, Overrides, RuleTreatment};
use super::store_key_text::{KeyDigester, KeyTextFormat};
use crate::config::route::Route;
use crate::jwt::cache::TokenCache;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule::Cost;
use transom_limiter::rule_set::{CompiledRule, KeyedRequest};
use transom_limiter::window::Windows;

/// How the key of one rule is found in the requests of one route.
#[derive(Debug)]
pub struct RuleKey {
    rule: String,
    key: KeyRecipe,
    on_missing: MissingPart,
    cost: RequestCost,
    overrides: Option<Arc<Overrides>>,
}

/// What a request costs under one rule, before the answer.
#[derive(Debug)]
enum RequestCost {
    Fixed(u32),
    Header { name: HeaderName, default: u32, max: u32 },
}

#[derive(Debug)]
enum MissingPart {
    Refuse,
    Skip,
    Fallback(Box<KeyRecipe>),
}

/// The parts of a key, and the hash as far as it does not depend on them.
#[derive(Debug)]
struct KeyRecipe {
    hashers: KeyHashers,
    parts: Vec<KeySource>,
    /// What the parts are called, and how the key is spelt; only needed where one is wrong, or the key is shared.
    text_format: Box<KeyTextFormat>,
}

/// What of a request keys are made of.
pub struct RequestAttributes<'a> {
    pub address: IpAddr,
    /// The fingerprint of its verified certificate: SHA-256, in lower-case hex.
    pub client_cert: Option<&'a str>,
    pub host: &'a str,
    pub method: &'a Method,
    /// In normal form.
    pub path: &'a str,
    /// Where in `path` the values of the route's parameters stand.
    pub params: &'a [Range<usize>],
    /// The target as it came, for its query.
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    pub route: &'a str,
    /// Says which tokens are genuine.
    pub tokens: &'a TokenCache,
    /// What the wall clock shows, Unix milliseconds; only asked where tokens are.
    pub wall_ms: u64,
    pub clients: Option<&'a ClientPlans>,
    /// The plan that the client is on; looked up when a rule first asks for it.
    pub plan: OnceCell<Option<PlanId>>,
}

/// Why a request can not be held to a rule as it should be.
#[derive(PartialEq, Eq, Debug)]
pub struct KeyFailure {
    pub error: RequestError,
    /// Who is charged all the same: key and cost are known, and only the client's plan is not. Then the windows of everyone
    /// apply.
    pub keyed_request: Option<KeyedRequest>,
}

impl From<RequestError> for KeyFailure {
    fn from(fault: RequestError) -> KeyFailure {
        KeyFailure { error: fault, keyed_request: None }
    }
}

/// Why a key could not be made.
struct PartError {
    /// Of the part.
    position: usize,
    error: KeyError,
}

impl RuleKey {
    pub fn new(entry: &CompiledRule, route: &Route, seed: Seed) -> RuleKey {
        let recipe = |fallback: bool, parts: &[KeyPart]| {
            let params = route.path.param_names();
            KeyRecipe {
                hashers: KeyHashers::new(entry, seed, fallback.then_some(parts)),
                parts: parts.iter().map(|part| KeySource::new(part, &params)).collect(),
                text_format: Box::new(KeyTextFormat::new(&entry.rule.name, parts, fallback)),
            }
        };
        RuleKey {
            rule: entry.rule.name.clone(),
            key: recipe(false, &entry.rule.key),
            on_missing: match &entry.rule.on_missing {
                OnMissing::Never | OnMissing::Refuse => MissingPart::Refuse,
                OnMissing::Skip => MissingPart::Skip,
                OnMissing::Fallback(parts) => MissingPart::Fallback(Box::new(recipe(true, parts))),
            },
            cost: RequestCost::new(&entry.rule.cost, route),
            overrides: None,
        }
    }

    /// With the exceptions of the rule.
    pub fn with_overrides(self, exceptions: Option<Arc<Overrides>>) -> RuleKey {
        RuleKey { overrides: exceptions, ..self }
    }

    /// The exceptions of a rule; for all its identities.
    pub fn compile_overrides(entry: &CompiledRule, clients: Option<&ClientPlans>, seed: Seed) -> Option<Overrides> {
        Overrides::new(entry, &key_hasher(seed, entry.hash_prefix, None), clients)
    }

    /// Who asks under this rule; `None` if the rule does not apply to the request.
    pub fn keyed_request(&self, caller: &RequestAttributes<'_>) -> Result<Option<KeyedRequest>, KeyFailure> {
        if self.overrides.as_ref().is_some_and(|exceptions| exceptions.exempts(caller.address)) {
            return Ok(None);
        }
        let Some((key, offset)) = self.key_hash(caller)? else { return Ok(None) };
        let keyed_request = |variant, cost| KeyedRequest { key, offset, variant, cost };
        let variant = match self.overrides.as_ref().map(|exceptions| self.treatment(exceptions, key, caller)) {
            None => 0,
            Some(Ok(RuleTreatment::Exempt)) => return Ok(None),
            Some(Ok(RuleTreatment::Variant(variant))) => variant,
            Some(Err(fault)) => {
                let cost = self.cost.of_request(caller.headers, &self.rule).ok();
                return Err(KeyFailure { error: fault, keyed_request: cost.map(|cost| keyed_request(0, cost)) });
            }
        };
        Ok(Some(keyed_request(variant, self.cost.of_request(caller.headers, &self.rule)?)))
    }

    /// How the rule treats a key; the plan of the client matters only where the key itself does not.
    fn treatment(
        &self,
        exceptions: &Overrides,
        key: KeyHash,
        caller: &RequestAttributes<'_>,
    ) -> Result<RuleTreatment, RequestError> {
        if exceptions.has_keys() {
            let key = exceptions.digest_hasher.as_ref().map_or(Some(key), |start| self.key.digest_hash(start, caller));
            if let Some(standing) = key.and_then(|key| exceptions.treatment_of(key)) {
                return Ok(standing);
            }
        }
        let plan = if exceptions.has_plans() { self.plan_of(caller)? } else { None };
        Ok(RuleTreatment::Variant(exceptions.variant_of(plan)))
    }

    /// The plan of the client; looked up once for all rules of the request.
    fn plan_of(&self, caller: &RequestAttributes<'_>) -> Result<Option<PlanId>, RequestError> {
        let Some(clients) = caller.clients else { return Ok(None) };
        if let Some(plan) = caller.plan.get() {
            return Ok(*plan);
        }
        let plan = clients.plan_of(caller).map_err(|(part, lack)| self.request_error(part, &lack))?;
        Ok(*caller.plan.get_or_init(|| plan))
    }

    fn key_hash(&self, caller: &RequestAttributes<'_>) -> Result<Option<(KeyHash, u64)>, RequestError> {
        let unknown = match self.key.hash(caller) {
            Ok(key) => return Ok(Some(key)),
            Err(unknown) => unknown,
        };
        match (&unknown.error, &self.on_missing) {
            (KeyError::Missing, MissingPart::Skip) => Ok(None),
            (KeyError::Missing, MissingPart::Fallback(key)) => key
                .hash(caller)
                .map(Some)
                .map_err(|unknown| self.request_error(&key.part_name(&unknown), &unknown.error)),
            _ => Err(self.request_error(&self.key.part_name(&unknown), &unknown.error)),
        }
    }

    /// Adds the text of the key that [`RuleKey::of`] finds, `RULE|PART|PART`: what other gateways know it by. Returns
    /// whether there is a key; if not, nothing is added.
    pub fn write_store_key(&self, caller: &RequestAttributes<'_>, digester: &KeyDigester, out: &mut String) -> bool {
        match (self.key.write_text(caller, digester, out), &self.on_missing) {
            (Ok(()), _) => true,
            (Err(KeyError::Missing), MissingPart::Fallback(key)) => key.write_text(caller, digester, out).is_ok(),
            (Err(_), _) => false,
        }
    }

    #[cold]
    fn request_error(&self, part: &str, lack: &KeyError) -> RequestError {
        let (rule, part) = (self.rule.clone(), part.to_owned());
        match *lack {
            KeyError::Missing => RequestError::KeyMissing { rule, part },
            KeyError::Ambiguous => RequestError::KeyAmbiguous { rule, part },
            KeyError::RepeatedAuthorization => RequestError::KeyAmbiguous { rule, part: String::from("authorization") },
            KeyError::InvalidEscape => RequestError::Query("the query contains a `%` without two hex digits"),
            KeyError::Token(invalid) => RequestError::Token(invalid),
        }
    }
}

/// The hashes of a key as far as they do not depend on a request.
#[derive(Debug)]
pub struct KeyHashers {
    /// Finds the counters.
    pub counter: KeyHasher,
    /// In a seed that all gateways have, where the key's windows start at random.
    pub window_offset: Option<KeyHasher>,
}

impl KeyHashers {
    pub fn new(entry: &CompiledRule, seed: Seed, fallback: Option<&[KeyPart]>) -> KeyHashers {
        let random = entry.rule.variants().flatten().any(|limit| matches!(limit.windows, Windows::Random { .. }));
        let name = || Seed::SHARED.hash(&[&entry.rule.name]);
        KeyHashers {
            counter: key_hasher(seed, entry.hash_prefix, fallback),
            window_offset: random.then(|| key_hasher(Seed::SHARED, name(), fallback)),
        }
    }
}

fn key_hasher(seed: Seed, rule: u64, fallback: Option<&[KeyPart]>) -> KeyHasher {
    // Keeps the keys of a fallback apart from the rule's own, and from those of another.
    let own = fallback.map(|parts| format!("{parts:?}")).unwrap_or_default();
    let mut start = KeyHasher::new(seed, rule);
    start.add_part(u8::from(fallback.is_some()), own.as_bytes());
    start
}

impl KeyRecipe {
    /// What the part is called that could not be had.
    fn part_name(&self, unknown: &PartError) -> String {
        self.text_format.part_name(unknown.position)
    }

    /// Adds the text of the key, or nothing. What is wrong goes before what is missing, as in [`KeySpec::hash_from`].
    fn write_text(
        &self,
        caller: &RequestAttributes<'_>,
        digester: &KeyDigester,
        out: &mut String,
    ) -> Result<(), KeyError> {
        let start = out.len();
        self.text_format.write_prefix(out);
        let mut lacking = Ok(());
        for (position, part) in self.parts.iter().enumerate() {
            match part
                .feed(caller, &mut |kind, bytes| self.text_format.write_part(position, kind, bytes, digester, out))
            {
                Ok(()) => {}
                Err(KeyError::Missing) => lacking = lacking.and(Err(KeyError::Missing)),
                Err(lack) => {
                    lacking = Err(lack);
                    break;
                }
            }
        }
        if lacking.is_err() {
            out.truncate(start);
        }
        lacking
    }

    /// The key, and the offset of its windows if they start at random.
    fn hash(&self, caller: &RequestAttributes<'_>) -> Result<(KeyHash, u64), PartError> {
        let offset = match &self.hashers.window_offset {
            Some(start) => self.hash_from(start, caller)?.bucket_hash,
            None => 0,
        };
        Ok((self.hash_from(&self.hashers.counter, caller)?, offset))
    }

    fn hash_from(&self, start: &KeyHasher, caller: &RequestAttributes<'_>) -> Result<KeyHash, PartError> {
        let mut hasher = start.clone();
        let mut missing = None;
        for (position, part) in self.parts.iter().enumerate() {
            match part.feed(caller, &mut |kind, bytes| hasher.add_part(kind, bytes)) {
                Ok(()) => {}
                // That one part is missing does not excuse another that is wrong: a token that is
                // not valid is refused whatever else the key is made of.
                Err(KeyError::Missing) => missing = missing.or(Some(position)),
                Err(lack) => return Err(PartError { position, error: lack }),
            }
        }
        match missing {
            Some(position) => Err(PartError { position, error: KeyError::Missing }),
            None => Ok(hasher.finish()),
        }
    }

    /// The hash of the parts' digests, by which secret keys are found; `None` if a part is missing.
    fn digest_hash(&self, start: &KeyHasher, caller: &RequestAttributes<'_>) -> Option<KeyHash> {
        let mut hasher = start.clone();
        for part in &self.parts {
            part.feed(caller, &mut |kind, bytes| overrides::feed_part(&mut hasher, kind, bytes, true)).ok()?;
        }
        Some(hasher.finish())
    }
}

impl RequestCost {
    fn new(cost: &Cost, route: &Route) -> RequestCost {
        match (cost, route.cost) {
            (Cost::Request { header, default, max }, _) => match HeaderName::from_bytes(header.as_bytes()) {
                Ok(name) => RequestCost::Header { name, default: *default, max: *max },
                // The configuration has been checked: a name that is none never gets here.
                Err(_) => RequestCost::Fixed(*default),
            },
            (Cost::Fixed(_), Some(cost)) => RequestCost::Fixed(cost),
            (Cost::Fixed(cost) | Cost::Response { reserve: cost, .. }, _) => RequestCost::Fixed(*cost),
        }
    }

    fn of_request(&self, headers: &HeaderMap, rule: &str) -> Result<u32, RequestError> {
        let (name, default, max) = match self {
            RequestCost::Fixed(cost) => return Ok(*cost),
            RequestCost::Header { name, default, max } => (name, *default, *max),
        };
        let mut values = headers.get_all(name).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return if headers.contains_key(name) { Err(cost_error(rule, name, max)) } else { Ok(default) };
        };
        let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let cost = text.and_then(|text| text.parse().ok()).filter(|cost| *cost <= max);
        cost.ok_or_else(|| cost_error(rule, name, max))
    }
}

fn cost_error(rule: &str, field: &HeaderName, max: u32) -> RequestError {
    RequestError::Cost { rule: rule.to_owned(), field: field.to_string(), max }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::route::{PathPattern, Segment};
    use crate::jwt::token::TokenVerifier;
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::Rule;
    use transom_limiter::rule_set::RuleSet;

    pub const SEED: Seed = Seed(1, 2);

    fn rule_key(key: &[KeyPart], on_missing: OnMissing) -> RuleKey {
        RuleKey::new(&RuleSet::new(&[rule(key, on_missing)], SEED, None).rules[0], &route(), SEED)
    }

    pub fn rule(key: &[KeyPart], on_missing: OnMissing) -> Rule {
        Rule::new("r", key.to_vec(), on_missing, vec![Limit::parse("1/minute").unwrap()])
    }

    pub fn route() -> Route {
        let segments = vec![Segment::Literal("u".to_owned()), Segment::Param("id".to_owned())];
        Route {
            name: "route".to_owned(),
            hosts: vec![],
            methods: vec![],
            headers: vec![],
            path: PathPattern { text: "/u/{id}".to_owned(), segments },
            secure: None,
            actions: None,
            upstream: 0,
            rules: vec![0],
            cost: None,
            websocket: true,
        }
    }

    pub fn resolve(
        identity: &RuleKey,
        address: &str,
        headers: &HeaderMap,
    ) -> Result<Option<KeyedRequest>, RequestError> {
        let none = TokenCache::new(TokenVerifier::default(), Vec::new(), KeyHasher::new(SEED, 0));
        with_request(address, headers, &none, |caller| identity.keyed_request(caller)).map_err(|failure| failure.error)
    }

    /// Hands on a request.
    pub fn with_request<T>(
        address: &str,
        headers: &HeaderMap,
        tokens: &TokenCache,
        with: impl FnOnce(&RequestAttributes<'_>) -> T,
    ) -> T {
        let id = 3..5;
        with(&RequestAttributes {
            address: address.parse().unwrap(),
            client_cert: Some("f00d"),
            host: "example.com",
            method: &Method::GET,
            path: "/u/77",
            params: std::slice::from_ref(&id),
            uri: &Uri::from_static("/u/77?token=a%20b"),
            headers,
            route: "route",
            tokens,
            wall_ms: 0,
            clients: None,
            plan: OnceCell::new(),
        })
    }

    #[test]
    fn addresses_are_grouped_by_prefix_and_unwrapped() {
        let none = HeaderMap::new();
        let ip = rule_key(&[KeyPart::Ip { v4_prefix: 32, v6_prefix: 64 }], OnMissing::Never);
        let key = |address| resolve(&ip, address, &none).unwrap();
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
        let wide = rule_key(&[KeyPart::Ip { v4_prefix: 24, v6_prefix: 128 }], OnMissing::Never);
        assert_eq!(resolve(&wide, "10.0.0.1", &none), resolve(&wide, "10.0.0.99", &none));
        assert_ne!(resolve(&wide, "2001:db8::1", &none), resolve(&wide, "2001:db8::2", &none));
    }

    #[test]
    fn a_missing_part_does_what_the_rule_says() {
        let none = HeaderMap::new();
        let user = || [KeyPart::Header("x-user".to_owned())];
        let missing = RequestError::KeyMissing { rule: "r".to_owned(), part: "header:x-user".to_owned() };
        assert_eq!(resolve(&rule_key(&user(), OnMissing::Refuse), "10.0.0.1", &none), Err(missing));
        assert_eq!(resolve(&rule_key(&user(), OnMissing::Skip), "10.0.0.1", &none), Ok(None));
        let fallback = rule_key(&user(), OnMissing::Fallback(vec![KeyPart::Ip { v4_prefix: 32, v6_prefix: 64 }]));
        assert_ne!(resolve(&fallback, "10.0.0.1", &none), resolve(&fallback, "10.0.0.2", &none));
        let mut named = HeaderMap::new();
        named.insert("x-user", "bob".parse().unwrap());
        assert_eq!(resolve(&fallback, "10.0.0.1", &named), resolve(&fallback, "10.0.0.2", &named));
        named.insert("x-user", "".parse().unwrap());
        assert_eq!(resolve(&fallback, "10.0.0.1", &named), resolve(&fallback, "10.0.0.1", &none));
    }

    #[test]
    fn a_part_given_twice_is_refused() {
        let mut twice = HeaderMap::new();
        twice.append("x-user", "bob".parse().unwrap());
        twice.append("x-user", "eve".parse().unwrap());
        let skip = rule_key(&[KeyPart::Header("x-user".to_owned())], OnMissing::Skip);
        assert!(matches!(resolve(&skip, "10.0.0.1", &twice), Err(RequestError::KeyAmbiguous { .. })));
    }

    #[test]
    fn parts_of_a_composite_are_all_counted() {
        let mut headers = HeaderMap::new();
        headers.insert("x-user", "bob".parse().unwrap());
        let parts = [
            KeyPart::Header("x-user".to_owned()),
            KeyPart::Param("id".to_owned()),
            KeyPart::Method,
            KeyPart::Host,
            KeyPart::Path,
            KeyPart::Route,
        ];
        let all = rule_key(&parts, OnMissing::Refuse);
        let fewer = rule_key(&parts[..5], OnMissing::Refuse);
        assert!(resolve(&all, "10.0.0.1", &headers).unwrap().is_some());
        assert_ne!(resolve(&all, "10.0.0.1", &headers), resolve(&fewer, "10.0.0.1", &headers));
    }
}
