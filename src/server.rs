//! Wiring: from a configuration to a running gateway, and its handle.
//!
//! One thread for each event loop, each with a runtime, listeners and connections of its own; the
//! loops share the counter table and the snapshot. The handle tells them to take over a new
//! configuration or to drain; signals and files are other rooms' business. `event_loop` is the life of one,
//! `error` why there is none.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_local;

use crate::access_log::{LogSender, WriterThread};
use crate::admin::{self, AcceptState, AdminState};
use crate::clock::Clock;
use crate::config::{AccessLog, Config, lint};
use crate::decision::DecisionService;
use crate::downstream::connection_limit::{ConnectionLimit, raise_descriptor_limit};
use crate::downstream::listener::InheritedSockets;
use crate::downstream::listener_context::{Listener, ListenerConfig, ListenerContext};
use crate::downstream::listeners::{Listeners, WorkerListener};
use crate::metrics::Registry;
use crate::metrics::events::{AccessLogMetrics, ExpiryGauges, ListenerMetrics, SnapshotMetrics};
use crate::metrics::redis::StoreMetrics;
use crate::persistence::background::BackgroundWriter;
use crate::persistence::counters::Counters;
use crate::proxy::compiled_config::CompiledConfig;
use crate::proxy::worker_state::WorkerState;
use crate::redis_store::Shared;
use crate::upstream::health_check;
use crate::upstream::server_health::{self, UpstreamHealth};
use error::{ReloadError, StartError, TooManyLayers};
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::RuleSet;
use transom_limiter::window::{END_MAX_MS, PERIOD_MAX_MS};
use worker::{DrainTimes, Order};

pub mod error;
mod worker;

/// How long a gateway that stops waits for requests that are on their way on connections that lie idle. Nobody is let
/// in meanwhile.
const LAST_ORDERS: Duration = Duration::from_secs(1);
/// How long before the end of its time a gateway that has a successor closes the connections that lie idle: enough to
/// part from them in good order. Half of its time where that is less: requests may be on their way on them.
const FAREWELL: Duration = Duration::from_secs(2);

/// A larger difference between the time of windows and the wall clock is worth a warning.
const CLOCK_OFFSET_MAX_S: u64 = 5;

/// How long the end waits for the last lines of the access log.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A running gateway.
pub struct Gateway {
    http: Vec<SocketAddr>,
    https: Vec<SocketAddr>,
    admin: Option<SocketAddr>,
    counters: Arc<Counters>,
    /// Some rules can not do yet what they are to do, because others count in the same memory.
    is_held: bool,
    keeper: Option<BackgroundWriter>,
    config: Config,
    pub registry: Arc<Registry>,
    expiries: ExpiryGauges,
    /// What requests that went away left charged.
    abandoned: Arc<DeferredRefunds>,
    ready: Arc<AtomicBool>,
    orders: Vec<UnboundedSender<Order>>,
    /// All sockets that it listens on, with the addresses as configured: a successor gets them.
    sockets: Vec<(SocketAddr, StdListener)>,
    doorway: watch::Sender<AcceptState>,
    loops: Vec<JoinHandle<()>>,
    office: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    /// What holds for new connections.
    terms: Arc<ListenerConfig>,
    capacity: Arc<ConnectionLimit>,
    /// Who answers the decision API, by the configuration that is in force.
    counsel: watch::Sender<Option<Arc<DecisionService>>>,
    /// The rules that are in force.
    rule_set: Option<Arc<RuleSet>>,
    /// The upstream servers, as all loops know them.
    upstream_health: watch::Sender<Vec<Arc<UpstreamHealth>>>,
    /// By which names the admin address may be asked.
    admin_hosts: watch::Sender<Vec<String>>,
    /// Who asks the servers how they are, once somebody should.
    prober: Option<JoinHandle<()>>,
    clock: Clock,
    /// Whether the time of windows was last found to differ from the wall clock.
    is_clock_off: bool,
    /// How many event loops there are.
    workers: usize,
    access: Option<LogSender>,
    writers: Vec<WriterThread>,
}

impl Gateway {
    /// Opens the addresses and starts the loops. It serves when this returns.
    pub fn start(config: Config, clock: Clock) -> Result<Gateway, StartError> {
        let gateway = Gateway::start_with(config, clock, InheritedSockets::default(), None)?;
        gateway.open();
        Ok(gateway)
    }

