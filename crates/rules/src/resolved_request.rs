//! Resolves a request: its route, its rules, and the key of each rule. The handler, `explain` and `simulate` resolve requests
//! here alone, so that all of them agree.

use std::ops::Range;
use std::rc::Rc;

use http::{HeaderMap, Method, Uri};

use super::compiled_config::{CompiledConfig, CompiledRoute, RouteRules};
use crate::access::{AccessControl, Denial, DenyList};
use crate::client_plans::{ClientLookup, ClientPlans, KnownClient};
use crate::key_source::{ConnectionValues, RequestAttributes};
use crate::rate_limit_key::{FoundKey, KeyDescription, KeyFailure};
use crate::route_actions::{RouteActions, TemplateVariables};
use crate::router::{Ambiguity, RouteQuery};
use crate::store_key_text::KeyDigester;
use transom_config::RouteId;
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;
use transom_http::request_validation::ValidatedRequest;
use transom_http::websocket_handshake::UpgradeMethod;
use transom_jwt::cache::TokenCache;
use transom_limiter::decision_context::DecisionInputs;
use transom_limiter::handles::PlanPosition;
use transom_limiter::rule_set::NotCounted;
use transom_limiter::store_key::StoreKeys;
use transom_usage::request_body::BodyValues;

/// What routes and rules read of a valid request, before any field is added or removed.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    /// The address of the client.
    pub address: ClientAddress,
    pub connection: ConnectionValues<'a>,
    /// Whether the client uses TLS: by its connection, or by what a trusted proxy says.
    pub is_secure: bool,
    pub host: &'a str,
    pub method: &'a Method,
    /// Normalized.
    pub path: &'a str,
    /// The target as received.
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    /// See [`RequestAttributes::body`].
    pub body: Option<&'a BodyValues>,
}

/// A request with its route and rules.
pub struct ResolvedRequest<'a> {
    compiled: &'a CompiledConfig,
    pub route_id: RouteId,
    pub route: &'a CompiledRoute,
    pub rules: &'a RouteRules,
    pub attributes: RequestAttributes<'a>,
    pub clients: ClientLookup<'a>,
    is_secure: bool,
}

impl<'a> RequestView<'a> {
    /// The request as the router sees it.
    pub fn route_query(&self) -> RouteQuery<'a> {
        let RequestView { address, host, method, headers, path, uri, is_secure, .. } = *self;
        RouteQuery { address, host, method, headers, path, query: uri.query().unwrap_or_default(), secure: is_secure }
    }
}

impl CompiledConfig {
    /// Finds the route of a request. `clients`: all clients, if there are any; `params` is memory for the values of its parameters;
    /// `wall_ms` returns the time at which tokens are verified, Unix milliseconds.
    #[inline]
    pub fn resolve<'a>(
        &'a self,
        view: RequestView<'a>,
        clients: Option<&'a ClientPlans>,
        params: &'a mut Vec<Range<usize>>,
        tokens: &'a TokenCache,
        wall_ms: impl FnOnce() -> u64,
    ) -> Result<ResolvedRequest<'a>, RequestError> {
        let found = self.router.find(&view.route_query(), params);
        let found = found.map_err(|ambiguity| match ambiguity {
            Ambiguity::Header(name) => RequestError::RouteField(name.clone()),
            Ambiguity::Parameter(name) => RequestError::RouteParameter(name.to_owned()),
        })?;
        let route_id = found.ok_or(RequestError::NoRoute)?;
        let route = &self.routes[route_id];
        Ok(ResolvedRequest {
            compiled: self,
            route_id,
            route,
            rules: self.rules_of(route),
            attributes: RequestAttributes {
                address: view.address,
                connection: view.connection,
                host: view.host,
                method: view.method,
                path: view.path,
                params,
                uri: view.uri,
                headers: view.headers,
                route: self.route_name(route_id),
                tokens,
                wall_ms: self.config.jwt.as_ref().map_or(0, |_| wall_ms()),
                body: view.body,
            },
            clients: ClientLookup::new(clients),
            is_secure: view.is_secure,
        })
    }
}

impl<'a> ResolvedRequest<'a> {
    /// Sets the client of the request; `None`: an unknown client.
    pub fn with_client(self, client: Option<&'a KnownClient>) -> ResolvedRequest<'a> {
        ResolvedRequest { clients: ClientLookup::known(self.clients.plans, client), ..self }
    }

    /// The actions of the route.
    pub fn actions(&self) -> Option<&'a RouteActions> {
        self.compiled.actions_of(self.route)
    }

