//! `PUT` and `DELETE /v1/clients/{name}/limits/{rule}`: windows of a client in one rule, instead of those of its plan.

use http::Response;
use serde_json::Value;

use super::AdminBody;
use super::client_changes::{change, changed_client};
use super::client_store::Edit;
use super::endpoints::{Call, with_body};
use super::json_objects::CLIENT_LIMITS;
use super::json_schema::parse_object;
use transom_config::client_limits::ClientLimits;
use transom_config::clients::Client;
use transom_http::error::ApiError;
use transom_rules::responses;

/// `PUT`: replaces the limits in one rule.
pub async fn put(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (given, rule) = (parse_object(&call.body, "the body")?, call.path_value("rule").to_owned());
    CLIENT_LIMITS.check_names(&given)?;
    let limits = ClientLimits::from_json(&rule, &Value::Object(given)).map_err(ApiError::Malformed)?;
    let served = call.decision_api()?.served.clone();
    let rules = served.config.rules.iter();
    if !rules.clone().any(|known| known.name == rule) {
        return Err(ApiError::UnknownRule(rule));
    }
    let checked = limits.check(rules);
    checked.map_err(|(message, fix)| ApiError::Rejected(format!("{message}: {fix}")))?;
    let (name, now_ms) = (call.path_value("name").to_owned(), call.state.clock.wall_ms());
    if limits.has_ended(now_ms) {
        return Err(ApiError::Rejected("`until` is in the past".to_owned()));
    }
    let edit: Edit = Box::new(move |known| {
        let mut client = known.cloned().ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        keep_others(&mut client, &rule, now_ms);
        let position = client.limits.partition_point(|other| other.rule < rule);
        client.limits.insert(position, limits.clone());
        Ok(Some(client))
    });
    let rule = call.path_value("rule").to_owned();
    let changed = change(&call, "set limits", Some(("rule", rule)), edit).await?;
    Ok(with_body(changed_client(&call, &changed).await?))
}

/// `DELETE`: the plan of the client applies again.
pub async fn delete(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (name, rule, now_ms) =
        (call.path_value("name").to_owned(), call.path_value("rule").to_owned(), call.state.clock.wall_ms());
    let edit: Edit = Box::new(move |known| {
        let mut client = known.cloned().ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        let has_rule = client.limits.iter().any(|limits| limits.rule == rule);
        keep_others(&mut client, &rule, now_ms);
        if has_rule { Ok(Some(client)) } else { Err(ApiError::UnknownLimits) }
    });
    let rule = call.path_value("rule").to_owned();
    change(&call, "remove limits", Some(("rule", rule)), edit).await?;
    Ok(with_body(responses::no_content_response()))
}

/// Removes the limits in a rule, and those in other rules that have ended.
fn keep_others(client: &mut Client, rule: &str, now_ms: u64) {
    client.limits.retain(|limits| limits.rule != rule && !limits.has_ended(now_ms));
}
