//! `GET /v1/openapi.json`: the table of endpoints as an OpenAPI document, version 3.1.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::endpoints::{Content, ENDPOINTS, Endpoint, Place};
use super::json_objects::PROBLEM;
use super::json_schema::Schema;

/// What failures mean. Statuses of single endpoints have a description in the table of endpoints.
const FAILURES: [(u16, &str); 6] = [
    (400, "The request is malformed."),
    (401, "A token is required."),
    (403, "The role of the token does not include this, or the request comes from another origin."),
    (408, "The request took too long to arrive."),
    (413, "The body is too large."),
    (421, "The host is not one of the admin address."),
];

/// The document.
pub fn document() -> Value {
    let mut components = BTreeMap::new();
    Schema::Object(&PROBLEM).to_json(&mut components);
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for row in ENDPOINTS {
        paths.entry(row.path).or_default().insert(row.verb.name().to_owned(), operation(row, &mut components));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Transom admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The admin address of a gateway: health, metrics, decisions, and clients.",
            "license": { "name": "Apache-2.0 OR MIT" },
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": { "token": {
                "type": "http", "scheme": "bearer", "description": "A token of `[admin]`, if the configuration has one.",
            } },
        },
    })
}

fn operation(row: &Endpoint, components: &mut BTreeMap<&'static str, Value>) -> Value {
    let names = row.path.split('/').filter_map(|segment| segment.strip_prefix('{')?.strip_suffix('}'));
    let of_path =
        names.map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }));
    let mut parameters: Vec<Value> = of_path.collect();
    for parameter in row.parameters {
        parameters.push(json!({
            "name": parameter.name, "in": parameter.place.name(), "required": matches!(parameter.place, Place::RequiredHeader),
            "description": parameter.description, "schema": parameter.schema.to_json(components),
        }));
    }
    let words = row.path.split(['/', '.', '{', '}']).filter(|word| !word.is_empty());
    let id = std::iter::once(row.verb.name()).chain(words).collect::<Vec<_>>().join("_");
    let mut operation = json!({
        "operationId": id, "summary": row.summary, "parameters": parameters, "responses": responses(row, components),
    });
    if let Some(role) = row.role {
        operation["description"] = json!(format!("With tokens, needs the role `{}`.", role.name()));
        operation["security"] = json!([{ "token": [] }, {}]);
    }
    if let Some(body) = row.request {
        let content = json!({ "application/json": { "schema": body.to_json(components) } });
        operation["requestBody"] = json!({ "required": !body.is_optional(), "content": content });
    }
    operation
}

fn responses(row: &Endpoint, components: &mut BTreeMap<&'static str, Value>) -> Value {
    let mut content = Map::new();
    for form in row.response {
        let (media_type, schema) = match form {
            Content::Json(schema) => ("application/json", schema.to_json(components)),
            Content::Text(media_type) => (*media_type, json!({ "type": "string" })),
        };
        content.insert(media_type.to_owned(), json!({ "schema": schema }));
    }
    let mut responses = Map::new();
    for status in row.success {
        let description = if *status == 202 { "It was done, and takes effect later." } else { "It was done." };
        let mut response = json!({ "description": description });
        if !content.is_empty() {
            response["content"] = json!(content);
        }
        responses.insert(status.to_string(), response);
    }
    let mut statuses = BTreeSet::from([421]);
    if row.role.is_some() {
        statuses.extend([401, 403]);
    }
    if row.request.is_some() {
        statuses.extend([400, 408, 413]);
    }
    if !row.parameters.is_empty() {
        statuses.insert(400);
    }
    let common = FAILURES.iter().filter(|(status, _)| statuses.contains(status));
    for (status, meaning) in common.chain(row.other_statuses) {
        let problem = json!({ "application/problem+json": { "schema": Schema::Object(&PROBLEM).to_json(components) } });
        // The health pages are for people.
        let content = if row.role.is_none() && *status == 503 { json!({ "text/plain": {} }) } else { problem };
        responses.insert(status.to_string(), json!({ "description": meaning, "content": content }));
    }
    Value::Object(responses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::endpoints::Verb;

    #[test]
    fn every_endpoint_is_described_once() {
        let document = document();
        let operations =
            document["paths"].as_object().unwrap().values().flat_map(|path| path.as_object().unwrap().values());
        let ids: Vec<&str> = operations.map(|operation| operation["operationId"].as_str().unwrap()).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ENDPOINTS.len(), "{ids:?}");
        assert!(
            ENDPOINTS
                .iter()
                .all(|row| row.summary.ends_with('.') && row.response.is_empty() == row.success.contains(&204))
        );
        // Only what needs no role may be open to scrapers, and only GET.
        assert!(ENDPOINTS.iter().all(|row| !row.is_on_metrics || (row.role.is_none() && row.verb == Verb::Get)));
    }
}
