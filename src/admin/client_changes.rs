//! `PUT`, `PATCH` and `DELETE /v1/clients/{name}`, and the keys of a client under it.

use std::time::Duration;

use http::header::{ETAG, HeaderMap, HeaderName, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderValue, Response};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::client_store::{Changed, Edit};
use super::endpoints::{Call, json_response, with_body};
use super::json_objects::{CLIENT_SETTINGS, GIVEN_KEY};
use super::json_schema::parse_object;
use super::{AdminBody, audit_log};
use transom_config::Config;
use transom_config::access::{Allowed, DenyEntry, DenyTarget};
use transom_config::clients::Client;
use transom_http::error::ApiError;
use transom_limiter::ip_prefix::Network;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;
use transom_rules::responses::{self, LocalResponse};

/// Bytes of a generated key: 192 bits.
const KEY_BYTES: usize = 24;
/// How long a change of shared clients waits until all workers use its limits.
const LIMITS_PATIENCE: Duration = Duration::from_secs(2);
/// Hex digits of a digest that name a key at least.
const ID_DIGITS_MIN: usize = 8;

/// `PUT /v1/clients/{name}`: replaces plan, subjects and networks.
pub async fn put(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let settings = Settings::parse(&parse_object(&call.body, "the body")?)?;
    let name = call.path_value("name").to_owned();
    let edit: Edit = Box::new(move |known| Ok(Some(settings.applied_to(&name, known))));
    let changed = change(&call, "replace client", None, edit).await?;
    let response = changed_client(&call, &changed).await?;
    Ok(with_body(match changed.before {
        Some(_) => response,
        None => responses::created(response),
    }))
}

/// `PATCH /v1/clients/{name}`: a JSON merge patch (RFC 7396) of plan, subjects and networks.
pub async fn patch(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (patch, name) = (parse_object(&call.body, "the body")?, call.path_value("name").to_owned());
    CLIENT_SETTINGS.check_names(&patch)?;
    let edit: Edit = Box::new(move |known| {
        let known = known.ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        let mut settings = Settings::of(known).to_json();
        for (field, value) in &patch {
            match value {
                Value::Null => drop(settings.remove(field)),
                value => drop(settings.insert(field.clone(), value.clone())),
            }
        }
        Ok(Some(Settings::parse(&settings)?.applied_to(&name, Some(known))))
    });
    let changed = change(&call, "change client", None, edit).await?;
    Ok(with_body(changed_client(&call, &changed).await?))
}

/// `DELETE /v1/clients/{name}`.
pub async fn delete(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let name = call.path_value("name").to_owned();
    if let Some(place) = place_of_name(&call.decision_api()?.served.config, &name, call.state.clock.wall_ms()) {
        return Err(ApiError::Conflict(format!("{place} names the client: remove it there first")));
    }
    let edit: Edit = Box::new(move |known| match known {
        Some(_) => Ok(None),
        None => Err(ApiError::UnknownClient(name.clone())),
    });
    change(&call, "remove client", None, edit).await?;
    Ok(with_body(responses::no_content_response()))
}

/// What names a client in configuration files, which must not name a client that does not exist.
fn place_of_name(config: &Config, name: &str, now_ms: u64) -> Option<String> {
    let mut entries = config.access.iter().flat_map(|access| access.deny.iter());
    let is_named = |entry: &&DenyEntry| matches!(&entry.target, DenyTarget::Client(client) if client == name);
    let is_let_in = |allowed: &Allowed| matches!(allowed, Allowed::Client(client) if client.text == name);
    let mut routes = config.routes.iter();
    match entries.find(is_named) {
        Some(entry) if entry.has_ended(now_ms) => {
            Some(format!("deny entry {}, which has ended (`transom deny remove --ended`),", entry.id))
        }
        Some(entry) => Some(format!("deny entry {}", entry.id)),
        None => routes
            .find(|route| route.allow.iter().any(is_let_in))
            .map(|route| format!("`allow` of route `{}`", route.name)),
    }
}

/// `POST /v1/clients/{name}/keys`: generates a key, and returns it this once; or adds the key with the digest of the request.
pub async fn add_key(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let given = if call.body.is_empty() { Map::new() } else { parse_object(&call.body, "the body")? };
    GIVEN_KEY.check_names(&given)?;
    let no_random = |error| ApiError::Unavailable(format!("there are no random numbers: {error}"));
    let (digest, key) = match given.get("id").filter(|id| !id.is_null()) {
        Some(id) => {
            let digest = id.as_str().and_then(Digest::parse);
            let malformed = || ApiError::Malformed(format!("`id` is not `{}` and 64 hex digits", Digest::PREFIX));
            (digest.ok_or_else(malformed)?, None)
        }
        None => {
            let key = generate_key().map_err(no_random)?;
            (Digest::of(key.as_bytes()), Some(key))
        }
    };
    let name = call.path_value("name").to_owned();
    let edit: Edit = Box::new(move |known| {
        let mut client = known.cloned().ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        if !client.api_keys.contains(&digest) {
            client.api_keys.push(digest);
        }
        Ok(Some(client))
    });
    let changed = change(&call, "add key", Some(("key", digest.to_string())), edit).await?;
    let mut added = json!({ "id": digest.to_string() });
    key.iter().for_each(|key| added["key"] = json!(key));
    let mut response = responses::created(json_response(&added));
    changed.after.iter().for_each(|client| insert_tag(&mut response, client));
    Ok(with_body(responses::not_stored(response)))
}

