//! `GET /v1/clients` and `GET /v1/clients/NAME`: the clients, and how much of its limits each has used.

use http::Uri;
use serde_json::{Map, Value, json};

use super::decision_json::{render_concurrency, render_window};
use super::{AdminState, DecisionApi, top_query};
use crate::decision::{DecisionOutputs, DecisionQuery, Operation, QueryKey, RuleQuery};
use transom_config::key_kind::CLIENT;
use transom_http::error::DecisionError;
use transom_limiter::handles::Handle as _;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;
use transom_rules::responses::{self, LocalResponse};

/// The name of a client in a path.
pub fn name_in(path: &str) -> Option<&str> {
    path.strip_prefix("/v1/clients/").filter(|name| !name.is_empty())
}

pub async fn response(state: &AdminState, uri: &Uri) -> LocalResponse {
    let decision_api = state.decision_api.borrow().clone();
    let Some(decision_api) = decision_api else { return responses::not_ready_response(String::from("starting\n")) };
    let found = match name_in(uri.path()) {
        None => Ok(json!({ "clients": describe_all(&decision_api) })),
        Some(name) => client_with_usage(state, &decision_api, name).await,
    };
    match found {
        Ok(found) => responses::json_response(format!("{found}\n")),
        Err(error) => responses::decision_error_response(&error),
    }
}

fn describe_all(decision_api: &DecisionApi) -> Vec<Value> {
    let clients = decision_api.served.config.clients.iter();
    clients
        .flat_map(|clients| clients.list.iter().map(|client| describe_client(clients, client, Digest::brief)))
        .collect()
}

async fn client_with_usage(state: &AdminState, decision_api: &DecisionApi, name: &str) -> Result<Value, DecisionError> {
    let served = &decision_api.served;
    let position = served.decision_service.client_named(name)?;
    let Some(clients) = &served.config.clients else { return Ok(Value::Null) };
    let mut described = describe_client(clients, &clients.list[position.index()], Digest::brief);
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
    DecisionApi { served, metrics, .. }: &DecisionApi,
    rule: &str,
    client: &str,
) -> Result<Map<String, Value>, DecisionError> {
    let key = QueryKey::Values(vec![client.to_owned()]);
    let rules = vec![RuleQuery { rule: rule.to_owned(), key, cost: None }];
    let query = DecisionQuery { operation: Operation::Value, rules, reserve: false };
    let (top_keys, readable_digester) = (&*state.top_keys(served), &*served.readable_digester);
    let outputs = DecisionOutputs { metrics, top_keys, marks: None, readable_digester };
    let outcome = served.decision_service.decide(&query, &state.counter_access, outputs).await?;
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
