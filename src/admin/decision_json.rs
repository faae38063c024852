//! Queries to the decision service, and their results, as JSON.

use serde_json::{Map, Value, json};

use super::json_objects::{QUERIED_RULE, RULE_QUERY, RULES_QUERY};
use super::json_schema::parse_object;
use crate::decision::{ConcurrencyState, DecisionOutcome, DecisionQuery, Operation, QueryKey, RuleQuery, WindowState};
use transom_http::error::ApiError;
use transom_rules::ratelimit_headers::seconds_until;

/// Rules of a query with several.
const RULES_MAX: usize = 64;

/// Parses the body of a query: `{"rule": …, "key": …, "cost": …, "reserve": …}`, or several rules at once,
/// `{"rules": [{"rule": …, "key": …, "cost": …}], "reserve": …}`. A `client` stands for its part of
/// the key. Of one rule, the query may have an `id` instead of the key: it is returned beside the query, which has no key then.
pub fn parse(operation: Operation, text: &[u8]) -> Result<(DecisionQuery, Option<u64>), ApiError> {
    let query = parse_object(text, "the query")?;
    let reserve = match query.get("reserve") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(reserve)) => *reserve,
        Some(_) => return Err(malformed("`reserve` is neither `true` nor `false`")),
    };
    let Some(rules) = query.get("rules") else {
        RULE_QUERY.check_names(&query)?;
        let id = parse_id(operation, &query)?;
        return Ok((DecisionQuery { operation, rules: vec![parse_rule(&query)?], reserve }, id));
    };
    if query.contains_key("rule") {
        return Err(malformed("`rule` and `rules` are both given: keep one of the two"));
    }
    RULES_QUERY.check_names(&query)?;
    let rules = rules.as_array().filter(|rules| (1..=RULES_MAX).contains(&rules.len()));
    let rules = rules.ok_or_else(|| malformed("`rules` is not a list of 1 to 64 objects"))?;
    let parse_entry = |entry: &Value| {
        let entry = entry.as_object().ok_or_else(|| malformed("`rules` is not a list of 1 to 64 objects"))?;
        QUERIED_RULE.check_names(entry)?;
        parse_rule(entry)
    };
    let rules = rules.iter().map(parse_entry).collect::<Result<_, _>>()?;
    Ok((DecisionQuery { operation, rules, reserve }, None))
}

fn malformed(reason: &str) -> ApiError {
    ApiError::Malformed(reason.to_owned())
}

/// The id of a key, as `/v1/top` lists it.
fn parse_id(operation: Operation, query: &Map<String, Value>) -> Result<Option<u64>, ApiError> {
    let given = |name: &str| query.get(name).filter(|value| !value.is_null());
    let Some(id) = given("id") else { return Ok(None) };
    if let Some(other) = ["key", "client"].into_iter().find(|name| given(name).is_some()) {
        return Err(ApiError::Malformed(format!("`{other}` and `id` are both given: keep one of the two")));
    }
    if operation == Operation::Limit {
        return Err(malformed("`/v1/limit` takes a `key`, not an `id`"));
    }
    let id = id.as_str().filter(|id| id.len() == 16 && !id.starts_with('+'));
    let id = id.and_then(|id| u64::from_str_radix(id, 16).ok());
    id.map(Some).ok_or_else(|| malformed("`id` is not one of `/v1/top`"))
}

fn parse_rule(object: &Map<String, Value>) -> Result<RuleQuery, ApiError> {
    let Some(Value::String(rule)) = object.get("rule") else { return Err(malformed("`rule` is not a string")) };
    let text = |value: &Value| match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        _ => None,
    };
    let key = match object.get("key") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(parts)) => parts.iter().map(text).collect(),
        Some(value) => text(value).map(|text| vec![text]),
    };
    let key = key.ok_or_else(|| malformed("`key` is neither a non-empty string nor a list of non-empty strings"))?;
    let cost = match object.get("cost") {
        None | Some(Value::Null) => None,
        Some(cost) => {
            let cost = cost.as_u64().and_then(|cost| u32::try_from(cost).ok());
            Some(cost.ok_or_else(|| malformed("`cost` is not a whole number from 0 to 4294967295"))?)
        }
    };
    let key = match object.get("client") {
        None | Some(Value::Null) => QueryKey::Values(key),
        Some(client) => {
            QueryKey::OfClient(text(client).ok_or_else(|| malformed("`client` is not the name of a client"))?, key)
        }
    };
    Ok(RuleQuery { rule: rule.clone(), key, cost })
}

/// The usage of a window.
pub fn render_window(window: &WindowState, now_ms: u64) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("count".to_owned(), json!(window.used));
    fields.insert("limit".to_owned(), json!(window.limit));
    fields.insert("remaining".to_owned(), json!(window.remaining));
    fields.insert("ttl".to_owned(), json!(seconds_until(window.end_ms, now_ms)));
    fields
}

/// The usage of requests in flight.
pub fn render_concurrency(ConcurrencyState { name, usage, .. }: &ConcurrencyState) -> Value {
    json!({ "name": name, "count": usage.in_use, "limit": usage.limit, "remaining": usage.remaining() })
}

/// The response to a query. Its top level repeats the window with the fewest tokens left.
pub fn render(query: &DecisionQuery, outcome: &DecisionOutcome) -> Value {
    let window = |window: &WindowState| render_window(window, outcome.now_ms);
    let named = |of: &WindowState| {
        let mut fields = window(of);
        fields.insert("name".to_owned(), json!(of.name));
        if query.rules.len() > 1 {
            fields.insert("rule".to_owned(), json!(of.rule));
        }
        Value::Object(fields)
    };
    let tightest = outcome.windows.iter().min_by_key(|window| (window.remaining, std::cmp::Reverse(window.end_ms)));
    // Without windows, no rule counts the key.
    let mut response = match tightest {
        Some(tightest) => window(tightest),
        None => window(&WindowState { end_ms: outcome.now_ms, ..WindowState::default() }),
    };
    response.insert("allowed".to_owned(), json!(outcome.allowed));
    // Null where the cost exceeds the capacity, so that the query can never succeed.
    let retry_after = outcome.retry_at_ms.map(|retry_at_ms| {
        let seconds = seconds_until(retry_at_ms, outcome.now_ms);
        if outcome.allowed { seconds } else { seconds.max(1) }
    });
    response.insert("retry_after".to_owned(), json!(retry_after));
    let retry_after_ms = outcome.retry_at_ms.map(|retry_at_ms| retry_at_ms.saturating_sub(outcome.now_ms));
    response.insert("retry_after_ms".to_owned(), json!(retry_after_ms));
    if outcome.is_store_unreachable {
        response.insert("store".to_owned(), json!("unreachable"));
    }
    if outcome.is_exempt {
        response.insert("exempt".to_owned(), json!(true));
    }
    if outcome.has_unknown_key {
        response.insert("unknown_key".to_owned(), json!(true));
    }
    if let Some(entry) = outcome.denied_by {
        response.insert("denied_by".to_owned(), json!(entry.to_string()));
    }
    response.insert("windows".to_owned(), outcome.windows.iter().map(named).collect());
    if !outcome.concurrent.is_empty() {
        let concurrent = |state: &ConcurrencyState| {
            let mut fields = render_concurrency(state);
            if query.rules.len() > 1 {
                fields["rule"] = json!(state.rule);
            }
            fields
        };
        response.insert("concurrent".to_owned(), outcome.concurrent.iter().map(concurrent).collect());
    }
    Value::Object(response)
}
