//! The configuration prepared for requests: everything that can be computed at load.
//!
//! A compiled configuration is immutable and shared by all workers. A reload makes a new one; requests in flight keep theirs.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use http::{HeaderMap, HeaderName};

use crate::config::Config;
use crate::config::key::OnUnknownKey;
use crate::config::listen::ForwardedField;
use crate::config::listen::Listen;
use crate::config::route::Route;
use crate::decision::DecisionService;
use crate::decision::descriptors::DescriptorIndex;
use crate::http::client_plans::{ClientCheck, ClientLookup, ClientPlans};
use crate::http::error::RequestError;
use crate::http::forwarded::{ClientInfo, TrustedProxies};
use crate::http::key_source::{HashKey, RequestAttributes};
use crate::http::overrides::Overrides;
use crate::http::rate_limit_key::{KeyFailure, RuleKey};
use crate::http::ratelimit_headers::RateLimitTemplate;
use crate::http::request_validation::ValidatedRequest;
use crate::http::response_cost::ResponseCostRule;
use crate::http::responses::RefusalTemplate;
use crate::http::route_actions::RouteActions;
use crate::http::router::{AmbiguousHeader, RouteQuery, Router};
use crate::http::store_key_text::KeyDigester;
use crate::http::websocket_handshake::UpgradeMethod;
use crate::jwt::cache::TokenCache;
use crate::jwt::published_keys::PublishedKeys;
use crate::top_keys::CountedRules;
use crate::upstream::server_health::UpstreamHealth;
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule::{Cost, Rule, Sharing};
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, RuleSet};

#[derive(Debug)]
pub struct CompiledConfig {
    /// A random number, which distinguishes the configurations of the process.
    pub number: u64,
    pub config: Config,
    pub router: Router,
    /// The health of each upstream's servers, shared by all workers.
    pub upstream_health: Vec<Arc<UpstreamHealth>>,
    /// By upstream: what to hash, for hash load balancing.
    pub hash_keys: Vec<Option<HashKey>>,
    pub rule_set: Arc<RuleSet>,
    /// With which `rule_set` was compiled.
    pub seed: Seed,
    /// Serves the decision API.
    pub decision_service: Arc<DecisionService>,
    /// The rules that answer to descriptors.
    pub descriptors: DescriptorIndex,
    /// Form of refusals, by rule of the rule set.
    pub refusal_templates: Vec<RefusalTemplate>,
    /// Clients of the clients file.
    pub clients: Option<Arc<ClientPlans>>,
    /// In the order of the configuration.
    pub routes: Vec<CompiledRoute>,
    /// Lists of rules; routes with equal lists share one.
    pub route_rules: Vec<RouteRules>,
    /// Digests secret key parts for the shared store; `None` without one.
    digester: Option<Arc<KeyDigester>>,
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
    /// Fields that a key, a cost, a client or a route depends on. A client cannot remove them by listing them in Connection.
    pub key_fields: Vec<HeaderName>,
}

/// A route's positions in other tables. Small, so that thousands of routes stay in the CPU cache.
#[derive(Debug)]
pub struct CompiledRoute {
    /// Position in `route_rules`.
    pub rules_index: u32,
    /// Position in `config.upstreams`.
    pub upstream_index: u32,
    /// One more than the position in `actions`; `None` if the route has no actions.
    action: Option<NonZeroU32>,
}

/// A list of rules. Many routes share few lists, so the lists stay in the CPU cache.
#[derive(Debug)]
pub struct RouteRules {
    pub charge_plan: ChargePlan,
    /// By position in the charge plan.
    pub rule_keys: Vec<RuleKey>,
    pub rate_limit_template: RateLimitTemplate,
    /// The rules whose charge depends on the response.
    pub response_costs: Vec<ResponseCostRule>,
}

/// Why a rule does not count a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotCounted {
    Exempt,
    /// The key cannot be found, and the rule is a shadow rule.
    Shadowed,
}

