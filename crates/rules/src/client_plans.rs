//! Finds the client of a request, and its plan, in tables of all clients.
//!
//! A request is looked up by its API key, then by its subject, then by the most specific network that contains its
//! address; the first match decides. A lookup allocates nothing and takes the same time for any number of clients. A change of one
//! client makes a copy, which shares almost everything with the former one: `live_clients` passes copies on to the workers. API
//! keys are stored as digests only (`transom_limiter::secret_digest`).

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use foldhash::fast::RandomState;
use serde_json::{Value, json};
use smallvec::SmallVec;

use super::key_source::{KeyError, KeySource, RequestAttributes};
use super::sharded_table::ShardedTable;
use super::{PartPosition, PlanId};
use transom_config::client_grants::ClientGrant;
use transom_config::client_limits::{LimitsId, LimitsText};
use transom_config::clients::{Client, Clients};
use transom_config::key::OnUnknownKey;
use transom_config::key_kind::{CLIENT, Credentials, Identifies, KeyKind, is_secret_part, number as kind};
use transom_http::client_address::ClientAddress;
use transom_http::error::{NoClient, RequestError};
use transom_http::request_values::bearer_token;
use transom_jwt::token::{TokenError, may_be_token};
use transom_limiter::handles::{Handle as _, IdVec};
use transom_limiter::ip_prefix::Networks;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

/// Upper bound of API keys. A longer value is unknown, and is not digested.
pub const SECRET_MAX_BYTES: usize = 4096;

/// What precedes a subject of no client in a key. Names of clients have no colon.
const SUBJECT: &str = "subject:";
/// Plans that no rule defines are logged up to this number.
const UNDEFINED_PLANS_MAX: usize = 64;
/// Those that were logged, by any configuration of the process.
static UNDEFINED_PLANS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// All clients, and where requests name them.
#[derive(Clone, Debug)]
pub struct ClientPlans {
    sources: Arc<ClientSources>,
    by_name: ShardedTable<Arc<KnownClient>>,
    by_api_key: ShardedTable<(Digest, Arc<KnownClient>)>,
    by_subject: ShardedTable<(Arc<KnownClient>, u32)>,
    by_network: Arc<ClientNetworks>,
    /// Clients that are unknown because no rule defines their plan. Other clients cannot get their keys, subjects and networks.
    without_plan: ShardedTable<Arc<Client>>,
    contested: Arc<Contested>,
    /// The number of the next client.
    next_number: usize,
    limits: LimitedClients,
}

/// The clients with limits of their own.
#[derive(Clone, Debug)]
struct LimitedClients {
    by_name: ShardedTable<Arc<KnownClient>>,
    /// The limits that the current rules have.
    of_rules: Arc<HashSet<LimitsId>>,
    /// The same of earlier rules, which are in use as long as the value exists.
    of_former_rules: Vec<(Weak<RulesInUse>, Arc<HashSet<LimitsId>>)>,
    /// Of the current rules.
    in_use: Weak<RulesInUse>,
    /// The time as of which limits are in effect, Unix milliseconds.
    at_ms: u64,
    /// When the next limits end, or earlier.
    next_end_ms: Option<u64>,
    /// Whether a client has limits that the current rules lack.
    is_ahead: bool,
}

/// Keys and subjects that several clients in the store have, which the API prevents, with the names of these clients. The key or
/// subject belongs to the first name, so that all gateways agree, in whatever order they learn of the clients.
type Contested = BTreeMap<Identifier, BTreeSet<String>>;

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Identifier {
    ApiKey(Digest),
    Subject(String),
}

/// Where requests name clients, and the plans that clients can have: what the configuration says.
#[derive(Debug)]
pub struct ClientSources {
    /// Names of the plans that a client can have, sorted.
    pub plans: IdVec<PlanId, String>,
    api_keys: Vec<ClientSource>,
    subject: Option<ClientSource>,
    /// The claim with the plan of a subject that no client has.
    plan_claim: Option<KeySource>,
    /// Logs a plan of a token that no rule defines.
    pub on_undefined_plan: OnceLock<fn(&str)>,
    /// Whether some rule counts by client.
    counts_clients: bool,
    hasher: RandomState,
}

/// Exists as long as some worker may use certain rules.
#[derive(Debug)]
pub struct RulesInUse;

impl LimitedClients {
    fn new(limits: &[LimitsText]) -> LimitedClients {
        LimitedClients {
            by_name: ShardedTable::for_entries(0),
            of_rules: Arc::new(limits.iter().map(|limits| limits.id).collect()),
            of_former_rules: Vec::new(),
            in_use: Weak::new(),
            at_ms: 0,
            next_end_ms: None,
            is_ahead: false,
        }
    }

    /// The limits that the rules have which some worker may use.
    fn in_use(&self) -> impl Iterator<Item = &HashSet<LimitsId>> {
        let former = self.of_former_rules.iter().filter(|(in_use, _)| in_use.strong_count() > 0);
        former.map(|(_, limits)| &**limits).chain([&*self.of_rules])
    }

    /// The limits of a client, the latest first: those that it has now, and former ones, as far as some rules in use lack the later
    /// ones. So each worker uses the latest ones that its rules have.
    fn history(&self, client: &Client, former: Option<&KnownClient>) -> Box<[LimitsId]> {
        let Some(LimitsText { id: latest, .. }) = client.limits_text(self.at_ms) else { return Box::default() };
        let former = former.map_or(&[][..], |former| &former.limits_history);
        let lack_latest = self.in_use().filter(|limits| !limits.contains(&latest));
        let needed: Vec<&LimitsId> =
            lack_latest.filter_map(|limits| former.iter().find(|id| limits.contains(*id))).collect();
        std::iter::once(latest).chain(former.iter().copied().filter(|id| needed.contains(&id))).collect()
    }

    fn are_current_rules_behind(&self, client: &KnownClient) -> bool {
        client.limits_history.first().is_some_and(|latest| !self.of_rules.contains(latest))
    }
}

/// A client that requests can belong to.
#[derive(Debug)]
pub struct KnownClient {
    client: Client,
    plan_id: PlanId,
    /// See [`LimitedClients::history`]. Empty if the client has the limits of its plan.
    limits_history: Box<[LimitsId]>,
    /// Distinguishes it from the other clients and their former states.
    pub number: usize,
}

/// The plan of a client, and its own limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientPlan<'c> {
    pub id: PlanId,
    /// The latest first. The first ones that the rules have apply.
    pub limits: &'c [LimitsId],
}

impl ClientPlan<'_> {
    /// A plan of a caller without limits of its own.
    fn without_limits(id: PlanId) -> Self {
        ClientPlan { id, limits: &[] }
    }
}

impl KnownClient {
    pub fn plan(&self) -> ClientPlan<'_> {
        ClientPlan { id: self.plan_id, limits: &self.limits_history }
    }
}

