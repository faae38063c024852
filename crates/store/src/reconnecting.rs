//! The connection to one server, opened when needed and reopened after it breaks.
//!
//! One task opens it for all callers that wait; callers may be dropped meanwhile. redis-rs's `ConnectionManager` hides
//! that it reconnected. Here every call can compare the number of connections opened first: a server behind a new
//! connection may have lost counts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::connect::Connector;
use super::connection::Connection;
use super::sentinel::Sentinels;
use transom_config::redis::Node;
use transom_limiter::key::Seed;

/// Where the server is.
pub enum Endpoint {
    Fixed(Node),
    /// The master that the sentinels name.
    Sentinels(Sentinels),
}

/// Identifies a server by its address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ServerId(u64);

impl ServerId {
    /// The only server, or the current master.
    pub const ONLY: ServerId = ServerId(0);

    /// A node of a cluster.
    pub fn of(node: &Node) -> ServerId {
        ServerId(Seed::SHARED.hash(&[&node.to_string()]) | 1)
    }
}

pub struct ReconnectingConnection {
    pub server: ServerId,
    endpoint: Endpoint,
    connector: Rc<Connector>,
    state: RefCell<State>,
    /// Connections opened by all servers of a client.
    connections_opened: Rc<Cell<u64>>,
}

enum State {
    Closed,
    /// The callers that wait.
    Opening(Vec<oneshot::Sender<OpenResult>>),
    Open(Rc<Connection>),
}

type OpenResult = Result<Rc<Connection>, String>;

impl ReconnectingConnection {
    pub fn new(
        server: ServerId,
        endpoint: Endpoint,
        connector: Rc<Connector>,
        opened: Rc<Cell<u64>>,
    ) -> Rc<ReconnectingConnection> {
        Rc::new(ReconnectingConnection {
            server,
            endpoint,
            connector,
            state: RefCell::new(State::Closed),
            connections_opened: opened,
        })
    }

    /// The server's name for the log.
    pub fn name(&self) -> String {
        match (&self.endpoint, self.current()) {
            (_, Some(connection)) => connection.node.to_string(),
            (Endpoint::Fixed(node), None) => node.to_string(),
            (Endpoint::Sentinels(sentinels), None) => format!("the master `{}`", sentinels.master),
        }
    }

    /// The connection, if it is open.
    pub fn current(&self) -> Option<Rc<Connection>> {
        match &*self.state.borrow() {
            State::Open(connection) if connection.is_usable() => Some(Rc::clone(connection)),
            State::Open(_) | State::Opening(_) | State::Closed => None,
        }
    }

    /// The connection, opened if needed; or why it cannot be opened.
    pub async fn get(self: &Rc<Self>) -> OpenResult {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let (sender, result) = oneshot::channel();
        let begins = {
            let mut state = self.state.borrow_mut();
            if let State::Opening(waiting) = &mut *state {
                waiting.push(sender);
                false
            } else {
                *state = State::Opening(vec![sender]);
                true
            }
        };
        if begins {
            let link = Rc::clone(self);
            spawn_local(async move { link.open().await });
        }
        result.await.unwrap_or_else(|_closed| Err("the gateway ends".to_owned()))
    }

    /// Closes a connection. The next call opens a new one.
    pub fn discard(&self, connection: &Rc<Connection>, why: &str) {
        connection.close(why);
        let mut state = self.state.borrow_mut();
        if matches!(&*state, State::Open(open) if Rc::ptr_eq(open, connection)) {
            *state = State::Closed;
        }
    }

    async fn open(self: Rc<Self>) {
        let opened = match &self.endpoint {
            Endpoint::Fixed(node) => self.connector.open(node).await,
            Endpoint::Sentinels(sentinels) => sentinels.open_master(&self.connector).await,
        };
        let next = match &opened {
            Ok(connection) => {
                self.connections_opened.set(self.connections_opened.get() + 1);
                State::Open(Rc::clone(connection))
            }
            Err(_) => State::Closed,
        };
        if let State::Opening(waiting) = self.state.replace(next) {
            for sender in waiting {
                // A dropped caller needs no connection.
                drop(sender.send(opened.clone()));
            }
        }
        if let (Endpoint::Sentinels(_), Ok(connection)) = (&self.endpoint, opened) {
            spawn_local(watch_master(Rc::downgrade(&self), Rc::downgrade(&connection)));
        }
    }

    /// Asks the sentinels for the master, and closes the connection if it leads elsewhere.
    pub async fn check_master(&self) {
        let (Endpoint::Sentinels(sentinels), Some(connection)) = (&self.endpoint, self.current()) else { return };
        if let Ok(master) = sentinels.master(&self.connector).await
            && master != connection.node
        {
            self.discard(&connection, "the sentinels name another master");
        }
    }
}

/// Checks periodically that the connection leads to the current master: a former master may still reply, and its counts
/// are lost.
async fn watch_master(link: std::rc::Weak<ReconnectingConnection>, connection: std::rc::Weak<Connection>) {
    loop {
        tokio::time::sleep(super::sentinel::MASTER_CHECK_PERIOD).await;
        let (Some(link), Some(connection)) = (link.upgrade(), connection.upgrade()) else { return };
        if !connection.is_usable() {
            return;
        }
        drop(connection);
        link.check_master().await;
    }
}
