//! The Redis client of one worker: one server, the master that sentinels name, or a cluster. Connections are opened
//! when they are first needed.
//!
//! Calls of many tasks share one connection per server and are batched. A call is sent at most once, unless the server
//! says that it did not execute the call (`NOSCRIPT`, `MOVED`, `ASK`, `TRYAGAIN`): a call that is repeated after a
//! broken connection might count twice. The caller decides how long it waits, and may be dropped at any time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use redis::{Cmd, ServerError, Value};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::cluster::{Cluster, parse_redirect};
use super::connect::Connector;
use super::connection::{
    self, Batching, CallError, Connection, ScriptKind, ServerErrorText, is_forbidden_key, unexpected_reply,
};
use super::hash_slot::slot;
use super::reconnecting::{Endpoint, ReconnectingConnection, ServerId};
use super::scripts::{self, AcquireCall, AcquireReply, CounterRequest, Refund, ScriptRef, Scripts, TOKENS_MAX};
use super::sentinel::Sentinels;
use transom_config::redis::{Node, Nodes, StoreConfig};
use transom_limiter::store_key::StoreWindow;

/// Redirects that one call follows.
const REDIRECTS_MAX: u32 = 8;
/// Pause after `TRYAGAIN`, which a server sends while a slot moves.
const MOVING_SLOT_PAUSE: Duration = Duration::from_millis(5);
/// Half of the time limit of a probe.
const PROBE_STEP_TIMEOUT: Duration = Duration::from_millis(1000);
const PROBE_PERIOD_MS: u64 = 1000;

/// Cheap to clone.
#[derive(Clone)]
pub struct RedisClient(Rc<ClientState>);

struct ClientState {
    servers: Servers,
    scripts: Rc<Scripts>,
    prefix: String,
    opened: Rc<Cell<u64>>,
    /// The value of `opened` when the user had no right to a key. Until the next connection no call has keys of two slots,
    /// so that a forbidden key fails calls for this key only.
    key_forbidden: Cell<Option<u64>>,
}

enum Servers {
    /// One server, or the master that sentinels name.
    Single(Rc<ReconnectingConnection>),
    Cluster(Rc<Cluster>),
}

/// Why a call has no reply. The text is for the operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreError {
    /// No server can be reached. Whether the call was executed is unknown.
    Unreachable(String),
    /// This counter only: its key holds another type of value, or the user has no right to it.
    Key(String),
}

impl From<StoreError> for String {
    fn from(error: StoreError) -> String {
        let (StoreError::Unreachable(why) | StoreError::Key(why)) = error;
        why
    }
}

/// Why a script has no reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScriptError {
    /// For the operator.
    pub why: String,
    /// False if the server has not executed it for certain.
    pub may_have_run: bool,
}

impl RedisClient {
    /// Opens no connection yet.
    pub fn new(settings: &StoreConfig) -> RedisClient {
        RedisClient::with(Connector::new(settings), settings)
    }

    /// As [`RedisClient::new`], for calls with long replies.
    pub fn for_maps(settings: &StoreConfig) -> RedisClient {
        RedisClient::with(Connector::for_maps(settings), settings)
    }

    fn with(connector: Connector, settings: &StoreConfig) -> RedisClient {
        let connector = Rc::new(connector);
        let opened = Rc::new(Cell::new(0));
        let single = |endpoint| {
            Servers::Single(ReconnectingConnection::new(
                ServerId::ONLY,
                endpoint,
                Rc::clone(&connector),
                Rc::clone(&opened),
            ))
        };
        let servers = match &settings.nodes {
            Nodes::Single(node) => single(Endpoint::Fixed(node.clone())),
            Nodes::Sentinel { nodes, master } => {
                single(Endpoint::Sentinels(Sentinels::new(nodes.clone(), master.clone())))
            }
            Nodes::Cluster(seeds) => {
                Servers::Cluster(Cluster::new(seeds.clone(), Rc::clone(&connector), Rc::clone(&opened)))
            }
        };
        RedisClient(Rc::new(ClientState {
            servers,
            scripts: Rc::new(Scripts::default()),
            prefix: settings.prefix.clone(),
            opened,
            key_forbidden: Cell::new(None),
        }))
    }

