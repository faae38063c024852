//! `GET` and `POST /v1/deny`, and `DELETE /v1/deny/{id}`: the deny entries. A change edits the access file, and is in effect once the
//! gateway has read it again; or the shared map of the store, and is in effect here when it is made.

use std::sync::Arc;
use std::time::Duration;

use http::Response;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::AdminBody;
use super::endpoints::{Call, json_response, with_body};
use super::json_objects::{DENIED_KEY, NEW_DENY_ENTRY};
use crate::access_file::{self, EditError, NewEntry, WrittenTarget};
use crate::proxy::served_config::ServedConfig;
use transom_config::DenyId;
use transom_config::access::{Access, DenyEntry, EntryId, SharedEntry};
use transom_http::error::ApiError;
use transom_limiter::handles::IdVec;
use transom_limiter::window::duration_ms;
use transom_rules::responses::LocalResponse;
use transom_store::map_follower::SharedMap;
use transom_store::shared_map::{Changed, Precondition};

/// How often, and how long in all, a change waits for another one.
const BUSY_DELAY: Duration = Duration::from_millis(20);
const BUSY_RETRIES: u32 = 100;

/// Ended entries that a new one clears from the store.
const CLEARED_MAX: usize = 16;
/// How long the store keeps entries that have ended, so that people can see them.
const CLEARED_AFTER_MS: u64 = 24 * 60 * 60 * 1000;

/// `GET /v1/deny`.
pub fn list(call: &Call) -> Result<LocalResponse, ApiError> {
    let (decision_api, now_ms) = (call.decision_api()?, call.state.clock.wall_ms());
    let (limit, after) = call.page()?;
    let malformed = || ApiError::Malformed(String::from("`after` is not the id of a deny entry"));
    let after = after.map(|after| after.parse::<EntryId>()).transpose().map_err(|_other| malformed())?;
    let entries = current_entries(&decision_api.served).unwrap_or_default();
    let mut later: Vec<&DenyEntry> =
        entries.iter().filter(|entry| after.is_none_or(|after| entry.id > after)).collect();
    let rest = later.len().saturating_sub(limit);
    if rest > 0 {
        later.select_nth_unstable_by_key(limit, |entry| entry.id);
        later.truncate(limit);
    }
    later.sort_unstable_by_key(|entry| entry.id);
    let next = later.last().filter(|_| rest > 0).map(|entry| entry.id.to_string());
    let listed: Vec<Value> = later.iter().map(|entry| entry.to_json(&decision_api.served.config, now_ms)).collect();
    Ok(json_response(&json!({ "deny": listed, "next": next, "total": entries.len() })))
}

fn current_entries(served: &ServedConfig) -> Option<Arc<IdVec<DenyId, DenyEntry>>> {
    served.access.as_ref().map(|access| Arc::clone(&access.deny_list().entries))
}

/// `POST /v1/deny`.
pub async fn add(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let served = Arc::clone(&call.decision_api()?.served);
    let new = parse(&call.body, call.state.clock.wall_ms())?;
    let change = call.begin_change()?;
    let shared = call.state.shared_deny.borrow().clone();
    let (entry, before) = match shared {
        Some(map) => share(&map, &served, &new, call.state.clock.wall_ms()).await?,
        None => {
            let added =
                edit(&served, move |access, served| access_file::add(&access.file, &new, &served.config)).await?;
            (added.entry, added.before)
        }
    };
    let shown = |entry: &DenyEntry| entry.to_json(&served.config, call.state.clock.wall_ms());
    let (entry, before) = (shown(&entry), before.as_ref().map_or(Value::Null, shown));
    change.write(&json!({ "operation": "deny", "id": entry["id"] }), &before, &entry);
    await_effect(&call).await?;
    Ok(with_body(json_response(&entry)))
}

