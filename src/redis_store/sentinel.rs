//! Which server is the master, as sentinels tell it.
//!
//! The sentinel that last knew is asked first, and the others in their order if it does not answer. What it says
//! is not believed before the server itself says that it is a master.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use redis::Value;

use super::connect::{Dial, in_time};
use super::connection::Connection;
use crate::config::redis::Node;

/// How often it is looked whether the master is another one.
pub const EVERY: Duration = Duration::from_millis(1000);
/// Until a sentinel that does not answer is given up.
const PATIENCE: Duration = Duration::from_millis(500);

pub struct Sentinels {
    nodes: Vec<Node>,
    pub master: String,
    /// Who is asked first.
    first: Cell<usize>,
    /// The connection to it.
    line: RefCell<Option<Rc<Connection>>>,
}

impl Sentinels {
    pub fn new(nodes: Vec<Node>, master: String) -> Sentinels {
        Sentinels { nodes, master, first: Cell::new(0), line: RefCell::new(None) }
    }

    /// A connection to the master.
    pub async fn open_master(&self, dial: &Dial) -> Result<Rc<Connection>, String> {
        self.by_any(dial, async |master| opened(dial, &master).await).await
    }

    /// Where the master is, by the first sentinel that knows.
    pub async fn master(&self, dial: &Dial) -> Result<Node, String> {
        self.by_any(dial, async |master| Ok(master)).await
    }

    /// Does something with the master that a sentinel names; if nothing comes of it, another one may know better.
    async fn by_any<T>(&self, dial: &Dial, act: impl AsyncFn(Node) -> Result<T, String>) -> Result<T, String> {
        let mut why = "no sentinel is known".to_owned();
        for _ in &self.nodes {
            let done = match self.ask(dial).await {
                Ok(master) => act(master).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(error) => why = error,
            }
            self.first.set((self.first.get() + 1) % self.nodes.len());
            self.line.replace(None);
        }
        Err(why)
    }

    async fn ask(&self, dial: &Dial) -> Result<Node, String> {
        let Some(node) = self.nodes.get(self.first.get()) else { return Err("no sentinel is known".to_owned()) };
        let said = in_time(node, PATIENCE, async {
            let standing = self.line.borrow().clone().filter(|line| line.is_sound());
            let line = match standing {
                Some(line) => line,
                None => dial.open_sentinel(node).await?,
            };
            self.line.replace(Some(Rc::clone(&line)));
            let mut question = redis::cmd("SENTINEL");
            question.arg("get-master-addr-by-name").arg(&self.master);
            line.ask(question).await.map_err(|failure| line.blame(&failure))
        });
        address(&said.await?).ok_or_else(|| format!("{node}: this sentinel knows no master called `{}`", self.master))
    }
}

/// A connection to a server that says it is a master.
async fn opened(dial: &Dial, node: &Node) -> Result<Rc<Connection>, String> {
    let line = dial.open(node).await?;
    let role = async { line.ask(redis::cmd("ROLE")).await.map_err(|failure| line.blame(&failure)) };
    match in_time(node, PATIENCE, role).await? {
        Value::Array(said) if said.first().and_then(text) == Some("master") => Ok(line),
        _ => Err(format!("{node}: the sentinels say that it is the master, and it says that it is not")),
    }
}

fn address(said: &Value) -> Option<Node> {
    let Value::Array(said) = said else { return None };
    let [host, port] = said.as_slice() else { return None };
    Some(Node::Tcp { host: text(host)?.to_owned(), port: text(port)?.parse().ok()? })
}

/// A text in an answer.
pub fn text(said: &Value) -> Option<&str> {
    match said {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