impl CompiledConfig {
    /// `rule_set` is compiled from the rules of `config`.
    pub fn new(
        config: Config,
        seed: Seed,
        rule_set: RuleSet,
        upstream_health: Vec<Arc<UpstreamHealth>>,
        published_keys: Option<Arc<PublishedKeys>>,
    ) -> Arc<CompiledConfig> {
        let rule_set = Arc::new(rule_set);
        let clients = config.clients.as_ref().map(ClientPlans::new).map(Arc::new);
        let overrides_of = |rule| RuleKey::compile_overrides(rule, clients.as_deref(), seed).map(Arc::new);
        let overrides: Vec<_> = rule_set.rules.iter().map(overrides_of).collect();
        let client_check =
            |(rule, on_unknown): (&Rule, &OnUnknownKey)| ClientCheck::new(*on_unknown, &rule.key, clients.as_deref());
        let client_checks: Vec<_> = config.rules.iter().zip(&config.on_unknown_key).map(client_check).collect();
        let (mut route_rules, mut actions) = (Vec::new(), Vec::new());
        let mut indexes: BTreeMap<_, usize> = BTreeMap::new();
        let mut routes = Vec::with_capacity(config.routes.len());
        for route in &config.routes {
            // Keys depend on the positions of path parameters, and a route may set its own cost.
            let rules_index =
                *indexes.entry((&route.rules, route.path.param_names(), route.cost)).or_insert_with(|| {
                    route_rules.push(RouteRules::new(&rule_set, &config, route, &overrides, &client_checks, seed));
                    route_rules.len() - 1
                });
            actions.extend(route.actions.as_ref().map(|own| RouteActions::new(own, route)));
            let action = route.actions.as_ref().and_then(|_| NonZeroU32::new(actions.len() as u32));
            routes.push(CompiledRoute {
                rules_index: rules_index as u32,
                upstream_index: route.upstream as u32,
                action,
            });
        }
        let hash_keys = config.upstreams.iter().map(|upstream| HashKey::new(&upstream.policy.balance)).collect();
        let key_fields = key_fields(&config);
        let claims = claims(&config);
        let token_hasher = KeyHasher::new(seed, 0);
        let router = Router::new(&config.routes, config.path_reading.trailing_slash);
        let refusal_templates = config.refusal_responses.iter().map(RefusalTemplate::new).collect();
        let api_key = config.clients.as_ref().and_then(|clients| clients.api_key.as_ref());
        let digester = config.counters.shared.as_ref().map(|shared| KeyDigester::new(&shared.digest_key(), api_key));
        let digester = digester.map(Arc::new);
        let local_key = [seed.0.to_be_bytes(), seed.1.to_be_bytes()].concat();
        let readable_digester = digester.clone().unwrap_or_else(|| Arc::new(KeyDigester::new(&local_key, api_key)));
        let Listen { trusted_proxies, forwarded, .. } = &config.listen;
        let trusted_proxies = (!trusted_proxies.is_empty()).then(|| TrustedProxies::new(trusted_proxies, *forwarded));
        let decision_service = DecisionService::new(&rule_set, &overrides, seed, digester.clone());
        let decision_service = Arc::new(decision_service.with_clients(clients.as_ref(), client_checks));
        let descriptors = DescriptorIndex::new(&config.descriptors);
        Arc::new(CompiledConfig {
            number: fastrand::u64(..),
            descriptors,
            digester,
            readable_digester,
            trusted_proxies,
            actions,
            router,
            upstream_health,
            hash_keys,
            refusal_templates,
            routes,
            route_rules,
            claims,
            token_hasher,
            published_keys,
            key_fields,
            clients,
            decision_service,
            rule_set,
            seed,
            config,
        })
    }
}

impl CompiledConfig {
    /// A token verifier with an empty cache; one per worker. Without configured keys every token is invalid.
    pub fn token_checker(&self) -> TokenCache {
        TokenCache::new(self.config.jwt.clone().unwrap_or_default(), self.claims.clone(), self.token_hasher.clone())
            .with_published(self.published_keys.clone())
    }

