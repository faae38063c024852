//! `POST /v1/clients/{name}/grants`: adds tokens once to the current window of a client in one rule.
//!
//! A repeated request is known by its `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header), which is kept with the grant until
//! the window ends.

use http::Response;
use http::header::HeaderMap;
use serde_json::{Map, Value};

use super::client_changes::{change, changed_client};
use super::client_store::{Changed, Edit};
use super::endpoints::{Call, with_body};
use super::json_objects::NEW_GRANT;
use super::json_schema::parse_object;
use super::{AdminBody, decisions};
use crate::decision::{DecisionQuery, Operation, QueryKey, RuleQuery};
use transom_config::client_grants::{ClientGrant, check_window, find_window};
use transom_config::clients::{Client, ClientsSource};
use transom_config::key_kind::CLIENT;
use transom_config::rule::GatewayRule;
use transom_http::error::ApiError;
use transom_limiter::limit::Limit;
use transom_limiter::secret_digest::Digest;
use transom_limiter::window::Windows;

pub const IDEMPOTENCY_KEY: &str = "Idempotency-Key";
const KEY_MAX_BYTES: usize = 255;
/// Grants that a client can have at a time.
const GRANTS_MAX: usize = 100;

/// `POST`: adds a grant, unless it was added before.
pub async fn add(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let given = parse_object(&call.body, "the body")?;
    NEW_GRANT.check_names(&given)?;
    let idempotency_key = Digest::of(idempotency_key(&call.parts.headers)?.as_bytes());
    let (rule, window, tokens) = (text(&given, "rule")?, text(&given, "window")?, tokens(&given)?);
    let name = call.path_value("name").to_owned();
    let decision_api = call.decision_api()?;
    let served = &decision_api.served;
    let clients = served.config.clients.as_ref().ok_or(ApiError::NoClients)?;
    let rules = served.config.rules.iter();
    let configured = rules.clone().find(|known| known.name == rule);
    let configured = configured.ok_or_else(|| ApiError::UnknownRule(rule.clone()))?;
    let client = call.state.client_store.read(&decision_api, &name);
    let client = client.ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
    let layers = client.layers_without_grants(call.state.clock.wall_ms(), configured, rules);
    let layers = layers.map_err(|(message, _fix)| ApiError::Rejected(message))?;
    let limit = find_window(configured, &layers, &window).ok_or_else(|| ApiError::UnknownWindow {
        rule: rule.clone(),
        window,
        known: layers.iter().map(|layer| layer.period_text.clone()).collect(),
    })?;
    check_rule(configured, limit, &name, tokens)?;
    if !configured.is_shared()
        && matches!(limit.windows, Windows::FirstRequest { .. })
        && clients.source == ClientsSource::Shared
    {
        let reason =
            "each gateway has another window, by the first request: share the rule, or use windows without `start`";
        return Err(ApiError::Malformed(reason.to_owned()));
    }
    let now_ms = call.state.clock.now().unix_ms;
    let grant = |until_ms| ClientGrant {
        rule: rule.clone(),
        window: limit.period_text.clone(),
        tokens,
        until_ms,
        idempotency_key,
    };
    // The end of the window is not known yet.
    if let Some(made) = made_before(&client, &grant(u64::MAX), now_ms) {
        made?;
        let changed = Changed { before: None, after: Some(client) };
        return Ok(with_body(changed_client(&call, &changed).await?));
    }
    let until_ms = window_end_ms(&call, configured, &configured.layer_name(&layers, limit)).await?;
    let (grant, total_max, clock) = (grant(until_ms), u32::MAX - limit.tokens, call.state.clock.clone());
    let edit: Edit = Box::new(move |known| {
        let mut client = known.cloned().ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        let now_ms = clock.now().unix_ms;
        if let Some(made) = made_before(&client, &grant, now_ms) {
            return made.map(|()| Some(client));
        }
        if grant.until_ms <= now_ms {
            return Err(ApiError::Conflict("the window has ended meanwhile".to_owned()));
        }
        client.grants.retain(|known| known.is_kept(now_ms));
        client.grants.push(grant.clone());
        let is_same = |known: &&ClientGrant| known.rule == grant.rule && known.window == grant.window;
        let total: u64 = client.grants.iter().filter(is_same).map(|known| u64::from(known.tokens)).sum();
        match () {
            () if client.grants.len() > GRANTS_MAX => {
                Err(ApiError::Conflict(format!("the client has {GRANTS_MAX} grants already: wait until one ends")))
            }
            () if total > total_max.into() => {
                Err(ApiError::Rejected(format!("the window would have more than {} tokens", u32::MAX)))
            }
            () => Ok(Some(client)),
        }
    });
    let changed = change(&call, "grant", Some(("rule", rule)), edit).await?;
    Ok(with_body(changed_client(&call, &changed).await?))
}

