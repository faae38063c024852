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

use super::client_plans::{Clients, PlanId};
use super::error::RequestError;
use super::key_source::{KeyError, KeySource};
use super::overrides::{self, Overrides, RuleTreatment};
use super::store_key_text::{Digester, Spelling};
use crate::config::route::Route;
use crate::jwt::cache::Checker;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule::Cost;
use transom_limiter::rule_set::{CompiledRule, KeyedRequest};
use transom_limiter::window::Windows;

/// How the key of one rule is found in the requests of one route.
#[derive(Debug)]
pub struct RuleKey {
    rule: String,
    key: KeySpec,
    on_missing: OnAbsent,
    cost: Price,
    exceptions: Option<Arc<Overrides>>,
}

/// What a request costs under one rule, before the answer.
#[derive(Debug)]
enum Price {
    Fixed(u32),
    Told { name: HeaderName, default: u32, max: u32 },
}

#[derive(Debug)]
enum OnAbsent {
    Refuse,
    Skip,
    Fallback(Box<KeySpec>),
}

/// The parts of a key, and the hash as far as it does not depend on them.
#[derive(Debug)]
struct KeySpec {
    starts: Starts,
    parts: Vec<KeySource>,
    /// What the parts are called, and how the key is spelt; only needed where one is wrong, or the key is shared.
    spelling: Box<Spelling>,
}

/// What of a request keys are made of.
pub struct Caller<'a> {
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
    pub tokens: &'a Checker,
    /// What the wall clock shows, Unix milliseconds; only asked where tokens are.
    pub wall_ms: u64,
    pub clients: Option<&'a Clients>,
    /// The plan that the client is on; looked up when a rule first asks for it.
    pub plan: OnceCell<Option<PlanId>>,
}

/// Why a request can not be held to a rule as it should be.
#[derive(PartialEq, Eq, Debug)]
pub struct Unclear {
    pub fault: RequestError,
    /// Who is charged all the same: key and cost are known, and only the client's plan is not. Then the windows of everyone
    /// apply.
    pub keyed_request: Option<KeyedRequest>,
}

impl From<RequestError> for Unclear {
    fn from(fault: RequestError) -> Unclear {
        Unclear { fault, keyed_request: None }
    }
}

/// Why a key could not be made.
struct Unknown {
    /// Of the part.
    position: usize,
    lack: KeyError,
}

impl RuleKey {
    pub fn new(entry: &CompiledRule, route: &Route, seed: Seed) -> RuleKey {
        let recipe = |fallback: bool, parts: &[KeyPart]| {
            let params = route.path.param_names();
            KeySpec {
                starts: Starts::new(entry, seed, fallback.then_some(parts)),
                parts: parts.iter().map(|part| KeySource::new(part, &params)).collect(),
                spelling: Box::new(Spelling::new(&entry.rule.name, parts, fallback)),
            }
        };
        RuleKey {
            rule: entry.rule.name.clone(),
            key: recipe(false, &entry.rule.key),
            on_missing: match &entry.rule.on_missing {
                OnMissing::Never | OnMissing::Refuse => OnAbsent::Refuse,
                OnMissing::Skip => OnAbsent::Skip,
                OnMissing::Fallback(parts) => OnAbsent::Fallback(Box::new(recipe(true, parts))),
            },
            cost: Price::new(&entry.rule.cost, route),
            exceptions: None,
        }
    }

    /// With the exceptions of the rule.
    pub fn with(self, exceptions: Option<Arc<Overrides>>) -> RuleKey {
        RuleKey { exceptions, ..self }
    }

    /// The exceptions of a rule; for all its identities.
    pub fn exceptions(entry: &CompiledRule, clients: Option<&Clients>, seed: Seed) -> Option<Overrides> {
        Overrides::new(entry, &start(seed, entry.hash_prefix, None), clients)
    }

