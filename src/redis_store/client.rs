//! The servers that counters are shared through, as one event loop sees them: connections of its own, which are opened
//! when they are first needed.
//!
//! Calls of many tasks go out on one connection per server, together where they come together, and none waits for a turn. A
//! call that was sent is never sent again, unless the server says that it did not do it: because it does not know
//! the script, or the slot is elsewhere. Who asks decides how long he waits; whoever goes away leaves nothing behind.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use redis::ServerError;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::batch::{self, Together, strange};
use super::cluster::{Cluster, redirected};
use super::connect::Dial;
use super::connection::{Connection, Failure, ServerErrorText, Which};
use super::hash_slot::slot;
use super::reconnecting::{Endpoint, Link, Server};
use super::scripts::{self, AcquireCall, Answer, At, CounterRequest, Refund, Scripts, TOKENS_MAX};
use super::sentinel::Sentinels;
use crate::config::redis::{Node, Nodes, Shared};

/// How often a call is sent after a slot that moves.
const HOPS_MAX: u32 = 8;
/// While some keys of a slot are here and some there, one waits.
const BETWEEN: Duration = Duration::from_millis(5);
/// Until a probe is given up.
const PATIENCE: Duration = Duration::from_millis(1000);
const PROBE_PERIOD_MS: u64 = 1000;

/// Cheap to clone.
#[derive(Clone)]
pub struct RedisClient(Rc<Inner>);

struct Inner {
    servers: Servers,
    scripts: Rc<Scripts>,
    prefix: String,
    opened: Rc<Cell<u64>>,
}

enum Servers {
    /// Also the master that sentinels know.
    One(Rc<Link>),
    Cluster(Rc<Cluster>),
}

/// Why there is no answer; texts for an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreError {
    /// No server that can serve now. Whether the call was done is not known.
    Unreachable(String),
    /// This counter only: what lies under its key is none.
    Key(String),
}

impl RedisClient {
    /// Connects nowhere yet.
    pub fn new(settings: &Shared) -> RedisClient {
        let dial = Rc::new(Dial::new(settings));
        let opened = Rc::new(Cell::new(0));
        let link = |way| Servers::One(Link::new(Server::ONLY, way, Rc::clone(&dial), Rc::clone(&opened)));
        let servers = match &settings.nodes {
            Nodes::Single(node) => link(Endpoint::Fixed(node.clone())),
            Nodes::Sentinel { nodes, master } => {
                link(Endpoint::Sentinels(Sentinels::new(nodes.clone(), master.clone())))
            }
            Nodes::Cluster(seeds) => {
                Servers::Cluster(Cluster::new(seeds.clone(), Rc::clone(&dial), Rc::clone(&opened)))
            }
        };
        RedisClient(Rc::new(Inner {
            servers,
            scripts: Rc::new(Scripts::default()),
            prefix: settings.prefix.clone(),
            opened,
        }))
    }

    /// Takes tokens of all counters or of none. All must be different ones, of one call: see
    /// [`Store::is_one_call`]. `floor_ms` is the gateway's time.
    pub async fn take(&self, wants: &[CounterRequest], floor_ms: u64) -> Result<Answer, StoreError> {
        let base = wants.first().map_or("", |want| &*want.base);
        let floor_ms = wants.iter().map(|want| want.asked_ms).fold(floor_ms, u64::max);
        let mut at_ms = floor_ms;
        for _ in 0..2 {
            let ask = AcquireCall { wants: wants.to_vec(), floor_ms, at_ms };
            let take = async |line: &Rc<Connection>, importing| {
                let in_cluster = matches!(self.0.servers, Servers::Cluster(_));
                let way = if importing {
                    Together::Never
                } else if in_cluster {
                    Together::SameBase
                } else {
                    Together::Any
                };
                batch::take(line, &self.0.scripts, ask.clone(), way).await
            };
            let (decision, node) = self.run(base, &take).await?;
            let holds = |key| StoreError::Key(format!("{node}: `{key}` holds something else than a counter"));
            let answer = decision.map_err(holds)?;
            let Answer::OtherWindow { time_ms } = answer else { return Ok(answer) };
            // Nothing was taken, because the first of the windows is over.
            at_ms = scripts::effective_ms(time_ms, floor_ms);
            if !scripts::is_known_at(wants, at_ms) {
                return Ok(answer);
            }
        }
        Ok(Answer::OtherWindow { time_ms: at_ms })
    }

