//! The decision API: `POST /v1/limit`, `/v1/check`, `/v1/reset`, `/v1/value` and `/v1/explain`.

use http::Response;
use serde_json::{Value, json};

use super::endpoints::{Call, json_response, with_body};
use super::json_schema::parse_object;
use super::{AdminBody, AdminState, DecisionApi, decision_json, top_query};
use crate::decision::{DecisionOutcome, DecisionOutputs, DecisionQuery, Operation, QueryKey, RuleQuery};
use crate::explain;
use crate::explain::question::Question;
use transom_http::error::ApiError;
use transom_rules::responses;

pub async fn decide(call: Call, operation: Operation) -> Result<Response<AdminBody>, ApiError> {
    let (state, decision_api) = (&call.state, call.decision_api()?);
    let (mut query, id) = decision_json::parse(operation, &call.body)?;
    if let (Some(id), [RuleQuery { rule, key, .. }]) = (id, &mut query.rules[..]) {
        *key = QueryKey::Listed(top_query::find(state, &decision_api.served, rule, id).await?);
    }
    decision_api.served.decision_service.name_clients(&mut query)?;
    let outcome = match operation {
        Operation::Reset => reset(&call, &decision_api, &query).await?,
        Operation::Limit | Operation::Check | Operation::Value => run(state, &decision_api, &query).await?,
    };
    Ok(with_body(json_response(&decision_json::render(&query, &outcome))))
}

/// Runs a query.
pub async fn run(
    state: &AdminState,
    DecisionApi { served, metrics, marks, .. }: &DecisionApi,
    query: &DecisionQuery,
) -> Result<DecisionOutcome, ApiError> {
    let (top_keys, readable_digester) = (&*state.top_keys(served), &*served.readable_digester);
    let outputs = DecisionOutputs { metrics, top_keys, marks: marks.as_ref(), readable_digester };
    // Boxed, because the compiler limits the depth of nested futures.
    Box::pin(served.decision_service.decide(query, &state.counter_access, outputs)).await
}

/// Forgets the keys of a query, and records it in the audit log.
async fn reset(call: &Call, decision_api: &DecisionApi, query: &DecisionQuery) -> Result<DecisionOutcome, ApiError> {
    let (state, change) = (&call.state, call.begin_change()?);
    if !change.is_kept() {
        return run(state, decision_api, query).await;
    }
    let served = &decision_api.served;
    let keys = served.decision_service.describe_keys(query, &served.readable_digester)?;
    let usage = |outcome: &DecisionOutcome| -> Value {
        let windows = outcome.windows.iter();
        windows.map(|window| json!({ "rule": window.rule, "name": window.name, "count": window.used })).collect()
    };
    let before = run(state, decision_api, &DecisionQuery { operation: Operation::Value, ..query.clone() }).await?;
    let outcome = run(state, decision_api, query).await?;
    change.write(&json!({ "operation": "reset", "keys": keys }), &usage(&before), &usage(&outcome));
    Ok(outcome)
}

/// `POST /v1/explain`: JSON, or the text that `transom explain` prints.
pub async fn explain(call: Call) -> Result<Response<AdminBody>, ApiError> {
    parse_object(&call.body, "the question")?;
    let question = Question::from_json(&call.body).map_err(ApiError::Malformed)?;
    let served = &call.decision_api()?.served;
    let explanation = explain::explain(served, &question, &call.state.counter_access, true).await?;
    Ok(with_body(match call.wants_text() {
        true => responses::text_response(explanation.to_string()),
        false => json_response(&explanation.to_json()),
    }))
}
