//! The configuration made ready for requests: everything that can be worked out before one comes.
//!
//! A snapshot never changes. A reload makes a new one; requests that are under way keep the one they
//! started with.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;

use http::HeaderName;

use super::response_cost::ResponseCostRule;
use crate::config::{Config, Route};
use crate::decision::DecisionService;
use crate::http::client_plans::Clients;
use crate::http::forwarded::Trust;
use crate::http::hash_key::Affinity;
use crate::http::overrides::Overrides;
use crate::http::rate_limit_key::{Caller, RuleKey};
use crate::http::ratelimit_headers::RateLimitTemplate;
use crate::http::responses::RefusalTemplate;
use crate::http::route_actions::Action;
use crate::http::router::Router;
use crate::http::store_key_text::Digester;
use crate::jwt::cache::Checker;
use crate::upstream::server_health::UpstreamHealth;
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule::{Cost, Sharing};
use transom_limiter::rule_set::{ChargePlan, RuleSet};

#[derive(Debug)]
pub struct CompiledConfig {
    pub config: Config,
    pub router: Router,
    /// The servers of each upstream, as all loops know them.
    pub upstream_health: Vec<Arc<UpstreamHealth>>,
    /// What each upstream chooses a server by, if that is a hash.
    pub hash_keys: Vec<Option<Affinity>>,
    pub rule_set: Arc<RuleSet>,
    /// Answers those who ask without a request.
    pub decision_service: Arc<DecisionService>,
    /// What refusals look like; one for each rule of the book.
    pub refusal_templates: Vec<RefusalTemplate>,
    /// Who is known by name.
    pub clients: Option<Clients>,
    /// One for each route, in the order of the configuration.
    pub routes: Vec<CompiledRoute>,
    /// What routes with the same rules have in common.
    pub route_rules: Vec<RouteRules>,
    /// Spells what is secret, where gateways share counters.
    digester: Option<Arc<Digester>>,
    /// Claims that some rule counts by, or that name a client.
    claims: Vec<String>,
    /// What hashes of tokens start from.
    token_hasher: KeyHasher,
    /// Proxies that are believed about whom they were asked by.
    pub trusted_proxies: Option<Trust>,
    /// What routes change on the way; those that change something.
    actions: Vec<Action>,
    /// Fields that some rule counts by, that tell a cost, that name a client, or that choose a route: no Connection field
    /// can strip them.
    pub key_fields: Vec<HeaderName>,
}

/// A route made ready: where to go on from it. Small, so that thousands of them stay in the cache.
#[derive(Debug)]
pub struct CompiledRoute {
    /// Position in the snapshot.
    pub rules_index: u32,
    /// Position in the configuration.
    pub upstream_index: u32,
    /// One more than the position in the snapshot's actions, if the route has any.
    action: Option<NonZeroU32>,
}

/// A list of rules made ready; many routes share few of them, so those stay in the cache.
#[derive(Debug)]
pub struct RouteRules {
    pub charge_plan: ChargePlan,
    /// One for each rule of the roster.
    pub rule_keys: Vec<RuleKey>,
    pub rate_limit_template: RateLimitTemplate,
    /// The rules whose cost the answer tells.
    pub response_costs: Vec<ResponseCostRule>,
    /// Whether a request that was refused can be refused again by a look at its counters: nothing passes for another reason than that
    /// they have room, a refusal leaves nothing behind, and no client is known by a token, which may end.
    pub is_repeatable: bool,
}

