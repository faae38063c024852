//! The configuration prepared for requests: everything that can be computed at load.
//!
//! A compiled configuration is immutable and shared by all workers. A reload makes a new one; requests in flight keep theirs.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, header};

use crate::RouteRulesId;
use crate::access::{self, AccessControl};
use crate::acme_challenges::PendingChallenges;
use crate::client_plans::{ClientCheck, ClientPlans};
use crate::descriptors::DescriptorIndex;
use crate::key_source::HashKey;
use crate::live_clients::LiveClients;
use crate::overrides::{KnownPlans, Overrides};
use crate::rate_limit_key::RuleKey;
use crate::ratelimit_headers::RateLimitTemplate;
use crate::response_cost::ResponseCosts;
use crate::responses::RefusalTemplate;
use crate::route_actions::RouteActions;
use crate::router::Router;
use crate::store_key_text::KeyDigester;
use crate::top_keys::CountedRules;
use transom_config::key_kind::{BEARER, HEADER, JSON, JWT};
use transom_config::listen::Listen;
use transom_config::route::Route;
use transom_config::rule::GatewayRule;
use transom_config::usage_cost::{Reserve, UsageCost};
use transom_config::{Config, RouteId, UpstreamId};
use transom_http::client_address::ClientAddress;
use transom_http::forwarded::{ClientInfo, ClientPlace, ForwardedField, TrustedProxies};
use transom_jwt::cache::TokenCache;
use transom_jwt::published_keys::PublishedKeys;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule::Cost;
use transom_limiter::rule_set::{CompiledRule, RuleSet};
use transom_usage::format::requested_model;
use transom_usage::json_pointer::JsonPointer;
use transom_usage::learnt_cost::LearntCosts;
use transom_usage::request_body::BodyPlan;

#[derive(Debug)]
pub struct CompiledConfig {
    /// A random number, which distinguishes the configurations of the process.
    pub number: u64,
    pub config: Config,
    pub router: Router,
    /// What to hash, for hash load balancing.
    pub hash_keys: IdVec<UpstreamId, Option<HashKey>>,
    pub rule_set: Arc<RuleSet>,
    /// With which `rule_set` was compiled.
    pub seed: Seed,
    /// Exemptions and overrides, by rule of the rule set.
    pub overrides: IdVec<RuleId, Option<Arc<Overrides>>>,
    /// Whether keys must name a client, by rule of the rule set.
    pub client_checks: IdVec<RuleId, Option<ClientCheck>>,
    /// What requests have cost, for rules that reserve by it.
    learnt: IdVec<RuleId, Option<Arc<LearntCosts>>>,
    /// The rules that answer to descriptors.
    pub descriptors: DescriptorIndex,
    /// Form of refusals.
    pub refusal_templates: IdVec<RuleId, RefusalTemplate>,
    /// Clients of the clients file.
    pub clients: Option<Arc<LiveClients>>,
    /// Deny and allow lists; `None` if there are none.
    pub access: Option<Arc<AccessControl>>,
    /// The challenges that the route of ACME challenges answers.
    pub challenges: Arc<PendingChallenges>,
    pub routes: IdVec<RouteId, CompiledRoute>,
    pub route_rules: IdVec<RouteRulesId, RouteRules>,
    /// Digests secret key parts for the shared store; `None` without one.
    pub digester: Option<Arc<KeyDigester>>,
    /// Digests secret key parts for people: as in the shared store, if there is one.
    pub readable_digester: Arc<KeyDigester>,
    /// JWT claims used as keys or to identify clients.
    claims: Vec<String>,
    /// Seeded hasher for the token cache.
    token_hasher: KeyHasher,
    /// The fetched keys for tokens.
    published_keys: Option<Arc<PublishedKeys>>,
    /// Proxies whose forwarding fields are trusted.
    pub trusted_proxies: Option<TrustedProxies>,
    /// Actions of those routes that have any.
    actions: Vec<RouteActions>,
    /// Fields that a key, a cost, a client, its address or a route depends on. A client cannot remove them by listing them in Connection.
    pub key_fields: Vec<HeaderName>,
}

