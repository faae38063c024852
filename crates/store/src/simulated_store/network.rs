//! The connections between simulated gateways and their store, in memory. Nothing moves by itself: the exploration chooses when
//! the store executes a call, when its reply arrives, and when a connection breaks.
//!
//! As over TCP, calls and replies of a connection stay in order. A call that was written before its connection broke may still be
//! executed.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, Hash, Hasher};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use foldhash::fast::FixedState;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

use super::counters::{CounterArguments, Store};
use transom_config::redis::Node;

/// The host of the store.
const HOST: &str = "simulated";

thread_local! {
    /// The network of the exploration that runs on this thread.
    static CURRENT: RefCell<Option<Network>> = const { RefCell::new(None) };
}

#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    store: Store,
    /// The counters before the last write: those of a replica.
    replica: Store,
    time_ms: u64,
    connections: Vec<Connection>,
    /// Whether connections are refused.
    is_down: bool,
    /// Whether calls were lost before the store has executed them.
    has_lost_calls: bool,
    /// Tokens that the store may count although no gateway has them, by key: granted in replies that were lost, of refunds that were
    /// lost or came after the window, or known to a gateway before the store had lost its data.
    surplus: BTreeMap<String, u64>,
    /// When the store has executed the last reset.
    reset_ms: u64,
    /// Whether the store does not know the digests of the scripts, by `Call::is_refund`.
    forgot_script: [bool; 2],
    /// Whether calls that charge wait after they were made; reports and refunds do not.
    holds_calls: bool,
    /// Calls that were made and not sent, each with its gateway.
    held: Vec<(usize, oneshot::Sender<()>)>,
    /// The gateway that runs.
    running: usize,
}

/// A connection.
struct Connection {
    gateway: usize,
    /// Bytes of a command that is not complete yet.
    unparsed: Vec<u8>,
    /// Commands whose replies have not arrived.
    calls: VecDeque<Call>,
    /// Bytes that the gateway has not read yet.
    arrived: Vec<u8>,
    reader: Option<Waker>,
    /// Whether the gateway sees the end of the connection.
    is_cut: bool,
    /// Whether a reply to a script has arrived.
    has_answered: bool,
    /// A hash of all bytes that have arrived, and of the end.
    history: u64,
}

#[derive(Hash)]
struct Call {
    words: Vec<String>,
    /// Set once the store has executed the call.
    reply: Option<Vec<u8>>,
    /// Tokens that the store counts, by key, as long as the reply does not arrive.
    surplus: Vec<(String, u64)>,
}

impl Call {
    fn is_script(&self) -> bool {
        self.words[0].starts_with("EVAL")
    }

    /// Whether the script is `refund.lua`, whose arguments begin with a letter.
    fn is_refund(&self) -> bool {
        self.arguments().first().is_some_and(|first| first.parse::<u64>().is_err())
    }

    /// The tokens of a refund that is not executed.
    fn not_refunded(&self) -> Vec<(String, u64)> {
        let tokens = self.arguments().chunks_exact(5).map(|fields| fields[3].parse().expect("tokens"));
        if self.is_refund() { self.keys().iter().cloned().zip(tokens).collect() } else { Vec::new() }
    }

    fn key_count(&self) -> usize {
        self.words[2].parse().expect("a number of keys")
    }

    fn keys(&self) -> &[String] {
        &self.words[3..][..self.key_count()]
    }

    fn arguments(&self) -> &[String] {
        &self.words[3 + self.key_count()..]
    }
}

impl Network {
    /// The connection of a gateway to the network of this thread; `None` to a real server.
    pub fn connect(node: &Node) -> Option<io::Result<SimulatedStream>> {
        match node {
            Node::Tcp { host, port } if host == HOST => {
                let network = CURRENT.with_borrow(|current| current.clone())?;
                Some(network.open((*port).into()))
            }
            _ => None,
        }
    }

