//! `GET` and `POST /v1/deny`, and `DELETE /v1/deny/{id}`: the deny entries. A change edits the access file, and is in effect once the
//! gateway has read it again; or the shared map of the store, and is in effect here when it is made.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::client_store::api_error;
use super::endpoints::{Call, json_response, with_body};
use super::json_objects::{DENIED_KEY, NEW_DENY_ENTRY};
use super::json_schema::parse_object;
use super::{AdminBody, DecisionApi, audit_log};
use crate::access_file::{self, EditError, NewEntry, WrittenTarget};
use crate::proxy::served_config::ServedConfig;
use transom_config::DenyId;
use transom_config::access::{
    Access, DenyEntry, DenyTarget, EntryId, SharedEntry, UNTIL_MAX_MS, end_after, parse_time, rfc3339,
};
use transom_http::error::ApiError;
use transom_limiter::handles::IdVec;
use transom_limiter::window::duration_ms;
use transom_rules::responses::LocalResponse;
use transom_store::map_follower::SharedMap;
use transom_store::shared_map::{Changed, Precondition};

/// How often, and how long in all, a change waits for one of another process.
const BUSY_DELAY: Duration = Duration::from_millis(20);
const BUSY_RETRIES: u32 = 100;

/// Changes of others that may come before the one that keeps a client.
const KEEP_ATTEMPTS_MAX: usize = 100;

/// Ended entries that a new one clears from the store.
const CLEARED_MAX: usize = 16;
/// How long the store keeps entries that have ended, so that people can see them.
const CLEARED_AFTER_MS: u64 = 24 * 60 * 60 * 1000;

