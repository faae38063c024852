//! Explains what a request would get: its route, the key and the windows under each rule, the decision and the reason. It
//! takes the steps of `proxy::handler` with the same code, but only reads counters, so that a question consumes nothing.

pub mod question;
mod route_choice;
pub mod rule_state;
mod text;

use std::sync::Arc;

use http::header::{HOST, HeaderMap};
use serde_json::{Value, json};

use self::question::Question;
use self::route_choice::RouteChoice;
use self::rule_state::{RuleResult, RuleState, error_text};
use crate::proxy::body_reading::read_values;
use crate::proxy::include_usage::{asking_for_usage, sets_include_usage};
use crate::proxy::served_config::ServedConfig;
use transom_config::Config;
use transom_config::access::rfc3339;
use transom_config::diagnostics::quoted;
use transom_http::client_address::ClientAddress;
use transom_http::error::{ApiError, RequestError};
use transom_http::request_validation::Schemes;
use transom_http::{path_normalize, request_validation};
use transom_jwt::published_keys::PublishedKeys;
use transom_limiter::decision_context::DecisionInputs;
use transom_limiter::handles::{IdVec, PlanPosition};
use transom_limiter::key::Seed;
use transom_limiter::rule_set::RuleSet;
use transom_limiter::table::Table;
use transom_rules::access::Denial;
use transom_rules::client_plans::KnownClient;
use transom_rules::compiled_config::LiveData;
use transom_rules::compiled_config::RouteRules;
use transom_rules::key_source::ConnectionValues;
use transom_rules::ratelimit_headers::seconds_until;
use transom_rules::resolved_request::{RequestView, ResolvedRequest};
use transom_runtime::clock::Clock;
use transom_store::counter_access::CounterAccess;
use transom_store::shared_counters::SharedByWorkers;
use transom_usage::request_body::{BodyPlan, BodyValues};

/// The answer to a question.
#[derive(Debug)]
pub struct Explanation {
    is_live: bool,
    method: String,
    is_secure: bool,
    host: String,
    /// The host with its port, as the request names it.
    authority: String,
    /// Normalized, if possible.
    path: String,
    /// The address of the client, as found behind trusted proxies.
    client_address: ClientAddress,
    /// The name and the plan of the client.
    client: Option<(String, String)>,
    /// What the routes make of the request; `None` if the request is invalid.
    routes: Option<RouteChoice>,
    rules: IdVec<PlanPosition, RuleState>,
    /// The id of the deny entry, or `allow`.
    denied_by: Option<String>,
    decision: Decision,
    reason: String,
    /// The time of the decision, Unix milliseconds.
    now_ms: u64,
}

/// What a request would get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Decision {
    /// With the status of the route's own response, if it has one.
    Admitted(Option<u16>),
    /// With the time at which the request proceeds, if it waits for a window, and the status of the route's own response.
    Delayed(Option<u64>, Option<u16>),
    /// With the status of the refusal, and the time to retry; `None`: never.
    Refused(u16, Option<u64>),
    /// A deny entry, or the allow list of the route, denies the request with this status.
    Denied(u16),
    /// An error, with its status.
    Error(u16),
}

/// Explains what a request would get from a running gateway.
/// `is_live`: `counters` are those of the gateway.
///
/// # Errors
///
/// The client of the question is unknown.
pub async fn explain(
    served: &ServedConfig,
    question: &Question,
    counters: &CounterAccess,
    is_live: bool,
) -> Result<Explanation, ApiError> {
    let named = question.as_client.as_ref().map(|name| served.decision_service.client_named(name));
    let as_client = named.transpose()?;
    let parts = &question.parts;
    let host_field = parts.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or(&question.authority);
    let mut explanation = Explanation {
        is_live,
        method: parts.method.to_string(),
        is_secure: question.is_secure,
        host: question.authority.clone(),
        authority: host_field.to_ascii_lowercase(),
        path: parts.uri.path().to_owned(),
        client_address: question.client,
        client: None,
        routes: None,
        rules: IdVec::new(),
        denied_by: None,
        decision: Decision::Admitted(None),
        reason: String::new(),
        now_ms: counters.clock.now().unix_ms,
    };
    if let Err(error) = explanation.decide(served, question, as_client.as_deref(), counters).await {
        explanation.decision = Decision::Error(error.status());
        explanation.reason = match (&error, &explanation.routes) {
            (RequestError::NoRoute, Some(routes)) => routes.reason.clone(),
            // The method is the only part that can be malformed here: a question has no other malformed part.
            (RequestError::Malformed, _) => format!(
                "the method `{}` is malformed: a method has up to 32 upper-case letters, digits, `-` and `_`",
                parts.method
            ),
            (RequestError::KeyUnknown(of) | RequestError::CredentialsMissing(of), _) => {
                format!("{} (rule `{}`)", error_text(&error), of.rule)
            }
            (error, _) => error.operator_message(),
        };
    }
    Ok(explanation)
}