/// What changes while the configuration stays.
#[derive(Default)]
pub struct LiveData {
    /// The clients in the store.
    pub clients: Option<Arc<LiveClients>>,
    /// The fetched keys for tokens.
    pub published_keys: Option<Arc<PublishedKeys>>,
    /// The deny and allow lists of the same configuration, if it was compiled before.
    pub access: Option<Arc<AccessControl>>,
    /// The challenges of authorities that order certificates.
    pub challenges: Arc<PendingChallenges>,
    /// What requests have cost, by rule.
    pub learnt: Vec<LearntRule>,
    /// The time of the wall clock, Unix milliseconds: limits of clients of the clients file that end before are not in effect.
    pub now_ms: u64,
}

/// What the requests of a rule have cost.
pub struct LearntRule {
    name: String,
    usage: UsageCost,
    costs: Arc<LearntCosts>,
}

/// What belongs to a route in other tables. Small, so that thousands of routes stay in the CPU cache.
#[derive(Debug)]
pub struct CompiledRoute {
    pub rules: RouteRulesId,
    /// `None` if the route responds itself.
    pub upstream: Option<UpstreamId>,
    /// Whether a request may wait for a reachable server (`hold`): what its rules charge is refunded if there is none in time.
    pub may_hold: bool,
    /// One more than the position in `actions`; `None` if the route has no actions.
    action: Option<NonZeroU32>,
}

/// A list of rules. Many routes share few lists, so the lists stay in the CPU cache.
#[derive(Debug)]
pub struct RouteRules {
    pub charge_plan: ChargePlan,
    pub rule_keys: IdVec<PlanPosition, RuleKey>,
    pub rate_limit_template: RateLimitTemplate,
    pub response_costs: ResponseCosts,
    /// What is read of bodies before the decision; `None`: nothing.
    pub body_plan: Option<Arc<BodyPlan>>,
    /// Rules whose key, condition or cost depends on the body.
    pub body_rules: Vec<PlanPosition>,
    /// Whether a refusal by the other rules is the same whatever the body says, and found without the store.
    pub may_refuse_unread: bool,
}

impl CompiledConfig {
    /// The clients of a configuration, without those in the store.
    pub fn client_plans(config: &Config) -> Option<ClientPlans> {
        let name_client = |route: &Route| route.actions.as_ref().is_some_and(|actions| actions.name_client());
        let counts_clients =
            config.rules.iter().any(GatewayRule::counts_clients) || config.routes.iter().any(name_client);
        config.clients.as_ref().map(|clients| ClientPlans::new(clients, counts_clients))
    }

