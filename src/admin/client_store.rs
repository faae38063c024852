//! Where clients are kept, as the API reads and changes them: [`ClientStore`], and the store of clients in the clients file.

use std::pin::Pin;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::DecisionApi;
use transom_config::clients::Client;
use transom_http::error::ApiError;

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