    /// Starts on the sockets that were opened for it, and opens the others. Nothing that can fail is left
    /// then, and it accepts nothing before it is told to open.
    /// `counters` are those of the process that it takes over from.
    pub fn start_with(
        config: Config,
        clock: Clock,
        mut inherited: InheritedSockets,
        counters: Option<OwnedFd>,
    ) -> Result<Gateway, StartError> {
        let workers = config.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        if !(1..END_MAX_MS - PERIOD_MAX_MS).contains(&clock.now().unix_ms) {
            return Err(StartError::Clock);
        }
        let layers = config.rules.iter().map(Rule::max_layers).sum();
        let opened = Counters::open(&config.counters, counters, layers, &clock);
        let (counters, alone) = opened.map_err(StartError::Counters)?;
        let counters = Arc::new(counters);
        let registry = Arc::new(Registry::default());
        raise_descriptor_limit();
        let terms = ListenerConfig::new(&config.listen, None).map_err(StartError::Tls)?;
        let opened = Listeners::open(&config.listen, workers, &mut inherited)
            .map_err(|(address, source)| StartError::Listen { address, source })?;
        let mut gateway = Gateway {
            http: opened.http,
            https: opened.https,
            admin: None,
            terms,
            capacity: ConnectionLimit::new(&config.listen),
            counters: Arc::clone(&counters),
            is_held: false,
            keeper: None,
            registry,
            expiries: ExpiryGauges::default(),
            abandoned: Arc::default(),
            ready: Arc::new(AtomicBool::new(true)),
            orders: Vec::new(),
            sockets: opened.sockets,
            doorway: watch::Sender::new(AcceptState::NotStarted),
            loops: Vec::new(),
            office: None,
            counsel: watch::Sender::default(),
            rule_set: None,
            upstream_health: watch::Sender::default(),
            admin_hosts: watch::Sender::new(config.admin.hosts.clone()),
            prober: None,
            clock: clock.clone(),
            is_clock_off: false,
            workers,
            access: None,
            writers: Vec::new(),
            config: config.clone(),
        };
        gateway.expiries = expiries(&gateway.registry, &config);
        if let Some(log) = &config.access_log {
            gateway.open_access_log(log).map_err(StartError::AccessLog)?;
        }
        let upstream_health = gateway.fleets_of(&config);
        gateway.start_prober(&upstream_health)?;
        let rule_set = gateway.ready_book(&config, !counters.in_use_by_others).map_err(StartError::Layers)?;
        drop(alone);
        let snapshot = CompiledConfig::new(config, counters.seed, rule_set, upstream_health);
        gateway.rule_set = Some(Arc::clone(&snapshot.rule_set));
        gateway.counsel.send_replace(Some(Arc::clone(&snapshot.decision_service)));
        if let Some(address) = gateway.config.listen.admin {
            gateway.start_office(address, &mut inherited)?;
        }
        if let Some(address) = inherited.unused_address() {
            return Err(StartError::Inherited(address));
        }
        gateway.start_loops(opened.by_worker, &snapshot)?;
        // Last: what does not come to serve leaves the snapshot alone.
        let meter = SnapshotMetrics::new(&gateway.registry);
        let keeper = BackgroundWriter::start(counters, clock, &gateway.config.counters, meter);
        gateway.keeper = Some(keeper.map_err(StartError::Thread)?);
        Ok(gateway)
    }