    /// The variables of the route's templates.
    pub fn variables(&self) -> TemplateVariables<'_, 'a> {
        TemplateVariables { request: &self.attributes, clients: &self.clients, is_secure: self.is_secure }
    }

    /// Checks that the route takes the protocol of the request and the size of its body, which has at least `body_bytes`.
    #[inline]
    pub fn check(&self, validated: &ValidatedRequest<'_>, body_bytes: u64) -> Result<(), RequestError> {
        let config = &self.compiled.config;
        if validated.websocket == Some(UpgradeMethod::ExtendedConnect) && !config.routes[self.route_id].websocket {
            return Err(RequestError::WEBSOCKET_NOT_SERVED);
        }
        // A body that is known to be too large is refused before anything is charged or read.
        match self.compiled.max_body_bytes(self.actions()) {
            Some(max_bytes) if body_bytes > max_bytes => Err(RequestError::BodyTooLarge(max_bytes)),
            _ => Ok(()),
        }
    }

    /// Why the request is denied, if it is, by these deny entries or the allow list of its route.
    pub fn denial<'d>(
        &self,
        access: &AccessControl,
        deny: &'d DenyList,
        now_ms: u64,
    ) -> Result<Option<Denial<'d>>, RequestError> {
        access.denial(deny, self.route_id, (&self.attributes, &self.clients), now_ms)
    }

    /// Finds the key of each rule, and calls `found` with it. Returns the first error; rules whose keys were found are charged
    /// nevertheless.
    #[inline]
    pub fn find_keys(
        &self,
        inputs: &mut DecisionInputs,
        found: impl FnMut(PlanPosition, &FoundKey),
    ) -> Option<RequestError> {
        self.find_keys_of(|_position| true, inputs, found)
    }

    /// As [`ResolvedRequest::find_keys`], of the rules that do not depend on the body.
    pub fn find_keys_without_body(
        &self,
        inputs: &mut DecisionInputs,
        found: impl FnMut(PlanPosition, &FoundKey),
    ) -> Option<RequestError> {
        self.find_keys_of(|position| !self.rules.body_rules.contains(&position), inputs, found)
    }

    #[inline(always)]
    fn find_keys_of(
        &self,
        is_included: impl Fn(PlanPosition) -> bool,
        inputs: &mut DecisionInputs,
        mut found: impl FnMut(PlanPosition, &FoundKey),
    ) -> Option<RequestError> {
        let mut first_error = None;
        inputs.clear();
        for (position, rule_key) in self.rules.rule_keys.enumerate() {
            if !is_included(position) {
                inputs.push(Err(NotCounted::Skipped));
                continue;
            }
            let key = rule_key.keyed_request(&self.attributes, &self.clients);
            found(position, &key);
            inputs.push(match key {
                Ok(found) => found,
                // A shadow rule never refuses, also not for a missing key.
                Err(_) if self.rules.charge_plan.is_shadow(position) => Err(NotCounted::Failed),
                Err(KeyFailure { error, keyed_request }) => {
                    first_error.get_or_insert(error);
                    keyed_request.ok_or(NotCounted::Failed)
                }
            });
        }
        first_error
    }

    /// The key of the request in the shared store under the rule at a position; `None` if the rule is not shared or does not
    /// apply.
    pub fn store_key(&self, position: PlanPosition) -> Option<Rc<str>> {
        let rule = &self.rules.charge_plan.rule(position).rule;
        let digester = self.compiled.digester.as_ref().filter(|_| rule.is_shared())?;
        let mut text = String::new();
        let rule_key = &self.rules.rule_keys[position];
        rule_key.write_store_key(&self.attributes, &self.clients, digester, &mut text).then(|| text.into())
    }

    /// [`ResolvedRequest::store_key`] for all rules.
    pub fn store_keys(&self) -> StoreKeys {
        self.rules.charge_plan.rules().ids().map(|position| self.store_key(position)).collect()
    }

    /// The key under the rule at a position, with digests of its secrets.
    pub fn describe_key(&self, position: PlanPosition, digester: &KeyDigester) -> KeyDescription {
        self.rules.rule_keys[position].describe(&self.attributes, &self.clients, digester)
    }
}