    /// The store, as the gateway of this number knows it.
    pub fn node(gateway: usize) -> Node {
        Node::Tcp { host: HOST.to_owned(), port: gateway as u16 }
    }

    /// Makes this the network of the thread.
    pub fn install(&self) {
        CURRENT.with_borrow_mut(|current| *current = Some(self.clone()));
    }

    /// Waits until the call that the running gateway has made is to be sent.
    pub async fn hold_call() {
        let held = CURRENT.with_borrow(|current| {
            let mut state = current.as_ref()?.state();
            let (send, held) = oneshot::channel();
            let gateway = state.running;
            state.holds_calls.then(|| state.held.push((gateway, send)))?;
            Some(held)
        });
        if let Some(held) = held {
            _ = held.await;
        }
    }

    /// Holds all calls that charge from now on, or sends them at once.
    pub fn set_holding(&self, holds_calls: bool) {
        let mut state = self.state();
        (state.holds_calls, state.held) = (holds_calls, Vec::new());
    }

    pub fn set_running(&self, gateway: usize) {
        self.state().running = gateway;
    }

    /// The gateways of the calls that can be sent.
    pub fn held(&self) -> Vec<usize> {
        let mut state = self.state();
        state.held.retain(|(_, send)| !send.is_closed());
        state.held.iter().map(|(gateway, _)| *gateway).collect()
    }

