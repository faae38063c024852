//! Deny entries, and the allow lists of routes. They are checked before any rule counts the request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::client_plans::{ClientLookup, Identity};
use crate::key_source::{KeyError, KeySource, RequestAttributes};
use transom_config::access::{Allowed, DenyEntry, DenyTarget};
use transom_config::key_kind::PARAM;
use transom_config::route::Route;
use transom_config::{Config, DenyId, RouteId};
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;
use transom_jwt::token::TokenError;
use transom_limiter::handles::IdVec;
use transom_limiter::ip_prefix::{Networks, canonical_address};
use transom_limiter::key::KeyPart;
use transom_limiter::rule::KeyValue;
use transom_limiter::secret_digest::Digest;

/// What stands for the entry where the allow list of a route denies, in logs and metrics.
const ALLOW: &str = "allow";

/// The deny entries and the allow lists of a configuration.
#[derive(Debug)]
pub struct AccessControl {
    deny: LiveDenyList,
    /// `None`: the route has no allow list.
    allow: IdVec<RouteId, Option<AllowList>>,
}

/// A list that other gateways may change while the configuration stays. Readers keep the list that they have, and take another one
/// when the generation has changed.
#[derive(Debug)]
struct LiveDenyList {
    generation: AtomicU64,
    list: Mutex<Arc<DenyList>>,
}

/// A list as of a generation.
#[derive(Clone, Debug)]
pub struct CurrentDenyList {
    generation: u64,
    list: Arc<DenyList>,
}

/// Why a request is denied.
#[derive(Clone, Copy, Debug)]
pub enum Denial<'a> {
    Entry(&'a DenyEntry),
    /// It is not on the allow list of its route.
    NotAllowed,
}

impl Denial<'_> {
    /// The id of the entry; `allow` for an allow list.
    pub fn id(&self) -> String {
        match self {
            Denial::Entry(entry) => entry.id.to_string(),
            Denial::NotAllowed => ALLOW.to_owned(),
        }
    }
}

/// Deny entries, by what they deny.
#[derive(Debug)]
pub struct DenyList {
    pub entries: Arc<IdVec<DenyId, DenyEntry>>,
    by_network: Networks<DenyId>,
    by_client: HashMap<String, Vec<DenyId>>,
    by_key: Vec<DeniedPart>,
}

/// The denied values of one part.
#[derive(Debug)]
struct DeniedPart {
    part: KeyPart,
    sources: PartSources,
    by_value: HashMap<Box<[u8]>, Vec<DenyId>>,
    by_digest: HashMap<Digest, Vec<DenyId>>,
}

/// Where requests have a part.
#[derive(Debug)]
enum PartSources {
    AllRoutes(KeySource),
    /// Path parameters have a position of their own on each route.
    ByRoute(IdVec<RouteId, KeySource>),
}

/// The allow list of a route.
#[derive(Debug)]
struct AllowList {
    networks: Networks<()>,
    /// Names, sorted.
    clients: Vec<String>,
}

/// The parts of requests that deny entries name.
pub fn denied_parts(config: &Config) -> impl Iterator<Item = &KeyPart> {
    config.access.iter().flat_map(|access| access.deny.iter()).filter_map(|entry| match &entry.target {
        DenyTarget::Key(key) => Some(&key.0),
        DenyTarget::Network(_) | DenyTarget::Client(_) => None,
    })
}

impl CurrentDenyList {
    pub fn list(&self) -> &DenyList {
        &self.list
    }
}

impl AccessControl {
    /// `None` without deny entries and allow lists.
    pub fn new(config: &Config) -> Option<AccessControl> {
        let is_open = config.access.is_none() && config.routes.iter().all(|route| route.allow.is_empty());
        (!is_open).then(|| AccessControl {
            deny: LiveDenyList {
                generation: AtomicU64::new(0),
                list: Mutex::new(Arc::new(DenyList::new(
                    config.access.as_ref().map(|access| Arc::clone(&access.deny)).unwrap_or_default(),
                    &config.routes,
                ))),
            },
            allow: config.routes.map(|route| AllowList::new(&route.allow)),
        })
    }

    /// The current list.
    pub fn deny_list(&self) -> Arc<DenyList> {
        self.current().list
    }

