//! `GET /v1/clients` and `GET /v1/clients/NAME`: the clients, and how much of its limits each has used.

use std::ops::Bound;

use http::Response;
use serde_json::{Map, Value, json};

use super::decision_json::{render_concurrency, render_window};
use super::endpoints::{Call, json_response, with_body};
use super::{AdminBody, AdminState, DecisionApi, client_changes, decisions, top_query};
use crate::decision::{DecisionQuery, Operation, QueryKey, RuleQuery};
use transom_config::Config;
use transom_config::clients::{Client, Clients};
use transom_config::key_kind::CLIENT;
use transom_http::error::ApiError;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;
use transom_rules::responses::LocalResponse;

/// Clients that one request looks at. A page of a search may have fewer items than asked for, or none, and still a `next`.
const SEARCHED_MAX: usize = 10_000;
/// Names that are read at once from the data of the store while changes wait.
const NAMES: usize = 1000;

/// `GET /v1/clients`.
pub fn list(call: &Call) -> Result<LocalResponse, ApiError> {
    let decision_api = call.decision_api()?;
    let (limit, mut after) = call.page()?;
    let (search, plan) = (call.parameter("search")?.unwrap_or_default().to_lowercase(), call.parameter("plan")?);
    let words: Vec<&str> = search.split_whitespace().collect();
    let now_ms = call.state.clock.wall_ms();
    let served = &decision_api.served;
    let (Some(configured), Some(plans)) = (&served.config.clients, served.decision_service.clients()) else {
        return Ok(json_response(&json!({ "clients": [], "next": null, "total": 0 })));
    };
    let (mut found, mut searched) = (Vec::new(), 0);
    while found.len() < limit && searched < SEARCHED_MAX {
        let names = names_after(&decision_api, after.as_deref(), NAMES);
        if names.is_empty() {
            break;
        }
        for name in names {
            if found.len() < limit {
                let known = plans.named(&name).map(|client| described(&served.config, configured, client, now_ms));
                let described = known.or_else(|| without_effect(&decision_api, &name));
                let described = described.filter(|client| plan.as_ref().is_none_or(|plan| client["plan"] == *plan));
                found.extend(described.filter(|client| has_words(client, &words)));
                searched += 1;
                after = Some(name);
            }
        }
    }
    let next = after.filter(|after| !names_after(&decision_api, Some(after), 1).is_empty());
    let total = decision_api.shared_clients.as_ref().map_or(plans.len(), |shared| shared.map.lock().entries.len());
    Ok(json_response(&json!({ "clients": found, "next": next, "total": total })))
}

fn described(config: &Config, clients: &Clients, client: &Client, now_ms: u64) -> Value {
    let mut described = describe_client(clients, client, Digest::brief);
    client_changes::describe_effect(&mut described, config, client, now_ms);
    described
}

/// Whether each word, which is in lower case, is in the name, plan, subjects or networks of a described client.
pub fn has_words(client: &Value, words: &[&str]) -> bool {
    let lists = ["subjects", "networks"].into_iter().flat_map(|list| client[list].as_array().into_iter().flatten());
    let texts = [&client["name"], &client["plan"]].into_iter().chain(lists).filter_map(Value::as_str);
    let text = texts.collect::<Vec<_>>().join("\n").to_lowercase();
    words.iter().all(|word| text.contains(word))
}

/// The names of some clients, sorted.
fn names_after(decision_api: &DecisionApi, after: Option<&str>, count: usize) -> Vec<String> {
    if let Some(shared) = &decision_api.shared_clients {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = shared.map.lock();
        return entries
            .entries
            .range::<str, _>((after, Bound::Unbounded))
            .take(count)
            .map(|(name, _)| name.to_string())
            .collect();
    }
    let clients = decision_api.served.config.clients.iter().map(|clients| &clients.list[..]).next().unwrap_or_default();
    let first = after.map_or(0, |after| clients.partition_point(|client| client.name.as_str() <= after));
    clients[first..].iter().take(count).map(|client| client.name.clone()).collect()
}

/// A client in the store that this gateway does not know, with the reason.
fn without_effect(decision_api: &DecisionApi, name: &str) -> Option<Value> {
    let configured = decision_api.served.config.clients.as_ref()?;
    let entry = decision_api.shared_clients.as_ref()?.map.get(name)?;
    let (mut described, reason) = match Client::from_json(name, &entry.text) {
        Ok(client) => {
            let reason = format!("no rule of this gateway defines its plan `{}`", client.plan);
            (describe_client(configured, &client, Digest::brief), reason)
        }
        Err(reason) => {
            let nothing = json!({ "name": name, "plan": "", "keys": [], "subjects": [], "networks": [] });
            (nothing, format!("this gateway cannot read the client: {reason}"))
        }
    };
    described["without_effect"] = json!(reason);
    Some(described)
}

/// `GET /v1/clients/{name}`.
pub async fn show(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (decision_api, name) = (call.decision_api()?, call.path_value("name"));
    let described = match client_with_usage(&call.state, &decision_api, name).await {
        Err(ApiError::UnknownClient(unknown)) => {
            let mut client = without_effect(&decision_api, name).ok_or(ApiError::UnknownClient(unknown))?;
            (client["rules"], client["refused"]) = (json!([]), Value::Null);
            client
        }
        described => described?,
    };
    let mut response = json_response(&described);
    let client = call.state.client_store.read(&decision_api, name);
    client.iter().for_each(|client| client_changes::insert_tag(&mut response, client));
    Ok(with_body(response))
}

async fn client_with_usage(state: &AdminState, decision_api: &DecisionApi, name: &str) -> Result<Value, ApiError> {
    let served = &decision_api.served;
    let client = served.decision_service.client_named(name)?;
    let Some(clients) = &served.config.clients else { return Ok(Value::Null) };
    let mut described = described(&served.config, clients, &client, state.clock.wall_ms());
    let mut rules = Vec::new();
    for rule in served.config.rules.iter().filter(|rule| rule.counts_clients()) {
        let key: Vec<String> = rule.key.iter().map(KeyPart::to_string).collect();
        let usage = match rule.key.as_slice() {
            [part] if CLIENT.has(part) => match usage(state, decision_api, &rule.name, name).await {
                Err(ApiError::StoreUnavailable) => Map::from_iter([("store".to_owned(), json!("unreachable"))]),
                usage => usage?,
            },
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
    if outcome.is_store_unreachable {
        fields.insert("store".to_owned(), json!("unreachable"));
    }
    if outcome.is_exempt {
        fields.insert("exempt".to_owned(), json!(true));
    }
    if !outcome.concurrent.is_empty() {
        fields.insert("concurrent".to_owned(), outcome.concurrent.iter().map(render_concurrency).collect());
    }
    Ok(fields)
}
