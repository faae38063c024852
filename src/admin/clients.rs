//! `GET /v1/clients` and `GET /v1/clients/NAME`: the clients, and how much of its limits each has used.

use http::Response;
use serde_json::{Map, Value, json};

use super::decision_json::{render_concurrency, render_window};
use super::endpoints::{Call, json_response, with_body};
use super::{AdminBody, AdminState, DecisionApi, client_changes, decisions, top_query};
use crate::decision::{DecisionQuery, Operation, QueryKey, RuleQuery};
use transom_config::key_kind::CLIENT;
use transom_http::error::ApiError;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;
use transom_rules::responses::LocalResponse;

/// `GET /v1/clients`.
pub fn list(call: &Call) -> Result<LocalResponse, ApiError> {
    Ok(json_response(&json!({ "clients": describe_all(&*call.decision_api()?) })))
}

/// `GET /v1/clients/{name}`.
pub async fn show(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (decision_api, name) = (call.decision_api()?, call.path_value(0));
    let mut response = json_response(&client_with_usage(&call.state, &decision_api, name).await?);
    let client = call.state.client_store.read(&decision_api, name);
    client.iter().for_each(|client| client_changes::insert_tag(&mut response, client));
    Ok(with_body(response))
}

fn describe_all(decision_api: &DecisionApi) -> Vec<Value> {
    let served = &decision_api.served;
    let (Some(configured), Some(plans)) = (&served.config.clients, served.decision_service.clients()) else {
        return Vec::new();
    };
    let mut clients: Vec<_> = plans.iter().collect();
    clients.sort_unstable_by_key(|client| client.number);
    clients.into_iter().map(|client| describe_client(configured, client, Digest::brief)).collect()
}

async fn client_with_usage(state: &AdminState, decision_api: &DecisionApi, name: &str) -> Result<Value, ApiError> {
    let served = &decision_api.served;
    let client = served.decision_service.client_named(name)?;
    let Some(clients) = &served.config.clients else { return Ok(Value::Null) };
    let mut described = describe_client(clients, &client, Digest::brief);
    let mut rules = Vec::new();
    for rule in served.config.rules.iter().filter(|rule| rule.counts_clients()) {
        let key: Vec<String> = rule.key.iter().map(KeyPart::to_string).collect();
        let usage = match rule.key.as_slice() {
            [part] if CLIENT.has(part) => usage(state, decision_api, &rule.name, name).await?,
            // There is a counter for each value of the other parts.
            _ => Map::new(),
        };
        rules.push(json!({ "rule": rule.name, "key": key, "shadow": rule.is_shadow() }));
        rules.last_mut().and_then(Value::as_object_mut).into_iter().for_each(|fields| fields.extend(usage.clone()));
    }
    described["rules"] = json!(rules);
    described["refused"] = match served.config.admin.top_keys {
        0 => Value::Null,
        _ => top_query::refusals_of(state, served, name).await,
    };
    Ok(described)
}

/// How much a client has used of the windows of a rule by client.
async fn usage(
    state: &AdminState,
    decision_api: &DecisionApi,
    rule: &str,
    client: &str,
) -> Result<Map<String, Value>, ApiError> {
    let key = QueryKey::Values(vec![client.to_owned()]);
    let rules = vec![RuleQuery { rule: rule.to_owned(), key, cost: None }];
    let query = DecisionQuery { operation: Operation::Value, rules, reserve: false };
    let outcome = decisions::run(state, decision_api, &query).await?;
    let windows = outcome.windows.iter().map(|window| {
        let mut fields = render_window(window, outcome.now_ms);
        fields.insert("name".to_owned(), json!(window.name));
        Value::Object(fields)
    });
    let mut fields = Map::new();
    fields.insert("windows".to_owned(), windows.collect());
    if outcome.is_exempt {
        fields.insert("exempt".to_owned(), json!(true));
    }
    if !outcome.concurrent.is_empty() {
        fields.insert("concurrent".to_owned(), outcome.concurrent.iter().map(render_concurrency).collect());
    }
    Ok(fields)
}