/// `DELETE /v1/deny/{id}`.
pub async fn remove(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let served = Arc::clone(&call.decision_api()?.served);
    let unknown = || ApiError::UnknownEntry(call.path_value(0).chars().take(64).collect());
    let id: EntryId = call.path_value(0).parse().map_err(|_malformed| unknown())?;
    let change = call.begin_change()?;
    let shared = call.state.shared_deny.borrow().clone();
    let removed = match shared {
        Some(map) => {
            let entry = find(&served, id).ok_or_else(unknown)?;
            let removed = map.change(&id.to_string(), None, Precondition::Exists).await;
            match removed.map_err(ApiError::NotChanged)? {
                Changed::Changed { .. } => entry,
                Changed::Refused { .. } => return Err(unknown()),
                Changed::Away => return Err(refilled()),
            }
        }
        None => {
            let removed = edit(&served, move |access, served| access_file::remove(&access.file, &[id], &served.config));
            removed.await?.into_iter().next().ok_or_else(unknown)?
        }
    };
    let removed = removed.to_json(&served.config, call.state.clock.wall_ms());
    change.write(&json!({ "operation": "end deny", "id": removed["id"] }), &removed, &Value::Null);
    await_effect(&call).await?;
    Ok(with_body(json_response(&removed)))
}

/// Waits until an edit of the file is in effect in all workers. One of the store is in effect already.
async fn await_effect(call: &Call) -> Result<(), ApiError> {
    if call.state.shared_deny.borrow().is_some() {
        return Ok(());
    }
    let (applied, is_applied) = oneshot::channel();
    // An error drops the sender.
    let _ = call.state.access_edits.send(applied);
    match is_applied.await {
        Ok(true) => Ok(()),
        Ok(false) => Err(ApiError::Unavailable(String::from(
            "the access file was changed, which takes effect once the configuration files have no problems: see `transom check`",
        ))),
        Err(_ended) => Err(ApiError::HandedOver),
    }
}

fn find(served: &ServedConfig, id: EntryId) -> Option<DenyEntry> {
    current_entries(served)?.iter().find(|entry| entry.id == id).cloned()
}

/// Adds an entry to the store, or replaces the one of the same id, which is returned beside it.
async fn share(
    map: &SharedMap,
    served: &ServedConfig,
    new: &NewEntry,
    now_ms: u64,
) -> Result<(DenyEntry, Option<DenyEntry>), ApiError> {
    let entry = access_file::check(new, &served.config).map_err(|error| ApiError::Malformed(error.to_string()))?;
    let before = find(served, entry.id);
    let text = entry.to_json(&served.config, now_ms).to_string();
    match map.change(&entry.id.to_string(), Some(text), Precondition::None).await.map_err(ApiError::NotChanged)? {
        Changed::Changed { .. } => {}
        Changed::Refused { .. } | Changed::Away => return Err(refilled()),
    }
    clear_ended(map, served, now_ms).await;
    Ok((entry, before))
}

/// Removes some entries from the store that ended long ago, unless they have changed meanwhile. Failures do not matter: later entries
/// clear them.
async fn clear_ended(map: &SharedMap, served: &ServedConfig, now_ms: u64) {
    let ended_ms = now_ms.saturating_sub(CLEARED_AFTER_MS);
    let entries = current_entries(served).unwrap_or_default();
    for entry in entries.iter().filter(|entry| entry.has_ended(ended_ms)).take(CLEARED_MAX) {
        let id = entry.id.to_string();
        let stored =
            map.get(&id).filter(|stored| SharedEntry::parse(&stored.text).is_some_and(|e| e.has_ended(ended_ms)));
        if let Some(stored) = stored {
            let _ = map.change(&id, None, Precondition::Version(stored.version)).await;
        }
    }
}

fn refilled() -> ApiError {
    ApiError::NotChanged(String::from("the store is being filled again: try again in some seconds"))
}

