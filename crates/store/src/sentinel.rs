//! Finds the master through Redis Sentinel.
//!
//! The sentinel that replied last is queried first, the others in turn if it fails. The server that a sentinel names is
//! used only if it reports itself as a master (`ROLE`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use redis::Value;

use super::connect::{Connector, with_timeout};
use super::connection::Connection;
use transom_config::redis::Node;

/// How often the master is checked.
pub const MASTER_CHECK_PERIOD: Duration = Duration::from_millis(1000);
/// Limit for one reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

pub struct Sentinels {
    nodes: Vec<Node>,
    pub master: String,
    /// Index of the sentinel to query first.
    preferred: Cell<usize>,
    /// The connection to that sentinel.
    connection: RefCell<Option<Rc<Connection>>>,
}

impl Sentinels {
    pub fn new(nodes: Vec<Node>, master: String) -> Sentinels {
        Sentinels { nodes, master, preferred: Cell::new(0), connection: RefCell::new(None) }
    }

    /// Opens a connection to the master.
    pub async fn open_master(&self, connector: &Connector) -> Result<Rc<Connection>, String> {
        self.with_master(connector, async |master| open_verified(connector, &master).await).await
    }

    /// The master's address, from the first sentinel that knows it.
    pub async fn master(&self, connector: &Connector) -> Result<Node, String> {
        self.with_master(connector, async |master| Ok(master)).await
    }

    /// Runs `act` with the master that a sentinel names; if that fails, queries the next sentinel.
    async fn with_master<T>(
        &self,
        connector: &Connector,
        act: impl AsyncFn(Node) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut why = "no sentinel is known".to_owned();
        for _ in &self.nodes {
            let done = match self.query_master(connector).await {
                Ok(master) => act(master).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(error) => why = error,
            }
            self.preferred.set((self.preferred.get() + 1) % self.nodes.len());
            self.connection.replace(None);
        }
        Err(why)
    }

    async fn query_master(&self, connector: &Connector) -> Result<Node, String> {
        let Some(node) = self.nodes.get(self.preferred.get()) else { return Err("no sentinel is known".to_owned()) };
        let reply = with_timeout(node, REPLY_TIMEOUT, async {
            let open = self.connection.borrow().clone().filter(|connection| connection.is_usable());
            let connection = match open {
                Some(connection) => connection,
                None => connector.open_sentinel(node).await.map_err(|why| format!("sentinel {why}"))?,
            };
            self.connection.replace(Some(Rc::clone(&connection)));
            let mut command = redis::cmd("SENTINEL");
            command.arg("get-master-addr-by-name").arg(&self.master);
            connection.call(command).await.map_err(|failure| connection.describe(&failure))
        });
        parse_address(&reply.await?)
            .ok_or_else(|| format!("{node}: this sentinel does not know a master called `{}`", self.master))
    }
}

/// Opens a connection to a server and verifies that it is a master.
async fn open_verified(connector: &Connector, node: &Node) -> Result<Rc<Connection>, String> {
    let connection = connector.open(node).await?;
    let role = async { connection.call(redis::cmd("ROLE")).await.map_err(|failure| connection.describe(&failure)) };
    match with_timeout(node, REPLY_TIMEOUT, role).await? {
        Value::Array(reply) if reply.first().and_then(reply_text) == Some("master") => Ok(connection),
        _ => Err(format!("{node}: the sentinels name this server as the master, but it is not one")),
    }
}

fn parse_address(reply: &Value) -> Option<Node> {
    let Value::Array(reply) = reply else { return None };
    let [host, port] = reply.as_slice() else { return None };
    Some(Node::Tcp { host: reply_text(host)?.to_owned(), port: reply_text(port)?.parse().ok()? })
}

/// The text of a reply.
pub fn reply_text(reply: &Value) -> Option<&str> {
    match reply {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