    /// The current list, for readers that keep it.
    pub fn current(&self) -> CurrentDenyList {
        let list = self.deny.list.lock().unwrap_or_else(PoisonError::into_inner);
        // Ordering: relaxed; the generation changes while the list is locked.
        CurrentDenyList { generation: self.deny.generation.load(Ordering::Relaxed), list: Arc::clone(&list) }
    }

    /// Whether a kept list is the current one.
    #[inline]
    pub fn is_current(&self, kept: &CurrentDenyList) -> bool {
        // Ordering: relaxed; the lock orders the list, and a request may as well have come before a change that it does not see.
        self.deny.generation.load(Ordering::Relaxed) == kept.generation
    }

    /// Replaces the list for all readers.
    pub fn replace(&self, list: DenyList) {
        let mut current = self.deny.list.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(list);
        // Ordering: relaxed, as in `current`.
        self.deny.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Why a request is denied. An error hides whether it is: a field that is given twice may have the denied value.
    pub fn denial<'d>(
        &self,
        deny: &'d DenyList,
        route: RouteId,
        (request, clients): (&RequestAttributes<'_>, &ClientLookup<'_>),
        now_ms: u64,
    ) -> Result<Option<Denial<'d>>, RequestError> {
        if let Some(entry) = deny.of_request(route, request, clients, now_ms)? {
            return Ok(Some(Denial::Entry(entry)));
        }
        let is_allowed = self.allow[route].as_ref().map_or(Ok(true), |allow| allow.has(request, clients))?;
        Ok((!is_allowed).then_some(Denial::NotAllowed))
    }
}

impl AllowList {
    fn new(allowed: &[Allowed]) -> Option<AllowList> {
        let networks = allowed.iter().filter_map(|allowed| match allowed {
            Allowed::Network(network) => Some((*network, ())),
            Allowed::Client(_) => None,
        });
        let named = allowed.iter().filter_map(|allowed| match allowed {
            Allowed::Client(name) => Some(name.text.clone()),
            Allowed::Network(_) => None,
        });
        let mut named: Vec<String> = named.collect();
        named.sort_unstable();
        (!allowed.is_empty()).then(|| AllowList { networks: Networks::new(networks), clients: named })
    }

    fn has(&self, request: &RequestAttributes<'_>, clients: &ClientLookup<'_>) -> Result<bool, RequestError> {
        if request.address.ip().is_some_and(|ip| self.networks.most_specific(ip).is_some()) {
            return Ok(true);
        }
        if self.clients.is_empty() {
            return Ok(false);
        }
        match clients.identity(request) {
            Ok(Identity::Client(client)) => Ok(self.clients.binary_search(&client.name).is_ok()),
            Ok(Identity::Subject(_) | Identity::Unknown | Identity::Missing) => Ok(false),
            Err((part, error)) => hidden(part, &error).map(|()| false),
        }
    }
}

impl DenyList {
    pub fn new(entries: Arc<IdVec<DenyId, DenyEntry>>, routes: &IdVec<RouteId, Route>) -> DenyList {
        let mut networks = Vec::new();
        let mut by_client: HashMap<String, Vec<DenyId>> = HashMap::new();
        let mut by_key: Vec<DeniedPart> = Vec::new();
        for (id, entry) in entries.enumerate() {
            match &entry.target {
                DenyTarget::Network(network) => networks.push((*network, id)),
                DenyTarget::Client(name) => by_client.entry(name.clone()).or_default().push(id),
                DenyTarget::Key(key) => {
                    let (part, value) = &**key;
                    let known = by_key.iter().position(|known| known.part == *part).unwrap_or_else(|| {
                        by_key.push(DeniedPart::new(part, routes));
                        by_key.len() - 1
                    });
                    let DeniedPart { by_value, by_digest, .. } = &mut by_key[known];
                    match value {
                        KeyValue::Clear(text) => by_value.entry(text.as_bytes().into()).or_default().push(id),
                        KeyValue::Digest(digest) => by_digest.entry(*digest).or_default().push(id),
                    }
                }
            }
        }
        DenyList { by_network: Networks::new(networks), by_client, by_key, entries }
    }

    /// Whether [`Denial::id`] can be this.
    pub fn has_entry(&self, id: &str) -> bool {
        id == ALLOW || id.parse().is_ok_and(|id| self.entries.iter().any(|entry| entry.id == id))
    }