    /// `rule_set` is compiled from the rules of `config`.
    pub fn new(config: Config, seed: Seed, rule_set: RuleSet, live: LiveData) -> CompiledConfig {
        let LiveData { clients, published_keys, access, challenges, learnt, now_ms } = live;
        let clients = clients.or_else(|| {
            let mut plans = CompiledConfig::client_plans(&config)?;
            plans.apply_limits(now_ms);
            Some(LiveClients::new(plans))
        });
        let rule_set = Arc::new(rule_set);
        let plans = clients.as_ref().map(|clients| clients.current());
        let sources = plans.as_deref().map(|plans| &**plans);
        let known_plans = sources.zip(config.clients.as_ref());
        let known_plans = known_plans
            .map(|(sources, configured)| KnownPlans { names: &sources.plans, limits: &configured.limit_texts });
        let overrides_of = |rule: &CompiledRule| RuleKey::compile_overrides(rule, known_plans, seed).map(Arc::new);
        let overrides: IdVec<RuleId, _> = rule_set.rules.map(overrides_of);
        let client_check = |rule: &GatewayRule| ClientCheck::new(rule.on_unknown_key, &rule.key, sources);
        let client_checks: IdVec<RuleId, _> = config.rules.map(client_check);
        let learnt = config.rules.map(|rule| learnt_costs(rule, &learnt));
        let (mut route_rules, mut actions) = (IdVec::new(), Vec::new());
        let mut known: BTreeMap<_, RouteRulesId> = BTreeMap::new();
        let mut routes = IdVec::new();
        for route in &config.routes {
            // Keys depend on the positions of path parameters, and a route may set its own cost, or read streams.
            let rules = *known
                .entry((&route.rules, route.path.param_names(), route.cost, sets_include_usage(route)))
                .or_insert_with(|| {
                    let rule_key = |rule: &RuleId| {
                        let rule_key = RuleKey::new(&rule_set.rules[*rule], route, seed);
                        let rule_key = rule_key.with_condition(config.rules[*rule].when.clone());
                        let rule_key = rule_key.with_reserve(&config.rules[*rule], learnt[*rule].as_ref());
                        rule_key
                            .with_overrides(overrides[*rule].clone())
                            .with_client_check(client_checks[*rule].clone())
                    };
                    let response_costs = |rules: &IdVec<_, _>| ResponseCosts::of(&config, rules, &learnt);
                    route_rules.push(RouteRules::new(&rule_set, &config, route, response_costs, rule_key))
                });
            actions.extend(route.actions.as_ref().map(|own| RouteActions::new(own, route, &challenges)));
            let action = route.actions.as_ref().and_then(|_| NonZeroU32::new(actions.len() as u32));
            let may_hold = route.upstream.is_some_and(|upstream| config.upstreams[upstream].policy.hold.is_some());
            routes.push(CompiledRoute { rules, upstream: route.upstream, may_hold, action });
        }
        let access = access.or_else(|| AccessControl::new(&config).map(Arc::new));
        let hash_keys = config.upstreams.map(|upstream| HashKey::new(&upstream.policy.balance));
        let key_fields = key_fields(&config);
        let claims = claims(&config);
        let token_hasher = KeyHasher::new(seed, 0);
        let router = Router::new(&config.routes, config.path_reading.trailing_slash);
        let refusal_templates = config.rules.map(RefusalTemplate::new);
        let api_keys = config.clients.as_ref().map_or(&[][..], |clients| &clients.api_key);
        let digester = config.counters.shared.as_ref().map(|shared| KeyDigester::new(&shared.digest_key(), api_keys));
        let digester = digester.map(Arc::new);
        let local_key = [seed.0.to_be_bytes(), seed.1.to_be_bytes()].concat();
        let readable_digester = digester.clone().unwrap_or_else(|| Arc::new(KeyDigester::new(&local_key, api_keys)));
        let trusted_proxies = trusted_proxies(&config.listen);
        let descriptors = DescriptorIndex::new(&config.rules);
        CompiledConfig {
            number: fastrand::u64(..),
            descriptors,
            digester,
            readable_digester,
            trusted_proxies,
            actions,
            router,
            hash_keys,
            refusal_templates,
            routes,
            route_rules,
            claims,
            token_hasher,
            published_keys,
            key_fields,
            clients,
            access,
            challenges,
            overrides,
            client_checks,
            learnt,
            rule_set,
            seed,
            config,
        }
    }
}

impl CompiledConfig {
    /// A token verifier with an empty cache; one per worker. Without configured keys every token is invalid.
    pub fn token_checker(&self) -> TokenCache {
        let verifier = self.config.jwt.clone().unwrap_or_default();
        let mut tokens = TokenCache::new(verifier, self.claims.clone(), self.token_hasher.clone())
            .with_published(self.published_keys.clone());
        let mut api_keys = self.config.clients.iter().flat_map(|clients| &clients.api_key);
        tokens.has_api_keys_beside = api_keys.any(|part| BEARER.has(part));
        tokens
    }

    /// What the same configuration has when it is compiled again.
    pub fn live_data(&self) -> LiveData {
        let (clients, published_keys, access, challenges) =
            (self.clients.clone(), self.published_keys.clone(), self.access.clone(), Arc::clone(&self.challenges));
        LiveData { clients, published_keys, access, challenges, learnt: self.learnt_rules(), now_ms: 0 }
    }

    /// What the requests of each rule have cost, for the next configuration.
    pub fn learnt_rules(&self) -> Vec<LearntRule> {
        let rules = self.config.rules.iter().zip(self.learnt.iter());
        let learnt = rules.filter_map(|(rule, costs)| {
            Some(LearntRule { name: rule.name.clone(), usage: rule.usage.clone()?, costs: costs.clone()? })
        });
        learnt.collect()
    }

    /// Whether the first fetch of the key set, if one is configured, has ended.
    pub fn was_key_set_tried(&self) -> bool {
        self.published_keys.as_ref().is_none_or(|published| published.was_tried())
    }