    /// Starts a loop for each list of doors. None accepts anything yet.
    fn start_loops(
        &mut self,
        by_loop: Vec<Vec<WorkerListener>>,
        snapshot: &Arc<CompiledConfig>,
    ) -> Result<(), StartError> {
        for (id, doors) in by_loop.into_iter().enumerate() {
            let (orders, inbox) = unbounded_channel();
            let (table, clock) = (Arc::clone(&self.counters.table), self.clock.clone());
            let (snapshot, access) = (Arc::clone(snapshot), self.access.clone());
            let (registry, terms) = (Arc::clone(&self.registry), Arc::clone(&self.terms));
            let (capacity, abandoned) = (Arc::clone(&self.capacity), Arc::clone(&self.abandoned));
            let run = move || {
                let worker =
                    Rc::new(WorkerState::new(id, table, clock, abandoned, Arc::clone(&registry), snapshot, access));
                let listener_context = Rc::new(ListenerContext::new(worker, capacity, terms));
                let listeners = doors.into_iter().map(|door| {
                    let meter = ListenerMetrics::new(&registry, id, &door.address.to_string(), door.https.is_some());
                    (door.socket, Rc::new(Listener::new(Rc::clone(&listener_context), meter, door.https)))
                });
                worker::run(Rc::clone(&listener_context), listeners.collect(), inbox)
            };
            self.loops.push(spawn(format!("loop-{id}"), run)?);
            self.orders.push(orders);
        }
        Ok(())
    }

    /// Lets connections in.
    pub fn open(&self) {
        self.tell(|| Order::Open);
        self.doorway.send_replace(AcceptState::Accepting);
    }

    /// The sockets that it listens on, with the addresses as configured.
    pub fn sockets(&self) -> &[(SocketAddr, StdListener)] {
        &self.sockets
    }