    /// Gives tokens back, and tells how many that were.
    pub async fn give(&self, gifts: &[Refund]) -> Result<u64, StoreError> {
        let mut given = 0;
        for gifts in gifts.chunk_by(|a, b| self.is_one_call(&a.base, &b.base)) {
            let call = |by| scripts::give(&self.0.scripts.give, by, gifts);
            let give = async |line: &Rc<Connection>, importing| {
                let said = line.run(Which::Give, importing, &call).await?;
                scripts::given(&said).ok_or_else(|| strange(&said))
            };
            let base = gifts.first().map_or("", |gift| &*gift.base);
            given += self.run(base, &give).await?.0;
        }
        Ok(given)
    }

    /// Connects to every server that is needed, and really counts there, under a key of its own that is soon gone.
    pub async fn probe(&self) -> Result<u64, StoreError> {
        self.in_time(Server::ONLY, self.probe_all()).await
    }

    async fn in_time(
        &self,
        server: Server,
        probe: impl Future<Output = Result<u64, StoreError>>,
    ) -> Result<u64, StoreError> {
        let why = |_elapsed| StoreError::Unreachable(format!("{}: no answer to a probe", self.name_of(server)));
        timeout(2 * PATIENCE, probe).await.map_err(why)?
    }

    /// Sees to it that there is a connection for a call with this base, or tells why there is none.
    pub async fn ready(&self, base: &str) -> Result<(), StoreError> {
        let nothing = async |_line: &Rc<Connection>, _importing: bool| Ok(());
        self.run(base, &nothing).await.map(drop)
    }

    /// As [`Store::probe`], for one server; a server of a cluster that has no slots any more need not be there.
    pub async fn probe_server(&self, server: Server) -> Result<u64, StoreError> {
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
        self.in_time(server, probe).await
    }

    /// Which server has the counters with this base, as far as it is known.
    pub fn server_of(&self, base: &str) -> Server {
        match &self.0.servers {
            Servers::One(_) => Server::ONLY,
            Servers::Cluster(cluster) => cluster.owner(slot(base)).unwrap_or(Server::ONLY),
        }
    }

    /// What a server is called, for the log.
    pub fn name_of(&self, server: Server) -> String {
        match &self.0.servers {
            Servers::One(link) => link.name(),
            Servers::Cluster(cluster) => cluster.name_of(server).unwrap_or_else(|| "the cluster".to_owned()),
        }
    }

    /// Whether counters with these bases can be asked for in one call.
    pub fn is_one_call(&self, a: &str, b: &str) -> bool {
        match &self.0.servers {
            Servers::One(_) => true,
            Servers::Cluster(_) => slot(a) == slot(b),
        }
    }

    /// Grows with every new connection to a server: what it counted may have been lost in between.
    pub fn generation(&self) -> u64 {
        self.0.opened.get()
    }

    /// The connections that stand.
    pub fn standing(&self) -> Vec<Rc<Connection>> {
        match &self.0.servers {
            Servers::One(link) => link.standing().into_iter().collect(),
            Servers::Cluster(cluster) => cluster.standing(),
        }
    }

    async fn probe_all(&self) -> Result<u64, StoreError> {
        let stem = format!("{}:{{#probe|", self.0.prefix);
        let bases = match &self.0.servers {
            Servers::One(link) => {
                link.check_master().await;
                vec![format!("{stem}0}}")]
            }
            Servers::Cluster(cluster) => {
                cluster.refresh().await.map_err(StoreError::Unreachable)?;
                cluster.masters(&stem).into_iter().map(|(_, base)| base).collect()
            }
        };
        let asked: Vec<JoinHandle<_>> = bases
            .into_iter()
            .map(|base| {
                let store = self.clone();
                spawn_local(async move { store.probe_one(base).await })
            })
            .collect();
        let mut time_ms = 0;
        for said in asked {
            let said = said.await.unwrap_or_else(|_| Err(StoreError::Unreachable("the gateway ends".to_owned())));
            time_ms = said?.max(time_ms);
        }
        Ok(time_ms)
    }

