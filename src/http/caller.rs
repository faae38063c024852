//! Who is asking: the parts of a rule's key, taken from a request.
//!
//! A rule's key is made ready once for every route that uses it. Parts are read before any field of
//! the request is taken away or added, and go straight into the hash, so nothing is copied. A part
//! that is given twice is refused: the upstream might believe the other one.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use http::Method;
use http::header::{HeaderMap, HeaderName};

use super::clients::{Clients, PlanId};
use super::exceptions::{self, Exceptions, Standing};
use super::fault::Fault;
use crate::config::Route;
use crate::rule::book::Entry;
use crate::rule::desk::Asker;
use crate::rule::key::{KeyHash, KeyHasher, OnMissing, Part, Seed};
use crate::rule::terms::Cost;
use crate::rule::window::Windows;

/// How the key of one rule is found in the requests of one route.
#[derive(Debug)]
pub struct Identity {
    rule: String,
    key: Recipe,
    on_missing: OnAbsent,
    cost: Price,
    exceptions: Option<Arc<Exceptions>>,
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
    Fallback(Recipe),
}

/// The parts of a key, and the hash as far as it does not depend on them.
#[derive(Debug)]
struct Recipe {
    start: KeyHasher,
    /// The same in a seed that all gateways have, where the key's windows start at random.
    everywhere: Option<KeyHasher>,
    parts: Vec<Source>,
}

/// Where a part is found.
#[derive(Debug)]
pub enum Source {
    Ip {
        v4_prefix: u8,
        v6_prefix: u8,
    },
    Header(HeaderName),
    /// The parameter's position in the route's path; `None`: this route has none of that name.
    Param(String, Option<usize>),
    Host,
    Method,
    Path,
    Route,
    Global,
}

/// What of a request keys are made of.
pub struct Caller<'a> {
    pub address: IpAddr,
    pub host: &'a str,
    pub method: &'a Method,
    /// In normal form.
    pub path: &'a str,
    /// Where in `path` the values of the route's parameters stand.
    pub params: &'a [Range<usize>],
    pub headers: &'a HeaderMap,
    pub route: &'a str,
    pub clients: Option<&'a Clients>,
    /// The plan that the client is on; looked up when a rule first asks for it.
    pub plan: OnceCell<Option<PlanId>>,
}