impl Deref for KnownClient {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// The clients that have networks.
#[derive(Debug)]
struct ClientNetworks {
    by_name: BTreeMap<String, Arc<KnownClient>>,
    /// The values are positions in `clients`.
    networks: Networks<u32>,
    clients: Vec<Arc<KnownClient>>,
}

impl ClientNetworks {
    fn new(by_name: BTreeMap<String, Arc<KnownClient>>) -> ClientNetworks {
        let clients: Vec<Arc<KnownClient>> = by_name.values().cloned().collect();
        // Of two clients with one network, the first has it, as with keys.
        let by_position = (0..).zip(&clients).collect::<Vec<_>>().into_iter().rev();
        let networks =
            by_position.flat_map(|(position, client)| client.networks.iter().map(move |network| (*network, position)));
        ClientNetworks { networks: Networks::new(networks), by_name, clients }
    }

    fn most_specific(&self, address: IpAddr) -> Option<&KnownClient> {
        Some(&self.clients[self.networks.most_specific(address)? as usize])
    }
}

impl Deref for ClientPlans {
    type Target = ClientSources;

    fn deref(&self) -> &ClientSources {
        &self.sources
    }
}

/// A client as configured. `digest` writes the digest of an API key, and of a subject that is a secret.
pub fn describe_client(clients: &Clients, client: &Client, digest: impl Fn(&Digest) -> String) -> Value {
    let is_secret = |part: &KeyPart| is_secret_part(part) || clients.api_key.contains(part);
    let has_secret_subjects = clients.subject.as_ref().is_some_and(is_secret);
    let subject = |subject: &String| match has_secret_subjects {
        true => digest(&Digest::of(subject.as_bytes())),
        false => subject.clone(),
    };
    let mut described = json!({
        "name": client.name, "plan": client.plan,
        "keys": client.api_keys.iter().map(&digest).collect::<Vec<_>>(),
        "subjects": client.subjects.iter().map(subject).collect::<Vec<_>>(),
        "networks": client.networks.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    if let Some(limits) = client.limits_json() {
        described["limits"] = limits;
    }
    if !client.grants.is_empty() {
        described["grants"] = client.grants.iter().map(ClientGrant::shown).collect();
    }
    described
}

/// Where requests name their client.
#[derive(Debug)]
struct ClientSource {
    part: KeyPart,
    source: KeySource,
    /// For error messages.
    name: String,
    /// What it is, for callers.
    noun: &'static str,
}

impl ClientSources {
    fn new(configured: &Clients, counts_clients: bool) -> ClientSources {
        let of_clients = configured.list.iter().map(|client| &client.plan);
        let plans: BTreeSet<&str> = of_clients.chain(&configured.defined_plans).map(String::as_str).collect();
        // Path parameters belong to one route and cannot name a client.
        let source = |part: &KeyPart, is_api_key: bool| ClientSource {
            part: part.clone(),
            source: KeySource::new(part, &[]),
            name: part.to_string(),
            noun: match credentials_of(part) {
                Some(credentials) if !is_api_key => credentials.subject,
                _ => "API key",
            },
        };
        ClientSources {
            plans: plans.into_iter().map(str::to_owned).collect(),
            api_keys: configured.api_key.iter().map(|part| source(part, true)).collect(),
            subject: configured.subject.as_ref().map(|part| source(part, false)),
            plan_claim: configured.plan_claim.as_ref().map(|claim| KeySource::new(claim, &[])),
            on_undefined_plan: OnceLock::new(),
            counts_clients,
            hasher: RandomState::default(),
        }
    }

    /// Whether some rule counts by client.
    pub fn counts_clients(&self) -> bool {
        self.counts_clients
    }

    /// The plan of this name, if a client can have it. Another one is logged.
    fn plan_named(&self, name: &str) -> Option<PlanId> {
        let found = self.plans.as_slice().binary_search_by(|plan| plan.as_str().cmp(name));
        found.map(PlanId::at).map_err(|_nowhere| self.log_undefined_plan(name)).ok()
    }

    /// Logs a plan once. The number of plans is bounded, so that an issuer cannot fill memory.
    #[cold]
    fn log_undefined_plan(&self, name: &str) {
        if let Ok(mut logged) = UNDEFINED_PLANS.try_lock()
            && logged.len() < UNDEFINED_PLANS_MAX
            && logged.insert(name.to_owned())
            && let Some(log) = self.on_undefined_plan.get()
        {
            log(name);
        }
    }

    /// The parts of a rule's key that name clients.
    pub fn client_parts(&self, key: &[KeyPart]) -> Vec<ClientPart> {
        let client_part = |(position, part): (usize, &KeyPart)| {
            let api_key = self.api_keys.iter().position(|source| source.part == *part);
            let is_subject = self.subject.as_ref().is_some_and(|source| source.part == *part);
            let part =
                ClientPart { position: PartPosition::at(position), is_name: CLIENT.has(part), api_key, is_subject };
            (part.is_name || api_key.is_some() || is_subject).then_some(part)
        };
        key.iter().enumerate().filter_map(client_part).collect()
    }

    fn hash_of_name(&self, client: &Arc<KnownClient>) -> u64 {
        self.hasher.hash_one(client.name.as_str())
    }

    fn hash_of_subject(&self, (client, position): &(Arc<KnownClient>, u32)) -> u64 {
        self.hasher.hash_one(client.subjects[*position as usize].as_bytes())
    }
}

/// The digest is as random as a hash.
fn hash_of_digest(digest: &Digest) -> u64 {
    digest.bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

impl ClientPlans {
    /// The clients of the clients file. `counts_clients`: whether some rule counts by client.
    pub fn new(configured: &Clients, counts_clients: bool) -> ClientPlans {
        let clients = configured.list.len();
        let mut plans = ClientPlans {
            sources: Arc::new(ClientSources::new(configured, counts_clients)),
            by_name: ShardedTable::for_entries(clients),
            by_api_key: ShardedTable::for_entries(clients),
            by_subject: ShardedTable::for_entries(0),
            by_network: Arc::new(ClientNetworks::new(BTreeMap::new())),
            without_plan: ShardedTable::for_entries(0),
            contested: Arc::default(),
            next_number: 0,
            limits: LimitedClients::new(&configured.limit_texts),
        };
        plans.change(configured.list.iter().map(|client| (client.name.as_str(), Some(client.clone()))));
        plans
    }

    /// Other clients with these sources. `former`: the clients before, of which those that stay keep their numbers, and their limits
    /// until rules have new ones.
    pub fn load<'c>(
        &self,
        former: &ClientPlans,
        count: usize,
        clients: impl Iterator<Item = (&'c str, Option<Client>)>,
    ) -> ClientPlans {
        let mut loaded = ClientPlans {
            sources: Arc::clone(&self.sources),
            by_name: ShardedTable::for_entries(count),
            by_api_key: ShardedTable::for_entries(count),
            by_subject: ShardedTable::for_entries(0),
            by_network: Arc::new(ClientNetworks::new(BTreeMap::new())),
            without_plan: ShardedTable::for_entries(0),
            contested: Arc::default(),
            next_number: former.next_number,
            limits: LimitedClients {
                by_name: ShardedTable::for_entries(0),
                at_ms: former.limits.at_ms,
                next_end_ms: None,
                is_ahead: false,
                ..self.limits.clone()
            },
        };
        loaded.change_from(Some(former), clients);
        loaded
    }

    /// Notes that workers get rules which have these limits, see [`Clients::limit_texts`]. To be kept until all workers use later ones.
    pub fn use_rules(&mut self, limits: &[LimitsText]) -> Arc<RulesInUse> {
        let in_use = Arc::new(RulesInUse);
        let former =
            (std::mem::replace(&mut self.limits.in_use, Arc::downgrade(&in_use)), Arc::clone(&self.limits.of_rules));
        self.limits.of_former_rules.push(former);
        self.limits.of_former_rules.retain(|(in_use, _)| in_use.strong_count() > 0);
        self.limits.of_rules = Arc::new(limits.iter().map(|limits| limits.id).collect());
        let is_ahead = self.limited_clients().any(|client| self.limits.are_current_rules_behind(client));
        self.limits.is_ahead = is_ahead;
        in_use
    }

    /// Whether a client has limits that the current rules lack: where it has others from before, it keeps those.
    pub fn is_ahead_of_rules(&self) -> bool {
        self.limits.is_ahead
    }

    /// Whether all workers use the limits that the client of this name has.
    pub fn uses_limits_of(&self, name: &str) -> bool {
        let latest = self.named(name).and_then(|client| client.limits_history.first());
        latest.is_none_or(|latest| self.limits.in_use().all(|limits| limits.contains(latest)))
    }

    /// The clients with limits of their own.
    pub fn limited_clients(&self) -> impl Iterator<Item = &Arc<KnownClient>> {
        self.limits.by_name.iter()
    }

    /// When limits of some client end, or earlier, Unix milliseconds.
    pub fn next_limit_end_ms(&self) -> Option<u64> {
        self.limits.next_end_ms
    }

    /// Puts the limits in effect that clients have at a time.
    pub fn apply_limits(&mut self, now_ms: u64) {
        self.limits.at_ms = now_ms;
        let ends = self.limited_clients().flat_map(|client| client.limit_ends());
        self.limits.next_end_ms = ends.filter(|end_ms| *end_ms > now_ms).min();
        let has_changed = |client: &&Arc<KnownClient>| {
            client.limits_text(now_ms).map(|limits| limits.id) != client.limits_history.first().copied()
        };
        let changed: Vec<Client> =
            self.limited_clients().filter(has_changed).map(|client| Client::clone(client)).collect();
        self.change(changed.iter().map(|client| (client.name.as_str(), Some(client.clone()))));
    }

    /// Sets or removes clients. One whose plan no rule defines is unknown.
    pub fn change<'c>(&mut self, changes: impl Iterator<Item = (&'c str, Option<Client>)>) {
        self.change_from(None, changes);
    }

    /// `loaded`: the clients before, if all are loaded.
    fn change_from<'c>(
        &mut self,
        loaded: Option<&ClientPlans>,
        changes: impl Iterator<Item = (&'c str, Option<Client>)>,
    ) {
        let mut networked = None;
        for (name, client) in changes {
            let former = self.named(name).cloned();
            let plan = client.as_ref().and_then(|client| self.plan_named(&client.plan));
            let has_networks = |client: &Client| !client.networks.is_empty();
            if former.as_deref().is_some_and(|former| has_networks(former)) || client.as_ref().is_some_and(has_networks)
            {
                networked.get_or_insert_with(|| self.by_network.by_name.clone()).remove(name);
            }
            former.iter().for_each(|former| self.remove(former));
            let hash = self.hasher.hash_one(name);
            self.without_plan.remove(hash, |known| known.name == name);
            let Some(client) = client else { continue };
            let Some(plan_id) = plan else {
                let sources = Arc::clone(&self.sources);
                self.without_plan.insert(Arc::new(client), |client| sources.hasher.hash_one(client.name.as_str()));
                continue;
            };
            let former = former.or_else(|| loaded?.named(name).cloned());
            let same = former.as_deref().filter(|former| former.plan == client.plan);
            let number = same.map_or(self.next_number, |former| former.number);
            let limits_history = self.limits.history(&client, former.as_deref());
            self.next_number = self.next_number.max(number + 1);
            let client = Arc::new(KnownClient { client, plan_id, limits_history, number });
            if client.has_own_limits() {
                self.note_limits(&client);
            }
            if let (Some(networked), true) = (&mut networked, has_networks(&client)) {
                networked.insert(name.to_owned(), Arc::clone(&client));
            }
            self.insert(client);
        }
        if let Some(networked) = networked {
            self.by_network = Arc::new(ClientNetworks::new(networked));
        }
    }

    fn note_limits(&mut self, client: &Arc<KnownClient>) {
        let (limits, sources) = (&mut self.limits, &self.sources);
        limits.is_ahead |= limits.are_current_rules_behind(client);
        let ends = client.limit_ends().filter(|end_ms| *end_ms > limits.at_ms);
        limits.next_end_ms = ends.chain(limits.next_end_ms).min();
        limits.by_name.insert(Arc::clone(client), |client| sources.hash_of_name(client));
    }

    fn insert(&mut self, client: Arc<KnownClient>) {
        for key in client.api_keys.iter().map(|key| Identifier::ApiKey(*key)) {
            self.give(key, &client);
        }
        for subject in client.subjects.iter().map(|subject| Identifier::Subject(subject.clone())) {
            self.give(subject, &client);
        }
        let sources = Arc::clone(&self.sources);
        self.by_name.insert(client, |client| sources.hash_of_name(client));
    }

    /// Gives a client a key or a subject of it, unless a client that precedes it has the same.
    fn give(&mut self, identifier: Identifier, client: &Arc<KnownClient>) {
        if let Some(owner) = self.owner(&identifier)
            && owner.name != client.name
        {
            let names = [owner.name.clone(), client.name.clone()];
            let precedes = names[0] < names[1];
            Arc::make_mut(&mut self.contested).entry(identifier.clone()).or_default().extend(names);
            if precedes {
                return;
            }
        }
        self.take(&identifier);
        match identifier {
            Identifier::ApiKey(key) => {
                self.by_api_key.insert((key, Arc::clone(client)), |(key, _)| hash_of_digest(key));
            }
            Identifier::Subject(subject) => {
                let position = client.subjects.iter().position(|known| *known == subject);
                let entry = (Arc::clone(client), position.and_then(|at| u32::try_from(at).ok()).unwrap_or_default());
                let sources = &self.sources;
                self.by_subject.insert(entry, |entry| sources.hash_of_subject(entry));
            }
        }
    }

    /// Takes a key or a subject from the client that has it.
    fn take(&mut self, identifier: &Identifier) {
        match identifier {
            Identifier::ApiKey(key) => self.by_api_key.remove(hash_of_digest(key), |(known, _)| known == key),
            Identifier::Subject(subject) => {
                let hash = self.sources.hasher.hash_one(subject.as_bytes());
                self.by_subject.remove(hash, |(client, position)| client.subjects[*position as usize] == *subject);
            }
        }
    }

    fn owner(&self, identifier: &Identifier) -> Option<&KnownClient> {
        match identifier {
            Identifier::ApiKey(key) => self.by_digest(key),
            Identifier::Subject(subject) => self.by_subject(subject.as_bytes()),
        }
    }

    fn remove(&mut self, client: &Arc<KnownClient>) {
        let hash = self.sources.hash_of_name(client);
        self.by_name.remove(hash, |known| Arc::ptr_eq(known, client));
        if client.has_own_limits() {
            self.limits.by_name.remove(hash, |known| Arc::ptr_eq(known, client));
        }
        let keys = client.api_keys.iter().map(|key| Identifier::ApiKey(*key));
        let subjects = client.subjects.iter().map(|subject| Identifier::Subject(subject.clone()));
        for identifier in keys.chain(subjects) {
            if self.owner(&identifier).is_some_and(|owner| owner.name == client.name) {
                self.take(&identifier);
            }
            if self.contested.contains_key(&identifier) {
                self.pass_on(&identifier, &client.name);
            }
        }
    }

    /// Gives a key or subject of several clients, one of which was removed, to the first of the others.
    fn pass_on(&mut self, identifier: &Identifier, gone: &str) {
        let contested = Arc::make_mut(&mut self.contested);
        let Some(mut names) = contested.remove(identifier) else { return };
        names.remove(gone);
        let first = names.first().cloned();
        if names.len() > 1 {
            contested.insert(identifier.clone(), names);
        }
        if let Some(first) = first.and_then(|first| self.named(&first).cloned()) {
            self.give(identifier.clone(), &first);
        }
    }

    /// Names of clients that have a key or a subject in common.
    pub fn contested(&self) -> impl Iterator<Item = &BTreeSet<String>> {
        self.contested.values()
    }

    /// The client of this name.
    pub fn named(&self, name: &str) -> Option<&Arc<KnownClient>> {
        self.by_name.find(self.hasher.hash_one(name), |client| client.name == name)
    }

    /// What of a client another one has, and the name of that one.
    pub fn conflict(&self, client: &Client) -> Option<(&'static str, &str)> {
        let other = |owner: &KnownClient| owner.name != client.name;
        let keys = client.api_keys.iter().filter_map(|key| Some(("key", self.by_digest(key)?)));
        let subjects =
            client.subjects.iter().filter_map(|subject| Some(("subject", self.by_subject(subject.as_bytes())?)));
        let networked = self.by_network.clients.iter();
        let networks = networked.filter(|owner| owner.networks.iter().any(|network| client.networks.contains(network)));
        let mut owners = keys.chain(subjects).chain(networks.map(|owner| ("network", &**owner)));
        let known = owners.find(|(_, owner)| other(owner)).map(|(what, owner)| (what, owner.name.as_str()));
        known.or_else(|| {
            let mut others = self.without_plan.iter().filter(|owner| owner.name != client.name);
            others.find_map(|owner| Some((owner.shares_with(client)?, owner.name.as_str())))
        })
    }

    /// The number of clients.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// All clients, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<KnownClient>> {
        self.by_name.iter()
    }

    fn by_digest(&self, digest: &Digest) -> Option<&KnownClient> {
        let found = self.by_api_key.find(hash_of_digest(digest), |(known, _)| known == digest);
        found.map(|(_, client)| &**client)
    }

    fn by_api_key(&self, key: &[u8]) -> Option<&KnownClient> {
        match key.len() {
            0..=SECRET_MAX_BYTES => self.by_digest(&Digest::of(key)),
            _ => None,
        }
    }

    /// What the first part with an API key tells, and that part. A token is no API key, if `[clients]` reads tokens, unless a
    /// client has it as one.
    fn find_by_api_key<'a>(
        &'a self,
        request: &RequestAttributes<'_>,
    ) -> Result<(Option<&'a ClientSource>, Named<'a>), LookupError<'a>> {
        for source in &self.api_keys {
            match look_up(Some(source), request, |key| self.by_api_key(key))? {
                Named::Absent => {}
                Named::Unknown if self.reads_tokens() && source.has_valid_token(request)? => {}
                named => return Ok((Some(source), named)),
            }
        }
        Ok((None, Named::Absent))
    }

    /// The parts that name clients: all for the part `client`, otherwise the one of this name.
    fn sources_of(&self, part: &str) -> impl Iterator<Item = &ClientSource> {
        let is_named = move |source: &&ClientSource| part == CLIENT.part.name || source.name == part;
        self.api_keys.iter().chain(&self.subject).filter(is_named)
    }

    /// The error of a request that lacks a part of the key of a rule; `None` if the part names no client.
    #[cold]
    pub fn missing_credentials(&self, rule: &str, part: &str) -> Option<RequestError> {
        let (mut needs, mut challenges) = (Vec::new(), Vec::new());
        for source in self.sources_of(part) {
            let credentials = credentials_of(&source.part)?;
            let Some(challenge) = credentials.challenge_if_missing else { continue };
            let article = if source.noun.starts_with('A') { "an" } else { "a" };
            needs.push(format!("{article} {} in {}", source.noun, source.place()));
            if !challenges.contains(&challenge) {
                challenges.push(challenge);
            }
        }
        (!needs.is_empty()).then(|| {
            RequestError::CredentialsMissing(Box::new(NoClient {
                rule: rule.to_owned(),
                part: part.to_owned(),
                detail: format!("this API needs {}", needs.join(" or ")),
                challenge: challenges.join(", "),
            }))
        })
    }

    /// The error of a request whose value of a part of a rule's key belongs to no client.
    #[cold]
    pub fn unknown_key(&self, rule: &str, part: &str) -> RequestError {
        let source = self.sources_of(part).next();
        let credentials = source.and_then(|source| credentials_of(&source.part));
        let detail = source.map(|source| format!("the {} in {} is not known here", source.noun, source.place()));
        RequestError::KeyUnknown(Box::new(NoClient {
            rule: rule.to_owned(),
            part: part.to_owned(),
            detail: detail.unwrap_or_default(),
            challenge: credentials.map(|credentials| credentials.challenge_if_unknown).unwrap_or_default().to_owned(),
        }))
    }

    /// Whether the subject is a claim.
    fn reads_tokens(&self) -> bool {
        self.subject.as_ref().is_some_and(|source| matches!(source.source, KeySource::Jwt(_)))
    }

    fn by_subject(&self, subject: &[u8]) -> Option<&KnownClient> {
        let is_subject =
            |(client, position): &(Arc<KnownClient>, u32)| client.subjects[*position as usize].as_bytes() == subject;
        let found = self.by_subject.find(self.hasher.hash_one(subject), is_subject);
        found.map(|(client, _)| &**client)
    }

    /// The client with the most specific network that contains an address.
    pub fn client_of_network(&self, address: ClientAddress) -> Option<&KnownClient> {
        self.by_network.most_specific(address.ip()?)
    }

    /// The client that the value of a part of a rule's key names.
    pub fn named_by(&self, part: &ClientPart, value: &[u8]) -> CallerIdentity<'_> {
        let by_name = || self.named(std::str::from_utf8(value).ok()?).map(|client| &**client);
        CallerIdentity {
            by_name: part.is_name.then(by_name).flatten(),
            is_subject: part.is_name && self.plan_claim.is_some() && value.starts_with(SUBJECT.as_bytes()),
            by_api_key: part.api_key.and_then(|_source| self.by_api_key(value)),
            by_subject: part.is_subject.then(|| self.by_subject(value)).flatten(),
            address: None,
        }
    }

    /// The name of the client that the value of one part of a key names.
    pub fn client_of_part<'v>(&'v self, part: &KeyPart, value: &'v [u8]) -> Option<&'v str> {
        if CLIENT.has(part) {
            return std::str::from_utf8(value).ok().filter(|name| !name.starts_with(SUBJECT));
        }
        let part = *self.client_parts(std::slice::from_ref(part)).first()?;
        let named = self.named_by(&part, value);
        named.by_api_key.or(named.by_subject).map(|client| client.name.as_str())
    }

    fn plan_of_named<'c>(&self, named: Named<'c>) -> Option<ClientPlan<'c>> {
        match named {
            Named::Client(client) => Some(client.plan()),
            Named::OfPlan(plan) => Some(ClientPlan::without_limits(plan)),
            Named::Absent | Named::Unknown => None,
        }
    }

    /// The plan that a token names, which is verified already. A token that lacks the subject has none.
    fn plan_of_token(&self, claim: &KeySource, request: &RequestAttributes<'_>) -> Option<PlanId> {
        let mut plan = None;
        let mut take = |_kind, name: &[u8]| plan = self.plan_named(&String::from_utf8_lossy(name));
        let has_subject = self.subject.as_ref()?.source.feed(request, &mut |_kind, _subject| ()).is_ok();
        claim.feed(request, &mut take).ok().filter(|()| has_subject)?;
        plan
    }

    /// The client of a caller, as of a request with the same values.
    pub fn client_of<'c>(&'c self, caller: &CallerIdentity<'c>) -> Option<&'c KnownClient> {
        // The plan of a subject of no client is in its token only; the network of a client does not give it another.
        let by_network = || self.client_of_network(caller.address.filter(|_| !caller.is_subject)?);
        caller.by_name.or(caller.by_api_key).or(caller.by_subject).or_else(by_network)
    }

    /// The plan of [`ClientPlans::client_of`].
    pub fn plan_of<'c>(&'c self, caller: &CallerIdentity<'c>) -> Option<ClientPlan<'c>> {
        self.client_of(caller).map(KnownClient::plan)
    }
}