    /// Acquires tokens in all counters or in none. The counters must be distinct and fit in one call. `gateway_ms` is the
    /// gateway's time.
    pub async fn acquire(&self, requests: &[CounterRequest], gateway_ms: u64) -> Result<AcquireReply, StoreError> {
        let base = requests.first().map_or("", |request| &*request.key_base);
        let gateway_ms = requests.iter().map(|request| request.computed_ms).fold(gateway_ms, u64::max);
        let mut window_ms = gateway_ms;
        for _ in 0..2 {
            let call_data = AcquireCall { requests: requests.to_vec(), gateway_ms, window_ms };
            let acquire = async |connection: &Rc<Connection>, importing| {
                let batching = if importing {
                    Batching::Never
                } else if self.calls_any_slots() {
                    Batching::Any
                } else {
                    Batching::SameBase
                };
                connection::acquire(connection, &self.0.scripts, call_data.clone(), batching).await
            };
            let (decision, node) = self.run(base, &acquire).await.map_err(|error| match error {
                StoreError::Key(why) if requests.iter().any(|request| slot(&request.key_base) != slot(base)) => {
                    StoreError::Key(format!("{why} or another key of the same request"))
                }
                error => error,
            })?;
            let wrong_type = |key| StoreError::Key(format!("{node}: key `{key}` holds a value that is not a counter"));
            let reply = decision.map_err(wrong_type)?;
            let AcquireReply::OtherWindow { time_ms } = reply else { return Ok(reply) };
            // Nothing was acquired: the first of the two windows has ended.
            window_ms = scripts::effective_ms(time_ms, gateway_ms);
            if !scripts::are_windows_known(requests, window_ms) {
                return Ok(reply);
            }
        }
        Ok(AcquireReply::OtherWindow { time_ms: window_ms })
    }

    /// Refunds tokens; returns how many the servers accepted.
    pub async fn refund(&self, refunds: &[Refund]) -> Result<u64, StoreError> {
        let mut accepted = 0;
        for refunds in refunds.chunk_by(|a, b| self.can_share_a_call(&a.key_base, &b.key_base)) {
            let call = |by| scripts::refund_command(&self.0.scripts.refund, by, refunds);
            let refund_call = async |connection: &Rc<Connection>, importing| {
                let reply = connection.run_script(ScriptKind::Refund, importing, &call).await?;
                scripts::parse_refund_reply(&reply).ok_or_else(|| unexpected_reply(&reply))
            };
            let base = refunds.first().map_or("", |refund| &*refund.key_base);
            accepted += self.run(base, &refund_call).await?.0;
        }
        Ok(accepted)
    }

    /// Runs a script at the server that has a key, once at most.
    pub async fn run_script(
        &self,
        key: &str,
        which: ScriptKind,
        call: &impl Fn(ScriptRef) -> Cmd,
    ) -> Result<Value, ScriptError> {
        let may_have_run = Cell::new(false);
        let run = async |connection: &Rc<Connection>, importing| {
            may_have_run.set(true);
            let reply = connection.run_script(which, importing, call).await;
            may_have_run.set(!matches!(reply, Err(CallError::Rejected(_))));
            reply
        };
        let reply = self.run(key, &run).await;
        let failed = |error: StoreError| ScriptError { why: error.into(), may_have_run: may_have_run.get() };
        reply.map(|(reply, _)| reply).map_err(failed)
    }

    /// Connects to every server and acquires from a short-lived probe key. Returns the server's time, Unix
    /// milliseconds.
    pub async fn probe(&self) -> Result<u64, StoreError> {
        self.with_probe_timeout(ServerId::ONLY, self.probe_all()).await
    }

    async fn with_probe_timeout(
        &self,
        server: ServerId,
        probe: impl Future<Output = Result<u64, StoreError>>,
    ) -> Result<u64, StoreError> {
        let why = |_elapsed| StoreError::Unreachable(format!("{}: no reply to a probe", self.name_of(server)));
        timeout(2 * PROBE_STEP_TIMEOUT, probe).await.map_err(why)?
    }