    /// Sends a call of a gateway, of those that are held.
    pub fn send(&self, gateway: usize, nth: usize) {
        let mut state = self.state();
        let position = state.held.iter().enumerate().filter(|(_, (of, _))| *of == gateway).nth(nth);
        if let Some((position, _)) = position {
            drop(state.held.remove(position));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the network of this thread.
    pub fn uninstall() {
        CURRENT.take();
    }

    fn open(&self, gateway: usize) -> io::Result<SimulatedStream> {
        let mut state = self.state();
        if state.is_down {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let connection = Connection {
            gateway,
            unparsed: Vec::new(),
            calls: VecDeque::new(),
            arrived: Vec::new(),
            reader: None,
            is_cut: false,
            has_answered: false,
            history: 0,
        };
        state.connections.push(connection);
        Ok(SimulatedStream { network: self.clone(), connection: state.connections.len() - 1 })
    }

    pub fn set_time(&self, time_ms: u64) {
        self.state().time_ms = time_ms;
    }

    /// The connections whose next call can be executed.
    pub fn executable(&self) -> Vec<usize> {
        self.connections_where(|connection| connection.calls.iter().any(|call| call.reply.is_none()))
    }

    /// The connections on which a reply can arrive.
    pub fn deliverable(&self) -> Vec<usize> {
        self.connections_where(|connection| {
            !connection.is_cut && connection.calls.front().is_some_and(|call| call.reply.is_some())
        })
    }

    /// The connections that are not cut and have calls in flight.
    pub fn busy(&self) -> Vec<usize> {
        self.connections_where(|connection| !connection.is_cut && !connection.calls.is_empty())
    }

    fn connections_where(&self, condition: impl Fn(&Connection) -> bool) -> Vec<usize> {
        let state = self.state();
        state
            .connections
            .iter()
            .enumerate()
            .filter(|(_, connection)| condition(connection))
            .map(|(nth, _)| nth)
            .collect()
    }

    /// Lets the store execute the next call of a connection.
    pub fn execute(&self, connection: usize) {
        let state = &mut *self.state();
        let State { store, replica, time_ms, connections, forgot_script, surplus, reset_ms, .. } = state;
        let connection = &mut connections[connection];
        let Some(call) = connection.calls.iter_mut().find(|call| call.reply.is_none()) else { return };
        let before = store.clone();
        let forgot = &mut forgot_script[usize::from(call.is_refund())];
        *forgot &= call.words[0] == "EVALSHA";
        call.reply = Some(if *forgot {
            call.surplus = call.not_refunded();
            b"-NOSCRIPT No matching script\r\n".to_vec()
        } else if call.is_refund() {
            if call.arguments().iter().any(|argument| argument == "all") {
                *reset_ms = *time_ms;
            }
            let (refunded, kept) = store.refund(call.keys(), call.arguments(), *time_ms);
            add_surplus(surplus, kept);
            integer(refunded)
        } else {
            let reply = store.acquire(call.keys(), call.arguments(), *time_ms);
            call.surplus = granted(call, &reply);
            for key in call.keys() {
                let more = store.used(key).saturating_sub(before.used(key));
                let granted = call.surplus.iter().filter(|(of, _)| of == key).map(|(_, tokens)| tokens).sum();
                add_surplus(surplus, [(key.clone(), more.saturating_sub(granted))]);
            }
            array(&reply)
        });
        if before != *store {
            *replica = before;
        }
        connection.execute_others();
        if connection.is_cut {
            // No reply arrives any more.
            while let Some(call) = connection.calls.pop_front_if(|call| call.reply.is_some()) {
                add_surplus(surplus, call.surplus);
            }
        }
    }

    /// Lets the reply to the first call of a connection arrive.
    pub fn deliver(&self, connection: usize) {
        let waker = {
            let connection = &mut self.state().connections[connection];
            connection.deliver_first();
            connection.deliver_others();
            connection.reader.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Breaks a connection: replies that have not arrived are lost.
    pub fn cut(&self, connection: usize) {
        let waker = {
            let State { connections, surplus, .. } = &mut *self.state();
            let connection = &mut connections[connection];
            add_surplus(surplus, connection.cut());
            connection.reader.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Breaks all connections. Calls that were not executed are lost, or may still be executed.
    fn cut_all(&self, loses_calls: bool) {
        let wakers: Vec<Waker> = {
            let State { connections, has_lost_calls, surplus, .. } = &mut *self.state();
            connections
                .iter_mut()
                .filter_map(|connection| {
                    add_surplus(surplus, connection.cut());
                    if loses_calls {
                        *has_lost_calls |= !connection.calls.is_empty();
                        connection.calls.drain(..).for_each(|call| add_surplus(surplus, call.not_refunded()));
                    }
                    connection.reader.take()
                })
                .collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Refuses connections from now on. Calls that were not executed are lost, or may still be executed.
    pub fn begin_outage(&self, loses_calls: bool) {
        self.state().is_down = true;
        self.cut_all(loses_calls);
    }

    /// Accepts connections again.
    pub fn end_outage(&self) {
        self.state().is_down = false;
    }

    /// Tokens that the store may count under this key although no gateway has them.
    pub fn surplus(&self, key: &str) -> u64 {
        self.state().surplus.get(key).copied().unwrap_or(0)
    }

    /// When the store has executed the last reset; 0 if never.
    pub fn reset_ms(&self) -> u64 {
        self.state().reset_ms
    }

    /// Whether a reply has arrived at the gateway.
    pub fn has_answered(&self, gateway: usize) -> bool {
        let state = self.state();
        state.connections.iter().any(|connection| connection.gateway == gateway && connection.has_answered)
    }

    /// Whether calls were lost before the store has executed them: they are not sent again.
    pub fn has_lost_calls(&self) -> bool {
        self.state().has_lost_calls
    }

    pub fn is_down(&self) -> bool {
        self.state().is_down
    }

    /// Restarts the store without its data.
    pub fn restart_empty(&self) {
        self.cut_all(true);
        let mut state = self.state();
        (state.store, state.forgot_script) = (Store::default(), [true; 2]);
    }

    /// Promotes the replica, which lacks the last write.
    pub fn fail_over(&self) {
        self.cut_all(true);
        let state = &mut *self.state();
        let former = std::mem::replace(&mut state.store, state.replica.clone());
        state.forgot_script = [true; 2];
        // The last write may have been a refund.
        for key in state.store.keys() {
            add_surplus(&mut state.surplus, [(key.to_owned(), state.store.tokens_beyond(&former, key))]);
        }
    }

    /// The connections of a gateway that has ended. Its calls may still be executed.
    pub fn end_gateway(&self, gateway: usize) {
        let mut state = self.state();
        let State { connections, surplus, .. } = &mut *state;
        let of_gateway = connections.iter_mut().filter(|connection| connection.gateway == gateway);
        of_gateway.for_each(|connection| add_surplus(surplus, connection.cut()));
    }

    pub fn is_cut(&self, connection: usize) -> bool {
        self.state().connections[connection].is_cut
    }

    /// Whether a connection of the gateway has ended.
    pub fn has_reconnected(&self, gateway: usize) -> bool {
        self.state().connections.iter().any(|connection| connection.gateway == gateway && connection.is_cut)
    }

    pub fn gateway_of(&self, connection: usize) -> usize {
        self.state().connections[connection].gateway
    }

    /// A hash of all that has arrived at a gateway, connection by connection.
    pub fn history_of(&self, gateway: usize) -> u64 {
        let state = self.state();
        let connections = state.connections.iter().filter(|connection| connection.gateway == gateway);
        hash_of(connections.map(|connection| connection.history).collect::<Vec<_>>())
    }

    pub fn used(&self, key: &str) -> u64 {
        self.state().store.used(key)
    }

    pub fn keys(&self) -> Vec<String> {
        self.state().store.keys().map(str::to_owned).collect()
    }

    pub fn store(&self) -> Store {
        self.state().store.clone()
    }

    /// Adds the store and all that is in flight to a hash.
    pub fn hash(&self, hasher: &mut impl Hasher) {
        let state = self.state();
        (&state.store, &state.replica, state.is_down, state.time_ms, state.forgot_script).hash(hasher);
        (state.has_lost_calls, &state.surplus, state.reset_ms).hash(hasher);
        for connection in &state.connections {
            (connection.gateway, connection.is_cut, &connection.calls, connection.history).hash(hasher);
        }
    }

    /// The calls in flight, for a trace.
    pub fn describe(&self) -> String {
        let state = self.state();
        let describe = |connection: &Connection| {
            let calls: Vec<String> =
                connection.calls.iter().filter(|call| call.is_script()).map(describe_call).collect();
            (!calls.is_empty()).then(|| {
                format!("{}{}: {}", connection.gateway, if connection.is_cut { " (cut)" } else { "" }, calls.join("; "))
            })
        };
        let connections: Vec<String> = state.connections.iter().filter_map(describe).collect();
        format!("{}; in flight: {}", state.store, connections.join(" | "))
    }
}

fn describe_call(call: &Call) -> String {
    let state = call.reply.as_ref().map(|reply| String::from_utf8_lossy(reply).replace("\r\n", " "));
    format!("{} {:?} -> {}", call.keys().join(","), call.arguments(), state.as_deref().unwrap_or("not executed"))
}

impl Connection {
    /// Adds the commands in `unparsed`.
    fn parse(&mut self) {
        while let Some((words, length)) = parse_command(&self.unparsed) {
            self.unparsed.drain(..length);
            self.calls.push_back(Call { words, reply: None, surplus: Vec::new() });
        }
        self.execute_others();
        self.deliver_others();
    }

    /// Executes commands that are no scripts, up to the first script that was not executed.
    fn execute_others(&mut self) {
        let next = self.calls.iter_mut().filter(|call| call.reply.is_none());
        for call in next {
            if call.is_script() {
                return;
            }
            call.reply = Some(match call.words[0].as_str() {
                "PING" => "+PONG\r\n".into(),
                // All slots are at one server.
                "CLUSTER" => {
                    let (host, port) = (bulk(HOST), self.gateway);
                    format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n{host}:{port}\r\n{}", bulk("id")).into_bytes()
                }
                _ => "+OK\r\n".into(),
            });
        }
    }

    fn deliver_others(&mut self) {
        while self.calls.front().is_some_and(|call| !call.is_script() && call.reply.is_some()) {
            self.deliver_first();
        }
    }

    fn deliver_first(&mut self) {
        let Some(call) = self.calls.pop_front() else { return };
        self.has_answered |= call.is_script();
        if let Some(reply) = call.reply {
            self.history = hash_of((self.history, &reply));
            self.arrived.extend(reply);
        }
    }

    /// Returns the tokens of replies that do not arrive any more.
    fn cut(&mut self) -> Vec<(String, u64)> {
        let mut surplus = Vec::new();
        if !self.is_cut {
            self.is_cut = true;
            self.history = hash_of((self.history, "end"));
            self.calls.iter_mut().for_each(|call| surplus.append(&mut call.surplus));
            self.calls.retain(|call| call.reply.is_none() && call.is_script());
        }
        surplus
    }
}

/// The tokens that a reply of `acquire.lua` grants, by key.
fn granted(call: &Call, reply: &[i64]) -> Vec<(String, u64)> {
    let mut granted = Vec::new();
    let (mut keys, mut arguments, mut reply) = (call.keys().iter(), call.arguments().iter(), &reply[1..]);
    while let Some(count) = arguments.nth(1) {
        reply = &reply[1..];
        for _ in 0..count.parse::<usize>().expect("a number of counters") {
            CounterArguments::take(&mut arguments);
            granted.push((keys.next().expect("a key").clone(), reply[0] as u64));
            reply = &reply[4..];
        }
    }
    granted
}

fn add_surplus(surplus: &mut BTreeMap<String, u64>, more: impl IntoIterator<Item = (String, u64)>) {
    for (key, tokens) in more.into_iter().filter(|(_, tokens)| *tokens > 0) {
        *surplus.entry(key).or_default() += tokens;
    }
}

/// As fast as possible: states are hashed at each step.
pub fn hash_of(value: impl Hash) -> u64 {
    FixedState::default().hash_one(value)
}

/// The words of an array of bulk strings, and its length in bytes; `None` if it is not complete.
fn parse_command(bytes: &[u8]) -> Option<(Vec<String>, usize)> {
    let mut at = 0;
    let count = parse_length(bytes, &mut at)?;
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        let length = parse_length(bytes, &mut at)?;
        let word = bytes.get(at..at + length)?;
        bytes.get(at + length + 1)?;
        words.push(String::from_utf8(word.to_vec()).expect("text"));
        at += length + 2;
    }
    Some((words, at))
}

/// The number of a line such as `*3` or `$5`; moves behind it.
fn parse_length(bytes: &[u8], at: &mut usize) -> Option<usize> {
    let line = bytes.get(*at..)?;
    let end = line.windows(2).position(|pair| pair == b"\r\n")?;
    *at += end + 2;
    std::str::from_utf8(&line[1..end]).expect("text").parse().ok()
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

fn integer(number: i64) -> Vec<u8> {
    format!(":{number}\r\n").into_bytes()
}

fn array(numbers: &[i64]) -> Vec<u8> {
    let items: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
    format!("*{}\r\n{items}", numbers.len()).into_bytes()
}

/// The gateway's end of a connection.
pub struct SimulatedStream {
    network: Network,
    connection: usize,
}

impl AsyncRead for SimulatedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let connection = &mut self.network.state().connections[self.connection];
        if connection.arrived.is_empty() && !connection.is_cut {
            connection.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let length = connection.arrived.len().min(into.remaining());
        into.put_slice(&connection.arrived[..length]);
        connection.arrived.drain(..length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(self: Pin<&mut Self>, _cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let waker = {
            let connection = &mut self.network.state().connections[self.connection];
            if connection.is_cut {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            connection.unparsed.extend_from_slice(bytes);
            connection.parse();
            if connection.arrived.is_empty() { None } else { connection.reader.take() }
        };
        waker.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.network.cut(self.connection);
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.network.cut(self.connection);
    }
}