/// Who calls the decision API, as far as the values of keys tell.
#[derive(Clone, Copy, Default, Debug)]
pub struct CallerIdentity<'c> {
    pub by_name: Option<&'c KnownClient>,
    /// Whether a subject of no client is named, whose plan its token would tell.
    pub is_subject: bool,
    pub by_api_key: Option<&'c KnownClient>,
    pub by_subject: Option<&'c KnownClient>,
    pub address: Option<ClientAddress>,
}

impl<'c> CallerIdentity<'c> {
    /// Takes what is unknown from `other`.
    pub fn or(self, other: CallerIdentity<'c>) -> CallerIdentity<'c> {
        CallerIdentity {
            by_name: self.by_name.or(other.by_name),
            is_subject: self.is_subject || other.is_subject,
            by_api_key: self.by_api_key.or(other.by_api_key),
            by_subject: self.by_subject.or(other.by_subject),
            address: self.address.or(other.address),
        }
    }

    /// Whether a value names a client. An address does not.
    pub fn is_named(&self) -> bool {
        self.is_subject || self.by_name.is_some() || self.by_api_key.is_some() || self.by_subject.is_some()
    }
}

/// What a part of a request tells about its client.
#[derive(Clone, Copy, Debug)]
enum Named<'c> {
    /// The request does not have the part.
    Absent,
    /// It belongs to no client.
    Unknown,
    Client(&'c KnownClient),
    /// It is the subject of no client, and the token names this plan.
    OfPlan(PlanId),
}

impl<'c> Named<'c> {
    fn client(self) -> Option<&'c KnownClient> {
        match self {
            Named::Client(client) => Some(client),
            Named::Absent | Named::Unknown | Named::OfPlan(_) => None,
        }
    }
}