    async fn probe_one(&self, base: String) -> Result<u64, StoreError> {
        let at = At::Floating { period_ms: PROBE_PERIOD_MS };
        let (limit, ceiling) = (u32::MAX, TOKENS_MAX);
        let want = CounterRequest { base: base.into(), at, limit, ceiling, need: 1, want: 1, least: 0, asked_ms: 0 };
        match self.take(&[want], 0).await? {
            Answer::Granted { time_ms, .. } | Answer::Refused { time_ms, .. } | Answer::OtherWindow { time_ms } => {
                Ok(time_ms)
            }
        }
    }

    /// Does something on the connection to the server that has a counter; also tells which that was.
    async fn run<T>(&self, base: &str, call: &impl Call<T>) -> Result<(T, Node), StoreError> {
        match &self.0.servers {
            Servers::One(link) => {
                let line = link.line().await.map_err(StoreError::Unreachable)?;
                match call(&line, false).await {
                    Ok(said) => Ok((said, line.node.clone())),
                    Err(failure) => Err(fallen(link, &line, failure)),
                }
            }
            Servers::Cluster(cluster) => run_in(cluster, slot(base), call).await,
        }
    }
}

/// What is done on a connection; whether the server only takes the slot over yet.
trait Call<T>: AsyncFn(&Rc<Connection>, bool) -> Result<T, Failure> {}
impl<T, C: AsyncFn(&Rc<Connection>, bool) -> Result<T, Failure>> Call<T> for C {}

/// Runs a call at the master of a slot, wherever that is by now.
async fn run_in<T>(cluster: &Rc<Cluster>, slot: u16, call: &impl Call<T>) -> Result<(T, Node), StoreError> {
    let mut link = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
    let mut importing = false;
    let mut why = String::new();
    for _ in 0..HOPS_MAX {
        let line = match link.line().await {
            Ok(line) => line,
            Err(error) => {
                // It was not sent: if the slot has another master by now, that one is asked.
                cluster.refresh().await.map_err(StoreError::Unreachable)?;
                let other = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
                if Rc::ptr_eq(&other, &link) {
                    return Err(StoreError::Unreachable(error));
                }
                (link, importing, why) = (other, false, error);
                continue;
            }
        };
        let error = match call(&line, importing).await {
            Ok(said) => return Ok((said, line.node.clone())),
            Err(Failure::Said(error)) => error,
            Err(failure) => {
                cluster.doubt();
                return Err(fallen(&link, &line, failure));
            }
        };
        let to = redirected(error.details().unwrap_or_default(), &line.node);
        why = format!("{}: {}", line.node, ServerErrorText(&error));
        match (error.code(), to) {
            ("MOVED", Some((_, node))) => (link, importing) = (cluster.moved(slot, node), false),
            ("ASK", Some((_, node))) => (link, importing) = (cluster.importing(node), true),
            ("TRYAGAIN", _) => {
                sleep(BETWEEN).await;
                link = cluster.master(slot).await.map_err(StoreError::Unreachable)?;
                importing = false;
            }
            _ => {
                cluster.doubt();
                return Err(fallen(&link, &line, Failure::Said(error)));
            }
        }
    }
    Err(StoreError::Unreachable(why))
}

/// What a failure means for who asked, and for the connection.
fn fallen(link: &Link, line: &Rc<Connection>, failure: Failure) -> StoreError {
    let told = line.blame(&failure);
    if let Failure::Said(error) = &failure
        && !leads_elsewhere(error)
    {
        return StoreError::Unreachable(told);
    }
    link.drop_line(line, &told);
    StoreError::Unreachable(told)
}

/// Whether another connection may lead to a server that serves.
fn leads_elsewhere(error: &ServerError) -> bool {
    let details = error.details().unwrap_or_default();
    ["READONLY", "MASTERDOWN", "NOAUTH", "MOVED"].iter().any(|code| error.code() == *code || details.contains(code))
}