    /// Who asks under this rule; `None` if the rule does not apply to the request.
    pub fn of(&self, caller: &Caller<'_>) -> Result<Option<KeyedRequest>, Unclear> {
        if self.exceptions.as_ref().is_some_and(|exceptions| exceptions.exempts(caller.address)) {
            return Ok(None);
        }
        let Some((key, offset)) = self.key_of(caller)? else { return Ok(None) };
        let keyed_request = |variant, cost| KeyedRequest { key, offset, variant, cost };
        let variant = match self.exceptions.as_ref().map(|exceptions| self.standing(exceptions, key, caller)) {
            None => 0,
            Some(Ok(RuleTreatment::Exempt)) => return Ok(None),
            Some(Ok(RuleTreatment::Variant(variant))) => variant,
            Some(Err(fault)) => {
                let cost = self.cost.of(caller.headers, &self.rule).ok();
                return Err(Unclear { fault, keyed_request: cost.map(|cost| keyed_request(0, cost)) });
            }
        };
        Ok(Some(keyed_request(variant, self.cost.of(caller.headers, &self.rule)?)))
    }

    /// How the rule treats a key; the plan of the client matters only where the key itself does not.
    fn standing(
        &self,
        exceptions: &Overrides,
        key: KeyHash,
        caller: &Caller<'_>,
    ) -> Result<RuleTreatment, RequestError> {
        if exceptions.has_keys() {
            let key = exceptions.by_digest.as_ref().map_or(Some(key), |start| self.key.digest(start, caller));
            if let Some(standing) = key.and_then(|key| exceptions.of_key(key)) {
                return Ok(standing);
            }
        }
        let plan = if exceptions.has_plans() { self.plan_of(caller)? } else { None };
        Ok(RuleTreatment::Variant(exceptions.variant_of(plan)))
    }

    /// The plan of the client; looked up once for all rules of the request.
    fn plan_of(&self, caller: &Caller<'_>) -> Result<Option<PlanId>, RequestError> {
        let Some(clients) = caller.clients else { return Ok(None) };
        if let Some(plan) = caller.plan.get() {
            return Ok(*plan);
        }
        let plan = clients.plan_of(caller).map_err(|(part, lack)| self.fault(part, &lack))?;
        Ok(*caller.plan.get_or_init(|| plan))
    }

    fn key_of(&self, caller: &Caller<'_>) -> Result<Option<(KeyHash, u64)>, RequestError> {
        let unknown = match self.key.hash(caller) {
            Ok(key) => return Ok(Some(key)),
            Err(unknown) => unknown,
        };
        match (&unknown.lack, &self.on_missing) {
            (KeyError::Missing, OnAbsent::Skip) => Ok(None),
            (KeyError::Missing, OnAbsent::Fallback(key)) => {
                key.hash(caller).map(Some).map_err(|unknown| self.fault(&key.name(&unknown), &unknown.lack))
            }
            _ => Err(self.fault(&self.key.name(&unknown), &unknown.lack)),
        }
    }

    /// Adds the text of the key that [`RuleKey::of`] finds, `RULE|PART|PART`: what other gateways know it by. Returns
    /// whether there is a key; if not, nothing is added.
    pub fn text(&self, caller: &Caller<'_>, digester: &Digester, out: &mut String) -> bool {
        match (self.key.spell(caller, digester, out), &self.on_missing) {
            (Ok(()), _) => true,
            (Err(KeyError::Missing), OnAbsent::Fallback(key)) => key.spell(caller, digester, out).is_ok(),
            (Err(_), _) => false,
        }
    }

    #[cold]
    fn fault(&self, part: &str, lack: &KeyError) -> RequestError {
        let (rule, part) = (self.rule.clone(), part.to_owned());
        match *lack {
            KeyError::Missing => RequestError::KeyMissing { rule, part },
            KeyError::Ambiguous => RequestError::KeyAmbiguous { rule, part },
            KeyError::Authorizations => RequestError::KeyAmbiguous { rule, part: String::from("authorization") },
            KeyError::Escape => RequestError::Query("the query contains a `%` without two hex digits"),
            KeyError::Token(invalid) => RequestError::Token(invalid),
        }
    }
}