/// The client of a request under rules by client. A revoked key is unknown, even if the address belongs to a client.
#[derive(Clone, Copy, Debug)]
pub enum Identity<'c> {
    Client(&'c KnownClient),
    /// A subject of no client, with the plan that its token names.
    Subject(PlanId),
    /// What the request has belongs to no client.
    Unknown,
    /// The request has nothing that could name a client.
    Missing,
}

/// An error of the lookup, with the name of the part that caused it.
pub type LookupError<'a> = (&'a str, KeyError);

/// The client of one request. It is looked up when first asked for, and once for all rules. Errors are not remembered.
pub struct ClientLookup<'a> {
    /// `None` without clients.
    pub plans: Option<&'a ClientPlans>,
    by_api_key: OnceCell<Named<'a>>,
    by_subject: OnceCell<Named<'a>>,
    by_network: OnceCell<Option<&'a KnownClient>>,
}

impl<'a> ClientLookup<'a> {
    pub fn new(plans: Option<&'a ClientPlans>) -> ClientLookup<'a> {
        let (by_api_key, by_subject, by_network) = Default::default();
        ClientLookup { plans, by_api_key, by_subject, by_network }
    }

    /// The lookup of a request whose client is given; `None`: an unknown client.
    pub fn known(plans: Option<&'a ClientPlans>, client: Option<&'a KnownClient>) -> ClientLookup<'a> {
        let named = client.map_or(Named::Unknown, Named::Client);
        ClientLookup {
            by_api_key: OnceCell::from(named),
            by_subject: OnceCell::from(named),
            by_network: OnceCell::from(client),
            plans,
        }
    }