    /// The entry that denies a request.
    fn of_request(
        &self,
        route: RouteId,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        now_ms: u64,
    ) -> Result<Option<&DenyEntry>, RequestError> {
        let scope = Scope { route: Some(route), now_ms };
        if let Some(entry) = self.of_address(request.address, scope) {
            return Ok(Some(entry));
        }
        if !self.by_client.is_empty() {
            // A wrong key does not hide a denied client that its address tells.
            let client = clients.client_of(request).or_else(|(part, error)| hidden(part, &error).map(|()| None))?;
            if let Some(entry) = client.and_then(|client| self.of_client(&client.name, scope)) {
                return Ok(Some(entry));
            }
        }
        for denied in &self.by_key {
            let source = match &denied.sources {
                PartSources::AllRoutes(source) => source,
                PartSources::ByRoute(sources) => &sources[route],
            };
            let mut found = None;
            let fed = source.feed(request, &mut |_kind, value| found = self.of_part(denied, value, scope));
            fed.or_else(|error| hidden(&denied.part.to_string(), &error))?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The entry that denies an address. An IPv6 address that embeds a denied IPv4 address is denied too.
    pub fn of_address(&self, address: ClientAddress, scope: Scope) -> Option<&DenyEntry> {
        let address = address.ip()?;
        let embedded = canonical_address(address);
        let found = self.first(self.by_network.all_around(address), scope);
        found.or_else(|| self.first(self.by_network.all_around(embedded), scope).filter(|_| embedded != address))
    }

    pub fn of_client(&self, client: &str, scope: Scope) -> Option<&DenyEntry> {
        self.first(self.by_client.get(client)?.iter().copied(), scope)
    }

    /// The entry that denies the value of a part.
    pub fn of_value(&self, part: &KeyPart, value: &[u8], scope: Scope) -> Option<&DenyEntry> {
        self.of_part(self.by_key.iter().find(|denied| denied.part == *part)?, value, scope)
    }

    fn of_part(&self, denied: &DeniedPart, value: &[u8], scope: Scope) -> Option<&DenyEntry> {
        let by_value = denied.by_value.get(value).into_iter().flatten();
        let digest = (!denied.by_digest.is_empty()).then(|| Digest::of(value));
        let by_digest = digest.and_then(|digest| denied.by_digest.get(&digest)).into_iter().flatten();
        self.first(by_value.chain(by_digest).copied(), scope)
    }

    fn first(&self, mut entries: impl Iterator<Item = DenyId>, scope: Scope) -> Option<&DenyEntry> {
        entries.find_map(|id| Some(&self.entries[id]).filter(|entry| scope.includes(entry)))
    }
}

/// Which of the entries apply.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// `None`: a decision without a route, to which only entries for all routes apply.
    pub route: Option<RouteId>,
    /// Unix milliseconds.
    pub now_ms: u64,
}

impl Scope {
    fn includes(self, entry: &DenyEntry) -> bool {
        let applies = entry.routes.is_empty() || self.route.is_some_and(|route| entry.routes.contains(&route));
        applies && !entry.has_ended(self.now_ms)
    }
}

impl DeniedPart {
    fn new(part: &KeyPart, routes: &IdVec<RouteId, Route>) -> DeniedPart {
        let sources = match PARAM.has(part) {
            true => PartSources::ByRoute(routes.map(|route| KeySource::new(part, &route.path.param_names()))),
            false => PartSources::AllRoutes(KeySource::new(part, &[])),
        };
        DeniedPart { part: part.clone(), sources, by_value: HashMap::new(), by_digest: HashMap::new() }
    }
}

/// Fails if an error may hide the denied value of a part: servers may read the one that the gateway does not. A part that is
/// missing, and a token that is not valid, hide nothing.
#[cold]
fn hidden(part: &str, error: &KeyError) -> Result<(), RequestError> {
    let (rule, part) = (String::from("[access]"), part.to_owned());
    match error {
        KeyError::Token(TokenError::KeysUnavailable) => Err(RequestError::KeySetUnavailable),
        KeyError::Missing | KeyError::Unknown | KeyError::NotPrintable | KeyError::Token(_) => Ok(()),
        KeyError::Ambiguous => Err(RequestError::KeyAmbiguous { rule, part }),
        KeyError::RepeatedAuthorization => {
            Err(RequestError::KeyAmbiguous { rule, part: String::from("authorization") })
        }
        KeyError::MalformedCredentials | KeyError::UnreadableMember => Err(RequestError::KeyMalformed { rule, part }),
        KeyError::InvalidEscape => Err(RequestError::Query("the query contains a `%` without two hex digits")),
    }
}