/// The hashes of a key as far as they do not depend on a request.
#[derive(Debug)]
pub struct Starts {
    /// Finds the counters.
    pub own: KeyHasher,
    /// In a seed that all gateways have, where the key's windows start at random.
    pub everywhere: Option<KeyHasher>,
}

impl Starts {
    pub fn new(entry: &CompiledRule, seed: Seed, fallback: Option<&[KeyPart]>) -> Starts {
        let random = entry.rule.variants().flatten().any(|limit| matches!(limit.windows, Windows::Random { .. }));
        let name = || Seed::SHARED.hash(&[&entry.rule.name]);
        Starts {
            own: start(seed, entry.hash_prefix, fallback),
            everywhere: random.then(|| start(Seed::SHARED, name(), fallback)),
        }
    }
}

fn start(seed: Seed, rule: u64, fallback: Option<&[KeyPart]>) -> KeyHasher {
    // Keeps the keys of a fallback apart from the rule's own, and from those of another.
    let own = fallback.map(|parts| format!("{parts:?}")).unwrap_or_default();
    let mut start = KeyHasher::new(seed, rule);
    start.add_part(u8::from(fallback.is_some()), own.as_bytes());
    start
}

impl KeySpec {
    /// What the part is called that could not be had.
    fn name(&self, unknown: &Unknown) -> String {
        self.spelling.name(unknown.position)
    }