    /// Opens the connection for calls with this key base if there is none.
    pub async fn ensure_connected(&self, base: &str) -> Result<(), StoreError> {
        let no_call = async |_connection: &Rc<Connection>, _importing: bool| Ok(());
        self.run(base, &no_call).await.map(drop)
    }

    /// As [`RedisClient::probe`], for one server. A cluster node without slots need not be reachable.
    pub async fn probe_server(&self, server: ServerId) -> Result<u64, StoreError> {
        let Servers::Cluster(cluster) = &self.0.servers else { return self.probe().await };
        let probe = async {
            cluster.refresh().await.map_err(StoreError::Unreachable)?;
            let masters = cluster.masters(&format!("{}:{{#probe|", self.0.prefix));
            let base = masters.into_iter().map(|(_, base)| base).find(|base| self.server_of(base) == server);
            match base {
                Some(base) => self.probe_one(base).await,
                None => Ok(0),
            }
        };
        self.with_probe_timeout(server, probe).await
    }

    /// The server that has the counters with this key base, as far as is known.
    pub fn server_of(&self, base: &str) -> ServerId {
        match &self.0.servers {
            Servers::Single(_) => ServerId::ONLY,
            Servers::Cluster(cluster) => cluster.owner(slot(base)).unwrap_or(ServerId::ONLY),
        }
    }

    /// The server's name for the log.
    pub fn name_of(&self, server: ServerId) -> String {
        match &self.0.servers {
            Servers::Single(link) => link.name(),
            Servers::Cluster(cluster) => cluster.name_of(server).unwrap_or_else(|| "the cluster".to_owned()),
        }
    }

    /// Whether one call can cover counters with both key bases.
    pub fn can_share_a_call(&self, a: &str, b: &str) -> bool {
        self.calls_any_slots() || slot(a) == slot(b)
    }

    /// Whether one call can have keys of several slots.
    fn calls_any_slots(&self) -> bool {
        match &self.0.servers {
            Servers::Single(_) => self.0.key_forbidden.get() != Some(self.generation()),
            Servers::Cluster(_) => false,
        }
    }

    /// Number of connections opened so far. A new connection may lead to a server that lost counts.
    pub fn generation(&self) -> u64 {
        self.0.opened.get()
    }

    /// The open connections.
    pub fn connections(&self) -> Vec<Rc<Connection>> {
        match &self.0.servers {
            Servers::Single(link) => link.current().into_iter().collect(),
            Servers::Cluster(cluster) => cluster.connections(),
        }
    }

    async fn probe_all(&self) -> Result<u64, StoreError> {
        let masters = self.masters(&format!("{}:{{#probe|", self.0.prefix)).await;
        let masters = masters.map_err(StoreError::Unreachable)?;
        let probes: Vec<JoinHandle<_>> = masters
            .into_iter()
            .map(|(_, base)| {
                let store = self.clone();
                spawn_local(async move { store.probe_one(base).await })
            })
            .collect();
        let mut time_ms = 0;
        for reply in probes {
            let reply = reply.await.unwrap_or_else(|_| Err(StoreError::Unreachable("the gateway ends".to_owned())));
            time_ms = reply?.max(time_ms);
        }
        Ok(time_ms)
    }

    /// Every master, with a key base in one of its slots that begins with `prefix` and ends with `}`.
    pub async fn masters(&self, prefix: &str) -> Result<Vec<(Rc<ReconnectingConnection>, String)>, String> {
        match &self.0.servers {
            Servers::Single(link) => {
                link.check_master().await;
                Ok(vec![(Rc::clone(link), format!("{prefix}0}}"))])
            }
            Servers::Cluster(cluster) => {
                cluster.refresh().await?;
                Ok(cluster.masters(prefix))
            }
        }
    }

    /// Acquires from a short-lived key; returns the server's time, Unix milliseconds.
    pub async fn probe_one(&self, base: String) -> Result<u64, StoreError> {
        let at = StoreWindow::floating(PROBE_PERIOD_MS);
        let (limit, ceiling) = (u32::MAX, TOKENS_MAX);
        let request = CounterRequest {
            key_base: base.into(),
            window: at,
            limit,
            ceiling,
            need: 1,
            want: 1,
            used_min: 0,
            need_once_refused: 0,
            reserved_after_ms: 0,
            refund_used_max: None,
            counter: None,
            computed_ms: 0,
            generation: 0,
        };
        match self.acquire(&[request], 0).await? {
            AcquireReply::Granted { time_ms, .. }
            | AcquireReply::Refused { time_ms, .. }
            | AcquireReply::OtherWindow { time_ms } => Ok(time_ms),
        }
    }