/// `GET /v1/deny`.
pub fn list(call: &Call) -> Result<LocalResponse, ApiError> {
    let (decision_api, now_ms) = (call.decision_api()?, call.state.clock.wall_ms());
    let (limit, after) = call.page()?;
    let shared = call.state.shared_deny.borrow().clone();
    if let Some(map) = shared {
        let (texts, total) = {
            let copy = map.lock();
            let after = after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let later = copy.entries.range::<str, _>((after, Bound::Unbounded)).take(limit + 1);
            let texts: Vec<_> = later.map(|(id, entry)| (Arc::clone(id), Arc::clone(&entry.text))).collect();
            (texts, copy.entries.len())
        };
        let shown = texts.iter().take(limit).map(|(id, text)| show_shared(&decision_api, id, text, now_ms));
        let next = texts.get(limit).map(|_| &*texts[limit - 1].0);
        return Ok(json_response(&json!({ "deny": shown.collect::<Vec<_>>(), "next": next, "total": total })));
    }
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

/// An entry of the store, with the reason if it has no effect here.
fn show_shared(decision_api: &DecisionApi, id: &str, text: &str, now_ms: u64) -> Value {
    let Some(entry) = SharedEntry::parse(text) else {
        return json!({
            "id": id, "routes": [], "until": null, "reason": null, "ended": false,
            "without_effect": "this gateway cannot read the entry: another version, or another program, has written it",
        });
    };
    let clients = decision_api.served.decision_service.clients();
    let has_client = |name: &str| clients.as_ref().is_some_and(|clients| clients.named(name).is_some());
    let mut shown = entry.to_json(id, now_ms);
    if let Err(reason) = entry.check_effect(&decision_api.served.config, has_client) {
        shown["without_effect"] = json!(reason);
    }
    shown
}

fn current_entries(served: &ServedConfig) -> Option<Arc<IdVec<DenyId, DenyEntry>>> {
    served.access.as_ref().map(|access| Arc::clone(&access.deny_list().entries))
}

/// `POST /v1/deny`.
pub async fn add(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let decision_api = call.decision_api()?;
    let (served, now_ms) = (&decision_api.served, call.state.clock.wall_ms());
    let new = parse(&call.body, now_ms)?;
    let change = call.begin_change()?;
    let shared = call.state.shared_deny.borrow().clone();
    let (entry, before) = match shared {
        Some(map) => {
            let entry =
                access_file::check(&new, &served.config).map_err(|error| ApiError::Malformed(error.to_string()))?;
            let id = entry.id.to_string();
            let before = map.get(&id).map(|known| show_shared(&decision_api, &id, &known.text, now_ms));
            match share(&map, &decision_api, &entry, now_ms).await {
                Err(error @ ApiError::Unconfirmed(_)) => {
                    let what = json!({ "operation": "deny", "id": id });
                    change.write(&what, &before.unwrap_or_default(), &audit_log::UNKNOWN.into());
                    return Err(error);
                }
                shared => shared?,
            }
            (entry, before)
        }
        None => {
            let add =
                move |access: &Access, served: &ServedConfig| access_file::add(&access.file, &new, &served.config);
            let added = edit(&call, add).await?;
            (added.entry, added.before.map(|before| before.to_json(&served.config, now_ms)))
        }
    };
    let entry = entry.to_json(&served.config, now_ms);
    change.write(&json!({ "operation": "deny", "id": entry["id"] }), &before.unwrap_or_default(), &entry);
    await_effect(&call).await?;
    Ok(with_body(json_response(&entry)))
}

/// `DELETE /v1/deny/{id}`.
pub async fn remove(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let (decision_api, now_ms) = (call.decision_api()?, call.state.clock.wall_ms());
    let unknown = || ApiError::UnknownEntry(call.path_value("id").chars().take(64).collect());
    let id: Option<EntryId> = call.path_value("id").parse().ok();
    let change = call.begin_change()?;
    let shared = call.state.shared_deny.borrow().clone();
    let removed = match shared {
        Some(map) => {
            // The store may have entries of others under any name.
            let given = call.path_value("id").to_owned();
            let id = id.filter(|_| map.get(&given).is_none()).map_or(given, |id| id.to_string());
            if map.get(&id).is_none() {
                map.synchronize().await.map_err(ApiError::NotChanged)?;
            }
            let entry = map.get(&id).ok_or_else(unknown)?;
            let shown = show_shared(&decision_api, &id, &entry.text, now_ms);
            match map.change(&id, None, Precondition::Exists).await.map_err(api_error) {
                Ok(Changed::Changed { .. }) => {}
                Ok(Changed::Refused { .. }) => return Err(unknown()),
                Ok(Changed::Away) => return Err(refilled()),
                Err(error) => {
                    if let ApiError::Unconfirmed(_) = error {
                        change.write(&json!({ "operation": "end deny", "id": id }), &shown, &audit_log::UNKNOWN.into());
                    }
                    return Err(error);
                }
            }
            shown
        }
        None => {
            let (id, served) = (id.ok_or_else(unknown)?, &decision_api.served);
            let remove =
                move |access: &Access, served: &ServedConfig| access_file::remove(&access.file, &[id], &served.config);
            let removed = edit(&call, remove).await?.into_iter().next().ok_or_else(unknown)?;
            removed.to_json(&served.config, now_ms)
        }
    };
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

/// Adds an entry to the store, or replaces the one of the same id.
async fn share(map: &SharedMap, decision_api: &DecisionApi, entry: &DenyEntry, now_ms: u64) -> Result<(), ApiError> {
    let (served, id) = (&decision_api.served, entry.id.to_string());
    let clients = decision_api.shared_clients.as_ref().map(|clients| &clients.map);
    let denied = match (&entry.target, clients) {
        (DenyTarget::Client(name), Some(clients)) => Some((clients, name)),
        _ => None,
    };
    if let Some((clients, name)) = denied
        && clients.get(name).is_none()
    {
        clients.synchronize().await.map_err(ApiError::NotChanged)?;
        clients.get(name).ok_or_else(|| no_client(name))?;
    }
    let text = entry.to_json(&served.config, now_ms).to_string();
    let version = match map.change(&id, Some(text), Precondition::None).await.map_err(api_error)? {
        Changed::Changed { version } => version,
        Changed::Refused { .. } | Changed::Away => return Err(refilled()),
    };
    if let Some((clients, name)) = denied
        && !keep_client(clients, name).await
    {
        // Without the client, the entry has no effect. If it stays, because the store is away, it is listed as such.
        let _ = map.change(&id, None, Precondition::Version(version)).await;
        return Err(no_client(name));
    }
    clear_ended(map, served, now_ms).await;
    Ok(())
}

fn no_client(name: &str) -> ApiError {
    ApiError::Malformed(format!("there is no client `{name}`"))
}

/// Gives a client a new version, so that a removal that has checked the deny entries before fails, and checks them again. Returns
/// false if the client was removed.
async fn keep_client(clients: &SharedMap, name: &str) -> bool {
    for _ in 0..KEEP_ATTEMPTS_MAX {
        let Some(entry) = clients.get(name) else { return false };
        let text = entry.text.to_string();
        match clients.change(name, Some(text), Precondition::Version(entry.version)).await {
            Ok(Changed::Refused { .. }) => {}
            // The store is away: if the client is removed nevertheless, the entry is listed as without effect.
            Ok(Changed::Changed { .. } | Changed::Away) | Err(_) => return true,
        }
    }
    true
}

/// The id of an entry that denies a client.
pub fn entry_of_client(map: &SharedMap, name: &str, now_ms: u64) -> Option<Arc<str>> {
    let copy = map.lock();
    // Most entries are of networks, and are not parsed.
    let mut entries = copy.entries.iter().filter(|(_, entry)| entry.text.contains("\"client\""));
    let denies = |text: &str| SharedEntry::parse(text).is_some_and(|e| e.is_of_client(name) && !e.has_ended(now_ms));
    entries.find(|(_, entry)| denies(&entry.text)).map(|(id, _)| Arc::clone(id))
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

/// Edits the file in a thread of its own: it may be long. Edits of this gateway come one after the other, in order; waits while
/// another process edits the file.
async fn edit<T: Send + 'static>(
    call: &Call,
    edit: impl Fn(&Access, &ServedConfig) -> Result<T, EditError> + Send + Sync + 'static,
) -> Result<T, ApiError> {
    let edit = Arc::new(edit);
    let mut turn = Arc::clone(&call.state.access_file_lock).lock_owned().await;
    let served = call.decision_api()?.served.clone();
    let mut retries = 0..BUSY_RETRIES;
    loop {
        let (served, edit) = (Arc::clone(&served), Arc::clone(&edit));
        // The turn lasts until the edit ends, also if the client leaves.
        let run = move || (served.config.access.as_ref().map(|access| edit(access, &served)), turn);
        let edited = tokio::task::spawn_blocking(run).await;
        let edited = edited.map_err(|panic| ApiError::NotChanged(panic.to_string()))?;
        turn = edited.1;
        match edited.0.ok_or(ApiError::NoAccessFile)? {
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
    let entry = parse_object(body, "the deny entry")?;
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
            let until_ms = parse_time(&until);
            Some(until_ms.map_err(|(message, fix)| ApiError::Malformed(format!("`until`: {message}: {fix}")))?)
        }
        (None, Some(lasts)) => {
            let lasts_ms = duration_ms(&lasts).filter(|ms| *ms > 0);
            let lasts_ms = lasts_ms.ok_or_else(|| malformed("`for` is not a duration, such as `1h`"))?;
            let latest = || format!("`for` is too long: {} is the latest end", rfc3339(UNTIL_MAX_MS));
            Some(end_after(lasts_ms, now_ms).ok_or_else(|| ApiError::Malformed(latest()))?)
        }
        (Some(_), Some(_)) => return Err(malformed("`until` and `for` are both given: keep one of the two")),
    };
    Ok(NewEntry { target, routes, until_ms, reason: text("reason")? })
}
