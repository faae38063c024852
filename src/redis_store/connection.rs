//! One connection to a server: calls of many tasks go out on it one behind the other, and are answered in that order.
//!
//! A call is sent once. When the connection breaks, all calls on it fail, and whether they were executed is not
//! known. Who no longer wants an answer may go away at any time; the answer is dropped when it comes.
//!
//! A connection from which nothing comes for a while although it was asked is asked PING, and broken off if that is not
//! answered either: so it is noticed even when nobody waits that long for his own answer.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, ServerError, Value};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::batch::Queue;
use super::connect::Sender;
use super::eviction::Eviction;
use super::scripts::By;
use crate::config::redis::Node;

/// How long a connection may be silent while it is asked; then for how long an answer to PING is waited for.
const SILENCE: Duration = Duration::from_millis(500);

/// How often a script may be forgotten under a call before it is sent in full whoever else does.
const FORGOTTEN_MAX: u32 = 8;

/// Why there is no answer to a call.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The connection broke; nobody knows whether it was executed.
    Lost(String),
    /// The server says that it did not do it.
    Said(ServerError),
}

pub struct Connection {
    pub node: Node,
    calls: MultiplexedConnection,
    driver: AbortHandle,
    guard: RefCell<Option<AbortHandle>>,
    /// Why it is broken, if it is.
    broken: RefCell<Option<String>>,
    /// Calls sent, and the latest that was answered.
    sent: Cell<u64>,
    answered: Cell<u64>,
    /// Whether the guard is looking already.
    guarded: Cell<bool>,
    wake: Rc<Notify>,
    /// How often each script was sent in full.
    taught: [Cell<u32>; 2],
    /// Calls that wait to be sent together.
    pub queue: Queue,
    pub eviction: Eviction,
}

/// Which of the scripts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Take = 0,
    Give = 1,
}

impl Connection {
    /// Needs a runtime.
    pub fn new(sender: Sender, node: Node) -> Rc<Connection> {
        let wake = Rc::new(Notify::new());
        let line = Rc::new(Connection {
            node,
            calls: sender.calls,
            driver: sender.driver.abort_handle(),
            guard: RefCell::new(None),
            broken: RefCell::new(None),
            sent: Cell::new(0),
            answered: Cell::new(0),
            guarded: Cell::new(false),
            wake: Rc::clone(&wake),
            taught: [Cell::new(0), Cell::new(0)],
            queue: Queue::default(),
            eviction: Eviction::default(),
        });
        let guard = spawn_local(guard(Rc::downgrade(&line), wake));
        line.guard.replace(Some(guard.abort_handle()));
        line
    }

    /// Whether calls may be sent on it.
    pub fn is_sound(&self) -> bool {
        self.broken.borrow().is_none() && !self.driver.is_finished()
    }

    /// All who wait on it are told that their fate is unknown, and nobody else is sent on it.
    pub fn break_off(&self, why: &str) {
        self.broken.borrow_mut().get_or_insert_with(|| why.to_owned());
        self.driver.abort();
    }

    pub async fn ask(&self, cmd: Cmd) -> Result<Value, Failure> {
        let number = self.begin();
        let mut calls = self.calls.clone();
        let said = calls.send_packed_command(&cmd).await;
        self.end(number, said)
    }

    /// Asks a server that takes over a slot to answer for it already.
    pub async fn ask_importing(&self, cmd: Cmd) -> Result<Value, Failure> {
        let mut both = Pipeline::with_capacity(2);
        both.cmd("ASKING");
        both.add_command(cmd);
        let number = self.begin();
        let mut calls = self.calls.clone();
        let said = calls.send_packed_commands(&both, 0, 2).await;
        self.end(number, said.map(|mut said| said.pop().unwrap_or(Value::Nil)))
    }

    /// Runs a script, which the server is sent in full if it does not know it: once, however many calls find that out
    /// at the same time. What is sent behind it finds it known.
    pub async fn run(&self, which: Which, importing: bool, call: &dyn Fn(By) -> Cmd) -> Result<Value, Failure> {
        let ask = async |by: By| if importing { self.ask_importing(call(by)).await } else { self.ask(call(by)).await };
        let taught = &self.taught[which as usize];
        for _ in 0..FORGOTTEN_MAX {
            let before = taught.get();
            match ask(By::Sha).await {
                Err(Failure::Said(error)) if error.code() == "NOSCRIPT" => {
                    if taught.get() == before {
                        taught.set(before.wrapping_add(1));
                        return ask(By::Text).await;
                    }
                }
                said => return said,
            }
        }
        ask(By::Text).await
    }

    /// What an operator is told about a failure.
    pub fn blame(&self, failure: &Failure) -> String {
        match failure {
            Failure::Lost(why) => format!("{}: {why}", self.node),
            Failure::Said(error) => format!("{}: {}", self.node, ServerErrorText(error)),
        }
    }

    fn begin(&self) -> u64 {
        let number = self.sent.get() + 1;
        self.sent.set(number);
        if !self.guarded.replace(true) {
            self.wake.notify_one();
        }
        number
    }

    fn end(&self, number: u64, said: Result<Value, RedisError>) -> Result<Value, Failure> {
        if self.answered.get() < number {
            self.answered.set(number);
        }
        match said {
            Ok(Value::ServerError(error)) => Err(Failure::Said(error)),
            Ok(said) => Ok(said),
            Err(error) => {
                self.break_off(&error.to_string());
                Err(Failure::Lost(self.broken.borrow().clone().unwrap_or_default()))
            }
        }
    }

    async fn is_alive(&self) -> bool {
        let number = self.sent.get();
        let mut calls = self.calls.clone();
        let ping = redis::cmd("PING");
        let alive = matches!(timeout(SILENCE, calls.send_packed_command(&ping)).await, Ok(Ok(_)));
        if alive {
            self.answered.set(self.answered.get().max(number));
        }
        alive
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
        if let Some(guard) = self.guard.take() {
            guard.abort();
        }
    }
}

/// Watches a connection as long as something is asked on it.
async fn guard(line: Weak<Connection>, wake: Rc<Notify>) {
    loop {
        wake.notified().await;
        loop {
            let Some(answered) = line.upgrade().map(|line| line.answered.get()) else { return };
            sleep(SILENCE).await;
            let Some(line) = line.upgrade() else { return };
            if line.answered.get() == answered && !line.is_alive().await {
                line.break_off("no answer");
                return;
            }
            if line.answered.get() == line.sent.get() {
                line.guarded.set(false);
                break;
            }
        }
    }
}

/// An error as the server said it.
pub struct ServerErrorText<'e>(pub &'e ServerError);

impl fmt::Display for ServerErrorText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.code())?;
        self.0.details().map_or(Ok(()), |details| write!(f, " {details}"))
    }
}