    /// The client by API key, else by subject, else by network: the first that is found.
    pub fn client_of(&self, request: &RequestAttributes<'_>) -> Result<Option<&'a KnownClient>, LookupError<'a>> {
        let Some(plans) = self.plans else { return Ok(None) };
        Ok(self.first_found(plans, request)?.client())
    }

    /// The plan of [`ClientLookup::client_of`], or of the token, if its subject has none.
    pub fn plan_of(&self, request: &RequestAttributes<'_>) -> Result<Option<ClientPlan<'a>>, LookupError<'a>> {
        let Some(plans) = self.plans else { return Ok(None) };
        Ok(plans.plan_of_named(self.first_found(plans, request)?))
    }

    fn first_found(
        &self,
        plans: &'a ClientPlans,
        request: &RequestAttributes<'_>,
    ) -> Result<Named<'a>, LookupError<'a>> {
        let mut named = self.by_api_key(plans, request)?;
        if named.client().is_none() {
            named = self.by_subject(plans, request)?;
        }
        Ok(match named {
            Named::Client(_) | Named::OfPlan(_) => named,
            Named::Absent | Named::Unknown => self.by_network(plans, request).map_or(Named::Absent, Named::Client),
        })
    }

    /// The client by whom rules count. Only a request without API key and subject belongs to the client of its network.
    pub fn identity(&self, request: &RequestAttributes<'_>) -> Result<Identity<'a>, LookupError<'a>> {
        let Some(plans) = self.plans else { return Ok(Identity::Missing) };
        let named = match self.by_api_key(plans, request)? {
            Named::Absent => self.by_subject(plans, request)?,
            named => named,
        };
        Ok(match named {
            Named::Client(client) => Identity::Client(client),
            Named::OfPlan(plan) => Identity::Subject(plan),
            Named::Unknown => Identity::Unknown,
            Named::Absent => self.by_network(plans, request).map_or(Identity::Missing, Identity::Client),
        })
    }