impl CompiledConfig {
    /// `book` is of the rules of the configuration.
    pub fn new(
        config: Config,
        seed: Seed,
        rule_set: RuleSet,
        upstream_health: Vec<Arc<UpstreamHealth>>,
    ) -> Arc<CompiledConfig> {
        let rule_set = Arc::new(rule_set);
        let clients = config.clients.as_ref().map(Clients::new);
        let exceptions = |entry| RuleKey::exceptions(entry, clients.as_ref(), seed).map(Arc::new);
        let exceptions: Vec<_> = rule_set.rules.iter().map(exceptions).collect();
        let (mut slates, mut actions) = (Vec::new(), Vec::new());
        let mut known: BTreeMap<_, usize> = BTreeMap::new();
        let mut lanes = Vec::with_capacity(config.routes.len());
        for route in &config.routes {
            // Where a parameter stands in the path is part of how a key is found; the cost may be the route's own.
            let slate = *known.entry((&route.rules, route.path.param_names(), route.cost)).or_insert_with(|| {
                slates.push(RouteRules::new(&rule_set, &config, route, &exceptions, seed));
                slates.len() - 1
            });
            actions.extend(route.actions.as_ref().map(|own| Action::new(own, route)));
            let action = route.actions.as_ref().and_then(|_| NonZeroU32::new(actions.len() as u32));
            lanes.push(CompiledRoute { rules_index: slate as u32, upstream_index: route.upstream as u32, action });
        }
        let affinities = config.upstreams.iter().map(|upstream| Affinity::new(&upstream.policy.balance)).collect();
        let key_fields = key_fields(&config);
        let claims = claims(&config);
        let token_hash = KeyHasher::new(seed, 0);
        let router = Router::new(&config.routes, config.path_reading.trailing_slash);
        let forms = config.refusals.iter().map(RefusalTemplate::new).collect();
        let api_key = config.clients.as_ref().and_then(|clients| clients.api_key.as_ref());
        let digester = config.counters.shared.as_ref().map(|shared| Digester::new(&shared.digest_key(), api_key));
        let digester = digester.map(Arc::new);
        let counsel = Arc::new(DecisionService::new(&rule_set, &exceptions, seed, digester.clone()));
        Arc::new(CompiledConfig {
            digester,
            trusted_proxies: config.proxies.as_ref().map(Trust::new),
            actions,
            router,
            upstream_health,
            hash_keys: affinities,
            refusal_templates: forms,
            routes: lanes,
            route_rules: slates,
            claims,
            token_hasher: token_hash,
            key_fields,
            clients,
            decision_service: counsel,
            rule_set,
            config,
        })
    }
}

impl CompiledConfig {
    /// What says which tokens are genuine; one for each loop. Without keys, none is.
    pub fn token_checker(&self) -> Checker {
        Checker::new(self.config.jwt.clone().unwrap_or_default(), self.claims.clone(), self.token_hasher.clone())
    }

    pub fn rules_of(&self, lane: &CompiledRoute) -> &RouteRules {
        &self.route_rules[lane.rules_index as usize]
    }

    pub fn actions_of(&self, lane: &CompiledRoute) -> Option<&Action> {
        lane.action.map(|behind| &self.actions[behind.get() as usize - 1])
    }

    /// What the key of a request is in the store, under a rule of a slate; `None` if the rule is not shared or does not apply.
    pub fn store_key(&self, slate: &RouteRules, position: usize, caller: &Caller<'_>) -> Option<Rc<str>> {
        let rule = &self.rule_set.rules[slate.charge_plan.rules[position]].rule;
        let digester = self.digester.as_ref().filter(|_| rule.sharing != Sharing::Local)?;
        let mut text = String::new();
        slate.rule_keys[position].text(caller, digester, &mut text).then(|| text.into())
    }

    /// As [`Snapshot::text_of`], for all rules of a slate.
    pub fn store_keys(&self, slate: &RouteRules, caller: &Caller<'_>) -> Vec<Option<Rc<str>>> {
        (0..slate.charge_plan.rules.len()).map(|position| self.store_key(slate, position, caller)).collect()
    }

    /// The name of a route; a lane has its route's position.
    pub fn route_name(&self, lane: usize) -> &str {
        &self.config.routes[lane].name
    }
}

impl RouteRules {
    fn new(
        rule_set: &RuleSet,
        config: &Config,
        route: &Route,
        exceptions: &[Option<Arc<Overrides>>],
        seed: Seed,
    ) -> RouteRules {
        let charge_plan = rule_set.charge_plan(&route.rules);
        let identity = |rule: &usize| RuleKey::new(&rule_set.rules[*rule], route, seed).with(exceptions[*rule].clone());
        let identities = route.rules.iter().map(identity).collect();
        let terms = ResponseCostRule::of(config, &route.rules);
        let is_repeatable = charge_plan.is_plain() && charge_plan.shadow_rules().is_empty() && config.jwt.is_none();
        RouteRules {
            rule_keys: identities,
            rate_limit_template: RateLimitTemplate::new(rule_set, &charge_plan, &config.fields),
            charge_plan,
            response_costs: terms,
            is_repeatable,
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

/// All that some rule counts by, or that names a client.
fn parts(config: &Config) -> impl Iterator<Item = &KeyPart> {
    let clients = config.clients.iter().flat_map(|clients| [&clients.api_key, &clients.subject]).flatten();
    let keys = config.rules.iter().flat_map(|rule| {
        let fallback: &[KeyPart] = if let OnMissing::Fallback(parts) = &rule.on_missing { parts } else { &[] };
        rule.key.iter().chain(fallback)
    });
    keys.chain(clients)
}
