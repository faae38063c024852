//! Where clients are kept, as the API reads and changes them: [`ClientStore`], for clients in the clients file and for those in the
//! shared store.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Mutex, oneshot, watch};

use serde_json::{Map, Value};

use super::{DecisionApi, deny};
use transom_config::clients::Client;
use transom_http::error::ApiError;
use transom_limiter::secret_digest::Digest;
use transom_runtime::clock::Clock;
use transom_store::map_follower::{ChangeError, Entry, SharedMap};
use transom_store::shared_map::{self, Precondition};

/// Changes of other gateways that may come before one of a client in the store.
const ATTEMPTS_MAX: usize = 100;

/// Makes a new client from the current one, which is `None` if no client has the name. `Ok(None)` removes it. It may be called
/// again, if another change comes first.
pub type Edit = Box<dyn FnMut(Option<&Client>) -> Result<Option<Client>, ApiError> + Send>;

/// A client before and after a change.
#[derive(Clone, PartialEq, Debug)]
pub struct Changed {
    pub before: Option<Client>,
    pub after: Option<Client>,
}

/// A change that takes effect at this gateway before it is returned.
pub type PendingChange<'s> = Pin<Box<dyn Future<Output = Result<Changed, ApiError>> + 's>>;

/// A store of clients.
pub trait ClientStore {
    /// The client of a name.
    fn read(&self, decision_api: &DecisionApi, name: &str) -> Option<Client>;

    /// Changes the client of a name. The result is checked as the configuration is. An error of `edit` is returned.
    fn change(&self, name: &str, edit: Edit) -> PendingChange<'_>;
}

/// A change of a client in the clients file. The thread that applies configurations makes it.
pub struct FileChange {
    pub name: String,
    pub edit: Edit,
    pub reply: oneshot::Sender<Result<Changed, ApiError>>,
}

/// The clients of the clients file.
pub struct FileClients(UnboundedSender<FileChange>);

impl FileClients {
    /// The receiver gets the changes. Once it is dropped, clients can no longer be changed.
    pub fn new() -> (FileClients, UnboundedReceiver<FileChange>) {
        let (sender, receiver) = unbounded_channel();
        (FileClients(sender), receiver)
    }
}

impl ClientStore for FileClients {
    fn read(&self, decision_api: &DecisionApi, name: &str) -> Option<Client> {
        let clients = decision_api.served.config.clients.iter().flat_map(|clients| &clients.list);
        clients.clone().find(|client| client.name == name).cloned()
    }

    fn change(&self, name: &str, edit: Edit) -> PendingChange<'_> {
        let (reply, replied) = oneshot::channel();
        // An error drops the reply.
        let _ = self.0.send(FileChange { name: name.to_owned(), edit, reply });
        Box::pin(async { replied.await.unwrap_or(Err(ApiError::HandedOver)) })
    }
}

/// The clients in the shared store.
pub struct StoredClients {
    pub map: SharedMap,
    pub decision_api: watch::Receiver<Option<Arc<DecisionApi>>>,
    /// The deny entries, if they are in the store.
    pub deny: watch::Receiver<Option<SharedMap>>,
    pub clock: Clock,
    /// Held from the checks of a change until it is made: changes of this gateway wait for one another.
    pub changing: Mutex<()>,
}

impl StoredClients {
    async fn change(&self, name: &str, mut edit: Edit) -> Result<Changed, ApiError> {
        let _changing = self.changing.lock().await;
        for _ in 0..ATTEMPTS_MAX {
            let (entry, map_version) = {
                let copy = self.map.lock();
                (copy.entries.get(name).cloned(), copy.position.version)
            };
            let before = entry.as_ref().map(|entry| client_of(name, entry));
            let after = edit(before.as_ref())?;
            match &after {
                Some(client) => self.check(client)?,
                None => self.check_not_denied(name).await?,
            }
            // All that is checked against other clients still holds when the change is made, or it is not made.
            let precondition = match &entry {
                _ if after.as_ref().is_some_and(|after| has_more(after, before.as_ref())) => {
                    Precondition::Map(map_version)
                }
                Some(entry) => Precondition::Version(entry.version),
                None if after.is_none() => return Ok(Changed { before, after }),
                None => Precondition::Absent,
            };
            let text = after.as_ref().map(|client| text_of(client, entry.as_ref()));
            match self.map.change(name, text, precondition).await.map_err(api_error)? {
                shared_map::Changed::Changed { .. } => return Ok(Changed { before, after }),
                // Another change came first, and is known now.
                shared_map::Changed::Refused { .. } | shared_map::Changed::Away => {}
            }
        }
        Err(ApiError::NotChanged("other gateways change clients all the time".to_owned()))
    }

    /// Checks that no deny entry names a client. A gateway that adds such an entry then gives the client a new version
    /// (`deny::keep_client`), so a removal that was checked before the entry was written fails.
    async fn check_not_denied(&self, name: &str) -> Result<(), ApiError> {
        let Some(deny) = self.deny.borrow().clone() else { return Ok(()) };
        deny.synchronize().await.map_err(ApiError::NotChanged)?;
        match deny::entry_of_client(&deny, name, self.clock.wall_ms()) {
            Some(id) => {
                Err(ApiError::Conflict(format!("deny entry {id} names the client: remove it first, or let it end")))
            }
            None => Ok(()),
        }
    }

    /// Checks a client by the current configuration, and against the other clients.
    fn check(&self, client: &Client) -> Result<(), ApiError> {
        let decision_api = self.decision_api.borrow().clone().ok_or(ApiError::Starting)?;
        let served = &decision_api.served;
        let clients = served.config.clients.as_ref().ok_or(ApiError::NoClients)?;
        client.check(clients).map_err(ApiError::Rejected)?;
        let plans = served.decision_service.clients();
        match plans.as_ref().and_then(|plans| plans.conflict(client)) {
            Some((what, owner)) => Err(ApiError::Conflict(format!("a {what} already belongs to client `{owner}`"))),
            None => Ok(()),
        }
    }
}