/// Why a key could not be made.
pub enum Unknown<'a> {
    Missing(&'a Source),
    Ambiguous(&'a Source),
}

impl Identity {
    pub fn new(entry: &Entry, route: &Route, seed: Seed) -> Identity {
        let random = entry.rule.variants().flatten().any(|limit| matches!(limit.windows, Windows::Random { .. }));
        let recipe = |fallback: bool, parts: &[Part]| {
            let start = |seed: Seed, rule: u64| start(seed, rule, fallback.then_some(parts));
            let params = route.path.param_names();
            Recipe {
                start: start(seed, entry.identity),
                everywhere: random.then(|| start(Seed::EVERYWHERE, Seed::EVERYWHERE.bits(&[&entry.rule.name]))),
                parts: parts.iter().map(|part| Source::new(part, &params)).collect(),
            }
        };
        Identity {
            rule: entry.rule.name.clone(),
            key: recipe(false, &entry.rule.key),
            on_missing: match &entry.rule.on_missing {
                OnMissing::Never | OnMissing::Refuse => OnAbsent::Refuse,
                OnMissing::Skip => OnAbsent::Skip,
                OnMissing::Fallback(parts) => OnAbsent::Fallback(recipe(true, parts)),
            },
            cost: Price::new(&entry.rule.cost, route),
            exceptions: None,
        }
    }

    /// With the exceptions of the rule.
    pub fn with(self, exceptions: Option<Arc<Exceptions>>) -> Identity {
        Identity { exceptions, ..self }
    }

    /// The exceptions of a rule; for all its identities.
    pub fn exceptions(entry: &Entry, clients: Option<&Clients>, seed: Seed) -> Option<Exceptions> {
        Exceptions::new(entry, &start(seed, entry.identity, None), clients)
    }

    /// Who asks under this rule; `None` if the rule does not apply to the request.
    pub fn of(&self, caller: &Caller<'_>) -> Result<Option<Asker>, Fault> {
        if self.exceptions.as_ref().is_some_and(|exceptions| exceptions.exempts(caller.address)) {
            return Ok(None);
        }
        let Some((key, offset)) = self.key_of(caller)? else { return Ok(None) };
        let variant = match self.exceptions.as_ref().map(|exceptions| self.standing(exceptions, key, caller)) {
            None => 0,
            Some(standing) => match standing? {
                Standing::Exempt => return Ok(None),
                Standing::Variant(variant) => variant,
            },
        };
        Ok(Some(Asker { key, offset, variant, cost: self.cost.of(caller.headers, &self.rule)? }))
    }

    /// How the rule treats a key; the plan of the client matters only where the key itself does not.
    fn standing(&self, exceptions: &Exceptions, key: KeyHash, caller: &Caller<'_>) -> Result<Standing, Fault> {
        if exceptions.has_keys() {
            let key = exceptions.by_digest.as_ref().map_or(Some(key), |start| self.key.digest(start, caller));
            if let Some(standing) = key.and_then(|key| exceptions.of_key(key)) {
                return Ok(standing);
            }
        }
        let plan = if exceptions.has_plans() { self.plan_of(caller)? } else { None };
        Ok(Standing::Variant(exceptions.variant_of(plan)))
    }

    /// The plan of the client; looked up once for all rules of the request.
    fn plan_of(&self, caller: &Caller<'_>) -> Result<Option<PlanId>, Fault> {
        let Some(clients) = caller.clients else { return Ok(None) };
        if let Some(plan) = caller.plan.get() {
            return Ok(*plan);
        }
        let plan = clients.plan_of(caller).map_err(|unknown| self.fault(&unknown))?;
        Ok(*caller.plan.get_or_init(|| plan))
    }

    #[cold]
    fn fault(&self, unknown: &Unknown<'_>) -> Fault {
        match unknown {
            Unknown::Missing(part) => Fault::KeyMissing { rule: self.rule.clone(), part: part.name() },
            Unknown::Ambiguous(part) => Fault::KeyAmbiguous { rule: self.rule.clone(), part: part.name() },
        }
    }

    fn key_of(&self, caller: &Caller<'_>) -> Result<Option<(KeyHash, u64)>, Fault> {
        let fault = |unknown| self.fault(&unknown);
        match (self.key.hash(caller), &self.on_missing) {
            (Ok(key), _) => Ok(Some(key)),
            (Err(Unknown::Missing(_)), OnAbsent::Skip) => Ok(None),
            (Err(Unknown::Missing(_)), OnAbsent::Fallback(key)) => key.hash(caller).map(Some).map_err(fault),
            (Err(unknown), _) => Err(fault(unknown)),
        }
    }
}

/// The hash of a key as far as it does not depend on a request.
fn start(seed: Seed, rule: u64, fallback: Option<&[Part]>) -> KeyHasher {
    // Keeps the keys of a fallback apart from the rule's own, and from those of another.
    let own = fallback.map(|parts| format!("{parts:?}")).unwrap_or_default();
    let mut start = KeyHasher::new(seed, rule);
    start.part(u8::from(fallback.is_some()), own.as_bytes());
    start
}

impl Recipe {
    /// The key, and the offset of its windows if they start at random.
    fn hash(&self, caller: &Caller<'_>) -> Result<(KeyHash, u64), Unknown<'_>> {
        let hash = |start: &KeyHasher| {
            let mut hasher = start.clone();
            self.parts.iter().try_for_each(|part| part.feed(caller, &mut |kind, bytes| hasher.part(kind, bytes)))?;
            Ok(hasher.finish())
        };
        let offset = self.everywhere.as_ref().map_or(Ok(0), |start| hash(start).map(|hash| hash.place))?;
        Ok((hash(&self.start)?, offset))
    }

    /// The hash of the parts' digests, by which secret keys are found; `None` if a part is missing.
    fn digest(&self, start: &KeyHasher, caller: &Caller<'_>) -> Option<KeyHash> {
        let mut hasher = start.clone();
        for part in &self.parts {
            part.feed(caller, &mut |kind, bytes| exceptions::feed(&mut hasher, kind, bytes, true)).ok()?;
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

    fn of(&self, headers: &HeaderMap, rule: &str) -> Result<u32, Fault> {
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

fn cost_fault(rule: &str, field: &HeaderName, max: u32) -> Fault {
    Fault::Cost { rule: rule.to_owned(), field: field.to_string(), max }
}

impl Source {
    /// `params` are the names of the route's parameters.
    pub fn new(part: &Part, params: &[&str]) -> Source {
        match part {
            Part::Ip { v4_prefix, v6_prefix } => Source::Ip { v4_prefix: *v4_prefix, v6_prefix: *v6_prefix },
            // The configuration has been checked: a name that is none never gets here.
            Part::Header(name) => match HeaderName::from_bytes(name.as_bytes()) {
                Ok(name) => Source::Header(name),
                Err(_) => Source::Param(name.clone(), None),
            },
            Part::Param(name) => Source::Param(name.clone(), params.iter().position(|known| known == name)),
            Part::Host => Source::Host,
            Part::Method => Source::Method,
            Part::Path => Source::Path,
            Part::Route => Source::Route,
            Part::Global => Source::Global,
        }
    }

    fn name(&self) -> String {
        match self {
            Source::Header(name) => format!("header:{name}"),
            Source::Param(name, _) => format!("param:{name}"),
            Source::Ip { .. } | Source::Host | Source::Method | Source::Path | Source::Route | Source::Global => {
                String::new()
            }
        }
    }

    /// Hands on the part of a request, and of what kind it is.
    pub fn feed<'s>(&'s self, caller: &Caller<'_>, take: &mut impl FnMut(u8, &[u8])) -> Result<(), Unknown<'s>> {
        match self {
            Source::Ip { v4_prefix, v6_prefix } => address(caller.address, *v4_prefix, *v6_prefix, take),
            Source::Header(name) => {
                let mut values = caller.headers.get_all(name).iter();
                match (values.next(), values.next()) {
                    (Some(value), None) if !value.is_empty() => take(3, value.as_bytes()),
                    (None, _) | (Some(_), None) => return Err(Unknown::Missing(self)),
                    (Some(_), Some(_)) => return Err(Unknown::Ambiguous(self)),
                }
            }
            Source::Param(_, position) => {
                let range = position.and_then(|position| caller.params.get(position)).ok_or(Unknown::Missing(self))?;
                take(4, caller.path[range.clone()].as_bytes());
            }
            Source::Host => take(5, caller.host.as_bytes()),
            Source::Method => take(6, caller.method.as_str().as_bytes()),
            Source::Path => take(7, caller.path.as_bytes()),
            Source::Route => take(8, caller.route.as_bytes()),
            Source::Global => take(9, b""),
        }
        Ok(())
    }
}

/// Hands on as much of an address as is counted.
pub fn address(address: IpAddr, v4_prefix: u8, v6_prefix: u8, take: &mut impl FnMut(u8, &[u8])) {
    match address.to_canonical() {
        IpAddr::V4(v4) => take(1, &prefix(v4.to_bits(), 32 - v4_prefix).to_be_bytes()),
        IpAddr::V6(v6) => take(2, &prefix(v6.to_bits(), 128 - v6_prefix).to_be_bytes()),
    }
}

/// The kind of a part, as [`Source::feed`] tells it; addresses are of two, and tell it themselves.
pub fn kind(part: &Part) -> u8 {
    match part {
        Part::Ip { .. } => 1,
        Part::Header(_) => 3,
        Part::Param(_) => 4,
        Part::Host => 5,
        Part::Method => 6,
        Part::Path => 7,
        Part::Route => 8,
        Part::Global => 9,
    }
}

/// Clears the last `host_bits` bits of an address.
fn prefix<T>(bits: T, host_bits: u8) -> T
where
    T: Copy + Default + std::ops::Shr<u8, Output = T> + std::ops::Shl<u8, Output = T>,
{
    if usize::from(host_bits) >= size_of::<T>() * 8 { T::default() } else { (bits >> host_bits) << host_bits }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::{PathPattern, Segment};
    use crate::rule::book::Book;
    use crate::rule::limit::Limit;
    use crate::rule::terms::{Exemptions, OnLimit, Rule};

    pub const SEED: Seed = Seed(1, 2);

    fn identity(key: &[Part], on_missing: OnMissing) -> Identity {
        Identity::new(&Book::new(&[rule(key, on_missing)], [], SEED).entries[0], &route(), SEED)
    }

    pub fn rule(key: &[Part], on_missing: OnMissing) -> Rule {
        Rule {
            name: "r".to_owned(),
            key: key.to_vec(),
            on_missing,
            layers: vec![Limit::parse("1/minute").unwrap()],
            plans: vec![],
            overrides: vec![],
            exemptions: Exemptions::default(),
            cost: Cost::Fixed(1),
            on_limit: OnLimit::Refuse,
            count_refused: false,
        }
    }

    pub fn route() -> Route {
        let segments = vec![Segment::Literal("u".to_owned()), Segment::Param("id".to_owned())];
        Route {
            name: "route".to_owned(),
            hosts: vec![],
            methods: vec![],
            headers: vec![],
            path: PathPattern { text: "/u/{id}".to_owned(), segments },
            upstream: 0,
            rules: vec![0],
            cost: None,
        }
    }

    pub fn of(identity: &Identity, address: &str, headers: &HeaderMap) -> Result<Option<Asker>, Fault> {
        let id = 3..5;
        identity.of(&Caller {
            address: address.parse().unwrap(),
            host: "example.com",
            method: &Method::GET,
            path: "/u/77",
            params: std::slice::from_ref(&id),
            headers,
            route: "route",
            clients: None,
            plan: OnceCell::new(),
        })
    }

    #[test]
    fn addresses_are_grouped_by_prefix_and_unwrapped() {
        let none = HeaderMap::new();
        let ip = identity(&[Part::Ip { v4_prefix: 32, v6_prefix: 64 }], OnMissing::Never);
        let key = |address| of(&ip, address, &none).unwrap();
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
        let wide = identity(&[Part::Ip { v4_prefix: 24, v6_prefix: 128 }], OnMissing::Never);
        assert_eq!(of(&wide, "10.0.0.1", &none), of(&wide, "10.0.0.99", &none));
        assert_ne!(of(&wide, "2001:db8::1", &none), of(&wide, "2001:db8::2", &none));
    }

    #[test]
    fn a_missing_part_does_what_the_rule_says() {
        let none = HeaderMap::new();
        let user = || [Part::Header("x-user".to_owned())];
        let missing = Fault::KeyMissing { rule: "r".to_owned(), part: "header:x-user".to_owned() };
        assert_eq!(of(&identity(&user(), OnMissing::Refuse), "10.0.0.1", &none), Err(missing));
        assert_eq!(of(&identity(&user(), OnMissing::Skip), "10.0.0.1", &none), Ok(None));
        let fallback = identity(&user(), OnMissing::Fallback(vec![Part::Ip { v4_prefix: 32, v6_prefix: 64 }]));
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
        let skip = identity(&[Part::Header("x-user".to_owned())], OnMissing::Skip);
        assert!(matches!(of(&skip, "10.0.0.1", &twice), Err(Fault::KeyAmbiguous { .. })));
    }

    #[test]
    fn parts_of_a_composite_are_all_counted() {
        let mut headers = HeaderMap::new();
        headers.insert("x-user", "bob".parse().unwrap());
        let parts = [
            Part::Header("x-user".to_owned()),
            Part::Param("id".to_owned()),
            Part::Method,
            Part::Host,
            Part::Path,
            Part::Route,
        ];
        let all = identity(&parts, OnMissing::Refuse);
        let fewer = identity(&parts[..5], OnMissing::Refuse);
        assert!(of(&all, "10.0.0.1", &headers).unwrap().is_some());
        assert_ne!(of(&all, "10.0.0.1", &headers), of(&fewer, "10.0.0.1", &headers));
    }
}