/// Whether the client has a grant by the key of this one, for a window that has not ended, also by the clock of the store; an error if
/// that was another request.
fn made_before(client: &Client, grant: &ClientGrant, now_ms: u64) -> Option<Result<(), ApiError>> {
    let is_known = |known: &&ClientGrant| {
        known.idempotency_key == grant.idempotency_key && (now_ms < known.until_ms || grant.until_ms <= known.until_ms)
    };
    let known = client.grants.iter().find(is_known)?;
    let content = |grant: &ClientGrant| (grant.rule.clone(), grant.window.clone(), grant.tokens);
    Some(match content(known) == content(grant) {
        true => Ok(()),
        false => Err(ApiError::Rejected(format!("`{IDEMPOTENCY_KEY}` was used for another grant: use a new one"))),
    })
}

/// The key of the request: a string of structured fields, as the draft says, or a plain word, as many clients send it.
fn idempotency_key(fields: &HeaderMap) -> Result<String, ApiError> {
    let malformed = |reason: &str| ApiError::Malformed(format!("the field `{IDEMPOTENCY_KEY}` {reason}"));
    let mut values = fields.get_all(IDEMPOTENCY_KEY).iter();
    let value = match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().map_err(|_other| malformed("has bytes other than visible ASCII"))?,
        (None, _) => return Err(malformed("is missing: send a new value for each grant, such as a UUID")),
        (Some(_), Some(_)) => return Err(malformed("is given twice")),
    };
    let quoted = value.strip_prefix('"').map(|rest| rest.strip_suffix('"').ok_or_else(|| malformed("lacks a quote")));
    let key = quoted.transpose()?.unwrap_or(value);
    match key.len() {
        1..=KEY_MAX_BYTES => Ok(key.to_owned()),
        0 => Err(malformed("is empty")),
        _ => Err(malformed(&format!("has more than {KEY_MAX_BYTES} bytes"))),
    }
}

fn text(given: &Map<String, Value>, member: &str) -> Result<String, ApiError> {
    let text = given.get(member).and_then(Value::as_str);
    text.map(str::to_owned).ok_or_else(|| ApiError::Malformed(format!("`{member}` is not a text")))
}

fn tokens(given: &Map<String, Value>) -> Result<u32, ApiError> {
    let tokens = given.get("tokens").and_then(Value::as_u64).and_then(|tokens| u32::try_from(tokens).ok());
    let malformed = || ApiError::Malformed(format!("`tokens` is not a number from 1 to {}", u32::MAX));
    tokens.filter(|tokens| *tokens > 0).ok_or_else(malformed)
}

/// Checks whether the client can have more tokens in a window of the rule.
fn check_rule(rule: &GatewayRule, limit: &Limit, client: &str, tokens: u32) -> Result<(), ApiError> {
    let is_by_client = matches!(rule.key.as_slice(), [part] if CLIENT.has(part));
    if !is_by_client {
        let reason = format!("rule `{}` does not count by `client` alone: it has no counter of the client", rule.name);
        return Err(ApiError::Malformed(reason));
    }
    let name = Digest::of(client.as_bytes());
    if rule.overrides.iter().any(|other| other.key.iter().all(|value| value.digest() == name)) {
        let reason = format!("an override of rule `{}` applies to the client instead of its limits", rule.name);
        return Err(ApiError::Malformed(reason));
    }
    check_window(rule, limit, tokens).map_err(ApiError::Malformed)
}

/// The end of the current window of the client, Unix milliseconds.
async fn window_end_ms(call: &Call, rule: &GatewayRule, window: &str) -> Result<u64, ApiError> {
    let key = QueryKey::Values(vec![call.path_value("name").to_owned()]);
    let rules = vec![RuleQuery { rule: rule.name.clone(), key, cost: None }];
    let query = DecisionQuery { operation: Operation::Value, rules, reserve: false };
    let outcome = decisions::run(&call.state, &*call.decision_api()?, &query).await?;
    if outcome.is_store_unreachable {
        return Err(ApiError::StoreUnavailable);
    }
    let found = outcome.windows.iter().find(|state| state.name == window);
    let state = found.ok_or_else(|| ApiError::Malformed(format!("rule `{}` does not count the client", rule.name)))?;
    match state.kind.is_opened_by_requests() && state.used == 0 {
        true => Err(ApiError::Conflict("no window of the client is open: its next request opens one".to_owned())),
        false => Ok(state.end_ms),
    }
}