    /// What the counters lie in, for the process that takes its place.
    pub fn counters(&self) -> BorrowedFd<'_> {
        self.counters.descriptor()
    }

    fn tell(&self, order: impl Fn() -> Order) {
        for orders in &self.orders {
            // A loop that is gone has panicked, which was reported then.
            let _ = orders.send(order());
        }
    }

    /// The addresses it serves, with the ports that were chosen for port 0.
    pub fn http(&self) -> &[SocketAddr] {
        &self.http
    }

    /// As [`Gateway::http`], those that speak TLS.
    pub fn https(&self) -> &[SocketAddr] {
        &self.https
    }

    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// The configuration that is in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes over a configuration without dropping a connection or a count. Requests that are under
    /// way finish on the old one.
    pub fn reload(&mut self, config: Config) -> Result<(), ReloadError> {
        for (name, same) in [
            ("the addresses in `listen`", config.listen.has_addresses_of(&self.config.listen)),
            ("`workers`", config.workers == self.config.workers),
            ("`counters`", config.counters == self.config.counters),
        ] {
            if !same {
                return Err(ReloadError::NeedsRestart(name));
            }
        }
        let terms =
            ListenerConfig::new(&config.listen, Some((&self.config.listen, &self.terms))).map_err(ReloadError::Tls)?;
        match &config.access_log {
            None => self.access = None,
            log if *log == self.config.access_log => {}
            Some(log) => self.open_access_log(log).map_err(ReloadError::AccessLog)?,
        }
        // Last of what can fail: others may write by what it makes known, so this process has to read by it.
        let rule_set = self.ready_book(&config, false).map_err(ReloadError::Layers)?;
        self.terms = terms;
        // What the reload before took away may have ended meanwhile.
        self.registry.remove_unused();
        self.expiries = expiries(&self.registry, &config);
        self.capacity.apply(&config.listen);
        self.config = config.clone();
        self.admin_hosts.send_replace(config.admin.hosts.clone());
        let upstream_health = self.fleets_of(&config);
        if let Err(error) = self.start_prober(&upstream_health) {
            tracing::error!(%error, "servers are not checked");
        }
        let snapshot = CompiledConfig::new(config, self.counters.seed, rule_set, upstream_health);
        self.rule_set = Some(Arc::clone(&snapshot.rule_set));
        self.counsel.send_replace(Some(Arc::clone(&snapshot.decision_service)));
        self.tell(|| Order::Adopt(Arc::clone(&snapshot), Arc::clone(&self.terms), self.access.clone()));
        Ok(())
    }

    /// Lets rules do what they could not while others counted in the same memory, once no other does, and compares the
    /// clocks.
    pub fn catch_up(&mut self) {
        self.compare_clocks();
        if self.is_held
            && self.counters.with_exclusive_use(|| ()).is_some()
            && let Err(error) = self.reload(self.config.clone())
        {
            tracing::error!("rules do not roll over, wait, reserve or split as they should: {error}");
        }
    }

    /// Warns once when the time of windows begins to differ from the wall clock, and tells when it no longer does.
    fn compare_clocks(&mut self) {
        let offset_s = self.clock.offset_s();
        let is_off = offset_s.unsigned_abs() > CLOCK_OFFSET_MAX_S;
        match (std::mem::replace(&mut self.is_clock_off, is_off), is_off) {
            (false, true) => {
                let side = if offset_s < 0 { "behind" } else { "ahead of" };
                let seconds = offset_s.unsigned_abs();
                tracing::warn!(
                    "windows follow a clock that is {seconds} s {side} this machine's: the machine's clock was stepped, or the \
                     clock of the store is another; tokens and certificates are checked by the machine's"
                );
            }
            (true, false) => tracing::info!("windows follow this machine's clock again"),
            (true, true) | (false, false) => {}
        }
    }

    /// The rules made ready to read and write counters as is known to all who count in the same memory. What is new can
    /// only be made known while nobody else counts there: `alone`, if that is certain already.
    fn ready_book(&mut self, config: &Config, alone: bool) -> Result<RuleSet, TooManyLayers> {
        let ledger = &self.counters.formats;
        let mut rule_set = RuleSet::new(&config.rules, self.counters.seed, self.rule_set.as_deref());
        let wanted = rule_set.counter_formats();
        if !ledger.formats().covers(&wanted) {
            let join = || ledger.join(&wanted);
            let joined = if alone { Some(join()) } else { self.counters.with_exclusive_use(join) };
            joined.transpose().map_err(|_full| TooManyLayers)?;
        }
        let ways = ledger.formats();
        rule_set.adopt_formats(&ways);
        let is_held = rule_set.restrict_to_formats(&ways);
        if is_held && !self.is_held {
            tracing::warn!(
                "rules that are to roll over, wait, reserve or split otherwise than before have plain windows until no \
                 other process counts in the same memory"
            );
        }
        self.is_held = is_held;
        Ok(rule_set)
    }

    /// Opens the access log again, which may have been moved away to be rotated.
    pub fn reopen_access_log(&self) {
        self.access.iter().for_each(LogSender::reopen);
    }

    /// Stops accepting, lets requests finish for as long as the configuration says, and returns when
    /// the last loop has ended. Readiness goes down first.
    pub fn drain(self) {
        self.ready.store(false, Ordering::Release);
        let limit = self.config.timeouts.drain;
        self.end(DrainTimes { patience: LAST_ORDERS, limit });
    }

    /// As [`Gateway::drain`], where another process serves on the same sockets already. So nobody misses this one,
    /// and connections that lie idle are kept for as long as there is time: whoever asks for something on one is
    /// answered, and comes to the other the next time.
    pub fn drain_for_successor(self) {
        self.doorway.send_replace(AcceptState::HandedOver);
        let limit = self.config.timeouts.drain;
        self.end(DrainTimes { patience: limit - FAREWELL.min(limit / 2), limit });
    }

    /// What makes a drain that has begun let go of connections that lie idle.
    pub fn release(&self) -> impl Fn() + use<> {
        let loops = self.orders.clone();
        move || loops.iter().for_each(|orders| drop(orders.send(Order::Release)))
    }

    fn end(mut self, pace: DrainTimes) {
        // As long as one descriptor of a socket is there, clients can connect to it.
        self.sockets.clear();
        self.tell(|| Order::Drain(pace));
        for thread in self.loops.drain(..) {
            join(thread);
        }
        // The prober runs for as long as it could be told of other servers.
        drop(self.upstream_health);
        self.prober.into_iter().for_each(join);
        if let Some((stop, thread)) = self.office.take() {
            let _ = stop.send(());
            join(thread);
        }
        // Nothing is counted any more.
        self.keeper.take().into_iter().for_each(BackgroundWriter::finish);
        self.access = None;
        for writer in self.writers.drain(..) {
            writer.finish(LAST_LINES);
        }
    }

    fn open_access_log(&mut self, log: &AccessLog) -> io::Result<()> {
        let meter = AccessLogMetrics::new(&self.registry, self.writers.len());
        let (sink, writer) = LogSender::open(log, meter)?;
        self.access = Some(sink);
        self.writers.push(writer);
        Ok(())
    }

    /// The servers of a configuration, with what is known of them, told to whoever watches.
    fn fleets_of(&self, config: &Config) -> Vec<Arc<UpstreamHealth>> {
        let former = self.upstream_health.borrow().clone();
        let upstream_health =
            server_health::build_upstream_health(config, &former, &self.registry, self.workers, self.clock.instant());
        self.upstream_health.send_replace(upstream_health.clone());
        upstream_health
    }

    /// Starts the checks of servers, if there are any and they do not run yet.
    fn start_prober(&mut self, upstream_health: &[Arc<UpstreamHealth>]) -> Result<(), StartError> {
        if self.prober.is_none() && health_check::is_enabled(upstream_health) {
            let (upstream_health, clock) = (self.upstream_health.subscribe(), self.clock.clone());
            self.prober = Some(spawn("health".to_owned(), move || health_check::run(upstream_health, clock))?);
        }
        Ok(())
    }

    fn start_office(&mut self, address: SocketAddr, inherited: &mut InheritedSockets) -> Result<(), StartError> {
        let (registry, counters, clock) = (Arc::clone(&self.registry), Arc::clone(&self.counters), self.clock.clone());
        let (ready, doorway) = (Arc::clone(&self.ready), self.doorway.subscribe());
        let (counsel, upstream_health) = (self.counsel.subscribe(), self.upstream_health.subscribe());
        let hosts = self.admin_hosts.subscribe();
        let (settings, owner) = (self.config.counters.shared.clone(), self.workers);
        let abandoned = Arc::clone(&self.abandoned);
        let failed = |source| StartError::Listen { address, source };
        let handed = inherited.take(address).into_iter().next();
        let listener = handed.map_or_else(|| StdListener::bind(address), Ok).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        self.sockets.push((address, listener.try_clone().map_err(failed)?));
        self.admin = Some(listener.local_addr().map_err(failed)?);
        let (stop, stopped) = oneshot::channel();
        let run = move || async move {
            let meter = || StoreMetrics::new(&registry, owner);
            let shared = settings
                .map(|settings| Shared::new(&settings, Arc::clone(&counters.table), clock.clone(), abandoned, meter()));
            shared.iter().for_each(|shared| drop(spawn_local(Rc::clone(shared).run())));
            let office = AdminState {
                registry,
                counters,
                clock,
                ready,
                accept_state: doorway,
                hosts,
                decision_service: counsel,
                upstream_health,
                shared,
            };
            tokio::select! {
                served = admin::serve(listener, Rc::new(office)) => {
                    if let Err(error) = served {
                        tracing::error!(%error, "the admin address is not served");
                    }
                }
                // Told to stop, or the handle is gone.
                _ = stopped => {}
            }
        };
        self.office = Some((stop, spawn("admin".to_owned(), run)?));
        Ok(())
    }
}