impl ClientStore for StoredClients {
    fn read(&self, _decision_api: &DecisionApi, name: &str) -> Option<Client> {
        Some(client_of(name, &self.map.get(name)?))
    }

    fn change(&self, name: &str, edit: Edit) -> PendingChange<'_> {
        let name = name.to_owned();
        Box::pin(async move { StoredClients::change(self, &name, edit).await })
    }
}

/// A client as the store has it. One that cannot be read has no plan, so that it can be replaced and removed, and not used.
fn client_of(name: &str, entry: &Entry) -> Client {
    Client::from_json(name, &entry.text).unwrap_or_else(|_unreadable| Client::readable_part(name, &entry.text))
}

/// The text of a client in the store. Members that a newer version has added are kept, and so are keys and limits that this version
/// cannot read.
fn text_of(client: &Client, former: Option<&Entry>) -> String {
    let Value::Object(members) = client.to_json() else { return String::new() };
    let mut text =
        former.and_then(|entry| serde_json::from_str::<Map<String, Value>>(&entry.text).ok()).unwrap_or_default();
    let former_client = former.map(|entry| client_of(&client.name, entry));
    for (name, mut value) in members {
        match (name.as_str(), &mut value, text.get(&name)) {
            ("api_keys", Value::Array(keys), Some(Value::Array(former))) => {
                let is_readable = |key: &&Value| key.as_str().and_then(Digest::parse).is_some();
                keys.extend(former.iter().filter(|key| !is_readable(key)).cloned());
            }
            ("limits", Value::Object(limits), Some(Value::Object(former))) => {
                let unchanged = client.limits.iter().filter(|own| former_client.iter().any(|c| c.limits.contains(own)));
                let unchanged = unchanged.filter_map(|own| Some((own.rule.clone(), former.get(&own.rule)?.clone())));
                limits.extend(unchanged);
            }
            _ => {}
        }
        text.insert(name, value);
    }
    Value::Object(text).to_string()
}

/// Whether a client has something that could belong to another one, and that it had not.
fn has_more(after: &Client, before: Option<&Client>) -> bool {
    let had = |has: &dyn Fn(&Client) -> bool| before.is_some_and(has);
    after.api_keys.iter().any(|key| !had(&|before| before.api_keys.contains(key)))
        || after.subjects.iter().any(|subject| !had(&|before| before.subjects.contains(subject)))
        || after.networks.iter().any(|network| !had(&|before| before.networks.contains(network)))
}

/// The error of a change of the store.
pub fn api_error(error: ChangeError) -> ApiError {
    match error {
        ChangeError::NotMade(why) => ApiError::NotChanged(why),
        ChangeError::Unconfirmed(why) => ApiError::Unconfirmed(why),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use transom_config::client_limits::ClientLimits;

    #[test]
    fn a_change_keeps_what_another_version_has_written() {
        let key = |n: u8| Digest::of(&[n]).to_string();
        let stored = json!({
            "plan": "gold", "api_keys": [key(1)], "subjects": ["a"], "networks": [], "note": { "for": "others" },
            "grants": [], "limits": {
                "r": { "windows": ["5/day"], "until": null, "burst": 2 }, "s": { "windows": ["5/fortnight"] },
                "t": { "windows": ["1/day"], "until": null },
            },
        });
        let entry = |stored: &Value| Entry { version: 7, text: stored.to_string().into() };
        let change = |stored: &Value, edit: &dyn Fn(&mut Client)| -> Value {
            let mut client = client_of("acme", &entry(stored));
            edit(&mut client);
            serde_json::from_str(&text_of(&client, Some(&entry(stored)))).unwrap()
        };
        // The client is known, with what can be read of it.
        let client = Client::from_json("acme", &stored.to_string()).unwrap();
        let readable: Vec<_> =
            client.limits.iter().map(|limits| (&*limits.rule, limits.unreadable.is_none())).collect();
        assert_eq!(readable, [("r", true), ("s", false), ("t", true)]);
        assert_eq!(client.limits_text(0).unwrap().text, "gold r=[\"5/day\"] t=[\"1/day\"]");
        assert_eq!(change(&stored, &|_client| ()), stored);
        let mut expected = stored.clone();
        expected["api_keys"] = json!([key(1), key(2)]);
        expected["limits"]["t"] = json!({ "windows": ["3/day"], "until": null });
        let raised = ClientLimits::from_json("t", &expected["limits"]["t"]).unwrap();
        let edit = |client: &mut Client| {
            client.api_keys.push(Digest::of(&[2]));
            client.limits[2] = raised.clone();
        };
        assert_eq!(change(&stored, &edit), expected);
        // Limits that cannot be read can be removed.
        let without = change(&stored, &|client| client.limits.retain(|limits| limits.rule != "s"));
        assert_eq!(without["limits"].as_object().unwrap().keys().collect::<Vec<_>>(), ["r", "t"]);

        // What cannot be read at all is replaced without a loss of keys.
        let mut newer = stored;
        newer["api_keys"] = json!([key(1), "blake3:00"]);
        newer["plan"] = json!(["gold", "silver"]);
        assert!(Client::from_json("acme", &newer.to_string()).is_err());
        let replaced = change(&newer, &|client| client.plan = "gold".to_owned());
        newer["plan"] = json!("gold");
        newer["subjects"] = json!([]);
        assert_eq!(replaced, newer);
    }
}
