//! Who is on which plan: what the clients file says, and where in a request a client is named.

use std::path::PathBuf;

use transom_limiter::ip_prefix::Network;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

/// The clients that are known by name.
#[derive(Clone, PartialEq, Debug)]
pub struct Clients {
    /// As configured.
    pub file: PathBuf,
    /// Where a request has its client's API key.
    pub api_key: Option<KeyPart>,
    /// Where a request says on whose behalf it is.
    pub subject: Option<KeyPart>,
    /// In the order of the file.
    pub list: Vec<Client>,
}

/// Requests that belong to one client: those with one of its keys or subjects, or from its networks.
#[derive(Clone, PartialEq, Debug)]
pub struct Client {
    pub name: String,
    pub plan: String,
    pub api_keys: Vec<Digest>,
    pub subjects: Vec<String>,
    pub networks: Vec<Network>,
}