    /// Adds the text of the key, or nothing. What is wrong goes before what is missing, as in [`KeySpec::hash_from`].
    fn spell(&self, caller: &Caller<'_>, digester: &Digester, out: &mut String) -> Result<(), KeyError> {
        let start = out.len();
        self.spelling.begin(out);
        let mut lacking = Ok(());
        for (position, part) in self.parts.iter().enumerate() {
            match part.feed(caller, &mut |kind, bytes| self.spelling.part(position, kind, bytes, digester, out)) {
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
    fn hash(&self, caller: &Caller<'_>) -> Result<(KeyHash, u64), Unknown> {
        let offset = match &self.starts.everywhere {
            Some(start) => self.hash_from(start, caller)?.bucket_hash,
            None => 0,
        };
        Ok((self.hash_from(&self.starts.own, caller)?, offset))
    }

    fn hash_from(&self, start: &KeyHasher, caller: &Caller<'_>) -> Result<KeyHash, Unknown> {
        let mut hasher = start.clone();
        let mut missing = None;
        for (position, part) in self.parts.iter().enumerate() {
            match part.feed(caller, &mut |kind, bytes| hasher.add_part(kind, bytes)) {
                Ok(()) => {}
                // That one part is missing does not excuse another that is wrong: a token that is
                // not valid is refused whatever else the key is made of.
                Err(KeyError::Missing) => missing = missing.or(Some(position)),
                Err(lack) => return Err(Unknown { position, lack }),
            }
        }
        match missing {
            Some(position) => Err(Unknown { position, lack: KeyError::Missing }),
            None => Ok(hasher.finish()),
        }
    }

    /// The hash of the parts' digests, by which secret keys are found; `None` if a part is missing.
    fn digest(&self, start: &KeyHasher, caller: &Caller<'_>) -> Option<KeyHash> {
        let mut hasher = start.clone();
        for part in &self.parts {
            part.feed(caller, &mut |kind, bytes| overrides::feed(&mut hasher, kind, bytes, true)).ok()?;
        }
        Some(hasher.finish())
    }
}

impl Price {
    fn new(cost: &Cost, route: &Route) -> Price {
        match (cost, route.cost) {
            (Cost::Request { header, default, max }, _) => match HeaderName::from_bytes(header.as_bytes()) {
                Ok(name) => Price::Told { name, default: *default, max: *max },
                // The configuration has been checked: a name that is none never gets here.
                Err(_) => Price::Fixed(*default),
            },
            (Cost::Fixed(_), Some(cost)) => Price::Fixed(cost),
            (Cost::Fixed(cost) | Cost::Response { reserve: cost, .. }, _) => Price::Fixed(*cost),
        }
    }

    fn of(&self, headers: &HeaderMap, rule: &str) -> Result<u32, RequestError> {
        let (name, default, max) = match self {
            Price::Fixed(cost) => return Ok(*cost),
            Price::Told { name, default, max } => (name, *default, *max),
        };
        let mut values = headers.get_all(name).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return if headers.contains_key(name) { Err(cost_fault(rule, name, max)) } else { Ok(default) };
        };
        let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let cost = text.and_then(|text| text.parse().ok()).filter(|cost| *cost <= max);
        cost.ok_or_else(|| cost_fault(rule, name, max))
    }
}

fn cost_fault(rule: &str, field: &HeaderName, max: u32) -> RequestError {
    RequestError::Cost { rule: rule.to_owned(), field: field.to_string(), max }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::route::{PathPattern, Segment};
    use crate::jwt::Trust;
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::Rule;
    use transom_limiter::rule_set::RuleSet;

    pub const SEED: Seed = Seed(1, 2);

    fn identity(key: &[KeyPart], on_missing: OnMissing) -> RuleKey {
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

    pub fn of(identity: &RuleKey, address: &str, headers: &HeaderMap) -> Result<Option<KeyedRequest>, RequestError> {
        let none = Checker::new(Trust::default(), Vec::new(), KeyHasher::new(SEED, 0));
        asked(address, headers, &none, |caller| identity.of(caller)).map_err(|unclear| unclear.fault)
    }

    /// Hands on a request.
    pub fn asked<T>(address: &str, headers: &HeaderMap, tokens: &Checker, with: impl FnOnce(&Caller<'_>) -> T) -> T {
        let id = 3..5;
        with(&Caller {
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
        let ip = identity(&[KeyPart::Ip { v4_prefix: 32, v6_prefix: 64 }], OnMissing::Never);
        let key = |address| of(&ip, address, &none).unwrap();
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
        let wide = identity(&[KeyPart::Ip { v4_prefix: 24, v6_prefix: 128 }], OnMissing::Never);
        assert_eq!(of(&wide, "10.0.0.1", &none), of(&wide, "10.0.0.99", &none));
        assert_ne!(of(&wide, "2001:db8::1", &none), of(&wide, "2001:db8::2", &none));
    }

    #[test]
    fn a_missing_part_does_what_the_rule_says() {
        let none = HeaderMap::new();
        let user = || [KeyPart::Header("x-user".to_owned())];
        let missing = RequestError::KeyMissing { rule: "r".to_owned(), part: "header:x-user".to_owned() };
        assert_eq!(of(&identity(&user(), OnMissing::Refuse), "10.0.0.1", &none), Err(missing));
        assert_eq!(of(&identity(&user(), OnMissing::Skip), "10.0.0.1", &none), Ok(None));
        let fallback = identity(&user(), OnMissing::Fallback(vec![KeyPart::Ip { v4_prefix: 32, v6_prefix: 64 }]));
        assert_ne!(of(&fallback, "10.0.0.1", &none), of(&fallback, "10.0.0.2", &none));
        let mut named = HeaderMap::new();
        named.insert("x-user", "bob".parse().unwrap());
        assert_eq!(of(&fallback, "10.0.0.1", &named), of(&fallback, "10.0.0.2", &named));
        named.insert("x-user", "".parse().unwrap());
        assert_eq!(of(&fallback, "10.0.0.1", &named), of(&fallback, "10.0.0.1", &none));
    }

    #[test]
    fn a_part_given_twice_is_refused() {
        let mut twice = HeaderMap::new();
        twice.append("x-user", "bob".parse().unwrap());
        twice.append("x-user", "eve".parse().unwrap());
        let skip = identity(&[KeyPart::Header("x-user".to_owned())], OnMissing::Skip);
        assert!(matches!(of(&skip, "10.0.0.1", &twice), Err(RequestError::KeyAmbiguous { .. })));
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
        let all = identity(&parts, OnMissing::Refuse);
        let fewer = identity(&parts[..5], OnMissing::Refuse);
        assert!(of(&all, "10.0.0.1", &headers).unwrap().is_some());
        assert_ne!(of(&all, "10.0.0.1", &headers), of(&fewer, "10.0.0.1", &headers));
    }
}