/// Explains what a request would get from a gateway that starts with this configuration: all windows are empty.
///
/// # Errors
///
/// A message for the user.
pub async fn explain_without_gateway(config: Config, question: &Question) -> Result<Explanation, String> {
    let seed = Seed(fastrand::u64(..), fastrand::u64(..));
    let rule_set = RuleSet::new(config.limiter_rules(), seed, None);
    // Nothing is fetched: a token that needs the key set gets what it gets before the first fetch.
    let published_keys = config.key_set.as_ref().map(|_| Arc::new(PublishedKeys::new(|| {})));
    let clock = Clock::system();
    let live = LiveData { published_keys, now_ms: clock.wall_ms(), ..LiveData::default() };
    let served = ServedConfig::new(config, seed, rule_set, Vec::new(), live);
    let table = Table::with_capacity(1).ok_or("there is too little memory")?;
    let counters = CounterAccess::new(SharedByWorkers::new(Arc::new(table), clock), None);
    let explained = explain(&served, question, &counters, false).await;
    let name = question.as_client.as_deref().unwrap_or_default();
    explained.map_err(|_unknown| format!("unknown client `{name}`: `transom clients list` lists the clients"))
}

impl Explanation {
    /// Takes the steps of a request until it is decided, in the same order.
    async fn decide(
        &mut self,
        served: &ServedConfig,
        question: &Question,
        as_client: Option<&KnownClient>,
        counters: &CounterAccess,
    ) -> Result<(), RequestError> {
        let parts = &question.parts;
        let client = served.identify_client(question.client, question.is_secure, &parts.headers);
        (self.client_address, self.is_secure) = (client.address.to_canonical(), client.is_secure);
        let schemes = Schemes { is_connection_secure: question.is_secure, is_client_secure: client.is_secure };
        let validated = request_validation::validate(parts, schemes)?;
        self.host = validated.host.clone().into_owned();
        let path = path_normalize::normalize(parts.uri.path(), served.config.path_reading)?;
        self.path = path.clone().into_owned();
        let view = RequestView {
            address: client.address,
            connection: ConnectionValues::default(),
            is_secure: client.is_secure,
            host: &validated.host,
            method: &parts.method,
            path: &path,
            uri: &parts.uri,
            headers: &parts.headers,
            body: None,
        };
        self.routes = Some(RouteChoice::new(served, &view.route_query()));
        let body;
        let (mut params, tokens) = (Vec::new(), served.token_checker());
        let clients = served.decision_service.clients();
        let wall_ms = || counters.clock.wall_ms();
        let mut resolved = served.resolve(view, clients.as_deref(), &mut params, &tokens, wall_ms)?;
        if as_client.is_some() {
            resolved = resolved.with_client(as_client);
        }
        if let Some(client) = resolved.clients.reported_client(&resolved.attributes) {
            self.client = Some((client.name.clone(), client.plan.clone()));
        }
        if let Some(access) = &served.access
            && let Some(denial) = resolved.denial(access, &access.deny_list(), counters.clock.now().unix_ms)?
        {
            self.reason = denial_text(denial);
            (self.denied_by, self.decision) = (Some(denial.id()), Decision::Denied(RequestError::Denied.status()));
            return Ok(());
        }
        let body_bytes = body_bytes(&parts.headers).max(question.body.len() as u64);
        resolved.check(&validated, body_bytes)?;
        let rules = resolved.rules;
        let has_body = body_bytes > 0 && validated.websocket.is_none();
        let max_bytes = served.body_key_limit(resolved.actions());
        body = rules.body_plan.as_ref().filter(|_| has_body).map(|plan| match body_bytes {
            bytes if bytes > max_bytes as u64 => Err(RequestError::BodyTooLarge(max_bytes as u64)),
            _ => read_body(served, &resolved, plan, (question.body.as_bytes(), &parts.headers)),
        });
        resolved.attributes.body = body.as_ref().and_then(|body| body.as_ref().ok());
        let mut inputs = DecisionInputs::default();
        let mut error = resolved.find_keys(&mut inputs, |position, found| {
            let key = resolved.describe_key(position, &served.readable_digester);
            let sources = |variant| rules.rule_keys[position].reserve_sources(&resolved.attributes, variant);
            self.rules.push(RuleState::new(rules.charge_plan.rule(position), key, found, sources));
        });
        if let Some(Err(body_error)) = &body {
            self.leave_out(&rules.body_rules, "the body cannot be read");
            let _of_key = resolved.find_keys_without_body(&mut inputs, |_position, _found| ());
            error = Some(body_error.clone());
        }
        let error = match error {
            Some(error) if inputs.keyed_requests.iter().all(Option::is_none) => return Err(error),
            error => error,
        };
        let actions = resolved.actions().filter(|_| error.is_none());
        let actions = actions.map(|actions| actions.evaluate(&resolved.variables())).transpose()?;
        let mut unavailable = None;
        for (position, keyed_request) in inputs.keyed_requests.enumerate() {
            if let Some(keyed_request) = *keyed_request {
                let store_key = resolved.store_key(position);
                let rule = rules.charge_plan.rules()[position];
                let read = self.rules[position].read_counters(served, rule, keyed_request, store_key, counters).await;
                unavailable = unavailable.or(read.err());
            }
        }
        let refuses_alone =
            |rule: &RuleState| rule.result == RuleResult::Refuses && !rule.is_shadow && rule.refuses_without_store;
        if let Some(error) = unavailable.filter(|_| !self.rules.iter().any(refuses_alone)) {
            return Err(error);
        }
        if body.is_some() && rules.may_refuse_unread {
            let refuses = |(position, rule): (PlanPosition, &RuleState)| {
                !rules.body_rules.contains(&position) && !rule.is_shadow && rule.result == RuleResult::Refuses
            };
            if self.rules.enumerate().any(refuses) {
                self.leave_out(&rules.body_rules, "other rules refuse the request before its body is read");
            }
        }
        self.now_ms = counters.clock.now().unix_ms;
        let direct_response = actions.and_then(|actions| actions.direct_response).map(|reply| reply.status().as_u16());
        self.conclude(served, rules, error, direct_response)
    }