    /// The client of a request that arrived from `peer`: the peer, or the client that a trusted proxy names.
    pub fn identify_client(&self, peer: ClientAddress, is_secure: bool, headers: &HeaderMap) -> ClientInfo {
        match &self.trusted_proxies {
            None => ClientInfo::of_peer(peer, is_secure),
            Some(trusted_proxies) => trusted_proxies.client(peer, is_secure, headers),
        }
    }

    /// The client of a request about which the proxy `peer` asks.
    pub fn identify_client_of_proxy(&self, peer: ClientAddress, headers: &HeaderMap) -> ClientInfo {
        match &self.trusted_proxies {
            None => {
                let none = TrustedProxies::new(&[], ForwardedField::XForwardedFor, ClientPlace::FirstUntrusted);
                none.client_of_proxy(peer, headers)
            }
            Some(trusted_proxies) => trusted_proxies.client_of_proxy(peer, headers),
        }
    }

    /// The field in which trusted proxies name the client.
    pub fn client_field(&self) -> Option<&HeaderName> {
        self.trusted_proxies.as_ref()?.client_field()
    }

    /// The limit of the route with these actions, or else of the configuration.
    pub fn max_body_bytes(&self, actions: Option<&RouteActions>) -> Option<u64> {
        actions.and_then(|actions| actions.max_body).unwrap_or(self.config.limits.max_body)
    }

    /// The limit of the route with these actions, or else of the configuration, for bodies that are read before the decision.
    pub fn body_key_limit(&self, actions: Option<&RouteActions>) -> usize {
        actions.and_then(|actions| actions.body_key_limit).unwrap_or(self.config.general.body_key_limit)
    }

    pub fn rules_of(&self, route: &CompiledRoute) -> &RouteRules {
        &self.route_rules[route.rules]
    }

    pub fn actions_of(&self, route: &CompiledRoute) -> Option<&RouteActions> {
        route.action.map(|number| &self.actions[number.get() as usize - 1])
    }

    /// The rules, to count their keys.
    pub fn counted_rules(&self) -> CountedRules<'_> {
        CountedRules {
            rule_set: &self.rule_set,
            seed: self.seed,
            config_number: self.number,
            capacity: self.config.admin.top_keys,
        }
    }

    pub fn route_name(&self, route: RouteId) -> &str {
        &self.config.routes[route].name
    }
}

impl RouteRules {
    fn new(
        rule_set: &Arc<RuleSet>,
        config: &Config,
        route: &Route,
        response_costs: impl FnOnce(&IdVec<PlanPosition, RuleId>) -> ResponseCosts,
        rule_key: impl FnMut(&RuleId) -> RuleKey,
    ) -> RouteRules {
        let charge_plan = rule_set.charge_plan(route.rules.iter().copied());
        let mut response_costs = response_costs(charge_plan.rules());
        let mut pointers: Vec<_> = route.rules.iter().flat_map(|rule| body_pointers(&config.rules[*rule])).collect();
        if sets_include_usage(route) {
            pointers.extend(stream_members());
        }
        if !pointers.is_empty() && std::mem::take(&mut response_costs.reads_passing_model) {
            pointers.push(requested_model());
        }
        let reads_body = |(_, rule): &(PlanPosition, &RuleId)| body_pointers(&config.rules[**rule]).next().is_some();
        let body_rules: Vec<_> =
            charge_plan.rules().enumerate().filter(reads_body).map(|(position, _)| position).collect();
        let counts_refusals = |rule: &CompiledRule| rule.rule.count_refused || rule.penalty.is_some();
        RouteRules {
            rule_keys: charge_plan.rules().map(rule_key),
            rate_limit_template: RateLimitTemplate::new(&charge_plan, |rule| &config.rules[rule]),
            response_costs,
            body_plan: BodyPlan::new(pointers),
            may_refuse_unread: !charge_plan.is_shared
                && body_rules.len() < charge_plan.rules().ids().len()
                && !body_rules.iter().any(|position| counts_refusals(charge_plan.rule(*position)))
                // Windows of the other rules may end while a delayed request waits.
                && !route.rules.iter().any(|rule| config.rules[*rule].delays()),
            body_rules,
            charge_plan,
        }
    }
}

