//! One connection to a server, and the batching of calls on it.
//!
//! Calls of many tasks are pipelined, and replies arrive in order. A call is sent once: when the connection breaks, all calls
//! in flight fail, and whether they were executed is unknown. A caller may be dropped at any time; its reply is then
//! discarded.
//!
//! Acquire calls are batched, because a server spends more on receiving a command than on deciding it. The first call
//! is sent at once; calls that arrive while batches are in flight are sent in the next. One run of the script decides
//! them in order.
//!
//! A connection on which nothing arrives for a while although calls are in flight is sent PING, and closed without a
//! reply. This detects a dead server even when no caller waits that long.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, ServerError, Value};
use tokio::sync::{Notify, oneshot};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::scripts::{self, AcquireCall, AcquireResult, ScriptRef, Scripts};
use transom_config::redis::Node;

/// How long a connection may be silent while calls are in flight; then the limit for the reply to PING.
const SILENCE_MAX: Duration = Duration::from_millis(500);

/// Replies `NOSCRIPT` to one call before it sends the script in full.
const NOSCRIPT_MAX: u32 = 8;
/// Batches in flight: the server decides one while others are on the network.
const BATCHES_MAX: usize = 3;
/// Calls and counters in one batch. A server does nothing else meanwhile, and a script can unpack 8000 values at most.
const CALLS_MAX: usize = 64;
const COUNTERS_MAX: usize = 1024;
/// Characters of a server's message that are logged.
const EXCERPT_MAX_CHARS: usize = 300;

/// A redis-rs connection and the task that drives it.
pub struct Transport {
    pub calls: MultiplexedConnection,
    pub driver: tokio::task::JoinHandle<()>,
}

/// Why a call has no reply.
#[derive(Clone, Debug)]
pub enum CallError {
    /// The connection broke. Whether the call was executed is unknown.
    Lost(String),
    /// The server replied with an error and did not execute the call.
    Rejected(ServerError),
}

pub struct Connection {
    pub node: Node,
    calls: MultiplexedConnection,
    driver: AbortHandle,
    watchdog: RefCell<Option<AbortHandle>>,
    /// Set when the connection is closed.
    close_reason: RefCell<Option<String>>,
    /// Number of calls sent, and number of the latest call with a reply.
    sent: Cell<u64>,
    last_completed: Cell<u64>,
    /// Whether the watchdog is timing calls already.
    is_watched: Cell<bool>,
    wake: Rc<Notify>,
    /// How often each script was sent in full.
    full_sends: [Cell<u32>; 3],
    /// Acquire calls that wait for the next batch.
    pub queue: CallQueue,
    pub eviction: Eviction,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScriptKind {
    Acquire = 0,
    Refund = 1,
    Map = 2,
}

impl Connection {
    /// Must be called within a `LocalSet` or local runtime.
    pub fn new(transport: Transport, node: Node) -> Rc<Connection> {
        let wake = Rc::new(Notify::new());
        let connection = Rc::new(Connection {
            node,
            calls: transport.calls,
            driver: transport.driver.abort_handle(),
            watchdog: RefCell::new(None),
            close_reason: RefCell::new(None),
            sent: Cell::new(0),
            last_completed: Cell::new(0),
            is_watched: Cell::new(false),
            wake: Rc::clone(&wake),
            full_sends: [const { Cell::new(0) }; 3],
            queue: CallQueue::default(),
            eviction: Eviction::default(),
        });
        let watchdog = spawn_local(watch(Rc::downgrade(&connection), wake));
        connection.watchdog.replace(Some(watchdog.abort_handle()));
        connection
    }

    /// Whether calls may be sent.
    pub fn is_usable(&self) -> bool {
        self.close_reason.borrow().is_none() && !self.driver.is_finished()
    }

    /// Closes the connection. All calls in flight fail with [`CallError::Lost`].
    pub fn close(&self, why: &str) {
        self.close_reason.borrow_mut().get_or_insert_with(|| why.to_owned());
        self.driver.abort();
    }

    pub async fn call(&self, cmd: Cmd) -> Result<Value, CallError> {
        let number = self.begin_call();
        let mut calls = self.calls.clone();
        let reply = calls.send_packed_command(&cmd).await;
        self.end_call(number, reply)
    }

    /// Sends a command behind `ASKING`, to a server that is importing the slot.
    pub async fn call_asking(&self, cmd: Cmd) -> Result<Value, CallError> {
        let mut both = Pipeline::with_capacity(2);
        both.cmd("ASKING");
        both.add_command(cmd);
        let number = self.begin_call();
        let mut calls = self.calls.clone();
        let reply = calls.send_packed_commands(&both, 0, 2).await;
        self.end_call(number, reply.map(|mut reply| reply.pop().unwrap_or(Value::Nil)))
    }

