//! How the gateway is a client of TLS: whom it trusts, and who it is itself.
//!
//! Made once, when the configuration is read, and shared by all event loops: so is the memory of sessions
//! that can be resumed. Two are alike if they were made of the same files and settings; connections
//! outlive a reload by that.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;

#[derive(Clone)]
pub struct ClientTls {
    /// Offers no protocol yet: see [`ClientTls::offering`].
    client: Arc<ClientConfig>,
    /// Who the server must be, where it is not the host of its URL.
    pub server_name: Option<ServerName<'static>>,
    /// A digest of all that it was made of.
    print: [u8; 32],
}

impl ClientTls {
    /// `print` is a digest of all that the others are made of.
    pub fn new(client: ClientConfig, server_name: Option<ServerName<'static>>, print: [u8; 32]) -> ClientTls {
        ClientTls { client: Arc::new(client), server_name, print }
    }

    /// The same with the protocols that are offered by ALPN.
    pub fn offering(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut client = ClientConfig::clone(&self.client);
        client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(client)
    }
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &ClientTls) -> bool {
        self.print == other.print
    }
}

impl Eq for ClientTls {}

impl Hash for ClientTls {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.print.hash(state);
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}