fn sets_include_usage(route: &Route) -> bool {
    route.actions.as_ref().is_some_and(|actions| actions.set_include_usage)
}

/// Whether a request of OpenAI asks for a stream, and for the usage of the stream.
pub fn stream_members() -> [JsonPointer; 2] {
    ["/stream", "/stream_options/include_usage"].map(|text| JsonPointer::parse(text).unwrap_or_default())
}

/// The values of bodies that a rule depends on.
fn body_pointers(rule: &GatewayRule) -> impl Iterator<Item = JsonPointer> {
    let keys = rule.key.iter().filter(|part| JSON.has(part)).filter_map(KeyPart::name);
    let keys = keys.filter_map(|name| JsonPointer::parse(name).ok());
    let reserve = rule.usage.as_ref().map(|usage| &usage.reserve).filter(|reserve| reserve.reads_bodies());
    let output = match reserve {
        Some(Reserve::OfRequest { output, times, .. }) => output.iter().chain(times).cloned().collect(),
        _ => Vec::new(),
    };
    // A reserve depends on the weights of the model, or on its costs.
    let reserve = reserve.map(|_| requested_model()).into_iter().chain(output);
    keys.chain(rule.when.iter().filter_map(|condition| condition.json.clone())).chain(reserve)
}

/// The costs of a rule that reserves by them: those that it has learnt before, if it counts the same.
fn learnt_costs(rule: &GatewayRule, before: &[LearntRule]) -> Option<Arc<LearntCosts>> {
    let usage = rule.usage.as_ref().filter(|usage| matches!(usage.reserve, Reserve::Learnt { .. }))?;
    let same = before.iter().find(|learnt| learnt.name == rule.name && learnt.usage == *usage);
    Some(same.map(|learnt| Arc::clone(&learnt.costs)).unwrap_or_default())
}

/// `None` if every client is the peer. A proxy that asks on `forward_auth` is trusted without being listed.
fn trusted_proxies(listen: &Listen) -> Option<TrustedProxies> {
    let place = match (&listen.client_ip, listen.trusted_hops) {
        (Some(field), _) => ClientPlace::Field(field.clone()),
        (None, Some(hops)) => ClientPlace::Hop(hops),
        (None, None) => ClientPlace::FirstUntrusted,
    };
    let networks: Vec<_> = listen.trusted_networks().collect();
    let is_used = !networks.is_empty() || place != ClientPlace::FirstUntrusted;
    is_used.then(|| TrustedProxies::new(&networks, listen.forwarded, place))
}

fn key_fields(config: &Config) -> Vec<HeaderName> {
    let keys = parts(config).filter(|part| HEADER.has(part)).filter_map(KeyPart::name);
    let costs = config.rules.iter().filter_map(|rule| match &rule.cost {
        Cost::Request { source: field, .. } => Some(field.as_str()),
        Cost::Fixed(_) | Cost::Response { .. } => None,
    });
    let routes = config.routes.iter().flat_map(|route| &route.headers).map(|(name, _)| name.as_str());
    let bearer = parts(config).any(|part| BEARER.has(part)).then_some(header::AUTHORIZATION.as_str());
    let names =
        keys.chain(bearer).chain(costs).chain(routes).filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok());
    names.chain(config.listen.client_ip.clone()).collect::<HashSet<_>>().into_iter().collect()
}

fn claims(config: &Config) -> Vec<String> {
    let plan = config.clients.as_ref().and_then(|clients| clients.plan_claim.as_ref());
    let names = parts(config).chain(plan).filter(|part| JWT.has(part)).filter_map(KeyPart::name);
    names.collect::<BTreeSet<_>>().into_iter().map(str::to_owned).collect()
}

/// Key parts of all rules, of client identification and of deny entries.
fn parts(config: &Config) -> impl Iterator<Item = &KeyPart> {
    let clients = config.clients.iter().flat_map(|clients| clients.sources());
    let keys = config.rules.iter().flat_map(|rule| {
        let fallback: &[KeyPart] = if let OnMissing::Fallback(parts) = &rule.on_missing { parts } else { &[] };
        rule.key.iter().chain(fallback)
    });
    keys.chain(clients).chain(access::denied_parts(config))
}