    /// Runs a script by its digest. If the server does not know the script, one of the concurrent calls sends it in
    /// full; the others repeat and find it known.
    pub async fn run_script(
        &self,
        which: ScriptKind,
        importing: bool,
        call: &dyn Fn(ScriptRef) -> Cmd,
    ) -> Result<Value, CallError> {
        let call_once =
            async |by: ScriptRef| if importing { self.call_asking(call(by)).await } else { self.call(call(by)).await };
        let full_sends = &self.full_sends[which as usize];
        for _ in 0..NOSCRIPT_MAX {
            let before = full_sends.get();
            match call_once(ScriptRef::Sha).await {
                Err(CallError::Rejected(error)) if error.code() == "NOSCRIPT" => {
                    if full_sends.get() == before {
                        full_sends.set(before.wrapping_add(1));
                        return call_once(ScriptRef::Text).await;
                    }
                }
                reply => return reply,
            }
        }
        call_once(ScriptRef::Text).await
    }

    /// Describes a failed call for the operator.
    pub fn describe(&self, failure: &CallError) -> String {
        match failure {
            CallError::Lost(why) => format!("{}: {why}", self.node),
            CallError::Rejected(error) => format!("{}: {}", self.node, ServerErrorText(error)),
        }
    }

    fn begin_call(&self) -> u64 {
        let number = self.sent.get() + 1;
        self.sent.set(number);
        if !self.is_watched.replace(true) {
            self.wake.notify_one();
        }
        number
    }

    fn end_call(&self, number: u64, reply: Result<Value, RedisError>) -> Result<Value, CallError> {
        if self.last_completed.get() < number {
            self.last_completed.set(number);
        }
        match reply {
            Ok(Value::ServerError(error)) => Err(CallError::Rejected(error)),
            Ok(reply) => Ok(reply),
            Err(error) => {
                self.close(&error.to_string());
                Err(CallError::Lost(self.close_reason.borrow().clone().unwrap_or_default()))
            }
        }
    }

    async fn is_alive(&self) -> bool {
        let number = self.sent.get();
        let mut calls = self.calls.clone();
        let ping = redis::cmd("PING");
        let alive = matches!(timeout(SILENCE_MAX, calls.send_packed_command(&ping)).await, Ok(Ok(_)));
        if alive {
            self.last_completed.set(self.last_completed.get().max(number));
        }
        alive
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
        if let Some(watchdog) = self.watchdog.take() {
            watchdog.abort();
        }
    }
}

/// Closes the connection when calls are in flight and the server is silent.
async fn watch(connection: Weak<Connection>, wake: Rc<Notify>) {
    loop {
        wake.notified().await;
        loop {
            let Some(completed) = connection.upgrade().map(|connection| connection.last_completed.get()) else {
                return;
            };
            sleep(SILENCE_MAX).await;
            let Some(connection) = connection.upgrade() else { return };
            if connection.last_completed.get() == completed && !connection.is_alive().await {
                connection.close("no reply");
                return;
            }
            if connection.last_completed.get() == connection.sent.get() {
                connection.is_watched.set(false);
                break;
            }
        }
    }
}

/// A server error as the server wrote it.
pub struct ServerErrorText<'e>(pub &'e ServerError);

impl fmt::Display for ServerErrorText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.code())?;
        self.0.details().map_or(Ok(()), |details| write!(f, " {details}"))
    }
}

/// Whether the server of a connection was checked for eviction, and evicts. An evicting `maxmemory-policy` gives keys
/// their whole limit again, and no reply shows it.
#[derive(Default)]
pub struct Eviction {
    pub is_checked: Cell<bool>,
    pub is_evicting: Cell<bool>,
}

/// Which calls may share a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Batching {
    Any,
    /// Calls with the same key base: in a cluster, other counters may be on other servers.
    SameBase,
    /// None: the slot is moving between servers.
    Never,
}

#[derive(Default)]
pub struct CallQueue {
    waiting: RefCell<VecDeque<QueuedCall>>,
    batches_in_flight: Cell<usize>,
}

struct QueuedCall {
    call: AcquireCall,
    reply_to: oneshot::Sender<Result<AcquireResult, CallError>>,
}