    /// The plan of [`ClientLookup::identity`].
    pub fn plan_of_identity(&self, request: &RequestAttributes<'_>) -> Result<Option<ClientPlan<'a>>, LookupError<'a>> {
        Ok(match self.identity(request)? {
            Identity::Client(client) => Some(client.plan()),
            Identity::Subject(plan) => Some(ClientPlan::without_limits(plan)),
            Identity::Unknown | Identity::Missing => None,
        })
    }

    /// The name and the plan of [`ClientLookup::identity`], empty where there is none.
    #[cold]
    pub fn variables(&self, request: &RequestAttributes<'_>) -> (&'a str, &'a str) {
        let Some(plans) = self.plans else { return ("", "") };
        match self.identity(request) {
            Ok(Identity::Client(client)) => (&client.name, &client.plan),
            Ok(Identity::Subject(plan)) => ("", &plans.plans[plan]),
            Ok(Identity::Unknown | Identity::Missing) | Err(_) => ("", ""),
        }
    }

    /// The client for reports: by whom rules count, if some rule does so.
    pub fn reported_client(&self, request: &RequestAttributes<'_>) -> Option<&'a KnownClient> {
        match self.plans?.counts_clients {
            true => match self.identity(request) {
                Ok(Identity::Client(client)) => Some(client),
                Ok(Identity::Subject(_) | Identity::Unknown | Identity::Missing) | Err(_) => None,
            },
            false => self.client_of(request).ok().flatten(),
        }
    }

    /// Calls `take` with the name of the client by whom rules count.
    #[inline(never)]
    pub fn feed_client(
        &self,
        request: &RequestAttributes<'_>,
        take: &mut impl FnMut(u8, &[u8]),
    ) -> Result<(), KeyError> {
        match self.identity(request).map_err(|(_, error)| error)? {
            Identity::Client(client) => {
                take(kind::CLIENT, client.name.as_bytes());
                Ok(())
            }
            Identity::Subject(_) => {
                let source = self.plans.and_then(|plans| plans.subject.as_ref()).ok_or(KeyError::Missing)?;
                source.source.feed_key(request, &mut |_kind, subject| {
                    let mut key: SmallVec<[u8; 64]> = SmallVec::from_slice(SUBJECT.as_bytes());
                    key.extend_from_slice(subject);
                    take(kind::CLIENT, &key);
                })
            }
            Identity::Unknown => Err(KeyError::Unknown),
            Identity::Missing => Err(KeyError::Missing),
        }
    }

    /// The part that a failure of [`ClientLookup::feed_client`] is about.
    #[cold]
    pub fn failed_part(&self, request: &RequestAttributes<'_>) -> Option<&'a str> {
        let plans = self.plans?;
        match self.identity(request) {
            Err((part, _)) => Some(part),
            Ok(Identity::Unknown) => {
                let of_api_key =
                    plans.find_by_api_key(request).ok().filter(|(_, named)| matches!(named, Named::Unknown));
                let source = of_api_key.and_then(|(source, _)| source).or(plans.subject.as_ref())?;
                Some(source.name.as_str())
            }
            Ok(Identity::Client(_) | Identity::Subject(_) | Identity::Missing) => None,
        }
    }

    /// Whether the value that the request has for a part of a rule's key names a client.
    fn names_client(&self, part: &ClientPart, request: &RequestAttributes<'_>) -> Result<bool, KeyError> {
        let Some(plans) = self.plans else { return Ok(false) };
        let drop_name = |(_, error): LookupError<'_>| error;
        let by_api_key = match (part.api_key, plans.api_keys.as_slice()) {
            (None, _) => Named::Absent,
            (Some(_), [_]) => self.by_api_key(plans, request).map_err(drop_name)?,
            // Another part may be the one that names the client of the request.
            (Some(position), sources) => {
                look_up(sources.get(position), request, |key| plans.by_api_key(key)).map_err(drop_name)?
            }
        };
        // A request has the name of its client, or lacks the part.
        let is_known = |named| matches!(named, Named::Client(_) | Named::OfPlan(_));
        Ok(part.is_name
            || is_known(by_api_key)
            || (part.is_subject && is_known(self.by_subject(plans, request).map_err(drop_name)?)))
    }

    fn by_api_key(
        &self,
        plans: &'a ClientPlans,
        request: &RequestAttributes<'_>,
    ) -> Result<Named<'a>, LookupError<'a>> {
        remember(&self.by_api_key, || plans.find_by_api_key(request).map(|(_source, named)| named))
    }

    fn by_subject(
        &self,
        plans: &'a ClientPlans,
        request: &RequestAttributes<'_>,
    ) -> Result<Named<'a>, LookupError<'a>> {
        remember(&self.by_subject, || {
            let named = look_up(plans.subject.as_ref(), request, |subject| plans.by_subject(subject))?;
            Ok(match (named, &plans.plan_claim) {
                (Named::Unknown, Some(claim)) => plans.plan_of_token(claim, request).map_or(named, Named::OfPlan),
                _ => named,
            })
        })
    }

    fn by_network(&self, plans: &'a ClientPlans, request: &RequestAttributes<'_>) -> Option<&'a KnownClient> {
        *self.by_network.get_or_init(|| plans.client_of_network(request.address))
    }
}

/// Looks up the value that a request has at a source. An error comes with the name of the part that caused it.
fn look_up<'s>(
    source: Option<&'s ClientSource>,
    request: &RequestAttributes<'_>,
    find: impl Fn(&[u8]) -> Option<&'s KnownClient>,
) -> Result<Named<'s>, LookupError<'s>> {
    let Some(source) = source else { return Ok(Named::Absent) };
    let mut client = None;
    match source.source.feed_key(request, &mut |_kind, value| client = find(value)) {
        Ok(()) => Ok(client.map_or(Named::Unknown, Named::Client)),
        Err(KeyError::Missing) if source.has_token_without_claim(request) => Ok(Named::Unknown),
        Err(KeyError::Missing) => Ok(Named::Absent),
        Err(error) => Err((&source.name, error)),
    }
}

