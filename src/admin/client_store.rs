//! Where clients are kept, as the API reads and changes them: [`ClientStore`], for clients in the clients file and for those in the
//! shared store.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use super::DecisionApi;
use transom_config::clients::Client;
use transom_http::error::ApiError;
use transom_store::map_follower::SharedMap;
use transom_store::shared_map::{self, Precondition};

/// Changes of others that may come before one of a client in the store.
const ATTEMPTS_MAX: usize = 20;

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
}

impl StoredClients {
    async fn change(&self, name: &str, mut edit: Edit) -> Result<Changed, ApiError> {
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.map.get(name);
            let before = entry.as_ref().and_then(|entry| Client::from_json(name, &entry.text).ok());
            let after = edit(before.as_ref())?;
            after.iter().try_for_each(|client| self.check(client))?;
            let text = after.as_ref().map(|client| client.to_json().to_string());
            let precondition = match entry {
                Some(entry) => Precondition::Version(entry.version),
                None if text.is_none() => return Ok(Changed { before, after }),
                None => Precondition::Absent,
            };
            match self.map.change(name, text, precondition).await.map_err(ApiError::Unavailable)? {
                shared_map::Changed::Changed { .. } => return Ok(Changed { before, after }),
                // Another change came first, and is known now.
                shared_map::Changed::Refused { .. } | shared_map::Changed::Away => {}
            }
        }
        Err(ApiError::Unavailable("others change the client all the time".to_owned()))
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
        Client::from_json(name, &self.map.get(name)?.text).ok()
    }

    fn change(&self, name: &str, edit: Edit) -> PendingChange<'_> {
        let name = name.to_owned();
        Box::pin(async move { StoredClients::change(self, &name, edit).await })
    }
}