/// Acquires in a batch with other calls on the connection.
pub async fn acquire(
    connection: &Rc<Connection>,
    scripts: &Rc<Scripts>,
    call: AcquireCall,
    batching: Batching,
) -> Result<AcquireResult, CallError> {
    if batching == Batching::Never {
        return run_one(connection, scripts, &call, true).await;
    }
    let (sender, result) = oneshot::channel();
    connection.queue.waiting.borrow_mut().push_back(QueuedCall { call, reply_to: sender });
    let in_flight = &connection.queue.batches_in_flight;
    if in_flight.get() < BATCHES_MAX {
        in_flight.set(in_flight.get() + 1);
        spawn_local(send_batches(Rc::clone(connection), Rc::clone(scripts), batching));
    }
    result.await.unwrap_or_else(|_closed| Err(CallError::Lost("the gateway ends".to_owned())))
}

/// Sends batches until no call waits.
async fn send_batches(connection: Rc<Connection>, scripts: Rc<Scripts>, batching: Batching) {
    loop {
        let (calls, senders) = connection.queue.next_batch(batching);
        if calls.is_empty() {
            break;
        }
        let mut decided = run_batch(&connection, &scripts, &calls, false).await.map(Vec::into_iter);
        for (sender, call) in senders.into_iter().zip(&calls) {
            let decision = match &mut decided {
                Ok(decided) => decided.next().ok_or_else(|| unexpected_reply(&Value::Nil)),
                // One key of the batch fails all calls, and none was executed.
                Err(CallError::Rejected(error)) if is_forbidden_key(error) && calls.len() > 1 => {
                    run_one(&connection, &scripts, call, false).await
                }
                Err(failure) => Err(failure.clone()),
            };
            // A dropped caller needs no reply.
            drop(sender.send(decision));
        }
    }
    connection.queue.batches_in_flight.set(connection.queue.batches_in_flight.get() - 1);
}

async fn run_one(
    connection: &Connection,
    scripts: &Scripts,
    call: &AcquireCall,
    importing: bool,
) -> Result<AcquireResult, CallError> {
    let decided = run_batch(connection, scripts, std::slice::from_ref(call), importing).await;
    decided.and_then(|mut decided| decided.pop().ok_or_else(|| unexpected_reply(&Value::Nil)))
}

async fn run_batch(
    connection: &Connection,
    scripts: &Scripts,
    calls: &[AcquireCall],
    importing: bool,
) -> Result<Vec<AcquireResult>, CallError> {
    let reply = connection
        .run_script(ScriptKind::Acquire, importing, &|by| scripts::acquire_command(&scripts.acquire, by, calls.iter()))
        .await?;
    scripts::parse_acquire_reply(&reply, calls.iter()).ok_or_else(|| unexpected_reply(&reply))
}

/// Where the result of a call goes.
type ReplySender = oneshot::Sender<Result<AcquireResult, CallError>>;

impl CallQueue {
    /// The next calls in the queue that can share a batch. Skips calls whose callers were dropped.
    fn next_batch(&self, batching: Batching) -> (Vec<AcquireCall>, Vec<ReplySender>) {
        let mut waiting = self.waiting.borrow_mut();
        let most = waiting.len().min(CALLS_MAX);
        let (mut calls, mut senders): (Vec<AcquireCall>, Vec<ReplySender>) =
            (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut counters = 0;
        while calls.len() < CALLS_MAX {
            let Some(next) = waiting.front() else { break };
            let has_same_base = |first: &AcquireCall| batching == Batching::Any || base(first) == base(&next.call);
            let fits = counters + next.call.requests.len() <= COUNTERS_MAX;
            let joins = calls.first().is_none_or(|first| fits && has_same_base(first));
            if !joins && !next.reply_to.is_closed() {
                break;
            }
            let Some(QueuedCall { call, reply_to: sender }) = waiting.pop_front() else { break };
            if !sender.is_closed() {
                counters += call.requests.len();
                calls.push(call);
                senders.push(sender);
            }
        }
        (calls, senders)
    }
}

fn base(call: &AcquireCall) -> &str {
    call.requests.first().map_or("", |request| &*request.key_base)
}

/// Whether the server rejects a call, and has not executed it, because the user has no right to one of its keys.
pub fn is_forbidden_key(error: &ServerError) -> bool {
    error.code() == "NOPERM" && error.details().is_some_and(|details| details.contains("permissions to access"))
}

/// The error for a reply of unexpected form.
pub fn unexpected_reply(reply: &Value) -> CallError {
    let reply: String = format!("{reply:?}").chars().take(100).collect();
    CallError::Lost(format!("unexpected reply to a script: {reply}"))
}

/// A server's message for the log: its beginning, in one line.
pub fn log_excerpt(why: &str) -> String {
    why.chars().take(EXCERPT_MAX_CHARS).map(|char| if char.is_control() { ' ' } else { char }).collect()
}
