//! Where gateways count together: the servers of Redis or Valkey, who the gateway is there, and how its keys begin.
//!
//! Plain data. Nothing is resolved or connected here, and nothing that is secret is ever shown: not in messages, not in
//! what `Debug` writes.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::client_tls::ClientTls;

/// The table `[counters.shared]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Shared {
    pub nodes: Nodes,
    pub username: Option<String>,
    pub password: Option<Hidden<String>>,
    /// 0 in a cluster, which has no other.
    pub database: i64,
    /// What every key begins with.
    pub prefix: String,
    /// How long a request waits for an answer, in all.
    pub timeout: Duration,
    /// What digests of secret parts of keys are made with; equal for all gateways that count together.
    pub digest_key: Hidden<Vec<u8>>,
    /// There if the nodes are reached by TLS.
    pub tls: Option<Tls>,
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

/// How the gateway is a client of TLS here.
#[derive(Clone, PartialEq, Debug)]
pub struct Tls {
    pub client: ClientTls,
}

/// What nobody is shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Hidden<T>(pub T);

impl<T> fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