/// The wording and the challenges of 401 responses about a part; `None` for parts without credentials.
fn credentials_of(part: &KeyPart) -> Option<Credentials> {
    match KeyKind::of(part).identifies {
        Identifies::ApiKeyOrSubject(credentials) | Identifies::Subject(credentials) => Some(credentials),
        Identifies::Nothing => None,
    }
}

impl ClientSource {
    /// Where requests have it, for callers.
    fn place(&self) -> String {
        credentials_of(&self.part).map_or(String::new(), |of| (of.place)(self.part.name().unwrap_or_default()))
    }

    /// Whether this part of the request is a token, which is verified. What only looks like one is not.
    fn has_valid_token<'s>(&'s self, request: &RequestAttributes<'_>) -> Result<bool, LookupError<'s>> {
        let Some(token) = self.bearer_of(request).filter(|token| may_be_token(token)) else { return Ok(false) };
        match request.tokens.check(token, request.wall_ms) {
            Ok(()) => Ok(true),
            Err(TokenError::Malformed) => Ok(false),
            Err(error) => Err((&self.name, KeyError::Token(error))),
        }
    }

    fn bearer_of<'r>(&self, request: &RequestAttributes<'r>) -> Option<&'r [u8]> {
        bearer_token(request.headers).ok().flatten().filter(|_| matches!(self.source, KeySource::Bearer))
    }

    /// Whether the request has a token, which lacks the claim. Such a token belongs to no client.
    fn has_token_without_claim(&self, request: &RequestAttributes<'_>) -> bool {
        matches!(self.source, KeySource::Jwt(_)) && matches!(bearer_token(request.headers), Ok(Some(_)))
    }
}

fn remember<T: Copy, E>(cell: &OnceCell<T>, find: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    match cell.get() {
        Some(found) => Ok(*found),
        None => find().map(|found| *cell.get_or_init(|| found)),
    }
}

/// The parts of a rule's key that have to name clients, and what happens to a key with a part that names none.
#[derive(Clone, Debug)]
pub struct ClientCheck {
    parts: Vec<ClientPart>,
    /// Whether such a key counts as missing. Otherwise it is refused.
    pub is_missing: bool,
}

/// A part of a rule's key that is the client, or that `[clients]` reads as well.
#[derive(Clone, Copy, Debug)]
pub struct ClientPart {
    /// The position in the key.
    pub position: PartPosition,
    /// The part is the name of the client.
    is_name: bool,
    /// The position among the parts with API keys.
    api_key: Option<usize>,
    is_subject: bool,
}

impl ClientCheck {
    /// `None` if the rule counts all keys.
    pub fn new(on_unknown: OnUnknownKey, key: &[KeyPart], sources: Option<&ClientSources>) -> Option<ClientCheck> {
        let sources = sources.filter(|_| on_unknown != OnUnknownKey::Count)?;
        let parts = sources.client_parts(key);
        let is_missing = on_unknown == OnUnknownKey::Missing;
        (!parts.is_empty()).then_some(ClientCheck { parts, is_missing })
    }

    /// Whether all parts name clients.
    pub fn is_known(&self, names_client: impl Fn(&ClientPart) -> bool) -> bool {
        self.parts.iter().all(names_client)
    }