/// Edits the file in a thread of its own: it may be long. Waits while it is edited by others.
async fn edit<T: Send + 'static>(
    served: &Arc<ServedConfig>,
    edit: impl Fn(&Access, &ServedConfig) -> Result<T, EditError> + Send + Sync + 'static,
) -> Result<T, ApiError> {
    let edit = Arc::new(edit);
    let mut retries = 0..BUSY_RETRIES;
    loop {
        let (served, edit) = (Arc::clone(served), Arc::clone(&edit));
        let run = move || served.config.access.as_ref().map(|access| edit(access, &served));
        let edited = tokio::task::spawn_blocking(run).await;
        match edited.map_err(|panic| ApiError::NotChanged(panic.to_string()))?.ok_or(ApiError::NoAccessFile)? {
            Ok(done) => return Ok(done),
            Err(EditError::Busy(_)) if retries.next().is_some() => tokio::time::sleep(BUSY_DELAY).await,
            Err(error @ EditError::Invalid(_)) => return Err(ApiError::Malformed(error.to_string())),
            Err(error) => {
                tracing::error!("{error}");
                return Err(ApiError::NotChanged(error.to_string()));
            }
        }
    }
}

/// Reads an entry. `for` is the time until it ends.
fn parse(body: &[u8], now_ms: u64) -> Result<NewEntry, ApiError> {
    let malformed = |reason: &str| ApiError::Malformed(reason.to_owned());
    let entry: Map<String, Value> =
        serde_json::from_slice(body).map_err(|_error| malformed("the deny entry is not a JSON object"))?;
    NEW_DENY_ENTRY.check_names(&entry)?;
    let given = |name: &str| entry.get(name).filter(|value| !value.is_null());
    let text = |name: &str| match given(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(ApiError::Malformed(format!("`{name}` is not a string"))),
    };
    let target = match (text("network")?, text("client")?, given("key")) {
        (Some(network), None, None) => WrittenTarget::Network(network),
        (None, Some(client), None) => WrittenTarget::Client(client),
        (None, None, Some(Value::Object(key))) => {
            DENIED_KEY.check_names(key)?;
            let text = |name: &str| key.get(name).and_then(Value::as_str).map(str::to_owned);
            let (part, value) =
                text("part").zip(text("value")).ok_or_else(|| malformed("`key` has no `part` or `value`"))?;
            WrittenTarget::Key { part, value }
        }
        (None, None, Some(_)) => return Err(malformed("`key` is not an object with `part` and `value`")),
        _ => return Err(malformed("a deny entry has one of `network`, `client` and `key`")),
    };
    let routes = match given("routes") {
        None => Some(Vec::new()),
        Some(Value::String(route)) => Some(vec![route.clone()]),
        Some(routes) => {
            routes.as_array().and_then(|routes| routes.iter().map(|route| route.as_str().map(str::to_owned)).collect())
        }
    };
    let routes = routes.ok_or_else(|| malformed("`routes` is not a list of strings"))?;
    let until_ms = match (text("until")?, text("for")?) {
        (None, None) => None,
        (Some(until), None) => {
            let time = until.parse::<jiff::Timestamp>().ok().and_then(|time| u64::try_from(time.as_millisecond()).ok());
            Some(time.ok_or_else(|| malformed("`until` is not a time of RFC 3339, such as `2030-01-31T18:00:00Z`"))?)
        }
        (None, Some(lasts)) => {
            let lasts_ms = duration_ms(&lasts).filter(|ms| *ms > 0);
            let lasts_ms = lasts_ms.ok_or_else(|| malformed("`for` is not a duration, such as `1h`"))?;
            let ends_ms = now_ms.checked_add(lasts_ms).and_then(|ms| ms.checked_next_multiple_of(1000));
            Some(ends_ms.ok_or_else(|| malformed("`for` is too long"))?)
        }
        (Some(_), Some(_)) => return Err(malformed("`until` and `for` are both given: keep one of the two")),
    };
    Ok(NewEntry { target, routes, until_ms, reason: text("reason")? })
}