    /// Whether the first fetch of the key set, if one is configured, has ended.
    pub fn was_key_set_tried(&self) -> bool {
        self.published_keys.as_ref().is_none_or(|published| published.was_tried())
    }

    /// The client of a request that arrived from `peer`: the peer, or the client that a trusted proxy names.
    pub fn identify_client(&self, peer: IpAddr, is_secure: bool, headers: &HeaderMap) -> ClientInfo {
        match &self.trusted_proxies {
            None => ClientInfo { address: peer, is_secure, hops: 0, trusted_header: None },
            Some(trusted_proxies) => trusted_proxies.client(peer, is_secure, headers),
        }
    }

    /// The client of a request about which the proxy `peer` asks.
    pub fn identify_client_of_proxy(&self, peer: IpAddr, headers: &HeaderMap) -> ClientInfo {
        match &self.trusted_proxies {
            None => TrustedProxies::new(&[], ForwardedField::XForwardedFor).client_of_proxy(peer, headers),
            Some(trusted_proxies) => trusted_proxies.client_of_proxy(peer, headers),
        }
    }

    /// The position of the route of a request. `params` receives the values of its parameters.
    pub fn find_route(&self, query: &RouteQuery<'_>, params: &mut Vec<Range<usize>>) -> Result<usize, RequestError> {
        let found = self.router.find(query, params);
        found.map_err(|AmbiguousHeader(field)| RequestError::RouteField(field.clone()))?.ok_or(RequestError::NoRoute)
    }

    /// Checks that a route takes the protocol of a request and the size of its body, which has at least `body_bytes`.
    #[inline]
    pub fn check_route(
        &self,
        route: usize,
        validated: &ValidatedRequest<'_>,
        body_bytes: u64,
    ) -> Result<(), RequestError> {
        if validated.websocket == Some(UpgradeMethod::ExtendedConnect) && !self.config.routes[route].websocket {
            return Err(RequestError::WEBSOCKET_NOT_SERVED);
        }
        // A body that is known to be too large is refused before anything is charged or read.
        match self.max_body_bytes(self.actions_of(&self.routes[route])) {
            Some(max_bytes) if body_bytes > max_bytes => Err(RequestError::BodyTooLarge(max_bytes)),
            _ => Ok(()),
        }
    }

    /// The limit of the route with these actions, or else of the configuration.
    pub fn max_body_bytes(&self, actions: Option<&RouteActions>) -> Option<u64> {
        actions.and_then(|actions| actions.max_body).unwrap_or(self.config.limits.max_body)
    }

    /// Finds the key of each rule of a list. Returns the first error; rules whose keys were found are charged nevertheless.
    /// `not_counted` is called with the position of each rule that does not count the request.
    #[inline]
    pub fn find_keys(
        &self,
        rules: &RouteRules,
        attributes: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        keyed_requests: &mut Vec<Option<KeyedRequest>>,
        mut not_counted: impl FnMut(usize, NotCounted),
    ) -> Option<RequestError> {
        let mut first_error = None;
        keyed_requests.clear();
        for (position, rule_key) in rules.rule_keys.iter().enumerate() {
            keyed_requests.push(match rule_key.keyed_request(attributes, clients) {
                Ok(None) => {
                    if rule_key.is_exempt(attributes, clients) {
                        not_counted(position, NotCounted::Exempt);
                    }
                    None
                }
                Ok(keyed_request) => keyed_request,
                // A shadow rule never refuses, also not for a missing key.
                Err(_) if self.rule_set.is_shadow(&rules.charge_plan, position) => {
                    not_counted(position, NotCounted::Shadowed);
                    None
                }
                Err(KeyFailure { error, keyed_request }) => {
                    first_error.get_or_insert(error);
                    keyed_request
                }
            });
        }
        first_error
    }