/// `DELETE /v1/clients/{name}/keys/{id}`. The id is the digest of the key, or the beginning of it.
pub async fn remove_key(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (name, id) = (call.path_value("name").to_owned(), call.path_value("id").trim_end_matches('…').to_owned());
    if id.len() < Digest::PREFIX.len() + ID_DIGITS_MIN {
        return Err(ApiError::Malformed(format!("the id of a key is `{}` and at least 8 digits", Digest::PREFIX)));
    }
    let what = id.clone();
    let edit: Edit = Box::new(move |known| {
        let mut client = known.cloned().ok_or_else(|| ApiError::UnknownClient(name.clone()))?;
        let mut matching = client.api_keys.iter().filter(|digest| digest.to_string().starts_with(&id));
        let digest = match (matching.next(), matching.next()) {
            (Some(digest), None) => *digest,
            (None, _) => return Err(ApiError::UnknownKey),
            (Some(_), Some(_)) => return Err(ApiError::Conflict("several keys begin like this".to_owned())),
        };
        client.api_keys.retain(|key| *key != digest);
        Ok(Some(client))
    });
    change(&call, "remove key", Some(("key", what)), edit).await?;
    Ok(with_body(responses::no_content_response()))
}

/// Changes a client, if the preconditions of the request hold, and records it. `detail`: what of the client is concerned.
pub async fn change(
    call: &Call,
    operation: &str,
    detail: Option<(&str, String)>,
    mut edit: Edit,
) -> Result<Changed, ApiError> {
    // Reading may not need `[clients]`, a change does.
    call.decision_api()?.served.config.clients.as_ref().ok_or(ApiError::NoClients)?;
    let preconditions = Preconditions::of(&call.parts.headers);
    let entry = call.begin_change()?;
    let name = call.path_value("name");
    let checked: Edit = Box::new(move |known| {
        preconditions.check(known)?;
        edit(known)
    });
    let changed = call.state.client_store.change(name, checked).await;
    let decision_api = call.decision_api()?;
    let clients = decision_api.served.config.clients.clone().ok_or(ApiError::NoClients)?;
    let described = |client: &Option<Client>| {
        client.as_ref().map_or(Value::Null, |client| describe_client(&clients, client, Digest::to_string))
    };
    let mut what = json!({ "operation": operation, "client": name });
    if let Some((name, detail)) = detail {
        what[name] = json!(detail);
    }
    let changed = match changed {
        Err(error @ ApiError::Unconfirmed(_)) => {
            let before = described(&call.state.client_store.read(&decision_api, name));
            entry.write(&what, &before, &audit_log::UNKNOWN.into());
            return Err(error);
        }
        changed => changed?,
    };
    entry.write(&what, &described(&changed.before), &described(&changed.after));
    Ok(changed)
}

/// The response with a changed client: 202 if this gateway does not use its limits yet.
pub async fn changed_client(call: &Call, changed: &Changed) -> Result<LocalResponse, ApiError> {
    let client = changed.after.as_ref().ok_or_else(|| ApiError::UnknownClient(call.path_value("name").to_owned()))?;
    let uses_limits = wait_for_limits(call).await;
    let served = call.decision_api()?.served.clone();
    let clients = served.config.clients.as_ref().ok_or(ApiError::NoClients)?;
    let mut described = describe_client(clients, client, Digest::brief);
    describe_effect(&mut described, &served.config, client, call.state.clock.wall_ms());
    let mut response = json_response(&described);
    insert_tag(&mut response, client);
    Ok(if uses_limits { response } else { responses::accepted(response) })
}

/// Waits until all workers use the limits of a client of the store, but not for long. Whether they do.
async fn wait_for_limits(call: &Call) -> bool {
    let mut decision_api = call.state.decision_api.clone();
    // It changes with the rules, and once more when all workers use them.
    let used = decision_api.wait_for(|decision_api| {
        let clients = decision_api.as_ref().and_then(|decision_api| decision_api.served.clients.as_ref());
        clients.is_none_or(|clients| clients.current().uses_limits_of(call.path_value("name")))
    });
    if let Ok(Ok(_used)) = timeout(LIMITS_PATIENCE, used).await {
        return true;
    }
    tracing::warn!(client = call.path_value("name"), "the limits of a client are stored, but are not in effect yet");
    false
}

/// Adds to a described client which of its limits are not in effect, and why.
pub fn describe_effect(described: &mut Value, config: &Config, client: &Client, now_ms: u64) {
    for limits in &client.limits {
        if let Some(reason) = config.why_without_effect(client, limits, now_ms) {
            described["limits"][&limits.rule]["without_effect"] = json!(reason);
        }
    }
}

