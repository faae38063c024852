//! `[counters.shared]`: the Redis or Valkey servers that hold shared counters, the login, and the form of keys.
//!
//! Plain data; nothing is resolved or connected here. `Debug` never shows secrets.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::client_tls::ClientTls;
use transom_limiter::key::KeyPart;

pub const DEFAULT_PREFIX: &str = "transom";
pub const DEFAULT_TIMEOUT: Duration = Duration::from_millis(50);

/// Header fields with credentials.
const SECRET_FIELDS: [&str; 4] = ["authorization", "proxy-authorization", "cookie", "x-api-key"];
/// Words that mark the name of a header field or query parameter as secret.
const SECRET_WORDS: [&str; 8] = ["api-key", "api_key", "apikey", "password", "secret", "session", "signature", "token"];

/// Settings of the store.
#[derive(Clone, PartialEq, Debug)]
pub struct StoreConfig {
    pub nodes: Nodes,
    pub username: Option<String>,
    pub password: Option<Secret<String>>,
    /// Always 0 in a cluster.
    pub database: i64,
    /// The beginning of all keys.
    pub prefix: String,
    /// How long a request waits for the store, in total.
    pub timeout: Duration,
    /// The configured key for digests; see [`StoreConfig::digest_key`].
    pub digest_key: Option<Secret<Vec<u8>>>,
    /// Present if the URLs are `rediss://`.
    pub tls: Option<ClientTls>,
}

impl StoreConfig {
    /// Settings with only the servers configured.
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

    /// The key for digests of secret key parts, equal for all gateways that share counters. Without a configured key,
    /// it derives from the prefix.
    pub fn digest_key(&self) -> Cow<'_, [u8]> {
        match &self.digest_key {
            Some(key) => Cow::Borrowed(&key.0),
            None => Cow::Owned(format!("transom digest key {}", self.prefix).into_bytes()),
        }
    }
}

/// Whether the store holds only a digest of this key part, judged by its name. Claims of tokens and fingerprints of
/// certificates are not secret.
pub fn is_secret_part(part: &KeyPart) -> bool {
    let is_secret_name = |name: &str| {
        let name = name.to_ascii_lowercase();
        SECRET_WORDS.iter().any(|word| name.contains(word))
    };
    match part {
        KeyPart::Cookie(_) => true,
        KeyPart::Header(name) => SECRET_FIELDS.contains(&name.as_str()) || is_secret_name(name),
        KeyPart::Query(name) => is_secret_name(name),
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

/// The topology of the servers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Nodes {
    Single(Node),
    /// Some nodes of a cluster; they name the others.
    Cluster(Vec<Node>),
    /// Sentinels, which know the server that is the master of this name.
    Sentinel {
        nodes: Vec<Node>,
        master: String,
    },
}

impl Nodes {
    /// All configured nodes or sentinels.
    pub fn all(&self) -> &[Node] {
        match self {
            Nodes::Single(node) => std::slice::from_ref(node),
            Nodes::Cluster(nodes) | Nodes::Sentinel { nodes, .. } => nodes,
        }
    }
}

/// For logs and messages.
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

/// As in a URL; an IPv6 address is in brackets.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Node::Tcp { host, port } => write!(f, "{host}:{port}"),
            Node::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A value that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(pub T);

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