    fn leave_out(&mut self, body_rules: &[PlanPosition], reason: &str) {
        body_rules.iter().for_each(|position| self.rules[*position].leave_out(reason));
    }

    /// Combines the results of the rules: one refusal refuses the request.
    fn conclude(
        &mut self,
        served: &ServedConfig,
        rules: &RouteRules,
        error: Option<RequestError>,
        direct_response: Option<u16>,
    ) -> Result<(), RequestError> {
        let enforced = || self.rules.enumerate().filter(|(_, rule)| !rule.is_shadow);
        let reasons = |is: &dyn Fn(&RuleResult) -> bool| {
            let reasons = enforced().filter(|(_, rule)| is(&rule.result));
            reasons.map(|(_, rule)| format!("rule `{}`: {}", rule.name, rule.reason)).collect::<Vec<_>>().join("; ")
        };
        let refusals = reasons(&|result| *result == RuleResult::Refuses);
        if !refusals.is_empty() {
            let retry_at_ms = enforced().try_fold(self.now_ms, |latest, (_, rule)| Some(latest.max(rule.retry_at_ms?)));
            // Of several refusing rules, the one that blocks longest determines the response; the first of equals.
            let refusing = enforced().filter(|(_, rule)| rule.result == RuleResult::Refuses);
            let blocks_ms = |rule: &RuleState| rule.retry_at_ms.unwrap_or(u64::MAX);
            let longest = refusing.reduce(|one, other| if blocks_ms(other.1) > blocks_ms(one.1) { other } else { one });
            let status = longest
                .map(|(position, _)| served.refusal_templates[rules.charge_plan.rules()[position]].status().as_u16());
            (self.decision, self.reason) = (Decision::Refused(status.unwrap_or_default(), retry_at_ms), refusals);
            return Ok(());
        }
        if let Some(error) = error {
            return Err(error);
        }
        let delays = reasons(&|result| matches!(result, RuleResult::Delays(_)));
        if !delays.is_empty() {
            let until_ms = enforced().try_fold(self.now_ms, |latest, (_, rule)| match rule.result {
                RuleResult::Delays(until_ms) => Some(latest.max(until_ms?)),
                _ => Some(latest),
            });
            (self.decision, self.reason) = (Decision::Delayed(until_ms, direct_response), delays);
            return Ok(());
        }
        let counted = enforced().any(|(_, rule)| rule.result == RuleResult::Admits);
        self.decision = Decision::Admitted(direct_response);
        self.reason = String::from(match () {
            () if self.rules.is_empty() => "the route has no rules",
            () if counted => "every rule that applies has room",
            () if enforced().next().is_none() => "the route has shadow rules only",
            () => "no rule counts the request",
        });
        Ok(())
    }