/// When certificates end, and revocation lists.
fn expiries(registry: &Registry, config: &Config) -> ExpiryGauges {
    let certificates = config.listen.https.iter().flat_map(|https| &https.tls.certificates);
    let certificates = certificates.map(|certificate| (certificate.file.as_str(), certificate.not_after_s));
    let lists = lint::revocation_lists(config).map(|list| (list.file.as_str(), list.next_update_s));
    ExpiryGauges::new(registry, certificates, lists)
}

/// Starts a thread with a runtime of its own, and returns when that runtime stands.
fn spawn<F, R>(name: String, run: F) -> Result<JoinHandle<()>, StartError>
where
    F: FnOnce() -> R + Send + 'static,
    R: Future<Output = ()>,
{
    let (stands, waits) = mpsc::sync_channel(1);
    let body = move || match Builder::new_current_thread().enable_all().build_local(LocalOptions::default()) {
        Ok(runtime) => {
            // Whoever started the thread waits below.
            let _ = stands.send(Ok(()));
            // Within the future, so that what it makes finds the runtime.
            runtime.block_on(async { run().await });
            // A name that is being looked up is not waited for.
            runtime.shutdown_background();
        }
        Err(error) => drop(stands.send(Err(error))),
    };
    let thread = thread::Builder::new().name(name).spawn(body).map_err(StartError::Thread)?;
    let stood = waits.recv().unwrap_or_else(|_gone| Err(io::Error::other("the thread ended at once")));
    stood.map(|()| thread).map_err(StartError::Thread)
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the gateway panicked");
    }
}