    /// Runs `call` on the connection to the server that has the key; also returns that server.
    async fn run<T>(&self, base: &str, call: &impl Call<T>) -> Result<(T, Node), StoreError> {
        match &self.0.servers {
            Servers::Single(link) => {
                let connection = link.get().await.map_err(StoreError::Unreachable)?;
                match call(&connection, false).await {
                    Ok(reply) => Ok((reply, connection.node.clone())),
                    Err(failure) => {
                        let error = to_store_error(link, &connection, base, failure);
                        if let StoreError::Key(_) = error {
                            self.0.key_forbidden.set(Some(self.generation()));
                        }
                        Err(error)
                    }
                }
            }
            Servers::Cluster(cluster) => run_in_cluster(cluster, base, call).await,
        }
    }
}

/// A call on a connection; the flag says that the server is still importing the slot (`ASKING`).
trait Call<T>: AsyncFn(&Rc<Connection>, bool) -> Result<T, CallError> {}
impl<T, C: AsyncFn(&Rc<Connection>, bool) -> Result<T, CallError>> Call<T> for C {}

/// Runs a call at the master of the slot of a key base and follows redirects.
async fn run_in_cluster<T>(cluster: &Rc<Cluster>, base: &str, call: &impl Call<T>) -> Result<(T, Node), StoreError> {
    let slot = slot(base);
    let mut link = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
    let mut importing = false;
    let mut why = String::new();
    for _ in 0..REDIRECTS_MAX {
        let connection = match link.get().await {
            Ok(connection) => connection,
            Err(error) => {
                // The call was not sent. Another master of the slot, if there is one by now, can serve it.
                cluster.refresh().await.map_err(StoreError::Unreachable)?;
                let other = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
                if Rc::ptr_eq(&other, &link) {
                    return Err(StoreError::Unreachable(error));
                }
                (link, importing, why) = (other, false, error);
                continue;
            }
        };
        let error = match call(&connection, importing).await {
            Ok(reply) => return Ok((reply, connection.node.clone())),
            Err(CallError::Rejected(error)) => error,
            Err(failure) => {
                cluster.refresh_in_background();
                return Err(to_store_error(&link, &connection, base, failure));
            }
        };
        let to = parse_redirect(error.details().unwrap_or_default(), &connection.node);
        why = format!("{}: {}", connection.node, ServerErrorText(&error));
        match (error.code(), to) {
            ("MOVED", Some((_, node))) => (link, importing) = (cluster.moved(slot, node), false),
            ("ASK", Some((_, node))) => (link, importing) = (cluster.importing(node), true),
            ("TRYAGAIN", _) => {
                sleep(MOVING_SLOT_PAUSE).await;
                link = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
                importing = false;
            }
            _ => {
                cluster.refresh_in_background();
                return Err(to_store_error(&link, &connection, base, CallError::Rejected(error)));
            }
        }
    }
    Err(StoreError::Unreachable(why))
}

/// Turns a failed call into an error, and discards the connection where another one may help.
fn to_store_error(
    link: &ReconnectingConnection,
    connection: &Rc<Connection>,
    base: &str,
    failure: CallError,
) -> StoreError {
    let result = connection.describe(&failure);
    if let CallError::Rejected(error) = &failure
        && is_forbidden_key(error)
    {
        return StoreError::Key(format!("{result}: `{base}`"));
    }
    if let CallError::Rejected(error) = &failure
        && !is_wrong_server(error)
    {
        return StoreError::Unreachable(result);
    }
    link.discard(connection, &result);
    StoreError::Unreachable(result)
}

/// Whether the error says that another server serves.
fn is_wrong_server(error: &ServerError) -> bool {
    let details = error.details().unwrap_or_default();
    ["READONLY", "MASTERDOWN", "NOAUTH", "MOVED"].iter().any(|code| error.code() == *code || details.contains(code))
}
