//! The standing connection to one server, opened when it is needed, and anew when it broke.
//!
//! It is opened once at a time, by a task of its own: all who need it wait for that, and may go away meanwhile.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::connect::Dial;
use super::connection::Connection;
use super::sentinel::Sentinels;
use crate::config::redis::Node;
use transom_limiter::key::Seed;

/// Where the server is.
pub enum Endpoint {
    Fixed(Node),
    /// Wherever sentinels say that the master is.
    Sentinels(Sentinels),
}

/// One of the servers, as long as it is known by the same address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Server(u64);

impl Server {
    /// The only one, or the one that is the master.
    pub const ONLY: Server = Server(0);

    /// One of several.
    pub fn of(node: &Node) -> Server {
        Server(Seed::SHARED.hash(&[&node.to_string()]) | 1)
    }
}

pub struct Link {
    pub server: Server,
    way: Endpoint,
    dial: Rc<Dial>,
    state: RefCell<State>,
    /// Connections that were opened, by all links of a store.
    opened: Rc<Cell<u64>>,
}

enum State {
    Closed,
    /// Who waits for it.
    Opening(Vec<oneshot::Sender<Opened>>),
    Open(Rc<Connection>),
}

type Opened = Result<Rc<Connection>, String>;

impl Link {
    pub fn new(server: Server, way: Endpoint, dial: Rc<Dial>, opened: Rc<Cell<u64>>) -> Rc<Link> {
        Rc::new(Link { server, way, dial, state: RefCell::new(State::Closed), opened })
    }

    /// What the server is called, for the log.
    pub fn name(&self) -> String {
        match (&self.way, self.standing()) {
            (_, Some(line)) => line.node.to_string(),
            (Endpoint::Fixed(node), None) => node.to_string(),
            (Endpoint::Sentinels(sentinels), None) => format!("the master `{}`", sentinels.master),
        }
    }

    /// The connection, if it stands.
    pub fn standing(&self) -> Option<Rc<Connection>> {
        match &*self.state.borrow() {
            State::Open(line) if line.is_sound() => Some(Rc::clone(line)),
            State::Open(_) | State::Opening(_) | State::Closed => None,
        }
    }

    /// The connection, which is opened if it does not stand; or why it can not be.
    pub async fn line(self: &Rc<Self>) -> Opened {
        if let Some(line) = self.standing() {
            return Ok(line);
        }
        let (tell, told) = oneshot::channel();
        let begins = {
            let mut state = self.state.borrow_mut();
            if let State::Opening(waiting) = &mut *state {
                waiting.push(tell);
                false
            } else {
                *state = State::Opening(vec![tell]);
                true
            }
        };
        if begins {
            let link = Rc::clone(self);
            spawn_local(async move { link.open().await });
        }
        told.await.unwrap_or_else(|_closed| Err("the gateway ends".to_owned()))
    }

    /// Gives up a connection, if it is still the one that stands.
    pub fn drop_line(&self, line: &Rc<Connection>, why: &str) {
        line.break_off(why);
        let mut state = self.state.borrow_mut();
        if matches!(&*state, State::Open(open) if Rc::ptr_eq(open, line)) {
            *state = State::Closed;
        }
    }

    async fn open(self: Rc<Self>) {
        let opened = match &self.way {
            Endpoint::Fixed(node) => self.dial.open(node).await,
            Endpoint::Sentinels(sentinels) => sentinels.open_master(&self.dial).await,
        };
        let next = match &opened {
            Ok(line) => {
                self.opened.set(self.opened.get() + 1);
                State::Open(Rc::clone(line))
            }
            Err(_) => State::Closed,
        };
        if let State::Opening(waiting) = self.state.replace(next) {
            for tell in waiting {
                // Who went away needs no connection.
                drop(tell.send(opened.clone()));
            }
        }
        if let (Endpoint::Sentinels(_), Ok(line)) = (&self.way, opened) {
            spawn_local(follow(Rc::downgrade(&self), Rc::downgrade(&line)));
        }
    }

    /// Asks the sentinels whether the master is still the one that the connection goes to, and gives it up if not.
    pub async fn check_master(&self) {
        let (Endpoint::Sentinels(sentinels), Some(line)) = (&self.way, self.standing()) else { return };
        if let Ok(master) = sentinels.master(&self.dial).await
            && master != line.node
        {
            self.drop_line(&line, "the sentinels have another master");
        }
    }
}

/// Looks after a change of the master as long as a connection stands: the old one may still answer, and count for
/// nobody.
async fn follow(link: std::rc::Weak<Link>, line: std::rc::Weak<Connection>) {
    loop {
        tokio::time::sleep(super::sentinel::EVERY).await;
        let (Some(link), Some(line)) = (link.upgrade(), line.upgrade()) else { return };
        if !line.is_sound() {
            return;
        }
        drop(line);
        link.check_master().await;
    }
}