    pub fn rules_of(&self, route: &CompiledRoute) -> &RouteRules {
        &self.route_rules[route.rules_index as usize]
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

    /// The key of a request in the shared store under the rule at `position`; `None` if the rule is not shared or does not apply.
    pub fn store_key(
        &self,
        rules: &RouteRules,
        position: usize,
        attributes: &RequestAttributes<'_>,
    ) -> Option<Rc<str>> {
        let rule = &self.rule_set.rules[rules.charge_plan.rules[position]].rule;
        let digester = self.digester.as_ref().filter(|_| rule.sharing != Sharing::Local)?;
        let mut text = String::new();
        let clients = ClientLookup::new(self.clients.as_deref());
        rules.rule_keys[position].write_store_key(attributes, &clients, digester, &mut text).then(|| text.into())
    }

    /// [`CompiledConfig::store_key`] for all rules.
    pub fn store_keys(&self, rules: &RouteRules, attributes: &RequestAttributes<'_>) -> Vec<Option<Rc<str>>> {
        (0..rules.charge_plan.rules.len()).map(|position| self.store_key(rules, position, attributes)).collect()
    }

    /// The key of a request under the rule at `position` as people read it: the name of the client if the key names one, or
    /// the values of the parts, with short digests of secrets.
    pub fn key_label(
        &self,
        rules: &RouteRules,
        position: usize,
        attributes: &RequestAttributes<'_>,
        digester: &KeyDigester,
    ) -> String {
        let clients = ClientLookup::new(self.clients.as_deref());
        rules.rule_keys[position].describe(attributes, &clients, digester).label()
    }

    pub fn route_name(&self, route: usize) -> &str {
        &self.config.routes[route].name
    }
}

impl RouteRules {
    fn new(
        rule_set: &RuleSet,
        config: &Config,
        route: &Route,
        overrides: &[Option<Arc<Overrides>>],
        client_checks: &[Option<ClientCheck>],
        seed: Seed,
    ) -> RouteRules {
        let charge_plan = rule_set.charge_plan(&route.rules);
        let rule_key = |rule: &usize| {
            let rule_key = RuleKey::new(&rule_set.rules[*rule], route, seed);
            rule_key.with_overrides(overrides[*rule].clone()).with_client_check(client_checks[*rule].clone())
        };
        let rule_keys = route.rules.iter().map(rule_key).collect();
        let response_costs = ResponseCostRule::all_of(config, &route.rules);
        RouteRules {
            rule_keys,
            rate_limit_template: RateLimitTemplate::new(rule_set, &charge_plan, &config.rate_limit_styles),
            charge_plan,
            response_costs,
        }
    }
}

fn key_fields(config: &Config) -> Vec<HeaderName> {
    let keys = parts(config).filter_map(|part| if let KeyPart::Header(name) = part { Some(name) } else { None });
    let costs = config.rules.iter().filter_map(|rule| match &rule.cost {
        Cost::Request { header, .. } => Some(header),
        Cost::Fixed(_) | Cost::Response { .. } => None,
    });
    let routes = config.routes.iter().flat_map(|route| &route.headers).map(|(name, _)| name);
    let names = keys.chain(costs).chain(routes).filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok());
    names.collect::<HashSet<_>>().into_iter().collect()
}

fn claims(config: &Config) -> Vec<String> {
    let names = parts(config).filter_map(|part| match part {
        KeyPart::Jwt(claim) => Some(claim.clone()),
        _ => None,
    });
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Key parts of all rules and of client identification.
fn parts(config: &Config) -> impl Iterator<Item = &KeyPart> {
    let clients = config.clients.iter().flat_map(|clients| clients.sources());
    let keys = config.rules.iter().flat_map(|rule| {
        let fallback: &[KeyPart] = if let OnMissing::Fallback(parts) = &rule.on_missing { parts } else { &[] };
        rule.key.iter().chain(fallback)
    });
    keys.chain(clients)
}