/// Adds the field ETag, for `If-Match`.
pub fn insert_tag(response: &mut LocalResponse, client: &Client) {
    // Hex digits in quotes.
    if let Ok(tag) = HeaderValue::from_str(&tag(client)) {
        response.headers_mut().insert(ETAG, tag);
    }
}

/// Tells versions of a client apart. Equal on all gateways.
fn tag(client: &Client) -> String {
    let keys: Vec<String> = client.api_keys.iter().map(Digest::to_string).collect();
    let mut version = json!([client.name, Settings::of(client).to_json(), keys, client.limits_json()]).to_string();
    version.extend(client.grants.iter().map(|grant| grant.to_json().to_string()));
    let digest = Sha256::digest(version.as_bytes());
    let digits: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digits}\"")
}

/// A random key, as hex digits.
pub fn generate_key() -> Result<String, getrandom::Error> {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What `PUT` and `PATCH` change of a client.
struct Settings {
    plan: String,
    subjects: Vec<String>,
    networks: Vec<String>,
}

impl Settings {
    fn of(client: &Client) -> Settings {
        Settings {
            plan: client.plan.clone(),
            subjects: client.subjects.clone(),
            networks: client.networks.iter().map(ToString::to_string).collect(),
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        let fields =
            [("plan", json!(self.plan)), ("subjects", json!(self.subjects)), ("networks", json!(self.networks))];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn parse(object: &Map<String, Value>) -> Result<Settings, ApiError> {
        CLIENT_SETTINGS.check_names(object)?;
        let malformed = |reason: String| ApiError::Malformed(reason);
        let plan = object.get("plan").and_then(Value::as_str);
        let plan = plan.ok_or_else(|| malformed(String::from("`plan` is not the name of a plan")))?;
        let texts = |name: &str| -> Result<Vec<String>, ApiError> {
            let Some(given) = object.get(name) else { return Ok(Vec::new()) };
            let texts = given.as_array().map(|list| list.iter().map(|text| text.as_str().map(str::to_owned)).collect());
            texts.flatten().ok_or_else(|| malformed(format!("`{name}` is not a list of texts")))
        };
        let networks = texts("networks")?;
        if let Some(other) = networks.iter().find(|network| network.parse::<Network>().is_err()) {
            let other: String = other.chars().take(64).collect();
            return Err(malformed(format!("`{other}` is not a network, such as `203.0.113.0/24`")));
        }
        Ok(Settings { plan: plan.to_owned(), subjects: texts("subjects")?, networks })
    }

    /// The client with these settings. A secret subject that the client has may be written as it is shown: by its digest.
    fn applied_to(&self, name: &str, known: Option<&Client>) -> Client {
        let known_subjects = || known.into_iter().flat_map(|client| &client.subjects);
        let subject = |given: &String| {
            let shown = |subject: &&String| {
                given.starts_with(Digest::PREFIX) && Digest::of(subject.as_bytes()).brief() == *given
            };
            known_subjects().find(shown).unwrap_or(given).clone()
        };
        Client {
            name: name.to_owned(),
            plan: self.plan.clone(),
            api_keys: known.map(|client| client.api_keys.clone()).unwrap_or_default(),
            subjects: self.subjects.iter().map(subject).collect(),
            // All can be parsed.
            networks: self.networks.iter().filter_map(|network| network.parse().ok()).collect(),
            limits: known.map(|client| client.limits.clone()).unwrap_or_default(),
            grants: known.map(|client| client.grants.clone()).unwrap_or_default(),
        }
    }
}

/// The preconditions of a request (RFC 9110, section 13.1).
struct Preconditions {
    if_match: Option<String>,
    if_none_match: Option<String>,
}

impl Preconditions {
    fn of(fields: &HeaderMap) -> Preconditions {
        let text = |name: HeaderName| {
            let values: Vec<&str> =
                fields.get_all(&name).iter().map(|value| value.to_str().unwrap_or_default()).collect();
            (!values.is_empty()).then(|| values.join(", "))
        };
        Preconditions { if_match: text(IF_MATCH), if_none_match: text(IF_NONE_MATCH) }
    }

    /// Checks the current version of a client.
    fn check(&self, known: Option<&Client>) -> Result<(), ApiError> {
        let is_listed = |list: &String| {
            known.is_some_and(|client| list.split(',').map(str::trim).any(|one| one == "*" || one == tag(client)))
        };
        let holds = self.if_match.as_ref().is_none_or(is_listed) && !self.if_none_match.as_ref().is_some_and(is_listed);
        if holds { Ok(()) } else { Err(ApiError::PreconditionFailed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_subject_stays_when_it_is_written_as_it_is_shown() {
        let settings = |subjects: &[&str]| Settings {
            plan: "gold".to_owned(),
            subjects: subjects.iter().map(|subject| (*subject).to_owned()).collect(),
            networks: Vec::new(),
        };
        let known = settings(&["hunter2", "other"]).applied_to("acme", None);
        let shown = Digest::of(b"hunter2").brief();
        let changed = settings(&["new", &shown]).applied_to("acme", Some(&known));
        assert_eq!(changed.subjects, ["new", "hunter2"]);
        assert_eq!(settings(&[&shown]).applied_to("acme", None).subjects, [shown]);
    }
}