    /// The first part that names no client in a request. An error comes with its part.
    pub fn unknown_part(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Result<Option<PartPosition>, (PartPosition, KeyError)> {
        for part in &self.parts {
            if !clients.names_client(part, request).map_err(|error| (part.position, error))? {
                return Ok(Some(part.position));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use transom_config::Config;
    use transom_limiter::handles::RuleId;
    use transom_limiter::ip_prefix::Network;
    use transom_limiter::key::Seed;
    use transom_limiter::rule_set::RuleSet;

    use super::*;
    use crate::compiled_config::CompiledConfig;
    use crate::overrides::KnownPlans;
    use crate::rate_limit_key::RuleKey;

    const TOML: &str = "[clients]\nfile = \"clients.toml\"\napi_key = \"bearer\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                        [rules.r]\nkey = \"client\"\non_missing_key = \"skip\"\nwindows = [\"1/hour\"]\n\
                        [rules.r.plans.gold]\nwindows = [\"20/hour\"]\nconcurrent = 7\n\
                        [rules.s]\nkey = \"client\"\non_missing_key = \"skip\"\nwindows = [\"2/hour\"]\n\
                        [rules.s.plans.gold]\nwindows = [\"30/hour\"]\n\
                        [rules.s.plans.silver]\nwindows = [\"40/hour\"]\n\
                        [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\", \"s\"]\n";

    fn config(clients: &str) -> Config {
        transom_config::read_with_files(TOML, &|_| Ok(clients.as_bytes().to_vec())).unwrap()
    }

    fn client(name: &str, limits: &str) -> Client {
        Client::from_json(name, &format!("{{ \"plan\": \"gold\", \"limits\": {limits} }}")).unwrap()
    }

    /// The limits of a client in both rules.
    fn limits(config: &Config, plans: &ClientPlans, name: &str) -> [u32; 2] {
        let rule_set = RuleSet::new(config.limiter_rules(), Seed(1, 2), None);
        [0, 1].map(|rule| {
            let rule = &rule_set.rules[RuleId::at(rule)];
            let known = KnownPlans { names: &plans.plans, limits: &config.clients.as_ref().unwrap().limit_texts };
            let overrides = RuleKey::compile_overrides(rule, Some(known), Seed(1, 2)).unwrap();
            let variant = overrides.variant_of(plans.named(name).map(|client| client.plan()));
            rule.rule.variants().nth(variant.index()).unwrap()[0].tokens
        })
    }

    #[test]
    fn limits_of_a_client_end_one_after_another() {
        let config = config(
            "[clients.acme]\nplan = \"gold\"\napi_keys = []\n\
             [clients.acme.limits.r]\nwindows = [\"50/hour\"]\nuntil = 1970-01-01T00:00:02Z\n\
             [clients.acme.limits.s]\nwindows = [{ limit = 60, period = \"hour\" }]\nuntil = 1970-01-01T00:00:01Z\n",
        );
        assert_eq!(config.rules[RuleId::at(0)].client_limits[0].plan.concurrent, Some(7), "that of the plan");
        let mut plans = CompiledConfig::client_plans(&config).unwrap();
        for (now_ms, expected, next) in [
            (0, [50, 60], Some(1000)),
            (999, [50, 60], Some(1000)),
            (1000, [50, 30], Some(2000)),
            (2000, [20, 30], None),
        ] {
            plans.apply_limits(now_ms);
            assert_eq!((limits(&config, &plans, "acme"), plans.next_limit_end_ms()), (expected, next), "{now_ms}");
        }
    }

    /// Rules, and whether workers still use them.
    type Rules = (Config, Arc<RulesInUse>);

    /// The rules with the limits of the clients, which the first worker uses from now on.
    fn compile(config: &Config, plans: &mut ClientPlans) -> Rules {
        let mut config = config.clone();
        assert!(config.set_client_limits(plans.limited_clients().map(|client| &***client)).is_empty());
        let in_use = plans.use_rules(&config.clients.as_ref().unwrap().limit_texts);
        assert!(!plans.is_ahead_of_rules());
        (config, in_use)
    }

    #[test]
    fn a_worker_uses_the_latest_limits_that_its_rules_have() {
        let other = "[clients.other]\nplan = \"silver\"\napi_keys = []\n";
        let config = config(&format!("[clients.acme]\nplan = \"gold\"\napi_keys = []\n{other}"));
        let mut plans = CompiledConfig::client_plans(&config).unwrap();
        let of_r = |limit: u32| {
            format!(
                "{{ \"r\": {{ \"windows\": [\"{limit}/hour\"] }}, \"of another gateway\": {{ \"windows\": [\"1/day\"] }} }}"
            )
        };
        let set = |plans: &mut ClientPlans, client: &Client| {
            plans.change([(client.name.as_str(), Some(client.clone()))].into_iter());
        };
        let of_acme = |rules: &Rules, plans: &ClientPlans| limits(&rules.0, plans, "acme");
        let none = compile(&config, &mut plans);
        [client("acme", &of_r(50)), client("beta", &of_r(50))].iter().for_each(|client| set(&mut plans, client));
        assert!(plans.is_ahead_of_rules() && !plans.uses_limits_of("acme"));
        assert_eq!(of_acme(&none, &plans), [20, 30]);
        let fifty = compile(&config, &mut plans);
        let of_both = ["acme", "beta"].map(|name| plans.named(name).unwrap().plan());
        assert_eq!(of_both[0], of_both[1], "equal limits are one plan");
        // One worker is late.
        assert!(!plans.uses_limits_of("acme"));
        assert_eq!([&none, &fifty].map(|rules| of_acme(rules, &plans)), [[20, 30], [50, 30]]);
        set(&mut plans, &client("acme", &of_r(60)));
        assert_eq!([&none, &fifty].map(|rules| of_acme(rules, &plans)), [[20, 30], [50, 30]], "those from before");
        // Also when all clients are loaded again.
        let acme = client("acme", &of_r(60));
        plans = plans.load(&plans, 1, [("acme", Some(acme.clone()))].into_iter());
        assert_eq!([&none, &fifty].map(|rules| of_acme(rules, &plans)), [[20, 30], [50, 30]]);
        let sixty = compile(&config, &mut plans);
        drop(none);
        assert!(!plans.uses_limits_of("acme"));
        // With another plan, the client keeps all limits from before.
        let silver = Client { plan: "silver".to_owned(), ..acme };
        set(&mut plans, &silver);
        assert_eq!([&fifty, &sixty].map(|rules| of_acme(rules, &plans)), [[50, 30], [60, 30]]);
        let silver = compile(&config, &mut plans);
        assert_eq!([&fifty, &sixty, &silver].map(|rules| of_acme(rules, &plans)), [[50, 30], [60, 30], [60, 40]]);
        drop((fifty, sixty));
        assert!(plans.uses_limits_of("acme"));
        set(&mut plans, &client("acme", &of_r(70)));
        assert_eq!((of_acme(&silver, &plans), plans.named("acme").unwrap().plan().limits.len()), ([60, 40], 2));
        // Without limits, the plan applies at once.
        set(&mut plans, &client("acme", "{}"));
        assert_eq!((of_acme(&silver, &plans), plans.uses_limits_of("acme")), ([20, 30], true));
    }

    /// Clients in the store.
    const CONFIG: &str = "[counters.shared]\nredis = \"redis://127.0.0.1:1\"\n\
                          [clients]\nsource = \"shared\"\nfile = \"clients.copy\"\napi_key = \"header:x-api-key\"\n\
                          subject = \"header:x-user\"\n[rules.r]\nkey = \"client\"\non_missing_key = \"refuse\"\n\
                          windows = [\"1/day\"]\n[rules.r.plans.basic]\nwindows = [\"2/day\"]\n[upstreams.u]\nbuiltin = \"echo\"\n\
                          [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\"]\n";

    #[test]
    fn the_owner_of_what_several_clients_have_does_not_depend_on_the_order_of_changes() {
        let config = transom_config::read(CONFIG).unwrap();
        let clients = config.clients.as_ref().unwrap();
        let mut rng = fastrand::Rng::with_seed(7);
        let mut plans = ClientPlans::new(clients, true);
        let mut list: BTreeMap<String, Client> = BTreeMap::new();
        for round in 0..2000 {
            let name = format!("c{}", rng.u8(..6));
            let mut some = |count: u8| (0..count).filter(|_| rng.u8(..3) == 0).collect::<Vec<u8>>();
            let client = Client {
                name: name.clone(),
                plan: String::from(if round % 7 == 0 { "gold" } else { "basic" }),
                api_keys: some(4).into_iter().map(|key| Digest::of(&[key])).collect(),
                subjects: some(4).into_iter().map(|subject| format!("s{subject}")).collect(),
                networks: some(3).into_iter().map(|n| format!("192.0.2.{n}").parse().unwrap()).collect(),
                limits: Vec::new(),
                grants: Vec::new(),
            };
            let client = (round % 3 != 0).then_some(client);
            plans.change([(name.as_str(), client.clone())].into_iter());
            match client {
                Some(client) => drop(list.insert(name, client)),
                None => drop(list.remove(&name)),
            }
            let has = |has: &dyn Fn(&Client) -> bool| {
                list.values().find(|client| client.plan == "basic" && has(client)).map(|client| client.name.as_str())
            };
            for n in 0..4 {
                let found = plans.by_api_key(&[n]).map(|client| client.name.as_str());
                assert_eq!(found, has(&|client| client.api_keys.contains(&Digest::of(&[n]))), "round {round}");
                let subject = format!("s{n}");
                let found = plans.by_subject(subject.as_bytes()).map(|client| client.name.as_str());
                assert_eq!(found, has(&|client| client.subjects.contains(&subject)), "round {round}");
                let network: Network = format!("192.0.2.{n}").parse().unwrap();
                let found = plans.by_network.most_specific(IpAddr::from([192, 0, 2, n]));
                assert_eq!(found.map(|c| c.name.as_str()), has(&|client| client.networks.contains(&network)));
                // What a client without a plan has is not free.
                let new = Client {
                    name: "new".to_owned(),
                    plan: "basic".to_owned(),
                    api_keys: vec![Digest::of(&[n])],
                    subjects: vec![],
                    networks: vec![],
                    limits: vec![],
                    grants: vec![],
                };
                let is_taken = list.values().any(|client| client.api_keys.contains(&new.api_keys[0]));
                assert_eq!(plans.conflict(&new).is_some(), is_taken);
            }
            assert_eq!(plans.iter().count() + plans.without_plan.len(), list.len());
        }
    }
}