    fn decision_name(&self) -> &'static str {
        match self.decision {
            Decision::Admitted(_) => "admitted",
            Decision::Delayed(..) => "delayed",
            Decision::Refused(..) => "refused",
            Decision::Denied(_) => "denied",
            Decision::Error(_) => "error",
        }
    }

    /// The status of the response, if the gateway responds itself.
    fn status(&self) -> Option<u16> {
        match self.decision {
            Decision::Admitted(status) | Decision::Delayed(_, status) => status,
            Decision::Refused(status, _) | Decision::Denied(status) | Decision::Error(status) => Some(status),
        }
    }

    /// When to retry, or when the delayed request proceeds: seconds, rounded up.
    fn retry_after_s(&self) -> Option<u64> {
        match self.decision {
            Decision::Admitted(_) => Some(0),
            Decision::Delayed(until_ms, _) => until_ms.map(|until_ms| seconds_until(until_ms, self.now_ms)),
            Decision::Refused(_, retry_at_ms) => {
                retry_at_ms.map(|retry_at_ms| seconds_until(retry_at_ms, self.now_ms).max(1))
            }
            Decision::Denied(_) | Decision::Error(_) => None,
        }
    }

    /// The response of `POST /v1/explain`.
    pub fn to_json(&self) -> Value {
        let client = self.client.as_ref().map(|(name, plan)| json!({ "name": name, "plan": plan }));
        json!({
            "decision": self.decision_name(),
            "status": self.status(),
            "reason": self.reason,
            "retry_after": self.retry_after_s(),
            "live": self.is_live,
            "request": {
                "method": self.method, "scheme": self.scheme(), "host": self.host, "path": self.path,
                "client": self.client_address.to_string(),
            },
            "client": client,
            "denied_by": self.denied_by,
            "route": self.routes.as_ref().and_then(RouteChoice::chosen_json),
            "other_routes": self.routes.as_ref().map_or_else(Vec::new, RouteChoice::others_json),
            "rules": self.rules.iter().map(|rule| rule.to_json(self.now_ms)).collect::<Vec<_>>(),
        })
    }

    fn scheme(&self) -> &'static str {
        if self.is_secure { "https" } else { "http" }
    }
}

/// What rules read of a body; an error where the gateway refuses it.
fn read_body(
    served: &ServedConfig,
    resolved: &ResolvedRequest<'_>,
    plan: &Arc<BodyPlan>,
    (body, headers): (&[u8], &HeaderMap),
) -> Result<BodyValues, RequestError> {
    let (values, text) = read_values(plan, body, headers, served.body_key_limit(resolved.actions()))?;
    let actions = served.config.routes[resolved.route_id].actions.as_deref();
    if sets_include_usage(actions, resolved.attributes.path) {
        asking_for_usage(&text, &values)?;
    }
    Ok(values)
}

/// Why a request is denied, for operators.
fn denial_text(denial: Denial<'_>) -> String {
    let Denial::Entry(entry) = denial else {
        return String::from("neither the address nor the client is on the allow list of the route");
    };
    let until = entry.until_ms.map(|until_ms| format!(" until {}", rfc3339(until_ms))).unwrap_or_default();
    let reason = entry.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    format!("deny entry {} denies {}{until}{reason}", entry.id, quoted(&entry.target.to_string()))
}

/// The size of the body, as far as the head tells. `request_validation` has checked the field.
fn body_bytes(headers: &HeaderMap) -> u64 {
    let length = headers.get(http::header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    length.unwrap_or(0)
}
