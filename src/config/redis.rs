//! Where gateways count together: the servers of Redis or Valkey, who the gateway is there, how its keys begin, and what
//! of them is not told.
//!
//! Plain data. Nothing is resolved or connected here, and nothing that is secret is ever shown: not in messages, not in
//! what `Debug` writes.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::client_tls::ClientTls;
use transom_limiter::key::KeyPart;

/// Unless the operator says otherwise.
pub const DEFAULT_PREFIX: &str = "transom";
pub const DEFAULT_TIMEOUT: Duration = Duration::from_millis(50);

/// Fields that carry what lets somebody in.
const SECRET_FIELDS: [&str; 4] = ["authorization", "proxy-authorization", "cookie", "x-api-key"];
/// Words in the name of a field or of a parameter of the query that say the same.
const SECRET_WORDS: [&str; 8] = ["api-key", "api_key", "apikey", "password", "secret", "session", "signature", "token"];

/// The table `[counters.shared]`.
#[derive(Clone, PartialEq, Debug)]
pub struct StoreConfig {
    pub nodes: Nodes,
    pub username: Option<String>,
    pub password: Option<Secret<String>>,
    /// 0 in a cluster, which has no other.
    pub database: i64,
    /// What every key begins with.
    pub prefix: String,
    /// How long a request waits for an answer, in all.
    pub timeout: Duration,
    /// What digests of secret parts of keys are made with, if the operator says: see [`Shared::digest_key`].
    pub digest_key: Option<Secret<Vec<u8>>>,
    /// There if the nodes are reached by TLS.
    pub tls: Option<ClientTls>,
}

impl StoreConfig {
    /// As it is where only the servers are named.
    pub fn with_defaults(nodes: Nodes) -> StoreConfig {
        StoreConfig {
            nodes,
            username: None,
            password: None,
            database: 0,
            prefix: DEFAULT_PREFIX.to_owned(),
            timeout: DEFAULT_TIMEOUT,
            digest_key: None,
            tls: None,
        }
    }

    /// What digests of secret parts of keys are made with; equal for all gateways that count together.
    pub fn digest_key(&self) -> Cow<'_, [u8]> {
        match &self.digest_key {
            Some(key) => Cow::Borrowed(&key.0),
            None => Cow::Owned(format!("transom digest key {}", self.prefix).into_bytes()),
        }
    }
}

/// Whether a part of a key is told by its digest alone, by what it is called. Claims of tokens are no secret, and
/// neither is the fingerprint of a certificate.
pub fn is_secret_part(part: &KeyPart) -> bool {
    let tells = |name: &str| {
        let name = name.to_ascii_lowercase();
        SECRET_WORDS.iter().any(|word| name.contains(word))
    };
    match part {
        KeyPart::Cookie(_) => true,
        KeyPart::Header(name) => SECRET_FIELDS.contains(&name.as_str()) || tells(name),
        KeyPart::Query(name) => tells(name),
        KeyPart::Ip { .. }
        | KeyPart::Jwt(_)
        | KeyPart::Param(_)
        | KeyPart::ClientCert
        | KeyPart::Host
        | KeyPart::Method
        | KeyPart::Path
        | KeyPart::Route
        | KeyPart::Global => false,
    }
}

/// How the servers belong together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Nodes {
    Single(Node),
    /// Some nodes of a cluster, by which the others are found.
    Cluster(Vec<Node>),
    /// Who knows which server is the master of this name.
    Sentinel {
        nodes: Vec<Node>,
        master: String,
    },
}

impl Nodes {
    /// Those that are named.
    pub fn all(&self) -> &[Node] {
        match self {
            Nodes::Single(node) => std::slice::from_ref(node),
            Nodes::Cluster(nodes) | Nodes::Sentinel { nodes, .. } => nodes,
        }
    }
}

/// As the log and the operator call them together.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = || self.all().iter().map(Node::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Nodes::Single(node) => node.fmt(f),
            Nodes::Cluster(_) => write!(f, "the cluster of {}", listed()),
            Nodes::Sentinel { master, .. } => write!(f, "the master `{master}` of the sentinels {}", listed()),
        }
    }
}

/// One server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

/// As operators write it; an IPv6 address is in brackets.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Node::Tcp { host, port } => write!(f, "{host}:{port}"),
            Node::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// What nobody is shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(pub T);

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
